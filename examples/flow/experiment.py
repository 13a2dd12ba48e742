"""Flow matching on handwritten digits: a network turns noise into images.

The network learns the velocity of points that move on straight lines from noise
to an image (Lipman et al. 2022). New images are drawn by Euler steps along this
velocity. Evaluation and sampling use the average of the weights.

Shapes: B images, D pixels, F features.
"""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples import digits
from jaxline import base_config
from jaxline import inputs
from jaxline import metrics
from jaxline import sharded
from jaxline.inputs import base
from jaxline.metrics import writers
from jaxline.parallel import prng

_PIXELS = 64
_NUM_EVAL = 256  # Number of images to hold out, from the end.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The keys of `config.experiment_kwargs.config`.

  Attributes:
    batch_size: images per step, over all devices.
    hidden: F, the width of the network.
    blocks: number of residual blocks.
    learning_rate: peak learning rate, from which it falls along a cosine.
    training_steps: step at which the learning rate reaches 0.
    ema_decay: fraction of the averaged weights that a step keeps.
    sample_steps: number of Euler steps for a sample.
    seed: seed of the order of the images.
  """

  batch_size: int = 128
  hidden: int = 256
  blocks: int = 3
  learning_rate: float = 1e-3
  training_steps: int
  ema_decay: float = 0.999
  sample_steps: int = 50
  seed: int


def velocity(x_BD: jax.Array, t_B: jax.Array, config: Config) -> jax.Array:
  """Computes the velocity [B, D] of points at times from 0 to 1."""
  frequencies = jnp.pi * jnp.arange(1, 17, dtype=jnp.float32)
  angles = t_B[:, None] * frequencies[None]
  time = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)
  h_BF = hk.Linear(config.hidden)(x_BD)
  for _ in range(config.blocks):
    y_BF = hk.LayerNorm(-1, True, True)(h_BF) + hk.Linear(config.hidden)(time)
    y_BF = jax.nn.silu(hk.Linear(2 * config.hidden)(y_BF))
    h_BF += hk.Linear(config.hidden, w_init=jnp.zeros)(y_BF)
  return hk.Linear(_PIXELS)(hk.LayerNorm(-1, True, True)(h_BF))


class Experiment(sharded.ShardedExperiment):
  """Trains the network, and logs images that it draws."""

  CONFIG_CLASS = Config
  CHANGEABLE_ON_RESUME = ('experiment_kwargs.config.sample_steps',)

  def __init__(
    self, mode: str, init_rng: jax.Array, config: Any, *, run_config: Any = None
  ):
    super().__init__(mode, init_rng, run_config=run_config)
    self.config = base_config.read(Config, config)
    self.net = hk.without_apply_rng(
      hk.transform(functools.partial(velocity, config=self.config))
    )

  def init_fn(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns the initial weights, which also initialize their average."""
    params = self.net.init(rng, jnp.zeros([1, _PIXELS]), jnp.zeros([1]))
    return params, {sharded.EMA: params}

  def after_update(
    self, before: sharded.TrainState, after: sharded.TrainState
  ) -> Any:
    """Returns the model state with the next average of the weights."""
    return sharded.average_weights(before, after, self.config.ema_decay)

  def loss_fn(
    self,
    params: Any,
    model_state: Any,
    batch: sharded.BatchDict,
    rng: jax.Array,
    is_training: bool,
  ) -> sharded.LossOutput:
    """Returns the mean squared error of the velocity at random times.

    All evaluations get the same `rng`, so their losses are comparable.
    """
    del is_training
    x_BD = batch['x']
    rng_noise, rng_time = jax.random.split(rng)
    noise_BD = jax.random.normal(rng_noise, x_BD.shape)
    t_B = jax.random.uniform(rng_time, x_BD.shape[:1])
    point_BD = noise_BD + t_B[:, None] * (x_BD - noise_BD)
    error_BD = self.net.apply(params, point_BD, t_B) - (x_BD - noise_BD)
    loss = metrics.Mean.of((error_BD**2).mean(-1), batch['weights'])
    return loss.compute(), {'loss': loss}, model_state

  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns Adam, whose learning rate falls along a cosine."""
    # The first step has the peak rate, and the last one has the rate 0.
    cosine = optax.cosine_decay_schedule(
      self.config.learning_rate, max(1, self.config.training_steps - 1)
    )
    # Optax mixes the step with floats, so strict promotion needs a float.
    return optax.adam(lambda step: cosine(jnp.asarray(step, jnp.float32)))

  def train_input(
    self, shard: base.Shard | None = None
  ) -> Iterator[sharded.BatchDict]:
    """Returns the training images, in a new order in each epoch."""
    images = slice(-_NUM_EVAL)
    fields = {'is_training': True, 'input_random_seed': self.config.seed}
    return self._images(images, shard, **fields)

  def eval_input(
    self, shard: base.Shard | None = None
  ) -> Iterator[sharded.BatchDict]:
    """Returns each held-out image once."""
    return self._images(slice(-_NUM_EVAL, None), shard)

  def _images(
    self, part: slice, shard: base.Shard | None, **kwargs: Any
  ) -> base.BaseInput:
    """Returns images as rows of pixels, float32 [B, D] from -1 to 1."""
    images = digits.load()[0].reshape(-1, _PIXELS) / 8 - 1
    x_ND = images[part].astype(np.float32)
    rows = base.per_host(self.config.batch_size, shard)
    return inputs.arrays({'x': x_ND}, batch_size=rows, shard=shard, **kwargs)

  def evaluate(
    self, *, global_step: Any, rng: Any, writer: writers.MetricWriter | None
  ) -> dict[str, float]:
    """Computes the loss on the held-out images, and logs drawn images."""
    scalars = super().evaluate(global_step=global_step, rng=rng, writer=writer)
    if writer is not None:
      images_ND = jax.device_get(self.sample(rng))
      writer.write_images(global_step, {'samples': _picture(images_ND)})
    return scalars

  def sample(self, rng: jax.Array) -> jax.Array:
    """Draws images [64, D] from noise by Euler steps."""
    rng = prng.stream(rng, 'samples')
    return self._sample(self.eval_params, rng)

  @functools.cached_property
  def _sample(self) -> Any:
    steps = self.config.sample_steps

    def sample(params: Any, rng: jax.Array) -> jax.Array:
      def euler(i: jax.Array, x_BD: jax.Array) -> jax.Array:
        t_B = jnp.full([len(x_BD)], i.astype(jnp.float32) / steps)
        return x_BD + self.net.apply(params, x_BD, t_B) / steps

      noise_BD = jax.random.normal(rng, [64, _PIXELS])
      return jax.lax.fori_loop(0, steps, euler, noise_BD)

    return jax.jit(
      self.in_mesh(sample), out_shardings=self.partitioner.replicated
    )


def _picture(images_ND: np.ndarray) -> np.ndarray:
  """Enlarges 64 images four times, in a grid of 8 x 8: [1, H, W, 1]."""
  x = np.clip(images_ND / 2 + 0.5, 0, 1).reshape(8, 8, 8, 8)
  x = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
  x = x.transpose(0, 2, 1, 3).reshape(80, 80)
  return x.repeat(4, 0).repeat(4, 1)[None, :, :, None]
