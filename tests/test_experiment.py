"""The experiment's own half of the contract: state, inputs, the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import base_config
from jaxline import experiment
from jaxline.checkpoint import protocol
from jaxline.parallel import devices
from jaxline.parallel import prng


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

  def step(self, *, global_step, rng, writer):
    return {}

  def evaluate(self, *, global_step, rng, writer):
    return {}


def make_config(**values):
  config = base_config.get_base_config()
  config.update(values)
  return config


def make_state(global_step=0):
  return protocol.ExperimentState(
    global_step=global_step,
    train_step_rng=devices.bcast_local_devices(jax.random.PRNGKey(0)),
  )


@pytest.mark.parametrize(
  ('step', 'steps', 'expected'),
  [(0, 3, True), (2, 3, True), (3, 3, False), (0, 0, False), (9, None, True)],
)
def test_should_run_step(step, steps, expected):
  assert Both().should_run_step(step, make_config(training_steps=steps)) is (
    expected
  )


# State.


def test_a_snapshot_holds_the_first_slice_and_the_rest_whole():
  snapshot = Both().snapshot_state()
  assert set(snapshot) == {'params', 'notes'}
  np.testing.assert_array_equal(snapshot['params']['w'], [0, 1, 2])
  assert snapshot['params']['b'].shape == ()
  assert snapshot['notes'] == {'seen': 3, 'none': None, 'name': 'x'}


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


def test_all_old_attributes_go_before_new_ones_come():
  events = []

  class Watched(Both):
    def __setattr__(self, name, value):
      events.append(('set', name))
      super().__setattr__(name, value)

    def __delattr__(self, name):
      events.append(('delete', name))
      super().__delattr__(name)

  module = Watched()
  del events[:]
  module.restore_from_snapshot(module.snapshot_state())
  assert sorted(events[:2]) == [('delete', '_notes'), ('delete', '_params')]
  assert sorted(events[2:]) == [('set', '_notes'), ('set', '_params')]


def test_what_a_snapshot_lacks_is_named_and_nothing_changes():
  module = Both()
  params, notes = module._params, module._notes
  with pytest.raises(ValueError, match=r"lacks \['params'\].*'other'"):
    module.restore_from_snapshot({'notes': 1, 'other': 2})
  assert module._params is params
  assert module._notes is notes


def test_sharing_state_copies_nothing():
  trained, evaluated = Both(), Both('eval')
  evaluated.share_state(trained)
  assert evaluated._params is trained._params
  assert evaluated._notes is trained._notes


# What step and evaluate are called with.


def test_step_inputs_are_those_of_the_per_device_style():
  config = make_config(random_mode_train='same_host_unique_device')
  state_key = devices.bcast_local_devices(jax.random.PRNGKey(1))
  step, rng, next_key = Both().step_inputs(config)(41, state_key)
  np.testing.assert_array_equal(step, np.int32([41, 41]))
  assert step.dtype == jnp.int32
  step_key, carried = jax.random.split(jax.random.PRNGKey(1))
  np.testing.assert_array_equal(
    rng, [jax.random.fold_in(step_key, i) for i in (0, 1)]
  )
  np.testing.assert_array_equal(next_key, [carried, carried])


@pytest.mark.parametrize('mode', [x.value for x in prng.DistributedRNGMode])
def test_evaluate_inputs_keep_the_keys_and_change_the_step(mode):
  config = make_config(random_mode_eval=mode)
  key = jax.random.PRNGKey(1)
  inputs = Both().evaluate_inputs(config, key)
  (step, rng), (later, same) = inputs(7), inputs(8)
  np.testing.assert_array_equal(step, np.int32([7, 7]))
  np.testing.assert_array_equal(later, np.int32([8, 8]))
  host = jax.random.fold_in(key, 0) if mode.startswith('unique') else key
  keys = [jax.random.fold_in(host, i) for i in (0, 1)]
  expected = keys if mode.endswith('unique_device') else [host, host]
  np.testing.assert_array_equal(rng, expected)
  np.testing.assert_array_equal(same, expected)


# The loop.


class Looped(Both):
  """Steps on the host, with what the test wants returned."""

  def __init__(self, outputs=()):
    super().__init__()
    self.outputs = list(outputs)
    self.writers = []

  def step_inputs(self, config):
    return lambda step, key: (step, key, f'key after {step}')

  def step(self, *, global_step, rng, writer):
    self.writers.append(writer)
    if self.outputs:
      return self.outputs.pop(0)
    return {'loss': float(global_step)}


def test_actions_see_the_step_and_the_key_move_together():
  seen = []
  state = make_state(4)
  state.train_step_rng = 'key after 3'
  module = Looped()

  def action(t, step, scalars):
    seen.append((step, state.global_step, state.train_step_rng, scalars))

  config = make_config(training_steps=6)
  module.train_loop(config, state, [action], 'writer')
  assert seen == [
    (5, 5, 'key after 4', {'loss': 4.0}),
    (6, 6, 'key after 5', {'loss': 5.0}),
  ]
  assert module.writers == ['writer', 'writer']


def test_the_inputs_take_a_config_of_few_keys():
  config = base_config.config_dict.ConfigDict({'training_steps': 2})
  key = jax.random.PRNGKey(1)
  module = Both()
  state_key = module.initialize_train_step_rng(key)
  given, expected = (
    (module.step_inputs(c)(3, state_key), module.evaluate_inputs(c, key)(3))
    for c in (config, base_config.get_base_config())
  )
  jax.tree.map(np.testing.assert_array_equal, given, expected)
  assert list(config) == ['training_steps']


@pytest.mark.parametrize(
  'outputs',
  [
    None,
    {},
    {'loss': None, 'name': 'x', 'nested': {'a': 1}},
    {'loss': np.float32(1)},
  ],
)
def test_the_loop_takes_any_scalars_and_a_config_of_one_key(outputs):
  gone = jnp.ones([])
  gone.delete()  # Its buffer was donated: it is not waited for.
  state, module = make_state(), Looped([outputs, {'loss': gone}] * 2)
  config = base_config.config_dict.ConfigDict({'training_steps': 4})
  module.train_loop(config, state, ())
  assert state.global_step == 4
  assert module.writers == [None] * 4


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
    config = make_config(training_steps=3, max_steps_in_flight=in_flight)
    Looped(outputs).train_loop(config, make_state(), ())
    assert waited_for == ['a0', 'b0', 'a1', 'b1', 'a2', 'b2'][: 2 * num_waited]


def test_a_number_beside_a_step_that_failed_hides_no_error():
  failed = Pending('failed', [], RuntimeError('of the device'))
  outputs = [{'a': 0.1, 'b': np.float32(1), 'c': failed}]
  config = make_config(training_steps=1, max_steps_in_flight=1)
  with pytest.raises(RuntimeError, match='of the device'):
    Looped(outputs).train_loop(config, make_state(), ())


@pytest.mark.parametrize(
  ('limit', 'backend', 'local_devices', 'expected'),
  [
    (None, 'cpu', 2, 1),
    (None, 'cpu', 1, 2),
    (None, 'tpu', 4, 2),
    (2, 'cpu', 2, 2),
    (1, 'gpu', 1, 1),
  ],
)
def test_steps_in_flight(monkeypatch, limit, backend, local_devices, expected):
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  monkeypatch.setattr(jax, 'local_device_count', lambda: local_devices)
  config = make_config(max_steps_in_flight=limit)
  assert experiment.max_steps_in_flight(config) == expected
