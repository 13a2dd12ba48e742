"""Actions that run every so many steps or seconds: log, write, save."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
import functools
import math
from typing import Any

import jax

from jaxline import async_lib
from jaxline.metrics import values as values_lib

# Records of log_all_data that wait for the action to be due.
_MAX_KEPT = 512
# Records that wait for a slow function or disk before the loop waits as well.
_MAX_PENDING = 8192

# A step and its scalars.
_Record = tuple[int, dict[str, Any]]


class Action:
  """What the training loop asks of a periodic action; this one does nothing."""

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    """Is called after each step with its scalars, still on the devices."""

  def share(self, executor: async_lib.SerialExecutor | None) -> None:
    """Is given the log's thread, where asynchronous calls keep their order."""

  def update_time(self, t: float, step: int) -> None:
    """Is called before the first step."""

  def skip_time(self, seconds: float) -> None:
    """Is told of time in which no step could run."""

  def flush_async(self) -> Callable[[], dict[str, int]]:
    """Returns a function that waits until all records so far are passed on."""
    return lambda: {}

  def wait_to_finish(self) -> None:
    """Is called after the last step; waits for its background work."""


class PeriodicAction(Action):
  """Calls a function with a step's scalars, periodically.

  The call `action(time, step, scalars)`, made after every step, costs well
  under a microsecond where nothing is due. Where something is, the scalars are
  fetched to the host and handed to the function as a new dict with
  `steps_per_sec` added, the mean rate since the last time. That rate is the
  one before where the clock did not advance (0 at first), so that no curve
  gets an infinity or a NaN.
  """

  def __init__(
    self,
    fn: Callable[[int, dict[str, Any]], Any],
    interval_type: str | None,
    interval: float | None,
    start_time: float = 0.0,
    start_step: int = 0,
    run_async: bool = True,
    log_all_data: bool = False,
    logging_growth_ratios: Sequence[float] | None = None,
    end_step_to_action: int | None = None,
    *,
    executor: async_lib.SerialExecutor | None = None,
    keep_last: int | None = None,
  ):
    """Sets when the function runs, and where.

    Args:
      fn: called as `fn(step, scalars)`, scalars on the host.
      interval_type: 'steps' (due where step is a multiple of the interval) or
        'secs' (due where the interval has passed since it was last due); None
        means 'secs'.
      interval: steps or seconds; 0 is always due, None or a negative number
        never.
      start_time: when the first interval begins, in seconds.
      start_step: the step at that time.
      run_async: whether to fetch and call on a background thread. An error is
        then raised by the next call, due or not, and by `wait_to_finish`.
      log_all_data: whether to hand on every step's scalars, in order, and not
        only those of the steps that are due. They are handed on when due, or
        when 512 have come together. `steps_per_sec` is with the due ones.
      logging_growth_ratios: ratios r for which the steps round(r * 10**k), for
        any k >= 0, are also due; so are the powers of ten. Needs 'steps'.
      end_step_to_action: a step that is also due; the last one.
      executor: of the background thread; None makes one.
      keep_last: as `log_all_data`, but of at most so many steps, those before
        them are never fetched; and without larger arrays, which would fill the
        memory of the devices.

    Raises:
      ValueError: for an unknown interval_type, for growth ratios that are not
        positive or come without 'steps'.
    """
    ratios = tuple(logging_growth_ratios or ())
    if interval_type not in ('secs', 'steps', None):
      raise ValueError(
        f"Got interval_type={interval_type!r}, expected 'secs' or 'steps' (or "
        "None, which means 'secs')."
      )
    if ratios and (interval_type != 'steps' or min(ratios) <= 0):
      raise ValueError(
        f'Got logging_growth_ratios={ratios} with interval_type='
        f"{interval_type!r}; growth ratios need 'steps', and are positive."
      )
    self._fn = fn
    self._by_steps = interval_type == 'steps'
    off = interval is None or interval < 0
    self._every = None if off else interval or 1  # Every step is what 0 means.
    self._seconds = math.inf if off else interval or -math.inf
    self._end_step = end_step_to_action
    self._growth_ratios = ratios
    if run_async and executor is None:
      executor = async_lib.SerialExecutor(async_lib.function_name(fn))
    self._executor = executor if run_async else None
    can_be_due = not off or ratios or end_step_to_action is not None
    self._keeps = bool(can_be_due and (log_all_data or keep_last is not None))
    self._keep_last = keep_last
    self._large: list[str] = []
    self._kept: collections.deque[_Record] = collections.deque(maxlen=keep_last)
    # Each of the two is written by one thread only, so no lock is needed.
    self._num_queued = 0
    self._num_done = 0
    self._steps_per_sec = 0.0
    self.update_time(start_time, start_step)

  def share(self, executor: async_lib.SerialExecutor | None) -> None:
    """Makes asynchronous calls on another thread, if there is one."""
    if self._executor is not None and executor is not None:
      self._executor = executor

  def update_time(self, t: float, step: int) -> None:
    """Starts the interval, and the measurement of the rate, anew."""
    self._prev_time = t
    self._prev_step = step

  def skip_time(self, seconds: float) -> None:
    """Leaves seconds in which no step could run out of interval and rate."""
    self._prev_time += seconds

  def flush_async(self) -> Callable[[], dict[str, int]]:
    """Hands on the records that wait for the action to be due (log_all_data).

    Call it on the thread that calls the action. The background thread does the
    work, so it costs no waiting; a synchronous action does it here.

    Returns:
      A function that any thread may call, meanwhile and once or more: it waits
      until the function has had every record handed on so far, and raises the
      error because of which it has not. It returns {}, as a writer without log
      files does.

    Raises:
      BaseException: the error of an earlier asynchronous call.
    """
    self._hand_on()
    if self._executor is None:
      return lambda: {}
    self._executor.raise_error()
    return self._executor.wait_async(dict)

  def wait_to_finish(self) -> None:
    """Hands on what is left, waits for it, and raises its error if any."""
    self._hand_on()
    if self._executor is not None:
      self._executor.wait()

  def __call__(
    self, t: float, step: int, scalar_outputs: Mapping[str, Any] | None
  ) -> None:
    """Runs the function if it is due.

    Args:
      t: the time in seconds.
      step: the step that `scalar_outputs` are of.
      scalar_outputs: the step's scalars, on the devices or the host. They are
        not changed, and may be changed by the caller afterwards.

    Raises:
      BaseException: the error of an earlier asynchronous call.
    """
    executor = self._executor
    if executor is not None and executor.error is not None:
      executor.raise_error()
    step = int(step)  # A restored step can be an array.
    is_due = self._is_due(t, step)
    if not (is_due or self._keeps):
      return
    scalars = dict(scalar_outputs or {})
    if self._keep_last is not None:
      if not self._kept:  # Not for each step, which would take a microsecond.
        sizes = ((name, getattr(x, 'size', 1)) for name, x in scalars.items())
        self._large = [name for name, size in sizes if size != 1]
      for name in self._large:
        scalars.pop(name, None)
    self._kept.append((step, scalars))
    if is_due:
      self._hand_on(self._measure_rate(t, step))
    elif len(self._kept) >= _MAX_KEPT and self._keep_last is None:
      self._hand_on()

  def _is_due(self, t: float, step: int) -> bool:
    if step == self._end_step:
      return True
    if self._by_steps:
      if self._every is not None and step % self._every == 0:
        return True
      ratios = self._growth_ratios
      return bool(ratios) and step in _growth_steps(len(str(step)), ratios)
    elapsed = t - self._prev_time
    if elapsed < 0 and elapsed < self._seconds:
      # The clock was set back; waiting for it to catch up could take hours.
      self.update_time(t, step)
    return elapsed >= self._seconds

  def _measure_rate(self, t: float, step: int) -> float:
    """Returns the steps per second since the last time this was called."""
    seconds = t - self._prev_time
    if seconds > 0:
      self._steps_per_sec = (step - self._prev_step) / seconds
    if seconds != 0:  # Else the next measurement covers these steps too.
      self.update_time(t, step)
    return self._steps_per_sec

  def _hand_on(self, steps_per_sec: float | None = None) -> None:
    """Gives the kept records to the function, here or on its thread."""
    records = list(self._kept)
    self._kept.clear()
    if not records:
      return
    if self._executor is None:
      self._apply(records, steps_per_sec)
      return
    pending = self._num_queued - self._num_done
    if pending and pending + len(records) > _MAX_PENDING:
      self._executor.wait()
    self._num_queued += len(records)
    self._executor.put(functools.partial(self._apply, records, steps_per_sec))

  def _apply(self, records: list[_Record], steps_per_sec: float | None) -> None:
    """Fetches the records' scalars and calls the function on each."""
    if jax.default_backend() != 'cpu':  # There, all are on the host.
      for x in jax.tree.leaves([list(s.values()) for _, s in records]):
        if isinstance(x, jax.Array) and not x.is_deleted():
          x.copy_to_host_async()
    last_step = records[-1][0]
    for step, scalars in records:
      host_scalars = {name: values_lib.fetch(x) for name, x in scalars.items()}
      if steps_per_sec is not None and step == last_step:
        host_scalars['steps_per_sec'] = steps_per_sec
      self._fn(step, host_scalars)
      self._num_done += 1


@functools.lru_cache
def _growth_steps(num_digits: int, ratios: tuple[float, ...]) -> frozenset[int]:
  """Returns the growth steps that have up to so many digits, and more."""
  # A ratio may be as small as 1e-9.
  powers = [10**k for k in range(num_digits + 10)]
  steps = {round(ratio * power) for ratio in (1, *ratios) for power in powers}
  return frozenset(steps - {0})
