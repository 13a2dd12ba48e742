"""Rules: which arrays of a checkpoint replace which of an experiment."""

from collections.abc import Callable, Iterable
import re
from typing import Any

import jax

from jaxline import errors


def match_rules(
  names: Iterable[str],
  rules: Iterable[tuple[str, str | None]],
  where: str,
  matches: Callable[[str, str], re.Match[str] | None] = re.fullmatch,
) -> tuple[dict[str, str], list[str]]:
  """Returns which arrays get which, by the first rule that matches.

  Args:
    names: those of arrays.
    rules: pairs of a regular expression and the name of the source in the
      checkpoint; with None, the array has none.
    where: what has the rules, for messages.
    matches: `re.match` if a regular expression need not match a whole name.

  Returns:
    Name -> that of its source; and the expressions that are used for no name.
  """
  rules, used = list(rules), set()
  sources: dict[str, str] = {}
  for name in names:
    for pattern, source in rules:
      try:
        if match := matches(pattern, name):
          used.add((pattern, source))  # To have one twice is no mistake.
          if source is not None:
            sources[name] = match.expand(source)
          break
      except (re.error, IndexError) as e:
        raise errors.UsageError(
          f'{where} has {(pattern, source)!r}: {e}.'
        ) from e
  return sources, [pair[0] for pair in rules if tuple(pair) not in used]


# Optax's states of schedules: by name, since not all of them are public. Not
# those of moments, such as Adam's, which are corrected by their own count.
_SCHEDULES = (
  'AddNoiseState',
  'InjectHyperparamsState',
  'InjectStatefulHyperparamsState',
  'ScaleByScheduleState',
  'WeightDecaySchedule',
  'WrappedScheduleState',
)


def without_schedules(tree: Any) -> Any:
  """Returns a tree with None in place of all that a schedule is made of."""

  def is_schedule(x: Any) -> bool:
    return type(x).__name__ in _SCHEDULES and hasattr(x, '_fields')

  def strip(x: Any) -> Any:
    if not is_schedule(x):
      return x
    kept = dict.fromkeys(x._fields)
    if 'inner_state' in kept:  # Of the optimizer that has the schedule.
      kept['inner_state'] = without_schedules(x.inner_state)
    return x._replace(**kept)

  return jax.tree.map(strip, tree, is_leaf=is_schedule)
