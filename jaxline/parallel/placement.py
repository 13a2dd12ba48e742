"""Places the arrays of the sharded style on the devices of a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import partitioning


def put(tree: Any, shardings: Any, *, may_keep: bool = False) -> Any:
  """Puts values on the devices with the given shardings.

  Every process passes the same values and a prefix tree of shardings. The
  results share no buffer with other arrays, so they can be donated. With
  `may_keep`, arrays that already have their sharding are returned as they are.
  """

  def put_leaf(x: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array):
      is_placed = x.sharding == sharding
      if is_placed and may_keep:
        return x
      if is_placed or not x.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=sharding)(x)
    if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
      x = np.asarray(x)
    return jax.make_array_from_callback(
      # Copy, since on a CPU `jax.device_put` may alias the caller's buffer,
      # even with may_alias=False.
      x.shape,
      sharding,
      lambda index: x[index].copy(),
    )

  return jax.tree.map(put_leaf, tree, jax.tree.broadcast(shardings, tree))


def put_batch(batch: Any, partitioner: partitioning.Partitioner) -> Any:
  """Makes the global batch from the part of each process.

  `batch` is a tree of NumPy arrays [B / hosts, ...], the rows of
  `partitioner.host`, or arrays that already have the batch sharding. A CPU
  device may borrow the memory of the arrays, so they must not change.
  """
  sharding = partitioner.batch_sharding
  leaves = jax.tree.leaves(batch)
  check_rows(len(leaves[0]) * partitioner.host[1], partitioner)
  if all(getattr(x, 'sharding', None) == sharding for x in leaves):
    return batch
  if jax.process_count() == 1:  # This is faster than the general way below.
    return jax.device_put(batch, sharding)
  return jax.make_array_from_process_local_data(sharding, batch)


def check_rows(
  total: int, partitioner: partitioning.Partitioner, num_parts: int = 1
) -> None:
  """Raises MeshError if the rows of a global batch do not divide."""
  shards = partitioner.batch_shards * num_parts
  if remainder := total % shards:
    parts = f'gradient_accumulation_steps = {num_parts}, and '
    raise mesh_lib.MeshError(
      f'A global batch of {total} rows does not divide into {shards} parts'
      f' ({parts if num_parts > 1 else ""}{" x ".join(partitioner.rules.batch)}'
      f' of the mesh {partitioner.axis_sizes}); make it a multiple of {shards},'
      f' such as {total - remainder + shards}.'
    )


def padded_rows(rows: int, partitioner: partitioning.Partitioner) -> int:
  """Rounds the rows of a host up, so that they divide over its devices."""
  shards = partitioner.batch_shards // partitioner.host[1]
  return -(-rows // shards) * shards
