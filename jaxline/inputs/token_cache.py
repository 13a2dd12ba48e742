"""Tokens of a corpus, made once and then read from disk.

A cache is a folder of plain files. Its name is the hash of everything that its
tokens depend on: the tokenizer, the names and contents of the files, what a
document is, and the split. It is built under another name and then renamed, so
that it exists completely or not at all; other processes wait for it meanwhile.
Tokens are mapped into memory: reading takes no more memory for a larger corpus,
and building no more than the largest documents take (files as bytes: not even
that). Any part of the cache may be deleted when no run uses it.

  <cache_dir>/hashes/<folder>.json   hashes of files, by size and time
  <cache_dir>/<key>/
    meta.json                        what it is; size and checksums of each file
    train.tokens.bin, eval...        uint16 or uint32 [N]
    train.starts.npy, eval...        of each document in the tokens, int64 [D]
    train.files.json, eval...        names of the files that have documents
    train.first.npy, eval...         the first document of each, int64 [F]
    train.lines.npy, eval...         the line of each document, int64 [D]

The last two exist only if a document is a line.

All files of a cache are checked. `meta.json` must match the caller's request
and its own checksum; every other file must be a regular file of the size and
the CRC-32 of each block in `meta.json`, and its numbers must be in range. If
anything differs, the tokens are made again from the text, with a warning.

Shapes: N tokens of a split, D documents, F files.
"""

from __future__ import annotations

import bisect
from collections.abc import (
  Callable,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
  Set,
)
from concurrent import futures
import contextlib
import dataclasses
import errno
import fcntl
import functools
import gzip
import hashlib
import io
import itertools
import json
import os
import pathlib
import re
import reprlib
import secrets
import shutil
import socket
import stat
import tempfile
import threading
import time
from typing import Any, BinaryIO, Literal, overload
import zlib

from absl import logging
import numpy as np

from jaxline.inputs import tokenization

Path = str | os.PathLike[str]
Split = Literal['train', 'eval']

SPLITS: tuple[Split, Split] = ('train', 'eval')
# What a document can be.
KINDS = ('file', 'line', 'jsonl')

# Part of the key: another number would be another folder for the same tokens.
_KEY_FORMAT = 1
# Of the files. Format 1 had no checksums.
_FORMAT = 2
_META = 'meta.json'
# What the metadata must say, word for word.
_DESCRIPTION = (
  'format',
  'tokenizer',
  'kind',
  'eval_fraction',
  'corpus_sha256',
  'dtype',
)
# A block of a file has a checksum of its own, so that threads share a file.
_BLOCK_BYTES = 2**26
_MAX_META_BYTES = 2**26
_MAX_HASHES_BYTES = 2**30
# How NumPy begins a file of int64 [N]. Any other header is refused unread.
_HEADER = re.compile(
  rb"\x93NUMPY\x01\x00..\{'descr': '<i8', 'fortran_order': False,"
  rb" 'shape': \((\d{1,18}),\), \} *\n",
  re.DOTALL,
)
_SHA256 = re.compile('[0-9a-f]{64}')
# Follows no link, and does not wait for the other end of a FIFO.
_NO_SURPRISE = os.O_NOFOLLOW | os.O_NONBLOCK
# Git looks at as many bytes to tell a binary file from a text.
_BINARY_PROBE_BYTES = 8000
# A file that was written just before it was hashed may be written again within
# the same tick of its file system's clock; git waits as long.
_SETTLED_NS = 2 * 10**9
# Text that is tokenized at once, in each thread.
_BATCH_BYTES = 2**22
_MIN_GROUP_BYTES = 2**24
# Without a folder to write to, more than this is not tokenized at each start.
_MAX_UNCACHED_BYTES = 10**9
_ABANDONED_SECONDS = 24 * 3600


@dataclasses.dataclass(frozen=True)
class Source:
  """A file of a corpus, as it was when it was hashed.

  Attributes:
    path: where it is.
    name: its name in the corpus.
    size: in bytes, on the disk.
    mtime_ns: when it was written.
    sha256: of its bytes on the disk.
    is_empty: whether there is no text in it.
    is_binary: whether its content does not look like text.
  """

  path: str
  name: str
  size: int
  mtime_ns: int
  sha256: str
  is_empty: bool
  is_binary: bool


