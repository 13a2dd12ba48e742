"""Tests of MaxText's names against Pax's table "MaxText to Pax"."""

import jax.numpy as jnp
import pytest

from configs import lm
from examples.pax import maxtext
from jaxline import errors
from jaxline.parallel import mesh as mesh_lib

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

PAX = {pax: value for pax, value, *_ in TABLE} | PAX_MESH
MAXTEXT = (
  {name: value for _, _, name, value, *_ in TABLE} | MAXTEXT_MESH | {'scale': 3}
)
OURS = (
  {f'{LM}.{key}': value for *_, key, value in TABLE if key}
  | {f'{LM}.model.max_length': 1024}
  | {f'mesh.{n}.{a}': size for n in MESH for a, size in MESH[n].items()}
)


def test_the_table():
  assert maxtext.maxtext_to_pax(MAXTEXT) == PAX
  assert maxtext.from_pax(PAX) == OURS
  assert maxtext.from_pax({**PAX, 'FPROP_DTYPE': jnp.bfloat16}) == OURS
  assert maxtext.from_pax({'SUMMARY_INTERVAL_STEPS': 10}) == {
    'log_train_data_interval': 10,
    'logging_interval_type': 'steps',
  }


def test_a_config_takes_it():
  config = lm.get_config()
  config.update_from_flattened_dict(
    maxtext.from_pax({**PAX, 'SUMMARY_INTERVAL_STEPS': 10})
  )
  assert config.experiment_kwargs.config.batch_size == 2048
  assert config.mesh.ici.data == 64
  assert config.log_train_data_interval == 10


def test_a_batch_of_less_than_a_row_a_device():
  # C4SpmdGpt3AdamDataParallel2x16x16: half a row on each of 512.
  pax = {
    'PERCORE_BATCH_SIZE': 0.5,
    'ICI_MESH_SHAPE': [1, 16, 16],
    'DCN_MESH_SHAPE': [2, 1, 1],
  }
  assert maxtext.from_pax(pax)[f'{LM}.batch_size'] == 256


# The mesh.


def test_axes_are_those_of_the_mesh():
  keys = maxtext.from_pax({'ICI_MESH_SHAPE': [1, 1, 1]})
  assert tuple(keys) == tuple(
    f'mesh.{network}.{axis}'
    for network in ('ici', 'dcn')
    for axis in mesh_lib.MESH_AXES
    if axis != 'expert'  # Pax has none.
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
    # What the other sizes leave, as MaxText has it too.
    (
      {'ici_fsdp_parallelism': -1},
      [1, -1, 1],
      [1, 1, 1],
      {'ici.data': -1},
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
  keys = maxtext.from_pax(pax)
  assert {k: v for k, v in keys.items() if v != 1} == {
    f'mesh.{axis}': size for axis, size in ours.items()
  }


def test_one_slice_needs_no_dcn():
  one = maxtext.from_pax({'ICI_MESH_SHAPE': [1, 4, 1]})
  dcn = {'ICI_MESH_SHAPE': [1, 4, 1], 'DCN_MESH_SHAPE': [1, 1, 1]}
  assert maxtext.from_pax(dcn) == one


# Errors.


@pytest.mark.parametrize(
  ('function', 'settings', 'words'),
  [
    (
      maxtext.maxtext_to_pax,
      {'base_embed_dim': 1},
      ["'base_embed_dim' in the settings of MaxText", "mean 'base_emb_dim'"],
    ),
    (
      maxtext.from_pax,
      {'MODEL_DIM': 1},
      ["'MODEL_DIM' in those of Pax", "mean 'MODEL_DIMS'", 'DCN_MESH_SHAPE'],
    ),
    (
      maxtext.maxtext_to_pax,
      {'ici_tensr_parallelism': 2},
      ["mean 'ici_tensor_parallelism'"],
    ),
    (
      maxtext.from_pax,
      {'DCN_MESH_SHAPE': [2]},
      ['DCN_MESH_SHAPE is [2]', '[stage, replica, data, mdl]'],
    ),
    (
      maxtext.maxtext_to_pax,
      {'scale': 3, 'base_emb_dim': 2048},
      ['scale is 3', 'base_num_heads', 'base_mlp_dim', 'absent'],
    ),
    (
      maxtext.from_pax,
      {'MODEL_DIMS': 64, 'NUM_HEADS': 4, 'DIMS_PER_HEAD': 32},
      ['make 128', 'MODEL_DIMS=64'],
    ),
    (maxtext.from_pax, {'DIMS_PER_HEAD': 32}, ['Give all three']),
    (maxtext.from_pax, {'PERCORE_BATCH_SIZE': 1}, ['ICI_MESH_SHAPE']),
    (
      maxtext.from_pax,
      {'PERCORE_BATCH_SIZE': 0.5, 'ICI_MESH_SHAPE': [1, 3, 1]},
      ['on a mesh of [1, 1, 3, 1, 1', '1.5'],
    ),
    (
      maxtext.from_pax,
      {'PERCORE_BATCH_SIZE': 1, 'ICI_MESH_SHAPE': [1, -1, -1]},
      ['all sizes in ICI_MESH_SHAPE'],
    ),
  ],
)
def test_errors_say_what_to_do(function, settings, words):
  with pytest.raises(errors.UsageError) as error:
    function(settings)
  for word in words:
    assert word in str(error.value)
