"""Background threads that run work in order and raise its errors."""

from __future__ import annotations

import atexit
import collections
from collections.abc import Callable, Generator, Iterable
from concurrent import futures
import contextlib
import functools
import itertools
import math
import queue
import threading
import time
import types
from typing import Any, TypeVar
import weakref

from absl import logging

from jaxline import errors
from jaxline.base import watchdog

T = TypeVar('T')

# How long a closed py_prefetch waits for its thread, in seconds.
_JOIN_SECONDS = 5.0


def function_name(fn: Callable[..., Any]) -> str:
  """Returns a name of any callable, for threads and messages."""
  return getattr(fn, '__name__', None) or type(fn).__name__


# Maps the cause of a RunError to the time when it was raised last.
_raised: dict[Any, float] = {}


def _log_all(
  name: str, unraised: list[BaseException], since: float = math.inf
) -> None:
  """Logs errors, unless their cause has been raised elsewhere after `since`."""
  for error in unraised:
    if _raised.get(cause(error), -math.inf) > since:
      continue
    # If a process is lost, all threads fail; the main thread explains it.
    says_all = isinstance(error, errors.RunError)
    trace = None if says_all or errors.is_lost_process(error) else error
    text = str(error) if says_all else repr(error)
    logging.error('Error in thread %s: %s', name, text, exc_info=trace)


_PAUSE_SECS = 0.002
# The caller waits if more calls than this are queued.
MAX_QUEUED = 1000
_executors: weakref.WeakSet[SerialExecutor] = weakref.WeakSet()
_readers: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
# How long the second call of `make_async` waits for the first, in seconds.
_FAIL_SECS = 0.1


class SerialExecutor:
  """Runs calls in order on one background thread.

  After an error, every use raises the first error. Without a later use, the
  error is logged at the end. Calls that are queued when the process ends still
  run, and can queue more calls, which `concurrent.futures` does not allow.

  Attributes:
    error: the first error of a call; None if there is none.
  """

  def __init__(self, name: str = ''):
    self._name = name
    self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self.error: BaseException | None = None
    self._traceback: types.TracebackType | None = None
    self._unraised: list[BaseException] = []
    # The thread refers only to the queue, so it can end with the executor.
    self._thread = threading.Thread(
      target=_run_all, args=(self._calls,), name=name, daemon=True
    )
    self._thread.start()
    weakref.finalize(self, self._calls.put, None)
    # This runs at the end of the process too.
    weakref.finalize(self, _log_all, name, self._unraised, time.monotonic())
    _register_at_exit()
    _executors.add(self)

  @property
  def is_current(self) -> bool:
    """Whether the caller runs on the executor's thread."""
    return threading.get_ident() == self._thread.ident

  def wait_for_room(self) -> None:
    """Waits for the queued calls if there are MAX_QUEUED or more."""
    if self._calls.qsize() >= MAX_QUEUED and not self.is_current:
      self.wait()

  def put(self, call: Callable[[], Any]) -> None:
    """Queues a call without arguments, which runs even after an error."""
    if not self._thread.is_alive():
      raise RuntimeError(
        f'The background thread {self._name} has stopped: the process is ending'
        ' or was forked. After a fork, make a new object.'
      )
    self._calls.put(functools.partial(self.run, call))

  def run(self, call: Callable[[], Any]) -> None:
    """Runs a call now and keeps its error; for use on the executor's thread."""
    try:
      call()
    except BaseException as e:
      self._keep(e)

  def submit(
    self, fn: Callable[..., T], *args: Any, **kwargs: Any
  ) -> futures.Future[T]:
    """Queues `fn(*args, **kwargs)`; raises the error of an earlier call.

    If a call fails before this one runs, the returned future is cancelled.
    """
    self.raise_error()
    future: futures.Future[T] = futures.Future()

    def resolve() -> None:
      if self.error is not None:
        future.cancel()
      if not future.set_running_or_notify_cancel():
        return
      try:
        future.set_result(fn(*args, **kwargs))
      except BaseException as e:
        self._keep(e)  # Keep it before the future wakes anyone.
        future.set_exception(e)

    self.put(resolve)
    return future

  def raise_error(self) -> None:
    """Raises the first error of earlier calls, if there is one."""
    if self.error is not None:
      self._unraised.clear()
      if isinstance(self.error, errors.RunError):
        _raised[cause(self.error)] = time.monotonic()
      # Reset the traceback, to which each raise adds its frames.
      raise self.error.with_traceback(self._traceback)

  def wait(self, *calls: Callable[[], Any]) -> None:
    """Queues calls, waits for all calls so far, and raises the first error."""
    self.wait_async(*calls)()

  def wait_async(self, *calls: Callable[[], Any]) -> Callable[[], Any]:
    """Queues calls, and returns a function that waits for them.

    The function returns the result of the last call. It raises the first error,
    but no errors of calls that were queued later. On the executor's own thread,
    the calls run immediately.
    """
    results: list[Any] = [None]
    error: futures.Future[BaseException | None] = futures.Future()
    add = self.run if self.is_current else self.put

    def keep(call: Callable[[], Any]) -> None:
      results.append(call())

    for call in calls:
      add(functools.partial(keep, call))
    add(lambda: error.set_result(self.error))

    def wait() -> Any:
      if error.result() is not None:
        self.raise_error()
      return results[-1]

    return wait

  def _keep(self, error: BaseException) -> None:
    if self.error is None:
      self._unraised.append(error)
      self._traceback = error.__traceback__
      self.error = error
    elif cause(error) != cause(self.error):
      _log_all(self._name, [error])


