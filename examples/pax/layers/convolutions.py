"""Convolutions and pooling of images.

Shapes: B images, H rows, W columns, C input channels, D output channels.
"""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from examples.pax import base_layer
from examples.pax.layers import activations
from examples.pax.layers import normalizations
from jaxline import errors

WeightHParams = base_layer.WeightHParams
WeightInit = base_layer.WeightInit
sub_config_field = base_layer.sub_config_field

_PADDINGS = ('SAME', 'VALID')


class Conv2D(base_layer.BaseLayer):
  """A convolution of images with `w` [height, width, C, D], and a bias `b` [D].

  The output axis of `w` is 'embed'. If weights are split ('fsdp'), each device
  keeps the filters of some outputs.

  Attributes:
    filter_shape: Height, width, input channels (C) and output channels (D).
    filter_stride: Vertical and horizontal distance between outputs.
    padding: 'SAME' or 'VALID'. 'SAME' pads by the size of the filter minus 1,
      half of it (rounded down) before and half after the image, which gives
      ceil(size / stride) outputs. 'VALID' does not pad.
    tf_equivalent_padding: Whether 'SAME' pads like TensorFlow: no more than
      these outputs need. This differs if the stride is not 1.
    bias: Whether to add a bias.
  """

  filter_shape: tuple[int, int, int, int] = (0, 0, 0, 0)
  filter_stride: tuple[int, int] = (1, 1)
  padding: str = 'SAME'
  tf_equivalent_padding: bool = False
  bias: bool = False

  def setup(self) -> None:
    """Creates the filters."""
    p = self.hparams
    errors.check_names([p.padding], _PADDINGS, 'padding', self.module_name)
    self.create_variable(
      'w',
      WeightHParams(
        p.filter_shape,
        tensor_split_dims_mapping=(None, None, None, 'embed'),
      ),
    )
    if p.bias:
      self.create_variable(
        'b', WeightHParams(p.filter_shape[3:], WeightInit.Constant(0.0))
      )

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Computes the convolution.

    Args:
      x_BHWC: Images.

    Returns:
      [B, ceil(H / rows), ceil(W / columns), D] with 'SAME', in `fprop_dtype`.
    """
    p, dtype = self.hparams, self.fprop_dtype
    padding: str | list[tuple[int, int]] = p.padding
    if p.padding == 'SAME' and not p.tf_equivalent_padding:
      padding = [((n - 1) // 2, n // 2) for n in p.filter_shape[:2]]
    y_BHWD = jax.lax.conv_general_dilated(
      x_BHWC.astype(dtype),
      self.theta.w.astype(dtype),
      window_strides=tuple(p.filter_stride),
      padding=padding,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    if p.bias:
      y_BHWD += self.theta.b.astype(dtype)[None, None, None]
    return self.shard(y_BHWD, ('batch', None, None, None))


class ConvBNAct(base_layer.BaseLayer):
  """A convolution, a batch normalization and an activation.

  By default, the convolution has no bias, because the normalization would
  cancel it.

  Attributes:
    conv_tpl: Template of the convolution.
    batch_norm_tpl: Template of the normalization. This layer sets `dim`.
    activation_tpl: Template of the activation.
  """

  conv_tpl: Any = sub_config_field(Conv2D.HParams)
  batch_norm_tpl: Any = sub_config_field(normalizations.BatchNorm.HParams)
  activation_tpl: Any = sub_config_field(activations.ReLU.HParams)

  def setup(self) -> None:
    """Creates the three layers."""
    p = self.hparams
    self.create_child('conv', p.conv_tpl)
    dim = p.conv_tpl.filter_shape[3]
    self.create_child('batch_norm', p.batch_norm_tpl, dim=dim)
    self.create_child('activation', p.activation_tpl)

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Runs the three layers in sequence.

    Args:
      x_BHWC: Images.

    Returns:
      [B, H', W', D]; see `Conv2D`.
    """
    return self.activation(self.batch_norm(self.conv(x_BHWC)))


class MaxPool2D(base_layer.BaseLayer):
  """Max pooling with 'SAME' padding.

  Attributes:
    window: Rows and columns of a window.
    stride: Vertical and horizontal distance between windows.
  """

  window: tuple[int, int] = (3, 3)
  stride: tuple[int, int] = (2, 2)

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, ceil(H / rows), ceil(W / columns), C]."""
    p = self.hparams
    return hk.max_pool(
      x_BHWC, (1, *p.window, 1), (1, *p.stride, 1), padding='SAME'
    )


class GlobalPooling(base_layer.BaseLayer):
  """Mean over each image. JAX sums narrow dtypes in float32."""

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, C]."""
    return jnp.mean(x_BHWC, axis=(1, 2))
