"""Tests of optimizers against float64 NumPy written from their formulas.

Weights are of one layer, of no layer, or stacks of layers; the formulas know
only layers, one after the other.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pax import optimizers
from examples.pax import schedules
from jaxline.parallel import partitioning

_SHAPES = {
  'lm/embed': {'w': (6, 5)},
  'lm/layers/ff': {'w': (3, 4, 5), 'b': (3, 4)},
  'lm/norm': {'scale': (5,)},
}
_SCHEDULE = schedules.Linear.HParams(start=(0, 1.0), limit=(10, 0.0))


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
    # As jaxline's step does: Optax relies on promotion.
    with jax.numpy_dtype_promotion('standard'):
      updates, state = tx.update(grad, state, weights)
    return optax.apply_updates(weights, updates), state

  state, found = tx.init(weights), []
  for grad in grads:
    weights, state = step(weights, state, grad)
    found.append(weights)
  return found


def _expect(step, weights, grads, num_stacked=_num_stacked):
  """Returns the same of `step(name, w, g, n, memory) -> w` by layer, float64.

  `n` is 1 at the first step; `memory` is a dict that is kept.
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
  # They shrink, so that updates are of very different sizes.
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
    return w - 0.1 * (1 - (n - 1) / 10) * update

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
  """As for ResNet: L2 is not for vectors, and a stack of vectors is vectors."""
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
    return w - 0.2 * (1 - (n - 1) / 10) * update

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


def test_lion():
  optimizer = optimizers.Lion.HParams(
    learning_rate=0.1,
    lr_schedule=_SCHEDULE,
    weight_decay=0.2,
    beta1=0.8,
    clip_threshold=0.5,
  ).Instantiate()

  def step(name, w, g, n, memory):
    del name
    m = memory.get('m', np.float32(0)).astype(np.float32)
    memory['m'] = (0.99 * m + 0.01 * g).astype(jnp.bfloat16)
    sign = np.sign(0.8 * m + 0.2 * g)  # Its root mean square is 1.
    return w - 0.1 * (1 - (n - 1) / 10) * (0.5 * sign + 0.2 * w)

  _compare(optimizer, step)


@pytest.mark.parametrize(
  ('dtype', 'signs'), [('bfloat16', [1, -1]), (jnp.float32, [-1, -1])]
)
def test_lion_rounds_its_moment_but_not_its_sums(dtype, signs):
  hparams = optimizers.Lion.HParams(learning_rate=1.0)
  assert hparams.m_dtype == jnp.bfloat16
  optimizer = hparams.set(m_dtype=dtype).Instantiate().make()
  w = {'w': jnp.zeros(2)}
  state = optimizer.init(w)
  _, state = optimizer.update({'w': jnp.ones(2)}, state, w)
  # 0.9 m is 0.009 in float32, and 0.0090088 if m is 0.01 as a bfloat16; if the
  # product were rounded as well, 0.0090332.
  g = {'w': jnp.array([-0.09004, -0.09015])}
  update, state = optimizer.update(g, state, w)
  np.testing.assert_array_equal(update['w'], [-x for x in signs])
  assert optax.tree.get(state, 'mu')['w'].dtype == dtype


def _orthogonalize(g):
  x = g / np.linalg.norm(g)
  for _ in range(5):  # Keller Jordan's coefficients.
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return x * max(1, g.shape[1] / g.shape[0]) ** 0.5


def test_muon_of_matrices_by_layer_and_adam_of_the_rest():
  optimizer = optimizers.Muon.HParams(
    learning_rate=0.1,
    weight_decay=0.2,
    matrices={
      'lm/embed': None,
      'lm/heads/post': ((-2, -1), (-3,)),
      'lm/heads': ((-3,), (-2, -1)),
    },
  ).Instantiate()
  shapes = {
    **_SHAPES,
    'lm/heads': {'w': (5, 2, 4)},
    'lm/heads/post': {'w': (7, 2, 2)},
  }

  def step(name, w, g, n, memory):
    del n, memory
    if name == 'lm/layers/ff/w':
      update = _orthogonalize(g)
    elif name == 'lm/heads/w':
      update = _orthogonalize(g.reshape(5, 8)).reshape(g.shape)
    elif name == 'lm/heads/post/w':
      update = _orthogonalize(g.reshape(7, 4).T).T.reshape(g.shape)
    else:  # Adam's first step, with Nesterov's look ahead (Dozat, 2016).
      update = np.sign(g) * (1 + 0.9 / 1.9)
    return w - 0.1 * (update + 0.2 * w)

  _compare(optimizer, step, 1, shapes=shapes, rtol=1e-4)


