"""What the loops ask of a checkpointer, and its keys of the config."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import math
from typing import Any, NamedTuple, Protocol

from jaxline import errors
from jaxline import keys
from jaxline.keys import BOOLEAN, COUNT, Key, one_of, optional, text

# An entry of the live state that a checkpoint may lack.
OPTIONAL = 'trained_secs'


class Fresh(dict):
  """A snapshot just read: a restore may keep its arrays, no one else has them.

  Of any other it makes copies, and the devices hold the state twice meanwhile.
  """


class Evaluation(NamedTuple):
  """A noted evaluation.

  Attributes:
    step: the step.
    metric: that of early stopping; '' without it.
    value: the metric's.
    data: the name of the checkpoint's data; '' if the step has no checkpoint.
    lengths: path -> length of each log file after the evaluation, in bytes.
  """

  step: int
  metric: str = ''
  value: float | None = None
  data: str = ''
  lengths: Mapping[str, int] = {}


class ExperimentState(dict):
  """The live state of one series: a dict with attribute access.

  `train` and `evaluate` fill it: `global_step`, `experiment_module`,
  `train_step_rng`, and in the series `best` the best value. Plain dict storage
  because the training loop writes two of these at every step.
  """

  def __getattr__(self, name: str) -> Any:
    try:
      return self[name]
    except KeyError:
      raise AttributeError(
        f'The experiment state has no {name!r}; it holds {sorted(self)}.'
      ) from None

  __setattr__ = dict.__setitem__
  __delattr__ = dict.__delitem__

  def to_dict(self) -> dict[str, Any]:
    """Returns the entries as plain dicts, also those inside."""
    return {
      key: value.to_dict() if isinstance(value, ExperimentState) else value
      for key, value in self.items()
    }


class Checkpointer(Protocol):
  """Saves and restores the experiment state of named series.

  The series are `latest`, written by training, and `best`, written by
  evaluation. `experiment_module` is stored through its `snapshot_state` and
  restored through its `restore_from_snapshot`; every other entry as it is.
  """

  def save(self, ckpt_series: str) -> None:
    """Saves the series' experiment state as its newest checkpoint."""

  def restore(self, ckpt_series: str) -> None:
    """Restores the series' newest checkpoint into its experiment state."""

  def get_experiment_state(self, ckpt_series: str) -> Any:
    """Returns the series' live state, one object per thread."""

  def restore_path(self, ckpt_series: str) -> Any:
    """Returns what names the newest checkpoint, or None where there is none.

    Two checkpoints of a series never have the same one: evaluation compares
    them to see whether there is a new checkpoint.
    """

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether the series has a checkpoint."""

  def wait_for_checkpointing_to_finish(self) -> None:
    """Returns when everything saved is safe."""


class FullCheckpointer(Checkpointer):
  """What the loops ask of a checkpointer, besides JAXline's protocol.

  The defaults are those of a checkpointer whose checkpoints end with the
  process. `adapters.full_checkpointer` makes one of any `Checkpointer`.

  Attributes:
    collective: whether all hosts take part in `save`.
    is_resumable: whether a later process can continue from the checkpoints.
      Only then is what was logged after the restored step void.
    follows: whether another checkpointer saves `latest`, which this one only
      reads.
    reads_only: whether nothing is written in the directory.
    has_moved: whether `begin_training` chose another directory, while the logs
      stay where those of the earlier training are.
    poll_secs: how long an evaluation waits at least before it looks again.
    saved_step: the step of the run's own checkpoint of `latest` that was
      restored or became complete last; None if there is none on disk.
    logs: writers and actions whose records up to a checkpoint of `latest` are
      on disk before it becomes visible: `flush_async` is called at the save,
      the function that it returns on a background thread. A checkpointer that
      keeps nothing on disk calls none.
    lengths: path -> length in bytes of each log file, as of the restored
      checkpoint of the run itself.
  """

  collective: bool = False
  is_resumable: bool = False
  follows: bool = False
  reads_only: bool = False
  has_moved: bool = False
  poll_secs: float = 0.0
  saved_step: int | None = None
  logs: Sequence[Any] = ()
  lengths: Mapping[str, int] = {}

  def restrict(
    self, *, follows: bool = False, reads_only: bool = False
  ) -> None:
    """Sets `follows` or `reads_only`, before the checkpointer is used."""
    self.follows |= follows
    self.reads_only |= reads_only

  def restore(self, ckpt_series: str, *, step: int | None = None) -> None:
    """Restores a series' checkpoint of a step; None is the newest."""
    raise NotImplementedError

  def follow(self, ckpt_series: str) -> Callable[[Collection[int]], bool]:
    """Returns a function that restores the next checkpoint to evaluate.

    The function gets the evaluated steps, restores another, if there is one,
    and returns whether. By default it looks at the newest checkpoint only.
    """
    restored: Any = None

    def restore_next(done: Collection[int]) -> bool:
      nonlocal restored
      path = self.restore_path(ckpt_series)
      if path in (None, restored) or not self.can_be_restored(ckpt_series):
        return False
      restored = path
      self.restore(ckpt_series)
      # It may be a newer checkpoint, saved after its path was asked for.
      step = int(self.get_experiment_state(ckpt_series).global_step)
      return step not in done

    return restore_next

  def is_new(self) -> bool:
    """Returns whether the run has no checkpoint of its own yet.

    A run that begins from another run's checkpoint is new as well. All hosts
    call it together.
    """
    return not self.can_be_restored('latest')

  def steps(self, ckpt_series: str) -> list[int]:
    """Returns the steps of a series' checkpoints, ascending.

    Raises:
      errors.UsageError: the checkpointer does not know them.
    """
    raise errors.UsageError(
      f'{type(self).__name__} does not list the steps of {ckpt_series!r}, so'
      ' none can be chosen. Leave the step None.'
    )

  def begin_training(self, experiment_class: Any) -> None:
    """Leaves the checkpoints of another training of this process alone.

    Called before a training looks for checkpoints; all hosts call it together.
    """

  def check_shared(self) -> None:
    """Raises UsageError where not all hosts see the same directory."""

  def check_config(self, experiment_class: Any = None) -> None:
    """Raises UsageError where the newest checkpoint is of another run."""

  def claim(self, ckpt_series: str) -> None:
    """Takes the right to save a series; raises ValueError where it is taken."""

  def when_saved(self, fn: Callable[[], None]) -> None:
    """Calls a function, in the background, once all so far is on disk.

    A checkpointer that keeps nothing on disk never calls it.
    """

  def raise_error(self) -> None:
    """Raises the error of a save in the background; costs nothing."""

  def evaluated(self) -> list[Evaluation]:
    """Returns the noted evaluations."""
    return []

  def mark_evaluated(
    self, step: int, value: float | None, lengths: Mapping[str, int]
  ) -> None:
    """Notes an evaluation: see `Evaluation`."""

  def mark_begun(self, step: int) -> None:
    """Notes that training goes on from this step."""

  def mark_ended(self, step: int, why: str = '') -> None:
    """Notes that training has ended at this step, and what ended it early."""

  def stop_if_noted(self, step: int) -> None:
    """Raises StopTraining in all processes if the notes end it by a step."""

  def ended(self) -> int | None:
    """Returns the step at which training has ended, or None."""
    return None

  def close(self) -> None:
    """Waits for the saves, and gives back what was claimed."""


