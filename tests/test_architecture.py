"""The rules of the architecture: import directions, and who knows what.

Each file is parsed once. Each rule is one test, whose message lists every
violation as `file:line: what is wrong`.
"""

import ast
from collections.abc import Iterator
import dataclasses
import functools
import importlib
import importlib.metadata
import pathlib
import re
import shutil
import sys
import tomllib
import types

import pytest

from jaxline import base_config

ROOT = pathlib.Path(__file__).resolve().parent.parent

LEAVES = (
  'async_lib',
  'checkpoint.__init__',
  'checkpoint.owner',
  'checkpoint.spool',
  'checkpoint.store',
  'chips',
  'compat',
  'compilation_cache',
  'counting',
  'debug',
  'disk',
  'distributed',
  'goodput',
  'inputs.__init__',
  'mesh',
  'metrics',
  'xla',
)
# A module imports only from lower steps, from its own package, or, if it is a
# leaf, from other leaves. `a.b` has a step of its own within its package;
# `a.__init__` is the package itself, with the rows of its config keys.
STEPS = (
  ('errors', 'watchdog'),
  ('keys',),
  LEAVES,
  ('supervision',),
  ('launch', 'partitioning'),
  ('placement',),
  ('base_config',),
  ('experiment',),
  ('compat.experiments',),
  ('checkpoint', 'inputs'),
  ('compat.adapters',),
  ('evaluation', 'feed', 'pipeline', 'train_state'),
  ('train_step',),
  ('accumulate',),
  ('decode', 'exits', 'runs', 'sharded', 'train'),
  ('aot', 'compat.threads'),
  ('platform',),
  ('runs.replay',),
  ('runs.bisect', 'runs.explain'),
  ('runs.__main__',),
  ('api', 'utils'),
)
UNITS = {name: step for step, names in enumerate(STEPS) for name in names}

# The examples whose folders are made to be copied.
COPIED = ('image', 'lm', 'writers')

NEURAL_NETWORK_LIBRARIES = {'haiku', 'flax', 'equinox', 'torch', 'keras'}
TENSORFLOW = {'tensorflow', 'tensorflow_datasets', 'seqio', 'lingvo', 'clu'}


@dataclasses.dataclass(frozen=True)
class Module:
  """A parsed file.

  Attributes:
    path: relative to the repository.
    name: `checkpoint.memory` for jaxline/checkpoint/memory.py, '' for the
      package itself; the path of a file outside of the library.
    source: its text.
    tree: its syntax tree.
    nodes: all nodes of the tree.
  """

  path: pathlib.Path
  name: str
  source: str
  tree: ast.Module
  nodes: tuple[ast.AST, ...]

  def at(self, node: ast.AST, text: str) -> str:
    return f'{self.path}:{getattr(node, "lineno", 1)}: {text}'

  @functools.cached_property
  def imports(self) -> tuple[tuple[ast.AST, str], ...]:
    """Each import, also inside functions, with the module's full name."""
    return tuple(
      (node, name) for node in self.nodes for name in imported_by(node)
    )


@functools.cache
def parsed(path: pathlib.Path) -> Module:
  relative = path.relative_to(ROOT)
  name = str(relative)
  if relative.parts[0] == 'jaxline':
    parts = relative.with_suffix('').parts[1:]
    name = '.'.join(part for part in parts if part != '__init__')
  source = path.read_text(encoding='utf-8')
  tree = ast.parse(source, str(relative))
  return Module(relative, name, source, tree, tuple(ast.walk(tree)))


def all_in(*folders: str) -> list[Module]:
  return [
    parsed(path)
    for folder in folders
    for path in sorted((ROOT / folder).rglob('*.py'))
  ]


LIBRARY = all_in('jaxline')
EXAMPLES = [*all_in('examples', 'configs'), parsed(ROOT / 'experiment.py')]


@functools.cache
def is_module(name: str) -> bool:
  path = ROOT.joinpath(*name.split('.'))
  return path.with_suffix('.py').exists() or (path / '__init__.py').exists()


