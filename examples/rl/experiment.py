"""DDPG (Lillicrap et al. 2016) that acts and learns in one compiled program.

The environments, the replay buffer and the target networks are arrays in
`model_state`. So the devices never wait for the host, and a checkpoint has
everything that a killed run needs to resume with the same bits. `host.py` keeps
the environments and the buffer in host memory instead.

Shapes: E environments, B rows of a batch, N transitions of the buffer.
"""

import dataclasses
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxline import base_config
from jaxline import inputs
from jaxline import metrics
from jaxline import sharded
from jaxline.inputs import base
from jaxline.parallel import prng

from . import pendulum

WARM_UP = 100  # Random steps of each environment before the first update.
SIZES = {'x': (3,), 'action': (), 'reward': (), 'next_x': (3,)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The keys of `config.experiment_kwargs.config`.

  Attributes:
    environments: E; each environment takes one step per training step.
    capacity: N, a multiple of E.
    batch_size: B, over all devices.
    hidden: the width of both networks.
    actor_rate: the actor's learning rate.
    critic_rate: the critic's learning rate.
    discount: the factor of the value of the next step.
    noise: the standard deviation of the noise that is added to actions.
    target_rate: the fraction of the new weights in each update of the target
      networks.
    eval_episodes: the number of episodes of an evaluation.
    seed: the seed of the noise.
  """

  environments: int = 8
  capacity: int = 40_000
  batch_size: int = 128
  hidden: int = 64
  actor_rate: float = 1e-3
  critic_rate: float = 2e-3
  discount: float = 0.98
  noise: float = 0.2
  target_rate: float = 0.01
  eval_episodes: int = 64
  seed: int

  def __post_init__(self) -> None:
    if self.capacity % self.environments:
      raise ValueError(
        f'capacity is {self.capacity}; expected a multiple of environments,'
        f' {self.environments}.'
      )


class Experiment(sharded.ShardedExperiment):
  """Trains an actor and a critic on the pendulum."""

  CONFIG_CLASS = Config
  CHANGEABLE_ON_RESUME = ('experiment_kwargs.config.eval_episodes',)

  def __init__(
    self, mode: str, init_rng: jax.Array, config: Any, *, run_config: Any = None
  ):
    super().__init__(mode, init_rng, run_config=run_config)
    self.config = c = base_config.read(Config, config)

    def actor(x: jax.Array) -> jax.Array:
      return jnp.tanh(hk.nets.MLP([c.hidden, c.hidden, 1])(x)[:, 0])

    def critic(x: jax.Array, action: jax.Array) -> jax.Array:
      both = jnp.concatenate([x, action[:, None]], axis=1)
      return hk.nets.MLP([c.hidden, c.hidden, 1])(both)[:, 0]

    self.actor = hk.without_apply_rng(hk.transform(actor))
    self.critic = hk.without_apply_rng(hk.transform(critic))

  def init_fn(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns the weights, and the model state after the warm-up."""
    c, rngs = self.config, jax.random.split(rng, 4)
    x, action = jnp.zeros([1, 3]), jnp.zeros([1])
    params = {
      'actor': self.actor.init(rngs[0], x),
      'critic': self.critic.init(rngs[1], x, action),
    }
    start = jax.random.uniform(rngs[2], [c.environments, 2], minval=-1)
    state = {
      'target': params,
      'environments': pendulum.reset(start),
      'buffer': {k: jnp.zeros([c.capacity, *x]) for k, x in SIZES.items()},
      'written': jnp.zeros([], jnp.int32),  # Number of transitions so far.
    }

    def at_random(state: Any, rng: jax.Array) -> tuple[Any, None]:
      rngs = jax.random.split(rng)
      action_E = jax.random.uniform(rngs[0], [c.environments], minval=-1)
      return self.remember(state, action_E, rngs[1]), None

    keys = jax.random.split(rngs[3], WARM_UP)
    return params, jax.lax.scan(at_random, state, keys)[0]

  def remember(self, state: Any, action_E: Any, rng: jax.Array) -> Any:
    """Steps each environment, and adds the transitions to the buffer."""
    c, buffer = self.config, state['buffer']
    uniform = jax.random.uniform(rng, [c.environments, 2], minval=-1)
    environments, seen = pendulum.transition(
      state['environments'], action_E, uniform
    )
    at = state['written'] % c.capacity
    write = jax.lax.dynamic_update_slice_in_dim
    return {
      **state,
      'environments': environments,
      'buffer': {k: write(x, seen[k], at, 0) for k, x in buffer.items()},
      'written': state['written'] + c.environments,
    }

  def loss_fn(
    self,
    params: Any,
    model_state: Any,
    batch: sharded.BatchDict,
    rng: jax.Array,
    is_training: bool,
  ) -> sharded.LossOutput:
    """Returns the sum of both losses or, in evaluation, minus the mean return.

    A row of the batch stands for a transition to draw from the buffer or, in
    evaluation, for an episode.
    """
    if not is_training:
      return_B = self.play(params['actor'], batch['row'], rng)
      mean = metrics.Mean.of(return_B, batch['weights'])
      return -mean.compute(), {'return': mean}, model_state
    rows, target = self.draw(model_state, batch, rng), model_state['target']
    next_x = rows['next_x']
    next_action_B = self.actor.apply(target['actor'], next_x)
    next_value_B = self.critic.apply(target['critic'], next_x, next_action_B)
    # Episodes end only by their time limit, so the next state has a value.
    goal_B = rows['reward'] + self.config.discount * next_value_B
    value_B = self.critic.apply(params['critic'], rows['x'], rows['action'])
    # Each of the two losses has a gradient for only one of the networks.
    own_action_B = self.actor.apply(params['actor'], rows['x'])
    critic = jax.lax.stop_gradient(params['critic'])
    own_value_B = self.critic.apply(critic, rows['x'], own_action_B)
    loss = metrics.Mean.of((value_B - goal_B) ** 2, batch['weights'])
    value = metrics.Mean.of(own_value_B, batch['weights'])
    scalars = {'loss': loss, 'value': value}
    return loss.compute() - value.compute(), scalars, model_state

  def draw(self, model_state: Any, batch: Any, rng: jax.Array) -> Any:
    """Draws transitions from the buffer, arrays [B, ...]."""
    size = jnp.minimum(model_state['written'], self.config.capacity)
    at_B = jax.random.randint(rng, batch['row'].shape, 0, size)
    return jax.tree.map(lambda x: x[at_B], model_state['buffer'])

  def play(self, actor: Any, row_B: jax.Array, rng: jax.Array) -> jax.Array:
    """Plays an episode for each row, and returns the sums of rewards, [B]."""

    def step(state: Any, _: None) -> Any:
      action = self.actor.apply(actor, pendulum.observe(state))
      return pendulum.advance(state, action)

    def uniform(row: jax.Array) -> jax.Array:
      return jax.random.uniform(jax.random.fold_in(rng, row), [2], minval=-1)

    start = pendulum.reset(jax.vmap(uniform)(row_B))
    return jax.lax.scan(step, start, length=pendulum.STEPS)[1].sum(0)

  def after_update(
    self, before: sharded.TrainState, after: sharded.TrainState
  ) -> Any:
    """Acts once with the new weights, and updates the target networks."""
    state = self.act(after.model_state, after.params['actor'], after.step)
    target = optax.incremental_update(
      after.params, state['target'], self.config.target_rate
    )
    return {**state, 'target': target}

  def act(self, state: Any, actor: Any, step: jax.Array) -> Any:
    """Steps each environment with the actor's actions plus noise."""
    rng = prng.stream(jax.random.PRNGKey(self.config.seed), 'acting')
    rngs = jax.random.split(jax.random.fold_in(rng, step))
    x = pendulum.observe(state['environments'])
    action_E = self.actor.apply(actor, x)
    noise_E = self.config.noise * jax.random.normal(rngs[0], action_E.shape)
    return self.remember(state, jnp.clip(action_E + noise_E, -1, 1), rngs[1])

  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns one Adam optimizer for each network."""
    rates = {'actor': self.config.actor_rate, 'critic': self.config.critic_rate}
    optimizers = {name: optax.adam(rate) for name, rate in rates.items()}
    return optax.partition(optimizers, {name: name for name in rates})

  def train_input(self, shard: base.Shard | None = None) -> base.BaseInput:
    """Returns rows that stand for draws from the buffer, which has the data."""
    return self._rows(self.config.batch_size, shard, is_training=True)

  def eval_input(self, shard: base.Shard | None = None) -> base.BaseInput:
    """Returns the numbers of the episodes."""
    return self._rows(self.config.eval_episodes, shard)

  def _rows(
    self, count: int, shard: base.Shard | None, **fields: Any
  ) -> base.BaseInput:
    fields |= {'batch_size': base.per_host(count, shard), 'shuffle': False}
    rows = {'row': np.arange(count, dtype=np.uint32)}
    return inputs.arrays(rows, shard=shard, **fields)
