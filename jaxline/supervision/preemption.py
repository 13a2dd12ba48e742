"""Ends a run in order on SIGTERM, Ctrl-C or a preemption notice.

    with preemption.Watch(grace=5.0) as watch:
      ...                         # Start-up: a notice raises Preempted at once.
      preemption.begin_run()      # After jax.distributed.initialize.
      ...                         # The same, without the limit of 5 seconds.
      with watch.training():      # A notice is only noted.
        while ...:
          ...
          if watch.reached(step):   # Every host asks after each step,
            ...                     # saves its state,
            watch.leave()           # and raises Preempted.

`paused` restores Python's own Ctrl-C at a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import itertools
import os
import select
import signal
import sys
import threading
import time
import types
from typing import Any, NoReturn

from absl import logging

# EX_TEMPFAIL of sysexits.h: all is saved, and the run can be started again.
EXIT_CODE = 75
# The code of a shell for a program that Ctrl-C ended.
SIGINT_EXIT_CODE = 130

# How long the handler may take to run before the signal is sent again.
_PATIENCE_SECS = 0.25

# Packages whose handlers a run may replace.
_NOTEBOOKS = ('asyncio', 'ipykernel')

# JAX's notice names the step to leave at: one more than the largest that a host
# has asked with, which is 0 before the first. A run that continues at step 500
# would never ask with the 1 of a notice during its start-up, so `reached` asks
# with the number of calls and not with the run's step.
_calls = itertools.count(1)

_active: Watch | None = None

# Called before a line is written past sys.stderr: what is drawn on the terminal
# makes room.
before_notice: list[Callable[[], None]] = []


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

  The first signal decides the exit code; a later SIGTERM changes nothing. The
  second SIGINT ends the process at once, in any state of its threads. Ignored
  signals (nohup, a shell's background jobs) stay ignored. A signal for which
  the program has its own Python handler is left to that handler.

  Python drops exceptions that a handler raises inside `__del__` or a callback
  of the garbage collector, of which JAX has one. The notice is kept: it acts
  when training begins, at the next `reached`, or by the grace.

  Once `jax.distributed` is initialised, JAX handles SIGTERM, and all hosts
  agree on the step after which they leave. Call `begin_run` after that. A
  notice during start-up then acts after the first step.

  Only the main thread can handle signals. A watch that is entered on another
  thread knows only of JAX's notice.
  """

  def __init__(self, grace: float | None = None):
    """Makes the watch; it handles no signals before it is entered.

    Args:
      grace: how many seconds the process may live after a notice, until
        `begin_run`, even if its main thread does not return from C or has
        dropped Preempted. None sets no limit.
    """
    self._grace = grace
    self._notice: int | None = None
    # Whether JAX has SIGTERM, so that all hosts leave after the same step.
    self._is_shared = False
    # Whether a notice is only noted, instead of raised at once.
    self._defers = False
    self._step: int | None = None
    self._is_reached = False
    self._old_handlers: dict[int, Any] = {}
    self._stack = contextlib.ExitStack()  # Ends `_hear`.

  def __enter__(self) -> Watch:
    global _active
    self._is_shared = self._defers = _jax_has_notice()
    if _is_main_thread():
      _active = self
      self._hear()
    return self

  def __exit__(self, *unused: Any) -> None:
    global _active
    self._stack.close()
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
    for signum in self._old_handlers:
      if not self._hears(signum):  # The experiment's constructor replaced it.
        _warn_of_clients(signum, signal.getsignal(signum))
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

  def _hear(self) -> None:
    """Handles signals, here and on `_listen`'s thread; `_stack` ends both."""
    # In this order, so that every signal finds a reader.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # set_wakeup_fd requires it.
    # The reader ends when its pipe is closed.
    self._stack.callback(os.close, write_end)
    threading.Thread(
      target=self._listen, args=(read_end,), name='interrupts', daemon=True
    ).start()
    old_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    self._stack.callback(self._put_back, write_end, old_fd)
    self._take_signals()

  def _take_signals(self) -> None:
    """Makes `_on_signal` the handler of those signals that are ours."""
    for signum in (signal.SIGTERM, signal.SIGINT):
      handler = signal.getsignal(signum)
      if signum == signal.SIGTERM and self._is_shared:
        self._old_handlers.pop(signum, None)  # JAX keeps it.
        continue
      # None is a handler that was not made in Python and cannot be restored.
      if handler in (signal.SIG_IGN, None):
        continue
      if _is_clients(handler, signum):
        if self._grace is None:
          _warn_of_clients(signum, handler)
        if signum == signal.SIGINT or not _jax_has_notice():
          continue  # To install it again would change it: see siginterrupt.
      elif not self._hears(signum):
        self._old_handlers[signum] = handler
        handler = self._on_signal
      signal.signal(signum, handler)  # JAX may have replaced it in C++.

  def _put_back(self, write_end: int, old_fd: int) -> None:
    """Restores handlers and descriptor, unless they were replaced since."""
    for signum, handler in self._old_handlers.items():
      if self._hears(signum):
        signal.signal(signum, handler)
    self._old_handlers = {}
    current = signal.set_wakeup_fd(old_fd)
    if current != write_end:
      signal.set_wakeup_fd(current)

  def _hears(self, signum: int) -> bool:
    return signal.getsignal(signum) == self._on_signal

  def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
    del frame
    if self._notice is not None:
      return
    self._notice = signum
    if self._is_shared:
      _tell_jax()
    self._raise_notice()

  def _listen(self, read_end: int) -> None:
    """Acts on signals even if the main thread does not; has its own thread.

    Python runs a handler on the main thread after that returns from C, where a
    compilation takes minutes. But it writes the number of the signal to the
    pipe at once. This thread ends the process at the second SIGINT and after
    the grace. It interrupts a system call that the signal did not: one that
    began just after it, or while another thread received it.

    Args:
      read_end: of the pipe that `signal.set_wakeup_fd` writes to; closed here.
    """
    first: int | None = None
    began = 0.0
    is_interrupted = is_repeated = False
    # Until the signal is sent to the main thread again; then there is no limit.
    patience: float | None = _PATIENCE_SECS
    poller = select.poll()
    poller.register(read_end, select.POLLIN)
    with open(read_end, 'rb', buffering=0) as pipe:
      while True:
        left = None
        if first is not None:
          since = time.monotonic() - began
          if (grace := self._grace) is not None and since > grace:
            _say(f'{signal.Signals(first).name}: leaving.')
            is_int = first == signal.SIGINT
            os._exit(SIGINT_EXIT_CODE if is_int else EXIT_CODE)
          if patience is not None and since > patience:
            patience = None
            if self._notice is None:
              is_repeated = True
              signal.pthread_kill(threading.main_thread().ident or 0, first)
          limits = [x - since for x in (grace, patience) if x is not None]
          left = min(limits, default=None)
        if not poller.poll(None if left is None else 1e3 * left + 1):
          continue
        if not (data := pipe.read(1)):
          return
        signum = data[0]
        if not self._hears(signum):
          continue  # It is for the program's own handler, or JAX's.
        if is_repeated and signum == first:
          is_repeated = False
          continue
        if first is None:
          first, began = signum, time.monotonic()
        if signum == signal.SIGINT:
          if is_interrupted:
            os._exit(SIGINT_EXIT_CODE)
          is_interrupted = True
          saves = 'saving, then ' if self._grace is None else ''
          _say(f'Ctrl-C: {saves}leaving; press Ctrl-C again to leave at once.')


