"""A writer for MLflow (`pip install -e '.[mlflow]'`).

Import this module in the module of your experiment, and set
`config.writers = ('tensorboard', 'jsonl', 'mlflow')`. If MLFLOW_TRACKING_URI is
not set, the database is `mlflow.db` in the run's directory.
"""

from collections.abc import Mapping
import os
import pathlib
import threading
import time
from typing import Any

from mlflow import entities
from mlflow import tracking

from jaxline import base_config
from jaxline.metrics import writers
from jaxline.run_directory import logs

from . import run_id

_EXPERIMENT = 'jaxline'
_lock = threading.Lock()


@writers.register('mlflow')
class MlflowWriter:
  """Logs scalars as `train/loss`, `eval/loss` ... of one run."""

  def __init__(self, config: Any, mode: str, directory: pathlib.Path):
    self._config, self._mode = config, mode
    self._client: Any = None
    self._run = ''

  def _open(self) -> None:
    """Connects on the writer's thread, at the first record."""
    directory = self._config.checkpoint_dir
    uri = os.environ.get('MLFLOW_TRACKING_URI') or (
      f'sqlite:///{logs.directory(directory)}/mlflow.db'
    )
    with _lock:  # Training and evaluation open at the same time.
      self._client = tracking.MlflowClient(uri)
      self._run = run_id.of(directory, 'mlflow', self._begin)

  def _begin(self) -> str:
    """Creates the run, and returns its id."""
    found = self._client.get_experiment_by_name(_EXPERIMENT)
    experiment = (
      found.experiment_id
      if found
      else self._client.create_experiment(_EXPERIMENT)
    )
    name = pathlib.Path(self._config.checkpoint_dir).name
    run = self._client.create_run(experiment, run_name=name)
    config = base_config.flat(base_config.recorded(self._config))
    params = [entities.Param(k, str(v)[:500]) for k, v in config.items()]
    for i in range(0, len(params), 100):  # The limit of a request.
      self._client.log_batch(run.info.run_id, params=params[i : i + 100])
    return run.info.run_id

  def write_scalars(self, global_step: int, scalars: Mapping[str, Any]) -> None:
    """Logs scalars by name."""
    if self._client is None:
      self._open()
    now = int(1000 * time.time())
    self._client.log_batch(
      self._run,
      metrics=[
        entities.Metric(f'{self._mode}/{name}', value, now, int(global_step))
        for name, value in scalars.items()
      ],
    )
