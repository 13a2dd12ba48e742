"""`python -m jaxline.checkpoint ls|show|diff|verify|export`: see inspection.py.

The exit status is 0; 1 where two checkpoints differ, where `verify` finds
damage, and where a checkpoint holds what no save writes (a link, an array that
is not there); 2 for another error. An error is one line on stderr. Control
characters in what a file says are printed as escapes.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
import datetime
import json
import math
import os
import pathlib
import re
import sys
from typing import Any

from jaxline.checkpoint import files
from jaxline.checkpoint import inspection
from jaxline.checkpoint import storage

_METRICS_SHOWN = 4
_WIDTH = 60  # Of a plain value that `show` prints.


def _size(num_bytes: float) -> str:
  """Returns a size for people: '1.5 MiB'."""
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if num_bytes < 1024:
      return f'{num_bytes:.{0 if unit == "B" else 1}f} {unit}'
    num_bytes /= 1024
  return f'{num_bytes:.1f} TiB'


def _when(seconds: float) -> str:
  local = datetime.datetime.fromtimestamp(seconds).astimezone()
  return local.isoformat(' ', 'seconds')


def _number(value: Any) -> str:
  return f'{value:.6g}' if isinstance(value, float) else str(value)


def print_table(
  rows: Iterable[Sequence[str]], title: str = '', right: Sequence[int] = ()
) -> None:
  """Prints columns, of which some are aligned on the right, if any."""
  rows = [[files.printable(cell) for cell in row] for row in rows]
  if not rows:
    return
  if title:
    print(f'\n{title}')
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    cells = (
      cell.rjust(width) if i in right else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    print(('  ' * bool(title) + '  '.join(cells)).rstrip())


def _ls(args: argparse.Namespace) -> int:
  listed = inspection.list_run(args.dir)
  found = [(name, row) for name, x in listed['series'].items() for row in x]
  is_refused = any(row['refused'] for _, row in found)
  if args.json:
    print(json.dumps(listed, indent=1))
    return int(is_refused)
  if listed['run'] is not None:
    print_table(_about_run(listed))
    print()
  header = ('series', 'step', 'size', 'saved', 'metrics')
  rows = [
    (
      series,
      pathlib.Path(row['path']).name,
      _size(row['bytes']),
      _when(row['time']),
      row['problem'] or _metrics(row['metrics']),
    )
    for series, row in found
  ]
  if rows:
    print_table([header, *rows], right=(1, 2))
  else:
    print('No checkpoints yet.')
  for path in listed['damaged']:
    print(f'set aside as damaged: {files.printable(path)}')
  return int(is_refused)


def _metrics(metrics: Mapping[str, Any]) -> str:
  """Returns a few metrics: the best value and losses before others."""
  names = sorted(
    metrics, key=lambda n: (not n.startswith('best/'), 'loss' not in n, n)
  )
  return ', '.join(f'{n} {_number(metrics[n])}' for n in names[:_METRICS_SHOWN])


def _about_run(listed: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Returns a line on the run, on its training, on each claim."""
  active = [c for c in listed['claims'] if c['alive'] is not False]
  state = inspection.state_of(listed['ended'], listed['claims'])
  training = {
    'ended': f'ended at step {listed["ended"]}',
    'running': 'is running',
    'stopped': 'has not ended, and is not running',
    'unknown': 'has not ended; whether it is running cannot be told here',
  }[state]
  rows = [('run', listed['run']), ('training', training)]
  for c in active:
    owner = f'process {c["pid"]} on {c["host"]}'
    perhaps = '' if c['alive'] else ' (perhaps no longer)'
    rows.append((f'{c["what"]} claimed by', owner + perhaps))
  return rows


def _show(args: argparse.Namespace) -> int:
  checkpoint = inspection.find(args.dir)
  checkpoint.check()
  record, described = checkpoint.record, checkpoint.described
  values = checkpoint.values()
  num_params = sum(
    math.prod(about['shape'])
    for name, about in described.items()
    if name.startswith(inspection.PARAMS)
  )
  versions = ', '.join(f'{k} {v}' for k, v in record['versions'].items())
  rows = [
    ('checkpoint', str(checkpoint.path)),
    ('step', str(record['step'])),
    ('saved', _when(record['time'])),
    ('size', _size(sum(map(inspection.bytes_of, described.values())))),
    ('processes', f'{record["processes"]}, with {record["devices"]} devices'),
    ('versions', versions),
    ('parameters', f'{num_params:,} below {inspection.PARAMS[:-1]}'),
  ]
  print_table(rows)
  if args.config:
    print_table(inspection.config_texts(checkpoint).items(), 'config')
  print_table([(k, x[:_WIDTH]) for k, x in values.items()], 'values')
  arrays = [
    (name, storage.saved_shape(about), _size(inspection.bytes_of(about)))
    for name, about in described.items()
  ]
  print_table(arrays, 'arrays', right=(2,))
  return 0


