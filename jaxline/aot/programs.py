"""Compiled programs, saved for runs that would compile the same.

A directory holds the entries of JAX's compilation cache and `programs.json`:
their checksums, and what the programs are for. JAX decides whether a program is
the one that a run needs, by a hash of everything that goes into it;
`programs.json` is there to say why not.

A program is machine code: use only directories that you trust as you trust the
programs you start.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
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
_SCHEMA = 2
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
  """Compiles all programs inside anew, and saves them.

  An existing directory is replaced then, or removed if no program could be
  saved. Only the first of several processes saves.

  Args:
    directory: where to.
    of: their `identity`.

  Yields:
    Nothing.
  """
  store = _Saved(directory)
  with compilation_cache.stored_by(store, min_compile_secs=0.0):
    yield
  if jax.process_index() != 0:
    return
  if directory.exists():
    shutil.rmtree(directory)
  if store.programs:
    directory.mkdir(parents=True)
    for key, value in store.programs.items():
      (directory / key).write_bytes(value)
    digests = {key: _digest(value) for key, value in store.programs.items()}
    record = {'schema': _SCHEMA, 'identity': dict(of), 'programs': digests}
    files.write_json(directory / RECORD, record)


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
    UsageError: `directory` holds no programs.
  """
  record = _read(directory)
  store = _Used(
    directory, record['programs'], _differences(record['identity'], of)
  )
  with compilation_cache.stored_by(store, min_compile_secs=0.0):
    yield
  if not store.is_used:
    logging.warning('None of the programs in %s was used.', directory)


class _Saved:
  """What JAX needs of a compilation cache; holds the programs until the end."""

  def __init__(self, path: pathlib.Path):
    self.path = self._path = path  # JAX reads `_path`.
    self.programs: dict[str, bytes] = {}

  def get(self, key: str) -> None:
    return None

  def put(self, key: str, value: bytes) -> None:
    self.programs[key] = value


class _Used:
  """The same for a run: it changes nothing in the directory."""

  def __init__(
    self,
    path: pathlib.Path,
    digests: Mapping[str, str],
    differences: Sequence[str],
  ):
    self.path = self._path = path
    self.is_used = False
    self._digests = digests
    self._differences = differences

  def get(self, key: str) -> bytes | None:
    name = key.rpartition('-')[0]  # The rest is the hash.
    if key not in self._digests:
      if any(other.rpartition('-')[0] == name for other in self._digests):
        logging.warning(
          '%s is compiled, although %s has one of that name: it is of\n  %s',
          name,
          self.path,
          '\n  '.join(self._differences)
          or 'other code, or arguments of other shapes; on CPU, perhaps only of'
          ' another process.',
        )
      return None
    path = self.path / key
    value = path.read_bytes() if path.exists() else b''
    if _digest(value) != self._digests[key]:
      logging.warning('%s is damaged or missing: %s is compiled.', path, name)
      return None
    self.is_used = True
    logging.info('%s was taken from %s.', name, self.path)
    return value

  def put(self, key: str, value: bytes) -> None:
    """Does nothing: runs may share the directory."""


def _digest(value: bytes) -> str:
  return hashlib.sha256(value).hexdigest()


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
