"""What a run prints: lines, the live line on a terminal, the two blocks.

`screen` plays what was written to a terminal, so that tests see what a user
sees.
"""

import contextlib
import fcntl
import functools
import io
import logging as std_logging
import math
import os
import pathlib
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import types
from unittest import mock
import weakref

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxline
from jaxline.compat import experiments
from jaxline.metrics import console as console_lib
from jaxline.metrics import live as live_lib
from jaxline.metrics import writers
from jaxline.run_directory import directory
from jaxline.supervision import preemption
from tests import processes
from tests import toys
from tests.experiments import regression

ROOT = processes.ROOT
TOY = ROOT / 'tests' / 'programs' / 'toy.py'
CONFIG = ROOT / 'tests' / 'programs' / 'toy_config.py'
DRAWN_SECS = 0.6  # Longer than it takes until the live line is drawn again.
COMMAND = ('python', 'x.py', '--config=a.py', '--config.checkpoint_dir', 'old')


def screen(data):
  """Returns the lines that a terminal shows, of any height and width."""
  rows, row, column = [''], 0, 0
  parts = re.findall(r'\x1b\[J|\n|\r|[^\x1b\n\r]+', data)
  assert ''.join(parts) == data  # No mode of the terminal changes.
  for part in parts:
    if part == '\x1b[J':
      rows[row:] = [rows[row][:column]]
    elif part == '\n':
      row += 1
    elif part == '\r':
      column = 0
    else:
      text = rows[row].ljust(column)
      rows[row] = text[:column] + part + text[column + len(part) :]
      column += len(part)
    rows += [''] * (row + 1 - len(rows))
  return [line.rstrip() for line in rows]


class Terminal:
  """A pseudo-terminal: `file` writes to it, `text` is what was written."""

  def __init__(self, columns=80):
    self._controller, terminal = pty.openpty()
    self.file = os.fdopen(terminal, 'w', encoding='utf-8')
    self.resize(columns)
    self._data, self._processes = b'', []
    self._reader = threading.Thread(target=self._read)
    self._reader.start()

  def resize(self, columns):
    size = struct.pack('HHHH', 40, columns, 0, 0)
    fcntl.ioctl(self.file.fileno(), termios.TIOCSWINSZ, size)

  def _read(self):
    with contextlib.suppress(OSError):  # Nobody has it open any more.
      while data := os.read(self._controller, 65536):
        self._data += data

  @property
  def text(self):
    return self._data.decode(errors='replace')

  def wait_for(self, is_there, secs=20):
    """Waits for a pattern in the text, or for a condition on the screen."""
    deadline = time.monotonic() + secs
    while not (
      re.search(is_there, self.text)
      if isinstance(is_there, str)
      else is_there(screen(self.text))
    ):
      assert time.monotonic() < deadline, self.text[-4000:]
      time.sleep(0.01)

  def run(self, command, **kwargs):
    environment = os.environ | {'PYTHONPATH': str(ROOT), 'TERM': 'xterm'}
    streams = {'stdin': subprocess.DEVNULL, 'stderr': self.file}
    process = subprocess.Popen(
      [sys.executable, '-W', 'ignore', *command],
      cwd=ROOT,
      env=environment | {'COLUMNS': ''},
      stdout=self.file,
      start_new_session=True,
      **streams | kwargs,
    )
    self._processes.append(process)
    return process

  def close(self):
    """Closes it, and returns what it shows."""
    for process in self._processes:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # Also what it has forked.
    self.file.close()
    self._reader.join(60)
    os.close(self._controller)
    return screen(self.text)


@pytest.fixture(autouse=True)
def no_columns(monkeypatch):
  monkeypatch.delenv('COLUMNS', raising=False)  # pytest-xdist sets it.


@pytest.fixture
def terminal():
  made = Terminal()
  yield made
  if not made.file.closed:
    made.close()


make_config = functools.partial(toys.make_config, 6000)


def experiment_of(**attributes):
  """Returns an object that is enough of an experiment for both blocks."""
  steps = lambda step, config: step < (config.training_steps or math.inf)
  attributes = {'should_run_step': steps} | attributes
  return experiments.full_experiment(
    types.SimpleNamespace(**attributes), **attributes
  )


