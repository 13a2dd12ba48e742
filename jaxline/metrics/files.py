"""Backends of `MetricWriter`: the interface, and files of JSON lines."""

import abc
from collections.abc import Mapping, Sequence
import json
import math
import os
import pathlib
import re
from typing import Any, NamedTuple

import orjson

from jaxline.base import disk

KINDS = ('scalars', 'images', 'texts')


class Record(NamedTuple):
  """The converted values of one call of a writer."""

  kind: str  # One of `KINDS`, or a kind that only some backends take.
  step: int
  time: float  # In seconds since the Unix epoch.
  values: dict[str, Any]  # A number, uint8 [B, H, W, C] or str, by kind.


class Backend(abc.ABC):
  """A destination of a `MetricWriter`, which calls it only on its thread."""

  kinds: Sequence[str] = KINDS  # The kinds of records that it gets.

  @abc.abstractmethod
  def write(self, records: list[Record]) -> None:
    """Writes records without changing them."""

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:  # noqa: B027
    """Truncates its files; see `MetricWriter.resume`."""

  def flush(self) -> dict[str, int]:
    """Waits for the disk; returns the lengths of its log files by path."""
    return {}

  def close(self) -> None:  # noqa: B027
    """Flushes and closes the backend; called once."""


class Adapter(Backend):
  """Passes records to a user's writer or to the console."""

  def __init__(self, writer: Any):
    self._writer = writer
    self.kinds = [kind for kind in KINDS if hasattr(writer, f'write_{kind}')]

  def write(self, records: list[Record]) -> None:
    for kind, step, _, values in records:
      getattr(self._writer, f'write_{kind}')(step, dict(values))

  def flush(self) -> dict[str, int]:
    getattr(self._writer, 'flush', dict)()
    return {}

  def close(self) -> None:
    self.flush()
    getattr(self._writer, 'close', dict)()


class FileBackend(Backend):
  """Appends to a local file, whose absolute path is `path`.

  Each write goes to the operating system at once. So a killed process loses no
  record, and a full disk raises an error at the first record that does not fit.
  """

  _is_half = False  # Whether the last write failed.

  def __init__(self, path: str | os.PathLike[str]) -> None:
    disk.check_local(path, 'The file of a writer')
    self.path = os.path.abspath(path)
    directory = pathlib.Path(self.path).parent
    disk.make_directory(directory)
    self._file = open(  # noqa: SIM115
      self.path, 'a+b', buffering=0, opener=disk.open_regular
    )
    disk.sync_directory(directory)
    self._mend()  # A killed process may have written half a record.

  def _mend(self) -> None:
    """Repairs the file after half a record, so that the next one is valid."""

  @abc.abstractmethod
  def encode(self, record: Record) -> bytes:
    """Encodes a record for the file."""

  def write(self, records: list[Record]) -> None:
    self._append(b''.join(map(self.encode, records)))

  def _logs(self) -> list[str]:
    """Returns paths of this library's log files, which `resume` truncates."""
    return [self.path]

  def _append(self, data: bytes) -> None:
    if self._is_half:
      self._is_half = False
      self._mend()
    try:
      while data:
        data = data[self._file.write(data) :]
    except OSError as error:
      self._is_half = True
      raise disk.failed_write(error, pathlib.Path(self.path)) from None

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:
    for path in self._logs():
      length = lengths.get(path, 0)
      if os.lstat(path).st_size > length:
        with open(path, 'r+b', opener=disk.open_regular) as file:
          file.truncate(length)
          os.fsync(file.fileno())

  def flush(self) -> dict[str, int]:
    os.fsync(self._file.fileno())
    return {path: os.lstat(path).st_size for path in self._logs()}

  def close(self) -> None:
    with self._file:
      self.flush()


class JsonlWriter(FileBackend):
  """Appends one flat JSON object per record to a file, ready for pandas.

  `{"step": 10, "time": 1700000000.5, "kind": "scalars", "loss": 2.5}`

  - `kind` is scalars, texts or images. A scalar named `step`, `time` or `kind`
    is written as `scalars/step` and so on.
  - Ints are exact, and floats round-trip. JSON has no NaN, so values that are
    not finite are the strings "NaN", "Infinity" and "-Infinity", which Python's
    `float` and pandas' `astype(float)` parse.
  - An image is recorded only by its shape, [B, H, W, C].
  """

  def _mend(self) -> None:
    size = os.path.getsize(self.path)
    if size and os.pread(self._file.fileno(), 1, size - 1) != b'\n':
      self._append(b'\n')

  def encode(self, record: Record) -> bytes:
    kind, step, time, values = record
    if kind == 'images':
      values = {name: list(x.shape) for name, x in values.items()}
    elif kind == 'scalars' and not math.isfinite(sum(values.values())):
      bad = [name for name, x in values.items() if not math.isfinite(x)]
      values = values | {name: json.dumps(values[name]) for name in bad}
    fields = {f'{kind}/{k}' if k in KEYS else k: x for k, x in values.items()}
    line = {'step': step, 'time': time, 'kind': kind, **fields}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


KEYS = frozenset({'step', 'time', 'kind'})
_SURROGATES = re.compile('[\ud800-\udfff]')


def replace_surrogates(value: Any) -> Any:
  """Replaces lone surrogates in a JSON value with U+FFFD."""
  raw = json.dumps(value, ensure_ascii=False)
  whole = _SURROGATES.sub('\ufffd', raw)
  return value if whole == raw else json.loads(whole)


def parse_record(
  line: str | bytes, key: str = 'step', kind: type = int
) -> dict[str, Any]:
  """Parses a line; returns {} unless it has a `key` of type `kind`."""
  try:
    record = json.loads(line)
    return record if isinstance(record[key], kind) else {}
  except (ValueError, RecursionError, LookupError, TypeError):
    return {}
