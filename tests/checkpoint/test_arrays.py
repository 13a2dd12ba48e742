"""Tests of jaxline.checkpoint.arrays: types, parts, shardings, damage."""

import functools
import itertools
import json
import math
import operator
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental import v1
import pytest
import tensorstore as ts
import zarr

from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.checkpoint import inspection
from jaxline.run_directory import store as store_lib
from tests import checkpoints
from tests import processes


def write(store, live):
  """Writes arrays, and returns their description as it is in a manifest."""
  described = json.loads(json.dumps(arrays.write(store, arrays.to_host(live))))
  for about in described.values():
    arrays.DESCRIBED.require('it', about)
  arrays.verify(store, described)
  return described


def read(store, described, targets=None):
  targets = dict.fromkeys(described) if targets is None else targets
  return dict(arrays.read(store, described, targets))


def test_types(tmp_path):
  store = store_lib.at(tmp_path)
  values = checkpoints.numpy_values()
  described = write(store, values)
  checkpoints.assert_same(read(store, described), values)
  # On a device.
  names = (
    'float', '0-d', 'bool', 'complex', 'empty', 'bfloat16', 'float8_e5m2',
    'int4', 'uint4', 'int8', 'float16', 'empty bfloat16',
  )  # fmt: skip
  live = {name: jax.numpy.asarray(values[name]) for name in names}
  live['key'] = jax.random.split(jax.random.key(0, impl='rbg'), 3)
  live['raw key'] = jax.random.PRNGKey(1)
  described = write(store.below('live'), live)
  shapes = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    for name, x in live.items()
  }
  got = read(store.below('live'), described, shapes)
  checkpoints.assert_same(got, live)
  data = jax.random.key_data(live['key'])
  host = read(store.below('live'), described)['key']
  checkpoints.assert_same(host, np.asarray(data))


def test_other_programs_read_them(tmp_path):
  store = store_lib.at(tmp_path)
  values = checkpoints.numpy_values() | {'rows': np.arange(64).reshape(8, 8)}
  num_read = 0
  for name, about in write(store, values).items():
    place = {'driver': 'file', 'path': f'{tmp_path}/{about["file"]}/'}
    spec = {'driver': 'zarr3', 'kvstore': place}
    try:
      opened = ts.open(spec, open=True).result()
    except ValueError:  # It lacks a few types.
      continue
    num_read += 1
    want = np.asarray(values[name], order='C')
    checkpoints.assert_same(np.asarray(opened.read().result()), want)
  assert num_read > 20


# Names for which there is no such place in a tree, or no such folder.
ODD = ['a', 'a/b', 'A', 'c/~/w', 'c.~.w', '7/w', 'd//w', 'ü', 'n/' * 200]


def assert_others_open(saved: contents.Checkpoint) -> int:
  """Opens a checkpoint with Orbax 0 and 1, zarr and TensorStore.

  Orbax gets no target, and version 1 also one with a device. Returns how many
  arrays lie deeper in the tree than at its top.
  """
  place, want = saved.data.url, saved.arrays()
  trees = [
    ocp.StandardCheckpointer().restore(place),
    ocp.PyTreeCheckpointer().restore(place),
    v1.load(place),
  ]
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    trees[0],
  )
  placed = v1.load(place, target)
  assert {x.sharding for x in jax.tree.leaves(placed)} == {sharding}
  num_nested = 0
  for name, x in want.items():
    folder = saved.described[name]['file']
    path = name.split('/')
    if folder != '.'.join(path):
      path = [folder]
    num_nested += len(path) > 1
    for tree in (*trees, placed):
      found = functools.reduce(operator.getitem, path, tree)
      checkpoints.assert_same(np.asarray(found), x)
    file = {'driver': 'file', 'path': f'{place}/{folder}/'}
    opened = ts.open({'driver': 'zarr3', 'kvstore': file}, open=True).result()
    checkpoints.assert_same(np.asarray(opened.read().result()), x)
    if x.dtype.isbuiltin == 1:  # zarr-python lacks the types of ml_dtypes.
      found = zarr.open_array(f'{place}/{folder}', mode='r')[...]
      checkpoints.assert_same(np.asarray(found), x)
  assert len(jax.tree.leaves(trees[0])) == len(want)
  return num_nested


@pytest.mark.parametrize('style', ['sharded', 'per device'])
def test_other_programs_open_a_run(style, open_run):
  live: Any
  if style == 'sharded':
    live = checkpoints.Sharded()
    checkpoints.advance(live, 1)
  else:
    live = checkpoints.PerDevice({name: np.float32([1, 2]) for name in ODD}, {})
  checkpointer = open_run()
  checkpoints.save(checkpointer, live)
  saved = inspection.find(f'{checkpointer.directory.run}:5')
  num_nested = assert_others_open(saved)
  assert num_nested >= (len(saved.described) if style == 'sharded' else 2)


# Parts.


