"""Tests of jaxline.sharded, on the two fake devices of conftest.py."""

import copy
import functools
import gc
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline import metrics
from jaxline import platform
from jaxline import utils
from jaxline.base import trees
from jaxline.checkpoint import inspection
from jaxline.compat import experiments
from jaxline.parallel import partitioning
from tests import processes
from tests import remains
from tests import toys
from tests.experiments import regression

KEY = jax.random.PRNGKey(0)
Regression = regression.Regression


def make(cls=Regression, mode='train', key=KEY, **kwargs):
  return cls(mode, key, **kwargs)


def shard_shapes(x):
  return [shard.data.shape for shard in x.addressable_shards]


def assert_same(a, b):
  assert regression.digest(a) == regression.digest(b)


def save(experiment):
  """Returns a snapshot as a checkpointer freezes it."""
  state = utils.InMemoryCheckpointer(regression.get_config(0), 'train')
  state.get_experiment_state('test').experiment_module = experiment
  state.save('test')
  snapshot = utils.GLOBAL_CHECKPOINT_DICT['test'].history[-1].pickle_nest
  return snapshot.to_dict()['experiment_module']


def test_a_batch_that_compiles_the_step_again_is_warned_of(caplog):
  class Ragged(Regression):
    sizes = (16, 16, 8, 8, 16, 8)

    def train_input(self):
      for i, rows in enumerate(self.sizes):
        batch = regression.examples(0, rows, 16 * i)
        batch['kind'] = np.zeros([rows], np.int8 if i == 5 else np.int32)
        yield batch

  regression.train_steps(make(Ragged, sharding='fsdp'), len(Ragged.sizes))
  said = [x for x in caplog.messages if 'compiled again' in x]
  assert len(said) == 2
  assert 'batch/x: now float32[8, 8], before float32[16, 8]' in said[0]
  assert 'batch/kind: now int8[8], before int32[8]' in said[1]


def test_weak_types_and_tied_arrays_do_not_compile_again():
  traced = []

  class Weak(Regression):
    def init_fn(self, rng):
      # jnp.full and numbers are weakly typed; one array is in two places.
      w = jnp.full([regression.FEATURES, regression.OUTPUTS], 0.1)
      weights = {
        'w': partitioning.Logical(w, ('embed', 'mlp')),
        'b': jnp.full([regression.OUTPUTS], 0.0),
      }
      mean = jnp.zeros([regression.FEATURES])
      more = {'average': weights, 'count': 0, 'key': jax.random.key(1)}
      return weights, {'mean': mean, **more}

    def loss_fn(self, params, model_state, *args):
      traced.append(args)
      loss, values, new = super().loss_fn(params, model_state, *args)
      new['average'] = model_state['average']
      new['count'] = model_state['count'] + 1
      new['key'] = jax.random.split(model_state['key'])[0]
      return loss, values, new

    def make_optimizer(self):
      return optax.inject_hyperparams(optax.adam)(learning_rate=0.1)

  experiment = make(Weak, sharding='fsdp')
  regression.train_steps(experiment, 4)
  assert len(traced) == 1
  state = experiment.state.model_state
  assert int(state['count']) == 4
  assert shard_shapes(state['average']['w']) == [(4, 4), (4, 4)]


def test_a_step_that_changes_shapes_or_types_is_refused_by_name():
  class Changing(Regression):
    def loss_fn(self, params, model_state, batch, rng, is_training):
      loss, values, _ = super().loss_fn(
        params, model_state, batch, rng, is_training
      )
      return loss, values, {'mean': jnp.zeros([3]), 'more': jnp.zeros([])}

  experiment = make(Changing)
  with pytest.raises(ValueError, match='A step must not') as error:
    regression.train_steps(experiment, 1)
  assert error.value.args[0].splitlines()[1:] == [
    'model_state/mean: the step returns float32[3], it got float32[8]',
    'model_state/more: the step returns float32[], it got nothing',
  ]
  # A checkpoint after a failed step does not skip its batch.
  assert experiment.snapshot_state()['batches'] == 0


def test_state_is_made_sharded():
  experiment = make(sharding='fsdp')
  layout, state = experiment.layout, experiment.state
  make_state = jax.jit(layout.init, out_shardings=layout.shardings)
  # It may be larger than a device: no array is whole on one at any time.
  assert 'f32[8,4]' not in make_state.lower(KEY).compile().as_text()
  assert shard_shapes(state.opt_state[0].nu['w']) == [(4, 4), (4, 4)]
  for x in (state.step, state.params['b'], state.opt_state[0].count):
    assert x.sharding.is_fully_replicated
    assert len(x.sharding.device_set) == 2


