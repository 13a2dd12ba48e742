"""Moves values of the per-device style between host and devices."""

import collections
from collections.abc import Generator, Iterable
import contextlib
import ctypes
import os
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxline.base import debug
from jaxline.base import keys

T = TypeVar('T')

KEYS = (
  keys.Key('max_steps_in_flight', None, keys.optional(keys.COUNT),
      'Limit on training steps queued on the devices: 2 keeps them busy, 1'
      ' waits for each step. None means 2, or 1 for several CPU devices, whose'
      ' collectives can starve each other.'),
)  # fmt: skip

# JAXline's name for a sum of a tree over the devices of a mapped axis.
tree_psum = jax.lax.psum


def local_sharding() -> jax.sharding.NamedSharding:
  """Returns the sharding of a [local devices, ...] array, one row on each."""
  mesh = jax.sharding.Mesh(np.asarray(jax.local_devices()), ('i',))
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('i'))


def get_first(xs: Any) -> Any:
  """Takes the first local device's row of each [local devices, ...] array."""

  def first(x: Any) -> Any:
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
      row = x.addressable_data(0)
      if row.shape == (1, *x.shape[1:]):
        # x[0] would run a program on all devices and copy the row to each.
        return jax.lax.squeeze(row, (0,))
    return x[0]

  return jax.tree_util.tree_map(first, xs)


def bcast_local_devices(value: Any) -> Any:
  """Copies a tree of arrays, keys or numbers to every local device.

  The arrays become [local devices, ...], with one row on each device.
  """
  devices = jax.local_devices()
  sharding = local_sharding()

  def bcast(x: Any) -> jax.Array:
    # Copy, since on a CPU the result could share memory with `x`.
    row = x[None] if isinstance(x, jax.Array) else np.array(x)[None]
    rows = [jax.device_put(row, device) for device in devices]
    shape = (len(devices), *row.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, rows)

  return jax.tree_util.tree_map(bcast, value)


def maybe_device_get(x: Any) -> Any:
  """Fetches a JAX array to the host; returns anything else unchanged."""
  return jax.device_get(x) if isinstance(x, jax.Array) else x


def double_buffer(ds: Iterable[T]) -> Generator[T, None, None]:
  """Keeps two batches on the devices, the current one and the next.

  So the copy of a batch overlaps with the computation on the previous batch.
  The batches of `ds` are trees of [local devices, ...] arrays on the host.
  Closing the generator closes the iterator of `ds`.
  """
  sharding = local_sharding()
  ahead: collections.deque[T] = collections.deque()
  iterator = iter(ds)
  try:
    for batch in iterator:
      ahead.append(jax.device_put(batch, sharding))
      del batch
      if len(ahead) == 2:
        yield ahead.popleft()
    yield from ahead
  finally:
    if hasattr(iterator, 'close'):
      iterator.close()


def double_buffer_on_gpu(ds: Iterable[T]) -> Iterable[T]:
  """Returns `double_buffer(ds)` on GPUs, and `ds` on other platforms."""
  return double_buffer(ds) if jax.default_backend() == 'gpu' else ds


def keep_freed_memory() -> None:
  """Makes glibc keep freed memory, if JAX computes on the CPU.

  A step allocates its temporary arrays as one block. By default, glibc maps a
  block of over 32 MiB each time, so the system clears its pages in each step.
  This keeps blocks of up to 64 MiB, unless MALLOC_* or GLIBC_TUNABLES is set.
  """
  is_set = any(x.startswith(('MALLOC_', 'GLIBC_TUNABLES')) for x in os.environ)
  if is_set or jax.default_backend() != 'cpu':
    return
  with contextlib.suppress(AttributeError, OSError):  # A different C library.
    mallopt = ctypes.CDLL(None).mallopt
    if mallopt(-3, 2**30):  # M_MMAP_THRESHOLD; glibc before 2.35 refuses it.
      mallopt(-1, 2**30)  # M_TRIM_THRESHOLD; alone, it maps more blocks.
      mallopt(-2, 2**26)  # M_TOP_PAD; a thread's second heap is then kept too.


def rendezvous() -> None:
  """Waits until all hosts have called it, and checks the number of devices."""
  with debug.log_activity('rendezvous'):
    ones = np.ones([jax.local_device_count()], np.int32)
    sums = jax.pmap(tree_psum, 'i', static_broadcasted_argnums=1)(ones, 'i')
    got = jax.device_get(sums).tolist()
    if set(got) != {jax.device_count()}:
      raise ValueError(
        f'Rendezvous: the devices of this host counted {got} devices; expected '
        f'{jax.device_count()}. Start all processes with the same settings.'
      )


def layout(value: Any) -> dict[Any, Any] | None:
  """Returns the (shape, sharding) of the arrays of a tree, by path.

  The result is None unless all leaves are jax.Arrays, whose shapes are fixed.
  """
  leaves = jax.tree.leaves_with_path(value)
  if not leaves or not all(isinstance(x, jax.Array) for _, x in leaves):
    return None
  return {path: (x.shape, x.sharding) for path, x in leaves}


def put_by_layout(value: Any, layout: dict[Any, Any] | None) -> Any:
  """Restores each array's recorded sharding, matched by path and shape.

  NumPy arrays without a match go to the default device. If the layout is None,
  the tree is returned unchanged.
  """
  if layout is None:
    return value

  def put_leaf(path: Any, x: Any) -> Any:
    shape, sharding = layout.get(path, (None, None))
    if shape == np.shape(x):
      return jax.device_put(x, sharding)
    return jax.device_put(x) if isinstance(x, np.ndarray) else x

  return jax.tree.map_with_path(put_leaf, value)


def freeze(x: Any) -> Any:
  """Copies a leaf to the host, so that no later step can change it.

  Typed keys remain typed. Of an array that spans hosts, this host's shards are
  copied on their devices. Values other than arrays are returned unchanged.
  """
  if isinstance(x, jax.Array):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      data = freeze(jax.random.key_data(x))
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if not x.is_fully_addressable:
      # Copy shard by shard, since other hosts may not be saving.
      parts = [jnp.copy(shard.data) for shard in x.addressable_shards]
      return jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, parts
      )
    # On a CPU, device_get returns a view of the device's buffer, which the next
    # step may donate and overwrite.
    return np.array(x)
  return x.copy() if isinstance(x, np.ndarray) else x
