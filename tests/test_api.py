"""JAXline's contract by signature: what old code may write is still there."""

import inspect
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import flagsaver
import jax
from ml_collections import config_dict
import numpy as np
import pytest

from jaxline import base_config
from jaxline import experiment
from jaxline import platform
from jaxline import train
from jaxline import utils

ROOT = pathlib.Path(__file__).resolve().parent.parent


# The contract, written as what it is: heads of functions. Only the names of
# parameters, their kinds and their defaults are compared.


class Experiment:
  def __init__(self, mode, init_rng=None): ...
  def initialize_train_step_rng(self, rng): ...
  def step(self, *, global_step, rng, writer): ...
  def evaluate(self, *, global_step, rng, writer): ...
  def should_run_step(self, global_step, config): ...
  def train_loop(self, config, state, periodic_actions, writer=None): ...
  def snapshot_state(self): ...
  def restore_from_snapshot(self, snapshot_state): ...
  def on_new_best_model(self, best_state): ...


class Checkpointer:
  def save(self, ckpt_series): ...
  def restore(self, ckpt_series): ...
  def get_experiment_state(self, ckpt_series): ...
  def restore_path(self, ckpt_series): ...
  def can_be_restored(self, ckpt_series): ...
  def wait_for_checkpointing_to_finish(self): ...


class InMemoryCheckpointer(Checkpointer):
  def __init__(self, config, mode): ...


class Writer:
  def write_scalars(self, global_step, scalars): ...


class TensorBoardLogger(Writer):
  def __init__(self, config, mode): ...
  def write_images(self, global_step, images): ...


class PeriodicAction:
  def __init__(
    self,
    fn,
    interval_type,
    interval,
    start_time=0.0,
    start_step=0,
    run_async=True,
    log_all_data=False,
    logging_growth_ratios=None,
    end_step_to_action=None,
  ): ...
  def __call__(self, t, step, scalar_outputs): ...
  def update_time(self, t, step): ...
  def wait_to_finish(self): ...


class BaseConfigFunctions:
  def get_base_config(): ...
  def validate_keys(
    base_cfg, config, base_filename='jaxline/base_config.py'
  ): ...
  def check_constraints(config): ...
  def validate_config(config): ...


class TrainFunctions:
  def train(
    experiment_class, config, checkpointer, writer, periodic_actions=()
  ): ...
  def evaluate(
    experiment_class, config, checkpointer, writer, jaxline_mode=None
  ): ...
  def _initialize_experiment(
    experiment_class, mode, rng, experiment_kwargs
  ): ...
  def _log_outputs(step, scalar_values): ...


class PlatformFunctions:
  def main(
    experiment_class, argv, checkpointer_factory=platform.create_checkpointer
  ): ...
  def create_checkpointer(config, mode): ...
  def create_writer(config, mode): ...


class UtilsFunctions:
  def py_prefetch(iterable_function, buffer_size=5, *, thread_name=None): ...
  def double_buffer(ds): ...
  def double_buffer_on_gpu(ds): ...
  def make_async(thread_name_prefix=''): ...
  def get_first(xs): ...
  def bcast_local_devices(value): ...
  def maybe_device_get(x): ...
  def kwargs_only(f): ...
  def log_activity(activity_name): ...
  def host_id_devices_for_rng(mode='unique_host_unique_device'): ...
  def specialize_rng_host_device(
    rng, host_id, axis_name, mode='unique_host_unique_device'
  ): ...
  def rendezvous(): ...
  def debugger_fallback(f): ...
  def disable_pmap_jit(fn): ...
  def evaluate_should_return_dict(f): ...


CONTRACT = (
  (experiment.AbstractExperiment, Experiment),
  (utils.Checkpointer, Checkpointer),
  (utils.InMemoryCheckpointer, InMemoryCheckpointer),
  (utils.Writer, Writer),
  (platform.TensorBoardLogger, TensorBoardLogger),
  (utils.PeriodicAction, PeriodicAction),
  (base_config, BaseConfigFunctions),
  (train, TrainFunctions),
  (platform, PlatformFunctions),
  (utils, UtilsFunctions),
)


def heads(contract):
  for cls in contract.__mro__[:-1]:
    for name, head in vars(cls).items():
      if inspect.isfunction(head):
        yield name, head


@pytest.mark.parametrize(
  ('owner', 'name', 'head'),
  [
    pytest.param(owner, name, head, id=f'{owner.__name__}.{name}')
    for owner, contract in CONTRACT
    for name, head in heads(contract)
  ],
)
def test_signature(owner, name, head):
  def describe(function):
    parameters = inspect.signature(function).parameters.values()
    # What is ours besides can only be given by name, and need not be.
    return [
      (p.name, p.kind, p.default)
      for p in parameters
      if p.name != 'supervision' or p.kind != p.KEYWORD_ONLY
    ]

  assert describe(getattr(owner, name)) == describe(head)


