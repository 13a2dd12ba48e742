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


def shown(values: Mapping[str, Any], known: Mapping[str, None]) -> list[str]:
  """Returns 'name value' of each; of a large group of names, how many.

  Args:
    values: the numbers by name.
    known: all names, in the order in which they are shown.
  """
  names = [name for name in known if name in values]
  group_of = {name: name.partition('/')[0] for name in names if '/' in name}
  sizes = collections.Counter(group_of.values())
  large = {group for group, n in sizes.items() if n > _MAX_GROUP}
  return [
    f'{name} {shorten(values[name])}'
    for name in names
    if group_of.get(name) not in large
  ] + [f'{group}/ ({sizes[group]})' for group in sorted(large)]


def means_of(records: list[dict[str, Any]]) -> dict[str, Any]:
  """Returns the mean of each number that the last record has.

  Integers are counts, of which the last one is returned. Of numbers that are
  not finite the text says how many there were.
  """
  means: dict[str, Any] = dict(records[-1])
  for name, last in means.items():
    if not isinstance(last, float):
      continue
    values = [x[name] for x in records if isinstance(x.get(name), float)]
    finite = [x for x in values if math.isfinite(x)]
    mean = sum(finite) / len(finite) if finite else last
    if len(finite) < len(values):
      bad = len(values) - len(finite)
      means[name] = f'{shorten(mean)} ({bad} of {len(values)} not finite)'
    else:
      means[name] = mean
  return means


def fit(parts: list[tuple[int, str]], width: int) -> str:
  """Joins what fits into a line, and says how much is left out.

  Args:
    parts: (rank, text), in the order in which they are shown. Those of rank 0
      stay; of the others, the lowest ranks.
    width: how long the line may be.
  """
  kept = [i for i, (rank, _) in enumerate(parts) if not rank]

  def line(chosen: list[int]) -> str:
    texts = [parts[i][1] for i in sorted(chosen)]
    if left := len(parts) - len(chosen):
      texts.append(f'+{left} more')
    return ' | '.join(texts)

  for i in sorted(
    set(range(len(parts))) - set(kept), key=lambda i: parts[i][0]
  ):
    if len(line([*kept, i])) <= width:
      kept.append(i)
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
