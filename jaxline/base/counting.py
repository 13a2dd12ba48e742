"""Counts the FLOPs of a traced program, without compiling or running it.

XLA changes the program (fusions, recomputation, dead code). To measure the
compiled program, see `compile.measure`.
"""

from collections.abc import Callable
import functools
import math
import re
from typing import Any

from absl import logging
import jax
import numpy as np

# One product in the forward pass; one per operand in the backward pass.
PRODUCTS_IN_TRAINING = 3


def flops(jaxpr: Any) -> float:
  """Returns the FLOPs of the products and convolutions of a program's jaxpr.

  A multiplication and an addition count as two FLOPs. The count covers all
  devices, without a pipeline's bubble (see `partly_used`). A `cond` counts its
  most expensive branch. A `while` counts one round, with a warning if it has
  products. cuDNN's attention counts fully, although a causal kernel skips about
  half of it; splash attention counts only the blocks that it computes.
  """
  return _jaxpr_flops(jaxpr, _ALL)


def forward_flops(jaxpr: Any) -> float:
  """Returns the FLOPs of the products in the forward pass of a traced gradient.

  It excludes recomputation, everything outside `jax.grad` (or
  `jax.value_and_grad`), and gradients inside the differentiated function.
  """
  return _jaxpr_flops(jaxpr, _OUTSIDE)


_SCOPE = re.compile(r'(\d+)_of_(\d+)_used')


def partly_used(used: int, size: int) -> Any:
  """Returns a context in which only `used` of `size` equal parts count.

  For example, a pipeline discards the results of some rounds, and a mixture of
  experts discards free slots.
  """
  return jax.named_scope(f'{used}_of_{size}_used')


# What to count: all equations; or only the forward pass, in an equation outside
# or inside of it. (Inside, JAX's names have 'jvp', and not 'transpose'.)
_ALL, _OUTSIDE, _INSIDE = range(3)


def _jaxpr_flops(jaxpr: Any, counted: int) -> float:
  return sum(_equation_flops(equation, counted) for equation in jaxpr.eqns)


def _equation_flops(equation: Any, counted: int) -> float:
  from jax.extend import core  # Importing it at the top would be slow.

  name, params = equation.primitive.name, equation.params
  if counted != _ALL:
    # The other entries are scopes, named after layers of the model.
    stack = equation.source_info.name_stack.stack
    made_by = [x.name for x in stack if type(x).__name__ == 'Transform']
    if 'transpose' in made_by:
      return 0.0
    counted = _INSIDE if 'jvp' in made_by else counted
  # Equations of an inner program do not inherit the scopes of their equation.
  used, size = 1, 1
  for entry in equation.source_info.name_stack.stack:
    if match := _SCOPE.fullmatch(entry.name):
      used, size = int(match[1]), int(match[2])
  if count := _PRODUCTS.get(name.removesuffix('_wrapper')):
    if counted == _OUTSIDE:
      return 0.0
    shapes = [getattr(v.aval, 'shape', ()) for v in equation.invars]
    return count(shapes, equation.outvars[0].aval.shape, params) * used / size
  inner = [_jaxpr_flops(x, counted) for x in core.jaxprs_in_params(params)]
  if name == 'cond':
    return max(inner) * used / size
  if name == 'while' and sum(inner):
    logging.warning(
      'A while loop of %.3g FLOPs per round was counted once.', sum(inner)
    )
  return _repeats(equation) * sum(inner) * used / size


def _repeats(equation: Any) -> float:
  """Returns how often the jaxpr of an equation runs."""
  name, params = equation.primitive.name, equation.params
  if name == 'scan':
    return params['length']
  if name == 'shard_map':
    mesh = params['mesh']
    return math.prod(mesh.shape[a] for a in params['newly_manual_axes'])
  if name == 'pallas_call':
    grid = params['grid_mapping'].grid
    # Unknown sizes count as 1.
    rounds = math.prod(size for size in grid if isinstance(size, int))
    if 'splash_m' in str(equation.source_info.name_stack):
      first = equation.invars[0].aval  # The mask's blocks, if there is a mask.
      if np.issubdtype(first.dtype, np.integer):
        return rounds * splash_share(*first.shape[-2:])
    return rounds
  return 1