def test_adafactor_of_the_largest_axes_is_optax():
  shapes = {'a': {'w': (6, 5), 's': (3, 9)}, 'c': {'w': (2, 6, 5)}}
  rng = np.random.default_rng(0)
  weights = _tree(rng, shapes)
  grads = [_tree(rng, shapes) for _ in range(4)]
  optimizer = optimizers.ShardedAdafactor.HParams(
    learning_rate=0.1,
    lr_schedule=_SCHEDULE,
    beta1=0.9,
    quantized_dtype='float32',
    clip_threshold=0.5,
    sort_factored_second_moment_dims=True,
    min_dim_size_to_factor=4,
    multiply_by_parameter_scale=True,
  ).Instantiate()
  theirs = optax.adafactor(
    lambda step: 0.1 * (1 - step / 10),
    min_dim_size_to_factor=4,
    clipping_threshold=0.5,
    momentum=0.9,
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
    _train(optimizer.make(), weights, grads),
    _train(theirs, weights, grads),
  )


@pytest.mark.parametrize(('factored', 'beta1'), [(True, 0.8), (False, 0.0)])
def test_adafactor_of_the_last_two_axes_by_layer(factored, beta1):
  optimizer = optimizers.ShardedAdafactor.HParams(
    learning_rate=0.1,
    lr_schedule=_SCHEDULE,
    decay_method='adam',
    decay_adam=0.9,
    beta1=beta1,
    quantized_dtype='float32',
    clip_threshold=0.9,
    epsilon1_grad_sq_reg=1e-4,
    weight_decay=0.3,
    factored=factored,
  ).Instantiate()
  # Largest first: Optax itself would factor the layers, or the heads.
  shapes = {
    'lm/layers/qkv': {'w': (9, 3, 4, 2), 'b': (9, 8)},
    'lm/post': {'w': (7, 2, 3)},
    'lm/norm': {'scale': (5,)},
  }

  def step(name, w, g, n, memory):
    del name
    v = memory['v'] = 0.9 * memory.get('v', 0) + 0.1 * (g**2 + 1e-4)
    v = v / (1 - 0.9**n)
    if factored and g.ndim > 1:
      rows, columns = v.mean(-1, keepdims=True), v.mean(-2, keepdims=True)
      v = rows * columns / v.mean((-2, -1), keepdims=True)
    update = g / np.sqrt(v)
    update /= max(1, _rms(update) / 0.9)
    rate = 0.1 * (1 - (n - 1) / 10)
    mean = beta1 * memory.get('m', 0) + (1 - beta1) * rate * update
    memory['m'] = mean
    return w - mean - rate * 0.3 * w

  _compare(optimizer, step, shapes=shapes)


def test_adafactor_by_the_scale_of_a_layer():
  """The scale is a layer's own, and has a least value."""
  optimizer = optimizers.ShardedAdafactor.HParams(
    learning_rate=0.1,
    decay_method='pow',
    decay_pow=0.5,
    multiply_by_parameter_scale=True,
    epsilon2_param_scale_reg=1.1,
    quantized_dtype='bfloat16',
    beta1=0.5,
  ).Instantiate()

  def step(name, w, g, n, memory):
    del name
    kept = 1 - n**-0.5
    v = memory['v'] = kept * memory.get('v', 0) + (1 - kept) * (g**2 + 1e-30)
    if g.ndim > 1:
      v = v.mean(-1, keepdims=True) * v.mean(-2, keepdims=True) / v.mean()
    update = g / np.sqrt(v)
    update /= max(1, _rms(update))
    m = 0.5 * memory.get('m', 0) + 0.05 * max(_rms(w), 1.1) * update
    memory['m'] = np.float64(jnp.asarray(np.float32(m), jnp.bfloat16))
    return w - m

  shapes = {'lm/layers/ff': {'w': (3, 4, 5)}, 'lm/norm': {'scale': (5,)}}
  _compare(optimizer, step, 3, shapes=shapes, rtol=1e-4)


