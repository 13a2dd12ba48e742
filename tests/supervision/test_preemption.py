"""Tests of jaxline.supervision.preemption: real signals, and some processes."""

import asyncio
from concurrent import futures
import contextlib
import signal

import jax
import pytest

from jaxline.supervision import preemption
from tests import processes
from tests import remains

AGAIN = 'press Ctrl-C again to leave at once'


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
@pytest.mark.process
@pytest.mark.parametrize(
  ('several', 'signum'), [(False, signal.SIGHUP), (True, signal.SIGINT)]
)
def test_a_forked_worker_has_its_own_signals(several, signum):
  program = """
import os, signal, sys, time
from jaxline.supervision import preemption
address, signum = sys.argv[1], int(sys.argv[2])
with preemption.Watch() as watch:
  if address:
    import jax
    jax.distributed.initialize(address, 1, 0)
    preemption.begin_run()
  with watch.training():
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
      os.write(write_end, b'x')
      time.sleep(1)  # Not a pause, which the signal could come before.
      os.write(write_end, b'x')
      time.sleep(20)
      os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 1) == b'x'
    os.killpg(0, signum)  # As the terminal does.
    assert os.read(read_end, 1) == b'x', 'It died of the interrupt.'
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
    while not watch.reached(1):
      time.sleep(0.001)
    watch.leave()
"""
  address = processes.free_address() if several else ''
  done = processes.run('-c', program, address, str(int(signum)))
  assert done.returncode == (75 if signum == signal.SIGHUP else 130), (
    done.stderr
  )
  assert done.stderr.count(AGAIN) == (signum == signal.SIGINT)


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
  # It does not replace an error.
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


@pytest.mark.process
def test_evaluation_alone_hears_what_jax_would_swallow():
  program = """
import os, signal, sys, time, jax
from jaxline.supervision import preemption
with preemption.Watch():
  jax.distributed.initialize(sys.argv[1], 1, 0)
  preemption.begin_run(takes_steps=False)
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(20)
"""
  done = processes.run('-c', program, processes.free_address())
  assert done.returncode == 75, done.stderr


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


@pytest.mark.process
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
