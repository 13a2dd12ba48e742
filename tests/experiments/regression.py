"""A sharded experiment for the tests: linear regression with statistics."""

import hashlib
import types

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import optax

from jaxline import base_config
from jaxline import metrics
from jaxline import sharded
from jaxline.parallel import partitioning
from jaxline.parallel import prng
from tests import sources

FEATURES, OUTPUTS = 8, 4
TRUE_W = np.linspace(-1, 1, FEATURES * OUTPUTS, dtype=np.float32)
TRUE_W = TRUE_W.reshape(FEATURES, OUTPUTS)


def examples(seed, rows, first=0):
  """Returns rows [first, first + rows) of an endless data set."""
  # Not centred, so that the statistics matter.
  x = np.stack([
    np.random.default_rng([seed, i]).normal(0.5, 1, FEATURES)
    for i in range(first, first + rows)
  ]).astype(np.float32)  # fmt: skip
  return {'x': x, 'y': x @ TRUE_W}


class Input(sources.Counted):  # Its batches are endless.
  def __init__(self, batch_size):
    super().__init__(end=None)
    self.batch_size = batch_size

  def __next__(self):
    number, _ = super().__next__()['x']
    return examples(0, self.batch_size, number * self.batch_size)


class Scaled(Input):
  """Multiplies the targets of batches, by their number from 0."""

  def __init__(self, batch_size, factors):
    super().__init__(batch_size)
    self.factors = factors

  def __next__(self):
    number = int(self.state['next'])
    batch = super().__next__()
    return {**batch, 'y': batch['y'] * np.float32(self.factors.get(number, 1))}


class Regression(sharded.ShardedExperiment):
  """Linear regression on inputs minus a running mean, with noise as dropout."""

  def __init__(
    self, mode, init_rng, *, eval_sizes=(16, 16, 5), batch_size=16,
    run_config=None, **kwargs,
  ):  # fmt: skip
    super().__init__(mode, init_rng, run_config=run_config, **kwargs)
    # Set only now: the constructor above needs nothing of the subclass.
    self.eval_sizes = eval_sizes
    self.batch_size = batch_size

  def init_fn(self, rng):
    w = 0.1 * jax.random.normal(rng, [FEATURES, OUTPUTS])
    params = {
      'w': partitioning.Logical(w, ('embed', 'mlp')),
      'b': jnp.zeros([OUTPUTS]),
    }
    return params, {'mean': jnp.zeros([FEATURES])}

  def loss_fn(self, params, model_state, batch, rng, is_training):
    x, weights = batch['x'], batch['weights']
    mean = model_state['mean']
    if is_training:
      x = x + 0.1 * jax.random.normal(rng, x.shape)
      mean = 0.9 * mean + 0.1 * x.mean(0)
    y = (x - mean[None]) @ params['w'] + params['b'][None]
    loss = metrics.Mean.of(jnp.square(y - batch['y']).mean(-1), weights)
    rows = metrics.Mean(weights.sum(), jnp.ones([]))
    return loss.compute(), {'loss': loss, 'rows': rows}, {'mean': mean}

  def make_optimizer(self):
    return optax.adam(0.05)

  def train_input(self):
    return Input(self.batch_size)

  def eval_input(self):
    first = 0
    for rows in self.eval_sizes:
      yield examples(1, rows, first)
      first += rows


def expected_evaluation(state, sizes):
  """Returns the evaluation's loss by numpy, in float64, on all rows at once."""
  batch = examples(1, sum(sizes))
  state = jax.tree.map(np.float64, jax.device_get(state))
  w, b = state.params['w'], state.params['b']
  y = (batch['x'] - state.model_state['mean']) @ w + b
  return np.mean((y - batch['y']) ** 2)


def drawn(key, names, batches):
  """Returns what an evaluation draws of its key: a mean for each set's name."""
  for_all, found = prng.stream(key, 'evaluation'), {}
  fold_in = jax.random.fold_in
  for name in names:
    own = prng.stream(for_all, name)
    draws = [jax.random.uniform(fold_in(own, i)) for i in range(batches)]
    found[name] = float(np.mean(draws))
  return found


class Drawing(Regression):
  """Also returns a metric with a draw of each batch of an evaluation."""

  def loss_fn(self, params, model_state, batch, rng, is_training):
    loss, values, new = super().loss_fn(
      params, model_state, batch, rng, is_training
    )
    if not is_training:
      values['draw'] = metrics.Mean(jax.random.uniform(rng), jnp.ones([]))
    return loss, values, new


def digest(tree):
  """Returns the SHA-256 of a tree's bits, for a global array of all of them."""
  sha = hashlib.sha256()
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      x = multihost_utils.process_allgather(x, tiled=True)
    x = np.asarray(x)
    sha.update(f'{jax.tree_util.keystr(path)}{x.dtype}{x.shape}'.encode())
    sha.update(x.tobytes())
  return sha.hexdigest()


def get_config(steps):
  """Returns a config whose periodic actions are off."""
  config = base_config.get_base_config()
  config.training_steps = steps
  config.interval_type = 'steps'
  config.save_checkpoint_interval = -1
  config.log_tensors_interval = -1
  config.log_train_data_interval = -1
  return config


def get_run_config(steps, save, evaluation):
  """Returns a config that logs each step, saves, and keeps the best loss."""
  config = get_config(steps)
  config.log_tensors_interval = config.log_train_data_interval = 1
  config.save_checkpoint_interval = save
  config.eval_interval = evaluation
  config.best_model_eval_metric = 'loss'
  config.best_model_eval_metric_higher_is_better = False
  return config


def train_steps(experiment, steps, seed=1, actions=(), **changes):
  """Runs the experiment's own loop; returns the scalars of each step."""
  rows = []
  state = types.SimpleNamespace(global_step=int(experiment.state.step))
  state.train_step_rng = experiment.initialize_train_step_rng(
    jax.random.PRNGKey(seed)
  )
  config = get_config(state.global_step + steps)
  config.update(changes)
  experiment.on_nonfinite = config.on_nonfinite or experiment.on_nonfinite
  experiment.train_loop(
    config,
    state,
    [*actions, lambda t, step, scalars: rows.append(jax.device_get(scalars))],
  )
  return rows


def evaluate(experiment, seed=2):
  """Evaluates as the loops do."""
  inputs = experiment.evaluate_inputs(get_config(0), jax.random.PRNGKey(seed))
  global_step, rng = inputs(int(experiment.state.step))
  return experiment.evaluate(global_step=global_step, rng=rng, writer=None)
