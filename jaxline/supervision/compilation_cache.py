"""JAX's compilation cache, on by default: `config.compilation_cache`.

A restarted run takes its compiled programs from the user's cache directory.
JAX's key of a program covers everything that goes into it: the computation, the
version of jaxlib, the flags of XLA and the devices. A hit is therefore the same
machine code, and its results have the same bits.

JAX writes an entry in place and never again. If it cannot read an entry, it
warns and compiles, at every start. So a run deletes what it finds damaged.
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
from jax._src import compilation_cache as jax_cache  # Nothing public reads.
from jax.experimental.compilation_cache import compilation_cache

from jaxline.base import disk
from jaxline.base import xla
from jaxline.base.keys import Key, text
from jaxline.parallel import distributed

# All entries in a directory together.
MAX_BYTES = 4 << 30
# Programs that compile faster are not kept: to read one takes 10 ms.
_MIN_COMPILE_SECS = 0.1
_LOCK_SECS = 10.0

KEYS = (
  Key('compilation_cache', 'auto', text(
        "'auto', 'off', or a directory with '/'", r'auto|off|.*/.*',
        is_path=True),
      'Where compiled programs are kept for the next start. `auto` is at most 4'
      " GiB in the user's cache directory. A cache that JAX was given comes"
      ' first; with PGLE there is none.'),
)  # fmt: skip


@contextlib.contextmanager
def of_run(config: Any) -> Iterator[None]:
  """Uses the cache that a config asks for; all processes call it together.

  A directory that the user has given to JAX itself stays, and so does a cache
  that is switched off there.
  """
  path = _path(config)
  # A process that finds a program does not take part in autotuning it, and the
  # GPUs of the processes that compile it would wait for that for ever.
  is_shared = jax.process_count() == 1 or _is_shared(path)
  if path is not None and not is_shared:
    logging.warning(
      'No compilation cache: the processes do not share %s. Set'
      ' config.compilation_cache to a directory that all of them see.',
      path,
    )
  if path is None or not is_shared:
    yield
    return
  settings = {
    'jax_compilation_cache_dir': str(path),
    # To limit the size, JAX writes when it reads.
    'jax_compilation_cache_max_size': (
      MAX_BYTES if os.access(path, os.W_OK) else -1
    ),
    'jax_persistent_cache_min_compile_time_secs': _MIN_COMPILE_SECS,
    # XLA writes these files for GPUs: a full disk would fail the compilation,
    # and the directory's name would be part of a program's key.
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
  """Sets JAX's options of the compilation cache while inside."""
  with contextlib.ExitStack() as stack:
    # JAX reads its settings only when it compiles for the first time.
    stack.callback(compilation_cache.reset_cache)
    for key, value in settings.items():
      stack.callback(jax.config.update, key, getattr(jax.config, key))
      jax.config.update(key, value)
    compilation_cache.reset_cache()
    yield


def _path(config: Any) -> pathlib.Path | None:
  """Returns the directory to use, which exists; None for no cache."""
  value = config.compilation_cache
  if (
    value == 'off'
    or jax.config.values['jax_compilation_cache_dir'] is not None
    or not jax.config.values['jax_enable_compilation_cache']
    # Programs that were compiled with another profile have the same key.
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
      'No compilation cache, so that every start compiles: %s. Set'
      " config.compilation_cache to a directory of yours, or to 'off'.",
      e,
    )
    return None


def _is_shared(path: pathlib.Path | None) -> bool:
  """Returns whether all processes have one directory and see the same files."""
  name = f'.shared-{os.urandom(8).hex()}'
  with contextlib.ExitStack() as stack:
    if path is not None and jax.process_index() == 0:
      with contextlib.suppress(OSError):
        (path / name).touch()
        stack.callback((path / name).unlink, missing_ok=True)
    name = distributed.broadcast_from_process_0(
      name
    )  # After the file is there.
    is_seen = path is not None and (path / name).exists()
    return distributed.gather_and_decide(is_seen, all, series='cache')


def _remove_damaged(path: pathlib.Path, since: float) -> None:
  """Removes entries that JAX cannot read: of those used after a time, in s.

  And of those without a time, which a killed process has left: because of one
  of these JAX would fail to remove the oldest entries.
  """
  with contextlib.suppress(OSError, filelock.Timeout):
    # JAX holds this lock while it reads or writes.
    with filelock.FileLock(path / '.lockfile', timeout=_LOCK_SECS):
      for entry in path.glob('*-cache'):
        used = entry.with_name(f'{entry.name.removesuffix("cache")}atime')
        if used.exists() and used.stat().st_mtime < since:
          continue
        try:
          jax_cache.decompress_executable(entry.read_bytes())
          used.touch()
        except Exception as e:  # Each way to compress has its own.
          logging.warning('%s is damaged (%r), and is removed.', entry, e)
          entry.unlink()
