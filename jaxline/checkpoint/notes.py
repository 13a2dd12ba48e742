"""What a run notes beside its checkpoints: the files

    config.json                      the config that training goes on with
    checkpoints/ended.json           the step at which training has ended
    checkpoints/evaluated/MODE.json  the steps that are evaluated
    checkpoints/latest/STEP.keep     exempts STEP from retention, and says why

which are replaced whole.
"""

from collections.abc import Callable, Collection, Mapping
import contextlib
import json
import pathlib
import re
import threading

from absl import logging
import jax
from ml_collections import config_dict

from jaxline import base_config
from jaxline import disk
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
    # What is evaluated as last read or written, for where the note is lost.
    self._evaluated: list[int] = []
    self._is_lost = False

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
    for kept_by in keep_files(self._root / 'latest').values():
      # What was not finite in steps that are no more may come again; what was
      # kept for it stays.
      first = _nonfinite(kept_by)
      valid = {name: at for name, at in first.items() if at <= step}
      if valid != first:
        with disk.replacing(
          kept_by, kept_by.with_name(f'{kept_by.name}.new')
        ) as f:
          f.write(_lines(valid))
    folder = self._root / 'evaluated'
    with _noting:
      for path in folder.glob('*.json'):
        with contextlib.suppress(files.DamagedError):  # Evaluation reports it.
          noted = _read_steps(path)
          if any(s > step for s in noted):
            _write_steps(path, [s for s in noted if s <= step])
      path = folder / 'eval.json'
      if not path.exists() and not self.steps('latest'):
        # A new run, whatever the logs of an earlier one say.
        _write_steps(path, [])

  def mark_ended(self, step: int) -> None:
    """Notes that training has ended, for those who evaluate it."""
    if jax.process_index() == 0:
      self._root.mkdir(parents=True, exist_ok=True)
      files.write_json(self._root / 'ended.json', {'step': step})

  def ended(self) -> int | None:
    """Returns the step at which training has ended, or None.

    All hosts get the first one's answer.
    """
    step = None
    # Where it cannot be read it is asked again.
    with contextlib.suppress(files.DamagedError, OSError, KeyError, TypeError):
      step = int(files.read_json(self._root / 'ended.json')['step'])
    return distributed.of_chief(step)

  def evaluated(self, logged: Callable[[], list[int]] = list) -> list[int]:
    """Returns the steps that `mark_evaluated` noted in this mode.

    All hosts get the first one's answer.

    Args:
      logged: returns the steps in the log, which count where the note is
        missing or damaged; that is reported.
    """
    is_chief = jax.process_index() == 0
    return distributed.of_chief(self._noted(logged)[1] if is_chief else [])

  def mark_evaluated(self, *steps: int) -> None:
    """Notes that steps are evaluated and their results are safe.

    Where the note is lost, what `evaluated` returned is noted as well.
    """
    if jax.process_index() != 0 or self.reads_only:
      return
    with _noting:
      path, noted = self._noted(lambda: self._evaluated)
      # They are evaluated in ascending order. (And counted: an evaluation that
      # goes on through its data finds its place by how many there were.)
      self._evaluated = [*noted, *steps][-100_000:]
      _write_steps(path, self._evaluated)
      self._is_lost = False

  def _noted(
    self, logged: Callable[[], list[int]]
  ) -> tuple[pathlib.Path, list[int]]:
    """Returns the note of this mode, and the steps that count as evaluated."""
    mode = self._mode if self._follows else 'eval'
    path = self._root / 'evaluated' / f'{mode}.json'
    try:
      self._evaluated = _read_steps(path)
    except files.DamagedError as e:
      self._evaluated = steps = logged()
      # In a new run there is neither a note nor a log.
      if not self._is_lost and (steps or path.exists()):
        self._is_lost = True
        logging.error(
          '%s is damaged: %s. Nothing is removed from the log, by which %d'
          ' steps are evaluated%s.',
          path,
          e,
          len(steps),
          f', the last of them {steps[-1]}' if steps else '',
        )
    return path, self._evaluated

  def warn_nonfinite(self, step: int, names: list[str], text: str) -> None:
    """Warns of a step that is not finite, and keeps a checkpoint from before.

    In the background: a save of a step before it may still be being written.
    """

    def warn() -> None:
      path = self.keep_before(step, names)
      kept = f'The newest checkpoint from before is not removed: {path}.'
      none = 'There is no checkpoint from before.'
      logging.warning('%s %s', text, kept if path else none)

    self.when_saved(warn)

  def keep_before(
    self, step: int, names: Collection[str]
  ) -> pathlib.Path | None:
    """Exempts the newest checkpoint of `latest` before a step from retention.

    Called once the saves before it are complete. Names that an earlier process
    gave exempt no other checkpoint, unless the run was set back to before their
    steps.

    Args:
      step: the first step in which these scalars were not finite.
      names: of the scalars.

    Returns:
      The checkpoint; None if there was none.
    """
    series = self._root / 'latest'
    noted = {
      name: number
      for number, path in keep_files(series).items()
      for name in _nonfinite(path)
    }
    if new := [name for name in names if name not in noted]:
      # 0 if there is none: that is noted as well.
      number = max((s for s in self.steps('latest') if s < step), default=0)
      series.mkdir(parents=True, exist_ok=True)
      # Appended, since several processes may write it at once.
      with open(series / f'{number}{_KEEP}', 'ab') as f:
        f.write(_lines(dict.fromkeys(new, step)))
    else:
      number = min(noted[name] for name in names)
    checkpoint = series / str(number)
    return checkpoint if checkpoint.exists() else None


# The steps that are evaluated.


def _read_steps(path: pathlib.Path) -> list[int]:
  """Returns the steps that a note holds.

  Raises:
    files.DamagedError: it is missing, or not as it was written.
  """
  match files.read_json(path, str(path)):
    case {'steps': [*steps], **rest} if all(type(s) is int for s in steps):
      crc = files.crc_of(steps)
      if rest.get('crc', crc) == crc:  # Earlier versions wrote none.
        return steps
  raise files.DamagedError(f'{path.name} is not as it was written')


def _write_steps(path: pathlib.Path, steps: list[int]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_json(path, {'steps': steps, 'crc': files.crc_of(steps)})


# What is exempt from retention.

_KEEP = '.keep'


def keep_files(series: pathlib.Path) -> dict[int, pathlib.Path]:
  """Returns the files that exempt steps from retention, by step.

  That the file is there is what counts; its lines say why.
  """
  names = files.names_in(series)
  found = [re.fullmatch(rf'(0|[1-9][0-9]*)\{_KEEP}', name) for name in names]
  return {int(match[1]): series / match[0] for match in found if match}


def _nonfinite(path: pathlib.Path) -> dict[str, int]:
  """Returns the scalars that a file names, and their first bad steps."""
  first: dict[str, int] = {}
  text = b''
  with contextlib.suppress(*files.MISSING):
    text = path.read_bytes()
  for line in text.splitlines():
    note = None
    with contextlib.suppress(ValueError, RecursionError):  # A damaged line.
      note = json.loads(line)
    match note:
      case {'name': str(name), 'nonfinite_at': int(at)}:
        first[name] = at
  return first


def _lines(first: Mapping[str, int]) -> bytes:
  """Returns the lines of `_nonfinite`, behind one that may be cut off."""
  notes = [{'name': name, 'nonfinite_at': at} for name, at in first.items()]
  return ''.join(f'\n{json.dumps(note)}\n' for note in notes).encode()
