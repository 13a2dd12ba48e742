"""The loops: seeds, keys, checkpoints, logging, evaluation, and every error."""

import contextlib
import functools
import gc
import json
import math
import shutil
import threading
import time
import traceback
from unittest import mock
import weakref

import chex
import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline import evaluation
from jaxline import experiment
from jaxline import platform
from jaxline import train
from jaxline import utils
from jaxline.base import debug
from jaxline.checkpoint import durable
from jaxline.checkpoint import protocol
from jaxline.metrics import writers
from jaxline.parallel import devices
from jaxline.parallel import distributed
from jaxline.supervision import nonfinite
from tests import remains

POLL_SECS = evaluation._POLL_SECS


@pytest.fixture(autouse=True)
def no_checkpoints(monkeypatch):
  monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})


@pytest.fixture(autouse=True)
def short_poll(monkeypatch):
  monkeypatch.setattr(evaluation, '_POLL_SECS', 0.001)


class Log:
  """What the experiments of one test have seen."""

  def __init__(self):
    self.inits = []
    self.steps = []
    self.keys = []
    self.evals = []


class Toy(experiment.FullExperiment):
  """Counts its steps in its only weight."""

  CHECKPOINT_ATTRS = {'_w': 'w'}

  def __init__(self, mode, init_rng=None, log=None, scalars=None, fail_at=None):
    super().__init__(mode=mode, init_rng=init_rng)
    self.mode = mode
    self.log = Log() if log is None else log
    self.scalars = {} if scalars is None else scalars
    self.fail_at = fail_at
    self.log.inits.append((mode, init_rng))
    self._w = devices.bcast_local_devices(np.float32(0))

  def step(self, *, global_step, rng, writer):
    step = np.asarray(global_step).reshape(-1)
    self.log.steps.append(step.tolist())
    self.log.keys.append(rng)
    if self.fail_at == step[0]:
      raise ZeroDivisionError('in a step')
    self._w = self._w + np.float32(1)
    return {'loss': np.float32(step[0]), **self.scalars}

  def evaluate(self, *, global_step, rng, writer):
    step = int(np.asarray(global_step).reshape(-1)[0])
    weight = float(np.asarray(self._w).reshape(-1)[0])
    self.log.evals.append((step, weight))
    self.log.keys.append(rng)
    return {'score': self.scalars[step] if self.scalars else step}


class Plain(Toy):
  """The same with the step and the key as they are: nothing to compile."""

  def step_inputs(self, config):
    return lambda step, key: (step, key, key)

  def evaluate_inputs(self, config, rng):
    return lambda step: (step, rng)


def make_config(steps=4, **values):
  config = base_config.get_base_config()
  config.training_steps = steps
  config.interval_type = 'steps'
  config.save_checkpoint_interval = None
  config.update(values)
  base_config.validate_config(config)
  return config


class Recorder(utils.InMemoryCheckpointer):
  """Also writes down what it was asked."""

  def __init__(self, config, mode='train'):
    super().__init__(config, mode)
    self.calls = []

  def save(self, ckpt_series):
    step = self.get_experiment_state(ckpt_series).global_step
    self.calls.append(('save', ckpt_series, step))
    super().save(ckpt_series)

  def wait_for_checkpointing_to_finish(self):
    self.calls.append(('wait', None, None))

  def saves(self, series='latest'):
    return [c[2] for c in self.calls if c[:2] == ('save', series)]


class Writes:
  """A writer of the old kind: one method."""

  def __init__(self):
    self.records = []

  def write_scalars(self, global_step, scalars):
    self.records.append((global_step, dict(scalars)))

  def steps(self):
    return [step for step, _ in self.records]


def run(cls=Plain, config=None, checkpointer=None, writer=None, actions=()):
  """Trains once; returns the log and the checkpointer."""
  config = make_config() if config is None else config
  checkpointer = Recorder(config) if checkpointer is None else checkpointer
  log = Log()
  partial = functools.partial(cls, log=log)
  train.train(partial, config, checkpointer, writer, actions)
  return log, checkpointer


def key_data(key):
  if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
    key = jax.random.key_data(key)
  return np.asarray(key)


def expected_keys(key, steps):
  """The keys of each step and device, by the written rule, on one device."""
  rows = []
  for _ in range(steps):
    step_key, key = jax.random.split(key)
    of_host = jax.random.fold_in(step_key, jax.process_index())
    of_devices = [jax.random.fold_in(of_host, i) for i in range(2)]
    rows.append([key_data(k) for k in of_devices])
  return np.array(rows)


# Seeds and keys.


@pytest.mark.parametrize('legacy', [False, True])
def test_training_splits_the_seed_and_evaluation_does_not(legacy):
  config = make_config(
    0, random_seed=7, legacy_random_seed_behavior=legacy, one_off_evaluate=True
  )
  log, checkpointer = run(Toy, config)
  seed = jax.random.PRNGKey(7)
  step_key, init_key = (seed, seed) if legacy else jax.random.split(seed)
  state_key = checkpointer.get_experiment_state('latest').train_step_rng
  np.testing.assert_array_equal(state_key, [step_key, step_key])
  evaluate_once(functools.partial(Toy, log=log), config)
  np.testing.assert_array_equal([key for _, key in log.inits], [init_key, seed])
  # The default mode, same_host_same_device, folds nothing in.
  np.testing.assert_array_equal(log.keys, [[seed, seed]])


