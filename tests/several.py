"""Runs of programs/multi.py by several processes that share a folder.

Each is a run of `platform.main` by all processes, on the CPU. Faults befall a
process at a known step.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

from tests import processes as processes_lib
from tests import remains
from tests.programs import events

ROOT = processes_lib.ROOT
PROGRAM = ROOT / 'tests' / 'programs' / 'multi.py'
# After this, what still runs is hanging: it is killed, and the test fails.
TIMEOUT_SECS = 100
# JAX's patience with a silent process; 100 s by default.
HEARTBEAT_SECS = 10
STEPS = 10
ABORTED = -signal.SIGABRT  # What JAX does with a process whose peer is lost.


@dataclasses.dataclass
class Ended:
  """How one process ended."""

  code: int  # Its exit code.
  said: list[dict]  # The records that the program printed.
  err: str  # Its stderr.
  at: float  # When it ended, in seconds, on the monotonic clock.

  def the(self, what):
    """Returns the one record of a kind."""
    (record,) = (r for r in self.said if r['what'] == what)
    return record

  def all(self, what, key):
    return [r[key] for r in self.said if r['what'] == what]


class Run:
  """The processes of one run."""

  def __init__(
    self, directory, style='sharded', *args, processes=2, devices=1, fault='',
    step_secs=0.0, directories=None, steps=STEPS,
  ):  # fmt: skip
    address = processes_lib.free_address()
    env = os.environ | {
      'PYTHONPATH': str(ROOT),
      'JAX_PLATFORMS': 'cpu',
      # Most of the time would go into LLVM.
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'
      ' --xla_backend_optimization_level=0',
      'MULTI_FAULT': fault,
      'MULTI_STEP_SECS': str(step_secs),
      'MULTI_HEARTBEAT_SECS': str(HEARTBEAT_SECS),
    }
    logs = directory.parent / f'logs_{directory.name}_{time.monotonic_ns()}'
    logs.mkdir()
    self.processes, self.logs, self.events = [], [], []
    for i in range(processes):
      where = directories[i] if directories else directory
      out, err, happened = (logs / f'{i}.{x}' for x in ('out', 'err', 'events'))
      self.logs.append((out, err))
      self.events.append(happened)
      command = (
        *(sys.executable, PROGRAM, address, str(processes), str(i), style),
        f'--config={PROGRAM}',
        f'--config.checkpoint_dir={where}',
        f'--config.training_steps={steps}',
        *args,
      )
      with out.open('wb') as out_file, err.open('wb') as err_file:
        self.processes.append(
          subprocess.Popen(
            command,
            env=env | {'EVENTS': str(happened)},
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
          )
        )

  def wait(self) -> list[Ended]:
    """Waits for all processes; kills those that hang, and fails."""
    deadline = time.monotonic() + TIMEOUT_SECS
    ended: dict[int, float] = {}
    try:
      while len(ended) < len(self.processes) and time.monotonic() < deadline:
        for i, process in enumerate(self.processes):
          if process.poll() is not None:
            ended.setdefault(i, time.monotonic())
        time.sleep(0.02)
    finally:
      self.kill()
    results = []
    for i, process in enumerate(self.processes):
      out, err = (path.read_text(errors='replace') for path in self.logs[i])
      said = [json.loads(x) for x in out.splitlines() if x.startswith('{')]
      results.append(Ended(process.returncode, said, err, ended.get(i, 0.0)))
    hanging = sorted(set(range(len(results))) - set(ended))
    assert not hanging, f'Processes {hanging} hang.\n' + errors(results)
    return results

  def wait_for(self, phase, process=0, **about):
    """Waits for an event of a process, see programs/events.py."""
    path = self.events[process]
    assert events.wait(
      lambda: bool(events.read(path, phase, **about)),
      lambda: self.processes[process].poll() is not None,
      TIMEOUT_SECS,
    ), errors(self.wait())

  def kill(self):
    for process in self.processes:
      process.kill()
    for process in self.processes:
      process.wait()


def errors(results: Sequence[Ended]) -> str:
  return '\n\n'.join(
    f'--- process {i}, code {r.code}: {r.err[-3000:]}'
    for i, r in enumerate(results)
  )


def run(*args, codes=0, **kwargs) -> list[Ended]:
  """Runs all to their end; `codes` are those of each or all; None is any."""
  results = Run(*args, **kwargs).wait()
  codes = [codes] * len(results) if isinstance(codes, int) else codes
  found = [r.code for r in results]
  assert codes is None or found == list(codes), errors(results)
  return results


def peers_end(results, dead, secs):
  """Checks that all others ended by themselves, non-zero, soon after one."""
  for i, result in enumerate(results):
    if i != dead:
      after = result.at - results[dead].at
      assert result.code not in (0, -signal.SIGKILL), errors(results)
      assert after < secs, errors(results)


def logged(directory, mode='train'):
  """Returns step -> scalars of metrics.jsonl, without times."""
  rows = {}
  for row in remains.curve(directory, mode):
    if 'loss' in row:
      assert row['step'] not in rows, 'It was logged twice.'
      kept = ('loss', 'grad_norm', 'rows')
      rows[row['step']] = {k: v for k, v in row.items() if k in kept}
  return rows
