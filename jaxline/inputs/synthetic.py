"""Synthetic data for speed tests: Pax's LmCloud, and random values.

Shapes: b rows, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal, get_args

import numpy as np

from jaxline.inputs import indexed

Kind = Literal['ones', 'random']


@dataclasses.dataclass(kw_only=True, eq=False)
class SyntheticInput(indexed.IndexedInput):
  """Batches of ones, or of random values that a record's number fixes.

  With `length`, a batch of a language model: `ids` and `labels`, int32 [b, L],
  `weights` of 1 and `paddings` of 0, float32 [b, L], `segment_ids` of 1 and
  `segment_pos` of 0 to L - 1, int32 [b, L]. Of kind 'random', ids are uniform
  and labels the ids that follow; of kind 'ones' (the data of Pax's LmCloud
  experiments), both are 1.

  With `spec`, whatever it names: ones; of kind 'random', floats are standard
  normal and integers uniform.

  Attributes:
    kind: 'ones' or 'random'.
    length: L, tokens a row; give this or `spec`.
    vocab_size: random integers are less than this.
    spec: of each entry, the shape of a row and the dtype: for images and
      classes, {'images': ((224, 224, 3), 'float32'), 'labels': ((), 'int32')}.
    size: records of an epoch.
    shuffle: as in every indexed input; the records are random without it.
  """

  kind: Kind = 'ones'
  length: int | None = None
  vocab_size: int = 256
  spec: Mapping[str, tuple[Sequence[int], Any]] | None = None
  size: int = 2**20
  shuffle: bool | None = False

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.kind not in get_args(Kind):
      raise ValueError(
        f'{self.name}.kind is {self.kind!r}; expected one of {get_args(Kind)}.'
      )
    if (self.length is None) == (self.spec is None):
      raise ValueError(
        f'{self.name} has length={self.length} and spec={self.spec}; give'
        ' length for the batches of a language model, or spec for others.'
      )
    for key in ('length', 'vocab_size', 'size'):
      value = getattr(self, key)
      if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(
          f'{self.name}.{key} is {value!r}; expected an integer of at least 1.'
        )
    if self.spec is not None and not self.spec:
      raise ValueError(f'{self.name}.spec names no entry of a batch.')
    # Of each entry that is drawn; labels are the ids that follow.
    spec = self.spec or {'ids': (((self.length or 0) + 1,), 'int32')}
    try:
      self._spec = {
        key: (tuple(shape), np.dtype(dtype))
        for key, (shape, dtype) in spec.items()
      }
    except (TypeError, ValueError) as e:
      raise ValueError(
        f'{self.name}.spec is {self.spec!r} ({e}); expected for each entry the'
        " shape of a row and a dtype, such as {'x': ((28, 28), 'float32')}."
      ) from e
    for key, (_, dtype) in self._spec.items():
      if not _is_float(dtype) and dtype.kind not in 'iu':
        raise ValueError(
          f'{self.name}.spec[{key!r}] has dtype {dtype.name}; expected floats'
          ' or integers.'
        )
      if dtype.kind in 'iu' and self.vocab_size - 1 > np.iinfo(dtype).max:
        raise ValueError(
          f'{self.name}.vocab_size is {self.vocab_size}, more than the'
          f' {dtype.name} of {key!r} can hold.'
        )

  def num_records(self) -> int:
    """Returns the records of an epoch."""
    return self.size

  def data_identity(self) -> dict[str, Any]:
    """Returns what the records depend on."""
    return {
      'kind': self.kind,
      'vocab_size': self.vocab_size,
      'spec': {
        k: [list(shape), d.name] for k, (shape, d) in self._spec.items()
      },
    }

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    """Returns the records [b, ...]."""
    made = [
      self._row(epoch, record)
      for epoch, record in zip(epochs.tolist(), records.tolist(), strict=True)
    ]
    batch = {key: np.stack([row[key] for row in made]) for key in self._spec}
    if self.length is None:
      return batch
    tokens = batch['ids']
    rows, length = len(tokens), self.length
    return {
      'ids': tokens[:, :-1].copy(),
      'labels': tokens[:, 1:].copy(),
      'weights': np.ones((rows, length), np.float32),
      'paddings': np.zeros((rows, length), np.float32),
      'segment_ids': np.ones((rows, length), np.int32),
      'segment_pos': np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }

  def _row(self, epoch: int, record: int) -> dict[str, np.ndarray]:
    """Returns a record: it does not matter who reads it, nor with which."""
    if self.kind == 'ones':
      return {key: np.ones(*entry) for key, entry in self._spec.items()}
    rng = np.random.Generator(
      np.random.Philox(
        key=self.seed() % 2**64,
        counter=np.array([0, 0, epoch, record], np.uint64),
      )
    )
    return {
      key: (
        rng.standard_normal(shape, np.float32)
        if _is_float(dtype)
        else rng.integers(self.vocab_size, size=shape)
      ).astype(dtype)
      for key, (shape, dtype) in self._spec.items()
    }


def _is_float(dtype: np.dtype) -> bool:
  # Those that JAX adds to NumPy's are of no kind that NumPy knows.
  return dtype.kind == 'f' or dtype.name == 'bfloat16'
