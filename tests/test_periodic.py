"""Tests of jaxline.metrics.periodic."""

import math
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import metrics
from jaxline.metrics import periodic

TIMEOUT = 10  # Seconds; only a broken test waits that long.


class _Recorder:
  """An action's function that keeps what it is called with."""

  def __init__(self):
    self.calls = []

  def __call__(self, step, scalars):
    self.calls.append((step, scalars))

  @property
  def steps(self):
    return [step for step, _ in self.calls]

  @property
  def rates(self):
    return [scalars['steps_per_sec'] for _, scalars in self.calls]


def _run(action, times_and_steps):
  for t, step in times_and_steps:
    action(t, step, {'step': step})
  action.wait_to_finish()


def _due_steps(interval_type, interval, steps, **kwargs):
  """Returns the steps that are due, at one step per second."""
  recorder = _Recorder()
  action = periodic.PeriodicAction(recorder, interval_type, interval, **kwargs)
  _run(action, [(float(step), step) for step in steps])
  return recorder.steps


# --- when it is due ----------------------------------------------------------


@pytest.mark.parametrize(
  ('interval_type', 'interval', 'expected'),
  [
    ('steps', 3, [3, 6, 9]),
    ('steps', 1, list(range(1, 11))),
    ('steps', 2.0, [2, 4, 6, 8, 10]),
    ('secs', 4, [4, 8]),
    (None, 4.0, [4, 8]),
    ('steps', 0, list(range(1, 11))),
    ('secs', 0, list(range(1, 11))),
    ('steps', None, []),
    ('secs', None, []),
    ('steps', -1, []),
    ('secs', -1, []),
  ],
)
@pytest.mark.parametrize('run_async', [True, False])
def test_interval(interval_type, interval, expected, run_async):
  steps = _due_steps(interval_type, interval, range(1, 11), run_async=run_async)
  assert steps == expected


def test_an_action_that_is_off_is_off_at_step_0_too():
  assert _due_steps('steps', None, [0]) == []
  assert _due_steps('steps', 5, [0]) == [0]


def test_seconds_count_from_when_it_was_last_due():
  recorder = _Recorder()
  action = periodic.PeriodicAction(recorder, 'secs', 10, start_time=100.0)
  times = [105.0, 109.9, 110.0, 119.0, 125.0, 134.9, 135.0]
  _run(action, [(t, i) for i, t in enumerate(times)])
  assert recorder.steps == [2, 4, 6]


def test_a_clock_set_back_delays_by_one_interval_at_most():
  recorder = _Recorder()
  action = periodic.PeriodicAction(recorder, 'secs', 10, start_time=1000.0)
  _run(action, [(1005.0, 1), (5.0, 2), (14.0, 3), (15.0, 4), (25.0, 5)])
  assert recorder.steps == [4, 5]
  # From step 2 at 5 s to step 4 at 15 s; then one step in 10 s.
  assert recorder.rates == [0.2, 0.1]


@pytest.mark.parametrize('interval_type', ['secs', 'steps'])
def test_interval_0_is_due_at_any_time(interval_type):
  recorder = _Recorder()
  action = periodic.PeriodicAction(recorder, interval_type, 0, start_time=9.0)
  _run(action, [(9.0, 1), (9.0, 2), (3.0, 3), (4.0, 4)])
  assert recorder.steps == [1, 2, 3, 4]


@pytest.mark.parametrize('interval', [1_000_000, None])
@pytest.mark.parametrize('interval_type', ['steps', 'secs', None])
def test_the_end_step_is_due(interval_type, interval):
  steps = _due_steps(interval_type, interval, range(1, 9), end_step_to_action=7)
  assert steps == [7]


@pytest.mark.parametrize(
  ('ratios', 'expected'),
  [
    ([1, 2, 5, 10], [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]),
    ([1, 2, 5], [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]),
    ([2], [1, 2, 10, 20, 100, 200, 1000]),
    # round(2.5) is 2; 1.1 * 100 is a little over 110.
    ([2.5, 1.1], [1, 2, 10, 11, 25, 100, 110, 250, 1000]),
    # 25 * 10**k and 0.5 * 10**k, for k >= 0.
    ([25, 0.5], [1, 5, 10, 25, 50, 100, 250, 500, 1000]),
  ],
)
@pytest.mark.parametrize('interval', [1_000_000, None])
def test_growth_ratios(ratios, expected, interval):
  steps = _due_steps(
    'steps', interval, range(1, 1011), logging_growth_ratios=ratios
  )
  assert steps == expected


