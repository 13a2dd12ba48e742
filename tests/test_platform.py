"""The command line, end to end: every mode and every way to fail."""

import dataclasses
import errno
import json
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import traceback
import types
from unittest import mock
import warnings

from absl import flags
from absl.testing import flagsaver
import jax
from jax._src import distributed as jax_distributed
from ml_collections import config_flags
import pytest

from jaxline import base_config
from jaxline import disk
from jaxline import platform
from jaxline import utils
from jaxline.aot import ahead
from jaxline.checkpoint import memory
from jaxline.metrics import writers
from jaxline.supervision import nonfinite
from jaxline.supervision import preemption
from jaxline.supervision import watchdog
from tests.experiments import regression
from tests.programs import events
from tests.programs import toy

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOY = ROOT / 'tests' / 'programs' / 'toy.py'
CONFIG = ROOT / 'tests' / 'programs' / 'toy_config.py'
STYLES = ('sharded', 'per_device')


def environment():
  # conftest has put two CPU devices into XLA_FLAGS.
  return os.environ | {'PYTHONPATH': str(ROOT)}


def command(run_dir, *args, style='sharded', form='direct', mode='train'):
  return [
    sys.executable,
    str(TOY),
    style,
    form,
    f'--config={CONFIG}',
    f'--config.checkpoint_dir={run_dir}',
    f'--jaxline_mode={mode}',
    *args,
  ]


def python(*args, **variables):
  return subprocess.run(
    [sys.executable, *args],
    cwd=ROOT,
    env=environment() | variables,
    capture_output=True,
    text=True,
    timeout=120,
  )


def run(*args, cwd=ROOT, **kwargs):
  return subprocess.run(
    command(*args, **kwargs),
    cwd=cwd,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=120,
    stdin=subprocess.DEVNULL,
  )


@pytest.fixture
def here(monkeypatch, capfd, caplog):
  """Runs a command line in this process, behind the parsing of its flags.

  It returns what `run` does, for tests that neither exit codes of uncaught
  errors, nor signals, nor what comes before the flags are about.
  """
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(sys, 'argv', ['experiment.py'])
  caplog.set_level(logging.INFO)

  def run_here(cls, *args, mode='train', **other_flags):
    argv = ['experiment.py', *args]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=argv)
    with warnings.catch_warnings():
      warnings.simplefilter('ignore', DeprecationWarning)  # Of `load_module`.
      values(argv)
    # As in a process that has just begun.
    monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})
    monkeypatch.setattr(memory, '_begun', {})
    caplog.clear()
    capfd.readouterr()
    code, error = 0, ''
    with flagsaver.flagsaver(
      config=values.config, jaxline_mode=mode, **other_flags
    ):
      try:
        platform.main(cls, [])
      except SystemExit as e:
        code = e.code
      except Exception:
        code, error = 1, traceback.format_exc()
    out, err = capfd.readouterr()
    return types.SimpleNamespace(
      returncode=code, stdout=out, stderr=caplog.text + err + error, said=err
    )

  return run_here


@pytest.fixture
def toy_here(here):
  """Runs the toy experiment in this process, as `run` does in another."""

  def run_here(run_dir, *args, style='sharded', mode='train', **other_flags):
    directory = f'--config.checkpoint_dir={run_dir}'
    return here(
      toy.CLASSES[style],
      f'--config={CONFIG}',
      directory,
      *args,
      mode=mode,
      **other_flags,
    )

  return run_here


def records(run_dir, mode, name='loss'):
  """Returns step -> value of one scalar."""
  lines = (run_dir / mode / 'metrics.jsonl').read_text().splitlines()
  found = [json.loads(line) for line in lines]
  return {r['step']: r[name] for r in found if name in r}


def succeeded(result):
  assert result.returncode == 0, result.stderr[-4000:]
  return result


@pytest.mark.parametrize(
  ('style', 'form'), [('sharded', 'direct'), ('per_device', 'app_run')]
)
def test_train(tmp_path, style, form):
  result = succeeded(run(tmp_path, style=style, form=form))
  losses = records(tmp_path, 'train')
  assert list(losses) == [1, 2, 3, 4, 5, 6]
  assert losses[6] < losses[1]
  assert f'Run directory: {tmp_path}' in result.stdout
  assert list(tmp_path.glob('train/events.out.tfevents.*'))


@pytest.mark.parametrize('style', STYLES)
def test_both_modes_that_train_and_evaluate_agree(toy_here, tmp_path, style):
  evaluated = {}
  for mode in ('train_and_eval', 'train_eval_multithreaded'):
    result = succeeded(toy_here(tmp_path / mode, style=style, mode=mode))
    assert list(records(tmp_path / mode, 'train')) == [1, 2, 3, 4, 5, 6]
    evaluated[mode] = records(tmp_path / mode, 'eval')
    if mode == 'train_and_eval':
      assert result.stdout.count('New best loss') == 3
  together, threads = evaluated.values()
  assert list(together) == [2, 4, 6]
  assert together[6] < together[2]
  assert set(threads) <= {2, 4, 6}
  assert threads[6] == together[6]


def test_eval_of_initial_weights(toy_here, tmp_path):
  succeeded(
    toy_here(
      tmp_path,
      '--config.one_off_evaluate=True',
      '--config.eval_initial_weights=True',
      mode='eval_test',
    )
  )
  assert list(records(tmp_path, 'eval_test')) == [0]


