"""Evaluates checkpoints, saves the best, and records the evaluated steps."""

from collections.abc import Callable, Mapping, Sequence
import math
import time
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict

from jaxline import errors
from jaxline import experiment as experiment_lib
from jaxline.base import debug
from jaxline.base import goodput
from jaxline.base import stateful
from jaxline.checkpoint import protocol
from jaxline.metrics import console as console_lib
from jaxline.metrics import writers
from jaxline.parallel import distributed
from jaxline.run_directory import notes
from jaxline.run_directory import store as store_lib
from jaxline.supervision import out_of_memory as oom

# How often evaluation looks for a new checkpoint, in seconds.
_POLL_SECS = 0.25
_MAX_NAMED = 4


def restore(
  checkpointer: protocol.FullCheckpointer,
  step: int | None = None,
  series: str = 'latest',
) -> None:
  """Restores a checkpoint; a step of None means the newest."""
  with debug.log_activity('checkpoint restore', category='restore'):
    checkpointer.restore(series, step=step)


def listed_steps(
  config: Any, checkpointer: protocol.FullCheckpointer
) -> list[int | None] | None:
  """Returns the steps that the config asks to evaluate; None means every one.

  A None in the list means the newest checkpoint. An empty list means that
  `one_off_evaluate` evaluates untrained weights.
  """
  if config.eval_steps is not None:
    kept = checkpointer.steps('latest')
    if not kept:
      raise errors.UsageError(
        f'config.eval_steps is {config.eval_steps!r}, but'
        f" {config.checkpoint_dir} has no checkpoint of 'latest'. Train first."
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
    f'config.one_off_evaluate is True, but {config.checkpoint_dir} has no'
    " checkpoint of 'latest'. Train first, or set"
    ' config.eval_initial_weights = True to evaluate untrained weights.'
  )


