"""A writer for Aim (`pip install -e '.[aim]'`).

Import this module in the module of your experiment, and set
`config.writers = ('tensorboard', 'jsonl', 'aim')`. The repository is `.aim` in
the run's directory, unless AIM_REPO names a directory or an `aim://` server.
"""

from collections.abc import Mapping
import os
import pathlib
import threading
from typing import Any

import aim

from jaxline import base_config
from jaxline.metrics import writers
from jaxline.run_directory import logs

from . import run_id

_lock = threading.Lock()
# Maps a directory to its open run, to which training and evaluation write.
_runs: dict[str, aim.Run] = {}
_users: dict[str, int] = {}  # Maps a directory to the number of its writers.


@writers.register('aim')
class AimWriter:
  """Logs scalars by name, with the context {'subset': 'train'} or 'eval'."""

  def __init__(self, config: Any, mode: str, directory: pathlib.Path):
    self._config, self._mode = config, mode
    self._key = config.checkpoint_dir
    with _lock:
      _users[self._key] = _users.get(self._key, 0) + 1

  def _open(self) -> aim.Run:
    """Returns the run, which the writer's thread opens at its first record."""
    with _lock:
      if self._key not in _runs:
        options = {
          'repo': os.environ.get('AIM_REPO') or str(logs.directory(self._key)),
          # These two options save two threads.
          'capture_terminal_logs': False,
          'system_tracking_interval': None,
        }
        new: list[aim.Run] = []

        def make() -> str:
          new.append(aim.Run(experiment='jaxline', **options))
          return new[0].hash

        found = run_id.of(self._key, 'aim', make)
        run = new[0] if new else aim.Run(found, **options)
        run.name = pathlib.Path(self._key).name
        run['config'] = base_config.recorded(self._config)
        _runs[self._key] = run
      return _runs[self._key]

  def write_scalars(self, global_step: int, scalars: Mapping[str, Any]) -> None:
    """Logs scalars by name."""
    run, context = self._open(), {'subset': self._mode}
    with _lock:
      run.track(dict(scalars), step=int(global_step), context=context)

  def close(self) -> None:
    """Ends the run if this is its last writer."""
    with _lock:
      _users[self._key] -= 1
      if not _users[self._key] and self._key in _runs:
        _runs.pop(self._key).close()
