"""Reads run directories; `python -m jaxline.runs` prints tables of them.

A run is a directory with a `config.json`. `replay` reruns its steps, and
`bisect` and `explain` build on it. `verdict` compares runs over seeds. Read
this module first, then `replay`.
"""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
from typing import Any

import numpy as np

from jaxline import base_config
from jaxline import errors
from jaxline.base import keys
from jaxline.checkpoint import inspection
from jaxline.checkpoint import manifests as manifests_lib
from jaxline.metrics import lines
from jaxline.run_directory import notes
from jaxline.run_directory import store as store_lib


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """A run's directory: its config by dotted key, its curves by 'train/loss'."""

  path: str
  recorded: dict[str, Any] = dataclasses.field(repr=False)
  curves: dict[str, dict[int, float]] = dataclasses.field(repr=False)
  step: int  # The last step that was logged or saved; 0 if there is none.
  has_ended: bool  # Whether training has ended.

  def manifests(
    self, before: float = math.inf
  ) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (step, manifest) of readable checkpoints, the newest first."""
    store = store_lib.at(self.path).below('checkpoints')
    found = manifests_lib.Manifests(store)
    for step in reversed(found.steps('latest')):
      if step < before:
        try:
          yield step, found.read('latest', step)
        except (ValueError, OSError) as e:
          lines.warn_once(f'Skipped: {e}')

  @property
  def seconds(self) -> float:
    """The time of the training steps, without pauses between restarts."""
    rates = self.curves.get('train/steps_per_sec', {})
    # The run may have started from a checkpoint whose step is not recorded.
    is_from = self.recorded.get('restore_from')
    before = self.first_step - 1 or (min(rates, default=0) if is_from else 0)
    pairs = itertools.pairwise([before, *rates])
    return sum((b - a) / rates[b] for a, b in pairs if rates[b] > 1e-9)

  @property
  def first_step(self) -> int:
    """The run's first step, greater than 1 if it continues another run."""
    number = str(self.recorded.get('restore_from')).rpartition(':')[2]
    is_whole = number.isdecimal() and not self.recorded.get('restore_rules')
    return int(number) + 1 if is_whole else 1

  def check_step(self, step: int) -> None:
    """Raises UsageError for a step that the run cannot have."""
    steps = self.recorded.get('training_steps')
    last = steps if isinstance(steps, int | float) else math.inf
    check = keys.integer(self.first_step, max(self.step, last))
    check.require(f'The step of {self.path}', step)

  @functools.cached_property
  def manifest(self) -> dict[str, Any]:
    """The newest manifest, or {} if there is none."""
    return next(self.manifests(), (0, {}))[1]

  @property
  def best(self) -> dict[str, float]:
    """The best value of the metric that selects the run's best checkpoint."""
    metric = self.recorded.get('best_model_eval_metric')
    curve = self.curves.get(f'eval/{metric}', {})
    values = [x for x in curve.values() if not math.isnan(x)]
    best = max if self.prefers_higher(f'eval/{metric}') else min
    return {f'eval/{metric}': best(values)} if values else {}

  def prefers_higher(self, name: str) -> bool:
    """Returns whether higher values of a metric are better."""
    if name.partition('/')[2] == self.recorded.get('best_model_eval_metric'):
      key = 'best_model_eval_metric_higher_is_better'
      return bool(self.recorded.get(key, True))
    return 'loss' not in name

  @property
  def last(self) -> dict[str, float]:
    """The last value of each scalar: `best` first, then evaluation, losses."""
    best = f'eval/{self.recorded.get("best_model_eval_metric")}'
    rank = lambda x: (x != best, not x.startswith('eval'), 'loss' not in x, x)
    names = sorted(self.curves, key=rank)
    return {name: list(self.curves[name].values())[-1] for name in names}

  @property
  def history(self) -> 'History':
    curves = self.curves.items()
    return History({k: np.array([*x.items()], float) for k, x in curves})


