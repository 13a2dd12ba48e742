"""Ends a run after `config.max_seconds` of training."""

import time
from typing import Any

import jax

from jaxline import distributed
from jaxline import errors
from jaxline import goodput
from jaxline.metrics import periodic

_clock = time.perf_counter
# Of several processes: steps between two comparisons with the first one's time.
_MAX_STEPS = 100


class Budget(periodic.Action):
  """Counts the seconds of training in the live state of a run.

  Compilation on the thread that trains and evaluations do not count. A resumed
  run goes on from the seconds of its checkpoint.
  """

  def __init__(self, max_seconds: float | None, state: Any):
    """Adds the entry `trained_secs` to the state, unless there is no limit."""
    self._max, self._state = max_seconds, state
    self._first: tuple[int, float] | None = None  # Step and seconds.
    self._next = 0  # The step of the next comparison.
    if max_seconds is not None:
      goodput.listen()
      state.trained_secs = 0.0

  def update_time(self, t: float, step: int) -> None:
    """Begins to count."""
    self._now, self._compiled = _clock(), goodput.compiled_secs()

  def skip_time(self, seconds: float) -> None:
    """Leaves out the evaluation since the last step."""
    self.update_time(0.0, 0)

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    """Counts a step."""
    if self._max is not None:
      now, compiled = self._now, self._compiled
      self.update_time(t, step)
      secs = self._now - now - (self._compiled - compiled)
      self._state.trained_secs += max(0.0, secs)

  def check(self, step: int) -> None:
    """Ends the run if its seconds are over; all processes call it together.

    Raises:
      StopTraining: in all processes at the same step, by the time of the first.
    """
    if self._max is None or step < self._next:
      return
    secs = distributed.of_chief(float(self._state.trained_secs))
    if secs >= self._max:
      raise errors.StopTraining(
        f'It has trained for {secs:.1f} s at step {step}.',
        'raise config.max_seconds, or set it to None',
      )
    self._first = first = self._first or (step, secs)
    self._next = step + 1
    if jax.process_count() > 1:  # A comparison waits for the devices.
      steps, used = step - first[0], secs - first[1]
      left = steps * (self._max - secs) / used if used else 0
      self._next = step + max(1, min(_MAX_STEPS, steps, int(left / 2)))
