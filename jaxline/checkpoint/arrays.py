"""Reads and writes arrays as chunked Zarr 3, with a checksum for each chunk.

Each array has a folder with uncompressed chunks, one object each, and a
`zarr.json` for other programs. This module calls a chunk a part. Next to the
folders, `_METADATA` lists all arrays for Orbax. The manifest describes each
array by its shape, its type, the shape of its parts and the CRC-32C of each
part. A restore reads each part once, and verifies it in the same pass.
"""

import base64
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import functools
import itertools
import math
import re
from typing import Any

import crc32c
import jax
import jax.numpy as jnp
import numpy as np

from jaxline.base import keys
from jaxline.checkpoint import metadata
from jaxline.run_directory import store as store_lib

# A part has at most this many bytes, if its array can be split evenly.
_PART_BYTES = 64 << 20
# Reading ahead stops at this many bytes.
_READ_BYTES = 1 << 30
_COPIERS = 4  # Threads; a single one does not saturate the memory bandwidth.
# The names of the types that Zarr supports.
_TYPES = re.compile(
  r'bool|u?int\d+|b?float16|float(32|64)|complex(64|128)|float\d_\w+'
)

Index = tuple[slice, ...]


# Writing.


@dataclasses.dataclass
class HostArray:
  """A copy in host memory of an array's blocks that this process writes."""

  about: dict[str, Any]  # The description; lists the parts written so far.
  blocks: list[tuple[Index, np.ndarray]]  # They all have the same shape.


def to_host(live: Mapping[str, Any]) -> dict[str, HostArray]:
  """Copies arrays to host memory, so that no later step can change them.

  If an array spans several hosts, each process copies its own shards; of
  replicas, only the first is copied. Process 0 copies all other arrays.
  """
  data = {
    name: jax.random.key_data(x) if is_key(x) else x for name, x in live.items()
  }
  for name, x in data.items():
    if not can_store(x):
      raise TypeError(f'{name} has the type {x.dtype}, which Zarr lacks.')
    if isinstance(x, jax.Array):  # Start all transfers before waiting for one.
      x.copy_to_host_async()
  with futures.ThreadPoolExecutor(_COPIERS) as pool:
    blocks = [_blocks(x, pool) for x in data.values()]
  folders = metadata.folders(data)
  return {
    name: HostArray(
      _described(live[name], x, folders[name]),
      [(index, future.result()) for index, future in own],
    )
    for (name, x), own in zip(data.items(), blocks, strict=True)
  }


def _blocks(
  x: Any, pool: futures.Executor
) -> list[tuple[Index, futures.Future[np.ndarray]]]:
  """Starts copying the blocks of an array that this process writes."""
  if not x.size:
    return []
  # A replicated array that `device_put` made from a local one has no shards.
  if isinstance(x, jax.Array) and not (
    x.is_fully_addressable or x.is_fully_replicated
  ):
    return [
      (shard.index, _copy(shard.data, pool))
      for shard in x.addressable_shards
      if shard.replica_id == 0
    ]
  if jax.process_index() != 0:
    return []
  return [((slice(None),) * x.ndim, _copy(x, pool))]


def _copy(x: Any, pool: futures.Executor) -> futures.Future[np.ndarray]:
  if isinstance(x, jax.Array) and not (
    x.is_fully_replicated and next(iter(x.devices())).platform == 'cpu'
  ):
    # `asarray` makes a copy: from a different device, or of joined shards.
    return pool.submit(np.asarray, x, order='C')
  source = np.asarray(x)
  # Allocate here: memory that the pool's threads allocate stays fragmented.
  return pool.submit(_fill, np.empty(source.shape, source.dtype), source)


def _fill(copy: np.ndarray, source: np.ndarray) -> np.ndarray:
  copy[...] = source
  return copy


