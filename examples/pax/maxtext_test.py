"""MaxText's scale and mesh; the names are tested on the page from_pax.md."""

import pytest

from examples.pax import maxtext
from jaxline import errors

# Four sizes, by their names in both.
SCALED = [
  'base_num_decoder_layers',
  'base_emb_dim',
  'base_mlp_dim',
  'base_num_heads',
]
SIZES = ['NUM_LAYERS', 'MODEL_DIMS', 'HIDDEN_DIMS', 'NUM_HEADS']


@pytest.mark.parametrize(
  ('theirs', 'pax'),
  [
    (
      {'scale': 3, **dict.fromkeys(SCALED, 16), 'vocab_size': 32768},
      {**dict.fromkeys(SIZES, 48), 'VOCAB_SIZE': 32768},
    ),
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
def test_settings_become_constants(theirs, pax):
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