def test_one_off_without_checkpoint_fails(toy_here, tmp_path):
  (tmp_path / 'checkpoints').mkdir()
  result = toy_here(tmp_path, '--config.one_off_evaluate=True', mode='eval')
  assert result.returncode != 0
  assert 'config.eval_initial_weights = True' in result.stderr
  # Nothing is made where there is no run.
  nowhere = tmp_path / 'nowhere'
  given = f'--config.checkpoint_dir={nowhere}'
  for more in (
    ['--config.one_off_evaluate=True', given],
    ['--config.eval_steps=all', given],
    ['--config.checkpoint_dir='],  # It would wait in a fresh directory.
  ):
    result = toy_here(tmp_path, *more, mode='eval')
    assert result.returncode == 2
    assert 'directory of the run whose weights' in result.said
    assert ('There is none' in result.said) == (given in more)
    assert not nowhere.exists()


@pytest.mark.parametrize('directory', [None, 'nowhere'])
@pytest.mark.parametrize('is_own', [True, False])
def test_a_programs_own_checkpoints_need_no_directory(
  tmp_path, monkeypatch, directory, is_own
):
  monkeypatch.chdir(tmp_path)
  config = regression.get_config(2)
  config.one_off_evaluate = True
  config.checkpoint_dir = directory
  if is_own:
    factory = lambda config, mode: memory.InMemoryCheckpointer(config, mode)
    with pytest.raises(platform.UsageError, match='no checkpoint of'):
      platform.start(regression.Regression, config, 'eval', factory)
    return
  first = regression.get_config(2)
  first.checkpoint_dir = 'first'
  platform.start(regression.Regression, first, 'train')
  history = utils.GLOBAL_CHECKPOINT_DICT['latest'].history
  history[:] = [utils.SnapshotNT(0, history[-1].pickle_nest)]
  path, _ = platform.start(regression.Regression, config, 'eval')
  assert list(records(pathlib.Path(path), 'eval')) == [2]


def test_resolved_config_is_written(toy_here, tmp_path):
  succeeded(toy_here(tmp_path, '--config.training_steps=1'))
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['training_steps'] == 1
  assert config['checkpoint_dir'] == str(tmp_path)
  assert config['experiment_kwargs']['config']['fault'] == ''
  assert not list(tmp_path.glob('config.json.*'))

  from tensorboard.backend.event_processing import event_accumulator

  events = event_accumulator.EventAccumulator(str(tmp_path / 'train')).Reload()
  (text,) = events.Tensors('config')
  written = text.tensor_proto.string_val[0].decode()
  assert '"training_steps": 1' in written


@pytest.mark.parametrize(
  ('place', 'mode'),
  [('step', 'train'), ('step', 'train_and_eval'), ('input', 'train')],
)
def test_what_is_raised_ends_the_run(toy_here, tmp_path, place, mode):
  result = toy_here(
    tmp_path,
    f'--config.experiment_kwargs.config.fault={place}',
    '--config.experiment_kwargs.config.fault_step=3',
    mode=mode,
  )
  assert result.returncode not in (0, None)
  assert f'Failure: {place} at 3' in result.stderr
  assert 'secret_of_frame' in result.stderr  # The traceback's own line.
  # What was logged before is not lost.
  assert list(records(tmp_path, 'train')) == [1, 2, 3]


@pytest.mark.process
@pytest.mark.parametrize('style', STYLES)
@pytest.mark.parametrize('place', ['step', 'evaluate'])
def test_failure_of_either_thread_ends_the_run(tmp_path, style, place):
  # Without the failure the other half would go on for ten minutes.
  result = run(
    tmp_path,
    '--config.training_steps=6000',
    '--config.experiment_kwargs.config.step_secs=0.1',
    f'--config.experiment_kwargs.config.fault={place}',
    '--config.experiment_kwargs.config.fault_step=3',
    style=style,
    mode='train_eval_multithreaded',
  )
  assert result.returncode not in (0, None)
  assert f'Failure: {place} at ' in result.stderr
  assert 'secret_of_frame' in result.stderr
  is_told = '[jaxline] raised in the eval thread' in result.stderr
  assert is_told == (place == 'evaluate')


@pytest.mark.process
@pytest.mark.parametrize(
  ('form', 'place', 'mode', 'style', 'raised', 'code'),
  [
    ('app_run', 'constructor', 'train', 'sharded', 'None', 1),
    ('direct', 'step', 'train', 'per_device', '256', 1),
    ('app_run', 'evaluate', 'train_eval_multithreaded', 'per_device', '3', 3),
  ],
)
def test_an_exit_of_the_experiment_is_no_end_of_the_run(
  tmp_path, form, place, mode, style, raised, code
):
  result = run(
    tmp_path,
    f'--config.experiment_kwargs.config.fault={place}',
    f'--config.experiment_kwargs.config.fault_kind=exit {raised}',
    style=style,
    form=form,
    mode=mode,
  )
  assert result.returncode == code, result.stderr
  assert result.stderr.count('sys.exit(ast.literal_eval(code))') == 1
  shown = raised.replace('"', "'")
  assert f'raised SystemExit({shown}), which does not end a' in result.stderr


