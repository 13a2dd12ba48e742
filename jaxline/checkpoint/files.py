"""Checkpoints on disk: which are there, whether they are whole, whose they are.

docs/reference/checkpoint_files.md describes the files. A directory STEP appears
and goes in one rename, so it is complete whenever it is there.
"""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import errno
import fcntl
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import socket
import stat
import threading
import time
from typing import Any, TypeVar
import zlib

from absl import logging

from jaxline import disk
from jaxline import errors
from jaxline.supervision import preemption

FORMAT = 1
RECORD = 'checkpoint.json'
ARRAYS = 'arrays'
_CHECKSUMS = 'checksums_{}.json'
# Files that have no checksum: Orbax's own, which it changes after all else is
# written and which nothing here reads; and the checksums.
_UNCHECKED = (
  r'_CHECKPOINT_METADATA|commit_success\.txt|checksums_\d+\.json(\..*)?'
)
_CHUNK = 1 << 22  # Bytes hashed at a time.
# Parts of names: of a checkpoint that is being removed, and of a complete one
# that is about to replace another.
_DELETED = '.deleted-'
_NEW = '.new'
# Names that only this library and Orbax give; other names are the user's.
_LEFTOVER = r'\.deleted-.*|\d+\.partial|\d+(\.new)?\.orbax-checkpoint-tmp.*'
_STEP = '0|[1-9][0-9]*'  # One name for each number.
_PAUSES = (0.5, 1.5, 4.0)  # Seconds before each further try to read.
_DISCARD_CHECKS = 10  # In a row, that find nothing of a save that failed.
_DISCARD_SECS = 10.0  # After which the next start removes what is left.
_T = TypeVar('_T')

# What `lockf` raises on a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

# There is no file of that name.
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# What the use of JSON raises that is of another form than a save writes.
MALFORMED = (
  KeyError, TypeError, AttributeError, IndexError, OverflowError,
  RecursionError,
)  # fmt: skip


class DamagedError(ValueError):
  """A checkpoint is not as it was written; each argument says what differs."""

  def __str__(self) -> str:
    return '; '.join(map(str, self.args))


class GoneError(DamagedError):
  """A checkpoint was removed while it was read."""


class RefusedError(DamagedError):
  """A checkpoint is as it was written, but no save writes such a one."""


class UnreadableError(OSError):
  """A file could not be read, which says nothing of what it holds."""


class ClaimedError(errors.UsageError):
  """Another process writes to the same directory."""


def printable(text: Any) -> str:
  """Returns a text whose control characters are escaped."""
  # A terminal would obey those in a name that comes from a file.
  return ''.join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


@contextlib.contextmanager
def well_formed() -> Iterator[None]:
  """Refuses JSON that is as it was written, but not as a save writes it."""
  try:
    yield
  except MALFORMED as e:
    what = printable(f'{type(e).__name__}: {str(e)[:80]}')
    raise RefusedError(f'no save writes such a file ({what})') from e


@contextlib.contextmanager
def reading(checkpoint: pathlib.Path) -> Iterator[None]:
  """Says which checkpoint an error is about, and what to do."""
  where = shlex.quote(str(checkpoint))
  skip = f'Nothing was changed. To skip it: mv {where} {where}.bak'
  try:
    yield
  except DamagedError as e:
    if not os.path.lexists(checkpoint):
      raise GoneError(
        f'{checkpoint} was removed meanwhile: the run that writes there keeps'
        ' only as many as its config says. Try again.'
      ) from e
    if isinstance(e, RefusedError):
      raise RefusedError(f'{checkpoint} is refused: {e}. {skip}') from e
    raise DamagedError(f'{checkpoint} is damaged: {e}.') from e
  except UnreadableError as e:
    raise UnreadableError(
      e.errno,
      f'{checkpoint} could not be read: {e.strerror}. This may pass: start'
      f' again. {skip}',
    ) from e


def retried(read: Callable[[], _T], name: str) -> _T:
  """Calls a function, and three times more where it fails as may pass.

  Args:
    read: reads something.
    name: of what it reads.

  Returns:
    What `read` returns.

  Raises:
    UnreadableError: it failed each time.
    OSError: there is no such file.
  """
  pauses = iter(_PAUSES)
  while True:
    try:
      return read()
    except (*MISSING, UnreadableError):
      raise
    except OSError as e:
      text = f'{name}: {e.strerror or e}'
      pause = next(pauses, None)
      if pause is None:
        raise UnreadableError(
          e.errno, f'{text} (tried {len(_PAUSES) + 1} times)'
        ) from e
      logging.warning('%s. Trying again in %.1f s.', text, pause)
    time.sleep(pause)


