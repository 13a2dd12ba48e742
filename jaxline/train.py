"""The loops, which are methods of a `Run`: train, evaluate, or both.

The functions at the end have JAXline's signatures; each makes a `Run` and calls
its method of the same name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import json
import math
import threading
import time
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict
import numpy as np

from jaxline import async_lib
from jaxline import base_config
from jaxline import debug
from jaxline import distributed
from jaxline import errors
from jaxline import experiment as experiment_lib
from jaxline import goodput
from jaxline.checkpoint import base
from jaxline.checkpoint import memory
from jaxline.checkpoint import notes
from jaxline.checkpoint import store as store_lib
from jaxline.compat import adapters
from jaxline.compat import devices
from jaxline.compat import lazy
from jaxline.compat import prng
from jaxline.metrics import console as console_lib
from jaxline.metrics import fingerprints
from jaxline.metrics import periodic
from jaxline.metrics import rates
from jaxline.metrics import writers
from jaxline.supervision import budget
from jaxline.supervision import nonfinite
from jaxline.supervision import out_of_memory as oom
from jaxline.supervision import preemption
from jaxline.supervision import profiling
from jaxline.supervision import watchdog

lazy.complete(__name__)

# How often evaluation looks for a new checkpoint, in seconds.
_POLL_SECS = 0.25


@dataclasses.dataclass
class Run:
  """A run: the experiment class, the config and everything the loops use.

  What follows JAXline's looser contract is adapted when a `Run` is made.

  Attributes:
    experiment_class: constructs the experiment: a class or a partial of one.
    config: the run's config, validated.
    checkpointer: saves and restores the series `latest`, keeps `best`; None
      keeps them in the memory of this process.
    writer: gets the scalars of training, and is passed to each step; None
      writes nothing.
    eval_writer: gets the scalars of evaluation, and is passed to `evaluate`.
    periodic_actions: called after each step, before the default ones.
    eval_mode: the mode of the experiment that is evaluated.
    eval_checkpointer: for the evaluation in `compat.threads`.
    console: what the terminal shows; None logs a line at an interval.
    watch: told by a signal to end the run, which then saves and leaves.
    trained: for an evaluation beside a training: set once training has made
      its last checkpoint. None where training is somewhere else.
    stop: what ended the run before its last step; None if nothing did.
  """

  experiment_class: Any
  config: config_dict.ConfigDict
  checkpointer: Any = None
  writer: Any = None
  eval_writer: Any = None
  periodic_actions: Sequence[Any] = ()
  eval_mode: str = 'eval'
  eval_checkpointer: Any = None
  console: Any = None
  watch: preemption.Watch = dataclasses.field(default_factory=preemption.Watch)
  trained: threading.Event | None = None
  stop: errors.StopTraining | None = None

  def __post_init__(self) -> None:
    self.config = base_config.complete_config(self.config)
    if self.checkpointer is None:
      self.checkpointer = memory.InMemoryCheckpointer(self.config, 'train')
    self.checkpointer = adapters.full_checkpointer(self.checkpointer)
    self.console = self.console or console_lib.Console()
    # With all methods, for the loops and for experiments.
    self.log = adapters.full_writer(self.writer)
    self.eval_log = adapters.full_writer(self.eval_writer)

  def saves_here(self, all_hosts: bool) -> bool:
    """Returns whether this host saves, if `all_hosts` or only the first do."""
    collective = self.checkpointer.collective
    return collective or all_hosts or jax.process_index() == 0

  @contextlib.contextmanager
  def stoppable(self) -> Iterator[None]:
    """Catches StopTraining, and keeps it as the reason of the end."""
    try:
      yield
    except errors.StopTraining as e:
      self.stop = self.stop or e.with_traceback(None)
      self.console.stopped = str(self.stop)

  def mark_ended(self, step: int) -> None:
    """Notes that training has ended, and the experiment's reason if any."""
    # Early stopping decides anew at the next start, perhaps by another config.
    why = str(self.stop) if self.stop and not self.stop.is_noted else ''
    self.checkpointer.mark_ended(step, why)

  def check(self, step: int, finish: Callable[[], None] | None = None) -> None:
    """Ends the loop if a signal asks for it; called after each step.

    Args:
      step: the number of steps done.
      finish: called before the run leaves.

    Raises:
      preemption.Preempted: the run was told to end by a signal.
    """
    if self.trained is None:  # Else it would hide a hang of the training.
      watchdog.give_sign_of_life()
    if self.watch.reached(step):
      if finish is not None:
        finish()
      self.watch.leave()

  @debug.disable_pmap_jit
  def train(self) -> experiment_lib.AbstractExperiment:
    """Trains, and returns the experiment: see the function `train`."""
    training = Training(self)
    state, experiment = training.state, training.experiment
    try:
      training.run_loop()
    except preemption.Preempted as e:
      if not self.stop and experiment.should_run_step(
        state.global_step, self.config
      ):
        raise
      # The signal came too late to stop the training; all is saved.
      self.mark_ended(state.global_step)
      if self.eval_checkpointer is None:  # Else an evaluation may be left.
        e.is_over = True
        e.add_note('The run has ended.')
        e.code = 0 if e.code == preemption.EXIT_CODE else e.code
      raise
    self.mark_ended(state.global_step)
    return experiment

  @debug.disable_pmap_jit
  def evaluate(self) -> None:
    """Evaluates checkpoints: see the function `evaluate`."""
    config, checkpointer = self.config, self.checkpointer
    checkpointer.restrict(follows=True)
    if config.one_off_evaluate and not (
      config.eval_initial_weights or checkpointer.can_be_restored('latest')
    ):
      raise errors.UsageError(
        'config.one_off_evaluate is True but there is no checkpoint of'
        f" 'latest' to evaluate in {config.checkpoint_dir}. Train first, or set"
        ' config.eval_initial_weights = True to evaluate untrained weights.'
      )
    steps = _listed_steps(config, checkpointer)
    evaluation = _Evaluation(self)
    logging.info('Evaluating with config:\n%s', config)
    if self.trained is None:  # Else the training says it.
      self.console.begin(config, evaluation.experiment)
    state = base.new_state(checkpointer, evaluation.experiment)
    with self.stoppable():
      for counts in self._restored(evaluation, steps):
        evaluation(state, counts)
        evaluation.wait()
    if self.stop and not (steps or config.one_off_evaluate):
      self.mark_ended(state.global_step)  # Training reads it at a save.

  def _restored(
    self, evaluation: '_Evaluation', steps: list[int]
  ) -> Iterator[bool]:
    """Restores each state to evaluate; yields whether its evaluation counts."""
    config, checkpointer = self.config, self.checkpointer
    for step in steps:
      _restore(checkpointer, step)
      yield True
    if steps:
      return
    if config.one_off_evaluate:
      if has_checkpoint := checkpointer.can_be_restored('latest'):
        _restore(checkpointer)
      yield has_checkpoint
      return
    lengths = evaluation.noted[-1].lengths if evaluation.noted else {}
    _resume_log(self, self.eval_log, evaluation.last, lengths)
    initial_is_due = (
      config.eval_initial_weights
      and 0 not in evaluation.done
      # A checkpoint will hold the weights that the run begins with.
      and (evaluation.starts_as_run or not config.save_initial_train_checkpoint)
      and not config.restore_from  # `run_loop` saves one.
    )
    restore_next = checkpointer.follow('latest')
    is_over = False
    while not is_over:
      self.check(evaluation.last or 0)
      # Read before `restore_next`, so that a checkpoint saved just before the
      # end is still evaluated.
      is_over = self._is_over(evaluation)
      is_restored = restore_next(evaluation.done)
      if is_restored or (
        initial_is_due and not checkpointer.can_be_restored('latest')
      ):
        initial_is_due = False
        yield is_restored or evaluation.starts_as_run
        # In JAXline the last step ends it, and nothing later is looked at.
        is_over = not checkpointer.is_resumable and evaluation.is_of_last_step()
      elif not is_over:
        self.console.log_waiting(evaluation.last, config.checkpoint_dir)
        with goodput.measure('waiting'):
          time.sleep(_POLL_SECS)

  def _is_over(self, evaluation: '_Evaluation') -> bool:
    """Returns whether training will make no further checkpoint."""
    if self.trained is not None:
      return self.trained.is_set()
    # Without the note of its end, training was killed before it wrote it, or a
    # training that restarts has removed it.
    return self.checkpointer.ended() is not None or evaluation.is_of_last_step()

  @debug.disable_pmap_jit
  def train_and_eval(self) -> experiment_lib.AbstractExperiment:
    """Trains, pausing every `eval_interval` to evaluate the current weights.

    One thread: two experiments, constructed with the modes 'train' and 'eval',
    share the live state, which is not copied (see
    `AbstractExperiment.share_state`). Also evaluates after the last step.

    Returns:
      The experiment that was trained.
    """
    config, checkpointer = self.config, self.checkpointer
    interval_type = config.eval_interval_type or config.interval_type
    training = Training(self)
    state = training.state
    evaluation = _Evaluation(self, until=state.global_step)
    # Records of the restored step itself are dropped unless its evaluation is
    # noted as complete.
    last: int | None = state.global_step
    lengths: Mapping[str, int] = {}
    if last in evaluation.done:
      lengths = evaluation.noted[-1].lengths
    elif last and not checkpointer.is_new():
      last, lengths = last - 1, checkpointer.lengths
    else:
      last = None
    _resume_log(self, self.eval_log, last, lengths)

    def evaluate_now(*unused: Any) -> None:
      if state.global_step in evaluation.done:
        return
      began = time.time()
      training.guard.wait()  # A state that is not finite must not be the best.
      evaluation.experiment.share_state(training.experiment)
      evaluation(state)
      for action in training.actions:
        action.skip_time(time.time() - began)
      notes.stop_without_gain(config, evaluation.noted)

    interval = config.eval_interval
    with self.stoppable():
      if interval is not None and interval >= 0:
        action = _Together(
          training.agreement,
          'evaluation',
          evaluate_now,
          interval_type,
          interval,
          end_step_to_action=config.training_steps,
        )
        # The last action, because it shifts the clocks of the others.
        training.actions.append(action)
        # The run may have been ended between this step and its evaluation.
        if state.global_step and interval_type == 'steps':
          action(time.time(), state.global_step, None)
        elif state.global_step:  # By seconds: one may have been due.
          evaluate_now()
      is_first = state.global_step == 0 or checkpointer.is_new()
      if config.eval_initial_weights and is_first:
        evaluate_now()
    training.run_loop()
    with self.stoppable():
      evaluate_now()
    evaluation.wait()
    self.mark_ended(state.global_step)
    return training.experiment


