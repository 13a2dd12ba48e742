"""Text files as batches of byte-level tokens for a language model.

Three lines are enough to look at the data:

  corpus = text.load_corpus('stdlib')
  batch = next(text.TrainInput(corpus.train, batch_size=8, length=256, seed=0))
  print(text.decode(batch['inputs'][0]))

A document is a file. Its tokens are `DOCUMENT_TOKEN` and then its bytes; the
documents of a split, one after the other in the order of their names, are one
stream, and an example is a window of that stream. Whole files are held out for
evaluation.

A batch is a dict of three arrays, each of shape [B, L]:

  inputs   int32    what the model reads
  targets  int32    what it shall predict: the stream, one token further on
  weights  float32  1 where the target is a byte, 0 where it is not

so that `sum(weights * nats) / sum(weights) / log(2)` is the bits per byte. The
document token is something to read, never something to predict: a compressor
does not pay for the boundaries between files either.

Shapes: N tokens of a stream, B rows of this process, L tokens of a window.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import glob
import gzip
import hashlib
import operator
import os
import pathlib
import re
import sys
import sysconfig
from typing import Any

from absl import logging
import numpy as np

DOCUMENT_TOKEN = 256
VOCABULARY_SIZE = 257

Batch = dict[str, np.ndarray]
Path = str | os.PathLike[str]

_STATE_FORMAT = 1
# Git looks at as many bytes to tell a binary file from a text.
_BINARY_PROBE_BYTES = 8000

# Tests would be more text than the library itself, much of it tables; packages
# are not the standard library; `config-*` and `_sysconfigdata*` are written
# when Python is built: two machines with the same Python differ in them.
_STDLIB_SKIPPED_FOLDERS = re.compile(
  r'tests?|idle_test|(site|dist)-packages|__pycache__|config-.*'
)
_STDLIB_FILES = re.compile(r'(?!_sysconfigdata).*\.py')


def encode(text: str | bytes) -> np.ndarray:
  """Returns the tokens of a text: its (UTF-8) bytes, int32 [length]."""
  data = text.encode() if isinstance(text, str) else text
  return np.frombuffer(data, np.uint8).astype(np.int32)


def decode(tokens: Sequence[int] | np.ndarray) -> str:
  """Returns the text of some tokens.

  Args:
    tokens: integers, [length].

  Returns:
    The text. Bytes that are no UTF-8 and tokens outside the vocabulary become
    U+FFFD; document tokens are left out.
  """
  ids = np.asarray(tokens, np.int64)
  ids = ids[ids != DOCUMENT_TOKEN]
  # 0xFF occurs in no UTF-8 text, so that it decodes to U+FFFD.
  ids = np.where((ids >= 0) & (ids < 256), ids, 0xFF)
  return ids.astype(np.uint8).tobytes().decode(errors='replace')


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
  """Files as one stream of tokens.

  Attributes:
    names: their paths relative to the folder that was read, sorted.
    tokens: the document token and then the bytes of each, uint16 [N].
    sha256: the SHA-256 hash of what `sha256sum` prints for these files.
  """

  names: tuple[str, ...] = dataclasses.field(repr=False)
  tokens: np.ndarray = dataclasses.field(repr=False)
  sha256: str

  @property
  def num_files(self) -> int:
    return len(self.names)

  @property
  def num_bytes(self) -> int:
    return self.tokens.size - len(self.names)

  def data(self) -> bytes:
    """Returns the contents of all files, one after the other."""
    is_byte = self.tokens != DOCUMENT_TOKEN
    return self.tokens[is_byte].astype(np.uint8).tobytes()


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Text for training and, from other files, text for evaluation.

  Attributes:
    train: the files to train on.
    eval: the files that are held out.
    sha256: the hash of both together, as `Documents.sha256`.
  """

  train: Documents
  eval: Documents
  sha256: str


