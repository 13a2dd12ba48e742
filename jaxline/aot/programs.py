"""Compiled programs, kept on disk for runs that would compile the same.

A directory holds XLA's own bytes of each program, as JAX's compilation cache
writes and reads them (nothing is pickled), and `programs.json`: what they are
for. JAX itself decides whether a program is the one that a run needs, by a hash
of all that goes into it; `programs.json` is there to say why not.

A program is machine code: use only directories that you trust as you trust the
programs you start.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import hashlib
import json
import os
import pathlib
import re
import tempfile
import threading
from typing import Any

from absl import logging
import jax
import jaxlib
from ml_collections import config_dict

from jaxline import base_config
from jaxline import compilation_cache
from jaxline import errors
from jaxline import xla
from jaxline.checkpoint import files
from jaxline.supervision import nonfinite

RECORD = 'programs.json'
_SCHEMA = 1
_SUFFIX = '-cache'
# The keys that decide which program a step becomes, apart from the code itself.
# What `config.xla` sets is in XLA_FLAGS and LIBTPU_INIT_ARGS.
_KEYS = {'experiment_class', 'experiment_kwargs'} | {
  key.name
  for key in base_config.KEYS
  if key.effect == base_config.PROGRAM
  and '.' not in key.name
  and key.name != 'xla'
}
# Flags that change nothing in the program, and no hash of JAX's.
_NEUTRAL_FLAGS = ('--xla_dump', '--xla_force_host_platform_device_count')
_HIT = '/jax/compilation_cache/cache_hits'
_SAVED_SECS = '/jax/compilation_cache/compile_time_saved_sec'
_COMPILED = '/jax/core/compile/backend_compile_duration'


def identity(
  config: config_dict.ConfigDict, devices: Sequence[Any]
) -> dict[str, Any]:
  """Returns the values on which a run's programs depend, for `programs.json`.

  Args:
    config: the run's.
    devices: those that it runs on, or is compiled for.
  """
  kinds = sorted({device.device_kind for device in devices})
  xla_flags = os.environ.get('XLA_FLAGS', '').split()
  return {
    'jax': jax.__version__,
    'jaxlib': jaxlib.__version__,
    'platform': devices[0].platform,
    'platform version': devices[0].client.platform_version,
    'device kind': ', '.join(kinds),
    'devices': len(devices),
    'XLA_FLAGS': ' '.join(
      flag for flag in xla_flags if not flag.startswith(_NEUTRAL_FLAGS)
    ),
    'LIBTPU_INIT_ARGS': os.environ.get('LIBTPU_INIT_ARGS', ''),
    **{
      f'config.{key}': value
      for key, value in base_config.recorded(config).items()
      if key in _KEYS
    },
    'config.on_nonfinite': nonfinite.resolve(config.on_nonfinite, True),
  }


def of_run(config: config_dict.ConfigDict) -> Any:
  """Returns `using` for the run of a config; nothing where it names none."""
  if config.compiled_program is None:
    return contextlib.nullcontext()
  xla.check_precompiled(config.xla)
  directory = pathlib.Path(config.compiled_program)
  return using(directory, identity(config, jax.devices()))


@contextlib.contextmanager
def saving(directory: pathlib.Path, of: Mapping[str, Any]) -> Iterator[None]:
  """Keeps the programs that are compiled inside.

  All are compiled anew. A directory of before is replaced when the new one is
  whole; where no program could be kept, it goes. Of several processes the first
  does this, since JAX writes in no other.

  Args:
    directory: where to.
    of: their `identity`.

  Yields:
    Nothing.
  """
  directory.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    prefix=f'{directory.name}.partial', dir=directory.parent
  ) as name:
    partial = pathlib.Path(name) / 'programs'
    partial.mkdir()
    with _cache(partial, min_secs=0.0):
      yield
    if jax.process_index() != 0:
      return
    found = sorted(partial.glob(f'*{_SUFFIX}'))
    files.write_json(
      partial / RECORD,
      {
        'schema': _SCHEMA,
        'identity': dict(of),
        'programs': {path.name: _digest(path) for path in found},
      },
    )
    if directory.exists():
      # It is removed with the temporary directory.
      directory.rename(pathlib.Path(name) / 'before')
    if found:
      partial.rename(directory)


@contextlib.contextmanager
def kept_nowhere() -> Iterator[None]:
  """Disables the cache inside, since XLA writes its dump only if it compiles.

  Yields:
    Nothing.
  """
  with compilation_cache.configured({'jax_enable_compilation_cache': False}):
    yield


@contextlib.contextmanager
def using(directory: pathlib.Path, of: Mapping[str, Any]) -> Iterator[None]:
  """Loads programs from a directory instead of compiling them.

  The log says which were loaded. If one is compiled nevertheless, it says how
  this run differs from the one for which it was saved.

  Args:
    directory: that of `saving`.
    of: the `identity` of this run.

  Yields:
    Nothing.

  Raises:
    ValueError: `directory` holds no programs.
  """
  record = _read(directory)
  if damaged := _damaged(directory, record['programs']):
    logging.warning(
      'The programs in %s are not used, since %s is damaged or missing.',
      directory,
      ', '.join(damaged),
    )
    yield
    return
  taken: list[str] = []
  differences = _differences(record['identity'], of)
  watch = _Watch(directory, record['programs'], differences, taken)
  jax.monitoring.register_event_listener(watch.event)
  jax.monitoring.register_event_duration_secs_listener(watch.duration)
  try:
    # Runs may share a directory: none adds to it.
    with _cache(directory, min_secs=float('inf')):
      yield
  finally:
    jax.monitoring.unregister_event_listener(watch.event)
    jax.monitoring.unregister_event_duration_listener(watch.duration)
    if not taken:
      logging.warning('None of the programs in %s was used.', directory)


class _Watch(threading.local):
  """Listens to JAX: which programs it compiles, and which it loads.

  In each thread the two events follow each other.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    programs: Mapping[str, str],
    differences: Sequence[str],
    taken: list[str],
  ):
    self._directory = directory
    # Before the hash.
    self._names = {name.rpartition('-')[0] for name in _keys(programs)}
    self._differences = differences
    self._all_taken = taken
    self._is_taken = False
    self._saved = 0.0

  def event(self, event: str, **kwargs: Any) -> None:
    del kwargs
    if event == _HIT:
      self._is_taken = True

  def duration(self, event: str, duration_secs: float, **kwargs: Any) -> None:
    if event == _SAVED_SECS:
      self._saved = duration_secs
    if event != _COMPILED:
      return
    name = re.sub(r'\W+', '_', str(kwargs.get('fun_name'))).strip('_')
    if self._is_taken:
      self._all_taken.append(name)
      logging.info(
        '%s was taken from %s (%.0f s of compiling saved).',
        name,
        self._directory,
        max(self._saved, 0.0),
      )
    elif name in self._names:
      logging.warning(
        '%s is compiled, although %s has one of that name: it is of\n  %s',
        name,
        self._directory,
        '\n  '.join(self._differences)
        or 'other code, or arguments of other shapes; on CPU, perhaps only of'
        ' another process.',
      )
    self._is_taken = False


