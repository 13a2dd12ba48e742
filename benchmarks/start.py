"""From the start of a process to its first step, with the compilation cache.

    python -m benchmarks.start --rounds=3 lm image

Runs five steps of each config without the cache, with an empty one ('cold') and
again ('warm'), in turns. Prints medians, least and greatest: seconds to the log
of the first step, those of them in the loop, and CPU seconds of the process.
"""

import argparse
import collections
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# With the value of config.compilation_cache. 'warm' comes after 'cold'.
CASES = (('off', 'off'), ('cold', 'auto'), ('warm', 'auto'))


def measure(
  config: str, cache: str, home: pathlib.Path
) -> tuple[float, float, float]:
  """Runs five steps; returns the three numbers."""
  with tempfile.TemporaryDirectory() as directory:
    began = time.monotonic()
    process = subprocess.Popen(
      [
        *(sys.executable, 'experiment.py', f'--config=configs/{config}.py'),
        *('--config.training_steps=5', '--config.interval_type=steps'),
        *('--config.log_tensors_interval=1', '--verbosity=1'),
        f'--config.compilation_cache={cache}',
        f'--config.checkpoint_dir={directory}',
      ],
      cwd=ROOT,
      env=os.environ | {'XDG_CACHE_HOME': str(home)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    loop = first = 0.0
    output = []
    assert process.stdout is not None
    for line in process.stdout:
      output.append(line)
      if not loop and 'training loop starting' in line:
        loop = time.monotonic() - began
      if not first and re.search(r'\bstep 1\b', line):
        first = time.monotonic() - began
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
  if process.returncode or not (loop and first):
    sys.exit(f'{config} failed:\n{"".join(output[-30:])}')
  return first, first - loop, usage.ru_utime + usage.ru_stime


def main() -> None:
  """Measures and prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('configs', nargs='+')
  args = parser.parse_args()
  found = collections.defaultdict(list)
  with tempfile.TemporaryDirectory() as name:
    home = pathlib.Path(name)
    for config in args.configs:
      measure(config, 'off', home)  # It also prepares the data.
    for number in range(args.rounds):
      for config in args.configs:
        for path in home.glob('jaxline/programs/*/*'):
          path.unlink()
        for case, cache in CASES[number % 2 :] + CASES[: number % 2]:
          found[config, case].append(measure(config, cache, home))
  for (config, case), rows in found.items():
    texts = [
      f'{statistics.median(x):6.1f} [{min(x):.1f}, {max(x):.1f}]'
      for x in zip(*rows, strict=True)
    ]
    print(f'{config:8} {case:5}', *texts, flush=True)


if __name__ == '__main__':
  main()
