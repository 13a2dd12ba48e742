"""Leaves a run in order when it is told to: SIGTERM, Ctrl-C, preemption.

    with preemption.Watch() as watch:
      ...                         # Start-up: a notice raises Preempted at once.
      with watch.training():      # Here it is only noted,
        while ...:
          ...
          if watch.reached(step):   # asked for after each step by every host,
            ...                     # which saves what it has,
            watch.leave()           # and then raises Preempted.

At a prompt, `paused` makes Ctrl-C Python's own again.
"""

from __future__ import annotations

from collections.abc import Iterator
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
import weakref

from absl import logging

# EX_TEMPFAIL of sysexits.h: what was to be saved is saved, start me again.
EXIT_CODE = 75
# What a shell gives for a program that Ctrl-C has ended.
SIGINT_EXIT_CODE = 130

# How often a notice that was swallowed is raised again, in seconds.
_TICK_SECS = 0.1

# JAX's notice names the step to leave at as one more than the largest that a
# host has asked with, which is 0 before the first. A run that goes on at step
# 500 would never ask with the 1 of a notice during its start-up: so these are
# counted, and not the run's steps.
_calls = itertools.count(1)

_active: Watch | None = None


class Preempted(SystemExit):
  """Ends the process with an exit code; no error of the run.

  `code` is EXIT_CODE or SIGINT_EXIT_CODE, `str()` says why.
  """

  def __init__(self, code: int, reason: str):
    super().__init__(code)
    self.reason = reason

  def __str__(self) -> str:
    return self.reason


