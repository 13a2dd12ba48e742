"""Tests of dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax import base_layer
from examples.pax.layers import stochastics

NOTHING = {'params': {}}
KEY = jax.random.key(3)
X = jnp.ones((6, 1000))


def test_nothing_is_dropped_without_need():
  layer = stochastics.Dropout.HParams().Instantiate()
  assert layer.apply(NOTHING, X) is X
  layer = stochastics.Dropout.HParams(keep_prob=0.5).Instantiate()
  assert layer.num_params() == 0
  assert layer.apply(NOTHING, X, do_eval=True) is X


def test_what_is_dropped():
  class Twice(base_layer.BaseLayer):
    def setup(self):
      self.create_child('d', stochastics.Dropout.HParams(keep_prob=0.8))

    def __call__(self, x, rows_B=None):
      return self.d(x, rows_B), self.d(x, rows_B)

  layer = Twice.HParams().Instantiate()
  run = jax.jit(lambda x, rows: layer.apply(NOTHING, x, rows, rng=KEY))
  first, second = (np.asarray(out) for out in run(X, np.arange(6)))
  np.testing.assert_allclose(np.unique(first), [0, 1.25])
  # For 6000 entries, the deviation of the mean is 0.0052.
  assert (first > 0).mean() == pytest.approx(0.8, abs=0.02)
  # Calls and rows are independent.
  for a, b in (first, second), (first[:1], first[1:]):
    assert ((a > 0) == (b > 0)).mean() == pytest.approx(0.68, abs=0.03)
  # A row's entries depend only on its index, not on the other rows.
  rows = np.array([4, 1, 0, 5, 3, 2])
  np.testing.assert_array_equal(run(X, rows)[0], first[rows])
  # By default, the indices count from 0.
  counted = jax.jit(lambda x: layer.apply(NOTHING, x, rng=KEY))(X)
  np.testing.assert_array_equal(counted[0], first)


@pytest.mark.parametrize('keep_prob', [0, -0.1, 1.1])
def test_impossible_parts(keep_prob):
  layer = stochastics.Dropout.HParams(keep_prob=keep_prob).Instantiate()
  with pytest.raises(
    ValueError, match=r'keep_prob is .*; expected more than 0'
  ):
    layer.apply(NOTHING, X)
