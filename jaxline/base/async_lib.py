"""Background threads that keep the order of their work and raise its errors."""

from __future__ import annotations

import atexit
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


# Cause -> when a RunError of it was raised last.
_raised: dict[Any, float] = {}


def _log_all(
  name: str, unraised: list[BaseException], since: float = math.inf
) -> None:
  """Logs errors, except for those whose cause was raised elsewhere `since`."""
  for error in unraised:
    if _raised.get(cause(error), -math.inf) > since:
      continue
    # All threads meet the loss of a process; the main one explains it.
    says_all = isinstance(error, errors.RunError)
    trace = None if says_all or errors.is_lost_process(error) else error
    text = str(error) if says_all else repr(error)
    logging.error('Error in thread %s: %s', name, text, exc_info=trace)


_PAUSE_SECS = 0.002
# How many calls may wait before the caller waits as well.
MAX_QUEUED = 1000
_executors: weakref.WeakSet[SerialExecutor] = weakref.WeakSet()
_readers: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
# How long the second call of `make_async` waits for the first, in seconds.
_FAIL_SECS = 0.1


class SerialExecutor:
  """Runs calls in order on one background thread.

  Every use after an error raises the first one; without a later use, it is
  logged at the end. What is queued at the end of the process is still run, also
  by a call at the end, which `concurrent.futures` refuses.

  Attributes:
    error: the first error of a call; None as long as there is none.
  """

  def __init__(self, name: str = ''):
    self._name = name
    self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self.error: BaseException | None = None
    self._traceback: types.TracebackType | None = None
    self._unraised: list[BaseException] = []
    # The thread refers to the queue only, and ends with the executor.
    self._thread = threading.Thread(
      target=_run_all, args=(self._calls,), name=name, daemon=True
    )
    self._thread.start()
    weakref.finalize(self, self._calls.put, None)
    # Also at the end of the process.
    weakref.finalize(self, _log_all, name, self._unraised, time.monotonic())
    _register_at_exit()
    _executors.add(self)

  @property
  def is_current(self) -> bool:
    """Whether this is called on the executor's thread."""
    return threading.get_ident() == self._thread.ident

  def wait_for_room(self) -> None:
    """Waits for the calls so far, if there are too many of them."""
    if self._calls.qsize() >= MAX_QUEUED and not self.is_current:
      self.wait()

  def put(self, call: Callable[[], Any]) -> None:
    """Queues a call without arguments, which an earlier error does not stop."""
    if not self._thread.is_alive():
      raise RuntimeError(
        f'The thread {self._name} does not run any more: call it before the'
        ' process ends; in a forked process, make a new object.'
      )
    self._calls.put(functools.partial(self.run, call))

  def run(self, call: Callable[[], Any]) -> None:
    """Runs a call at once and keeps its error; for the executor's thread."""
    try:
      call()
    except BaseException as e:
      self._keep(e)

  def submit(
    self, fn: Callable[..., T], *args: Any, **kwargs: Any
  ) -> futures.Future[T]:
    """Queues `fn(*args, **kwargs)`, unless an earlier call has failed.

    If one fails before it runs, the future of its result is cancelled.
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
        self._keep(e)  # Before anybody is told.
        future.set_exception(e)

    self.put(resolve)
    return future

  def raise_error(self) -> None:
    """Raises the error of an earlier call, if there was one."""
    if self.error is not None:
      self._unraised.clear()
      if isinstance(self.error, errors.RunError):
        _raised[cause(self.error)] = time.monotonic()
      # Otherwise each raise would add its frames to those of the one before.
      raise self.error.with_traceback(self._traceback)

  def wait(self, *calls: Callable[[], Any]) -> None:
    """Runs calls behind those so far, waits, and raises the error of any."""
    self.wait_async(*calls)()

  def wait_async(self, *calls: Callable[[], Any]) -> Callable[[], Any]:
    """Queues what `wait` waits for, and returns the function that waits.

    That returns the result of the last call, and raises no error of a later
    one. On the executor's own thread the calls run at once.
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
  # JAX and weakref.finalize have registered their clean-up: this runs before.
  atexit.register(_end_all)


