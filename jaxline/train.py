"""The loops: `train`, `evaluate`, and the two together in `train_and_eval`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import inspect
import math
import time
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
from ml_collections import config_dict
import numpy as np

from jaxline import base_config
from jaxline import debug
from jaxline import errors
from jaxline import experiment as experiment_lib
from jaxline import periodic
from jaxline import writers
from jaxline.checkpoint import base
from jaxline.checkpoint import files
from jaxline.compat import devices
from jaxline.supervision import nonfinite
from jaxline.supervision import preemption
from jaxline.supervision import watchdog

# How often evaluation looks for a new checkpoint, in seconds.
_POLL_SECS = 0.25

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


def construct(
  experiment_class: Any,
  mode: str,
  rng: jax.Array,
  config: config_dict.ConfigDict,
) -> experiment_lib.AbstractExperiment:
  """Constructs an experiment with `config.experiment_kwargs`.

  Args:
    experiment_class: a class or a partial of one. By name, and only then, its
      constructor gets `init_rng`, which old ones lack, and `run_config`, the
      config of the run.
    mode: the experiment's mode.
    rng: the key to initialise weights from.
    config: the run's.
  """
  # By name: a `**kwargs` of old may be handed on to what takes no init_rng.
  parameters = inspect.signature(experiment_class).parameters
  given = {'init_rng': rng, 'run_config': config}
  given = {name: x for name, x in given.items() if name in parameters}
  if 'init_rng' not in given:
    logging.warning(
      'Deprecated: %s takes no init_rng, so config.random_seed does not reach'
      ' its initial weights. Add `init_rng` to its constructor and initialise'
      ' from that.',
      getattr(experiment_class, '__name__', experiment_class),
    )
  return experiment_class(mode, **given, **config.experiment_kwargs)


# Keys that only an experiment with a sharded step reads.
_SHARDED_KEYS = (
  'mesh',
  'sharding',
  'sharding_rules',
  'gradient_accumulation_steps',
  'compiled_program',
)


def _build(
  experiment_class: Any,
  mode: str,
  rng: jax.Array,
  config: config_dict.ConfigDict,
) -> experiment_lib.AbstractExperiment:
  """Constructs the experiment of a run, which may read the run's config."""
  with base_config.building(config):
    experiment = construct(experiment_class, mode, rng, config)
  if not getattr(experiment, 'IS_SHARDED', False):
    defaults = base_config.get_base_config().to_dict()
    for key in _SHARDED_KEYS:
      if not base_config.has(config, key):
        continue
      value = config[key]
      if isinstance(value, config_dict.ConfigDict):
        value = value.to_dict()
      if value != defaults[key]:
        raise errors.UsageError(
          f'config.{key} is {value!r}, but'
          f' {type(experiment).__name__} has no sharded step, which alone reads'
          ' it. Leave it as it is in jaxline/base_config.py, or derive from'
          ' sharded.ShardedExperiment.'
        )
  return experiment


def build_for_compilation(
  experiment_class: Any, config: config_dict.ConfigDict
) -> experiment_lib.AbstractExperiment:
  """Constructs the experiment of a run as training would, with its seed."""
  _, init_rng = _seed_keys(config)
  return _build(experiment_class, 'train', init_rng, config)


def _seed_keys(config: config_dict.ConfigDict) -> tuple[jax.Array, jax.Array]:
  """Returns the step key and the init key of training."""
  rng = jax.random.PRNGKey(config.random_seed)
  if config.legacy_random_seed_behavior:
    return rng, rng
  step_rng, init_rng = jax.random.split(rng)
  return step_rng, init_rng


@dataclasses.dataclass(frozen=True)
class Supervision:
  """What looks after a run besides its loop; by default nothing does.

  Attributes:
    watch: hears that the run shall end, so that it saves and leaves.
    dog: hears from each step, and ends a run that hangs.
  """

  watch: preemption.Watch = dataclasses.field(default_factory=preemption.Watch)
  dog: watchdog.Watchdog = dataclasses.field(
    default_factory=lambda: watchdog.Watchdog(None)
  )