@pytest.mark.parametrize('typed', [False, True])
def test_a_restored_run_goes_on_with_the_same_keys(typed):
  key = jax.random.key(3) if typed else jax.random.PRNGKey(3)

  class Keyed(Toy):
    def initialize_train_step_rng(self, rng):
      return super().initialize_train_step_rng(key)

  first, checkpointer = run(Keyed, make_config(2))
  second, _ = run(Keyed, make_config(6), checkpointer)
  assert first.steps + second.steps == [[i, i] for i in range(6)]
  keys = first.keys + second.keys
  assert all(k.dtype == key.dtype for k in keys)
  np.testing.assert_array_equal([*map(key_data, keys)], expected_keys(key, 6))
  weights = checkpointer.get_experiment_state('latest').experiment_module._w
  np.testing.assert_array_equal(weights, [6, 6])


# Constructors of all ages.


class ModeOnly(Plain):
  def __init__(self, mode):
    super().__init__(mode)


class ModeConfig(Plain):
  def __init__(self, mode, config):
    super().__init__(mode)
    assert config.rate == 0.5


class AnyKeywords(Plain):
  def __init__(self, mode, **kwargs):
    super().__init__(mode)
    # An old one may hand its keywords on to what takes no init_rng.
    assert [*kwargs] == ['config']


@pytest.mark.parametrize('cls', [ModeOnly, ModeConfig, AnyKeywords, Plain])
def test_constructors_old_and_new(cls, caplog):
  config = make_config(0)
  if cls in (ModeConfig, AnyKeywords):
    config.experiment_kwargs.config = {'rate': 0.5}
  checkpointer = Recorder(config)
  train.train(cls, config, checkpointer, None)
  module = checkpointer.get_experiment_state('latest').experiment_module
  assert type(module) is cls
  warnings = caplog.text.count(f'{cls.__name__} takes no init_rng')
  assert warnings == (cls is not Plain)


def test_an_experiment_needs_no_base_class():
  evaluated = []

  class Bare:
    CHECKPOINT_ATTRS = {'_w': 'w'}

    def __init__(self, mode, init_rng):
      self._w = devices.bcast_local_devices(np.float32(0))

    def step(self, **unused):
      self._w = self._w + np.float32(1)
      return {'loss': np.float32(1)}

    def evaluate(self, **unused):
      evaluated.append(float(self._w[0]))
      return {'score': self._w[0]}

  for steps in (3, 3, 5):  # One that has ended is evaluated once more.
    config = make_config(steps, eval_interval=2)
    checkpointer = utils.InMemoryCheckpointer(config, 'train')
    train.Run(Bare, config, checkpointer).train_and_eval()
  assert evaluated == [2, 3, 3, 4, 5]


def evaluate_once(cls, config):
  train.evaluate(cls, config, Recorder(config, 'eval'), None, 'eval')


def test_a_constructor_that_names_run_config_gets_the_config_of_its_run():
  seen = []

  class Sees(Plain):
    def __init__(self, mode, init_rng, log=None, run_config=None):
      seen.append((mode, run_config.training_steps))
      super().__init__(mode, init_rng, log)

  run(Sees, make_config(1))
  config = make_config(2, one_off_evaluate=True)
  evaluate_once(Sees, config)
  # An argument of the experiment may have this name.
  config.experiment_kwargs.run_config = make_config(3)
  evaluate_once(Sees, config)
  assert seen == [('train', 1), ('eval', 2), ('eval', 3)]


def test_a_run_needs_no_more_than_an_experiment_and_a_config(tmp_path):
  log = Log()
  config = make_config(3, checkpoint_dir=str(tmp_path))
  made = train.Run(functools.partial(Plain, log=log), config)
  made.train()
  assert made.checkpointer.steps('latest') == [3]
  for _ in range(2):  # Each evaluation of a checkpointer begins anew.
    made.evaluate()
  made.config.update(training_steps=100, one_off_evaluate=True)
  made.evaluate()
  assert log.evals == [(3, 3.0)] * 3
  assert list(tmp_path.iterdir()) == []  # It is all in memory.


def test_a_run_adapts_what_follows_the_contract_of_jaxline():
  foreign, writer = Scripted([]), Writes()
  foreign.close = mock.Mock()
  made = train.Run(Plain, config_dict.ConfigDict({'seed': 1}), foreign, writer)
  assert made.config.training_steps == 10000
  assert made.writer is writer
  made.log.write_scalars(3, {'loss': 1.0})
  made.log.write_texts(3, {'config': ''})  # It has no such method.
  made.log.flush()
  assert writer.steps() == [3]
  full = made.checkpointer
  with pytest.raises(ValueError, match='Leave the step None'):
    full.restore('latest', step=3)
  full.close()
  foreign.close.assert_called_once_with()
  # What is adapted already stays as it is.
  assert train.Run(Plain, made.config, full).checkpointer is full


def test_an_experiment_gets_all_methods_of_a_writer_and_its_own():
  class Own(Writes):
    def write_images(self, global_step, images, size):
      self.records.append((global_step, {**images, 'size': size}))

    def mark(self):
      self.records.append('mark')

  class Writing(Plain):
    def step(self, *, global_step, rng, writer):
      writer.write_texts(global_step, {'text': 'has no method, and is dropped'})
      writer.write_images(global_step, {'image': 1}, size=2)
      writer.mark()
      return {}

    def evaluate(self, *, global_step, rng, writer):
      writer.write_scalars(global_step, {'own': 3})
      return {}

  config, writer = make_config(1, log_train_data_interval=-1), Own()
  made = train.Run(Writing, config, None, writer, writer)
  made.train()
  config.one_off_evaluate = True
  made.evaluate()
  assert writer.records[:2] == [(0, {'image': 1, 'size': 2}), 'mark']
  assert writer.records[3:] == [(1, {'own': 3}), (1, {})]
  assert not hasattr(made.log, 'unknown')
  train.Run(Writing, config, made.checkpointer).evaluate()  # Without a writer.


