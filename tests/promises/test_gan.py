"""Two optimizers that take turns, by the hooks that every experiment has."""

import jax
import numpy as np

from jaxline import base_config
from tests.experiments import gan
from tests.experiments import regression


def test_the_two_alternate():
  config = base_config.get_base_config()
  config.gradient_accumulation_steps = 2
  live = gan.Gan('train', jax.random.PRNGKey(0), run_config=config)
  for turn in range(6):
    before = jax.device_get(live.state.params)
    regression.train_steps(live, 1)
    after = jax.device_get(live.state.params)
    for name, weights in after.items():
      is_changed = (name == 'generator') == (turn % 2 == 1)
      for key, x in weights.items():
        assert np.array_equal(before[name][key], x) != is_changed
  for state in live.state.opt_state.inner_states.values():
    assert int(state.inner_state.inner_state[0].count) == 3
