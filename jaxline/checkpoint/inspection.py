"""Looks into checkpoints: `python -m jaxline.checkpoint`, or from a notebook.

  inspection.list_run('runs/a')
  inspection.find('runs/a:4000').arrays('state/params/.*')
  inspection.main(['verify', 'runs/a'])

A place is the directory of a run, or its gs:// or s3:// address, or a series in
it (runs/a/checkpoints/best). :STEP after it names a step; without it, the place
means the newest checkpoint: of a run, the newest of `latest`, or else `best`.

Nothing is changed, claimed or unpickled. A run may go on writing there, and
remove what is looked at, which is an error that says so.

The exit status of the command is 0; 1 where `verify` finds damage; 2 for
another error, which is one line on stderr.
"""

import argparse
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import datetime
import functools
import json
import math
import os
import pathlib
import re
import sys
from typing import Any, BinaryIO, NamedTuple
import zipfile

import jax
import numpy as np

from jaxline import base_config
from jaxline import disk
from jaxline.checkpoint import arrays as arrays_lib
from jaxline.checkpoint import contents
from jaxline.checkpoint import manager
from jaxline.checkpoint import store as store_lib
from jaxline.metrics import jsonl
from jaxline.metrics import lines as lines_lib

Place = str | os.PathLike[str]  # As the module says.
PARAMS = 'state/params/'
AVERAGED = 'state/model_state/ema/'  # See `train_state.average_weights`.
DTYPES = ('float16', 'bfloat16', 'float32', 'float64')
_METRICS_SHOWN = 4
_WIDTH = 200  # Of a plain value that `show` prints.
_size = functools.partial(lines_lib.size, digits='.1f')


# Finding checkpoints.


class Found(NamedTuple):
  """One checkpoint."""

  manifests: manager.Manifests
  series: str
  step: int

  @property
  def name(self) -> str:
    """The place of its manifest."""
    return f'{self.manifests.store}/{self.series}/{self.step}'


def _locate(where: Place) -> tuple[store_lib.Store, list[Found]]:
  """Returns a run's store, and the checkpoints that are meant, by series."""
  text = os.path.expanduser(os.fspath(where))
  match = re.fullmatch(
    r'(.+?)(?:/checkpoints(?:/(\w+))?)?/?(?:(?<=[^/]):(\d+))?', text
  )
  if match is None or os.path.isdir(text):  # Its own name may end in :STEP.
    match = re.fullmatch(r'(.*?)(?:/checkpoints(?:/(\w+))?)?/?()', text)
  assert match is not None
  run = store_lib.at(match[1] or '/', 'restore_from')
  manifests = manager.Manifests(run.below('checkpoints'))
  series = [match[2]] if match[2] else ['latest', 'best']
  steps = {name: manifests.steps(name) for name in series}
  if not any(steps.values()) and not run.names('checkpoints'):
    raise ValueError(
      f'{text} is no directory of a run (config.checkpoint_dir, which has'
      ' checkpoints/) and no series in it (RUN/checkpoints/best).'
    )
  step = int(match[3]) if match[3] else None
  if step is not None and not any(step in x for x in steps.values()):
    raise ValueError(f'{run} has no step {step}. The steps are {steps}.')
  return run, [
    Found(manifests, name, s)
    for name in series
    for s in steps[name]
    if step in (None, s)
  ]


def newest(where: Place) -> Found:
  """Returns one checkpoint, the newest where no step is named.

  Raises:
    ValueError: there is none; says which there are.
  """
  _, found = _locate(where)
  if not found:
    raise ValueError(f'{os.fspath(where)} has no checkpoint yet.')
  return [x for x in found if x.series == found[0].series][-1]


def find(where: Place) -> 'Checkpoint':
  """Finds one checkpoint, the newest where no step is named.

  Raises:
    ValueError: there is none; says which there are.
    DamagedError: its manifest is not as it was written.
  """
  while True:
    with contextlib.suppress(store_lib.GoneError):  # There may be a newer one.
      return Checkpoint(*newest(where))