# What the loops share.


class _Together(periodic.Every):
  """Is due at the same step in all processes, by the clock of the first."""

  def __init__(
    self, agreement: distributed.Agreement, name: str, *args: Any, **kwargs: Any
  ):
    super().__init__(*args, **kwargs)
    self._agreement, self._name = agreement, name

  def _is_due(self, t: float, step: int) -> bool:
    is_due = super()._is_due(t, step)
    if self._by_steps:
      return is_due
    agreed = self._agreement.is_due(self._name, step, is_due)
    return agreed or step == self._end_step


def _restore(
  checkpointer: base.FullCheckpointer,
  step: int | None = None,
  series: str = 'latest',
) -> None:
  with debug.log_activity('checkpoint restore', category='restore'):
    checkpointer.restore(series, step=step)


def _resume_log(
  run: Run,
  log: writers.MetricWriter,
  last: int | None,
  lengths: Mapping[str, int],
) -> None:
  """Removes records after the restored step; logs the config of a new run.

  The steps of those records run again, and log the same again.

  Args:
    run: the run.
    log: of training or of evaluation.
    last: the last step that is not run or evaluated again; None if the run has
      done nothing yet, so that all of the log is void.
    lengths: path -> length of what counts of each file.
  """
  # Else the records before are those of an earlier training.
  if run.checkpointer.is_resumable and not run.checkpointer.has_moved:
    with debug.log_activity('resuming the logs'):
      log.resume(-1 if last is None else last, lengths)
  # Of a writer without files nothing is void.
  is_empty = last is None or (not lengths and bool(log.flush()))
  if is_empty or not run.checkpointer.is_resumable:
    recorded = base_config.recorded(run.config)
    text = json.dumps(recorded, indent=2, sort_keys=True)
    log.write_texts(0, {'config': text})


