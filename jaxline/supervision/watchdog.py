"""Ends a run that hangs, and prints where it hangs.

A run that waits for ever (for another process, a disk, a lock) costs as much as
one that trains. One thread watches one counter, the signs of life. If it stands
still for too long, the thread prints the stacks of all threads and the open
activities, and ends the process.
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

# EX_SOFTWARE of sysexits.h.
EXIT_CODE = 70

# How long the report may take, in seconds. It cannot be printed if stderr is a
# pipe that nobody reads, or if the run hangs at the lock of stderr.
_REPORT_SECS = 10.0
# How often the ticker looks, in seconds, at most.
_TICK_SECS = 5.0
# A thread inside of these modules waits for a human.
_DEBUGGERS = ('pdb', 'bdb')

_signs = 0
# The open activities of each thread that has any, outermost first. A thread
# writes its own entry only.
_activities: dict[threading.Thread, list[str]] = {}

_secs = 0.0  # The limit of the newest run.
_num_runs = 0  # How many are inside of `limit`.
_covers_exit = False
_ticker: threading.Thread | None = None
_limit_is_new = threading.Event()
_arming = threading.Lock()


def give_sign_of_life() -> None:
  """Counts a sign of life, in some tens of nanoseconds."""
  global _signs
  _signs += 1


@contextlib.contextmanager
def activity(name: str) -> Iterator[None]:
  """Names what this thread does inside; begins and ends with a sign of life."""
  thread = threading.current_thread()
  stack = _activities.setdefault(thread, [])
  stack.append(name)
  give_sign_of_life()
  try:
    yield
  finally:
    stack.pop()
    if not stack:
      del _activities[thread]
    give_sign_of_life()


@contextlib.contextmanager
def limit(secs: float | None) -> Iterator[None]:
  """Ends the process after some seconds without a sign of life inside.

  A thread in pdb stops the clock. So does a process that is stopped, or a
  machine that is suspended: a tick counts only for as long as it should take.

  A call into C that never releases the interpreter's lock blocks the ticker as
  well. For this case `faulthandler`, which needs no interpreter, prints the
  stacks and ends the process with code 1 after twice the time without a tick.
  It counts the time of a stop too, so a process that was stopped for longer
  than that may end when it is continued. faulthandler has one timer, so nothing
  else can use `dump_traceback_later` meanwhile.

  Args:
    secs: the longest silence, in seconds; None sets no limit.

  Yields:
    Nothing.
  """
  global _secs, _num_runs, _ticker
  if secs is None:
    yield
    return
  give_sign_of_life()
  _secs, _num_runs = secs, _num_runs + 1
  _arm()  # The ticker may never get the interpreter's lock.
  _limit_is_new.set()
  if _ticker is None or not _ticker.is_alive():  # As in a forked process.
    _ticker = threading.Thread(target=_tick, name='watchdog', daemon=True)
    _ticker.start()
  try:
    yield
  finally:
    _num_runs -= 1
    if not _num_runs:
      faulthandler.cancel_dump_traceback_later()


def cover_exit() -> None:
  """Applies the limit of the newest run to the end of the process too.

  So that a process whose run has ended does not wait for ever for a thread that
  is no daemon, or in a function of `atexit`. Between the end of a run and that
  of the program there is no limit.
  """
  global _covers_exit
  _covers_exit = True


def _process_ends() -> bool:
  # The main thread counts as alive while Python waits for the threads of
  # concurrent.futures, before all others.
  is_alive = threading.main_thread().is_alive()
  return not is_alive or getattr(threading, '_SHUTTING_DOWN', False)


def _arm() -> None:
  with _arming:
    # To descriptor 2, since sys.stderr may be an object without one.
    faulthandler.dump_traceback_later(2 * _secs, exit=True, file=2)


def _tick() -> None:
  """Watches the counter; runs on a thread of its own."""
  texts: queue.SimpleQueue[str] = queue.SimpleQueue()
  is_reported = threading.Event()

  def report() -> None:
    print(texts.get(), file=sys.stderr, flush=True)
    is_reported.set()

  # Now: no thread can be started while Python ends.
  reporter = threading.Thread(target=report, name='watchdog', daemon=True)
  reporter.start()
  silence, seen, last, is_armed = 0.0, _signs, time.monotonic(), False
  while True:
    secs = _secs
    is_watching = _num_runs > 0 or (_covers_exit and _process_ends())
    if is_watching:
      _arm()
    elif is_armed:
      faulthandler.cancel_dump_traceback_later()
    is_armed = is_watching
    tick = min(secs / 20, _TICK_SECS)
    _limit_is_new.wait(tick)
    _limit_is_new.clear()
    now = time.monotonic()
    # For anything beyond two ticks, this thread was stopped.
    elapsed, last = min(now - last, 2 * tick), now
    silence = silence + elapsed if is_watching and seen == _signs else 0.0
    seen = _signs
    if silence < secs:
      continue
    frames = dict(sys._current_frames())
    for thread in (threading.current_thread(), reporter):
      frames.pop(thread.ident or 0, None)
    if any(map(is_debugged, frames.values())):
      silence = 0.0
      continue
    texts.put(_report(silence, frames))
    is_reported.wait(_REPORT_SECS)
    os._exit(EXIT_CODE)


def _report(silence: float, frames: dict[int, types.FrameType]) -> str:
  lines = [
    f'[jaxline] Watchdog: no sign of life for {silence:.1f} s. The process ends'
    f' with code {EXIT_CODE}.'
  ]
  for thread, stack in _activities.copy().items():  # Other threads change it.
    lines.append(
      f'[jaxline] Thread {thread.name!r} was in: {" > ".join(stack)}'
    )
  names = {t.ident: t.name for t in threading.enumerate()}
  for ident, frame in frames.items():
    lines.append(f'\nThread {names.get(ident, ident)!r}:')
    lines += [line.rstrip() for line in traceback.format_stack(frame)]
  # A thread that hangs on the way out of an error would hide the cause.
  for ident, found in sys._current_exceptions().items():
    # Before Python 3.12, what sys.exc_info returns.
    error: object = found[1] if isinstance(found, tuple) else found
    if isinstance(error, BaseException):
      lines.append(f'\nThread {names.get(ident, ident)!r} was handling:')
      lines += [line.rstrip() for line in traceback.format_exception(error)]
  return '\n'.join(lines)


def is_debugged(frame: types.FrameType | None) -> bool:
  """Returns whether a thread that runs this frame waits in a debugger."""
  return any(
    f.f_globals.get('__name__') in _DEBUGGERS
    for f, _ in traceback.walk_stack(frame)
  )


def _before_fork() -> None:
  # A forked process has faulthandler's timer without its thread, and would wait
  # for that at its end.
  _arming.acquire()
  if _num_runs:
    faulthandler.cancel_dump_traceback_later()


def _after_fork(is_child: bool) -> None:
  global _num_runs
  if is_child:
    _num_runs = 0  # Nobody watches over the run of the parent here.
  _arming.release()
  if _num_runs:
    _arm()


os.register_at_fork(
  before=_before_fork,
  after_in_parent=lambda: _after_fork(False),
  after_in_child=lambda: _after_fork(True),
)
