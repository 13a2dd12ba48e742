"""Errors printed as one line, links to their remedies, and similar names."""

from collections.abc import Collection, Iterable
import difflib
import re
from typing import Any

# Finds the section of docs/troubleshooting.md that a message needs, by name.
_SECTIONS = re.compile(
  r"(?P<misspelled_names>Unknown (config key|[\w ]+ '\S*' in))"
  r'|(?P<unknown_flags>Unknown command line flag|expected flags|Expected --)'
  r'|(?P<class_not_found>experiment_class is)|(?P<nan>s of .*not finite)'
  r'|(?P<hang>no sign of life)'
  r"|(?P<missing_packages>No module named|pip install -e ')"
  r'|(?P<missing_files>No files found|cannot be read:|file such as|\.tokens`)'
  r'|(?P<no_accelerator>_ensure_tpu)|(?P<wrong_results>was computed twice)'
  r'|(?P<uneven_batch>do(es)? not divide|sizes whose product|integer, or -1)'
  r'|(?P<out_of_memory>RESOURCE_EXHAUSTED(?!.*No space left))'
  r'|(?P<no_space_left>No space left|File too large|quota exceeded)'
  r'|(?P<permission_denied>Permission denied|Read-only|can be written in)'
  r'|(?P<changed_config>different config, so)|(?P<changed_model>not fit the )'
  r'|(?P<changed_data>cannot continue from|position cannot be set)'
  r'|(?P<damaged_checkpoint>(checksum|CRC-32C) of|that is intact|is damaged: )'
  r'|(?P<checkpoint_format>different format)|(?P<refused_values>cannot hold)'
  r'|(?P<directory_in_use>is in use: another|another run has taken over)'
  r'|(?P<unshared_directory>cannot see)|(?P<process_count>processes saved)'
  r'|(?P<different_scalars>scalars from evaluate)|(?P<lost_process>has lost)'
  r"|(?P<no_checkpoint>no checkpoint (yet|of ('|step \d+\. Of)))"
  r'|(?P<invalid_values>config\.(?!mesh\.|experiment_class)\S+ is .*; expected)'
  r'|(?P<worker_exit_codes>Worker process was)|(?P<ended_input>input ended)',
  re.DOTALL,
)


def link(text: str) -> str:
  """Returns ' (see ...)' for the message of an error; '' without a section."""
  found = _SECTIONS.search(text)
  name = str(found.lastgroup).replace('_', '-') if found else ''
  return f' (see docs/troubleshooting.md#{name})' if found else ''


class UsageError(ValueError):
  """The command line, the config or a file that it names is wrong.

  `platform.main` prints only the message, and ends with code 2. The message has
  what was got, what was expected, and what to do.
  """


class RunError(Exception):
  """A run cannot continue, and its user needs no traceback.

  `platform.main` prints only the message, and ends with code 1.
  """


class StopTraining(Exception):
  """Ends a run as finished: raised by `step` or `evaluate`, on all processes.

  `step` raises it before it changes the experiment: the step does not count. A
  sharded step that has updated the state counts, and is logged.
  """

  def __init__(self, why: str = 'StopTraining was raised.', how: str = ''):
    super().__init__(f'{why} To train on, {how}.' if how else why)
    self.is_noted = bool(how)  # The notes of the run contain it.


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
  """Returns whether JAX raised an error because another process is gone."""
  # An OSError may come from a server of data.
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
  """Raises a UsageError for an invalid name; it names `what` and `where`."""
  for name in names:
    if name not in valid:
      raise UsageError(
        f'Unknown {what} {name!r} in {where}; expected some of {list(valid)}.'
        f'{did_you_mean(name, valid)}{note}'
      )
