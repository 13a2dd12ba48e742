"""Tests of a learner's clipping, skipping and choice of weights."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pax import learners
from examples.pax import optimizers
from examples.pax import schedules

# Norms: 3 in the stack (2 and the root of 5), 4, 12; of all of them, 13.
_GRADS = {
  'lm/layers/ff': {'w': np.float32([[[2.0, 0.0]], [[1.0, 2.0]]])},
  'lm/norm': {'scale': np.float32([0.0, 4.0])},
  'lm/softmax': {'w': np.float32([[12.0]])},
}
_WEIGHTS = jax.tree.map(np.ones_like, _GRADS)


def _learner(optimizer=None, cls=learners.Learner, **kwargs):
  optimizer = optimizer or optimizers.Sgd.HParams(learning_rate=1.0)
  return cls.HParams(name='mine', optimizer=optimizer, **kwargs).Instantiate()


def _adam(**kwargs):
  """An optimizer with every kind of state: moments and a count."""
  kwargs = {'learning_rate': 0.1, **kwargs}
  return optimizers.Adam.HParams(weight_decay=0.1, **kwargs)


def _made(learner, num_stacked=optimizers.not_stacked):
  """Returns the initial state and an update function."""
  tx = learner.make(num_stacked)

  @jax.jit
  def update(grads, state):
    # jaxline's step does this too, because Optax relies on promotion.
    with jax.numpy_dtype_promotion('standard'):
      return tx.update(grads, state, _WEIGHTS)

  return tx.init(_WEIGHTS), update


def _first_update(learner, grads=_GRADS, num_stacked=optimizers.not_stacked):
  state, update = _made(learner, num_stacked)
  return update(grads, state)[0]


def _scaled(grads, *factors):
  """Returns minus the gradients, each times a factor."""
  leaves, structure = jax.tree.flatten(grads)
  pairs = zip(leaves, factors, strict=True)
  return structure.unflatten([-x * factor for x, factor in pairs])


def _assert_close(found, expected):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7),
    found,
    expected,
  )


@pytest.mark.parametrize(
  ('options', 'factors', 'clipped_norm'),
  [
    ({}, (1, 1, 1), 13),
    ({'clip_gradient_norm_to_value': 6.5}, (0.5, 0.5, 0.5), 6.5),
    ({'clip_gradient_norm_to_value': 13.5}, (1, 1, 1), 13),
    # A stack of layers has one gradient, as in Praxis.
    (
      {'clip_gradient_single_norm_to_value': 3.5},
      (1, 7 / 8, 7 / 24),
      33.5**0.5,
    ),
  ],
)
def test_clips_gradients(options, factors, clipped_norm):
  schedule = schedules.LinearRampupExponentialDecay.HParams(
    decay_end=4, min_ratio=0.6
  )
  learner = _learner(
    optimizers.Sgd.HParams(learning_rate=1.0, lr_schedule=schedule, **options),
    grad_norm_individual_vars=True,
  )
  updates = _first_update(learner, num_stacked=lambda name: 'layers' in name)
  _assert_close(updates, _scaled(_GRADS, *factors))
  _assert_close(
    jax.jit(learner.scalars)(_GRADS, updates, jnp.int32(4)),
    {
      'learning_rate': 0.6,
      'is_valid_step': 1,
      'grad_norm': 13,
      'clipped_grad_norm': clipped_norm,
      'applied_grad_norm': clipped_norm,
      'grad_norm/lm/layers/ff/w': 3,
      'grad_norm/lm/norm/scale': 4,
      'grad_norm/lm/softmax/w': 12,
    },
  )


def test_reports_only_what_is_asked_for():
  learner = _learner(grad_norm_summary=False)
  scalars = learner.scalars(_GRADS, _GRADS, 0)
  assert scalars.keys() == {'learning_rate', 'is_valid_step'}
  assert {x.dtype for x in scalars.values()} == {np.dtype('float32')}


def test_gradients_of_zero_stay_zero():
  zeros = jax.tree.map(np.zeros_like, _GRADS)
  for name in (
    'clip_gradient_norm_to_value',
    'clip_gradient_single_norm_to_value',
  ):
    optimizer = optimizers.Sgd.HParams(learning_rate=1.0, **{name: 1.0})
    _assert_close(_first_update(_learner(optimizer), zeros), zeros)


def test_a_skipped_step_changes_nothing():
  """The run continues as if the step had not happened."""
  schedule = schedules.LinearRampupExponentialDecay.HParams(
    decay_end=2, min_ratio=0.75**2
  )
  learner = _learner(
    _adam(lr_schedule=schedule, clip_gradient_norm_to_value=5.0),
    skip_step_gradient_norm_value=13.5,
  )
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
  after, state = update(_GRADS, skipped)
  assert learners.num_updates(state) == 2
  # Adam has seen this gradient twice. The learning rate is at 3/4.
  clipped = jax.tree.map(lambda x: x * 5 / 13, _GRADS)
  _assert_close(
    jax.tree.map(lambda x: x + 0.075 * 0.1, after),
    jax.tree.map(lambda g: -0.075 * g / (np.abs(g) + 1e-6), clipped),
  )


def test_a_large_norm_is_kept_where_there_is_no_limit():
  learner = _learner()
  grads = {**_GRADS, 'lm/softmax': {'w': np.float32([[1e15]])}}
  _assert_close(_first_update(learner, grads), _scaled(grads, 1, 1, 1))


@pytest.mark.parametrize(
  'options',
  [
    {'bprop_variable_exclusion': ['.*/norm', 'lm/softmax']},
    {'bprop_variable_inclusion': 'lm/layers'},
  ],
)
def test_weights_that_are_not_trained(options):
  learner = _learner(
    _adam(
      clip_gradient_norm_to_value=1.5,
      clip_threshold=0.0,
      epsilon=1.0,
      # An expression that matches only an untrained weight is valid.
      weight_decay_exclusion='lm/norm',
    ),
    grad_norm_individual_vars=True,
    **options,
  )
  state, update = _made(learner)
  (mu,) = [
    x.mu
    for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, 'mu'))
    if hasattr(x, 'mu')
  ]
  assert mu['lm/norm']['scale'] == optax.MaskedNode()
  assert mu['lm/softmax']['w'] == optax.MaskedNode()
  # A gradient of an untrained weight may be NaN. It counts in no norm.
  grads = {**_GRADS, 'lm/norm': {'scale': np.float32([np.nan, 1])}}
  updates, _ = update(grads, state)
  half = _GRADS['lm/layers/ff']['w'] / 2  # The norm falls from 3 to 1.5.
  expected = {
    **jax.tree.map(np.zeros_like, _GRADS),
    'lm/layers/ff': {'w': -0.1 * (half / (half + 1) + 0.1)},
  }
  _assert_close(updates, expected)
  scalars = learner.scalars(grads, updates, 0)
  assert scalars['grad_norm'] == 3
  assert [key for key in scalars if '/' in key] == ['grad_norm/lm/layers/ff/w']


def test_layers_of_a_stack_by_themselves():
  """By default, Adam caps each layer. If switched off, it caps the stack."""

  def one(**kwargs):
    optimizer = _adam(clip_threshold=0.25, epsilon=1.0, learning_rate=1.0)
    learner = _learner(optimizer, **kwargs)
    updates = _first_update(learner, num_stacked=lambda name: 'layers' in name)
    return updates['lm/layers/ff']['w'] + 0.1  # Excludes the decay.

  update = np.float64([[[2 / 3, 0.0]], [[1 / 2, 2 / 3]]])
  rms = np.sqrt(np.mean(update**2, (1, 2), keepdims=True))
  _assert_close(one(), -update / (rms / 0.25))
  rms = np.sqrt(np.mean(update**2))
  _assert_close(one(vectorize_on_repeat_prefix=False), -update / (rms / 0.25))


def _several(*auxiliary, regex):
  """Returns options for several optimizers with the names '0', '1', ..."""
  return {
    'cls': learners.MultiOptimizerLearner,
    'auxiliary_optimizers': [*auxiliary],
    'auxiliary_regex': regex,
    'auxiliary_names': [*map(str, range(len(regex)))],
  }


@pytest.mark.parametrize(
  ('options', 'named'),
  [
    (
      {'bprop_variable_exclusion': 'lm/sofmax'},
      r"mine.bprop_variable_exclusion .*'lm/sofmax'.*'lm/softmax/w'",
    ),
    (
      {'bprop_variable_inclusion': ['lm', '.*lm/layer/.*/w']},
      r"'.\*lm/layer/.\*/w'.*'lm/layers/ff/w'",
    ),
    ({'bprop_variable_exclusion': 'l'}, 'bprop_variable_exclusion'),
    (
      {'optimizer': _adam(weight_decay_exclusion='bias')},
      "Adam.weight_decay_exclusion.*'bias'",
    ),
    (
      _several(_adam(weight_decay_exclusion='bias'), regex=['lm/norm']),
      "Adam.weight_decay_exclusion.*'bias'",
    ),
    (_several(_adam(), regex=['norm']), "mine.auxiliary_regex.*'norm'"),
    (
      _several(_adam(), _adam(), regex=['lm/norm', '.*/scale']),
      r"'lm/norm/scale'.*\['0', '1'\]",
    ),
  ],
)
def test_refuses_names_that_fit_no_weight_when_it_sees_the_weights(
  options, named
):
  learner = _learner(**options)
  with pytest.raises(ValueError, match=named):
    learner.make().init(_WEIGHTS)


@pytest.mark.parametrize(
  ('options', 'named'),
  [
    (
      {'skip_step_gradient_norm_value': -1.0},
      'skip_step_gradient_norm_value',
    ),
    (
      _several(learners.Learner.HParams(optimizer=_adam()), regex=['a']),
      'auxiliary_optimizers is Learner.HParams',
    ),
    (
      {'bprop_variable_inclusion': 'a', 'bprop_variable_exclusion': 'b'},
      "'bprop_variable_inclusion': 'a', 'bprop_variable_exclusion': 'b'",
    ),
    (_several(regex=['a']), 'argument 2'),
    (
      _several(_adam(), regex=['a']) | {'auxiliary_names': ['main']},
      "'main'",
    ),
    (
      _several(_adam(clip_gradient_norm_to_value=2.0), regex=['a']),
      "'0' of mine has clip_gradient_norm_to_value",
    ),
  ],
)
def test_refuses_what_contradicts_itself(options, named):
  with pytest.raises((ValueError, TypeError), match=named):
    _learner(**options)


def test_a_learner_needs_an_optimizer():
  with pytest.raises(TypeError, match='optimizer'):
    learners.Learner.HParams().Instantiate()


def test_several_optimizers():
  """One norm clips all gradients. Untrained weights have no optimizer."""
  learner = _learner(
    optimizers.Sgd.HParams(
      learning_rate=0.5, clip_gradient_norm_to_value=1.0, ema_decay=0.9
    ),
    learners.MultiOptimizerLearner,
    auxiliary_optimizers=[
      optimizers.Sgd.HParams(learning_rate=2.0),
      optimizers.Sgd.HParams(learning_rate=0.1),
    ],
    auxiliary_regex=['lm/norm', 'lm/softmax'],
    auxiliary_names=['norms', 'head'],
    bprop_variable_exclusion='lm/softmax',
  )
  updates = _first_update(learner)
  _assert_close(updates, _scaled(_GRADS, 0.5 / 5, 2.0 / 5, 0))
  rates = {
    key: value
    for key, value in learner.scalars(_GRADS, updates, 3).items()
    if 'rate' in key
  }
  _assert_close(
    rates,
    {
      'main/learning_rate': 0.5,
      'norms/learning_rate': 2.0,
      'head/learning_rate': 0.1,
    },
  )
  assert learner.optimizer.ema_decay == 0.9


def test_through_fiddle():
  """A config that is changed in place makes the same learner."""
  config = learners.Learner.HParams.config(
    optimizer=optimizers.Sgd.HParams.config(learning_rate=2.0)
  )
  config.optimizer.lr_schedule.value = 0.25
  learner = fdl.build(config)
  _assert_close(_first_update(learner), _scaled(_GRADS, 0.5, 0.5, 0.5))


def _sgd(learning_rate, limit):
  return optimizers.Sgd.HParams(
    learning_rate=learning_rate, clip_gradient_norm_to_value=limit
  )


# The updates of paxml 1.4.0's MultiOptimizerLearner (praxis 1.4.0, jax 0.4.26,
# Python 3.10) with ShardedSgd for these weights and gradients, and
# skip_step_gradient_norm_value.
@pytest.mark.parametrize(
  ('separate', 'skip', 'ff', 'emb'),
  [
    (False, 0.0, [-0.02683282, -0.03577709], [-0.26832816, -0.3577709, 0]),
    (True, 0.0, [-0.06, -0.08], [-0.6, -0.8, 0]),
    (True, 12.0, [-0.06, -0.08], [-0.6, -0.8, 0]),
    (True, 8.0, [0, 0], [0, 0, 0]),
  ],
)
def test_optimizers_that_clip_by_themselves(separate, skip, ff, emb):
  grads = {'emb': jnp.array([6.0, 8.0, 0.0]), 'ff': jnp.array([3.0, 4.0])}
  weights = jax.tree.map(jnp.ones_like, grads)
  learner = _learner(
    _sgd(0.1, 1.0),
    learners.MultiOptimizerLearner,
    auxiliary_optimizers=[_sgd(0.5, 2.0 if separate else 0.0)],
    auxiliary_regex=['emb'],
    auxiliary_names=['emb'],
    apply_separate_scaling=separate,
    skip_step_gradient_norm_value=skip,
  )
  tx = learner.make()
  updates, _ = jax.jit(tx.update)(grads, tx.init(weights), weights)
  _assert_close(updates, {'emb': np.array(emb), 'ff': np.array(ff)})
  scalars = learner.scalars(grads, updates, 0)
  assert float(scalars['is_valid_step']) == any(ff)
  if separate:
    assert scalars['clipped_grad_norm'] == pytest.approx(5**0.5)


def test_a_list_of_learners_is_one():
  first = learners.Learner.HParams(name='first', optimizer=_sgd(0.1, 1.0))
  second = first.clone().set(
    name='second',
    optimizer=_sgd(0.5, 2.0),
    bprop_variable_inclusion='lm/softmax',
  )
  learner = learners.joined([first, second]).Instantiate()
  updates = _first_update(learner)
  # The norm of the first one's gradients is 5, of the other's 12.
  _assert_close(updates, _scaled(_GRADS, 0.1 / 5, 0.1 / 5, 0.5 * 2 / 12))
  assert learners.joined([first]) == first
  for wrong in (
    second.clone().set(bprop_variable_inclusion=()),
    second.clone().set(loss_name='other'),
    second.clone().set(skip_step_gradient_norm_value=1.0),
  ):
    with pytest.raises(ValueError, match="The learner 'second' differs"):
      learners.joined([first, wrong])
  with pytest.raises(ValueError, match='expected at least one'):
    learners.joined([])
