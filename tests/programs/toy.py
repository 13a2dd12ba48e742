"""A toy experiment, run as a program by test_command_line.py.

Faults are injected by config: see toy_config.py.
"""

import functools
import sys
import time

from absl import app
from absl import flags

from jaxline import platform
from tests.experiments import regression


class Failure(Exception):
  """What an injected fault raises."""


def fault(config, place, step):
  """Fails where the config says so."""
  if config.fault == place and step >= config.fault_step:
    secret_of_frame = f'{place} at {step}'
    raise Failure(secret_of_frame)


class Sharded(regression.Regression):
  """The regression, with faults."""

  def __init__(self, mode, init_rng, config, *, run_config=None):
    self.config = config
    super().__init__(mode, init_rng, run_config=run_config, sharding='fsdp')

  def train_input(self):
    for number, batch in enumerate(super().train_input()):
      fault(self.config, 'input', number)
      yield batch

  def step(self, *, global_step, rng, writer):
    time.sleep(self.config.step_secs)
    fault(self.config, 'step', global_step)
    return super().step(global_step=global_step, rng=rng, writer=writer)

  def evaluate(self, *, global_step, rng, writer):
    fault(self.config, 'evaluate', global_step)
    return super().evaluate(global_step=global_step, rng=rng, writer=writer)


if __name__ == '__main__':
  _, form, *argv = sys.argv[1:]
  sys.argv[1:] = argv
  if form == 'app_run':
    flags.mark_flag_as_required('config')
    app.run(functools.partial(platform.main, Sharded))
  else:
    platform.main(Sharded, argv)