def _end_all() -> None:
  for reader in list(_readers):
    with contextlib.suppress(ValueError):  # Another thread is in it.
      reader.close()
  # A forked process inherits executors without their threads.
  executors = [e for e in list(_executors) if e._thread.is_alive()]
  # What one of them runs may queue more on another. Ten times ends also where
  # a call queues itself again.
  for executor in executors * 10:
    done = threading.Event()
    executor.put(done.set)
    done.wait()
  for executor in executors:
    executor._calls.put(None)
    executor._thread.join()


def cause(error: BaseException) -> Any:
  """Returns the same for errors of one cause, such as a full disk."""
  return getattr(error, 'errno', None) or repr(error)


def _run_all(calls: queue.SimpleQueue[Callable[[], Any] | None]) -> None:
  for call in iter(calls.get, None):
    call()
    watchdog.report_progress()  # So that a long queue is no hang.
    del call  # Or its arguments would stay in memory while the next is awaited.
    if calls.empty():
      # What comes meanwhile is run at once. To wake this thread for each call
      # would cost the one that queues it 20 us: both need Python's lock.
      time.sleep(_PAUSE_SECS)


def make_async(
  thread_name_prefix: str = '',
) -> Callable[[Callable[..., T]], Callable[..., futures.Future[T]]]:
  """Makes a decorator that moves a function to a background thread.

  A call returns a future of its result at once. Calls run in order, in one
  thread for all instances of a method. When one fails, the calls after it do
  not run but raise its error. As in JAXline, the second call already raises an
  error that the first call makes at once: it waits up to 0.1 s for its end.
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
  """Reads an iterable ahead on a thread of its own.

  The thread starts with the first element asked for. Closing the generator,
  dropping the last reference to it, or the end of the process stops the thread
  and closes the iterator. An error is raised after the elements before it.

  Args:
    iterable_function: called once, on the thread, and returns the iterable.
    buffer_size: how many elements to hold at most: one that the thread waits to
      pass on, and the others in the queue.
    thread_name: name of the thread.
    depth_of: returns, of the first element, how many to hold instead if that is
      more. The thread is woken when half of them are used.
    stall_secs: how long to wait for an element before `on_stall` is called.
    on_stall: is called on the waiting thread.
  """
  if buffer_size <= 1:
    raise ValueError(f'Got buffer_size={buffer_size}; expected at least 2.')
  name = thread_name or f'py_prefetch({function_name(iterable_function)})'

  def read() -> Generator[T, None, None]:
    # SimpleQueues: the garbage collector may close this generator inside of
    # their methods.
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    room: queue.SimpleQueue[int] = queue.SimpleQueue()
    room.put(buffer_size - 1)  # How many more elements may be put.
    burst = [1]  # How many elements are used before the thread is told.
    closed = threading.Event()
    unraised: list[BaseException] = []
    end = object()

    # The thread must not refer to this generator, which would then never be
    # closed.
    def produce() -> None:
      try:
        iterator = iter(iterable_function())
        free = depth = 0
        try:
          for item in iterator:
            if depth_of and not depth:
              depth = max(buffer_size, depth_of(item))
              burst[0] = depth // 2
              room.put(depth - buffer_size)
            while not free:
              free = room.get()
            if closed.is_set():
              break
            free -= 1
            ready.put(item)
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
        del item  # Or it would stay in memory while the next one is awaited.
      if unraised:
        raise unraised.pop()
    finally:
      closed.set()
      room.put(1)  # For the thread that waits for it.
      # The garbage collector can close a generator on any thread.
      if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
      _log_all(name, unraised)

  reader = read()
  # At the end of the process Python would close it without its modules.
  _readers.add(reader)
  _register_at_exit()
  return reader
