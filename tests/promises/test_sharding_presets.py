"""What each sharding preset makes of the language model, written by hand.

Meshes of devices that are only counted: no array is made.

Shapes: B batch, L length, D embed, F mlp, H heads, K head dim, V vocab,
N layers, S parts fused into one product, M positions.
"""

import jax
from jax.extend import core
import jax.numpy as jnp
import pytest

from examples.lm import model
from jaxline import base_config
from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import partitioning

P = jax.sharding.PartitionSpec

CONFIG = model.ModelConfig(
  vocab_size=512,
  num_layers=4,
  embed_dim=64,
  num_heads=4,
  mlp_dim=256,
  max_length=32,
  positions='learned',
  scan_layers=True,
)
BATCH = ('replica', 'data', 'expert')
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

TOKENS_VD = 'embedding/tokens'
POSITIONS_MD = 'embedding/positions'
QKV_NDSHK = 'layers/attention/qkv'
OUT_NHKD = 'layers/attention/out'
IN_NDSF = 'layers/feed_forward/in'
OUT_NFD = 'layers/feed_forward/out'
NORM_ND = 'layers/attention_norm/scale'
NORM2_ND = 'layers/feed_forward_norm/scale'
NORM_D = 'final_norm/scale'

FSDP = {
  TOKENS_VD: P(None, DATA),
  POSITIONS_MD: P(None, DATA),
  QKV_NDSHK: P(None, DATA, None, None, None),
  OUT_NHKD: P(None, None, None, DATA),
  IN_NDSF: P(None, DATA, None, None),
  OUT_NFD: P(None, None, DATA),
  NORM_ND: P(None, DATA),
  NORM2_ND: P(None, DATA),
  NORM_D: P(DATA),
}
TP = {
  TOKENS_VD: P('mdl', None),
  POSITIONS_MD: P(None, None),
  QKV_NDSHK: P(None, None, None, 'mdl', None),
  OUT_NHKD: P(None, 'mdl', None, None),
  IN_NDSF: P(None, None, None, 'mdl'),
  OUT_NFD: P(None, 'mdl', None),
  NORM_ND: P(None, None),
  NORM2_ND: P(None, None),
  NORM_D: P(None),
}
# Pax: embedding (V, D) [mdl, data], FFN [data, mdl] and back, QKV (D, H, K)
# [data, mdl, -].
FSDP_TP = {
  TOKENS_VD: P('mdl', DATA),
  POSITIONS_MD: P(None, DATA),
  QKV_NDSHK: P(None, DATA, None, 'mdl', None),
  OUT_NHKD: P(None, 'mdl', None, DATA),
  IN_NDSF: P(None, DATA, None, 'mdl'),
  OUT_NFD: P(None, 'mdl', DATA),
  NORM_ND: P(None, DATA),
  NORM2_ND: P(None, DATA),
  NORM_D: P(DATA),
}
PIPELINE = {
  name: P('stage', *spec[1:]) if name.startswith('layers/') else spec
  for name, spec in FSDP_TP.items()
}
WEIGHTS = {
  'ddp': {name: P(*(None,) * len(spec)) for name, spec in FSDP.items()},
  'fsdp': FSDP,
  'ep': {name: P(*(None,) * len(spec)) for name, spec in FSDP.items()},
  'fsdp_ep': FSDP,
  'tp': TP,
  'fsdp_tp': FSDP_TP,
  'sp': FSDP_TP,
  'pipeline': PIPELINE,
}

