"""Inputs that can start to read at any position."""

import abc
from collections.abc import Iterator
import dataclasses
from typing import Any, ClassVar

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
      self.refuse('repeat', 'False with reset_for_eval=True: one epoch')
    if self.repeat is None:
      self.repeat = not self.reset_for_eval
    self._at: Any = self.FIRST
    self._iterator: Iterator[tuple[dict[str, Any], Any]] | None = None

  @abc.abstractmethod
  def read_from(self, position: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields batches from a position on, each with a new position behind it."""

  def get_next(self) -> dict[str, Any]:
    try:
      if self._iterator is None:
        self._iterator = self.read_from(self._at)
      batch, self._at = next(self._iterator)
      return batch
    except BaseException:
      # The generator has read past the batch that failed, which a retry needs.
      self.close()
      raise

  def reset(self) -> None:
    super().reset()
    self.set_position(self.FIRST)

  def position(self) -> Any:
    return self._at

  def set_position(self, position: Any) -> None:
    self.close()
    self._at = position

  def close(self) -> None:
    # Not `close()`, which refuses while another thread reads.
    self._iterator = None
