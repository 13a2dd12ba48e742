"""Tests of jaxline.parallel.prng."""

import contextlib
import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline.base import debug
from jaxline.parallel import devices
from jaxline.parallel import prng

MODES = [mode.value for mode in prng.DistributedRNGMode]
MAKE_KEY = {
  'uint32': jax.random.PRNGKey,
  'typed': jax.random.key,
  'rbg': functools.partial(jax.random.key, impl='rbg'),
}
NUM_DEVICES = 2


# Each mode with typed keys, and each kind of key with one mode.
EACH_KEY_AND_MODE = [
  *(('typed', mode) for mode in MODES),
  *((kind, MODES[0]) for kind in MAKE_KEY if kind != 'typed'),
]


def _bits(keys):
  """The numbers of keys of either kind."""
  if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
    keys = jax.random.key_data(keys)
  return np.asarray(keys)


def _expected_key(key, mode, host, device):
  """The definition, one key at a time."""
  if mode.startswith('unique_host'):
    key = jax.random.fold_in(key, host)
  if mode.endswith('unique_device'):
    key = jax.random.fold_in(key, device)
  return key


def _expected_bits(key, mode, host=0):
  return np.stack(
    [_bits(_expected_key(key, mode, host, i)) for i in range(NUM_DEVICES)]
  )


def _specialize(keys, mode):
  return jax.pmap(
    functools.partial(
      prng.specialize_rng_host_device, axis_name='i', mode=mode
    ),
    axis_name='i',
  )(keys, prng.host_id_devices_for_rng(mode))


# --- specialize_rng_host_device ----------------------------------------------


@pytest.mark.parametrize(('kind', 'mode'), EACH_KEY_AND_MODE)
def test_specialize_folds_in_the_host_then_the_device(kind, mode):
  key, host = MAKE_KEY[kind](7), 5
  with mock.patch.object(jax, 'process_index', return_value=host):
    got = _specialize(devices.bcast_local_devices(key), mode)
  np.testing.assert_array_equal(_bits(got), _expected_bits(key, mode, host))
  num_unique = len(np.unique(_bits(got), axis=0))
  assert num_unique == (2 if mode.endswith('unique_device') else 1)


# --- DeviceStepKeys ----------------------------------------------------------


def _expected_steps(key, mode, steps, host=0):
  """Yields (step, step keys, next state keys) by the definition."""
  for step in steps:
    step_key, key = jax.random.split(key)
    yield step, _expected_bits(step_key, mode, host), np.stack([_bits(key)] * 2)


def _assert_steps(step_keys, state_key, expected):
  """Checks what step_keys returns; returns the last state key."""
  for step, step_bits, state_bits in expected:
    got_step, got_keys, state_key = step_keys(step, state_key)
    assert got_step.dtype == jnp.int32
    np.testing.assert_array_equal(got_step, [step, step])
    np.testing.assert_array_equal(_bits(got_keys), step_bits)
    np.testing.assert_array_equal(_bits(state_key), state_bits)
  return state_key


@pytest.mark.parametrize(('kind', 'mode'), EACH_KEY_AND_MODE)
def test_step_keys_are_those_of_the_definition(kind, mode):
  key, host = MAKE_KEY[kind](3), 4
  with mock.patch.object(jax, 'process_index', return_value=host):
    step_keys = prng.DeviceStepKeys(mode, block=3)
  state_key = devices.bcast_local_devices(key)
  expected = _expected_steps(key, mode, range(8), host)
  _assert_steps(step_keys, state_key, expected)


@pytest.mark.parametrize('block', [1, 2, 4, 16])
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
    (expected,) = _expected_steps(key, MODES[0], [step])
    state_key = _assert_steps(step_keys, state_key, [expected])
    step, key = step + 1, jax.random.split(key)[1]


def test_step_keys_feed_a_donating_pmap_without_resharding():
  key, mode = jax.random.key(3), MODES[0]
  step_keys = prng.DeviceStepKeys(mode, block=2)
  state_key = devices.bcast_local_devices(key)
  # A step may donate what it is given: each value has its own buffer.
  step = jax.pmap(
    lambda step, key: (step + 1, jax.random.bits(key)),
    axis_name='batch',
    donate_argnums=0,
  )
  for number, step_bits, _ in _expected_steps(key, mode, range(5)):
    global_step, keys, state_key = step_keys(number, state_key)
    assert len(keys.addressable_shards) == NUM_DEVICES
    keys_bits = _bits(keys)
    got, _ = step(global_step, keys)
    assert global_step.is_deleted()
    np.testing.assert_array_equal(got, [number + 1] * 2)
    np.testing.assert_array_equal(keys_bits, step_bits)


@pytest.mark.parametrize(
  'fake', [chex.fake_pmap, chex.fake_pmap_and_jit, contextlib.nullcontext]
)
def test_step_keys_where_pmap_or_jit_is_off(fake, monkeypatch):
  key, mode = jax.random.PRNGKey(3), MODES[0]
  op_by_op = fake is contextlib.nullcontext
  monkeypatch.setattr(debug.settings, 'disable_pmap_jit', op_by_op)

  @debug.disable_pmap_jit
  def run():
    _assert_steps(
      prng.DeviceStepKeys(mode, block=2),
      devices.bcast_local_devices(key),
      _expected_steps(key, mode, range(5)),
    )

  with fake():
    run()


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
