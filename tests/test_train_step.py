"""A step: a batch in parts is the same step, and what a step overwrites."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxline import base_config
from jaxline import metrics
from jaxline import sharded
from jaxline.inputs import base as inputs
from jaxline.parallel import partitioning
from tests.experiments import regression

KEY = jax.random.PRNGKey(0)
ROWS, LENGTH, FEATURES = 8, 3, 4


def batch(weights=None, seed=0):
  rng = np.random.default_rng(seed)
  made = inputs.Batch(
    x=rng.normal(size=[ROWS, LENGTH, FEATURES]).astype(np.float32),
    y=rng.normal(size=[ROWS, LENGTH]).astype(np.float32),
    row=np.arange(ROWS, dtype=np.float32),
  )
  made.weights = np.ones(ROWS, np.float32) if weights is None else weights
  return made


class Linear(sharded.ShardedExperiment):
  """Weighted linear regression on tokens; its model state tells of the parts.

  Attributes:
    batches: what `train_input` gives, over and over.
    dtype: of the weights.
  """

  def __init__(self, batches=None, dtype=jnp.float32, **kwargs):
    self.batches = batches or [batch()]
    self.dtype = dtype
    super().__init__('train', KEY, **kwargs)

  def init_fn(self, rng):
    w = jnp.linspace(-1, 2, FEATURES).astype(self.dtype)
    state = {'calls': jnp.zeros([]), 'rows': jnp.zeros([]), 'draw': 0.0}
    return {'w': partitioning.Logical(w, ('embed',))}, state

  def loss_fn(self, params, model_state, batch, rng, is_training):
    w = params['w'].astype(jnp.float32)
    nats = jnp.square(jnp.einsum('BLD,D->BL', batch.x, w) - batch.y)
    loss = metrics.Mean.of(nats, batch.weights)
    first = metrics.Mean(batch.row[0], jnp.ones([]))
    model_state = {
      'calls': model_state['calls'] + 1,
      'rows': 10 * model_state['rows'] + batch.row[0],
      'draw': jax.random.uniform(rng),
    }
    values = {'loss': loss, 'first': first, 'plain': loss.compute()}
    return loss.compute(), values, model_state

  def make_optimizer(self):
    return optax.sgd(0.1, momentum=0.9)

  def train_input(self):
    while True:
      yield from self.batches

  def eval_input(self):
    return [self.batches[0]]

  def step_scalars(self, state, grads, updates):
    scalars = super().step_scalars(state, grads, updates)
    return {**scalars, 'grads': grads, 'before': state.step}


def make(parts, *args, cls=Linear, sharding='fsdp', **kwargs):
  config = base_config.get_base_config()
  config.update(gradient_accumulation_steps=parts, sharding=sharding)
  return cls(*args, run_config=config, **kwargs)


def train(experiment, steps=1):
  """Returns the scalars of each step, on the host; the run's key is KEY."""
  return regression.train_steps(experiment, steps, seed=0)


def expected(w, data):
  """The loss and its gradient by numpy, in float64."""
  x, y, w = (np.asarray(a, np.float64) for a in (data.x, data.y, w))
  weights = np.asarray(data.weights, np.float64)
  weights = np.broadcast_to(weights.reshape(ROWS, -1), y.shape)
  error = x @ w - y
  total = weights.sum()
  grad = np.einsum('bl,bld->d', 2 * weights * error, x) / total
  return (weights * error**2).sum() / total, grad


def tokens(seed=1):
  rng = np.random.default_rng(seed)
  return rng.uniform(0, 2, [ROWS, LENGTH]).astype(np.float32)


# Of each kind, one program takes all.
WEIGHTS = {
  'rows': [
    np.arange(ROWS, dtype=np.float32),
    # Of 2 or 4 parts, the first has the rows 0, 2, ... or 0, 4.
    np.float32([0, 1, 0, 3, 0, 1, 0, 2]),
    np.float32([0, 0, 0, 0, 0, 0, 5, 0]),
    # The first of two parts weighs -2.
    np.float32([-1, 1, -1, 3, 0, 1, 0, 2]),
  ],
  'tokens': [tokens(), tokens(2)],
  'integers': [np.arange(ROWS, dtype=np.int32)] * 2,
}


@pytest.mark.parametrize(
  ('parts', 'kind'),
  [(1, 'tokens'), (4, 'rows'), (4, 'tokens'), (4, 'integers')],
)
def test_parts_are_the_whole(parts, kind):
  batches = [batch(weights, i) for i, weights in enumerate(WEIGHTS[kind])]
  experiment = make(parts, batches)
  key = experiment.initialize_train_step_rng(KEY)
  for step, data in enumerate(batches):
    w = jax.device_get(experiment.state.params['w'])
    scalars = experiment.step(global_step=step, rng=key, writer=None)
    loss, grad = expected(w, data)
    assert scalars['before'] == step
    for name in ('loss', 'plain'):
      np.testing.assert_allclose(scalars[name], loss, rtol=2e-6)
    np.testing.assert_allclose(
      scalars['grads']['w'], grad, rtol=2e-5, atol=2e-6
    )
    # It was cut: the mean of the numbers of the parts' first rows. A part of
    # weight 0 has no metrics.
    weighing = [i for i in range(parts) if data.weights[i::parts].sum()]
    np.testing.assert_allclose(scalars['first'], np.mean(weighing), rtol=1e-6)
    assert int(experiment.state.model_state['calls']) == (step + 1) * parts
    if step == 0:  # The first of momentum: the update is by the gradient.
      np.testing.assert_allclose(
        experiment.state.params['w'], w - 0.1 * grad, rtol=2e-6, atol=2e-6
      )
  experiment.train_feed.close()
  assert len(experiment.state.params['w'].addressable_shards) == 2


