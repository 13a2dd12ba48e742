"""Leaves a run in order when it is told to: SIGTERM, Ctrl-C, preemption.

    with preemption.Watch() as watch:
      ...                         # Start-up: a notice raises Preempted at once.
      with watch.training():      # Here it is only noted,
        while ...:
          ...
          if watch.reached(step):   # asked for after each step by every host,
            ...                     # which saves what it has,
            watch.leave()           # and then raises Preempted.

`debugger_fallback` belongs around the `with Watch()`, not inside of it: at the
debugger's prompt Ctrl-C is then Python's own again.
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

# EX_TEMPFAIL of sysexits.h: what was to be saved is saved, start me again.
EXIT_CODE = 75
# What a shell gives for a program that Ctrl-C has ended.
SIGINT_EXIT_CODE = 130

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
  Signals that are ignored (nohup, a shell's background jobs) stay ignored.

  Once `jax.distributed` is initialised, JAX takes the SIGTERM, and all hosts
  agree upon the step after which they leave. Enter the watch after that. A
  notice during start-up then acts after the first step.

  Only the main thread can hear signals: entered on another one, the watch knows
  of none but JAX's notice.
  """

  def __init__(self, takes_steps: bool = True):
    """Makes the watch; it hears nothing before it is entered.

    Args:
      takes_steps: False for evaluation alone, which never asks `reached`. JAX
        would then swallow every SIGTERM, so it is taken from JAX, for good:
        Python cannot put the handler back that JAX made in C++, and after the
        watch the default one ends the process.
    """
    self._takes_steps = takes_steps
    self._shared = False
    self._notice: int | None = None
    self._step: int | None = None
    self._is_reached = False
    self._defers = False
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> Watch:
    global _active
    self._shared = self._takes_steps and _jax_has_notice()
    if threading.current_thread() is threading.main_thread():
      self._hear()
      _active = self
      self._stack.callback(_forget_active)
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
    if self._notice == signal.SIGINT:
      raise Preempted(SIGINT_EXIT_CODE, f'Interrupted by Ctrl-C{when}.')
    raise Preempted(
      EXIT_CODE, f'Preempted by SIGTERM{when}. Start it again to go on.'
    )

  def _leave_if_alone(self) -> None:
    if self._notice is not None and not self._shared:
      self.leave()

  def _hear(self) -> None:
    """Takes the signals, until `self._stack` is closed."""
    # In this order, so that no signal finds half of it: the reader first.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # As set_wakeup_fd asks.
    # The reader ends when its pipe does.
    self._stack.callback(os.close, write_end)
    threading.Thread(
      target=_count_interrupts,
      args=(read_end,),
      name='interrupts',
      daemon=True,
    ).start()
    old = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    self._stack.callback(signal.set_wakeup_fd, old)
    signums = (
      [signal.SIGINT] if self._shared else [signal.SIGTERM, signal.SIGINT]
    )
    for signum in signums:
      handler = signal.getsignal(signum)
      # None is a handler that is not Python's, and could not be put back.
      if handler not in (signal.SIG_IGN, None):
        self._stack.callback(signal.signal, signum, handler)
        signal.signal(signum, self._on_signal)

  def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
    del frame
    if self._notice is not None:
      return
    self._notice = signum
    if self._shared:
      # JAX hears it and tells the other hosts.
      os.kill(os.getpid(), signal.SIGTERM)
    elif not self._defers:
      self.leave()


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


def _forget_active() -> None:
  global _active
  _active = None


def _count_interrupts(read_end: int) -> None:
  """Ends the process at the second SIGINT; on a thread of its own.

  Python runs a handler on the main thread, once that is back from C; a
  compilation takes minutes. But the number of the signal is written to the
  pipe as it comes.

  Args:
    read_end: of the pipe that `signal.set_wakeup_fd` writes to; closed here.
  """
  count = 0
  with open(read_end, 'rb', buffering=0) as pipe:
    while data := pipe.read(64):
      before, count = count, count + data.count(signal.SIGINT)
      if count >= 2:
        os._exit(SIGINT_EXIT_CODE)
      if count > before:
        # Not by sys.stderr, whose lock a thread that hangs may hold.
        with contextlib.suppress(OSError):
          os.write(
            2,
            b'\n[jaxline] Ctrl-C: saving what is to be saved, then leaving;'
            b' press Ctrl-C again to leave at once.\n',
          )


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
  _active._stack.close()
  if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # The parent needs its workers while it saves: the first is not for them.
    signal.signal(signal.SIGINT, _spare_once)


def _spare_once(signum: int, frame: types.FrameType | None) -> None:
  del frame
  signal.signal(signum, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_forked_child)
