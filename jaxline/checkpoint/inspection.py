"""Lists, reads and verifies checkpoints: `python -m jaxline.checkpoint`.

In a notebook:

  inspection.list_run('runs/a')
  inspection.find('runs/a:4000').arrays('state/params/.*')
  inspection.main(['verify', 'runs/a'])

A place is a run's directory, its gs:// or s3:// address, or a series in it
(runs/a/checkpoints/best). Append :STEP to choose a step. Else `ls` and `verify`
use all checkpoints, and other commands the newest of `latest`, else of `best`.

The commands change, claim and unpickle nothing. They exit with code 0 on
success, 1 if `verify` finds damage, and 2 on any other error.
"""

import argparse
import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import datetime
import json
import math
import os
import pathlib
import re
import shlex
import sys
from typing import Any

from jaxline.base import disk
from jaxline.checkpoint import arrays as arrays_lib
from jaxline.checkpoint import contents
from jaxline.checkpoint import manifests as manifests_lib
from jaxline.metrics import files
from jaxline.metrics import lines
from jaxline.run_directory import sources
from jaxline.run_directory import store as store_lib

Place = str | os.PathLike[str]  # The module's docstring defines the forms.
_METRICS_SHOWN = 4
_WIDTH = 200  # `show` cuts plain values to this many characters.


# Finding checkpoints.


def _locate(
  where: Place, name: str | None = None
) -> tuple[store_lib.Store, list[contents.Checkpoint]]:
  """Resolves a place to a run's store and its checkpoints, by series."""
  text = os.path.expanduser(os.fspath(where))
  place, _, number = text.rpartition(':')
  # The name of a directory may itself end in :STEP.
  if not number.isdecimal() or os.path.isdir(text):
    place, number = text, ''
  run, series = store_lib.at(place, 'restore_from'), ['latest', 'best']
  match = re.fullmatch(r'(.*)/checkpoints(?:/(\w+))?/*', place)
  # The directory of a run may itself be named checkpoints.
  if match and not run.names('checkpoints'):
    run = store_lib.at(match[1] or '/', 'restore_from')
    series = [match[2]] if match[2] else series
  series = [name] if name else series
  manifests = manifests_lib.Manifests(run.below('checkpoints'))
  steps = {name: manifests.by_time(name)[::-1] for name in series}
  if not any(steps.values()) and not run.names('checkpoints'):
    raise ValueError(
      f'{text} is not the directory of a run (with checkpoints/ in it), nor a'
      ' series such as RUN/checkpoints/best.'
    )
  found = [
    contents.Checkpoint(manifests, name, step)
    for name in series
    for step in steps[name]
    if not number or step == int(number)
  ]
  if number and not found:
    raise ValueError(f'{run} has no step {number}. It has the steps {steps}.')
  return run, found


def find(where: Place, series: str | None = None) -> contents.Checkpoint:
  """Returns one checkpoint: the newest, unless the place names a step."""
  _, found = _locate(where, series)
  if not found:
    raise ValueError(f'{os.fspath(where)} has no checkpoint yet.')
  return [x for x in found if x.series == found[0].series][-1]


# The checkpoints and logs of a run.


def list_run(where: Place, series: str | None = None) -> list[dict[str, Any]]:
  """Describes the checkpoints of a run, or of a series.

  Returns:
    A dict for each checkpoint, the newest of a series last. Its keys: `series`,
    `step`, `time` (seconds since 1970), `bytes`, `metrics` and `problem`.
  """
  run, found = _locate(where, series)
  metrics: dict[int, dict[str, Any]] = collections.defaultdict(dict)
  for step, scalars in read_log(run):
    metrics[step] |= scalars
  rows = []
  for checkpoint in found:
    step = checkpoint.step
    row: dict[str, Any] = {'series': checkpoint.series, 'step': step}
    row |= {'time': None, 'bytes': 0, 'metrics': {}, 'problem': None}
    try:
      record, entries = checkpoint.record, checkpoint.record['entries']
      row |= {'time': record['time'], 'bytes': _num_bytes(record)}
      if (value := entries.get('best_eval_metric_value')) is not None:
        row['metrics'] = {f'best/{entries["best_model_eval_metric"]}': value}
      row['metrics'] |= metrics[step]
    except store_lib.GoneError:
      continue
    except ValueError as e:  # The manifest is damaged or of a different format.
      row['problem'] = str(e)
    rows.append(row)
  return rows


