"""Tests of jaxline.metrics.periodic."""

import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import async_lib
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


TEN = range(1, 11)


@pytest.mark.parametrize(
  ('interval_type', 'interval', 'steps', 'expected'),
  [
    ('steps', 3, TEN, [3, 6, 9]),
    ('steps', 2.0, TEN, [2, 4, 6, 8, 10]),
    ('secs', 4, TEN, [4, 8]),
    (None, 4.0, TEN, [4, 8]),
    ('steps', 0, TEN, list(TEN)),
    ('secs', 0, TEN, list(TEN)),
    ('steps', None, range(11), []),
    ('secs', None, range(11), []),
    ('steps', -1, range(11), []),
    ('secs', -1, range(11), []),
    ('steps', 5, [0], [0]),
  ],
)
def test_interval(interval_type, interval, steps, expected):
  assert _due_steps(interval_type, interval, steps) == expected


@pytest.mark.parametrize('interval_type', ['steps', 'secs', None])
def test_the_end_step_is_due(interval_type):
  for interval in (1_000_000, None):
    due = _due_steps(interval_type, interval, TEN, end_step_to_action=7)
    assert due == [7]


@pytest.mark.parametrize(
  ('interval', 'times', 'steps', 'rates'),
  [
    # Seconds count from when it was last due.
    (10, [5, 9.9, 10, 19, 25, 34.9, 35], [2, 4, 6], [0.2, 2 / 15, 0.2]),
    # A clock that was set back delays by one interval at most.
    (10, [5, -995, -986, -985, -975], [3, 4], [0.2, 0.1]),
    # Within a tick of the clock, and when it is set back, the rate is the last.
    (0, [0, 2, 2, 2, 4, 3], [*range(6)], [0, 0.5, 0.5, 0.5, 1.5, 1.5]),
  ],
)
def test_times_and_rates(interval, times, steps, rates):
  recorder = _Recorder()
  action = periodic.PeriodicAction(recorder, 'secs', interval)
  action.update_time(100.0, 0)
  _run(action, [(100.0 + t, i) for i, t in enumerate(times)])
  assert recorder.steps == steps
  assert recorder.rates == pytest.approx(rates)


def test_the_rate_is_the_mean_since_the_last_due_step():
  recorder = _Recorder()
  action = periodic.PeriodicAction(
    recorder, 'steps', 10, start_time=100.0, start_step=0
  )
  _run(action, [(102.0, 10), (103.0, 15), (107.0, 20)])
  action.update_time(1000.0, 20)
  _run(action, [(1004.0, 30)])
  action.skip_time(100.0)  # An evaluation.
  _run(action, [(1114.0, 40)])
  assert recorder.rates == [5.0, 2.0, 2.5, 1.0]


@pytest.mark.parametrize(
  ('ratios', 'expected'),
  [
    ([1, 2, 5, 10], [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]),
    ([2], [1, 2, 10, 20, 100, 200, 1000]),
    # round(2.5) is 2; 1.1 * 100 is a little over 110.
    ([2.5, 1.1], [1, 2, 10, 11, 25, 100, 110, 250, 1000]),
    # 25 * 10**k and 0.5 * 10**k, for k >= 0.
    ([25, 0.5], [1, 5, 10, 25, 50, 100, 250, 500, 1000]),
  ],
)
def test_growth_ratios_add_to_the_interval(ratios, expected):
  with jax.transfer_guard('disallow'):  # No device code.
    for interval in (300, None):
      steps = _due_steps(
        'steps', interval, range(1, 1011), logging_growth_ratios=ratios
      )
      added = {300, 600, 900} if interval else set()
      assert steps == sorted({*expected, *added})


def test_growth_steps_are_exact_where_floats_are_not():
  big = 10**17
  steps = [big - 1, big, big + 1, 3 * big, 3 * big + 1, 0, -1, 3]
  assert _due_steps(
    'steps', None, steps, logging_growth_ratios=[3]
  ) == [big, 3 * big, 3]  # fmt: skip


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


