"""Low-rank adapters (LoRA): W + alpha / rank * A B, where only A and B train.

A and B are additional weights next to W: `layers/attention/qkv` [N, D, ...] has
`layers/attention/qkv_lora_a` [N, D, R] and `..._lora_b` [N, R, ...]. `merge`
computes the sum, which the model runs on.
"""

from collections.abc import Mapping
import dataclasses
import math
import string
from typing import Any

import jax
import jax.numpy as jnp

from jaxline import sharded
from jaxline.parallel import partitioning
from jaxline.parallel import prng

# Matches the names of the adapters, for `sharded.trainable`.
TRAINABLE = '.*_lora_[ab]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which weights have adapters.

  Attributes:
    rank: R; 0 means no adapters.
    alpha: the product of the adapters is multiplied by alpha / rank.
    targets: a regular expression for the names of the matrices to adapt.
  """

  rank: int = 0
  alpha: float = 16.0
  targets: str = 'layers/(attention/(qkv|q|kv|out)|feed_forward/(in|out))'


def add(rng: jax.Array, params: Any, config: Config) -> Any:
  """Adds adapters to the weights of `model.init`: A is random and B is zero."""
  if not config.rank:
    return params
  chosen = sharded.trainable(partitioning.unbox(params), config.targets)
  result = {module: dict(leaves) for module, leaves in params.items()}
  for module, leaves in params.items():
    for name, w in ((n, w) for n, w in leaves.items() if chosen[module][n]):
      stack = sum(axis in ('layers', 'experts') for axis in w.axes[:2])
      # The input axes come first. If a matrix ends with the residual stream,
      # all other axes are input. Otherwise the input is the residual stream,
      # which is one axis.
      cut = w.value.ndim - 1 if w.axes[-1] == 'embed' else stack + 1
      shape, axes = w.value.shape, w.axes
      key = prng.stream(rng, f'{module}/{name}')
      a = jax.random.normal(key, (*shape[:cut], config.rank), w.value.dtype)
      a *= math.prod(shape[stack:cut]) ** -0.5
      b = jnp.zeros((*shape[:stack], config.rank, *shape[cut:]), a.dtype)
      of_a, of_b = (*axes[:cut], None), (*axes[:stack], None, *axes[cut:])
      result[module][f'{name}_lora_a'] = partitioning.Logical(a, of_a)
      result[module][f'{name}_lora_b'] = partitioning.Logical(b, of_b)
  return result


def merge(params: Any, config: Config) -> Any:
  """Adds the adapters' products to the weights they belong to.

  The weights may come from a training state or from `load_weights`.
  """
  merged = dict(params)
  for name, w in params.items():
    if isinstance(w, Mapping):
      merged[name] = merge(w, config)
    elif f'{name}_lora_a' in params:
      a, b = (merged.pop(f'{name}_lora_{x}') for x in 'ab')
      # W has the axes of the stack, if any, then A's input and B's output axes.
      of_w = string.ascii_lowercase[: w.ndim]
      of_b = f'{of_w[: a.ndim + b.ndim - 2 - w.ndim]}R{of_w[a.ndim - 1 :]}'
      change = jnp.einsum(f'{of_w[: a.ndim - 1]}R,{of_b}->{of_w}', a, b)
      merged[name] = w + config.alpha / config.rank * change
  return merged
