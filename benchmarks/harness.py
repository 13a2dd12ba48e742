"""Measures sides in turns and prints tables, for all benchmarks.

A program is a module with a function `rows(options) -> list of rows`. A row
compares a side with a baseline that took turns with it. It holds the medians
and quartiles of both, and of their ratio or difference, by wall time and by CPU
time, with the aim and whether it was met. Rows are plain values for JSON.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
import ctypes
import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import operator
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
_PACKAGES = (
  'jax', 'jaxlib', 'numpy', 'optax', 'dm-haiku', 'orbax-checkpoint', 'grain',
  'tensorflow', 'seqio', 'flax',
)  # fmt: skip
_OPERATORS = {'>=': operator.ge, '<=': operator.le}

Row = dict[str, Any]


class Sample(NamedTuple):
  """The measurement of one side in one turn.

  Attributes:
    wall: Seconds, a rate or another quantity, by wall time.
    cpu: The same quantity by the CPU time of the process; None if that has no
      meaning.
  """

  wall: float
  cpu: float | None = None


@dataclasses.dataclass(frozen=True)
class Options:
  """How to run the programs.

  Attributes:
    quick: Whether to use few rounds and small sizes, to see that all programs
      work. The numbers mean nothing.
    rounds: Turns of each side; None means each program's default.
    original: A folder with JAXline's own package.
    peers: A folder with other programs; see benchmarks/README.md.
  """

  quick: bool = False
  rounds: int | None = None
  original: str | None = None
  peers: str | None = None

  def num_rounds(self, usual: int) -> int:
    """Returns the number of turns of each side."""
    return self.rounds or (1 if self.quick else usual)

  def pick(self, usual: Any, quick: Any) -> Any:
    """Returns one of the two, such as a number of steps."""
    return quick if self.quick else usual


def turns(
  sides: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[Any]]:
  """Returns the results of each side, one for each round.

  Args:
    sides: Name -> function that measures the side.
    rounds: Number of turns of each side. The order is A B, B A, and so on, so
      that no side always runs after the same one.
  """
  found: dict[str, list[Any]] = {name: [] for name in sides}
  for i in range(rounds):
    for name in list(sides)[:: -1 if i % 2 else 1]:
      found[name].append(sides[name]())
  return found


def now() -> Sample:
  """Returns the time, and the CPU time of this process so far."""
  return Sample(time.perf_counter(), time.process_time())


def since(began: Sample, ended: Sample, amount: float | None) -> Sample:
  """Returns an amount per second between two times; the seconds for None."""
  seconds = [b - a for a, b in zip(began, ended, strict=True)]
  return Sample(*(x if amount is None else amount / x for x in seconds))


def timed(fn: Callable[[], Any], amount: float | None = None) -> Sample:
  """Calls a function; returns the seconds, or an amount per second."""
  began = now()
  fn()
  return since(began, now(), amount)


def fields(samples: Iterable[Mapping[str, Any]], name: str) -> list[Sample]:
  """Returns one entry of each worker's result, as samples."""
  return [
    Sample(*x) if isinstance(x := found[name], list | tuple) else Sample(x)
    for found in samples
  ]


def pairwise(
  fn: Callable[[float, float], float], a: list[Sample], b: list[Sample]
) -> list[Sample]:
  """Returns `fn` of two sides, round by round."""
  return [
    Sample(
      fn(x.wall, y.wall),
      None if x.cpu is None or y.cpu is None else fn(x.cpu, y.cpu),
    )
    for x, y in zip(a, b, strict=True)
  ]


def _spread(values: list[float]) -> list[float]:
  """Returns lower quartile, median, upper quartile."""
  if len(values) == 1:
    return values * 3
  return statistics.quantiles(values, n=4, method='inclusive')


def spreads(samples: list[Sample]) -> dict[str, list[float] | None]:
  """Returns the quartiles by wall and by CPU time."""
  cpu = [x.cpu for x in samples if x.cpu is not None]
  wall = [x.wall for x in samples]
  return {'wall': _spread(wall), 'cpu': _spread(cpu) if cpu else None}