class Watch:
  """Hears SIGTERM and SIGINT while a run is inside of it.

  The first of them counts and decides the exit code; a SIGTERM after it changes
  nothing. The second SIGINT ends the process at once, whatever its threads do.
  Signals that are ignored (nohup, a shell's background jobs) stay ignored, and
  one that has a handler of the program's own in Python is left to that.

  Python drops what a handler raises where nothing may be raised: in `__del__`,
  or in a callback of the garbage collector, of which JAX has one. So where
  Preempted is neither on its way nor caught and kept, it is raised again.

  A watch that is entered within another one takes over from it, for good: after
  it the handlers are those from before both.

  Once `jax.distributed` is initialised, JAX takes the SIGTERM, and all hosts
  agree upon the step after which they leave. Enter the watch after that. A
  notice during start-up then acts after the first step.

  Only the main thread can hear signals: entered on another one, the watch knows
  of none but JAX's notice.
  """

  def __init__(self, takes_steps: bool = True, grace: float | None = None):
    """Makes the watch; it hears nothing before it is entered.

    Args:
      takes_steps: False for evaluation alone, which never asks `reached`. JAX
        would then swallow every SIGTERM, so it is taken from JAX, for good:
        Python cannot put the handler back that JAX made in C++, and after the
        watch the default one ends the process.
      grace: how long after a notice the process may live, in seconds, even if
        its main thread does not come back from C. For where there is nothing to
        save; None waits.
    """
    self._takes_steps = takes_steps
    self._grace = grace
    self._shared = False
    self._notice: int | None = None
    self._raised: weakref.ref[Preempted] | None = None
    self._old_handlers: dict[int, Any] = {}
    self._old_fd = -1
    self._step: int | None = None
    self._is_reached = False
    self._defers = False
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> Watch:
    global _active
    self._shared = self._takes_steps and _jax_has_notice()
    if threading.current_thread() is threading.main_thread():
      outer, _active = _active, self
      self._stack.callback(_forget_active)
      self._hear(outer)
      if outer is not None and outer._notice is not None:
        with contextlib.ExitStack() as stack:
          stack.push(self.__exit__)  # For what this may raise.
          self._on_signal(outer._notice, None)
          stack.pop_all()
    return self

  def __exit__(self, *unused: Any) -> None:
    self._stack.close()

  @contextlib.contextmanager
  def training(self) -> Iterator[None]:
    """Notes a notice for `reached`, instead of raising, while inside.

    The last save and the wait for other hosts belong inside. On one host, a
    notice that came after the last `reached` raises on leaving; where several
    would have to agree, it came too late to count.

    Raises:
      Preempted: on entering or leaving, if a notice is noted.
    """
    # Hosts that cannot agree must not leave their steps one by one: there the
    # notice ends this host at once, and the others notice that.
    self._defers = self._shared or _num_processes() == 1
    for signum in self._old_handlers:
      if not self._hears(signum):  # Such as by the experiment's constructor.
        _warn_of_clients(signum, signal.getsignal(signum))
    try:
      # It was raised before, and somebody has swallowed it: `__del__` does.
      self._leave_if_alone()
      yield
    finally:
      self._defers = False
    self._leave_if_alone()

  def reached(self, step: int) -> bool:
    """Says whether to save and leave now; takes microseconds.

    Args:
      step: the step that has been taken, for the message.

    Returns:
      The same on all hosts, if each asks once after each step. After the first
      True, True.
    """
    self._step = step
    if self._shared and not self._is_reached:
      from jax.experimental import multihost_utils

      self._is_reached = multihost_utils.reached_preemption_sync_point(
        next(_calls)
      )
    return self._is_reached if self._shared else self._notice is not None

  def leave(self) -> NoReturn:
    """Raises Preempted, with the exit code of the notice that came."""
    when = '' if self._step is None else f' after step {self._step}'
    error = Preempted(
      EXIT_CODE, f'Preempted by SIGTERM{when}. Start it again to go on.'
    )
    if self._notice == signal.SIGINT:
      error = Preempted(SIGINT_EXIT_CODE, f'Interrupted by Ctrl-C{when}.')
    self._raised = weakref.ref(error)
    try:
      raise error
    finally:
      del error  # Its traceback holds this frame, which would hold it.

  def _leave_if_alone(self) -> None:
    if self._notice is not None and not self._shared:
      self.leave()

  def _hear(self, outer: Watch | None) -> None:
    """Takes the signals, until `self._stack` is closed."""
    # In this order, so that no signal finds half of it: the reader first.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # As set_wakeup_fd asks.
    # The reader ends when its pipe does.
    self._stack.callback(os.close, write_end)
    threading.Thread(
      target=self._listen,
      args=(read_end,),
      name='interrupts',
      daemon=True,
    ).start()
    self._old_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    self._stack.callback(self._put_back, write_end)
    before = {}
    if outer is not None:
      self._old_fd = outer._old_fd
      before, outer._old_handlers = outer._old_handlers, {}
    signums = (
      [signal.SIGINT] if self._shared else [signal.SIGTERM, signal.SIGINT]
    )
    for signum in signums:
      handler = before.get(signum, signal.getsignal(signum))
      # None is a handler that is not Python's, and could not be put back.
      if handler in (signal.SIG_IGN, None):
        continue
      if _is_clients(handler, signum):
        if self._grace is None:
          _warn_of_clients(signum, handler)
        if signum == signal.SIGTERM and _jax_has_notice():
          # JAX has replaced it in C++, unseen by Python.
          signal.signal(signum, handler)
        continue
      self._old_handlers[signum] = handler
      signal.signal(signum, self._on_signal)

  def _put_back(self, write_end: int) -> None:
    """Undoes `_hear`, but for what somebody else has set since."""
    for signum, handler in self._old_handlers.items():
      if self._hears(signum):
        signal.signal(signum, handler)
    self._old_handlers = {}
    current = signal.set_wakeup_fd(self._old_fd)
    if current != write_end:
      signal.set_wakeup_fd(current)

  def _hears(self, signum: int) -> bool:
    return signal.getsignal(signum) == self._on_signal

  def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
    del frame
    if self._notice is None:
      self._notice = signum
      if self._shared:
        # JAX hears it and tells the other hosts.
        os.kill(os.getpid(), signal.SIGTERM)
    if not (self._shared or self._defers or self._is_leaving()):
      self.leave()

  def _is_leaving(self) -> bool:
    return self._raised is not None and self._raised() is not None

  def _listen(self, read_end: int) -> None:
    """Sees to it that a notice is heard; on a thread of its own.

    Python runs a handler on the main thread, once that is back from C; a
    compilation takes minutes. But the number of the signal is written to the
    pipe as it comes. Ends the process at the second SIGINT, and after the
    grace.

    Args:
      read_end: of the pipe that `signal.set_wakeup_fd` writes to; closed here.
    """
    main = threading.main_thread().ident
    first: int | None = None
    interrupts, repeated, deadline = 0, 0, float('inf')
    poller = select.poll()
    poller.register(read_end, select.POLLIN)
    with open(read_end, 'rb', buffering=0) as pipe:
      while True:
        if poller.poll(None if first is None else 1e3 * _TICK_SECS):
          if not (data := pipe.read(1)):
            return
          signum = data[0]
          if not self._hears(signum):
            continue  # The program's own handler handles it, or JAX's.
          if repeated and signum == self._notice:
            repeated -= 1
            continue
          if first is None:
            first = signum
            if self._grace is not None:
              deadline = time.monotonic() + self._grace
          if signum == signal.SIGINT:
            interrupts += 1
            if interrupts == 2:
              os._exit(SIGINT_EXIT_CODE)
            saves = self._grace is None
            _say(
              'Ctrl-C: '
              + (
                'saving what is to be saved, then leaving'
                if saves
                else 'leaving'
              )
              + '; press Ctrl-C again to leave at once.'
            )
        if time.monotonic() > deadline:
          assert first is not None
          _say(f'{signal.Signals(first).name}: leaving.')
          os._exit(SIGINT_EXIT_CODE if first == signal.SIGINT else EXIT_CODE)
        if self._is_swallowed() and not repeated:
          assert main is not None
          assert self._notice is not None
          repeated = 1
          signal.pthread_kill(main, self._notice)

  def _is_swallowed(self) -> bool:
    """Says whether Preempted was raised, and is no longer there."""
    return (
      self._notice is not None
      and self._raised is not None
      and not (self._shared or self._defers or self._is_leaving())
      and self._hears(self._notice)
    )


