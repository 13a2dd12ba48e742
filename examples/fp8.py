"""Products with weights in 8-bit floating point, with delayed scaling.

Both operands of the forward pass are rounded to e4m3, and the gradient of the
backward pass to e5m2 (Micikevicius et al., "FP8 Formats for Deep Learning",
2022). Each is first divided by a scale that maps the largest magnitude of the
previous steps to the largest number of the format, so no extra pass over the
tensor is needed. The arithmetic is Flax's (`flax.linen.fp8_ops`), which XLA
turns into FP8 products on GPUs that have them. On other devices, XLA widens the
rounded operands: the results are the same, but there is no speedup.

A product has a scale and a history of magnitudes for each of the input, the
weight and the gradient. Scales and histories are parameters, so repeated layers
stack and scan them like weights. But an optimizer must not see them, because
their "gradient" is their next value. `split` separates them from the weights,
and `merge` puts them back.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import types
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from jaxline import errors

# For how many steps a large magnitude counts. Flax and NVIDIA's Transformer
# Engine have the same default.
HISTORY_LENGTH = 1024

# Ada (8.9) is the first NVIDIA generation with FP8 matrix units; Hopper is 9.0.
_FIRST_CAPABILITY = (8, 9)

# Ends the name of a scale or history, as in 'qkv_input_scale_fp8'.
_SUFFIX = '_fp8'
_OPERANDS = {'lhs': 'input', 'rhs': 'weight', 'grad': 'grad'}


@dataclasses.dataclass(frozen=True)
class Fp8State:
  """Describes a scale or a history of a product.

  Attributes:
    key: key in the argument `state` of `product`.
    name: name of the parameter, without the product's name in front.
    shape: shape of the parameter, which is float32.
    first: initial value.
  """

  key: str
  name: str
  shape: tuple[int, ...]
  first: float


def kept(history_length: int = HISTORY_LENGTH) -> list[Fp8State]:
  """Returns descriptions of the scales and histories of a product.

  Args:
    history_length: number of steps for which a magnitude counts.
  """
  return [
    Fp8State(f'{operand}_{kind}', f'{label}_{kind}{_SUFFIX}', shape, first)
    for operand, label in _OPERANDS.items()
    for kind, shape, first in (
      ('scale', (), 1.0),
      ('amax_history', (history_length,), 0.0),
    )
  ]


Tree = Mapping[str, Mapping[str, Any]]


@functools.cache
def _ops() -> types.ModuleType:
  """Imports Flax's operators; the rest of this module does not need Flax."""
  try:
    from flax.linen import fp8_ops
  except ImportError as e:
    raise ImportError(
      'FP8 products use Flax, but flax.linen.fp8_ops cannot be imported.'
      " Install it with pip install -e '.[fp8]', or do not use FP8."
    ) from e
  return fp8_ops


def check_devices(devices: Iterable[Any]) -> None:
  """Refuses GPUs that have no FP8 matrix units.

  CPUs and TPUs pass, because XLA emulates FP8 on them.

  Args:
    devices: the devices of the mesh.

  Raises:
    ValueError: a GPU's compute capability is below 8.9, or does not have the
      form 'major.minor', as on AMD's GPUs.
  """
  for device in devices:
    if device.platform != 'gpu':
      continue
    major, _, minor = device.compute_capability.partition('.')
    numbers = major.isdecimal() and minor.isdecimal()
    if not numbers or (int(major), int(minor)) < _FIRST_CAPABILITY:
      raise errors.UsageError(
        'FP8 products need an NVIDIA GPU of compute capability 8.9 (Ada) or'
        f' later, such as 9.0 (Hopper); {device.device_kind} has'
        f' {device.compute_capability!r}. Compute in bfloat16 instead.'
      )


def _dimension_numbers(spec: str) -> jax.lax.DotDimensionNumbers:
  """Returns the dimension numbers of a product of an input and a weight.

  Raises:
    ValueError: the result's axes are not the axes of the input, followed by the
      axes of the weight, without the axes that are summed over.
  """
  operands, _, result = spec.partition('->')
  x, _, w = operands.partition(',')
  summed = [axis for axis in w if axis in x]
  kept = [axis for axis in x + w if axis not in summed]
  if not summed or list(result) != kept or len(set(kept)) < len(kept):
    raise ValueError(
      f'Got the FP8 product {spec!r}; expected two operands that share the axes'
      ' to sum over, and a result with the other axes of the first and then of'
      " the second, such as 'BLD,DHK->BLHK'."
    )
  contract_x = tuple(x.index(axis) for axis in summed)
  contract_w = tuple(w.index(axis) for axis in summed)
  return (contract_x, contract_w), ((), ())


def product(
  spec: str, x: jax.Array, w: jax.Array, state: Mapping[str, jax.Array]
) -> jax.Array:
  """Computes `jnp.einsum(spec, x, w)` as an FP8 product; a pure function.

  Args:
    spec: as for `jnp.einsum`; see `einsum`.
    x: the input, float32 or bfloat16.
    w: the weight; rounded to the type of `x` before it is scaled.
    state: scales and histories by key, as `kept` describes them. See `einsum`
      for their gradient.
  """
  return _ops().fp8_scaled_dot_general(
    x,
    w.astype(x.dtype),
    _dimension_numbers(spec),
    preferred_element_type=x.dtype,
    quantize_compute_type=x.dtype,
    **state,
  )


def einsum(
  name: str,
  spec: str,
  x: jax.Array,
  w: jax.Array,
  *,
  history_length: int = HISTORY_LENGTH,
) -> jax.Array:
  """Computes `jnp.einsum(spec, x, w)` as an FP8 product; a Haiku function.

  The scales that round `x` and `w` come from the previous steps; in the first
  step they are 1. The gradient with respect to scales and histories is their
  value for the next step, so store it instead of following it.

  There are two restrictions. Next values cannot be added up, so a weight may be
  used in only one product per step. And `jax.checkpoint` must not keep the
  rounded operands: JAX passes kept values through `lax.reduce_precision`, for
  which e4m3 ends at 240 instead of 448. It may keep the results of products, as
  `transformer.remat_policy` does.

  Args:
    name: name of the product in the current Haiku module.
    spec: as for `jnp.einsum`, with the restrictions under Raises.
    x: the input, float32 or bfloat16.
    w: the weight; rounded to the type of `x` before it is scaled.
    history_length: number of steps for which a magnitude counts.

  Returns:
    The product, in the type of `x`.

  Raises:
    ImportError: Flax is missing.
    ValueError: the result's axes are not the axes of `x`, followed by the axes
      of `w`, without the axes that are summed over.
  """
  state = {
    of.key: hk.get_parameter(
      f'{name}_{of.name}',
      of.shape,
      jnp.float32,
      hk.initializers.Constant(of.first),
    )
    for of in kept(history_length)
  }
  return product(spec, x, w, state)


def is_state(name: str) -> bool:
  """Returns whether a Haiku parameter `name` is a scale or a history."""
  return name.endswith(_SUFFIX)


def split(params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
  """Splits Haiku's parameters into weights and the state of FP8 products.

  Args:
    params: Haiku's two-level dict, with leaves of any type.

  Returns:
    The weights, and the scales and histories.
  """
  state, weights = hk.data_structures.partition(
    lambda module, name, value: is_state(name), params
  )
  return dict(weights), dict(state)


def merge(weights: Tree, state: Tree) -> dict[str, Any]:
  """Undoes `split`; apply the model to the result."""
  return dict(hk.data_structures.merge(weights, state))
