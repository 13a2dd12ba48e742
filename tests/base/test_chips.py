"""Chips and TPU topologies."""

import math
import types

import pytest

from jaxline import errors
from jaxline.base import chips


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


def test_rates_are_one_way():
  for kind, both_ways in ('TPU v4', 600e9), ('NVIDIA H100 80GB HBM3', 900e9):
    chip = chips.chip_of(types.SimpleNamespace(device_kind=kind))
    assert 2 * chip.ici_bandwidth == both_ways
