"""Errors that are printed as one line, and suggestions of similar names."""

from collections.abc import Collection, Iterable
import difflib
import re
from typing import Any


class UsageError(ValueError):
  """The command line, the config or a file that it names is wrong.

  `platform.main` prints only the message (what was got, what was expected, what
  to do) and ends with code 2.
  """


class RunError(Exception):
  """A run cannot go on, and the message says all that its user needs.

  `platform.main` prints only the message, and ends with code 1.
  """


class StopTraining(Exception):
  """Ends a run as finished: raised by `step` or `evaluate`, on all processes.

  `step` raises it before it changes the experiment: the step does not count. A
  sharded step that has updated the state counts, and is logged.
  """

  def __init__(self, why: str = 'StopTraining was raised.', how: str = ''):
    super().__init__(f'{why} To train on, {how}.' if how else why)
    self.is_noted = bool(how)  # The notes of the run say it.


class MissingFileError(UsageError, FileNotFoundError):
  """A file that the config names does not exist."""


# The code of SIGABRT, by which JAX ends a process that has lost another one.
LOST_CODE = 134
# Messages of collectives of CPUs and GPUs when another process is gone, and of
# clients of JAX's coordination service, which runs in process 0.
_LOST = re.compile(
  r'\bGloo\b|ncclRemoteError|ncclSystemError|Connection (reset|closed) by peer'
  r'|^UNAVAILABLE: .*\bremote target coordination_service\b',
  re.DOTALL,
)


def is_lost_process(error: BaseException) -> bool:
  """Returns whether JAX has raised an error since another process is gone."""
  # Not an OSError, such as of a server of data.
  is_jaxs = isinstance(error, (RuntimeError, ValueError))
  return is_jaxs and bool(_LOST.search(str(error)))


def nearest(
  name: Any, valid: Iterable[Any], n: int = 1, cutoff: float = 0.6
) -> list[str]:
  """Returns the most similar valid names: see `difflib.get_close_matches`."""
  return difflib.get_close_matches(str(name), map(str, valid), n, cutoff)


def did_you_mean(name: Any, valid: Iterable[Any]) -> str:
  """Returns " Did you mean 'x'?" for a message; '' if none is near."""
  near = nearest(name, valid)
  return f' Did you mean {near[0]!r}?' if near else ''


def check_names(
  names: Iterable[Any],
  valid: Collection[str],
  what: str,
  where: str,
  note: str = '',
) -> None:
  """Raises a UsageError for the first name that is not valid.

  Its message has the kind of the name (`what`), its place (`where`), the most
  similar valid name and the `note`.
  """
  for name in names:
    if name not in valid:
      raise UsageError(
        f'Unknown {what} {name!r} in {where}; expected some of {list(valid)}.'
        f'{did_you_mean(name, valid)}{note}'
      )
