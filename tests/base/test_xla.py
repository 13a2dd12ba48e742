"""Tests of jaxline.base.xla: which flags each key sets, and when."""

import os

import jax
from ml_collections import config_dict
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline.base import xla

DEFAULTS = base_config.get_base_config().xla.to_dict()
SCHEDULER = 'xla_gpu_enable_latency_hiding_scheduler'


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
  recorded = config_dict.ConfigDict(DEFAULTS | {'flags': kept | places})
  assert {*xla.drop_places(recorded)} == {*places}
  assert recorded.flags.to_dict() == kept


@pytest.fixture
def apply(monkeypatch):
  """Applies some keys; returns the lines that are logged."""

  def apply(has_started=False, **changed):
    return xla.apply(DEFAULTS | changed, has_started=has_started)

  for name in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS'):
    monkeypatch.setenv(name, '')
  return apply


def test_the_flags_of_each_key(apply):
  apply(
    latency_hiding_scheduler=False,
    pgle_save='a.pb',  # It needs the scheduler on GPUs.
    flags={'xla_dump_to': '/x'},
    tpu_flags={'xla_tpu_x': 3},
  )
  assert os.environ['XLA_FLAGS'] == (
    f'--{SCHEDULER}=true --xla_gpu_enable_command_buffer= --xla_dump_to=/x'
  )
  assert os.environ['LIBTPU_INIT_ARGS'] == (
    '--xla_tpu_enable_latency_hiding_scheduler=false --xla_tpu_x=3'
  )


def test_the_place_of_a_profile_is_absolute(tmp_path, monkeypatch, apply):
  """The program may change its directory before it compiles."""
  monkeypatch.chdir(tmp_path)
  with pytest.raises(errors.UsageError, match='pgle_profile'):
    apply(pgle_profile='a.pb')
  (tmp_path / 'a.pb').touch()
  apply(pgle_profile='a.pb', flags={f'--{SCHEDULER}': False})
  assert os.environ['XLA_FLAGS'] == (
    f'--{SCHEDULER}=false --xla_gpu_pgle_profile_file_or_directory_path='
    f'{tmp_path}/a.pb'
  )


def test_what_the_shell_gives_stays_and_nothing_changes_later(
  monkeypatch, apply
):
  given = '--xla_cpu_ftz=false  --xla_dump_to="/a  b"'
  monkeypatch.setenv('XLA_FLAGS', given)
  flags = {'--xla_force_host_platform_device_count': 3, 'xla_gpu_ftz': True}
  added = '--xla_force_host_platform_device_count=3 --xla_gpu_ftz=true'
  assert apply(flags=flags) == [f'XLA_FLAGS: {added}']
  assert os.environ['XLA_FLAGS'] == f'{given} {added}'
  # After JAX has started, only what is missing is refused.
  assert apply(has_started=True) == apply(has_started=True, flags=flags) == []
  with pytest.raises(errors.UsageError, match='--xla_cpu_ftz=true in XLA_F'):
    apply(has_started=True, flags={'xla_cpu_ftz': True})


def test_automatic_pgle_is_set_in_jax(monkeypatch, apply):
  changed = {}
  monkeypatch.setattr(xla.jax.config, 'update', changed.__setitem__)
  lines = apply(pgle_profiling_runs=2, pgle_aggregation_percentile=85)
  assert lines[0] == f'XLA_FLAGS: --{SCHEDULER}=true'
  assert lines[1:] == [f'JAX: {name}={x}' for name, x in changed.items()]
  assert changed == {
    'jax_enable_pgle': True,
    'jax_pgle_profiling_runs': 2,
    'jax_remove_custom_partitioning_ptr_from_cache_key': True,
    'jax_pgle_aggregation_percentile': 85,
  }
  assert changed.keys() <= jax.config.values.keys()