class Checkpoint(contents.Checkpoint):
  """One checkpoint, to be read as NumPy arrays; errors name it."""

  def names(self, select: str = '.*') -> list[str]:
    """Returns the names of the arrays that a pattern matches wholly.

    Raises:
      ValueError: it matches none.
    """
    names = [name for name in self.described if re.fullmatch(select, name)]
    if not names and select != '.*':
      raise ValueError(
        f'{self.name} has no array whose whole name matches {select!r}; it has'
        f' {list(self.described)[:8]}, ... (`show` lists them all; `export`'
        ' takes others by --select).'
      )
    return names

  def weights(self, which: str | None = None) -> str:
    """Returns the prefix that the names of the weights share.

    Args:
      which: 'raw', 'averaged', or None for the averaged weights if the run has
        some after a step (see `ShardedExperiment.eval_params`), else the raw.
    """
    if which is None:
      has_averaged = any(name.startswith(AVERAGED) for name in self.described)
      is_trained = self.record['step'] > 0
      which = 'averaged' if has_averaged and is_trained else 'raw'
    return {'raw': PARAMS, 'averaged': AVERAGED}[which]

  def arrays(self, select: str = '.*') -> dict[str, np.ndarray]:
    """Verifies and reads the arrays that a pattern matches wholly.

    Random keys come as their uint32 data.

    Raises:
      ValueError: it matches none.
      DamagedError: they are not as they were written.
    """
    return dict(self.verified(self.names(select)))

  def verified(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and array, verified, few at a time in memory."""
    wanted = dict.fromkeys(names)
    try:
      with manager.naming(self.name):
        yield from self.read(wanted)
    except store_lib.DamagedError as e:
      if self.is_there():
        raise
      raise store_lib.GoneError(f'{self.name} was removed meanwhile.') from e


# What a run has.


def list_run(where: Place) -> list[dict[str, Any]]:
  """Describes the checkpoints of a run, or of a series.

  Returns:
    `series`, `step`, `time` (seconds since 1970), `bytes`, `metrics` and
    `problem` of each, by series and step.

  Raises:
    ValueError: it is no such place.
  """
  run, found = _locate(where)
  metrics: dict[int, dict[str, Any]] = collections.defaultdict(dict)
  for step, scalars in logged(run):
    metrics[step] |= scalars
  rows = []
  for one in found:
    with contextlib.suppress(store_lib.GoneError):
      row = {'series': one.series, 'step': one.step, 'problem': None}
      rows.append(row | _described(one, metrics[one.step]))
  return rows


def _described(found: Found, metrics: Mapping[str, Any]) -> dict[str, Any]:
  """Returns time, size and metrics of a checkpoint, or its problem."""
  try:
    checkpoint = Checkpoint(*found)
  except store_lib.GoneError:
    raise
  except ValueError as e:  # Damaged, or of another version.
    return {'time': None, 'bytes': 0, 'metrics': {}, 'problem': str(e)}
  best = {}
  # As `metrics.jsonl` has it, since JSON has no infinity.
  keys = ['best_model_eval_metric', 'best_eval_metric_value']
  with contextlib.suppress(ValueError):  # Only a best one has them.
    name, value = checkpoint.entries(keys).values()
    best[f'best/{name}'] = value if math.isfinite(value) else str(value)
  return {
    'time': checkpoint.record['time'],
    'bytes': sum(map(arrays_lib.num_bytes, checkpoint.described.values())),
    'metrics': best | dict(metrics),
  }


def ended(run: store_lib.Store) -> int | None:
  """Returns the step at which a run's training has ended, or None."""
  raw = run.read('checkpoints/ended.json')
  return None if raw is None else int(json.loads(raw)['step'])


def logged(run: store_lib.Store) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields step and scalars, by 'folder/name', of each record in a run's logs.

  The values are as in `metrics.jsonl`, where text stands for NaN and infinity.
  What is no record, such as half a last line, is left out.
  """
  for folder in run.names():
    raw = run.read(f'{folder}/metrics.jsonl')
    for record in map(jsonl.read_record, (raw or b'').splitlines()):
      if record.get('kind') == 'scalars':
        names = [name for name in record if name not in jsonl.KEYS]
        yield record['step'], {f'{folder}/{n}': record[n] for n in names}


def made_with(record: Mapping[str, Any]) -> dict[str, str]:
  """Returns the code, the devices and the versions of a checkpoint."""
  return {
    'devices': ' '.join(map(str, record['devices'])),
    **{f'version of {k}': str(x) for k, x in record['versions'].items()},
    **{f'code: {k}': x for k, x in record['code'].items() if k != 'diff'},
  }


# The command line.


def _when(seconds: float) -> str:
  local = datetime.datetime.fromtimestamp(seconds).astimezone()
  return local.isoformat(' ', 'seconds')


def print_table(
  rows: Iterable[Sequence[str]], title: str = '', right: Sequence[int] = ()
) -> None:
  """Prints columns, of which some are aligned on the right, if any."""
  rows = list(rows)
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
  rows = [
    (
      row['series'],
      str(row['step']),
      _size(row['bytes']),
      _when(row['time']) if row['time'] else '',
      row['problem'] or _metrics(row['metrics']),
    )
    for row in list_run(args.dir)
  ]
  header = ('series', 'step', 'size', 'saved', 'metrics')
  print_table([header, *rows], right=(1, 2))
  return 0


def _metrics(metrics: Mapping[str, Any]) -> str:
  """Returns a few metrics: the best value and losses before others."""
  names = sorted(
    metrics, key=lambda n: (not n.startswith('best/'), 'loss' not in n, n)
  )
  shown = {n: metrics[n] for n in names[:_METRICS_SHOWN]}
  return ', '.join(
    f'{n} {x:.6g}' if isinstance(x, float) else f'{n} {x}'
    for n, x in shown.items()
  )


def _show(args: argparse.Namespace) -> int:
  checkpoint = find(args.dir)
  record, described = checkpoint.record, checkpoint.described
  bytes_of = {n: arrays_lib.num_bytes(x) for n, x in described.items()}
  num_params = sum(
    math.prod(x['shape']) for n, x in described.items() if n.startswith(PARAMS)
  )
  rows = [
    ('checkpoint', checkpoint.name),
    ('step', str(record['step'])),
    ('saved', _when(record['time'])),
    ('size', _size(sum(bytes_of.values()))),
    ('processes', str(len(record['processes']))),
    *made_with(record).items(),
    ('parameters', f'{num_params:,} below {PARAMS[:-1]}'),
  ]
  print_table(rows)
  if args.config:
    config = base_config.flat(record['config'])
    print_table([(key, repr(x)) for key, x in config.items()], 'config')
  parts = {f'run/{k}': x for k, x in record['entries'].items()}
  whole = {'': record['module']}
  whole |= {
    f'process {i}/': entries for i, entries in enumerate(record['processes'])
  }
  for prefix, entries in whole.items():
    for key, x in entries.items():
      if 'structure' in x:
        parts[prefix + key] = x['structure']
  # As it is stored: a class need not be there, and nothing is unpickled.
  values = [(key, json.dumps(x)[:_WIDTH]) for key, x in parts.items()]
  print_table(values, 'values')
  arrays = [
    (name, arrays_lib.saved_shape(x), _size(bytes_of[name]))
    for name, x in described.items()
  ]
  print_table(arrays, 'arrays', right=(2,))
  return 0


def _verify(args: argparse.Namespace) -> int:
  damaged = num = 0
  for found in _locate(args.dir)[1]:
    try:
      checkpoint = Checkpoint(*found)
      problems = arrays_lib.verify(checkpoint.data, checkpoint.described)
      if problems and not checkpoint.is_there():
        continue  # It was removed before all was read.
    except store_lib.GoneError:
      continue
    except ValueError as e:
      problems = [str(e)]
    num += 1
    damaged += bool(problems)
    verdict = f'DAMAGED: {"; ".join(problems)}' if problems else 'ok'
    print(f'{found.series}/{found.step}  {verdict}', flush=True)
  print(f'{num} checkpoints, {damaged} damaged')
  return 1 if damaged else 0


def _export(args: argparse.Namespace) -> int:
  disk.check_local(args.out, 'OUT')
  out = pathlib.Path(args.out).expanduser()
  formats = {'.safetensors': _write_safetensors, '.npz': _write_npz}
  if (write := formats.get(out.suffix)) is None:
    raise ValueError(
      f'{out} ends in {out.suffix!r}; expected one of {list(formats)}.'
    )
  if out.exists() and not args.force:
    raise FileExistsError(
      f'{out} is there already; give another name, or --force to replace it.'
    )
  checkpoint = find(args.dir)
  prefix = checkpoint.weights(args.weights)
  names = checkpoint.names(args.select or f'{prefix}.*')
  if args.select:
    prefix = PARAMS if all(name.startswith(PARAMS) for name in names) else ''
  arrays = (
    (name.removeprefix(prefix), _converted(name, x, args.dtype))
    for name, x in checkpoint.verified(names)
  )
  with disk.replacing(out) as file:
    write(file, arrays)
  size = _size(out.stat().st_size)
  print(f'{len(names)} arrays, {size}, in {args.out}')
  return 0


def _converted(name: str, x: np.ndarray, dtype: str | None) -> np.ndarray:
  if dtype is None or not jax.dtypes.issubdtype(x.dtype, np.floating):
    return np.require(x, requirements='C')
  with np.errstate(over='ignore'):
    y = x.astype(dtype)
  if np.any(np.isfinite(x) & ~np.isfinite(y)):
    raise ValueError(
      f'{name} has values beyond the range of {dtype}; choose another --dtype.'
    )
  return y


def _write_safetensors(
  file: BinaryIO, arrays: Iterator[tuple[str, np.ndarray]]
) -> None:
  import safetensors.numpy

  try:
    safetensors.numpy.save_file(dict(arrays), file.name)
    with open(file.name, 'rb+') as written:  # Another file under that name.
      os.fsync(written.fileno())
  except safetensors.SafetensorError as e:
    raise ValueError(
      f'.safetensors could not be written: {e}. If it cannot hold these types,'
      ' choose others with --select, or export to .npz.'
    ) from e


def _write_npz(
  file: BinaryIO, arrays: Iterator[tuple[str, np.ndarray]]
) -> None:
  # np.savez could not save an array called 'file'.
  with zipfile.ZipFile(file, 'w') as archive:
    for name, x in arrays:
      # NumPy's own format has no name for the types of other packages.
      if x.dtype.isbuiltin == 2:
        raise ValueError(
          f'.npz cannot hold {name!r}, which is {x.dtype.name}: convert with'
          ' --dtype=float32, or export to .safetensors.'
        )
      with archive.open(f'{name}.npy', 'w', force_zip64=True) as f:
        np.lib.format.write_array(f, x, allow_pickle=False)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command.

  Args:
    argv: its arguments; None are those of the process.

  Returns:
    The exit status.

  Raises:
    SystemExit: the arguments are not understood (status 2), or ask for help.
  """
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.checkpoint',
    description='Looks into checkpoints; changes nothing.',
  )
  commands = parser.add_subparsers(required=True, metavar='COMMAND')

  def add(
    run: Callable[[argparse.Namespace], int], about: str, **arguments: str
  ) -> argparse.ArgumentParser:
    name = run.__name__.strip('_')
    command = commands.add_parser(name, help=about, description=about)
    command.set_defaults(run=run)
    for argument, text in arguments.items():
      command.add_argument(argument, help=text)
    return command

  where = (
    'directory or address of a run, or a series in it (RUN/checkpoints/best);'
    ' with :STEP, else '
  )
  newest, everything = f'{where}the newest', f'{where}all of it'
  about = 'list series, steps, sizes, times, metrics'
  add(_ls, about, dir='directory of a run or of a series')
  show = add(_show, 'what a checkpoint holds', dir=newest)
  show.add_argument('--config', action='store_true', help="the run's config")
  about = 'is every part as it was written? exits with 1 if not'
  add(_verify, about, dir=everything)
  about = 'write parameters to one file'
  export = add(_export, about, dir=newest, out='file .safetensors or .npz')
  what = export.add_mutually_exclusive_group()
  what.add_argument(
    '--weights',
    choices=('raw', 'averaged'),
    help='which parameters; the averaged ones, if there are, by default',
  )
  what.add_argument(
    '--select',
    metavar='REGEX',
    help='arrays whose whole name matches, instead of the parameters',
  )
  export.add_argument('--dtype', choices=DTYPES, help='convert floating point')
  export.add_argument('--force', action='store_true', help='replace OUT')
  args = parser.parse_args(argv)
  try:
    return args.run(args)
  except BrokenPipeError:
    # Whoever read, such as `head`, has read enough; nothing more is written.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except (ValueError, OSError, ImportError, MemoryError, re.error) as e:
    text = ' '.join(str(e).split()) or type(e).__name__
  print(f'jaxline.checkpoint: {text}', file=sys.stderr)
  return 2
