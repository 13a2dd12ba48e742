"""Fetches logged values from the devices and converts them for backends."""

from collections.abc import Callable, Mapping
import numbers
from typing import Any

from absl import logging
import jax
import numpy as np

from jaxline.metrics import scalars as scalars_lib

# Names of skipped scalars, to warn only once.
_warned: set[str] = set()


def to_step(global_step: Any) -> int:
  """Returns the step as an int; in an array, all elements are the step."""
  if isinstance(global_step, jax.Array):
    # Read one shard, since other shards may be on other hosts.
    global_step = global_step.addressable_data(0)
  return int(np.asarray(global_step).flat[0])


def to_scalars(scalars: Mapping[str, Any]) -> dict[str, int | float]:
  """Returns the numbers in a mapping as Python numbers, in its order.

  It takes real numbers of up to 64 bits and arrays with one of them. Integers
  and bools become (exact) ints, the rest floats. Nested mappings are flattened:
  `{'loss': {'kl': 1.}}` gives `{'loss/kl': 1.}`. Anything else (None, a string,
  a larger array, a typed random key, a donated array) is skipped, with one
  warning per name. The call waits for the computation of arrays.
  """
  flat: dict[str, int | float] = {}
  if isinstance(scalars, scalars_lib.Scalars):
    flat = {str(name): x for name, x in scalars.numbers().items()}
    scalars = scalars.others
  for name, value in scalars.items():
    number = value if type(value) is float else _to_number(value)
    if number is not None:
      flat[str(name)] = number
    elif isinstance(value, Mapping):
      flat.update(to_scalars({f'{name}/{k}': v for k, v in value.items()}))
    elif str(name) not in _warned:
      _warned.add(str(name))
      logging.warning(
        'Skipping the scalar "%s" from now on: got %s, expected a number or an '
        'array with one element.',
        name,
        getattr(value, 'aval', type(value).__name__),
      )
  return flat


def fetch(values: Mapping[str, Any]) -> dict[str, Any]:
  """Copies all arrays in some values to the host; waits for them.

  An array whose buffer was donated to a later step becomes None.
  """
  if isinstance(values, scalars_lib.Scalars):
    values = values.numbers(np.asarray) | values.others
  return {name: jax.tree.map(_fetch, x) for name, x in values.items()}


def _fetch(value: Any) -> Any:
  # jax.device_get holds the GIL ten times as long.
  try:
    return np.asarray(value) if isinstance(value, jax.Array) else value
  except TypeError:  # It is a typed random key.
    return value
  except RuntimeError:
    if not value.is_deleted():
      raise
    return None


def start_fetch(tree: Any) -> None:
  """Starts the transfers of all arrays of a tree to the host."""
  if jax.default_backend() != 'cpu':  # On the CPU they are on the host already.
    is_packed = lambda x: isinstance(x, scalars_lib.Scalars)
    for part in jax.tree.leaves(tree, is_leaf=is_packed):
      for x in scalars_lib.leaves(part):
        if isinstance(x, jax.Array) and not x.is_deleted():
          x.copy_to_host_async()


def _to_number(value: Any) -> int | float | None:
  """Returns a number as int or float, and anything else as None."""
  if isinstance(value, jax.Array):
    # Skip these properties for a scalar: they take as long as the fetch.
    is_one = not value.shape or (
      value.size == 1
      and (value.is_fully_addressable or value.is_fully_replicated)
    )
    value = _fetch(value) if is_one else None
  elif hasattr(value, '__array__'):
    value = np.asarray(value)
  if isinstance(value, np.ndarray):
    value = value.item() if value.size == 1 else None
  if isinstance(value, int):  # Bools are ints too.
    return int(value) if -(2**63) <= value < 2**64 else None
  return float(value) if isinstance(value, numbers.Real) else None


def copy_image(name: str, image: Any) -> Any:
  """Copies an image on its device, so that no later step changes it."""
  if not isinstance(image, jax.Array):
    image = np.asarray(image)
  elif image.is_fully_replicated:
    image = image.addressable_data(0)
  is_floating = jax.dtypes.issubdtype(image.dtype, np.floating)
  channels = image.shape[-1] if image.ndim > 2 else 1
  if (
    image.ndim not in (2, 3, 4)
    or channels not in (1, 3, 4)
    or not image.size
    or not (is_floating or image.dtype in (np.uint8, bool))
  ):
    raise ValueError(
      f'Image "{name}": got {image.dtype} of shape {image.shape}, expected'
      ' uint8 in 0..255, bool, or floats in 0..1 of shape [H, W], [H, W, C] or'
      ' [B, H, W, C], where C is 1, 3 or 4. A batch of gray images needs a last'
      ' axis of size 1: images[..., None].'
    )
  return image.copy()


def _to_image(image: Any) -> np.ndarray:
  """Converts [H, W], [H, W, C] or [B, H, W, C] to uint8 [B, H, W, C]."""
  image = np.asarray(image)
  if image.dtype != np.uint8:
    # Clip values out of range, as TensorFlow does, and make NaN black.
    image = np.clip(np.nan_to_num(image.astype(np.float32)), 0, 1)
    image = np.round(image * 255).astype(np.uint8)
  if image.ndim == 2:
    image = image[:, :, None]
  return image if image.ndim == 4 else image[None]


CONVERSIONS: dict[str, Callable[[Mapping[Any, Any]], dict[Any, Any]]] = {
  'scalars': to_scalars,
  'images': lambda images: {str(k): _to_image(x) for k, x in images.items()},
  # Text generated byte by byte may hold lone surrogates, which are not UTF-8.
  'texts': lambda texts: {
    str(k): str(x).encode('utf-8', 'replace').decode() for k, x in texts.items()
  },
  'fingerprints': fetch,
}
