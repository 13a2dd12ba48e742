"""Hashes each training step, to detect whether two runs are identical.

The fingerprint of a step is a uint32 hash of its scalars and its batch. A
separate program computes it, so the program of the step does not change. The
hash sums integers, so it does not depend on how arrays are sharded. The file
has pairs of little-endian uint32: the number of a step and its fingerprint. In
the sharded style a second pair follows: the number + 2**31 and the loss bits.
"""

from collections.abc import Callable, Mapping
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxline.metrics import files
from jaxline.metrics import periodic
from jaxline.metrics import scalars as scalars_lib

FILE = 'fingerprints.bin'
_DTYPE = np.dtype('<u4')
_LOSS = 2**31
_MAX_KEPT = 200  # Limit on pairs in memory; a step has one or two.
# Knuth's multiplier 2**32 / phi. It is odd, so the product loses no bit.
_MULTIPLIER = np.uint32(2654435769)
# These scalars depend on the clock or the machine, as do rates per second.
_CLOCKED = ('input_wait_fraction', 'mfu', 'device_memory_gib')


class FingerprintWriter(files.FileBackend):
  """Appends fingerprints to a file, which a resume truncates like a log."""

  kinds = ('fingerprints',)

  def _mend(self) -> None:
    size = os.path.getsize(self.path)
    self._file.truncate(size - size % 8)

  def encode(self, record: files.Record) -> bytes:
    pairs = [
      # A loss comes as an array of bits and an index.
      (step, bits[0][bits[1]] if isinstance(bits, tuple) else bits)
      for step, bits in record.values.items()
    ]
    return np.array(pairs, _DTYPE).tobytes()


def read(raw: bytes | None) -> tuple[dict[int, int], dict[int, float]]:
  """Parses a file; returns the fingerprints and the losses, each by step."""
  raw = raw or b''
  numbers = np.frombuffer(raw, _DTYPE, len(raw) // 8 * 2).reshape(-1, 2)
  is_loss = numbers[:, 0] >= _LOSS
  steps, losses = numbers[is_loss].T
  found = zip(
    (steps - np.uint32(_LOSS)).tolist(),
    losses.view('<f4').tolist(),
    strict=True,
  )
  return dict(numbers[~is_loss].tolist()), dict(found)


def _bits(x: jax.Array) -> jax.Array:
  """Returns an array's bits as an array of uint32."""
  if jnp.issubdtype(x.dtype, jax.dtypes.extended):
    x = jax.random.key_data(x)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag])
  if x.dtype == bool:
    return x.astype(jnp.uint32)
  width = 8 * min(x.dtype.itemsize, 4)
  return jax.lax.bitcast_convert_type(x, f'uint{width}').astype(jnp.uint32)


@jax.jit
def fingerprint(tree: Any) -> jax.Array:
  """Returns a uint32 hash of all bits of a tree of arrays."""
  total = jnp.uint32(0)
  for x in jax.tree.leaves(tree):
    bits = _bits(jnp.asarray(x))
    # Hash the place of each number in the global array. XLA shards an iota like
    # the array, but not a reshaped range.
    place = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(bits.shape):
      index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
      place = place * jnp.uint32(size) + index
    mixed = (bits ^ (bits >> 15)) * (2 * place + 1) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> 13)) * _MULTIPLIER
    total = (total ^ mixed.sum(dtype=jnp.uint32)) * _MULTIPLIER
  return total


def without_timing_scalars(scalars: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the scalars that depend on neither the clock nor the machine."""
  kept = scalars_lib.copied(scalars)
  # The scalars that the compiled step packs do not depend on a clock.
  others = scalars_lib.others_of(kept)
  for name in _clocked(tuple(others)):
    del others[name]
  return kept


@functools.lru_cache  # Each step has the same names.
def _clocked(names: tuple[str, ...]) -> list[str]:
  return [x for x in names if x in _CLOCKED or x.endswith('_per_sec')]


def of_step(scalars: Mapping[str, Any], batch: Any) -> jax.Array:
  """Returns the fingerprint of a step's scalars and batch."""
  leaves = jax.tree.leaves(batch) + scalars_lib.leaves(
    without_timing_scalars(scalars)
  )
  arrays = [x for x in leaves if isinstance(x, jax.Array)]
  try:
    return fingerprint(arrays)
  except ValueError:
    # In the per-device style some arrays are on one device and some on all,
    # and no program takes both.
    devices = arrays[0].devices()
    return fingerprint([x for x in arrays if x.devices() == devices])


class FingerprintHook(periodic.Action):
  """Computes a fingerprint after each step and logs many at once."""

  def __init__(self, log: Any, experiment: Any):
    self._log, self._experiment = log, experiment
    self._kept: dict[int, Any] = {}

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    scalars = scalar_outputs or {}
    self._kept[step] = of_step(scalars, self._experiment.last_batch)
    loss = scalars_lib.find(scalars, 'loss')
    if loss and loss[1] != ():  # It is packed, so the loop fetches it anyway.
      self._kept[step + _LOSS] = loss
    if len(self._kept) >= _MAX_KEPT:
      self.wait_to_finish()

  def flush_async(self) -> Callable[[], dict[str, int]]:
    self.wait_to_finish()
    return dict

  def wait_to_finish(self) -> None:
    """Queues the fingerprints so far."""
    if self._kept:
      self._log.put('fingerprints', 0, self._kept)
      self._kept = {}
