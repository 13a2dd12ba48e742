"""Constructs an experiment and completes it.

JAXline's clients hand over experiments that do not derive from
`AbstractExperiment`, or whose constructors take fewer arguments. After
`construct`, an experiment has all attributes of that class. `full_experiment`
adds the attributes of `FullExperiment`.
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
