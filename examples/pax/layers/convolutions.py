"""Convolutions, and pooling of images.

Shapes: B images, H rows, W columns, C and D channels in and out.
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
  """A convolution of images: `w` [height, width, C, D], and `b` [D] if wanted.

  The name of the variables' axis of outputs is 'embed': where weights are split
  ('fsdp'), each device keeps some of the outputs' filters.

  Attributes:
    filter_shape: height, width, channels in (C), channels out (D).
    filter_stride: rows and columns from one output to the next.
    padding: 'SAME' pads by the size of the filter less 1, half of it before
      (rounded down) and half behind; 'VALID' does not pad. With 'SAME' there
      is an output for each stride begun.
    tf_equivalent_padding: whether 'SAME' pads as TensorFlow does: only as
      much as those outputs need, which differs where the stride is not 1.
    bias: whether there is one.
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
    """Convolves.

    Args:
      x_BHWC: images.

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
  """A convolution, a normalisation and an activation.

  The convolution has no bias: the normalisation would take it off again.

  Attributes:
    conv_tpl: of the convolution.
    batch_norm_tpl: of the normalisation; `dim` is filled in.
    activation_tpl: of the activation.
  """

  conv_tpl: Any = sub_config_field(Conv2D.HParams)
  batch_norm_tpl: Any = sub_config_field(normalizations.BatchNorm.HParams)
  activation_tpl: Any = sub_config_field(activations.ReLU.HParams)

  def setup(self) -> None:
    """Creates the three."""
    p = self.hparams
    self.create_child('conv', p.conv_tpl)
    dim = p.conv_tpl.filter_shape[3]
    self.create_child('batch_norm', p.batch_norm_tpl, dim=dim)
    self.create_child('activation', p.activation_tpl)

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Runs the three, one after the other.

    Args:
      x_BHWC: images.

    Returns:
      [B, H', W', D]; see `Conv2D`.
    """
    return self.activation(self.batch_norm(self.conv(x_BHWC)))


class MaxPool2D(base_layer.BaseLayer):
  """The largest of each window, with 'SAME' padding.

  Attributes:
    window: rows and columns of a window.
    stride: rows and columns from one to the next.
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
  """The mean over an image; JAX sums narrow types in float32."""

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, C]."""
    return jnp.mean(x_BHWC, axis=(1, 2))