@pytest.mark.parametrize('fails', [False, True])
@pytest.mark.parametrize('loop', [train.Run.train, train.Run.train_and_eval])
def test_a_run_that_has_ended_keeps_no_experiment(loop, fails):
  made = []

  def construct(mode, init_rng):
    experiment = Plain(mode, init_rng, fail_at=1 if fails else None)
    made.append(weakref.ref(experiment))
    return experiment

  checkpointer = Scripted([])
  gc.collect()
  gc.disable()
  try:
    with contextlib.suppress(ZeroDivisionError):
      loop(train.Run(construct, make_config(2), checkpointer, Writes()))
    checkpointer.states.clear()
    checkpointer.saved.clear()
    assert made
    # A thread may still leave the call that it has answered.
    deadline = time.monotonic() + 10
    while any(ref() for ref in made) and time.monotonic() < deadline:
      time.sleep(0.01)
    assert [ref() for ref in made] == [None] * len(made)
  finally:
    gc.enable()


def test_a_wrapper_around_a_durable_checkpointer_is_one(tmp_path):
  class Wrapper:
    def __init__(self, inner):
      self.inner = inner

    def __getattr__(self, name):
      return getattr(self.inner, name)

  config = make_config(2, checkpoint_dir=str(tmp_path))
  inner = durable.DurableCheckpointer(config, 'train')
  made = train.Run(Plain, config, Wrapper(inner))
  assert type(made.checkpointer) is Wrapper
  made.train()
  assert inner.directory.ended() == 2
  inner.close()


# Periodic actions and the writer.


class Action:
  """A periodic action of somebody's own."""

  def __init__(self):
    self.calls = []
    self.updates = []
    self.waits = 0

  def update_time(self, t, step):
    self.updates.append((t, step))

  def __call__(self, t, step, scalars):
    self.calls.append((t, step, dict(scalars)))

  def wait_to_finish(self):
    self.waits += 1


def test_actions_are_called_with_time_step_and_scalars(monkeypatch):
  times = iter(range(100, 300))
  monkeypatch.setattr(time, 'time', lambda: float(next(times)))
  action, checkpointer = Action(), None
  for steps in (2, 3):  # A restored run starts at its step.
    _, checkpointer = run(
      config=make_config(steps, save_initial_train_checkpoint=True),
      checkpointer=checkpointer,
      actions=[action],
    )
  assert [step for _, step in action.updates] == [0, 2]
  assert [call[1:] for call in action.calls] == [
    (step, {'loss': step - 1.0}) for step in (1, 2, 3)
  ]
  moments = [call[0] for call in (action.updates[0], *action.calls)]
  assert moments == sorted(set(moments))
  assert action.waits == 2
  # Nor is a restored run saved before its first step.
  assert checkpointer.saves() == [0, 2, 3]


@pytest.mark.parametrize(
  ('values', 'steps'),
  [
    ({'log_train_data_interval': 2}, [2, 4, 5]),
    ({'log_train_data_interval': None, 'log_tensors_interval': -1}, [5]),
    (
      {'log_train_data_interval': 3, 'log_all_train_data': True},
      [1, 2, 3, 4, 5],
    ),
    (
      {
        'log_train_data_interval': 1000,
        'periodic_action_growth_ratios': [1, 2, 5],
        'training_steps': 21,
      },
      [1, 2, 5, 10, 20, 21],
    ),
    (
      {
        'log_train_data_interval': 2,
        'interval_type': 'secs',
        'logging_interval_type': 'steps',
      },
      [2, 4, 5],
    ),
  ],
)
def test_writer_gets_scalars_at_the_interval_and_the_last_step(values, steps):
  writer = Writes()
  run(config=make_config(5, **values), writer=writer)
  assert writer.steps() == steps
  assert [r['loss'] for _, r in writer.records] == [s - 1 for s in steps]
  assert isinstance(writer.records[-1][1]['steps_per_sec'], float)


@pytest.mark.parametrize('log_async', [True, False])
def test_rates_are_made_of_what_is_counted_per_step(log_async, caplog):
  """What is no number is no error; the line of the log has none of it."""
  writer = Writes()
  counted = {
    'word': 'x',
    'lr': 0.5,
    'tokens_per_step': np.array(10, np.int32),
    'examples_per_step': None,
    'seconds_per_step': 0.5,
  }
  cls = functools.partial(Plain, scalars=counted)
  config = make_config(
    2, log_train_data_interval=1, log_tensors_interval=1, log_async=log_async
  )
  with caplog.at_level('INFO', 'absl'):
    run(cls, config, writer=writer)
  for _, scalars in writer.records:
    assert scalars['tokens_per_sec'] == 10.0 * scalars['steps_per_sec']
    assert counted.items() <= scalars.items()
    assert not {'examples_per_sec', 'seconds_per_sec'} & set(scalars)
  (line,) = (x for x in caplog.records if 'step 1 of 2' in x.getMessage())
  assert (line.thread == threading.main_thread().ident) is not log_async
  assert 'lr 0.5' in line.getMessage()
  for name in ('word', 'examples_per_step'):
    assert name not in line.getMessage()


# Checkpoints.


