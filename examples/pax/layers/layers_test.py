"""Each single layer is its formula, starts as in Praxis, refuses what is wrong.

The formulas are in NumPy and float64. `attentions_test` has those of attention,
`transformers_test`, `resnets_test` and `models_test` the networks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from examples.pax import base_layer
from examples.pax import layers
from examples.pax.layers import flax_modules
from examples.pax.layers import transformers
from jaxline.parallel import partitioning

KEY = jax.random.key(0)
WeightInit = base_layer.WeightInit


def _random(*shape, seed=0):
  return np.float32(np.random.default_rng(seed).normal(size=shape))


# The inputs are off center, and so small that the epsilons below matter.
X = 0.3 + 0.2 * _random(2, 3, 5)
IMAGES = _random(2, 7, 6, 3)
HEADS = _random(2, 4, 3, 8)
IDS = np.int32([[0, 1, 2, 6], [3, 0, 1, 6]])
POSITIONS = np.int32([[0, 1, 2, 50], [7, 0, 1, 60]])


def _windows(x_BHWC, size, stride, before, filler=0.0):
  """Returns windows [B, H', W', size, size, C], with padding before and after.

  There are ceil(n / stride) of them along a side of n pixels.
  """
  pads = [(0, 0), (before[0], 99), (before[1], 99), (0, 0)]
  padded = np.pad(x_BHWC, pads, constant_values=filler)
  slices = [
    [slice(i * stride, i * stride + size) for i in range(-(-n // stride))]
    for n in x_BHWC.shape[1:3]
  ]
  return np.stack(
    [np.stack([padded[:, i, j] for j in slices[1]], 1) for i in slices[0]], 1
  )


def _conv(size, stride):
  def formula(w, x):
    windows = _windows(x, size, stride, [(size - 1) // 2] * 2)
    return np.einsum('bhwijc,ijcd->bhwd', windows, w['w']) + w['b']

  return formula


def _norm(x, epsilon):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)


def _rotated(w, x, position):
  # Pair k, a complex number, is rotated by position / 100 ** (2 k / 8).
  angles = position[:, :, None, None] / 100 ** (np.arange(4) * 2 / 8)
  pairs = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
  return np.concatenate([pairs.real, pairs.imag], axis=-1)


def _sinusoids(w, position):
  angles = position[..., None] / np.array([1, 10, 100])
  return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def _cap(logits):
  return 2 * np.tanh(logits / 2)


NORM = {'scale': ('embed',), 'bias': ('embed',)}
TABLE = {'emb_var': ('vocab', 'embed')}
BIAS = {'bias': ('vocab',)}
CONV = {'w': (None, None, None, 'embed'), 'b': (None,)}
MATRIX = {'linear/w': ('embed', 'mlp')}
SIZES = {'num_classes': 7, 'input_dims': 5}


# Hyperparameters, axes of the variables, inputs, and formula of the variables
# and the inputs.
@pytest.mark.parametrize(
  ('p', 'axes', 'inputs', 'formula'),
  [
    (layers.Identity.HParams(), {}, [X], lambda w, x: x),
    (layers.ReLU.HParams(), {}, [X - 0.3], lambda w, x: np.maximum(x, 0)),
    (
      layers.GELU.HParams(),
      {},
      [9 * X],
      lambda w, x: (
        x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
      ),
    ),
    (
      layers.GELU.HParams(approximate=False),
      {},
      [9 * X],
      lambda w, x: x * special.ndtr(x),
    ),
    (layers.SiLU.HParams(), {}, [9 * X], lambda w, x: x * special.expit(x)),
    (
      layers.FeedForward.HParams(input_dims=5, output_dims=4),
      MATRIX | {'bias/b': ('mlp',)},
      [X],
      lambda w, x: np.maximum(x @ w['linear/w'] + w['bias/b'], 0),
    ),
    (
      layers.FeedForward.HParams(input_dims=5, output_dims=4, has_bias=False),
      MATRIX,
      [X[0, 0]],  # Any number of axes.
      lambda w, x: np.maximum(x @ w['linear/w'], 0),
    ),
    *(
      (
        layers.Conv2D.HParams(
          filter_shape=(size, size, 3, 4),
          filter_stride=(stride,) * 2,
          bias=True,
        ),
        CONV,
        [IMAGES],
        _conv(size, stride),
      )
      for size, stride in [(3, 1), (3, 2), (4, 3)]
    ),
    (
      layers.MaxPool2D.HParams(),
      {},
      [IMAGES - 9],
      # An odd padding has one more at the end.
      lambda w, x: _windows(x, 3, 2, (1, 0), -np.inf).max((3, 4)),
    ),
    (layers.GlobalPooling.HParams(), {}, [IMAGES], lambda w, x: x.mean((1, 2))),
    (layers.IdentityNorm.HParams(dim=5), {}, [X], lambda w, x: x),
    (
      layers.LayerNorm.HParams(dim=5, epsilon=0.1),
      NORM,
      [X],
      lambda w, x: (
        _norm(x - x.mean(-1, keepdims=True), 0.1) * (1 + w['scale']) + w['bias']
      ),
    ),
    (
      layers.RmsNorm.HParams(dim=5, epsilon=0.1),
      {'scale': ('embed',)},
      [X],
      lambda w, x: _norm(x, 0.1) * w['scale'],
    ),
    (
      layers.BatchNorm.HParams(dim=5),
      dict.fromkeys(
        ['beta', 'gamma', 'moving_mean', 'moving_variance'], ('embed',)
      ),
      [X],
      lambda w, x: (
        (x - w['moving_mean'])
        / np.sqrt(w['moving_variance'] + 1e-3)
        * (1 + w['gamma'])
        + w['beta']
      ),
    ),
    (
      layers.Embedding.HParams(scale_sqrt_depth=True, **SIZES),
      TABLE,
      [IDS[0]],
      lambda w, ids: w['emb_var'][ids] * 5**0.5,
    ),
    (
      layers.FullSoftmax.HParams(has_bias=False, **SIZES),
      {'w': ('embed', 'vocab')},
      [X[0]],  # A vector per row.
      lambda w, x: x @ w['w'],
    ),
    (
      layers.SharedEmbeddingSoftmax.HParams(soft_cap_logits=2.0, **SIZES),
      TABLE | BIAS,
      [X],
      lambda w, x: _cap(x @ w['emb_var'].T + w['bias']),
    ),
    (
      layers.PositionalEmbedding.HParams(embedding_dims=6, max_timescale=100.0),
      {},
      [POSITIONS],
      _sinusoids,
    ),
    (
      layers.TrainablePositionalEmbedding.HParams(
        max_seq_length=7, embedding_dims=5
      ),
      {'emb_var': (None, 'embed')},
      [IDS],
      lambda w, ids: w['emb_var'][ids],
    ),
    (
      layers.RotaryPositionalEmbedding.HParams(
        embedding_dims=8, max_timescale=100.0
      ),
      {},
      [HEADS, POSITIONS],
      _rotated,
    ),
    (
      layers.PerDimScale.HParams(dim=5),
      {'per_dim_scale': ('kv',)},
      [X],
      # It is 1 for a variable of 0.
      lambda w, x: x * np.log2(1 + np.exp(w['per_dim_scale'])),
    ),
  ],
)
def test_a_layer_is_its_formula(p, axes, inputs, formula):
  layer = p.set(name='x').Instantiate()
  rng = np.random.default_rng(1)
  found, w = {}, {}

  def draw(path, weight):
    _, layer, name = (key.key for key in path)
    name = f'{layer}/{name}'.removeprefix('x/')
    x = rng.uniform(0.5, 1.5, weight.shape)  # A variance is positive.
    found[name], w[name] = weight.axes, np.float32(x).astype(np.float64)
    if name.rpartition('/')[2] not in ('w', 'emb_var'):
      ones = 'moving_variance', 'scale' if p.cls is layers.RmsNorm else ''
      assert weight.init == WeightInit.Constant(float(name in ones))
    return np.float32(x)

  variables = jax.tree_util.tree_map_with_path(draw, layer.abstract_init())
  assert found == axes

  def run(p, inputs):
    return jax.jit(functools.partial(p.Instantiate().apply, do_eval=True))(
      variables, *inputs
    )

  exact = [x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs]
  out = run(p, inputs)
  np.testing.assert_allclose(out, formula(w, *exact), rtol=1e-5, atol=2e-5)
  # In low precision:
  low = [x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for x in inputs]
  few = run(p.clone().set(fprop_dtype=jnp.bfloat16), low)
  if 'Softmax' in type(layer).__name__:
    assert few.dtype == jnp.float32
  else:
    assert few.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.float32(few), out, rtol=0.03, atol=0.05)
  if isinstance(layer, layers.BaseNormalization):
    # The computation is in float32.
    whole = run(p, [x.astype(np.float32) for x in low])
    np.testing.assert_array_equal(few, whole.astype(jnp.bfloat16))


# A layer, Xavier-initialized by default, and the limits of its matrices:
# `base_layer.var_init_scale` in Praxis 1.4.0 (jax 0.4.26, Python 3.10), whose
# class with num_kv_heads is MultiQueryDotProductAttention.
ATTENTION = layers.DotProductAttention.HParams(
  input_dim=32, num_heads=4, dim_per_head=16
)
FEED_FORWARD = layers.TransformerFeedForward.HParams(
  input_dims=32, hidden_dims=96
)
TOKENS = {'input_dims': 32, 'num_classes': 48}
APART = {'query': 0.0968246, 'key': 0.0968246, 'value': 0.0968246}


@pytest.mark.parametrize(
  ('p', 'limits'),
  [
    (ATTENTION.clone(), APART | {'post': 0.0968246}),
    (ATTENTION.clone().set(combine_qkv=True), {'combined_qkv': 0.0559017}),
    (
      ATTENTION.clone().set(num_kv_heads=2),
      APART | {'key': 0.1020621, 'value': 0.1020621},
    ),
    (
      ATTENTION.clone().set(num_kv_heads=1),
      APART | {'key': 0.3535537, 'value': 0.3535537},
    ),
    # Praxis lacks this. The limits are as for two products.
    (ATTENTION.clone().set(combine_qkv=True, is_cross_attention=True), APART),
    (FEED_FORWARD.clone(), {'ffn_layer1': 0.2165066, 'ffn_layer2': 0.2165066}),
    # Praxis has two variables, `ffn_layer1` and `ffn_layer1_gate`.
    (
      FEED_FORWARD.clone().set(use_gated_activation=True),
      {'ffn_layer1': 0.2165066},
    ),
    (layers.Embedding.HParams(**TOKENS), {'': 0.2738616}),
    (layers.FullSoftmax.HParams(**TOKENS), {'': 0.2738616}),
    (layers.SharedEmbeddingSoftmax.HParams(**TOKENS), {'': 0.2738616}),
    (
      layers.TrainablePositionalEmbedding.HParams(
        embedding_dims=32, max_seq_length=48
      ),
      {'': 0.2738616},
    ),
    (layers.Conv2D.HParams(filter_shape=(3, 3, 8, 16)), {'': 0.1666668}),
    # Not Xavier, and from its formula: sqrt(3) times the deviation 1 / sqrt(32)
    # of an output's matrix.
    (
      layers.SharedEmbeddingSoftmax.HParams(
        params_init=WeightInit.GaussianSqrtFanIn(), **TOKENS
      ),
      {'': (3 / 32) ** 0.5},
    ),
  ],
)
def test_initial_weights_are_those_of_praxis(p, limits):
  params = jax.jit(p.set(name='x').Instantiate().init)(KEY)['params']
  for name, limit in limits.items():
    own = params[f'x/{name}' if name else 'x']
    (w,) = (x for key, x in own.items() if key in ('w', 'emb_var'))
    assert np.std(w) == pytest.approx(limit / 3**0.5, rel=0.06)
    if p.params_init is None:
      # This is the largest of at least 512 uniform numbers.
      assert 0.98 * limit < np.abs(w).max() < 1.00001 * limit
    assert not any(own[key].any() for key in own.keys() & {'b', 'bias'})
  if name == 'combined_qkv':  # Its parts differ.
    q, k, _ = np.moveaxis(np.asarray(w), 1, 0)
    assert abs(np.corrcoef(q.ravel(), k.ravel())[0, 1]) < 0.1


# Batch normalization in training.


def test_batch_norm_is_over_all_devices():
  layer = layers.BatchNorm.HParams(dim=5, decay=0.8, name='n').Instantiate()
  scale, beta, mean, variance = np.abs(_random(4, 5))
  variables = {
    'params': {'n': {'gamma': scale - 1, 'beta': beta}},
    'non_trainable': {'n': {'moving_mean': mean, 'moving_variance': variance}},
  }
  run = jax.jit(lambda x: layer.apply(variables, x, mutable=True))
  # Rows differ between the devices.
  x = _random(4, 3, 5) + np.float32([0, 0, 1, 2])[:, None, None]
  partitioner = partitioning.Partitioner.make({'data': 2}, 'ddp')
  split = jax.device_put(x, partitioner.batch_sharding)
  assert len(split.sharding.device_set) == 2
  out, collected = run(split)
  moving, exact = collected.non_trainable['n'], x.astype(np.float64)
  own = exact.mean((0, 1)), exact.var((0, 1))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  close(out, (exact - own[0]) / np.sqrt(own[1] + 1e-3) * scale + beta)
  close(moving['moving_mean'], 0.8 * mean + 0.2 * own[0])
  close(moving['moving_variance'], 0.8 * variance + 0.2 * own[1])
  # Sums in bfloat16 would stop at 256.
  low = np.full((64, 16, 5), 1, dtype=jnp.bfloat16)
  low[0] = 3
  out, collected = run(low)
  assert out.dtype == jnp.bfloat16
  of_low = collected.non_trainable['n']['moving_mean']
  close(of_low, 0.8 * mean + 0.2 * (1 + 2 / 64))
  # Rounding never makes a variance negative.
  out, _ = run(np.full((3, 5), 1e4 / 3, np.float32))
  assert np.isfinite(out).all()


# Dropout.


def test_what_is_dropped():
  layer = layers.Dropout.HParams(keep_prob=0.8).Instantiate()
  x = jnp.ones((6, 1000))
  run = jax.jit(lambda x, rows: layer.apply({'params': {}}, x, rows, rng=KEY))
  out = np.asarray(run(x, None))
  np.testing.assert_allclose(np.unique(out), [0, 1.25])
  # For 6000 entries, the deviation of the mean is 0.0052.
  assert (out > 0).mean() == pytest.approx(0.8, abs=0.02)
  # A row's entries depend only on its index. By default, it counts from 0.
  rows = np.array([4, 1, 0, 5, 3, 2])
  np.testing.assert_array_equal(run(x, rows), out[rows])
  # Nothing is dropped without need.
  assert layer.apply({'params': {}}, x, do_eval=True) is x
  assert layers.Dropout.HParams().Instantiate().apply({'params': {}}, x) is x


# The loss.


def test_cross_entropy_is_that_of_praxis():
  """FullSoftmax(input_dims=3, num_classes=5) of praxis 1.4.0, jax 0.4.26.

  Python 3.10, float32, CPU, with the weights and inputs below.
  """
  layer = layers.FullSoftmax.HParams(
    name='s', input_dims=3, num_classes=5
  ).Instantiate()
  w = jnp.float32(np.sin(np.arange(15.0)).reshape(3, 5))
  b = jnp.float32(np.cos(np.arange(5.0)))
  x = jnp.float32(np.sin(3 * np.arange(18.0)).reshape(2, 3, 3))
  labels = jnp.int32([[0, 3, 2], [4, 4, 1]])
  weights = jnp.float32([[1, 1, 0], [1, 0.5, 0]])
  variables = {'params': {'s': {'w': w, 'bias': b}}}
  run = jax.jit(functools.partial(layer.apply, method='compute_loss'))
  found = run(variables, x, labels, weights)
  # Processors differ in how they round float32.
  mean = found['total_loss'] / found['total_weight']
  np.testing.assert_allclose(mean, 2.1843700, rtol=1e-5)
  hits = np.argmax(x @ w + b[None, None], axis=-1) == labels
  assert found['correct'] == weights[hits].sum()
  # One label per row.
  first = run(variables, x[:, 0], labels[:, 0], weights[:, 0])
  np.testing.assert_allclose(
    first['per_token_xent'], found['per_token_xent'][:, 0], rtol=1e-5
  )


# What is refused.

PIPELINE = transformers.PipelinedTransformer.HParams


@pytest.mark.parametrize(
  ('p', 'words'),
  [
    (layers.Dropout.HParams(keep_prob=0), r'keep_prob .*\(0, 1'),
    (layers.Conv2D.HParams(filter_shape=(3, 3, 4)), '4 entries for the shape'),
    (layers.Conv2D.HParams(filter_shape=(3, 3, 0, 4)), 'positive integers'),
    (layers.PositionalEmbedding.HParams(embedding_dims=7), 'an even'),
    (layers.ResNet.HParams(blocks=(1, 2)), 'one per group'),
    (layers.ResNet.HParams(channels=(256, 512, 1024, 2049)), 'multiple of 4'),
    (
      layers.ResNet.HParams(pixel_mean=(1.0,), pixel_std=(1.0,)),
      'a number per channel',
    ),
    (
      layers.DotProductAttention.HParams(input_dim=6, num_heads=4),
      'a multiple of num_heads',
    ),
    (layers.StackedTransformer.HParams(), 'num_layers'),
    (PIPELINE(), 'exactly one of num_pipeline'),
    (PIPELINE(num_pipeline_microbatches=0), 'num_pipeline_microbatches'),
    (flax_modules.FlaxModule.HParams(), 'a module_factory_method'),
  ],
)
def test_wrong_hyperparameters_are_refused(p, words):
  with pytest.raises(ValueError, match=words):
    p.Instantiate().abstract_init()