def imported_by(node: ast.AST) -> Iterator[str]:
  """Yields the full names of the modules that a statement imports."""
  if isinstance(node, ast.Import):
    for alias in node.names:
      yield alias.name
  elif isinstance(node, ast.ImportFrom) and node.level:
    yield '.'  # Relative.
  elif isinstance(node, ast.ImportFrom):
    for alias in node.names:
      # `from a import b` may import the module a.b.
      name = f'{node.module}.{alias.name}'
      yield name if is_module(name) else node.module


def library_imports(module: Module) -> Iterator[tuple[ast.AST, str]]:
  for node, name in module.imports:
    if name.startswith('jaxline.'):
      yield node, name.removeprefix('jaxline.')


def unit_of(name: str) -> str:
  """Returns what a module belongs to in `STEPS`."""
  if f'{name}.__init__' in UNITS:
    return f'{name}.__init__'
  return name if name in UNITS else name.split('.')[0]


def name_of(node: ast.AST) -> str:
  """Returns the last name of an expression: `config` for `self.config`."""
  if isinstance(node, ast.Attribute):
    return node.attr
  return node.id if isinstance(node, ast.Name) else ''


def refuse(violations) -> None:
  """Fails with a list of all violations, if there are any."""
  found = list(violations)
  assert not found, '\n'.join(['', *found])


# Imports.


def test_only_examples_that_are_copied_import_relatively():
  """A copy of the folder must import the copy, and a move of a file show."""
  refuse(
    module.at(node, 'a relative import')
    for module in LIBRARY + EXAMPLES
    for node, name in module.imports
    if name == '.' and not {*module.path.parts[1:2]} & {*COPIED}
  )
  refuse(
    module.at(node, f'{name} is this folder: import it relatively')
    for module in EXAMPLES
    for node, name in module.imports
    for own in COPIED
    if own in module.path.parts[1:2] and name.startswith(f'examples.{own}')
  )


@pytest.mark.parametrize('name', ['image', 'lm'])
def test_a_copy_of_an_example_uses_the_copy(name, tmp_path, monkeypatch):
  if name == 'image':
    pytest.importorskip('sklearn')
  copy = f'copy_of_{name}'
  shutil.copytree(ROOT / 'examples' / name, tmp_path / copy)
  monkeypatch.syspath_prepend(tmp_path)
  owners = {}
  for path in sorted((tmp_path / copy).glob('[!_]*.py')):  # Its tests too.
    module = importlib.import_module(f'{copy}.{path.stem}')
    assert module.__file__ == str(path)
    for key, value in vars(module).items():
      is_module = isinstance(value, types.ModuleType)
      owner = value.__name__ if is_module else getattr(value, '__module__', '')
      owners[f'{path.name}: {key}'] = str(owner)
  assert f'{copy}.model' == owners['experiment.py: model']
  original = f'examples.{name}.'
  assert not [k for k, x in owners.items() if f'{x}.'.startswith(original)]
  # And its README names the modules that it shares with the original.
  readme = (tmp_path / copy / 'README.md').read_text(encoding='utf-8')
  shared = {x for x in owners.values() if x.startswith('examples.')}
  missing = {x for x in shared if f'{x.replace(".", "/")}.py' not in readme}
  assert not missing
  if name == 'lm':
    assert 'examples.transformer' in shared
    assert '`transformer.causal_attention`' in readme


def test_what_is_imported_is_declared():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  extras = {'': project['dependencies'], **project['optional-dependencies']}
  declared = {
    re.split(r'[\[<>=,]', x)[0].lower().replace('_', '-')
    for extra, requirements in extras.items()
    for x in (extra, *requirements)  # `mlflow` needs mlflow-skinny.
  }
  distributions = importlib.metadata.packages_distributions()

  def is_declared(top):
    names = distributions.get(top, [top])  # Of what is not installed.
    return any(x.lower().replace('_', '-') in declared for x in names)

  own = {'.', 'benchmarks', 'configs', 'examples', 'jaxline', 'tests'}
  own.add('lingvo')  # It is tested where it is installed.
  refuse(
    module.at(node, f'pyproject.toml does not name {name}')
    for module in [*LIBRARY, *EXAMPLES, *all_in('docs')]
    for node, name in module.imports
    for top in [name.split('.')[0] or '.']
    if top not in own | sys.stdlib_module_names and not is_declared(top)
  )


