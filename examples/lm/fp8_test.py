"""Tests of FP8 products against arithmetic in numpy, and in a model's training.

Shapes: as in model.py.
"""

import dataclasses
import functools
import sys
import types

import haiku as hk
import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np
import pytest

from examples import fp8
from jaxline import sharded
from jaxline import train
from jaxline import utils
from jaxline.parallel import partitioning

from . import experiment
from . import experiment_test
from . import model

# The formats: bits of the fraction, the smallest exponent, the largest number.
E4M3 = (3, -6, 448.0)
E5M2 = (2, -14, 57344.0)

TINY = model.ModelConfig(
  vocab_size=11,
  num_layers=2,
  embed_dim=16,
  num_heads=2,
  mlp_dim=24,
  max_length=8,
  scan_layers=True,
  matmul='fp8',
)


def _round(x, scale, number_format):
  """Rounds float64 to the nearest number of a format times the scale."""
  fraction, smallest, largest = number_format
  x = np.clip(np.asarray(x, np.float64) / scale, -largest, largest)
  exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**smallest)))
  unit = 2.0 ** (np.maximum(exponent, smallest) - fraction)
  return np.rint(x / unit) * unit * scale


def test_the_formats_are_those_of_ml_dtypes():
  x = np.random.default_rng(0).normal(size=1000) * 10.0 ** np.arange(
    -4, 4, 0.008
  )
  for number_format, dtype in ((E4M3, 'float8_e4m3fn'), (E5M2, 'float8_e5m2')):
    x = np.clip(x, -number_format[2], number_format[2]).astype(np.float32)
    expected = x.astype(jnp.dtype(dtype)).astype(np.float64)
    np.testing.assert_array_equal(_round(x, 1.0, number_format), expected)


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
  state = {
    f'p_{operand}_{kind}_fp8': value
    for operand in ('input', 'weight', 'grad')
    for kind, value in (
      ('scale', jnp.float32(1)),
      ('amax_history', jnp.zeros(3, jnp.float32)),
    )
  }
  return state | {
    name: jnp.asarray(value, jnp.float32) for name, value in changes.items()
  }


@pytest.mark.parametrize(
  ('spec', 'w_shape'),
  [
    ('BLD,DSHK->BLSHK', (6, 2, 3, 4)),
    ('BLHK,HKD->BLD', (3, 4, 6)),
    ('BLD,DSF->BLSF', (6, 2, 8)),
    ('BLF,FD->BLD', (8, 6)),
  ],
)
def test_products_and_gradients_are_those_of_rounded_operands(spec, w_shape):
  rng = np.random.default_rng(0)
  x_axes, w_axes = spec.split('->')[0].split(',')
  sizes = {'B': 2, 'L': 5, **dict(zip(w_axes, w_shape, strict=True))}
  x = rng.normal(size=[sizes[a] for a in x_axes]).astype(np.float32)
  w = rng.normal(size=w_shape).astype(np.float32)
  g = rng.normal(size=[sizes[a] for a in spec.split('->')[1]])
  g = (1e-4 * g).astype(np.float32)
  # Largest magnitudes of steps before: the scales are their 448th, 57344th.
  state = _state(
    p_input_amax_history_fp8=[0.5, 2.0, 1.0],  # Some entries of x are clipped.
    p_weight_amax_history_fp8=[4.0, 0.0, 0.0],
    p_grad_amax_history_fp8=[0.0, 3e-4, 1e-4],
  )
  out, (grad_x, grad_w, new) = _product(spec)(x, w, state, g)
  x8 = _round(x, 2.0 / 448, E4M3)
  w8 = _round(w, 4.0 / 448, E4M3)
  g8 = _round(g, 3e-4 / 57344, E5M2)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4)
  close(out, np.einsum(spec, x8, w8), atol=1e-5)
  assert not np.allclose(out, np.einsum(spec, x, w), rtol=1e-3)
  result = spec.split('->')[1]
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
    assert np.float32(np.abs(seen).max()) in history