@pytest.mark.process
def test_an_exit_in_an_asynchronous_action_is_no_end_of_the_run(tmp_path):
  program = f"""
import sys
sys.path.insert(0, {str(TOY.parent)!r})
import toy
from jaxline import platform
from jaxline.metrics import console
def log(self, step, scalars):
  sys.exit(0)
console.Console.log_training = log
platform.main(toy.Sharded, sys.argv[1:])
"""
  args = command(tmp_path, '--config.training_steps=100')[4:]
  result = python('-c', program, *args)
  assert result.returncode == 1
  assert result.stderr.count('in log\n') == 1
  assert 'raised SystemExit(0)' in result.stderr


LM = '--config=configs/lm.py'


def of_kwargs(key, value):
  return f'--config.experiment_kwargs.config.{key}={value}'


# Refused behind the parsing of the flags: by the config, the constructor, the
# first batch.
@pytest.mark.parametrize(
  ('mode', 'args', 'said'),
  [
    ('train', [LM, '--config.watchdog_secs=inf'], 'watchdog_secs'),
    ('train', [LM, of_kwargs('clip_norm', 0.0)], 'clip_norm'),
    ('train', [LM, of_kwargs('files', '/none')], '/none'),
    ('train', [LM, '--config.restore_from=/none'], 'config.restore_from'),
    ('eval', [LM, '--config.one_off_evaluate=True'], 'directory of the run'),
    ('train', [], '--config is missing'),
    ('trian', [LM], 'trian.*train_and_eval'),
    ('train', [LM, '--config.interval_type=step'], "'step'.*'steps'"),
    ('train', [LM, '--config.experiment_class=no:X'], 'experiment_class'),
  ],
)
def test_an_error_of_the_user_is_one_line(
  here, tmp_path, caplog, mode, args, said
):
  if args:
    args = [*args, f'--config.checkpoint_dir={tmp_path}/run']
  result = here(None, *args, mode=mode)
  assert result.returncode == 2, result.stderr
  assert result.said.count('\n') == 1, result.said
  assert re.search(said, result.said), result.said
  assert len(caplog.messages) <= 9, result.stderr


def test_sharding_of_a_per_device_experiment_is_refused(toy_here, tmp_path):
  result = toy_here(tmp_path, '--config.sharding=fsdp', style='per_device')
  assert result.returncode == 2, result.stderr
  assert result.said.count('\n') == 1, result.said
  assert "config.sharding is 'fsdp', but PerDevice" in result.said


# As it is seen by a user, with what is refused while flags are parsed.
@pytest.mark.process
@pytest.mark.parametrize(
  ('args', 'said'),
  [
    ([LM, of_kwargs('batch_size', 0)], 'batch_size is 0'),
    ([LM, '--config.trainin_steps=3'], 'trainin_steps.*training_steps'),
    (['--config=configs/ml.py'], "'configs/ml.py'"),
    ([LM, '--jaxline_tpu_driver=grpc://host'], 'grpc://host'),
  ],
)
def test_an_error_of_the_user_is_one_line_of_the_process(tmp_path, args, said):
  result = python(
    'experiment.py', *args, f'--config.checkpoint_dir={tmp_path}/run'
  )
  assert result.returncode == 2, result.stderr
  lines = result.stderr.splitlines()
  # Besides, a line for each thing that was done before it was found.
  own = [line for line in lines if not re.match(r'[IW]\d{4} ', line)]
  assert len(own) == 1, result.stderr
  assert re.search(said, own[0]), own
  assert lines[-1] == own[0]
  assert len(lines) <= 10, result.stderr


@pytest.mark.process
def test_an_unexpected_error_keeps_its_traceback_once(tmp_path):
  result = run(tmp_path, '--config.experiment_kwargs.config.fault=input')
  assert result.returncode == 1
  assert result.stderr.count('Traceback (most recent call last)') == 1
  assert result.stderr.count('Failure: input at 0') == 1
  assert 'secret_of_frame' in result.stderr


@pytest.mark.process
def test_a_checkpoint_that_does_not_fit_is_said_once(toy_here, tmp_path):
  succeeded(toy_here(tmp_path))
  program = f"""
import sys
sys.path.insert(0, {str(TOY.parent)!r})
import jax, toy
from jaxline import platform
toy.Sharded.init_fn = lambda self, rng: ({{'w': jax.numpy.ones([6])}}, {{}})
platform.main(toy.Sharded, sys.argv[1:])
"""
  result = python('-c', program, *command(tmp_path)[4:])
  assert result.returncode == 2
  assert 'Traceback' not in result.stderr
  assert result.stderr.count('state/params/w') == 1, result.stderr


@pytest.mark.process
def test_a_checkpoint_that_is_refused_is_one_line(toy_here, tmp_path):
  succeeded(toy_here(tmp_path))
  latest = tmp_path / 'checkpoints' / 'latest'
  *_, newest = sorted(latest.iterdir(), key=lambda path: int(path.stem))
  os.rename(newest, latest / '500.json')
  result = run(tmp_path)
  assert result.returncode == 2
  lines = result.stderr.splitlines()
  own = [line for line in lines if not line.startswith('W')]
  assert len(own) == 1, result.stderr
  assert str(latest / '500.json') in own[0]
  assert newest.stem in own[0]


