"""Tests of the pipeline against its layers, run one after the other."""

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline.compile import hlo
from jaxline.compile import measure
from jaxline.parallel import partitioning
from jaxline.parallel import pipeline
from jaxline.parallel import placement

ROWS = 12
WIDTH = 4
AXES = (('batch', None), ('batch',))
SIZES = ('num_stages', 'num_microbatches', 'num_repeats')


def _layer(weight, inputs):
  """Not commutative, and different for each row's number."""
  x, rows = inputs
  product = checkpoint_name(x @ weight, 'dot')
  return jnp.tanh(product) + 0.01 * rows[:, None].astype(x.dtype), rows


def _one_after_the_other(weights, x):
  inputs = x, jnp.arange(len(x))
  for weight in weights:
    inputs = _layer(weight, inputs)
  return inputs[0]


def _pipelined(weights, x, layer=_layer, **kwargs):
  y, rows = pipeline.pipeline(
    layer, weights, (x, jnp.arange(len(x))), axes=AXES, **kwargs
  )
  return y + 0 * rows[:, None].astype(y.dtype)


def _step(run):
  """Returns a program that gives ((loss, output), gradients)."""

  def loss(weights, x):
    y = run(weights, x)
    # Every number of the output has a gradient of its own.
    return jnp.vdot(y, jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)), y

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def _weights_and_rows(num_layers):
  rng = np.random.default_rng(0)
  weights = rng.normal(size=(num_layers, WIDTH, WIDTH)) / 2
  x = rng.normal(size=(ROWS, WIDTH))
  return jnp.asarray(weights, jnp.float32), jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize(
  'sizes',
  [
    (4, 1, 1, True),  # Fewer microbatches than stages.
    (4, 6, 1, False),
    (2, 2, 2, True),  # As many as stages: each goes round at once.
    (2, 3, 4, False),
  ],
)
def test_a_pipeline_computes_what_its_layers_do(sizes):
  args = _weights_and_rows(8)
  options = dict(zip((*SIZES, 'unroll'), sizes, strict=True))
  actual = _step(lambda *args: _pipelined(*args, **options))(*args)
  expected = _step(_one_after_the_other)(*args)
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_stage_without_work_leaves_no_trace():
  # Of zeros, whether they are put in or left over, this makes NaN; and of what
  # goes through more layers than there are, infinity.
  def layer(weight, inputs):
    x, rows = inputs
    return 1e9 * x / jnp.sqrt(jnp.sum(x * x, 1, keepdims=True)) @ weight, rows

  run = lambda *args: _pipelined(
    *args, layer, num_stages=2, num_microbatches=3, num_repeats=2
  )
  for array in jax.tree.leaves(_step(run)(*_weights_and_rows(4))):
    assert np.isfinite(array).all()
    assert np.abs(array).max() > 0


def test_errors_offer_what_would_fit():
  partitioner = partitioning.Partitioner.make({'stage': 2}, 'pipeline')
  for counts, words in (
    ((8, 8, 2), '8 layers do not divide over 8 stages x 2 repe.* of 16 layers'),
    ((4, 3, 2), '3 microbatches for 4 stages .* at least 4 microbatches'),
    ((1, 2, 1), '1 stages do not divide over the 2'),
  ):
    sizes = dict(zip(SIZES, counts, strict=True))
    with partitioner.activate(), pytest.raises(ValueError, match=words):
      _pipelined(*_weights_and_rows(8), **sizes)


def test_rows_go_to_the_next_stage_and_nothing_else():
  partitioner = partitioning.Partitioner.make({'stage': 2}, 'pipeline')
  axes = ('layers', 'embed', 'mlp')
  weights, x = _weights_and_rows(8)
  specs = partitioner.specs(partitioning.Logical(weights, axes))
  placed = (
    jax.device_put(weights, partitioner.shardings(specs)),
    placement.put_batch(x, partitioner),
  )
  inside = []
  for parts, repeats in ((1, 1), (3, 1), (3, 2)):
    run = lambda w, x, parts=parts, repeats=repeats: _pipelined(
      partitioning.Logical(w, axes), x,
      num_stages=2, num_microbatches=parts, num_repeats=repeats,
    )  # fmt: skip
    with partitioner.activate():
      text = _step(run).lower(*placed).compile().as_text()
    mesh = partitioner.axis_sizes, partitioner.slices
    traffic = measure.measure(hlo.parse(text), *mesh).traffic
    found = {t.kind: t.count for t in traffic if t.bytes > 4 * t.count}
    # Rows and their numbers forwards, the gradients of rows backwards.
    permutes = found.pop('collective-permute')
    assert permutes == 4 * (parts * repeats + 1)
    # The whole batch once each way; repeats move the weights.
    assert 'all-reduce' in found
    assert ('all-to-all' in found) == (repeats == 2)
    inside.append(found)
  assert inside[0] == inside[1]  # Nothing else is in the loops.
