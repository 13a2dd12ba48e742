"""What a program of JAXline 0.0.8 may write, and what it may rely on.

Names, signatures and defaults; programs that save and restore on their own;
runs of several classes and configs in one process. The programs are written in
the shapes of emergent_communication_at_scale, of distribution_shift_framework
and of emergent_in_context_learning.
"""

import contextlib
import inspect
import json
import pickle
import re
import threading
from unittest import mock

from absl import logging
from absl.testing import flagsaver
import chex
import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax
import pytest

import jaxline
from jaxline import base_config
from jaxline import experiment
from jaxline import platform
from jaxline import train
from jaxline import utils
from jaxline.compat import checkpointers
from tests import processes
from tests import remains

# The contract: the names of parameters, their kinds and their defaults.
_CHECKPOINTER = """
  save(self, ckpt_series)
  restore(self, ckpt_series)
  get_experiment_state(self, ckpt_series)
  restore_path(self, ckpt_series)
  can_be_restored(self, ckpt_series)
  wait_for_checkpointing_to_finish(self)
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
  utils.Checkpointer: _CHECKPOINTER,
  utils.InMemoryCheckpointer: f'{_CHECKPOINTER} __init__(self, config, mode)\n',
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
  utils: """
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
  """,
}
OUR_ARGUMENTS = """category depth_of logs_error may_be_own on_stall
  records_config run_config stall_secs step writer_factory"""


@pytest.mark.parametrize('owner', CONTRACT, ids=lambda x: x.__name__)
def test_signatures(owner):
  contract = re.findall(r'(\w+)(\(.*?\))\n', CONTRACT[owner], re.S)
  for name, head in contract:
    # What is ours besides can only be given by name, and need not be.
    signature = inspect.Signature([
      p.replace(annotation=p.empty)
      for p in inspect.signature(getattr(owner, name)).parameters.values()
      if p.name not in OUR_ARGUMENTS.split() or p.kind != p.KEYWORD_ONLY
    ])  # fmt: skip
    found = re.sub(r'<function (\w+) at \w+>', r'\1', str(signature))
    assert (name, found) == (name, ' '.join(head.split()))


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
  # Old tests patch what `utils` uses on `utils`.
  assert utils.logging is logging
  assert utils.SnapshotNT._fields == ('id', 'pickle_nest')
  assert utils.CheckpointNT._fields == ('active', 'history')
  with flagsaver.flagsaver(jaxline_mode='eval'):
    assert platform._JAXLINE_MODE.value == 'eval'


# JAXline's own keys; docs/reference/config.md has ours.
DEFAULTS = {
  'experiment_kwargs': config_dict.ConfigDict(), 'training_steps': 10000,
  'interval_type': 'secs', 'save_checkpoint_interval': 300,
  'log_tensors_interval': 60, 'periodic_action_growth_ratios': None,
  'log_train_data_interval': 120.0, 'log_async': True, 'log_all_hosts': False,
  'logging_interval_type': None, 'checkpoint_interval_type': None,
  'save_initial_train_checkpoint': False, 'eval_initial_weights': False,
  'one_off_evaluate': False, 'max_checkpoints_to_keep': 5, 'random_seed': 42,
  'random_mode_train': 'unique_host_unique_device',
  'random_mode_eval': 'same_host_same_device',
  'legacy_random_seed_behavior': False, 'best_model_eval_metric': '',
  'best_model_eval_metric_higher_is_better': True,
  'train_checkpoint_all_hosts': False, 'best_checkpoint_all_hosts': False,
  'log_all_train_data': False,
}  # fmt: skip


def test_base_config_keys_and_defaults():
  config = base_config.get_base_config()
  for key, default in DEFAULTS.items():
    value = config[key]
    assert type(value) is type(default), key
    assert value == default, key


# What an import brings along.
HEAVY = """
  chex equinox flax grain haiku matplotlib optax orbax pandas rich seqio sklearn
  tensorboard tensorflow tensorstore torch
"""


# Whoever imports `utils` alone has these flags as well.
FLAGS = {
  'jaxline_post_mortem': False, 'jaxline_disable_pmap_jit': False,
  'config': None, 'jaxline_mode': 'train', 'jaxline_tpu_driver': '',
  'jaxline_ensure_tpu': False,
}  # fmt: skip


def test_an_import_defines_the_flags_and_costs_little_more_than_jax():
  program = f"""
