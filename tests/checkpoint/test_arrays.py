"""Tests of jaxline.checkpoint.arrays: types, parts, shardings, damage."""

import functools
import json
import operator
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental import v1
import pytest
import tensorstore as ts

from jaxline.checkpoint import arrays
from jaxline.checkpoint import inspection
from jaxline.run_directory import store as store_lib
from tests import checkpoints


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
  """Other programs read them too."""
  store, num_read = store_lib.at(tmp_path), 0
  values = checkpoints.numpy_values() | {'rows': np.arange(64).reshape(8, 8)}
  described = write(store, values)
  checkpoints.assert_same(read(store, described), values)
  for name, about in described.items():
    try:
      found = with_tensorstore(f'{tmp_path}/{about["file"]}')
    except ValueError:  # It lacks a few types.
      continue
    num_read += 1
    checkpoints.assert_same(found, np.asarray(values[name], order='C'))
  assert num_read > 20


def with_tensorstore(folder):
  file = {'driver': 'file', 'path': f'{folder}/'}
  opened = ts.open({'driver': 'zarr3', 'kvstore': file}, open=True).result()
  return np.asarray(opened.read().result())


# Names for which there is no such place in a tree, or no such folder.
ODD = ['a', 'a/b', 'A/b', 'c/~/w', 'c.~.w', '7/w', 'd//w', 'ü', 'n/' * 200]


@pytest.mark.parametrize('style', ['sharded', 'per device'])
def test_other_programs_open_a_run(style, open_run):
  """Orbax 0 and 1, zarr and TensorStore; Orbax with a target and without."""
  zarr = pytest.importorskip('zarr')  # Not in each worker.
  live: Any
  if style == 'sharded':
    live = checkpoints.Sharded()
    checkpoints.advance(live, 1)
  else:
    live = checkpoints.PerDevice({name: np.float32([1, 2]) for name in ODD}, {})
  checkpointer = open_run()
  checkpoints.save(checkpointer, live)
  saved = inspection.find(f'{checkpointer.directory.run}:5')
  place, num_nested = saved.data.url, 0
  trees = [
    ocp.StandardCheckpointer().restore(place),
    ocp.PyTreeCheckpointer().restore(place),
    v1.load(place),
  ]
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
  shape_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  trees.append(v1.load(place, jax.tree.map(shape_of, trees[0])))
  assert {x.sharding for x in jax.tree.leaves(trees[-1])} == {sharding}
  for name, x in saved.arrays().items():
    folder, path = saved.described[name]['file'], name.split('/')
    path = path if folder == '.'.join(path) else [folder]
    num_nested += len(path) > 1
    for tree in trees:
      found = functools.reduce(operator.getitem, path, tree)
      checkpoints.assert_same(np.asarray(found), x)
    checkpoints.assert_same(with_tensorstore(f'{place}/{folder}'), x)
    if x.dtype.isbuiltin == 1:  # zarr-python lacks the types of ml_dtypes.
      found = zarr.open_array(f'{place}/{folder}', mode='r')[...]
      checkpoints.assert_same(np.asarray(found), x)
  assert len(jax.tree.leaves(trees[0])) == len(saved.described)
  # Some file systems ignore case.
  folders = {about['file'].lower() for about in saved.described.values()}
  assert len(folders) == len(saved.described)
  assert num_nested >= (len(saved.described) if style == 'sharded' else 2)


def test_shardings(tmp_path, monkeypatch):
  """Saves with each sharding, and restores onto each other one."""
  monkeypatch.setattr(arrays, '_PART_BYTES', 40)
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
      store = store_lib.at(tmp_path).below(f'{i}-{spans_hosts}')
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
  for path in parts:
    whole = path.read_bytes()
    damaged: dict[Any, str] = {whole[:-1]: ' bytes', whole + b'\0': ' bytes'}
    for bit in range(0, 8 * len(whole), 7):
      flipped = bytearray(whole)
      flipped[bit // 8] ^= 1 << bit % 8
      damaged[bytes(flipped)] = 'CRC-32C'
    for content, text in (*damaged.items(), (None, 'missing')):
      path.unlink() if content is None else path.write_bytes(content)
      for use in (arrays.verify, read):
        with pytest.raises(store_lib.DamagedError) as e:
          use(store, described)
        assert str(path.relative_to(tmp_path)) in str(e.value)
        assert text in str(e.value)
    path.write_bytes(whole)
  # What is not asked for is not read, and nobody reads what Zarr has beside.
  for path in tmp_path.rglob('*.json'):
    path.unlink()
  (tmp_path / described['w']['file'] / 'c.0.0').unlink()
  got = read(store, described, {'n': None, 'empty': None})
  checkpoints.assert_same(got['n'], np.array(3, np.int8))
