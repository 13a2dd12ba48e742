"""What a compiled program costs: FLOPs, bytes, communication by axis.

The answers are known by hand. Programs are compiled here for eight devices;
excerpts are what the compilers for TPU and GPU have written, shortened. This
file is also the program that compiles, for 'cpu' or a TPU topology, and prints
the results.
"""

import functools
import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline.compile import hlo
from jaxline.compile import measure as measure_lib
from tests import processes

P = jax.sharding.PartitionSpec
HLO = pathlib.Path(__file__).parent / 'hlo'
AXES = {'data': 4, 'mdl': 2}
# What is compiled.


def make_mesh(devices):
  return jax.sharding.Mesh(
    np.array(devices).reshape(tuple(AXES.values())),
    tuple(AXES),
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
  )


def on_every_device(mesh, program):
  """A program of float32[256, 512] = 2**19 bytes on each device."""
  everywhere = P(tuple(mesh.shape))
  x = jax.ShapeDtypeStruct(
    (mesh.size * 256, 512),
    jnp.float32,
    sharding=jax.sharding.NamedSharding(mesh, everywhere),
  )
  program = jax.shard_map(
    program,
    mesh=mesh,
    in_specs=everywhere,
    out_specs=everywhere,
    check_vma=False,
  )
  return jax.jit(program), (x,)


def talk(x):
  """One of each collective."""
  ring = [(i, (i + 1) % 4) for i in range(4)]
  return (
    jax.lax.psum(x, 'data'),
    jax.lax.all_gather(x, 'mdl', tiled=True),
    jax.lax.psum_scatter(x, 'data', tiled=True),
    jax.lax.all_to_all(x, 'mdl', 0, 1, tiled=True),
    jax.lax.ppermute(x, 'data', ring),
    jax.lax.psum(jnp.sin(x), ('data', 'mdl')),
    jax.lax.ppermute(x, 'data', [(i, i) for i in range(4)]),
  )


def loops(mesh):
  """A loop of unknown length, branches, and a loop of 7 rounds."""

  def program(x, w):
    x = jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)
    x = jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x)
    return jax.lax.fori_loop(3, 10, lambda i, x: x @ w, x)

  split = jax.sharding.NamedSharding(mesh, P(('data', 'mdl')))
  x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=split)
  w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
  return jax.jit(program), (x, w)


def parts():
  """Reads or writes rows of a large array."""
  args = (
    jax.ShapeDtypeStruct((1000, 128), jnp.float32),
    jax.ShapeDtypeStruct((16,), jnp.int32),
    jax.ShapeDtypeStruct((16, 128), jnp.float32),
  )
  programs = {
    'slice': lambda table, i, rows: table[i[0]],
    'update': lambda table, i, rows: jax.lax.dynamic_update_slice(
      table, rows, (i[0], 0)
    ),
    'scatter': lambda table, i, rows: table.at[i].add(rows),
  }
  return {
    name: (jax.jit(program, donate_argnums=0), args)
    for name, program in programs.items()
  }


def compile_all(where):
  devices = jax.devices() if where == 'cpu' else tpu_devices(where)
  mesh = make_mesh(devices)
  programs = {'talk': on_every_device(mesh, talk), 'loops': loops(mesh)}
  programs |= parts() if where == 'cpu' else {}
  return {
    name: step.lower(*args).compile().as_text()
    for name, (step, args) in programs.items()
  }


def tpu_devices(topology):
  from jax.experimental import topologies

  return topologies.get_topology_desc(
    topology, 'tpu', chip_config_name='megacore'
  ).devices


@functools.cache
def texts(where):
  done = processes.run(
    *(__file__, where),
    timeout=150,
    ALLOW_MULTIPLE_LIBTPU_LOAD='1',
    TPU_SKIP_MDS_QUERY='1',
    XLA_FLAGS='--xla_force_host_platform_device_count=8',
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=['cpu', 'v4:2x2x2'])
def compiled(request):
  if request.param != 'cpu':
    pytest.importorskip('libtpu')
  return texts(request.param)


def measure(text, axis_sizes=None, slices=None):
  """Measures a text; without a mesh, on one axis of its devices."""
  module = hlo.parse(text)
  axis_sizes = axis_sizes or {'data': module.num_devices}
  slices = slices or [0] * math.prod(axis_sizes.values())
  return measure_lib.measure(module, axis_sizes, slices)


