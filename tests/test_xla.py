"""Tests of jaxline.xla: real processes that start JAX with the flags."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
from jax.experimental import profiler
import jax.numpy as jnp
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline import xla

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_SECS = 120
DEFAULTS = base_config.get_base_config().xla.to_dict()
SCHEDULER = 'xla_gpu_enable_latency_hiding_scheduler'
COMMAND_BUFFER = 'xla_gpu_enable_command_buffer'

HEADER = f"""
import json, os, warnings
import jax

from jaxline import xla

DEFAULTS = {DEFAULTS}

said = {{}}
"""


def run(code, **environ):
  """Runs a program that fills `said`; returns that."""
  env = {k: v for k, v in os.environ.items() if k != 'LIBTPU_INIT_ARGS'}
  env |= {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
  done = subprocess.run(
    [sys.executable, '-c', HEADER + code + '\nprint(json.dumps(said))'],
    env=env | environ,
    capture_output=True,
    text=True,
    timeout=TIMEOUT_SECS,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def options(**changed):
  return DEFAULTS | changed


def test_the_defaults_set_nothing():
  assert xla.apply(DEFAULTS) == []  # JAX has started.
  assert xla.actions(DEFAULTS) == []


@pytest.mark.parametrize(
  ('changed', 'flags', 'tpu_flags'),
  [
    (
      {'latency_hiding_scheduler': True},
      {SCHEDULER: True},
      {'xla_tpu_enable_latency_hiding_scheduler': True},
    ),
    ({'pgle_profiling_runs': 3}, {SCHEDULER: True}, {}),
    ({'pgle_save': 'a.pb'}, {SCHEDULER: True, COMMAND_BUFFER: ''}, {}),
    (
      {'pgle_profile': 'a.pb'},
      {
        SCHEDULER: True,
        # The program may change its directory before it compiles.
        'xla_gpu_pgle_profile_file_or_directory_path': os.path.abspath('a.pb'),
      },
      {},
    ),
    (
      {
        'latency_hiding_scheduler': True,
        'flags': {f'--{SCHEDULER}': False, 'xla_dump_to': '/x'},
        'tpu_flags': {'xla_tpu_x': 3},
      },
      {SCHEDULER: False, 'xla_dump_to': '/x'},
      {'xla_tpu_enable_latency_hiding_scheduler': True, 'xla_tpu_x': 3},
    ),
  ],
)
def test_the_flags_of_each_key(changed, flags, tpu_flags):
  assert xla._flags(options(**changed)) == {
    'XLA_FLAGS': flags,
    'LIBTPU_INIT_ARGS': tpu_flags,
  }


@pytest.mark.process
def test_flags_and_pgle_reach_jax_and_only_before_it_starts():
  # What the user has quoted stays as it is.
  given = '--xla_cpu_ftz=false  --xla_dump_to="/a  b"'
  said = run(
    """
import jax.numpy as jnp

options = DEFAULTS | dict(
  pgle_profiling_runs=2,
  pgle_aggregation_percentile=85,
  flags={'--xla_force_host_platform_device_count': 3, 'xla_gpu_ftz': True},
  tpu_flags={'xla_tpu_x': 'y'},
)
said['lines'] = xla.apply(options)
said['flags'] = os.environ['XLA_FLAGS']
said['tpu_flags'] = os.environ['LIBTPU_INIT_ARGS']
said['devices'] = jax.device_count()
said['again'] = xla.apply(options)  # Nothing is missing.
try:
  xla.apply(DEFAULTS | dict(flags={'xla_cpu_ftz': True}))
except ValueError as e:
  said['too late'] = str(e)

# That JAX measures shows in its warning: on a CPU it finds no durations.
def times_measured(f):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    for _ in range(4):
      f(x)
  return len([w for w in caught if 'PGLE' in str(w.message)])

