"""Debuggers for a run, and the log of its activities.

`--jaxline_post_mortem` (`debugger_fallback`): pdb at the line that raised.

`--jaxline_disable_pmap_jit` (`disable_pmap_jit`): every operation runs when its
line runs, so that `breakpoint()`, `print(x)` and `if x > 0:` work in a model or
a loss; `op_by_op` lists the kinds of values that are seen there.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import os
import pdb
import socket
import sys
import tempfile
import threading
import traceback
from typing import Any, TextIO, TypeVar
from unittest import mock

from absl import logging

from jaxline import errors
from jaxline import goodput
from jaxline.compat import op_by_op
from jaxline.supervision import preemption

F = TypeVar('F', bound=Callable[..., Any])


@dataclasses.dataclass
class Settings:
  """The switches of this module, read at each use.

  The flags of jaxline.platform set the first three; no other module knows of
  flags.

  Attributes:
    post_mortem: whether to enter pdb where an error was raised.
    disable_pmap_jit: whether to run op by op.
    mode: what `train.evaluate` constructs its experiment with by default.
    log_tracebacks: whether `log_activity` logs an error's traceback. False
      while `platform.main` runs, which prints the traceback at its end.
  """

  post_mortem: bool = False
  disable_pmap_jit: bool = False
  mode: str = 'eval'
  log_tracebacks: bool = True


settings = Settings()


def kwargs_only(f: F) -> F:
  """Makes a function refuse positional arguments."""

  @functools.wraps(f)
  def wrapped(**kwargs: Any) -> Any:
    return f(**kwargs)

  return wrapped  # type: ignore[return-value]


# The open activities of each thread that has any, outermost first. A thread
# writes its own entry only.
_activities: dict[threading.Thread, list[str]] = {}
# Signs of life of each thread, by its ident.
_signs: collections.Counter[int | None] = collections.Counter()


def activities() -> dict[str, list[str]]:
  """Returns the open activities of the run.

  Returns:
    For the name of each thread inside of a `log_activity`, the names of its
    activities, outermost first. Threads with the same name share one list.
  """
  named: dict[str, list[str]] = {}
  for thread, stack in _activities.copy().items():  # Other threads change it.
    named.setdefault(thread.name, []).extend(stack)
  return named


def give_sign_of_life() -> None:
  """Counts a sign of life of this thread, in some tens of nanoseconds."""
  _signs[threading.get_ident()] += 1


def signs_of_life(thread: threading.Thread | None = None) -> int:
  """Returns how many signs of life there were so far.

  Args:
    thread: counts those of this thread; None counts all.
  """
  return _signs.total() if thread is None else _signs[thread.ident]


@contextlib.contextmanager
def log_activity(
  activity_name: str, *, category: str | None = None
) -> Iterator[None]:
  """Logs the start and the end of the code inside, and its error.

  While it is open, `activities()` contains the name. Its start and its end are
  signs of life. A SystemExit, of which `preemption.Preempted` is one, and a
  `UsageError` are logged as a stop.

  Args:
    activity_name: its name in the log.
    category: what `goodput` counts its time as; None is that of the code
      around it.

  Yields:
    Nothing.
  """
  logging.info('[jaxline] %s starting...', activity_name)
  thread = threading.current_thread()
  stack = _activities.setdefault(thread, [])
  stack.append(activity_name)
  give_sign_of_life()
  measured = goodput.measure(category) if category else contextlib.nullcontext()
  try:
    with measured:
      yield
  except (SystemExit, errors.UsageError):
    logging.info('[jaxline] %s stopped.', activity_name)
    raise
  except BaseException:
    log = logging.exception if settings.log_tracebacks else logging.info
    log('[jaxline] %s failed with error.', activity_name)
    raise
  else:
    logging.info('[jaxline] %s finished.', activity_name)
  finally:
    stack.pop()
    if not stack:
      del _activities[thread]
    give_sign_of_life()


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
  """Enters pdb where an error was raised, if `settings.post_mortem` is on.

  pdb starts in the frame that raised, on the thread that raised, and only once
  for an error that passes several of these decorators. Without a terminal, pdb
  waits for a connection, and stderr says how to connect. SystemExit and
  KeyboardInterrupt do not start pdb. The function raises its error after that.
  """
  return _post_mortem()(f)


# One debugger at a time: two would share one terminal.
_debugger_lock = threading.Lock()


@contextlib.contextmanager
def _post_mortem() -> Iterator[None]:
  try:
    yield
  except Exception as error:
    if settings.post_mortem:
      with _debugger_lock:
        if '_jaxline_seen_by_pdb' not in error.__dict__:
          error.__dict__['_jaxline_seen_by_pdb'] = True
          _debug(error)
    raise


def _debug(error: Exception) -> None:
  if sys.stdin is not None and sys.stdin.isatty():
    with preemption.paused():  # Ctrl-C is for the debugger.
      pdb.post_mortem(error.__traceback__)
    return
  with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
    # At the first use: a test may have mocked pdb.
    files = functools.cache(lambda: stack.enter_context(_connected(error)))
    # Only this thread's output goes to the debugger.
    stdin = _PerThread(lambda: files()[0], sys.stdin)
    stdout = _PerThread(lambda: files()[1], sys.stdout)
    with mock.patch.multiple(sys, stdin=stdin, stdout=stdout):
      pdb.post_mortem(error.__traceback__)


@contextlib.contextmanager
def _connected(error: Exception) -> Iterator[tuple[TextIO, TextIO]]:
  """Waits for a connection; yields a file to read from and one to write to."""
  with (
    # A Unix socket in a directory that only this user may enter, because the
    # debugger runs any code that it is sent.
    tempfile.TemporaryDirectory(prefix='jaxline_pdb_') as folder,
    socket.socket(socket.AF_UNIX) as server,
  ):
    path = f'{folder}/socket'
    server.bind(path)
    server.listen(1)
    print(
      # In whole: a signal may end the wait.
      f'{"".join(traceback.format_exception(error))}'
      f'[jaxline] pdb waits at the raising frame, on '
      f'{socket.gethostname()}, process {os.getpid()}. Attach with\n'
      f'  {sys.executable} -m jaxline.debug {path}\n'
      f'or\n  nc -U {path}\nand let the run end with the command q.',
      file=sys.stderr,
      flush=True,
    )
    connection, _ = server.accept()
    # Two files, since a single one loses its lines read ahead when it is
    # written to.
    with (
      connection,
      connection.makefile('r') as reader,
      connection.makefile('w') as writer,
    ):
      yield reader, writer


class _PerThread:
  """A stream: `mine()` for the thread that made it, `others` for all others."""

  def __init__(self, mine: Callable[[], Any], others: Any):
    self._thread = threading.get_ident()
    self._mine = mine
    self._others = others

  def __getattr__(self, name: str) -> Any:
    is_mine = threading.get_ident() == self._thread
    return getattr(self._mine() if is_mine else self._others, name)


def attach(path: str) -> None:
  """Connects this terminal to a debugger that waits at a socket.

  Args:
    path: the socket, as `debugger_fallback` wrote it.
  """
  with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(path)

    def send() -> None:
      with contextlib.suppress(OSError):
        while data := os.read(sys.stdin.fileno(), 65536):
          connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    while data := connection.recv(65536):
      sys.stdout.write(data.decode(errors='replace'))
      sys.stdout.flush()


def disable_pmap_jit(fn: F) -> F:
  """Runs a function op by op, if `settings.disable_pmap_jit` is on.

  This also affects functions that were decorated with `jax.pmap` and `jax.jit`
  before, and threads that the function starts. The table at the top of
  `op_by_op` lists the kinds of values that are seen. The setting is read at
  each call.
  """
  return _op_by_op()(fn)


@contextlib.contextmanager
def _op_by_op() -> Iterator[None]:
  if not settings.disable_pmap_jit:
    yield
    return
  import chex  # It takes as long to import as jax, and runs rarely need it.

  with op_by_op.mode, chex.fake_pmap_and_jit(enable_pmap_patching=False):
    yield


if __name__ == '__main__':
  attach(sys.argv[1])