import jax, json, sys
of_jax = len(sys.modules)
import jaxline.utils
from absl import flags
found = {{n: flags.FLAGS[n].default for n in {[*FLAGS]}}}
import jaxline.platform
print(json.dumps([of_jax, list(sys.modules), found]))
"""
  done = processes.run('-c', program)
  of_jax, modules, found = json.loads(done.stdout)
  assert found == FLAGS
  assert sorted({*HEAVY.split()} & {*modules}) == []
  # Among the others are ml_collections, absl and what they need.
  assert len(modules) < 1.2 * of_jax


# The steps that the experiments below have taken.
TAKEN: list[int] = []


def make_config(directory, rate=1.0, training_steps=1, **values):
  config = base_config.get_base_config()
  config.checkpoint_dir = str(directory)
  config.training_steps = training_steps
  config.experiment_kwargs = config_dict.ConfigDict({'config': {'rate': rate}})
  config.update(values)
  return config.lock()


def steps_of(fn, *args, **kwargs):
  TAKEN.clear()
  fn(*args, **kwargs)
  return list(TAKEN)


def main(cls, config, mode='train'):
  with flagsaver.flagsaver(config=config, jaxline_mode=mode):
    platform.main(cls, [])


# Programs that save and restore on their own, as published ones do.


OPTIMIZER = optax.sgd(1.0, momentum=0.5)


class Client(experiment.AbstractExperiment):
  """Adds one to each weight at each step; the classic style."""

  CHECKPOINT_ATTRS = {'_params': 'params', '_opt_state': 'opt_state'}
  evaluated: list[tuple[int, float]] = []
  during_step = staticmethod(lambda step: None)

  def __init__(self, mode, config, init_rng):
    super().__init__(mode=mode, init_rng=init_rng)
    params = {'linear': {'w': jnp.zeros([3])}}
    self._params = utils.bcast_local_devices(params)
    self._opt_state = utils.bcast_local_devices(OPTIMIZER.init(params))
    self._update = jax.pmap(
      lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0
    )

  def step(self, global_step, rng, *unused_args, **unused_kwargs):
    step = int(utils.get_first(global_step))
    TAKEN.append(step)
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
  state = {'global_step': pretrained['global_step'], 'experiment_module': dummy}
  # The run starts from the newest.
  utils.GLOBAL_CHECKPOINT_DICT['latest'] = utils.CheckpointNT(
    threading.local(), [utils.SnapshotNT(0, {}), utils.SnapshotNT(1, state)]
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
def new_process(monkeypatch):
  """Returns what forgets all that another process would not know."""

  def forget():
    monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})
    monkeypatch.setattr(checkpointers, '_begun', {})

  return forget


@pytest.fixture
def client(tmp_path, monkeypatch):
  """Runs `Client` as its program would; returns its steps."""
  monkeypatch.setattr(Client, 'evaluated', [])
  monkeypatch.setattr(Client, 'during_step', staticmethod(lambda step: None))

  def run(mode='train', directory='run', cls=Client, **values):
    given = {'interval_type': 'steps', 'save_checkpoint_interval': 2}
    given |= {'training_steps': 3} | values
    config = make_config(tmp_path / directory, **given)
    return steps_of(main, cls, config, mode)

  return run


def own_file(path, step=40, w=7.0):
  """Writes what a program of old has saved."""
  params = {'linear': {'w': np.full([3], w, np.float32)}}
  opt_state = jax.device_get(OPTIMIZER.init(params))
  state = {'global_step': step, 'params': params, 'opt_state': opt_state}
  path.write_bytes(pickle.dumps(state))
  return path


@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_a_file_of_its_own_starts_the_run(checkpointer, client, tmp_path):
  restore_state_to_in_memory_checkpointer(own_file(tmp_path / 'own'))
  steps = client(training_steps=43, checkpointer=checkpointer)
  assert steps == [40, 41, 42]
  save_state_from_in_memory_checkpointer(tmp_path / 'own')
  saved = pickle.loads((tmp_path / 'own').read_bytes())
  assert saved['global_step'] == 43
  assert type(saved['global_step']) is int
  np.testing.assert_array_equal(saved['params']['linear']['w'], [10, 10, 10])
  np.testing.assert_array_equal(saved['opt_state'][0].trace['linear']['w'], 0)
  # Again, in what could be another process, which fails behind a save.
  utils.GLOBAL_CHECKPOINT_DICT.clear()
  restore_state_to_in_memory_checkpointer(tmp_path / 'own')

  def fail(step):
    if step == 45:
      raise ZeroDivisionError('in a step')

  Client.during_step = staticmethod(fail)
  with pytest.raises(ZeroDivisionError):
    client(training_steps=50, checkpointer=checkpointer, directory='another')
  assert TAKEN == [43, 44, 45]
  save_state_from_in_memory_checkpointer(tmp_path / 'own')
  saved = pickle.loads((tmp_path / 'own').read_bytes())
  assert saved['global_step'] == 44
  np.testing.assert_array_equal(saved['params']['linear']['w'], [11, 11, 11])


def test_the_directory_goes_before_the_programs_own_file(client, tmp_path):
  restore_state_to_in_memory_checkpointer(own_file(tmp_path / 'own'))
  assert client(training_steps=42) == [40, 41]
  restore_state_to_in_memory_checkpointer(own_file(tmp_path / 'own', 90))
  assert client(training_steps=43) == [42]


@pytest.mark.parametrize(
  'values', [{}, {'one_off_evaluate': True, 'checkpoint_dir': None}]
)
def test_a_file_of_the_programs_own_is_evaluated(values, client, tmp_path):
  restore_state_to_in_memory_checkpointer(own_file(tmp_path / 'own', 3))
  client('eval', **values)
  assert Client.evaluated == [(3, 7.0)]


def test_the_best_of_an_earlier_run_goes_on(client, tmp_path):
  restore_state_to_in_memory_checkpointer(own_file(tmp_path / 'own', 1, w=0))
  nest = {'best_eval_metric_value': 1.5, 'best_model_eval_metric': 'score'}
  utils.GLOBAL_CHECKPOINT_DICT['best'] = utils.CheckpointNT(
    threading.local(), [utils.SnapshotNT(0, nest)]
  )
  client('train_and_eval', best_model_eval_metric='score', eval_interval=1)
  assert Client.evaluated == [(1, 0.0), (2, 1.0), (3, 2.0)]
  best = utils.GLOBAL_CHECKPOINT_DICT['best'].history
  assert [s.pickle_nest['global_step'] for s in best] == [3]


class LessInEvaluation(Client):
  """Its evaluation has no optimizer."""

  def __init__(self, mode, config, init_rng):
    super().__init__(mode, config, init_rng)
    if mode != 'train':
      self.CHECKPOINT_ATTRS = {'_params': 'params'}
      del self._opt_state


@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_an_evaluation_may_name_less_than_training(checkpointer, client):
  values = {'cls': LessInEvaluation, 'checkpointer': checkpointer}
  client(**values)
  client('eval', one_off_evaluate=True, **values)
  assert Client.evaluated == [(3, 3.0)]


@pytest.mark.parametrize(
  ('method', 'returned', 'kind'),
  [('step', [1.0], 'list'), ('evaluate', np.ones(2), 'ndarray')],
)
def test_what_is_no_dict_of_scalars_is_refused(method, returned, kind, client):
  cls = type('Wrong', (Client,), {method: lambda self, **unused: returned})
  with pytest.raises(TypeError, match=rf'Wrong.{method} returned a {kind}\b'):
    client('train_and_eval', cls=cls, checkpointer='memory')


# Several classes and configs in one process.


class Teacher(experiment.AbstractExperiment):
  """Adds `rate` to its weights at each step."""

  CHECKPOINT_ATTRS = {'_params': 'params'}

  def __init__(self, mode, init_rng, config):
    super().__init__(mode=mode, init_rng=init_rng)
    self._rate = config.rate
    self._params = utils.bcast_local_devices(jnp.zeros([2]))

  def step(self, global_step, rng, *unused_args, **unused_kwargs):
    TAKEN.append(int(utils.get_first(global_step)))
    self._params = jax.tree.map(lambda x: x + self._rate, self._params)
    return {'loss': jnp.ones([])}

  def evaluate(self, global_step, rng, *unused_args, **unused_kwargs):
    return {'w': utils.get_first(self._params)[0]}


class Student(Teacher):
  """Another experiment, whose state has the same shapes."""


REBOUND = {
  base_config: """get_base_config validate_config validate_keys
    check_constraints""",
  platform: 'create_writer TensorBoardLogger',
  train: 'train evaluate',
  utils: """bcast_local_devices evaluate_should_return_dict get_first
    host_id_devices_for_rng rendezvous specialize_rng_host_device
    InMemoryCheckpointer CheckpointNT""",
}


def test_rebound_names_are_called(tmp_path):
  """JAXline looks these up when it calls them."""
  config = make_config(tmp_path, training_steps=2, checkpointer='memory')
  once = config_dict.ConfigDict(config)
  once.one_off_evaluate = True
  called = {}
  with contextlib.ExitStack() as stack:
    for owner, names in REBOUND.items():
      for name in names.split():
        patch = mock.patch.object(owner, name, wraps=getattr(owner, name))
        called[name] = stack.enter_context(patch)
    for modes in (['train_eval_multithreaded'], ['train', 'eval']):
      utils.GLOBAL_CHECKPOINT_DICT = {}
      for mode in modes:
        main(Teacher, once if mode == 'eval' else config, mode)
      assert [name for name, x in called.items() if not x.called] == []
      for patched in called.values():
        patched.reset_mock()


@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_one_checkpointer_trains_a_second_class(checkpointer, tmp_path, caplog):
  config = make_config(tmp_path, checkpointer=checkpointer)
  ckpt = platform.create_checkpointer(config, 'train')
  writer = platform.create_writer(config, 'train')
  assert steps_of(train.train, Teacher, config, ckpt, writer) == [0]
  other = make_config(tmp_path, 5.0, training_steps=2)
  with pytest.raises(TypeError):  # It ends before its first save.
    train.train(type('Student', (Student,), {'step': 0}), other, ckpt, writer)
  assert utils.GLOBAL_CHECKPOINT_DICT['latest'].history == []
  assert steps_of(train.train, Student, other, ckpt, writer) == [0, 1]
  newest = utils.GLOBAL_CHECKPOINT_DICT['latest'].history[-1].pickle_nest
  np.testing.assert_array_equal(newest.experiment_module['params'], [10, 10])
  writer.close()
  log = (tmp_path / 'train' / 'metrics.jsonl').read_text()
  assert log.count('"loss"') == 2  # That of the teacher stays.
  if checkpointer == 'durable':
    assert remains.steps(tmp_path) == [1]
    assert remains.steps(tmp_path / 'run_2') == [2]
    assert f'{tmp_path}/run_2' in caplog.text


@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_an_emptied_dictionary_begins_anew(checkpointer, tmp_path):
  config = make_config(tmp_path, training_steps=2, checkpointer=checkpointer)
  assert steps_of(main, Teacher, config) == [0, 1]
  assert steps_of(main, Teacher, config) == []
  utils.GLOBAL_CHECKPOINT_DICT = {}
  assert steps_of(main, Teacher, config) == [0, 1]
  assert steps_of(main, Teacher, config) == []
  other = make_config(tmp_path, 2.0, 3, checkpointer='memory')
  assert steps_of(main, Teacher, other) == [0, 1, 2]  # Its rate is different.


@pytest.mark.parametrize(
  ('mode', 'checkpointer'),
  [('train_and_eval', 'memory'), ('train_eval_multithreaded', 'durable')],
)
def test_another_class_or_config_begins_anew(mode, checkpointer, tmp_path):
  """`platform.main` again and again, with one directory."""
  runs = [(Teacher, 1.0), (Teacher, 2.0), (Student, 3.0), (Student, 1.0)]
  for experiment_class, rate in runs:
    config = make_config(
      tmp_path, rate, checkpointer=checkpointer, best_model_eval_metric='w'
    )
    assert steps_of(main, experiment_class, config, mode) == [0]
    longer = make_config(tmp_path, rate, 3, checkpointer=checkpointer)
    assert steps_of(main, experiment_class, longer, mode) == [1, 2]
  names = sorted(path.name for path in tmp_path.glob('run_*'))
  is_durable = checkpointer == 'durable'
  assert names == ['run_2', 'run_3', 'run_4'] * is_durable
  # The evaluation of a run is of its own checkpoints.
  if is_durable:
    config = make_config(
      tmp_path, 2.0, one_off_evaluate=True, eval_initial_weights=False
    )
    main(Teacher, config, 'eval')
    assert (tmp_path / 'run_2' / 'eval' / 'metrics.jsonl').exists()
  # A run that changes its config on purpose goes on.
  changed = make_config(
    tmp_path, 9.0, 4, checkpointer=checkpointer, on_config_change='continue'
  )
  last = Teacher if is_durable else Student
  assert steps_of(main, last, changed, mode) == [3]


def test_a_subclass_of_the_checkpointer_restores_another_config(tmp_path):
  """A program's own checkpointer goes by the class alone, as in JAXline."""
  own, durable = utils.InMemoryCheckpointer, platform.create_checkpointer
  for make, cls, rate, expected in (
    (own, Teacher, 1.0, [0]),
    (own, Teacher, 2.0, [1]),
    (own, Student, 2.0, [0, 1]),
    (durable, Teacher, 2.0, [0, 1]),
    (own, Student, 2.0, [0, 1]),
  ):
    config = make_config(tmp_path, rate, expected[-1] + 1)
    ckpt = make(config, 'train')
    assert steps_of(train.train, cls, config, ckpt, None) == expected