def _diff(args: argparse.Namespace) -> int:
  found = inspection.compare(args.a, args.b)
  for title in ('config', 'values', 'arrays'):
    if rows := getattr(found, title):
      print_table([('', 'A', 'B'), *rows], title)
  if found.numbers:
    rows = [('', 'max |A-B|', '||A-B|| / ||A||')]
    for name, distance in found.numbers.items():
      rows.append((name, *map(_number, distance or ('', ''))))
    print_table(rows, 'numbers', right=(1, 2))
  common = len(found.identical) + len(found.numbers)
  print(f'{len(found.identical)} of {common} common arrays are bit-identical.')
  return 0 if found.same else 1


def _verify(args: argparse.Namespace) -> int:
  damaged = num = 0
  for path, problems in inspection.verify(args.dir):
    num += 1
    damaged += bool(problems)
    verdict = f'DAMAGED: {"; ".join(problems)}' if problems else 'ok'
    line = f'{path.parent.name}/{path.name}  {verdict}'
    print(files.printable(line), flush=True)
  print(f'{num} checkpoints, {damaged} damaged')
  return 1 if damaged else 0


def _export(args: argparse.Namespace) -> int:
  names = inspection.export(
    args.dir, args.out, select=args.select, dtype=args.dtype, force=args.force
  )
  size = pathlib.Path(args.out).expanduser().stat().st_size
  print(f'{len(names)} arrays, {_size(size)}, in {args.out}')
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.checkpoint',
    description='Looks into checkpoints; changes nothing.',
  )
  commands = parser.add_subparsers(required=True, metavar='COMMAND')
  where = (
    'directory of a run, of a series (RUN/checkpoints/best) or of a checkpoint;'
    ' with :STEP, else the newest'
  )

  def command(
    name: str, run: Any, text: str, **arguments: str
  ) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(run=run)
    for argument, about in arguments.items():
      sub.add_argument(argument, help=about)
    return sub

  text = 'list series, steps, sizes, times, metrics'
  ls = command('ls', _ls, text, dir='directory of a run or of a series')
  ls.add_argument('--json', action='store_true', help='the same as JSON')
  show = command('show', _show, 'what a checkpoint holds', dir=where)
  show.add_argument('--config', action='store_true', help="the run's config")
  text = 'compare two; exits with 0 if they are the same, 1 if not'
  command('diff', _diff, text, a=where, b='likewise')
  text = 'is every file as it was written? exits with 1 if not'
  everything = where.replace('the newest', 'all of it')
  command('verify', _verify, text, dir=everything)
  text = 'write parameters to one file'
  to = 'file .safetensors or .npz'
  out = command('export', _export, text, dir=where, out=to)
  out.add_argument(
    '--select',
    metavar='REGEX',
    default=f'{inspection.PARAMS}.*',
    help='arrays whose whole name matches, instead of the parameters',
  )
  out.add_argument(
    '--dtype', choices=inspection.DTYPES, help='convert floating point'
  )
  out.add_argument('--force', action='store_true', help='replace OUT')
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command.

  Args:
    argv: its arguments; None are those of the process.

  Returns:
    The exit status.

  Raises:
    SystemExit: the arguments are not understood (status 2), or ask for help.
  """
  args = _parser().parse_args(argv)
  try:
    return args.run(args)
  except BrokenPipeError:
    # Whoever read, such as `head`, has read enough; nothing more is written.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except RecursionError:
    text, status = 'the checkpoint is nested too deeply', 1
  except (ValueError, OSError, ImportError, MemoryError, re.error) as e:
    text = ' '.join(str(e).split()) or type(e).__name__
    status = 1 if isinstance(e, files.RefusedError) else 2
  print(f'jaxline.checkpoint: {files.printable(text)}', file=sys.stderr)
  return status
