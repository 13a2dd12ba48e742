"""Finds the groups of devices in which a program's collectives communicate."""

from collections.abc import Mapping, Sequence
import math
import re

import numpy as np

from jaxline.compile import hlo


def reach(
  i: hlo.Instruction,
  num_devices: int,
  axis_sizes: Mapping[str, int],
  slices: Sequence[int],
) -> tuple[tuple[str, ...], int, int]:
  """Returns how far a collective reaches in a program of `num_devices`.

  See `measure.measure` for the mesh and the slices.

  Returns:
    The mesh axes along which its groups extend, and the largest number of
    devices and of slices in a group.
  """
  slice_of = np.asarray(slices)
  # These are the devices of the program.
  members = np.arange(len(slices))
  if num_devices != len(slices):
    members = np.flatnonzero(slice_of == slice_of[0])
  if pairs := i.search(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}'):
    numbers = _braces(pairs)
  elif i.opcode == 'send':
    # Devices are physical here, and their order in a slice is unknown. Since
    # all slices have the same layout, the first devices of the slices show the
    # axes that differ. Slices are numbered from 1.
    _, first = np.unique(slice_of, return_index=True)
    members = np.array([-1, *first])
    target = i.search(r'_xla_megascale_target="?(\{\{.*?\}\}|\{[^}]*\})')
    numbers = _braces(target)
    # {1,2}x{0:3} means slices 1 and 2; devices of equal number form a group.
    if target.startswith('{{'):
      # {{100000->200000},...} joins numbers of a slice and a physical device.
      numbers = [[n // 100_000 for n in group] for group in numbers]
  else:
    numbers = _replica_groups(i, len(members))
  # A device does not send to itself.
  groups = [members[sorted(set(group))] for group in numbers]
  sizes = tuple(axis_sizes.values())
  varies = np.zeros(len(sizes), bool)
  for group in groups:
    varies |= np.ptp(np.unravel_index(group, sizes), axis=1) > 0
  return (
    tuple(axis for axis, v in zip(axis_sizes, varies, strict=True) if v),
    max(map(len, groups), default=0),
    max((len(np.unique(slice_of[group])) for group in groups), default=0),
  )


def _braces(text: str) -> list[list[int]]:
  """Parses a list such as '{0,1},{2,3}'."""
  return [hlo.numbers(group) for group in re.findall(r'\{([^{}]*)\}', text)]


def _iota(text: str) -> np.ndarray:
  """Parses '[4,2]' or '[2,4]T(1,0)', a reshaped and transposed range."""
  dims, _, order = text.partition('T')
  values = np.arange(math.prod(hlo.numbers(dims))).reshape(hlo.numbers(dims))
  return (values.transpose(hlo.numbers(order)) if order else values).ravel()


def _replica_groups(i: hlo.Instruction, num_devices: int) -> list[list[int]]:
  """Parses `replica_groups`, which has three formats."""
  text = i.search(r'replica_groups=(.*)') or '{}'
  if listed := re.match(r'\{((?:\{[\d,]*\},?)*)\}', text):
    return _braces(listed[1]) or [list(range(num_devices))]
  if iota := re.match(r'\[(\d+),\d+\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', text):
    return _iota(iota[2]).reshape(int(iota[1]), -1).tolist()
  # mesh['a'=2,'b'=8], device_ids=([4,4]T(1,0)) {'a','b':(2)4} means axis a and,
  # of axis b, the part of size 4 with 2 positions outside it.
  mesh = re.match(
    r'mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}', text
  )
  if mesh is None:
    raise ValueError(
      f'Cannot read the replica_groups of {i.name}: {text[:200]}'
    )
  sizes = {n: int(size) for n, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
  order = mesh[2] or f'[{math.prod(sizes.values())}]'
  ids = np.array(_iota(order) if order.startswith('[') else hlo.numbers(order))
  at = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
  # Devices form a group if they differ only in the named parts of axes.
  rest = dict(at)
  for name, outside, size in re.findall(
    r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh[3]
  ):
    part = int(size or sizes[name])
    stride = sizes[name] // (int(outside or 1) * part)
    rest[name] = rest[name] - at[name] // stride % part * stride
  keys = np.ravel_multi_index(tuple(rest.values()), tuple(sizes.values()))
  return [ids[keys.ravel() == key].tolist() for key in np.unique(keys)]
