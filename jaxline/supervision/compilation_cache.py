"""Sets up JAX's compilation cache, by `config.compilation_cache`.

The cache is on by default: a restarted run reads its compiled programs from the
user's cache directory. JAX's key of a program covers everything that affects
it: the computation, the version of jaxlib, the flags of XLA and the devices. So
a hit is the same machine code, and its results have the same bits.

JAX writes an entry in place, and only once. If it cannot read an entry, it
warns and compiles at every start. So a run deletes damaged entries.
"""

from collections.abc import Iterator, Mapping
import contextlib
import math
import os
import pathlib
import time
from typing import Any

from absl import logging
import filelock
import jax
from jax._src import compilation_cache as jax_cache  # It reads entries.
from jax.experimental.compilation_cache import compilation_cache

from jaxline.base import disk
from jaxline.base import xla
from jaxline.base.keys import Key, text
from jaxline.parallel import distributed

# The limit of the entries in a directory.
MAX_BYTES = 4 << 30
# Programs that compile faster are not cached, since a read takes 10 ms.
_MIN_COMPILE_SECS = 0.1
_LOCK_SECS = 10.0
# The beginnings of an entry. JAX takes zstd where it is installed, else zlib.
_ZSTD, _ZLIB = b'\x28\xb5\x2f\xfd', b'x\x9c'

KEYS = (
  Key('compilation_cache', 'auto', text(
        "'auto', 'off', or a directory with '/'", r'auto|off|.*/.*',
        is_path=True),
      'Directory of compiled programs for the next start. `auto` keeps up to 4'
      " GiB in the user's cache directory. A cache that is set in JAX takes"
      ' precedence. With PGLE there is no cache.'),
)  # fmt: skip


@contextlib.contextmanager
def of_run(config: Any) -> Iterator[None]:
  """Uses the cache that a config asks for; all processes call it together.

  If you have set a cache directory in JAX or disabled the cache there, this
  does not change.
  """
  path = _path(config)
  # A process with a hit skips autotuning, and the GPUs of processes that
  # compile the program would wait for it forever.
  is_shared = jax.process_count() == 1 or _is_shared(path)
  if path is not None and not is_shared:
    logging.warning(
      'No compilation cache: the processes do not share %s. Set'
      ' config.compilation_cache to a directory on a shared file system.',
      path,
    )
  if path is None or not is_shared:
    yield
    return
  settings = {
    'jax_compilation_cache_dir': str(path),
    # To apply a limit, JAX writes when it reads: a read-only cache has none.
    'jax_compilation_cache_max_size': (
      MAX_BYTES if os.access(path, os.W_OK) else -1
    ),
    'jax_persistent_cache_min_compile_time_secs': _MIN_COMPILE_SECS,
    # These are XLA's files for GPUs: on a full disk they would fail the
    # compilation, and the directory's name would be part of a program's key.
    'jax_persistent_cache_enable_xla_caches': 'none',
  }
  settings = {k: x for k, x in settings.items() if k.upper() not in os.environ}

  _remove_damaged(path, since=math.inf)
  began = time.time()
  try:
    with configured(settings):
      yield
  finally:
    _remove_damaged(path, began)


@contextlib.contextmanager
def configured(settings: Mapping[str, Any]) -> Iterator[None]:
  """Within this context, sets JAX's options of the compilation cache."""
  with contextlib.ExitStack() as stack:
    # JAX reads these settings only at its first compilation.
    stack.callback(compilation_cache.reset_cache)
    for key, value in settings.items():
      stack.callback(jax.config.update, key, getattr(jax.config, key))
      jax.config.update(key, value)
    compilation_cache.reset_cache()
    yield


def _path(config: Any) -> pathlib.Path | None:
  """Returns the directory of the cache, which exists; None for no cache."""
  value = config.compilation_cache
  if (
    value == 'off'
    or jax.config.values['jax_compilation_cache_dir'] is not None
    or not jax.config.values['jax_enable_compilation_cache']
    # Programs that were compiled with different profiles share a key.
    or xla.uses_pgle(config.xla)
  ):
    return None
  try:
    if value == 'auto':
      base = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
      path = pathlib.Path(base).expanduser() / 'jaxline' / 'programs'
    else:
      disk.check_local(value, 'config.compilation_cache')
      path = pathlib.Path(value).absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
  except (OSError, RuntimeError) as e:  # There may be no home directory.
    logging.warning(
      'No compilation cache, so every start compiles: %s. Set'
      " config.compilation_cache to a directory that you can write, or 'off'.",
      e,
    )
    return None


def _is_shared(path: pathlib.Path | None) -> bool:
  """Returns whether all processes share one directory."""
  name = f'.shared-{os.urandom(8).hex()}'
  with contextlib.ExitStack() as stack:
    if path is not None and jax.process_index() == 0:
      with contextlib.suppress(OSError):
        (path / name).touch()
        stack.callback((path / name).unlink, missing_ok=True)
    # Process 0 has made the file.
    name = distributed.broadcast_from_process_0(name)
    is_seen = path is not None and (path / name).exists()
    return distributed.gather_and_decide(is_seen, all, series='cache')


def _remove_damaged(path: pathlib.Path, since: float) -> None:
  """Removes entries that JAX cannot read, if used after `since` (in s).

  It checks entries without a time of use too, which a killed process leaves.
  One of them would keep JAX from removing the oldest entries.
  """
  ours = jax_cache.compress_executable(b'')
  theirs = _ZLIB if ours.startswith(_ZSTD) else _ZSTD
  with contextlib.suppress(OSError, filelock.Timeout):
    # JAX holds this lock while it reads or writes.
    with filelock.FileLock(path / '.lockfile', timeout=_LOCK_SECS):
      for entry in path.glob('*-cache'):
        used = entry.with_name(f'{entry.name.removesuffix("cache")}atime')
        if used.exists() and used.stat().st_mtime < since:
          continue
        try:
          if not (raw := entry.read_bytes()).startswith(theirs):
            jax_cache.decompress_executable(raw)
            used.touch()
        except Exception as e:  # Errors depend on the kind of compression.
          logging.warning('%s is damaged and is removed: %r', entry, e)
          entry.unlink()
