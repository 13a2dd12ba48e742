"""Residual networks (He et al., 2015) with bottleneck blocks.

This is the variant called v1.5, in which the 3x3 convolution has the stride and
not the 1x1 convolution before it.

Shapes: B images, H rows, W columns, C channels, D features.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.pax import base_layer
from examples.pax.layers import activations
from examples.pax.layers import convolutions
from examples.pax.layers import normalizations
from jaxline import errors

LayerTpl = base_layer.LayerTpl
WeightInit = base_layer.WeightInit
template_field = base_layer.template_field

# Ratio of a block's output channels to its inner channels.
_BOTTLENECK = 4
_GROUPS = ('channels', 'blocks', 'kernels', 'strides')


def _conv(
  template: Any,
  filter_shape: tuple[int, ...],
  activation_tpl: Any,
  stride: tuple[int, int] = (1, 1),
) -> Any:
  """Returns a copy of a `ConvBNAct` template with these fields."""
  conv = template.clone().set(activation_tpl=activation_tpl)
  conv.conv_tpl.set(filter_shape=filter_shape, filter_stride=stride)
  return conv


class ResNetBlock(base_layer.BaseLayer):
  """1x1, 3x3 and 1x1 convolutions with a shortcut around them.

  The shortcut is a 1x1 convolution if the block changes the size or the number
  of channels.
  """

  input_dim: int = 0  # Input channels.
  output_dim: int = 0  # A multiple of 4. Inner convolutions have a quarter.
  conv_params: LayerTpl = template_field(convolutions.ConvBNAct)
  kernel_size: int = 3  # Size of the middle convolution.
  stride: int = 1  # Stride of the middle convolution and of the shortcut.
  # All activations, including the one after the sum.
  activation_tpl: LayerTpl = template_field(activations.ReLU)
  # Whether the scale of the last BatchNorm is initially 0, so the block starts
  # as its shortcut (Goyal et al., 2017).
  zero_init_residual: bool = False

  _RULES = {
    'an output_dim that is a multiple of 4': (
      lambda p: p.output_dim % _BOTTLENECK == 0
    )
  }

  def setup(self) -> None:
    inner, size = self.output_dim // _BOTTLENECK, self.kernel_size
    stride = (self.stride, self.stride)
    linear = activations.Identity.HParams()
    conv = functools.partial(_conv, self.conv_params)
    last = conv((1, 1, inner, self.output_dim), linear)
    if self.zero_init_residual:
      last.batch_norm_tpl.gamma_init = WeightInit.Constant(-1.0)
    body = [
      conv((1, 1, self.input_dim, inner), self.activation_tpl),
      conv((size, size, inner, inner), self.activation_tpl, stride),
      last,
    ]
    self.create_children('body', body)
    self._is_projected = self.stride != 1 or self.input_dim != self.output_dim
    if self._is_projected:
      shape = (1, 1, self.input_dim, self.output_dim)
      self.create_child('shortcut', conv(shape, linear, stride))
    self.create_child('activation', self.activation_tpl)

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, ceil(H / stride), ceil(W / stride), output_dim]."""
    shortcut = self.shortcut(x_BHWC) if self._is_projected else x_BHWC
    for layer in self.body:
      x_BHWC = layer(x_BHWC)
    return self.activation(x_BHWC + shortcut)


