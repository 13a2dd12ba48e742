"""Starts a program as several processes of this machine's CPU, for testing.

    python -m jaxline.launch --processes 4 --devices-per-process 2 -- \\
        python experiment.py --config=configs/lm.py

is a run of four processes with two devices each, which communicate like those
of a cluster (by gloo instead of a network of accelerators). Each process gets
its number by the variables that `jaxline.distributed` reads. Each line that it
prints begins with that number. Signals are passed on to all processes, which
get SIGTERM if this one is killed. When one fails, the others have some seconds
to end and are then killed. The exit code comes from the process that failed
first, which the last line names. A process that fails because it lost another
one counts only if no other process fails.

It starts nothing on other machines: docs/reference/launching.md has clusters.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from typing import IO

from jaxline import errors
from jaxline.supervision import preemption

# Passed on to the processes, unless they were ignored when this one started.
_SIGNALS = (signal.SIGINT, *preemption.SIGNALS.values())
# Codes of processes that ended because of a signal: the others are saving too,
# for as long as that takes.
_IN_ORDER = (preemption.EXIT_CODE, preemption.SIGINT_EXIT_CODE)
# Runs a command, and sends SIGTERM to its group when standard input ends, which
# is a pipe that only this process holds open.
_WITH_PARENT = """exec 3<&0 < /dev/null
{ read -r x <&3; kill -s TERM -- -$$; } &
exec "$@" 3<&-"""
# How long to read the rest of the pipes of ended processes, in seconds. It only
# runs out if a process has left its group and keeps them open.
_DRAIN_SECS = 5.0

_printing = threading.Lock()


def main(argv: Sequence[str]) -> int:
  """Runs a command line, without the program's name; returns the exit code."""
  args = _parse(argv)
  with socket.create_server(('127.0.0.1', 0)) as server:
    address = f'127.0.0.1:{server.getsockname()[1]}'
  launch = _Launch()
  for signum in _SIGNALS:
    if signal.getsignal(signum) != signal.SIG_IGN:
      signal.signal(signum, launch.pass_on)
  try:
    for process in range(args.processes):
      env = os.environ | {
        'JAX_COORDINATOR_ADDRESS': address,
        'JAX_COORDINATOR_BIND_ADDRESS': address,
        'JAX_NUM_PROCESSES': str(args.processes),
        'JAX_PROCESS_ID': str(process),
        'JAX_PLATFORMS': 'cpu',
        'JAX_CPU_COLLECTIVES_IMPLEMENTATION': 'gloo',
        # It counts for more than the flag of XLA that says the same.
        'JAX_NUM_CPU_DEVICES': str(args.devices_per_process),
        # Otherwise output is printed late, and is lost if a process is killed.
        'PYTHONUNBUFFERED': '1',
      }
      launch.start(process, args.command, env)
    return launch.wait(args.grace_secs)
  finally:
    launch.kill()


class _Launch:
  """The processes, each in a session and process group of its own."""

  def __init__(self) -> None:
    self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    self._live: dict[int, subprocess.Popen[bytes]] = {}
    self._readers: list[threading.Thread] = []
    self._lifeline, self._open_end = os.pipe()

  def start(
    self, number: int, command: Sequence[str], env: Mapping[str, str]
  ) -> None:
    """Starts a process; one that cannot be started ends with 126 or 127."""
    process = subprocess.Popen(
      ['sh', '-c', _WITH_PARENT, 'sh', *command],
      env=env,
      stdin=self._lifeline,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      # Otherwise a Ctrl-C at the terminal would arrive twice. The children of a
      # process can be ended together with it.
      start_new_session=True,
    )
    self._live[number] = process
    for source, sink in (
      (process.stdout, sys.stdout.buffer),
      (process.stderr, sys.stderr.buffer),
    ):
      assert source is not None
      reader = threading.Thread(
        target=_copy, args=(number, source, sink), daemon=True
      )
      reader.start()
      self._readers.append(reader)
    threading.Thread(
      target=lambda: self._ended.put((number, process.wait())), daemon=True
    ).start()

  def wait(self, grace_secs: float) -> int:
    """Waits for all to end; returns the exit code of the first that failed."""
    deadline: float | None = None
    failed, left, reason = 0, 0, ''
    while self._live:
      rest = deadline and max(0, deadline - time.monotonic())
      try:
        number, code = self._ended.get(timeout=rest)
      except queue.Empty:
        _say(f'Killing the processes {sorted(self._live)}.')
        self.kill()
        break
      self._end(number)
      if code == 0:
        continue
      how = f'ended with code {code}'
      if code < 0:
        how = f'was ended by signal {-code} ({signal.strsignal(-code)})'
        code = 128 - code
      _say(f'Process {number} {how}.')
      if code in _IN_ORDER:
        left = left or code
      elif not failed or failed == errors.LOST_CODE != code:
        # Those that have lost a process may end before it.
        failed, reason = code, f'process {number} {how}'
        deadline = deadline or time.monotonic() + grace_secs
    for reader in self._readers:
      reader.join(_DRAIN_SECS)
    if failed:
      _say(f'The run ended because {reason}.')
    return failed or left

  def pass_on(self, signum: int, frame: types.FrameType | None) -> None:
    """Sends a signal to all processes."""
    del frame
    for process in tuple(self._live.values()):
      process.send_signal(signum)

  def _end(self, number: int) -> None:
    """Kills the remaining processes in the group of an ended process."""
    process = self._live.pop(number)
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()

  def kill(self) -> None:
    """Kills what still runs."""
    for number in tuple(self._live):
      self._end(number)


def _copy(number: int, source: IO[bytes], sink: IO[bytes]) -> None:
  """Copies lines, each immediately and whole; runs on its own thread."""
  # Where our output is closed, the process notices it by its closed pipe.
  with source, contextlib.suppress(OSError):
    for line in source:
      end = b'' if line.endswith(b'\n') else b'\n'
      with _printing:  # PYTHONUNBUFFERED takes the stream's own lock away.
        sink.write(b'[%d] %s%s' % (number, line, end))
        sink.flush()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the command line; ends the process with 2 where it is wrong."""
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.launch',
    usage='%(prog)s --processes N [options] -- PROGRAM [ARGUMENT ...]',
    description="Starts a program as several processes of this machine's CPU,"
    ' for testing.',
    allow_abbrev=False,
  )
  add = parser.add_argument
  add('--processes', type=int, required=True, help='how many processes')
  add(
    '--devices-per-process',
    type=int,
    default=1,
    help='CPU devices of each process (default: %(default)s)',
  )
  add(
    '--grace-secs',
    type=float,
    default=10.0,
    help='how long the others may go on after one has failed, before they are'
    ' killed (default: %(default)g)',
  )
  add('command', nargs='+', help=argparse.SUPPRESS)
  if not hasattr(os, 'killpg'):
    parser.error('Windows has no groups of processes. Use WSL.')
  return parser.parse_args(argv)


def _say(text: str) -> None:
  # One write, without the lock: a reader of the other lines may block.
  sys.stderr.write(f'[launch] {text}\n')


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
