"""Text files as batches of tokens for a language model.

Two lines are enough to look at the data:

  data = text.TextInput(files='stdlib', batch_size=8, length=256)
  print(*data.ids_to_strings(next(data).ids, [256] * 8), sep='\n---\n')

A document is a file, or a line of one. Its tokens are the document token and
then those of its text; the documents of a split, in the order of their names,
are one stream. Whole documents are held out for evaluation. The tokens are made
once and kept on disk: see `token_cache`.

`packing` says what a row is:

  stream  the next L tokens of the stream, across documents
  packed  the same, with `segment_ids` and `segment_pos`, which tell documents
          apart
  padded  one document from its beginning; a long one continues in another row

A batch has, each of shape [B, L]:

  ids          int32    the tokens that the model reads
  labels       int32    the tokens that it predicts: the stream, shifted by one
  weights      float32  1 where the label is text, 0 where it is not
  segment_ids  int32    packed: the documents of a row, 1, 2, ...; 0 for padding
  segment_pos  int32    packed: the position, from 0, within the part of the
                        document that is in this row
  paddings     float32  padded: 1 for padding, else 0

so that, for bytes, `sum(weights * nats) / sum(weights) / log(2)` is the bits
per byte. The model reads the document token and never predicts it: a compressor
does not encode the boundaries between files either.

Shapes: N tokens of a stream, D documents, B rows of this host, L tokens of a
row, b rows that are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import contextlib
import dataclasses
import functools
import glob
import gzip
import numbers
import os
import pathlib
import re
import sysconfig
from typing import Any

from absl import logging
import numpy as np

from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import indexed
from jaxline.inputs import token_cache
from jaxline.inputs import tokenization

# Of the tokenizer 'bytes'.
DOCUMENT_TOKEN = tokenization.DOCUMENT_TOKEN
VOCABULARY_SIZE = tokenization.VOCABULARY_SIZE
encode = tokenization.BYTES.encode
decode = tokenization.BYTES.decode

Corpus = token_cache.Corpus
Documents = token_cache.Documents
Path = token_cache.Path

_EVAL_FRACTION = 0.05
PACKINGS = ('stream', 'packed', 'padded')

# Tests would be more text than the library itself, much of it tables; packages
# are not the standard library; `config-*` and `_sysconfigdata*` are written
# when Python is built: two machines with the same Python differ in them.
_STDLIB_SKIPPED_FOLDERS = re.compile(
  r'tests?|idle_test|(site|dist)-packages|__pycache__|config-.*'
)
_STDLIB_FILES = re.compile(r'(?!_sysconfigdata).*\.py')


def load_corpus(
  files: Path | Sequence[Path] = 'stdlib',
  *,
  eval_fraction: float = _EVAL_FRACTION,
  tokenizer: Path | tokenization.Tokenizer = 'bytes',
  documents: str = 'file',
  cache_dir: Path | None = None,
) -> Corpus:
  """Splits text files, and makes tokens of them unless that was done before.

  Which documents are held out depends on nothing but their names, the relative
  paths: it is the same on every machine, and stays when other files are added.
  Where the fraction of a handful of documents would be none (or all), it is one
  (or all but one).

  Args:
    files: 'stdlib', the source text of the standard library of the running
      Python without its tests; or a folder, for all text files below it but
      hidden ones; or a glob such as 'notes/**/*.md'; or a list of these. Bytes
      need not be UTF-8. Empty files are left out. Those whose name ends in
      '.gz' are unpacked.
    eval_fraction: how much of the documents to hold out, between 0 and 1.
    tokenizer: 'bytes', the path of a SentencePiece '.model', or that of a
      Hugging Face 'tokenizer.json'; see `tokenization.load_tokenizer`.
    documents: what a document is: 'file'; 'line', each line that is not empty,
      called 'path:line'; or 'jsonl', the entry 'text' of each line.
    cache_dir: where tokens are kept; None is '~/.cache/jaxline/tokens', or
      below XDG_CACHE_HOME where that is set.

  Returns:
    The two splits, both with at least one document.

  Raises:
    ValueError: where an entry of `files` matches nothing, or where there are
      fewer than two documents that are not empty, or a line is not as
      `documents` says.
  """
  is_number = isinstance(eval_fraction, numbers.Real)
  if not is_number or not 0 < eval_fraction < 1:
    raise errors.UsageError(
      f'eval_fraction is {eval_fraction}; expected a number between 0 and 1, '
      'both excluded, such as 0.05.'
    )
  if documents not in token_cache.KINDS:
    raise errors.UsageError(
      f'documents is {documents!r}; expected one of {token_cache.KINDS}.'
    )
  corpus = token_cache.load(
    _find(files),
    tokenizer=tokenization.load_tokenizer(tokenizer),
    kind=documents,
    eval_fraction=eval_fraction,
    cache_dir=cache_dir,
  )
  logging.info(
    'Text from %s: %s, SHA-256 %s.', files, corpus.summary, corpus.sha256
  )
  return corpus


def compression_baselines(documents: Documents) -> dict[str, float]:
  """Returns bits per byte of compressors, for comparison with a model.

  Args:
    documents: held-out files. They are compressed as one, in the order of
      their names, which is better for a compressor than one by one.

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


