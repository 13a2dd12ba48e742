"""`python -m jaxline.runs ls|compare`: runs in a table, side by side.

  python -m jaxline.runs ls runs
  python -m jaxline.runs compare runs/lr_*

A run is a directory with a `config.json`. What is shown comes from that file,
from `metrics.jsonl` of training and evaluation, and from the note of its end;
of checkpoints only the steps count. The exit status is 0; 2 where
there is no run or no such metric, in one line on stderr.
"""

import argparse
import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import math
import os
import sys
from typing import Any

from jaxline import base_config
from jaxline import errors
from jaxline.checkpoint import inspection
from jaxline.checkpoint import manager
from jaxline.checkpoint import store as store_lib
from jaxline.metrics import lines

CONFIG = base_config.RECORD
_MAX_SHOWN = 3  # Metrics of a run in `ls`.


@dataclasses.dataclass(frozen=True)
class Run:
  """What a run's directory says.

  Attributes:
    path: the directory.
    recorded: the resolved config, by dotted key.
    curves: 'folder/name' of a scalar, such as 'train/loss' -> its values, by
      ascending step.
    saved: the step of the newest checkpoint; 0 if there is none.
    seconds: the time that the training steps took. A pause between two starts
      of the run is not in it.
    has_ended: whether training has ended.
  """

  path: str
  recorded: dict[str, Any]
  curves: dict[str, dict[int, float]]
  saved: int
  seconds: float
  has_ended: bool

  @property
  def step(self) -> int:
    """The last step that was logged or saved; 0 before the first."""
    return max([self.saved, *(max(curve) for curve in self.curves.values())])

  @property
  def best(self) -> dict[str, float]:
    """The best value of the metric that the run keeps the best series for."""
    metric = self.recorded.get('best_model_eval_metric')
    curve = self.curves.get(f'eval/{metric}', {})
    values = [x for x in curve.values() if not math.isnan(x)]
    key = 'best_model_eval_metric_higher_is_better'
    best = max if self.recorded.get(key, True) else min
    return {f'eval/{metric}': best(values)} if values else {}

  @property
  def last(self) -> dict[str, float]:
    """The last value of each scalar: that of `best`, evaluation, losses."""
    best = f'eval/{self.recorded.get("best_model_eval_metric")}'
    names = sorted(
      self.curves,
      key=lambda name: (
        name != best,
        not name.startswith('eval'),
        'loss' not in name,
        name,
      ),
    )
    return {name: list(self.curves[name].values())[-1] for name in names}


def read(path: str | os.PathLike[str]) -> Run:
  """Reads a run.

  Args:
    path: its directory or address.

  Raises:
    errors.UsageError: the config cannot be read.
  """
  recorded = base_config.flat(base_config.read_record(path))
  store = store_lib.at(path)
  unordered: dict[str, dict[int, float]] = collections.defaultdict(dict)
  for step, scalars in inspection.logged(store):
    for name, value in scalars.items():
      # JSON has no NaN; as text it is one of those that float reads.
      with contextlib.suppress(ValueError, TypeError):
        unordered[name][step] = float(value)
  curves = {name: dict(sorted(x.items())) for name, x in unordered.items()}
  rates = curves.get('train/steps_per_sec', {})
  # A run that began from another one may have begun at its step.
  before = min(rates, default=0) if recorded.get('restore_from') else 0
  seconds = 0.0
  for step, rate in rates.items():
    seconds += (step - before) / rate if rate > 0 else 0.0
    before = step
  manifests = manager.Manifests(store.below('checkpoints'))
  saved = max(manifests.steps('latest'), default=0)
  has_ended = inspection.ended(store) is not None
  run = Run(store.url, recorded, curves, saved, seconds, has_ended)
  # With checkpoints in memory a run leaves no note of its end.
  steps = recorded.get('training_steps')
  has_all = isinstance(steps, int | float) and run.step >= steps
  return dataclasses.replace(run, has_ended=has_ended or has_all)


