"""Measures the work and communication of a compiled program.

All numbers are for one device and one execution. The body of a loop counts once
per iteration; a loop of unknown length counts once and is listed. Of the
branches of a conditional, only the most expensive one counts.

TPU compilers change the plain operations:

- Matrix products become convolutions. A batch dimension becomes a spatial
  dimension with a dilated window, of which only the diagonal meets the input.
- A collective that overlaps with computation is split into a chain of fusions
  that all contain it (`chain_id`). The one with `AsyncCollectiveStart` counts.
- A reduce-scatter may be a fusion of an all-reduce and a dynamic-slice.
- Each slice (in the sense of several pods) runs a program whose devices are
  numbered within the slice. Slices communicate through `send` and `recv` of the
  MegaScale runtime, which name slices and physical devices.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

import numpy as np

from jaxline.base import counting
from jaxline.compile import groups
from jaxline.compile import hlo

_COLLECTIVES = {
  'all-gather', 'all-reduce', 'all-to-all', 'collective-broadcast',
  'collective-permute', 'ragged-all-to-all', 'reduce-scatter',
}  # fmt: skip
# These instructions move no data: some pass values on, and the rest contain
# programs that are measured separately.
_FREE = {
  'add-dependency', 'after-all', 'async-start', 'bitcast', 'call', 'call-start',
  'conditional', 'constant', 'domain', 'get-tuple-element', 'opt-barrier',
  'parameter', 'partition-id', 'replica-id', 'tuple', 'while',
}  # fmt: skip
_FREE_CALLS = {'AllocateBuffer', 'ConcatBitcast'}
# Maps in-place updates to the operand that is written. `scatter` reads it too.
_UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}
_SLICES = ('dynamic-slice', 'gather', 'slice')
# Pallas and similar tools make kernels with these custom calls.
_KERNELS = (
  '__gpu$xla.gpu.triton', 'mosaic_gpu', 'tpu_custom_call', 'triton_kernel_call',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Traffic:
  """All collectives of one kind over the same mesh axes, in one execution."""

  kind: str  # The HLO name, such as 'all-gather'.
  axes: tuple[str, ...]  # The mesh axes along which the groups extend.
  count: int
  # The sum of the larger of operand and result, per device.
  bytes: float
  wire_bytes: float  # The bytes that the best algorithm sends.
  dcn_bytes: float  # The part of `wire_bytes` that leaves the device's slice.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measures:
  """The work of one device in one execution of a program."""

  # Counts matrix products and convolutions, without products with padding.
  # Kernels of cuBLAS, cuDNN and splash attention are counted by their shapes,
  # and other Pallas kernels by their author's estimate.
  flops: float
  # Counts the operands and results of each instruction and of each fusion. A
  # sliced operand counts as the slice, an in-place update as the update, and a
  # value that is passed on as 0. Tile padding, repeated reads by a kernel and
  # the steps of a collective do not count. Reads from a cache do.
  hbm_bytes: float
  traffic: tuple[Traffic, ...]  # The largest comes first.
  unknown_loops: tuple[str, ...]  # Titles of loops that count once.
  unknown_kernels: tuple[str, ...]  # Titles of kernels of unknown FLOPs.


def measure(
  module: hlo.Module, axis_sizes: Mapping[str, int], slices: Sequence[int]
) -> Measures:
  """Measures a program.

  Args:
    module: The program.
    axis_sizes: Size of each mesh axis, in the order of the mesh. Device i of
      the program is device i of the flattened mesh, or, if the program runs on
      one slice, device i of its slice.
    slices: Slice of each device of the flattened mesh. Devices of a slice are
      connected by ICI or NVLink, and slices by DCN.
  """
  places = module.num_devices, axis_sizes, slices
  flops = hbm_bytes = 0.0
  sums: dict[tuple[str, tuple[str, ...]], Any] = collections.defaultdict(int)
  loops, kernels = set(), set()
  for i, times in _executed(module.entry, 1):
    if i.opcode == 'while' and i.rounds is None:
      loops.add(i.title)
    if (products := _flops(i)) is None:
      kernels.add(i.title)
    flops += times * (products or 0.0)
    hbm_bytes += times * _hbm_bytes(i)
    kind, size = _collective(i)
    axes, n, num_slices = groups.reach(i, *places) if size else ((), 1, 1)
    if n > 1:
      sent, to_slices = _sent_parts(kind, n, num_slices)
      amounts = np.array([1, size, size * sent, size * sent * to_slices])
      sums[kind, axes] += times * amounts
  traffic = []
  for key, amounts in sums.items():
    count, *sizes = amounts.tolist()
    traffic.append(Traffic(*key, int(count), *sizes))
  return Measures(
    flops=flops,
    hbm_bytes=hbm_bytes,
    traffic=tuple(sorted(traffic, key=lambda t: -t.wire_bytes)),
    unknown_loops=tuple(sorted(loops)),
    unknown_kernels=tuple(sorted(kernels)),
  )


def _executed(
  computation: hlo.Computation, times: int
) -> Iterator[tuple[hlo.Instruction, int]]:
  """Yields each instruction that runs, with its number of executions."""
  for i in computation.instructions.values():
    yield i, times
    called: list[hlo.Computation] = []
    rounds = 1
    if i.opcode == 'while':
      (condition,), called = i.called('condition'), i.called('body')
      if i.rounds is not None:
        rounds = i.rounds
        yield from _executed(condition, times)
      yield from _executed(condition, times * rounds)
    elif i.opcode == 'conditional':
      names = 'branch_computations', 'true_computation', 'false_computation'
      called = [max((c for n in names for c in i.called(n)), key=_work)]
    elif i.fused:
      called = [i.fused]
    elif i.opcode in ('async-start', 'call', 'call-start'):
      called = i.called('calls') or i.called('to_apply')
    for other in called:
      yield from _executed(other, times * rounds)


def _work(computation: hlo.Computation) -> tuple[float, float]:
  """Returns the FLOPs and the bytes of memory traffic of one execution."""
  steps = list(_executed(computation, 1))
  flops = sum(times * (_flops(i) or 0.0) for i, times in steps)
  return flops, sum(times * _hbm_bytes(i) for i, times in steps)


# These functions count FLOPs.


def _flops(i: hlo.Instruction) -> float | None:
  """Returns the FLOPs of one execution; None for an unknown kernel."""
  if i.opcode in ('dot', 'scaled-dot', 'ragged-dot'):
    return _product_flops(i, i.numbers('lhs_contracting_dims'))
  if i.opcode == 'convolution':
    return _convolution_flops(i, i.operands[0], i.operands[1], i)
  if i.kind != 'custom-call':
    return 0.0
  target = i.target
  if target.startswith(('__cublas$gemm', '__cublas$lt$matmul')):
    return _product_flops(
      i, hlo.numbers(i.search(r'lhs_contracting_dimensions\\?":\[([^\]]*)\]'))
    )
  if target.startswith('__cudnn$conv'):
    a, b, *_ = i.operands
    if target == '__cudnn$convBackwardInput':
      return _convolution_flops(i, i, b, a)
    is_filter = target == '__cudnn$convBackwardFilter'
    return _convolution_flops(i, a, *((i, b) if is_filter else (b, i)))
  if target.startswith('__cudnn$fmha'):
    scores = i.search(
      r'intermediate_tensor_shape\\?":.*?dimensions\\?": *\[([^\]]*)\]'
    )
    # The forward pass computes QK and PV. The backward pass computes QK again
    # and a product for each of dV, dP, dQ and dK (Dao et al. 2022).
    products = 5 if 'Backward' in target else 2
    flops = 2.0 * products * math.prod(hlo.numbers(scores))
    return flops * i.operands[0].shapes[0].dims[-1] if scores else None
  if target.startswith(_KERNELS):
    cost = i.search(r'"cost_estimate":\{"flops":"?(\d+)')
    return float(cost) if cost else _splash_flops(i)
  return 0.0


# The number of products of a block of queries with a block of keys, in the
# kernels of `jax.experimental.pallas.ops.tpu.splash_attention`. Both kernels of
# the backward pass compute the scores and the gradient of the weights.
_SPLASH_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4}


def _splash_flops(i: hlo.Instruction) -> float | None:
  """Returns the FLOPs of splash attention, and None for all other kernels."""
  phase = re.search(r'splash_m[hq]a_(fwd|dq|dkv)', i.title)
  if not phase:
    return None
  arrays = [operand.shapes[0] for operand in i.operands]
  queries, keys, *_ = (x.dims for x in arrays if 'f' in x.dtype)
  flops = 2.0 * _SPLASH_PRODUCTS[phase[1]] * math.prod(queries) * keys[-2]
  if arrays[0].dtype.startswith('s'):
    flops *= counting.splash_share(*arrays[0].dims[-2:])
  return flops


def _product_flops(i: hlo.Instruction, contracted: Sequence[int]) -> float:
  sizes = [i.operands[0].shapes[0].dims[d] for d in contracted]
  result = i.shapes[0].dims
  ragged = i.numbers('lhs_ragged_dims')
  if ragged and set(ragged) <= set(contracted):
    # The result has one matrix per group, and groups share the rows.
    result = result[1:]
  return 2.0 * math.prod((*result, *sizes))


def _convolution_flops(i: hlo.Instruction, *arrays: hlo.Instruction) -> float:
  """Counts a convolution; `arrays` are the image, the kernel and the result."""
  labels = re.split('_|->', i.attribute('dim_labels'))
  image, kernel, result = (
    dict(zip(label, array.shapes[0].dims, strict=True))
    for label, array in zip(labels, arrays, strict=True)
  )
  items = (item.split('=') for item in i.attribute('window')[1:-1].split())
  # There is one number per dimension. Of a padding, take the lower one.
  window = {
    key: [int(n.split('_')[0]) for n in numbers.split('x')]
    for key, numbers in items
  }
  met = 1
  for d in filter(str.isdigit, image):
    at = lambda key, default, n=int(d): window.get(key, {n: default})[n]
    met *= counting.count_kernel_overlaps(
      size=image[d],
      kernel=kernel[d],
      out=result[d],
      stride=at('stride', 1),
      low=at('pad', 0),
      dilation=at('lhs_dilate', 1),
      kernel_dilation=at('rhs_dilate', 1),
    )
  batch_groups = int(i.attribute('batch_group_count') or 1)
  return 2.0 * met * kernel['i'] * kernel['o'] * image['b'] / batch_groups


# These functions count bytes.


def _hbm_bytes(i: hlo.Instruction) -> int:
  """Returns the bytes of device memory that one execution reads and writes."""
  if (
    i.computation.fusion
    or i.opcode in _FREE
    or i.opcode.endswith(('-done', '-update'))
    or i.target in _FREE_CALLS
  ):
    return 0
  read = sum(
    min(_read_by(i, operand), operand.hbm_bytes)
    for operand in dict.fromkeys(i.operands)
  )
  roots: tuple[hlo.Instruction, ...] = (i,)
  if i.opcode == 'fusion' and i.fused:
    root = i.fused.root
    roots = root.operands if root.opcode == 'tuple' else (root,)
    if any(v.target == 'AsyncCollectiveDone' for v in roots):
      return 0  # It is counted where it starts.
  each = iter(i.results)
  for value in roots:
    # A fusion's outputs may be in a memory space that its root does not name.
    own = each if len(roots) == 1 else [next(each) for _ in value.shapes]
    read += min(_written(value), sum(shape.hbm_bytes for shape in own))
  return read


def _read_by(user: hlo.Instruction, value: hlo.Instruction) -> int:
  """Returns how many bytes of an operand an instruction reads."""
  if user.opcode == 'fusion' and user.fused:
    return sum(
      _read(user.fused.parameters[number])
      for number, operand in enumerate(user.operands)
      if operand is value
    )
  if user.opcode == 'bitcast':
    return _read(user)
  if user.opcode == 'tuple' or _continues_chain(user):
    return 0
  if user.operands[0] is value:
    if user.kind in _SLICES:
      return user.result_bytes
    if user.kind in _UPDATES:
      return user.operands[2].bytes if user.kind == 'scatter' else 0
  return value.bytes


def _read(value: hlo.Instruction) -> int:
  """Returns how many bytes of a value inside a fusion are read."""
  read = sum(_read_by(user, value) for user in value.users)
  fusion = value.computation.fusion
  if fusion and fusion.computation.fusion and value is value.computation.root:
    # The users of a nested fusion read the value that it passes on.
    read += _read(fusion)
  return min(read, value.bytes)


def _written(value: hlo.Instruction) -> int:
  """Returns how many bytes of a result are new."""
  while value.opcode == 'bitcast':
    value = value.operands[0]
  if value.opcode == 'parameter' or _continues_chain(value):
    return 0
  if value.target == 'AsyncCollectiveStart':
    # It passes on its operand and semaphores. The collective's result is new.
    return value.operands[0].bytes
  if value.opcode in _UPDATES:
    return value.operands[_UPDATES[value.opcode]].bytes
  return value.result_bytes


# These functions count collectives.


def _continues_chain(i: hlo.Instruction) -> bool:
  """Returns whether this is a later piece of a collective."""
  return (
    i.kind in _COLLECTIVES
    and 'chain_id=' in i.attributes
    and not any(user.target == 'AsyncCollectiveStart' for user in i.users)
  )


def _collective(i: hlo.Instruction) -> tuple[str, int]:
  """Returns kind and bytes of a collective; 0 bytes for other instructions."""
  beside = i.computation.instructions.values()
  if i.kind in _COLLECTIVES and not _continues_chain(i):
    size = max(sum(operand.bytes for operand in i.operands), i.result_bytes)
    keeps_a_part = {'dynamic-slice', 'partition-id'} <= {
      other.opcode for other in beside
    }
    if i.kind == 'all-reduce' and i.computation.fusion and keeps_a_part:
      return 'reduce-scatter', size
    return i.kind, size
  if i.opcode == 'send':
    size = i.operands[0].bytes
    if '_xla_send_recv_source_target_pairs=' in i.attributes:
      return 'collective-permute', size  # GPUs split a permute in this way.
    # A `send` without a type goes to the host for a callback.
    if kind := i.search(r'_xla_megascale_transfer_type="(\w+)"'):
      meeting = i.search(r'(_xla_host_transfer_rendezvous="[^"]*")')
      for other in beside:
        if other.opcode == 'recv' and meeting and meeting in other.attributes:
          size = max(size, other.shapes[0].bytes)
      kind = kind.lower().replace('_', '-')
      return 'collective-permute' if kind == 'one-to-one' else kind, size
  return '', 0


def _sent_parts(kind: str, n: int, slices: int) -> tuple[float, float]:
  """Returns the fraction of bytes to send, and its fraction between slices."""
  # Assume that XLA uses the algorithm that sends the fewest bytes (Patarasuk
  # and Yuan 2009), which works first within slices and then between them.
  if kind in ('all-reduce', 'all-gather', 'reduce-scatter'):
    copies = 2 if kind == 'all-reduce' else 1
    return copies * (n - 1) / n, (slices - 1) / (n - 1)
  if kind in ('all-to-all', 'ragged-all-to-all'):
    return (n - 1) / n, (n - n // slices) / (n - 1)
  # In a permute, all chips wait for one that sends to another slice.
  return 1.0, float(slices > 1)
