"""Attention: rotation, scale and FP8 are Praxis's; its dropout; its errors.

`transformers_test` compares all kinds of attention with NumPy, and decoding
with the whole sequence. Shapes: as in attentions.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import fp8
from examples.pax import base_layer
from examples.pax.layers import attentions

Context = attentions.Context

B, L, D, H, K = 2, 5, 6, 4, 4


def _random(*shape):
  return np.float32(np.random.default_rng(0).normal(size=shape))


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
  out = jax.jit(hparams.Instantiate().apply)(variables, x)
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


@pytest.mark.parametrize('name', ['is_causal', 'is_cross_attention'])
def test_scores_that_a_cap_makes_equal_give_the_mean_of_what_is_seen(name):
  is_own = name == 'is_causal'
  layer, variables = _made(atten_logit_cap=1e-6, **{name: not is_own})
  x, seen = _random(B, L, D), np.arange(L) < [[3], [4]]
  of_x = {'seen': seen} if is_own else {'source': x, 'source_seen': seen}
  values = layer.apply(variables, x, method='keys_and_values')['value']
  post = variables['params']['dot_product_attention/post']
  out = jax.jit(lambda v: layer.apply(v, x, Context(**of_x)))(variables)
  for row, number in enumerate((3, 4)):
    mean_HK = values[row, :number].mean(axis=0)
    expected = np.einsum('hk,hkd->d', mean_HK, post['w']) + post['b']
    np.testing.assert_allclose(out[row], np.tile(expected, (L, 1)), atol=1e-4)


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


def test_which_attention_scales_each_dimension():
  for fields, has_scale in (
    ({}, True),
    ({'internal_enable_per_dim_scale': False}, False),
    # Praxis's MultiQueryDotProductAttention has no scale.
    ({'num_kv_heads': H}, False),
    ({'num_kv_heads': 2, 'internal_enable_per_dim_scale': True}, True),
  ):
    _, variables = _made(**fields)
    has = 'dot_product_attention/per_dim_scale' in variables['params']
    assert has == has_scale


def test_what_attention_does_not_take_is_refused():
  x = _random(B, L, D)
  layer, variables = _made()
  with pytest.raises(ValueError, match='accepts no `seen`'):
    layer.apply(variables, x, Context(seen=np.ones([B, L], bool)))
  # Only causal attention over itself has a cache.
  for fields in {'is_causal': False}, {'is_cross_attention': True}:
    layer, variables = _made(**fields)
    with pytest.raises(ValueError, match='can be extended'):
      layer.apply(variables, x, {}, 0, method='extend_step')


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
