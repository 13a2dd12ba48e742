"""Time from the start of a process to its first finished step.

    python -m benchmarks.start

Ours is the command line with configs/lm.py for one step, first with an empty
compilation cache ('cold') and then again ('cached'). The baseline is
`hand_tuned.py` as a script: the same model, optimizer and batch, with tokens
from a file, and nothing else. The tokens are prepared before. We measure the
seconds until the line of step 1 is printed, and the CPU seconds of the process.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks import harness
from configs import lm as lm_config


def _first_step(command: list[str], env: dict[str, str]) -> harness.Sample:
  """Returns the seconds until a process prints `step 1`."""
  began = time.perf_counter()
  process = subprocess.Popen(
    [sys.executable, *command],
    cwd=harness.ROOT,
    env=os.environ | {'PYTHONPATH': str(harness.ROOT)} | env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  first = 0.0
  output = []
  assert process.stdout is not None
  for line in process.stdout:
    output.append(line)
    if not first and re.search(r'\bstep 1\b', line):
      first = time.perf_counter() - began
  _, status, usage = os.wait4(process.pid, 0)
  process.returncode = os.waitstatus_to_exitcode(status)
  if process.returncode or not first:
    raise RuntimeError(f'{command} failed:\n{"".join(output[-30:])}')
  return harness.Sample(first, usage.ru_utime + usage.ru_stime)


def _ours(home: pathlib.Path) -> harness.Sample:
  with tempfile.TemporaryDirectory() as directory:
    return _first_step(
      [
        *('experiment.py', '--config=configs/lm.py'),
        *('--config.training_steps=1', '--config.log_tensors_interval=1'),
        f'--config.checkpoint_dir={directory}',
      ],
      {'XDG_CACHE_HOME': str(home)},
    )


def _cold_and_cached(home: pathlib.Path) -> list[harness.Sample]:
  programs = list(home.glob('jaxline/programs/*'))
  assert programs, f'no compiled programs below {home}'
  for path in programs:
    path.unlink()
  return [_ours(home), _ours(home)]


def _write_plain(folder: pathlib.Path) -> list[str]:
  """Writes the input of the script; returns its command."""
  config = lm_config.get_config().copy_and_resolve_references()
  values = config.experiment_kwargs.config.to_dict()
  (folder / 'config.json').write_text(json.dumps(values))
  tokens = np.random.default_rng(0).integers(
    values['model']['vocab_size'], size=10_000_000
  )
  np.save(folder / 'tokens.npy', tokens.astype(np.uint16))
  script = harness.ROOT / 'benchmarks' / 'hand_tuned.py'
  return [
    str(script),
    *(str(folder / x) for x in ('config.json', 'tokens.npy')),
  ]


def rows(options: harness.Options) -> list[harness.Row]:
  """Measures the three starts in turns."""
  with tempfile.TemporaryDirectory() as name:
    home = pathlib.Path(name)
    plain = _write_plain(home)
    _ours(home)  # It also prepares the data.
    samples = harness.turns(
      {
        'plain': lambda: _first_step(plain, {}),
        'ours': lambda: _cold_and_cached(home),
      },
      options.num_rounds(5),
    )
  cold, cached = (list(x) for x in zip(*samples['ours'], strict=True))
  return [
    harness.row(
      'first step, cold',
      cold,
      'plain script',
      samples['plain'],
      unit='s',
      measure='difference',
      aim='<= 0.8',
    ),
    harness.row('first step, cached', cached, unit='s', aim='<= 2.2'),
    harness.row(
      'first step, cached',
      cached,
      'first step, cold',
      cold,
      unit='s',
      aim='<= 0.5',
    ),
  ]


if __name__ == '__main__':
  harness.main(rows, __doc__)
