"""Metric writers: the queue and thread of a run, and its backends by name."""

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

# The names that experiments and forks use.
Backend = files.Backend
Record = files.Record
JsonlWriter = files.JsonlWriter
to_scalars = values_lib.to_scalars


class Writer(Protocol):
  """A program's own writer; it may have the other methods of `MetricWriter`."""

  def write_scalars(self, global_step: int, scalars: Mapping[str, Any]) -> None:
    """Writes named numbers at a step."""


# Images that wait for the thread, on the devices.
_MAX_BYTES = 1 << 30
# How long, in seconds, records that follow others closely wait for more.
_LINGER = 0.005
# The arguments of `put`, and the time.
_Item = tuple[str, Any, float, Mapping[str, Any], Callable[..., Any]]


class MetricWriter(contextlib.AbstractContextManager):
  """Writes to backends on one background thread, behind a bounded queue.

  `global_step` is an int or an array whose elements are all the step (one copy
  per device). Scalars on a device are fetched on the thread: pass metrics of a
  step, not parts of its state, which is donated to the next step. Images are
  copied at once, on their device.

  A write waits while the queue is full. The first error on the thread is raised
  by every later write and flush and by the close; the other backends still get
  what was queued. Any thread may write and flush.

  Attributes:
    executor: the thread, which periodic actions share.
  """

  _conversions = values_lib.CONVERSIONS

  def __init__(self, *backends: Backend | Writer) -> None:
    """Starts the thread, which alone calls and closes the backends."""
    self._backends: list[Backend] = []
    for backend in backends:
      self.add(backend)
    # Reentrant: a signal handler may write while its thread is in a write.
    self._lock = threading.RLock()
    # The records since the last mark. While there are any, the executor has a
    # call that writes them all.
    self._items: collections.deque[_Item] = collections.deque()
    self._is_closed = False
    self._written = 0.0  # When the thread last wrote.
    self._image_bytes = 0  # Since the queue was last known to be empty.
    self.executor = async_lib.SerialExecutor('jaxline-writer')

  def add(self, backend: Backend | Writer) -> None:
    """Also writes to another backend, which is closed with this writer."""
    if not isinstance(backend, Backend):
      backend = files.Adapter(backend)
    self._backends.append(backend)

  def takes(self, kind: str) -> bool:
    """Returns whether a backend takes records of a kind."""
    return any(kind in backend.kinds for backend in self._backends)

  def write_scalars(self, global_step: Any, scalars: Mapping[str, Any]) -> None:
    """Writes named numbers, as `to_scalars` accepts them."""
    self.put('scalars', _snapshot(global_step), _snapshot(scalars))

  def write_texts(self, global_step: Any, texts: Mapping[str, str]) -> None:
    """Writes named plain texts of any number of lines, shown as they are."""
    self.put('texts', _snapshot(global_step), dict(texts))

  def write_images(self, global_step: Any, images: Mapping[str, Any]) -> None:
    """Writes named images.

    They are [H, W], [H, W, C] or [B, H, W, C] with C 1 (grey), 3 (RGB) or 4
    (RGBA); uint8 in 0..255, bool, or floating point in 0..1. Any other array
    raises ValueError.
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
    """Queues a record of values that the caller does not change.

    `kind` is one of `files.KINDS`, or another that a backend knows. `finish`
    maps the converted values to those to write; it runs on the thread.
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
    # A wake of this thread costs the training thread more than a record does.
    if queued is self._items and time.monotonic() - self._written < _LINGER:
      time.sleep(_LINGER)
    items: list[_Item] = []
    while queued:  # Until it is empty, so that the next `put` makes a call.
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
    """Calls `wait_async` behind all records so far, before all later ones."""
    with self._lock:
      self._items = collections.deque()
      return self.executor.wait_async(*calls)

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:
    """Removes what earlier processes wrote after the restored checkpoint.

    `step` is its step, -1 if the run is new, and `lengths` is what `flush`
    returned then. Other log files become empty.
    """
    self._behind(
      *(functools.partial(x.resume, step, lengths) for x in self._backends)
    )()

  def flush(self) -> dict[str, int]:
    """Waits for the disk; returns path -> length of the log files in bytes."""
    return self.flush_async()()

  def flush_async(self) -> Callable[[], dict[str, int]]:
    """Starts a flush, and returns a function that waits for its result."""
    return self._behind(
      lambda: {k: v for x in self._backends for k, v in x.flush().items()}
    )

  def wait_to_finish(self) -> None:
    """Waits until the backends have all records, and raises their error."""
    self.executor.wait()

  def close(self) -> None:
    """Flushes and ends the writer; closing twice is allowed."""
    with self._lock:  # Behind what a write has accepted.
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
      # Often of the same cause as the error that leaves the block.
      logging.error('Closing a writer failed as well: %r', e)


def _snapshot(value: Any) -> Any:
  """Copies what the caller may change: mappings and arrays on the host."""
  if isinstance(value, np.ndarray | scalars_lib.Scalars):
    return value.copy()
  if isinstance(value, Mapping):
    return {name: _snapshot(v) for name, v in value.items()}
  return value


_factories: dict[str, Callable[[Any, str, pathlib.Path], Any]] = {}


def register(name: str) -> Callable[[F], F]:
  """Lets `config.writers` name a writer; decorates its factory or class.

  It is called as `factory(config, mode, directory)`, where the mode is 'train'
  or 'eval'. The writer needs no method but `write_scalars`.
  """

  def add(factory: F) -> F:
    _factories[name] = factory
    return factory

  return add


@register('tensorboard')
def _make_tensorboard(config: Any, mode: str, directory: pathlib.Path) -> Any:
  # tensorboardX takes as long to import as half of jax.
  from jaxline.metrics import tensorboard

  return tensorboard.TensorBoardWriter(directory)


register('jsonl')(
  lambda config, mode, directory: JsonlWriter(directory / 'metrics.jsonl')
)


def make(name: str, config: Any, mode: str, directory: pathlib.Path) -> Any:
  """Returns a new writer of a registered name; else raises UsageError."""
  note = ' What the terminal shows is config.console, and no writer.'
  errors.check_names([name], list(_factories), 'writer', 'config.writers', note)
  return _factories[name](config, mode, directory)
