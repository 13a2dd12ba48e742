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

from absl import logging
import jax
import numpy as np

from jaxline import async_lib
from jaxline import errors
from jaxline.metrics import base
from jaxline.metrics import jsonl
from jaxline.metrics import tensorboard
from jaxline.metrics import values as values_lib

F = TypeVar('F', bound=Callable[..., Any])

# Of images and histograms that wait for a writer: copies, on the devices.
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

  def _each(self, method: str, *args: Any) -> None:
    errors = []
    for writer in self._writers:
      try:
        if hasattr(writer, method):
          getattr(writer, method)(*args)
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

  def _write(
    self, kind: str, global_step: Any, values: Mapping[str, Any], *options: Any
  ) -> None:
    self._each(f'write_{kind}', global_step, base.Record.of(values), *options)

  def resume(self, step: int) -> None:
    self._each('resume', step)

  def flush(self) -> None:
    self._each('flush')

  def close(self) -> None:
    self._each('close')


class AsyncWriter(MetricWriter):
  """Writes on one background thread, behind a queue that cannot overflow.

  To write scalars or texts costs the caller a few microseconds, whatever the
  disk does. Device arrays are fetched on the background thread. NumPy arrays
  are copied at once, since the caller may reuse them; so are the arrays of
  images and of histograms, on their device, since a weight is donated to the
  next step. (A scalar is not: hand over a metric of the step, not a part of its
  state.)

  - Where the queue is full the record is dropped and counted: of images and
    histograms, it holds one, or several of together at most 1 GiB. The 1st,
    10th, 100th ... drop is logged, and `flush` and `close` log the count and
    write it as the scalar `writer/dropped_records`.
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
    # Their number and the last one's step, at once: the thread takes no lock.
    self._dropped: tuple[int, Any] = (0, 0)
    self._reported = 0
    self._is_closed = False
    self.executor = async_lib.SerialExecutor('jaxline-writer')
    self.executor.put(lambda: None)  # No fork starts one of its own.
    async_lib.at_exit.append(self.close)

  def add(self, writer: Writer) -> None:
    """Also writes to another writer, which is closed with this one."""
    self.executor.wait()
    self._writer = MultiWriter([self._writer, writer])

  @property
  def dropped_records(self) -> int:
    """How many records were dropped because the queue was full."""
    return self._dropped[0]

  def _write(
    self, kind: str, global_step: Any, values: Mapping[str, Any], *options: Any
  ) -> None:
    if self.executor.is_current:  # A periodic action calls it.
      self.executor.run(
        lambda: self._hand_over(kind, global_step, values, *options)
      )
      return
    size = 0  # Of the arrays in bytes.
    if has_arrays := kind in ('images', 'histograms'):
      values = {
        name: x if isinstance(x, jax.Array | np.ndarray) else np.array(x)
        for name, x in values.items()
      }
      size = sum(x.nbytes for x in values.values())
    if kind == 'images':
      for name, image in values.items():
        # Here the traceback still leads to the line that made the image.
        values_lib.check_image(name, image)

    with self._lock:
      if self._is_closed:
        raise RuntimeError(f'write_{kind} was called after close().')
      self.executor.raise_error()
      waiting = self._num_queued - self._num_done
      waiting_bytes = self._bytes_queued - self._bytes_done
      # Besides those that wait, one is being written.
      if waiting <= self._max_queue and (
        not size or not waiting_bytes or waiting_bytes + size <= _MAX_BYTES
      ):
        if has_arrays:
          values = {name: _copy(x) for name, x in values.items()}
        else:
          values = _snapshot(values)
        record = kind, _snapshot(global_step), values, *options
        self._num_queued += 1
        self._bytes_queued += size
        self.executor.put(functools.partial(self._write_queued, size, *record))
        return
      step = _snapshot(global_step)
      dropped = self.dropped_records + 1
      self._dropped = (dropped, step)
    if str(dropped).strip('0') == '1':
      logging.warning(
        'The writer cannot keep up: its queue holds %d records and %d were '
        'dropped so far. Is the disk slow or stuck? Log less often or smaller '
        'arrays, or raise max_queue.',
        waiting - 1,
        dropped,
      )

  def _write_queued(self, size: int, *record: Any) -> None:
    try:
      self._hand_over(*record)
    finally:
      self._bytes_done += size
      self._num_done += 1

  def _hand_over(
    self, kind: str, step: Any, values: Mapping[str, Any], *options: Any
  ) -> None:
    convert = to_scalars if kind == 'scalars' else values_lib.fetch
    on_host = convert(values)
    method = getattr(self._writer, f'write_{kind}')
    method(to_step(step), on_host, *options)

  def resume(self, step: int) -> None:
    self.executor.wait(lambda: self._writer.resume(step))

  def flush(self) -> None:
    self.flush_async()()

  def flush_async(self) -> Callable[[], None]:
    return self.executor.wait_async(self._report_dropped, self._writer.flush)

  def close(self) -> None:
    with self._lock:  # No write is between its check and the queue.
      if self._is_closed:
        return
      self._is_closed = True
      wait = self.executor.wait_async(
        self._report_dropped, self._writer.flush, self._writer.close
      )
    async_lib.at_exit.remove(self.close)
    wait()

  def _report_dropped(self) -> None:
    dropped, step = self._dropped
    if dropped > self._reported:
      self._reported = dropped
      logging.warning('The writer dropped %d records in all.', dropped)
      self._writer.write_scalars(
        to_step(step), {'writer/dropped_records': dropped}
      )


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


def _make_tensorboard(
  config: Any, mode: str, directory: pathlib.Path
) -> MetricWriter:
  writer = TensorBoardWriter(directory)
  session = directory.with_name('hparams')
  if directory.parent != pathlib.Path(config.checkpoint_dir):
    return writer  # Of a host that is not the first.
  if mode == 'train':
    tensorboard.write_hparams(session, config)
  if mode != 'eval':
    return writer
  return MultiWriter([writer, tensorboard.SessionWriter(session, config)])


# (config, mode, directory) -> a writer.
Factory = Callable[[Any, str, pathlib.Path], Writer]
_factories: dict[str, Factory] = {
  'tensorboard': _make_tensorboard,
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
