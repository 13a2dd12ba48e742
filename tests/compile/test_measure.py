"""What a compiled program costs: FLOPs, bytes, communication by axis.

The answers are known by hand. Programs are compiled for the devices that are
here and, with libtpu, for TPUs; excerpts are what the compilers for TPU and GPU
have written, shortened.
"""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline.base import chips
from jaxline.compile import hlo
from jaxline.compile import measure as measure_lib

P = jax.sharding.PartitionSpec
HLO = pathlib.Path(__file__).parent / 'hlo'
AXES = {'data': 4, 'mdl': 2}


def talk(x):
  """One of each collective; the last one says nothing."""
  n = jax.lax.axis_size('data')
  return (
    jax.lax.psum(x, 'data'),
    jax.lax.all_gather(x, 'data', tiled=True),
    jax.lax.psum_scatter(x, 'data', tiled=True),
    jax.lax.all_to_all(x, 'data', 0, 1, tiled=True),
    jax.lax.ppermute(x, 'data', [(i, (i + 1) % n) for i in range(n)]),
    jax.lax.ppermute(x, 'data', [(i, i) for i in range(n)]),
  )


def loops(x, w):
  """A loop of unknown length, branches, and a loop of 7 rounds."""
  x = jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)
  x = jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x)
  return jax.lax.fori_loop(3, 10, lambda i, x: x @ w, x)


def of(*shape, sharding=None):
  return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def compile_text(program, *args):
  return jax.jit(program).lower(*args).compile().as_text()


@pytest.fixture(params=['cpu', 'v4:2x2x1'])
def split(request):
  """The sharding of rows over the devices here, or over those of TPUs."""
  devices = jax.devices()
  if request.param != 'cpu':
    pytest.importorskip('libtpu')
    devices = chips.topology_devices(request.param, 1)
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.sharding.Mesh(np.array(devices), ('data',), axis_types=auto)
  return jax.sharding.NamedSharding(mesh, P('data'))


def measure(text, axis_sizes=None, slices=None):
  """Measures a text; without a mesh, on one axis of its devices."""
  module = hlo.parse(text)
  axis_sizes = axis_sizes or {'data': module.num_devices}
  slices = slices or [0] * math.prod(axis_sizes.values())
  return measure_lib.measure(module, axis_sizes, slices)


def module(main, num_devices=1):
  """Returns a module whose only computation has these lines."""
  head = f'HloModule jit_f, num_partitions={num_devices}\n\n'
  return f'{head}ENTRY main () -> () {{\n{main}\n}}\n'


def summary(text, axis_sizes, slices=None):
  """Kind, axes, count, bytes and wire bytes of the traffic, sorted."""
  return sorted(
    (t.kind, t.axes, t.count, t.bytes, t.wire_bytes)
    for t in measure(text, axis_sizes, slices).traffic
  )


def test_each_kind_of_collective(split):
  n, size = split.mesh.size, 2**19  # Bytes on each device.
  program = jax.shard_map(
    talk, mesh=split.mesh, in_specs=P('data'), out_specs=P('data'),
    check_vma=False,
  )  # fmt: skip
  text = compile_text(program, of(n * 256, 512, sharding=split))
  part, axes = (n - 1) / n, ('data',)
  assert summary(text, {'data': n}) == [
    ('all-gather', axes, 1, n * size, n * size * part),
    ('all-reduce', axes, 1, size, 2 * size * part),
    ('all-to-all', axes, 1, size, size * part),
    ('collective-permute', axes, 1, size, size),
    ('reduce-scatter', axes, 1, size, size * part),
  ]


def test_loops_and_branches(split):
  found = measure(compile_text(loops, of(64, 32, sharding=split), of(32, 32)))
  assert len(found.unknown_loops) == 1
  # One round of the unknown loop, two products of a branch, seven rounds.
  flops = (1 + 2 + 7) * 2 * 64 * 32 * 32
  assert split.mesh.size * found.flops == flops


