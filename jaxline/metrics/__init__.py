"""Averages that stay right over uneven batches and shards.

What becomes of the numbers of a run: `writers`, `periodic`, `console`.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['total', 'weight'],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Mean:
  """A weighted mean, as its two sums: to add two of them loses nothing.

  Attributes:
    total: sum of value * weight, a scalar; float32 from `of`.
    weight: sum of weights, likewise.
  """

  total: jax.Array
  weight: jax.Array

  @classmethod
  def of(cls, values: jax.Array, weights: jax.Array | None = None) -> 'Mean':
    """Returns the mean of an array.

    Args:
      values: any shape; a number too.
      weights: the same shape, or fewer trailing dimensions, which repeat; a
        value of weight 0 does not count, and gets the gradient 0, though it be
        NaN. (What it was computed from has the gradient 0 * NaN = NaN where
        its derivative is not finite either.) None weighs all 1.

    Raises:
      ValueError: the shapes do not fit.
    """
    values = jnp.asarray(values, jnp.float32)
    weights = jnp.asarray(1.0 if weights is None else weights, jnp.float32)
    missing = values.ndim - weights.ndim
    if missing < 0 or values.shape[: weights.ndim] != weights.shape:
      raise ValueError(
        f'weights of shape {weights.shape} do not fit values of shape'
        f' {values.shape}; expected its shape or its leading dimensions.'
      )
    weights = weights.reshape(weights.shape + (1,) * missing)
    weights = jnp.broadcast_to(weights, values.shape)
    # Not values * weights: what has no weight may be NaN.
    weighted = jnp.where(weights != 0, values, 0.0) * weights
    return cls(weighted.sum(), weights.sum())

  def __add__(self, other: 'Mean') -> 'Mean':
    return Mean(self.total + other.total, self.weight + other.weight)

  def compute(self) -> jax.Array:
    """Returns the mean; NaN of nothing."""
    return self.total / self.weight


Metrics = Mapping[str, Mean]


def add(a: Metrics, b: Metrics) -> dict[str, Mean]:
  """Adds two sets of metrics of the same names."""
  if set(a) != set(b):
    raise ValueError(
      f'Metrics must have the same names: {sorted(a)} and {sorted(b)}.'
    )
  return {name: a[name] + b[name] for name in a}


def compute(metrics: Metrics) -> dict[str, Any]:
  """Returns name -> mean."""
  for name, metric in metrics.items():
    if not isinstance(metric, Mean):
      raise TypeError(
        f'The metric {name!r} is a {type(metric).__name__}, expected a'
        ' metrics.Mean: Mean.of(values, weights) makes one.'
      )
  return {name: metric.compute() for name, metric in metrics.items()}
