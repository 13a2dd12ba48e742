"""Trains, evaluates, or does both in turn: the modes are methods of `Run`.

The functions at the end have JAXline's signatures; each makes a `Run` and calls
its method of the same name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import math
import threading
import time
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict
import numpy as np

from jaxline import base_config
from jaxline import errors
from jaxline import evaluation
from jaxline import experiment as experiment_lib
from jaxline import hooks as hooks_lib
from jaxline.base import async_lib
from jaxline.base import debug
from jaxline.base import goodput
from jaxline.base import lazy
from jaxline.base import stateful
from jaxline.base import watchdog
from jaxline.checkpoint import protocol
from jaxline.compat import adapters
from jaxline.compat import checkpointers
from jaxline.compat import experiments
from jaxline.metrics import console as console_lib
from jaxline.metrics import periodic
from jaxline.metrics import writers
from jaxline.parallel import devices
from jaxline.parallel import distributed
from jaxline.parallel import prng
from jaxline.run_directory import notes
from jaxline.supervision import budget
from jaxline.supervision import nonfinite
from jaxline.supervision import out_of_memory as oom
from jaxline.supervision import preemption

lazy.complete(__name__)


@dataclasses.dataclass
class Run:
  """The parts of a run, and the modes that use them.

  The constructor wraps parts that implement only JAXline's smaller interfaces.

  Attributes:
    experiment_class: constructs the experiment: a class or a partial of one.
    config: the run's config, validated.
    checkpointer: saves and restores the series `latest` and `best`; None keeps
      both in the memory of this process.
    writer: gets the scalars of training. None writes nothing.
    eval_writer: gets the scalars of evaluation. None writes nothing.
    periodic_actions: called after each step, before logging and saving.
    eval_mode: the mode of the experiment that is evaluated.
    eval_checkpointer: the checkpointer of an evaluation in a second thread.
    console: prints progress on the terminal; None logs a line at an interval.
    watch: receives the signals that make a run save and end.
    trained: set by the training thread after its last checkpoint, or None.
    log: `writer` with all methods; passed to `step`.
    eval_log: `eval_writer` with all methods; passed to `evaluate`.
    stop: the exception that ended the run before its last step, or None.
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
  watch: preemption.Watch = dataclasses.field(
    default_factory=preemption.active_watch
  )
  trained: threading.Event | None = None
  log: writers.MetricWriter = dataclasses.field(init=False)
  eval_log: writers.MetricWriter = dataclasses.field(init=False)
  stop: errors.StopTraining | None = dataclasses.field(init=False, default=None)

  def __post_init__(self) -> None:
    self.config = adapters.full_config(self.config)
    made, in_memory = self.checkpointer, checkpointers.InMemoryCheckpointer
    self.checkpointer = adapters.full_checkpointer(
      in_memory(self.config, 'train') if made is None else made,
      self.experiment_class,
    )
    actions = self.periodic_actions
    self.periodic_actions = [*map(adapters.full_action, actions)]
    self.console = self.console or console_lib.Console()
    self.log = adapters.full_writer(self.writer)
    self.eval_log = adapters.full_writer(self.eval_writer)
    devices.keep_freed_memory()

  @debug.disable_pmap_jit
  def train(self) -> experiment_lib.AbstractExperiment:
    """Trains, and returns the experiment: see the function `train`."""
    training = Training(self)
    state = training.state
    try:
      training.run()
    except preemption.Preempted as e:
      if not self.stop and training.experiment.should_run_step(
        state.global_step, self.config
      ):
        raise
      # The signal came too late to stop the training; everything is saved.
      self.mark_ended(state.global_step)
      if self.eval_checkpointer is None:  # Otherwise evaluation may continue.
        e.is_over = True
        e.add_note('The run has ended.')
        e.code = 0 if e.code == preemption.EXIT_CODE else e.code
      raise
    self.mark_ended(state.global_step)
    return stateful.live(training.experiment)

  @debug.disable_pmap_jit
  def train_and_eval(self) -> experiment_lib.AbstractExperiment:
    """Trains in one thread, and evaluates every `eval_interval` and at the end.

    Two experiments, constructed with the modes 'train' and 'eval', share the
    live state without copies (see `FullExperiment.share_state`).
    """
    config, checkpointer = self.config, self.checkpointer
    training = Training(self)
    state = training.state
    evaluator = self.make_evaluation(until=state.global_step)
    # Evaluations after the restored step are repeated, so their records are
    # deleted. The step's own record stays only if a note marks it complete.
    if state.global_step in evaluator.done:
      last, lengths = state.global_step, evaluator.noted[-1].lengths
    elif state.global_step and not protocol.is_new(checkpointer):
      last, lengths = state.global_step - 1, checkpointer.directory.lengths
    else:
      last, lengths = None, {}
    self.resume_log(self.eval_log, last, lengths)

    def evaluate_now(*unused: Any) -> None:
      if state.global_step in evaluator.done:
        return
      began = time.time()
      training.guard.wait()  # A non-finite state must not become the best.
      evaluator.experiment.share_state(training.experiment)
      evaluator(state)
      for hook in training.hooks:
        hook.skip_time(time.time() - began)
      notes.check_early_stopping(config, evaluator.noted)

    interval_type = config.eval_interval_type or config.interval_type
    interval = config.eval_interval
    with self.stoppable():
      if interval is not None and interval >= 0:
        hook = hooks_lib.SynchronizedEvery(
          training.agreement,
          'evaluation',
          evaluate_now,
          interval_type,
          interval,
          end_step_to_action=config.training_steps,
        )
        # It comes last, and excludes its time from the clocks of all hooks.
        training.hooks.append(hook)
        # An earlier process may have ended between the save of this step and
        # its evaluation. If so, evaluate now. With intervals in seconds, no
        # record tells whether an evaluation was due, so always evaluate.
        if state.global_step and interval_type == 'steps':
          hook(time.time(), state.global_step, None)
        elif state.global_step:
          evaluate_now()
      is_first = state.global_step == 0 or protocol.is_new(checkpointer)
      if config.eval_initial_weights and is_first:
        evaluate_now()
    training.run()
    with self.stoppable():
      evaluate_now()
    evaluator.wait()
    self.mark_ended(state.global_step)
    return stateful.live(training.experiment)

  def train_and_eval_in_threads(
    self, train: Callable[['Run'], Any], evaluate: Callable[['Run'], Any]
  ) -> None:
    """Trains, while a second thread evaluates the saved checkpoints."""
    from jaxline.compat import threads  # Few runs need it.

    # Begin before the threads, since evaluation looks for checkpoints at once.
    checkpointers.begin_training(self.checkpointer, self.experiment_class)
    trained = threading.Event()
    evaluation = dataclasses.replace(
      self,
      checkpointer=self.eval_checkpointer,
      watch=preemption.Watch(),  # Only the training handles signals.
      trained=trained,
    )

    def train_with(action: Callable[..., None]) -> None:
      actions = [*self.periodic_actions, action]
      run = dataclasses.replace(self, periodic_actions=actions)
      train(dataclasses.replace(run, eval_writer=None))

    threads.run_both(train_with, lambda: evaluate(evaluation), trained)

  @debug.disable_pmap_jit
  def evaluate(self) -> None:
    """Evaluates checkpoints: see the function `evaluate`."""
    config, checkpointer = self.config, self.checkpointer
    directory = checkpointer.directory
    directory.follows = True
    steps = evaluation.listed_steps(config, checkpointer)
    evaluator = self.make_evaluation()
    logging.info('Evaluating with config:\n%s', config)
    if self.trained is None:  # Otherwise the training prints the start.
      self.console.begin(config, evaluator.experiment)
    state = protocol.new_state(checkpointer, evaluator.experiment)

    def training_is_over() -> bool:
      if self.trained is not None:
        return self.trained.is_set()
      # There is no note of the end if training was restarted, or was killed
      # before it wrote one. Then the last step marks the end.
      return directory.ended() is not None or evaluator.is_of_last_step()

    with self.stoppable():
      if steps is None:
        lengths = evaluator.noted[-1].lengths if evaluator.noted else {}
        self.resume_log(self.eval_log, evaluator.last, lengths)
        evaluator.follow(state, training_is_over, self.check)
      elif not steps:
        evaluator(state, is_of_run=False)
      for step in steps or ():
        evaluation.restore(checkpointer, step)
        evaluator(state)
        evaluator.wait()
    if self.stop and steps is None:
      # A separate training process reads this note when it saves, and stops.
      self.mark_ended(state.global_step)

  def make_evaluation(self, until: float = math.inf) -> evaluation.Evaluation:
    """Constructs the experiment to evaluate."""
    made, config = self.experiment_class, self.config
    rng = experiments.declared(made).eval_init_rng(config)
    with debug.log_activity('experiment init', category='start'):
      experiment = experiments.construct(made, self.eval_mode, rng, config)
    return evaluation.Evaluation(
      experiment,
      config,
      self.checkpointer,
      self.eval_log,
      self.console,
      self.eval_mode if self.trained is None else 'eval',
      starts_as_run=np.array_equal(rng, prng.run_keys(config)[1]),
      keeps_best=self.saves_here(config.best_checkpoint_all_hosts),
      until=until,
    )

  def saves_here(self, all_hosts: bool) -> bool:
    """Returns whether this process calls `save`.

    `all_hosts` is the value of a `*_checkpoint_all_hosts` key. All processes
    call a checkpointer that writes files, whatever the value.
    """
    keeps = self.checkpointer.directory.keeps
    return keeps or all_hosts or jax.process_index() == 0

  def resume_log(
    self,
    log: writers.MetricWriter,
    last: int | None,
    lengths: Mapping[str, int],
  ) -> None:
    """Calls `RunDirectory.resume_log`, and logs the config of a new run."""
    if self.checkpointer.directory.resume_log(log, last, lengths):
      recorded = base_config.recorded(self.config)
      text = json.dumps(recorded, indent=2, sort_keys=True)
      log.write_texts(0, {'config': text})

  @contextlib.contextmanager
  def stoppable(self) -> Iterator[None]:
    """Catches StopTraining, and records it as the reason for the end."""
    try:
      yield
    except errors.StopTraining as e:
      self.stop = self.stop or e.with_traceback(None)
      self.console.stopped = str(self.stop)

  def check(self, step: int, finish: Callable[[], None] = lambda: None) -> None:
    """Calls `finish()` and raises Preempted if a signal ends the run."""
    # An evaluation thread must not hide that the training thread hangs.
    if self.trained is None:
      watchdog.report_progress()
    if self.watch.reached(step):
      finish()
      self.watch.leave()

  def mark_ended(self, step: int) -> None:
    """Notes that training has ended, and the experiment's reason if any."""
    # Do not note early stopping: the next start decides by its own config.
    why = str(self.stop) if self.stop and not self.stop.is_noted else ''
    self.checkpointer.directory.end(step, why)


