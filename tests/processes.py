"""Python programs in processes of their own."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_SECS = 120


@contextlib.contextmanager
def started(
  *args: Any, cwd: Any = ROOT, **env: str
) -> Iterator[subprocess.Popen[str]]:
  """Runs `python ARGS` in a session of its own; kills it in the end."""
  with subprocess.Popen(
    [sys.executable, *map(str, args)],
    cwd=cwd,
    env=os.environ | {'PYTHONPATH': str(ROOT), 'PYTHONUNBUFFERED': '1'} | env,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  ) as process:
    try:
      yield process
    finally:
      process.kill()


def end(
  process: subprocess.Popen[str], typed: str = '', timeout: float = TIMEOUT_SECS
) -> subprocess.CompletedProcess[str]:
  """Waits for a process; returns its exit code and its unread output."""
  out, err = process.communicate(typed, timeout=timeout)
  return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(
  *args: Any, typed: str = '', timeout: float = TIMEOUT_SECS, **env: Any
) -> subprocess.CompletedProcess[str]:
  """Runs `python ARGS` to its end."""
  with started(*args, **env) as process:
    return end(process, typed, timeout)


def wait_until(
  condition: Callable[[], Any], secs: float = TIMEOUT_SECS
) -> None:
  """Waits until a condition holds; fails if that takes too long."""
  deadline = time.monotonic() + secs
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.005)


def state_of(pid: int) -> str:
  """Returns the state of a process, such as 'S' (asleep); '' without one."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return ''
  return stat.rpartition(')')[2].split()[0]


def is_gone(pid: int) -> bool:
  """Returns whether a process has ended, waited for by its parent or not."""
  return state_of(pid) in ('', 'Z')


def wait_until_gone(pids: Iterable[int]) -> None:
  pids = list(pids)
  wait_until(lambda: all(map(is_gone, pids)))


def free_address() -> str:
  with socket.create_server(('localhost', 0)) as server:
    return f'localhost:{server.getsockname()[1]}'
