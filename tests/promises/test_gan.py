"""Two optimizers that take turns, by the hooks that every experiment has."""

import jax
import numpy as np

from jaxline import base_config
from tests.experiments import gan
from tests.experiments import regression


def make(**config):
  """Returns a GAN of a config that has these values."""
  full = base_config.get_base_config()
  full.update(config)
  return gan.Gan('train', jax.random.PRNGKey(0), run_config=full)


def trained_by_a_step(experiment, **changes):
  """Trains one step; returns which networks it has changed."""
  before = jax.device_get(experiment.state.params)
  regression.train_steps(experiment, 1, **changes)
  found = []
  for name, weights in jax.device_get(experiment.state.params).items():
    (is_changed,) = {
      not np.array_equal(before[name][key], x) for key, x in weights.items()
    }  # All of its weights or none.
    found += [name] * is_changed
  return found


def test_the_two_alternate():
  experiment = make(gradient_accumulation_steps=2)
  networks = [trained_by_a_step(experiment) for _ in range(6)]
  assert networks == [['discriminator'], ['generator']] * 3
  counts = {
    name: int(state.inner_state.inner_state[0].count)
    for name, state in experiment.state.opt_state.inner_states.items()
  }
  assert counts == {'discriminator': 3, 'generator': 3}