class ResNet(base_layer.BaseLayer):
  """A residual network from images to features. The default is ResNet-50."""

  # Each convolution and its BatchNorm, and the first convolution's activation.
  conv_params: LayerTpl = dataclasses.field(
    default_factory=lambda: convolutions.ConvBNAct.HParams(
      batch_norm_tpl=normalizations.BatchNorm.HParams(decay=0.9),
      # This scale preserves the size of gradients: equation 14 of He et al.
      # (2015), 'Delving deep into rectifiers'.
      params_init=WeightInit.GaussianSqrtFanOut(1.4141),
    )
  )
  # A `ResNetBlock`. This layer sets its sizes and its `conv_params`.
  block_params: LayerTpl = template_field(ResNetBlock)
  # These have an entry for each group of blocks:
  strides: tuple[int, ...] = (1, 2, 2, 2)  # Stride of the first block.
  channels: tuple[int, ...] = (256, 512, 1024, 2048)  # Output channels.
  blocks: tuple[int, ...] = (3, 4, 6, 3)  # Number of blocks.
  kernels: tuple[int, ...] = (3, 3, 3, 3)  # Size of the middle convolutions.
  # The first convolution: rows, columns and input channels; strides; output
  # channels, or None for a quarter of the first of `channels`.
  entryflow_conv_kernel: tuple[int, int, int] = (7, 7, 3)
  entryflow_conv_stride: tuple[int, int] = (2, 2)
  entryflow_conv_channels: int | None = None
  entry_max_pool: bool = True  # Whether a 3x3 max pooling, stride 2, follows.
  # Mean and standard deviation of each channel, to normalize the images. Empty
  # if they are already normalized.
  pixel_mean: tuple[float, ...] = ()
  pixel_std: tuple[float, ...] = ()

  _RULES = {
    f'as many entries in each of {_GROUPS}, one per group of blocks': (
      lambda p: (
        len({len(getattr(p, name)) for name in _GROUPS}) == 1
        and len(p.channels) > 0
      )
    ),
    'pixel_mean and pixel_std with a number per channel, or without': (
      lambda p: (
        len(p.pixel_mean) == len(p.pixel_std) in (0, p.entryflow_conv_kernel[2])
      )
    ),
  }

  def setup(self) -> None:
    p = self.hparams
    input_dim = p.entryflow_conv_channels or p.channels[0] // _BOTTLENECK
    entry = _conv(
      p.conv_params,
      (*p.entryflow_conv_kernel, input_dim),
      p.conv_params.activation_tpl,
      tuple(p.entryflow_conv_stride),
    )
    self.create_child('entryflow_conv', entry)
    if p.entry_max_pool:
      self.create_child('entryflow_pool', convolutions.MaxPool2D.HParams())
    templates = []
    for *sizes, stride in zip(*(getattr(p, n) for n in _GROUPS), strict=True):
      channels, blocks, kernel = sizes
      for i in range(blocks):
        block = p.block_params.clone().set(
          input_dim=input_dim,
          output_dim=channels,
          conv_params=p.conv_params,
          kernel_size=kernel,
          stride=stride if i == 0 else 1,
        )
        templates.append(block)
        input_dim = channels
    self.create_children('blocks', templates)
    self.create_child('output_pool', convolutions.GlobalPooling.HParams())

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Computes features of images.

    Args:
      x_BHWC: Images, floats or integers. With `pixel_mean`, the images may be
        uint8 from 0 to 255, the smallest form to send to a device, which then
        converts them to floats.

    Returns:
      [B, D], where D is the last of `channels`, in `fprop_dtype`.

    Raises:
      ValueError: The images are integers, and `pixel_mean` is empty.
    """
    if self.pixel_mean:
      mean, std = map(np.float32, (self.pixel_mean, self.pixel_std))
      x_BHWC = x_BHWC.astype(jnp.float32) - mean[None, None, None]
      x_BHWC /= std[None, None, None]
    elif not jnp.issubdtype(x_BHWC.dtype, jnp.floating):
      raise errors.UsageError(
        f'{self.module_name} got images of {x_BHWC.dtype}. Set pixel_mean and'
        ' pixel_std to normalize them, or give floats.'
      )
    x_BHWC = self.entryflow_conv(x_BHWC.astype(self.fprop_dtype))
    if self.entry_max_pool:
      x_BHWC = self.entryflow_pool(x_BHWC)
    for layer in self.blocks:
      x_BHWC = layer(x_BHWC)
    return self.output_pool(x_BHWC)
