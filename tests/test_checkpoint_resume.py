"""Tests of what a run begins or goes on from: configs, other runs, rules.

And of the dictionary in which programs written against JAXline look.
"""

import copy
import dataclasses
import functools
import importlib
import math
import pickle
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax
import pytest

from jaxline import base_config
from jaxline import experiment
from jaxline import platform
from jaxline import sharded
from jaxline import utils
from jaxline.base import trees
from jaxline.checkpoint import contents
from jaxline.checkpoint import restoring
from jaxline.compat import experiments
from jaxline.run_directory import store as store_lib
from tests import checkpoints as lib

# Another config.


def _kwargs(**values: Any) -> dict[str, Any]:
  return {'experiment_kwargs': config_dict.ConfigDict(values)}


def _activation(x):
  return x


SAME = {'layers': 2, 'nan': math.nan, 'mesh': {'data': 2}, 'sharding': 'ddp'}


@dataclasses.dataclass
class Decoding:
  """A part of an experiment's own config; `top_k` is a later addition."""

  method: str
  top_k: int = 40


@dataclasses.dataclass
class Settings:
  """An experiment's own config; what has a default was added later."""

  width: int
  decode: Decoding
  sizes: tuple[int, ...] = (1, 2)
  best: Decoding = dataclasses.field(default_factory=lambda: Decoding('beam'))


class Declares(lib.PerDevice, experiment.FullExperiment):
  """Says what may change, and what its config is read into."""

  CONFIG_CLASS = Settings
  CHANGEABLE_ON_RESUME = (
    'experiment_kwargs.config.eval_batches',
    'experiment_kwargs.config.decode',
  )


class Inherits(Declares):
  """Shares the config."""


def _own(**values: Any) -> dict[str, Any]:
  own = {'width': 3, 'decode': {'method': 'greedy'}} | values
  return _kwargs(config=own)


def test_what_the_experiment_declares_may_change(open_run):
  first = open_run(**_own(eval_batches=3))
  live = Declares({'w': np.ones(3)}, {})
  lib.save(first, live)
  lib.save(first, live, series='best', value=1.0)
  first.close()
  changed = _own(eval_batches=None, decode={'method': 'beam', 'size': 4})
  for cls in (Declares, Inherits, functools.partial(Inherits, {})):
    other = open_run(**changed)
    other.check_config(experiments.declared(cls))
    # The best value is restored without an experiment.
    state = other.get_experiment_state('best')
    state.value = 0.0
    other.restore('best')
    assert state.value == 1.0
    other.close()
  other = open_run(**changed)
  lib.restore(other, live)
  with pytest.raises(restoring.ConfigChangedError, match='eval_batches'):
    open_run(**changed).check_config()


@pytest.mark.parametrize(
  ('name', 'option'),
  [('lm', ()), ('image', ()), ('c4', ('C4Spmd1BAdam4Replicas:reduced',))],
)
def test_what_the_examples_declare(name, option):
  module = importlib.import_module(f'configs.{name}')
  config = module.get_config(*option).copy_and_resolve_references()
  cls = platform.resolve_experiment_class(config)
  keys = base_config.flat(base_config.recorded(config))
  fields = {f.name for f in dataclasses.fields(cls.CONFIG_CLASS)}
  for path in cls.CHANGEABLE_ON_RESUME:
    assert path.split('.')[2] in fields
    assert any(f'{key}.'.startswith(f'{path}.') for key in keys), path


def test_a_key_that_is_new_has_its_default(open_run):
  defaults = {
    'sizes': (1, 2),
    'decode': {'method': 'greedy', 'top_k': 40},
    'best': {'method': 'beam', 'top_k': 40},
  }
  live = Declares({'w': np.ones(3)}, {})
  first = open_run(**_own())
  lib.save(first, live)
  first.close()
  open_run(**_own(**defaults)).check_config(Declares)
  with pytest.raises(restoring.ConfigChangedError) as e:
    open_run(**_own(**defaults | {'sizes': (1, 3)})).check_config(Declares)
  assert [x for x in str(e.value).splitlines() if x[:2] == '  '] == [
    '  config.experiment_kwargs.config.sizes: [1, 2] then, [1, 3] now'
  ]
  lib.restore(open_run(**_own(**defaults)), live)


def test_another_config_is_refused_by_its_keys(open_run, tmp_path):
  first = open_run(**_kwargs(net=SAME | {'old': 1}))
  lib.save(first, lib.weights(1))
  first.close()
  other = open_run(random_seed=43, training_steps=7, mesh={'ici': {'data': 1}},
    **_kwargs(net=SAME | {'layers': 3, 'new': [1]}))  # fmt: skip
  with pytest.raises(restoring.ConfigChangedError) as e:
    other.check_config()
  assert [line for line in str(e.value).splitlines() if line[:2] == '  '] == [
    '  config.experiment_kwargs.net.layers: 2 then, 3 now',
    "  config.experiment_kwargs.net.new: 'absent' then, [1] now",
    "  config.experiment_kwargs.net.old: 1 then, 'absent' now",
    '  config.random_seed: 42 then, 43 now',
  ]
  assert "config.on_config_change = 'continue'" in str(e.value)
  error = restoring.ConfigChangedError
  lib.assert_refused(other, lib.weights(), tmp_path, 'layers: 2 then', error)


