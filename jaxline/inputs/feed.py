"""Feeds training and evaluation with global batches on the devices.

`TrainFeed` reads `train_input` ahead of the step and holds the position that
checkpoints store. `EvalFeed` gives every host the same number of batches, all
of one shape. Neither needs a model.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import itertools
import types
from typing import Any, ClassVar

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np

from jaxline import errors
from jaxline.base import keys
from jaxline.inputs import base as inputs
from jaxline.inputs import batches as batches_lib
from jaxline.inputs import infeed
from jaxline.inputs import iterable
from jaxline.parallel import partitioning
from jaxline.parallel import placement

BatchDict = inputs.BatchDict
Batches = Iterator[tuple[BatchDict, int]]  # (batch, number of rows read)
# (batch, number of rows that this process read, function; see `batches`)
GlobalBatches = Iterator[
  tuple[BatchDict, int, Callable[[], Iterator[BatchDict]]]
]


@dataclasses.dataclass(eq=False)
class _Feed:
  """Opens the inputs from an experiment's `train_input` or `eval_input`."""

  is_training: ClassVar[bool]
  method: Callable[..., Any]
  partitioner: partitioning.Partitioner
  config: Any  # It has `skip_batches` and the keys of the infeed.

  @property
  def _ahead(self) -> dict[str, Any]:
    return {
      'buffer_size': self.config.infeed_buffer_size,
      'stall_secs': self.config.infeed_stall_secs,
    }

  def _open_all(self) -> dict[str, inputs.BaseInput]:
    """Returns the inputs by name; a single input has the name ''."""
    shard = inputs.Shard(*self.partitioner.host)
    found = inputs.of_shard(self.method, shard)
    has_sets = isinstance(found, Mapping) and not self.is_training
    what = 'train_input' if self.is_training else 'eval_input'
    sources = {
      name: iterable.as_input(x, is_training=self.is_training, shard=shard)
      for name, x in (found.items() if has_sets else [('', found)])
    }
    if not sources:
      raise ValueError('eval_input returned {}; expected at least one set.')
    expected = self.is_training, shard.index, shard.count
    for source in sources.values():
      hosts = source.infeed_host_index, source.num_infeed_hosts
      if (got := (source.is_training, *hosts)) != expected:
        raise ValueError(
          f'{what} returned {source.name} with (is_training, infeed_host_index,'
          f' num_infeed_hosts) = {got}; expected {expected}. Set is_training'
          f' and pass the argument of {what}(shard) to the input.'
        )
    return sources

  def abstract_batch(self) -> BatchDict:
    """Reads a batch; returns the shapes and shardings of a global batch."""
    sources = self._open_all()
    source = next(iter(sources.values()))
    try:
      batches = source if self.is_training else source.eval_batches()
      batch = next(batches, None)
    finally:
      for x in sources.values():
        x.close()
    if batch is None:
      raise ValueError(f'{source.name} gave no batch.')
    rows, num_hosts = inputs.num_rows(batch), self.partitioner.host[1]
    if self.is_training:
      placement.check_rows(rows * num_hosts, self.partitioner)
    else:
      rows = placement.padded_rows(rows, self.partitioner)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        (rows * num_hosts, *x.shape[1:]),
        jax.dtypes.canonicalize_dtype(x.dtype),
        sharding=self.partitioner.batch_sharding,
      ),
      inputs.pad_rows(batches_lib.as_dict(batch), rows),
    )


