"""Every fault of docs/reference/reliability.md, by real processes and signals.

The kills of the slow suite: pytest tests/test_faults.py -m slow -n 0
"""

import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxline import runs
from jaxline.run_directory import store
from tests import buckets
from tests import remains
from tests.programs import events

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = ROOT / 'tests' / 'programs' / 'survivor.py'
STEPS, SAVE_EVERY, EVAL_EVERY = 45, 3, 5  # As survivor.py has them.
STOPPED_AT = 25  # Where the fixture `stopped` was killed.
KEEP_ALL = '--config.max_checkpoints_to_keep=1000'
TIMEOUT = 60  # Seconds in which any process must have ended, or got there.
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
SLOW_SEEDS = 25


class Run:
  """A run in a process of its own, and its log as it comes.

  Attributes:
    folder: where events are written, on no disk that a test fills. Compiled
      programs are kept there as well: the undisturbed run writes them, the
      others only read them, because a kill could leave half of one.
  """

  folder = None

  def __init__(
    self,
    run_dir,
    *args,
    mode='train_and_eval',
    faults=None,
    keeps_programs=False,
  ):
    self.checkpoints = store.at(run_dir).below('checkpoints')
    self.lines = []
    self._events = self.folder / f'{time.monotonic_ns()}.jsonl'
    self._process = subprocess.Popen(
      [
        sys.executable,
        str(PROGRAM),
        f'--config={PROGRAM}',
        f'--config.checkpoint_dir={run_dir}',
        f'--jaxline_mode={mode}',
        '--config.console=off',
        *args,
      ],
      env=os.environ
      | {
        'PYTHONPATH': str(ROOT),
        'EVENTS': str(self._events),
        'JAX_COMPILATION_CACHE_DIR': str(self.folder / 'programs'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': (
          '0' if keeps_programs else '1e9'
        ),
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        'SURVIVOR': json.dumps(faults or {}),
        'XLA_FLAGS': '--xla_force_host_platform_device_count=1',
      },
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      errors='replace',
    )
    self._reader = threading.Thread(target=self._read)
    self._reader.start()

  def _read(self):
    with self._process.stderr as log:
      self.lines.extend(log)

  @property
  def pid(self):
    return self._process.pid

  @property
  def log(self):
    return ''.join(self.lines)

  def events(self, phase, **about):
    return events.read(self._events, phase, **about)

  def wait_for(self, phase, count=1, **about):
    """Returns whether so many events came before the process ended."""
    return self._wait(lambda: len(self.events(phase, **about)) >= count)

  def wait_for_step(self, step):
    """The same, of a step of training that has been taken."""
    return self._wait(lambda: bool(self.events('step', step=step)))

  def wait_for_line(self, pattern):
    """The same, of a line on stderr: for tests that are about the line."""
    return self._wait(lambda: any(re.search(pattern, x) for x in self.lines))

  def wait_for_save(self, folder, count=1):
    """The same, of saves: names that are new in `data`, `latest` or `best`."""
    before, seen = {*self.checkpoints.names(folder)}, set()

    def happened():
      seen.update({*self.checkpoints.names(folder)} - before)
      return len(seen) >= count

    return self._wait(happened)

  def wait_for_checkpoint(self, series, step):
    """The same, of a checkpoint of this step that is there."""
    return self._wait(lambda: f'{step}.json' in self.checkpoints.names(series))

  def _wait(self, happened):
    is_over = lambda: self._process.poll() is not None
    try:
      return events.wait(happened, is_over, TIMEOUT)
    except TimeoutError as e:
      raise AssertionError(self.log[-4000:]) from e

  def send(self, signum):
    self._process.send_signal(signum)

  def end(self):
    """Waits for the end, never for ever; returns the exit code."""
    try:
      code = self._process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
      raise AssertionError(f'It hangs:\n{self.log[-8000:]}') from None
    finally:
      self.kill()
    return code

  def kill(self):
    self._process.kill()
    self._process.wait()
    self._reader.join()


