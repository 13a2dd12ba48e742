"""The name of a run in a tracking service, kept in the run's directory.

In a file and not in each checkpoint, for three reasons: a run that was killed
before its first checkpoint goes on under its name; a run that begins with the
weights of another one (`config.restore_from`) gets a name of its own; and the
name can be read without the checkpoint. A copy of the whole directory is the
same run, as for its curves; to make it another one, remove the file.
"""

from collections.abc import Callable
import pathlib

from jaxline import disk


def of(directory: str, service: str, make: Callable[[], str]) -> str:
  """Returns the id of a run, so that a resumed run goes on under it.

  Args:
    directory: the run's.
    service: the name of the service.
    make: makes a new id.
  """
  path = pathlib.Path(directory) / f'{service}_id'
  # An empty file is what a full disk may have left.
  if not path.exists() or not path.read_text(encoding='utf-8'):
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.replacing(path, path.with_name(f'.{path.name}')) as file:
      file.write(make().encode())
  return path.read_text(encoding='utf-8')
