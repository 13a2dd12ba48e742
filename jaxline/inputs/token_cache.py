"""Tokens of a corpus: made in one pass over its files, then mapped from disk.

The pass reads each file once: it hashes the bytes, cuts the text into
documents, tokenizes them, and writes the tokens. Mapped tokens take no memory,
and to make them takes no more than the largest documents do (files as bytes:
not even that).

All tokens of a corpus are one file, <cache_dir>/<key>.tokens. It is written
under another name and renamed when it is complete; of several processes that
make it, the first one's stays. Its parts, each of which begins at a multiple of
8 bytes:

  tokens of 'train', then of 'eval'     uint16 or uint32 [N]
  documents of 'train', then of 'eval'  of each: the place in the tokens, the
                                        file, the line in it or 0, int64 [D, 3]
  about                                 JSON: the sizes of these parts in bytes,
                                        and the hash of each file
  the size of `about`                   int64

`key` is a hash of the tokenizer, of what a document is, of the fraction that is
held out, and of the names, paths, sizes and times of the files. If the text is
changed, the key is another.

Shapes: N tokens of a split, D documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import io
import itertools
import json
import os
import pathlib
import secrets
import shutil
import tempfile
import time
from typing import Any, BinaryIO, Literal, NamedTuple
import zlib

from absl import logging
import numpy as np

from jaxline import errors
from jaxline.inputs import tokenization

Path = str | os.PathLike[str]
Split = Literal['train', 'eval']

SPLITS: tuple[Split, Split] = ('train', 'eval')
# Of a file, in this order.
_PARTS = tuple(
  f'{split} {name}' for name in ('tokens', 'documents') for split in SPLITS
)
# What a document can be.
KINDS = ('file', 'line', 'jsonl')

_FORMAT = 5
_ALIGNMENT = 8
# Git looks at as many bytes to tell a binary file from a text.
_BINARY_PROBE_BYTES = 8000
# Text that is tokenized at once.
_BATCH_BYTES = 2**22
_BUFFER_BYTES = 2**16


class Source(NamedTuple):
  """A file of a corpus.

  Attributes:
    name: its name in the corpus.
    path: where it is.
    text_only: whether to leave it out if its content does not look like text.
  """

  name: str
  path: str
  text_only: bool


class _File(NamedTuple):
  """What is kept of a source.

  Attributes:
    name: its name.
    size: in bytes, on the disk.
    sha256: of its bytes on the disk.
    is_used: whether it is neither empty nor left out.
  """

  name: str
  size: int
  sha256: str
  is_used: bool


class _Names(Sequence[str]):
  """Names of documents, made when asked for: `path`, or `path:line`."""

  def __init__(self, files: Sequence[_File], documents: np.ndarray):
    self._files = files
    self._documents = documents

  def __len__(self) -> int:
    return len(self._documents)

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      return tuple(self[i] for i in range(len(self))[index])
    _, file, line = self._documents[index].tolist()
    return _name(self._files[file].name, line)


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
  """Documents as one stream of tokens.

  Attributes:
    names: of each document: the path of its file relative to the folder that
      was read, with ':' and the number of the line if it is one; in the order
      of the tokens, which is that of the sorted paths.
    tokens: the document token and then the tokens of each, uint16 or uint32
      [N].
    starts: the place of each document token, int64 [D].
    sha256: where a document is a file, the SHA-256 hash of what `sha256sum`
      prints for these files; else a hash of that of all files, and the split.
    num_files: how many files they come from.
    num_bytes: how long they are as text.
    tokenizer: the one that made the tokens.
  """

  names: Sequence[str] = dataclasses.field(repr=False)
  tokens: np.ndarray = dataclasses.field(repr=False)
  starts: np.ndarray = dataclasses.field(repr=False)
  sha256: str
  num_files: int
  num_bytes: int
  tokenizer: tokenization.Tokenizer = tokenization.BYTES
  # The file and the split of tokens that are mapped.
  _origin: tuple[str, Split] | None = dataclasses.field(
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
    # Pickled, maps would be copied whole. A worker maps the file itself.
    if self._origin:
      return _reopen, (*self._origin, self.sha256, self.tokenizer)
    fields = dataclasses.fields(self)
    return type(self), tuple(getattr(self, f.name) for f in fields)


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Text for training and, from other documents, text for evaluation.

  Attributes:
    train: the documents to train on.
    eval: the documents that are held out.
    sha256: the SHA-256 hash of the output of `sha256sum` for all files.
  """

  train: Documents
  eval: Documents
  sha256: str

  @property
  def summary(self) -> str:
    """How much text there is, in a line."""
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


