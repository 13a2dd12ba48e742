"""What the loops ask of a checkpointer."""

from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeGuard

from jaxline import base_config


class Fresh(dict):
  """A snapshot just read: a restore may keep its arrays, no one else has them.

  Of any other it makes copies, and the devices hold the state twice meanwhile.
  """


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

  def __setattr__(self, name: str, value: Any) -> None:
    self[name] = value

  def __delattr__(self, name: str) -> None:
    try:
      del self[name]
    except KeyError:
      raise AttributeError(name) from None

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


class Durable(Checkpointer, Protocol):
  """A checkpointer whose checkpoints outlive the process.

  Attributes:
    collective: whether all hosts take part in `save`, at the same steps.
    before_commit: series -> function, called on the thread that writes before
      a checkpoint becomes visible: what belongs to it, such as the logs up to
      its step, is then safe before it.
    reads_only: whether nothing is written in the directory; set before the
      checkpointer is used.
    restored_step: the step of the run's own checkpoint of `latest` that was
      restored last; None if none was.
  """

  collective: bool
  reads_only: bool
  restored_step: int | None
  before_commit: dict[str, Callable[[], None]]

  def restore(self, ckpt_series: str, step: int | None = None) -> None:
    """Restores a series' checkpoint of a step; None is the newest."""

  def check_shared(self) -> None:
    """Raises ValueError where not all hosts see the same directory."""

  def check_config(self, experiment_class: Any = None) -> None:
    """Raises ValueError where the newest checkpoint is of another run."""

  def claim(self, ckpt_series: str) -> None:
    """Takes the right to save a series; raises ValueError where it is taken."""

  def when_saved(self, fn: Callable[[], None]) -> None:
    """Calls a function, in the background, once all so far is saved."""

  def raise_error(self) -> None:
    """Raises what a save in the background failed with."""

  def steps(self, ckpt_series: str) -> list[int]:
    """Returns the steps of a series' checkpoints, ascending."""

  def next_step(self, ckpt_series: str, done: Collection[int]) -> int | None:
    """Returns the first step with a checkpoint and not in `done`."""

  def seed_step(self) -> int | None:
    """Returns the step of the snapshot that a new run starts from, or None."""

  def evaluated(self, logged: Callable[[], list[int]] = list) -> list[int]:
    """Returns the steps noted as evaluated; `logged()` if the note is lost."""

  def mark_evaluated(self, *steps: int) -> None:
    """Notes that steps are evaluated and their results are safe."""

  def mark_begun(self, step: int) -> None:
    """Notes that training goes on, from this step."""

  def keep_before(self, step: int, names: Collection[str]) -> Any:
    """Exempts the newest checkpoint of `latest` before a step from retention.

    Returns what names it, or None if there is none; `names` are the scalars
    that were not finite.
    """

  def mark_ended(self, step: int) -> None:
    """Notes that training has ended, at this step."""

  def ended(self) -> int | None:
    """Returns the step at which training has ended, or None."""


def is_durable(checkpointer: Any) -> TypeGuard[Durable]:
  """Returns whether a checkpointer's checkpoints outlive the process."""
  return isinstance(getattr(checkpointer, 'before_commit', None), dict)


def num_to_keep(config: Any, ckpt_series: str, experiment: Any) -> int:
  """Returns how many of the newest checkpoints of a series are kept.

  Args:
    config: the run's; an old one may lack `max_best_checkpoints_to_keep`.
    ckpt_series: the series.
    experiment: what is saved.
  """
  if ckpt_series != 'best':
    return config.max_checkpoints_to_keep
  has_key = base_config.has(config, 'max_best_checkpoints_to_keep')
  if has_key and config.max_best_checkpoints_to_keep is not None:
    return config.max_best_checkpoints_to_keep
  is_sharded = getattr(experiment, 'IS_SHARDED', False)
  return 1 if is_sharded else config.max_checkpoints_to_keep


CheckpointerFactory = Callable[[Any, str], Checkpointer]