@pytest.fixture(autouse=True, scope='module')
def _events(tmp_path_factory):
  Run.folder = tmp_path_factory.mktemp('events')


@pytest.fixture
def start():
  """Starts runs, and leaves none behind."""
  runs = []

  def start(*args, **kwargs):
    runs.append(Run(*args, **kwargs))
    return runs[-1]

  yield start
  for run in runs:
    run.kill()


def finished(run_dir, *args, **kwargs):
  """Runs to the end."""
  run = Run(run_dir, *args, **kwargs)
  assert run.end() == 0, run.log[-8000:]
  return run


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """What a run leaves that nothing happened to."""
  run_dir = tmp_path_factory.mktemp('undisturbed')
  finished(run_dir, keeps_programs=True)
  return remains.left_by(run_dir)


@pytest.fixture(scope='module')
def stopped_dir(tmp_path_factory):
  run_dir = tmp_path_factory.mktemp('stopped')
  run = Run(run_dir, KEEP_ALL, faults={'hang_at': STOPPED_AT})
  try:
    assert run.wait_for_checkpoint('latest', 24), run.log
    assert run.wait_for_checkpoint('best', STOPPED_AT), run.log
  finally:
    run.kill()
  return run_dir


@pytest.fixture
def stopped(stopped_dir, tmp_path):
  """A run that was killed after step 25, with checkpoints of 3, 6 ... 24."""
  return shutil.copytree(stopped_dir, tmp_path / 'run')


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


# The shortest way to lose nothing; all others are in the next tier.


def test_a_run_that_is_killed_and_told_to_end_is_the_same(
  tmp_path, undisturbed, start
):
  faults = {'step_secs': 0.01}
  run = start(tmp_path, faults=faults)
  assert run.wait_for_checkpoint('latest', 6), run.log
  run.send(signal.SIGKILL)
  assert run.end() == -signal.SIGKILL
  killed_at = remains.newest(tmp_path)
  assert killed_at >= 6
  run = start(tmp_path, faults=faults)
  assert run.wait_for_step(killed_at + 4), run.log
  run.send(signal.SIGTERM)
  assert run.end() == 75, run.log[-8000:]
  check_resumed(run, killed_at)
  ended_at = remains.newest(tmp_path)
  assert ended_at == run.events('step')[-1]['step'] >= killed_at + 4
  check_resumed(finished(tmp_path), ended_at)
  assert remains.left_by(tmp_path) == undisturbed


# kill -9


def wait_until(run, what, rng):
  """Waits for something to begin, and up to a while beyond."""
  # Late instants are rarer, that the run is interrupted often before its end.
  count = int(rng.integers(1, 4, 2).min())
  happened, seconds = {
    'start-up': (lambda: True, 2.0),
    'restore': (lambda: run.wait_for('checkpoint restore'), 0.1),
    'logs': (lambda: run.wait_for('resuming the logs'), 0.02),
    'training': (lambda: run.wait_for('step', 2 * count), 0.05),
    'evaluation': (lambda: run.wait_for('evaluation'), 0.05),
    'save': (lambda: run.wait_for_save('data', count), 0.15),
    'saved': (lambda: run.wait_for_save('latest', count), 0.02),
    'best': (lambda: run.wait_for_save('best'), 0.15),
    'end': (lambda: run.wait_for('final checkpoint'), 0.3),
  }[what]
  if not happened():
    return False
  time.sleep(rng.uniform(0, seconds))
  return True


def check_resumed(run, before):
  """A run goes on from the newest checkpoint that was there before."""
  restored = re.findall(r'Restored .*/latest/(\d+)\.', run.log)
  assert restored in ([], [str(before)]), (before, run.log[-8000:])
  if before is None:
    assert restored == []
  elif steps := run.events('step'):
    assert steps[0]['step'] == before + 1, run.log[-8000:]


