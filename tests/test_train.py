"""Training: seeds and keys, what a run is made of, saves, hooks, errors."""

import contextlib
import functools
import gc
import math
import threading
import time
import traceback
from unittest import mock
import weakref

import jax
from ml_collections import config_dict
import numpy as np
import pytest

from jaxline import train
from jaxline import utils
from jaxline.checkpoint import durable
from jaxline.checkpoint import protocol
from jaxline.metrics import writers
from jaxline.parallel import devices
from jaxline.supervision import nonfinite
from tests import processes
from tests import toys

Log, Plain, Recorder = toys.Log, toys.Plain, toys.Recorder
Toy, Writes = toys.Toy, toys.Writes
make_config, run = toys.make_config, toys.run
evaluate_once = toys.evaluate_once


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


# What a run is made of.


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
  warnings = caplog.text.count(f'{cls.__name__} does not take init_rng')
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
  writer = Writes()
  foreign = mock.create_autospec(utils.Checkpointer, instance=True)
  foreign.close = mock.Mock()
  made = train.Run(Plain, config_dict.ConfigDict({'seed': 1}), foreign, writer)
  assert made.config.training_steps == 10000
  made.log.write_scalars(3, {'loss': 1.0})
  made.log.write_texts(3, {'config': ''})  # It has no such method.
  made.log.flush()
  assert writer.steps() == [3]
  with pytest.raises(ValueError, match='Leave the step None'):
    made.checkpointer.restore('latest', step=3)
  made.checkpointer.close()
  foreign.close.assert_called_once_with()


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

  config, writer = make_config(1, log_train_data_interval=-1), Own()
  train.Run(Writing, config, None, writer).train()
  assert writer.records[:2] == [(0, {'image': 1, 'size': 2}), 'mark']


@pytest.mark.parametrize('fails', [False, True])
def test_a_run_that_has_ended_keeps_no_experiment(fails):
  made = []

  def construct(mode, init_rng):
    experiment = Plain(mode, init_rng, fail_at=1 if fails else None)
    made.append(weakref.ref(experiment))
    return experiment

  checkpointer = mock.create_autospec(utils.Checkpointer, instance=True)
  checkpointer.can_be_restored.return_value = False
  states = {}
  checkpointer.get_experiment_state.side_effect = lambda series: (
    states.setdefault(series, protocol.ExperimentState())
  )
  gc.collect()
  gc.disable()
  try:
    with contextlib.suppress(ZeroDivisionError):
      made_run = train.Run(construct, make_config(2), checkpointer, Writes())
      made_run.train_and_eval()
    del made_run
    states.clear()
    assert made
    # A thread may still leave the call that it has answered.
    processes.wait_until(lambda: not any(ref() for ref in made))
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
  train.Run(Plain, config, Wrapper(inner)).train()
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
        'log_train_data_interval': 2,
        'interval_type': 'secs',
        'logging_interval_type': 'steps',
      },
      [2, 4, 5],
    ),
  ],
)
def test_a_writer_gets_scalars_and_rates_at_the_interval_and_the_last_step(
  values, steps
):
  writer = Writes()
  counted = {
    'word': 'x',  # No number, and no error.
    'tokens_per_step': np.array(10, np.int32),
    'examples_per_step': None,
  }
  cls = functools.partial(Plain, scalars=counted)
  run(cls, make_config(5, **values), writer=writer)
  assert writer.steps() == steps
  for step, scalars in writer.records:
    assert counted.items() <= scalars.items()
    assert scalars['loss'] == step - 1
    assert 'examples_per_sec' not in scalars
    if step == steps[-1]:
      assert scalars['tokens_per_sec'] == 10.0 * scalars['steps_per_sec']


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


def test_all_hosts_meet_after_the_last_save(monkeypatch):
  config, checkpointer = make_config(1), Recorder(make_config(1))
  meet = lambda: checkpointer.calls.append(('meet', None, None))
  monkeypatch.setattr(devices, 'rendezvous', meet)
  run(config=config, checkpointer=checkpointer)
  assert [call for call, *_ in checkpointer.calls] == ['save', 'wait', 'meet']


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


class NanAtStep2(Plain):
  def step(self, *, global_step, rng, writer):
    super().step(global_step=global_step, rng=rng, writer=writer)
    return {'loss': math.nan if global_step == 1 else 1.0}


def test_a_step_is_judged_before_it_is_saved():
  config = make_config(save_checkpoint_interval=1, on_nonfinite='raise')
  checkpointer = Recorder(config)
  with pytest.raises(nonfinite.NonfiniteError, match='step 2'):
    run(NanAtStep2, config, checkpointer)
  assert checkpointer.saves() == [1]


def test_a_step_is_judged_before_it_is_evaluated():
  log = Log()
  cls = functools.partial(Plain, log=log, scalars={'loss': math.nan})
  config = make_config(1, eval_interval=1, on_nonfinite='raise')
  with pytest.raises(nonfinite.NonfiniteError):
    train.Run(cls, config).train_and_eval()
  assert log.evals == []


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