_initialize_experiment = adapters.initialize_experiment  # Forks call it.


class Training:
  """An experiment in training: its state, and what is done after each step.

  Attributes:
    experiment: the experiment.
    state: the live state of `latest`, restored.
    guard: judges whether losses and gradients are finite.
    agreement: of the processes, on what they do at intervals of seconds.
    actions: called after each step, in this order.
  """

  def __init__(self, run: Run):
    self._run = run
    config, checkpointer = run.config, run.checkpointer
    checkpointer.begin_training(run.experiment_class)
    with (
      debug.log_activity('experiment init', category='start'),
      oom.explained(None, config),
    ):
      rng, init_rng = prng.run_keys(config)
      self.experiment: experiment_lib.AbstractExperiment = adapters.construct(
        run.experiment_class, 'train', init_rng, config
      )
    # Not before: a line that says what is wrong with the config would be lost.
    logging.info('Training with config:\n%s', config)
    rng = self.experiment.initialize_train_step_rng(rng)
    self.state = base.new_state(checkpointer, self.experiment, rng)
    self.agreement = distributed.Agreement()
    self._budget = budget.Budget(config.max_seconds, self.state)
    if checkpointer.can_be_restored('latest'):
      run.console.say('Restoring the newest checkpoint...')
      _restore(checkpointer)
    step = int(self.state.global_step)
    with run.stoppable():
      checkpointer.stop_if_noted(step)
      checkpointer.mark_begun(step)
      self._budget.check(step, distributed.of_chief)
    last = None if checkpointer.is_new() else step
    _resume_log(run, run.log, last, checkpointer.lengths)
    run.console.begin(config, self.experiment, self.state, checkpointer)
    # The checkpoint that was restored is there already.
    self._saved_step = checkpointer.saved_step
    self._saves = run.saves_here(config.train_checkpoint_all_hosts)
    self.guard = nonfinite.Guard(
      self.experiment,
      config.on_nonfinite,
      config.max_nonfinite_steps,
      # The newest step that the loop waits for anyway, right after the actions.
      max(1, experiment_lib.max_steps_in_flight(config) - 1),
    )
    given = [adapters.full_action(x) for x in run.periodic_actions]
    for action in given:
      # On a thread of its own it would write behind a save's mark in the log.
      action.share(run.log.executor)
    self.actions: list[periodic.Action] = [
      self.guard,
      self._budget,
      profiling.Profiler(config, run.console.say),
      *given,
      *self._default_actions(),
    ]
    checkpointer.logs = [*self.actions, run.log, run.eval_log]

  def _default_actions(self) -> list[periodic.Action]:
    """Returns what every training does at intervals: log, write, save."""
    config, log, console = self._run.config, self._run.log, self._run.console
    add_rates = rates.Rates(self.experiment)

    def finish(scalars: Mapping[str, Any]) -> dict[str, Any]:
      return add_rates(self.guard.without_flag(scalars))

    console.show(log, 'train')
    hook = console_lib.Hook(console, config, log, finish)
    actions: list[periodic.Action] = [hook]
    is_logged = jax.process_index() == 0 or config.log_all_hosts
    if is_logged and self._run.writer is not None:
      actions.append(
        periodic.Every(
          lambda step, scalars: log.put('scalars', step, scalars, finish),
          config.logging_interval_type or config.interval_type,
          config.log_train_data_interval,
          logging_growth_ratios=config.periodic_action_growth_ratios,
          end_step_to_action=config.training_steps,
          log_all_data=config.log_all_train_data,
        )
      )
    # Another process may have the file, and all compute it together.
    is_kept = log.takes('fingerprints') or jax.process_count() > 1
    if config.fingerprint and is_kept:

      def fingerprint(step: int, scalars: Mapping[str, Any]) -> None:
        value = fingerprints.of_step(scalars, self.experiment.last_batch)
        log.put('fingerprints', step, {'step': value})

      actions.append(periodic.Every(fingerprint, 'steps', 0))
    # After the writing: the checkpoint waits for what was logged before it.
    if (config.save_checkpoint_interval or 0) > 0:
      actions.append(
        _Together(
          self.agreement,
          'save',
          lambda *unused: self.save(),
          config.checkpoint_interval_type or config.interval_type,
          config.save_checkpoint_interval,
          logging_growth_ratios=config.periodic_action_growth_ratios,
        )
      )
    return actions

  def save(self) -> None:
    """Saves the series `latest`, once a step, on the hosts that save."""
    if not self._saves or self._saved_step == self.state.global_step:
      return
    self.guard.wait()  # A state that is not finite must not be saved.
    with goodput.measure('checkpoints'):
      self._run.checkpointer.save('latest')
    self._saved_step = int(self.state.global_step)

  def run_loop(self) -> None:
    """Runs all steps, saves a last time, and waits for the background."""
    run, config, state = self._run, self._run.config, self.state
    actions: list[Any] = [*self.actions, adapters.full_action(self._after_step)]
    try:
      with run.watch.training():
        # An evaluation beside it cannot make the weights of another run.
        saves = config.restore_from and config.eval_initial_weights
        saves = saves or config.save_initial_train_checkpoint
        if saves and run.checkpointer.is_new():
          with debug.log_activity('first checkpoint'):
            self.save()
        for action in actions:
          action.update_time(time.time(), state.global_step)
        if not run.stop:
          with (
            run.stoppable(),
            run.console.training(),
            oom.explained(self.experiment, config),
          ):
            self.experiment.train_loop(config, state, actions, run.log)
          if run.stop and self.experiment.IS_SHARDED:
            self._count_last_step()
        self._finish()
        # Wait for process 0 to save: an early exit would abort the others.
        devices.rendezvous()
        self.agreement.close()
    except BaseException as error:
      # What was due is still written; the loop's own error is what counts.
      for part in [*actions, run.log]:
        try:
          part.wait_to_finish()
        except Exception as e:
          is_new = async_lib.cause(e) != async_lib.cause(error)
          if is_new and not errors.is_lost_process(e):
            logging.exception('A periodic action failed as well.')
      raise
    finally:
      # They refer to `self`: the cycle would keep the weights.
      self.actions.clear()
      run.checkpointer.logs = ()

  def _count_last_step(self) -> None:
    """Counts a step that raised StopTraining behind its update."""
    after = self.experiment.snapshot_state()['state']
    step = self.state.global_step + 1
    if int(after.step) == step:
      self.state.global_step = step
      # Its scalars are lost, but it may not save weights that are not finite.
      weights = jax.tree.leaves(after.params)
      is_finite = all(bool(jax.numpy.isfinite(x).all()) for x in weights)
      flag = {nonfinite.NONFINITE: np.bool_(not is_finite)}
      self.guard(time.time(), step, flag)

  def _after_step(self, t: float, step: int, scalars: Any) -> None:
    """The last of the periodic actions: ends the run if something asks to."""
    self._run.log.executor.raise_error()  # Such as of a full disk.
    self._run.checkpointer.raise_error()
    if step == self._saved_step:
      self._run.checkpointer.stop_if_noted(step)
    agreed = functools.partial(self.agreement.is_due, 'max_seconds', step)
    self._budget.check(step, agreed)
    self._run.check(step, self._finish)

  def _finish(self) -> None:
    """Saves, and waits for the background."""
    with debug.log_activity('final checkpoint', category='checkpoints'):
      self.save()
      if self._saves:
        self._run.checkpointer.wait_for_checkpointing_to_finish()
      for action in self.actions:
        action.wait_to_finish()
      self._run.log.wait_to_finish()


