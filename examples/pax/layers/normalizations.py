"""Normalization layers. All of them compute in float32.

Shapes: D last axis, with a scale and a bias for each entry.
"""

import jax
import jax.numpy as jnp
import numpy as np

from examples import transformer
from examples.pax import base_layer

WeightHParams = base_layer.WeightHParams
WeightInit = base_layer.WeightInit


class BaseNormalization(base_layer.BaseLayer):
  """The base of normalizations. `__call__(inputs)` returns the same shape.

  By default, the axis of the variables is 'embed'; `weight_split_dims_mapping`
  overrides it. As in Praxis, only the variables of `LayerNorm` are in the
  collection SKIP_LP_REGULARIZATION.

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
  """Returns the inputs unchanged."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., D]."""
    return inputs


class LayerNorm(BaseNormalization):
  """Layer normalization (Ba et al., 2016).

  The variables are `scale`, which stores the scale minus 1, and `bias`.

  Attributes:
    epsilon: Small constant, added to the variance.
    use_scale: Whether there is a scale.
    use_bias: Whether there is a bias.
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
  """Root mean square normalization (Zhang and Sennrich, 2019), with a `scale`.

  Attributes:
    epsilon: Small constant, added to the mean square.
    direct_scale: Whether the variable is the scale itself. If False, it is the
      scale minus 1.
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
  """Batch normalization (Ioffe and Szegedy, 2015).

  Training uses the statistics of the batch over all axes but the last. If the
  batch is one array over a mesh, these are the statistics of the global batch.
  They include padding rows, which this layer cannot tell from others.
  Evaluation uses moving averages.

  The trained variables are `gamma`, the scale minus 1, and `beta`. The
  non-trainable ones are `moving_mean` and `moving_variance`. Weight decay
  therefore draws the scale towards 1.

  Attributes:
    decay: Decay of the moving averages.
    epsilon: Small constant, added to the variance. Praxis's is always 0.001.
    gamma_init: Initializer of `gamma`. With -1 in the last normalization of a
      residual branch, the block starts as the identity (Goyal et al., 2017).
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
      # Reading the inputs dominates the cost, so both sums use one pass.
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
