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

DEFAULTS = {
  'latency_hiding_scheduler': None,
  'pgle_profiling_runs': 0,
  'pgle_aggregation_percentile': None,
  'pgle_save': None,
  'pgle_save_steps': 10,
  'pgle_profile': None,
  'flags': {},
  'tpu_flags': {},
}

HEADER = f"""
import json, os, warnings
import jax

DEFAULTS = {DEFAULTS}
from jaxline import xla

def attempt(**options):
  options = DEFAULTS | options
  try:
    return xla.apply(options)
  except (ValueError, RuntimeError) as e:
    return f'{{type(e).__name__}}: {{e}}'

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


def validate(**changed):
  config = base_config.get_base_config()
  with config.ignore_type():
    config.xla = options(**changed)
  base_config.validate_config(config)


# The config.


def test_the_base_config_has_the_keys_and_their_defaults():
  config = base_config.get_base_config().xla
  assert config.to_dict() == DEFAULTS
  assert xla.apply(config) == []  # JAX has started, but nothing is to be set.
  assert xla.check_backend(config) == []
  assert xla.actions(config) == []


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    (
      {'pgle_runs': 3},
      r"'pgle_runs' in config.xla; .* Did you mean 'pgle_.*xla\.tpu_flags",
    ),
    ({'latency_hiding_scheduler': 'yes'}, 'expected True or False, or None'),
    ({'pgle_profiling_runs': -1}, 'pgle_profiling_runs is -1; expected an int'),
    ({'pgle_profiling_runs': True}, 'pgle_profiling_runs is True; expected'),
    ({'pgle_save_steps': 0}, 'pgle_save_steps is 0; expected an integer'),
    ({'pgle_profile': 3}, 'pgle_profile is 3; expected the name of a file'),
    (
      {'pgle_save': 'runs/profile'},
      r"'runs/profile'; expected the name of a file that ends in \.pb",
    ),
    (
      {'pgle_profiling_runs': 3, 'pgle_aggregation_percentile': 101},
      r'pgle_aggregation_percentile is 101; expected an integer in \[0, 100\]',
    ),
    (
      {'pgle_aggregation_percentile': 85},
      'percentile is 85, config.xla.pgle_profiling_runs is 0. Nothing is',
    ),
    (
      {'pgle_profiling_runs': 3, 'pgle_profile': 'a.pb'},
      "pgle_profiling_runs is 3, config.xla.pgle_profile is 'a.pb'. Set one",
    ),
    (
      {'pgle_save': 'a.pb', 'pgle_profile': 'a.pb'},
      'pgle_save is for the first of two runs',
    ),
    (
      {'pgle_profiling_runs': 3, 'latency_hiding_scheduler': False},
      "'false' by config.xla.latency_hiding_scheduler and 'true' by config.xla",
    ),
    ({'flags': ['xla_dump_to']}, 'flags is .*; expected a dict'),
    ({'flags': {'--xla dump': 1}}, "config.xla.flags sets '--xla dump' to 1"),
    ({'flags': {'xla_dump_to': '/a b'}}, "sets 'xla_dump_to' to '/a b'"),
    ({'flags': {'xla_dump_to': None}}, "sets 'xla_dump_to' to None"),
    (
      {
        'latency_hiding_scheduler': True,
        'flags': {'--xla_gpu_enable_latency_hiding_scheduler': False},
      },
      "two values: 'true' by config.xla.latency_hiding_scheduler and"
      " 'false' by config.xla.flags",
    ),
    (
      {
        'pgle_save': 'a.pb',
        'flags': {'xla_gpu_enable_command_buffer': 'FUSION'},
      },
      "two values: '' by config.xla.pgle_save and 'FUSION' by config.xla.flags",
    ),
  ],
)
def test_what_no_run_can_mean_is_refused(changed, message):
  with pytest.raises(errors.UsageError, match=message):
    validate(**changed)


def test_the_same_value_from_two_places_is_one():
  validate(
    pgle_profiling_runs=1,
    latency_hiding_scheduler=True,
    flags={'--xla_gpu_enable_latency_hiding_scheduler': 1},
    tpu_flags={'xla_tpu_enable_latency_hiding_scheduler': 'True'},
  )


# What reaches JAX.


@pytest.mark.process
def test_flags_and_pgle_reach_jax_and_only_before_it_starts():
  # What is within quotes is a value, not a flag.
  quoted = '--xla_dump_to="/a --xla_force_host_platform_device_count=7"'
  said = run(
    """