class _Evaluation:
  """An experiment that is evaluated, and the series `best`.

  Attributes:
    experiment: the experiment.
    done: the steps that are evaluated, by earlier processes as well.
    last: the step that was evaluated last; None if there is none.
    noted: the evaluations that early stopping compares.
    starts_as_run: whether the experiment's initial weights are those that the
      training of this config initialises.
  """

  def __init__(self, run: Run, until: float = math.inf):
    """Constructs the experiment.

    Args:
      run: the run.
      until: the last step that may count as evaluated.
    """
    self._run = run
    config = run.config
    init_rng = adapters.init_rng(run.experiment_class, config)
    self.starts_as_run = np.array_equal(init_rng, prng.run_keys(config)[1])
    with debug.log_activity('experiment init', category='start'):
      self.experiment = adapters.construct(
        run.experiment_class, run.eval_mode, init_rng, config
      )
    self.noted = [x for x in run.checkpointer.evaluated() if x.step <= until]
    self.done = {x.step for x in self.noted}
    self.last = max(self.done, default=None)
    rng = jax.random.PRNGKey(config.random_seed)
    self._inputs = self.experiment.evaluate_inputs(config, rng)
    self._log = run.eval_mode if run.trained is None else 'eval'
    run.console.show(run.eval_log, self._log)
    self._evaluate = debug.evaluate_should_return_dict(self.experiment.evaluate)
    self._sign = 1 if config.best_model_eval_metric_higher_is_better else -1
    # The live state of the series `best`; None if this process keeps none.
    self._best: Any = None
    if (
      config.best_model_eval_metric
      and not run.checkpointer.reads_only
      and run.saves_here(config.best_checkpoint_all_hosts)
    ):
      self._best = self._begin_best()

  def __call__(self, state: Any, counts: bool = True) -> None:
    """Evaluates the weights of the experiment, those of `state.global_step`.

    Args:
      state: the live state of `latest`.
      counts: whether these are weights of the run: they may be the best, and
        the step counts as evaluated, for later processes too.
    """
    run, step = self._run, int(state.global_step)
    run.console.evaluating(step)
    if counts:  # Already now: it may raise StopTraining.
      self.done.add(step)
    global_step, rng = self._inputs(step)
    self.experiment.num_evaluated = sum(s < step for s in self.done)
    with (
      debug.log_activity(f'evaluation of step {step}', category='evaluation'),
      oom.explained(self.experiment, run.config),
    ):
      scalars = self._evaluate(
        global_step=global_step, rng=rng, writer=run.eval_log
      )
    experiment_lib.check_scalars(scalars, self.experiment, 'evaluate')
    run.eval_log.write_scalars(step, scalars)
    run.console.log_evaluation(step, scalars, self._log)
    self.last = step
    if not counts:
      return
    if self._best is not None:
      self._keep_best(scalars, step, state.train_step_rng)
    checkpointer, flushed = run.checkpointer, run.eval_log.flush_async()
    metric, patience, _ = notes.early_stop(run.config)
    value = patience and self._value_of('early_stop.metric', metric, scalars)
    name = '' if value is None else metric
    self.noted.append(base.Evaluation(step, name, value))

    def note() -> None:
      lengths = flushed()  # First: what is noted as evaluated is in the log.
      checkpointer.mark_evaluated(step, value, lengths)

    checkpointer.when_saved(note)

  def is_of_last_step(self) -> bool:
    """Returns whether the step evaluated last is the last of training."""
    should_run_step = self.experiment.should_run_step
    return self.last is not None and not should_run_step(
      self.last, self._run.config
    )

  def wait(self) -> None:
    """Waits until what has been evaluated is safe and noted."""
    with goodput.measure('checkpoints'):
      self._run.checkpointer.wait_for_checkpointing_to_finish()

  def _begin_best(self) -> Any:
    """Returns the state of the series `best`, with the best value so far."""
    checkpointer = self._run.checkpointer
    metric = self._run.config.best_model_eval_metric
    state = checkpointer.get_experiment_state('best')
    state.best_model_eval_metric = metric
    state.best_eval_metric_value = -self._sign * math.inf
    # Now, so that a conflict is reported before the first evaluation.
    checkpointer.claim('best')
    if checkpointer.can_be_restored('best'):
      # Only the best value and its metric are restored, not the weights.
      try:
        _restore(checkpointer, series='best')
      except store_lib.DamagedError as e:
        # The weights that count are those of `latest`.
        logging.error('The series best begins anew: %s', e)
    if (old := state.best_model_eval_metric) != metric:
      logging.warning(
        'The series best was of %r; now it is of %r.', old, metric
      )
      state.best_model_eval_metric = metric
      state.best_eval_metric_value = -self._sign * math.inf
    value = float(state.best_eval_metric_value)
    if math.isfinite(value):
      self._run.console.log_best(metric, value)
    return state

  def _value_of(self, key: str, metric: str, scalars: Any) -> float:
    """Returns a metric; if the processes' differ, the first one's counts."""
    values = writers.to_scalars(scalars)
    if metric not in values:
      raise errors.UsageError(
        f'config.{key} is {metric!r}, but evaluate returned'
        f' no number of that name. It returned {sorted(values)}.'
        f'{errors.did_you_mean(metric, values)}'
      )
    value = float(values[metric])
    collective = self._run.checkpointer.collective
    return distributed.of_chief(value) if collective else value

  def _keep_best(
    self, scalars: Mapping[str, Any], step: int, train_step_rng: Any
  ) -> None:
    """Saves the experiment if its metric is strictly better than ever."""
    run, state, key = self._run, self._best, 'best_model_eval_metric'
    metric, old = run.config[key], state.best_eval_metric_value
    value = self._value_of(key, metric, scalars)
    if not self._sign * value > self._sign * old:  # A NaN is never better.
      return
    run.console.log_best(metric, value, step)
    state.global_step = step
    state.experiment_module = self.experiment
    state.best_eval_metric_value = value
    state.train_step_rng = train_step_rng
    self.experiment.on_new_best_model(state)
    with goodput.measure('checkpoints'):
      run.checkpointer.save('best')


