"""Inputs with random access: shuffling, sharding over hosts, epochs.

All hosts share one global order of the records, epoch after epoch (shuffled by
Grain). With G = batch_size * num_infeed_hosts, global batch n takes positions
[n * G, (n + 1) * G) of this order, and host h reads rows [h * batch_size,
(h + 1) * batch_size) of the batch. The saved position is one integer, the
number of rows read so far. You may change hosts, batch size and workers.

Shapes: b rows, N records of an epoch.
"""

import abc
from collections.abc import Iterator, Mapping
import dataclasses
import functools
import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from typing import Any, ClassVar

from absl import flags
from absl import logging
import jax
import numpy as np

from jaxline.inputs import base

# For fewer records than this limit, Grain's shuffle takes up to a millisecond
# per record, so NumPy shuffles. Changing the limit changes the order of data.
_SMALL = 2**16
_MAX_CLOSE_SECS = 30  # `close` waits this long for workers to end.


@functools.lru_cache(maxsize=64)  # The cache holds at most 32 MB.
def _epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
  """Returns the order of an epoch of a small dataset, int64 [size]."""
  # NumPy guarantees stable raw numbers, but not stable permutations.
  key = np.array([seed % 2**64, epoch], np.uint64)
  draws = np.random.Philox(key=key).random_raw(size)
  return np.argsort(draws, kind='stable')


