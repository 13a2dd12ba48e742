"""The type of a batch, and functions that count, pad and select its rows."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# This entry of a batch holds its weights: float32, 0 for padding.
WEIGHTS = 'weights'
# This entry of a batch marks padding: 1 for padding, else 0.
PADDINGS = 'paddings'
# A compiled program takes a plain dict. A `Batch` is a subclass.
BatchDict = dict[str, Any]


class Batch(BatchDict):
  """A dict whose entries are attributes too: `batch.ids` is `batch['ids']`.

  The library's inputs return it, as Pax's return a `NestedMap`. Nested dicts
  become `Batch` too. As a pytree it has the leaves and paths of a dict but a
  different node type.
  """

  def __init__(self, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    for key, value in self.items():
      if isinstance(value, Mapping):
        self[key] = Batch(value)

  def __getattr__(self, name: str) -> Any:
    if name in self:
      return self[name]
    raise AttributeError(f'No entry {name!r}; the batch has {sorted(self)}.')

  __setattr__ = dict.__setitem__
  __delattr__ = dict.__delitem__


jax.tree_util.register_pytree_with_keys(
  Batch,
  lambda batch: (
    [(jax.tree_util.DictKey(key), batch[key]) for key in sorted(batch)],
    tuple(sorted(batch)),
  ),
  lambda keys, values: Batch(zip(keys, values, strict=True)),
)


def as_batch(batch: Any) -> Any:
  """Returns a dict as a `Batch`, and any other value unchanged."""
  is_plain = isinstance(batch, Mapping) and not isinstance(batch, Batch)
  return Batch(batch) if is_plain else batch


def as_dict(batch: Any) -> Any:
  """Returns a batch as plain dicts, which JAX flattens faster at each step."""
  if isinstance(batch, Mapping):
    return {key: as_dict(value) for key, value in batch.items()}
  return batch


def num_rows(batch: Mapping[str, Any]) -> int:
  """Returns the number of rows; raises an error for an invalid batch."""
  if not isinstance(batch, Mapping):
    raise TypeError(
      f"A batch is a {type(batch).__name__}; expected a dict such as {{'x': x}}"
      ' that maps names to arrays.'
    )
  rows = {np.shape(x)[:1] for x in jax.tree.leaves(dict(batch))}
  if len(rows) != 1 or () in rows:
    shapes = jax.tree.map(np.shape, dict(batch))
    raise ValueError(
      f'The arrays of a batch must share their first dimension; got {shapes}.'
    )
  return rows.pop()[0]


def pad_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
  """Pads the arrays of a batch from [b, ...] to [rows, ...].

  The new rows are zeros, except in `paddings`, where they are ones. A batch
  without `weights` gets them, [rows]: 1 for the first b rows, 0 for padding.
  """
  batch = type(batch)(batch) if isinstance(batch, Batch) else dict(batch)
  have = len(jax.tree.leaves(batch)[0])
  batch.setdefault(WEIGHTS, np.ones(have, np.float32))
  if have == rows:
    return batch

  def fill(path: Any, x: Any) -> np.ndarray:
    x = np.asarray(x)
    shape = (rows - have, *x.shape[1:])
    if x.dtype == object:  # TensorFlow's strings are objects.
      padding = np.full(shape, type(x.flat[0])() if x.size else b'', object)
    else:
      is_mark = getattr(path[-1], 'key', None) == PADDINGS
      padding = (np.ones if is_mark else np.zeros)(shape, x.dtype)
    return np.concatenate([x, padding])

  return jax.tree_util.tree_map_with_path(fill, batch)


def keep_rows(batch: Mapping[str, Any], first: int, end: int) -> dict[str, Any]:
  """Returns a batch in which rows outside [first, end) have weight 0.

  They become copies of row `first`, so a metric that ignores weights changes.
  """
  places = np.arange(num_rows(batch))
  kept = (first <= places) & (places < end)
  copied = np.where(kept, places, first)
  found = jax.tree.map(lambda x: np.asarray(x)[copied], batch)
  found[WEIGHTS][~kept] = 0
  return found