def row(
  what: str,
  ours: list[Sample],
  against: str = '',
  baseline: list[Sample] | None = None,
  *,
  unit: str,
  measure: str = 'ratio',
  aim: str | None = None,
  judged: str = 'wall',
) -> Row:
  """Returns a row of a table.

  Args:
    what: The name of our side.
    ours: Our samples, one for each round.
    against: The name of the baseline; '' if there is none.
    baseline: The baseline's samples from the same rounds.
    unit: The unit of the samples.
    measure: 'ratio' (ours / baseline), 'difference' (ours - baseline) or
      'value' (ours).
    aim: The aim for the median of the measure, such as '>= 0.98'.
    judged: 'wall' or 'cpu': the time by which the aim is judged.
  """
  value = ours
  if baseline is not None:
    compare = operator.truediv if measure == 'ratio' else operator.sub
    value = pairwise(compare, ours, baseline)
  found = {
    'what': what,
    'against': against,
    'unit': unit,
    'rounds': len(ours),
    'ours': spreads(ours),
    'baseline': spreads(baseline) if baseline is not None else None,
    'measure': measure if baseline is not None else 'value',
    'value': spreads(value),
    'judged': judged,
    'aim': aim,
    'met': None,
  }
  if aim:
    compare_to, limit = aim.split()
    median = found['value'][judged][1]
    found['met'] = bool(_OPERATORS[compare_to](median, float(limit)))
  return found


class Peak:
  """Measures how much the memory of this process grows at most, on Linux."""

  def __init__(self) -> None:
    ctypes.CDLL(None).malloc_trim(0)  # Free memory must not count as used.
    pathlib.Path('/proc/self/clear_refs').write_text('5')  # Resets VmHWM.
    self._before = self._bytes('VmRSS')

  def grown(self) -> int:
    """Returns the bytes since construction."""
    return self._bytes('VmHWM') - self._before

  def _bytes(self, what: str) -> int:
    status = pathlib.Path('/proc/self/status').read_text()
    line = next(x for x in status.splitlines() if x.startswith(what))
    return int(line.split()[1]) << 10


# Processes.


def call(
  module: str, function: str, *args: Any, path: str = '', env: Any = None
) -> Any:
  """Calls a function of a module in a separate process.

  Args:
    module: The module's name.
    function: The function's name. It returns values for JSON, and may print
      before.
    *args: Values for JSON.
    path: A folder whose packages take precedence over this repository's.
    env: Additional environment variables.

  Raises:
    RuntimeError: The function failed. The message has the end of its stderr.
  """
  places = path, str(ROOT), os.environ.get('PYTHONPATH')
  python_path = os.pathsep.join(filter(None, places))
  with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
      [
        *(sys.executable, '-m', 'benchmarks.harness'),
        *(module, function, json.dumps(args)),
      ],
      env=os.environ | {'PYTHONPATH': python_path} | (env or {}),
      cwd=folder,
      capture_output=True,
      text=True,
    )
  if done.returncode:
    raise RuntimeError(f'{module}.{function}{args}:\n{done.stderr[-3000:]}')
  return json.loads(done.stdout.splitlines()[-1])


def call_rows(module: str, options: Options) -> list[Row]:
  """Runs a program in a separate process and returns its rows."""
  return call(__name__, 'rows_of', module, dataclasses.asdict(options))


def rows_of(module: str, options: Mapping[str, Any]) -> list[Row]:
  """Runs a program in this process and returns its rows."""
  return importlib.import_module(module).rows(Options(**options))


# The machine and the output.


