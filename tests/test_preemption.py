"""Tests of jaxline.supervision.preemption: real processes, real signals."""

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxline.supervision import preemption

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_SECS = 60
# Nearly all of them start a process and send it signals.
pytestmark = pytest.mark.process
AGAIN = 'press Ctrl-C again to leave at once'

# What the programs below begin with. They say on stdout where they are, and
# wait for a line where the test is to act first.
HEADER = """
import select
import sys
from jaxline.supervision import preemption

def say(*words):
  print(*words, flush=True)

def wait():
  # Not a read alone: Python runs no handler for a signal that came just before.
  while not select.select([sys.stdin], [], [], 0.05)[0]:
    pass
  sys.stdin.readline()
"""

STEPS = """
import time
with preemption.Watch() as watch, watch.training():
  step = 0
  while True:
    step += 1
    if watch.reached(step):
      say('saving')
      wait()
      say('saved')
      try:
        watch.leave()
      except preemption.Preempted as e:
        say(e)
        raise
    if step == 1:
      say('stepping')
    time.sleep(0.001)
"""


class Program:
  """A Python program in a process and a process group of its own."""

  def __init__(self, code, *args, shell=None):
    command = [sys.executable, '-c', HEADER + code, *args]
    if shell is not None:
      command = ['sh', '-c', f'{shell}; exec "$@"', 'sh', *command]
    self.process = subprocess.Popen(
      command,
      # JAX says what the hosts have agreed upon, at level 0.
      env=os.environ | {'PYTHONPATH': str(ROOT), 'TF_CPP_MIN_LOG_LEVEL': '0'},
      text=True,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      start_new_session=True,
    )
    self.pid = self.process.pid

  def said(self, words):
    """Waits until the program has said these words."""
    for line in self.process.stdout:
      if line.strip() == words:
        return
    pytest.fail(f'It never said {words!r}: {self.process.stderr.read()}')

  def complained(self, words):
    for line in self.process.stderr:
      if words in line:
        return
    pytest.fail(f'stderr never had {words!r}.')

  def tell(self):
    self.process.stdin.write('\n')
    self.process.stdin.flush()

  def kill(self, signum):
    os.kill(self.pid, signum)

  def end(self):
    """Returns the exit code, and the rest of stdout and stderr."""
    # Not by `communicate`: it closes stdin, which ends a `wait()`, and does not
    # see what `said` has read ahead.
    code = self.process.wait(TIMEOUT_SECS)
    return code, self.process.stdout.read(), self.process.stderr.read()


@pytest.fixture
def start():
  with contextlib.ExitStack() as stack:

    def start_one(*args, **kwargs):
      program = Program(*args, **kwargs)
      stack.enter_context(program.process)
      stack.callback(program.process.kill)
      return program

    yield start_one


# --- in training -------------------------------------------------------------


@pytest.mark.parametrize(
  ('signum', 'code', 'why'),
  [
    (signal.SIGTERM, 75, 'Preempted by SIGTERM after step '),
    (signal.SIGINT, 130, 'Interrupted by Ctrl-C after step '),
  ],
)
def test_a_notice_in_training_is_noted_for_the_next_step(
  start, signum, code, why
):
  program = start(STEPS)
  program.said('stepping')
  program.kill(signum)
  program.said('saving')
  # Neither hurries the save, nor changes the code.
  program.kill(signal.SIGTERM)
  program.tell()
  got, out, err = program.end()
  assert got == code, err
  said = out.splitlines()
  assert said[0] == 'saved'
  assert said[1].startswith(why)
  assert err.count(AGAIN) == (signum == signal.SIGINT)
  assert 'Traceback' not in err


def test_a_second_interrupt_leaves_the_save_at_once(start):
  program = start(STEPS)
  program.said('stepping')
  program.kill(signal.SIGINT)
  program.said('saving')
  program.complained(f'Ctrl-C: saving, then leaving; {AGAIN}')
  program.kill(signal.SIGINT)
  code, out, _ = program.end()
  assert (code, out) == (-signal.SIGINT, '')  # 130 in a shell.


def test_an_interrupt_during_the_save_for_sigterm_changes_nothing(start):
  program = start(STEPS)
  program.said('stepping')
  program.kill(signal.SIGTERM)
  program.said('saving')
  program.kill(signal.SIGINT)
  program.complained(AGAIN)
  program.tell()
  code, out, _ = program.end()
  assert code == 75
  assert out.startswith('saved\nPreempted by SIGTERM')


def test_a_second_interrupt_leaves_even_a_call_into_c(start):
  # A lock taken twice: unlike a sleep, it does not come back for a signal.
  program = start("""
import ctypes, time
mutex = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock
with preemption.Watch() as watch, watch.training():
  say('stepping')
  while not watch.reached(1):
    time.sleep(0.001)
  lock(mutex)
  say('in C')
  lock(mutex)
  say('back')
""")
  program.said('stepping')
  program.kill(signal.SIGINT)
  program.complained(AGAIN)
  program.said('in C')
  program.kill(signal.SIGINT)
  code, out, _ = program.end()
  assert (code, out) == (-signal.SIGINT, '')


