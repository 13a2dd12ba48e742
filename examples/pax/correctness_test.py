"""Compares a run with a separate program.

The program is plain JAX, written from the papers' formulas. It shares
with the run its initial weights and its batches, and no line of code.
"""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax import config as config_lib
from examples.pax import experiment
from jaxline import train
from jaxline import utils
from jaxline.parallel import mesh as mesh_lib

# A run of 200 steps.

STEPS = 200
WARMUP, DECAY_START, DECAY_END = 60, 80, 180
PEAK, FLOOR = 4e-3, 0.1
CLIP = 1.2
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.99, 1e-6, 1e-3
# These limits are low enough to have an effect.
MAX_RMS, ATTENTION_CAP, LOGIT_CAP = 0.5, 1.5, 6.0
L, D, H, K, F = 32, 32, 2, 16, 64


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Documents of a few words, several of which fit in a row."""
  path = tmp_path_factory.mktemp('text')
  draw = random.Random(0)
  words = ['for', 'if', 'in', 'x', 'y', 'total', 'item', 'return', '+', '=']
  for i in range(300):
    text = ' '.join(draw.choices(words, k=draw.randint(2, 9)))
    (path / f'{i}.txt').write_text(f'{text}\n')
  return str(path)


@pytest.fixture
def config(folder):
  """The config of a registered experiment, as the command line makes it."""
  found = config_lib.get_config('C4Spmd1BAdam4Replicas:reduced')
  found.update(
    {
      'checkpointer': 'memory',
      'data': folder,
      'training_steps': STEPS,
      'save_checkpoint_interval': STEPS,
      'log_tensors_interval': 1,
    }
  )
  found.experiment_kwargs.config.constants.update(
    {
      'NUM_LAYERS': 2,
      'MODEL_DIMS': D,
      'HIDDEN_DIMS': F,
      'NUM_HEADS': H,
      'DIMS_PER_HEAD': K,
      'MAX_SEQ_LEN': L,
      'PERCORE_BATCH_SIZE': 4,
      'LOSS_CHUNKS': 2,
      'ATTEN_LOGIT_CAP': ATTENTION_CAP,
      'SOFTMAX_CAP_LOGITS': LOGIT_CAP,
      'LEARNING_RATE': PEAK,
      'LR_WARMUP_STEPS': WARMUP,
      'LR_DECAY_START': DECAY_START,
      'LR_DECAY_END': DECAY_END,
      'LR_MIN_RATIO': FLOOR,
      'ADAM_CLIP_THRESHOLD': MAX_RMS,
      'CLIP_GRADIENT_NORM': CLIP,
    }
  )
  return found.copy_and_resolve_references()


class Recorder:
  """Keeps what is written."""

  def __init__(self):
    self.scalars = []

  def write_scalars(self, global_step, scalars):
    self.scalars.append(jax.device_get(dict(scalars)))


def _run(config):
  """Returns the first and last weights, the log, and the batches."""
  first, made = {}, []

  class Watched(experiment.Experiment):
    def step(self, *, global_step, rng, writer):
      if not made:
        made.append(self)
        # Copy the weights, because the step takes their memory.
        first.update(jax.tree.map(np.array, self.state.params))
      return super().step(global_step=global_step, rng=rng, writer=writer)

  recorder = Recorder()
  checkpointer = utils.InMemoryCheckpointer(config, 'train')
  train.train(Watched, config, checkpointer, recorder)
  data = made[0].train_input()
  batches = [next(data) for _ in range(STEPS)]
  return first, made[0].state.params, recorder.scalars, batches


def _as_layers(params):
  """Returns weights by short names, with the stack split into layers."""
  layers, top = ({}, {}), {}
  for path, weights in params.items():
    path = path.removeprefix('language_model/lm/')
    of_stack = path.removeprefix('transformer/repeat/sub/x_layers_0/')
    for name, w in weights.items():
      if of_stack == path:
        top[f'{path}/{name}'] = w
        continue
      assert len(w) == len(layers)
      for layer, own in zip(layers, w, strict=True):
        layer[f'{of_stack}/{name}'] = own
  return {'layers': layers, 'top': top}


def _norm(x, w, name):
  mean = jnp.mean(x, -1, keepdims=True)
  variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
  x = (x - mean) / jnp.sqrt(variance + 1e-6)
  return x * (1 + w[f'{name}/scale']) + w[f'{name}/bias']


def _gelu(x):
  # This is the approximation of Hendrycks and Gimpel (2016).
  return 0.5 * x * (1 + jnp.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _attention(x, w, mask):
  """Attention of Vaswani et al. (2017), with a scale for each dimension."""
  q, k, v = jnp.einsum('bld,dshk->sbhlk', x, w['self_attention/combined_qkv/w'])
  scale = w['self_attention/per_dim_scale/per_dim_scale']
  q = q * jnp.log(1 + jnp.exp(scale)) / (np.log(2) * np.sqrt(K))
  scores = q @ jnp.swapaxes(k, 2, 3)
  scores = ATTENTION_CAP * jnp.tanh(scores / ATTENTION_CAP)
  scores = jnp.where(mask[:, None], scores, -1e9)
  p = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
  p = p / jnp.sum(p, -1, keepdims=True)
  return jnp.einsum('bhlk,hkd->bld', p @ v, w['self_attention/post/w'])


def _loss(weights, batch):
  top = weights['top']
  table = top['softmax/emb_var']
  # Tensor2tensor's sinusoids have periods from 2 pi to 10^4 times 2 pi.
  angles = batch['segment_pos'][..., None] / np.geomspace(1, 1e4, D // 2)
  x = table[batch['ids']] * np.sqrt(D)
  x = x + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
  ids = batch['segment_ids']
  mask = (ids[:, :, None] == ids[:, None, :]) & np.tri(L, dtype=bool)
  for w in weights['layers']:
    x = x + _attention(_norm(x, w, 'layer_norm'), w, mask)
    hidden = _norm(x, w, 'ff_layer/layer_norm') @ w['ff_layer/ffn_layer1/w']
    hidden = _gelu(hidden + w['ff_layer/ffn_layer1/b'])
    out = hidden @ w['ff_layer/ffn_layer2/w'] + w['ff_layer/ffn_layer2/b']
    x = x + out
  logits = _norm(x, top, 'final_ln') @ table.T + top['softmax/bias']
  logits = LOGIT_CAP * jnp.tanh(logits / LOGIT_CAP)
  log_p = logits - jnp.log(jnp.sum(jnp.exp(logits), -1, keepdims=True))
  one_hot = jnp.eye(len(table))[batch['labels']]
  nats = -jnp.sum(log_p * one_hot, -1)
  return jnp.sum(nats * batch['weights']) / jnp.sum(batch['weights'])


def _learning_rate(n):
  done = jnp.clip((n - DECAY_START) / (DECAY_END - DECAY_START), 0, 1)
  return PEAK * jnp.where(n < WARMUP, n / WARMUP, FLOOR**done)


def _step(carry, batch):
  """Gradient clipping, Adam with a cap of each weight's update, and decay."""
  weights, m, v, n = carry
  loss, grads = jax.value_and_grad(_loss)(weights, batch)
  norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
  grads = jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / norm), grads)
  m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, m, grads)
  v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g**2, v, grads)
  rate = _learning_rate(n)

  def direction(m, v):
    m, v = m / (1 - BETA1 ** (n + 1)), v / (1 - BETA2 ** (n + 1))
    return m / (jnp.sqrt(v) + EPSILON)

  directions = jax.tree.map(direction, m, v)
  rms = jax.tree.map(lambda u: jnp.sqrt(jnp.mean(u**2)), directions)
  weights = jax.tree.map(
    lambda w, u, rms: (
      w - rate * (u / jnp.maximum(1, rms / MAX_RMS) + DECAY * w)
    ),
    weights,
    directions,
    rms,
  )
  capped = jnp.mean(jnp.stack(jax.tree.leaves(rms)) > MAX_RMS)
  said = {'loss': loss, 'norm': norm, 'rate': rate, 'capped': capped}
  return (weights, m, v, n + 1), said