@pytest.mark.parametrize(
  ('steps', 'interval', 'initial', 'expected'),
  [
    (5, 2, False, [2, 4, 5]),
    (4, 2, False, [2, 4]),  # The last save is not made twice.
    (4, None, False, [4]),
    (4, 0, False, [4]),
    (2, -1, True, [0, 2]),
    (0, 1, True, [0]),
    (0, 1, False, [0]),
  ],
)
def test_when_checkpoints_are_saved(steps, interval, initial, expected):
  config = make_config(
    steps,
    save_checkpoint_interval=interval,
    save_initial_train_checkpoint=initial,
  )
  _, checkpointer = run(config=config)
  assert checkpointer.saves() == expected
  assert checkpointer.calls[-1][0] == 'wait'


@pytest.mark.parametrize('fake', [chex.fake_pmap, chex.fake_pmap_and_jit])
def test_mocks_under_fake_pmap(fake):
  class Pmapped(Toy):
    def step(self, *, global_step, rng, writer):
      update = jax.pmap(
        lambda w, key: (
          w + 1,
          jax.lax.pmean(jax.random.uniform(key) * 0 + 3, 'i'),
        ),
        axis_name='i',
      )
      self._w, loss = update(self._w, rng)
      return {'loss': utils.get_first(loss)}

  checkpointer = mock.create_autospec(utils.Checkpointer, instance=True)
  checkpointer.can_be_restored.return_value = False
  writer = mock.create_autospec(utils.Writer, instance=True)
  config = make_config(2, log_train_data_interval=1)
  with fake():
    train.train(Pmapped, config, checkpointer, writer)
    config.one_off_evaluate = True
    config.eval_initial_weights = True
    train.evaluate(Pmapped, config, checkpointer, writer, 'eval')
  steps = [c.args[0] for c in writer.write_scalars.mock_calls]
  assert steps == [1, 2, 0]
  assert writer.write_scalars.mock_calls[0].args[1]['loss'] == 3.0
  checkpointer.save.assert_called_once_with('latest')
  checkpointer.restore.assert_not_called()


# How long a run is.


def test_no_interval_type_and_a_locked_config():
  config = make_config(2)
  config.interval_type = None
  config.lock()
  before = config.to_json()
  log, checkpointer = run(config=config, writer=Writes())
  train.evaluate(Plain, config, checkpointer, None, 'eval')
  assert len(log.steps) == 2
  assert config.to_json() == before


def test_all_hosts_meet_after_the_last_save():
  order = [
    'checkpointer.save',
    'checkpointer.wait_for_checkpointing_to_finish',
    'action.wait_to_finish',
    'rendezvous',
  ]
  of = mock.Mock()
  of.checkpointer.can_be_restored.return_value = False
  with mock.patch.object(devices, 'rendezvous', of.rendezvous):
    train.train(Plain, make_config(1), of.checkpointer, None, (of.action,))
  assert [name for name, *_ in of.mock_calls if name in order] == order


# Errors.

FAILED_AS_WELL = 'A periodic action failed as well.'


def test_the_steps_error_counts_where_an_action_fails_as_well(caplog):
  action, config = Action(), make_config(save_checkpoint_interval=2)
  action.wait_to_finish = mock.Mock(side_effect=OSError('disk'))
  cls, checkpointer = functools.partial(Plain, fail_at=1), Recorder(config)
  with pytest.raises(ZeroDivisionError) as caught:
    run(cls, config, checkpointer, actions=[action])
  frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
  assert frames[-1] == 'step'
  assert FAILED_AS_WELL in caplog.text
  assert checkpointer.saves() == []


class BrokenWriter:
  def write_scalars(self, global_step, scalars):
    raise OSError('disk full')


def test_a_failing_writer_ends_the_run_after_the_next_step(caplog):
  writer = writers.MetricWriter(BrokenWriter())

  class Endless(Plain):
    def step(self, **kwargs):
      if kwargs['global_step'] == 1:
        with contextlib.suppress(OSError):
          writer.wait_to_finish()
      return super().step(**kwargs)

    def should_run_step(self, global_step, config):
      assert global_step < 2, 'nobody noticed'
      return True

  config = make_config(
    log_train_data_interval=1000,
    periodic_action_growth_ratios=[1],  # Step 1, and then step 10.
    log_async=False,  # Else the console's action raises it as well.
    training_steps=None,
  )
  with pytest.raises(OSError, match='disk full') as caught:
    run(Endless, config, writer=writer)
  frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
  assert frames[-1] == 'write_scalars'
  assert FAILED_AS_WELL not in caplog.text  # It is told once.


class Fault:
  """A scalar of a step that failed on its device."""

  def __array__(self, *args, **kwargs):
    raise OSError('device fault')


class FailsAtStep3:
  def write_scalars(self, global_step, scalars):
    if global_step == 3:
      raise OSError('disk full')


@pytest.mark.parametrize('place', ['device', 'disk'])
def test_an_error_of_a_later_step_takes_no_checkpoint(tmp_path, place):
  inner = FailsAtStep3() if place == 'disk' else mock.Mock(['write_scalars'])
  writer, may_commit = writers.MetricWriter(inner), threading.Event()

  class Faulty(Plain):
    def step(self, **kwargs):
      step, scalars = kwargs['global_step'], super().step(**kwargs)
      if step == 2 and place == 'device':
        scalars['loss'] = Fault()
      if step == 3:  # The checkpoint of step 2 is not committed yet.
        with contextlib.suppress(OSError):
          writer.executor.wait()
        assert writer.executor.error is not None
        may_commit.set()
      return scalars

  config = make_config(
    log_train_data_interval=1,
    save_checkpoint_interval=2,
    checkpoint_dir=str(tmp_path),
  )
  checkpointer = durable.DurableCheckpointer(config, 'train')
  checkpointer.directory.thread.submit(lambda: may_commit.wait(10))
  with pytest.raises(OSError, match=place):
    train.train(Faulty, config, checkpointer, writer)
  checkpointer.wait_for_checkpointing_to_finish()
  checkpointer.close()
  assert checkpointer.steps('latest') == [2]
  with pytest.raises(OSError, match=place):
    writer.close()


