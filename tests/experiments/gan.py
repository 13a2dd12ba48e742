"""A GAN of two optimizers that take turns: it learns a Gaussian's points.

`make_optimizer` gives each network its optimizer, `after_update` counts the
turns, and `loss_fn` returns the loss of the network whose turn it is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxline import metrics
from jaxline import sharded
from tests.experiments import regression

FEATURES, HIDDEN = 2, 32
MEAN = np.array([2.0, -1.0], np.float32)
STD = np.array([0.5, 1.5], np.float32)


def is_generators(turn):
  """Whether a turn is the generator's. The first turn is 0."""
  return turn % 2 == 1


class Input(regression.Input):
  """Endless points, whose position can be saved."""

  def __next__(self):
    rng = np.random.default_rng([0, int(self.state['next'])])
    self.state['next'] += 1
    points = rng.normal(MEAN, STD, [self.batch_size, FEATURES])
    return {'x': points.astype(np.float32)}


def discriminate(params, x):
  """Returns the logits of being data, [B], of points [B, FEATURES]."""
  hidden = jax.nn.softplus(x @ params['in'] + params['bias'][None])
  return hidden @ params['out']


class Gan(sharded.ShardedExperiment):
  """A linear generator against a network of one hidden layer."""

  def init_fn(self, rng):
    rngs = jax.random.split(rng)
    params = {
      'generator': {'w': jnp.eye(FEATURES), 'b': jnp.zeros([FEATURES])},
      'discriminator': {
        'in': 0.7 * jax.random.normal(rngs[0], [FEATURES, HIDDEN]),
        'bias': jnp.zeros([HIDDEN]),
        'out': 0.1 * jax.random.normal(rngs[1], [HIDDEN]),
      },
    }
    return params, {'turn': jnp.zeros([], jnp.int32)}

  def after_update(self, before, after):
    # Not `step`, which also counts the steps that `on_nonfinite` skips.
    return {'turn': after.model_state['turn'] + 1}

  def make_optimizer(self):
    adam = optax.adam(0.03, b1=0.0)
    optimizers = {
      # In the other's turn it keeps its state, and its network its weights.
      'generator': optax.conditionally_mask(adam, is_generators),
      'discriminator': optax.conditionally_mask(
        adam, lambda turn: ~is_generators(turn)
      ),
    }
    return optax.multi_transform(optimizers, {x: x for x in optimizers})

  def loss_fn(self, params, model_state, batch, rng, is_training):
    x, weights = batch['x'], batch['weights']
    noise = jax.random.normal(rng, x.shape)

    def logits(generator, discriminator):
      fake = noise @ generator['w'] + generator['b'][None]
      return discriminate(discriminator, x), discriminate(discriminator, fake)

    def of_discriminator(generator, discriminator):
      on_data, on_fake = logits(jax.lax.stop_gradient(generator), discriminator)
      # The slope at the data (R1); without its penalty the two would circle.
      slopes = jax.grad(lambda x: discriminate(discriminator, x).sum())(x)
      nll = jax.nn.softplus(-on_data) + jax.nn.softplus(on_fake)
      nll += 0.05 * jnp.square(slopes).sum(-1)
      return metrics.Mean.of(nll, weights)

    def of_generator(generator, discriminator):
      _, on_fake = logits(generator, jax.lax.stop_gradient(discriminator))
      return metrics.Mean.of(jax.nn.softplus(-on_fake), weights)

    loss = jax.lax.cond(  # Only one of the two is computed.
      is_generators(model_state['turn']),
      of_generator,
      of_discriminator,
      params['generator'],
      params['discriminator'],
    )
    return loss.compute(), {'loss': loss}, model_state

  def train_input(self):
    return Input(64)

  def eval_input(self):
    return [next(Input(1024))]
