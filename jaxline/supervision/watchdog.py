"""Ends a run that hangs, and says where.

A run that waits for ever (for a peer, a disk, a lock) costs as much as one that
trains. The watchdog prints the stack of every thread and what the run was in
the middle of, then ends the process.
"""

from __future__ import annotations

import collections
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

# How long the report may take, in seconds: where stderr is a pipe that nobody
# reads, or its lock is what the run hangs at, it is left unsaid.
_REPORT_SECS = 10.0
# The watchdog's own clock, in seconds, at most.
_TICK_SECS = 5.0
# A thread inside of these waits for a human.
_DEBUGGERS = ('pdb', 'bdb')


class Watchdog:
  """Ends the process where no sign of life came for some seconds.

  A sign of life is a `beat`, and the start and the end of every
  `debug.log_activity`, in whichever thread. Where threads are `watched`, each
  of them must give its own. While a thread stands in pdb, everything may wait.

  Only time in which this process could run counts. So setting the clock,
  suspending the machine, or stopping the process and continuing it raises no
  alarm, with one exception: below is a second line.

  A call into C that never gives back the interpreter's lock hangs this thread
  too. Then `faulthandler`, which needs no interpreter, prints the stacks and
  ends the process with code 1, after twice the time. It cannot know of a stop:
  a process that was stopped for longer than that may end as it is continued.
  faulthandler has one timer, so inside of a watchdog `dump_traceback_later` is
  not for others.
  """

  def __init__(self, secs: float | None, exit: Callable[[int], Any] = os._exit):
    """Makes a watchdog; it sleeps until it is entered.

    Args:
      secs: the longest silence, in seconds; None never ends anything.
      exit: ends the process, called with EXIT_CODE.

    Raises:
      ValueError: if `secs` is not a positive number.
    """
    if secs is not None and not 0 < secs < float('inf'):
      raise ValueError(
        f'The watchdog got secs={secs!r}; expected a positive number of'
        ' seconds, or None for no watchdog.'
      )
    self._secs = secs
    self._exit = exit
    self._beats: collections.Counter[int | None] = collections.Counter()
    self._watched: set[threading.Thread] = set()
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

  def beat(self) -> None:
    """Gives a sign of life; from any thread, in some tens of nanoseconds."""
    self._beats[threading.get_ident()] += 1

  @contextlib.contextmanager
  def watched(self) -> Iterator[None]:
    """Watches this thread by itself while inside."""
    thread = threading.current_thread()
    self._watched.add(thread)
    try:
      yield
    finally:
      self._watched.discard(thread)

  def _signs(self) -> dict[threading.Thread | None, tuple[int, int]]:
    """Returns the number of signs of life of each watched thread.

    Of all threads together, under None, where none is.
    """
    watched = self._watched.copy()
    if not watched:
      beats = sum(self._beats.copy().values())
      return {None: (beats, debug.activity_changes())}
    return {
      thread: (self._beats[thread.ident], debug.activity_changes(thread))
      for thread in watched
    }

  def _watch(self, secs: float) -> None:
    tick = min(secs / 20, _TICK_SECS)
    last = time.monotonic()
    seen: dict[threading.Thread | None, tuple[int, int]] = {}
    silences: dict[threading.Thread | None, float] = {}
    try:
      while True:
        _arm_second_line(2 * secs)
        if self._stop.wait(tick):
          return
        now = time.monotonic()
        # What is beyond two ticks, this thread was stopped.
        elapsed, last = min(now - last, 2 * tick), now
        before, seen = seen, self._signs()
        for thread, signs in seen.items():
          is_silent = before.get(thread) == signs
          silence = silences.get(thread, 0.0) + elapsed if is_silent else 0.0
          silences[thread] = silence
          if silence < secs:
            continue
          frames = _frames()
          if any(_is_debugged(frame) for frame in frames.values()):
            silences.clear()
            break
          self._alarm(thread, silence, frames)
          return
    finally:
      faulthandler.cancel_dump_traceback_later()

  def _alarm(
    self,
    thread: threading.Thread | None,
    silence: float,
    frames: dict[int, types.FrameType],
  ) -> None:
    """Prints the report and ends the process."""
    text = _report(thread, silence, frames)
    reporter = threading.Thread(
      target=lambda: print(text, file=sys.stderr, flush=True), daemon=True
    )
    reporter.start()
    reporter.join(_REPORT_SECS)
    self._exit(EXIT_CODE)


def _arm_second_line(secs: float) -> None:
  # To descriptor 2, since sys.stderr may be an object without one.
  faulthandler.dump_traceback_later(secs, exit=True, file=2)


def _frames() -> dict[int, types.FrameType]:
  """Returns the innermost frame of each thread but this one."""
  frames = dict(sys._current_frames())
  del frames[threading.get_ident()]
  return frames


def _outwards(frame: types.FrameType | None) -> Iterator[types.FrameType]:
  while frame is not None:
    yield frame
    frame = frame.f_back


def _is_debugged(frame: types.FrameType) -> bool:
  return any(
    f.f_globals.get('__name__') in _DEBUGGERS for f in _outwards(frame)
  )


def _report(
  thread: threading.Thread | None,
  silence: float,
  frames: dict[int, types.FrameType],
) -> str:
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
  return '\n'.join(lines)
