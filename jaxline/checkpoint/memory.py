"""Checkpoints in this process's memory: for tests and trials."""

import collections
import threading
from typing import Any, NamedTuple

from absl import logging
import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np

from jaxline.checkpoint import base


class SnapshotNT(NamedTuple):
  """One checkpoint: a number, and a ConfigDict of what was saved."""

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


def _freeze(x: Any) -> Any:
  """Returns a copy of a leaf that no later step can change."""
  if isinstance(x, jax.Array):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return jax.random.wrap_key_data(
        _freeze(jax.random.key_data(x)), impl=jax.random.key_impl(x)
      )
    if not x.is_fully_addressable:
      return jax.jit(jnp.copy, out_shardings=x.sharding)(x)
    # device_get on a CPU gives a view of the device's buffer, which the next
    # step may donate and overwrite.
    return np.array(x)
  return x.copy() if isinstance(x, np.ndarray) else x


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
    # Not a nested ConfigDict: names of weights may hold dots.
    nest = config_dict.ConfigDict(type_safe=False, convert_dict=False)
    for key, value in self.get_experiment_state(ckpt_series).items():
      if key == 'experiment_module':
        value = value.snapshot_state()
      nest[key] = jax.tree.map(_freeze, value)
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
    snapshot = history[-1].pickle_nest
    saved = snapshot.to_dict() if hasattr(snapshot, 'to_dict') else snapshot
    # A copy, so that nothing done to the live state reaches the snapshot.
    saved = {key: jax.tree.map(_freeze, value) for key, value in saved.items()}
    if missing := sorted(set(state) - set(saved)):
      raise ValueError(
        f'Checkpoint {history[-1].id} of series {ckpt_series!r} lacks'
        f' {missing}; it holds {sorted(saved)}.'
      )
    for key in state:
      if key == 'experiment_module':
        state[key].restore_from_snapshot(saved[key])
      else:
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
  counts = collections.Counter(
    {name: len(series.history) for name, series in _checkpoints().items()}
  )
  return sorted(name for name, count in counts.items() if count)