def test_every_module_has_its_step():
  refuse(
    f'{module.path}:1: add {unit_of(module.name)!r} to STEPS'
    for module in LIBRARY
    if module.name and unit_of(module.name) not in UNITS
  )


def test_imports_go_down():
  def step(unit):
    return UNITS.get(unit, len(STEPS))

  def goes_down(name, imported):
    a, b = unit_of(name), unit_of(imported)
    is_program = name.endswith('.__main__')  # Stands above everything.
    both_leaves = a in LEAVES and b in LEAVES
    return a == b or is_program or both_leaves or step(b) < step(a)

  refuse(
    module.at(node, f'jaxline.{module.name} imports jaxline.{imported}')
    for module in LIBRARY
    for node, imported in library_imports(module)
    if not goes_down(module.name, imported)
  )


def test_no_module_imports_itself_through_others():
  graph = {m.name: {name for _, name in library_imports(m)} for m in LIBRARY}

  def visit(name, above):
    assert name not in above, ' -> '.join([*above, name])
    for imported in graph.get(name, ()):
      visit(imported, [*above, name])

  for name in graph:
    visit(name, [])


def test_the_library_is_neutral():
  """No neural-network library; TensorFlow only where it is used."""
  ours = {'examples', 'configs', 'tests', 'benchmarks'}

  def is_refused(module, node, package):
    if package in ours | NEURAL_NETWORK_LIBRARIES:
      return True
    if package not in TENSORFLOW:
      return False
    return node in module.tree.body or not module.name.startswith('inputs')

  refuse(
    module.at(node, f'imports {name}')
    for module in LIBRARY
    for node, name in module.imports
    if is_refused(module, node, name.split('.')[0])
  )


def test_examples_do_not_import_each_other():
  # Modules directly in examples/ are for all of them.
  shared = {path.stem for path in (ROOT / 'examples').glob('*.py')}

  def others(module):
    own = module.path.parts[1:2]
    used = {
      name.split('.')[1]
      for _, name in module.imports
      if name.startswith('examples.')
    }
    return sorted(used - shared - {*own})

  refuse(
    f'{module.path}:1: imports {others(module)}'
    for module in EXAMPLES
    # A config may ask the one example that it configures for its numbers.
    if len(others(module)) > (module.path.parts[0] == 'configs')
  )


# Who knows what.


# Names that only some modules may use, and what begins the names of these.
RESERVED = {
  'flags': (
    {'FLAGS', 'config_flags', 'absl.flags', 'absl.app'},
    # `indexed` marks the flags as parsed, for Grain, which has some of its own.
    ('platform', 'inputs.indexed', 'examples/'),
  ),
  'the mesh': (
    {'Mesh', 'NamedSharding', 'PartitionSpec', 'jax.make_mesh'},
    ('mesh', 'partitioning', 'placement', 'compat.devices', 'compat.op_by_op'),
  ),
  'suggestions': ({'difflib'}, ('errors', 'examples/pax/base_layer.py')),
}


@pytest.mark.parametrize('what', RESERVED)
def test_only_some_modules_know(what):
  reserved, knowing = RESERVED[what]

  def names_in(node):
    if isinstance(node, ast.ImportFrom):
      names = {alias.name for alias in node.names}
      return names | {f'{node.module}.{name}' for name in names}
    if isinstance(node, ast.Import):
      return {alias.name for alias in node.names}
    if isinstance(node, ast.Attribute):
      return {node.attr, f'{name_of(node.value)}.{node.attr}'}
    return {name_of(node)}

  refuse(
    module.at(node, f'{sorted(names_in(node) & reserved)}')
    for module in LIBRARY + EXAMPLES
    if not module.name.startswith(knowing)
    for node in module.nodes
    if names_in(node) & reserved
  )


