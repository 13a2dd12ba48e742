"""The token cache: tokenizes a corpus once and maps its tokens from disk.

All tokens of a corpus are one file, <cache_dir>/<key>.tokens:

  size of the header                     int64
  header                                 JSON, padded to a multiple of 8 bytes
  documents of 'train', then of 'eval'   start, file, line: int64 [D, 3]
  tokens of 'train', then of 'eval'      uint16 or uint32 [N]

`key` is a hash of the tokenizer, of what a document is, of the fraction that is
held out, and of the names, paths, sizes and times of the text files. Changed
text has another key. The file is renamed into place when it is complete.
Processes that build it at the same time each write their own and rename it:
their content is equal.

Shapes: N tokens of a split, D documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import os
import pathlib
import shutil
import tempfile
import time
from typing import Any, Literal, NamedTuple
import zlib

from absl import logging
import numpy as np

from jaxline import disk
from jaxline import errors
from jaxline.inputs import tokenization

Path = str | os.PathLike[str]
Split = Literal['train', 'eval']

SPLITS: tuple[Split, Split] = ('train', 'eval')
# What a document can be.
KINDS = ('file', 'line', 'jsonl')

_FORMAT = 6
# Git looks at as many bytes to tell a binary file from a text.
_BINARY_PROBE_BYTES = 8000
# Text to tokenize at once: the libraries divide it over their threads.
_BATCH_BYTES = 2**24
_BUFFER_BYTES = 2**16
# What gzip and JSON raise where a file is damaged.
_UNREADABLE = (
  gzip.BadGzipFile,
  zlib.error,
  EOFError,
  LookupError,
  RecursionError,
  TypeError,
  ValueError,
)


class Source(NamedTuple):
  """A file of a corpus.

  Attributes:
    name: its name in the corpus.
    path: its path.
    text_only: whether to skip it if its content does not look like text.
  """

  name: str
  path: str
  text_only: bool


# The file, the line or 0 if it is all of the file, and the text.
_Document = tuple[int, int, bytes]


class _Names(Sequence[str]):
  """Makes the names of documents on demand: `file`, or `file:line`."""

  def __init__(self, files: Sequence[str], table: np.ndarray):
    self._files = files
    self._table = table

  def __len__(self) -> int:
    return len(self._table)

  def __getitem__(self, index: Any) -> Any:
    _, file, line = self._table[index].tolist()
    return _name(self._files[file], line)


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
  """Documents as one stream of tokens.

  Attributes:
    names: the name of each document: the path of its file relative to the
      folder that was read, and ':' and the line number if it is a line. Both
      the names and the tokens are in the order of the sorted paths.
    tokens: each document's document token and its text, uint16 or uint32 [N].
    starts: the place of each document token, int64 [D].
    sha256: the hash of the tokens.
    num_bytes: the length of the text.
    tokenizer: the tokenizer that made the tokens.
  """

  names: Sequence[str] = dataclasses.field(repr=False)
  tokens: np.ndarray = dataclasses.field(repr=False)
  starts: np.ndarray = dataclasses.field(repr=False)
  sha256: str
  num_bytes: int
  tokenizer: tokenization.Tokenizer = tokenization.BYTES
  # The file and the split of mapped tokens.
  _origin: tuple[pathlib.Path, Split] | None = dataclasses.field(
    default=None, repr=False
  )

  @property
  def num_documents(self) -> int:
    """Returns D."""
    return len(self.starts)

  def data(self) -> bytes:
    """Returns the text of all documents, one after the other.

    It is exact for bytes; other tokenizers may not give back what they got.
    """
    if isinstance(self.tokenizer, tokenization.ByteTokenizer):
      is_byte = self.tokens != self.tokenizer.document_id
      return self.tokens[is_byte].astype(np.uint8).tobytes()
    bounds = itertools.pairwise([*self.starts.tolist(), len(self.tokens)])
    return b''.join(
      self.tokenizer.decode(self.tokens[start:end]).encode()
      for start, end in bounds
    )

  def __reduce__(self) -> Any:
    # Pickle would copy mapped tokens, so a worker process maps the file itself.
    if self._origin:
      return _reopen, (*self._origin, self.tokenizer)
    fields = dataclasses.fields(self)
    return type(self), tuple(getattr(self, f.name) for f in fields)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Text for training and, from other documents, text for evaluation.

  Attributes:
    train: the documents to train on.
    eval: the documents that are held out.
  """

  train: Documents
  eval: Documents

  @property
  def summary(self) -> str:
    """The size of the corpus, in one line."""
    return (
      f'{self.train.num_documents:,} documents, {self.train.tokens.size:,}'
      f' tokens; {self.eval.num_documents:,} documents held out'
    )


