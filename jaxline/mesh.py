"""The mesh: which devices form which axes.

The mesh has four axes, as Pax's: `stage`, `replica`, `data` and `mdl`. Each has
a size within a slice (`ici`: devices that a fast network joins) and a size
across slices (`dcn`).
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
import numpy as np

from jaxline import errors

Mesh = jax.sharding.Mesh

# Outermost first. The axes that communicate most come last, which gives them
# the nearest devices.
MESH_AXES = ('stage', 'replica', 'data', 'mdl')


class MeshError(errors.UsageError):
  """The mesh does not fit the devices, or the batch does not fit the mesh."""


@dataclasses.dataclass(frozen=True)
class AbstractDevice:
  """A placeholder with an id and a slice, for a mesh of absent devices."""

  id: int
  slice_index: int


def abstract_devices(count: int, num_slices: int = 1) -> list[AbstractDevice]:
  """Returns `count` placeholders in equal slices."""
  per_slice = count // num_slices
  return [AbstractDevice(i, i // per_slice) for i in range(count)]


_on_devices: contextvars.ContextVar[Sequence[Any] | None] = (
  contextvars.ContextVar('on_devices', default=None)
)


@contextlib.contextmanager
def on_devices(devices: Sequence[Any]) -> Iterator[None]:
  """Sets the devices of the meshes that are made inside.

  These devices need not be attached to this process. A program that is compiled
  for others cannot run here, and no array can be put on them.

  Args:
    devices: those of `jax.experimental.topologies`, or `abstract_devices`.

  Yields:
    Nothing.
  """
  token = _on_devices.set(devices)
  try:
    yield
  finally:
    _on_devices.reset(token)


@dataclasses.dataclass(frozen=True)
class MeshShape:
  """Sizes of a mesh, one for each of `MESH_AXES`.

  Attributes:
    ici: within a slice.
    dcn: across slices.
  """

  ici: tuple[int, ...]
  dcn: tuple[int, ...]

  @property
  def sizes(self) -> dict[str, int]:
    """Mesh axis -> size, over all slices."""
    pairs = zip(self.ici, self.dcn, strict=True)
    return {axis: i * d for axis, (i, d) in zip(MESH_AXES, pairs, strict=True)}

  @property
  def slices(self) -> list[int]:
    """The slice of each device, in the order of the flattened mesh."""
    per_slice = [np.full(self.ici, i) for i in range(math.prod(self.dcn))]
    return _blocks(per_slice, self.dcn).ravel().tolist()

  def __str__(self) -> str:
    def text(shape: tuple[int, ...]) -> str:
      return ', '.join(
        f'{axis} {size}' for axis, size in zip(MESH_AXES, shape, strict=True)
      )

    if math.prod(self.dcn) == 1:
      return text(self.ici)
    return f'{text(self.ici)}; across slices {text(self.dcn)}'


def make_mesh(
  sizes: Mapping[str, Any] | None = None,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """Makes the mesh of a run.

  Args:
    sizes: {'ici': {axis: size}, 'dcn': {axis: size}}, the number of devices
      along each of `MESH_AXES` within a slice and of slices; or only the
      former. In each, one size may be -1, which means all that are left. By
      default `data` is all devices of a slice, `replica` is all slices, and the
      other sizes are 1.
    devices: the devices to use. None is those of `on_devices`, or else all
      devices of all hosts. Devices form one slice, or those of their
      `slice_index`, or one for each process if `dcn` asks for that number. CPU
      devices form as many slices as `dcn` asks for.

  Returns:
    A mesh with the axes `MESH_AXES`, its devices in an order that JAX finds
    good for their network; an abstract mesh for `abstract_devices`.

  Raises:
    ValueError: an axis is unknown, or the sizes do not fit the devices.
  """
  devices = list(devices or current_devices())
  return lay_out(mesh_shape(sizes, devices), devices)


def current_devices() -> Sequence[Any]:
  """Returns the devices of `on_devices`, or all devices of all hosts."""
  return _on_devices.get() or jax.devices()


def mesh_shape(
  sizes: Mapping[str, Any] | None, devices: Sequence[Any]
) -> MeshShape:
  """Returns the sizes of the mesh that `make_mesh` would make.

  Args:
    sizes: as for `make_mesh`.
    devices: the devices.

  Raises:
    ValueError: as `make_mesh`.
  """
  ici, dcn = check_sizes(sizes)
  wanted = math.prod(size for size in dcn.values() if size != -1)
  num_slices = len(_slices(devices, wanted))
  per_slice = len(devices) // num_slices
  across = _fill(
    dcn, num_slices, 'mesh.dcn', f'slices (of {per_slice} devices each)'
  )
  what = 'devices' if num_slices == 1 else 'devices in a slice'
  return MeshShape(_fill(ici, per_slice, 'mesh.ici', what), across)


def lay_out(shape: MeshShape, devices: Sequence[Any]) -> Mesh:
  """Returns the mesh of a shape that fits the devices."""
  axis_types = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
  if isinstance(devices[0], AbstractDevice):
    # It has only sizes: no array can be put there.
    abstract: Any = jax.sharding.AbstractMesh(
      tuple(shape.sizes.values()), MESH_AXES, axis_types=axis_types
    )
    return abstract
  return Mesh(_order(shape, devices), MESH_AXES, axis_types=axis_types)


def _order(shape: MeshShape, devices: Sequence[Any]) -> np.ndarray:
  """Returns the devices in the order of the mesh."""
  # `jax.make_mesh` refuses several slices, and on most chips does not split a
  # physical axis of a torus, which then could not serve two axes of the mesh.
  per_slice = [
    mesh_utils.create_device_mesh(
      shape.ici, part, allow_split_physical_axes=True
    )
    for part in _slices(devices, math.prod(shape.dcn))
  ]
  return _blocks(per_slice, shape.dcn)


def _blocks(parts: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray:
  """Joins arrays of equal shapes into one, as blocks in the given shape."""
  blocks = np.empty(len(parts), object)
  blocks[:] = parts
  return np.block(blocks.reshape(shape).tolist())


def _slices(devices: Sequence[Any], wanted: int) -> list[Sequence[Any]]:
  """Groups devices by slice.

  Args:
    devices: all devices of the mesh.
    wanted: how many slices the config asks for.
  """
  by_slice = _grouped(devices, 'slice_index')
  platform = getattr(devices[0], 'platform', None)  # Abstract ones have none.
  if len(by_slice) > 1 or wanted == 1 or platform in (None, 'tpu'):
    return by_slice
  # Other devices do not say their slice. JAX takes each process for one.
  by_process = _grouped(devices, 'process_index')
  if len(by_process) == wanted:
    return by_process
  if platform == 'cpu' and len(devices) % wanted == 0:
    size = len(devices) // wanted
    return [devices[i : i + size] for i in range(0, len(devices), size)]
  return by_slice


def _grouped(devices: Sequence[Any], attribute: str) -> list[Sequence[Any]]:
  """Returns the devices with each value of an attribute, by that value."""
  groups: dict[Any, list[Any]] = collections.defaultdict(list)
  for device in devices:
    groups[getattr(device, attribute, None)].append(device)
  return (
    [groups[key] for key in sorted(groups)] if len(groups) > 1 else [devices]
  )


# Checks of what a config says.


def check_sizes(
  sizes: Mapping[str, Any] | None,
) -> tuple[dict[str, int], dict[str, int]]:
  """Returns the sizes within a slice and across slices, with their defaults.

  Args:
    sizes: as for `make_mesh`.

  Raises:
    errors.UsageError: a name is unknown, or a size can fit no devices.
  """
  sizes = dict(sizes or {})
  if not sizes.keys() & {'ici', 'dcn'}:  # The axes themselves.
    sizes = {'ici': sizes}
  errors.check_names(sizes, ('ici', 'dcn'), 'key', 'mesh')
  found = []
  for network, filled in (('ici', 'data'), ('dcn', 'replica')):
    given = dict(sizes.get(network) or {})
    # The default axis is filled up only if no other one is.
    found.append({filled: 1 if -1 in given.values() else -1} | given)
    _check_numbers(found[-1], f'mesh.{network}', filled)
  within, across = found
  return within, across


def _check_numbers(sizes: Mapping[str, int], where: str, filled: str) -> None:
  errors.check_names(sizes, MESH_AXES, 'mesh axis', where)
  values = list(sizes.values())
  if values.count(-1) > 1:
    raise errors.UsageError(
      f'{where} is {dict(sizes)}; only one size may be -1 (all that are left),'
      f' and {filled} is -1 by default. Set the others to numbers.'
    )
  if any(
    isinstance(size, bool)
    or not isinstance(size, int | np.integer)
    or (size < 1 and size != -1)
    for size in values
  ):
    raise errors.UsageError(
      f'{where} is {dict(sizes)}; expected positive integers, one of which may'
      ' be -1: all that are left.'
    )


def _fill(
  sizes: Mapping[str, int], count: int, where: str, what: str
) -> tuple[int, ...]:
  """Returns a size for each mesh axis, with their product `count`.

  Args:
    sizes: the sizes that are given; one may be -1.
    count: how many devices or slices there are.
    where: the config key of `sizes`.
    what: what is counted.
  """
  shape = {axis: int(sizes.get(axis, 1)) for axis in MESH_AXES}
  fixed = math.prod(size for size in shape.values() if size != -1)
  has_free = -1 in shape.values()
  if count % fixed == 0 if has_free else count == fixed:
    return tuple(
      count // fixed if size == -1 else size for size in shape.values()
    )
  given = {axis: size for axis, size in shape.items() if size != 1}
  lines = [
    f'{where} is {given or dict(sizes)}, which needs'
    f' {"a multiple of " if has_free else ""}{fixed} {what}; there are {count}.'
  ]
  for axis, size in given.items():
    others = fixed // size
    if size == -1 or count % others:
      continue
    fits = count // others
    lines.append(
      f'{axis}: {size} does not divide {fits}; expected one of'
      f' {_divisors(fits)}.'
      if has_free
      else f'{axis}: {fits} would fit, in place of {size}.'
    )
  if len(lines) == 1:
    lines.append(
      f'The sizes that fit are divisors of {count}, {_divisors(count)}, whose'
      f' product is {count}; -1 in one place fills it.'
    )
  raise MeshError(' '.join(lines))


def _divisors(n: int) -> list[int]:
  return [i for i in range(1, n + 1) if n % i == 0]