class _LatestSaver:
  """Saves the series `latest`, once a step, and what must be safe before it."""

  def __init__(
    self,
    config: config_dict.ConfigDict,
    checkpointer: base.Checkpointer,
    state: Any,
    guard: nonfinite.Guard,
  ):
    """Makes the saver.

    Args:
      config: the run's.
      checkpointer: a durable one gets a `before_commit`.
      state: the live state.
      guard: judges the steps up to the saved one.
    """
    self._checkpointer = checkpointer
    self._state = state
    self.guard = guard
    self._saved_step: int | None = None
    if base.is_durable(checkpointer):
      self._saved_step = checkpointer.restored_step  # It is there already.
    # Whether this host saves, and what it logs up to the saved step.
    self.saves = (
      (base.is_durable(checkpointer) and checkpointer.collective)
      or config.train_checkpoint_all_hosts
      or jax.process_index() == 0
    )
    self.actions: Sequence[Any] = ()
    self.writers: Sequence[Any] = ()

  def __call__(self, *unused: Any) -> None:
    del unused
    if self.saves and self._saved_step != self._state.global_step:
      self.guard.wait()  # What is not finite must not become a checkpoint.
      if base.is_durable(self._checkpointer):
        hooks = self._checkpointer.before_commit
        hooks['latest'] = self._flusher()
      self._checkpointer.save('latest')
      self._saved_step = self._state.global_step

  def _flusher(self) -> Callable[[], None]:
    """Returns what makes the logs safe up to the step that is saved.

    The steps up to it will not run again, and no other step logs them.
    """
    # Handed on now, on the thread that calls the actions; awaited later.
    waits = [
      action.hand_on() for action in self.actions if hasattr(action, 'hand_on')
    ]

    def flush() -> None:
      for wait in waits:
        wait()
      for writer in self.writers:
        if isinstance(writer, writers.MetricWriter):
          writer.flush()

    return flush


class _AfterStep:
  """The last of the periodic actions: says what else ends the run."""

  def __init__(
    self,
    supervision: Supervision,
    checkpointer: base.Checkpointer,
    leave: Callable[[], None],
  ):
    self._beat = supervision.dog.beat
    self._reached = supervision.watch.reached
    self._raise_error = getattr(checkpointer, 'raise_error', lambda: None)
    self._leave = leave

  def __call__(self, t: float, step: int, scalars: Any) -> None:
    self._beat()
    self._raise_error()  # A save has failed, such as on a full disk.
    if self._reached(step):
      self._leave()

  def update_time(self, t: float, step: int) -> None:
    """Has no clock."""

  def skip_time(self, seconds: float) -> None:
    """Has no clock."""

  def wait_to_finish(self) -> None:
    """Has nothing to wait for."""


@debug.disable_pmap_jit
def train(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: base.Checkpointer,
  writer: writers.Writer | None,
  periodic_actions: Sequence[periodic.PeriodicAction] = (),
  *,
  supervision: Supervision | None = None,
) -> None:
  """Trains, from the newest checkpoint of `latest` if there is one.

  Args:
    experiment_class: constructs the experiment: a class or a partial of one.
    config: the run's config, validated.
    checkpointer: saves and restores the series `latest`.
    writer: gets the scalars at `log_train_data_interval`; None logs none.
    periodic_actions: called after each step before the default ones.
    supervision: what else may end the run.

  Raises:
    preemption.Preempted: the run was told to end; all is saved.
    nonfinite.NonfiniteError: the loss or the gradients are not finite.
  """
  experiment, state = _start_training(experiment_class, config, checkpointer)
  _resume_writer(writer, config, checkpointer, state.global_step)
  guard = _make_guard(experiment, config, checkpointer)
  save = _LatestSaver(config, checkpointer, state, guard)
  save.writers = [writer]
  save.actions = [
    guard, *periodic_actions, *_default_actions(config, save, writer)
  ]  # fmt: skip
  _run_training(
    experiment, config, state, checkpointer, writer, save, supervision
  )
  if base.is_durable(checkpointer):
    checkpointer.mark_ended(state.global_step)


