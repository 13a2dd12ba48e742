"""Tests of optimizers against float64 NumPy written from their formulas.

Weights belong to one layer, no layer, or a stack of layers. The formulas know
only single layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pax import layers
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


def _tree(rng, shapes=None, scale=1.0):
  return jax.tree.map(
    lambda shape: np.float32(scale * rng.normal(size=shape)),
    shapes or _SHAPES,
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


def _expect(step, weights, grads, num_stacked=_num_stacked):
  """Like `_train`, with `step(name, w, g, n, memory) -> w` by layer, float64.

  `n` is 1 at the first step. `memory` is a dict that persists between steps.
  """
  weights = jax.tree.map(np.float64, weights)
  memory, found = {}, []
  for n, grad in enumerate(grads, 1):

    def one(name, w, g, n=n):
      g = np.float64(g)
      if not num_stacked(name):
        return step(name, w, g, n, memory.setdefault(name, {}))
      layers = [
        step(name, w[i], g[i], n, memory.setdefault((name, i), {}))
        for i in range(len(w))
      ]
      return np.stack(layers)

    weights = optimizers.map_with_names(one, weights, grad)
    found.append(weights)
  return found


def _compare(
  optimizer,
  step,
  num_steps=5,
  *,
  shapes=None,
  num_stacked=_num_stacked,
  rtol=1e-5,
):
  rng = np.random.default_rng(0)
  weights = _tree(rng, shapes)
  # Gradients shrink, so that updates have very different sizes.
  grads = [_tree(rng, shapes, 10.0**-i) for i in range(num_steps)]
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6),
    _train(optimizer.make(num_stacked), weights, grads),
    _expect(step, weights, grads, num_stacked),
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
    weight_decay_exclusion='lm/(norm|layers/ff/b)',
  ).Instantiate()
  caps = []

  def step(name, w, g, n, memory):
    m = memory['m'] = 0.8 * memory.get('m', 0) + 0.2 * g
    v = memory['v'] = 0.95 * memory.get('v', 0) + 0.05 * g**2
    m, v = m / (1 - 0.8**n), v / (1 - 0.95**n)
    update = m / (np.sqrt(v + 1e-4) + 1e-3)
    caps.append(_rms(update) > 0.7)
    update /= max(1, _rms(update) / 0.7)
    if name in ('lm/embed/w', 'lm/layers/ff/w'):
      update = update + 0.3 * w
    return w - 0.1 * _FACTORS[n - 1] * update

  _compare(optimizer, step)
  assert True in caps
  assert False in caps


def test_adam_without_a_cap_is_optax():
  rng = np.random.default_rng(0)
  weights, grads = _tree(rng), [_tree(rng) for _ in range(3)]
  ours = optimizers.Adam.HParams(
    learning_rate=0.1, clip_threshold=0.0, decoupled_weight_decay=0.01
  )
  theirs = optax.adamw(0.1, 0.9, 0.999, 1e-6, weight_decay=0.01)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
    _train(ours.Instantiate().make(), weights, grads),
    _train(theirs, weights, grads),
  )


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
  ).Instantiate()

  def step(name, w, g, n, memory):
    if name.endswith('/w'):
      g = g + 0.1 * w
    m = memory['m'] = 0.9 * memory.get('m', 0) + g
    update = g + 0.9 * m if nesterov else m
    return w - 0.2 * _FACTORS[n - 1] * update

  _compare(optimizer, step)


def test_gradient_descent_with_l2_of_all_but_some():
  optimizer = optimizers.Sgd.HParams(
    learning_rate=0.5,
    l2_regularizer_weight=0.1,
    weight_decay_exclusion=['lm/embed'],
  ).Instantiate()

  def step(name, w, g, n, memory):
    del n, memory
    return w - 0.5 * (g + (name != 'lm/embed/w') * 0.1 * w)

  _compare(optimizer, step, 2)


def test_an_optimizer_of_optax():
  """Its updates are scaled by the learning rate. This module adds decay."""
  optimizer = optimizers.OptaxOptimizer.HParams(
    grad_tx=optax.sgd(0.5), lr_schedule=_SCHEDULE, decoupled_weight_decay=0.1
  ).Instantiate()

  def step(name, w, g, n, memory):
    del name, memory
    return w - _FACTORS[n - 1] * (0.5 * g + 0.1 * w)

  _compare(optimizer, step)


def test_moving_average_of_weights():
  rng = np.random.default_rng(0)
  weights = [rng.normal(size=3) for _ in range(20)]
  expected, ema = weights[0], {'w': jnp.float32(weights[0])}
  update = jax.jit(optimizers.ema_update, static_argnames='decay')
  for step, w in enumerate(weights):
    decay = min(0.6, (1 + step) / (10 + step))
    expected = decay * expected + (1 - decay) * w
    ema = update(ema, {'w': jnp.float32(w)}, jnp.int32(step), decay=0.6)
  assert decay == 0.6
  np.testing.assert_allclose(ema['w'], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ('optimizer', 'fields', 'named'),
  [
    (optimizers.Adam, {'learning_rate': None}, 'Adam.learning_rate'),
    *(
      (optimizers.Adam, {name: -1.0}, name)
      for name in ('clip_gradient_norm_to_value', 'weight_decay')
    ),
    (
      optimizers.Adam,
      {'lr_schedule': optimizers.Sgd.HParams(learning_rate=1.0)},
      'Adam.lr_schedule.* schedules.BaseSchedule',
    ),
    # In each pair, one option would have no effect.
    *(
      (optimizer, {first: 0.1, second: 0.2}, f"'{first}': .*'{second}': ")
      for optimizer, first, second in (
        (
          optimizers.Adam,
          'clip_gradient_norm_to_value',
          'clip_gradient_single_norm_to_value',
        ),
        (optimizers.Adam, 'weight_decay', 'decoupled_weight_decay'),
        (optimizers.Adam, 'l2_regularizer_weight', 'weight_decay'),
        (optimizers.Sgd, 'l2_regularizer_weight', 'decoupled_weight_decay'),
      )
    ),
    (optimizers.Sgd, {'nesterov': True}, 'momentum'),
    (optimizers.Sgd, {'ema_decay': 1.0}, 'ema_decay'),
    (
      optimizers.Sgd,
      {'weight_decay_exclusion': 'a['},
      r'weight_decay_exclusion.*a\[',
    ),
    (optimizers.OptaxOptimizer, {}, 'a grad_tx, such as'),
  ],
)
def test_refuses_what_contradicts_itself(optimizer, fields, named):
  hparams = optimizer.HParams(**{'learning_rate': 1.0} | fields)
  with pytest.raises((ValueError, TypeError), match=named):
    hparams.Instantiate()


@pytest.mark.parametrize(
  ('module', 'name'),
  [
    (optimizers, 'ShardedAdafactor'),
    (schedules, 'Cosine'),
    (layers, 'Ngrammer'),
    (models, 'BertModel'),
    (tasks, 'EarlyStoppingFn'),
  ],
)
def test_a_name_that_pax_has_points_to_the_list(module, name):
  with pytest.raises(AttributeError, match=f'{name}.*from_pax.md.*Missing'):
    getattr(module, name)


def test_the_base_class_leaves_the_fields_of_a_subclass_to_it():
  class Own(optimizers.Sgd):
    weight_decay: float = 0.5

  plain = optimizers.Sgd.HParams(learning_rate=1.0).Instantiate()
  own = Own.HParams(learning_rate=1.0).Instantiate()
  params, grads = {'w': jnp.ones([2])}, {'w': jnp.zeros([2])}
  for optimizer in (plain, own):
    made = optimizer.make()
    updates, _ = made.update(grads, made.init(params), params)
    np.testing.assert_array_equal(updates['w'], 0)