@dataclasses.dataclass(kw_only=True, eq=False)
class IndexedInput(base.ResumableInput):
  """An input that can read any record by its number.

  Attributes:
    shuffle: Whether to shuffle each epoch differently, by the seed. None means
      to shuffle in training only.
    num_threads: Threads that read batches ahead, for files on slow disks.
    num_workers: Processes that read batches ahead, for work that holds Python's
      GIL. They get the input by cloudpickle and import the program's main file,
      so a script must run its code under `if __name__ == '__main__':`.
  """

  shuffle: bool | None = None
  num_threads: int = 0
  num_workers: int = 0
  # Grain's iterator, which reads ahead until `close`.
  _reader: Any = dataclasses.field(default=None, init=False, repr=False)

  ANY_NUMBER_OF_HOSTS: ClassVar[bool] = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.shuffle is None:
      self.shuffle = self.is_training
    self.check_integer('num_workers', 0)

  # A subclass overrides these methods.

  @abc.abstractmethod
  def num_records(self) -> int:
    """Returns N, the number of records per epoch; called with every batch."""

  @abc.abstractmethod
  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    """Returns records as arrays [b, ...].

    Threads and worker processes call it, so the result may depend only on the
    fields and the arguments: the record numbers, int64 [b] in [0, N), and the
    epochs in which they are read, int64 [b].
    """

  def describe_record(self, record: int, epoch: int) -> str:
    """Returns a record's source for messages: its file and place."""
    del epoch
    return f'record {record}'

  def data_identity(self) -> dict[str, Any]:
    """Returns plain values that identify the data, such as a hash.

    `identity` adds the number of records, the seed, `shuffle` and `repeat`.
    """
    return {}

  def order(self, positions: np.ndarray) -> np.ndarray:
    """Returns the record at each position of the global order, int64 [b].

    `positions`, int64 [b], are counted over all epochs.
    """
    epochs, records = np.divmod(positions, self._size)
    if not self.shuffle:
      return records
    if self._size >= _SMALL:
      return np.array([self._ids[i] for i in positions.tolist()], np.int64)
    for epoch in set(epochs.tolist()):  # Faster than np.unique.
      chosen = epochs == epoch
      order = _epoch_order(self.seed(), epoch, self._size)
      records[chosen] = order[records[chosen]]
    return records

  @functools.cached_property
  def _ids(self) -> Any:
    """The shuffled order; Grain computes it record by record."""
    import grain  # The import takes a second.

    ids = grain.MapDataset.range(self._size)
    return ids.seed(self.seed() % 2**64).shuffle()

  @property
  def _size(self) -> int:
    if (size := self.num_records()) < 1:
      raise ValueError(
        f'{self.name} has no records: the data is too short for one.'
      )
    return size

  def read_from(self, position: int) -> Iterator[tuple[dict[str, Any], int]]:
    rows = self.get_global_batch_size()
    end = sys.maxsize - rows if self.repeat else self._size
    positions = range(position, end, rows)
    # Avoid Grain's iterator: it costs as much as eight rows of 1,000 tokens.
    if not self.num_threads and not self.num_workers:
      for start in positions:
        yield self.batch_at(start), start + rows
      return
    import grain

    options = grain.ReadOptions(
      num_threads=self.num_threads, prefetch_buffer_size=self.num_threads
    )
    starts = grain.MapDataset.range(position, end, rows)
    workers = self.num_workers
    read = self._batch_to_send if workers else self.batch_at
    dataset = starts.map(read).to_iter_dataset(options)
    reader = _start_workers(dataset, workers) if workers else iter(dataset)
    self._reader = reader
    for start, batch in zip(positions, reader, strict=True):
      if workers:  # Copy it out of the memory shared with the worker.
        batch = jax.tree.map(np.array, batch)
      yield batch, start + rows

  def batch_at(self, position: int) -> dict[str, Any]:
    """Returns this host's rows of the global batch that begins at a position.

    Without `repeat`, the last batch may have fewer than `batch_size` rows.
    """
    if (positions := self.positions_at(position)).size:
      return self.read_at(positions)
    # A host without rows still needs the shapes and dtypes.
    return jax.tree.map(lambda x: x[:0], self.read_at(np.zeros(1, np.int64)))

  def positions_at(self, position: int) -> np.ndarray:
    """Returns the positions of the rows that `batch_at` reads, int64 [b]."""
    assert self.infeed_host_index is not None
    first = position + self.infeed_host_index * self.batch_size
    positions = np.arange(first, first + self.batch_size)
    return positions if self.repeat else positions[positions < self._size]

  def _batch_to_send(self, position: int) -> dict[str, Any]:
    """Calls `batch_at`; raises only errors that can be pickled."""
    try:
      return self.batch_at(position)
    except Exception as e:
      try:  # Grain's worker drops other errors; its parent would wait forever.
        pickle.loads(pickle.dumps(e))
      except Exception:
        sent = RuntimeError(f'{type(e).__qualname__}: {e}')
        sent.__notes__ = getattr(e, '__notes__', [])
        raise sent from e.__cause__
      raise

  def read_at(self, positions: np.ndarray) -> dict[str, Any]:
    """Returns the records at ascending positions of the global order."""
    records, epochs = self.order(positions), positions // self._size
    try:
      return self._read_all(records, epochs)
    except Exception as e:
      note = f'While {self.name} read {self._blame(records, epochs)}.'
      if base.is_end(e):  # A record's data ended, and not the epoch.
        raise RuntimeError(f'{e!r}. {note}') from e
      e.add_note(note)
      raise

  def _read_all(
    self, records: np.ndarray, epochs: np.ndarray
  ) -> dict[str, Any]:
    """Reads records, and checks that each gave one row."""
    batch = self.read(records, epochs)
    if (got := base.num_rows(batch)) != len(records):
      raise ValueError(
        f'{self.name} made {got} rows of {len(records)} records; expected one'
        ' row per record.'
      )
    return batch

  def _blame(self, records: np.ndarray, epochs: np.ndarray) -> str:
    """Describes the record that cannot be read, or else the first."""
    for i in range(len(records)):
      try:
        self._read_all(records[i : i + 1], epochs[i : i + 1])
      except Exception:
        return self.describe_record(int(records[i]), int(epochs[i]))
    first = self.describe_record(int(records[0]), int(epochs[0]))
    return f'{len(records)} records that can be read one by one: {first}, ...'

  def identity(self) -> dict[str, Any]:
    return {
      'num_records': self.num_records(),
      'repeat': self.repeat,
      'shuffle': self.shuffle,
      'seed': self.seed(),
      **self.data_identity(),
    }

  def where(self) -> str:
    if not (positions := self.positions_at(self._at)).size:
      return 'the rows that pad the end of the epoch'
    position = int(positions[0])
    epoch, within = divmod(position, self._size)
    return (
      f'a batch that starts at record {within} of epoch {epoch}'
      f' ({self.describe_at(position)})'
    )

  def where_rows(self) -> list[str]:
    return [*map(self.describe_at, self.positions_at(self._at).tolist())]

  def describe_at(self, position: int) -> str:
    """Returns the source of the record at a position of the global order."""
    record = self.order(np.array([position]))[0]
    return self.describe_record(int(record), position // self._size)

  def close(self) -> None:
    super().close()
    reader, self._reader = self._reader, None
    if not hasattr(reader, 'close'):
      return
    # Grain would wait without a limit for its workers to read their batches.
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    closing.join(_MAX_CLOSE_SECS)
    if closing.is_alive():
      logging.warning('A worker of %s is still reading its batch.', self.name)

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, '_iterator': None, '_reader': None}