# Opening.


def _open(path: pathlib.Path, tokenizer: tokenization.Tokenizer) -> Corpus:
  """Maps the tokens in a file."""
  # As an array: `np.memmap` itself is slow to slice.
  data = np.memmap(path, np.uint8, 'r').view(np.ndarray)
  (size,) = data[-8:].view('<i8').tolist()
  about = json.loads(data[-8 - size : -8].tobytes())
  files = [_File(*file) for file in about['files']]
  parts: dict[str, np.ndarray] = {}
  start = 0
  for name in _PARTS:
    dtype = '<i8' if name.endswith('documents') else _dtype(tokenizer)
    stop = start + about['sizes'][name]
    parts[name] = data[start:stop].view(dtype)
    start = _aligned(stop)
  if start + size + 8 != len(data):
    raise errors.UsageError(
      f'{path} has {len(data):,} bytes; expected {start + size + 8:,}. Delete'
      ' it, so that its tokens are made anew.'
    )
  splits: dict[Split, Documents] = {}
  for split in SPLITS:
    table = parts[f'{split} documents'].reshape(-1, 3)
    names = _Names(files, table)
    splits[split] = Documents(
      names=tuple(names) if about['kind'] == 'file' else names,
      tokens=parts[f'{split} tokens'],
      starts=table[:, 0],
      **about[split],
      tokenizer=tokenizer,
      _origin=(str(path), split),
    )
  return Corpus(**splits, sha256=_corpus_sha256(files))


def _reopen(
  path: str, split: Split, sha256: str, tokenizer: tokenization.Tokenizer
) -> Documents:
  """Maps in a worker process what its parent has mapped."""
  documents: Documents = getattr(_open(pathlib.Path(path), tokenizer), split)
  if documents.sha256 != sha256:
    raise ValueError(f'{path} is of other text by now. Start again.')
  return documents


