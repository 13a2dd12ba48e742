"""Variables of layers: what they are, and what they start as.

Names and values are those of Praxis (Google, 2022).
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
# (`partitioning.AXIS_NAMES`), a mesh axis (`mesh_lib.MESH_AXES`), several
# of these, or -1 or None where it is whole.
SplitDims = Sequence[str | int | Sequence[str] | None] | None


class WeightHParamsCollection(enum.Enum):
  """What else is to be known of a variable."""

  # Neither weight decay nor L2 regularisation belongs to it.
  SKIP_LP_REGULARIZATION = 'skip_lp_regularization'


class _Names(type):
  def __getattr__(cls, name: str) -> Any:
    hint = errors.did_you_mean(name, vars(cls))
    raise AttributeError(
      f'{cls.__name__} has no {name!r}.{hint} {hparams.LACKS}'
    )


@dataclasses.dataclass(frozen=True)
class WeightInit(metaclass=_Names):
  """What a variable starts as.

  Attributes:
    method: one of the class's methods' names.
    scale: standard deviation, limit, factor of either, or the constant.
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
    """Like `Gaussian`, cut at two standard deviations."""
    return cls('truncated_gaussian', scale)

  @classmethod
  def TruncatedGaussianSqrtDim(cls, scale: float = 1.0) -> Self:
    """Like `GaussianSqrtDim`, cut at two standard deviations."""
    return cls('truncated_gaussian_sqrt_dim', scale)

  @classmethod
  def TruncatedGaussianSqrtFanIn(cls, scale: float = 1.0) -> Self:
    """Like `GaussianSqrtFanIn`, cut at two standard deviations."""
    return cls('truncated_gaussian_sqrt_fanin', scale)

  @classmethod
  def TruncatedGaussianSqrtFanOut(cls, scale: float = 1.0) -> Self:
    """Like `GaussianSqrtFanOut`, cut at two standard deviations."""
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
    """Uniform, the limit is `scale` sqrt(6 / (inputs + outputs)).

    Glorot and Bengio (2010).
    """
    return cls('xavier', scale)

  UniformSqrtFanAvg = Xavier

  @classmethod
  def Constant(cls, scale: float = 1.0) -> Self:
    """`scale` everywhere."""
    return cls('constant', scale)

  def maker(
    self, shape: tuple[int, ...], fan_in: int, fan_out: int
  ) -> Callable[..., jax.Array]:
    """Returns what makes a first value of a key, a shape and a type.

    Args:
      shape: of the variable; the value may be made flat.
      fan_in: over how many numbers an output sums.
      fan_out: in how many outputs a number is.
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
  """A variable.

  Attributes:
    shape: its shape; of a repeated layer's, that of one layer.
    init: what it starts as; None is the layer's `params_init`.
    dtype: its type; None is the layer's `dtype`.
    collections: what else is to be known of it.
    tensor_split_dims_mapping: its axes; see `SplitDims`.
    fan_in_axes: dimensions over which an output sums, for `init`; None is the
      last but one (of a vector, its only one).
    fan_out_axes: dimensions of the outputs; None is the last.
    batch_axes: dimensions that count several matrices side by side, each of
      which starts as if it were alone.
    repeat_prefix: dimensions before `shape`, one for each level of repetition,
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
    """Refuses what the variable at a path cannot be."""
    if any(type(n) is not int or n < 1 for n in self.full_shape):
      raise ValueError(
        f'The shape of {path} is {self.full_shape}; expected positive integers.'
        ' Is a size of the HParams still 0?'
      )
    mapping = self.tensor_split_dims_mapping
    if mapping is not None and len(mapping) != len(self.shape):
      raise ValueError(
        f'tensor_split_dims_mapping {tuple(mapping)} of {path} has'
        f' {len(mapping)} entries for the shape {self.shape}; expected one a'
        ' dimension.'
      )

  @property
  def full_shape(self) -> tuple[int, ...]:
    """Its shape, with those dimensions that repetition puts before."""
    return (*self.repeat_prefix, *self.shape)

  @property
  def size(self) -> int:
    """How many numbers it is."""
    return math.prod(self.full_shape)

  @property
  def axes(self) -> tuple[Any, ...]:
    """For each of its dimensions what `partitioning.Logical` takes."""
    mapping = self.tensor_split_dims_mapping or (None,) * len(self.shape)
    return (*('layers' for _ in self.repeat_prefix), *map(axis, mapping))

  def make(self, key: jax.Array) -> jax.Array:
    """Returns its first value; every repetition gets a key of its own."""
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
    # What is in none of these counts as the size of a filter.
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