import jax.numpy as jnp

options = dict(
  pgle_profiling_runs=2,
  pgle_aggregation_percentile=85,
  flags={'--xla_force_host_platform_device_count': 3, 'xla_gpu_ftz': True},
)
said['lines'] = attempt(**options)
said['flags'] = os.environ['XLA_FLAGS']
said['devices'] = jax.device_count()
said['again'] = attempt(**options)
said['too late'] = attempt(flags={'xla_cpu_ftz': False, 'xla_gpu_ftz': True})

# That JAX measures shows in its warning: on a CPU it finds no durations.
def times_measured(f):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    for _ in range(4):
      f(x)
  return len([w for w in caught if 'PGLE' in str(w.message)])

x = jnp.ones(3)
said['jitted'] = times_measured(jax.jit(jnp.tanh))
said['backend'] = xla.check_backend(DEFAULTS | options)
said['off'] = times_measured(jax.jit(jnp.sin))
said['percentile'] = jax.config.values['jax_pgle_aggregation_percentile']
""",
    XLA_FLAGS=f' --xla_cpu_ftz=false  --xla_gpu_ftz {quoted}',
  )
  added = (
    '--xla_gpu_enable_latency_hiding_scheduler=true',
    '--xla_force_host_platform_device_count=3',
  )
  before = f'--xla_cpu_ftz=false  --xla_gpu_ftz {quoted}'
  assert said['flags'] == ' '.join([before, *added])
  assert said['lines'] == [
    f'XLA_FLAGS: {added[0]} (config.xla.pgle_profiling_runs)',
    f'XLA_FLAGS: {added[1]} (config.xla.flags)',
    'JAX: jax_enable_pgle=True',
    'JAX: jax_pgle_profiling_runs=2',
    'JAX: jax_remove_custom_partitioning_ptr_from_cache_key=True',
    'JAX: jax_pgle_aggregation_percentile=85',
  ]
  assert said['devices'] == 3
  assert said['again'] == said['lines'][2:]  # Settings of JAX, as before.
  assert said['too late'] == []  # The user's own, which are there.
  assert said['jitted'] == 2
  assert said['percentile'] == 85
  (warning,) = said['backend']
  assert "pgle_profiling_runs has no effect: JAX runs on 'cpu'" in warning
  assert said['off'] == 0


@pytest.mark.process
def test_what_xla_would_die_of_is_an_error():
  said = run(
    """
