"""Tests of jaxline.metrics.periodic."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import metrics
from jaxline.metrics import periodic


def calls_of(times_and_steps, *args, update=None, **kwargs):
  """Returns the calls of an action's function."""
  calls = []
  record = lambda *call: calls.append(call)
  action = periodic.PeriodicAction(record, *args, **kwargs)
  if update:
    action.update_time(*update)
  for t, step in times_and_steps:
    action(t, step, {'step': step})
  action.wait_to_finish()
  return calls


def rates(calls):
  return [scalars['steps_per_sec'] for _, scalars in calls]


def _due_steps(interval_type, interval, steps, **kwargs):
  """Returns the steps that are due, at one step per second."""
  times = [(float(step), step) for step in steps]
  return [x for x, _ in calls_of(times, interval_type, interval, **kwargs)]


TEN = range(1, 11)


def test_interval():
  for interval_type, interval, steps, expected in (
    ('steps', 3, TEN, [3, 6, 9]),
    ('steps', 2.0, TEN, [2, 4, 6, 8, 10]),
    ('steps', 5, map(jnp.asarray, TEN), [5, 10]),
    ('secs', 4, TEN, [4, 8]),
    (None, 4.0, TEN, [4, 8]),
    ('steps', 0, TEN, list(TEN)),
    ('secs', 0, TEN, list(TEN)),
    ('steps', -1, range(11), []),
    ('secs', None, range(11), []),
    ('steps', 5, [0], [0]),
  ):
    found = _due_steps(interval_type, interval, steps)
    assert found == expected, (interval_type, interval)
    assert all(type(step) is int for step in found)
  for interval_type in 'steps', 'secs', None:
    for interval in (1_000_000, None):  # The last step is due.
      due = _due_steps(interval_type, interval, TEN, end_step_to_action=7)
      assert due == [7]
  for interval_type, ratios in (
    ('hours', None),
    ('secs', [1, 2]),
    ('steps', [1, -2]),
  ):
    with pytest.raises(ValueError, match='interval_type'):
      _due_steps(interval_type, 1, (), logging_growth_ratios=ratios)


def test_times_and_rates():
  for interval, times, steps, expected in (
    # Seconds count from when it was last due.
    (10, [5, 9.9, 10, 19, 25, 34.9, 35], [2, 4, 6], [0.2, 2 / 15, 0.2]),
    # A clock that was set back delays by one interval at most.
    (10, [5, -995, -986, -985, -975], [3, 4], [0.2, 0.1]),
    # Within a tick of the clock, and when it is set back, the rate is the last.
    (0, [0, 2, 2, 2, 4, 3], [*range(6)], [0, 0.5, 0.5, 0.5, 1.5, 1.5]),
  ):
    given = [(100.0 + t, i) for i, t in enumerate(times)]
    calls = calls_of(given, 'secs', interval, update=(100.0, 0))
    assert [step for step, _ in calls] == steps
    assert rates(calls) == pytest.approx(expected)


def test_the_rate_is_the_mean_since_the_last_due_step():
  calls = []
  action = periodic.PeriodicAction(
    lambda *call: calls.append(call), 'steps', 10, 100.0, run_async=False
  )
  for t, step in (102.0, 10), (103.0, 15), (107.0, 20):
    action(t, step, {})
  action.update_time(1000.0, 20)
  action(1004.0, 30, {})
  action.skip_time(100.0)  # An evaluation.
  action(1114.0, 40, {})
  assert rates(calls) == [5.0, 2.0, 2.5, 1.0]


def test_growth_ratios_add_to_the_interval():
  big = 10**17
  around = [big - 1, big, big + 1, 3 * big, 3 * big + 1, 0, -1, 3]
  to_1000, upto = {1, 10, 100, 1000}, range(1, 1011)
  for ratios, steps, expected in (
    # round(2.5) is 2; 1.1 * 100 is a little over 110.
    ([2.5, 1.1], upto, to_1000 | {2, 11, 25, 110, 250}),
    # 25 * 10**k and 0.5 * 10**k, for k >= 0.
    ([25, 0.5], upto, to_1000 | {5, 25, 50, 250, 500}),
    ([3], around, {big, 3 * big, 3}),  # Floats would not be exact.
  ):
    for interval in (300, None):
      got = _due_steps('steps', interval, steps, logging_growth_ratios=ratios)
      added = {x for x in steps if interval and x % interval == 0}
      assert set(got) == expected | added


@pytest.mark.parametrize('run_async', [True, False])
def test_scalars_come_to_the_host_as_a_new_dict(run_async):
  calls, threads = [], set()

  def record(*call):
    calls.append(call)
    threads.add(threading.current_thread().name)

  action = periodic.PeriodicAction(record, 'steps', 1, run_async=run_async)
  donated = jnp.ones([])
  donated.delete()
  scalars = {'z': jnp.float32(1.5), 'a': jnp.arange(2), 'nested': {'b': 2}}
  scalars |= {'mean': metrics.Mean.of(jnp.ones([2])), 'donated': donated}
  names = [*scalars]
  action(1.0, 1, scalars)
  action(2.0, 2, None)
  action.wait_to_finish()
  assert threads == {'record' if run_async else threading.main_thread().name}
  assert [*scalars] == names
  [(step, got), last] = calls
  assert step == 1
  # In the experiment's order, which is the order of the log line.
  assert list(got) == [*names, 'steps_per_sec']
  assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(got))
  np.testing.assert_equal(
    [got[x] for x in ('z', 'a', 'nested', 'donated')],
    [1.5, np.arange(2), {'b': 2}, None],
  )
  assert last == (2, {'steps_per_sec': 1.0})