def test_growth_ratios_add_to_the_interval():
  steps = _due_steps(
    'steps', 5000, range(399_900, 400_100), logging_growth_ratios=[1, 2, 3]
  )
  assert steps == [400_000]
  assert _due_steps('steps', 3, range(1, 11), logging_growth_ratios=[1]) == [
    1, 3, 6, 9, 10,
  ]  # fmt: skip


def test_growth_steps_are_exact_where_floats_are_not():
  big = 10**17
  steps = [big - 1, big, big + 1, 3 * big, 3 * big + 1, 0, -1, 3]
  assert _due_steps(
    'steps', None, steps, logging_growth_ratios=[3]
  ) == [big, 3 * big, 3]  # fmt: skip


def test_growth_ratios_run_no_device_code():
  action = periodic.PeriodicAction(
    _Recorder(), 'steps', None, logging_growth_ratios=[2]
  )
  with jax.transfer_guard('disallow'), jax.log_compiles():
    for step in range(11, 20):
      action(0.0, step, {})


@pytest.mark.parametrize(
  'convert', [np.int64, np.asarray, jnp.asarray], ids=['int64', 'np', 'jnp']
)
def test_a_step_may_be_any_integer(convert):
  recorder = _Recorder()
  action = periodic.PeriodicAction(
    recorder, 'steps', 100, logging_growth_ratios=[2], log_all_data=True
  )
  _run(action, [(float(step), convert(step)) for step in (20, 21, 100)])
  assert recorder.steps == [20, 21, 100]
  assert all(type(step) is int for step in recorder.steps)


# --- arguments ---------------------------------------------------------------


@pytest.mark.parametrize(
  ('interval_type', 'ratios'),
  [('hours', None), ('secs', [1, 2]), (None, [1, 2]), ('steps', [1, -2])],
)
def test_wrong_arguments_are_refused(interval_type, ratios):
  with pytest.raises(ValueError, match='interval_type'):
    periodic.PeriodicAction(
      print, interval_type, 1, logging_growth_ratios=ratios
    )


# --- the rate ----------------------------------------------------------------


def test_steps_per_sec_is_the_mean_since_last_due():
  recorder = _Recorder()
  action = periodic.PeriodicAction(
    recorder, 'steps', 10, start_time=100.0, start_step=0
  )
  _run(action, [(102.0, 10), (103.0, 15), (107.0, 20)])
  assert recorder.rates == [5.0, 2.0]


def test_update_time_starts_the_measurement_anew():
  recorder = _Recorder()
  action = periodic.PeriodicAction(recorder, 'steps', 10)
  action.update_time(1000.0, 90)
  _run(action, [(1004.0, 100)])
  assert recorder.rates == [2.5]


def test_rate_within_one_tick_of_the_clock():
  recorder = _Recorder()
  action = periodic.PeriodicAction(recorder, 'steps', 1)
  _run(action, [(0.0, 1), (2.0, 2), (2.0, 3), (2.0, 4), (4.0, 5), (3.0, 6)])
  # No time yet: 0. Two steps in 2 s. The same, twice. Three steps (3, 4, 5) in
  # 2 s. The clock was set back: the same.
  assert recorder.rates == [0.0, 1.0, 1.0, 1.0, 1.5, 1.5]
  assert all(math.isfinite(rate) for rate in recorder.rates)


# --- what the function gets --------------------------------------------------


@pytest.mark.parametrize('run_async', [True, False])
def test_scalars_come_to_the_host_as_a_new_dict(run_async):
  recorder = _Recorder()
  action = periodic.PeriodicAction(recorder, 'steps', 1, run_async=run_async)
  scalars = {
    'z': jnp.float32(1.5),
    'a': jnp.arange(2),
    'nested': {'b': 2},
    'mean': metrics.Mean.of(jnp.ones([2])),
  }
  action(1.0, 1, scalars)
  action.wait_to_finish()
  assert set(scalars) == {'z', 'a', 'nested', 'mean'}
  [(step, got)] = recorder.calls
  assert step == 1
  # In the experiment's order, which is the order of the log line.
  assert list(got) == ['z', 'a', 'nested', 'mean', 'steps_per_sec']
  assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(got))
  assert got['z'] == np.float32(1.5)
  np.testing.assert_array_equal(got['a'], [0, 1])
  assert got['nested'] == {'b': 2}


def test_a_step_without_scalars():
  recorder = _Recorder()
  action = periodic.PeriodicAction(recorder, 'steps', 1)
  action(2.0, 1, None)
  action.wait_to_finish()
  assert recorder.calls == [(1, {'steps_per_sec': 0.5})]


