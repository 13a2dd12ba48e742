"""What the loops ask of a checkpointer."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from jaxline import errors
from jaxline.base import stateful
from jaxline.parallel import distributed
from jaxline.run_directory import directory as directory_lib

# An entry of the live state that a checkpoint may lack.
OPTIONAL = 'trained_secs'


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
    directory: the run's notes, logs and claims. If it `keeps` them, all hosts
      take part in `save`.
  """

  directory: directory_lib.RunDirectory

  def restore(self, ckpt_series: str, *, step: int | None = None) -> None:
    """Restores a series' checkpoint of a step; None is the newest."""
    raise NotImplementedError

  def steps(self, ckpt_series: str) -> list[int]:
    """Returns the steps of a series' checkpoints, ascending.

    Raises:
      errors.UsageError: the checkpointer does not know them.
    """
    raise errors.UsageError(
      f'{type(self).__name__} does not list the steps of {ckpt_series!r}, so'
      ' none can be chosen. Leave the step None.'
    )

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

  def begin(self, step: int) -> None:
    """Notes that training goes on from a step, and how the run is configured.

    Raises:
      TypeError: a save could not store a value in the live state.
    """
    self.directory.begin(step)

  def close(self) -> None:
    """Waits for the saves, and gives back what was claimed."""


def is_new(checkpointer: FullCheckpointer) -> bool:
  """Returns whether a run has no checkpoint of its own yet.

  A run that begins from another run's checkpoint is new as well. All hosts call
  it together.
  """
  if checkpointer.directory.keeps:
    return distributed.broadcast_from_process_0(
      not checkpointer.steps('latest')
    )
  return not checkpointer.can_be_restored('latest')


def num_to_keep(
  config: Any, ckpt_series: str, module: stateful.Stateful
) -> int:
  """Returns how many of the newest checkpoints of a series are kept."""
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
  """Returns the live state of a series, as before the first step."""
  state = checkpointer.get_experiment_state(series)
  state.global_step = 0
  state.experiment_module = stateful.live(experiment)
  state.train_step_rng = rng
  return state


CheckpointerFactory = Callable[[Any, str], Checkpointer]