@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_fit_is_a_run_of_its_own_in_memory(checkpointer, tmp_path):
  config = make_config(tmp_path, checkpointer=checkpointer)
  fit = [steps_of(jaxline.fit, Teacher, config, mode='train') for _ in 'ab']
  assert fit == ([[0], []] if checkpointer == 'durable' else [[0], [0]])
  other = make_config(tmp_path, 2.0, checkpointer=checkpointer)
  assert steps_of(jaxline.fit, Teacher, other, mode='train') == [0]


def test_a_run_of_another_process_goes_on_or_is_refused(tmp_path, new_process):
  for expected in ([0], []):
    for rate in (1.0, 2.0):
      assert steps_of(main, Teacher, make_config(tmp_path, rate)) == expected
    new_process()
  with pytest.raises(SystemExit, match=r'experiment_kwargs\.config\.rate'):
    main(Teacher, make_config(tmp_path, 2.0))


@pytest.mark.parametrize('fake', [chex.fake_pmap, chex.fake_pmap_and_jit])
def test_mocks_under_fake_pmap(fake, tmp_path):
  checkpointer = mock.create_autospec(utils.Checkpointer, instance=True)
  checkpointer.can_be_restored.return_value = False
  writer = mock.create_autospec(utils.Writer, instance=True)
  config = make_config(
    tmp_path, training_steps=2, interval_type='steps', log_train_data_interval=1
  )
  with fake():
    train.train(Client, config, checkpointer, writer)
    config.one_off_evaluate = config.eval_initial_weights = True
    train.evaluate(Client, config, checkpointer, writer, 'eval')
  steps = [c.args[0] for c in writer.write_scalars.mock_calls]
  assert steps == [1, 2, 0]
  assert writer.write_scalars.mock_calls[0].args[1]['loss'] == 1
  checkpointer.save.assert_called_once_with('latest')
  checkpointer.restore.assert_not_called()


