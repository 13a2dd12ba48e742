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

from absl import flags
from absl.testing import flagsaver
import jax
from ml_collections import config_flags
import pytest

from jaxline import base_config
from jaxline import disk
from jaxline import errors
from jaxline import exits
from jaxline import platform
from jaxline import utils
from jaxline import watchdog
from jaxline.aot import ahead
from jaxline.checkpoint import memory
from jaxline.metrics import writers
from jaxline.storage import store
from jaxline.supervision import nonfinite
from jaxline.supervision import preemption
from tests.experiments import regression
from tests.programs import toy

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOY = ROOT / 'tests' / 'programs' / 'toy.py'
CONFIG = ROOT / 'tests' / 'programs' / 'toy_config.py'
STYLES = ('sharded', 'per_device')
LM = '--config=configs/lm.py'
# The beginning of a program with experiments of its own.
HEAD = f"""
import sys
sys.path.insert(0, {str(TOY.parent)!r})
import toy
from jaxline import platform
"""


def of_kwargs(key, value):
  return f'--config.experiment_kwargs.config.{key}={value}'


def toy_args(run_dir, *args, mode='train'):
  directory = f'--config.checkpoint_dir={run_dir}'
  return [f'--config={CONFIG}', directory, f'--jaxline_mode={mode}', *args]


def python(*args, **kwargs):
  """Runs a program to its end; conftest has put two devices into XLA_FLAGS."""
  return subprocess.run(
    [sys.executable, *args],
    cwd=ROOT,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=120,
    **{'stdin': subprocess.DEVNULL} | kwargs,
  )


def run(*args, style='sharded', form='direct', **kwargs):
  """Runs a toy experiment as a program."""
  return python(str(TOY), style, form, *toy_args(*args, **kwargs))