class LineNames(Sequence[str]):
  """Names of documents that are lines: `path:line`, made when asked for."""

  def __init__(
    self, files: Sequence[str], first: np.ndarray, lines: np.ndarray
  ):
    """Gets the arrays of the cache.

    Args:
      files: names of files.
      first: the first document of each, int64 [F].
      lines: the line of each document, from 1, int64 [D].
    """
    self._files = files
    self._first = first
    self._lines = lines

  def __len__(self) -> int:
    """Returns the number of documents."""
    return len(self._lines)

  @overload
  def __getitem__(self, index: int) -> str: ...

  @overload
  def __getitem__(self, index: slice) -> tuple[str, ...]: ...

  def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
    """Returns the name of a document, or of several."""
    if isinstance(index, slice):
      return tuple(self[i] for i in range(*index.indices(len(self))))
    if not -len(self) <= index < len(self):
      raise IndexError(f'Document {index} of {len(self)}.')
    index %= len(self)
    file = int(np.searchsorted(self._first, index, side='right')) - 1
    return _line_name(self._files[file], int(self._lines[index]))


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
  # What `_reopen` needs, but for the tokenizer.
  _origin: tuple[Any, ...] | None = dataclasses.field(default=None, repr=False)

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
    ends = itertools.chain(self.starts[1:].tolist(), [len(self.tokens)])
    return b''.join(
      self.tokenizer.decode(self.tokens[start:end]).encode()
      for start, end in zip(self.starts.tolist(), ends, strict=True)
    )

  def __reduce__(self) -> Any:
    # Pickled, maps would be copied whole; a worker maps the files itself, and
    # need not verify them again.
    if self._origin:
      return _reopen, (*self._origin, self.tokenizer)
    fields = dataclasses.fields(self)
    return type(self), tuple(getattr(self, f.name) for f in fields)


def default_cache_dir() -> str:
  """Returns the folder below the user's cache."""
  base = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return os.path.join(base, 'jaxline', 'tokens')


def _root(cache_dir: Path | None) -> pathlib.Path:
  path = pathlib.Path(cache_dir or default_cache_dir())
  return path.expanduser().absolute()


def _make_root(cache_dir: Path | None) -> pathlib.Path:
  """Makes the folder of the cache; the default one for this user alone."""
  root = _root(cache_dir)
  if cache_dir:
    root.mkdir(parents=True, exist_ok=True)
  else:
    root.parent.parent.mkdir(parents=True, exist_ok=True)
    root.parent.mkdir(mode=0o700, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    _check_owner(cache_dir)
  return root


def _check_owner(cache_dir: Path | None) -> None:
  """Refuses a default folder that another user could have prepared.

  A folder that the user has named is used whoever owns it.

  Raises:
    PermissionError: it, or a link that leads to it, is another user's, or
      everybody can write to it.
  """
  if cache_dir:
    return
  root = _root(cache_dir)
  for folder in (root.parent, root):
    try:
      found = (folder.lstat(), folder.stat())
    except FileNotFoundError:
      continue
    for status in found:
      if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f'{folder} belongs to user {status.st_uid}')
    if found[1].st_mode & stat.S_IWOTH:
      raise PermissionError(f'everybody can write to {folder}')


def corpus_sha256(sources: Iterable[Source]) -> str:
  """Returns the SHA-256 hash of the output of `sha256sum` for some files."""
  total = hashlib.sha256()
  for source in sources:
    line = f'{source.sha256}  {source.name}\n'
    total.update(line.encode(errors='surrogateescape'))
  return total.hexdigest()


def stable_hash(*parts: object) -> int:
  """Returns 64 bits that are the same in every process and version."""
  key = '/'.join(map(str, parts)).encode(errors='surrogateescape')
  return int.from_bytes(hashlib.sha256(key).digest()[:8], 'big')


# Hashes.


def hash_files(
  paths: Mapping[str, str], root: str, cache_dir: Path | None = None
) -> list[Source]:
  """Hashes files, in parallel; those that were hashed before are not read.

  Args:
    paths: the path of each file, by its name.
    root: the folder that they are in; its hashes are remembered together.
    cache_dir: where; None is `default_cache_dir()`.

  Returns:
    The files, in the order of `paths`.

  Raises:
    ValueError: a file was written meanwhile, or cannot be unpacked.
  """
  folder = _root(cache_dir) / 'hashes'
  digest = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()
  memo_file = folder / f'{digest[:32]}.json'
  memo = _read_memo(memo_file, cache_dir)
  news: dict[str, list[Any]] = {}

  def look(item: tuple[str, str]) -> Source:
    name, path = item
    real_path = os.path.realpath(path)
    stat = os.stat(real_path)
    known = memo.get(real_path)
    if known and known[:2] == [stat.st_size, stat.st_mtime_ns]:
      return Source(path, name, *known)
    now = time.time_ns()
    source = _hash(path, name)
    if now - source.mtime_ns >= _SETTLED_NS:
      news[real_path] = list(dataclasses.astuple(source)[2:])
    return source

  with _pool() as pool:
    sources = list(pool.map(look, paths.items()))
  if news:
    # What another process has found meanwhile is kept.
    memo = _read_memo(memo_file, cache_dir) | news
    try:
      _make_root(cache_dir)
      folder.mkdir(exist_ok=True)
      if folder.is_symlink():
        raise NotADirectoryError(f'{folder} is a link; expected a folder')
      part = folder / f'{memo_file.name}.{secrets.token_hex(8)}.part'
      part.write_text(_sealed({'format': _FORMAT, 'files': memo}))
      part.replace(memo_file)
    except OSError as e:
      logging.warning('Cannot remember the hashes of files: %s', e)
  return sources


def _read_memo(
  path: pathlib.Path, cache_dir: Path | None
) -> dict[str, list[Any]]:
  try:
    _check_owner(cache_dir)
    memo = _read_sealed(path, _MAX_HASHES_BYTES)
    files = memo.get('files')
  except (OSError, _DamagedError):
    return {}  # All it costs is to hash again.
  if memo.get('format') != _FORMAT or not isinstance(files, dict):
    return {}
  return {name: known for name, known in files.items() if _is_hash(known)}


