"""Where the wall time of a run goes, and what JAX compiles.

`run` begins the account of a run on the thread that trains. From then on each
moment of that thread belongs to one category: that of the innermost `measure`,
or 'compilation' while JAX traces, lowers or compiles there. So the seconds of
all categories add up to the time since `run` began. Threads without an account
measure nothing.

Costs: about 1 us a `measure`, and 0.2 us an `add`.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import threading
import time
from typing import Any

import jax

# In the order of a report. What no measure is about is 'start' until the first
# step or evaluation, and 'other' after that.
CATEGORIES = (
  'start',
  'compilation',
  'restore',
  'steps',
  'input wait',
  'checkpoints',
  'evaluation',
  'waiting',
  'other',
)
# Tracing, lowering and the backend's compilation or its retrieval from a cache.
# JAX reports the start of each as a scalar, and the end as a duration.
_PHASES = '/jax/core/compile/'
_BACKEND_COMPILE = '/jax/core/compile/backend_compile_duration'
_CACHE_REQUEST = '/jax/compilation_cache/compile_requests_use_cache'
_CACHE_HIT = '/jax/compilation_cache/cache_hits'

_clock = time.perf_counter
# A signal handler may ask while its thread holds it.
_lock = threading.RLock()


@dataclasses.dataclass(eq=False)
class Account:
  """The time of one run, by category, while the run goes on.

  Attributes:
    spent: category -> seconds, without those since `marked`.
    open: the categories of the open measures, outermost first.
    marked: up to when all time is in `spent`.
  """

  spent: dict[str, float]
  open: list[str]
  marked: float

  def settle(self) -> None:
    """Adds the time since the last call to the innermost category."""
    now = _clock()
    self.spent[self.open[-1]] += now - self.marked
    self.marked = now


class _Thread(threading.local):
  """What is known of this thread.

  Attributes:
    account: of the run on this thread, if there is one.
    phases: the open phases of compilations, and their measures if any.
    began: when the outermost of them did.
    compiled_secs: how long this thread has compiled.
  """

  def __init__(self) -> None:
    self.account: Account | None = None
    self.phases: list[contextlib.AbstractContextManager[None]] = []
    self.began = 0.0
    self.compiled_secs = 0.0


_thread = _Thread()
_accounts: list[Account] = []
# Of the runs that have ended.
_ended = dict.fromkeys(CATEGORIES, 0.0)


@dataclasses.dataclass
class _Compilations:
  """What this process has compiled, in all threads."""

  count: int = 0
  secs: float = 0.0
  requests: int = 0
  hits: int = 0


_compilations = _Compilations()


@contextlib.contextmanager
def run() -> Iterator[None]:
  """Accounts for the time of a run, of this thread.

  A `run` inside of another is part of it.

  Yields:
    Nothing.
  """
  listen()
  if _thread.account is not None:
    yield
    return
  account = Account(dict.fromkeys(CATEGORIES, 0.0), ['start'], _clock())
  with _lock:
    _accounts.append(account)
  try:
    with continued(account):
      yield
  finally:
    with _lock:
      account.settle()
      _accounts.remove(account)
      for category, secs in account.spent.items():
        _ended[category] += secs


def current() -> Account | None:
  """Returns the account of this thread, for `continued` on another one."""
  return _thread.account


@contextlib.contextmanager
def continued(account: Account | None) -> Iterator[None]:
  """Goes on with an account on this thread.

  Args:
    account: of a thread that waits meanwhile.

  Yields:
    Nothing.
  """
  before, _thread.account = _thread.account, account
  try:
    yield
  finally:
    _thread.account = before


@contextlib.contextmanager
def measure(category: str) -> Iterator[None]:
  """Counts the time inside as of a category, except what is measured inside.

  Args:
    category: one of `CATEGORIES`.

  Yields:
    Nothing.
  """
  account = _thread.account
  if account is None:
    yield
    return
  depth = len(account.open)
  with _lock:
    account.settle()
    if category in ('steps', 'evaluation') and depth == 1:
      account.open[0] = 'other'
    account.open.append(category)
  try:
    yield
  finally:
    with _lock:
      account.settle()
      # Also those inside that an interrupt has kept from ending.
      del account.open[depth:]


def add(category: str, secs: float) -> None:
  """Moves time that has just passed on this thread to a category.

  Args:
    category: one of `CATEGORIES`.
    secs: how long, within the innermost `measure`.
  """
  if (account := _thread.account) is not None:
    with _lock:
      account.spent[category] += secs
      account.spent[account.open[-1]] -= secs


def spent() -> dict[str, float]:
  """Returns the seconds that runs in this process have spent, by category."""
  with _lock:
    total = dict(_ended)
    for account in _accounts:
      account.settle()
      for category, secs in account.spent.items():
        total[category] += secs
  return total


def compilations() -> tuple[int, float, int, int]:
  """Returns what this process has compiled so far, in all threads.

  Returns:
    The number of programs, the seconds for them with tracing and lowering, and
    how often JAX's persistent cache had a program and had not. A program from
    the cache counts as compiled too.
  """
  listen()
  x = _compilations
  return x.count, x.secs, x.hits, x.requests - x.hits


def compiled_secs() -> float:
  """Returns for how many seconds this thread has compiled since `listen`."""
  return _thread.compiled_secs


# JAX calls these.


def _on_event(event: str, **kwargs: Any) -> None:
  del kwargs
  if event == _CACHE_REQUEST:
    _compilations.requests += 1
  elif event == _CACHE_HIT:
    _compilations.hits += 1


def _on_start(event: str, value: float, **kwargs: Any) -> None:
  del value, kwargs
  if not event.startswith(_PHASES):
    return
  if not _thread.phases:
    _thread.began = _clock()
  measured = measure('compilation')
  measured.__enter__()
  _thread.phases.append(measured)


def _on_end(event: str, duration_secs: float, **kwargs: Any) -> None:
  del duration_secs, kwargs
  if not event.startswith(_PHASES) or not _thread.phases:
    return
  _thread.phases.pop().__exit__(None, None, None)
  if not _thread.phases:
    secs = _clock() - _thread.began
    _thread.compiled_secs += secs
    with _lock:
      _compilations.secs += secs
  if event == _BACKEND_COMPILE:
    with _lock:
      _compilations.count += 1


_is_listening = False


def listen() -> None:
  """Has JAX say what it compiles, from the first call on."""
  global _is_listening
  with _lock:
    if _is_listening:
      return
    _is_listening = True
  jax.monitoring.register_event_listener(_on_event)
  jax.monitoring.register_scalar_listener(_on_start)
  jax.monitoring.register_event_duration_secs_listener(_on_end)
