"""A residual network (He et al. 2015) with BatchNorm across devices, in Haiku.

The same class makes the small network for the digits and a full ResNet-50. The
residual blocks are Haiku's (`hk.nets.ResNet.BlockGroup`). Haiku's whole network
has four groups and a stem that shrinks images by a factor of four, which does
not suit small images. In this class, both are options.

Shapes: B images, H rows, W columns, C channels, K classes.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from jaxline.base import keys


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
  """The size of a network.

  Attributes:
    num_classes: K, the number of classes.
    blocks_per_group: number of residual blocks in each group. The blocks of a
      group have the same width and the same resolution.
    channels_per_group: output channels of each group. The inner convolutions of
      a bottleneck block have a quarter of them.
    strides: stride of each group's first block.
    bottleneck: whether blocks consist of 1x1, 3x3 and 1x1 convolutions. Their
      last BatchNorm starts at zero, so that each block starts as the identity
      (Goyal et al. 2017). Otherwise blocks have two 3x3 convolutions.
    stem_channels: output channels of the first convolution.
    small_images: whether the stem is one 3x3 convolution, which keeps the
      resolution. Otherwise it is ImageNet's: a 7x7 convolution and a pooling,
      each of stride 2.
    batch_norm_decay: fraction of the running statistics that a step keeps.
  """

  num_classes: int
  blocks_per_group: Sequence[int]
  channels_per_group: Sequence[int]
  strides: Sequence[int]
  bottleneck: bool
  stem_channels: int
  small_images: bool
  batch_norm_decay: float

  def __post_init__(self) -> None:
    groups = {
      name: tuple(getattr(self, name))
      for name in ('blocks_per_group', 'channels_per_group', 'strides')
    }
    if len({len(value) for value in groups.values()}) != 1:
      raise ValueError(
        f'Each group needs blocks, channels and a stride; got {groups}. Give'
        ' the three tuples the same length.'
      )
    keys.check_attributes(
      self,
      num_classes=keys.integer(min=1),
      stem_channels=keys.integer(min=1),
      batch_norm_decay=keys.number(min=0, below=1),
    )


RESNET_50 = ResNetConfig(
  num_classes=1000,
  blocks_per_group=(3, 4, 6, 3),
  channels_per_group=(256, 512, 1024, 2048),
  strides=(1, 2, 2, 2),
  bottleneck=True,
  stem_channels=64,
  small_images=False,
  batch_norm_decay=0.9,
)


class ResNet(hk.Module):
  """Maps images to the logits of classes."""

  def __init__(
    self,
    config: ResNetConfig,
    *,
    cross_replica_axis: str | None,
    name: str | None = None,
  ):
    """Builds the layers.

    Args:
      config: the size.
      cross_replica_axis: name of the pmap axis over which BatchNorm averages
        its statistics; None if the network runs outside of a pmap.
      name: the Haiku module's name.
    """
    super().__init__(name=name)
    self._small_images = config.small_images
    batch_norm: dict[str, Any] = {
      'create_scale': True,
      'create_offset': True,
      'decay_rate': config.batch_norm_decay,
      'cross_replica_axis': cross_replica_axis,
    }
    self._stem = hk.Conv2D(
      config.stem_channels,
      kernel_shape=3 if config.small_images else 7,
      stride=1 if config.small_images else 2,
      with_bias=False,  # The BatchNorm that follows has an offset.
      name='stem_conv',
    )
    self._stem_norm = hk.BatchNorm(**batch_norm, name='stem_batchnorm')
    self._groups = []
    channels_in = config.stem_channels
    for i, (blocks, channels, stride) in enumerate(
      zip(
        config.blocks_per_group,
        config.channels_per_group,
        config.strides,
        strict=True,
      )
    ):
      self._groups.append(
        hk.nets.ResNet.BlockGroup(
          channels=channels,
          num_blocks=blocks,
          stride=stride,
          bn_config=batch_norm,
          resnet_v2=False,
          bottleneck=config.bottleneck,
          use_projection=stride != 1 or channels != channels_in,
          name=f'group_{i}',
        )
      )
      channels_in = channels
    # The logits are zero at first, so the loss starts at log K.
    self._logits = hk.Linear(
      config.num_classes, w_init=jnp.zeros, name='logits'
    )

  def __call__(self, x_BHWC: jax.Array, *, is_training: bool) -> jax.Array:
    """Computes the logits.

    Args:
      x_BHWC: normalized images, floats.
      is_training: whether BatchNorm uses the batch's statistics and updates the
        running ones with them. Otherwise it uses the running statistics.

    Returns:
      Logits [B, K].
    """
    x_BHWC = self._stem(x_BHWC)
    x_BHWC = jax.nn.relu(self._stem_norm(x_BHWC, is_training))
    if not self._small_images:
      x_BHWC = hk.max_pool(x_BHWC, (1, 3, 3, 1), (1, 2, 2, 1), padding='SAME')
    for group in self._groups:
      x_BHWC = group(x_BHWC, is_training, test_local_stats=False)
    return self._logits(jnp.mean(x_BHWC, axis=(1, 2)))


def create(
  config: ResNetConfig, *, cross_replica_axis: str | None
) -> hk.TransformedWithState:
  """Returns the network as a pair of pure functions.

  Args:
    config: the size.
    cross_replica_axis: see `ResNet`. If it is not None, both functions run only
      inside a pmap with that axis.

  Returns:
    `init(rng, x_BHWC, is_training=)` -> (params, state) and
    `apply(params, state, rng, x_BHWC, is_training=)` -> (logits [B, K], state),
    where `state` holds BatchNorm's running statistics.
  """

  def forward(x_BHWC: jax.Array, *, is_training: bool) -> jax.Array:
    # Haiku's moving averages mix ints and floats, which fails under strict
    # promotion.
    with jax.numpy_dtype_promotion('standard'):
      net = ResNet(config, cross_replica_axis=cross_replica_axis)
      return net(x_BHWC, is_training=is_training)

  return hk.transform_with_state(forward)


def count_parameters(
  config: ResNetConfig, image_shape: tuple[int, int, int]
) -> tuple[int, int]:
  """Counts the parameters and statistics of a network, without creating it.

  Args:
    config: the size.
    image_shape: (H, W, C) of one image.

  Returns:
    The number of parameters, and of BatchNorm statistics, which are a mean and
    a variance per channel. Haiku also has a copy of each without bias
    correction, and a step counter. They are not counted, because they add no
    information and other libraries do not have them.
  """
  net = create(config, cross_replica_axis=None)
  params, state = jax.eval_shape(
    lambda rng, x_BHWC: net.init(rng, x_BHWC, is_training=True),
    jax.random.key(0),
    jax.ShapeDtypeStruct((1, *image_shape), jnp.float32),
  )
  parameters = sum(x.size for x in jax.tree.leaves(params))
  statistics = sum(
    x.size
    for _, name, x in hk.data_structures.traverse(state)
    if name == 'average'
  )
  return parameters, statistics
