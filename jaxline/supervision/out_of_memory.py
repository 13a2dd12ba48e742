"""Adds a report to an error of too little memory."""

from collections.abc import Iterator
import contextlib
import math
from typing import Any

import jax

from jaxline.metrics import lines as lines_lib

_NUM_LISTED = 12


@contextlib.contextmanager
def explained(experiment: Any, config: Any) -> Iterator[None]:
  """Adds the largest arrays and three remedies to such an error, as a note.

  Args:
    experiment: whose attributes name arrays; None before it is constructed.
    config: the run's, complete.

  Yields:
    Nothing.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    # XLA calls a full disk the same.
    if 'RESOURCE_EXHAUSTED' in str(error) and 'No space left' not in str(error):
      notes = getattr(error, '__notes__', [])
      if not any(note.startswith('[jaxline]') for note in notes):
        with contextlib.suppress(Exception):  # The run's own error counts.
          error.add_note(_note(experiment, config))
    raise


def _note(experiment: Any, config: Any) -> str:
  # The attributes and not `snapshot_state`, which may make arrays.
  names: dict[int, str] = {}
  arrays = list(jax.live_arrays())
  attributes = vars(experiment) if experiment else {}
  for path, x in jax.tree_util.tree_leaves_with_path(attributes):
    if isinstance(x, jax.Array):
      names[id(x)] = jax.tree_util.keystr(path, simple=True, separator='/')
      # The step deletes what it is given, but it was in memory as it failed.
      arrays += [x] if x.is_deleted() else []
  sizes: dict[str, int] = {}
  for x in arrays:
    row = f'{names.get(id(x), "(unnamed)")} {x.dtype.name}{list(x.shape)}'
    shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    sizes[row] = sizes.get(row, 0) + shard
  largest = sorted(sizes.items(), key=lambda item: -item[1])[:_NUM_LISTED]
  rows = [f'\n  {lines_lib.size(size):>10}  {row}' for row, size in largest]
  return (
    f'[jaxline] {len(arrays)} arrays take {lines_lib.size(sum(sizes.values()))}'
    ' on one device; a program needs more while it runs. The largest:'
    f'{"".join(rows)}\nRemedies: a smaller batch, or the batch in parts'
    ' (config.gradient_accumulation_steps, now'
    f' {config.gradient_accumulation_steps!r}); more rematerialisation (`remat`'
    ' of the model); weights and optimizer split over the devices'
    f" (config.sharding = 'fsdp', now {config.sharding!r})."
  )
