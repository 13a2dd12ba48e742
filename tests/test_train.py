"""Training: seeds and keys, what a run is made of, saves, hooks, errors."""

import contextlib
import functools
import math
import threading
import time
from unittest import mock

import jax
import numpy as np
import pytest

from jaxline import train
from jaxline import utils
from jaxline.checkpoint import durable
from jaxline.metrics import writers
from jaxline.parallel import devices
from jaxline.supervision import nonfinite
from tests import toys

Log, Plain, Recorder = toys.Log, toys.Plain, toys.Recorder
Toy, Writes = toys.Toy, toys.Writes
make_config, run = toys.make_config, toys.run


def run_both(cls=Plain, config=None, writer=None, eval_writer=None):
  """Trains and evaluates in one thread."""
  log = Log()
  checkpointer = Recorder(config)
  partial = functools.partial(cls, log=log)
  train.Run(partial, config, checkpointer, writer, eval_writer).train_and_eval()
  return log, checkpointer


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
  toys.evaluate_once(functools.partial(Toy, log=log), config)
  np.testing.assert_array_equal([key for _, key in log.inits], [init_key, seed])
  # The default mode, same_host_same_device, folds nothing in.
  np.testing.assert_array_equal(log.keys, [[seed, seed]])


class ModeOnly(Plain):
  def __init__(self, mode):
    super().__init__(mode)


class AnyKeywords(Plain):
  def __init__(self, mode, **kwargs):
    super().__init__(mode)
    # An old one may hand its keywords on to what takes no init_rng.
    assert [*kwargs] == ['config']


@pytest.mark.parametrize('cls', [ModeOnly, AnyKeywords, Plain])
def test_constructors_old_and_new(cls, caplog):
  config = make_config(0)
  if cls is AnyKeywords:
    config.experiment_kwargs.config = {'rate': 0.5}
  checkpointer = Recorder(config)
  train.train(cls, config, checkpointer, None)
  module = checkpointer.get_experiment_state('latest').experiment_module
  assert type(module) is cls
  said = f'{cls.__name__} does not take init_rng' in caplog.text
  assert said == (cls is not Plain)


def test_an_experiment_needs_no_base_class():
  evaluated = []

  class Bare:
    CHECKPOINT_ATTRS = {'_w': 'w'}

    def __init__(self, mode, init_rng):
      self._w = devices.bcast_local_devices(np.float32(0))

    def step(self, **unused):
      self._w = self._w + np.float32(1)

    def evaluate(self, **unused):
      evaluated.append(float(self._w[0]))

  for steps in (3, 3, 5):  # One that has ended is evaluated once more.
    config = make_config(steps, eval_interval=2)
    checkpointer = utils.InMemoryCheckpointer(config, 'train')
    train.Run(Bare, config, checkpointer).train_and_eval()
  assert evaluated == [2, 3, 3, 4, 5]


class Action:
  """A periodic action of somebody's own."""

  def __init__(self):
    self.calls = []
    self.waits = 0

  def update_time(self, t, step):
    self.calls.append((t, step, None))

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
  moments, *calls = zip(*action.calls, strict=True)
  assert [*zip(*calls, strict=True)] == [
    (0, None), (1, {'loss': 0}), (2, {'loss': 1}), (2, None), (3, {'loss': 2}),
  ]  # fmt: skip
  assert moments == (*sorted({*moments}),)
  assert action.waits == 2
  # Nor is a restored run saved before its first step.
  assert checkpointer.saves() == [0, 2, 3]