def module(main, num_devices=1, **computations):
  """Returns a module; each of its computations is given as its lines."""
  bodies = computations | {'ENTRY main': main}
  return f'HloModule jit_f, num_partitions={num_devices}\n\n' + '\n'.join(
    f'{name} () -> () {{\n{body}\n}}\n' for name, body in bodies.items()
  )


def summary(text, axis_sizes, slices=None):
  """Kind, axes, count, bytes and wire bytes of the traffic, sorted."""
  return sorted(
    (t.kind, t.axes, t.count, t.bytes, t.wire_bytes)
    for t in measure(text, axis_sizes, slices).traffic
  )


# Compiled here, for CPU and for TPUs.


def test_each_kind_of_collective(compiled):
  assert summary(compiled['talk'], AXES) == [
    ('all-gather', ('mdl',), 1, 2**20, 2**19),
    ('all-reduce', ('data',), 1, 2**19, 2**19 * 1.5),
    ('all-reduce', ('data', 'mdl'), 1, 2**19, 2**19 * 1.75),
    ('all-to-all', ('mdl',), 1, 2**19, 2**18),
    ('collective-permute', ('data',), 1, 2**19, 2**19),
    ('reduce-scatter', ('data',), 1, 2**19, 2**19 * 0.75),
  ]


def test_loops_and_branches(compiled):
  found = measure(compiled['loops'])
  assert len(found.unknown_loops) == 1
  # One round of the unknown loop, two products of a branch, seven rounds.
  assert 8 * found.flops == (1 + 2 + 7) * 2 * 64 * 32 * 32


def test_bytes_of_what_has_no_loops_are_what_xla_counts():
  def program(x, w):
    return jnp.tanh(x @ w).sum(axis=0) + x[3, :16]

  args = (
    jax.ShapeDtypeStruct((64, 32), jnp.float32),
    jax.ShapeDtypeStruct((32, 16), jnp.float32),
  )
  compiled = jax.jit(program).lower(*args).compile()
  found = measure(compiled.as_text()).hbm_bytes
  assert found == compiled.cost_analysis()['bytes accessed']
  assert found > 4 * (64 * 32 + 32 * 16)


def test_a_part_of_an_array_counts_as_that_part():
  for name, expected in (
    # What is taken is read and written; so is an update in place.
    ('slice', 2 * 128),
    ('update', 2 * 16 * 128),
    # The updated rows are read and written, the updates read.
    ('scatter', 3 * 16 * 128),
  ):
    more = measure(texts('cpu')[name]).hbm_bytes - 4 * expected
    assert 0 <= more <= 4 * 4 * 16, name  # To look at the indices.


# Excerpts: TPU.

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


@pytest.mark.parametrize(
  ('mesh', 'slices'),
  [
    ({'replica': 2, 'data': 4}, [0, 0, 0, 0, 1, 1, 1, 1]),
    # The axis between the slices need not be the first one.
    ({'data': 4, 'replica': 2}, [0, 1, 0, 1, 0, 1, 0, 1]),
  ],
)
def test_slices_that_run_a_program_each(mesh, slices):
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
  text = module("""
  %q = bf16[2,4,1024,128]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %flash_attention.1 = bf16[2,4,1024,128]{3,2,1,0:T(8,128)(2,1)S(1)} custom-call(%q, %q, %q), custom_call_target="tpu_custom_call", metadata={op_name="jit(g)/flash_attention/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"4320133120","transcendentals":"8388608","bytes_accessed":"16777216"},"needs_layout_passes":true}}
  ROOT %flash_mha_bwd = bf16[2,4,1024,128]{3,2,1,0:T(8,128)(2,1)} custom-call(%flash_attention.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(g)/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzv","needs_layout_passes":true}}
""")  # noqa: E501
  assert measure(text).flops == 4320133120
  assert measure(text).unknown_kernels == (
    'flash_mha_bwd (jit(g)/pallas_call)',
  )


def test_splash_attention_counts_the_blocks_that_a_causal_mask_leaves():
  """As of libtpu 0.0.52: the metadata of the kernel has lines of its own."""
  text = module("""
  %m = s8[1,2,2]{2,1,0:T(8,128)(4,1)} parameter(0)
  %q = bf16[2,4,1024,128]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %k = bf16[2,2,1024,128]{3,2,1,0:T(8,128)(2,1)} parameter(2)
  %splash_mha_PHASE.3 = bf16[2,4,1024,128]{3,2,1,0:T(8,128)(2,1)} custom-call(%m, %m, %q, %k, %k), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/splash_mha_PHASE/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzv"}}
  ROOT %copy = bf16[2,4,1024,128]{3,2,1,0:T(8,128)(2,1)} copy(%splash_mha_PHASE.3)
""")  # noqa: E501
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


