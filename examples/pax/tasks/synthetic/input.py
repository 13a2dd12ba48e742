"""Synthetic sequences to copy or to reverse.

Shapes: b rows, S the longest source, L = S + 1 the longest target.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from examples.pax import base_input
from jaxline.inputs import base
from jaxline.inputs import indexed

# What fills, and what stands before a target.
START_ID = 0
# What ends a target.
STOP_ID = 1
# All others are symbols.
NUM_SPECIAL = 2


@dataclasses.dataclass(kw_only=True, eq=False)
class SequenceInput(base_input.Configured, indexed.IndexedInput):
  """Random sequences, and what a model of sequences shall make of them.

  Lengths and symbols are uniform; a record's number and the seed fix them, and
  none of evaluation is one of training, but by chance.

  A batch has `src`, with `ids` int32 [b, S] and `paddings` float32 [b, S], and
  `tgt`, with `ids` and `labels` int32 [b, L] and `weights` float32 [b, L]; and
  these weights as its own.

  Attributes:
    min_length: symbols of the shortest source.
    max_length: S.
    vocab_size: symbols are from 2 to this less 1.
    reverse: whether the target is the source backwards, or its copy.
    size: records of an epoch.
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
      self.refuse(
        'vocab_size', f'more than {NUM_SPECIAL}, which are no symbols'
      )

  def num_records(self) -> int:
    """Returns the records of an epoch."""
    return self.size

  def data_identity(self) -> dict[str, Any]:
    """Returns what the records are made of."""
    return {
      'lengths': [self.min_length, self.max_length],
      'vocab_size': self.vocab_size,
      'reverse': self.reverse,
      'is_training': self.is_training,
    }

  def read(self, records: np.ndarray, epochs: np.ndarray) -> base.Batch:
    """Returns the records [b, ...]; the same in every epoch."""
    del epochs
    shape = len(records), self.max_length
    source_BS = np.zeros(shape, np.int32)
    labels_BL = np.zeros((shape[0], shape[1] + 1), np.int32)
    for row, record in enumerate(records.tolist()):
      symbols = self._symbols(record)
      source_BS[row, : len(symbols)] = symbols
      target = symbols[::-1] if self.reverse else symbols
      labels_BL[row, : len(target) + 1] = [*target, STOP_ID]
    weights_BL = (labels_BL > 0).astype(np.float32)
    ids_BL = np.pad(
      labels_BL[:, :-1], ((0, 0), (1, 0)), constant_values=START_ID
    )
    return base.Batch(
      src={'ids': source_BS, 'paddings': 1 - weights_BL[:, 1:]},
      tgt={'ids': ids_BL, 'labels': labels_BL, 'weights': weights_BL},
      weights=weights_BL,
    )

  def _symbols(self, record: int) -> np.ndarray:
    """Returns a record's source without its padding."""
    # A stream of its own for each record: it does not matter who reads it.
    key = np.array(
      [self.seed() % 2**64, 2 * record + self.is_training], np.uint64
    )
    draws = np.random.Philox(key=key).random_raw(1 + self.max_length)
    num_lengths = self.max_length - self.min_length + 1
    length = self.min_length + int(draws[0] % num_lengths)
    num_symbols = self.vocab_size - NUM_SPECIAL
    return (NUM_SPECIAL + draws[1 : 1 + length] % num_symbols).astype(np.int32)