@pytest.mark.parametrize(
  ('values', 'steps'),
  [
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
    assert {**counted, 'loss': step - 1}.items() <= scalars.items()
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


@pytest.mark.parametrize(
  ('steps', 'interval', 'initial', 'saves', 'evaluations'),
  [
    (5, 2, False, [2, 4, 5], [2, 4, 5]),
    (4, 2, False, [2, 4], [2, 4]),  # The last one is not made twice.
    (4, None, False, [4], [4]),
    (2, 0, False, [2], [1, 2]),
    (2, -1, True, [0, 2], [0, 2]),
    (0, 1, True, [0], [0]),
    (0, 1, False, [0], [0]),
  ],
)
def test_when_a_run_saves_and_evaluates(
  steps, interval, initial, saves, evaluations
):
  config = make_config(
    steps,
    save_checkpoint_interval=interval,
    save_initial_train_checkpoint=initial,
    eval_interval=interval,
    eval_initial_weights=initial,
  )
  writer, eval_writer = Writes(), Writes()
  log, checkpointer = run_both(Plain, config, writer, eval_writer)
  assert checkpointer.saves() == saves
  assert checkpointer.calls[-1][0] == 'wait'
  # The weight counts the steps: these are the current weights.
  assert log.evals == [(step, float(step)) for step in evaluations]
  assert eval_writer.steps() == evaluations
  assert [mode for mode, _ in log.inits] == ['train', 'eval']


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
    2, log_train_data_interval=1, save_checkpoint_interval=1,
    save_initial_train_checkpoint=True, best_model_eval_metric='score',
    **({key: True} if key else {}),
  )  # fmt: skip
  writer = Writes()
  _, checkpointer = run_both(Plain, config, writer)
  assert (writer.steps(), checkpointer.saves(), checkpointer.saves('best')) == (
    [1, 2] if key == 'log_all_hosts' else [],
    [0, 1, 2] if key == 'train_checkpoint_all_hosts' else [],
    [2] if key == 'best_checkpoint_all_hosts' else [],
  )


@pytest.mark.parametrize('what', ['save_checkpoint_interval', 'eval_interval'])
def test_a_step_is_judged_before_it_is_saved_or_evaluated(what):
  class NanAtStep2(Plain):
    def step(self, **kwargs):
      super().step(**kwargs)
      return {'loss': math.nan if kwargs['global_step'] == 1 else 1.0}

  config = make_config(on_nonfinite='raise', **{what: 1})
  log, checkpointer = Log(), Recorder(config)
  cls = functools.partial(NanAtStep2, log=log)
  with pytest.raises(nonfinite.NonfiniteError, match='step 2'):
    train.Run(cls, config, checkpointer).train_and_eval()
  found = checkpointer.saves(), [step for step, _ in log.evals]
  assert found == (([1], []) if 'save' in what else ([], [1]))


def test_the_steps_error_counts_where_an_action_fails_as_well(caplog):
  action, config = Action(), make_config(save_checkpoint_interval=2)
  action.wait_to_finish = mock.Mock(side_effect=OSError('disk'))
  cls, checkpointer = functools.partial(Plain, fail_at=1), Recorder(config)
  with pytest.raises(ZeroDivisionError):
    run(cls, config, checkpointer, actions=[action])
  assert 'failed as well' in caplog.text
  assert checkpointer.saves() == []


class Full:
  """A writer on a disk that is full from a step on."""

  def __init__(self, step):
    self.step = step

  def write_scalars(self, global_step, scalars):
    if global_step >= self.step:
      raise OSError('disk full')


def test_a_failing_writer_ends_the_run_after_the_next_step(caplog):
  writer = writers.MetricWriter(Full(1))

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
  with pytest.raises(OSError, match='disk full'):
    run(Endless, config, writer=writer)
  assert 'failed as well' not in caplog.text  # It is told once.


@pytest.mark.parametrize('place', ['device', 'disk'])
def test_an_error_of_a_later_step_takes_no_checkpoint(tmp_path, place):
  writer = writers.MetricWriter(Full(3 if place == 'disk' else math.inf))
  may_commit = threading.Event()

  class Fault:
    """A scalar of a step that failed on its device."""

    def __array__(self, *args, **kwargs):
      raise OSError('device fault')

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
