"""Declarations and initializers of the variables of layers.

Names and values follow Praxis (Google, 2022).
"""

from collections.abc import Callable, Sequence
import dataclasses
import enum
import functools
import math
from typing import Any

import jax

from examples import transformer
from examples.pax import hparams
from jaxline import errors

# For each dimension of an array: a logical axis of the run's sharding
# (`partitioning.AXIS_NAMES`), a mesh axis (`mesh_lib.MESH_AXES`), or a sequence
# of these. -1 or None means that the dimension is not split.
SplitDims = Sequence[str | int | Sequence[str] | None] | None


class WeightHParamsCollection(enum.Enum):
  """Collections that mark variables for special treatment."""

  # Excludes a variable from L2.
  SKIP_LP_REGULARIZATION = 'skip_lp_regularization'


# Name of a class method of `WeightInit` -> value of `method`.
_METHODS = {
  'Gaussian': 'gaussian',
  'GaussianSqrtDim': 'gaussian_sqrt_dim',
  'GaussianSqrtFanIn': 'gaussian_sqrt_fanin',
  'GaussianSqrtFanOut': 'gaussian_sqrt_fanout',
  'GaussianSqrtFanAvg': 'gaussian_sqrt_fanavg',
  'TruncatedGaussian': 'truncated_gaussian',
  'TruncatedGaussianSqrtDim': 'truncated_gaussian_sqrt_dim',
  'TruncatedGaussianSqrtFanIn': 'truncated_gaussian_sqrt_fanin',
  'TruncatedGaussianSqrtFanOut': 'truncated_gaussian_sqrt_fanout',
  'Uniform': 'uniform',
  'UniformSqrtDim': 'uniform_sqrt_dim',
  'UniformUnitScaling': 'uniform_unit_scaling',
  'UniformSqrtFanAvg': 'xavier',
  'Xavier': 'xavier',
  'Constant': 'constant',
}


class _Names(type):
  def __getattr__(cls, name: str) -> Any:
    if name in _METHODS:
      return functools.partial(cls, _METHODS[name])
    hint = errors.did_you_mean(name, _METHODS)
    raise AttributeError(
      f'{cls.__name__} has no {name!r}.{hint} {hparams.LACKS}'
    )


@dataclasses.dataclass(frozen=True)
class WeightInit(metaclass=_Names):
  """An initializer of a variable, such as `WeightInit.Gaussian(0.1)`.

  `Gaussian` has the standard deviation `scale`, and `TruncatedGaussian` is cut
  at two standard deviations. `Uniform` has the limit `scale`, and `Constant`
  has the value `scale`. If a name ends with one of these words, the deviation
  or the limit is `scale` times a factor:

      SqrtDim      1 / sqrt(first dimension)
      SqrtFanIn    1 / sqrt(inputs)
      SqrtFanOut   1 / sqrt(outputs)
      SqrtFanAvg   sqrt(2 / (inputs + outputs)), or sqrt(6 / ...) if uniform
      UnitScaling  sqrt(3 / product of all dimensions but the last)

  `Xavier` is `UniformSqrtFanAvg` (Glorot and Bengio, 2010).

  Attributes:
    method: Name of the distribution, such as 'gaussian' or 'xavier'.
    scale: Standard deviation, limit, factor of either, or constant.
  """

  method: str
  scale: float = 1.0

  def maker(
    self, shape: tuple[int, ...], fan_in: int, fan_out: int
  ) -> Callable[..., jax.Array]:
    """Returns a function of a key, a shape and a dtype that draws a value.

    Args:
      shape: Shape of the variable. The function may be called with a flat one.
      fan_in: Number of inputs that an output sums over.
      fan_out: Number of outputs that an input contributes to.
    """
    init = jax.nn.initializers

    def uniform(limit: float) -> Callable[..., jax.Array]:
      return functools.partial(jax.random.uniform, minval=-limit, maxval=limit)

    s, root = self.scale, math.sqrt
    first, but_last = shape[0] if shape else 1, math.prod(shape[:-1])
    makers: dict[str, Callable[..., jax.Array]] = {
      'gaussian': init.normal(s),
      'gaussian_sqrt_dim': init.normal(s / root(first)),
      'gaussian_sqrt_fanin': init.normal(s / root(fan_in)),
      'gaussian_sqrt_fanout': init.normal(s / root(fan_out)),
      'gaussian_sqrt_fanavg': init.normal(s * root(2 / (fan_in + fan_out))),
      'truncated_gaussian': init.truncated_normal(s),
      'truncated_gaussian_sqrt_dim': init.truncated_normal(s / root(first)),
      'truncated_gaussian_sqrt_fanin': init.truncated_normal(s / root(fan_in)),
      'truncated_gaussian_sqrt_fanout': init.truncated_normal(
        s / root(fan_out)
      ),
      'uniform': uniform(s),
      'uniform_sqrt_dim': uniform(s / root(first)),
      'uniform_unit_scaling': uniform(s * root(3 / but_last)),
      'xavier': uniform(s * root(6 / (fan_in + fan_out))),
      'constant': init.constant(s),
    }
    return makers[self.method]


