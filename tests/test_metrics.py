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


def test_without_weights_each_value_weighs_one():
  mean = metrics.Mean.of(jnp.array([[1.0, 2.0], [3.0, 6.0]]))
  assert (float(mean.total), float(mean.weight)) == (12.0, 4.0)
  assert float(mean.compute()) == 3.0
  assert float(metrics.Mean.of(0.25).compute()) == 0.25


@pytest.mark.parametrize(
  ('values', 'expected'),
  [
    (jnp.array([True, False, True, True]), 0.75),
    (jnp.array([1, 2, 3, 6]), 3.0),
    (jnp.array([1, 2, 3, 6], jnp.bfloat16), 3.0),
    (np.array([1, 2, 3, 6], np.float32), 3.0),
  ],
)
def test_any_type_is_averaged_in_float32(values, expected):
  mean = metrics.Mean.of(values, jnp.ones([4], jnp.bool_))
  assert mean.total.dtype == mean.weight.dtype == jnp.float32
  assert float(mean.compute()) == expected


def test_nan_of_weight_zero_does_not_count():
  values = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])
  weights = jnp.array([1.0, 0.0, 3.0, 0.0])
  mean = metrics.Mean.of(values, weights)
  assert float(mean.compute()) == 2.5
  assert np.isnan(metrics.Mean.of(values, jnp.ones([4])).compute())


def test_negative_weights_count():
  mean = metrics.Mean.of(jnp.array([1.0, 5.0]), jnp.array([-1.0, 2.0]))
  assert float(mean.compute()) == 9.0


def test_mean_of_nothing_is_nan():
  assert np.isnan(metrics.Mean.of(jnp.ones([3]), jnp.zeros([3])).compute())


def test_gradient_is_zero_at_weight_zero_though_the_value_be_nan():
  weights = jnp.array([2.0, 0.0, 6.0, 0.0])

  def mean(values):
    return metrics.Mean.of(values, weights).compute()

  values = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])
  grads = jax.jit(jax.grad(mean))(values)
  # Of sum(v w) / sum(w): w / sum(w).
  np.testing.assert_array_equal(grads, [0.25, 0.0, 0.75, 0.0])


def test_padding_rows_do_not_change_the_gradient_of_a_model():
  w = jnp.arange(1.0, 4.0)
  x = jnp.concatenate([jnp.eye(3), jnp.zeros([2, 3])])
  weights = jnp.array([1.0, 1.0, 1.0, 0.0, 0.0])

  def loss(w, x, weights):
    return metrics.Mean.of(jnp.square(x @ w), weights).compute()

  def loss_with_nan(w, x, weights):
    values = jnp.where(weights > 0, jnp.square(x @ w), jnp.nan)
    return metrics.Mean.of(values, weights).compute()

  # d/dw of mean(w^2) is 2 w / 3.
  for fn in (loss, loss_with_nan):
    np.testing.assert_allclose(
      jax.grad(fn)(w, x, weights), 2 * w / 3, rtol=1e-6
    )


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


def test_a_mean_is_a_pytree():
  mean = metrics.Mean.of(jnp.ones([2]))
  doubled = jax.jit(lambda m: jax.tree.map(lambda x: 2 * x, m))(mean)
  assert (float(doubled.total), float(doubled.weight)) == (4.0, 4.0)


@pytest.mark.parametrize(
  ('values', 'weights'),
  [([4], [3]), ([4], [4, 1]), ([4, 3], [3]), ([4, 3], [1]), ([], [1])],
)
def test_weights_that_do_not_fit_are_refused(values, weights):
  with pytest.raises(ValueError, match=r'weights of shape .* leading dim'):
    metrics.Mean.of(jnp.ones(values), jnp.ones(weights))


def test_sets_of_other_names_are_not_added():
  a = {'x': metrics.Mean.of(1.0)}
  with pytest.raises(ValueError, match=r"\['x'\] and \['y'\]"):
    metrics.add(a, {'y': metrics.Mean.of(1.0)})
