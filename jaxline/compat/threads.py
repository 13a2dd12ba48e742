"""Implements `train_eval_multithreaded`: two threads share the devices."""

from collections.abc import Callable
import threading
from typing import Any

from absl import logging

from jaxline import errors
from jaxline.base import debug

# A failed training waits for the evaluation for this many seconds.
_GRACE_SECS = 5.0


def run_both(
  train: Callable[[Callable[..., None]], Any],
  evaluate: Callable[[], Any],
  trained: threading.Event,
) -> None:
  """Trains, and evaluates in a second thread; an error in one ends both.

  Args:
    train: trains; calls its argument, which may raise, after each step.
    evaluate: evaluates until `trained` is set.
    trained: set after training has saved its last checkpoint.
  """
  failed: list[BaseException] = []

  def raise_failure(*unused: Any) -> None:
    if failed:
      raise failed[0]

  def follow() -> None:
    try:
      debug.debugger_fallback(evaluate)()
    except BaseException as e:
      if not isinstance(e, errors.UsageError):
        e.add_note('[jaxline] raised in the eval thread.')
      # Log it now: a step may compile for minutes before training raises it.
      logging.error(
        'The evaluation failed; the run ends after this step: %.500r', e
      )
      failed.append(e)

  # Use a daemon, so that a long compilation cannot delay the end on an error.
  thread = threading.Thread(target=follow, name='eval', daemon=True)
  thread.start()
  try:
    train(raise_failure)
  except BaseException:
    trained.set()
    thread.join(_GRACE_SECS)
    raise
  trained.set()
  thread.join()
  raise_failure()
