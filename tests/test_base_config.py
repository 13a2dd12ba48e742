"""What a config may hold, and that what is wrong is said by name."""

import contextlib
import dataclasses
import io
import math
import pathlib
import runpy

from ml_collections import config_dict
import numpy as np
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline.base import keys
from tests import processes


def refused(config, *words):
  """Checks that the config is refused with a message that has the words."""
  with pytest.raises(ValueError) as caught:
    base_config.validate_config(config)
  for word in words:
    assert word in str(caught.value), caught.value


def test_the_page_of_the_keys_is_what_the_table_says():
  with contextlib.redirect_stdout(io.StringIO()) as out:
    runpy.run_path(base_config.__file__, run_name='__main__')
  name = 'docs/reference/config.md'
  page = (processes.ROOT / name).read_text(encoding='utf-8')
  assert out.getvalue() == page, f'python -m jaxline.base_config > {name}'
  for key in base_config.KEYS:
    assert page.count(f'\n| `{key.name}` | ') == 1, key.name


def with_values(values):
  config = base_config.get_base_config()
  with config.ignore_type():
    config.update_from_flattened_dict(values)
  return config


def test_every_key_must_be_there_and_has_a_check():
  for key in base_config.get_base_config():
    config = base_config.get_base_config()
    del config[key]
    refused(config, repr(key))
  for key in base_config.KEYS:
    config = with_values({key.name: object()})
    refused(config, key.name.split('.')[0], 'expected')


INF = math.inf
# Key -> values that are refused.
WRONG = {
  'interval_type': ['seconds', 3],
  'random_mode_eval': [None],
  'save_checkpoint_interval': ['300', True, [300], INF, -INF, math.nan],
  'training_steps': [-1, '1000', INF, math.nan],
  'max_checkpoints_to_keep': [0, None, 2.5, True, INF],
  'random_seed': [4.2, None, 2**63, -(2**63) - 1, True],
  'periodic_action_growth_ratios': [10, '125', [1, -2], [1, INF]],
  'compilation_cache': ['', 'on', 'False', 'Auto', 'dir'],
  'watchdog_secs': [0, INF, math.nan],
  'profile_steps': ['ten', '3-1', '2,2', '0-3', '1-5,5', '1-', '-5'],
  'eval_steps': ['1-2', 'last'],
  'decode': [None],
  'mesh': [3],
  'xla.pgle_profile': [3, 'a.profile'],
  'xla.flags': [3, ['xla_dump_to']],
  'restore_rules': ['ab', (('w', 3),)],
}
RIGHT = {
  'training_steps': [None, 0, np.int64(3)],
  'interval_type': [None, 'steps'],
  'save_checkpoint_interval': [-1, None, 0.5],
  'random_seed': [np.int32(3), 2**63 - 1, -(2**63)],
  'best_model_eval_metric': [None],
  'periodic_action_growth_ratios': [None, []],
  # What a mesh leaves out has a default.
  'mesh': [None, {'data': 4}, {'ici': {'mdl': -1}}, {'ici': None}],
  'sharding_rules': [None, {'mlp': ('data',)}],
  'distributed': ['off'],
  'xla.pgle_save': ['', 'a.pb'],
  # An experiment's own keys.
  'num_microbatches': ['x'],
  'experiment_kwargs': [{'config': {'trainig_steps': 1}}],
}


def test_a_wrong_value_is_refused_by_name_and_a_right_one_passes():
  expected = {key.name: key.check.expected for key in base_config.KEYS}
  for key, values in WRONG.items():
    for value in values:
      said = f'config.{key} is {value!r}', expected[key]
      refused(with_values({key: value}), *said)
  for key, values in RIGHT.items():
    for value in values:
      base_config.validate_config(with_values({key: value}))
  with pytest.raises(TypeError):  # As in JAXline.
    base_config.get_base_config().training_steps = '5'


OTHERS = """
  checkpointer console decode distributed early_stop eval_interval eval_steps
  experiment_class mesh sharding sharding_rules watchdog_secs writers xla
"""