def test_what_is_ignored_stays_ignored(start):
  program = start(
    """
with preemption.Watch() as watch, watch.training():
  say('in')
  wait()
  say(watch.reached(1))
""",
    shell="trap '' INT TERM",
  )
  program.said('in')
  for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
    program.kill(signum)
  program.tell()
  assert program.end() == (0, 'False\n', '')


def test_a_forked_worker_has_its_own_signals(start):
  program = start("""
import os, signal, time
with preemption.Watch() as watch, watch.training():
  read_end, write_end = os.pipe()
  child = os.fork()
  if child == 0:
    say('child')
    time.sleep(1)  # Not a pause, which the signal could come before.
    os.write(write_end, b'x')
    signal.pause()
  os.close(write_end)
  while not watch.reached(1):
    time.sleep(0.001)
  assert os.read(read_end, 1) == b'x', 'It died of the interrupt.'
  os.kill(child, signal.SIGTERM)
  say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
  wait()
  watch.leave()
""")
  program.said('child')
  os.killpg(program.pid, signal.SIGINT)  # As the terminal does.
  program.said('-15')
  program.tell()
  code, _, err = program.end()
  assert code == 130, err
  assert err.count(AGAIN) == 1


# --- elsewhere ---------------------------------------------------------------


@pytest.mark.parametrize(
  ('signum', 'code'), [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
def test_a_notice_during_start_up_leaves_at_once(start, signum, code):
  program = start("""
import signal
with preemption.Watch() as watch:
  try:
    say('starting')
    wait()
  finally:
    signal.raise_signal(signal.SIGTERM)  # Too late to change anything.
    say('closed')
""")
  program.said('starting')
  program.kill(signum)
  got, out, err = program.end()
  assert (got, out) == (code, 'closed\n')
  assert 'Traceback' not in err


@pytest.mark.parametrize(
  ('signum', 'code'), [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
def test_a_notice_that_was_swallowed_acts_when_the_run_or_training_begins(
  signum, code
):
  for begin in (preemption.begin_run, lambda: watch.training().__enter__()):
    with preemption.Watch() as watch:
      with raises_preempted(code):  # As Python does in `__del__`.
        signal.raise_signal(signum)
      with raises_preempted(code):
        begin()


def test_after_the_watch_the_handlers_are_those_from_before():
  signums = (signal.SIGTERM, signal.SIGINT)
  handlers = lambda: [signal.getsignal(signum) for signum in signums]
  before = handlers()
  with preemption.Watch() as watch:
    assert not {*handlers()} & {*before}
    preemption.begin_run()
    assert not {*handlers()} & {*before}
    with preemption.paused():
      assert handlers() == before
    assert not {*handlers()} & {*before}
    with watch.training():
      signal.raise_signal(signal.SIGINT)
      # The second one ends the process, also after a prompt.
      for _ in range(2):
        assert handlers()[1] == signal.SIG_DFL
        with preemption.paused():
          assert handlers() == before
      with raises_preempted(130):
        watch.leave()
      watch._notice = None
  assert handlers() == before


# --- handlers of the program itself ------------------------------------------

CLIENT = """
import logging, signal, time
heard = []
signum = int(sys.argv[1])
signal.signal(signum, lambda *unused: heard.append(signum))
with preemption.Watch() as watch, watch.training():
  say('in')
  while len(heard) < 3:
    time.sleep(0.01)
  say(watch.reached(1))
assert callable(signal.getsignal(signum))
"""


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM])
def test_a_handler_of_the_program_alone_handles_its_signal(start, signum):
  program = start(CLIENT, str(int(signum)))
  program.said('in')
  for _ in range(3):
    program.kill(signum)
    time.sleep(0.2)  # Two that are pending are one.
  code, out, err = program.end()
  assert (code, out) == (0, 'False\n'), err
  assert f'{signum.name} has a handler of the program itself' in err
  assert AGAIN not in err


def test_a_handler_of_the_constructor_is_told_of(start):
  program = start("""
import signal
with preemption.Watch() as watch:
  signal.signal(signal.SIGINT, lambda *unused: say('heard'))
  with watch.training():
    say('in')
    wait()
""")
  program.said('in')
  program.kill(signal.SIGINT)
  program.said('heard')
  program.tell()
  code, out, err = program.end()
  assert (code, out) == (0, ''), err
  assert 'SIGINT has a handler of the program itself' in err


def test_whose_handlers_are_the_programs():
  is_clients = preemption._is_clients
  assert is_clients(print, signal.SIGINT)
  assert is_clients(print, signal.SIGTERM)
  # A SIGTERM that raises KeyboardInterrupt is the program's choice.
  assert is_clients(signal.default_int_handler, signal.SIGTERM)
  assert not is_clients(signal.default_int_handler, signal.SIGINT)
  assert not is_clients(signal.SIG_DFL, signal.SIGTERM)

  async def main():
    return signal.getsignal(signal.SIGINT)

  assert not is_clients(asyncio.run(main()), signal.SIGINT)


def test_a_notebooks_handler_is_no_handler_of_the_program(monkeypatch):
  def handle_sigint(*unused):
    """What ipykernel sets while a cell runs."""

  handle_sigint.__module__ = 'ipykernel.ipkernel'
  before = signal.getsignal(signal.SIGINT)
  signal.signal(signal.SIGINT, handle_sigint)
  try:
    with preemption.Watch() as watch, watch.training(), raises_preempted(130):
      signal.raise_signal(signal.SIGINT)
      assert watch.reached(1)
      watch.leave()
    pytest.fail('The notice was not kept.')
  except preemption.Preempted:
    assert signal.getsignal(signal.SIGINT) is handle_sigint
  finally:
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def raises_preempted(code):
  with pytest.raises(preemption.Preempted) as info:
    yield
  assert info.value.code == code


def test_a_notice_after_the_last_step_acts_when_training_ends():
  saved = False
  with preemption.Watch() as watch, raises_preempted(75):
    with watch.training():
      assert not watch.reached(3)
      signal.raise_signal(signal.SIGTERM)
      assert watch.reached(4)
      assert watch.reached(5)
      saved = True
    pytest.fail('It goes on.')
  assert saved


def test_an_error_in_training_is_not_replaced_by_a_notice():
  with preemption.Watch() as watch, pytest.raises(ZeroDivisionError):
    with watch.training():
      signal.raise_signal(signal.SIGTERM)
      raise ZeroDivisionError


def test_hosts_that_cannot_agree_leave_at_once(monkeypatch):
  monkeypatch.setattr(preemption, '_num_processes', lambda: 2)
  with preemption.Watch() as watch, watch.training():
    with raises_preempted(75):
      signal.raise_signal(signal.SIGTERM)
    # pytest.raises has swallowed it; leaving would raise again.
    watch._notice = None


def test_another_thread_can_watch_but_hears_nothing():
  before = signal.getsignal(signal.SIGTERM)
  seen = []

  def run():
    with preemption.Watch() as watch, watch.training():
      seen.extend([watch.reached(1), signal.getsignal(signal.SIGTERM)])

  thread = threading.Thread(target=run)
  thread.start()
  thread.join(TIMEOUT_SECS)
  assert seen == [False, before]


# --- with jax.distributed ----------------------------------------------------

# Hosts of different speed, of a run that goes on at step 500.
HOST = """
import time
import jax
address, num_processes, process, mode = sys.argv[1:]
with preemption.Watch() as watch:
  jax.distributed.initialize(
    address, int(num_processes), int(process), initialization_timeout=60
  )
  preemption.begin_run(takes_steps=mode != 'evaluate')
  say('starting')
  if mode != 'train':
    wait()
  with watch.training():
    step = 500
    while not watch.reached(step := step + 1):
      if step == 510:
        say('stepping')
      time.sleep(0.005 * (1 + int(process)))
    # JAX says it once.
    say(step, watch.reached(step + 1))
    watch.leave()
"""


def start_hosts(start, num_processes, mode):
  with socket.socket() as s:
    s.bind(('localhost', 0))
    address = f'localhost:{s.getsockname()[1]}'
  return [
    start(HOST, address, str(num_processes), str(i), mode)
    for i in range(num_processes)
  ]


def test_hosts_leave_after_the_same_step(start):
  hosts = start_hosts(start, 2, 'train')
  for host in hosts:
    host.said('stepping')
  hosts[1].kill(signal.SIGTERM)
  (code_a, out_a, err_a), (code_b, out_b, _) = [h.end() for h in hosts]
  assert (code_a, code_b) == (75, 75), err_a
  assert out_a == out_b
  step, still = out_a.split()
  assert int(step) > 510
  assert still == 'True'


def test_an_interrupt_during_start_up_of_one_host_is_for_all(start):
  hosts = start_hosts(start, 2, 'wait')
  for host in hosts:
    host.said('starting')
  hosts[0].kill(signal.SIGINT)
  hosts[0].complained(AGAIN)
  for host in hosts:
    host.complained('Preemption sync counter is set: 1')
  for host in hosts:
    host.tell()
  (code_a, out_a, err_a), (code_b, out_b, _) = [h.end() for h in hosts]
  assert (code_a, code_b) == (130, 75), err_a
  assert out_a == out_b == '501 True\n'


def test_evaluation_alone_hears_what_jax_would_swallow(start):
  (host,) = start_hosts(start, 1, 'evaluate')
  host.said('starting')
  host.kill(signal.SIGTERM)
  code, out, err = host.end()
  assert (code, out) == (75, ''), err
