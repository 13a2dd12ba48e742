"""Reads Grain's MapDatasets, random-access data sources, ArrayRecord files.

  GrainInput(files='/data/train-*.array_record', transformations=[decode], ...)
  GrainInput(dataset=grain.MapDataset.source(records).map(f), ...)

For a `grain.IterDataset`, a stream, see `iterable.IterableInput`.
"""

import bisect
from collections.abc import Mapping, Sequence
from concurrent import futures
import dataclasses
import glob
import hashlib
import itertools
import os
import sys
from typing import Any

from etils import epath
import numpy as np

from jaxline import errors
from jaxline.inputs import indexed


@dataclasses.dataclass(kw_only=True, eq=False)
class GrainInput(indexed.IndexedInput):
  """Records that Grain can read, as batches: dicts of arrays [b, ...].

  A record is a dict, of any depth, of arrays whose shapes all records share.

  Attributes:
    dataset: a `grain.MapDataset`, finite, neither filtered nor batched; or
      anything with `__len__` and `__getitem__`. Its `__getitems__`, if there is
      one, gets the numbers of a whole batch, as a list.
    files: ArrayRecord files instead: a path, a glob, or several, also of what
      `etils.epath` can read ('gs://...'), where a glob has no '**'. A file that
      is named twice is read once.
    transformations: what to do with each record, in this order: functions,
      `grain.transforms.Map`, or `grain.transforms.RandomMap`, whose generator
      depends on the seed, the record and the epoch alone.
    data_name: identifies the data: a state that was saved with another name is
      refused. Files are also identified by names, sizes and numbers of records;
      other datasets without a name only by their number of records.
  """

  dataset: Any = None
  files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
  transformations: Sequence[Any] = ()
  data_name: str = ''

  def __post_init__(self) -> None:
    super().__post_init__()
    if (self.dataset is None) == (not self.files):
      self.refuse('files', 'some without a dataset, or none with one')
    import grain  # Takes a second to import.

    self._records: Any = self.dataset
    self._hash = ''
    if self.files:
      self._open(_find_files(self.files))
    self._is_map_dataset = isinstance(self._records, grain.MapDataset)
    self._length = len(self._records)
    if self._length == sys.maxsize:
      raise ValueError(f'{self.name}.dataset has no end: omit .repeat().')

  def num_records(self) -> int:
    return self._length

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
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
    return _stack(elements)

  def _transform(self, element: Any, epoch: int, record: int) -> Any:
    for stage, t in enumerate(self.transformations):
      if hasattr(t, 'random_map'):
        numbers = indexed.record_generator(self.seed(), stage, epoch, record)
        element = t.random_map(element, numbers)
      else:
        element = (t if callable(t) else t.map)(element)
    return element

  def describe_record(self, record: int, epoch: int) -> str:
    if not self.files:
      return super().describe_record(record, epoch)
    i = bisect.bisect_right(self._ends, record)
    number = record - (self._ends[i - 1] if i else 0)
    return f'{self._paths[i]}, record {number}'

  def data_identity(self) -> dict[str, Any]:
    return {'data_name': self.data_name, 'files': self._hash}

  def _open(self, paths: list[str]) -> None:
    """Opens ArrayRecord files."""
    from grain import sources

    with futures.ThreadPoolExecutor() as pool:
      counts = list(pool.map(_count_records, paths))
      sizes = list(pool.map(lambda x: epath.Path(x).stat().length, paths))
    self._paths = paths
    # File i holds the records [ends[i - 1], ends[i]).
    self._ends = list(itertools.accumulate(counts))
    facts = [list(map(os.path.basename, paths)), sizes, counts]
    self._hash = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    # Given their numbers of records, the source opens files at the first read.
    ranges = [f'{x}[0:{n}]' for x, n in zip(paths, counts, strict=True)]
    self._records = sources.ArrayRecordDataSource(
      ranges, {'max_parallelism': '0'}
    )


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


def _find_files(
  files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[str]:
  """Returns the paths of files: of a glob sorted, of several in their order."""
  paths: list[str] = []
  for entry in [files] if isinstance(files, str | os.PathLike) else files:
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


def _count_records(path: str) -> int:
  from grain import sources

  try:
    return len(sources.ArrayRecordDataSource(path))
  except Exception as e:
    e.add_note(f'While {path} was opened as an ArrayRecord file.')
    raise
