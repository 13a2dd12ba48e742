"""Measures a compiled program from its text.

The text is that of an optimized, scheduled, SPMD-partitioned HLO module, as
`jitted.lower(...).compile().as_text()` gives it for CPU, GPU and TPU, so all
numbers are those of one device and one execution. Loops are multiplied out:

- XLA notes how often a loop runs (`known_trip_count`), or its condition
  compares a counter with a constant. A loop without either counts as one
  iteration, and `unknown_loops` names it.
- Of the branches of a conditional, the most expensive counts.

TPU compilers change the plain operations:

- Matrix products become convolutions; a batch dimension becomes a spatial one
  of a window that is dilated so that only its diagonal meets the input.
- A collective that overlaps with computation is cut into a chain of fusions
  that all hold it (`chain_id`); the one with `AsyncCollectiveStart` counts.
- A reduce-scatter may be a fusion of an all-reduce and a dynamic-slice.
- Slices (in the sense of several pods) run a program each, whose devices are
  numbered within the slice; they talk through `send` and `recv` of the runtime
  (MegaScale), which name slices and physical devices.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import re

import numpy as np

from jaxline.aot import hlo_text

# Bytes one device sends by the algorithm that sends the fewest, in sizes of the
# larger of operand and result, in a group of n (Patarasuk and Yuan 2009).
_WIRE: dict[str, Callable[[int], float]] = {
  'all-gather': lambda n: (n - 1) / n,
  'all-reduce': lambda n: 2 * (n - 1) / n,
  'all-to-all': lambda n: (n - 1) / n,
  'collective-broadcast': lambda n: 1.0,
  'collective-permute': lambda n: 1.0,
  'ragged-all-to-all': lambda n: (n - 1) / n,
  'reduce-scatter': lambda n: (n - 1) / n,
}
_STARTS = {f'{kind}-start': kind for kind in _WIRE} | {k: k for k in _WIRE}

# Instructions that move nothing. The `-done` of a pair is found by its name.
_FREE = {
  'add-dependency', 'after-all', 'bitcast', 'constant', 'domain',
  'get-tuple-element', 'opt-barrier', 'optimization-barrier', 'parameter',
  'partition-id', 'replica-id', 'tuple',
}  # fmt: skip
_FREE_CALLS = {'AllocateBuffer', 'ConcatBitcast'}
# What Pallas and other writers of kernels compile to.
_KERNELS = (
  '__gpu$xla.gpu.triton',
  'mosaic_gpu',
  'tpu_custom_call',
  'triton_kernel_call',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """A collective of a compiled program, at one place in its text.

  Attributes:
    kind: 'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all',
      'collective-permute', or another by its HLO name.
    bytes: the larger of operand and result, per device and execution.
    wire_bytes: what one device must send per execution, by the algorithm that
      sends the fewest: all-gather, reduce-scatter and all-to-all (n-1)/n of
      `bytes`, all-reduce 2(n-1)/n, a permute all.
    count: executions per execution of the program.
    axes: the mesh axes along which its groups reach.
    group_size: devices that take part together; of a permute, the longest
      chain. Between slices that run a program each, the slices.
    crosses_slices: whether a group has devices of several slices.
    op_name: where it comes from, as JAX named it; '' where XLA lost it.
  """

  kind: str
  bytes: int
  wire_bytes: float
  count: int
  axes: tuple[str, ...]
  group_size: int
  crosses_slices: bool
  op_name: str


def collectives(
  text: str, axis_sizes: Mapping[str, int], slices: Sequence[int]
) -> list[Collective]:
  """Lists the collectives of a program.

  Those whose groups are single devices are left out: nothing is sent.

  Args:
    text: see the module.
    axis_sizes: size of each mesh axis, in the order of the mesh. Device i of
      the program is the i-th of the mesh, flattened; where the program is that
      of one slice, the i-th of those of its slice.
    slices: for each device of the flattened mesh, the slice (what ICI or
      NVLink joins; between them is DCN) that it is in.

  Raises:
    ValueError: `slices` does not fit the mesh, or the mesh the program.
  """
  module = hlo_text.parse(text)
  places = _Places(module, axis_sizes, slices)

  def one(site: hlo_text.Site) -> Collective | None:
    instruction, computation = site.instruction, site.computation
    if instruction.opcode == 'send':
      kind, size = _sent(instruction, computation)
      if not kind:
        return None
      axes, group_size, crosses_slices = places.between_slices(instruction)
    else:
      kind = _STARTS.get(instruction.opcode, '')
      if not kind or _continues_chain(instruction, computation):
        return None
      size = _collective_bytes(instruction, computation)
      if kind == 'all-reduce' and site.is_fused and _is_scattered(computation):
        kind = 'reduce-scatter'
      axes, group_size, crosses_slices = places.within(instruction)
    if group_size < 2:
      return None
    return Collective(
      kind=kind,
      bytes=size,
      wire_bytes=size * _WIRE.get(kind, lambda n: 1.0)(group_size),
      count=site.count,
      axes=axes,
      group_size=group_size,
      crosses_slices=crosses_slices,
      op_name=site.op_name,
    )

  def weigh(site: hlo_text.Site) -> float:
    found = one(site)
    return found.wire_bytes if found else 0.0

  sites = hlo_text.walk(module, weigh)
  return [found for site in sites if (found := one(site))]


def flops(text: str) -> float:
  """Returns the FLOPs of a program's matrix products and convolutions.

  A multiplication and an addition are two. Counted are those that meet a real
  element of the input, not its padding. Kernels count where the text tells:
  those of cuBLAS and cuDNN by their shapes (attention whole, though a causal
  kernel skips half), a Pallas kernel by the estimate its author gave;
  `uncounted_kernels` names the others.

  Args:
    text: see the module.
  """
  weigh = lambda site: _flops(site) or 0.0
  return sum(
    site.count * weigh(site)
    for site in hlo_text.walk(hlo_text.parse(text), weigh)
  )


def uncounted_kernels(text: str) -> list[str]:
  """Lists the kernels of which `flops` knows nothing: name and op_name."""
  weigh = lambda site: _flops(site) or 0.0
  return sorted(
    {
      f'{site.instruction.name} ({site.op_name})'
      for site in hlo_text.walk(hlo_text.parse(text), weigh)
      if _flops(site) is None
    }
  )


def bytes_accessed(text: str) -> float:
  """Estimates the bytes a program reads from and writes to device memory.

  It counts operands and results of each instruction outside of fusions, and of
  each fusion as a whole. A sliced operand counts as the slice, an in-place
  update as the update, and a value that is passed through not at all.

  It does not count buffers in other memories (on TPUs VMEM and CMEM, by the
  layout; host memory), padding of tiles, operands that a kernel reads a second
  time, and intermediate traffic of a collective. It counts reads that a cache
  serves, so on GPUs and CPUs it is an upper bound.

  Args:
    text: see the module.
  """
  module = hlo_text.parse(text)
  weigh = lambda site: _bytes(module, site)
  return float(
    sum(
      site.count * weigh(site)
      for site in hlo_text.walk(module, weigh, into_fusions=False)
    )
  )


def unknown_loops(text: str) -> list[str]:
  """Lists the loops that were counted once for want of a number of rounds.

  Args:
    text: see the module.

  Returns:
    Name and op_name of each.
  """
  module = hlo_text.parse(text)
  return sorted(
    {
      f'{site.instruction.name} ({site.op_name})'
      for site in hlo_text.walk(module, lambda site: 0.0)
      if site.instruction.opcode == 'while'
      and hlo_text.rounds(module, site.computation, site.instruction) is None
    }
  )


# FLOPs.


def _flops(site: hlo_text.Site) -> float | None:
  """Returns the FLOPs of one execution; None for a kernel not known."""
  i, computation = site.instruction, site.computation
  shape = lambda n: computation.operand(i, n).shapes[0]
  if i.opcode in ('dot', 'scaled-dot'):
    contracted = [shape(0).dims[d] for d in i.numbers('lhs_contracting_dims')]
    return 2.0 * math.prod((*i.shapes[0].dims, *contracted))
  if i.opcode == 'ragged-dot':
    return _ragged_dot_flops(i, shape(0))
  if i.opcode == 'convolution':
    return _convolution_flops(i, shape(0), shape(1), i.shapes[0])
  if i.opcode not in ('custom-call', 'custom-call-start'):
    return 0.0
  if i.target.startswith(('__cublas$gemm', '__cublas$lt$matmul')):
    found = re.search(
      r'lhs_contracting_dimensions\\?":\[([^\]]*)\]', i.attributes
    )
    contracted = [
      shape(0).dims[int(d)]
      for d in re.findall(r'\d+', found[1] if found else '')
    ]
    return 2.0 * math.prod((*i.shapes[0].dims, *contracted))
  if i.target == '__cudnn$convBackwardInput':
    return _convolution_flops(i, i.shapes[0], shape(1), shape(0))
  if i.target == '__cudnn$convBackwardFilter':
    return _convolution_flops(i, shape(0), i.shapes[0], shape(1))
  if i.target.startswith('__cudnn$conv'):
    return _convolution_flops(i, shape(0), shape(1), i.shapes[0])
  if i.target.startswith('__cudnn$fmha'):
    found = re.search(
      r'intermediate_tensor_shape\\?":.*?dimensions\\?":\[([^\]]*)\]',
      i.attributes.replace(' ', ''),
    )
    if found is None:
      return None
    scores = math.prod(int(d) for d in re.findall(r'\d+', found[1]))
    # Forward QK and PV; backward QK again, and a product for each of dV, dP,
    # dQ and dK (Dao et al. 2022).
    products = 5 if 'Backward' in i.target else 2
    return 2.0 * products * scores * shape(0).dims[-1]
  if i.target.startswith(_KERNELS):
    found = re.search(r'"cost_estimate":\{"flops":"?(\d+)', i.attributes)
    return float(found[1]) if found else None
  return 0.0


def _ragged_dot_flops(i: hlo_text.Instruction, lhs: hlo_text.Shape) -> float:
  """FLOPs of a product whose groups of rows meet a matrix each."""
  contracted = i.numbers('lhs_contracting_dims')
  sizes = [lhs.dims[d] for d in contracted]
  result = i.shapes[0].dims
  if set(i.numbers('lhs_ragged_dims')) <= set(contracted):
    # The result has a matrix a group, and the rows are shared out among them.
    result = result[1:]
  return 2.0 * math.prod((*result, *sizes))


def _convolution_flops(
  i: hlo_text.Instruction,
  lhs: hlo_text.Shape,
  rhs: hlo_text.Shape,
  out: hlo_text.Shape,
) -> float:
  """FLOPs of `out` = convolution of `lhs` with the kernel `rhs`."""
  labels = re.split('_|->', i.attribute('dim_labels'))
  sizes = [
    dict(zip(label, shape.dims, strict=True))
    for label, shape in zip(labels, (lhs, rhs, out), strict=True)
  ]
  window: dict[str, list[str]] = {}
  for item in i.attribute('window').strip('{}').split():
    key, _, values = item.partition('=')
    window[key] = values.split('x')
  spatial = sorted(label for label in sizes[0] if label.isdigit())
  met = 1
  for d in spatial:
    at = lambda key, default, n=int(d): (
      window[key][n] if key in window else default
    )
    met *= count_meetings(
      size=sizes[0][d],
      kernel=sizes[1][d],
      out=sizes[2][d],
      stride=int(at('stride', '1')),
      low=int(at('pad', '0_0').split('_')[0]),
      dilation=int(at('lhs_dilate', '1')),
      kernel_dilation=int(at('rhs_dilate', '1')),
    )
  batch_groups = int(i.attribute('batch_group_count') or 1)
  return (
    2.0 * met * sizes[1]['i'] * sizes[1]['o'] * sizes[0]['b'] / batch_groups
  )


def count_meetings(
  *,
  size: int,
  kernel: int,
  out: int,
  stride: int,
  low: int,
  dilation: int,
  kernel_dilation: int,
) -> int:
  """Counts the pairs of output and kernel position that meet an element.

  Output o and kernel position k meet what is at x = o * stride - low +
  k * kernel_dilation; that is an element of the input, not padding nor a hole
  of its dilation, where 0 <= x <= (size - 1) * dilation and dilation divides x.
  """
  at = np.arange(kernel, dtype=np.int64) * kernel_dilation - low
  first = np.maximum(-(at // stride), 0)
  last = np.minimum(((size - 1) * dilation - at) // stride, out - 1)
  common = math.gcd(stride, dilation)
  every = dilation // common
  # o * stride = -at (mod dilation) is solved by one o in `every`, or by none.
  rest = -at // common * pow(stride // common, -1, every) % every
  solutions = (last - rest) // every - (first - 1 - rest) // every
  return int(np.where(at % common == 0, np.maximum(solutions, 0), 0).sum())


# Bytes.


def _bytes(module: hlo_text.Module, site: hlo_text.Site) -> int:
  """Returns the bytes of device memory one execution reads and writes."""
  i, computation = site.instruction, site.computation
  if (
    i.opcode in _FREE
    or i.opcode in ('while', 'conditional', 'call', 'async-start', 'call-start')
    or i.opcode.endswith(('-done', '-update'))
    or i.target in _FREE_CALLS
  ):
    return 0
  if i.opcode == 'fusion':
    return _fusion_bytes(module, i, computation)
  result = _result(i, computation)
  written = module.hbm_bytes(result) if result else 0
  operands = [
    computation.instructions[name] for name in dict.fromkeys(i.operands)
  ]
  opcode = i.opcode.removesuffix('-start')
  if opcode in ('dynamic-slice', 'gather', 'slice'):
    from_hbm = module.hbm_bytes(operands[0]) > 0
    return written + (result.bytes if from_hbm and result else 0)
  if opcode == 'dynamic-update-slice':
    update = computation.operand(i, 1)
    return module.hbm_bytes(update) + (update.bytes if written else 0)
  if opcode == 'scatter':
    # In place: indices and updates are read, and the updated elements are read
    # and written.
    indices, updates = computation.operand(i, 1), computation.operand(i, 2)
    return module.hbm_bytes(indices) + 3 * module.hbm_bytes(updates)
  return written + sum(module.hbm_bytes(operand) for operand in operands)


def _result(
  i: hlo_text.Instruction, computation: hlo_text.Computation
) -> hlo_text.Instruction | None:
  """Returns the instruction that has an operation's result: the `-done`."""
  if not i.opcode.endswith('-start') and i.opcode not in ('send', 'recv'):
    return i
  for user in computation.users.get(i.name, []):
    if user.opcode.endswith('-done'):
      return user
  return None