def splash_share(rows: int, columns: int) -> float:
  """Returns the fraction of splash attention's blocks that a mask keeps.

  A causal mask has the same number of rows and columns (blocks of keys); other
  masks have fewer columns.
  """
  return (rows + 1) / (2 * rows) if rows == columns else 1.0


def count_kernel_overlaps(
  size: int,
  kernel: int,
  out: int,
  stride: int,
  low: int,
  dilation: int,
  kernel_dilation: int,
) -> int:
  """Counts the pairs of output and kernel positions that use an input element.

  Output o and kernel position k use position x = o * stride - low +
  k * kernel_dilation. It holds an input element, and not padding or a hole of
  the dilation, if 0 <= x <= (size - 1) * dilation and dilation divides x.
  """
  at = np.arange(kernel, dtype=np.int64) * kernel_dilation - low
  first = np.maximum(-(at // stride), 0)
  last = np.minimum(((size - 1) * dilation - at) // stride, out - 1)
  common = math.gcd(stride, dilation)
  every = dilation // common
  # One o in `every` solves o * stride = -at (mod dilation), or none does.
  rest = -at // common * pow(stride // common, -1, every) % every
  solutions = (last - rest) // every - (first - 1 - rest) // every
  return int(np.where(at % common == 0, np.maximum(solutions, 0), 0).sum())


# The primitives that multiply. Each function takes the shapes of the operands,
# the shape of the result, and the parameters.


def _dot(shapes: Any, out: Any, params: Any) -> int:
  (contracted, _), _ = params['dimension_numbers']
  return 2 * math.prod((*out, *(shapes[0][d] for d in contracted)))


def _ragged_dot(shapes: Any, out: Any, params: Any) -> int:
  numbers = params['ragged_dot_dimension_numbers']
  (contracted, _), _ = numbers.dot_dimension_numbers
  if set(numbers.lhs_ragged_dimensions) <= set(contracted):
    # The result has one matrix per group; each row belongs to one group.
    out = out[1:]
  return _dot(shapes, out, {'dimension_numbers': numbers.dot_dimension_numbers})


def _convolution(shapes: Any, out: Any, params: Any) -> int:
  lhs, rhs = shapes[:2]
  numbers = params['dimension_numbers']
  batch = lhs[numbers.lhs_spec[0]] // params['batch_group_count']
  out_features, in_features = (rhs[d] for d in numbers.rhs_spec[:2])
  met = math.prod(
    count_kernel_overlaps(
      lhs[numbers.lhs_spec[n + 2]],
      rhs[numbers.rhs_spec[n + 2]],
      out[numbers.out_spec[n + 2]],
      params['window_strides'][n],
      params['padding'][n][0],
      params['lhs_dilation'][n],
      params['rhs_dilation'][n],
    )
    for n in range(len(lhs) - 2)
  )
  return 2 * met * batch * in_features * out_features


def _attention(
  shapes: Any, out: Any, params: Any, of_queries: int = 1, of_values: int = 1
) -> int:
  """Counts products of attention weights with queries or keys, and values."""
  del out
  query, key, value = shapes[:3]
  length = 2 if params['layout'] else 1  # BNTH is 1, BTNH is 0.
  weights = math.prod(query[:-1]) * key[length]
  return 2 * weights * (of_queries * query[-1] + of_values * value[-1])


_PRODUCTS: dict[str, Callable[[Any, Any, Any], int]] = {
  'conv_general_dilated': _convolution,
  'dot_general': _dot,
  # Backward: the weights again, and two gradients of each of the two products.
  'dot_product_attention_bwd': functools.partial(
    _attention, of_queries=3, of_values=2
  ),
  'dot_product_attention_fwd': _attention,
  'ragged_dot_general': _ragged_dot,
  'scaled_matmul': lambda shapes, out, params: (
    2 * math.prod(out) * shapes[0][-1]
  ),
}
