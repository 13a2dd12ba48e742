"""`Stateful`: an experiment's declaration of its state for checkpoints.

It is in `base` because both `experiment` and `checkpoint` need it.
"""

from typing import Any


class OwnedSnapshot(dict):
  """A snapshot whose arrays nobody else uses, so a restore may keep them.

  A restore copies the arrays of other snapshots, which takes twice the memory.
  """


class Stateful:
  """Declares how a checkpoint stores an object, and when it may restore it.

  The object needs JAXline's `snapshot_state` and `restore_from_snapshot` too.

  Attributes:
    PER_PROCESS_ENTRIES: names in the checkpoint of values that differ between
      processes, so that each process saves its own. Process 0 saves all other
      values; arrays that span several hosts are saved by all of them.
    CHANGEABLE_ON_RESUME: config paths, such as
      'experiment_kwargs.config.eval_batches', of keys that do not affect
      training steps. You may change these keys, and the keys below them, when
      you resume a run. Any other change in `experiment_kwargs` is rejected.
    NEVER_BY_RULES: names of arrays that `config.restore_rules` never replace.
    CONFIG_CLASS: the dataclass for `experiment_kwargs.config` that
      `base_config.read` builds, or None. If a checkpoint is older than a field,
      the field's default counts as its value.
    EVALUATION_IS_PURE: whether `evaluate` and `on_new_best_model` never change
      the stored values. If so, a checkpoint of `best` shares the data of
      `latest`, and only one of them is kept by default.
  """

  PER_PROCESS_ENTRIES: tuple[str, ...] = ()
  CHANGEABLE_ON_RESUME: tuple[str, ...] = ()
  NEVER_BY_RULES: tuple[str, ...] = ()
  CONFIG_CLASS: type | None = None
  EVALUATION_IS_PURE: bool = False

  def snapshot_template(self) -> dict[str, Any]:
    """Returns the shapes and shardings of entries that are trees of arrays.

    A durable checkpoint stores these entries without their tree structure. It
    checks all arrays against the template before it restores any, and reads
    them directly onto their devices. Other entries keep their structure.

    Returns:
      Name in the checkpoint -> tree of jax.ShapeDtypeStruct with shardings.
    """
    return {}

  def wants_restored(self, name: str) -> bool:
    """Returns whether a restore should read `name`.

    Args:
      name: the name of an entry, or of an array in it: 'state/params/w'. An
        array that is not read is replaced by a jax.ShapeDtypeStruct. If no
        array of an entry is read, the entry is absent.
    """
    return True

  def make_room(self) -> None:
    """Frees the state that a restore will replace, after its checks passed."""


def live(completed: Any) -> Any:
  """Returns the program's object inside a completed experiment."""
  return vars(completed).get('_jaxline_live', completed)
