"""The command line, end to end: every mode, each way to fail and its code."""

import errno
import logging
import os
import re
import signal
import sys
import traceback
import types
from unittest import mock

from absl import flags
from absl.testing import flagsaver
import jax
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline import platform
from jaxline import utils
from jaxline.base import disk
from jaxline.base import watchdog
from jaxline.compat import checkpointers
from jaxline.compile import ahead
from jaxline.metrics import writers
from jaxline.run_directory import owner
from jaxline.run_directory import store
from jaxline.supervision import exits
from jaxline.supervision import nonfinite
from jaxline.supervision import preemption
from tests import processes
from tests import remains
from tests import toys
from tests.experiments import regression
from tests.programs import toy

ROOT = processes.ROOT
TOY = ROOT / 'tests' / 'programs' / 'toy.py'
CONFIG = ROOT / 'tests' / 'programs' / 'toy_config.py'
LM = '--config=configs/lm.py'


def of_kwargs(key, value):
  return f'--config.experiment_kwargs.config.{key}={value}'


def toy_args(run_dir, *args, mode='train'):
  directory = f'--config.checkpoint_dir={run_dir}'
  return [f'--config={CONFIG}', directory, f'--jaxline_mode={mode}', *args]


@pytest.fixture
def here(monkeypatch, capfd, caplog):
  """Runs a command line in this process, for tests that need no other one."""
  monkeypatch.chdir(ROOT)
  caplog.set_level(logging.INFO)

  def run_here(cls, *args):
    argv = ['experiment.py', *args]
    monkeypatch.setattr(sys, 'argv', argv)
    # As in a process that has just begun.
    monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})
    monkeypatch.setattr(checkpointers, '_begun', {})
    caplog.clear()
    capfd.readouterr()
    code, error = 0, ''
    with flagsaver.flagsaver():
      try:
        with exits.exit_on_error():
          platform._parse(flags.FLAGS, argv)
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
  """Runs the toy experiment in this process."""
  return lambda *args, **kw: here(toy.Sharded, *toy_args(*args, **kw))


def losses(run_dir):
  """Returns step -> loss."""
  found = remains.curve(run_dir, 'train')
  return {r['step']: r['loss'] for r in found if 'loss' in r}


# Modes.


def test_a_program_trains(tmp_path):
  args = toy_args(tmp_path)
  result = processes.run(TOY, 'sharded', 'app_run', *args)
  assert result.returncode == 0, result.stderr[-4000:]
  found = losses(tmp_path)
  assert list(found) == [1, 2, 3, 4, 5, 6]
  assert found[6] < found[1]
  assert f'Run directory: {tmp_path}' in result.stdout
  assert list(tmp_path.glob('train/events.out.tfevents.*'))
  assert str(tmp_path) in (tmp_path / 'config.json').read_text()


def test_a_compilation_trains_nothing(toy_here, tmp_path):
  result = toy_here(tmp_path, mode='compile')
  assert result.returncode == 0, result.stderr[-4000:]
  (path,) = (tmp_path / 'compile').iterdir()
  assert f'Written to {path}' in result.stdout
  assert not (tmp_path / 'train').exists()
  with mock.patch.object(ahead, 'compile_experiment', return_value=False):
    assert toy_here(tmp_path, mode='compile').returncode == 1  # It won't fit.


# How a run ends.


def outcome(error, others):
  """Returns how a process ends inside of which an error is raised."""
  left = mock.Mock()
  state = types.SimpleNamespace(num_processes=1 + others)
  with (
    mock.patch.object(os, '_exit', left),
    mock.patch.object(jax.distributed, 'is_initialized', return_value=True),
    mock.patch.object(exits.distributed.jax_distributed, 'global_state', state),
    pytest.raises(BaseException) as caught,
    exits.exit_on_error(),
  ):
    raise error
  codes = [call.args[0] for call in left.call_args_list]
  return codes or getattr(caught.value, 'code', None)


def within_c_code(error):
  """Returns what locks and imported modules make of a signal's exception."""
  outer = RuntimeError('cannot release un-acquired lock')
  outer.__context__ = ImportError('initialization failed')
  outer.__context__.__cause__ = error
  return outer


