"""Activations: functions of each number by itself, without variables."""

import jax
import jax.numpy as jnp

from examples.pax import base_layer


class BaseActivation(base_layer.BaseLayer):
  """What all activations are: `__call__(inputs)` returns the same shape."""


class Identity(BaseActivation):
  """The inputs themselves."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return inputs


class ReLU(BaseActivation):
  """max(x, 0)."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return jax.nn.relu(inputs)


class GELU(BaseActivation):
  """x times the normal distribution function of x (Hendrycks and Gimpel, 2016).

  With `approximate`, a tanh takes its place.

  Attributes:
    approximate: whether by tanh.
  """

  approximate: bool = True

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return jax.nn.gelu(inputs, approximate=self.hparams.approximate)


class SiLU(BaseActivation):
  """x sigmoid(x) (Elfwing et al., 2017)."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return jax.nn.silu(inputs)


class Swish(SiLU):
  """`SiLU`, by the name of Ramachandran et al. (2017)."""


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
