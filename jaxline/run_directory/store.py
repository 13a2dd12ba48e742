"""A key-value store in a directory, `gs://BUCKET/PATH` or `s3://BUCKET/PATH`.

A key is a relative path, a value is bytes. Writes are atomic: on a disk, a
value is written to a temporary file, synced and renamed; in a bucket, all
writes are atomic. TensorStore is imported for buckets only.
"""

import abc
from collections.abc import Iterable
import contextlib
import copy
import json
import os
import pathlib
import shutil
import stat
from typing import Any

from jaxline import errors
from jaxline.base import buckets
from jaxline.base import disk
from jaxline.base import keys

_MOST_BYTES = 1 << 32
# These folders of a run may be links, for example to a larger disk.
LINKS = 'checkpoints', 'train', 'eval'
NEW = object()  # The version of a value that does not exist yet.
# These errors mean that there is no file of the name.
MISSING = (FileNotFoundError, NotADirectoryError)


class DamagedError(errors.RunError, ValueError):
  """The bytes of a checkpoint differ from what was written."""


class GoneError(DamagedError):
  """A checkpoint does not exist, or was removed during a read."""


class RefusedError(errors.UsageError):
  """A checkpoint is intact, but this program cannot restore it."""


def at(place: str | os.PathLike[str], what: str = 'checkpoint_dir') -> 'Store':
  """Returns the store at a directory or an address; touches nothing.

  `what` is the config key that names the place, for error messages.
  """
  text = os.fspath(place)
  scheme, _, path = text.partition('://')
  if text and not disk.is_address(text):
    return Disk(os.path.abspath(text))
  if scheme in buckets.DRIVERS and path.strip('/') and path[0] != '/':
    return Bucket(f'{scheme}://{path.strip("/")}')
  raise errors.UsageError(
    f'config.{what} is {text!r}; expected a directory, gs://BUCKET/PATH or'
    ' s3://BUCKET/PATH.'
  )


def checked(name: str, value: Any, check: keys.Check) -> Any:
  """Checks the value of a JSON file, given as bytes or parsed; returns it.

  Raises:
    RefusedError: the check rejects the value; the message names the file.
  """
  try:
    value = json.loads(value) if isinstance(value, bytes) else value
    check.require('it', value)
  except Exception as e:  # The file may hold any JSON.
    raise RefusedError(f'{name} is refused: {str(e).rstrip(".")}.') from e
  return value


def check_size(key: str, found: int | None, written: int) -> None:
  """Raises DamagedError if a value is missing or has the wrong size."""
  if found is None:
    raise DamagedError(f'{key} is missing')
  if found != written:
    raise DamagedError(f'{key} has {found} bytes; expected {written}')


class Store(abc.ABC):
  """A store of bytes by key. An OSError never means that data is damaged."""

  threads = 16  # For parallel access; in a bucket, each may copy a part.
  poll_secs = 0.0  # The minimum time between two listings.
  mode = 0o666  # The permissions of files by `write`: see `disk.replacing`.

  def __init__(self, url: str):
    self.url = url  # The directory or address.

  def __str__(self) -> str:
    return self.url

  @abc.abstractmethod
  def below(self, folder: str, *, links: bool = False) -> 'Store':
    """Returns the store of a folder; with `links`, it may be a link."""

  @abc.abstractmethod
  def names(self, folder: str = '') -> list[str]:
    """Returns the sorted names of the files and folders in a folder."""

  def read(self, key: str) -> bytes | None:
    """Returns a value, or None if there is none."""
    return self.versioned(key)[0]

  @abc.abstractmethod
  def versioned(self, key: str) -> tuple[bytes | None, Any]:
    """Returns a value, or None, and its version for `write`."""

  @abc.abstractmethod
  def read_into(self, key: str, buffer: memoryview) -> None:
    """Fills a buffer with a value; raises DamagedError if the sizes differ."""

  @abc.abstractmethod
  def check(self, key: str, size: int) -> None:
    """Raises DamagedError unless a value exists and has this size."""

  @abc.abstractmethod
  def write(self, key: str, value: Any, expected: Any = None) -> Any:
    """Writes a value atomically, even if the power fails.

    Args:
      key: the key.
      value: bytes, or a memoryview of them.
      expected: the version that may be replaced, such as NEW; None means any.
        A disk ignores it, because its writers hold a lock.

    Returns:
      The new version in a bucket, or None if the version was not as expected.
    """

  @abc.abstractmethod
  def write_part(self, key: str, value: memoryview) -> None:
    """Writes a value under a new key; it is durable after the next `sync`."""

  def sync(self) -> None:  # noqa: B027
    """Waits until all names, and the store's own, are durable."""

  @abc.abstractmethod
  def delete(self, key: str) -> None:
    """Deletes a value, if it exists."""

  @abc.abstractmethod
  def delete_folder(self, folder: str) -> None:
    """Deletes all values below a folder."""