def test_an_experiment_is_asked_for_nothing_that_it_may_lack():
  """What lacks something is completed at the entrance, once."""
  refuse(
    module.at(node, 'declare it in AbstractExperiment')
    for module in LIBRARY
    if module.name != 'compat.experiments'
    for node in module.nodes
    if isinstance(node, ast.Call)
    and name_of(node.func) in ('getattr', 'hasattr')
    and name_of(node.args[0]).strip('_') == 'experiment'
    and isinstance(node.args[1], ast.Constant)
  )


def test_there_is_one_training_loop():
  loops = [
    str(module.path)
    for module in LIBRARY + EXAMPLES
    for node in module.nodes
    if isinstance(node, ast.While)
    and any(name_of(n) == 'should_run_step' for n in ast.walk(node.test))
  ]
  assert loops == ['jaxline/experiment.py']


# Configs.


def test_configs_have_no_second_place_for_defaults():
  owners = ('config', 'cfg', 'experiment_kwargs', 'settings')
  refuse(
    module.at(node, 'declare the key in a config')
    for module in LIBRARY + EXAMPLES
    for node in module.nodes
    if isinstance(node, ast.Call)
    and isinstance(node.func, ast.Attribute)
    and node.func.attr in ('get', 'setdefault')
    and name_of(node.func.value).strip('_') in owners
  )


def test_every_base_config_key_is_read():
  read = {
    node.attr
    for module in LIBRARY
    if module.name != 'base_config'
    for node in module.nodes
    if isinstance(node, ast.Attribute)
    and isinstance(node.ctx, ast.Load)
    and name_of(node.value).strip('_') == 'config'
  }
  assert set(base_config.get_base_config()) <= read


# How long a run takes, in a config's docstring: one form or the other.
MEASURED = re.compile(
  r'Time: (\d+|half an?) (second|minute|hour)s?, measured\b'
)
COMPUTED = re.compile(
  r'Time: ([\d,]+) steps of at least ([\d.]+) s are (\d+) (\w+) on (\d+) (\w+)'
  r' chips: computed, not measured \((\w+) in ([\w/]+\.md)\b'
)


@pytest.mark.parametrize(
  'name', sorted(x.stem for x in (ROOT / 'configs').glob('[!_]*.py'))
)
def test_a_config_says_how_long_it_takes(name):
  module = importlib.import_module(f'configs.{name}')
  docstring = ' '.join(module.__doc__.split())
  found = COMPUTED.search(docstring)
  assert bool(MEASURED.search(docstring)) != bool(found), docstring
  if found:
    steps, secs, number, unit, chips, kind, run, page = found.groups()
    steps = int(steps.replace(',', ''))
    assert steps == module.get_config().training_steps
    unit_secs = {'minutes': 60, 'hours': 3600, 'days': 86400}[unit]
    assert round(steps * float(secs) / unit_secs) == int(number)
    text = (ROOT / page).read_text(encoding='utf-8')
    assert re.search(rf'\| {run} \| {kind}:\S+ \| {chips} \|', text)
    assert re.search(rf'\| {run} \|.* \w+, {secs} s \|', text)


def test_a_config_says_what_to_expect():
  wanted = ('Expected: ', 'Hardware: ', 'Command: ')
  configs = [m for m in EXAMPLES if m.path.parent == pathlib.Path('configs')]
  assert configs
  refuse(
    f'{module.path}:1: its docstring has no {text!r}'
    for module in configs
    for text in (f'--config={module.path}', *wanted)
    if text not in (ast.get_docstring(module.tree) or '')
  )
  refuse(
    module.at(node, 'define get_config and no other function')
    for module in configs
    for node in module.tree.body
    if isinstance(node, ast.FunctionDef) and node.name != 'get_config'
  )


# Text.


def test_every_module_says_what_it_is():
  def violations(module):
    if not ast.get_docstring(module.tree):
      yield f'{module.path}:1: no docstring'
    for node in module.tree.body:
      if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
        not node.name.startswith('_') and not ast.get_docstring(node)
      ):
        yield module.at(node, f'{node.name} has no docstring')

  refuse(text for module in LIBRARY for text in violations(module))
