"""Layers that draw random numbers."""

from typing import Any

import jax
import jax.numpy as jnp

from examples import transformer
from examples.pax import base_layer


class Dropout(base_layer.BaseLayer):
  """Drops entries in training, and makes up for it by the size of the others.

  Srivastava et al. (2014).

  Attributes:
    keep_prob: the part of the entries that stays, above 0; 1 drops nothing.
  """

  keep_prob: float = 1.0

  def setup(self) -> None:
    if not 0 < self.hparams.keep_prob <= 1:
      raise ValueError(
        f'{self.module_name}.keep_prob is {self.hparams.keep_prob}; expected'
        ' more than 0 and at most 1.'
      )

  def __call__(
    self, inputs: jax.Array, rows_B: jax.Array | None = None
  ) -> jax.Array:
    """Returns [B, ...].

    Args:
      inputs: [B, ...].
      rows_B: each row's number in the batch, which what is dropped depends on;
        None counts from 0. A microbatch of a pipeline has other rows.
    """
    keep = self.hparams.keep_prob
    if self.do_eval or keep == 1:
      return inputs
    if rows_B is None:
      rows_B = jnp.arange(inputs.shape[0])
    return transformer.drop(inputs, self.next_prng_key(), 1 - keep, rows_B, 0)


def dropout(rate: float) -> dict[str, Any]:
  """Returns the arguments of `create_child` for a rate.

  Args:
    rate: the part of the entries that is dropped, below 1.
  """
  return {'template': Dropout.HParams(), 'keep_prob': 1 - rate}
