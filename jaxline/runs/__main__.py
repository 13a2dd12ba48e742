"""Command line that compares, sweeps and replays runs.

  python -m jaxline.runs ls runs
  python -m jaxline.runs compare runs/lr_*
  python -m jaxline.runs plot runs --metrics=eval/loss
  python -m jaxline.runs replay runs/a 7310-7320

The exit status is 1 if a replay differs from its run, two runs differ, a point
of a sweep failed or `compare --seeds` finds no improvement. It is 2, with one
line on stderr, if a run or name does not exist. Otherwise it is 0.
"""

import argparse
from collections.abc import Mapping, Sequence
import functools
import re
import sys
from typing import Any

from ml_collections import config_dict

from jaxline import api
from jaxline import base_config
from jaxline import errors
from jaxline import platform
from jaxline import runs as runs_lib
from jaxline.base import xla
from jaxline.metrics import lines
from jaxline.parallel import distributed
from jaxline.run_directory import store
from jaxline.runs import bisect
from jaxline.runs import explain
from jaxline.runs import plot
from jaxline.runs import replay
from jaxline.runs import sweep
from jaxline.runs import tables
from jaxline.runs import verdict
from jaxline.supervision import exits
from jaxline.supervision import preemption


def _ls(args: argparse.Namespace) -> None:
  of = tables.groups(runs_lib.find(args.dir), args.group, args.sort)
  tables.print_list(of, args.sort)


def _compare(args: argparse.Namespace) -> int:
  runs = runs_lib.find(args.dir)
  of = tables.groups(runs, args.group, args.sort)
  tables.print_comparison(of, tables.metrics(runs, args.metrics))
  sides = [runs_lib.find([place]) for place in args.dir if args.seeds]
  return int(args.seeds and not verdict.print_verdict(sides, args.metrics))


def _sweep(args: argparse.Namespace) -> int:
  is_axis = lambda x: x.startswith('--sweep.')
  others = [x for x in args.rest if not is_axis(x)]
  axes: dict[str, Any] = {}
  for text in filter(is_axis, args.rest):
    key, _, values = text.removeprefix('--sweep.').partition('=')
    axes[key] = values if sweep.RANGE.fullmatch(values) else values.split(',')

  def config_of(point: Mapping[str, Any]) -> config_dict.ConfigDict:
    flags = (f'--config.{key}={value}' for key, value in point.items())
    return platform.load_config([*others, *flags])

  if not any(re.match('--(config|jaxline_run)(=|$)', x) for x in others):
    platform.load_config([])  # This raises an error that names the flag.
  points = sweep.points(axes, args.draws)
  _start_jax(config_of(points[0]))
  train = functools.partial(api.fit_point, None, mode=args.jaxline_mode)
  try:
    with exits.exit_on_error():
      return bool(sweep.run(points, config_of, train, args.index)[1])
  except KeyboardInterrupt as e:
    lines.print_text(e, sys.stderr)
    return preemption.SIGINT_EXIT_CODE


def _start_jax(config: config_dict.ConfigDict) -> None:
  for line in xla.apply(config.xla, has_started=distributed.has_started()):
    lines.print_text(line)
  distributed.initialize(config.distributed)


