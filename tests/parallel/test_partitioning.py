"""Tests of jaxline.parallel.partitioning, on two fake devices."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import partitioning

Logical = partitioning.Logical
P = jax.sharding.PartitionSpec


def partitioner(sharding='fsdp', mesh=None):
  return partitioning.Partitioner.make(mesh, sharding)


DATA = ('data', 'expert')
BATCH = ('replica', *DATA)
BOTH = partitioning.Rules(embed=('data',), mlp=('data',), vocab=('data',))


def test_spec():
  for rules, axes, shape, expected in (
    ('ddp', ('embed', 'mlp'), (4, 4), P(None, None)),
    ('fsdp', ('mlp', 'embed'), (4, 4), P(None, DATA)),
    # The first to come gets the mesh axis.
    (BOTH, ('embed', 'mlp'), (4, 4), P('data', None)),
    # What does not divide gives it on.
    (BOTH, ('embed', 'mlp'), (3, 4), P(None, 'data')),
    # In an activation the batch does, so that `embed` is whole.
    ('fsdp', ('batch', 'embed'), (4, 4), P(BATCH, None)),
    # Mesh axes may be named whatever the rules, each for one dimension.
    ('ddp', (BATCH[:2], 'data'), (4, 4), P(BATCH[:2], None)),
    ('ddp', ('data',), (3,), P(None)),
  ):
    rules = partitioning.PRESETS.get(rules, rules)
    made = dataclasses.replace(partitioner(), rules=rules)
    assert made.spec(axes, shape) == expected


def test_axes_that_do_not_fit_name_their_weight():
  for axes, word in (
    (('emebd', None), "'embed'"),
    ((('replica', 'dta'), None), "'data'"),
    (('embed',), 'shorter|longer'),
  ):
    weights = {'layer': {'w': Logical(np.ones([2, 2]), axes)}}
    with pytest.raises(ValueError, match=word) as error:
      partitioner().specs(weights)
    assert 'layer/w' in error.value.__notes__[0]


WEIGHTS = {
  'layer': {
    'w': Logical(np.ones([4, 6]), ('embed', 'mlp')),
    'odd': Logical(np.ones([3, 6]), ('embed', 'mlp')),
    'b': np.ones([6]),
  },
  'w': Logical(np.ones([6, 4]), ('mlp', 'embed')),
}


def test_a_weight_without_names():
  for sharding, shape, expected in (
    ('fsdp', [128, 512], P(None, DATA)),
    ('fsdp', [511, 130], P(None, DATA)),  # The largest that divides.
    ('fsdp', [127, 512], P()),  # Fewer than 2**16 elements.
    ('fsdp', [512, 64, 32], P(None, DATA, None)),  # Layers come first.
    ('fsdp', [256, 4097], P()),  # Biases of as many layers, perhaps.
    ('fsdp', [258, 4097], P(DATA, None)),  # No model has as many layers.
    ('ddp', [128, 512], P()),
  ):
    tree = {'w': jax.ShapeDtypeStruct(shape, np.float32)}
    made = partitioner(sharding)
    assert made.specs(tree)['w'] == expected
    is_whole = sharding == 'fsdp' and expected == P()
    assert bool(made.undersharded_weights(tree)) == is_whole


def test_weights_left_whole_are_listed():
  lines = partitioner().undersharded_weights(WEIGHTS)
  assert [line.split()[0] for line in lines] == ['layer/b', 'layer/odd']
  assert lines[1].endswith('embed is 3, no multiple of 2')
  # Also one that another axis splits.
  tree = {'a': Logical(np.ones([4, 3]), ('embed', 'mlp'))}
  with mesh_lib.on_devices(mesh_lib.abstract_devices(8)):
    made = partitioner('fsdp_tp', {'data': 4, 'mdl': 2})
  (line,) = made.undersharded_weights(tree)
  assert line.endswith('; mlp is 3, no multiple of 2')
  # Only misfits if just the experts are split.
  tree = {'a': Logical(np.ones([3]), ('experts',)), 'b': np.ones([3])}
  (line,) = partitioner('ep', {'expert': 2}).undersharded_weights(tree)
  assert line.endswith('; experts is 3, no multiple of 2')
  # None where nothing is split.
  for p in (partitioner('ddp'), partitioner(mesh={'replica': 2})):
    assert p.undersharded_weights(WEIGHTS) == []


def test_optimizer_state_follows_its_weight():
  optimizer = optax.chain(
    optax.masked(optax.adam(0.1), {'layer': False, 'w': True}),
    optax.trace(0.9),
    # Its factors have other shapes than the weights, and stay whole.
    optax.adafactor(0.1, min_dim_size_to_factor=2),
  )
  state = jax.eval_shape(optimizer.init, partitioning.unbox(WEIGHTS))
  specs = jax.tree_util.tree_leaves_with_path(
    partitioner().specs_like(state, WEIGHTS), is_leaf=lambda x: isinstance(x, P)
  )
  assert len(specs) == len(jax.tree.leaves(state))
  split = {jax.tree_util.keystr(k): x for k, x in specs if any(x)}
  # The longest end that fits: ['layer']['w'] and not ['w'].
  assert split == {
    "[0].inner_state[0].mu['w']": P(None, DATA),
    "[0].inner_state[0].nu['w']": P(None, DATA),
    "[1].trace['layer']['w']": P(DATA, None),
    "[1].trace['w']": P(None, DATA),
  }
