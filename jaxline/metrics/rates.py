"""Scalars that are computed from a step's own: what it does per second."""

from collections.abc import Mapping
from typing import Any

from jaxline.metrics import writers

# What a step may count, and is then logged per second too.
_COUNTS = ('tokens_per_step', 'examples_per_step')


def add_rates(scalars: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the rates of what a step counts, where its time is known.

  Args:
    scalars: of a step; `steps_per_sec` is with those that are due.
  """
  logged = dict(scalars)
  if 'steps_per_sec' in scalars:
    counts = {k: scalars[k] for k in _COUNTS if k in scalars}
    for name, count in writers.to_scalars(counts).items():
      rate = count * scalars['steps_per_sec']
      logged[name.replace('_per_step', '_per_sec')] = rate
  return logged