def while_traced(error):
  """Returns an error with what JAX adds to it."""
  with pytest.raises(type(error)) as caught:
    jax.jit(lambda: (_ for _ in ()).throw(error))()
  assert caught.value.__notes__
  return caught.value


NO_SPACE = OSError(errno.ENOSPC, 'No space')
FULL = disk.failed_write(NO_SPACE, ROOT / 'No such file')
LOST = ValueError('UNKNOWN: Gloo all-reduce failed: Connection reset')
LOST_SERVICE = RuntimeError(
  'UNAVAILABLE: Socket closed\nAdditional GRPC error information from remote'
  ' target coordination_service while calling GetKeyValue:'
)


# The code in one process (None is a traceback of Python's), and among others.
@pytest.mark.parametrize(
  ('error', 'code', 'among_others'),
  [
    (errors.UsageError('No such file'), 2, 2),
    (while_traced(errors.UsageError('No such file')), 2, 2),
    (store.DamagedError('No such file'), 1, 1),
    (owner.LostClaimError('No such file'), 1, 1),
    (nonfinite.NonfiniteError('No such file'), 1, 1),
    (FULL, 1, 1),
    (preemption.Preempted(75, 'No such file'), 75, 75),
    (preemption.Preempted(130, 'No such file'), 130, 130),
    (within_c_code(preemption.Preempted(75, 'No such file')), 75, 75),
    (SystemExit(3), 3, 3),  # The experiment's own: not a complete run.
    (LOST, None, 134),
    (LOST_SERVICE, None, 134),
    (RuntimeError('NCCL operation failed: ncclRemoteError'), None, 134),
    (RuntimeError('RESOURCE_EXHAUSTED: out of memory'), None, 1),
    (OSError('Connection reset by peer'), None, 1),  # A server of data.
    (NO_SPACE, None, 1),  # The user's own code.
    (ExceptionGroup('two', [FULL, ValueError('theirs')]), None, 1),
  ],
)
def test_exit_codes(error, code, among_others, capsys):
  assert outcome(error, others=False) == code
  said = capsys.readouterr().err
  assert (
    said.count('No such file') == said.count('\n') == (code not in (3, None))
  )
  assert outcome(error, others=True) == [among_others]
  said = capsys.readouterr().err
  assert ('Traceback' in said) == (code is None and among_others == 1)


def test_an_experiment_that_exits_with_0_has_not_ended_the_run(capsys):
  assert outcome(SystemExit(0), others=False) == 1
  assert 'in outcome\n' in capsys.readouterr().err  # Its traceback.


def test_a_signal_that_all_have_heard_leaves_nobody():
  error = preemption.Preempted(75, 'SIGTERM')
  error.is_joint = True
  assert outcome(error, others=True) == 75


@pytest.mark.parametrize(
  ('place', 'mode'),
  [
    ('input', 'train'),
    ('step', 'train_eval_multithreaded'),
    ('evaluate', 'train_eval_multithreaded'),
  ],
)
def test_what_is_raised_ends_the_run(toy_here, tmp_path, place, mode):
  # Without the failure the other thread would go on for ten minutes.
  steps = '--config.training_steps=6000', of_kwargs('step_secs', 0.1)
  fault = of_kwargs('fault', place), of_kwargs('fault_step', 3)
  result = toy_here(tmp_path, *steps, *fault, mode=mode)
  assert result.returncode == 1
  assert f'Failure: {place} at ' in result.stderr
  assert 'secret_of_frame' in result.stderr  # The traceback's own line.
  # What was logged before is not lost.
  assert list(losses(tmp_path))[:3] == [1, 2, 3]


# Wrong usage is one line, with the name of what is wrong.


class PerDevice(toys.Plain):
  def __init__(self, mode, init_rng, config):
    super().__init__(mode, init_rng)