def default_cache_dir() -> str:
  """Returns the folder below the user's cache."""
  base = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return os.path.join(base, 'jaxline', 'tokens')


def stable_hash(key: str) -> int:
  """Returns 64 bits that are the same in every process and version."""
  digest = hashlib.sha256(key.encode(errors='surrogateescape')).digest()
  return int.from_bytes(digest[:8], 'big')


def load(
  sources: Sequence[Source],
  tokenizer: tokenization.Tokenizer,
  kind: str,
  eval_fraction: float,
  cache_dir: Path | None = None,
) -> Corpus:
  """Returns the tokens of some files, and makes them if they are not cached.

  Args:
    sources: the files, sorted by name.
    tokenizer: what makes the tokens.
    kind: what a document is, one of `KINDS`.
    eval_fraction: the fraction of the documents to hold out, by the hash of
      their names.
    cache_dir: where the tokens are kept; None is `default_cache_dir()`.

  Raises:
    UsageError: there are fewer than two documents, or a file does not hold
      what `kind` says.
  """
  request: list[Any] = [_FORMAT, tokenizer.identity, kind, eval_fraction]
  for name, path, text_only in sources:
    status = os.stat(path)
    times = status.st_mtime_ns, status.st_ctime_ns
    path = os.path.realpath(path)
    request.append([name, path, text_only, status.st_size, *times])
  key = hashlib.sha256(json.dumps(request).encode()).hexdigest()[:40]
  folder = pathlib.Path(cache_dir or default_cache_dir()).expanduser()
  file = folder.absolute() / f'{key}.tokens'
  if not file.exists():
    began = time.monotonic()
    folder.mkdir(0o777 if cache_dir else 0o700, parents=True, exist_ok=True)
    _make(file, sources, tokenizer, kind, eval_fraction)
    secs = time.monotonic() - began
    logging.info('Tokenized %d files in %.1f s.', len(sources), secs)
  return _open(file, tokenizer)


def _open(path: pathlib.Path, tokenizer: tokenization.Tokenizer) -> Corpus:
  # As an array: slicing `np.memmap` is slow.
  data = np.memmap(path, np.uint8, 'r').view(np.ndarray)
  end = 8 + int(data[:8].view('<i8')[0])
  header = json.loads(data[8:end].tobytes())
  parts = np.split(data[end:], np.cumsum(header['sizes']))
  splits: dict[Split, Documents] = {}
  for i, split in enumerate(SPLITS):
    table = parts[i].view('<i8').reshape(-1, 3)
    splits[split] = Documents(
      names=_Names(header['files'], table),
      tokens=parts[i + 2].view(_dtype(tokenizer)),
      starts=table[:, 0],
      sha256=header['sha256'][i],
      num_bytes=header['num_bytes'][i],
      tokenizer=tokenizer,
      _origin=(path, split),
    )
  return Corpus(**splits)


def _reopen(
  path: pathlib.Path, split: Split, tokenizer: tokenization.Tokenizer
) -> Documents:
  documents: Documents = getattr(_open(path, tokenizer), split)
  return documents


