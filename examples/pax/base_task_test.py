"""Tests of tasks: losses, metrics, noise, averages, and regularization."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pax import base_layer
from examples.pax import experiment
from examples.pax import learners
from examples.pax import models
from examples.pax import optimizers
from examples.pax import schedules
from examples.pax import tasks
from examples.pax.layers import linears
from examples.pax.layers import normalizations
from examples.pax.layers import repeats
from jaxline import sharded
from jaxline.parallel import partitioning

WeightHParams = base_layer.WeightHParams
WeightInit = base_layer.WeightInit

KEY = jax.random.PRNGKey(0)
FEATURES = 3


class Line(models.BaseModel):
  """Least squares: the weighted mean of (x w + b - y)^2."""

  def setup(self):
    one = WeightInit.Constant(1.0)
    self.create_variable('w', WeightHParams((FEATURES,), init=one))
    self.create_variable('b', WeightHParams((1,), init=one))
    zero = WeightHParams((), init=WeightInit.Constant(0.0))
    self.create_variable('seen', zero, trainable=False)

  def compute_predictions(self, batch):
    return {'y': batch['x'] @ self.theta.w + self.theta.b}

  def compute_loss(self, predictions, batch):
    if not self.do_eval:
      self.update_var('seen', self.theta.seen + len(batch['x']))
    error = predictions['y'] - batch['y']
    weights = batch['weights']
    self.add_summary('largest', jnp.abs(error).max(), verbosity=3)
    self.add_summary('rare', error[0], verbosity=4)
    mse = ((error**2 * weights).sum() / weights.sum(), weights.sum())
    size = ((self.theta.w**2).sum(), jnp.float32(1))
    return {'total_loss': mse, 'size': size}, {'error': error}

  @base_layer.hk.transparent
  def decode(self, variables, batch, rng=None, options=None):
    return variables, batch, rng, options


class Noisy(models.BaseModel):
  """Has metrics that show the noise on its weights."""

  def setup(self):
    weight = WeightHParams((200, 100), init=WeightInit.Constant(1.0))
    for name in ('a', 'also', 'b'):
      self.create_variable(name, weight)

  def compute_predictions(self, batch):
    return {name: self.get_var(name) for name in ('a', 'also', 'b')}

  def compute_loss(self, predictions, batch):
    one = jnp.float32(1)
    metrics = {'total_loss': (0 * predictions['a'].sum(), one)}
    for name, x in predictions.items():
      metrics[name] = (x.mean() - 1, one)
      metrics[f'{name}_variance'] = (jnp.square(x - 1.0).mean(), one)
    return metrics, {}


def make_task(model=None, optimizer=None, learner=None, train=None, **kwargs):
  optimizer = optimizer or optimizers.Sgd.HParams(learning_rate=0.1)
  learner = learner or learners.Learner.HParams(optimizer=optimizer)
  return tasks.SingleTask.HParams(
    model=model or Line.HParams(name='line'),
    train=tasks.TrainHParams(learner=learner, **(train or {})),
    **kwargs,
  )


def examples(seed, rows=8):
  rng = np.random.default_rng(seed)
  return {
    'x': rng.normal(size=[rows, FEATURES]).astype(np.float32),
    'y': rng.normal(size=[rows]).astype(np.float32),
    'weights': rng.integers(0, 4, rows).astype(np.float32) + 0.5,
  }


def init(task):
  return jax.jit(lambda key: partitioning.unbox(task.boxed_init(key)))(KEY)


def error_of(w, b, batch):
  return np.float64(batch['x']) @ w + b - np.float64(batch['y'])


def mse(w, b, batch):
  weights = np.float64(batch['weights'])
  return (error_of(w, b, batch) ** 2 * weights).sum() / weights.sum()


def losses(task):
  """Returns `loss_fn`, compiled, and its first two arguments."""
  return jax.jit(task.loss_fn, static_argnums=4), *init(task)


# Losses and metrics.


def test_loss_metrics_and_state():
  run, params, state = losses(make_task().Instantiate())
  batch = examples(0)
  w, b = np.ones(FEATURES), 1.0
  loss, metrics, new = run(params, state, batch, KEY, True)
  assert loss == pytest.approx(mse(w, b, batch), rel=1e-5)
  weight = batch['weights'].sum()
  assert {name: m.compute() for name, m in metrics.items()} == pytest.approx(
    {
      'total_loss': mse(w, b, batch),
      'size': FEATURES,
      # The verbosity is at most train.summary_verbosity, which is 3.
      'line/largest': np.abs(error_of(w, b, batch)).max(),
    },
    rel=1e-5,
  )
  assert metrics['total_loss'].weight == weight
  assert new == {'non_trainable': {'line': {'seen': 8}}}
  evaluated, _, same = run(params, state, batch, KEY, False)
  assert evaluated == loss
  assert same == state


def test_several_losses():
  aggregator = tasks.MultiLossAggregator.HParams(
    loss_keys=('total_loss', 'size'), loss_weights=(2.0, 0.5)
  )
  metrics = tasks.MeanMetrics.HParams(metric_keys=('size',))
  run, *state = losses(
    make_task(
      loss_aggregator=aggregator,
      metrics=metrics,
      train={'summary_verbosity': 0},
    ).Instantiate()
  )
  loss, means, _ = run(*state, examples(0), KEY, True)
  expected = 2 * mse(np.ones(FEATURES), 1.0, examples(0)) + 0.5 * FEATURES
  assert loss == pytest.approx(expected, rel=1e-5)
  assert means.keys() == {'size', 'loss'}
  assert means['loss'].compute() == loss


def test_the_learner_may_name_the_loss():
  optimizer = optimizers.Sgd.HParams(learning_rate=0.1)
  learner = learners.Learner.HParams(optimizer=optimizer, loss_name='size')
  run, *state = losses(make_task(learner=learner).Instantiate())
  assert run(*state, examples(0), KEY, False)[0] == FEATURES
  with pytest.raises(ValueError, match=r"loss_name 'size'.*'total_loss'"):
    make_task(
      learner=learner, loss_aggregator=tasks.LossAggregator.HParams()
    ).Instantiate()


@pytest.mark.parametrize(
  ('kwargs', 'message'),
  [
    (
      {'metrics': tasks.MeanMetrics.HParams(metric_keys=['sizes'])},
      r"'sizes', but the model.*Did you mean 'size'.*\['size', 'total_loss'\]",
    ),
    (
      {
        'loss_aggregator': tasks.MultiLossAggregator.HParams(
          loss_keys=['a', 'b'], loss_weights=[1.0]
        )
      },
      'expects at least one of loss_keys, and as many',
    ),
    ({'model': linears.Linear.HParams()}, 'the HParams of a models.BaseModel'),
    ({'name': 'not valid'}, "name is 'not valid'; expected a valid identifier"),
    (
      {'vn': tasks.VariationalNoise(vn_scale=1.0, vn_regex='line/v')},
      r"vn.vn_regex has 'line/v'.*\['line/.', 'line/.'\]",
    ),
  ],
)
def test_errors(kwargs, message):
  with pytest.raises((ValueError, TypeError), match=message):
    task = make_task(**kwargs).Instantiate()
    task.loss_fn(*init(task), examples(0), KEY, False)


# Noise, averages, optimizers.


def test_variational_noise():
  vn = tasks.VariationalNoise(vn_scale=0.3, vn_regex='.*/a.*', vn_start_step=2)
  task = make_task(Noisy.HParams(name='noisy'), vn=vn).Instantiate()
  run, params, state = losses(task)

  def measure(steps, key=KEY, is_training=True):
    made = sharded.TrainState(jnp.int32(steps), params, state, ())
    after = task.after_update(made, made) if steps else state
    _, metrics, _ = run(params, after, {}, key, is_training)
    return {name: float(m.compute()) for name, m in metrics.items()}

  # The noise begins in the third step, after two are done.
  for still in measure(0), measure(1), measure(2, is_training=False):
    assert set(still.values()) == {0}
  noisy = measure(2)
  assert noisy['b_variance'] == 0
  assert noisy['also_variance'] == pytest.approx(0.09, rel=0.1)
  assert noisy['also'] != noisy['a']
  # The tolerance is three standard errors of 20,000 numbers.
  assert noisy['a'] == pytest.approx(0, abs=3 * 0.3 / math.sqrt(20_000))
  assert noisy['a_variance'] == pytest.approx(0.09, rel=3 * math.sqrt(2 / 2e4))
  assert measure(2) == noisy
  assert measure(2, jax.random.PRNGKey(1))['a'] != noisy['a']


class Run(experiment.TaskExperiment):
  """Runs a task in the library's loop."""

  def __init__(self, mode, init_rng, task, *, run_config=None):
    super().__init__(mode, init_rng, run_config=run_config)
    self.task = task

  def train_input(self):
    return iter([examples(0), examples(1)])

  eval_input = train_input


