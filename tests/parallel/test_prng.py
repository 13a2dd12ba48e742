"""Tests of jaxline.parallel.prng: keys by the definition, one at a time."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline.parallel import devices
from jaxline.parallel import prng

MODES = [mode.value for mode in prng.DistributedRNGMode]
# Each mode with typed keys, and each kind of key with one mode.
KEYS_AND_MODES = [
  *((jax.random.key, mode) for mode in MODES),
  (jax.random.PRNGKey, MODES[0]),
  (functools.partial(jax.random.key, impl='rbg'), MODES[0]),
]


def _bits(keys):
  """The numbers of keys of either kind."""
  if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
    keys = jax.random.key_data(keys)
  return np.asarray(keys)


def _expected_bits(key, mode, host=0):
  """Returns the keys of both devices."""
  if mode.startswith('unique_host'):
    key = jax.random.fold_in(key, host)
  folds = mode.endswith('unique_device')
  keys = [jax.random.fold_in(key, i) if folds else key for i in range(2)]
  return np.stack([_bits(key) for key in keys])


def _check_step(step_keys, step, key, state_key, mode, host=0):
  """Checks a step by the definition; returns the next key and state key."""
  step_key, key = jax.random.split(key)
  got_step, got_keys, state_key = step_keys(step, state_key)
  assert got_step.dtype == jnp.int32
  np.testing.assert_array_equal(got_step, [step, step])
  expected = _expected_bits(step_key, mode, host)
  np.testing.assert_array_equal(_bits(got_keys), expected)
  np.testing.assert_array_equal(_bits(state_key), np.stack([_bits(key)] * 2))
  return key, state_key


@pytest.mark.parametrize(('make_key', 'mode'), KEYS_AND_MODES)
def test_keys_are_those_of_the_definition(make_key, mode):
  key, host = make_key(7), 5
  specialize = functools.partial(
    prng.specialize_rng_host_device, axis_name='i', mode=mode
  )
  state_key = devices.bcast_local_devices(key)
  with mock.patch.object(jax, 'process_index', return_value=host):
    got = jax.pmap(specialize, axis_name='i')(
      state_key, prng.host_id_devices_for_rng(mode)
    )
    step_keys = prng.DeviceStepKeys(mode, block=3)
  np.testing.assert_array_equal(_bits(got), _expected_bits(key, mode, host))
  num_unique = len(np.unique(_bits(got), axis=0))
  assert num_unique == (2 if mode.endswith('unique_device') else 1)
  for step in range(8):
    key, state_key = _check_step(step_keys, step, key, state_key, mode, host)


@pytest.mark.parametrize('block', [1, 4])
def test_step_keys_follow_their_caller(block):
  """Any step and key may come: of a restore, or changed by an experiment."""
  step_keys = prng.DeviceStepKeys(MODES[0], block=block)
  random = np.random.default_rng(block)
  step, key = 1000, jax.random.key(3)
  state_key = devices.bcast_local_devices(key)
  for i in range(60):
    change = random.choice(['', '', 'step', 'key', 'array', 'host'])
    if change == 'step':
      step = int(random.integers(1000))
    elif change == 'key':
      key = jax.random.key(i)
    if change in ('key', 'array'):
      state_key = devices.bcast_local_devices(key)
    elif change == 'host':
      on_host = np.asarray(jax.random.key_data(state_key))
      state_key = jax.random.wrap_key_data(on_host)
    key, state_key = _check_step(step_keys, step, key, state_key, MODES[0])
    step += 1


def test_streams_are_neither_a_run_s_keys_nor_what_split_returns():
  rng = jax.random.PRNGKey(42)
  names = ('', 'evaluation', 'decoding', 'a', 'b')
  keys = {tuple(np.asarray(prng.stream(rng, name))) for name in names}
  assert len(keys) == len(names)
  split = np.concatenate([jax.random.split(rng, n) for n in (2, 1000)])
  others = {tuple(key) for key in split}
  assert not keys & {*others, tuple(np.asarray(rng))}
  # It is the name's for ever: a run that is resumed draws the same.
  assert prng.stream_number('evaluation') == 0x9323A575
