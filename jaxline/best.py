"""Keeps the checkpoint with the best metric: the series `best`."""

from collections.abc import Mapping
import math
from typing import Any

from absl import logging

from jaxline import debug
from jaxline import distributed
from jaxline import errors
from jaxline import goodput
from jaxline.checkpoint import base
from jaxline.checkpoint import store as store_lib
from jaxline.metrics import writers


class Best:
  """The series `best`, which `evaluate` and `train_and_eval` save."""

  def __init__(self, config: Any, checkpointer: base.FullCheckpointer):
    """Restores the best value so far, but not its weights.

    Args:
      config: the run's; `best_model_eval_metric` is set.
      checkpointer: saves the series.
    """
    self._checkpointer, self._metric = (
      checkpointer,
      config.best_model_eval_metric,
    )
    self._sign = 1 if config.best_model_eval_metric_higher_is_better else -1
    state = self._state = checkpointer.get_experiment_state('best')
    worst = -self._sign * math.inf
    state.best_model_eval_metric = self._metric
    state.best_eval_metric_value = worst
    # Now, so that a conflict is reported before the first evaluation.
    checkpointer.claim('best')
    if checkpointer.can_be_restored('best'):
      try:
        with debug.log_activity('checkpoint restore', category='restore'):
          checkpointer.restore('best')
      except store_lib.DamagedError as e:
        # The weights that count are those of `latest`.
        logging.error('The series best begins anew: %s', e)
    if (old := state.best_model_eval_metric) != self._metric:
      logging.warning(
        'The series best was of %r; now it is of %r.', old, self._metric
      )
      state.best_model_eval_metric = self._metric
      state.best_eval_metric_value = worst

  @property
  def value(self) -> float:
    """The best value so far; an infinity without one."""
    return float(self._state.best_eval_metric_value)

  def keep(
    self,
    experiment: Any,
    scalars: Mapping[str, Any],
    step: int,
    train_step_rng: Any,
  ) -> bool:
    """Saves an experiment if its metric is strictly better than ever.

    Args:
      experiment: the experiment that was evaluated.
      scalars: the metrics of its evaluation.
      step: the step of its weights.
      train_step_rng: the state key of that step.

    Returns:
      Whether it was better.
    """
    state = self._state
    value = metric_of(
      'best_model_eval_metric', self._metric, scalars, self._checkpointer
    )
    if not self._sign * value > self._sign * self.value:  # A NaN is not better.
      return False
    state.global_step = step
    state.experiment_module = experiment
    state.best_eval_metric_value = value
    state.train_step_rng = train_step_rng
    experiment.on_new_best_model(state)
    with goodput.measure('checkpoints'):
      self._checkpointer.save('best')
    return True


def metric_of(
  key: str,
  metric: str,
  scalars: Mapping[str, Any],
  checkpointer: base.FullCheckpointer,
) -> float:
  """Returns a metric; process 0's, if the processes save together.

  Args:
    key: the config key that names the metric.
    metric: the name of the metric.
    scalars: what `evaluate` returned.
    checkpointer: the run's.

  Raises:
    UsageError: there is no number of that name.
  """
  values = writers.to_scalars(scalars)
  if metric not in values:
    raise errors.UsageError(
      f'config.{key} is {metric!r}, but evaluate returned no number of that'
      f' name. It returned {sorted(values)}.'
      f'{errors.did_you_mean(metric, values)}'
    )
  value = float(values[metric])
  return distributed.of_chief(value) if checkpointer.collective else value
