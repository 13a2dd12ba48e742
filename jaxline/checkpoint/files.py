"""Checkpoints on disk: which are there, whether they are whole, whose they are.

A run's directory holds, besides the logs:

    checkpoints/latest/STEP/    written by training
    checkpoints/best/STEP/      written by evaluation
    checkpoints/damaged/        what could not be read, set aside
    checkpoints/claims/         who is writing here

and a directory STEP, which appears and goes in one rename, so that it is whole
whenever it is there:

    checkpoint.json     what the checkpoint holds: entries, arrays, config, ...
    process_N.json      what process N alone has: the position of its data
    extra.json          what `on_new_best_model` added
    arrays/NAME/        one Zarr 3 array each, written by Orbax
    checksums_N.json    size and CRC-32 of every file above
"""

from collections.abc import Callable, Iterable
import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import pathlib
import re
import shutil
import socket
import threading
import time
from typing import Any, TypeVar
import zlib

from absl import logging

FORMAT = 1
RECORD = 'checkpoint.json'
ARRAYS = 'arrays'
_CHECKSUMS = 'checksums_{}.json'
# Orbax's own, changed after all else is written; nothing here reads them.
_UNCHECKED = ('_CHECKPOINT_METADATA', 'commit_success.txt')
_CHUNK = 1 << 22  # Bytes hashed at a time.
# Names that are not a step's, and so never taken for a checkpoint: of one that
# is being removed, and of a whole one that is about to replace another.
_DELETED = '.deleted-'
NEW = '.new'
# Names that only we and Orbax give; what else is there is the user's.
_LEFTOVER = r'\.deleted-.*|\d+\.partial|\d+(\.new)?\.orbax-checkpoint-tmp.*'
_STEP = '0|[1-9][0-9]*'  # The name of each number, and no other for it.
_PAUSES = (0.5, 1.5, 4.0)  # Seconds before each further try to read.
_DISCARD_CHECKS = 10  # In a row, that find nothing of a save that failed.
_DISCARD_SECS = 10.0  # After which the next start removes what is left.
_T = TypeVar('_T')

# What says that a file system or a quota has no room.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What says that there is no file of that name.
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class DamagedError(ValueError):
  """A checkpoint is not as it was written; the message says what differs."""


class UnreadableError(OSError):
  """A file could not be read, which says nothing of what it holds."""


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
    except MISSING:
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


def root(directory: str | os.PathLike[str]) -> pathlib.Path:
  """Returns where a run's checkpoints are.

  Raises:
    ValueError: it is an address and not a directory.
  """
  if '://' in os.fspath(directory):
    raise ValueError(
      f'Checkpoints cannot be kept in {os.fspath(directory)!r}; expected a'
      ' folder of this machine. Mount the bucket and give its path here.'
    )
  return pathlib.Path(directory).absolute() / 'checkpoints'