def _make_guard(
  experiment: experiment_lib.AbstractExperiment,
  config: config_dict.ConfigDict,
  checkpointer: base.Checkpointer,
) -> nonfinite.Guard:
  if not base_config.has(config, 'on_nonfinite'):
    return nonfinite.Guard(experiment, 'ignore', 1)
  warn = None
  if base.is_durable(checkpointer):

    def warn(step: int, names: list[str], text: str) -> None:
      # In the background: a save of a step before it may still be written.
      checkpointer.when_saved(lambda: keep_and_warn(step, names, text))

    def keep_and_warn(step: int, names: list[str], text: str) -> None:
      kept = checkpointer.keep_before(step, names)
      logging.warning(
        '%s %s',
        text,
        f'The newest checkpoint from before is not removed: {kept}.'
        if kept
        else 'There is no checkpoint from before.',
      )

  return nonfinite.Guard(
    experiment,
    config.on_nonfinite,
    config.max_nonfinite_steps,
    warn,
    # The newest step that the loop waits for anyway, right after the actions.
    max(1, experiment_lib.max_steps_in_flight(config) - 1),
  )


def _start_training(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: base.Checkpointer,
) -> tuple[experiment_lib.AbstractExperiment, Any]:
  """Constructs the experiment and fills, or restores, its state."""
  if base.is_durable(checkpointer) and checkpointer.collective:
    kind = config.checkpoint_interval_type or config.interval_type
    saves = (config.save_checkpoint_interval or 0) > 0
    if jax.process_count() > 1 and kind != 'steps' and saves:
      raise errors.UsageError(
        f'The {jax.process_count()} processes save together, but checkpoints go'
        f' by {kind!r} and their clocks differ. Set'
        " config.checkpoint_interval_type = 'steps'."
      )
  step_rng, init_rng = _seed_keys(config)
  with debug.log_activity('experiment init'):
    experiment = _build(experiment_class, 'train', init_rng, config)
  # Not before: the line that says what is wrong with it would be lost in it.
  logging.info('Training with config:\n%s', config)
  state = checkpointer.get_experiment_state('latest')
  state.global_step = 0
  state.experiment_module = experiment
  state.train_step_rng = experiment.initialize_train_step_rng(step_rng)
  if checkpointer.can_be_restored('latest'):
    with debug.log_activity('checkpoint restore'):
      checkpointer.restore('latest')
  if base.is_durable(checkpointer):
    checkpointer.mark_begun(int(state.global_step))
  return experiment, state


def _resume_writer(
  writer: writers.Writer | None,
  config: config_dict.ConfigDict,
  checkpointer: base.Checkpointer,
  step: int,
  is_evaluated: bool | None = None,
) -> None:
  """Voids what a killed process logged beyond the checkpoint; logs the config.

  Those steps run again, and log the same again.

  Args:
    writer: of training, or of evaluation.
    config: the run's.
    checkpointer: restored.
    step: that it goes on from.
    is_evaluated: None for training. For evaluation, whether the step itself is
      evaluated; if not, what was logged of it is void.
  """
  # Asked by all hosts, whether they log or not.
  is_new = not base.is_durable(checkpointer) or _is_new(checkpointer)
  if not isinstance(writer, writers.MetricWriter):
    return
  last = step - 1 if is_evaluated is False else step
  if is_new and not is_evaluated:
    last = -1
  if base.is_durable(checkpointer):
    with debug.log_activity('resuming the logs'):
      writer.resume(last)
  if last < 0:
    writer.write_texts(0, {'config': base_config.to_json(config)})


def _steps_evaluated(
  checkpointer: base.Checkpointer,
  writer: writers.Writer | None,
  until: float = math.inf,
) -> list[int]:
  """Returns the steps that earlier processes evaluated.

  Args:
    checkpointer: a durable one has noted them.
    writer: of evaluation; its log counts where that note is lost.
    until: the last step of the log that counts.
  """

  def logged() -> list[int]:
    if not isinstance(writer, writers.MetricWriter):
      return []
    return [step for step in writer.logged_steps() if step <= until]

  return checkpointer.evaluated(logged) if base.is_durable(checkpointer) else []


def _is_new(checkpointer: base.Checkpointer) -> bool:
  """Returns whether a run has no checkpoint of its own yet.

  One that begins from another run's checkpoint is new as well.
  """
  if base.is_durable(checkpointer):
    return checkpointer.next_step('latest', ()) is None
  return not checkpointer.can_be_restored('latest')


