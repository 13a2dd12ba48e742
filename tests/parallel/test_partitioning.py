"""Tests of jaxline.parallel.partitioning, on two fake devices."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxline import errors
from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import partitioning
from jaxline.parallel import placement

Logical = partitioning.Logical
P = jax.sharding.PartitionSpec


def partitioner(sharding='fsdp', mesh=None, rules=None):
  made = partitioning.Partitioner.make(mesh, sharding)
  return made if rules is None else dataclasses.replace(made, rules=rules)


# Sizes within slices and across; the devices are only counted.


def shape_of(sizes, count, num_slices=1):
  devices = mesh_lib.abstract_devices(count, num_slices)
  return mesh_lib.mesh_shape(sizes, devices)


@pytest.mark.parametrize(
  ('sizes', 'count', 'num_slices', 'ici', 'dcn'),
  [
    (None, 8, 1, (1, 1, 8, 1, 1), (1, 1, 1, 1, 1)),
    # Slices are replicas where it is not said otherwise.
    (None, 8, 2, (1, 1, 4, 1, 1), (1, 2, 1, 1, 1)),
    ({'ici': {'mdl': -1, 'data': 2}}, 8, 1, (1, 1, 2, 1, 4), (1, 1, 1, 1, 1)),
    ({'dcn': {'data': -1}}, 12, 3, (1, 1, 4, 1, 1), (1, 1, 3, 1, 1)),
    ({'dcn': {'stage': 2}}, 16, 4, (1, 1, 4, 1, 1), (2, 2, 1, 1, 1)),
    ({'dcn': {'stage': 2, 'data': 2, 'replica': 1}}, 16, 4, (1, 1, 4, 1, 1),
     (2, 1, 2, 1, 1)),
  ],
)  # fmt: skip
def test_mesh_shape(sizes, count, num_slices, ici, dcn):
  shape = shape_of(sizes, count, num_slices)
  assert shape == (ici, dcn)


@pytest.mark.parametrize(
  ('sizes', 'count', 'num_slices', 'words'),
  [
    # The key, what it needs, and what there is.
    ({'data': 4, 'mdl': 4}, 8, 1, ['mesh.ici', "'mdl': 4", '8']),
    ({'ici': {'mdl': 3}}, 8, 1, ['mesh.ici', "'mdl': 3", '8']),
    ({'ici': {'mdl': 8}}, 8, 2, ['mesh.ici', 'in a slice', '4']),
    ({'dcn': {'data': 3}}, 8, 2, ['mesh.dcn', "'data': 3", '2']),
    ({'ici': {'mdle': 2}}, 8, 1, ["'mdle' in mesh.ici", "'mdl'"]),
    # The axes themselves, or by network: not both.
    ({'ici': {}, 'data': 2}, 8, 1, ["'data' in mesh", "['ici', 'dcn']"]),
    ({'dcn': {'data': -1, 'mdl': -1}}, 8, 2, ['mesh.dcn', '-1']),
    *(
      ({'data': size}, 2, 1, ['mesh.ici', repr(size)])
      for size in (0, -2, True, 2.0, '2')
    ),
    ({'dcn': {'data': 0}}, 8, 2, ['mesh.dcn.data', '0']),
  ],
)
def test_sizes_that_fit_no_mesh_are_refused(sizes, count, num_slices, words):
  with pytest.raises(errors.UsageError) as error:
    shape_of(sizes, count, num_slices)
  for word in words:
    assert word in str(error.value)


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


def slices_of_tpus(num_slices, side=2):
  """Returns the devices of slices, side x side each, in no good order."""
  devices = [
    Device(
      id=8 * index + side * x + y,
      process_index=2 * index + x,
      slice_index=index,
      device_kind='TPU v5 lite',
      coords=(x, y, 0),
    )
    for index in range(num_slices)
    for x in range(side)
    for y in range(side)
  ]
  np.random.default_rng(0).shuffle(devices)
  return devices


def order(sizes, devices):
  with mesh_lib.on_devices(devices):
    mesh, slices = mesh_lib.make(sizes)
  return mesh.devices, mesh_lib.mesh_shape(sizes, devices), slices


DCN = [
  {'replica': 4},
  {'data': 4},
  {'mdl': 4},
  {'stage': 2, 'replica': 2},
  {'stage': 2, 'data': 2},
  {'replica': 2, 'data': 2},
]


@pytest.mark.parametrize('dcn', DCN, ids=str)
@pytest.mark.parametrize('ici', [{}, {'mdl': 2}, {'mdl': -1}], ids=str)
def test_each_slice_is_a_block_of_the_mesh(dcn, ici):
  dcn = {'replica': 1, **dcn}
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
  sizes = {'ici': {'mdl': 2}, 'dcn': {'data': 2}}
  ordered, _, slices = order(sizes, devices)
  ids = np.vectorize(lambda d: d.id)(ordered)
  assert ids[0, 0, :, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
  assert slices == [0, 0, 0, 0, 1, 1, 1, 1]
  # Here a slice has every second column.
  ordered, _, slices = order(
    {'ici': {'data': 4}, 'dcn': {'mdl': 2, 'replica': 1}}, devices
  )
  ids = np.vectorize(lambda d: d.id)(ordered)
  assert ids[0, 0, :, 0].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
  assert slices == [0, 1] * 4
  with pytest.raises(ValueError, match=r"mesh.dcn.*'replica': 3"):
    order({'dcn': {'replica': 3}}, devices)


@pytest.mark.parametrize('topology', ['v5e:2x4', 'v4:2x2x2'])
def test_slices_of_real_topologies(topology):
  pytest.importorskip('libtpu')
  from jax.experimental import topologies

  more = {'chip_config_name': 'megacore'} if 'v4' in topology else {}
  devices = topologies.get_topology_desc(
    topology, 'tpu', num_slices=2, **more
  ).devices
  assert len(devices) == 16
  ordered, shape, slices = order(
    {'ici': {'data': -1, 'mdl': 2}, 'dcn': {'data': 2}}, devices
  )
  assert shape == ((1, 1, 4, 1, 2), (1, 1, 2, 1, 1))
  assert [d.slice_index for d in ordered.ravel()] == slices
  for a, b in ordered.reshape(-1, 2):
    assert np.abs(np.subtract(a.coords, b.coords)).sum() == 1


# Rules.


@pytest.mark.parametrize(
  ('preset', 'changes', 'nearest'),
  [
    ('fsd', {}, 'fsdp'),
    ('fsdp', {'embd': ('data',)}, 'embed'),
    ('fsdp', {'mlp': ('dat',)}, 'data'),
    ('fsdp', {'embed': 'mdl2'}, 'mdl'),
  ],
)
def test_unknown_rules_are_refused_with_the_nearest(preset, changes, nearest):
  with pytest.raises(errors.UsageError, match=f"'{nearest}'"):
    partitioning.get_rules(preset, changes)


def counted(sizes, sharding='fsdp', count=8):
  with mesh_lib.on_devices(mesh_lib.abstract_devices(count)):
    return partitioning.Partitioner.make(sizes, sharding)


def test_rows_are_refused_with_those_that_fit():
  p = counted({'mdl': 2})
  placement.check_rows(8, p)
  for call, arg, fits in (
    (placement.check_rows, 6, 'such as 8.'),
    (placement.put_batch, {'x': np.ones([3, 2])}, 'such as 4.'),
  ):
    with pytest.raises(mesh_lib.MeshError, match=fits):
      call(arg, p)


# Processes that share rows.


def rows_of(sizes, num_processes, per_process, monkeypatch):
  """Returns the host of each process, were there so many."""
  devices = np.array(
    [
      Device(i, process_index=i // per_process, platform='cpu')
      for i in range(num_processes * per_process)
    ]
  )
  monkeypatch.setattr(partitioning.Partitioner, 'is_here', True)
  monkeypatch.setattr(jax, 'process_count', lambda: num_processes)
  with mesh_lib.on_devices(list(devices)):
    mesh, slices = mesh_lib.make(sizes)
  hosts = []
  for process in range(num_processes):
    monkeypatch.setattr(jax, 'process_index', lambda process=process: process)
    hosts.append(
      partitioning.Partitioner(mesh, partitioning.PRESETS['tp'], slices).host
    )
  return hosts


@pytest.mark.parametrize(
  ('sizes', 'processes', 'devices', 'expected'),
  [
    ({'mdl': 2}, 4, 2, [(0, 4), (1, 4), (2, 4), (3, 4)]),
    # Two processes hold the weights of a row's heads, and so its rows.
    ({'mdl': 4}, 4, 2, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ({'mdl': 8}, 4, 2, [(0, 1)] * 4),
    ({'mdl': 2}, 4, 1, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    # Of a pipeline, other layers of the same rows.
    ({'stage': 2}, 4, 2, [(0, 2), (1, 2), (0, 2), (1, 2)]),
    ({'dcn': {'mdl': 2}}, 2, 4, [(0, 1), (0, 1)]),
    ({'dcn': {'data': 4}}, 4, 2, [(0, 4), (1, 4), (2, 4), (3, 4)]),
  ],
)
def test_processes_that_share_rows_are_one_host(
  sizes, processes, devices, expected, monkeypatch
):
  assert rows_of(sizes, processes, devices, monkeypatch) == expected


# Which axis of an array is split over what.

DATA = ('data', 'expert')
BATCH = ('replica', *DATA)
BOTH = partitioning.Rules(embed=('data',), mlp=('data',), vocab=('data',))


@pytest.mark.parametrize(
  ('rules', 'axes', 'shape', 'expected'),
  [
    ('ddp', ('embed', 'mlp'), (4, 4), P(None, None)),
    ('fsdp', ('mlp', 'embed'), (4, 4), P(None, DATA)),
    ('fsdp', (None, 'embed'), (4, 4), P(None, DATA)),
    # The first to come gets the mesh axis.
    (BOTH, ('embed', 'mlp'), (4, 4), P('data', None)),
    (BOTH, (None, 'vocab', 'embed'), (4, 4, 4), P(None, 'data', None)),
    # What does not divide gives it on.
    (BOTH, ('embed', 'mlp'), (3, 4), P(None, 'data')),
    (BOTH, ('embed', 'mlp'), (3, 5), P(None, None)),
    (BOTH, ('embed', 'mlp'), (0, 5), P('data', None)),
    # In an activation the batch does, so that `embed` is whole.
    (
      'fsdp',
      ('batch', 'length', 'embed'),
      (4, 4, 4),
      P(BATCH, None, None),
    ),
    (BOTH, (), (), P()),
    # Layers are never split, whatever the size.
    ('fsdp', ('layers', None), (1024, 512), P(None, None)),
    ('fsdp', ('layers', 'embed'), (1024, 512), P(None, DATA)),
    # Mesh axes may be named whatever the rules, each for one dimension.
    ('ddp', ('data', 'mdl'), (4, 4), P('data', 'mdl')),
    ('ddp', (('replica', 'data'), None), (4, 4), P(('replica', 'data'), None)),
    ('ddp', (('data',), 'data'), (4, 4), P('data', None)),
    ('ddp', ('data',), (3,), P(None)),
  ],
)
def test_spec(rules, axes, shape, expected):
  rules = partitioning.PRESETS.get(rules, rules)
  assert partitioner(rules=rules).spec(axes, shape) == expected


@pytest.mark.parametrize(
  ('axes', 'word'),
  [
    (('emebd', None), "'embed'"),
    ((('replica', 'dta'), None), "'data'"),
    (('embed',), 'shorter|longer'),
  ],
)
def test_axes_that_do_not_fit_name_their_weight(axes, word):
  weights = {'layer': {'w': Logical(jnp.ones([2, 2]), axes)}}
  with pytest.raises(ValueError, match=word) as error:
    partitioner().specs(weights)
  assert 'layer/w' in error.value.__notes__[0]


# Activations.


def test_constrain_does_nothing_without_a_mesh():
  x = jnp.ones([4, 3])
  assert partitioning.constrain(x, ('batch', 'embed')) is x
  # Not even look at the names: a model is not to know how it is run.
  assert partitioning.constrain(x, ('anything',)) is x


def test_inner_functions_are_traced_anew_for_another_mesh():
  seen = []

  @jax.jit
  def inner(x):
    seen.append(partitioning._active.get())
    return partitioning.constrain(x, ('batch', None))

  def trace(p):
    with p.activate():
      jax.make_jaxpr(inner)(jnp.ones([4, 3]))

  inner(jnp.ones([4, 3]))
  two, replicas = partitioner(), partitioner(mesh={'replica': 2})
  trace(two)
  trace(replicas)
  trace(two)
  assert seen == [None, two, replicas]


# Explicit axes, of which docs/sharding.md says why the library has none.


def test_explicit_axes_ask_for_shardings():
  kinds = (jax.sharding.AxisType.Explicit,)
  mesh = jax.make_mesh((2,), ('data',), axis_types=kinds)
  put = lambda shape, *spec: jax.device_put(jnp.ones(shape), P(*spec))
  with jax.set_mesh(mesh):
    x, w = put((4, 8), 'data'), put((8, 6))
    assert jax.typeof(x @ w).sharding.spec == P('data', None)
    tokens = put((2,)).astype(int)
    with pytest.raises(Exception, match='out_sharding'):
      put((8, 4), 'data')[tokens]
    with pytest.raises(Exception, match='out_sharding'):
      put((4, 8), None, 'data') @ put((8, 6), 'data')


# Putting.


def aligned(shape):
  """An array that a CPU device would borrow rather than copy."""
  memory = np.zeros(int(np.prod(shape)) * 4 + 64, np.uint8)
  start = -memory.ctypes.data % 64
  array = memory[start : start + int(np.prod(shape)) * 4].view(np.float32)
  array = array.reshape(shape)
  array[...] = 1
  return array


def buffers(x):
  """Returns where the parts of an array begin."""
  if isinstance(x, np.ndarray):
    return {x.ctypes.data, x.ctypes.data + x.nbytes // 2}
  return {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


@pytest.mark.parametrize('spec', [P(), P('data')])
@pytest.mark.parametrize('source', ['numpy', 'jax', 'sharded'])
def test_what_was_put_may_be_donated(source, spec):
  p = partitioner()
  original = aligned([64, 64])
  if source == 'jax':
    original = jax.device_put(original)
  elif source == 'sharded':
    original = jax.device_put(
      original, jax.sharding.NamedSharding(p.mesh, P('data'))
    )
  sharding = jax.sharding.NamedSharding(p.mesh, spec)
  put = placement.put({'x': original}, sharding)['x']
  assert put.sharding == sharding
  assert not buffers(put) & buffers(original)
  step = jax.jit(lambda x: x - 41, donate_argnums=0)
  for _ in range(3):
    put = step(put)
  jax.block_until_ready(put)
  np.testing.assert_array_equal(put, np.full([64, 64], 1.0 - 3 * 41))
  np.testing.assert_array_equal(original, np.ones([64, 64]))


def test_put_batch_leaves_what_lies_right():
  p = partitioner()
  batch = placement.put_batch({'x': np.ones([4, 3])}, p)
  assert [s.data.shape for s in batch['x'].addressable_shards] == [(2, 3)] * 2
  assert placement.put_batch(batch, p) is batch
  elsewhere = jax.device_put(np.ones([4, 3]), jax.devices()[1])
  put = placement.put_batch({'x': elsewhere}, p)
  assert put['x'].sharding == p.batch_sharding


# What stays whole, and the optimizer's state.

WEIGHTS = {
  'layer': {
    'w': Logical(jnp.ones([4, 6]), ('embed', 'mlp')),
    'odd': Logical(jnp.ones([3, 6]), ('embed', 'mlp')),
    'b': jnp.ones([6]),
  },
  'w': Logical(jnp.ones([6, 4]), ('mlp', 'embed')),
}


@pytest.mark.parametrize(
  ('sharding', 'shape', 'expected'),
  [
    ('fsdp', [128, 512], P(None, DATA)),
    ('fsdp', [512, 128], P(DATA, None)),
    ('fsdp', [511, 130], P(None, DATA)),  # The largest that divides.
    ('fsdp', [127, 512], P()),  # Fewer than 2**16 elements.
    ('fsdp', [512, 64, 32], P(None, DATA, None)),  # Layers come first.
    ('fsdp', [1024, 64, 33], P(None, DATA, None)),
    ('fsdp', [256, 4097], P()),  # Biases of as many layers, perhaps.
    ('fsdp', [258, 4097], P(DATA, None)),  # No model has as many layers.
    ('fsdp', [2**16], P(DATA)),
    ('ddp', [128, 512], P()),
  ],
)
def test_a_weight_without_names(sharding, shape, expected):
  tree = {'w': jax.ShapeDtypeStruct(shape, jnp.float32)}
  made = partitioner(sharding)
  spec = made.specs(tree)['w']
  assert spec == expected
  is_whole = sharding not in ('ddp', 'tp') and expected == P()
  assert bool(made.undersharded_weights(tree)) == is_whole


def test_weights_left_whole_are_listed():
  lines = partitioner().undersharded_weights(WEIGHTS)
  assert lines == [
    'layer/b (6,) no axes named',
    "layer/odd (3, 6) ('embed', 'mlp'); embed is 3, no multiple of 2",
  ]
  # Also one that another axis splits, or where a weight names a mesh axis.
  tree = {'a': Logical(jnp.ones([4, 3]), ('embed', 'mlp'))}
  (line,) = counted({'data': 4, 'mdl': 2}, 'fsdp_tp').undersharded_weights(tree)
  assert line.endswith('; mlp is 3, no multiple of 2')
  tree = {'a': Logical(jnp.ones([4]), ('data',)), 'b': jnp.ones([3])}
  assert len(partitioner('ddp').undersharded_weights(tree)) == 1
  # Of two axes that split it, one does not divide.
  p = counted({'mdl': 4}, 'fsdp_tp')
  table = Logical(jnp.ones([257, 48]), ('vocab', 'embed'))
  assert p.spec(table.axes, table.value.shape) == P(None, DATA)
  (line,) = p.undersharded_weights({'table': table})
  assert 'vocab is 257, no multiple of 4' in line
  # None where nothing is split.
  with mesh_lib.on_devices(jax.devices()[:1]):
    one = partitioner('fsdp')
  for p in (partitioner('ddp'), one, partitioner(mesh={'replica': 2})):
    assert p.undersharded_weights(WEIGHTS) == []


SPECS = {
  "['layer']['w']": P(DATA, None),
  "['layer']['odd']": P(None, None),
  "['layer']['b']": P(),
  "['w']": P(None, DATA),
}
MASK = {'layer': {'w': True, 'odd': True, 'b': False}, 'w': True}
LABELS = jax.tree.map(lambda x: 'adam' if x else 'none', MASK)


@pytest.mark.parametrize(
  ('optimizer', 'followers'),
  [
    (optax.sgd(0.1), 0),
    (optax.sgd(0.1, momentum=0.9), 4),
    (
      optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(1.0, 0.0, 10), mask=MASK),
      ),
      8,
    ),
    (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), 8),
    (optax.MultiSteps(optax.adam(0.1), 4), 12),
    (optax.masked(optax.adam(0.1), MASK), 6),
    (
      optax.multi_transform(
        {'adam': optax.adam(0.1), 'none': optax.set_to_zero()}, LABELS
      ),
      6,
    ),
    (optax.contrib.muon(0.1), 5),
    # Its factors have other shapes than the weights, and stay whole.
    (optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9), 5),
  ],
  ids=[
    'sgd', 'momentum', 'adamw', 'inject', 'MultiSteps', 'masked',
    'multi_transform', 'muon', 'adafactor',
  ],
)  # fmt: skip
def test_optimizer_state_follows_its_weight(optimizer, followers):
  params = partitioning.unbox(WEIGHTS)
  shapes = {
    jax.tree_util.keystr(path): x.shape
    for path, x in jax.tree_util.tree_leaves_with_path(params)
  }
  state = jax.eval_shape(optimizer.init, params)
  specs = partitioner().specs_like(state, WEIGHTS)
  found = 0
  for (path, leaf), spec in zip(
    jax.tree_util.tree_leaves_with_path(state),
    jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)),
    strict=True,
  ):
    # The longest that fits: ['layer']['w'] and not ['w'].
    name = re.search(
      r"(\['layer'\])?\['(w|odd|b)'\]$", jax.tree_util.keystr(path)
    )
    if name and leaf.shape == shapes[name[0]]:
      assert spec == SPECS[name[0]], path
      found += 1
    else:
      assert spec == P(), path
  assert found == followers


# Axes that nothing uses.


@pytest.mark.parametrize(
  ('sharding', 'mesh', 'idle'),
  [
    ('ddp', {'replica': 2}, []),
    ('ddp', {'mdl': 2}, ['mdl']),
    ('fsdp', {'stage': 2}, ['stage']),
    ('tp', {'mdl': 2}, []),
    ('pipeline', {'stage': 2}, []),
  ],
)
def test_axes_that_no_rule_uses(sharding, mesh, idle):
  assert partitioner(sharding, mesh).idle_axes() == idle