def steps(series: pathlib.Path) -> list[int]:
  """Returns the steps of a series' checkpoints, ascending."""
  try:
    names = retried(lambda: os.listdir(series), str(series))
  except MISSING:
    return []
  return sorted(int(name) for name in names if re.fullmatch(_STEP, name))


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a file that is whole, and on the disk, or not there."""
  partial = path.with_name(f'{path.name}.{os.getpid()}.partial')
  try:
    with open(partial, 'w', encoding='utf-8') as f:
      json.dump(value, f, indent=1)
      f.write('\n')
      f.flush()
      os.fsync(f.fileno())
    os.replace(partial, path)
  except BaseException as e:
    with contextlib.suppress(OSError):
      partial.unlink(missing_ok=True)
    if isinstance(e, OSError):
      raise failed_write(e, path) from None
    raise
  sync_directory(path.parent)


def failed_write(
  error: OSError, path: pathlib.Path, needed: int | None = None
) -> OSError:
  """Returns an error of the same kind that says how much room there is.

  Args:
    error: what writing failed with.
    path: what could not be written.
    needed: bytes that it would take; None leaves that out.
  """
  text = error.strerror or str(error)
  if error.errno in FULL:
    room = [] if needed is None else [f'{needed / 2**20:.2f} MiB needed']
    free = shutil.disk_usage(path.parent).free
    text += f' ({", ".join([*room, f"{free / 2**20:.2f} MiB free"])})'
  return OSError(error.errno, text, str(path))


def sync_directory(directory: pathlib.Path) -> None:
  """Waits until the disk knows the names that a directory has now.

  Raises:
    OSError: the disk is full, or failing.
  """
  try:
    fd = os.open(directory, os.O_RDONLY)
    try:
      os.fsync(fd)
    finally:
      os.close(fd)
  except OSError as e:
    # What else is said is said by file systems that have no such thing.
    if e.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
      raise


def read_json(path: pathlib.Path) -> Any:
  """Reads a file.

  Raises:
    DamagedError: it is not there, or is not JSON.
    UnreadableError: it cannot be read, which may pass.
  """
  try:
    text = retried(lambda: path.read_text(encoding='utf-8'), path.name)
    return json.loads(text)
  except FileNotFoundError as e:
    raise DamagedError(f'{path.name} is missing') from e
  except MISSING as e:
    raise DamagedError(f'{path.name} cannot be read ({e.strerror})') from e
  except ValueError as e:
    raise DamagedError(f'{path.name} is not JSON ({e})') from e


def read_record(checkpoint: pathlib.Path) -> dict[str, Any]:
  """Reads what a checkpoint says of itself.

  Raises:
    DamagedError: it is not there, or is no record.
    UnreadableError: it cannot be read, which may pass.
    ValueError: a later version of this library wrote it.
  """
  record = read_json(checkpoint / RECORD)
  if not isinstance(record, dict) or 'format' not in record:
    raise DamagedError(f'{RECORD} is no record of a checkpoint')
  if record['format'] > FORMAT:
    raise ValueError(
      f'{checkpoint} has format {record["format"]}; this jaxline reads up to'
      f' {FORMAT}. It was written by {record.get("versions")}: install that'
      ' jaxline or a newer one.'
    )
  return record


def _files(checkpoint: pathlib.Path) -> list[str]:
  """Returns all files but the checksums, relative, sorted."""
  found = []
  for folder, _, names in os.walk(checkpoint):
    relative = os.path.relpath(folder, checkpoint)
    for name in names:
      path = name if relative == '.' else f'{relative}/{name}'
      # Another process may be writing its own checksums just now.
      if path in _UNCHECKED or re.match(r'checksums_\d+\.json(\.|$)', path):
        continue
      found.append(path)
  return sorted(found)


def _checksum(path: pathlib.Path) -> list[int]:
  """Returns a file's size in bytes and its CRC-32."""
  size = crc = 0
  with open(path, 'rb', buffering=0) as f:
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
  sums = {
    name: _checksum(checkpoint / name)
    for name in _files(checkpoint)[process::processes]
  }
  _write_sums(
    checkpoint / _CHECKSUMS.format(process),
    {'processes': processes, 'files': sums},
  )


def _write_sums(path: pathlib.Path, part: dict[str, Any]) -> None:
  # A new file: the old one may be linked into another checkpoint.
  write_json(path, {**part, 'crc': _crc_of(part)})


def _crc_of(part: dict[str, Any]) -> int:
  summed = {key: part[key] for key in ('processes', 'files')}
  return zlib.crc32(json.dumps(summed, sort_keys=True).encode())


def add_checksum(checkpoint: pathlib.Path, name: str) -> None:
  """Adds a file's checksum to those of the first process."""
  path = checkpoint / _CHECKSUMS.format(0)
  part = read_json(path)
  part['files'][name] = _checksum(checkpoint / name)
  _write_sums(path, part)


def complete_checksums(checkpoint: pathlib.Path) -> None:
  """Adds the checksums that are missing to those of the first process."""
  for name in sorted(set(_files(checkpoint)) - set(read_checksums(checkpoint))):
    add_checksum(checkpoint, name)


def read_checksums(checkpoint: pathlib.Path) -> dict[str, list[int]]:
  """Returns size in bytes and CRC-32 of each file.

  Raises:
    DamagedError: they are not there, or are not as written.
    UnreadableError: they cannot be read, which may pass.
  """
  sums: dict[str, list[int]] = {}
  process, processes = 0, 1
  while process < processes:
    name = _CHECKSUMS.format(process)
    part = read_json(checkpoint / name)
    try:
      if _crc_of(part) != part['crc']:
        raise DamagedError(f'{name} is not as it was written')
      sums.update(part['files'])
      processes = int(part['processes'])
    except (KeyError, TypeError, AttributeError) as e:
      raise DamagedError(f'{name} holds no checksums') from e
    process += 1
  return sums