def begun(
  mode='plain', step=0, experiment=None, command=(), saved=None, **overrides
):
  """Returns a console of a run that has begun, and the run's state."""
  state = types.SimpleNamespace(global_step=step)
  place = directory.RunDirectory()
  place.saved_step = saved
  console = console_lib.Console(mode, console_lib.Origin(command))
  console.begin(
    make_config(**overrides),
    experiment or experiment_of(),
    state,
    lambda: place.saved_step,
  )
  return console, state, place


# --- Lines of numbers. ---


def test_a_line_has_the_progress_the_means_and_the_trend(capsys, monkeypatch):
  console, _, place = begun()
  rate = {'steps_per_sec': 20.0, 'mfu': 0.345, 'tokens_per_step': 512}
  console.log_training(1000, {1000: {'loss': 5.0} | rate})
  capsys.readouterr()
  place.saved_step = 1100
  rate |= {'lr': 3e-5, 'tokens': 2048000}
  steps = {
    1198: {'loss': 2.0, 'bad': math.nan, 'all': math.nan},
    1199: {'loss': 4.0, 'bad': 3.0, 'all': math.inf},
    1200: {'g/w': 1.5, 'loss': 6.0, 'bad': 1.0, 'all': math.nan} | rate,
  }
  console.log_training(1200, steps)
  names = {f'name_{i}': 1.0 for i in range(30)}
  console.log_training(1201, {1201: names | rate})
  first, second = capsys.readouterr().out.splitlines()
  assert first == (
    'step 1200 of 6000 (20%) | ETA 4:00 | loss 4 (-1) | 20 steps/s'
    ' | saved 1100 | bad 2 (1 of 3 not finite) | +5 more'
  )
  assert len(second) <= 120
  assert re.search(r'\| name_0 1 \|.* \| \+\d+ more$', second)
  monkeypatch.setenv('COLUMNS', '200')
  console.log_training(1200, steps)
  assert capsys.readouterr().out.endswith(
    '| all nan (3 of 3 not finite) | lr 3e-05 | tokens 2048000 | mfu 34.5%'
    ' | g/w 1.5\n'
  )


def run_hook(console, steps, **overrides):
  """Shows scalars per step, at one step per second."""
  config = make_config(**overrides)
  with writers.MetricWriter() as log:
    console.show(log, 'train')
    hook = console_lib.ConsoleHook(console, config, log, dict)
    for step, scalars in steps:
      hook(float(step), step, scalars)
    hook.wait_to_finish()


def test_the_mean_is_over_the_last_100_steps_since_the_last_line(capsys):
  donated = jnp.float32(100.0)
  donated.delete()
  for interval, steps, shown in (
    # Those after step 300 have no line.
    (150, 350, ['loss 100.5', 'loss 250.5 (+150)']),
    # The second mean is of 5, 6 and 8.
    (4, 8, ['loss 2.5', 'loss 6.333 (+3.83)']),
    (None, 300, []),
    (-1, 300, []),
  ):
    console, *_ = begun()
    losses = (
      (step, {'loss': donated if step == 7 else jnp.float32(step)})
      for step in range(1, steps + 1)
    )
    run_hook(console, losses, log_tensors_interval=interval)
    out = capsys.readouterr().out
    assert re.findall(r'^step.*\| (loss .*?) \|', out, re.M) == shown


def test_the_rate_begins_after_the_first_step(capsys):
  console, *_ = begun()
  with console.training():
    steps = ((step, {}) for step in (60, 61, 64))
    run_hook(console, steps, log_tensors_interval=4)
  out = capsys.readouterr().out
  assert re.search(
    r'Compiled in .*\nstep 60 of 6000 \(1%\)\nstep 64 .*1 steps', out
  )


def test_of_the_last_steps_no_large_array_is_kept():
  with writers.MetricWriter() as log:
    config = make_config(log_tensors_interval=100)
    hook = console_lib.ConsoleHook(begun()[0], config, log, dict)
    large, loss = jnp.ones([3]), jnp.float32(1)
    kept = weakref.ref(large), weakref.ref(loss)
    hook(1.0, 1, {'loss': loss, 'large': large})
    del large, loss
    assert [ref() is None for ref in kept] == [True, False]


