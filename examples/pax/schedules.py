"""Schedules: the factor of the learning rate at each step.

Steps count from 0 and may be int32 scalars, as an optimizer's count is; values
are float32 scalars. Points are pairs (step, value).

Names, fields and values are those of Praxis (Google, 2022).
"""

import abc
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from examples.pax import hparams as hparams_lib
from jaxline.base import keys

Point = tuple[int, float]

_POSITIVE = keys.number(above=0)
_NOT_NEGATIVE = keys.number(min=0)


class BaseSchedule(hparams_lib.Configurable):
  """A function of the step."""

  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""
    step = jnp.asarray(step).astype(jnp.float32)
    return jnp.asarray(self._at(step), jnp.float32)

  def _at(self, step: jax.Array) -> Any:
    """Returns the multiplier at a step, which is a float32 scalar."""
    raise NotImplementedError(f'{type(self).__name__} overrides no `value_at`.')


class Constant(BaseSchedule):
  """The same at each step.

  Attributes:
    value: the multiplier.
  """

  value: float = 1.0

  def _at(self, step: jax.Array) -> Any:
    return self.hparams.value


class _Between(BaseSchedule):
  """From one point to another; before and after them it stays.

  Attributes:
    start: the first point.
    limit: the last point.
  """

  start: Point = (0, 1.0)
  limit: Point = (1, 1.0)

  _RULES = {
    'start and limit to be pairs (step, value), the step of limit the later': (
      lambda p: len(p.start) == len(p.limit) == 2 and p.start[0] < p.limit[0]
    )
  }


def _fraction(step: jax.Array, start: float, end: float) -> jax.Array:
  """How much of the way is done, from 0 to 1."""
  return jnp.clip((step - start) / (end - start), 0.0, 1.0)


class Polynomial(_Between):
  """A power of the fraction of the way that is done, or is left.

  Attributes:
    power: 1 is a straight line.
    origin: 'start': the value leaves that of `start` as done ** power;
      'limit': it comes to that of `limit` as left ** power.
  """

  power: float = 1
  origin: str = 'start'

  _CHECKS = {
    'power': _POSITIVE,
    'origin': keys.one_of('start', 'limit'),
  }

  def _at(self, step: jax.Array) -> Any:
    p = self.hparams
    done = _fraction(step, p.start[0], p.limit[0])
    from_start = p.origin == 'start'
    left = 1 - done**p.power if from_start else (1 - done) ** p.power
    # So written, each end is met exactly.
    return left * p.start[1] + (1 - left) * p.limit[1]


class Linear(Polynomial):
  """A straight line."""


class Exponential(_Between):
  """The same factor at each step; by default it falls to a half."""

  limit: Point = (1, 0.5)

  _RULES = {
    **_Between._RULES,
    'positive values in start and limit': (
      lambda p: min(p.start[1], p.limit[1]) > 0
    ),
  }

  def _at(self, step: jax.Array) -> Any:
    (start, first), (end, last) = self.hparams.start, self.hparams.limit
    return first * (last / first) ** _fraction(step, start, end)


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

  _CHECKS = {'total_steps': _POSITIVE}

  def _at(self, step: jax.Array) -> Any:
    p = self.hparams
    left = _cosine(_fraction(step, 0, p.total_steps))
    return p.final_value + (p.initial_value - p.final_value) * left


def _cosine(done: jax.Array) -> jax.Array:
  """How much is left of what goes from 1 to 0 along half a cosine."""
  return 0.5 * (1 + jnp.cos(math.pi * done))


class DelayedCosine(_Between):
  """Half a period of a cosine, from one point to another."""

  limit: Point = (1, 0.5)

  def _at(self, step: jax.Array) -> Any:
    (start, first), (end, last) = self.hparams.start, self.hparams.limit
    return last + (first - last) * _cosine(_fraction(step, start, end))


class PiecewiseConstant(BaseSchedule):
  """`values[i]` before step `boundaries[i]`, after all of them the last.

  Attributes:
    boundaries: steps at which the value changes, in order.
    values: one more than there are boundaries.
  """

  boundaries: tuple[int, ...] = ()
  values: tuple[float, ...] = ()

  _RULES = {
    'boundaries in order': lambda p: _in_order(p.boundaries),
    'one value more than boundaries': (
      lambda p: len(p.values) == len(p.boundaries) + 1
    ),
  }

  def _at(self, step: jax.Array) -> Any:
    return _piece(step, self.hparams.boundaries, self.hparams.values)


def _in_order(steps: Any) -> bool:
  return list(steps) == sorted(steps)


def _piece(step: jax.Array, boundaries: Any, values: Any) -> jax.Array:
  place = jnp.searchsorted(jnp.float32(boundaries), step, side='right')
  return jnp.float32(values)[place]


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

  _CHECKS = {'min_ratio': _POSITIVE, 'max': _POSITIVE}
  _RULES = {
    '0 <= warmup_steps <= decay_start < decay_end': (
      lambda p: 0 <= p.warmup_steps <= p.decay_start < p.decay_end
    )
  }

  @abc.abstractmethod
  def _decay(self, done: jax.Array) -> jax.Array:
    """What is left of `max`, by how much of the decay is done, 0 to 1."""

  def _at(self, step: jax.Array) -> Any:
    p = self.hparams
    left = self._decay(_fraction(step, p.decay_start, p.decay_end))
    if p.warmup_steps:
      left = jnp.where(step < p.warmup_steps, step / p.warmup_steps, left)
    return p.max * left


class LinearRampupExponentialDecay(_LinearRampup):
  """Rises in a straight line, and decays by the same factor at each step."""

  def _decay(self, done: jax.Array) -> jax.Array:
    return self.hparams.min_ratio**done


