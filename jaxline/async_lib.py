"""Background threads that keep the order of their work and raise its errors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent import futures
import contextlib
import functools
import queue
import threading
import types
from typing import Any, NoReturn, TypeVar
import weakref

from absl import logging

T = TypeVar('T')

# How long a closed py_prefetch waits for its thread, in seconds. Only an
# iterable that blocks in its own __next__ takes that long.
_JOIN_SECONDS = 5.0


def function_name(fn: Callable[..., Any]) -> str:
  """Returns a readable name of any callable, for threads and messages."""
  if isinstance(fn, functools.partial):
    return f'partial({function_name(fn.func)})'
  return getattr(fn, '__name__', None) or type(fn).__name__


def _log_all(name: str, errors: list[BaseException]) -> None:
  """Logs the errors of a thread that were never raised."""
  for error in errors:
    logging.error('Error in background thread %s.', name, exc_info=error)


class SerialExecutor:
  """Runs calls in order on one background thread, up to the first error.

  Calls that are queued after an error do not run, and every later use raises
  that error with its traceback from the background thread. Without a later use,
  the error is logged at the end.
  """

  def __init__(self, name: str = ''):
    """Makes the executor; its thread starts with the first call.

    Args:
      name: name of the thread, and of this executor in the log.
    """
    self._name = name
    self._pool = futures.ThreadPoolExecutor(1, thread_name_prefix=name)
    self._last: futures.Future | None = None
    self._traceback: types.TracebackType | None = None
    self.error: BaseException | None = None
    self._unraised: list[BaseException] = []
    # Also at the end of the process.
    weakref.finalize(self, _log_all, name, self._unraised)

  def submit(
    self, fn: Callable[..., T], *args: Any, **kwargs: Any
  ) -> futures.Future[T]:
    """Queues `fn(*args, **kwargs)`.

    Args:
      fn: the function to run on the background thread.
      *args: its positional arguments.
      **kwargs: its keyword arguments.

    Returns:
      A future of the result; cancelled where an earlier call failed.

    Raises:
      BaseException: the error of an earlier call.
    """
    self.raise_error()
    self._last = future = self._pool.submit(self._run, fn, args, kwargs)
    return future

  def raise_error(self) -> None:
    """Raises the error of an earlier call, if there was one."""
    if self.error is not None:
      self._raise(self.error)

  def wait(self) -> None:
    """Waits for all calls so far, then raises their error if there was one."""
    if self._last is not None:
      futures.wait([self._last])
    self.raise_error()

  def _raise(self, error: BaseException) -> NoReturn:
    self._unraised.clear()
    # Otherwise each raise would add its frames to those of the one before.
    raise error.with_traceback(self._traceback)

  def _run(
    self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> T:
    if self.error is not None:
      raise futures.CancelledError(
        f'{function_name(fn)} did not run: an earlier call failed with '
        f'{self.error!r}.'
      ) from self.error
    try:
      return fn(*args, **kwargs)
    except BaseException as e:
      self._unraised.append(e)
      self._traceback = e.__traceback__
      self.error = e
      raise


class _AsyncFunction:
  """A function, or the method of a class, that runs on a SerialExecutor."""

  def __init__(self, fn: Callable[..., Any], executor: SerialExecutor):
    functools.update_wrapper(self, fn)
    self._fn = fn
    self._executor = executor

  def __call__(self, *args: Any, **kwargs: Any) -> futures.Future:
    return self._executor.submit(self._fn, *args, **kwargs)

  def __get__(self, instance: Any, owner: type | None = None) -> Any:
    return self if instance is None else types.MethodType(self, instance)


def make_async(
  thread_name_prefix: str = '',
) -> Callable[[Callable[..., T]], Callable[..., futures.Future[T]]]:
  """Makes a decorator that moves a function to a background thread.

  Calls return at once, run in order and never overlap. When one fails, the
  calls after it do not run but raise its error, with the traceback from the
  background thread. A decorated method has one thread for all instances.

  Args:
    thread_name_prefix: start of the thread's name.

  Returns:
    A decorator for a function or method; what it decorates returns a
    `concurrent.futures.Future` of the result.
  """

  def decorator(fn: Callable[..., T]) -> Callable[..., futures.Future[T]]:
    name = thread_name_prefix or function_name(fn)
    return _AsyncFunction(fn, SerialExecutor(name))

  return decorator


def py_prefetch(
  iterable_function: Callable[[], Iterable[T]],
  buffer_size: int = 5,
  *,
  thread_name: str | None = None,
) -> Generator[T, None, None]:
  """Reads an iterable ahead on a thread of its own.

  The thread starts with the first element asked for. Closing the generator,
  or dropping the last reference to it, stops the thread and closes the
  iterable's iterator.

  Args:
    iterable_function: called once, on the thread, and returns the iterable.
      (TensorFlow's graphs, for one, belong to the thread that made them.)
    buffer_size: how many elements to hold at most: one that the thread waits to
      pass on, and the others in the queue.
    thread_name: name of the thread.

  Returns:
    A generator of the iterable's elements. An error of the iterable is raised
    after the elements before it, with the traceback it had on the thread.

  Raises:
    ValueError: if `buffer_size` is not over 1.
  """
  name = function_name(iterable_function)
  return read_ahead(
    iterable_function, buffer_size, thread_name or f'py_prefetch({name})'
  )


def read_ahead(
  iterable_function: Callable[[], Iterable[T]],
  buffer_size: int,
  name: str,
  *,
  stall_secs: float | None = None,
  on_stall: Callable[[float], None] | None = None,
) -> Generator[T, None, None]:
  """Reads an iterable ahead as `py_prefetch` does, and reports when it stalls.

  Args:
    iterable_function: as for `py_prefetch`.
    buffer_size: likewise, at least 2.
    name: name of the thread.
    stall_secs: `on_stall` is called each time the caller has waited that long
      for an element; None never calls it.
    on_stall: called on the waiting thread with the seconds waited so far.

  Returns:
    A generator of the iterable's elements.

  Raises:
    ValueError: if `buffer_size` is not over 1.
  """
  if buffer_size <= 1:
    raise ValueError(
      f'Got buffer_size={buffer_size} to read ahead, expected at least 2: one '
      'element in use and one read ahead.'
    )
  return _read_ahead(iterable_function, buffer_size, name, stall_secs, on_stall)


def _read_ahead(
  iterable_function: Callable[[], Iterable[T]],
  buffer_size: int,
  name: str,
  stall_secs: float | None,
  on_stall: Callable[[float], None] | None,
) -> Generator[T, None, None]:
  """The generator of `read_ahead`."""
  # Two SimpleQueues instead of one bounded Queue, whose lock and conditions in
  # Python take ten times as long at each element.
  ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
  room: queue.SimpleQueue[None] = queue.SimpleQueue()
  for _ in range(buffer_size - 1):
    room.put(None)
  closed = threading.Event()
  errors: list[BaseException] = []
  end = object()

  # The thread sees the five values above and not this generator, which would
  # otherwise live as long as the thread does and never be closed.
  def produce() -> None:
    try:
      iterator = iter(iterable_function())
      try:
        for item in iterator:
          room.get()
          if closed.is_set():
            break
          ready.put(item)
          del item
      finally:
        if hasattr(iterator, 'close'):
          iterator.close()
    except BaseException as e:
      errors.append(e)
    ready.put(end)

  thread = threading.Thread(target=produce, name=name, daemon=True)
  thread.start()

  def take() -> Any:
    waited = 0.0
    while True:
      try:
        return ready.get(timeout=stall_secs)
      except queue.Empty:
        assert stall_secs is not None
        waited += stall_secs
        if on_stall is not None:
          on_stall(waited)

  try:
    while (item := take()) is not end:
      room.put(None)
      yield item
      del item  # Or it would stay in memory while the next one is awaited.
    if errors:
      raise errors.pop()
  finally:
    closed.set()
    room.put(None)  # For the thread that waits for it.
    # A thread that never comes back must not keep what was read.
    with contextlib.suppress(queue.Empty):
      while True:
        ready.get_nowait()
    # The garbage collector can close a generator on any thread.
    if thread is not threading.current_thread():
      thread.join(_JOIN_SECONDS)
      if thread.is_alive():
        logging.warning(
          'Thread %s still waits for its iterable %.0f s after it was closed; '
          'leaving it behind.',
          name,
          _JOIN_SECONDS,
        )
    _log_all(name, errors)
