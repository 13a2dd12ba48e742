"""JAXline's mode `train_eval_multithreaded`: two threads share the devices."""

from collections.abc import Callable
import threading
from typing import Any

from absl import logging

from jaxline import errors
from jaxline.base import debug

# How long a failed training waits for the evaluation, in seconds.
_GRACE_SECS = 5.0


def run_both(
  train: Callable[[Callable[..., None]], Any],
  evaluate: Callable[[], Any],
  trained: threading.Event,
) -> None:
  """Evaluates in a second thread; an exception of either thread ends both.

  Args:
    train: trains, and calls a function after each step, which raises the error
      of the evaluation.
    evaluate: evaluates until `trained` is set.
    trained: is set once the training has made its last checkpoint.
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
      # A step may compile for minutes before the training raises the error.
      logging.error(
        'The evaluation failed; the run ends after this step: %.500r', e
      )
      failed.append(e)

  # A daemon: deep in a compilation it must not outlive the training's error.
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
