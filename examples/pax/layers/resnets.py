"""Residual networks (He et al., 2015) with bottleneck blocks.

This is the variant called v1.5, in which the 3x3 convolution has the stride and
not the 1x1 convolution before it. With `zero_init_residual`, the scale of a
block's last BatchNorm is initially 0, so each block starts as its shortcut
(Goyal et al., 2017).

BatchNorm uses the statistics of the global batch. A step over a mesh is one
program on global arrays, so a mean over the batch is a mean over all devices.

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

WeightInit = base_layer.WeightInit
sub_config_field = base_layer.sub_config_field

# Ratio of a block's output channels to its inner channels.
_BOTTLENECK = 4


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

  Attributes:
    input_dim: Number of input channels.
    output_dim: Number of output channels, a multiple of 4. The middle
      convolution has a quarter of them.
    conv_params: Template of each convolution and its BatchNorm.
    kernel_size: Rows and columns of the middle convolution.
    stride: Stride of the middle convolution and of the shortcut.
    activation_tpl: Template of all activations, including the one after the
      sum.
    zero_init_residual: Whether the scale of the last BatchNorm is initially 0.
  """

  input_dim: int = 0
  output_dim: int = 0
  conv_params: Any = sub_config_field(convolutions.ConvBNAct.HParams)
  kernel_size: int = 3
  stride: int = 1
  activation_tpl: Any = sub_config_field(activations.ReLU.HParams)
  zero_init_residual: bool = False

  def setup(self) -> None:
    """Creates the convolutions."""
    p = self.hparams
    if p.output_dim % _BOTTLENECK:
      raise errors.UsageError(
        f'{self.module_name} has output_dim {p.output_dim}; expected a multiple'
        f' of {_BOTTLENECK}.'
      )
    inner, size = p.output_dim // _BOTTLENECK, p.kernel_size
    stride, linear = (p.stride, p.stride), activations.Identity.HParams()
    conv = functools.partial(_conv, p.conv_params)
    last = conv((1, 1, inner, p.output_dim), linear)
    if p.zero_init_residual:
      last.batch_norm_tpl.gamma_init = WeightInit.Constant(-1.0)
    self.create_children(
      'body',
      [
        conv((1, 1, p.input_dim, inner), p.activation_tpl),
        conv((size, size, inner, inner), p.activation_tpl, stride),
        last,
      ],
    )
    self._is_projected = p.stride != 1 or p.input_dim != p.output_dim
    if self._is_projected:
      shape = (1, 1, p.input_dim, p.output_dim)
      self.create_child('shortcut', conv(shape, linear, stride))
    self.create_child('activation', p.activation_tpl)

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Computes the block.

    Args:
      x_BHWC: Images with `input_dim` channels.

    Returns:
      [B, ceil(H / stride), ceil(W / stride), output_dim].
    """
    shortcut = self.shortcut(x_BHWC) if self._is_projected else x_BHWC
    for layer in self.body:
      x_BHWC = layer(x_BHWC)
    return self.activation(x_BHWC + shortcut)


class ResNet(base_layer.BaseLayer):
  """A residual network from images to features. The default is ResNet-50.

  Attributes:
    conv_params: Template of each convolution and its BatchNorm, and of the
      first convolution's activation.
    block_params: Template of each block. This layer sets its channels, kernel
      and stride, and its `conv_params` if it has this field.
    strides: Stride of the first block of each group.
    channels: Number of output channels of each group.
    blocks: Number of blocks of each group.
    kernels: Rows and columns of the middle convolutions of each group.
    entryflow_conv_kernel: Rows, columns and input channels of the first
      convolution.
    entryflow_conv_stride: Strides of the first convolution.
    entryflow_conv_channels: Output channels of the first convolution. If None,
      the first of `channels`, or a quarter of it with a `ResNetBlock`.
    entry_max_pool: Whether a 3x3 max pooling with stride 2 follows.
    pixel_mean: Mean of each channel, subtracted from the images. Empty if the
      images are already normalized.
    pixel_std: Standard deviation of each channel, which divides the result.
  """

  conv_params: Any = dataclasses.field(
    default_factory=lambda: convolutions.ConvBNAct.HParams(
      batch_norm_tpl=normalizations.BatchNorm.HParams(decay=0.9),
      # This scale preserves the size of gradients: equation 14 of He et al.
      # (2015), 'Delving deep into rectifiers'.
      params_init=WeightInit.GaussianSqrtFanOut(1.4141),
    )
  )
  block_params: Any = sub_config_field(ResNetBlock.HParams)
  strides: tuple[int, ...] = (1, 2, 2, 2)
  channels: tuple[int, ...] = (256, 512, 1024, 2048)
  blocks: tuple[int, ...] = (3, 4, 6, 3)
  kernels: tuple[int, ...] = (3, 3, 3, 3)
  entryflow_conv_kernel: tuple[int, int, int] = (7, 7, 3)
  entryflow_conv_stride: tuple[int, int] = (2, 2)
  entryflow_conv_channels: int | None = None
  entry_max_pool: bool = True
  pixel_mean: tuple[float, ...] = ()
  pixel_std: tuple[float, ...] = ()

  def setup(self) -> None:
    """Creates the first convolution and the blocks."""
    p = self.hparams
    groups = {
      name: tuple(getattr(p, name))
      for name in ('channels', 'blocks', 'kernels', 'strides')
    }
    if len({len(value) for value in groups.values()}) != 1 or not p.channels:
      raise errors.UsageError(
        f'{self.module_name} has {groups}; expected one entry per group in each'
        ' of these four fields.'
      )
    if len(p.pixel_mean) != len(p.pixel_std) or (
      len(p.pixel_mean) not in (0, p.entryflow_conv_kernel[2])
    ):
      raise ValueError(
        f'{self.module_name} has pixel_mean {tuple(p.pixel_mean)} and pixel_std'
        f' {tuple(p.pixel_std)}; expected {p.entryflow_conv_kernel[2]} numbers'
        ' each, one per channel, or none.'
      )
    input_dim, templates = p.entryflow_conv_channels, []
    if input_dim is None:
      has_bottleneck = p.block_params.cls is ResNetBlock
      input_dim = p.channels[0] // (_BOTTLENECK if has_bottleneck else 1)
    self.create_child(
      'entryflow_conv',
      _conv(
        p.conv_params,
        (*p.entryflow_conv_kernel, input_dim),
        p.conv_params.activation_tpl,
        tuple(p.entryflow_conv_stride),
      ),
    )
    if p.entry_max_pool:
      self.create_child('entryflow_pool', convolutions.MaxPool2D.HParams())
    block_tpl = p.block_params.clone()
    if hasattr(block_tpl, 'conv_params'):
      block_tpl.conv_params = p.conv_params
    for channels, blocks, kernel, group_stride in zip(
      *groups.values(), strict=True
    ):
      for i in range(blocks):
        block = block_tpl.clone().set(
          input_dim=input_dim,
          output_dim=channels,
          kernel_size=kernel,
          stride=group_stride if i == 0 else 1,
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
    p = self.hparams
    if p.pixel_mean:
      x_BHWC = (
        x_BHWC.astype(jnp.float32) - np.float32(p.pixel_mean)[None, None, None]
      ) / np.float32(p.pixel_std)[None, None, None]
    elif not jnp.issubdtype(x_BHWC.dtype, jnp.floating):
      raise ValueError(
        f'{self.module_name} got images of {x_BHWC.dtype}. Set pixel_mean and'
        ' pixel_std to normalize them, or give floats.'
      )
    x_BHWC = self.entryflow_conv(x_BHWC.astype(self.fprop_dtype))
    if p.entry_max_pool:
      x_BHWC = self.entryflow_pool(x_BHWC)
    for block in self.blocks:
      x_BHWC = block(x_BHWC)
    return self.output_pool(x_BHWC)