def popen(program, *args, **variables):
  return subprocess.Popen(
    [sys.executable, '-uc', program, *args],
    cwd=ROOT,
    env=os.environ | {'PYTHONPATH': str(ROOT)} | variables,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
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
    values['config'].parser = flags.FLAGS['config'].parser
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
    config, directory, _, *args = toy_args(run_dir, *args)
    return here(
      toy.CLASSES[style], config, directory, *args, mode=mode, **other_flags
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


# Modes.


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


def test_evaluation_needs_weights(toy_here, tmp_path):
  once = '--config.one_off_evaluate=True'
  for given, code in (False, 2), (True, 0):
    given = f'--config.eval_initial_weights={given}'
    result = toy_here(tmp_path, once, given, mode='eval_test')
    assert result.returncode == code, result.stderr
  assert list(records(tmp_path, 'eval_test')) == [0]


def test_a_programs_own_checkpoint_needs_no_directory(tmp_path):
  config = regression.get_config(2)
  config.checkpoint_dir = str(tmp_path)
  platform.start(regression.Regression, config, 'train')
  history = utils.GLOBAL_CHECKPOINT_DICT['latest'].history
  history[:] = [utils.SnapshotNT(0, history[-1].pickle_nest)]
  config.checkpoint_dir, config.one_off_evaluate = None, True
  path, _ = platform.start(regression.Regression, config, 'eval')
  assert list(records(pathlib.Path(path), 'eval')) == [2]


def test_the_mode_says_what_a_checkpointer_may_do(tmp_path):
  made = {}

  class Checkpointer(memory.InMemoryCheckpointer):
    def __init__(self, config, mode):
      made[mode] = self
      super().__init__(config, mode)

    def check_config(self, experiment_class):  # It warns or refuses by that.
      assert self.follows == (self is made.get('eval_b'))

  config = regression.get_config(1)
  config.checkpoint_dir = str(tmp_path)
  config.one_off_evaluate = config.eval_initial_weights = True
  for mode in ('train_eval_multithreaded', 'train_and_eval', 'eval_b'):
    platform.start(regression.Regression, config, mode, Checkpointer)
  assert {name: (x.follows, x.reads_only) for name, x in made.items()} == {
    'train': (False, False),
    'eval': (True, False),
    'train_and_eval': (False, False),
    'eval_b': (True, False),
  }
  own = [platform.create_checkpointer(config, x) for x in ('eval_c', 'train')]
  assert [x.follows for x in own] == [True, False]


def test_resolved_config_is_written(toy_here, tmp_path):
  succeeded(toy_here(tmp_path, '--config.training_steps=1'))
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['training_steps'] == 1
  assert config['checkpoint_dir'] == str(tmp_path)
  assert config['experiment_kwargs']['config']['fault'] == ''
  from tensorboard.backend.event_processing import event_accumulator

  events = event_accumulator.EventAccumulator(str(tmp_path / 'train')).Reload()
  (text,) = events.Tensors('config')
  written = text.tensor_proto.string_val[0].decode()
  assert '"training_steps": 1' in written


@pytest.mark.parametrize(('fits', 'code'), [(True, 0), (False, 1)])
def test_what_does_not_fit_is_an_exit_code(here, tmp_path, fits, code):
  place = f'--config.checkpoint_dir={tmp_path}'
  compiled = mock.Mock(return_value=fits)
  with mock.patch.object(ahead, 'compile_experiment', compiled):
    result = here(object, f'--config={CONFIG}', place, mode='compile')
  assert result.returncode == code
  (experiment_class, config), _ = compiled.call_args
  assert experiment_class is object
  assert config.checkpoint_dir == str(tmp_path)


@pytest.mark.process
def test_a_compilation_trains_nothing(tmp_path):
  result = succeeded(run(tmp_path, mode='compile'))
  (path,) = (tmp_path / 'compile').iterdir()
  report = json.loads(path.read_text())
  assert report['mesh'] == {'stage': 1, 'replica': 1, 'data': 2, 'mdl': 1}
  assert f'Written to {path}' in result.stdout
  assert not (tmp_path / 'train').exists()


# How a run ends.


def outcome(error, others):
  """Returns how a process ends inside of which an error is raised."""
  left = mock.Mock()
  state = types.SimpleNamespace(num_processes=1 + others)
  with (
    mock.patch.object(os, '_exit', left),
    mock.patch.object(jax.distributed, 'is_initialized', return_value=True),
    mock.patch.object(exits.jax_distributed, 'global_state', state),
    pytest.raises(BaseException) as caught,
    exits.ending(),
  ):
    raise error
  codes = [call.args[0] for call in left.call_args_list]
  return codes or getattr(caught.value, 'code', None)


def full(path='/none'):
  return disk.failed_write(OSError(errno.ENOSPC, 'No space'), ROOT / path)


def during_an_import(error):
  """What extension modules do to an exception while they are initialised."""
  outer = ImportError('numpy.core failed to import')
  outer.__context__ = ImportError('initialization failed')
  outer.__context__.__cause__ = error
  return outer


LOST = ValueError('UNKNOWN: Gloo all-reduce failed: Connection reset')


# The code in one process (None is a traceback of Python's), and among others.
@pytest.mark.parametrize(
  ('error', 'code', 'among_others'),
  [
    (errors.UsageError('No such file'), 2, 2),
    (store.DamagedError('No such file'), 1, 1),
    (nonfinite.NonfiniteError('No such file'), 1, 1),
    (full('No such file'), 1, 1),
    (preemption.Preempted(75, 'No such file'), 75, 75),
    (preemption.Preempted(130, 'No such file'), 130, 130),
    (during_an_import(preemption.Preempted(75, 'No such file')), 75, 75),
    (SystemExit(3), 3, 3),  # The experiment's own: not a complete run.
    (LOST, None, 134),
    (RuntimeError('NCCL operation failed: ncclRemoteError'), None, 134),
    (RuntimeError('RESOURCE_EXHAUSTED: out of memory'), None, 1),
    (OSError('Connection reset by peer'), None, 1),  # A server of data.
    (OSError(errno.ENOSPC, 'No space'), None, 1),  # The user's own code.
    (ExceptionGroup('two', [full(), ValueError('theirs')]), None, 1),
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
  [('step', 'train'), ('step', 'train_and_eval'), ('input', 'train')],
)
def test_what_is_raised_ends_the_run(toy_here, tmp_path, place, mode):
  fault = of_kwargs('fault', place), of_kwargs('fault_step', 3)
  result = toy_here(tmp_path, *fault, mode=mode)
  assert result.returncode == 1
  assert f'Failure: {place} at 3' in result.stderr
  assert 'secret_of_frame' in result.stderr  # The traceback's own line.
  # What was logged before is not lost.
  assert list(records(tmp_path, 'train')) == [1, 2, 3]


@pytest.mark.process
@pytest.mark.parametrize('place', ['step', 'evaluate'])
def test_failure_of_either_thread_ends_the_run(tmp_path, place):
  # Without the failure the other half would go on for ten minutes.
  result = run(
    tmp_path,
    '--config.training_steps=6000',
    of_kwargs('step_secs', 0.1),
    of_kwargs('fault', place),
    of_kwargs('fault_step', 3),
    mode='train_eval_multithreaded',
  )
  assert result.returncode == 1
  assert f'Failure: {place} at ' in result.stderr
  is_told = '[jaxline] raised in the eval thread' in result.stderr
  assert is_told == (place == 'evaluate')


@pytest.mark.process
@pytest.mark.parametrize('mode', ['train', 'train_eval_multithreaded'])
def test_post_mortem_reads_commands_from_stdin(tmp_path, mode):
  args = toy_args(
    tmp_path, '--jaxline_post_mortem', of_kwargs('fault', 'step'), mode=mode
  )
  result = python(
    *(str(TOY), 'sharded', 'direct', *args),
    input='p "secret: " + secret_of_frame\nq\n',
    stdin=None,
  )
  assert re.search(r'toy\.py\(\d+\)fault\(\)', result.stdout)
  assert "'secret: step at 0'" in result.stdout
  assert result.returncode == 1
  assert result.stderr.count('Traceback (most recent call last)') == 1
  assert result.stderr.count('Failure: step at 0') == 1


# From the first step on the disk, the writer's `close` or a thread hangs.
STUCK = f"""{HEAD}
import os, threading

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
  args = toy_args(
    tmp_path,
    of_kwargs('fault', fault),
    of_kwargs('fault_step', 3),
    '--config.watchdog_secs=10',
    '--config.compilation_cache=off',  # It would be what hangs at the disk.
  )
  result = python('-c', STUCK, what, *args)
  assert result.returncode == watchdog.EXIT_CODE, result.stderr[-4000:]
  assert where in result.stderr


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


# Wrong usage is one line, with the name of what is wrong.


@pytest.mark.parametrize(
  ('mode', 'args', 'said'),
  [
    ('train', [LM, '--config.watchdog_secs=inf'], 'watchdog_secs'),
    ('train', [LM, of_kwargs('clip_norm', 0.0)], 'clip_norm'),
    ('train', [LM, of_kwargs('files', '/none')], '/none'),
    ('train', [LM, '--config.restore_from=/none'], 'config.restore_from'),
    ('train', [LM, '--config.experiment_class=no:X'], 'experiment_class'),
    ('train', [LM, "--config.writers=('jsonnl',)"], "'jsonnl'.*'jsonl'"),
    ('train', [LM, '--config.interval_type=step'], "'step'.*'steps'"),
    ('train', [LM, '--config.checkpoint_dir=/dev/null/run'], '/dev/null/run'),
    ('trian', [LM], "trian.*'train'"),
    ('train', [], '--config'),
  ],
)
def test_an_error_of_the_user_is_one_line(
  here, tmp_path, caplog, mode, args, said
):
  if args:
    args = [args[0], f'--config.checkpoint_dir={tmp_path}/run', *args[1:]]
  result = here(None, *args, mode=mode)
  assert result.returncode == 2, result.stderr
  assert result.said.count('\n') == 1, result.said
  assert re.search(said, result.said), result.said
  assert len(caplog.messages) <= 9, result.stderr


@pytest.mark.parametrize(
  ('args', 'said'),
  [
    ({'args': ['--config.sharding=fsdp']}, "sharding is 'fsdp'"),
    ({'mode': 'compile'}, 'sharded step'),
    ({'jaxline_ensure_tpu': True}, "'cpu'"),
  ],
)
def test_what_an_experiment_or_a_machine_lacks(toy_here, tmp_path, args, said):
  args = dict(args)
  result = toy_here(tmp_path, *args.pop('args', ()), style='per_device', **args)
  assert result.returncode == 2, result.stderr
  assert result.said.count('\n') == 1, result.said
  assert said in result.said


# As it is seen by a user, with what is refused while flags are parsed.
@pytest.mark.process
@pytest.mark.parametrize(
  ('args', 'said'),
  [
    ([LM, of_kwargs('batch_size', 0)], 'batch_size is 0'),
    ([LM, '--config.trainin_steps=3'], 'trainin_steps.*training_steps'),
    ([LM, '--jaxline_mod=eval'], 'jaxline_mod.*jaxline_mode'),
    (['--config=configs/ml.py'], 'configs/ml.py'),
  ],
)
def test_an_error_of_the_user_is_one_line_of_the_process(tmp_path, args, said):
  place = f'--config.checkpoint_dir={tmp_path}/run'
  result = python('experiment.py', *args, *([place] * (args[0] == LM)))
  assert result.returncode == 2, result.stderr
  lines = result.stderr.splitlines()
  # Besides, a line for each thing that was done before it was found.
  own = [line for line in lines if not re.match(r'[IW]\d{4} ', line)]
  assert len(own) == 1, result.stderr
  assert re.search(said, own[0]), own
  assert len(lines) <= 10, result.stderr


@pytest.mark.process
@pytest.mark.parametrize(
  'line', ['return numpy.no_such', "return int('x')", "return {}['x']"]
)
def test_an_error_of_the_config_file_keeps_its_traceback(tmp_path, line):
  path = tmp_path / 'broken.py'
  path.write_text(f'import numpy\ndef get_config():\n  {line}\n')
  result = python('experiment.py', f'--config={path}')
  assert result.returncode == 1
  assert f'File "{path}", line 3' in result.stderr


@pytest.mark.process
def test_a_checkpoint_that_is_refused_is_said_once(toy_here, tmp_path):
  succeeded(toy_here(tmp_path))
  program = f"""{HEAD}
import jax
toy.Sharded.init_fn = lambda self, rng: ({{'w': jax.numpy.ones([6])}}, {{}})
platform.main(toy.Sharded, sys.argv[1:])
"""
  result = python('-c', program, *toy_args(tmp_path))
  assert result.returncode == 2
  assert 'Traceback' not in result.stderr
  assert result.stderr.count('state/params/w') == 1, result.stderr
  latest = tmp_path / 'checkpoints' / 'latest'
  *_, newest = sorted(latest.iterdir(), key=lambda path: int(path.stem))
  os.rename(newest, latest / '500.json')
  result = run(tmp_path)
  assert result.returncode == 2
  lines = result.stderr.splitlines()
  (own,) = [line for line in lines if not line.startswith('W')]
  assert str(latest / '500.json') in own
  assert newest.stem in own


# The config and the run's directory.


@pytest.mark.parametrize(
  ('directory', 'processes', 'said'),
  [
    ('ftp://bucket/run', 1, 'gs://BUCKET/PATH'),
    ('run', 2, 'Use train_and_eval'),
  ],
)
def test_a_wrong_directory_is_refused(monkeypatch, directory, processes, said):
  monkeypatch.setattr(platform.jax, 'process_count', lambda: processes)
  config = base_config.get_base_config()
  config.checkpoint_dir = directory
  mode = 'train' if processes == 1 else 'train_eval_multithreaded'
  with pytest.raises(errors.UsageError, match=said):
    platform.start(object, config, mode)


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
  config.decode.update(prompts='~/in.txt', output='~/out.jsonl')
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
  assert resolved.decode.prompts == f'{tmp_path}/in.txt'
  assert resolved.decode.output == f'{tmp_path}/out.jsonl'
  assert list(tmp_path.iterdir()) == []


MESH = {
  'ici': {'stage': 1, 'replica': 1, 'data': 4, 'mdl': 1},
  'dcn': {'stage': 1, 'replica': 2, 'data': 1, 'mdl': 1},
}
PLACE = {'coordinator': 'a:1', 'num_processes': 2, 'process_id': 1}


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
def test_help_shows_the_program_and_our_flags():
  result = python('experiment.py', '--help')
  assert result.returncode == 0
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
@pytest.mark.parametrize('style', STYLES)
def test_disable_pmap_jit_shows_values(tmp_path, style):
  args = of_kwargs('show_values', True), '--config.training_steps=2'
  compiled = succeeded(run(tmp_path / 'a', *args, style=style))
  op_by_op = succeeded(
    run(tmp_path / 'b', *args, '--jaxline_disable_pmap_jit', style=style)
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


# Before JAX starts.


# libtpu would look for TPUs where one process compiles for other devices.
@pytest.mark.parametrize(
  ('mode', 'args', 'platforms', 'expected'),
  [
    ('train', [], '', ['xla', 'meet', 'start']),
    ('compile', [], '', ['xla', 'meet', 'start']),
    ('compile', ['--config.topology=v4:2x2x1'], 'cpu', ['xla', 'start']),
    ('compile', ['--config.topology=v4:2x2x1'], '', ['cpu', 'xla', 'start']),
    ('train', ['--config.sharding=fsdpp'], '', []),
    ('train', ['--config.distributed=off'], '', ['xla', 'off', 'start']),
  ],
)
def test_flags_are_set_before_the_processes_meet(
  here, monkeypatch, mode, args, platforms, expected
):
  calls = []
  fake = types.SimpleNamespace(
    config=types.SimpleNamespace(
      values={'jax_platforms': platforms},
      update=lambda key, value: calls.append(value),
    )
  )
  monkeypatch.setattr(platform, 'jax', fake)
  monkeypatch.setattr(
    platform.xla, 'apply', lambda options: calls.append('xla') or ['--a=1']
  )
  monkeypatch.setattr(
    platform.distributed,
    'initialize',
    lambda value: calls.append('meet' if value == 'auto' else value),
  )
  monkeypatch.setattr(platform, 'start', lambda *_: calls.append('start'))
  result = here(object, f'--config={CONFIG}', *args, mode=mode)
  assert calls == expected
  assert result.returncode == (0 if expected else 2)
  assert result.stdout.count('[jaxline] --a=1\n') == bool(expected)


def test_actions_of_xla_reach_the_loops(tmp_path, monkeypatch):
  actions, loop = [object()], mock.Mock()
  monkeypatch.setattr(platform.xla, 'actions', lambda options: actions)
  found = dataclasses.replace(platform.MODES['train'], run=loop)
  monkeypatch.setitem(platform.MODES, 'train', found)
  config = base_config.get_base_config()
  config.checkpoint_dir = str(tmp_path)
  platform.start(object, config, 'train')
  assert loop.call_args.args[0].periodic_actions == actions


# Writers.


def test_writers_are_for_the_chief_only(tmp_path, monkeypatch):
  config = base_config.get_base_config()
  config.checkpoint_dir = str(tmp_path)
  monkeypatch.setattr(platform.jax, 'process_index', lambda: 3)
  for config.log_all_hosts in (False, True):
    with platform.create_writer(config, 'train') as writer:
      writer.write_scalars(1, {'a': 1.0})
    there = [path.name for path in tmp_path.glob('train/*')]
    assert there == ['host_3'] * config.log_all_hosts
  assert (tmp_path / 'train' / 'host_3' / 'metrics.jsonl').is_file()


@pytest.mark.parametrize('is_named', [True, False])
def test_a_writer_of_the_users_own(is_named, tmp_path, monkeypatch):
  monkeypatch.setattr(writers, '_factories', dict(writers._factories))
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


# Signals.


def start_up(tmp_path, config=CONFIG):
  """Starts a long run, which says on stdout when `main` begins."""
  program = f"""{HEAD}
print('main', flush=True)
platform.main(toy.PerDevice, sys.argv[1:])
"""
  return popen(
    program,
    f'--config={config}',
    f'--config.checkpoint_dir={tmp_path}/run',
    '--config.training_steps=100000',
    of_kwargs('step_secs', 0.05),
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
