"""Implements JAXline's dictionary of checkpoints, GLOBAL_CHECKPOINT_DICT.

JAXline programs save and restore through it. A run starts from a snapshot that
the program puts into it. The snapshots that a run itself adds are `Published`:
only a training of the same experiment starts from one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
import itertools
import threading
from typing import Any, NamedTuple

from absl import logging
import jax
import numpy as np

from jaxline import base_config
from jaxline.checkpoint import protocol
from jaxline.compat import experiments
from jaxline.parallel import devices


@dataclasses.dataclass(frozen=True)
class RunIdentity:
  """Identifies a run of this process by its experiment and config.

  Attributes:
    experiment: the experiment's class; None if a function constructs it. Two
      classes of the same name are equal, since notebooks rerun their cells.
    config: the config, as `base_config.recorded` returns it; None matches any.
  """

  experiment: type | None
  config: Mapping[str, Any] | None = None

  def changes(self, earlier: 'RunIdentity') -> list[str]:
    """Returns a line for each difference; [] if it is the same run."""
    names = [
      x and f'{x.__module__}:{x.__qualname__}'
      for x in (earlier.experiment, self.experiment)
    ]
    if None not in names and names[0] != names[1]:
      return [f'experiment: {names[0]} then, {names[1]} now']
    if self.config is None or earlier.config is None:
      return []
    if self.config['on_config_change'] == 'continue':
      return []
    declared = experiments.declared(self.experiment)
    changes = base_config.changes(earlier.config, self.config, declared)
    return [f'config.{change}' for change in changes]


class SnapshotNT(NamedTuple):
  """A checkpoint: its number and content.

  Like a ConfigDict, `pickle_nest` has `to_dict()` and offers its entries as
  attributes. Unlike a ConfigDict, it allows dots in the names of weights.
  """

  id: int
  pickle_nest: Any


class Published:
  """A snapshot that a run saved; it is read on first use of `pickle_nest`.

  A copy or a pickle of it is a `SnapshotNT`. A run starts from such a copy if a
  program puts it into the dictionary.
  """

  def __init__(self, id: int, read: Callable[[], Any], of: RunIdentity):
    """Makes a snapshot.

    Args:
      id: the snapshot's number.
      read: returns the `pickle_nest`.
      of: the training that saved it.
    """
    self.id, self._read, self.of = id, read, of

  @functools.cached_property
  def pickle_nest(self) -> Any:
    """The content; read once, or twice if two threads start together."""
    return self._read()

  def __iter__(self) -> Iterator[Any]:
    yield self.id
    yield self.pickle_nest

  def _replace(self, /, **kwargs: Any) -> SnapshotNT:
    return SnapshotNT(*self)._replace(**kwargs)

  def __reduce__(self) -> Any:
    return SnapshotNT, tuple(self)


class CheckpointNT(NamedTuple):
  """A series: a thread-local that holds the live `state`, and its snapshots."""

  active: threading.local
  history: list[SnapshotNT | Published]


# Maps series to the checkpoints of the process, which the training and the
# evaluation thread share. JAXline's experiments read, write and rebind this
# name on `jaxline.utils`, which then rebinds it in this module.
GLOBAL_CHECKPOINT_DICT: dict[str, CheckpointNT] = {}


class _ModuleState(protocol.ExperimentState):
  """An experiment's snapshot that has the experiment's attributes too.

  JAXline once kept the experiment itself in `pickle_nest`. Programs with their
  own way of saving read, for example, `get_first(module._params)`.
  """

  def __init__(
    self, snapshot: Mapping[str, Any], attributes: Mapping[str, str]
  ):
    super().__init__(_nest(dict(snapshot)))
    self.__dict__['attributes'] = dict(attributes)  # It is not an entry.

  def __getattr__(self, name: str) -> Any:
    attributes = self.__dict__.get('attributes', {})  # Unpickling sets it late.
    if attributes.get(name) in self:
      value = self.to_dict()[attributes[name]]
      return jax.tree.map(lambda x: x[None], value)
    return super().__getattr__(name)


def _nest(tree: Any) -> Any:
  """Gives nested dicts attribute access."""
  if type(tree) is not dict:
    return tree
  return protocol.ExperimentState({key: _nest(x) for key, x in tree.items()})


def nest_of(
  entries: Mapping[str, Any], attributes: Mapping[str, str]
) -> protocol.ExperimentState:
  """Builds the `pickle_nest` of entries, which nobody may modify afterwards.

  Args:
    entries: the experiment state's entries, with the experiment's snapshot.
    attributes: the experiment's CHECKPOINT_ATTRS.
  """
  nest = _nest(dict(entries))
  if 'experiment_module' in nest:
    module = _ModuleState(entries['experiment_module'], attributes)
    nest['experiment_module'] = module
  return nest


def publish(ckpt_series: str, snapshot: Published, keep: int = 1) -> None:
  """Adds a snapshot to a series, and keeps the newest `keep` of them."""
  series = add_series(ckpt_series)
  history = [*series.history, snapshot][-keep:]
  GLOBAL_CHECKPOINT_DICT[ckpt_series] = series._replace(history=history)


def add_series(ckpt_series: str) -> CheckpointNT:
  """Returns a series of the dictionary; adds it if it is missing."""
  # Add it atomically, since two threads may do so at the same time.
  new = CheckpointNT(threading.local(), [])
  return GLOBAL_CHECKPOINT_DICT.setdefault(ckpt_series, new)


def seed(ckpt_series: str) -> SnapshotNT | None:
  """Returns the program's snapshot from which a run starts, or None."""
  found = newest(ckpt_series)
  return None if isinstance(found, Published) else found


