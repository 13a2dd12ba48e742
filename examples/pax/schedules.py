"""Schedules: the factor of the learning rate at each step.

Steps count from 0 and may be int32 scalars, as an optimizer's count is; values
are float32 scalars. Points are pairs (step, value).

Names, fields and values are those of Praxis (Google, 2022).
"""

import abc
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.pax import hparams

Point = tuple[int, float]


class BaseSchedule(hparams.Configurable, abc.ABC):
  """A function of the step."""

  @abc.abstractmethod
  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""

  def _check(self, holds: bool, expected: str) -> None:
    """Refuses hyperparameters of which `expected` does not hold."""
    if not holds:
      raise ValueError(
        f'{type(self).__name__} expects {expected}; got {self.hparams}.'
      )


def _float(step: Any) -> jax.Array:
  return jnp.asarray(step).astype(jnp.float32)


class Constant(BaseSchedule):
  """The same at each step.

  Attributes:
    value: the multiplier.
  """

  value: float = 1.0

  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""
    del step
    return jnp.asarray(self.hparams.value, jnp.float32)


class _Between(BaseSchedule):
  """From one point to another; before and after them it stays.

  Attributes:
    start: the first point.
    limit: the last point.
  """

  start: Point = (0, 1.0)
  limit: Point = (1, 1.0)

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    points = (hparams.start, hparams.limit)
    self._check(
      all(len(point) == 2 for point in points)
      and hparams.start[0] < hparams.limit[0],
      'start and limit to be pairs (step, value), the step of limit the later',
    )

  def _fraction(self, step: Any) -> jax.Array:
    """How much of the way is done, from 0 to 1."""
    return _fraction(step, self.hparams.start[0], self.hparams.limit[0])


def _fraction(step: Any, start: float, end: float) -> jax.Array:
  return jnp.clip((_float(step) - start) / (end - start), 0.0, 1.0)


class Polynomial(_Between):
  """A power of the fraction of the way that is done, or is left.

  Attributes:
    power: 1 is a straight line.
    origin: 'start': the value leaves that of `start` as done ** power;
      'limit': it comes to that of `limit` as left ** power.
  """

  power: float = 1
  origin: str = 'start'

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    self._check(
      hparams.power > 0 and hparams.origin in ('start', 'limit'),
      "a positive power, and origin 'start' or 'limit'",
    )

  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""
    p = self.hparams
    done = self._fraction(step)
    from_start = p.origin == 'start'
    left = 1 - done**p.power if from_start else (1 - done) ** p.power
    # So written, each end is met exactly.
    return left * p.start[1] + (1 - left) * p.limit[1]


class Linear(Polynomial):
  """A straight line."""

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    self._check(hparams.power == 1, 'power 1; Polynomial has others')


class Exponential(_Between):
  """The same factor at each step; by default it falls to a half."""

  limit: Point = (1, 0.5)

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    self._check(
      hparams.start[1] > 0 and hparams.limit[1] > 0,
      'positive values in start and limit',
    )

  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""
    (_, first), (_, last) = self.hparams.start, self.hparams.limit
    return first * (last / first) ** self._fraction(step)


class Cosine(BaseSchedule):
  """Half a period of a cosine, from the first step on.

  Attributes:
    initial_value: at step 0.
    final_value: from `total_steps` on.
    total_steps: how long it takes.
  """

  initial_value: float = 1.0
  final_value: float = 0.0
  total_steps: int = 0

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    self._check(hparams.total_steps > 0, 'total_steps to be set, at least 1')

  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""
    p = self.hparams
    left = _cosine(_fraction(step, 0, p.total_steps))
    return p.final_value + (p.initial_value - p.final_value) * left


def _cosine(done: jax.Array) -> jax.Array:
  """How much is left of what goes from 1 to 0 along half a cosine."""
  return 0.5 * (1 + jnp.cos(math.pi * done))


class PiecewiseConstant(BaseSchedule):
  """`values[i]` before step `boundaries[i]`, after all of them the last.

  Attributes:
    boundaries: steps at which the value changes, in order.
    values: one more than there are boundaries.
  """

  boundaries: tuple[int, ...] = ()
  values: tuple[float, ...] = ()

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    self._check(
      len(hparams.values) == len(hparams.boundaries) + 1
      and list(hparams.boundaries) == sorted(hparams.boundaries),
      'boundaries in order, and one value more than boundaries',
    )

  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""
    return _piece(step, self.hparams.boundaries, self.hparams.values)


