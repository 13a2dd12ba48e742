"""Synthetic sequences to copy or to reverse.

Shapes: b rows, S length of the longest source, L = S + 1 longest target.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from examples.pax import base_input
from jaxline.inputs import base
from jaxline.inputs import indexed

# Token for padding, and before each target.
START_ID = 0
# Token at the end of each target.
STOP_ID = 1
# All other tokens are symbols.
NUM_SPECIAL = 2


@dataclasses.dataclass(kw_only=True, eq=False)
class SequenceInput(base_input.Configured, indexed.IndexedInput):
  """Random source sequences, with their copies or reversals as targets.

  Lengths and symbols are uniform. The seed and a record's index determine them.
  Evaluation and training have different records, except by chance.

  A batch has three entries. `src` has `ids`, int32 [b, S], and `paddings`,
  float32 [b, S]. `tgt` has `ids` and `labels`, int32 [b, L], and `weights`,
  float32 [b, L]. `weights` equals the weights of `tgt`.

  Attributes:
    min_length: Number of symbols of the shortest source.
    max_length: S.
    vocab_size: Number of tokens. Symbols are the tokens from 2.
    reverse: Whether the target is the reversed source. If False, its copy.
    size: Number of records of an epoch.
  """

  min_length: int = 1
  max_length: int
  vocab_size: int
  reverse: bool = True
  size: int = 2**20

  def __post_init__(self) -> None:
    super().__post_init__()
    if not 1 <= self.min_length <= self.max_length:
      self.refuse('min_length', f'1 to max_length, which is {self.max_length}')
    if self.vocab_size <= NUM_SPECIAL:
      self.refuse('vocab_size', f'more than the {NUM_SPECIAL} special tokens')

  def num_records(self) -> int:
    return self.size

  def data_identity(self) -> dict[str, Any]:
    return {
      'lengths': [self.min_length, self.max_length],
      'vocab_size': self.vocab_size,
      'reverse': self.reverse,
      'is_training': self.is_training,
    }

  def read(self, records: np.ndarray, epochs: np.ndarray) -> base.Batch:
    shape = len(records), self.max_length
    source_BS = np.zeros(shape, np.int32)
    labels_BL = np.zeros((shape[0], shape[1] + 1), np.int32)
    for row, record in enumerate(records.tolist()):
      symbols = self._symbols(record)
      source_BS[row, : len(symbols)] = symbols
      target = symbols[::-1] if self.reverse else symbols
      labels_BL[row, : len(target) + 1] = [*target, STOP_ID]
    weights_BL = (labels_BL > 0).astype(np.float32)
    ids_BL = np.insert(labels_BL[:, :-1], 0, START_ID, axis=1)
    return base.Batch(
      src={'ids': source_BS, 'paddings': 1 - weights_BL[:, 1:]},
      tgt={'ids': ids_BL, 'labels': labels_BL, 'weights': weights_BL},
      weights=weights_BL,
    )

  def _symbols(self, record: int) -> np.ndarray:
    """Returns a record's source without padding."""
    # Each record has a separate random stream, so any host can read it.
    place = 2 * record + self.is_training
    key = np.array([self.seed() % 2**64, place], np.uint64)
    draws = np.random.Philox(key=key).random_raw(1 + self.max_length)
    num_lengths = self.max_length - self.min_length + 1
    length = self.min_length + int(draws[0] % num_lengths)
    num_symbols = self.vocab_size - NUM_SPECIAL
    return (NUM_SPECIAL + draws[1 : 1 + length] % num_symbols).astype(np.int32)
