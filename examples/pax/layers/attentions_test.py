"""Tests of attention against the formulas of its papers.

Shapes: as in attentions.py.
"""

import functools
import math

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import fp8
from examples.pax import base_layer
from examples.pax.layers import attentions

Context = attentions.Context

B, L, M, D, H, K = 2, 5, 7, 6, 4, 4


def _random(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return np.asarray(rng.normal(size=shape), np.float32)


def _made(**fields):
  """Returns a layer and random variables."""
  hparams = attentions.DotProductAttention.HParams(
    input_dim=D, num_heads=H, dim_per_head=K, **fields
  )
  layer = hparams.Instantiate()
  shapes = jax.eval_shape(layer.init, jax.random.key(0))
  rng = np.random.default_rng(1)
  return layer, jax.tree.map(
    lambda x: np.asarray(rng.normal(size=x.shape) / 2, np.float32), shapes
  )


def _weights(variables):
  """Returns path within the layer -> float64 array."""
  return {
    f'{module.partition("/")[2]}/{name}': np.asarray(x, np.float64)
    for module, of in variables['params'].items()
    for name, x in of.items()
  }


# ---- A separate program: float64, one head and one query at a time.


def _numpy_turn(vector, position):
  """Rotates pairs as complex numbers."""
  half = len(vector) // 2
  pairs = vector[:half] + 1j * vector[half:]
  pairs = pairs * np.exp(1j * position / 1e4 ** (np.arange(half) / half))
  return np.concatenate([pairs.real, pairs.imag])


def _numpy_attention(w, x_LD, source_MD, mask_LM, *, cap=0.0, turns=False):
  def part(name, index, x):
    if f'{name}/w' in w:
      y = np.einsum('ld,dhk->lhk', x, w[f'{name}/w'])
      return y + w.get(f'{name}/b', 0)
    name = 'combined_qkv'
    y = np.einsum('ld,dhk->lhk', x, w[f'{name}/w'][:, index])
    return y + (w[f'{name}/b'][index] if f'{name}/b' in w else 0)

  q = part('query', 0, x_LD)
  k, v = (part(name, i, source_MD) for i, name in ((1, 'key'), (2, 'value')))
  scale = np.ones(K)
  if 'per_dim_scale/per_dim_scale' in w:
    scale = np.log2(1 + np.exp(w['per_dim_scale/per_dim_scale']))
  out = np.zeros((len(x_LD), D)) + w.get('post/b', 0)
  for head in range(H):
    group = head * k.shape[1] // H
    for i in range(len(x_LD)):
      query, keys = q[i, head], k[:, group]
      if turns:
        query = _numpy_turn(query, i)
        keys = np.array([_numpy_turn(key, j) for j, key in enumerate(keys)])
      scores = keys @ (query * scale) / math.sqrt(K)
      if cap:
        scores = cap * np.tanh(scores / cap)
      p = np.exp(scores) * mask_LM[i]
      if p.sum():
        out[i] += (p / p.sum() @ v[:, group]) @ w['post/w'][head]
  return out


@pytest.mark.parametrize(
  'fields',
  [
    {'atten_logit_cap': 0.5},
    {'use_bias': False, 'combine_qkv': False, 'use_rotary_position_emb': True},
    {'internal_enable_per_dim_scale': False, 'use_rotary_position_emb': True},
    {'num_kv_heads': 2, 'internal_enable_per_dim_scale': True},
    {'num_kv_heads': 2, 'use_rotary_position_emb': True},
    {'num_kv_heads': 1, 'combine_qkv': False, 'attention_impl': 'flash'},
  ],
)
def test_causal_attention_is_the_papers(fields):
  layer, variables = _made(**fields)
  x = _random(B, L, D)
  segments = np.array([[0, 0, 1, 1, 1], [0] * L])
  actual = jax.jit(
    lambda v, x: layer.apply(v, x, Context(segment_ids=jnp.asarray(segments)))
  )(variables, x)
  for row in range(B):
    mask = np.tri(L) * (segments[row][:, None] == segments[row])
    expected = _numpy_attention(
      _weights(variables),
      x[row],
      x[row],
      mask,
      cap=fields.get('atten_logit_cap', 0.0),
      turns=fields.get('use_rotary_position_emb', False),
    )
    np.testing.assert_allclose(actual[row], expected, atol=2e-5)


def test_rotation_and_scale_have_praxis_numbers():
  """Praxis 1.4.0 (jax 0.4.26, Python 3.10), DotProductAttention.

  input_dim=6, hidden_dim=8, num_heads=2, dim_per_head=4, use_bias=False,
  use_rotary_position_emb=True; a causal mask, and the weights below.
  """
  hparams = attentions.DotProductAttention.HParams(
    name='a',
    input_dim=6,
    num_heads=2,
    dim_per_head=4,
    use_bias=False,
    use_rotary_position_emb=True,
    combine_qkv=False,
  )

  def sines(offset, *shape):
    x = np.sin(0.7 * np.arange(math.prod(shape)) + offset)
    return np.float32(x.reshape(shape))

  variables = {
    'params': {
      'a/query': {'w': sines(0, 6, 2, 4)},
      'a/key': {'w': sines(1, 6, 2, 4)},
      'a/value': {'w': sines(2, 6, 2, 4)},
      # Praxis's weight is [D, H, K].
      'a/post': {'w': np.moveaxis(sines(3, 6, 2, 4), 0, 2)},
      'a/per_dim_scale': {'per_dim_scale': sines(4, 4)},
    }
  }
  x = np.float32(np.sin(0.9 * np.arange(60)).reshape(2, 5, 6))
  layer = hparams.Instantiate()

  @jax.jit
  def run(variables, x):
    whole = layer.apply(variables, x)
    cache = layer.apply(variables, 2, 5, method='empty_cache')
    steps = []
    for i in range(5):
      out, cache = layer.apply(
        variables, x[:, i : i + 1], cache, i, method='extend_step'
      )
      steps.append(out)
    return whole, jnp.concatenate(steps, axis=1)

  for out in run(variables, x):
    np.testing.assert_allclose(
      out[0, 4],
      [3.5762565, -1.0995017, -5.2817287, -7.0931560, -5.7206900, -1.7803881],
      atol=1e-5,
    )
    np.testing.assert_allclose(
      out[1, 2],
      [-2.5556238, 5.4026120, 10.935788, 11.560233, 6.9956603, -0.7090445],
      atol=1e-5,
    )


def test_a_cache_gives_what_the_whole_sequence_does():
  layer, variables = _made(num_kv_heads=2, use_rotary_position_emb=True)
  x = _random(B, L, D)

  @jax.jit
  def run(variables, x):
    whole = layer.apply(variables, x)
    cache = layer.apply(variables, B, L, method='empty_cache')
    first, cache = layer.apply(
      variables, x[:, :3], cache, 0, method='extend_step'
    )
    # The second row steps back by one and overwrites the cache.
    start = jnp.array([3, 2])
    late = jnp.stack([x[0, 3:], x[1, 2:4]])
    second, _ = layer.apply(variables, late, cache, start, method='extend_step')
    return whole, first, second

  whole, first, second = run(variables, x)
  np.testing.assert_allclose(first, whole[:, :3], atol=1e-5)
  np.testing.assert_allclose(second[0], whole[0, 3:], atol=1e-5)
  np.testing.assert_allclose(second[1], whole[1, 2:4], atol=1e-5)


def test_attention_over_another_sequence():
  layer, variables = _made(
    is_cross_attention=True,
    num_kv_heads=2,
    use_rotary_position_emb=True,  # Cross-attention ignores this.
    atten_logit_cap=2.0,
  )
  x, source = _random(B, L, D), _random(B, M, D, seed=2)
  seen = np.ones([B, M], bool)
  seen[0, 4:], seen[1] = False, False  # The second row has no source.
  actual = jax.jit(
    lambda v, x, source: layer.apply(
      v, x, Context(source=source, source_seen=jnp.asarray(seen))
    )
  )(variables, x, source)
  for row in range(B):
    mask = np.broadcast_to(seen[row], [L, M])
    expected = _numpy_attention(
      _weights(variables), x[row], source[row], mask, cap=2.0
    )
    np.testing.assert_allclose(actual[row], expected, atol=2e-5)


def test_attention_that_is_not_causal_leaves_padding_out():
  layer, variables = _made(is_causal=False)
  x = _random(1, L, D)
  seen = np.arange(L)[None] < 3
  actual = jax.jit(lambda v, x: layer.apply(v, x, Context(seen=seen)))(
    variables, x
  )
  mask = np.broadcast_to(seen, [L, L])
  expected = _numpy_attention(_weights(variables), x[0], x[0], mask)
  np.testing.assert_allclose(actual[0], expected, atol=2e-5)


@pytest.mark.parametrize(
  'fields', [{}, {'is_causal': False}, {'is_cross_attention': True}]
)
def test_what_attention_drops_depends_on_the_row(fields):
  layer, variables = _made(atten_dropout_prob=0.5, num_kv_heads=2, **fields)
  x = np.stack([_random(L, D)] * 2)

  @functools.partial(jax.jit, static_argnums=2)
  def run(key, rows, do_eval):
    context = Context(source=x, rows=rows)
    return layer.apply(variables, x, context, rng=key, do_eval=do_eval)

  both, swapped = (
    np.asarray(run(jax.random.key(0), jnp.array(rows), False))
    for rows in ([3, 4], [4, 3])
  )
  np.testing.assert_allclose(swapped, both[::-1], atol=1e-5)
  assert np.abs(both[0] - both[1]).max() > 1e-2
  whole = np.asarray(run(None, None, True))
  np.testing.assert_allclose(whole[0], whole[1], atol=1e-5)
  assert np.abs(both[0] - whole[0]).max() > 1e-2


@pytest.mark.parametrize(
  'fields', [{'is_causal': False}, {'is_cross_attention': True}]
)
def test_only_causal_attention_over_itself_is_extended(fields):
  layer, variables = _made(**fields)
  with pytest.raises(ValueError, match='can be extended'):
    layer.apply(variables, _random(B, 1, D), {}, 0, method='extend_step')


@pytest.mark.parametrize(
  ('fields', 'limits'),
  [
    ({'combine_qkv': True}, {'combined_qkv': 0.0559017}),
    (
      {'combine_qkv': False},
      {'query': 0.0968246, 'key': 0.0968246, 'value': 0.0968246},
    ),
    (
      {'combine_qkv': False, 'num_kv_heads': 2},
      {'query': 0.0968246, 'key': 0.1020621, 'value': 0.1020621},
    ),
    (
      {'combine_qkv': False, 'num_kv_heads': 1},
      {'query': 0.0968246, 'key': 0.3535537, 'value': 0.3535537},
    ),
    # Praxis lacks this. The limits are as for two products.
    (
      {'combine_qkv': False, 'is_cross_attention': True},
      {'query': 0.0968246, 'key': 0.0968246, 'value': 0.0968246},
    ),
  ],
)
def test_initial_weights_have_praxis_limits(fields, limits):
  """The limits are `base_layer.var_init_scale` of each variable in Praxis.

  Praxis 1.4.0, jax 0.4.26, Python 3.10: DotProductAttention (with num_kv_heads,
  MultiQueryDotProductAttention) of input_dim 32, hidden_dim 64, num_heads 4 and
  dim_per_head 16, with its default Xavier initialization.
  """
  hparams = attentions.DotProductAttention.HParams(
    input_dim=32, num_heads=4, dim_per_head=16, **fields
  )
  params = jax.jit(hparams.Instantiate().init)(jax.random.key(0))['params']
  for name, limit in (limits | {'post': 0.0968246}).items():
    own = params[f'dot_product_attention/{name}']
    most = np.abs(own['w']).max()
    # This is the largest of at least 512 uniform numbers.
    assert 0.98 * limit < most < 1.00001 * limit, name
    assert np.std(own['w']) == pytest.approx(limit / 3**0.5, rel=0.06), name
    assert not own['b'].any()


def test_queries_keys_and_values_start_apart():
  hparams = attentions.DotProductAttention.HParams(
    input_dim=48, num_heads=4, dim_per_head=24, combine_qkv=True
  )
  params = jax.jit(hparams.Instantiate().init)(jax.random.key(0))['params']
  w = params['dot_product_attention/combined_qkv']['w']
  q, k, _ = np.moveaxis(np.asarray(w), 1, 0)
  assert abs(np.corrcoef(q.ravel(), k.ravel())[0, 1]) < 0.05


def test_a_weight_of_0_scales_queries_by_1():
  scale = attentions.PerDimScale.HParams(dim=3).Instantiate()
  x = jnp.arange(3.0)
  variables = {'params': {'per_dim_scale': {'per_dim_scale': jnp.zeros(3)}}}
  np.testing.assert_allclose(scale.apply(variables, x), x, rtol=1e-6)


@pytest.mark.parametrize(
  ('fields', 'has_scale'),
  [
    ({}, True),
    ({'internal_enable_per_dim_scale': False}, False),
    # Praxis's MultiQueryDotProductAttention has no scale.
    ({'num_kv_heads': 2}, False),
    ({'num_kv_heads': H}, False),
    ({'num_kv_heads': 2, 'internal_enable_per_dim_scale': True}, True),
  ],
)
def test_which_attention_scales_each_dimension(fields, has_scale):
  _, variables = _made(**fields)
  assert ('per_dim_scale/per_dim_scale' in _weights(variables)) == has_scale


def test_templates_of_fiddle_make_projections_of_their_own():
  config = attentions.DotProductAttention.HParams.config(
    input_dim=D, num_heads=H, dim_per_head=K
  )
  assert fdl.build(config).num_params() == 3 * H * K * (D + 1) + K + (
    H * K * D + D
  )


@pytest.mark.parametrize(
  ('fields', 'match'),
  [
    ({'hidden_dim': 7}, 'be their product'),
    ({'attention_impl': 'cudnn'}, "'cudnn' in .*; expected some of"),
    ({'num_heads': 0}, 'expected positive integers'),
    ({'dim_per_head': 3, 'use_rotary_position_emb': True}, 'an even'),
    ({'dim_per_head': None}, 'a multiple of num_heads'),
  ],
)
def test_what_makes_no_attention_is_refused(fields, match):
  sizes = {'input_dim': D, 'num_heads': H, 'dim_per_head': K}
  hparams = attentions.DotProductAttention.HParams(**{**sizes, **fields})
  with pytest.raises(ValueError, match=match):
    hparams.Instantiate().abstract_init()


@pytest.mark.parametrize(
  ('fields', 'context', 'match'),
  [
    ({'num_kv_heads': 3}, {}, 'must divide .*; got 3 for 4'),
    (
      {'attention_impl': 'flash', 'atten_dropout_prob': 0.1},
      {},
      "Dropout needs .*got 'flash'",
    ),
    ({}, {'seen': np.ones([B, L], bool)}, 'accepts no `seen`'),
  ],
)
def test_what_attention_does_not_take_is_refused(fields, context, match):
  layer, variables = _made(**fields)
  x, key = _random(B, L, D), jax.random.key(0)
  with pytest.raises(ValueError, match=match):
    jax.eval_shape(
      # Only the shapes are computed.
      lambda v: layer.apply(v, x, Context(**context), rng=key),
      variables,
    )


def test_a_projection_says_what_its_shape_lacks():
  hparams = attentions.Projection.HParams(spec='BLD,DHK->BLHK', shape=(3, 4))
  layer = hparams.set(use_bias=False).Instantiate()
  variables = {'params': {'projection': {'w': jnp.ones([3, 4])}}}
  with pytest.raises(ValueError, match=r"'DHK' does not contain the correct"):
    layer.apply(variables, jnp.ones([1, 2, 3]))


def test_a_product_in_fp8_is_that_of_praxis():
  """Fp8EinsumOp of praxis 1.4.0, jax 0.4.26, flax 0.8.2, Python 3.10.

  Three steps in float32 with the inputs, weights and output gradients below.
  The scales of a step come from the earlier steps.
  """
  pytest.importorskip('flax')
  layer = attentions.Projection.HParams(
    name='p', spec='BLD,DF->BLF', shape=(4, 3), use_bias=False, use_fp8=True
  ).Instantiate()
  expected = [
    (
      [0.1796875, 0.0136719, -0.1328125],
      [-15.0625, 2.03125, 13.59375, -15.6875],
      [-0.0859375, -0.6015625, -0.859375],
    ),
    (
      [-0.0592737, -0.0860880, -0.0216396],
      [-7.5661340, 2.2107599, 5.2982001, -7.6233091],
      [4.2152553, 3.1614418, 0.3512714],
    ),
    (
      [1.2275527, 1.2806771, 0.6412872],
      [-6.0271025, -5.8719501, 11.9467913, -6.6095238],
      [4.1976552, -1.7674339, -6.7162490],
    ),
  ]

  def value(seed, *shape):
    flat = np.sin(seed + 0.7 * np.arange(math.prod(shape))) / 2
    return jnp.float32(flat.reshape(shape))

  params, state = fp8.split(
    jax.jit(layer.init)(jax.random.key(0))[base_layer.PARAMS]
  )

  @jax.jit
  def step(params, state, x, by):
    def loss(params, state, x):
      y = layer.apply({'params': fp8.merge(params, state)}, x)
      return (y * by).sum(), y

    return jax.grad(loss, (0, 1, 2), has_aux=True)(params, state, x)

  for i, (y, grad_x, grad_w) in enumerate(expected):
    params['p']['w'] = 3 * value(10 + i, 4, 3)
    x, by = value(i, 1, 2, 4) * (i + 1), 10 * value(20 + i, 1, 2, 3)
    (of_params, state, of_x), out = step(params, state, x, by)
    np.testing.assert_allclose(out[0, 0], y, rtol=1e-5)
    np.testing.assert_allclose(of_x[0, 0], grad_x, rtol=1e-5)
    np.testing.assert_allclose(of_params['p']['w'][0], grad_w, rtol=1e-5)
  scales = state['p']
  np.testing.assert_allclose(scales['input_scale_fp8'], 0.0022135, rtol=1e-4)
  np.testing.assert_allclose(scales['grad_scale_fp8'], 8.70259e-5, rtol=1e-4)
