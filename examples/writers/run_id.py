"""The name of a run in a tracking service, kept in the run's directory.

In a file and not in each checkpoint, for three reasons: a run that was killed
before its first checkpoint goes on under its name; a run that begins with the
weights of another one (`config.restore_from`) gets a name of its own; and the
name can be read without the checkpoint. A copy of the whole directory is the
same run, as for its curves; to make it another one, remove the file.
"""

from collections.abc import Callable

from jaxline.run_directory import store


def of(directory: str, service: str, make: Callable[[], str]) -> str:
  """Returns the id of a run, so that a resumed run goes on under it.

  Args:
    directory: the run's, or its address.
    service: the name of the service.
    make: makes a new id.
  """
  place, key = store.at(directory), f'{service}_id'
  # An empty file is what a full disk may have left.
  if not (found := place.read(key)):
    place.write(key, found := make().encode())
  return found.decode()
