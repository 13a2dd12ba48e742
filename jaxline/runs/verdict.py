"""Compares two sets of seeds with Welch's t test."""

from collections.abc import Sequence
import math

import numpy as np

from jaxline import errors
from jaxline import runs as runs_lib
from jaxline.metrics import lines


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
  """Returns mean(b) - mean(a), half its 95% interval, and the confidence.

  The confidence is 1 - p of Welch's two-sided t test.
  """
  difference = float(np.mean(b) - np.mean(a))
  if not np.ptp(a) and not np.ptp(b):  # All results of each side are equal.
    return difference, 0.0, float(difference != 0)
  from scipy import stats  # The import takes as long as the import of jax.

  test = stats.ttest_ind(b, a, equal_var=False)
  low, high = test.confidence_interval()
  return difference, float(high - low) / 2, float(1 - test.pvalue)


def print_verdict(
  sides: Sequence[Sequence[runs_lib.RunRecord]], metric: str | None
) -> bool:
  """Prints and returns whether the runs of the second side are better."""
  first = sides[0][0]
  metric = metric or next(iter(first.last), '')
  samples = []
  for side in sides:
    sample = [run.last.get(metric, math.nan) for run in side if run.has_ended]
    seeds = {run.recorded.get('random_seed') for run in side}
    num_valid = np.isfinite(sample).sum()
    if len(sides) != 2 or not 2 <= len(seeds) == len(side) == num_valid:
      raise errors.UsageError(
        f'--seeds: {metric!r} is {sample} for the seeds {seeds}; expected two'
        ' directories, each with at least two ended runs with different'
        ' config.random_seed and finite values.'
      )
    samples.append(sample)
  higher = first.prefers_higher(metric)
  for name, x in zip(('baseline', 'candidate'), samples, strict=True):
    lines.print_text(
      f'{name}: mean {np.mean(x):.5g}, deviation {np.std(x, ddof=1):.2g}'
    )
  difference, half, confidence = welch(*samples)
  verdict = 'better' if (difference > 0) == higher else 'worse'
  if confidence < 0.95:
    verdict = 'not distinguishable at this number of seeds'
  lines.print_text(
    f'{verdict}: {metric} ({"higher" if higher else "lower"} is better) by'
    f' {difference:+.4g} \N{PLUS-MINUS SIGN} {half:.2g},'
    f' confidence {confidence:.1%}'
  )
  return verdict == 'better'
