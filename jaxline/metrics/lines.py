"""Formats numbers, sizes and durations."""

from typing import Any


def shorten(value: Any) -> str:
  """Returns four significant digits, or all digits before the point."""
  if not isinstance(value, float):
    return str(value)
  return f'{value:.0f}' if 1e4 <= abs(value) < 1e9 else f'{value:.4g}'


def duration(seconds: float) -> str:
  """Returns '3:07' for minutes and seconds, '2:03:07' with hours."""
  minutes, secs = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours < 48:
    return (f'{hours}:{minutes:02}' if hours else f'{minutes}') + f':{secs:02}'
  return f'{hours / 24:.1f} days'


def size(num_bytes: float, digits: str = '.4g') -> str:
  """Returns a size like '1.5 MiB'; `digits` is the format of its number."""
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if num_bytes < 1024:
      return f'{num_bytes:{".4g" if unit == "B" else digits}} {unit}'
    num_bytes /= 1024
  return f'{num_bytes:{digits}} TiB'
