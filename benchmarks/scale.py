"""Compiles large runs for TPUs without TPUs: memory and step-time bounds.

    python -m benchmarks.scale [NAMES] [--results=DIR] [--again]

Compiles the train step of each run for its topology, keeps the report as JSON
and prints the tables of docs/reference/scale.md. (`--jaxline_mode=compile` does
the same, and compiles the eval step too.) Runs that have a report are not
compiled again, unless you pass `--again`. A run needs libtpu (the extra
`tpu-aot`), one to three minutes of a free core, and up to 3 GB of memory.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
from typing import Any

import jax

from benchmarks import harness
from examples.pax import experiment_registry
from jaxline import platform
from jaxline.base import disk
from jaxline.compile import ahead
from jaxline.compile import report as report_lib

# Where the reports are kept.
RESULTS = pathlib.Path(__file__).parent / 'results' / 'scale'
_GIB = 2.0**30
_TERA = 1e12

_MODEL = '--config.experiment_kwargs.config.model'
_LM_1B = ['--config=configs/lm_1b.py', '--config.topology=v5p:2x2x1']
_LONG = [
  f'{_MODEL}.max_length=8192',
  '--config.experiment_kwargs.config.length=8192',
]
# Name -> command line: the registered experiments that name a topology, and
# configs with a topology. lm_1b has a pod, and long sequences with each kind of
# attention.
RUNS: dict[str, Sequence[str]] = {
  experiment.__name__: [f'--config=configs/c4.py:{experiment.__name__}']
  for experiment in experiment_registry.get_all().values()
  if experiment.TOPOLOGY
} | {
  'lm_1b': _LM_1B,
  # This is the README's pod. The last --config.topology counts.
  'lm_1b_pod': [
    *_LM_1B,
    '--config.topology=v5p:2x2x4',
    '--config.experiment_kwargs.config.batch_size=128',
  ],
  'llama_8b': ['--config=configs/llama_8b.py', '--config.topology=v5p:4x4x4'],
  'llama_8b_v6e': ['--config=configs/llama_8b.py', '--config.topology=v6e:8x8'],
  'moe_30b': ['--config=configs/moe_30b.py', '--config.topology=v5p:4x4x4'],
  'moe_30b_v6e': ['--config=configs/moe_30b.py', '--config.topology=v6e:8x8'],
  'lm_1b_8192': [*_LM_1B, *_LONG],
  'lm_1b_8192_einsum': [*_LM_1B, *_LONG, f'{_MODEL}.attention=einsum'],
}
# Published model FLOPs utilization, for the same number of chips.
PUBLISHED = {'C4Spmd16BAdam32Replicas': '42%'}


def compile_run(arguments: Sequence[str]) -> report_lib.ProgramReport:
  """Compiles the train step of a run, given its command line."""
  # JAX caches traces by mesh, but not by sharding rules.
  jax.clear_caches()
  config = platform.load_config(arguments)
  experiment_class = platform.resolve_experiment_class(config)
  return ahead.make_report(_without_evaluation(experiment_class), config)


def _without_evaluation(experiment_class: Any) -> Any:
  def eval_input(self: Any) -> Any:
    raise NotImplementedError

  return type(
    experiment_class.__name__, (experiment_class,), {'eval_input': eval_input}
  )


# A report, decoded from JSON.
Report = dict[str, Any]


def _room_row(name: str, report: Report) -> dict[str, str]:
  """Returns a run's row in the table of memory."""
  step, target = report['programs'][0], report['target']
  hbm_bytes = target['chip']['hbm_bytes']
  rest = (hbm_bytes - step['peak_bytes']) / _GIB
  slices = f'{target["num_slices"]} x ' if target['num_slices'] > 1 else ''
  mesh = ', '.join(f'{axis} {n}' for axis, n in report['mesh'].items() if n > 1)
  return {
    'run': name,
    'topology': f'{slices}{target["name"]}',
    'chips': str(target['num_devices']),
    'mesh': mesh,
    'parameters': f'{report["parameters"]:,}',
    'state, GiB a chip': f'{report["state_bytes"] / _GIB:.2f}',
    'peak, GiB a chip': f'{step["peak_bytes"] / _GIB:.2f} of'
    f' {hbm_bytes / _GIB:.2f}',
    'fits': f'yes, {rest:.1f} left'
    if step['fits']
    else f'**no**, by {-rest:.1f}',
  }


def _time_row(name: str, report: Report) -> dict[str, str]:
  """Returns a run's row in the table of lower bounds on the step time."""
  step, devices = report['programs'][0], report['target']['num_devices']
  model_flops, compiled = step['model_flops'], step['measures']['flops']
  seconds = step['roofline']['seconds']
  longest = max(seconds, key=lambda key: seconds[key])
  return {
    'run': name,
    'model TFLOP a chip': f'{model_flops / devices / _TERA:,.0f}',
    'compiled / model': f'{compiled * devices / model_flops:.2f}',
    **{
      f'{key}, s': f'{value:#.3g}' if value else ''
      for key, value in seconds.items()
    },
    'bound by': f'{longest}, {seconds[longest]:#.3g} s',
    'MFU at most': f'{step["roofline"]["mfu_bound"]:.0%}',
    'if nothing overlaps': f'{step["roofline"]["mfu_sum"]:.0%}',
    'published MFU': PUBLISHED.get(name, ''),
  }


def _size(item: tuple[str, Report]) -> tuple[int, int]:
  _, report = item
  return report['parameters'], report['target']['num_devices']


def print_tables(reports: dict[str, Report]) -> None:
  """Prints the two tables in Markdown."""
  versions = {tuple(report['versions'].items()) for report in reports.values()}
  in_order = sorted(reports.items(), key=_size)
  for row in (_room_row, _time_row):
    print(harness.table_of([row(*item) for item in in_order]) + '\n')
  for of in sorted(versions):
    print(', '.join(f'{name} {version}' for name, version in of))


def main() -> None:
  """Compiles the runs without a report, and prints the tables."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('names', nargs='*', metavar='NAMES')
  parser.add_argument('--results', type=pathlib.Path, default=RESULTS)
  parser.add_argument('--again', action='store_true')
  args = parser.parse_args()
  args.results.mkdir(parents=True, exist_ok=True)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  reports = {}
  for name in args.names or RUNS:
    if name not in RUNS:
      parser.error(f'no run {name!r}; expected names from {list(RUNS)}')
    path = args.results / f'{name}.json'
    if args.again or not path.exists():
      report = compile_run(RUNS[name])
      with disk.replacing(path) as file:
        file.write(disk.to_json(dataclasses.asdict(report)))
      print(f'{name}: {report}\n', flush=True)
    reports[name] = json.loads(path.read_text())
  print_tables(reports)


if __name__ == '__main__':
  main()
