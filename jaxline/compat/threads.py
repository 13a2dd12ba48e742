"""JAXline's mode `train_eval_multithreaded`: two threads share the devices."""

from collections.abc import Callable
import dataclasses
import threading
from typing import Any

from absl import logging

from jaxline import debug
from jaxline import errors
from jaxline.compat import checkpoints
from jaxline.supervision import preemption

# How long a failed training waits for the evaluation, in seconds.
_GRACE_SECS = 5.0


def train_and_eval(
  run: Any, train: Callable[[Any], Any], evaluate: Callable[[Any], Any]
) -> None:
  """Trains, and evaluates the checkpoints in a second thread meanwhile.

  An exception of either thread ends both.

  Args:
    run: a `train.Run` with an `eval_checkpointer`, which reads what the
      checkpointer of the training writes. One in memory serves both.
    train: trains a `train.Run`.
    evaluate: evaluates its checkpoints.

  Raises:
    ValueError: the run has no `eval_checkpointer`.
  """
  if run.eval_checkpointer is None and run.checkpointer.directory.keeps:
    raise ValueError(
      'eval_checkpointer is None, but the evaluation beside the training needs'
      ' a checkpointer of its own that reads what'
      f' {type(run.checkpointer).__name__} writes.'
    )
  # Now: the evaluation looks for checkpoints at once.
  checkpoints.begin_training(run.checkpointer, run.experiment_class)
  trained = threading.Event()
  failed: list[BaseException] = []

  def raise_failure(*unused: Any) -> None:
    if failed:
      raise failed[0]

  training = dataclasses.replace(
    run,
    eval_writer=None,
    periodic_actions=[*run.periodic_actions, raise_failure],
  )
  evaluation = dataclasses.replace(
    run,
    checkpointer=run.eval_checkpointer,
    watch=preemption.Watch(),  # Signals are for the training.
    trained=trained,
  )

  def follow() -> None:
    try:
      debug.debugger_fallback(evaluate)(evaluation)
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
    train(training)
  except BaseException:
    trained.set()
    thread.join(_GRACE_SECS)
    raise
  trained.set()
  thread.join()
  raise_failure()
