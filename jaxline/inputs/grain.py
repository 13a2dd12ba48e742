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

The records of a batch are read in one call where the source can do that
(`__getitems__`, as ArrayRecord files can), which Grain's nodes do not use.
"""

from __future__ import annotations

import bisect
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

from etils import epath
import numpy as np

from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import indexed

_TUPLE = '__tuple__'  # The key of what is one, in JSON.


@dataclasses.dataclass(kw_only=True, eq=False)
class GrainInput(indexed.IndexedInput):
  """Records that Grain can read, each a dict of arrays, as batches of them.

  Of an `IterDataset`, `shuffle` and `num_threads` mean nothing (see
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
    files: ArrayRecord files instead: a path, a glob, or several, also of what
      `etils.epath` can read ('gs://...'), where a glob has no '**'.
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
      self.refuse('files', 'some without a dataset, or none with one')
    import grain  # Takes a second to import.

    # Of files: where each ends in the numbering of the records.
    self._paths: list[str] = []
    self._ends: list[int] = []
    self._files_hash = ''
    self._arguments: dict[str, Any] = {}
    self._records: Any = self.dataset
    if self.files:
      self._paths = _find_files(self.files)
      self._ends = _find_ends(self._paths)
      self._files_hash = _hash_files(self._paths, self._ends)
      self._records = grain.sources.ArrayRecordDataSource(self._paths)
    elif callable(self.dataset) and not hasattr(self.dataset, '__getitem__'):
      self._records = self._make(epoch=0)
    self._is_stream = isinstance(self._records, grain.IterDataset)
    if self._is_stream:
      self._check_stream()
      # Of this host alone; see `BaseInput`.
      self.ANY_NUMBER_OF_HOSTS = False  # type: ignore[misc]
      first = {'epoch': 0, 'record': 0, 'grain': None, 'ended': False}
      self._at = self._first = first  # type: ignore[misc]
      self._reading = 0, 0  # The epoch and number of the record.
    else:
      self._check_records()

  # The dataset and its transformations.

  def _make(self, epoch: int) -> Any:
    """Returns what the function makes, where the dataset is one."""
    arguments = {
      'host_index': self.infeed_host_index,
      'num_hosts': self.num_infeed_hosts,
      'seed': self.seed(),
      'epoch': epoch,
    }
    self._arguments = base.choose_arguments(self.dataset, arguments)
    make = functools.partial(self.dataset, **self._arguments)
    return indexed.call_without_end(make)

  def _check_records(self) -> None:
    import grain

    dealt = {'host_index', 'num_hosts', 'epoch'} & set(self._arguments)
    if dealt:
      raise ValueError(
        f'{self.name}.dataset takes {sorted(dealt)} and returns records with'
        ' numbers, which the input deals out and shuffles itself: each host'
        ' would read a part of its part. Let it return all of them.'
      )
    if len(self._records) == sys.maxsize:
      raise ValueError(
        f'{self.name}.dataset repeats without end, so that it has no epochs.'
        ' Leave out .repeat().'
      )
    # Functions of a record, and whether they take a generator.
    self._steps: list[tuple[Callable[..., Any], bool]] = []
    for t in self.transformations:
      is_random = isinstance(t, grain.transforms.RandomMap)
      function = t.map if isinstance(t, grain.transforms.Map) else t
      function = t.random_map if is_random else function
      self._steps.append((function, is_random))

  def _check_stream(self) -> None:
    if self.num_infeed_hosts != 1 and not (
      self.repeat and {'host_index', 'num_hosts'} <= set(self._arguments)
    ):
      raise ValueError(
        f'{self.name} has {self.num_infeed_hosts} hosts, and its IterDataset'
        ' would be the same on all of them, or (repeat=False) end after'
        ' different numbers of batches. Give a function that takes host_index'
        ' and num_hosts and returns the part of that host, and set repeat=True;'
        ' or give a grain.MapDataset.'
      )

  def _collate(self, records: list[Any]) -> Any:
    import grain

    if self.collate is not None:
      return self.collate(records)
    return grain.experimental.batch_and_pad(records, batch_size=len(records))

  # Records with numbers: the methods of `IndexedInput`.

  def num_records(self) -> int:
    """Returns how many records the dataset has; none may be told of streams."""
    return len(self._records)

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    """Returns the records with these numbers, transformed and stacked."""
    import grain

    numbers = records.tolist()
    if isinstance(self._records, grain.MapDataset):
      # Grain's own numbering over epochs: its random nodes differ in each.
      indices = (epochs * len(self._records) + records).tolist()
      elements = [self._records[i] for i in indices]
    elif hasattr(self._records, '__getitems__'):
      elements = list(self._records.__getitems__(numbers))
    else:
      elements = [self._records[number] for number in numbers]
    for i, element in enumerate(elements):
      elements[i] = self._transform(element, int(epochs[i]), numbers[i])
    return self._collate(elements)

  def _transform(self, element: Any, epoch: int, record: int) -> Any:
    for stage, (function, is_random) in enumerate(self._steps):
      if is_random:
        numbers = indexed.record_generator(self.seed(), stage, epoch, record)
        element = function(element, numbers)
      else:
        element = function(element)
    return element

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

  def _take(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the next batch, and the position behind it."""
    if not self._is_stream:
      return super()._take()
    epoch, record = self._at['epoch'], self._at['record']
    ended = self._at['ended']
    records: list[Any] = []
    while len(records) < self.batch_size and not ended:
      self._reading = epoch, record
      try:
        records.append(next(self._iterator))
        record += 1
      except StopIteration:
        ended = not self.repeat
        if self.repeat and not record:
          raise ValueError(
            f'{self.name} has no records: epoch {epoch} of its stream is empty.'
          ) from None
        if self.repeat:
          self.close()
          epoch, record = epoch + 1, 0
          self._iterator = self._start_epoch(epoch, None)
    if not records:
      raise StopIteration
    if self.num_workers:
      records = indexed.own_arrays(records)
    batch = indexed.call_without_end(self._collate, records)
    batch = self._checked(batch, len(records))
    text = None  # The state as text, since Grain changes the dict that it gave.
    if self.saves_position:
      state = self._iterator.get_state()
      text = _to_json(state)
      # JSON would turn keys that are numbers into text.
      if self._at['grain'] is None and _from_json(text) != state:
        raise TypeError(
          f'The position of {self.name} cannot be saved: the state of its'
          f' iterator is {state!r}; expected plain values, as JSON has them. Or'
          ' set input_checkpointing_enabled=False where that is no loss.'
        )
    # It is not asked again: an iterator that ends by mistake may give more.
    self._ended = ended
    if not self.repeat:
      batch = base.pad_rows(batch, self.batch_size)
    position = {'epoch': epoch, 'record': record, 'grain': text, 'ended': ended}
    return batch, position

  def _start(self) -> Any:
    """Starts to read at the position."""
    if not self._is_stream:
      return super()._start()
    epoch, record = self._reading = self._at['epoch'], self._at['record']
    if record and self._at['grain'] is None:
      raise RuntimeError(
        f'{self.name} was closed behind record {record} of epoch {epoch} of its'
        ' stream, and cannot go on there, since its position is not saved. Call'
        ' reset() to begin anew, or set input_checkpointing_enabled=True.'
      )
    return self._start_epoch(epoch, self._at['grain'])

  def _start_epoch(self, epoch: int, state: str | None) -> Any:
    stream = self._make(epoch) if self._arguments else self._records
    # Hosts number the records of their streams alike.
    assert self.infeed_host_index is not None
    entropy = [self.seed() % 2**64, epoch, self.infeed_host_index]
    seed = np.random.SeedSequence(entropy).generate_state(1)[0]
    stream = stream.seed(int(seed))
    for t in self.transformations:
      if callable(t):
        stream = stream.map(functools.partial(indexed.call_without_end, t))
      else:
        stream = stream.apply(t)
    iterator = indexed.start_iterator(stream, self.num_workers)
    if state is not None:
      iterator.set_state(_from_json(state))
    return iterator

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


def _find_files(
  files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[str]:
  """Returns the paths of files: of a glob sorted, of several in their order."""
  if isinstance(files, (str, os.PathLike)):
    files = [files]
  paths: list[str] = []
  for entry in files:
    path = os.path.expanduser(os.fspath(entry))
    place = epath.Path(path)
    found = [path]
    if not place.exists():
      if '://' in path:
        places = place.parent.glob(place.name)
        found = [os.fspath(x) for x in places if not x.is_dir()]
      else:  # Of which epath refuses '**'.
        found = list(filter(os.path.isfile, glob.glob(path, recursive=True)))
      found.sort()
    if not found:
      raise errors.MissingFileError(
        f'No files found: {path!r} names none. Give the path of an ArrayRecord'
        ' file, a glob, or a list of these.'
      )
    paths += found
  if len(set(map(os.path.realpath, paths))) < len(paths):
    raise ValueError(
      f'{files} names a file twice, whose records would be read as often an'
      ' epoch. Give each file once.'
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

  with futures.ThreadPoolExecutor() as pool:
    return list(itertools.accumulate(pool.map(count, paths)))


def _hash_files(paths: list[str], ends: list[int]) -> str:
  """Returns a hash of the files' names, sizes and numbers of records."""
  facts = [
    [os.path.basename(path), epath.Path(path).stat().length, end]
    for path, end in zip(paths, ends, strict=True)
  ]
  return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _to_json(state: Any) -> str:
  """Returns the state of an iterator as text.

  Tuples stay tuples: Grain compares with some, and would resume elsewhere.
  """

  def mark(x: Any) -> Any:
    if isinstance(x, dict):
      return {key: mark(value) for key, value in x.items()}
    if isinstance(x, list):
      return list(map(mark, x))
    return {_TUPLE: list(map(mark, x))} if isinstance(x, tuple) else x

  return json.dumps(mark(state))


def _from_json(text: str) -> Any:
  """Returns the state of which `_to_json` made a text."""
  return json.loads(
    text, object_hook=lambda x: tuple(x[_TUPLE]) if _TUPLE in x else x
  )