def root(
  directory: str | os.PathLike[str], key: str = 'checkpoint_dir'
) -> pathlib.Path:
  """Returns where a run's checkpoints are.

  Args:
    directory: the run's.
    key: of the config, which gives it.

  Raises:
    UsageError: it is none, or an address.
  """
  if not directory:
    raise errors.UsageError(
      f'config.{key} is {directory!r}; expected a path of this machine.'
    )
  disk.check_local(directory, f'config.{key}')
  return pathlib.Path(directory).absolute() / 'checkpoints'


def names_in(folder: pathlib.Path) -> list[str]:
  """Returns the names in a directory; none where there is no directory."""
  try:
    return retried(lambda: os.listdir(folder), str(folder))
  except MISSING:
    return []


def steps(series: pathlib.Path) -> list[int]:
  """Returns the steps of a series' checkpoints, ascending."""
  names = names_in(series)
  return sorted(int(name) for name in names if re.fullmatch(_STEP, name))


# Files.


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a file that is whole, and on the disk, or not there."""
  partial = path.with_name(f'{path.name}.{os.getpid()}.partial')
  with disk.replacing(path, partial) as f:
    f.write(json.dumps(value, indent=1).encode() + b'\n')


def _refuse_irregular(name: str, mode: int) -> None:
  # To open one could wait for ever, or leave the directory.
  if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
    is_link = stat.S_ISLNK(mode)
    raise RefusedError(
      f'{printable(name)} is'
      f' {"a symbolic link" if is_link else "a FIFO, a socket or a device"};'
      ' expected only directories and regular files'
    )


def open_regular(path: pathlib.Path) -> io.FileIO:
  """Opens a file for reading, unbuffered.

  Raises:
    RefusedError: it is a link, a FIFO or a device.
    OSError: it cannot be opened.
  """
  _refuse_irregular(path.name, os.lstat(path).st_mode)
  # In case it was replaced since: neither follows a link nor waits.
  safe = os.O_NOFOLLOW | os.O_NONBLOCK
  return io.FileIO(path, opener=lambda p, flags: os.open(p, flags | safe))


def read_json(path: pathlib.Path, name: str | None = None) -> Any:
  """Reads a file.

  Args:
    path: the file.
    name: what errors call it; None is its name without directories.

  Raises:
    DamagedError: it is not there, or is not JSON.
    RefusedError: it is no regular file, or holds what no save writes.
    UnreadableError: it cannot be read, which may pass.
  """
  name = name or path.name

  def read() -> bytes:
    with open_regular(path) as f:
      return f.read()

  try:
    return json.loads(retried(read, name).decode())
  except DamagedError:
    raise
  except MISSING as e:
    raise DamagedError(f'{name} cannot be read ({e.strerror})') from e
  except ValueError as e:
    raise DamagedError(f'{name} is not JSON ({e})') from e
  except RecursionError:
    raise RefusedError(f'{name} is nested too deeply') from None


def read_record(checkpoint: pathlib.Path) -> dict[str, Any]:
  """Reads what a checkpoint says of itself.

  Raises:
    DamagedError: it is not there.
    RefusedError: it is no record, or of another step than the directory's name.
    UnreadableError: it cannot be read, which may pass.
    errors.UsageError: a later version of this library wrote it.
  """
  record = read_json(checkpoint / RECORD)
  if not isinstance(record, dict) or type(record.get('format')) is not int:
    raise RefusedError(f'{RECORD} is no record of a checkpoint')
  if record['format'] > FORMAT:
    raise errors.UsageError(
      f'{checkpoint} has format {record["format"]}; this jaxline reads up to'
      f' {FORMAT}. It was written by {record.get("versions")}: install that'
      ' jaxline or a newer one.'
    )
  step, name = record.get('step'), checkpoint.name
  if re.fullmatch(_STEP, name) and step is not None and str(step) != name:
    raise RefusedError(
      f'its directory is named {name}, but {RECORD} says step {step}; rename'
      f' it to {step}'
    )
  return record


def refuse_link(checkpoint: pathlib.Path) -> None:
  """Raises RefusedError where a checkpoint is a link to another directory."""
  with contextlib.suppress(*MISSING):
    found = retried(lambda: os.lstat(checkpoint), str(checkpoint))
    _refuse_irregular(checkpoint.name, found.st_mode)


def regular_files(checkpoint: pathlib.Path) -> list[str]:
  """Returns the relative names of all files that have checksums, sorted.

  Raises:
    RefusedError: there is a link, a FIFO or a device.
  """

  def fail(error: OSError) -> None:
    if not isinstance(error, MISSING):
      raise error

  def scan() -> list[str]:
    found = []
    for folder, folders, names in os.walk(checkpoint, onerror=fail):
      for path in (os.path.join(folder, name) for name in folders + names):
        # Another process may be replacing its own files just now.
        with contextlib.suppress(FileNotFoundError):
          mode, name = os.lstat(path).st_mode, os.path.relpath(path, checkpoint)
          _refuse_irregular(name, mode)
          if stat.S_ISREG(mode) and not re.fullmatch(_UNCHECKED, name):
            found.append(name)
    return sorted(found)

  refuse_link(checkpoint)
  return retried(scan, checkpoint.name)


# Checksums.


def checksum(path: pathlib.Path, expected: int | None = None) -> list[int]:
  """Returns a file's size in bytes and its CRC-32.

  Args:
    path: the file.
    expected: its size; where it has another, it is not read, and the CRC is 0.
  """
  size = crc = 0
  with open_regular(path) as f:
    found = os.fstat(f.fileno()).st_size
    if expected is not None and found != expected:
      return [found, 0]
    buffer = memoryview(bytearray(_CHUNK))
    while n := f.readinto(buffer):
      size += n
      crc = zlib.crc32(buffer[:n], crc)
  return [size, crc]


def write_checksums(
  checkpoint: pathlib.Path, process: int, processes: int
) -> None:
  """Writes the checksums of one process's share of the files.

  Args:
    checkpoint: with all its files.
    process: index of this process.
    processes: how many share the work.
  """
  names = regular_files(checkpoint)[process::processes]
  _write_sums(checkpoint, names, process, {'processes': processes, 'files': {}})


def complete_checksums(
  checkpoint: pathlib.Path, names: Iterable[str] | None = None
) -> None:
  """Adds checksums that are missing to those of the first process.

  Args:
    checkpoint: whose.
    names: of the files; None is all that have none.
  """
  names = regular_files(checkpoint) if names is None else names
  if missing := sorted({*names} - {*read_checksums(checkpoint)}):
    part = read_json(checkpoint / _CHECKSUMS.format(0))
    _write_sums(checkpoint, missing, 0, part)


def _write_sums(
  checkpoint: pathlib.Path, names: Iterable[str], process: int, part: Any
) -> None:
  """Hashes files, and writes the checksums of a process with theirs."""
  sums = part['files'] | {n: checksum(checkpoint / n) for n in names}
  part = {'processes': part['processes'], 'files': sums}
  # A new file: the old one may be linked into another checkpoint.
  path = checkpoint / _CHECKSUMS.format(process)
  write_json(path, {**part, 'crc': crc_of(part)})


def crc_of(value: Any) -> int:
  """Returns the CRC-32 of the JSON of a value."""
  return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def read_checksums(checkpoint: pathlib.Path) -> dict[str, list[int]]:
  """Returns size in bytes and CRC-32 of each file.

  Raises:
    DamagedError: they are not there, or are not as written.
    RefusedError: they name a file that is not in the checkpoint.
    UnreadableError: they cannot be read, which may pass.
  """
  sums: dict[str, list[int]] = {}
  process, processes = 0, 1
  while process < processes:
    name = _CHECKSUMS.format(process)
    part = read_json(checkpoint / name)
    crc = part.pop('crc', None) if isinstance(part, dict) else None
    if crc != crc_of(part):
      raise DamagedError(f'{name} is not as it was written')
    for file in part['files']:
      if file != os.path.normpath(file) or file.split('/')[0] in ('', '..'):
        raise RefusedError(
          f'{name} lists {file!r}, which is no file in the checkpoint'
        )
    sums.update(part['files'])
    processes = part['processes']
    process += 1
  return sums


# Checkpoints come and go.


def size(checkpoint: pathlib.Path) -> int:
  """Returns the bytes of all files of a checkpoint."""
  names = regular_files(checkpoint)
  return sum((checkpoint / name).lstat().st_size for name in names)


def remove(checkpoint: pathlib.Path) -> None:
  """Removes a checkpoint; it is gone at once, and never there in part."""
  shutil.rmtree(_hidden(checkpoint), ignore_errors=True)


def _hidden(checkpoint: pathlib.Path) -> pathlib.Path:
  """Renames a checkpoint, if it is there, to a hidden name; returns that."""
  doomed = checkpoint.with_name(f'{_DELETED}{checkpoint.name}-{os.getpid()}')
  with contextlib.suppress(FileNotFoundError):
    os.rename(checkpoint, doomed)
  return doomed


def discard(place: pathlib.Path) -> None:
  """Removes what a failed save has written, and what threads still write.

  Args:
    place: the name that the checkpoint would have.
  """
  for pattern in (f'{place.name}.orbax-*-tmp*', f'{place.stem}.partial'):
    for partial in place.parent.glob(pattern):
      gone, deadline = 0, time.monotonic() + _DISCARD_SECS
      # TensorStore makes it again for a write that was still queued.
      while gone < _DISCARD_CHECKS and time.monotonic() < deadline:
        shutil.rmtree(partial, ignore_errors=True)
        gone = 0 if partial.exists() else gone + 1
        time.sleep(0.05)


def new(checkpoint: pathlib.Path) -> pathlib.Path:
  """Returns the name of a whole checkpoint that will take another's place."""
  return checkpoint.with_name(checkpoint.name + _NEW)