def _num_bytes(record: Mapping[str, Any]) -> int:
  return sum(map(arrays_lib.num_bytes, record['arrays'].values()))


def read_log(run: store_lib.Store) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields (step, {'folder/name': scalar}) for each record in a run's logs.

  NaN and infinity are text. An incomplete last line is skipped.
  """
  for folder in run.names():
    try:
      raw = run.read(f'{folder}/metrics.jsonl')
    except disk.ForeignFileError:
      if folder in store_lib.LINKS:
        raise
      continue  # The user may have added a link to something else.
    for record in map(files.parse_record, (raw or b'').splitlines()):
      if record.get('kind') == 'scalars':
        names = [name for name in record if name not in files.KEYS]
        yield record['step'], {f'{folder}/{n}': record[n] for n in names}


def made_with(record: Mapping[str, Any]) -> dict[str, str]:
  """Returns the devices, the versions and the code of a checkpoint."""
  return {
    'devices': ' '.join(map(str, record['devices'])),
    **{f'version of {k}': str(x) for k, x in record['versions'].items()},
    **{f'code: {k}': str(x) for k, x in record['code'].items() if k != 'diff'},
  }


# The command line.


def _when(seconds: float) -> str:
  local = datetime.datetime.fromtimestamp(seconds).astimezone()
  return local.isoformat(' ', 'seconds')


def _size(num_bytes: float) -> str:
  return lines.size(num_bytes, '.1f')


def print_table(
  rows: Iterable[Sequence[str]], right: Sequence[int] = ()
) -> None:
  """Prints rows in columns; the columns in `right` are right-aligned."""
  rows = [[x.replace('\n', r'\n') for x in map(lines.escaped, r)] for r in rows]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    cells = (
      cell.rjust(width) if i in right else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    lines.print_text('  '.join(cells).rstrip())


def _ls(args: argparse.Namespace) -> int:
  """Lists series, steps, sizes, times and metrics."""
  table = [('series', 'step', 'size', 'saved', 'metrics')]
  for row in list_run(args.dir, args.series):
    shown = ', '.join(
      f'{name} {x:.6g}' if isinstance(x, float) else f'{name} {x}'
      for name, x in sorted(row['metrics'].items())[:_METRICS_SHOWN]
    )
    when = _when(row['time']) if row['time'] else ''
    about = (_size(row['bytes']), when, row['problem'] or shown)
    table.append((row['series'], str(row['step']), *about))
  print_table(table, right=(1, 2))
  return 0


def _show(args: argparse.Namespace) -> int:
  """Prints the origin, the values and the arrays of one checkpoint."""
  checkpoint = find(args.dir, args.series)
  record, described = checkpoint.record, checkpoint.described
  names = [name for name in described if name.startswith(contents.PARAMS)]
  num_params = sum(math.prod(described[name]['shape']) for name in names)
  rows = [
    ('checkpoint', checkpoint.name),
    ('step', str(record['step'])),
    ('saved', _when(record['time'])),
    ('size', _size(_num_bytes(record))),
    ('processes', str(len(record['processes']))),
    *made_with(record).items(),
    ('parameters', f'{num_params:,} below {contents.PARAMS[:-1]}'),
  ]
  store = checkpoint.manifests.store
  if key := sources.place(store, record['code'].get('files')):
    archive = shlex.quote(f'{store}/{key}')
    rows.append(('to see the code', f'python -m zipfile -e {archive} DIR'))
  print_table(rows)
  # Print values in their stored form, which needs no classes and no unpickling.
  parts = {f'run/{k}': x for k, x in record['entries'].items()}
  parts |= record['module']
  for i, own in enumerate(record['processes']):
    parts |= {f'process {i}/{k}': x['structure'] for k, x in own.items()}
  lines.print_text('\nvalues')
  print_table([(key, json.dumps(x)[:_WIDTH]) for key, x in parts.items()])
  lines.print_text('\narrays')
  arrays = [
    (name, arrays_lib.saved_shape(x), _size(arrays_lib.num_bytes(x)))
    for name, x in described.items()
  ]
  print_table(arrays, right=(2,))
  return 0


def _verify(args: argparse.Namespace) -> int:
  """Verifies the checksum of every part; exits with 1 if one is damaged."""
  damaged = num = 0
  for checkpoint in _locate(args.dir, args.series)[1]:
    try:
      with checkpoint.reading():
        arrays_lib.verify(checkpoint.data, checkpoint.described)
      problem = ''
    except store_lib.GoneError:
      continue
    except ValueError as e:
      problem = f'DAMAGED: {e}'
    num += 1
    damaged += bool(problem)
    lines.print_text(
      f'{checkpoint.series}/{checkpoint.step}  {problem or "ok"}'
    )
  lines.print_text(f'{num} checkpoints, {damaged} damaged')
  return 1 if damaged else 0


def _export(args: argparse.Namespace) -> int:
  """Writes the weights of one checkpoint to a file."""
  import safetensors.numpy

  out = pathlib.Path(args.out).expanduser()
  if out.exists():
    raise FileExistsError(f'{out} already exists. Give a different name.')
  checkpoint = find(args.dir, args.series)
  prefix = checkpoint.weights(args.weights)
  arrays = checkpoint.arrays(f'{prefix}.*')
  arrays = {name.removeprefix(prefix): x for name, x in arrays.items()}
  others = checkpoint.model_state()
  with checkpoint.reading():
    wanted = dict.fromkeys(others if args.model_state else ())
    for name, x in checkpoint.read(wanted):
      if arrays.setdefault(name.removeprefix('state/'), x) is not x:
        raise ValueError(f'{checkpoint.name} has weights below model_state/.')
  config = json.dumps(checkpoint.record['config'])
  about = {'step': str(checkpoint.step), 'config': config}
  with disk.replacing(out) as file:
    file.write(safetensors.numpy.save(arrays, about))
  size = _size(out.stat().st_size)
  lines.print_text(f'{len(arrays)} arrays, {size}, in {args.out}')
  if others and not args.model_state:
    lines.print_text(
      f'Left out {len(others)} arrays of model_state, such as {others[0]}. To'
      ' write them, add --model_state.'
    )
  return 0


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line in `argv`; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.checkpoint',
    description='Lists, shows, verifies and exports checkpoints.',
  )
  commands = parser.add_subparsers(required=True, metavar='COMMAND')
  place = 'directory or address of a run, or of a series in it, plus any :STEP'
  for run in (_ls, _show, _verify, _export):
    name, about = run.__name__.strip('_'), run.__doc__
    command = commands.add_parser(name, help=about, description=about)
    command.set_defaults(run=run)
    command.add_argument('dir', metavar='RUN', help=place)
    about = 'series; default: latest, then best'
    command.add_argument('--series', choices=('latest', 'best'), help=about)
  # The last command is `export`, which has more arguments.
  command.add_argument('out', metavar='FILE', help='.safetensors file to write')
  about = 'default: averaged, if the run has averaged weights, else raw'
  command.add_argument('--weights', choices=('raw', 'averaged'), help=about)
  about = 'write non-trained state too, such as BatchNorm statistics'
  command.add_argument('--model_state', action='store_true', help=about)
  args = parser.parse_args(argv)
  try:
    return args.run(args)
  except (ValueError, OSError, ImportError, MemoryError) as e:
    text = ' '.join(str(e).split()) or type(e).__name__
  lines.print_text(f'jaxline.checkpoint: {text}', sys.stderr)
  return 2
