"""The rules of the architecture: import directions, and who knows what.

Each rule lists its violations as `file:line: what is wrong`. Ruff refuses
relative imports, neural-network libraries and an early TensorFlow.
"""

import ast
from collections.abc import Iterator
import dataclasses
import functools
import graphlib
import pathlib

import pytest

from jaxline import base_config

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY, FORKS = ('jaxline',), ('examples', 'configs')

# A module or package imports from lower floors only, and `errors`, which
# imports nothing. The only exception is `__main__`, which is above everything.
FLOORS = """
base
metrics parallel
experiment inputs run_directory supervision train_state
base_config checkpoint hooks launch train_step
compat evaluation sharded
compile decode train
platform runs
api utils
"""
FLOOR = {
  unit: number
  for number, line in enumerate(f'errors{FLOORS}'.split('\n'))
  for unit in line.split()
}

# Names that only some modules may use -> what begins the names of these.
RESERVED = {
  # `indexed` marks the flags as parsed, for Grain, which has some of its own.
  'FLAGS config_flags': ('platform', 'inputs.indexed', 'examples/'),
  'Mesh NamedSharding PartitionSpec make_mesh': (
    *('parallel.mesh', 'parallel.partitioning'),
    *('parallel.placement', 'parallel.devices'),
  ),
  'difflib': ('errors', 'examples/pax/layer_runs.py'),
}


@dataclasses.dataclass(frozen=True)
class Module:
  """A parsed file; `name` is 'metrics.rates', or the path of a fork's file."""

  path: pathlib.Path
  name: str
  nodes: tuple[ast.AST, ...]
  # Also imports inside functions, with the module's full name.
  imports: tuple[tuple[ast.AST, str], ...]

  @property
  def library_imports(self) -> Iterator[tuple[ast.AST, str]]:
    for node, name in self.imports:
      if name.startswith('jaxline.'):
        yield node, name.removeprefix('jaxline.')


@functools.cache
def parsed(*folders: str) -> list[Module]:
  found = []
  for path in sorted(x for f in folders for x in (ROOT / f).rglob('*.py')):
    relative = path.relative_to(ROOT)
    name = str(relative)
    if relative.parts[0] == 'jaxline':
      parts = relative.with_suffix('').parts[1:]
      name = '.'.join(part for part in parts if part != '__init__')
    nodes = tuple(ast.walk(ast.parse(path.read_text(encoding='utf-8'))))
    imports = tuple((node, x) for node in nodes for x in imported_by(node))
    found.append(Module(relative, name, nodes, imports))
  return found


def imported_by(node: ast.AST) -> Iterator[str]:
  """Yields the full names of the modules that a statement imports."""
  if isinstance(node, ast.Import):
    yield from (alias.name for alias in node.names)
  elif isinstance(node, ast.ImportFrom):
    for alias in node.names:
      # `from a import b` may import the module a.b.
      name = f'{node.module}.{alias.name}'
      path = ROOT.joinpath(*name.split('.'))
      is_module = path.with_suffix('.py').exists() or path.is_dir()
      yield '.' if node.level else name if is_module else str(node.module)


def name_of(node: ast.AST) -> str:
  """Returns the last name of an expression: `config` for `self.config`."""
  if isinstance(node, ast.Attribute):
    return node.attr
  return node.id if isinstance(node, ast.Name) else ''


def refuse(violations) -> None:
  found = [f'{m.path}:{getattr(node, "lineno", 1)}: {text}'
           for m, node, text in violations]  # fmt: skip
  assert not found, '\n'.join(['', *found])


def test_imports_go_down():
  def goes_down(name: str, imported: str) -> bool:
    unit, below = name.split('.')[0], imported.split('.')[0]
    is_program = name.endswith('__main__')
    return unit == below or is_program or FLOOR[below] < FLOOR[unit]

  refuse(
    (module, node, f'jaxline.{module.name} imports jaxline.{imported}')
    for module in parsed(*LIBRARY)
    for node, imported in module.library_imports
    if module.name and not goes_down(module.name, imported)
  )
  assert max(FLOOR.values()) <= 8
  # `prepare` raises CycleError, which names the circle.
  graph = {m.name: {x for _, x in m.library_imports} for m in parsed(*LIBRARY)}
  graphlib.TopologicalSorter(graph).prepare()


