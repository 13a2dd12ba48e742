"""Finds an experiment's class, constructs the experiment and completes it.

JAXline's clients hand over experiments that do not derive from
`AbstractExperiment`, or whose constructors take fewer arguments. After
`construct`, an experiment has all attributes of that class. `full_experiment`
adds the attributes of `FullExperiment`.
"""

from collections.abc import Mapping
import functools
import importlib.util
import inspect
import itertools
import os
import pathlib
import re
import stat
import sys
import types
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict

from jaxline import base_config
from jaxline import errors
from jaxline import experiment as experiment_lib
from jaxline.base import stateful

_MODULE = r'\w+(\.\w+)*'


def resolve_experiment_class(
  config: config_dict.ConfigDict, *, recorded_in: str = ''
) -> Any:
  """Returns the class that `config.experiment_class` names.

  Args:
    config: the run's.
    recorded_in: the directory of a run, which may be anybody's, if its record
      names the class. '' if the user names it.

  Raises:
    errors.UsageError: it names none, or none that can be imported; or it is
      recorded, and no subclass of `AbstractExperiment` or of that directory.
  """
  name = base_config.complete_config(config).experiment_class
  module_name, _, class_name = (name or '').partition(':')
  if not re.fullmatch(rf'{_MODULE}:\w+', name or ''):
    raise errors.UsageError(
      f"config.experiment_class is {name!r}; expected 'package.module:Class',"
      " such as 'examples.lm.experiment:Experiment'. (`jaxline.load` and"
      ' `jaxline.evaluate` also take experiment_class=Class.)'
    )
  run = os.path.expanduser(recorded_in)
  _prefer_working_directory(module_name, run)
  try:
    if run:
      _refuse_code_of(run, module_name)
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as e:
    # A missing dependency of the module is not a wrong name: let it through.
    if e.name and module_name.startswith(e.name):
      raise errors.UsageError(
        f'config.experiment_class is {name!r}: {e}. Start in the directory that'
        ' has it, or set PYTHONPATH to that.'
      ) from e
    raise
  file, other = _named.get(module_name), getattr(module, '__file__', None)
  if file and other and not run and file != os.path.realpath(other):
    raise errors.UsageError(
      f'config.experiment_class is {name!r} of {other}, and not of {file}. Give'
      ' the file another name.'
    )
  found = getattr(module, class_name, None)
  if found is None:
    raise errors.UsageError(
      f'config.experiment_class is {name!r}: {module_name} has no'
      f' {class_name!r}.'
    )
  if run and not (
    isinstance(found, type)
    and issubclass(found, experiment_lib.AbstractExperiment)
  ):
    raise _refused(name, 'a subclass of experiment.AbstractExperiment')
  return found


def _refused(name: str, expected: str) -> errors.UsageError:
  return errors.UsageError(
    f'The directory of the run records the class or module {name!r}; expected'
    f' {expected}. To use it all the same, override experiment_class with the'
    ' recorded name.'
  )


def _refuse_code_of(run: str, module: str) -> None:
  """Raises UsageError if a module, or a package of it, lies in a run.

  The packages are looked at one by one, because `find_spec` imports those above
  the one that it looks for.
  """
  for name in itertools.accumulate(module.split('.'), '{}.{}'.format):
    if name in sys.modules:
      file = getattr(sys.modules[name], '__file__', None)
    else:
      spec = importlib.util.find_spec(name)
      file = spec.origin if spec and spec.has_location else None
    if file and _lies_in(file, run):
      raise _refused(name, f'code outside of that directory, and not {file}')


def _lies_in(path: str | os.PathLike[str], run: str) -> bool:
  """Returns whether a path, or what it links to, is a directory or below it."""
  found = pathlib.Path(os.path.abspath(path)), pathlib.Path(path).resolve()
  above = {folder for x in found for folder in (x, *x.parents)}
  return os.path.isdir(run) and any(
    x.exists() and x.samefile(run) for x in above
  )