def test_a_run_keeps_the_averages():
  run = Run('train', KEY, averaging_task())
  weights = [1.0]
  for step in (0, 1):
    scalars = run.step(global_step=step, rng=KEY, writer=None)
    assert scalars['learning_rate'] == pytest.approx(0.1)
    norm = np.linalg.norm(np.broadcast_to(weights[-1], FEATURES))
    assert scalars['var_norm/line/w'] == pytest.approx(norm)
    weights.append(jax.device_get(run.state.params['line']['w']))
  run.train_feed.close()
  # At step 0 the decay is 0.1, and the average includes the initial weights.
  ema = run.state.model_state['ema']['line']['w']
  np.testing.assert_allclose(ema, 0.15 * weights[0] + 0.85 * weights[1], 1e-5)


def test_evaluation_and_decoding_use_the_averages():
  task = averaging_task()
  state = first_state(task, 1.0, 1.0, 1.0)
  averages = jax.tree.map(lambda x: x + 1, state.params)
  statistics = {'line': {'seen': jnp.float32(7)}}
  model_state = state.model_state | {
    'ema': averages,
    'ema_non_trainable': statistics,
  }
  for is_training, at in ((True, 1), (False, 2)):
    loss, _, _ = task.loss_fn(
      state.params, model_state, examples(0), KEY, is_training
    )
    expected = mse(at * np.ones(FEATURES), at, examples(0))
    assert loss == pytest.approx(expected, rel=1e-5)
  variables, *given = task.decode(
    state.params, model_state, 'batch', KEY, 'options'
  )
  assert given == ['batch', KEY, 'options']
  assert variables == {'params': averages, 'non_trainable': statistics}