def _fusion_bytes(
  module: hlo_text.Module,
  fusion: hlo_text.Instruction,
  computation: hlo_text.Computation,
) -> int:
  inner = module.computations[fusion.called('calls')[0]]
  if 'AsyncCollectiveDone' in inner.targets:
    return 0  # Counted where it starts.
  total = 0
  for number, parameter in inner.parameters.items():
    operand = computation.operand(fusion, number)
    total += min(
      _read(module, inner, parameter.name), module.hbm_bytes(operand)
    )
  root = inner.root
  if 'AsyncCollectiveStart' in inner.targets:
    # Its operand and semaphores pass through; the result is the gathered array.
    starting = next(
      i for i in inner.instructions.values() if i.opcode in _STARTS
    )
    results = [s for s in fusion.shapes if s.dims == starting.shapes[0].dims]
    total += starting.bytes if results and module.in_hbm(results[0]) else 0
  elif root.opcode == 'tuple':
    shapes = iter(fusion.shapes)
    for name in root.operands:
      own = [next(shapes) for _ in inner.instructions[name].shapes]
      in_hbm = sum(shape.bytes for shape in own if module.in_hbm(shape))
      total += min(_written(inner, name), in_hbm)
  else:
    total += min(_written(inner, root.name), module.hbm_bytes(fusion))
  return total


