"""Tests of tasks: losses, metrics, noise, averages, and when training ends."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pax import base_layer
from examples.pax import experiment
from examples.pax import layers
from examples.pax import learners
from examples.pax import models
from examples.pax import optimizers
from examples.pax import schedules
from examples.pax import tasks
from examples.pax.layers import linears
from examples.pax.layers import normalizations
from jaxline import base_config
from jaxline import sharded
from jaxline.parallel import partitioning

WeightHParams = base_layer.WeightHParams
WeightInit = base_layer.WeightInit
SKIP = base_layer.WeightHParamsCollection.SKIP_LP_REGULARIZATION

KEY = jax.random.PRNGKey(0)
FEATURES = 3


class Line(models.BaseModel):
  """Least squares: the weighted mean of (x w + b - y)^2."""

  def setup(self):
    one = WeightInit.Constant(1.0)
    self.create_variable('w', WeightHParams((FEATURES,), init=one))
    self.create_variable(
      'b', WeightHParams((1,), init=one, collections=(SKIP,))
    )
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


class Slope(models.BaseModel):
  """Has a gradient of 0, and metrics that show the noise on its weights."""

  def setup(self):
    weight = WeightHParams((200, 100), init=WeightInit.Constant(1.0))
    for name in ('a', 'also', 'b'):
      self.create_variable(name, weight)

  def compute_predictions(self, batch):
    del batch
    return {name: self.get_var(name) for name in ('a', 'also', 'b')}

  def compute_loss(self, predictions, batch):
    one = jnp.float32(1)
    metrics = {'total_loss': (0 * predictions['a'].sum(), one)}
    for name, x in predictions.items():
      metrics[f'{name}_mean'] = (x.mean(), one)
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


class Run(experiment.TaskExperiment):
  """Runs a task in the library's loop."""

  def __init__(self, mode, init_rng, task, *, run_config=None):
    super().__init__(mode, init_rng, run_config=run_config)
    self.task = task.Instantiate()

  def train_input(self):
    step = 0
    while True:
      yield examples(step)
      step += 1

  def eval_input(self):
    return [examples(100)]


# Losses and metrics.


def test_loss_metrics_and_state():
  task = make_task().Instantiate()
  params, state = init(task)
  batch = jax.tree.map(jnp.asarray, examples(0))
  w, b = np.ones(FEATURES), 1.0
  run = jax.jit(task.loss_fn, static_argnums=4)
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


def test_accumulated_steps_are_exact():
  config = base_config.get_base_config()
  # Each part has two rows, whose weights differ.
  config.gradient_accumulation_steps = 4
  run = Run('train', KEY, make_task(), run_config=config)
  scalars = run.step(global_step=0, rng=KEY, writer=None)
  run.train_feed.close()
  batch, weights = examples(0), examples(0)['weights']
  error = error_of(np.ones(FEATURES), 1.0, batch)
  gradient = 2 * (error * weights) @ batch['x'] / weights.sum()
  np.testing.assert_allclose(
    run.state.params['line']['w'], 1 - 0.1 * gradient, rtol=1e-5
  )
  assert scalars['total_loss'] == pytest.approx(
    mse(np.ones(FEATURES), 1.0, batch), rel=1e-5
  )


def test_several_losses():
  aggregator = tasks.MultiLossAggregator.HParams(
    loss_keys=('total_loss', 'size'), loss_weights=(2.0, 0.5)
  )
  metrics = tasks.MeanMetrics.HParams(metric_keys=('size',))
  task = make_task(
    loss_aggregator=aggregator, metrics=metrics, train={'summary_verbosity': 0}
  ).Instantiate()
  params, state = init(task)
  batch = jax.tree.map(jnp.asarray, examples(0))
  loss, means, _ = jax.jit(task.loss_fn, static_argnums=4)(
    params, state, batch, KEY, True
  )
  expected = 2 * mse(np.ones(FEATURES), 1.0, batch) + 0.5 * FEATURES
  assert loss == pytest.approx(expected, rel=1e-5)
  assert means.keys() == {'size', 'loss'}
  assert means['loss'].compute() == loss


