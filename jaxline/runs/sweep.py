"""Trains a config with several values of its keys, one run per point.

Points that have ended are skipped; interrupted points are resumed.
"""

from collections.abc import Callable, Mapping, Sequence
import itertools
import math
import re
from typing import Any
from urllib import parse

import jax
from ml_collections import config_dict
import numpy as np

from jaxline import base_config
from jaxline import errors
from jaxline import runs as runs_lib
from jaxline.base import keys
from jaxline.metrics import lines
from jaxline.run_directory import notes
from jaxline.run_directory import store as store_lib
from jaxline.runs import tables

# Maps a dotted key to its values, or to the text of a range.
Axes = Mapping[str, Sequence[Any] | str]
RANGE = re.compile(r'(uniform|log|int):([^:]+):([^:]+)')


def points(axes: Axes, draws: int | None = None) -> list[dict[str, Any]]:
  """Returns a grid's points, or random ones; more draws begin with the same."""
  if draws is None:
    ranges = {k: axis for k, axis in axes.items() if isinstance(axis, str)}
    if ranges or not axes:
      raise errors.UsageError(
        f'The ranges are {ranges}, among {len(axes)} keys; expected at least'
        ' one key, with values. To draw from ranges, set the number of draws.'
      )
    grid = itertools.product(*axes.values())
    return [dict(zip(axes, values, strict=True)) for values in grid]
  keys.integer(1).require('draws', draws)
  streams = map(np.random.default_rng, range(draws))
  return [{k: _draw(x, rng) for k, x in axes.items()} for rng in streams]


def _draw(axis: Sequence[Any] | str, rng: np.random.Generator) -> Any:
  if not isinstance(axis, str):
    return axis[int(rng.integers(len(axis)))]
  try:
    kind, *ends = RANGE.fullmatch(axis).groups()  # type: ignore[union-attr]
    low, high = map(float, ends)
    if kind == 'log':
      return float(
        f'{low * math.exp(rng.uniform(0, math.log(high / low))):.3g}'
      )
    value = rng.uniform(low, high)
    return round(value) if kind == 'int' else float(f'{value:.3g}')
  except (ValueError, ArithmeticError, AttributeError) as e:
    raise errors.UsageError(
      f'The range is {axis!r}; expected uniform:LOW:HIGH, int:LOW:HIGH for'
      ' integers, or log:LOW:HIGH with both above 0.'
    ) from e


def run(
  made: Sequence[Mapping[str, Any]],
  config_of: Callable[[Mapping[str, Any]], config_dict.ConfigDict],
  train: Callable[..., Any],
  index: int | None = None,
) -> tuple[list[runs_lib.RunRecord], list[str]]:
  """Trains points in directories below `config.checkpoint_dir`.

  Args:
    made: The result of `points`.
    config_of: Returns the config of a point.
    train: Trains a config with overrides; resumes an interrupted run.
    index: The only point to train; None means all, one after the other.

  Returns:
    The runs so far, the best first, and the directories of failed runs.
  """
  configs, failed = {}, []
  for point in made:  # Check all configs before the first run trains.
    config = base_config.expand_paths(config_of(point))
    if not config.checkpoint_dir:
      raise errors.UsageError(
        'config.checkpoint_dir is None; expected a directory for the sweep.'
      )
    values = base_config.flat(base_config.recorded(config))
    # Put the seed last, so that names of a group share a prefix.
    pairs = sorted(
      zip(tables.short([*point]), point, strict=True),
      key=lambda pair: pair[1] == 'random_seed',
    )
    name = ','.join(f'{head}={values[key]}' for head, key in pairs)
    name = parse.quote(name, safe='=,')  # Distinct values get distinct names.
    configs[store_lib.at(config.checkpoint_dir).below(name).url] = config
  if index is not None:
    keys.integer(0, len(configs) - 1).require('index', index)
  for number, (path, config) in enumerate(configs.items()):
    if index not in (None, number) or _has_ended(path, config):
      continue
    lines.print_text(f'Point {number} of {len(configs)}: {path}')
    try:
      train(config, {'checkpoint_dir': path})
    except errors.RunError as e:  # Train the other points nevertheless.
      lines.warn_once(f'{path}: {e}')
      failed.append(path)
  places = [x for x in configs if base_config.RECORD in store_lib.at(x).names()]
  found = runs_lib.find(places) if places else []
  metric = next((name for x in found for name in x.last), None)
  groups = tables.groups(found, 'random_seed' in made[0], metric)
  if metric and not jax.process_index():
    tables.print_comparison(groups, tables.metrics(found))
    best, (first, *more) = tables.cell(groups[0], metric), groups[0]
    others = f' and {len(more)} more' if more else ''
    lines.print_text(f'Best {metric}: {best}, in {first.path}{others}')
  return [x for group in groups for x in group], failed


def _has_ended(path: str, config: config_dict.ConfigDict) -> bool:
  """Returns whether a run with this config exists and has ended."""
  store, now = store_lib.at(path), base_config.recorded(config)
  is_noted = notes.read_end(store.below('checkpoints'))
  now |= {'checkpoint_dir': path}
  return bool(is_noted) and base_config.read_record(path) == now
