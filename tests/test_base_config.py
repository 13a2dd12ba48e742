"""What a config may hold, and that what is wrong is said by name."""

import dataclasses
import math
import pathlib
import subprocess
import sys
import types
from unittest import mock

from ml_collections import config_dict
import numpy as np
import pytest

from jaxline import base_config
from jaxline import errors

ROOT = pathlib.Path(__file__).resolve().parent.parent


def make(**values):
  config = base_config.get_base_config()
  config.update(values)
  return config


def refused(config, *words):
  """Checks that the config is refused with a message that has the words."""
  with pytest.raises(ValueError) as caught:
    base_config.validate_config(config)
  for word in words:
    assert word in str(caught.value), caught.value


def test_the_base_config_is_valid():
  base_config.validate_config(base_config.get_base_config())
  base_config.validate_config(base_config.get_base_config().lock())


def test_the_page_of_the_keys_is_what_the_table_says():
  done = subprocess.run(
    [sys.executable, '-W', 'error', '-m', 'jaxline.base_config'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  name = 'docs/reference/config.md'
  page = (ROOT / name).read_text(encoding='utf-8')
  assert done.stdout == page, f'python -m jaxline.base_config > {name}'
  for key in base_config.KEYS:
    assert page.count(f'\n| `{key.name}` | ') == 1, key.name


def test_each_key_has_one_row_and_its_default_is_valid():
  config = base_config.get_base_config()
  names = [key.name for key in base_config.KEYS]
  sections = {name.rpartition('.')[0] for name in names}
  assert set(names) == {*base_config.flat(config.to_dict())} | sections - {''}
  assert len(names) == len(set(names))


def test_a_class_that_was_handed_over_may_be_named_later():
  cls = types.SimpleNamespace(CHANGEABLE_ON_RESUME=(), CONFIG_CLASS=None)
  unnamed, named, other = (
    {'experiment_class': name, 'random_seed': 1}
    for name in (None, 'a:A', 'b:B')
  )
  assert not base_config.changes(unnamed, named, cls)
  assert not base_config.changes(named, unnamed, cls)
  assert base_config.changes(named, other, cls) == [
    "experiment_class: 'a:A' then, 'b:B' now"
  ]


def test_the_effects_of_a_change():
  found = {key.name: key.effect for key in base_config.KEYS}
  assert {name for name, effect in found.items() if effect == 'run'} == {
    'experiment_class',
    'experiment_kwargs',
    'legacy_random_seed_behavior',
    'random_mode_train',
    'random_seed',
  }
  assert {
    name
    for name, effect in found.items()
    if effect == 'program' and '.' not in name
  } == {
    'gradient_accumulation_steps',
    'mesh',
    'on_nonfinite',
    'sharding',
    'sharding_rules',
    'xla',
  }
  assert {key.name for key in base_config.KEYS if key.sharded} == {
    'gradient_accumulation_steps',
    'infeed_buffer_size',
    'infeed_stall_secs',
    'mesh',
    'sharding',
    'sharding_rules',
  }


def test_each_call_makes_a_new_config():
  config = base_config.get_base_config()
  config.training_steps = 1
  config.experiment_kwargs.rate = 0.5
  assert base_config.get_base_config().training_steps == 10000
  assert len(base_config.get_base_config().experiment_kwargs) == 0


# Keys.


@pytest.mark.parametrize(
  ('wrong', 'right'),
  [
    ('trainig_steps', 'training_steps'),
    ('training_step', 'training_steps'),
    ('save_checkpoint_intervals', 'save_checkpoint_interval'),
    ('log_tensor_interval', 'log_tensors_interval'),
    ('checkpoint_dirs', 'checkpoint_dir'),
    ('checkpoint_interval', 'save_checkpoint_interval'),
    ('best_model_eval_metrics', 'best_model_eval_metric'),
    ('random_sede', 'random_seed'),
    ('one_off_evaluation', 'one_off_evaluate'),
    ('experiment_kwarg', 'experiment_kwargs'),
  ],
)
def test_a_misspelled_key_is_refused_with_the_right_one(wrong, right):
  refused(make(**{wrong: 1}), repr(wrong), repr(right), 'base_config.py')


@pytest.mark.parametrize('key', list(base_config.get_base_config()))
def test_every_key_must_be_there(key):
  config = base_config.get_base_config()
  del config[key]
  refused(config, repr(key), 'get_base_config', 'base_config.py')


# Each seen in a public experiment, or made of one.
EXTRA_KEYS = (
  'eval_specific_checkpoint_dir',
  'eval_modes',
  'restore_path',
  'train_batch_size',
  'train_batch_size_per_device',
  'dataset_loader',
  'max_context_length',
  'num_targets',
  'num_microbatches',
  'num_epochs',
  'num_training_steps',
  'best_checkpoint_dir',
  'eval_random_seed',
  'project_name',
  'debug',
  'wandb',
  'train',
  'eval',
  'seed',
  'model',
  'dataset',
)


def test_an_experiments_own_keys_pass():
  base_config.validate_config(make(**dict.fromkeys(EXTRA_KEYS, 'x')))


def test_keys_inside_experiment_kwargs_are_its_own():
  config = base_config.get_base_config()
  config.experiment_kwargs = {'config': {'trainig_steps': 1}}
  base_config.validate_config(config)


def test_validate_keys_goes_into_nested_configs():
  wanted = config_dict.ConfigDict({'a': {'b': {'rate': 1}}, 'c': 2})
  there = config_dict.ConfigDict({'a': {'b': {}}, 'c': 2, 'more': 3})
  with pytest.raises(ValueError, match=r"'rate' is missing.*my_base\.py"):
    base_config.validate_keys(wanted, there, base_filename='my_base.py')
  there.a.b.rate = 5
  base_config.validate_keys(wanted, there)
  there.a = None  # Switched off as a whole.
  base_config.validate_keys(wanted, there)


# Values.


def with_value(key, value):
  config = base_config.get_base_config()
  with config.ignore_type():
    config.update_from_flattened_dict({key: value})
  return config


@pytest.mark.parametrize(
  ('key', 'value', 'expected'),
  [
    ('interval_type', 'seconds', "'secs', 'steps'"),
    ('logging_interval_type', 'minutes', "'secs', 'steps'"),
    ('checkpoint_interval_type', 3, "'secs', 'steps'"),
    ('eval_interval_type', 'epochs', "'secs', 'steps'"),
    ('random_mode_train', 'unique', 'same_host_unique_device'),
    ('random_mode_eval', None, 'same_host_unique_device'),
    ('save_checkpoint_interval', '300', 'a number'),
    ('log_tensors_interval', True, 'a number'),
    ('log_train_data_interval', 'often', 'a number'),
    ('eval_interval', [300], 'a number'),
    ('training_steps', -1, 'a number in [0, inf)'),
    ('training_steps', '1000', 'a number'),
    ('max_checkpoints_to_keep', 0, 'an integer in [1, inf)'),
    ('max_checkpoints_to_keep', None, 'an integer in [1, inf)'),
    ('max_checkpoints_to_keep', 2.5, 'an integer'),
    ('max_steps_in_flight', 0, 'an integer in [1, inf)'),
    ('random_seed', 4.2, 'an integer'),
    ('random_seed', None, 'an integer'),
    ('best_model_eval_metric', True, 'name of a scalar'),
    ('checkpoint_dir', 7, 'name of a directory'),
    ('experiment_class', 7, 'package.module:Class'),
    ('periodic_action_growth_ratios', 10, 'positive numbers'),
    ('periodic_action_growth_ratios', '125', 'positive numbers'),
    ('periodic_action_growth_ratios', [1, -2], 'positive numbers'),
    ('log_async', 'no', 'True or False'),
    ('log_all_hosts', 1, 'True or False'),
    ('one_off_evaluate', None, 'True or False'),
    ('gradient_accumulation_steps', 0, 'an integer in [1, inf)'),
    ('gradient_accumulation_steps', None, 'an integer in [1, inf)'),
    ('num_slices', 0, 'an integer in [1, inf)'),
    ('topology', 4, "'v4:4x4x4'"),
    ('distributed', 'on', "('auto', 'off')"),
    ('distributed', None, "('auto', 'off')"),
    ('training_steps', math.inf, 'a number'),
    ('training_steps', math.nan, 'a number'),
    ('save_checkpoint_interval', math.inf, 'a number'),
    ('log_tensors_interval', math.nan, 'a number'),
    ('log_train_data_interval', -math.inf, 'a number'),
    ('eval_interval', math.inf, 'a number'),
    ('watchdog_secs', math.inf, 'a number in (0, inf)'),
    ('watchdog_secs', math.nan, 'a number in (0, inf)'),
    ('infeed_stall_secs', math.inf, 'a number in (0, inf)'),
    ('keep_checkpoint_every_hours', math.inf, 'a number in (0, inf)'),
    ('periodic_action_growth_ratios', [1, math.inf], 'positive numbers'),
    ('max_checkpoints_to_keep', True, 'an integer'),
    ('max_nonfinite_steps', math.inf, 'an integer'),
    ('infeed_buffer_size', math.inf, 'an integer'),
    ('random_seed', 2**63, 'from -2**63 to 2**63 - 1'),
    ('random_seed', -(2**63) - 1, 'from -2**63 to 2**63 - 1'),
    ('random_seed', True, 'an integer'),
    ('decode.prompts', 7, 'name of a file'),
    ('decode.output', True, 'name of a file'),
    ('decode.batch_size', 0, 'an integer in [1, inf)'),
    ('decode.batch_size', None, 'an integer'),
    ('decode.series', 'newest', "one of ('latest', 'best')"),
    ('decode.step', -1, 'an integer in [0, inf)'),
    ('decode.step', '9', 'an integer in [0, inf)'),
    ('experiment_kwargs', None, 'a dict of arguments'),
    ('mesh', 3, 'a dict of some of the keys'),
    ('mesh.ici', 3, 'a dict from axis to size'),
    ('sharding_rules', 3, 'a dict from logical axis'),
    ('xla.flags', 3, 'a dict from flag'),
    ('restore_rules', 'ab', 'pairs (regular expression, name or None)'),
    ('restore_rules', (('w', 3),), 'or None), such as'),
    ('restore_rules', (('(', 'w'),), 'unterminated subpattern'),
  ],
)
def test_a_wrong_value_is_refused_by_name(key, value, expected):
  refused(with_value(key, value), f'config.{key} is {value!r}', expected)


def test_keys_of_decode():
  config = base_config.get_base_config()
  config.decode.prompt = 'x'
  refused(config, "'prompt'", "'prompts'")
  config = base_config.get_base_config()
  config.decode.beam_size = 3
  refused(config, "'beam_size' in config.decode", "'batch_size'", "'series'")
  refused(with_value('decode', None), 'config.decode is None', "'prompts'")
  config = base_config.get_base_config()
  config.decode.update(series='best', step=0, prompts='a.txt')
  base_config.validate_config(config)


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    ('training_steps', None),
    ('training_steps', 0),
    ('training_steps', np.int64(3)),
    ('interval_type', None),
    ('interval_type', 'steps'),
    ('save_checkpoint_interval', -1),
    ('save_checkpoint_interval', None),
    ('save_checkpoint_interval', 0.5),
    ('log_train_data_interval', None),
    ('log_tensors_interval', 0),
    ('max_steps_in_flight', 2),
    ('random_seed', np.int32(3)),
    ('random_seed', 2**63 - 1),
    ('random_seed', -(2**63)),
    ('best_model_eval_metric', None),
    ('periodic_action_growth_ratios', []),
    ('checkpoint_dir', '/tmp/run'),
    ('experiment_class', 'package.module:Class'),
    # What a mesh leaves out has a default.
    ('mesh', None),
    ('mesh', {'data': 4}),
    ('mesh', {'ici': {'mdl': -1}}),
    ('mesh', {'ici': None}),
    ('sharding_rules', None),
    ('sharding_rules', {'mlp': ('data',)}),
    ('distributed', 'off'),
    (
      'distributed',
      {'coordinator': 'a:1234', 'num_processes': 2, 'process_id': 1},
    ),
  ],
)
def test_what_a_run_can_mean_passes(key, value):
  base_config.validate_config(with_value(key, value))