def _described(live: Any, x: Any, folder: str) -> dict[str, Any]:
  """Returns the description of an array, with no parts listed yet."""
  about: dict[str, Any] = {
    'file': folder,
    'shape': list(x.shape),
    'dtype': x.dtype.name,
    'parts': {},
  }
  block = x.shape
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    block = x.sharding.shard_shape(x.shape)
  about['chunk'] = _part_shape(block, x.dtype.itemsize)
  if is_key(live):
    about['key'] = str(jax.random.key_impl(live))
  return about


def _part_shape(block: Sequence[int], itemsize: int) -> list[int]:
  """Returns the shape of the parts into which the rows of a block are split."""
  needed = math.ceil(math.prod(block) * itemsize / _PART_BYTES)
  if not block or needed <= 1:
    return list(block)
  # Find a number of parts near `needed` that divides the rows.
  needed = min(needed, block[0])
  for count in range(needed, min(4 * needed, block[0]) + 1):
    if block[0] % count == 0:
      return [block[0] // count, *block[1:]]
  return list(block)


def write(
  store: store_lib.Store, arrays: Mapping[str, HostArray]
) -> dict[str, Any]:
  """Writes this process's blocks of arrays; they are on disk when it returns.

  Returns:
    Name -> description, which lists the parts that this process has written.
  """
  described = {name: array.about for name, array in arrays.items()}

  def write_part(about: dict[str, Any], part: str, values: np.ndarray) -> None:
    raw = _bytes(values)
    store.write_part(f'{about["file"]}/{part}', raw)
    about['parts'][part] = crc32c.crc32c(raw)

  with futures.ThreadPoolExecutor(store.threads) as pool:
    tasks = [(a.about, *x) for a in arrays.values() for x in _parts_of(a)]
    # Write the largest first, so that all threads end at about the same time.
    tasks.sort(key=lambda task: -task[2].nbytes)
    pending = [pool.submit(write_part, *task) for task in tasks]
    if jax.process_index() == 0:
      zarr, meta = metadata.ZARR, {metadata.ORBAX: metadata.orbax(described)}
      meta |= {
        f'{x["file"]}/{zarr}': metadata.zarr(x) for x in described.values()
      }
      for key, text in meta.items():
        pending.append(pool.submit(store.write_part, key, memoryview(text)))
    try:
      for future in pending:
        future.result()
    finally:
      pool.shutdown(cancel_futures=True)
  if pending:
    store.sync()
  return described


def _parts_of(array: HostArray) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the name and the values of each part of a copied array."""
  chunk = array.about['chunk']
  for index, block in array.blocks:
    first = [(s.start or 0) // c for s, c in zip(index, chunk, strict=True)]
    if not chunk:
      yield _part(first), block
      continue
    for i in range(block.shape[0] // chunk[0]):
      at = [first[0] + i, *first[1:]]
      yield _part(at), block[i * chunk[0] : (i + 1) * chunk[0]]


def _part(at: Iterable[int]) -> str:
  return '.'.join(['c', *map(str, at)])


def _bytes(x: np.ndarray) -> memoryview:
  return memoryview(x.reshape(-1).view(np.uint8).data)


# Reading.


def _is_written(about: dict[str, Any]) -> bool:
  """Returns whether this module could have written a description."""
  shape, chunk, parts = about['shape'], about['chunk'], about['parts']
  if len(shape) != len(chunk) or any(
    n % c if c else n for n, c in zip(shape, chunk, strict=True)
  ):
    return False
  grid = [n // max(1, c) for n, c in zip(shape, chunk, strict=True)]
  np.broadcast_to(np.empty([], jnp.dtype(about['dtype'])), shape)
  if 'key' in about:
    data = jax.eval_shape(jax.random.key_data, _key_of(about))
    if (about['dtype'], shape[-data.ndim :]) != (data.dtype, [*data.shape]):
      return False
  return len(parts) == math.prod(grid) and set(parts) == {
    *map(_part, itertools.product(*map(range, grid)))
  }


_SHAPE = keys.each(keys.integer(0), list)
_TYPE = keys.Check(
  'a type of Zarr',
  lambda x: bool(_TYPES.fullmatch(x)) and jnp.dtype(x).name == x,
)
# The forms of descriptions in a manifest. DESCRIBED describes an array in a
# folder, SMALL an array that the manifest itself contains (see `contents`).
DESCRIBED = keys.record(
  _is_written,
  file=keys.text('the name of a folder', metadata.FOLDER.pattern),
  shape=_SHAPE,
  chunk=_SHAPE,
  dtype=_TYPE,
  parts=keys.each(keys.integer(0, below=2**32), names=r'c(\.\d+)*'),
  key=keys.optional(keys.text('an implementation of keys')),
)
SMALL = keys.record(
  lambda x: len(base64.b64decode(x['base64'])) == num_bytes(x),
  shape=_SHAPE,
  dtype=_TYPE,
  base64=keys.text('base64'),
)


def _start(
  store: store_lib.Store,
  pool: futures.Executor,
  about: Mapping[str, Any],
  target: Any,
) -> tuple[int, Callable[[], Any]]:
  """Starts reading an array; returns its bytes and a function to finish."""
  shape, dtype = tuple(about['shape']), jnp.dtype(about['dtype'])
  sharding = getattr(target, 'sharding', None)
  split = None if is_key(target) else sharding
  indices: Iterable[Index] = [(slice(None),) * len(shape)]
  if split is not None:
    indices = split.addressable_devices_indices_map(shape).values()
  buffers: dict[str, tuple[list[tuple[int, int]], np.ndarray]] = {}
  # Devices with the same index share a buffer. (Slices are not hashable.)
  for key, index in {str(i): i for i in indices}.items():
    bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    buffers[key] = bounds, np.empty([high - low for low, high in bounds], dtype)
  pending = [
    pool.submit(_read_part, store, about, part, places)
    for part in about['parts']
    if (places := _places(about['chunk'], part, buffers.values()))
  ]

  def finish() -> Any:
    for future in pending:
      future.result()
    if split is not None:
      of = lambda index: buffers[str(index)][1]
      return jax.make_array_from_callback(shape, split, of)
    x: Any
    ((_, x),) = buffers.values()
    if 'key' in about and is_key(target):
      x = jax.random.wrap_key_data(jnp.asarray(x), impl=about['key'])
    return x if sharding is None else jax.device_put(x, sharding)

  return sum(x.nbytes for _, x in buffers.values()), finish


def _places(
  chunk: Sequence[int], part: str, buffers: Iterable[tuple[Any, np.ndarray]]
) -> list[tuple[np.ndarray, Any]]:
  """Returns (view of a buffer, index into the part) for each use of a part."""
  at = [int(i) * c for i, c in zip(part.split('.')[1:], chunk, strict=True)]
  places: list[tuple[np.ndarray, Any]] = []
  for bounds, buffer in buffers:
    axes = [
      (first, low, max(first, low), min(first + n, high))
      for first, n, (low, high) in zip(at, chunk, bounds, strict=True)
    ]
    if all(begin < end for *_, begin, end in axes):
      # The ellipsis makes a view even of an array without axes.
      into: Any = (..., *(slice(b - low, e - low) for _, low, b, e in axes))
      of = (..., *(slice(b - first, e - first) for first, _, b, e in axes))
      places.append((buffer[into], of))
  return places


def _read_part(
  store: store_lib.Store,
  about: Mapping[str, Any],
  part: str,
  places: Sequence[tuple[np.ndarray, Any]] = (),
) -> None:
  """Reads a part, verifies it and copies it to its places."""
  key, chunk = f'{about["file"]}/{part}', tuple(about['chunk'])
  views = (view for view, _ in places if view.shape == chunk)
  values = next((view for view in views if view.flags.c_contiguous), None)
  if values is None:
    values = np.empty(chunk, jnp.dtype(about['dtype']))
  raw = _bytes(values)
  store.read_into(key, raw)
  if crc32c.crc32c(raw) != about['parts'][part]:
    raise store_lib.DamagedError(f'the CRC-32C of {key} does not match')
  for view, of in places:
    if view is not values:
      view[...] = values[of]


def read(
  store: store_lib.Store,
  described: Mapping[str, Mapping[str, Any]],
  targets: Mapping[str, Any],
) -> Iterator[tuple[str, Any]]:
  """Yields (name, array) in the order of the targets, and reads ahead.

  Args:
    store: the folder of the arrays.
    described: name -> description.
    targets: name -> jax.ShapeDtypeStruct or array, whose sharding the result
      gets. Without a sharding, or for None, the result is a NumPy array.

  Raises:
    DamagedError: a size or a checksum does not match.
  """
  left, started, size = [*targets][::-1], collections.deque[Any](), 0
  with futures.ThreadPoolExecutor(store.threads) as pool:
    checks = {
      name: pool.submit(_check_stored, store, described[name])
      for name in targets
    }
    try:
      for name in targets:
        while left and (not started or size < _READ_BYTES):
          soon = left.pop()
          checks[soon].result()
          started.append(_start(store, pool, described[soon], targets[soon]))
          size += started[-1][0]
        size -= started[0][0]
        x = started.popleft()[1]()
        yield name, x
        del x
    finally:
      pool.shutdown(cancel_futures=True)


def _check_stored(store: store_lib.Store, about: Mapping[str, Any]) -> None:
  """Compares a description with the stored array, before allocating memory."""
  # `zarr.json` may be missing, but must not describe a different array.
  meta = store.read(key := f'{about["file"]}/{metadata.ZARR}')
  if meta not in (None, metadata.zarr(about)):
    raise store_lib.DamagedError(f'{key} does not describe the array')
  for part in itertools.islice(about['parts'], 1):  # All have the same size.
    _check_size(store, about, part)


def _check_size(
  store: store_lib.Store, about: Mapping[str, Any], part: str
) -> None:
  size = math.prod(about['chunk']) * jnp.dtype(about['dtype']).itemsize
  store.check(f'{about["file"]}/{part}', size)


def verify(
  store: store_lib.Store,
  described: Mapping[str, Mapping[str, Any]],
  reads: bool = True,
) -> None:
  """Verifies all parts, or only their sizes; raises DamagedError."""
  check = _read_part if reads else _check_size

  def damage(look: Callable[[], Any]) -> str:
    try:
      look()
    except store_lib.DamagedError as e:
      return str(e)
    return ''

  looks: list[Callable[[], Any]] = []
  for about in described.values():
    if reads:
      looks.append(functools.partial(_check_stored, store, about))
    parts = about['parts']
    looks += [functools.partial(check, store, about, part) for part in parts]
  with futures.ThreadPoolExecutor(store.threads) as pool:
    found = [*filter(None, pool.map(damage, looks))]
  if found:
    raise store_lib.DamagedError('; '.join(found))


# Properties of descriptions and arrays.


def can_store(x: Any) -> bool:
  """Returns whether Zarr supports the type of an array."""
  return x.dtype.isnative and bool(_TYPES.fullmatch(x.dtype.name))


def num_bytes(about: Mapping[str, Any]) -> int:
  """Returns the number of bytes of a described array."""
  return math.prod(about['shape']) * jnp.dtype(about['dtype']).itemsize


def saved_shape(about: Mapping[str, Any]) -> str:
  """Returns the type and the shape of a described array as text."""
  if 'key' in about:
    # The last axis holds the numbers of a single key.
    return f'{_key_of(about).dtype}{about["shape"][:-1]}'
  return f'{about["dtype"]}{about["shape"]}'


def _key_of(about: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
  """Returns the type of the random keys in a described array."""
  return jax.eval_shape(lambda: jax.random.key(0, impl=about['key']))


def is_key(x: Any) -> bool:
  """Returns whether a value is an array of random keys, or has its type."""
  return x is not None and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