def _prefer_working_directory(module: str, run: str) -> None:
  """Lets a module be imported from the working directory or one above it.

  The nearest directory that has the module precedes the installed packages,
  because dm-haiku installs a package `examples`. The directory of the program
  and PYTHONPATH still come first. A directory of the run is not one of these.
  """
  if module in sys.modules:
    return
  path = module.replace('.', '/')

  def has_module(folder: pathlib.Path) -> bool:
    places = folder / f'{path}.py', folder / path / '__init__.py'
    return any(x.is_file() for x in places)

  cwd = pathlib.Path.cwd()
  # Anybody may write in directories like /tmp.
  above = [x for x in cwd.parents if not x.stat().st_mode & stat.S_ISVTX]
  trusted = (x for x in [cwd, *above] if not _lies_in(x, run))
  folder = next(filter(has_module, trusted), None)
  if folder is None:
    return
  is_installed = lambda x: pathlib.Path(x).match('*-packages')
  end = [*map(is_installed, sys.path), True].index(True)
  if not any(has_module(pathlib.Path(x)) for x in sys.path[:end]):
    # Permanently: worker processes and imports inside functions need it, too.
    sys.path.insert(end, str(folder))
  top = module.partition('.')[0]
  paths = getattr(sys.modules.get(top), '__path__', ())
  loaded = [pathlib.Path(x).parent for x in paths]
  if any(map(is_installed, loaded)) and not any(map(has_module, loaded)):
    # The installed package of the same name has been imported.
    for name in [x for x in sys.modules if f'{x}.'.startswith(f'{top}.')]:
      del sys.modules[name]


# Module -> the config file that the user has named, if it has the class.
_named: dict[str, str] = {}


def importable(file: str) -> str:
  """Returns the name by which a file can be imported as a module."""
  path = pathlib.Path(os.path.abspath(file)).with_suffix('')
  places = map(os.path.abspath, ('', *sys.path))
  above = [path.relative_to(x) for x in places if path.is_relative_to(x)]
  names = ['.'.join(x.parts) for x in above]
  names = [x for x in names if re.fullmatch(_MODULE, x)]
  return min(names, key=len, default=path.name)


def check_own_class(file: str, values: Mapping[str, Any], named: str) -> None:
  """Raises UsageError if a config names a namesake of a class in its file."""
  module, _, name = named.partition(':')
  path = pathlib.Path(os.path.abspath(file))
  if getattr(values.get(name), '__module__', '') != values['__name__']:
    return
  if not path.as_posix().endswith(f'/{module.replace(".", "/")}.py'):
    raise errors.UsageError(  # It is a copy, such as of an example.
      f'config.experiment_class is {named!r}, but {file} has a {name} of its'
      f" own. Write config.experiment_class = f'{{__name__}}:{name}' there."
    )
  _named[module] = os.path.realpath(file)
  if '.' not in module and not path.parent.stat().st_mode & stat.S_ISVTX:
    sys.path.insert(0, str(path.parent))  # As Python does for a program.


class _Completed:
  """Adds the defaults of `FullExperiment` to an object of another class.

  What the object has by one of those names is the program's own.
  """

  def __init__(self, live: Any, **own: Any):
    defaults = _missing(live) | _ADDED
    vars(self).update(own, _jaxline_live=live, _defaults=defaults)

  # For messages, which name the class.
  @property  # type: ignore[misc]
  def __class__(self) -> Any:
    return type(self._jaxline_live)

  def should_run_step(self, step: int, config: Any) -> bool:
    config = base_config.programs_view(config)
    return self._jaxline_live.should_run_step(step, config)

  def train_loop(self, config: Any, *args: Any) -> None:
    self._jaxline_live.train_loop(base_config.programs_view(config), *args)

  def __getattr__(self, name: str) -> Any:
    defaults = self.__dict__['_defaults']
    if name not in defaults:
      return getattr(self._jaxline_live, name)
    return _bound(defaults[name], self)  # Kept, it would be a cycle of weights.


# The defaults of the names that JAXline does not have.
_ADDED = {
  name: x
  for cls in (stateful.Stateful, experiment_lib.FullExperiment)
  for name, x in vars(cls).items()
  if not name.startswith('_')
}


def _missing(live: Any) -> dict[str, Any]:
  """Returns the defaults of what an object lacks of `AbstractExperiment`."""
  base_class = experiment_lib.AbstractExperiment
  return {
    name: x
    for name, x in vars(base_class).items()
    if not name.startswith(('__', '_abc'))
    # The loops say it if one of these is missing.
    and name not in base_class.__abstractmethods__
    and not hasattr(live, name)
  }


def _bound(default: Any, owner: Any) -> Any:
  """Returns a default of the class as an attribute of an object."""
  has_self = hasattr(default, '__get__')
  return default.__get__(owner) if has_self else default


