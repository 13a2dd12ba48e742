"""Products with weights in 8-bit floating point, with delayed scaling.

Both operands of the forward pass are rounded to e4m3, and the gradient of the
backward pass to e5m2 (Micikevicius et al., "FP8 Formats for Deep Learning",
2022). Each is first divided by a scale that maps the largest magnitude of the
previous steps to the largest number of the format, so no extra pass over the
tensor is needed. The arithmetic is Flax's (`flax.linen.fp8_ops`), which XLA
turns into FP8 products on GPUs that have them. Elsewhere XLA widens the rounded
operands: the same numbers, slowly.

A product keeps three scales and three histories of magnitudes, one pair each
for input, weight and gradient. They are parameters, so that repeated layers
stack and scan them like weights, but no optimizer may see them: their
"gradient" is their next value. `split` and `merge` separate them from the
weights.
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

# Steps that an unusually large value is remembered: the default of Flax and of
# NVIDIA's Transformer Engine.
HISTORY_LENGTH = 1024

# Ada (8.9) is the first NVIDIA generation with FP8 matrix units; Hopper is 9.0.
_FIRST_CAPABILITY = (8, 9)

# Ends the name of a scale or history, as in 'qkv_input_scale_fp8'.
_SUFFIX = '_fp8'
_OPERANDS = {'lhs': 'input', 'rhs': 'weight', 'grad': 'grad'}


@dataclasses.dataclass(frozen=True)
class Kept:
  """A scale or a history that a product keeps.

  Attributes:
    key: what `product` calls it.
    name: what a parameter of it is called, behind the product's own name.
    shape: of it, float32.
    first: its first value.
  """

  key: str
  name: str
  shape: tuple[int, ...]
  first: float


def kept(history_length: int = HISTORY_LENGTH) -> list[Kept]:
  """Returns what a product keeps.

  Args:
    history_length: for how many steps a magnitude counts.
  """
  return [
    Kept(f'{operand}_{kind}', f'{label}_{kind}{_SUFFIX}', shape, first)
    for operand, label in _OPERANDS.items()
    for kind, shape, first in (
      ('scale', (), 1.0),
      ('amax_history', (history_length,), 0.0),
    )
  ]


Tree = Mapping[str, Mapping[str, Any]]


@functools.cache
def _ops() -> types.ModuleType:
  """Imports Flax's operators, which nothing else here needs."""
  try:
    from flax.linen import fp8_ops
  except ImportError as e:
    raise ImportError(
      "FP8 products are Flax's, and flax.linen.fp8_ops cannot be imported."
      " Install it with pip install -e '.[fp8]', or do without FP8."
    ) from e
  return fp8_ops


def check_devices(devices: Iterable[Any]) -> None:
  """Refuses GPUs that have no FP8 matrix units.

  CPUs and TPUs pass: XLA emulates what they do not have.

  Args:
    devices: those of the mesh.

  Raises:
    ValueError: a GPU's compute capability is below 8.9, or not of the form
      'major.minor', as AMD's are.
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
  """Returns those of a product of an input with a weight.

  Raises:
    ValueError: the result's axes are not those of the input and then those of
      the weight that are not summed over.
  """
  operands, _, result = spec.partition('->')
  x, _, w = operands.partition(',')
  summed = [axis for axis in w if axis in x]
  kept = [axis for axis in x + w if axis not in summed]
  if not summed or list(result) != kept or len(set(kept)) < len(kept):
    raise ValueError(
      f'Got the FP8 product {spec!r}; expected two operands, axes to sum over'
      ' that are in both, and a result with the other axes of the first and'
      " then of the second, such as 'BLD,DHK->BLHK'."
    )
  contract_x = tuple(x.index(axis) for axis in summed)
  contract_w = tuple(w.index(axis) for axis in summed)
  return (contract_x, contract_w), ((), ())


def product(
  spec: str, x: jax.Array, w: jax.Array, state: Mapping[str, jax.Array]
) -> jax.Array:
  """Returns `jnp.einsum(spec, x, w)` by an FP8 product; pure.

  Args:
    spec: as for `jnp.einsum`; see `einsum`.
    x: the input, float32 or bfloat16.
    w: the weight; rounded to the type of `x` before it is scaled.
    state: the values of `kept`, by their keys; see `einsum` for their gradient.
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
  """Returns `jnp.einsum(spec, x, w)` by an FP8 product; a Haiku function.

  The scales that round `x` and `w` come from the steps before, those of the
  first step are 1. The gradient with respect to scales and histories is their
  value for the next step: to be stored, not to be followed.

  That value cannot be added up, so a weight takes part in one product a step.
  And `jax.checkpoint` may not keep the rounded operands themselves: JAX passes
  what it keeps through `lax.reduce_precision`, for which e4m3 ends at 240, and
  not at 448 as here. Results it may, as `transformer.remat_policy` keeps them.

  Args:
    name: of the product in the current Haiku module.
    spec: as for `jnp.einsum`; see the error.
    x: the input, float32 or bfloat16.
    w: the weight; rounded to the type of `x` before it is scaled.
    history_length: for how many steps a magnitude counts.

  Returns:
    The product, in the type of `x`.

  Raises:
    ImportError: Flax is missing.
    ValueError: the result's axes are not those of `x` and then those of `w`
      that are not summed over.
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
  """Whether a Haiku parameter of this name is a scale or a history."""
  return name.endswith(_SUFFIX)


def split(params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns what an optimizer may see of Haiku's parameters, and what not.

  Args:
    params: Haiku's two-level dict, of anything.

  Returns:
    The weights; and the scales and histories of FP8 products.
  """
  state, weights = hk.data_structures.partition(
    lambda module, name, value: is_state(name), params
  )
  return dict(weights), dict(state)


def merge(weights: Tree, state: Tree) -> dict[str, Any]:
  """Undoes `split`, for a model to be applied to the result."""
  return dict(hk.data_structures.merge(weights, state))
