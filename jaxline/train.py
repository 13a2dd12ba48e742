"""The loops: `train`, `evaluate`, and the two together in `train_and_eval`."""

from collections.abc import Mapping, Sequence
import inspect
import math
import time
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict

from jaxline import debug
from jaxline import devices
from jaxline import experiment as experiment_lib
from jaxline import periodic
from jaxline import writers
from jaxline.checkpoint import base

# How often evaluation looks for a new checkpoint, in seconds.
_POLL_SECS = 0.25

# For evaluate(jaxline_mode=None); platform.py makes it read the command line.
default_mode = lambda: 'eval'


_LOG_LINE = writers.LogLineWriter()


def _log_outputs(step: int, scalar_values: Mapping[str, Any]) -> None:
  """Logs one line; a periodic action, at `log_tensors_interval`."""
  _LOG_LINE.write_scalars(step, _add_rates(scalar_values))


# What a step may count, and is then logged per second too.
_COUNTS = ('tokens_per_step', 'examples_per_step')


def _add_rates(scalars: Mapping[str, Any]) -> dict[str, Any]:
  """Adds what goes with the time a step takes, where that is known."""
  rates = dict(scalars)
  if 'steps_per_sec' in scalars:
    counts = {k: scalars[k] for k in _COUNTS if k in scalars}
    for name, count in writers.to_scalars(counts).items():
      rate = count * scalars['steps_per_sec']
      rates[name.replace('_per_step', '_per_sec')] = rate
  return rates


def _initialize_experiment(
  experiment_class: Any,
  mode: str,
  rng: jax.Array,
  experiment_kwargs: Mapping[str, Any],
) -> experiment_lib.AbstractExperiment:
  """Constructs an experiment; old ones take no `init_rng`."""
  # By name: a `**kwargs` of old may be handed on to what takes no init_rng.
  if 'init_rng' in inspect.signature(experiment_class).parameters:
    return experiment_class(mode, init_rng=rng, **experiment_kwargs)
  logging.warning(
    'Deprecated: %s takes no init_rng, so config.random_seed does not reach its'
    ' initial weights. Add `init_rng` to its constructor and initialise from'
    ' that.',
    getattr(experiment_class, '__name__', experiment_class),
  )
  return experiment_class(mode, **experiment_kwargs)


def _seed_keys(config: config_dict.ConfigDict) -> tuple[jax.Array, jax.Array]:
  """Returns the step key and the init key of training."""
  rng = jax.random.PRNGKey(config.random_seed)
  if config.legacy_random_seed_behavior:
    return rng, rng
  step_rng, init_rng = jax.random.split(rng)
  return step_rng, init_rng


class _LatestSaver:
  """Saves the series `latest`, once a step."""

  def __init__(self, checkpointer: base.Checkpointer, state: Any):
    self._checkpointer = checkpointer
    self._state = state
    self._saved_step: int | None = None

  def __call__(self, *unused: Any) -> None:
    del unused
    if self._saved_step != self._state.global_step:
      self._checkpointer.save('latest')
      self._saved_step = self._state.global_step


def _is_off(interval: float | None) -> bool:
  return interval is None or interval < 0


@debug.disable_pmap_jit
def train(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: base.Checkpointer,
  writer: writers.Writer | None,
  periodic_actions: Sequence[periodic.PeriodicAction] = (),
) -> None:
  """Trains, from the newest checkpoint of `latest` if there is one.

  Args:
    experiment_class: constructs the experiment: a class or a partial of one.
    config: the run's config, validated.
    checkpointer: saves and restores the series `latest`.
    writer: gets the scalars at `log_train_data_interval`; None logs none.
    periodic_actions: called after each step before the default ones.
  """
  logging.info('Training with config:\n%s', config)
  experiment, state = _start_training(experiment_class, config, checkpointer)
  save = _LatestSaver(checkpointer, state)
  actions = [*periodic_actions, *_default_actions(config, save, writer)]
  _run_training(experiment, config, state, checkpointer, writer, actions, save)


