"""tf.data pipelines as inputs: an epoch at a time, with an exact position.

Give a function that returns one epoch's dataset of single records; this module
shuffles, batches, divides among hosts, pads, repeats and counts:

  def squares(seed):
    return tf.data.Dataset.range(100).map(lambda x: {'x': x, 'y': x * x})

  batches = tfdata.TfDataInput(
    dataset=squares, batch_size=8, is_training=True, shuffle_buffer_size=100
  )

There are two ways to divide the data:

- `TfDataInput`: every host reads the whole epoch and keeps its rows of each
  global batch. It is exact with any number of hosts, and a run may be resumed
  on another number. Each host runs the function's pipeline for the records of
  all hosts, and holds a few global batches. Use it if the function is cheap.
- `ShardedTfDataInput`: the function gives each host its own part, and a host
  reads only that. A position is valid for this host of this number of hosts. An
  epoch that does not repeat must end on all hosts after the same number of
  batches: if tf.data does not know the number of records, each host counts all
  parts, in one pass, when it first reaches the end of its own.

A position is an epoch and the number of its records that were given. To reach
it, the epoch is built again from its seed and read up to there. That takes as
long as reading takes, but a position is small, exact in the middle of a
shuffle, and needs no file. An epoch is the same each time it is built: its seed
is meanwhile TensorFlow's global seed, so that operations without a seed have
one too, and parallel parts of the pipeline keep their order, even those with
`deterministic=False`. For the latter, building the first dataset turns on
TensorFlow's `tf.config.experimental.enable_op_determinism`, for the whole
process. Parallel parts that draw random numbers or call Python then run
sequentially, which is slower. `tf.random.stateless_*` and
`tf.numpy_function(..., stateful=False)`, for functions whose result depends on
their arguments only, stay parallel. Random numbers that Python draws are left
to the function: draw them from `seed`.

TensorFlow is imported when the first input is made, and never touches a GPU.

Shapes: B rows of this host, G rows of a global batch, n records of a chunk.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import hashlib
import threading
from typing import Any, ClassVar

import jax
import numpy as np

from jaxline.inputs import base

# Records that are read at once to count them.
_COUNTED_AT_ONCE = 256

# TensorFlow's seed is global: only one dataset is built at a time.
_building = threading.Lock()


@functools.cache
def import_tensorflow() -> Any:
  """Returns the module `tensorflow`, which leaves the GPUs to JAX.

  Raises:
    ImportError: it is not installed.
  """
  try:
    import tensorflow as tf
  except ImportError as e:
    raise ImportError(
      "This input needs TensorFlow; install it: pip install -e '.[tf]'."
    ) from e
  # It refuses where somebody has used TensorFlow on them already.
  with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], 'GPU')
  return tf


def derive_seed(seed: int, epoch: int) -> int:
  """Returns the seed of an epoch, in [0, 2**30): the same everywhere."""
  digest = hashlib.sha256(f'{seed}/{epoch}'.encode()).digest()
  # SeqIO adds to seeds, and some operations take 32 bits with a sign.
  return int.from_bytes(digest[:4], 'big') % 2**30


def build(seed: int, make: Callable[[int], Any]) -> Any:
  """Returns `make(seed)`; operations without a seed use this one.

  From then on TensorFlow works deterministically, in the whole process. A
  previous global seed is set again; without one, this seed stays set.
  """
  tf = import_tensorflow()
  from tensorflow.python.eager import context

  with _building:
    before = context.global_seed()
    tf.random.set_seed(seed)
    # Not before: without any seed, random operations would refuse from then on.
    tf.config.experimental.enable_op_determinism()
    try:
      return make(seed)
    finally:
      if before is not None:
        tf.random.set_seed(before)


@dataclasses.dataclass(kw_only=True, eq=False)
class EpochInput(base.BaseInput, abc.ABC):
  """Reads datasets that hold one epoch each; a subclass builds them.

  With `ANY_NUMBER_OF_HOSTS`, the dataset is that of all hosts and rows are
  dealt out here; without, it is that of one host.

  Attributes:
    repeat: whether epoch follows epoch; None is yes unless `reset_for_eval`.
      If not, the end is padded with rows of weight 0, so that all hosts give
      the same number of batches, and every batch has `weights`.
    drop_remainder: whether to leave out the end instead, if it does not fill a
      batch on all hosts. If epochs repeat, there is no such end: a batch
      continues with the next epoch.
  """

  repeat: bool | None = None
  drop_remainder: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_flag('drop_remainder')
    self.repeat = self.check_repeat(self.repeat)
    if self.drop_remainder and self.reset_for_eval:
      raise ValueError(
        f'{self.name} has reset_for_eval=True and drop_remainder=True: an'
        ' evaluation on one epoch would not see all of it. Set'
        ' drop_remainder=False.'
      )
    import_tensorflow()
    # Where the next global batch begins; the record may lie behind the end of
    # the epoch, see `position`.
    self._epoch = 0
    self._record = 0
    self._chunks: Iterator[base.Batch] | None = None
    self._rest: base.Batch | None = None
    # Of the epochs that were read to their end, how many records they have.
    self._sizes: dict[int, int] = {}

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

  def fill_up(self, batch: dict[str, Any], rows: int) -> dict[str, Any]:
    """Returns a batch with so many rows, those that only fill of weight 0."""
    return base.pad_rows(batch, rows)

  # The contract of `BaseInput`.

  def get_next(self) -> dict[str, Any]:
    """Returns the next batch, arrays [B, ...]."""
    try:
      return self._next_batch()
    except StopIteration:
      raise
    except BaseException:
      # A generator that raised is at its end, which is not that of the data.
      self.close()
      raise

  def _next_batch(self) -> dict[str, Any]:
    batch: dict[str, Any] | None = self._take_rows()
    if self.repeat:
      assert batch is not None
      # Where the epoch ended before this batch, every host has seen that by
      # now; where it ends within it, only those that have rows behind the end.
      # So the former counts, on all of them alike, and the latter next time.
      while self._record >= self._sizes.get(self._epoch, self._record + 1):
        self._record -= self._sizes.pop(self._epoch)
        self._epoch += 1
    else:
      end = self._end()
      behind = self._record + (self._global_rows if self.drop_remainder else 1)
      if end is not None and behind > end:
        raise StopIteration
      if batch is None:
        batch = _choose(self._any_record(), slice(0))
      batch = self.fill_up(batch, self.batch_size)
    self._record += self._global_rows
    return batch

  @property
  def _global_rows(self) -> int:
    """Returns G: the records of a position that one batch takes."""
    if self.ANY_NUMBER_OF_HOSTS:
      return self.get_global_batch_size()
    return self.batch_size

  def _take_rows(self) -> base.Batch | None:
    """Returns B rows, fewer at the end of the data, None if there are none."""
    if self._chunks is None:
      self._chunks = self._read(self._epoch, self._record)
    parts: list[base.Batch] = []
    missing = self.batch_size
    while missing:
      chunk = self._next_chunk()
      if chunk is None:
        break
      have = base.num_rows(chunk)
      if have > missing:
        self._rest = _choose(chunk, slice(missing, None))
        chunk, have = _choose(chunk, slice(missing)), missing
      parts.append(chunk)
      missing -= have
    if self.drop_remainder and not missing:
      # It shows whether the epoch ends after this global batch.
      self._rest = self._next_chunk()
    if len(parts) > 1:
      return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
    return parts[0] if parts else None

  def _next_chunk(self) -> base.Batch | None:
    """Returns the next rows: the rest of a chunk, or the next chunk."""
    assert self._chunks is not None
    chunk, self._rest = self._rest, None
    return next(self._chunks, None) if chunk is None else chunk

  def _read(self, epoch: int, skip: int) -> Iterator[base.Batch]:
    """Yields this host's rows, some at a time, and notes how epochs end.

    Args:
      epoch: the first to read.
      skip: how many records behind its beginning to start; maybe behind its
        end, which is then within the next epoch.
    """
    rows = self._global_rows
    # Of the first record that is read, its place in the global batch.
    offset = 0
    while True:
      num_read = 0
      assert self.infeed_host_index is not None
      dataset = self._build(epoch, self.infeed_host_index).skip(skip)
      for count, chunk in self._batched(dataset, rows, offset):
        num_read += count
        if base.num_rows(chunk):
          yield chunk
      if skip and not num_read:
        size = self._count(epoch, self.infeed_host_index)
      else:
        size = skip + num_read
      self._sizes[epoch] = size
      if not self.repeat:
        return
      if not size:
        raise ValueError(
          f'{self.name} has no records in epoch {epoch}'
          + (
            '.'
            if self.ANY_NUMBER_OF_HOSTS
            else f' for host {self.infeed_host_index} of'
            f' {self.num_infeed_hosts}.'
          )
          + ' Check what the dataset reads and filters out; with several hosts,'
          ' each needs some.'
        )
      offset = (offset + num_read) % rows
      skip = max(0, skip - size)
      epoch += 1

  def _build(self, epoch: int, host_index: int) -> Any:
    """Returns the dataset of an epoch: checked, and the same each time."""
    tf = import_tensorflow()
    dataset = build(
      self.epoch_seed(epoch), lambda seed: self.epoch_dataset(seed, host_index)
    )
    if not isinstance(dataset, tf.data.Dataset):
      raise TypeError(
        f'The dataset of {self.name} is a {type(dataset).__name__}; expected'
        ' a tf.data.Dataset.'
      )
    _check_elements(tf, dataset, self.name)
    if not self.repeat and _is_endless(tf, dataset):
      raise ValueError(
        f'The dataset of {self.name} has no end, and repeat=False. Let it be'
        ' one epoch: leave out .repeat(), or append .take(n).'
      )
    return dataset

  def _batched(
    self, dataset: Any, rows: int, offset: int
  ) -> Iterator[tuple[int, base.Batch]]:
    """Yields, of each `rows` records, how many they are and those to keep."""
    tf = import_tensorflow()
    dataset = dataset.batch(rows)
    keep_strings = not self.is_training and self.num_infeed_hosts == 1
    spec = dataset.element_spec
    if not keep_strings and spec != _numbers(tf, spec):
      dataset = dataset.map(functools.partial(_numbers, tf))
    options = tf.data.Options()
    options.deterministic = True
    dataset = dataset.prefetch(tf.data.AUTOTUNE).with_options(options)
    # Rows of a chunk that are this host's: the same in each chunk, since a
    # chunk is as long as a global batch.
    first = 0
    if self.ANY_NUMBER_OF_HOSTS:
      assert self.infeed_host_index is not None
      first = self.infeed_host_index * self.batch_size
    place = (np.arange(rows) + offset) % rows
    (mine,) = np.nonzero((first <= place) & (place < first + self.batch_size))
    for record in dataset.as_numpy_iterator():
      batch = base.Batch(record)
      count = base.num_rows(batch)
      if len(mine) < rows:
        batch = _choose(batch, mine[mine < count])
      yield count, batch

  def _count(self, epoch: int, host_index: int) -> int:
    """Returns how many records there are in (a host's part of) an epoch."""
    dataset = self._build(epoch, host_index)
    known = int(dataset.cardinality())
    if known >= 0:
      return known
    tf = import_tensorflow()
    counts = dataset.batch(_COUNTED_AT_ONCE).map(
      lambda x: tf.shape(tf.nest.flatten(x)[0])[0]
    )
    return sum(counts.as_numpy_iterator())

  def _end(self) -> int | None:
    """Returns behind which record the one epoch ends; None: not there yet."""
    size = self._sizes.get(0)
    if self.ANY_NUMBER_OF_HOSTS or self.num_infeed_hosts == 1:
      return size
    if size is None and not self.drop_remainder:
      return None
    return self._common_end

  @functools.cached_property
  def _common_end(self) -> int:
    """Returns the records of the batches that all hosts give, per host."""
    assert self.num_infeed_hosts is not None
    sizes = [
      self._sizes[0]
      if host == self.infeed_host_index and 0 in self._sizes
      else self._count(0, host)
      for host in range(self.num_infeed_hosts)
    ]
    batches = (
      min(size // self.batch_size for size in sizes)
      if self.drop_remainder
      else max(-(-size // self.batch_size) for size in sizes)
    )
    return batches * self.batch_size

  def _any_record(self) -> base.Batch:
    """Returns a batch of one record, for a host that has none of its own."""
    assert self.num_infeed_hosts is not None
    hosts = 1 if self.ANY_NUMBER_OF_HOSTS else self.num_infeed_hosts
    tf = import_tensorflow()
    for host in range(hosts):
      for record in self._build(0, host).take(1).batch(1).as_numpy_iterator():
        return base.Batch(_numbers(tf, record))
    raise AssertionError('unreachable: some host has a record')

  def reset(self) -> None:
    """Goes back to the first record of the first epoch."""
    super().reset()
    self.set_position({'epoch': 0, 'record': 0})

  def position(self) -> dict[str, int]:
    """Returns the epoch, and how many of its records were given.

    On several hosts the same: it counts from the epoch that the last batch
    began in, even where that batch went on into the next one. (Not every host
    knows yet that it did.)
    """
    return {'epoch': self._epoch, 'record': self._record}

  def set_position(self, position: dict[str, int]) -> None:
    """Goes there; the next batch takes as long as reading up to there."""
    self.close()
    self._epoch, self._record = position['epoch'], position['record']

  def identity(self) -> dict[str, Any]:
    """Returns what fixes the order."""
    return {**super().identity(), 'seed': self.seed(), 'repeat': self.repeat}

  def where(self) -> str:
    """Returns the first record of the next batch."""
    return f'epoch {self._epoch} from record {self._record} on'

  def close(self) -> None:
    """Ends the pipeline."""
    self._chunks = None
    self._rest = None
    self._sizes = {}


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

  def __post_init__(self) -> None:
    super().__post_init__()
    size = self.shuffle_buffer_size
    if size is not None and (not isinstance(size, int) or size < 1):
      raise ValueError(
        f'{self.name}.shuffle_buffer_size is {size!r}; expected an integer of'
        ' at least 1, or None.'
      )

  def call_dataset(self, seed: int, host_index: int) -> Any:
    """Returns the dataset of the function."""
    del host_index
    return self.dataset(seed=seed)

  def epoch_dataset(self, seed: int, host_index: int) -> Any:
    """Returns the dataset of the function, shuffled."""
    dataset = self.call_dataset(seed, host_index)
    if self.shuffle_buffer_size is None:
      return dataset
    return dataset.shuffle(self.shuffle_buffer_size, seed=seed)

  def identity(self) -> dict[str, Any]:
    """Returns what fixes the order."""
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

  def call_dataset(self, seed: int, host_index: int) -> Any:
    """Returns the dataset of the function for a host."""
    return self.dataset(
      seed=seed, host_index=host_index, num_hosts=self.num_infeed_hosts
    )


def _choose(batch: base.Batch, rows: Any) -> base.Batch:
  return jax.tree.map(lambda x: x[rows], batch)


def _numbers(tf: Any, record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a record without its strings."""
  kept = {}
  for key, value in record.items():
    if isinstance(value, Mapping):
      value = _numbers(tf, value)
      if value:
        kept[key] = value
    elif tf.as_dtype(value.dtype) != tf.string:
      kept[key] = value
  return kept


def _is_dicts(spec: Any) -> bool:
  if isinstance(spec, Mapping):
    return all(map(_is_dicts, spec.values()))
  return not isinstance(spec, (tuple, list))


def _is_endless(tf: Any, dataset: Any) -> bool:
  """Returns whether a dataset has no end, as far as can be known.

  Behind a filter, tf.data knows it of the filter's input only.
  """
  known = dataset.cardinality()
  if known != tf.data.UNKNOWN_CARDINALITY:
    return bool(known == tf.data.INFINITE_CARDINALITY)
  kind = type(dataset).__name__
  inputs = [_is_endless(tf, x) for x in dataset._inputs()]
  if kind == '_ConcatenateDataset':
    return any(inputs)
  if kind == '_ZipDataset':
    return all(inputs)
  # What else has several inputs may end with one of them.
  ends = kind in ('_TakeDataset', '_TakeWhileDataset') or len(inputs) != 1
  return not ends and inputs[0]


def _check_elements(tf: Any, dataset: Any, name: str) -> None:
  """Refuses elements that cannot become a batch of arrays."""
  spec = dataset.element_spec
  if not isinstance(spec, Mapping):
    raise TypeError(
      f'The dataset of {name} has elements {spec}; expected dicts. Append'
      " .map(lambda *x: {'x': x[0], ...})."
    )
  if not _is_dicts(spec):
    raise TypeError(
      f'The dataset of {name} has elements {spec}; expected dicts of dicts of'
      ' tensors. Append a .map that gives the parts of tuples and lists names.'
    )
  odd = [x for x in tf.nest.flatten(spec) if not isinstance(x, tf.TensorSpec)]
  if odd:
    raise TypeError(
      f'The dataset of {name} has elements {spec}; expected dense tensors of'
      ' fixed shapes. Append a .map that pads them (to_tensor, to_dense).'
    )
  if not tf.nest.flatten(_numbers(tf, spec)):
    raise ValueError(
      f'The dataset of {name} has no numbers, only {spec}. Tokenize or drop'
      ' strings: no device holds them.'
    )