@contextlib.contextmanager
def held() -> Iterator[None]:
  """Delays a notice until the end of code that must not be interrupted.

  A call into Orbax, whose event loops run on this thread, may turn Preempted
  into another error.

  Raises:
    Preempted: on leaving, if there was a notice that would have raised it.
  """
  with contextlib.ExitStack() as stack:
    if _active is not None and _is_main_thread():
      stack.enter_context(_active._deferring())
    yield


@contextlib.contextmanager
def paused() -> Iterator[None]:
  """Restores the handlers from before the watch, for a prompt."""
  with contextlib.ExitStack() as stack:
    if _active is not None and _is_main_thread():
      _active._stack.close()
      stack.callback(_active._hear)
    yield


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
  watch._grace = None
  watch._is_shared = watch._defers = takes_steps and _jax_has_notice()
  if watch is _active:
    watch._take_signals()
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


def _warn_of_clients(signum: int, handler: Any) -> None:
  logging.warning(
    '%s has a handler of the program itself, %r, which alone handles it:'
    ' jaxline does not save on this signal.',
    signal.Signals(signum).name,
    handler,
  )


def _tell_jax() -> None:
  """Passes a notice on to JAX, which tells the other hosts."""
  os.kill(os.getpid(), signal.SIGTERM)


def _say(text: str) -> None:
  for make_room in before_notice.copy():
    make_room()
  # Not by sys.stderr, whose lock may be held by a thread that hangs.
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
  hears_interrupts = _active._hears(signal.SIGINT)
  _active.__exit__()
  if hears_interrupts:
    # The parent needs its workers while it saves, so they ignore the first.
    signal.signal(signal.SIGINT, _spare_once)


def _spare_once(signum: int, frame: types.FrameType | None) -> None:
  del frame
  signal.signal(signum, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_forked_child)