def test_a_scale_is_the_largest_of_the_last_steps_over_the_formats_largest():
  # Of three steps: 8 is forgotten three steps after the one that follows it.
  seen = [2.0, 8.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0]
  expected = [None, 2.0, 8.0, 8.0, 8.0, 4.0, 4.0, 1.0]
  state, w = _state(), np.full([2, 2], 0.5, np.float32)
  for amax, before in zip(seen, expected, strict=True):
    x = np.full([1, 2], -amax, np.float32)
    g = np.full([1, 2], amax, np.float32)
    _, (_, _, state) = _product('LD,DF->LF')(x, w, state, g)
    # Without history a scale stays what it was.
    for operand, largest in (('input', 448), ('grad', 57344)):
      scale = 1.0 if before is None else before / largest
      assert float(state[f'p_{operand}_scale_fp8']) == pytest.approx(scale)
    scale = 1.0 if before is None else 0.5 / 448
    assert float(state['p_weight_scale_fp8']) == pytest.approx(scale)


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


def _products(jaxpr):
  """Yields the types of the operands of each product, also of inner ones."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      yield tuple(str(v.aval.dtype) for v in eqn.invars)
    for inner in jax_core.jaxprs_in_params(eqn.params):
      yield from _products(inner)


@pytest.mark.parametrize('remat', ['nothing', 'dots'])
def test_four_products_a_layer_are_e4m3_and_their_gradients_e5m2(remat):
  config = dataclasses.replace(TINY, remat=remat, dtype='bfloat16')
  weights, state = fp8.split(_params(config))
  grad = jax.grad(_loss, argnums=(0, 1))
  jaxpr = jax.make_jaxpr(lambda *args: grad(*args, config))(weights, state)
  found = list(_products(jaxpr.jaxpr))
  forward, backward = 'float8_e4m3fn', 'float8_e5m2'
  # One scan over the layers: its body is there once.
  assert found.count((forward, forward)) == 4
  assert sum(backward in types for types in found) == 8
  assert all(
    set(types) == {forward, backward} for types in found if backward in types
  )
  plain = dataclasses.replace(config, matmul='dtype')
  jaxpr = jax.make_jaxpr(lambda weights: jax.grad(_loss)(weights, {}, plain))
  assert not any('float8' in str(t) for t in _products(jaxpr(weights).jaxpr))


def test_only_scales_and_histories_are_split_off():
  params = _params(TINY)
  weights, state = fp8.split(params)
  plain = _params(dataclasses.replace(TINY, matmul='dtype'))
  assert jax.tree.structure(weights) == jax.tree.structure(plain)
  assert set(state) == {'layers/attention', 'layers/feed_forward'}
  assert set(state['layers/attention']) == {
    f'{product}_{operand}_{kind}_fp8'
    for product in ('qkv', 'out')
    for operand in ('input', 'weight', 'grad')
    for kind in ('scale', 'amax_history')
  }
  shapes = {x.shape for x in jax.tree.leaves(state)}
  assert shapes == {(2,), (2, fp8.HISTORY_LENGTH)}
  assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype('float32')}
  merged = fp8.merge(weights, state)
  assert jax.tree.structure(merged) == jax.tree.structure(params)
  assert fp8.split(plain)[1] == {}


@functools.cache
def _gradients(config):
  weights, state = fp8.split(_params(TINY))
  gradients = jax.jit(jax.grad(_loss, argnums=(0, 1)), static_argnums=2)
  return gradients(weights, state, config)


@pytest.mark.parametrize(
  'changes', [{'scan_layers': False, 'remat': 'dots'}, {'remat': 'full'}]
)
def test_loops_and_remat_change_neither_gradients_nor_scales(changes):
  actual = _gradients(dataclasses.replace(TINY, **changes))
  expected = _gradients(TINY)
  for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    assert np.isfinite(one).all()
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_it_runs_op_by_op():
  x, w = np.ones([1, 2], np.float32), np.ones([2, 2], np.float32)
  expected = _product('LD,DF->LF')(x, w, _state(), x)
  with jax.disable_jit():
    actual = _product('LD,DF->LF')(x, w, _state(), x)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def _train(tmp_path, monkeypatch, **changes):
  """Trains 40 steps over two devices; returns the experiment and more."""
  monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})
  config = experiment_test.tiny_config(tmp_path)
  config.sharding = 'fsdp'
  config.training_steps = 40
  config.log_train_data_interval = 1
  config.experiment_kwargs.config.sample_length = 0
  config.experiment_kwargs.config.model.update(dtype='bfloat16', **changes)
  config = config.copy_and_resolve_references()
  built, losses = [], []

  class Experiment(experiment.Experiment):
    def __init__(self, mode, init_rng, config, *, run_config=None):
      super().__init__(mode, init_rng, config, run_config=run_config)
      built.append((self, jax.device_get(self.state.params)))

  class Recorder:
    def write_scalars(self, global_step, scalars):
      losses.append(scalars['loss'])

  checkpointer = utils.InMemoryCheckpointer(config, 'train')
  train.train(Experiment, config, checkpointer, Recorder())
  return *built[0], np.array(losses)


@pytest.mark.process
def test_training_in_fp8_follows_bfloat16(tmp_path, monkeypatch):
  run, first, losses = _train(tmp_path, monkeypatch, matmul='fp8')
  _, expected_first, expected = _train(tmp_path, monkeypatch, matmul='dtype')
  jax.tree.map(np.testing.assert_array_equal, first, expected_first)
  assert len(losses) == len(expected) == 40
  assert losses[-1] < 0.5 * losses[0]
  assert losses[-5:].mean() == pytest.approx(expected[-5:].mean(), rel=0.05)
  # It did compute otherwise.
  assert abs(losses[0] - expected[0]) > 1e-5
  state = run.state
  # The optimizer has moments of weights only, and the state is plain float32.
  names = {
    path[-1].key
    for path, _ in jax.tree_util.tree_leaves_with_path(
      (state.params, state.opt_state)
    )
    if isinstance(path[-1], jax.tree_util.DictKey)
  }
  assert 'qkv' in names
  assert not any(fp8.is_state(name) for name in names)
  scales = state.model_state[sharded.OVERWRITE]
  assert {x.dtype for x in jax.tree.leaves(scales)} == {jnp.dtype('float32')}
  # Each of 40 steps has left a magnitude, and the scales are of the largest.
  for product, operand, largest in (
    ('qkv', 'input', 448),
    ('out', 'weight', 448),
    ('qkv', 'grad', 57344),
  ):
    of_product = scales['layers/attention']
    history = of_product[f'{product}_{operand}_amax_history_fp8'][0]
    assert np.count_nonzero(history) == 40
    # That of the last step counts from the next one on.
    scale = of_product[f'{product}_{operand}_scale_fp8'][0]
    assert float(scale) == pytest.approx(float(history[1:].max()) / largest)
  # The weight is split over the devices; its largest entry is that of all.
  assert not state.params['layers/attention']['qkv'].is_fully_replicated
  assert scales['layers/attention']['qkv_weight_scale_fp8'].is_fully_replicated


def _gpu(capability):
  return types.SimpleNamespace(
    platform='gpu', compute_capability=capability, device_kind='Some GPU'
  )


@pytest.mark.parametrize('capability', ['8.9', '9.0', '10.0', '12.1'])
def test_gpus_with_fp8(capability):
  fp8.check_devices([_gpu(capability)])


@pytest.mark.parametrize('capability', ['7.0', '8.0', '8.6', 'gfx942', ''])
def test_gpus_without_fp8_are_refused(capability):
  message = f"need .* 8.9 .*; Some GPU has '{capability}'.*bfloat16"
  with pytest.raises(ValueError, match=message):
    fp8.check_devices([_gpu(capability)])


def test_devices_that_emulate_fp8_pass():
  fp8.check_devices(jax.devices())


def test_without_flax_the_error_says_what_to_install(monkeypatch):
  fp8._ops.cache_clear()
  monkeypatch.setitem(sys.modules, 'flax.linen', None)
  with pytest.raises(ImportError, match=r"pip install -e '.\[fp8\]'"):
    fp8._ops()


@pytest.mark.parametrize(
  'spec', ['BLD,DF', 'BLD,DF->BFL', 'BD,BDF->BF', 'BD,FE->BDFE', 'BD,BF->BBF']
)
def test_other_products_are_refused(spec):
  with pytest.raises(ValueError, match=f"FP8 product '{spec}'; expected two"):
    fp8._dimension_numbers(spec)