def num_to_keep(config: Any, ckpt_series: str, module: Any) -> int:
  """Returns how many of the newest checkpoints of a series are kept."""
  if ckpt_series != 'best':
    return config.max_checkpoints_to_keep
  if config.max_best_checkpoints_to_keep is not None:
    return config.max_best_checkpoints_to_keep
  return 1 if module.EVALUATION_IS_PURE else config.max_checkpoints_to_keep


def early_stop(config: Any) -> tuple[str, Any, float]:
  """Returns metric, patience and least gain of early stopping."""
  given = config.early_stop
  metric = given.get('metric') or config.best_model_eval_metric
  return metric, given.get('patience'), given.get('min_delta', 0.0)


def stop_without_gain(config: Any, evaluated: Iterable[Evaluation]) -> None:
  """Raises StopTraining if early stopping ends a run after evaluations."""
  metric, patience, min_delta = early_stop(config)
  sign = 1 if config.best_model_eval_metric_higher_is_better else -1
  best, at, since = -math.inf, None, 0
  compared = (x for x in evaluated if patience and x.metric == metric)
  for step, _, value, *_ in compared:
    assert value is not None  # It has a metric.
    since += 1
    if sign * value > best + min_delta:  # A NaN is no gain.
      best, at, since = sign * value, step, 0
    elif since >= patience:
      raise errors.StopTraining(
        f'{metric!r} has not improved by more than {min_delta:g} over that of'
        f' step {at} in {since} evaluations.',
        'raise config.early_stop.patience, or set it to None',
      )


