"""DDPG with the environments and the replay buffer in host memory.

It shows how to train with an environment that JAX cannot compile, such as one
from Gym. The pendulum in NumPy stands in for one. Each step waits for the
previous one, because it acts with the weights of that step.
"""

from collections.abc import Mapping
import copy
from typing import Any

import jax
import numpy as np

from jaxline import errors
from jaxline import sharded
from jaxline.inputs import feed
from jaxline.parallel import placement

from . import experiment
from . import pendulum


class _Feed(feed.TrainFeed):
  """Adds the transitions that the host has drawn to each batch."""

  drawn: Any = None

  def take(self) -> sharded.BatchDict:
    drawn = placement.put_batch(self.drawn, self.partitioner)
    return {**super().take(), 'drawn': drawn}


class Experiment(experiment.Experiment):
  """Keeps the environments and the buffer in `_host`, as NumPy arrays."""

  def __init__(
    self, mode: str, init_rng: jax.Array, config: Any, *, run_config: Any = None
  ):
    if jax.process_count() > 1:
      raise errors.UsageError(
        f'There are {jax.process_count()} processes; expected one. For several'
        ' processes, see docs/reinforcement_learning.md.'
      )
    super().__init__(mode, init_rng, config, run_config=run_config)
    feed_config = self.train_feed.config
    self.train_feed = _Feed(self.train_input, self.partitioner, feed_config)
    self._actor = jax.jit(self.actor.apply)
    self._host: Any = None  # The first step creates it, or it is restored.

  def init_fn(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns the weights and the target networks."""
    params, model_state = super().init_fn(rng)
    return params, {'target': model_state['target']}

  def draw(self, model_state: Any, batch: Any, rng: jax.Array) -> Any:
    """Returns the transitions that the host has drawn."""
    if 'drawn' not in batch:
      raise errors.UsageError(
        f"The batch has {sorted(batch)}; expected 'drawn', which `step` adds in"
        ' training. compile, explain and bisect do not support this experiment.'
      )
    return batch['drawn']

  def act(self, state: Any, actor: Any, step: jax.Array) -> Any:
    """Returns the state unchanged, because `step` acts."""
    return state

  def step(self, *, global_step: Any, rng: Any, writer: Any) -> Any:
    """Acts and draws on the host, then trains."""
    c = self.config
    # The generator depends only on the step, so it has no state to save.
    numbers = np.random.default_rng([c.seed, int(global_step)])
    if self._host is None:
      self._host = _begin(c, numbers)
    host = self._host
    x = pendulum.observe(host['environments'], np)
    action_E = np.asarray(self._actor(self.state.params['actor'], x))
    action_E = action_E + numbers.normal(0, c.noise, c.environments)
    _remember(host, np.clip(action_E, -1, 1), numbers)
    size = min(host['written'], c.capacity)
    at_B = numbers.integers(0, size, c.batch_size)
    drawn = {name: x[at_B] for name, x in host['buffer'].items()}
    self.train_feed.drawn = drawn
    return super().step(global_step=global_step, rng=rng, writer=writer)

  def snapshot_state(self) -> dict[str, Any]:
    """Adds the state of the host to the checkpoint."""
    return {**super().snapshot_state(), 'host': self._host}

  def restore_from_snapshot(self, snapshot_state: Mapping[str, Any]) -> None:
    super().restore_from_snapshot(snapshot_state)
    if self.mode == 'train':  # Copy, because steps write into the arrays.
      self._host = copy.deepcopy(snapshot_state['host'])


def _begin(c: experiment.Config, numbers: np.random.Generator) -> Any:
  """Returns the initial environments and buffer, after the warm-up."""
  sizes = experiment.SIZES.items()
  host = {
    'environments': pendulum.reset(
      numbers.uniform(-1, 1, [c.environments, 2]), np
    ),
    'buffer': {k: np.zeros([c.capacity, *x], np.float32) for k, x in sizes},
    'written': 0,
  }
  for _ in range(experiment.WARM_UP):
    _remember(host, numbers.uniform(-1, 1, c.environments), numbers)
  return host


def _remember(host: Any, action_E: np.ndarray, numbers: Any) -> None:
  """Steps each environment, and adds the transitions to the buffer in place."""
  uniform_E2 = numbers.uniform(-1, 1, [len(action_E), 2])
  host['environments'], seen = pendulum.transition(
    host['environments'], action_E, uniform_E2, np
  )
  for name, x in host['buffer'].items():
    at = host['written'] % len(x)
    x[at : at + len(action_E)] = seen[name]
  host['written'] += len(action_E)