said['unknown'] = attempt(
  flags={'xla_gpu_autotune_levl': 2, 'xla_cpu_ftz': True, 'xla_zzz': 1}
)
said['kind'] = attempt(flags={'xla_gpu_autotune_level': 'high'})
said['illegal'] = attempt(flags={'xla_gpu_enable_command_buffer': 'NONE'})
said['environment'] = attempt(latency_hiding_scheduler=True)
said['setting'] = attempt(pgle_profiling_runs=3, flags={'xla_gpu_ftz': True})
said['flags'] = os.environ['XLA_FLAGS']
os.environ['XLA_FLAGS'] = '/etc/flags'
said['file'] = attempt(flags={'xla_cpu_ftz': True})
os.environ['XLA_FLAGS'] = ''
xla._PROBE_SECS = 0.01
said['slow'] = attempt(flags={'xla_cpu_ftz': True})
os.environ['XLA_FLAGS'] = '--xla_cpu_ftz=true'
jax.devices()
said['too late'] = attempt(flags={'xla_gpu_ftz': True})
""",
    XLA_FLAGS='--xla_gpu_enable_latency_hiding_scheduler=false',
    JAX_PGLE_PROFILING_RUNS='5',
  )
  assert said['unknown'].startswith('UsageError: XLA (jaxlib')
  assert (
    'refuses the flags: Unknown flags in XLA_FLAGS: --xla_gpu_autotune_levl=2'
    ' --xla_zzz=1. XLA_FLAGS would be '
  ) in said['unknown']
  assert 'flags of libtpu go into config.xla.tpu_flags' in said['unknown']
  for message in said.values():
    assert '\n' not in message
  assert 'interpret value high for flag xla_gpu_autotune_level' in said['kind']
  assert 'Illegal value for --xla_gpu_enable_command_buffer' in said['illegal']
  assert said['environment'] == (
    'UsageError: The flag --xla_gpu_enable_latency_hiding_scheduler has two'
    " values: 'false' by the environment variable XLA_FLAGS and 'true' by"
    ' config.xla.latency_hiding_scheduler. Take one out.'
  )
  assert 'by config.xla.pgle_profiling_runs' in said['setting']
  # What is refused is not set.
  assert said['flags'] == '--xla_gpu_enable_latency_hiding_scheduler=false'
  assert 'the name of a file with flags' in said['file']
  # Hundreds of processes may load jaxlib at once from one file system.
  assert said['slow'] == [
    'XLA_FLAGS: what reads them took more than 0.01 s: they are not checked.',
    'XLA_FLAGS: --xla_cpu_ftz=true (config.xla.flags)',
  ]
  assert said['too late'].startswith('UsageError: config.xla needs')
  assert 'JAX has started' in said['too late']


def test_a_setting_of_jax_in_the_environment_is_not_overridden(monkeypatch):
  monkeypatch.setenv(
    'XLA_FLAGS', '--xla_gpu_enable_latency_hiding_scheduler=true'
  )
  monkeypatch.setenv('JAX_PGLE_PROFILING_RUNS', '5')
  with pytest.raises(
    errors.UsageError, match="'5' by the environment variable JAX_PG"
  ):
    xla.apply(options(pgle_profiling_runs=3))
  assert not jax.config.values['jax_enable_pgle']


def test_flags_of_libtpu():
  pytest.importorskip('libtpu')
  said = run("""
