"""Tests of moe.py against its definition, in float64 and without slots."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import moe
from examples import transformer
from jaxline.parallel import partitioning

BATCH, LENGTH, EMBED, EXPERTS, MLP = 8, 12, 6, 8, 4

# K, gate, normalize, scale, capacity, whether there is a bias.
CASES = {
  'one expert': (1, 'softmax', False, 1.0, 0.0, False),
  'Mixtral': (2, 'softmax', True, 1.0, 0.0, False),
  'not normalised': (3, 'softmax', False, 1.0, 0.0, False),
  'DeepSeek-V3': (3, 'sigmoid', True, 2.5, 0.0, True),
  'all experts': (8, 'softmax', True, 1.0, 0.0, False),
  'capacity': (2, 'softmax', True, 1.0, 1.0, False),
  'capacity of a slot': (2, 'sigmoid', False, 1.0, 0.1, True),
  'capacity for all': (2, 'softmax', True, 1.0, 4.0, False),
}
route = jax.jit(moe.route, static_argnums=2)


def make(case):
  """Returns the options, and float32 arrays: expert 5 gets nothing, 2 ties."""
  *values, has_bias = CASES[case]
  names = ('per_token', 'gate', 'normalize', 'scale', 'capacity')
  options = moe.Options(**dict(zip(names, values, strict=True)))
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  x, router = draw(BATCH, LENGTH, EMBED), draw(EMBED, EXPERTS)
  x[..., 0] = 1
  if options.per_token < EXPERTS:
    router[0, 5] = -100
  router[:, 2] = router[:, 6]
  bias = np.linspace(-0.2, 0.2, EXPERTS, dtype=np.float32)
  bias[2] = bias[6]
  arrays = {
    'x': x,
    'router': router,
    'in': draw(EXPERTS, EMBED, 2, MLP),
    'out': draw(EXPERTS, MLP, EMBED),
  }
  arrays = jax.tree.map(jnp.asarray, arrays)
  return options, arrays, bias if has_bias else None, draw(*x.shape)


def run(options, arrays, bias, grad):
  """Returns the output, statistics and the gradients of the sum with `grad`."""

  def mixed(arrays):
    x = arrays['x']
    ids, gates, stats = moe.route(x, arrays['router'], options, bias)
    weights = arrays['in'], arrays['out']
    return moe.mix(x, ids, gates, *weights, 'swiglu', options), stats

  @jax.jit  # A new function: what is traced depends on platform and mesh.
  def with_gradients(arrays, grad):
    y, gradients_of, stats = jax.vjp(mixed, arrays, has_aux=True)
    return y, stats, gradients_of(grad)[0]

  return with_gradients(arrays, grad)


@functools.cache
def on_one_device(case):
  return run(*make(case))


@functools.cache
def in_float64(case):
  """Returns the output, the gradients, the counts and the dropped choices.

  By definition: each expert processes all tokens.
  """
  options, *others = make(case)

  def of_all(arrays, bias):
    x, gate = arrays['x'], getattr(jax.nn, options.gate)
    scores = by = gate(x @ arrays['router'])
    if bias is not None:
      by += bias[None, None]
    # Columns 2 and 6 are equal: the lower number comes first.
    _, ids = jax.lax.top_k(by.at[..., 6].set(by[..., 2]), options.per_token)
    chosen = kept = jax.nn.one_hot(ids, EXPERTS).sum(2)
    if options.capacity:
      room = options.slots(LENGTH, EXPERTS)
      kept = jnp.where(jnp.cumsum(chosen, axis=1) <= room, chosen, 0)
    gates = options.scale * scores * kept
    if options.normalize:
      gates /= (scores * chosen).sum(-1, keepdims=True)
    a, up = jnp.einsum('BLD,EDSF->SBLEF', x, arrays['in'])
    hidden = a * jax.nn.sigmoid(a) * up
    y = jnp.einsum('BLEF,EFD,BLE->BLD', hidden, arrays['out'], gates)
    return y, (chosen.sum((0, 1)), (chosen - kept).sum())

  with jax.enable_x64(True):
    to_float64 = lambda x: jnp.asarray(x, jnp.float64)
    arrays, bias, grad = jax.tree.map(to_float64, others)
    function = jax.jit(lambda arrays: of_all(arrays, bias))
    y, gradients_of, counted = jax.vjp(function, arrays, has_aux=True)
    return y, gradients_of(grad)[0], *counted


def assert_equal(found, expected):
  """To 1e-6 of the largest number."""
  error = np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()
  assert error < 1e-6


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_it_is_its_definition(case, platform, monkeypatch):
  # Where a step is compiled for a GPU, `ragged_dot` takes the place of blocks.
  monkeypatch.setattr(transformer, 'platform', lambda: platform)
  options, *others = make(case)
  y, gradients, counts, dropped = jax.tree.map(np.asarray, in_float64(case))
  found, stats, our_gradients = run(options, *others)
  assert_equal(found, y)
  assert stats.counts_E.tolist() == counts.tolist()
  assert (counts[5] == 0) == (options.per_token < EXPERTS)
  assert stats.dropped == pytest.approx(dropped / counts.sum(), abs=1e-7)
  assert (dropped > 0) == (0 < options.capacity < 4)
  for name, x in our_gradients.items():
    assert_equal(x, gradients[name])


# By meshes: a case whose experts drop nothing, and one with a capacity.
@pytest.mark.parametrize(
  ('sizes', 'rules', 'cases'),
  [
    ({'data': 2}, 'ep', ('all experts', 'capacity')),
    # The rows take the axis.
    ({'data': 2}, {'mlp': 'data'}, ('DeepSeek-V3', 'capacity of a slot')),
    ({'expert': 2}, 'fsdp_ep', ('not normalised', 'capacity', 'DeepSeek-V3')),
    ({'mdl': 2}, 'fsdp_tp', ('Mixtral', 'capacity of a slot')),
    ({'mdl': 2}, 'sp', ('DeepSeek-V3', 'capacity for all')),
    ({'mdl': 2}, 'tp', ('one expert', 'capacity')),
  ],
  ids=str,
)
def test_it_is_the_same_on_any_mesh(sizes, rules, cases, monkeypatch):
  preset, own = (rules, {}) if isinstance(rules, str) else ('ep', rules)
  partitioner = partitioning.Partitioner.make(sizes, preset, own)
  axes = {
    'x': transformer.BETWEEN_BLOCKS,
    'router': ('embed', None),
    'in': moe.IN_AXES,
    'out': moe.OUT_AXES,
  }
  for case in cases:
    expected, stats, expected_gradients = on_one_device(case)
    options, arrays, *others = make(case)
    specs = {k: partitioner.spec(axes[k], x.shape) for k, x in arrays.items()}
    placed = jax.device_put(arrays, partitioner.shardings(specs))
    with partitioner.activate(), monkeypatch.context() as patch:
      if rules == 'fsdp_ep':  # The others multiply blocks.
        patch.setattr(transformer, 'platform', lambda: 'gpu')
      y, found_stats, gradients = run(options, placed, *others)
    assert_equal(y, expected)
    for x, z in zip(found_stats, stats, strict=True):
      assert x == pytest.approx(np.asarray(z), rel=1e-5, abs=1e-6)
    for name, x in gradients.items():
      assert_equal(x, expected_gradients[name])


def test_a_bias_moves_towards_experts_with_few_tokens():
  bias = jnp.array([[0.0, 0.5, -0.5], [1.0, 1.0, 1.0]])
  counts = jnp.array([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]])
  moved = moe.moved_bias(bias, counts, 0.125)
  assert moved.tolist() == [[0.125, 0.5, -0.625], [1.0, 1.0, 1.0]]


def test_padding_is_in_no_statistic():
  options, arrays, bias, _ = make('capacity')
  x, router = arrays['x'], arrays['router']
  *_, alone = route(x, router, options, bias)
  padded = np.concatenate([x, np.flip(x, 1)], axis=1)
  mask = np.arange(2 * LENGTH) < LENGTH
  mask = np.broadcast_to(mask, padded.shape[:2])
  # The row is longer, and so is what an expert takes of it.
  half = dataclasses.replace(options, capacity=options.capacity / 2)
  *_, found = route(padded, router, half, bias, mask)
  for x, y in zip(found, alone, strict=True):
    assert x == pytest.approx(np.asarray(y), rel=1e-5)


def test_statistics_of_known_routers():
  options = moe.Options(per_token=2)
  x, one = np.ones((2, 3, 4), np.float32), np.zeros((4, 8), np.float32)
  _, _, stats = route(x, one, options)
  assert stats.counts_E.tolist() == [6, 6, 0, 0, 0, 0, 0, 0]
  assert stats.entropy == pytest.approx(np.log(8))
  assert stats.balance == pytest.approx(1)
  assert stats.z == pytest.approx(np.log(8) ** 2)
  one[:, 3] = 100
  _, _, stats = route(x, one, dataclasses.replace(options, per_token=1))
  assert stats.entropy == pytest.approx(0, abs=1e-6)
  assert stats.balance == pytest.approx(8)
  assert stats.z == pytest.approx(400**2)
