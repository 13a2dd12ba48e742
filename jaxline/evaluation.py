"""Evaluates weights, keeps the best ones, and notes what is evaluated.

`evaluate` is the mode `eval`: it follows the checkpoints of a training.
`train.Run.train_and_eval` uses `Evaluation` alone.
"""

from collections.abc import Mapping
import math
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from jaxline import checkpointing
from jaxline import debug
from jaxline import distributed
from jaxline import errors
from jaxline import experiment as experiment_lib
from jaxline import goodput
from jaxline import prng
from jaxline.compat import experiments
from jaxline.metrics import writers
from jaxline.storage import store as store_lib
from jaxline.supervision import out_of_memory as oom

# How often evaluation looks for a new checkpoint, in seconds.
_POLL_SECS = 0.25


def evaluate(run: Any) -> None:
  """Evaluates the checkpoints of a `train.Run`: see `train.evaluate`."""
  config, checkpointer = run.config, run.checkpointer
  checkpointer.restrict(follows=True)
  steps = _listed_steps(config, checkpointer)
  evaluation = Evaluation(run)
  logging.info('Evaluating with config:\n%s', config)
  if run.trained is None:  # Else the training beside it prints the start.
    run.console.begin(config, evaluation.full)
  state = checkpointing.new_state(checkpointer, evaluation.experiment)
  with run.stoppable():
    if steps is None:
      _follow(run, evaluation, state)
    elif not steps:
      evaluation(state, is_of_run=False)
    for step in steps or ():
      restore(checkpointer, step)
      evaluation(state)
      evaluation.wait()
  if run.stop and steps is None:
    # A training in another process reads this note at a save, and stops.
    run.mark_ended(state.global_step)


def _follow(run: Any, evaluation: 'Evaluation', state: Any) -> None:
  """Evaluates each new checkpoint, until training makes no further one."""
  config, checkpointer = run.config, run.checkpointer
  lengths = evaluation.noted[-1].lengths if evaluation.noted else {}
  run.resume_log(run.eval_log, evaluation.last, lengths)
  # Training saves its initial weights with `restore_from`, or if asked to. Wait
  # for this checkpoint, unless the weights here are the same.
  is_saved = config.restore_from or (
    config.save_initial_train_checkpoint and not evaluation.starts_as_run
  )
  initial_is_due = (
    config.eval_initial_weights and 0 not in evaluation.done and not is_saved
  )

  def training_is_over() -> bool:
    if run.trained is not None:
      return run.trained.is_set()
    # The note of the end is missing if training was killed before it wrote it,
    # or has begun again: then the last step counts as the end.
    return checkpointer.ended() is not None or evaluation.is_of_last_step()

  restore_next = checkpointer.follow('latest')
  is_over = False
  while not is_over:
    run.check(evaluation.last or 0)
    # Read before `restore_next`, so that a checkpoint saved just before the end
    # is still evaluated.
    is_over = training_is_over()
    is_restored = restore_next(evaluation.done)
    if is_restored or (
      initial_is_due and not checkpointer.can_be_restored('latest')
    ):
      initial_is_due = False
      evaluation(state, is_restored or evaluation.starts_as_run)
      evaluation.wait()
      # As in JAXline: nothing after the last step is looked at.
      is_over = not checkpointer.is_resumable and evaluation.is_of_last_step()
    elif not is_over:
      run.console.log_waiting(evaluation.last, config.checkpoint_dir)
      with goodput.measure('waiting'):
        time.sleep(max(_POLL_SECS, checkpointer.poll_secs))


def restore(
  checkpointer: checkpointing.FullCheckpointer,
  step: int | None = None,
  series: str = 'latest',
) -> None:
  """Restores a checkpoint; None is the newest."""
  with debug.log_activity('checkpoint restore', category='restore'):
    checkpointer.restore(series, step=step)


def _listed_steps(
  config: Any, checkpointer: checkpointing.FullCheckpointer
) -> list[int | None] | None:
  """Returns the steps that the config lists; None if it lists none.

  In the list None is the newest checkpoint. The list is empty if
  `one_off_evaluate` evaluates untrained weights.
  """
  if config.eval_steps is not None:
    kept = checkpointer.steps('latest')
    if not kept:
      raise errors.UsageError(
        f'config.eval_steps is {config.eval_steps!r} but there is no checkpoint'
        f" of 'latest' in {config.checkpoint_dir}. Train first."
      )
    if config.eval_steps == 'all':
      return [*kept]
    steps = config.eval_steps.split(',')
    valid = [str(step) for step in kept]
    errors.check_names(steps, valid, 'checkpoint', 'config.eval_steps')
    return [int(step) for step in steps]
  if not config.one_off_evaluate:
    return None
  if checkpointer.can_be_restored('latest'):
    return [None]
  if config.eval_initial_weights:
    return []
  raise errors.UsageError(
    'config.one_off_evaluate is True but there is no checkpoint of'
    f" 'latest' to evaluate in {config.checkpoint_dir}. Train first, or set"
    ' config.eval_initial_weights = True to evaluate untrained weights.'
  )