def _read(
  module: hlo_text.Module, computation: hlo_text.Computation, name: str
) -> int:
  """Returns how much of a value the other instructions of a fusion read."""
  value = computation.instructions[name]
  total = 0
  for user in computation.users.get(name, []):
    if user.opcode == 'bitcast':
      total += _read(module, computation, user.name)
    elif user.opcode == 'fusion':
      inner = module.computations[user.called('calls')[0]]
      for number, operand in enumerate(user.operands):
        if operand != name:
          continue
        parameter = inner.parameters[number].name
        total += _read(module, inner, parameter)
        if _handed_on(module, inner) == parameter:
          total += _read(module, computation, user.name)
    elif user.opcode == 'tuple' or _continues_chain(user, computation):
      continue
    elif user.operands[0] != name:
      total += value.bytes
    elif user.opcode in ('dynamic-slice', 'gather', 'slice'):
      total += user.bytes
    elif user.opcode != 'dynamic-update-slice':
      total += value.bytes
  return min(total, value.bytes)


def _handed_on(
  module: hlo_text.Module, computation: hlo_text.Computation
) -> str | None:
  """Returns the parameter that a fusion gives back in another shape, if so."""
  value = computation.root
  while value.opcode in ('bitcast', 'fusion'):
    number = 0
    if value.opcode == 'fusion':
      inner = module.computations[value.called('calls')[0]]
      parameter = _handed_on(module, inner)
      if parameter is None:
        return None
      number = int(inner.instructions[parameter].arguments)
    value = computation.operand(value, number)
  return value.name if value.opcode == 'parameter' else None


