"""The batch of an input: its type, its rows, its padding."""

from collections.abc import Iterable, Mapping
import hashlib
import itertools
from typing import Any

import jax
import numpy as np

# The entry of a batch with its weights: float32, 0 for padding.
WEIGHTS = 'weights'
# The entry of a batch that marks padding: 1 for padding, else 0.
PADDINGS = 'paddings'


class Batch(dict[str, Any]):
  """A dict whose entries are also attributes: `batch.ids` is `batch['ids']`.

  Inputs give plain dicts; `Batch(batch)` is for code written for Pax's
  `NestedMap`. Nested dicts become `Batch` too. As a pytree it has the leaves
  and paths of a dict, but is another type of node.
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


def _unflatten_batch(keys: tuple[str, ...], values: Iterable[Any]) -> Batch:
  batch = Batch()
  batch.update(zip(keys, values, strict=True))
  return batch


jax.tree_util.register_pytree_with_keys(
  Batch,
  lambda batch: (
    [(jax.tree_util.DictKey(key), batch[key]) for key in sorted(batch)],
    tuple(sorted(batch)),
  ),
  _unflatten_batch,
)


def num_rows(batch: Mapping[str, Any]) -> int:
  """Returns how many rows a batch has.

  Raises:
    ValueError: its arrays differ in their first dimension, or one has none.
    TypeError: it is not a dict.
  """
  if not isinstance(batch, Mapping):
    raise TypeError(
      f'A batch is a {type(batch).__name__}; expected a dict of arrays by name,'
      " such as {'x': x}."
    )
  rows = {np.shape(x)[:1] for x in jax.tree.leaves(dict(batch))}
  if len(rows) != 1 or () in rows:
    shapes = jax.tree.map(np.shape, dict(batch))
    raise ValueError(
      f'The arrays of a batch must share their first dimension; got {shapes}.'
    )
  return rows.pop()[0]


def pad_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
  """Fills a batch up to a number of rows.

  Args:
    batch: arrays [b, ...] with b <= rows.
    rows: the number of rows of the result.

  Returns:
    Arrays [rows, ...]. The new rows are zeros, or ones in `paddings`, which
    marks padding. A batch without `weights` gets them, 1 for its own rows.
  """
  # A `Batch` stays one.
  batch = type(batch)(batch) if isinstance(batch, Batch) else dict(batch)
  have = len(jax.tree.leaves(batch)[0])
  batch.setdefault(WEIGHTS, np.ones(have, np.float32))
  if have == rows:
    return batch

  def fill(path: Any, x: Any) -> np.ndarray:
    x = np.asarray(x)
    shape = (rows - have, *x.shape[1:])
    if x.dtype == object:  # Strings, as TensorFlow gives them.
      padding = np.full(shape, type(x.flat[0])() if x.size else b'', object)
    else:
      is_mark = getattr(path[-1], 'key', None) == PADDINGS
      padding = (np.ones if is_mark else np.zeros)(shape, x.dtype)
    return np.concatenate([x, padding])

  return jax.tree_util.tree_map_with_path(fill, batch)


# For people.


def arrays(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns name -> array; an entry of a nested batch is 'src.ids'."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): np.asarray(x)
    for path, x in jax.tree_util.tree_leaves_with_path(batch)
  }


def real_rows(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns which rows have a weight, bool [B]."""
  is_real = arrays[WEIGHTS] != 0
  return np.any(is_real, axis=tuple(range(1, is_real.ndim)))


def real_tokens(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns which positions hold tokens, bool [B, ..., L], by entry `ids`."""
  found = {}
  for name, ids in arrays.items():
    if name.rpartition('.')[2] != 'ids' or ids.ndim < 2:
      continue
    paddings, segments, weights = (
      arrays.get(name.removesuffix('ids') + key)
      for key in (PADDINGS, 'segment_ids', WEIGHTS)
    )
    is_token = np.ones(ids.shape, bool)
    # In this order: a prompt has no weight, but is not padding.
    if paddings is not None:
      is_token = paddings == 0
    elif segments is not None:
      is_token = segments > 0
    elif weights is not None and weights.shape == ids.shape:
      is_token = weights != 0
    of_rows = real_rows(arrays).reshape(-1, *[1] * (ids.ndim - 1))
    found[name] = is_token & of_rows
  return found


def counts(batch: Mapping[str, Any]) -> dict[str, float]:
  """Counts what is in a batch.

  Returns:
    'batches': 1. 'rows': those with a weight. 'all_rows': with padding.
    'weights': their sum. 'padding': the fraction of the tokens, or else of the
    rows, that is padding. 'tokens', if there are entries `ids`: those that are
    not padding by `paddings`, or else `segment_ids`, or else `weights`.
  """
  found = arrays(batch)
  is_row, are_tokens = real_rows(found), real_tokens(found)
  masks = list(are_tokens.values()) or [is_row]
  num_real = sum(int(x.sum()) for x in masks)
  return {
    'batches': 1,
    'rows': int(is_row.sum()),
    'all_rows': is_row.size,
    'weights': float(found[WEIGHTS].sum(dtype=np.float64)),
    'padding': 1 - num_real / sum(x.size for x in masks),
    **({'tokens': num_real} if are_tokens else {}),
  }


def describe(batch: Mapping[str, Any]) -> str:
  """Returns a table: each entry's name, shape, dtype, least, greatest, mean."""
  table = [['entry', 'shape', 'dtype', 'min', 'max', 'mean']]
  for name, x in arrays(batch).items():
    table.append([name, ' x '.join(map(str, x.shape)), x.dtype.name])
    if x.size and x.dtype.kind not in 'OSU':
      x = x.astype(np.float64)  # Else sums of bfloat16 are cut off.
      table[-1] += f'{x.min():.6g}', f'{x.max():.6g}', f'{x.mean():.4g}'
  columns = []
  for number, cells in enumerate(itertools.zip_longest(*table, fillvalue='')):
    align = str.ljust if number < 3 else str.rjust
    columns.append([align(cell, max(map(len, cells))) for cell in cells])
  return '\n'.join('  '.join(x).rstrip() for x in zip(*columns, strict=True))


def digest(batches: Iterable[Mapping[str, Any]]) -> str:
  """Returns a hash of batches, 16 letters.

  It is the same for the same names, dtypes, shapes and values in the same
  order, on every machine and in every process.
  """
  hashed = hashlib.sha256()
  for batch in batches:
    hashed.update(serialized(arrays(batch)))
  return hashed.hexdigest()[:16]


def serialized(arrays: Mapping[str, np.ndarray]) -> bytes:
  """Returns names, dtypes, shapes and values as bytes."""
  parts = [f'{len(arrays)} arrays;'.encode()]
  for name, x in arrays.items():
    # The bytes of an array of objects are addresses.
    data = repr(x.tolist()).encode() if x.dtype == object else x.tobytes()
    parts += [f'{name} {x.dtype.name} {x.shape};'.encode(), data]
  return b''.join(parts)