@pytest.mark.parametrize('log_all_hosts', [False, True])
def test_other_processes_print_nothing(log_all_hosts, monkeypatch, capsys):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  config = make_config(log_all_hosts=log_all_hosts)
  console = console_lib.Console.make(config)
  with mock.patch.object(logging, 'info') as info, console:
    console.begin(config, experiment_of())
    console.log_evaluation(1, {'loss': 1.0})
    writer = writers.MetricWriter()
    console.show(writer, 'train')
  assert bool(info.call_count) is log_all_hosts
  assert capsys.readouterr().out == ''


def test_the_mode(terminal, monkeypatch):
  for asked, term, mode in (
    (None, 'xterm', 'live'),
    (None, 'dumb', 'plain'),
    (None, '', 'plain'),
    ('live', '', 'plain'),
    ('plain', 'xterm', 'plain'),
    ('off', 'xterm', 'off'),
  ):
    monkeypatch.setenv('TERM', term)
    monkeypatch.setattr(sys, 'stdout', terminal.file if term else None)
    made = console_lib.Console.make(make_config(console=asked))
    assert made.mode == mode, (asked, term)


def test_texts_are_printed_without_commands_to_the_terminal(tmp_path, capsys):
  console, *_ = begun()
  capsys.readouterr()
  with writers.MetricWriter(writers.JsonlWriter(tmp_path / 'x')) as writer:
    console.show(writer, 'eval')
    writer.write_texts(0, {'config': '{}'})
    writer.write_texts(7, {'sample': 'a\x1b[2J\r\nc\x00'})
    writer.write_scalars(8, {'loss': 1.0})
    writer.write_images(8, {'x': np.zeros((2, 2), np.uint8)})
  out = capsys.readouterr().out.splitlines()
  assert out == ['eval step 7 | sample:', r'  a\x1b[2J\r', r'  c\x00']
  assert len((tmp_path / 'x').read_text().splitlines()) == 4


def test_a_pipe_that_nobody_reads_ends_no_run(monkeypatch):
  reader, writer = os.pipe()
  os.close(reader)
  with os.fdopen(writer, 'w') as out:
    monkeypatch.setattr(sys, 'stdout', out)
    for _ in range(3):
      console_lib.Console('plain').print('x\n' * 100_000)


def test_a_text_that_the_terminal_cannot_show_is_no_error(monkeypatch):
  out = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
  monkeypatch.setattr(sys, 'stdout', out)
  console_lib.Console('plain').print('caf\xe9')
  assert out.buffer.getvalue() == b'caf?\n'


def test_the_log_is_quiet_about_the_libraries():
  library = pathlib.Path(jax.__file__).parent / '_src' / 'xla_bridge.py'
  own = pathlib.Path(jaxline.__file__).parent
  for path, level, is_shown in (
    (own / 'train.py', std_logging.INFO, False),
    (own / 'metrics' / 'console.py', std_logging.INFO, True),
    (library, std_logging.INFO, False),
    (library, std_logging.ERROR, True),
    (library.parents[2] / 'jaxlike' / 'x.py', std_logging.INFO, True),
  ):
    record = std_logging.LogRecord('x', level, str(path), 1, 'text', (), None)
    assert console_lib.is_shown(record) is is_shown, path
    more = mock.patch.object(
      logging, 'get_verbosity', return_value=logging.DEBUG
    )
    with more:
      assert console_lib.is_shown(record)


# --- The live line. ---


@pytest.fixture
def live(terminal, monkeypatch):
  """Starts a live line on a terminal, which sys.stdout and stderr go to."""
  made = []

  def start(draw=lambda width: 'drawn', **streams):
    # Not before: pytest sets both at the beginning of a test.
    for name in ('stdout', 'stderr'):
      monkeypatch.setattr(sys, name, streams.get(name, terminal.file))
    made.append(live_lib.LiveLine(draw))
    terminal.wait_for('drawn')
    return made[0]

  monkeypatch.setenv('TERM', 'xterm')
  yield start
  made[0].stop()