def test_a_writer_that_fails_at_the_last_step_is_an_error():
  config = make_config(1, log_train_data_interval=1, log_async=False)
  checkpointer = Recorder(config)
  with pytest.raises(OSError, match='disk full'):
    run(config=config, checkpointer=checkpointer, writer=BrokenWriter())
  assert checkpointer.saves() == [1]  # The work of the run is safe.


# Evaluation.


class Scripted:
  """A checkpointer whose newest checkpoint changes as a script says.

  One entry is one look: the step of the newest checkpoint then, or None.
  """

  def __init__(self, looks):
    self.looks = list(looks)
    self.newest = None
    self.states = {}
    self.saved = []

  def get_experiment_state(self, ckpt_series):
    return self.states.setdefault(ckpt_series, protocol.ExperimentState())

  def restore_path(self, ckpt_series):
    assert ckpt_series == 'latest'
    assert self.looks, 'evaluation should have ended'
    self.newest = self.looks.pop(0)
    return None if self.newest is None else f'checkpoint_{self.newest}'

  def can_be_restored(self, ckpt_series):
    return ckpt_series == 'latest' and self.newest is not None

  def restore(self, ckpt_series):
    self.states['latest'].update(
      global_step=self.newest, train_step_rng=f'key {self.newest}'
    )

  def save(self, ckpt_series):
    self.saved.append((ckpt_series, self.states[ckpt_series].to_dict()))

  def wait_for_checkpointing_to_finish(self):
    self.is_safe = True


def evaluate(looks, scores=None, writer=None, cls=Plain, **values):
  """Evaluates by a script; returns the log and the checkpointer."""
  config = make_config(100, **values)
  log, checkpointer = Log(), Scripted(looks)
  partial = functools.partial(cls, log=log, scalars=scores)
  train.evaluate(partial, config, checkpointer, writer, 'eval')
  return log, checkpointer


def in_this_thread(call):
  """Returns a `time.sleep`; threads that other tests have left sleep."""
  own, sleep = threading.get_ident(), time.sleep
  return lambda x: (call if threading.get_ident() == own else sleep)(x)


@pytest.mark.parametrize(
  ('looks', 'initial', 'expected'),
  [
    (
      [None, None, 10, 10, 10, 30, 30, 100, 'not looked at'],
      False,
      [10, 30, 100],
    ),
    ([None, None, None, 100], True, [0, 100]),
    ([100], True, [100]),
  ],
)
def test_each_new_checkpoint_is_evaluated_once_until_the_last(
  looks, initial, expected, monkeypatch
):
  slept = []
  monkeypatch.setattr(evaluation, '_POLL_SECS', POLL_SECS)
  monkeypatch.setattr(time, 'sleep', in_this_thread(slept.append))
  writer = Writes()
  log, _ = evaluate(looks, writer=writer, eval_initial_weights=initial)
  assert writer.records == [(step, {'score': step}) for step in expected]
  assert [step for step, _ in log.evals] == expected
  assert log.inits[0][0] == 'eval'
  # A new one is noticed within a second.
  assert max(slept, default=0) < 1


class Seeded(Plain):
  """Its score after n steps is n and a draw from [0, 1) by its initial key."""

  def __init__(self, mode, init_rng, **kwargs):
    super().__init__(mode, init_rng, **kwargs)
    self._w = self._w + jax.random.uniform(init_rng)

  def evaluate(self, **kwargs):
    super().evaluate(**kwargs)
    return {'score': self.log.evals[-1][1]}


@pytest.mark.parametrize('legacy', [False, True])
@pytest.mark.parametrize('saves_initial', [False, True])
def test_initial_weights_of_an_evaluation_are_not_those_of_the_run(
  saves_initial, legacy, tmp_path, monkeypatch
):
  """In the per-device style they count, and may be the best, if they are."""
  config = make_config(
    1,
    checkpoint_dir=str(tmp_path),
    checkpointer='durable',
    eval_initial_weights=True,
    save_initial_train_checkpoint=saves_initial,
    legacy_random_seed_behavior=legacy,
    best_model_eval_metric='score',
    best_model_eval_metric_higher_is_better=False,
  )
  seed = jax.random.PRNGKey(config.random_seed)
  own = float(jax.random.uniform(seed))
  runs = float(
    jax.random.uniform(seed if legacy else jax.random.split(seed)[1])
  )
  began, writer = [], Writes()
  make = functools.partial(Seeded, log=Log())

  def train_once(unused_secs):
    if not began:
      began.append(True)
      with contextlib.closing(
        durable.DurableCheckpointer(config, 'train')
      ) as trained:
        train.train(make, config, trained, None)

  # When evaluation waits.
  monkeypatch.setattr(time, 'sleep', in_this_thread(train_once))
  checkpointer = durable.DurableCheckpointer(config, 'eval')
  train.evaluate(make, config, checkpointer, writer, 'eval')
  waits = saves_initial and not legacy
  expected = [(0, runs if waits else own), (1, 1 + runs)]
  found = [(step, x['score']) for step, x in writer.records]
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  steps = checkpointer.steps('best')
  checkpointer.close()
  assert steps == ([0] if saves_initial or legacy else [1])


