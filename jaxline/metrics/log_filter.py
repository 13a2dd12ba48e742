"""What of the log of absl is shown: not what libraries say about themselves."""

from collections.abc import Iterator
import contextlib
import importlib.util
import logging as std_logging
import os

from absl import logging


def _folders(package: str) -> list[str]:
  spec = importlib.util.find_spec(package)
  found = spec.submodule_search_locations if spec else None
  return [os.path.join(folder, '') for folder in found or ()]


_QUIET = tuple(
  folder
  for package in ('jaxline', 'jax', 'jaxlib', 'optax')
  for folder in _folders(package)
)
# Files whose information is for the user: progress that takes minutes, and the
# lines of a console that is off.
_HEARD = ('console.py', 'token_cache.py', 'xla.py')


def _is_quiet(record: std_logging.LogRecord) -> bool:
  """Returns whether it is information about jaxline or its libraries."""
  return (
    logging.get_verbosity() < logging.DEBUG
    # Less than information is there only if somebody asked for it, such as by
    # JAX_DEBUG_LOG_MODULES.
    and record.levelno == std_logging.INFO
    and record.pathname.startswith(_QUIET)
  )


def _is_heard(record: std_logging.LogRecord) -> bool:
  return not _is_quiet(record) or record.filename in _HEARD


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Leaves information of the libraries out of absl's log while inside.

  A verbosity of debug shows all of it. Other handlers get everything.
  """
  handler = logging.get_absl_handler()
  handler.addFilter(_is_heard)
  try:
    yield
  finally:
    handler.removeFilter(_is_heard)