def full_experiment(experiment: Any, **own: Any) -> Any:
  """Returns an experiment that has all attributes of `FullExperiment`.

  Args:
    experiment: any object that a program saves; it is not changed. None stands
      for no experiment.
    **own: attributes of the result, instead of the defaults.
  """
  is_completed = type(experiment) is _Completed
  if is_completed or isinstance(experiment, experiment_lib.FullExperiment):
    return experiment
  if experiment is None:
    experiment = types.SimpleNamespace(snapshot_state=dict)
    own = {'wants_restored': lambda name: False} | own
  return _Completed(experiment, **own)


def class_of(constructor: Any) -> type | None:
  """Returns the class that a constructor is, or is a partial of, if any."""
  while isinstance(constructor, functools.partial):
    constructor = constructor.func
  return constructor if isinstance(constructor, type) else None


def declared(constructor: Any) -> type[experiment_lib.FullExperiment]:
  """Returns the class whose attributes are known before it is constructed.

  Args:
    constructor: as for `class_of`. For another one than of a `FullExperiment`,
      the result has the defaults.
  """
  found = class_of(constructor)
  base_class = experiment_lib.FullExperiment
  return found if found and issubclass(found, base_class) else base_class


def is_full(constructor: Any) -> bool:
  """Returns whether it makes a `FullExperiment`, as far as is known."""
  found = class_of(constructor)
  return found is None or issubclass(found, experiment_lib.FullExperiment)


def initialize_experiment(
  experiment_class: Any,
  mode: str,
  rng: jax.Array,
  experiment_kwargs: Mapping[str, Any],
  *,
  run_config: config_dict.ConfigDict | None = None,
) -> Any:
  """Constructs an experiment.

  Args:
    experiment_class: a class or a partial of one. Its constructor gets
      `init_rng`, which JAXline's first experiments lack, and that of a
      `FullExperiment` gets `run_config`, if it names them: a `**kwargs` may be
      passed on to a constructor that does not.
    mode: the experiment's mode.
    rng: the key to initialise weights from.
    experiment_kwargs: the other arguments.
    run_config: the config of the run.
  """
  parameters = inspect.signature(experiment_class).parameters
  offered: dict[str, Any] = {'init_rng': rng}
  if is_full(experiment_class):
    offered['run_config'] = run_config
  given = {
    name: x
    for name, x in offered.items()
    if name in parameters and name not in experiment_kwargs and x is not None
  }
  if 'init_rng' not in given:
    logging.warning(
      'Deprecated: %s takes no init_rng, so config.random_seed does not reach'
      ' its initial weights. Add `init_rng` to its constructor and initialise'
      ' from that.',
      getattr(experiment_class, '__name__', experiment_class),
    )
  return experiment_class(mode, **given, **experiment_kwargs)


def construct(
  experiment_class: Any,
  mode: str,
  rng: jax.Array,
  config: config_dict.ConfigDict,
) -> Any:
  """Constructs an experiment with `config.experiment_kwargs`.

  Returns:
    The experiment, with all attributes of a `FullExperiment`.

  Raises:
    errors.UsageError: the config sets a key that only a sharded step reads, and
      the experiment does not read it.
  """
  experiment = initialize_experiment(
    experiment_class, mode, rng, config.experiment_kwargs, run_config=config
  )
  if not isinstance(experiment, experiment_lib.AbstractExperiment):
    # On the object itself, which the program's own checkpointer may save.
    for name, default in _missing(experiment).items():
      setattr(experiment, name, _bound(default, experiment))
  experiment = full_experiment(experiment)
  if config.on_nonfinite:
    experiment.on_nonfinite = config.on_nonfinite
  if experiment.run_config is not None:
    return experiment
  defaults = base_config.recorded(base_config.get_base_config())
  values = base_config.recorded(config_dict.ConfigDict({**config}))
  name = experiment.__class__.__name__
  for key in base_config.KEYS:
    if key.sharded and (value := values[key.name]) != defaults[key.name]:
      raise errors.UsageError(
        f'config.{key.name} is {value!r}, but {name} does'
        ' not read it. A subclass of sharded.ShardedExperiment reads it if its'
        ' constructor passes on `run_config`; other experiments have no sharded'
        ' step. Leave the key as it is in jaxline/base_config.py.'
      )
  return experiment
