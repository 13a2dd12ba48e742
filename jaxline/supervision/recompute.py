"""Computes a step twice, to find hardware that computes wrongly in silence."""

import collections
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from jaxline.metrics import fingerprints


class RecomputeError(ArithmeticError):
  """A step that was computed twice gave two results."""


def twice(step: Callable[..., Any], state: Any, *args: Any) -> Any:
  """Returns what a step returns, after it has been computed twice.

  It waits for both, and needs memory for one more state.

  Args:
    step: the compiled step `(state, *args) -> results`; it donates its state.
    state: the state before the step.
    *args: the other arguments.

  Raises:
    RecomputeError: the results differ in a bit; names arrays and devices.
  """
  twin = jax.device_put(
    state, jax.tree.map(lambda x: x.sharding, state), may_alias=False
  )
  first, second = step(state, *args), step(twin, *args)
  differs = _of_devices(first) != _of_devices(second)
  if not multihost_utils.process_allgather(np.bool_(differs)).any():
    return first
  found = []
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(first),
    jax.tree.leaves(second),
    strict=True,
  ):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
      if np.asarray(a.data).tobytes() != np.asarray(b.data).tobytes():
        found.append(f'{name} on {a.device}')
  raise RecomputeError(
    f'A step was computed twice from one state, and {len(found)} parts of'
    f' arrays of process {jax.process_index()} differ:'
    f' {", ".join(found[:8])}. Either a device computes wrongly, or the program'
    ' is not deterministic (on GPUs, set --xla_gpu_deterministic_ops=true).'
    ' Nothing of this step was saved: restart from the newest checkpoint,'
    ' without that device.'
  )


def _of_devices(tree: Any) -> Any:
  """Returns a fingerprint of what each device of this process holds."""
  parts = collections.defaultdict(list)
  for x in jax.tree.leaves(tree):
    # Not of the global array, of whose copies only one would be read.
    for shard in x.addressable_shards:
      parts[shard.device].append(shard.data)
  return jax.device_get([fingerprints.fingerprint(x) for x in parts.values()])
