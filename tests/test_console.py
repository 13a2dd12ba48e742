"""What a run shows: lines, live lines on a terminal, the first and last block.

`screen` plays what was written to a terminal, so that tests see what a user
sees.
"""

import contextlib
import fcntl
import io
import logging as std_logging
import math
import os
import pathlib
import pdb
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

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxline
from jaxline import base_config
from jaxline import compilation_cache
from jaxline import errors
from jaxline.compat import adapters
from jaxline.metrics import console as console_lib
from jaxline.metrics import lines
from jaxline.metrics import live as live_lib
from jaxline.metrics import log_filter
from jaxline.metrics import periodic
from jaxline.metrics import summary
from jaxline.metrics import values
from jaxline.metrics import writers
from jaxline.supervision import preemption
from tests.experiments import regression

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOY = ROOT / 'tests' / 'programs' / 'toy.py'
CONFIG = ROOT / 'tests' / 'programs' / 'toy_config.py'
_ESCAPE = re.compile(r'\x1b\[?[\d;?]*[A-Za-z78]')


def screen(data):
  """Returns the lines that a terminal shows, of any height and width."""
  rows, row, column, i = [''], 0, 0, 0
  while i < len(data):
    if match := _ESCAPE.match(data, i):
      i = match.end()
      assert match.group() == '\x1b[J'  # No mode of the terminal.
      rows[row] = rows[row][:column]
      del rows[row + 1 :]
    elif data[i] == '\n':
      row += 1
      i += 1
    elif data[i] == '\r':
      column = 0
      i += 1
    else:
      text = rows[row].ljust(column)
      rows[row] = text[:column] + data[i] + text[column + 1 :]
      column += 1
      i += 1
    rows += [''] * (row + 1 - len(rows))
  return [line.rstrip() for line in rows]


class Terminal:
  """A pseudo-terminal: `file` writes to it, `text` is what was written."""

  def __init__(self, columns=80):
    self._controller, terminal = pty.openpty()
    self.file = os.fdopen(terminal, 'w', encoding='utf-8')
    self.resize(columns, 40)
    self._data = b''
    self._reader = threading.Thread(target=self._read)
    self._reader.start()

  def resize(self, columns, rows):
    size = struct.pack('HHHH', rows, columns, 0, 0)
    fcntl.ioctl(self.file.fileno(), termios.TIOCSWINSZ, size)

  def _read(self):
    with contextlib.suppress(OSError):  # Nobody has it open any more.
      while data := os.read(self._controller, 65536):
        self._data += data

  @property
  def text(self):
    return self._data.decode(errors='replace')

  def wait_for(self, pattern, secs=20):
    deadline = time.monotonic() + secs
    while not re.search(pattern, self.text):
      assert time.monotonic() < deadline, self.text[-4000:]
      time.sleep(0.01)

  def wait_for_screen(self, expected, secs=20):
    deadline = time.monotonic() + secs
    while (shown := screen(self.text)) != expected:
      assert time.monotonic() < deadline, shown
      time.sleep(0.01)

  def close(self):
    """Closes it, and returns what it shows."""
    self.file.close()
    self._reader.join(60)
    os.close(self._controller)
    return screen(self.text)


@pytest.fixture
def terminal():
  made = Terminal()
  yield made
  if not made.file.closed:
    made.close()


def make_config(**values):
  config = base_config.get_base_config()
  config.training_steps = 6000
  with config.unlocked(), config.ignore_type():
    config.update(values)
  return config


def experiment_of(params=None, **attributes):
  """Returns an object that is enough of an experiment for the first block."""
  return adapters.full_experiment(types.SimpleNamespace(**attributes))


def begun(mode='plain', step=0, **values):
  """Returns a console of a run that has begun, and the run's state."""
  state = types.SimpleNamespace(global_step=step)
  config = make_config(**values)
  checkpointer = types.SimpleNamespace(saved_step=None)
  console = console_lib.Console(mode)
  console.begin(config, experiment_of(), state, checkpointer)
  return console, state


# --- Lines of numbers. ---


def test_log_lines():
  with mock.patch.object(logging, 'info') as info:
    console = console_lib.Console()
    console.log_training(
      1200,
      {
        'loss': 2.34512,
        'bits_per_byte': 3.3829,
        'steps_per_sec': 8.31,
        'tokens': 2048000,
        'tokens_per_sec': 17018.26,
        'lr': 3e-5,
        'bad': math.nan,
      },
    )
    console.log_training(1201, {'new': 1.0, 'tokens': 5, 'loss': 2.0})
    console.log_evaluation(4, {'loss': np.float32(1.5)})
    console.say('That is all.')
  found = [call.args[0] % call.args[1:] for call in info.call_args_list]
  assert found == [
    'step 1200 | loss 2.345 | bits_per_byte 3.383 | steps_per_sec 8.31 | '
    'tokens 2048000 | tokens_per_sec 17018 | lr 3e-05 | bad nan',
    'step 1201 | new 1 | tokens 5 | loss 2',
    'eval step 4 | loss 1.5',
    'That is all.',
  ]