class History(dict[str, np.ndarray]):
  """A run's curves by name, such as 'train/loss': arrays [N, (step, value)]."""

  def __missing__(self, name: str) -> Any:
    raise KeyError(f'{name!r}; expected one of {list(self)}')

  def to_pandas(self) -> Any:
    """Returns a DataFrame with a row per step and a column per name."""
    curves = {k: dict(zip(*x.T, strict=True)) for k, x in self.items()}
    frame = optional('pandas').DataFrame(curves)
    frame.index = frame.index.astype(int).rename('step')
    return frame.sort_index()


def optional(name: str) -> Any:
  """Imports a module of an optional package."""
  try:
    return importlib.import_module(name)
  except ImportError as e:
    text = f'{name} is not installed: pip install {name.partition(".")[0]}'
    raise errors.UsageError(text) from e


def read(path: str | os.PathLike[str]) -> RunRecord:
  """Reads a run from its directory or address."""
  recorded = base_config.flat(base_config.read_record(path))
  store = store_lib.at(path)
  unordered: dict[str, dict[int, float]] = collections.defaultdict(dict)
  for step, scalars in inspection.read_log(store):
    for name, value in scalars.items():
      # JSON has no NaN, so it is logged as text that `float` parses.
      with contextlib.suppress(ValueError, TypeError, OverflowError):
        unordered[name][int(step)] = float(value)
  curves = {name: dict(sorted(x.items())) for name, x in unordered.items()}
  manifests = manifests_lib.Manifests(store.below('checkpoints'))
  saved = manifests.steps('latest')
  last = max([0, *saved, *(max(curve) for curve in curves.values())])
  # A run with checkpoints in memory leaves no note of its end.
  steps = recorded.get('training_steps')
  has_all = isinstance(steps, int | float) and last >= steps
  has_ended = bool(notes.read_end(manifests.store)) or has_all
  return RunRecord(store.url, recorded, curves, last, has_ended)


def find(places: Sequence[str]) -> list[RunRecord]:
  """Returns the runs in and below some directories, ordered by path."""
  found: dict[str, RunRecord] = {}
  for place in places:
    paths = list(_below(store_lib.at(place)))
    if not paths:
      raise errors.UsageError(
        f'There is no run in {place}; expected a directory with a'
        f' {base_config.RECORD}, or a directory with such directories below it.'
      )
    for path in paths:
      try:
        found[os.path.realpath(path)] = read(path)
      except (ValueError, OSError, OverflowError) as e:
        if len(paths) == 1:
          raise errors.UsageError(f'{path}: {e}') from e
        lines.warn_once(f'Skipped {path}: {e}')
  if not found:
    raise errors.UsageError(f'No run in {", ".join(places)} can be read.')
  return list(found.values())


def _below(place: store_lib.Store) -> Iterator[str]:
  """Yields each directory of a run in and below a place once."""
  seen, left = set(), [place]
  while left:
    store = left.pop()
    if (real := os.path.realpath(store.url)) in seen:
      continue
    seen.add(real)
    try:
      names = store.names()
    except OSError as e:
      lines.warn_once(f'Skipped: {e}')
      continue
    if base_config.RECORD in names:
      yield store.url
    else:
      left += [store.below(x, links=True) for x in reversed(names)]


def differences(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
  """Returns the values, by key, of each key that differs between the runs."""
  keys = sorted({key for run in runs for key in run.recorded})
  found = {key: [run.recorded.get(key) for run in runs] for key in keys}
  found.pop('checkpoint_dir', None)
  made = [inspection.made_with(run.manifest) for run in runs if run.manifest]
  # Versions are compared only if each run has a checkpoint that records them.
  for key in made[0] if len(made) == len(runs) else ():
    found[key] = [x.get(key) for x in made]
  return {k: x for k, x in found.items() if len(set(map(json.dumps, x))) > 1}