def _default_actions(
  config: config_dict.ConfigDict,
  save: _LatestSaver,
  writer: writers.Writer | None,
) -> list[periodic.PeriodicAction]:
  """Returns what every training does at intervals: log, write, save."""

  def log_outputs(step: int, scalars: Mapping[str, Any]) -> None:
    _log_outputs(step, save.guard.without_flag(scalars))

  actions = [
    periodic.PeriodicAction(
      log_outputs,
      interval_type=config.logging_interval_type or config.interval_type,
      interval=config.log_tensors_interval,
      logging_growth_ratios=config.periodic_action_growth_ratios,
      run_async=config.log_async,
    ),
  ]
  if writer is not None and (jax.process_index() == 0 or config.log_all_hosts):

    def write_scalars(step: int, scalars: Mapping[str, Any]) -> None:
      scalars = save.guard.without_flag(scalars)
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
  # After the writing, of which the checkpoint waits for what was before it.
  if save.saves and (config.save_checkpoint_interval or 0) > 0:
    actions.append(
      periodic.PeriodicAction(
        save,
        interval_type=config.checkpoint_interval_type or config.interval_type,
        interval=config.save_checkpoint_interval,
        logging_growth_ratios=config.periodic_action_growth_ratios,
        run_async=False,  # The next step donates what is being copied.
      )
    )
  return actions