def test_a_run_that_begins_from_another_has_no_initial_weights(tmp_path):
  """An evaluation could only make others, so it waits for a checkpoint."""
  config = make_config(
    1,
    checkpoint_dir=str(tmp_path / 'run'),
    restore_from=str(tmp_path / 'other'),
    eval_initial_weights=True,
  )
  log, trained = Log(), threading.Event()
  trained.set()  # Without having saved anything.
  checkpointer = platform.create_checkpointer(config, 'eval')
  train.Run(
    functools.partial(Plain, log=log), config, checkpointer, trained=trained
  ).evaluate()
  checkpointer.close()
  assert log.evals == []


def test_one_off_without_a_checkpoint(monkeypatch):
  config = make_config(one_off_evaluate=True)
  with pytest.raises(ValueError, match='eval_initial_weights'):
    evaluate_once(Plain, config)
  config.eval_initial_weights = True
  log = Log()
  # Without a mode, it is that of the command line.
  monkeypatch.setattr(debug.settings, 'mode', 'eval_on_test')
  train.evaluate(functools.partial(Plain, log=log), config, None, None)
  assert log.evals == [(0, 0.0)]
  assert log.inits[0][0] == 'eval_on_test'


# The series `best`.

NAN = math.nan


@pytest.mark.parametrize(
  ('higher', 'scores', 'best_at'),
  [
    (True, [1, 1, 3, 2, 3, 4], [0, 2, 5]),
    (False, [1, 1, 3, 0.5, 0.5, -1], [0, 3, 5]),
    (True, [NAN, 1, NAN, 2], [1, 3]),
    (False, [NAN, 1, NAN, 2], [1]),
    (True, [NAN, NAN], []),
    (True, [-math.inf, NAN], []),
    (True, [np.float32(1), np.array([2.0]), np.array(1)], [0, 1]),
  ],
)
def test_best_is_saved_where_strictly_better(higher, scores, best_at):
  class Adds(Plain):
    def on_new_best_model(self, best_state):
      best_state.note = best_state.best_eval_metric_value

  steps = [10 * (i + 1) for i in range(len(scores) - 1)] + [100]
  _, checkpointer = evaluate(
    steps,
    dict(zip(steps, scores, strict=True)),
    cls=Adds,
    best_model_eval_metric='score',
    best_model_eval_metric_higher_is_better=higher,
  )
  assert [
    (series, state['global_step'], state['best_eval_metric_value'])
    for series, state in checkpointer.saved
  ] == [('best', steps[i], scores[i]) for i in best_at]
  for _, state in checkpointer.saved:
    assert state['train_step_rng'] == f'key {state["global_step"]}'
    assert state['best_model_eval_metric'] == 'score'
    assert state['note'] == state['best_eval_metric_value']
    assert isinstance(state['experiment_module'], Plain)


@pytest.mark.parametrize(
  ('returned', 'names'),
  [({'loss': 1.0, 'error': 2}, ['error', 'loss']), ({'score': None}, [])],
)
def test_a_missing_best_metric_lists_the_names_there_are(returned, names):
  class Other(Plain):
    def evaluate(self, **unused):
      return returned

  with pytest.raises(errors.UsageError, match='score') as caught:
    evaluate([10], cls=Other, best_model_eval_metric='score')
  assert str(names) in str(caught.value)


def kept_again(score, metric='score'):
  """Returns which best ones a new process saves that evaluates step 1."""

  class Scored(Plain):
    def evaluate(self, **unused):
      return {metric: score}

  config = make_config(1, one_off_evaluate=True, best_model_eval_metric=metric)
  checkpointer = Recorder(config, 'eval')
  train.evaluate(Scored, config, checkpointer, None, 'eval')
  return checkpointer.saves('best')


def test_the_best_value_survives_a_restart():
  run(config=make_config(1))
  kept = [kept_again(score) for score in (2.0, 1.5, 2.0, 2.5)]
  assert kept == [[1], [], [], [1]]
  # Another metric begins anew.
  assert kept_again(1.5, 'accuracy') == [1]
  nest = utils.GLOBAL_CHECKPOINT_DICT['best'].history[-1].pickle_nest
  assert nest['best_eval_metric_value'] == 1.5
  assert nest['best_model_eval_metric'] == 'accuracy'


# Training and evaluation in one thread.


def run_both(cls=Plain, config=None, writer=None, eval_writer=None):
  log = Log()
  checkpointer = Recorder(config)
  partial = functools.partial(cls, log=log)
  train.Run(partial, config, checkpointer, writer, eval_writer).train_and_eval()
  return log, checkpointer


@pytest.mark.parametrize(
  ('steps', 'interval', 'initial', 'expected'),
  [
    (5, 2, False, [2, 4, 5]),
    (4, None, False, [4]),
    (3, -1, True, [0, 3]),
    (2, 0, False, [1, 2]),
    (0, 1, True, [0]),
    (0, 1, False, [0]),
  ],
)
def test_training_is_interrupted_for_evaluations(
  steps, interval, initial, expected
):
  config = make_config(
    steps, eval_interval=interval, eval_initial_weights=initial
  )
  writer, eval_writer = Writes(), Writes()
  log, checkpointer = run_both(Plain, config, writer, eval_writer)
  # The weight counts the steps: these are the current weights.
  assert log.evals == [(step, float(step)) for step in expected]
  assert eval_writer.steps() == expected
  assert [mode for mode, _ in log.inits] == ['train', 'eval']
  assert checkpointer.saves() == [steps]


