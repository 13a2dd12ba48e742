"""Residual networks (He et al., 2015) of bottleneck blocks.

Of the variant called v1.5: the stride is that of the 3x3 convolution and not of
the 1x1 before it. With `zero_init_residual` the scale of a block's last
BatchNorm starts as 0, so that each block starts as its shortcut (Goyal et al.,
2017).

BatchNorm's statistics are those of the whole global batch: a step over a mesh
is one program on global arrays, in which a mean over the batch is one over all
devices.

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

# Inside a block there is this part of its channels.
_BOTTLENECK = 4


def _conv(
  template: Any,
  filter_shape: tuple[int, ...],
  activation_tpl: Any,
  stride: tuple[int, int] = (1, 1),
) -> Any:
  """Returns a copy of a template of `ConvBNAct` with these fields."""
  conv = template.clone().set(activation_tpl=activation_tpl)
  conv.conv_tpl.set(filter_shape=filter_shape, filter_stride=stride)
  return conv


class ResNetBlock(base_layer.BaseLayer):
  """1x1, 3x3 and 1x1 convolutions beside a shortcut.

  The shortcut is a 1x1 convolution where size or channels change.

  Attributes:
    input_dim: channels in.
    output_dim: channels out, a multiple of 4; between the convolutions there
      are a quarter of them.
    conv_params: template of each convolution with its BatchNorm.
    kernel_size: rows and columns of the middle convolution.
    stride: of the middle convolution, and of the shortcut.
    activation_tpl: template of the activations, also of the one after the sum.
    zero_init_residual: whether the last BatchNorm's scale starts as 0.
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
      x_BHWC: images, of `input_dim` channels.

    Returns:
      [B, ceil(H / stride), ceil(W / stride), output_dim].
    """
    shortcut = self.shortcut(x_BHWC) if self._is_projected else x_BHWC
    for layer in self.body:
      x_BHWC = layer(x_BHWC)
    return self.activation(x_BHWC + shortcut)


class ResNet(base_layer.BaseLayer):
  """Images to features; ResNet-50 unless told otherwise.

  Attributes:
    conv_params: template of each convolution with its BatchNorm and, of the
      first, the activation.
    block_params: template of each block; this layer sets its channels, kernel,
      stride and, if it has them, `conv_params`.
    strides: of each group's first block.
    channels: that each group of blocks puts out.
    blocks: of each group, how many.
    kernels: of each group, rows and columns of the middle convolutions.
    entryflow_conv_kernel: rows, columns and, of the images, channels of the
      first convolution.
    entryflow_conv_stride: its strides.
    entryflow_conv_channels: that it puts out; None is the first of `channels`,
      or a quarter of it with a `ResNetBlock`.
    entry_max_pool: whether a 3x3 pooling of stride 2 follows.
    pixel_mean: of each channel, is taken off the images first; empty for
      images that are normalised already.
    pixel_std: of each channel, what they are then divided by.
  """

  conv_params: Any = dataclasses.field(
    default_factory=lambda: convolutions.ConvBNAct.HParams(
      batch_norm_tpl=normalizations.BatchNorm.HParams(decay=0.9),
      # He et al. (2015), 'Delving deep into rectifiers', their equation 14:
      # gradients keep their size.
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
        f'{self.module_name} has {groups}; expected one entry a group in each'
        ' of the four.'
      )
    if len(p.pixel_mean) != len(p.pixel_std) or (
      len(p.pixel_mean) not in (0, p.entryflow_conv_kernel[2])
    ):
      raise ValueError(
        f'{self.module_name} has pixel_mean {tuple(p.pixel_mean)} and pixel_std'
        f' {tuple(p.pixel_std)}; expected {p.entryflow_conv_kernel[2]} numbers'
        ' each, one a channel, or none.'
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
      x_BHWC: images, of floats or of integers, such as uint8 from 0 to 255,
        which are an input's smallest form: with `pixel_mean` they become floats
        here, on the device.

    Returns:
      [B, D], where D is the last of `channels`, in `fprop_dtype`.

    Raises:
      ValueError: they are integers, and there is no `pixel_mean`.
    """
    p = self.hparams
    if p.pixel_mean:
      x_BHWC = (
        x_BHWC.astype(jnp.float32) - np.float32(p.pixel_mean)[None, None, None]
      ) / np.float32(p.pixel_std)[None, None, None]
    elif not jnp.issubdtype(x_BHWC.dtype, jnp.floating):
      raise ValueError(
        f'{self.module_name} got images of {x_BHWC.dtype}. Set pixel_mean and'
        ' pixel_std to normalise them, or give floats.'
      )
    x_BHWC = self.entryflow_conv(x_BHWC.astype(self.fprop_dtype))
    if p.entry_max_pool:
      x_BHWC = self.entryflow_pool(x_BHWC)
    for block in self.blocks:
      x_BHWC = block(x_BHWC)
    return self.output_pool(x_BHWC)
