"""Lines that stay at the bottom of a terminal while others are printed.

What Python code writes to stdout or stderr meanwhile appears above the lines.
The cursor is never hidden and no mode of the terminal is changed, so that
nothing needs to be restored, however the process ends.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import logging as std_logging
import os
import pdb
import sys
import threading
from typing import Any, TextIO

from absl import logging

from jaxline.supervision import preemption

_REFRESH_SECS = 0.25


def is_terminal(stream: Any) -> bool:
  """Returns whether lines can be redrawn where a stream goes."""
  try:
    return bool(stream.isatty()) and os.environ.get('TERM', '') != 'dumb'
  except (AttributeError, ValueError):  # None, or closed.
    return False


class Live:
  """Draws lines again and again, on a thread of its own.

  A debugger ends it: both would write to one terminal.

  Attributes:
    is_on: whether the lines are drawn.
  """

  def __init__(self, draw: Callable[[int], str]):
    """Draws nothing before `start`.

    Args:
      draw: gets the width of the terminal; returns the lines, none of which is
        wider.
    """
    self._draw = draw
    self._lock = threading.RLock()
    self.is_on = False
    self._height = 0  # Of what is drawn; the cursor is at its end.
    self._lines = ''
    self._columns = 80
    self._partial = ''  # A line that the program has not ended.
    self._stopped = threading.Event()
    self._stack = contextlib.ExitStack()

  def start(self) -> None:
    """Begins to draw, and takes stdout and stderr where they are terminals."""
    global _active
    self._out: TextIO = sys.stdout
    self.is_on, _active = True, self
    preemption.before_notice.append(self.detach)
    self._stack.callback(preemption.before_notice.remove, self.detach)
    for name in ('stdout', 'stderr'):
      if is_terminal(stream := getattr(sys, name)):
        self._take(name, stream)
    make = pdb.Pdb.__init__

    def stop_and_make(debugger: pdb.Pdb, *args: Any, **kwargs: Any) -> None:
      self.stop()
      make(debugger, *args, **kwargs)

    self._set(pdb.Pdb, '__init__', stop_and_make)
    self._thread = threading.Thread(
      target=self._run, name='jaxline-live', daemon=True
    )
    self._thread.start()

  def _take(self, name: str, stream: TextIO) -> None:
    """Replaces a stream, also in the handlers of logging that have it."""
    above = _Above(self, stream)
    self._set(sys, name, above)
    absl_handler = logging.get_absl_handler()
    handlers: list[Any] = [absl_handler.python_handler]
    for handler in handlers + std_logging.root.handlers:
      if getattr(handler, 'stream', None) is stream:
        handler.setStream(above)
        self._stack.callback(handler.setStream, stream)

  def _set(self, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until the end, unless somebody replaces it since."""
    old = getattr(owner, name)

    def put_back() -> None:
      if getattr(owner, name) is value:
        setattr(owner, name, old)

    setattr(owner, name, value)
    self._stack.callback(put_back)

  def stop(self) -> None:
    """Removes the lines and gives everything back; may be called twice."""
    global _active
    with self._lock:
      self._put(self._partial)
      self.is_on, self._partial = False, ''
      if _active is self:
        _active = None
      stack = self._stack.pop_all()
    # Not under the lock: a handler of logging that writes waits for it.
    stack.close()
    self._stopped.set()

  def detach(self) -> None:
    """Leaves what is drawn where it is, without waiting for any lock.

    For somebody who writes to the terminal past sys.stderr.
    """
    self._height = 0

  def write(self, stream: TextIO, text: str) -> None:
    """Writes a program's output above the lines.

    Args:
      stream: where it goes when nothing is drawn.
      text: the output. A line appears among those that stay once it is ended.
    """
    if not self.is_on:
      stream.write(text)
      return
    with self._lock:
      ended, newline, partial = (self._partial + text).rpartition('\n')
      # Of a progress bar, what it wrote last.
      self._partial = partial[partial.rfind('\r', 0, -1) + 1 :]
      if newline or self._partial:
        self._put(ended + newline, self._lines)

  def _run(self) -> None:
    try:
      while not self._stopped.is_set():
        # An OSError: there is no terminal any more.
        self._columns, _ = os.get_terminal_size(self._out.fileno())
        lines = self._draw(self._columns)
        with self._lock:
          if lines != self._lines or not self._height:
            self._lines = lines
            self._put('', lines)
        self._stopped.wait(_REFRESH_SECS)
    except OSError:
      pass
    finally:
      self.stop()

  def _put(self, text: str, lines: str = '') -> None:
    """Removes what is drawn, writes text, and draws lines below it."""
    if not self.is_on:
      return
    up = f'\x1b[{self._height - 1}A' if self._height > 1 else ''
    erase = f'\r{up}\x1b[J' if self._height else ''
    if lines and (partial := self._partial.strip('\r')):
      lines = f'{partial[: self._columns - 1]}\n{lines}'
    self._height = lines.count('\n') + 1 if lines else 0
    data = f'{erase}{text}{lines}'
    encoding = self._out.encoding or 'utf-8'
    try:
      self._out.write(data.encode(encoding, 'replace').decode(encoding))
      self._out.flush()
    except (OSError, ValueError):
      self.is_on = False  # The terminal is gone; the run goes on.


class _Above:
  """A stream whose text appears above the lines of a `Live`."""

  def __init__(self, live: Live, stream: TextIO):
    self._live = live
    self._stream = stream

  def write(self, text: str) -> int:
    self._live.write(self._stream, text)
    return len(text)

  def writelines(self, lines: Any) -> None:
    self.write(''.join(lines))

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


_active: Live | None = None


def _in_forked_child() -> None:
  """Lets a forked worker write as if there were no lines."""
  if _active is not None:
    _active.is_on = False  # Another thread may have held the lock.


os.register_at_fork(after_in_child=_in_forked_child)