def test_assigning_needs_no_tricks_for_what_is_seen_in_the_wild():
  config = base_config.get_base_config()
  config.training_steps = None
  config.interval_type = None
  config.save_checkpoint_interval = -1
  config.log_train_data_interval = None
  config.periodic_action_growth_ratios = None
  config.checkpoint_dir = '/tmp/run'
  base_config.validate_config(config.lock())


# Contradictions.


@pytest.mark.parametrize(
  ('values', 'passes'),
  [
    ({}, False),
    ({'interval_type': None}, False),
    ({'interval_type': 'steps'}, True),
    ({'checkpoint_interval_type': 'steps'}, True),
    ({'interval_type': 'steps', 'checkpoint_interval_type': 'secs'}, False),
  ],
)
def test_checkpoints_by_all_hosts_go_by_steps(values, passes):
  config = make(train_checkpoint_all_hosts=True, **values)
  if passes:
    base_config.check_constraints(config)
  else:
    refused(
      config,
      'train_checkpoint_all_hosts',
      "checkpoint_interval_type = 'steps'",
    )


@pytest.mark.parametrize(
  ('values', 'passes'),
  [
    ({}, False),
    ({'interval_type': 'steps'}, True),
    ({'interval_type': 'steps', 'logging_interval_type': 'secs'}, False),
    ({'interval_type': 'steps', 'checkpoint_interval_type': 'secs'}, False),
    (
      {'logging_interval_type': 'steps', 'checkpoint_interval_type': 'steps'},
      True,
    ),
  ],
)
def test_growth_ratios_need_steps(values, passes):
  config = make(periodic_action_growth_ratios=[1, 2, 5], **values)
  if passes:
    base_config.check_constraints(config)
  else:
    refused(config, 'periodic_action_growth_ratios', "interval_type = 'steps'")


