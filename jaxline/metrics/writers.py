"""Writes metrics: the queue and thread of a run, and its backends by name."""

import collections
from collections.abc import Callable, Mapping
import contextlib
import functools
import pathlib
import threading
import time
from typing import Any, Protocol, TypeVar

from absl import logging
import numpy as np

from jaxline import errors
from jaxline.base import async_lib
from jaxline.metrics import files
from jaxline.metrics import scalars as scalars_lib
from jaxline.metrics import values as values_lib

F = TypeVar('F', bound=Callable[..., Any])

# Experiments and forks use these names.
Backend = files.Backend
Record = files.Record
JsonlWriter = files.JsonlWriter
to_scalars = values_lib.to_scalars


class Writer(Protocol):
  """A user's writer; it may have other methods of `MetricWriter` too."""

  def write_scalars(self, global_step: int, scalars: Mapping[str, Any]) -> None:
    """Writes named numbers at a step."""


# Limit on the bytes of images that wait on the devices for the thread.
_MAX_BYTES = 1 << 30
# Within this many seconds of a write, the thread waits to collect more records.
_LINGER = 0.005
# The arguments of `put` and the time.
_Item = tuple[str, Any, float, Mapping[str, Any], Callable[..., Any]]


class MetricWriter(contextlib.AbstractContextManager):
  """Writes to backends on one background thread with a bounded queue.

  `global_step` is an int, or an array of equal ints, such as one per device.
  The thread fetches scalars from the devices, so pass metrics of a step and not
  parts of its state, which is donated to the next step. Images are copied at
  once, on their device.

  A write waits while the queue is full. After an error on the thread, every
  write, flush and close raises the first error, and the other backends still
  get the queued records. Any thread may write and flush.

  Attributes:
    executor: The thread, which periodic actions share.
  """

  _conversions = values_lib.CONVERSIONS

  def __init__(self, *backends: Backend | Writer) -> None:
    """Starts the thread, which alone calls and closes the backends."""
    self._backends: list[Backend] = []
    for backend in backends:
      self.add(backend)
    # It is reentrant: a signal handler that interrupts a write may write too.
    self._lock = threading.RLock()
    # The records since the last flush. If there are any, the executor has a
    # call that writes them all.
    self._items: collections.deque[_Item] = collections.deque()
    self._is_closed = False
    self._written = 0.0  # The time at which the thread last wrote.
    self._image_bytes = 0  # Counted since the queue was last known to be empty.
    self.executor = async_lib.SerialExecutor('jaxline-writer')

  def add(self, backend: Backend | Writer) -> None:
    """Adds a backend, which is closed with this writer."""
    if not isinstance(backend, Backend):
      backend = files.Adapter(backend)
    self._backends.append(backend)

  def takes(self, kind: str) -> bool:
    """Returns whether a backend takes records of a kind."""
    return any(kind in backend.kinds for backend in self._backends)

  def write_scalars(self, global_step: Any, scalars: Mapping[str, Any]) -> None:
    """Writes named numbers; see `to_scalars` for the accepted types."""
    self.put('scalars', _snapshot(global_step), _snapshot(scalars))

  def write_texts(self, global_step: Any, texts: Mapping[str, str]) -> None:
    """Writes named plain texts of any number of lines, shown verbatim."""
    self.put('texts', _snapshot(global_step), dict(texts))

  def write_images(self, global_step: Any, images: Mapping[str, Any]) -> None:
    """Writes named images.

    They are [H, W], [H, W, C] or [B, H, W, C] with C = 1 (gray), 3 (RGB) or 4
    (RGBA), and uint8 in 0..255, bool, or floating point in 0..1. Other arrays
    raise ValueError.
    """
    copies = {k: values_lib.copy_image(k, x) for k, x in images.items()}
    size = sum(x.nbytes for x in copies.values())
    if self._image_bytes + size > _MAX_BYTES:
      self.wait_to_finish()
      self._image_bytes = 0
    self._image_bytes += size
    self.put('images', _snapshot(global_step), copies)

  def put(
    self,
    kind: str,
    global_step: Any,
    values: Mapping[str, Any],
    finish: Callable[[dict[str, Any]], dict[str, Any]] = dict,
  ) -> None:
    """Queues a record of values, which the caller must not change.

    `kind` is one of `files.KINDS`, or a kind that only some backends take.
    On the thread, `finish` maps the converted values to the final ones.
    """
    if not self.takes(kind):
      return
    item = kind, global_step, time.time(), values, finish
    if self.executor.is_current:
      self._write(collections.deque([item]))
      return
    if len(self._items) >= async_lib.MAX_QUEUED:
      self.executor.wait()
    with self._lock:
      if self._is_closed:
        raise RuntimeError(f'write_{kind} was called after close().')
      self.executor.raise_error()
      self._items.append(item)
      if len(self._items) == 1:
        self.executor.put(functools.partial(self._write, self._items))

  def _write(self, queued: collections.deque[_Item]) -> None:
    """Converts and writes all queued records; keeps the first error."""
    # Collect records: each wake of this thread delays the training thread.
    if queued is self._items and time.monotonic() - self._written < _LINGER:
      time.sleep(_LINGER)
    items: list[_Item] = []
    while queued:  # When it is empty, the next `put` makes a new call.
      items.append(queued.popleft())
    records: list[Record] = []
    values_lib.start_fetch([item[3] for item in items])

    def convert(kind: str, step: Any, now: float, values: Any, fn: Any) -> None:
      if on_host := fn(self._conversions[kind](values)):
        records.append(Record(kind, values_lib.to_step(step), now, on_host))

    for item in items:
      self.executor.run(functools.partial(convert, *item))
    self._written = time.monotonic()
    for backend in self._backends:
      chosen = [record for record in records if record.kind in backend.kinds]
      if chosen:
        self.executor.run(functools.partial(backend.write, chosen))

  def _behind(self, *calls: Callable[[], Any]) -> Callable[[], Any]:
    """Queues calls after all records so far; returns a function that waits."""
    with self._lock:
      self._items = collections.deque()
      return self.executor.wait_async(*calls)

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:
    """Removes the records that were written after the restored checkpoint.

    `step` is the checkpoint's, or -1 if the run is new. `lengths` is the result
    of the `flush` before its save. Log files that are not in it become empty.
    """
    self._behind(
      *(functools.partial(x.resume, step, lengths) for x in self._backends)
    )()

  def flush(self) -> dict[str, int]:
    """Waits for the disk; returns the log files' lengths in bytes, by path."""
    return self.flush_async()()

  def flush_async(self) -> Callable[[], dict[str, int]]:
    """Starts a flush; returns a function that waits for its result."""
    return self._behind(
      lambda: {k: v for x in self._backends for k, v in x.flush().items()}
    )

  def wait_to_finish(self) -> None:
    """Waits until the backends have all records; raises their error, if any."""
    self.executor.wait()

  def close(self) -> None:
    """Flushes and closes the writer. A second call does nothing."""
    with self._lock:  # Close after all accepted writes.
      if self._is_closed:
        return
      self._is_closed = True
      wait = self._behind(*(x.close for x in self._backends))
    wait()

  def __exit__(self, kind: object, *unused: object) -> None:
    try:
      self.close()
    except Exception as e:
      if kind is None:
        raise
      # It often has the same cause as the error that leaves the block.
      logging.error('Closing a writer failed as well: %r', e)


