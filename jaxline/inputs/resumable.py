"""Inputs that can start to read at any position."""

from __future__ import annotations

import abc
from collections.abc import Iterator
import copy
import dataclasses
from typing import Any, ClassVar

from jaxline import errors
from jaxline.inputs import base


@dataclasses.dataclass(kw_only=True, eq=False)
class ResumableInput(base.BaseInput, abc.ABC):
  """An input that can start to read at any position.

  Attributes:
    repeat: whether epoch follows epoch; None is yes unless `reset_for_eval`.
  """

  repeat: bool | None = None

  # The position of the first batch.
  FIRST: ClassVar[Any] = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.repeat and self.reset_for_eval:
      raise errors.UsageError(
        f'{self.name} has reset_for_eval=True and repeat=True: one epoch would'
        ' never end. Set repeat=False.'
      )
    if self.repeat is None:
      self.repeat = not self.reset_for_eval
    self._at: Any = self.FIRST
    self._iterator: Iterator[tuple[dict[str, Any], Any]] | None = None

  @abc.abstractmethod
  def read_from(self, position: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields the batches from a position on, each with the position behind it.

    A generator, which ends its threads and workers when it is closed.
    """

  def get_next(self) -> dict[str, Any]:
    """Returns the next batch, arrays [b, ...]."""
    try:
      if self._iterator is None:
        self._iterator = self.read_from(copy.deepcopy(self._at))
      batch, position = next(self._iterator)
      self._at = copy.deepcopy(position)  # The generator may change its own.
      return batch
    except StopIteration:
      raise
    except BaseException:
      # The generator has read past the batch that failed, which a retry needs.
      self.close()
      raise

  def reset(self) -> None:
    """Goes back to the first batch."""
    super().reset()
    self.set_position(self.FIRST)

  def position(self) -> Any:
    """Returns where the next batch begins."""
    return self._at

  def set_position(self, position: Any) -> None:
    """Reads on from where `position` was called."""
    self.close()
    self._at = position

  def close(self) -> None:
    """Ends the threads and workers that read ahead."""
    # Not `close()`, which refuses while another thread reads.
    self._iterator = None