def stepped(task, state, rows):
  """Takes a step for each row, (*gradient of w, seen); yields each state."""
  tx = task.make_optimizer()

  @jax.jit
  def step(state, grad, seen):
    grads = {'line': {'w': grad, 'b': jnp.zeros(1)}}
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    seen = seen + state.model_state['non_trainable']['line']['seen']
    statistics = {'non_trainable': {'line': {'seen': seen}}}
    after = dataclasses.replace(
      state,
      step=state.step + 1,
      params=optax.apply_updates(state.params, updates),
      model_state=state.model_state | statistics,
      opt_state=opt_state,
    )
    return dataclasses.replace(
      after, model_state=task.after_update(state, after)
    )

  for *grad, seen in rows:
    with jax.numpy_dtype_promotion('standard'):
      state = step(state, jnp.float32(grad), jnp.float32(seen))
    yield state


def first_state(task, *w):
  params, model_state = init(task)
  params['line']['w'] = jnp.float32(w)
  model_state['ema'] = params
  opt_state = task.make_optimizer().init(params)
  return sharded.TrainState(jnp.int32(0), params, model_state, opt_state)


def averaging_task(**fields):
  task_p = make_task(
    optimizer=optimizers.Sgd.HParams(
      learning_rate=0.1, ema_decay=0.15, **fields
    )
  )
  task_p.train.learner.skip_step_gradient_norm_value = 5.0
  return task_p.Instantiate()


class Falling(schedules.BaseSchedule):
  """Falls from 1 at step 0 to 0.5 at step 10."""

  def value_at(self, step):
    return 1.0 - 0.05 * step


