"""JAXline's contract by signature: what old code may write is still there."""

import inspect
import json
import pickle
import re
import threading
from unittest import mock

from absl import logging
from absl.testing import flagsaver
import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax
import pytest

from jaxline import base_config
from jaxline import experiment
from jaxline import platform
from jaxline import train
from jaxline import utils
from jaxline.compat import checkpointers
from tests import processes

# The contract: the names of parameters, their kinds and their defaults.
CHECKPOINTER = """
  save(self, ckpt_series)
  restore(self, ckpt_series)
  get_experiment_state(self, ckpt_series)
  restore_path(self, ckpt_series)
  can_be_restored(self, ckpt_series)
  wait_for_checkpointing_to_finish(self)
"""
UTILS = """
  py_prefetch(iterable_function, buffer_size=5, *, thread_name=None)
  double_buffer(ds)
  double_buffer_on_gpu(ds)
  make_async(thread_name_prefix='')
  get_first(xs)
  bcast_local_devices(value)
  maybe_device_get(x)
  kwargs_only(f)
  log_activity(activity_name)
  host_id_devices_for_rng(mode='unique_host_unique_device')
  specialize_rng_host_device(rng, host_id, axis_name,
    mode='unique_host_unique_device')
  rendezvous()
  debugger_fallback(f)
  disable_pmap_jit(fn)
  evaluate_should_return_dict(f)
"""
CONTRACT = {
  experiment.AbstractExperiment: """
    __init__(self, mode, init_rng=None)
    initialize_train_step_rng(self, rng)
    step(self, *, global_step, rng, writer)
    evaluate(self, *, global_step, rng, writer)
    should_run_step(self, global_step, config)
    train_loop(self, config, state, periodic_actions, writer=None)
    snapshot_state(self)
    restore_from_snapshot(self, snapshot_state)
    on_new_best_model(self, best_state)
  """,
  utils.Checkpointer: CHECKPOINTER,
  utils.InMemoryCheckpointer: f'{CHECKPOINTER} __init__(self, config, mode)\n',
  utils.Writer: 'write_scalars(self, global_step, scalars)\n',
  platform.TensorBoardLogger: """
    __init__(self, config, mode)
    write_scalars(self, global_step, scalars)
    write_images(self, global_step, images)
  """,
  utils.PeriodicAction: """
    __init__(self, fn, interval_type, interval, start_time=0.0, start_step=0,
      run_async=True, log_all_data=False, logging_growth_ratios=None,
      end_step_to_action=None)
    __call__(self, t, step, scalar_outputs)
    update_time(self, t, step)
    wait_to_finish(self)
  """,
  base_config: """
    get_base_config()
    validate_keys(base_cfg, config, base_filename='jaxline/base_config.py')
    check_constraints(config)
    validate_config(config)
  """,
  train: """
    train(experiment_class, config, checkpointer, writer, periodic_actions=())
    evaluate(experiment_class, config, checkpointer, writer, jaxline_mode=None)
    _initialize_experiment(experiment_class, mode, rng, experiment_kwargs)
  """,
  platform: """
    main(experiment_class, argv, checkpointer_factory=create_checkpointer)
    create_checkpointer(config, mode)
    create_writer(config, mode)
  """,
  utils: UTILS,
}
HEAD = re.compile(r'(\w+)(\(.*?\))\n', re.S)


def heads(contract):
  return {name: ' '.join(head.split()) for name, head in HEAD.findall(contract)}


OUR_ARGUMENTS = (
  'category',
  'depth_of',
  'logs_error',
  'may_be_own',
  'on_stall',
  'records_config',
  'run_config',
  'stall_secs',
  'step',
  'writer_factory',
)


