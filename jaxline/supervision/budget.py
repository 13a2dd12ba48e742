"""Ends a run after `config.max_seconds` of training."""

from collections.abc import Callable
import time
from typing import Any

from jaxline import errors
from jaxline.base import goodput
from jaxline.metrics import periodic

_clock = time.perf_counter


class Budget(periodic.Action):
  """Counts a live state's `trained_secs`, without the time of compilations."""

  def __init__(self, max_seconds: float | None, state: Any):
    self._max, self._state = max_seconds, state
    if max_seconds is not None:
      goodput.listen()
      state.trained_secs = 0.0

  def update_time(self, t: float, step: int) -> None:
    self._now, self._compiled = _clock(), goodput.compiled_secs()

  def skip_time(self, seconds: float) -> None:
    self.update_time(0.0, 0)  # Only an evaluation ran since the last step.

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    then, compiled = self._now, self._compiled
    self.update_time(t, step)
    secs = (self._now - then) - (self._compiled - compiled)
    self._state.trained_secs += max(0.0, secs)

  def check(self, step: int, agreed: Callable[[bool], bool]) -> None:
    """Raises StopTraining if the time is over.

    `agreed` takes whether this process is out of time and returns whether all
    processes stop now.
    """
    if self._max is None:
      return
    secs = float(self._state.trained_secs)
    if agreed(secs >= self._max):
      raise errors.StopTraining(
        f'The run has trained for {secs:.1f} s at step {step}.',
        'raise config.max_seconds, or set it to None',
      )