def verify(
  checkpoint: pathlib.Path,
  wanted: Callable[[str], bool] = lambda name: True,
  process: int = 0,
  processes: int = 1,
) -> list[str]:
  """Returns what is wrong with a checkpoint, a line for each file.

  Files that were not there when it was written (an editor's, a file system's)
  do no harm: they are logged, each once.

  Args:
    checkpoint: its directory.
    wanted: of a file's relative name, whether to look at it.
    process: index of this process.
    processes: how many share the work.

  Raises:
    UnreadableError: a file cannot be read, which may pass and is no damage.
  """
  try:
    sums = read_checksums(checkpoint)
  except DamagedError as e:
    return [str(e)]
  for name in filter(wanted, sorted(set(_files(checkpoint)) - set(sums))):
    if (path := checkpoint / name) not in _strays:
      _strays.add(path)
      logging.warning(
        '%s was not there when the checkpoint was written; it is ignored.', path
      )
  problems = []
  for name in sorted(filter(wanted, sums))[process::processes]:
    size, crc = sums[name]
    read = functools.partial(_checksum, checkpoint / name)
    try:
      got_size, got_crc = retried(read, name)
    except MISSING as e:
      problems.append(f'{name} cannot be read ({e.strerror})')
      continue
    if got_size != size:
      problems.append(f'{name} has {got_size} bytes, {size} were written')
    elif got_crc != crc:
      problems.append(f'{name} is not as it was written (its CRC differs)')
  return problems


_strays: set[pathlib.Path] = set()  # Those that were logged.


def size(checkpoint: pathlib.Path) -> int:
  """Returns the bytes of all files of a checkpoint."""
  return sum((checkpoint / name).stat().st_size for name in _files(checkpoint))


def remove(checkpoint: pathlib.Path) -> None:
  """Removes a checkpoint; it is gone at once, and never there in part."""
  doomed = checkpoint.with_name(f'{_DELETED}{checkpoint.name}-{os.getpid()}')
  with contextlib.suppress(FileNotFoundError):
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def discard(partial: pathlib.Path) -> None:
  """Removes a save that failed, and what threads still write of it."""
  gone, deadline = 0, time.monotonic() + _DISCARD_SECS
  # TensorStore makes the directory again for a write that was still queued.
  while gone < _DISCARD_CHECKS and time.monotonic() < deadline:
    shutil.rmtree(partial, ignore_errors=True)
    gone = 0 if partial.exists() else gone + 1
    time.sleep(0.05)


def replace(new: pathlib.Path, old: pathlib.Path) -> None:
  """Puts a whole checkpoint in the place of another, or of none."""
  whole = old.with_name(old.name + NEW)
  if new != whole:  # So that `clean` finds it, if this is where it ends.
    os.rename(new, whole)
  sync_directory(old.parent)  # The new one is there for good before that.
  remove(old)
  os.rename(whole, old)
  sync_directory(old.parent)


def clean(series: pathlib.Path) -> None:
  """Removes what a killed process has left: half saves, half deletions.

  Only for the one that holds the claim on the series.
  """
  with contextlib.suppress(FileNotFoundError):
    for entry in os.scandir(series):
      step = entry.name.removesuffix(NEW)
      if step != entry.name and re.fullmatch(_STEP, step):
        # Killed within `replace`, perhaps when only this one was left.
        replace(pathlib.Path(entry.path), series / step)
        continue
      if entry.is_dir() and re.fullmatch(_LEFTOVER, entry.name):
        shutil.rmtree(entry.path, ignore_errors=True)


def set_aside(checkpoint: pathlib.Path) -> pathlib.Path:
  """Moves a damaged checkpoint out of its series, and returns where to."""
  damaged = checkpoint.parent.parent / 'damaged'
  damaged.mkdir(exist_ok=True)
  name = f'{checkpoint.parent.name}-{checkpoint.name}'
  for suffix in ('', *(f'-{i}' for i in range(2, 1000))):
    target = damaged / (name + suffix)
    if not target.exists():
      os.rename(checkpoint, target)
      return target
  raise FileExistsError(f'{damaged} is full of checkpoints {name}.')