def test_the_time_of_evaluations_is_in_no_interval_and_no_rate(monkeypatch):
  """A step takes a second and an evaluation ten, by the clock."""
  clock = [0.0]
  monkeypatch.setattr(time, 'time', lambda: clock[0])

  class Clocked(Plain):
    def step(self, **kwargs):
      clock[0] += 1
      return super().step(**kwargs)

    def evaluate(self, **kwargs):
      clock[0] += 10
      return super().evaluate(**kwargs)

  config = make_config(
    9, eval_interval_type='secs', eval_interval=3, log_train_data_interval=2
  )
  writer = Writes()
  log, _ = run_both(Clocked, config, writer)
  assert [step for step, _ in log.evals] == [3, 6, 9]
  assert writer.steps() == [2, 4, 6, 8, 9]
  assert {r['steps_per_sec'] for _, r in writer.records} == {1.0}


@pytest.mark.parametrize(
  'key',
  [
    None,
    'log_all_hosts',
    'train_checkpoint_all_hosts',
    'best_checkpoint_all_hosts',
  ],
)
def test_only_the_first_host_writes_and_saves_unless_all_do(key, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  config = make_config(
    2,
    log_train_data_interval=1,
    save_checkpoint_interval=1,
    save_initial_train_checkpoint=True,
    best_model_eval_metric='score',
  )
  if key:
    config[key] = True
  writer = Writes()
  _, checkpointer = run_both(Plain, config, writer)
  assert (writer.steps(), checkpointer.saves(), checkpointer.saves('best')) == (
    [1, 2] if key == 'log_all_hosts' else [],
    [0, 1, 2] if key == 'train_checkpoint_all_hosts' else [],
    [2] if key == 'best_checkpoint_all_hosts' else [],
  )


def test_a_step_is_judged_before_it_is_evaluated():
  log = Log()
  cls = functools.partial(Plain, log=log, scalars={'loss': NAN})
  config = make_config(1, eval_interval=1, on_nonfinite='raise')
  with pytest.raises(nonfinite.NonfiniteError):
    train.Run(cls, config).train_and_eval()
  assert log.evals == []


def test_a_checkpoint_saved_between_look_and_restore_is_evaluated_once():
  class Late(Scripted):
    """At the first restore, the second checkpoint has come already."""

    def restore(self, ckpt_series):
      self.newest = max(2, self.newest)
      super().restore(ckpt_series)

  writer = Writes()
  checkpointer = Late([1, 2, 3])
  train.evaluate(Plain, make_config(3), checkpointer, writer, 'eval')
  assert [step for step, _ in writer.records] == [2, 3]
  assert checkpointer.is_safe


def test_an_experiment_with_snapshots_of_its_own_is_evaluated_as_trained():
  seen = []

  class Own(experiment.AbstractExperiment):
    """Keeps its weights where no attribute dict says."""

    def __init__(self, mode, init_rng):
      super().__init__(mode, init_rng)
      self.hidden = jnp.zeros([])
      self.add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def step(self, **unused):
      self.hidden = self.add(self.hidden)
      return {}

    def evaluate(self, **unused):
      seen.append(float(self.hidden))
      return {}

    def snapshot_state(self):
      return {'w': self.hidden, 'key': jax.random.key(3)}

    def restore_from_snapshot(self, snapshot_state):
      assert snapshot_state['key'] == jax.random.key(3)
      self.hidden = jnp.asarray(snapshot_state['w'])

  config = make_config(4, eval_interval=2)
  train.Run(Own, config, Recorder(config), None, None).train_and_eval()
  assert seen == [2.0, 4.0]


@pytest.mark.parametrize(('chief', 'is_best'), [(NAN, False), (1.0, True)])
def test_of_several_processes_the_first_decides_what_is_best(
  chief, is_best, tmp_path, monkeypatch
):
  class Scored(experiment.AbstractExperiment):  # As a program of JAXline.
    def __init__(self, mode, init_rng):
      super().__init__(mode, init_rng)

    def step(self, **unused):
      raise NotImplementedError

    def evaluate(self, **unused):
      return {'score': NAN if is_best else 1.0}  # What another process sees.

  config = make_config(
    1, checkpoint_dir=str(tmp_path), best_model_eval_metric='score'
  )
  checkpointer = durable.DurableCheckpointer(config, 'train_and_eval')

  def decide(value, choose, series='', **unused):
    is_ours = series == 'evaluation'
    return choose([{'score': chief}, value] if is_ours else [value])

  monkeypatch.setattr(distributed, 'gather_and_decide', decide)
  with monkeypatch.context() as patch:
    patch.setattr(jax, 'process_count', lambda: 2)
    evaluate = train.Run(Scored, config, checkpointer).make_evaluation()
  saved = []
  monkeypatch.setattr(checkpointer, 'save', saved.append)
  evaluate(protocol.ExperimentState(global_step=1, train_step_rng=None))
  evaluate.wait()
  assert saved == (['best'] if is_best else [])


# What was evaluated, over the ends of processes.


class Killed(BaseException):
  """Ends a run as kill -9 does: nothing else is saved or noted."""


class Counted(Plain):
  """Says how many evaluations there were before.

  Attributes:
    dies_at: the number of the step in which it is killed.
  """

  dies_at = None

  def step(self, *, global_step, rng, writer):
    if global_step == self.dies_at:
      raise Killed
    return super().step(global_step=global_step, rng=rng, writer=writer)

  def evaluate(self, **kwargs):
    super().evaluate(**kwargs)
    return {'before': self.num_evaluated}


class Process:
  """A run in a directory, by one mode, with its logs; each is a new process."""

  def __init__(self, run_dir, mode='train_and_eval', **values):
    self.run_dir = run_dir
    self.mode = mode
    self.values = {
      'eval_interval': 1, 'save_checkpoint_interval': 1,
      'max_checkpoints_to_keep': 2, 'console': 'off',
    } | values  # fmt: skip

  def run(self, steps, dies_at=None, **values):
    """Runs so many steps; returns what was evaluated, in this order."""
    config = make_config(
      steps, checkpoint_dir=str(self.run_dir), **self.values | values
    )
    log = Log()
    cls = type('Counted', (Counted,), {'dies_at': dies_at})
    experiment_class = functools.partial(cls, log=log)
    if self.mode == 'eval':
      # Training goes first, at once to its end; so nothing is missed.
      values = self.values | {'max_checkpoints_to_keep': 100}
      Process(self.run_dir, 'train', **values).run(steps)
    killed = contextlib.nullcontext()
    if dies_at is not None:
      killed = pytest.raises(Killed)
    with killed:
      platform.start(
        experiment_class,
        config,
        self.mode,
        writer_factory=platform.create_writer,
      )
    return [step for step, _ in log.evals]

  def curve(self, mode='eval'):
    """Returns each line's step and number of evaluations before it."""
    found = remains.curve(self.run_dir, mode)
    return [(r['step'], r['before']) for r in found]

  def texts(self, mode='eval'):
    lines = (self.run_dir / mode / 'metrics.jsonl').read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(r['step'], 'config' in r) for r in found if r['kind'] == 'texts']

  def shown(self, mode='eval'):
    """Returns the curve of TensorBoard's files, whatever they say is void."""
    return remains.tensorboard(self.run_dir, mode, False)['before']