def _run_training(
  experiment: experiment_lib.AbstractExperiment,
  config: config_dict.ConfigDict,
  state: Any,
  checkpointer: base.Checkpointer,
  writer: writers.Writer | None,
  save: _LatestSaver,
  supervision: Supervision | None,
) -> None:
  """Runs the loop, saves a last time, joins all that runs in the background."""
  supervision = supervision or Supervision()

  def finish() -> None:
    save()
    if save.saves:
      checkpointer.wait_for_checkpointing_to_finish()
    for action in save.actions:
      action.wait_to_finish()

  def leave() -> None:
    with debug.log_activity('last checkpoint, the run was told to end'):
      finish()
    supervision.watch.leave()

  after_step = _AfterStep(supervision, checkpointer, leave)
  actions = [*save.actions, after_step]
  for action in actions:
    action.update_time(time.time(), state.global_step)

  with supervision.watch.training():
    if (
      save.saves
      and config.save_initial_train_checkpoint
      and _is_new(checkpointer)
    ):
      with debug.log_activity('first checkpoint'):
        save()
    try:
      experiment.train_loop(config, state, actions, writer)
    except BaseException as error:
      save.actions = ()  # They hold the saver, which holds the weights.
      # What was due is still written; the loop's own error is what counts.
      for action in actions:
        try:
          action.wait_to_finish()
        except Exception as e:
          if e is not error:
            logging.exception('A periodic action failed as well.')
      raise
    with debug.log_activity('final checkpoint'):
      finish()
    save.actions = ()
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
    evaluated: Iterable[int] = (),
  ):
    self._experiment = experiment
    self._checkpointer = checkpointer
    self._writer = writer
    self._log_line = writers.LogLineWriter(mode='eval')
    self._metric = config.best_model_eval_metric
    self._higher_is_better = config.best_model_eval_metric_higher_is_better
    self._collective = base.is_durable(checkpointer) and checkpointer.collective
    self._inputs = experiment.evaluate_inputs(
      config, jax.random.PRNGKey(config.random_seed)
    )
    self._evaluate = debug.evaluate_should_return_dict(experiment.evaluate)
    self._evaluated = set(evaluated)
    self._best_state = None
    is_chief = jax.process_index() == 0
    keeps_best = self._metric and not getattr(checkpointer, 'reads_only', False)
    if keeps_best and (
      config.best_checkpoint_all_hosts or is_chief or self._collective
    ):
      state = checkpointer.get_experiment_state('best')
      worst = -math.inf if self._higher_is_better else math.inf
      state.best_eval_metric_value = worst
      state.best_model_eval_metric = self._metric
      self._best_state = state
      if base.is_durable(checkpointer):
        checkpointer.claim('best')  # Now, and not after a whole evaluation.
      if checkpointer.can_be_restored('best'):
        # For the best value so far, and which metric it is of; not the weights.
        with debug.log_activity('best checkpoint restore'):
          try:
            checkpointer.restore('best')
          except files.RefusedError:
            raise  # It is still there, and worth a look.
          except files.DamagedError as e:
            # The weights that count are those of `latest`.
            logging.error('The series best begins anew: %s', e)
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
    self._experiment.num_evaluated = sum(s < step for s in self._evaluated)
    self._evaluated.add(step)
    with debug.log_activity(f'evaluation of step {step}'):
      scalars = self._evaluate(
        global_step=global_step, rng=rng, writer=self._writer
      )
    experiment_lib.check_scalars(scalars, self._experiment, 'evaluate')
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
      raise errors.UsageError(
        f'config.best_model_eval_metric is {self._metric!r}, but evaluate'
        f' returned no number of that name. It returned {sorted(values)}.'
      )
    best = self._best_state
    assert best is not None
    value, old = float(values[self._metric]), best.best_eval_metric_value
    # Written so that a NaN is never better, and anything is better than one.
    if math.isnan(old):
      old = -math.inf if self._higher_is_better else math.inf
    is_better = value > old if self._higher_is_better else value < old
    if self._collective and jax.process_count() > 1:
      # They save together; of values that differ, the first host's counts.
      is_better, bits = multihost_utils.broadcast_one_to_all(
        # As bits, since JAX would make a float32 of it.
        (np.bool_(is_better), np.array([value], np.float64).view(np.uint32))
      )
      is_better, value = bool(is_better), float(bits.view(np.float64)[0])
    if is_better:
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
  *,
  supervision: Supervision | None = None,
) -> None:
  """Evaluates each new checkpoint of `latest`, until training has ended.

  With durable checkpoints each is evaluated once, in the order of its steps,
  also if evaluation itself is ended and started again.

  Args:
    experiment_class: constructs the experiment: a class or a partial of one.
    config: the run's config, validated.
    checkpointer: restores `latest`, keeps `best`.
    writer: gets each evaluation's scalars; None logs none.
    jaxline_mode: the experiment's `mode`; None is that of the command line.
    supervision: what else may end the run.

  Raises:
    ValueError: `one_off_evaluate` without a checkpoint or
      `eval_initial_weights`; `eval_steps` of which one has no checkpoint; or
      the best metric's name is not returned.
  """
  if (
    config.one_off_evaluate
    and not config.eval_initial_weights
    and not checkpointer.can_be_restored('latest')
  ):
    raise errors.UsageError(
      'config.one_off_evaluate is True but there is no checkpoint of'
      " 'latest' to evaluate. Train first, or set"
      ' config.eval_initial_weights = True to evaluate untrained weights.'
    )
  with debug.log_activity('experiment init'):
    experiment = _build(
      experiment_class,
      debug.settings.mode if jaxline_mode is None else jaxline_mode,
      jax.random.PRNGKey(config.random_seed),
      config,
    )
  logging.info('Evaluating with config:\n%s', config)
  done = _steps_evaluated(checkpointer, writer)
  evaluator = _Evaluator(experiment, config, checkpointer, writer, done)
  state = checkpointer.get_experiment_state('latest')
  state.global_step = 0
  state.experiment_module = experiment
  state.train_step_rng = None
  evaluated = _Evaluated(experiment, config, checkpointer, writer, done)

  def evaluate_checkpoint(step: int | None = None) -> None:
    with debug.log_activity('checkpoint restore'):
      _restore(checkpointer, step)
    evaluator(state)
    evaluated.add(int(state.global_step))

  has_steps = base_config.has(config, 'eval_steps')
  if has_steps and config.eval_steps is not None:
    for step in _listed_steps(config, checkpointer):
      evaluate_checkpoint(step)
    return
  if config.one_off_evaluate:
    if checkpointer.can_be_restored('latest'):
      evaluate_checkpoint()
    else:
      evaluator(state)
      checkpointer.wait_for_checkpointing_to_finish()
    return

  evaluated.resume()
  supervision = supervision or Supervision()
  initial_is_due = config.eval_initial_weights and evaluated.is_new(0)
  while True:
    supervision.dog.beat()
    if supervision.watch.reached(evaluated.last or 0):
      supervision.watch.leave()  # It was told while it could not be heard.
    # In this order: a checkpoint that came before the end is seen.
    ended = evaluated.is_over()
    if evaluated.is_next():
      try:
        _restore(checkpointer, evaluated.next_step)
      except ValueError:
        if evaluated.is_gone():
          continue  # Removed, or found damaged and reported, meanwhile.
        raise
      if evaluated.next_step is None and not evaluated.is_new(
        int(state.global_step)
      ):
        # It was saved between the last look and the last restore, which took
        # it already; or saved again.
        continue
    elif initial_is_due and not checkpointer.can_be_restored('latest'):
      pass
    elif ended:
      return
    else:
      logging.log_every_n_seconds(
        logging.INFO,
        'Waiting for a checkpoint after step %s in %s.',
        60,
        evaluated.last,
        config.checkpoint_dir,
      )
      time.sleep(_POLL_SECS)
      continue
    initial_is_due = False
    evaluator(state)
    evaluated.add(int(state.global_step))
    if evaluated.is_end(int(state.global_step)):
      return


