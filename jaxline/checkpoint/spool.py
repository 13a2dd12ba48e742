"""The files of a run in a bucket: written on this machine, then uploaded.

Objects cannot be appended to, so logs grow in a local directory and are
uploaded before each manifest and at the end.
"""

from collections.abc import Iterable, Mapping
import contextlib
import os
import pathlib
import tempfile

from jaxline.checkpoint import owner
from jaxline.checkpoint import store as store_lib

_directories: dict[str, pathlib.Path] = {}


def directory(run: str | os.PathLike[str]) -> pathlib.Path:
  """Returns where this process writes the files of a run.

  Args:
    run: the run's directory, which is returned, or its address.
  """
  place = os.fspath(run)
  if not store_lib.is_address(place):
    return pathlib.Path(place)
  if place not in _directories:
    _directories[place] = pathlib.Path(tempfile.mkdtemp(prefix='jaxline_logs_'))
  return _directories[place]


def fetch(run: str, folders: Iterable[str], lengths: Mapping[str, int]) -> None:
  """Downloads the logs of a run in a bucket, as far as they count.

  Event files beside them are of steps that run again, and are deleted.

  Args:
    run: the run's address; a local run has its files already.
    folders: paths of the directories of the logs, below `directory(run)`.
    lengths: path -> length in bytes of each file in them that counts.
  """
  if not store_lib.is_address(run):
    return
  store, top = store_lib.at(run), directory(run)
  for folder in {os.path.relpath(folder, top) for folder in folders}:
    for name in store.names(folder):
      path = top / folder / name
      if length := lengths.get(str(path)):
        # A writer that has it open appends to what is there now.
        path.write_bytes((store.read(f'{folder}/{name}') or b'')[:length])
      elif 'tfevents' in name:
        store.delete(f'{folder}/{name}')


def upload(
  run: str | os.PathLike[str], names: Mapping[str, int] | None = None
) -> None:
  """Uploads files of a run in a bucket.

  Args:
    run: the run's directory, of which nothing is uploaded, or its address.
    names: relative path -> length in bytes of what is uploaded; None is all.

  Raises:
    ClaimedError: another run has taken over.
  """
  if not store_lib.is_address(run):
    return
  owner.check(run)  # Else these may be the files of a run that took over.
  store, top = store_lib.at(run), directory(run)
  if names is None:
    files = (p for p in top.rglob('*') if p.is_file())
    names = {str(p.relative_to(top)): p.stat().st_size for p in files}
  for name, length in names.items():
    with contextlib.suppress(FileNotFoundError), open(top / name, 'rb') as file:
      store.write(name, file.read(length))
