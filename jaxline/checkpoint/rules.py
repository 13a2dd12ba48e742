"""Matches `restore_rules`, which map arrays to a checkpoint's arrays."""

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
  """Maps each array to a source array, by the first rule that matches.

  Args:
    names: names of arrays.
    rules: pairs of a regular expression and the name of the source in the
      checkpoint; None means no source.
    where: the origin of the rules, for messages.
    matches: `re.match` if an expression need not match the full name.

  Returns:
    Name -> name of its source; and the expressions that no name used.
  """
  rules, used = list(rules), set()
  sources: dict[str, str] = {}
  for name in names:
    for pattern, source in rules:
      try:
        if match := matches(pattern, name):
          used.add((pattern, source))  # A repeated rule counts as used.
          if source is not None:
            sources[name] = match.expand(source)
          break
      except (re.error, IndexError) as e:
        raise errors.UsageError(
          f'{where} has {(pattern, source)!r}: {e}.'
        ) from e
  return sources, [pair[0] for pair in rules if tuple(pair) not in used]


# Names of Optax's schedule states, not all of which are public. States with
# moments, such as Adam's, do not belong here: their count corrects the moments.
_SCHEDULES = (
  'AddNoiseState',
  'InjectHyperparamsState',
  'InjectStatefulHyperparamsState',
  'ScaleByScheduleState',
  'WeightDecaySchedule',
  'WrappedScheduleState',
)


def without_schedules(tree: Any) -> Any:
  """Returns a tree with None in place of the states of schedules."""

  def is_schedule(x: Any) -> bool:
    return type(x).__name__ in _SCHEDULES and hasattr(x, '_fields')

  def strip(x: Any) -> Any:
    if not is_schedule(x):
      return x
    kept = dict.fromkeys(x._fields)
    if 'inner_state' in kept:  # It is the state of the scheduled optimizer.
      kept['inner_state'] = without_schedules(x.inner_state)
    return x._replace(**kept)

  return jax.tree.map(strip, tree, is_leaf=is_schedule)