def test_a_line_shows_the_loss_the_means_and_when_it_ends(capsys):
  console, _ = begun()
  capsys.readouterr()
  scalars = {'lr': 0.5, 'loss': 2.0, 'tokens_per_step': 512, 'count': 1}
  console.log_training(1198, scalars)
  console.log_training(1199, scalars | {'loss': 4.0, 'count': 2})
  console._checkpointer.saved_step = 1100
  console.log_training(
    1200,
    {
      'lr': 0.5,
      'loss': 6.0,
      'tokens_per_step': 512,
      'count': 3,
      'steps_per_sec': 20.0,
      'tokens_per_sec': 10240.0,
      'mfu': 0.345,
      'device_memory_gib': 3.14,
      'gone': None,
    },
  )
  assert capsys.readouterr().out == (
    'step 1200 of 6000 (20%) | loss 4 | lr 0.5 | count 3 | 20 steps/s'
    ' | ETA 4:00 | saved 1100 | 10,240 tokens/s | +2 more\n'
  )
  console.log_training(1201, {'loss': 6.0, 'steps_per_sec': 20.0})
  assert 'saved' not in capsys.readouterr().out  # It is said once.


def test_what_is_not_finite_is_counted_and_hides_no_mean(capsys):
  console, _ = begun()
  capsys.readouterr()
  for step, loss in enumerate([1.0, math.nan, 3.0, math.inf], 1):
    rate = {'steps_per_sec': 1.0} if step == 4 else {}
    console.log_training(step, {'loss': loss, 'all': math.nan, **rate})
  assert capsys.readouterr().out.startswith(
    'step 4 of 6000 (0%) | loss 2 (2 of 4 not finite)'
    ' | all nan (4 of 4 not finite) | '
  )


def action_of(console, **values):
  config = make_config(interval_type='steps', **values)
  options = {'interval_type': 'steps'} | console.options(config)
  return periodic.PeriodicAction(**options)


def test_the_mean_is_over_the_last_100_steps_each_fetched_once(capsys):
  console, _ = begun()
  capsys.readouterr()
  action = action_of(console, log_tensors_interval=150)
  fetched = []

  def asarray(x, *args, real=np.asarray, **kwargs):
    if isinstance(x, jax.Array):
      fetched.append(x)
    return real(x, *args, **kwargs)

  with mock.patch.object(np, 'asarray', asarray):
    for step in range(1, 351):
      action(float(step), step, {'loss': jnp.float32(step)})
    action.wait_to_finish()
  # Steps 51 to 150, 201 to 300; those after are fetched at the end, unseen.
  first, second = capsys.readouterr().out.splitlines()
  assert ' | loss 100.5 | ' in first
  assert ' | loss 250.5 | ' in second
  steps = [int(x) for x in fetched]
  assert steps == [*range(51, 151), *range(201, 301), *range(301, 351)]


def test_the_mean_is_over_the_steps_since_the_last_line(capsys):
  console, _ = begun()
  capsys.readouterr()
  action = action_of(console, log_tensors_interval=4)
  donated = jnp.float32(100.0)
  donated.delete()
  for step in range(1, 9):
    loss = donated if step == 7 else jnp.float32(step)
    action(float(step), step, {'loss': loss})
  action.wait_to_finish()
  first, second = capsys.readouterr().out.splitlines()
  assert ' | loss 2.5 | ' in first
  assert ' | loss 6.333 | ' in second  # (5 + 6 + 8) / 3.


@pytest.mark.parametrize('interval', [None, -1])
def test_without_an_interval_nothing_is_fetched(interval, capsys):
  console, _ = begun()
  capsys.readouterr()
  action = action_of(console, log_tensors_interval=interval)
  with mock.patch.object(values, 'fetch') as fetch:
    for step in range(1, 300):
      action(float(step), step, {'loss': 1.0})
    action.wait_to_finish()
  fetch.assert_not_called()


def test_a_process_that_is_not_the_first_says_nothing(monkeypatch, capsys):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  for log_all_hosts in (False, True):
    config = make_config(log_all_hosts=log_all_hosts)
    console = console_lib.Console.make(config)
    with mock.patch.object(logging, 'info') as info, console:
      console.begin(config, experiment_of())
      console.say('A line.')
      console.log_training(1, {'loss': 1.0})
      console.log_evaluation(1, {'loss': 1.0})
    assert info.call_count == (3 if log_all_hosts else 0)
    assert (console.options(config)['interval'] is None) is not log_all_hosts
  assert capsys.readouterr().out == ''


@pytest.mark.parametrize(
  ('asked', 'term', 'mode'),
  [
    (None, 'xterm', 'live'),
    (None, 'dumb', 'plain'),
    (None, '', 'plain'),
    ('live', '', 'plain'),
    ('plain', 'xterm', 'plain'),
    ('off', 'xterm', 'off'),
  ],
)
def test_the_mode(asked, term, mode, terminal, monkeypatch):
  monkeypatch.setenv('TERM', term)
  monkeypatch.setattr(sys, 'stdout', terminal.file if term else None)
  assert console_lib.Console.make(make_config(console=asked)).mode == mode


def test_the_console_is_no_writer():
  with pytest.raises(
    errors.UsageError, match=r'terminal shows is config\.cons'
  ):
    writers.make('console', make_config(), 'train', pathlib.Path())


def test_texts_are_printed_without_commands_to_the_terminal(tmp_path, capsys):
  console, _ = begun()
  capsys.readouterr()
  with writers.MetricWriter(writers.JsonlWriter(tmp_path / 'x')) as writer:
    console.show_texts(writer, 'eval')
    writer.write_texts(0, {'config': '{}'})
    writer.write_texts(7, {'sample': 'a\tb\x1b[2J\r\nc\x00'})
    writer.write_scalars(8, {'loss': 1.0})
    writer.write_images(8, {'x': np.zeros((2, 2), np.uint8)})
  out = capsys.readouterr().out.splitlines()
  assert out == ['eval step 7 | sample:', '  a b\ufffd[2J\ufffd', '  c\ufffd']
  assert len((tmp_path / 'x').read_text().splitlines()) == 4


