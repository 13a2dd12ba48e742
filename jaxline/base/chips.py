"""Peak rates of accelerator chips, and TPU topologies without TPUs."""

from collections.abc import Sequence
import dataclasses
import importlib.util
import os
import re
from typing import Any

import jax

from jaxline import errors


@dataclasses.dataclass(frozen=True)
class Chip:
  """An accelerator chip (a JAX device). Rates are in bytes/s and FLOP/s."""

  name: str  # The name in a topology, or its common name.
  device_kinds: tuple[str, ...]  # JAX's names.
  peak_flops: float  # The peak of dense bfloat16 matrix products.
  hbm_bytes: float  # The memory that a program may use.
  hbm_bandwidth: float
  ici_links: int  # Links to neighbors on the fast network; 0 if unknown.
  ici_link_bandwidth: float  # The rate of one link in one direction.
  dcn_bandwidth: float  # The chip's share of its host, one way; 0 if unknown.

  @property
  def ici_bandwidth(self) -> float:
    """Bytes/s over all links, in one direction."""
    return self.ici_links * self.ici_link_bandwidth


def _chip(name: str, kinds: str, *numbers: float) -> Chip:
  """Makes a chip from numbers in TFLOP/s, GiB (TPU) or GB, and GB/s."""
  flops, memory, bandwidth, links, link, dcn = (*numbers, 0, 0, 0)[:6]
  memory *= 2.0**30 if kinds.startswith('TPU') else 1e9
  rates = bandwidth * 1e9, int(links), link * 1e9, dcn * 1e9
  return Chip(name, tuple(kinds.split(', ')), flops * 1e12, memory, *rates)


# Columns: TFLOP/s, memory and its bandwidth, links, bandwidth of a link, DCN.
#
# TPUs: https://cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, and for v4's
# links Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer"
# (2023). The pages give the bandwidth of links for both directions; the table
# has half of it. Memory is the limit that libtpu 0.0.52 reports when a program
# needs more. DCN: v5e has 2 x 100 Gbit/s for 8 chips, v5p 50 Gbit/s per chip,
# v6e 25.6 Tbit/s for 256 chips. v4 has no published number and is assumed to
# equal v5p. A v7x chip (2307 TFLOP/s, 192 GiB, 7380 GB/s) is two JAX devices;
# it is listed for utilization only.
#
# GPUs: NVIDIA's data sheets, without sparsity. NVLink is one way, half of the
# "total bandwidth". The network is as in NVIDIA's DGX machines, with one
# adapter per GPU (200 Gbit/s with A100, else 400); other machines may have
# less. Rows without links are cards for machines of other makers, whose
# networks differ: they have no bounds for communication, and their TFLOP/s
# accumulate in float32. For the GeForce and RTX cards, the source is NVIDIA's
# white papers on the Ampere GA102 and the Ada architecture.
# fmt: off
_CHIPS = (
  _chip('v4', 'TPU v4', 275, 30.75, 1228, 6, 50, 6.25),
  _chip('v5e', 'TPU v5 lite, TPU v5e', 197, 15.75, 819, 4, 50, 3.125),
  _chip('v5p', 'TPU v5, TPU v5p', 459, 95.73, 2765, 6, 100, 6.25),
  _chip('v6e', 'TPU v6 lite, TPU v6e', 918, 31.24, 1638, 4, 100, 12.5),
  _chip('v7x', 'TPU7x', 2307 / 2, 96, 7380 / 2),
  _chip('A100-40GB', 'NVIDIA A100-SXM4-40GB', 312, 40, 1555, 12, 25, 25),
  _chip('A100-80GB', 'NVIDIA A100-SXM4-80GB', 312, 80, 2039, 12, 25, 25),
  _chip('H100', 'NVIDIA H100 80GB HBM3', 989, 80, 3350, 18, 25, 50),
  _chip('H200', 'NVIDIA H200', 989, 141, 4800, 18, 25, 50),
  _chip('B200', 'NVIDIA B200', 2250, 180, 8000, 18, 50, 50),
  _chip('A100-40GB-PCIe', 'NVIDIA A100-PCIE-40GB', 312, 40, 1555),
  _chip('A100-80GB-PCIe', 'NVIDIA A100 80GB PCIe', 312, 80, 1935),
  _chip('H100-PCIe', 'NVIDIA H100 PCIe', 756, 80, 2000),
  _chip('H100-NVL', 'NVIDIA H100 NVL', 835, 94, 3900),
  _chip('GH200', 'NVIDIA GH200 480GB', 989, 96, 4000),
  _chip('A10G', 'NVIDIA A10G', 70, 24, 600),
  _chip('L4', 'NVIDIA L4', 121, 24, 300),
  _chip('L40S', 'NVIDIA L40S', 362, 48, 864),
  _chip('RTX-3090', 'NVIDIA GeForce RTX 3090', 71, 24, 936),
  _chip('RTX-4090', 'NVIDIA GeForce RTX 4090', 165.2, 24, 1008),
  _chip('RTX-A6000', 'NVIDIA RTX A6000', 154.8, 48, 768),
)
# fmt: on

