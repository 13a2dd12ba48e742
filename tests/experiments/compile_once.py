"""A fixture for test modules whose tests share programs."""

import jax
from jax.experimental.compilation_cache import compilation_cache
import pytest


@pytest.fixture(autouse=True, scope='module')
def shared_programs(tmp_path_factory):
  """Compiles a program that many tests share only once."""
  values = {
    'jax_compilation_cache_dir': str(tmp_path_factory.mktemp('programs')),
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
  }
  before = {name: jax.config.values[name] for name in values}
  for name, value in values.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