x = jnp.ones(3)
said['jitted'] = times_measured(jax.jit(jnp.tanh))
said['percentile'] = jax.config.values['jax_pgle_aggregation_percentile']
""",
    XLA_FLAGS=given,
    LIBTPU_INIT_ARGS='TPU_MEGACORE=MEGACORE_DENSE',
  )
  added = f'--{SCHEDULER}=true --xla_force_host_platform_device_count=3'
  added += ' --xla_gpu_ftz=true'
  assert said['flags'] == f'{given} {added}'
  assert said['tpu_flags'] == 'TPU_MEGACORE=MEGACORE_DENSE --xla_tpu_x=y'
  assert said['lines'] == [
    f'XLA_FLAGS: {added}',
    'LIBTPU_INIT_ARGS: --xla_tpu_x=y',
    'JAX: jax_enable_pgle=True',
    'JAX: jax_pgle_profiling_runs=2',
    'JAX: jax_remove_custom_partitioning_ptr_from_cache_key=True',
    'JAX: jax_pgle_aggregation_percentile=85',
  ]
  assert said['devices'] == 3
  assert said['again'] == said['lines'][2:]
  assert '--xla_cpu_ftz=true in XLA_FLAGS' in said['too late']
  assert (said['jitted'], said['percentile']) == (2, 85)


def test_a_missing_profile_is_refused(tmp_path):
  with pytest.raises(errors.UsageError, match='pgle_profile'):
    xla.apply(options(pgle_profile=str(tmp_path / 'a.pb')))


# Saving a profile.


@pytest.fixture
def temporary(tmp_path, monkeypatch):
  """Where traces are kept meanwhile."""
  path = tmp_path / 'tmp'
  path.mkdir()
  monkeypatch.setattr(tempfile, 'tempdir', str(path))
  return path


def train(action, num_steps, first=1):
  """Calls an action as the loop does, with real steps."""
  step_fn = jax.jit(lambda x: jnp.tanh(x @ x))
  x = jnp.ones((8, 8))
  for step in range(first, first + num_steps):
    x = step_fn(x)
    action(0.0, step, {'loss': x[0, 0]})


def test_without_a_gpu_in_the_profile_nothing_is_written(tmp_path, temporary):
  path = tmp_path / 'runs' / 'a.pb'
  action = xla.ProfileSteps(str(path), 3, 2)
  with pytest.raises(RuntimeError, match='no GPU'):
    train(action, 4)
  action.wait_to_finish()
  assert not path.parent.exists()
  assert list(temporary.iterdir()) == []


def test_a_profile_is_of_the_steps_and_written_whole(
  tmp_path, temporary, monkeypatch
):
  path = tmp_path / 'runs' / 'a.pb'
  traces = []

  def extract(directory):
    (trace,) = pathlib.Path(directory).glob('*.xplane.pb')
    data = jax.profiler.ProfileData.from_file(str(trace))
    traces.append(
      {e.name for p in data.planes for line in p.lines for e in line.events}
    )
    assert not path.exists()
    return b'profile'

  monkeypatch.setattr(profiler, 'get_profiled_instructions_proto', extract)
  monkeypatch.chdir(tmp_path)
  action = xla.ProfileSteps('runs/a.pb', 3, 2)
  os.chdir('/')  # A program may.
  train(action, 20, first=1000)  # A resumed run.
  action.wait_to_finish()
  assert path.read_bytes() == b'profile'
  assert os.listdir(path.parent) == ['a.pb']
  assert list(temporary.iterdir()) == []
  (names,) = traces
  assert 'PjitFunction(<lambda>)' in names
  # Nothing is left running: another trace can be taken.
  with jax.profiler.trace(str(tmp_path / 'other')):
    pass


@pytest.mark.parametrize('num_steps', [1, 3])
def test_a_run_that_ends_early_saves_no_profile(
  num_steps, tmp_path, temporary, caplog
):
  action = xla.ProfileSteps(str(tmp_path / 'a.pb'), 3, 2)
  train(action, num_steps)
  for _ in range(2):  # The loop does so where an error ends it.
    action.wait_to_finish()
  (record,) = [r for r in caplog.records if 'No profile' in r.message]
  assert f'ended after {num_steps} steps' in record.message
  assert list(temporary.iterdir()) == []
  with jax.profiler.trace(str(tmp_path / 'other')):
    pass


def test_the_first_process_saves_the_profile(monkeypatch):
  wanted = options(pgle_save='a.pb', pgle_save_steps=4)
  (action,) = xla.actions(wanted)
  assert isinstance(action, xla.ProfileSteps)
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  assert xla.actions(wanted) == []
