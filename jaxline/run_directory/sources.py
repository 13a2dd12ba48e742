"""Records the user's code in checkpoints/code/HASH.zip of a run."""

from collections.abc import Mapping
import hashlib
import io
import os
import sys
import zipfile

from absl import logging

from jaxline.base import debug
from jaxline.base import disk
from jaxline.run_directory import store as store_lib

_MOST_OF_A_FILE, _MOST_BYTES = 2**20, 2**24


def add_imported(files: dict[str, bytes]) -> str:
  """Adds all imported Python files, except those of installed packages.

  Files are named after their modules, independent of the working directory.
  Returns the hash of all files.
  """
  loaded = sys.modules.copy()  # Another thread may import a module.
  for module in sorted(loaded):
    # `getattr` would import a lazy module.
    path = getattr(loaded[module], '__dict__', {}).get('__file__')
    if not isinstance(path, str) or debug.is_installed(path):
      continue
    base, name = os.path.basename(path), module.replace('.', '/')
    if base == '__init__.py':
      name += '/__init__'
    name = base if module == '__main__' else f'{name}.py'
    if base.endswith('.py') and name not in files:
      files[name] = _read(path, _MOST_BYTES - sum(map(len, files.values())))
  texts = [f'{k}\0{len(x)}\0'.encode() + x for k, x in sorted(files.items())]
  return hashlib.sha256(b''.join(texts)).hexdigest()


def _read(path: str, room: int) -> bytes:
  try:
    with open(path, 'rb', opener=disk.open_regular) as file:
      if len(content := file.read(room + 1)) <= min(room, _MOST_OF_A_FILE):
        return content
  except OSError:
    pass
  text = '%s is a link, too large or unreadable; checkpoints/code lacks it.'
  logging.warning(text, path)
  return b''


def place(store: store_lib.Store, name: object) -> str:
  """Returns the key of a record in RUN/checkpoints; '' if there is none."""
  return f'code/{name}.zip' * (f'{name}.zip' in store.names('code'))


def write(
  store: store_lib.Store, name: str, files: Mapping[str, bytes]
) -> None:
  """Writes files to RUN/checkpoints under their hash `name`, if it is new."""
  if place(store, name):
    return
  packed, store = io.BytesIO(), store.below('code')
  with zipfile.ZipFile(packed, 'w', zipfile.ZIP_DEFLATED) as archive:
    for path, content in files.items():
      archive.writestr(path, content)
  store.mode = 0o600  # A file may contain a password.
  store.write(f'{name}.zip', packed.getvalue())


def read(store: store_lib.Store, name: object) -> dict[str, bytes]:
  """Returns the files of a record; warns and returns {} if it is invalid."""
  try:
    raw = store.read(key) if (key := place(store, name)) else None
    if raw is None:
      return {}
    files: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
      room = _MOST_BYTES
      for info in archive.infolist():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
          raise ValueError('its compression is not supported')
        with archive.open(info) as file:  # `archive.read` inflates all of it.
          files[info.filename] = file.read(room + 1)
        room -= len(files[info.filename])
        if room < 0:
          raise ValueError(f'it has more than {_MOST_BYTES} bytes')
    return files
  except Exception as e:  # The file may hold any bytes.
    logging.warning('%s/code/%r cannot be compared: %r', store, name, e)
    return {}
