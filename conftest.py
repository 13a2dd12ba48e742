"""A test environment harsher than production.

Two fake CPU devices, so that everything that crosses devices does so in every
test; no silent promotion of dtypes or ranks; every warning is an error (see
pyproject.toml). Tests that are about eight devices start their own process:
the number of devices is fixed when JAX starts.
"""

from collections.abc import Callable, Iterator
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'
# The tests compile many small programs and run each a few times. Without fusion
# emitters that takes a third less, and in one part instead of up to 32 another
# quarter less. Later releases have no flag for the former, nor has the compiler
# for TPUs either, and none starts with one that it does not know.
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_force_host_platform_device_count=2',
    *(
      [
        '--xla_cpu_use_fusion_emitters=false',
        '--xla_cpu_parallel_codegen_split_count=1',
      ]
      if importlib.metadata.version('jax').startswith('0.10.')
      and importlib.util.find_spec('libtpu') is None
      else []
    ),
  ]
)

from absl import flags
import jax
from jax.experimental.compilation_cache import compilation_cache
import pytest

# Their fixtures.
pytest_plugins = ['tests.buckets', 'tests.checkpoints', 'tests.survivors']

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')
# Most programs run a few times only: to optimize them takes longer than to run
# them. The programs that tests start as processes are optimized as in use.
jax.config.update('jax_disable_most_optimizations', True)


def pytest_configure(config: pytest.Config) -> None:
  """Lets code that reads flags run without a command line.

  And lets the programs that tests start hear signals: those of a job in a
  shell's background inherit that SIGINT is ignored.

  Temporary directories are in memory where it has room: saves wait for the
  disk, for longer than many a test runs.
  """
  del config
  memory = '/dev/shm'
  if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30:
    os.environ.setdefault('PYTEST_DEBUG_TEMPROOT', memory)
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
  """Returns how many processes run tests; `-n 0` runs all in one, for pdb."""
  known = hasattr(os, 'sched_getaffinity')  # Not on every system.
  cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
  # Tests of this tier often wait for a process that waits itself.
  return min(cores, 8) + (config.option.markexpr == 'process')


def pytest_itemcollected(item: pytest.Item) -> None:
  """Refuses a test of two tiers: `-m process` would run what is slow."""
  tiers = {'process', 'slow'} & {mark.name for mark in item.iter_markers()}
  if len(tiers) > 1:
    raise pytest.UsageError(
      f'{item.nodeid} is marked {sorted(tiers)}: keep one'
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
  """Keeps the garbage collector from visiting the modules and tests.

  It would take a third of the time of their collection, and 0.6 seconds
  whenever a test calls it.
  """
  gc.disable()
  try:
    return (yield)
  finally:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope='session')
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
  """Keeps what is cached, such as tokens, out of the user's home.

  A program that several tests compile in this process is compiled once. Each
  worker of pytest-xdist keeps its own, because JAX does not write these files
  in one step. The programs that tests start have the cache of
  `config.compilation_cache` below XDG_CACHE_HOME.
  """
  jax.config.update(
    'jax_compilation_cache_dir', str(tmp_path_factory.mktemp('programs'))
  )
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
    yield


@pytest.fixture
def compiles() -> Iterator[None]:
  """Compiles each program of a test anew, for tests that are about that."""
  directory = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', None)
  compilation_cache.reset_cache()
  yield
  jax.config.update('jax_compilation_cache_dir', directory)
  compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def _no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
  """Forgets the checkpoints in memory of the tests before."""
  monkeypatch.setattr('jaxline.utils.GLOBAL_CHECKPOINT_DICT', {})


def _mount(path: pathlib.Path, *options: str) -> None:
  done = subprocess.run(
    ['mount', *options, str(path)], capture_output=True, text=True
  )
  if done.returncode:
    pytest.skip(f'Only root can make a mount: {done.stderr}')


@pytest.fixture
def small_disk(
  tmp_path: pathlib.Path,
) -> Iterator[tuple[pathlib.Path, Callable[[str], Any]]]:
  """A file system of 1.5 MB, as (directory, function that remounts it)."""
  folder = tmp_path / 'small'
  folder.mkdir()
  _mount(folder, '-t', 'tmpfs', '-o', 'size=1500k', 'tmpfs')
  yield folder, lambda option: _mount(folder, '-o', f'remount,{option}')
  subprocess.run(['umount', '-l', str(folder)], check=True)


@pytest.fixture
def read_only() -> Iterator[Callable[[pathlib.Path], None]]:
  """Makes directories such that nothing can be written in them, for a test."""
  mounted = []

  def protect(path: pathlib.Path) -> None:
    for options in (['--bind', str(path)], ['-o', 'remount,bind,ro']):
      _mount(path, *options)
      mounted.append(path)

  yield protect
  for path in set(mounted):
    subprocess.run(['umount', '-l', str(path)], check=True)
