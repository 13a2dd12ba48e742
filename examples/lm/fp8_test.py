"""Tests of FP8 products against arithmetic in numpy, and in a model's training.

Shapes: as in model.py.
"""

import dataclasses
import functools
import types

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import fp8
import jaxline
from jaxline import sharded
from jaxline.base import trees
from jaxline.parallel import partitioning

from . import experiment_test
from . import model
from . import model_test

TINY = dataclasses.replace(model_test.TINY, scan_layers=True, matmul='fp8')


def _round(x, scale, dtype):
  """Rounds to the nearest number of a format times the scale, in float64."""
  largest = float(jnp.finfo(dtype).max)
  x = np.clip(np.asarray(x, np.float64) / scale, -largest, largest)
  return x.astype(np.float32).astype(dtype).astype(np.float64) * scale


@functools.cache
def _product(spec):
  """Returns `(x, w, state, cotangent) -> product and gradients`."""
  fn = hk.transform(lambda x, w: fp8.einsum('p', spec, x, w, history_length=3))

  @jax.jit
  def product(x, w, state, cotangent):
    out, vjp = jax.vjp(
      lambda x, w, state: fn.apply({'~': state}, None, x, w), x, w, state
    )
    return out, vjp(cotangent)

  return product


def _state(**changes):
  state = {f'p_{x.name}': jnp.full(x.shape, x.first) for x in fp8.kept(3)}
  return state | {
    name: jnp.asarray(value, jnp.float32) for name, value in changes.items()
  }


@pytest.mark.parametrize(
  ('spec', 'w_shape'),
  [
    ('BLD,DSHK->BLSHK', (6, 2, 3, 4)),
    ('BLHK,HKD->BLD', (3, 4, 6)),
    ('BLF,FD->BLD', (8, 6)),
  ],
)
def test_products_and_gradients_are_those_of_rounded_operands(spec, w_shape):
  rng = np.random.default_rng(0)
  operands, result = spec.split('->')
  x_axes, w_axes = operands.split(',')
  sizes = {'B': 2, 'L': 5, **dict(zip(w_axes, w_shape, strict=True))}
  x, w, g = (
    np.float32(rng.normal(size=[sizes[a] for a in axes]))
    for axes in (x_axes, w_axes, result)
  )
  g = 1e-4 * g
  # Largest magnitudes of steps before: the scales are their 448th, 57344th.
  state = _state(
    p_input_amax_history_fp8=[0.5, 2.0, 1.0],  # Some entries of x are clipped.
    p_weight_amax_history_fp8=[4.0, 0.0, 0.0],
    p_grad_amax_history_fp8=[0.0, 3e-4, 1e-4],
  )
  out, (grad_x, grad_w, new) = _product(spec)(x, w, state, g)
  x8 = _round(x, 2.0 / 448, 'float8_e4m3fn')
  w8 = _round(w, 4.0 / 448, 'float8_e4m3fn')
  g8 = _round(g, 3e-4 / 57344, 'float8_e5m2')
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4)
  close(out, np.einsum(spec, x8, w8), atol=1e-5)
  assert not np.allclose(out, np.einsum(spec, x, w), rtol=1e-3)
  close(grad_x, np.einsum(f'{result},{w_axes}->{x_axes}', g8, w8), atol=1e-9)
  close(grad_w, np.einsum(f'{x_axes},{result}->{w_axes}', x8, g8), atol=1e-9)
  # What comes for the state is its next value.
  for operand, scale, seen in (
    ('input', 2.0 / 448, x),
    ('weight', 4.0 / 448, w),
    ('grad', 3e-4 / 57344, g),
  ):
    assert float(new[f'p_{operand}_scale_fp8']) == pytest.approx(scale)
    history = np.asarray(new[f'p_{operand}_amax_history_fp8'])
    assert history.max() >= np.abs(seen).max()
    assert np.abs(seen).max() in history


def test_a_scale_forgets_what_is_three_steps_old():
  seen = [2.0, 8.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0]
  expected = [448, 2.0, 8.0, 8.0, 8.0, 4.0, 4.0, 1.0]
  state, w = _state(), np.full([2, 2], 0.5, np.float32)
  for amax, before in zip(seen, expected, strict=True):
    x = np.full([1, 2], -amax, np.float32)
    _, (_, _, state) = _product('LD,DF->LF')(x, w, state, x)
    # Without history a scale stays what it was, 1.
    found = float(state['p_input_scale_fp8'])
    assert found == pytest.approx(before / 448)


