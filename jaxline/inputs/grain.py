"""Any Grain dataset, any random-access data source, ArrayRecord files.

  GrainInput(files='/data/train-*.array_record', transformations=[decode], ...)
  GrainInput(dataset=grain.MapDataset.source(records).map(f), ...)
  GrainInput(dataset=lambda host_index, num_hosts: stream(...), ...)

Records that have numbers (files, a `grain.MapDataset`, anything with `__len__`
and `__getitem__`) are shuffled, divided among hosts and counted by
`IndexedInput`: any number of hosts, one-epoch evaluation, exact positions. A
`grain.IterDataset` is a stream: the code that makes it divides it among the
hosts, and the position is that of Grain's iterator, for the same host of the
same number of hosts.

Records with numbers do not use Grain's nodes for shuffling, repeating and
batching, which cost time for every record: making the order of a whole epoch at
once, and reading the records of a batch in one call, is faster than plain
Grain.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import os
import sys
from typing import Any

import numpy as np

from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import indexed

# Grain's nodes that leave records out. (Grain gives them no public names.)
_SPARSE_NODES = ('FilterMapDataset', 'FlatMapMapDataset')
_BATCH_NODES = ('BatchMapDataset', 'BatchIterDataset')
_MAX_OPENING_THREADS = 64
_TUPLE = '__tuple__'  # The key of what is one, in JSON.


@dataclasses.dataclass(kw_only=True, eq=False)
class GrainInput(indexed.IndexedInput):
  """Records that Grain can read, each a dict of arrays, as batches of them.

  Of an `IterDataset`, `shuffle` means nothing and `num_threads` must be 0 (see
  `to_iter_dataset`); one-epoch evaluation needs one host, since nobody knows
  how many records a stream has. With `repeat` it begins again at its end: in
  the same order, unless it is made by a function that takes `epoch`.

  Attributes:
    dataset: one of
      - a `grain.MapDataset`, finite, neither filtered nor batched;
      - anything with `__len__` and `__getitem__`; its `__getitems__`, if there
        is one, gets the numbers of a whole batch, as a list;
      - a `grain.IterDataset` of records, not batched, for one host; it ends
        where it raises `StopIteration`, even if a function of its own does;
      - a function that returns one of these. It is called with those of
        `host_index`, `num_hosts`, `seed` and `epoch` that it has as arguments;
        the first two it must have if it returns an `IterDataset` and there are
        several hosts, and then return the part of that host.
    files: ArrayRecord files instead: a path, a glob, or several.
    transformations: what to do with each record, in this order: functions,
      `grain.transforms.Map`, or `grain.transforms.RandomMap`, whose generator
      depends on the seed, the record and the epoch alone. For a stream, all
      that `IterDataset.apply` accepts, except batches.
    collate: makes the batch, a dict of arrays [b, ...], of a list of b records;
      None stacks arrays of equal shapes.
    data_name: identifies the data: a state that was saved with another name is
      refused. Files are also identified by names, sizes and numbers of records;
      other datasets without a name only by their number of records.
  """

  dataset: Any = None
  files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
  transformations: Sequence[Any] = ()
  collate: Callable[[list[Any]], Mapping[str, Any]] | None = None
  data_name: str = ''

  def __post_init__(self) -> None:
    super().__post_init__()
    if (self.dataset is None) == (not self.files):
      raise ValueError(
        f'{self.name} needs one of dataset and files, got'
        f' {"neither" if self.dataset is None else "both"}.'
      )
    if isinstance(self.transformations, str) or not isinstance(
      self.transformations, Sequence
    ):
      raise TypeError(
        f'{self.name}.transformations is {self.transformations!r}; expected a'
        ' list: transformations=[f].'
      )
    if self.collate is not None and not callable(self.collate):
      raise TypeError(
        f'{self.name}.collate is {self.collate!r}; expected a function of a'
        ' list of records, or None.'
      )
    import grain  # Takes a second to import.

    # Of files: where each ends in the numbering of the records.
    self._paths: list[str] = []
    self._ends: list[int] = []
    self._files_hash = ''
    self._arguments: dict[str, Any] | None = None
    if self.files:
      self._paths = _find_files(self.files)
      self._ends = _find_ends(self._paths)
      self._files_hash = _hash_files(self._paths, self._ends)
      self._records: Any = grain.sources.ArrayRecordDataSource(self._paths)
    elif isinstance(self.dataset, grain.IterDataset) or not _is_function(
      self.dataset
    ):
      self._records = self.dataset
    else:
      self._arguments = self._choose_arguments()
      self._records = self._make(epoch=0)
    self._is_stream = isinstance(self._records, grain.IterDataset)
    if self._is_stream:
      self._check_stream()
      # Of this host alone; see `BaseInput`.
      self.ANY_NUMBER_OF_HOSTS = False  # type: ignore[misc]
    else:
      self._check_records()
      self._steps = [self._step(t) for t in self.transformations]
      self._num_records = len(self._records)
      self._is_map_dataset = isinstance(self._records, grain.MapDataset)
    # Of a stream, the position of the next batch, and the epoch and number of
    # the next record.
    self._at = _position(0, 0, None)
    self._reading = 0, 0

  # The dataset and its transformations.

  def _choose_arguments(self) -> dict[str, Any]:
    """Returns the arguments of the function that makes the dataset."""
    return base.choose_arguments(
      self.dataset,
      f'{self.name}.dataset',
      {
        'host_index': self.infeed_host_index,
        'num_hosts': self.num_infeed_hosts,
        'seed': self.seed(),
        'epoch': 0,  # Of the first.
      },
    )

  def _make(self, epoch: int) -> Any:
    assert self._arguments is not None
    arguments = dict(self._arguments)
    if 'epoch' in arguments:
      arguments['epoch'] = epoch
    return _call(functools.partial(self.dataset, **arguments))

  def _check_records(self) -> None:
    import grain

    records = self._records
    if isinstance(records, (Mapping, str, bytes, type)) or not (
      hasattr(records, '__len__') and hasattr(records, '__getitem__')
    ):
      what = type(records).__name__
      if isinstance(records, type):
        what = f'the class {records.__name__}'
      raise TypeError(
        f'{self.name}.dataset is {what}; expected a'
        ' grain.MapDataset, a grain.IterDataset, a data source with __len__ and'
        ' __getitem__, or a function that returns one of these.'
      )
    dealt = {'host_index', 'num_hosts', 'epoch'} & set(self._arguments or ())
    if dealt:
      raise ValueError(
        f'{self.name}.dataset takes {sorted(dealt)} and returns records with'
        ' numbers, which the input deals out and shuffles itself: each host'
        ' would read a part of its part. Let it return all of them.'
      )
    if not isinstance(records, grain.MapDataset):
      return
    if len(records) == sys.maxsize:
      raise ValueError(
        f'{self.name}.dataset has no end; leave out its .repeat(): the input'
        ' begins again by itself, with repeat=True.'
      )
    self._refuse_batches()
    sparse = [n for n in _node_names(records) if n in _SPARSE_NODES]
    if sparse:
      raise ValueError(
        f'{self.name}.dataset leaves records out ({sparse[0]}), and their'
        ' numbers would no longer tell how many were read. Filter the data'
        ' beforehand, or give the stream: .to_iter_dataset() behind the filter.'
      )

  def _check_stream(self) -> None:
    if self.num_infeed_hosts != 1:
      if not {'host_index', 'num_hosts'} <= set(self._arguments or ()):
        raise ValueError(
          f'{self.name} has {self.num_infeed_hosts} hosts, and all of them'
          ' would read the same IterDataset. Give a function that takes'
          ' host_index and num_hosts and returns the part of that host.'
        )
      if not self.repeat:
        raise ValueError(
          f'{self.name} has {self.num_infeed_hosts} hosts and repeat=False: of'
          ' an IterDataset nobody knows how many records it has, and the hosts'
          ' would end after different numbers of batches. Give a'
          ' grain.MapDataset, or set repeat=True and evaluate on'
          ' eval_loop_num_batches.'
        )
    if not self.repeat and _has_no_end(self._records):
      raise ValueError(
        f'{self.name}.dataset has no end and {self.name}.repeat is False: one'
        ' epoch of it would never end. Leave out its .repeat(); where it shall'
        ' begin again, set repeat=True.'
      )
    if self.num_threads:
      raise ValueError(
        f'{self.name}.num_threads is {self.num_threads}, and its dataset an'
        ' IterDataset, which has threads of its own: set them with'
        ' .to_iter_dataset(grain.ReadOptions(num_threads=...)).'
      )
    self._refuse_batches()
    for transformation in self.transformations:
      known = isinstance(transformation, _stream_transformations())
      if not known and not callable(transformation):
        raise TypeError(
          f'{self.name}.transformations has {transformation!r}; expected'
          ' functions of a record, or any of grain.transforms but Batch.'
        )

  def _refuse_batches(self) -> None:
    # A later node of a stream may take batches apart again.
    nodes = (
      [type(self._records).__name__]
      if self._is_stream
      else _node_names(self._records)
    )
    if any(node in _BATCH_NODES for node in nodes):
      raise ValueError(
        f'{self.name}.dataset is batched; leave out its .batch(): the input'
        ' makes the batches, of batch_size and with `collate`.'
      )

  def _step(self, transformation: Any) -> tuple[Callable[..., Any], bool]:
    """Returns a function of a record, and whether it takes a generator."""
    import grain

    if isinstance(transformation, grain.transforms.Map):
      return transformation.map, False
    if isinstance(transformation, grain.transforms.RandomMap):
      return transformation.random_map, True
    if callable(transformation):
      return transformation, False
    raise TypeError(
      f'{self.name}.transformations has {transformation!r}; expected functions'
      ' of a record, grain.transforms.Map or RandomMap. What leaves records out'
      ' or makes several of one needs a stream: an IterDataset.'
    )

  def _collate(self, records: list[Any]) -> dict[str, Any]:
    import grain

    if self.collate is not None:
      batch = self.collate(records)
    else:
      batch = grain.experimental.batch_and_pad(records, batch_size=len(records))
    if not isinstance(batch, Mapping):
      raise TypeError(
        f'{self.name} made {type(batch).__name__} of records of type'
        f' {type(records[0]).__name__}; expected a dict of arrays. Name what a'
        " record has: transformations=[..., lambda x: {'x': x}]."
      )
    return dict(batch)

  # Records with numbers: the methods of `IndexedInput`.

  def num_records(self) -> int:
    """Returns how many records the dataset has; none may be told of streams."""
    return self._num_records

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    """Returns the records with these numbers, transformed and stacked."""
    numbers = records.tolist()
    if self._is_map_dataset:
      # Grain's own numbering over epochs: its random nodes differ in each.
      offsets = (epochs * self._num_records).tolist()
      elements = [
        self._records[offset + number]
        for offset, number in zip(offsets, numbers, strict=True)
      ]
    elif hasattr(self._records, '__getitems__'):
      elements = list(self._records.__getitems__(numbers))
    else:
      elements = [self._records[number] for number in numbers]
    for i, element in enumerate(elements):
      for stage, (function, is_random) in enumerate(self._steps):
        if is_random:
          rng = self._generator(stage, int(epochs[i]), numbers[i])
          element = function(element, rng)
        else:
          element = function(element)
      if element is None:
        raise ValueError(
          f'Record {numbers[i]} is None; expected a dict of arrays. Records'
          ' cannot be left out where they have numbers: filter the data'
          ' beforehand, or give a grain.IterDataset.'
        )
      elements[i] = element
    return self._collate(elements)

  def _generator(
    self, stage: int, epoch: int, record: int
  ) -> np.random.Generator:
    return np.random.Generator(
      np.random.Philox(
        # Epochs below 2**63 are the keys of the order.
        key=np.array([self.seed() % 2**64, 2**63 + stage], np.uint64),
        counter=np.array([0, 0, epoch, record], np.uint64),
      )
    )

  def describe_record(self, record: int, epoch: int) -> str:
    """Returns the file and the place in it, where there are files."""
    if not self._paths:
      return super().describe_record(record, epoch)
    file = bisect.bisect_right(self._ends, record)
    first = self._ends[file - 1] if file else 0
    return f'{self._paths[file]}, record {record - first}'

  def data_identity(self) -> dict[str, Any]:
    """Returns the identity of the data."""
    return {'data_name': self.data_name, 'files': self._files_hash}

  # Streams.

  def get_next(self) -> dict[str, Any]:
    """Returns this host's rows of the next batch."""
    if not self._is_stream:
      return super().get_next()
    with indexed.closed_on_error(self):
      records, position = self._take()
      if records:
        batch = self._make_batch(records)
    if not records:
      self._at = {**self._at, 'ended': True}
      raise StopIteration
    self._at = position
    return batch if self.repeat else base.pad_rows(batch, self.batch_size)

  def _make_batch(self, records: list[Any]) -> dict[str, Any]:
    """Returns the batch of a stream's records, all of them."""
    batch: dict[str, Any] = _call(self._collate, records)
    self._check_rows(batch, len(records))
    return batch

  def _take(self) -> tuple[list[Any], dict[str, Any]]:
    """Returns the next records of the stream, and the position behind them.

    There are fewer than `batch_size` at the end of the data only.
    """
    epoch, record = self._at['epoch'], self._at['record']
    ended = self._at['ended']
    if self._iterator is None and not ended:
      if record and self._at['grain'] is None:
        raise RuntimeError(
          f'{self.name} was closed behind record {record} of epoch {epoch} of'
          ' its stream, and cannot go on there, since its position is not'
          ' saved. Call reset() to begin anew, or set'
          ' input_checkpointing_enabled=True.'
        )
      self._iterator = self._start_stream(epoch, self._at['grain'])
    records: list[Any] = []
    while len(records) < self.batch_size and not ended:
      self._reading = epoch, record
      try:
        element = next(self._iterator)
        records.append(
          indexed.own_arrays(element) if self.num_workers else element
        )
        record += 1
      except StopIteration:
        if not self.repeat:
          # Not asked again: who gives an end by mistake may give more behind.
          ended = True
          break
        if not record:
          raise ValueError(
            f'{self.name} has no records: epoch {epoch} of its stream is empty.'
          ) from None
        self.close()
        epoch, record = epoch + 1, 0
        self._iterator = self._start_stream(epoch, None)
    if not records or not self.saves_position:
      return records, _position(epoch, record, None, ended)
    state = self._iterator.get_state()
    text = _to_json(state)
    if self._at['grain'] is None and _from_json(text) != state:
      raise TypeError(
        f'The position of {self.name} cannot be saved: the state of its'
        f' iterator is {state!r}; expected plain values, as JSON has them. Let'
        ' its get_state() return such, or set input_checkpointing_enabled=False'
        ' where that is no loss.'
      )
    return records, _position(epoch, record, text, ended)

  def _start_stream(self, epoch: int, state: str | None) -> Any:
    import grain

    stream = self._records
    if self._arguments is not None:
      stream = self._make(epoch)
    for stage, transformation in enumerate(self.transformations):
      if isinstance(transformation, grain.transforms.RandomMap):
        # Hosts number the records of their streams alike.
        assert self.infeed_host_index is not None
        entropy = [self.seed() % 2**64, epoch, self.infeed_host_index, stage]
        seed = np.random.SeedSequence(entropy).generate_state(1)[0]
        function = functools.partial(_call, transformation.random_map)
        stream = stream.random_map(function, seed=int(seed))
      else:
        stream = _apply(stream, transformation)
    iterator = indexed.start_iterator(stream, self.num_workers)
    if state is not None:
      iterator.set_state(_from_json(state))
    return iterator

  def reset(self) -> None:
    """Goes back to the first record."""
    if not self._is_stream:
      super().reset()
      return
    base.BaseInput.reset(self)
    self.set_position(_position(0, 0, None))

  def skip(self, num_batches: int) -> None:
    """Goes on behind so many batches; a stream has to read them.

    Raises:
      ValueError: there are not so many.
    """
    if not self._is_stream:
      super().skip(num_batches)
    else:
      base.BaseInput.skip(self, num_batches)

  def position(self) -> dict[str, Any]:
    """Returns how many records were given; of a stream, Grain's state too."""
    if not self._is_stream:
      return super().position()
    return self._at

  def set_position(self, position: dict[str, Any]) -> None:
    """Reads on from where `position` was called.

    Raises:
      ValueError: it is no position of such an input.
    """
    if not self._is_stream:
      super().set_position(position)
      return
    expected = _position(0, 0, None)
    if not isinstance(position, dict) or set(position) != set(expected):
      raise ValueError(
        f'{self.name}.set_position got {position!r}; expected what position()'
        f' returned, a dict of {", ".join(expected)}.'
      )
    self.close()
    self._at = position
    self._reading = position['epoch'], position['record']

  def identity(self) -> dict[str, Any]:
    """Returns what the order depends on; a stream's: host and workers too."""
    if not self._is_stream:
      return super().identity()
    return {
      'num_infeed_hosts': self.num_infeed_hosts,
      'infeed_host_index': self.infeed_host_index,
      'num_workers': self.num_workers,
      'repeat': self.repeat,
      'seed': self.seed(),
      'data_name': self.data_name,
    }

  def where(self) -> str:
    """Returns which record is being read; of files, in which one."""
    if not self._is_stream:
      return super().where()
    epoch, record = self._reading
    return (
      f'record {record} of epoch {epoch} of the stream of host'
      f' {self.infeed_host_index}/{self.num_infeed_hosts}'
    )


