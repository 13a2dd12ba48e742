"""What a program does, as JSON lines in a file, for the tests that wait for it.

The environment's EVENTS names the file; without it nothing is written. An event
has a `phase`, and `what`, 'start' or 'end', or the `step` that it is of:

    {"phase": "checkpoint restore", "what": "start"}
    {"phase": "evaluation", "what": "end", "step": 5}
    {"phase": "step", "step": 7}

An event is one write, so that a kill cannot cut it.
"""

from collections.abc import Callable, Iterator
import contextlib
import json
import os
import pathlib
import time
from typing import Any


def write(phase: str, **about: Any) -> None:
  """Appends an event."""
  if path := os.environ.get('EVENTS'):
    line = json.dumps({'phase': phase, **about}) + '\n'
    # A test may limit what the program can write; the library shall notice.
    with contextlib.suppress(OSError):
      file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
      try:
        os.write(file, line.encode())
      finally:
        os.close(file)


def install() -> None:
  """Has each activity of the library write where it starts and ends."""
  from jaxline.base import debug

  log_activity = debug.log_activity

  @contextlib.contextmanager
  def noted(activity_name: str, **kwargs: Any) -> Iterator[None]:
    # 'evaluation of step 5' is the phase 'evaluation' of step 5.
    phase, _, step = activity_name.partition(' of step ')
    about = {'step': int(step)} if step else {}
    with log_activity(activity_name, **kwargs):
      write(phase, what='start', **about)
      yield
    write(phase, what='end', **about)

  debug.log_activity = noted


def read(path: pathlib.Path, phase: str, **about: Any) -> list[dict[str, Any]]:
  """Returns the events of a phase that are as said, in order."""
  if not path.exists():
    return []
  found = map(json.loads, path.read_text(encoding='utf-8').splitlines())
  wanted = {'phase': phase, **about}
  return [event for event in found if wanted.items() <= event.items()]


def wait(
  happened: Callable[[], bool], is_over: Callable[[], bool], secs: float
) -> bool:
  """Waits until something has happened; returns False if it no longer can.

  Raises TimeoutError if neither is so within `secs`.
  """
  deadline = time.monotonic() + secs
  while not happened():
    if is_over():
      return happened()
    if time.monotonic() > deadline:
      raise TimeoutError(f'Nothing of it in {secs} s.')
    time.sleep(0.002)
  return True