def test_examples_do_not_import_each_other():
  # Modules directly in examples/ are for all of them.
  shared = {path.stem for path in (ROOT / 'examples').glob('*.py')}
  for module in parsed(*FORKS):
    used = {x.split('.')[1] for _, x in module.imports if x[:9] == 'examples.'}
    others = used - shared - {*module.path.parts[1:2]}
    # A config may ask the one example that it configures for its numbers.
    assert len(others) <= (module.path.parts[0] == 'configs'), module.path


@pytest.mark.parametrize('names', RESERVED)
def test_only_some_modules_know(names):
  reserved = set(names.split())

  def used(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
      return {alias.name.split('.')[-1] for alias in node.names}
    return {name_of(node)}

  refuse(
    (module, node, f'{sorted(used(node) & reserved)}')
    for module in parsed(*LIBRARY) + parsed(*FORKS)
    if not module.name.startswith(RESERVED[names])
    for node in module.nodes
    if used(node) & reserved
  )


def test_few_modules_know_what_jax_does_not_publish():
  modules = parsed(*LIBRARY)
  private = {m.name for m in modules for _, x in m.imports if '._src' in x}
  assert len(private) <= 4, private


def test_there_is_one_training_loop():
  loops = [
    module.name
    for module in parsed(*LIBRARY) + parsed(*FORKS)
    for node in module.nodes
    if isinstance(node, ast.While)
    and any(name_of(n) == 'should_run_step' for n in ast.walk(node.test))
  ]
  assert loops == ['experiment']


def test_every_key_is_read_and_has_one_default():
  read = {
    node.attr
    for module in parsed(*LIBRARY)
    if module.name != 'base_config'
    for node in module.nodes
    if isinstance(node, ast.Attribute)
    and name_of(node.value).strip('_') == 'config'
  }
  read |= {
    argument.value
    for module in parsed(*LIBRARY)
    for node in module.nodes
    if isinstance(node, ast.Call) and name_of(node.func) == 'value_of'
    for argument in node.args
    if isinstance(argument, ast.Constant)
  }
  assert set(base_config.get_base_config()) <= read
  owners = 'config', 'cfg', 'experiment_kwargs', 'settings'
  refuse(
    (module, node, 'declare the key and its default in a config')
    for module in parsed(*LIBRARY) + parsed(*FORKS)
    for node in module.nodes
    if isinstance(node, ast.Call)
    and isinstance(node.func, ast.Attribute)
    and node.func.attr in ('get', 'setdefault')
    and name_of(node.func.value).strip('_') in owners
  )


def test_the_top_level_has_what_a_forker_reads():
  modules = parsed(*LIBRARY)
  assert sum(m.path.stem == m.name for m in modules) <= 14
  assert max((ROOT / m.path).read_text().count('\n') for m in modules) <= 500


# A parameter of this name, typed as Any, is an object of the unit: the type
# would be an import that goes up.
STANDS_FOR = {
  'run': 'train',
  'training': 'train',
  'evaluation': 'evaluation',
  'experiment': 'experiment',
  'checkpointer': 'checkpoint',
}
# These read a few attributes of an experiment, which hooks give them.
HIDDEN = {
  *(('metrics', x) for x in ('console', 'fingerprints', 'rates')),
  *(('supervision', x) for x in ('nonfinite', 'out_of_memory')),
  ('compat', 'adapters'),  # JAXline's functions, which a program may rebind.
}


def test_no_parameter_hides_an_import_that_goes_up():
  refuse(
    (module, node, f'{argument.arg} is typed as Any')
    for module in parsed(*LIBRARY)
    if tuple(module.name.split('.')) not in HIDDEN
    for node in module.nodes
    if isinstance(node, ast.FunctionDef)
    for argument in (*node.args.args, *node.args.kwonlyargs)
    if name_of(argument.annotation or ast.Name('')) == 'Any'
    if (unit := STANDS_FOR.get(argument.arg))
    and FLOOR[unit] > FLOOR[module.name.split('.')[0]]
  )