def _cache(
  directory: pathlib.Path, min_secs: float
) -> contextlib.AbstractContextManager[None]:
  """Sets JAX's compilation cache, and restores its settings afterwards."""
  settings = {
    'jax_enable_compilation_cache': True,
    'jax_compilation_cache_dir': str(directory),
    # Else reading leaves files, and makes room by removing others.
    'jax_compilation_cache_max_size': -1,
    'jax_persistent_cache_min_compile_time_secs': min_secs,
    'jax_persistent_cache_min_entry_size_bytes': -1,
    # Of a GPU; else the directory's name would be part of the hash.
    'jax_persistent_cache_enable_xla_caches': 'none',
  }
  return compilation_cache.configured(settings)


def _keys(programs: Mapping[str, str]) -> Iterator[str]:
  return (name.removesuffix(_SUFFIX) for name in programs)


def _digest(path: pathlib.Path) -> str:
  with open(path, 'rb') as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()


def _read(directory: pathlib.Path) -> dict[str, Any]:
  try:
    record = json.loads((directory / RECORD).read_text(encoding='utf-8'))
    if record['schema'] == _SCHEMA:
      return {key: record[key] for key in ('identity', 'programs')}
    found = f'schema {record["schema"]}'
  except (OSError, ValueError, KeyError, TypeError) as e:
    found = repr(e)
  raise errors.UsageError(
    f'config.compiled_program is {str(directory)!r}, which has no {RECORD} of'
    f' schema {_SCHEMA} ({found}). Give the directory that'
    ' --jaxline_mode=compile names as "saved programs".'
  )


def _damaged(directory: pathlib.Path, programs: Mapping[str, str]) -> list[str]:
  """Returns which files are not as they were written."""
  return [
    name
    for name, digest in programs.items()
    if not (directory / name).exists() or _digest(directory / name) != digest
  ]


def _differences(
  there: Mapping[str, Any], here: Mapping[str, Any]
) -> list[str]:
  """Returns how the run of the programs differs from this one."""
  there, here = base_config.flat(there), base_config.flat(here)
  return [
    f'{key} {there.get(key)!r}, and here it is {here.get(key)!r}'
    for key in sorted({*there, *here})
    if there.get(key) != here.get(key)
  ]
