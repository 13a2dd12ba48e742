"""Tests of MaxText's names against Pax's table "MaxText to Pax"."""

import math

import hypothesis
from hypothesis import strategies as st
import jax.numpy as jnp
import pytest

from configs import lm
from examples.pax import maxtext
from jaxline import errors
from jaxline import mesh as mesh_lib

LM = 'experiment_kwargs.config'

# The rows of the table: Pax's C4Spmd22BAdam2xv4_128 and MaxText's 2xv4-128.sh,
# then what it is here. The table has no MaxText name for two of them; today's
# MaxText has one for the first.
TABLE = [
  ('NUM_LAYERS', 48, 'base_num_decoder_layers', 16, 'model.num_layers', 48),
  ('MODEL_DIMS', 6144, 'base_emb_dim', 2048, 'model.embed_dim', 6144),
  ('HIDDEN_DIMS', 24576, 'base_mlp_dim', 8192, 'model.mlp_dim', 24576),
  ('NUM_HEADS', 24, 'base_num_heads', 8, 'model.num_heads', 24),
  ('DIMS_PER_HEAD', 256, 'head_dim', 256, None, None),
  ('PERCORE_BATCH_SIZE', 16, 'per_device_batch_size', 16, 'batch_size', 2048),
  ('MAX_SEQ_LEN', 1024, 'max_target_length', 1024, 'length', 1024),
  ('VOCAB_SIZE', 32768, 'vocab_size', 32768, 'model.vocab_size', 32768),
  ('FPROP_DTYPE', 'bfloat16', 'dtype', 'bfloat16', 'model.dtype', 'bfloat16'),
  ('USE_REPEATED_LAYER', True, 'scan_layers', True, 'model.scan_layers', True),
]
PAX_MESH = {'ICI_MESH_SHAPE': [1, 64, 1], 'DCN_MESH_SHAPE': [2, 1, 1]}
MAXTEXT_MESH = {'ici_fsdp_parallelism': 64, 'dcn_data_parallelism': 2}
MESH = {
  'ici': {'stage': 1, 'replica': 1, 'data': 64, 'mdl': 1},
  'dcn': {'stage': 1, 'replica': 2, 'data': 1, 'mdl': 1},
}
ONES = {
  f'{network}_{axis}_parallelism': 1
  for network in ('ici', 'dcn')
  for axis in ('data', 'fsdp', 'tensor')
}

PAX = {pax: value for pax, value, *_ in TABLE} | PAX_MESH
MAXTEXT = (
  {name: value for _, _, name, value, *_ in TABLE} | MAXTEXT_MESH | {'scale': 3}
)
OURS = (
  {f'{LM}.{key}': value for *_, key, value in TABLE if key}
  | {f'{LM}.model.max_length': 1024}
  | {f'mesh.{n}.{a}': size for n in MESH for a, size in MESH[n].items()}
)


@pytest.mark.parametrize('row', TABLE, ids=lambda row: row[0])
def test_each_row_both_ways(row):
  pax, value, name, maxtext_value, *_ = row
  scaled = name.startswith('base_')
  # What `scale` multiplies needs the others that it multiplies.
  theirs = {k: v for k, v in MAXTEXT.items() if k.startswith('base_')}
  theirs |= {'scale': 3} if scaled else {}
  theirs[name] = maxtext_value
  assert maxtext.maxtext_to_pax(theirs)[pax] == value
  value = jnp.bfloat16 if value == 'bfloat16' else value
  back = maxtext.pax_to_maxtext({pax: value}, 3 if scaled else 1)
  assert back == {name: maxtext_value} | ({'scale': 3} if scaled else {})


def test_the_table_as_a_whole():
  assert maxtext.maxtext_to_pax(MAXTEXT) == PAX
  assert maxtext.pax_to_maxtext(PAX, scale=3) == ONES | MAXTEXT
  without = maxtext.pax_to_maxtext({**PAX, 'SUMMARY_INTERVAL_STEPS': 10})
  assert 'scale' not in without
  assert without['base_emb_dim'] == 6144
  assert maxtext.maxtext_to_pax(without) == PAX