def new_state(
  checkpointer: Checkpointer,
  experiment: Any,
  rng: Any = None,
  series: str = 'latest',
) -> Any:
  """Returns the live state of a series, as before the first step."""
  state = checkpointer.get_experiment_state(series)
  state.global_step = 0
  state.experiment_module = experiment
  state.train_step_rng = rng
  return state


CheckpointerFactory = Callable[[Any, str], Checkpointer]

# The keys of the config.

KEYS = (
  Key('save_initial_train_checkpoint', False, BOOLEAN,
      'Save a checkpoint before the first step, for evaluators to start from.'),
  Key('train_checkpoint_all_hosts', False, BOOLEAN,
      'Save on all hosts instead of only the first.'),
  Key('best_checkpoint_all_hosts', False, BOOLEAN,
      'The same for the series `best`.'),
  Key('checkpointer', 'durable', one_of('durable', 'memory'),
      'Where checkpoints are kept: `durable` is on disk, below'
      ' `checkpoint_dir`; `memory` is in this process, for tests and trials.'),
  Key('max_checkpoints_to_keep', 5, COUNT,
      'How many of the newest checkpoints of a series are kept.'),
  Key('max_best_checkpoints_to_keep', None, optional(COUNT),
      'The same for `best`. None means `max_checkpoints_to_keep` in the'
      ' per-device style and 1 in the sharded style.'),
  Key('keep_checkpoint_every_steps', None, optional(COUNT),
      'Besides those, the first checkpoint of `latest` at or after each'
      ' multiple of this is kept for ever. None keeps no others.'),
  Key('keep_checkpoint_every_hours', None, optional(keys.POSITIVE),
      'Checkpoints at least this many hours apart are kept for ever.'),
  Key('checkpoint_allow_pickle', False, BOOLEAN,
      'True pickles what is neither array, JSON nor structure, and unpickles it'
      ' at restore, which runs any code in the file: only for your own files.'),
  Key('record_git_diff', True, BOOLEAN,
      'Write the uncommitted changes of the code into `checkpoints/code`, once,'
      ' for the user alone to read. `runs bisect` compares them.'),
  Key('restore_from', None, optional(text("'DIR' or 'DIR:STEP'", is_path=True)),
      'Begin from a checkpoint of another run, if this run has none of its own.'
      ' Without rules all of it is restored: weights, optimizer, step, random'
      ' keys, position in the data.'),
  Key('restore_rules', (), keys.Check(
        'pairs (regular expression, name or None), such as'
        " [('state/params/(.*)', r'state/params/\\1')]",
        lambda x: isinstance(x, list | tuple)
        and all(isinstance(name, str | None) for _, name in x)),
      'What to take from that checkpoint: an array whose whole name matches the'
      ' expression (the first match counts) gets the array `name` of it. With'
      ' None, or without a match, it keeps its initial value. The run starts at'
      ' step 0 with fresh keys and schedules: see docs/checkpoints.md.'),
  Key('best_model_eval_metric', '',
      optional(text("the name of a scalar, or ''")),
      'The scalar of `evaluate` whose best value is kept as the series `best`.'
      ' Without one there is no such series.'),
  Key('best_model_eval_metric_higher_is_better', True, BOOLEAN,
      'Whether the best value is the highest, or else the lowest.'),
  Key('early_stop', {}, keys.mapping(
        "a dict of the keys below, such as {'patience': 5}"),
      'Ends training when a metric of the evaluation stops improving; beside a'
      ' process of the mode `eval`, at a save.'),
  Key('early_stop.patience', None, optional(COUNT),
      'After how many evaluations in a row without a gain. None disables it.'),
  Key('early_stop.metric', '', text("the name of a scalar, or ''"),
      "The scalar of `evaluate`; '' is `best_model_eval_metric`, whose"
      ' `..._higher_is_better` counts for both.'),
  Key('early_stop.min_delta', 0.0, keys.number(0),
      'A gain is more than this beyond the best value so far.'),
  Key('on_config_change', 'raise', one_of('raise', 'continue'),
      'The latest checkpoint was made with another value of a key whose change'
      ' makes another run: `raise` lists these keys, `continue` restores it.'),
)  # fmt: skip