@pytest.mark.process
def test_an_exit_of_the_config_file_is_no_end_of_the_run(tmp_path):
  path = tmp_path / 'leaves.py'
  path.write_text('import sys\n\n\ndef get_config():\n  sys.exit(0)\n')
  result = python('experiment.py', f'--config={path}')
  assert result.returncode == 1
  assert 'raised SystemExit(0)' in result.stderr


def test_a_loss_that_is_not_finite_has_no_traceback(capsys):
  with pytest.raises(SystemExit) as caught, platform._exits():
    raise nonfinite.NonfiniteError('The loss of step 3 is not finite.')
  assert caught.value.code == 1
  assert capsys.readouterr().err == 'The loss of step 3 is not finite.\n'


def test_a_notice_that_interrupts_an_import_ends_the_run(capsys):
  # What extension modules do to an exception while they are initialised.
  with pytest.raises(preemption.Preempted) as caught, platform._exits():
    try:
      try:
        raise preemption.Preempted(75, 'SIGTERM: leaving.')
      except SystemExit as e:
        raise ImportError('initialization failed') from e
    except ImportError as e:
      raise ImportError('numpy.core failed to import') from e
  assert caught.value.code == 75
  assert capsys.readouterr().err == '[jaxline] SIGTERM: leaving.\n'


def test_a_full_disk_is_one_line_and_other_errors_are_their_own(
  tmp_path, capsys
):
  no_space = OSError(errno.ENOSPC, 'No space', f'{tmp_path}/a')
  full = disk.failed_write(no_space, tmp_path / 'a')
  with pytest.raises(SystemExit) as caught, platform._exits():
    raise full
  assert caught.value.code == 1
  said = capsys.readouterr().err
  assert re.fullmatch(rf'No space \(.*\): {tmp_path}/a\. Make .*\n', said)
  mixed = ExceptionGroup('two', [full, ValueError('theirs')])
  for error in (mixed, no_space):  # The latter is of the user's own code.
    with pytest.raises(type(error)) as caught, platform._exits():
      raise error
    assert caught.value is error
    assert capsys.readouterr().err == ''


