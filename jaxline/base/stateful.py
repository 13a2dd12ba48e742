"""`Stateful`: how an experiment declares what a checkpoint stores.

It is in `base` since `experiment` and `checkpoint` both need it.
"""

from typing import Any


class OwnedSnapshot(dict):
  """A snapshot just read: a restore may keep its arrays, no one else has them.

  Of any other it makes copies, and the devices hold the state twice meanwhile.
  """


class Stateful:
  """Declares how a checkpoint stores an object, and when it may restore it.

  The object also has JAXline's `snapshot_state` and `restore_from_snapshot`.

  Attributes:
    PER_PROCESS_ENTRIES: names in the checkpoint of values that differ between
      processes: each process saves its own. Process 0 saves the other values;
      an array over several hosts is saved by all of them.
    CHANGEABLE_ON_RESUME: paths in the config, such as
      'experiment_kwargs.config.eval_batches', of keys that do not affect
      training steps. A run may be resumed with other values of these keys and
      of the keys below them. A change of any other key in `experiment_kwargs`
      makes it another run.
    NEVER_BY_RULES: names of arrays that `config.restore_rules` never replace.
    CONFIG_CLASS: the dataclass that `base_config.read` makes of
      `experiment_kwargs.config`, or None. A checkpoint from before a field was
      added counts as made with the field's default.
    EVALUATION_IS_PURE: whether `evaluate` and `on_new_best_model` leave the
      values above as they are. Then a checkpoint of `best` names the data of
      `latest` instead of copying it, and one of them is kept by default.
  """

  PER_PROCESS_ENTRIES: tuple[str, ...] = ()
  CHANGEABLE_ON_RESUME: tuple[str, ...] = ()
  NEVER_BY_RULES: tuple[str, ...] = ()
  CONFIG_CLASS: type | None = None
  EVALUATION_IS_PURE: bool = False

  def snapshot_template(self) -> dict[str, Any]:
    """Returns the shapes and shardings of entries that are stored as arrays.

    A durable checkpoint stores such an entry without its tree structure, checks
    all its arrays against the template before it restores any, and reads them
    directly onto their devices. Other entries are stored with their structure.

    Returns:
      Name in the checkpoint -> tree of jax.ShapeDtypeStruct with shardings.
    """
    return {}

  def wants_restored(self, name: str) -> bool:
    """Returns whether a restore reads an entry or an array.

    Args:
      name: the name of an entry, or of an array in it: 'state/params/w'. An
        array that is not read arrives as a jax.ShapeDtypeStruct. An entry of
        which nothing is read is absent.
    """
    return True

  def make_room(self) -> None:
    """Frees the state that a restore replaces, once its shapes are checked."""


def live(completed: Any) -> Any:
  """Returns the program's own object of a completed experiment."""
  return vars(completed).get('_jaxline_live', completed)
