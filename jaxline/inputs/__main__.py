"""Command line that shows and checks inputs: `python -m jaxline.inputs show`.

show.py describes the checks. `prepare` only tokenizes the text. The exit status
is 1 if a check fails, and 2 with one line on stderr if the command line, the
config or the input is invalid. Otherwise it is 0.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import itertools
import math
import sys
from typing import Any

from absl import logging
import jax

from jaxline import errors
from jaxline import platform
from jaxline.compat import experiments
from jaxline.inputs import base
from jaxline.inputs import show
from jaxline.inputs import text as text_input
from jaxline.metrics import lines
from jaxline.parallel import mesh


def input_maker(
  config: Any, split: str, eval_set: str | None = None
) -> Callable[..., Any]:
  """Returns a function that makes an experiment's input, but no weights.

  The function takes a shard if the experiment's method does.
  """
  experiment_class = platform.resolve_experiment_class(config)
  method = f'{split}_input'
  if not hasattr(experiment_class, method):
    raise errors.UsageError(
      f'{config.experiment_class} has no {method}(). Expected a'
      ' ShardedExperiment: others read their data in step() and evaluate().'
    )

  @functools.cache
  def experiment() -> Any:
    rng = jax.random.PRNGKey(config.random_seed)
    return experiments.construct(experiment_class, split, rng, config)

  def make(shard: base.Shard) -> Any:
    # Reading data takes no devices, so the run's devices may be missing.
    with mesh.on_devices(_fitting_devices):
      found = base.of_shard(getattr(experiment(), method), shard)
    has_sets = split == 'eval' and isinstance(found, Mapping)
    sets = dict(found) if has_sets else {'': found}
    name = next(iter(sets)) if eval_set is None else eval_set
    note = ' Omit --set to use the first.'
    errors.check_names([name], sets, 'set', config.experiment_class, note)
    return sets[name]

  if show.takes_shard(getattr(experiment_class, method)):
    return make
  return lambda: make(base.process_shard())


def _fitting_devices(sizes: Any) -> Sequence[mesh.AbstractDevice]:
  """Returns placeholders for the smallest mesh of these sizes."""
  # A size of -1 stands for all remaining devices; one is enough here.
  ici, dcn = (math.prod(map(abs, x.values())) for x in mesh.check_sizes(sizes))
  return mesh.abstract_devices(ici * dcn, dcn)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.inputs',
    description='Prints the batches of a config. Checks the rows that several'
    ' hosts would read and whether a run would resume exactly, and measures the'
    ' speed. Needs no model and no accelerator. Exits with 1 if a check fails.',
    usage='%(prog)s show --config=FILE | --jaxline_run=DIR'
    ' [--config.KEY=VALUE ...] [OPTION ...]',
    allow_abbrev=False,
  )
  add = parser.add_argument
  what = '`prepare` only tokenizes the text and prints totals of both splits'
  add('command', choices=['show', 'prepare'], help=what)
  add('--split', choices=('eval', 'train'), default='train')
  add('--set', help='one of several evaluation sets (default: the first)')
  add('-n', type=int, default=3, help='number of batches to print (default: 3)')
  what = 'limit on the batches read from data that ends (default: 1000)'
  add('--max_batches', type=int, metavar='N', default=1000, help=what)
  add('--seconds', type=float, default=1.0, help='time to measure the speed')
  add = parser.add_mutually_exclusive_group().add_argument
  what = 'number of hosts to compare (default: 2)'
  add('--hosts', type=int, metavar='N', help=what)
  what = 'host to print, counted from 0, and hosts to compare, such as 1/4'
  add('--host', type=_shard, metavar='INDEX/COUNT', help=what)
  return parser


def _shard(text: str) -> base.Shard:
  """Parses a shard such as '1/4'."""
  return base.Shard(*map(int, text.split('/')))


def _show(args: argparse.Namespace, config: Any) -> int:
  make_input = input_maker(config, args.split, args.set)
  is_training = args.split == 'train'
  shard = args.host or base.Shard(0, args.hosts or 1)
  host = f'host {shard.index} of {shard.count}'
  with contextlib.ExitStack() as stack:
    try:
      opened = show.open_input(make_input, is_training, shard)
      source = stack.enter_context(opened)
    except (ValueError, OSError, ImportError) as e:
      raise errors.UsageError(f'As {host}: {e}') from e
    kind = type(source).__name__
    text = kind if source.name == kind else f'{kind} {source.name!r}'
    if source.batch_size is not None:  # If None, the iterable decides.
      total = source.get_global_batch_size()
      text += f': {source.batch_size} rows a batch, {total} over all hosts'
    lines.print_text(f'{text}, for {host}')
    if isinstance(source, text_input.TextInput):
      lines.print_text(source.describe())
    if args.command == 'prepare':
      return 0
    for number, batch in enumerate(itertools.islice(source, args.n)):
      lines.print_text(f'\nbatch {number}\n{show.describe(batch)}')
      texts = show.texts(source, batch)
      marked = show.marked_texts(source, batch) if texts else {}
      for name, rows in texts.items():
        for row, shown in enumerate(rows):
          if name in marked:
            head = f'row {row} of {name}; text in ( ) has no weight'
            lines.print_text('\n  '.join([head, *marked[name][row]]))
            continue
          line = f'row {row} of {name}: {shown!r}'
          is_long = len(line) > show.WIDTH
          lines.print_text(f'{line[: show.WIDTH - 3]}...' if is_long else line)
  report = show.check(
    make_input,
    is_training=is_training,
    num_hosts=shard.count if args.host or args.hosts else 2,
    max_batches=args.max_batches,
    seconds=args.seconds,
  )
  lines.print_text(f'\n{report}')
  return 0 if report.ok else 1


@contextlib.contextmanager
def _logs_progress() -> Iterator[None]:
  """Within this context, logs the progress of the tokenization."""
  logger, verbosity = logging.get_absl_logger(), logging.get_verbosity()
  level = logger.level
  logging.set_verbosity(logging.INFO)
  try:
    yield
  finally:
    logging.set_verbosity(verbosity)
    logger.setLevel(level)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command and returns the exit status."""
  args, rest = _parser().parse_known_args(argv)
  try:
    config = platform.load_config(rest)
    if args.command == 'prepare':
      args.split = 'train'
      with _logs_progress():
        _show(args, config)
      args.split = 'eval'
    return _show(args, config)
  except errors.UsageError as e:
    lines.print_text(f'jaxline.inputs: {" ".join(str(e).split())}', sys.stderr)
    return 2


if __name__ == '__main__':
  # Use the CPU: a training run may hold all accelerators.
  jax.config.update('jax_platforms', 'cpu')
  sys.exit(main())
