"""Layers that draw random numbers."""

from typing import Any

import jax
import jax.numpy as jnp

from examples import transformer
from examples.pax import base_layer


class Dropout(base_layer.BaseLayer):
  """Drops entries in training, and scales up the others to compensate.

  See Srivastava et al. (2014).

  Attributes:
    keep_prob: Probability to keep an entry, above 0. If 1, all are kept.
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
      rows_B: Index of each row in the whole batch, which seeds its dropout. If
        None, they count from 0, which is wrong for microbatches of a pipeline.
    """
    keep = self.hparams.keep_prob
    if self.do_eval or keep == 1:
      return inputs
    if rows_B is None:
      rows_B = jnp.arange(inputs.shape[0])
    return transformer.drop(inputs, self.next_prng_key(), 1 - keep, rows_B, 0)


def dropout(rate: float) -> dict[str, Any]:
  """Returns arguments of `create_child` that make a `Dropout`.

  Args:
    rate: Probability to drop an entry, below 1.
  """
  return {'template': Dropout.HParams(), 'keep_prob': 1 - rate}