def _make(
  path: pathlib.Path,
  sources: Sequence[Source],
  tokenizer: tokenization.Tokenizer,
  kind: str,
  eval_fraction: float,
) -> None:
  files = [source.name for source in sources]
  threshold = eval_fraction * 2**64
  with contextlib.ExitStack() as stack:
    while True:
      parts: list[Any] = [
        stack.enter_context(tempfile.TemporaryFile(dir=path.parent))
        for _ in range(4)
      ]
      num_bytes, least, most = [0, 0], 2**64, -1
      for batch in _batches(sources, kind):
        names = [_name(files[file], line) for file, line, _ in batch]
        hashes = [stable_hash(f'eval/{name}') for name in names]
        least, most = min(least, *hashes), max(most, *hashes)
        for i in range(2):
          chosen = [
            document
            for document, value in zip(batch, hashes, strict=True)
            if (value < threshold) == i
          ]
          if chosen:
            _append(chosen, tokenizer, parts[i], parts[i + 2])
            num_bytes[i] += sum(len(text) for *_, text in chosen)
      if least < threshold <= most:
        break
      if least >= most:
        raise errors.UsageError(
          f'{len(files)} files hold {int(most >= 0)} documents with text; at'
          ' least 2 are needed, since some are held out for evaluation. Split a'
          ' single file into parts (`split -C 100k FILE`), make its lines the'
          " documents (documents='line'), or give more files."
        )
      # The fraction of a handful of documents may be none or all of them. Hold
      # out one, or all but one.
      threshold = most if least < threshold else least + 1
    sizes = [part.tell() for part in parts]
    for part in parts:
      part.seek(0)
    header = {
      'files': files,
      'num_bytes': num_bytes,
      'sizes': sizes,
      'sha256': [
        hashlib.file_digest(part, 'sha256').hexdigest() for part in parts[2:]
      ],
    }
    encoded = json.dumps(header).encode()
    encoded += b' ' * (-len(encoded) % 8)
    with disk.replacing(path) as out:
      out.write(len(encoded).to_bytes(8, 'little') + encoded)
      for part in parts:
        part.seek(0)
        shutil.copyfileobj(part, out)


def _append(
  documents: Sequence[_Document],
  tokenizer: tokenization.Tokenizer,
  table: Any,
  tokens: Any,
) -> None:
  """Tokenizes documents and writes them to the files of a split."""
  encoded = tokenizer.encode_batch([text for *_, text in documents])
  ids, token = np.concatenate(encoded), tokenizer.document_id
  if (ids == token).any():
    raise errors.UsageError(
      f'The tokenizer {tokenizer.identity} encodes text to the document token,'
      f' {token}. Use one that never does.'
    )
  ids = ids.astype(_dtype(tokenizer))
  sizes = np.array([*map(len, encoded)])
  starts = np.cumsum(sizes) - sizes
  # Each start moves by the document tokens before it.
  places = tokens.tell() // ids.itemsize + starts + np.arange(len(starts))
  rows = np.array([document[:2] for document in documents])
  table.write(np.column_stack([places, rows]).astype('<i8').data)
  tokens.write(np.insert(ids, starts, token).data)


def _batches(sources: Sequence[Source], kind: str) -> Iterator[list[_Document]]:
  batch, size = [], 0
  for i, (_, path, text_only) in enumerate(sources):
    for line, text in _texts(path, text_only, kind):
      batch.append((i, line, text))
      size += len(text)
      if size >= _BATCH_BYTES:
        yield batch
        batch, size = [], 0
  if batch:
    yield batch


def _texts(
  path: str, text_only: bool, kind: str
) -> Iterator[tuple[int, bytes]]:
  """Yields the line and the text of each document of a file."""
  line, row = 0, b''
  try:
    with _open_text(path) as file:
      head = file.peek(_BINARY_PROBE_BYTES)[:_BINARY_PROBE_BYTES]
      if not head or (text_only and b'\0' in head):
        return
      if kind == 'file':
        yield 0, file.read()
        return
      for line, row in enumerate(file, 1):
        text = row.rstrip(b'\r\n')
        if kind == 'jsonl' and (text := text.strip()):
          # JSON can hold halves of characters, which UTF-8 cannot.
          text = str.encode(json.loads(text)['text'], errors='replace')
        if text:
          yield line, text
  except _UNREADABLE as e:
    raise errors.UsageError(
      f'{path}:{line} cannot be read as {kind!r} ({type(e).__name__}: {e}):'
      f" {row[:80]!r}. A line of 'jsonl' is an object with a string 'text'."
    ) from e


def _open_text(path: str) -> Any:
  if path.endswith('.gz'):
    # The buffer of GzipFile is too small for `peek` and slow to read lines of.
    return io.BufferedReader(gzip.GzipFile(path), _BUFFER_BYTES)
  return open(path, 'rb', _BUFFER_BYTES)


def _name(file: str, line: int) -> str:
  return f'{file}:{line}' if line else file


def _dtype(tokenizer: tokenization.Tokenizer) -> str:
  return '<u2' if tokenizer.vocab_size <= 2**16 else '<u4'
