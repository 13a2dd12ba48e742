"""Tests of jaxline.aot.counting: answers worked out by hand."""

import itertools
import logging

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from examples import transformer
from jaxline.aot import counting
from jaxline.aot import hlo

P = jax.sharding.PartitionSpec
L, B, D, F = 5, 8, 16, 32
ONE_LAYER = 2 * B * D * F  # FLOPs of one of its two products.


def shape(*dims, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(dims, dtype)


def layer(x_BD, w_DF, v_FD):
  # The sine keeps each product's result needed in the backward pass.
  return jnp.sin(jnp.sin(x_BD @ w_DF) @ v_FD)


MLP = (shape(B, D), shape(L, D, F), shape(L, F, D))


def scanned(x, w_LDF, v_LFD, layer=layer):
  return jax.lax.scan(lambda x, wv: (layer(x, *wv), None), x, (w_LDF, v_LFD))[
    0
  ].sum()


def unrolled(x, w_LDF, v_LFD):
  for i in range(L):
    x = layer(x, w_LDF[i], v_LFD[i])
  return x.sum()


# Products.


def test_a_product_is_two_operations_a_term():
  assert counting.flops(jnp.dot, shape(3, 5), shape(5, 7)) == 2 * 3 * 5 * 7


def test_nothing_else_counts():
  assert counting.flops(lambda x: jnp.exp(x).sum(), shape(3, 5)) == 0


def test_batched_products():
  scores = lambda q, k: jnp.einsum('btnh,bsnh->bnts', q, k)
  q, k = shape(2, 7, 4, 16), shape(2, 9, 4, 16)
  assert counting.flops(scores, q, k) == 2 * (2 * 4 * 7 * 9) * 16


def test_no_array_is_made():
  huge = shape(10**7, 10**7)
  assert counting.flops(jnp.dot, huge, huge) == 2e21


def test_a_jaxpr_will_do():
  jaxpr = jax.make_jaxpr(jnp.dot)(shape(3, 5), shape(5, 7))
  assert counting.flops(jaxpr) == 210


@pytest.mark.parametrize('program', [scanned, unrolled])
def test_gradients_are_twice_the_forward_pass(program):
  assert counting.flops(program, *MLP) == L * 2 * ONE_LAYER
  step = jax.value_and_grad(program, argnums=(0, 1, 2))
  assert counting.flops(step, *MLP) == 3 * L * 2 * ONE_LAYER


def test_remat_is_one_more():
  def program(x, w, v):
    return scanned(x, w, v, layer=jax.checkpoint(layer))

  step = jax.value_and_grad(program, argnums=(0, 1, 2))
  assert counting.flops(step, *MLP) == 4 * L * 2 * ONE_LAYER


def test_ragged_products_do_the_rows_once():
  program = lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes).sum()
  args = (shape(24, D), shape(3, D, F), shape(3, dtype=jnp.int32))
  assert counting.flops(program, *args) == 2 * 24 * D * F
  step = jax.value_and_grad(program, argnums=(0, 1))
  assert counting.flops(step, *args) == 3 * 2 * 24 * D * F


# Convolutions.


def convolution(x, kernel, strides=(1, 1), padding='SAME', **kwargs):
  return jax.lax.conv_general_dilated(
    x,
    kernel,
    strides,
    padding,
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    **kwargs,
  )


def test_convolution_without_padding():
  flops = counting.flops(
    lambda x, k: convolution(x, k, padding='VALID'),
    shape(2, 9, 8, 3),
    shape(3, 2, 3, 5),
  )
  assert flops == 2 * (2 * 7 * 7 * 5) * (3 * 2 * 3)


def test_padding_is_not_counted():
  # Of 4 outputs times 3 taps in each direction, the outer 2 fall outside.
  flops = counting.flops(convolution, shape(1, 4, 4, 1), shape(3, 3, 1, 1))
  assert flops == 2 * 10 * 10


def test_grouped_convolution():
  flops = counting.flops(
    lambda x, k: convolution(x, k, padding='VALID', feature_group_count=4),
    shape(2, 8, 8, 8),
    shape(1, 1, 2, 12),
  )
  assert flops == 2 * (2 * 8 * 8 * 12) * 2


@pytest.mark.parametrize('strides', [(1, 1), (2, 3)])
@pytest.mark.parametrize('padding', ['SAME', 'VALID'])
@pytest.mark.parametrize('groups', [1, 2])
def test_gradients_of_a_convolution_are_twice_the_forward_pass(
  strides, padding, groups
):
  """They are convolutions dilated, padded and grouped; the terms are equal."""

  def program(x, kernel):
    return convolution(
      x, kernel, strides, padding, feature_group_count=groups
    ).sum()

  args = shape(2, 9, 10, 4), shape(3, 3, 4 // groups, 6)
  step = jax.value_and_grad(program, argnums=(0, 1))
  assert counting.flops(step, *args) == 3 * counting.flops(program, *args)


def test_meetings_are_those_of_a_loop():
  cases = itertools.product(
    (1, 4), (1, 3), (1, 2, 5), (1, 2, 7), (-1, 0, 2), (1, 2, 8), (1, 2)
  )
  for size, kernel, out, stride, low, dilation, kernel_dilation in cases:
    holes = np.zeros((size - 1) * dilation + 1)
    holes[::dilation] = 1
    expected = 0
    for o, k in itertools.product(range(out), range(kernel)):
      x = o * stride - low + k * kernel_dilation
      expected += bool(0 <= x < len(holes) and holes[x])
    found = hlo.count_meetings(
      size=size,
      kernel=kernel,
      out=out,
      stride=stride,
      low=low,
      dilation=dilation,
      kernel_dilation=kernel_dilation,
    )
    assert found == expected, (size, kernel, out, stride, low, dilation)


# What holds programs.


def test_the_dearest_branch_counts():
  program = lambda i, x, w: jax.lax.switch(
    i,
    [lambda x: x, lambda x: x @ w @ w, lambda x: x @ w],
    x,
  )
  args = shape(dtype=jnp.int32), shape(B, D), shape(D, D)
  assert counting.flops(program, *args) == 2 * (2 * B * D * D)


def test_a_while_loop_counts_once_and_tells(caplog):
  def program(x, w):
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)

  with caplog.at_level(logging.WARNING):
    assert counting.flops(program, shape(B, D), shape(D, D)) == 2 * B * D * D
  assert 'was counted once' in caplog.text


