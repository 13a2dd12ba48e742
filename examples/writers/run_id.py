"""The name of a run in a tracking service, kept in the run's directory."""

from collections.abc import Callable
import pathlib


def of(directory: str, service: str, make: Callable[[], str]) -> str:
  """Returns the id of a run, so that a resumed run goes on under it.

  Args:
    directory: the run's.
    service: the name of the service.
    make: makes a new id.
  """
  path = pathlib.Path(directory) / f'{service}_id'
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make(), encoding='utf-8')
  return path.read_text(encoding='utf-8')
