"""Sets up a test environment that is stricter than production.

Tests run on two fake CPU devices, so everything that can cross devices does so
in every test. There is no implicit promotion of dtypes or ranks, and warnings
are errors (see pyproject.toml). Tests that need eight devices start a new
process, because the number of devices is fixed when JAX starts.
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
# The tests compile many small programs and run each of them a few times.
# Disabling fusion emitters saves a third of the compile time, and compiling in
# one part instead of up to 32 saves a further quarter. Set these flags only if
# they exist: JAX does not start with an unknown flag. Releases after 0.10 do
# not have the former, and the compiler for TPUs has neither.
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

# These modules have fixtures.
pytest_plugins = ['tests.buckets', 'tests.checkpoints', 'tests.survivors']

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')
# Most programs run only a few times, so optimizing them takes longer than
# running them. Processes that tests start optimize their programs as usual.
jax.config.update('jax_disable_most_optimizations', True)
# No test reads the source location that each compiled operation would get.
jax.config.update('jax_traceback_in_locations_limit', 0)


def pytest_configure(config: pytest.Config) -> None:
  """Prepares temporary directories, signals and flags.

  Temporary directories are in memory if it has room, because saves wait for the
  disk, which takes longer than many tests.

  Processes that tests start must receive SIGINT, but a job in the background of
  a shell ignores it and passes that on to its children.

  Code that reads flags must run without a command line.
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
def pytest_xdist_auto_num_workers() -> int:
  """Returns the number of processes; use `-n 0` to debug in this process."""
  known = hasattr(os, 'sched_getaffinity')  # Some systems lack it.
  cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
  return min(cores, 8) + 1  # Tests wait, for threads, files and processes.


def pytest_itemcollected(item: pytest.Item) -> None:
  """Refuses a test in two tiers: `-m process` would run slow tests."""
  tiers = {'process', 'slow'} & {mark.name for mark in item.iter_markers()}
  if len(tiers) > 1:
    raise pytest.UsageError(
      f'{item.nodeid} has the markers {sorted(tiers)}; keep only one'
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
  """Keeps the garbage collector away from the modules and tests.

  It would take a third of the time of collecting the tests, and 0.6 seconds
  each time a test calls it.
  """
  gc.disable()
  try:
    return (yield)
  finally:
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # Programs of JAX are many small objects.
    gc.enable()


@pytest.fixture(autouse=True, scope='session')
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
  """Keeps caches, for example of tokens, out of the user's home.

  A program that several tests compile in this process is compiled once. Each
  worker of pytest-xdist has a separate cache, because JAX does not write its
  files atomically. Processes that tests start use the cache of
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
  """Disables the compilation cache, for tests of compilation."""
  directory = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', None)
  compilation_cache.reset_cache()
  yield
  jax.config.update('jax_compilation_cache_dir', directory)
  compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def _no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
  """Forgets the in-memory checkpoints of earlier tests."""
  monkeypatch.setattr('jaxline.utils.GLOBAL_CHECKPOINT_DICT', {})


def _mount(path: pathlib.Path, *options: str) -> None:
  done = subprocess.run(
    ['mount', *options, str(path)], capture_output=True, text=True
  )
  if done.returncode:
    pytest.skip(f'Mounting needs root: {done.stderr}')


@pytest.fixture
def small_disk(
  tmp_path: pathlib.Path,
) -> Iterator[tuple[pathlib.Path, Callable[[str], Any]]]:
  """Mounts 1.5 MB; yields the directory and a function that remounts it."""
  folder = tmp_path / 'small'
  folder.mkdir()
  _mount(folder, '-t', 'tmpfs', '-o', 'size=1500k', 'tmpfs')
  yield folder, lambda option: _mount(folder, '-o', f'remount,{option}')
  subprocess.run(['umount', '-l', str(folder)], check=True)


@pytest.fixture
def read_only() -> Iterator[Callable[[pathlib.Path], None]]:
  """Yields a function that makes a directory read-only during a test."""
  mounted = []

  def protect(path: pathlib.Path) -> None:
    for options in (['--bind', str(path)], ['-o', 'remount,bind,ro']):
      _mount(path, *options)
      mounted.append(path)

  yield protect
  for path in set(mounted):
    subprocess.run(['umount', '-l', str(path)], check=True)
