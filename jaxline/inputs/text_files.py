"""Finds text files and reads their documents in pieces for the tokenizer.

The pieces let a file of any size fit into little memory. A document is cut only
where the cut does not change its tokens (`Tokenizer.find_cuts`).
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import functools
import glob
import hashlib
import importlib
import io
import itertools
import json
import operator
import os
import pathlib
import re
import stat
import sysconfig
from typing import Any, NamedTuple, NoReturn

from absl import logging
import numpy as np

from jaxline import errors
from jaxline.base import disk
from jaxline.inputs import tokenization

Path = str | os.PathLike[str]

# These are the ways to cut files into documents.
KINDS = ('file', 'line', 'jsonl', 'rows', 'split:SEPARATOR')
# Limits the share of bytes of a file that are not text, and of null entries.
MAX_SHARE = 0.01

_BINARY_PROBE_BYTES = 8000  # Git probes the same number of bytes.
_BLOCK_BYTES = 2**20  # Files are read in blocks of this size.
_LONG_BYTES = 2**23  # Tokenizing this many in one piece takes a gigabyte.
_PIECE_BYTES = 2**16  # SentencePiece takes twice as long for 1 MiB at once.
_BOMS = (
  (codecs.BOM_UTF8, 'utf-8'),
  (codecs.BOM_UTF16_LE, 'utf-16-le'),
  (codecs.BOM_UTF16_BE, 'utf-16-be'),
)
_PACKINGS = {
  '.gz': 'gzip',
  '.bz2': 'bz2',
  '.xz': 'lzma',
  '.zst': 'backports.zstd',
}
_TABLES = ('.parquet', '.arrow')
_CONTROLS = bytes({*range(32), 127} - {*b'\b\t\n\v\f\r\x1b'})
_NOT_HIDDEN = re.compile(r'[^.].*', re.DOTALL)
# Skip the tests, which are larger than the library and mostly tables, and the
# output of Python's build, which differs between machines.
_STDLIB_FOLDERS = re.compile(
  r'(?!(tests?|idle_test|(site|dist)-packages|__pycache__|config-.*)$).*'
)
_STDLIB_FILES = re.compile(r'(?!_sysconfigdata)[^.].*\.py')


class Source(NamedTuple):
  """A file of a corpus."""

  name: str  # Its name in the corpus.
  path: str
  text_only: bool  # Whether to skip binary files.


class Piece(NamedTuple):
  """A part of a document."""

  file: int
  number: int  # It counts the pieces of this file.
  line: int  # The document begins here; 0 if it is the whole file.
  begins: bool  # Whether it is the first piece of its document.
  hash: int  # Its document's hash, which selects the split.
  text: bytes


def find(files: Path | Sequence[Path]) -> tuple[list[Source], dict[str, str]]:
  """Returns all files, sorted by name, and notes on links, by path."""
  entries = [files] if isinstance(files, str | os.PathLike) else files
  sources: dict[str, Source] = {}
  notes: dict[str, str] = {}
  for number, entry in enumerate(entries):
    disk.check_local(entry, 'files')
    root, is_folder = os.path.expanduser(entry), False
    if os.fspath(entry) == 'stdlib':
      root = sysconfig.get_path('stdlib')
      paths = _walk(root, _STDLIB_FOLDERS, _STDLIB_FILES)
    elif is_folder := os.path.isdir(root):
      paths = _walk(root, _NOT_HIDDEN, _NOT_HIDDEN, notes)
    elif os.path.exists(root):  # Its name may look like a pattern.
      paths, root = iter([root]), os.path.dirname(root)
    else:
      pattern = root
      while root and not os.path.isdir(root):
        root = os.path.dirname(root)
      pattern = glob.escape(root) + pattern.removeprefix(root)
      paths = _glob(pattern, notes)
    if not (found := sorted(filter(_is_file, paths))):
      raise errors.UsageError(
        f'No files found for {entry}; expected "stdlib", a file, a folder, a'
        ' glob, or a list of these.'
      )
    for path, real in zip(found, real_paths(found), strict=True):
      name = pathlib.Path(os.path.relpath(path, root or '.')).as_posix()
      # Two folders may contain the same file name.
      name = f'../{number}/{name}' if number else name
      # Read a file with two names only once: the second could be held out.
      sources.setdefault(real, Source(name, path, is_folder))
  return sorted(sources.values()), notes


def real_paths(files: Iterable[str]) -> Iterator[str]:
  """Yields the paths without links; resolves each folder once."""
  real = functools.cache(os.path.realpath)
  for path in files:
    at, name = os.path.split(path)
    yield real(path) if os.path.islink(path) else os.path.join(real(at), name)


def _is_file(path: str) -> bool:
  try:
    return stat.S_ISREG(os.stat(path).st_mode)
  except PermissionError as e:  # Its folder can only be listed.
    raise refuse(path, e) from e
  except OSError:  # It is a broken link.
    return False


def _walk(
  folder: str,
  folders: re.Pattern[str],
  files: re.Pattern[str] | None,
  notes: dict[str, str] | None = None,
) -> Iterator[str]:
  """Yields the files below a folder whose names match, or raises UsageError.

  With `notes` it follows links, to each folder once. Links come last, so that a
  link to a folder does not rename its files. Without `files` it yields folders.
  """

  def fail(error: OSError) -> NoReturn:
    raise refuse(error.filename, error) from error

  seen, links, num_followed = set(), [folder], 0
  for root in links:  # The list grows in this loop.
    for path, below, names in os.walk(root, onerror=fail):
      is_new = (real := os.path.realpath(path)) not in seen
      seen.add(real)
      below[:] = sorted(filter(folders.fullmatch, below)) * is_new
      names = names * is_new
      if is_new and not files:
        yield path
      if notes is not None:
        linked = [os.path.join(path, x) for x in (*below, *names)]
        linked = [*filter(os.path.islink, linked)]
        links += filter(os.path.isdir, linked)
        for link in itertools.filterfalse(os.path.exists, linked):
          notes[link] = 'a broken link'
        num_followed += sum(map(os.path.exists, linked))
        if num_followed:
          notes[folder] = f'{num_followed} links followed, each folder once'
      if files:
        yield from (
          os.path.join(path, x) for x in filter(files.fullmatch, names)
        )


def _glob(pattern: str, notes: dict[str, str]) -> Iterator[str]:
  """Yields the files that match a pattern; does not follow loops of links."""
  if not (match := re.match(r'((?:.*?/)??)\*\*(?:/(.*)|$)', pattern, re.S)):
    yield from glob.glob(pattern)
    return
  for root in glob.glob(match[1]) if match[1] else ['.']:
    for folder in _walk(root, _NOT_HIDDEN, None, notes):
      below = os.path.join(glob.escape(folder), match[2] or '*')
      yield from _glob(below, notes)


def stable_hash(key: str) -> int:
  """Returns a hash of 64 bits that all processes and versions share."""
  digest = hashlib.sha256(key.encode(errors='surrogateescape')).digest()
  return int.from_bytes(digest[:8], 'big')


def name_document(file: str, line: int) -> str:
  """Returns the name of a document, `file` or `file:line`."""
  return f'{file}:{line}' if line else file


@dataclasses.dataclass
class Reader:
  """Reads documents; `notes` has the reason why a file was left out, by file.

  Attributes:
    nulls: The number of lines without text, by file.
    file, done_bytes: Index of the current file, and its bytes read from disk.
  """

  sources: Sequence[Source]
  tokenizer: tokenization.Tokenizer
  kind: str
  text_key: str
  eval_fraction: float
  notes: dict[str, str] = dataclasses.field(default_factory=dict)
  nulls: dict[str, int] = dataclasses.field(default_factory=dict)
  file: int = 0
  done_bytes: int = 0

  def read(self, file: int = 0, number: int = 0) -> Iterator[Piece]:
    """Yields the pieces of all files, from piece `number` of `file`."""
    for i in range(file, len(self.sources)):
      self.file = i
      pieces = self._read_file(i)
      yield from itertools.islice(pieces, number, None)
      number = 0

  def _read_file(self, file: int) -> Iterator[Piece]:
    name, path, _ = self.sources[file]
    number = itertools.count()
    try:
      blocks, size = self._check(self.sources[file])
      is_alone = len(self.sources) == 1 and self.kind == 'file'
      if is_alone:  # Hold out its end. Several files are split by their names.
        texts = _split_at(blocks, int(size * (1 - self.eval_fraction)), size)
      elif self.kind == 'file':
        texts = ((0, block) for block in blocks)
      elif self.kind.startswith('split:'):
        texts = _split(blocks, self.kind.removeprefix('split:').encode())
      else:
        texts = self.read_rows(self.sources[file], blocks)
      for line, group in itertools.groupby(texts, operator.itemgetter(0)):
        digest = stable_hash(f'eval/{name_document(name, line)}')
        if is_alone:
          digest = 0 if line else 2**64 - 1
        begins = True
        for piece in self._cut(text for _, text in group):
          yield Piece(file, next(number), line, begins, digest, piece)
          begins = False
    except errors.UsageError:
      raise
    except Exception as e:  # The libraries raise plain Exceptions.
      raise refuse(path, e) from e

  def _check(self, source: Source) -> tuple[Iterable[Any], int]:
    """Returns the blocks of a file and its size; no block if it is left out.

    The blocks of a table are the texts of its rows, and its size is 0.
    """
    is_table = source.path.lower().endswith(_TABLES)
    if is_table and self.kind == 'rows':
      return self._read_table(source.path), 0
    if is_table or self.kind == 'rows':
      why = "only documents='rows' reads tables, and it reads nothing else"
      self.notes[source.name] = f'left out, {why}'
      return (), 0
    blocks = self._read_blocks(source.path)
    first = [*itertools.islice(blocks, 2)]
    size = wrong = 0
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    is_binary = source.text_only and any(
      b'\0' in block[:_BINARY_PROBE_BYTES] for block in first[:1]
    )
    for block in itertools.chain(first, () if is_binary else blocks):
      size += len(block)
      wrong += decoder.decode(block).count('\ufffd')
      wrong -= block.count('\ufffd'.encode())  # U+FFFD in the text is valid.
      wrong += len(block) - len(block.translate(None, _CONTROLS))
    if wrong > size * MAX_SHARE or is_binary:
      why = f'{wrong / size:.1%} is not text in UTF-8 or UTF-16'
      why = 'it has zero bytes, as binary files have' if is_binary else why
      self.notes[source.name] = f'left out, {why}'
      return (), 0
    return (first if len(first) < 2 else self._read_blocks(source.path)), size

  def _read_blocks(self, path: str) -> Iterator[bytes]:
    """Yields the text of a file as UTF-8, without a byte order mark."""
    with open(path, 'rb') as raw, _unpack(path, raw) as file:
      block = file.read(_BLOCK_BYTES)
      boms = (x for x in _BOMS if block.startswith(x[0]))
      bom, encoding = next(boms, (b'', 'utf-8'))
      decoder = codecs.getincrementaldecoder(encoding)('replace')
      block = block.removeprefix(bom)
      while block:
        self.done_bytes = raw.tell()
        is_utf8 = encoding == 'utf-8'
        yield block if is_utf8 else decoder.decode(block).encode()
        block = file.read(_BLOCK_BYTES)

  def _read_table(self, path: str) -> Iterator[str | None]:
    """Yields the texts of a table, as Hugging Face's `datasets` writes them."""
    try:
      import pyarrow
      from pyarrow import parquet
    except ImportError as e:
      raise errors.UsageError(
        f"{path} needs pyarrow: pip install -e '.[parquet]'."
      ) from e
    with pyarrow.OSFile(path) as raw:
      batches: Iterable[Any]
      if path.lower().endswith('.parquet'):
        # Read page by page, since a row group may be the whole file.
        file = parquet.ParquetFile(
          raw, buffer_size=_BLOCK_BYTES, pre_buffer=False
        )
        schema = file.schema_arrow
        batches = file.iter_batches(64, columns=[self.text_key])
      else:
        batches = reader = pyarrow.ipc.open_stream(raw)
        schema = reader.schema
      note = ' Set `text_key` to the column of the text.'
      errors.check_names([self.text_key], schema.names, 'column', path, note)
      for batch in batches:
        self.done_bytes = raw.tell()
        for value in batch.column(self.text_key):
          yield value.as_py()

  def read_rows(
    self, source: Source, blocks: Iterable[Any]
  ) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the text of each row that is not empty."""
    self.nulls.pop(source.name, None)
    rows = blocks if self.kind == 'rows' else _split_lines(blocks)
    for number, row in enumerate(rows, 1):
      if self.kind == 'line':
        text = row.rstrip(b'\r\n')
      elif self.kind == 'jsonl' and not row.strip():
        continue
      else:
        try:
          value = row if self.kind == 'rows' else json.loads(row)[self.text_key]
          if value is None:
            self.nulls[source.name] = self.nulls.get(source.name, 0) + 1
            continue
          # JSON can hold half a surrogate pair, which UTF-8 cannot.
          text = str.encode(value, errors='replace')
        except Exception as e:  # The row may hold any value.
          raise errors.UsageError(
            f'{source.path}:{number} cannot be read as {self.kind!r} ({e!r}):'
            f' {row!r:.80}. Expected an object with a string'
            f' {self.text_key!r}, or set `text_key` to the key of the text.'
          ) from e
      if text:
        yield number, text

  def _cut(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Cuts a document at places that do not change its tokens."""
    left = bytearray()
    for block in blocks:
      known = max(0, len(left) - 4)  # There is no cut before this place.
      left += block
      if len(left) <= _PIECE_BYTES:
        continue
      cuts = known + self.tokenizer.find_cuts(bytes(left[known:]))
      if not cuts.size:
        if len(left) - len(block) <= _LONG_BYTES < len(left):
          logging.warning(
            '%s has a document that is tokenized in one piece, which takes up'
            ' to 150 times its size in memory: the tokenizer %s cannot cut it.',
            *(self.sources[self.file].path, self.tokenizer.identity),
          )
        continue
      wanted = range(_PIECE_BYTES, len(left), _PIECE_BYTES)
      chosen = cuts.searchsorted(wanted).clip(max=cuts.size - 1)
      places = [0, *np.unique(cuts[chosen]).tolist()]
      for first, last in itertools.pairwise(places):
        yield bytes(left[first:last])
      del left[: places[-1]]
    if left:
      yield bytes(left)


