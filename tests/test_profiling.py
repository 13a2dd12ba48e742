"""Traces of steps: by the config, by a file, by a signal."""

import gc
import gzip
import json
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline import experiment
from jaxline import runs
from jaxline import train
from jaxline.supervision import profiling

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOY = ROOT / 'tests' / 'programs' / 'toy.py'
CONFIG = ROOT / 'tests' / 'programs' / 'toy_config.py'


class Experiment(experiment.AbstractExperiment):
  """Steps of 10 ms, with results on the device."""

  NON_BROADCAST_CHECKPOINT_ATTRS = {'w': 'w'}

  def __init__(self, mode, init_rng):
    super().__init__(mode, init_rng)
    self.w = jnp.zeros([])
    self.update = jax.jit(lambda w: w + 1)

  def step(self, *, global_step, rng, writer):
    time.sleep(0.01)
    self.w = self.update(self.w)
    return {'loss': self.w}

  def evaluate(self, *, global_step, rng, writer):
    return {}


def make_config(directory, **values):
  config = base_config.get_base_config()
  config.checkpoint_dir = str(directory)
  config.checkpointer = 'memory'
  config.training_steps = 12
  config.log_tensors_interval = config.log_train_data_interval = None
  config.update(values)
  base_config.validate_config(config)
  return config


def traces(directory):
  """Returns the numbers of steps before the traced ones, by trace."""
  found = {}
  for path in sorted(pathlib.Path(directory, 'plugins/profile').glob('*')):
    (steps,) = steps_of([path])
    _, _, name = path.name.partition('_steps_')
    found[name] = steps
  return found


def steps_of(paths):
  """Yields which steps are in traces, after looking at all their files."""
  for path in paths:
    files = sorted(file.name.partition('.')[2] for file in path.iterdir())
    assert files == ['json.gz', 'trace.json.gz', 'xplane.pb']
    with gzip.open(path / 'perfetto_trace.json.gz') as file:
      shown = json.load(file)
    assert 'metadata' not in shown
    of_perfetto = {
      int(event['args']['step_num'])
      for event in shown['traceEvents']
      if event.get('name') == 'train'
    }
    (plane_file,) = path.glob('*.xplane.pb')
    profile = jax.profiler.ProfileData.from_file(str(plane_file))
    # Their numbers are not asked for: with jax 0.12 that ends the process.
    of_plugin = [
      event.name
      for plane in profile.planes
      for line in plane.lines
      for event in line.events
      if event.name == 'train'
    ]
    assert len(of_plugin) == len(of_perfetto)
    yield of_perfetto


def wait_until(is_true, secs=60):
  deadline = time.monotonic() + secs
  while not is_true():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def profiler_threads():
  gc.collect()  # A thread ends with its profiler, which a cycle may hold.
  return {t for t in threading.enumerate() if t.name == 'profiler'}


# The config.


@pytest.mark.parametrize(
  ('text', 'ranges'),
  [
    ('12', [(12, 12)]),
    ('10-15', [(10, 15)]),
    ('1,10-15, 1000-1005', [(1, 1), (10, 15), (1000, 1005)]),
  ],
)
def test_ranges(text, ranges):
  assert profiling.parse(text) == ranges
  assert base_config.get_base_config().profile_steps is None
  make_config('/nowhere', profile_steps=text)


@pytest.mark.parametrize(
  ('text', 'wrong'),
  [
    ('', "''"),
    ('ten', "'ten'"),
    ('0-3', "'0-3'"),
    ('15-10', "'15-10'"),
    ('10-15,15', "'15'"),
    ('10-15,3-4', "'3-4'"),
    ('10-', "'10-'"),
    ('10-15,', "''"),
    ('-5', "'-5'"),
    ('1.5', "'1.5'"),
  ],
)
def test_wrong_ranges_are_refused(text, wrong):
  with pytest.raises(errors.UsageError) as e:
    make_config('/nowhere', profile_steps=text)
  assert f'config.profile_steps is {text!r}' in str(e.value)
  assert f'where {wrong} is wrong' in str(e.value)
  assert "'10-15'" in str(e.value)


# Traces.


