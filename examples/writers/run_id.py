"""Stores the id of a run in a tracking service in the run's directory.

The id is in a file instead of the checkpoints for three reasons. A run that is
killed before its first checkpoint continues under its id. A run that starts
from the weights of a different run (`config.restore_from`) gets a new id. And
you can read the id without a checkpoint. A copy of the whole directory has the
same id and the same curves; remove the file to make the copy a new run.
"""

from collections.abc import Callable

from jaxline.run_directory import store


def of(directory: str, service: str, make: Callable[[], str]) -> str:
  """Returns the id of a run; a resumed run gets the same id.

  Args:
    directory: the directory of the run, or its address in a bucket.
    service: the name of the service.
    make: returns a new id.
  """
  place, key = store.at(directory), f'{service}_id'
  # A full disk may have left an empty file.
  if not (found := place.read(key)):
    place.write(key, found := make().encode())
  return found.decode()
