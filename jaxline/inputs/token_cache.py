"""Tokenizes a corpus once and maps its tokens from disk.

All tokens of a corpus are in one file, <cache_dir>/<key>.tokens:

  offset of the header                   int64
  documents of 'train', then of 'eval'   start, file, line: int64 [D, 3]
  tokens of 'train', then of 'eval'      uint16 or uint32 [N]
  header                                 JSON

`key` is a hash of the tokenizer, the kind of documents, the held-out fraction,
and the names, paths, sizes and times of the text files.

One process makes the file, and the others wait. It writes parts of a few
megabytes of text, <key>.parts/<number>.npz, and renames each into place, so a
kill loses at most the last part. Then it joins the parts.

Shapes: N tokens of a split, D documents, P pieces of a part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import pathlib
import shutil
import tempfile
import time
from typing import Any, NamedTuple

from absl import logging
import filelock
import numpy as np

from jaxline import errors
from jaxline.base import buckets
from jaxline.base import disk
from jaxline.inputs import text_files
from jaxline.inputs import tokenization

_FORMAT = 8
_BATCH_BYTES = 2**21  # Text of a part, which several threads tokenize.
_DOWNLOAD_BYTES = 2**25  # A bucket is read in ranges of this size.
_PROGRESS_SECS = 10.0
_MAX_NAMED = 5  # Limit of files and documents to print.


class _Names(Sequence[str]):
  """Makes the names of documents on demand: `file`, or `file:line`."""

  def __init__(self, files: Sequence[str], table: np.ndarray):
    self._files = files
    self._table = table

  def count_files(self) -> int:
    return np.unique(self._table[:, 1]).size

  def __len__(self) -> int:
    return len(self._table)

  def __getitem__(self, index: Any) -> Any:
    _, file, line = self._table[index].tolist()
    return text_files.name_document(self._files[file], line)


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
  """Documents, sorted by name, as one stream of tokens.

  Attributes:
    names: Path of each document's file, relative to the folder that was read.
      A document that is a line adds ':' and its number.
    tokens: Document token and text of each document, uint16 or uint32 [N].
    starts: Index of each document token, int64 [D].
    sha256: Hash of the tokens.
    num_bytes: Length of the text.
    notes: Reasons why files were left out, and notes on links, by name.
  """

  names: Sequence[str] = dataclasses.field(repr=False)
  tokens: np.ndarray = dataclasses.field(repr=False)
  starts: np.ndarray = dataclasses.field(repr=False)
  sha256: str
  num_bytes: int
  tokenizer: tokenization.Tokenizer = tokenization.BYTES
  notes: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
  # The arguments of `_open`, for tokens that are mapped from a file.
  _origin: tuple[Any, ...] | None = dataclasses.field(default=None, repr=False)

  def data(self) -> bytes:
    """Returns the concatenated text of all documents.

    It is exact for bytes. Other tokenizers may change the text.
    """
    if isinstance(self.tokenizer, tokenization.ByteTokenizer):
      is_byte = self.tokens != self.tokenizer.document_id
      return self.tokens[is_byte].astype(np.uint8).tobytes()
    documents = np.split(self.tokens, self.starts[1:])
    return b''.join(self.tokenizer.decode(ids).encode() for ids in documents)

  def totals(self) -> str:
    """Returns lines with the size of the text and its largest documents."""
    sizes = np.diff(self.starts, append=self.tokens.size)
    largest = np.argsort(sizes)[: -_MAX_NAMED - 1 : -1].tolist()
    shares = (
      f'{self.names[i]} ({sizes[i] / self.tokens.size:.1%})' for i in largest
    )
    num_files = len(self.names)
    if isinstance(self.names, _Names):
      num_files = self.names.count_files()
    return (
      f'{num_files:,} files, {len(self.starts):,} documents,'
      f' {self.tokens.size:,} tokens of {self.num_bytes:,} bytes,'
      f' {self.num_bytes / self.tokens.size:.2f} bytes a token\n'
      f'most tokens: {", ".join(shares)}\n'
      + (f'tokens in {self._origin[0]}\n' if self._origin else '')
      + join_notes(self.notes)
    ).rstrip()

  def __reduce__(self) -> Any:
    # A worker process maps the file itself. Pickle would copy the tokens.
    return (_open, self._origin) if self._origin else object.__reduce__(self)


class Corpus(NamedTuple):
  """The documents to train on and the held-out documents."""

  train: Documents
  eval: Documents

  @property
  def summary(self) -> str:
    """One line with the numbers of documents and the notes."""
    documents = len(self.train.starts), len(self.eval.starts)
    text = f'{documents[0]:,} documents to train on, {documents[1]:,} held out'
    notes = join_notes(self.train.notes)
    return f'{text}; {notes}' if notes else text


def join_notes(notes: Mapping[str, str]) -> str:
  """Returns the first notes on files in one line; '' if there are none."""
  shown = [f'{name}: {why}' for name, why in sorted(notes.items())]
  more = [f'{len(shown) - _MAX_NAMED} more'] * (len(shown) > _MAX_NAMED)
  return '; '.join([*shown[:_MAX_NAMED], *more])


def load(
  reader: text_files.Reader,
  notes: dict[str, str],
  cache_dir: text_files.Path | None = None,
) -> Corpus:
  """Returns the tokens of files; adds `notes` to the reader's notes."""
  tokenizer, sources = reader.tokenizer, reader.sources
  request: list[Any] = [_FORMAT, tokenizer.identity, reader.kind]
  request += reader.eval_fraction, reader.text_key
  paths = text_files.real_paths(source.path for source in sources)
  for (name, _, text_only), path in zip(sources, paths, strict=True):
    status = os.stat(path)
    times = status.st_mtime_ns, status.st_ctime_ns
    request.append([name, path, text_only, status.st_size, *times])
  key = hashlib.sha256(json.dumps(request).encode()).hexdigest()[:40]
  folder = _choose_folder(cache_dir, f'{key}.tokens')
  file = folder / f'{key}.tokens'
  if not file.exists():
    parts = folder / f'{key}.parts'
    logging.info('Tokenizing %d files for %s.', len(sources), folder)
    with _alone(file) as is_first:
      if is_first:
        parts.mkdir(exist_ok=True)
        try:
          _join(file, _make_parts(parts, reader), reader)
        except errors.UsageError:  # Other errors keep the parts for a retry.
          shutil.rmtree(parts, ignore_errors=True)
          raise
        shutil.rmtree(parts, ignore_errors=True)
  corpus = open_corpus(file, tokenizer, notes)
  if corpus.train.notes:
    logging.warning('Text: %s.', join_notes(corpus.train.notes))
  return corpus