def _written(computation: hlo_text.Computation, name: str) -> int:
  """Returns how much of a result of a fusion is new."""
  value = computation.instructions[name]
  while value.opcode == 'bitcast':
    value = computation.operand(value, 0)
  if value.opcode == 'parameter' or _continues_chain(value, computation):
    return 0
  if value.opcode == 'dynamic-update-slice':
    return computation.operand(value, 1).bytes
  return value.bytes


# Collectives.


def _continues_chain(
  i: hlo_text.Instruction, computation: hlo_text.Computation
) -> bool:
  """Whether this is a later piece of a collective that started elsewhere."""
  return (
    i.opcode in _STARTS
    and 'chain_id=' in i.attributes
    and 'AsyncCollectiveStart' not in computation.targets
  )


def _is_scattered(computation: hlo_text.Computation) -> bool:
  """Whether a fusion keeps only this device's part of its reduction."""
  return {'dynamic-slice', 'partition-id'} <= computation.opcodes


def _collective_bytes(
  i: hlo_text.Instruction, computation: hlo_text.Computation
) -> int:
  operands = sum(computation.instructions[name].bytes for name in i.operands)
  result = _result(i, computation)
  return max(operands, result.bytes if result else 0)


def _sent(
  i: hlo_text.Instruction, computation: hlo_text.Computation
) -> tuple[str, int]:
  """Returns kind and bytes of the collective of a `send`; '' without one."""
  payload = computation.operand(i, 0).bytes
  if '_xla_send_recv_source_target_pairs=' in i.attributes:
    return 'collective-permute', payload  # GPUs: a permute, taken apart.
  transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes)
  if transfer is None:
    return '', 0  # To the host, for a callback.
  kind = transfer[1].lower().replace('_', '-')
  kind = {'one-to-one': 'collective-permute'}.get(kind, kind)
  meeting = re.search(r'_xla_host_transfer_rendezvous="[^"]*"', i.attributes)
  for other in computation.instructions.values():
    if other.opcode == 'recv' and meeting and meeting[0] in other.attributes:
      payload = max(payload, other.shapes[0].bytes)
  return kind, payload


