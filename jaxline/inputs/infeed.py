"""Reads batches and puts them on the devices ahead of the step, on a thread.

Each batch comes with its position (`BaseInput.copy_position`), because the
source is already further ahead when a step takes the batch.
"""

import collections
from collections.abc import Callable, Generator, Iterable, Iterator
import itertools
import time
from typing import Any

from absl import logging
import jax

from jaxline.base import async_lib
from jaxline.base import goodput
from jaxline.inputs import base

_READY_SECS = 1e-4  # Taking a batch that is ready takes less time.
_WINDOW_STEPS = 100  # The wait is measured over this number of steps.
# Small batches are read in bursts. These are the limits of a burst.
_MAX_HELD = 32
_MAX_HELD_BYTES = 2**24


class Infeed:
  """An iterator of batches that are on the devices before they are needed.

  Attributes:
    mark: Result of `BaseInput.copy_position` after the last batch.
    wait_fraction: Fraction of the time of the last 100 steps that was spent
      waiting. It excludes compilation and the wait for the source to start.
  """

  def __init__(
    self,
    source: base.BaseInput,
    place: Callable[[Any], Any],
    *,
    buffer_size: int = 3,
    stall_secs: float | None = None,
    kept: Iterable[bool] = itertools.repeat(True),
  ):
    """Starts to read at the first `next`.

    `place` puts a batch of NumPy arrays on the devices. `kept` has a value for
    each batch: False drops it.
    """
    goodput.listen()
    self.source = source
    self.mark: Any = None
    self.wait_fraction = 0.0
    self._waited = 0.0
    # For each batch: the time at which it was taken, less the time spent
    # compiling on this thread, and the total time of all waits.
    self._times: Any = collections.deque(maxlen=_WINDOW_STEPS + 1)
    self._batches = read_ahead(
      source,
      _read(source, place, kept),
      who='The step',
      thread_name='infeed',
      buffer_size=buffer_size,
      depth_of=_depth,
      stall_secs=stall_secs,
    )

  def __next__(self) -> Any:
    began = time.perf_counter()
    batch, self.mark = next(self._batches)
    now = time.perf_counter()
    self._waited += now - began
    if now - began > _READY_SECS:
      goodput.add('input wait', now - began)
    self._times.append((now - goodput.compiled_secs(), self._waited))
    (start, waited_before), (end, waited) = self._times[0], self._times[-1]
    if end > start:
      self.wait_fraction = (waited - waited_before) / (end - start)
    return batch

  def close(self) -> None:
    """Stops reading and closes the source."""
    self._batches.close()
    self.source.close()  # The thread may never have started.


def _depth(item: tuple[Any, Any]) -> int:
  """Returns how many batches of this size to hold."""
  num_bytes = sum(x.nbytes for x in jax.tree.leaves(item[0]))
  return min(_MAX_HELD, _MAX_HELD_BYTES // max(1, num_bytes))


def read_ahead(
  source: base.BaseInput,
  batches: Iterator[Any],
  *,
  who: str = 'The evaluation',
  thread_name: str = 'eval_infeed',
  stall_secs: float | None = None,
  **options: Any,
) -> Generator[Any, None, None]:
  """Reads batches of `source` ahead with `async_lib.py_prefetch`.

  It logs a warning when `who` has waited `stall_secs` for a batch.
  """

  def warn() -> None:
    text = '%s has waited %.0f s for a batch: %s.'
    logging.warning(text, who, stall_secs, source.describe())

  return async_lib.py_prefetch(
    lambda: batches,
    thread_name=thread_name,
    stall_secs=stall_secs,
    on_stall=warn,
    **options,
  )


def _read(
  source: base.BaseInput, place: Callable[[Any], Any], kept: Iterable[bool]
) -> Iterator[tuple[Any, Any]]:
  try:
    for batch in itertools.compress(source, kept):
      mark = source.copy_position()
      try:
        placed = place(batch)
      except Exception as e:
        what = source.describe().partition('\n')[0]
        e.add_note(f'The error is in the last batch of {what}.')
        raise
      yield placed, mark
  finally:
    # Close it here too: `Infeed.close` may be called before the source starts.
    source.close()
