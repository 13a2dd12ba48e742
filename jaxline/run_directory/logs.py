"""The writer of a run, whose files are in the run's directory."""

from typing import Any

import jax

from jaxline.metrics import fingerprints
from jaxline.metrics import writers
from jaxline.run_directory import spool


class RunWriter(writers.MetricWriter):
  """Writes to the backends of `config.writers`.

  Their files are below `config.checkpoint_dir/<mode>`; each host but the first
  has a directory of its own there.
  """

  def __init__(self, config: Any, mode: str):
    host = jax.process_index()
    folder = f'{mode}/host_{host}' if host else mode
    directory = spool.fetch(config.checkpoint_dir, folder)
    names = config.writers
    made = [writers.make(name, config, mode, directory) for name in names]
    if config.fingerprint and mode == 'train':
      made.append(fingerprints.FingerprintWriter(directory / fingerprints.FILE))
    super().__init__(*made)
