"""Translates the settings of MaxText to Pax's constants.

The table is the one in docs/sharding.md. Two settings differ in more than their
names: MaxText multiplies four sizes by `scale`, and it has a number for each
axis of the mesh where Pax has a list for each network.
"""

from collections.abc import Mapping
from typing import Any

from jaxline import errors

# Pax -> MaxText.
_NAMES = {
  'NUM_LAYERS': 'base_num_decoder_layers',
  'MODEL_DIMS': 'base_emb_dim',
  'HIDDEN_DIMS': 'base_mlp_dim',
  'NUM_HEADS': 'base_num_heads',
  'DIMS_PER_HEAD': 'head_dim',
  'PERCORE_BATCH_SIZE': 'per_device_batch_size',
  'MAX_SEQ_LEN': 'max_target_length',
  'VOCAB_SIZE': 'vocab_size',
  'FPROP_DTYPE': 'dtype',
  'USE_REPEATED_LAYER': 'scan_layers',
}
_SCALED = list(_NAMES)[:4]
_SHAPES = ('ICI_MESH_SHAPE', 'DCN_MESH_SHAPE')
# MaxText's sizes of the mesh, in the order of Pax's lists.
_MESH = [
  f'{network}_{axis}_parallelism'
  for network in ('ici', 'dcn')
  for axis in ('pipeline', 'data', 'fsdp', 'tensor')
]


def maxtext_to_pax(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns MaxText's settings, such as `base_emb_dim`, under Pax's names.

  Raises:
    UsageError: A name is unknown, or a size that `scale` multiplies is missing.
  """
  valid = ['scale', *_NAMES.values(), *_MESH]
  errors.check_names(settings, valid, 'name', 'the settings of MaxText')
  given = {'scale': 1, **dict.fromkeys(_MESH, 1), **settings}
  scale = given['scale']
  absent = {_NAMES[pax] for pax in _SCALED} - set(settings)
  if scale != 1 and absent:
    raise errors.UsageError(
      f'scale is {scale} and multiplies {sorted(absent)} too, which are'
      " missing. Give them; MaxText's defaults are in its base.yml."
    )
  pax = {
    name: settings[theirs] * (scale if name in _SCALED else 1)
    for name, theirs in _NAMES.items()
    if theirs in settings
  }
  if set(_MESH) & set(settings):
    sizes = [given[name] for name in _MESH]
    first = int(sizes[0] == sizes[4] == 1)  # Leave out a stage axis of 1.
    pax |= zip(_SHAPES, (sizes[first:4], sizes[4 + first :]), strict=True)
  return pax