@contextlib.contextmanager
def held() -> Iterator[None]:
  """Keeps a notice until the end of what must not be torn apart.

  Out of a call into Orbax, whose event loops run on this thread, another error
  than Preempted may come.

  Raises:
    Preempted: on leaving, if a notice has come that would have raised it.
  """
  watch = _active
  is_main = threading.current_thread() is threading.main_thread()
  if watch is None or watch._defers or not is_main:
    yield
    return
  watch._defers = True
  try:
    yield
  finally:
    watch._defers = False
  watch._leave_if_alone()


@contextlib.contextmanager
def paused() -> Iterator[None]:
  """Makes signals Python's own while somebody is asked something."""
  watch = _active
  if watch is None or (
    threading.current_thread() is not threading.main_thread()
  ):
    yield
    return
  watch.__exit__()
  try:
    yield
  finally:
    watch.__enter__()


def _forget_active() -> None:
  global _active
  _active = None


def _is_clients(handler: Any, signum: int) -> bool:
  """Says whether a handler is of the program that runs us.

  Neither Python's own is, of Ctrl-C, nor that of asyncio or of a notebook's
  kernel: a cell that trains is interrupted as a program is.
  """
  if handler in (signal.default_int_handler, _spare_once):
    return signum != signal.SIGINT
  function = getattr(handler, 'func', handler)  # asyncio's is a partial.
  module = getattr(function, '__module__', None) or ''
  return callable(handler) and module.split('.')[0] not in (
    'asyncio',
    'ipykernel',
  )


def _warn_of_clients(signum: int, handler: Any) -> None:
  logging.warning(
    '%s has a handler of the program itself, %r, which alone handles it:'
    ' jaxline will not save on it.',
    signal.Signals(signum).name,
    handler,
  )


def _say(text: str) -> None:
  # Not by sys.stderr, whose lock a thread that hangs may hold.
  with contextlib.suppress(OSError):
    os.write(2, f'\n[jaxline] {text}\n'.encode())


def _jax_has_notice() -> bool:
  """Says whether JAX hears SIGTERM and lets the hosts agree."""
  # Not imported: then nobody has initialised it, and it takes a second.
  jax = sys.modules.get('jax')
  return (
    jax is not None
    and jax.distributed.is_initialized()
    and jax.config.jax_enable_preemption_service
  )


def _num_processes() -> int:
  jax = sys.modules.get('jax')
  return 1 if jax is None else jax.process_count()


def _in_forked_child() -> None:
  """Gives a forked worker its signals back.

  Otherwise it would ignore being terminated, and its share of one Ctrl-C at the
  terminal would be counted by its parent as a second one.
  """
  if _active is None:
    return
  hears_interrupts = _active._hears(signal.SIGINT)
  _active._stack.close()
  if hears_interrupts:
    # The parent needs its workers while it saves: the first is not for them.
    signal.signal(signal.SIGINT, _spare_once)


def _spare_once(signum: int, frame: types.FrameType | None) -> None:
  del frame
  signal.signal(signum, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_forked_child)
