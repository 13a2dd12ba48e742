"""Records that have numbers: shuffled, divided among hosts, padded, counted.

Text, arrays and Grain's `MapDataset` share this. There is one global order of
the records, epoch after epoch (Grain's shuffle). With G = batch_size *
num_infeed_hosts, global batch n is the positions [n * G, (n + 1) * G) of it,
and host h reads the rows [h * batch_size, (h + 1) * batch_size) of each. So all
hosts together see the same batches for any number of hosts, and a position is
one number: how many records of the global order were given. It fits any number
of hosts, any batch size and any number of workers.

Shapes: b rows, N records of an epoch.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
import dataclasses
import functools
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

# Below so many records, Grain's shuffle takes up to a millisecond a record: it
# shuffles 2**16 numbers and skips those that are too large. The order of an
# epoch is held instead. Another limit would be another order.
_SMALL = 2**16
# How long `close` waits for workers.
_MAX_CLOSE_SECS = 30
# What a terminal or a scheduler sends to all processes of a job at once.
_SIGNALS_TO_ALL = (signal.SIGINT, signal.SIGTERM)


@functools.lru_cache(maxsize=64)  # At most 32 MB.
def _epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
  """Returns the order of an epoch of a small dataset, int64 [size].

  From a stream of numbers that NumPy promises never to change, unlike its
  permutations.
  """
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

  ANY_NUMBER_OF_HOSTS: ClassVar[bool] = True
  # Of the global order, how many records were given.
  _first: ClassVar[Mapping[str, Any]] = {'records': 0}

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.shuffle is None:
      self.shuffle = self.is_training
    self.check_integer('num_workers', 0)  # Grain refuses threads itself.

  # What a subclass overrides.

  @abc.abstractmethod
  def num_records(self) -> int:
    """Returns N, the records of an epoch; asked for with every batch."""

  @abc.abstractmethod
  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    """Returns some records: arrays [b, ...].

    Called in threads and worker processes: it must depend on nothing but its
    arguments and the fields.

    Args:
      records: their numbers, int64 [b], each in [0, N).
      epochs: of each, which epoch it is read in, int64 [b].
    """

  def describe_record(self, record: int, epoch: int) -> str:
    """Returns where a record comes from, for messages: its file and place."""
    del epoch
    return f'record {record}'

  def data_identity(self) -> dict[str, Any]:
    """Returns plain values that identify the data, such as a hash of it.

    It is called with every batch. `identity` adds the number of records, the
    seed, `shuffle` and `repeat`.
    """
    return {}

  def order(self, positions: np.ndarray) -> np.ndarray:
    """Returns the record at each position of the global order.

    Args:
      positions: int64 [b], counted over all epochs.

    Returns:
      int64 [b], each in [0, N).
    """
    epochs, within = np.divmod(positions, self._size)
    if not self.shuffle:
      return within
    if self._size < _SMALL:
      records = [
        _epoch_order(self.seed(), epoch, self._size)[i]
        for epoch, i in zip(epochs.tolist(), within.tolist(), strict=True)
      ]
    else:
      records = [self._ids[i] for i in positions.tolist()]
    return np.array(records, np.int64)

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
        f'{self.name} has no records: its data does not fill one.'
      )
    return size

  # The contract of `BaseInput`.

  def _take(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the next batch of the iterator, and the position behind it."""
    batch = next(self._iterator)
    given = self._at['records'] + self.get_global_batch_size()
    return own_arrays(batch) if self.num_workers else batch, {'records': given}

  def _start(self) -> Any:
    """Starts to read at the position."""
    num_batches = self._batches_left()
    batch = functools.partial(self._batch, self._at['records'])
    if not self.num_threads and not self.num_workers:
      # Grain's iterator would cost as much as copying eight rows of a thousand
      # tokens.
      return map(batch, range(num_batches))
    import grain

    options = grain.ReadOptions(
      num_threads=self.num_threads, prefetch_buffer_size=self.num_threads
    )
    dataset = grain.MapDataset.range(num_batches).map(batch)
    return start_iterator(dataset.to_iter_dataset(options), self.num_workers)

  def _batches_left(self) -> int:
    """Returns how many batches there are from the position on."""
    rows = self.get_global_batch_size()
    left = sys.maxsize - rows
    if not self.repeat:
      left = max(0, self._size - self._at['records'])
    return -(-left // rows)

  def _batch(self, given: int, number: int) -> dict[str, Any]:
    """Returns the rows of a batch, so many batches behind a position."""
    assert self.infeed_host_index is not None
    first = given + number * self.get_global_batch_size()
    first += self.infeed_host_index * self.batch_size
    positions = np.arange(first, first + self.batch_size)
    if self.repeat:
      return self.read_at(positions)
    real = positions[positions < self._size]
    # A host without rows still needs their shapes and types.
    batch = self.read_at(real if real.size else np.zeros(1, np.int64))
    if not real.size:
      batch = jax.tree.map(lambda x: x[:0], batch)
    return base.pad_rows(batch, self.batch_size)

  def read_at(self, positions: np.ndarray) -> dict[str, Any]:
    """Returns the records at some positions of the global order, [b, ...].

    Args:
      positions: int64 [b], counted over all epochs.
    """
    records, epochs = self.order(positions), positions // self._size
    try:
      return call_without_end(self._read_all, records, epochs)
    except Exception as e:
      e.add_note(f'While {self.name} read {self._describe(records, epochs)}.')
      raise

  def _read_all(
    self, records: np.ndarray, epochs: np.ndarray
  ) -> dict[str, Any]:
    return self._checked(self.read(records, epochs), len(records))

  def _checked(self, batch: dict[str, Any], expected: int) -> dict[str, Any]:
    """Returns a batch unless it lost records, or has some twice."""
    if (got := base.num_rows(batch)) != expected:
      raise ValueError(
        f'{self.name} made {got} rows of {expected} records; expected a row of'
        ' each.'
      )
    return batch

  def _describe(self, records: np.ndarray, epochs: np.ndarray) -> str:
    """Returns which of some records cannot be read, or else the first."""
    for i in range(len(records)):
      try:
        self._read_all(records[i : i + 1], epochs[i : i + 1])
      except Exception:
        return self.describe_record(int(records[i]), int(epochs[i]))
    first = self.describe_record(int(records[0]), int(epochs[0]))
    return f'{len(records)} records that can be read one by one: {first}, ...'

  def identity(self) -> dict[str, Any]:
    """Returns the values on which the global order depends."""
    return {
      'num_records': self.num_records(),
      'repeat': self.repeat,
      'shuffle': self.shuffle,
      'seed': self.seed(),
      **self.data_identity(),
    }

  def where(self) -> str:
    """Returns the first record of the next batch."""
    assert self.infeed_host_index is not None
    position = self._at['records'] + self.infeed_host_index * self.batch_size
    epoch, within = divmod(position, self._size)
    if epoch and not self.repeat:
      return 'the rows that fill up the end of the epoch'
    return (
      f'a batch from record {within} of epoch {epoch} on'
      f' ({self.describe_at(position)})'
    )

  def describe_at(self, position: int) -> str:
    """Returns where the record at a position of the global order is from."""
    record = self.order(np.array([position]))[0]
    return self.describe_record(int(record), position // self._size)

  def close(self) -> None:
    """Ends threads and workers."""
    iterator, self._iterator = self._iterator, None
    if not hasattr(iterator, 'close'):
      return
    # Grain waits until its workers have read their batches, for any time.
    closing = threading.Thread(target=iterator.close, daemon=True)
    closing.start()
    closing.join(_MAX_CLOSE_SECS)
    if closing.is_alive():
      logging.warning(
        'A worker of %s still reads after %.0f s, and is left to itself; it'
        ' ends with this process.',
        self.name,
        _MAX_CLOSE_SECS,
      )

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, '_iterator': None}


# What Grain 0.2.18 lacks.


def start_iterator(dataset: Any, num_workers: int) -> Any:
  """Returns the iterator of a Grain dataset, with workers if there are any.

  Args:
    dataset: a `grain.IterDataset`.
    num_workers: processes to read it with; 0 for none.
  """
  import grain

  if not num_workers:
    return iter(dataset)
  if not flags.FLAGS.is_parsed():
    # As in a notebook: Grain asks a flag, which absl refuses to tell.
    flags.FLAGS.mark_as_parsed()
  dataset = _sender_class()(dataset).mp_prefetch(
    grain.MultiprocessingOptions(num_workers=num_workers),
    worker_init_fn=_start_worker,
  )
  iterator = iter(dataset)
  iterator.get_state()  # Makes what `start_prefetch` starts.
  # Until `_start_worker` runs in them, the workers have this thread's mask.
  before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_TO_ALL)
  try:
    iterator.start_prefetch()
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
  return iterator


