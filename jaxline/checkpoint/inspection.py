"""Looks into checkpoints: `python -m jaxline.checkpoint`, or from a notebook.

  inspection.list_run('runs/a')
  inspection.find('runs/a:4000').arrays('state/params/.*')
  inspection.main(['diff', 'runs/a:4000', 'runs/b'])

A place is the directory of a run, of a series (runs/a/checkpoints/best) or of
one checkpoint. :STEP after one of the former two means that step, else it is
the newest; of a run, that of `latest`, or of `best` if there is no other.

Nothing is changed, claimed or unpickled. A run may go on writing there, and
remove what is looked at, which is an error that says so.

The exit status of the command is 0; 1 where two checkpoints differ, where
`verify` finds damage, and where a checkpoint holds what no save writes (a link,
an array that is not there); 2 for another error. An error is one line on
stderr. Control characters in what a file says are printed as escapes.
"""

import argparse
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import datetime
import fcntl
import functools
import io
import itertools
import json
import math
import os
import pathlib
import re
import socket
import struct
import sys
from typing import Any, BinaryIO
import zipfile

import jax
import numpy as np

from jaxline import base_config
from jaxline import disk
from jaxline.checkpoint import arrays as arrays_lib
from jaxline.checkpoint import contents
from jaxline.checkpoint import files
from jaxline.checkpoint import structure
from jaxline.metrics import lines as lines_lib
from jaxline.metrics import writers

Place = str | os.PathLike[str]  # As the module says.
PARAMS = 'state/params/'
DTYPES = ('float16', 'bfloat16', 'float32', 'float64')
_COMPARED = 1 << 20  # Elements compared at a time: as float64 they take more.
_METRICS_SHOWN = 4
_WIDTH = 60  # Of a plain value that `show` prints.
_size = functools.partial(lines_lib.size, digits='.1f')


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
  with files.reading(path), files.well_formed():
    yield


# Finding checkpoints.


def _locate(
  where: Place,
) -> tuple[pathlib.Path | None, dict[str, list[pathlib.Path]]]:
  """Returns a run's directory, and series -> its checkpoints that are meant."""
  text, step = os.fspath(where), None
  disk.check_local(text, 'The place')
  if not os.path.exists(text) and (match := re.fullmatch(r'(.+):(\d+)', text)):
    text, step = match[1], int(match[2])
  path = pathlib.Path(os.path.abspath(os.path.expanduser(text)))
  near = (path / 'checkpoints', path, path.parent, path.parent.parent)
  root = next((p for p in near if p.name == 'checkpoints' and p.is_dir()), None)
  run = None if root is None else root.parent
  if any(os.path.lexists(path / f) for f in (files.RECORD, 'checksums_0.json')):
    if step is not None:
      raise ValueError(f'{path} is one checkpoint; leave :{step} out.')
    if path.is_symlink():  # By which the user means the checkpoint.
      path = path.resolve()
    return run, {path.parent.name: [path]}
  if root is not None and path in (run, root):
    latest_first = sorted(root.iterdir(), key=lambda p: (p.name != 'latest', p))
    # Evaluation keeps what it reads in a folder whose name begins with a dot.
    folders = [p for p in latest_first if files.steps(p) and p.name[0] != '.']
  elif path.is_dir() and (root == path.parent or files.steps(path)):
    folders = [path]
  else:
    raise ValueError(
      f'{path} is no directory of a run (config.checkpoint_dir, which has'
      ' checkpoints/), of a series in it (RUN/checkpoints/best) or of a'
      ' checkpoint.'
    )
  there = {p.name: files.steps(p) for p in folders}
  if step is not None and not any(step in steps for steps in there.values()):
    raise ValueError(f'{path} has no step {step}. The steps are {there}.')
  return run, {
    p.name: [p / str(s) for s in there[p.name] if step in (None, s)]
    for p in folders
  }


def newest(where: Place) -> pathlib.Path:
  """Returns one checkpoint, the newest where no step is named.

  Raises:
    ValueError: there is none; says which there are.
  """
  paths = next(filter(None, _locate(where)[1].values()), None)
  if paths is None:
    raise ValueError(f'{os.fspath(where)} has no checkpoint yet.')
  return paths[-1]


