"""Schedules: the factor of the learning rate at each step.

Steps count from 0 and may be int32 scalars, as an optimizer's count is; values
are float32 scalars. Those of the registered runs are here; one of your own
derives from `BaseSchedule`.

Names, fields and values are those of Praxis (Google, 2022).
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


def _fraction(step: jax.Array, start: float, end: float) -> jax.Array:
  """How much of the way is done, from 0 to 1."""
  return jnp.clip((step - start) / (end - start), 0.0, 1.0)


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


class LinearRampupCosineDecay(_LinearRampup):
  """Rises in a straight line, and decays along half a cosine."""

  _CHECKS = {**_LinearRampup._CHECKS, 'min_ratio': _NOT_NEGATIVE}

  def _decay(self, done: jax.Array) -> jax.Array:
    floor = self.hparams.min_ratio
    return floor + (1 - floor) * (0.5 * (1 + jnp.cos(math.pi * done)))


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
