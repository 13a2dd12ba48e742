"""Tests of jaxline.supervision.preemption: real signals, and some processes."""

import asyncio
from concurrent import futures
import contextlib
import faulthandler
import os
import signal

import jax
import pytest

from jaxline.supervision import preemption
from tests import processes
from tests import remains

process = pytest.mark.process
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


class Program:
  """A Python program that tells where it is."""

  def __init__(self, process):
    self.process, self.kill = process, process.send_signal

  def said(self, words):
    """Waits until the program has said these words."""
    assert any(line.strip() == words for line in self.process.stdout), words

  def complained(self, words):
    assert any(words in line for line in self.process.stderr), words

  def tell(self):
    self.process.stdin.write('\n')
    self.process.stdin.flush()

  def end(self):
    """Returns the exit code, and the rest of stdout and stderr."""
    # Not by `communicate`: it closes stdin, which ends a `wait()`, and does not
    # see what `said` has read ahead.
    code = self.process.wait(processes.TIMEOUT_SECS)
    return code, self.process.stdout.read(), self.process.stderr.read()


@pytest.fixture
def start():
  with contextlib.ExitStack() as stack:

    def start_one(code, *args):
      # JAX says what the hosts have agreed upon, at level 0.
      process = processes.started(
        '-c', HEADER + code, *args, TF_CPP_MIN_LOG_LEVEL='0'
      )
      return Program(stack.enter_context(process))

    yield start_one


# --- in training -------------------------------------------------------------


@contextlib.contextmanager
def raises_preempted(code, why=None):
  with pytest.raises(preemption.Preempted, match=why) as info:
    yield
  assert info.value.code == code


@pytest.mark.parametrize(
  ('first', 'second', 'code', 'why'),
  [
    (signal.SIGTERM, signal.SIGINT, 75, 'SIGTERM after step 3'),
    (signal.SIGINT, signal.SIGTERM, 130, 'Ctrl-C after step 3'),
  ],
)
def test_the_first_notice_decides(first, second, code, why, capfd):
  with (
    preemption.Watch() as watch,
    raises_preempted(code, why),
    watch.training(),
  ):
    assert not watch.reached(2)
    signal.raise_signal(first)
    assert watch.reached(3)
    signal.raise_signal(second)
    watch.leave()
  assert capfd.readouterr().err.count(AGAIN) == 1


# With JAX's own handler of SIGTERM, which Python does not know, and without.
@process
@pytest.mark.parametrize(
  ('several', 'signum'), [(False, signal.SIGHUP), (True, signal.SIGINT)]
)
def test_a_forked_worker_has_its_own_signals(start, several, signum):
  program = start(
    """
import os, signal, time
with preemption.Watch() as watch:
  if len(sys.argv) > 1:
    import jax
    jax.distributed.initialize(sys.argv[1], 1, 0)
    preemption.begin_run()
  with watch.training():
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
      say('child')
      time.sleep(1)  # Not a pause, which the signal could come before.
      os.write(write_end, b'x')
      time.sleep(20)
      os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 1) == b'x', 'It died of the interrupt.'
    os.kill(child, signal.SIGTERM)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    while not watch.reached(1):
      time.sleep(0.001)
    watch.leave()
""",
    *[processes.free_address()] * several,
  )
  program.said('child')
  os.killpg(program.process.pid, signum)  # As the terminal does.
  program.said('-15')
  code, _, err = program.end()
  assert code == (130 if signum == signal.SIGINT else 75), err


# --- elsewhere ---------------------------------------------------------------


@pytest.mark.parametrize(
  ('signum', 'code'),
  [(signal.SIGUSR1, 75), (signal.SIGINT, 130), (signal.SIGHUP, 75)],
)
def test_a_notice_during_start_up_leaves_at_once(signum, code):
  for begin in (preemption.begin_run, lambda: watch.training().__enter__()):
    with preemption.Watch() as watch:
      with raises_preempted(code):
        signal.raise_signal(signum)
      # It was swallowed, as Python does in `__del__`.
      with raises_preempted(code):
        begin()


HANDLED = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


def handlers():
  return [signal.getsignal(x) for x in HANDLED]


def test_what_is_ignored_stays_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # By nohup.
  try:
    with preemption.Watch() as watch, watch.training():
      signal.raise_signal(signal.SIGHUP)
      assert not watch.reached(1)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
  finally:
    signal.signal(signal.SIGHUP, before)


def test_a_handler_in_c_keeps_its_signal(tmp_path):
  with open(tmp_path / 'stacks', 'w+') as stacks:
    faulthandler.register(signal.SIGUSR1, file=stacks)
    try:
      with preemption.Watch() as watch, watch.training():
        signal.raise_signal(signal.SIGUSR1)
        assert not watch.reached(1)
      signal.raise_signal(signal.SIGUSR1)
    finally:
      faulthandler.unregister(signal.SIGUSR1)
    stacks.seek(0)
    assert stacks.read().count('Current thread') == 2


