"""`python -m jaxline.runs`: compares runs, and replays their steps.

  python -m jaxline.runs ls runs
  python -m jaxline.runs compare runs/lr_*
  python -m jaxline.runs replay runs/a 7310 --steps=10

The exit status is 0; 1 where a replay differs from the run, two runs differ or
`compare --seeds` finds nothing better; 2 where there is no run or nothing of
that name, in one line on stderr.
"""

import argparse
from collections.abc import Mapping, Sequence
import os
import sys
from typing import Any

from jaxline import base_config
from jaxline import errors
from jaxline import runs as runs_lib
from jaxline.base import xla
from jaxline.checkpoint import inspection
from jaxline.metrics import lines
from jaxline.parallel import distributed
from jaxline.run_directory import store
from jaxline.runs import bisect
from jaxline.runs import explain
from jaxline.runs import replay
from jaxline.runs import verdict

_MAX_SHOWN = 3  # Metrics of a run in `ls`.
_PROGRESS = ('state', 'step', 'time')


def _names(runs: Sequence[runs_lib.RunRecord]) -> list[str]:
  """Returns the shortest paths that tell the runs apart."""
  paths = [run.path for run in runs]
  prefix = os.path.commonprefix(paths)  # noqa: RUF071  It is cut at a slash.
  folder, slash, _ = prefix.rpartition('/')
  return [path.removeprefix(f'{folder}{slash}') for path in paths]


def _metrics(values: Mapping[str, float]) -> str:
  shown = list(values.items())[:_MAX_SHOWN]
  return ', '.join(f'{name} {value:.5g}' for name, value in shown)


def _progress(run: runs_lib.RunRecord) -> tuple[str, str, str]:
  steps = run.recorded.get('training_steps')
  step = str(run.step) if steps is None else f'{run.step} of {steps}'
  state = 'ended' if run.has_ended else 'not ended'
  return state, step, lines.duration(run.seconds)


def _ls(args: argparse.Namespace) -> None:
  runs = runs_lib.find(args.dir)
  rows = [('run', *_PROGRESS, 'best', 'last')]
  for name, run in zip(_names(runs), runs, strict=True):
    metrics = _metrics(run.best), _metrics(run.last)
    rows.append((name, *_progress(run), *metrics))
  inspection.print_table(rows, right=(2, 3))


def _compare(args: argparse.Namespace) -> int:
  runs = runs_lib.find(args.dir)
  metrics = [
    name
    for name in dict.fromkeys(name for run in runs for name in run.last)
    if name.startswith('eval') or 'loss' in name
  ]
  metrics = args.metrics.split(',') if args.metrics else metrics
  known = sorted({name for run in runs for name in run.curves})
  errors.check_names(metrics, known, 'metric', '--metrics')
  rows: list[tuple[str, ...]] = [('', *_names(runs))]
  for key, values in runs_lib.differences(runs).items():
    rows.append((key, *map(str, values)))
  rows += zip(_PROGRESS, *map(_progress, runs), strict=True)
  for what in ('best', 'last'):
    columns = [getattr(run, what) for run in runs]
    for name in dict.fromkeys(name for of in columns for name in of):
      if name in metrics:
        cells = (f'{of[name]:.5g}' if name in of else '' for of in columns)
        rows.append((f'{what} {name}', *cells))
  inspection.print_table(rows, right=range(1, len(runs) + 1))
  sides = [runs_lib.find([place]) for place in args.dir if args.seeds]
  return int(args.seeds and not verdict.print_verdict(sides, args.metrics))


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.runs', description='Compares and replays runs.'
  )
  commands = parser.add_subparsers(required=True, metavar='COMMAND')

  def add(name: str, run: Any, what: str, such: str) -> Any:
    """Adds a command; returns what adds its arguments."""
    example = f'Example: python -m jaxline.runs {name} {such}'
    command = commands.add_parser(
      name, help=what, description=f'Prints {what}.', epilog=example
    )
    command.set_defaults(run=run)
    return command.add_argument

  arg = add('ls', _ls, 'a line for each run', 'runs')
  arg('dir', nargs='+', help='a run, or what has runs below')
  what = 'a column for each run: how they differ, what they reached'
  arg = add('compare', _compare, what, 'runs/lr_* --metrics=eval/loss')
  arg('dir', nargs='+', help='a run, or what has runs below')
  arg('--metrics', help='the default is all of evaluation, and training losses')
  what = 'then, whether the runs in the second DIR are better than in the first'
  arg('--seeds', action='store_true', help=what)
  what = 'whether the steps of a run give the same numbers again'
  arg = add('replay', replay.command, what, 'runs/a 7310 --steps=10')
  arg('run_dir', metavar='RUN', help='the directory of a run')
  arg('step', metavar='STEP', type=int, help='the first step to compare')
  arg('--steps', type=int, default=0, help='how many steps to run after it')
  either = arg.__self__.add_mutually_exclusive_group().add_argument
  either('--save', help='a new directory for the checkpoint of the last step')
  either('--nan', action='store_true', help='name what made STEP not finite')
  what = 'the rows of the batch of a step, the worst first'
  arg = add('explain', explain.command, what, 'runs/a 7310 --grads')
  arg('run_dir', metavar='RUN', help='the directory of a run')
  arg('step', metavar='STEP', type=int, nargs='?', help='or the worst spike')
  arg('--grads', action='store_true', help="also the rows' gradient norms")
  what = 'the first step at which two runs part, and the arrays that part'
  find = lambda args: int(bisect.bisect(args.run_dir, args.other))
  arg = add('bisect', find, what, 'runs/a runs/b')
  arg('run_dir', metavar='A', help='a run')
  arg('other', metavar='B', help='that of another run')
  args = parser.parse_args(argv)
  try:
    if 'run_dir' in args:
      for line in xla.apply(
        base_config.recorded_config(args.run_dir).xla,
        has_started=distributed.has_started(),
      ):
        lines.print_text(line)
      distributed.initialize('auto')
    return args.run(args) or 0
  except (errors.UsageError, store.DamagedError) as e:
    lines.print_text(e, sys.stderr)
    return 2


if __name__ == '__main__':
  sys.exit(main())
