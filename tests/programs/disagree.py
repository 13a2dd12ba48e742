"""Experiments whose processes differ in what they evaluate to.

Started by `python -m jaxline.launch` in promises/test_hosts.py.
"""

import jax
import jax.numpy as jnp

from jaxline import experiment
from jaxline import utils
from tests.experiments import regression
from tests.programs import hosts


class Sharded(hosts.Regression):
  """Adds a number that each process has for itself."""

  def evaluate(self, **kwargs):
    return super().evaluate(**kwargs) | {'own': 0.5 + jax.process_index()}


class PerDevice(experiment.AbstractExperiment):
  """Evaluates in process 0 only, as JAXline's programs may."""

  CHECKPOINT_ATTRS = {'_w': 'w'}

  def __init__(self, mode, init_rng):
    super().__init__(mode=mode, init_rng=init_rng)
    self._w = utils.bcast_local_devices(jnp.zeros([]))

  def step(self, **unused):
    self._w = self._w + 1
    return {'loss': utils.get_first(self._w)}

  def evaluate(self, **unused):
    if jax.process_index() == 0:
      return {'own': float(utils.get_first(self._w))}


def get_config(name):
  config = regression.get_run_config(steps=3, save=1, evaluation=1)
  config.experiment_class = f'tests.programs.disagree:{name}'
  config.best_model_eval_metric_higher_is_better = True
  return config
