"""MaxText's mesh, and errors; the page from_pax.md has a whole example."""

import pytest

from examples.pax import maxtext
from jaxline import errors


@pytest.mark.parametrize(
  ('theirs', 'ici', 'dcn'),
  [
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
  ],
)
def test_sizes_of_the_mesh_are_lists(theirs, ici, dcn):
  expected = {'ICI_MESH_SHAPE': ici, 'DCN_MESH_SHAPE': dcn}
  assert maxtext.maxtext_to_pax(theirs) == expected


def test_what_is_unknown_or_missing_is_named():
  assert maxtext.maxtext_to_pax({'head_dim': 64}) == {'DIMS_PER_HEAD': 64}
  for settings, said in (
    ({'base_embed_dim': 1}, "'base_embed_dim'.*mean 'base_emb_dim'"),
    ({'scale': 3, 'base_emb_dim': 2048}, 'scale is 3 .*base_num_heads'),
  ):
    with pytest.raises(errors.UsageError, match=said):
      maxtext.maxtext_to_pax(settings)
