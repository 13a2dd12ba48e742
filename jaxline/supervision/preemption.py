"""Ends a run in order on SIGTERM, Ctrl-C or a preemption notice.

    with preemption.Watch() as watch:
      ...                         # Start-up: a notice raises Preempted at once.
      preemption.begin_run()      # After jax.distributed.initialize.
      ...                         # The same.
      with watch.training():      # A notice is only noted.
        while ...:
          ...
          if watch.reached(step):   # Every host asks after each step,
            ...                     # saves its state,
            watch.leave()           # and raises Preempted.

`paused` restores Python's own Ctrl-C at a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import itertools
import os
import signal
import sys
import threading
import types
from typing import Any, NoReturn

from absl import logging

from jaxline.supervision import watchdog

# EX_TEMPFAIL of sysexits.h: all is saved, and the run can be started again.
EXIT_CODE = 75
# The code of a shell for a program that Ctrl-C ended.
SIGINT_EXIT_CODE = 130

# Packages whose handlers a run may replace.
_NOTEBOOKS = ('asyncio', 'ipykernel')

# JAX's notice names the step to leave at: one more than the largest that a host
# has asked with, which is 0 before the first. A run that continues at step 500
# would never ask with the 1 of a notice during its start-up, so `reached` asks
# with the number of calls and not with the run's step.
_calls = itertools.count(1)

_active: Watch | None = None


class Preempted(SystemExit):
  """Ends the process with an exit code; this is no error of the run.

  Attributes:
    code: EXIT_CODE or SIGINT_EXIT_CODE; 0 for a SIGTERM when the run is over.
    is_over: whether nothing of the run is left to do.
  """

  is_over = False

  def __init__(self, code: int, reason: str):
    super().__init__(reason)
    self.code = code


class Watch:
  """Handles SIGTERM and SIGINT while a run is inside of it.

  The first signal decides the exit code; a later SIGTERM changes nothing. After
  the first SIGINT the default handler is back, so that the second one ends the
  process at once, also in C code. Ignored signals (nohup, a shell's background
  jobs) stay ignored. A signal for which the program has its own Python handler
  is left to that handler. While a thread is in pdb, SIGINT is for pdb.

  Python runs a handler between two instructions of the main thread, so a signal
  waits while that is in C code, such as a compilation. Python also drops what a
  handler raises inside `__del__` or a callback of the garbage collector, of
  which JAX has one. The notice is kept: it acts when the run or its training
  begins, or at the next `reached`.

  Once `jax.distributed` is initialised, JAX handles SIGTERM, and all hosts
  agree on the step after which they leave. Call `begin_run` after that. A
  notice during start-up then acts after the first step.

  Only the main thread can handle signals. A watch that is entered on another
  thread knows only of JAX's notice.
  """

  def __init__(self) -> None:
    """Makes the watch; it handles no signals before it is entered."""
    self._notice: int | None = None
    # Whether JAX has SIGTERM, so that all hosts leave after the same step.
    self._is_shared = False
    # Whether a notice is only noted, instead of raised at once.
    self._defers = False
    self._step: int | None = None
    self._is_reached = False
    self._is_interrupted = False  # By a first SIGINT.
    self._old_handlers: dict[int, Any] = {}
    self._warned: set[Any] = set()

  def __enter__(self) -> Watch:
    global _active
    self._is_shared = self._defers = _jax_has_notice()
    if _is_main_thread():
      _active = self
      self._take_signals()
    return self

  def __exit__(self, *unused: Any) -> None:
    global _active
    self._put_back()
    if _active is self:
      _active = None

  @contextlib.contextmanager
  def training(self) -> Iterator[None]:
    """Notes a notice for `reached`, instead of raising, while inside.

    The last save and the wait for other hosts belong inside. A notice after the
    last `reached` is raised on leaving on a single host, and ignored if several
    hosts would have to agree.

    Raises:
      Preempted: on entering or leaving, if there was a notice.
    """
    if _active is self:
      self._warn_of_clients()  # The experiment's constructor may have set one.
    # It was raised before and swallowed, for instance by a `__del__`.
    self._raise_notice()
    # Hosts that cannot agree must not leave at different steps. There a notice
    # ends this host at once, and the others see that it is gone.
    with self._deferring(_num_processes() == 1):
      yield

  @contextlib.contextmanager
  def _deferring(self, defers: bool = True) -> Iterator[None]:
    before = self._defers
    self._defers = before or defers
    try:
      yield
    finally:
      self._defers = before
    self._raise_notice()

  def reached(self, step: int) -> bool:
    """Returns whether to save and leave now; takes microseconds.

    Args:
      step: the last step, for the message.

    Returns:
      The same on all hosts, if each asks once after each step. After the first
      True it is always True.
    """
    self._step = step
    if self._is_shared and not self._is_reached:
      from jax.experimental import multihost_utils

      self._is_reached = multihost_utils.reached_preemption_sync_point(
        next(_calls)
      )
    return self._is_reached if self._is_shared else self._notice is not None

  def leave(self) -> NoReturn:
    """Raises Preempted with the exit code of the notice."""
    when = '' if self._step is None else f' after step {self._step}'
    if self._notice == signal.SIGINT:
      raise Preempted(SIGINT_EXIT_CODE, f'Interrupted by Ctrl-C{when}.')
    raise Preempted(EXIT_CODE, f'Preempted by SIGTERM{when}.')

  def _raise_notice(self) -> None:
    """Leaves if there was a notice, unless it is only to be noted."""
    if self._notice is not None and not self._defers:
      self.leave()

  def _take_signals(self) -> None:
    """Handles those signals that no handler of the program handles."""
    for signum in (signal.SIGTERM, signal.SIGINT):
      handler = signal.getsignal(signum)
      if signum == signal.SIGTERM and self._is_shared:
        self._old_handlers.pop(signum, None)  # JAX keeps it.
        continue
      # None is a handler that was not made in Python and cannot be restored.
      if handler in (signal.SIG_IGN, None):
        continue
      if _is_clients(handler, signum):
        if signum == signal.SIGINT or not _jax_has_notice():
          continue  # To install it again would change it: see siginterrupt.
      elif not self._hears(signum):
        self._old_handlers[signum] = handler
        handler = self._handler(signum)
      signal.signal(signum, handler)  # JAX may have replaced it in C++.

  def _put_back(self) -> None:
    """Restores the handlers, unless they were replaced since."""
    for signum, handler in self._old_handlers.items():
      if self._hears(signum):
        signal.signal(signum, handler)
    self._old_handlers = {}

  def _handler(self, signum: int) -> Any:
    is_last = signum == signal.SIGINT and self._is_interrupted
    return signal.SIG_DFL if is_last else self._on_signal

  def _hears(self, signum: int) -> bool:
    return signal.getsignal(signum) == self._handler(signum)

  def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
    if signum == signal.SIGINT:
      if watchdog.is_debugged(frame):
        raise KeyboardInterrupt  # Ends a command of pdb, and not pdb.
      if any(map(watchdog.is_debugged, sys._current_frames().values())):
        return  # Another thread's pdb cannot be interrupted.
      self._is_interrupted = True
      signal.signal(signum, signal.SIG_DFL)
      saves = 'saving, then ' if self._defers else ''
      _say(f'Ctrl-C: {saves}leaving; press Ctrl-C again to leave at once.')
    if self._notice is not None:
      return
    self._notice = signum
    if self._is_shared:
      _tell_jax()
    self._raise_notice()

  def _warn_of_clients(self) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
      handler = signal.getsignal(signum)
      is_jaxs = signum == signal.SIGTERM and self._is_shared
      key = (signum, handler)
      if is_jaxs or not _is_clients(handler, signum) or key in self._warned:
        continue
      self._warned.add(key)
      logging.warning(
        '%s has a handler of the program itself, %r, which alone handles it:'
        ' jaxline does not save on this signal.',
        signal.Signals(signum).name,
        handler,
      )


@contextlib.contextmanager
def paused() -> Iterator[None]:
  """Restores the handlers from before the watch, for a prompt."""
  watch = _active
  if watch is None or not _is_main_thread():
    yield
    return
  watch._put_back()
  try:
    yield
  finally:
    watch._take_signals()


def begin_run(takes_steps: bool = True) -> Watch:
  """Ends the start-up of the active watch: there may be something to save.

  Call it after `jax.distributed` is initialised, if it will be.

  Args:
    takes_steps: False for evaluation alone, which never asks `reached`. JAX
      would then swallow every SIGTERM, so the watch takes it from JAX for good:
      Python cannot restore a handler that JAX made in C++, and after the watch
      the default handler ends the process.

  Returns:
    The watch; a new one, which handles no signals, if none is active.

  Raises:
    Preempted: a notice came before, and its exception was swallowed.
  """
  watch = _active or Watch()
  watch._is_shared = watch._defers = takes_steps and _jax_has_notice()
  if watch is _active:
    watch._take_signals()
    watch._warn_of_clients()
  if watch._is_shared and watch._notice is not None:
    _tell_jax()
  watch._raise_notice()
  return watch


def _is_clients(handler: Any, signum: int) -> bool:
  """Returns whether a handler belongs to the program that runs us.

  The handlers of Python (for Ctrl-C), of a watch in the process that forked
  this one, of asyncio and of a notebook's kernel do not: a cell that trains is
  interrupted in the same way as a program.
  """
  if handler is signal.default_int_handler:
    return signum != signal.SIGINT
  function = getattr(handler, 'func', handler)  # asyncio's is a partial.
  module = getattr(function, '__module__', None) or ''
  is_known = module == __name__ or module.split('.')[0] in _NOTEBOOKS
  return callable(handler) and not is_known


def _tell_jax() -> None:
  """Passes a notice on to JAX, which tells the other hosts."""
  os.kill(os.getpid(), signal.SIGTERM)


def _say(text: str) -> None:
  # Not by sys.stderr, which the handler may have interrupted.
  with contextlib.suppress(OSError):
    os.write(2, f'\n[jaxline] {text}\n'.encode())


def _jax_has_notice() -> bool:
  """Returns whether JAX handles SIGTERM and lets the hosts agree."""
  # Not imported here, which takes a second: then it is not initialised either.
  jax = sys.modules.get('jax')
  return (
    jax is not None
    and jax.distributed.is_initialized()
    and jax.config.jax_enable_preemption_service
  )


def _is_main_thread() -> bool:
  return threading.current_thread() is threading.main_thread()


def _num_processes() -> int:
  jax = sys.modules.get('jax')
  return 1 if jax is None else jax.process_count()


def _in_forked_child() -> None:
  """Restores the signal handlers in a forked worker.

  Otherwise it would ignore SIGTERM, and its copy of one Ctrl-C at the terminal
  would count as a second one in its parent.
  """
  if _active is None:
    return
  is_first = _active._hears(signal.SIGINT) and not _active._is_interrupted
  _active.__exit__()
  if is_first:
    # The parent needs its workers while it saves, so they ignore the first.
    signal.signal(signal.SIGINT, _spare_once)


def _spare_once(signum: int, frame: types.FrameType | None) -> None:
  del frame
  signal.signal(signum, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_forked_child)