# What the library adds to JAXline's interface is the program's to use.
ADDED = [x for x in vars(experiment.FullExperiment) if not x.startswith('_')]


class NeverRead(Teacher):
  """Nothing asks for its attributes of these names."""

  vars().update(
    (x, property(lambda self: pytest.fail('The library reads it.')))
    for x in ADDED
  )

  def __init__(self, mode, init_rng, config, run_config='own'):
    super().__init__(mode, init_rng, config)
    assert run_config == 'own'


def test_a_program_may_use_every_name_that_the_library_adds(
  tmp_path, new_process
):
  assert {'summary', 'step_inputs', 'num_evaluated', 'run_config'} < {*ADDED}
  for steps in (2, 4):  # The second time, it is resumed.
    config = make_config(tmp_path, training_steps=steps, on_nonfinite='warn')
    ran = steps_of(main, NeverRead, config, 'train_and_eval')
    assert ran == [steps - 2, steps - 1]
    new_process()
  main(NeverRead, config, 'eval')
  last = remains.curve(tmp_path, 'eval')[-1]
  assert last['step'] == last['w'] == 4


OWN = {
  'checkpoint_dir': 3, 'decode': 'greedy', 'distributed': True,
  'early_stop': True, 'eval_interval': (1, 2), 'eval_steps': 100,
  'max_seconds': '9', 'mesh': '2x4', 'profile_steps': 10,
  'sharding': 'spatial', 'watchdog_secs': None, 'writers': 'wandb',
  'xla': 'O3',
}  # fmt: skip


@pytest.mark.parametrize('how', [main, jaxline.fit])
def test_a_program_may_use_the_keys_of_this_library_for_itself(
  how, tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(platform.tempfile, 'tempdir', str(tmp_path))
  seen = []

  class Program(Teacher):
    def should_run_step(self, global_step, config):
      seen.append({name: config[name] for name in OWN})
      return super().should_run_step(global_step, config)

  config = make_config('')
  for name, value in OWN.items():
    setattr(config, name, value)
  assert steps_of(how, Program, config.lock()) == [0]
  for values in seen:
    assert values | {'checkpoint_dir': 3} == OWN
  (said,) = [x for x in caplog.messages if 'eval_steps' in x and 'own' in x]
  valid = {'watchdog_secs', 'checkpoint_dir'}
  assert all(f'config.{name}' in said for name in OWN.keys() - valid)
