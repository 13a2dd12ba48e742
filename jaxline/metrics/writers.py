"""Where a run's numbers go: one interface, backends by name, two decorators.

  writer = AsyncWriter(MultiWriter([
    TensorBoardWriter(directory), JsonlWriter(path)]))

The backends write on the calling thread and raise where writing fails.
`MultiWriter` hands each record to several writers, `AsyncWriter` moves all of
it (fetching from the device, encoding, the disk) to one background thread.
"""

from collections.abc import Callable, Iterable, Mapping
import functools
import pathlib
import threading
from typing import Any, TypeVar

import jax
import numpy as np

from jaxline import async_lib
from jaxline import errors
from jaxline.metrics import base
from jaxline.metrics import jsonl
from jaxline.metrics import tensorboard
from jaxline.metrics import values as values_lib

F = TypeVar('F', bound=Callable[..., Any])

# Of images that wait for a writer: copies, on the devices.
_MAX_BYTES = 1 << 30

# The names that experiments and forks use.
Backend = base.Backend
MetricWriter = base.MetricWriter
Writer = base.Writer
JSONL_KEYS = jsonl.KEYS
JsonlWriter = jsonl.JsonlWriter
read_record = jsonl.read_record
TensorBoardWriter = tensorboard.TensorBoardWriter
to_scalars = values_lib.to_scalars
to_step = values_lib.to_step


class MultiWriter(MetricWriter):
  """Hands each record to several writers.

  Every writer gets every call, also where one before it fails; then the error
  is raised, or an ExceptionGroup of them where several failed.
  """

  def __init__(self, writers: Iterable[Writer]) -> None:
    """Makes a writer in front of others.

    Args:
      writers: they get each record in this order, and are closed with this one.
    """
    self._writers = tuple(writers)

  def _each(self, method: str, *args: Any) -> list[Any]:
    results, errors = [], []
    for writer in self._writers:
      try:
        if hasattr(writer, method):
          results.append(getattr(writer, method)(*args))
        elif method.startswith('write_'):
          values_lib.warn_once(
            ('method', type(writer).__name__, method),
            '%s has no method %s: such records do not reach it. This is said '
            'once.',
            type(writer).__name__,
            method,
          )
      except Exception as error:
        errors.append(error)
    if len({async_lib.cause(e) for e in errors}) == 1:
      raise errors[0]
    if errors:
      raise ExceptionGroup(f'{len(errors)} writers failed in {method}', errors)
    return results

  def _write(
    self, kind: str, global_step: Any, values: Mapping[str, Any]
  ) -> None:
    self._each(f'write_{kind}', global_step, base.Record.of(values))

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:
    self._each('resume', step, lengths)

  def flush(self) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for found in self._each('flush'):
      if isinstance(found, dict):  # A program's own writer may return None.
        lengths |= found
    return lengths

  def close(self) -> None:
    self._each('close')


