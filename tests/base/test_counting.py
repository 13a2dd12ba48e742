"""Tests of jaxline.base.counting: answers worked out by hand."""

import functools
import logging

import jax
import jax.numpy as jnp
import pytest

from examples import transformer
from jaxline.base import counting

P = jax.sharding.PartitionSpec
L, B, D, F = 5, 8, 16, 32
ONE_LAYER = 2 * B * D * F  # FLOPs of one of its two products.


def shape(*dims, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(dims, dtype)


MLP = shape(B, D), shape(L, D, F), shape(L, F, D)


def flops_of(program, *args):
  return counting.flops(jax.make_jaxpr(program)(*args))


def layer(x_BD, w_DF, v_FD):
  # The sine keeps each product's result needed in the backward pass.
  return jnp.sin(jnp.sin(x_BD @ w_DF) @ v_FD)


def scanned(x, w_LDF, v_LFD, layer=layer):
  f = lambda x, wv: (layer(x, *wv), None)
  return jax.lax.scan(f, x, (w_LDF, v_LFD))[0].sum()


def ragged(x, w, sizes):
  return jax.lax.ragged_dot(x, w, sizes).sum()


RAGGED = shape(24, D), shape(3, D, F), shape(3, dtype=jnp.int32)


convolution = functools.partial(
  jax.lax.conv_general_dilated,
  window_strides=(1, 1),
  padding='VALID',
  dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
)


def over_devices(x, w):
  mesh = jax.make_mesh(
    (2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  return jax.shard_map(
    jnp.dot, mesh=mesh, in_specs=(P('data'), P()), out_specs=P('data')
  )(x, w)


@pytest.mark.parametrize(
  ('program', 'args', 'flops'),
  [
    (lambda x: jnp.exp(x).sum(), (shape(3, 5),), 0),
    (jnp.dot, (shape(10**7, 10**7),) * 2, 2e21),  # No array is made.
    (
      lambda q, k: jnp.einsum('btnh,bsnh->bnts', q, k),
      (shape(2, 7, 4, 16), shape(2, 9, 4, 16)),
      2 * (2 * 4 * 7 * 9) * 16,
    ),
    (ragged, RAGGED, 2 * 24 * D * F),  # Each row once.
    # Padding is not counted: of 4 outputs times 3 taps in each direction, the
    # outer 2 fall outside.
    (
      functools.partial(convolution, padding='SAME'),
      (shape(1, 4, 4, 1), shape(3, 3, 1, 1)),
      2 * 10 * 10,
    ),
    (
      functools.partial(convolution, feature_group_count=4),
      (shape(2, 8, 8, 8), shape(1, 1, 2, 12)),
      2 * (2 * 8 * 8 * 12) * 2,
    ),
    # The dearest branch.
    (
      lambda i, x, w: jax.lax.switch(
        i, [lambda x: x, lambda x: x @ w @ w, lambda x: x @ w], x
      ),
      (shape(dtype=jnp.int32), shape(B, D), shape(D, D)),
      2 * (2 * B * D * D),
    ),
    (over_devices, (shape(B, D), shape(D, F)), ONE_LAYER),
  ],
)
def test_products_count(program, args, flops):
  assert flops_of(program, *args) == flops


@pytest.mark.parametrize(
  ('program', 'args', 'factor'),
  [
    (scanned, MLP, 3),
    (functools.partial(scanned, layer=jax.checkpoint(layer)), MLP, 4),
    (ragged, RAGGED, 3),
    # They are convolutions dilated and padded; the terms are equal.
    (
      lambda *args: convolution(*args, window_strides=(2, 3)).sum(),
      (shape(2, 9, 10, 4), shape(3, 3, 4, 6)),
      3,
    ),
  ],
)
def test_gradients_count_twice(program, args, factor):
  weights = [i for i, x in enumerate(args) if x.dtype == jnp.float32]
  step = jax.value_and_grad(program, argnums=tuple(weights))
  forward = flops_of(program, *args)
  assert flops_of(step, *args) == factor * forward
  assert args is not MLP or forward == 2 * L * ONE_LAYER


def test_a_while_loop_counts_once_and_tells(caplog):
  def program(step, *args):
    loop = lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, step, x)
    with caplog.at_level(logging.WARNING):
      return flops_of(loop, *args)

  assert program(lambda x: x + 1, shape()) == 0
  assert not caplog.text  # There is no product in it.
  assert program(lambda x: x @ jnp.eye(D), shape(B, D)) == 2 * B * D * D
  assert 'was counted once' in caplog.text


def test_splash_attention_counts_the_blocks_of_its_mask():
  """Traced for a TPU that is not here: three by three blocks."""
  query = shape(2, 384, 4, 8)
  key = shape(2, 384, 2, 8)

  def total(q, k, v):
    return transformer.splash_attention(q, k, v).sum()

  product = 2 * (2 * 4 * 384 * 384) * 8 * 6 / 9
  assert flops_of(total, query, key, key) == 2 * product
  gradient = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(query, key, key)
  assert counting.forward_flops(gradient) == 2 * product
  # And the gradient of each result times the result, summed over its width.
  outside = 2 * (2 * 384 * 4 * 8)
  assert counting.flops(gradient) == (2 + 3 + 4) * product + outside