@dataclasses.dataclass(frozen=True)
class WeightHParams:
  """Declaration of a variable.

  Attributes:
    shape: Shape of the variable in a single layer, without `repeat_prefix`.
    init: Initializer. If None, the layer's `params_init`.
    dtype: Dtype. If None, the layer's `dtype`.
    collections: Collections that the variable belongs to.
    tensor_split_dims_mapping: Axes of the dimensions; see `SplitDims`.
    fan_in_axes: Dimensions that an output sums over, for `init`. If None, the
      last but one, or the only dimension of a vector.
    fan_out_axes: Dimensions of the outputs, for `init`. If None, the last one.
    batch_axes: Dimensions that stack independent matrices. `init` treats each
      matrix as a variable by itself.
    repeat_prefix: Dimensions before `shape`, one for each level of repetition,
      each with the axis 'layers'.
  """

  shape: tuple[int, ...]
  init: WeightInit | None = None
  dtype: Any = None
  collections: tuple[WeightHParamsCollection, ...] = ()
  tensor_split_dims_mapping: SplitDims = None
  fan_in_axes: tuple[int, ...] | None = None
  fan_out_axes: tuple[int, ...] | None = None
  batch_axes: tuple[int, ...] = ()
  repeat_prefix: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    object.__setattr__(self, 'shape', tuple(self.shape))

  def check(self, path: str) -> None:
    """Raises a ValueError if the declaration is invalid.

    Args:
      path: Path of the variable, for the message.
    """
    if any(type(n) is not int or n < 1 for n in self.full_shape):
      raise ValueError(
        f'The shape of {path} is {self.full_shape}; expected positive integers.'
        ' Is a size in the HParams still 0?'
      )
    mapping = self.tensor_split_dims_mapping
    if mapping is not None and len(mapping) != len(self.shape):
      raise ValueError(
        f'tensor_split_dims_mapping {tuple(mapping)} of {path} has'
        f' {len(mapping)} entries for the shape {self.shape}; expected one for'
        ' each dimension.'
      )

  @property
  def full_shape(self) -> tuple[int, ...]:
    """Shape of the variable, with the dimensions of the repetition first."""
    return (*self.repeat_prefix, *self.shape)

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.full_shape)

  @property
  def axes(self) -> tuple[Any, ...]:
    """Axes of all dimensions, as `partitioning.Logical` takes them."""
    mapping = self.tensor_split_dims_mapping or (None,) * len(self.shape)
    return (*('layers' for _ in self.repeat_prefix), *map(axis, mapping))

  def make(self, key: jax.Array) -> jax.Array:
    """Returns an initial value. Each repetition uses a different key."""
    if self.repeat_prefix:
      times, *rest = self.repeat_prefix
      one = dataclasses.replace(self, repeat_prefix=tuple(rest))
      return jax.vmap(one.make)(jax.random.split(key, times))
    assert self.init is not None
    shape, in_axes, out_axes = self.shape, self.fan_in_axes, self.fan_out_axes
    if in_axes is None:
      in_axes = (max(len(shape) - 2, 0),) if shape else ()
    if out_axes is None:
      out_axes = (len(shape) - 1,) if shape else ()
    # The remaining dimensions are the spatial ones of a convolution.
    named = (*in_axes, *out_axes, *self.batch_axes)
    area = math.prod(n for i, n in enumerate(shape) if i not in named)
    fan_in = area * math.prod(shape[i] for i in in_axes)
    fan_out = area * math.prod(shape[i] for i in out_axes)
    make = self.init.maker(shape, fan_in, fan_out)
    return transformer.draw(make, key, shape, self.dtype)


def axis(entry: str | int | Sequence[str] | None) -> Any:
  if entry is None or entry == -1:
    return None
  return entry if isinstance(entry, str) else tuple(entry)