_ENVIRONMENT = {
  # These three keep libtpu from asking a metadata server for the machine's type
  # and hosts. Only Cloud machines have such a server.
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  # libtpu by default lets only one process load it: no two can share a TPU.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


def parse_topology(name: str) -> tuple[Chip, tuple[int, ...]]:
  """Parses the name of a topology, such as 'v4:4x4x4', to a chip and a shape.

  The chip's number of links is reduced to those that the shape allows.

  Raises:
    UsageError: the chip is unknown, or the rest of the name is not a shape.
  """
  # Only these chips have known links.
  tpus = {c.name: c for c in _CHIPS if c.ici_links and c.name.startswith('v')}
  kind, _, shape_text = name.partition(':')
  if kind not in tpus or not re.fullmatch(r'[1-9]\d*(x[1-9]\d*)+', shape_text):
    raise errors.UsageError(
      f'config.topology is {name!r}; expected CHIP:SHAPE with one of the chips'
      f" {sorted(tpus)}, such as 'v4:4x4x4' or 'v5e:4x8'."
    )
  shape = tuple(map(int, shape_text.split('x')))
  # An axis of size 1 has no link, an axis of size 2 has one, a ring has two.
  links = sum(min(size - 1, 2) for size in shape)
  return dataclasses.replace(tpus[kind], ici_links=links), shape


def chip_of(device: Any) -> Chip | None:
  """Returns the chip of a device; None if its peak rates are unknown."""
  kind = device.device_kind
  return next((chip for chip in _CHIPS if kind in chip.device_kinds), None)


def topology_devices(name: str, num_slices: int = 1) -> Sequence[Any]:
  """Returns virtual TPU devices to compile for.

  They hold no arrays and run no programs. The function changes the environment
  so that this process cannot use TPUs of this machine.

  Args:
    name: the topology of one slice.
    num_slices: number of slices, connected by the data center's network.

  Raises:
    UsageError: the TPU compiler is not installed or rejects the topology.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise errors.UsageError(
      f'config.topology is {name}, but the TPU compiler is not installed.'
      " Install it with pip install -e '.[tpu-aot]'."
    )
  for key, value in _ENVIRONMENT.items():
    os.environ.setdefault(key, value)
  from jax.experimental import topologies

  options: dict[str, Any] = {'num_slices': num_slices} if num_slices > 1 else {}
  if name.startswith('v4:'):
    # libtpu makes two devices of a chip by default; on hardware there is one.
    options['chip_config_name'] = 'megacore'
  try:
    return topologies.get_topology_desc(name, 'tpu', **options).devices
  except jax.errors.JaxRuntimeError as e:
    raise errors.UsageError(
      f'libtpu does not support {name} with {num_slices} slices: {e}'
    ) from e
