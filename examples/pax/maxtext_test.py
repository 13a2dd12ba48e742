"""Tests of MaxText's names against Pax's table "MaxText to Pax"."""

import pytest

from examples.pax import maxtext
from jaxline import errors

# The rows of the table: Pax's C4Spmd22BAdam2xv4_128 and MaxText's 2xv4-128.sh.
# The table has no MaxText name for two of them; today's MaxText has one for the
# first.
TABLE = [
  ('NUM_LAYERS', 48, 'base_num_decoder_layers', 16),
  ('MODEL_DIMS', 6144, 'base_emb_dim', 2048),
  ('HIDDEN_DIMS', 24576, 'base_mlp_dim', 8192),
  ('NUM_HEADS', 24, 'base_num_heads', 8),
  ('DIMS_PER_HEAD', 256, 'head_dim', 256),
  ('PERCORE_BATCH_SIZE', 16, 'per_device_batch_size', 16),
  ('MAX_SEQ_LEN', 1024, 'max_target_length', 1024),
  ('VOCAB_SIZE', 32768, 'vocab_size', 32768),
  ('FPROP_DTYPE', 'bfloat16', 'dtype', 'bfloat16'),
  ('USE_REPEATED_LAYER', True, 'scan_layers', True),
]
PAX = {pax: value for pax, value, *_ in TABLE}
MAXTEXT = {name: value for _, _, name, value in TABLE} | {'scale': 3}


@pytest.mark.parametrize(
  ('theirs', 'pax'),
  [
    (MAXTEXT, PAX),
    ({'head_dim': 64}, {'DIMS_PER_HEAD': 64}),  # `scale` does not apply.
    *(
      (mesh, {'ICI_MESH_SHAPE': ici, 'DCN_MESH_SHAPE': dcn})
      for mesh, ici, dcn in [
        (
          {'ici_fsdp_parallelism': 64, 'dcn_data_parallelism': 2},
          *([1, 64, 1], [2, 1, 1]),
        ),
        # -1 means all remaining devices.
        (
          {'ici_data_parallelism': 2, 'ici_tensor_parallelism': -1},
          *([2, 1, -1], [1, 1, 1]),
        ),
        # With stages, as for C4SpmdPipelineGpt3SmallAdam64Replicas.
        (
          {'ici_pipeline_parallelism': 4, 'ici_tensor_parallelism': 4},
          *([4, 1, 1, 4], [1, 1, 1, 1]),
        ),
        ({'dcn_pipeline_parallelism': 2}, [1, 1, 1, 1], [2, 1, 1, 1]),
      ]
    ),
  ],
)
def test_names_are_those_of_the_table(theirs, pax):
  assert maxtext.maxtext_to_pax(theirs) == pax


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    ({'base_embed_dim': 1}, ['base_embed_dim', "mean 'base_emb_dim'"]),
    ({'scale': 3, 'base_emb_dim': 2048}, ['scale is 3', 'base_num_heads']),
  ],
)
def test_errors_say_what_to_do(settings, words):
  with pytest.raises(errors.UsageError) as error:
    maxtext.maxtext_to_pax(settings)
  for word in words:
    assert word in str(error.value)
