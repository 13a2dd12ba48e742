"""Toy experiments in both styles, run as programs by test_command_line.py.

Faults are injected by config: see toy_config.py.
"""

import functools
import sys
import time

from absl import app
from absl import flags
import jax
import jax.numpy as jnp

from jaxline import experiment
from jaxline import platform
from jaxline import utils
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


class PerDevice(experiment.AbstractExperiment):
  """Learns y = 2 x in JAXline's style."""

  CHECKPOINT_ATTRS = {'_w': 'w'}

  def __init__(self, mode, init_rng, config):
    super().__init__(mode=mode, init_rng=init_rng)
    self.config = config
    self._w = utils.bcast_local_devices(jax.random.normal(init_rng, [4]))
    self.update = jax.pmap(self._update, axis_name='i', donate_argnums=0)

  def _update(self, w, rng):
    def loss_fn(w):
      x = jax.random.normal(rng, [4, 4])

      return jnp.square(x * w[None] - 2 * x).mean()

    loss, grad = jax.value_and_grad(loss_fn)(w)
    grad = jax.lax.pmean(grad, 'i')
    return w - 0.05 * grad, {'loss': jax.lax.pmean(loss, 'i')}

  def step(self, *, global_step, rng, writer):
    time.sleep(self.config.step_secs)
    fault(self.config, 'step', int(global_step[0]))
    self._w, scalars = self.update(self._w, rng)
    return utils.get_first(scalars)

  def evaluate(self, *, global_step, rng, writer):
    fault(self.config, 'evaluate', int(global_step[0]))
    return {'loss': float(jnp.square(self._w[0] - 2).mean())}


CLASSES = {'sharded': Sharded, 'per_device': PerDevice}

if __name__ == '__main__':
  style, form, *argv = sys.argv[1:]
  sys.argv[1:] = argv
  if form == 'app_run':
    flags.mark_flag_as_required('config')
    app.run(functools.partial(platform.main, CLASSES[style]))
  else:
    platform.main(CLASSES[style], argv)
