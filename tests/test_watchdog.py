"""Tests of jaxline.supervision.watchdog: real processes that hang."""

import contextlib
import os
import pathlib
import pdb
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxline import debug
from jaxline.supervision import watchdog

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_SECS = 60

HEADER = """
import sys
import threading
from jaxline import debug
from jaxline.supervision import watchdog
"""


@contextlib.contextmanager
def started(code):
  """A Python program in a process; kills it in the end."""
  process = subprocess.Popen(
    [sys.executable, '-c', HEADER + code],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    text=True,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  with process:
    try:
      yield process
    finally:
      process.kill()


def run(code):
  """Returns the exit code and stderr of a program."""
  with started(code) as process:
    _, err = process.communicate(timeout=TIMEOUT_SECS)
    return process.returncode, err


def test_a_hang_is_reported_and_ended():
  code, err = run("""
lock = threading.Lock()
lock.acquire()

def wait_for_ever():
  lock.acquire()

def read_the_input():
  with debug.log_activity('reading'):
    lock.acquire()

threading.Thread(target=read_the_input, name='input', daemon=True).start()
with watchdog.Watchdog(0.3) as dog:
  debug.give_sign_of_life()
  with debug.log_activity('training loop'), debug.log_activity('evaluation'):
    wait_for_ever()
""")
  assert code == watchdog.EXIT_CODE == 70
  assert 'no sign of life for 0.3' in err
  assert "Thread 'MainThread' was in: training loop > evaluation\n" in err
  assert "Thread 'input' was in: reading\n" in err
  main, other = err.index("\nThread 'MainThread':"), err.index("'input':")
  assert 'in wait_for_ever' in err[main:]
  assert 'in read_the_input' in err[other:]
  assert "'watchdog'" not in err


@pytest.mark.process
def test_a_call_that_keeps_the_interpreter_is_ended_too():
  code, err = run("""
import itertools

def count_for_ever():
  return sum(itertools.repeat(1))

with watchdog.Watchdog(0.3):
  count_for_ever()
""")
  assert code == 1
  assert 'in count_for_ever' in err


def test_a_blocked_stderr_does_not_keep_the_process():
  code, _ = run("""
watchdog._REPORT_SECS = 0.2

class Blocked:
  def write(self, text):
    threading.Event().wait()

sys.stderr = Blocked()
with watchdog.Watchdog(0.2):
  threading.Event().wait()
""")
  assert code == watchdog.EXIT_CODE


@pytest.mark.process
def test_a_stopped_process_is_no_hang():
  # Stopped for longer than a silence may be, and not so long that the second
  # line, twice as long, would take it for a hang.
  with started("""
with watchdog.Watchdog(1.0) as dog:
  print('in', flush=True)
  stop = threading.Event()
  def beat():
    while not stop.wait(0.05):
      debug.give_sign_of_life()
  thread = threading.Thread(target=beat)
  thread.start()
  sys.stdin.readline()
  stop.set()
  thread.join()
""") as process:
    assert process.stdout.readline() == 'in\n'
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    time.sleep(1.4)
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate('\n', timeout=TIMEOUT_SECS)
    assert process.returncode == 0, err


# --- in this process ---------------------------------------------------------


class Clock:
  """Stands in for a watchdog's clock and pause: each tick is said here."""

  def __init__(self, monkeypatch):
    self.now = 0.0
    monkeypatch.setattr(watchdog.time, 'monotonic', lambda: self.now)

  def watch(self, secs, steps):
    """Returns the exit codes, after ticks of (seconds, what to do before)."""
    codes = []
    dog = watchdog.Watchdog(secs, exit=codes.append)
    steps = iter(steps)

    def wait(unused_tick):
      try:
        elapsed, act = next(steps)
      except StopIteration:
        return True
      act(dog)
      self.now += elapsed
      return False

    dog._stop.wait = wait
    dog._watch(secs)
    return codes


@pytest.fixture
def clock(monkeypatch):
  return Clock(monkeypatch)


def nothing(dog):
  del dog


def beat(dog):
  debug.give_sign_of_life()


def enter_and_leave(dog):
  del dog
  with debug.log_activity('anything'):
    pass


def test_silence_is_counted_from_the_last_sign(clock, capsys):
  # The first tick sees how things stand; then 40 ticks of 1 s are 40 s.
  quiet = [(1.0, nothing)] * 39
  for sign in (beat, enter_and_leave):
    assert clock.watch(40.0, [(1.0, nothing), *quiet, (1.0, sign)]) == []
    assert clock.watch(40.0, [(1.0, sign), *quiet, (1.0, nothing)]) == [70]
  assert 'no sign of life for 40.0 s' in capsys.readouterr().err


def test_a_tick_counts_no_longer_than_two(clock):
  # Ticks are 2 s here: an hour's stop counts as 4, and so do nine more.
  stops = [(3600.0, nothing)] * 10
  assert clock.watch(40.0, stops) == []
  assert clock.watch(40.0, [*stops, (3600.0, nothing)]) == [70]


def test_each_watched_thread_gives_signs_of_its_own(clock, capsys):
  inside, leave = threading.Event(), threading.Event()

  def evaluate(dog):
    with watchdog.watched():
      inside.set()
      assert leave.wait(TIMEOUT_SECS)

  thread = None

  def start(dog):
    nonlocal thread
    thread = threading.Thread(target=evaluate, args=(dog,), name='eval')
    thread.start()
    assert inside.wait(TIMEOUT_SECS)

  def end(dog):
    del dog
    leave.set()
    thread.join(TIMEOUT_SECS)

  for sign in (beat, enter_and_leave):
    inside.clear()
    leave.clear()
    # This thread is watched no more than others, and goes on giving signs.
    steps = [(1.0, start), *[(1.0, sign)] * 39]
    assert clock.watch(40.0, [*steps, (1.0, end), *[(1.0, sign)] * 40]) == []
    inside.clear()
    leave.clear()
    assert clock.watch(40.0, [*steps, (1.0, sign), (1.0, sign)]) == [70]
    end(None)
    assert (
      "no sign of life of thread 'eval' for 40.0" in capsys.readouterr().err
    )


def test_who_is_in_the_debugger_has_time(clock, monkeypatch):
  asked, go_on = threading.Event(), threading.Event()

  class Terminal:
    def readline(self):
      asked.set()
      assert go_on.wait(TIMEOUT_SECS)
      return 'q\n'

    def write(self, text):
      pass

    def flush(self):
      pass

  def debugged():
    try:
      raise ValueError
    except ValueError as e:
      debugger = pdb.Pdb(stdin=Terminal(), stdout=Terminal(), nosigint=True)
      debugger.reset()
      debugger.interaction(None, e.__traceback__)

  thread = threading.Thread(target=debugged)
  thread.start()
  try:
    assert asked.wait(TIMEOUT_SECS)
    assert clock.watch(40.0, [(4.0, nothing)] * 30) == []
  finally:
    go_on.set()
    thread.join(TIMEOUT_SECS)
  assert clock.watch(40.0, [(4.0, nothing)] * 30) == [70]


def test_it_ends_with_the_run_and_can_watch_another():
  dog = watchdog.Watchdog(3600.0)
  for _ in range(2):
    with dog:
      assert 'watchdog' in [t.name for t in threading.enumerate()]
    assert 'watchdog' not in [t.name for t in threading.enumerate()]


def test_none_is_no_watchdog():
  before = threading.active_count()
  with watchdog.Watchdog(None):
    debug.give_sign_of_life()
    assert threading.active_count() == before