@pytest.mark.parametrize('mode', ['train', 'eval'])
def test_another_config_may_be_permitted(mode, open_run, caplog):
  first = open_run(**_kwargs(layers=2))
  lib.save(first, lib.weights(1))
  first.close()
  permitted = {'on_config_change': 'continue'} if mode == 'train' else {}
  other = open_run(mode, **permitted, **_kwargs(layers=3))
  other.check_config()
  live = lib.weights()
  lib.restore(other, live)
  assert live.held()['n'] == 1


def test_what_may_change(open_run):
  before = {'f': _activation, 'p': functools.partial(_activation, 1)}
  first = open_run(**_kwargs(net=SAME, **before))
  lib.save(first, lib.weights(1))
  first.close()
  _activation_again = type(_activation)(
    _activation.__code__, {}, '_activation'
  )  # At another address, as in another process.
  after = {'f': _activation, 'p': functools.partial(_activation_again, 1)}
  assert repr(after['p']) != repr(before['p'])
  other = open_run(
    training_steps=7, log_tensors_interval=3, max_checkpoints_to_keep=1,
    save_checkpoint_interval=2, on_nonfinite='skip', watchdog_secs=5.0,
    mesh={'ici': {'data': 1}}, sharding='fsdp',
    **_kwargs(net=SAME, **after),
  )  # fmt: skip
  other.check_config()
  lib.restore(other, lib.weights())


# Programs written against JAXline look at checkpoints in its dictionary.


@pytest.fixture
def newest(monkeypatch):
  """Returns what such programs look at."""
  monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})
  return lambda series='latest': utils.GLOBAL_CHECKPOINT_DICT[series].history[
    -1
  ]


def test_the_newest_save_is_read_when_it_is_looked_at(
  newest, open_run, tmp_path, monkeypatch
):
  reads = []
  read = contents.Checkpoint.read

  def spy(listing, *args):
    reads.append(listing)
    return read(listing, *args)

  monkeypatch.setattr(contents.Checkpoint, 'read', spy)
  checkpointer = open_run(mirrors=True, max_checkpoints_to_keep=1)
  lib.fill(checkpointer, lib.weights(1))
  assert utils.GLOBAL_CHECKPOINT_DICT['latest'].history == []
  live = lib.weights(1)
  lib.save(checkpointer, live, 5, extra={'a': np.ones(2)})
  first = newest()
  assert (first.id, reads) == (5, [])
  live._a0, live._b0 = lib.rows({'other': np.zeros(1)}), 9
  nest = first.pickle_nest
  assert nest.global_step == 5
  assert nest.experiment_module.n == 1
  lib.assert_same(nest.to_dict()['experiment_module'], {
    'w': np.full([3], 1, np.float32), 'n': 1})  # fmt: skip
  lib.assert_same(nest['extra'].to_dict(), {'a': np.ones(2)})
  np.testing.assert_array_equal(
    nest['experiment_module']._a0, [np.full([3], 1, np.float32)]
  )
  assert first.pickle_nest is nest
  number, unpacked = first
  assert (number, unpacked) == (5, nest)
  lib.save(checkpointer, lib.weights(6), 6)
  assert newest().pickle_nest.global_step == 6
  assert first.pickle_nest.global_step == 5  # It keeps what it has read.
  assert len(utils.GLOBAL_CHECKPOINT_DICT['latest'].history) == 1


def test_the_newest_save_of_the_sharded_style(newest, open_run, copied):
  checkpointer = open_run(mirrors=True)
  live = lib.Sharded()
  lib.restore(checkpointer, live, key=jax.random.key(0))
  # What a run goes on from is its last save.
  assert newest().pickle_nest.global_step == 5
  lib.advance(live, 2)
  want = live.snapshot_state()
  want = jax.tree.map(np.asarray, want['state'].params), want['input']
  lib.save(checkpointer, live, 7, key=jax.random.key(0))
  lib.advance(live, 1)
  module = newest().pickle_nest.experiment_module
  assert isinstance(module.state, sharded.TrainState)
  lib.assert_same(module.state.params, want[0])
  lib.assert_same(module.to_dict()['input'], want[1])


