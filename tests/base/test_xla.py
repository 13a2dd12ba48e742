"""Tests of jaxline.base.xla: real processes that start JAX with the flags."""

import json
import os

from ml_collections import config_dict
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline.base import xla
from tests import processes

DEFAULTS = base_config.get_base_config().xla.to_dict()
SCHEDULER = 'xla_gpu_enable_latency_hiding_scheduler'
COMMAND_BUFFER = 'xla_gpu_enable_command_buffer'

HEADER = f"""
import json, os, warnings
import jax

from jaxline.base import xla
from jaxline.parallel import distributed
from tests import processes

DEFAULTS = {DEFAULTS}

said = {{}}
"""


def run(code, **environ):
  """Runs a program that fills `said`; returns that."""
  code = f'{HEADER}{code}\nprint(json.dumps(said))'
  done = processes.run('-c', code, JAX_PLATFORMS='cpu', **environ)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def options(**changed):
  return DEFAULTS | changed


def test_a_recorded_flag_names_no_place():
  kept = {
    'xla_gpu_enable_command_buffer': '',
    '--xla_cpu_enable_fast_math': False,
    'xla_gpu_autotune_level': 4,
    'xla_gpu_hlo_profile': True,
    'xla_gpu_disable_passes': 'a-b,c.d',
    'xla_gpu_enable_pipelined_host_offloading': 'true',
  }
  names = (
    'xla_dump_to --xla_dump_to xla_gpu_cuda_data_dir xla_gpu_kernel_cache_file'
    ' xla_gpu_target_config_filename xla_gpu_load_autotune_results_from'
    ' xla_gpu_pgle_profile_file_or_directory_path xla_gpu_asm_extra_flags'
    ' xla_backend_extra_options flagfile'
  )
  places = dict.fromkeys(names.split(), 1)
  places |= {'xla_a': '/x', 'xla_b': '1 --xla_dump_to=x', 'xla_c': ('x',)}
  places['xla_d=1 --xla_dump_to'] = 'x'
  recorded = config_dict.ConfigDict(options(flags=kept | places))
  assert {*xla.drop_places(recorded)} == {*places}
  assert recorded.flags.to_dict() == kept


def test_the_defaults_set_nothing():
  assert xla.apply(DEFAULTS, has_started=True) == []  # JAX has started.


@pytest.mark.parametrize(
  ('changed', 'flags', 'tpu_flags'),
  [
    ({'pgle_save': 'a.pb'}, f'--{SCHEDULER}=true --{COMMAND_BUFFER}=', ''),
    (
      {
        'latency_hiding_scheduler': True,
        'flags': {f'--{SCHEDULER}': False, 'xla_dump_to': '/x'},
        'tpu_flags': {'xla_tpu_x': 3},
      },
      f'--{SCHEDULER}=false --xla_dump_to=/x',
      '--xla_tpu_enable_latency_hiding_scheduler=true --xla_tpu_x=3',
    ),
  ],
)
def test_the_flags_of_each_key(changed, flags, tpu_flags, monkeypatch):
  for name in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS'):
    monkeypatch.setenv(name, '')
  xla.apply(options(**changed), has_started=False)
  assert os.environ['XLA_FLAGS'] == flags
  assert os.environ['LIBTPU_INIT_ARGS'] == tpu_flags


def test_the_place_of_a_profile_is_absolute(tmp_path, monkeypatch):
  """The program may change its directory before it compiles."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('XLA_FLAGS', '')
  profile = options(pgle_profile='a.pb')
  with pytest.raises(errors.UsageError, match='pgle_profile'):
    xla.apply(profile, has_started=False)
  (tmp_path / 'a.pb').touch()
  xla.apply(profile, has_started=False)
  assert os.environ['XLA_FLAGS'].endswith(f'={tmp_path}/a.pb')


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
assert not distributed.has_started()
said['lines'] = xla.apply(options, has_started=False)
said['flags'] = os.environ['XLA_FLAGS']
said['tpu_flags'] = os.environ['LIBTPU_INIT_ARGS']
said['devices'] = jax.device_count()
said['again'] = xla.apply(options, has_started=True)  # Nothing is missing.
try:
  xla.apply(
    DEFAULTS | dict(flags={'xla_cpu_ftz': True}),
    has_started=distributed.has_started(),
  )
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
