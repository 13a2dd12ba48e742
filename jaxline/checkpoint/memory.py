"""Checkpoints in this process's memory: for tests and trials."""

import threading
from typing import Any, NamedTuple

from absl import logging
import jax
from ml_collections import config_dict

from jaxline import devices
from jaxline.checkpoint import base


class SnapshotNT(NamedTuple):
  """One checkpoint: a number, and what was saved.

  `pickle_nest` has `to_dict()`, and its entries are attributes as well, as
  with a ConfigDict; unlike there, names of weights may hold dots.
  """

  id: int
  pickle_nest: Any


class CheckpointNT(NamedTuple):
  """One series: a thread-local holding its live `state`, and its snapshots."""

  active: threading.local
  history: list[SnapshotNT]


# All checkpoints of the process by series, so that a training and an
# evaluation thread share them. Experiments written against JAXline read, write
# and rebind this name on `jaxline.utils`: `_checkpoints` looks it up there.
GLOBAL_CHECKPOINT_DICT: dict[str, CheckpointNT] = {}

# Guards the histories: one thread saves while another restores.
_lock = threading.RLock()


def _checkpoints() -> dict[str, CheckpointNT]:
  from jaxline import utils  # utils imports this module.

  return utils.GLOBAL_CHECKPOINT_DICT


class _ModuleState(base.ExperimentState):
  """The snapshot of an experiment, which also has the experiment's attributes.

  JAXline once kept the experiment itself in `pickle_nest`, and programs that
  save it on their own read `get_first(module._params)`.
  """

  def __init__(self, experiment: Any):
    """Copies the experiment's snapshot."""
    snapshot = dict(experiment.snapshot_state())
    super().__init__(_nest(jax.tree.map(devices.freeze, snapshot)))
    # Beside the entries: attribute -> entry, as in CHECKPOINT_ATTRS.
    self.__dict__['attributes'] = dict(experiment.CHECKPOINT_ATTRS)

  def __getattr__(self, name: str) -> Any:
    attributes = self.__dict__.get('attributes', {})  # None while unpickled.
    if attributes.get(name) in self:
      value = self.to_dict()[attributes[name]]
      return jax.tree.map(lambda x: x[None], value)
    return super().__getattr__(name)


def _nest(tree: Any) -> Any:
  """Gives dicts inside dicts attribute access."""
  if type(tree) is not dict:
    return tree
  return base.ExperimentState({key: _nest(x) for key, x in tree.items()})


def _entries(nest: Any) -> dict[str, Any]:
  """Returns what a `pickle_nest` holds, as plain dicts and as a copy.

  Args:
    nest: our own, a ConfigDict, or a dict whose `experiment_module` may be an
      experiment: programs that save and restore on their own write all three.
  """
  entries = nest.to_dict() if hasattr(nest, 'to_dict') else dict(nest)
  module: Any = entries.get('experiment_module')
  if hasattr(module, 'snapshot_state'):
    entries['experiment_module'] = module.snapshot_state()
  # A copy, so that nothing done to the live state reaches the snapshot.
  return jax.tree.map(devices.freeze, entries)


class InMemoryCheckpointer:
  """Keeps the newest checkpoints of each series in this process.

  Implements `base.Checkpointer`.
  """

  def __init__(self, config: config_dict.ConfigDict, mode: str):
    """Reads `config.max_checkpoints_to_keep`; all modes share the series."""
    del mode
    self._max_checkpoints_to_keep = config.max_checkpoints_to_keep

  def get_experiment_state(self, ckpt_series: str) -> Any:
    """Returns the calling thread's live state of the series."""
    with _lock:
      checkpoints = _checkpoints()
      if ckpt_series not in checkpoints:
        checkpoints[ckpt_series] = CheckpointNT(threading.local(), [])
      active = checkpoints[ckpt_series].active
    if not hasattr(active, 'state'):
      active.state = base.ExperimentState()
    return active.state

  def save(self, ckpt_series: str) -> None:
    """Copies the live state to host memory, as the newest checkpoint."""
    nest = base.ExperimentState()
    for key, value in self.get_experiment_state(ckpt_series).items():
      if key == 'experiment_module':
        nest[key] = _ModuleState(value)
      else:
        nest[key] = _nest(jax.tree.map(devices.freeze, value))
    with _lock:
      checkpoints = _checkpoints()
      series = checkpoints[ckpt_series]
      id_ = series.history[-1].id + 1 if series.history else 0
      history = [*series.history, SnapshotNT(id_, nest)]
      checkpoints[ckpt_series] = series._replace(
        history=history[-self._max_checkpoints_to_keep :]
      )
    logging.info('Saved checkpoint %d of series %s.', id_, ckpt_series)

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether the series has a checkpoint."""
    series = _checkpoints().get(ckpt_series)
    return series is not None and bool(series.history)

  def restore(self, ckpt_series: str) -> None:
    """Restores the newest checkpoint into the calling thread's live state.

    Raises:
      ValueError: the series has no checkpoint, or the checkpoint lacks an
        entry of the live state.
    """
    state = self.get_experiment_state(ckpt_series)
    with _lock:
      history = list(_checkpoints()[ckpt_series].history)
    if not history:
      raise ValueError(
        f'The series {ckpt_series!r} has no checkpoint to restore; there are'
        f' checkpoints of {_saved_series()}.'
      )
    saved = _entries(history[-1].pickle_nest)
    missing = sorted(set(state) - set(saved))
    if missing == ['train_step_rng']:
      # So are checkpoints that programs made for themselves.
      logging.warning(
        'Checkpoint %s of series %s has no train_step_rng: the keys of the'
        ' steps begin anew.', history[-1].id, ckpt_series,
      )  # fmt: skip
    elif missing:
      raise ValueError(
        f'Checkpoint {history[-1].id} of series {ckpt_series!r} lacks'
        f' {missing}; it holds {sorted(saved)}.'
      )
    # First, since it may refuse; then nothing else has changed yet.
    if 'experiment_module' in state:
      module = state['experiment_module']
      module.restore_from_snapshot(saved['experiment_module'])
    for key in state:
      if key in saved and key != 'experiment_module':
        state[key] = saved[key]
    logging.info(
      'Restored checkpoint %s of series %s.', history[-1].id, ckpt_series
    )

  def restore_path(self, ckpt_series: str) -> int | None:
    """Returns the number of the newest checkpoint, or None."""
    series = _checkpoints().get(ckpt_series)
    return series.history[-1].id if series and series.history else None

  def wait_for_checkpointing_to_finish(self) -> None:
    """Returns at once: `save` has finished when it returns."""


def _saved_series() -> list[str]:
  return sorted(name for name, s in _checkpoints().items() if s.history)
