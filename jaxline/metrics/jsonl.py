"""The scalars of a run as JSON lines."""

import json
import math
import os
import time
from typing import Any

from jaxline.metrics import files


class JsonlWriter(files.FileBackend):
  """Appends one JSON object per record to a file; flat, ready for pandas.

  `{"step": 10, "time": 1700000000.5, "kind": "scalars", "loss": 2.5,
  "kl/total": 0.1}`

  - `kind` is scalars, texts or images. A scalar that has one of the
    first three names is written as `scalars/step` and so on.
  - Ints are exact, floats round-trip. JSON has no NaN: the strings "NaN",
    "Infinity" and "-Infinity" stand for them, which Python's `float` and
    pandas' `astype(float)` read.
  - Images are recorded by their shape, [B, H, W, C].
  - A crash can leave a last line that is cut short. A new writer begins on a
    line of its own, so a reader loses that line and no other.
  - `resume` cuts the file to the length that the checkpoint recorded.
  """

  def __init__(self, path: str | os.PathLike[str]) -> None:
    """Opens the file to append to it.

    Args:
      path: the file; its directory is made where it does not exist.

    Raises:
      OSError: the file cannot be opened to write.
    """
    super().__init__(os.fspath(path))
    self._has_begun = False

  def _emit(self, kind: str, step: int, values: dict[str, Any]) -> None:
    record = {'step': step, 'time': time.time(), 'kind': kind}
    for name, value in values.items():
      key = f'{kind}/{name}' if name in KEYS else name
      if kind == 'images':
        value = list(value.shape)
      record[key] = _to_json_value(value)
    line = json.dumps(record, allow_nan=False).encode('ascii') + b'\n'
    if not self._has_begun and _ends_within_a_line(self.path):
      line = b'\n' + line
    self._append(line)
    self._has_begun = True


KEYS = frozenset({'step', 'time', 'kind'})


def read_record(line: bytes) -> dict[str, Any]:
  """Returns a line's record, which has a step; of what is none, nothing."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    return {}
  if not isinstance(record, dict) or not isinstance(record.get('step'), int):
    return {}
  return record


def _to_json_value(value: Any) -> Any:
  if not isinstance(value, float) or math.isfinite(value):
    return value
  return 'NaN' if math.isnan(value) else f'{"-" * (value < 0)}Infinity'


def _ends_within_a_line(path: str) -> bool:
  # Where it was deleted, the write that follows says so.
  if not os.path.exists(path) or not os.path.getsize(path):
    return False
  with open(path, 'rb') as file:
    file.seek(-1, os.SEEK_END)
    return file.read() != b'\n'