@pytest.mark.parametrize(
  ('owner', 'name', 'head'),
  [
    pytest.param(owner, name, head, id=f'{owner.__name__}.{name}')
    for owner, contract in CONTRACT.items()
    for name, head in heads(contract).items()
  ],
)
def test_signature(owner, name, head):
  # What is ours besides can only be given by name, and need not be.
  signature = inspect.Signature([
    p.replace(annotation=p.empty)
    for p in inspect.signature(getattr(owner, name)).parameters.values()
    if p.name not in OUR_ARGUMENTS or p.kind != p.KEYWORD_ONLY
  ])  # fmt: skip
  found = re.sub(r'<function (\w+) at \w+>', r'\1', str(signature))
  assert found == head


def test_attributes():
  assert experiment.AbstractExperiment.CHECKPOINT_ATTRS == {}
  assert experiment.AbstractExperiment.NON_BROADCAST_CHECKPOINT_ATTRS == {}
  assert utils.SnapshotNT._fields == ('id', 'pickle_nest')
  assert utils.CheckpointNT._fields == ('active', 'history')
  names = [mode.name for mode in utils.DistributedRNGMode]
  assert names == [mode.value.upper() for mode in utils.DistributedRNGMode]
  # Old tests patch what `utils` uses on `utils`.
  assert utils.jax is jax
  assert utils.logging is logging
  assert not hasattr(utils, 'no_such_name')


# What JAXline's modules import or keep for themselves, besides TensorFlow,
# wrapt and what calls functions that JAX no longer has.
INCIDENTAL = {
  base_config: 'config_dict',
  experiment: """abc functools time Dict List Mapping Optional logging jax jnp
    utils config_dict np""",
  platform: """futures os Any Mapping flags logging chex jax base_config train
    utils config_dict config_flags np _CONFIG _JAXLINE_MODE _JAXLINE_TPU_DRIVER
    _JAXLINE_ENSURE_TPU""",
  train: """functools inspect time Optional flags logging chex jax jnp utils
    FLAGS _log_outputs _initialize_experiment""",
  utils: """collections futures contextlib enum functools pdb queue sys
    threading Any Callable Dict Generator Iterable Mapping Optional Sequence
    TypeVar flags logging chex jax jnp config_dict Protocol _JAXLINE_POST_MORTEM
    _JAXLINE_DISABLE_PMAP_JIT _get_function_name T F GLOBAL_CHECKPOINT_DICT
    tree_psum DistributedRNGMode""",
}


@pytest.mark.parametrize('module', INCIDENTAL, ids=lambda x: x.__name__)
def test_incidental_names(module):
  missing = [x for x in INCIDENTAL[module].split() if not hasattr(module, x)]
  assert not missing
  assert utils.jnp is jnp
  assert train.utils is utils
  with flagsaver.flagsaver(jaxline_mode='eval'):
    assert platform._JAXLINE_MODE.value == 'eval'
  assert platform._CONFIG.value is train.FLAGS.config


# JAXline's own keys; docs/reference/config.md has ours.

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


def test_base_config_keys_and_defaults():
  config = base_config.get_base_config()
  for key, default in DEFAULTS.items():
    value = config[key]
    assert type(value) is type(default), key
    assert value == default, key


# What an import brings along, each in a process of its own.

HEAVY = (
  'chex',
  'equinox',
  'flax',
  'grain',
  'haiku',
  'matplotlib',
  'optax',
  'orbax',
  'pandas',
  'rich',
  'seqio',
  'sklearn',
  'tensorboard',
  'tensorflow',
  'tensorstore',
  'torch',
)


# Whoever imports `utils` alone has these flags as well.
FLAGS = {
  'jaxline_post_mortem': False,
  'jaxline_disable_pmap_jit': False,
  'config': None,
  'jaxline_mode': 'train',
  'jaxline_tpu_driver': '',
  'jaxline_ensure_tpu': False,
}


