"""Activations: elementwise functions without variables."""

import jax

from examples.pax import base_layer


class BaseActivation(base_layer.BaseLayer):
  """The base of activations. `__call__(inputs)` returns the same shape."""


class Identity(BaseActivation):
  """Returns the inputs unchanged."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return inputs


class ReLU(BaseActivation):
  """max(x, 0)."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return jax.nn.relu(inputs)


class GELU(BaseActivation):
  """x times the normal distribution function of x (Hendrycks and Gimpel, 2016).

  `approximate` replaces the distribution function by a tanh.
  """

  approximate: bool = True

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return jax.nn.gelu(inputs, approximate=self.approximate)


class SiLU(BaseActivation):
  """x sigmoid(x) (Elfwing et al., 2017)."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return jax.nn.silu(inputs)
