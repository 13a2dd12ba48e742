"""Traces of the steps that the config names."""

import gc
import gzip
import json
import logging
import pathlib
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline import experiment
from jaxline import train
from jaxline.supervision import profiling


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
  action = profiling.Profiler(make_config(tmp_path, profile_steps='1'))
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
