"""Accounts a run's wall time, and counts what JAX compiles.

In a `run` each moment of the thread that trains belongs to one category: that
of the innermost `measure`, or 'compilation' while JAX traces, lowers or
compiles. So the seconds of all categories add up to the time since it began.
What no measure is about is 'start' until the first step or evaluation, and
'other' after that. Other threads measure nothing.
"""

import collections
from collections.abc import Iterator
import contextlib
import functools
import threading
import time
from typing import Any

import jax

# Tracing, lowering and the backend's compilation or its retrieval from a cache.
# JAX reports the start of each as a scalar, and the end as a duration.
_PHASES = '/jax/core/compile/'

_clock = time.perf_counter

# Seconds by category, of all runs, without those since `_marked`.
_spent: dict[str, float] = collections.defaultdict(float)
_marked = 0.0
# The categories of the open measures of the run, outermost first.
_open: list[str] = []
_owner: int | None = None  # The thread that the run is accounted for on.


class _Thread(threading.local):
  """What this thread compiles."""

  depth = 0  # How many phases are open. One can contain others.
  compiled_secs = 0.0


_thread = _Thread()


def _settle() -> None:
  """Adds the time since the last call to the innermost category."""
  global _marked
  now = _clock()
  if _open:
    _spent[_open[-1]] += now - _marked
  _marked = now


@contextlib.contextmanager
def run() -> Iterator[None]:
  """Accounts for the time of a run, on this thread.

  A `run` inside of another, or beside it on another thread, is no other one.
  """
  global _owner
  listen()
  if _owner is not None:
    yield
    return
  _owner = threading.get_ident()
  try:
    with measure('start'):
      yield
  finally:
    _owner = None


@contextlib.contextmanager
def measure(category: str) -> Iterator[None]:
  """Counts the time inside, but for inner measures, as of a category."""
  if _owner != threading.get_ident():
    yield
    return
  depth = len(_open)
  _settle()
  if category in ('steps', 'evaluation') and depth == 1:
    _open[0] = 'other'
  _open.append(category)
  try:
    yield
  finally:
    _settle()
    # An interrupt may have kept those inside from ending.
    del _open[depth:]


def add(category: str, secs: float) -> None:
  """Moves seconds that have just passed from the innermost measure to here."""
  if _owner == threading.get_ident():
    _spent[category] += secs
    _spent[_open[-1]] -= secs


def seconds_by_category() -> dict[str, float]:
  """Returns the seconds that runs in this process have spent, by category."""
  found = _spent.copy()
  for category in _open[-1:]:
    found[category] += _clock() - _marked
  return found


def compiled_secs() -> float:
  """Returns for how many seconds this thread has compiled since `listen`."""
  return _thread.compiled_secs


def _on_start(event: str, *unused: Any, **also_unused: Any) -> None:
  _thread.depth += event.startswith(_PHASES)


def _on_end(event: str, duration_secs: float, **unused: Any) -> None:
  if not event.startswith(_PHASES) or not _thread.depth:
    return
  _thread.depth -= 1
  if not _thread.depth:
    add('compilation', duration_secs)
    _thread.compiled_secs += duration_secs


@functools.cache
def listen() -> None:
  """Has JAX say what it compiles, from the first call on."""
  jax.monitoring.register_scalar_listener(_on_start)
  jax.monitoring.register_event_duration_secs_listener(_on_end)