def _snapshot(value: Any) -> Any:
  """Copies mappings and host arrays, which the caller may change."""
  if isinstance(value, np.ndarray | scalars_lib.Scalars):
    return value.copy()
  if isinstance(value, Mapping):
    return {name: _snapshot(v) for name, v in value.items()}
  return value


_factories: dict[str, Callable[[Any, str, pathlib.Path], Any]] = {}


def register(name: str) -> Callable[[F], F]:
  """Decorates a factory or class of writers that `config.writers` can name.

  It is called as `factory(config, mode, directory)`, where `mode` is 'train' or
  'eval'. The only method that a writer needs is `write_scalars`.
  """

  def add(factory: F) -> F:
    _factories[name] = factory
    return factory

  return add


@register('tensorboard')
def _make_tensorboard(config: Any, mode: str, directory: pathlib.Path) -> Any:
  # The import of tensorboardX takes half as long as the import of jax.
  from jaxline.metrics import tensorboard

  return tensorboard.TensorBoardWriter(directory)


register('jsonl')(
  lambda config, mode, directory: JsonlWriter(directory / 'metrics.jsonl')
)


def make(name: str, config: Any, mode: str, directory: pathlib.Path) -> Any:
  """Makes a writer of a registered name; raises UsageError for other names."""
  note = ' To choose the output on the terminal, set config.console.'
  errors.check_names([name], list(_factories), 'writer', 'config.writers', note)
  return _factories[name](config, mode, directory)
