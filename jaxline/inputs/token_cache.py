"""Tokenizes a corpus once and maps its tokens from disk.

All tokens of a corpus are one file, <cache_dir>/<key>.tokens:

  size of the header                     int64
  header                                 JSON, padded to a multiple of 8 bytes
  documents of 'train', then of 'eval'   start, file, line: int64 [D, 3]
  tokens of 'train', then of 'eval'      uint16 or uint32 [N]

`key` is a hash of the tokenizer, the kind of documents, the fraction that is
held out, and the names, paths, sizes and times of the text files. The file is
renamed into place once it is complete, also where several processes make it.

Shapes: N tokens of a split, D documents.
"""

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
from typing import Any, NamedTuple
import zlib

from absl import logging
import numpy as np

from jaxline import errors
from jaxline.base import disk
from jaxline.inputs import tokenization

Path = str | os.PathLike[str]

# What a document can be.
KINDS = ('file', 'line', 'jsonl')

_FORMAT = 6
_BINARY_PROBE_BYTES = 8000  # As Git does.
_BATCH_BYTES = 2**24  # Text to tokenize at once, by several threads.
# Raised for damaged JSON and gzip files, besides gzip.BadGzipFile.
_DAMAGED = (EOFError, LookupError, TypeError, ValueError, zlib.error)


class Source(NamedTuple):
  """A file of a corpus: its name there, its path, whether to skip binaries."""

  name: str
  path: str
  text_only: bool


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
  """Documents, sorted by name, as one stream of tokens.

  Attributes:
    names: the path of each document's file relative to the folder that was
      read; a line adds ':' and its number.
    tokens: each document's document token and its text, uint16 or uint32 [N].
    starts: the place of each document token, int64 [D].
    sha256: the hash of the tokens.
    num_bytes: the length of the text.
  """

  names: Sequence[str] = dataclasses.field(repr=False)
  tokens: np.ndarray = dataclasses.field(repr=False)
  starts: np.ndarray = dataclasses.field(repr=False)
  sha256: str
  num_bytes: int
  tokenizer: tokenization.Tokenizer = tokenization.BYTES
  # The arguments of `_open` for tokens that are mapped.
  _origin: tuple[Any, ...] | None = dataclasses.field(default=None, repr=False)

  def data(self) -> bytes:
    """Returns the text of all documents, one after the other.

    It is exact for bytes; other tokenizers may not give back what they got.
    """
    if isinstance(self.tokenizer, tokenization.ByteTokenizer):
      is_byte = self.tokens != self.tokenizer.document_id
      return self.tokens[is_byte].astype(np.uint8).tobytes()
    documents = np.split(self.tokens, self.starts[1:])
    return b''.join(self.tokenizer.decode(ids).encode() for ids in documents)

  def __reduce__(self) -> Any:
    # A worker process maps the file itself: pickle would copy the tokens.
    return (_open, self._origin) if self._origin else object.__reduce__(self)


class Corpus(NamedTuple):
  """The documents to train on, and those that are held out."""

  train: Documents
  eval: Documents


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
  """Returns the tokens of files, sorted by name; see `text.load_corpus`."""
  request: list[Any] = [_FORMAT, tokenizer.identity, kind, eval_fraction]
  for name, path, text_only in sources:
    status = os.stat(path)
    times = status.st_mtime_ns, status.st_ctime_ns
    path = os.path.realpath(path)
    request.append([name, path, text_only, status.st_size, *times])
  key = hashlib.sha256(json.dumps(request).encode()).hexdigest()[:40]
  cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  folder = pathlib.Path(cache_dir or f'{cache}/jaxline/tokens').expanduser()
  file = folder.absolute() / f'{key}.tokens'
  if not file.exists():
    logging.info('Tokenizing %d files for %s.', len(sources), folder)
    folder.mkdir(0o777 if cache_dir else 0o700, parents=True, exist_ok=True)
    _make(file, sources, tokenizer, kind, eval_fraction * 2**64)
  return Corpus(_open(file, tokenizer, 0), _open(file, tokenizer, 1))


def _open(
  path: pathlib.Path, tokenizer: tokenization.Tokenizer, i: int
) -> Documents:
  # As an array: slicing `np.memmap` is slow.
  data = np.memmap(path, np.uint8, 'r').view(np.ndarray)
  end = 8 + int(data[:8].view('<i8')[0])
  header = json.loads(data[8:end].tobytes())
  parts = np.split(data[end:], np.cumsum(header['sizes']))
  table = parts[i].view('<i8').reshape(-1, 3)
  return Documents(
    names=_Names(header['files'], table),
    tokens=parts[i + 2].view(_dtype(tokenizer)),
    starts=table[:, 0],
    sha256=header['sha256'][i],
    num_bytes=header['num_bytes'][i],
    tokenizer=tokenizer,
    _origin=(path, tokenizer, i),
  )