@functools.cache
def _register_at_exit() -> None:
  # JAX and weakref.finalize registered before this, so their clean-up is later.
  atexit.register(_end_all)


def _end_all() -> None:
  for reader in list(_readers):
    with contextlib.suppress(ValueError):  # Another thread is running it.
      reader.close()
  # A forked process inherits executors without their threads.
  executors = [e for e in list(_executors) if e._thread.is_alive()]
  # A call may queue more calls on a different executor, so repeat. Ten rounds
  # end even if a call queues itself again.
  for executor in executors * 10:
    done = threading.Event()
    executor.put(done.set)
    done.wait()
  for executor in executors:
    executor._calls.put(None)
    executor._thread.join()


def cause(error: BaseException) -> Any:
  """Returns equal values for errors of one cause, such as a full disk."""
  return getattr(error, 'errno', None) or repr(error)


def _run_all(calls: queue.SimpleQueue[Callable[[], Any] | None]) -> None:
  for call in iter(calls.get, None):
    call()
    watchdog.report_progress()  # A long queue must not look like a hang.
    del call  # Free its arguments before waiting for the next call.
    if calls.empty():
      # Let a few calls accumulate. Waking this thread for each call would cost
      # the caller 20 us, because both need the GIL.
      time.sleep(_PAUSE_SECS)


def make_async(
  thread_name_prefix: str = '',
) -> Callable[[Callable[..., T]], Callable[..., futures.Future[T]]]:
  """Makes a decorator that moves a function to a background thread.

  A call returns a future immediately. Calls run in order, and all instances of
  a method share a thread. After a failure, later calls raise its error instead
  of running. As in JAXline, if the first call fails quickly, the second already
  raises its error: it waits up to 0.1 s for the first to end.
  """

  def decorator(fn: Callable[..., T]) -> Callable[..., futures.Future[T]]:
    executor = SerialExecutor(thread_name_prefix or function_name(fn))
    numbers, first_ended = itertools.count(), threading.Event()

    @functools.wraps(fn)
    def submit(*args: Any, **kwargs: Any) -> futures.Future[T]:
      number = next(numbers)
      if number == 1:
        first_ended.wait(_FAIL_SECS)
      future = executor.submit(fn, *args, **kwargs)
      if number == 0:
        future.add_done_callback(lambda _: first_ended.set())
      return future

    return submit

  return decorator


def py_prefetch(
  iterable_function: Callable[[], Iterable[T]],
  buffer_size: int = 5,
  *,
  thread_name: str | None = None,
  depth_of: Callable[[T], int] | None = None,
  stall_secs: float | None = None,
  on_stall: Callable[[], None] = lambda: None,
) -> Generator[T, None, None]:
  """Prefetches the elements of an iterable on a separate thread.

  The thread starts when the first element is requested. It stops, and closes
  the iterator, when the generator is closed or garbage-collected, or when the
  process ends. An error is raised after the elements that precede it.

  Args:
    iterable_function: returns the iterable; called once, on the thread.
    buffer_size: maximum number of elements to hold: one that the thread waits
      to pass on, and the others in the queue.
    thread_name: name of the thread.
    depth_of: maps the first element to a larger maximum, if it should be
      larger. The thread then wakes up when half of the elements are used, and
      keeps the elements, used ones too, until it passes on new ones.
    stall_secs: time to wait for an element before calling `on_stall`.
    on_stall: called on the waiting thread.
  """
  if buffer_size <= 1:
    raise ValueError(f'Got buffer_size={buffer_size}; expected at least 2.')
  name = thread_name or f'py_prefetch({function_name(iterable_function)})'

  def read() -> Generator[T, None, None]:
    # The garbage collector may close this generator in a SimpleQueue's method.
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    room: queue.SimpleQueue[int] = queue.SimpleQueue()
    room.put(buffer_size - 1)  # It counts the free places for elements.
    burst = [1]  # The thread is told after this many elements are used.
    closed = threading.Event()
    unraised: list[BaseException] = []
    end = object()

    # The thread must not refer to this generator, or nothing would close it.
    def produce() -> None:
      try:
        iterator = iter(iterable_function())
        free = depth = 0
        given: collections.deque[T] = collections.deque(maxlen=0)
        try:
          for item in iterator:
            if depth_of and not depth:
              depth = max(buffer_size, depth_of(item))
              burst[0] = depth // 2
              room.put(depth - buffer_size)
              if burst[0] > 1:  # This thread frees the used ones.
                given = collections.deque(maxlen=depth)
            while not free:
              free = room.get()
            if closed.is_set():
              break
            free -= 1
            ready.put(item)
            given.append(item)
            del item
        finally:
          if hasattr(iterator, 'close'):
            iterator.close()
      except BaseException as e:
        unraised.append(e)
      ready.put(end)

    thread = threading.Thread(target=produce, name=name, daemon=True)
    thread.start()
    used = 0
    try:
      while True:
        try:
          item = ready.get(timeout=stall_secs)
        except queue.Empty:
          on_stall()
          item = ready.get()
        if item is end:
          break
        used += 1
        if used >= burst[0]:
          room.put(used)
          used = 0
        yield item
        del item  # Free it before waiting for the next one.
      if unraised:
        raise unraised.pop()
    finally:
      closed.set()
      room.put(1)  # Wake the thread if it waits for room.
      # The garbage collector can close a generator on any thread.
      if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
      _log_all(name, unraised)

  reader = read()
  # Close it at exit: Python would do so later, without the modules it uses.
  _readers.add(reader)
  _register_at_exit()
  return reader
