"""The interface between a metric writer and its backends."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

KINDS = ('scalars', 'images', 'texts')


class Writer(Protocol):
  """The one method that a program's own writer must have.

  `write_images`, `write_texts`, `flush` and `close` are called if it has them.
  """

  def write_scalars(self, global_step: int, scalars: Mapping[str, Any]) -> None:
    """Writes named numbers at a step."""


class Record(NamedTuple):
  """Converted values of one call of a writer.

  Attributes:
    kind: one of `KINDS`, or another that a backend knows.
    step: the step they belong to.
    time: when they were written, in seconds since the epoch.
    values: by name; int or float, uint8 [B, H, W, C], or str.
  """

  kind: str
  step: int
  time: float
  values: dict[str, Any]


class Backend(abc.ABC):
  """Where a `MetricWriter` writes; called on that writer's thread only.

  Attributes:
    kinds: the kinds of records that it gets.
  """

  kinds: Sequence[str] = KINDS

  @abc.abstractmethod
  def write(self, records: list[Record]) -> None:
    """Writes the records since the last call, without changing them."""

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:  # noqa: B027
    """Cuts its files: see `MetricWriter.resume`."""

  def flush(self) -> dict[str, int]:
    """Waits for the disk; returns path -> length of its log files."""
    return {}

  def close(self) -> None:  # noqa: B027
    """Flushes and ends the backend; called once."""


class Adapter(Backend):
  """Writes to a program's own writer, or to the console."""

  def __init__(self, writer: Any):
    kinds = *KINDS, 'console'
    self._writer = writer
    self.kinds = [kind for kind in kinds if hasattr(writer, f'write_{kind}')]

  def write(self, records: list[Record]) -> None:
    for kind, step, _, values in records:
      getattr(self._writer, f'write_{kind}')(step, dict(values))

  def flush(self) -> dict[str, int]:
    getattr(self._writer, 'flush', dict)()
    return {}

  def close(self) -> None:
    self.flush()
    getattr(self._writer, 'close', dict)()
