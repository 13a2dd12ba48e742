"""Constructs an experiment and completes it.

Experiments of JAXline programs may not derive from `AbstractExperiment`, or may
have constructors with fewer arguments. `construct` adds all attributes of this
class, and `full_experiment` adds the attributes of `FullExperiment`.
"""

from collections.abc import Mapping
import functools
import inspect
import types
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict

from jaxline import base_config
from jaxline import errors
from jaxline import experiment as experiment_lib
from jaxline.base import stateful


class _Completed:
  """Adds the defaults of `FullExperiment` to an object of a different class.

  Attributes that the object itself has under these names are not used.
  """

  def __init__(self, live: Any, **own: Any):
    defaults = _missing(live) | _ADDED
    vars(self).update(own, _jaxline_live=live, _defaults=defaults)

  # Messages name the class of the program's object.
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
    return _bound(defaults[name], self)  # Keeping it would make a cycle.


# The defaults of all names that JAXline does not have.
_ADDED = {
  name: x
  for cls in (stateful.Stateful, experiment_lib.FullExperiment)
  for name, x in vars(cls).items()
  if not name.startswith('_')
}


def _missing(live: Any) -> dict[str, Any]:
  """Returns the defaults of `AbstractExperiment` that an object lacks."""
  base_class = experiment_lib.AbstractExperiment
  return {
    name: x
    for name, x in vars(base_class).items()
    if not name.startswith(('__', '_abc'))
    # For a missing `step` or `evaluate`, Python raises AttributeError.
    and name not in base_class.__abstractmethods__
    and not hasattr(live, name)
  }


def _bound(default: Any, owner: Any) -> Any:
  """Returns a class's default as an attribute of an object."""
  has_self = hasattr(default, '__get__')
  return default.__get__(owner) if has_self else default


def full_experiment(experiment: Any, **own: Any) -> Any:
  """Returns an experiment that has all attributes of `FullExperiment`.

  Args:
    experiment: any object that a program saves, or None; it is not changed.
    **own: attributes of the result that replace the defaults.
  """
  is_completed = type(experiment) is _Completed
  if is_completed or isinstance(experiment, experiment_lib.FullExperiment):
    return experiment
  if experiment is None:
    experiment = types.SimpleNamespace(snapshot_state=dict)
    own = {'wants_restored': lambda name: False} | own
  return _Completed(experiment, **own)


def class_of(constructor: Any) -> type | None:
  """Returns the class that a constructor, or a partial, calls; else None."""
  while isinstance(constructor, functools.partial):
    constructor = constructor.func
  return constructor if isinstance(constructor, type) else None


def declared(constructor: Any) -> type[experiment_lib.FullExperiment]:
  """Returns the class whose attributes are known before construction.

  Args:
    constructor: a class, a partial or a function. Unless it is known to make a
      `FullExperiment`, the result is that base class, with the defaults.
  """
  found = class_of(constructor)
  base_class = experiment_lib.FullExperiment
  return found if found and issubclass(found, base_class) else base_class


def is_full(constructor: Any) -> bool:
  """Returns whether a constructor makes a `FullExperiment`, or may do so."""
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
    experiment_class: a class or a partial of one. The constructor gets
      `init_rng` if it has such a parameter, which early JAXline experiments
      lack. A `FullExperiment` gets `run_config` under the same condition.
      `**kwargs` does not count: it may go to a constructor that has neither.
    mode: the experiment's mode.
    rng: the random key for initializing the weights.
    experiment_kwargs: the other arguments.
    run_config: the run's config.
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
      'Deprecated: %s does not take init_rng, so config.random_seed does not'
      ' affect its initial weights. Add a parameter `init_rng` to its'
      ' constructor, and initialize the weights from it.',
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
    errors.UsageError: the config sets a key for sharded steps that the
      experiment does not read.
  """
  experiment = initialize_experiment(
    experiment_class, mode, rng, config.experiment_kwargs, run_config=config
  )
  if not isinstance(experiment, experiment_lib.AbstractExperiment):
    # Set them on the object itself: the program's checkpointer may save it.
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
        f'config.{key.name} is {value!r}, but {name} does not read it. Keep its'
        ' default of jaxline/base_config.py. (Only a subclass of'
        ' sharded.ShardedExperiment reads it, if its constructor passes'
        ' `run_config` to the base class.)'
      )
  return experiment
