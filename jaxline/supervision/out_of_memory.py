"""Explains an out-of-memory error: the largest arrays and what to change."""

import collections
from collections.abc import Iterator
import contextlib
import math
from typing import Any

import jax

from jaxline.base import trees
from jaxline.metrics import lines as lines_lib

_NUM_LISTED = 12


@contextlib.contextmanager
def explain_oom(experiment: Any, config: Any) -> Iterator[None]:
  """Adds the largest arrays, by attribute, to an out-of-memory error."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    text = ''.join([str(error), *getattr(error, '__notes__', [])])
    # Ignore a full disk, and an error that has a note from an evaluation.
    others = 'No space left', '[jaxline]'
    if 'RESOURCE_EXHAUSTED' in text and not any(x in text for x in others):
      with contextlib.suppress(Exception):  # Do not hide the run's own error.
        error.add_note(_note(experiment, config))
    raise


def _note(experiment: Any, config: Any) -> str:
  arrays = {id(x): (x, '(unnamed)') for x in jax.live_arrays()}
  attributes = vars(experiment) if experiment else {}
  # Include deleted arrays, which the failed step took as its arguments.
  for path, x in jax.tree.leaves_with_path(attributes):
    if isinstance(x, jax.Array):
      arrays[id(x)] = x, trees.name_of(path)
  sizes = collections.Counter[str]()
  for x, name in arrays.values():
    shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    sizes[f'{name} {x.dtype.name}{list(x.shape)}'] += shard
  largest = sizes.most_common(_NUM_LISTED)
  rows = [f'\n  {lines_lib.size(size):>10}  {row}' for row, size in largest]
  return (
    f'[jaxline] {len(arrays)} arrays take {lines_lib.size(sizes.total())}'
    ' on one device; a program needs more while it runs. The largest:'
    f'{"".join(rows)}\nRemedies: use a smaller batch, or split it'
    ' (config.gradient_accumulation_steps, now'
    f' {config.gradient_accumulation_steps!r}); rematerialize more (`remat`'
    ' of the model); shard weights and optimizer over the devices'
    f" (config.sharding = 'fsdp', now {config.sharding!r})."
  )
