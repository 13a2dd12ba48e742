"""Against others: a run against another program, parts against libraries.

The other program is plain JAX, written from the papers' formulas. It shares
with the run its initial weights and its batches, and no line of code.

Shapes: B batch, L length, D width, F hidden width, H heads, K head dim, V
vocab, S queries, keys and values.
"""

import functools
import random

from flax import linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from examples import decoding
from examples import transformer
from examples.pax import config as config_lib
from examples.pax import experiment
from examples.pax import schedules
from examples.pax.layers import convolutions
from examples.pax.layers import embedding_softmax
from examples.pax.layers import transformers
from jaxline import mesh as mesh_lib
from jaxline import train
from jaxline import utils

# A run of 200 steps.

STEPS = 200
WARMUP, DECAY_START, DECAY_END = 60, 80, 180
PEAK, FLOOR = 4e-3, 0.1
CLIP = 1.2
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.99, 1e-6, 1e-3
# So low that they are felt.
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
  """The run's: of a registered experiment, as the command line makes it."""
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
    assert int(global_step) == len(self.scalars) + 1
    self.scalars.append(jax.device_get(dict(scalars)))


def _run(config):
  """Returns the first and the last weights, what was logged, and batches."""
  first, made = {}, []

  class Watched(experiment.Experiment):
    def step(self, *, global_step, rng, writer):
      if not made:
        made.append(self)
        # Copied: the step is given their memory.
        first.update(jax.tree.map(np.array, self.state.params))
      return super().step(global_step=global_step, rng=rng, writer=writer)

  recorder = Recorder()
  checkpointer = utils.InMemoryCheckpointer(config, 'train')
  train.train(Watched, config, checkpointer, recorder)
  data = made[0].train_input()
  batches = [next(data) for _ in range(STEPS)]
  last = jax.tree.map(np.array, made[0].state.params)
  return first, last, recorder.scalars, batches


def _as_layers(params):
  """Returns weights by short names; of the stack, those of each layer."""
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
  # The approximation of Hendrycks and Gimpel (2016).
  return 0.5 * x * (1 + jnp.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _attention(x, w, mask):
  """Attention of Vaswani et al. (2017), with a scale of each dimension."""
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
  # Tensor2tensor's sinusoids: from a period of 2 pi to one of 10^4 times it.
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
  """Returns the last weights, and what each step has to say."""
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
  # It was a run in which all of it counted.
  assert said['loss'][0] > 5 > 1.5 > said['loss'][-20:].mean()
  assert 0.05 < (said['norm'] > CLIP).mean() < 0.95
  assert 0.05 < said['capped'].mean() < 0.95
  assert np.mean([batch['segment_ids'].max() > 1 for batch in batches]) > 0.9
  # Some of what is read is not to be predicted.
  assert 0.8 < np.mean([batch['weights'].mean() for batch in batches]) < 1


# Parts, against libraries and published numbers; attention's initial weights
# are in layers/attentions_test.py.


@pytest.mark.parametrize(
  ('hparams', 'limits'),
  [
    (
      transformers.TransformerFeedForward.HParams(
        input_dims=32, hidden_dims=96, use_gated_activation=True
      ),
      # In Praxis `ffn_layer1` and `ffn_layer1_gate` are two variables.
      {'ffn_layer1': 0.2165066, 'ffn_layer2': 0.2165066},
    ),
    (
      transformers.TransformerFeedForward.HParams(
        input_dims=32, hidden_dims=96
      ),
      {'ffn_layer1': 0.2165066, 'ffn_layer2': 0.2165066},
    ),
    (
      embedding_softmax.Embedding.HParams(input_dims=32, num_classes=48),
      {'': 0.2738616},
    ),
    (
      embedding_softmax.FullSoftmax.HParams(input_dims=32, num_classes=48),
      {'': 0.2738616},
    ),
    (
      embedding_softmax.SharedEmbeddingSoftmax.HParams(
        input_dims=32, num_classes=48
      ),
      {'': 0.2738616},
    ),
    (
      embedding_softmax.TrainablePositionalEmbedding.HParams(
        embedding_dims=32, max_seq_length=48
      ),
      {'': 0.2738616},
    ),
    (
      convolutions.Conv2D.HParams(filter_shape=(3, 3, 8, 16)),
      {'': 0.1666668},
    ),
  ],
)
def test_initial_weights_have_praxis_limits(hparams, limits):
  """The limits are `base_layer.var_init_scale` of each variable in Praxis.

  Praxis 1.4.0, jax 0.4.26, Python 3.10: the layer of the same name with the
  same sizes, and its default Xavier initialization.
  """
  made = hparams.set(name='x').Instantiate().init(jax.random.key(0))
  for name, limit in limits.items():
    own = made['params'][f'x/{name}' if name else 'x']
    (w,) = (x for key, x in own.items() if key in ('w', 'emb_var'))
    assert 0.98 * limit < np.abs(w).max() < 1.00001 * limit
    assert np.std(w) == pytest.approx(limit / 3**0.5, rel=0.06)


def _normal(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=shape), jnp.float32)


