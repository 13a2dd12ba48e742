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
  all hosts. Use it if the function is cheap.
- `ShardedTfDataInput`: the function gives each host its own part, and a host
  reads only that. A position is valid for this host of this number of hosts. An
  epoch that does not repeat must end on all hosts after the same number of
  batches: if tf.data does not know the number of records, each host counts all
  parts, in one pass, when it first reaches the end of its own.

A position is an epoch and the number of its records that were given. To reach
it, the epoch is built again from its seed and read up to there. That takes as
long as reading takes, but a position is small, exact in the middle of a
shuffle, and needs no file.

So an epoch must be the same each time it is built. While it is built, its seed
is TensorFlow's global seed, for operations without a seed of their own. With
`op_determinism=True`, the default, the first dataset turns on TensorFlow's
`tf.config.experimental.enable_op_determinism` for the whole process, and warns
so: parallel parts of a pipeline then keep their order, even those with
`deterministic=False`, and those that draw random numbers or call Python run
sequentially, which is slower. `tf.random.stateless_*` and
`tf.numpy_function(..., stateful=False)`, for functions whose result depends on
their arguments only, stay parallel. A pipeline that consists of such functions
needs no `op_determinism`. Python's random numbers must be drawn from `seed`.

TensorFlow is imported when the first input is made, and never touches a GPU.

Shapes: B rows of this host, G rows of a global batch.
"""

from __future__ import annotations

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

from jaxline.inputs import base

# Records that are read at once to count them.
_COUNTED_AT_ONCE = 256

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
  # A run shows no information of this library.
  logging.warning(
    'TensorFlow runs deterministically from now on, in the whole process'
    ' (tf.config.experimental.enable_op_determinism), so that a resumed run'
    ' reads the same data. The field op_determinism=False leaves it as it is.'
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

  A previous global seed is set again; without one, this seed stays set.

  Args:
    seed: of all random operations.
    make: builds a dataset.
    op_determinism: whether to turn TensorFlow's on; it stays on.
  """
  tf = import_tensorflow()
  from tensorflow.python.eager import context

  with _building:
    before = context.global_seed()
    tf.random.set_seed(seed)
    # Not before: without any seed, random operations would refuse from then on.
    if op_determinism:
      _enable_op_determinism()
    try:
      return make(seed)
    finally:
      if before is not None:
        tf.random.set_seed(before)


