"""Linear layers.

Shapes: D input, F output.
"""

from typing import Any

import jax
import jax.numpy as jnp

from examples import transformer
from examples.pax import base_layer
from examples.pax import hparams
from examples.pax.layers import activations

BaseHParams = hparams.BaseHParams
ReLU = activations.ReLU
WeightHParams = base_layer.WeightHParams
sub_config_field = base_layer.sub_config_field


class Linear(base_layer.BaseLayer):
  """A product with a matrix `w`, [D, F].

  By default, its axes are 'embed' and 'mlp'; `weight_split_dims_mapping`
  overrides them. `activation_split_dims_mapping` accepts 'out'.

  Attributes:
    input_dims: D.
    output_dims: F.
  """

  input_dims: int = 0
  output_dims: int = 0

  def setup(self) -> None:
    p = self.hparams
    self.create_variable(
      'w',
      WeightHParams(
        (p.input_dims, p.output_dims),
        tensor_split_dims_mapping=('embed', 'mlp'),
      ),
    )

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., F] for [..., D], in `fprop_dtype`."""
    x = inputs.astype(self.fprop_dtype)
    return self.shard(transformer.dot('...D,DF->...F', x, self.theta.w), None)


class Bias(base_layer.BaseLayer):
  """Adds a vector `b`, [D].

  By default, its axis is 'mlp'; `weight_split_dims_mapping` overrides it.

  Attributes:
    dims: D.
  """

  dims: int = 0

  def setup(self) -> None:
    self.create_variable(
      'b',
      WeightHParams(
        (self.hparams.dims,),
        init=base_layer.WeightInit.Constant(0.0),
        tensor_split_dims_mapping=('mlp',),
      ),
    )

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., D] for [..., D], in `fprop_dtype`."""
    x = inputs.astype(self.fprop_dtype)
    b_D = self.theta.b.astype(x.dtype)
    return x + jnp.expand_dims(b_D, range(x.ndim - 1))


class FeedForward(base_layer.BaseLayer):
  """A linear layer, a bias, and an activation.

  `activation_split_dims_mapping` accepts 'out'.

  Attributes:
    input_dims: D.
    output_dims: F.
    has_bias: Whether to add a bias.
    linear_tpl: Template of the linear layer.
    bias_tpl: Template of the bias. By default, its axis is the last axis of the
      linear layer's weight.
    activation_tpl: Template of the activation.
  """

  input_dims: int = 0
  output_dims: int = 0
  has_bias: bool = True
  linear_tpl: BaseHParams = sub_config_field(Linear.HParams)
  bias_tpl: BaseHParams = sub_config_field(Bias.HParams)
  activation_tpl: activations.BaseActivation.HParams = sub_config_field(
    ReLU.HParams
  )

  def setup(self) -> None:
    p = self.hparams
    self.create_child(
      'linear',
      p.linear_tpl,
      input_dims=p.input_dims,
      output_dims=p.output_dims,
    )
    if p.has_bias:
      bias: dict[str, Any] = {'dims': p.output_dims}
      product = p.linear_tpl.weight_split_dims_mapping
      own = p.bias_tpl.weight_split_dims_mapping
      if 'w' in product and 'b' not in own:
        last = None if product['w'] is None else tuple(product['w'])[-1:]
        bias['weight_split_dims_mapping'] = {**own, 'b': last}
      self.create_child('bias', p.bias_tpl, **bias)
    self.create_child('activation', p.activation_tpl)

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., F] for [..., D], in `fprop_dtype`."""
    x = self.linear(inputs)
    if self.hparams.has_bias:
      x = self.bias(x)
    return self.shard(self.activation(x), None)
