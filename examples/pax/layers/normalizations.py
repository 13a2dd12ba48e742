"""Normalisations; all compute in float32.

Shapes: D the last axis, which has a scale and a bias for each entry.
"""

import jax
import jax.numpy as jnp
import numpy as np

from examples import transformer
from examples.pax import base_layer

WeightHParams = base_layer.WeightHParams
WeightInit = base_layer.WeightInit


class BaseNormalization(base_layer.BaseLayer):
  """What all have: `__call__(inputs)` returns the same shape.

  The axis of their variables is 'embed', unless `weight_split_dims_mapping`
  says otherwise. As in Praxis, only those of `LayerNorm` are in the collection
  SKIP_LP_REGULARIZATION.

  Attributes:
    dim: D.
  """

  dim: int = 0

  def _create(
    self,
    name: str,
    init: WeightInit,
    trainable: bool = True,
    skip_lp_regularization: bool = False,
  ) -> None:
    skip = base_layer.WeightHParamsCollection.SKIP_LP_REGULARIZATION
    weight = WeightHParams(
      (self.hparams.dim,),
      init=init,
      collections=(skip,) if skip_lp_regularization else (),
      tensor_split_dims_mapping=('embed',),
    )
    self.create_variable(name, weight, trainable)


class IdentityNorm(BaseNormalization):
  """The inputs themselves."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., D]."""
    return inputs


class LayerNorm(BaseNormalization):
  """Layer normalisation (Ba et al., 2016).

  Its variables are `scale`, which is stored less 1, and `bias`.

  Attributes:
    epsilon: is added to the variance.
    use_scale: whether there is a scale.
    use_bias: whether there is a bias.
  """

  epsilon: float = 1e-6
  use_scale: bool = True
  use_bias: bool = True

  def setup(self) -> None:
    p = self.hparams
    zero = WeightInit.Constant(0.0)
    if p.use_scale:
      self._create('scale', zero, skip_lp_regularization=True)
    if p.use_bias:
      self._create('bias', zero, skip_lp_regularization=True)

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., D], in the dtype of the inputs."""
    p = self.hparams
    return transformer.normalize(
      inputs,
      scale=1 + self.theta.scale if p.use_scale else jnp.ones(p.dim),
      bias=self.theta.bias if p.use_bias else None,
      epsilon=p.epsilon,
      centered=True,
    )


class RmsNorm(BaseNormalization):
  """By the root mean square (Zhang and Sennrich, 2019), with a `scale`.

  Attributes:
    epsilon: is added to the mean square.
    direct_scale: whether `scale` is the factor itself, or less 1.
  """

  epsilon: float = 1e-6
  direct_scale: bool = True

  def setup(self) -> None:
    start = 1.0 if self.hparams.direct_scale else 0.0
    self._create('scale', WeightInit.Constant(start))

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., D], in the dtype of the inputs."""
    p, scale = self.hparams, self.theta.scale
    return transformer.normalize(
      inputs,
      scale=scale if p.direct_scale else 1 + scale,
      epsilon=p.epsilon,
      centered=False,
    )


class BatchNorm(BaseNormalization):
  """Batch normalisation (Ioffe and Szegedy, 2015).

  In training by the statistics of the batch over all axes but the last; that is
  the whole global batch where it is one array over a mesh. Rows that only fill
  the batch up are not known here, and count. In evaluation by moving averages.

  Its variables are `gamma`, the scale less 1, and `beta`; and, not trained,
  `moving_mean` and `moving_variance`. So weight decay draws the scale to 1.

  Attributes:
    decay: what part of the moving averages a batch leaves.
    epsilon: is added to the variance; in Praxis it is always 0.001.
    gamma_init: what `gamma` starts as; -1 in the last one of a residual
      branch makes it start as the identity (Goyal et al., 2017).
  """

  decay: float = 0.999
  epsilon: float = 0.001
  gamma_init: WeightInit = WeightInit.Constant(0.0)

  def setup(self) -> None:
    self._create('beta', WeightInit.Constant(0.0))
    self._create('gamma', self.hparams.gamma_init)
    self._create('moving_mean', WeightInit.Constant(0.0), trainable=False)
    self._create('moving_variance', WeightInit.Constant(1.0), trainable=False)

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., D], in the dtype of the inputs."""
    p, theta = self.hparams, self.theta
    x = inputs.astype(np.promote_types(theta.gamma.dtype, np.float32))

    def value(name: str) -> jax.Array:
      return self.get_var(name).astype(x.dtype)

    if self.do_eval:
      mean, variance = value('moving_mean'), value('moving_variance')
    else:
      # Both sums in one pass over the inputs, which is what this costs.
      axes = tuple(range(x.ndim - 1))
      mean = jnp.mean(x, axis=axes)
      square = jnp.mean(x * x, axis=axes)
      variance = jnp.maximum(square - mean * mean, 0)
      for name, new in ('moving_mean', mean), ('moving_variance', variance):
        new = p.decay * value(name) + (1 - p.decay) * new
        self.update_var(name, new.astype(self.get_var(name).dtype))
    factor = (1 + value('gamma')) * jax.lax.rsqrt(variance + p.epsilon)
    leading = range(x.ndim - 1)
    factor, mean, beta = (
      jnp.expand_dims(v, leading) for v in (factor, mean, value('beta'))
    )
    return ((x - mean) * factor + beta).astype(inputs.dtype)
