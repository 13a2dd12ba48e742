"""Tests of jaxline.metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import metrics

NAN, INF = float('nan'), float('inf')
FOUR = [1, 2, 3, 6]


def test_a_mean_is_its_sums_in_float32():
  made = jax.jit(lambda *args: (mean := metrics.Mean.of(*args), mean.compute()))
  for values, weights, total, weight in (
    (jnp.array([[1.0, 2.0], [3.0, 6.0]]), None, 12, 4),
    (0.25, None, 0.25, 1),
    (jnp.array([True, False, True, True]), [True] * 4, 3, 4),
    (jnp.array(FOUR, jnp.bfloat16), [True] * 4, 12, 4),
    (np.array(FOUR, np.float32), [1, -1, 0, 2], 11, 2),
    # Weights of the leading dimensions, or of all.
    (jnp.array(FOUR), 2.0, 24, 8),
    (jnp.array([[[1, 2], [3, 6]]] * 2), [0, 0.5], 6, 2),
    (jnp.array([[[1, 2], [3, 6]]] * 2), [[0, 1], [2, 0]], 15, 6),
    # What has no weight does not count, whatever it is.
    (jnp.array([1.0, NAN, 3.0, INF]), [1, 0, 3, 0], 10, 4),
    (jnp.array([1.0, NAN]), [1, 1], NAN, 2),
    (jnp.ones([3]), [0, 0, 0], 0, 0),
    (jnp.array(FOUR), [1, 0, 1, -2], -8, 0),
  ):
    mean, computed = made(values, weights and jnp.array(weights))
    assert mean.total.dtype == mean.weight.dtype == jnp.float32
    found = [float(x) for x in (mean.total, mean.weight, computed)]
    np.testing.assert_equal(found, [total, weight, total / (weight or INF)])


def test_gradient_is_zero_at_weight_zero_though_the_value_be_nan():
  weights = jnp.array([2.0, 0.0, 6.0, 0.0])

  def mean(values):
    return metrics.Mean.of(values, weights).compute()

  values = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])
  grads = jax.jit(jax.grad(mean))(values)
  # Of sum(v w) / sum(w): w / sum(w).
  np.testing.assert_array_equal(grads, [0.25, 0.0, 0.75, 0.0])


def test_weights_that_do_not_fit_are_refused():
  shapes = ([4], [3]), ([4], [4, 1]), ([4, 3], [3]), ([4, 3], [1]), ([], [1])
  for values, weights in shapes:
    with pytest.raises(ValueError, match=r'weights of shape .* leading dim'):
      metrics.Mean.of(jnp.ones(values), jnp.ones(weights))


def test_a_scalar_counts_as_much_as_the_weights_of_its_batch():
  full, short = (
    metrics.complete({'x': jnp.float32(x)}, jnp.float32(weights))
    for x, weights in ((2, [1, 1, 1]), (6, [1, 0, 0]))
  )
  both = metrics.add(full, short)
  assert float(both['x'].compute()) == (2 * 3 + 6 * 1) / 4
  more = {**full, 'y': full['x']}
  for pair in ((full, more), (more, full)):  # Of other names.
    with pytest.raises(KeyError, match='y'):
      metrics.add(*pair)