@pytest.mark.parametrize(
  ('args', 'said'),
  [
    ([LM, '--config.trainin_steps=3'], 'trainin_steps.*training_steps'),
    ([LM, '--config.mesh.icy.data=3'], "key: 'icy'"),
    ([LM, 'config.training_steps=3'], 'config.training_steps'),
    ([LM, of_kwargs('batch_size', 0)], 'batch_size is 0'),
    ([LM, of_kwargs('files', '/none')], '/none'),
    ([LM, '--config.restore_from=/none'], 'config.restore_from'),
    ([LM, '--config.experiment_class=no:X'], 'experiment_class'),
    ([LM, "--config.writers=('jsonnl',)"], "'jsonnl'.*'jsonl'"),
    ([LM, '--config.checkpoint_dir=/dev/null/run'], '/dev/null/run'),
    ([LM, '--config.checkpoint_dir=ftp://bucket'], 'gs://BUCKET/PATH'),
    ([LM, '--jaxline_mode=trian'], "trian.*'train'"),
    ([LM, '--jaxline_ensure_tpu'], "'cpu'"),
    (['--config=configs/ml.py'], 'configs/ml.py'),
    ([], '--config'),
    # What an experiment lacks.
    ([f'--config={CONFIG}', '--config.sharding=fsdp'], "sharding is 'fsdp'"),
    ([f'--config={CONFIG}', '--jaxline_mode=compile'], 'sharded step'),
  ],
)
def test_an_error_of_the_user_is_one_line(
  here, tmp_path, monkeypatch, caplog, args, said
):
  monkeypatch.setattr(platform.tempfile, 'tempdir', str(tmp_path))
  result = here(None if args[:1] == [LM] else PerDevice, *args)
  assert result.returncode == 2, result.stderr
  assert result.said.count('\n') == 1, result.said
  assert re.search(said, result.said), result.said
  assert len(caplog.messages) <= 9, result.stderr


def test_an_error_of_the_config_file_keeps_its_traceback(here, tmp_path):
  path = tmp_path / 'broken.py'
  path.write_text("def get_config():\n  return {}['x']\n")
  result = here(None, f'--config={path}')
  assert result.returncode == 1
  assert f'File "{path}", line 2' in result.stderr


# The config and the run's directory.


def test_threads_are_of_one_process(monkeypatch):
  monkeypatch.setattr(platform.jax, 'process_count', lambda: 2)
  config = base_config.get_base_config()
  with pytest.raises(errors.UsageError, match='Use train_and_eval'):
    platform.start(object, config, 'train_eval_multithreaded')


def test_default_directory_is_fresh_and_for_this_user_alone(
  tmp_path, monkeypatch
):
  # Nobody else can prepare it, since its name ends in random letters.
  monkeypatch.setattr(platform.tempfile, 'tempdir', str(tmp_path))
  config = base_config.get_base_config()
  a = platform.resolve_config(config).checkpoint_dir
  config.checkpoint_dir = ''
  b = platform.resolve_config(config).checkpoint_dir
  assert sorted(map(str, tmp_path.iterdir())) == sorted({a, b})
  assert {os.stat(x).st_mode & 0o7777 for x in (a, b)} == {0o700}


