"""Derives random keys: of a run, of named streams, of hosts and devices."""

from collections.abc import Iterator
import enum
import functools
from typing import Any
import zlib

import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np

from jaxline.base.keys import BOOLEAN, Key, integer, one_of
from jaxline.parallel import devices


def run_keys(config: config_dict.ConfigDict) -> tuple[jax.Array, jax.Array]:
  """Returns the key of the training steps and the key of initial weights."""
  rng = jax.random.PRNGKey(config.random_seed)
  if config.legacy_random_seed_behavior:
    return rng, rng
  return _split(rng)


@jax.jit  # One program instead of two saves time in short runs.
def _split(rng: jax.Array) -> tuple[jax.Array, jax.Array]:
  step_rng, init_rng = jax.random.split(rng)
  return step_rng, init_rng


def stream_number(name: str) -> np.uint32:
  """Hashes the name of a stream for `jax.random.fold_in`."""
  # `jax.random.split` folds in 0, 1, ..., so it never uses these numbers.
  return np.uint32(zlib.crc32(name.encode()) | 2**31)


def stream(rng: jax.Array, name: str) -> jax.Array:
  """Returns the key of a named stream, such as 'evaluation'."""
  return jax.jit(jax.random.fold_in)(rng, stream_number(name))


class DistributedRNGMode(enum.Enum):
  """Whether the random keys of hosts and devices differ."""

  UNIQUE_HOST_UNIQUE_DEVICE = 'unique_host_unique_device'
  UNIQUE_HOST_SAME_DEVICE = 'unique_host_same_device'
  SAME_HOST_UNIQUE_DEVICE = 'same_host_unique_device'
  SAME_HOST_SAME_DEVICE = 'same_host_same_device'

  @property
  def unique_host(self) -> bool:
    """Whether the keys of different hosts differ."""
    return self.value.startswith('unique_host')

  @property
  def unique_device(self) -> bool:
    """Whether the keys of different devices differ."""
    return self.value.endswith('unique_device')


_RANDOM_MODE = one_of(*(mode.value for mode in DistributedRNGMode))
KEYS = (
  Key('random_seed', 42, integer(-(2**63), 2**63 - 1),  # JAX has this range.
      'Seed of all random numbers, which is split into the step key and the'
      ' init key.', 'run'),
  Key('random_mode_train', 'unique_host_unique_device', _RANDOM_MODE,
      'How the keys of the devices differ in a training step of the per-device'
      ' style; see `prng.DistributedRNGMode`.', 'run'),
  Key('random_mode_eval', 'same_host_same_device', _RANDOM_MODE,
      'Like `random_mode_train`, for an evaluation.'),
  Key('legacy_random_seed_behavior', False, BOOLEAN,
      "Use the seed's unsplit key as both keys, as the first versions of"
      ' JAXline did.', 'run'),
)  # fmt: skip


def host_id_devices_for_rng(
  mode: str = 'unique_host_unique_device',
) -> jax.Array | None:
  """Returns the process index, [local devices] int32; None if not folded in."""
  if not DistributedRNGMode(mode).unique_host:
    return None
  return jnp.full(
    [jax.local_device_count()], jax.process_index(), dtype=jnp.int32
  )


def specialize_rng_host_device(
  rng: jax.Array,
  host_id: jax.Array | int | None,
  axis_name: str,
  mode: str = 'unique_host_unique_device',
) -> jax.Array:
  """Folds the host and then the device into a key, if the mode asks for it.

  Call it inside `jax.pmap` over `axis_name`, with the `host_id` of
  `host_id_devices_for_rng`.
  """
  parsed = DistributedRNGMode(mode)
  if parsed.unique_host:
    rng = jax.random.fold_in(rng, host_id)  # type: ignore[arg-type]
  if parsed.unique_device:
    rng = jax.random.fold_in(rng, jax.lax.axis_index(axis_name))
  return rng


class DeviceStepKeys:
  """Computes the step number and keys of each step, for each local device.

  Each step does `step_key, state_key = split(state_key)`, and the mode makes
  the step's key specific to the host and the device. JAXline's `pmap` per step
  costs more than an empty training step, so one program computes a block of
  steps. Each value has its own buffer, which a step may donate.
  """

  def __init__(self, mode: str, *, block: int = 16):
    host_ids = host_id_devices_for_rng(mode)
    sharding = devices.local_sharding()
    num_devices = sharding.num_devices
    # Number devices as a pmap over all hosts does: this program is local.
    first_index = jax.local_devices()[0].process_index * num_devices
    indices = np.arange(first_index, first_index + num_devices, dtype=np.int32)
    self._sharding = sharding
    device_ids = indices if DistributedRNGMode(mode).unique_device else None
    # These are folded into a step's key, except None.
    self._specifics = jax.device_put((host_ids, device_ids), sharding)
    self._program = _block_program(block, sharding)
    # `_ahead` gives the values of a block, and frees them together, which takes
    # less time. `_end_step` is the step after them. `_next_*` are the arguments
    # that continue the last call.
    self._ahead: Iterator[Any] = iter(())
    self._end_step: jax.Array | None = None
    self._next_step = -1
    self._next_key: jax.Array | None = None

  def __call__(
    self, global_step: int, state_key: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the step, [local devices] int32, its keys and the next state key.

    The keys are [local devices, ...], uint32 or typed. A call is cheap if both
    arguments continue the last call.
    """
    if state_key is not self._next_key or global_step != self._next_step:
      steps = np.full([self._sharding.num_devices], global_step, np.int32)
      self._end_step, state_key = jax.device_put(
        (steps, state_key), self._sharding
      )
      self._ahead = iter(())
    if (found := next(self._ahead, None)) is None:
      # This is not the user's code, so compile it under `disable_pmap_jit` too.
      with jax.disable_jit(False):
        values, self._end_step = self._program(
          self._end_step, state_key, self._specifics
        )
      self._ahead = iter(values)
      found = next(self._ahead)
    step, step_keys, self._next_key = found
    self._next_step = global_step + 1
    return step, step_keys, self._next_key


@functools.cache  # All runs of a process share the compiled program.
def _block_program(block: int, sharding: Any) -> Any:
  derive, spec = functools.partial(_derive_block, block), sharding.spec
  return jax.jit(
    jax.shard_map(
      derive, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
  )


def _derive_block(
  block: int, steps: jax.Array, state_keys: jax.Array, specifics: Any
) -> tuple[list[tuple[jax.Array, ...]], jax.Array]:
  def derive(state_key: jax.Array, _: None) -> Any:
    step_key, state_key = jax.random.split(state_key)
    return state_key, (step_key, state_key)

  # Use a loop, since its body is compiled only once.
  _, (step_keys, next_keys) = jax.lax.scan(derive, state_keys[0], length=block)
  # Fold in after the loop, since for all keys at once it takes less time.
  for specific in jax.tree.leaves(specifics):
    fold_in = functools.partial(jax.random.fold_in, data=specific[0])
    step_keys = jax.vmap(fold_in)(step_keys)
  numbers = steps[0] + jnp.arange(block, dtype=steps.dtype)
  stacked = (numbers, step_keys, next_keys)
  rows = [tuple(x[i, None] for x in stacked) for i in range(block)]
  return rows, steps + block
