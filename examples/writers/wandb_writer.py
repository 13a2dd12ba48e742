"""A writer for Weights & Biases (`pip install -e '.[wandb]'`).

Import this module in the module of your experiment, and set
`config.writers = ('tensorboard', 'jsonl', 'wandb')`. You can set the variables
of W&B, such as WANDB_MODE=offline, WANDB_PROJECT and WANDB_ENTITY.
"""

from collections.abc import Mapping
import os
import pathlib
import threading
from typing import Any
import uuid

import wandb

from jaxline import base_config
from jaxline.metrics import writers
from jaxline.run_directory import logs

from . import run_id

_lock = threading.Lock()
# Maps a directory to its open run, to which training and evaluation write.
_runs: dict[str, Any] = {}
_users: dict[str, int] = {}  # Maps a directory to the number of its writers.


@writers.register('wandb')
class WandbWriter:
  """Logs scalars as `train/loss`, `eval/loss` ... over `step`."""

  def __init__(self, config: Any, mode: str, directory: pathlib.Path):
    self._config, self._mode = config, mode
    self._key = config.checkpoint_dir
    with _lock:
      _users[self._key] = _users.get(self._key, 0) + 1

  def _open(self) -> Any:
    """Returns the run, which the writer's thread opens at its first record."""
    with _lock:
      if self._key not in _runs:
        _runs[self._key] = run = wandb.init(
          dir=logs.directory(self._key),
          id=run_id.of(self._key, 'wandb', lambda: uuid.uuid4().hex[:8]),
          resume='allow',
          project=os.environ.get('WANDB_PROJECT', 'jaxline'),
          name=pathlib.Path(self._key).name,
          config=base_config.recorded(self._config),
        )
        # W&B's step counter must increase, but an evaluation logs a step again.
        run.define_metric('*', step_metric='step')
      return _runs[self._key]

  def write_scalars(self, global_step: int, scalars: Mapping[str, Any]) -> None:
    """Logs scalars by name."""
    named = {f'{self._mode}/{name}': value for name, value in scalars.items()}
    self._open().log({'step': int(global_step), **named})

  def close(self) -> None:
    """Ends the run if this is its last writer."""
    with _lock:
      _users[self._key] -= 1
      if not _users[self._key] and self._key in _runs:
        _runs.pop(self._key).finish()
