"""Small files that a run keeps beside its checkpoints:

    config.json                      the config that training goes on with
    checkpoints/begun.json           the step from which it goes on
    checkpoints/ended.json           the step at which training has ended, why
    checkpoints/evaluated/MODE.json  evaluations, see `checkpointing.Evaluation`

Each of them is replaced whole.
"""

from collections.abc import Iterable, Mapping
import contextlib
import json
import math
import os
import secrets
import threading
from typing import Any

import jax
from ml_collections import config_dict

from jaxline import base_config
from jaxline import checkpointing
from jaxline import disk
from jaxline import distributed
from jaxline import errors
from jaxline.checkpoint import manager
from jaxline.storage import spool
from jaxline.storage import store as store_lib

BEGUN, _ENDED = 'begun.json', 'ended.json'

# A training and an evaluation thread may change the same file.
_noting = threading.Lock()


class NotingCheckpointer(checkpointing.FullCheckpointer):
  """Keeps the notes of a run: a base of the durable checkpointer."""

  def __init__(self, config: config_dict.ConfigDict, mode: str):
    """Reads the config; touches no file.

    Args:
      config: the run's, resolved.
      mode: the name of its notes of evaluation, if it follows another run.
    """
    self._config = config
    # Before the experiment is constructed, which may change its own config.
    self._recorded = base_config.recorded(config)
    self._mode = mode
    # Read at each save: the training thread reads no files.
    self._noted: tuple[Any, list[checkpointing.Evaluation]] | None = None
    self._move(config.checkpoint_dir)

  def _move(self, directory: str) -> None:
    """Makes a directory that of the run."""
    self._run = store_lib.at(directory)
    self._manifests = manager.Manifests(self._run.below('checkpoints'))
    self._store = self._manifests.store

  def steps(self, ckpt_series: str) -> list[int]:
    return self._manifests.steps(ckpt_series)

  def mark_begun(self, step: int) -> None:
    """Notes that training goes on from a step, with this config.

    Notes of evaluations of later steps are removed: those steps run again.
    """
    if jax.process_index() == 0:
      self._run.write(base_config.RECORD, disk.to_json(self._recorded))
      # Also in a bucket where equal content has an equal version.
      begun = {'step': step, 'nonce': secrets.token_hex(8)}
      self._store.write(BEGUN, disk.to_json(begun))
      self._store.delete(_ENDED)
      with _noting:
        for name in self._store.names('evaluated'):
          noted = _read_note(self._store, key := f'evaluated/{name}')
          if any(x.step > step for x in noted):
            _write_note(self._store, key, [x for x in noted if x.step <= step])
    self._read_notes()

  def mark_ended(self, step: int, why: str = '') -> None:
    if jax.process_index() == 0 and not self.reads_only:
      # An evaluation beside it may have given a reason.
      note = {'step': int(step), 'why': why or self._end().get('why', '')}
      self._store.write(_ENDED, disk.to_json(note))

  def _read_notes(self) -> None:
    """Reads what `stop_if_noted` tells the training thread."""
    if jax.process_index() == 0 and not self.follows:
      _, patience, _ = early_stop(self._config)
      self._noted = self._end(), self._own_notes() if patience else []

  def stop_if_noted(self, step: int) -> None:
    if self._noted is None:
      self._read_notes()
    end, evaluated = self._noted or ({}, [])
    end = distributed.of_chief(end)
    if end.get('why') and end['step'] <= step:
      place = f'{self._store}/{_ENDED}'
      raise errors.StopTraining(end['why'], f'remove {place}')
    if early_stop(self._config)[1] is not None:
      rows = distributed.of_chief([x[:3] for x in evaluated if x.step <= step])
      until = [checkpointing.Evaluation(*row) for row in rows]
      stop_without_gain(self._config, until)

  def ended(self) -> int | None:
    return distributed.of_chief(self._end().get('step'))

  def _end(self) -> Any:
    """Returns the note of the end, or {} if it is absent or unreadable."""
    with contextlib.suppress(ValueError, OSError):
      return json.loads(self._store.read(_ENDED) or '{}')
    return {}

  @property
  def _note(self) -> str:
    mode = self._mode if self.follows else 'eval'
    return f'evaluated/{mode}.json'

  def _own_notes(self) -> list[checkpointing.Evaluation]:
    return _read_note(self._store, self._note)

  def evaluated(self) -> list[checkpointing.Evaluation]:
    """Returns what `mark_evaluated` noted in this mode on the first host."""
    is_chief = jax.process_index() == 0
    rows = distributed.of_chief(self._own_notes() if is_chief else [])
    noted = [checkpointing.Evaluation(*row) for row in rows]
    return [x._replace(lengths=self._local(x.lengths)) for x in noted]

  def mark_evaluated(
    self, step: int, value: float | None, lengths: Mapping[str, int]
  ) -> None:
    """Notes that a step is evaluated and its results are safe."""
    if self.reads_only:
      return
    own = self._relative(lengths)
    spool.upload(self._run.url, own)
    lengths = distributed.decide(own, merged)
    if jax.process_index() != 0:
      return
    with _noting:
      # They are evaluated in ascending order. (And counted: an evaluation that
      # goes on through its data finds its place by how many there were.)
      metric = '' if value is None else early_stop(self._config)[0]
      data = self._data_of(step)
      row = checkpointing.Evaluation(step, metric, value, data, lengths)
      noted = [*self._own_notes(), row]
      _write_note(self._store, self._note, noted[-100_000:])

  def _data_of(self, step: int) -> str:
    """Returns the data of the checkpoint of an evaluated step, or ''."""
    raise NotImplementedError

  # Names of logs: relative in what is written, since a run may be moved.

  def _relative(self, lengths: Mapping[str, int]) -> dict[str, int]:
    top = spool.directory(self._run.url)
    found = {os.path.relpath(path, top): n for path, n in lengths.items()}
    return {x: n for x, n in found.items() if not x.startswith('..')}

  def _local(self, lengths: Mapping[str, int]) -> dict[str, int]:
    top = spool.directory(self._run.url)
    return {
      str(top / name): length
      for name, length in lengths.items()
      if '..' not in name.split('/')
    }


def merged(lengths: Iterable[Mapping[str, int]]) -> dict[str, int]:
  """Returns the lengths of the logs of all processes."""
  return {name: n for of_one in lengths for name, n in of_one.items()}


def early_stop(config: Any) -> tuple[str, Any, float]:
  """Returns metric, patience and least gain of early stopping."""
  given = config.early_stop
  metric = given.get('metric') or config.best_model_eval_metric
  return metric, given.get('patience'), given.get('min_delta', 0.0)


def stop_without_gain(
  config: Any, evaluated: Iterable[checkpointing.Evaluation]
) -> None:
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


def _read_note(
  store: store_lib.Store, key: str
) -> list[checkpointing.Evaluation]:
  """Returns the noted evaluations; none without a note.

  Raises:
    RefusedError: it is not as it was written.
  """
  if (raw := store.read(key)) is None:
    return []
  try:
    rows = manager.unpack(key, raw)['evaluated']
    return [checkpointing.Evaluation(*row) for row in rows]
  except (store_lib.DamagedError, LookupError, TypeError) as e:
    raise store_lib.RefusedError(
      f'{store}/{key} is not as it was written. Remove it to evaluate the'
      ' checkpoints that are kept again; their records in the log of evaluation'
      ' are replaced.'
    ) from e


def _write_note(
  store: store_lib.Store, key: str, noted: list[checkpointing.Evaluation]
) -> None:
  store.write(key, manager.pack({'evaluated': noted}))