def _is_hash(known: Any) -> bool:
  """Returns whether it has the form of a result of `_hash`."""
  return (
    isinstance(known, list)
    and [type(value) for value in known] == [int, int, str, bool, bool]
    and _SHA256.fullmatch(known[2]) is not None
  )


def _hash(path: str, name: str) -> Source:
  with open(path, 'rb') as f:
    before = os.fstat(f.fileno())
    sha256 = hashlib.file_digest(f, 'sha256').hexdigest()
    _check_unchanged(path, before, f)
  with _open_text(path) as text:
    probe = text.read(_BINARY_PROBE_BYTES)
  return Source(
    path,
    name,
    before.st_size,
    before.st_mtime_ns,
    sha256,
    is_empty=not probe,
    is_binary=b'\0' in probe,
  )


def _check_unchanged(
  path: str, then: os.stat_result | Source, file: BinaryIO
) -> None:
  now = os.fstat(file.fileno())
  size, mtime_ns = (
    (then.size, then.mtime_ns)
    if isinstance(then, Source)
    else (then.st_size, then.st_mtime_ns)
  )
  if (now.st_size, now.st_mtime_ns) != (size, mtime_ns):
    raise ValueError(
      f'{path} was written while it was being read. Start again when it is'
      ' complete.'
    )


@contextlib.contextmanager
def _open_text(path: str, source: Source | None = None) -> Iterator[BinaryIO]:
  """Opens a file, unpacked; checks that it is still the hashed one."""
  with open(path, 'rb') as raw:
    try:
      if path.endswith('.gz'):
        with gzip.GzipFile(fileobj=raw) as unpacked:
          yield io.BufferedReader(unpacked)  # type: ignore[arg-type]
      else:
        yield raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
      raise ValueError(f'{path} cannot be unpacked: {e}.') from e
    if source:
      _check_unchanged(path, source, raw)


# The cache.


def load(
  sources: Sequence[Source],
  *,
  tokenizer: tokenization.Tokenizer,
  kind: str,
  eval_fraction: float,
  cache_dir: Path | None = None,
) -> dict[Split, Documents]:
  """Returns the tokens of files, made now if they were not made before.

  Args:
    sources: the files, sorted by name, none of them empty.
    tokenizer: the one to make them with.
    kind: what a document is: 'file'; 'line', each line that is not empty; or
      'jsonl', the entry 'text' of the JSON object in each line. Files whose
      name ends in '.gz' are unpacked.
    eval_fraction: which part of the documents to hold out, by the hash of their
      names.
    cache_dir: where; None is `default_cache_dir()`.

  Returns:
    The splits, each with at least one document.

  Raises:
    ValueError: there are fewer than two documents, a file is not what `kind`
      says, or was written meanwhile; or the folder cannot be written to and the
      text is too large to do without.
  """
  root = _root(cache_dir)
  corpus = corpus_sha256(sources)
  parts = [_KEY_FORMAT, tokenizer.identity, kind, eval_fraction, corpus]
  key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]
  folder = root / key
  build = _Build(sources, tokenizer, kind, eval_fraction, corpus)
  names = {source.name for source in sources}
  problem: Exception | None = None
  try:
    _check_owner(cache_dir)
    try:
      if documents := _open(folder, tokenizer, build.description, names):
        return documents
    except (_DamagedError, OSError) as e:
      problem = e  # Maybe somebody is mending it: the lock tells.
    _make_root(cache_dir)
    probe = root / f'{key}.{secrets.token_hex(8)}.probe'
    probe.touch()
    probe.unlink()
  except OSError as e:
    if problem:
      logging.warning('The tokens in %s are not used: %s', folder, problem)
    return _load_uncached(build, root, e)
  with _lock(root / f'{key}.lock') as is_locked:
    try:
      if documents := _open(folder, tokenizer, build.description, names):
        return documents
    except _OldFormatError:
      logging.info(
        '%s is of an earlier version, without checksums, and is made anew.',
        folder,
      )
    except _DamagedError as e:
      logging.warning('%s is damaged (%s) and is made anew.', folder, e)
    except OSError as e:
      e.add_note(
        f'The tokens in {folder} cannot be read, which does not mean that they'
        f' are damaged. To have them made anew: rm -r {folder}'
      )
      raise
    if is_locked:
      _remove_leftovers(root, key)
    part = root / f'{key}.{_host()}.{secrets.token_hex(8)}.tmp'
    part.mkdir()
    try:
      build.run(part)
      _publish(part, folder, tokenizer)
    except BaseException:
      shutil.rmtree(part, ignore_errors=True)
      raise
  try:
    if documents := _open(folder, tokenizer, build.description, names):
      return documents
    reason = 'it is gone'
  except _DamagedError as e:
    reason = str(e)
  raise ValueError(
    f'The tokens in {folder} vanished or were damaged right after they were'
    f' written ({reason}). Is something else deleting files there?'
  )


