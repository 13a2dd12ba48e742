"""Feeds an evaluation: equally many batches of one shape on every host."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from jaxline import partitioning
from jaxline import placement
from jaxline.inputs import base as inputs
from jaxline.inputs import infeed

Batch = dict[str, Any]


class Feed:
  """The evaluation sets of this process, and their global batches.

  An input with `reset_for_eval=False` is kept, and each evaluation continues
  where the one before it stopped.
  """

  def __init__(self, partitioner: partitioning.Partitioner, **read_ahead: Any):
    """Opens nothing yet.

    Args:
      partitioner: puts the batches on the devices.
      **read_ahead: options of `infeed.read_ahead`.
    """
    self._partitioner = partitioner
    self._read_ahead = read_ahead
    # Name of a set -> its input, None if that is reset for each evaluation.
    self._persistent_inputs: dict[str, inputs.BaseInput | None] = {}
    # Name of a set -> the number of evaluations that its input has fed.
    self._evaluations_fed: dict[str, int] = {}

  def open(
    self, make_inputs: Callable[[], dict[str, inputs.BaseInput]]
  ) -> dict[str, inputs.BaseInput]:
    """Returns name -> input of the evaluation sets.

    Args:
      make_inputs: makes them, if not all of them are kept.
    """
    earlier = self._persistent_inputs
    kept = {name: x for name, x in earlier.items() if x is not None}
    if earlier and len(kept) == len(earlier):
      return kept
    sources = make_inputs()
    for name, source in sources.items():
      if not source.reset_for_eval and name in kept:
        source.close()
        sources[name] = kept[name]
    self._persistent_inputs = {
      name: None if source.reset_for_eval else source
      for name, source in sources.items()
    }
    return sources

  def _host_batches(
    self, name: str, source: inputs.BaseInput, num_evaluated: int
  ) -> Iterator[Batch]:
    """Returns this process's batches of one evaluation: see `batches`."""
    if not source.reset_for_eval:
      if self._evaluations_fed.get(name, 0) != num_evaluated:
        # Read and drop the batches of earlier evaluations: a resumed run gets
        # the same batches as a run without an interruption.
        source.reset()
        for _ in range(num_evaluated):
          for _ in source.eval_batches():
            pass
      self._evaluations_fed[name] = num_evaluated + 1
    return source.eval_batches()

  def batches(
    self, name: str, source: inputs.BaseInput, num_evaluated: int
  ) -> Iterator[Batch]:
    """Yields the global batches of one evaluation of a set, all of one shape.

    All processes call it together. A process that runs out of batches before
    the others adds batches of padding. At the end it closes the input.

    Args:
      name: of the set.
      source: its input.
      num_evaluated: the number of earlier evaluations of the run.

    Raises:
      ValueError: a process has no batch at all, or the batches grow.
    """
    partitioner = self._partitioner
    # Training waits for an evaluation, which must not wait for a disk.
    host_batches = infeed.read_ahead(
      source,
      self._host_batches(name, source, num_evaluated),
      **self._read_ahead,
    )
    rows, last = 0, None
    try:
      while True:
        batch = next(host_batches, None)
        sizes = _of_all_hosts(inputs.num_rows(batch) if batch else 0)
        if last is None and not all(sizes):
          raise ValueError(
            f'eval_input gave no batch{f" for {name!r}" if name else ""}: the'
            f' first batches have {sizes} rows in the processes; give each'
            ' process at least one.'
          )
        if not any(sizes):
          break
        rows = rows or max(sizes)
        if max(sizes) > rows:
          raise ValueError(
            f'A batch of {max(sizes)} rows follows one of {rows}; only the last'
            ' of an evaluation may differ, and be smaller.'
          )
        last = batch or jax.tree.map(lambda x: x[:0], last)
        padded = inputs.pad_rows(last, placement.padded_rows(rows, partitioner))
        yield placement.put_batch(padded, partitioner)
    finally:
      host_batches.close()
      source.close()


def _of_all_hosts(value: int) -> list[int]:
  """Returns the value of each process; all must call it together."""
  return multihost_utils.process_allgather(np.asarray(value)).tolist()