def _piece(step: Any, boundaries: Any, values: Any) -> jax.Array:
  return optax.join_schedules(
    [optax.constant_schedule(jnp.float32(value)) for value in values],
    list(boundaries),
  )(jnp.asarray(step))


class _LinearRampup(BaseSchedule):
  """Rises from 0 to `max`, stays there, and decays to a part of it.

  Attributes:
    warmup_steps: how long it rises, from 0 at step 0.
    decay_start: the step at which the decay begins.
    decay_end: the step at which it ends.
    min_ratio: of `max`, what is left from then on.
    max: the highest value.
  """

  warmup_steps: int = 0
  decay_start: int = 0
  decay_end: int = 0
  min_ratio: float = 0.01
  max: float = 1.0

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    p = hparams
    self._check(
      0 <= p.warmup_steps <= p.decay_start < p.decay_end
      and p.min_ratio > 0
      and p.max > 0,
      '0 <= warmup_steps <= decay_start < decay_end, and min_ratio and max to'
      ' be positive',
    )

  @abc.abstractmethod
  def _decay(self, done: jax.Array) -> jax.Array:
    """What is left of `max`, by how much of the decay is done, 0 to 1."""

  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""
    p = self.hparams
    left = self._decay(_fraction(step, p.decay_start, p.decay_end))
    if p.warmup_steps:
      left = jnp.where(
        _float(step) < p.warmup_steps, _float(step) / p.warmup_steps, left
      )
    return p.max * left


class LinearRampupExponentialDecay(_LinearRampup):
  """Rises in a straight line, and decays by the same factor at each step."""

  def _decay(self, done: jax.Array) -> jax.Array:
    return self.hparams.min_ratio**done


class LinearRampupCosineDecay(_LinearRampup):
  """Rises in a straight line, and decays along half a cosine."""

  def _decay(self, done: jax.Array) -> jax.Array:
    floor = self.hparams.min_ratio
    return floor + (1 - floor) * _cosine(done)


class LinearRampupPiecewiseConstant(BaseSchedule):
  """Rises from 0 to the first value, then is constant between boundaries.

  Attributes:
    boundaries: steps, in order; the rise ends at the first.
    values: as many; `values[i]` holds from `boundaries[i]` on.
  """

  boundaries: tuple[int, ...] = ()
  values: tuple[float, ...] = ()

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    p = hparams
    self._check(
      len(p.values) == len(p.boundaries) >= 1
      and p.boundaries[0] > 0
      and list(p.boundaries) == sorted(p.boundaries),
      'boundaries in order, the first positive, and as many values',
    )

  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""
    p = self.hparams
    rise = p.values[0] * _fraction(step, 0, p.boundaries[0])
    later = _piece(step, p.boundaries[1:], p.values)
    return jnp.where(_float(step) < p.boundaries[0], rise, later)


class SqrtDecay(BaseSchedule):
  """Inverse square root of the step; constant up to `decay_start`.

  Attributes:
    decay_start: up to here, the value is that at this step.
    multiplier: of the inverse root.
    offset: is taken off the step first.
  """

  decay_start: int = 10000
  multiplier: float = 1.0
  offset: float = 0.0

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    self._check(hparams.decay_start > 0, 'decay_start to be at least 1')

  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""
    p = self.hparams
    step = jnp.maximum(_float(step) - p.offset, float(p.decay_start))
    return p.multiplier * jax.lax.rsqrt(step)


class Transformer(BaseSchedule):
  """Rises in a straight line, then inverse square root of the step.

  `model_dim ** -.5 min(n ** -.5, n warmup_steps ** -1.5)` for the step that is
  the n-th, from 1 (Vaswani et al., 2017, section 5.3).

  Attributes:
    warmup_steps: how long it rises.
    model_dim: width of the model.
    decay_end: a step from which it stays; None for none.
  """

  warmup_steps: int = 4000
  model_dim: int = 512
  decay_end: int | None = None

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    self._check(
      hparams.warmup_steps > 0 and hparams.model_dim > 0,
      'warmup_steps and model_dim to be at least 1',
    )

  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""
    p = self.hparams
    step = _float(step)
    if p.decay_end is not None:
      step = jnp.minimum(step, float(p.decay_end))
    n = step + 1
    return p.model_dim**-0.5 * jnp.minimum(n**-0.5, n * p.warmup_steps**-1.5)