def replace(checkpoint: pathlib.Path) -> None:
  """Puts `new(checkpoint)`, if it is there, in the place of a checkpoint."""
  # The new one is there for good before the old one goes.
  disk.sync_directory(checkpoint.parent)
  if new(checkpoint).exists():
    old = _hidden(checkpoint)
    os.rename(new(checkpoint), checkpoint)
    disk.sync_directory(checkpoint.parent)
    shutil.rmtree(old, ignore_errors=True)


def clean(series: pathlib.Path) -> None:
  """Removes what a killed process has left: half saves, half deletions.

  Only for the one that holds the claim on the series.
  """
  for name in names_in(series):
    step = name.removesuffix(_NEW)
    if step != name and re.fullmatch(_STEP, step):
      # Killed within `replace`, perhaps when only this one was left.
      replace(series / step)
    elif re.fullmatch(_LEFTOVER, name):
      shutil.rmtree(series / name, ignore_errors=True)


def set_aside(checkpoint: pathlib.Path) -> pathlib.Path:
  """Moves a damaged checkpoint out of its series, and returns where to."""
  damaged = checkpoint.parent.parent / 'damaged'
  damaged.mkdir(exist_ok=True)
  name = f'{checkpoint.parent.name}-{checkpoint.name}'
  target, count = damaged / name, 1
  while target.exists():
    count += 1
    target = damaged / f'{name}-{count}'
  os.rename(checkpoint, target)
  return target


