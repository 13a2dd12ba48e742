"""The experiment's own half of the contract: state, inputs, the loop."""

import functools

import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import pytest

from jaxline import base_config
from jaxline import experiment
from jaxline.checkpoint import protocol
from jaxline.parallel import devices
from jaxline.parallel import prng
from tests import toys


class Both(experiment.FullExperiment):
  """One attribute of each kind."""

  CHECKPOINT_ATTRS = {'_params': 'params'}
  NON_BROADCAST_CHECKPOINT_ATTRS = {'_notes': 'notes'}

  def __init__(self, mode='train', init_rng=None):
    super().__init__(mode, init_rng)
    self._params = devices.bcast_local_devices(
      {'w': np.arange(3, dtype=np.float32), 'b': np.float32(1)}
    )
    self._notes = {'seen': 3, 'none': None, 'name': 'x'}

  step = evaluate = None


def test_a_snapshot_holds_the_first_slice_and_the_rest_whole():
  module = Both()
  snapshot = module.snapshot_state()
  assert set(snapshot) == {'params', 'notes'}
  np.testing.assert_array_equal(snapshot['params']['w'], [0, 1, 2])
  assert snapshot['params']['b'].shape == ()
  assert snapshot['notes'] == {'seen': 3, 'none': None, 'name': 'x'}
  params = module._params
  with pytest.raises(ValueError, match=r"lacks \['params'\].*'other'"):
    module.restore_from_snapshot({'notes': 1, 'other': 2})
  assert module._params is params
  assert module._notes is snapshot['notes']


@pytest.mark.parametrize('w', [np.float32([7, 8]), np.float16([7, 8, 9])])
def test_arrays_of_other_shapes_are_restored(w):
  module = Both()
  module.restore_from_snapshot(
    {'params': {'w': w, 'c': np.float32(2)}, 'notes': 'other', 'more': 1}
  )
  assert set(module._params) == {'w', 'c'}
  np.testing.assert_array_equal(module._params['w'], [w, w])
  assert module._params['w'].dtype == w.dtype
  assert module._notes == 'other'


@pytest.mark.parametrize('mode', [x.value for x in prng.DistributedRNGMode])
def test_the_config_says_which_devices_share_keys(mode):
  def keys(key):
    host = jax.random.fold_in(key, 0) if mode.startswith('unique') else key
    own = [jax.random.fold_in(host, i) for i in (0, 1)]
    return own if mode.endswith('unique_device') else [host, host]

  key, module = jax.random.PRNGKey(1), Both()
  config = toys.make_config(random_mode_eval=mode)
  inputs = module.evaluate_inputs(config, key)
  for number in (7, 8):  # Each evaluation has the same keys.
    step, rng = inputs(number)
    np.testing.assert_array_equal(step, np.int32([number, number]))
    np.testing.assert_array_equal(rng, keys(key))
  config = toys.make_config(random_mode_train=mode)
  state_key = devices.bcast_local_devices(key)
  _, rng, _ = module.step_inputs(config)(7, state_key)
  np.testing.assert_array_equal(rng, keys(jax.random.split(key)[0]))


class Looped(Both):
  """Steps on the host, with what the test wants returned."""

  def __init__(self, outputs=()):
    super().__init__()
    self.outputs = list(outputs)

  def step_inputs(self, config):
    return lambda step, key: (step, key, f'key after {step}')

  def step(self, *, global_step, rng, writer):
    if self.outputs:
      return self.outputs.pop(0)
    return {'loss': float(global_step)}

  def loop(self, config, step=0, actions=()):
    state = protocol.ExperimentState(
      global_step=step, train_step_rng=f'key after {step - 1}'
    )
    actions = [functools.partial(action, state) for action in actions]
    self.train_loop(config, state, actions)
    return state


def test_actions_see_the_step_and_the_key_move_together():
  seen = []

  def action(state, t, step, scalars):
    seen.append((step, state.global_step, state.train_step_rng, scalars))

  Looped().loop(toys.make_config(6), 4, [action])
  assert seen == [
    (5, 5, 'key after 4', {'loss': 4.0}),
    (6, 6, 'key after 5', {'loss': 5.0}),
  ]


def test_the_loop_takes_any_scalars_and_a_config_of_one_key():
  gone = jnp.ones([])
  gone.delete()  # Its buffer was donated: it is not waited for.
  outputs = [None, {}, {'loss': None, 'name': 'x', 'nested': {'a': 1}}]
  outputs += [{'loss': np.float32(1)}, {'loss': gone}]
  config = config_dict.ConfigDict({'training_steps': 6})
  assert Looped(outputs).loop(config).global_step == 6
  # The inputs are those of the defaults.
  key, module = jax.random.PRNGKey(1), Both()
  state_key = module.initialize_train_step_rng(key)
  given, expected = (
    (module.step_inputs(c)(3, state_key), module.evaluate_inputs(c, key)(3))
    for c in (config, base_config.get_base_config())
  )
  jax.tree.map(np.testing.assert_array_equal, given, expected)
  assert list(config) == ['training_steps']


class Pending:
  """An array of a step that runs until somebody waits for it."""

  def __init__(self, name, waited_for, error=None):
    self.name, self.waited_for, self.error = name, waited_for, error

  def is_deleted(self):
    return False

  def is_ready(self):  # What has failed is ready.
    return self.error is not None or self.name in self.waited_for

  def block_until_ready(self):
    self.waited_for.append(self.name)
    if self.error is not None:
      raise self.error


def test_the_host_runs_no_further_ahead_than_it_may():
  for in_flight, num_waited in ((1, 3), (2, 2), (3, 1), (4, 0)):
    # Two arrays a step, as of two programs: each of them may be the slow one.
    waited_for = []
    outputs = [
      {x: Pending(f'{x}{i}', waited_for) for x in 'ab'} | {'n': None}
      for i in range(3)
    ]
    config = toys.make_config(3, max_steps_in_flight=in_flight)
    Looped(outputs).loop(config)
    assert waited_for == ['a0', 'b0', 'a1', 'b1', 'a2', 'b2'][: 2 * num_waited]


def test_a_number_beside_a_step_that_failed_hides_no_error():
  failed = Pending('failed', [], RuntimeError('of the device'))
  outputs = [{'a': 0.1, 'b': np.float32(1), 'c': failed}]
  config = toys.make_config(1, max_steps_in_flight=1)
  with pytest.raises(RuntimeError, match='of the device'):
    Looped(outputs).loop(config)