@pytest.mark.parametrize('documents', [1, 3])
def test_attention_is_flaxs(documents):
  q, k, v = _normal(3, 2, 12, 4, 8)
  weights = _normal(2, 12, 4, 8, seed=1)
  ids = jnp.asarray(np.arange(24).reshape(2, 12) * documents // 24)
  mask = linen.combine_masks(
    linen.make_causal_mask(ids),
    linen.make_attention_mask(ids, ids, jnp.equal),
    dtype=bool,
  )

  def ours(q, k, v):
    return transformer.causal_attention(q, k, v, 'einsum', ids)[0]

  def flaxs(q, k, v):
    return linen.dot_product_attention(q, k, v, mask=mask)

  def values_and_grads(attend):
    total = lambda *qkv: jnp.sum(attend(*qkv) * weights)
    return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, k, v)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
    values_and_grads(ours),
    values_and_grads(flaxs),
  )


@pytest.mark.parametrize('chunks', [1, 4])
def test_cross_entropy_is_optaxs_and_scipys(chunks):
  x_BLD, table_VD = _normal(2, 8, 5), _normal(11, 5, seed=1)
  labels_BL = jnp.asarray(np.random.default_rng(2).integers(0, 11, (2, 8)))
  weights_BL = jnp.asarray(np.arange(16).reshape(2, 8) % 3, jnp.float32)

  def ours(x, table):
    return transformer.chunked_cross_entropy(
      x, (table, None), labels_BL, weights_BL, chunks=chunks
    ).total

  def optaxs(x, table):
    nats_BL = optax.softmax_cross_entropy_with_integer_labels(
      x @ table.T, labels_BL
    )
    return jnp.sum(nats_BL * weights_BL)

  (actual, grads), (expected, expected_grads) = (
    jax.jit(jax.value_and_grad(f, (0, 1)))(x_BLD, table_VD)
    for f in (ours, optaxs)
  )
  log_p = special.log_softmax(np.float64(x_BLD) @ np.float64(table_VD).T, -1)
  log_p = np.take_along_axis(log_p, np.asarray(labels_BL)[..., None], -1)
  scipys = -np.sum(log_p[..., 0] * weights_BL)
  np.testing.assert_allclose([actual, expected], scipys, rtol=1e-5)
  for a, b in zip(grads, expected_grads, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_rotary_positions_have_roformers_numbers():
  """Of the tests of `transformers`, test_modeling_roformer.py."""
  published = [
    [0.0000, 0.0100, 0.0200, 0.0300, 0.0400, 0.0500, 0.0600, 0.0700],
    [-0.2012, 0.8897, 0.0263, 0.9401, 0.2074, 0.9463, 0.3481, 0.9343],
    [-1.7057, 0.6271, -1.2145, 1.3897, -0.6303, 1.7647, -0.1173, 1.8985],
    [-2.1731, -1.6397, -2.7358, 0.2854, -2.1840, 1.7183, -1.3018, 2.4871],
    [0.2717, -3.6173, -2.9206, -2.1988, -3.6638, 0.3858, -2.9155, 2.2980],
    [3.9859, -2.1580, -0.7984, -4.4904, -4.1181, -2.0252, -4.4782, 1.1253],
  ]
  x = np.arange(6 * 64, dtype=np.float32).reshape(6, 64) / 100
  # There the two of a pair are neighbours; here they are halves.
  halves = np.concatenate([x[:, ::2], x[:, 1::2]], axis=-1)
  angles = transformer.rotary_angles(jnp.arange(6), 64)
  turned = transformer.rotate(jnp.asarray(halves)[None, :, None], angles)
  pairs = np.asarray(turned)[0, :, 0].reshape(6, 2, 32).swapaxes(1, 2)
  np.testing.assert_allclose(
    pairs.reshape(6, 64)[:, :8], published, atol=1.01e-4
  )


@pytest.mark.parametrize(
  ('width', 'published'),
  [
    (
      4,
      [
        [0, 0, 1, 1],
        [0.841470957, 9.99999902e-05, 0.540302277, 1],
        [0.909297407, 1.99999980e-04, -0.416146845, 1],
      ],
    ),
    (
      6,
      [
        [0, 0, 0, 1, 1, 1],
        [0.841470957, 0.009999833, 9.99999902e-05, 0.540302277, 0.99995, 1],
        [0.909297407, 0.019998666, 1.99999980e-04, -0.416146815, 0.9998, 1],
      ],
    ),
  ],
)
def test_sinusoids_have_tensor2tensors_numbers(width, published):
  """As AllenNLP quotes them, test_add_positional_features."""
  positions = jnp.arange(len(published))[None]
  actual = transformer.sinusoidal_positions(positions, width)
  np.testing.assert_allclose(actual[0], published, atol=1e-6)


def test_schedules_are_optaxs():
  """Those of Pax's C4 runs, and of its GPT-3."""
  exponential = schedules.LinearRampupExponentialDecay.HParams(
    warmup_steps=4000, decay_start=4000, decay_end=300_000, min_ratio=0.1
  )
  cosine = schedules.LinearRampupCosineDecay.HParams(
    warmup_steps=265, decay_start=265, decay_end=108_600, min_ratio=0.1
  )
  steps = np.array([0, 1, 100, 265, 266, 3999, 4001, 50_000, 200_000, 400_000])
  for hparams, theirs in (
    (
      exponential,
      optax.warmup_exponential_decay_schedule(
        0.0, 1.0, 4000, 296_000, 0.1, end_value=0.1
      ),
    ),
    (cosine, optax.warmup_cosine_decay_schedule(0.0, 1.0, 265, 108_600, 0.1)),
  ):
    ours = jax.vmap(hparams.Instantiate().value_at)(steps)
    with jax.numpy_dtype_promotion('standard'):
      theirs = jax.vmap(theirs)(steps)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_beams_are_ranked_as_by_the_published_length_penalty():
  """Wu et al. (2016), equation 14: (5 + t)^a / 6^a; Pax divides by 5^a."""
  alpha, lengths = 0.8, np.array([1, 2, 7, 30])
  log_p = np.array([-1.0, -1.05, -2.5, -6.0])
  ours = log_p / np.float64(decoding.length_norm(jnp.asarray(lengths), alpha))
  published = log_p / ((5 + lengths) ** alpha / 6**alpha)
  np.testing.assert_allclose(ours / published, (5 / 6) ** alpha, rtol=1e-5)
  assert published[0] < published[1]  # And not so without the penalty.
