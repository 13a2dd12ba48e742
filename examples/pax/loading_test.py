"""Tests of the loading rules, on checkpoints that a run has saved."""

import functools
import logging
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax import base_layer
from examples.pax import experiment as experiment_lib
from examples.pax import learners
from examples.pax import loading
from examples.pax import models
from examples.pax import optimizers
from examples.pax import tasks
from examples.pax.layers import linears
from jaxline import base_config
from jaxline import errors
from jaxline import train
from jaxline.base import trees
from jaxline.checkpoint import durable
from jaxline.checkpoint import inspection
from jaxline.run_directory import store

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
  """Trains it."""

  def __init__(
    self, mode, init_rng, ema_decay=0.5, rules=None, *, run_config=None
  ):
    super().__init__(mode, init_rng, run_config=run_config)
    adam = optimizers.Adam.HParams(learning_rate=0.1, ema_decay=ema_decay)
    self.task = tasks.SingleTask.HParams(
      model=Net.HParams(name='net'),
      train=tasks.TrainHParams(
        learner=learners.Learner.HParams(optimizer=adam),
        init_from_checkpoint_rules=rules or {},
      ),
    ).Instantiate()

  def train_input(self):
    rng = np.random.default_rng(0)
    while True:
      yield {'x': rng.normal(size=[2, WIDTH]).astype(np.float32)}

  def eval_input(self):
    raise NotImplementedError


def run(directory, steps, seed=0, **kwargs):
  """Trains; returns the experiment."""
  config = base_config.get_base_config()
  config.checkpoint_dir = str(directory)
  config.training_steps = steps
  config.random_seed = seed
  config.interval_type = 'steps'
  config.save_checkpoint_interval = 1
  config.log_tensors_interval = config.log_train_data_interval = -1
  config.sharding = 'fsdp'
  made = []

  def make(mode, init_rng, run_config):
    made.append(Run(mode, init_rng, run_config=run_config, **kwargs))
    return made[0]

  checkpointer = durable.DurableCheckpointer(config, 'train')
  try:
    train.train(make, config, checkpointer, None)
  finally:
    checkpointer.close()
  return made[0]


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  """The directory of a run of two steps."""
  directory = tmp_path_factory.mktemp('runs') / 'source'
  run(directory, 2)
  return str(directory)


@functools.cache
def new_state(**kwargs):
  """The state of a run that begins, cut over two devices."""
  config = base_config.get_base_config()
  config.sharding = 'fsdp'
  key = jax.random.PRNGKey(1)
  return Run('train', key, run_config=config, **kwargs).state


def saved(source, step=2):
  """Returns name -> array of the source, as `export` reads it."""
  arrays = inspection.find(f'{source}:{step}').arrays('state/.*')
  return {n.removeprefix('state/'): x for n, x in arrays.items()}


def named(state):
  return trees.named_leaves(jax.device_get(state))


def check(state, expected, old):
  """Compares with the source's arrays; all others must be the old ones."""
  got, old = named(state), named(old)
  for name, x in got.items():
    wanted = expected.get(name, old[name])
    np.testing.assert_array_equal(x, wanted, err_msg=name)
  assert expected.keys() <= got.keys()


FIRST, SECOND = 'params/net/first/w', 'params/net/second/w'
ROWS = 'model_state/non_trainable/net/rows'
EMA = 'model_state/ema/net/{}/w'


@pytest.mark.parametrize(
  ('load_rules', 'sources'),
  [
    # All of it, and by name; the other way round; both from one.
    ([('params/(.*)', 'params/{}')], {FIRST: FIRST, SECOND: SECOND}),
    (
      [
        ('params/(.*)first/w', 'params/{0}second/w'),
        ('params/(.*)', r'params/\1'),
      ],
      {FIRST: SECOND, SECOND: SECOND},
    ),
    ([('non_trainable/(.*)', 'non_trainable/{}')], {ROWS: ROWS}),
  ],
)
def test_load_rules(source, load_rules, sources):
  old = new_state()
  state = loading.load(old, {source: Rules(load_rules=load_rules)})
  arrays = saved(source)
  expected = {name: arrays[s] for name, s in sources.items()}
  for name in ('first', 'second'):  # The average begins as the weights.
    if (weight := f'params/net/{name}/w') in expected:
      expected[EMA.format(name)] = expected[weight]
  if ROWS in expected:
    expected[ROWS.replace('/', '/ema_', 1)] = expected[ROWS]
  check(state, expected, old)
  assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(
    lambda x: x.sharding, old
  )
  assert not state.params['net/first']['w'].sharding.is_fully_replicated