def test_the_table_as_a_config():
  assert maxtext.from_pax(PAX) == OURS
  assert maxtext.from_pax({'SUMMARY_INTERVAL_STEPS': 10}) == {
    'log_train_data_interval': 10,
    'logging_interval_type': 'steps',
  }


def test_a_config_takes_it_and_gives_it_back():
  config = lm.get_config()
  config.update_from_flattened_dict(
    maxtext.from_pax({**PAX, 'SUMMARY_INTERVAL_STEPS': 10})
  )
  assert config.experiment_kwargs.config.batch_size == 2048
  assert config.mesh.ici.data == 64
  assert maxtext.to_pax(config) == {**PAX, 'SUMMARY_INTERVAL_STEPS': 10}
  config.interval_type, config.logging_interval_type = 'steps', 'secs'
  assert maxtext.to_pax(config) == PAX


def test_a_batch_of_less_than_a_row_a_device():
  # C4SpmdGpt3AdamDataParallel2x16x16: half a row on each of 512.
  pax = {
    'PERCORE_BATCH_SIZE': 0.5,
    'ICI_MESH_SHAPE': [1, 16, 16],
    'DCN_MESH_SHAPE': [2, 1, 1],
  }
  assert maxtext.from_pax(pax)[f'{LM}.batch_size'] == 256
  config = lm.get_config()
  config.update_from_flattened_dict(maxtext.from_pax(pax))
  assert maxtext.to_pax(config)['PERCORE_BATCH_SIZE'] == 0.5


def test_what_a_config_leaves_to_its_experiment_is_left_out():
  config = lm.get_config()
  config.update_from_flattened_dict(maxtext.from_pax(PAX))
  config.logging_interval_type = 'secs'
  names = {'FPROP_DTYPE': 'dtype', 'HIDDEN_DIMS': 'mlp_dim'}
  names |= {'NUM_HEADS': 'num_heads', 'DIMS_PER_HEAD': 'num_heads'}
  for name in set(names.values()):
    del config.experiment_kwargs.config.model[name]
  assert maxtext.to_pax(config) == {
    name: value for name, value in PAX.items() if name not in names
  }


# The mesh.


def test_axes_are_those_of_the_mesh():
  keys = maxtext.from_pax({'ICI_MESH_SHAPE': [1, 1, 1]})
  assert tuple(keys) == tuple(
    f'mesh.{network}.{axis}'
    for network in ('ici', 'dcn')
    for axis in mesh_lib.MESH_AXES
  )


@pytest.mark.parametrize(
  ('theirs', 'ici', 'dcn', 'ours'),
  [
    (MAXTEXT_MESH, [1, 64, 1], [2, 1, 1], {'ici.data': 64, 'dcn.replica': 2}),
    (
      {'ici_data_parallelism': 2, 'ici_tensor_parallelism': 4},
      [2, 1, 4],
      [1, 1, 1],
      {'ici.replica': 2, 'ici.mdl': 4},
    ),
    (
      {'ici_fsdp_parallelism': 16, 'ici_tensor_parallelism': 2},
      [1, 16, 2],
      [1, 1, 1],
      {'ici.data': 16, 'ici.mdl': 2},
    ),
    # C4SpmdPipelineGpt3SmallAdam64Replicas.
    (
      {
        'ici_pipeline_parallelism': 4,
        'ici_fsdp_parallelism': 4,
        'ici_tensor_parallelism': 4,
      },
      [4, 1, 4, 4],
      [1, 1, 1, 1],
      {'ici.stage': 4, 'ici.data': 4, 'ici.mdl': 4},
    ),
    (
      {'dcn_pipeline_parallelism': 2},
      [1, 1, 1, 1],
      [2, 1, 1, 1],
      {'dcn.stage': 2},
    ),
  ],
)
def test_a_mesh_in_three_ways(theirs, ici, dcn, ours):
  pax = {'ICI_MESH_SHAPE': ici, 'DCN_MESH_SHAPE': dcn}
  assert maxtext.maxtext_to_pax(theirs) == pax
  assert maxtext.pax_to_maxtext(pax) == ONES | theirs
  keys = maxtext.from_pax(pax)
  assert {k: v for k, v in keys.items() if v != 1} == {
    f'mesh.{axis}': size for axis, size in ours.items()
  }
  config = lm.get_config()
  config.update_from_flattened_dict(keys)
  found = maxtext.to_pax(config)
  assert {name: found[name] for name in pax} == pax


