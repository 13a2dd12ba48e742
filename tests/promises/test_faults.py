"""Promise: each fault of docs/reference/reliability.md ends as that says.

By real processes, signals and file systems. Kills are in test_resume.py.
"""

import re
import resource
import shutil
import signal
import time

import numpy as np
import pytest

from jaxline import errors
from jaxline import platform
from jaxline import runs
from tests import remains
from tests.programs import survivor
from tests.survivors import EVAL_EVERY
from tests.survivors import KEEP_ALL
from tests.survivors import SAVE_EVERY
from tests.survivors import STEPS
from tests.survivors import STOPPED_AT
from tests.survivors import finished


def test_what_an_undisturbed_run_leaves(undisturbed):
  assert undisturbed['latest']['step'] == STEPS
  steps = list(range(1, STEPS + 1))
  assert [r['step'] for r in undisturbed['train curve']] == steps
  evaluated = list(range(EVAL_EVERY, STEPS + 1, EVAL_EVERY))
  losses = {r['step']: r['loss'] for r in undisturbed['eval curve']}
  assert list(losses) == evaluated
  assert undisturbed['best step'] == min(losses, key=losses.get)
  for mode in ('train', 'eval'):
    events = undisturbed[f'{mode} events']
    assert events == undisturbed[f'{mode} shown']
    assert events['loss'] == [
      (r['step'], np.float32(r['loss'])) for r in undisturbed[f'{mode} curve']
    ]
  assert undisturbed['latest']['processes'][0]['input']['structure']


# SIGTERM and Ctrl-C.


def test_sigterm_before_python_listens(tmp_path, start):
  run = start(tmp_path)
  run.send(signal.SIGTERM)
  run.end(-signal.SIGTERM)  # 143 in a shell.
  assert remains.newest(tmp_path) is None


@pytest.mark.process
def test_sigterm_to_evaluation(stopped, start):
  for is_waiting in (False, True):
    run = start(stopped, mode='eval_one')
    if is_waiting:
      assert run.wait_for('evaluation', what='end', step=24), run.log
      time.sleep(1)  # It waits for the next checkpoint.
    else:
      assert run.wait_for('evaluation', what='start'), run.log
    run.send(signal.SIGTERM)
    run.end(75)
  steps = [r['step'] for r in remains.curve(stopped, 'eval_one')]
  assert steps == list(range(3, STOPPED_AT, SAVE_EVERY))


@pytest.mark.process
def test_ctrl_c_saves_and_a_second_one_leaves(tmp_path, undisturbed, start):
  run = start(tmp_path, faults={'step_secs': 0.03})
  assert run.wait_for('step', step=7)
  run.send(signal.SIGINT)
  run.end(130)
  (step,) = re.findall(r'Interrupted by Ctrl-C after step (\d+)', run.log)
  assert remains.newest(tmp_path) == int(step)
  run = start(tmp_path, faults={'hang_at': 20})
  assert run.wait_for_checkpoint('latest', 18)
  run.send(signal.SIGINT)
  assert run.wait_for_line('press Ctrl-C again')
  began = time.monotonic()
  run.send(signal.SIGINT)
  run.end(-signal.SIGINT)  # 130 in a shell.
  assert time.monotonic() - began < 5
  assert remains.newest(tmp_path) == 18
  finished(tmp_path)
  assert remains.left_by(tmp_path) == undisturbed


# The disk.


@pytest.mark.process
def test_full_disk(small_disk, undisturbed, start):
  folder, remount = small_disk
  run_dir = folder / 'run'
  run = start(run_dir, KEEP_ALL)
  run.end(1)
  assert 'No space left on device' in run.log
  before = remains.newest(run_dir)  # All that is visible is whole.
  assert before >= SAVE_EVERY
  remains.newest(run_dir, 'best')
  # One message, and nothing left of what did not fit.
  assert re.search(r'^No space .* MiB free\).* Free some ', run.lines[-1]), (
    run.log[-6000:]
  )
  trained = max(i for i, s in enumerate(run.lines) if re.search('step \\d', s))
  assert len(run.lines) - trained < 60, run.log[-8000:]
  for said in ('Event loop is closed', 'future.py', 'direct cause'):
    assert said not in run.log
  assert list((run_dir / 'checkpoints').glob('**/*.partial')) == []
  # While it is full: an error again, and nothing lost.
  run = start(run_dir, KEEP_ALL)
  run.end(1)
  assert 'No space left on device' in run.log
  assert remains.newest(run_dir) >= before
  remount('size=50m')
  finished(run_dir, KEEP_ALL)
  assert remains.left_by(run_dir) == undisturbed


@pytest.mark.process
def test_a_quota(tmp_path, undisturbed, start):
  run = start(tmp_path, faults={'step_secs': 0.03})
  assert run.wait_for_checkpoint('latest', 9)
  # Soon a write to the largest file ends within a record.
  largest = max(path.stat().st_size for path in (tmp_path / 'train').glob('*'))
  limit = largest + 250
  resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (limit, limit))
  run.end(1)
  assert 'File too large' in run.log
  assert remains.newest(tmp_path) >= 9
  remains.newest(tmp_path, 'best')
  finished(tmp_path)
  assert remains.left_by(tmp_path) == undisturbed


def test_a_directory_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').write_text('')
  check_refused(tmp_path / 'file' / 'run')


def test_a_disk_that_cannot_be_written(small_disk):
  folder, remount = small_disk
  remount('ro')
  check_refused(folder / 'run')


def check_refused(run_dir):
  config = survivor.get_config()
  config.checkpoint_dir = str(run_dir)
  with pytest.raises(errors.UsageError, match=str(run_dir)):
    platform.start(survivor.Survivor, config, 'train_and_eval')


@pytest.mark.process
@pytest.mark.parametrize(
  ('gone', 'said'),
  [
    ('', "No such file or directory: '{}/"),
    ('checkpoints/claims', '{}/checkpoints/claims/latest: another run has'),
  ],
)
def test_the_directory_vanishes(gone, said, tmp_path, start):
  run_dir = tmp_path / 'run'
  run = start(run_dir, faults={'step_secs': 0.02})
  assert run.wait_for_checkpoint('latest', 6)
  while (run_dir / gone).exists():
    shutil.rmtree(run_dir / gone, ignore_errors=True)
  run.end(1)
  assert said.format(run_dir) in run.log


# The program.


@pytest.mark.process
def test_a_process_that_hangs_is_ended(stopped, undisturbed, start):
  # More than a compilation takes on a busy machine.
  run = start(stopped, '--config.watchdog_secs=8', faults={'hang_at': 40})
  run.end(70)
  for said in (
    'Watchdog: no sign of life',
    "Thread 'MainThread':",
    'threading.Event().wait()',
  ):
    assert said in run.log
  assert remains.newest(stopped) == 39
  assert not runs.read(stopped).has_ended
  finished(stopped)
  assert runs.read(stopped).has_ended
  assert remains.left_by(stopped) == undisturbed


@pytest.mark.process
def test_two_runs_on_one_directory(tmp_path, start):
  first = start(tmp_path, faults={'hang_at': 7})
  assert first.wait_for_checkpoint('latest', 6)
  second = start(tmp_path)
  second.end(2)
  assert f'{tmp_path} is in use' in second.log
  assert 'Traceback' not in second.log