def test_ignored_variables_stay(source):
  rules = Rules(
    load_rules=[('params/(.*)', 'params/{}')], ignore_rules=['.*/first/.*']
  )
  state = loading.load(new_state(), {source: rules})
  expected = dict.fromkeys(
    (SECOND, EMA.format('second')), saved(source)[SECOND]
  )
  check(state, expected, new_state())


def test_averages_of_what_is_not_trained(source):
  rules = Rules(
    load_rules=[('non_trainable/(.*)', 'non_trainable/{}')],
    load_opt_states=True,
  )
  state = loading.load(new_state(), {source: rules})
  arrays = saved(source)
  average = ROWS.replace('/', '/ema_', 1)
  assert arrays[average] != arrays[ROWS]
  expected = {
    n: x
    for n, x in arrays.items()
    if n in (ROWS, average) or n.endswith('/count')
  }
  check(state, expected, new_state())


def test_states_of_the_optimizer_averages_and_the_step(source):
  rules = Rules(
    load_rules=[('params/net/first/(.*)', 'params/net/first/{}')],
    load_opt_states=True,
    load_step=True,
  )
  state = loading.load(new_state(), {source: rules})
  expected = {
    name: x
    for name, x in saved(source).items()
    if name in (FIRST, EMA.format('first'), 'step')
    # Moments of the weight, and counts of steps; not the other's moments.
    or (name.startswith('opt_state/') and 'second' not in name)
  }
  assert expected['step'] == 2
  moments = [name for name in expected if name.endswith('net/first/w')]
  assert len(moments) == 4  # Weight, average, and Adam's two.
  assert [x for n, x in expected.items() if n.endswith('/count')] == [2, 2]
  check(state, expected, new_state())


def test_averages_begin_as_the_weights_without_the_optimizer_state(source):
  assert Rules().load_ema_states
  arrays = saved(source)
  for rules in (Rules(), Rules(load_opt_states=True, load_ema_states=False)):
    rules.load_rules = [(FIRST, FIRST)]
    state = loading.load(new_state(), {source: rules})
    loaded = state.model_state['ema']['net/first']['w']
    np.testing.assert_array_equal(loaded, arrays[FIRST])
    assert (loaded != arrays[EMA.format('first')]).any()


def test_sources_that_are_averages(source):
  rules = Rules(
    load_rules=[
      ('params/(.*)', 'ema/params/{}'),
      ('non_trainable/(.*)', 'ema/non_trainable/{}'),
    ]
  )
  arrays = saved(source)
  assert (arrays[EMA.format('first')] != arrays[FIRST]).any()
  rows = arrays[ROWS.replace('/', '/ema_', 1)]
  expected = {ROWS: rows, ROWS.replace('/', '/ema_', 1): rows}
  for name in ('first', 'second'):
    average = arrays[EMA.format(name)]
    expected |= {f'params/net/{name}/w': average, EMA.format(name): average}
  check(loading.load(new_state(), {source: rules}), expected, new_state())
  rules.load_ema_states = False
  with pytest.raises(errors.UsageError, match='load_ema_states'):
    loading.load(new_state(), {source: rules})


@pytest.mark.parametrize(
  ('load_rule', 'ignore_rules', 'loaded'),
  [
    # As `re.match` does: from the start of a name, but not to its end.
    ('params', [], [FIRST, SECOND]),
    ('params/net/f', [], [FIRST]),
    ('params/net/f$', [], None),
    ('net', [], None),
    ('.*net', ['.*second'], [FIRST, 'non_trainable/net/rows']),
    ('params/net', ['.*first/w', 'params/net/second$'], [SECOND]),
    ('params/net', ['second'], [FIRST, SECOND]),
    ('params/net', ['params'], None),
  ],
)
def test_regular_expressions_match_a_prefix(load_rule, ignore_rules, loaded):
  live = named(new_state(ema_decay=0.0))
  rules = Rules(load_rules=[(load_rule, FIRST)], ignore_rules=ignore_rules)
  if loaded is None:
    with pytest.raises(errors.UsageError):
      loading._sources(live, rules, 'rules')
    return
  sources = loading._sources(live, rules, 'rules')
  assert [n.removeprefix('model_state/') for n in sources] == loaded
  assert set(sources.values()) == {FIRST}