@pytest.mark.parametrize('name', ['utils', 'platform'])
def test_an_import_defines_the_flags_and_costs_little_more_than_jax(name):
  program = f"""
import jax, json, sys
of_jax = len(sys.modules)
import jaxline.{name}
from absl import flags
found = {{n: flags.FLAGS[n].default for n in {[*FLAGS]}}}
print(json.dumps([of_jax, list(sys.modules), found]))
"""
  done = processes.run('-c', program)
  of_jax, modules, found = json.loads(done.stdout)
  assert found == FLAGS
  assert sorted(set(HEAVY) & set(modules)) == []
  # Among the others are ml_collections, absl and what they need.
  assert len(modules) < 1.2 * of_jax


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


# Programs that save and restore on their own, as published ones do.


class Client(experiment.AbstractExperiment):
  """Adds one to each weight at each step; the classic style."""

  CHECKPOINT_ATTRS = {'_params': 'params', '_opt_state': 'opt_state'}
  steps: list[int] = []
  evaluated: list[tuple[int, float]] = []
  during_step = staticmethod(lambda step: None)

  def __init__(self, mode, config, init_rng):
    super().__init__(mode=mode, init_rng=init_rng)
    self.config = config
    self._params = utils.bcast_local_devices({'linear': {'w': jnp.zeros([3])}})
    self._opt_state = utils.bcast_local_devices(
      optax.sgd(1.0, momentum=0.5).init({'linear': {'w': jnp.zeros([3])}})
    )
    self._update = jax.pmap(
      lambda p: jax.tree.map(lambda x: x + 1, p), axis_name='i',
      donate_argnums=0,
    )  # fmt: skip

  def step(self, global_step, rng, *unused_args, **unused_kwargs):
    step = int(utils.get_first(global_step))
    Client.steps.append(step)
    Client.during_step(step)
    self._params = self._update(self._params)
    return {'loss': jnp.ones([])}

  def evaluate(self, global_step, rng, writer):
    w = float(utils.get_first(self._params)['linear']['w'][0])
    Client.evaluated.append((int(utils.get_first(global_step)), w))
    return {'score': w}


def restore_state_to_in_memory_checkpointer(path):
  """As in many public projects: a file of one's own starts the run."""
  with open(path, 'rb') as f:
    pretrained = pickle.load(f)
  dummy = Client('train', None, init_rng=jax.random.PRNGKey(0))
  for attribute, key in Client.CHECKPOINT_ATTRS.items():
    setattr(dummy, attribute, utils.bcast_local_devices(pretrained[key]))
  state = {
    'global_step': pretrained['global_step'],
    'experiment_module': dummy,
  }
  utils.GLOBAL_CHECKPOINT_DICT['latest'] = utils.CheckpointNT(
    threading.local(), [utils.SnapshotNT(0, state)]
  )


def save_state_from_in_memory_checkpointer(path):
  """The same projects' other half; called by signal handlers, and `finally`."""
  for name, checkpoint in utils.GLOBAL_CHECKPOINT_DICT.items():
    if not checkpoint.history or name != 'latest':
      continue
    nest = checkpoint.history[-1].pickle_nest
    state = {'global_step': nest['global_step']}
    for attribute, key in Client.CHECKPOINT_ATTRS.items():
      state[key] = utils.get_first(
        getattr(nest['experiment_module'], attribute)
      )
    with open(path, 'wb') as f:
      pickle.dump(state, f)


@pytest.fixture
def client(tmp_path, monkeypatch):
  """Runs `Client` as its program would; returns its steps."""
  monkeypatch.setattr(Client, 'evaluated', [])
  monkeypatch.setattr(Client, 'during_step', staticmethod(lambda step: None))

  def run(mode='train', directory='run', cls=Client, **values):
    monkeypatch.setattr(Client, 'steps', [])
    config = base_config.get_base_config()
    config.checkpoint_dir = str(tmp_path / directory)
    config.interval_type = 'steps'
    config.training_steps = 3
    config.save_checkpoint_interval = 2
    config.experiment_kwargs.config = config_dict.ConfigDict({'width': 3})
    config.update(values)
    with flagsaver.flagsaver(config=config, jaxline_mode=mode):
      platform.main(cls, [])
    return Client.steps

  return run