def test_the_best_is_looked_at_too(newest, open_run):
  training = open_run(mirrors=True)
  lib.save(training, lib.weights(3), 3)
  evaluation = open_run('eval', mirrors=True)
  live = lib.weights()
  lib.restore(evaluation, live)
  lib.save_best(evaluation, live, 3, 0.5)
  nest = newest('best').pickle_nest
  assert nest.global_step == 3
  assert nest.best_eval_metric_value == 0.5
  assert nest.experiment_module.n == 3


@pytest.mark.parametrize(
  'clone', [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_of_a_save_is_a_plain_snapshot(
  clone, newest, open_run, tmp_path
):
  checkpointer = open_run(mirrors=True)
  lib.save(checkpointer, lib.weights(3), 3)
  checkpointer.close()
  snapshot = clone(newest())
  assert type(snapshot) is utils.SnapshotNT
  assert snapshot.pickle_nest.global_step == 3
  # And starts another run, which the save itself does not.
  other = open_run(directory=tmp_path / 'other', mirrors=True)
  assert not other.can_be_restored('latest')
  utils.GLOBAL_CHECKPOINT_DICT['latest'].history.append(snapshot)
  assert other.can_be_restored('latest')
  live = lib.weights()
  assert lib.restore(other, live).global_step == 3
  assert live.held()['n'] == 3
  assert other.directory.saved_step is None  # It is no checkpoint of its own.
  assert other.steps('latest') == []


# Beginning from another run.


@pytest.mark.parametrize(
  ('where', 'step'),
  [
    ('', 5), ('/checkpoints/latest:3', 3), ('/checkpoints/best', 4),
  ],
)  # fmt: skip
def test_restore_from(where, step, open_run, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  other = open_run(directory=tmp_path / 'other')
  for n, series in ((3, 'latest'), (5, 'latest'), (4, 'best')):
    lib.save(other, lib.weights(n), n, series=series)
  before = lib.tree_of(tmp_path / 'other')
  source = 'other' + where  # Relative to the working directory.
  checkpointer = open_run(restore_from=source)
  assert checkpointer.can_be_restored('latest')
  assert not checkpointer.can_be_restored('best')
  live = lib.weights()
  state = lib.restore(checkpointer, live)
  assert (state.global_step, live.held()['n']) == (step, step)
  lib.assert_same(state.train_step_rng, lib.rows(jax.random.PRNGKey(7)))
  assert lib.tree_of(tmp_path / 'other') == before
  # From then on the run has its own.
  lib.save(checkpointer, lib.weights(9), 9)
  assert lib.restore(checkpointer, live).global_step == 9


def test_restore_from_what_is_damaged_or_does_not_fit(open_run, tmp_path):
  lib.save(open_run(directory=tmp_path / 'other'), lib.weights(1), 3, 5)
  lib.flip(lib.manifest_of(tmp_path / 'other'))
  before = lib.tree_of(tmp_path / 'other')
  checkpointer = open_run(restore_from=str(tmp_path / 'other'))
  with pytest.raises(store_lib.DamagedError, match=r'/5\.json is not as'):
    lib.restore(checkpointer, lib.weights())
  checkpointer = open_run(
    directory=tmp_path / 'third', restore_from=str(tmp_path / 'other:3')
  )
  with pytest.raises(ValueError, match=r"lacks \['v'\]"):
    lib.restore(checkpointer, lib.PerDevice({'v': jnp.ones(2)}, {'n': 0}))
  assert lib.tree_of(tmp_path / 'other') == before


def test_rules(kept, open_run):
  source = lib.Sharded()
  live = lib.Sharded(seed=2, params={'head': jnp.zeros([4])})
  lib.advance(source, 1)
  before = live.state
  rules = [
    ('state/params/layer/.*', None),
    (r'state/(params)/(w|layer/b)', r'state/\1/\2'),
    ('state/params/head', 'state/params/w'),
  ]
  checkpointer = open_run(restore_from=str(kept), restore_rules=rules)
  state = lib.fill(checkpointer, live, 0, key=(key := jax.random.key(8)))
  checkpointer.restore('latest')
  assert state.global_step == 0
  assert state.train_step_rng is key
  got = live.state
  lib.assert_same(got.params['w'], source.state.params['w'])
  lib.assert_same(got.params['head'], jnp.asarray(np.asarray(got.params['w'])))
  lib.assert_same(got.params['layer'], before.params['layer'])
  lib.assert_same(got.opt_state, before.opt_state)
  assert got.params['w'].sharding == before.params['w'].sharding
  assert 'input' not in live.snapshot_state()
  lib.advance(live, 1)  # Nothing shares a buffer that a step gives away.
  assert live.snapshot_state()['input']['state']['index'] == 1


class Scheduled(lib.Sharded):
  """Has each kind of schedule that Optax keeps a count for."""

  def make_optimizer(self):
    rate = optax.linear_schedule(0.1, 0.0, 10)
    return optax.chain(
      optax.add_noise(0.1, 0.5, 3),
      optax.inject_hyperparams(optax.adamw)(rate, weight_decay=0.1),
      optax.add_decayed_weights(rate),
      optax.scale_by_schedule(rate),
    )


def _counts(opt_state):
  leaves = trees.named_leaves(opt_state).items()
  return {n: int(x) for n, x in leaves if n.split('/')[-1] == 'count'}


def test_rules_for_all_of_the_state_begin_a_new_run(open_run, tmp_path):
  source = Scheduled(params={'more': jnp.ones([3])})
  lib.advance(source, 6)
  lib.save(
    open_run(directory=tmp_path / 'other'), source, 6, key=jax.random.key(1)
  )
  live = Scheduled(params={'more': jnp.zeros([3])}, seed=2)
  key = jax.random.key(8)
  before = jax.tree.map(jnp.copy, live.state)
  rules = [('state/(.*)', r'state/\1')]
  checkpointer = open_run(
    restore_from=str(tmp_path / 'other'), restore_rules=rules
  )
  state = lib.fill(checkpointer, live, 0, key=key)
  checkpointer.restore('latest')
  assert state.global_step == 0
  assert state.train_step_rng is key
  got, taken = live.state, source.state
  # It was not of step 0, and had weights and moments of its own.
  assert (int(taken.step), int(got.step)) == (6, 0)
  lib.assert_same(got.skipped, before.skipped)
  lib.assert_same(got.params, taken.params)
  lib.assert_same(got.model_state['half'], taken.model_state['half'])
  lib.assert_same(got.model_state['key'], before.model_state['key'])
  adam = lambda x: x.opt_state[1].inner_state[0]
  lib.assert_same(adam(got), adam(taken))
  assert list(_counts(taken.opt_state).values()) == [6] * 6
  counts = _counts(got.opt_state)
  assert counts.pop('1/inner_state/0/count') == 6  # Of Adam's moments.
  assert set(counts.values()) == {0}
  lib.assert_same(got.opt_state[0], before.opt_state[0])  # Its key as well.
  lib.assert_same(got.opt_state[1].hyperparams, before.opt_state[1].hyperparams)
  lib.advance(live, 1)
  assert int(live.state.step) == 1
  # What begins anew cannot be asked for either.
  for name in ('step', 'skipped', 'opt_state/3/count', 'model_state/key'):
    other = open_run(
      directory=tmp_path / name.replace('/', '_'),
      restore_from=str(tmp_path / 'other'),
      restore_rules=[(f'state/{name}', f'state/{name}')],
    )
    lib.fill(other, live, 0, key=key)
    with pytest.raises(ValueError, match='keys begin anew'):
      other.restore('latest')


@pytest.mark.parametrize(('rules', 'match'), [
  ([('state/params/w', None), ('nothing/.*', None)],
   r"\['nothing/\.\*'\] match none .*state/params/w"),
  ([('state/params/.*', None), ('state/params/w', 'state/params/w')],
   r"\['state/params/w'\] match none.*an earlier rule"),
  ([('state/params/w', 'state/params/v')],
   r"no arrays \['state/params/v'\]; the nearest .*'state/params/w'"),
  ([('state/params/w', 'state/params/layer/b')], 'w from state/params/layer/b'),
])  # fmt: skip
def test_rules_that_cannot_be_followed(rules, match, kept, open_run, tmp_path):
  checkpointer = open_run(restore_from=str(kept), restore_rules=rules)
  key = jax.random.key(0)
  lib.assert_refused(
    checkpointer, lib.Sharded(seed=2), tmp_path, match, key=key
  )


def test_rules_between_attributes_of_all_kinds(open_run, tmp_path):
  made = {
    'f': np.arange(3, dtype='f4'), 'k': jax.random.key(4), 'i': jnp.int4(3),
    'j': jnp.arange(3.0),
  }  # fmt: skip
  keys = {'k': made['k']}
  lib.save(
    open_run(directory=tmp_path / 'other'), lib.PerDevice(keys, {'n': made})
  )
  live = lib.PerDevice(
    {'f': jnp.zeros(3), 'k': jax.random.key(0)},
    {'n': {'f': np.zeros(3, np.float32), 'i': jnp.int4(0), 'j': jnp.zeros(3)}},
  )
  checkpointer = open_run(
    restore_from=str(tmp_path / 'other'),
    restore_rules=[('n/(.)', r'n/\1'), ('f', 'n/f')],
  )
  lib.restore(checkpointer, live)
  held = live.held()
  lib.assert_same(held['f'], lib.rows(jnp.arange(3.0)))
  lib.assert_same(held['k'], lib.rows(jax.random.key(0)))
  lib.assert_same(held['n']['i'], jnp.int4(3))
  lib.assert_same(held['n']['j'], jnp.arange(3.0))
  np.testing.assert_array_equal(held['n']['f'], [0, 1, 2])