def _steps(text: str) -> tuple[int, int]:
  """Parses '10' or '10-20'."""
  first, dash, last = text.partition('-')
  return int(first), int(last if dash else first)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command and returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.runs',
    description='Compares, sweeps and replays runs.',
  )
  commands = parser.add_subparsers(required=True, metavar='COMMAND')

  def add(name: str, run: Any, what: str, such: str) -> Any:
    """Adds a command; returns its `add_argument`."""
    example = f'Example: python -m jaxline.runs {name} {such}'
    command = commands.add_parser(
      name,
      help=what,
      description=f'{what[0].upper()}{what[1:]}.',
      epilog=example,
      allow_abbrev=False,
    )
    command.set_defaults(run=run)
    return command.add_argument

  def add_table(name: str, run: Any, what: str, such: str) -> Any:
    arg = add(name, run, what, such)
    arg('dir', metavar='DIR', nargs='+', help='a run, or a directory of runs')
    what = 'average runs that differ only in their seed'
    arg('--group', action='store_true', help=what)
    if name != 'ls':
      what = 'metrics to show (default: all of evaluation, and losses)'
      arg('--metrics', '--metric', metavar='METRIC,METRIC', help=what)
    if name != 'plot':
      arg('--sort', metavar='METRIC', help='put the best run first')
    return arg

  arg = add_table('ls', _ls, 'list runs, one per line', 'runs --sort=eval/loss')
  what = 'compare the configs and the metrics of runs'
  arg = add_table('compare', _compare, what, 'runs/lr_* --metrics=eval/loss')
  what = 'test whether the runs in the second DIR beat the runs in the first'
  arg('--seeds', action='store_true', help=what)
  what = 'draw the curves of runs in a PNG file'
  arg = add_table('plot', plot.command, what, 'runs --metrics=eval/loss')
  what = 'the file to write (default: %(default)s)'
  arg('--out', metavar='FILE', default='runs.png', help=what)
  what = 'train a config with several values of its keys'
  such = '--config=FILE --config.checkpoint_dir=DIR --sweep.KEY=1,2'
  arg = add('sweep', _sweep, what, such)
  arg.__self__.usage = (
    '%(prog)s --config=FILE [--config.KEY=VALUE ...]'
    ' --sweep.KEY=VALUE,VALUE [--sweep.KEY=log:LOW:HIGH ...] [OPTION ...]'
  )
  what = 'train N random points (default: all combinations of the values)'
  arg('--draws', type=int, metavar='N', help=what)
  what = 'train only this point, counted from 0 like $SLURM_ARRAY_TASK_ID'
  arg('--index', type=int, metavar='N', help=what)
  modes, what = ('train_and_eval', 'train'), 'default: %(default)s'
  arg('--jaxline_mode', choices=modes, default=modes[0], help=what)
  what = 'rerun steps of a run and compare the results'
  arg = add('replay', replay.command, what, 'runs/a 7310-7320')
  arg('run_dir', metavar='RUN', help='the directory of a run')
  what = 'the step to compare, or the first and the last, such as 10-20'
  arg('step', metavar='STEP', type=_steps, help=what)
  # This older flag gives the number of further steps.
  arg('--steps', type=int, default=0, help=argparse.SUPPRESS)
  either = arg.__self__.add_mutually_exclusive_group().add_argument
  what = 'save a checkpoint of the last step in this new directory'
  either('--save', metavar='DIR', help=what)
  either('--nan', action='store_true', help='find the first NaN or infinity')
  what = "list the rows of a step's batch, the worst first"
  arg = add('explain', explain.command, what, 'runs/a 7310 --grads')
  arg('run_dir', metavar='RUN', help='the directory of a run')
  what = 'the step to explain (default: the worst spike)'
  arg('step', metavar='STEP', type=int, nargs='?', help=what)
  arg('--grads', action='store_true', help='show gradient norms of the rows')
  what = 'find the first step and the arrays in which two runs differ'
  find = lambda args: int(bisect.bisect(args.run_dir, args.other))
  arg = add('bisect', find, what, 'runs/a runs/b')
  arg('run_dir', metavar='A', help='the directory of a run')
  arg('other', metavar='B', help='the directory of a second run')
  args, rest = parser.parse_known_args(argv)
  if rest and args.run is not _sweep:
    parser.error(f'unrecognized arguments: {" ".join(rest)}')
  args.rest = rest
  try:
    if 'run_dir' in args:
      _start_jax(base_config.recorded_config(args.run_dir))
    return int(args.run(args) or 0)
  except (errors.UsageError, store.DamagedError) as e:
    lines.print_text(f'jaxline.runs: {e}', sys.stderr)
    return 2


if __name__ == '__main__':
  sys.exit(main())