def load_corpus(
  files: Path | Sequence[Path] = 'stdlib', *, eval_fraction: float = 0.05
) -> Corpus:
  """Reads text files into memory (2 bytes for each) and splits them.

  Which files are held out depends on nothing but their relative paths: it is
  the same on every machine, and stays when other files are added. Where the
  fraction of a handful of files would be none (or all), it is one (or all but
  one).

  Args:
    files: 'stdlib', the source text of the standard library of the running
      Python without its tests; or a folder, for all text files below it but
      hidden ones; or a glob such as 'notes/**/*.md'; or a list of these. Bytes
      need not be UTF-8. Empty files are left out.
    eval_fraction: how much of the files to hold out, between 0 and 1.

  Returns:
    The two splits, both with at least one file.

  Raises:
    ValueError: where an entry of `files` matches nothing, or where there are
      fewer than two files that are not empty.
  """
  if not 0 < eval_fraction < 1:
    raise ValueError(
      f'eval_fraction is {eval_fraction}; expected a number between 0 and 1, '
      'both excluded, such as 0.05.'
    )
  contents = _read(files)
  if len(contents) < 2:
    raise ValueError(
      f'{files!r} has {len(contents)} files that are not empty; at least 2 are '
      'needed, since whole files are held out for evaluation. Split a single '
      'file into parts (`split -C 100k FILE`), or give more files.'
    )
  order = sorted(contents, key=_split_hash)
  num_eval = sum(_split_hash(name) < eval_fraction * 2**64 for name in order)
  num_eval = min(max(num_eval, 1), len(order) - 1)
  held_out = set(order[:num_eval])

  corpus = Corpus(
    train=_documents({k: v for k, v in contents.items() if k not in held_out}),
    eval=_documents({k: v for k, v in contents.items() if k in held_out}),
    sha256=_sha256(contents),
  )
  logging.info(
    'Text from %s: %d files of %d bytes to train on, %d files of %d bytes held '
    'out, SHA-256 %s.',
    files,
    corpus.train.num_files,
    corpus.train.num_bytes,
    corpus.eval.num_files,
    corpus.eval.num_bytes,
    corpus.sha256,
  )
  return corpus


def compression_baselines(documents: Documents) -> dict[str, float]:
  """Returns what compressors need: a model worth its weights needs less.

  Args:
    documents: held-out files. They are compressed as one, in the order of
      their names, which is kinder to a compressor than one by one.

  Returns:
    Bits per byte of `gzip -9` and `xz` by name, from Python's own zlib and
    lzma, which agree with the programs to about 0.1%. Without xz where Python
    was built without lzma.
  """
  data = documents.data()
  compressed = {'gzip -9': gzip.compress(data, compresslevel=9, mtime=0)}
  with contextlib.suppress(ImportError):
    import lzma

    compressed['xz'] = lzma.compress(data)
  return {k: 8 * len(v) / len(data) for k, v in compressed.items()}


