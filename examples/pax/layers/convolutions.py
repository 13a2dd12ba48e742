"""Convolutions and pooling of images.

Shapes: B images, H rows, W columns, C input channels, D output channels.
"""

import haiku as hk
import jax
import jax.numpy as jnp

from examples.pax import base_layer
from examples.pax.layers import activations
from examples.pax.layers import normalizations

LayerTpl = base_layer.LayerTpl
WeightHParams = base_layer.WeightHParams
template_field = base_layer.template_field


class Conv2D(base_layer.BaseLayer):
  """A convolution of images with `w` [height, width, C, D], and a bias `b` [D].

  It pads by the size of the filter minus 1, half of it (rounded down) before
  and half after the image, which gives ceil(size / stride) outputs.

  The output axis of `w` is 'embed'. If weights are split ('fsdp'), each device
  keeps the filters of some outputs.
  """

  filter_shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # Shape of `w`.
  filter_stride: tuple[int, int] = (1, 1)  # Vertical, horizontal.
  bias: bool = False

  def setup(self) -> None:
    axes = (None, None, None, 'embed')
    weight = WeightHParams(self.filter_shape, tensor_split_dims_mapping=axes)
    self.create_variable('w', weight)
    if self.bias:
      zero = base_layer.WeightInit.Constant(0.0)
      self.create_variable('b', WeightHParams(self.filter_shape[3:], zero))

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, ceil(H / rows), ceil(W / columns), D], in `fprop_dtype`."""
    dtype = self.fprop_dtype
    y_BHWD = jax.lax.conv_general_dilated(
      x_BHWC.astype(dtype),
      self.theta.w.astype(dtype),
      window_strides=tuple(self.filter_stride),
      padding=[((n - 1) // 2, n // 2) for n in self.filter_shape[:2]],
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    if self.bias:
      y_BHWD += self.theta.b.astype(dtype)[None, None, None]
    return self.shard(y_BHWD, ('batch', None, None, None))


class ConvBNAct(base_layer.BaseLayer):
  """A convolution, a batch normalization and an activation.

  By default, the convolution has no bias, because the normalization would
  cancel it.
  """

  conv_tpl: LayerTpl = template_field(Conv2D)
  batch_norm_tpl: LayerTpl = template_field(normalizations.BatchNorm)
  activation_tpl: LayerTpl = template_field(activations.ReLU)

  def setup(self) -> None:
    self.create_child('conv', self.conv_tpl)
    dim = self.conv_tpl.filter_shape[3]
    self.create_child('batch_norm', self.batch_norm_tpl, dim=dim)
    self.create_child('activation', self.activation_tpl)

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, H', W', D]; see `Conv2D`."""
    return self.activation(self.batch_norm(self.conv(x_BHWC)))


class MaxPool2D(base_layer.BaseLayer):
  """Max pooling with TensorFlow's 'SAME' padding."""

  window: tuple[int, int] = (3, 3)  # Rows, columns.
  stride: tuple[int, int] = (2, 2)  # Vertical, horizontal.

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, ceil(H / rows), ceil(W / columns), C]."""
    return hk.max_pool(
      x_BHWC, (1, *self.window, 1), (1, *self.stride, 1), padding='SAME'
    )


class GlobalPooling(base_layer.BaseLayer):
  """Mean over each image. JAX sums narrow dtypes in float32."""

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, C]."""
    return jnp.mean(x_BHWC, axis=(1, 2))