def _restore(checkpointer: base.Checkpointer, step: int | None) -> None:
  if base.is_durable(checkpointer):
    checkpointer.restore('latest', step)
  else:
    checkpointer.restore('latest')


def _listed_steps(
  config: config_dict.ConfigDict, checkpointer: base.Checkpointer
) -> list[int]:
  """Returns the steps that `config.eval_steps` means."""
  if not base.is_durable(checkpointer):
    raise errors.UsageError(
      f'config.eval_steps is {config.eval_steps!r}, but only durable'
      " checkpoints have steps; set config.checkpointer = 'durable'."
    )
  kept = checkpointer.steps('latest')
  text = config.eval_steps
  steps = kept if text == 'all' else [int(s) for s in text.split(',')]
  if missing := sorted(set(steps) - set(kept)) or not steps:
    raise errors.UsageError(
      f'config.eval_steps is {config.eval_steps!r}, but there is no checkpoint'
      f' of {missing if steps else "any step"}; those kept are {kept}.'
    )
  return steps


class _Evaluated:
  """Knows what is evaluated, and what is next.

  Durable checkpoints are evaluated in the order of their steps, and noted; of
  others, only the newest can be had.
  """

  def __init__(
    self,
    experiment: experiment_lib.AbstractExperiment,
    config: config_dict.ConfigDict,
    checkpointer: base.Checkpointer,
    writer: writers.Writer | None,
    done: Iterable[int],
  ):
    self._experiment = experiment
    self._checkpointer = checkpointer
    self._config = config
    self._writer = writer
    self._durable = checkpointer if base.is_durable(checkpointer) else None
    self._done = set(done)
    self._path: Any = None
    self.next_step: int | None = None
    self.last: int | None = max(self._done, default=None)

  def resume(self) -> None:
    """Voids logs of an evaluation that did not finish."""
    if self._durable:
      # Before anything is logged: then a log without a note has lost it.
      self._durable.mark_evaluated()
    if isinstance(self._writer, writers.MetricWriter):
      if self._durable:
        self._writer.resume(-1 if self.last is None else self.last)
      if self.last is None:
        text = base_config.to_json(self._config)
        self._writer.write_texts(0, {'config': text})

  def is_next(self) -> bool:
    """Returns whether there is something to evaluate."""
    # Asked in any case: beside a training thread, this ends the evaluation.
    path = self._checkpointer.restore_path('latest')
    if self._durable:
      self.next_step = self._durable.next_step('latest', self._done)
      if self.next_step is not None:
        return True
      return self._durable.seed_step() not in {None, *self._done}
    if path in (None, self._path):
      return False
    self._path = path
    return self._checkpointer.can_be_restored('latest')

  def is_gone(self) -> bool:
    """Returns whether the next step's checkpoint is no longer there."""
    if self._durable is None:
      return False
    return self._durable.next_step('latest', self._done) != self.next_step

  def is_new(self, step: int) -> bool:
    """Returns whether a step is not evaluated yet."""
    return step not in self._done

  def is_over(self) -> bool:
    """Returns whether no further checkpoint will come."""
    if self._durable is None:
      return False
    # Either says so: a run that was ended early, or one that is not yet past
    # its end (which is where an evaluation that was started again finds it).
    return self._durable.ended() is not None or (
      self.last is not None and self._is_last(self.last)
    )

  def is_end(self, step: int) -> bool:
    """Returns whether a step that is evaluated was the last to be had."""
    return self._durable is None and self._is_last(step)

  def _is_last(self, step: int) -> bool:
    return not self._experiment.should_run_step(step, self._config)

  def add(self, step: int) -> None:
    """Notes an evaluation, once all that came of it is safe."""
    self._checkpointer.wait_for_checkpointing_to_finish()
    if self._durable:
      if isinstance(self._writer, writers.MetricWriter):
        self._writer.flush()
      self._durable.mark_evaluated(step)
    self._done.add(step)
    self.last = step