class Disk(Store):
  """Files below a directory."""

  def below(self, folder: str, *, links: bool = False) -> 'Disk':
    return Disk(f'{self.url}/{folder}' if links else str(self.folder(folder)))

  def folder(self, key: str) -> pathlib.Path:
    """Returns the path of a folder; rejects a link or a file in its place."""
    return self._path(f'{key}/_').parent

  def _path(self, key: str) -> pathlib.Path:
    """Returns the path of a key; rejects parents that are not real folders."""
    path = pathlib.Path(self.url)
    *folders, name = key.split('/')
    for i, folder in enumerate(folders):
      path /= folder
      disk.check_kind(path, stat.S_IFDIR, links=not i and folder in LINKS)
    return path / name

  def names(self, folder: str = '') -> list[str]:
    try:
      names = sorted(os.listdir(self.folder(folder) if folder else self.url))
    except MISSING:
      return []
    return [name for name in names if not name.endswith(disk.PARTIAL)]

  def versioned(self, key: str) -> tuple[bytes | None, Any]:
    try:
      with open(self._path(key), 'rb', opener=disk.open_regular) as f:
        size = os.fstat(f.fileno()).st_size
        if size <= _MOST_BYTES:
          return f.read(), None
    except MISSING:
      return None, None
    raise RefusedError(
      f'{self}/{key} has {size} bytes; expected at most {_MOST_BYTES}.'
    )

  def read_into(self, key: str, buffer: memoryview) -> None:
    try:
      with open(self._path(key), 'rb', opener=disk.open_regular) as f:
        check_size(key, os.fstat(f.fileno()).st_size, len(buffer))
        check_size(key, f.readinto(buffer), len(buffer))
    except MISSING as e:
      raise DamagedError(f'{key} is missing') from e

  def check(self, key: str, size: int) -> None:
    found = None
    with contextlib.suppress(*MISSING):
      found = self._path(key).lstat().st_size
    check_size(key, found, size)

  def write(self, key: str, value: Any, expected: Any = None) -> Any:
    path = self._path(key)
    disk.make_directory(path.parent)
    disk.check_kind(path)
    with disk.replacing(path, mode=self.mode) as f:
      f.write(value)
    return True

  def write_part(self, key: str, value: memoryview) -> None:
    path = self._path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      with open(path, 'xb', buffering=0) as f:
        while value:
          value = value[f.write(value) :]
        os.fsync(f.fileno())
    except OSError as e:
      raise disk.failed_write(e, path) from None

  def sync(self) -> None:
    for inner, _, _ in os.walk(self.url, topdown=False):
      disk.sync_directory(pathlib.Path(inner))
    disk.sync_directory(pathlib.Path(self.url).parent)

  def delete(self, key: str) -> None:
    with contextlib.suppress(*MISSING):
      self._path(key).unlink()

  def delete_folder(self, folder: str) -> None:
    shutil.rmtree(self.folder(folder), ignore_errors=True)


class Bucket(Store):
  """Objects in a bucket, accessed with TensorStore's drivers."""

  poll_secs = 5.0

  def __init__(self, url: str):
    super().__init__(url)
    import tensorstore as ts

    self._everything = ts.KvStore.KeyRange()
    self._kv = buckets.connect(f'{url}/', self.threads)

  def below(self, folder: str, *, links: bool = False) -> 'Bucket':
    # Share the connection: opening a new one looks for credentials again.
    below = copy.copy(self)
    below.url = f'{self.url}/{folder}'
    below._kv = self._kv + f'{folder}/'
    return below

  def _os_errors(self, key: str) -> contextlib.AbstractContextManager[None]:
    return buckets.os_errors(f'{self.url}/{key}')

  def names(self, folder: str = '') -> list[str]:
    place = self.below(folder)._kv if folder else self._kv
    with self._os_errors(folder):
      found: Iterable[bytes] = place.list().result()
    return sorted({key.decode().partition('/')[0] for key in found})

  def _read(self, key: str, **more: Any) -> Any:
    with self._os_errors(key):
      return self._kv.read(key, **more).result()

  def versioned(self, key: str) -> tuple[bytes | None, Any]:
    found = self._read(key)
    is_there = found.state == 'value'
    return (found.value, found.stamp.generation) if is_there else (None, NEW)

  def read_into(self, key: str, buffer: memoryview) -> None:
    found = self._read(key)
    size = len(found.value) if found.state == 'value' else None
    check_size(key, size, len(buffer))
    buffer[:] = found.value

  def check(self, key: str, size: int) -> None:
    try:  # TensorStore cannot list sizes, so read the last byte.
      found = self._read(key, byte_range=slice(size - 1, None))
    except OSError as e:
      if not str(e.strerror).startswith('OUT_OF_RANGE'):
        raise
      raise DamagedError(f'{key} has fewer than {size} bytes') from e
    is_there = found.state == 'value'
    check_size(key, size - 1 + len(found.value) if is_there else None, size)

  def write(self, key: str, value: Any, expected: Any = None) -> Any:
    if expected is NEW:
      found = self._read(key)
      if found.state == 'value':
        return None
      expected = found.stamp.generation
    with self._os_errors(key):
      stamp = self._kv.write(key, bytes(value), if_equal=expected).result()
    if stamp.generation:
      return stamp.generation
    # If the answer to a successful write was lost, a retry finds our own value.
    found = self._read(key)
    is_ours = found.state == 'value' and found.value == bytes(value)
    return found.stamp.generation if is_ours else None

  def write_part(self, key: str, value: memoryview) -> None:
    self.write(key, value)

  def delete(self, key: str) -> None:
    with self._os_errors(key):
      self._kv.write(key, None).result()

  def delete_folder(self, folder: str) -> None:
    with self._os_errors(folder):
      self.below(folder)._kv.delete_range(self._everything).result()