@pytest.fixture
def fetches(monkeypatch):
  """The thread and the array of each fetch."""
  found = []

  def asarray(x, *args, real=np.asarray, **kwargs):
    if isinstance(x, jax.Array):
      found.append((threading.current_thread(), x))
    return real(x, *args, **kwargs)

  monkeypatch.setattr(np, 'asarray', asarray)
  return found


def test_each_array_is_fetched_once_on_the_background_thread(fetches):
  action = periodic.PeriodicAction(_Recorder(), 'steps', 1)
  scalars = {'a': jnp.ones([]), 'b': [jnp.ones([]), {'c': jnp.ones([])}]}
  action(1.0, 1, scalars)
  action.wait_to_finish()
  assert len(fetches) == 3
  assert threading.current_thread() not in {thread for thread, _ in fetches}


def test_all_transfers_begin_before_one_is_waited_for(fetches, monkeypatch):
  begun = []
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(
    type(jnp.ones([])),
    'copy_to_host_async',
    lambda self: begun.append(len(fetches)),
  )
  action = periodic.PeriodicAction(
    _Recorder(), 'steps', 2, log_all_data=True, run_async=False
  )
  for step in (1, 2):
    action(1.0, step, {'a': jnp.ones([]), 'b': [jnp.ones([])], 'c': None})
  assert begun == [0, 0, 0, 0]
  assert len(fetches) == 4


# --- log_all_data ------------------------------------------------------------


@pytest.mark.parametrize('run_async', [True, False])
def test_log_all_data_hands_on_each_step(run_async):
  recorder = _Recorder()
  action = periodic.PeriodicAction(
    recorder, 'steps', 3, log_all_data=True, run_async=run_async
  )
  for step in range(1, 7):
    action(float(step), step, {'x': jnp.int32(10 * step)})
  action.wait_to_finish()
  assert recorder.steps == [1, 2, 3, 4, 5, 6]
  assert [scalars['x'] for _, scalars in recorder.calls] == [
    10, 20, 30, 40, 50, 60,
  ]  # fmt: skip
  # The rate is one of the whole interval, and stands at its end.
  assert [s for s, scalars in recorder.calls if 'steps_per_sec' in scalars] == [
    3, 6,
  ]  # fmt: skip


def test_log_all_data_keeps_a_bounded_number():
  recorder = _Recorder()
  action = periodic.PeriodicAction(
    recorder, 'steps', None, log_all_data=True, end_step_to_action=3000,
    run_async=False,
  )  # fmt: skip
  held = []
  for step in range(1, 3001):
    action(float(step), step, {})
    held.append(step - len(recorder.calls))
  assert max(held) < 512
  assert recorder.steps == list(range(1, 3001))
  assert [s for s, scalars in recorder.calls if scalars] == [3000]


# --- handing on before it is due ---------------------------------------------


def test_flush_async_waits_for_what_was_kept_and_for_nothing_later():
  slow = _Slow()
  action = periodic.PeriodicAction(slow, 'steps', 10, log_all_data=True)
  for step in range(1, 4):
    action(float(step), step, {'x': 10 * step})
  wait = action.flush_async()
  assert slow.started.acquire(timeout=TIMEOUT)
  assert not slow.calls
  seen = []
  done = threading.Event()

  def save():
    wait()
    seen.extend(slow.steps)
    done.set()

  thread = threading.Thread(target=save)
  thread.start()
  for step in range(4, 10):  # The loop goes on meanwhile.
    action(float(step), step, {})
  assert not done.wait(0.05)
  slow.may_go.set()
  thread.join(TIMEOUT)
  assert done.is_set()
  assert seen == [1, 2, 3]
  action(10.0, 10, {})
  action.wait_to_finish()
  assert slow.steps == list(range(1, 11))
  assert slow.calls[:3] == [(1, {'x': 10}), (2, {'x': 20}), (3, {'x': 30})]
  # Handing on is not being due: the rate is that of the ten steps.
  assert [s for s, x in slow.calls if 'steps_per_sec' in x] == [10]
  assert slow.calls[-1][1]['steps_per_sec'] == 1.0


def test_flush_async_of_a_synchronous_action_calls_at_once():
  recorder = _Recorder()
  action = periodic.PeriodicAction(
    recorder, 'steps', 10, run_async=False, log_all_data=True
  )
  action(1.0, 1, {'x': 1})
  wait = action.flush_async()
  assert recorder.calls == [(1, {'x': 1})]
  assert wait() == {}
  action.flush_async()
  assert recorder.steps == [1]