def _run_otherwise(first, batches):
  """Returns the last weights and the scalars of each step."""
  batches = jax.tree.map(lambda *xs: np.stack(xs), *batches)
  weights = _as_layers(first)
  zeros = jax.tree.map(np.zeros_like, weights)
  with (
    jax.numpy_dtype_promotion('standard'),
    jax.numpy_rank_promotion('allow'),
  ):
    (weights, *_), said = jax.jit(functools.partial(jax.lax.scan, _step))(
      (weights, zeros, zeros, jnp.float32(0)), dict(batches)
    )
  return weights, jax.device_get(said)


@pytest.mark.process
def test_a_run_is_that_of_another_program(config, monkeypatch):
  monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})
  with mesh_lib.on_devices(jax.devices()[:1]):
    first, last, logged, batches = _run(config)
  weights, said = _run_otherwise(first, batches)

  def values(name):
    return np.array([scalars[name] for scalars in logged])

  np.testing.assert_allclose(values('total_loss'), said['loss'], rtol=1e-5)
  np.testing.assert_allclose(values('learning_rate'), said['rate'], rtol=1e-5)
  np.testing.assert_allclose(values('grad_norm'), said['norm'], rtol=1e-4)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
    _as_layers(last),
    weights,
  )
  # The run made use of all of these features.
  assert said['loss'][0] > 5 > 1.5 > said['loss'][-20:].mean()
  assert 0.05 < (said['norm'] > CLIP).mean() < 0.95
  assert 0.05 < said['capped'].mean() < 0.95
  assert np.mean([batch['segment_ids'].max() > 1 for batch in batches]) > 0.9
  # Some tokens have no prediction.
  assert 0.8 < np.mean([batch['weights'].mean() for batch in batches]) < 1
