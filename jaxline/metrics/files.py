"""Log files: backends append to them, and a resume cuts them to a length."""

import abc
from collections.abc import Mapping
import os
import pathlib

from jaxline import disk
from jaxline.metrics import base


class FileBackend(base.Backend):
  """Appends to a local file and raises the errors of the disk.

  Each write goes to the operating system at once: a reader sees it, a killed
  process does not lose it, and a full disk is noticed at the record that does
  not fit. `flush` also waits for the disk.

  Attributes:
    path: the absolute path of the file.
  """

  def __init__(self, path: str | os.PathLike[str]) -> None:
    """Opens the file to append to it; makes its directory."""
    disk.check_local(path, 'The file of a writer')
    self.path = os.path.abspath(path)
    directory = pathlib.Path(self.path).parent
    disk.make_directory(directory)
    self._file = open(self.path, 'ab', buffering=0)  # noqa: SIM115
    disk.sync_directory(directory)

  @abc.abstractmethod
  def encode(self, record: base.Record) -> bytes:
    """Returns the bytes of a record in the file."""

  def write(self, records: list[base.Record]) -> None:
    self._append(b''.join(map(self.encode, records)))

  def _logs(self) -> list[str]:
    """Returns the paths of the log files that this library wrote here."""
    return [self.path]

  def _append(self, data: bytes) -> None:
    try:
      while data:
        data = data[self._file.write(data) :]
    except OSError as error:
      raise disk.failed_write(error, pathlib.Path(self.path)) from None

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:
    for path in self._logs():
      _cut(path, lengths.get(path, 0))

  def flush(self) -> dict[str, int]:
    os.fsync(self._file.fileno())
    return {path: os.path.getsize(path) for path in self._logs()}

  def close(self) -> None:
    with self._file:
      self.flush()


def _cut(path: str, length: int) -> None:
  """Cuts a file that is longer than a length in bytes; waits for the disk."""
  if os.path.getsize(path) > length:
    with open(path, 'r+b') as file:
      file.truncate(length)
      os.fsync(file.fileno())