class Training(periodic.Action):
  """An experiment in training, its state and its hooks.

  Attributes:
    experiment: the experiment.
    state: the live state of `latest`, restored from the newest checkpoint.
    guard: checks that losses and gradients are finite.
    agreement: chooses the step at which all processes do a timed action.
    hooks: called in this order after each step as `hook(time, step, scalars)`.
  """

  def __init__(self, run: Run):
    """Constructs the experiment, and restores its newest checkpoint."""
    self._run = run
    config, checkpointer = run.config, run.checkpointer
    directory = checkpointer.directory
    checkpointers.begin_training(checkpointer, run.experiment_class)
    with (
      debug.log_activity('experiment init', category='start'),
      oom.explain_oom(None, config),
    ):
      rng, init_rng = prng.run_keys(config)
      self.experiment: Any = experiments.construct(
        run.experiment_class, 'train', init_rng, config
      )
    # Log it only now: the long text would hide an error that the config causes.
    logging.info('Training with config:\n%s', config)
    rng = self.experiment.initialize_train_step_rng(rng)
    self.state = protocol.new_state(checkpointer, self.experiment, rng)
    self.agreement = distributed.Agreement()
    self._budget = budget.Budget(config.max_seconds, self.state)
    if checkpointer.can_be_restored('latest'):
      run.console.print('Restoring the newest checkpoint...')
      evaluation.restore(checkpointer)
    step = int(self.state.global_step)
    with run.stoppable():
      directory.stop_if_noted(step)
      checkpointer.begin(step)
      self._budget.check(step, distributed.broadcast_from_process_0)
    last = None if protocol.is_new(checkpointer) else step
    run.resume_log(run.log, last, directory.lengths)
    run.console.begin(
      config, self.experiment, self.state, lambda: directory.saved_step
    )
    # The step of the last save, to avoid saving it again.
    self._saved_step = directory.saved_step
    self._saves = run.saves_here(config.train_checkpoint_all_hosts)
    self.guard = nonfinite.Guard(
      self.experiment,
      config.on_nonfinite,
      config.max_nonfinite_steps,
      # Check the step that the loop waits for anyway, right after the hooks.
      max(1, experiment_lib.max_steps_in_flight(config) - 1),
    )
    for action in run.periodic_actions:
      # Actions share the log's thread, so a save's flush follows their records.
      action.share(run.log.executor)
    run.console.show(run.log, 'train')
    self.hooks = hooks_lib.make_hooks(
      config,
      self.experiment,
      self.guard,
      self._budget,
      run.periodic_actions,
      run.console,
      run.log,
      self.agreement,
      self.save,
      is_logged=run.writer is not None,
    )
    directory.logs = [*self.hooks, run.log, run.eval_log]

  def save(self) -> None:
    """Saves the series `latest`, unless this step is already saved."""
    if not self._saves or self._saved_step == self.state.global_step:
      return
    self.guard.wait()  # A non-finite state must not be saved.
    with goodput.measure('checkpoints'):
      self._run.checkpointer.save('latest')
    self._saved_step = int(self.state.global_step)

  def run(self) -> None:
    """Runs all steps, saves the last one, and waits for background work."""
    run, config, state = self._run, self._run.config, self.state
    # `self` comes last, after the evaluation that `train_and_eval` has added.
    hooks: list[Any] = [*self.hooks, self]
    try:
      with run.watch.training():
        # A separate evaluation gets the weights of `restore_from` by this save.
        for_eval = config.restore_from and config.eval_initial_weights
        is_asked = for_eval or config.save_initial_train_checkpoint
        if is_asked and protocol.is_new(run.checkpointer):
          with debug.log_activity('first checkpoint'):
            self.save()
        for hook in hooks:
          hook.update_time(time.time(), state.global_step)
        if not run.stop:
          with (
            run.stoppable(),
            run.console.training(),
            oom.explain_oom(stateful.live(self.experiment), config),
          ):
            self.experiment.train_loop(config, state, hooks, run.log)
        self._finish()
        # Wait for process 0 to save: the exit of a process aborts the others.
        devices.rendezvous()
    except BaseException as error:
      # Finish the pending writes, but raise the loop's error.
      for part in [*hooks, run.log]:
        try:
          part.wait_to_finish()
        except Exception as e:
          is_new = async_lib.cause(e) != async_lib.cause(error)
          if is_new and not errors.is_lost_process(e):
            logging.exception('A periodic action failed as well.')
      raise
    finally:
      # The hooks refer to `self`; this cycle would keep the weights alive.
      self.hooks.clear()
      run.checkpointer.directory.logs = ()

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    """As the last hook, ends the run on an error, note, limit or signal."""
    self._run.log.executor.raise_error()  # For example, the disk is full.
    directory = self._run.checkpointer.directory
    directory.raise_error()
    # A separate evaluation ends training by a note, which every save reads.
    if step == self._saved_step:
      directory.stop_if_noted(step)
    is_due = self.agreement.is_due
    self._budget.check(step, lambda x: is_due('max_seconds', step, x))
    self._run.check(step, self._finish)

  def _finish(self) -> None:
    """Saves the last step, and waits for all background work."""
    with debug.log_activity('final checkpoint', category='checkpoints'):
      self.save()
      if self._saves:
        self._run.checkpointer.wait_for_checkpointing_to_finish()
      for hook in self.hooks:
        hook.wait_to_finish()
      self._run.log.wait_to_finish()
    # Close it before a signal ends the run: its thread would abort the process.
    self.agreement.close()


