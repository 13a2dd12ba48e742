"""The rules of the architecture: modules import from lower floors only.

Each rule lists its violations as `file:line: what is wrong`. Ruff refuses
relative imports, neural-network libraries and an early TensorFlow.
"""

import ast
from collections.abc import Iterator
import graphlib
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent

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


class Module:
  """A parsed file; `name` is 'metrics.rates', or the path of a fork's file.

  Attributes:
    imports: each import, also inside functions, with the module's full name.
    library_imports: those of the library, without its name.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path.relative_to(ROOT)
    self.name = str(self.path)
    if self.path.parts[0] == 'jaxline':
      parts = self.path.with_suffix('').parts[1:]
      self.name = '.'.join(part for part in parts if part != '__init__')
    text = path.read_text(encoding='utf-8')
    self.nodes = [*ast.walk(ast.parse(text, str(self.path)))]
    self.imports = [(n, name) for n in self.nodes for name in imported_by(n)]
    self.library_imports = [
      (n, name.removeprefix('jaxline.'))
      for n, name in self.imports
      if name.startswith('jaxline.')
    ]


def parsed(*folders: str) -> list[Module]:
  paths = sorted(x for f in folders for x in (ROOT / f).rglob('*.py'))
  return [Module(path) for path in paths]


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


LIBRARY = parsed('jaxline')
FORKS = parsed('examples', 'configs')


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
    for module in LIBRARY
    for node, imported in module.library_imports
    if module.name and not goes_down(module.name, imported)
  )


def test_no_module_imports_itself_through_others():
  """`prepare` raises CycleError, which names the circle."""
  graph = {m.name: {name for _, name in m.library_imports} for m in LIBRARY}
  graphlib.TopologicalSorter(graph).prepare()


def test_examples_do_not_import_each_other():
  # Modules directly in examples/ are for all of them.
  shared = {path.stem for path in (ROOT / 'examples').glob('*.py')}
  for module in FORKS:
    used = {x.split('.')[1] for _, x in module.imports if x[:9] == 'examples.'}
    others = used - shared - {*module.path.parts[1:2]}
    # A config may ask the one example that it configures for its numbers.
    assert len(others) <= (module.path.parts[0] == 'configs'), module.path
