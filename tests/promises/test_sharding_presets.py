"""What each sharding preset makes of the language model, written by hand.

Meshes of devices that are only counted: no array is made.
"""

import jax
import pytest

from examples.lm import model
from jaxline import base_config
from jaxline.base import trees
from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import partitioning

P = jax.sharding.PartitionSpec

CONFIG = model.ModelConfig(
  vocab_size=512, num_layers=4, embed_dim=64, num_heads=4, mlp_dim=256,
  max_length=32, positions='learned', scan_layers=True,
)  # fmt: skip
DATA = ('data', 'expert')

# Of 8 devices. Along each mesh axis that a preset uses there are some.
MESHES = {
  'ddp': {'replica': 2, 'data': 4},
  'fsdp': {'data': 8},
  'ep': {'data': 2, 'expert': 4},
  'fsdp_ep': {'data': 2, 'expert': 4},
  'tp': {'data': 4, 'mdl': 2},
  'fsdp_tp': {'data': 4, 'mdl': 2},
  'sp': {'data': 4, 'mdl': 2},
  'pipeline': {'stage': 2, 'data': 2, 'mdl': 2},
}

# Weight -> its axes; '-' has no name.
AXES = {
  'embedding/tokens': 'vocab embed',
  'embedding/positions': '- embed',
  'layers/attention/qkv': 'layers embed - heads -',
  'layers/attention/out': 'layers heads - embed',
  'layers/feed_forward/in': 'layers embed - mlp',
  'layers/feed_forward/out': 'layers mlp embed',
  'layers/attention_norm/scale': 'layers embed',
  'layers/feed_forward_norm/scale': 'layers embed',
  'final_norm/scale': 'embed',
}
# Preset -> what it splits each axis over. Pax: embedding (V, D) [mdl, data],
# FFN [data, mdl] and back, QKV (D, H, K) [data, mdl, -].
FSDP = {'embed': DATA}
TP = dict.fromkeys(('vocab', 'heads', 'mlp'), 'mdl')
WIDTH = {'activation_embed': 'mdl'}  # Of activations between layers.
SPLITS = {
  'ddp': {},
  'fsdp': FSDP,
  'ep': {},
  'fsdp_ep': FSDP,
  'tp': TP,
  'fsdp_tp': FSDP | TP | WIDTH,
  'sp': FSDP | TP | {'length': 'mdl'},
  'pipeline': FSDP | TP | WIDTH | {'layers': 'stage'},
}


def expected(preset):
  splits = SPLITS[preset]
  return {
    name: P(*(splits.get(axis) for axis in axes.split()))
    for name, axes in AXES.items()
  }


def make(preset, rules=None):
  with mesh_lib.on_devices(mesh_lib.abstract_devices(8)):
    return partitioning.Partitioner.make(MESHES[preset], preset, rules)


def weights():
  return jax.eval_shape(lambda key: model.init(key, CONFIG), jax.random.key(0))


@pytest.mark.parametrize('preset', partitioning.PRESETS)
def test_weights_and_activations(preset):
  found, splits = make(preset), SPLITS[preset]
  assert trees.named_leaves(found.specs(weights())) == expected(preset)
  axes = ('batch', 'length', 'activation_embed')
  want = P(('replica', *DATA), *map(splits.get, axes[1:]))
  assert found.spec(axes, (16, 32, 64)) == want


def test_rules_are_changed_by_config_values():
  tokens = 'embedding/tokens'
  by_kv = {
    'layers/attention/qkv': P(None, DATA, None, None, 'mdl'),
    'layers/attention/out': P(None, None, 'mdl', DATA),
  }
  for rules, changed in (
    # A table too large for one axis is split over both; it comes first, so
    # that its width is not.
    ({'vocab': ('mdl', 'data')}, {tokens: P(('mdl', 'data'), DATA[1:])}),
    ({'vocab': ()}, {tokens: P(None, DATA)}),
    ({'heads': [], 'kv': ['mdl']}, by_kv),
  ):
    config = base_config.get_base_config()
    config.update(sharding='fsdp_tp', sharding_rules=rules)
    base_config.validate_config(config)
    partitioner = make(config.sharding, rules=config.sharding_rules)
    want = expected('fsdp_tp') | changed
    assert trees.named_leaves(partitioner.specs(weights())) == want
