"""Steps that are computed twice: each part is compared."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from jaxline.supervision import recompute


def test_each_copy_of_an_array_is_compared():
  mesh = jax.make_mesh((2,), ('a',))
  whole = jax.sharding.NamedSharding(mesh, P())
  values = iter([(0.0, 0.0), (0.0, 1e-30)])  # Of each device.

  def step(state):
    parts = [
      jax.device_put(np.float32(x), device)
      for x, device in zip(next(values), mesh.devices.flat, strict=True)
    ]
    w = jax.make_array_from_single_device_arrays((), whole, parts)
    return {'w': w, 'kept': state}

  state = jax.device_put(
    jnp.arange(4.0), jax.sharding.NamedSharding(mesh, P('a'))
  )
  with pytest.raises(recompute.RecomputeError, match=r'w on .*:1\.'):
    recompute.run_and_verify(step, state)
