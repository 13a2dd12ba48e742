"""Splits a run's wall time into categories, one of which is compilation.

In a `run`, each moment of the training thread belongs to one category: the
category of the innermost `measure`, or 'compilation' while JAX traces, lowers
or compiles. So the seconds of all categories add up to the run's wall time.
Time outside of every measure counts as 'start' until the first step or
evaluation, and as 'other' after it. Other threads measure nothing.
"""

import collections
from collections.abc import Iterator
import contextlib
import functools
import threading
import time
from typing import Any

import jax

# JAX's events for tracing, lowering, and compiling or reading from the cache.
# It reports the start of each as a scalar, and the end as a duration.
_PHASES = '/jax/core/compile/'

_clock = time.perf_counter

# Seconds by category of all runs, up to the time `_marked`.
_spent: dict[str, float] = collections.defaultdict(float)
_marked = 0.0
# The categories of the open measures of the run, outermost first.
_open: list[str] = []
_owner: int | None = None  # The thread whose time is measured.


class _Thread(threading.local):
  """The compilations of this thread."""

  depth = 0  # Number of open phases, which can be nested.
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
  """Measures the time of a run on this thread.

  While a run is open, a nested `run` and one on a different thread do nothing.
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
  """Counts the time inside, except in nested measures, under a category."""
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
    # An interrupt may have left nested measures open.
    del _open[depth:]


def add(category: str, secs: float) -> None:
  """Moves seconds that have just passed from the open measure to a category."""
  if _owner == threading.get_ident():
    _spent[category] += secs
    _spent[_open[-1]] -= secs


def seconds_by_category() -> dict[str, float]:
  """Returns the seconds that runs of this process have spent by category."""
  found = _spent.copy()
  for category in _open[-1:]:
    found[category] += _clock() - _marked
  return found


def compiled_secs() -> float:
  """Returns the seconds that this thread has spent compiling since `listen`."""
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
  """Starts listening to JAX's compilation events; later calls do nothing."""
  jax.monitoring.register_scalar_listener(_on_start)
  jax.monitoring.register_event_duration_secs_listener(_on_end)