def test_bytes_of_what_has_no_loops_are_what_xla_counts():
  def program(x, w):
    return jnp.tanh(x @ w).sum(axis=0) + x[3, :16]

  compiled = jax.jit(program).lower(of(64, 32), of(32, 16)).compile()
  found = measure(compiled.as_text()).hbm_bytes
  assert found == compiled.cost_analysis()['bytes accessed']
  assert found > 4 * (64 * 32 + 32 * 16)


def test_a_part_of_an_array_counts_as_that_part():
  text = module("""
  %x = f32[1000,128]{1,0} parameter(0)
  %i = s32[16,1]{1,0} parameter(1)
  %rows = f32[16,128]{1,0} parameter(2)
  %j = s32[] constant(3)
  ROOT %it = f32[ROWS,128]{1,0} CALL
""")
  rows, column = 4 * 16 * 128, 4 * 16
  for size, call, expected in (
    # What is taken is read and written; so is an update in place.
    (16, 'dynamic-slice(%x, %j, %j), dynamic_slice_sizes={16,128}', 2 * rows),
    (1000, 'dynamic-update-slice(%x, %rows, %j, %j)', 2 * rows),
    # The updated rows are read and written, the updates read.
    (1000, 'scatter(%x, %i, %rows), to_apply=%add', 3 * rows + column),
  ):
    edited = text.replace('ROWS', str(size)).replace('CALL', call)
    # It also looks at the indices.
    assert 0 <= measure(edited).hbm_bytes - expected <= 8, call


# Overlapped with a matrix product: v5e:4x4, weights split over all.
ASYNC_FUSIONS = (HLO / 'async_fusions.hlo').read_text()


def test_a_chain_of_fusions_is_one_collective():
  found = measure(ASYNC_FUSIONS)
  size = 4096 * 1024 * 2
  assert summary(ASYNC_FUSIONS, {'data': 16}) == [
    ('all-gather', ('data',), 1, size, size * 15 / 16)
  ]
  assert found.flops == 2 * (2 * 128) * 1024 * 4096
  # Written is what is gathered; read, the weight of the product. All else is in
  # VMEM, S(1), or is passed on.
  assert found.hbm_bytes == size + 1024 * 4096 * 2


# The gradients of two slices of v4:2x2x1, in the last rounds of a loop that was
# peeled: it starts with 1. The shard is padded to a multiple of the tiles.
TWO_SLICES = (HLO / 'two_slices.hlo').read_text()


def test_slices_that_run_a_program_each():
  mesh, slices = {'replica': 2, 'data': 4}, [0, 0, 0, 0, 1, 1, 1, 1]
  padded, shard = 1152 * 4096 * 2, 288 * 4096 * 2
  assert summary(TWO_SLICES, mesh, slices) == [
    ('all-reduce', ('replica',), 3, 3 * shard, 3 * shard),
    ('reduce-scatter', ('data',), 3, 3 * padded, 3 * padded * 3 / 4),
  ]
  found = measure(TWO_SLICES, mesh, slices)
  within, between = found.traffic
  assert within.dcn_bytes == 0
  assert between.dcn_bytes == between.wire_bytes
  # What is sent is read, what is received is written, three times; the copy
  # into CMEM is read once. Scalars: a copy once, an addition three times, of a
  # counter and a constant; a comparison four times.
  copied, counter = 1024 * 4096 * 2, 4
  scalars = 2 * counter + 3 * 3 * counter + 4 * (2 * counter + 1)
  assert found.hbm_bytes == copied + 3 * 2 * shard + scalars


def test_kernels_tell_what_they_cost_or_are_listed():
  found = measure((HLO / 'kernels.hlo').read_text())
  assert found.flops == 4320133120
  assert found.unknown_kernels == ('flash_mha_bwd (jit(g)/pallas_call)',)