@contextlib.contextmanager
def _alone(file: pathlib.Path) -> Iterator[bool]:
  """Locks a file; yields whether this process has to make it."""
  lock = file.with_suffix('.lock')
  with contextlib.ExitStack() as stack:
    stack.enter_context(filelock.FileLock(lock))
    stack.callback(lock.unlink, missing_ok=True)
    yield not file.exists()


def download(url: str, cache_dir: text_files.Path | None) -> pathlib.Path:
  """Copies a tokens file from a bucket, once per host."""
  bucket = buckets.connect(url, 1)
  version: Any = None

  def read(start: int, stop: int | None) -> bytes:
    nonlocal version
    with buckets.os_errors(url):
      found = bucket.read('', byte_range=slice(start, stop)).result()
    if version not in (None, found.stamp.generation):
      raise OSError(errno.ESTALE, 'It was replaced while it was read', url)
    if found.state != 'value':
      raise errors.MissingFileError(f'files is {url!r}, which does not exist.')
    version = found.stamp.generation
    return found.value

  place, text, _ = _read_header(read, url)
  digest = hashlib.sha256(url.encode() + version)
  name = f'{digest.hexdigest()[:40]}.tokens'
  file = _choose_folder(cache_dir, name) / name
  if not file.exists():
    logging.info('Copying %s to %s.', url, file)
    with _alone(file) as is_first:
      if is_first:
        with disk.replacing(file) as out:
          for start in range(0, place, _DOWNLOAD_BYTES):
            out.write(read(start, min(place, start + _DOWNLOAD_BYTES)))
          out.write(text)
  return file


def _read_header(
  read: Callable[[int, int | None], bytes], path: Any
) -> tuple[int, bytes, dict[str, Any]]:
  """Returns offset, text and value of the header, which ends the file."""
  place = int.from_bytes(read(0, 8), 'little')
  text = read(place, None)
  try:
    return place, text, json.loads(text)
  except ValueError as e:
    raise errors.UsageError(
      f'{path} is damaged; expected a complete .tokens file from a `cache_dir`.'
    ) from e