def link(source: pathlib.Path, target: pathlib.Path) -> None:
  """Makes a second name for each file of a checkpoint; copies nothing.

  Where the file system has no hard links, the files are copied.

  Raises:
    FileNotFoundError: the checkpoint was removed meanwhile.
  """

  def link_file(a: str, b: str) -> None:
    try:
      os.link(a, b)
    except FileNotFoundError:
      raise
    except OSError:
      shutil.copy2(a, b)

  shutil.rmtree(target, ignore_errors=True)
  target.parent.mkdir(parents=True, exist_ok=True)
  try:
    shutil.copytree(source, target, symlinks=True, copy_function=link_file)
  except (FileNotFoundError, shutil.Error) as e:
    shutil.rmtree(target, ignore_errors=True)
    if source.exists() and not isinstance(e, FileNotFoundError):
      raise
    raise FileNotFoundError(f'{source} was removed while it was read.') from e


def removable(
  saved: Iterable[tuple[int, float]],
  newest: int,
  every_steps: int | None = None,
  every_hours: float | None = None,
) -> list[int]:
  """Returns the steps to remove from a series.

  Args:
    saved: step and time in seconds of each checkpoint.
    newest: how many of the newest stay.
    every_steps: the first at or after each multiple of it stays for ever.
    every_hours: one at least that long after the last such one, likewise.
  """
  ordered = sorted(saved)
  forever = set()
  last_multiple, last_time = 0, None
  for step, when in ordered:
    if every_steps and step // every_steps > last_multiple:
      last_multiple = step // every_steps
      forever.add(step)
    # One from before the last: the clock was put back, so begin anew.
    if every_hours and (
      last_time is None or not 0 <= when - last_time < 3600 * every_hours
    ):
      last_time = when
      forever.add(step)
  return [step for step, _ in ordered[:-newest] if step not in forever]


# Who may write.

# What has been claimed, by which process: to the operating system one process
# is one claimant, and would get the right a second time. A forked child finds
# its parent's here.
_claimed: dict[pathlib.Path, int] = {}
_claiming = threading.Lock()


