"""Random-access datasets: shuffling, sharding over hosts, epochs.

There is one global order of the records, epoch after epoch (Grain's shuffle).
With G = batch_size * num_infeed_hosts, global batch n is the positions [n * G,
(n + 1) * G) of this order, and host h reads the rows [h * batch_size, (h + 1) *
batch_size) of it. A position is one integer, the rows of the global order that
were given: it fits any number of hosts, any batch size and any workers.

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

# Below this many records, Grain's shuffle takes up to a millisecond per record:
# the order of an epoch is held in memory instead. Another limit would be
# another order.
_SMALL = 2**16
_MAX_CLOSE_SECS = 30  # How long to wait for workers to end.


@functools.lru_cache(maxsize=64)  # At most 32 MB.
def _epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
  """Returns the order of an epoch of a small dataset, int64 [size]."""
  # NumPy promises never to change raw numbers, unlike its permutations.
  key = np.array([seed % 2**64, epoch], np.uint64)
  draws = np.random.Philox(key=key).random_raw(size)
  return np.argsort(draws, kind='stable')


@dataclasses.dataclass(kw_only=True, eq=False)
class IndexedInput(base.ResumableInput):
  """An input that can read any record by its number.

  Attributes:
    shuffle: whether each epoch has an order of its own, drawn from the seed;
      None shuffles in training only.
    num_threads: threads that read batches ahead, for files on slow disks.
    num_workers: processes that do, for work that holds Python's lock. The input
      is sent to them with cloudpickle. They import the program's main file: a
      script begins its work under `if __name__ == '__main__':`.
  """

  shuffle: bool | None = None
  num_threads: int = 0
  num_workers: int = 0
  # What reads ahead, which `close` ends.
  _reader: Any = dataclasses.field(default=None, init=False, repr=False)

  ANY_NUMBER_OF_HOSTS: ClassVar[bool] = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.shuffle is None:
      self.shuffle = self.is_training
    self.check_integer('num_workers', 0)

  # What a subclass overrides.

  @abc.abstractmethod
  def num_records(self) -> int:
    """Returns N, the records of an epoch; asked for with every batch."""

  @abc.abstractmethod
  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    """Returns some records: arrays [b, ...].

    It is called in threads and worker processes, and must depend on nothing but
    its arguments and the fields: the numbers of the records, int64 [b], each in
    [0, N), and the epochs in which they are read, int64 [b].
    """

  def describe_record(self, record: int, epoch: int) -> str:
    """Returns where a record comes from, for messages: its file and place."""
    del epoch
    return f'record {record}'

  def data_identity(self) -> dict[str, Any]:
    """Returns plain values that identify the data, such as a hash of it.

    `identity` adds the number of records, the seed, `shuffle` and `repeat`.
    """
    return {}

  def order(self, positions: np.ndarray) -> np.ndarray:
    """Returns the record at each position of the global order, int64 [b].

    Positions are counted over all epochs, int64 [b].
    """
    epochs, records = np.divmod(positions, self._size)
    if not self.shuffle:
      return records
    if self._size >= _SMALL:
      return np.array([self._ids[i] for i in positions.tolist()], np.int64)
    for epoch in np.unique(epochs).tolist():
      chosen = epochs == epoch
      order = _epoch_order(self.seed(), epoch, self._size)
      records[chosen] = order[records[chosen]]
    return records

  @functools.cached_property
  def _ids(self) -> Any:
    """The shuffled order; Grain computes it record by record."""
    import grain  # Takes a second to import.

    ids = grain.MapDataset.range(self._size)
    return ids.seed(self.seed() % 2**64).shuffle()

  @property
  def _size(self) -> int:
    if (size := self.num_records()) < 1:
      raise ValueError(
        f'{self.name} has no records: its data is shorter than one.'
      )
    return size

  # The contract of `BaseInput`.

  def read_from(self, position: int) -> Iterator[tuple[dict[str, Any], int]]:
    rows = self.get_global_batch_size()
    end = sys.maxsize - rows if self.repeat else self._size
    positions = range(position, end, rows)
    # Grain's iterator costs as much as eight rows of a thousand tokens.
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
      if workers:  # A copy, outside of the memory that is shared with one.
        batch = jax.tree.map(np.array, batch)
      yield batch, start + rows

  def batch_at(self, position: int) -> dict[str, Any]:
    """Returns this host's rows of the global batch that begins at a position.

    Without `repeat` the end of the epoch may leave less than `batch_size`.
    """
    if (positions := self.positions_at(position)).size:
      return self.read_at(positions)
    # A host without rows still needs their shapes and types.
    return jax.tree.map(lambda x: x[:0], self.read_at(np.zeros(1, np.int64)))

  def positions_at(self, position: int) -> np.ndarray:
    """Returns the positions of the rows of `batch_at`, int64 [b]."""
    assert self.infeed_host_index is not None
    first = position + self.infeed_host_index * self.batch_size
    positions = np.arange(first, first + self.batch_size)
    return positions if self.repeat else positions[positions < self._size]

  def _batch_to_send(self, position: int) -> dict[str, Any]:
    """Returns `batch_at`, or raises an error that can be pickled."""
    try:
      return self.batch_at(position)
    except Exception as e:
      try:  # Grain's worker drops others, and its parent would wait for ever.
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
      if base.is_end(e):  # Of a record's own data: the epoch goes on.
        raise RuntimeError(f'{e!r}. {note}') from e
      e.add_note(note)
      raise

  def _read_all(
    self, records: np.ndarray, epochs: np.ndarray
  ) -> dict[str, Any]:
    """Reads records, and refuses a batch that lost some or has some twice."""
    batch = self.read(records, epochs)
    if (got := base.num_rows(batch)) != len(records):
      raise ValueError(
        f'{self.name} made {got} rows of {len(records)} records; expected a row'
        ' of each.'
      )
    return batch

  def _blame(self, records: np.ndarray, epochs: np.ndarray) -> str:
    """Returns which of some records cannot be read, or else the first."""
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
      return 'the rows that fill up the end of the epoch'
    position = int(positions[0])
    epoch, within = divmod(position, self._size)
    return (
      f'a batch from record {within} of epoch {epoch} on'
      f' ({self.describe_at(position)})'
    )

  def where_rows(self) -> list[str]:
    return [*map(self.describe_at, self.positions_at(self._at).tolist())]

  def describe_at(self, position: int) -> str:
    """Returns where the record at a position of the global order is from."""
    record = self.order(np.array([position]))[0]
    return self.describe_record(int(record), position // self._size)

  def close(self) -> None:
    super().close()
    reader, self._reader = self._reader, None
    if not hasattr(reader, 'close'):
      return
    # Grain waits until its workers have read their batches, for any time.
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    closing.join(_MAX_CLOSE_SECS)
    if closing.is_alive():
      logging.warning('A worker of %s reads on until the end.', self.name)

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, '_iterator': None, '_reader': None}


@dataclasses.dataclass(kw_only=True, eq=False)
class ArrayInput(IndexedInput):
  """The rows of arrays [N, ...] that do not change: see `inputs.arrays`."""

  values: Mapping[str, Any]  # The names may be nested.

  def __post_init__(self) -> None:
    super().__post_init__()
    is_list = lambda x: isinstance(x, list)
    if isinstance(self.values, Mapping):
      self.values = jax.tree.map(np.asarray, dict(self.values), is_leaf=is_list)
    self._length = base.num_rows(self.values)
    # 1024 rows or more identify the data: to hash all would take seconds.
    rows = slice(None, None, max(1, self._length // 1024))
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(self.values):
      about = jax.tree_util.keystr(path), str(x.dtype), x.shape
      if x.dtype == object:
        raise TypeError(
          f'The array {about[0]} has Python objects, such as {x.flat[0]!r};'
          ' expected numbers. Encode text as ids, and fill rows up to a length.'
        )
      digest.update(repr(about).encode() + x[rows].tobytes())
    self._hash = digest.hexdigest()[:32]

  def num_records(self) -> int:
    return self._length

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    return jax.tree.map(lambda x: x[records], self.values)

  def data_identity(self) -> dict[str, Any]:
    return {'arrays': self._hash}


# What Grain 0.2.18 lacks.


def _start_workers(dataset: Any, num_workers: int) -> Any:
  """Returns the iterator of a `grain.IterDataset`, read by worker processes."""
  import grain

  if not flags.FLAGS.is_parsed():
    # As in a notebook: Grain asks a flag, which absl refuses to tell.
    flags.FLAGS.mark_as_parsed()
  dataset = dataset.mp_prefetch(
    grain.MultiprocessingOptions(num_workers=num_workers),
    worker_init_fn=_start_worker,
  )
  iterator = iter(dataset)
  iterator.get_state()  # Makes what `start_prefetch` starts.
  # What a terminal or a scheduler may send to all processes of a job at once.
  # Until `_start_worker` runs in them, the workers have this thread's mask.
  handled = (x for x in signal.Signals if callable(signal.getsignal(x)))
  blocked = {signal.SIGINT, signal.SIGTERM, *handled}
  before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
  try:
    iterator.start_prefetch()
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
  return iterator


def _start_worker(index: int, count: int) -> None:
  """Makes a worker process leave with its parent, and only then."""
  del index, count
  # Ctrl-C and schedulers signal every process, but the parent still wants
  # batches for the step that it finishes and saves.
  for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    signal.signal(number, signal.SIG_IGN)
  # The accelerator is the parent's.
  jax.config.update('jax_platforms', 'cpu')
  parent = multiprocessing.parent_process()
  assert parent is not None

  def watch() -> None:
    # A parent that was killed cannot tell its workers to end.
    parent.join()
    os._exit(1)

  threading.Thread(target=watch, name='watch_parent', daemon=True).start()


def record_generator(
  seed: int, stage: int, epoch: int, record: int
) -> np.random.Generator:
  """Returns the random numbers of use `stage` of a record in an epoch."""
  bits = np.random.Philox(
    key=np.array([seed % 2**64, 2**63 + stage], np.uint64),
    counter=np.array([0, 0, epoch, record], np.uint64),
  )
  return np.random.Generator(bits)