def test_settings_of_xla_are_checked():
  config = base_config.get_base_config()
  config.xla.pgle_profiling_runs = -1
  refused(config, 'config.xla.pgle_profiling_runs is -1')
  config = base_config.get_base_config()
  config.xla.pgle_profilng_runs = 3
  refused(config, "'pgle_profilng_runs'", "'pgle_profiling_runs'")


def test_slices_are_of_a_topology():
  refused(make(num_slices=2), 'config.num_slices is 2', 'Set both, or neither')
  base_config.validate_config(make(num_slices=2, topology='v4:4x4x4'))


def test_validate_config_makes_all_checks():
  config = make()
  names = ('validate_keys', 'check_constraints')
  patches = dict.fromkeys(names, mock.DEFAULT)
  with mock.patch.multiple(base_config, **patches) as mocks:
    base_config.validate_config(config)
  for name in names:
    mocks[name].assert_called_once()
  with pytest.raises(errors.UsageError, match='random_seed is None'):
    base_config.validate_config(with_value('random_seed', None))


# An experiment's own config.


@dataclasses.dataclass(frozen=True)
class Optimizer:
  rate: float
  decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Model:
  width: int
  layers: tuple = (1, 2)
  optimizer: Optimizer = Optimizer(0.5)
  maybe: Optimizer | None = None
  late: 'Optimizer | None' = None
  extra: dict = dataclasses.field(default_factory=dict)
  area: int = dataclasses.field(init=False, default=0)