def interrupt_at_random(run_dir, seed, signum, faults=None):
  """Ends a run many times, until it ends by itself.

  Returns:
    What was going on at each of the times; the exit codes.
  """
  rng = np.random.default_rng([seed, int(signum)])
  plan = ['save', 'restore', 'start-up', 'training', 'saved', 'logs']
  plan += ['best', 'restore', 'evaluation', 'save', 'start-up']
  plan = [*rng.permutation(plan), 'end', None]
  done, codes, before = [], [], None
  for what in plan:
    if what == 'restore' and before is None:
      what = 'save'
    run = Run(run_dir, faults=faults)
    try:
      if what is not None and wait_until(run, what, rng):
        run.send(signum)
        done.append(what)
      codes.append(run.end())
    finally:
      run.kill()
    check_resumed(run, before)
    # Nothing that was saved is lost.
    after = remains.newest(run_dir)
    assert (after or 0) >= (before or 0), (what, before, after)
    remains.newest(run_dir, 'best')
    if codes[-1] == 75:
      # Not a step is lost: the newest is of the last one that was taken.
      taken = run.events('step') or [{'step': before}]
      assert after == taken[-1]['step'], (what, run.log[-8000:])
      assert not after or remains.curve(run_dir, 'train')[-1]['step'] == after
    before = after
    if codes[-1] == 0:
      break
    assert codes[-1] in (-signum, 75), (what, run.log[-8000:])
  assert codes[-1] == 0
  return done, codes


SEEDS = [
  pytest.param(0, marks=pytest.mark.process),
  *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, SLOW_SEEDS + 1)),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize('signum', SIGNALS, ids=lambda signum: signum.name)
@pytest.mark.parametrize('seed', SEEDS)
def test_interrupted_at_any_instant(tmp_path, undisturbed, signum, seed):
  # Else it may get to its end before it was interrupted often.
  faults = {'step_secs': 0.04}
  done, codes = interrupt_at_random(tmp_path, seed, signum, faults)
  print(f'{signum.name} seed {seed}: {list(zip(done, codes, strict=False))}')
  assert len(done) >= 8
  assert remains.left_by(tmp_path) == undisturbed


@pytest.mark.process
def test_killed_in_a_bucket(tmp_path, undisturbed, start, monkeypatch):
  program = [sys.executable, ROOT / 'tests' / 'buckets.py', '0']
  with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
    try:
      endpoint = server.stdout.readline().strip()
      monkeypatch.setenv('TENSORSTORE_GCS_HTTP_URL', endpoint)
      monkeypatch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'x')
      url = f'gs://{buckets.new_bucket(endpoint)}/run'
      before = None
      for folder, count in [('data', 2), ('latest', 3), ('best', 1), ('', 0)]:
        run = start(url)
        if folder:
          assert run.wait_for_save(folder, count), run.log
          run.send(signal.SIGKILL)
        assert run.end() == (-signal.SIGKILL if folder else 0), run.log
        check_resumed(run, before)
        before = remains.newest(url)
        # As the log says: else the next one waits for a sign of life.
        run.checkpoints.delete_folder('claims')
      remains.copy(url, tmp_path)
      assert remains.left_by(tmp_path) == undisturbed
    finally:
      server.kill()


# Evaluation in a process of its own.


def follow(run_dir, start, seed, num_kills):
  """Kills a run, and the evaluation that follows it, until both have ended."""
  rng = np.random.default_rng([seed, 1])
  faults = {'train': {'step_secs': 0.03}, 'eval': {}}
  seconds = {'train': 1.5, 'eval': 0.5}
  phase = {'train': 'training loop', 'eval': 'evaluation'}
  runs = {'train': [], 'eval': []}

  def begin(mode):
    runs[mode].append(start(run_dir, KEEP_ALL, mode=mode, faults=faults[mode]))

  for mode in runs:
    begin(mode)
  while open_modes := [m for m in runs if len(runs[m]) <= num_kills]:
    mode = str(rng.choice(open_modes))
    run = runs[mode][-1]
    # Two of three beyond the start-up, if they get there.
    if rng.integers(3):
      run.wait_for(phase[mode], int(rng.integers(1, 4)), what='start')
    time.sleep(rng.uniform(0, seconds[mode]))
    run.kill()
    remains.newest(run_dir)
    remains.newest(run_dir, 'best')
    begin(mode)
  for mode in runs:
    assert runs[mode][-1].end() == 0, runs[mode][-1].log[-8000:]
  begun = [
    event['step']
    for run in runs['eval']
    for event in run.events('evaluation', what='start')
  ]
  # Again is evaluated only what a kill has interrupted.
  assert len(set(begun)) == STEPS // SAVE_EVERY
  assert len(begun) <= len(set(begun)) + num_kills, begun
  return begun