def test_paths_are_made_absolute(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.chdir(tmp_path)
  config = base_config.get_base_config()
  config.restore_from = '~/runs/b:12'
  config.compilation_cache = '~/programs'
  for given, expected in {
    '~/runs/a': f'{tmp_path}/runs/a',
    'here': f'{tmp_path}/here',
    'gs://bucket/run/': 'gs://bucket/run',
  }.items():
    config.checkpoint_dir = given
    resolved = platform.resolve_config(config)
    assert resolved.is_locked
    assert resolved.checkpoint_dir == expected
    assert config.checkpoint_dir == given
  assert resolved.restore_from == f'{tmp_path}/runs/b:12'
  assert resolved.compilation_cache == f'{tmp_path}/programs'
  assert list(tmp_path.iterdir()) == []


def test_overrides_on_the_command_line():
  place = {'coordinator': 'a:1', 'num_processes': 2, 'process_id': 1}
  overrides = (
    'writers=()',
    f'distributed={place}',
    'mesh.dcn.replica=2',
    "sharding_rules={'mlp': ['data']}",
    'save_checkpoint_interval=None',
    # Also of an experiment's own key, whatever its type.
    'experiment_kwargs.config.step_secs=None',
  )
  argv = [f'--config={CONFIG}', *(f'--config.{x}' for x in overrides)]
  found = platform.load_config(argv)
  assert found.writers == ()
  assert found.distributed.to_dict() == place
  assert found.mesh.dcn.replica == 2
  assert found.sharding_rules.mlp == ['data']
  assert found.save_checkpoint_interval is None
  assert found.experiment_kwargs.config.step_secs is None
  with pytest.raises(errors.UsageError, match=r'random_seed.*None'):
    platform.load_config([f'--config={CONFIG}', '--config.random_seed=None'])


@pytest.mark.process
def test_help_shows_the_program_and_our_flags():
  result = processes.run('experiment.py', '--help')
  assert result.returncode == 0
  assert 'python experiment.py --config=configs/lm.py' in result.stdout
  shown = re.findall(r'^  --(?:\[no\])?(\w+):', result.stdout, re.MULTILINE)
  ours = flags.FLAGS.get_flags_for_module(platform)
  assert sorted(shown) == sorted(flag.name for flag in ours)


@pytest.mark.parametrize('is_named', [True, False])
def test_a_writer_of_the_users_own(is_named, tmp_path):
  made = []

  class Mine:
    def __init__(self, config, mode, directory=None):
      made.append(mode)

    def write_scalars(self, global_step, scalars):
      made.append(int(global_step))

  writers.register('mine')(Mine)
  config = regression.get_config(3)
  config.checkpoint_dir = str(tmp_path)
  config.log_train_data_interval = 1
  config.writers = ('mine', 'jsonl')
  factory = {} if is_named else {'writer_factory': Mine}
  platform.start(regression.Regression, config, 'train', **factory)
  assert made == ['train', 1, 2, 3]
  there = {path.name for path in (tmp_path / 'train').glob('*')}
  assert there == ({'metrics.jsonl', 'fingerprints.bin'} if is_named else set())


# What starts processes.


# The writer's `close`, a thread or a function of `atexit` never ends.
STUCK = """
import atexit
import sys
import threading
from jaxline import platform
from tests.programs import toy

what, *argv = sys.argv[1:]
for_ever = threading.Event().wait

class Writer(platform.TensorBoardLogger):
  def close(self):
    super().close()
    what == 'writer' and for_ever()

class Experiment(toy.Sharded):
  def step(self, **kwargs):
    what == 'thread' and threading.Thread(target=for_ever).start()
    return super().step(**kwargs)

what == 'atexit' and atexit.register(for_ever)
platform.main(Experiment, argv, writer_factory=Writer)
"""


@pytest.mark.process
@pytest.mark.parametrize(
  ('what', 'where'),
  [('writer', 'in close'), ('thread', 'in _shutdown'), ('atexit', 'in wait')],
)
def test_what_holds_up_the_end_of_a_failed_run_is_ended(tmp_path, what, where):
  args = toy_args(
    tmp_path,
    of_kwargs('fault', 'step'),
    of_kwargs('fault_step', 3),
    '--config.watchdog_secs=10',
  )
  result = processes.run('-c', STUCK, what, *args)
  assert result.returncode == watchdog.EXIT_CODE, result.stderr[-4000:]
  assert where in result.stderr


# A config is a program: this one is hit in `__del__`, where Python drops what a
# handler raises, as it does in JAX's callback of the garbage collector.
HIT = """
import signal
from tests.programs import toy_config

class Hit:
  def __del__(self):
    signal.raise_signal({})

def get_config():
  Hit()
  return toy_config.get_config()
"""


@pytest.mark.process
@pytest.mark.parametrize(
  ('signum', 'code'), [(signal.SIGINT, 130), (signal.SIGTERM, 75)]
)
def test_a_signal_in_the_first_seconds_is_heard(tmp_path, signum, code):
  config = tmp_path / 'config.py'
  config.write_text(HIT.format(int(signum)))
  result = processes.run(
    *(TOY, 'sharded', 'main', f'--config={config}'),
    *(f'--config.checkpoint_dir={tmp_path}/run', of_kwargs('step_secs', 0.05)),
    '--config.training_steps=100000',
  )
  assert result.returncode == code, result.stderr
