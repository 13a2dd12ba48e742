"""tf.data pipelines as inputs with exact positions, read epoch by epoch.

You give a function that returns one epoch as a dataset of single records. This
module shuffles and batches the records, divides them among the hosts, and
repeats the epoch:

  def squares(seed):
    return tf.data.Dataset.range(100).map(lambda x: {'x': x, 'y': x * x})

  batches = tfdata.TfDataInput(
    dataset=squares, batch_size=8, is_training=True, shuffle_buffer_size=100
  )

With `TfDataInput`, every host runs the whole pipeline and keeps its rows of
each global batch, so you can resume a run on a different number of hosts. With
`ShardedTfDataInput`, the function returns a separate part for each host, so a
position is valid only for the same host of the same number of hosts.

A position is an epoch and the number of its records read so far. To reach a
position, the input rebuilds the epoch from its seed and reads up to it.

An epoch must therefore be the same each time it is built. Its seed becomes
TensorFlow's global seed. With `op_determinism=True`, the default, the first
dataset turns on `tf.config.experimental.enable_op_determinism` for the whole
process. Parallel parts of a pipeline then keep their order, and parts that draw
random numbers or call Python run sequentially. `tf.random.stateless_*` and
`tf.numpy_function(..., stateful=False)` stay parallel, and do not need
`op_determinism`. Draw Python's random numbers from `seed`.

Making the first input imports TensorFlow, which never touches a GPU.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import hashlib
import threading
from typing import Any, ClassVar

from absl import logging
import jax
import numpy as np

from examples.pax import base_input
from jaxline import errors
from jaxline.inputs import base

# TensorFlow's seed is global, so only one dataset may be built at a time.
_building = threading.Lock()


@functools.cache
def import_tensorflow() -> Any:
  """Imports `tensorflow`, and hides the GPUs from it."""
  import tensorflow as tf

  # This fails if the process has already used TensorFlow on a GPU.
  with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], 'GPU')
  return tf


@functools.cache
def _enable_op_determinism() -> None:
  # This is a warning because runs hide this library's messages below that.
  logging.warning(
    'Made TensorFlow deterministic (enable_op_determinism), so that a resumed'
    ' run reads the same data. To leave it as it is, set op_determinism=False.'
  )
  import_tensorflow().config.experimental.enable_op_determinism()


def derive_seed(seed: int, epoch: int) -> int:
  """Returns the seed of an epoch, in [0, 2**30), the same on all machines."""
  digest = hashlib.sha256(f'{seed}/{epoch}'.encode()).digest()
  # 30 bits leave room for SeqIO, which adds to seeds, in signed 32 bits.
  return int.from_bytes(digest[:4], 'big') % 2**30


def build(
  seed: int, make: Callable[[int], Any], op_determinism: bool = True
) -> Any:
  """Returns `make(seed)`, with the seed as TensorFlow's global seed."""
  with _building:
    import_tensorflow().random.set_seed(seed)
    # Set the seed first, because with determinism but no global seed, random
    # operations fail.
    if op_determinism:
      _enable_op_determinism()
    return make(seed)


