"""What a run prints: lines, the live line on a terminal, the summary.

`screen` plays what was written to a terminal, so that tests see what a user
sees.
"""

import functools
import io
import logging as std_logging
import math
import os
import re
import sys
import time
import types
from unittest import mock
import weakref

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline.compat import experiments
from jaxline.metrics import console as console_lib
from jaxline.metrics import live as live_lib
from jaxline.metrics import writers
from jaxline.supervision import preemption
from tests import processes
from tests import toys

TOY = processes.ROOT / 'tests' / 'programs' / 'toy.py'
CONFIG = TOY.with_name('toy_config.py')
DRAWN_SECS = 0.2  # Longer than it takes until the live line is drawn again.
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
      row, column = row + 1, 0
    elif part == '\r':
      column = 0
    else:
      text = rows[row].ljust(column)
      rows[row] = text[:column] + part + text[column + len(part) :]
      column += len(part)
    rows += [''] * (row + 1 - len(rows))
  return [line.rstrip() for line in rows]


class Terminal(io.StringIO):
  """A terminal in memory, which has no group of processes."""

  def isatty(self):
    return True

  def fileno(self):
    return 99

  def wait_for(self, shown):
    """Waits until it shows some lines."""
    processes.wait_until(lambda: screen(self.getvalue()) == shown, 20)


@pytest.fixture(autouse=True)
def no_columns(monkeypatch):
  monkeypatch.delenv('COLUMNS', raising=False)  # pytest-xdist sets it.


@pytest.fixture
def terminal(monkeypatch):
  made = Terminal()
  size = lambda fd: os.terminal_size((80, 40))
  monkeypatch.setattr(os, 'get_terminal_size', size)
  return made


make_config = functools.partial(toys.make_config, 6000)


def experiment_of(**attributes):
  """Returns an object that is enough of an experiment to print."""
  steps = lambda step, config: step < (config.training_steps or math.inf)
  attributes = {'should_run_step': steps} | attributes
  return experiments.full_experiment(
    types.SimpleNamespace(**attributes), **attributes
  )


def begun(step=0, experiment=None, command=(), saved=None, **overrides):
  """Returns a console of a run that has begun, and the run's state."""
  state = types.SimpleNamespace(global_step=step, saved_step=saved)
  console = console_lib.Console('plain', console_lib.Origin(command))
  config, experiment = make_config(**overrides), experiment or experiment_of()
  console.begin(config, experiment, state, lambda: state.saved_step)
  return console, state


def test_a_line_has_the_progress_the_means_and_the_trend(capsys, monkeypatch):
  console, state = begun()
  rate = {'steps_per_sec': 20.0, 'mfu': 0.345, 'tokens_per_step': 512}
  console.log_training(1000, {1000: {'loss': 5.0} | rate})
  capsys.readouterr()
  state.saved_step = 1100
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
    console, _ = begun()
    losses = (
      (step, {'loss': donated if step == 7 else jnp.float32(step)})
      for step in range(1, steps + 1)
    )
    run_hook(console, losses, log_tensors_interval=interval)
    out = capsys.readouterr().out
    assert re.findall(r'^step.*\| (loss .*?) \|', out, re.M) == shown


def test_the_rate_begins_after_the_first_step(capsys):
  console, _ = begun()
  with console.training():
    run_hook(console, ((x, {}) for x in (60, 61, 64)), log_tensors_interval=4)
  shown = r'Compiled in .*\nstep 60 of 6000 \(1%\)\nstep 64 .*1 steps'
  assert re.search(shown, capsys.readouterr().out)


def test_of_the_last_steps_no_large_array_is_kept():
  with writers.MetricWriter() as log:
    config = make_config(log_tensors_interval=100)
    hook = console_lib.ConsoleHook(begun()[0], config, log, dict)
    large, loss = jnp.ones([3]), jnp.float32(1)
    kept = weakref.ref(large), weakref.ref(loss)
    hook(1.0, 1, {'loss': loss, 'large': large})
    del large, loss
    assert [ref() is None for ref in kept] == [True, False]


