"""Tests of Flax modules as layers: their values, and a resumed run."""

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from examples.pax import experiment as experiment_lib
from examples.pax import learners
from examples.pax import models
from examples.pax import optimizers
from examples.pax import tasks
from examples.pax.layers import flax_modules
import jaxline
from jaxline import base_config

FlaxModule = flax_modules.FlaxModule
INPUTS = (jax.ShapeDtypeStruct((1, 3), jnp.float32),)
KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=[4, 3]).astype(np.float32)


class Net(nn.Module):
  """Has weights, statistics and dropout."""

  @nn.compact
  def __call__(self, x, train=False):
    x = nn.Dense(5)(x)
    x = nn.BatchNorm(use_running_average=not train)(x)
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return nn.Dense(2)(x)


def made(factory, **fields):
  return FlaxModule.HParams(
    module_factory_method=factory, inputs=INPUTS, **fields
  ).Instantiate()


def test_a_layer_computes_what_its_module_does():
  layer = made(Net, train_argument='train')
  variables = jax.jit(layer.init)(KEY)
  own = variables['params']['flax_module']
  assert own['Dense_0.kernel'].shape == (3, 5)
  assert own['Dense_0.kernel'].std() > 0.1  # Flax's default is LeCun.
  assert (own['Dense_0.bias'] == 0).all()
  assert layer.num_params() == 20 + 10 + 12
  theirs = {'params': {}, 'batch_stats': {'BatchNorm_0': {}}}
  for name, x in own.items():
    part, _, leaf = name.partition('.')
    theirs['params'].setdefault(part, {})[leaf] = x
  for name, x in variables['non_trainable']['flax_module'].items():
    theirs['batch_stats']['BatchNorm_0'][name.rpartition('.')[2]] = x
  np.testing.assert_allclose(
    layer.apply(variables, X, do_eval=True), Net().apply(theirs, X), atol=1e-6
  )
  # In training, it drops entries and updates its statistics.
  train = jax.jit(lambda rng: layer.apply(variables, X, rng=rng, mutable=True))
  (out, collected), (other, _) = map(train, (KEY, jax.random.key(1)))
  assert (out != other).any()
  mean = collected.non_trainable['flax_module']['batch_stats.BatchNorm_0.mean']
  hidden = X @ own['Dense_0.kernel']
  np.testing.assert_allclose(mean, 0.01 * hidden.mean(0), atol=1e-5)


def test_a_module_of_nnx():
  layer = made(lambda: nnx.bridge.ToLinen(nnx.Linear, (3, 4)))
  variables = layer.init(KEY)
  w = variables['params']['flax_module']['kernel']
  np.testing.assert_allclose(layer.apply(variables, X), X @ w, atol=1e-6)


class Model(models.BaseModel):
  """Predicts the sum of its inputs."""

  def setup(self):
    net = FlaxModule.HParams(
      module_factory_method=Net, inputs=INPUTS, train_argument='train'
    )
    self.create_child('net', net)

  def compute_predictions(self, batch):
    return {'y': self.net(batch['x'])[:, 0]}

  def compute_loss(self, predictions, batch):
    error = (predictions['y'] - batch['x'].sum(axis=1)) ** 2
    return {'total_loss': (error.mean(), jnp.float32(1))}, {}


class Run(experiment_lib.TaskExperiment):
  """Trains a `Model`."""

  def __init__(self, mode, init_rng, *, run_config=None):
    super().__init__(mode, init_rng, run_config=run_config)
    task = tasks.SingleTask.HParams(model=Model.HParams(name='model'))
    task.train.learner = learners.Learner.HParams(
      optimizer=optimizers.Adam.HParams(learning_rate=0.01)
    )
    self.task = task.Instantiate()

  def train_input(self):
    while True:
      yield {'x': X}

  eval_input = train_input


def run(directory, steps):
  """Trains; returns the state."""
  config = base_config.get_base_config()
  config.update(
    checkpoint_dir=str(directory),
    training_steps=steps,
    interval_type='steps',
    save_checkpoint_interval=1,
  )
  return jaxline.fit(Run, config, mode='train').experiment.state


def test_a_run_is_resumed_with_the_same_bits(tmp_path):
  whole = run(tmp_path / 'whole', 4)
  run(tmp_path / 'parts', 2)
  resumed = run(tmp_path / 'parts', 4)
  assert whole.step == 4
  jax.tree.map(np.testing.assert_array_equal, resumed, whole)
  statistics = whole.model_state['non_trainable']['model/net']
  assert (statistics['batch_stats.BatchNorm_0.mean'] != 0).all()