def test_parts(tmp_path, monkeypatch):
  monkeypatch.setattr(arrays, '_PART_BYTES', 64)
  store, sizes = store_lib.at(tmp_path), (0, 1, 2, 6, 12, 37)
  values = {
    str(shape): np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    for rank in range(4)
    for shape in itertools.product(sizes, repeat=rank)
    if math.prod(shape) < 500
  }
  described = write(store, values)
  checkpoints.assert_same(read(store, described), values)
  for name, about in described.items():
    x, folder = values[name], tmp_path / about['file']
    files = [p for p in folder.iterdir() if p.name[0] == 'c']
    assert {p.name for p in files} == set(about['parts'])
    sizes = [p.stat().st_size for p in files]
    assert sum(sizes) == x.nbytes
    # A row is not split, and parts are equal: 37 rows have no divisor.
    if x.size and x.ndim and x.shape[0] != 37:
      assert max(sizes) <= max(64, x[:1].nbytes)


def test_each_part_is_read_once_and_few_at_a_time(tmp_path, monkeypatch):
  monkeypatch.setattr(arrays, '_PART_BYTES', 64)
  monkeypatch.setattr(arrays, '_READ_BYTES', 1)
  store, keys = store_lib.at(tmp_path), []
  x = np.arange(64)
  described = write(store, {'a': x, 'b': x, 'c': np.ones(4)})
  read_into = store.read_into
  spy = lambda key, buffer: (keys.append(key), read_into(key, buffer))
  monkeypatch.setattr(store, 'read_into', spy)
  reader = arrays.read(store, described, {'b': None, 'a': None})
  for name, number in (('b', 8), ('a', 16)):
    assert next(reader)[0] == name
    assert len(keys) == len(set(keys)) == number


def check_shardings(directory) -> None:
  """Saves with each sharding, and restores onto each other one."""
  n = jax.device_count()
  mesh = jax.make_mesh((2, n // 2), ('a', 'b'))
  specs = [
    P(), P('a'), P('b'), P(('a', 'b')), P(('b', 'a')), P(None, 'a'),
    P('b', 'a'), P('a', 'b'), P(None, ('b', 'a')), P('a', None, 'b'),
  ]  # fmt: skip
  shardings = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
  x = np.random.default_rng(0).normal(size=(2 * n, 3 * n, n)).astype('f4')
  one = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
  for i, sharding in enumerate(shardings):
    live = jax.device_put(x, sharding)
    for spans_hosts in (False, True):
      store = store_lib.at(directory).below(f'{i}-{spans_hosts}')
      with pytest.MonkeyPatch.context() as patch:
        # Of an array on several hosts each writes its shards.
        is_local = property(lambda y, x=live, s=spans_hosts: not (s and y is x))
        patch.setattr(type(live), 'is_fully_addressable', is_local)
        described = write(store, {'x': live})
      shards = len({str(shard.index) for shard in live.addressable_shards})
      parts = described['x']['parts']
      assert len(parts) >= (shards if spans_hosts else 1)
      for target in (None, one, *shardings):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)
        got = read(store, described, {'x': shape})['x']
        assert getattr(got, 'sharding', None) == target
        assert np.asarray(got).tobytes() == x.tobytes()


def test_shardings(tmp_path, monkeypatch):
  monkeypatch.setattr(arrays, '_PART_BYTES', 40)
  check_shardings(tmp_path / 'parts')


@pytest.mark.process
def test_shardings_of_eight_devices(tmp_path):
  program = (
    'import sys; from tests.checkpoint import test_arrays as here;'
    'assert here.jax.device_count() == 8; here.check_shardings(sys.argv[1])'
  )
  flags = '--xla_force_host_platform_device_count=8'
  done = processes.run('-c', program, tmp_path / 'x', XLA_FLAGS=flags)
  assert done.returncode == 0, done.stderr


# Damage.


def test_every_part_is_guarded(tmp_path, monkeypatch):
  monkeypatch.setattr(arrays, '_PART_BYTES', 16)
  store = store_lib.at(tmp_path)
  live = {
    'w': np.arange(8.0, dtype=np.float32).reshape(4, 2), 'n': np.int8(3),
    'key': jax.random.key(0), 'empty': np.zeros([0, 2]),
  }  # fmt: skip
  described = write(store, live)
  parts = [p for p in tmp_path.rglob('c*') if p.stat().st_size]
  assert len(parts) == 4

  def is_found(path, text):
    key = str(path.relative_to(tmp_path))
    for use in (arrays.verify, read):
      with pytest.raises(store_lib.DamagedError) as e:
        use(store, described)
      assert key in str(e.value)
      assert text in str(e.value)

  for path in parts:
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
      flipped = bytearray(whole)
      flipped[bit // 8] ^= 1 << bit % 8
      path.write_bytes(flipped)
      is_found(path, 'CRC-32C')
    for damaged in (whole[:-1], whole + b'\0', b''):
      path.write_bytes(damaged)
      is_found(path, f'{len(damaged)} bytes')
    path.unlink()
    is_found(path, 'missing')
    path.write_bytes(whole)
  # What is not asked for is not read, and nobody reads what Zarr has beside.
  for path in tmp_path.rglob('*.json'):
    path.unlink()
  (tmp_path / described['w']['file'] / 'c.0.0').unlink()
  got = read(store, described, {'n': None, 'empty': None})
  checkpoints.assert_same(got['n'], np.array(3, np.int8))