def test_other_processes_print_nothing(monkeypatch, capsys):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  for log_all_hosts in False, True:
    config = make_config(log_all_hosts=log_all_hosts)
    console = console_lib.Console.make(config)
    with mock.patch.object(logging, 'info') as info, console:
      console.begin(config, experiment_of())
      console.log_evaluation(1, {'loss': 1.0})
      console.show(writers.MetricWriter(), 'train')
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
    monkeypatch.setattr(sys, 'stdout', terminal if term else None)
    made = console_lib.Console.make(make_config(console=asked))
    assert made.mode == mode, (asked, term)


def test_texts_are_printed_without_commands_to_the_terminal(tmp_path, capsys):
  console, _ = begun()
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


def test_what_stdout_cannot_take_ends_no_run(monkeypatch):
  out = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
  monkeypatch.setattr(sys, 'stdout', out)
  console_lib.Console('plain').print('caf\xe9')
  assert out.buffer.getvalue() == b'caf?\n'
  reader, writer = os.pipe()
  os.close(reader)
  with os.fdopen(writer, 'w') as out:
    monkeypatch.setattr(sys, 'stdout', out)
    for _ in range(3):
      console_lib.Console('plain').print('x\n' * 100_000)


@pytest.fixture
def live(terminal, monkeypatch):
  """Starts a live line on a terminal, which sys.stdout and stderr go to."""
  made = []

  def start():
    # Not before: pytest sets both at the beginning of a test.
    for name in ('stdout', 'stderr'):
      monkeypatch.setattr(sys, name, terminal)
    made.append(live_lib.LiveLine(lambda width: 'drawn'))
    terminal.wait_for(['drawn'])
    return made[0]

  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setattr(live_lib, '_REFRESH_SECS', DRAWN_SECS / 10)
  yield start
  made[0].stop()


def test_what_is_printed_stands_above_the_live_line(live, terminal):
  logger = std_logging.getLogger('tests.console.named')
  handler = std_logging.StreamHandler(terminal)
  logger.addHandler(handler)
  write = terminal.write
  try:
    line = live()
    print('printed\nlines')
    logger.warning('warn')  # Shorter than what was drawn.
    for text in ('half', ' a', ' line\n', '\r10% of it', '\r20% of it'):
      sys.stdout.write(text)
    shown = ['printed', 'lines', 'warn', 'half a line']
    time.sleep(DRAWN_SECS)
    # A progress bar is left alone.
    assert screen(terminal.getvalue()) == [*shown, '20% of it']
    sys.stderr.write('\r100% of it\nnext\r')  # Drawn over.
    terminal.wait_for([*shown, '100% of it', 'drawn'])
    line.stop()
    print('after')
  finally:
    logger.removeHandler(handler)
  assert terminal.write == write
  terminal.wait_for([*shown, '100% of it', 'after', ''])


@pytest.mark.parametrize('has_debugger', [True, False])
def test_a_line_is_hidden_from_a_debugger_and_in_the_background(
  has_debugger, live, terminal, monkeypatch
):
  live()
  group = [os.getpgrp() + (not has_debugger)]
  monkeypatch.setattr(os, 'tcgetpgrp', lambda fd: group[0])
  names = {'time': time, 'secs': DRAWN_SECS, 'terminal': terminal}
  names['__name__'] = 'pdb' if has_debugger else 'x'
  exec("print('(Pdb)'); time.sleep(secs); shown = terminal.getvalue()", names)
  group[0] = os.getpgrp()
  print('typed')
  assert names['shown'].partition('(Pdb)')[2] == '\n'
  terminal.wait_for(['(Pdb)', 'typed', 'drawn'])  # It is back.


STOP = preemption.Preempted(75, '')
RUN = 'python x.py --jaxline_run=DIR'
TRAIN = 'python x.py --jaxline_mode=train --jaxline_run=DIR'
MORE = ' --config.training_steps=12 --config.on_config_change=continue'
EVAL = ' --jaxline_mode=eval --config.one_off_evaluate'
SAME = 'the same command with --config.checkpoint_dir=DIR'
OWN = 'python x.py --exp=A --config.a=1 --config.checkpoint_dir=DIR'
FIT = (
  "jaxline.fit(..., overrides={'checkpoint_dir': 'DIR', 'training_steps': 12,"
  " 'on_config_change': 'continue'})"
)
LOOK = "jaxline.evaluate('DIR', experiment_class=SimpleNamespace)"
OVER = {'is_over': True}


