"""A sharded experiment with faults that a test plants: see `get_config`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxline import base_config
from jaxline import metrics
from jaxline import sharded
from jaxline.inputs import indexed

ROWS = 4


@dataclasses.dataclass(kw_only=True, eq=False)
class Records(indexed.IndexedInput):
  """Rows of a linear regression; one record may be poisoned, some may lack."""

  size: int = 64
  poisoned: int = -1
  missing: tuple[int, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    self.kept = [i for i in range(self.size) if i not in self.missing]

  def num_records(self):
    return len(self.kept)

  def read(self, records, epochs):
    numbers = np.array(self.kept)[records]
    x = np.stack([np.random.default_rng(i).normal(size=3) for i in numbers])
    y = x.sum(1) + 100.0 * (numbers == self.poisoned)
    y = np.stack([y, y + 1e6], 1)  # The second target has no weight.
    found = {'x': x, 'y': y, 'weights': [[1, 0]] * len(x)}
    return {name: np.float32(value) for name, value in found.items()}

  def describe_record(self, record, epoch):
    return f'record {self.kept[record]}'


class Travels(sharded.ShardedExperiment):
  """Linear regression; `get_config` has the faults."""

  def __init__(self, mode, init_rng, config, run_config=None):
    super().__init__(mode, init_rng, run_config=run_config)
    self.config = config
    self.computed = 0

  def init_fn(self, rng):
    return {'w': jnp.zeros(3), 'b': jnp.zeros(())}, {'step': jnp.int32(0)}

  def loss_fn(self, params, model_state, batch, rng, is_training):
    error = (batch['x'] @ params['w'] + params['b'])[:, None] - batch['y']
    here = model_state['step'] == self.config.perturbed - 1
    error = jnp.where(here, error * 1.001, error)
    if self.config.log_of_0:
      error = jnp.log(jnp.maximum(error, 0.0) * 0.0)
    loss = metrics.Mean.of(jnp.square(error), batch['weights'])
    new = {'step': model_state['step'] + jnp.int32(is_training)}
    return loss.compute(), {'loss': loss}, new

  def after_update(self, before, after):
    if not self.config.flips:
      return after.model_state
    step = jax.pure_callback(
      self._flip, jax.ShapeDtypeStruct((), 'int32'), after.model_state['step']
    )
    return {'step': step}

  def _flip(self, step):
    self.computed += 1
    return np.int32(step) ^ np.int32(4 if self.computed == 3 else 0)

  def make_optimizer(self):
    return optax.adam(0.1)

  def train_input(self, shard):
    rows = ROWS // shard.count
    return Records(
      batch_size=rows,
      shard=shard,
      is_training=True,
      shuffle=not self.config.missing and self.config.shuffled,
      poisoned=self.config.poisoned,
      missing=tuple(self.config.missing),
    )

  def eval_input(self, shard):
    return Records(
      batch_size=ROWS // shard.count, shard=shard, reset_for_eval=True
    )


def get_config(directory, **kwargs):
  """Returns a config that logs every step and saves every fourth."""
  config = base_config.get_base_config()
  config.experiment_class = 'tests.experiments.travels:Travels'
  config.checkpoint_dir = str(directory)
  config.training_steps = 12
  config.interval_type = 'steps'
  config.log_train_data_interval = 1
  config.save_checkpoint_interval = 4
  config.eval_interval = -1
  config.console = 'off'
  config.experiment_kwargs.config = {
    'poisoned': -1,  # A record that is far off.
    'missing': (),  # Records that the data lacks.
    'perturbed': -1,  # A step whose loss is computed a little differently.
    'log_of_0': False,  # Whether the loss has one, which is not finite.
    'flips': False,  # Whether the second computation of a step flips a bit.
    'shuffled': True,
  }
  config.experiment_kwargs.config.update(kwargs)
  return config