def test_a_run_names_further_signals():
  before = [*handlers(), signal.getsignal(signal.SIGUSR2)]
  with preemption.Watch(), raises_preempted(75):
    watch = preemption.begin_run(signals='SIGUSR2,SIGXCPU')
    with watch.training():
      signal.raise_signal(signal.SIGUSR2)
      assert watch.reached(1)
  assert [*handlers(), signal.getsignal(signal.SIGUSR2)] == before


@pytest.mark.parametrize('place', ['before', 'constructor'])
def test_a_handler_of_the_program_alone_handles_its_signal(place, caplog):
  heard, before = [], handlers()
  hear = lambda *unused: heard.append(1)
  try:
    if place == 'before':
      signal.signal(signal.SIGUSR1, hear)
    with preemption.Watch() as watch, raises_preempted(75):
      if place != 'before':
        signal.signal(signal.SIGUSR1, hear)
      with watch.training():
        for _ in range(3):
          signal.raise_signal(signal.SIGUSR1)
        assert not watch.reached(1)
        signal.raise_signal(signal.SIGTERM)
    assert heard == [1, 1, 1]
    assert signal.getsignal(signal.SIGUSR1) is hear
  finally:
    signal.signal(signal.SIGUSR1, before[-1])
  assert 'SIGUSR1 has a handler of the program itself' in caplog.text


@pytest.mark.parametrize('loop', ['asyncio', 'ipykernel'])
def test_a_run_takes_the_handlers_and_gives_them_back(loop):
  async def main():
    if loop == 'ipykernel':  # Sets one while a cell runs.
      cell = lambda *unused: None
      cell.__module__ = 'ipykernel.ipkernel'
      signal.signal(signal.SIGINT, cell)
    before = handlers()
    with preemption.Watch() as watch, raises_preempted(130), watch.training():
      taken = handlers()
      assert not {*taken} & {*before}
      signal.raise_signal(signal.SIGINT)
      assert handlers() == [taken[0], signal.SIG_DFL, *taken[2:]]
      assert watch.reached(1)
      watch.leave()
    assert handlers() == before

  asyncio.run(main())
  signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_notice_after_the_last_step_acts_when_training_ends():
  reached = []
  with preemption.Watch() as watch, raises_preempted(75):
    with watch.training():
      reached.append(watch.reached(3))
      signal.raise_signal(signal.SIGTERM)
      reached += [watch.reached(4), watch.reached(5)]
    pytest.fail('It goes on.')
  assert reached == [False, True, True]


def test_an_error_in_training_is_not_replaced_by_a_notice():
  with preemption.Watch() as watch, pytest.raises(ZeroDivisionError):
    with watch.training():
      signal.raise_signal(signal.SIGTERM)
      raise ZeroDivisionError


def test_another_thread_can_watch_but_hears_nothing():
  before = handlers()

  def run():
    with preemption.Watch() as watch, watch.training():
      return watch.reached(1), handlers()

  with futures.ThreadPoolExecutor(1) as thread:
    assert thread.submit(run).result() == (False, before)


def test_hosts_that_cannot_agree_leave_at_once(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with raises_preempted(75), preemption.Watch() as watch, watch.training():
    signal.raise_signal(signal.SIGTERM)
    pytest.fail('It goes on.')


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
    say(step)
    watch.leave()
"""


def start_hosts(start, num_processes, mode):
  address = processes.free_address()
  return [
    start(HOST, address, str(num_processes), str(i), mode)
    for i in range(num_processes)
  ]


@process
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
  assert out_a == out_b == '501\n'


@process
def test_evaluation_alone_hears_what_jax_would_swallow(start):
  (host,) = start_hosts(start, 1, 'evaluate')
  host.said('starting')
  host.kill(signal.SIGTERM)
  code, out, err = host.end()
  assert (code, out) == (75, ''), err


# --- a terminal --------------------------------------------------------------


# Runs a command in a terminal of its own, which it closes while that trains.
TERMINAL = """
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
  os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
shown = b''
while b'Compiled in' not in shown:
  shown += os.read(terminal, 1024)
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@process
def test_a_run_whose_terminal_closes_is_saved(tmp_path):
  done = processes.run(
    *('-c', TERMINAL, 'tests/programs/toy.py', 'sharded', 'direct'),
    '--config=tests/programs/toy_config.py',
    f'--config.checkpoint_dir={tmp_path}',
    '--config.training_steps=100000',
    '--config.experiment_kwargs.config.step_secs=0.01',
  )
  assert done.returncode == 75, done.stderr
  assert remains.newest(tmp_path)