def test_what_is_printed_stands_above_the_live_line(live, terminal):
  logger = std_logging.getLogger('tests.console.named')
  handler = std_logging.StreamHandler(terminal.file)
  logger.addHandler(handler)
  write = terminal.file.write
  try:
    line = live()
    print('printed\nlines')
    logger.warning('warn')  # Shorter than what was drawn.
    for text in ('half', ' a', ' line\n'):
      sys.stdout.write(text)
      sys.stderr.flush()
    for percent in (10, 20):
      sys.stderr.write(f'\r{percent}% of it')
    sys.stderr.flush()
    terminal.wait_for('20% of it')
    time.sleep(DRAWN_SECS)
    assert screen(terminal.text)[4:] == ['20% of it']  # A progress bar.
    sys.stderr.write('\r100% of it\n')
    terminal.wait_for(lambda shown: shown[4:] == ['100% of it', 'drawn'])
    line.stop()
    print('after')
  finally:
    logger.removeHandler(handler)
  assert terminal.file.write == write
  assert terminal.close() == [
    'printed', 'lines', 'warn', 'half a line', '100% of it', 'after', '',
  ]  # fmt: skip


def test_a_resized_terminal_gets_a_line_that_fits(live, terminal):
  to_a_file = io.StringIO()
  line = live(lambda width: 'drawn'.ljust(width, '-'), stderr=to_a_file)
  print('an error', file=sys.stderr)  # It is no terminal: it is left alone.
  for columns, width in ((30, 30), (0, 80)):  # 0: it does not know.
    terminal.resize(columns)
    expected = ['drawn'.ljust(width - 1, '-')]
    terminal.wait_for(lambda shown, expected=expected: shown == expected)
  line.stop()
  assert terminal.close() == ['']
  assert to_a_file.getvalue() == 'an error\n'


@pytest.mark.process
def test_in_the_background_nothing_is_drawn(terminal):
  program = """
import fcntl, os, signal, sys, termios, time
from jaxline.metrics import live
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
if not (shell := os.fork()):
  signal.pause()
os.setpgid(shell, shell)
def give_to(group, text):
  os.tcsetpgrp(1, group)
  os.write(1, text)
  time.sleep(0.6)  # Longer than two refreshes.
give_to(shell, b'$ python train.py &\\n')
line = live.LiveLine(lambda width: 'drawn')
give_to(shell, b'$ typed')
print(' by the user')
give_to(os.getpgrp(), b'$ fg\\n')
print('printed')
give_to(shell, b'^Z\\x1b[J\\n$ typed')
print(' again', end='')
line.stop()
os.kill(shell, signal.SIGKILL)
os.wait()
print()
"""
  assert terminal.run(['-c', program]).wait(60) == 0, terminal.text
  shown = terminal.close()
  background, front = terminal.text.split('$ fg')
  front, later = front.split('^Z\x1b[J')
  assert 'drawn' in front
  assert '\x1b' not in background + later
  assert shown == [
    '$ python train.py &', '$ typed by the user', '$ fg', 'printed', '^Z',
    '$ typed again', '',
  ]  # fmt: skip


# --- The start block and the summary. ---


def test_the_start_block_of_a_sharded_run(capsys):
  config = make_config(
    sharding='fsdp', checkpoint_dir=f'{os.getcwd()}/runs/a', writers=('jsonl',)
  )
  experiment = regression.Regression(
    'train', jax.random.PRNGKey(0), run_config=config
  )
  experiment.data_summary = '690 documents'
  origin = console_lib.Origin((), 'configs/x.py', {'sharding': 'fsdp'})
  console_lib.Console('plain', origin).begin(config, experiment)
  assert capsys.readouterr().out.splitlines() == [
    'Experiment:    tests.experiments.regression:Regression',
    'Config:        configs/x.py, sharding=fsdp',
    'Devices:       2 x cpu',
    'Mesh:          data 2; sharding fsdp',
    'Parameters:    36 (144 B) in 2 arrays; 1 split over devices',
    'Data:          690 documents',
    'Run directory: runs/a',
  ]


RECORDED = 'python x.py --jaxline_run=DIR'
OWN = 'python x.py --exp=A --config.a=1 --config.checkpoint_dir=DIR'
SAME = 'the same command with --config.checkpoint_dir=DIR'
MORE = ' --config.training_steps=12 --config.on_config_change=continue'
EVAL = ' --jaxline_mode=eval --config.one_off_evaluate'
STOP = preemption.Preempted(75, '')
FIT = "jaxline.fit(..., overrides={'checkpoint_dir': 'DIR'"
MORE_FIT = ", 'training_steps': 12, 'on_config_change': 'continue'})"
LOOK = "jaxline.evaluate('DIR', experiment_class=SimpleNamespace)"


