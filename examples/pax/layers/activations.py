"""Activations: elementwise functions without variables."""

import jax
import jax.numpy as jnp

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

  Attributes:
    approximate: Whether to approximate the distribution function by a tanh.
  """

  approximate: bool = True

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return jax.nn.gelu(inputs, approximate=self.hparams.approximate)


class SiLU(BaseActivation):
  """x sigmoid(x) (Elfwing et al., 2017)."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return jax.nn.silu(inputs)


class Swish(SiLU):
  """`SiLU`, under the name of Ramachandran et al. (2017)."""


class Tanh(BaseActivation):
  """tanh(x)."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return jnp.tanh(inputs)


class Sigmoid(BaseActivation):
  """1 / (1 + exp(-x))."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(inputs)


class Softplus(BaseActivation):
  """log(1 + exp(x))."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return jax.nn.softplus(inputs)