def _start_worker(index: int, count: int) -> None:
  """Makes a worker process leave with its parent, and only then."""
  del index, count
  # At Ctrl-C the terminal interrupts every process, and a scheduler that takes
  # the machine away terminates them all; the parent still wants batches for the
  # step that it finishes and saves.
  for number in _SIGNALS_TO_ALL:
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


@functools.cache
def _sender_class() -> type:
  """Returns a node that raises only what a parent process can be sent.

  Grain's worker drops an error that cannot be pickled, and its parent would
  wait for it for ever.
  """
  import grain

  class Sender(grain.DatasetIterator):
    """What its parent gives, and errors that can be pickled."""

    def __next__(self) -> Any:
      try:
        return next(self._parent)
      except Exception as e:
        raise _picklable(e) from e.__cause__

    def get_state(self) -> Any:
      return self._parent.get_state()

    def set_state(self, state: Any) -> None:
      self._parent.set_state(state)

  class SenderDataset(grain.IterDataset):
    """The dataset of such an iterator."""

    def __iter__(self) -> Sender:
      return Sender(self._parent.__iter__())

  return SenderDataset


def _picklable(error: Exception) -> Exception:
  """Returns an error, or a substitute if it cannot be pickled."""
  try:
    pickle.loads(pickle.dumps(error))
  except Exception:
    other = RuntimeError(f'{type(error).__qualname__}: {error}')
    for note in getattr(error, '__notes__', ()):
      other.add_note(note)
    return other
  return error


def record_generator(
  seed: int, stage: int, epoch: int, record: int
) -> np.random.Generator:
  """Returns the random numbers of a record, whoever reads it.

  Args:
    seed: any integer.
    stage: what they are for, at least 0.
    epoch: in which the record is read.
    record: its number.
  """
  bits = np.random.Philox(
    key=np.array([seed % 2**64, 2**63 + stage], np.uint64),
    counter=np.array([0, 0, epoch, record], np.uint64),
  )
  return np.random.Generator(bits)


def own_arrays(tree: Any) -> Any:
  """Returns a copy of a worker's batch, outside the shared memory.

  Shared memory is small and takes a file descriptor per array, and a batch may
  be kept for long.
  """
  return jax.tree.map(
    lambda x: np.array(x) if isinstance(x, np.ndarray) else x, tree
  )


def call_without_end(function: Callable[..., Any], *args: Any) -> Any:
  """Calls a reader of records, whose errors do not mean the end of the data.

  Instead of `StopIteration` and TensorFlow's `OutOfRangeError`, a
  `RuntimeError` is raised, as by generators.
  """
  try:
    return function(*args)
  except Exception as e:
    if base.is_end(e):
      raise RuntimeError(f'A record could not be read: {e!r}.') from e
    raise