@pytest.mark.parametrize(
  ('interval_type', 'ratios'),
  [('hours', None), ('secs', [1, 2]), (None, [1, 2]), ('steps', [1, -2])],
)
def test_wrong_arguments_are_refused(interval_type, ratios):
  with pytest.raises(ValueError, match='interval_type'):
    periodic.PeriodicAction(
      print, interval_type, 1, logging_growth_ratios=ratios
    )


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
  action(2.0, 2, None)
  action.wait_to_finish()
  assert recorder.calls[1] == (2, {'steps_per_sec': 1.0})


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


# --- flushes -----------------------------------------------------------------


def test_flush_async_waits_for_what_came_before_and_for_nothing_later():
  recorder, may_go = _Recorder(), threading.Event()

  def fn(step, scalars):
    assert step < 10 or may_go.wait(TIMEOUT)
    recorder(step, scalars)

  action = periodic.PeriodicAction(fn, 'steps', 10, log_all_data=True)
  for step in range(1, 4):
    action(float(step), step, {'x': 10 * step})
  wait = action.flush_async()
  action(10.0, 10, {})
  wait()
  # Handing on is not being due: the rate is that of the ten steps.
  assert recorder.calls == [(n, {'x': 10 * n}) for n in (1, 2, 3)]
  may_go.set()
  action.wait_to_finish()
  assert recorder.calls[3:] == [(10, {'steps_per_sec': 1.0})]


# --- asynchronous ------------------------------------------------------------


class _Slow(_Recorder):
  """A function that waits at each call until it may go."""

  def __init__(self):
    super().__init__()
    self.started = threading.Semaphore(0)
    self.may_go = threading.Event()

  def __call__(self, step, scalars):
    self.started.release()
    assert self.may_go.wait(TIMEOUT)
    super().__call__(step, scalars)


def test_an_error_is_raised_by_every_later_use_and_by_no_earlier_flush():
  def fail(step, scalars):
    if step == 3:
      raise ValueError('disk full')

  action = periodic.PeriodicAction(fail, 'steps', 10, log_all_data=True)
  action(1.0, 1, {})
  wait_for_1 = action.flush_async()
  action(3.0, 3, {})
  wait_for_3 = action.flush_async()
  for use in (
    *(wait_for_3, wait_for_3, action.flush_async, action.wait_to_finish),
    *(lambda: action(11.0, 11, {}), lambda: action(20.0, 20, {})),
  ):
    with pytest.raises(ValueError, match='disk full') as info:
      use()
    frames = traceback.extract_tb(info.value.__traceback__)
    assert frames[-1].name == 'fail'
  assert wait_for_1() == {}


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


def test_a_function_slower_than_its_interval_blocks_and_loses_nothing(
  monkeypatch,
):
  monkeypatch.setattr(async_lib, 'MAX_QUEUED', 5)
  slow = _Slow()
  action = periodic.PeriodicAction(slow, 'steps', 4, log_all_data=True)
  action(1.0, 1, {})
  assert slow.started.acquire(timeout=TIMEOUT)
  called, scalars = [], {}

  def call():
    for step in range(2, 9):
      scalars['x'] = step  # What waits keeps its own value.
      action(float(step), step, scalars)
      called.append(step)

  thread = threading.Thread(target=call)
  thread.start()
  thread.join(0.2)
  assert called == [2, 3, 4, 5, 6]
  slow.may_go.set()
  thread.join(TIMEOUT)
  action.wait_to_finish()
  assert slow.steps == list(range(1, 9))
  assert [scalars['x'] for _, scalars in slow.calls[1:]] == [*range(2, 9)]


@pytest.mark.parametrize('takes_all', [False, True])
def test_a_plain_hook_fetches_nothing(takes_all, fetches):
  recorder, loss = _Recorder(), jnp.float32(2)
  hook = periodic.Every(recorder, 'steps', 2, log_all_data=takes_all)
  for step in range(1, 5):
    hook(2.0 * step, step, {'loss': loss})
  due = [(n, {'loss': loss, 'steps_per_sec': 0.5}) for n in (2, 4)]
  others = [(n, {'loss': loss}) for n in (1, 3) if takes_all]
  assert not fetches
  assert recorder.calls == sorted([*due, *others], key=lambda call: call[0])
