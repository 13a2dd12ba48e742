"""Opens and atomically replaces files; reports a full disk."""

from collections.abc import Iterator
import contextlib
import errno
import functools
import json
import os
import pathlib
import secrets
import shutil
import stat
from typing import Any, BinaryIO

from jaxline import errors

PARTIAL = '.partial'  # The suffix of a file that is being written.
# The errno values for a full file system or quota.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FullDiskError(errors.RunError, OSError):
  """A file system or a quota is full; the message tells what to do."""

  def __str__(self) -> str:
    return (
      f'{self.strerror}: {self.filename}. Free some space, then run the same'
      ' command again.'
    )


_KINDS = {
  stat.S_IFREG: 'a regular file',
  stat.S_IFDIR: 'a directory',
  stat.S_IFLNK: 'a link',
  stat.S_IFIFO: 'a FIFO',
  stat.S_IFSOCK: 'a socket',
}
# These guard against a replacement between check and open. Windows lacks both.
_FLAGS = getattr(os, 'O_NOFOLLOW', 0) | getattr(os, 'O_NONBLOCK', 0)


class ForeignFileError(errors.UsageError, OSError):
  """A run's directory contains something that no run makes, such as a link."""


def check_kind(
  path: str | os.PathLike[str], kind: int = stat.S_IFREG, *, links: bool = False
) -> None:
  """Raises ForeignFileError if a path exists and has a different kind.

  `kind` is S_IFREG or S_IFDIR; `links` allows a link to a directory.
  """
  with contextlib.suppress(FileNotFoundError, NotADirectoryError):
    found = stat.S_IFMT(os.lstat(path).st_mode)
    if found != kind and not (links and os.path.isdir(path)):
      raise ForeignFileError(
        f'{os.fspath(path)} is {_KINDS.get(found, "a device")}; expected'
        f' {_KINDS[kind]} of a run. Remove it, or use a different directory.'
      )


def open_regular(path: str, flags: int) -> int:
  """Opens a regular file, as `opener` of `open`; rejects all other kinds."""
  check_kind(path)
  return os.open(path, flags | _FLAGS, 0o666)


def is_address(place: str | os.PathLike[str]) -> bool:
  """Returns whether a place is the address of a bucket instead of a path."""
  return '://' in os.fspath(place)


def check_local(path: str | os.PathLike[str], what: str) -> None:
  """Raises UsageError, which names `what`, for the address of a bucket."""
  if is_address(path):
    raise errors.UsageError(
      f'{what} is {os.fspath(path)!r}; expected a local path. Mount the bucket,'
      ' for example with gcsfuse (gs://) or mountpoint-s3 (s3://), and give the'
      ' path of the mount.'
    )


@contextlib.contextmanager
def replacing(path: pathlib.Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
  """Opens a temporary file, and renames it once it is complete and synced.

  If the block raises an error, the file keeps its old content. The temporary
  file has the permissions `mode` from its creation on.
  """
  # The name is random, since two threads or machines may write the same file.
  partial = path.with_name(f'.{path.name}.{secrets.token_hex(4)}{PARTIAL}')
  try:
    opener = functools.partial(os.open, mode=mode)
    with open(partial, 'xb', opener=opener) as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  except BaseException as e:
    with contextlib.suppress(OSError):
      partial.unlink(missing_ok=True)
    if isinstance(e, OSError):
      raise failed_write(e, path) from None
    raise
  sync_directory(path.parent)


def make_directory(path: pathlib.Path) -> None:
  """Makes a directory and its parents, and syncs them to the disk."""
  if not path.is_dir():
    check_kind(path, stat.S_IFDIR)
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def to_json(value: Any) -> bytes:
  """Returns a value as JSON for a small file."""
  return json.dumps(value, indent=1).encode() + b'\n'


def failed_write(error: OSError, path: pathlib.Path) -> OSError:
  """Returns an error with the path and, for a full disk, its free space."""
  text = error.strerror or str(error)
  if error.errno not in _FULL:
    return OSError(error.errno, text, str(path))
  free = shutil.disk_usage(path.parent).free
  text += f' ({free / 2**20:.2f} MiB free)'
  return FullDiskError(error.errno, text, str(path))


def sync_directory(directory: pathlib.Path) -> None:
  """Waits until the current names in a directory are on the disk."""
  try:
    fd = os.open(directory, os.O_RDONLY)
    try:
      os.fsync(fd)
    finally:
      os.close(fd)
  except OSError as e:
    # Other errors mean that the file system cannot sync a directory.
    if e.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
      raise
