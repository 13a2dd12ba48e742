"""`python -m jaxline.runs`: compares, sweeps and replays runs.

  python -m jaxline.runs ls runs
  python -m jaxline.runs compare runs/lr_*
  python -m jaxline.runs plot runs --metrics=eval/loss
  python -m jaxline.runs replay runs/a 7310-7320

The exit status is 0; 1 where a replay differs from the run, two runs differ, a
point of a sweep failed or `compare --seeds` finds nothing better; 2 where there
is no run or nothing of that name, in one line on stderr.
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
    platform.load_config([])  # Its error names the flag.
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
  """Runs the command line; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.runs',
    description='Compares, sweeps and replays runs.',
  )
  commands = parser.add_subparsers(required=True, metavar='COMMAND')

  def add(name: str, run: Any, what: str, such: str) -> Any:
    """Adds a command; returns what adds its arguments."""
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
    arg('dir', metavar='DIR', nargs='+', help='a run, or what has runs below')
    what = 'the runs that differ only in their seed as one, with means'
    arg('--group', action='store_true', help=what)
    if name != 'ls':
      what = 'the default is all of evaluation, and losses'
      arg('--metrics', '--metric', metavar='METRIC,METRIC', help=what)
    if name != 'plot':
      arg('--sort', metavar='METRIC', help='put the best run first')
    return arg

  arg = add_table('ls', _ls, 'a line for each run', 'runs --sort=eval/loss')
  what = 'how runs differ and what they reached'
  arg = add_table('compare', _compare, what, 'runs/lr_* --metrics=eval/loss')
  what = 'then, whether the runs in the second DIR are better than in the first'
  arg('--seeds', action='store_true', help=what)
  what = 'the curves of runs, in a PNG'
  arg = add_table('plot', plot.command, what, 'runs --metrics=eval/loss')
  what = 'the file to write; the default is %(default)s'
  arg('--out', metavar='FILE', default='runs.png', help=what)
  what = 'what a config reaches with several values of its keys'
  such = '--config=FILE --config.checkpoint_dir=DIR --sweep.KEY=1,2'
  arg = add('sweep', _sweep, what, such)
  arg.__self__.usage = (
    '%(prog)s --config=FILE [--config.KEY=VALUE ...]'
    ' --sweep.KEY=VALUE,VALUE [--sweep.KEY=log:LOW:HIGH ...] [OPTION ...]'
  )
  what = 'random points; the default is all combinations of the values'
  arg('--draws', type=int, metavar='N', help=what)
  what = 'the only point to train, from 0, as $SLURM_ARRAY_TASK_ID'
  arg('--index', type=int, metavar='N', help=what)
  modes, what = ('train_and_eval', 'train'), 'the default is %(default)s'
  arg('--jaxline_mode', choices=modes, default=modes[0], help=what)
  what = 'whether the steps of a run give the same numbers again'
  arg = add('replay', replay.command, what, 'runs/a 7310-7320')
  arg('run_dir', metavar='RUN', help='the directory of a run')
  what = 'the step to compare, or the first and the last, such as 10-20'
  arg('step', metavar='STEP', type=_steps, help=what)
  # An earlier way to give the last step.
  arg('--steps', type=int, default=0, help=argparse.SUPPRESS)
  either = arg.__self__.add_mutually_exclusive_group().add_argument
  what = 'a new directory for the checkpoint of the last step'
  either('--save', metavar='DIR', help=what)
  either('--nan', action='store_true', help='name what made STEP not finite')
  what = 'the rows of the batch of a step, the worst first'
  arg = add('explain', explain.command, what, 'runs/a 7310 --grads')
  arg('run_dir', metavar='RUN', help='the directory of a run')
  what = 'the step; the default is the worst spike'
  arg('step', metavar='STEP', type=int, nargs='?', help=what)
  arg('--grads', action='store_true', help="also the rows' gradient norms")
  what = 'the first step at which two runs part, and the arrays that part'
  find = lambda args: int(bisect.bisect(args.run_dir, args.other))
  arg = add('bisect', find, what, 'runs/a runs/b')
  arg('run_dir', metavar='A', help='the directory of a run')
  arg('other', metavar='B', help='that of another run')
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
