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
  size: int,
  input_dims: int,
  output_dims: int,
  stride: int = 1,
  is_linear: bool = False,
) -> Any:
  """Returns a copy of a template of `ConvBNAct` with these sizes."""
  sized = template.clone()
  sized.conv_tpl.set(
    filter_shape=(size, size, input_dims, output_dims),
    filter_stride=(stride, stride),
  )
  if is_linear:
    sized.activation_tpl = activations.Identity.HParams()
  return sized


class ResNetBlock(base_layer.BaseLayer):
  """1x1, 3x3 and 1x1 convolutions beside a shortcut.

  The shortcut is a 1x1 convolution where size or channels change.

  Attributes:
    input_dims: channels in.
    output_dims: channels out, a multiple of 4; between the convolutions there
      are a quarter of them.
    kernel_size: rows and columns of the middle convolution.
    stride: of the middle convolution, and of the shortcut.
    conv_tpl: of each convolution, its BatchNorm and its activation.
    zero_init_residual: whether the last BatchNorm's scale starts as 0.
  """

  input_dims: int = 0
  output_dims: int = 0
  kernel_size: int = 3
  stride: int = 1
  conv_tpl: Any = sub_config_field(convolutions.ConvBNAct.HParams)
  zero_init_residual: bool = False

  def setup(self) -> None:
    """Creates the convolutions."""
    p = self.hparams
    if p.output_dims % _BOTTLENECK:
      raise errors.UsageError(
        f'{self.module_name} has output_dims {p.output_dims}; expected a'
        f' multiple of {_BOTTLENECK}.'
      )
    inner = p.output_dims // _BOTTLENECK
    last = _conv(p.conv_tpl, 1, inner, p.output_dims, is_linear=True)
    if p.zero_init_residual:
      last.batch_norm_tpl.gamma_init = WeightInit.Constant(-1.0)
    self.create_children(
      'body',
      [
        _conv(p.conv_tpl, 1, p.input_dims, inner),
        _conv(p.conv_tpl, p.kernel_size, inner, inner, p.stride),
        last,
      ],
    )
    self._is_projected = p.stride != 1 or p.input_dims != p.output_dims
    if self._is_projected:
      self.create_child(
        'shortcut',
        _conv(
          p.conv_tpl, 1, p.input_dims, p.output_dims, p.stride, is_linear=True
        ),
      )
    self.create_child('activation', p.conv_tpl.activation_tpl)

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Computes the block.

    Args:
      x_BHWC: images, of `input_dims` channels.

    Returns:
      [B, ceil(H / stride), ceil(W / stride), output_dims].
    """
    shortcut = self.shortcut(x_BHWC) if self._is_projected else x_BHWC
    for layer in self.body:
      x_BHWC = layer(x_BHWC)
    return self.activation(x_BHWC + shortcut)


class ResNet(base_layer.BaseLayer):
  """Images to features; ResNet-50 unless told otherwise.

  Attributes:
    input_channels: of an image.
    entryflow_conv_channels: of the first convolution.
    entryflow_conv_kernel: its rows and columns.
    entryflow_conv_stride: its stride.
    entryflow_pool: whether a 3x3 pooling of stride 2 follows.
    channels: that each group of blocks puts out.
    blocks: of each group, how many.
    kernels: of each group, rows and columns of the middle convolutions.
    strides: of each group's first block.
    conv_tpl: of each convolution, its BatchNorm and its activation.
    zero_init_residual: whether each block starts as its shortcut.
    pixel_mean: of each channel, is taken off the images first; empty for
      images that are normalised already.
    pixel_std: of each channel, what they are then divided by.
  """

  input_channels: int = 3
  entryflow_conv_channels: int = 64
  entryflow_conv_kernel: int = 7
  entryflow_conv_stride: int = 2
  entryflow_pool: bool = True
  channels: tuple[int, ...] = (256, 512, 1024, 2048)
  blocks: tuple[int, ...] = (3, 4, 6, 3)
  kernels: tuple[int, ...] = (3, 3, 3, 3)
  strides: tuple[int, ...] = (1, 2, 2, 2)
  conv_tpl: Any = dataclasses.field(
    default_factory=lambda: convolutions.ConvBNAct.HParams(
      batch_norm_tpl=normalizations.BatchNorm.HParams(decay=0.9),
      # He et al. (2015), 'Delving deep into rectifiers', their equation 14:
      # gradients keep their size.
      params_init=WeightInit.GaussianSqrtFanOut(1.4141),
    )
  )
  zero_init_residual: bool = False
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
      len(p.pixel_mean) not in (0, p.input_channels)
    ):
      raise ValueError(
        f'{self.module_name} has pixel_mean {tuple(p.pixel_mean)} and pixel_std'
        f' {tuple(p.pixel_std)}; expected {p.input_channels} numbers each, one'
        ' a channel, or none.'
      )
    input_dims, templates = p.entryflow_conv_channels, []
    self.create_child(
      'entryflow_conv',
      _conv(
        p.conv_tpl,
        p.entryflow_conv_kernel,
        p.input_channels,
        input_dims,
        p.entryflow_conv_stride,
      ),
    )
    if p.entryflow_pool:
      self.create_child('entryflow_pool', convolutions.MaxPool2D.HParams())
    for channels, blocks, kernel, group_stride in zip(
      *groups.values(), strict=True
    ):
      for i in range(blocks):
        templates.append(
          ResNetBlock.HParams(
            input_dims=input_dims,
            output_dims=channels,
            kernel_size=kernel,
            stride=group_stride if i == 0 else 1,
            conv_tpl=p.conv_tpl,
            zero_init_residual=p.zero_init_residual,
          )
        )
        input_dims = channels
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
    if p.entryflow_pool:
      x_BHWC = self.entryflow_pool(x_BHWC)
    for block in self.blocks:
      x_BHWC = block(x_BHWC)
    return self.output_pool(x_BHWC)