def test_raw_typed_and_restored_keys_are_the_same():
  found = set()
  typed = jax.random.key(0, impl='rbg')
  raw = jax.random.key_data(typed)
  with jax.default_prng_impl('rbg'):
    # A restored key is on the host.
    for init_key, key in ((typed, typed), (raw, raw), (raw, np.asarray(raw))):
      experiment = make(key=init_key)
      state = types.SimpleNamespace(global_step=0, train_step_rng=key)
      experiment.train_loop(regression.get_config(2), state, [])
      found.add(regression.digest(experiment.state))
  assert len(found) == 1


class Fixed(Regression):
  """Evaluates given batches, by given weights; its loss is their `y`."""

  batches = ()

  def loss_fn(self, params, model_state, batch, rng, is_training):
    loss = metrics.Mean.of(batch['y'], batch['weights'])
    values = {'loss': loss, 'plain': loss.compute(), 'three': 3.0}
    return loss.compute(), values, model_state

  def eval_input(self):
    return iter(self.batches)


@pytest.mark.parametrize(
  ('shape', 'each', 'dtype'),
  [((8,), 1, np.bool_), ((8, 5), 5, np.float32), ((8, 5), 1, np.float32)],
)
def test_the_inputs_own_weights(shape, each, dtype):
  rng = np.random.default_rng(0)
  y = rng.normal(size=shape).astype(np.float32)
  w = rng.integers(0, 2, (8, each)).astype(dtype)
  given = w[:, 0] if each == 1 else w  # One for each row, or each number.
  experiment = make(Fixed)
  experiment.batches = [
    {'y': y[:rows], 'weights': given[:rows]} for rows in (8, 3)
  ]
  w = np.broadcast_to(np.float64(w), (8, y[0].size)).reshape(shape)
  expected = np.average(
    np.concatenate([y, y[:3]]), weights=np.concatenate([w, w[:3]])
  )
  found = regression.evaluate(experiment)
  want = {'loss': expected, 'plain': expected, 'three': 3.0}
  assert found == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
  ('name', 'frozen', 'settings'),
  [
    ('b', 'w', {}),
    ('w', 'b', {'gradient_accumulation_steps': 2, 'on_nonfinite': 'skip'}),
  ],
)
def test_frozen_weights_have_no_gradient_no_state_and_no_decay(
  name, frozen, settings
):
  class Frozen(Regression):
    trainable_rules = name

    def make_optimizer(self):
      return optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(0.05, weight_decay=0.5)
      )

    def step_scalars(self, state, grads, updates):
      assert [*trees.named_leaves(grads)] == [name]
      return super().step_scalars(state, grads, updates)

  config = regression.get_config(0)
  config.update(settings)
  experiment, restored = (
    make(Frozen, sharding='fsdp', run_config=config) for _ in range(2)
  )
  before = jax.device_get(experiment.state)
  regression.train_steps(experiment, 3, **settings)
  after = jax.device_get(experiment.state)
  np.testing.assert_array_equal(after.params[frozen], before.params[frozen])
  assert np.all(after.params[name] != before.params[name])
  adam = after.opt_state[1][0]
  moments = trees.named_leaves((adam.mu, adam.nu))
  assert [*moments] == [f'0/{name}', f'1/{name}']
  restored.restore_from_snapshot(save(experiment))
  for x in (experiment, restored):
    regression.train_steps(x, 2, **settings)
  assert_same(experiment.snapshot_state(), restored.snapshot_state())


def test_evaluation_is_exact_over_many_batches():
  experiment = make(Fixed)
  # In float32, 2^24 + 1 is 2^24: the ones behind the first would be lost.
  first = np.full([2], 2.0**23, np.float32)
  rest = [{'y': np.float32([1, 0])} for _ in range(40)]
  experiment.batches = [{'y': first}, *rest]
  assert regression.evaluate(experiment)['loss'] == (2.0**24 + 40) / 82


def test_several_evaluation_sets_have_metrics_and_keys_of_their_own():
  sizes = {'a': (1,), 'b': (4, 1, 4), 'c': (5, 5, 5)}

  class Sets(regression.Drawing):
    names = ''

    def eval_input(self):
      found = {}
      for name in self.names:
        self.eval_sizes = sizes[name]
        found[name] = [*super().eval_input()]
      return found

  experiment = make(Sets, 'eval', sharding='fsdp')
  # The same in each evaluation; another set changes nothing for the others.
  for names in ('ab', 'ab', 'cb'):
    experiment.names = names
    scalars = regression.evaluate(experiment, seed=2)
    expected = {}
    for name in names:
      rows = sizes[name]
      loss = regression.expected_evaluation(experiment.state, rows)
      draws = regression.drawn(jax.random.PRNGKey(2), name, len(rows))
      expected |= {f'{name}/loss': loss, f'{name}/draw': draws[name]}
      expected[f'{name}/rows'] = sum(rows) / len(rows)
    assert scalars == pytest.approx(expected, rel=1e-5)
    assert {*map(type, scalars.values())} == {float}
  # The first set gives the shapes.
  assert experiment.abstract_batch(False)['x'].shape == (6, 8)