def refuse(path: str, error: Exception) -> errors.UsageError:
  """Makes the error for a file or folder that cannot be read."""
  why = getattr(error, 'strerror', None) or repr(error)
  return errors.UsageError(
    f'{path} cannot be read: {why}. Make it readable, or remove it from'
    ' `files`.'
  )


def _unpack(path: str, raw: Any) -> Any:
  """Returns a file that unpacks `raw`, by the suffix of `path`."""
  module = _PACKINGS.get(os.path.splitext(path)[1].lower())
  if not module:
    return raw
  try:
    unpacked = importlib.import_module(module).open(raw)
  except ImportError as e:
    raise errors.UsageError(
      f"{path} needs {module}: pip install -e '.[text]'."
    ) from e
  return io.BufferedReader(unpacked, 2**16)


def _split(blocks: Iterable[bytes], mark: bytes) -> Iterator[tuple[int, bytes]]:
  """Yields (number, part) of the texts between marks, counted from 1."""
  number, left = 1, b''
  for block in blocks:
    *ended, left = (left + block).split(mark)
    yield from enumerate(ended, number)
    number += len(ended)
    known = max(0, len(left) - len(mark) + 1)  # A mark may begin here.
    yield number, left[:known]
    left = left[known:]
  yield number, left


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
  parts = itertools.groupby(_split(blocks, b'\n'), operator.itemgetter(0))
  return (b''.join(text for _, text in part) for _, part in parts)


def _split_at(
  blocks: Iterable[bytes], place: int, size: int
) -> Iterator[tuple[int, bytes]]:
  """Splits a text in two; yields (line, block), with line 0 in the first part.

  In the second part, the line is where this part begins: after the end of a
  line near `place` or, if there is none, after the end of a character.
  """
  line, done, num_lines = 0, 0, 1
  for block in blocks:
    at = max(0, place - done)
    if not line and at < len(block):
      ends = (
        block.find(b'\n', max(0, at - 1)),
        block.rfind(b'\n', 0, at),
        at - 1,
      )
      end = next((x + 1 for x in ends if 0 <= x < size - done - 1), 0)
      while 0 < end < len(block) and block[end] & 0xC0 == 0x80:
        end -= 1
      if end:
        yield 0, block[:end]
        line = num_lines + block.count(b'\n', 0, end)
        block = block[end:]
    yield line, block
    done, num_lines = done + len(block), num_lines + block.count(b'\n')