def _aligned(place: int) -> int:
  return -(-place // _ALIGNMENT) * _ALIGNMENT


def _corpus_sha256(files: Iterable[_File]) -> str:
  """Returns the SHA-256 hash of the output of `sha256sum` for some files."""
  total = hashlib.sha256()
  for file in files:
    if file.is_used:
      line = f'{file.sha256}  {file.name}\n'
      total.update(line.encode(errors='surrogateescape'))
  return total.hexdigest()


def _dtype(tokenizer: tokenization.Tokenizer) -> str:
  return '<u2' if tokenizer.vocab_size <= 2**16 else '<u4'


# Building.


@dataclasses.dataclass
class Builder:
  """Makes tokens of files, and opens those that were made of them.

  Attributes:
    sources: the files, sorted by name.
    tokenizer: the one to make them with.
    kind: what a document is, one of `KINDS`.
    eval_fraction: which part of the documents to hold out, by the hash of their
      names.
    key: of the file.
    size: of the files, in bytes.
    is_bytes: whether the tokens are the bytes.
  """

  sources: Sequence[Source]
  tokenizer: tokenization.Tokenizer
  kind: str
  eval_fraction: float

  def __post_init__(self) -> None:
    # A subclass may make other tokens.
    self.is_bytes = type(self.tokenizer) is tokenization.ByteTokenizer
    tokens = self.tokenizer.identity
    self._request = [_FORMAT, tokens, self.kind, self.eval_fraction]
    # `run` adds the hashes, and which files are used.
    self._files = []
    # With the paths, so that two corpora whose files have the same names do not
    # share a key; with the times, so that text that changes has another.
    named = []
    for source in self.sources:
      status = os.stat(source.path)
      self._files.append(_File(source.name, status.st_size, '', True))
      path = os.path.realpath(source.path)
      times = status.st_mtime_ns, status.st_ctime_ns
      named.append((source.name, path, source.text_only, status.st_size, times))
    self.size = sum(file.size for file in self._files)
    key = json.dumps([self._request, named]).encode()
    self.key = hashlib.sha256(key).hexdigest()[:40]

  def load(self, cache_dir: Path | None = None) -> Corpus:
    """Returns the tokens, made now if they were not made before.

    Args:
      cache_dir: where; None is `default_cache_dir()`.

    Raises:
      UsageError: there are fewer than two documents, a file is not what `kind`
        says, or was written meanwhile; or the folder cannot be written to.
    """
    root = pathlib.Path(cache_dir or default_cache_dir())
    root = root.expanduser().absolute()
    path = root / f'{self.key}.tokens'
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      return _open(path, self.tokenizer)
    part = root / f'{self.key}.{secrets.token_hex(8)}.part'
    try:
      root.mkdir(0o777 if cache_dir else 0o700, parents=True, exist_ok=True)
      file = part.open('xb')
    except OSError as e:
      raise errors.UsageError(
        f'The folder for tokens, {root}, cannot be written to ({e}). Give'
        ' another cache_dir, or set XDG_CACHE_HOME.'
      ) from e
    try:
      with file:
        self.run(file, root)
        file.flush()
        os.fsync(file.fileno())
      # Another process may have been faster, and others have mapped its file,
      # which on a network file system they would lose.
      with contextlib.suppress(FileNotFoundError):
        return _open(path, self.tokenizer)
      part.replace(path)
    finally:
      part.unlink(missing_ok=True)
    return _open(path, self.tokenizer)

  def run(self, file: BinaryIO, folder: pathlib.Path) -> None:
    """Writes all tokens.

    Args:
      file: where to, empty.
      folder: for temporary files.
    """
    began = time.monotonic()
    # Of lines the names are not known yet, and of files not which are empty.
    known = self._files if self.kind == 'file' else []
    hashes = [stable_hash(f'eval/{file.name}') for file in known]
    threshold = self._threshold(
      min(hashes, default=0), max(hashes, default=2**64)
    )
    with contextlib.ExitStack() as stack:
      # The largest part is written where it stays.
      out = {
        name: stack.enter_context(tempfile.TemporaryFile(dir=folder))
        if name != _PARTS[0]
        else file
        for name in _PARTS
      }
      while True:
        writers, least, most = self._tokenize(out, threshold)
        before, threshold = threshold, self._threshold(least, most)
        if threshold == before:
          break
        for part in out.values():  # Some documents change sides.
          part.seek(0)
          part.truncate()
      about: dict[str, Any] = {'kind': self.kind, 'files': self._files}
      about['sizes'] = {}
      for name, part in out.items():
        about['sizes'][name] = part.tell()
        if part is not file:
          part.seek(0)
          shutil.copyfileobj(part, file)
        file.write(bytes(_aligned(file.tell()) - file.tell()))
    for split, writer in writers.items():
      rule = [_corpus_sha256(self._files), *self._request[2:], split]
      sha256 = hashlib.sha256(json.dumps(rule).encode()).hexdigest()
      if self.kind == 'file':
        sha256 = _corpus_sha256(self._files[i] for i in writer.files)
      about[split] = {
        'sha256': sha256,
        'num_files': len(writer.files),
        'num_bytes': writer.num_bytes,
      }
    data = json.dumps(about).encode()
    file.write(data + len(data).to_bytes(8, 'little'))
    secs = time.monotonic() - began
    logging.info('Tokenized %d files in %.1f s.', len(self._files), secs)

  def _threshold(self, least: int, most: int) -> float:
    """Returns below which hash documents are held out.

    Of a handful of documents, a fraction may be none or all: it shall be one,
    or all but one. So it depends on the least and the largest hash.
    """
    threshold = self.eval_fraction * 2**64
    if least < threshold <= most:
      return threshold
    return most if least < threshold else least + 1

  def _tokenize(
    self, out: Mapping[str, BinaryIO], threshold: float
  ) -> tuple[dict[Split, _Writer], int, int]:
    """Writes the tokens.

    Returns:
      The writer of each split, and the smallest and the largest hash of a
      document.
    """
    least, most, count = 2**64, -1, 0
    writers: dict[Split, _Writer] = {
      split: _Writer(self, out[f'{split} tokens'], out[f'{split} documents'])
      for split in SPLITS
    }
    for file, line, text in self._texts():
      if line >= 0:
        value = stable_hash(f'eval/{_name(self.sources[file].name, line)}')
        least = value if value < least else least
        most = value if value > most else most
        count += 1
        writer = writers['eval' if value < threshold else 'train']
      writer.add(file, line, text)
    for writer in writers.values():
      writer.flush()
    if count < 2:
      num_files = sum(f.size > 0 and f.is_used for f in self._files)
      raise errors.UsageError(
        f'The text has {num_files} files that are not empty, with'
        f' {count} documents; at least 2 documents are needed, since'
        ' some are held out for evaluation. Split a single file into parts'
        ' (`split -C 100k FILE`), make its lines the documents'
        " (documents='line'), or give more files."
      )
    return writers, least, most

  def _texts(self) -> Iterator[tuple[int, int, bytes]]:
    """Yields the file, the line and the text of documents; hashes the files."""
    for i, source in enumerate(self.sources):
      with _open_hashed(source.path, self._files[i].size) as (file, raw):
        head = file.peek(_BINARY_PROBE_BYTES)[:_BINARY_PROBE_BYTES]
        is_used = bool(head) and not (source.text_only and b'\0' in head)
        for line, text in self._documents(file, source) if is_used else ():
          yield i, line, text
      self._files[i] = self._files[i]._replace(
        sha256=raw.sha256.hexdigest(), is_used=is_used
      )

  def _documents(
    self, file: BinaryIO, source: Source
  ) -> Iterator[tuple[int, bytes]]:
    """Yields texts with their lines: 0 is a file, -1 is more of a file."""
    if self.kind == 'file':
      pieces = iter(functools.partial(file.read, _BATCH_BYTES), b'')
      if not self.is_bytes:
        pieces = iter([b''.join(pieces)])  # It may merge over any bound.
      yield 0, next(pieces)
      yield from ((-1, piece) for piece in pieces)
      return
    for number, row in enumerate(file, 1):
      text = row.rstrip(b'\r\n')
      if self.kind == 'jsonl' and text.strip():
        try:
          # JSON can hold halves of characters, which UTF-8 cannot.
          text = str.encode(json.loads(text)['text'], errors='replace')
        except (LookupError, RecursionError, TypeError, ValueError) as e:
          raise errors.UsageError(
            f"{source.path}:{number} is no JSON object with a string 'text'"
            f' ({type(e).__name__}: {e}): {text[:80]!r}.'
          ) from e
      elif self.kind == 'jsonl':
        continue
      if text:
        yield number, text


class _Writer:
  """Tokenizes the texts of a split, and writes its tokens and documents.

  Attributes:
    files: the numbers of those that its documents come from.
    num_bytes: how long its texts are.
  """

  def __init__(self, build: Builder, tokens: BinaryIO, documents: BinaryIO):
    self._build = build
    self._tokens, self._documents = tokens, documents
    # The libraries tokenize the texts of a batch in parallel.
    num_threads = 1 if build.is_bytes else min(os.cpu_count() or 1, 16)
    self._batch_bytes = _BATCH_BYTES * num_threads
    self._num_tokens = 0
    self.files: list[int] = []
    self.num_bytes = 0
    self._clear()

  def _clear(self) -> None:
    # Not a tuple for each text: it would take more memory than a line.
    self._files: list[int] = []
    self._lines: list[int] = []
    self._texts: list[bytes] = []
    self._waiting = 0

  def add(self, file: int, line: int, text: bytes) -> None:
    """Adds a document of a file; line 0 is all of it, -1 more of it."""
    self._files.append(file)
    self._lines.append(line)
    self._texts.append(text)
    self._waiting += len(text)
    if self._waiting >= self._batch_bytes:
      self.flush()

  def flush(self) -> None:
    """Tokenizes and writes the texts that were added."""
    if not self._texts:
      return
    build, files, lines = self._build, self._files, self._lines
    if build.is_bytes:  # Without an array for each line.
      ids = np.frombuffer(b''.join(self._texts), np.uint8)
      sizes = np.array([*map(len, self._texts)])
    else:
      encoded = build.tokenizer.encode_batch(self._texts)
      ids = np.concatenate(encoded)
      sizes = np.array([*map(len, encoded)])
    ends = np.cumsum(sizes)
    token = build.tokenizer.document_id
    if (strange := np.flatnonzero(ids == token)).size:
      i = int(np.searchsorted(ends, strange[0], 'right'))
      name = _name(build.sources[files[i]].name, lines[i])
      raise errors.UsageError(
        f'The document token {token} stands within the text of a document:'
        f' {name}, {self._texts[i][:80]!r}. Use a tokenizer that never encodes'
        ' text to it.'
      )
    table = np.column_stack([ends - sizes, files, lines]).astype('<i8')
    table = table[table[:, 2] >= 0]
    tokens = ids.astype(_dtype(build.tokenizer))
    tokens = np.insert(tokens, table[:, 0], token)
    table[:, 0] += self._num_tokens + np.arange(len(table))
    self._num_tokens += len(tokens)
    last = self.files[-1:]
    self.files += [x for x in np.unique(files).tolist() if x not in last]
    self.num_bytes += self._waiting
    self._tokens.write(tokens.data)
    self._documents.write(table.data)
    self._clear()


class _HashedFile(io.FileIO):
  """A file that is hashed as it is read, from its beginning to its end."""

  def __init__(self, path: str):
    super().__init__(path)
    self.sha256 = hashlib.sha256()

  def readinto(self, buffer: Any) -> int | None:
    size = super().readinto(buffer)
    self.sha256.update(memoryview(buffer)[:size])
    return size


@contextlib.contextmanager
def _open_hashed(path: str, size: int) -> Iterator[tuple[Any, _HashedFile]]:
  """Opens a file; yields it unpacked, and as it is, hashed to its end."""
  with _HashedFile(path) as raw:
    before = os.fstat(raw.fileno())
    file = io.BufferedReader(raw, _BUFFER_BYTES)
    try:
      if path.endswith('.gz'):
        with gzip.GzipFile(fileobj=file) as unpacked:
          # Its own buffer is too small for `peek`, and slow to read lines of.
          yield io.BufferedReader(unpacked, _BUFFER_BYTES), raw
      else:
        yield file, raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
      raise errors.UsageError(f'{path} cannot be unpacked: {e}.') from e
    while file.read(_BATCH_BYTES):  # What was left out.
      pass
    after = os.fstat(raw.fileno())
    if after.st_size != size or after.st_mtime_ns != before.st_mtime_ns:
      raise errors.UsageError(
        f'{path} was written while it was being read. Start again when it is'
        ' complete.'
      )


def _name(file: str, line: int) -> str:
  return f'{file}:{line}' if line > 0 else file
