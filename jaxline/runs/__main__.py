"""`python -m jaxline.runs`: compares runs, and replays their steps.

  python -m jaxline.runs ls runs
  python -m jaxline.runs compare runs/lr_*
  python -m jaxline.runs replay runs/a 7310 --steps=10

The exit status is 0; 1 where a replay differs from the run; 2 where there is no
run or nothing of that name, in one line on stderr.
"""

import argparse
from collections.abc import Mapping, Sequence
import os
import sys

from jaxline import errors
from jaxline import runs as runs_lib
from jaxline.checkpoint import inspection
from jaxline.checkpoint import store
from jaxline.metrics import lines
from jaxline.runs import bisect
from jaxline.runs import explain
from jaxline.runs import replay

_MAX_SHOWN = 3  # Metrics of a run in `ls`.


def _names(runs: Sequence[runs_lib.Run]) -> list[str]:
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


def _of_steps(run: runs_lib.Run) -> str:
  steps = run.recorded.get('training_steps')
  return str(run.step) if steps is None else f'{run.step} of {steps}'


def _state(run: runs_lib.Run) -> str:
  return 'ended' if run.has_ended else 'not ended'


def _ls(args: argparse.Namespace) -> None:
  runs = runs_lib.find(args.dir)
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


def _compare(args: argparse.Namespace) -> None:
  runs = runs_lib.find(args.dir)
  metrics = args.metrics.split(',') if args.metrics else _common(runs)
  known = sorted({name for run in runs for name in run.curves})
  errors.check_names(metrics, known, 'metric', '--metrics')
  rows: list[tuple[str, ...]] = [('', *_names(runs))]
  for key in runs_lib.differences(runs):
    rows.append((key, *(str(run.recorded.get(key, '')) for run in runs)))
  if len({run.code for run in runs}) > 1:
    rows.append(('code', *(run.code for run in runs)))
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


def _common(runs: Sequence[runs_lib.Run]) -> list[str]:
  """Returns the scalars of evaluation, and the losses of training."""
  names = dict.fromkeys(name for run in runs for name in run.last)
  return [name for name in names if name.startswith('eval') or 'loss' in name]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.runs', description='Compares and replays runs.'
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
  replay.add_command(commands)
  explain.add_command(commands)
  bisect.add_command(commands)
  args = parser.parse_args(argv)
  try:
    return args.run(args) or 0
  except (errors.UsageError, store.DamagedError) as e:
    print(e, file=sys.stderr)
    return 2


if __name__ == '__main__':
  sys.exit(main())