def test_the_steps_of_the_config_are_traced(tmp_path, caplog):
  others = profiler_threads()

  def is_written():
    return list(tmp_path.glob('train/plugins/profile/*_1-1/perfetto*'))

  class Waits(Experiment):
    def step(self, *, global_step, rng, writer):
      if global_step[0] == 4:
        wait_until(lambda: 'steps_1-1' in caplog.text and is_written())
      return super().step(global_step=global_step, rng=rng, writer=writer)

  config = make_config(tmp_path, profile_steps='1,6-7')
  with caplog.at_level(logging.INFO):
    train.Run(Waits, config).train()
  found = traces(tmp_path / 'train')
  assert list(found) == ['1-1', '6-7']
  # Step 6 is the one after five. What follows while the trace is stopped is in
  # it too, and nothing from before.
  assert min(found['1-1']) == 0
  assert {5, 6} <= found['6-7']
  assert min(found['6-7']) == 5
  (path,) = tmp_path.glob('train/plugins/profile/*_6-7')
  said = [r.getMessage() for r in caplog.records if str(path) in r.getMessage()]
  assert f'tensorboard --logdir={tmp_path}' in said[0]
  assert 'https://ui.perfetto.dev' in said[0]
  wait_until(lambda: profiler_threads() <= others)


def test_what_is_to_be_said_goes_to_who_says_it(tmp_path):
  said = []
  config = make_config(tmp_path, profile_steps='2')
  (action,) = profiling.actions(config, said.append)
  action.update_time(0.0, 0)
  for step in range(1, 4):
    action(0.0, step, {'loss': jnp.zeros([])})
  action.wait_to_finish()
  assert len(said) == 1
  assert 'steps_2-2' in said[0]


def test_a_resumed_run_traces_by_the_number_of_the_step(tmp_path, caplog):
  config = make_config(tmp_path, profile_steps='2-3,9-20,30')
  action = profiling.Profiler(config)
  action.update_time(0.0, 10)  # Within the second range.
  for step in range(10, 13):
    with jax.profiler.StepTraceAnnotation('train', step_num=step):
      x = jnp.zeros([]) + 1
    action(0.0, step + 1, {'loss': x})
  action.wait_to_finish()  # Ended by a signal, say.
  action.wait_to_finish()
  assert traces(tmp_path / 'train') == {'11-20': {10, 11, 12}}
  assert not caplog.text


def test_a_trace_ends_with_the_run(tmp_path):
  config = make_config(tmp_path, profile_steps='11-100')
  train.Run(Experiment, config).train()
  assert traces(tmp_path / 'train') == {'11-100': {10, 11}}


def test_a_trace_of_a_run_that_fails_is_written(tmp_path):
  class Fails(Experiment):
    def step(self, *, global_step, rng, writer):
      if global_step[0] == 3:
        raise ZeroDivisionError
      return super().step(global_step=global_step, rng=rng, writer=writer)

  config = make_config(tmp_path, profile_steps='2-100')
  with pytest.raises(ZeroDivisionError):
    train.Run(Fails, config).train()
  assert traces(tmp_path / 'train') == {'2-100': {1, 2, 3}}


def test_the_last_step_has_run_when_the_trace_stops(tmp_path, monkeypatch):
  waited = []
  monkeypatch.setattr(profiling, '_wait', waited.append)
  config = make_config(tmp_path, profile_steps='2-3')
  action = profiling.Profiler(config)
  action.update_time(0.0, 0)
  results = [{'loss': jnp.full([], i)} for i in range(6)]
  for step in range(1, 6):
    action(0.0, step, results[step])
  action.wait_to_finish()
  assert waited == [results[3]]


def test_what_a_step_has_given_away_is_no_error():
  x = jnp.zeros([4])
  x.delete()
  profiling._wait({'loss': x, 'other': 1.0, 'more': jnp.ones([])})


def test_a_range_that_comes_while_a_trace_is_written(
  tmp_path, monkeypatch, caplog
):
  release = threading.Event()
  monkeypatch.setattr(profiling, '_wait', lambda scalars: release.wait(60))
  config = make_config(tmp_path, profile_steps='2,4-5,8-20')
  action = profiling.Profiler(config)
  action.update_time(0.0, 0)
  for step in range(1, 10):
    action(0.0, step, {})
  release.set()
  wait_until(lambda: not action._is_busy)
  for step in range(10, 12):
    action(0.0, step, {})
  action.wait_to_finish()
  assert 'The steps 4 to 5 were not traced' in caplog.text
  assert set(traces(tmp_path / 'train')) == {'2-2', '11-20'}


