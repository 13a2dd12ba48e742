"""Lists, verifies and locks the checkpoints of a directory.

docs/reference/checkpoint_files.md describes the files. A directory STEP appears
and goes in one rename, so it is complete whenever it is there.
"""

from collections.abc import Iterable, Iterator
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
import threading
import time
from typing import Any
import zlib

from absl import logging

from jaxline import disk
from jaxline import errors

FORMAT = 2
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
_DISCARD_CHECKS = 10  # In a row, that find nothing of a save that failed.
_DISCARD_SECS = 10.0  # After which the next start removes what is left.

# What `lockf` raises on a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

# There is no file of that name.
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class DamagedError(ValueError):
  """A checkpoint is not as it was written; each argument says what differs."""

  def __str__(self) -> str:
    return '; '.join(map(str, self.args))


class GoneError(DamagedError):
  """A checkpoint was removed while it was read."""


class RefusedError(errors.UsageError):
  """A checkpoint is as it was written, but this program cannot restore it."""


class ClaimedError(errors.UsageError):
  """Another process writes to the same directory."""


@contextlib.contextmanager
def reading(checkpoint: pathlib.Path) -> Iterator[None]:
  """Names the checkpoint in an error of reading it."""
  try:
    yield
  except DamagedError as e:
    if not checkpoint.exists():
      raise GoneError(
        f'{checkpoint} was removed meanwhile: the run that writes there keeps'
        ' only as many as its config says. Try again.'
      ) from e
    raise DamagedError(f'{checkpoint} is damaged: {e}.') from e
  except RefusedError as e:
    raise RefusedError(f'{checkpoint} is refused: {e}.') from e


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
    return os.listdir(folder)
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


def read_json(path: pathlib.Path) -> Any:
  """Reads a file.

  Raises:
    DamagedError: it is not there, or is not JSON.
    OSError: it cannot be read.
  """
  try:
    return json.loads(path.read_bytes().decode())
  except MISSING as e:
    raise DamagedError(f'{path.name} cannot be read ({e.strerror})') from e
  except ValueError as e:
    raise DamagedError(f'{path.name} is not JSON ({e})') from e


def read_record(checkpoint: pathlib.Path) -> dict[str, Any]:
  """Reads what a checkpoint says of itself.

  Raises:
    DamagedError: it is not there.
    RefusedError: it has another format, or is of another step than the
      directory's name.
    OSError: it cannot be read.
  """
  record = read_json(checkpoint / RECORD)
  if (found := record.get('format')) != FORMAT:
    raise RefusedError(
      f'it has format {found}, and this jaxline reads format {FORMAT}. Use the'
      ' jaxline that wrote it, or give this run another config.checkpoint_dir'
    )
  step, name = record['step'], checkpoint.name
  if re.fullmatch(_STEP, name) and str(step) != name:
    raise RefusedError(
      f'its directory is named {name}, but {RECORD} says step {step}; rename'
      f' it to {step}'
    )
  return record


def files_in(checkpoint: pathlib.Path) -> list[str]:
  """Returns the relative names of all files that have checksums, sorted."""
  found = []
  for folder, _, names in os.walk(checkpoint):
    for name in names:
      relative = os.path.relpath(os.path.join(folder, name), checkpoint)
      if not re.fullmatch(_UNCHECKED, relative):
        found.append(relative)
  return sorted(found)


# Checksums.


def checksum(path: pathlib.Path, expected: int | None = None) -> list[int]:
  """Returns a file's size in bytes and its CRC-32.

  Args:
    path: the file.
    expected: its size; where it has another, it is not read, and the CRC is 0.
  """
  size = crc = 0
  with open(path, 'rb', buffering=0) as f:
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
  names = files_in(checkpoint)[process::processes]
  _write_sums(checkpoint, names, process, {'processes': processes, 'files': {}})


def complete_checksums(
  checkpoint: pathlib.Path, names: Iterable[str] | None = None
) -> None:
  """Adds checksums that are missing to those of the first process.

  Args:
    checkpoint: whose.
    names: of the files; None is all that have none.
  """
  names = files_in(checkpoint) if names is None else names
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
    OSError: they cannot be read.
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
  return sum((checkpoint / x).lstat().st_size for x in files_in(checkpoint))


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


class Claim:
  """The right to write something in a run's directory; one process has it.

  It is a lock of the operating system, and so ends with the process.
  """

  def __init__(self, directory: str | os.PathLike[str], what: str):
    """Takes the right.

    Args:
      directory: the run's.
      what: 'train', 'eval', 'best'.

    Raises:
      ClaimedError: it is taken.
    """
    folder = root(directory) / 'claims'
    folder.mkdir(parents=True, exist_ok=True)
    self._path = (folder / f'{what}.lock').resolve()
    with _claiming:
      try:
        self._fd: int | None = self._take()
      except BlockingIOError:
        key = 'another config.checkpoint_dir'
        if what == 'best':  # It may be kept by one evaluation alone.
          key = "config.best_model_eval_metric = ''"
        raise ClaimedError(
          f'{os.fspath(directory)} is in use: another run writes {what!r}'
          f' there. Wait for its end, stop it, or give this run {key}.'
        ) from None

  def __enter__(self) -> 'Claim':
    return self

  def __exit__(self, *unused: Any) -> None:
    self.release()

  def _take(self) -> int:
    """Locks the file; raises BlockingIOError where it is locked."""
    # Before the file is opened: closing it would give the lock back that this
    # process has on it.
    if _claimed.get(self._path) == os.getpid():
      raise BlockingIOError
    fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      # Not flock: a worker process forked from this one would hold it on.
      fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
      if e.errno not in _NO_LOCKS:
        os.close(fd)
        if e.errno == errno.EACCES:  # POSIX has two errors for a taken lock.
          raise BlockingIOError from e
        raise
      logging.warning(
        '%s: the file system has no locks (%s), so nothing keeps a second run'
        ' from writing in this directory. Start no other one there.',
        self._path,
        e.strerror,
      )
    _claimed[self._path] = os.getpid()
    return fd

  def check(self) -> None:
    """Raises an error where the right is lost: another run may have begun.

    Raises:
      FileNotFoundError: its file is gone, or is another one.
    """
    assert self._fd is not None
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      if os.path.samestat(self._path.stat(), os.fstat(self._fd)):
        return
    raise FileNotFoundError(
      errno.ENOENT,
      'This file was removed or replaced while this run held it, so that'
      ' another one may be writing there; nothing was saved. Leave the'
      ' directory in place while a run writes there',
      str(self._path),
    )

  def release(self) -> None:
    """Gives the right back."""
    # Closed before another thread may claim: the operating system takes at
    # any close of the file all locks that this process has on it.
    with _claiming:
      if self._fd is not None:
        os.close(self._fd)
        self._fd = None
        _claimed.pop(self._path, None)