def test_step_and_evaluate_are_abstract_and_so_is_the_constructor():
  assert experiment.AbstractExperiment.__abstractmethods__ == {
    '__init__',
    'step',
    'evaluate',
  }


def test_checkpoint_attributes_are_empty_dicts():
  assert experiment.AbstractExperiment.CHECKPOINT_ATTRS == {}
  assert experiment.AbstractExperiment.NON_BROADCAST_CHECKPOINT_ATTRS == {}


def test_checkpoints_are_named_tuples_of_these_fields():
  assert utils.SnapshotNT._fields == ('id', 'pickle_nest')
  assert utils.CheckpointNT._fields == ('active', 'history')
  assert utils.GLOBAL_CHECKPOINT_DICT is not None


def test_random_modes():
  assert [(m.name, m.value) for m in utils.DistributedRNGMode] == [
    (name.upper(), name)
    for name in (
      'unique_host_unique_device',
      'unique_host_same_device',
      'same_host_unique_device',
      'same_host_same_device',
    )
  ]
  assert utils.DistributedRNGMode('unique_host_same_device').unique_host
  assert not utils.DistributedRNGMode('unique_host_same_device').unique_device


def test_tree_psum_is_psum():
  assert utils.tree_psum is jax.lax.psum


def test_utils_exports_what_it_says():
  missing = [n for n in utils.__all__ if not hasattr(utils, n)]
  assert not missing
  # And not less than the contract's own names.
  contract = {name for name, _ in heads(UtilsFunctions)}
  contract |= {
    'CheckpointNT', 'Checkpointer', 'DistributedRNGMode',
    'GLOBAL_CHECKPOINT_DICT', 'InMemoryCheckpointer', 'PeriodicAction',
    'SnapshotNT', 'Writer', 'jax', 'logging', 'tree_psum',
  }  # fmt: skip
  assert contract <= set(utils.__all__)


def test_an_unknown_name_of_utils_is_an_attribute_error():
  with pytest.raises(AttributeError, match='no_such_name'):
    _ = utils.no_such_name


def test_the_protocols_are_for_annotations_and_autospecs():
  for cls in (utils.Writer, utils.Checkpointer):
    instance = mock.create_autospec(cls, instance=True)
    with pytest.raises(AttributeError):
      _ = instance.no_such_method


# The base config.

DEFAULTS = {
  'experiment_kwargs': config_dict.ConfigDict(),
  'training_steps': 10000,
  'interval_type': 'secs',
  'save_checkpoint_interval': 300,
  'log_tensors_interval': 60,
  'periodic_action_growth_ratios': None,
  'log_train_data_interval': 120.0,
  'log_async': True,
  'log_all_hosts': False,
  'logging_interval_type': None,
  'checkpoint_interval_type': None,
  'save_initial_train_checkpoint': False,
  'eval_initial_weights': False,
  'one_off_evaluate': False,
  'max_checkpoints_to_keep': 5,
  'random_seed': 42,
  'random_mode_train': 'unique_host_unique_device',
  'random_mode_eval': 'same_host_same_device',
  'legacy_random_seed_behavior': False,
  'best_model_eval_metric': '',
  'best_model_eval_metric_higher_is_better': True,
  'train_checkpoint_all_hosts': False,
  'best_checkpoint_all_hosts': False,
  'log_all_train_data': False,
}
# What JAXline's experiments declared themselves, or had not.
OURS = {
  'decode': config_dict.ConfigDict(
    {
      'prompts': None,
      'output': None,
      'batch_size': 8,
      'series': 'latest',
      'step': None,
    }
  ),
  'checkpoint_dir': None,
  'experiment_class': None,
  'eval_interval': 300,
  'eval_interval_type': None,
  'max_steps_in_flight': None,
  'checkpointer': 'durable',
  'checkpoint_allow_pickle': False,
  'max_best_checkpoints_to_keep': 1,
  'keep_checkpoint_every_steps': None,
  'keep_checkpoint_every_hours': None,
  'restore_from': None,
  'restore_rules': (),
  'on_config_change': 'raise',
  'on_nonfinite': None,
  'max_nonfinite_steps': 10,
  'infeed_buffer_size': 3,
  'infeed_stall_secs': 60.0,
  'watchdog_secs': 7200.0,
  'eval_steps': None,
  'mesh': config_dict.ConfigDict(
    {
      'ici': {'stage': 1, 'replica': 1, 'data': -1, 'mdl': 1},
      'dcn': {'stage': 1, 'replica': -1, 'data': 1, 'mdl': 1},
    }
  ),
  'sharding': 'ddp',
  'sharding_rules': config_dict.ConfigDict(),
  'gradient_accumulation_steps': 1,
  'topology': None,
  'num_slices': 1,
  'compiled_program': None,
  'distributed': 'auto',
  'xla': config_dict.ConfigDict(
    {
      'latency_hiding_scheduler': None,
      'pgle_profiling_runs': 0,
      'pgle_aggregation_percentile': None,
      'pgle_save': None,
      'pgle_save_steps': 10,
      'pgle_profile': None,
      'flags': {},
      'tpu_flags': {},
    }
  ),
}


