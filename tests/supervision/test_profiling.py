"""Traces of the steps that the config names."""

from contextlib import nullcontext
import functools
import gzip
import json
import logging
import pathlib
import time

import jax
from jax.experimental import profiler
import jax.numpy as jnp
import pytest

from jaxline import platform
from jaxline import train
from jaxline.run_directory import logs
from jaxline.supervision import profiling
from tests import toys


class Experiment(toys.Toy):
  """Steps of 10 ms, with weights on the devices."""

  def step(self, **kwargs):
    time.sleep(0.01)
    return super().step(**kwargs)


def make_config(directory, steps=12, **values):
  values = {'checkpointer': 'memory', 'log_tensors_interval': None} | values
  return toys.make_config(steps, checkpoint_dir=str(directory), **values)


def traces(directory):
  """Returns the numbers of steps before the traced ones, by trace."""
  found = {}
  for path in sorted(pathlib.Path(directory, 'plugins/profile').glob('*')):
    files = sorted(file.name.partition('.')[2] for file in path.iterdir())
    assert files == ['json.gz', 'trace.json.gz', 'xplane.pb']
    with gzip.open(path / 'perfetto_trace.json.gz') as file:
      shown = json.load(file)
    steps = {
      int(event['args']['step_num'])
      for event in shown['traceEvents']
      if event.get('name') == 'train'
    }
    found[path.name.partition('_steps_')[2]] = steps
  return found


def test_the_steps_of_the_config_are_traced_until_a_run_fails(tmp_path, caplog):
  config = make_config(tmp_path, steps=99, profile_steps='1,6-7,12-99')
  fails = functools.partial(Experiment, fail_at=13)
  with caplog.at_level(logging.INFO), pytest.raises(ZeroDivisionError):
    train.Run(fails, config).train()
  # Step 6 is the one after five.
  expected = {'1-1': {0}, '6-7': {5, 6}, '12-99': {11, 12, 13}}
  assert traces(tmp_path / 'train') == expected
  (path,) = tmp_path.glob('train/plugins/profile/*_6-7')
  assert str(path) in caplog.text
  assert f'tensorboard --logdir={tmp_path}' in caplog.text


def test_a_resumed_run_traces_by_the_number_of_the_step(
  tmp_path, monkeypatch, caplog
):
  """And each process traces itself."""
  monkeypatch.setattr(jax, 'process_index', lambda: 3)
  config = make_config(tmp_path, profile_steps='2-3,9-20,30')
  folder_of = logs.folders(tmp_path)
  action = profiling.Profiler(config, folder_of)
  action.update_time(0.0, 10)  # Within the second range.
  for step in range(10, 13):
    with jax.profiler.StepTraceAnnotation('train', step_num=step):
      x = jnp.zeros([]) + 1
    action(0.0, step + 1, {'loss': x})
  action.wait_to_finish()  # Ended by a signal, say.
  action.wait_to_finish()
  assert traces(tmp_path / 'train' / 'host_3') == {'11-20': {10, 11, 12}}
  assert not caplog.text


# The profile that XLA compiles with.


def pgle_config(directory, **values):
  config = make_config(directory, **values)
  config.xla.pgle_save, config.xla.pgle_save_steps = 'runs/a.pb', 2
  return config


@pytest.mark.parametrize('has_gpu', [True, False])
def test_the_profile_of_some_steps_is_saved(has_gpu, tmp_path, monkeypatch):
  file = tmp_path / 'runs' / 'a.pb'

  def extract(trace):
    assert pathlib.Path(trace).is_dir()
    assert not file.exists()
    return b'profile'

  if has_gpu:
    monkeypatch.setattr(profiler, 'get_profiled_instructions_proto', extract)
  monkeypatch.chdir(tmp_path)
  config = pgle_config(tmp_path / 'run')
  fails = pytest.raises(RuntimeError, match='no GPU')
  with nullcontext() if has_gpu else fails:
    platform.start(Experiment, config, 'train')
  assert file.exists() == has_gpu
  if has_gpu:
    assert file.read_bytes() == b'profile'
  assert traces(tmp_path / 'run' / 'train') == {'5-6': {4, 5}}


@pytest.mark.parametrize('num_steps', [1, 5])
def test_a_run_that_ends_early_saves_no_profile(num_steps, tmp_path, caplog):
  action = profiling.PgleProfiler(pgle_config(tmp_path), logs.folders(tmp_path))
  action.update_time(0.0, 1000)  # A resumed run.
  for step in range(1001, 1001 + num_steps):
    action(0.0, step, {'loss': jnp.zeros([])})
  for _ in range(2):  # The loop does so where an error ends it.
    action.wait_to_finish()
  assert caplog.text.count('No profile') == 1
  with jax.profiler.trace(str(tmp_path / 'other')):
    pass  # Nothing is left running.
