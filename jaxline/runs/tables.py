"""Prints tables of runs, or of groups that differ only in their seed."""

import collections
from collections.abc import Sequence
import json
import math
import os
from typing import Any

import numpy as np

from jaxline import errors
from jaxline import runs as runs_lib
from jaxline.checkpoint import inspection
from jaxline.metrics import lines

_MAX_SHOWN = 3  # `ls` shows this many metrics of a run.
_MAX_COLUMNS = 3  # Above this number of runs, `compare` prints them as rows.
_PROGRESS = ('state', 'step', 'time')

Group = Sequence[runs_lib.RunRecord]


def groups(runs: Group, by_seed: bool, sort: str | None = None) -> list[Group]:
  """Returns groups of runs, the best first by the metric `sort`."""
  found: dict[Any, list[runs_lib.RunRecord]] = collections.defaultdict(list)
  keys: list[Any] = [run.path for run in runs]
  if by_seed:
    own = {'checkpoint_dir': '', 'random_seed': 0}
    keys = [json.dumps(x.recorded | own, sort_keys=True) for x in runs]
    codes = [run.manifest.get('code', {}).get('files') for run in runs]
    both = [*zip(keys, codes, strict=True)]
    # Assume that a run without a checkpoint has the same code as the others.
    known = dict(pair for pair in both if pair[1])
    keys = [(key, code or known.get(key)) for key, code in both]
  seen = collections.Counter[Any]()
  for run, key in zip(runs, keys, strict=True):
    # A second run with the same seed is not an independent sample.
    sample = key, run.recorded.get('random_seed')
    found[key, seen[sample]].append(run)
    seen[sample] += 1
  if sort is None:
    return [*found.values()]
  sort = metrics(runs, sort, '--sort')[0]
  sign = -1 if runs[0].prefers_higher(sort) else 1

  def rank(group: Group) -> tuple[bool, float]:
    of = values(group, sort)
    value = sign * mean(of)[0]
    # Groups in which some run lacks the metric come last.
    return len(of) < len(group) or math.isnan(value), value

  return sorted(found.values(), key=rank)


def metrics(
  runs: Group, given: str | None = None, flag: str = '--metrics'
) -> list[str]:
  """Splits names; the default is evaluation metrics and training losses."""
  if given is None:
    names = dict.fromkeys(name for run in runs for name in run.last)
    return [x for x in names if x.startswith('eval') or 'loss' in x]
  known = sorted({name for run in runs for name in run.curves})
  errors.check_names(given.split(','), known, 'metric', flag)
  return given.split(',')


def values(group: Group, name: str, what: str = '') -> list[float]:
  """Returns each run's `best` or `last` value; '' means best, or else last."""
  of = [getattr(x, what) if what else x.last | x.best for x in group]
  return [found[name] for found in of if name in found]


def mean(of: Sequence[float]) -> tuple[float, float]:
  """Returns the mean and its standard error, which is 0 for one value."""
  error = np.std(of, ddof=1) / math.sqrt(len(of)) if len(of) > 1 else 0.0
  return float(np.mean(of)) if of else math.nan, float(error)


def cell(group: Group, name: str, what: str = '') -> str:
  """Formats a metric, as its mean over the runs that have it."""
  of = values(group, name, what)
  value, error = mean(of)
  text = f'{value:.5g}' if of else ''
  text += f' \N{PLUS-MINUS SIGN} {error:.2g}' if len(of) > 1 else ''
  text += f' ({len(of)} of {len(group)})' if 0 < len(of) < len(group) else ''
  return text


def names(of: Sequence[Group]) -> list[str]:
  """Returns the shortest distinct paths of groups; * stands for the seed."""
  paths = [os.path.commonprefix([x.path for x in group]) for group in of]  # noqa: RUF071
  prefix = os.path.commonprefix(paths)  # noqa: RUF071  It is cut at a slash.
  folder, slash, _ = prefix.rpartition('/')
  paths = [path.removeprefix(f'{folder}{slash}') for path in paths]
  shown = [x + '*' * (len(g) > 1) for x, g in zip(paths, of, strict=True)]
  firsts = (g[0].path.removeprefix(f'{folder}{slash}') for g in of)
  # Name groups with equal paths after their first run.
  both = zip(shown, firsts, strict=True)
  return [x if shown.count(x) == 1 else f'{first} ...' for x, first in both]


def short(keys: Sequence[str]) -> list[str]:
  """Shortens dotted keys to their last part where it is unique."""
  ends = [key.rpartition('.')[2] for key in keys]
  both = zip(keys, ends, strict=True)
  return [end if ends.count(end) == 1 else key for key, end in both]


def _progress(group: Group) -> tuple[str, str, str]:
  steps = group[0].recorded.get('training_steps')
  step = str(min(run.step for run in group))
  step += '' if steps is None else f' of {steps}'
  state = 'ended' if all(run.has_ended for run in group) else 'not ended'
  return state, step, lines.duration(mean([x.seconds for x in group])[0])


def print_list(of: Sequence[Group], sort: str | None = None) -> None:
  """Prints one line per group."""

  def texts(group: Group, what: str) -> str:
    known = dict.fromkeys(name for run in group for name in getattr(run, what))
    shown = sorted(known, key=lambda name: name != sort)[:_MAX_SHOWN]
    return ', '.join(f'{x} {cell(group, x, what)}' for x in shown)

  rows: list[tuple[str, ...]] = [('run', *_PROGRESS, 'best', 'last')]
  for name, group in zip(names(of), of, strict=True):
    both = texts(group, 'best'), texts(group, 'last')
    rows.append((name, *_progress(group), *both))
  inspection.print_table(rows, right=(2, 3))


def print_comparison(of: Sequence[Group], shown: Sequence[str]) -> None:
  """Prints the config differences and metrics of groups, as columns or rows."""
  has_rows = len(of) > _MAX_COLUMNS
  table: list[tuple[str, ...]] = [('run' if has_rows else '', *names(of))]
  differing = runs_lib.differences([group[0] for group in of])
  if any(len(group) > 1 for group in of):
    seeds = [[str(x.recorded.get('random_seed')) for x in g] for g in of]
    differing['random_seed'] = [','.join(x) for x in seeds]
  heads = short([*differing]) if has_rows else [*differing]
  for head, found in zip(heads, differing.values(), strict=True):
    table.append((head, *map(str, found)))
  table += zip(_PROGRESS, *map(_progress, of), strict=True)
  for what in ('best', 'last'):
    for name in shown:
      cells = [cell(group, name, what) for group in of]
      if any(cells):
        table.append((f'{what} {name}', *cells))
  if has_rows:
    table = [*zip(*table, strict=True)]
  inspection.print_table(table, right=range(1, len(table[0])))
