"""Finds the class that a config names: 'package.module:Class'."""

from collections.abc import Mapping
import importlib.util
import itertools
import os
import pathlib
import re
import stat
import sys
from typing import Any

from jaxline import errors

_MODULE = r'\w+(\.\w+)*'


def find(name: str, parent: type, recorded_in: str = '') -> Any:
  """Imports the class, or a different constructor, that a name stands for.

  Args:
    name: `config.experiment_class`.
    parent: a recorded class must be a subclass of this one.
    recorded_in: the directory of the run whose record names the class. It may
      belong to anyone, so it is not trusted. '' if the user names the class.

  Raises:
    errors.UsageError: the class cannot be imported; or it is recorded, and is
      not a subclass of `parent`, or is defined inside that directory.
  """
  module_name, _, class_name = name.partition(':')
  if not re.fullmatch(rf'{_MODULE}:\w+', name):
    raise errors.UsageError(
      f"config.experiment_class is {name!r}; expected 'package.module:Class',"
      " such as 'examples.lm.experiment:Experiment'. (In `jaxline.load` and"
      ' `jaxline.evaluate` you can pass experiment_class=Class.) A file my-x.py'
      ' cannot be imported; rename it to my_x.py.'
    )
  run = os.path.expanduser(recorded_in)
  _prefer_working_directory(module_name, run)
  try:
    if run:
      _refuse_code_of(run, module_name)
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as e:
    # Report only a wrong name, not a missing dependency of the module.
    if e.name and module_name.startswith(e.name):
      raise errors.UsageError(
        f'config.experiment_class is {name!r}: {e}. Run the command in the'
        ' directory that contains it, or add that to PYTHONPATH.'
      ) from e
    raise
  file, other = _named.get(module_name), getattr(module, '__file__', None)
  if file and other and not run and file != os.path.realpath(other):
    raise errors.UsageError(
      f'config.experiment_class is {name!r}, which imports {other} instead of'
      f' {file}. Rename the file.'
    )
  found = getattr(module, class_name, None)
  if found is None:
    raise errors.UsageError(
      f'config.experiment_class is {name!r}: {module_name} has no'
      f' {class_name!r}.'
    )
  if run and not (isinstance(found, type) and issubclass(found, parent)):
    raise _refused(name, f'a subclass of {parent.__name__}')
  return found


def _refused(name: str, expected: str) -> errors.UsageError:
  return errors.UsageError(
    f'The run records the class or module {name!r}; expected {expected}. To use'
    ' it anyway, override experiment_class with the recorded name.'
  )


def _refuse_code_of(run: str, module: str) -> None:
  """Raises UsageError if a module, or one of its packages, is inside a run.

  It checks the packages from the top down, because `find_spec` imports all
  parents of the package that it looks for.
  """
  for name in itertools.accumulate(module.split('.'), '{}.{}'.format):
    if name in sys.modules:
      file = getattr(sys.modules[name], '__file__', None)
    else:
      spec = importlib.util.find_spec(name)
      file = spec.origin if spec and spec.has_location else None
    if file and _lies_in(file, run):
      raise _refused(name, f"code outside of the run's directory, not {file}")


def _lies_in(path: str | os.PathLike[str], run: str) -> bool:
  """Returns whether a path, or the target of its links, is `run` or in it."""
  found = pathlib.Path(os.path.abspath(path)), pathlib.Path(path).resolve()
  above = {folder for x in found for folder in (x, *x.parents)}
  return os.path.isdir(run) and any(
    x.exists() and x.samefile(run) for x in above
  )


def _prefer_working_directory(module: str, run: str) -> None:
  """Makes a module importable from the working directory or its parents.

  The nearest directory that has the module precedes the installed packages,
  because dm-haiku installs a package `examples`. The directory of the program
  and PYTHONPATH still come first. Directories inside the run are skipped.
  """
  if module in sys.modules:
    return
  path = module.replace('.', '/')

  def has_module(folder: pathlib.Path) -> bool:
    places = folder / f'{path}.py', folder / path / '__init__.py'
    return any(x.is_file() for x in places)

  cwd = pathlib.Path.cwd()
  # Skip directories such as /tmp, to which anyone can write.
  above = [x for x in cwd.parents if not x.stat().st_mode & stat.S_ISVTX]
  trusted = (x for x in [cwd, *above] if not _lies_in(x, run))
  folder = next(filter(has_module, trusted), None)
  if folder is None:
    return
  is_installed = lambda x: pathlib.Path(x).match('*-packages')
  end = [*map(is_installed, sys.path), True].index(True)
  if not any(has_module(pathlib.Path(x)) for x in sys.path[:end]):
    # Keep it: worker processes and imports inside functions need it later.
    sys.path.insert(end, str(folder))
  top = module.partition('.')[0]
  paths = getattr(sys.modules.get(top), '__path__', ())
  loaded = [pathlib.Path(x).parent for x in paths]
  if any(map(is_installed, loaded)) and not any(map(has_module, loaded)):
    # Forget the installed package of the same name, which was imported before.
    for name in [x for x in sys.modules if f'{x}.'.startswith(f'{top}.')]:
      del sys.modules[name]


# Maps a module to the config file on the command line that defines the class.
_named: dict[str, str] = {}


def importable(file: str) -> str:
  """Returns the module name under which a file can be imported."""
  path = pathlib.Path(os.path.abspath(file)).with_suffix('')
  places = map(os.path.abspath, ('', *sys.path))
  above = [path.relative_to(x) for x in places if path.is_relative_to(x)]
  names = ['.'.join(x.parts) for x in above]
  names = [x for x in names if re.fullmatch(_MODULE, x)]
  return min(names, key=len, default=path.name)


def check_own_class(file: str, values: Mapping[str, Any], named: str) -> None:
  """Raises UsageError if a config file names a class of a different file.

  This happens in a copy of an example that still names the original class.
  """
  module, _, name = named.partition(':')
  path = pathlib.Path(os.path.abspath(file))
  if getattr(values.get(name), '__module__', '') != values['__name__']:
    return
  if not path.as_posix().endswith(f'/{module.replace(".", "/")}.py'):
    raise errors.UsageError(
      f'config.experiment_class is {named!r}, but {file} defines its own class'
      f" {name}. Write config.experiment_class = f'{{__name__}}:{name}' in it."
    )
  _named[module] = os.path.realpath(file)
  if '.' not in module and not path.parent.stat().st_mode & stat.S_ISVTX:
    sys.path.insert(0, str(path.parent))  # Python does so for a script.
