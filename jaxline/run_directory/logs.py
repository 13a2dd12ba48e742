"""The logs of a run: its writer and their files.

Objects in a bucket cannot be appended to. So a run in a bucket downloads its
logs and appends to the copies. It uploads them before each manifest and at its
end, and then removes the copies.
"""

from collections.abc import Callable, Mapping
import contextlib
import functools
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax

from jaxline.base import disk
from jaxline.metrics import fingerprints
from jaxline.metrics import writers
from jaxline.run_directory import owner
from jaxline.run_directory import store as store_lib

_directories: dict[str, pathlib.Path] = {}


def directory(run: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the local directory for the files of a run or an address."""
  place = os.fspath(run)
  if not disk.is_address(place):
    return pathlib.Path(place)
  if place not in _directories:
    _directories[place] = pathlib.Path(tempfile.mkdtemp(prefix='jaxline_logs_'))
  return _directories[place]


def local(run: str | os.PathLike[str], folder: str) -> pathlib.Path:
  """Returns the local path of a folder of a run."""
  return store_lib.Disk(str(directory(run))).folder(folder)


def folders(run: str | os.PathLike[str]) -> Callable[[str], pathlib.Path]:
  """Returns `local` for a run, independent of later changes of directory."""
  return functools.partial(local, directory(run).absolute())


def fetch(run: str, folder: str) -> pathlib.Path:
  """Returns the local directory of a log, with the log's files so far."""
  path = local(run, folder)
  if disk.is_address(run):
    store = store_lib.at(run)
    path.mkdir(parents=True, exist_ok=True)
    for name in store.names(folder):
      # `read` returns None for a folder.
      if (content := store.read(f'{folder}/{name}')) is not None:
        (path / name).write_bytes(content)
  return path


def upload(
  run: str | os.PathLike[str], names: Mapping[str, int] | None = None
) -> None:
  """Uploads log files if the run is in a bucket.

  Args:
    run: the run's directory or address.
    names: relative path -> bytes to upload; None means all, at the run's end.
  """
  if not disk.is_address(run):
    return
  store, top, is_end = store_lib.at(run), directory(run), names is None
  owner.check(store)  # Do not overwrite the files of a run that took over.
  if names is None:
    files = (p for p in top.rglob('*') if p.is_file())
    names = {str(p.relative_to(top)): p.stat().st_size for p in files}
  for name, length in names.items():
    with contextlib.suppress(FileNotFoundError), open(top / name, 'rb') as file:
      store.write(name, file.read(length))
  if is_end:
    shutil.rmtree(_directories.pop(os.fspath(run)), ignore_errors=True)


class RunWriter(writers.MetricWriter):
  """Writes to the backends of `config.writers`.

  Their files are in `config.checkpoint_dir/<mode>`; on all hosts but the first,
  in `<mode>/host_<index>`.
  """

  def __init__(self, config: Any, mode: str):
    host = jax.process_index()
    folder = f'{mode}/host_{host}' if host else mode
    directory = fetch(config.checkpoint_dir, folder)
    names = config.writers
    made = [writers.make(name, config, mode, directory) for name in names]
    if config.fingerprint and mode == 'train':
      made.append(fingerprints.FingerprintWriter(directory / fingerprints.FILE))
    super().__init__(*made)