@dataclasses.dataclass(kw_only=True, eq=False)
class EpochInput(base_input.Configured, base.ResumableInput):
  """Reads datasets of one epoch each, which a subclass builds.

  If `ANY_NUMBER_OF_HOSTS`, a dataset has the records of all hosts. Otherwise,
  it has the records of one host. `op_determinism` makes TensorFlow
  deterministic.
  """

  op_determinism: bool = True

  # The epoch, and the number of its records read so far.
  FIRST: ClassVar[Any] = {'epoch': 0, 'record': 0}

  def __post_init__(self) -> None:
    super().__post_init__()
    import_tensorflow()

  @abc.abstractmethod
  def epoch_dataset(self, seed: int, host_index: int) -> Any:
    """Returns an epoch as a dataset of dicts of tensors of fixed shapes.

    `host_index` is the host whose part to return, if a dataset is for one host.
    """

  def epoch_seed(self, epoch: int) -> int:
    """Returns the seed of an epoch."""
    return derive_seed(self.seed(), epoch)

  def read_from(
    self, position: dict[str, int]
  ) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    is_global = self.ANY_NUMBER_OF_HOSTS
    rows = self.get_global_batch_size() if is_global else self.batch_size
    # Whether other hosts may have more or fewer records.
    is_part = not (is_global or self.repeat or self.num_infeed_hosts == 1)
    epoch, record = position['epoch'], position['record']
    # Epoch -> number of records, for epochs that were read to the end.
    sizes: dict[int, int] = {}
    for batch in rebatch(self._records(epoch, record, rows, sizes), rows):
      record += rows
      while record > sizes.get(epoch, record):
        record -= sizes.pop(epoch)
        epoch += 1
      if is_global:
        batch = host_rows(self, batch)
      yield batch, {'epoch': epoch, 'record': record}
    while is_part and record // rows < self._num_batches:
      record += rows
      yield self._no_rows, {'epoch': epoch, 'record': record}

  def _records(
    self, epoch: int, record: int, rows: int, sizes: dict[int, int]
  ) -> Iterator[dict[str, Any]]:
    """Yields the records from a position on, at most `rows` at once."""
    while True:
      dataset = self._build(epoch, self.infeed_host_index or 0)
      for batch in self._batched(dataset.skip(record), rows):
        record += base.num_rows(batch)
        yield batch
      if not self.repeat:
        return
      if not record:
        raise ValueError(
          f'{self.name} has no records in epoch {epoch} for host'
          f' {self.infeed_host_index} of {self.num_infeed_hosts}.'
        )
      sizes[epoch] = record
      epoch, record = epoch + 1, 0

  def _build(self, epoch: int, host_index: int) -> Any:
    """Returns the dataset of an epoch."""
    dataset = build(
      self.epoch_seed(epoch),
      lambda seed: self.epoch_dataset(seed, host_index),
      self.op_determinism,
    )
    endless = import_tensorflow().data.INFINITE_CARDINALITY
    if not self.repeat and dataset.cardinality() == endless:
      raise errors.UsageError(
        f'{self.name}.dataset has no end, but repeat is False. Remove .repeat()'
        ' from the dataset.'
      )
    return dataset

  def _batched(self, dataset: Any, rows: int) -> Iterator[dict[str, Any]]:
    """Returns batches of `rows` records. The last may have fewer."""
    tf = import_tensorflow()
    options = tf.data.Options()
    options.deterministic = True
    dataset = dataset.batch(rows).prefetch(tf.data.AUTOTUNE)
    records = dataset.with_options(options).as_numpy_iterator()
    return map(functools.partial(to_batch, self), records)

  # For an epoch of several parts, which must end on all hosts together.

  def _parts(self) -> Iterator[Any]:
    return (self._build(0, host) for host in range(self.num_infeed_hosts or 1))

  @functools.cached_property
  def _num_batches(self) -> int:
    """Number of batches of each host, counted if tf.data does not know it."""
    sizes = []
    for part in self._parts():
      if (size := int(part.cardinality())) < 0:
        size = int(part.reduce(np.int64(0), lambda count, _: count + 1))
      sizes.append(size)
    return -(-max(sizes) // self.batch_size)

  @functools.cached_property
  def _no_rows(self) -> dict[str, Any]:
    """A batch without rows, from any part: this host's part may be empty."""
    rows = (
      row for part in self._parts() for row in self._batched(part.take(1), 1)
    )
    return choose(next(rows), slice(0))

  def identity(self) -> dict[str, Any]:
    return {**super().identity(), 'seed': self.seed(), 'repeat': self.repeat}

  def where(self) -> str:
    return f'epoch {self._at["epoch"]} from record {self._at["record"]} on'


@dataclasses.dataclass(kw_only=True, eq=False)
class TfDataInput(EpochInput):
  """The `tf.data.Dataset` of a function, divided among the hosts.

  String tensors are left out in training and with several hosts, because
  devices cannot hold them.

  Attributes:
    dataset: Function, called as `dataset(seed=...)` for each epoch. It returns
      all records of the epoch as a dataset, in the same order on all hosts. A
      record is a dict (of dicts) of tensors, whose shapes are the same for all
      records.
    shuffle_buffer_size: Buffer size of `tf.data.Dataset.shuffle`. If None, the
      dataset is not shuffled.
    data_version: Version of the data that the function reads. A position with a
      different version is rejected; the data itself is not compared.
  """

  dataset: Callable[..., Any]
  shuffle_buffer_size: int | None = None
  data_version: str = ''

  ANY_NUMBER_OF_HOSTS: ClassVar[bool] = True

  def epoch_dataset(self, seed: int, host_index: int) -> Any:
    host = {'host_index': host_index, 'num_hosts': self.num_infeed_hosts}
    host = {} if self.ANY_NUMBER_OF_HOSTS else host
    dataset = self.dataset(seed=seed, **host)
    if self.shuffle_buffer_size is None:
      return dataset
    return dataset.shuffle(self.shuffle_buffer_size, seed=seed)

  def identity(self) -> dict[str, Any]:
    return {
      **super().identity(),
      'shuffle_buffer_size': self.shuffle_buffer_size,
      'data_version': self.data_version,
    }


@dataclasses.dataclass(kw_only=True, eq=False)
class ShardedTfDataInput(TfDataInput):
  """A `TfDataInput` whose function returns a separate part for each host.

  Attributes:
    dataset: Function, called as `dataset(seed=..., host_index=...,
      num_hosts=...)`. It returns the host's part of the epoch. The parts must
      not overlap, but may differ in size. To count records, a host calls the
      function for the other hosts too.
  """

  ANY_NUMBER_OF_HOSTS: ClassVar[bool] = False


def choose(batch: Any, rows: slice) -> Any:
  """Returns some rows of a batch."""
  return jax.tree.map(lambda x: x[rows], batch)


def host_rows(source: base.BaseInput, batch: Any) -> Any:
  """Returns the rows of a global batch that belong to an input's host."""
  assert source.infeed_host_index is not None
  if source.num_infeed_hosts == 1:
    return batch
  first = source.infeed_host_index * source.batch_size
  return choose(batch, slice(first, first + source.batch_size))


def rebatch(batches: Iterable[Any], rows: int) -> Iterator[Any]:
  """Regroups batches into batches of `rows` rows. The last may have fewer."""
  parts: list[Any] = []
  have = 0

  def join() -> Any:
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

  for batch in batches:
    have += (added := len(jax.tree.leaves(batch)[0]))
    if added == have == rows:
      yield batch
      have = 0
      continue
    parts.append(batch)
    if have < rows:
      continue
    joined = join() if parts[1:] else batch
    for first in range(0, have - rows + 1, rows):
      yield choose(joined, slice(first, first + rows))
    have %= rows
    parts = [choose(joined, slice(-have, None))] if have else []
  if have:
    yield join()


def to_batch(source: base.BaseInput, given: Any) -> dict[str, Any]:
  """Converts mappings, lists and tuples of tensors to a batch of an input.

  Strings are left out in training and with several hosts, because the batch
  then goes to devices.
  """
  keep_strings = not source.is_training and source.num_infeed_hosts == 1

  def convert(x: Any, path: str) -> Any:
    """Returns dicts and lists of arrays, or None if nothing is left."""
    if isinstance(x, Mapping):
      found = {key: convert(value, f'{path}.{key}') for key, value in x.items()}
      return {key: y for key, y in found.items() if y is not None} or None
    if isinstance(x, list | tuple):
      values = [convert(value, path) for value in x]
      return [y for y in values if y is not None] or None
    array = np.asarray(x.numpy() if hasattr(x, 'numpy') else x)
    if array.dtype.kind not in 'OSU':
      return array
    if not all(isinstance(v, bytes | str) for v in array.flat):
      raise TypeError(
        f'The entry {path[1:]} is a {type(x).__name__}; expected a dense'
        ' tensor.'
      )
    return array if keep_strings else None

  batch = convert(given, '')
  if not isinstance(batch, dict):
    raise TypeError(
      f'The data of {source.name} is a {type(given).__name__}; expected dicts'
      ' (of dicts) of dense tensors, with at least one numeric tensor.'
    )
  return batch
