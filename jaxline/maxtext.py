"""Translates the names of MaxText and Pax into ours, and ours into theirs.

  config.update_from_flattened_dict(
    maxtext.from_maxtext({'base_emb_dim': 6144, 'ici_fsdp_parallelism': 64})
  )

It implements the table "MaxText to Pax" in Pax's README, which has the values
of one run in both: Pax in capitals, MaxText in small letters. Ours are the keys
of a config whose experiment has the names of `examples/lm`. `_NAMES` is the
table; the three differ in more than names:

- The mesh. Pax has two lists, `[replica, data, mdl]` within slices (ICI) and
  across them (DCN), MaxText a number for each, with the axes called data, fsdp
  and tensor: MaxText's data is our `replica`, and its fsdp our `data`.
- The batch. Theirs is that of one device, ours that of all.
- MaxText multiplies four of its sizes by `scale`.
- Here the width of a head is the model's width divided by the number of heads.
"""

from collections.abc import Iterable, Mapping, Sequence
import math
from typing import Any

import jax.numpy as jnp

from jaxline import errors

MeshSizes = Mapping[str, Mapping[str, int]]

# MaxText's axes and ours, in the order of the mesh and of Pax's lists.
_AXES = {
  'pipeline': 'stage',
  'data': 'replica',
  'fsdp': 'data',
  'tensor': 'mdl',
}
_NETWORKS = ('ici', 'dcn')
_MAXTEXT_MESH = {
  f'{network}_{theirs}_parallelism': (network, axis)
  for network in _NETWORKS
  for theirs, axis in _AXES.items()
}
_PAX_MESH = {'ICI_MESH_SHAPE': 'ici', 'DCN_MESH_SHAPE': 'dcn'}

_LM = 'experiment_kwargs.config'
# Pax, MaxText, the keys here.
_NAMES: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
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
  ('SUMMARY_INTERVAL_STEPS', None, ('log_train_data_interval',)),
)
_KEYS = {pax: keys for pax, _, keys in _NAMES}
_MAXTEXT = {pax: maxtext for pax, maxtext, _ in _NAMES if maxtext}
_PAX = {maxtext: pax for pax, maxtext in _MAXTEXT.items()}
_DTYPE = 'FPROP_DTYPE'
_SCALED = ('NUM_LAYERS', 'MODEL_DIMS', 'HIDDEN_DIMS', 'NUM_HEADS')


def mesh_from_maxtext(settings: Mapping[str, int]) -> dict[str, dict[str, int]]:
  """Returns `config.mesh` for MaxText's degrees of parallelism.

  Args:
    settings: such as `{'ici_fsdp_parallelism': 64, 'dcn_data_parallelism': 2}`.
      One that is absent is 1, as in Pax's table. (In today's MaxText these two
      are -1 by default: all that are left.)

  Returns:
    `{'ici': {'stage': 1, 'replica': 1, 'data': 64, 'mdl': 1}, 'dcn': {...}}`.

  Raises:
    ValueError: a name is unknown, or a value no size.
  """
  _check_names(settings, _MAXTEXT_MESH, 'MaxText, of the mesh')
  mesh = {network: dict.fromkeys(_AXES.values(), 1) for network in _NETWORKS}
  for name, size in settings.items():
    network, axis = _MAXTEXT_MESH[name]
    mesh[network][axis] = _mesh_size(name, size)
  return mesh


def mesh_to_maxtext(mesh: MeshSizes) -> dict[str, int]:
  """Returns MaxText's degrees of parallelism for a `config.mesh`.

  Args:
    mesh: `{'ici': {axis: size}, 'dcn': {axis: size}}`; what is absent is 1.

  Returns:
    All of data, fsdp and tensor, since MaxText's defaults have changed with
    time; those of a pipeline, which its first versions lack, where not 1.

  Raises:
    ValueError: an axis is unknown, or a value no size.
  """
  whole = _whole_mesh(mesh)
  return {
    name: whole[network][axis]
    for name, (network, axis) in _MAXTEXT_MESH.items()
    if axis != 'stage' or whole[network][axis] != 1
  }


