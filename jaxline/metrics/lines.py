"""Numbers, sizes and durations as text, and lines of a limited width."""

import collections
from collections.abc import Mapping
import math
from typing import Any

# So many names with one beginning are written out in a line.
_MAX_GROUP = 8


def shorten(value: Any) -> str:
  """Returns four significant digits, or all digits before the point."""
  if not isinstance(value, float):
    return str(value)
  return f'{value:.0f}' if 1e4 <= abs(value) < 1e9 else f'{value:.4g}'


def shown(values: Mapping[str, Any]) -> list[str]:
  """Returns 'name value' of each; of a large group of names, how many."""
  sizes = collections.Counter(x.partition('/')[0] for x in values if '/' in x)
  large = {f'{group}/': n for group, n in sizes.items() if n > _MAX_GROUP}
  return [
    f'{name} {shorten(value)}'
    for name, value in values.items()
    if ''.join(name.partition('/')[:2]) not in large
  ] + [f'{group} ({large[group]})' for group in sorted(large)]


def means_of(records: list[dict[str, Any]]) -> dict[str, Any]:
  """Returns the mean of each number that the last record has.

  Integers are counts, of which the last one is returned. Of numbers that are
  not finite the text says how many there were.
  """
  means: dict[str, Any] = dict(records[-1])
  for name, last in records[-1].items():
    if isinstance(last, float):
      values = [x[name] for x in records if isinstance(x.get(name), float)]
      finite = [x for x in values if math.isfinite(x)]
      mean = means[name] = sum(finite) / len(finite) if finite else last
      if bad := len(values) - len(finite):
        means[name] = f'{shorten(mean)} ({bad} of {len(values)} not finite)'
  return means


def fit(parts: list[tuple[int, str]], width: int) -> str:
  """Joins what fits into a line, and says how much is left out.

  Args:
    parts: (rank, text), in the order in which they are shown. Those of rank 0
      stay; of the others, the lowest ranks.
    width: how long the line may be.
  """

  def line(chosen: set[int]) -> str:
    texts = [parts[i][1] for i in sorted(chosen)]
    if left := len(parts) - len(chosen):
      texts.append(f'+{left} more')
    return ' | '.join(texts)

  kept: set[int] = set()
  for i, (rank, _) in sorted(enumerate(parts), key=lambda part: part[1][0]):
    if not rank or len(line({*kept, i})) <= width:
      kept.add(i)
  return line(kept)[:width]


def duration(seconds: float) -> str:
  """Returns '3:07' for minutes and seconds, '2:03:07' with hours."""
  minutes, secs = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours < 48:
    return (f'{hours}:{minutes:02}' if hours else f'{minutes}') + f':{secs:02}'
  return f'{hours / 24:.1f} days'


def size(num_bytes: float, digits: str = '.4g') -> str:
  """Returns '1.5 MiB': so many digits, in a unit that fits."""
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if num_bytes < 1024:
      return f'{num_bytes:{".4g" if unit == "B" else digits}} {unit}'
    num_bytes /= 1024
  return f'{num_bytes:{digits}} TiB'
