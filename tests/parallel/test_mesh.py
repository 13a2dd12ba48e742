"""Sizes of meshes, and where devices lie in them; few of them are here."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxline import errors
from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import partitioning


def test_mesh_shape():
  for sizes, count, num_slices, ici, dcn in (
    (None, 8, 1, (1, 1, 8, 1, 1), (1, 1, 1, 1, 1)),
    # Slices are replicas where it is not said otherwise.
    (None, 8, 2, (1, 1, 4, 1, 1), (1, 2, 1, 1, 1)),
    ({'ici': {'mdl': -1, 'data': 2}}, 8, 1, (1, 1, 2, 1, 4), (1, 1, 1, 1, 1)),
    ({'dcn': {'data': -1}}, 12, 3, (1, 1, 4, 1, 1), (1, 1, 3, 1, 1)),
    ({'dcn': {'stage': 2, 'data': 2, 'replica': 1}}, 16, 4, (1, 1, 4, 1, 1),
     (2, 1, 2, 1, 1)),
  ):  # fmt: skip
    devices = mesh_lib.abstract_devices(count, num_slices)
    assert mesh_lib.mesh_shape(sizes, devices) == (ici, dcn)


def test_sizes_that_fit_no_mesh_are_refused():
  for sizes, count, num_slices, words in (
    # The key, what it needs, and what there is.
    ({'ici': {'mdl': 3}}, 8, 1, ['mesh.ici', "'mdl': 3", '8']),
    ({'ici': {'mdl': 8}}, 8, 2, ['mesh.ici', 'in a slice', '4']),
    ({'ici': {'mdle': 2}}, 8, 1, ["'mdle' in mesh.ici", "'mdl'"]),
    # The axes themselves, or by network: not both.
    ({'ici': {}, 'data': 2}, 8, 1, ["'data' in mesh", "['ici', 'dcn']"]),
    ({'dcn': {'data': -1, 'mdl': -1}}, 8, 2, ['mesh.dcn', '-1']),
    *(({'data': x}, 2, 1, ['mesh.ici', repr(x)]) for x in (-2, True)),
    ({'dcn': {'data': 0}}, 8, 2, ['mesh.dcn.data', '0']),
  ):
    devices = mesh_lib.abstract_devices(count, num_slices)
    with pytest.raises(errors.UsageError) as error:
      mesh_lib.mesh_shape(sizes, devices)
    assert [word for word in words if word not in str(error.value)] == []


@dataclasses.dataclass(frozen=True)
class Device:
  """What JAX's mesh utilities look at, of a machine that is not here."""

  id: int
  process_index: int = 0
  slice_index: int | None = None
  platform: str = 'tpu'
  device_kind: str = 'unknown'
  coords: tuple[int, ...] | None = None
  core_on_chip: int = 0


def slices_of_tpus(num_slices):
  """Returns the devices of slices, 2 x 2 each, in no good order."""
  devices = [
    Device(8 * i + 2 * x + y, 2 * i + x, i, 'tpu', 'TPU v5 lite', (x, y, 0))
    for i in range(num_slices)
    for x in range(2)
    for y in range(2)
  ]
  np.random.default_rng(0).shuffle(devices)
  return devices


def order(sizes, devices):
  with mesh_lib.on_devices(devices):
    mesh, slices = mesh_lib.make(sizes)
  return mesh.devices, mesh_lib.mesh_shape(sizes, devices), slices


def test_each_slice_is_a_block_of_the_mesh():
  for dcn, ici in (
    ({'replica': 4}, {}),
    ({'replica': 1, 'mdl': 4}, {'mdl': -1}),
    ({'replica': 1, 'stage': 2, 'data': 2}, {'mdl': 2}),
  ):
    devices, shape, slices = order({'ici': ici, 'dcn': dcn}, slices_of_tpus(4))
    assert devices.shape == tuple(np.multiply(*shape))
    assert [d.slice_index for d in devices.ravel()] == slices
    # Within a slice its devices, across the slices in their order.
    assert sorted(d.id for d in devices.ravel()) == sorted(
      8 * i + j for i in range(4) for j in range(4)
    )
    stages = shape[1][0]
    for stage, part in enumerate(np.split(devices, stages)):
      expected = set(range(4 // stages * stage, 4 // stages * (stage + 1)))
      assert {d.slice_index for d in part.ravel()} == expected


@pytest.mark.parametrize('slice_index', [None, 0])
def test_processes_stand_for_slices_that_devices_do_not_tell(slice_index):
  # As GPUs: each machine is a process.
  devices = [
    Device(i, process_index=i // 4, slice_index=slice_index, platform='gpu')
    for i in range(8)
  ]
  sizes = {'ici': {'mdl': 2}, 'dcn': {'replica': 2}}
  ordered, shape, slices = order(sizes, devices)
  assert [d.process_index for d in ordered.ravel()] == slices
  assert shape == ((1, 1, 2, 1, 2), (1, 2, 1, 1, 1))
  # It was not asked for: then there is one slice.
  assert order({}, devices)[1][1] == (1, 1, 1, 1, 1)
  with pytest.raises(ValueError, match=r"mesh.dcn.*'replica': 4"):
    order({'dcn': {'replica': 4}}, devices)


def test_cpu_devices_make_fake_slices_in_their_order():
  devices = [Device(i, platform='cpu') for i in range(8)]
  for sizes, rows, expected in (
    ({'ici': {'mdl': 2}, 'dcn': {'data': 2}},
     [[0, 1], [2, 3], [4, 5], [6, 7]], [0, 0, 0, 0, 1, 1, 1, 1]),
    # Here a slice has every second column.
    ({'ici': {'data': 4}, 'dcn': {'mdl': 2, 'replica': 1}},
     [[0, 4], [1, 5], [2, 6], [3, 7]], [0, 1] * 4),
  ):  # fmt: skip
    ordered, _, slices = order(sizes, devices)
    ids = np.vectorize(lambda d: d.id)(ordered)
    assert ids[0, 0, :, 0].tolist() == rows
    assert slices == expected
  with pytest.raises(ValueError, match=r"mesh.dcn.*'replica': 3"):
    order({'dcn': {'replica': 3}}, devices)


def test_processes_that_share_rows_are_one_host(monkeypatch):
  monkeypatch.setattr(partitioning.Partitioner, 'is_here', True)
  for sizes, processes, devices, expected in (
    ({'mdl': 2}, 4, 2, [(0, 4), (1, 4), (2, 4), (3, 4)]),
    # Two processes hold the weights of a row's heads, and so its rows.
    ({'mdl': 4}, 4, 2, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    # Of a pipeline, other layers of the same rows.
    ({'stage': 2}, 4, 2, [(0, 2), (1, 2), (0, 2), (1, 2)]),
    ({'dcn': {'mdl': 2}}, 2, 4, [(0, 1), (0, 1)]),
  ):
    machine = [
      Device(i, process_index=i // devices, platform='cpu')
      for i in range(processes * devices)
    ]
    monkeypatch.setattr(jax, 'process_count', lambda n=processes: n)
    hosts = []
    for process in range(processes):
      monkeypatch.setattr(jax, 'process_index', lambda process=process: process)
      with mesh_lib.on_devices(machine):
        hosts.append(partitioning.Partitioner.make(sizes, 'tp').host)
    assert hosts == expected
