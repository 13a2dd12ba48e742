"""Reads Grain datasets, random-access data sources and ArrayRecord files.

  GrainInput(files='/data/train-*.array_record', transformations=[decode], ...)
  GrainInput(dataset=grain.MapDataset.source(records).map(f), ...)
  GrainInput(dataset=lambda host_index, num_hosts: stream(...), ...)

`IndexedInput` shuffles, divides among hosts and counts records that have
numbers: files, a `grain.MapDataset`, anything with `__len__` and `__getitem__`.
A `grain.IterDataset` is a stream: the code that makes it divides it among the
hosts. Its position is the state of Grain's iterator and fits only the same host
of the same number of hosts.
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

  A stream ignores `shuffle` and `num_threads` (see `to_iter_dataset`), and has
  one-epoch evaluation on one host only. With `repeat` it begins again at its
  end: in the same order, unless it is made by a function that takes `epoch`.

  Attributes:
    dataset: one of
      - a `grain.MapDataset`, finite, neither filtered nor batched;
      - anything with `__len__` and `__getitem__`; its `__getitems__`, if there
        is one, gets the numbers of a whole batch, as a list;
      - a `grain.IterDataset` of records, not batched, for one host;
      - a function that returns one of these. It is called with those of
        `host_index`, `num_hosts`, `seed` and `epoch` that it has as arguments.
        A stream of several hosts needs the first two: the function returns the
        part of that host.
    files: ArrayRecord files instead: a path, a glob, or several, also of what
      `etils.epath` can read ('gs://...'), where a glob has no '**'. A file that
      is named twice is read once.
    transformations: what to do with each record, in this order: functions,
      `grain.transforms.Map`, or `grain.transforms.RandomMap`, whose generator
      depends on the seed, the record and the epoch alone. For a stream, all
      that `IterDataset.apply` accepts, except batches.
    collate: makes the batch, a dict of arrays [b, ...], of a list of b records;
      None stacks arrays of equal shapes, in dicts of any depth.
    data_name: identifies the data: a state that was saved with another name is
      refused. Files are also identified by names, sizes and numbers of records;
      other datasets without a name only by their number of records.
  """

  dataset: Any = None
  files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
  transformations: Sequence[Any] = ()
  collate: Callable[[list[Any]], dict[str, Any]] | None = None
  data_name: str = ''

  def __post_init__(self) -> None:
    super().__post_init__()
    if (self.dataset is None) == (not self.files):
      self.refuse('files', 'some without a dataset, or none with one')
    import grain  # Takes a second to import.

    self._arguments: dict[str, Any] = {}
    self._records: Any = (
      _Files(_find_files(self.files)) if self.files else self._make(epoch=0)
    )
    self._collate = self.collate or _stack
    self._is_map_dataset = isinstance(self._records, grain.MapDataset)
    self._is_stream = isinstance(self._records, grain.IterDataset)
    taken = {*self._arguments}
    if self._is_stream:
      self._check_stream(taken)
      # Of this host alone; see `BaseInput`.
      self.ANY_NUMBER_OF_HOSTS = False  # type: ignore[misc]
      # Epoch, record, and the iterator's state as text.
      self.FIRST = self._at = 0, 0, None  # type: ignore[misc]
      return
    if taken & {'host_index', 'num_hosts', 'epoch'}:
      raise ValueError(
        f'{self.name}.dataset takes {sorted(taken)} and returns records with'
        ' numbers, which the input divides itself; return all records.'
      )
    self._length = len(self._records)
    if self._length == sys.maxsize:
      raise ValueError(f'{self.name}.dataset has no end: omit .repeat().')

  def _make(self, epoch: int) -> Any:
    """Returns the dataset, or what a function returns for an epoch."""
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

  def _check_stream(self, taken: set[str]) -> None:
    if self.num_infeed_hosts != 1 and not (
      self.repeat and {'host_index', 'num_hosts'} <= taken
    ):
      raise ValueError(
        f'{self.name} reads a stream on {self.num_infeed_hosts} hosts; expected'
        ' repeat=True and a function that takes host_index and num_hosts and'
        ' returns the part of that host. Or give a grain.MapDataset.'
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
        element = (t if callable(t) else t.map)(element)
    return element

  def describe_record(self, record: int, epoch: int) -> str:
    """Returns the file and the place in it, where there are files."""
    if not self.files:
      return super().describe_record(record, epoch)
    path, number = self._records.locate(record)
    return f'{path}, record {number}'

  def data_identity(self) -> dict[str, Any]:
    """Returns the name of the data, and a hash of the files."""
    files = self._records.hash if self.files else ''
    return {'data_name': self.data_name, 'files': files}

  # Streams.

  def read_from(self, position: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields batches from a position on; see `ResumableInput`."""
    if not self._is_stream:
      yield from super().read_from(position)
      return
    epoch, record, text = position
    elements: list[Any] = []
    while self.repeat or not epoch:
      iterator = self._open(epoch, text)
      for element in iterator:
        elements.append(element)
        record += 1
        if len(elements) == self.batch_size:
          is_first, text = text is None, repr(iterator.get_state())
          if is_first and self.saves_position:
            _from_text(text)  # Refuses it before it is needed.
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
      function = functools.partial(indexed.call_without_end, t)
      stream = stream.map(function) if callable(t) else stream.apply(t)
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
    return (
      f'a batch from record {self._at[1]} of epoch {self._at[0]} on, of the'
      f' stream of host {self.infeed_host_index}/{self.num_infeed_hosts}'
    )

  def where_rows(self) -> list[str]:
    """Returns the record of each row; nothing of a stream."""
    return [] if self._is_stream else super().where_rows()


def _stack(elements: Sequence[Any], name: str = '') -> Any:
  """Returns arrays [b, ...] of b records."""
  first = elements[0]
  try:
    if not isinstance(first, Mapping):
      return np.array(elements)  # Faster than `np.stack`.
    if len(set(map(len, elements))) > 1:
      raise ValueError(f'Some records have other entries than {[*first]}.')
    return {key: _stack([x[key] for x in elements], key) for key in first}
  except ValueError as e:
    e.add_note(f'It was the entry {name!r} of a batch.')
    raise


def _from_text(text: str) -> Any:
  """Returns the state of an iterator from its `repr`."""
  # Not JSON, which has no tuples: Grain compares with some, and would go on at
  # another record.
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError) as e:
    raise TypeError(
      f"The state of Grain's iterator is {text:.200}; expected plain values, or"
      ' input_checkpointing_enabled=False.'
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
        f'No files found: {path!r} names none. Give paths or globs of'
        ' ArrayRecord files.'
      )
    paths += found
  return list(dict.fromkeys(paths))


class _Files:
  """The records of ArrayRecord files, each file read with one call a batch.

  Grain's source starts threads for every batch, which takes longer than to read
  a small one.
  """

  def __init__(self, paths: list[str]):
    self._paths = paths
    with futures.ThreadPoolExecutor() as pool:
      readers = list(pool.map(_open_file, paths))
      sizes = list(pool.map(lambda x: epath.Path(x).stat().length, paths))
    self._readers = dict(zip(paths, readers, strict=True))
    counts = [reader.num_records() for reader in readers]
    # File i holds the records [ends[i - 1], ends[i]).
    self._ends = list(itertools.accumulate(counts))
    facts = [list(map(os.path.basename, paths)), sizes, counts]
    self.hash = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]

  def __reduce__(self) -> Any:
    return _Files, (self._paths,)  # Readers cannot be pickled.

  def __len__(self) -> int:
    return self._ends[-1]

  def locate(self, record: int) -> tuple[str, int]:
    """Returns the file of a record, and its number there."""
    file = bisect.bisect_right(self._ends, record)
    return self._paths[file], record - (self._ends[file - 1] if file else 0)

  def __getitems__(self, records: list[int]) -> list[bytes]:
    places = [self.locate(record) for record in records]
    wanted: dict[str, list[int]] = {}
    for path, number in places:
      wanted.setdefault(path, []).append(number)
    found = {
      path: iter(self._readers[path].read(numbers))
      for path, numbers in wanted.items()
    }
    return [next(found[path]) for path, _ in places]


def _open_file(path: str) -> Any:
  from array_record.python import array_record_module

  try:
    reader = array_record_module.ArrayRecordReader(
      path,
      # For random access.
      options='readahead_buffer_size:0,max_parallelism:0',
      file_reader_buffer_size=2**15,
    )
    if not reader.ok():
      reader.close()  # Raises the error.
    return reader
  except Exception as e:
    e.add_note(f'While {path} was opened as an ArrayRecord file.')
    raise
