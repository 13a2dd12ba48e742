"""Declarations and initializers of the variables of layers.

Names and values follow Praxis (Google, 2022).
"""

from collections.abc import Callable, Sequence
import dataclasses
import enum
import functools
import math
from typing import Any, Self

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

  # Excludes a variable from L2 and from `decoupled_weight_decay`.
  SKIP_LP_REGULARIZATION = 'skip_lp_regularization'


class _Names(type):
  def __getattr__(cls, name: str) -> Any:
    hint = errors.did_you_mean(name, vars(cls))
    raise AttributeError(
      f'{cls.__name__} has no {name!r}.{hint} {hparams.LACKS}'
    )


@dataclasses.dataclass(frozen=True)
class WeightInit(metaclass=_Names):
  """An initializer of a variable.

  Attributes:
    method: Name of the distribution, such as 'gaussian' or 'xavier'.
    scale: Standard deviation, limit, factor of either, or constant, depending
      on the method.
  """

  method: str
  scale: float = 1.0

  @classmethod
  def Gaussian(cls, scale: float = 1.0) -> Self:
    """Normal, with the standard deviation `scale`."""
    return cls('gaussian', scale)

  @classmethod
  def GaussianSqrtDim(cls, scale: float = 1.0) -> Self:
    """Normal; the standard deviation is `scale` / sqrt(first dimension)."""
    return cls('gaussian_sqrt_dim', scale)

  @classmethod
  def GaussianSqrtFanIn(cls, scale: float = 1.0) -> Self:
    """Normal; the standard deviation is `scale` / sqrt(inputs)."""
    return cls('gaussian_sqrt_fanin', scale)

  @classmethod
  def GaussianSqrtFanOut(cls, scale: float = 1.0) -> Self:
    """Normal; the standard deviation is `scale` / sqrt(outputs)."""
    return cls('gaussian_sqrt_fanout', scale)

  @classmethod
  def GaussianSqrtFanAvg(cls, scale: float = 1.0) -> Self:
    """Normal; the variance is `scale`^2 2 / (inputs + outputs)."""
    return cls('gaussian_sqrt_fanavg', scale)

  @classmethod
  def TruncatedGaussian(cls, scale: float = 1.0) -> Self:
    """`Gaussian`, truncated at two standard deviations."""
    return cls('truncated_gaussian', scale)

  @classmethod
  def TruncatedGaussianSqrtDim(cls, scale: float = 1.0) -> Self:
    """`GaussianSqrtDim`, truncated at two standard deviations."""
    return cls('truncated_gaussian_sqrt_dim', scale)

  @classmethod
  def TruncatedGaussianSqrtFanIn(cls, scale: float = 1.0) -> Self:
    """`GaussianSqrtFanIn`, truncated at two standard deviations."""
    return cls('truncated_gaussian_sqrt_fanin', scale)

  @classmethod
  def TruncatedGaussianSqrtFanOut(cls, scale: float = 1.0) -> Self:
    """`GaussianSqrtFanOut`, truncated at two standard deviations."""
    return cls('truncated_gaussian_sqrt_fanout', scale)

  @classmethod
  def Uniform(cls, scale: float = 1.0) -> Self:
    """Uniform between `-scale` and `scale`."""
    return cls('uniform', scale)

  @classmethod
  def UniformSqrtDim(cls, scale: float = 1.0) -> Self:
    """Uniform; the limit is `scale` / sqrt(first dimension)."""
    return cls('uniform_sqrt_dim', scale)

  @classmethod
  def UniformUnitScaling(cls, scale: float = 1.0) -> Self:
    """Uniform; the limit is `scale` sqrt(3 / all dimensions but the last)."""
    return cls('uniform_unit_scaling', scale)

  @classmethod
  def Xavier(cls, scale: float = 1.0) -> Self:
    """Uniform; the limit is `scale` sqrt(6 / (inputs + outputs)).

    Glorot and Bengio (2010).
    """
    return cls('xavier', scale)

  UniformSqrtFanAvg = Xavier

  @classmethod
  def Constant(cls, scale: float = 1.0) -> Self:
    """The constant `scale`."""
    return cls('constant', scale)

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
