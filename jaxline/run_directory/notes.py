"""Notes of evaluations, early stopping and the end of training, as files."""

from collections.abc import Iterable, Mapping
import json
import math
from typing import Any, NamedTuple
import zlib

from jaxline import errors
from jaxline.base import keys
from jaxline.run_directory import store as store_lib

ENDED = 'ended.json'


def to_bytes(value: Any) -> bytes:
  """Returns a dict as JSON with a checksum."""
  return json.dumps({**value, 'crc': crc_of(value)}).encode() + b'\n'


def unpack(name: str, raw: bytes, check: keys.Check) -> dict[str, Any]:
  """Inverts `to_bytes`.

  Raises:
    DamagedError: the checksum does not match.
    RefusedError: the checksum matches, but `check` rejects the value.
  """
  try:
    value = json.loads(raw)
    is_whole = value.pop('crc') == crc_of(value)
  except Exception:  # The file may hold any JSON.
    is_whole = False
  if not is_whole:
    raise store_lib.DamagedError(f'the checksum of {name} does not match')
  return store_lib.checked(name, value, check)


def crc_of(value: Any) -> int:
  """Returns the CRC-32 of the JSON of a value."""
  return zlib.crc32(json.dumps(value, sort_keys=True).encode())


# Maps relative paths of logs, which cannot leave the run, to lengths.
LENGTHS = keys.each(
  keys.integer(0, below=2**63),
  names=r'(?!/)(?!(.*/)?\.\.(/|$))[^\x00-\x1f]{1,1000}',
)
NUMBER = keys.Check(
  'a number',
  lambda x: isinstance(x, float) or (isinstance(x, int) and abs(x) < 2**63),
)
_END = keys.record(
  step=keys.integer(0), why=keys.optional(keys.text('a reason'))
)
_NOTE = (
  keys.integer(0),
  keys.text('the name of a metric'),
  keys.optional(NUMBER),
  keys.text('the name of data'),
  LENGTHS,
)


def _is_note(row: Any) -> bool:
  checks = zip(_NOTE, row, strict=False)  # The last fields have defaults.
  is_row = isinstance(row, list) and 1 <= len(row) <= len(_NOTE)
  return is_row and all(check.accepts(x) is not False for check, x in checks)


EVALUATED = keys.record(
  evaluated=keys.each(keys.Check('evaluations', _is_note), list)
)


class EvaluationNote(NamedTuple):
  """The record of an evaluation.

  Attributes:
    step: the evaluated step.
    metric: the name of the metric for early stopping; '' without one.
    value: the value of the metric.
    data: the name of the checkpoint's data; '' if the step has no checkpoint.
    lengths: path -> length in bytes of each log file after the evaluation.
  """

  step: int
  metric: str = ''
  value: float | None = None
  data: str = ''
  lengths: Mapping[str, int] = {}


class EarlyStop(NamedTuple):
  """The rule for ending training early, from `config.early_stop`."""

  metric: str
  patience: int | None
  min_delta: float
  target: float | None

  @property
  def is_on(self) -> bool:
    """Whether early stopping is enabled."""
    return self.patience is not None or self.target is not None


def early_stop(config: Any) -> EarlyStop:
  """Returns the rule of a config, with the default of its metric."""
  given = config.early_stop
  return EarlyStop(
    given.get('metric') or config.best_model_eval_metric,
    given.get('patience'),
    given.get('min_delta', 0.0),
    given.get('target'),
  )


def direction(config: Any) -> int:
  """Returns 1 if higher values of the metric of `best` are better, else -1."""
  return 1 if config.best_model_eval_metric_higher_is_better else -1


def check_early_stopping(
  config: Any, evaluated: Iterable[EvaluationNote]
) -> None:
  """Raises StopTraining if the evaluations so far call for early stopping."""
  rule, sign = early_stop(config), direction(config)
  metric, patience, min_delta, target = rule
  best, at, since = -math.inf, None, 0
  compared = (x for x in evaluated if rule.is_on and x.metric == metric)
  for step, _, value, *_ in compared:
    assert value is not None  # A note with a metric has a value.
    if target is not None and sign * value >= sign * target:
      raise errors.StopTraining(
        f'{metric!r} of step {step} is {value:g}, which reaches the target'
        f' {target:g}.',
        'change config.early_stop.target, or set it to None',
      )
    since += 1
    if sign * value > best + min_delta:  # A NaN never counts as a gain.
      best, at, since = sign * value, step, 0
    elif patience and since >= patience:
      raise errors.StopTraining(
        f'{metric!r} has not improved by more than {min_delta:g} since step'
        f' {at}, in {since} evaluations.',
        'raise config.early_stop.patience, or set it to None',
      )


def read_end(store: store_lib.Store) -> dict[str, Any]:
  """Returns the note of the end of a run's training, or {} before the end.

  Args:
    store: RUN/checkpoints.

  Raises:
    RefusedError: the file does not hold such a note.
  """
  raw = store.read(ENDED)
  return {} if raw is None else store_lib.checked(f'{store}/{ENDED}', raw, _END)