class TrainFeed(_Feed):
  """The batches of `train_input`, and the position after the last step's batch.

  Attributes:
    num_read: Number of the last step's batch, from 1. It differs from the
      step's number if this run, or the run it started from, skipped batches.
  """

  is_training = True
  num_read = 0
  _infeed: infeed.Infeed | None = None
  # `_saved` holds the position after the last step's batch until a step uses a
  # batch of the open input. From then on `_mark` holds it, which is cheaper.
  _saved: Any = None
  _mark: Any = None

  @functools.cached_property
  def _skipped(self) -> set[int]:
    ranges = keys.parse_ranges(self.config.skip_batches)
    return {n for first, last in ranges for n in range(first, last + 1)}

  @property
  def position(self) -> Any:
    """The position for a checkpoint; None if the input does not save it."""
    if self._infeed is None or self._mark is None:
      return self._saved
    return self._infeed.source.state_of(self._mark)

  @property
  def next_number(self) -> int:
    """The number of the next step's batch, from 1."""
    number = self.num_read + 1
    while number in self._skipped:
      number += 1
    return number

  @property
  def wait_fraction(self) -> float:
    """The share of the last steps' time that was spent waiting for batches."""
    return self._infeed.wait_fraction if self._infeed else 0.0

  def take(self) -> BatchDict:
    """Returns the next batch. `commit` moves the position past it."""
    if self._infeed is None:
      self._infeed = self._read_ahead(self._open(self._saved))
    if (batch := next(self._infeed, None)) is None:
      # A StopIteration could silently end a loop.
      raise ValueError(
        'train_input ended. Training needs an endless iterator: repeat it.'
      )
    return batch

  def commit(self) -> None:
    """Moves the position past the batch that was taken last."""
    assert self._infeed is not None
    self.num_read, self._saved = self.next_number, None
    self._mark = self._infeed.mark

  def restore(self, num_read: int, position: Any) -> None:
    """Continues at the position of a checkpoint; None means the beginning.

    If the input rejects the position, nothing changes.
    """
    if position is None and num_read:
      logging.warning('The checkpoint has no position: the data starts over.')
    source = self._open(position)
    self.note(num_read, position)
    self._infeed = self._read_ahead(source)

  def note(self, num_read: int, position: Any) -> None:
    """Sets the position for checkpoints without opening the input."""
    self.close()
    self.num_read, self._saved = num_read, position

  def peek(self) -> tuple[inputs.BaseInput, BatchDict, list[str]]:
    """Returns the closed input, this process's next rows, and their sources.

    The position does not move.
    """
    if self.position is None and self.num_read:
      raise errors.UsageError(
        'The next batch is unknown because train_input saves no position. Use'
        ' a BaseInput, or an iterator with get_state and set_state.'
      )
    source = self._open(self.position)
    for _ in range(self.num_read + 1, self.next_number):
      next(source)
    where, batch = source.where_rows(), next(source)
    source.close()
    return source, batch, where

  def close(self) -> None:
    """Ends the thread and closes the input; `take` opens it again."""
    self._saved, self._mark = self.position, None
    if self._infeed is not None:
      self._infeed.close()
      self._infeed = None

  def _open(self, position: Any) -> inputs.BaseInput:
    """Opens the input and sets its position, if there is one."""
    source = self._open_all()['']
    if source.saves_position:
      if position is not None:
        source.set_state(position)
    elif position is not None:
      raise ValueError(
        'The checkpoint holds a position in the data, but train_input returned'
        f' {source.name}, whose position cannot be set. Use the input that the'
        ' run was trained with (a BaseInput with'
        ' input_checkpointing_enabled=True), or start a new run.'
      )
    else:
      logging.warning(
        'The position of %s is not saved: a resumed run will start its data'
        ' from the beginning.',
        source.name,
      )
    return source

  def _read_ahead(self, source: inputs.BaseInput) -> infeed.Infeed:
    # Do not pass `self`: the thread would keep the experiment's arrays alive.
    skipped, numbers = self._skipped, itertools.count(self.num_read + 1)
    return infeed.Infeed(
      source,
      functools.partial(_put, partitioner=self.partitioner),
      kept=(number not in skipped for number in numbers),
      **self._ahead,
    )


