"""Runs all timed programs, prints tables, and records them as JSON.

    python -m benchmarks [--only loop lm_step] [--original DIR] [--peers DIR]
    python -m benchmarks --quick       # Tries all programs; records nothing.
    python -m benchmarks --page FILE   # Writes docs/reference/performance.md.

A run is recorded in `benchmarks/results/<date>-<machine>.json`. With `--only`,
the new results replace these programs' results in the same day's file, if it
has the same commit and versions. Each program runs in a separate process. If
one fails, its name is printed, the others run, and the exit status is 1.
"""

import argparse
import ast
import json
import os
import pathlib
import re
import sys
import textwrap
import time
from typing import Any

from benchmarks import harness

# Module -> its heading on the page.
PROGRAMS = {
  'program': 'The whole program',
  'start': 'Start',
  'lm_step': 'The training step',
  'decoding': 'Decoding',
  'loop': 'The loop',
  'compile_time': 'Compilation',
  'memory': 'Memory',
  'checkpoint': 'Checkpoints',
  'inputs': 'Inputs',
}
_HERE = pathlib.Path(__file__).resolve().parent
PAGE = harness.ROOT / 'docs' / 'reference' / 'performance.md'
# The page is written by hand from here on.
_BY_HAND = '## Findings\n'
_ABOUT = """\
`python -m benchmarks` measures every number above "Findings", and
`python -m benchmarks --page FILE` writes that part of this page from the JSON
of a run ([benchmarks](../../benchmarks/README.md)). The two sides of a row take
turns. "Compared" is their ratio (x) or difference (+), computed in each round:
median and [quartiles]. "Load" is the load of the machine, including other work,
before and after a program. If it exceeds the number of cores, trust only CPU
times and ratios."""
_TRIAL = """\
**A trial (`--quick`) with one round and small sizes. It shows that all programs
run and what the page looks like. Its numbers mean nothing.**"""


def _docstring(name: str) -> str:
  """Returns a program's docstring without an import, which takes seconds."""
  tree = ast.parse((_HERE / f'{name}.py').read_text(encoding='utf-8'))
  return ast.get_docstring(tree) or ''


def _path(folder: pathlib.Path, machine: dict[str, Any]) -> pathlib.Path:
  words = re.sub(r'\(.*?\)', '', machine['cpu']).lower()
  slug = '-'.join(re.findall(r'[a-z0-9]+', words))
  return folder / f'{machine["date"]}-{slug}-{machine["cores"]}-cores.json'


def _aims(run: dict[str, Any]) -> str:
  judged = [
    (PROGRAMS[name], row)
    for name, program in run['programs'].items()
    for row in program['rows']
    if row['met'] is not None
  ]
  missed = [
    f'- {title}: {row["what"]}'
    + (f', against {row["against"]}' if row['against'] else '')
    + f': {harness.number(row["value"][row["judged"]][1])}, aim {row["aim"]}'
    for title, row in judged
    if not row['met']
  ]
  text = f'{len(judged) - len(missed)} of {len(judged)} aims are met.'
  return '\n'.join([text, *(['Missed:', '', *missed] if missed else [])])


def _about(machine: dict[str, Any]) -> str:
  versions = ', '.join(f'{k} {v}' for k, v in machine['versions'].items())
  return (
    f'{machine["date"]}, commit {machine["commit"]}: {machine["cpu"]},'
    f' {machine["cores"]} cores, no accelerator used; {machine["system"]};'
    f' Python {machine["python"]}, {versions}.'
  )


def page(run: dict[str, Any], by_hand: str) -> str:
  """Returns the page for a run.

  Args:
    run: The content of the run's file.
    by_hand: The end of the page, which starts with its heading.
  """
  about = (
    f'{_about(run["machine"])} The programs took'
    f' {sum(x["seconds"] for x in run["programs"].values()) / 60:.0f} minutes.'
  )
  parts = [
    '# Performance',
    _ABOUT,
    *([_TRIAL] if run['quick'] else []),
    textwrap.fill(about, 80, break_on_hyphens=False),
    _aims(run),
  ]
  if rest := [name for name in PROGRAMS if name not in run['programs']]:
    parts.append(f'Not part of this run: {", ".join(rest)}.')
  for name, title in PROGRAMS.items():
    if (program := run['programs'].get(name)) is None:
      continue
    rounds = sorted({row['rounds'] for row in program['rows']})
    load = ' and '.join(f'{x:.1f}' for x in program['load'])
    parts += [
      f'## {title}',
      _docstring(name),
      f'Rounds: {", ".join(map(str, rounds))}. Load: {load}.'
      f' Seconds: {program["seconds"]:.0f}.',
      harness.table(program['rows']),
    ]
    if 'machine' in program:  # Copied by hand from a later run.
      later = f'Measured later: {_about(program["machine"])}'
      parts.insert(-1, textwrap.fill(later, 80, break_on_hyphens=False))
  return '\n\n'.join(parts) + f'\n\n{by_hand}'


def write_page(file: pathlib.Path) -> None:
  """Writes the page for a run, and keeps the part written by hand."""
  old = PAGE.read_text(encoding='utf-8') if PAGE.exists() else ''
  by_hand = _BY_HAND + old.partition(_BY_HAND)[2]
  run = json.loads(file.read_text(encoding='utf-8'))
  PAGE.write_text(page(run, by_hand), encoding='utf-8')


def _run(name: str, options: harness.Options) -> dict[str, Any]:
  load, began = os.getloadavg()[0], time.monotonic()
  rows = harness.call_rows(f'benchmarks.{name}', options)
  return {
    'load': [load, os.getloadavg()[0]],
    'seconds': time.monotonic() - began,
    'rows': rows,
  }


def main() -> None:
  """Runs the programs."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  harness.add_flags(parser)
  names = list(PROGRAMS)
  parser.add_argument('--only', nargs='+', choices=names, default=names)
  parser.add_argument('--out', type=pathlib.Path, help='a folder for the JSON')
  parser.add_argument('--page', type=pathlib.Path, metavar='FILE')
  args = parser.parse_args()
  if args.page:
    write_page(args.page)
    return
  options = harness.options_of(args)
  machine = harness.machine()
  run: dict[str, Any] = {'quick': args.quick, 'machine': machine}
  run['programs'] = {}
  out = args.out or (None if args.quick else _HERE / 'results')
  path = _path(out, machine) if out else None
  if path and args.only != names and path.exists():
    kept = json.loads(path.read_text())
    if all(kept['machine'][k] == machine[k] for k in ('commit', 'versions')):
      run['programs'] = kept['programs']
  failed = []
  for name in args.only:
    try:
      program = _run(name, options)
    except RuntimeError as e:
      print(f'\n## {name} failed\n\n{e}', flush=True)
      failed.append(name)
      run['programs'].pop(name, None)
      continue
    print(f'\n## {PROGRAMS[name]} ({program["seconds"]:.0f} s)\n')
    print(harness.table(program['rows']), flush=True)
    run['programs'][name] = program
    if path:  # Written after each program, so a kill loses only one.
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(json.dumps(run, indent=1) + '\n')
  print(f'\n{_aims(run)}')
  if path:
    print(f'Recorded in {path}. The page: python -m benchmarks --page {path}')
  if failed:
    sys.exit(f'Failed: {", ".join(failed)}.')


if __name__ == '__main__':
  main()
