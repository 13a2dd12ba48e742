"""tf.data pipelines as inputs, an epoch at a time, with an exact position.

Give a function that returns one epoch as a dataset of single records. This
module shuffles, batches, divides among hosts and repeats:

  def squares(seed):
    return tf.data.Dataset.range(100).map(lambda x: {'x': x, 'y': x * x})

  batches = tfdata.TfDataInput(
    dataset=squares, batch_size=8, is_training=True, shuffle_buffer_size=100
  )

With `TfDataInput`, every host runs the pipeline for all records and keeps its
rows of each global batch: a run may be resumed on another number of hosts. With
`ShardedTfDataInput`, the function gives each host its own part; a position is
valid for this host of this number of hosts.

A position is an epoch and the number of its records that were given. To reach
it, the epoch is built again from its seed and read up to there.

So an epoch must be the same each time it is built. Its seed becomes
TensorFlow's global seed. With `op_determinism=True`, the default, the first
dataset turns on `tf.config.experimental.enable_op_determinism` for the whole
process: parallel parts of a pipeline then keep their order, and those that draw
random numbers or call Python run sequentially. `tf.random.stateless_*` and
`tf.numpy_function(..., stateful=False)` stay parallel, and need no
`op_determinism`. Python's random numbers must be drawn from `seed`.

TensorFlow is imported when the first input is made, and never touches a GPU.
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

# TensorFlow's seed is global: only one dataset is built at a time.
_building = threading.Lock()


@functools.cache
def import_tensorflow() -> Any:
  """Returns the module `tensorflow`, which leaves the GPUs to JAX."""
  import tensorflow as tf

  # It refuses where somebody has used TensorFlow on them already.
  with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], 'GPU')
  return tf


@functools.cache
def _enable_op_determinism() -> None:
  # A warning, since a run hides this library's messages below that level.
  logging.warning(
    'TensorFlow is deterministic from now on (enable_op_determinism), so that a'
    ' resumed run reads the same data; op_determinism=False leaves it as it is.'
  )
  import_tensorflow().config.experimental.enable_op_determinism()


def derive_seed(seed: int, epoch: int) -> int:
  """Returns the seed of an epoch, in [0, 2**30): the same everywhere."""
  digest = hashlib.sha256(f'{seed}/{epoch}'.encode()).digest()
  # SeqIO adds to seeds, and some operations take 32 bits with a sign.
  return int.from_bytes(digest[:4], 'big') % 2**30


def build(
  seed: int, make: Callable[[int], Any], op_determinism: bool = True
) -> Any:
  """Returns `make(seed)`; operations without a seed use this one.

  The seed becomes TensorFlow's global one, and its op determinism stays on.
  """
  with _building:
    import_tensorflow().random.set_seed(seed)
    # Not before: without any seed, random operations would refuse from then on.
    if op_determinism:
      _enable_op_determinism()
    return make(seed)


@dataclasses.dataclass(kw_only=True, eq=False)
class EpochInput(base_input.Configured, base.ResumableInput):
  """Reads datasets of one epoch each; a subclass builds them.

  With `ANY_NUMBER_OF_HOSTS`, the dataset is that of all hosts, and a host keeps
  its rows of each global batch; without, it is that of one host.

  Attributes:
    op_determinism: whether TensorFlow is made deterministic.
  """

  op_determinism: bool = True

  # The epoch, and the number of its records that were given.
  FIRST: ClassVar[Any] = {'epoch': 0, 'record': 0}

  def __post_init__(self) -> None:
    super().__post_init__()
    import_tensorflow()

  # What a subclass overrides.

  @abc.abstractmethod
  def epoch_dataset(self, seed: int, host_index: int) -> Any:
    """Returns one epoch as a `tf.data.Dataset` of records.

    Args:
      seed: of this epoch.
      host_index: whose part, where a dataset is that of one host.

    Returns:
      A dataset of dicts of tensors of fixed shapes.
    """

  def epoch_seed(self, epoch: int) -> int:
    """Returns the seed of an epoch."""
    return derive_seed(self.seed(), epoch)

  # The contract of `BaseInput`.

  def read_from(
    self, position: dict[str, int]
  ) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    is_global = self.ANY_NUMBER_OF_HOSTS
    rows = self.get_global_batch_size() if is_global else self.batch_size
    # Whether other hosts may have more or fewer records.
    is_part = not (is_global or self.repeat or self.num_infeed_hosts == 1)
    epoch, record = position['epoch'], position['record']
    # Epoch -> its records, for epochs that were read to their end.
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
        f'{self.name}.dataset has no end, and repeat=False: omit .repeat().'
      )
    return dataset

  def _batched(self, dataset: Any, rows: int) -> Iterator[dict[str, Any]]:
    """Returns arrays of `rows` records each; the last may have fewer."""
    tf = import_tensorflow()
    options = tf.data.Options()
    options.deterministic = True
    dataset = dataset.batch(rows).prefetch(tf.data.AUTOTUNE)
    records = dataset.with_options(options).as_numpy_iterator()
    return map(functools.partial(to_batch, self), records)

  # For an epoch of several parts, which ends on all hosts together.

  def _parts(self) -> Iterator[Any]:
    return (self._build(0, host) for host in range(self.num_infeed_hosts or 1))

  @functools.cached_property
  def _num_batches(self) -> int:
    """The number of batches of each host; counted where tf.data cannot tell."""
    sizes = []
    for part in self._parts():
      if (size := int(part.cardinality())) < 0:
        size = int(part.reduce(np.int64(0), lambda count, _: count + 1))
      sizes.append(size)
    return -(-max(sizes) // self.batch_size)

  @functools.cached_property
  def _no_rows(self) -> dict[str, Any]:
    """A batch without rows; this host's part may have none to take it from."""
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

  Tensors of strings are left out in training and with several hosts, since no
  device holds them.

  Attributes:
    dataset: called as `dataset(seed=...)` for each epoch; returns the epoch of
      all hosts, as a dataset of single records: dicts (of dicts) of tensors,
      all records of the same shapes. In the same order on all hosts.
    shuffle_buffer_size: among how many records to draw the next, as
      `tf.data.Dataset.shuffle` does. None keeps the order of the dataset.
    data_version: a version of the data that the function reads. A position is
      refused if this has changed; the data itself is not compared.
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
  """The part of the data that a function returns for this host.

  Attributes:
    dataset: called as `dataset(seed=..., host_index=..., num_hosts=...)`, also
      for other hosts than this one (to count); returns the part of that host
      in this epoch. The parts must not overlap; they may differ in size.
  """

  ANY_NUMBER_OF_HOSTS: ClassVar[bool] = False


