"""Tests of the mathematics of transformers against NumPy in float64.

Shapes: as in transformer.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import transformer
from jaxline import errors
from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import partitioning


def _normal(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape)


def _float32(*arrays):
  return [jnp.asarray(x, jnp.float32) for x in arrays]


# ---- Attention.


def _numpy_attention(q, k, v, sees, cap=0.0, scale=None):
  """One query at a time; `sees(b, l, m)` says which keys it sees."""
  batch, length, heads, width = q.shape
  per_group = heads // k.shape[2]
  out = np.zeros(q.shape)
  for b, i, h in np.ndindex(batch, length, heads):
    seen = [m for m in range(k.shape[1]) if sees(b, i, m)]
    if not seen:
      continue
    scores = k[b, seen, h // per_group] @ q[b, i, h]
    scores = scores * (1 / math.sqrt(width) if scale is None else scale)
    if cap:
      scores = cap * np.tanh(scores / cap)
    p = np.exp(scores) / np.exp(scores).sum()
    out[b, i, h] = p @ v[b, seen, h // per_group]
  return out


_OFFSETS = np.array([0, 5, 2])
_QUERY_IDS = np.array([[1, 1, 2, 3], [1, 2, 2, 2], [7, 7, 7, 8]])
_OWN_IDS = np.pad(_QUERY_IDS, ((0, 0), (0, 5)))
_KEY_IDS = np.array([[1, 1, 1, 2, 2, 3, 3, 3, 0]] * 3)  # Of 7 and 8 none.
_SEEN = np.arange(9) < np.array([9, 4, 0])[:, None]  # The last row sees none.


# Arguments, which key a query sees, and heads of keys and values.
_ATTENTION = {
  'window': ({'offset': 3, 'window': 2}, lambda b, i, m: 0 <= i + 3 - m < 2, 4),
  'segments': (
    {'segments': (_QUERY_IDS, _OWN_IDS)},
    lambda b, i, m: m <= i and _QUERY_IDS[b, i] == _OWN_IDS[b, m],
    2,
  ),
  'padding': (
    {'is_causal': False, 'seen_BM': _SEEN},
    lambda b, i, m: _SEEN[b, m],
    2,
  ),
  'all_together': (
    {
      'offset': _OFFSETS,
      'segments': (_QUERY_IDS, _KEY_IDS),
      'seen_BM': _SEEN,
      'cap': 2.0,
      'scale': 0.3,
    },
    lambda b, i, m: (
      m <= i + _OFFSETS[b]
      and _QUERY_IDS[b, i] == _KEY_IDS[b, m]
      and _SEEN[b, m]
    ),
    1,
  ),
}


@pytest.mark.parametrize('name', _ATTENTION)
def test_attention(name):
  arguments, sees, groups = _ATTENTION[name]
  q, (k, v) = _normal(3, 4, 4, 6), _normal(2, 3, 9, groups, 6, seed=1)
  limits = {key: arguments[key] for key in ('cap', 'scale') if key in arguments}
  attend = jax.jit(functools.partial(transformer.attend, **arguments))
  actual = attend(*_float32(q, k, v))
  expected = _numpy_attention(q, k, v, sees, **limits)
  np.testing.assert_allclose(actual, expected, atol=1e-6)


# 160 is attended in two halves.
@pytest.mark.parametrize(
  ('length', 'documents', 'groups'), [(5, 3, 2), (160, 1, 4), (160, 3, 2)]
)
def test_causal_attention(length, documents, groups):
  q = _normal(1, length, 4, 8)
  k, v = _normal(2, 1, length, groups, 8, seed=1)
  # Of three documents the second lies in both halves.
  ids = np.arange(length) * documents // length
  actual, _ = jax.jit(transformer.causal_attention, static_argnums=3)(
    *_float32(q, k, v),
    'einsum',
    None if documents == 1 else jnp.asarray(ids)[None],
  )
  expected = _numpy_attention(
    q, k, v, lambda b, i, m: m <= i and ids[i] == ids[m]
  )
  np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_dropout_of_attention_is_of_the_weights_of_keys():
  # A value for each key shows its weight. 128 are attended in two halves.
  q, k = _float32(*_normal(2, 2, 128, 2, 128))
  v = np.broadcast_to(np.eye(128, dtype=np.float32)[None, :, None], q.shape)
  keys = iter([jax.random.key(0), jax.random.key(1)])
  drop = lambda x: transformer.drop(x, next(keys), 0.25, jnp.arange(2), 0)
  attend = lambda *x: transformer.causal_attention(*x, 'einsum', dropout=drop)
  dropped, _ = jax.jit(attend)(q, k, v)
  kept = np.asarray(dropped) != 0
  expected = np.where(kept, jax.jit(transformer.attend)(q, k, v) / 0.75, 0)
  np.testing.assert_allclose(dropped, expected, rtol=1e-4)
  # Of each row and head 8,256 weights: the deviation is 0.5%.
  share = kept.sum((1, 3)) / 8256
  np.testing.assert_allclose(share, 0.75, atol=0.02)


# One splits the rows. The other splits the heads, of which there is one for the
# keys, and the length of what goes from one layer to the next.
@pytest.mark.parametrize(
  ('preset', 'axis', 'groups', 'axes'),
  [
    ('fsdp', 'data', 2, transformer.HEADS),
    ('sp', 'mdl', 1, ('batch', 'length', None, None)),
  ],
)
def test_each_device_calls_splash_attention_on_its_part(
  preset, axis, groups, axes
):
  # In three blocks, the last one padded. One of the rows is one document.
  q = _normal(2, 300, 4, 8)
  k, v = _normal(2, 2, 300, groups, 8, seed=1)
  ids = jnp.asarray(np.arange(300) * np.array([[3], [1]]) // 300)
  arrays = _float32(q, k, v)
  # The gradient of each entry of the result is another one.
  weights = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

  def loss_and_grads(attention, **options):
    total = lambda *args: jnp.sum(attention(*args, 2.0) * weights)
    grad = jax.value_and_grad(total, (0, 1, 2))
    return jax.jit(grad, **options)(*arrays, ids)

  def einsum(q, k, v, *args):
    return transformer.causal_attention(q, k, v, 'einsum', *args)[0]

  # The kernel for TPUs, on CPU.
  kernel = functools.partial(transformer.splash_attention, interpret=True)
  partitioner = partitioning.Partitioner.make({'data': 1, axis: 2}, preset)
  places = [partitioner.spec(axes, x.shape) for x in arrays]
  places = [*partitioner.shardings(places), partitioner.batch_sharding]
  with partitioner.activate():
    split = loss_and_grads(kernel, in_shardings=places)
  grad_q = split[1][0]
  assert grad_q.sharding.shard_shape(grad_q.shape) != grad_q.shape
  expected = loss_and_grads(einsum)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  jax.tree.map(close, split, expected)


def test_flash_attention_is_that_of_the_platform_of_the_program(monkeypatch):
  q, k, v = _float32(*_normal(3, 2, 128, 4, 8))
  ids = jnp.zeros([2, 128], jnp.int32)

  def program(implementation, *args):
    run = lambda *args: transformer.causal_attention(
      *args[:3], implementation, *args[3:]
    )
    return str(jax.make_jaxpr(run)(*args))

  assert program('flash', q, k, v, ids) == program('einsum', q, k, v, ids)
  # The chips of a topology, on a machine that has none.
  with mesh_lib.on_devices(mesh_lib.abstract_devices(4)):
    partitioner = partitioning.Partitioner.make(None, 'fsdp')
  with partitioner.activate():
    assert 'splash_mha_fwd_segmented' in program('flash', q, k, v, ids)
    # Less than a block.
    short = [x[:, :127] for x in (q, k, v)]
    assert 'splash' not in program('flash', *short)
  monkeypatch.setattr(transformer, 'platform', lambda: 'gpu')
  with pytest.raises(errors.UsageError, match='needs bfloat16; got float32'):
    transformer.causal_attention(q, k, v, 'flash')
  half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
  said = r"cap of 5.0 needs .*on GPU; got 'flash'"
  with pytest.raises(errors.UsageError, match=said):
    transformer.causal_attention(*half, 'flash', None, 5.0)


# ---- Element by element.


def test_normalizations():
  x = 3 * _normal(2, 3, 8) + 20
  scale, bias = _normal(2, 8, seed=1)
  x32, scale32, bias32 = _float32(x, scale, bias)
  rms = transformer.normalize(x32, scale=scale32, epsilon=0.5, centered=False)
  expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5) * scale
  np.testing.assert_allclose(rms, expected, atol=1e-5)
  layer = transformer.normalize(
    x32, scale=scale32, bias=bias32, epsilon=0.5, centered=True
  )
  expected = (x - x.mean(-1, keepdims=True)) * scale
  expected = expected / np.sqrt(x.var(-1, keepdims=True) + 0.5) + bias
  np.testing.assert_allclose(layer, expected, atol=1e-4)
  # Computed in float32, whatever goes in.
  low = x32.astype(jnp.bfloat16)
  actual = transformer.normalize(low, scale=scale32, epsilon=0, centered=True)
  assert actual.dtype == jnp.bfloat16
  x = np.asarray(low, np.float64)
  expected = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) * scale
  np.testing.assert_allclose(
    np.asarray(actual, np.float64), expected, rtol=2**-8, atol=1e-6
  )


def test_activations():
  a, b = hidden = 2 * _normal(2, 2, 3, 5)
  gelu = 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
  expected = {
    'gelu': gelu,
    'swiglu': a / (1 + np.exp(-a)) * b,
    'geglu': gelu * b,
  }
  assert set(expected) == set(transformer.ACTIVATIONS)
  for name, values in expected.items():
    parts = transformer.num_parts(name)
    x = jnp.asarray(np.stack(hidden[:parts], axis=2), jnp.float32)
    actual = jax.jit(transformer.activate, static_argnums=0)(name, x)
    np.testing.assert_allclose(actual, values, atol=1e-6)


def test_dropout_depends_on_row_and_place_only():
  x = np.ones((4, 50, 20), np.float32)
  key, rows = jax.random.key(3), np.arange(4)
  drop = jax.jit(transformer.drop, static_argnums=2)
  dropped = np.asarray(drop(x, key, 0.25, rows, 1))
  assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
  # 4000 draws: five standard deviations of their mean.
  assert np.mean(dropped == 0) == pytest.approx(0.25, abs=0.035)
  order = np.array([2, 0, 3, 1])
  moved = drop(x, key, 0.25, order, 1)
  np.testing.assert_array_equal(moved, dropped[order])
  assert np.any(dropped[0] != dropped[1])
  assert np.any(drop(x, key, 0.25, rows, 2) != dropped)
  assert transformer.drop(x, None, 0.25, rows, 1) is x


# ---- Products.


def test_a_product_of_bfloat16_is_summed_in_float32_and_its_gradient_is_not():
  a, b, grad = (
    jnp.asarray(x, jnp.bfloat16)
    for x in (_normal(3, 4096), _normal(4096, 2, seed=1), _normal(3, 2))
  )
  actual, vjp = jax.vjp(
    functools.partial(transformer.einsum, 'ab,bc->ac'), a, b
  )
  a64, b64, grad64 = (np.asarray(x, np.float64) for x in (a, b, grad))
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, a64 @ b64, atol=1e-3)
  for actual, expected in zip(
    vjp(grad.astype(jnp.float32)), (grad64 @ b64.T, a64.T @ grad64), strict=True
  ):
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(
      np.asarray(actual, np.float64), expected, rtol=2**-7, atol=2**-7
    )


def test_gradients_of_a_product_with_a_weight():
  # The last result is narrower than its input, the others are wider.
  for spec, *shapes in (
    ('...D,DF->...F', (2, 3, 4), (4, 6)),
    ('...D,DF->...F', (1, 2, 1, 3, 1, 4), (4, 6)),
    ('TBLD,TDF->TBLF', (2, 1, 3, 4), (2, 4, 6)),
    ('BLF,FD->BLD', (2, 3, 6), (6, 4)),
  ):
    x, w = _float32(*(_normal(*shape, seed=len(shape)) for shape in shapes))
    energy = lambda dot, x, w, spec=spec: jnp.square(dot(spec, x, w)).sum()
    grads = jax.jit(jax.grad(energy, (1, 2)), static_argnums=0)
    actual, expected = (grads(f, x, w) for f in (transformer.dot, jnp.einsum))
    for a, b in zip(actual, expected, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_gradients_are_summed_over_the_axes_of_a_shard_map():
  over = partitioning.Partitioner.make({'data': 2}, 'ddp')
  for call in (
    lambda w, x: transformer.rows_of(w, (x[:, 0] > 0).astype(jnp.int32)),
    lambda w, x: transformer.dot('BD,DF->BF', x, w),
  ):
    loss = lambda w, x, call=call: jnp.square(call(w, x)).sum()
    split = jax.shard_map(
      lambda *args, loss=loss: jax.lax.psum(loss(*args), over.rules.batch),
      mesh=over.mesh, out_specs=over.replicated.spec,
      in_specs=(over.replicated.spec, over.batch_sharding.spec),
    )  # fmt: skip
    args = _float32(_normal(3, 5), _normal(4, 3))
    actual, expected = (jax.jit(jax.grad(f))(*args) for f in (split, loss))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


# ---- The loss.


@pytest.mark.parametrize('chunks', [1, 3])
@pytest.mark.parametrize(('cap', 'has_bias'), [(0.0, False), (2.0, True)])
def test_cross_entropy_and_its_gradients(chunks, cap, has_bias):
  x, table = _normal(2, 6, 5), 2 * _normal(7, 5, seed=1)
  bias = _normal(7, seed=2) * has_bias
  targets = np.random.default_rng(1).integers(0, 7, (2, 6))
  weights = np.arange(12.0).reshape(2, 6) % 4 / 2
  scores = x @ table.T + bias
  logits = cap * np.tanh(scores / cap) if cap else scores
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  one_hot = np.eye(7)[targets]
  nats = -np.log((p * one_hot).sum(-1))
  correct = weights[logits.argmax(-1) == targets].sum()
  assert 0 < correct < weights.sum()
  # Of three times the sum.
  grad = 3 * weights[..., None] * (p - one_hot)
  if cap:
    grad = grad * (1 - np.tanh(scores / cap) ** 2)
  grads = [grad @ table, np.einsum('BLV,BLD->VD', grad, x), grad.sum((0, 1))]

  x, table, bias, weights32 = _float32(x, table, bias, weights)

  def thrice(x, head):
    out = transformer.chunked_cross_entropy(
      x, head, jnp.asarray(targets), weights32, chunks=chunks, cap=cap
    )
    # No gradient belongs to the latter.
    return 3 * out.total + 5 * out.correct + 7 * out.nats_BL.sum(), out

  args = x, (table, bias if has_bias else None)
  grad = jax.value_and_grad(thrice, (0, 1), has_aux=True)
  (_, out), found = jax.jit(grad)(*args)
  for actual in (out, jax.jit(thrice)(*args)[1]):
    expected = (weights * nats).sum(), correct, nats
    for a, b in zip(actual, expected, strict=True):
      assert a.dtype == jnp.float32
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  for a, b in zip(jax.tree.leaves(found), grads[: 2 + has_bias], strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize('most', [0, 24])
def test_an_initial_value_has_the_bits_of_its_shape(most, monkeypatch):
  monkeypatch.setattr(transformer, '_MAX_FLAT', most)
  args = jax.random.key(0), (2, 3, 4), jnp.float32
  made = transformer.draw(jax.random.normal, *args)
  np.testing.assert_array_equal(made, jax.random.normal(*args))