class Evaluation:
  """An experiment to evaluate, and the notes about its evaluations.

  Attributes:
    experiment: the experiment.
    done: the evaluated steps, including those of earlier processes.
    last: the step that was evaluated last, or None.
    noted: the evaluations that early stopping compares.
  """

  def __init__(
    self,
    experiment: experiment_lib.FullExperiment,
    config: config_dict.ConfigDict,
    checkpointer: protocol.FullCheckpointer,
    log: writers.MetricWriter,
    console: console_lib.Console,
    name: str,
    *,
    starts_as_run: bool,
    keeps_best: bool,
    until: float = math.inf,
  ):
    """Reads the notes, and restores the best value so far.

    Args:
      experiment: made by `experiments.construct` in an evaluation mode.
      config: the run's config.
      checkpointer: has the live state of `latest`, and keeps `best`.
      log: gets the scalars, and is passed to `evaluate`.
      console: shows the scalars.
      name: the name of the log, for the terminal.
      starts_as_run: whether the experiment starts with the initial weights of
        training: True in the sharded style, False in the per-device style.
      keeps_best: whether this process saves `best`, if there is a metric.
      until: the last step whose evaluation counts; set by `train_and_eval`.
    """
    self.experiment, self._config = experiment, config
    # Compare the scalars only if all processes evaluate the same steps.
    together = checkpointer.directory.keeps or until < math.inf
    self._compares = together and jax.process_count() > 1
    self._differed: set[str] = set()
    self._checkpointer, self._directory = checkpointer, checkpointer.directory
    self._log, self._console, self._name = log, console, name
    self._starts_as_run = starts_as_run
    self.noted = [x for x in self._directory.evaluated() if x.step <= until]
    self.done = {x.step for x in self.noted}
    self.last = max(self.done, default=None)
    rng = jax.random.PRNGKey(config.random_seed)
    self._inputs = self.experiment.evaluate_inputs(config, rng)
    console.show(log, name)
    self._evaluate = debug.evaluate_should_return_dict(experiment.evaluate)
    self._best: Any = None
    metric = config.best_model_eval_metric
    if metric and keeps_best and not self._directory.reads_only:
      self._best = _restored_best(config, checkpointer)
      if math.isfinite(value := float(self._best.best_eval_metric_value)):
        console.log_best(metric, value)

  def __call__(self, state: Any, is_of_run: bool = True) -> None:
    """Evaluates the weights at the step of `latest`, and writes the scalars.

    `is_of_run` tells whether training had these weights at this step. Only
    such weights can become the best, and only their step is noted as evaluated.
    """
    step = int(state.global_step)
    self._console.evaluating(step)
    if is_of_run:  # Before `evaluate`, which may raise StopTraining.
      self.done.add(step)
    global_step, rng = self._inputs(step)
    self.experiment.num_evaluated = sum(s < step for s in self.done)
    with (
      debug.log_activity(f'evaluation of step {step}', category='evaluation'),
      oom.explain_oom(stateful.live(self.experiment), self._config),
    ):
      scalars: Any = self._evaluate(
        global_step=global_step, rng=rng, writer=self._log
      )
    experiment_lib.check_scalars(scalars, self.experiment, 'evaluate')
    scalars = {} if scalars is None else scalars
    agreed = self._agreed(scalars)
    self._log.write_scalars(step, scalars)
    self._console.log_evaluation(step, scalars, self._name)
    self.last = step
    if is_of_run:
      self._note(step, agreed, state.train_step_rng)

  def follow(
    self, state: Any, is_over: Callable[[], bool], check: Callable[[int], None]
  ) -> None:
    """Evaluates each new checkpoint until training has ended.

    Args:
      state: the live state of `latest`.
      is_over: returns whether training has ended.
      check: called before each poll with the step that was evaluated last (0 if
        none); raises an error if a signal ends the run.
    """
    config, checkpointer = self._config, self._checkpointer
    # Training saves its initial weights if `restore_from` is set, or if asked
    # to. Wait for this checkpoint, unless this experiment has the same weights.
    is_saved = config.restore_from or (
      config.save_initial_train_checkpoint and not self._starts_as_run
    )
    initial_is_due = (
      config.eval_initial_weights and 0 not in self.done and not is_saved
    )
    restore_next = checkpointer.follow('latest')
    is_last = False
    while not is_last:
      check(self.last or 0)
      # Ask before `restore_next`, so that a checkpoint saved just before the
      # end is still evaluated.
      is_last = is_over()
      is_restored = restore_next(self.done)
      if is_restored or (
        initial_is_due and not checkpointer.can_be_restored('latest')
      ):
        initial_is_due = False
        self(state, is_restored or self._starts_as_run)
        self.wait()
        # Stop after the last step, as in JAXline.
        is_last = not self._directory.keeps and self.is_of_last_step()
      elif not is_last:
        self._console.log_waiting(self.last, config.checkpoint_dir)
        with goodput.measure('waiting'):
          time.sleep(max(_POLL_SECS, self._directory.poll_secs))

  def _agreed(self, scalars: Mapping[str, Any]) -> Mapping[str, Any]:
    """Compares the scalars of all processes; returns process 0's.

    It warns once about each scalar that differs.

    Raises:
      UsageError: the metric of `best` or of early stopping differs. JAXline
        programs, which may evaluate in process 0 only, just get the warning.
    """
    if not self._compares:
      return scalars
    agreed, differences = distributed.gather_and_decide(
      writers.to_scalars(scalars),
      lambda found: (found[0], _differences(found)),
      series='evaluation',
    )
    metric, *_ = notes.early_stop(self._config)
    keys = {self._config.best_model_eval_metric, metric}
    is_own = isinstance(self.experiment, experiment_lib.FullExperiment)
    is_wrong = is_own and not keys.isdisjoint(differences)
    if differences.keys() - self._differed:
      self._differed.update(differences)
      text = '; '.join(f'{name} is {x}' for name, x in differences.items())
      text = f'The processes return different scalars from evaluate: {text}.'
      if is_wrong:
        raise errors.UsageError(
          f'{text} The run chooses the best weights by them. Compute them from'
          ' the data of all processes, as reduce_outputs does: docs/metrics.md.'
        )
      logging.warning('%s The run uses the scalars of process 0.', text)
    return agreed

  def _note(self, step: int, scalars: Any, train_step_rng: Any) -> None:
    """Saves `best` if the value improved, and notes the step as evaluated."""
    if self._best is not None:
      self._save_if_best(step, scalars, train_step_rng)
    flushed = self._log.flush_async()
    rule, value = notes.early_stop(self._config), None
    if rule.is_on:
      value = _metric('early_stop.metric', rule.metric, scalars)
    name = '' if value is None else rule.metric
    self.noted.append(notes.EvaluationNote(step, name, value))
    self._directory.note_evaluation(step, value, flushed)

  def _save_if_best(self, step: int, scalars: Any, train_step_rng: Any) -> None:
    config, checkpointer = self._config, self._checkpointer
    state, name = self._best, config.best_model_eval_metric
    value = _metric('best_model_eval_metric', name, scalars)
    best = float(state.best_eval_metric_value)
    sign = notes.direction(config)
    if not sign * value > sign * best:
      return  # A NaN is not better.
    state.global_step = step
    state.experiment_module = stateful.live(self.experiment)
    state.best_eval_metric_value = value
    state.train_step_rng = train_step_rng
    self.experiment.on_new_best_model(state)
    with goodput.measure('checkpoints'):
      checkpointer.save('best')
    self._console.log_best(name, value, step)

  def is_of_last_step(self) -> bool:
    """Returns whether the last evaluated step is the last one of training."""
    should_run_step = self.experiment.should_run_step
    return self.last is not None and not should_run_step(
      self.last, self._config
    )

  def wait(self) -> None:
    """Waits until all evaluations are noted, and the best one is saved."""
    with goodput.measure('checkpoints'):
      self._checkpointer.wait_for_checkpointing_to_finish()