def test_the_next_commands(tmp_path, monkeypatch, capsys):
  for command, how, go_on, look in (
    (COMMAND, {}, RUN, RUN + EVAL),
    (
      (*COMMAND, '--jaxline_mode=train', '-v', '1', '--config.a=b c'),
      *(OVER, TRAIN + MORE, RUN + EVAL),
    ),
    (
      ('python', 'x.py', '--jaxline_run', 'old', '--noconfig.a'),
      *({'decode': print}, RUN, f'{RUN} --jaxline_mode=decode'),
    ),
    # The processes do not know the launcher's command.
    (COMMAND, {'processes': 2, **OVER}, SAME + MORE, SAME + EVAL),
    # Flags of the program make those of the config.
    (
      (*COMMAND[:2], '--exp=A', '--config.training_steps', '6', '--config.a=1'),
      *(OVER, OWN + MORE, OWN + EVAL),
    ),
    ((), OVER, FIT, LOOK),
    # The experiment has decided that it is over.
    ((), {'training_steps': None, **OVER}, '', LOOK),
    ((), {'stopped': 'enough', **OVER}, '', LOOK),
    # Without a checkpoint there is nothing to go on from.
    (COMMAND, {'saved': None}, '', ''),
  ):
    count = how.get('processes', 1)
    monkeypatch.setattr(jax, 'process_count', lambda n=count: n)
    experiment = experiment_of(**{k: how[k] for k in how if k == 'decode'})
    steps, saved = how.get('training_steps', 6), how.get('saved', 4)
    overrides = {'training_steps': steps, 'checkpoint_dir': str(tmp_path)}
    console, state = begun(0, experiment, command, saved, **overrides)
    state.global_step = 6 if 'is_over' in how else 4
    console.stopped = how.get('stopped', '')
    capsys.readouterr()
    error = None if 'is_over' in how else STOP
    console.__exit__(type(error), error, None)
    out = capsys.readouterr().out.replace(str(tmp_path), 'DIR').splitlines()
    name = 'Decode:  ' if 'decode' in how else 'Evaluate:'
    texts = ('Continue: ', go_on), (f'{name} ', look)
    shown = [head + text for head, text in texts if text]
    shown.append('Results:  python -m jaxline.runs compare DIR')
    assert out[out.index('Run directory: DIR') + 1 :] == shown


def test_the_summary_says_what_the_run_came_to(capsys):
  for error, step, how in (
    (None, 6000, 'Trained to step 6000 of 6000 (100%) in 0:00.'),
    (ValueError(), 30, 'Failed at step 30 of 6000 (0%) in 0:00.'),
    (STOP, 30, 'Stopped at step 30 of 6000 (0%) in 0:00.'),
  ):
    console, state = begun(step=10)
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


@pytest.mark.process
def test_a_run_in_a_pipe(tmp_path):
  result = processes.run(
    *(TOY, 'sharded', 'direct', f'--config={CONFIG}'),
    *(f'--config.checkpoint_dir={tmp_path}', '--jaxline_mode=train_and_eval'),
    *('--config.training_steps=5', '--config.log_tensors_interval=2'),
    '--config.eval_interval=300',  # The file has 2.
  )
  assert result.returncode == 0, result.stderr
  (warning,) = result.stderr.splitlines()  # Of the toy's input.
  assert warning.startswith('W')
  block, _, rest = result.stdout.partition('Compiling the train step...\n')
  for text in 'training_steps=5', f'Run directory: {tmp_path}':
    assert text in ' '.join(block.split())
  # The numbers of these lines have tests of their own above.
  starts = [
    'Compiled in ', 'step 2 of 5 ', 'step 4 of 5 ',
    'step 5 of 5 (100%) | loss ',  # The last one, though no interval ends.
    'eval step 5 | loss ', 'New best loss: ', 'Trained to step 5 of 5 ',
    'Best loss: ', 'Mean loss over the last ', 'Time: '
  ]  # fmt: skip
  for start, line in zip(starts, rest.splitlines(), strict=False):
    assert line.startswith(start)
  where = f' --jaxline_run={tmp_path}'
  commands = dict(re.findall(r'^([A-Z][\w ]+): +(.*)$', rest, re.M))
  assert commands['Evaluate'].endswith(where + EVAL)
  assert commands['Continue'].endswith(where + MORE.replace('12', '10'))
