"""Tests of jaxline.metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import metrics


@pytest.mark.parametrize('weight_dims', [0, 1, 2, 3])
def test_weighted_mean_is_that_of_numpy_in_float64(weight_dims):
  rng = np.random.default_rng(0)
  values = rng.normal(size=[4, 5, 6]).astype(np.float32)
  weights = rng.uniform(0, 3, size=values.shape[:weight_dims])
  weights = np.asarray(weights, np.float32)
  if weight_dims:
    weights[0] = 0
  full = weights.reshape(weights.shape + (1,) * (3 - weight_dims))
  full = np.broadcast_to(full, values.shape).astype(np.float64)
  expected = np.average(values.astype(np.float64), weights=full)
  mean = metrics.Mean.of(jnp.asarray(values), jnp.asarray(weights))
  np.testing.assert_allclose(mean.compute(), expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(mean.weight, full.sum(), rtol=1e-5)


NAN, INF = float('nan'), float('inf')
FOUR = [1, 2, 3, 6]


@pytest.mark.parametrize(
  ('values', 'weights', 'total', 'weight'),
  [
    (jnp.array([[1.0, 2.0], [3.0, 6.0]]), None, 12, 4),
    (0.25, None, 0.25, 1),
    (jnp.array([True, False, True, True]), [True] * 4, 3, 4),
    (jnp.array(FOUR), [True] * 4, 12, 4),
    (jnp.array(FOUR, jnp.bfloat16), [True] * 4, 12, 4),
    (np.array(FOUR, np.float32), [1, -1, 0, 2], 11, 2),
    # What has no weight does not count, whatever it is.
    (jnp.array([1.0, NAN, 3.0, INF]), [1, 0, 3, 0], 10, 4),
    (jnp.array([1.0, NAN]), [1, 1], NAN, 2),
    (jnp.ones([3]), [0, 0, 0], 0, 0),
    (jnp.array(FOUR), [1, 0, 1, -2], -8, 0),
  ],
)
def test_a_mean_is_its_sums_in_float32(values, weights, total, weight):
  mean = metrics.Mean.of(values, weights and jnp.array(weights))
  assert mean.total.dtype == mean.weight.dtype == jnp.float32
  np.testing.assert_equal(float(mean.total), total)
  assert float(mean.weight) == weight
  np.testing.assert_equal(float(mean.compute()), total / (weight or INF))


def test_gradient_is_zero_at_weight_zero_though_the_value_be_nan():
  weights = jnp.array([2.0, 0.0, 6.0, 0.0])

  def mean(values):
    return metrics.Mean.of(values, weights).compute()

  values = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])
  grads = jax.jit(jax.grad(mean))(values)
  # Of sum(v w) / sum(w): w / sum(w).
  np.testing.assert_array_equal(grads, [0.25, 0.0, 0.75, 0.0])


@pytest.mark.parametrize('cuts', [(), (1,), (3, 4), (1, 2, 5, 9)])
def test_adding_the_parts_gives_the_whole(cuts):
  # Small integers, so that float32 is exact.
  values = np.arange(10, dtype=np.float32) ** 2
  weights = np.array([0, 1, 2, 0, 1, 1, 4, 1, 0, 2], np.float32)
  parts = [
    {'m': metrics.Mean.of(jnp.asarray(v), jnp.asarray(w))}
    for v, w in zip(
      np.split(values, cuts), np.split(weights, cuts), strict=True
    )
  ]
  sums = parts[0]
  for part in parts[1:]:
    sums = metrics.add(sums, part)
  assert float(sums['m'].total) == (values * weights).sum()
  assert float(sums['m'].weight) == 12.0
  assert metrics.compute(sums)['m'] == np.float32((values * weights).sum() / 12)


@pytest.mark.parametrize(
  ('values', 'weights'),
  [([4], [3]), ([4], [4, 1]), ([4, 3], [3]), ([4, 3], [1]), ([], [1])],
)
def test_weights_that_do_not_fit_are_refused(values, weights):
  with pytest.raises(ValueError, match=r'weights of shape .* leading dim'):
    metrics.Mean.of(jnp.ones(values), jnp.ones(weights))


def test_sets_of_other_names_are_not_added():
  one = {'x': metrics.Mean.of(1.0)}
  both = {**one, 'y': metrics.Mean.of(1.0)}
  for pair in ((one, both), (both, one)):
    with pytest.raises(KeyError, match='y'):
      metrics.add(*pair)