def test_another_trace_is_no_error_of_the_run(tmp_path, caplog):
  own = tmp_path / 'own'
  jax.profiler.start_trace(own)
  try:
    config = make_config(tmp_path / 'run', profile_steps='2-3,5-6')
    train.Run(Experiment, config).train()
  finally:
    jax.profiler.stop_trace()
  assert len(list(own.glob('plugins/profile/*/*.xplane.pb'))) == 1
  assert 'No trace of the steps from 2 on' in caplog.text
  assert 'No trace of the steps from 5 on' in caplog.text


def test_a_full_disk_is_no_error_of_the_run(tmp_path, small_disk, caplog):
  folder, remount = small_disk
  (folder / 'filler').write_bytes(bytes(1 << 20))
  remount('size=1028k')
  said = []
  config = make_config(folder, profile_steps='2-3')
  action = profiling.Profiler(config, said.append)
  action.update_time(0.0, 0)
  for step in range(1, 5):
    action(0.0, step, {})
  action.wait_to_finish()
  assert 'No trace was written' in caplog.text
  assert 'No space left' in caplog.text
  assert not list(folder.glob('train/plugins/profile/*'))
  # Nor of the next trace.
  config = make_config(tmp_path, profile_steps='2-3')
  train.Run(Experiment, config).train()
  assert list(traces(tmp_path / 'train')) == ['2-3']


def test_each_process_traces_itself(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 3)
  (tmp_path / 'PROFILE').touch()
  action = profiling.Profiler(make_config(tmp_path, profile_steps='1'))
  action._look()
  assert (tmp_path / 'PROFILE').exists()  # It is for the first process.
  action.update_time(0.0, 0)
  action(0.0, 1, {})
  action.wait_to_finish()
  assert list(traces(tmp_path / 'train' / 'host_3')) == ['1-1']


def test_a_run_without_a_directory(caplog):
  config = make_config('x', profile_steps='1')
  config.checkpoint_dir = None
  assert profiling.actions(config) == []
  assert 'config.profile_steps' in caplog.text
  caplog.clear()
  config.profile_steps = None
  assert profiling.actions(config) == []
  assert not caplog.text


# The file.


@pytest.mark.parametrize(
  ('content', 'num_steps'),
  [('3\n', 3), ('', 5), ('many', 5), ('0', 5), ('-2', 5)],
)
def test_a_file_asks_for_a_trace(tmp_path, caplog, content, num_steps):
  action = profiling.Profiler(make_config(tmp_path))
  action.update_time(0.0, 100)
  action._executor.wait()  # Its look is before there is a file.
  (tmp_path / 'PROFILE').write_text(content)
  # The clock is set back; the last look was at 0.
  action(-1.0, 101, {})
  wait_until(lambda: not (tmp_path / 'PROFILE').exists() and action._asked)
  for step in range(102, 113):
    action(-1.0, step, {})
  action.wait_to_finish()
  assert list(traces(tmp_path / 'train')) == [f'103-{102 + num_steps}']
  is_wrong = content not in ('', '3\n')
  assert ('expected a number of steps' in caplog.text) == is_wrong


def test_a_file_that_cannot_be_taken_is_looked_at_once(tmp_path, caplog):
  (tmp_path / 'PROFILE').mkdir()
  action = profiling.Profiler(make_config(tmp_path))
  action._look()
  action._look()
  assert caplog.text.count('No file asks for a trace any more') == 1


def test_a_file_waits_for_the_end_of_a_trace(tmp_path):
  action = profiling.Profiler(make_config(tmp_path, profile_steps='1-10'))
  action.update_time(0.0, 0)
  (tmp_path / 'PROFILE').write_text('2')
  for step in range(1, 5):
    action(10.0 * step, step, {})
  action.wait_to_finish()
  assert (tmp_path / 'PROFILE').exists()
  action(100.0, 11, {})
  wait_until(lambda: not (tmp_path / 'PROFILE').exists())


