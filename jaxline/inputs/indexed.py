"""Records addressed by number: shuffled, dealt out, filled up, counted.

What text, arrays and Grain's `MapDataset` share. There is one global order of
the records, epoch after epoch; with G = batch_size * num_infeed_hosts, global
batch n is the positions [n * G, (n + 1) * G) of it, and host h reads the rows
[h * batch_size, (h + 1) * batch_size) of each. So all hosts together see the
same batches, however many they are, and a position is one number: how many
records of the global order were given. It fits any number of hosts, any batch
size and any number of workers.

Shapes: b rows, N records of an epoch.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
import dataclasses
import functools
import multiprocessing
from multiprocessing import connection
import os
import signal
import sys
import threading
from typing import Any, ClassVar

from absl import flags
import jax
import numpy as np

from jaxline.inputs import base

# Up to so many records an epoch's order is held in memory (8 bytes a record,
# sorted in a second or two). Grain's shuffle needs none and costs microseconds
# a record, as much as it takes to copy a thousand tokens.
_MAX_HELD = 2**24
_MAX_DESCRIBED = 3


@dataclasses.dataclass(kw_only=True, eq=False)
class IndexedInput(base.BaseInput, abc.ABC):
  """An input that can read any record by its number.

  Attributes:
    shuffle: whether each epoch has an order of its own, drawn from the seed;
      None shuffles in training only.
    repeat: whether epoch follows epoch; None does unless `reset_for_eval`.
      Where not, the last batches are filled up with rows of weight 0, so that
      all hosts have as many, and every batch has `weights`.
    num_threads: threads that read batches ahead, for files on slow disks.
    num_workers: processes that do, for work that holds Python's lock. The input
      is sent to them with cloudpickle.
  """

  shuffle: bool | None = None
  repeat: bool | None = None
  num_threads: int = 0
  num_workers: int = 0

  ANY_NUMBER_OF_HOSTS: ClassVar[bool] = True

  def __post_init__(self) -> None:
    super().__post_init__()
    self.repeat = self.check_repeat(self.repeat)
    if self.shuffle is None:
      self.shuffle = self.is_training
    for key in ('num_threads', 'num_workers'):
      value = getattr(self, key)
      if not isinstance(value, int) or value < 0:
        raise ValueError(
          f'{self.name}.{key} is {value!r}; expected an integer of at least 0.'
        )
    # Of the global order, how many records were given.
    self._given = 0
    self._iterator: Any = None

  # What a subclass overrides.

  @abc.abstractmethod
  def num_records(self) -> int:
    """Returns N, the records of an epoch."""

  @abc.abstractmethod
  def read(self, records: np.ndarray, epochs: np.ndarray) -> base.Batch:
    """Returns some records: arrays [b, ...].

    Called in threads and worker processes: it must depend on nothing but its
    arguments and the fields.

    Args:
      records: their numbers, int64 [b], each in [0, N).
      epochs: of each, which epoch it is read in, int64 [b].
    """

  def describe_record(self, record: int) -> str:
    """Returns where a record comes from, for messages: its file and place."""
    return f'record {record}'

  def data_identity(self) -> dict[str, Any]:
    """Returns what the records are, as plain values: a hash, their length."""
    return {}

  def order(self, positions: np.ndarray) -> np.ndarray:
    """Returns the record at each position of the global order.

    Args:
      positions: int64 [b], counted over all epochs.

    Returns:
      int64 [b], each in [0, N).
    """
    num_records = self._checked_num_records()
    epochs, within = np.divmod(positions, num_records)
    if not self.shuffle:
      return within
    if num_records > _MAX_HELD:
      dataset = self._grain_order
      return np.array([dataset[p] for p in positions.tolist()], np.int64)
    if positions.size and epochs[0] == epochs[-1]:
      return self._epoch_order(int(epochs[0]))[within]
    return np.array(
      [
        self._epoch_order(epoch)[i]
        for epoch, i in zip(epochs.tolist(), within.tolist(), strict=True)
      ],
      np.int64,
    )

  def _epoch_order(self, epoch: int) -> np.ndarray:
    """Returns the order of an epoch, int64 [N]; the last two are kept."""
    # Threads may read across the end of an epoch: the whole dict is replaced.
    order = self._orders.get(epoch)
    if order is None:
      # A stream that NumPy promises never to change, unlike its permutations.
      key = [self.seed() % 2**64, epoch]
      draws = np.random.Philox(key=np.array(key, np.uint64)).random_raw(
        self._checked_num_records()
      )
      order = np.argsort(draws, kind='stable')
      kept = {e: o for e, o in self._orders.items() if abs(e - epoch) == 1}
      self._orders = {**dict(list(kept.items())[-1:]), epoch: order}
    return order

  @functools.cached_property
  def _orders(self) -> dict[int, np.ndarray]:
    return {}

  @functools.cached_property
  def _grain_order(self) -> Any:
    import grain  # Takes a second to import.

    return grain.MapDataset.range(self._checked_num_records()).shuffle(
      seed=self.seed() % 2**32
    )

  def _checked_num_records(self) -> int:
    num_records = self.num_records()
    if num_records < 1:
      raise ValueError(f'{self.name} has no records: its data is empty.')
    return num_records

  # The contract of `BaseInput`.

  def get_next(self) -> base.Batch:
    """Returns this host's rows of the next global batch."""
    if self._iterator is None:
      self._iterator = self._start()
    batch = next(self._iterator)
    self._given += self.get_global_batch_size()
    return batch

  def _start(self) -> Iterator[base.Batch]:
    """Starts to read where this input stands; Grain has the workers."""
    import grain

    size = self.get_global_batch_size()
    if self.repeat:
      num_batches = sys.maxsize // size
    else:
      num_batches = max(
        0, -(-(self._checked_num_records() - self._given) // size)
      )
    dataset = (
      grain.MapDataset.range(num_batches)
      .map(functools.partial(self._batch, self._given))
      .to_iter_dataset(
        grain.ReadOptions(
          num_threads=self.num_threads, prefetch_buffer_size=self.num_threads
        )
      )
    )
    if self.num_workers:
      allow_workers()
      dataset = dataset.mp_prefetch(
        grain.MultiprocessingOptions(num_workers=self.num_workers),
        worker_init_fn=start_worker,
      )
    return iter(dataset)

  def _batch(self, given: int, number: int) -> base.Batch:
    """Returns the rows of a batch, so many batches behind a position."""
    assert self.infeed_host_index is not None
    first = given + number * self.get_global_batch_size()
    first += self.infeed_host_index * self.batch_size
    positions = np.arange(first, first + self.batch_size)
    if self.repeat:
      return self._read(positions)
    real = positions[positions < self._checked_num_records()]
    # Without a row of its own, a host still needs to know what rows are like.
    batch = self._read(real if real.size else np.zeros(1, np.int64))
    if not real.size:
      batch = jax.tree.map(lambda x: x[:0], batch)
    return base.pad_rows(batch, self.batch_size)

  def _read(self, positions: np.ndarray) -> base.Batch:
    epochs = positions // self._checked_num_records()
    records = self.order(positions)
    try:
      return self.read(records, epochs)
    except Exception as e:
      some = ', '.join(
        self.describe_record(r) for r in records[:_MAX_DESCRIBED].tolist()
      )
      more = f' and {len(records) - _MAX_DESCRIBED} more'
      e.add_note(
        f'While {self.name} read {some}'
        + (more if len(records) > _MAX_DESCRIBED else '')
        + '.'
      )
      raise

  def reset(self) -> None:
    """Goes back to the first record."""
    super().reset()
    self.set_position({'records': 0})

  def position(self) -> dict[str, int]:
    """Returns how many records of the global order were given."""
    return {'records': self._given}

  def set_position(self, position: dict[str, int]) -> None:
    """Reads on behind so many records."""
    self.close()
    self._given = position['records']

  def identity(self) -> dict[str, Any]:
    """Returns what fixes the global order."""
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
    position = self._given + self.infeed_host_index * self.batch_size
    num_records = self._checked_num_records()
    if not self.repeat and position >= num_records:
      return 'the rows that fill up the end of the epoch'
    record = int(self.order(np.array([position]))[0])
    return (
      f'a batch from record {position % num_records} of epoch'
      f' {position // num_records} on ({self.describe_record(record)})'
    )

  def close(self) -> None:
    """Ends threads and workers."""
    iterator, self._iterator = self._iterator, None
    if iterator is not None:
      iterator.close()

  def __getstate__(self) -> dict[str, Any]:
    # A worker gets the fields, and none of what runs here.
    return {**self.__dict__, '_iterator': None, '_peeked': None}


def allow_workers() -> None:
  """Lets Grain start workers where no flags were parsed, as in a notebook.

  It asks a flag of its own then, which absl refuses to tell before that.
  """
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


def start_worker(index: int, count: int) -> None:
  """Makes a worker process leave with its parent, and only then."""
  del index, count
  # At Ctrl-C the terminal interrupts every process; the parent still wants
  # batches for the step that it finishes and saves.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  parent = multiprocessing.parent_process()
  assert parent is not None

  def watch() -> None:
    # A parent that was killed cannot tell its workers to end.
    connection.wait([parent.sentinel])
    os._exit(1)

  threading.Thread(target=watch, name='watch_parent', daemon=True).start()
