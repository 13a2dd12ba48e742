"""Wraps JAXline-style parts of a run in this library's interfaces.

`train`, `decode`, `platform` and `python -m jaxline.inputs` call these where a
run begins. After that every checkpointer, writer, action and experiment has all
methods, and every config has all keys (`base_config.complete_config`).
"""

from collections.abc import Callable, Mapping
import importlib
import inspect
import os
import pathlib
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
from jaxline.checkpoint import base
from jaxline.checkpoint import memory
from jaxline.compat import prng
from jaxline.metrics import periodic
from jaxline.metrics import values
from jaxline.metrics import writers


def resolve_experiment_class(
  config: config_dict.ConfigDict, *, is_recorded: bool = False
) -> Any:
  """Returns the class that `config.experiment_class` names.

  Args:
    config: the run's.
    is_recorded: whether the directory of a run names the class, and not the
      user. It may be anybody's directory.

  Raises:
    errors.UsageError: it names none, or none that can be imported; or it is
      recorded and no subclass of `AbstractExperiment`.
  """
  name = config.experiment_class
  module_name, separator, class_name = (name or '').partition(':')
  if not separator:
    raise errors.UsageError(
      f"config.experiment_class is {name!r}; expected 'package.module:Class',"
      " such as 'examples.lm.experiment:Experiment'. (`jaxline.load` and"
      ' `jaxline.evaluate` also take experiment_class=Class.)'
    )
  _prefer_working_directory(module_name)
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as e:
    # A missing dependency of the module is not a wrong name: let it through.
    if e.name and module_name.startswith(e.name):
      raise errors.UsageError(
        f'config.experiment_class is {name!r}: {e}.'
      ) from e
    raise
  found = getattr(module, class_name, None)
  if found is None:
    raise errors.UsageError(
      f'config.experiment_class is {name!r}: {module_name} has no'
      f' {class_name!r}.'
    )
  if is_recorded and not (
    isinstance(found, type)
    and issubclass(found, experiment_lib.AbstractExperiment)
  ):
    raise errors.UsageError(
      f'config.experiment_class in the directory of the run is {name!r};'
      ' expected a subclass of experiment.AbstractExperiment. To use it all the'
      ' same, override experiment_class with this name.'
    )
  return found


def _prefer_working_directory(module: str) -> None:
  """Lets a module be imported from the working directory or one above it.

  The nearest directory that has the module is inserted into sys.path before the
  installed packages, because dm-haiku installs a package `examples`. The
  directory of the program and PYTHONPATH still come first.
  """

  def has_module(folder: pathlib.Path) -> bool:
    path = folder.joinpath(*module.split('.'))
    return os.path.isfile(f'{path}.py') or os.path.isfile(path / '__init__.py')

  def is_installed(path: str) -> bool:
    return bool(
      {'site-packages', 'dist-packages'} & {*pathlib.Path(path).parts}
    )

  if module in sys.modules:
    return
  cwd = pathlib.Path.cwd()
  # Anybody may write in directories like /tmp.
  above = [x for x in cwd.parents if not x.stat().st_mode & stat.S_ISVTX]
  folder = next(filter(has_module, [cwd, *above]), None)
  if folder is None:
    return
  end = next((i for i, x in enumerate(sys.path) if is_installed(x)), None)
  first = sys.path[:end]
  if str(folder) not in first:
    # Permanently: worker processes and imports inside functions need it, too.
    sys.path[:end] = [*first, str(folder)]
  top = module.partition('.')[0]
  loaded = [*getattr(sys.modules.get(top), '__path__', ())]
  if any(map(is_installed, loaded)) and not any(
    has_module(pathlib.Path(x).parent) for x in loaded
  ):
    # The installed package of the same name was imported.
    for name in [x for x in sys.modules if f'{x}.'.startswith(f'{top}.')]:
      del sys.modules[name]


class _ForeignCheckpointer(base.FullCheckpointer):
  """A checkpointer that has the methods of JAXline's protocol only."""

  def __init__(self, checkpointer: base.Checkpointer):
    self._checkpointer = checkpointer
    for method in (
      'get_experiment_state',
      'save',
      'can_be_restored',
      'restore_path',
      'wait_for_checkpointing_to_finish',
    ):
      setattr(self, method, getattr(checkpointer, method))

  def restore(self, ckpt_series: str, *, step: int | None = None) -> None:
    if step is not None:
      self.steps(ckpt_series)  # Raises: it does not know them.
    self._checkpointer.restore(ckpt_series)

  def close(self) -> None:
    getattr(self._checkpointer, 'close', lambda: None)()


def full_checkpointer(checkpointer: Any) -> base.FullCheckpointer:
  """Returns a checkpointer with the whole interface.

  Args:
    checkpointer: any that follows `base.Checkpointer`. A subclass of ours whose
      `restore` takes no step counts as foreign.
  """
  is_full = isinstance(checkpointer, base.FullCheckpointer)
  # Or a wrapper around one, which passes on all its attributes.
  is_full |= isinstance(getattr(checkpointer, 'is_resumable', None), bool)
  if is_full and 'step' in inspect.signature(checkpointer.restore).parameters:
    return checkpointer
  return _ForeignCheckpointer(checkpointer)  # type: ignore[abstract]


