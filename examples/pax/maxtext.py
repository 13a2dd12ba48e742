"""Names of MaxText and Pax for the keys of a config, and back.

  settings = maxtext.maxtext_to_pax({'base_emb_dim': 6144, ...})
  config.update_from_flattened_dict(maxtext.from_pax(settings))

`_NAMES` is the table "MaxText to Pax" of Pax's documents, with the keys of a
config whose experiment has the names of `examples/lm`. They differ in more than
names:

- The mesh. Pax has two lists, `[replica, data, mdl]` within slices (ICI) and
  across them (DCN), with the stages in front in a pipeline. MaxText has a
  number for each, of axes called data, fsdp and tensor: its data is our
  `replica`, and its fsdp our `data`.
- The batch. Theirs is that of one device, ours that of all.
- MaxText multiplies four of its sizes by `scale`.
- Here the width of a head is the model's width divided by the number of heads.
"""

from collections.abc import Mapping
import math
from typing import Any

import jax.numpy as jnp

from jaxline import errors

_LM = 'experiment_kwargs.config'
# Pax, MaxText, the keys here.
_NAMES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
  ('NUM_LAYERS', 'base_num_decoder_layers', (f'{_LM}.model.num_layers',)),
  ('MODEL_DIMS', 'base_emb_dim', (f'{_LM}.model.embed_dim',)),
  ('HIDDEN_DIMS', 'base_mlp_dim', (f'{_LM}.model.mlp_dim',)),
  ('NUM_HEADS', 'base_num_heads', (f'{_LM}.model.num_heads',)),
  ('DIMS_PER_HEAD', 'head_dim', ()),  # embed_dim / num_heads.
  # Times the devices.
  ('PERCORE_BATCH_SIZE', 'per_device_batch_size', (f'{_LM}.batch_size',)),
  (
    'MAX_SEQ_LEN',
    'max_target_length',
    (f'{_LM}.length', f'{_LM}.model.max_length'),
  ),
  ('VOCAB_SIZE', 'vocab_size', (f'{_LM}.model.vocab_size',)),
  ('FPROP_DTYPE', 'dtype', (f'{_LM}.model.dtype',)),
  ('USE_REPEATED_LAYER', 'scan_layers', (f'{_LM}.model.scan_layers',)),
  # MaxText has no such interval: it writes every step.
  ('SUMMARY_INTERVAL_STEPS', '', ('log_train_data_interval',)),
)
_KEYS = {pax: keys for pax, _, keys in _NAMES}
_MAXTEXT = {pax: maxtext for pax, maxtext, _ in _NAMES if maxtext}
_SCALED = ('NUM_LAYERS', 'MODEL_DIMS', 'HIDDEN_DIMS', 'NUM_HEADS')
# MaxText's axes and ours, in the order of the mesh and of Pax's lists.
_AXES = {
  'pipeline': 'stage',
  'data': 'replica',
  'fsdp': 'data',
  'tensor': 'mdl',
}
_SHAPES = ('ICI_MESH_SHAPE', 'DCN_MESH_SHAPE')
# Our keys -> MaxText's names.
_MESH = {
  f'mesh.{network}.{ours}': f'{network}_{theirs}_parallelism'
  for network in ('ici', 'dcn')
  for theirs, ours in _AXES.items()
}


