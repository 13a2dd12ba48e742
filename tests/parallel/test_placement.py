"""What is put on devices, without memory that anything else has."""

import jax
import numpy as np
import pytest

from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import partitioning
from jaxline.parallel import placement

P = jax.sharding.PartitionSpec


def partitioner():
  return partitioning.Partitioner.make(None, 'fsdp')


def test_rows_are_refused_with_those_that_fit():
  with mesh_lib.on_devices(mesh_lib.abstract_devices(8)):
    p = partitioning.Partitioner.make({'mdl': 2}, 'fsdp')
  placement.check_rows(8, p)
  for call, arg, fits in (
    (placement.check_rows, 6, 'such as 8.'),
    (placement.put_batch, {'x': np.ones([3, 2])}, 'such as 4.'),
  ):
    with pytest.raises(mesh_lib.MeshError, match=fits):
      call(arg, p)


def buffers(x):
  """Returns where the parts of an array begin."""
  if isinstance(x, np.ndarray):
    return {x.ctypes.data, x.ctypes.data + x.nbytes // 2}
  return {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


@pytest.mark.parametrize('spec', [P(), P('data')])
@pytest.mark.parametrize('source', ['numpy', 'jax', 'sharded'])
def test_what_was_put_may_be_donated(source, spec):
  # A CPU device would borrow this memory rather than copy it.
  arrays = [np.ones([64, 64], np.float32) for _ in range(99)]
  original = min(arrays, key=lambda x: x.ctypes.data % 64)
  mesh = partitioner().mesh
  if source != 'numpy':
    split = jax.sharding.NamedSharding(mesh, P('data'))
    original = jax.device_put(original, split if source == 'sharded' else None)
  sharding = jax.sharding.NamedSharding(mesh, spec)
  put = placement.put({'x': original}, sharding)['x']
  assert put.sharding == sharding
  assert not buffers(put) & buffers(original)
  step = jax.jit(lambda x: x - 41, donate_argnums=0)
  np.testing.assert_array_equal(step(put), np.full([64, 64], -40))
  np.testing.assert_array_equal(original, np.ones([64, 64]))


def test_put_batch_leaves_what_lies_right():
  p = partitioner()
  batch = placement.put_batch({'x': np.ones([4, 3])}, p)
  assert [s.data.shape for s in batch['x'].addressable_shards] == [(2, 3)] * 2
  assert placement.put_batch(batch, p) is batch
  elsewhere = jax.device_put(np.ones([4, 3]), jax.devices()[1])
  put = placement.put_batch({'x': elsewhere}, p)
  assert put['x'].sharding == p.batch_sharding
