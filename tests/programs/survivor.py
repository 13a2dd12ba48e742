"""A small run that is killed and made to fail: see tests/survivors.py.

It is its own config file: `python survivor.py --config=survivor.py ...`. What
shall go wrong is no part of the config, which a resumed run must not change;
the environment's SURVIVOR says it, as JSON:

    step_secs: how long a step takes at least, in seconds.
    input_at, evaluate_at: from there on, it raises.
    stop_evaluate_at: from there on, an evaluation raises StopTraining.
    nan_at: number of the batch that is not a number.
    hang_at: the step that never ends.
"""

import json
import os
import sys
import threading
import time

from ml_collections import config_dict
import numpy as np

from jaxline import experiment
from jaxline import platform
from jaxline.inputs import indexed
from jaxline.metrics import console
from tests.experiments import regression
from tests.programs import events

FAULTS = json.loads(os.environ.get('SURVIVOR', '{}'))
_NEVER = 1 << 60
ROWS, BATCHES = 8, 7  # Of an epoch.


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = regression.get_run_config(steps=45, save=3, evaluation=5)
  config.max_checkpoints_to_keep = 3
  config.watchdog_secs = 60.0
  return config


class Input(indexed.ArrayInput):
  """Rows of examples, shuffled anew in each epoch of training."""

  def get_next(self):
    number = self.position() // self.batch_size
    if self.is_training and number >= FAULTS.get('input_at', _NEVER):
      raise RuntimeError(f'The input fails at batch {number}.')
    batch = super().get_next()
    if self.is_training and number == FAULTS.get('nan_at'):
      batch['x'][0, 0] = np.nan
    return batch


class Survivor(regression.Regression):
  """The regression, on data of its own."""

  def train_input(self):
    return Input(
      values=regression.examples(0, ROWS * BATCHES),
      batch_size=ROWS,
      is_training=True,
    )

  def eval_input(self):
    values = regression.examples(1, ROWS + ROWS // 2)
    return Input(values=values, batch_size=ROWS, reset_for_eval=True)

  def step(self, *, global_step, rng, writer):
    time.sleep(FAULTS.get('step_secs', 0))
    if global_step == FAULTS.get('hang_at'):
      threading.Event().wait()
    scalars = super().step(global_step=global_step, rng=rng, writer=writer)
    events.write('step', step=int(global_step) + 1)
    return scalars

  def evaluate(self, *, global_step, rng, writer):
    if global_step >= FAULTS.get('stop_evaluate_at', _NEVER):
      raise experiment.StopTraining('enough')
    if global_step >= FAULTS.get('evaluate_at', _NEVER):
      raise RuntimeError(f'The evaluation fails at step {global_step}.')
    return super().evaluate(global_step=global_step, rng=rng, writer=writer)


if __name__ == '__main__':
  events.install()
  # The tests read what the library says about itself.
  console.is_shown = lambda record: True
  platform.main(Survivor, sys.argv[1:])
