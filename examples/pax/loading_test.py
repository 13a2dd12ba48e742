"""Tests of the loading rules on the checkpoints of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax import base_layer
from examples.pax import config as config_lib
from examples.pax import experiment as experiment_lib
from examples.pax import learners
from examples.pax import loading
from examples.pax import models
from examples.pax import optimizers
from examples.pax import tasks
from examples.pax.layers import linears
from examples.pax.tasks.lm.params import lm_cloud
from jaxline import base_config
from jaxline import errors
from jaxline import train
from jaxline.base import trees
from jaxline.checkpoint import durable
from jaxline.checkpoint import inspection

Rules = loading.CheckpointLoadingRules
WIDTH = 4


class Net(models.BaseModel):
  """Two layers and a count of rows."""

  def setup(self):
    layer = linears.Linear.HParams(input_dims=WIDTH, output_dims=WIDTH)
    self.create_child('first', layer)
    self.create_child('second', layer)
    zero = base_layer.WeightInit.Constant(0.0)
    rows = base_layer.WeightHParams((), init=zero)
    self.create_variable('rows', rows, trainable=False)

  def compute_predictions(self, batch):
    return {'y': self.second(self.first(batch['x']))}

  def compute_loss(self, predictions, batch):
    if not self.do_eval:
      self.update_var('rows', self.theta.rows + len(batch['x']))
    error = (predictions['y'] - 1.0) ** 2
    return {'total_loss': (error.mean(), jnp.float32(1))}, {}


class Run(experiment_lib.TaskExperiment):
  """Trains a `Net`."""

  def __init__(self, mode, init_rng, *, run_config=None):
    super().__init__(mode, init_rng, run_config=run_config)
    adam = optimizers.Adam.HParams(learning_rate=0.1, ema_decay=0.5)
    self.task = tasks.SingleTask.HParams(
      model=Net.HParams(name='net'),
      train=tasks.TrainHParams(
        learner=learners.Learner.HParams(optimizer=adam)
      ),
    ).Instantiate()

  def train_input(self):
    rng = np.random.default_rng(0)
    while True:
      yield {'x': rng.normal(size=[2, WIDTH]).astype(np.float32)}

  def eval_input(self):
    raise NotImplementedError


def run(directory, steps, seed=0, rules=None):
  """Trains; returns name -> array of the state."""
  config = base_config.get_base_config()
  config.checkpoint_dir = str(directory)
  config.training_steps = steps
  config.random_seed = seed
  config.interval_type = 'steps'
  config.save_checkpoint_interval = 1
  config.log_tensors_interval = config.log_train_data_interval = -1
  config.sharding = 'fsdp'
  if rules is not None:
    config.restore_from, config.restore_rules = loading.restore_keys(rules)
  base_config.validate_config(config)
  made = []

  def make(mode, init_rng, run_config):
    made.append(Run(mode, init_rng, run_config=run_config))
    return made[0]

  checkpointer = durable.DurableCheckpointer(config, 'train')
  try:
    train.train(make, config, checkpointer, None)
  finally:
    checkpointer.close()
  return trees.named_leaves(jax.device_get(made[0].state))


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  """The directory of a run of two steps."""
  directory = tmp_path_factory.mktemp('runs') / 'source'
  run(directory, 2)
  return str(directory)


@pytest.fixture(scope='module')
def initial(tmp_path_factory):
  """The initial state of a run without rules."""
  return run(tmp_path_factory.mktemp('initial'), 0, seed=1)


FIRST, SECOND = 'params/net/first/w', 'params/net/second/w'
ROWS = 'model_state/non_trainable/net/rows'
EMA_FIRST, EMA_SECOND = (
  f'model_state/ema/net/{x}/w' for x in ('first', 'second')
)
EMA_ROWS = ROWS.replace('/', '/ema_', 1)
ALL = ('params/(.*)', 'params/{}')


@pytest.mark.parametrize(
  ('rules', 'expected'),
  [
    # A weight is loaded, and its average starts with the same value.
    (
      {'load_rules': [ALL]},
      {FIRST: FIRST, SECOND: SECOND, EMA_FIRST: FIRST, EMA_SECOND: SECOND},
    ),
    # The first match applies. Groups are numbered, or written as in Python.
    (
      {
        'load_rules': [
          ('params/(.*)first/(.)', 'params/{0}second/{1}'),
          ('params/(.*)', r'params/\1'),
        ],
        'safe_load': True,
      },
      {FIRST: SECOND, SECOND: SECOND, EMA_FIRST: SECOND, EMA_SECOND: SECOND},
    ),
    (
      {'load_rules': [('non_trainable/(.*)', 'non_trainable/{}')]},
      {ROWS: ROWS, EMA_ROWS: ROWS},
    ),
    # An expression matches the start of a name.
    (
      {'load_rules': [('params/net/f', FIRST)]},
      {FIRST: FIRST, EMA_FIRST: FIRST},
    ),
    # Ignored variables keep their initial values.
    (
      {'load_rules': [ALL], 'ignore_rules': ['.*/first']},
      {SECOND: SECOND, EMA_SECOND: SECOND},
    ),
    (
      {'load_rules': [ALL], 'ignore_rules': ['params/net/f|params']},
      {SECOND: SECOND, EMA_SECOND: SECOND},
    ),
    # Averages are sources, too.
    (
      {
        'load_rules': [
          ('params/(.*)', 'ema/params/{}'),
          ('non_trainable/(.*)', 'ema/non_trainable/{}'),
        ]
      },
      {
        **{FIRST: EMA_FIRST, SECOND: EMA_SECOND, ROWS: EMA_ROWS},
        **{x: x for x in (EMA_FIRST, EMA_SECOND, EMA_ROWS)},
      },
    ),
    (
      {'load_rules': [(FIRST, FIRST)], 'step': 1},
      {FIRST: FIRST, EMA_FIRST: FIRST},
    ),
  ],
)
def test_a_run_begins_with_what_rules_load(
  source, initial, tmp_path, rules, expected
):
  state = run(tmp_path, 0, seed=1, rules={source: Rules(**rules)})
  found = inspection.find(f'{source}:{rules.get("step", 2)}').arrays('state/.*')
  for name, x in state.items():
    loaded = name in expected
    wanted = found[f'state/{expected[name]}'] if loaded else initial[name]
    np.testing.assert_array_equal(x, wanted, err_msg=name)
    if loaded and x.ndim:
      assert (x != initial[name]).any()
  assert expected.keys() <= state.keys()


@pytest.mark.parametrize(
  ('rules', 'message'),
  [
    ([('params/net/frist/w', FIRST)], 'params/net/first/w'),
    ([('params/net/f$', FIRST)], 'match no array'),
    # An earlier rule takes the variable.
    ([(FIRST, FIRST), (FIRST, SECOND)], 'params/net/second|earlier rule'),
    ([(FIRST, 'params/net/frist/w')], 'params/net/frist/w'),
    ([('params/(', FIRST)], 'unterminated'),
    ([('params/net/(.*)', 'params/{}/{}')], 'group reference 2'),
    ([('non_trainable/.*', FIRST)], r'float32\[4, 4\].* float32\[\]'),
    ([('net', FIRST)], "'net'; expected an expression that begins"),
    ([('.*net', FIRST)], "'.*net'; expected an expression that begins"),
    ([('params/a|params/b', FIRST)], 'contains it only once'),
  ],
)
def test_errors(source, tmp_path, rules, message):
  with pytest.raises(ValueError, match=message):
    run(tmp_path, 0, rules={source: Rules(load_rules=rules)})


def test_what_the_keys_of_a_run_cannot_say():
  with pytest.raises(errors.UsageError, match=r"\['a', 'b'\]; expected one"):
    loading.restore_keys({'a': Rules(), 'b': Rules()})
  with pytest.raises(errors.UsageError, match='safe_load is False'):
    loading.restore_keys({'a': Rules(safe_load=False)})
  with pytest.raises(AttributeError, match=r'load_step.*Missing'):
    Rules(load_step=True)


def test_an_experiments_rules_are_keys_of_its_config(monkeypatch):
  class Tuned(lm_cloud.LmCloudSpmd2BLimitSteps):
    def task(self):
      task = super().task()
      rules = Rules(load_rules=[ALL], step=7)
      task.train.init_from_checkpoint_rules = {'runs/a': rules}
      return task

  monkeypatch.setattr(config_lib, '_find', lambda *unused: Tuned)
  config = config_lib.get_config('Tuned')
  base_config.validate_config(config)
  assert config.restore_from == 'runs/a:7'
  assert config.restore_rules == (
    ('state/(?:params|model_state/ema)/(?:(.*)).*', r'state/params/\g<1>'),
  )
