"""Reads Grain's MapDatasets, random-access data sources and ArrayRecord files.

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
  """Batches of records that Grain can read: dicts of arrays [b, ...].

  A record is a dict, maybe nested, of arrays. All records share their shapes.

  Attributes:
    dataset: A finite `grain.MapDataset`, neither filtered nor batched, or any
      object with `__len__` and `__getitem__`. If it has `__getitems__`, this
      method gets the list of record numbers of a batch.
    files: ArrayRecord files, instead of a dataset: a path, a glob or several
      of them. `etils.epath` reads remote ones ('gs://...'), whose globs cannot
      contain '**'. A file that is named twice is read once.
    transformations: Applied to each record in order: functions,
      `grain.transforms.Map`, or `grain.transforms.RandomMap`, whose generator
      depends only on the seed, the record and the epoch.
    data_name: Identifies the data: states saved under a different name are
      rejected. So are states of files with different names, sizes or numbers of
      records. Of an unnamed dataset, only the number of records is compared.
  """

  dataset: Any = None
  files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
  transformations: Sequence[Any] = ()
  data_name: str = ''

  def __post_init__(self) -> None:
    super().__post_init__()
    if (self.dataset is None) == (not self.files):
      self.refuse('files', 'either `files` or `dataset`, and not both')
    import grain  # The import takes a second.

    self._records: Any = self.dataset
    self._hash = ''
    self._fewest_together = 0
    if self.files:
      self._open(_find_files(self.files))
    self._is_map_dataset = isinstance(self._records, grain.MapDataset)
    self._length = len(self._records)
    if self._length == sys.maxsize:
      raise ValueError(f'{self.name}.dataset is endless: omit .repeat().')

  def num_records(self) -> int:
    return self._length

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    numbers = records.tolist()
    together = len(numbers) >= self._fewest_together
    if self._is_map_dataset:
      # Grain numbers records over all epochs, so random nodes differ by epoch.
      indices = (epochs * self._length + records).tolist()
      elements = [self._records[i] for i in indices]
    elif together and hasattr(self._records, '__getitems__'):
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
    # `__getitems__` starts threads. On a local disk, fewer records take less
    # time one by one.
    self._fewest_together = 0 if any('://' in x for x in paths) else 16
    # File i holds the records [ends[i - 1], ends[i]).
    self._ends = list(itertools.accumulate(counts))
    facts = [list(map(os.path.basename, paths)), sizes, counts]
    self._hash = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    # These ranges let the source open a file only at its first read.
    ranges = [f'{x}[0:{n}]' for x, n in zip(paths, counts, strict=True)]
    self._records = sources.ArrayRecordDataSource(
      ranges, {'max_parallelism': '0'}
    )


def _stack(elements: Sequence[Any], name: str = '') -> Any:
  """Stacks b records to arrays [b, ...]."""
  first = elements[0]
  try:
    if not isinstance(first, Mapping):
      return np.array(elements)  # This is faster than `np.stack`.
    if len(set(map(len, elements))) > 1:
      raise ValueError(f'Some records lack or add entries to {[*first]}.')
    return {key: _stack([x[key] for x in elements], key) for key in first}
  except ValueError as e:
    e.add_note(f'The error is in the entry {name!r} of a batch.')
    raise


def _find_files(
  files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[str]:
  """Expands globs. Keeps the order of entries; sorts the files of a glob."""
  paths: list[str] = []
  for entry in [files] if isinstance(files, str | os.PathLike) else files:
    path = os.path.expanduser(os.fspath(entry))
    place = epath.Path(path)
    if place.exists():
      found = [path]
    elif '://' in path:
      found = sorted(map(os.fspath, place.parent.glob(place.name)))
    else:  # epath rejects '**'.
      found = sorted(glob.glob(path, recursive=True))
    if not found:
      raise errors.MissingFileError(
        f'No files match {path!r}. Give paths or globs of ArrayRecord files.'
      )
    paths += found
  return list(dict.fromkeys(paths))


def _count_records(path: str) -> int:
  from grain import sources

  try:
    return len(sources.ArrayRecordDataSource(path))
  except Exception as e:
    e.add_note(f'{path} was being opened as an ArrayRecord file.')
    raise