def test_what_is_asked_while_the_loop_looks_is_not_lost(tmp_path, monkeypatch):
  action = profiling.Profiler(make_config(tmp_path, profile_steps='3'))
  action.update_time(0.0, 0)

  def start_trace(*args, **kwargs):
    action._asked = 2  # As the thread does.
    raise RuntimeError('another trace')

  with monkeypatch.context() as patch:
    patch.setattr(jax.profiler, 'start_trace', start_trace)
    action(0.0, 2, {})
  for step in range(3, 7):
    action(0.0, step, {})
  action.wait_to_finish()
  assert list(traces(tmp_path / 'train')) == ['4-5']


# The signal.


def test_a_signal_before_the_first_step_is_kept(tmp_path):
  with profiling.on_signal():
    os.kill(os.getpid(), signal.SIGUSR1)
    config = make_config(tmp_path)
    train.Run(Experiment, config).train()
    assert list(traces(tmp_path / 'train')) == ['1-5']
    train.Run(Experiment, make_config(tmp_path / 'next')).train()
  assert not (tmp_path / 'next' / 'train').exists()
  assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_handler_of_the_program_stays():
  heard = []
  before = signal.signal(signal.SIGUSR1, lambda *args: heard.append(args))
  try:
    with profiling.on_signal():
      os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
  finally:
    signal.signal(signal.SIGUSR1, before)
  assert len(heard) == 2
  assert not profiling._is_signalled


def test_a_handler_that_came_later_stays():
  later = lambda *args: None
  with profiling.on_signal():
    signal.signal(signal.SIGUSR1, later)
  assert signal.getsignal(signal.SIGUSR1) == later
  signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_another_thread_handles_no_signal():
  found = []

  def enter():
    with profiling.on_signal():
      found.append(signal.getsignal(signal.SIGUSR1))

  thread = threading.Thread(target=enter)
  thread.start()
  thread.join()
  assert found == [signal.SIG_DFL]


@pytest.mark.process
@pytest.mark.parametrize('mode', ['train', 'train_eval_multithreaded'])
def test_a_running_process_is_traced(tmp_path, mode):
  """By the file, then by the signal, then ended while it traces."""
  directory = tmp_path / 'run'

  def trace(number):
    """Returns the given trace, once it is there."""

    def found():
      assert process.poll() is None
      written = directory.glob('train/plugins/profile/*/perfetto*.gz')
      return sorted(path.parent for path in written)

    wait_until(lambda: len(found()) > number)
    return found()[number]

  with (tmp_path / 'log').open('w') as log:
    process = subprocess.Popen(
      [
        *(sys.executable, str(TOY), 'sharded', 'direct', f'--config={CONFIG}'),
        f'--config.checkpoint_dir={directory}',
        f'--jaxline_mode={mode}',
        '--config.training_steps=100000',
        '--config.save_checkpoint_interval=100000',
        '--config.profile_steps=3',
        '--config.experiment_kwargs.config.step_secs=0.02',
      ],
      cwd=ROOT,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=log,
    )
    try:
      trace(0)
      (directory / 'PROFILE').write_text('3')
      trace(1)
      process.send_signal(signal.SIGUSR1)
      trace(2)
      (directory / 'PROFILE').write_text('99999')
      wait_until(lambda: not (directory / 'PROFILE').exists())
      time.sleep(0.5)
      process.send_signal(signal.SIGTERM)
      assert process.wait(60) == 75
    finally:
      process.kill()
      process.wait()
  # Two may be of one second.
  paths = sorted(
    directory.glob('train/plugins/profile/*_steps_*'),
    key=lambda path: int(re.search(r'_steps_(\d+)', path.name)[1]),
  )
  found = list(steps_of(paths))
  assert len(found) == 4
  assert 2 in found[0]
  assert 3 <= len(found[1]) < 50
  assert 5 <= len(found[2]) < 50
  assert len(found[3]) > 3
  # A run with traces is a run like any other.
  (run,) = runs.find([str(tmp_path)])
  assert run.path == directory
  assert max(run.curves['train/loss']) > 8