def test_flush_async_raises_the_error_that_lost_a_record_and_no_later_one():
  def fail(step, scalars):
    if step == 3:
      raise ValueError('disk full')

  action = periodic.PeriodicAction(fail, 'steps', 10, log_all_data=True)
  action(1.0, 1, {})
  wait_for_1 = action.flush_async()
  assert wait_for_1() == {}
  action(3.0, 3, {})
  wait_for_3 = action.flush_async()
  for _ in range(2):
    with pytest.raises(ValueError, match='disk full') as info:
      wait_for_3()
    frames = traceback.extract_tb(info.value.__traceback__)
    assert frames[-1].name == 'fail'
  wait_for_1()
  with pytest.raises(ValueError, match='disk full'):
    action.flush_async()


# --- asynchronous ------------------------------------------------------------


class _Slow(_Recorder):
  """A function that waits for leave at each call."""

  def __init__(self):
    super().__init__()
    self.started = threading.Semaphore(0)
    self.may_go = threading.Event()

  def __call__(self, step, scalars):
    self.started.release()
    assert self.may_go.wait(TIMEOUT)
    super().__call__(step, scalars)


def test_a_dict_changed_while_it_waits_is_not_changed_for_the_function():
  slow = _Slow()
  action = periodic.PeriodicAction(slow, 'steps', 1)
  scalars = {}
  for step in range(1, 4):
    scalars['x'] = step
    action(float(step), step, scalars)
  slow.may_go.set()
  action.wait_to_finish()
  assert [scalars['x'] for _, scalars in slow.calls] == [1, 2, 3]


@pytest.mark.parametrize('is_due', [True, False])
def test_an_asynchronous_error_comes_at_the_next_call(is_due):
  failed = threading.Event()

  def fail(step, scalars):
    failed.set()
    raise ValueError('disk full')

  action = periodic.PeriodicAction(fail, 'steps', 10)
  action(10.0, 10, {})
  assert failed.wait(TIMEOUT)
  with pytest.raises(ValueError, match='disk full'):
    action.wait_to_finish()
  step = 20 if is_due else 11
  for use in (lambda: action(11.0, step, {}), action.wait_to_finish):
    with pytest.raises(ValueError, match='disk full') as info:
      use()
    frames = traceback.extract_tb(info.value.__traceback__)
    assert frames[-1].name == 'fail'


def test_what_a_later_step_was_given_is_handed_on_as_nothing():
  x = jnp.ones([])
  handed_on = []
  action = periodic.PeriodicAction(
    lambda step, scalars: handed_on.append(scalars), 'steps', 1
  )
  x.delete()
  action(1.0, 1, {'x': x, 'y': jnp.float32(2)})
  action.wait_to_finish()
  assert handed_on == [{'x': None, 'y': 2.0, 'steps_per_sec': 1.0}]


@pytest.mark.parametrize('interval', [1, 4])
def test_a_function_slower_than_its_interval_blocks_and_loses_nothing(
  interval, monkeypatch
):
  monkeypatch.setattr(periodic, '_MAX_PENDING', 5)
  slow = _Slow()
  action = periodic.PeriodicAction(slow, 'steps', interval, log_all_data=True)
  called = []

  def call():
    for step in range(1, 9):
      action(float(step), step, {})
      called.append(step)

  thread = threading.Thread(target=call)
  thread.start()
  thread.join(0.2)
  assert called == list(range(1, 6 if interval == 1 else 8))
  slow.may_go.set()
  thread.join(TIMEOUT)
  action.wait_to_finish()
  assert slow.steps == list(range(1, 9))


def test_skipped_time_is_in_no_rate_and_no_interval():
  rates = {}
  action = periodic.PeriodicAction(
    lambda step, scalars: rates.update({step: scalars['steps_per_sec']}),
    'secs',
    10,
    run_async=False,
  )
  action(5.0, 1, {})
  action.skip_time(100.0)  # An evaluation, from 5 to 105.
  action(106.0, 2, {})
  assert not rates
  action(110.0, 5, {})
  assert rates == {5: 0.5}  # Five steps in ten seconds.


def test_of_the_last_steps_no_large_array_is_kept():
  recorder = _Recorder()
  action = periodic.PeriodicAction(
    recorder, 'steps', 4, run_async=False, keep_last=2
  )
  for step in range(1, 9):
    large = jnp.ones([3])
    action(float(step), step, {'loss': jnp.float32(step), 'large': large})
    assert all('large' not in scalars for _, scalars in action._kept)
  assert recorder.calls == [
    (3, {'loss': 3.0}),
    (4, {'loss': 4.0, 'steps_per_sec': 1.0}),
    (7, {'loss': 7.0}),
    (8, {'loss': 8.0, 'steps_per_sec': 1.0}),
  ]