@debug.disable_pmap_jit
def train_and_eval(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: base.Checkpointer,
  writer: writers.Writer | None,
  eval_writer: writers.Writer | None,
  periodic_actions: Sequence[periodic.PeriodicAction] = (),
  *,
  supervision: Supervision | None = None,
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
    periodic_actions: called after each step before the default ones.
    supervision: what else may end the run.

  Raises:
    preemption.Preempted: the run was told to end; all is saved.
    nonfinite.NonfiniteError: the loss or the gradients are not finite.
  """
  interval_type = config.eval_interval_type or config.interval_type
  if jax.process_count() > 1 and interval_type != 'steps':
    raise errors.UsageError(
      f'train_and_eval on {jax.process_count()} processes evaluates by'
      f' {interval_type!r}, but their clocks differ and they must evaluate'
      " together. Set config.eval_interval_type = 'steps'."
    )
  trained, state = _start_training(experiment_class, config, checkpointer)
  _resume_writer(writer, config, checkpointer, state.global_step)
  evaluated = _build(
    experiment_class, 'eval', jax.random.PRNGKey(config.random_seed), config
  )
  done = _steps_evaluated(checkpointer, eval_writer, state.global_step)
  if done and base.is_durable(checkpointer):
    checkpointer.mark_evaluated()  # The note may have been lost.
  # Of an evaluation at this very step nothing counts unless all of it is safe.
  is_evaluated = state.global_step in done
  _resume_writer(
    eval_writer, config, checkpointer, state.global_step, is_evaluated
  )
  evaluator = _Evaluator(evaluated, config, checkpointer, eval_writer, done)
  guard = _make_guard(trained, config, checkpointer)
  last_evaluated = state.global_step if is_evaluated else None

  def evaluate_now(*unused: Any) -> None:
    nonlocal last_evaluated
    if last_evaluated == state.global_step:
      return
    began = time.time()
    guard.wait()  # What is not finite must not become the best.
    evaluated.share_state(trained)
    evaluator(state)
    step = last_evaluated = state.global_step
    if base.is_durable(checkpointer):
      checkpointer.when_saved(lambda: mark(step))
    for action in save.actions:
      if hasattr(action, 'skip_time'):  # Somebody's own may have no clock.
        action.skip_time(time.time() - began)

  def mark(step: int) -> None:
    if base.is_durable(checkpointer):
      if isinstance(eval_writer, writers.MetricWriter):
        eval_writer.flush()
      checkpointer.mark_evaluated(step)

  save = _LatestSaver(config, checkpointer, state, guard)
  save.writers = [writer, eval_writer]
  save.actions = [
    guard,
    *periodic_actions,
    *_default_actions(config, save, writer),
  ]
  interval = config.eval_interval
  if interval is not None and interval >= 0:
    evaluation = periodic.PeriodicAction(
      evaluate_now,
      interval_type=interval_type,
      interval=interval,
      run_async=False,  # Training waits: the next step donates the weights.
      end_step_to_action=config.training_steps,
    )
    # After the others: it moves the clock that they were called with.
    save.actions = [*save.actions, evaluation]
    # The run may have been ended between this step and its evaluation.
    if state.global_step and interval_type == 'steps':
      evaluation(time.time(), state.global_step, None)
    elif state.global_step:  # Whether it was due cannot be known.
      evaluate_now()
  if config.eval_initial_weights and state.global_step == 0:
    evaluate_now()
  _run_training(trained, config, state, checkpointer, writer, save, supervision)
  evaluate_now()
  checkpointer.wait_for_checkpointing_to_finish()
  if base.is_durable(checkpointer):
    checkpointer.mark_ended(state.global_step)