def choose(batch: Any, rows: slice) -> Any:
  """Returns some rows of a batch."""
  return jax.tree.map(lambda x: x[rows], batch)


def host_rows(source: base.BaseInput, batch: Any) -> Any:
  """Returns the rows of a global batch that are those of an input's host."""
  assert source.infeed_host_index is not None
  if source.num_infeed_hosts == 1:
    return batch
  first = source.infeed_host_index * source.batch_size
  return choose(batch, slice(first, first + source.batch_size))


def rebatch(batches: Iterable[Any], rows: int) -> Iterator[Any]:
  """Yields the rows of batches, `rows` at a time; the last may have fewer."""
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
  """Returns mappings, lists and tuples of tensors as a batch of an input.

  Strings are left out where devices would get them: in training and with
  several hosts.
  """
  keep_strings = not source.is_training and source.num_infeed_hosts == 1

  def convert(x: Any, path: str) -> Any:
    """Returns dicts and lists of arrays; None where nothing is left."""
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
        f'The entry {path[1:]} is {type(x).__name__}; expected a dense tensor.'
      )
    return array if keep_strings else None

  batch = convert(given, '')
  if not isinstance(batch, dict):
    raise TypeError(
      f'The data of {source.name} is {type(given).__name__}; expected dicts (of'
      ' dicts) of dense tensors, at least one of them of numbers.'
    )
  return batch
