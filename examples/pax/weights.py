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


_draw = jax.nn.initializers


def _uniform(limit: float) -> Callable[..., jax.Array]:
  return functools.partial(jax.random.uniform, minval=-limit, maxval=limit)


# Name of a class method of `WeightInit` -> `method`, and a function of `scale`
# and of the numbers of inputs and outputs that returns an initializer.
_METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
  'Gaussian': ('gaussian', lambda s, i, o: _draw.normal(s)),
  'GaussianSqrtFanIn': (
    'gaussian_sqrt_fanin',
    lambda s, i, o: _draw.normal(s / math.sqrt(i)),
  ),
  'GaussianSqrtFanOut': (
    'gaussian_sqrt_fanout',
    lambda s, i, o: _draw.normal(s / math.sqrt(o)),
  ),
  'TruncatedGaussian': (
    'truncated_gaussian',
    lambda s, i, o: _draw.truncated_normal(s),
  ),
  'Uniform': ('uniform', lambda s, i, o: _uniform(s)),
  'Xavier': ('xavier', lambda s, i, o: _uniform(s * math.sqrt(6 / (i + o)))),
  'Constant': ('constant', lambda s, i, o: _draw.constant(s)),
}


class _Names(type):
  def __getattr__(cls, name: str) -> Any:
    if name in _METHODS:
      return functools.partial(cls, _METHODS[name][0])
    hint = errors.did_you_mean(name, _METHODS)
    raise AttributeError(
      f'{cls.__name__} has no {name!r}.{hint} {hparams.LACKS}'
    )


@dataclasses.dataclass(frozen=True)
class WeightInit(metaclass=_Names):
  """An initializer of a variable, such as `WeightInit.Gaussian(0.1)`.

  `scale` is the standard deviation of `Gaussian` and of `TruncatedGaussian`,
  which is cut at two of them. It is divided by the root of the number of inputs
  in `GaussianSqrtFanIn`, and of outputs in `GaussianSqrtFanOut`. `Uniform` has
  the limit `scale`, `Xavier` (Glorot and Bengio, 2010) `scale` times sqrt(6 /
  (inputs + outputs)), and `Constant` the value `scale`.
  """

  method: str  # Name of the distribution, such as 'gaussian' or 'xavier'.
  scale: float = 1.0

  def maker(self, fan_in: int, fan_out: int) -> Callable[..., jax.Array]:
    """Returns a function of a key, a shape and a dtype that draws a value.

    Args:
      fan_in: Number of inputs that an output sums over.
      fan_out: Number of outputs that an input contributes to.
    """
    return dict(_METHODS.values())[self.method](self.scale, fan_in, fan_out)


@dataclasses.dataclass(frozen=True)
class WeightHParams:
  """Declaration of a variable."""

  shape: tuple[int, ...]  # In a single layer, without `repeat_prefix`.
  init: WeightInit | None = None  # If None, the layer's `params_init`.
  dtype: Any = None  # If None, the layer's `dtype`.
  collections: tuple[WeightHParamsCollection, ...] = ()
  tensor_split_dims_mapping: SplitDims = None  # Axes of the dimensions.
  # For `init`, the dimensions that an output sums over. If None, the last but
  # one, or the only dimension of a vector. And the dimensions of the outputs.
  # If None, the last one.
  fan_in_axes: tuple[int, ...] | None = None
  fan_out_axes: tuple[int, ...] | None = None
  # Dimensions that stack independent matrices. `init` treats each as a variable
  # by itself.
  batch_axes: tuple[int, ...] = ()
  # Dimensions before `shape`, one for each level of repetition, each with the
  # axis 'layers'.
  repeat_prefix: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    object.__setattr__(self, 'shape', tuple(self.shape))

  def check(self, path: str) -> None:
    """Raises a ValueError, with the path, if the declaration is invalid."""
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
    make = self.init.maker(fan_in, fan_out)
    return transformer.draw(make, key, shape, self.dtype)


def axis(entry: str | int | Sequence[str] | None) -> Any:
  if entry is None or entry == -1:
    return None
  return entry if isinstance(entry, str) else tuple(entry)