def _start_training(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: base.Checkpointer,
) -> tuple[experiment_lib.AbstractExperiment, Any]:
  """Constructs the experiment and fills, or restores, its state."""
  step_rng, init_rng = _seed_keys(config)
  with debug.log_activity('experiment init'):
    experiment = _initialize_experiment(
      experiment_class, 'train', init_rng, config.experiment_kwargs
    )
  state = checkpointer.get_experiment_state('latest')
  state.global_step = 0
  state.experiment_module = experiment
  state.train_step_rng = experiment.initialize_train_step_rng(step_rng)
  if checkpointer.can_be_restored('latest'):
    with debug.log_activity('checkpoint restore'):
      checkpointer.restore('latest')
  return experiment, state


def _saves_latest(config: config_dict.ConfigDict) -> bool:
  return config.train_checkpoint_all_hosts or jax.process_index() == 0


def _default_actions(
  config: config_dict.ConfigDict,
  save: _LatestSaver,
  writer: writers.Writer | None,
) -> list[periodic.PeriodicAction]:
  """Returns what every training does at intervals: log, save, write."""
  actions = [
    periodic.PeriodicAction(
      _log_outputs,
      interval_type=config.logging_interval_type or config.interval_type,
      interval=config.log_tensors_interval,
      logging_growth_ratios=config.periodic_action_growth_ratios,
      run_async=config.log_async,
    ),
  ]
  if _saves_latest(config) and (config.save_checkpoint_interval or 0) > 0:
    actions.append(
      periodic.PeriodicAction(
        save,
        interval_type=config.checkpoint_interval_type or config.interval_type,
        interval=config.save_checkpoint_interval,
        logging_growth_ratios=config.periodic_action_growth_ratios,
        run_async=False,  # The next step donates what is being copied.
      )
    )
  if writer is not None and (jax.process_index() == 0 or config.log_all_hosts):

    def write_scalars(step: int, scalars: Mapping[str, Any]) -> None:
      writer.write_scalars(step, _add_rates(scalars))

    actions.append(
      periodic.PeriodicAction(
        write_scalars,
        interval_type=config.logging_interval_type or config.interval_type,
        interval=config.log_train_data_interval,
        logging_growth_ratios=config.periodic_action_growth_ratios,
        log_all_data=config.log_all_train_data,
        end_step_to_action=config.training_steps,
      )
    )
  return actions


def _run_training(
  experiment: experiment_lib.AbstractExperiment,
  config: config_dict.ConfigDict,
  state: Any,
  checkpointer: base.Checkpointer,
  writer: writers.Writer | None,
  actions: Sequence[periodic.PeriodicAction],
  save: _LatestSaver,
) -> None:
  """Runs the loop, saves a last time, joins all that runs in the background."""
  saves = _saves_latest(config)
  for action in actions:
    action.update_time(time.time(), state.global_step)

  if (
    saves
    and config.save_initial_train_checkpoint
    and not checkpointer.can_be_restored('latest')
  ):
    with debug.log_activity('first checkpoint'):
      save()

  try:
    experiment.train_loop(config, state, actions, writer)
  except BaseException as error:
    # What was due is still written; the loop's own error is what counts.
    for action in actions:
      try:
        action.wait_to_finish()
      except Exception as e:
        if e is not error:
          logging.exception('A periodic action failed as well.')
    raise
  if saves:
    with debug.log_activity('final checkpoint'):
      save()
      checkpointer.wait_for_checkpointing_to_finish()
  for action in actions:
    action.wait_to_finish()
  # No host leaves before the chief has saved: the others' exit would end it.
  devices.rendezvous()