def _load_uncached(
  build: _Build, root: pathlib.Path, reason: OSError
) -> dict[Split, Documents]:
  size = sum(s.size for s in build.sources)
  if size > _MAX_UNCACHED_BYTES:
    raise ValueError(
      f'The folder for tokens, {root}, cannot be used ({reason}), and the'
      f' text has {size} bytes, too many to tokenize at each start. Give'
      ' another cache_dir, or set XDG_CACHE_HOME.'
    ) from reason
  logging.warning(
    'The folder for tokens, %s, cannot be used (%s): the text is '
    'tokenized at each start. Give another cache_dir, or set XDG_CACHE_HOME.',
    root,
    reason,
  )
  with tempfile.TemporaryDirectory() as folder:
    build.run(pathlib.Path(folder))
    documents = _open(pathlib.Path(folder), build.tokenizer, build.description)
    assert documents
    # What is mapped outlives the names of the files.
    return {
      split: dataclasses.replace(d, _origin=None)
      for split, d in documents.items()
    }


class _DamagedError(ValueError):
  """A file of the cache is missing, or is not as it was written."""


class _OldFormatError(_DamagedError):
  """The cache is of a version that wrote no checksums."""


def _open(
  folder: pathlib.Path,
  tokenizer: tokenization.Tokenizer,
  description: Mapping[str, Any],
  names: Set[str] | None = None,
) -> dict[Split, Documents] | None:
  """Verifies and maps the tokens in a folder.

  Args:
    folder: of one key.
    tokenizer: the one that made them.
    description: the expected metadata.
    names: the files that the documents may be from; None for any.

  Returns:
    The splits; None if the folder does not exist.

  Raises:
    _DamagedError: they are not as they were written; says which file.
    OSError: they cannot be read.
  """
  try:
    if not stat.S_ISDIR(folder.lstat().st_mode):
      raise _DamagedError('it is a link or a file; expected a folder')
  except FileNotFoundError:
    return None
  meta = _read_meta(folder, description)
  return {
    split: _map(folder, split, meta, tokenizer, names) for split in SPLITS
  }


