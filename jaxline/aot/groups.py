"""The groups of devices in which a program's collectives communicate."""

from collections.abc import Mapping, Sequence
import math
import re
from typing import Any

import numpy as np

from jaxline.aot import hlo


class Places:
  """The positions of a program's devices in the mesh and in the slices."""

  def __init__(
    self, num_devices: int, axis_sizes: Mapping[str, int], slices: Sequence[int]
  ):
    """See `measure.measure`."""
    self._axis_sizes = axis_sizes
    self._slices = np.asarray(slices)
    # The devices of the program.
    self._mine = np.arange(len(slices))
    if num_devices != len(slices):
      self._mine = np.flatnonzero(self._slices == self._slices[0])

  def groups(self, i: hlo.Instruction) -> list[np.ndarray]:
    """Returns the groups of a collective, as numbers of the mesh's devices."""
    members = self._mine
    pairs = i.search(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}')
    if pairs:
      groups = _braces(pairs)
    elif i.opcode == 'send':
      # Devices are physical here, and their order in a slice is not told. All
      # slices are laid out alike, so the axes that differ are those between the
      # first devices of the slices. Slices are numbered from 1.
      _, first = np.unique(self._slices, return_index=True)
      members = np.array([-1, *first])
      groups = _megascale_groups(i)
    else:
      groups = _replica_groups(i, len(self._mine))
    # A device that sends to itself sends nothing.
    return [members[sorted(set(group))] for group in groups]

  def num_slices(self, groups: Sequence[np.ndarray]) -> int:
    """Returns over how many slices a group is spread, at most."""
    return max(len(set(self._slices[group].tolist())) for group in groups)

  def axes(self, groups: Sequence[np.ndarray]) -> tuple[str, ...]:
    """Returns the mesh axes along which the groups reach."""
    first = np.repeat([group[0] for group in groups], [*map(len, groups)])
    sizes = tuple(self._axis_sizes.values())
    at, of_first = (
      np.stack(np.unravel_index(devices, sizes))
      for devices in (np.concatenate(groups), first)
    )
    varies = (at != of_first).any(axis=1)
    return tuple(a for a, v in zip(self._axis_sizes, varies, strict=True) if v)


def _braces(text: str) -> list[list[int]]:
  """Parses '{0,1},{2,3}'."""
  return [hlo.numbers(group) for group in re.findall(r'\{([^{}]*)\}', text)]


def _megascale_groups(i: hlo.Instruction) -> list[list[int]]:
  """Returns the groups of slices between which a `send` communicates."""
  target = i.search(r'_xla_megascale_target="?(\{\{.*?\}\}|\{[^}]*\})')
  groups = _braces(target)
  # {1,2}x{0:3}: slices 1 and 2; devices of the same number form a group.
  if target.startswith('{{'):
    # {{100000->200000},...}: the number of a slice, and of a physical device.
    groups = [[n // 100_000 for n in group] for group in groups]
  return groups


def _iota(text: str) -> np.ndarray:
  """Parses '[4,2]' or '[2,4]T(1,0)': numbers from 0, transposed, in a row."""
  dims, _, order = text.partition('T')
  values = np.arange(math.prod(hlo.numbers(dims))).reshape(hlo.numbers(dims))
  return (values.transpose(hlo.numbers(order)) if order else values).ravel()


def _replica_groups(i: hlo.Instruction, num_devices: int) -> list[list[int]]:
  """Parses `replica_groups`, which is written in three ways."""
  text = i.search(r'replica_groups=(.*)') or '{}'
  if listed := re.match(r'\{((?:\{[\d,]*\},?)*)\}', text):
    return _braces(listed[1]) or [list(range(num_devices))]
  if iota := re.match(r'\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', text):
    return _iota(iota[3]).reshape(int(iota[1]), int(iota[2])).tolist()
  # mesh['a'=2,'b'=8], device_ids=([4,4]T(1,0)) {'a','b':(2)4}: of the axis b,
  # the part of size 4 that has 2 positions outside of it.
  mesh = re.match(
    r'mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}', text
  )
  if mesh is None:
    raise ValueError(
      f'Cannot read the replica_groups of {i.name}: {text[:200]}'
    )
  sizes = {n: int(size) for n, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
  ids: Any = np.arange(math.prod(sizes.values()))
  coordinates = np.unravel_index(ids, tuple(sizes.values()))
  at = dict(zip(sizes, coordinates, strict=True))
  # Devices are in one group if they differ only in the named parts of axes.
  rest = dict(at)
  for name, outside, size in re.findall(
    r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh[3]
  ):
    part = int(size or sizes[name])
    stride = sizes[name] // (int(outside or 1) * part)
    rest[name] = rest[name] - at[name] // stride % part * stride
  keys = np.ravel_multi_index(tuple(rest.values()), tuple(sizes.values()))
  if mesh[2]:
    is_iota = mesh[2].startswith('[')
    ids = _iota(mesh[2]) if is_iota else hlo.numbers(mesh[2])
  return [np.asarray(ids)[keys == key].tolist() for key in np.unique(keys)]