class Evaluation:
  """An experiment that is evaluated, and what is noted of its evaluations.

  Attributes:
    experiment: the experiment.
    full: the same, with all attributes of a `FullExperiment`.
    done: the steps that are evaluated, by earlier processes as well.
    last: the step that was evaluated last; None if there is none.
    noted: the evaluations that early stopping compares.
    starts_as_run: whether the experiment has the initial weights of training:
      true in the sharded style, false in JAXline's.
  """

  def __init__(self, run: Any, until: float = math.inf):
    """Constructs the experiment; steps after `until` count as not evaluated."""
    self._run = run
    config, checkpointer = run.config, run.checkpointer
    init_rng = experiments.declared(run.experiment_class).eval_init_rng(config)
    self.starts_as_run = np.array_equal(init_rng, prng.run_keys(config)[1])
    with debug.log_activity('experiment init', category='start'):
      self.experiment = experiments.construct(
        run.experiment_class, run.eval_mode, init_rng, config
      )
    self.noted = [x for x in checkpointer.evaluated() if x.step <= until]
    self.done = {x.step for x in self.noted}
    self.last = max(self.done, default=None)
    rng = jax.random.PRNGKey(config.random_seed)
    self.full = experiments.full_experiment(self.experiment)
    self._inputs = self.full.evaluate_inputs(config, rng)
    self._log = run.eval_mode if run.trained is None else 'eval'
    run.console.show(run.eval_log, self._log)
    self._evaluate = debug.evaluate_should_return_dict(self.experiment.evaluate)
    self._best: Any = None
    if (
      (metric := config.best_model_eval_metric)
      and not checkpointer.reads_only
      and run.saves_here(config.best_checkpoint_all_hosts)
    ):
      self._best = _restored_best(config, checkpointer)
      if math.isfinite(value := float(self._best.best_eval_metric_value)):
        run.console.log_best(metric, value)

  def __call__(self, state: Any, is_of_run: bool = True) -> None:
    """Evaluates the weights at the step of `latest`, and writes the scalars.

    `is_of_run` is whether training has had these weights at this step. Only
    then may they be the best, and the step is noted as evaluated.
    """
    run, step = self._run, int(state.global_step)
    run.console.evaluating(step)
    if is_of_run:  # Already now: `evaluate` may raise StopTraining.
      self.done.add(step)
    global_step, rng = self._inputs(step)
    self.full.num_evaluated = sum(s < step for s in self.done)
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
    if is_of_run:
      self._note(step, scalars, state.train_step_rng)

  def _note(self, step: int, scalars: Any, train_step_rng: Any) -> None:
    """Saves the best checkpoint, and notes that the step is evaluated."""
    run, checkpointer = self._run, self._run.checkpointer
    if self._best is not None:
      self._save_if_best(step, scalars, train_step_rng)
    flushed = run.eval_log.flush_async()
    metric, patience, _ = checkpointing.early_stop(run.config)
    value = None
    if patience:
      value = _metric('early_stop.metric', metric, scalars, checkpointer)
    name = '' if value is None else metric
    self.noted.append(checkpointing.Evaluation(step, name, value))

    def note() -> None:
      lengths = flushed()  # First: what is noted as evaluated is in the log.
      checkpointer.mark_evaluated(step, value, lengths)

    checkpointer.when_saved(note)

  def _save_if_best(self, step: int, scalars: Any, train_step_rng: Any) -> None:
    config, checkpointer = self._run.config, self._run.checkpointer
    state, name = self._best, config.best_model_eval_metric
    value = _metric('best_model_eval_metric', name, scalars, checkpointer)
    best = float(state.best_eval_metric_value)
    is_higher_better = config.best_model_eval_metric_higher_is_better
    if not (value > best if is_higher_better else value < best):
      return  # A NaN is not better.
    state.global_step = step
    state.experiment_module = self.experiment
    state.best_eval_metric_value = value
    state.train_step_rng = train_step_rng
    self.experiment.on_new_best_model(state)
    with goodput.measure('checkpoints'):
      checkpointer.save('best')
    self._run.console.log_best(name, value, step)

  def is_of_last_step(self) -> bool:
    """Returns whether the step evaluated last is the last of training."""
    should_run_step = self.full.should_run_step
    return self.last is not None and not should_run_step(
      self.last, self._run.config
    )

  def wait(self) -> None:
    """Waits until all evaluations are noted, and the best one is saved."""
    with goodput.measure('checkpoints'):
      self._run.checkpointer.wait_for_checkpointing_to_finish()


def _restored_best(
  config: Any, checkpointer: checkpointing.FullCheckpointer
) -> Any:
  """Returns the live state of the series `best`, without weights.

  Its value is the best one so far, or an infinity if none was saved.
  """
  state = checkpointer.get_experiment_state('best')
  # A restore replaces only entries that the state has.
  state.best_model_eval_metric = state.best_eval_metric_value = None
  # Now, so that a conflict is reported before the first evaluation.
  checkpointer.claim('best')
  if checkpointer.can_be_restored('best'):
    try:
      restore(checkpointer, series='best')
    except store_lib.DamagedError as e:
      # The weights that count are those of `latest`.
      logging.error('The series best begins anew: %s', e)
  old, metric = state.best_model_eval_metric, config.best_model_eval_metric
  if old != metric:
    if old is not None:
      logging.warning(
        'The series best was of %r; now it is of %r.', old, metric
      )
    is_higher_better = config.best_model_eval_metric_higher_is_better
    state.best_model_eval_metric = metric
    state.best_eval_metric_value = -math.inf if is_higher_better else math.inf
  return state


def _metric(
  key: str,
  metric: str,
  scalars: Mapping[str, Any],
  checkpointer: checkpointing.FullCheckpointer,
) -> float:
  """Returns the metric of `config.<key>`; process 0's, if all save together."""
  values = writers.to_scalars(scalars)
  valid, what = sorted(values), 'scalar of evaluate'
  errors.check_names([metric], valid, what, f'config.{key}')
  value = float(values[metric])
  return distributed.of_chief(value) if checkpointer.collective else value