def _restored_best(config: Any, checkpointer: protocol.FullCheckpointer) -> Any:
  """Returns the live state of the series `best`, without weights.

  Its value is the best so far, or the worst infinity if none was saved.
  """
  state = checkpointer.get_experiment_state('best')
  # A restore replaces only entries that the state has.
  state.best_model_eval_metric = state.best_eval_metric_value = None
  # Claim the series now, to report a conflict before the first evaluation.
  checkpointer.directory.claim('best')
  if checkpointer.can_be_restored('best'):
    try:
      restore(checkpointer, series='best')
    except store_lib.DamagedError as e:
      # Continue without the old best: `latest` has the weights that matter.
      logging.error('The series best starts from scratch: %s', e)
  old, metric = state.best_model_eval_metric, config.best_model_eval_metric
  if old != metric:
    if old is not None:
      logging.warning(
        'The metric of the series best was %r; now it is %r.', old, metric
      )
    state.best_model_eval_metric = metric
    state.best_eval_metric_value = -math.inf * notes.direction(config)
  return state


def _differences(scalars: Sequence[Mapping[str, float]]) -> dict[str, str]:
  """Maps each scalar that differs to its values and their processes."""
  found = {}
  for name in dict.fromkeys(name for own in scalars for name in own):
    values = [repr(own.get(name)) for own in scalars]  # A NaN equals itself.
    if len(kinds := [*dict.fromkeys(values)]) > 1:
      texts = [f'{x} in process {values.index(x)}' for x in kinds[:_MAX_NAMED]]
      found[name] = ', '.join(texts)
  return found


def _metric(key: str, metric: str, scalars: Mapping[str, Any]) -> float:
  """Returns the scalar that `config.<key>` names."""
  values = writers.to_scalars(scalars)
  valid, what = sorted(values), 'scalar of evaluate'
  errors.check_names([metric], valid, what, f'config.{key}')
  return float(values[metric])
