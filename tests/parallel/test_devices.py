"""Tests of jaxline.parallel.devices."""

import gc
from unittest import mock
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline.parallel import devices

P = jax.sharding.PartitionSpec


def _shards(x):
  """The parts of an array, by device."""
  return {s.device: np.asarray(s.data) for s in x.addressable_shards}


def test_get_first_of_any_sharding():
  x = np.array([[1.0, 2.0], [3.0, 4.0]])
  for rows, spec in (2, P('a')), (2, P()), (2, P(None, 'a')), (1, P(None, 'a')):
    for order in 1, -1:
      mesh = jax.sharding.Mesh(np.array(jax.devices()[::order]), ('a',))
      placed = jax.device_put(x[:rows], jax.sharding.NamedSharding(mesh, spec))
      np.testing.assert_array_equal(devices.get_first(placed), [1.0, 2.0])


def test_bcast_puts_a_copy_on_each_device():
  # A CPU device would take this memory as it is.
  aligned = min(
    [np.full(64, 2.5, np.float32) for _ in range(99)],
    key=lambda x: x.ctypes.data % 64,
  )
  for value, dtype in (
    (3, jnp.int32),
    (jnp.ones([2, 2], jnp.bfloat16), jnp.bfloat16),
    (aligned, jnp.float32),
  ):
    got = devices.bcast_local_devices(value)
    assert (got.shape, got.dtype) == ((2, *np.shape(value)), dtype)
    shards = _shards(got)
    assert list(shards) == jax.local_devices()
    for shard in shards.values():
      np.testing.assert_array_equal(shard[0], np.asarray(value))
    assert devices.get_first(got).devices() == {jax.devices()[0]}
  aligned[:] = 7
  assert float(got.max()) == 2.5


def _batch(i):
  keys = jax.random.split(jax.random.key(i))
  return {'x': jnp.full([2, 3], i), 'y': (np.array([i, -i]), keys, None)}


@pytest.mark.parametrize('count', [0, 1, 4])
def test_double_buffer_is_one_batch_ahead_and_keeps_no_other(count):
  read, held = [], []

  def ds():
    for i in range(count):
      read.append(i)
      yield _batch(i)

  batches = devices.double_buffer(ds())
  assert read == []
  for i, batch in enumerate(batches):
    assert read == list(range(min(i + 2, count)))
    np.testing.assert_array_equal(batch['x'], np.full([2, 3], i))
    x, keys, none = batch['y']
    assert [shard.tolist() for shard in _shards(x).values()] == [[i], [-i]]
    expected = jax.random.key_data(_batch(i)['y'][1])
    np.testing.assert_array_equal(jax.random.key_data(keys), expected)
    assert none is None
    held.append(weakref.ref(batch['x']))
    del batch, x, keys
    gc.collect()
    # The one read ahead is held by double_buffer and not known here yet.
    assert sum(ref() is not None for ref in held) <= 1
  assert len(held) == count


def test_double_buffer_ended_early_ends_its_source():
  source = (_batch(i) for i in range(100))
  batches = devices.double_buffer(source)
  next(batches)
  assert source.gi_frame
  del batches
  assert not source.gi_frame  # Although the caller has it still.


def test_rendezvous_counts_the_devices():
  devices.rendezvous()
  with chex.fake_pmap_and_jit():
    devices.rendezvous()
  with mock.patch.object(jax, 'device_count', return_value=8):
    with pytest.raises(ValueError, match=r'\[2, 2\].*expected 8'):
      devices.rendezvous()