@dataclasses.dataclass(kw_only=True, eq=False)
class TextInput(indexed.IndexedInput):
  """Rows of tokens of text files; see the top of this module.

  Training ('stream' and 'packed'): in each epoch the stream is cut into windows
  anew, beginning at another place. The windows follow one another without
  overlap; the last N mod L tokens of the circle that the stream is here are
  left out until another epoch.

  Evaluation: the windows begin with the stream. Each token of text is a label
  once, read from the token before it on; the end of the last window is filled
  with document tokens of weight 0.

  'padded' rows are the same in every epoch: of a document of T tokens of text,
  ceil(T / L) rows, each of which reads from the token before its first label
  on. Filler is document tokens of weight 0.

  Attributes:
    documents: a split of `load_corpus`; or, with `files`, what a document is,
      as `load_corpus` has it. Afterwards the documents.
    files: which files to read, as `load_corpus` has it, where `documents` does
      not hold them.
    split: of the files, 'train' or 'eval'; None goes by `is_training`.
    eval_fraction: of the files, how much belongs to 'eval'; None is 0.05.
    tokenizer: of the files; None is 'bytes'. Afterwards the tokenizer.
    length: L, tokens of a row.
    packing: what a row is: 'stream', 'packed' or 'padded'.
    max_batches: of an epoch of evaluation, at most so many global batches,
      always the same: rows at equal distances from all of it. None is all.
    cache_dir: where tokens of files are kept, as `load_corpus` has it.
  """

  documents: Documents | str = 'file'
  files: Path | Sequence[Path] | None = None
  split: str | None = None
  eval_fraction: float | None = None
  tokenizer: Path | tokenization.Tokenizer | None = None
  length: int
  packing: str = 'stream'
  max_batches: int | None = None
  cache_dir: Path | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.packing not in PACKINGS:
      raise errors.UsageError(
        f'{self.name}.packing is {self.packing!r}; expected one of {PACKINGS}.'
      )
    for key in 'length', 'max_batches':
      value = getattr(self, key)
      if value is None and key == 'max_batches':
        continue
      is_integer = isinstance(value, numbers.Integral)
      if not is_integer or isinstance(value, bool) or value < 1:
        raise errors.UsageError(
          f'{self.name}.{key} is {value!r}; expected an integer of at least 1.'
        )
    if self.is_training and self.max_batches is not None:
      raise errors.UsageError(
        f'{self.name} has is_training=True and max_batches={self.max_batches};'
        ' training sees all of the text. Leave max_batches None.'
      )
    self._documents = self.documents = self._load()
    self.tokenizer = self._tokenizer = self._documents.tokenizer
    self._document_id = self._tokenizer.document_id
    self._num_rows = self._count_rows()
    self._num_records = self._num_rows
    if self.max_batches is not None:
      self._num_records = min(
        self._num_rows, self.max_batches * self.get_global_batch_size()
      )

  def _load(self) -> Documents:
    if isinstance(self.documents, Documents):
      for key in 'files', 'split', 'eval_fraction', 'tokenizer', 'cache_dir':
        if getattr(self, key) is not None:
          raise errors.UsageError(
            f'{self.name} has both documents and {key}={getattr(self, key)!r}:'
            ' which files they are of, and what made their tokens, is settled.'
            ' Give one of them.'
          )
      return self.documents
    if self.files is None:
      raise errors.UsageError(
        f"{self.name} has nothing to read: give files, such as 'stdlib' or a"
        ' folder, or documents, a split of load_corpus().'
      )
    if self.split is None:
      self.split = 'train' if self.is_training else 'eval'
    if self.split not in token_cache.SPLITS:
      raise errors.UsageError(
        f'{self.name}.split is {self.split!r}; expected one of'
        f' {token_cache.SPLITS}, or None to go by is_training.'
      )
    if self.eval_fraction is None:
      self.eval_fraction = _EVAL_FRACTION
    corpus = load_corpus(
      self.files,
      eval_fraction=self.eval_fraction,
      tokenizer='bytes' if self.tokenizer is None else self.tokenizer,
      documents=self.documents,
      cache_dir=self.cache_dir,
    )
    return getattr(corpus, self.split)

  def _count_rows(self) -> int:
    """Returns how many rows an epoch has."""
    num_tokens = self._documents.tokens.size
    if self.packing == 'padded':
      num_rows = int(self._row_ends[-1])
      if not num_rows:
        raise errors.UsageError(
          f'{self.name}: no document has a token to predict.'
        )
      return num_rows
    if not self.is_training:
      if num_tokens < 2:
        raise errors.UsageError(
          f'{self.name} has {num_tokens} tokens; expected 2.'
        )
      return -(-(num_tokens - 1) // self.length)
    if num_tokens < self.length:
      raise errors.UsageError(
        f'The text to train on has {num_tokens} tokens, fewer than one window'
        f' of length={self.length}. Give more text or a smaller length.'
      )
    return num_tokens // self.length

  @functools.cached_property
  def _row_ends(self) -> np.ndarray:
    """Of 'padded', the rows up to the end of each document, int64 [D]."""
    starts = self._documents.starts
    rows = np.empty(len(starts), np.int64)
    np.subtract(starts[1:], starts[:-1], out=rows[:-1])
    rows[-1] = self._documents.tokens.size - starts[-1]
    # The first token of a document is no label.
    rows += self.length - 2
    rows //= self.length
    return np.cumsum(rows, out=rows)

  def num_records(self) -> int:
    """Returns how many rows an epoch has, or `max_batches` have."""
    return self._num_records

  def read(self, records: np.ndarray, epochs: np.ndarray) -> base.Batch:
    """Returns rows, each array [b, L]."""
    rows = records
    if self._num_records != self._num_rows:
      # As integers of Python: the product may be too large for NumPy's.
      rows = np.array(
        [r * self._num_rows // self._num_records for r in records.tolist()],
        np.int64,
      )
    if self.packing == 'padded':
      starts, sizes = self._pieces(rows)
      return self._batch_of(starts.tolist(), sizes)
    starts = rows * self.length
    if self.is_training:
      starts = self._offsets(epochs) + starts
      # Rows that do not cross the end of the circle are slices.
      starts %= self._documents.tokens.size
      return self._batch_of(starts.tolist(), None)
    sizes = np.minimum(self._documents.tokens.size - 1 - starts, self.length)
    return self._batch_of(starts.tolist(), sizes)

  def _offsets(self, epochs: np.ndarray) -> np.ndarray | int:
    """Returns where epochs begin to cut the stream into windows."""
    num_tokens = self._documents.tokens.size
    if (epochs == epochs[0]).all():
      return _epoch_offset(self.seed(), int(epochs[0]), num_tokens)
    return np.array(
      [_epoch_offset(self.seed(), e, num_tokens) for e in epochs.tolist()],
      np.int64,
    )

  def _pieces(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where 'padded' rows begin, and how much they predict: [b]."""
    starts, ends = self._documents.starts, self._row_ends
    documents = np.searchsorted(ends, rows, side='right')
    before = np.where(documents > 0, ends[documents - 1], 0)
    places = (rows - before) * self.length
    is_last = documents == len(starts) - 1
    following = starts[np.where(is_last, 0, documents + 1)]
    stops = np.where(is_last, self._documents.tokens.size, following)
    begins = starts[documents] + places
    return begins, np.minimum(stops - begins - 1, self.length)

  def _batch_of(
    self, starts: list[int], sizes: np.ndarray | None
  ) -> base.Batch:
    """Cuts rows out of the stream.

    Args:
      starts: where each begins, b of them.
      sizes: how many tokens of each are predicted, at most L: the rest is
        filler. [b]; None is L of each, in a stream that is a circle.
    """
    tokens, length = self._documents.tokens, self.length
    window = np.empty((len(starts), length + 1), tokens.dtype)
    if sizes is None:
      last = tokens.size - length - 1
      for row, start in enumerate(starts):
        window[row] = (
          tokens[start : start + length + 1]
          if start <= last
          else tokens.take(range(start, start + length + 1), mode='wrap')
        )
    else:
      for row, (start, size) in enumerate(
        zip(starts, sizes.tolist(), strict=True)
      ):
        window[row, : size + 1] = tokens[start : start + size + 1]
        window[row, size + 1 :] = self._document_id
    ids_BL = window[:, :-1].astype(np.int32)
    batch = base.Batch(
      ids=ids_BL,
      labels=window[:, 1:].astype(np.int32),
      weights=(window[:, 1:] != self._document_id).astype(np.float32),
    )
    if self.packing == 'stream':
      return batch
    # The rows that are filled up, and from where on.
    short: list[tuple[int, int]] = []
    if sizes is not None:
      rows = np.flatnonzero(sizes < length)
      # There the last token is still read, for nothing.
      ids_BL[rows, sizes[rows]] = self._document_id
      short = list(zip(rows.tolist(), sizes[rows].tolist(), strict=True))
    if self.packing == 'packed':
      segment_ids_BL, segment_pos_BL = _segments(ids_BL == self._document_id)
      for row, size in short:
        segment_ids_BL[row, size:] = 0
        segment_pos_BL[row, size:] = 0
      batch['segment_ids'] = segment_ids_BL
      batch['segment_pos'] = segment_pos_BL
    else:
      batch['paddings'] = paddings_BL = np.zeros(ids_BL.shape, np.float32)
      for row, size in short:
        paddings_BL[row, size:] = 1
    return batch

  def describe_record(self, record: int, epoch: int) -> str:
    """Returns which document a row begins in, and how far in its text."""
    row = record * self._num_rows // self._num_records
    starts = self._documents.starts
    if self.packing == 'padded':
      begins, _ = self._pieces(np.array([row]))
      start = int(begins[0])
    else:
      start = row * self.length
      if self.is_training:
        start += _epoch_offset(self.seed(), epoch, self._documents.tokens.size)
        start %= self._documents.tokens.size
    document = int(np.searchsorted(starts, start, side='right')) - 1
    unit = (
      'byte'
      if isinstance(self._tokenizer, tokenization.ByteTokenizer)
      else 'token'
    )
    place = max(0, start - int(starts[document]) - 1)
    return f'{self._documents.names[document]}, from {unit} {place} on'

  def data_identity(self) -> dict[str, Any]:
    """Returns what the rows depend on."""
    return {
      'corpus_sha256': self._documents.sha256,
      'tokenizer': self._tokenizer.identity,
      'length': self.length,
      'packing': self.packing,
      'is_training': self.is_training,
    }

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    """Returns the text of token ids; see `BaseInput.ids_to_strings`."""
    del key
    rows = zip(np.asarray(ids), lengths, strict=True)
    return [self._tokenizer.decode(row[:length]) for row, length in rows]

  def __getstate__(self) -> dict[str, Any]:
    # As large as the text has documents, and quickly made again.
    return {k: v for k, v in super().__getstate__().items() if k != '_row_ends'}


def _segments(is_first_BL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Numbers the segments of each row, and the places within each.

  Args:
    is_first_BL: where segments begin; each row begins with one in any case.

  Returns:
    int32 [B, L] from 1 on, and int32 [B, L] from 0 on.
  """
  shape = num_rows, length = is_first_BL.shape
  is_first_BL[:, 0] = True
  # By segments, which are few, instead of by tokens.
  firsts = is_first_BL.ravel().nonzero()[0]
  if len(firsts) == num_rows:  # Most rows of long documents.
    places_BL = np.empty(shape, np.int32)
    places_BL[:] = _arange(length)
    return np.ones(shape, np.int32), places_BL
  sizes = np.diff(firsts, append=num_rows * length)
  first_of_row = firsts.searchsorted(np.arange(num_rows) * length)
  numbers = np.arange(1, 1 + len(firsts)) - first_of_row[firsts // length]
  ids = numbers.astype(np.int32).repeat(sizes)
  places = firsts.astype(np.int32).repeat(sizes)
  np.subtract(_arange(num_rows * length), places, out=places)
  return ids.reshape(shape), places.reshape(shape)


@functools.lru_cache(maxsize=4)
def _arange(size: int) -> np.ndarray:
  return np.arange(size, dtype=np.int32)


@functools.lru_cache(maxsize=64)
def _epoch_offset(seed: int, epoch: int, num_tokens: int) -> int:
  """Returns where an epoch begins to cut the stream into windows."""
  return token_cache.stable_hash(f'offset/{seed}/{epoch}') % num_tokens


def _find(files: Path | Sequence[Path]) -> list[token_cache.Source]:
  """Returns all files, sorted by name."""
  entries = [files] if isinstance(files, str | os.PathLike) else list(files)
  sources: dict[str, token_cache.Source] = {}
  for number, entry in enumerate(entries):
    root, paths, text_only = _match(os.fspath(entry))
    for path in sorted(paths):
      name = pathlib.Path(os.path.relpath(path, root)).as_posix()
      # Of two folders with a file of the same name both are read; a second
      # folder leaves the names of the first, and so its split, as they were.
      name = f'../{number}/{name}' if number else name
      # A second name of a file could be on the other side of the split.
      sources.setdefault(
        os.path.realpath(path), token_cache.Source(name, path, text_only)
      )
  return sorted(sources.values())


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
    raise errors.UsageError(
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