def _params(config):
  """Returns weights, scales and histories, not compiled: all but the norms."""
  rng = np.random.default_rng(0)

  def value(path, x):
    name = path[-1].key
    if name.endswith('scale') or name.endswith('scale_fp8'):
      return np.ones(x.shape, np.float32)
    if fp8.is_state(name):  # Steps before have seen little: some are clipped.
      return np.full(x.shape, 0.1, np.float32)
    return rng.normal(0, 0.3, x.shape).astype(np.float32)

  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), config))
  return jax.tree_util.tree_map_with_path(value, partitioning.unbox(shapes))


def _loss(weights, state, config):
  tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8) % config.vocab_size
  ones = jnp.ones(tokens.shape)
  total, weight, _ = model.loss(
    fp8.merge(weights, state), tokens, tokens[:, ::-1], ones, config
  )
  return total / weight


def test_loops_and_remat_change_neither_gradients_nor_scales():
  args = _, state = fp8.split(_params(TINY))
  assert {k: {x.split('_')[0] for x in of} for k, of in state.items()} == {
    'layers/attention': {'qkv', 'out'},
    'layers/feed_forward': {'in', 'out'},
  }
  grad = jax.jit(jax.grad(_loss, argnums=(0, 1)), static_argnums=2)
  other = dataclasses.replace(TINY, scan_layers=False, remat='dots')
  found, expected = (jax.tree.leaves(grad(*args, x)) for x in (other, TINY))
  for x, y in zip(found, expected, strict=True):
    assert np.isfinite(x).all()
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.process
def test_training_in_fp8_follows_bfloat16(tmp_path):
  """Over two devices; only the weights are optimized."""

  def fit(matmul):
    config = experiment_test.tiny_config(tmp_path)
    config.update(sharding='fsdp', training_steps=40, log_train_data_interval=1)
    config.checkpoint_dir = str(tmp_path / matmul)
    config.experiment_kwargs.config.sample_length = 0
    config.experiment_kwargs.config.model.update(
      dtype='bfloat16', matmul=matmul
    )
    result = jaxline.fit(None, config, mode='train')
    return result.experiment.state, result.history['train/loss'][:, 1]

  (state, losses), (_, expected) = map(fit, ('fp8', 'dtype'))
  assert len(losses) == len(expected) == 40
  assert losses[-1] < 0.5 * losses[0]
  assert losses[-5:].mean() == pytest.approx(expected[-5:].mean(), rel=0.05)
  # It did compute otherwise.
  assert abs(losses[0] - expected[0]) > 1e-5
  names = trees.named_leaves((state.params, state.opt_state))
  assert any(name.endswith('/qkv') for name in names)
  assert not any(fp8.is_state(name) for name in names)
  scales = state.model_state[sharded.OVERWRITE]
  assert {x.dtype for x in jax.tree.leaves(scales)} == {jnp.dtype('float32')}
  # Each of 40 steps has left a magnitude, and the scales are of the largest.
  of_product = scales['layers/attention']
  for name, largest in (('qkv_input', 448), ('qkv_grad', 57344)):
    history = of_product[f'{name}_amax_history_fp8'][0]
    assert np.count_nonzero(history) == 40
    # That of the last step counts from the next one on.
    scale = of_product[f'{name}_scale_fp8'][0]
    assert float(scale) == pytest.approx(float(history[1:].max()) / largest)
  # The weight is split over the devices; its largest entry is that of all.
  assert not state.params['layers/attention']['qkv'].is_fully_replicated
  assert of_product['qkv_weight_scale_fp8'].is_fully_replicated


def test_gpus_without_fp8_and_other_products_are_refused():
  def check(capability):
    fp8.check_devices([
      types.SimpleNamespace(
        platform='gpu', compute_capability=capability, device_kind='Some GPU'
      )
    ])  # fmt: skip

  for capability in ('8.9', '9.0', '12.1'):
    check(capability)
  for capability in ('7.0', '8.6', 'gfx942', ''):
    message = f"need .* 8.9 .*; Some GPU has '{capability}'.*bfloat16"
    with pytest.raises(ValueError, match=message):
      check(capability)
  for spec in ('BLD,DF', 'BLD,DF->BFL', 'BD,BDF->BF', 'BD,FE->BDFE'):
    with pytest.raises(ValueError, match=f"FP8 product '{spec}'; expected two"):
      fp8._dimension_numbers(spec)
