"""Ends a run that hangs, and prints where it hangs.

A run that waits for ever (for another process, a disk, a lock) costs as much as
one that trains. The watchdog prints the stack of every thread and the open
activities, then ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
import types
from typing import Any

from jaxline import debug

# EX_SOFTWARE of sysexits.h.
EXIT_CODE = 70

# How long the report may take, in seconds. It cannot be printed if stderr is a
# pipe that nobody reads, or if the run hangs at the lock of stderr.
_REPORT_SECS = 10.0
# How often the watchdog looks, in seconds, at most.
_TICK_SECS = 5.0
# A thread inside of these modules waits for a human.
_DEBUGGERS = ('pdb', 'bdb')


# The threads that must give signs of life of their own.
_watched: set[threading.Thread] = set()


@contextlib.contextmanager
def watched() -> Iterator[None]:
  """Requires signs of life of the calling thread itself while inside."""
  thread = threading.current_thread()
  debug.give_sign_of_life()  # Its silence begins here.
  _watched.add(thread)
  try:
    yield
  finally:
    _watched.discard(thread)


class Watchdog:
  """Ends the process after some seconds without a sign of life.

  Signs of life are `debug.give_sign_of_life` and the start and end of each
  `debug.log_activity`, in any thread. If threads are `watched`, each of them
  must give its own. While a thread is in pdb, there is no alarm.

  Only time in which this process could run counts. So a change of the clock, a
  suspended machine or a process that was stopped and continued raises no alarm,
  with one exception: a call into C that never releases the interpreter's lock
  blocks the watchdog's thread too. For this case `faulthandler`, which needs no
  interpreter, prints the stacks and ends the process with code 1 after twice
  the time. It counts the time of a stop too, so a process that was stopped for
  longer than that may end when it is continued. faulthandler has one timer, so
  nothing else can use `dump_traceback_later` inside of a watchdog.
  """

  def __init__(self, secs: float | None, exit: Callable[[int], Any] = os._exit):
    """Makes a watchdog; it watches nothing until it is entered.

    Args:
      secs: the longest silence, in seconds; None disables the watchdog.
      exit: ends the process, called with EXIT_CODE.
    """
    self._secs = secs
    self._exit = exit
    self._stop = threading.Event()
    self._thread: threading.Thread | None = None

  def __enter__(self) -> Watchdog:
    if self._secs is not None:
      self._stop.clear()
      self._thread = threading.Thread(
        target=self._watch, args=(self._secs,), name='watchdog', daemon=True
      )
      self._thread.start()
    return self

  def __exit__(self, *unused: Any) -> None:
    if self._thread is not None:
      self._stop.set()
      self._thread.join()
      self._thread = None

  def _watch(self, secs: float) -> None:
    tick = min(secs / 20, _TICK_SECS)
    last = time.monotonic()
    seen: dict[threading.Thread | None, int] = {}
    silences: dict[threading.Thread | None, float] = {}
    try:
      while True:
        # To descriptor 2, since sys.stderr may be an object without one.
        faulthandler.dump_traceback_later(2 * secs, exit=True, file=2)
        if self._stop.wait(tick):
          return
        now = time.monotonic()
        # For anything beyond two ticks, this thread was stopped.
        elapsed, last = min(now - last, 2 * tick), now
        # Of all threads together, unless some are watched by themselves.
        threads: set[threading.Thread | None] = {*_watched} or {None}
        for thread in threads:
          signs = debug.signs_of_life(thread)
          is_silent = seen.get(thread) == signs
          seen[thread] = signs
          silences[thread] = silences[thread] + elapsed if is_silent else 0.0
          if silences[thread] < secs:
            continue
          frames = dict(sys._current_frames())
          del frames[threading.get_ident()]  # This thread's.
          if any(_is_debugged(frame) for frame in frames.values()):
            silences[thread] = 0.0
            continue
          self._alarm(thread, silences[thread], frames)
          return
    finally:
      faulthandler.cancel_dump_traceback_later()

  def _alarm(
    self,
    thread: threading.Thread | None,
    silence: float,
    frames: dict[int, types.FrameType],
  ) -> None:
    """Prints a report and ends the process."""
    whose = '' if thread is None else f' of thread {thread.name!r}'
    lines = [
      f'[jaxline] Watchdog: no sign of life{whose} for {silence:.1f} s. The'
      f' process ends with code {EXIT_CODE}.'
    ]
    activities = debug.activities()
    for name, stack in activities.items():
      lines.append(f'[jaxline] Thread {name!r} was in: {" > ".join(stack)}')
    if not activities:
      lines.append('[jaxline] No thread was in a logged activity.')
    names = {t.ident: t.name for t in threading.enumerate()}
    for ident, frame in frames.items():
      lines.append(f'\nThread {names.get(ident, ident)!r}:')
      lines += [line.rstrip() for line in traceback.format_stack(frame)]
    reporter = threading.Thread(
      target=lambda: print('\n'.join(lines), file=sys.stderr, flush=True),
      daemon=True,
    )
    reporter.start()
    reporter.join(_REPORT_SECS)
    self._exit(EXIT_CODE)


def _is_debugged(frame: types.FrameType) -> bool:
  return any(
    f.f_globals.get('__name__') in _DEBUGGERS
    for f, _ in traceback.walk_stack(frame)
  )