@dataclasses.dataclass(kw_only=True, eq=False)
class EpochInput(base.ResumableInput):
  """Reads datasets that hold one epoch each; a subclass builds them.

  With `ANY_NUMBER_OF_HOSTS`, the dataset is that of all hosts, and a host keeps
  its rows of each global batch; without, it is that of one host.

  Attributes:
    drop_remainder: whether to leave out the end instead, if it does not fill a
      batch on all hosts. If epochs repeat, there is no such end: a batch
      continues with the next epoch.
    op_determinism: whether TensorFlow is made deterministic; see the top of
      this module. False is for pipelines that give the same without it.
  """

  drop_remainder: bool = False
  op_determinism: bool = True

  # The epoch, and how many of its records were given.
  _first: ClassVar[Mapping[str, Any]] = {'epoch': 0, 'record': 0}

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.drop_remainder and self.reset_for_eval:
      raise ValueError(
        f'{self.name} has reset_for_eval=True and drop_remainder=True: an'
        ' evaluation on one epoch would not see all of it. Set'
        ' drop_remainder=False.'
      )
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

  def _start(self) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    """Yields batches from the position on, each with the position behind it.

    To reach the position takes as long as reading up to there.
    """
    is_global = self.ANY_NUMBER_OF_HOSTS
    rows = self.get_global_batch_size() if is_global else self.batch_size
    epoch, record = self._at['epoch'], self._at['record']
    # Epoch -> its records, for epochs that were read to their end.
    sizes: dict[int, int] = {}
    for batch in self._read(rows, sizes):
      record += rows
      while record > sizes.get(epoch, record):
        record -= sizes.pop(epoch)
        epoch += 1
      if is_global:
        batch = host_rows(self, batch)
      if not self.repeat:
        batch = base.pad_rows(batch, self.batch_size)
      yield batch, {'epoch': epoch, 'record': record}

  def _read(self, rows: int, sizes: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yields batches of `rows`, the last maybe of fewer, from the position."""
    batches = rebatch(self._chunks(rows, sizes), rows)
    if self.repeat:
      yield from batches
      return
    has_own_end = not self.ANY_NUMBER_OF_HOSTS and self.num_infeed_hosts != 1
    for batch in batches:
      if self.drop_remainder and (
        base.num_rows(batch) < rows
        or (has_own_end and self._at['record'] + rows > self._common_end)
      ):
        return
      yield batch
    if has_own_end and self._at['record'] < self._common_end:
      assert self.num_infeed_hosts is not None
      parts = (self._build(0, host) for host in range(self.num_infeed_hosts))
      some = next(x for part in parts for x in self._batched(part.take(1), 1))
      while self._at['record'] < self._common_end:
        yield choose(some, slice(0))

  def _chunks(
    self, rows: int, sizes: dict[int, int]
  ) -> Iterator[dict[str, Any]]:
    """Yields the records from the position on, at most `rows` at once."""
    assert self.infeed_host_index is not None
    epoch, record = self._at['epoch'], self._at['record']
    while True:
      size = record
      dataset = self._build(epoch, self.infeed_host_index)
      for chunk in self._batched(dataset.skip(record), rows):
        size += base.num_rows(chunk)
        yield chunk
      if not self.repeat:
        return
      if not size:
        raise ValueError(
          f'{self.name} has no records in epoch {epoch} for host'
          f' {self.infeed_host_index} of {self.num_infeed_hosts}. Check what'
          ' the dataset reads and filters out; each host needs some.'
        )
      sizes[epoch] = size
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
      raise ValueError(
        f'The dataset of {self.name} has no end, and repeat=False. Let it be'
        ' one epoch: leave out .repeat(), or append .take(n).'
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

  @functools.cached_property
  def _common_end(self) -> int:
    """Returns the records of the batches that all hosts give, per host."""
    assert self.num_infeed_hosts is not None
    sizes = [self._count(host) for host in range(self.num_infeed_hosts)]
    batches = (
      min(sizes) // self.batch_size
      if self.drop_remainder
      else -(-max(sizes) // self.batch_size)
    )
    return batches * self.batch_size

  def _count(self, host_index: int, epoch: int = 0) -> int:
    """Returns how many records there are in a host's part of an epoch."""
    dataset = self._build(epoch, host_index)
    known = int(dataset.cardinality())
    if known >= 0:
      return known
    return sum(map(base.num_rows, self._batched(dataset, _COUNTED_AT_ONCE)))

  def identity(self) -> dict[str, Any]:
    """Returns what fixes the order."""
    return {**super().identity(), 'seed': self.seed(), 'repeat': self.repeat}

  def where(self) -> str:
    """Returns the first record of the next batch."""
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
    """Returns the dataset of the function, shuffled."""
    host = {'host_index': host_index, 'num_hosts': self.num_infeed_hosts}
    host = {} if self.ANY_NUMBER_OF_HOSTS else host
    dataset = self.dataset(seed=seed, **host)
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


def choose(batch: Any, rows: slice) -> Any:
  """Returns some rows of a batch."""
  return jax.tree.map(lambda x: x[rows], batch)


def host_rows(source: base.BaseInput, batch: Any) -> Any:
  """Returns the rows of a global batch that are those of an input's host."""
  assert source.infeed_host_index is not None
  first = source.infeed_host_index * source.batch_size
  return choose(batch, slice(first, first + source.batch_size))


def rebatch(batches: Iterable[Any], rows: int) -> Iterator[Any]:
  """Yields the rows of batches, `rows` at a time; the last may have fewer."""
  parts: list[Any] = []
  have = 0

  def join() -> Any:
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

  for batch in batches:
    parts.append(batch)
    have += base.num_rows(batch)
    if have < rows:
      continue
    joined, parts = join() if parts[1:] else batch, []
    while have >= rows:
      yield choose(joined, slice(rows))
      have -= rows
      joined = choose(joined, slice(rows, None))
    if have:
      parts = [joined]
  if have:
    yield join()


def to_batch(source: base.BaseInput, given: Any) -> dict[str, Any]:
  """Returns tensors as a batch of arrays, for an input.

  Strings are left out where devices would get them: in training and with
  several hosts.

  Args:
    source: the input.
    given: mappings, lists and tuples of tensors (anything with `numpy()` or
      that NumPy takes).

  Raises:
    TypeError: it makes no batch.
  """
  keep_strings = not source.is_training and source.num_infeed_hosts == 1
  batch = _to_arrays(given, '', keep_strings)
  if not isinstance(batch, dict):
    raise TypeError(
      f'The data of {source.name} is {type(given).__name__}; expected dicts (of'
      ' dicts) of dense tensors, at least one of them of numbers. Name, pad or'
      ' tokenize them.'
    )
  return batch


def _to_arrays(x: Any, path: str, keep_strings: bool) -> Any:
  """Returns dicts and lists of arrays; None where nothing is left."""
  if isinstance(x, Mapping):
    found = {
      key: _to_arrays(value, f'{path}.{key}', keep_strings)
      for key, value in x.items()
    }
    return {key: y for key, y in found.items() if y is not None} or None
  if isinstance(x, list | tuple):
    values = [_to_arrays(value, path, keep_strings) for value in x]
    return [y for y in values if y is not None] or None
  array = np.asarray(x.numpy() if hasattr(x, 'numpy') else x)
  if array.dtype.kind not in 'OSU':
    return array
  if not all(isinstance(v, bytes | str) for v in array.flat):
    raise TypeError(
      f'The entry {path[1:]} is {type(x).__name__}, which is no dense tensor.'
      ' Remove it, or make it dense.'
    )
  return array if keep_strings else None
