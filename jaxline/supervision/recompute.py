"""Computes a step twice, to find hardware that computes wrongly in silence."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
  shardings = jax.tree.map(lambda x: x.sharding, state)
  twin = jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=shardings)(
    state
  )
  first, second = step(state, *args), step(twin, *args)
  if int(fingerprints.fingerprint(first)) == int(
    fingerprints.fingerprint(second)
  ):
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