def test_the_learner_may_name_the_loss():
  optimizer = optimizers.Sgd.HParams(learning_rate=0.1)
  learner = learners.Learner.HParams(optimizer=optimizer, loss_name='size')
  task = make_task(learner=learner).Instantiate()
  loss, _, _ = task.loss_fn(*init(task), examples(0), KEY, False)
  assert loss == FEATURES
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
      {'loss_aggregator': tasks.LossAggregator.HParams(loss_key='loss')},
      "loss_key is 'loss', but the model has no metric",
    ),
    (
      {
        'loss_aggregator': tasks.MultiLossAggregator.HParams(
          loss_keys=['a', 'b'], loss_weights=[1.0]
        )
      },
      'expects at least one of loss_keys, and as many',
    ),
    (
      {'learner': [learners.Learner.HParams()] * 2},
      'must set a name, an optimizer and bprop_variable_inclusion',
    ),
    (
      {'metrics': tasks.LossAggregator.HParams()},
      'SingleTask.metrics is .*; expected .* of a base_task.MeanMetrics',
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
  task = make_task(Slope.HParams(name='slope'), vn=vn).Instantiate()
  params, state = init(task)
  run = jax.jit(task.loss_fn, static_argnums=4)

  def measure(state, key, is_training):
    _, metrics, _ = run(params, state, {}, key, is_training)
    return {name: float(m.compute()) for name, m in metrics.items()}

  still = {'total_loss': 0} | {
    f'{name}_{what}': value
    for name in ('a', 'also', 'b')
    for what, value in (('mean', 1), ('variance', 0))
  }
  assert measure(state, KEY, True) == still

  # The noise begins in the third step, after two are done.
  def after(steps):
    made = sharded.TrainState(jnp.int32(steps), params, state, ())
    return task.after_update(made, made)

  state = after(1)
  assert measure(state, KEY, True) == still
  state = after(2)
  assert measure(state, KEY, False) == still
  noisy = measure(state, KEY, True)
  assert noisy['b_variance'] == 0
  assert noisy['also_variance'] == pytest.approx(0.09, rel=0.1)
  assert noisy['also_mean'] != noisy['a_mean']
  # The tolerance is three standard errors of 20,000 numbers.
  assert noisy['a_mean'] == pytest.approx(1, abs=3 * 0.3 / math.sqrt(20_000))
  assert noisy['a_variance'] == pytest.approx(0.09, rel=3 * math.sqrt(2 / 2e4))
  assert measure(state, KEY, True) == noisy
  other = measure(state, jax.random.PRNGKey(1), True)
  assert other['a_mean'] != noisy['a_mean']


def test_moving_average_in_a_run():
  optimizer = optimizers.Sgd.HParams(learning_rate=0.1, ema_decay=0.15)
  run = Run('train', KEY, make_task(optimizer=optimizer))
  w, b = np.ones(FEATURES), 1.0
  ema = w
  for step in range(3):
    run.step(global_step=step, rng=KEY, writer=None)
    batch = examples(step)
    weights = np.float64(batch['weights']) / batch['weights'].sum()
    error = 2 * error_of(w, b, batch) * weights
    before = w
    w, b = w - 0.1 * error @ batch['x'], b - 0.1 * error.sum()
    # At first the average forgets faster: (1 + step) / (10 + step).
    # It includes the weights from before the step.
    decay = (0.1, 0.15, 0.15)[step]
    ema = decay * ema + (1 - decay) * before
  run.train_feed.close()
  state = jax.device_get(run.state)
  np.testing.assert_allclose(state.params['line']['w'], w, rtol=1e-4)
  np.testing.assert_allclose(state.model_state['ema']['line']['w'], ema, 1e-4)
  assert state.model_state['non_trainable']['line']['seen'] == 24
  # Evaluation and decoding use the average.
  only = {'line': {'w': ema, 'b': state.model_state['ema']['line']['b']}}
  loss, _, _ = run.task.loss_fn(
    state.params, state.model_state, examples(100), KEY, False
  )
  expected = mse(ema, only['line']['b'], examples(100))
  assert loss == pytest.approx(expected, rel=1e-4)
  variables, *given = run.task.decode(
    state.params, state.model_state, 'batch', KEY, 'options'
  )
  assert given == ['batch', KEY, 'options']
  assert variables['params'] is state.model_state['ema']
  averages = state.model_state['ema_non_trainable']
  assert variables['non_trainable'] is averages
  # The steps have seen 8, 16 and 24 rows.
  seen = 0.85 * 24 + 0.15 * (0.85 * 16 + 0.15 * (0.9 * 8))
  assert averages['line']['seen'] == pytest.approx(seen, rel=1e-6)


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
  for state, (_, w, ema) in zip(states, rows, strict=True):
    np.testing.assert_allclose(state.params['line']['w'][:2], w, rtol=1e-6)
    average = state.model_state['ema']['line']['w']
    np.testing.assert_allclose(average[:2], ema, rtol=1e-6)


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
  for state, (_, seen, ema_of_w, ema_of_seen) in zip(states, rows, strict=True):
    now = state.model_state
    assert now['non_trainable']['line']['seen'] == seen
    w = now['ema']['line']['w'][0]
    assert w == pytest.approx(ema_of_w, rel=1e-6)
    average = now['ema_non_trainable']['line']['seen']
    assert average == pytest.approx(ema_of_seen, rel=1e-6)


class Normalized(Line):
  """Has a layer of each kind that matters for weight decay."""

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


@pytest.mark.parametrize(
  ('optimizer', 'usual', 'layer_norms'),
  [
    (optimizers.Sgd.HParams(decoupled_weight_decay=0.1), -0.007, -0.005),
    (optimizers.Sgd.HParams(l2_regularizer_weight=0.1), -0.007, -0.005),
    (
      optimizers.Adam.HParams(decoupled_weight_decay=0.1),
      -0.01199998,
      -0.00999998,
    ),
    (optimizers.Adam.HParams(weight_decay=0.1), -0.01199998, -0.01199998),
  ],
)
def test_layer_norm_alone_skips_regularization(optimizer, usual, layer_norms):
  """Praxis 1.4.0, jax 0.4.26, Python 3.10: the first update of each weight.

  Weights of 2 and gradients of 0.5, a learning rate of 0.01, `get_grad_
  transformation` with the metadata of LayerNorm, RmsNorm, BatchNorm and Linear.
  """
  task = make_task(
    Normalized.HParams(name='n'), optimizer=optimizer.set(learning_rate=0.01)
  ).Instantiate()
  params = jax.tree.map(lambda x: jnp.full_like(x, 2.0), init(task)[0])
  grads = jax.tree.map(lambda x: jnp.full_like(x, 0.5), params)
  tx = task.make_optimizer()
  with jax.numpy_dtype_promotion('standard'):
    updates = jax.jit(lambda p: tx.update(grads, tx.init(p), p)[0])(params)
  seen = {
    f'{module}/{name}': float(np.ravel(x)[0])
    for module, own in updates.items()
    for name, x in own.items()
    if module != 'n'
  }
  assert seen == pytest.approx(
    {
      'n/ln/scale': layer_norms,
      'n/ln/bias': layer_norms,
      'n/rms/scale': usual,
      'n/bn/gamma': usual,
      'n/bn/beta': usual,
      'n/linear/w': usual,
    },
    rel=1e-5,
  )


class Deep(Line):
  """Has a stack of stacks of layers."""

  def setup(self):
    super().setup()
    linear = linears.Linear.HParams(input_dims=2, output_dims=2)
    repeat = layers.Repeat.HParams
    self.create_child('one', repeat(sub_tpl=linear, x_times=3))
    self.create_child('two', repeat(sub_tpl=Column.HParams(), x_times=4))


class Column(base_layer.BaseLayer):
  """Has a stack of layers."""

  def setup(self):
    linear = linears.Linear.HParams(input_dims=2, output_dims=2)
    rows = layers.Repeat.HParams(sub_tpl=linear, x_times=3)
    self.create_child('rows', rows)


def test_optimizers_hear_of_stacks():
  task = make_task(Deep.HParams(name='deep')).Instantiate()
  heard = []
  task.learner.make = lambda **told: heard.append(told)
  task.make_optimizer()
  depth = heard[0]['num_stacked']
  assert {name: depth(name) for name in task.weights} == {
    'deep/w': 0,
    'deep/b': 0,
    'deep/one/sub/w': 1,
    'deep/two/sub/rows/sub/w': 2,
  }


def test_step_scalars():
  task = make_task().Instantiate()
  params, model_state = init(task)
  opt_state = task.make_optimizer().init(params)
  grads = {'line': {'w': jnp.float32([0, 3, 4]), 'b': jnp.float32([12])}}
  scalars = task.step_scalars(
    sharded.TrainState(jnp.int32(0), params, model_state, opt_state),
    grads,
    grads,
  )
  assert scalars == pytest.approx(
    {
      'learning_rate': 0.1,
      'is_valid_step': 1,
      'grad_norm': 13,
      'clipped_grad_norm': 13,
      'applied_grad_norm': 13,
      'var_norm/line/w': math.sqrt(3),
      'var_norm/line/b': 1,
    }
  )
  quiet = make_task(train={'variable_norm_summary': False}).Instantiate()
  assert set(scalars) - set(
    quiet.step_scalars(
      sharded.TrainState(jnp.int32(0), params, model_state, opt_state),
      grads,
      grads,
    )
  ) == {'var_norm/line/w', 'var_norm/line/b'}


def test_fields_of_the_documents():
  task = tasks.SingleTask.HParams()
  assert task.train.learner.name == 'learner'
  defaults = {
    'num_train_steps': 10_000_000,
    'save_interval_steps': 5000,
    'save_max_to_keep': 10,
    'summary_interval_steps': 100,
    'eval_interval_steps': 100,
    'async_summary_writing': True,
    'variable_norm_summary': True,
    'random_seed': 1234,
    'init_from_checkpoint_rules': {},
  }
  assert dict(task.train.items()).items() >= defaults.items()
  assert set(task.names()) == {
    *('name', 'model', 'train', 'metrics', 'loss_aggregator', 'vn'),
  }