def find(places: Sequence[str]) -> list[Run]:
  """Returns the runs in directories and below them, by path.

  Raises:
    errors.UsageError: there is none in one of them.
  """
  found: dict[str, Run] = {}
  for place in places:
    paths = list(_below(store_lib.at(place)))
    if not paths:
      raise errors.UsageError(
        f'There is no run in {place}: expected a directory with a {CONFIG}, or'
        ' one that has such directories below it.'
      )
    for path in paths:
      try:
        found[path] = read(path)
      except errors.UsageError as e:
        if len(paths) == 1:
          raise
        print(f'Left out: {e}', file=sys.stderr)
  return list(found.values())


def _below(store: store_lib.Store) -> Iterator[str]:
  """Yields the directories of runs in and below a place."""
  names = store.names()
  if CONFIG in names:
    yield store.url
    return
  for name in names:
    yield from _below(store.below(name))


def _names(runs: Sequence[Run]) -> list[str]:
  """Returns the shortest paths that tell the runs apart."""
  if len(runs) == 1:
    return [os.path.basename(runs[0].path)]
  paths = [run.path for run in runs]
  try:
    common = os.path.commonpath(paths)
  except ValueError:  # Of a directory and an address.
    return paths
  return [os.path.relpath(path, common) for path in paths]


def _metrics(values: Mapping[str, float]) -> str:
  shown = list(values.items())[:_MAX_SHOWN]
  return ', '.join(f'{name} {value:.5g}' for name, value in shown)


def _of_steps(run: Run) -> str:
  steps = run.recorded.get('training_steps')
  return str(run.step) if steps is None else f'{run.step} of {steps}'


def _state(run: Run) -> str:
  return 'ended' if run.has_ended else 'not ended'


def _ls(args: argparse.Namespace) -> None:
  runs = find(args.dir)
  header = ('run', 'state', 'step', 'time', 'best', 'last')
  rows = [
    (
      name,
      _state(run),
      _of_steps(run),
      lines.duration(run.seconds),
      _metrics(run.best),
      _metrics(run.last),
    )
    for name, run in zip(_names(runs), runs, strict=True)
  ]
  inspection.print_table([header, *rows], right=(2, 3))


def differences(runs: Sequence[Run]) -> list[str]:
  """Returns the keys whose values differ, except the runs' directories."""
  keys = {key for run in runs for key in run.recorded} - {'checkpoint_dir'}
  return [
    key
    for key in sorted(keys)
    if len({json.dumps(run.recorded.get(key)) for run in runs}) > 1
  ]


def _compare(args: argparse.Namespace) -> None:
  runs = find(args.dir)
  metrics = args.metrics.split(',') if args.metrics else _common(runs)
  known = sorted({name for run in runs for name in run.curves})
  errors.check_names(metrics, known, 'metric', '--metrics')
  rows: list[tuple[str, ...]] = [('', *_names(runs))]
  for key in differences(runs):
    rows.append((key, *(str(run.recorded.get(key, '')) for run in runs)))
  rows.append(('state', *map(_state, runs)))
  rows.append(('step', *map(_of_steps, runs)))
  rows.append(('time', *(lines.duration(run.seconds) for run in runs)))
  for what in ('best', 'last'):
    values = [getattr(run, what) for run in runs]
    for name in dict.fromkeys(name for of in values for name in of):
      if name in metrics:
        cells = (f'{of[name]:.5g}' if name in of else '' for of in values)
        rows.append((f'{what} {name}', *cells))
  inspection.print_table(rows, right=range(1, len(runs) + 1))


def _common(runs: Sequence[Run]) -> list[str]:
  """Returns the scalars of evaluation, and the losses of training."""
  names = dict.fromkeys(name for run in runs for name in run.last)
  return [name for name in names if name.startswith('eval') or 'loss' in name]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.runs', description='Looks at several runs at once.'
  )
  commands = parser.add_subparsers(required=True, metavar='COMMAND')
  command = commands.add_parser('ls', help='a line for each run')
  command.add_argument('dir', nargs='+', help='a run, or what has runs below')
  command.set_defaults(run=_ls)
  command = commands.add_parser(
    'compare', help='a column for each run: how they differ, what they reached'
  )
  command.add_argument('dir', nargs='+', help='a run, or what has runs below')
  command.add_argument(
    '--metrics',
    help='such as eval/loss,train/loss; by default all of evaluation and the'
    ' losses of training',
  )
  command.set_defaults(run=_compare)
  args = parser.parse_args(argv)
  try:
    args.run(args)
  except errors.UsageError as e:
    print(e, file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
