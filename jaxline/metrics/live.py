"""Draws a live status line at the bottom of a terminal."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
import os
import sys
import threading
from typing import Any

from jaxline.base import watchdog

_REFRESH_SECS = 0.25
_WIDTH = 80  # The default for a terminal that does not know its width.


class LiveLine:
  """A line at the bottom of a terminal that other output scrolls past.

  It keeps the cursor visible and changes no mode of the terminal, so nothing
  needs to be restored if the process dies. It is hidden while a debugger
  prompts and while a shell has the process in the background.
  """

  def __init__(self, text: Callable[[int], str]):
    """Draws the line until `stop`; `text` returns it for a width."""
    self._text = text
    self._out, self._pid = sys.stdout, os.getpid()
    self._lock = threading.RLock()
    self._stopped = threading.Event()
    self._is_mid_line = False
    self._writes: dict[Any, Callable[[str], int]] = {}
    streams: set[Any] = {sys.stdout, sys.stderr}
    for stream in filter(is_terminal, streams):
      self._writes[stream] = stream.write
      # Replace the method, since logging handlers hold the stream itself.
      stream.write = functools.partial(self._write, stream)
    threading.Thread(target=self._run, name='jaxline-live', daemon=True).start()

  def stop(self) -> None:
    """Removes the line."""
    with self._lock, contextlib.suppress(OSError, ValueError):
      self._text = lambda width: ''
      self._draw()
    self._stopped.set()
    for stream, write in self._writes.items():
      stream.write = write

  def _is_hidden(self) -> bool:
    # These errors mean a terminal without a shell, or Windows.
    with contextlib.suppress(OSError, ValueError, AttributeError):
      if os.tcgetpgrp(self._out.fileno()) != os.getpgrp():
        return True
    frames = sys._current_frames().values()
    return self._stopped.is_set() or any(map(watchdog.is_debugged, frames))

  def _write(self, stream: Any, text: str) -> int:
    write = self._writes[stream]
    if os.getpid() != self._pid:  # The lock may have been held at the fork.
      return write(text)
    with self._lock:
      if not text or self._is_hidden():
        return write(text)
      write(f'\x1b[J{text}')
      # Do not draw over a progress bar, whose text ends with neither.
      self._is_mid_line = not text.endswith(('\n', '\r'))
      self._draw()
    return len(text)

  def _draw(self) -> None:
    if not (self._is_mid_line or self._is_hidden()):
      columns = os.get_terminal_size(self._out.fileno()).columns or _WIDTH
      self._writes[self._out](f'\x1b[J{self._text(columns - 1)}\r')
      self._out.flush()

  def _run(self) -> None:
    with contextlib.suppress(OSError, ValueError):  # The terminal is gone.
      while not self._stopped.wait(_REFRESH_SECS):
        with self._lock:
          self._draw()


def is_terminal(stream: Any) -> bool:
  """Returns whether a stream is a terminal that can redraw a line."""
  try:
    return stream.isatty() and os.environ.get('TERM', '') != 'dumb'
  except (AttributeError, ValueError):  # The stream is None or closed.
    return False
