"""Tests of jaxline.base.watchdog: real processes that hang."""

import os
import signal
import time

import pytest

from jaxline.base import watchdog
from tests import processes

HEADER = """
import concurrent.futures
import sys
import threading
import time
from jaxline.base import watchdog
for_ever = threading.Event().wait
"""


def test_a_hang_is_reported_and_ended():
  code = """
import contextlib

def read_the_input():
  for_ever()

threading.Thread(target=read_the_input, name='input', daemon=True).start()
with watchdog.limit(0.3), contextlib.ExitStack() as stack:
  stack.callback(for_ever)  # Hangs on the way out of an error.
  raise ValueError('the cause')
"""
  done = processes.run('-c', HEADER + code)
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
os.write(2, bytes(1 << 20))  # As many as there is room for.
os.set_blocking(2, True)
with watchdog.limit(0.2): for_ever()
""",
      70,
    ),
    # What is no hang: a long queue, such as a writer's at the end; the limit of
    # an older run; a program that goes on in a thread after `jaxline.fit`.
    (
      """
from jaxline.base import async_lib
executor = async_lib.SerialExecutor()
with watchdog.limit(0.5):
  for _ in range(10):
    executor.put(lambda: time.sleep(0.1))
  executor.wait()
time.sleep(0.8)
with watchdog.limit(3600): time.sleep(0.8)
with watchdog.limit(0.2): pass
threading.Thread(target=lambda: time.sleep(0.8)).start()
""",
      0,
    ),
    # What holds up the end of a process that ran `platform.main`.
    (
      """
watchdog.covers_exit = True
with watchdog.limit(0.3): pass
concurrent.futures.ThreadPoolExecutor().submit(for_ever)
""",
      70,
    ),
  ],
)
def test_how_a_process_ends(code, expected):
  assert processes.run('-c', HEADER + code).returncode == expected


@pytest.mark.process
def test_neither_a_stop_nor_a_debugger_is_a_hang():
  code = """
import pdb
with watchdog.limit(1.0):
  print('in', flush=True)
  sys.stdin.readline()
with watchdog.limit(0.3):
  try:
    1 / 0
  except ZeroDivisionError as e:
    pdb.post_mortem(e.__traceback__)
  print('goes on', flush=True)
  for_ever()
"""
  with processes.started('-c', HEADER + code) as process:
    assert process.stdout.readline() == 'in\n'
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    time.sleep(1.4)  # Shorter than the backstop, which counts it.
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.3)
    print(file=process.stdin, flush=True)
    time.sleep(1.8)  # Six times the limit, three times that of the backstop.
    assert process.poll() is None
    done = processes.end(process, 'c\n')
  assert 'goes on' in done.stdout
  assert done.returncode == 70
