"""Tests of jaxline.base.watchdog: real processes that hang."""

import os
import signal
import time

import pytest

from jaxline.base import watchdog
from tests import processes

HEADER = """
import atexit
import concurrent.futures
import sys
import threading
import time
from jaxline.base import watchdog
for_ever = threading.Event().wait
"""


def started(code):
  return processes.started('-c', HEADER + code)


def run(code):
  return processes.run('-c', HEADER + code)


def test_a_hang_is_reported_and_ended():
  done = run("""
import contextlib

def read_the_input():
  for_ever()

threading.Thread(target=read_the_input, name='input', daemon=True).start()
with watchdog.limit(0.3), contextlib.ExitStack() as stack:
  stack.callback(for_ever)  # Hangs on the way out of an error.
  raise ValueError('the cause')
""")
  err = done.stderr
  assert done.returncode == watchdog.EXIT_CODE == 70
  assert "\nThread 'MainThread':" in err
  assert 'in read_the_input' in err[err.index("\nThread 'input':") :]
  assert 'ValueError: the cause' in err
  assert 'in _tick' not in err


@pytest.mark.parametrize(
  ('code', 'expected'),
  [
    # A call that keeps the interpreter's lock.
    ('import itertools\nwith watchdog.limit(0.3): sum(itertools.repeat(1))', 1),
    # A stderr that nobody reads.
    (
      """
import os
watchdog._REPORT_SECS = 0.2
_, end = os.pipe()
os.dup2(end, 2)
os.set_blocking(2, False)
for size in (65536, 1):
  try:
    while True:
      os.write(2, size * b'x')
  except BlockingIOError:
    pass
os.set_blocking(2, True)
with watchdog.limit(0.2): for_ever()
""",
      70,
    ),
    # A long queue, such as a writer's at the end, is no hang.
    (
      """
from jaxline.base import async_lib
executor = async_lib.SerialExecutor()
with watchdog.limit(0.5):
  for _ in range(10):
    executor.put(lambda: time.sleep(0.1))
  executor.wait()
""",
      0,
    ),
    # The limit is that of the newest run, and ends with it.
    (
      """
with watchdog.limit(0.2): pass
time.sleep(0.6)
with watchdog.limit(3600): time.sleep(0.6)
""",
      0,
    ),
    # What holds up the end of a process that ran `platform.main`.
    *(
      (f'watchdog.covers_exit = 1\nwith watchdog.limit(0.3): pass\n{hang}', 70)
      for hang in (
        'atexit.register(for_ever)',
        'concurrent.futures.ThreadPoolExecutor().submit(for_ever)',
        'threading.Thread(target=for_ever).start()\nraise ValueError',
      )
    ),
    # A program that served `jaxline.fit` may go on in a thread.
    (
      """
with watchdog.limit(0.2): pass
threading.Thread(target=lambda: time.sleep(0.8)).start()
""",
      0,
    ),
    # A forked process is not watched over by its parent's run.
    (
      """
import os
with watchdog.limit(0.3):
  if not (child := os.fork()):
    time.sleep(0.6)
    with watchdog.limit(0.3): pass
    time.sleep(0.6)
    os._exit(0)
  while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    watchdog.report_progress()
    time.sleep(0.01)
sys.exit(os.waitstatus_to_exitcode(ended[1]))
""",
      0,
    ),
  ],
)
def test_how_a_process_ends(code, expected):
  assert run(code).returncode == expected


@pytest.mark.process
def test_the_time_of_a_stop_does_not_count():
  # Shorter than the backstop, which counts it.
  with started("""
with watchdog.limit(1.0):
  print('in', flush=True)
  sys.stdin.readline()
""") as process:
    assert process.stdout.readline() == 'in\n'
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    time.sleep(1.4)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.3)
    assert processes.end(process, '\n').returncode == 0


@pytest.mark.process
def test_a_debugger_stops_the_clock():
  with started("""
import pdb
with watchdog.limit(0.3):
  try:
    1 / 0
  except ZeroDivisionError as e:
    pdb.post_mortem(e.__traceback__)
  print('goes on', flush=True)
  for_ever()
""") as process:
    time.sleep(3)  # Ten times the limit, five times that of the backstop.
    assert process.poll() is None
    done = processes.end(process, 'c\n')
  assert 'goes on' in done.stdout
  assert done.returncode == 70