@dataclasses.dataclass(kw_only=True, eq=False)
class ArrayInput(IndexedInput):
  """The rows of constant arrays [N, ...]; see `inputs.arrays`."""

  values: Mapping[str, Any]  # Arrays by name, maybe nested.

  def __post_init__(self) -> None:
    super().__post_init__()
    is_list = lambda x: isinstance(x, list)
    if isinstance(self.values, Mapping):
      self.values = jax.tree.map(np.asarray, dict(self.values), is_leaf=is_list)
    self._length = base.num_rows(self.values)
    # Hash 1024 rows or a few more; hashing all could take seconds.
    rows = slice(None, None, max(1, self._length // 1024))
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(self.values):
      about = jax.tree_util.keystr(path), str(x.dtype), x.shape
      if x.dtype == object:
        raise TypeError(
          f'The array {about[0]} has Python objects, such as {x.flat[0]!r};'
          ' expected numbers. Encode text as ids, and pad rows to one length.'
        )
      digest.update(repr(about).encode() + x[rows].tobytes())
    self._hash = digest.hexdigest()[:32]

  def num_records(self) -> int:
    return self._length

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    return jax.tree.map(lambda x: x[records], self.values)

  def data_identity(self) -> dict[str, Any]:
    return {'arrays': self._hash}


# Grain 0.2.18 lacks these functions.


def _start_workers(dataset: Any, num_workers: int) -> Any:
  """Returns an iterator that reads a `grain.IterDataset` in processes."""
  import grain

  if not flags.FLAGS.is_parsed():
    # Grain reads a flag. In a notebook this fails: no flags are parsed there.
    flags.FLAGS.mark_as_parsed()
  dataset = dataset.mp_prefetch(
    grain.MultiprocessingOptions(num_workers=num_workers),
    worker_init_fn=_start_worker,
  )
  iterator = iter(dataset)
  iterator.get_state()  # This creates the object that `start_prefetch` starts.
  # Block signals that a terminal or a scheduler sends to all processes of a
  # job. The workers inherit this thread's mask until they run `_start_worker`.
  handled = (x for x in signal.Signals if callable(signal.getsignal(x)))
  blocked = {signal.SIGINT, signal.SIGTERM, *handled}
  before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
  try:
    iterator.start_prefetch()
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
  return iterator


def _start_worker(index: int, count: int) -> None:
  """Makes a worker process exit with its parent, and only then."""
  del index, count
  # Ctrl-C and schedulers signal every process, but the parent still needs
  # batches to finish and save its step.
  for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    signal.signal(number, signal.SIG_IGN)
  # Leave the accelerator to the parent.
  jax.config.update('jax_platforms', 'cpu')
  parent = multiprocessing.parent_process()
  assert parent is not None

  def watch() -> None:
    # A killed parent cannot stop its workers.
    parent.join()
    os._exit(1)

  threading.Thread(target=watch, name='watch_parent', daemon=True).start()


def record_generator(
  seed: int, stage: int, epoch: int, record: int
) -> np.random.Generator:
  """Returns the random generator of a record in an epoch, for use `stage`."""
  bits = np.random.Philox(
    key=np.array([seed % 2**64, 2**63 + stage], np.uint64),
    counter=np.array([0, 0, epoch, record], np.uint64),
  )
  return np.random.Generator(bits)