def _read_meta(
  folder: pathlib.Path, description: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the metadata, each entry of it of the right type."""
  meta = _read_sealed(folder / _META, _MAX_META_BYTES)
  if meta.get('format') == 1:
    raise _OldFormatError('it has no checksums')
  for key, expected in description.items():
    if meta.get(key) != expected:
      raise _DamagedError(
        f'{_META} has {key}={reprlib.repr(meta.get(key))}; expected'
        f' {expected!r}'
      )
  splits, files = meta.get('splits'), meta.get('files')
  for split in SPLITS:
    about = splits.get(split) if isinstance(splits, dict) else None
    if (
      not isinstance(about, dict)
      or about.keys() != {'sha256', 'num_bytes'}
      or not isinstance(about['sha256'], str)
      or not _SHA256.fullmatch(about['sha256'])
      or type(about['num_bytes']) is not int
      or about['num_bytes'] < 1
    ):
      raise _DamagedError(f'{_META} does not describe the split {split!r}')
    for name in _file_names(split, meta['kind']):
      sums = files.get(name) if isinstance(files, dict) else None
      if not (
        isinstance(sums, list)
        and sums
        and all(type(x) is int and 0 <= x < 2**63 for x in sums)
      ):
        raise _DamagedError(f'{_META} has no checksums of {name}')
  return meta


def _file_names(split: Split, kind: str) -> list[str]:
  lines = [] if kind == 'file' else ['first.npy', 'lines.npy']
  names = ['tokens.bin', 'starts.npy', 'files.json', *lines]
  return [f'{split}.{name}' for name in names]


def _map(
  folder: pathlib.Path,
  split: Split,
  meta: Mapping[str, Any],
  tokenizer: tokenization.Tokenizer,
  names: Set[str] | None,
) -> Documents:
  """Maps a split, with metadata of `_read_meta`."""

  def damaged(name: str, problem: str) -> _DamagedError:
    return _DamagedError(f'{split}.{name} {problem}')

  sums: dict[str, list[int]] = {}
  verified_files: dict[_Identity, list[int]] = {}

  def verified(name: str) -> BinaryIO:
    name = f'{split}.{name}'
    file = _open_regular(folder / name)
    try:
      sums[name] = meta['files'][name]
      verified_files[_verify(file, name, sums[name])] = sums[name]
    except BaseException:
      file.close()
      raise
    return file

  def rising(name: str, stop: int) -> np.ndarray:
    """Returns places, each behind the one before, from 0 and below `stop`."""
    places = integers(name)
    is_right = len(places) > 0 and places[0] == 0 and places[-1] < stop
    # In parts, so that no more memory is needed for more of them.
    step = max(1, _BATCH_BYTES // 8)
    for start in range(0, len(places) if is_right else 0, step):
      part = places[start : start + step + 1]
      is_right &= bool((part[1:] > part[:-1]).all())
    if not is_right:
      raise damaged(name, f'does not rise from 0 to less than {stop}')
    return places

  def integers(name: str) -> np.ndarray:
    with verified(name) as f:
      size = os.fstat(f.fileno()).st_size
      header = _HEADER.match(f.read(2**10))
      if not header or size != header.end() + 8 * int(header[1]):
        raise damaged(name, 'is not a NumPy file of one row of int64')
      if not int(header[1]):
        return np.zeros(0, '<i8')
      shape = int(header[1])
      return _plain(np.memmap(f, '<i8', 'r', header.end(), shape))

  dtype = np.dtype(meta['dtype'])
  with verified('tokens.bin') as f:
    size = os.fstat(f.fileno()).st_size
    if not size or size % dtype.itemsize:
      raise damaged('tokens.bin', f'has {size} bytes, no tokens of {dtype}')
    tokens = _plain(np.memmap(f, dtype, 'r'))
  starts = rising('starts.npy', len(tokens))
  with verified('files.json') as f:
    files = _parse(f.read(), f'{split}.files.json')
  if not isinstance(files, list) or not all(isinstance(x, str) for x in files):
    raise damaged('files.json', 'is not a list of names')
  if names is not None and not set(files) <= names:
    raise damaged('files.json', 'names files that are not in the corpus')
  of_documents: Sequence[str] = tuple(files)
  if meta['kind'] != 'file':
    first = rising('first.npy', len(starts))
    if len(first) != len(files):
      raise damaged('first.npy', f'has {len(first)} of {len(files)} files')
    of_documents = LineNames(files, first, integers('lines.npy'))
  if len(of_documents) != len(starts):
    raise _DamagedError(
      f'{split} has {len(of_documents)} names of {len(starts)} documents'
    )
  return Documents(
    names=of_documents,
    tokens=tokens,
    starts=starts,
    num_files=len(files),
    tokenizer=tokenizer,
    # The metadata of this split.
    _origin=(
      str(folder),
      split,
      {
        'kind': meta['kind'],
        'dtype': meta['dtype'],
        'splits': {split: meta['splits'][split]},
        'files': sums,
      },
      verified_files,
    ),
    **meta['splits'][split],
  )


def _reopen(
  folder: str,
  split: Split,
  meta: dict[str, Any],
  verified: dict[_Identity, list[int]],
  tokenizer: tokenization.Tokenizer,
) -> Documents:
  _verified.update(verified)
  try:
    return _map(pathlib.Path(folder), split, meta, tokenizer, None)
  except (_DamagedError, OSError) as e:
    raise ValueError(
      f'The tokens in {folder} are gone or damaged: {e}. Start again: they are'
      ' made anew from the text.'
    ) from e


# Checksums.

# A file is the same one as long as all of these are: device, inode, size, and
# the times of its content and of its status.
_Identity = tuple[int, int, int, int, int]
# The checksums of files that were compared by this process, or its parent.
_verified: dict[_Identity, list[int]] = {}


def _checksums(file: BinaryIO) -> list[int]:
  """Returns the size of a file, and the CRC-32 of each block."""
  descriptor = file.fileno()
  size = os.fstat(descriptor).st_size

  def sum_of(start: int) -> int:
    total, end = 0, min(start + _BLOCK_BYTES, size)
    while start < end:
      data = os.pread(descriptor, min(_BATCH_BYTES, end - start), start)
      if not data:
        break
      total = zlib.crc32(data, total)
      start += len(data)
    return total

  with _pool() as pool:
    return [size, *pool.map(sum_of, range(0, size, _BLOCK_BYTES))]


def _verify(file: BinaryIO, name: str, expected: list[int]) -> _Identity:
  """Compares a file with its checksums, once in each process."""
  status = os.fstat(file.fileno())
  identity = (
    status.st_dev,
    status.st_ino,
    status.st_size,
    status.st_mtime_ns,
    status.st_ctime_ns,
  )
  if _verified.get(identity) == expected:
    return identity
  if expected[0] != status.st_size:
    raise _DamagedError(
      f'{name} has {status.st_size} bytes; expected {expected[0]}'
    )
  start = time.monotonic()
  found = _checksums(file)
  if (seconds := time.monotonic() - start) > 1:
    logging.info('Verified %s, %d bytes, in %.1f s.', name, found[0], seconds)
  if found != expected:
    same = itertools.takewhile(
      lambda i: expected[i : i + 1] == [found[i]], range(len(found))
    )
    block = len(list(same)) - 1
    raise _DamagedError(
      f'{name} is not as it was written: its CRC-32 differs from byte'
      f' {block * _BLOCK_BYTES} on'
    )
  _verified[identity] = found
  return identity


def _open_regular(path: pathlib.Path) -> BinaryIO:
  """Opens a file of the cache; neither follows a link nor waits for a FIFO."""
  try:
    descriptor = os.open(path, os.O_RDONLY | _NO_SURPRISE)
  except OSError as e:
    if e.errno in (errno.ELOOP, errno.ENXIO):
      raise _DamagedError(f'{path.name} is not a regular file') from e
    if e.errno in (errno.ENOENT, errno.ENOTDIR):
      raise _DamagedError(f'{path.name}: {e.strerror}') from e
    raise
  if stat.S_ISREG(os.fstat(descriptor).st_mode):
    return os.fdopen(descriptor, 'rb')
  os.close(descriptor)
  raise _DamagedError(f'{path.name} is not a regular file')


def _sealed(values: dict[str, Any]) -> str:
  """Returns JSON with a checksum of itself, for `_read_sealed`."""
  return json.dumps({**values, 'crc32': _crc_of(values)}, indent=1)


def _crc_of(values: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _read_sealed(path: pathlib.Path, max_bytes: int) -> dict[str, Any]:
  """Returns the argument of `_sealed`; of format 1, the whole content."""
  with _open_regular(path) as f:
    if os.fstat(f.fileno()).st_size > max_bytes:
      raise _DamagedError(f'{path.name} has more than {max_bytes} bytes')
    values = _parse(f.read(), path.name)
  if not isinstance(values, dict):
    raise _DamagedError(f'{path.name} is not a JSON object')
  crc = values.pop('crc32', None)
  try:
    is_right = values.get('format') == 1 or crc == _crc_of(values)
  except RecursionError:
    is_right = False
  if is_right:
    return values
  raise _DamagedError(
    f'{path.name} is not as it was written: its CRC-32 differs'
  )


def _parse(data: bytes, name: str) -> Any:
  try:
    return json.loads(data)
  except (ValueError, RecursionError) as e:
    raise _DamagedError(f'{name} is not JSON ({e})') from e


def _plain(array: np.ndarray) -> np.ndarray:
  """Returns a map as an array: memmap itself is slow to slice."""
  return array.view(np.ndarray)


def _publish(
  part: pathlib.Path, folder: pathlib.Path, tokenizer: tokenization.Tokenizer
) -> None:
  """Gives a complete folder its name, once it is safe on the disk."""
  meta = _read_sealed(part / _META, _MAX_META_BYTES)
  description = {key: meta[key] for key in _DESCRIPTION}
  for path in [*part.iterdir(), part]:
    _sync(path)
  while True:
    try:
      part.rename(folder)
    except OSError as e:
      if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
        raise
    else:
      _sync(folder.parent)
      return
    with contextlib.suppress(_DamagedError):
      if _open(folder, tokenizer, description):
        # Another host, whose file system does not share locks, was faster.
        shutil.rmtree(part)
        return
    damaged = part.with_name(f'{part.name.removesuffix(".tmp")}.old.tmp')
    with contextlib.suppress(FileNotFoundError):
      folder.rename(damaged)
    with contextlib.suppress(OSError):
      damaged.unlink()  # A link, or a file.
    shutil.rmtree(damaged, ignore_errors=True)


def _sync(path: pathlib.Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def _lock(path: pathlib.Path) -> Iterator[bool]:
  """Lets one process build at a time; yields whether the disk can do that.

  The lock of a process that was killed is gone with it.
  """
  with contextlib.ExitStack() as stack:
    try:
      f = stack.enter_context(open(path, 'ab', opener=_open_lock))
      try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        logging.info('Waiting for the process that makes the tokens: %s', path)
        fcntl.flock(f, fcntl.LOCK_EX)
    except OSError as e:
      # All that is lost is that hosts may do the same work twice.
      logging.info('%s cannot be locked: %s', path, e)
      yield False
      return
    yield True


def _open_lock(path: str, flags: int) -> int:
  return os.open(path, flags | _NO_SURPRISE, 0o666)


def _host() -> str:
  return socket.gethostname().replace('/', '_') or 'host'


def _remove_leftovers(root: pathlib.Path, key: str) -> None:
  """Removes leftovers of killed builders; of other hosts, if a day old."""
  for path in root.glob('*.tmp'):
    # Only the process with the lock builds this key on this host.
    is_dead = path.name.startswith(f'{key}.{_host()}.')
    try:
      newest = max(p.stat().st_mtime for p in [path, *path.iterdir()])
    except OSError:
      continue  # Somebody else removes it.
    if is_dead or newest < time.time() - _ABANDONED_SECONDS:
      logging.info('Removing %s, whose builder died.', path)
      shutil.rmtree(path, ignore_errors=True)


# Building.


class _Build:
  """Makes tokens of files.

  The files go in groups of consecutive ones to threads, each of which writes a
  part of each split; the parts are then joined in their order.
  """

  def __init__(
    self,
    sources: Sequence[Source],
    tokenizer: tokenization.Tokenizer,
    kind: str,
    eval_fraction: float,
    corpus: str,
  ):
    self.sources = sources
    self.tokenizer = tokenizer
    self._kind = kind
    self._corpus = corpus
    self._eval_fraction = eval_fraction
    # These two types and no others are read back.
    self._dtype = np.dtype('<u2' if tokenizer.vocab_size <= 2**16 else '<u4')

  @property
  def description(self) -> dict[str, Any]:
    """What the metadata says of the tokens."""
    return {
      'format': _FORMAT,
      'tokenizer': self.tokenizer.identity,
      'kind': self._kind,
      'eval_fraction': self._eval_fraction,
      'corpus_sha256': self._corpus,
      'dtype': self._dtype.str,
    }

  def run(self, folder: pathlib.Path) -> None:
    """Writes all files of the cache into an empty folder."""
    start = time.monotonic()
    threshold: float = self._eval_fraction * 2**64
    parts, hashes = self._tokenize(folder, threshold)
    if hashes.count < 2:
      raise ValueError(
        f'{hashes.count} documents that are not empty were found in'
        f' {len(self.sources)} files ({self.sources[0].path}...); at least 2'
        ' are needed, since some are held out for evaluation.'
      )
    if not hashes.least < threshold <= hashes.most:
      # Of a handful of documents, a fraction may be none or all: it shall be
      # one, or all but one.
      threshold = hashes.most if hashes.least < threshold else hashes.least + 1
      parts, _ = self._tokenize(folder, threshold)
    splits = {}
    for number, split in enumerate(SPLITS):
      splits[split] = self._join(folder, split, [p[number] for p in parts])
    files = {}
    for path in folder.iterdir():
      with path.open('rb') as f:
        files[path.name] = _checksums(f)
    meta = {
      **self.description,
      'splits': splits,
      'files': files,
      # All that format 1 reads, so that two versions can share a cache.
      'sizes': {name: sums[0] for name, sums in files.items()},
    }
    (folder / _META).write_text(_sealed(meta))
    logging.info(
      'Tokenized %d files in %.1f s.',
      len(self.sources),
      time.monotonic() - start,
    )

  def _tokenize(
    self, folder: pathlib.Path, threshold: float
  ) -> tuple[list[tuple[_Part, _Part]], _Range]:
    """Writes the parts of all groups of files; returns them in their order."""
    stop = threading.Event()
    groups = list(self._groups())
    hashes = [_Range() for _ in groups]

    def make(number: int) -> tuple[_Part, _Part]:
      with contextlib.ExitStack() as stack:
        train, held_out = (
          stack.enter_context(
            _Part(folder / f'{number}.{split}', self.tokenizer, self._dtype)
          )
          for split in SPLITS
        )

        def choose(name: str) -> _Part:
          if stop.is_set():
            raise futures.CancelledError
          value = stable_hash('eval', name)
          hashes[number].add(value)
          return held_out if value < threshold else train

        for source in groups[number]:
          self._add(source, choose)
        train.flush()
        held_out.flush()
        return train, held_out

    with _pool() as pool:
      running = [pool.submit(make, number) for number in range(len(groups))]
      try:
        for done, future in enumerate(futures.as_completed(running)):
          future.result()
          if done + 1 < len(groups):
            logging.info('Tokenized %d of %d parts.', done + 1, len(groups))
      except BaseException:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
      parts = [future.result() for future in running]
      return parts, functools.reduce(_Range.joined, hashes)

  def _groups(self) -> Iterator[list[Source]]:
    total = sum(s.size for s in self.sources)
    enough = max(_MIN_GROUP_BYTES, total // (4 * _num_threads()))
    group: list[Source] = []
    size = 0
    for source in self.sources:
      group.append(source)
      size += source.size
      if size >= enough:
        yield group
        group, size = [], 0
    if group:
      yield group

  def _add(self, source: Source, choose: Callable[[str], _Part]) -> None:
    """Adds the documents of a file."""
    with _open_text(source.path, source) as f:
      if self._kind == 'file':
        part = choose(source.name)
        if isinstance(self.tokenizer, tokenization.ByteTokenizer):
          part.add_bytes(source.name, f)
        else:
          part.add(source.name, 0, f.read())
        return
      for number, text in _lines(f, source, self._kind):
        name = _line_name(source.name, number)
        choose(name).add(source.name, number, text)

  def _join(
    self, folder: pathlib.Path, split: str, parts: list[_Part]
  ) -> dict[str, Any]:
    """Joins the parts of a split; returns their metadata for `_map`."""

    def join(suffix: str, bases: list[int] | None, header: bool) -> None:
      name = f'{split}.{suffix}.' + ('npy' if header else 'bin')
      paths = [part.path(suffix) for part in parts]
      with open(folder / name, 'wb') as out:
        if header:
          size = sum(path.stat().st_size for path in paths)
          np.lib.format.write_array_header_1_0(
            out, {'descr': '<i8', 'fortran_order': False, 'shape': (size // 8,)}
          )
        for number, path in enumerate(paths):
          with open(path, 'rb') as f:
            while data := f.read(_BATCH_BYTES):
              if bases and bases[number]:
                data = (np.frombuffer(data, '<i8') + bases[number]).tobytes()
              out.write(data)
          path.unlink()

    token_bases = _bases([part.num_tokens for part in parts])
    document_bases = _bases([part.num_documents for part in parts])
    join('tokens', None, header=False)
    join('starts', token_bases, header=True)
    if self._kind == 'file':
      for part in parts:
        part.path('lines').unlink()
    else:
      join('lines', None, header=True)
      first = [
        base + document
        for part, base in zip(parts, document_bases, strict=True)
        for document in part.first
      ]
      np.save(folder / f'{split}.first.npy', np.array(first, '<i8'))
    names = [name for part in parts for name in part.files]
    (folder / f'{split}.files.json').write_text(json.dumps(names))
    if self._kind == 'file':
      chosen = set(names)
      sha256 = corpus_sha256(s for s in self.sources if s.name in chosen)
    else:
      rule = [self._corpus, self._kind, self._eval_fraction, split]
      sha256 = hashlib.sha256(json.dumps(rule).encode()).hexdigest()
    return {'sha256': sha256, 'num_bytes': sum(p.num_bytes for p in parts)}


@dataclasses.dataclass
class _Range:
  """How many hashes there were, the smallest and the largest."""

  count: int = 0
  least: int = 2**64
  most: int = -1

  def add(self, value: int) -> None:
    self.count += 1
    if value < self.least:
      self.least = value
    if value > self.most:
      self.most = value

  def joined(self, other: _Range) -> _Range:
    return _Range(
      self.count + other.count,
      min(self.least, other.least),
      max(self.most, other.most),
    )


class _Part:
  """What one group of files gives to one split, as files of arrays."""

  def __init__(
    self,
    stem: pathlib.Path,
    tokenizer: tokenization.Tokenizer,
    dtype: np.dtype,
  ):
    self._stem = stem
    self._tokenizer = tokenizer
    self._dtype = dtype
    self.files: list[str] = []
    self.first: list[int] = []  # Of each file, which document.
    self.num_tokens = 0
    self.num_documents = 0
    self.num_bytes = 0
    self._texts: list[bytes] = []
    self._lines: list[int] = []
    self._waiting = 0

  def path(self, suffix: str) -> pathlib.Path:
    return self._stem.with_name(f'{self._stem.name}.{suffix}.part')

  def __enter__(self) -> _Part:
    with contextlib.ExitStack() as stack:
      self._out = {
        suffix: stack.enter_context(open(self.path(suffix), 'wb'))
        for suffix in ('tokens', 'starts', 'lines')
      }
      self._open = stack.pop_all()
    return self

  def __exit__(self, *error: object) -> None:
    self._open.close()

  def _begin(self, name: str) -> None:
    if not self.files or self.files[-1] != name:
      self.files.append(name)
      self.first.append(self.num_documents + len(self._texts))

  def add(self, name: str, line: int, text: bytes) -> None:
    """Adds a document of a file."""
    self._begin(name)
    self._texts.append(text)
    self._lines.append(line)
    self._waiting += len(text)
    if self._waiting >= _BATCH_BYTES:
      self.flush()

  def add_bytes(self, name: str, file: BinaryIO) -> None:
    """Adds a document whose tokens are its bytes, however large."""
    self._begin(name)
    self._write('starts', np.array([self.num_tokens], '<i8'))
    self._write('tokens', np.array([self._tokenizer.document_id], self._dtype))
    size = 0
    while data := file.read(_BATCH_BYTES):
      self._write('tokens', np.frombuffer(data, np.uint8).astype(self._dtype))
      size += len(data)
    self.num_tokens += 1 + size
    self.num_bytes += size
    self.num_documents += 1

  def flush(self) -> None:
    """Tokenizes the documents that wait."""
    if not self._texts:
      return
    ids, sizes = self._tokenizer.encode_joined(self._texts)
    if (strange := np.flatnonzero(ids == self._tokenizer.document_id)).size:
      document = int(np.searchsorted(np.cumsum(sizes), strange[0], 'right'))
      file = bisect.bisect_right(self.first, self.num_documents + document) - 1
      place = f'{self.files[file]}, line {self._lines[document]}'
      raise ValueError(
        f'The document token {self._tokenizer.document_id} stands within the'
        f' text of a document: {place}, {self._texts[document][:80]!r}. Use a'
        ' tokenizer that never encodes text to it.'
      )
    ends = np.cumsum(sizes + 1)
    starts = ends - sizes - 1
    tokens = np.empty(int(ends[-1]), self._dtype)
    is_text = np.ones(len(tokens), bool)
    is_text[starts] = False
    tokens[starts] = self._tokenizer.document_id
    tokens[is_text] = ids
    self._write('tokens', tokens)
    self._write('starts', starts + self.num_tokens)
    self._write('lines', np.array(self._lines, '<i8'))
    self.num_tokens += len(tokens)
    self.num_documents += len(sizes)
    self.num_bytes += self._waiting
    self._texts, self._lines, self._waiting = [], [], 0

  def _write(self, suffix: str, array: np.ndarray) -> None:
    self._out[suffix].write(array.data)


def _bases(counts: list[int]) -> list[int]:
  return [0, *itertools.accumulate(counts)][:-1]


def _lines(
  file: BinaryIO, source: Source, kind: str
) -> Iterator[tuple[int, bytes]]:
  """Yields the documents of a file of lines, with the numbers of the lines."""
  for number, line in enumerate(file, 1):
    text = line.rstrip(b'\r\n')
    if kind == 'jsonl':
      if not text.strip():
        continue
      try:
        value = json.loads(text)['text']
        if not isinstance(value, str):
          raise TypeError(f"'text' is {type(value).__name__}")
      except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(
          f"{source.path}:{number} is no JSON object with a string 'text'"
          f' ({type(e).__name__}: {e}): {text[:80]!r}.'
        ) from e
      # JSON can hold halves of characters, which UTF-8 cannot.
      text = value.encode(errors='replace')
    if text:
      yield number, text


def _line_name(name: str, number: int) -> str:
  return f'{name}:{number}'


def _num_threads() -> int:
  return min(os.cpu_count() or 1, 16)


def _pool() -> futures.ThreadPoolExecutor:
  return futures.ThreadPoolExecutor(_num_threads(), 'tokens')