class _Places:
  """Where the devices of a program are, in the mesh and in the slices."""

  def __init__(
    self,
    module: hlo_text.Module,
    axis_sizes: Mapping[str, int],
    slices: Sequence[int],
  ):
    total = math.prod(axis_sizes.values())
    if len(slices) != total:
      raise ValueError(
        f'The mesh {dict(axis_sizes)} has {total} devices, but `slices` tells'
        f' the slice of {len(slices)}; expected one number for each.'
      )
    self._axes = tuple(axis_sizes)
    self._slices = np.asarray(slices)
    self._coordinates = np.stack(
      np.unravel_index(np.arange(total), tuple(axis_sizes.values())), axis=-1
    )  # [device, axis]
    first = np.flatnonzero(self._slices == self._slices[0])
    if module.num_devices == total:
      self._mine = np.arange(total)
    elif module.num_devices == len(first):
      self._mine = first
    else:
      raise ValueError(
        f'The program is one of {module.num_devices} devices; the mesh'
        f' {dict(axis_sizes)} has {total}, and {len(first)} in a slice.'
      )

  def within(
    self, i: hlo_text.Instruction
  ) -> tuple[tuple[str, ...], int, bool]:
    """Returns axes, group size and whether slices are crossed."""
    pairs = re.search(
      r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}', i.attributes
    )
    if pairs:
      return self._route(_chains(_braces(pairs[1])))
    return self._route(_groups(i, len(self._mine)))

  def between_slices(
    self, i: hlo_text.Instruction
  ) -> tuple[tuple[str, ...], int, bool]:
    """As `within`, of a `send`."""
    gpu = re.search(
      r'_xla_send_recv_source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}',
      i.attributes,
    )
    if gpu:
      return self._route(_chains(_braces(gpu[1])))
    target = re.search(
      r'_xla_megascale_target=(?:"([^"]*)"|\{((?:\{[^{}]*\},?)*)\})',
      i.attributes,
    )
    if target is None:
      raise ValueError(f'{i.name} tells no _xla_megascale_target.')
    if target[1]:  # {1,2}x{0:3}: those slices, each device with its likes.
      slice_groups = _braces(target[1].split('x')[0])
    else:  # {{100000->200000},...}: a slice's number, and a physical device's.
      members = [
        [int(n) // 100_000 for n in re.findall(r'\d+', group)]
        for group in re.findall(r'\{([^{}]*)\}', target[2])
      ]
      unique = sorted({tuple(group) for group in members})
      slice_groups = (
        _chains(unique) if '->' in target[2] else [list(g) for g in unique]
      )
    names = sorted(set(self._slices.tolist()))
    # Devices are physical here, and their order in a slice is not told. All
    # slices are laid out alike, so the axes that differ are those between the
    # first devices of the slices.
    heads = [int(np.argmax(self._slices == name)) for name in names]
    axes = self._axes_of([[heads[n - 1] for n in g] for g in slice_groups])
    size = max((len(group) for group in slice_groups), default=1)
    return axes, size, any(len(set(group)) > 1 for group in slice_groups)

  def _route(
    self, groups: Sequence[Sequence[int]]
  ) -> tuple[tuple[str, ...], int, bool]:
    places = [self._mine[list(group)].tolist() for group in groups]
    crosses = any(len(set(self._slices[p])) > 1 for p in places)
    size = max((len(group) for group in groups), default=1)
    return self._axes_of(places), size, crosses

  def _axes_of(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
    varies = np.zeros(len(self._axes), bool)
    for group in groups:
      at = self._coordinates[np.asarray(group)]
      varies |= (at != at[:1]).any(axis=0)
    return tuple(a for a, v in zip(self._axes, varies, strict=True) if v)


def _braces(text: str) -> list[list[int]]:
  """Parses '{0,1},{2,3}'."""
  return [
    [int(n) for n in re.findall(r'\d+', group)]
    for group in re.findall(r'\{([^{}]*)\}', text)
  ]


def _chains(pairs: Sequence[Sequence[int]]) -> list[list[int]]:
  """Joins the pairs of a permute to connected groups of devices."""
  group_of: dict[int, list[int]] = {}
  for a, b in pairs:
    if a == b:
      continue
    first, second = group_of.setdefault(a, [a]), group_of.setdefault(b, [b])
    if first is not second:
      first += second
      group_of.update(dict.fromkeys(second, first))
  return list({id(group): group for group in group_of.values()}.values())


def _iota(text: str) -> np.ndarray:
  """Parses '[4,2]' or '[2,4]T(1,0)': numbers 0 to n, transposed, in a row."""
  dims, _, order = text.partition('T')
  numbers = lambda part: [int(n) for n in re.findall(r'\d+', part)]
  values = np.arange(math.prod(numbers(dims))).reshape(numbers(dims))
  return (values.transpose(numbers(order)) if order else values).ravel()


def _groups(i: hlo_text.Instruction, num_devices: int) -> list[list[int]]:
  """Parses `replica_groups`, in its three ways of writing."""
  listed = re.search(r'replica_groups=\{((?:\{[\d,]*\},?)*)\}', i.attributes)
  if listed:
    return _braces(listed[1]) or [list(range(num_devices))]
  iota = re.search(
    r'replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)',
    i.attributes,
  )
  if iota:
    return _iota(iota[3]).reshape(int(iota[1]), int(iota[2])).tolist()
  # mesh['a'=2,'b'=8], device_ids=([4,4]T(1,0)) {'a','b':(2)4}: an axis may be
  # a part of one, (what is outside of it)its size.
  mesh = re.search(
    r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}',
    i.attributes,
  )
  if mesh is None:
    if 'replica_groups=' not in i.attributes:
      return [list(range(num_devices))]
    raise ValueError(
      f'Cannot read the replica_groups of {i.name}: {i.attributes[:200]}'
    )
  sizes = {
    name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])
  }
  parts: dict[str, list[tuple[int, int]]] = {}  # Axis: (outside, size).
  for name, outside, size in re.findall(
    r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh[3]
  ):
    parts.setdefault(name, []).append(
      (int(outside or 1), int(size or sizes[name]))
    )
  shape, grouped = [], []
  for name, size in sizes.items():
    left = size
    for outside, part in sorted(parts.get(name, [])):
      before = outside * left // size
      if before > 1:
        shape.append(before)
        left //= before
      grouped.append(len(shape))
      shape.append(part)
      left //= part
    shape.append(left)
  ids = np.arange(math.prod(sizes.values()))
  if mesh[2]:
    ids = (
      _iota(mesh[2])
      if mesh[2].startswith('[')
      else np.array([int(n) for n in mesh[2].split(',')])
    )
  rest = [d for d in range(len(shape)) if d not in grouped]
  group_size = math.prod(shape[d] for d in grouped)
  return (
    ids.reshape(shape)
    .transpose(rest + grouped)
    .reshape(-1, group_size)
    .tolist()
  )