class AsyncWriter(MetricWriter):
  """Writes on one background thread, behind a queue that cannot overflow.

  To write scalars or texts costs the caller a few microseconds. Device arrays
  are fetched on the background thread. NumPy arrays are copied at once, since
  the caller may reuse them; so are images, on their device, since a weight is
  donated to the next step. (A scalar is not: hand over a metric of the step,
  not a part of its state.)

  - If the queue is full, a write waits until it is empty. It holds one image,
    or several of together at most 1 GiB.
  - A write after the close raises RuntimeError.
  - The first error on the thread is raised, with its traceback, by every later
    write and flush and by the close. What was queued when it happened is still
    handed to the wrapped writer; what came later is refused.
  - `resume`, `flush` and `close` wait for the queue, on whichever thread they
    are called. The end of the program closes the writer.
  - Periodic actions that are given the executor run on the thread too, where a
    `write_*` call writes at once.
  """

  executor: async_lib.SerialExecutor

  def __init__(self, writer: Writer, *, max_queue: int = 1000) -> None:
    """Starts the thread.

    Args:
      writer: what writes; from now on only the thread calls it. It is closed
        with this one.
      max_queue: how many records may wait.
    """
    self._writer: MetricWriter = MultiWriter([writer])
    self._max_queue = max_queue
    # Reentrant: a signal handler may write while its thread is in a write.
    self._lock = threading.RLock()
    # Each is written by one side only; the bytes are those of arrays.
    self._num_queued = self._bytes_queued = 0
    self._num_done = self._bytes_done = 0
    self._is_closed = False
    self.executor = async_lib.SerialExecutor('jaxline-writer')
    self.executor.put(lambda: None)  # No fork starts one of its own.
    async_lib.at_exit.append(self.close)

  def add(self, writer: Writer) -> None:
    """Also writes to another writer, which is closed with this one."""
    self.executor.wait()
    self._writer = MultiWriter([self._writer, writer])

  def _write(
    self, kind: str, global_step: Any, values: Mapping[str, Any]
  ) -> None:
    if self.executor.is_current:  # A periodic action calls it.
      self.executor.run(lambda: self._hand_over(kind, global_step, values))
      return
    size = 0  # Of the images in bytes.
    if kind == 'images':
      values = {
        name: x if isinstance(x, jax.Array | np.ndarray) else np.array(x)
        for name, x in values.items()
      }
      size = sum(x.nbytes for x in values.values())
      for name, image in values.items():
        # Here the traceback still leads to the line that made the image.
        values_lib.check_image(name, image)
    waiting_bytes = self._bytes_queued - self._bytes_done
    if self._num_queued - self._num_done > self._max_queue or (
      size and waiting_bytes and waiting_bytes + size > _MAX_BYTES
    ):
      self.executor.wait()
    with self._lock:
      if self._is_closed:
        raise RuntimeError(f'write_{kind} was called after close().')
      self.executor.raise_error()
      if size:
        values = {name: _copy(x) for name, x in values.items()}
      else:
        values = _snapshot(values)
      self._num_queued += 1
      self._bytes_queued += size
      record = kind, _snapshot(global_step), values
      self.executor.put(functools.partial(self._write_queued, size, *record))

  def _write_queued(self, size: int, *record: Any) -> None:
    try:
      self._hand_over(*record)
    finally:
      self._bytes_done += size
      self._num_done += 1

  def _hand_over(self, kind: str, step: Any, values: Mapping[str, Any]) -> None:
    convert = to_scalars if kind == 'scalars' else values_lib.fetch
    on_host = convert(values)
    method = getattr(self._writer, f'write_{kind}')
    method(to_step(step), on_host)

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:
    self.executor.wait(lambda: self._writer.resume(step, lengths))

  def flush(self) -> dict[str, int]:
    return self.flush_async()()

  def flush_async(self) -> Callable[[], dict[str, int]]:
    return self.executor.wait_async(self._writer.flush)

  def close(self) -> None:
    with self._lock:  # No write is between its check and the queue.
      if self._is_closed:
        return
      self._is_closed = True
      wait = self.executor.wait_async(self._writer.flush, self._writer.close)
    async_lib.at_exit.remove(self.close)
    wait()


# The first that fits is found fastest.
_UNCHANGEABLE = (jax.Array, float, int, str, np.generic)


def _snapshot(value: Any) -> Any:
  """Copies what the caller may change: mappings and arrays on the host."""
  if isinstance(value, _UNCHANGEABLE):
    return value
  if isinstance(value, Mapping):
    return {name: _snapshot(v) for name, v in value.items()}
  return np.array(value) if hasattr(value, '__array__') else value


def _copy(value: Any) -> Any:
  """Copies an array, on its device if it is on one."""
  if not isinstance(value, jax.Array):
    return np.array(value)
  if value.is_fully_replicated:
    value = value.addressable_data(0)
  # What other processes have a part of cannot be fetched either.
  return value.copy() if value.is_fully_addressable else value


# (config, mode, directory) -> a writer.
Factory = Callable[[Any, str, pathlib.Path], Writer]
_factories: dict[str, Factory] = {
  'tensorboard': lambda config, mode, directory: TensorBoardWriter(directory),
  'jsonl': lambda config, mode, directory: JsonlWriter(
    directory / 'metrics.jsonl'
  ),
}


def register(name: str) -> Callable[[F], F]:
  """Lets `config.writers` name a writer; a decorator of its factory or class.

    @writers.register('mine')
    def make_mine(config, mode, directory):
      return Mine(directory / 'mine.txt')

  Args:
    name: the name. The latest factory of a name counts.

  Returns:
    A decorator. The factory gets the config, the log ('train' or 'eval') and
    its directory; the writer needs no method but `write_scalars`, and is called
    on the background thread only.
  """

  def add(factory: F) -> F:
    _factories[name] = factory
    return factory

  return add


def make(name: str, config: Any, mode: str, directory: pathlib.Path) -> Writer:
  """Returns a new writer of a registered name.

  Raises:
    errors.UsageError: the name is not registered.
  """
  note = ' What the terminal shows is config.console, and no writer.'
  errors.check_names([name], list(_factories), 'writer', 'config.writers', note)
  return _factories[name](config, mode, directory)
