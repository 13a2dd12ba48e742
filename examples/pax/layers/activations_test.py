"""Tests of activations against SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from examples.pax.layers import activations

X = np.linspace(-6, 6, 50, dtype=np.float32).reshape(2, 5, 5)


@pytest.mark.parametrize(
  ('hparams', 'formula'),
  [
    (activations.Identity.HParams(), lambda x: x),
    (activations.ReLU.HParams(), lambda x: np.maximum(x, 0)),
    (
      activations.GELU.HParams(),
      lambda x: (
        x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
      ),
    ),
    (
      activations.GELU.HParams(approximate=False),
      lambda x: x * special.ndtr(x),
    ),
    (activations.SiLU.HParams(), lambda x: x * special.expit(x)),
    (activations.Swish.HParams(), lambda x: x * special.expit(x)),
    (activations.Tanh.HParams(), np.tanh),
    (activations.Sigmoid.HParams(), special.expit),
    (activations.Softplus.HParams(), lambda x: np.log1p(np.exp(x))),
  ],
)
def test_values(hparams, formula):
  layer = hparams.Instantiate()
  assert isinstance(layer, activations.BaseActivation)
  assert layer.num_params() == 0
  variables = {'params': {}}
  out = jax.jit(layer.apply)(variables, X)
  np.testing.assert_allclose(
    out, formula(X.astype(np.float64)), rtol=1e-5, atol=1e-6
  )
  low = jax.eval_shape(layer.apply, variables, X.astype(jnp.bfloat16))
  assert low.dtype == jnp.bfloat16