class EvalFeed(_Feed):
  """The batches of the evaluation sets.

  The feed keeps an input with `reset_for_eval=False`: each evaluation continues
  where the previous one stopped. `num_evaluated` is the number of the run's
  earlier evaluations, in this process and before a restart.
  """

  is_training = False
  _sources: Mapping[str, inputs.BaseInput] = types.MappingProxyType({})
  # Name of a set -> the number of evaluations that its input has fed.
  _fed: Mapping[str, int] = types.MappingProxyType({})

  def sets(self, num_evaluated: int) -> Iterator[tuple[str, GlobalBatches]]:
    """Yields (name, batches) of each set; a single set has the name ''."""
    old = self._sources.items()
    kept = {name: x for name, x in old if not x.reset_for_eval}
    if not kept or len(kept) < len(old):
      opened = self._open_all()
      for name in kept.keys() & opened.keys():
        opened[name].close()
        opened[name] = kept[name]
      self._sources = opened
    for name, source in self._sources.items():
      yield name, self.batches(name, source, num_evaluated)

  def _host_batches(
    self, name: str, source: inputs.BaseInput, num_evaluated: int
  ) -> Batches:
    if not source.reset_for_eval:
      if self._fed.get(name, 0) != num_evaluated:
        # Read and drop the batches of earlier evaluations, so that a resumed
        # run gets the same batches as an uninterrupted run.
        source.reset()
        for _ in range(num_evaluated):
          collections.deque(source.eval_batches(), maxlen=0)
      self._fed = {**self._fed, name: num_evaluated + 1}
    return _counted(source)

  def batches(
    self, name: str, source: inputs.BaseInput, num_evaluated: int
  ) -> GlobalBatches:
    """Yields the global batches of one evaluation of a set, all of one shape.

    It yields each batch with the number of rows that this process has read,
    without padding, and a function. The function yields two copies of the
    batch. In the first, only the first half of each process's rows has weights;
    in the second, only the rest. All processes must call the function together.
    A process that runs out of batches before the others yields padding.
    """
    # Read ahead, since training waits for the evaluation.
    host_batches = infeed.read_ahead(
      source, self._host_batches(name, source, num_evaluated), **self._ahead
    )
    rows, last = 0, None
    try:
      while True:
        batch, num_given = next(host_batches, (None, 0))
        num_rows = inputs.num_rows(batch) if batch else 0
        sizes = multihost_utils.process_allgather(np.asarray(num_rows)).tolist()
        if last is None and not all(sizes):
          raise ValueError(
            f'eval_input gave no batch{f" for {name!r}" if name else ""}: the'
            f' first batches have {sizes} rows in the processes. Give each'
            ' process at least one row.'
          )
        if not any(sizes):
          break
        rows = rows or max(sizes)
        if max(sizes) > rows:
          raise ValueError(
            f'A batch of {max(sizes)} rows follows a batch of {rows} rows.'
            ' Only the last batch of an evaluation may differ, and be smaller.'
          )
        last = batch or jax.tree.map(lambda x: x[:0], last)
        size = placement.padded_rows(rows, self.partitioner)
        padded = inputs.pad_rows(last, size)
        halves = functools.partial(self._halves, padded, num_rows)
        yield _put(padded, self.partitioner), num_given, halves
    finally:
      host_batches.close()
      source.close()

  def _halves(self, batch: BatchDict, num_rows: int) -> Iterator[BatchDict]:
    middle = num_rows // 2
    for first, end in (0, middle), (middle, num_rows):
      half = inputs.keep_rows(batch, first, end)
      yield _put(half, self.partitioner)

  def rows_of(self, outputs: Any, num_given: int) -> Any:
    """Returns the rows of all processes without padding, as NumPy arrays.

    Rows are ordered by the index of their host. All processes must call this
    method together.

    Args:
      outputs: Tree of arrays [B, ...], sharded like the batch.
      num_given: Number of rows that `batches` yielded for this process.
    """
    index, num_hosts = self.partitioner.host
    size = len(jax.tree.leaves(outputs)[0]) // num_hosts
    places = np.arange(size, dtype=np.int32)
    places = np.where(places < num_given, index * size + places, -1)
    # Shard `places` like the batch, because a mesh may reorder hosts' rows.
    placed = placement.put_batch(places, self.partitioner)
    split = outputs, placed
    whole, places = multihost_utils.process_allgather(split, tiled=True)
    order = np.argsort(places)[np.sum(places < 0) :]
    return jax.tree.map(lambda x: x[order], whole)


def _put(batch: BatchDict, partitioner: partitioning.Partitioner) -> BatchDict:
  """Makes the global batch, of plain dicts, from this process's part."""
  return placement.put_batch(batches_lib.as_dict(batch), partitioner)


def _counted(source: inputs.BaseInput) -> Batches:
  """Yields the batches of an evaluation, each with the number of rows read."""
  for batch in source.eval_batches():
    num_given = source.num_given
    yield batch, inputs.num_rows(batch) if num_given is None else num_given