@pytest.mark.parametrize('kind', ['steps', 'secs'])
def test_what_was_not_noted_is_evaluated_again(kind, tmp_path):
  process = Process(tmp_path, eval_interval_type=kind)
  noted = tmp_path / 'checkpoints' / 'evaluated' / 'eval.json'
  process.run(1)
  before = noted.read_bytes()
  process.run(2)
  noted.write_bytes(before)  # As if it was killed before the note.
  assert [process.run(2), process.run(2)] == [[2], []]


def test_a_damaged_best_one_does_not_keep_a_run_from_going_on(tmp_path):
  process = Process(
    tmp_path, best_model_eval_metric='before', max_best_checkpoints_to_keep=1
  )
  process.run(2)
  (tmp_path / 'checkpoints' / 'best' / '2.json').write_text('{')
  for steps in (3, 4):
    process.run(steps)
    assert remains.steps(tmp_path, 'best') == [steps]


def test_checkpoints_behind_the_last_step_are_evaluated_too(tmp_path):
  Process(tmp_path, 'train', max_checkpoints_to_keep=100).run(4)
  assert Process(tmp_path, 'eval').run(2) == [1, 2, 3, 4]


@pytest.mark.parametrize('is_noted', [True, False])
@pytest.mark.parametrize('forks', [False, True])
def test_killed_between_the_first_evaluation_and_the_first_save(
  forks, is_noted, tmp_path
):
  values = {'eval_initial_weights': True}
  if forks:
    Process(tmp_path / 'other', 'train').run(4)
    values = {'restore_from': str(tmp_path / 'other')}
  process = Process(tmp_path / 'run', **values)
  first = 4 if forks else 0
  for _ in range(2):  # Nor if it happens again.
    process.run(6, dies_at=first)
    noted = tmp_path / 'run' / 'checkpoints' / 'evaluated' / 'eval.json'
    assert json.loads(noted.read_text())['evaluated'][0][0] == first
    assert remains.steps(tmp_path / 'run') == []
    assert process.curve() == [(first, 0)]
    if not is_noted:
      noted.unlink()
  process.run(6)
  expected = [(step, i) for i, step in enumerate(range(first, 7))]
  assert process.curve() == process.shown() == expected
  assert process.texts() == process.texts('train') == [(0, True)]


@pytest.mark.parametrize('initial', [True, False])
def test_killed_behind_the_save_before_the_first_step(initial, tmp_path):
  process = Process(
    tmp_path,
    save_initial_train_checkpoint=True,
    eval_initial_weights=initial,
    save_checkpoint_interval=3,
  )
  for dies_at in (0, 2):
    process.run(3, dies_at=dies_at)
    assert remains.steps(tmp_path) == [0]
    assert process.texts() == process.texts('train') == [(0, True)]
  process.run(3)
  steps = [0, 1, 2, 3] if initial else [1, 2, 3]
  assert [step for step, _ in process.curve()] == steps
  assert process.texts() == process.texts('train') == [(0, True)]


def test_a_run_that_begins_anew_has_none_of_the_old_log(tmp_path):
  for mode in ('train_and_eval', 'eval'):
    process = Process(tmp_path / mode, mode)
    process.run(3)
    shutil.rmtree(tmp_path / mode / 'checkpoints')
    assert process.run(2) == [1, 2]
    assert process.curve() == [(1, 0), (2, 1)]
    assert process.texts() == [(0, True)]


def test_a_writer_without_files_gets_the_config_once(tmp_path, monkeypatch):
  class Texts(writers.Backend):
    kinds = ('texts',)

    def write(self, records):
      got.extend((record.step, *record.values) for record in records)

  got = []
  create = lambda *unused: writers.MetricWriter(Texts())
  monkeypatch.setattr(platform, 'create_writer', create)
  for steps in (2, 4):
    Process(tmp_path, 'train').run(steps)
  assert got == [(0, 'config')]