def check_followed(run_dir, undisturbed):
  steps = remains.steps(run_dir)
  # And where a SIGTERM came.
  assert set(steps) >= set(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))
  assert remains.bits(run_dir, STEPS) == undisturbed['latest']
  assert remains.curve(run_dir, 'train') == undisturbed['train curve']
  evaluated = remains.curve(run_dir, 'eval')
  assert [r['step'] for r in evaluated] == steps  # Each once.
  assert [
    step for step, _ in remains.tensorboard(run_dir, 'eval', False)['loss']
  ] == (steps)
  # The same in one go, afterwards.
  finished(run_dir, '--config.eval_steps=all', KEEP_ALL, mode='eval_again')
  assert evaluated == remains.curve(run_dir, 'eval_again')
  losses = {r['step']: r['loss'] for r in evaluated}
  assert remains.newest(run_dir, 'best') == min(losses, key=losses.get)
  # Those that both modes evaluate.
  both = [r for r in undisturbed['eval curve'] if r['step'] % SAVE_EVERY == 0]
  assert [r for r in evaluated if r in both] == both


@pytest.mark.process
def test_training_and_evaluation_in_two_threads(tmp_path, undisturbed, start):
  mode = 'train_eval_multithreaded'
  for signum, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 75)):
    run = start(tmp_path, KEEP_ALL, mode=mode, faults={'step_secs': 0.03})
    assert run.wait_for('evaluation', 2, what='end')
    run.send(signum)
    assert run.end() == code, run.log[-8000:]
    remains.newest(tmp_path, 'best')
    assert remains.newest(tmp_path) >= 2 * SAVE_EVERY
  finished(tmp_path, KEEP_ALL, mode=mode)
  check_followed(tmp_path, undisturbed)


@pytest.mark.timeout(900)
@pytest.mark.parametrize('seed', SEEDS)
def test_evaluation_of_a_run_that_is_killed(tmp_path, undisturbed, start, seed):
  print(f'seed {seed}: {follow(tmp_path, start, seed, 6 if seed else 3)}')
  check_followed(tmp_path, undisturbed)


# SIGTERM and Ctrl-C.


def test_sigterm_before_python_listens(tmp_path, start):
  run = start(tmp_path)
  run.send(signal.SIGTERM)
  assert run.end() == -signal.SIGTERM  # 143 in a shell.
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
    assert run.end() == 75, run.log[-8000:]
  steps = [r['step'] for r in remains.curve(stopped, 'eval_one')]
  assert steps == list(range(3, STOPPED_AT, SAVE_EVERY))