def test_splash_attention_counts_the_blocks_that_a_causal_mask_leaves():
  """As of libtpu 0.0.52: the metadata of the kernel has lines of its own."""
  text = (HLO / 'splash.hlo').read_text()
  product = 2 * (2 * 4 * 1024 * 1024) * 128
  for phase, products in (
    ('fwd_residuals', 2),
    ('dq_no_residuals', 3),
    ('dkv_segmented_no_residuals', 4),
  ):
    measures = measure(text.replace('PHASE', phase))
    # Of two by two blocks, one is above the diagonal.
    assert measures.flops == products * product * 3 / 4
    assert not measures.unknown_kernels
  whole = text.replace('(%m, %m, ', '(').replace('PHASE', 'fwd')
  assert measure(whole).flops == 2 * product


# Excerpts: GPU. Not compiled by the authors of these tests: the attributes are
# as XLA's own tests and public dumps have them.

GPU = (HLO / 'gpu.hlo').read_text()


def test_gpu_pairs_count_once():
  whole, shard = 5 * 1024 * 64 * 2, 5 * 128 * 64 * 2
  assert summary(GPU, AXES) == [
    ('all-gather', ('data', 'mdl'), 5, whole, whole * 7 / 8),
    ('all-reduce', ('mdl',), 5, whole, whole),
    ('collective-permute', ('data',), 5, shard, shard),
    ('reduce-scatter', ('data', 'mdl'), 5, whole, whole * 7 / 8),
  ]
  found = measure(GPU)
  assert found.unknown_loops == ()
  whole, shard = 1024 * 64 * 2, 128 * 64 * 2
  a_round = (shard + whole) + 2 * whole + (whole + shard) + 2 * shard
  # The condition looks at the state, six times.
  assert found.hbm_bytes == 5 * a_round + 6 * (4 + shard + 1)


def test_kernels_of_libraries():
  found = measure((HLO / 'library_kernels.hlo').read_text())
  # Attention has two products forwards and five backwards.
  attention = 2 * (2 * 4 * 256 * 128) * 64
  assert found.flops == 2 * 4 * 32 * 48 * 64 + (2 + 5) * attention
  assert found.unknown_kernels == ()


def one_collective(call):
  body = f"""
  %x = f32[8]{{0}} parameter(0)
  ROOT %it = f32[8]{{0}} {call}, channel_id=1"""
  return module(body, num_devices=8)


def test_replica_groups():
  for groups, axes, group_size in (
    ('{{0,1},{2,3},{4,5},{6,7}}', 'c', 2),
    ('[2,4]<=[4,2]T(1,0)', 'ab', 4),
    # {0,2}, {4,6}, {1,3}, {5,7}.
    ('[4,2]<=[2,2,2]T(2,0,1)', 'b', 2),
    # Parts of axes: the outer half, and an inner one.
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", 'ac', 4),
    # Other orders of the devices.
    ("mesh['a'=4,'b'=2], device_ids=(0,2,4,6,1,3,5,7) {'b'}", 'b', 2),
  ):
    text = one_collective(
      f'all-reduce(%x), replica_groups={groups}, use_global_device_ids=true'
    )
    (found,) = measure(text, dict.fromkeys('abc', 2)).traffic
    assert found.axes == tuple(axes)
    assert found.wire_bytes == 32 * 2 * (group_size - 1) / group_size


def test_what_must_leave_a_slice():
  every = 'replica_groups={{0,1,2,3,4,5,6,7}}'
  pairs = 'source_target_pairs={{0,4},{4,0},{1,2},{2,1}}'
  mesh = {'stage': 1, 'replica': 2, 'data': 4, 'mdl': 1}
  for kind, where, part in (
    # Within slices all but one of each slice's chips' shares has been added.
    ('all-reduce', every, 1 / 7),
    ('all-gather', every, 1 / 7),
    ('all-reduce', 'replica_groups={{0,1},{2,3},{4,5},{6,7}}', 0.0),
    # Half of the chips are in the other slice.
    ('all-to-all', every, 4 / 7),
    ('collective-permute', pairs, 1.0),
  ):
    text = one_collective(f'{kind}(%x), {where}')
    (found,) = measure(text, mesh, [0] * 4 + [1] * 4).traffic
    assert found.dcn_bytes == pytest.approx(part * found.wire_bytes)
