"""Tests of optimizers against float64 NumPy written from their formulas.

Weights belong to one layer, no layer, or a stack of layers. The formulas know
only single layers.
"""

import jax
import numpy as np
import optax
import pytest

from examples.pax import base_layer
from examples.pax import layers
from examples.pax import learners
from examples.pax import models
from examples.pax import optimizers
from examples.pax import schedules
from examples.pax import tasks

_SHAPES = {
  'lm/embed': {'w': (6, 5)},
  'lm/layers/ff': {'w': (3, 4, 5), 'b': (3, 4)},
  'lm/norm': {'scale': (5,)},
}
_SCHEDULE = schedules.LinearRampupPiecewiseConstant.HParams(
  boundaries=(2, 4), values=(1.0, 0.1)
)
_FACTORS = (0.0, 0.5, 1.0, 1.0, 0.1)  # One for each step.


def _num_stacked(name):
  return name.startswith('lm/layers/')


def _tree(rng, scale=1.0):
  return jax.tree.map(
    lambda shape: np.float32(scale * rng.normal(size=shape)),
    _SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def _train(tx, weights, grads):
  """Returns the weights after each step."""

  @jax.jit
  def step(weights, state, grad):
    # jaxline's step does this too, because Optax relies on promotion.
    with jax.numpy_dtype_promotion('standard'):
      updates, state = tx.update(grad, state, weights)
    return optax.apply_updates(weights, updates), state

  state, found = tx.init(weights), []
  for grad in grads:
    weights, state = step(weights, state, grad)
    found.append(weights)
  return found


def _expect(step, weights, grads):
  """Like `_train`, with `step(name, w, g, n, memory) -> w` by layer, float64.

  `n` is 1 at the first step. `memory` is a dict that persists between steps.
  """
  weights = jax.tree.map(np.float64, weights)
  memory, found = {}, []
  for n, grad in enumerate(grads, 1):

    def one(name, w, g, n=n):
      kept = lambda *key: memory.setdefault((name, *key), {})
      if not _num_stacked(name):
        return step(name, w, np.float64(g), n, kept())
      of_layers = zip(w, np.float64(g), strict=True)
      return np.stack(
        [step(name, *x, n, kept(i)) for i, x in enumerate(of_layers)]
      )

    weights = optimizers.map_with_names(one, weights, grad)
    found.append(weights)
  return found


def _compare(optimizer, step):
  rng = np.random.default_rng(0)
  weights = _tree(rng)
  # Gradients shrink, so that updates have very different sizes.
  grads = [_tree(rng, 10.0**-i) for i in range(5)]
  tx = optimizer.Instantiate().make(_num_stacked)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
    _train(tx, weights, grads),
    _expect(step, weights, grads),
  )


def _rms(x):
  return np.sqrt(np.mean(x**2))


def test_adam_with_all_its_terms():
  optimizer = optimizers.Adam.HParams(
    learning_rate=0.1,
    lr_schedule=_SCHEDULE,
    beta1=0.8,
    beta2=0.95,
    epsilon=1e-3,
    epsilon_root=1e-4,
    clip_threshold=0.7,
    weight_decay=0.3,
  )
  caps = []

  def step(name, w, g, n, memory):
    m = memory['m'] = 0.8 * memory.get('m', 0) + 0.2 * g
    v = memory['v'] = 0.95 * memory.get('v', 0) + 0.05 * g**2
    m, v = m / (1 - 0.8**n), v / (1 - 0.95**n)
    update = m / (np.sqrt(v + 1e-4) + 1e-3)
    caps.append(_rms(update) > 0.7)
    update = update / max(1, _rms(update) / 0.7) + 0.3 * w
    return w - 0.1 * _FACTORS[n - 1] * update

  _compare(optimizer, step)
  assert {*caps} == {True, False}


@pytest.mark.parametrize('nesterov', [False, True])
def test_gradient_descent_with_momentum_and_l2(nesterov):
  """As for ResNet, L2 skips vectors, including those in a stack."""
  optimizer = optimizers.Sgd.HParams(
    learning_rate=0.2,
    lr_schedule=_SCHEDULE,
    momentum=0.9,
    nesterov=nesterov,
    l2_regularizer_weight=0.1,
    skip_lp_1d_vectors=True,
  )

  def step(name, w, g, n, memory):
    if name.endswith('/w'):
      g = g + 0.1 * w
    m = memory['m'] = 0.9 * memory.get('m', 0) + g
    update = g + 0.9 * m if nesterov else m
    return w - 0.2 * _FACTORS[n - 1] * update

  _compare(optimizer, step)


def test_an_optimizer_of_optax():
  """Its updates are scaled by the learning rate. This module adds L2."""
  optimizer = optimizers.OptaxOptimizer.HParams(
    grad_tx=optax.sgd(0.5), lr_schedule=_SCHEDULE, l2_regularizer_weight=0.1
  )

  def step(name, w, g, n, memory):
    del name, memory
    return w - _FACTORS[n - 1] * 0.5 * (g + 0.1 * w)

  _compare(optimizer, step)


@pytest.mark.parametrize(
  ('optimizer', 'fields', 'named'),
  [
    (optimizers.Adam, {'learning_rate': None}, 'Adam.learning_rate'),
    (optimizers.Adam, {'weight_decay': -1.0}, 'weight_decay'),
    (
      optimizers.Adam,
      {'lr_schedule': optimizers.Sgd.HParams(learning_rate=1.0)},
      'Adam.lr_schedule.* schedules.BaseSchedule',
    ),
    # One of the two would have no effect.
    (
      optimizers.Adam,
      {'l2_regularizer_weight': 0.1, 'weight_decay': 0.2},
      "'l2_regularizer_weight': 0.1, 'weight_decay': 0.2",
    ),
    (optimizers.Sgd, {'nesterov': True}, 'momentum'),
    (optimizers.Sgd, {'ema_decay': 1.0}, 'ema_decay'),
    (optimizers.OptaxOptimizer, {}, 'a grad_tx, such as'),
  ],
)
def test_refuses_what_contradicts_itself(optimizer, fields, named):
  hparams = optimizer.HParams(**{'learning_rate': 1.0} | fields)
  with pytest.raises((ValueError, TypeError), match=named):
    hparams.Instantiate()


def test_a_name_that_pax_has_points_to_the_list():
  for module, name in (
    (learners, 'MultiOptimizerLearner'),
    (optimizers, 'ShardedAdafactor'),
    (optimizers.Adam.HParams(), 'decoupled_weight_decay'),
    (schedules, 'Cosine'),
    (layers, 'Ngrammer'),
    (layers.Conv2D.HParams(), 'dilations'),
    (base_layer.WeightInit, 'XavierWithFixupParams'),
    (models, 'BertModel'),
    (tasks, 'EarlyStoppingFn'),
  ):
    with pytest.raises(AttributeError, match=f'{name}.*from_pax.md.*Missing'):
      getattr(module, name)
