"""`python -m jaxline.inputs`: `show` looks at a config's data, see show.py.

`tokenize` makes the tokens of text files before a run does; see text.py.

The exit status is 0; 1 where a check found something wrong; 2 where the command
line, the config or the input itself is refused, in one line on stderr.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import contextlib
import itertools
import math
import os
import sys
from typing import Any

from absl import logging
import jax

from jaxline import errors
from jaxline import mesh
from jaxline import platform
from jaxline.compat import adapters
from jaxline.inputs import base
from jaxline.inputs import show
from jaxline.inputs import text
from jaxline.inputs import token_cache

_NUM_ROWS = 2  # Of which the text is printed.


def input_maker(
  config: Any, split: str, eval_set: str | None = None
) -> Callable[..., Any]:
  """Returns a function that makes an experiment's input, as a run does.

  Args:
    config: the run's.
    split: 'train' or 'eval'.
    eval_set: which of several evaluation sets; None is the first.

  Returns:
    A function of a shard. It makes the experiment, but no weights, on a mesh of
    placeholders. If the experiment's method takes no `shard`, neither does the
    function.

  Raises:
    UsageError: the config names no experiment, or one without such a method.
  """
  experiment_class = platform.resolve_experiment_class(config)
  method = f'{split}_input'
  if not hasattr(experiment_class, method):
    raise platform.UsageError(
      f'{config.experiment_class} has no {method}(): experiments in the'
      ' per-device style read their data in step() and evaluate(), where it'
      ' cannot be looked at from outside. Those of sharded.ShardedExperiment'
      ' have one.'
    )

  def make(shard: base.Shard) -> Any:
    rng = jax.random.PRNGKey(config.random_seed)
    # Data needs no devices, so those of the run need not be here.
    with mesh.on_devices(_fitting_devices):
      experiment = adapters.construct(experiment_class, split, rng, config)
      found = base.of_shard(getattr(experiment, method), shard)
    sets = found if split == 'eval' and isinstance(found, Mapping) else {}
    if eval_set is not None:
      errors.check_names(
        [eval_set],
        sets,
        'evaluation set',
        config.experiment_class,
        '' if sets else ' Without several sets, leave --set out.',
      )
    return sets[eval_set or next(iter(sets))] if sets else found

  if show.takes_shard(getattr(experiment_class, method)):
    return make
  return lambda: make(base.process_shard())


def _fitting_devices(sizes: Any) -> Sequence[mesh.AbstractDevice]:
  """Returns placeholders for the smallest mesh of these sizes."""
  # A size may be -1: all that are left.
  ici, dcn = (math.prod(map(abs, x.values())) for x in mesh.check_sizes(sizes))
  return mesh.abstract_devices(ici * dcn, dcn)


def _host(text: str) -> tuple[int, int]:
  """Parses '1/4'."""
  index, count = map(int, text.split('/'))
  return index, count


_host.__name__ = 'INDEX/COUNT'  # For the message of argparse.


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.inputs',
    description="Looks at a run's data, without its model or accelerators.",
  )
  commands = parser.add_subparsers(required=True, metavar='COMMAND')
  what = (
    'print batches, and check what several hosts would read, whether a run'
    ' could resume exactly, and how fast it reads; exits with 1 if something is'
    ' wrong'
  )
  promises = '; '.join(f'{k}: {text}' for k, (text, _) in show.PROMISES.items())
  sub = commands.add_parser(
    'show',
    help=what,
    description=what,
    epilog=f'What is checked. {promises}.',
    usage='%(prog)s --config=FILE | --jaxline_run=DIR [--config.key=value ...]'
    ' [OPTION ...]',
    allow_abbrev=False,
  )
  sub.set_defaults(run=_show)
  for flag, kind, default, what in (
    ('-n', int, 3, 'batches to print'),
    ('--hosts', int, None, "hosts to compare; the default is --host's, or 2"),
    ('--batches', int, 20, 'batches of each host to compare'),
    ('--max_batches', int, 1000, 'batches to count, where the data ends'),
    ('--seconds', float, 1.0, 'how long to measure the speed'),
    ('--host', _host, None, 'which host to print, from 0, such as 1/4'),
    ('--set', str, None, 'which evaluation set; the default is the first'),
  ):
    is_shown = default is not None
    help_text = f'{what} (default: {default})' if is_shown else what
    sub.add_argument(flag, type=kind, default=default, help=help_text)
  sub.add_argument('--split', choices=('eval', 'train'), default='train')
  what = (
    'make the tokens that a run reads, which its first start would make: those'
    ' of the training data of a config, or of FILES'
  )
  sub = commands.add_parser(
    'tokenize',
    help=what,
    description=f'{what}. The options are arguments of text.load_corpus.',
    usage='%(prog)s --config=FILE [--config.key=value ...] | FILES ...',
    allow_abbrev=False,
    argument_default=argparse.SUPPRESS,  # `load_corpus` has the defaults.
  )
  sub.set_defaults(run=_tokenize)
  sub.add_argument(
    'files', nargs='*', default=[], help="folders, globs or 'stdlib'"
  )
  sub.add_argument('--tokenizer')
  sub.add_argument('--documents', choices=token_cache.KINDS)
  sub.add_argument('--eval_fraction', type=float)
  sub.add_argument('--cache_dir')
  return parser


def _tokenize(args: argparse.Namespace, rest: Sequence[str]) -> int:
  given = {k: v for k, v in vars(args).items() if k not in ('run', 'files')}
  misplaced = rest if args.files else given
  if misplaced:
    raise platform.UsageError(
      f'tokenize got the files {args.files}, the options {given} and the'
      f' arguments {list(rest)}; expected either FILES and options, or'
      ' --config=FILE (with an equals sign), whose fields say what is read.'
    )
  try:
    if not args.files:
      make_input = input_maker(platform.load_config(rest), 'train')
      print(_about(base.of_shard(make_input, base.process_shard())))
      return 0
    corpus = text.load_corpus(args.files, **given)
    folder = given.get('cache_dir') or token_cache.default_cache_dir()
    print(f'{corpus.summary}, in {folder}')
  except (ValueError, OSError, ImportError) as e:
    raise platform.UsageError(str(e)) from e
  return 0


def _show(args: argparse.Namespace, rest: Sequence[str]) -> int:
  config = platform.load_config(rest)
  host, count = args.host or (0, args.hosts or 1)
  if args.hosts not in (None, count):
    raise platform.UsageError(
      f'--host {host}/{count} is one of {count} hosts, but --hosts is'
      f' {args.hosts}. Leave --hosts out.'
    )
  make_input = input_maker(config, args.split, args.set)
  with contextlib.ExitStack() as stack:
    try:
      source, batches = stack.enter_context(
        show.opened(make_input, host, count)
      )
    except (ValueError, OSError, ImportError) as e:
      raise platform.UsageError(f'As host {host} of {count}: {e}') from e
    print(f'{_about(source)}, for host {host} of {count}')
    for number, batch in enumerate(itertools.islice(batches, args.n)):
      print(f'\nbatch {number}\n{show.describe(batch)}')
      for name, rows in show.texts(source, batch, _NUM_ROWS).items():
        for row, shown in enumerate(rows):
          print(show.shorten(f'row {row} of {name}: {shown!r}'))
  print(flush=True)
  report = show.check(
    make_input,
    num_hosts=count if args.host or args.hosts else 2,
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
  try:
    return args.run(args, rest)
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
  if sys.argv[1:2] == ['tokenize']:
    logging.set_verbosity(logging.INFO)  # How far it is.
  sys.exit(main())