@pytest.mark.parametrize(
  'unused',
  [
    {'ignore_rules': ['softmax']},
    {'load_rules': [(FIRST, FIRST), ('params/lm', FIRST)]},
  ],
)
def test_an_unused_rule_is_said(source, caplog, unused):
  rules = Rules(**{'load_rules': [(FIRST, FIRST)]} | unused)
  loading.load(new_state(), {source: rules})
  (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
  name = 'softmax' if 'ignore_rules' in unused else 'params/lm'
  assert repr([name]) in record.getMessage()
  rules.safe_load = True
  with pytest.raises(errors.UsageError, match=name):
    loading.load(new_state(), {source: rules})


def test_several_checkpoints_and_steps(source):
  rules = {
    source: Rules(load_rules=[(FIRST, FIRST)], step=1),
    f'{source}:2': Rules(load_rules=[(SECOND, SECOND)]),
  }
  state = loading.load(new_state(ema_decay=0.0), rules)
  one, two = saved(source, 1), saved(source, 2)
  assert (one[FIRST] != two[FIRST]).any()
  check(
    state, {FIRST: one[FIRST], SECOND: two[SECOND]}, new_state(ema_decay=0.0)
  )


def test_what_stays_is_logged(source, caplog):
  caplog.set_level(logging.INFO, 'absl')
  loading.load(
    new_state(ema_decay=0.0), {source: Rules(load_rules=[(FIRST, FIRST)])}
  )
  assert f'Loaded 1 arrays of {pathlib.Path(source)}' in caplog.text
  assert (
    '2 variables stay as they were initialised: params/net/second/w,'
    ' non_trainable/net/rows'
  ) in caplog.text


def rule(*pairs, **kwargs):
  return Rules(load_rules=pairs, **kwargs)


@pytest.mark.parametrize(
  ('rules', 'message'),
  [
    (rule(('params/net/frist/w', FIRST)), 'params/net/first/w'),
    # An earlier one takes it.
    (rule((FIRST, FIRST), (FIRST, SECOND), safe_load=True), FIRST),
    (rule((FIRST, 'params/net/frist/w')), 'params/net/frist/w'),
    (rule(('(', FIRST)), r"'\('"),
    (rule((FIRST, FIRST), ignore_rules=['(']), r"'\('"),
    (rule(('params/net/(.*)', 'params/{}/{}')), 'group reference 2'),
    (rule((FIRST, r'\1')), 'group reference 1'),
    (rule(('non_trainable/.*', FIRST)), r'float32\[4, 4\].* float32\[\]'),
    (rule((FIRST, FIRST), step=7), 'step 7'),
  ],
)
def test_errors(source, rules, message):
  with pytest.raises(ValueError, match=message):
    loading.load(new_state(), {source: rules})


def test_two_checkpoints_must_not_give_the_same(source):
  rules = {source: rule((FIRST, FIRST)), f'{source}:1': rule((FIRST, SECOND))}
  with pytest.raises(ValueError, match=r'gives .*first/w.*, and so does'):
    loading.load(new_state(), rules)


def test_damage_is_found_where_it_matters(source, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(source, copy)
  found = inspection.find(copy)
  file = found.described[f'state/{FIRST}']['file']
  path = pathlib.Path(found.data.url, file, 'c.0.0')
  path.write_bytes(path.read_bytes()[:-1] + b'?')
  state = loading.load(new_state(), {str(copy): rule((SECOND, SECOND))})
  np.testing.assert_array_equal(
    state.params['net/second']['w'], saved(source)[SECOND]
  )
  with pytest.raises(store.DamagedError, match='is damaged'):
    loading.load(new_state(), {str(copy): rule((FIRST, FIRST))})


def test_a_run_loads_once_and_goes_on_from_the_step(
  source, tmp_path, monkeypatch
):
  loaded = []

  def load(state, rules):
    loaded.append(loading_load(state, rules))
    return loaded[-1]

  loading_load = loading.load
  monkeypatch.setattr(loading, 'load', load)
  rules = {source: rule(('params/(.*)', 'params/{}'), load_step=True)}
  experiment = run(tmp_path, 3, seed=1, rules=rules)
  assert len(loaded) == 1
  # One step, the third.
  assert experiment.state.step == 3
  assert experiment.state.model_state['non_trainable']['net']['rows'] == 2
  rows = [(x['series'], x['step']) for x in inspection.list_run(tmp_path)]
  assert rows == [('latest', 3)]
  # A resumed run goes on from its own checkpoint.
  experiment = run(tmp_path, 4, seed=1, rules=rules)
  assert len(loaded) == 1
  assert experiment.state.step == 4
  assert experiment.state.model_state['non_trainable']['net']['rows'] == 4
