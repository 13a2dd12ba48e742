"""Hides library messages from absl's log."""

from collections.abc import Iterator
import contextlib
import logging as std_logging
import os
import pathlib

from absl import logging
import jax

# Libraries whose information is hidden from absl's log, and the files in them
# that report what takes minutes.
_LIBRARIES = tuple(
  f'{pathlib.Path(file).parent}{os.sep}'
  for file in (pathlib.Path(__file__).parent, jax.__file__)
)
_HEARD = ('console.py', 'token_cache.py', 'xla.py')


@contextlib.contextmanager
def quiet_log() -> Iterator[None]:
  """Hides the libraries' information from absl's log, unless -v 1 is given."""
  handler = logging.get_absl_handler()

  def is_shown(record: std_logging.LogRecord) -> bool:
    return (
      record.levelno != std_logging.INFO
      or not record.pathname.startswith(_LIBRARIES)
      or record.filename in _HEARD
      or logging.get_verbosity() >= logging.DEBUG
    )

  handler.addFilter(is_shown)
  try:
    yield
  finally:
    handler.removeFilter(is_shown)
