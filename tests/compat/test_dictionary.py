"""Checkpoints in memory: how many, frozen, open to forks."""

import copy
import pickle

import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import pytest

from jaxline import utils
from jaxline.checkpoint import protocol
from jaxline.parallel import devices
from tests import checkpoints

SERIES = 'latest'


def toy(notes=None):
  """Returns an experiment: weights on the devices, notes on the host."""
  params = {'lin.1': {'w': np.float32([1, 2])}}
  return checkpoints.PerDevice({'params': params}, {'notes': notes})


def make(module=None):
  """Returns a checkpointer and its live state of SERIES."""
  config = config_dict.ConfigDict({'max_checkpoints_to_keep': 5})
  checkpointer = utils.InMemoryCheckpointer(config, 'train')
  state = checkpointer.get_experiment_state(SERIES)
  state.update(
    global_step=3,
    experiment_module=toy() if module is None else module,
    train_step_rng=devices.bcast_local_devices(jax.random.PRNGKey(0)),
  )
  return checkpointer, state


def history(series=SERIES):
  return utils.GLOBAL_CHECKPOINT_DICT[series].history


@pytest.mark.parametrize('entry', ['global_step', 'experiment_module', 'ema'])
def test_what_a_checkpoint_lacks_is_named_and_nothing_changes(entry):
  checkpointer, state = make()
  checkpointer.save(SERIES)
  nest = history()[0].pickle_nest
  if nest.pop(entry, None) is None:  # The experiment refuses.
    state.experiment_module.CHECKPOINT_ATTRS = {'_a0': 'params', '_e': 'ema'}
  state.global_step = 9
  with pytest.raises(ValueError, match=rf"lacks \['{entry}'\]"):
    checkpointer.restore(SERIES)
  assert state.global_step == 9


def test_how_many_are_kept():
  best = 'max_best_checkpoints_to_keep'
  for series, is_pure, values, kept in (
    ('latest', True, {}, 3),
    ('best', False, {}, 3),
    ('best', True, {best: None}, 1),
    ('best', False, {best: 2}, 2),
  ):
    config = config_dict.ConfigDict({'max_checkpoints_to_keep': 3} | values)
    checkpointer = utils.InMemoryCheckpointer(config, 'eval')
    utils.GLOBAL_CHECKPOINT_DICT.clear()
    state = checkpointer.get_experiment_state(series)
    state.experiment_module = toy()
    state.experiment_module.EVALUATION_IS_PURE = is_pure
    for state.global_step in range(5):
      checkpointer.save(series)
    steps = [0, 1, 2, 3, 4][-kept:]
    assert [s.id for s in history(series)] == steps
    assert [s.pickle_nest.global_step for s in history(series)] == steps
    assert checkpointer.restore_path(series) == 4


def test_a_donated_step_does_not_reach_the_snapshot():
  w = np.arange(1000, dtype=np.float32)
  module = checkpoints.PerDevice({'w': w}, {'whole': jnp.asarray(w)})
  double = lambda x: x * 2
  updates = {
    '_a0': jax.pmap(double, donate_argnums=0),
    '_b0': jax.jit(double, donate_argnums=0),
  }
  key_update = jax.pmap(lambda k: k + 1, donate_argnums=0)
  checkpointer, state = make(module)
  key = np.array(state.train_step_rng)
  checkpointer.save(SERIES)
  for _ in range(3):
    for name, update in updates.items():
      before = getattr(module, name)
      setattr(module, name, jax.block_until_ready(update(before)))
      assert before.is_deleted()  # It was donated: this test is about that.
    state.train_step_rng = key_update(state.train_step_rng)
  nest = history()[0].pickle_nest.to_dict()
  np.testing.assert_array_equal(nest['experiment_module']['w'], w)
  np.testing.assert_array_equal(nest['experiment_module']['whole'], w)
  np.testing.assert_array_equal(nest['train_step_rng'], key)


def test_changes_in_place_do_not_reach_the_snapshot():
  before = {'array': [0, 0], 'dict': {'a': 1}, 'list': [1, [2]]}
  notes = {**copy.deepcopy(before), 'array': np.zeros(2)}

  def spoil(module):
    module._b0['array'][:] = 7
    module._b0['dict']['a'] = 7
    module._b0['list'][1].append(7)
    module._b0['new'] = 7

  def check(notes):
    assert {**notes, 'array': notes['array'].tolist()} == before

  checkpointer, state = make(toy(notes=notes))
  checkpointer.save(SERIES)
  spoil(state.experiment_module)
  check(history()[0].pickle_nest.to_dict()['experiment_module']['notes'])
  for _ in range(2):
    checkpointer.restore(SERIES)
    check(state.experiment_module._b0)
    spoil(state.experiment_module)


@pytest.mark.parametrize('clone', [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_snapshot_can_be_written_to_a_file_and_read(clone):
  """It reads like a ConfigDict, though a name may have a dot."""
  checkpointer, state = make()
  checkpointer.save(SERIES)
  nest = clone(history()[0].pickle_nest)
  if isinstance(nest, bytes):
    nest = pickle.loads(nest)
  assert type(nest) is protocol.ExperimentState
  assert set(nest) == {'global_step', 'experiment_module', 'train_step_rng'}
  assert nest['global_step'] == nest.global_step == 3
  first = utils.get_first(nest.experiment_module._a0)
  np.testing.assert_array_equal(first['lin.1']['w'], [1, 2])
  params = nest.experiment_module.params
  np.testing.assert_array_equal(params['lin.1'].w, [1, 2])
  assert type(params.to_dict()['lin.1']) is dict
  utils.GLOBAL_CHECKPOINT_DICT[SERIES].history[:] = [utils.SnapshotNT(0, nest)]
  state.global_step = 0
  checkpointer.restore(SERIES)
  assert state.global_step == 3


def test_a_program_derives_from_it():
  class Own(utils.InMemoryCheckpointer):
    def __init__(self):
      self._max_checkpoints_to_keep = 2

  checkpointer = Own()
  checkpointer.begin(0)
  for series in ('latest', 'best'):
    state = checkpointer.get_experiment_state(series)
    for state.global_step in (1, 2, 3):
      checkpointer.save(series)
    assert len(utils.GLOBAL_CHECKPOINT_DICT[series].history) == 2