def forget_published() -> None:
  """Removes the newest published snapshot of each series and all before it.

  Snapshots that the program has added since then are kept.
  """
  checkpoints = GLOBAL_CHECKPOINT_DICT
  for name, series in list(checkpoints.items()):
    newest_first = reversed(series.history)
    newer = itertools.takewhile(
      lambda snapshot: not isinstance(snapshot, Published), newest_first
    )
    checkpoints[name] = series._replace(history=[*newer][::-1])


def step_of(snapshot: SnapshotNT | Published) -> int:
  """Returns the step of a snapshot; -1 if it has none."""
  step = snapshot.pickle_nest.get('global_step', -1)
  return int(np.ravel(step)[0])  # Early JAXline versions have one per device.


def entries_of(
  snapshot: SnapshotNT | Published, ckpt_series: str, keys: Iterable[str]
) -> dict[str, Any]:
  """Returns a copy of a snapshot's entries, as plain dicts.

  Args:
    snapshot: a snapshot whose `pickle_nest` is ours, a ConfigDict, or a dict
      whose `experiment_module` may be an experiment.
    ckpt_series: the series.
    keys: the entries that it must have; only `train_step_rng` may be missing.

  Raises:
    ValueError: an entry is missing.
  """
  nest = snapshot.pickle_nest
  entries = dict(nest.to_dict() if hasattr(nest, 'to_dict') else nest)
  if 'global_step' in entries:
    entries['global_step'] = step_of(snapshot)
  module: Any = entries.get('experiment_module')
  if hasattr(module, 'snapshot_state'):
    entries['experiment_module'] = module.snapshot_state()
  missing = sorted(set(keys) - set(entries) - {protocol.OPTIONAL})
  if missing == ['train_step_rng']:
    # JAXline programs make such snapshots.
    logging.warning(
      'Checkpoint %s of series %s has no train_step_rng; the steps get new'
      ' random keys.', snapshot.id, ckpt_series,
    )  # fmt: skip
  elif missing:
    raise ValueError(
      f'Checkpoint {snapshot.id} of series {ckpt_series!r} lacks'
      f' {missing}; it holds {sorted(entries)}.'
    )
  # Copy, so that changes of the live state cannot reach the snapshot.
  return jax.tree.map(devices.freeze, entries)


def newest(ckpt_series: str) -> SnapshotNT | Published | None:
  """Returns the newest snapshot of a series, or None."""
  history = history_of(ckpt_series)
  return history[-1] if history else None


def history_of(ckpt_series: str) -> list[SnapshotNT | Published]:
  """Returns the snapshots of a series, oldest first."""
  series = GLOBAL_CHECKPOINT_DICT.get(ckpt_series)
  return list(series.history) if series else []