class _Evaluator:
  """Evaluates an experiment and keeps the series `best`."""

  def __init__(
    self,
    experiment: experiment_lib.AbstractExperiment,
    config: config_dict.ConfigDict,
    checkpointer: base.Checkpointer,
    writer: writers.Writer | None,
  ):
    self._experiment = experiment
    self._checkpointer = checkpointer
    self._writer = writer
    self._log_line = writers.LogLineWriter(mode='eval')
    self._metric = config.best_model_eval_metric
    self._higher_is_better = config.best_model_eval_metric_higher_is_better
    self._inputs = experiment.evaluate_inputs(
      config, jax.random.PRNGKey(config.random_seed)
    )
    self._evaluate = debug.evaluate_should_return_dict(experiment.evaluate)
    self._best_state = None
    is_chief = jax.process_index() == 0
    if self._metric and (config.best_checkpoint_all_hosts or is_chief):
      state = checkpointer.get_experiment_state('best')
      worst = -math.inf if self._higher_is_better else math.inf
      state.best_eval_metric_value = worst
      state.best_model_eval_metric = self._metric
      state.experiment_module = experiment
      self._best_state = state
      if checkpointer.can_be_restored('best'):
        # For the best value so far; it also says which metric it is of.
        with debug.log_activity('best checkpoint restore'):
          checkpointer.restore('best')
        if state.best_model_eval_metric != self._metric:
          logging.warning(
            'The series best was kept for %r; it starts anew for %r.',
            state.best_model_eval_metric,
            self._metric,
          )
          state.best_model_eval_metric = self._metric
          state.best_eval_metric_value = worst

  def __call__(self, state: Any) -> Mapping[str, Any]:
    """Evaluates the experiment's weights, those of `state.global_step`."""
    step = int(state.global_step)
    global_step, rng = self._inputs(step)
    with debug.log_activity(f'evaluation of step {step}'):
      scalars = self._evaluate(
        global_step=global_step, rng=rng, writer=self._writer
      )
    assert scalars is not None
    if self._writer is not None:
      self._writer.write_scalars(step, scalars)
    self._log_line.write_scalars(step, scalars)
    if self._best_state is not None:
      self._keep_best(step, scalars, state.train_step_rng)
    return scalars

  def _keep_best(
    self, step: int, scalars: Mapping[str, Any], train_step_rng: Any
  ) -> None:
    values = writers.to_scalars(scalars)
    if self._metric not in values:
      raise ValueError(
        f'config.best_model_eval_metric is {self._metric!r}, but evaluate'
        f' returned no number of that name. It returned {sorted(values)}.'
      )
    best = self._best_state
    assert best is not None
    value, old = float(values[self._metric]), best.best_eval_metric_value
    # Written so that a NaN is never better.
    if value > old if self._higher_is_better else value < old:
      logging.info(
        'New best %s: %s at step %d (was %s).', self._metric, value, step, old
      )
      best.global_step = step
      best.experiment_module = self._experiment
      best.best_eval_metric_value = value
      best.train_step_rng = train_step_rng
      self._experiment.on_new_best_model(best)
      self._checkpointer.save('best')