def _listed_steps(
  config: config_dict.ConfigDict, checkpointer: base.FullCheckpointer
) -> list[int]:
  """Returns the steps that `config.eval_steps` means; none if it is None."""
  text = config.eval_steps
  if text is None:
    return []
  kept = checkpointer.steps('latest')
  steps = kept if text == 'all' else [int(s) for s in text.split(',')]
  if missing := sorted(set(steps) - set(kept)) or not steps:
    raise errors.UsageError(
      f'config.eval_steps is {text!r}, but {config.checkpoint_dir} has no'
      f' checkpoint of {missing if steps else "any step"}; it has {kept}.'
    )
  return steps


# JAXline's functions. Their arguments are the attributes of `Run`.


def train(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: base.Checkpointer,
  writer: writers.Writer | None,
  periodic_actions: Sequence[periodic.PeriodicAction] = (),
) -> None:
  """Trains, from the newest checkpoint of `latest` if there is one.

  Raises:
    preemption.Preempted: the run was told to end; all is saved.
    nonfinite.NonfiniteError: the loss or the gradients are not finite.
  """
  Run(
    experiment_class,
    config,
    checkpointer,
    writer,
    periodic_actions=periodic_actions,
  ).train()


def evaluate(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: base.Checkpointer,
  writer: writers.Writer | None,
  jaxline_mode: str | None = None,
) -> None:
  """Evaluates each new checkpoint of `latest`, until training has ended.

  With durable checkpoints each is evaluated once, in the order of its steps,
  also if evaluation itself is ended and started again. `writer` is the run's
  `eval_writer`, `jaxline_mode` its `eval_mode`: None is the command line's.

  Raises:
    UsageError: there is no checkpoint to evaluate, or none of a step in
      `eval_steps`; or `evaluate` did not return the best metric.
  """
  Run(
    experiment_class,
    config,
    checkpointer,
    eval_writer=writer,
    eval_mode=debug.settings.mode if jaxline_mode is None else jaxline_mode,
  ).evaluate()
