"""What a writer is, and what its backends have in common."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from absl import logging

from jaxline import async_lib
from jaxline.metrics import values as values_lib


class Writer(Protocol):
  """The one method that a program's own writer must have.

  `AsyncWriter` and `MultiWriter` accept such writers beside the complete ones.
  Loops and experiments get complete ones: see `adapters.full_writer`.
  """

  def write_scalars(self, global_step: int, scalars: Mapping[str, Any]) -> None:
    """Writes named numbers at a step."""


class MetricWriter(abc.ABC):
  """A complete writer: scalars, images, texts.

  `global_step` is an int, a numpy integer or an array whose elements are all
  the step (one copy per device). A writer is also a context manager that
  closes itself.

  A subclass gives `_write` and, where it holds something, `flush`, `close` and
  `resume`; see `Backend`.

  Attributes:
    executor: runs what writes on its thread, and lets others share the thread;
      None where calls write themselves.
    fingerprints: the file of the steps' fingerprints, if there is one.
  """

  executor: async_lib.SerialExecutor | None = None
  fingerprints: Any = None

  def write_scalars(self, global_step: Any, scalars: Mapping[str, Any]) -> None:
    """Writes named numbers, as `to_scalars` accepts them."""
    self._write('scalars', global_step, scalars)

  def write_images(self, global_step: Any, images: Mapping[str, Any]) -> None:
    """Writes named images.

    Args:
      global_step: the step they belong to.
      images: arrays [H, W], [H, W, C] or [B, H, W, C] with C 1 (grey), 3 (RGB)
        or 4 (RGBA); uint8 in 0..255, bool, or floating point in 0..1.

    Raises:
      ValueError: an array has another shape, dtype or range.
    """
    self._write('images', global_step, images)

  def write_texts(self, global_step: Any, texts: Mapping[str, str]) -> None:
    """Writes named plain texts of any number of lines, shown as they are."""
    self._write('texts', global_step, texts)

  @abc.abstractmethod
  def _write(
    self, kind: str, global_step: Any, values: Mapping[str, Any]
  ) -> None:
    """Writes what `write_<kind>` was called with."""

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:  # noqa: B027
    """Removes what earlier processes wrote after the restored checkpoint.

    A run calls it once, after it has restored and before it writes.

    Args:
      step: the restored step; -1 if the run is new.
      lengths: by absolute path, the length of each log file in bytes, as the
        flush of the restored checkpoint returned it. This writer's other log
        files become empty.

    Raises:
      OSError: a file cannot be cut.
    """

  def flush(self) -> dict[str, int]:
    """Waits until everything written so far has reached the disk.

    Any thread may call it.

    Returns:
      The length in bytes of each local log file, by absolute path.
    """
    return {}

  def flush_async(self) -> Callable[[], dict[str, int]]:
    """Starts a flush, in the background if the writer has a thread.

    Returns:
      A function that waits for the flush and returns the lengths of the log
      files without the records that were written after this call. It raises no
      error of such a record.
    """
    lengths = self.flush() or {}  # A program's own writer may return None.
    return lambda: lengths

  def close(self) -> None:
    """Flushes and ends the writer; closing twice is allowed."""
    self.flush()

  def __enter__(self) -> 'MetricWriter':
    return self

  def __exit__(self, kind: object, *unused: object) -> None:
    try:
      self.close()
    except Exception as e:
      if kind is None:
        raise
      # It often has the same cause as the error that leaves the block.
      logging.error('Closing a writer failed as well: %r', e)


class Record(dict[str, Any]):
  """The values of one call, and what they are converted to for all backends."""

  converted: dict[str, Any] | None = None

  @classmethod
  def of(cls, values: Mapping[str, Any]) -> 'Record':
    """Returns the values of a call as a record; a record as it is."""
    return values if isinstance(values, cls) else cls(values)


class Backend(MetricWriter):
  """Converts what is handed over; a subclass only has to emit it.

  It has no lock: an `AsyncWriter` in front of it calls it on one thread.
  """

  @abc.abstractmethod
  def _emit(self, kind: str, step: int, values: dict[str, Any]) -> None:
    """Writes one record.

    Args:
      kind: scalars, images or texts.
      step: the step the values belong to.
      values: by name; int or float, uint8 [B, H, W, C], or str.
    """

  def _write(
    self, kind: str, global_step: Any, values: Mapping[str, Any]
  ) -> None:
    record = Record.of(values)
    if record.converted is None:
      record.converted = values_lib.CONVERSIONS[kind](values)
    if record.converted:
      # A copy: one backend may change it before the next one gets it.
      self._emit(kind, values_lib.to_step(global_step), dict(record.converted))