def test_read_builds_nested_dataclasses():
  config = config_dict.ConfigDict(
    {
      'width': 3,
      'optimizer': {'rate': 0.1, 'decay': 0.2},
      'maybe': {'rate': 0.3},
      'late': {'rate': 0.4},
      'extra': {'a': {'b': 1}},
    }
  )
  model = base_config.read(Model, config)
  assert model == Model(
    3,
    optimizer=Optimizer(0.1, 0.2),
    maybe=Optimizer(0.3),
    late=Optimizer(0.4),
    extra={'a': {'b': 1}},
  )
  assert type(model.extra) is dict
  assert type(model.extra['a']) is dict


def test_read_keeps_defaults_and_takes_what_is_built_already():
  optimizer = Optimizer(0.1)
  values = {'width': 3, 'optimizer': optimizer, 'maybe': None}
  model = base_config.read(Model, values)
  assert model.optimizer is optimizer
  assert model.maybe is None
  assert model.layers == (1, 2)
  assert base_config.read(Model, values | {'layers': (4,)}).layers == (4,)


def test_read_understands_annotations_that_are_strings():
  # As they all are after `from __future__ import annotations`.
  strings = dataclasses.make_dataclass(
    'Strings', [('optimizer', 'Optimizer'), ('width', 'int', 1)]
  )
  strings.__module__ = __name__
  made = base_config.read(strings, {'optimizer': {'rate': 0.1}})
  assert made.optimizer == Optimizer(0.1)


