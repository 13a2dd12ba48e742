"""A line that stays at the bottom of a terminal while others are printed.

What Python code writes to stdout or stderr meanwhile appears above it. The
cursor is never hidden and no mode of the terminal is changed, so that nothing
needs to be restored, however the process ends.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
import os
import pdb
import sys
import threading
from typing import Any

_REFRESH_SECS = 0.25


def is_terminal(stream: Any) -> bool:
  """Returns whether lines can be redrawn where a stream goes."""
  try:
    return bool(stream.isatty()) and os.environ.get('TERM', '') != 'dumb'
  except (AttributeError, ValueError):  # None, or closed.
    return False


class Live:
  """Draws a line again and again, on a thread of its own.

  A debugger ends it: both would write to one terminal. Nothing is drawn while
  the process is in the background, where a shell writes to the terminal.
  """

  def __init__(self, draw: Callable[[int], str]):
    """Draws nothing before `start`.

    Args:
      draw: gets the width of the terminal; returns a line that is not wider.
    """
    self._draw = draw
    self._lock = threading.RLock()
    self._is_started = False
    self._pid = 0  # Of the process that draws.
    self._is_drawing = False
    self._line = ''
    self._columns = 80
    self._partial = ''  # A line that the program has not ended.
    self._stopped = threading.Event()
    self._stack = contextlib.ExitStack()

  @property
  def is_on(self) -> bool:
    """Whether the line is drawn."""
    with contextlib.suppress(OSError, ValueError):  # A terminal of no shell.
      if os.tcgetpgrp(self._out.fileno()) != os.getpgrp():
        return False
    return self._is_started

  def start(self) -> None:
    """Begins to draw, and takes what is written to stdout and stderr."""
    self._out, self._write = sys.stdout, sys.stdout.write
    self._is_started, self._pid = True, os.getpid()
    for stream in (sys.stdout, sys.stderr):
      if is_terminal(stream):
        # Its method and not the stream: handlers of logging have it too.
        take = functools.partial(self._write_above, stream.write)
        self._set(stream, 'write', take)
    make = pdb.Pdb.__init__

    def stop_and_make(debugger: pdb.Pdb, *args: Any, **kwargs: Any) -> None:
      self.stop()
      make(debugger, *args, **kwargs)

    self._set(pdb.Pdb, '__init__', stop_and_make)
    threading.Thread(target=self._run, name='jaxline-live', daemon=True).start()

  def _set(self, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until the end, unless somebody replaces it since."""
    # A stream may take no attributes: it writes over the line, as C++ code.
    with contextlib.suppress(AttributeError, TypeError):
      old = getattr(owner, name)
      setattr(owner, name, value)

      @self._stack.callback
      def put_back() -> None:
        if getattr(owner, name) is value:
          setattr(owner, name, old)

  def stop(self) -> None:
    """Removes the line and gives everything back; may be called twice."""
    # A forked worker has no line; at the fork, the thread may have the lock.
    if os.getpid() != self._pid:
      return
    with self._lock:
      text, self._partial, self._line = self._partial, '', ''
      self._put(text)
      self._is_started = False
      self._stack.close()
    self._stopped.set()

  def _write_above(self, write: Callable[[str], int], text: str) -> int:
    """Writes above the line, or by `write` where nothing is drawn.

    What the program has not ended, such as a progress bar, takes its place.
    """
    if os.getpid() != self._pid:  # See `stop`.
      return write(text)
    with self._lock:
      # stdout may be a stream around one that was taken.
      if self._is_drawing or not self._is_started:
        return write(text)
      ended, newline, partial = (self._partial + text).rpartition('\n')
      # Of a progress bar, what it wrote last.
      self._partial = partial[partial.rfind('\r', 0, -1) + 1 :]
      self._put(ended + newline)
      return len(text)

  def _run(self) -> None:
    try:
      while not self._stopped.is_set():
        # An OSError: there is no terminal any more.
        columns = os.get_terminal_size(self._out.fileno()).columns or 80
        line = self._draw(columns)
        with self._lock:
          self._line, self._columns = line, columns
          self._put('')  # Also the same line: others may write over it.
        self._stopped.wait(_REFRESH_SECS)
    except OSError:
      pass
    finally:
      self.stop()

  def _put(self, text: str) -> None:
    """Removes what is drawn, writes text, and draws the line below it."""
    if not self._is_started:
      return
    encoding = self._out.encoding or 'utf-8'
    try:
      if self.is_on:
        partial = self._partial.strip('\r')[: self._columns - 1]
        shown = partial or self._line
        text = f'\x1b[J{text}{shown}\r'
      self._is_drawing = True
      self._write(text.encode(encoding, 'replace').decode(encoding))
      self._out.flush()
    except (OSError, ValueError):
      self._is_started = False  # The terminal is gone; the run goes on.
    finally:
      self._is_drawing = False
