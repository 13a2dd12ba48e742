"""Tests of normalizations against NumPy.

Shapes: B batch, L length, D width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax import base_layer
from examples.pax.layers import normalizations
from jaxline.parallel import partitioning

KEY = jax.random.key(0, impl='rbg')
_RNG = np.random.default_rng(0)
# The inputs are off center, and so small that the epsilons below matter.
X = np.float32(0.3 + 0.2 * _RNG.normal(size=(4, 3, 5)))
SCALE, BIAS, MEAN = np.float32(_RNG.normal(size=(3, 5)))
VARIANCE = np.float32(_RNG.uniform(0.5, 2, size=5))


def _norm(x, scale, bias, epsilon, mean):
  x = x.astype(np.float64)
  if mean is not None:
    x = x - mean
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * (
    scale
  ) + (bias)


_CENTRE = X.mean(axis=-1, keepdims=True, dtype=np.float64)


@pytest.mark.parametrize(
  ('hparams', 'names', 'expected'),
  [
    (
      normalizations.LayerNorm.HParams(epsilon=0.1),
      {'scale': 0, 'bias': 0},
      _norm(X, 1 + SCALE, BIAS, 0.1, _CENTRE),
    ),
    (
      normalizations.LayerNorm.HParams(use_scale=False),
      {'bias': 0},
      _norm(X, 1, BIAS, 1e-6, _CENTRE),
    ),
    (
      normalizations.LayerNorm.HParams(use_bias=False),
      {'scale': 0},
      _norm(X, 1 + SCALE, 0, 1e-6, _CENTRE),
    ),
    (
      normalizations.RmsNorm.HParams(epsilon=0.1),
      {'scale': 1},
      _norm(X, SCALE, 0, 0.1, None),
    ),
    (
      normalizations.RmsNorm.HParams(direct_scale=False),
      {'scale': 0},
      _norm(X, 1 + SCALE, 0, 1e-6, None),
    ),
    (normalizations.IdentityNorm.HParams(), {}, X),
  ],
)
def test_normalisation_of_a_vector(hparams, names, expected):
  layer = hparams.set(dim=5, name='n').Instantiate()
  assert isinstance(layer, normalizations.BaseNormalization)
  params = layer.init(KEY)['params'].get('n', {})
  assert {name: list(value) for name, value in params.items()} == {
    name: [value] * 5 for name, value in names.items()
  }
  trained = {'scale': SCALE, 'bias': BIAS}
  variables = {'params': {'n': {name: trained[name] for name in names}}}
  out = layer.apply(variables, jnp.asarray(X))
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
  # Inputs in low precision are normalized in float32.
  low = X.astype(jnp.bfloat16)
  out = layer.apply(variables, jnp.asarray(low))
  assert out.dtype == jnp.bfloat16
  exact = np.asarray(layer.apply(variables, jnp.asarray(np.float32(low))))
  np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16))


def _batch_norm(**kwargs):
  p = normalizations.BatchNorm.HParams(dim=5, name='n', **kwargs)
  return p.Instantiate()


_VARIABLES = {
  'params': {'n': {'gamma': SCALE - 1, 'beta': BIAS}},
  'non_trainable': {'n': {'moving_mean': MEAN, 'moving_variance': VARIANCE}},
}


def test_batch_norm_in_training():
  layer = _batch_norm(decay=0.8, epsilon=0.01)
  run = jax.jit(functools.partial(layer.apply, mutable=True))
  out, collected = run(_VARIABLES, X)
  moving = collected.non_trainable['n']
  x = X.astype(np.float64)
  mean, variance = x.mean(axis=(0, 1)), x.var(axis=(0, 1))
  expected = (x - mean) / np.sqrt(variance + 0.01) * SCALE + BIAS
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(
    moving['moving_mean'], 0.8 * MEAN + 0.2 * mean, rtol=1e-5
  )
  np.testing.assert_allclose(
    moving['moving_variance'], 0.8 * VARIANCE + 0.2 * variance, rtol=1e-5
  )


def test_batch_norm_in_evaluation():
  layer = _batch_norm()
  out, collected = layer.apply(
    _VARIABLES, jnp.asarray(X), mutable=True, do_eval=True
  )
  expected = (X - MEAN.astype(np.float64)) / np.sqrt(VARIANCE + 1e-3)
  np.testing.assert_allclose(out, expected * SCALE + BIAS, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(
    collected.non_trainable['n']['moving_mean'], MEAN
  )


def test_batch_norms_variables():
  layer = _batch_norm(gamma_init=base_layer.WeightInit.Constant(-1.0))
  variables = layer.init(KEY)
  values = {**variables['params']['n'], **variables['non_trainable']['n']}
  assert {name: list(value) for name, value in values.items()} == {
    'gamma': [-1] * 5,
    'beta': [0] * 5,
    'moving_mean': [0] * 5,
    'moving_variance': [1] * 5,
  }
  assert _batch_norm().init(KEY)['params']['n']['gamma'][0] == 0
  for weight in layer.abstract_init()['params']['n'].values():
    assert weight.axes == ('embed',)


def test_batch_norm_of_low_precision_has_exact_statistics():
  layer = _batch_norm(decay=0.0)
  low = np.full((64, 16, 5), 1, dtype=jnp.bfloat16)
  low[0] = 3  # Sums in bfloat16 would stop at 256.
  run = jax.jit(functools.partial(layer.apply, mutable=True))
  out, collected = run(_VARIABLES, low)
  assert out.dtype == jnp.bfloat16
  moving = collected.non_trainable['n']
  np.testing.assert_allclose(moving['moving_mean'], 1 + 2 / 64, rtol=1e-6)
  np.testing.assert_allclose(
    moving['moving_variance'], 4 / 64 - (2 / 64) ** 2, rtol=1e-5
  )
  # Rounding never makes a variance negative.
  same = np.full((3, 5), 1e4 / 3, np.float32)
  out, collected = run(_VARIABLES, same)
  assert np.isfinite(out).all()
  assert (
    np.asarray(collected.non_trainable['n']['moving_variance']) >= 0
  ).all()


def test_batch_norm_over_two_devices_is_of_the_whole_batch():
  layer = _batch_norm(decay=0.9)
  partitioner = partitioning.Partitioner.make({'data': 2}, 'ddp')
  run = jax.jit(lambda x: layer.apply(_VARIABLES, x, mutable=True))
  # Rows differ between the devices.
  x = X + np.float32([0, 0, 1, 2])[:, None, None]
  split = jax.device_put(x, partitioner.batch_sharding)
  assert len(split.sharding.device_set) == 2
  (one, stats), (two, stats_2) = run(x), run(split)
  np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    stats.non_trainable,
    stats_2.non_trainable,
  )
  mean = x.mean(axis=(0, 1), dtype=np.float64)
  np.testing.assert_allclose(
    stats_2.non_trainable['n']['moving_mean'],
    0.9 * MEAN + 0.1 * mean,
    rtol=1e-5,
  )
