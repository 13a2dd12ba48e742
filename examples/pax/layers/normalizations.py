"""Normalization layers. All of them compute in float32.

Shapes: D last axis, with a scale and a bias for each entry.
"""

import jax
import jax.numpy as jnp
import numpy as np

from examples import transformer
from examples.pax import base_layer

WeightInit = base_layer.WeightInit
_SKIP = base_layer.WeightHParamsCollection.SKIP_LP_REGULARIZATION


class BaseNormalization(base_layer.BaseLayer):
  """The base of normalizations. `__call__(inputs)` returns the same shape.

  By default, the axis of the variables is 'embed'; `weight_split_dims_mapping`
  overrides it. As in Praxis, only the variables of `LayerNorm` are in the
  collection SKIP_LP_REGULARIZATION.
  """

  dim: int = 0  # D.

  def _create(
    self, name: str, init: WeightInit, trainable: bool = True
  ) -> None:
    weight = base_layer.WeightHParams(
      (self.dim,),
      init=init,
      collections=(_SKIP,) if isinstance(self, LayerNorm) else (),
      tensor_split_dims_mapping=('embed',),
    )
    self.create_variable(name, weight, trainable)


class IdentityNorm(BaseNormalization):
  """Returns the inputs unchanged."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return inputs


class LayerNorm(BaseNormalization):
  """Layer normalization (Ba et al., 2016).

  The variables are `scale`, which stores the scale minus 1, and `bias`.
  """

  epsilon: float = 1e-6  # Added to the variance.

  def setup(self) -> None:
    self._create('scale', WeightInit.Constant(0.0))
    self._create('bias', WeightInit.Constant(0.0))

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return transformer.normalize(
      inputs,
      scale=1 + self.theta.scale,
      bias=self.theta.bias,
      epsilon=self.epsilon,
      centered=True,
    )


class RmsNorm(BaseNormalization):
  """Root mean square normalization (Zhang and Sennrich, 2019): a `scale`."""

  epsilon: float = 1e-6  # Added to the mean square.

  def setup(self) -> None:
    self._create('scale', WeightInit.Constant(1.0))

  def __call__(self, inputs: jax.Array) -> jax.Array:
    return transformer.normalize(
      inputs, scale=self.theta.scale, epsilon=self.epsilon, centered=False
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
  """

  decay: float = 0.999  # Decay of the moving averages.
  # If it is -1 in the last normalization of a residual branch, the block starts
  # as the identity (Goyal et al., 2017).
  gamma_init: WeightInit = WeightInit.Constant(0.0)

  def setup(self) -> None:
    self._create('beta', WeightInit.Constant(0.0))
    self._create('gamma', self.gamma_init)
    self._create('moving_mean', WeightInit.Constant(0.0), trainable=False)
    self._create('moving_variance', WeightInit.Constant(1.0), trainable=False)

  def __call__(self, inputs: jax.Array) -> jax.Array:
    theta = self.theta
    x = inputs.astype(np.promote_types(theta.gamma.dtype, np.float32))

    def value(name: str) -> jax.Array:
      return self.get_var(name).astype(x.dtype)

    leading = tuple(range(x.ndim - 1))
    if self.do_eval:
      mean, variance = value('moving_mean'), value('moving_variance')
    else:
      # Reading the inputs dominates the cost, so both sums use one pass.
      mean = jnp.mean(x, axis=leading)
      square = jnp.mean(x * x, axis=leading)
      variance = jnp.maximum(square - mean * mean, 0)
      for name, new in ('moving_mean', mean), ('moving_variance', variance):
        new = self.decay * value(name) + (1 - self.decay) * new
        self.update_var(name, new.astype(self.get_var(name).dtype))
    # Praxis's epsilon is always 0.001.
    factor = (1 + value('gamma')) * jax.lax.rsqrt(variance + 0.001)
    factor, mean, beta = (
      jnp.expand_dims(v, leading) for v in (factor, mean, value('beta'))
    )
    return ((x - mean) * factor + beta).astype(inputs.dtype)