FMHA = (
  '(bf16[2,4,256,64]{3,1,2,0}, u8[16]{0}) custom-call(%q, %k, %k),'
  ' custom_call_target="__cudnn$fmhaSoftmaxKIND", backend_config={'
  '"cudnn_fmha_backend_config":{"fmha_scale":1.0,'
  '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions":'
  ' ["2", "4", "256", "128"], "tuple_shapes": []}}}'
)


@pytest.mark.parametrize(
  ('call', 'expected'),
  [
    (
      '(f32[4,32,48]{2,1,0}, s8[4096]{0}) custom-call(%a, %b),'
      ' custom_call_target="__cublas$lt$matmul", backend_config={'
      '"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{'
      '"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],'
      '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}',
      2 * 4 * 32 * 48 * 64,
    ),
    (
      FMHA.replace('KIND', ''),
      2 * (2 * (2 * 4 * 256 * 128) * 64),
    ),
    (
      FMHA.replace('KIND', 'Backward'),
      5 * (2 * (2 * 4 * 256 * 128) * 64),
    ),
  ],
)
def test_kernels_of_libraries(call, expected):
  text = module(f"""
  %a = f32[4,32,64]{{2,1,0}} parameter(0)
  %b = f32[4,64,48]{{2,1,0}} parameter(1)
  %q = bf16[2,256,4,64]{{3,2,1,0}} parameter(2)
  %k = bf16[2,128,4,64]{{3,2,1,0}} parameter(3)
  ROOT %call = {call}
""")
  assert measure(text).flops == expected
  assert measure(text).unknown_kernels == ()


# Groups.


def one_collective(call):
  body = f"""
  %x = f32[8]{{0}} parameter(0)
  ROOT %it = f32[8]{{0}} {call}, channel_id=1"""
  return module(body, num_devices=8)


@pytest.mark.parametrize(
  ('groups', 'axes', 'group_size'),
  [
    ('{{0,1},{2,3},{4,5},{6,7}}', 'c', 2),
    ('{}', 'abc', 8),
    ('[4,2]<=[8]', 'c', 2),
    ('[2,4]<=[4,2]T(1,0)', 'ab', 4),
    # {0,2}, {4,6}, {1,3}, {5,7}.
    ('[4,2]<=[2,2,2]T(2,0,1)', 'b', 2),
    ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_2'}", 'c', 2),
    # Parts of an axis: its inner half (stride 1), and its outer half.
    ("mesh['a'=2,'b'=4] {'b':(1)2}", 'b', 2),
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", 'ac', 4),
    # Other orders of the devices.
    ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", 'a', 2),
    ("mesh['a'=4,'b'=2], device_ids=(0,2,4,6,1,3,5,7) {'b'}", 'b', 2),
  ],
)
def test_replica_groups(groups, axes, group_size):
  text = one_collective(
    f'all-reduce(%x), replica_groups={groups}, use_global_device_ids=true'
  )
  (found,) = measure(text, dict.fromkeys('abc', 2)).traffic
  assert found.axes == tuple(axes)
  assert found.wire_bytes == 32 * 2 * (group_size - 1) / group_size


# What goes between slices.


@pytest.mark.parametrize(
  ('kind', 'groups', 'part'),
  [
    # Within slices all but one of each slice's chips' shares has been added.
    ('all-reduce', '{{0,1,2,3,4,5,6,7}}', 1 / 7),
    ('all-gather', '{{0,1,2,3,4,5,6,7}}', 1 / 7),
    ('all-reduce', '{{0,4},{1,5},{2,6},{3,7}}', 1.0),
    ('all-reduce', '{{0,1},{2,3},{4,5},{6,7}}', 0.0),
    # Half of the chips are in the other slice.
    ('all-to-all', '{{0,1,2,3,4,5,6,7}}', 4 / 7),
    ('collective-permute', '', 1.0),
  ],
)
def test_what_must_leave_a_slice(kind, groups, part):
  where = f'replica_groups={groups}'
  if not groups:
    where = 'source_target_pairs={{0,4},{4,0},{1,2},{2,1}}'
  text = one_collective(f'{kind}(%x), {where}')
  mesh = {'stage': 1, 'replica': 2, 'data': 4, 'mdl': 1}
  (found,) = measure(text, mesh, [0] * 4 + [1] * 4).traffic
  assert found.dcn_bytes == pytest.approx(part * found.wire_bytes)


if __name__ == '__main__':
  print(json.dumps(compile_all(sys.argv[1])))