# These are JAXline's functions. Their arguments are attributes of `Run`.


def train(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: protocol.Checkpointer,
  writer: writers.Writer | None,
  periodic_actions: Sequence[periodic.PeriodicAction] = (),
) -> None:
  """Trains, starting from the newest checkpoint of `latest` if there is one.

  Raises:
    preemption.Preempted: a signal ended the run; everything is saved.
    nonfinite.NonfiniteError: the loss or the gradients are not finite.
  """
  Run(
    experiment_class, config, checkpointer, writer, None, periodic_actions
  ).train()


def evaluate(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: protocol.Checkpointer,
  writer: writers.Writer | None,
  jaxline_mode: str | None = None,
) -> None:
  """Evaluates each new checkpoint of `latest`, until training has ended.

  Durable checkpoints are evaluated once each, in the order of their steps. A
  restart repeats only an interrupted evaluation. `writer` is the `eval_writer`
  of the run, and `jaxline_mode` its `eval_mode`; None means the command line's.

  Raises:
    UsageError: there is no checkpoint for `one_off_evaluate` or for a step in
      `eval_steps`, or `evaluate` did not return the best metric.
  """
  mode = debug.settings.mode if jaxline_mode is None else jaxline_mode
  Run(
    experiment_class, config, checkpointer, eval_writer=writer, eval_mode=mode
  ).evaluate()
