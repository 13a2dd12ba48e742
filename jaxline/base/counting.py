"""Counts the FLOPs of a traced program, without a compiler or an array.

XLA changes the program (fusions, recomputation, dead code); `compile.measure`
measures the result.
"""

from collections.abc import Callable
import functools
import math
import re
from typing import Any

from absl import logging
import jax
import numpy as np

# The forward pass, and for the backward pass one product for each operand.
PRODUCTS_IN_TRAINING = 3


def flops(jaxpr: Any) -> float:
  """Returns the FLOPs of the products and convolutions of a program's jaxpr.

  A multiplication and an addition are two. The whole program counts, over all
  devices, a pipeline without its bubble (`partly_used`). Of a `cond` the most
  expensive branch counts. A `while` counts once, with a warning if it has
  products. cuDNN's attention counts fully, although a causal kernel skips about
  half; splash attention counts without the blocks that it skips.
  """
  return _jaxpr_flops(jaxpr, _ALL)


def forward_flops(jaxpr: Any) -> float:
  """Returns the FLOPs of the products in the forward pass of a traced gradient.

  Left out are recomputation, all outside of `jax.grad` (or
  `jax.value_and_grad`), and gradients that the differentiated function takes
  itself.
  """
  return _jaxpr_flops(jaxpr, _OUTSIDE)


_SCOPE = re.compile(r'(\d+)_of_(\d+)_used')


def partly_used(used: int, size: int) -> Any:
  """Returns a context: `used` of `size` equal parts inside are counted.

  A pipeline does not use what its stages compute in some rounds, nor a mixture
  of experts what is in free slots.
  """
  return jax.named_scope(f'{used}_of_{size}_used')


# What is counted: all of a program; or the products of its forward pass, which
# JAX names 'jvp' and not 'transpose', from outside or inside of it.
_ALL, _OUTSIDE, _INSIDE = range(3)


def _jaxpr_flops(jaxpr: Any, counted: int) -> float:
  return sum(_equation_flops(equation, counted) for equation in jaxpr.eqns)


def _equation_flops(equation: Any, counted: int) -> float:
  from jax.extend import core  # It would make every import slower.

  name, params = equation.primitive.name, equation.params
  if counted != _ALL:
    # The other entries are scopes, which have the names of the model's layers.
    stack = equation.source_info.name_stack.stack
    made_by = [x.name for x in stack if type(x).__name__ == 'Transform']
    if 'transpose' in made_by:
      return 0.0
    counted = _INSIDE if 'jvp' in made_by else counted
  # Equations of an inner program do not have the scopes of its equation.
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
      'A while loop of %.3g FLOPs a round was counted once.', sum(inner)
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
    # A size that is not known counts once.
    rounds = math.prod(size for size in grid if isinstance(size, int))
    if 'splash_m' in str(equation.source_info.name_stack):
      first = equation.invars[0].aval  # The blocks of the mask, if it has one.
      if np.issubdtype(first.dtype, np.integer):
        return rounds * splash_share(*first.shape[-2:])
    return rounds
  return 1


def splash_share(rows: int, columns: int) -> float:
  """Returns the part of splash attention's blocks that a mask leaves.

  A causal mask has as many columns (blocks of keys) as rows, others have fewer.
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
  """Counts the pairs of output and kernel position that meet an element.

  Output o and kernel position k meet what is at x = o * stride - low +
  k * kernel_dilation; that is an element of the input, not padding nor a hole
  of its dilation, where 0 <= x <= (size - 1) * dilation and dilation divides x.
  """
  at = np.arange(kernel, dtype=np.int64) * kernel_dilation - low
  first = np.maximum(-(at // stride), 0)
  last = np.minimum(((size - 1) * dilation - at) // stride, out - 1)
  common = math.gcd(stride, dilation)
  every = dilation // common
  # o * stride = -at (mod dilation) is solved by one o in `every`, or by none.
  rest = -at // common * pow(stride // common, -1, every) % every
  solutions = (last - rest) // every - (first - 1 - rest) // every
  return int(np.where(at % common == 0, np.maximum(solutions, 0), 0).sum())


# The primitives that multiply. Each function takes the shapes of the operands,
# that of the result and the parameters.


def _dot(shapes: Any, out: Any, params: Any) -> int:
  (contracted, _), _ = params['dimension_numbers']
  return 2 * math.prod((*out, *(shapes[0][d] for d in contracted)))


def _ragged_dot(shapes: Any, out: Any, params: Any) -> int:
  numbers = params['ragged_dot_dimension_numbers']
  (contracted, _), _ = numbers.dot_dimension_numbers
  if set(numbers.lhs_ragged_dimensions) <= set(contracted):
    # The result has a matrix a group, and the rows are shared out among them.
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
  """Counts products of the weights with queries or keys, and with values."""
  del out
  query, key, value = shapes[:3]
  length = 2 if params['layout'] else 1  # BNTH is 1, BTNH is 0.
  weights = math.prod(query[:-1]) * key[length]
  return 2 * weights * (of_queries * query[-1] + of_values * value[-1])


_PRODUCTS: dict[str, Callable[[Any, Any, Any], int]] = {
  'conv_general_dilated': _convolution,
  'dot_general': _dot,
  # Backward: the weights again, and a gradient of either factor of both.
  'dot_product_attention_bwd': functools.partial(
    _attention, of_queries=3, of_values=2
  ),
  'dot_product_attention_fwd': _attention,
  'ragged_dot_general': _ragged_dot,
  'scaled_matmul': lambda shapes, out, params: (
    2 * math.prod(out) * shapes[0][-1]
  ),
}
