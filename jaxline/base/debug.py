"""Debugs a run, and logs its activities.

`--jaxline_post_mortem` (`debugger_fallback`) prints an error, then enters pdb
at the last line of the user's own files that led to it.

`--jaxline_disable_pmap_jit` (`disable_pmap_jit`) runs every operation when its
line runs. docs/reference/from_jaxline.md lists the values that you then see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import os
import select
import sys
import threading
import traceback
from typing import Any, TypeVar
from unittest import mock

from absl import logging
import jax
from jax._src import core  # The public API cannot wait for each operation.

from jaxline.base import goodput
from jaxline.base import watchdog

F = TypeVar('F', bound=Callable[..., Any])


@dataclasses.dataclass
class Settings:
  """Switches that are read at each use; `jaxline.platform` has their flags."""

  post_mortem: bool = False
  disable_pmap_jit: bool = False
  mode: str = 'eval'  # The mode of the experiment in `train.evaluate`.


settings = Settings()
_debugger_lock = threading.Lock()  # Two debuggers cannot share a terminal.


def kwargs_only(f: F) -> F:
  """Makes a function reject positional arguments."""

  @functools.wraps(f)
  def wrapped(**kwargs: Any) -> Any:
    return f(**kwargs)

  return wrapped  # type: ignore[return-value]


@contextlib.contextmanager
def log_activity(
  activity_name: str, *, category: str | None = None, logs_error: bool = False
) -> Iterator[None]:
  """Logs the start and the end of an activity, and reports progress.

  If there is a `category`, `goodput` counts the time under it. With
  `logs_error`, the traceback of an error is logged.
  """
  logging.info('[jaxline] %s starting...', activity_name)
  measured = goodput.measure(category) if category else contextlib.nullcontext()
  try:
    watchdog.report_progress()
    with measured:
      yield
  except BaseException as e:
    if logs_error:
      logging.exception('[jaxline] %s failed with error.', activity_name)
    else:
      logging.info('[jaxline] %s ended by %s.', activity_name, type(e).__name__)
    raise
  else:
    logging.info('[jaxline] %s finished.', activity_name)
  finally:
    watchdog.report_progress()


def evaluate_should_return_dict(f: F) -> F:
  """Lets an `evaluate` return None, and warns about it once."""

  @functools.wraps(f)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    if (scalars := f(*args, **kwargs)) is not None:
      return scalars
    text = '`evaluate` returned None, which is deprecated. Return the dict of'
    text += ' scalars to write, or {}.'
    logging.log_first_n(logging.WARNING, text, 1)
    return {}

  return wrapped  # type: ignore[return-value]


def debugger_fallback(f: F) -> F:
  """Makes a function print an error and enter pdb, if `post_mortem` is set.

  pdb starts once per error, on the thread that raised it. It does not start for
  SystemExit and KeyboardInterrupt, or without a terminal or piped commands.
  """

  @functools.wraps(f)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    try:
      return f(*args, **kwargs)
    except Exception as error:
      if settings.post_mortem:
        with _debugger_lock:
          if '_jaxline_seen_by_pdb' not in error.__dict__:
            error.__dict__['_jaxline_seen_by_pdb'] = True
            _post_mortem(error)
      raise

  return wrapped  # type: ignore[return-value]


def _post_mortem(error: Exception) -> None:
  import pdb  # Few runs need it.

  stdin: Any = sys.stdin
  # Ignore errors of pdb, for example if stdin is closed.
  with contextlib.suppress(Exception):
    if stdin.isatty() or (
      select.select([stdin], [], [], 0)[0] and stdin.buffer.peek()
    ):
      # Print to stdout, like pdb. The end of the run prints it to stderr.
      traceback.print_exception(error, file=sys.stdout)
      debugger: Any = pdb.Pdb()
      debugger.get_stack = functools.partial(_own_stack, debugger.get_stack)
      debugger.reset()
      return debugger.interaction(None, error.__traceback__)
  logging.warning('pdb needs a terminal or commands on stdin; not started.')


_PYTHON, _JAXLINE = (
  os.path.join(os.path.dirname(x), '')
  for x in (os.__file__, os.path.dirname(__file__))
)


def is_installed(file: str) -> bool:
  """Returns whether a file belongs to Python or to an installed package."""
  return file.startswith(_PYTHON) or f'-packages{os.sep}' in file


def _own_stack(get_stack: Any, *args: Any) -> tuple[list[Any], int]:
  """Returns a stack, and the index of the innermost frame of user code."""
  stack, innermost = get_stack(*args)
  files = [frame.f_code.co_filename for frame, _ in stack]
  is_own = lambda x: not (x.startswith(('<', _JAXLINE)) or is_installed(x))
  own = [i for i, file in enumerate(files) if is_own(file)]
  return stack, max(own, default=innermost)


def disable_pmap_jit(fn: F) -> F:
  """Makes a function run op by op, if `settings.disable_pmap_jit` is set.

  This includes functions that `jax.pmap` and `jax.jit` decorated earlier, and
  threads that the function starts.
  """
  return _op_by_op()(fn)


_lock = threading.Lock()
_num_inside = 0
_patches = contextlib.ExitStack()


@contextlib.contextmanager
def _op_by_op() -> Iterator[None]:
  """Turns pmap and jit off in all threads while any context is open."""
  global _num_inside
  if not settings.disable_pmap_jit:
    yield
    return
  import chex  # Importing it takes as long as jax, and few runs need it.

  with _lock:
    _num_inside += 1
    if _num_inside == 1:  # Patch only once: a second patch might outlive it.
      _patch(chex.fake_pmap())
  try:
    with chex.fake_pmap_and_jit(enable_pmap_patching=False):
      yield
  finally:
    with _lock:
      _num_inside -= 1
      if not _num_inside:
        _patches.close()


def _patch(fake_pmap: contextlib.AbstractContextManager[Any]) -> None:
  logging.warning('pmap and jit are off: every operation runs separately.')
  # `jax.disable_jit` affects only one thread.
  was_off = jax.config.values['jax_disable_jit']
  jax.config.update('jax_disable_jit', True)
  _patches.callback(jax.config.update, 'jax_disable_jit', was_off)
  _patches.enter_context(fake_pmap)
  fake = lambda fun, **unused: fun  # The original would trace its function.
  _patches.enter_context(mock.patch.multiple(jax, checkpoint=fake, remat=fake))
  # Wait for each operation; JAX has no public API for this. Hundreds of
  # operations in flight can deadlock several CPU devices.
  run = core.EvalTrace.process_primitive
  wait = lambda *args: jax.block_until_ready(run(*args))
  waiting = mock.patch.object(core.EvalTrace, 'process_primitive', wait)
  _patches.enter_context(waiting)