def test_an_evaluation_says_now_and_then_that_it_waits(monkeypatch, capsys):
  now = 0.0
  monkeypatch.setattr(console_lib.time, 'monotonic', lambda: now)
  console = console_lib.Console('plain')
  for now in np.arange(0, 200, 0.25):
    console.log_waiting(None if now < 10 else 5, 'DIR')
  assert capsys.readouterr().out.splitlines() == [
    'Waiting for a checkpoint in DIR.',
    *['Waiting for a checkpoint after step 5 in DIR.'] * 4,
  ]


def test_a_pipe_that_nobody_reads_ends_no_run():
  program = """
import sys, time
from jaxline.metrics import console
shown = console.Console('plain')
shown.say('begun')
sys.stdin.readline()
for _ in range(3):
  shown.say('x' * 100_000)
"""
  process = subprocess.Popen(
    [sys.executable, '-c', program],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  assert process.stdout.readline() == b'begun\n'
  process.stdout.close()
  with process.stdin, process.stderr:
    process.stdin.write(b'\n')
    process.stdin.flush()
    assert process.wait(60) == 0
    assert process.stderr.read() == b''


def test_a_text_that_the_terminal_cannot_show_is_no_error(monkeypatch):
  out = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
  monkeypatch.setattr(sys, 'stdout', out)
  console_lib.Console('plain').say('caf\xe9')
  assert out.buffer.getvalue() == b'caf?\n'


# --- The log. ---


def record(path, level=std_logging.INFO):
  return std_logging.LogRecord('x', level, str(path), 1, 'text', (), None)


JAX = pathlib.Path(jax.__file__).parent
OWN = pathlib.Path(jaxline.__file__).parent


@pytest.mark.parametrize(
  ('path', 'level', 'is_heard'),
  [
    (OWN / 'train.py', std_logging.INFO, False),
    (OWN / 'metrics' / 'console.py', std_logging.INFO, True),
    (JAX / '_src' / 'xla_bridge.py', std_logging.INFO, False),
    (JAX / '_src' / 'xla_bridge.py', std_logging.ERROR, True),
    (JAX.parent / 'optax' / 'x.py', std_logging.INFO, False),
    (ROOT / 'examples' / 'lm' / 'experiment.py', std_logging.INFO, True),
    (JAX.parent / 'jaxlike' / 'x.py', std_logging.INFO, True),
    ('mine.py', std_logging.INFO, True),
  ],
)
def test_the_log_is_quiet_about_the_libraries(path, level, is_heard):
  handler = logging.get_absl_handler()
  with log_filter.quiet():
    assert bool(handler.filter(record(path, level))) is is_heard
    with mock.patch.object(
      logging, 'get_verbosity', return_value=logging.DEBUG
    ):
      assert handler.filter(record(path, level))
  assert handler.filter(record(path, level))


# --- The live line. ---


@pytest.fixture
def live(terminal, monkeypatch):
  """A live line on a terminal, which stdout and stderr then go to."""

  class Shown(live_lib.Live):
    def start(self):
      # Not before: pytest sets both at the beginning of a test.
      for name in ('stdout', 'stderr'):
        if getattr(sys, name) is not self.kept.get(name):
          monkeypatch.setattr(sys, name, terminal.file)
      super().start()
      terminal.wait_for('drawn')

    def draw(self, width):
      self.drawn.append(width)
      return f'drawn {len(self.drawn)}'

  monkeypatch.setenv('TERM', 'xterm')
  made = Shown(lambda width: made.draw(width))
  made.drawn, made.kept = [], {}
  yield made
  made.stop()


def test_what_is_printed_stands_above_the_live_line(live, terminal):
  logger = std_logging.getLogger('tests.console.named')
  handler = std_logging.StreamHandler(terminal.file)
  logger.addHandler(handler)
  absl_handler = logging.get_absl_handler().python_handler
  old = absl_handler.stream
  absl_handler.stream = terminal.file
  try:
    live.start()
    print('printed\nlines')
    logger.warning('a warning')
    logging.get_absl_handler().handle(record('mine.py'))
    for text in ('half', ' a', ' line\n'):
      sys.stderr.write(text)
    for percent in (10, 20):
      sys.stderr.write(f'\r{percent}% of it')
    terminal.wait_for('20% of it')
    assert screen(terminal.text)[5:] == ['20% of it']
    sys.stderr.write('\r100% of it\n')
    terminal.wait_for('100% of it\r\ndrawn')
    live.stop()
    print('after')
    assert handler.stream is absl_handler.stream is terminal.file
    assert sys.stdout is sys.stderr is terminal.file
  finally:
    logger.removeHandler(handler)
    absl_handler.stream = old
  shown = terminal.close()
  assert shown.pop(3).endswith(' mine.py:1] text')
  assert shown == [
    'printed', 'lines', 'a warning', 'half a line', '100% of it', 'after', '',
  ]  # fmt: skip
  assert set(live.drawn) == {80}


class Around:
  """A stream around another one, such as one that keeps a copy in a file."""

  __slots__ = ('stream',)  # It takes no attributes.

  def __init__(self, stream):
    self.stream = stream

  def write(self, text):
    return self.stream.write(text)

  def __getattr__(self, name):
    return getattr(self.stream, name)


def test_a_stream_that_is_no_file(live, terminal, monkeypatch):
  stream = live.kept['stdout'] = Around(terminal.file)
  monkeypatch.setattr(sys, 'stdout', stream)
  write = terminal.file.write
  live.start()
  print('printed', file=sys.stderr)
  live.stop()
  assert terminal.file.write == write
  assert sys.stdout is stream
  assert 'printed' in terminal.close()


def test_a_stream_that_is_no_terminal_is_left_alone(live, monkeypatch):
  to_a_file = live.kept['stderr'] = io.StringIO()
  monkeypatch.setattr(sys, 'stderr', to_a_file)
  live.start()
  print('an error', file=sys.stderr)
  live.stop()
  assert to_a_file.getvalue() == 'an error\n'


@pytest.mark.parametrize('make', [pdb.Pdb, lambda: type('P', (pdb.Pdb,), {})()])
def test_a_debugger_ends_the_live_line(make, live, terminal):
  init = pdb.Pdb.__init__
  live.start()
  assert make().stdout is terminal.file  # It prompts where nobody draws.
  assert pdb.Pdb.__init__ is init
  drawn = len(live.drawn)
  time.sleep(0.6)
  assert len(live.drawn) <= drawn + 1
  assert terminal.close() == ['']


def test_a_terminal_that_is_gone_ends_no_run(live, terminal):
  live.start()
  gone = OSError(5, 'Input/output error')
  with mock.patch.object(live, '_write', side_effect=gone):
    print('nobody sees it')
    time.sleep(0.3)
  live.stop()
  assert sys.stdout is terminal.file


def test_a_resized_terminal_gets_a_line_that_fits(live, terminal):
  live.start()
  live.draw = lambda width: '-' * (width - 1)
  for columns, width in ((30, 30), (0, 80)):  # 0: it does not know.
    terminal.resize(columns, 4)
    terminal.wait_for_screen(['-' * (width - 1)])
  live.stop()
  assert terminal.close() == ['']


@pytest.mark.parametrize('columns', [30, 80, 200])
def test_the_live_line_shows_where_the_run_is(columns):
  console, state = begun('live')
  console._live = mock.Mock()
  for step, loss in ((1100, 2.0), (1200, 1.0)):
    state.global_step = step
    console.log_training(
      step,
      {
        'lr': 0.5,
        'loss': loss,
        'steps_per_sec': 20.0,
        'tokens_per_sec': 10240.0,
        'mfu': 0.345,
      },
    )
  console._checkpointer.saved_step = 1000
  drawn = console._draw(columns)
  assert len(drawn) < columns
  assert drawn.startswith('step 1200 of 6000 (20%)')
  if columns > 30:
    assert '| loss 1.5 |' in drawn
    assert '20 steps/s | ETA 4:00' in drawn
  if columns > 80:
    assert 'saved 1000 | 10,240 tokens/s' in drawn
  console.evaluating(1200)
  assert console._draw(80).startswith(
    'step 1200 of 6000 (20%), evaluating step 1200 | loss 1.5 |'
  )


# --- The first and the last block. ---


def test_the_first_block_of_a_sharded_run(capsys):
  config = make_config(
    sharding='fsdp', checkpoint_dir=f'{os.getcwd()}/runs/a', writers=('jsonl',)
  )
  experiment = regression.Regression(
    'train', jax.random.PRNGKey(0), run_config=config
  )
  experiment.data_summary = '690 documents'
  origin = summary.Origin((), 'configs/x.py', {'sharding': 'fsdp'})
  block = summary.start_block(config, experiment, origin, 'step 0')
  assert block == [
    'Experiment:    tests.experiments.regression:Regression',
    'Config:        configs/x.py, sharding=fsdp',
    'Devices:       2 x cpu; mesh data 2; sharding fsdp',
    'Parameters:    36 (144 B) in 2 arrays; 1 of them split over data',
    'Data:          690 documents',
    'Run directory: runs/a',
    'Start:         step 0',
  ]
  assert experiment._state is None  # Shapes were enough.


def test_without_a_checkpoint_there_is_nothing_to_go_on_from():
  block = summary.end_block(
    make_config(checkpoint_dir='/run'),
    experiment_of(),
    summary.Origin(COMMAND),
    {},
    1.0,
    is_over=False,
    has_checkpoint=False,
  )
  assert block == [
    'Run directory: /run',
    'Curves:   python -m jaxline.runs compare /run',
  ]


@pytest.mark.usefixtures('compiles')
def test_the_start_says_whether_the_cache_had_the_step(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(compilation_cache, '_MIN_COMPILE_SECS', 0.0)
  config = regression.get_config(1)
  config.compilation_cache = str(tmp_path / 'programs')

  def said(**overrides):
    jax.clear_caches()
    jaxline.fit(regression.Regression, config, overrides, mode='train')
    out = capsys.readouterr().out
    return re.search(r'^Compiling the train step...\n(.*)$', out, re.M)[1]

  miss = r'Compiled in \d+\.\d s; none of \d+ programs were in the cache\.'
  assert re.fullmatch(miss, said())
  hit = r'Compiled in \d+\.\d s; (\d+) of \1 programs were in the cache\.'
  assert re.fullmatch(hit, said())
  for path in tmp_path.glob('programs/jit_step-*'):
    path.unlink()
  some = r'Compiled in \d+\.\d s; 1 of \d+ programs were in the cache\.'
  assert re.fullmatch(some, said())
  assert re.fullmatch(r'Compiled in \d+\.\d s\.', said(compilation_cache='off'))


def test_a_run_without_a_step_left_compiles_nothing(tmp_path, capsys):
  config = regression.get_config(4)
  config.checkpoint_dir = str(tmp_path / 'run')
  config.log_tensors_interval = 100
  for _ in range(2):
    jaxline.fit(regression.Regression, config, mode='train')
  first, second = capsys.readouterr().out.split('Trained to step 4')
  assert 'Restoring' not in first
  assert 'Compiling the train step...' in first
  # The last step is shown, whatever the interval is.
  assert re.search(r'^step 4 of 4 \(100%\) \| loss ', first, re.MULTILINE)
  assert 'Restoring the newest checkpoint...' in second
  assert 'step 4 of 4, resumed' in second
  assert 'Compiling' not in second
  assert '\nNothing was left to train at step 4 of 4 (100%) in ' in second


COMMAND = ('python', 'x.py', '--config=a.py', '--config.checkpoint_dir', 'old')


@pytest.mark.parametrize(
  ('command', 'decodes', 'expected'),
  [
    (
      COMMAND,
      False,
      [
        'Go on:    python x.py --config=a.py --config.checkpoint_dir=/run',
        'Evaluate: python x.py --config=a.py --config.checkpoint_dir=/run'
        ' --jaxline_mode=eval --config.one_off_evaluate',
      ],
    ),
    (
      (*COMMAND, '--jaxline_mode=train_and_eval', '--config.a=b c'),
      True,
      [
        'Go on:    python x.py --config=a.py --jaxline_mode=train_and_eval'
        " '--config.a=b c' --config.checkpoint_dir=/run",
        "Decode:   python x.py --config=a.py '--config.a=b c'"
        ' --config.checkpoint_dir=/run --jaxline_mode=decode',
      ],
    ),
    (
      (),
      True,
      [
        "Go on:    jaxline.fit(..., overrides={'checkpoint_dir': '/run'})",
        "Evaluate: jaxline.evaluate('/run', experiment_class=Experiment)",
      ],
    ),
  ],
)
def test_the_last_block_has_the_next_commands(command, decodes, expected):
  class Experiment:
    if decodes:

      def decode(self):
        pass

  block = summary.end_block(
    make_config(checkpoint_dir='/run'),
    adapters.full_experiment(Experiment()),
    summary.Origin(command),
    {'steps': 6.0, 'evaluation': 3.0, 'restore': 0.01},
    10.0,
    is_over=False,
    has_checkpoint=True,
  )
  assert block == [
    'Time: steps 60%, evaluation 30%.',
    'Run directory: /run',
    *expected,
    'Curves:   python -m jaxline.runs compare /run',
  ]


@pytest.mark.parametrize(
  ('command', 'is_over', 'steps', 'expected'),
  [
    (
      (*COMMAND, '--config.training_steps=6'),
      True,
      6,
      [
        'Go on:    python x.py --config=a.py --config.checkpoint_dir=/run'
        ' --config.training_steps=12 --config.on_config_change=continue',
        'Evaluate: python x.py --config=a.py --config.training_steps=6'
        ' --config.checkpoint_dir=/run --jaxline_mode=eval'
        ' --config.one_off_evaluate',
      ],
    ),
    (
      (*COMMAND, '--config.one_off_evaluate', '--config.eval_steps', '4'),
      None,
      6,
      [
        'Evaluate: python x.py --config=a.py --config.checkpoint_dir=/run'
        ' --jaxline_mode=eval --config.one_off_evaluate',
      ],
    ),
    (
      (),
      True,
      6,
      [
        "Go on:    jaxline.fit(..., overrides={'checkpoint_dir': '/run',"
        " 'training_steps': 12, 'on_config_change': 'continue'})",
        "Evaluate: jaxline.evaluate('/run', experiment_class=SimpleNamespace)",
      ],
    ),
    # It has decided by itself that it is over, or has evaluated only.
    (
      (),
      True,
      None,
      ["Evaluate: jaxline.evaluate('/run', experiment_class=SimpleNamespace)"],
    ),
    (
      (),
      None,
      6,
      ["Evaluate: jaxline.evaluate('/run', experiment_class=SimpleNamespace)"],
    ),
  ],
)
def test_a_run_that_has_all_its_steps_goes_on_with_more(
  command, is_over, steps, expected
):
  config = make_config(checkpoint_dir='/run', training_steps=steps)
  block = summary.end_block(
    config, experiment_of(), summary.Origin(command), {}, 1.0, is_over, True
  )
  assert block == [
    'Run directory: /run',
    *expected,
    'Curves:   python -m jaxline.runs compare /run',
  ]


@pytest.mark.parametrize(
  ('command', 'pickles', 'expected'),
  [
    (
      (*COMMAND, '--jaxline_mode=train', '-v', '1', '--config.a=b'),
      False,
      ['python x.py --jaxline_mode=train -v 1 RUN', 'python x.py -v 1 RUN'],
    ),
    (
      ('python', 'x.py', '--jaxline_run', 'old', '--noconfig.a'),
      True,
      2 * ['python x.py RUN --config.checkpoint_allow_pickle'],
    ),
    # Its flags make those of the config.
    (('python', 'x.py', '--exp=A'), False, 2 * ['python x.py --exp=A DIR']),
  ],
)
def test_the_commands_name_a_run_that_has_its_config(
  command, pickles, expected, tmp_path
):
  (tmp_path / 'config.json').touch()
  config = make_config(
    checkpoint_dir=str(tmp_path),
    training_steps=6,
    checkpoint_allow_pickle=pickles,
  )
  _, *commands, _ = summary.end_block(
    config, experiment_of(), summary.Origin(command), {}, 1.0, True, True
  )
  run = f'--jaxline_run={tmp_path}', f'--config.checkpoint_dir={tmp_path}'
  go_on, look = (
    x.replace('RUN', run[0]).replace('DIR', run[1]) for x in expected
  )
  assert commands == [
    f'Go on:    {go_on} --config.training_steps=12'
    ' --config.on_config_change=continue',
    f'Evaluate: {look} --jaxline_mode=eval --config.one_off_evaluate',
  ]


def test_the_command_of_several_processes_is_that_of_the_launcher(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  config = make_config(checkpoint_dir='/run')
  origin = summary.Origin(COMMAND)
  block = summary.end_block(
    config, experiment_of(), origin, {}, 1.0, is_over=False, has_checkpoint=True
  )
  assert block == [
    'Run directory: /run',
    'Go on:    the same command with --config.checkpoint_dir=/run',
    'Evaluate: the same command with --config.checkpoint_dir=/run'
    ' --jaxline_mode=eval --config.one_off_evaluate',
    'Curves:   python -m jaxline.runs compare /run',
  ]


def test_the_last_block_says_what_the_run_came_to(capsys):
  for error, how in (
    (None, 'Trained to'),
    (ValueError(), 'Failed at'),
    (preemption.Preempted(75, ''), 'Stopped at'),
  ):
    console, state = begun(step=10)
    console.log_training(9, {'loss': 1.0, 'steps_per_sec': 1.0})
    console.log_best('bits', 2.5, 8)
    state.global_step = 30
    capsys.readouterr()
    assert not console.tells_how_to_go_on  # There is no checkpoint.
    console._checkpointer.saved_step = 20
    assert not console.tells_how_to_go_on  # It was called from Python.
    console._origin = summary.Origin(COMMAND)
    assert console.tells_how_to_go_on
    console.__exit__(type(error), error, None)
    assert capsys.readouterr().out.splitlines()[:3] == [
      f'{how} step 30 of 6000 (0%) in 0:00.',
      'Best bits: 2.5 at step 8.',
      'Last loss: 1, the mean of at most 100 steps.',
    ]
    # A second time there is nothing to say.
    console.__exit__(None, None, None)
    assert capsys.readouterr().out == ''


def test_the_last_block_of_an_evaluation(capsys):
  console = console_lib.Console('plain')
  with console:
    console.begin(make_config(checkpoint_dir='/run'), experiment_of())
    assert not console.tells_how_to_go_on
    console.log_evaluation(3, {'bits': 2.5})
    console.log_best('bits', 3.0)
    console.log_best('bits', 2.5, 3)
  out = capsys.readouterr().out.splitlines()
  assert 'Start:' not in ''.join(out)
  assert out[-6:-4] + out[-3:] == [
    'New best bits: 2.5 at step 3 (was 3).',
    'Evaluated 1 checkpoint in 0:00.',
    'Run directory: /run',
    "Evaluate: jaxline.evaluate('/run', experiment_class=SimpleNamespace)",
    'Curves:   python -m jaxline.runs compare /run',
  ]


@pytest.mark.parametrize(
  ('seconds', 'text'),
  [
    (0.4, '0:00'),
    (187.2, '3:07'),
    (7387, '2:03:07'),
    (60 * 3600, '2.5 days'),
  ],
)
def test_durations(seconds, text):
  assert lines.duration(seconds) == text


# --- Whole runs. ---


def arguments(run_dir, *args, mode='train'):
  return [
    sys.executable,
    str(TOY),
    'sharded',
    'direct',
    f'--config={CONFIG}',
    f'--config.checkpoint_dir={run_dir}',
    f'--jaxline_mode={mode}',
    *args,
  ]


def environment():
  return os.environ | {'PYTHONPATH': str(ROOT), 'TERM': 'xterm'}


def run(run_dir, *args, env=(), **kwargs):
  return subprocess.run(
    arguments(run_dir, *args, **kwargs),
    cwd=ROOT,
    env=environment() | dict(env),
    capture_output=True,
    text=True,
    timeout=120,
    stdin=subprocess.DEVNULL,
  )


@pytest.mark.process
def test_a_run_in_a_pipe(tmp_path):
  result = run(
    tmp_path,
    '--config.training_steps=4',
    '--config.log_tensors_interval=2',
    '--config.eval_interval=300',  # The file has 2.
    '--config.interval_type=steps',  # As the file has it.
    mode='train_and_eval',
  )
  assert result.returncode == 0, result.stderr
  (warning,) = result.stderr.splitlines()  # Of the toy's input.
  assert warning.startswith('W')
  out = result.stdout.splitlines()
  assert max(map(len, out[:14])) <= 120
  first = out.index('Compiling the train step...')
  assert first <= 20
  config = ' '.join(line.strip() for line in out[1:first])
  for shown in ('training_steps=4', 'log_tensors_interval=2', 'interval=300'):
    assert shown in config
  assert 'interval_type' not in config
  assert f'Run directory: {tmp_path}' in out[:first]
  assert 'Start:         step 0 of 4, a fresh run' in out[:first]
  assert re.fullmatch(r'Compiled in \d+\.\d s\b.*', out[first + 1])
  assert re.match(r'step 2 of 4 \(50%\) \| loss [\d.]+ \| ', out[first + 2])
  text = '\n'.join(out[first:])
  assert re.search(r'^eval step 4 \| loss', text, re.MULTILINE)
  assert re.search(r'^New best loss: [\d.]+ at step 4\.$', text, re.MULTILINE)
  assert re.search(r'^Trained to step 4 of 4 \(100%\) in ', text, re.MULTILINE)
  assert re.search(r'^Time: .*compilation \d+%', text, re.MULTILINE)
  assert out[-1].startswith(
    f'Curves:   python -m jaxline.runs compare {tmp_path}'
  )
  (look,) = (line for line in out if line.startswith('Evaluate:'))
  assert f'--jaxline_run={tmp_path} --jaxline_mode=eval' in look
  (more,) = (line for line in out if line.startswith('Go on:'))
  changes = '--config.training_steps=8 --config.on_config_change=continue'
  assert more.endswith(f'={tmp_path} {changes}')
  # And so it goes on.
  again = run(tmp_path, '--config.training_steps=5', '--verbosity=1')
  assert 'Start:         step 4 of 5, resumed\n' in again.stdout
  assert 'training loop starting...' in again.stderr
  assert 'Training with config:' in again.stderr


@pytest.mark.process
def test_the_users_own_information_is_shown(tmp_path):
  program = f"""
import sys
sys.path.insert(0, {str(TOY.parent)!r})
import logging as std_logging
from absl import logging
import toy
from jaxline import platform
class Mine(toy.Sharded):
  def evaluate(self, **kwargs):
    logging.info('absl says it')
    std_logging.getLogger('mine').info('stdlib says it')
    return super().evaluate(**kwargs)
platform.main(Mine, sys.argv[1:])
"""
  result = subprocess.run(
    [sys.executable, '-c', program, *arguments(tmp_path)[4:-1],
     '--jaxline_mode=train_and_eval', '--config.training_steps=2'],
    cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120,
  )  # fmt: skip
  assert result.returncode == 0, result.stderr
  assert re.fullmatch(
    r'W.*\nI\d.*\] absl says it\nI\d.*\] stdlib says it\n', result.stderr
  )


@pytest.mark.process
def test_a_refused_start_has_no_block(tmp_path):
  result = run(tmp_path, '--config.one_off_evaluate=True', mode='eval')
  assert result.returncode == 2
  assert result.stdout == ''
  result = run(tmp_path, env={'JAX_PLATFORMS': 'rocm'})
  assert result.returncode == 1
  assert result.stdout == ''
  assert "Unable to initialize backend 'rocm'" in result.stderr.splitlines()[-1]


@pytest.mark.process
def test_an_error_comes_after_the_last_block(tmp_path):
  result = subprocess.run(
    arguments(
      tmp_path,
      '--config.experiment_kwargs.config.fault=step',
      '--config.experiment_kwargs.config.fault_step=3',
    ),
    cwd=ROOT,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,  # As on a terminal.
    text=True,
    timeout=120,
  )
  assert result.returncode == 1
  before, after = result.stdout.split('Failed at step 3 of 6 (50%) in ')
  assert re.search(r'^Compiled in ', before, re.MULTILINE)
  assert 'Curves: ' in after
  assert after.splitlines()[-1].endswith('Failure: step at 3')
  assert 'Traceback' not in before


def start_on(terminal, program, tmp_path, *args):
  return subprocess.Popen(
    [sys.executable, '-c', program, *arguments(tmp_path, *args)[4:]],
    cwd=ROOT,
    env=environment() | {'COLUMNS': ''},
    stdin=subprocess.DEVNULL,
    stdout=terminal.file,
    stderr=terminal.file,
  )


LIVE = f"""
import sys
sys.path.insert(0, {str(TOY.parent)!r})
import os
from absl import logging
import toy
from jaxline import platform
class Mine(toy.Sharded):
  def step(self, *, global_step, rng, writer):
    if global_step % 10 == 9:
      print('print of step', global_step)
      logging.warning('warning of step %d', global_step)
      print('error of step', global_step, file=sys.stderr)
      os.write(2, b'C++ of step %d\\n' % global_step)
    return super().step(global_step=global_step, rng=rng, writer=writer)
platform.main(Mine, sys.argv[1:])
"""


@pytest.mark.process
def test_a_run_on_a_terminal(tmp_path, terminal):
  process = start_on(
    terminal,
    LIVE,
    tmp_path,
    '--config.training_steps=100',
    '--config.experiment_kwargs.config.step_secs=0.03',
    '--config.save_checkpoint_interval=40',
  )
  terminal.wait_for(r'loss [\d.]+')
  assert process.wait(120) == 0, terminal.text
  shown = terminal.close()
  first = shown.index('Compiling the train step...')
  last = next(i for i, x in enumerate(shown) if x.startswith('Trained to'))
  between = shown[first + 1 : last]
  assert ' The position of a generator is not saved' in between.pop(0)
  assert re.match('Compiled in ', between.pop(0))
  # Whole lines, in order, and nothing left of what was drawn.
  assert len(between) == 40, between
  for i in range(10):
    print_, warning, error, raw = between[4 * i : 4 * i + 4]
    assert print_ == f'print of step {10 * i + 9}'
    assert warning.endswith(f'] warning of step {10 * i + 9}')
    assert error == f'error of step {10 * i + 9}'
    # The end of the live line may stay behind it.
    assert raw.startswith(f'C++ of step {10 * i + 9}')
  drawn = re.findall(r'step (\d+) of 100', terminal.text[:-2000])
  assert len(set(drawn)) > 4
  assert 'ETA 0:0' in terminal.text


@pytest.mark.process
@pytest.mark.parametrize(
  ('signum', 'code', 'said'),
  [
    (signal.SIGINT, 130, 'Interrupted by Ctrl-C'),
    (signal.SIGTERM, 75, 'Preempted by SIGTERM'),
  ],
)
def test_a_signal_on_a_terminal(tmp_path, terminal, signum, code, said):
  process = start_on(
    terminal,
    LIVE,
    tmp_path,
    '--config.training_steps=100000',
    '--config.experiment_kwargs.config.step_secs=0.03',
  )
  terminal.wait_for(r'ETA')
  process.send_signal(signum)
  assert process.wait(120) == code, terminal.text
  shown = terminal.close()
  (last,) = (i for i, x in enumerate(shown) if x.startswith('Stopped at step '))
  assert any(x.startswith('Go on:    python -c ') for x in shown[last:])
  assert any(said in x for x in shown[last:])
  assert 'It goes on' not in terminal.text  # Said already.
  if signum == signal.SIGINT:
    assert any('press Ctrl-C again to leave at once' in x for x in shown[:last])


@pytest.mark.process
def test_breakpoint_on_a_terminal(tmp_path):
  program = LIVE.replace('if global_step % 10 == 9:', 'if global_step == 30:\n'
                         '      breakpoint()\n    if False:')  # fmt: skip
  terminal = Terminal()
  process = subprocess.Popen(
    [
      *(sys.executable, '-c', program),
      *arguments(tmp_path, '--config.training_steps=40')[4:],
      '--config.experiment_kwargs.config.step_secs=0.03',
    ],
    cwd=ROOT,
    env=environment(),
    stdin=subprocess.PIPE,
    stdout=terminal.file,
    stderr=terminal.file,
    text=True,
  )
  try:
    terminal.wait_for(r'\(Pdb\) ')
    time.sleep(0.7)  # Longer than two refreshes: a last line may be due.
    shown = screen(terminal.text)
    at = shown.index('(Pdb)')
    assert 'step(' in shown[at - 1] or '->' in shown[at - 1]
    time.sleep(0.7)
    assert screen(terminal.text) == shown
    process.stdin.write('p "step", global_step\nc\n')
    process.stdin.close()
    assert process.wait(60) == 0, terminal.text
  finally:
    process.kill()
  shown = terminal.close()
  assert "('step', 30)" in '\n'.join(shown)
  assert 'Trained to step 40' in '\n'.join(shown)


@pytest.mark.process
def test_a_forked_worker_prints_as_if_there_were_no_lines(tmp_path):
  program = """
import os, sys, threading, time
from jaxline.metrics import live
lines = live.Live(lambda width: 'drawn')
lines.start()
time.sleep(0.5)
held, forked = threading.Event(), threading.Event()

def hold():  # As the thread of the lines may at the moment of the fork.
  with lines._lock:
    held.set()
    forked.wait()

threading.Thread(target=hold).start()
held.wait()
if not (child := os.fork()):
  print('child')
  sys.stdout.flush()
  lines.stop()
  os._exit(0)
os.waitpid(child, 0)
forked.set()
lines.stop()
"""
  terminal = Terminal()
  process = subprocess.run(
    [sys.executable, '-W', 'ignore', '-c', program],
    cwd=ROOT,
    env=environment(),
    stdin=subprocess.DEVNULL,
    stdout=terminal.file,
    stderr=terminal.file,
    timeout=60,
  )
  shown = terminal.close()  # The other process may draw within the line.
  assert process.returncode == 0, terminal.text
  assert 'child' in shown, terminal.text


@pytest.mark.process
def test_in_the_background_nothing_is_drawn(tmp_path, terminal):
  program = """
import fcntl, os, signal, sys, termios, time
from jaxline.metrics import live
os.setsid()
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
lines = live.Live(lambda width: 'drawn')
lines.start()
give_to(shell, b'$ typed')
print(' by the user', lines.is_on)
give_to(os.getpgrp(), b'$ fg\\n')
print('printed', lines.is_on)
give_to(shell, b'^Z\\x1b[J\\n$ typed')
print(' again', lines.is_on, end='')
lines.stop()
os.kill(shell, signal.SIGKILL)
os.wait()
print()
"""
  process = subprocess.run(
    [sys.executable, '-W', 'ignore', '-c', program],
    cwd=ROOT,
    env=environment(),
    stdin=subprocess.DEVNULL,
    stdout=terminal.file,
    stderr=terminal.file,
    timeout=60,
  )
  shown = terminal.close()
  assert process.returncode == 0, terminal.text
  background, front = terminal.text.split('$ fg')
  front, later = front.split('^Z\x1b[J')
  assert 'drawn' in front
  assert '\x1b' not in background + later
  assert shown == [
    '$ python train.py &',
    '$ typed by the user False',
    '$ fg',
    'printed True',
    '^Z',
    '$ typed again False',
    '',
  ]
