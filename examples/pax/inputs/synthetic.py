"""Synthetic data for speed tests: Pax's LmCloud, and random values.

Shapes: b rows, L tokens.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal, get_args

import jax
import numpy as np

from examples.pax import base_input
from jaxline.inputs import indexed

Kind = Literal['ones', 'random']


@dataclasses.dataclass(kw_only=True, eq=False)
class SyntheticInput(base_input.Configured, indexed.IndexedInput):
  """Batches of ones, or of random values determined by a record's index.

  With `length`, a batch for a language model: `ids` and `labels`, int32 [b, L],
  `weights` of 1 and `paddings` of 0, float32 [b, L], `segment_ids` of 1 and
  `segment_pos`, int32 [b, L]. With the kind 'random', ids are uniform, and
  labels are the ids that follow. With 'ones', the data of Pax's LmCloud
  experiments, both are 1.

  With `spec`, a batch with every entry that it names. The values are 1, or with
  the kind 'random' standard normal floats and uniform integers.

  Attributes:
    kind: 'ones' or 'random'.
    length: L, the number of tokens of a row. Set either this field or `spec`.
    vocab_size: Upper bound of random integers, exclusive.
    spec: Entry -> (shape of a row, dtype). For images and classes:
      {'images': ((224, 224, 3), 'float32'), 'labels': ((), 'int32')}.
    size: Number of records of an epoch.
    shuffle: Whether to shuffle, as for all indexed inputs. Not needed for
      random records.
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
      self.refuse('kind', f'one of {get_args(Kind)}')
    # Specs of the drawn entries. Labels are not drawn but shifted ids.
    spec = self.spec or {}
    if self.length is not None:
      spec = {'ids': ((self.length + 1,), 'int32')}
    self._spec = {
      key: (tuple(shape), np.dtype(dtype))
      for key, (shape, dtype) in spec.items()
    }

  def num_records(self) -> int:
    return self.size

  def data_identity(self) -> dict[str, Any]:
    spec = {k: [list(shape), d.name] for k, (shape, d) in self._spec.items()}
    return {'kind': self.kind, 'vocab_size': self.vocab_size, 'spec': spec}

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    batch = {
      key: np.ones((len(records), *shape), dtype)
      for key, (shape, dtype) in self._spec.items()
    }
    if self.kind == 'random':
      places = zip(epochs.tolist(), records.tolist(), strict=True)
      for row, (epoch, record) in enumerate(places):
        numbers = indexed.record_generator(self.seed(), 0, epoch, record)
        for values in batch.values():
          shape = values.shape[1:]
          # Unlike NumPy, JAX treats bfloat16 as a floating dtype.
          if jax.numpy.issubdtype(values.dtype, np.floating):
            values[row] = numbers.standard_normal(shape, np.float32)
          else:
            values[row] = numbers.integers(self.vocab_size, size=shape)
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
