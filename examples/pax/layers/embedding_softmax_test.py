"""Tests of embeddings, positions and the output layer against NumPy.

Shapes: B batch, L length, D embed, V vocab, H heads, K head dim.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from examples import transformer
from examples.pax import base_layer
from examples.pax.layers import embedding_softmax

KEY = jax.random.key(0, impl='rbg')
_RNG = np.random.default_rng(0)
B, L, D, V = 2, 4, 6, 7
IDS = _RNG.integers(V, size=(B, L), dtype=np.int32)
X = np.float32(_RNG.normal(size=(B, L, D)))
TABLE = np.float32(_RNG.normal(size=(V, D)))
BIAS = np.float32(_RNG.normal(size=V))
WEIGHTS = np.float32([[1, 0, 0.5, 2], [1, 1, 0, 3]])


def _softmax(cls, **kwargs):
  """Returns a layer with these sizes and its variables."""
  p = cls.HParams(num_classes=V, input_dims=D, name='s', **kwargs)
  table = (
    {'w': TABLE.T}
    if cls is embedding_softmax.FullSoftmax
    else {'emb_var': TABLE}
  )
  bias = {'bias': BIAS} if p.has_bias else {}
  return p.Instantiate(), {'params': {'s': {**table, **bias}}}


@pytest.mark.parametrize(
  'cls',
  [embedding_softmax.Embedding, embedding_softmax.SharedEmbeddingSoftmax],
)
def test_embedding(cls):
  p = cls.HParams(num_classes=V, input_dims=D, name='s')
  variables = {'params': {'s': {'emb_var': TABLE, 'bias': BIAS}}}

  def lookup(ids=IDS):
    layer = p.Instantiate()
    return layer.apply(variables, jnp.asarray(ids), method='emb_lookup')

  np.testing.assert_array_equal(lookup(), TABLE[IDS])
  p.scale_sqrt_depth = True
  np.testing.assert_allclose(lookup(), TABLE[IDS] * 6**0.5, rtol=1e-6)
  np.testing.assert_allclose(lookup(IDS[0]), TABLE[IDS[0]] * 6**0.5, rtol=1e-6)
  p.fprop_dtype = jnp.bfloat16
  assert lookup().dtype == jnp.bfloat16
  weight = p.Instantiate().abstract_init()['params']['s']['emb_var']
  assert weight.axes == ('vocab', 'embed')
  assert weight.full_shape == (V, D)


def test_variables():
  def weights(cls, **kwargs):
    layer, _ = _softmax(cls, **kwargs)
    return {
      name: (weight.full_shape, weight.axes)
      for name, weight in layer.abstract_init()['params']['s'].items()
    }

  bias = {'bias': ((V,), ('vocab',))}
  w = {'w': ((D, V), ('embed', 'vocab'))}
  emb_var = {'emb_var': ((V, D), ('vocab', 'embed'))}
  assert weights(embedding_softmax.FullSoftmax) == {**w, **bias}
  assert weights(embedding_softmax.FullSoftmax, has_bias=False) == w
  shared = embedding_softmax.SharedEmbeddingSoftmax
  assert weights(shared) == {**emb_var, **bias}
  assert weights(shared, has_bias=False) == emb_var
  # ResNet-50's output layer.
  p = embedding_softmax.FullSoftmax.HParams(num_classes=1000, input_dims=2048)
  assert p.Instantiate().num_params() == 2_049_000


def _logits(cap=0.0, has_bias=True):
  logits = X.astype(np.float64) @ TABLE.T + (BIAS if has_bias else 0)
  return cap * np.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize(
  'cls',
  [embedding_softmax.FullSoftmax, embedding_softmax.SharedEmbeddingSoftmax],
)
@pytest.mark.parametrize(
  ('cap', 'has_bias'), [(0.0, True), (2.0, True), (0.0, False)]
)
def test_logits(cls, cap, has_bias):
  layer, variables = _softmax(cls, soft_cap_logits=cap, has_bias=has_bias)
  expected = _logits(cap, has_bias)
  out = jax.jit(layer.apply)(variables, X)
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
  rows = layer.apply(variables, jnp.asarray(X[:, 0]))
  np.testing.assert_allclose(rows, expected[:, 0], rtol=1e-5, atol=1e-5)


def test_logits_of_low_precision_are_summed_in_float32():
  cls = embedding_softmax.SharedEmbeddingSoftmax
  layer, variables = _softmax(cls, fprop_dtype=jnp.bfloat16)
  out = layer.apply(variables, jnp.asarray(X))
  assert out.dtype == jnp.float32
  low = [v.astype(jnp.bfloat16).astype(np.float64) for v in (X, TABLE)]
  np.testing.assert_allclose(
    out, low[0] @ low[1].T + BIAS, rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize(
  ('cls', 'chunks'),
  [
    (embedding_softmax.FullSoftmax, 2),
    (embedding_softmax.SharedEmbeddingSoftmax, 1),
  ],
)
def test_loss_and_gradients(cls, chunks):
  cap = 2.0
  layer, variables = _softmax(cls, soft_cap_logits=cap, chunks=chunks)

  def loss(params, x):
    found = layer.apply(
      {'params': params}, x, IDS, WEIGHTS, method='compute_loss'
    )
    return found['total_loss'], found

  (grads, grad_x), found = jax.jit(
    jax.grad(loss, argnums=(0, 1), has_aux=True)
  )(variables['params'], X)
  logits = _logits(cap)
  nats = -np.take_along_axis(
    special.log_softmax(logits, axis=-1), IDS[..., None], axis=-1
  )[..., 0]
  assert sorted(found) == [
    'correct',
    'per_token_xent',
    'total_loss',
    'total_weight',
  ]
  assert {value.dtype for value in found.values()} == {jnp.dtype('float32')}
  np.testing.assert_allclose(found['per_token_xent'], nats, rtol=1e-5)
  np.testing.assert_allclose(
    found['total_loss'], (nats * WEIGHTS).sum(), rtol=1e-5
  )
  assert found['total_weight'] == 8.5
  correct = (logits.argmax(axis=-1) == IDS) * WEIGHTS
  np.testing.assert_allclose(found['correct'], correct.sum(), rtol=1e-6)
  # The gradient is (softmax - one hot) times the weight, through the cap.
  grad = (special.softmax(logits, axis=-1) - np.eye(V)[IDS]) * (
    WEIGHTS[..., None] * (1 - (logits / cap) ** 2)
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  close(grad_x, grad @ TABLE)
  close(grads['s']['bias'], grad.sum(axis=(0, 1)))
  table = np.einsum('blv,bld->vd', grad, X)
  if cls is embedding_softmax.FullSoftmax:
    close(grads['s']['w'], table.T)
  else:
    close(grads['s']['emb_var'], table)


def test_loss_of_one_label_a_row():
  layer, variables = _softmax(embedding_softmax.FullSoftmax)
  run = jax.jit(functools.partial(layer.apply, method='compute_loss'))
  found = run(variables, X[:, 0], IDS[:, 0], np.float32([1, 3]))
  nats = (
    special.logsumexp(_logits()[:, 0], axis=-1)
    - _logits()[np.arange(B), 0, IDS[:, 0]]
  )
  np.testing.assert_allclose(found['per_token_xent'], nats, rtol=1e-5)
  np.testing.assert_allclose(
    found['total_loss'], nats @ np.array([1, 3]), rtol=1e-5
  )
  layer, variables = _softmax(embedding_softmax.FullSoftmax, chunks=3)
  with pytest.raises(ValueError, match='got 3 for 4 tokens'):
    layer.apply(variables, X, IDS, WEIGHTS, method='compute_loss')


def test_the_table_starts_as_a_matrix_of_the_output():
  p = embedding_softmax.SharedEmbeddingSoftmax.HParams(
    num_classes=800, input_dims=25, name='s'
  )
  p.params_init = base_layer.WeightInit.GaussianSqrtFanIn()
  table = p.Instantiate().init(KEY)['params']['s']['emb_var']
  assert np.std(table) == pytest.approx(1 / 5, rel=0.03)


POSITIONS = np.array([[0, 1, 2, 50], [7, 0, 1, 9999]], np.int32)


def test_sinusoidal_positions():
  p = embedding_softmax.PositionalEmbedding.HParams(
    embedding_dims=6, min_timescale=2.0, max_timescale=200.0
  )
  assert p.Instantiate().num_params() == 0
  nothing = {'params': {}}
  out = jax.jit(p.Instantiate().apply)(nothing, POSITIONS)
  # Praxis's frequencies are from 2 to 2 / (200 / 2).
  angles = POSITIONS[..., None] * np.array([2.0, 0.2, 0.02])
  np.testing.assert_allclose(
    out, np.concatenate([np.sin(angles), np.cos(angles)], -1), atol=1e-3
  )
  odd = embedding_softmax.PositionalEmbedding.HParams(embedding_dims=7)
  with pytest.raises(ValueError, match=r'is 7; .*an even number'):
    odd.Instantiate().init(jax.random.key(0))
  p.fprop_dtype = jnp.bfloat16
  low = jax.eval_shape(p.Instantiate().apply, nothing, POSITIONS)
  assert low.dtype == jnp.bfloat16


def test_trained_positions():
  p = embedding_softmax.TrainablePositionalEmbedding.HParams(
    max_seq_length=V, embedding_dims=D, name='p'
  )
  layer = p.Instantiate()
  weight = layer.abstract_init()['params']['p']['emb_var']
  assert (weight.full_shape, weight.axes) == ((V, D), (None, 'embed'))
  variables = {'params': {'p': {'emb_var': TABLE}}}
  np.testing.assert_array_equal(
    layer.apply(variables, jnp.asarray(IDS)), TABLE[IDS]
  )
  with pytest.raises(ValueError, match='8 tokens; p has max_seq_length 7'):
    layer.apply(variables, jnp.zeros((1, 8), jnp.int32))


def test_rotary_positions():
  x_BLHK = np.float32(_RNG.normal(size=(B, L, 3, 8)))
  layer = embedding_softmax.RotaryPositionalEmbedding.HParams(
    embedding_dims=8, max_timescale=100.0
  ).Instantiate()
  positions = np.minimum(POSITIONS, 60)
  out = jax.jit(layer.apply)({'params': {}}, x_BLHK, positions)
  # Pair k, a complex number, is rotated by position / 100 ** (2 k / 8).
  turn = np.exp(
    1j * positions[:, :, None, None] / 100 ** (np.arange(4) * 2 / 8)
  )
  pairs = (x_BLHK[..., :4] + 1j * x_BLHK[..., 4:]) * turn
  np.testing.assert_allclose(
    out, np.concatenate([pairs.real, pairs.imag], axis=-1), atol=1e-4
  )
  with pytest.raises(ValueError, match='is 8; expected the width of the heads'):
    layer.apply({'params': {}}, x_BLHK[..., :6], positions)


@pytest.mark.parametrize('chunks', [1, 3])
def test_cross_entropy_is_that_of_praxis(chunks):
  """FullSoftmax(input_dims=3, num_classes=5) of praxis 1.4.0, jax 0.4.26.

  Python 3.10, float32, CPU, with the weights and inputs below.
  """
  layer = embedding_softmax.FullSoftmax.HParams(
    name='s', input_dims=3, num_classes=5, chunks=chunks
  ).Instantiate()
  w = jnp.float32(np.sin(np.arange(15.0)).reshape(3, 5))
  b = jnp.float32(np.cos(np.arange(5.0)))
  x = jnp.float32(np.sin(3 * np.arange(18.0)).reshape(2, 3, 3))
  labels = jnp.int32([[0, 3, 2], [4, 4, 1]])
  weights = jnp.float32([[1, 1, 0], [1, 0.5, 0]])
  run = jax.jit(functools.partial(layer.apply, method='compute_loss'))
  found = run({'params': {'s': {'w': w, 'bias': b}}}, x, labels, weights)
  # Processors differ in how they round float32.
  mean = found['total_loss'] / found['total_weight']
  np.testing.assert_allclose(mean, 2.1843700, rtol=1e-5)
  # Labels may be probabilities.
  probs = jnp.full((2, 3, 5), 0.1).at[..., 1].set(0.6)
  nats = transformer.cross_entropy(x @ w + b[None, None], probs)
  np.testing.assert_allclose(nats[0], [1.516273, 1.695443, 1.470614], rtol=1e-5)


def test_positions_have_a_length_by_default():
  # The default is from Praxis 1.4.0.
  layer = embedding_softmax.TrainablePositionalEmbedding.HParams(
    embedding_dims=2
  ).Instantiate()
  assert layer.num_params() == 2 * 10_240
