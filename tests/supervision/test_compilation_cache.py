"""Compiled programs that are kept for the next start."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import base_config
from jaxline import platform
from jaxline.parallel import distributed
from jaxline.supervision import compilation_cache
from tests import remains
from tests.experiments import regression

pytestmark = pytest.mark.usefixtures('compiles')


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
  """The folder in the user's cache directory; every program is kept."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(compilation_cache, '_MIN_COMPILE_SECS', 0.0)
  return tmp_path / 'cache/jaxline/programs'


@pytest.fixture
def counts(monkeypatch):
  """Counts what JAX's cache finds ('hits') and keeps ('misses')."""
  found = {'hits': 0, 'misses': 0}

  def listen(event, **kwargs):
    for name in found:
      found[name] += event == f'/jax/compilation_cache/cache_{name}'

  jax.monitoring.register_event_listener(listen)
  yield found
  jax.monitoring.unregister_event_listener(listen)


def make_config(**values):
  config = base_config.get_base_config()
  config.update_from_flattened_dict(values)
  base_config.validate_config(config)
  return config


def double(x):
  return jnp.sin(x) * 2


def compiled():
  """Compiles and runs a program as a new process would."""
  x = np.arange(5, dtype=np.float32)
  with compilation_cache.of_run(make_config()):
    jax.clear_caches()
    try:
      return np.asarray(jax.jit(double)(x))
    finally:
      jax.clear_caches()


def program(directory):
  (path,) = directory.glob('jit_double-*-cache')
  return path


@pytest.mark.parametrize(
  ('variables', 'values', 'folder'),
  [
    ({}, {}, 'cache/jaxline/programs'),
    ({'XDG_CACHE_HOME': '', 'HOME': '{}'}, {}, '.cache/jaxline/programs'),
    ({}, {'compilation_cache': '{}/own'}, 'own'),
    ({}, {'compilation_cache': 'off'}, None),
    # Programs of different profiles have one key.
    ({}, {'compilation_cache': '{}/own', 'xla.pgle_profile': '/x.pb'}, None),
    # Without a directory, a run goes on.
    ({'XDG_CACHE_HOME': '{}/file'}, {}, None),
    ({'XDG_CACHE_HOME': '~nobody_of_that_name/x'}, {}, None),
  ],
)
def test_where_programs_are_kept(
  variables, values, folder, tmp_path, monkeypatch, caplog
):
  (tmp_path / 'file').write_text('in the way')
  for name, value in variables.items():
    monkeypatch.setenv(name, value.format(tmp_path))
  values = {name: value.format(tmp_path) for name, value in values.items()}
  with compilation_cache.of_run(make_config(**values)):
    used = jax.config.jax_compilation_cache_dir
  assert used == (folder and f'{tmp_path}/{folder}')
  assert jax.config.jax_compilation_cache_dir is None  # JAX is as it was.
  if folder:
    assert os.stat(used).st_mode & 0o777 == 0o700
  else:
    assert [*tmp_path.iterdir()] == [tmp_path / 'file']
  is_told = 'No compilation cache' in caplog.text
  assert is_told == (folder is None and not values)


def test_what_jax_was_told_counts(tmp_path, home, monkeypatch):
  own = {'jax_compilation_cache_dir': str(tmp_path / 'own')}
  with compilation_cache.configured(own):
    with compilation_cache.of_run(make_config()):
      assert jax.config.jax_compilation_cache_dir == str(tmp_path / 'own')
  assert not home.exists()
  name = 'jax_persistent_cache_min_compile_time_secs'
  monkeypatch.setenv(name.upper(), '7')
  before = getattr(jax.config, name)
  with compilation_cache.of_run(make_config()):
    assert getattr(jax.config, name) == before
    assert jax.config.jax_persistent_cache_enable_xla_caches == 'none'


@pytest.mark.filterwarnings('ignore:Error reading persistent compilation')
@pytest.mark.parametrize(
  ('damage', 'was_killed'), [('flip', False), ('cut', True)]
)
def test_a_damaged_entry_is_compiled_again_once(
  home, counts, caplog, damage, was_killed
):
  first = compiled()
  path = program(home)
  whole = path.read_bytes()
  flipped = bytearray(whole)
  flipped[len(whole) // 2] ^= 1
  path.write_bytes(bytes(flipped) if damage == 'flip' else whole[:-100])
  if was_killed:  # Between the entry and its time.
    path.with_name(path.name.replace('-cache', '-atime')).unlink()
  assert compiled().tobytes() == first.tobytes()
  assert f'{path} is damaged' in caplog.text
  caplog.clear()
  compiled()  # Without the entry.
  counts.update(hits=0, misses=0)
  assert compiled().tobytes() == first.tobytes()
  assert counts['misses'] == 0
  assert counts['hits'] >= 1
  assert not caplog.text


def test_the_entries_used_least_recently_are_removed(home, monkeypatch):
  """Those of a cache, too, that JAX has filled without a limit."""
  compiled()
  kept = lambda: sum(path.stat().st_size for path in home.glob('*-cache'))
  size = kept()
  old = program(home)
  for path in home.glob('*-atime'):
    path.unlink()
  notes = home / 'notes.txt'
  notes.write_bytes(bytes(10_000))
  monkeypatch.setattr(compilation_cache, 'MAX_BYTES', size + 100)
  with compilation_cache.of_run(make_config()):
    jax.jit(lambda x: jnp.cos(x) * 3)(np.arange(5, dtype=np.float32))
  assert not old.exists()
  assert 0 < kept() <= size + 100
  assert notes.exists()


def test_a_run_that_starts_again_compiles_nothing_again(tmp_path, counts):
  """And computes the same bits as one without a cache, donated or not."""

  def run(name, cache='auto'):
    config = regression.get_run_config(4, save=2, evaluation=2)
    config.checkpoint_dir = str(tmp_path / name)
    config.compilation_cache, config.console = cache, 'off'
    counts.update(hits=0, misses=0)
    jax.clear_caches()
    platform.start(regression.Regression, config, 'train_and_eval')
    records = remains.curve(tmp_path / name, 'train')
    return [x['loss'] for x in records if 'loss' in x], *counts.values()

  off, cold, warm = run('off', 'off'), run('cold'), run('warm')
  assert len(off[0]) == 4
  assert off[0] == cold[0] == warm[0]
  assert off[1:] == (0, 0)
  assert cold[2] > 5
  assert warm[1:] == (cold[2], 0)


@pytest.mark.parametrize('is_shared', [True, False])
def test_processes_that_do_not_share_a_cache_are_warned(
  is_shared, home, monkeypatch, caplog
):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  decide = lambda own, choose, **unused: choose([True, own])
  monkeypatch.setattr(distributed, 'gather_and_decide', decide)
  of_0 = lambda name: 'programs' if is_shared else name  # It has made a file.
  monkeypatch.setattr(distributed, 'broadcast_from_process_0', of_0)
  (home / 'programs').mkdir(parents=True)
  with compilation_cache.of_run(make_config()):
    used = jax.config.jax_compilation_cache_dir
  assert used == (str(home) if is_shared else None)
  assert ('the processes do not share' in caplog.text) != is_shared