@pytest.mark.parametrize(
  ('config', 'words'),
  [
    ({'widht': 3}, ("'widht'", 'Model', "Did you mean 'width'?")),
    ({'width': 3, 'zzz': 1}, ("'zzz'", "'layers'")),
    ({'width': 3, 'area': 9}, ("'area'",)),
    ({}, ("missing 1 required positional argument: 'width'", 'Model')),
    (
      {'width': 3, 'optimizer': {'rate': 1, 'decya': 2}},
      ("'decya'", 'Optimizer', "'decay'"),
    ),
    ({'width': 3, 'maybe': {}}, ("argument: 'rate'", 'Optimizer')),
  ],
)
def test_read_refuses_wrong_keys_by_name(config, words):
  with pytest.raises(ValueError) as caught:
    base_config.read(Model, config_dict.ConfigDict(config))
  for word in words:
    assert word in str(caught.value), caught.value


@dataclasses.dataclass(frozen=True)
class Checked:
  rate: float = 0.5
  size: int = 1

  def __post_init__(self):
    base_config.check_numbers(
      self, {'rate': '(0, 1]', 'size': 'integer [0, inf)'}
    )


@pytest.mark.parametrize(
  ('key', 'value', 'expected'),
  [
    ('rate', 0, r'a number in \(0, 1\]'),
    ('rate', 1.1, r'a number in \(0, 1\]'),
    ('rate', math.nan, r'a number in \(0, 1\]'),
    ('rate', '0.5', r'a number in \(0, 1\]'),
    ('rate', None, r'a number in \(0, 1\]'),
    ('size', -1, r'an integer in \[0, inf\)'),
    ('size', 1.5, r'an integer in \[0, inf\)'),
    ('size', math.inf, r'an integer in \[0, inf\)'),
    ('size', True, r'an integer in \[0, inf\)'),
  ],
)
def test_values_that_a_dataclass_refuses_are_the_users_error(
  key, value, expected
):
  with pytest.raises(
    errors.UsageError, match=rf'^Checked: {key} is .*{expected}\.$'
  ):
    base_config.read(Checked, {key: value})


def test_values_at_the_ends_of_an_interval():
  for config in ({'rate': 1}, {'rate': 1e-9}, {'size': 0}, {'size': 10**30}):
    base_config.read(Checked, config)


@pytest.mark.parametrize(
  'values', [{'training_steps': 3}, {'mesh': {'data': 2}}, {}]
)
def test_a_config_of_old_gets_the_keys_that_it_lacks(values):
  old = config_dict.ConfigDict(values).lock()
  complete = base_config.complete_config(old)
  expected = base_config.get_base_config().to_dict() | {
    'on_nonfinite': 'ignore'
  }
  assert complete.to_dict() == expected | values
  assert old.to_dict() == values
  assert base_config.complete_config(complete) is complete


@pytest.mark.parametrize('config', [mock.Mock(), None])
def test_what_stands_for_a_config_stays_as_it_is(config):
  assert base_config.complete_config(config) is config