def _make(
  path: pathlib.Path,
  sources: Sequence[Source],
  tokenizer: tokenization.Tokenizer,
  kind: str,
  threshold: float,
) -> None:
  """Writes a corpus; holds out the documents with a hash below a threshold."""
  files = [source.name for source in sources]
  num_bytes, digests = [0, 0], [hashlib.sha256(), hashlib.sha256()]
  least, most = 2**64, -1
  with contextlib.ExitStack() as stack:
    parts: list[Any] = [
      stack.enter_context(tempfile.TemporaryFile(dir=path.parent))
      for _ in range(4)
    ]
    for places, texts in _batches(sources, kind):
      names = [_name(files[file], line) for file, line in places]
      hashes = [stable_hash(f'eval/{name}') for name in names]
      least, most = min(least, *hashes), max(most, *hashes)
      is_held_out = np.array([value < threshold for value in hashes])
      stream, lengths = _encode(texts, tokenizer)
      for i in range(2):
        table, tokens, chosen = parts[i], parts[i + 2], is_held_out == i
        starts = np.cumsum(lengths[chosen]) - lengths[chosen]
        starts += tokens.tell() // stream.itemsize
        rows = np.column_stack([starts, np.array(places)[chosen]])
        table.write(rows.astype('<i8').data)
        data = stream[np.repeat(chosen, lengths)].data
        tokens.write(data)
        digests[i].update(data)
        num_bytes[i] += sum(map(len, itertools.compress(texts, chosen)))
    if least >= most:
      raise errors.UsageError(
        f'{len(files)} files hold {int(most >= 0)} documents with text, and 2'
        " are needed. Give more files, or documents='line'."
      )
    if not least < threshold <= most:
      # Never hold out none or all: hold out one, or all but one.
      threshold = most if least < threshold else least + 1
      return _make(path, sources, tokenizer, kind, threshold)
    header = {
      'files': files,
      'num_bytes': num_bytes,
      'sizes': [part.tell() for part in parts],
      'sha256': [digest.hexdigest() for digest in digests],
    }
    encoded = json.dumps(header).encode()
    encoded += b' ' * (-len(encoded) % 8)
    with disk.replacing(path) as out:
      out.write(len(encoded).to_bytes(8, 'little') + encoded)
      for part in parts:
        part.seek(0)
        shutil.copyfileobj(part, out)


def _encode(
  texts: Sequence[bytes], tokenizer: tokenization.Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tokens of documents as one stream, and their lengths."""
  encoded, token = tokenizer.encode_batch(texts), tokenizer.document_id
  ids = np.concatenate(encoded, dtype=_dtype(tokenizer), casting='unsafe')
  if (ids == token).any():
    raise errors.UsageError(
      f'The tokenizer {tokenizer.identity} encodes text to its document token,'
      f' {token}. Use a token that no text has.'
    )
  sizes = np.array([*map(len, encoded)])
  return np.insert(ids, np.cumsum(sizes) - sizes, token), sizes + 1


def _batches(
  sources: Sequence[Source], kind: str
) -> Iterator[tuple[list[tuple[int, int]], list[bytes]]]:
  """Yields documents: the file and the line, or 0 for all of it; the text."""
  places, texts, size = [], [], 0
  for i, (_, path, text_only) in enumerate(sources):
    for line, text in _texts(path, text_only, kind):
      places.append((i, line))
      texts.append(text)
      size += len(text)
      if size >= _BATCH_BYTES:
        yield places, texts
        places, texts, size = [], [], 0
  if texts:
    yield places, texts


def _texts(
  path: str, text_only: bool, kind: str
) -> Iterator[tuple[int, bytes]]:
  """Yields the line and the text of each document of a file."""
  line, row = 0, b''
  raw: Any = gzip.GzipFile(path) if path.endswith('.gz') else io.FileIO(path)
  try:
    # GzipFile's own buffer is too small for `peek`.
    with io.BufferedReader(raw, 2**16) as file:
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
  except (gzip.BadGzipFile, *_DAMAGED) as e:
    raise errors.UsageError(
      f'{path}:{line} cannot be read as {kind!r} ({e!r}): {row[:80]!r}. A line'
      " of 'jsonl' is an object with a string 'text'."
    ) from e


def _name(file: str, line: int) -> str:
  return f'{file}:{line}' if line else file


def _dtype(tokenizer: tokenization.Tokenizer) -> str:
  return '<u2' if tokenizer.vocab_size <= 2**16 else '<u4'