def mesh_from_pax(
  ici: Sequence[int], dcn: Sequence[int] | None = None
) -> dict[str, dict[str, int]]:
  """Returns `config.mesh` for Pax's mesh shapes.

  Args:
    ici: ICI_MESH_SHAPE, the sizes of [replica, data, mdl] within a slice; or
      of [stage, replica, data, mdl], as Pax's pipelined models have it.
    dcn: DCN_MESH_SHAPE, the same across slices; None is one slice.

  Returns:
    As `mesh_from_maxtext`.

  Raises:
    ValueError: a list has another length, or a value is no size.
  """
  mesh = {}
  for name, shape in zip(_PAX_MESH, (ici, dcn or (1, 1, 1)), strict=True):
    if len(shape) not in (3, 4):
      raise ValueError(
        f'{name} is {list(shape)}; expected the sizes of [replica, data, mdl],'
        ' or of [stage, replica, data, mdl].'
      )
    sizes = [1] * (4 - len(shape)) + [_value(name, size) for size in shape]
    mesh[_PAX_MESH[name]] = dict(zip(_AXES.values(), sizes, strict=True))
  return mesh


def mesh_to_pax(mesh: MeshSizes) -> tuple[list[int], list[int]]:
  """Returns Pax's ICI_MESH_SHAPE and DCN_MESH_SHAPE for a `config.mesh`.

  Args:
    mesh: as for `mesh_to_maxtext`.

  Returns:
    Two lists of [replica, data, mdl], or of [stage, replica, data, mdl] where
    there are stages.

  Raises:
    ValueError: an axis is unknown, or a value no size, or -1: Pax has no such.
  """
  whole = _whole_mesh(mesh)
  shapes = [list(whole[network].values()) for network in _NETWORKS]
  if any(-1 in shape for shape in shapes):
    raise ValueError(
      f'The mesh is {whole}; Pax has no -1. Give the number of devices that it'
      ' stands for.'
    )
  first = 0 if any(shape[0] > 1 for shape in shapes) else 1
  return shapes[0][first:], shapes[1][first:]