@debug.disable_pmap_jit
def evaluate(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: base.Checkpointer,
  writer: writers.Writer | None,
  jaxline_mode: str | None = None,
) -> None:
  """Evaluates each new checkpoint of `latest`, until training has ended.

  Args:
    experiment_class: constructs the experiment: a class or a partial of one.
    config: the run's config, validated.
    checkpointer: restores `latest`, keeps `best`.
    writer: gets each evaluation's scalars; None logs none.
    jaxline_mode: the experiment's `mode`; None is that of the command line.

  Raises:
    ValueError: `one_off_evaluate` without a checkpoint or
      `eval_initial_weights`; or the best metric's name is not returned.
  """
  logging.info('Evaluating with config:\n%s', config)
  with debug.log_activity('experiment init'):
    experiment = _initialize_experiment(
      experiment_class,
      default_mode() if jaxline_mode is None else jaxline_mode,
      jax.random.PRNGKey(config.random_seed),
      config.experiment_kwargs,
    )
  evaluator = _Evaluator(experiment, config, checkpointer, writer)
  state = checkpointer.get_experiment_state('latest')
  state.global_step = 0
  state.experiment_module = experiment
  state.train_step_rng = None

  if config.one_off_evaluate:
    if checkpointer.can_be_restored('latest'):
      with debug.log_activity('checkpoint restore'):
        checkpointer.restore('latest')
    elif not config.eval_initial_weights:
      raise ValueError(
        'config.one_off_evaluate is True but there is no checkpoint of'
        " 'latest' to evaluate. Train first, or set"
        ' config.eval_initial_weights = True to evaluate untrained weights.'
      )
    evaluator(state)
    checkpointer.wait_for_checkpointing_to_finish()
    return

  evaluated = evaluated_step = None
  initial_is_due = config.eval_initial_weights
  while True:
    path = checkpointer.restore_path('latest')
    if path is None and initial_is_due:
      initial_is_due = False
    elif path in (None, evaluated) or not checkpointer.can_be_restored(
      'latest'
    ):
      logging.log_every_n_seconds(
        logging.INFO, 'Waiting for a checkpoint after %s.', 60, evaluated
      )
      time.sleep(_POLL_SECS)
      continue
    else:
      checkpointer.restore('latest')
      evaluated = path
      if state.global_step == evaluated_step:
        # It was saved between the last look and the last restore, which took
        # it already; or saved again.
        continue
      evaluated_step = state.global_step
    evaluator(state)
    if not experiment.should_run_step(state.global_step, config):
      logging.info('Step %d was the last, evaluation ends.', state.global_step)
      checkpointer.wait_for_checkpointing_to_finish()
      return


@debug.disable_pmap_jit
def train_and_eval(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: base.Checkpointer,
  writer: writers.Writer | None,
  eval_writer: writers.Writer | None,
) -> None:
  """Trains, pausing every `eval_interval` to evaluate the current weights.

  One thread: two experiments, constructed with the modes 'train' and 'eval',
  share the live state, which is not copied (see
  `AbstractExperiment.share_state`). Also evaluates after the last step.

  Args:
    experiment_class: constructs the experiments: a class or a partial of one.
    config: the run's config, validated.
    checkpointer: saves and restores `latest`, keeps `best`.
    writer: gets the scalars of training.
    eval_writer: gets the scalars of evaluation.
  """
  interval_type = config.eval_interval_type or config.interval_type
  if jax.process_count() > 1 and interval_type != 'steps':
    raise ValueError(
      f'train_and_eval on {jax.process_count()} processes evaluates by'
      f' {interval_type!r}, but their clocks differ and they must evaluate'
      " together. Set config.eval_interval_type = 'steps'."
    )
  logging.info('Training and evaluating with config:\n%s', config)
  trained, state = _start_training(experiment_class, config, checkpointer)
  evaluated = _initialize_experiment(
    experiment_class,
    'eval',
    jax.random.PRNGKey(config.random_seed),
    config.experiment_kwargs,
  )
  evaluator = _Evaluator(evaluated, config, checkpointer, eval_writer)
  last_evaluated = None

  def evaluate_now(*unused: Any) -> None:
    nonlocal last_evaluated
    if last_evaluated == state.global_step:
      return
    began = time.time()
    evaluated.share_state(trained)
    evaluator(state)
    last_evaluated = state.global_step
    for action in actions:
      action.skip_time(time.time() - began)

  save = _LatestSaver(checkpointer, state)
  actions = _default_actions(config, save, writer)
  if not _is_off(config.eval_interval):
    # After the others: it moves the clock that they were called with.
    actions.append(
      periodic.PeriodicAction(
        evaluate_now,
        interval_type=interval_type,
        interval=config.eval_interval,
        run_async=False,  # Training waits: the next step donates the weights.
        end_step_to_action=config.training_steps,
      )
    )
  if config.eval_initial_weights and state.global_step == 0:
    evaluate_now()
  _run_training(trained, config, state, checkpointer, writer, actions, save)
  evaluate_now()
  checkpointer.wait_for_checkpointing_to_finish()
