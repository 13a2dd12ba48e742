"""Files that processes append records to, and that a resumed run rewrites."""

import abc
from collections.abc import Iterator
import errno
import os
import pathlib
import shutil
import stat
from typing import BinaryIO, NamedTuple

from jaxline import disk
from jaxline.metrics import base


class Piece(NamedTuple):
  """A piece of a file that processes have appended to.

  Attributes:
    data: what is to stand there, where it is not voided.
    step: a resume at an earlier step voids the piece; None: no resume does.
  """

  data: bytes
  step: float | None = None


class FileBackend(base.Backend):
  """Appends to a local file, whose errors reach the caller.

  Each append goes to the operating system at once: a reader sees it, a killed
  process does not lose it, and a full disk is noticed at the record that does
  not fit. `flush` also waits for the disk. Where another writer's `resume` has
  replaced the file, the new one is appended to.

  Attributes:
    path: the file.
  """

  def __init__(self, path: str) -> None:
    disk.check_local(path, 'The file of a writer')
    self.path = path
    self._error: OSError | None = None
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    self._open()

  @abc.abstractmethod
  def _read(self, file: BinaryIO) -> Iterator[Piece]:
    """Yields a file's pieces, which are all of it."""

  def _paths(self) -> list[str]:
    """Returns the files that processes have appended to, this one too."""
    # A pipe or a device has nothing to wait for, and nothing to void.
    return [self.path] if stat.S_ISREG(self._stat.st_mode) else []

  def _open(self) -> None:
    self._file = open(self.path, 'ab', buffering=0)  # noqa: SIM115
    self._stat = os.fstat(self._file.fileno())

  def _follow(self) -> None:
    # Linux lets us write to a deleted file for ever without an error.
    try:
      found = os.stat(self.path)
    except OSError as error:
      raise FileNotFoundError(
        errno.ENOENT,
        'This file was deleted while a writer had it open; its records are '
        'lost. Keep the run directory in place while it runs',
        self.path,
      ) from error
    if not os.path.samestat(found, self._stat):
      self._file.close()
      self._open()

  def _append(self, data: bytes) -> None:
    if self._error is not None:
      # The file may end in half a record; what follows could not be read.
      raise type(self._error)(
        self._error.errno, 'An earlier write to this file failed', self.path
      ) from self._error
    self._follow()
    try:
      while data:
        data = data[self._file.write(data) :]
    except OSError as error:
      path = pathlib.Path(os.path.abspath(self.path))
      self._error = disk.failed_write(error, path)
      raise self._error from None

  def resume(self, step: int) -> None:
    for path in self._paths():
      self._void_later(pathlib.Path(os.path.realpath(path)), step)

  def _void_later(self, path: pathlib.Path, step: int) -> None:
    """Edits a file of any size; at each moment its path has all that stays."""

    def kept(file: BinaryIO) -> Iterator[bytes]:
      for piece in self._read(file):
        if piece.step is None or piece.step <= step:
          yield piece.data

    with open(path, 'rb') as old:
      # What is voided is longer than the end of a line, which may be added.
      if sum(map(len, kept(old))) == old.tell():
        return
      old.seek(0)
      # Always the same name, so that kills leave one such file at most; one
      # that TensorBoard does not take for an event file.
      name = path.name.replace('tfevents', 'events')
      partial = path.with_name(f'.{name}.tmp')
      with disk.replacing(path, partial) as file:
        shutil.copymode(path, partial)
        file.writelines(kept(old))

  def flush(self) -> None:
    self._follow()
    if self._paths():
      os.fsync(self._file.fileno())

  def close(self) -> None:
    if not self._file.closed:
      try:
        self.flush()  # It may open another file.
      finally:
        self._file.close()
