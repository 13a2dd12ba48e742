"""From a registered experiment to the config of a run, and back.

    python experiment.py --config=examples/pax/config.py:C4Spmd1BAdam4Replicas

The experiment's class defines the numbers. `get_config` copies them to
`experiment_kwargs.config.constants`, where they can be overridden by name.
Those that this library has a key for are under that key only
(`config.training_steps`). `Config.experiment` makes a class of them again.
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
# They are `config.mesh`, and only there.
_MESH = {'ICI_MESH_SHAPE': 'mesh.ici', 'DCN_MESH_SHAPE': 'mesh.dcn'}

_DECODE_STEPS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which experiment: `experiment_kwargs.config`.

  Attributes:
    exp: its name, or a suffix of it: see `experiment_registry.get`.
    reduced: whether to use its small version.
    constants: its constants, except those that are keys of the run's config.
      Missing ones have the values of the class.
    decode: how `--mode=decode` continues prompts; None if it has no text.
  """

  exp: str
  reduced: bool
  constants: Mapping[str, Any]
  decode: decoding.Options | None = None

  def __post_init__(self) -> None:
    for name, value in self.constants.items():
      # A size of 0 is no model; other numbers of 0 switch something off.
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

    Args:
      run: its config; None leaves the constants that are keys of it as they are
        in the class.
    """
    found = _find(self.exp, self.reduced)
    keys = {} if run is None else constants_of(run)
    # A key of the library is in every config.
    own = {n: x for n, x in keys.items() if hasattr(found, n)}
    return found.with_constants({**self.constants, **own})

  @staticmethod
  def with_defaults(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what of a record makes the run, under one name for each value.

    Constants that it lacks because they are newer have the values of the class.
    Constants that change no step are left out.
    """
    try:
      registered = experiment_registry.get(str(record.get('exp')))
      experiment = _find(str(record.get('exp')), record.get('reduced'))
    except experiment_registry.UnknownError:
      return record
    constants = {**own_constants(experiment), **record.get('constants', {})}
    # Some older records have constants that are keys of the config now.
    for name in (*experiment.changeable_constants, *_KEYS):
      constants.pop(name, None)
    exp = experiment_registry.full_name(registered)
    return {**record, 'exp': exp, 'constants': constants}


def get_config(name: str) -> config_dict.ConfigDict:
  """Returns the config of an experiment's run.

  Args:
    name: of the experiment, or 'NAME:reduced' for its small version.

  Raises:
    experiment_registry.UnknownError: there is no such experiment.
    ValueError: behind the name is something else.
  """
  name, _, option = name.partition(':')
  if option not in ('', 'reduced'):
    raise ValueError(f'{name}:{option}: expected {name} or {name}:reduced.')
  experiment = _find(name, bool(option))
  experiment.check_constants(experiment.changeable_constants)

  config = base_config.get_base_config()
  config.experiment_class = _CLASS
  config.interval_type = 'steps'
  config.on_nonfinite = 'skip'  # As Pax does; the learner has the threshold.
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

  # A task does not depend on how many devices there are.
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
  """Returns the key of a run's config that holds a constant.

  Raises:
    UsageError: there is no such constant, or it is several keys.
  """
  experiment.check_constants([constant])
  if constant in _MESH:
    key = _MESH[constant]
    raise errors.UsageError(
      f'{constant} is several keys; give those to change, such as'
      f' --config.{key}.data=4.'
    )
  return _KEYS.get(constant, f'{_CONSTANTS}.{constant}')


def _find(name: str, reduced: Any) -> experiment_registry.Experiment:
  """Returns the class of an experiment, or of its small version."""
  found = experiment_registry.get(name)
  return found.reduced() if reduced else found


def own_constants(
  experiment: experiment_registry.Experiment,
) -> dict[str, Any]:
  """Returns the constants that no key of a run's config stands for."""
  constants = experiment.constants()
  return {n: constants[n] for n in constants if n not in {*_KEYS, *_MESH}}


def constants_of(run: config_dict.ConfigDict) -> dict[str, Any]:
  """Returns the constants that are keys of a run's config.

  Args:
    run: its config. One that is not of `get_config` says nothing of them.
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
  """Returns the part of a config that has a key, and the key's name in it."""
  section, _, name = key.rpartition('.')
  return (config[section] if section else config), name


# Pax's shapes have these axes; the first may be left out.
_MESH_AXES = ('stage', 'replica', 'data', 'mdl')


def _set_mesh(
  config: config_dict.ConfigDict, experiment: experiment_registry.Experiment
) -> None:
  """Sets the sizes of the mesh, and the slices that they are for."""
  for network, name in (('ici', 'ICI_MESH_SHAPE'), ('dcn', 'DCN_MESH_SHAPE')):
    sizes = tuple(getattr(experiment, name))
    axes = _MESH_AXES
    if len(sizes) not in (len(axes), len(axes) - 1):
      raise errors.UsageError(
        f'{experiment.__name__}.{name} is {sizes}; expected sizes of'
        f' {axes[1:]}, or of {axes}.'
      )
    config.mesh[network].update(
      dict(zip(axes, (1,) * (len(axes) - len(sizes)) + sizes, strict=True))
    )
  if experiment.TOPOLOGY:
    config.num_slices = math.prod(experiment.DCN_MESH_SHAPE)


def _field(
  experiment: experiment_registry.Experiment, name: str, value: Any
) -> Any:
  """Returns a value as a config holds it: None with the type it stands for."""
  if value is not None:
    return value
  kinds = [
    kind
    for outer in get_args(get_type_hints(experiment).get(name))
    for kind in get_args(outer)
    if kind is not type(None)
  ]
  # Without an annotation, it may become anything.
  return config_dict.placeholder(kinds[0] if kinds else object)