class TrainInput:
  """An endless iterator of training batches that can be resumed exactly.

  In each epoch the stream is cut into windows anew, beginning at another place,
  and these are shuffled. The windows follow one another without overlap; the
  last N mod L tokens of the circle that the stream is here are left out until
  another epoch.

  Batch n is the same for any number of processes: each takes its share of
  consecutive rows. The position can therefore be restored by another number of
  processes than saved it.
  """

  def __init__(
    self,
    documents: Documents,
    *,
    batch_size: int,
    length: int,
    seed: int,
    process_index: int | None = None,
    process_count: int | None = None,
  ):
    """Prepares the input; nothing is read before the first `next`.

    Args:
      documents: what to train on.
      batch_size: rows of the global batch, of all processes together.
      length: L, tokens per row.
      seed: any integer; it decides on the order.
      process_index: whose rows to read; default `jax.process_index()`.
      process_count: default `jax.process_count()`.

    Raises:
      ValueError: where the text is shorter than one window, or `batch_size`
        cannot be divided by `process_count`.
    """
    import grain  # Takes a second to import; only training needs it.

    self._rows = _rows_of_process(batch_size, process_index, process_count)
    _check_positive(length=length)
    num_windows = documents.tokens.size // length
    if not num_windows:
      raise ValueError(
        f'The text to train on has {documents.tokens.size} tokens, fewer than '
        f'one window of length={length}. Give more text or a smaller length.'
      )
    self._documents = documents
    self._length = length
    self._seed = operator.index(seed)
    self._batch_size = batch_size
    self._identity = {
      'format': _STATE_FORMAT,
      'corpus_sha256': documents.sha256,
      'seed': self._seed,
      'batch_size': batch_size,
      'length': length,
    }
    # Grain shuffles and counts. It is given batch numbers, and looks up those
    # windows that this process needs: passing windows through it one by one
    # costs twice as much time, shuffling other processes' windows even more.
    self._num_windows = num_windows
    self._order = (
      grain.MapDataset.range(num_windows)
      .shuffle(seed=_stable_hash('shuffle', self._seed) % 2**32)
      .repeat()
    )
    self._iterator = iter(
      grain.MapDataset.range(sys.maxsize // batch_size)
      .map(self._batch)
      .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )

  def _batch(self, number: int) -> Batch:
    first = number * self._batch_size
    starts = []
    for position in range(first + self._rows.start, first + self._rows.stop):
      epoch = position // self._num_windows
      offset = _epoch_offset(self._seed, epoch, self._documents.tokens.size)
      starts.append(offset + self._order[position] * self._length)
    return _windows(self._documents.tokens, starts, self._length)

  def __iter__(self) -> 'TrainInput':
    return self

  def __next__(self) -> Batch:
    return next(self._iterator)

  def get_state(self) -> dict[str, Any]:
    """Returns the position: a small dict that JSON can hold.

    It counts the batches that were taken from this object: one that reads
    ahead of the training step keeps a state with each batch.
    """
    return {**self._identity, 'grain': self._iterator.get_state()}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues where `get_state` was called.

    Args:
      state: what `get_state` returned, in this or another process.

    Raises:
      ValueError: where the state is of another text, seed, batch size or
        length, each of which would silently be another order of the data.
    """
    missing = [k for k in (*self._identity, 'grain') if k not in state]
    if missing:
      raise ValueError(
        f'No state of a TrainInput: it lacks {missing} and has {list(state)}. '
        'Give what get_state() returned.'
      )
    differences = [
      f'{key} is {state[key]!r} in the state and {value!r} here'
      for key, value in self._identity.items()
      if state[key] != value
    ]
    if differences:
      raise ValueError(
        f'Cannot continue from this state: {"; ".join(differences)}. Use the '
        'settings and the text of the run that saved it (the standard library '
        'is another text in another Python), or start anew.'
      )
    self._iterator.set_state(dict(state['grain']))


class EvalInput:
  """One pass over held-out text, each byte predicted exactly once.

  The stream is cut into windows without overlap. The context starts anew with
  each, from the token before the first target; the end of the last window is
  filled with document tokens of weight 0. The last batch may have fewer rows,
  and on some processes none: all processes see the same number of batches.

  Iterating again starts the pass again.
  """

  def __init__(
    self,
    documents: Documents,
    *,
    batch_size: int,
    length: int,
    max_batches: int | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
  ):
    """Prepares the pass.

    Args:
      documents: what to evaluate on.
      batch_size: rows of the global batch, of all processes together.
      length: L, tokens per row.
      max_batches: at most so many batches, always the same: windows at equal
        distances from the whole text. None is all of it.
      process_index: whose rows to read; default `jax.process_index()`.
      process_count: default `jax.process_count()`.

    Raises:
      ValueError: where `batch_size` cannot be divided by `process_count`.
    """
    self._rows = _rows_of_process(batch_size, process_index, process_count)
    _check_positive(length=length)
    num_windows = -(-(documents.tokens.size - 1) // length)
    chosen = num_windows
    if max_batches is not None:
      _check_positive(max_batches=max_batches)
      chosen = min(num_windows, max_batches * batch_size)
    self._starts = np.arange(chosen) * num_windows // chosen * length
    self._tokens = np.full(
      num_windows * length + 1, DOCUMENT_TOKEN, documents.tokens.dtype
    )
    self._tokens[: documents.tokens.size] = documents.tokens
    self._batch_size = batch_size
    self._length = length

  def __len__(self) -> int:
    """Returns the number of batches."""
    return -(-self._starts.size // self._batch_size)

  def __iter__(self) -> Iterator[Batch]:
    for first in range(0, self._starts.size, self._batch_size):
      starts = self._starts[first : first + self._batch_size][self._rows]
      yield _windows(self._tokens, starts, self._length)


def _windows(
  tokens_N: np.ndarray, starts: Sequence[int] | np.ndarray, length: int
) -> Batch:
  """Cuts windows out of a circular stream, one row for each start."""
  indices = np.asarray(starts, np.int64)[:, None] + np.arange(length + 1)
  window = tokens_N.take(indices, mode='wrap')
  targets_BL = window[:, 1:].astype(np.int32)
  return {
    'inputs': window[:, :-1].astype(np.int32),
    'targets': targets_BL,
    'weights': (targets_BL != DOCUMENT_TOKEN).astype(np.float32),
  }


@functools.lru_cache(maxsize=64)
def _epoch_offset(seed: int, epoch: int, num_tokens: int) -> int:
  """Returns where an epoch begins to cut the stream into windows."""
  return _stable_hash('offset', seed, epoch) % num_tokens


def _split_hash(name: str) -> int:
  return _stable_hash('eval', name)


def _stable_hash(*parts: object) -> int:
  """Returns 64 bits that are the same in every process and version."""
  key = '/'.join(map(str, parts)).encode(errors='surrogateescape')
  return int.from_bytes(hashlib.sha256(key).digest()[:8], 'big')


def _rows_of_process(
  batch_size: int, process_index: int | None, process_count: int | None
) -> slice:
  """Returns the rows of the global batch that are those of a process."""
  if process_index is None or process_count is None:
    import jax  # Not needed to look at text.

    if process_index is None:
      process_index = jax.process_index()
    if process_count is None:
      process_count = jax.process_count()
  _check_positive(batch_size=batch_size, process_count=process_count)
  if not 0 <= process_index < process_count:
    raise ValueError(
      f'process_index is {process_index}; expected 0 to {process_count - 1}, '
      f'since process_count is {process_count}.'
    )
  rows, remainder = divmod(batch_size, process_count)
  if remainder:
    raise ValueError(
      f'batch_size={batch_size} cannot be divided by '
      f'process_count={process_count}: each process reads the same number of '
      f'rows. Use a multiple of {process_count}.'
    )
  return slice(process_index * rows, (process_index + 1) * rows)


def _check_positive(**values: int) -> None:
  for name, value in values.items():
    if operator.index(value) < 1:
      raise ValueError(f'{name} is {value}; expected at least 1.')


def _documents(contents: Mapping[str, bytes]) -> Documents:
  size = sum(map(len, contents.values())) + len(contents)
  tokens = np.empty(size, np.uint16)
  end = 0
  for data in contents.values():
    tokens[end] = DOCUMENT_TOKEN
    start, end = end + 1, end + 1 + len(data)
    tokens[start:end] = np.frombuffer(data, np.uint8)
  return Documents(tuple(contents), tokens, _sha256(contents))


def _sha256(contents: Mapping[str, bytes]) -> str:
  total = hashlib.sha256()
  for name, data in contents.items():
    line = f'{hashlib.sha256(data).hexdigest()}  {name}\n'
    total.update(line.encode(errors='surrogateescape'))
  return total.hexdigest()


def _read(files: Path | Sequence[Path]) -> dict[str, bytes]:
  """Reads all files that are not empty: contents by name, sorted by name."""
  entries = [files] if isinstance(files, str | os.PathLike) else list(files)
  contents: dict[str, bytes] = {}
  seen = set()
  num_skipped = 0
  for number, entry in enumerate(entries):
    root, paths, drop_binary = _match(os.fspath(entry))
    for path in sorted(paths):
      # A second name of a file could be on the other side of the split.
      real_path = os.path.realpath(path)
      if real_path in seen:
        continue
      seen.add(real_path)
      with open(path, 'rb') as f:
        data = f.read()
      if not data or (drop_binary and b'\0' in data[:_BINARY_PROBE_BYTES]):
        num_skipped += 1
        continue
      name = pathlib.Path(os.path.relpath(path, root)).as_posix()
      # Of two folders with a file of the same name both are read.
      contents[name if len(entries) == 1 else f'{number}/{name}'] = data
  if num_skipped:
    logging.info('Left out %d empty or binary files.', num_skipped)
  return dict(sorted(contents.items()))


def _match(entry: str) -> tuple[str, list[str], bool]:
  """Returns the root, the paths, and whether binary files may be among them."""
  looked_for = entry
  drop_binary = False
  if entry == 'stdlib':
    root = sysconfig.get_path('stdlib')
    looked_for = f"'*.py' below {root} (the standard library)"
    paths = [
      path
      for path in _walk(root, _STDLIB_SKIPPED_FOLDERS)
      if _STDLIB_FILES.fullmatch(os.path.basename(path))
    ]
  elif os.path.isdir(root := os.path.expanduser(entry)):
    looked_for = f'files below the folder {entry}'
    paths = list(_walk(root, re.compile(r'\..*')))
    drop_binary = True
  else:
    pattern = root
    root = os.path.dirname(pattern)
    while re.search(r'[*?[]', root):
      root = os.path.dirname(root)
    paths = glob.glob(pattern, recursive=True)
  paths = [path for path in paths if os.path.isfile(path)]
  if not paths:
    raise ValueError(
      f'No files found: looked for {looked_for}. Give "stdlib", a folder, a '
      'glob, or a list of these.'
    )
  return root, paths, drop_binary


def _walk(root: str, skipped_folders: re.Pattern[str]) -> Iterable[str]:
  def fail(error: OSError) -> None:
    raise error  # os.walk by itself leaves out what it may not read.

  for folder, folders, names in os.walk(root, onerror=fail):
    folders[:] = [f for f in folders if not skipped_folders.fullmatch(f)]
    for name in names:
      if not name.startswith('.'):
        yield os.path.join(folder, name)