class _ForeignWriter(writers.MetricWriter):
  """A writer that has `write_scalars`, and perhaps more of its own.

  As in JAXline, it gets the scalars of training on a background thread, and an
  experiment calls what it has directly. Records of other kinds are dropped.
  Whoever made it flushes and closes it: it may not allow that on a thread.
  """

  # What is no number as well.
  _conversions = values.CONVERSIONS | {'scalars': values.fetch}

  def __init__(self, writer: Any):
    super().__init__(types.SimpleNamespace(write_scalars=writer.write_scalars))
    self._writer = writer
    own = ('write_scalars', 'write_images', 'write_texts', 'flush', 'close')
    for method in own:
      if hasattr(writer, method):
        setattr(self, method, getattr(writer, method))

  def __getattr__(self, name: str) -> Any:
    # A copy asks before it has a writer.
    return getattr(vars(self).get('_writer'), name)

  def __exit__(self, *unused: object) -> None:
    """Closes nothing: see the class."""


def full_writer(writer: Any) -> writers.MetricWriter:
  """Returns a writer with the whole interface.

  Args:
    writer: any that has `write_scalars`; None writes nothing.
  """
  if isinstance(writer, writers.MetricWriter):
    return writer
  return writers.MetricWriter() if writer is None else _ForeignWriter(writer)


class _ForeignAction(periodic.Action):
  """A periodic action that has the methods of JAXline's only."""

  def __init__(self, action: Any):
    self._action = action
    for method in ('update_time', 'skip_time', 'flush_async', 'wait_to_finish'):
      if hasattr(action, method):
        setattr(self, method, getattr(action, method))

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    self._action(t, step, scalar_outputs)


def full_action(action: Callable[..., Any]) -> periodic.Action:
  """Returns a periodic action with the whole interface."""
  if isinstance(action, periodic.Action):
    return action
  return _ForeignAction(action)


def full_experiment(experiment: Any) -> Any:
  """Returns an experiment with all attributes of `AbstractExperiment`.

  Args:
    experiment: of any class. One that does not derive from `AbstractExperiment`
      gets what it lacks.
  """
  base_class = experiment_lib.AbstractExperiment
  if isinstance(experiment, base_class):
    return experiment
  for name, default in vars(base_class).items():
    if (
      not name.startswith(('__', '_abc'))
      # The loops say it where one of these is missing.
      and name not in base_class.__abstractmethods__
      and not hasattr(experiment, name)
    ):
      is_method = inspect.isfunction(default)
      value = default.__get__(experiment) if is_method else default
      setattr(experiment, name, value)
  return experiment


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
      `init_rng`, which JAXline's first experiments lack, and `run_config` if it
      names them: a `**kwargs` may be passed on to a constructor that does not.
    mode: the experiment's mode.
    rng: the key to initialise weights from.
    experiment_kwargs: the other arguments.
    run_config: the config of the run.
  """
  parameters = inspect.signature(experiment_class).parameters
  offered = {'init_rng': rng, 'run_config': run_config}
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


def init_rng(
  experiment_class: Any, config: config_dict.ConfigDict
) -> jax.Array:
  """Returns the key that an experiment outside of training initialises from.

  In the sharded style it is the key of training. In the per-device style it is
  the unsplit key, as in JAXline.
  """
  cls = memory.Training.of(experiment_class).experiment
  if getattr(cls, 'IS_SHARDED', False):
    return prng.run_keys(config)[1]
  return jax.random.PRNGKey(config.random_seed)


def construct(
  experiment_class: Any,
  mode: str,
  rng: jax.Array,
  config: config_dict.ConfigDict,
) -> Any:
  """Does `initialize_experiment` with `config.experiment_kwargs`.

  Raises:
    errors.UsageError: the config sets a key that only a sharded step reads, and
      the experiment does not read it.
  """
  experiment = full_experiment(
    initialize_experiment(
      experiment_class, mode, rng, config.experiment_kwargs, run_config=config
    )
  )
  name = type(experiment).__name__
  if not experiment.IS_SHARDED:
    why = (
      f'{name} has no sharded step, which alone reads it. Leave it as it is in'
      ' jaxline/base_config.py, or derive from sharded.ShardedExperiment.'
    )
  elif experiment.run_config is None:
    why = (
      f'{name} got no run_config to read it from. Let its constructor take'
      ' `run_config` and pass it on to that of sharded.ShardedExperiment.'
    )
  else:
    return experiment
  defaults = base_config.recorded(base_config.get_base_config())
  values = base_config.recorded(config)
  for key in base_config.KEYS:
    if key.sharded and (value := values[key.name]) != defaults[key.name]:
      raise errors.UsageError(f'config.{key.name} is {value!r}, but {why}')
  return experiment
