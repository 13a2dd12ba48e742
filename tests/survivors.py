"""Runs of programs/survivor.py in processes of their own, and their logs."""

from collections.abc import Callable, Iterator
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from jaxline.run_directory import store
from tests import processes
from tests import remains
from tests.programs import events

PROGRAM = processes.ROOT / 'tests' / 'programs' / 'survivor.py'
STEPS, SAVE_EVERY, EVAL_EVERY = 45, 3, 5  # As survivor.py has them.
STOPPED_AT = 25  # Where the fixture `stopped` was killed.
KEEP_ALL = '--config.max_checkpoints_to_keep=1000'
TIMEOUT = 60  # Seconds in which any process must have ended, or got there.


class Run:
  """A run in a process of its own, and its log as it comes.

  Its events, and the compiled programs, are on no disk that a test fills. The
  undisturbed run writes the programs; the others only read them, because a kill
  could leave half of one.
  """

  def __init__(
    self,
    run_dir: Any,
    *args: str,
    mode: str = 'train_and_eval',
    faults: dict[str, Any] | None = None,
    keeps_programs: bool = False,
  ):
    self.checkpoints = store.at(run_dir).below('checkpoints')
    folder = pathlib.Path(os.environ['XDG_CACHE_HOME'], 'survivors')
    folder.mkdir(exist_ok=True)
    name = f'{time.monotonic_ns()}'
    self._events, self._log = folder / f'{name}.jsonl', folder / f'{name}.log'
    keeps = '0' if keeps_programs else '1e9'
    env = {
      'PYTHONPATH': str(processes.ROOT),
      'EVENTS': str(self._events),
      'JAX_COMPILATION_CACHE_DIR': str(folder / 'programs'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': keeps,
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
      'SURVIVOR': json.dumps(faults or {}),
      'XLA_FLAGS': '--xla_force_host_platform_device_count=1',
    }
    command = [
      *(sys.executable, PROGRAM, f'--config={PROGRAM}'),
      f'--config.checkpoint_dir={run_dir}',
      *(f'--jaxline_mode={mode}', '--config.console=off', *args),
    ]
    with self._log.open('wb') as log:
      self._process = subprocess.Popen(
        command,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
      )

  @property
  def log(self) -> str:
    return self._log.read_text(encoding='utf-8', errors='replace')

  def events(self, phase: str, **about: Any) -> list[dict[str, Any]]:
    return events.read(self._events, phase, **about)

  def wait_for(self, phase: str, count: int = 1, **about: Any) -> bool:
    """Returns whether so many events came before the process ended."""
    return self._wait(lambda: len(self.events(phase, **about)) >= count)

  def wait_for_line(self, pattern: str) -> bool:
    """The same, of a line on stderr: for tests that are about the line."""
    return self._wait(lambda: bool(re.search(pattern, self.log)))

  def wait_for_save(self, folder: str, count: int = 1) -> bool:
    """The same, of saves: names that are new in `data`, `latest` or `best`."""
    before, seen = {*self.checkpoints.names(folder)}, set[str]()

    def happened() -> bool:
      seen.update({*self.checkpoints.names(folder)} - before)
      return len(seen) >= count

    return self._wait(happened)

  def wait_for_checkpoint(self, series: str, step: int) -> bool:
    """The same, of a checkpoint of this step that is there."""
    return self._wait(lambda: f'{step}.json' in self.checkpoints.names(series))

  def _wait(self, happened: Callable[[], bool]) -> bool:
    is_over = lambda: self._process.poll() is not None
    try:
      return events.wait(happened, is_over, TIMEOUT)
    except TimeoutError as e:
      raise AssertionError(self.log[-4000:]) from e

  def send(self, signum: int) -> None:
    self._process.send_signal(signum)

  def end(self, code: int | None = None) -> int:
    """Waits for the end; returns the exit code, which is `code` if given."""
    try:
      found = self._process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
      raise AssertionError(f'It hangs:\n{self.log[-8000:]}') from None
    finally:
      self.kill()
    assert code in (None, found), (found, self.log[-8000:])
    return found

  def kill(self) -> None:
    self._process.kill()
    self._process.wait()


def finished(run_dir: Any, *args: str, **kwargs: Any) -> Run:
  """Runs to the end."""
  run = Run(run_dir, *args, **kwargs)
  run.end(0)
  return run


def check_resumed(run: Run, before: int | None) -> None:
  """A run goes on from the newest checkpoint that was there before."""
  restored = re.findall(r'Restored .*/latest/(\d+)\.', run.log)
  assert restored in ([], [str(before)]), (before, run.log[-8000:])
  if before is None:
    assert restored == []
  elif steps := run.events('step'):
    assert steps[0]['step'] == before + 1, run.log[-8000:]


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
  """Starts runs, and leaves none behind."""
  runs = []

  def start(*args: Any, **kwargs: Any) -> Run:
    runs.append(Run(*args, **kwargs))
    return runs[-1]

  yield start
  for run in runs:
    run.kill()


@pytest.fixture(scope='session')
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
  """What a run leaves that nothing happened to."""
  run_dir = tmp_path_factory.mktemp('undisturbed')
  finished(run_dir, keeps_programs=True)
  return remains.left_by(run_dir)


@pytest.fixture(scope='session')
def _stopped(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  run_dir = tmp_path_factory.mktemp('stopped')
  run = Run(run_dir, KEEP_ALL, faults={'hang_at': STOPPED_AT})
  try:
    assert run.wait_for_checkpoint('latest', 24), run.log
    assert run.wait_for_checkpoint('best', STOPPED_AT), run.log
    run.send(signal.SIGKILL)
  finally:
    run.kill()
  return run_dir


@pytest.fixture
def stopped(_stopped: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
  """A run that was killed after step 25, with checkpoints of 3, 6 ... 24."""
  return shutil.copytree(_stopped, tmp_path / 'run')
