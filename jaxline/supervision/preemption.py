"""Saves and ends a run on a signal, Ctrl-C or a preemption notice.

During start-up, a notice raises `Preempted` at once in a single process; with
several processes, it takes effect after the first step. Inside `Watch.training`
it is deferred: every host calls `reached` after each step and, if that returns
True, saves its state and calls `leave`, which raises `Preempted`.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import ctypes
import itertools
import os
import signal
import sys
import threading
import types
from typing import Any, NoReturn

from absl import logging

from jaxline.base import watchdog

# EX_TEMPFAIL of sysexits.h: the run was saved and can be restarted.
EXIT_CODE = 75
# A shell gives this code to a program that Ctrl-C ended.
SIGINT_EXIT_CODE = 130

# Signals that may end a run: faults, job control, the system and Python do not
# use them. macOS lacks one.
_NAMES = (
  *('SIGTERM', 'SIGHUP', 'SIGUSR1', 'SIGUSR2', 'SIGQUIT', 'SIGALRM'),
  *('SIGVTALRM', 'SIGPROF', 'SIGXCPU', 'SIGIO', 'SIGPWR'),
)
SIGNALS = {x.name: x for x in signal.Signals if x.name in _NAMES}
_USUAL = (signal.SIGINT, signal.SIGTERM)
# A closed terminal and Slurm's --signal send these. Windows has neither.
_OTHERS = [SIGNALS[x] for x in ('SIGHUP', 'SIGUSR1') if x in SIGNALS]

# A run may replace handlers of these packages, so that Ctrl-C works in an event
# loop or a notebook as it does in a program.
_REPLACED = ('_signal', 'asyncio', 'ipykernel', 'jaxline')

# `reached` polls JAX with a count of its calls. JAX answers a notice before the
# first poll with 1: a run resumed at step 500 would never poll with that step.
_calls = itertools.count(1)

_active: Watch | None = None


class Preempted(SystemExit):
  """Ends the process with an exit code, without an error of the run."""

  is_joint = False  # Whether all processes of the run leave after one step.
  is_over = False  # Whether the run is complete.

  def __init__(self, code: int, reason: str):
    super().__init__(reason)
    self.code = code


class Watch:
  """A context that handles SIGINT and other signals that end a run.

  The first signal determines the exit code. The first SIGINT restores the
  default handler, so the second ends the process at once, even in C code.

  Once `jax.distributed` is initialized, JAX handles SIGTERM, and all hosts
  agree on the step after which they leave. The handlers of other signals then
  send SIGTERM. Outside the main thread, a watch gets only JAX's notice.
  """

  def __init__(self) -> None:
    # Store it, since Python drops an exception that a handler raises inside
    # `__del__` or a callback of the garbage collector, such as JAX's.
    self._notice: int | None = None
    # Whether JAX handles SIGTERM and agrees with all hosts on the last step.
    self._is_shared = False
    # Whether a notice waits for `reached` instead of raising Preempted now.
    self._defers = False
    self._step: int | None = None
    self._old_handlers: dict[int, Any] = {}
    self._signals = [*_USUAL, *_OTHERS]

  def __enter__(self) -> Watch:
    global _active
    if threading.current_thread() is threading.main_thread():
      _active = self
    self._share(True)
    return self

  def __exit__(self, *unused: Any) -> None:
    global _active
    for signum, handler in self._old_handlers.items():
      is_jaxs = self._is_shared and signum == signal.SIGTERM
      # Keep a handler that the program has set since.
      current = signal.getsignal(signum)
      if current in (self._on_signal, signal.SIG_DFL) and not is_jaxs:
        signal.signal(signum, handler)
    if _active is self:
      _active = None

  @contextlib.contextmanager
  def training(self) -> Iterator[None]:
    """Within this context, a notice is deferred until `reached`.

    On a single host, a notice after the last `reached` is raised at the end.
    Several hosts would have to agree on it, and so ignore it.
    """
    for signum in self._signals:
      if self is _active and _is_programs(signum):
        text = '%s has a handler of the program itself, %r, and so does not'
        text += ' save the run.'
        logging.warning(text, signum.name, signal.getsignal(signum))
    self._act()
    # If hosts cannot agree on a step, the host with the signal leaves at once,
    # and the other hosts fail without it.
    jax = sys.modules.get('jax')
    self._defers |= jax is None or jax.process_count() == 1
    try:
      yield
    finally:
      self._defers = self._is_shared
    self._act()

  def reached(self, step: int) -> bool:
    """Returns whether to save and leave now, the same on all hosts."""
    self._step = step
    if not self._is_shared:
      return self._notice is not None
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(next(_calls))

  def leave(self) -> NoReturn:
    """Raises Preempted with the exit code of the notice."""
    when = '' if self._step is None else f' after step {self._step}'
    name = signal.Signals(self._notice or signal.SIGTERM).name
    end = Preempted(EXIT_CODE, f'Preempted by {name}{when}.')
    if self._notice == signal.SIGINT:
      end = Preempted(SIGINT_EXIT_CODE, f'Interrupted by Ctrl-C{when}.')
    end.is_joint = self._is_shared
    raise end

  def _act(self) -> None:
    if self._notice is None:
      return
    if self._is_shared:  # JAX's handler tells the other hosts.
      os.kill(os.getpid(), signal.SIGTERM)
    elif not self._defers:
      self.leave()

  def _share(self, takes_steps: bool) -> None:
    """Handles the signals; leaves SIGTERM to JAX if this lets hosts agree."""
    jax = sys.modules.get('jax')  # An import would take a second.
    self._is_shared = self._defers = (
      takes_steps
      and jax is not None
      and jax.distributed.is_initialized()
      and jax.config.jax_enable_preemption_service
    )
    for signum in self._signals if self is _active else ():
      is_term, handler = signum == signal.SIGTERM, signal.getsignal(signum)
      # Reinstall SIGTERM: JAX may have replaced it in C++, unseen by Python.
      is_taken = signum in self._old_handlers and not is_term
      # None means a handler from outside Python, which cannot be restored.
      is_kept = handler in (signal.SIG_IGN, None) or _is_programs(signum)
      if is_taken or is_kept:
        continue
      if handler != self._on_signal:
        self._old_handlers[signum] = handler
      if not (is_term and self._is_shared):
        signal.signal(signum, self._on_signal)

  def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
    if signum == signal.SIGINT:
      if watchdog.is_debugged(frame):
        raise KeyboardInterrupt  # This ends a command of pdb, but not pdb.
      if any(map(watchdog.is_debugged, sys._current_frames().values())):
        return  # A pdb in another thread cannot be interrupted.
      signal.signal(signum, signal.SIG_DFL)
      text = (
        f'\n[jaxline] Ctrl-C: {"saving, then " if self._defers else ""}leaving;'
        ' press Ctrl-C again to leave at once.\n'
      )
      # Avoid sys.stderr: this handler may have interrupted a write to it.
      with contextlib.suppress(OSError):
        os.write(2, text.encode())
    if self._notice is None:
      self._notice = signum
      self._act()


def active_watch() -> Watch:
  """Returns the active watch, or a new one without signals."""
  return _active or Watch()


def begin_run(takes_steps: bool = True, signals: str = '') -> Watch:
  """Ends the start-up of the active watch and returns it.

  Call it after `jax.distributed` is initialized. `signals` names further
  signals that end the run. The hosts of an evaluation have no common step to
  leave after, so the watch takes SIGTERM from JAX, which would swallow it.
  """
  watch = active_watch()
  watch._signals += [SIGNALS[name] for name in filter(None, signals.split(','))]
  watch._share(takes_steps)
  watch._act()
  return watch


def _is_programs(signum: int) -> bool:
  """Returns whether the program around the run handles a signal."""
  handler = signal.getsignal(signum)
  if handler == signal.SIG_DFL and signum not in _USUAL:
    # Python does not see handlers in C, such as faulthandler's.
    action = ctypes.create_string_buffer(1024)  # The address comes first.
    ctypes.CDLL(None).sigaction(signum, None, action)
    return any(action[: ctypes.sizeof(ctypes.c_void_p)])
  function = getattr(handler, 'func', handler)  # asyncio's is a partial.
  module = getattr(function, '__module__', None) or ''
  return callable(handler) and module.split('.')[0] not in _REPLACED


def _in_child() -> None:
  """Replaces the run's handlers in a forked worker with the defaults."""
  default = signal.SIG_DFL
  for signum in _active._old_handlers if _active else ():
    if not _is_programs(signum):
      signal.signal(signum, default)
      if signum != signal.SIGTERM:
        # Ignore the first signal: the parent needs its workers while it saves.
        signal.signal(signum, lambda n, unused: signal.signal(n, default))


if hasattr(os, 'register_at_fork'):  # Windows does not fork.
  os.register_at_fork(after_in_child=_in_child)
