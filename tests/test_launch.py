"""Tests of jaxline.launch: real processes, real signals."""

import signal
import sys

import pytest

from tests import processes
from tests import remains


def started(*args, count=2, **env):
  """The launcher."""
  argv = '-W', 'error', '-m', 'jaxline.launch', '--processes', count, *args
  # PYTHONUNBUFFERED, as images of containers set it, takes the streams' locks.
  return processes.started(*argv, **env)


def end(process):
  done = processes.end(process)
  return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def run(*args, **kwargs):
  """Returns the exit code and the lines of stdout and stderr."""
  with started(*args, **kwargs) as process:
    return end(process)


def sh(program):
  """Ends a command line: the same shell program in each process."""
  return '--', 'sh', '-c', program


def py(program):
  return '--', sys.executable, '-c', program


def of(lines, process):
  prefix = f'[{process}] '
  return [x.removeprefix(prefix) for x in lines if x.startswith(prefix)]


SUM = """
from jaxline.parallel import distributed
distributed.initialize('auto')
import jax
import jax.numpy as jnp
ones = jnp.ones(jax.local_device_count())
total = jax.pmap(lambda x: jax.lax.psum(x, 'i'), axis_name='i')(ones)
print('of', jax.process_count(), 'this is', jax.process_index(), *total)
"""


@pytest.mark.process
def test_processes_add_up_beside_a_proxy():
  names = 'http_proxy', 'https_proxy', 'grpc_proxy'
  env = dict.fromkeys(names, 'http://127.0.0.1:9') | {'no_proxy': 'a.b'}
  # Another number than in the flag of XLA that the tests have.
  args = '--devices-per-process', 3, *py(SUM)
  code, out, err = run(*args, JAX_INITIALIZATION_TIMEOUT='60', **env)
  assert code == 0, err
  for process in range(2):
    last = f'of 2 this is {process} 6.0 6.0 6.0'
    assert of(out, process)[-1] == last


MANY_LINES = """
import os, sys
me = os.environ['JAX_PROCESS_ID']
for i in range(200):
  sink = sys.stdout if i % 2 else sys.stderr
  for piece in (me, ' ', str(i), ' ', me * 20000, '\\n'):
    sink.write(piece)
    sink.flush()
sys.stdout.write('no end')
"""


def test_lines_are_whole_and_where_they_belong():
  code, out, err = run(*py(MANY_LINES), count=3)
  assert code == 0
  for process in range(3):
    for lines, first, end in ((out, 1, ['no end']), (err, 0, [])):
      text = str(process) * 20000
      expected = [f'{process} {i} {text}' for i in range(first, 200, 2)]
      assert of(lines, process) == expected + end
  assert (len(out), len(err)) == (3 * 101, 3 * 100)


@pytest.mark.parametrize(
  ('program', 'code'),
  [
    ('exit 0', 0),
    ('exec no-such-program', 127),
    ('kill -TERM $$', 143),
    # Who only lost another process may end before it.
    ('[ $JAX_PROCESS_ID = 0 ] && exit 134; sleep 0.1; exit 7', 7),
    ('[ $JAX_PROCESS_ID = 0 ] && exit 7; sleep 0.1; exit 134', 7),
    # Leaving in order kills nobody; an error counts for more.
    ('[ $JAX_PROCESS_ID = 1 ] && exit 75; sleep 0.5; exit 3', 3),
    ('[ $JAX_PROCESS_ID = 1 ] && exit 75; sleep 0.5', 75),
  ],
)
def test_exit_code(program, code):
  # Longer where the second failure counts.
  grace = 10 if code == 7 else 0.2
  assert run('--grace-secs', grace, *sh(program))[0] == code


def test_the_others_may_end_by_themselves():
  program = '[ $JAX_PROCESS_ID = 1 ] && exit 7; sleep 0.5; echo done'
  code, out, err = run(*sh(program))
  assert (code, out) == (7, ['[0] done'])
  assert 'process 1 ended with code 7' in err[-1]


# Process 1 is lost at step 4.
LOST = f"""
import os, signal, sys
sys.path.insert(0, {str(processes.ROOT / 'tests' / 'programs')!r})
import toy
from jaxline import platform

class Lost(toy.Sharded):
  def step(self, *, global_step, **kwargs):
    if global_step == 4 and os.environ['JAX_PROCESS_ID'] == '1':
      os.kill(os.getpid(), signal.SIGKILL)
    return super().step(global_step=global_step, **kwargs)

platform.main(Lost, sys.argv[1:])
"""


@pytest.mark.process
def test_a_lost_process_is_named_last(tmp_path):
  code, _, err = run(
    *py(LOST),
    '--config=tests/programs/toy_config.py',
    f'--config.checkpoint_dir={tmp_path}/run',
    '--config.training_steps=100000',
    count=3,
  )
  assert code == 137
  assert 'because process 1 was ended' in err[-1]
  assert not any('Traceback' in line for line in err)
  for process in (0, 2):
    assert 'lost another process' in of(err, process)[-1]


def test_all_that_was_started_is_killed(tmp_path):
  # Each process has a child, which holds its stdout, and ignores signals.
  program = f"""
    trap '' TERM INT
    sleep 1000 & echo $! > {tmp_path}/$JAX_PROCESS_ID
    echo $$ > {tmp_path}/shell$JAX_PROCESS_ID
    until [ -s {tmp_path}/0 ] && [ -s {tmp_path}/1 ]; do sleep 0.02; done
    [ $JAX_PROCESS_ID = 1 ] && exit 7
    sleep 1000
  """
  assert run('--grace-secs', 0.2, *sh(program))[0] == 7
  pids = [int(path.read_text()) for path in tmp_path.iterdir()]
  assert len(pids) == 4
  processes.wait_until_gone(pids)


@pytest.mark.parametrize('name', ['USR1', 'INT'])
def test_signals_are_passed_on(name):
  hear = f'trap "echo heard; exit 75" {name}; echo ready'
  with started(*sh(f'{hear}; while sleep 0.05; do :; done')) as process:
    for _ in range(2):  # Output comes at once.
      assert 'ready' in process.stdout.readline()
    process.send_signal(signal.Signals[f'SIG{name}'])
    code, out, _ = end(process)
  assert (code, sorted(out)) == (75, ['[0] heard', '[1] heard'])


@pytest.mark.process
def test_the_processes_of_a_killed_launcher_save_and_end(tmp_path):
  program = f'echo $$ > {tmp_path}/$JAX_PROCESS_ID; exec "$0" "$@"'
  run = [
    *(sys.executable, 'tests/programs/toy.py', 'sharded', 'direct'),
    *('--config=tests/programs/toy_config.py', '--config.console=plain'),
    f'--config.checkpoint_dir={tmp_path}/run',
    '--config.training_steps=100000',
    '--config.save_checkpoint_interval=100000',
    '--config.experiment_kwargs.config.step_secs=0.01',
  ]
  with started(*sh(program), *run) as process:
    for line in process.stdout:
      if 'Compiled in' in line:
        break
    process.kill()
    pids = [int((tmp_path / str(i)).read_text()) for i in range(2)]
    processes.wait_until_gone(pids)
  assert remains.newest(tmp_path / 'run')