class LinearRampupPolynomialDecay(_LinearRampup):
  """Rises in a straight line, and decays by a power of how much is done.

  Attributes:
    power: 1 is a straight line.
  """

  power: float = 1

  _CHECKS = {**_LinearRampup._CHECKS, 'min_ratio': _NOT_NEGATIVE}

  def _decay(self, done: jax.Array) -> jax.Array:
    return 1 - (1 - self.hparams.min_ratio) * done**self.hparams.power


class LinearRampupCosineDecay(_LinearRampup):
  """Rises in a straight line, and decays along half a cosine."""

  _CHECKS = {**_LinearRampup._CHECKS, 'min_ratio': _NOT_NEGATIVE}

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

  _RULES = {
    'boundaries in order, the first positive': (
      lambda p: list(p.boundaries[:1]) > [0] and _in_order(p.boundaries)
    ),
    'as many values as boundaries': (
      lambda p: len(p.values) == len(p.boundaries)
    ),
  }

  def _at(self, step: jax.Array) -> Any:
    p = self.hparams
    rise = p.values[0] * _fraction(step, 0, p.boundaries[0])
    later = _piece(step, p.boundaries[1:], p.values)
    return jnp.where(step < p.boundaries[0], rise, later)


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

  _CHECKS = {'decay_start': _POSITIVE}

  def _at(self, step: jax.Array) -> Any:
    p = self.hparams
    n = jnp.maximum(step - p.offset, float(p.decay_start))
    return p.multiplier * jax.lax.rsqrt(n)


class Transformer(BaseSchedule):
  """Rises in a straight line, then inverse square root of the step.

  `model_dim ** -.5 min(n ** -.5, n warmup_steps ** -1.5)` for the step that is
  the n-th, from 1 (Vaswani et al., 2017, section 5.3).

  Attributes:
    warmup_steps: how long it rises.
    model_dim: width of the model.
    worker_replicas: what `warmup_steps` is multiplied by.
    decay_end: a step from which it stays; None for none.
  """

  warmup_steps: int = 4000
  model_dim: int = 512
  worker_replicas: int = 1
  decay_end: int | None = None

  _CHECKS = {'warmup_steps': _POSITIVE, 'model_dim': _POSITIVE}

  def _at(self, step: jax.Array) -> Any:
    p = self.hparams
    if p.decay_end is not None:
      step = jnp.minimum(step, float(p.decay_end))
    n = step + 1
    rise = (p.warmup_steps * p.worker_replicas) ** -1.5
    return p.model_dim**-0.5 * jnp.minimum(n**-0.5, n * rise)


class LinearRampupSqrtDecay(BaseSchedule):
  """Rises in a straight line, then inverse square root of the step.

  Attributes:
    peak: the highest value.
    warmup_steps: the step at which it is reached.
  """

  peak: float = 1.0
  warmup_steps: int = 4000

  _CHECKS = {'warmup_steps': _POSITIVE}

  def _at(self, step: jax.Array) -> Any:
    part = jnp.maximum(step, 1.0) / self.hparams.warmup_steps
    return self.hparams.peak * jnp.minimum(part, part**-0.5)


class ContinuousSchedule(BaseSchedule):
  """Constant, then halved every so many steps, down to a least value.

  Attributes:
    initial_value: up to `start_step`.
    start_step: from where it falls.
    half_life_steps: in how many steps it is halved.
    min: of `initial_value`, what is left at the end.
  """

  initial_value: float = 1.0
  start_step: int = 400_000
  half_life_steps: int = 100_000
  min: float = 0.01

  _CHECKS = {'half_life_steps': _POSITIVE, 'min': _POSITIVE}

  def _at(self, step: jax.Array) -> Any:
    p = self.hparams
    halvings = jnp.maximum(step - p.start_step, 0.0) / p.half_life_steps
    return p.initial_value * jnp.maximum(0.5**halvings, p.min)


class _Several(BaseSchedule):
  """Made of other schedules.

  Attributes:
    schedules: templates.
  """

  schedules: tuple[Any, ...] = ()

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    where = f'{type(self).__name__}.schedules'
    self._parts = [
      hparams_lib.instantiate(x, BaseSchedule, where) for x in hparams.schedules
    ]


class PiecewiseSchedule(_Several):
  """One schedule after the other, each with the steps since its own start.

  Attributes:
    boundaries: steps at which the next begins, in order.
    schedules: templates, one more than there are boundaries.
  """

  boundaries: tuple[int, ...] = ()

  _RULES = {
    'boundaries in order': lambda p: _in_order(p.boundaries),
    'one schedule more than boundaries': (
      lambda p: len(p.schedules) == len(p.boundaries) + 1
    ),
  }

  def _at(self, step: jax.Array) -> Any:
    starts = (0, *self.hparams.boundaries)
    values = [
      part.value_at(step - start)
      for start, part in zip(starts, self._parts, strict=True)
    ]
    return _piece(step, self.hparams.boundaries, jnp.stack(values))


class CycleSchedule(_Several):
  """Schedules by turns; each is given the run's step.

  Attributes:
    schedules: templates, of which one at least.
    steps: for how many steps each has its turn.
  """

  steps: tuple[int, ...] = ()

  _RULES = {
    'as many schedules as steps, which are positive': (
      lambda p: len(p.schedules) == len(p.steps) and min(p.steps, default=0) > 0
    )
  }

  def _at(self, step: jax.Array) -> Any:
    *ends, period = itertools.accumulate(self.hparams.steps)
    values = jnp.stack([part.value_at(step) for part in self._parts])
    return _piece(jnp.mod(step, period), ends, values)