def maxtext_to_pax(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns MaxText's settings under the names of Pax.

  Args:
    settings: such as `{'scale': 3, 'base_emb_dim': 2048}`. Where `scale` is not
      1, all four that it multiplies must be given, since MaxText's defaults are
      not known here.

  Returns:
    What was given; both mesh shapes where one size of the mesh was.

  Raises:
    ValueError: a name is unknown, a value of the wrong kind, or something that
      `scale` multiplies is absent.
  """
  _check_names(settings, ('scale', *_PAX, *_MAXTEXT_MESH), 'MaxText')
  scale = _value('scale', settings['scale']) if 'scale' in settings else 1
  absent = [_MAXTEXT[n] for n in _SCALED if _MAXTEXT[n] not in settings]
  if scale != 1 and absent:
    raise ValueError(
      f'scale is {scale} and multiplies {absent} as well, which are absent;'
      " give them. MaxText's defaults are in its base.yml."
    )
  pax: dict[str, Any] = {}
  for name, pax_name in _PAX.items():
    if name in settings:
      value = _value(pax_name, settings[name])
      pax[pax_name] = value * scale if pax_name in _SCALED else value
  sizes = {k: v for k, v in settings.items() if k in _MAXTEXT_MESH}
  if sizes:
    shapes = mesh_to_pax(mesh_from_maxtext(sizes))
    pax.update(zip(_PAX_MESH, shapes, strict=True))
  return pax


def pax_to_maxtext(
  settings: Mapping[str, Any], scale: int = 1
) -> dict[str, Any]:
  """Returns Pax's settings under the names of MaxText.

  Args:
    settings: such as `{'NUM_LAYERS': 48, 'ICI_MESH_SHAPE': [1, 64, 1]}`.
    scale: by which MaxText will multiply four of them.

  Returns:
    What was given, but for SUMMARY_INTERVAL_STEPS: MaxText writes every step.

  Raises:
    ValueError: a name is unknown, a value of the wrong kind, or `scale` does
      not divide what it multiplies.
  """
  values, mesh = _read_pax(settings)
  maxtext: dict[str, Any] = (
    {} if _value('scale', scale) == 1 else {'scale': scale}
  )
  scaled = {name: values[name] for name in _SCALED if name in values}
  if any(value % scale for value in scaled.values()):
    raise ValueError(
      f'scale={scale} does not divide {scaled}; expected a divisor of'
      f' {math.gcd(*scaled.values())}.'
    )
  for name, value in values.items():
    if name in scaled:
      value //= scale
    if name in _MAXTEXT:
      maxtext[_MAXTEXT[name]] = value.name if name == _DTYPE else value
  return {**maxtext, **(mesh_to_maxtext(mesh) if mesh else {})}


def from_pax(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys of a config for what a Pax experiment sets.

  Args:
    settings: as for `pax_to_maxtext`.

  Returns:
    Values by dotted key, for `ConfigDict.update_from_flattened_dict`. With
    SUMMARY_INTERVAL_STEPS, logging intervals are in steps.

  Raises:
    ValueError: a name is unknown, a value of the wrong kind, heads of another
      width than the model's leaves them, or a batch a device without a mesh or
      of no whole global batch.
  """
  values, mesh = _read_pax(settings)
  config: dict[str, Any] = {}
  for name, value in values.items():
    if name == 'DIMS_PER_HEAD':
      _check_heads(values)
    elif name == 'PERCORE_BATCH_SIZE':
      value = _global_batch(value, mesh)
    elif name == 'SUMMARY_INTERVAL_STEPS':
      config['logging_interval_type'] = 'steps'
    elif name == _DTYPE:
      value = value.name
    config.update(dict.fromkeys(_KEYS[name], value))
  for network, sizes in (mesh or {}).items():
    for axis, size in sizes.items():
      config[f'mesh.{network}.{axis}'] = size
  return config


def to_pax(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what a config sets under the names of Pax.

  Args:
    config: one whose experiment has the names of `examples/lm`, with the mesh
      in numbers.

  Returns:
    All of Pax's names; but not those whose values the config leaves to the
    experiment, nor SUMMARY_INTERVAL_STEPS where logging intervals are not in
    steps.

  Raises:
    ValueError: the mesh has a -1.
  """
  shapes = mesh_to_pax(config['mesh'])
  pax: dict[str, Any] = {}
  for name, keys in _KEYS.items():
    if name == 'DIMS_PER_HEAD':
      if {'MODEL_DIMS', 'NUM_HEADS'} <= set(pax):
        pax[name] = pax['MODEL_DIMS'] // pax['NUM_HEADS']
      continue
    value: Any = config
    for key in keys[0].split('.'):
      value = value[key] if value is not None and key in value else None
    if value is None:
      continue
    if name == 'PERCORE_BATCH_SIZE':
      value /= math.prod(shapes[0] + shapes[1])
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    pax[name] = jnp.dtype(value) if name == _DTYPE else value
  if (config['logging_interval_type'] or config['interval_type']) != 'steps':
    pax.pop('SUMMARY_INTERVAL_STEPS', None)
  return {**pax, **dict(zip(_PAX_MESH, shapes, strict=True))}


def from_maxtext(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys of a config for MaxText's settings.

  Args:
    settings: as for `maxtext_to_pax`.

  Returns:
    As `from_pax`.

  Raises:
    ValueError: as for `maxtext_to_pax` and `from_pax`.
  """
  return from_pax(maxtext_to_pax(settings))


def to_maxtext(config: Mapping[str, Any], scale: int = 1) -> dict[str, Any]:
  """Returns what a config sets under the names of MaxText.

  Args:
    config: as for `to_pax`.
    scale: as for `pax_to_maxtext`.

  Returns:
    MaxText's names of what `to_pax` returns.

  Raises:
    ValueError: as for `to_pax` and `pax_to_maxtext`.
  """
  return pax_to_maxtext(to_pax(config), scale)


def _check_names(
  settings: Mapping[str, Any], names: Iterable[str], whose: str
) -> None:
  names = list(names)
  for name in settings:
    if name not in names:
      raise ValueError(
        f'Unknown name {name!r} of {whose}; those with a translation are'
        f' {names}.{errors.did_you_mean(name, names)}'
      )


def _value(name: str, value: Any) -> Any:
  """Checks a value; a dtype may be its name, and becomes one."""
  if name == _DTYPE:
    try:
      return jnp.dtype(value)
    except TypeError as e:
      raise ValueError(f'{name} is {value!r}; expected a dtype.') from e
  is_bool = isinstance(value, bool)
  if name == 'USE_REPEATED_LAYER':
    valid, expected = is_bool, 'True or False'
  elif name == 'PERCORE_BATCH_SIZE':
    valid = isinstance(value, int | float) and not is_bool and value > 0
    expected = 'a positive number'
  else:
    valid = isinstance(value, int) and not is_bool and value > 0
    expected = 'a positive integer'
  if not valid:
    raise ValueError(f'{name} is {value!r}; expected {expected}.')
  return value


def _mesh_size(name: str, size: Any) -> int:
  return -1 if size == -1 else _value(name, size)


def _whole_mesh(mesh: MeshSizes) -> dict[str, dict[str, int]]:
  """Checks a mesh, and fills in its axes of size 1."""
  _check_names(mesh, _NETWORKS, 'the parts of a mesh')
  whole = {network: dict.fromkeys(_AXES.values(), 1) for network in _NETWORKS}
  for network, sizes in mesh.items():
    _check_names(sizes, whole[network], 'the axes of a mesh')
    for axis, size in sizes.items():
      whole[network][axis] = _mesh_size(f'mesh.{network}.{axis}', size)
  return whole


def _read_pax(
  settings: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, dict[str, int]] | None]:
  """Returns the checked values, in the order of `_NAMES`, and the mesh."""
  _check_names(settings, (*_KEYS, *_PAX_MESH), 'Pax')
  values = {n: _value(n, settings[n]) for n in _KEYS if n in settings}
  given = [settings[name] for name in _PAX_MESH if name in settings]
  if 'ICI_MESH_SHAPE' not in settings and given:
    raise ValueError('DCN_MESH_SHAPE is given; expected ICI_MESH_SHAPE, too.')
  return values, mesh_from_pax(*given) if given else None


def _check_heads(values: Mapping[str, Any]) -> None:
  if not {'MODEL_DIMS', 'NUM_HEADS'} <= set(values):
    raise ValueError(
      'DIMS_PER_HEAD is MODEL_DIMS / NUM_HEADS here; give these, too.'
    )
  width, heads = values['MODEL_DIMS'], values['NUM_HEADS']
  if heads * values['DIMS_PER_HEAD'] != width:
    raise ValueError(
      f'NUM_HEADS={heads} of DIMS_PER_HEAD={values["DIMS_PER_HEAD"]} make'
      f' {heads * values["DIMS_PER_HEAD"]}; expected MODEL_DIMS={width}, since'
      ' the heads share the width of the model here.'
    )


def _global_batch(
  per_device: float, mesh: dict[str, dict[str, int]] | None
) -> int:
  if mesh is None:
    raise ValueError(
      'PERCORE_BATCH_SIZE is of one device, and batches are global here; give'
      ' the mesh, too.'
    )
  devices = math.prod(n for sizes in mesh.values() for n in sizes.values())
  batch = per_device * devices
  if batch != int(batch):
    raise ValueError(
      f'PERCORE_BATCH_SIZE={per_device} on {devices} devices makes a global'
      f' batch of {batch}; expected a whole number.'
    )
  return int(batch)
