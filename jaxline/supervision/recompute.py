"""Computes a step twice, to detect hardware that silently computes wrong."""

from collections.abc import Callable
from typing import Any

import jax

from jaxline.base import trees
from jaxline.metrics import fingerprints
from jaxline.parallel import distributed


class RecomputeError(ArithmeticError):
  """A step that was computed twice gave different results."""


def run_and_verify(step: Callable[..., Any], state: Any, *args: Any) -> Any:
  """Runs a compiled step twice, compares the results, and returns them."""
  twin = jax.device_put(
    state, jax.tree.map(lambda x: x.sharding, state), may_alias=False
  )
  results = step(state, *args)
  first, second = map(_fingerprints, (results, step(twin, *args)))
  found = [part for part in first if first[part] != second[part]]
  if not distributed.gather_and_decide(bool(found), any, series='recompute'):
    return results
  raise RecomputeError(
    'A step was computed twice from one state. In process'
    f' {jax.process_index()}, {len(found)} parts of arrays differ:'
    f' {", ".join(found[:8])}. A device is faulty, or the program is not'
    ' deterministic (on GPUs, set --xla_gpu_deterministic_ops=true). The step'
    ' was not saved: restart from the newest checkpoint, without that device.'
  )


def _fingerprints(tree: Any) -> dict[str, Any]:
  """Returns the fingerprints of this process's shards, by array and device."""
  found = {}
  for path, x in jax.tree.leaves_with_path(tree):
    name = trees.name_of(path)
    # Hash each shard: of a replicated array, only one copy would be read.
    for part in x.addressable_shards:
      found[f'{name} on {part.device}'] = fingerprints.fingerprint(part.data)
  return jax.device_get(found)
