"""What helps to see inside a run: activity log, post-mortem, no compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import pdb
from typing import Any, TypeVar

from absl import logging
import chex

F = TypeVar('F', bound=Callable[..., Any])


@dataclasses.dataclass
class Settings:
  """The switches of this module, read at each use.

  jaxline.platform sets them to functions that read its flags; no other module
  knows of flags.
  """

  post_mortem: Callable[[], bool] = lambda: False
  disable_pmap_jit: Callable[[], bool] = lambda: False


settings = Settings()


def kwargs_only(f: F) -> F:
  """Makes a function refuse positional arguments."""

  @functools.wraps(f)
  def wrapped(**kwargs: Any) -> Any:
    return f(**kwargs)

  return wrapped  # type: ignore[return-value]


@contextlib.contextmanager
def log_activity(activity_name: str) -> Iterator[None]:
  """Logs the start and the end of what runs inside, and its error.

  Args:
    activity_name: what to call it in the log.

  Yields:
    Nothing.
  """
  logging.info('[jaxline] %s starting...', activity_name)
  try:
    yield
  except BaseException:
    logging.exception('[jaxline] %s failed with error.', activity_name)
    raise
  logging.info('[jaxline] %s finished.', activity_name)


def evaluate_should_return_dict(f: F) -> F:
  """Lets an `evaluate` return None, with a warning once."""

  @functools.wraps(f)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    scalars = f(*args, **kwargs)
    if scalars is None:
      logging.log_first_n(
        logging.WARNING,
        '`evaluate` returned None, which is deprecated: return the dict of '
        'scalars to write, {} if there are none.',
        1,
      )
      return {}
    return scalars

  return wrapped  # type: ignore[return-value]


def debugger_fallback(f: F) -> F:
  """Enters pdb where an error leaves the function, if post_mortem is on."""

  @functools.wraps(f)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    try:
      return f(*args, **kwargs)
    except Exception as e:
      if settings.post_mortem():
        pdb.post_mortem(e.__traceback__)
      raise

  return wrapped  # type: ignore[return-value]


def disable_pmap_jit(f: F) -> F:
  """Runs the function without pmap and jit, if disable_pmap_jit is on."""

  @functools.wraps(f)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    if not settings.disable_pmap_jit():
      return f(*args, **kwargs)
    with chex.fake_pmap_and_jit():
      return f(*args, **kwargs)

  return wrapped  # type: ignore[return-value]