def _cpu_model() -> str:
  info = pathlib.Path('/proc/cpuinfo')
  text = info.read_text() if info.exists() else ''
  found = re.search(r'^model name\s*:\s*(.+)$', text, re.M)
  return found[1] if found else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
  """Returns the hardware, versions and commit that the numbers depend on."""
  versions = {}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  commit = subprocess.run(
    ['git', 'rev-parse', '--short', 'HEAD'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  return {
    'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
    'cpu': _cpu_model(),
    'cores': os.cpu_count(),
    'system': platform.platform(terse=True),
    'python': platform.python_version(),
    'versions': versions,
    'commit': commit.stdout.strip(),
    'load': round(os.getloadavg()[0], 1),
  }


def number(x: float) -> str:
  """Formats a number with three digits."""
  if x and abs(x) < 1e5:
    digits = max(0, 2 - int(f'{abs(x):e}'.partition('e')[2]))
    return f'{x:,.{min(digits, 4)}f}'
  return f'{x:,.0f}'


def _cell(spread: list[float] | None) -> str:
  if spread is None:
    return ''
  low, median, high = map(number, spread)
  return f'{median} [{low}, {high}]'


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Formats a table in Markdown."""
  lines = [f'| {" | ".join(cells)} |' for cells in (titles, *rows)]
  return '\n'.join([lines[0], f'|{"---|" * len(titles)}', *lines[1:]])


def table_of(rows: Sequence[Mapping[str, str]]) -> str:
  """Formats rows, each of them title -> text, as a table in Markdown."""
  return markdown(list(rows[0]), [list(row.values()) for row in rows])


def table(rows: list[Row]) -> str:
  """Formats the rows of a program as a table in Markdown."""
  titles = ['what', 'against', 'unit', 'ours', 'baseline', 'compared: wall']
  titles += ['compared: CPU', 'aim', 'met']
  lines = []
  for row in rows:
    signs = {'ratio': 'x ', 'difference': '+ ', 'value': ''}
    sign = signs[row['measure']]
    value = {
      by: sign * bool(x) + _cell(x) if row['baseline'] else ''
      for by, x in row['value'].items()
    }
    if row['measure'] == 'value':
      ours, theirs = _cell(row['ours']['wall']), ''
    else:
      ours, theirs = (
        number(row[side]['wall'][1]) for side in ('ours', 'baseline')
      )
    aim = row['aim'] or ''
    if aim and row['judged'] == 'cpu':
      aim += ' (CPU)'
    met = {None: '', True: 'yes', False: '**no**'}[row['met']]
    cells = [row['what'], row['against'], row['unit'], ours, theirs]
    lines.append([*cells, value['wall'], value['cpu'], aim, met])
  return markdown(titles, lines)


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags that are the fields of `Options`."""
  parser.add_argument('--quick', action='store_true', help='try all programs')
  parser.add_argument('--rounds', type=int, help='turns of each side')
  parser.add_argument('--original', help="a folder with JAXline's own package")
  parser.add_argument('--peers', help='a folder with other programs')


def options_of(args: argparse.Namespace) -> Options:
  """Returns the options of a command line."""
  if args.rounds is not None and args.rounds < 1:
    sys.exit(f'--rounds is {args.rounds}; expected at least 1.')
  names = [field.name for field in dataclasses.fields(Options)]
  values = {name: getattr(args, name) for name in names}
  for name in ('original', 'peers'):
    if values[name]:
      values[name] = str(pathlib.Path(values[name]).resolve())
  return Options(**values)


def main(rows: Callable[[Options], list[Row]], doc: str | None) -> None:
  """Runs one program and prints its table."""
  parser = argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add_flags(parser)
  options = options_of(parser.parse_args())
  found = machine()
  print(
    f'{found["cpu"]}, {found["cores"]} cores, load {found["load"]}; Python'
    f' {found["python"]}, jax {found["versions"]["jax"]}\n'
  )
  print(table(rows(options)))


def _work() -> None:
  module, name, text = sys.argv[1:]
  function = getattr(importlib.import_module(module), name)
  print(json.dumps(function(*json.loads(text))))


if __name__ == '__main__':
  _work()