def find(where: Place) -> 'Checkpoint':
  """Finds one checkpoint, the newest where no step is named.

  Raises:
    ValueError: there is none; says which there are.
    files.DamagedError: what it says of itself is not as it was written.
  """
  while True:
    with contextlib.suppress(files.GoneError):  # There may be a newer one.
      return Checkpoint(newest(where))


class Checkpoint(contents.Checkpoint):
  """One checkpoint, to be read as NumPy arrays; errors name it."""

  def __init__(self, path: pathlib.Path):
    """Opens a checkpoint, and verifies all of it but the arrays.

    Raises:
      files.RefusedError: it holds what no save writes.
      files.DamagedError: it is not as it was written.
      ValueError: a later version wrote it.
    """
    with _reading(path):
      super().__init__(path)
      self.require_arrays(lambda name: False)

  def names(self, select: str = '.*') -> list[str]:
    """Returns the names of the arrays that a pattern matches wholly.

    Raises:
      ValueError: it matches none.
    """
    names = [name for name in self.described if re.fullmatch(select, name)]
    if not names and select != '.*':
      raise ValueError(
        f'{self.path} has no array whose whole name matches {select!r}; it has'
        f' {list(self.described)[:8]}, ... (`show` lists them all; `export`'
        ' takes others by --select).'
      )
    return names

  def arrays(self, select: str = '.*') -> dict[str, np.ndarray]:
    """Verifies and reads the arrays that a pattern matches wholly.

    Random keys come as their uint32 data.

    Raises:
      ValueError: it matches none.
      files.DamagedError: they are not as they were written.
    """
    return dict(self.verified(self.names(select)))

  def verified(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Verifies arrays, then yields name and array, few at a time in memory."""
    wanted = dict.fromkeys(names)
    with _reading(self.path):
      self.require_arrays(wanted.__contains__)
      yield from self.read(wanted)

  def texts(self) -> dict[str, dict[str, str]]:
    """Returns what it holds, as text by name: config, values, arrays.

    Of arrays it is type and shape; none is read, but all are there. The values
    are all that is no array of its own. None is put together: a class need not
    be there, nothing is unpickled.
    """
    with _reading(self.path):
      self.check()
      module = self.record['module'].items()
      parts = {f'run/{k}': v for k, v in self.record['entries'].items()}
      parts |= {k: x['structure'] for k, x in module if 'structure' in x}
      parts |= {f'run/{k}': v for k, v in self.extra['entries'].items()}
      small = dict(self.extra['arrays'])
      for i in range(self.record['processes']):
        for key, about in self.of_process(i).items():
          parts[f'process {i}/{key}'] = about['structure']
          small |= {f'process {i}/{n}': x for n, x in about['arrays'].items()}
      values: dict[str, str] = {}
      for key, value in parts.items():
        values.update(structure.leaves(value, key))
      for name, x in arrays_lib.from_json(small).items():
        values[name] = f'{x.dtype.name}{list(x.shape)} {x.tolist()}'
      config = base_config.flat(self.record['config'])
      return {
        'config': {key: repr(value) for key, value in config.items()},
        'values': values,
        'arrays': {
          name: arrays_lib.saved_shape(x) for name, x in self.described.items()
        },
      }


# What a run has.


def list_run(where: Place) -> dict[str, Any]:
  """Lists what a run, or a series, has.

  Returns:
    What `json.dumps` writes: `run`, a directory or None; `state`, see
    `training`; `ended`, the step at which training has ended, or None;
    `claims`, who may write there (`what`, `host`, `pid`, and `alive`: True,
    False or, where that cannot be told, None); `series`, name -> `step`,
    `path`, `time` (seconds since 1970), `bytes`, `metrics`, `problem` and
    `refused` (whether that is something that no save writes) of each
    checkpoint, by step; `damaged`, directories that were set aside.

  Raises:
    ValueError: it is no such directory.
  """
  run, series = _locate(where)
  listed = {
    name: [row for row in map(_row, paths) if row is not None]
    for name, paths in series.items()
  }
  about: dict[str, Any] = dict.fromkeys(('run', 'state', 'ended'))
  about['claims'] = []
  if run is not None:
    metrics = collections.defaultdict(list)
    for row in itertools.chain.from_iterable(listed.values()):
      metrics[row['step']].append(row['metrics'])
    for step, scalars in logged(run):
      for found in metrics.get(step, ()):
        found |= scalars
    about = {'run': str(run), **training(run)}
  damaged = files.root(run).glob('damaged/*') if run else ()
  return {**about, 'damaged': sorted(map(str, damaged)), 'series': listed}


def logged(run: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields step and scalars, by 'folder/name', of each record in a run's logs.

  The values are as in `metrics.jsonl`, where text stands for NaN and infinity.
  What is no regular file or no record, such as half a last line, is left out.
  """
  for path in sorted(run.glob('*/metrics.jsonl')):
    folder = path.parent.name
    with (
      contextlib.suppress(files.RefusedError),
      io.BufferedReader(files.open_regular(path)) as lines,
    ):
      for record in map(writers.read_record, lines):
        if record.get('kind') == 'scalars':
          names = [name for name in record if name not in writers.JSONL_KEYS]
          yield record['step'], {f'{folder}/{n}': record[n] for n in names}


def _row(path: pathlib.Path) -> dict[str, Any] | None:
  """Describes a checkpoint; None if it was removed meanwhile."""
  try:
    row: dict[str, Any] = {
      'step': int(path.name) if path.name.isdecimal() else None,
      'path': str(path),
      'time': path.lstat().st_mtime,
      'bytes': 0,
      'metrics': {},
      'problem': None,
      'refused': False,
    }
    with _reading(path):
      row['bytes'] = files.size(path)
    checkpoint = Checkpoint(path)
    with _reading(path):
      row['time'] = checkpoint.record['time']
    # The best value so far, where it has one; as `metrics.jsonl` has it, since
    # JSON has no infinity.
    keys = ['best_model_eval_metric', 'best_eval_metric_value']
    with contextlib.suppress(ValueError, *files.MALFORMED):
      name, value = checkpoint.entries(keys).values()
      shown = value if math.isfinite(value) else str(value)
      row['metrics'] = {f'best/{name}': shown}
  except (FileNotFoundError, files.GoneError):
    return None
  except ValueError as e:  # Damaged, or of a later version.
    row['problem'] = str(e)
    row['refused'] = isinstance(e, files.RefusedError)
  return row


def training(run: pathlib.Path) -> dict[str, Any]:
  """Returns what became of a run's training: see `list_run`.

  Args:
    run: the directory.

  Returns:
    `ended`, `claims`, and `state`: 'ended'; 'running'; 'failed' by an error;
    'stopped' by Ctrl-C, SIGTERM or a preemption, or without a note; 'killed',
    so that it could not note its end; or 'unknown', where the locks of files
    cannot be seen.
  """
  root = files.root(run)
  ended, claims, state = None, [], files.STOPPED
  own: dict[str, Any] = {'host': socket.gethostname(), 'pid': os.getpid()}
  for path in sorted((root / 'claims').glob('*.json')):
    # What is no file, or just being written, is left out.
    with contextlib.suppress(ValueError, *files.MALFORMED):
      is_own = files.is_claimed_here(path)  # Opening it would give it back.
      found = own if is_own else files.read_json(path)
      owner = {'host': str(found['host']), 'pid': int(found['pid'])}
      alive = is_own or _is_locked(path)
      if alive is False:  # Perhaps since it was read, with a note of its end.
        found = files.read_json(path)
      if has_end := found.get('end') in (files.STOPPED, files.FAILED):
        alive = False
      claims.append({'what': path.stem, **owner, 'alive': alive})
      if path.stem == 'train':
        # Earlier versions noted no end.
        gone = 'killed' if 'end' in found else files.STOPPED
        states = {True: 'running', False: gone, None: 'unknown'}
        state = found['end'] if has_end else states[alive]
  # Last: it is noted before the claim ends.
  with contextlib.suppress(ValueError, *files.MALFORMED):
    ended = int(files.read_json(root / 'ended.json')['step'])
  state = state if ended is None else 'ended'
  return {'state': state, 'ended': ended, 'claims': claims}


def _is_locked(path: pathlib.Path) -> bool | None:
  """Returns whether a process has a lock on a file; takes none itself."""
  if sys.platform != 'linux':
    return None  # The request is laid out otherwise.
  layout = 'hhqqi0q'
  request = struct.pack(layout, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
  try:
    with open(path, 'rb') as f:
      answer = fcntl.fcntl(f, fcntl.F_GETLK, request)
  except OSError:  # Another user's, or on a file system without locks.
    return None
  return struct.unpack(layout, answer)[0] != fcntl.F_UNLCK


# The command line.


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
  listed = list_run(args.dir)
  found = [(name, row) for name, x in listed['series'].items() for row in x]
  is_refused = any(row['refused'] for _, row in found)
  if args.json:
    print(json.dumps(listed, indent=1))
    return int(is_refused)
  if listed['run'] is not None:
    training = {
      'ended': f'ended at step {listed["ended"]}',
      'running': 'is running',
      'stopped': 'has not ended, and is not running',
      'failed': 'has failed with an error',
      'killed': 'was killed, and is not running',
      'unknown': 'has not ended; whether it is running cannot be told here',
    }[listed['state']]
    about = [('run', listed['run']), ('training', training)]
    for c in listed['claims']:
      if c['alive'] is not False:
        owner = f'process {c["pid"]} on {c["host"]}'
        perhaps = '' if c['alive'] else ' (perhaps no longer)'
        about.append((f'{c["what"]} claimed by', owner + perhaps))
    print_table(about)
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


def _show(args: argparse.Namespace) -> int:
  checkpoint = find(args.dir)
  texts = checkpoint.texts()
  record, described = checkpoint.record, checkpoint.described
  bytes_of = {n: arrays_lib.num_bytes(x) for n, x in described.items()}
  num_params = sum(
    math.prod(x['shape']) for n, x in described.items() if n.startswith(PARAMS)
  )
  versions = ', '.join(f'{k} {v}' for k, v in record['versions'].items())
  rows = [
    ('checkpoint', str(checkpoint.path)),
    ('step', str(record['step'])),
    ('saved', _when(record['time'])),
    ('size', _size(sum(bytes_of.values()))),
    ('processes', f'{record["processes"]}, with {record["devices"]} devices'),
    ('versions', versions),
    ('parameters', f'{num_params:,} below {PARAMS[:-1]}'),
  ]
  print_table(rows)
  if args.config:
    print_table(texts['config'].items(), 'config')
  print_table([(k, x[:_WIDTH]) for k, x in texts['values'].items()], 'values')
  arrays = [(n, x, _size(bytes_of[n])) for n, x in texts['arrays'].items()]
  print_table(arrays, 'arrays', right=(2,))
  return 0


def _diff(args: argparse.Namespace) -> int:
  one, two = find(args.a), find(args.b)
  texts = zip(one.texts().items(), two.texts().values(), strict=True)
  unequal = {
    title: [
      (name, x.get(name, 'nothing'), y.get(name, 'nothing'))
      for name in x | y
      if x.get(name) != y.get(name)
    ]
    for (title, x), y in texts
  }
  differ = {name for name, _, _ in unequal['arrays']}
  common = [name for name in one.described if name not in differ]
  numbers = [
    (name, *map(_number, _distance(x, y) or ('', '')))
    for (name, x), (_, y) in zip(
      one.verified(common), two.verified(common), strict=True
    )
    if not np.array_equal(x.ravel().view(np.uint8), y.ravel().view(np.uint8))
  ]
  for title, rows in unequal.items():
    if rows:
      print_table([('', 'A', 'B'), *rows], title)
  if numbers:
    header = ('', 'max |A-B|', '||A-B|| / ||A||')
    print_table([header, *numbers], 'numbers', right=(1, 2))
  identical = len(common) - len(numbers)
  print(f'{identical} of {len(common)} common arrays are bit-identical.')
  # Configs may differ.
  return int(bool(unequal['values'] or unequal['arrays'] or numbers))


def _distance(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
  """Returns greatest absolute and relative difference; NaN is equal to NaN.

  None where the elements are no numbers.
  """
  if not (jax.dtypes.issubdtype(x.dtype, np.number) or x.dtype == bool):
    return None
  wide = np.complex128 if np.iscomplexobj(x) else np.float64
  greatest, squares, norm = [], 0.0, 0.0
  for i in range(0, x.size, _COMPARED):
    a, b = (z.reshape(-1)[i : i + _COMPARED].astype(wide) for z in (x, y))
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid='ignore', over='ignore'):
      difference = np.where(equal, 0, np.abs(a - b))
      squares += float(np.square(difference).sum())
      norm += float(np.square(np.abs(a)).sum())
    greatest.append(difference.max())
  most = float(np.max(greatest))  # Python's max may drop NaNs.
  relative = math.sqrt(squares / norm) if norm else math.inf
  return most, relative if squares else 0.0


def _verify(args: argparse.Namespace) -> int:
  damaged = num = 0
  for path in itertools.chain.from_iterable(_locate(args.dir)[1].values()):
    verdict = 'ok'
    try:
      with files.well_formed():
        found = contents.Checkpoint(path)
        found.verify()
        found.check()
    except files.DamagedError as e:
      verdict = f'DAMAGED: {e}'
    except ValueError:
      pass  # Of a later version, and whole.
    if not os.path.lexists(path):
      continue  # It was removed before all was read.
    num += 1
    damaged += verdict != 'ok'
    line = f'{path.parent.name}/{path.name}  {verdict}'
    print(files.printable(line), flush=True)
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
  names = checkpoint.names(args.select)
  prefix = PARAMS if all(name.startswith(PARAMS) for name in names) else ''
  arrays = (
    (name.removeprefix(prefix), _converted(name, x, args.dtype))
    for name, x in checkpoint.verified(names)
  )
  partial = out.with_name(f'.{out.name}.{os.getpid()}.partial')
  with disk.replacing(out, partial) as file:
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
  # Not np.savez, which wants all arrays at once, and none called 'file'.
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
    'directory of a run, of a series (RUN/checkpoints/best) or of a checkpoint;'
    ' with :STEP, else '
  )
  newest, everything = f'{where}the newest', f'{where}all of it'
  about = 'list series, steps, sizes, times, metrics'
  ls = add(_ls, about, dir='directory of a run or of a series')
  ls.add_argument('--json', action='store_true', help='the same as JSON')
  show = add(_show, 'what a checkpoint holds', dir=newest)
  show.add_argument('--config', action='store_true', help="the run's config")
  about = 'compare two; exits with 0 if they are the same, 1 if not'
  add(_diff, about, a=newest, b='likewise')
  about = 'is every file as it was written? exits with 1 if not'
  add(_verify, about, dir=everything)
  about = 'write parameters to one file'
  export = add(_export, about, dir=newest, out='file .safetensors or .npz')
  export.add_argument(
    '--select',
    metavar='REGEX',
    default=f'{PARAMS}.*',
    help='arrays whose whole name matches, instead of the parameters',
  )
  export.add_argument('--dtype', choices=DTYPES, help='convert floating point')
  export.add_argument('--force', action='store_true', help='replace OUT')
  args = parser.parse_args(argv)
  try:
    with files.well_formed():
      return args.run(args)
  except BrokenPipeError:
    # Whoever read, such as `head`, has read enough; nothing more is written.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except (ValueError, OSError, ImportError, MemoryError, re.error) as e:
    text = ' '.join(str(e).split()) or type(e).__name__
    status = 1 if isinstance(e, files.RefusedError) else 2
  print(f'jaxline.checkpoint: {files.printable(text)}', file=sys.stderr)
  return status