def test_one_slice_needs_no_dcn():
  one = maxtext.from_pax({'ICI_MESH_SHAPE': [1, 4, 1]})
  dcn = {'ICI_MESH_SHAPE': [1, 4, 1], 'DCN_MESH_SHAPE': [1, 1, 1]}
  assert maxtext.from_pax(dcn) == one


SIZES = st.integers(1, 9)


# The same examples each time, however long a busy machine takes for one.
@hypothesis.settings(
  derandomize=True,
  deadline=None,
  database=None,
  suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(st.lists(st.tuples(SIZES, SIZES), min_size=4, max_size=4))
def test_any_mesh_comes_back(pairs):
  shapes = [list(shape) for shape in zip(*pairs, strict=True)]
  settings = dict(zip(PAX_MESH, shapes, strict=True))
  back = maxtext.maxtext_to_pax(maxtext.pax_to_maxtext(settings))
  assert maxtext.from_pax(back) == maxtext.from_pax(settings)
  settings = {**PAX, **settings, 'PERCORE_BATCH_SIZE': 1}
  devices = math.prod(i * d for i, d in pairs)
  assert maxtext.from_pax(settings)[f'{LM}.batch_size'] == devices


# Errors.


@pytest.mark.parametrize(
  ('function', 'args', 'words'),
  [
    (
      maxtext.maxtext_to_pax,
      [{'base_embed_dim': 1}],
      ["'base_embed_dim' in the settings of MaxText", "mean 'base_emb_dim'"],
    ),
    (
      maxtext.from_pax,
      [{'MODEL_DIM': 1}],
      ["'MODEL_DIM' in those of Pax", "mean 'MODEL_DIMS'", 'DCN_MESH_SHAPE'],
    ),
    (
      maxtext.maxtext_to_pax,
      [{'ici_tensr_parallelism': 2}],
      ["mean 'ici_tensor_parallelism'"],
    ),
    (maxtext.maxtext_to_pax, [{'ici_fsdp_parallelism': -1}], ['has no -1']),
    (maxtext.to_pax, [lm.get_config()], ['has no -1']),
    (
      maxtext.from_pax,
      [{'DCN_MESH_SHAPE': [2]}],
      ['DCN_MESH_SHAPE is [2]', '[stage, replica, data, mdl]'],
    ),
    (
      maxtext.maxtext_to_pax,
      [{'scale': 3, 'base_emb_dim': 2048}],
      ['scale is 3', 'base_num_heads', 'base_mlp_dim', 'absent'],
    ),
    (
      maxtext.pax_to_maxtext,
      [{'NUM_LAYERS': 48, 'NUM_HEADS': 36}, 5],
      ['scale=5', 'a divisor of 12'],
    ),
    (
      maxtext.from_pax,
      [{'MODEL_DIMS': 64, 'NUM_HEADS': 4, 'DIMS_PER_HEAD': 32}],
      ['make 128', 'MODEL_DIMS=64'],
    ),
    (maxtext.from_pax, [{'DIMS_PER_HEAD': 32}], ['Give all three']),
    (maxtext.from_pax, [{'PERCORE_BATCH_SIZE': 1}], ['ICI_MESH_SHAPE']),
    (
      maxtext.from_pax,
      [{'PERCORE_BATCH_SIZE': 0.5, 'ICI_MESH_SHAPE': [1, 3, 1]}],
      ['on 3 devices', '1.5'],
    ),
  ],
)
def test_errors_say_what_to_do(function, args, words):
  with pytest.raises(errors.UsageError) as error:
    function(*args)
  for word in words:
    assert word in str(error.value)