def damaged(checkpoints: pathlib.Path, series: str) -> list[pathlib.Path]:
  """Returns the checkpoints of a series that were set aside."""
  return sorted((checkpoints / 'damaged').glob(f'{series}-*'))


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
    shutil.copytree(source, target, copy_function=link_file)
  except (FileNotFoundError, shutil.Error) as e:
    shutil.rmtree(target, ignore_errors=True)
    if source.exists() and not isinstance(e, FileNotFoundError):
      raise
    raise FileNotFoundError(f'{source} was removed while it was read.') from e


@dataclasses.dataclass(frozen=True)
class Keep:
  """Which checkpoints of a series stay.

  Attributes:
    newest: how many of the newest.
    every_steps: the first at or after each multiple of it stays for ever.
    every_hours: one at least that long after the last such one, likewise.
  """

  newest: int
  every_steps: int | None = None
  every_hours: float | None = None

  def removable(self, saved: Iterable[tuple[int, float]]) -> list[int]:
    """Returns the steps to remove.

    Args:
      saved: step and time in seconds of each checkpoint.
    """
    ordered = sorted(saved)
    forever = set()
    last_multiple, last_time = 0, None
    for step, when in ordered:
      if self.every_steps and step // self.every_steps > last_multiple:
        last_multiple = step // self.every_steps
        forever.add(step)
      # One from before the last: the clock was put back, so begin anew.
      if self.every_hours and (
        last_time is None or not 0 <= when - last_time < 3600 * self.every_hours
      ):
        last_time = when
        forever.add(step)
    return [step for step, _ in ordered[: -self.newest] if step not in forever]


class ClaimedError(ValueError):
  """Another process writes to the same directory."""


# What has been claimed, by which process: to the operating system one process
# is one claimant, and would get the right a second time. A forked child finds
# its parent's here.
_claimed: dict[pathlib.Path, int] = {}
_claiming = threading.Lock()


class Claim:
  """The right to write something in a run's directory; one process has it.

  It ends with the process, however that ends: the operating system keeps it.
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
      except ClaimedError as e:
        raise ClaimedError(
          f'{os.fspath(directory)} is in use: {e} has the right to write'
          f' {what!r} there. Wait for its end, stop it, or give this run'
          ' another config.checkpoint_dir.'
        ) from None

  def _take(self) -> int:
    """Locks the file; a refusal only says who has it."""
    # Before the file is opened: closing it, even after reading, would give the
    # lock back that this process has on it.
    if is_claimed_here(self._path):
      raise ClaimedError(
        f'this very process ({os.getpid()} on {socket.gethostname()})'
      )
    fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      # Not flock: a worker process forked from this one would hold it on.
      fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
      owner = {
        'host': socket.gethostname(),
        'pid': os.getpid(),
        'since': time.strftime('%Y-%m-%d %H:%M:%S %z'),
      }
      os.ftruncate(fd, 0)
      os.pwrite(fd, json.dumps(owner).encode(), 0)
    except BaseException as e:
      os.close(fd)
      if isinstance(e, BlockingIOError | PermissionError):
        raise ClaimedError(_owner(self._path)) from None
      raise
    _claimed[self._path] = os.getpid()
    return fd

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

  def release(self) -> None:
    """Gives the right back."""
    # Closed before another thread may claim: the operating system takes at
    # any close of the file all locks that this process has on it.
    with _claiming:
      if self._fd is not None:
        fd, self._fd = self._fd, None
        try:
          os.close(fd)
        finally:
          _claimed.pop(self._path, None)


def is_claimed_here(path: pathlib.Path) -> bool:
  """Returns whether this process has a claim, and must not open its file."""
  return _claimed.get(path.resolve()) == os.getpid()


def _owner(path: pathlib.Path) -> str:
  try:
    owner = json.loads(path.read_text(encoding='utf-8'))
    return f'process {owner["pid"]} on {owner["host"]}, since {owner["since"]},'
  except (OSError, ValueError, KeyError, TypeError):
    return 'another process'