@pytest.mark.process
def test_ctrl_c_saves_and_a_second_one_leaves(tmp_path, undisturbed, start):
  run = start(tmp_path, faults={'step_secs': 0.03})
  assert run.wait_for_step(7)
  run.send(signal.SIGINT)
  assert run.end() == 130, run.log[-8000:]
  (step,) = re.findall(r'Interrupted by Ctrl-C after step (\d+)', run.log)
  assert remains.newest(tmp_path) == int(step)
  run = start(tmp_path, faults={'hang_at': 20})
  assert run.wait_for_checkpoint('latest', 18)
  run.send(signal.SIGINT)
  assert run.wait_for_line('press Ctrl-C again')
  began = time.monotonic()
  run.send(signal.SIGINT)
  assert run.end() == -signal.SIGINT  # 130 in a shell.
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
  assert run.end() == 1, run.log[-8000:]
  assert 'No space left on device' in run.log
  before = remains.newest(run_dir)  # All that is visible is whole.
  assert before >= SAVE_EVERY
  remains.newest(run_dir, 'best')
  # One message, and nothing left of what did not fit.
  assert re.search(r'^No space .* MiB free\).* Make room, ', run.lines[-1]), (
    run.log[-6000:]
  )
  trained = max(i for i, s in enumerate(run.lines) if re.search('step \\d', s))
  assert len(run.lines) - trained < 60, run.log[-8000:]
  for said in ('Event loop is closed', 'future.py', 'direct cause'):
    assert said not in run.log
  assert list((run_dir / 'checkpoints').glob('**/*.partial')) == []
  # While it is full: an error again, and nothing lost.
  run = start(run_dir, KEEP_ALL)
  assert run.end() == 1, run.log[-8000:]
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
  assert run.end() == 1, run.log[-8000:]
  assert 'File too large' in run.log
  assert remains.newest(tmp_path) >= 9
  remains.newest(tmp_path, 'best')
  finished(tmp_path)
  assert remains.left_by(tmp_path) == undisturbed


def check_refused(start, run_dir):
  run = start(run_dir)
  assert run.end() == 2, run.log[-8000:]
  assert str(run_dir) in run.log
  assert 'Traceback' not in run.log


def test_a_directory_that_cannot_be_written(tmp_path, start):
  (tmp_path / 'file').write_text('')
  check_refused(start, tmp_path / 'file' / 'run')


def test_a_disk_that_cannot_be_written(small_disk, start):
  folder, remount = small_disk
  remount('ro')
  check_refused(start, folder / 'run')


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
  assert run.end() == 1, run.log[-8000:]
  assert said.format(run_dir) in run.log


# The program.


@pytest.mark.process
def test_what_ends_in_an_error_goes_on(stopped, undisturbed, start):
  ends = [
    # What fails; exit code; what is said; the newest checkpoint then.
    ({'input_at': 27}, 1, 'The input fails at batch 27', 27),
    ({'evaluate_at': 30}, 1, 'The evaluation fails at step 30', 30),
    ({'nan_at': 31}, 1, 'loss and gradients of step 32 are not finite', 30),
    ({'hang_at': 40}, 70, 'Watchdog: no sign of life', 39),
  ]
  for faults, code, said, step in ends:
    # More than a compilation takes on a busy machine.
    secs = 8 if 'hang_at' in faults else 60
    run = start(stopped, f'--config.watchdog_secs={secs}', faults=faults)
    assert run.end() == code, (faults, run.log[-8000:])
    assert said in run.log
    assert remains.newest(stopped) == step, run.log[-8000:]
    remains.newest(stopped, 'best')
    assert not runs.read(stopped).has_ended
  assert "Thread 'MainThread':" in run.log
  assert 'threading.Event().wait()' in run.log
  finished(stopped)
  assert runs.read(stopped).has_ended
  assert remains.left_by(stopped) == undisturbed


@pytest.mark.process
def test_the_clock_jumps_back(stopped, undisturbed):
  hour = 3600
  finished(
    stopped,
    faults={'clock': -2 * hour, 'clock_jump': -hour, 'clock_jump_at': 33},
  )
  assert remains.left_by(stopped) == undisturbed


@pytest.mark.process
def test_two_runs_on_one_directory(tmp_path, start):
  first = start(tmp_path, faults={'hang_at': 7})
  assert first.wait_for_checkpoint('latest', 6)
  second = start(tmp_path)
  assert second.end() == 2, second.log[-8000:]
  assert f'{tmp_path} is in use' in second.log
  assert 'Traceback' not in second.log
  first.kill()  # What it had claimed goes with it.
  third = start(tmp_path, faults={'hang_at': 10})
  assert third.wait_for_checkpoint('latest', 9)
  assert f'Restored {tmp_path}/checkpoints/latest/6.' in third.log