def own_file(path, step=40, w=7.0):
  """Writes what a program of old has saved."""
  opt_state = optax.sgd(1.0, momentum=0.5).init({'linear': {'w': np.ones(3)}})
  state = {
    'global_step': step,
    'params': {'linear': {'w': np.full([3], w, np.float32)}},
    'opt_state': jax.device_get(opt_state),
  }
  path.write_bytes(pickle.dumps(state))
  return path


@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_a_file_of_the_programs_own_starts_the_run(
  checkpointer, client, tmp_path
):
  restore_state_to_in_memory_checkpointer(own_file(tmp_path / 'own'))
  steps = client(training_steps=43, checkpointer=checkpointer)
  assert steps == [40, 41, 42]
  save_state_from_in_memory_checkpointer(tmp_path / 'own')
  saved = pickle.loads((tmp_path / 'own').read_bytes())
  assert saved['global_step'] == 43
  assert type(saved['global_step']) is int
  np.testing.assert_array_equal(saved['params']['linear']['w'], [10, 10, 10])
  np.testing.assert_array_equal(saved['opt_state'][0].trace['linear']['w'], 0)
  # Again, in what could be another process.
  utils.GLOBAL_CHECKPOINT_DICT.clear()
  restore_state_to_in_memory_checkpointer(tmp_path / 'own')
  again = client(
    training_steps=45, checkpointer=checkpointer, directory='another'
  )
  assert again == [43, 44]


def test_the_directory_goes_before_the_programs_own_file(client, tmp_path):
  restore_state_to_in_memory_checkpointer(own_file(tmp_path / 'own'))
  assert client(training_steps=42) == [40, 41]
  restore_state_to_in_memory_checkpointer(own_file(tmp_path / 'own', 90))
  assert client(training_steps=43) == [42]


@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_what_is_left_behind_an_error_is_the_last_save(
  checkpointer, client, tmp_path
):
  def fail(step):
    if step == 3:
      raise ZeroDivisionError('in a step')

  Client.during_step = staticmethod(fail)
  with pytest.raises(ZeroDivisionError):
    try:
      client(training_steps=5, checkpointer=checkpointer)
    finally:
      save_state_from_in_memory_checkpointer(tmp_path / 'own')
  saved = pickle.loads((tmp_path / 'own').read_bytes())
  assert saved['global_step'] == 2
  np.testing.assert_array_equal(saved['params']['linear']['w'], [2, 2, 2])


@pytest.mark.parametrize('one_off', [False, True])
def test_a_file_of_the_programs_own_is_evaluated(one_off, client, tmp_path):
  restore_state_to_in_memory_checkpointer(own_file(tmp_path / 'own', 3))
  client('eval', one_off_evaluate=one_off)
  assert Client.evaluated == [(3, 7.0)]


def test_the_best_of_an_earlier_run_goes_on(client, tmp_path):
  restore_state_to_in_memory_checkpointer(own_file(tmp_path / 'own', 1, w=0))
  utils.GLOBAL_CHECKPOINT_DICT['best'] = utils.CheckpointNT(
    threading.local(),
    [
      utils.SnapshotNT(
        0,
        {'best_eval_metric_value': 1.5, 'best_model_eval_metric': 'score'},
      )
    ],
  )
  client('train_and_eval', best_model_eval_metric='score', eval_interval=1)
  assert Client.evaluated == [(1, 0.0), (2, 1.0), (3, 2.0)]
  best = utils.GLOBAL_CHECKPOINT_DICT['best'].history
  assert [s.pickle_nest['global_step'] for s in best] == [3]


class FillsItsConfig(Client):
  """Derives a number of its own config in the constructor."""

  def __init__(self, mode, config, init_rng):
    with config.unlocked():
      config.depth = config.width + 1
      config.width = 17
    super().__init__(mode, config, init_rng)


