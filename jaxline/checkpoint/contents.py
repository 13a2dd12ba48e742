"""What a checkpoint holds of a live state: arrays in host memory, and JSON."""

from collections.abc import Mapping
import contextlib
import functools
import importlib.metadata
import platform
import time
from typing import Any

from absl import logging
import jax

import jaxline
from jaxline.checkpoint import files
from jaxline.checkpoint import reader
from jaxline.checkpoint import storage
from jaxline.checkpoint import structure


class Encoder:
  """Makes what is written of the live states of a run."""

  def __init__(self, recorded: Any, allow_pickle: bool):
    """Makes the encoder.

    Args:
      recorded: the run's config, as JSON.
      allow_pickle: whether to pickle what cannot be described.
    """
    self._recorded = recorded
    self._allow_pickle = allow_pickle
    self._pickled: set[str] = set()

  def content(
    self, ckpt_series: str, state: Any, all_hosts: bool
  ) -> storage.Content:
    """Copies a live state to the host, and describes it.

    Args:
      ckpt_series: the series.
      state: the live state.
      all_hosts: whether each process keeps its own
        NON_BROADCAST_CHECKPOINT_ATTRS.

    Raises:
      TypeError: something in it can only be pickled.
    """
    arrays: dict[str, Any] = {}
    entries = {k: x for k, x in state.items() if k != 'experiment_module'}
    entries = self._encode(entries, arrays, 'run/')
    module, per_process, whole = {}, {}, {}
    experiment = state.get('experiment_module')
    if experiment is not None:
      by_leaves = reader.template(experiment)
      own = reader.per_process(experiment, all_hosts)
      for name, value in experiment.snapshot_state().items():
        if name in by_leaves:
          arrays.update(reader.prefixed(value, name))
          module[name] = {'leaves': True}
        elif name in own:
          small: dict[str, Any] = {}
          per_process[name] = {
            'structure': self._encode({name: value}, small)[name],
            'arrays': storage.to_json(small),
          }
        else:
          whole[name] = value
    for name, json in self._encode(whole, arrays).items():
      module[name] = {'structure': json}
    stored, described = storage.store(arrays, storage.to_host(arrays))
    record = {
      'format': files.FORMAT,
      'series': ckpt_series,
      'step': int(state['global_step']),
      'time': time.time(),
      'processes': jax.process_count(),
      'devices': jax.device_count(),
      'versions': _versions(),
      'config': self._recorded,
      'entries': entries,
      'module': module,
      'arrays': described,
    }
    return storage.Content(stored, record, per_process)

  def added(self, state: Any) -> dict[str, Any]:
    """Returns what a best checkpoint has besides the evaluated one, as JSON."""
    saved = ('global_step', 'train_step_rng', 'experiment_module')
    arrays: dict[str, Any] = {}
    more = {key: x for key, x in state.items() if key not in saved}
    entries = self._encode(more, arrays, 'run/')
    return {'entries': entries, 'arrays': storage.to_json(arrays)}

  def _encode(
    self, values: Mapping[str, Any], arrays: dict[str, Any], prefix: str = ''
  ) -> dict[str, Any]:
    """Splits values into arrays and JSON.

    Args:
      values: name -> value.
      arrays: name -> array; those of the values are added.
      prefix: of their names.

    Returns:
      Name -> JSON.
    """
    described, pickled = {}, set()
    for key, value in values.items():
      name = f'{prefix}{key}'
      encoded = structure.encode(value, name, allow_pickle=self._allow_pickle)
      if double := sorted(set(encoded.arrays) & set(arrays)):
        raise ValueError(
          f'Two arrays of the checkpoint have the name {double[0]!r}; rename'
          ' one of the entries.'
        )
      arrays.update(encoded.arrays)
      pickled.update(encoded.pickled)
      described[key] = encoded.structure
    if pickled - self._pickled:  # Once is enough.
      self._pickled |= pickled
      logging.warning(
        'Pickled into the checkpoint, as config.checkpoint_allow_pickle'
        ' permits: %s.',
        sorted(pickled),
      )
    return described


@functools.cache  # To look them up takes milliseconds.
def _versions() -> dict[str, str]:
  names = ('jax', 'jaxlib', 'orbax-checkpoint', 'numpy', 'optax')
  versions = {'jaxline': jaxline.__version__}
  versions['python'] = platform.python_version()
  for name in names:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return versions
