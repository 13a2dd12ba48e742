"""Chips and TPU topologies."""

import math
import types

import pytest

from jaxline import errors
from jaxline.base import chips


def chip_of(kind):
  return chips.chip_of(types.SimpleNamespace(device_kind=kind))


def test_a_topology_has_its_chips():
  for name, num_chips, links in (
    ('v4:1x1x1', 1, 0),
    ('v4:2x2x1', 4, 2),  # One neighbour in each of two dimensions.
    ('v5p:16x16x24', 6144, 6),
    ('v5e:2x4', 8, 3),
  ):
    chip, shape = chips.parse_topology(name)
    assert math.prod(shape) == num_chips
    assert chip.ici_links == links
  for wrong in ('', 'v4', 'v3:2x2x1', '4x4x4', 'v4:4x', 'V4:1x1', 'v4:0x2x2'):
    with pytest.raises(errors.UsageError, match=f'{wrong!r}.*v5p'):
      chips.parse_topology(wrong)


def test_rates_are_one_way_and_memory_is_what_a_program_may_use():
  v4, h100 = map(chip_of, ('TPU v4', 'NVIDIA H100 80GB HBM3'))
  # Half of the makers' numbers, which are of both ways.
  assert 2 * v4.ici_bandwidth == 600e9
  assert 2 * h100.ici_bandwidth == 900e9
  assert 0.95 * 32 < v4.hbm_bytes / 2**30 < 32
