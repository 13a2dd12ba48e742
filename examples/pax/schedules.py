"""Schedules: multipliers of the learning rate at each step.

Steps count from 0. They may be int32 scalars, as an optimizer's count is.
Values are float32 scalars. This module has the schedules of the registered
experiments. To write a schedule, derive from `BaseSchedule`.

Names, fields and values follow Praxis (Google, 2022).
"""

import abc
import math
from typing import Any

import jax
import jax.numpy as jnp

from examples.pax import hparams as hparams_lib
from jaxline.base import keys

__getattr__ = hparams_lib.refuse_names_of_pax(__name__)

_POSITIVE = keys.number(above=0)


class BaseSchedule(hparams_lib.Configurable):
  """A function of the step."""

  def value_at(self, step: Any) -> jax.Array:
    """Returns the multiplier at a step, a float32 scalar."""
    step = jnp.asarray(step).astype(jnp.float32)
    return jnp.asarray(self._at(step), jnp.float32)

  def _at(self, step: jax.Array) -> Any:
    """Returns the multiplier at a step, given as a float32 scalar."""
    raise NotImplementedError(
      f'{type(self).__name__} does not override `value_at`.'
    )


class Constant(BaseSchedule):
  """A constant multiplier.

  Attributes:
    value: The multiplier.
  """

  value: float = 1.0

  def _at(self, step: jax.Array) -> Any:
    return self.hparams.value


def _fraction(step: jax.Array, start: float, end: float) -> jax.Array:
  """Returns the progress from `start` to `end`, clipped to [0, 1]."""
  return jnp.clip((step - start) / (end - start), 0.0, 1.0)


class _LinearRampup(BaseSchedule):
  """Rises from 0 to `max`, stays constant, and decays to a fraction of `max`.

  Attributes:
    warmup_steps: Number of steps of the rise, from 0 at step 0.
    decay_start: First step of the decay.
    decay_end: Last step of the decay. The value is constant after it.
    min_ratio: Final value, as a fraction of `max`.
    max: Highest value.
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
    """Returns the fraction of `max` by the progress of the decay, 0 to 1."""

  def _at(self, step: jax.Array) -> Any:
    p = self.hparams
    left = self._decay(_fraction(step, p.decay_start, p.decay_end))
    if p.warmup_steps:
      left = jnp.where(step < p.warmup_steps, step / p.warmup_steps, left)
    return p.max * left


class LinearRampupExponentialDecay(_LinearRampup):
  """Rises linearly, and decays exponentially."""

  def _decay(self, done: jax.Array) -> jax.Array:
    return self.hparams.min_ratio**done


class LinearRampupCosineDecay(_LinearRampup):
  """Rises linearly, and decays along half a cosine."""

  _CHECKS = {**_LinearRampup._CHECKS, 'min_ratio': keys.number(min=0)}

  def _decay(self, done: jax.Array) -> jax.Array:
    floor = self.hparams.min_ratio
    return floor + (1 - floor) * (0.5 * (1 + jnp.cos(math.pi * done)))


class LinearRampupPiecewiseConstant(BaseSchedule):
  """Rises linearly from 0 to the first value, then is piecewise constant.

  Attributes:
    boundaries: Steps in ascending order. The rise ends at the first.
    values: Values, one for each boundary. `values[i]` holds from step
      `boundaries[i]`.
  """

  boundaries: tuple[int, ...] = ()
  values: tuple[float, ...] = ()

  _RULES = {
    'boundaries in order, the first positive': (
      lambda p: (
        list(p.boundaries[:1]) > [0]
        and list(p.boundaries) == sorted(p.boundaries)
      )
    ),
    'as many values as boundaries': (
      lambda p: len(p.values) == len(p.boundaries)
    ),
  }

  def _at(self, step: jax.Array) -> Any:
    p = self.hparams
    rise = p.values[0] * _fraction(step, 0, p.boundaries[0])
    later = jnp.float32(p.boundaries[1:])
    place = jnp.searchsorted(later, step, side='right')
    return jnp.where(step < p.boundaries[0], rise, jnp.float32(p.values)[place])