def _position(
  epoch: int, record: int, state: str | None, ended: bool = False
) -> dict[str, Any]:
  """Returns a stream's position: the next record, and Grain's state as JSON.

  As text, since Grain goes on with the dict that it gave.
  """
  return {'epoch': epoch, 'record': record, 'grain': state, 'ended': ended}


def _call(function: Callable[..., Any], *args: Any) -> Any:
  """Calls a function, whose errors are not the end of a stream."""
  try:
    return function(*args)
  except Exception as e:
    error = indexed.not_an_end(e)
    if error is e:
      raise
    raise error from e


def _apply(stream: Any, transformation: Any) -> Any:
  """Returns a stream with a transformation that is not random."""
  import grain

  if isinstance(transformation, grain.experimental.FlatMapTransform):

    class FlatMap(grain.experimental.FlatMapTransform):
      max_fan_out = transformation.max_fan_out

      def flat_map(self, element: Any) -> Any:
        return _call(transformation.flat_map, element)

    return stream.apply(FlatMap())
  for kind, name in (
    (grain.transforms.Map, 'map'),
    (grain.transforms.MapWithIndex, 'map_with_index'),
    (grain.transforms.Filter, 'filter'),
  ):
    if isinstance(transformation, kind):  # Its method and Grain's: one name.
      function = functools.partial(_call, getattr(transformation, name))
      return getattr(stream, name)(function)
  return stream.map(functools.partial(_call, transformation))


