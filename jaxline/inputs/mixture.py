"""Mixes inputs row by row, in exact proportions."""

from collections.abc import Mapping
import dataclasses
import fractions
import functools
import math
import sys
from typing import Any

import jax
import numpy as np

from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import indexed


@dataclasses.dataclass(kw_only=True, eq=False)
class MixtureInput(indexed.IndexedInput):
  """A mixture of inputs whose records have numbers, in exact proportions.

  After any number n of rows, each of k children has given n * weight of them,
  at most one more and fewer than k less. Children repeat, since a mixture has
  no epoch. Their rows must have the same entries, dtypes and shapes. Their
  hosts, batch sizes and workers are not used.

  Attributes:
    inputs: the children by name. The mixture has the first one's host, unless
      it has one of its own.
    weights: a positive number for each child; 1 and 3 are a quarter and three
      quarters. Decimals are taken as they are written: 0.1 is a tenth.
  """

  inputs: Mapping[str, base.BaseInput]
  weights: Mapping[str, float]
  shuffle: bool | None = False

  def __post_init__(self) -> None:
    # The schedule does not depend on the order of the dict.
    self.inputs = dict(sorted(self.inputs.items()))
    self._children: list[Any] = list(self.inputs.values())
    if self.infeed_host_index is None and self.num_infeed_hosts is None:
      self.infeed_host_index = self._children[0].infeed_host_index
      self.num_infeed_hosts = self._children[0].num_infeed_hosts
    super().__post_init__()
    if self.shuffle:
      self.refuse('shuffle', 'False: its inputs are shuffled')
    if self.input_random_seed is not None:
      self.refuse('input_random_seed', 'None: its inputs have seeds')
    if not self.repeat:
      self.refuse(
        'repeat',
        'True: a mixture has no epoch. Evaluate on each of its inputs, or on'
        ' eval_loop_num_batches batches',
      )
    for name, child in self.inputs.items():
      if not (
        isinstance(child, indexed.IndexedInput)
        and child.repeat
        and child.is_training == self.is_training
        # Else its seed would be another at each start.
        and child.saves_position == self.saves_position
      ):
        raise errors.UsageError(
          f'The input {name} of {self.name}, a {type(child).__name__}, is no'
          f' IndexedInput with repeat=True, is_training={self.is_training} and'
          f' input_checkpointing_enabled={self.input_checkpointing_enabled}.'
          ' Mix streams inside tf.data, SeqIO or grain.IterDataset.mix.'
        )
    if set(self.weights) != set(self.inputs):
      self.refuse('weights', f'a number for each of {sorted(self.inputs)}')
    # Integers, so that nothing is rounded after 1e15 rows.
    exact = [fractions.Fraction(str(self.weights[n])) for n in self.inputs]
    if min(exact) <= 0:
      self.refuse('weights', 'positive numbers')
    scale = math.lcm(*(x.denominator for x in exact))
    shares = [int(x * scale) for x in exact]
    self._shares = [x // math.gcd(*shares) for x in shares]

  def num_records(self) -> int:
    """Returns the most there can be: a mixture has one endless epoch."""
    return sys.maxsize

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    del epochs
    chosen = [self._choose(k) for k in records.tolist()]
    of, at = np.array(chosen, np.int64).reshape(-1, 2).T
    parts = [
      dict(self._children[i].read_at(at[of == i]))
      for i in np.unique(of).tolist()
    ]
    # The rows of each child stand together; `back` restores the order.
    back = np.argsort(np.argsort(of, kind='stable'), kind='stable')

    def join(none: np.ndarray, *rows: np.ndarray) -> np.ndarray:
      rows = none, *rows  # Refuses other entries, shapes and dtypes.
      return np.concatenate(rows, dtype=none.dtype, casting='no')[back]

    return jax.tree.map(join, self._no_rows, *parts)

  def _choose(self, k: int) -> tuple[int, int]:
    """Returns the child whose row k is, and the position of the row in it."""
    left = sum(self._shares)
    now, then = k, k + 1
    for i, share in enumerate(self._shares):
      rest_now = now * (left - share) // left
      rest_then = then * (left - share) // left
      if now - rest_now != then - rest_then:
        return i, now - rest_now
      left, now, then = left - share, rest_now, rest_then
    raise AssertionError(k)

  @functools.cached_property
  def _no_rows(self) -> dict[str, Any]:
    row = self._children[0].read_at(np.zeros(1, int))
    return jax.tree.map(lambda x: np.asarray(x)[:0], dict(row))

  def describe_record(self, record: int, epoch: int) -> str:
    i, position = self._choose(record)
    return f'{list(self.inputs)[i]}: {self._children[i].describe_at(position)}'

  def identity(self) -> dict[str, Any]:
    children = {
      f'{name}.{key}': value
      for name, child in self.inputs.items()
      for key, value in child.identity().items()
    }
    shares = dict(zip(self.inputs, self._shares, strict=True))
    return {'weights': shares, **children}

  def close(self) -> None:
    super().close()
    for child in self.inputs.values():
      child.close()

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    return self._children[0].ids_to_strings(ids, lengths, key)