@pytest.mark.process
@pytest.mark.parametrize(
  ('signum', 'other', 'code'),
  [(signal.SIGINT, signal.SIGTERM, 75), (signal.SIGTERM, signal.SIGINT, 130)],
)
def test_a_program_that_handles_a_signal_itself(tmp_path, signum, other, code):
  noted = tmp_path / 'events.jsonl'
  program = f"""
import functools, signal, sys
sys.path.insert(0, {str(TOY.parent)!r})
from absl import app
import events, toy
from jaxline import platform
events.install()
heard = lambda *unused: print('heard', flush=True)
signal.signal({int(signum)}, heard)
app.run(functools.partial(platform.main, toy.Sharded))
"""
  process = subprocess.Popen(
    [
      sys.executable,
      '-u',
      '-c',
      program,
      *command(tmp_path)[4:],
      '--config.training_steps=100000',
    ],
    cwd=ROOT,
    env=environment() | {'EVENTS': str(noted)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    assert events.wait(
      lambda: bool(events.read(noted, 'training loop', what='start')),
      is_over=lambda: process.poll() is not None,
      secs=60,
    )
    process.send_signal(signum)
    while 'heard' not in (line := process.stdout.readline()):
      assert line, 'It ended.'
    process.send_signal(other)
    _, err = process.communicate(timeout=60)
  finally:
    process.kill()
  assert process.returncode == code, err
  assert (tmp_path / 'checkpoints' / 'latest').is_dir()


def test_directory_that_cannot_be_written(toy_here, tmp_path):
  (tmp_path / 'file').write_text('')
  result = toy_here(tmp_path / 'file' / 'run')
  assert result.returncode != 0
  assert str(tmp_path / 'file') in result.stderr


@pytest.mark.process
@pytest.mark.parametrize('mode', ['train', 'train_eval_multithreaded'])
def test_post_mortem_reads_commands_from_stdin(tmp_path, mode):
  result = subprocess.run(
    command(
      tmp_path,
      '--jaxline_post_mortem',
      '--config.experiment_kwargs.config.fault=step',
      mode=mode,
    ),
    cwd=ROOT,
    env=environment(),
    input='p "secret: " + secret_of_frame\nq\n',
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert 'toy.py(38)fault()' in result.stdout
  assert "'secret: step at 0'" in result.stdout
  assert result.returncode == 1
  assert 'Failure: step at 0' in result.stderr


# From the first step on the disk, the writer's `close` or a thread hangs.
STUCK = f"""
import os, sys, threading
sys.path.insert(0, {str(TOY.parent)!r})
import toy
from jaxline import platform

what, *argv = sys.argv[1:]
for_ever = threading.Event().wait

class Writer(platform.TensorBoardLogger):
  def close(self):
    super().close()
    what == 'writer' and for_ever()

class Experiment(toy.Sharded):
  def step(self, **kwargs):
    if what == 'disk':
      os.fsync = lambda fd: for_ever()
    if what == 'thread' and kwargs['global_step'] == 2:
      threading.Thread(target=for_ever).start()
    return super().step(**kwargs)

  def train_input(self):
    for batch in super().train_input():
      if what == 'writer':
        batch['y'][:] = float('nan')
      yield batch

platform.main(Experiment, argv, writer_factory=Writer)
"""


@pytest.mark.process
@pytest.mark.parametrize(
  ('what', 'fault', 'where'),
  [
    ('disk', 'step', 'in wait_to_finish'),
    ('writer', '', 'in close'),
    ('thread', 'step', 'in _shutdown'),
  ],
)
def test_what_holds_up_the_end_of_a_failed_run_is_ended(
  tmp_path, what, fault, where
):
  result = python(
    *('-c', STUCK, what, *command(tmp_path)[4:]),
    f'--config.experiment_kwargs.config.fault={fault}',
    '--config.experiment_kwargs.config.fault_step=3',
    '--config.watchdog_secs=10',
    '--config.compilation_cache=off',  # It would be what hangs at the disk.
  )
  assert result.returncode == watchdog.EXIT_CODE, result.stderr[-4000:]
  assert where in result.stderr


@pytest.mark.process
@pytest.mark.parametrize('style', STYLES)
def test_disable_pmap_jit_shows_values(tmp_path, style):
  shown = '--config.experiment_kwargs.config.show_values=True'
  steps = '--config.training_steps=2'
  compiled = succeeded(run(tmp_path / 'a', shown, steps, style=style))
  op_by_op = succeeded(
    run(tmp_path / 'b', shown, steps, '--jaxline_disable_pmap_jit', style=style)
  )
  seen = re.findall(r'loss_fn sees (.*)', compiled.stdout)
  assert seen
  assert all(re.search(r'\d\.\d', line) is None for line in seen), seen
  # Op by op the function runs at each step, and sees numbers.
  after = op_by_op.stdout[op_by_op.stdout.index('loss_fn sees') :]
  assert after.count('loss_fn sees') >= 2
  assert re.search(r'\[.*-?\d\.\d+', after, re.DOTALL), after
  a, b = (records(tmp_path / x, 'train') for x in 'ab')
  assert a[2] == pytest.approx(b[2], rel=1e-5)


@pytest.mark.process
def test_help_shows_the_program_and_our_flags():
  result = succeeded(
    subprocess.run(
      [sys.executable, 'experiment.py', '--help'],
      cwd=ROOT,
      env=environment(),
      capture_output=True,
      text=True,
    )
  )
  assert 'python experiment.py --config=configs/lm.py' in result.stdout
  shown = re.findall(r'^  --(?:\[no\])?(\w+):', result.stdout, re.MULTILINE)
  assert sorted(shown) == [
    'config',
    'jaxline_disable_pmap_jit',
    'jaxline_ensure_tpu',
    'jaxline_mode',
    'jaxline_post_mortem',
    'jaxline_run',
    'jaxline_tpu_driver',
  ]


@pytest.mark.process
def test_an_error_of_the_config_file_keeps_its_traceback(tmp_path):
  path = tmp_path / 'broken.py'
  path.write_text('import numpy\ndef get_config():\n  return numpy.no_such\n')
  result = python('experiment.py', f'--config={path}')
  assert result.returncode != 0
  assert f'File "{path}", line 3' in result.stderr


def test_evaluation_by_itself_says_that_it_would_wait_for_ever(
  toy_here, tmp_path
):
  result = toy_here(tmp_path, '--config.checkpointer=memory', mode='eval')
  assert result.returncode == 2
  assert '--jaxline_mode=train_and_eval' in result.stderr
  assert 'Traceback' not in result.stderr


def test_a_run_may_be_in_a_bucket():
  config = base_config.get_base_config()
  config.checkpoint_dir = 'gs://bucket/run/'
  resolved = platform.resolve_config(config)
  assert resolved.checkpoint_dir == 'gs://bucket/run'
  config.checkpoint_dir = 'ftp://bucket/run'
  with pytest.raises(platform.UsageError, match='gs://BUCKET/PATH'):
    platform.resolve_config(config)


def test_several_processes_need_one_directory(monkeypatch):
  monkeypatch.setattr(platform.jax, 'process_count', lambda: 2)
  with pytest.raises(platform.UsageError, match='2 processes'):
    platform.resolve_config(base_config.get_base_config())


def test_threads_are_for_one_process(tmp_path, monkeypatch):
  monkeypatch.setattr(platform.jax, 'process_count', lambda: 2)
  monkeypatch.setattr(platform, '_has_others', lambda: False)
  config = base_config.get_base_config()
  config.checkpoint_dir = str(tmp_path)
  with flagsaver.flagsaver(
    config=config, jaxline_mode='train_eval_multithreaded'
  ):
    with pytest.raises(platform.UsageError, match='Use train_and_eval'):
      platform.main(object, [])


def test_default_directory_is_fresh_and_for_this_user_alone(
  tmp_path, monkeypatch
):
  # Nobody else can prepare it, since its name ends in random letters.
  monkeypatch.setattr(platform.tempfile, 'tempdir', str(tmp_path))
  old = os.umask(0)
  try:
    config = base_config.get_base_config()
    a = platform.resolve_config(config).checkpoint_dir
    config.checkpoint_dir = ''
    b = platform.resolve_config(config).checkpoint_dir
  finally:
    os.umask(old)
  assert a != b
  assert sorted(map(str, tmp_path.iterdir())) == sorted([a, b])
  for directory in (a, b):
    assert os.stat(directory).st_mode & 0o7777 == 0o700


def test_paths_are_made_absolute(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.chdir(tmp_path)
  config = base_config.get_base_config()
  config.checkpoint_dir = '~/runs/a'
  config.restore_from = '~/runs/b:12'
  config.compilation_cache = '~/programs'
  config.decode.update(prompts='~/in.txt', output='~/out.jsonl')
  resolved = platform.resolve_config(config)
  assert resolved.is_locked
  assert resolved.checkpoint_dir == f'{tmp_path}/runs/a'
  assert resolved.restore_from == f'{tmp_path}/runs/b:12'
  assert resolved.compilation_cache == f'{tmp_path}/programs'
  assert resolved.decode.prompts == f'{tmp_path}/in.txt'
  assert resolved.decode.output == f'{tmp_path}/out.jsonl'
  assert config.checkpoint_dir == '~/runs/a'
  config.checkpoint_dir = 'here'
  assert platform.resolve_config(config).checkpoint_dir == f'{tmp_path}/here'
  assert list(tmp_path.iterdir()) == []


# Before JAX starts, and what then needs no loop.


def flags_of(tmp_path, mode='train', **values):
  """Sets the flags of a command line."""
  config = base_config.get_base_config()
  config.checkpoint_dir = str(tmp_path)
  config.update(values)
  return flagsaver.flagsaver(config=config, jaxline_mode=mode)


@pytest.fixture
def started(monkeypatch):
  """Lists what is set before JAX starts; `resolve_config` is where that ends.

  Nothing is: this process has its devices.
  """
  calls = []

  def noting(name, result=None):
    def note(*args):
      calls.append((name, *args))
      return result

    return note

  monkeypatch.setattr(platform.xla, 'apply', noting('xla', ['--a=1 (there)']))
  monkeypatch.setattr(platform.distributed, 'initialize', noting('meet'))
  fake = types.SimpleNamespace(
    config=types.SimpleNamespace(
      values={'jax_platforms': ''}, update=noting('update')
    ),
    # The real one, for all else.
    distributed=platform.jax.distributed,
    process_count=platform.jax.process_count,
  )
  monkeypatch.setattr(platform, 'jax', fake)
  monkeypatch.setattr(platform, 'start', noting('start'))
  return calls


def test_flags_are_set_before_the_processes_meet(tmp_path, started, capsys):
  with flags_of(tmp_path, distributed='off'):
    platform.main(object, [])
  assert [name for name, *_ in started] == ['xla', 'meet', 'start']
  assert started[0][1].to_dict() == base_config.get_base_config().xla.to_dict()
  assert started[1] == ('meet', 'off')
  assert capsys.readouterr().out == '[jaxline] --a=1 (there)\n'


@pytest.mark.parametrize(
  ('topology', 'platforms', 'expected'),
  [
    # With libtpu JAX would look for TPUs here, and nobody else compiles.
    ('v4:2x2x1', '', ['update', 'xla', 'start']),
    ('v4:2x2x1', 'cpu', ['xla', 'start']),
    (None, '', ['xla', 'meet', 'start']),
  ],
)
def test_what_is_started_to_compile(
  tmp_path, started, topology, platforms, expected
):
  platform.jax.config.values['jax_platforms'] = platforms
  with flags_of(tmp_path, 'compile', topology=topology):
    platform.main(object, [])
  assert [name for name, *_ in started] == expected
  if 'update' in expected:
    assert started[0] == ('update', 'jax_platforms', 'cpu')


def test_who_cannot_start(tmp_path, started, monkeypatch, capsys):
  error = platform.UsageError('No port.')
  monkeypatch.setattr(
    platform.distributed, 'initialize', mock.Mock(side_effect=error)
  )
  with flags_of(tmp_path), pytest.raises(platform.UsageError) as caught:
    platform.main(object, [])
  assert caught.value.code == 2
  assert capsys.readouterr().err.count(str(error)) == 1
  assert 'start' not in [name for name, *_ in started]


def test_a_wrong_config_starts_nothing(tmp_path, started):
  with flags_of(tmp_path, sharding='fsdpp'):
    with pytest.raises(platform.UsageError, match=r"'fsdpp'.*mean 'fsdp'"):
      platform.main(object, [])
  assert started == []


MESH = {
  'ici': {'stage': 1, 'replica': 1, 'data': 4, 'mdl': 1},
  'dcn': {'stage': 1, 'replica': 2, 'data': 1, 'mdl': 1},
}
PLACE = {'coordinator': 'a:1', 'num_processes': 2, 'process_id': 1}


@pytest.mark.filterwarnings('ignore:.*load_module:DeprecationWarning')
@pytest.mark.parametrize(
  ('overrides', 'key', 'expected'),
  [
    (['distributed=off'], 'distributed', 'off'),
    ([f'distributed={PLACE}'], 'distributed', PLACE),
    (['mesh.ici.data=4', 'mesh.dcn.replica=2'], 'mesh', MESH),
    (["mesh={'data': 4}"], 'mesh', {'data': 4}),
    (["sharding_rules={'mlp': ['data']}"], 'sharding_rules.mlp', ['data']),
    (["xla.flags={'xla_a': '/x'}"], 'xla.flags', {'xla_a': '/x'}),
  ],
)
def test_overrides_on_the_command_line(overrides, key, expected):
  value = platform.load_config(
    [f'--config={CONFIG}', *(f'--config.{text}' for text in overrides)]
  ).to_dict()
  for part in key.split('.'):
    value = value[part]
  assert value == expected


@pytest.mark.process
def test_a_compilation_trains_nothing(tmp_path):
  result = succeeded(run(tmp_path, mode='compile'))
  (path,) = (tmp_path / 'compile').iterdir()
  report = json.loads(path.read_text())
  assert report['mesh'] == {'stage': 1, 'replica': 1, 'data': 2, 'mdl': 1}
  assert f'Written to {path}' in result.stdout
  assert not (tmp_path / 'train').exists()


@pytest.mark.parametrize(('fits', 'code'), [(True, None), (False, 1)])
def test_what_does_not_fit_is_an_exit_code(tmp_path, monkeypatch, fits, code):
  compiled = mock.Mock(return_value=fits)
  monkeypatch.setattr(ahead, 'compile_experiment', compiled)
  with flags_of(tmp_path, 'compile'):
    if code is None:
      platform.main(object, [])
    else:
      with pytest.raises(SystemExit) as caught:
        platform.main(object, [])
      assert caught.value.code == code
  (experiment_class, config), _ = compiled.call_args
  assert experiment_class is object
  assert config.checkpoint_dir == str(tmp_path)


def test_what_cannot_be_compiled_is_said_in_a_line(toy_here, tmp_path):
  result = toy_here(tmp_path, style='per_device', mode='compile')
  assert result.returncode == 2
  assert 'PerDevice has no sharded step' in result.stderr
  assert 'Traceback' not in result.stderr


def test_actions_of_xla_reach_the_loops(tmp_path, monkeypatch):
  actions = [object()]
  monkeypatch.setattr(platform.xla, 'actions', lambda options: actions)
  for mode in ('train', 'train_and_eval'):
    loop = mock.Mock()
    found = dataclasses.replace(platform.MODES[mode], run=loop)
    monkeypatch.setitem(platform.MODES, mode, found)
    with flags_of(tmp_path, mode):
      platform.main(object, [])
    assert loop.call_args.args[0].periodic_actions == actions


@pytest.mark.parametrize('num_processes', [1, 2])
def test_who_fails_after_the_meeting_leaves_the_others(
  tmp_path, monkeypatch, num_processes
):
  # Else its end waits for them, and they for it: for minutes.
  monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
  monkeypatch.setattr(
    jax_distributed.global_state, 'num_processes', num_processes
  )
  left = mock.Mock()
  monkeypatch.setattr(platform, '_leave_others', left)
  with flags_of(tmp_path, experiment_class='nowhere:Experiment'):
    with pytest.raises(platform.UsageError, match='nowhere') as caught:
      platform.main(None, [])
  expected = [mock.call(caught.value)] if num_processes > 1 else []
  assert left.call_args_list == expected


@pytest.mark.parametrize(
  ('error', 'code'),
  [
    (ValueError('UNKNOWN: Gloo all-reduce failed: Connection reset'), 134),
    (RuntimeError('NCCL operation failed: ncclRemoteError'), 134),
    (RuntimeError('RESOURCE_EXHAUSTED: out of memory'), 1),
    (OSError('Connection reset by peer'), 1),  # Of a server of data.
    (platform.UsageError('no such file'), 2),
  ],
)
def test_the_code_of_who_leaves_the_others(error, code, monkeypatch):
  exit_now = mock.Mock()
  monkeypatch.setattr(platform.os, '_exit', exit_now)
  monkeypatch.setattr(platform, '_has_others', lambda: True)
  with pytest.raises(type(error)), platform._exits():
    raise error
  assert exit_now.call_args_list == [mock.call(code)]


def test_a_users_error_in_a_traced_function_is_one_line(capsys):
  def wrong(x):
    raise platform.UsageError(said)

  # Only JAX's note about it is left out.
  for said in ('No such size.', 'JAX_TRACEBACK_FILTERING is wrong.'):
    with pytest.raises(platform.UsageError), platform._exits():
      jax.eval_shape(wrong, 1.0)
    assert capsys.readouterr().err.strip() == said


def test_ensure_tpu(toy_here, tmp_path):
  result = toy_here(tmp_path, jaxline_ensure_tpu=True)
  assert result.returncode != 0
  assert "JAX runs on 'cpu'" in result.stderr


def test_writers_are_for_the_chief_only(tmp_path, monkeypatch):
  monkeypatch.setattr(platform.jax, 'process_index', lambda: 3)
  config = base_config.get_base_config()
  config.checkpoint_dir = str(tmp_path)
  with platform.create_writer(config, 'train') as writer:
    writer.write_scalars(1, {'a': 1.0})
  assert not list(tmp_path.iterdir())
  config.log_all_hosts = True
  with platform.create_writer(config, 'train') as writer:
    writer.write_scalars(1, {'a': 1.0})
  assert (tmp_path / 'train' / 'host_3' / 'metrics.jsonl').is_file()


def test_tensorboard_logger_writes_images(tmp_path):
  import numpy as np

  config = base_config.get_base_config()
  config.checkpoint_dir = str(tmp_path)
  logger = platform.TensorBoardLogger(config, 'eval')
  logger.write_images(3, {'digit': np.zeros([8, 8])})
  logger.write_scalars(3, {'a': 1.0})
  logger.close()
  assert records(tmp_path, 'eval', 'a') == {3: 1.0}


@pytest.fixture
def registered(monkeypatch):
  """Writers that a test registers are forgotten after it."""
  monkeypatch.setattr(writers, '_factories', dict(writers._factories))


def test_the_config_names_the_writers(tmp_path, registered):
  written = []

  @writers.register('mine')
  class Mine:
    def __init__(self, config, mode, directory):
      written.append((mode, directory))

    def write_scalars(self, global_step, scalars):
      written.append((global_step, dict(scalars)))

  config = base_config.get_base_config()
  config.checkpoint_dir = str(tmp_path)
  config.writers = ('mine', 'jsonl')
  with platform.create_writer(config, 'train') as writer:
    writer.write_scalars(1, {'a': 1.0})
  assert written == [('train', tmp_path / 'train'), (1, {'a': 1.0})]
  files_there = {path.name for path in (tmp_path / 'train').iterdir()}
  assert files_there == {'metrics.jsonl', 'fingerprints.bin'}


@pytest.mark.parametrize(
  ('names', 'said'),
  [
    (('jsonnl',), "Unknown writer 'jsonnl'.*Did you mean 'jsonl'"),
    (('tensorboard', 3), 'a list of names of writers'),
    ('jsonl', 'a list of names of writers'),
  ],
)
def test_unknown_writers_are_refused(tmp_path, names, said):
  config = base_config.get_base_config()
  config.checkpoint_dir = str(tmp_path)
  with config.ignore_type():
    config.writers = names
  with pytest.raises(platform.UsageError, match=said):
    base_config.validate_config(config)
    platform.create_writer(config, 'train')


def test_a_writer_of_the_users_own(tmp_path):
  made = []

  class Mine:
    def write_scalars(self, global_step, scalars):
      made.append(int(global_step))

  config = regression.get_config(3)
  config.checkpoint_dir = str(tmp_path)
  config.log_train_data_interval = 1
  platform.start(
    regression.Regression,
    config,
    'train',
    writer_factory=lambda config, mode: made.append(mode) or Mine(),
  )
  assert made == ['train', 1, 2, 3]


def test_checkpointers_close_before_writers_also_if_a_writer_fails(tmp_path):
  closed = []

  class Checkpointer(memory.InMemoryCheckpointer):
    def close(self):
      closed.append('checkpointer')

  def writer(config, log):
    if log == 'eval':
      raise OSError('no writer')
    made = writers.MetricWriter()
    made.close = lambda: closed.append('writer')
    return made

  config = regression.get_config(1)
  config.checkpoint_dir = str(tmp_path)
  with pytest.raises(OSError, match='no writer'):
    platform.start(
      regression.Regression, config, 'train_and_eval', Checkpointer, writer
    )
  assert closed == ['checkpointer', 'writer']


# Signals from the first line of `main` on.


def start_up(tmp_path, config=CONFIG):
  """Starts a long run, which says on stdout when `main` begins."""
  program = f"""
import sys
sys.path.insert(0, {str(TOY.parent)!r})
import toy
from jaxline import platform
print('main', flush=True)
platform.main(toy.PerDevice, sys.argv[1:])
"""
  return subprocess.Popen(
    [
      *(sys.executable, '-c', program, f'--config={config}'),
      f'--config.checkpoint_dir={tmp_path}/run',
      '--config.training_steps=100000',
      '--config.experiment_kwargs.config.step_secs=0.05',
    ],
    cwd=ROOT,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.process
@pytest.mark.parametrize(
  ('signum', 'code', 'secs'),
  [
    (signal.SIGINT, 130, 0.0),
    (signal.SIGINT, 130, 0.3),
    (signal.SIGINT, 130, 0.9),
    (signal.SIGTERM, 75, 0.1),
  ],
)
def test_a_signal_in_the_first_seconds_is_heard(tmp_path, signum, code, secs):
  with start_up(tmp_path) as process:
    try:
      assert process.stdout.readline() == 'main\n'
      time.sleep(secs)
      process.send_signal(signum)
      _, stderr = process.communicate(timeout=60)
    finally:
      process.kill()
  # In the very first instant the signal is Python's: a shell shows 130 or 143.
  assert process.returncode in (code, -signum), stderr
  assert 'training loop starting' not in stderr or process.returncode == code


@pytest.mark.process
@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM'])
def test_a_signal_that_python_drops_during_start_up_is_heard(tmp_path, name):
  # A config is a program: this one is hit in `__del__`, as JAX may be in a
  # callback of the garbage collector.
  config = tmp_path / 'config.py'
  config.write_text(f"""
import signal
from tests.programs import toy_config

class Hit:
  def __del__(self):
    signal.raise_signal(signal.{name})

def get_config():
  Hit()
  return toy_config.get_config()
""")
  with start_up(tmp_path, config) as process:
    try:
      _, stderr = process.communicate(timeout=60)
    finally:
      process.kill()
  assert process.returncode == (130 if name == 'SIGINT' else 75), stderr
  assert 'training loop' not in stderr
