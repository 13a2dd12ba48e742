"""Reads Grain datasets, random-access data sources and ArrayRecord files.

  GrainInput(files='/data/train-*.array_record', transformations=[decode], ...)
  GrainInput(dataset=grain.MapDataset.source(records).map(f), ...)
  GrainInput(dataset=lambda host_index, num_hosts: stream(...), ...)

Records that have numbers (files, a `grain.MapDataset`, anything with `__len__`
and `__getitem__`) are shuffled, divided among hosts and counted by
`IndexedInput`. A `grain.IterDataset` is a stream: the code that makes it
divides it among the hosts, and a position is that of Grain's iterator, for the
same host of the same number of hosts.
"""

from __future__ import annotations

import ast
import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import functools
import glob
import hashlib
import itertools
import os
import sys
from typing import Any

from etils import epath
import numpy as np

from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import indexed


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
      `etils.epath` can read ('gs://...'), where a glob has no '**'. Each file
      is read once an epoch, even if several globs match it.
    transformations: what to do with each record, in this order: functions,
      `grain.transforms.Map`, or `grain.transforms.RandomMap`, whose generator
      depends on the seed, the record and the epoch alone. For a stream, all
      that `IterDataset.apply` accepts, except batches.
    collate: makes the batch, a dict of arrays [b, ...], of a list of b records;
      None stacks the entries of (nested) dicts, which have equal shapes.
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

    # Cumulative record counts: file i holds records [ends[i - 1], ends[i]).
    self._paths: list[str] = []
    self._ends: list[int] = []
    self._files_hash = ''
    self._arguments: dict[str, Any] = {}
    if self.files:
      self._paths = _find_files(self.files)
      self._ends, self._files_hash = _count_records(self._paths)
      self._records = grain.sources.ArrayRecordDataSource(self._paths)
    else:
      self._records = self._make(epoch=0)
    self._is_map_dataset = isinstance(self._records, grain.MapDataset)
    self._is_stream = isinstance(self._records, grain.IterDataset)
    if self._is_stream:
      self._check_stream()
      # Of this host alone; see `BaseInput`.
      self.ANY_NUMBER_OF_HOSTS = False  # type: ignore[misc]
      # Epoch, record and the text of the iterator's state.
      self.FIRST = self._at = 0, 0, None  # type: ignore[misc]
    else:
      self._check_records()

  # The dataset and its transformations.

  def _make(self, epoch: int) -> Any:
    """Returns the dataset; where it is a function, that of an epoch."""
    if not callable(self.dataset) or hasattr(self.dataset, '__getitem__'):
      return self.dataset
    arguments = {
      'host_index': self.infeed_host_index,
      'num_hosts': self.num_infeed_hosts,
      'seed': self.seed(),
      'epoch': epoch,
    }
    self._arguments = base.choose_arguments(self.dataset, arguments)
    return self.dataset(**self._arguments)

  def _check_records(self) -> None:
    dealt = {'host_index', 'num_hosts', 'epoch'} & set(self._arguments)
    if dealt:
      raise ValueError(
        f'{self.name}.dataset takes {sorted(dealt)} and returns records with'
        ' numbers, which the input deals out and shuffles itself: each host'
        ' would read a part of its part. Let it return all of them.'
      )
    self._length = len(self._records)
    if self._length == sys.maxsize:
      raise ValueError(
        f'{self.name}.dataset repeats without end, so that it has no epochs.'
        ' Leave out .repeat().'
      )

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

  # Records with numbers: the methods of `IndexedInput`.

  def num_records(self) -> int:
    """Returns how many records the dataset has."""
    return self._length

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    """Returns the records with these numbers, transformed and stacked."""
    numbers = records.tolist()
    if self._is_map_dataset:
      # Grain's own numbering over epochs: its random nodes differ in each.
      indices = (epochs * self._length + records).tolist()
      elements = [self._records[i] for i in indices]
    elif hasattr(self._records, '__getitems__'):
      elements = self._records.__getitems__(numbers)
    else:
      elements = [self._records[i] for i in numbers]
    if self.transformations:
      numbered = zip(elements, epochs.tolist(), numbers, strict=True)
      elements = [self._transform(*x) for x in numbered]
    return self._collate(elements)

  def _transform(self, element: Any, epoch: int, record: int) -> Any:
    for stage, t in enumerate(self.transformations):
      if hasattr(t, 'random_map'):
        numbers = indexed.record_generator(self.seed(), stage, epoch, record)
        element = t.random_map(element, numbers)
      else:
        element = getattr(t, 'map', t)(element)
    return element

  def _collate(self, elements: list[Any]) -> Any:
    return (self.collate or _stack)(elements)

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

  def read_from(self, position: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields batches from a position on; see `ResumableInput`."""
    read = self._read_stream if self._is_stream else super().read_from
    return read(position)

  def _read_stream(
    self, position: Sequence[Any]
  ) -> Iterator[tuple[dict[str, Any], Any]]:
    epoch, record, text = position
    elements: list[Any] = []
    while self.repeat or not epoch:
      iterator = self._open(epoch, text)
      for element in iterator:
        elements.append(element)
        record += 1
        if len(elements) == self.batch_size:
          # The state as text, since Grain may change the dict that it gave.
          state = repr(iterator.get_state())
          if text is None and self.saves_position:
            _from_text(state)
          text = state
          yield self._collate(elements), (epoch, record, text)
          elements = []
      if not record:
        raise ValueError(
          f'{self.name} has no records: epoch {epoch} of its stream is empty.'
        )
      iterator.close()
      epoch, record, text = epoch + 1, 0, None
    if elements:
      yield self._collate(elements), (epoch, record, text)

  def _open(self, epoch: int, text: str | None) -> Any:
    """Returns the iterator of an epoch of the stream, at a state."""
    # Hosts number the records of their streams alike.
    assert self.infeed_host_index is not None
    entropy = [self.seed() % 2**64, epoch, self.infeed_host_index]
    seed = np.random.SeedSequence(entropy).generate_state(1)[0]
    stream = self._make(epoch).seed(int(seed))
    for t in self.transformations:
      if callable(t):
        stream = stream.map(functools.partial(indexed.call_without_end, t))
      else:
        stream = stream.apply(t)
    iterator = self.reader(stream)
    if text is not None:
      iterator.set_state(_from_text(text))
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
    """Returns the first record of the next batch; of files, in which one."""
    if not self._is_stream:
      return super().where()
    epoch, record, _ = self._at
    return (
      f'a batch from record {record} of epoch {epoch} on, of the stream of host'
      f' {self.infeed_host_index}/{self.num_infeed_hosts}'
    )


def _stack(elements: Sequence[Any]) -> Any:
  """Returns arrays [b, ...] of b records."""
  first = elements[0]
  if not isinstance(first, dict):
    return np.array(elements)  # Half the time of `np.stack`.
  if any(x.keys() != first.keys() for x in elements):
    raise ValueError(
      f'The records of a batch have different entries: {sorted(first)} and'
      ' others. Give each the same, or a `collate` function.'
    )
  batch = {}
  for key in first:
    try:
      batch[key] = _stack([x[key] for x in elements])
    except ValueError as e:
      e.add_note(f'It was the entry {key!r} of a batch.')
      raise
  return batch


def _from_text(text: str) -> Any:
  """Returns an iterator's state from its `repr`.

  Unlike JSON, it keeps tuples: Grain compares with some, and would resume at
  another record.
  """
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError) as e:
    raise TypeError(
      f"The state of Grain's iterator is {text:.200}; expected plain values of"
      ' Python. Or set input_checkpointing_enabled=False where that is no loss.'
    ) from e


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
    if place.exists():
      found = [path]
    elif '://' in path:
      found = sorted(map(os.fspath, place.parent.glob(place.name)))
    else:  # Of which epath refuses '**'.
      found = sorted(glob.glob(path, recursive=True))
    if not found:
      raise errors.MissingFileError(
        f'No files found: {path!r} names none. Give the path of an ArrayRecord'
        ' file, a glob, or a list of these.'
      )
    paths += found
  return list(dict.fromkeys(paths))


def _count_records(paths: list[str]) -> tuple[list[int], str]:
  """Returns how many records files have up to the end of each, and a hash.

  The hash is that of names, sizes and numbers of records.
  """
  import grain

  def examine(path: str) -> tuple[str, int, int]:
    try:
      number = len(grain.sources.ArrayRecordDataSource(path))
    except Exception as e:
      e.add_note(f'While {path} was opened as an ArrayRecord file.')
      raise
    return os.path.basename(path), epath.Path(path).stat().length, number

  with futures.ThreadPoolExecutor() as pool:
    facts = list(pool.map(examine, paths))
  ends = list(itertools.accumulate(number for *_, number in facts))
  return ends, hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
