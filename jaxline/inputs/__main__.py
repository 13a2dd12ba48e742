"""`python -m jaxline.inputs show`: looks at a config's data; see show.py.

The exit status is 0; 1 where a check found something wrong; 2 where the command
line, the config or the input itself is refused, in one line on stderr.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import itertools
import math
import os
import sys
from typing import Any

import jax

from jaxline import errors
from jaxline import platform
from jaxline.compat import adapters
from jaxline.inputs import base
from jaxline.inputs import show

_NUM_ROWS = 2  # Of which the text is printed.
_METHODS = {'train': 'train_input', 'eval': 'eval_input'}


def input_maker(
  config: Any, split: str, eval_set: str | None = None
) -> Callable[[], Any]:
  """Returns a function that makes an experiment's input, as a run does.

  Args:
    config: the run's.
    split: 'train' or 'eval'.
    eval_set: which of several evaluation sets; None is the first.

  Returns:
    A function without arguments. It makes the experiment, but no weights; the
    input is that of `base.this_host()`.

  Raises:
    UsageError: the config names no experiment, or one without such a method.
  """
  experiment_class = platform.resolve_experiment_class(config)
  method = _METHODS[split]
  if not hasattr(experiment_class, method):
    raise platform.UsageError(
      f'{config.experiment_class} has no {method}(): experiments in the'
      ' per-device style read their data in step() and evaluate(), where it'
      ' cannot be looked at from outside. Those of sharded.ShardedExperiment'
      ' have one.'
    )

  def make() -> Any:
    rng = jax.random.PRNGKey(config.random_seed)
    experiment = adapters.construct(experiment_class, split, rng, config)
    found = getattr(experiment, method)()
    sets = found if split == 'eval' and isinstance(found, Mapping) else {}
    if eval_set is not None and eval_set not in sets:
      raise platform.UsageError(
        f'--set {eval_set!r} is no evaluation set of {config.experiment_class};'
        f' expected one of {list(sets)}, or nothing if there is only one.'
        f'{errors.did_you_mean(eval_set, sets)}'
      )
    return sets[eval_set or next(iter(sets))] if sets else found

  return make


def _host(text: str) -> tuple[int, int]:
  """Parses '1/4'."""
  index, _, count = text.partition('/')
  try:
    host = int(index), int(count)
  except ValueError:
    host = -1, 0
  if not 0 <= host[0] < host[1]:
    raise argparse.ArgumentTypeError(
      f'{text!r} is no host; expected INDEX/COUNT, such as 0/4, 1/4, 2/4 or 3/4'
    )
  return host


def _at_least(least: int) -> Callable[[str], int]:
  def parse(text: str) -> int:
    if not text.isdecimal() or int(text) < least:
      raise argparse.ArgumentTypeError(
        f'{text!r}; expected an integer of at least {least}'
      )
    return int(text)

  return parse


def _seconds(text: str) -> float:
  try:
    seconds = float(text)
  except ValueError:
    seconds = math.nan
  if not 0 < seconds < math.inf:
    raise argparse.ArgumentTypeError(
      f'{text!r}; expected a finite number of seconds above 0'
    )
  return seconds


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.inputs',
    description="Looks at a run's data, without its model or accelerators.",
  )
  commands = parser.add_subparsers(required=True, metavar='COMMAND')
  text = (
    'print batches, and check what several hosts would read, whether a run'
    ' could resume exactly, and how fast it reads; exits with 1 if something is'
    ' wrong'
  )
  sub = commands.add_parser(
    'show',
    help=text,
    description=text,
    usage='%(prog)s --config=FILE [--config.key=value ...] [OPTION ...]',
    allow_abbrev=False,
  )
  sub.set_defaults(run=_show)
  sub.add_argument(
    '-n', type=_at_least(0), default=3, help='batches to print (default: 3)'
  )
  sub.add_argument(
    '--split',
    choices=sorted(_METHODS),
    default='train',
    help='(default: train)',
  )
  sub.add_argument(
    '--set', help='of several evaluation sets, which one (default: the first)'
  )
  sub.add_argument(
    '--host',
    type=_host,
    help='print what this host reads, counted from 0: 1/4 (default: 0/HOSTS)',
  )
  sub.add_argument(
    '--hosts',
    type=_at_least(1),
    help="hosts to compare (default: --host's, or 2 if there can be as many)",
  )
  sub.add_argument(
    '--batches',
    type=_at_least(1),
    default=20,
    help='batches of each host to compare (default: 20)',
  )
  sub.add_argument(
    '--max_batches',
    type=_at_least(1),
    default=1000,
    help='batches of each host to count, where the data ends (default: 1000)',
  )
  sub.add_argument(
    '--seconds',
    type=_seconds,
    default=1.0,
    help='how long to measure the speed (default: 1)',
  )
  sub.add_argument(
    '--devices',
    type=_at_least(1),
    help='CPU devices to pretend, for a config whose mesh needs several',
  )
  return parser


def _show(args: argparse.Namespace, config: Any) -> int:
  num_hosts = args.hosts or (args.host[1] if args.host else None)
  host, count = args.host or (0, num_hosts or 1)
  if num_hosts not in (None, count):
    raise platform.UsageError(
      f'--host {host}/{count} is one of {count} hosts, but --hosts is'
      f' {num_hosts}. Leave --hosts out.'
    )
  make_input = input_maker(config, args.split, args.set)
  with base.pretend_host(host, count):
    try:
      source = make_input()
    except (ValueError, OSError, ImportError) as e:
      raise platform.UsageError(f'As host {host} of {count}: {e}') from e
    try:
      print(f'{_about(source)}, for host {host} of {count}')
      for number, batch in enumerate(itertools.islice(source, args.n)):
        _print_batch(source, number, batch)
    finally:
      if hasattr(source, 'close'):
        source.close()  # Of its workers, some shared memory would stay.
  print(flush=True)
  report = show.check(
    make_input,
    num_hosts=num_hosts or 2,
    num_batches=args.batches,
    max_batches=args.max_batches,
    # A plain iterable of evaluation is one evaluation.
    one_epoch=True
    if args.split == 'eval' and not isinstance(source, base.BaseInput)
    else None,
    seconds=args.seconds,
  )
  print(report)
  return 0 if report.ok else 1


def _print_batch(source: Any, number: int, batch: Any) -> None:
  print(f'\nbatch {number}\n{show.describe(batch)}')
  for name, texts in show.texts(source, batch, _NUM_ROWS).items():
    for row, text in enumerate(texts):
      print(show.shorten(f'row {row} of {name}: {text!r}'))


def _about(source: Any) -> str:
  kind = type(source).__name__
  if not isinstance(source, base.BaseInput):
    return f'{kind}, no BaseInput'
  name = '' if source.name == kind else f' {source.name!r}'
  return (
    f'{kind}{name}: {source.batch_size} rows a batch, '
    f'{source.get_global_batch_size()} over all hosts'
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command.

  Args:
    argv: its arguments; None are those of the process.

  Returns:
    The exit status.

  Raises:
    SystemExit: the arguments are not understood (status 2), or ask for help.
  """
  args, rest = _parser().parse_known_args(argv)
  if args.devices is not None:
    jax.config.update('jax_num_cpu_devices', args.devices)
  try:
    return args.run(args, platform.load_config(rest))
  except BrokenPipeError:
    # Whoever read, such as `head`, has read enough; nothing more is written.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except platform.UsageError as e:
    print(f'jaxline.inputs: {" ".join(str(e).split())}', file=sys.stderr)
    return 2


if __name__ == '__main__':
  # Data is looked at beside a run that may have all accelerators.
  jax.config.update('jax_platforms', 'cpu')
  sys.exit(main())