def test_no_thread_and_no_array_outlives_training():
  class MethodInput(Regression):
    def train_input(self):  # The generator refers to the experiment.
      yield from regression.Input(self.batch_size)

  gc.collect()
  before = len(jax.live_arrays())
  experiment = make(MethodInput)
  regression.train_steps(experiment, 3)
  assert 'infeed' not in {t.name for t in threading.enumerate()}
  del experiment
  gc.collect()
  assert len(jax.live_arrays()) == before


def test_restore_is_exact_with_batches_in_flight():
  class Ahead(Regression):
    def train_input(self):
      self.data = regression.Input(self.batch_size)
      return self.data

  config = regression.get_config(0)
  config.update(sharding='fsdp', skip_batches='2,6')
  straight, experiment, fresh = (make(Ahead, run_config=config) for _ in 'abc')
  regression.train_steps(straight, 3)
  at_3 = save(straight)
  regression.train_steps(straight, 4)  # A second loop goes on.

  rng = experiment.initialize_train_step_rng(jax.random.PRNGKey(1))
  for step in range(3):
    experiment.step(global_step=step, rng=rng, writer=None)
  processes.wait_until(lambda: int(experiment.data.state['next']) > 5)
  snapshot = save(experiment)
  # Not the position of the thread that reads ahead.
  assert int(snapshot['input']['state']['next']) == 4
  for step in range(3, 5):  # What comes after does not reach the snapshot.
    experiment.step(global_step=step, rng=rng, writer=None)
  assert_same(snapshot, at_3)

  for restored in (experiment, fresh):
    restored.restore_from_snapshot(copy.deepcopy(snapshot))
    assert_same(restored.snapshot_state(), snapshot)
    regression.train_steps(restored, 4)
    assert_same(restored.snapshot_state(), straight.snapshot_state())


@pytest.mark.parametrize(
  'mode', ['eval', 'train_and_eval', 'train_eval_multithreaded']
)
def test_initial_weights_are_those_of_the_run_in_every_mode(mode, tmp_path):
  config = regression.get_config(0)
  config.update(
    checkpointer='durable',
    checkpoint_dir=str(tmp_path),
    eval_initial_weights=True,
    best_model_eval_metric='loss',
  )
  platform.start(functools.partial(Regression), config, mode)
  init_key = jax.random.split(jax.random.PRNGKey(config.random_seed))[1]
  expected = regression.expected_evaluation(make(key=init_key).state, [37])
  (record,) = remains.curve(tmp_path, 'eval')
  assert record['step'] == 0
  np.testing.assert_allclose(record['loss'], expected, rtol=1e-5)
  assert inspection.find(tmp_path / 'checkpoints' / 'best').step == 0


def test_mesh_rules_and_parts_are_those_of_the_runs_config():
  config = base_config.get_base_config()
  config.mesh.ici.update(data=1, mdl=2)
  config.sharding = 'tp'
  config.sharding_rules = {'mlp': [], 'embed': ['mdl']}
  config.gradient_accumulation_steps = 4
  ours = make(run_config=config)
  own = make(run_config=config, sharding='fsdp', mesh={'data': 2})
  assert shard_shapes(ours.state.params['w']) == [(4, 4), (4, 4)]
  assert ours.accumulation_steps == own.accumulation_steps == 4
  # The constructor's own arguments go before; the changes are to any preset.
  assert own.partitioner.rules == partitioning.get_rules(
    'fsdp', config.sharding_rules
  )


def test_keys_that_do_not_reach_the_experiment_are_refused():
  class Deaf(Regression):
    def __init__(self, mode, init_rng, **kwargs):
      super().__init__(mode, init_rng, **kwargs)

  rng = jax.random.key(0)
  for key, value in {
    'mesh': {'data': 2},
    'sharding': 'fsdp',
    'sharding_rules': {'mlp': ['data']},
    'gradient_accumulation_steps': 2,
    'infeed_buffer_size': 4,
  }.items():
    config = regression.get_config(1)
    config[key] = value
    for cls in (toys.Plain, Deaf):
      said = rf'config\.{key} is .*{cls.__name__}'
      with pytest.raises(errors.UsageError, match=said):
        experiments.construct(cls, 'train', rng, config)
    experiments.construct(Regression, 'train', rng, config)