@pytest.mark.parametrize('mode', ['train', 'train_eval_multithreaded'])
def test_an_experiment_may_fill_in_its_own_config(
  mode, client, tmp_path, monkeypatch
):
  assert client(mode, cls=FillsItsConfig) == [0, 1, 2]
  assert client(mode, cls=FillsItsConfig, training_steps=4) == [3]
  record = json.loads((tmp_path / 'run' / 'config.json').read_text())
  assert record['experiment_kwargs']['config'] == {'width': 3}
  monkeypatch.setattr(checkpointers, '_begun', {})  # As in another process.
  with pytest.raises(SystemExit, match='width: 3 then, 5 now'):
    client(
      mode, cls=FillsItsConfig, training_steps=5,
      experiment_kwargs={'config': {'width': 5}},
    )  # fmt: skip


class LessInEvaluation(Client):
  """Its evaluation has no optimizer."""

  def __init__(self, mode, config, init_rng):
    self._mode = mode
    super().__init__(mode, config, init_rng)
    if mode != 'train':
      del self._opt_state

  @property
  def CHECKPOINT_ATTRS(self):
    attributes = {'_params': 'params'}
    if self._mode == 'train':
      attributes['_opt_state'] = 'opt_state'
    return attributes


@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_an_evaluation_may_name_less_than_training(checkpointer, client):
  client(cls=LessInEvaluation, checkpointer=checkpointer)
  client(
    'eval', cls=LessInEvaluation, checkpointer=checkpointer,
    one_off_evaluate=True,
  )  # fmt: skip
  assert Client.evaluated == [(3, 3.0)]


@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_attributes_may_change_their_structure(checkpointer, client):
  seen = []

  class Changes(Client):
    NON_BROADCAST_CHECKPOINT_ATTRS = {'_buffer': 'buffer', '_extra': 'extra'}

    def __init__(self, mode, config, init_rng):
      super().__init__(mode, config, init_rng)
      self._opt_state = utils.bcast_local_devices(np.ones([4], np.float32))
      self._buffer = jnp.zeros([0, 2])
      self._extra = {'a': jnp.zeros([2])}

    def step(self, global_step, rng, *args, **kwargs):
      seen.append((self._opt_state, np.shape(self._buffer), self._extra))
      self._opt_state = None
      self._buffer = jnp.concatenate([self._buffer, jnp.ones([1, 2])])
      self._extra = {'b': np.arange(2), 'c': None}
      return super().step(global_step, rng, *args, **kwargs)

  client(cls=Changes, checkpointer=checkpointer)
  kept = utils.GLOBAL_CHECKPOINT_DICT['latest'].history[-1].pickle_nest
  utils.GLOBAL_CHECKPOINT_DICT['latest'].history[:] = [
    utils.SnapshotNT(0, kept)
  ]
  del seen[:]
  steps = client(cls=Changes, checkpointer=checkpointer, training_steps=4)
  assert steps == [3]
  opt_state, buffer, extra = seen[0]
  assert opt_state is None
  assert buffer == (3, 2)
  assert set(extra) == {'b', 'c'}
  assert extra['c'] is None
  np.testing.assert_array_equal(extra['b'], [0, 1])


@pytest.mark.parametrize(
  ('returned', 'kind'),
  [([1.0], 'list'), ('loss', 'str'), (2.5, 'float'), (np.ones(2), 'ndarray')],
)
@pytest.mark.parametrize('method', ['step', 'evaluate'])
def test_what_is_no_dict_of_scalars_is_refused(method, returned, kind, client):
  cls = type('Wrong', (Client,), {method: lambda self, **unused: returned})
  with pytest.raises(TypeError, match=rf'Wrong.{method} returned a {kind}\b'):
    client('train_and_eval', cls=cls, checkpointer='memory')