said['unknown'] = attempt(tpu_flags={'xla_tpu_enable_latency_hiding': True})
said['kind'] = attempt(
  tpu_flags={'xla_tpu_enable_latency_hiding_scheduler': 'maybe'}
)
said['good'] = attempt(
  latency_hiding_scheduler=True,
  tpu_flags={'xla_tpu_spmd_threshold_for_allgather_cse': 10000},
)
said['flags'] = os.environ['LIBTPU_INIT_ARGS']
said['devices'] = jax.device_count()
""")
  assert (
    'libtpu refuses the flags: Unknown command line flag'
    " 'xla_tpu_enable_latency_hiding'."
  ) in said['unknown']
  assert "Illegal value 'maybe' specified for flag 'xla_tpu" in said['kind']
  assert said['flags'].split() == [
    '--xla_tpu_enable_latency_hiding_scheduler=true',
    '--xla_tpu_spmd_threshold_for_allgather_cse=10000',
  ]
  assert len(said['good']) == 3


@pytest.mark.process
def test_without_libtpu_its_flags_are_passed_on_and_it_is_said():
  said = run(
    """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: (
  None if name == 'libtpu' else find_spec(name)
)
os.environ.pop('TPU_LIBRARY_PATH', None)
said['scheduler'] = attempt(latency_hiding_scheduler=True)
said['flags'] = attempt(
  tpu_flags={'xla_tpu_enable_async': True, 'xla_tpu_b': 'x'}
)
said['environ'] = os.environ['LIBTPU_INIT_ARGS']
""",
    LIBTPU_INIT_ARGS='-xla_tpu_b=x TPU_MEGACORE=MEGACORE_DENSE',
  )
  assert len(said['scheduler']) == 1  # Of XLA_FLAGS; this is no TPU machine.
  assert said['flags'] == [
    'LIBTPU_INIT_ARGS: libtpu is not installed here: they are not checked.',
    'LIBTPU_INIT_ARGS: --xla_tpu_enable_async=true (config.xla.tpu_flags)',
  ]
  assert said['environ'].split() == [
    '-xla_tpu_b=x',
    'TPU_MEGACORE=MEGACORE_DENSE',
    '--xla_tpu_enable_latency_hiding_scheduler=true',
    '--xla_tpu_enable_async=true',
  ]


def test_a_profile_that_xla_would_ignore_is_refused(tmp_path):
  with pytest.raises(
    errors.UsageError, match=r'does not exist. Make it with a run'
  ):
    xla.apply(options(pgle_profile=str(tmp_path / 'a.pb')))
  (tmp_path / 'a.profile').write_bytes(b'')
  with pytest.raises(errors.UsageError, match='XLA ignores any other'):
    xla.apply(options(pgle_profile=str(tmp_path / 'a.profile')))


def test_the_profile_is_a_flag_with_its_whole_path(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'a.pb').write_bytes(b'')
  with pytest.raises(
    errors.UsageError, match=f'path={tmp_path}/a.pb in XLA_FLAGS'
  ):
    xla.apply(options(pgle_profile='a.pb'))  # JAX has started.


# Traps.


def test_saving_a_profile_needs_a_gpu():
  with pytest.raises(
    errors.UsageError, match="but JAX runs on 'cpu', and only"
  ):
    xla.check_backend(options(pgle_save='a.pb'))


def test_a_profile_has_no_effect_without_a_gpu():
  (warning,) = xla.check_backend(options(pgle_profile='a.pb'))
  assert 'pgle_profile has no effect' in warning


@pytest.mark.usefixtures('compiles')
def test_what_a_compilation_cache_does_to_pgle_is_said(monkeypatch, tmp_path):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  for changed in ({'pgle_profiling_runs': 3}, {'pgle_profile': 'a.pb'}):
    assert xla.check_backend(options(**changed)) == []
  jax.config.update('jax_compilation_cache_dir', str(tmp_path))
  try:
    (warning,) = xla.check_backend(options(pgle_profiling_runs=3))
    assert f'{tmp_path} may hold programs that an earlier run' in warning
    (warning,) = xla.check_backend(options(pgle_profile='a.pb'))
    assert 'by its name, not by what is in it' in warning
    assert xla.check_backend(options(pgle_save='a.pb')) == []
  finally:
    jax.config.update('jax_compilation_cache_dir', None)


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
  train(action, 4)
  with pytest.raises(RuntimeError, match='There is no GPU in the profile of'):
    action.wait_to_finish()
  with pytest.raises(RuntimeError, match='There is no GPU in the profile of'):
    train(action, 1)
  assert not path.parent.exists()
  assert list(temporary.iterdir()) == []


def test_a_profile_is_of_the_steps_and_written_whole(
  tmp_path, temporary, monkeypatch
):
  path = tmp_path / 'runs' / 'a.pb'
  traces = []

  def extract(directory):
    (trace,) = pathlib.Path(directory).glob('*.xplane.pb')
    traces.append(events(trace))
    assert not path.exists()
    return b'profile'

  monkeypatch.setattr(profiler, 'get_profiled_instructions_proto', extract)
  monkeypatch.chdir(tmp_path)
  action = xla.ProfileSteps('runs/a.pb', 3, 2)
  os.chdir('/')  # A program may.
  train(action, 20, first=1000)  # A run that goes on.
  action.wait_to_finish()
  assert path.read_bytes() == b'profile'
  assert os.listdir(path.parent) == ['a.pb']
  assert list(temporary.iterdir()) == []
  (names,) = traces
  assert 'PjitFunction(<lambda>)' in names
  # Nothing is left running: another trace can be taken.
  with jax.profiler.trace(str(tmp_path / 'other')):
    pass


def events(trace):
  """Returns the names of what a trace holds."""
  data = jax.profiler.ProfileData.from_file(str(trace))
  return [
    event.name
    for plane in data.planes
    for line in plane.lines
    for event in line.events
  ]


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
  assert 'of the steps from 3 to 4' in record.message
  assert list(temporary.iterdir()) == []
  with jax.profiler.trace(str(tmp_path / 'other')):
    pass


def test_a_trace_beside_another_is_an_error(tmp_path, temporary):
  action = xla.ProfileSteps(str(tmp_path / 'a.pb'), 2, 1)
  with jax.profiler.trace(str(tmp_path / 'other')):
    with pytest.raises(RuntimeError, match='Only one profile'):
      train(action, 1)


def test_the_first_process_saves_the_profile(monkeypatch):
  wanted = options(pgle_save='a.pb', pgle_save_steps=4)
  (action,) = xla.actions(wanted)
  assert isinstance(action, xla.ProfileSteps)
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  assert xla.actions(wanted) == []