def maxtext_to_pax(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns MaxText's settings under the names of Pax.

  Args:
    settings: such as `{'scale': 3, 'base_emb_dim': 2048}`. With a `scale`, all
      four sizes that it multiplies must be given. A size of the mesh that is
      absent is 1.

  Returns:
    What was given; both mesh shapes if one size of the mesh was given.

  Raises:
    UsageError: a name is unknown, a size is absent that `scale` multiplies, or
      a size of the mesh is -1.
  """
  names = ['scale', *_MAXTEXT.values(), *_MESH.values()]
  errors.check_names(settings, names, 'name', 'the settings of MaxText')
  given = {'scale': 1, **dict.fromkeys(_MESH.values(), 1), **settings}
  scale = given['scale']
  absent = [_MAXTEXT[n] for n in _SCALED if _MAXTEXT[n] not in settings]
  if scale != 1 and absent:
    raise errors.UsageError(
      f'scale is {scale} and multiplies {absent} as well, which are absent;'
      " give them. MaxText's defaults are in its base.yml."
    )
  pax = {
    name: settings[theirs] * (scale if name in _SCALED else 1)
    for name, theirs in _MAXTEXT.items()
    if theirs in settings
  }
  if set(settings) & set(_MESH.values()):
    pax |= _shapes([given[name] for name in _MESH.values()])
  return pax


def pax_to_maxtext(
  settings: Mapping[str, Any], scale: int = 1
) -> dict[str, Any]:
  """Returns Pax's settings under the names of MaxText.

  Args:
    settings: such as `{'NUM_LAYERS': 48, 'ICI_MESH_SHAPE': [1, 64, 1]}`.
    scale: by which MaxText will multiply four of them.

  Returns:
    What was given, except SUMMARY_INTERVAL_STEPS: MaxText writes every step. Of
    the mesh all axes, since MaxText's defaults have changed with time; those of
    a pipeline, which its first versions lack, only if they are not 1.

  Raises:
    UsageError: a name is unknown, or `scale` does not divide a size that it
      multiplies.
  """
  mesh = _mesh(settings)
  maxtext: dict[str, Any] = {} if scale == 1 else {'scale': scale}
  scaled = {name: settings[name] for name in _SCALED if name in settings}
  if any(value % scale for value in scaled.values()):
    raise errors.UsageError(
      f'scale={scale} does not divide {scaled}; expected a divisor of'
      f' {math.gcd(*scaled.values())}.'
    )
  for name, theirs in _MAXTEXT.items():
    if name in settings:
      value = settings[name]
      value = value // scale if name in scaled else value
      maxtext[theirs] = _dtype_name(value) if name == 'FPROP_DTYPE' else value
  for key, size in mesh.items():
    if not key.endswith('.stage') or size != 1:
      maxtext[_MESH[key]] = size
  return maxtext


def from_pax(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys of a config for what a Pax experiment sets.

  Args:
    settings: as for `pax_to_maxtext`.

  Returns:
    Values by dotted key, for `ConfigDict.update_from_flattened_dict`. With
    SUMMARY_INTERVAL_STEPS, logging intervals are in steps.

  Raises:
    UsageError: a name is unknown, the heads have another width than the model's
      leaves them, or the batch of a device has no mesh or makes no whole global
      batch.
  """
  mesh = _mesh(settings)
  config: dict[str, Any] = {}
  for name, value in settings.items():
    if name == 'DIMS_PER_HEAD':
      sizes = {n: settings[n] for n in _SCALED if n in settings}
      heads, width = sizes.get('NUM_HEADS', 1), sizes.get('MODEL_DIMS')
      if heads * value != width:
        raise errors.UsageError(
          f'NUM_HEADS={heads} of DIMS_PER_HEAD={value} make {heads * value};'
          f' expected MODEL_DIMS={width}, since the heads share the width of'
          ' the model here. Give all three.'
        )
    elif name == 'PERCORE_BATCH_SIZE':
      devices = math.prod(mesh.values())
      if not mesh or value * devices != int(value * devices):
        raise errors.UsageError(
          f'PERCORE_BATCH_SIZE={value} on {devices} devices makes a global'
          f' batch of {value * devices}; expected a whole number, and a mesh'
          ' (ICI_MESH_SHAPE).'
        )
      value = int(value * devices)
    elif name == 'SUMMARY_INTERVAL_STEPS':
      config['logging_interval_type'] = 'steps'
    elif name == 'FPROP_DTYPE':
      value = _dtype_name(value)
    if name in _KEYS:
      config.update(dict.fromkeys(_KEYS[name], value))
  return {**config, **mesh}


def to_pax(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what a config sets under the names of Pax.

  Args:
    config: one whose experiment has the names of `examples/lm`, with the mesh
      in numbers.

  Returns:
    All of Pax's names; but not those whose values the config leaves to the
    experiment, nor SUMMARY_INTERVAL_STEPS if logging intervals are not in
    steps.

  Raises:
    UsageError: a size of the mesh is -1.
  """

  def get(key: str) -> Any:
    value: Any = config
    for part in key.split('.'):
      value = value[part] if value is not None and part in value else None
    return value

  sizes = [get(key) for key in _MESH]
  shapes = _shapes(sizes)
  pax: dict[str, Any] = {}
  for name, keys in _KEYS.items():
    value = get(keys[0]) if keys else None
    if name == 'DIMS_PER_HEAD':
      has_both = 'MODEL_DIMS' in pax and 'NUM_HEADS' in pax
      value = pax['MODEL_DIMS'] // pax['NUM_HEADS'] if has_both else None
    elif name == 'PERCORE_BATCH_SIZE' and value is not None:
      value /= math.prod(sizes)
    if value is not None:
      pax[name] = value
  if (config['logging_interval_type'] or config['interval_type']) != 'steps':
    pax.pop('SUMMARY_INTERVAL_STEPS', None)
  return {**pax, **shapes}


def _dtype_name(dtype: Any) -> str:
  return jnp.dtype(dtype).name


def _shapes(sizes: list[int]) -> dict[str, list[int]]:
  """Returns Pax's two lists of the sizes of `_MESH`; no stages if it is one."""
  if -1 in sizes:
    raise errors.UsageError(
      f'The mesh is {dict(zip(_MESH, sizes, strict=True))}; Pax has no -1. Give'
      ' the number of devices that it stands for.'
    )
  shapes = sizes[:4], sizes[4:]
  first = 0 if any(shape[0] > 1 for shape in shapes) else 1
  return {n: shape[first:] for n, shape in zip(_SHAPES, shapes, strict=True)}


def _mesh(settings: Mapping[str, Any]) -> dict[str, int]:
  """Checks Pax's names; returns a size for each of `_MESH`, {} without any."""
  errors.check_names(settings, [*_KEYS, *_SHAPES], 'name', 'those of Pax')
  if not set(_SHAPES) & set(settings):
    return {}
  given = {**dict.fromkeys(_SHAPES, (1, 1, 1)), **settings}
  sizes: list[int] = []
  for name in _SHAPES:
    shape = list(given[name])
    if len(shape) not in (3, 4):
      raise errors.UsageError(
        f'{name} is {shape}; expected the sizes of [replica, data, mdl], or of'
        ' [stage, replica, data, mdl].'
      )
    sizes += [1] * (4 - len(shape)) + shape
  return dict(zip(_MESH, sizes, strict=True))
