"""The config of a run, from a registered experiment.

    python experiment.py --config=examples/pax/config.py:C4Spmd1BAdam4Replicas

The experiment's class defines the numbers. They are copied to
`experiment_kwargs.config.constants`, where they can be overridden by name.
Those that this library has a key for are under that key only
(`config.training_steps`).
"""

import dataclasses
import math
from typing import Any, get_args, get_type_hints

from ml_collections import config_dict

from examples import decoding
from examples.pax import base_experiment
from examples.pax import experiment_registry
from jaxline import base_config
from jaxline import mesh as mesh_lib

_CLASS = 'examples.pax.experiment:Experiment'
# Constant -> key of the run's config that it is.
_KEYS = {
  'SHARDING': 'sharding',
  'TOPOLOGY': 'topology',
  'MAX_STEPS': 'training_steps',
  'CHECKPOINT_EVERY_N_STEPS': 'save_checkpoint_interval',
  'CHECKPOINT_MAX_TO_KEEP': 'max_checkpoints_to_keep',
  'SUMMARY_INTERVAL_STEPS': 'log_tensors_interval',
  'EVAL_INTERVAL_STEPS': 'eval_interval',
  'RANDOM_SEED': 'random_seed',
}
# The same, of constants that not every experiment has. The keys are new.
_DATA_KEYS = {
  'DATA': 'data',
  'DATA_DIR': 'data_dir',
  'VOCABULARY': 'vocabulary',
}
# They are `config.mesh`, and only there.
_MESH = ('ICI_MESH_SHAPE', 'DCN_MESH_SHAPE')

_DECODE_STEPS = 64


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
  experiment = experiment_registry.get(name)
  if option:
    experiment = experiment.reduced()

  config = base_config.get_base_config()
  config.experiment_class = _CLASS
  config.interval_type = 'steps'
  config.on_nonfinite = 'skip'  # As Pax does; the learner has the threshold.
  _set_mesh(config, experiment)

  constants = config_dict.ConfigDict()
  for constant, value in experiment.constants().items():
    if key := _KEYS.get(constant):
      with config.ignore_type():
        config[key] = value
    elif constant not in _MESH:
      key = _DATA_KEYS.get(constant)
      into = constants if key is None else config
      into[key or constant] = _field(experiment, constant, value)
  with config.ignore_type():
    config.log_train_data_interval = config.get_ref('log_tensors_interval')

  # A task does not depend on how many devices there are.
  train = experiment(num_devices=1).filled_task().train
  config.log_async = train.async_summary_writing

  kwargs = config.experiment_kwargs.config = config_dict.ConfigDict()
  kwargs.exp = name
  kwargs.reduced = bool(option)
  kwargs.constants = constants
  if experiment.prompting is not base_experiment.BaseExperiment.prompting:
    options = decoding.Options(
      method='sample', max_decode_steps=_DECODE_STEPS, temperature=0.8
    )
    kwargs.decode = config_dict.ConfigDict(dataclasses.asdict(options))
  return config


def own_constants(
  experiment: experiment_registry.Experiment,
) -> dict[str, Any]:
  """Returns the constants that no key of a run's config stands for."""
  elsewhere = {*_KEYS, *_DATA_KEYS, *_MESH}
  constants = experiment.constants()
  return {n: x for n, x in constants.items() if n not in elsewhere}


def constants_of(run: config_dict.ConfigDict) -> dict[str, Any]:
  """Returns the constants that are keys of a run's config.

  Args:
    run: its config. One that is not of `get_config` says nothing of them.
  """
  if run.experiment_class != _CLASS:
    return {}
  keys = {**_KEYS, **_DATA_KEYS}
  return {name: run[key] for name, key in keys.items() if key in run}


def _set_mesh(
  config: config_dict.ConfigDict, experiment: experiment_registry.Experiment
) -> None:
  """Sets the sizes of the mesh, and the slices that they are for."""
  for network, name in (('ici', 'ICI_MESH_SHAPE'), ('dcn', 'DCN_MESH_SHAPE')):
    sizes = getattr(experiment, name)
    axes = mesh_lib.MESH_AXES
    if len(sizes) not in (len(axes), len(axes) - 1):
      raise ValueError(
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
    for outer in get_args(get_type_hints(experiment)[name])
    for kind in get_args(outer)
    if kind is not type(None)
  ]
  return config_dict.placeholder(kinds[0])