# Between blocks [B, L, D]; inside: queries [B, L, H, K], hidden [B, L, F] and
# logits [B, L, V].
WHOLE = (
  P(BATCH, None, None),
  P(BATCH, None, None, None),
  P(BATCH, None, None),
  P(BATCH, None, None),
)
SPLIT_INSIDE = (
  P(BATCH, None, 'mdl', None),
  P(BATCH, None, 'mdl'),
  P(BATCH, None, 'mdl'),
)
ACTIVATIONS = {
  'ddp': WHOLE,
  'fsdp': WHOLE,
  'ep': WHOLE,
  'fsdp_ep': WHOLE,
  'tp': (P(BATCH, None, None), *SPLIT_INSIDE),
  'fsdp_tp': (P(BATCH, None, 'mdl'), *SPLIT_INSIDE),
  'sp': (P(BATCH, 'mdl', None), *SPLIT_INSIDE),
  'pipeline': (P(BATCH, None, 'mdl'), *SPLIT_INSIDE),
}

by_preset = pytest.mark.parametrize('preset', partitioning.PRESETS)


def make(preset, mesh=None, rules=None):
  with mesh_lib.on_devices(mesh_lib.abstract_devices(8)):
    return partitioning.Partitioner.make(mesh or MESHES[preset], preset, rules)


def weights():
  return jax.eval_shape(lambda key: model.init(key, CONFIG), jax.random.key(0))


def by_name(tree):
  """Returns module/name -> leaf of a tree of specs or arrays."""
  return {
    f'{module}/{name}': leaf
    for module, leaves in tree.items()
    for name, leaf in leaves.items()
  }


@by_preset
def test_weights(preset):
  assert by_name(make(preset).specs(weights())) == WEIGHTS[preset]
  # Learned positions and norms have no axis that `tp` splits.
  kept = {POSITIONS_MD, NORM_ND, NORM2_ND, NORM_D} if preset == 'tp' else set()
  lines = make(preset).undersharded_weights(weights())
  assert {line.split(' (')[0] for line in lines} == kept


def constraints(jaxpr):
  """Yields (shape, spec) of each constraint, from inside of loops as well."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'sharding_constraint':
      yield eqn.invars[0].aval.shape, eqn.params['sharding'].spec
    for inner in core.jaxprs_in_params(eqn.params):
      yield from constraints(inner)


@by_preset
def test_activations_of_the_traced_model(preset):
  tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)
  with make(preset).activate():
    # Another function each time: JAX keeps what it has traced by mesh, not by
    # rules.
    traced = jax.make_jaxpr(lambda p, t: model.apply(p, t, CONFIG))(
      partitioning.unbox(weights()), tokens
    )
  found = {}
  for shape, spec in constraints(traced.jaxpr):
    found.setdefault(shape, set()).add(spec)
  shapes = (16, 32, 64), (16, 32, 4, 16), (16, 32, 256), (16, 32, 512)
  expected = {
    shape: {spec}
    for shape, spec in zip(shapes, ACTIVATIONS[preset], strict=True)
  }
  # Whole sequences go into the product with the table.
  _, _, embed = ACTIVATIONS[preset][0]
  expected[16, 32, 64].add(P(BATCH, None, embed))
  assert found == expected


# Rules of one's own.


@pytest.mark.parametrize(
  ('rules', 'changed'),
  [
    ({}, {}),
    # A table too large for one axis is split over both; it comes first, so
    # that its width is not.
    ({'vocab': ('mdl', 'data')}, {TOKENS_VD: P(('mdl', 'data'), DATA[1:])}),
    ({'vocab': ()}, {TOKENS_VD: P(None, DATA)}),
    ({'vocab': 'data'}, {TOKENS_VD: P('data', DATA[1:])}),
    (
      {'heads': [], 'kv': ['mdl']},
      {
        QKV_NDSHK: P(None, DATA, None, None, 'mdl'),
        OUT_NHKD: P(None, None, 'mdl', DATA),
      },
    ),
  ],
)
def test_rules_are_changed_by_config_values(rules, changed):
  config = base_config.get_base_config()
  config.update(sharding='fsdp_tp', sharding_rules=rules)
  base_config.validate_config(config)
  partitioner = make(config.sharding, rules=config.sharding_rules)
  assert by_name(partitioner.specs(weights())) == FSDP_TP | changed
