"""What of the log of absl is shown: not what libraries say about themselves."""

from collections.abc import Iterator
import contextlib
import copy
import importlib.util
import logging as std_logging
import os
from typing import Any

from absl import logging


def _folders(package: str) -> list[str]:
  spec = importlib.util.find_spec(package)
  found = spec.submodule_search_locations if spec else None
  return [os.path.join(folder, '') for folder in found or ()]


_QUIET = tuple(
  folder
  for package in ('jaxline', 'jax', 'jaxlib', 'optax', 'orbax')
  for folder in _folders(package)
)
# Files whose information is for the user: these lines, and progress that takes
# minutes.
_HEARD = ('console.py', 'token_cache.py', 'xla.py')


def _is_heard(record: std_logging.LogRecord) -> bool:
  """Leaves information about jaxline and its libraries out of the log."""
  return (
    logging.get_verbosity() >= logging.DEBUG
    # Less than information is there only if somebody asked for it, such as by
    # JAX_DEBUG_LOG_MODULES.
    or record.levelno != std_logging.INFO
    or not record.pathname.startswith(_QUIET)
    or record.filename in _HEARD
  )


def accept_names(flag: Any) -> None:
  """Lets absl's flag of the verbosity take names too: debug is 1."""
  names = ('debug', 'info', 'warning', 'error', 'fatal')
  levels = {name: logging.DEBUG - i for i, name in enumerate(names)}
  parse = flag.parser.parse
  flag.parser = copy.copy(flag.parser)  # Other flags have the same.
  flag.parser.parse = lambda argument: parse(levels.get(argument, argument))


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
