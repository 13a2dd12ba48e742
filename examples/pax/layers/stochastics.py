"""Layers that draw random numbers."""

from typing import Any

import jax
import jax.numpy as jnp

from examples import transformer
from examples.pax import base_layer
from jaxline.base import keys


class Dropout(base_layer.BaseLayer):
  """Drops entries in training, and scales up the others to compensate.

  See Srivastava et al. (2014). `keep_prob` is the probability to keep an entry.
  """

  keep_prob: float = 1.0
  _CHECKS = {'keep_prob': keys.number(above=0, max=1)}

  def __call__(
    self, inputs: jax.Array, rows_B: jax.Array | None = None
  ) -> jax.Array:
    """Returns [B, ...].

    Args:
      inputs: [B, ...].
      rows_B: Index of each row in the whole batch, which seeds its dropout. If
        None, they count from 0, which is wrong for microbatches of a pipeline.
    """
    keep = self.keep_prob
    if self.do_eval or keep == 1:
      return inputs
    if rows_B is None:
      rows_B = jnp.arange(inputs.shape[0])
    return transformer.drop(inputs, self.next_prng_key(), 1 - keep, rows_B, 0)


def dropout(rate: float) -> dict[str, Any]:
  """Returns arguments of `create_child` for a `Dropout` of a rate below 1."""
  return {'template': Dropout.HParams(), 'keep_prob': 1 - rate}
