"""Builds the ordered list of actions that run after each training step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from ml_collections import config_dict

from jaxline import experiment as experiment_lib
from jaxline.metrics import console as console_lib
from jaxline.metrics import fingerprints
from jaxline.metrics import periodic
from jaxline.metrics import rates
from jaxline.metrics import writers
from jaxline.parallel import distributed
from jaxline.run_directory import logs
from jaxline.supervision import budget as budget_lib
from jaxline.supervision import nonfinite


def make_hooks(
  config: config_dict.ConfigDict,
  experiment: experiment_lib.FullExperiment,
  guard: nonfinite.Guard,
  budget: budget_lib.Budget,
  given: Sequence[periodic.Action],
  console: console_lib.Console,
  log: writers.MetricWriter,
  agreement: distributed.Agreement,
  save: Callable[[], None],
  *,
  is_logged: bool,
) -> list[periodic.Action]:
  """Returns the actions after each step, called as `hook(time, step, scalars)`.

  `train_and_eval` appends the evaluation. After it, `Training.run` appends a
  last hook, which ends the run on a signal, an error or a note.

  Args:
    config: the run's config.
    experiment: the experiment in training.
    guard: checks that losses and gradients are finite.
    budget: ends the run after `config.max_seconds`.
    given: the actions that the program added.
    console: shows the newest scalars.
    log: gets the scalars.
    agreement: makes all processes act at the same step at timed intervals.
    save: saves the series `latest`.
    is_logged: whether the program wants scalars to be written.
  """
  add_rates = rates.Rates(experiment)

  def finish(scalars: Mapping[str, Any]) -> dict[str, Any]:
    return add_rates(guard.without_flag(scalars))

  growth = config.periodic_action_growth_ratios
  # The guard comes first, so that no hook acts on a non-finite step.
  hooks: list[periodic.Action] = [guard]
  # The budget and the profiler time the steps, so they precede slower hooks.
  if config.max_seconds is not None:
    hooks.append(budget)
  if config.profile_steps and config.checkpoint_dir is not None:
    from jaxline.supervision import profiling  # Few runs need it.

    folder_of = logs.folders(config.checkpoint_dir)
    hooks.append(profiling.Profiler(config, folder_of, console.print))
  hooks += [*given, console_lib.ConsoleHook(console, config, log, finish)]
  if is_logged and (jax.process_index() == 0 or config.log_all_hosts):
    hooks.append(
      periodic.Every(
        lambda step, scalars: log.put('scalars', step, scalars, finish),
        config.logging_interval_type or config.interval_type,
        config.log_train_data_interval,
        logging_growth_ratios=growth,
        end_step_to_action=config.training_steps,
        log_all_data=config.log_all_train_data,
      )
    )
  # If there are several processes, all compute fingerprints, but one writes.
  is_kept = log.takes('fingerprints') or jax.process_count() > 1
  if config.fingerprint and is_kept:
    hooks.append(fingerprints.FingerprintHook(log, experiment))
  # Saving follows logging: a checkpoint waits for the records before it.
  if (config.save_checkpoint_interval or 0) > 0:
    hooks.append(
      SynchronizedEvery(
        agreement,
        'save',
        lambda *unused: save(),
        config.checkpoint_interval_type or config.interval_type,
        config.save_checkpoint_interval,
        logging_growth_ratios=growth,
      )
    )
  return hooks


class SynchronizedEvery(periodic.Every):
  """Runs at the same step in all processes, by the clock of process 0."""

  def __init__(
    self, agreement: distributed.Agreement, name: str, *args: Any, **kwargs: Any
  ):
    super().__init__(*args, **kwargs)
    self._agreement, self._name = agreement, name
    if not (agreement.is_alone or self._by_steps):
      self._quiet_secs = 0.0

  def _is_due(self, t: float, step: int) -> bool:
    is_due = super()._is_due(t, step)
    # Intervals in steps, or of 0 seconds (each step), need no agreement: only
    # clocks differ between processes.
    if self._by_steps or not self._interval:
      return is_due
    agreed = self._agreement.is_due(self._name, step, is_due)
    return agreed or step == self._end_step