def _is_function(x: Any) -> bool:
  return callable(x) and not hasattr(x, '__getitem__')


def _stream_transformations() -> tuple[type, ...]:
  import grain

  names = ('Map', 'RandomMap', 'MapWithIndex', 'Filter')
  kinds = [getattr(grain.transforms, name) for name in names]
  return *kinds, grain.experimental.FlatMapTransform


def _node_names(dataset: Any) -> list[str]:
  """Returns the classes of a dataset and of all that it is made of."""
  names = [type(dataset).__name__]
  for parent in dataset.parents:
    names += _node_names(parent)
  return names


def _has_no_end(dataset: Any) -> bool:
  """Returns whether a dataset says that it never ends."""
  import grain

  if isinstance(dataset, grain.MapDataset):
    return len(dataset) == sys.maxsize
  name = type(dataset).__name__
  if name == 'LimitIterDataset':
    return False
  if name == 'RepeatIterDataset' and dataset._num_epochs is None:
    return True
  # What zips or mixes several ends with the first of them.
  return bool(dataset.parents) and all(map(_has_no_end, dataset.parents))


def _find_files(
  files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[str]:
  """Returns the paths of files: of a glob sorted, of several in their order."""
  if isinstance(files, (str, os.PathLike)):
    files = [files]
  paths: list[str] = []
  for entry in files:
    path = os.path.expanduser(os.fspath(entry))
    found = [path]
    if not os.path.isfile(path):
      found = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not found:
      raise errors.MissingFileError(
        f'No files found: {path!r} names none. Give the path of an ArrayRecord'
        ' file, a glob, or a list of these.'
      )
    paths += found
  counts = collections.Counter(os.path.realpath(path) for path in paths)
  twice = [path for path, count in counts.items() if count > 1]
  if twice:
    raise ValueError(
      f'{len(twice)} files are given twice, {twice[0]!r} the first: their'
      ' records would be read twice an epoch.'
    )
  return paths


def _find_ends(paths: list[str]) -> list[int]:
  """Returns how many records the files have up to the end of each."""
  import grain

  def count(path: str) -> int:
    try:
      return len(grain.sources.ArrayRecordDataSource(path))
    except Exception as e:
      e.add_note(f'While {path} was opened as an ArrayRecord file.')
      raise

  threads = min(len(paths), _MAX_OPENING_THREADS)
  with futures.ThreadPoolExecutor(threads) as pool:
    return list(itertools.accumulate(pool.map(count, paths)))


def _hash_files(paths: list[str], ends: list[int]) -> str:
  """Returns a hash of the files' names, sizes and numbers of records."""
  facts = [
    [os.path.basename(path), os.path.getsize(path), end]
    for path, end in zip(paths, ends, strict=True)
  ]
  return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _to_json(state: Any) -> str:
  """Returns the state of an iterator as text; non-JSON values by their repr.

  Tuples stay tuples: Grain compares with some, and would resume elsewhere.
  """

  def mark(x: Any) -> Any:
    if isinstance(x, dict):
      return {key: mark(value) for key, value in x.items()}
    if isinstance(x, list):
      return list(map(mark, x))
    return {_TUPLE: list(map(mark, x))} if isinstance(x, tuple) else x

  return json.dumps(mark(state), default=repr)


def _from_json(text: str) -> Any:
  """Returns the state of which `_to_json` made a text."""
  return json.loads(
    text, object_hook=lambda x: tuple(x[_TUPLE]) if _TUPLE in x else x
  )