def open_corpus(
  path: pathlib.Path,
  tokenizer: tokenization.Tokenizer,
  notes: dict[str, str] | None = None,
) -> Corpus:
  """Maps the tokens of a file that `load` made."""
  return Corpus(*(_open(path, tokenizer, i, notes or {}) for i in range(2)))


def _choose_folder(
  cache_dir: text_files.Path | None, name: str
) -> pathlib.Path:
  """Returns the folder that has a file, or a writable folder for it."""
  disk.check_local(cache_dir or '', 'cache_dir')
  cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  folder = pathlib.Path(cache_dir or f'{cache}/jaxline/tokens')
  folder = folder.expanduser().absolute()
  with contextlib.suppress(OSError):  # Its files may be inaccessible.
    if (folder / name).exists():
      return folder
  try:
    folder.mkdir(0o777 if cache_dir else 0o700, parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as e:
    text = f'Tokens cannot be kept in {folder}: {e.strerror}.'
    if cache_dir:
      raise errors.UsageError(f'{text} Set a different `cache_dir`.') from e
    folder = pathlib.Path(tempfile.gettempdir(), f'jaxline-{os.getuid()}')
    folder.mkdir(0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
      raise errors.UsageError(f'{text} Set `cache_dir`.') from e
    logging.warning('%s Using %s instead; set `cache_dir`.', text, folder)
  return folder


def _open(
  path: pathlib.Path,
  tokenizer: tokenization.Tokenizer,
  i: int,
  notes: Mapping[str, str],
) -> Documents:
  # Make the map a plain array, because slicing `np.memmap` is slow.
  data = np.zeros(0, np.uint8)
  if path.stat().st_size:  # NumPy cannot map an empty file.
    data = np.memmap(path, np.uint8, 'r').view(np.ndarray)
  end, _, header = _read_header(lambda i, j: data[i:j].tobytes(), path)
  if header['tokenizer'] != tokenizer.identity:
    raise errors.UsageError(
      f'{path} has tokens of {header["tokenizer"]}; `tokenizer` is'
      f' {tokenizer.identity}. Use the tokenizer that made the file.'
    )
  parts = np.split(data[8:end], np.cumsum(header['sizes']))
  table = parts[i].view('<i8').reshape(-1, 3)
  return Documents(
    names=_Names(header['files'], table),
    tokens=parts[i + 2].view(_dtype(tokenizer)),
    starts=table[:, 0],
    sha256=header['sha256'][i],
    num_bytes=header['num_bytes'][i],
    tokenizer=tokenizer,
    notes=header['notes'] | notes,
    _origin=(path, tokenizer, i, notes),
  )


def _make_parts(
  folder: pathlib.Path, reader: text_files.Reader
) -> list[pathlib.Path]:
  """Writes the missing parts of a corpus; returns the paths of all parts."""
  tokenizer, start = reader.tokenizer, (0, 0)
  parts = sorted(folder.glob('[0-9]*.npz'))
  if parts:
    with np.load(parts[-1]) as part:
      state = json.loads(part['state'].tobytes())
    start, reader.notes, reader.nulls = state
  pieces_left = reader.read(*start)
  progress = _log_progress(reader)
  while pieces := _take_part(pieces_left):
    next(progress)
    texts, begins = [x.text for x in pieces], [x.begins for x in pieces]
    encoded = tokenizer.encode_parts(texts, begins)
    ids = np.concatenate(encoded, dtype=_dtype(tokenizer), casting='unsafe')
    if (ids == tokenizer.document_id).any():
      raise errors.UsageError(
        f'The tokenizer {tokenizer.identity} encodes some text to its document'
        f' token, {tokenizer.document_id}. Use a token that no text encodes to.'
      )
    sizes = np.array([*map(len, encoded)])
    firsts = (np.cumsum(sizes) - sizes)[begins]
    start = pieces[-1].file, pieces[-1].number + 1
    state = json.dumps([start, reader.notes, reader.nulls]).encode()
    parts.append(folder / f'{len(parts):08}.npz')
    with disk.replacing(parts[-1]) as out:
      np.savez(
        out,
        ids=np.insert(ids, firsts, tokenizer.document_id),
        sizes=sizes + np.array(begins),
        begins=begins,
        places=np.array([(x.file, x.line) for x in pieces], np.int64),
        num_bytes=np.array([len(x.text) for x in pieces]),
        hashes=np.array([x.hash for x in pieces], np.uint64),
        state=np.frombuffer(state, np.uint8),
      )
  return parts


def _take_part(pieces: Iterator[text_files.Piece]) -> list[text_files.Piece]:
  """Returns the pieces of the next part; [] at the end."""
  part, size = [], 0
  for piece in pieces:
    part.append(piece)
    # A short line takes about ten times its size in memory.
    size += max(len(piece.text), 64)
    if size >= _BATCH_BYTES:
      break
  return part


def _log_progress(reader: text_files.Reader) -> Iterator[None]:
  """Logs the progress at a `next`, at most every `_PROGRESS_SECS`."""
  sizes = [os.path.getsize(source.path) for source in reader.sources]
  ends, total = np.cumsum([0, *sizes]).tolist(), sum(sizes)
  start = last = time.monotonic()
  first = ends[reader.file] + reader.done_bytes
  while True:
    yield
    if (now := time.monotonic()) - last > _PROGRESS_SECS:
      done, last = ends[reader.file] + reader.done_bytes, now
      speed = max(1, done - first) / (now - start)
      text = (
        'Tokenized %d of %d files, %.0f of %.0f MiB, %.2f MiB/s, %.0f s left.'
      )
      mib = [x / 2**20 for x in (done, total, speed)]
      logging.info(text, reader.file, len(sizes), *mib, (total - done) / speed)


def _join(
  path: pathlib.Path, parts: Sequence[pathlib.Path], reader: text_files.Reader
) -> None:
  """Writes a corpus; holds out documents whose hash is below a threshold."""
  threshold = math.ceil(reader.eval_fraction * 2**64)
  least, most, num_documents = 2**64, -1, 0
  for part in parts:
    with np.load(part) as found:
      hashes = found['hashes']
      least, most = min(least, int(hashes.min())), max(most, int(hashes.max()))
      num_documents += int(found['begins'].sum())
  names = [source.name for source in reader.sources]
  for name, count in reader.nulls.items():
    text = f'{count} lines left out: their text_key {reader.text_key!r} is null'
    reader.notes.setdefault(name, text)
  num_nulls = sum(reader.nulls.values())
  if num_nulls > text_files.MAX_SHARE * (num_documents + num_nulls):
    raise errors.UsageError(
      f'{num_nulls} of {num_documents + num_nulls} lines are left out; expected'
      f' at most 1%. Correct or remove them. {join_notes(reader.notes)}'
    )
  if least >= most:
    raise errors.UsageError(
      f'{len(names)} files hold {num_documents} documents with text; expected'
      " at least 2. Give more files, a single file, or documents='line'."
      f' {join_notes(reader.notes)}'
    )
  if not least < threshold <= most:
    # Hold out at least one document, and train on at least one.
    threshold = most if least < threshold else least + 1

  def select(i: int) -> Iterator[tuple[Any, np.ndarray]]:
    for part in parts:
      with np.load(part) as found:
        yield found, (found['hashes'] < threshold) == i

  header: dict[str, Any] = {
    'files': names,
    'tokenizer': reader.tokenizer.identity,
    'notes': reader.notes,
    'num_bytes': [0, 0],
    'sizes': [0] * 4,
    'sha256': ['', ''],
  }
  with disk.replacing(path) as out:
    out.seek(8)
    for i in range(2):
      start, num_bytes, before = 0, 0, out.tell()
      for found, chosen in select(i):
        sizes, places = found['sizes'] * chosen, found['places']
        rows = np.column_stack([start + np.cumsum(sizes) - sizes, places])
        out.write(rows[chosen & found['begins']].astype('<i8').data)
        start += int(sizes.sum())
        num_bytes += int(found['num_bytes'][chosen].sum())
      header['sizes'][i] = out.tell() - before
      header['num_bytes'][i] = num_bytes
    for i in range(2):
      digest, before = hashlib.sha256(), out.tell()
      for found, chosen in select(i):
        data = found['ids'][np.repeat(chosen, found['sizes'])].data
        out.write(data)
        digest.update(data)
      header['sizes'][i + 2] = out.tell() - before
      header['sha256'][i] = digest.hexdigest()
    end = out.tell()
    out.write(json.dumps(header).encode())
    out.seek(0)
    out.write(end.to_bytes(8, 'little'))


def _dtype(tokenizer: tokenization.Tokenizer) -> str:
  return '<u2' if tokenizer.vocab_size <= 2**16 else '<u4'