class Divides(Linear):
  """Divides by the weights itself."""

  def loss_fn(self, params, model_state, batch, *args):
    _, values, new = super().loss_fn(params, model_state, batch, *args)
    return values['loss'].total / batch.weights.sum(), values, new


@pytest.mark.parametrize(('cls', 'parts'), [(Linear, 1), (Divides, 4)])
def test_a_batch_of_weight_0_has_the_loss_and_gradient_0(cls, parts):
  data = batch(np.zeros(ROWS, np.float32))
  experiment = make(parts, [data], cls=cls)
  (scalars,) = train(experiment)
  assert scalars['loss'] == scalars['grad_norm'] == 0
  assert scalars['nonfinite'] == -1
  # An evaluation has no mean: 0 would be the best one.
  means = experiment.evaluate(global_step=1, rng=KEY, writer=None)
  assert np.isnan(means['loss'])


def test_a_part_that_is_not_finite_is_the_whole_step_s():
  data = batch()
  data.y[5, 0] = np.inf
  experiment = make(4, [batch(), data])
  experiment.on_nonfinite = 'skip'
  train(experiment)
  before = jax.device_get(experiment.state)
  experiment.batches.reverse()
  (scalars,) = train(experiment)
  assert scalars['skipped_steps'] == 1
  after = jax.device_get(experiment.state)
  for name in ('params', 'model_state', 'opt_state'):
    pair = getattr(after, name), getattr(before, name)
    jax.tree.map(np.testing.assert_array_equal, *pair)


@pytest.mark.parametrize('parts', [1, 4])
def test_model_state_and_keys_go_through_the_parts_in_order(parts):
  experiment = make(parts)
  train(experiment, 2)
  state = jax.device_get(experiment.state.model_state)
  assert state['calls'] == 2 * parts
  # Part p begins with row p.
  assert state['rows'] == (0 if parts == 1 else 1230123)
  # The key of step 1, and of its last part.
  key = jax.random.fold_in(KEY, 1)
  key = key if parts == 1 else jax.random.fold_in(key, 3)
  assert state['draw'] == jax.random.uniform(key)


def test_rows_stay_on_their_devices():
  experiment = make(4, sharding='ddp')
  shapes = experiment.abstract_state(), experiment.abstract_batch(True)
  step = experiment.compiled_train_step.lower(
    *shapes, experiment.abstract_rng()
  )
  text = step.compile().as_text()
  moves = r' (all-[a-z-]+|collective-permute|reduce-scatter)\('
  assert {*re.findall(moves, text)} == {'all-reduce'}


def test_sums_of_narrow_gradients_are_wide():
  dtype = jnp.bfloat16
  # Token counts that it cannot tell apart.
  weights = np.float32([40001, 70000, 40003, 69999] * 2)
  data = batch(weights)
  experiment = make(4, [data], dtype=dtype)
  w = np.float64(jax.device_get(experiment.state.params['w']))
  (scalars,) = train(experiment)
  assert scalars['grads']['w'].dtype == dtype
  _, grad = expected(w, data)
  rounded = grad.astype(dtype).astype(np.float64)
  # Each part's own gradient is rounded to the type once, and so is the sum.
  np.testing.assert_allclose(
    np.float64(scalars['grads']['w']),
    rounded,
    atol=2 * float(jnp.finfo(dtype).eps) * np.abs(grad).max(),
  )


def test_what_does_not_divide_is_refused():
  said = 'gradient_accumulation_steps(.|\n)*multiple of 6,'
  with pytest.raises(ValueError, match=said):
    train(make(3))


class Scaled(Linear):
  """Keeps a scale as FP8 products do."""

  def init_fn(self, rng):
    params, state = super().init_fn(rng)
    return params, {**state, sharded.OVERWRITE: {'scale': jnp.float32(8)}}

  def loss_fn(self, params, model_state, batch, rng, is_training):
    scale = model_state[sharded.OVERWRITE]['scale']
    loss, values, new = super().loss_fn(
      params, model_state, batch, rng, is_training
    )
    # Adds 0, whose gradient is the next scale.
    following = jax.lax.stop_gradient(scale / 2 + jnp.abs(batch.x).max())
    loss += (scale - jax.lax.stop_gradient(scale)) * following
    # What it returns of its own is not what is kept.
    return loss, values, {**new, sharded.OVERWRITE: {'scale': jnp.float32(-1)}}


def test_what_is_overwritten_by_its_gradient():
  parts, data = 4, batch(tokens())
  experiment = make(parts, [data], cls=Scaled)
  loss, grad = expected(experiment.state.params['w'], data)
  (scalars,) = train(experiment)
  scale = 8.0
  for part in range(parts):
    scale = scale / 2 + np.abs(data.x[part::parts]).max()
  state = jax.device_get(experiment.state)
  assert state.model_state[sharded.OVERWRITE] == {
    'scale': pytest.approx(scale, rel=1e-6)
  }
  # It is no weight: neither optimized nor part of the gradients.
  np.testing.assert_allclose(scalars['loss'], loss, rtol=2e-6)
  assert scalars['grad_norm'] == pytest.approx(np.linalg.norm(grad), rel=2e-6)
  assert 'scale' not in str(jax.tree.structure(state.opt_state))


def test_weights_that_cancel_are_no_empty_batch():
  class Sums(Linear):
    def loss_fn(self, *args):
      _, values, new = super().loss_fn(*args)
      return values['loss'].total, values, new

  weights = np.float32([1, -1] + [0] * (ROWS - 2))
  (scalars,) = train(make(1, [batch(weights)], cls=Sums))
  assert scalars['grad_norm'] > 0
  assert scalars['nonfinite'] == 0