@pytest.mark.parametrize('name', OTHERS.split())
def test_a_program_of_jaxline_may_use_a_key_for_itself(name):
  for value in (True, '2x4', (3, 'a'), {'a': 1}, pathlib.Path('/x'), None):
    config = base_config.get_base_config().lock()
    config[name] = value
    config.lock()
    base_config.validate_config(config, may_be_own=True)
    view = base_config.complete_config(config)
    base_config.validate_config(view)
    assert config.to_dict()[name] == value
    assert base_config.recorded(view) == base_config.recorded(config)
  # No program means these.
  for key, value in (('random_seed', '5'), ('early_stop.patienec', 2)):
    with pytest.raises(errors.UsageError, match=key.split('.')[-1]):
      base_config.validate_config(with_values({key: value}), may_be_own=True)


@pytest.mark.parametrize(
  ('values', 'words'),
  [
    ({'trainig_steps': 1}, ["'trainig_steps'", "mean 'training_steps'"]),
    ({'checkpoint_interval': 1}, ["mean 'save_checkpoint_interval'"]),
    ({'restore_rules': [('a', 'b')]}, ['restore_from']),
    ({'early_stop.patience': 2}, ['best_model_eval_metric']),
    ({'early_stop.target': 2.0}, ['best_model_eval_metric']),
    ({'decode.prompt': 'x'}, ["'prompt'", "'prompts'"]),
    ({'decode.beam_size': 3}, ["'beam_size' in config.decode", "'series'"]),
    ({'sharding_rules.mlp': ['date']}, ["'date'", "mean 'data'"]),
    ({'preemption_signals': 'SIGUSR2,SIGKILL'}, ["'SIGKILL' in", "'SIGHUP'"]),
    ({'sharding': 'fsd'}, ["'fsd'", "mean 'fsdp'"]),
    ({'mesh.ici': 3}, ['config.mesh', 'ici']),
    ({'mesh.dnc': {'data': 2}}, ["'dnc'", "mean 'dcn'"]),
    ({'eval_steps': 'all', 'checkpointer': 'memory'}, ['eval_steps']),
    (
      {'xla.pgle_profiling_runs': 3, 'xla.pgle_profile': 'a.pb'},
      ['pgle_profiling_runs', 'pgle_profile'],
    ),
  ],
)
def test_what_is_misspelled_alone_or_contradicts_is_refused(values, words):
  refused(with_values(values), *words)


@dataclasses.dataclass(frozen=True)
class Optimizer:
  rate: float
  decay: float = 0.0

  def __post_init__(self):
    keys.check_attributes(self, rate=keys.number(above=0, max=1))


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
  config = {
    'width': 3,
    'optimizer': {'rate': 0.1, 'decay': 0.2},
    'maybe': {'rate': 0.3},
    'late': {'rate': 0.4},
    'extra': {'a': {'b': 1}},
  }
  built = [Optimizer(0.1, 0.2), Optimizer(0.3), Optimizer(0.4)]
  expected = Model(3, (1, 2), *built, extra={'a': {'b': 1}})
  for given in (
    config,
    config_dict.ConfigDict(config),
    {**config, 'optimizer': built[0]},
  ):
    model = base_config.read(Model, given)
    assert model == expected
    assert type(model.extra) is type(model.extra['a']) is dict


@pytest.mark.parametrize(
  ('config', 'words'),
  [
    ({'widht': 3}, ("'widht' in Model", "mean 'width'")),
    ({'width': 3, 'area': 9}, ("'area'",)),
    ({}, ("argument: 'width'", 'Model')),
    ({'width': 3, 'optimizer': {'decya': 2}}, ("'decya' in Optimizer",)),
    ({'width': 3, 'maybe': {}}, ("argument: 'rate'", 'Optimizer')),
    ({'width': 3, 'maybe': {'rate': 1.1}}, ('Optimizer: rate is 1.1',)),
    ({'width': 3, 'maybe': {'rate': '1'}}, ("Optimizer: rate is '1'",)),
  ],
)
def test_read_refuses_wrong_keys_and_values_by_name(config, words):
  with pytest.raises(errors.UsageError) as caught:
    base_config.read(Model, config_dict.ConfigDict(config))
  assert all(word in str(caught.value) for word in words), caught.value


def test_a_config_of_old_gets_the_keys_that_it_lacks():
  expected = base_config.get_base_config().to_dict()
  expected['on_nonfinite'] = 'ignore'
  for values in ({'training_steps': 3}, {'mesh': {'data': 2}}, {}):
    old = config_dict.ConfigDict(values).lock()
    complete = base_config.complete_config(old)
    assert complete.to_dict() == expected | values
    assert old.to_dict() == values
    assert base_config.complete_config(complete) is complete
