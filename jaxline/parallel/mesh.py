"""Makes the device mesh of a sharded step.

Each axis has a size within a slice (`ici`: devices that a fast network
connects) and a size across slices (`dcn`).
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import contextvars
import itertools
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import mesh_utils
import numpy as np

from jaxline import errors
from jaxline.base.keys import Check, Key, mapping, optional

Mesh = jax.sharding.Mesh

# The axes, outermost first. The last axes get the nearest devices. Pax has all
# of them except `expert`.
MESH_AXES = ('stage', 'replica', 'data', 'expert', 'mdl')


class MeshError(errors.UsageError):
  """The mesh does not fit the devices, or the batch does not fit the mesh."""


class AbstractDevice(NamedTuple):
  """A placeholder for a device of an abstract mesh."""

  id: int
  slice_index: int


def abstract_devices(count: int, num_slices: int = 1) -> list[AbstractDevice]:
  """Returns placeholders in equal slices."""
  per_slice = count // num_slices
  return [AbstractDevice(i, i // per_slice) for i in range(count)]


_on_devices = contextvars.ContextVar[Any]('on_devices', default=None)


@contextlib.contextmanager
def on_devices(devices: Any) -> Iterator[None]:
  """Within this context, sets the devices of new meshes.

  They may be devices of this process; devices of `jax.experimental.topologies`,
  for which programs are only compiled; `abstract_devices`; or a function that
  maps the sizes of a mesh to devices.
  """
  token = _on_devices.set(devices)
  try:
    yield
  finally:
    _on_devices.reset(token)


def make(sizes: Mapping[str, Any] | None) -> tuple[Mesh, list[int]]:
  """Returns a mesh, and the slice of each device of the flattened mesh.

  It uses the devices of `on_devices`, or the devices of all hosts.
  """
  found = _on_devices.get()
  devices = found(sizes) if callable(found) else found or jax.devices()
  ici, dcn = mesh_shape(sizes, devices)
  num_slices = math.prod(dcn)
  slices = np.arange(num_slices).reshape(dcn)
  slices = np.kron(slices, np.ones(ici, int))
  axis_types = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
  flat = slices.ravel().tolist()
  if isinstance(devices[0], AbstractDevice):
    # An abstract mesh has only sizes and holds no arrays.
    abstract: Any = jax.sharding.AbstractMesh
    return abstract(slices.shape, MESH_AXES, axis_types=axis_types), flat
  # `jax.make_mesh` rejects several slices. On most chips it does not split a
  # physical axis of a torus, so the axis could not serve two axes of the mesh.
  # `mesh_utils.create_hybrid_device_mesh` does not support slices of CPUs.
  ordered = np.empty(slices.shape, object)
  for i, part in enumerate(_slices(devices, num_slices)):
    ordered[slices == i] = mesh_utils.create_device_mesh(
      ici, part, allow_split_physical_axes=True
    ).ravel()
  return Mesh(ordered, MESH_AXES, axis_types=axis_types), flat


def mesh_shape(
  sizes: Mapping[str, Any] | None, devices: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the sizes for each of `MESH_AXES`, within slices and across.

  Args:
    sizes: As `config.mesh`, or only the sizes within a slice. By default `data`
      is all devices of a slice, `replica` is all slices, and the rest are 1.
    devices: Grouped into slices by their `slice_index`. A single slice of CPU
      devices is cut into as many as `dcn` asks for. A single slice of GPUs is
      cut into one per process, if `dcn` asks for this number.
  """
  ici, dcn = check_sizes(sizes)
  asked = math.prod(size for size in dcn.values() if size != -1)
  num_slices = len(_slices(devices, asked))
  per_slice = len(devices) // num_slices
  what = f'slices (of {per_slice} devices each)'
  across = _fill(dcn, num_slices, 'mesh.dcn', what)
  what = 'devices' if num_slices == 1 else 'devices in a slice'
  return _fill(ici, per_slice, 'mesh.ici', what), across


def _slices(devices: Sequence[Any], num_slices: int) -> list[list[Any]]:
  """Groups devices by slice; `num_slices` is the number in the config."""
  slice_of = lambda device: getattr(device, 'slice_index', None) or 0
  ordered = sorted(devices, key=slice_of)
  slices = [list(group) for _, group in itertools.groupby(ordered, slice_of)]
  platform = getattr(devices[0], 'platform', None)  # None if abstract.
  if len(slices) > 1 or platform in (None, 'tpu'):
    return slices
  # Devices other than TPUs do not know their slice. Each process is one slice
  # if the config asks for that number; CPU devices form any number.
  ordered = sorted(devices, key=lambda device: device.process_index)
  num_processes = len({device.process_index for device in devices})
  size, rest = divmod(len(devices), num_slices)
  if rest or (platform != 'cpu' and num_processes != num_slices):
    return slices
  return [ordered[i * size : (i + 1) * size] for i in range(num_slices)]


def check_sizes(
  sizes: Mapping[str, Any] | None,
) -> tuple[dict[str, int], dict[str, int]]:
  """Checks sizes of a config; returns all sizes within slices and across."""
  sizes = dict(sizes or {})
  if not sizes.keys() & {'ici', 'dcn'}:  # The sizes are within a slice.
    sizes = {'ici': sizes}
  errors.check_names(sizes, ('ici', 'dcn'), 'key', 'mesh')
  found = []
  for network, filled in (('ici', 'data'), ('dcn', 'replica')):
    given = dict(sizes.get(network) or {})
    errors.check_names(given, MESH_AXES, 'mesh axis', f'mesh.{network}')
    for axis, size in given.items():
      if type(size) is not int or not (size > 0 or size == -1):
        raise MeshError(
          f'mesh.{network}.{axis} is {size!r}; expected a positive integer, or'
          ' -1 for all remaining devices.'
        )
    # The default axis takes the remaining devices unless some axis is -1.
    default = {filled: 1 if -1 in given.values() else -1}
    found.append(dict.fromkeys(MESH_AXES, 1) | default | given)
  within, across = found
  return within, across


def _fill(
  sizes: Mapping[str, int], count: int, where: str, what: str
) -> tuple[int, ...]:
  try:
    return np.empty(count).reshape(*sizes.values()).shape
  except ValueError as e:
    raise MeshError(
      f'{where} is {dict(sizes)}; expected sizes whose product is the number of'
      f' {what}, {count}. One size may be -1, which means the rest.'
    ) from e


KEYS = (
  Key('mesh', {}, optional(
        Check('a dict of some of the keys below', check_sizes)),
      'Sizes of the device mesh of a sharded step; their product is the number'
      ' of devices. See docs/sharding.md.', 'program', sharded=True),
  Key('mesh.ici',
      {'stage': 1, 'replica': 1, 'data': -1, 'expert': 1, 'mdl': 1},
      optional(mapping('a dict from axis to size')),
      'Sizes within a slice: devices that a fast network connects, such as a'
      ' TPU slice or the GPUs of a node. One size may be -1, which means the'
      ' rest. `stage` has the stages of a pipeline. `replica` splits the batch;'
      ' each part holds all weights. `data` splits the batch and, with `fsdp`,'
      ' the weights. `expert` splits the batch and, with `ep`, the experts of a'
      ' mixture. `mdl` splits weights and activations, with `tp`.', 'program'),
  Key('mesh.dcn',
      {'stage': 1, 'replica': -1, 'data': 1, 'expert': 1, 'mdl': 1},
      optional(mapping('a dict from axis to size')),
      'Sizes across slices, which a slower network connects. The size of a mesh'
      ' axis is the product of its two sizes.', 'program'),
)  # fmt: skip
