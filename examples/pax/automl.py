"""Sweeps: training an experiment with several values of its constants.

    @automl.parameter_sweep([('LEARNING_RATE', (1e-3, 3e-3)), ('SEED', (1, 2))])
    @experiment_registry.register
    class Mine(c4.C4Spmd1BAdam4Replicas):
      ...

registers the combinations as separate experiments, `Mine.0` to `Mine.3`.
`python -m examples.pax.main --exp=Mine --mode=sweep --job_log_dir=DIR` trains
them one after the other with the library's `runs sweep`. With `--index=N`, such
as `$SLURM_ARRAY_TASK_ID`, it trains only one. With
`--config.best_model_eval_metric=NAME` it reports the best one.

Pax's AutoML searches. This module runs all combinations.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from examples.pax import config as config_lib
from examples.pax import experiment_registry
from jaxline import errors
from jaxline.runs import sweep

Experiment = experiment_registry.Experiment


def parameter_sweep(
  axes: Sequence[tuple[str, Sequence[Any]]],
) -> Callable[[Experiment], Experiment]:
  """Registers an experiment with each combination of constants; a decorator.

  `axes` are pairs of a constant and its values, numbers or words.
  """

  def register(experiment: Experiment) -> Experiment:
    experiment.check_constants(name for name, _ in axes)
    experiment.sweep_axes = dict(axes)
    for number, point in enumerate(sweep.points(experiment.sweep_axes)):
      experiment_registry.register(_point(experiment, number, point))
    return experiment

  return register


def _point(
  experiment: Experiment, number: int, values: Mapping[str, Any]
) -> Experiment:
  """Returns the experiment of one combination, with the name `NAME.number`."""
  point = experiment.with_constants(values)
  point.__qualname__ = f'{experiment.__qualname__}.{number}'
  # The values of the sweep override those of the reduced version.
  small = lambda cls: experiment.reduced().with_constants(values)
  point.reduced = classmethod(small)  # type: ignore[method-assign, assignment]
  return point


def flags(experiment: Experiment) -> list[str]:
  """Returns the flags of `runs sweep` for the axes of an experiment."""
  if not (axes := experiment.sweep_axes):
    raise errors.UsageError(
      f'{experiment.__name__} has no sweep axes. Decorate the class with'
      ' @automl.parameter_sweep.'
    )
  keys = {name: config_lib.key_of(experiment, name) for name in axes}
  return [
    f'--sweep.{keys[name]}={",".join(map(str, values))}'
    for name, values in axes.items()
  ]