def test_state_lies_where_its_weights_lie():
  partitioner = partitioning.Partitioner.make({'data': 2}, 'fsdp')
  weights = {
    'lm/embed': {'w': partitioning.Logical(np.zeros([6, 4]), (None, 'embed'))},
    'lm/norm': {'scale': partitioning.Logical(np.zeros([4]), ('embed',))},
  }
  state = jax.eval_shape(
    optimizers.ShardedAdafactor.HParams(learning_rate=1.0, beta1=0.9)
    .Instantiate()
    .make()
    .init,
    partitioning.unbox(weights),
  )
  specs = partitioner.specs_like(state, weights)
  moments = next(s for s in specs if isinstance(s, optax.FactoredState))
  mean = next(s for s in specs if hasattr(s, 'm_scale'))
  split = partitioning.P(('data', 'expert'))
  assert mean.m['lm/embed']['w'] == partitioning.P(None, ('data', 'expert'))
  assert mean.m_scale['lm/embed']['w'] == partitioning.P()
  assert mean.m['lm/norm']['scale'] == split
  assert moments.v['lm/norm']['scale'] == split
  # Less than a weight: whole everywhere.
  for part in (moments.v_row, moments.v_col, moments.v):
    assert part['lm/embed']['w'] == partitioning.P()


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
      {'lr_schedule': optimizers.Lion.HParams(learning_rate=1.0)},
      'Adam.lr_schedule.* schedules.BaseSchedule',
    ),
    # Each pair contradicts itself: one option would have no effect.
    *(
      (optimizer, {first: 0.1, second: 0.2}, f"'{first}': .*'{second}': ")
      for optimizer, first, second in (
        (
          optimizers.Adam,
          'clip_gradient_norm_to_value',
          'clip_gradient_single_norm_to_value',
        ),
        (optimizers.Adam, 'weight_decay', 'decoupled_weight_decay'),
        (optimizers.Lion, 'l2_regularizer_weight', 'weight_decay'),
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
    (optimizers.ShardedAdafactor, {'decay_method': 'power'}, 'decay_method'),
    # An unsigned type would lose the sign of the mean.
    (optimizers.ShardedAdafactor, {'quantized_dtype': 'uint8'}, 'quantized_dt'),
  ],
)
def test_refuses_what_contradicts_itself(optimizer, fields, named):
  hparams = optimizer.HParams(**{'learning_rate': 1.0} | fields)
  with pytest.raises((ValueError, TypeError), match=named):
    hparams.Instantiate()


def _value(seed, *shape):
  flat = np.sin(seed + 0.7 * np.arange(math.prod(shape))) / 2
  return jnp.float32(flat.reshape(shape))


@pytest.mark.parametrize(
  ('dtype', 'b', 'w', 's'),
  [
    (
      'int8',
      [0.4523533, 0.5175775, 0.3469355],
      [
        [0.4303229, 0.2028402],
        [-0.1347785, -0.3854519],
        [-0.4724199, -0.3341809],
      ],
      0.2719500,
    ),
    (
      'int16',
      [0.4523533, 0.5175602, 0.3468991],
      [
        [0.4303125, 0.2028912],
        [-0.1348118, -0.3854755],
        [-0.4724130, -0.3341809],
      ],
      0.2719500,
    ),
  ],
)
@pytest.mark.parametrize('is_stacked', [False, True])
def test_integers_for_moments_are_those_of_praxis(dtype, b, w, s, is_stacked):
  """Of ShardedAdafactor of praxis 1.4.0, jax 0.4.26, Python 3.10, float32.

  HParamsAdamB's settings with learning_rate=0.1 and clip_threshold=0.5, after
  three steps from the weights below, with the gradients below.
  """
  hparams = optimizers.ShardedAdafactor.HParamsAdamB()
  hparams.set(learning_rate=0.1, clip_threshold=0.5, quantized_dtype=dtype)
  weights = {'b': _value(1, 3), 'w': _value(2, 3, 2), 's': jnp.float32(0.3)}
  grads = [
    {
      'b': _value(10 + i, 3),
      'w': _value(20 + i, 3, 2) * (i + 1),
      's': jnp.float32(0.1 * (i + 1)),
    }
    for i in range(3)
  ]
  num_stacked = optimizers.not_stacked
  if is_stacked:  # The second layer sees other gradients.
    num_stacked = lambda name: 1
    weights, *grads = jax.tree.map(
      lambda x: jnp.stack([x, 3 * x + 1]), [weights, *grads]
    )
  tx = hparams.Instantiate().make(num_stacked)
  *_, ended = _train(tx, weights, grads)
  for name, expected in (('b', b), ('w', w), ('s', s)):
    actual = ended[name][0] if is_stacked else ended[name]
    np.testing.assert_allclose(actual, expected, atol=1e-6)
  state = jax.eval_shape(tx.init, weights)
  mean = next(part for part in state if hasattr(part, 'm_scale'))
  assert mean.m['w'].dtype == dtype
  assert mean.m_scale['w'].shape == ((2, 2) if is_stacked else (2,))


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
