"""Tests of a learner's clipping, skipping and choice of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pax import learners
from examples.pax import optimizers
from examples.pax import schedules

# Norms: 3 in the stack, 4, 12; of all of them, 13.
_GRADS = {
  'lm/layers/ff': {'w': np.float32([[[2.0, 0.0]], [[1.0, 2.0]]])},
  'lm/norm': {'scale': np.float32([0.0, 4.0])},
  'lm/softmax': {'w': np.float32([[12.0]])},
}
_WEIGHTS = jax.tree.map(np.ones_like, _GRADS)


def _sgd(learning_rate=1.0, limit=0.0, **kwargs):
  return optimizers.Sgd.HParams(
    learning_rate=learning_rate, clip_gradient_norm_to_value=limit, **kwargs
  )


def _adam(**kwargs):
  """An optimizer with every kind of state: moments and a count."""
  kwargs = {'learning_rate': 0.1, **kwargs}
  return optimizers.Adam.HParams(weight_decay=0.1, **kwargs)


def _learner(optimizer=None, **kwargs):
  return learners.Learner.HParams(
    name='mine', optimizer=optimizer or _sgd(), **kwargs
  )


def _made(learner):
  """Returns the initial state and an update function."""
  tx = learner.make()

  @jax.jit
  def update(grads, state):
    # jaxline's step does this too, because Optax relies on promotion.
    with jax.numpy_dtype_promotion('standard'):
      return tx.update(grads, state, _WEIGHTS)

  return tx.init(_WEIGHTS), update


def _first_update(learner):
  state, update = _made(learner)
  return update(_GRADS, state)[0]


def _scaled(*factors):
  """Returns minus the gradients, each times a factor."""
  leaves, structure = jax.tree.flatten(_GRADS)
  pairs = zip(leaves, factors, strict=True)
  return structure.unflatten([-x * factor for x, factor in pairs])


def _assert_close(found, expected):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7),
    found,
    expected,
  )


@pytest.mark.parametrize(
  ('limit', 'factor', 'clipped_norm'), [(0, 1, 13), (6.5, 0.5, 6.5)]
)
def test_clips_gradients(limit, factor, clipped_norm):
  schedule = schedules.LinearRampupExponentialDecay.HParams(
    decay_end=4, min_ratio=0.6
  )
  learner = _learner(_sgd(limit=limit, lr_schedule=schedule)).Instantiate()
  updates = _first_update(learner)
  _assert_close(updates, _scaled(*[factor] * 3))
  _assert_close(
    jax.jit(learner.scalars)(_GRADS, updates, jnp.int32(4)),
    {
      'learning_rate': 0.6,
      'is_valid_step': 1,
      'grad_norm': 13,
      'clipped_grad_norm': clipped_norm,
      'applied_grad_norm': clipped_norm,
    },
  )


def test_a_skipped_step_changes_nothing():
  learner = _learner(_adam(), skip_step_gradient_norm_value=13.5).Instantiate()
  state, update = _made(learner)
  _, state = update(_GRADS, state)
  scalars = jax.jit(learner.scalars)
  for bad in (np.nan, np.inf, 1e30, 20.0):
    grads = {**_GRADS, 'lm/softmax': {'w': np.float32([[bad]])}}
    updates, skipped = update(grads, state)
    jax.tree.map(np.testing.assert_array_equal, skipped, state)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), updates)
    assert scalars(grads, updates, 1)['is_valid_step'] == 0
    assert learners.num_updates(skipped) == 1


@pytest.mark.parametrize(
  'options',
  [
    {'bprop_variable_exclusion': ['.*/norm', 'lm/softmax']},
    {'bprop_variable_inclusion': 'lm/layers'},
  ],
)
def test_weights_that_are_not_trained(options):
  optimizer = _adam(
    clip_gradient_norm_to_value=1.5, clip_threshold=0.0, epsilon=1.0
  )
  learner = _learner(optimizer, **options).Instantiate()
  state, update = _made(learner)
  has_mu = lambda x: hasattr(x, 'mu')
  (mu,) = [x.mu for x in jax.tree.leaves(state, is_leaf=has_mu) if has_mu(x)]
  assert mu['lm/norm']['scale'] == mu['lm/softmax']['w'] == optax.MaskedNode()
  # A gradient of an untrained weight may be NaN. It counts in no norm.
  grads = {**_GRADS, 'lm/norm': {'scale': np.float32([np.nan, 1])}}
  updates, _ = update(grads, state)
  half = _GRADS['lm/layers/ff']['w'] / 2  # The norm falls from 3 to 1.5.
  expected = {
    **jax.tree.map(np.zeros_like, _GRADS),
    'lm/layers/ff': {'w': -0.1 * (half / (half + 1) + 0.1)},
  }
  _assert_close(updates, expected)
  assert learner.scalars(grads, updates, 0)['grad_norm'] == 3


def _others(*regexes):
  """Returns a main learner, and one for each regular expression."""
  return [_learner()] + [
    _learner().set(name=f'l{i}', bprop_variable_inclusion=regex)
    for i, regex in enumerate(regexes)
  ]


def _other(**fields):
  second = {'name': 'second', 'bprop_variable_inclusion': 'lm/softmax'}
  return [_learner(), _learner().set(**second | fields)]


@pytest.mark.parametrize(
  ('several', 'named'),
  [
    (
      [_learner(skip_step_gradient_norm_value=-1.0)],
      'skip_step_gradient_norm_value',
    ),
    (
      [_learner(bprop_variable_inclusion='a', bprop_variable_exclusion='b')],
      "'bprop_variable_inclusion': 'a', 'bprop_variable_exclusion': 'b'",
    ),
    ([_learner().set(optimizer=None)], 'optimizer'),
    ([], 'expected at least one'),
    *(
      (_other(**fields), "differs from 'mine'")
      for fields in (
        {'bprop_variable_inclusion': ()},
        {'loss_name': 'other'},
        {'skip_step_gradient_norm_value': 1.0},
        {'optimizer': _sgd(ema_decay=0.5)},
        {'name': 'main'},
      )
    ),
    # What fits no weight is seen with the weights.
    (
      [_learner(bprop_variable_exclusion='lm/sofmax')],
      r"mine.bprop_variable_exclusion .*'lm/sofmax'.*'lm/softmax/w'",
    ),
    (
      [_learner(bprop_variable_inclusion=['lm', '.*lm/layer/.*/w'])],
      r"'.\*lm/layer/.\*/w'.*'lm/layers/ff/w'",
    ),
    ([_learner(bprop_variable_exclusion='l')], 'leaves none to train'),
    (_others('norm'), "l0.bprop_variable_inclusion.*'norm'"),
    (_others('lm/norm', '.*/scale'), r"'lm/norm/scale'.*\['l0', 'l1'\]"),
  ],
)
def test_refuses_what_no_run_can_mean(several, named):
  with pytest.raises((ValueError, TypeError), match=named):
    learners.joined(several).make().init(_WEIGHTS)


# The updates of paxml 1.4.0's MultiOptimizerLearner (praxis 1.4.0, jax 0.4.26,
# Python 3.10) with apply_separate_scaling and ShardedSgd for these weights and
# gradients, and skip_step_gradient_norm_value. Without `frozen` and the limit
# 11, which is above the norm of either learner, 5 and 10, but not of both.
@pytest.mark.parametrize(
  ('skip', 'ff', 'emb'),
  [
    (12.0, [-0.06, -0.08], [-0.6, -0.8, 0]),
    (11.0, [-0.06, -0.08], [-0.6, -0.8, 0]),
    (8.0, [0, 0], [0, 0, 0]),
  ],
)
def test_several_learners_are_praxis(skip, ff, emb):
  grads = {
    'emb': jnp.array([6.0, 8.0, 0.0]),
    'ff': jnp.array([3.0, 4.0]),
    'frozen': jnp.array([np.nan]),
  }
  first = _learner(
    _sgd(0.1, 1.0),
    skip_step_gradient_norm_value=skip,
    bprop_variable_exclusion='frozen',
  )
  second = first.clone().set(
    name='emb',
    optimizer=_sgd(0.5, 2.0),
    bprop_variable_inclusion='emb',
    bprop_variable_exclusion=(),
  )
  learner = learners.joined([first, second])
  tx, weights = learner.make(), jax.tree.map(jnp.ones_like, grads)
  updates, _ = jax.jit(tx.update)(grads, tx.init(weights), weights)
  expected = {'emb': np.array(emb), 'ff': np.array(ff), 'frozen': np.zeros(1)}
  _assert_close(updates, expected)
  _assert_close(
    learner.scalars(grads, updates, 0),
    {
      'main/learning_rate': 0.1,
      'emb/learning_rate': 0.5,
      'is_valid_step': any(ff),
      'grad_norm': 125**0.5,
      'clipped_grad_norm': 5**0.5,
      'applied_grad_norm': 1.01**0.5 if any(ff) else 0,
    },
  )
