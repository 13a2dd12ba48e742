"""Metrics of a run. This module has weighted means and the config keys.

`periodic` calls actions at intervals. `writers` has the queue and its thread,
which write the files of `files` and `tensorboard`. `console` decides what the
terminal shows, `lines` formats numbers, and `live` redraws the line. Read
`writers` first.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxline.base.keys import (
  BOOLEAN,
  POSITIVE,
  Check,
  Key,
  number,
  one_of,
  optional,
)

_INTERVAL = optional(number())
_INTERVAL_TYPE = optional(one_of('secs', 'steps'))
KEYS = (
  Key('interval_type', 'secs', _INTERVAL_TYPE,
      'Unit of all intervals; None means `secs`. An interval of None or a'
      ' negative number disables its action; 0 means every step.'),
  Key('logging_interval_type', None, _INTERVAL_TYPE,
      'Overrides `interval_type` for logging.'),
  Key('checkpoint_interval_type', None, _INTERVAL_TYPE,
      'Overrides `interval_type` for checkpoints.'),
  Key('eval_interval_type', None, _INTERVAL_TYPE,
      'Overrides `interval_type` for evaluation.'),
  Key('save_checkpoint_interval', 300, _INTERVAL,
      'Interval between checkpoints. As in JAXline, 0 means never.'),
  Key('log_tensors_interval', 60, _INTERVAL, 'Interval between log lines.'),
  Key('log_train_data_interval', 120.0, _INTERVAL,
      'Interval at which scalars are written to TensorBoard and JSON lines.'),
  Key('eval_interval', 300, _INTERVAL,
      'Interval at which training pauses to evaluate, in `train_and_eval`.'),
  Key('periodic_action_growth_ratios', None, optional(Check(
        'a list of positive numbers', lambda x: isinstance(x, Sequence)
        and all(map(POSITIVE.accepts, x)))),
      'Each ratio r adds the steps r, 10 r, 100 r, ... to the intervals above:'
      ' [1, 2, 5] logs often at the start. Needs intervals in steps.'),
  Key('console', None, optional(one_of('live', 'plain', 'off')),
      'Output of the first process: `live` redraws one line of the terminal,'
      ' `plain` prints a line per `log_tensors_interval`, `off` logs instead.'
      ' None: `live` on a terminal, else `plain`. -v 1 adds the full log.'),
  Key('log_async', True, BOOLEAN,
      'Make the log line on a background thread. False helps debugging.'),
  Key('writers', ('tensorboard', 'jsonl'), Check(
        'a list of names of writers', lambda x: isinstance(x, list | tuple)
        and all(isinstance(name, str) for name in x)),
      'Writers of numbers, images and texts: `tensorboard`, `jsonl` (which'
      ' `jaxline.fit` and `.runs` read), or your own (`writers.register`).'),
  Key('log_all_hosts', False, BOOLEAN,
      'Log on all hosts instead of only the first.'),
  Key('log_all_train_data', False, BOOLEAN,
      'Log the scalars of every step instead of once per interval.'),
  Key('fingerprint', True, BOOLEAN,
      'Write a hash of the scalars and the batch of every step, for `runs'
      ' replay` and `runs bisect`.'),
)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A weighted mean, stored as two sums, so that means can be added exactly."""

  total: jax.Array  # The sum of value * weight, a scalar; float32 from `of`.
  weight: jax.Array  # The sum of the weights, a scalar like `total`.

  @classmethod
  def of(cls, values: jax.Array, weights: jax.Array | None = None) -> 'Mean':
    """Returns the mean of an array.

    Args:
      values: Array of any shape, or a number.
      weights: Array of the same shape or its leading dimensions; it is
        broadcast over the missing ones. A value of weight 0 is ignored and gets
        a zero gradient, even if it is NaN. (If its derivative is not finite
        either, its inputs get the gradient 0 * NaN = NaN.) None means 1.
    """
    values = jnp.asarray(values, jnp.float32)
    weights = jnp.asarray(1.0 if weights is None else weights, jnp.float32)
    missing = values.ndim - weights.ndim
    if missing < 0 or values.shape[: weights.ndim] != weights.shape:
      raise ValueError(
        f'weights of shape {weights.shape} do not fit values of shape'
        f' {values.shape}; expected this shape or its leading dimensions.'
      )
    weights = weights.reshape(weights.shape + (1,) * missing)
    weights = jnp.broadcast_to(weights, values.shape)
    # A value of weight 0 may be NaN, so a plain product would not do.
    weighted = jnp.where(weights != 0, values, 0.0) * weights
    return cls(weighted.sum(), weights.sum())

  def __add__(self, other: 'Mean') -> 'Mean':
    return Mean(self.total + other.total, self.weight + other.weight)

  def compute(self) -> jax.Array:
    """Returns the mean. With weight 0, the mean and its gradient are 0."""
    if not isinstance(self.weight, jax.Array):  # It is on the host.
      return self.total / (self.weight or np.inf)
    inf = jnp.full_like(self.weight, jnp.inf)
    return self.total / jax.lax.select(self.weight == 0, inf, self.weight)


Metrics = Mapping[str, Mean]


class MeanOfScalar(Mean):
  """A mean that was made of a scalar of a batch."""


jax.tree_util.register_dataclass(MeanOfScalar, ['total', 'weight'], [])


def add(a: Metrics, b: Metrics) -> dict[str, Mean]:
  """Adds two sets of metrics; raises KeyError if their names differ."""
  return {name: a[name] + b[name] for name in {**a, **b}}


def complete(metrics: Mapping[str, Any], weights: jax.Array) -> dict[str, Mean]:
  """Returns the metrics of a batch, with a `Mean` in place of each scalar.

  A scalar is assumed to be a mean that is weighted by the batch's `weights`.
  """
  found = dict(metrics)
  for name, x in found.items():
    if not isinstance(x, Mean):
      shape = () if isinstance(x, int | float) else getattr(x, 'shape', None)
      if shape != ():
        what = type(x).__name__ if shape is None else f'array {[*shape]}'
        raise TypeError(
          f'The metric {name!r} of loss_fn is of type {what}; expected'
          " metrics.Mean.of(values, batch['weights']), or a scalar."
        )
      found[name] = MeanOfScalar.of(x, jnp.sum(weights, dtype=jnp.float32))
  return found


def check_scalars(whole: Metrics, halves: Iterable[Metrics]) -> None:
  """Raises ValueError for a scalar that is not the mean over the halves.

  If no metric is a scalar, `halves` is not iterated.
  """
  names = [k for k, x in whole.items() if isinstance(x, MeanOfScalar)]
  if not names:
    return
  whole, *parts = jax.device_get([whole, *halves])
  for name in names:
    if not (given := [x[name] for x in parts if x[name].weight]):
      continue
    value, *values = [float(x.compute()) for x in (whole[name], *given)]
    mean = Mean(*(np.sum([jax.tree.leaves(x) for x in given], 0))).compute()
    # A scalar in bfloat16 has an error of 1 / 256.
    if abs(value - mean) > 0.01 * max(map(abs, [value, *values])):
      raise ValueError(
        f'The metric {name!r} of loss_fn is {value:.6g} in a batch of an'
        f' evaluation, and {values} in its halves; expected their weighted'
        f' mean, {mean:.6g}. Return metrics.Mean.of(values,'
        " batch['weights']), or compute the number in reduce_outputs."
      )


def compute(metrics: Metrics) -> dict[str, Any]:
  """Computes the means, by name."""
  return {name: metric.compute() for name, metric in metrics.items()}
