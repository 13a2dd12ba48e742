"""Hooks that the training loop calls, at intervals of steps or seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

from jaxline.base import async_lib
from jaxline.metrics import scalars as scalars_lib
from jaxline.metrics import values as values_lib


class Action:
  """A hook of the training loop; this one does nothing."""

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    """Is called after each step with its scalars, still on the devices."""

  def share(self, executor: async_lib.SerialExecutor) -> None:
    """Takes the log's thread, on which asynchronous calls keep their order."""

  def update_time(self, t: float, step: int) -> None:
    """Is called before the first step."""

  def skip_time(self, seconds: float) -> None:
    """Is called with the length of a pause in which no step could run."""

  def flush_async(self) -> Callable[[], dict[str, int]]:
    """Returns a function that waits until all records so far are passed on."""
    return dict

  def wait_to_finish(self) -> None:
    """Is called after the last step; waits for background work."""


class PeriodicAction(Action):
  """Calls a function at an interval of steps or seconds, on a thread.

  A call that is not due costs well under a microsecond. If the function raised
  an error, the next call, due or not, and `wait_to_finish` raise it.
  """

  def __init__(
    self,
    fn: Callable[[int, Any], Any],
    interval_type: str | None,
    interval: float | None,
    start_time: float = 0.0,
    start_step: int = 0,
    run_async: bool = True,
    log_all_data: bool = False,
    logging_growth_ratios: Sequence[float] | None = None,
    end_step_to_action: int | None = None,
  ):
    """Sets when the function is due.

    Args:
      fn: Called as `fn(step, scalars)` with a new dict of the step's scalars,
        on the host. On a due step they include `steps_per_sec`, the mean rate
        since the last due step (the old rate if the clock did not advance).
      interval_type: 'steps' (due at multiples of the interval) or 'secs' (due
        when the interval has passed since it was last due); None means 'secs'.
      interval: Steps or seconds; 0 means always, None or negative means never.
      start_time: Start of the first interval, in seconds.
      start_step: The step at that time.
      run_async: Whether to call `fn` on a separate thread; see `share`.
      log_all_data: Whether to call `fn` after every step, if any can be due.
      logging_growth_ratios: Each ratio r adds the due steps round(r * 10**k),
        k >= 0. If you give any ratios, 1 is added. Needs 'steps'.
      end_step_to_action: An additional due step: the last one.
    """
    ratios = tuple(logging_growth_ratios or ())
    if interval_type not in ('secs', 'steps', None) or (
      ratios and (interval_type != 'steps' or min(ratios) <= 0)
    ):
      raise ValueError(
        f'Got interval_type={interval_type!r}, logging_growth_ratios={ratios};'
        " expected 'steps' with positive ratios, or 'secs' without ratios."
      )
    self._fn = fn
    self._by_steps = interval_type == 'steps'
    is_off = interval is None or interval < 0
    self._interval = None if is_off else interval
    self._end_step = end_step_to_action
    # Reach steps of 20 digits, even with a ratio of 1e-9.
    factors = (1, *ratios) if ratios else ()
    growth = {round(factor * 10**k) for factor in factors for k in range(30)}
    self._due_steps = growth - {0}
    if end_step_to_action is not None:  # It may be an array.
      self._due_steps.add(int(end_step_to_action))
    self._takes_all = log_all_data and bool(self._due_steps or not is_off)
    # It is not due at the steps of this range, within these seconds after
    # `_prev_time`. To test this takes a fraction of the time of `_is_due`.
    self._quiet_steps: tuple[int, float] = 0, 0
    self._quiet_secs = (not self._by_steps and self._interval) or math.inf
    self._steps_per_sec = 0.0
    self.update_time(start_time, start_step)
    self._executor: async_lib.SerialExecutor | None = None
    if run_async:
      self._executor = async_lib.SerialExecutor(async_lib.function_name(fn))

  def update_time(self, t: float, step: int) -> None:
    """Restarts the interval and the measurement of the rate."""
    self._prev_time, self._prev_step = t, step

  def skip_time(self, seconds: float) -> None:
    """Excludes a pause, in which no step could run, from interval and rate."""
    self._prev_time += seconds

  def __call__(
    self, t: float, step: int, scalar_outputs: Mapping[str, Any] | None
  ) -> None:
    """Calls the function if it is due, or raises the error of an earlier call.

    `t` is in seconds. The scalars, on the devices or the host, are copied.
    """
    if self._executor is not None and self._executor.error is not None:
      self._executor.raise_error()
    step = int(step)  # A restored step can be an array.
    first, end = self._quiet_steps
    if first <= step < end and 0 <= t - self._prev_time < self._quiet_secs:
      return
    is_due = self._is_due(t, step)
    if is_due or self._takes_all:
      scalars = scalars_lib.copied(scalar_outputs)
      if is_due:
        seconds = t - self._prev_time
        if seconds > 0:
          self._steps_per_sec = (step - self._prev_step) / seconds
        if seconds != 0:  # If 0, the next measurement covers these steps too.
          self.update_time(t, step)
        scalars['steps_per_sec'] = self._steps_per_sec
      self._act(step, scalars, is_due)
    else:
      later = [x for x in self._due_steps if x > step]
      if self._by_steps and self._interval:
        later.append(step + self._interval - step % self._interval)
      self._quiet_steps = step, min(later, default=math.inf)

  def _is_due(self, t: float, step: int) -> bool:
    if self._interval is None or step in self._due_steps:
      return step in self._due_steps
    if self._by_steps:
      return step % (self._interval or 1) == 0
    elapsed = t - self._prev_time
    if elapsed < 0 < self._interval:
      # The clock was set back; waiting for it to catch up could take hours.
      self.update_time(t, step)
    return not self._interval or elapsed >= self._interval

  def share(self, executor: async_lib.SerialExecutor) -> None:
    """Makes asynchronous calls on the thread of `executor`."""
    if self._executor is not None:
      self._executor = executor

  def wait_to_finish(self) -> None:
    """Waits for the calls so far; raises their error, if any."""
    if self._executor is not None:
      self._executor.wait()

  def _act(self, step: int, scalars: Any, is_due: bool) -> None:
    call = lambda: self._fn(step, self._convert(scalars))
    if self._executor is None:
      call()
    else:
      self._executor.wait_for_room()
      self._executor.put(call)

  def _convert(self, scalars: Any) -> Any:
    return values_lib.fetch(scalars)


class Every(PeriodicAction):
  """Calls a function on the training thread, with scalars on the devices."""

  def __init__(self, fn: Any, interval_type: Any, interval: Any, **kwargs: Any):
    super().__init__(fn, interval_type, interval, run_async=False, **kwargs)

  def _convert(self, scalars: Any) -> Any:
    return scalars
