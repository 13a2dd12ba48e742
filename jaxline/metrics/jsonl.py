"""The scalars of a run as JSON lines."""

import functools
import json
import math
from typing import Any

from jaxline.metrics import base
from jaxline.metrics import files


class JsonlWriter(files.FileBackend):
  """Appends one JSON object per record to a file; flat, ready for pandas.

  `{"step": 10, "time": 1700000000.5, "kind": "scalars", "loss": 2.5}`

  - `kind` is scalars, texts or images. A scalar with one of the first three
    names is written as `scalars/step` and so on.
  - Ints are exact, floats round-trip. JSON has no NaN: the strings "NaN",
    "Infinity" and "-Infinity" stand for them, which Python's `float` and
    pandas' `astype(float)` read.
  - Images are recorded by their shape, [B, H, W, C].
  - `resume` cuts the file to the length that the checkpoint recorded.
  """

  def encode(self, record: base.Record) -> bytes:
    kind, step, time, values = record
    fields = [_prefix(kind, k) + _to_json(x) for k, x in values.items()]
    text = f'{{"step": {step}, "time": {time!r}, "kind": "{kind}"'
    return f'{text}{"".join(fields)}}}\n'.encode('ascii')


KEYS = frozenset({'step', 'time', 'kind'})


def read_record(line: bytes) -> dict[str, Any]:
  """Returns a line's record; {} if the line is no record with a step."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    return {}
  if not isinstance(record, dict) or not isinstance(record.get('step'), int):
    return {}
  return record


@functools.lru_cache(1000)
def _prefix(kind: str, name: str) -> str:
  return f', {json.dumps(f"{kind}/{name}" if name in KEYS else name)}: '


def _to_json(value: Any) -> str:
  if isinstance(value, float):
    if math.isfinite(value):
      return repr(value)
    value = 'NaN' if math.isnan(value) else f'{"-" * (value < 0)}Infinity'
  elif hasattr(value, 'shape'):
    value = list(value.shape)
  return json.dumps(value)
