"""Linear layers.

Shapes: D input, F output.
"""

import jax
import jax.numpy as jnp

from examples import transformer
from examples.pax import base_layer
from examples.pax.layers import activations

LayerTpl = base_layer.LayerTpl
WeightHParams = base_layer.WeightHParams
template_field = base_layer.template_field


class Linear(base_layer.BaseLayer):
  """A product with a matrix `w`, [D, F].

  By default, its axes are 'embed' and 'mlp'; `weight_split_dims_mapping`
  overrides them. `activation_split_dims_mapping` accepts 'out'.
  """

  input_dims: int = 0  # D.
  output_dims: int = 0  # F.

  def setup(self) -> None:
    shape = (self.input_dims, self.output_dims)
    weight = WeightHParams(shape, tensor_split_dims_mapping=('embed', 'mlp'))
    self.create_variable('w', weight)

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., F] for [..., D], in `fprop_dtype`."""
    x = inputs.astype(self.fprop_dtype)
    return self.shard(transformer.dot('...D,DF->...F', x, self.theta.w), None)


class Bias(base_layer.BaseLayer):
  """Adds a vector `b`, [D]. By default, its axis is 'mlp'."""

  dims: int = 0  # D.

  def setup(self) -> None:
    zero = base_layer.WeightInit.Constant(0.0)
    weight = WeightHParams(
      (self.dims,), zero, tensor_split_dims_mapping=('mlp',)
    )
    self.create_variable('b', weight)

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., D] for [..., D], in `fprop_dtype`."""
    x = inputs.astype(self.fprop_dtype)
    b_D = self.theta.b.astype(x.dtype)
    return x + jnp.expand_dims(b_D, range(x.ndim - 1))


class FeedForward(base_layer.BaseLayer):
  """A linear layer, a bias, and an activation.

  `activation_split_dims_mapping` accepts 'out'.
  """

  input_dims: int = 0  # D.
  output_dims: int = 0  # F.
  has_bias: bool = True
  linear_tpl: LayerTpl = template_field(Linear)
  bias_tpl: LayerTpl = template_field(Bias)
  activation_tpl: LayerTpl = template_field(activations.ReLU)

  def setup(self) -> None:
    sizes = {'input_dims': self.input_dims, 'output_dims': self.output_dims}
    self.create_child('linear', self.linear_tpl, **sizes)
    if self.has_bias:
      self.create_child('bias', self.bias_tpl, dims=self.output_dims)
    self.create_child('activation', self.activation_tpl)

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., F] for [..., D], in `fprop_dtype`."""
    x = self.linear(inputs)
    if self.has_bias:
      x = self.bias(x)
    return self.shard(self.activation(x), None)
