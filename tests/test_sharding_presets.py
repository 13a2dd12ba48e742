"""What each sharding preset makes of the language model, written by hand.

Meshes of devices that are only counted: no array is made.

Shapes: B batch, L length, D embed, F mlp, H heads, K head dim, V vocab,
N layers, S parts fused into one product, M positions.
"""

import jax
from jax.extend import core
import jax.numpy as jnp
import optax
import pytest

from examples.lm import model
from jaxline import base_config
from jaxline import mesh as mesh_lib
from jaxline import partitioning

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
BATCH = ('replica', 'data')

# Of 8 devices. Along each mesh axis that a preset uses there are some.
MESHES = {
  'ddp': {'replica': 2, 'data': 4},
  'fsdp': {'data': 8},
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
  TOKENS_VD: P(None, 'data'),
  POSITIONS_MD: P(None, 'data'),
  QKV_NDSHK: P(None, 'data', None, None, None),
  OUT_NHKD: P(None, None, None, 'data'),
  IN_NDSF: P(None, 'data', None, None),
  OUT_NFD: P(None, None, 'data'),
  NORM_ND: P(None, 'data'),
  NORM2_ND: P(None, 'data'),
  NORM_D: P('data'),
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
  TOKENS_VD: P('mdl', 'data'),
  POSITIONS_MD: P(None, 'data'),
  QKV_NDSHK: P(None, 'data', None, 'mdl', None),
  OUT_NHKD: P(None, 'mdl', None, 'data'),
  IN_NDSF: P(None, 'data', None, 'mdl'),
  OUT_NFD: P(None, 'mdl', 'data'),
  NORM_ND: P(None, 'data'),
  NORM2_ND: P(None, 'data'),
  NORM_D: P('data'),
}
PIPELINE = {
  TOKENS_VD: P('mdl', 'data'),
  POSITIONS_MD: P(None, 'data'),
  QKV_NDSHK: P('stage', 'data', None, 'mdl', None),
  OUT_NHKD: P('stage', 'mdl', None, 'data'),
  IN_NDSF: P('stage', 'data', None, 'mdl'),
  OUT_NFD: P('stage', 'mdl', 'data'),
  NORM_ND: P('stage', 'data'),
  NORM2_ND: P('stage', 'data'),
  NORM_D: P('data'),
}
WEIGHTS = {
  'ddp': {name: P(*(None,) * len(spec)) for name, spec in FSDP.items()},
  'fsdp': FSDP,
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
  'tp': (P(BATCH, None, None), *SPLIT_INSIDE),
  'fsdp_tp': (P(BATCH, None, 'mdl'), *SPLIT_INSIDE),
  'sp': (P(BATCH, 'mdl', None), *SPLIT_INSIDE),
  'pipeline': (P(BATCH, None, 'mdl'), *SPLIT_INSIDE),
}

by_preset = pytest.mark.parametrize('preset', partitioning.PRESETS)


def make(preset, mesh=None, rules=None, devices=8):
  with mesh_lib.on_devices(mesh_lib.abstract_devices(devices)):
    return partitioning.Partitioner.make(
      MESHES[preset] if mesh is None else mesh, preset, rules
    )


def weights(**changes):
  config = (
    CONFIG if not changes else model.ModelConfig(**(vars(CONFIG) | changes))
  )
  return jax.eval_shape(lambda key: model.init(key, config), jax.random.key(0))


def by_name(tree):
  """Returns module/name -> leaf of a tree of specs or arrays."""
  return {
    f'{module}/{name}': leaf
    for module, leaves in tree.items()
    for name, leaf in leaves.items()
  }


def test_every_preset_is_here():
  assert set(WEIGHTS) == set(ACTIVATIONS) == set(partitioning.PRESETS)


@by_preset
def test_weights(preset):
  assert by_name(make(preset).specs(weights())) == WEIGHTS[preset]


@by_preset
def test_optimizer_state_follows(preset):
  partitioner, boxed = make(preset), weights()
  optimizer = optax.chain(optax.clip_by_global_norm(1), optax.adamw(1e-3))
  state = jax.eval_shape(optimizer.init, partitioning.unbox(boxed))
  adam = partitioner.specs_like(state, boxed)[1][0]
  assert by_name(adam.mu) == WEIGHTS[preset]
  assert by_name(adam.nu) == WEIGHTS[preset]
  assert adam.count == P()


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


@pytest.mark.parametrize(
  ('preset', 'tokens_VD', 'qkv_NDSHK', 'out_NFD', 'norm_ND'),
  [
    ('ddp', (512, 64), (4, 64, 3, 4, 16), (4, 256, 64), (4, 64)),
    ('fsdp', (512, 8), (4, 8, 3, 4, 16), (4, 256, 8), (4, 8)),
    ('tp', (256, 64), (4, 64, 3, 2, 16), (4, 128, 64), (4, 64)),
    ('fsdp_tp', (256, 16), (4, 16, 3, 2, 16), (4, 128, 16), (4, 16)),
    ('sp', (256, 16), (4, 16, 3, 2, 16), (4, 128, 16), (4, 16)),
    ('pipeline', (256, 32), (2, 32, 3, 2, 16), (2, 128, 32), (2, 32)),
  ],
)
def test_what_one_device_holds(preset, tokens_VD, qkv_NDSHK, out_NFD, norm_ND):
  partitioner, boxed = make(preset), weights()
  shardings = by_name(partitioner.shardings(partitioner.specs(boxed)))
  shards = {
    name: shardings[name].shard_shape(x.shape)
    for name, x in by_name(partitioning.unbox(boxed)).items()
  }
  assert shards[TOKENS_VD] == tokens_VD
  assert shards[QKV_NDSHK] == qkv_NDSHK
  assert shards[OUT_NFD] == out_NFD
  assert shards[NORM_ND] == norm_ND


