"""Ends a run that hangs, and prints where it hangs.

A thread watches a counter of the run's progress. If it stops for too long, the
thread prints the stacks of all threads and ends the process.
"""

from collections.abc import Iterator
import contextlib
import faulthandler
import os
import queue
import sys
import threading
import time
import traceback
import types
from typing import Any

from jaxline import errors

# EX_SOFTWARE of sysexits.h.
EXIT_CODE = 70

# Time limit of the report in seconds, since a pipe or a disk may block it.
_REPORT_SECS = 10.0
# The longest time between two looks at the counter, in seconds.
_TICK_SECS = 1.0
# A thread inside one of these modules waits for the user.
_DEBUGGERS = ('pdb', 'bdb')

# Whether the limit of the newest run applies to the process's exit too.
covers_exit = False

_signs = 0
_secs = 0.0  # The limit of the newest run.
_num_runs = 0  # The number of open `limit` contexts.
_ticker: threading.Thread | None = None
_backstop = threading.Lock()  # Guards faulthandler's timer.


def report_progress() -> None:
  """Reports progress to the watchdog; takes tens of nanoseconds."""
  global _signs
  _signs += 1


@contextlib.contextmanager
def limit(secs: float | None) -> Iterator[None]:
  """Ends the process after `secs` without progress inside the context.

  The clock stops while a thread is in pdb or the process is suspended. A call
  into C that never releases the GIL blocks the watchdog's thread too. In this
  case `faulthandler` prints the stacks and ends the process with code 1 after
  twice the time. The context uses faulthandler's only timer.
  """
  global _secs, _num_runs, _ticker
  if secs is None:
    yield
    return
  report_progress()
  _secs, _num_runs = secs, _num_runs + 1
  _arm()  # The ticker may never get the GIL.
  if _ticker is None or not _ticker.is_alive():  # A fork does not copy it.
    _ticker = threading.Thread(target=_tick, name='watchdog', daemon=True)
    _ticker.start()
  try:
    yield
  finally:
    with _backstop:
      _num_runs -= 1
      if not _num_runs:
        faulthandler.cancel_dump_traceback_later()


def is_debugged(frame: types.FrameType | None) -> bool:
  """Returns whether the thread of a frame waits in a debugger."""
  return any(
    f.f_globals.get('__name__') in _DEBUGGERS
    for f, _ in traceback.walk_stack(frame)
  )


def _arm() -> bool:
  """Restarts faulthandler's timer; returns False if no limit applies."""
  with _backstop:
    ends = covers_exit and getattr(threading, '_SHUTTING_DOWN', False)
    if is_watching := _num_runs > 0 or ends:
      faulthandler.dump_traceback_later(2 * _secs, exit=True, file=2)
    return is_watching


def _tick() -> None:
  hangs: queue.SimpleQueue[Any] = queue.SimpleQueue()
  # Start it now, because no thread can be started while Python exits.
  reporter = threading.Thread(target=lambda: _report(*hangs.get()), daemon=True)
  reporter.start()
  silence, seen = 0.0, _signs
  while True:
    secs, is_watching = _secs, _arm()
    tick = min(secs / 20, _TICK_SECS)
    time.sleep(tick)
    # Count ticks: a clock would not stop while the process is suspended.
    silence = silence + tick if is_watching and seen == _signs else 0.0
    seen = _signs
    if silence < secs:
      continue
    frames = dict(sys._current_frames())
    for thread in (threading.current_thread(), reporter):
      frames.pop(thread.ident or 0, None)
    if any(map(is_debugged, frames.values())):
      silence = 0.0
      continue
    hangs.put((silence, frames))
    reporter.join(_REPORT_SECS)
    os._exit(EXIT_CODE)


def _report(silence: float, frames: dict[int, types.FrameType]) -> None:
  text = (
    f'[jaxline] Watchdog: no sign of life for {silence:.1f} s. The process ends'
    f' with code {EXIT_CODE}.{errors.link("no sign of life")}\n'
  )
  names = {t.ident: t.name for t in threading.enumerate()}
  for ident, frame in frames.items():
    stack = traceback.format_stack(frame)
    text += f'\nThread {names.get(ident, ident)!r}:\n{"".join(stack)}'
  # A thread that hangs while it handles an error would hide the cause.
  for ident, found in sys._current_exceptions().items():
    # Before Python 3.12, it is a tuple as in sys.exc_info.
    error: object = found[1] if isinstance(found, tuple) else found
    if isinstance(error, BaseException):
      stack = traceback.format_exception(error)
      text += f'\nThread {names.get(ident, ident)!r} had:\n{"".join(stack)}'
  os.write(2, text.encode())  # A hung thread may hold the lock of sys.stderr.


# A forked process would have faulthandler's timer but not its thread, and would
# wait for the thread at exit. So the timer is canceled during a fork.


def _before_fork() -> None:
  _backstop.acquire()
  if _num_runs:
    faulthandler.cancel_dump_traceback_later()


def _in_child() -> None:
  global _num_runs
  _num_runs = 0  # Only the parent watches the run.
  _backstop.release()


if hasattr(os, 'register_at_fork'):  # Windows does not fork.
  os.register_at_fork(
    before=_before_fork,
    after_in_parent=_backstop.release,  # The next tick restarts the timer.
    after_in_child=_in_child,
  )