def test_a_while_loop_without_products_is_silent(caplog):
  program = lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: x + 1, x)
  with caplog.at_level(logging.WARNING):
    assert counting.flops(program, shape()) == 0
  assert not caplog.text


def test_a_loop_of_fixed_length():
  program = lambda x, w: jax.lax.fori_loop(2, 9, lambda i, x: x @ w, x)
  assert counting.flops(program, shape(B, D), shape(D, D)) == 7 * 2 * B * D * D


def test_wrapped_functions():
  @jax.custom_vjp
  def with_vjp(x, w):
    return x @ w

  with_vjp.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g)
  )
  args = shape(B, D), shape(D, F)
  assert counting.flops(with_vjp, *args) == ONE_LAYER
  step = jax.value_and_grad(lambda *args: with_vjp(*args).sum(), (0, 1))
  assert counting.flops(step, *args) == 3 * ONE_LAYER

  @jax.custom_jvp
  def with_jvp(x, w):
    return x @ w

  with_jvp.defjvps(lambda dx, out, x, w: dx @ w, lambda dw, out, x, w: x @ dw)
  assert counting.flops(jax.jit(with_jvp), *args) == ONE_LAYER
  many = jax.vmap(jax.jit(with_jvp), in_axes=(0, None))
  assert counting.flops(many, shape(3, B, D), args[1]) == 3 * ONE_LAYER


def test_a_shard_map_counts_on_every_device():
  mesh = jax.make_mesh(
    (2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  program = jax.shard_map(
    jnp.dot, mesh=mesh, in_specs=(P('data'), P()), out_specs=P('data')
  )
  assert counting.flops(program, shape(B, D), shape(D, F)) == ONE_LAYER


def test_a_kernel_runs_its_grid():
  def kernel(x_ref, w_ref, out_ref):
    out_ref[...] = x_ref[...] @ w_ref[...]

  def program(x, w):
    return pl.pallas_call(
      kernel,
      grid=(B // 4, F // 8),
      in_specs=[
        pl.BlockSpec((4, D), lambda i, j: (i, 0)),
        pl.BlockSpec((D, 8), lambda i, j: (0, j)),
      ],
      out_specs=pl.BlockSpec((4, 8), lambda i, j: (i, j)),
      out_shape=shape(B, F),
    )(x, w)

  assert counting.flops(program, shape(B, D), shape(D, F)) == ONE_LAYER


def test_fused_attention(monkeypatch):
  """Traced for a GPU that is not here; compared with the plain products."""
  from jax._src.cudnn import fused_attention_stablehlo

  monkeypatch.setattr(
    fused_attention_stablehlo, 'check_cudnn_version', lambda *_, **__: 91000
  )
  args = (
    shape(2, 256, 4, 64, dtype=jnp.bfloat16),
    *2 * [shape(2, 128, 4, 64, dtype=jnp.bfloat16)],
  )

  def fused(q, k, v):
    out = jax.nn.dot_product_attention(q, k, v, implementation='cudnn')
    return out.astype(jnp.float32).sum()

  def plain(q, k, v):
    weights = jax.nn.softmax(jnp.einsum('btnh,bsnh->bnts', q, k))
    return jnp.einsum('bnts,bsnh->btnh', weights, v).sum()

  product = 2 * (2 * 4 * 256 * 128) * 64
  assert counting.flops(fused, *args) == 2 * product
  assert counting.flops(plain, *args) == 2 * product
  # A fused kernel computes the weights again.
  assert counting.flops(jax.grad(fused, (0, 1, 2)), *args) == 7 * product
  assert counting.flops(jax.grad(plain, (0, 1, 2)), *args) == 6 * product


def test_splash_attention_counts_the_blocks_of_its_mask():
  """Traced for a TPU that is not here: three by three blocks."""
  query = shape(2, 384, 4, 8)
  key = shape(2, 384, 2, 8)

  def total(q, k, v):
    return transformer.splash_attention(q, k, v).sum()

  product = 2 * (2 * 4 * 384 * 384) * 8 * 6 / 9
  assert counting.flops(total, query, key, key) == 2 * product
  gradient = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(query, key, key)
  assert counting.forward_flops(gradient) == 2 * product
  # And the gradient of each result times the result, summed over its width.
  outside = 2 * (2 * 384 * 4 * 8)
  assert counting.flops(gradient) == (2 + 3 + 4) * product + outside
