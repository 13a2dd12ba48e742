"""Small files that a run keeps beside its checkpoints:

    config.json                      the config that training goes on with
    checkpoints/ended.json           the step at which training has ended, why
    checkpoints/evaluated/MODE.json  evaluations and their value for early stop

which are replaced whole.
"""

from collections.abc import Iterable
import contextlib
import math
import pathlib
import threading
from typing import Any

import jax
from ml_collections import config_dict

from jaxline import base_config
from jaxline import distributed
from jaxline import errors
from jaxline.checkpoint import base
from jaxline.checkpoint import files

# A training and an evaluation thread may change the same file.
_noting = threading.Lock()


class NotingCheckpointer(base.FullCheckpointer):
  """The part of a checkpointer on disk that keeps the notes of its run."""

  def __init__(self, config: config_dict.ConfigDict, mode: str):
    """Reads the config; touches no file.

    Args:
      config: the run's, resolved.
      mode: one that begins with 'eval' only reads the series `latest`.
    """
    self._config = config
    # Before the experiment is constructed, which may change its own config.
    self._recorded = base_config.recorded(config)
    self._mode = mode
    self._follows = mode.startswith('eval')
    self._root = files.root(config.checkpoint_dir)

  def steps(self, ckpt_series: str) -> list[int]:
    """Returns the steps of a series' checkpoints, ascending."""
    return files.steps(self._root / ckpt_series)

  def mark_begun(self, step: int) -> None:
    """Notes that training goes on from a step, with this config.

    What was evaluated of later steps, which are no more, will be anew.
    """
    if jax.process_index() != 0:
      return
    self._root.mkdir(parents=True, exist_ok=True)
    files.write_json(self._root.parent / 'config.json', self._recorded)
    (self._root / 'ended.json').unlink(missing_ok=True)
    folder = self._root / 'evaluated'
    with _noting:
      for path in folder.glob('*.json'):
        noted = _read_note(path)
        if any(s > step for s, _, _ in noted):
          _write_note(path, [x for x in noted if x[0] <= step])

  def mark_ended(self, step: int, why: str = '') -> None:
    """Notes that training has ended, for those who evaluate it."""
    if jax.process_index() == 0 and not self.reads_only:
      self._root.mkdir(parents=True, exist_ok=True)
      # An evaluation beside it may have given a reason.
      note = {'step': int(step), 'why': why or self._end().get('why', '')}
      files.write_json(self._root / 'ended.json', note)

  def stop_if_noted(self, step: int) -> None:
    """Raises StopTraining in all processes if the notes end it by a step."""
    end = distributed.of_chief(self._end())
    if end.get('why') and end['step'] <= step:
      raise errors.StopTraining(end['why'], f'remove {self._root}/ended.json')
    if early_stop(self._config)[1] is not None:
      until = [x for x in self.evaluated() if x[0] <= step]
      stop_without_gain(self._config, until)

  def ended(self) -> int | None:
    """Returns the step at which training has ended, or None."""
    return distributed.of_chief(self._end().get('step'))

  def _end(self) -> Any:
    """Returns this host's `ended.json`, or an empty dict."""
    # Where it cannot be read it is asked again.
    with contextlib.suppress(files.DamagedError, OSError):
      return files.read_json(self._root / 'ended.json')
    return {}

  @property
  def _note(self) -> pathlib.Path:
    mode = self._mode if self._follows else 'eval'
    return self._root / 'evaluated' / f'{mode}.json'

  def evaluated(self) -> list[tuple[int, str, float | None]]:
    """Returns what `mark_evaluated` noted in this mode on the first host."""
    is_chief = jax.process_index() == 0
    return distributed.of_chief(_read_note(self._note) if is_chief else [])

  def mark_evaluated(self, step: int, value: float | None = None) -> None:
    """Notes that a step is evaluated and its results are safe."""
    if jax.process_index() != 0 or self.reads_only:
      return
    with _noting:
      # They are evaluated in ascending order. (And counted: an evaluation that
      # goes on through its data finds its place by how many there were.)
      metric = '' if value is None else early_stop(self._config)[0]
      noted = [*_read_note(self._note), [step, metric, value]]
      _write_note(self._note, noted[-100_000:])


def early_stop(config: Any) -> tuple[str, Any, float]:
  """Returns metric, patience and least gain of early stopping."""
  given = config.early_stop
  metric = given.get('metric') or config.best_model_eval_metric
  return metric, given.get('patience'), given.get('min_delta', 0.0)


def stop_without_gain(config: Any, evaluated: Iterable[Any]) -> None:
  """Raises StopTraining if early stopping ends a run after evaluations."""
  metric, patience, min_delta = early_stop(config)
  sign = 1 if config.best_model_eval_metric_higher_is_better else -1
  best, at, since = -math.inf, None, 0
  compared = (x for x in evaluated if patience and x[1] == metric)
  for step, _, value in compared:
    since += 1
    if sign * value > best + min_delta:  # A NaN is no gain.
      best, at, since = sign * value, step, 0
    elif since >= patience:
      raise errors.StopTraining(
        f'{metric!r} has not improved by more than {min_delta:g} over that of'
        f' step {at} in {since} evaluations.',
        'raise config.early_stop.patience, or set it to None',
      )


def _read_note(path: pathlib.Path) -> list[Any]:
  """Returns the noted evaluations as [step, metric, value]; [] without a note.

  Raises:
    files.RefusedError: it is not as it was written.
  """
  try:
    if not path.exists():
      return []
    match files.read_json(path):
      case {'evaluated': [*noted], 'crc': int(crc)} if crc == files.crc_of(
        noted
      ):
        return noted
  except files.DamagedError:
    pass
  raise files.RefusedError(
    f'{path} is not as it was written. Remove it to evaluate the checkpoints'
    ' that are kept again; their records in the log of evaluation are replaced.'
  )


def _write_note(path: pathlib.Path, noted: list[Any]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_json(path, {'evaluated': noted, 'crc': files.crc_of(noted)})
