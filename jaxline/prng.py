"""Random keys per host and per device."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
import numpy as np


class DistributedRNGMode(enum.Enum):
  """How the random keys of hosts and devices are related."""

  UNIQUE_HOST_UNIQUE_DEVICE = 'unique_host_unique_device'
  UNIQUE_HOST_SAME_DEVICE = 'unique_host_same_device'
  SAME_HOST_UNIQUE_DEVICE = 'same_host_unique_device'
  SAME_HOST_SAME_DEVICE = 'same_host_same_device'

  @classmethod
  def _missing_(cls, value: object) -> None:
    valid = ', '.join(repr(mode.value) for mode in cls)
    raise ValueError(
      f'{value!r} is not a random mode, expected one of {valid}.'
    )

  @property
  def unique_host(self) -> bool:
    """Whether the keys of different hosts differ."""
    return self.value.startswith('unique_host')

  @property
  def unique_device(self) -> bool:
    """Whether the keys of different devices differ."""
    return self.value.endswith('unique_device')


def host_id_devices_for_rng(
  mode: str = 'unique_host_unique_device',
) -> jax.Array | None:
  """Returns the host id for each local device, as the modes need it.

  Args:
    mode: a value of DistributedRNGMode.

  Returns:
    [local devices] int32 of this process's index; None in the same_host modes.
  """
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
  """Makes a key specific to the host and device, where the mode says so.

  The key is `fold_in(rng, host_id)`, then `fold_in` of the device's index on
  the axis. To be called inside `jax.pmap`.

  Args:
    rng: one key, uint32 (`PRNGKey`) or typed (`jax.random.key`).
    host_id: this host's id; needed in the unique_host modes. It is an argument
      because a Python int from `jax.process_index()` would make each host
      compile a different program.
    axis_name: name of the mapped axis over the devices.
    mode: a value of DistributedRNGMode.

  Returns:
    The key.

  Raises:
    ValueError: if the mode is unknown, or needs a host_id and there is none.
  """
  parsed = DistributedRNGMode(mode)
  if parsed.unique_host:
    if host_id is None:
      raise ValueError(
        f'Random mode {parsed.value!r} got host_id=None, expected the id of '
        'this host: pass host_id_devices_for_rng(mode) into the pmap.'
      )
    rng = jax.random.fold_in(rng, host_id)
  if parsed.unique_device:
    rng = jax.random.fold_in(rng, jax.lax.axis_index(axis_name))
  return rng


class DeviceStepKeys:
  """The per-device step number and random keys of a training loop."""

  def __init__(self, mode: str, *, block: int = 16):
    """Prepares the keys; compiles with the first call.

    Args:
      mode: a value of DistributedRNGMode.
      block: how many steps one program computes ahead.
    """
    self._mode = DistributedRNGMode(mode).value
    self._block = block
    self._host_ids = host_id_devices_for_rng(mode)

  def __call__(
    self, global_step: int, state_key: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what a step needs, and the state key for the next step.

    Args:
      global_step: the step to run, the same on all hosts.
      state_key: [local devices, ...] the loop's key, as the last call
        returned it (or as it was restored).

    Returns:
      [local devices] int32 global step; [local devices, ...] the step's keys;
      [local devices, ...] the next state key.
    """
    step = np.full([jax.local_device_count()], global_step, np.int32)
    derive = jax.pmap(self._derive, axis_name='i')
    return derive(step, state_key, self._host_ids)

  def _derive(self, step, rng, host_id):  # first version
    step_rng, state_rng = jax.random.split(rng)
    step_rng = specialize_rng_host_device(step_rng, host_id, 'i', self._mode)
    return step, step_rng, state_rng
