"""Converts a registered experiment to the config of a run, and back.

    python experiment.py --config=examples/pax/config.py:C4Spmd1BAdam4Replicas

The experiment's class defines the constants. `get_config` copies them to
`experiment_kwargs.config.constants`, where you can override them by name. A
constant that this library has a key for is under that key only, such as
`config.training_steps`. `Config.experiment` converts them back to a class.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any, get_args, get_type_hints

from ml_collections import config_dict

from examples import decoding
from examples.pax import base_experiment
from examples.pax import experiment_registry
from examples.pax import loading
from jaxline import base_config
from jaxline import errors

_CONSTANTS = 'experiment_kwargs.config.constants'
_CLASS = 'examples.pax.experiment:Experiment'
_KEYS = {name: key for name, (key, _) in base_experiment.KEYS.items()}
# These constants are part of `config.mesh` only.
_MESH = {'ICI_MESH_SHAPE': 'mesh.ici', 'DCN_MESH_SHAPE': 'mesh.dcn'}

_DECODE_STEPS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The choice of an experiment: `experiment_kwargs.config`.

  Attributes:
    exp: Name of the experiment, or a suffix: see `experiment_registry.get`.
    reduced: Whether to use the small version of the experiment.
    constants: Constants of the experiment, except those that are keys of the
      run's config. The class defines missing ones.
    decode: Options of `--mode=decode`, or None for an experiment without text.
  """

  exp: str
  reduced: bool
  constants: Mapping[str, Any]
  decode: decoding.Options | None = None

  def __post_init__(self) -> None:
    for name, value in self.constants.items():
      # Sizes must be positive. Other constants may be 0 to disable a feature.
      is_size = name.startswith('NUM_') or name.endswith(('_DIMS', '_SIZE'))
      is_size |= name in ('DIMS_PER_HEAD', 'MAX_LENGTH', 'MAX_SEQ_LEN')
      is_number = isinstance(value, int | float)
      if is_number and not (0 <= value < math.inf and (value or not is_size)):
        raise ValueError(
          f'constants.{name} is {value!r}; expected a finite number'
          f' {"above" if is_size else "of at least"} 0.'
        )

  def experiment(
    self, run: config_dict.ConfigDict | None
  ) -> experiment_registry.Experiment:
    """Returns the class of the experiment with the constants of a run.

    If `run` is None, constants that are its keys have the values of the class.
    """
    found = _find(self.exp, self.reduced)
    keys = {} if run is None else constants_of(run)
    # Every config has the library's keys, but not every class the constants.
    own = {n: x for n, x in keys.items() if hasattr(found, n)}
    return found.with_constants({**self.constants, **own})

  @staticmethod
  def with_defaults(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a recorded config that determines the training.

    Each value has one canonical name. Constants that are newer than the record
    have the values of the class. Constants that change no step are left out.
    """
    try:
      registered = experiment_registry.get(str(record.get('exp')))
      experiment = _find(str(record.get('exp')), record.get('reduced'))
    except experiment_registry.UnknownError:
      return record
    constants = {**own_constants(experiment), **record.get('constants', {})}
    # Older records have constants that have since become keys of the config.
    for name in (*experiment.changeable_constants, *_KEYS):
      constants.pop(name, None)
    exp = experiment_registry.full_name(registered)
    return {**record, 'exp': exp, 'constants': constants}


def get_config(name: str) -> config_dict.ConfigDict:
  """Returns the config to run an experiment.

  `name` names the experiment, or its small version as 'NAME:reduced'.
  """
  name, _, option = name.partition(':')
  if option not in ('', 'reduced'):
    raise ValueError(f'{name}:{option}: expected {name} or {name}:reduced.')
  experiment = _find(name, bool(option))
  experiment.check_constants(experiment.changeable_constants)

  config = base_config.get_base_config()
  config.experiment_class = _CLASS
  config.interval_type = 'steps'
  config.on_nonfinite = 'skip'  # Pax skips, too. The learner sets the limit.
  _set_mesh(config, experiment)

  constants = config_dict.ConfigDict()
  for constant, value in experiment.constants().items():
    key = _KEYS.get(constant)
    section, leaf = _place(config, key or '')
    if leaf in section:
      with config.ignore_type():
        section[leaf] = value
    elif constant not in _MESH:
      into = constants if key is None else config
      into[key or constant] = _field(experiment, constant, value)
  if 'TARGET_LOG_PPLX' in experiment.constants():
    config.early_stop.metric = 'log_pplx'
    config.best_model_eval_metric_higher_is_better = False
  with config.ignore_type():
    config.log_train_data_interval = config.get_ref('log_tensors_interval')

  # The task does not depend on the number of devices.
  train = experiment(num_devices=1).filled_task().train
  config.log_async = train.async_summary_writing
  if train.init_from_checkpoint_rules:
    config.restore_from, config.restore_rules = loading.restore_keys(
      train.init_from_checkpoint_rules
    )

  kwargs = config.experiment_kwargs.config = config_dict.ConfigDict()
  kwargs.exp = name
  kwargs.reduced = bool(option)
  kwargs.constants = constants
  if experiment.has_prompting():
    options = decoding.Options(
      method='sample', max_decode_steps=_DECODE_STEPS, temperature=0.8
    )
    kwargs.decode = config_dict.ConfigDict(dataclasses.asdict(options))
  return config


def key_of(experiment: experiment_registry.Experiment, constant: str) -> str:
  """Returns the key of a run's config that holds a constant."""
  experiment.check_constants([constant])
  if constant in _MESH:
    key = _MESH[constant]
    raise errors.UsageError(
      f'Several keys hold {constant}. Set those that you want to change, such'
      f' as --config.{key}.data=4.'
    )
  return _KEYS.get(constant, f'{_CONSTANTS}.{constant}')


def _find(name: str, reduced: Any) -> experiment_registry.Experiment:
  """Returns the class of an experiment, or of its small version."""
  found = experiment_registry.get(name)
  return found.reduced() if reduced else found


def own_constants(
  experiment: experiment_registry.Experiment,
) -> dict[str, Any]:
  """Returns the constants that are not keys of a run's config."""
  elsewhere = {*_KEYS, *_MESH}
  return {n: x for n, x in experiment.constants().items() if n not in elsewhere}


def constants_of(run: config_dict.ConfigDict) -> dict[str, Any]:
  """Returns the constants that are keys of a run's config.

  A config that is not from `get_config` has none.
  """
  if run.experiment_class != _CLASS:
    return {}
  found = {}
  for constant, key in _KEYS.items():
    section, leaf = _place(run, key)
    if leaf in section:
      found[constant] = section[leaf]
  return found


def _place(config: Any, key: str) -> tuple[Any, str]:
  """Returns the section of a config for a key, and the key's name within it."""
  section, _, name = key.rpartition('.')
  return (config[section] if section else config), name


# Axes of Pax's mesh shapes. The first may be left out.
_MESH_AXES = ('stage', 'replica', 'data', 'mdl')


def _set_mesh(
  config: config_dict.ConfigDict, experiment: experiment_registry.Experiment
) -> None:
  """Sets the sizes of the mesh and the number of slices."""
  for network, name in (('ici', 'ICI_MESH_SHAPE'), ('dcn', 'DCN_MESH_SHAPE')):
    sizes = tuple(getattr(experiment, name))
    axes = _MESH_AXES
    if len(sizes) not in (len(axes), len(axes) - 1):
      raise errors.UsageError(
        f'{experiment.__name__}.{name} is {sizes}; expected sizes for the axes'
        f' {axes[1:]} or {axes}.'
      )
    config.mesh[network].update(
      dict(zip(axes, (1,) * (len(axes) - len(sizes)) + sizes, strict=True))
    )
  if experiment.TOPOLOGY:
    config.num_slices = math.prod(experiment.DCN_MESH_SHAPE)


def _field(
  experiment: experiment_registry.Experiment, name: str, value: Any
) -> Any:
  """Returns a value for a config. None becomes a placeholder with a type."""
  if value is not None:
    return value
  kinds = [
    kind
    for outer in get_args(get_type_hints(experiment).get(name))
    for kind in get_args(outer)
    if kind is not type(None)
  ]
  # If there is no annotation, the config accepts any type.
  return config_dict.placeholder(kinds[0] if kinds else object)
