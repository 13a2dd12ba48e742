"""Formats numbers, sizes, durations and lines for the terminal."""

from collections.abc import Mapping, Sequence
import contextlib
import functools
import math
import os
import re
import sys
from typing import Any

# Special formats of scalars. An empty format hides the scalar.
FORMATS = {
  'steps_per_sec': '{:.4g} steps/s',
  'tokens_per_sec': '{:,.0f} tokens/s',
  'examples_per_sec': '{:,.0f} examples/s',
  'mfu': 'mfu {:.1%}',
  'input_wait_fraction': 'input wait {:.0%}',
  'device_memory_gib': 'memory {:.1f} GiB',
  'tflops_per_sec': '{:.3g} TFLOP/s',
  'tokens_per_step': '',
  'examples_per_step': '',
}

# Controls except newlines and tabs: C0, C1, writing direction, surrogates.
_CONTROLS = re.compile(
  '[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069'
  '\ud800-\udfff]'
)


def shorten(value: Any) -> str:
  """Formats four significant digits, or all digits of an integer part."""
  if not isinstance(value, float):
    return str(value)
  return f'{value:.0f}' if 1e4 <= abs(value) < 1e9 else f'{value:.4g}'


def duration(seconds: float) -> str:
  """Formats a duration: '3:07' is minutes and seconds, '2:03:07' has hours."""
  minutes, secs = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours < 48:
    return (f'{hours}:{minutes:02}' if hours else f'{minutes}') + f':{secs:02}'
  return f'{hours / 24:.1f} days'


def size(num_bytes: float, digits: str = '.4g') -> str:
  """Formats a size, as in '1.5 MiB'; `digits` is the format of its number."""
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if num_bytes < 1024:
      return f'{num_bytes:{".4g" if unit == "B" else digits}} {unit}'
    num_bytes /= 1024
  return f'{num_bytes:{digits}} TiB'


def weights(arrays: Sequence[Any]) -> str:
  """Describes the number and size of weights; '' if there are none."""
  count = sum(x.size for x in arrays)
  num_bytes = sum(x.size * x.dtype.itemsize for x in arrays)
  text = f'{count:,} ({size(num_bytes)}) in {len(arrays)} arrays'
  return text if arrays else ''


def describe(
  recent: Sequence[Mapping[str, Any]],
  earlier: Sequence[Mapping[str, Any]] = (),
  first: Sequence[str] = ('loss', 'steps_per_sec'),
) -> list[str]:
  """Formats the scalars of some steps: means, or rates of the last step.

  The names in `first` come first, then plain names, rates, and groups ('g/x').
  A change since the `earlier` steps follows the loss.
  """

  def mean(records: Sequence[Mapping[str, Any]]) -> tuple[float, int]:
    """Returns the mean of finite values and the number of the rest."""
    values = [x[name] for x in records if name in x]
    finite = [x for x in values if math.isfinite(x)]
    found = sum(finite) / len(finite) if finite else math.nan
    return found, len(values) - len(finite)

  texts = []
  order = lambda x: ([x != name for name in first], '/' in x, x in FORMATS)
  for name in sorted(recent[-1], key=order):
    value, note = recent[-1][name], ''
    if name in FORMATS:  # It is not averaged. A value of 0 means unknown.
      texts.append(FORMATS[name].format(value) if value else '')
      continue
    if isinstance(value, float):
      value, num_bad = mean(recent)
      if num_bad and len(recent) > 1:
        note = f' ({num_bad} of {len(recent)} not finite)'
    if name == 'loss' and earlier and not note:
      note = f' ({value - mean(earlier)[0]:+.3g})'
    texts.append(f'{name} {shorten(value)}{note}')
  return texts


def fit(parts: Sequence[str], width: int) -> str:
  """Joins as many parts as fit into a width, and counts the rest."""
  parts = list(filter(None, parts))
  for count in range(len(parts), 0, -1):
    left = len(parts) - count
    line = ' | '.join([*parts[:count], *[f'+{left} more'] * bool(left)])
    if len(line) <= width:
      return line
  return parts[0][:width]


def escaped(text: str) -> str:
  """Escapes control characters, so that they do not reach a terminal."""
  return _CONTROLS.sub(lambda x: x[0].encode('unicode_escape').decode(), text)


def print_text(text: Any, file: Any = None) -> None:
  """Escapes and prints text, which may quote files of a run.

  If `file` is None, it prints to stdout. A closed file gets nothing.
  """
  stream = file or sys.stdout
  encoding = getattr(stream, 'encoding', None) or 'utf-8'
  raw = f'{escaped(str(text))}\n'.encode(encoding, 'replace')
  try:  # A single write cannot be interleaved.
    print(raw.decode(encoding), end='', file=stream, flush=True)
  except (OSError, ValueError):
    # Redirect it: an error when Python flushes it would change the exit code.
    with contextlib.suppress(OSError, ValueError):
      os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@functools.cache
def warn_once(text: str) -> None:
  """Prints a line on stderr, unless this process has printed it."""
  print_text(text, sys.stderr)
