"""Small files that a run keeps beside its checkpoints:

    config.json                      the config that training goes on with
    checkpoints/ended.json           the step at which training has ended
    checkpoints/evaluated/MODE.json  the steps that are evaluated

which are replaced whole.
"""

import contextlib
import pathlib
import threading

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
        noted = _read_steps(path)
        if any(s > step for s in noted):
          _write_steps(path, [s for s in noted if s <= step])

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

  @property
  def _note(self) -> pathlib.Path:
    mode = self._mode if self._follows else 'eval'
    return self._root / 'evaluated' / f'{mode}.json'

  def evaluated(self) -> list[int]:
    """Returns the steps that `mark_evaluated` noted in this mode.

    All hosts get the first one's answer.
    """
    is_chief = jax.process_index() == 0
    return distributed.of_chief(_read_steps(self._note) if is_chief else [])

  def mark_evaluated(self, *steps: int) -> None:
    """Notes that steps are evaluated and their results are safe."""
    if jax.process_index() != 0 or self.reads_only:
      return
    with _noting:
      # They are evaluated in ascending order. (And counted: an evaluation that
      # goes on through its data finds its place by how many there were.)
      noted = [*_read_steps(self._note), *steps]
      _write_steps(self._note, noted[-100_000:])


def _read_steps(path: pathlib.Path) -> list[int]:
  """Returns the steps that a note holds; none where there is no note.

  Raises:
    files.RefusedError: it is not as it was written.
  """
  try:
    if not path.exists():
      return []
    match files.read_json(path):
      case {'steps': [*steps], 'crc': int(crc)} if crc == files.crc_of(steps):
        return steps
  except files.DamagedError:
    pass
  raise files.RefusedError(
    f'{path} is not as it was written. Remove it to evaluate the checkpoints'
    ' that are kept again; their records in the log of evaluation are replaced.'
  )


def _write_steps(path: pathlib.Path, steps: list[int]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_json(path, {'steps': steps, 'crc': files.crc_of(steps)})
