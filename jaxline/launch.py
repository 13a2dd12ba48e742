"""Starts a program as several CPU processes on this machine, for testing.

    python -m jaxline.launch --processes 4 --devices-per-process 2 -- \\
        python experiment.py --config=configs/lm.py

starts a run of four processes with two devices each. They communicate as in a
cluster, but by gloo instead of a network of accelerators. The exit code is the
code of the process that failed first. A process that has only lost another one
counts if none failed for a different reason. See docs/reference/launching.md.
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
from typing import IO, Any

from jaxline import errors
from jaxline.supervision import preemption

# These signals are forwarded to the processes, if not ignored at the start.
_SIGNALS = (signal.SIGINT, *preemption.SIGNALS.values())
# A process with one of these codes has saved and ended on a signal. The others
# are saving too, so they are not killed.
_IN_ORDER = (preemption.EXIT_CODE, preemption.SIGINT_EXIT_CODE)
# Runs a command, and sends SIGTERM to its group when standard input ends.
# Standard input is a pipe whose other end only the launcher holds open.
_WITH_PARENT = """exec 3<&0 < /dev/null
{ read -r x <&3; kill -s TERM -- -$$; } &
exec "$@" 3<&-"""

_printing = threading.Lock()


def main(argv: Sequence[str]) -> int:
  """Runs the command line in `argv`; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m jaxline.launch',
    usage='%(prog)s --processes N [options] -- PROGRAM [ARGUMENT ...]',
    allow_abbrev=False,
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = parser.add_argument
  add('--processes', type=int, required=True, help='number of processes')
  what = 'number of CPU devices of each process'
  add('--devices-per-process', type=int, default=1, help=what)
  what = 'seconds until the other processes are killed after one has failed'
  add('--grace-secs', type=float, default=10.0, help=what)
  add('command', nargs='+', help=argparse.SUPPRESS)
  if not hasattr(os, 'killpg'):
    parser.error('Windows does not have process groups. Use WSL.')
  args = parser.parse_args(argv)
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
        # This takes precedence over the XLA flag for the number of devices.
        'JAX_NUM_CPU_DEVICES': str(args.devices_per_process),
        # Buffered output would appear late, and be lost if a process is killed.
        'PYTHONUNBUFFERED': '1',
      }
      launch.start(process, args.command, env)
    return launch.wait(args.grace_secs)
  finally:
    launch.kill(*launch.live)


class _Launch:
  """The processes, each in a separate session and process group."""

  def __init__(self) -> None:
    self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    self.live: dict[int, subprocess.Popen[bytes]] = {}
    self._readers: list[threading.Thread] = []
    self._lifeline, self._open_end = os.pipe()

  def start(
    self, number: int, command: Sequence[str], env: Mapping[str, str]
  ) -> None:
    """Starts a process. If the command cannot run, its code is 126 or 127."""
    process = subprocess.Popen(
      ['sh', '-c', _WITH_PARENT, 'sh', *command],
      env=env,
      stdin=self._lifeline,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      # In a shared session, a Ctrl-C at the terminal would arrive twice. The
      # group allows killing a process together with its children.
      start_new_session=True,
    )
    self.live[number] = process
    for source, sink in (
      (process.stdout, sys.stdout.buffer),
      (process.stderr, sys.stderr.buffer),
    ):
      args = number, source, sink
      reader = threading.Thread(target=_copy, args=args, daemon=True)
      reader.start()
      self._readers.append(reader)
    wait = lambda: self._ended.put((number, process.wait()))
    threading.Thread(target=wait, daemon=True).start()

  def wait(self, grace_secs: float) -> int:
    """Waits for all processes; returns the code of the first that failed."""
    deadline: float | None = None
    failed, left, reason = 0, 0, ''
    while self.live:
      rest = deadline and max(0, deadline - time.monotonic())
      try:
        number, code = self._ended.get(timeout=rest)
      except queue.Empty:
        _say(f'Killing the processes {sorted(self.live)}.')
        self.kill(*self.live)
        break
      self.kill(number)
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
        # Processes that lost a failing one may end before it.
        failed, reason = code, f'process {number} {how}'
        deadline = deadline or time.monotonic() + grace_secs
    for reader in self._readers:
      reader.join(5.0)  # A process that left the group may hold the pipe open.
    if failed:
      _say(f'The run ended because {reason}.')
    return failed or left

  def pass_on(self, signum: int, unused_frame: Any) -> None:
    """Forwards a signal to all processes."""
    for process in tuple(self.live.values()):
      process.send_signal(signum)

  def kill(self, *numbers: int) -> None:
    """Kills everything that still runs in the groups of these processes."""
    for number in numbers:
      process = self.live.pop(number)
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()


def _copy(number: int, source: IO[bytes], sink: IO[bytes]) -> None:
  """Copies output line by line, without delay."""
  # If our output is closed, closing the pipe lets the process notice it.
  with source, contextlib.suppress(OSError):
    for line in source:
      end = b'' if line.endswith(b'\n') else b'\n'
      with _printing:  # With PYTHONUNBUFFERED the stream itself has no lock.
        sink.write(b'[%d] %s%s' % (number, line, end))
        sink.flush()


def _say(text: str) -> None:
  # Write without the lock: a thread whose output is blocked may hold it.
  sys.stderr.write(f'[launch] {text}\n')


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