def test_base_config_keys_and_defaults():
  config = base_config.get_base_config()
  expected = DEFAULTS | OURS
  assert set(config) == set(expected)
  for key, default in expected.items():
    value = config[key]
    assert type(value) is type(default), key
    if isinstance(value, config_dict.ConfigDict):
      value, default = value.to_dict(), default.to_dict()
    assert value == default, key


# What an import brings along, each in a process of its own.

HEAVY = (
  'chex',
  'equinox',
  'flax',
  'grain',
  'haiku',
  'optax',
  'orbax',
  'seqio',
  'sklearn',
  'tensorboard',
  'tensorboardX',
  'tensorflow',
  'torch',
)


def python(program):
  """Runs a program of one JSON line."""
  done = subprocess.run(
    [sys.executable, '-c', program],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  return json.loads(done.stdout)


@pytest.fixture(scope='module')
def modules_of_jax():
  return python('import jax, json, sys; print(json.dumps(len(sys.modules)))')


@pytest.mark.parametrize('name', ['jaxline', 'jaxline.platform'])
def test_an_import_costs_little_more_than_jax(name, modules_of_jax):
  modules = python(
    f'import {name}, json, sys; print(json.dumps(list(sys.modules)))'
  )
  assert sorted(set(HEAVY) & set(modules)) == []
  # Among the others are ml_collections, absl and what they need.
  assert len(modules) < 1.2 * modules_of_jax


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    (
      'jaxline.utils',
      {'jaxline_post_mortem': False, 'jaxline_disable_pmap_jit': False},
    ),
    (
      'jaxline.platform',
      {
        'config': None,
        'jaxline_mode': 'train',
        'jaxline_tpu_driver': '',
        'jaxline_ensure_tpu': False,
        'jaxline_post_mortem': False,
        'jaxline_disable_pmap_jit': False,
      },
    ),
  ],
)
def test_flags_are_there_after_one_import(name, expected):
  found = python(
    f'import {name}, json; from absl import flags;'
    f' print(json.dumps({{n: flags.FLAGS[n].default for n in {[*expected]}}}))'
  )
  assert found == expected


# Old tests patch what `utils` uses on `utils`.


def test_patches_of_utils_logging_are_seen():
  with mock.patch('jaxline.utils.logging.info') as info:
    with utils.log_activity('a test'):
      pass
  assert info.mock_calls == [
    mock.call('[jaxline] %s starting...', 'a test'),
    mock.call('[jaxline] %s finished.', 'a test'),
  ]


def test_patches_of_utils_jax_are_seen():
  mode = 'unique_host_same_device'
  with mock.patch.object(utils.jax, 'process_index', return_value=3):
    np.testing.assert_array_equal(utils.host_id_devices_for_rng(mode), [3, 3])
  batches = [np.ones([2])]
  assert utils.double_buffer_on_gpu(batches) is batches
  with mock.patch.object(utils.jax, 'default_backend', return_value='gpu'):
    assert utils.double_buffer_on_gpu(batches) is not batches


@pytest.mark.parametrize('disabled', [False, True])
def test_patches_of_utils_chex_are_seen(disabled):
  with (
    mock.patch.object(
      utils.chex, 'fake_pmap_and_jit', autospec=True
    ) as fake_pmap_and_jit,
    flagsaver.flagsaver(jaxline_disable_pmap_jit=disabled),
  ):
    assert utils.disable_pmap_jit(lambda: 'ran')() == 'ran'
  assert fake_pmap_and_jit.call_count == disabled


@pytest.mark.parametrize('enabled', [False, True])
def test_the_post_mortem_flag_of_utils_is_read(enabled):
  def fail():
    raise ZeroDivisionError

  with (
    mock.patch('pdb.post_mortem') as post_mortem,
    flagsaver.flagsaver(jaxline_post_mortem=enabled),
    pytest.raises(ZeroDivisionError),
  ):
    utils.debugger_fallback(fail)()
  assert post_mortem.call_count == enabled
