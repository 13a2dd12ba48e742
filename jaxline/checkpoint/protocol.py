"""Defines the interface between the loops and a checkpointer."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from jaxline import errors
from jaxline.base import stateful
from jaxline.parallel import distributed
from jaxline.run_directory import directory as directory_lib

# A checkpoint may lack this entry of the live state.
OPTIONAL = 'trained_secs'


class ExperimentState(dict):
  """The live state of one series: a dict with attribute access.

  `train` and `evaluate` set `global_step`, `experiment_module` and
  `train_step_rng`, and in the series `best` the best value. The storage is a
  plain dict, because the training loop writes two entries at every step.
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
    """Returns the entries as plain dicts, recursively."""
    return {
      key: value.to_dict() if isinstance(value, ExperimentState) else value
      for key, value in self.items()
    }


class Checkpointer(Protocol):
  """Saves and restores the experiment state of named series.

  The series are `latest`, written by training, and `best`, written by
  evaluation. `experiment_module` is saved by its `snapshot_state` and restored
  by its `restore_from_snapshot`; all other entries are saved unchanged.
  """

  def save(self, ckpt_series: str) -> None:
    """Saves the series' experiment state as its newest checkpoint."""

  def restore(self, ckpt_series: str) -> None:
    """Restores the series' newest checkpoint into its experiment state."""

  def get_experiment_state(self, ckpt_series: str) -> Any:
    """Returns the series' live state, one object per thread."""

  def restore_path(self, ckpt_series: str) -> Any:
    """Returns a unique name of the newest checkpoint, or None without one.

    Evaluation compares these names to detect a new checkpoint.
    """

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether the series has a checkpoint."""

  def wait_for_checkpointing_to_finish(self) -> None:
    """Waits until all saves are complete."""


class FullCheckpointer(Checkpointer):
  """A checkpointer with all methods that the loops call.

  JAXline's protocol has only some of them. The defaults suit a checkpointer
  whose checkpoints end with the process. `adapters.full_checkpointer` turns any
  `Checkpointer` into one.

  Attributes:
    directory: the notes, logs and claims. If `keeps` is True, all hosts save.
  """

  directory: directory_lib.RunDirectory

  def restore(self, ckpt_series: str, *, step: int | None = None) -> None:
    """Restores a series' checkpoint of a step; None means the newest."""
    raise NotImplementedError

  def steps(self, ckpt_series: str) -> list[int]:
    """Returns the steps of a series' checkpoints in ascending order.

    Raises:
      errors.UsageError: the checkpointer does not know them.
    """
    raise errors.UsageError(
      f'{type(self).__name__} does not list the steps of {ckpt_series!r}, so'
      ' you cannot choose one. Leave the step None.'
    )

  def follow(self, ckpt_series: str) -> Callable[[Collection[int]], bool]:
    """Returns a function that restores the next checkpoint to evaluate.

    The function takes the evaluated steps. It restores a checkpoint that is not
    evaluated, if there is one, and returns whether it did. By default it looks
    only at the newest checkpoint.
    """
    restored: Any = None

    def restore_next(done: Collection[int]) -> bool:
      nonlocal restored
      path = self.restore_path(ckpt_series)
      if path in (None, restored) or not self.can_be_restored(ckpt_series):
        return False
      restored = path
      self.restore(ckpt_series)
      # A newer checkpoint may have been saved since `restore_path`.
      step = int(self.get_experiment_state(ckpt_series).global_step)
      return step not in done

    return restore_next

  def begin(self, step: int) -> None:
    """Records the step from which training continues, and the run's config.

    Raises:
      TypeError: a save could not store a value in the live state.
    """
    self.directory.begin(step)

  def close(self) -> None:
    """Waits for the saves, and releases all claims."""


def is_new(checkpointer: FullCheckpointer) -> bool:
  """Returns whether a run has not saved a checkpoint yet.

  A run that starts from another run's checkpoint is new. All hosts call this.
  """
  if checkpointer.directory.keeps:
    return distributed.broadcast_from_process_0(
      not checkpointer.steps('latest')
    )
  return not checkpointer.can_be_restored('latest')


def num_to_keep(
  config: Any, ckpt_series: str, module: stateful.Stateful
) -> int:
  """Returns the number of newest checkpoints of a series to keep."""
  if ckpt_series != 'best':
    return config.max_checkpoints_to_keep
  if config.max_best_checkpoints_to_keep is not None:
    return config.max_best_checkpoints_to_keep
  return 1 if module.EVALUATION_IS_PURE else config.max_checkpoints_to_keep


def new_state(
  checkpointer: Checkpointer,
  experiment: Any,
  rng: Any = None,
  series: str = 'latest',
) -> Any:
  """Returns the live state of a series, set to step 0."""
  state = checkpointer.get_experiment_state(series)
  state.global_step = 0
  state.experiment_module = stateful.live(experiment)
  state.train_step_rng = rng
  return state


CheckpointerFactory = Callable[[Any, str], Checkpointer]
