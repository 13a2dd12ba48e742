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
  """A mixture of `IndexedInput`s, in exact proportions.

  Of the first n rows, more than n * w - k and at most n * w + 1 come from a
  child of normalized weight w, if there are k children. Children must repeat,
  since a mixture has no epochs. Their rows must have the same entries, dtypes
  and shapes. The mixture ignores their hosts, batch sizes and workers.

  Attributes:
    inputs: The children by name. Unless you set the mixture's host, it is the
      host of the first child.
    weights: A positive number per child: 1 and 3 mean 1/4 and 3/4. Decimals
      are exact: 0.1 means 1/10.
  """

  inputs: Mapping[str, base.BaseInput]
  weights: Mapping[str, float]
  shuffle: bool | None = False

  def __post_init__(self) -> None:
    # Sort, so that the schedule does not depend on the order of the dict.
    self.inputs = dict(sorted(self.inputs.items()))
    self._children: list[Any] = list(self.inputs.values())
    if self.infeed_host_index is None and self.num_infeed_hosts is None:
      self.infeed_host_index = self._children[0].infeed_host_index
      self.num_infeed_hosts = self._children[0].num_infeed_hosts
    super().__post_init__()
    if self.shuffle:
      self.refuse('shuffle', 'False; shuffle its inputs instead')
    if self.input_random_seed is not None:
      self.refuse('input_random_seed', 'None; set the seeds of its inputs')
    if not self.repeat:
      self.refuse(
        'repeat',
        'True, since a mixture has no epoch. Evaluate on each of its inputs, or'
        ' on eval_loop_num_batches batches',
      )
    for name, child in self.inputs.items():
      if not (
        isinstance(child, indexed.IndexedInput)
        and child.repeat
        and child.is_training == self.is_training
        # A child that saves no position would draw a new seed at each start.
        and child.saves_position == self.saves_position
      ):
        raise errors.UsageError(
          f'The input {name} of {self.name}, a {type(child).__name__}, is not'
          f' an IndexedInput with repeat=True, is_training={self.is_training},'
          f' input_checkpointing_enabled={self.input_checkpointing_enabled}.'
          ' Mix streams with tf.data, SeqIO or grain.IterDataset.mix.'
        )
    if set(self.weights) != set(self.inputs):
      self.refuse('weights', f'a number for each of {sorted(self.inputs)}')
    # Use integers: floats would round after 1e15 rows.
    exact = [fractions.Fraction(str(self.weights[n])) for n in self.inputs]
    if min(exact) <= 0:
      self.refuse('weights', 'positive numbers')
    scale = math.lcm(*(x.denominator for x in exact))
    shares = [int(x * scale) for x in exact]
    self._shares = [x // math.gcd(*shares) for x in shares]

  def num_records(self) -> int:
    """Returns the largest number, since a mixture has one endless epoch."""
    return sys.maxsize

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    del epochs
    chosen = [self._choose(k) for k in records.tolist()]
    of, at = np.array(chosen, np.int64).reshape(-1, 2).T
    parts = [
      dict(self._children[i].read_at(at[of == i]))
      for i in np.unique(of).tolist()
    ]
    # `parts` are grouped by child; `back` restores the order of the rows.
    back = np.argsort(np.argsort(of, kind='stable'), kind='stable')

    def join(none: np.ndarray, *rows: np.ndarray) -> np.ndarray:
      rows = none, *rows  # This checks entries, shapes and dtypes.
      return np.concatenate(rows, dtype=none.dtype, casting='no')[back]

    return jax.tree.map(join, self._no_rows, *parts)

  def _choose(self, k: int) -> tuple[int, int]:
    """Returns the child that gives row k, and the row's position in it."""
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
