"""Names of MaxText as names of Pax, and these as keys of a config.

  settings = maxtext.maxtext_to_pax({'base_emb_dim': 6144, ...})
  config.update_from_flattened_dict(maxtext.from_pax(settings))

The table is that of docs/sharding.md. Three things differ in more than names:
MaxText multiplies four of its sizes by `scale`; it has a number for each axis
of the mesh, where Pax has a list for each network; and the batch of both is
that of one device, ours that of all.
"""

from collections.abc import Mapping
import math
from typing import Any

import jax.numpy as jnp

from jaxline import errors

_LM = 'experiment_kwargs.config'
# Pax -> MaxText, and the keys of an experiment with the names of `examples/lm`.
_NAMES: dict[str, tuple[str, ...]] = {
  'NUM_LAYERS': ('base_num_decoder_layers', f'{_LM}.model.num_layers'),
  'MODEL_DIMS': ('base_emb_dim', f'{_LM}.model.embed_dim'),
  'HIDDEN_DIMS': ('base_mlp_dim', f'{_LM}.model.mlp_dim'),
  'NUM_HEADS': ('base_num_heads', f'{_LM}.model.num_heads'),
  'DIMS_PER_HEAD': ('head_dim',),  # embed_dim / num_heads.
  'PERCORE_BATCH_SIZE': ('per_device_batch_size', f'{_LM}.batch_size'),
  'MAX_SEQ_LEN': (
    *('max_target_length', f'{_LM}.length', f'{_LM}.model.max_length'),
  ),
  'VOCAB_SIZE': ('vocab_size', f'{_LM}.model.vocab_size'),
  'FPROP_DTYPE': ('dtype', f'{_LM}.model.dtype'),
  'USE_REPEATED_LAYER': ('scan_layers', f'{_LM}.model.scan_layers'),
  # MaxText writes every step.
  'SUMMARY_INTERVAL_STEPS': ('', 'log_train_data_interval'),
}
_SCALED = list(_NAMES)[:4]
_SHAPES = ('ICI_MESH_SHAPE', 'DCN_MESH_SHAPE')
# MaxText's axes and ours, in the order of the mesh and of Pax's lists.
_AXES = {
  'pipeline': 'stage',
  'data': 'replica',
  'fsdp': 'data',
  'tensor': 'mdl',
}
# MaxText's sizes of the mesh -> our keys.
_MESH = {
  f'{network}_{theirs}_parallelism': f'mesh.{network}.{ours}'
  for network in ('ici', 'dcn')
  for theirs, ours in _AXES.items()
}


def maxtext_to_pax(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns MaxText's settings, such as `base_emb_dim`, under Pax's names.

  Raises:
    UsageError: a name is unknown, or a size is absent that `scale` multiplies.
  """
  names = {pax: theirs for pax, (theirs, *_) in _NAMES.items() if theirs}
  valid = ['scale', *names.values(), *_MESH]
  errors.check_names(settings, valid, 'name', 'the settings of MaxText')
  given = {'scale': 1, **dict.fromkeys(_MESH, 1), **settings}
  scale = given['scale']
  absent = {names[pax] for pax in _SCALED} - set(settings)
  if scale != 1 and absent:
    raise errors.UsageError(
      f'scale is {scale} and multiplies {sorted(absent)} as well, which are'
      " absent; give them. MaxText's defaults are in its base.yml."
    )
  pax = {
    name: settings[theirs] * (scale if name in _SCALED else 1)
    for name, theirs in names.items()
    if theirs in settings
  }
  if set(_MESH) & set(settings):
    sizes = [given[name] for name in _MESH]
    first = 1 if sizes[0] == sizes[4] == 1 else 0  # Without stages.
    pax |= zip(_SHAPES, (sizes[first:4], sizes[4 + first :]), strict=True)
  return pax


def from_pax(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what a Pax experiment sets, such as `MODEL_DIMS`, by dotted key.

  Raises:
    UsageError: a name is unknown, the heads have another width than the model's
      leaves them, or the batch of a device makes no whole global batch.
  """
  errors.check_names(settings, [*_NAMES, *_SHAPES], 'name', 'those of Pax')
  given = {
    **dict.fromkeys(_SHAPES, (1, 1, 1)),
    **{'NUM_HEADS': 1, 'MODEL_DIMS': None, 'DIMS_PER_HEAD': None},
    **settings,
  }
  mesh: list[int] = []
  for name in _SHAPES if {*_SHAPES} & {*settings} else ():
    shape = list(given[name])
    if len(shape) not in (3, 4):
      raise errors.UsageError(
        f'{name} is {shape}; expected the sizes of [replica, data, mdl], or of'
        ' [stage, replica, data, mdl].'
      )
    mesh += [1, *shape][-4:]
  width, heads = given['DIMS_PER_HEAD'], given['NUM_HEADS']
  if width is not None and heads * width != given['MODEL_DIMS']:
    raise errors.UsageError(
      f'NUM_HEADS={heads} of DIMS_PER_HEAD={width} make {heads * width};'
      f' expected MODEL_DIMS={given["MODEL_DIMS"]}, since the heads share the'
      ' width of the model here. Give all three.'
    )
  config: dict[str, Any] = {}
  for name, value in settings.items():
    if name == 'PERCORE_BATCH_SIZE':
      rows, value = value, value * math.prod(mesh)
      if min(mesh, default=0) < 1 or value != int(value):
        raise errors.UsageError(
          f'PERCORE_BATCH_SIZE={rows} on a mesh of {mesh} makes {value} rows;'
          ' expected a whole number, and all sizes in ICI_MESH_SHAPE.'
        )
      value = int(value)
    elif name == 'FPROP_DTYPE':
      value = jnp.dtype(value).name
    elif name == 'SUMMARY_INTERVAL_STEPS':
      config['logging_interval_type'] = 'steps'
    config |= dict.fromkeys(_NAMES.get(name, ())[1:], value)
  return config | dict(zip(_MESH.values() if mesh else (), mesh, strict=True))
