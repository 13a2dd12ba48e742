"""Small files that a run keeps beside its checkpoints:

    config.json                      the config that training goes on with
    checkpoints/ended.json           the step at which training has ended, why
    checkpoints/evaluated/MODE.json  the steps that are evaluated, and the
                                     values that early stopping compares

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
        noted, values = _read_note(path)
        if any(s > step for s in noted):
          kept = [x for x in values if x[0] <= step]
          _write_note(path, [s for s in noted if s <= step], kept)

  def mark_ended(self, step: int, why: str = '') -> None:
    """Notes that training has ended, for those who evaluate it."""
    why = why or self._read_end()[1]  # Of an evaluation beside it.
    if jax.process_index() == 0 and not self.reads_only:
      self._root.mkdir(parents=True, exist_ok=True)
      note = {'step': int(step)} | ({'why': why} if why else {})
      files.write_json(self._root / 'ended.json', note)

  def why_to_stop(self, step: int) -> list[str]:
    """Returns arguments of `StopTraining` if the notes say to end, or []."""
    noted, why = self._read_end()
    if noted is not None and noted <= step and why:
      return [why, f'remove {self._root}/ended.json']
    return no_gain(self._config, self.values(step))

  def ended(self) -> int | None:
    """Returns the step at which training has ended, or None."""
    return self._read_end()[0]

  def _read_end(self) -> tuple[int | None, str]:
    """Returns step and reason of an end; all hosts get the first one's."""
    note: Any = {}
    # Where it cannot be read it is asked again.
    with contextlib.suppress(files.DamagedError, OSError):
      note = files.read_json(self._root / 'ended.json')
    return distributed.of_chief((note.get('step'), note.get('why', '')))

  @property
  def _note(self) -> pathlib.Path:
    mode = self._mode if self._follows else 'eval'
    return self._root / 'evaluated' / f'{mode}.json'

  def evaluated(self) -> list[int]:
    """Returns the steps that `mark_evaluated` noted in this mode.

    All hosts get the first one's answer.
    """
    is_chief = jax.process_index() == 0
    return distributed.of_chief(_read_note(self._note)[0] if is_chief else [])

  def values(self, until: float) -> list[tuple[int, float]]:
    """Returns noted steps and their values of `config.early_stop.metric`."""
    metric, patience, _ = early_stop(self._config)
    if patience is None:
      return []
    values = [x for x in _read_note(self._note)[1] if x[1] == metric]
    return distributed.of_chief([(s, x) for s, _, x in values if s <= until])

  def mark_evaluated(self, step: int, value: float | None = None) -> None:
    """Notes that a step is evaluated and its results are safe."""
    if jax.process_index() != 0 or self.reads_only:
      return
    with _noting:
      # They are evaluated in ascending order. (And counted: an evaluation that
      # goes on through its data finds its place by how many there were.)
      noted, values = _read_note(self._note)
      if value is not None:
        values.append([step, early_stop(self._config)[0], value])
      _write_note(self._note, [*noted, step][-100_000:], values)


def early_stop(config: Any) -> tuple[str, int | None, float]:
  """Returns metric, patience and least gain of early stopping."""
  given = config.early_stop
  metric = given.get('metric') or config.best_model_eval_metric
  return metric, given.get('patience'), given.get('min_delta', 0.0)


def no_gain(config: Any, values: Iterable[tuple[int, float]]) -> list[str]:
  """Returns arguments of `StopTraining` if early stopping ends a run, or []."""
  metric, patience, min_delta = early_stop(config)
  sign = 1 if config.best_model_eval_metric_higher_is_better else -1
  best, at, since = -math.inf, None, 0
  for step, value in sorted(values):
    since += 1
    if sign * value > best + min_delta:  # A NaN is no gain.
      best, at, since = sign * value, step, 0
    elif patience is not None and since >= patience:
      return [
        f'{metric!r} has not improved by more than {min_delta:g} over that of'
        f' step {at} in {since} evaluations.',
        'raise config.early_stop.patience, or set it to None',
      ]
  return []


def _read_note(path: pathlib.Path) -> tuple[list[int], list[Any]]:
  """Returns the steps in a note, and its values: (step, metric, value).

  Raises:
    files.RefusedError: it is not as it was written.
  """
  try:
    if not path.exists():
      return [], []
    match files.read_json(path):
      case {'steps': [*steps], 'crc': int(crc), **rest}:
        values: list[Any] = rest.get('values', [])  # type: ignore[assignment]
        if crc == files.crc_of(steps + values):
          return steps, values
  except files.DamagedError:
    pass
  raise files.RefusedError(
    f'{path} is not as it was written. Remove it to evaluate the checkpoints'
    ' that are kept again; their records in the log of evaluation are replaced.'
  )


def _write_note(path: pathlib.Path, steps: list[int], values: Any) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  note = {'steps': steps, 'crc': files.crc_of(steps + values)}
  files.write_json(path, note | ({'values': values} if values else {}))
