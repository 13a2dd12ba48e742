"""Promise: each fault of docs/reference/reliability.md ends as that says.

By real processes, signals and file systems. Kills are in test_resume.py.
"""

import re
import shutil
import signal
import time

import numpy as np
import pytest

from jaxline import errors
from jaxline import platform
from jaxline import runs
from tests import remains
from tests import survivors
from tests.programs import survivor


@pytest.mark.process
def test_what_an_undisturbed_run_leaves(undisturbed):
  assert undisturbed['latest']['step'] == survivors.STEPS
  for mode, every in (('train', 1), ('eval', survivors.EVAL_EVERY)):
    losses = {r['step']: r['loss'] for r in undisturbed[f'{mode} curve']}
    assert [*losses] == [*range(every, survivors.STEPS + 1, every)]
    events = undisturbed[f'{mode} events']
    assert events == undisturbed[f'{mode} shown']
    assert events['loss'] == [(k, np.float32(x)) for k, x in losses.items()]
  assert undisturbed['best step'] == min(losses, key=losses.get)
  assert undisturbed['latest']['processes'][0]['input']['structure']


# SIGTERM and Ctrl-C.


def test_sigterm_before_python_listens(tmp_path, start):
  run = start(tmp_path)
  run.send(signal.SIGTERM)
  run.end(-signal.SIGTERM)  # 143 in a shell.
  assert remains.newest(tmp_path) is None


@pytest.mark.process
def test_sigterm_to_evaluation(stopped, start):
  # In an evaluation, and when it waits for the next checkpoint.
  for about in ({'what': 'start'}, {'what': 'end', 'step': 24}):
    run = start(stopped, mode='eval_one')
    assert run.wait_for('evaluation', **about), run.log
    run.send(signal.SIGTERM)
    run.end(75)
  steps = [r['step'] for r in remains.curve(stopped, 'eval_one')]
  assert steps == list(range(3, survivors.STOPPED_AT, survivors.SAVE_EVERY))


@pytest.mark.process
def test_ctrl_c_saves_and_a_second_one_leaves(tmp_path, start):
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


# The disk.


@pytest.mark.process
def test_full_disk(small_disk, undisturbed, start):
  folder, remount = small_disk
  run_dir = folder / 'run'
  run = start(run_dir, survivors.KEEP_ALL)
  run.end(1)
  assert 'No space left on device' in run.log
  before = remains.newest(run_dir)  # All that is visible is whole.
  assert before >= survivors.SAVE_EVERY
  remains.newest(run_dir, 'best')
  # One message, and nothing left of what did not fit.
  last = run.log.splitlines()[-1]
  assert re.search(r'^No space .* MiB free\).* Free some ', last), run.log
  assert list((run_dir / 'checkpoints').glob('**/*.partial')) == []
  # While it is full: an error again, and nothing lost.
  run = start(run_dir, survivors.KEEP_ALL)
  run.end(1)
  assert 'No space left on device' in run.log
  assert remains.newest(run_dir) >= before
  remount('size=50m')
  survivors.finished(run_dir, survivors.KEEP_ALL)
  assert remains.left_by(run_dir) == undisturbed


def refused(run_dir, match):
  config = survivor.get_config()
  config.checkpoint_dir = str(run_dir)
  with pytest.raises(errors.UsageError, match=match):
    platform.start(survivor.Survivor, config, 'train_and_eval')


def test_a_directory_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').write_text('')
  refused(tmp_path / 'file' / 'run', f'{tmp_path}/file/run')


def test_a_disk_that_cannot_be_written(small_disk):
  folder, remount = small_disk
  remount('ro')
  refused(folder / 'run', f'{folder}/run')


@pytest.mark.process
def test_a_directory_that_vanishes_or_is_in_use(tmp_path, start):
  run_dir = tmp_path / 'run'
  run = start(run_dir, faults={'step_secs': 0.02})
  assert run.wait_for_checkpoint('latest', 6)
  refused(run_dir, f'{run_dir} is in use')
  while run_dir.exists():
    shutil.rmtree(run_dir, ignore_errors=True)
  run.end(1)
  either = f"No such file or directory: '{run_dir}/|{run_dir}/.* was removed"
  assert re.search(either, run.log.splitlines()[-1])


@pytest.mark.process
def test_a_process_that_hangs_is_ended(stopped, undisturbed, start):
  # More than a compilation takes on a busy machine.
  run = start(stopped, '--config.watchdog_secs=8', faults={'hang_at': 40})
  run.end(70)
  for said in ('Watchdog: no sign of life', 'threading.Event().wait()'):
    assert said in run.log
  assert remains.newest(stopped) == 39
  assert not runs.read(stopped).has_ended
  survivors.finished(stopped)
  assert runs.read(stopped).has_ended
  assert remains.left_by(stopped) == undisturbed