@pytest.mark.parametrize(
  ('command', 'how', 'expected'),
  [
    (COMMAND, {}, [RECORDED, RECORDED + EVAL]),
    (
      (*COMMAND, '--jaxline_mode=train', '-v', '1', '--config.a=b c'),
      {'is_over': True},
      [
        'python x.py --jaxline_mode=train --jaxline_run=DIR' + MORE,
        RECORDED + EVAL,
      ],
    ),
    (
      ('python', 'x.py', '--jaxline_run', 'old', '--noconfig.a'),
      {'decode': print},
      [RECORDED, RECORDED + ' --jaxline_mode=decode'],
    ),
    # The processes do not know the launcher's command.
    (COMMAND, {'processes': 2, 'is_over': True}, [SAME + MORE, SAME + EVAL]),
    # Flags of the program make those of the config.
    (
      (
        'python',
        'x.py',
        '--exp=A',
        '--config.training_steps',
        '6',
        '--config.a=1',
      ),
      {'is_over': True},
      [OWN + MORE, OWN + EVAL],
    ),
    (
      ('python', 'x.py', '--exp=A'),
      {'is_over': True, 'processes': 2},
      [SAME + MORE, SAME + EVAL],
    ),
    ((), {'is_over': True}, [FIT + MORE_FIT, LOOK]),
    # The experiment has decided that it is over.
    ((), {'is_over': True, 'training_steps': None}, [None, LOOK]),
    ((), {'is_over': True, 'stopped': 'enough'}, [None, LOOK]),
    # Without a checkpoint there is nothing to go on from.
    (COMMAND, {'saved': None}, [None, None]),
  ],
)
def test_the_next_commands(
  command, how, expected, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(jax, 'process_count', lambda: how.get('processes', 1))
  experiment = experiment_of(**{k: how[k] for k in how if k == 'decode'})
  steps = how.get('training_steps', 6)
  overrides = {'training_steps': steps, 'checkpoint_dir': str(tmp_path)}
  step, saved = (6 if how.get('is_over') else 4), how.get('saved', 4)
  console, state, _ = begun('plain', 0, experiment, command, saved, **overrides)
  state.global_step, console.stopped = step, how.get('stopped', '')
  capsys.readouterr()
  error = None if how.get('is_over') else STOP
  console.__exit__(type(error), error, None)
  out = capsys.readouterr().out.replace(str(tmp_path), 'DIR').splitlines()
  name = 'Decode' if 'decode' in how else 'Evaluate'
  labels = ('Continue:', f'{name}:'.ljust(9))
  shown = [f'{k} {x}' for k, x in zip(labels, expected, strict=True) if x]
  shown.append('Results:  python -m jaxline.runs compare DIR')
  assert out[out.index('Run directory: DIR') + 1 :] == shown


def test_the_summary_says_what_the_run_came_to(capsys):
  for error, step, how in (
    (None, 6000, 'Trained to step 6000 of 6000 (100%) in 0:00.'),
    (ValueError(), 30, 'Failed at step 30 of 6000 (0%) in 0:00.'),
    (STOP, 30, 'Stopped at step 30 of 6000 (0%) in 0:00.'),
  ):
    console, state, _ = begun(step=10)
    for loss in (1.0, 2.0):
      console.log_training(9, {9: {'loss': loss, 'steps_per_sec': 1.0}})
    console.log_best('bits', 3.0)
    console.log_best('bits', 2.5, 8)
    state.global_step = step
    assert 'New best bits: 2.5 at step 8.\n' in capsys.readouterr().out
    console.__exit__(type(error), error, None)
    assert capsys.readouterr().out.splitlines()[:3] == [
      how,
      'Best bits: 2.5 at step 8.',
      'Mean loss over the last step: 2.',
    ]
    console.__exit__(None, None, None)
    assert capsys.readouterr().out == ''


# --- Whole runs. ---


def arguments(run_dir, *args, mode='train'):
  return [
    f'--config={CONFIG}',
    f'--config.checkpoint_dir={run_dir}',
    f'--jaxline_mode={mode}',
    *args,
  ]


def run(*args, **kwargs):
  return processes.run(TOY, 'sharded', 'direct', *arguments(*args, **kwargs))


@pytest.mark.process
def test_a_run_in_a_pipe(tmp_path):
  result = run(
    tmp_path,
    '--config.training_steps=4',
    '--config.log_tensors_interval=2',
    '--config.eval_interval=300',  # The file has 2.
    mode='train_and_eval',
  )
  assert result.returncode == 0, result.stderr
  (warning,) = result.stderr.splitlines()  # Of the toy's input.
  assert warning.startswith('W')
  out = result.stdout.splitlines()
  first = out.index('Compiling the train step...')
  config = ' '.join(line.strip() for line in out[1:first])
  assert 'training_steps=4' in config
  assert f'Run directory: {tmp_path}' in config
  # The numbers of these lines have tests of their own above.
  starts = [
    'Compiled in ', 'step 2 of 4 ', 'step 4 of 4 ', 'eval step 4 | loss ',
    'New best loss: ', 'Trained to step 4 of 4 ', 'Best loss: ',
    'Mean loss over the last 2 steps: ', 'Time: ',
  ]  # fmt: skip
  for start, line in zip(starts, out[first + 1 :], strict=False):
    assert line.startswith(start)
  commands = dict(re.findall(r'^([A-Z][\w ]+): +(.*)$', result.stdout, re.M))
  where = f' --jaxline_run={tmp_path}'
  assert commands['Evaluate'].endswith(where + EVAL)
  assert commands['Continue'].endswith(where + MORE.replace('12', '8'))
  # And so it goes on.
  again = run(tmp_path, '--config.training_steps=5', '--verbosity=1')
  first, second = again.stdout.split('Start:         step 4 of 5, resumed\n')
  assert 'Restoring the newest checkpoint...' in first
  # It prints the last step, although no interval ends there.
  assert re.search(r'^step 5 of 5 \(100%\) \| loss ', second, re.MULTILINE)
  assert 'training loop starting...' in again.stderr


DEBUGGED = f"""
import sys
sys.path.insert(0, {str(TOY.parent)!r})
from absl import logging
import toy
from jaxline import platform
class Mine(toy.Sharded):
  def step(self, *, global_step, rng, writer):
    if global_step == 30:
      breakpoint()
    if global_step == 60:
      raise ValueError('the end')
    if global_step % 10 == 9:
      print('print of step', global_step)
      logging.warning('warning of step %d', global_step)
    return super().step(global_step=global_step, rng=rng, writer=writer)
platform.main(Mine, sys.argv[1:])
"""


@pytest.mark.process
def test_a_run_on_a_terminal_in_a_debugger_that_fails(tmp_path, terminal):
  slow = '--config.experiment_kwargs.config.step_secs=0.03'
  args = arguments(tmp_path, slow, '--config.training_steps=99')
  process = terminal.run(
    ['-c', DEBUGGED, *args], stdin=subprocess.PIPE, text=True
  )
  try:
    terminal.wait_for(r'\(Pdb\) ', 60)
    shown = screen(terminal.text)
    at = shown.index('(Pdb)')
    assert 'step(' in shown[at - 1] or '->' in shown[at - 1]
    time.sleep(DRAWN_SECS)
    assert screen(terminal.text) == shown  # The live line is hidden.
    process.stdin.write('p "step", global_step\nc\n')
    process.stdin.close()
    terminal.wait_for(r"\('step', 30\)[^$]*step [45]\d of 99")  # It is back.
    assert process.wait(60) == 1, terminal.text
  finally:
    process.kill()
  shown = '\n'.join(terminal.close()).strip()
  # Whole lines, in order, and nothing left of what was drawn.
  lines = re.findall(r'^(?:print|W.*\] warning) of step (\d+)$', shown, re.M)
  assert lines == [str(step) for step in range(9, 60, 10) for _ in 'pw']
  # The error comes after the summary.
  before, after = shown.split('Failed at step 60 of 99 (61%) in ')
  assert 'Traceback' not in before
  assert 'Results: ' in after
  assert after.splitlines()[-1].endswith('the end')