# How a claim ended, as its file says.
STOPPED, FAILED = 'stopped', 'failed'


class Claim:
  """The right to write something in a run's directory; one process has it.

  It ends with the process, however that ends: the operating system keeps it.
  Its file says how it ended, unless the process was killed.
  """

  def __init__(self, directory: str | os.PathLike[str], what: str):
    """Takes the right.

    Args:
      directory: the run's.
      what: 'train', 'eval', 'best'.

    Raises:
      ClaimedError: it is taken; the message says by whom.
    """
    folder = root(directory) / 'claims'
    folder.mkdir(parents=True, exist_ok=True)
    self._path = (folder / f'{what}.json').resolve()
    with _claiming:
      try:
        self._fd: int | None = self._take()
      except BlockingIOError:
        key = 'another config.checkpoint_dir'
        if what == 'best':  # It may be kept by one evaluation alone.
          key = "config.best_model_eval_metric = ''"
        raise ClaimedError(
          f'{os.fspath(directory)} is in use: {self._owner()} has the right to'
          f' write {what!r} there. Wait for its end, stop it, or give this run'
          f' {key}.'
        ) from None

  def __enter__(self) -> 'Claim':
    return self

  def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
    end: str | None = STOPPED
    if isinstance(error, errors.UsageError):
      end = self._end_before  # A start that is refused has changed nothing.
    elif error and not isinstance(error, preemption.Preempted):
      end = FAILED
    self.release(end)

  def _take(self) -> int:
    """Locks the file; raises BlockingIOError where another has locked it."""
    # Before the file is opened: closing it, even after reading, would give the
    # lock back that this process has on it.
    if is_claimed_here(self._path):
      raise BlockingIOError
    fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      try:
        # Not flock: a worker process forked from this one would hold it on.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError as e:
        if e.errno == errno.EACCES:  # POSIX has two errors for a taken lock.
          raise BlockingIOError from e
        if e.errno not in _NO_LOCKS:
          raise
        logging.warning(
          '%s: the file system has no locks (%s), so nothing keeps a second run'
          ' from writing in this directory. Start no other one there.',
          self._path,
          e.strerror,
        )
      self._end_before: str | None = FAILED
      with contextlib.suppress(ValueError, *MALFORMED):
        self._end_before = json.loads(os.pread(fd, 4096, 0))['end']
      self._note = {
        'host': socket.gethostname(),
        'pid': os.getpid(),
        'since': time.strftime('%Y-%m-%d %H:%M:%S %z'),
        'end': None,  # That of a process that was killed.
      }
      os.ftruncate(fd, 0)
      os.pwrite(fd, json.dumps(self._note).encode(), 0)
    except BaseException:
      os.close(fd)
      raise
    _claimed[self._path] = os.getpid()
    return fd

  def _owner(self) -> str:
    if is_claimed_here(self._path):
      return f'this very process ({os.getpid()} on {socket.gethostname()})'
    try:
      owner = json.loads(self._path.read_text(encoding='utf-8'))
      host, pid, since = (owner[key] for key in ('host', 'pid', 'since'))
      return f'process {pid} on {host}, since {since},'
    except (OSError, ValueError, KeyError, TypeError):
      return 'another process'

  def check(self) -> None:
    """Raises an error where the right is lost: another run may have begun.

    Raises:
      FileNotFoundError: its file is gone, or is another one.
    """
    assert self._fd is not None
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      found = retried(self._path.stat, str(self._path))
      if os.path.samestat(found, os.fstat(self._fd)):
        return
    raise FileNotFoundError(
      errno.ENOENT,
      'This file was removed or replaced while this run held it, so that'
      ' another one may be writing there; nothing was saved. Leave the'
      ' directory in place while a run writes there',
      str(self._path),
    )

  def release(self, end: str | None = STOPPED) -> None:
    """Gives the right back, and notes how it ended: `STOPPED` or `FAILED`."""
    # Closed before another thread may claim: the operating system takes at
    # any close of the file all locks that this process has on it.
    with _claiming:
      if self._fd is not None:
        fd, self._fd = self._fd, None
        try:
          with contextlib.suppress(OSError):  # The disk may be full.
            os.pwrite(fd, json.dumps(self._note | {'end': end}).encode(), 0)
          os.close(fd)
        finally:
          _claimed.pop(self._path, None)


def is_claimed_here(path: pathlib.Path) -> bool:
  """Returns whether this process has a claim, and must not open its file."""
  return _claimed.get(path.resolve()) == os.getpid()