@pytest.mark.parametrize(
  'mesh',
  [{'data': 8}, {'replica': 8}, {'mdl': 8}, {'ici': {'data': 4}, 'dcn': {}}],
)
def test_rules_do_not_depend_on_the_mesh(mesh):
  partitioner = make('fsdp_tp', mesh, devices=4 if 'ici' in mesh else 8)
  specs = by_name(partitioner.specs(weights(num_heads=8, embed_dim=64)))
  assert specs == FSDP_TP


# What stays whole.


def whole(partitioner, **changes):
  return {
    line.split(' (')[0]: line
    for line in partitioner.whole_weights(weights(**changes))
  }


def keystr(name):
  module, leaf = name.rsplit('/', 1)
  return f"['{module}']['{leaf}']"


@pytest.mark.parametrize(
  ('preset', 'expected'),
  [
    ('ddp', []),  # Nothing is meant to be split.
    ('fsdp', []),
    ('tp', [POSITIONS_MD, NORM_ND, NORM2_ND, NORM_D]),
    ('fsdp_tp', []),
    ('sp', []),
    ('pipeline', []),
  ],
)
def test_whole_weights(preset, expected):
  assert set(whole(make(preset))) == {keystr(name) for name in expected}


def test_sizes_that_do_not_divide_stay_whole_and_say_why():
  # Bytes and a document token: 257 is prime. Three heads for two devices.
  changes = {'vocab_size': 257, 'num_heads': 2, 'embed_dim': 48}
  lines = whole(make('tp', {'mdl': 4, 'data': 2}), **changes)
  assert set(lines) == {
    keystr(name)
    for name in (
      TOKENS_VD,
      QKV_NDSHK,
      OUT_NHKD,
      POSITIONS_MD,
      NORM_ND,
      NORM2_ND,
      NORM_D,
    )
  }
  assert 'vocab is 257, no multiple of the 4 of mdl' in lines[keystr(TOKENS_VD)]
  assert 'heads is 2, no multiple of the 4 of mdl' in lines[keystr(QKV_NDSHK)]
  # Where another axis splits them, they are cut less than asked.
  partitioner = make('fsdp_tp', {'mdl': 4, 'data': 2})
  cut_less = whole(partitioner, **changes)
  assert set(cut_less) == {
    keystr(name) for name in (TOKENS_VD, QKV_NDSHK, OUT_NHKD)
  }
  assert cut_less[keystr(TOKENS_VD)] == lines[keystr(TOKENS_VD)]
  specs = by_name(partitioner.specs(weights(**changes)))
  assert specs[TOKENS_VD] == P(None, 'data')
  assert specs[QKV_NDSHK] == P(None, 'data', None, None, None)
  assert specs[IN_NDSF] == P(None, 'data', None, 'mdl')


# Rules of one's own.


def from_config(**values):
  config = base_config.get_base_config()
  config.update(values)
  base_config.validate_config(config)
  with mesh_lib.on_devices(mesh_lib.abstract_devices(8)):
    return partitioning.Partitioner.make(
      config.mesh, config.sharding, config.sharding_rules
    )


@pytest.mark.parametrize(
  ('rules', 'changed'),
  [
    ({}, {}),
    # A table too large for one axis is split over both; it comes first, so
    # that its width stays whole.
    ({'vocab': ('mdl', 'data')}, {TOKENS_VD: P(('mdl', 'data'), None)}),
    ({'vocab': ()}, {TOKENS_VD: P(None, 'data')}),
    ({'vocab': 'data'}, {TOKENS_VD: P('data', None)}),
    (
      {'heads': ()},
      {
        QKV_NDSHK: P(None, 'data', None, None, None),
        OUT_NHKD: P(None, None, None, 'data'),
      },
    ),
    (
      {'heads': [], 'kv': ['mdl']},
      {
        QKV_NDSHK: P(None, 'data', None, None, 'mdl'),
        OUT_NHKD: P(None, None, 'mdl', 'data'),
      },
    ),
  ],
)
def test_rules_are_changed_by_config_values(rules, changed):
  partitioner = from_config(
    mesh={'ici': {'mdl': 2}}, sharding='fsdp_tp', sharding_rules=rules
  )
  assert partitioner.axis_sizes == {
    'stage': 1,
    'replica': 1,
    'data': 4,
    'mdl': 2,
  }
  assert by_name(partitioner.specs(weights())) == FSDP_TP | changed


def test_a_batch_over_data_only_shares_rows_among_replicas():
  partitioner = from_config(
    mesh={'ici': {'replica': 2}}, sharding_rules={'batch': ('data',)}
  )
  assert partitioner.batch_shards == 4


@pytest.mark.parametrize(
  ('rules', 'words'),
  [
    ({'voca': ('mdl',)}, ["'voca'", "mean 'vocab'", 'activation_embed']),
    ({'vocab': ('model',)}, ["'model'", "'mdl'", 'sharding_rules.vocab']),
  ],
)
def test_unknown_rules_are_refused(rules, words):
  with pytest.raises(ValueError) as error:
    from_config(sharding='fsdp', sharding_rules=rules)
  for word in words:
    assert word in str(error.value)
