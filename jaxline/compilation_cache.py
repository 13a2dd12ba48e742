"""JAX's compilation cache, on by default: `config.compilation_cache`.

A restarted run takes its compiled programs from the user's cache directory.
JAX's key of a program covers everything that goes into it: the computation, the
version of jaxlib, the flags of XLA and the devices. A hit is therefore the same
machine code, and its results have the same bits.

JAX's own store writes an entry in place and never again, so that a full disk or
the end of the process leaves a damaged one for ever, and it limits the size
only with another package. `Files` replaces it. If it fails, JAX warns and
compiles.
"""

from collections.abc import Iterator, Mapping
import contextlib
import hashlib
import os
import pathlib
from typing import Any
from unittest import mock

from absl import logging
import jax
from jax._src import compilation_cache as jax_cache
from jax.experimental.compilation_cache import compilation_cache

from jaxline import disk
from jaxline import distributed
from jaxline import xla
from jaxline.keys import Key, text

# All entries in a directory together.
MAX_BYTES = 4 << 30
# Programs that compile faster are not kept: to read one takes 10 ms.
_MIN_COMPILE_SECS = 0.1
_SUFFIX = '.program'
_DIGEST_BYTES = hashlib.sha256().digest_size

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
  """Uses the cache that a config asks for, while inside.

  A directory that the user has given to JAX itself (JAX_COMPILATION_CACHE_DIR,
  `jax_compilation_cache_dir`) stays, and so does a cache that is switched off
  there. All processes of a run must call it together.

  Args:
    config: the run's, complete and validated.
  """
  path = _path(config)
  if jax.process_count() > 1 and not _is_shared(path):
    # A process that finds a program does not take part in autotuning it, and
    # the GPUs of the processes that compile it would wait for that for ever.
    if path is not None:
      logging.warning(
        'No compilation cache: the processes do not share %s. Set'
        ' config.compilation_cache to a directory that all of them see.',
        path,
      )
    path = None
  if path is None:
    yield
    return
  settings = {
    'jax_compilation_cache_dir': str(path),
    'jax_persistent_cache_min_compile_time_secs': _MIN_COMPILE_SECS,
    # XLA writes these files for GPUs: a full disk would fail the compilation,
    # and the directory's name would be part of a program's key.
    'jax_persistent_cache_enable_xla_caches': 'none',
  }
  settings = {k: x for k, x in settings.items() if k.upper() not in os.environ}

  def get_file_cache(path: str) -> Any:
    return Files(pathlib.Path(path)), path

  # There is no public way to give JAX a store.
  with mock.patch.object(jax_cache, 'get_file_cache', get_file_cache):
    with configured(settings):
      yield


@contextlib.contextmanager
def configured(settings: Mapping[str, Any]) -> Iterator[None]:
  """Sets JAX's options of the compilation cache while inside."""
  before = {key: getattr(jax.config, key) for key in settings}
  _configure(settings)
  try:
    yield
  finally:
    _configure(before)


def _configure(settings: Mapping[str, Any]) -> None:
  # JAX reads its settings only when it compiles for the first time.
  compilation_cache.reset_cache()
  for key, value in settings.items():
    jax.config.update(key, value)


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
  token = f'.shared-{os.urandom(8).hex()}'
  is_chief = jax.process_index() == 0
  if path is not None and is_chief:
    with contextlib.suppress(OSError):
      (path / token).touch()
  token = distributed.of_chief(token)  # After the file is there.
  is_seen = path is not None and (path / token).exists()
  all_see = distributed.decide(is_seen, all, series='cache')
  if path is not None and is_chief:
    with contextlib.suppress(OSError):
      (path / token).unlink()
  return all_see


class Files:
  """Keeps the entries of JAX's compilation cache as files in a directory.

  An entry is renamed when it is whole, has a checksum, and is removed if the
  checksum is wrong. Beyond MAX_BYTES, the least recently used are removed.
  """

  def __init__(self, path: pathlib.Path):
    """Makes the store; the directory exists."""
    self._path = path  # JAX reads it.

  def get(self, key: str) -> bytes | None:
    """Returns an entry; None if there is no whole one."""
    path = self._file(key)
    try:
      data = path.read_bytes()
    except FileNotFoundError:
      return None
    value = data[_DIGEST_BYTES:]
    if hashlib.sha256(value).digest() != data[:_DIGEST_BYTES]:
      logging.warning('%s is damaged, and is compiled again.', path)
      path.unlink(missing_ok=True)
      return None
    with contextlib.suppress(OSError):  # The directory may be read-only.
      os.utime(path)  # It is recently used.
    return value

  def put(self, key: str, value: bytes) -> None:
    """Writes an entry, after removing old ones that leave no space for it."""
    self._remove_oldest(MAX_BYTES - len(value))
    # The step would wait for the disk. The checksum finds a cut entry.
    with disk.replacing(self._file(key), sync=False) as file:
      file.write(hashlib.sha256(value).digest() + value)

  def _file(self, key: str) -> pathlib.Path:
    return self._path / f'{key}{_SUFFIX}'

  def _remove_oldest(self, limit: int) -> None:
    """Removes the least recently used files until all fit into `limit`."""
    found = []
    for path in self._path.glob(f'*{_SUFFIX}*'):  # And what kills left.
      with contextlib.suppress(OSError):  # Another process removes it.
        status = path.stat()
        found.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
      if total <= limit:
        break
      path.unlink(missing_ok=True)
      total -= size