def test_averages_and_skipped_steps_are_praxis():
  """Paxml 1.4.0 (jax 0.4.26, Python 3.10), Learner.update_states.

  ShardedSgd without momentum, learning_rate=0.1 with a Linear schedule from
  (0, 1.0) to (10, 0.5), ema_decay=0.15, skip_step_gradient_norm_value=5.0.
  """
  task = averaging_task(lr_schedule=Falling.HParams())
  rows = (
    ([1, 1], [0.9, -2.1], [1.0, -2.0]),
    # The norm is 5, which is the limit and already too large.
    ([3, 4], [0.9, -2.1], [1.0, -2.0]),
    ([3, 3.9], [0.615, -2.4705], [0.915, -2.085]),
    ([np.nan, 0], [0.615, -2.4705], [0.915, -2.085]),
    ([-2, 1], [0.795, -2.5605], [0.66, -2.412675]),
    ([0, 3], [0.795, -2.8155], [0.77475, -2.5383263]),
  )
  given = ((*grad, 0, 0) for grad, *_ in rows)
  states = stepped(task, first_state(task, 1.0, -2.0, 0.0), given)
  found = [(s.params, s.model_state['ema']) for s in states]
  w_and_ema = [[x['line']['w'][:2] for x in pair] for pair in found]
  np.testing.assert_allclose(w_and_ema, [x for _, *x in rows], rtol=1e-6)


def test_averages_of_statistics_are_praxis():
  """Paxml 1.4.0 (jax 0.4.26, Python 3.10), train_step_single_learner.

  A weight that starts as 1 with the gradient x, and a variable that is not
  trained, to which x is added: ShardedSgd with momentum=0, learning_rate=0.1,
  ema_decay=0.15, skip_step_gradient_norm_value=5.0.
  """
  task = averaging_task()
  rows = (
    (1, 1, 1.0, 0.9),
    (2, 3, 0.915, 2.685),
    (7, 10, 0.915, 2.685),  # Skipped, but the statistics change.
    (3, 13, 0.7322500, 11.4527502),
    (1, 14, 0.4498375, 13.6179123),
  )
  given = ((x, 0, 0, x) for x, *_ in rows)
  states = stepped(task, first_state(task, 1.0, 1.0, 1.0), given)
  found = [
    (
      s.model_state['non_trainable']['line']['seen'],
      s.model_state['ema']['line']['w'][0],
      s.model_state['ema_non_trainable']['line']['seen'],
    )
    for s in states
  ]
  np.testing.assert_allclose(found, [x for _, *x in rows], rtol=1e-6)


class Normalized(Line):
  """Has a layer of each kind that matters for L2, and a stack of vectors."""

  def setup(self):
    super().setup()
    for name, hparams in (
      ('ln', normalizations.LayerNorm.HParams),
      ('rms', normalizations.RmsNorm.HParams),
      ('bn', normalizations.BatchNorm.HParams),
    ):
      self.create_child(name, hparams(dim=2))
    linear = linears.Linear.HParams(input_dims=2, output_dims=2)
    self.create_child('linear', linear)
    bias = linears.Bias.HParams(dims=2)
    stack = repeats.Repeat.HParams(sub_tpl=bias, x_times=3)
    self.create_child('stack', stack)


L2 = optimizers.Sgd.HParams(l2_regularizer_weight=0.1)


@pytest.mark.parametrize(
  ('optimizer', 'matrix', 'vectors', 'layer_norm'),
  [
    (L2, -0.007, -0.007, -0.005),
    (L2.clone().set(skip_lp_1d_vectors=True), -0.007, -0.005, -0.005),
    (optimizers.Adam.HParams(weight_decay=0.1), *[-0.01199998] * 3),
  ],
)
def test_layer_norm_alone_skips_regularization(
  optimizer, matrix, vectors, layer_norm
):
  """Praxis 1.4.0, jax 0.4.26, Python 3.10: the first update of each weight.

  Weights of 2 and gradients of 0.5, a learning rate of 0.01, `get_grad_
  transformation` with the metadata of LayerNorm, RmsNorm, BatchNorm and Linear.
  The stack, and the updates without L2 of vectors, are by hand.
  """
  task = make_task(
    Normalized.HParams(name='n'), optimizer=optimizer.set(learning_rate=0.01)
  ).Instantiate()
  params = jax.tree.map(lambda x: jnp.full_like(x, 2.0), init(task)[0])
  grads = jax.tree.map(lambda x: jnp.full_like(x, 0.5), params)
  tx = task.make_optimizer()
  with jax.numpy_dtype_promotion('standard'):
    updates = jax.jit(lambda p: tx.update(grads, tx.init(p), p)[0])(params)
  expected = {'n/linear': matrix, 'n/ln': layer_norm}
  for module, own in updates.items():
    for x in jax.tree.leaves(own) if module != 'n' else ():
      np.testing.assert_allclose(x, expected.get(module, vectors), rtol=1e-5)
