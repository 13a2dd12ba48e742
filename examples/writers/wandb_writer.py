"""Weights & Biases as a writer (`pip install -e '.[wandb]'`).

Import this module in your experiment's, and set
`config.writers = ('tensorboard', 'jsonl', 'wandb')`. Variables of W&B hold:
WANDB_MODE=offline, WANDB_PROJECT, WANDB_ENTITY.
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
# Directory -> the open run, and how many writers use it: training and
# evaluation write to one run.
_runs: dict[str, Any] = {}
_users: dict[str, int] = {}


@writers.register('wandb')
class WandbWriter:
  """Logs scalars as `train/loss`, `eval/loss` ... over `step`."""

  def __init__(self, config: Any, mode: str, directory: pathlib.Path):
    self._config, self._mode = config, mode
    self._key = config.checkpoint_dir
    with _lock:
      _users[self._key] = _users.get(self._key, 0) + 1

  def _open(self) -> Any:
    """Returns the run. Made at the first record, on the writer's thread."""
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
        # Its own steps must rise, and an evaluation comes after the step.
        run.define_metric('*', step_metric='step')
      return _runs[self._key]

  def write_scalars(self, global_step: int, scalars: Mapping[str, Any]) -> None:
    """Logs named numbers."""
    named = {f'{self._mode}/{name}': value for name, value in scalars.items()}
    self._open().log({'step': int(global_step), **named})

  def close(self) -> None:
    """Ends the run, after its last writer."""
    with _lock:
      _users[self._key] -= 1
      if not _users[self._key] and self._key in _runs:
        _runs.pop(self._key).finish()
