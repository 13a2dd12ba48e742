"""Measures a compiled program from its text.

The text is an optimized, scheduled, SPMD-partitioned HLO module of CPU, GPU or
TPU, as `compiled.as_text()` returns it and `--xla_dump_to` writes it. All
numbers are those of one device and one execution. Loops are multiplied out:

- XLA notes the number of rounds (`known_trip_count`), or it follows from the
  loop's condition and counters. A loop of which neither says it counts once,
  and is listed.
- Of the branches of a conditional, the most expensive one counts.

TPU compilers change the plain operations:

- Matrix products become convolutions; a batch dimension becomes a spatial one
  of a window that is dilated so that only its diagonal meets the input.
- A collective that overlaps with computation is cut into a chain of fusions
  that all contain it (`chain_id`); the one with `AsyncCollectiveStart` counts.
- A reduce-scatter may be a fusion of an all-reduce and a dynamic-slice.
- Slices (in the sense of several pods) run one program each, whose devices are
  numbered within the slice. They communicate through `send` and `recv` of the
  MegaScale runtime, which name slices and physical devices.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import operator
import re
from typing import Any

import numpy as np

from jaxline import counting

# Bytes that one device sends by the algorithm that sends the fewest, relative
# to the larger of operand and result, in a group of n (Patarasuk and Yuan
# 2009).
_WIRE: dict[str, Callable[[int], float]] = {
  'all-gather': lambda n: (n - 1) / n,
  'all-reduce': lambda n: 2 * (n - 1) / n,
  'all-to-all': lambda n: (n - 1) / n,
  'collective-broadcast': lambda n: 1.0,
  'collective-permute': lambda n: 1.0,
  'ragged-all-to-all': lambda n: (n - 1) / n,
  'reduce-scatter': lambda n: (n - 1) / n,
}
# Instructions that move nothing: some pass values on, others contain programs
# that are measured themselves.
_FREE = {
  'add-dependency', 'after-all', 'async-start', 'bitcast', 'call', 'call-start',
  'conditional', 'constant', 'domain', 'get-tuple-element', 'opt-barrier',
  'parameter', 'partition-id', 'replica-id', 'tuple', 'while',
}  # fmt: skip
_FUSIONS = ('fusion', 'fusion-start')
_FREE_CALLS = {'AllocateBuffer', 'ConcatBitcast'}
# In-place updates -> the operand that is written. `scatter` reads it as well.
_UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}
_SLICES = ('dynamic-slice', 'gather', 'slice')
# Custom calls of kernels by Pallas and similar tools.
_KERNELS = (
  '__gpu$xla.gpu.triton',
  'mosaic_gpu',
  'tpu_custom_call',
  'triton_kernel_call',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
  """All collectives of one kind over the same mesh axes, in one execution.

  Attributes:
    kind: the HLO name, such as 'all-gather'.
    axes: the mesh axes along which the groups of devices reach.
    count: how many.
    bytes: the larger of operand and result, per device, of all together.
    wire_bytes: what a device must send, by the algorithm that sends the fewest.
    dcn_bytes: the part of them that must leave the device's slice.
  """

  kind: str
  axes: tuple[str, ...]
  count: int
  bytes: float
  wire_bytes: float
  dcn_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measures:
  """What one device does in one execution of a program.

  Attributes:
    flops: of matrix products and convolutions; a multiplication and an addition
      are two. Products with padding do not count. Kernels of cuBLAS and cuDNN
      count by their shapes (attention fully, though a causal kernel skips
      half), a Pallas kernel by the estimate that its author gave, or, if it is
      one of JAX's splash attention, by its shapes and the blocks of its mask.
    hbm_bytes: read from and written to device memory by the instructions
      outside of fusions, and by each fusion as a whole. A sliced operand counts
      as the slice, an in-place update as the update, a value that is passed on
      not at all. Not included are other memories (VMEM, CMEM, the host's), the
      padding of tiles, a second read of an operand by the same kernel and the
      intermediate traffic of collectives. Reads from a cache are included, so
      that it is an upper bound on GPUs and CPUs.
    traffic: the collectives, those that send most first. Groups of one device
      send nothing and are left out.
    unknown_loops: name and op_name of the loops that count once, since their
      number of rounds is not known.
    unknown_kernels: name and op_name of the kernels without known FLOPs.
  """

  flops: float
  hbm_bytes: float
  traffic: tuple[Traffic, ...]
  unknown_loops: tuple[str, ...]
  unknown_kernels: tuple[str, ...]


def measure(
  module: 'Module', axis_sizes: Mapping[str, int], slices: Sequence[int]
) -> Measures:
  """Measures a program.

  Args:
    module: the program.
    axis_sizes: size of each mesh axis, in the order of the mesh. Device i of
      the program is the i-th of the flattened mesh; if the program is that of
      one slice, the i-th of the devices of its slice.
    slices: the slice of each device of the flattened mesh. Within a slice is
      ICI or NVLink, between slices is DCN.
  """
  places = _Places(module.num_devices, axis_sizes, slices)
  flops = hbm_bytes = 0.0
  sums: dict[tuple[str, tuple[str, ...]], Any] = {}
  loops, kernels = set(), set()
  for i, times in _executed(module.entry, 1):
    if i.opcode == 'while' and i.rounds is None:
      loops.add(i.title)
    products = _flops(i)
    if products is None:
      kernels.add(i.title)
    flops += times * (products or 0.0)
    hbm_bytes += times * _hbm_bytes(i)
    if collective := _collective(i, places):
      key, amounts = collective
      sums[key] = sums.get(key, 0) + times * amounts
  traffic = [
    Traffic(
      kind=kind,
      axes=axes,
      count=int(count),
      bytes=size,
      wire_bytes=wire_bytes,
      dcn_bytes=dcn_bytes,
    )
    for (kind, axes), amounts in sums.items()
    for count, size, wire_bytes, dcn_bytes in [amounts.tolist()]
  ]
  return Measures(
    flops=flops,
    hbm_bytes=hbm_bytes,
    traffic=tuple(sorted(traffic, key=lambda t: -t.wire_bytes)),
    unknown_loops=tuple(sorted(loops)),
    unknown_kernels=tuple(sorted(kernels)),
  )


# The parser.

# Type, dimensions, and the number of the memory in the layout.
_SHAPE = re.compile(
  r'([a-z]\w*)\[([^\]]*)\](?:\{(?:[^{}S]*S\((\d+)\))?[^{}]*\})?'
)
# What a Pallas kernel is labelled with; the only attribute of several lines.
_KERNEL_METADATA = re.compile(r'=\{\n(?:".*\n)+\}')
_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')
_INSTRUCTION = re.compile(
  r'\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?)'
  r' (?P<opcode>[a-z][\w\-]*)\((?P<arguments>[^)]*)\)(?P<attributes>.*)'
)
# Other types, such as s4, bf16 and f8e4m3fn, begin with their bits.
_BITS = {'pred': 8, 'token': 0, 'opaque': 0}
_HOST_MEMORY = 5  # S(5) of a layout, on every platform.


@dataclasses.dataclass(frozen=True)
class _Shape:
  """An array: its type, dimensions, bytes, and how many of them are in HBM."""

  dtype: str
  dims: tuple[int, ...]
  bytes: int
  hbm_bytes: int


@dataclasses.dataclass(eq=False)
class Instruction:
  """One line of a computation.

  Attributes:
    name: in its computation.
    opcode: such as 'dot'.
    arguments: the text in parentheses.
    attributes: the text after it.
    shapes: of the result; those of a tuple, flattened.
    operands: the instructions that `arguments` names.
    computation: where it is.
    users: the instructions that have this one as an operand.
    fused: of a fusion, the computation inside of it.
  """

  name: str
  opcode: str
  arguments: str
  attributes: str
  shapes: tuple[_Shape, ...]
  operands: tuple['Instruction', ...]
  computation: 'Computation'
  users: list['Instruction'] = dataclasses.field(default_factory=list)
  fused: 'Computation | None' = None

  @property
  def bytes(self) -> int:
    return sum(shape.bytes for shape in self.shapes)

  @property
  def hbm_bytes(self) -> int:
    return sum(shape.hbm_bytes for shape in self.shapes)

  @property
  def target(self) -> str:
    return self.search(r'custom_call_target="([^"]*)"')

  @property
  def op_name(self) -> str:
    """What makes it, as JAX names it; '' if XLA lost the name."""
    name = self.search(r'op_name="((?:[^"\\]|\\.)*)"')
    return re.sub(r'\\(.)', r'\1', name)

  @property
  def title(self) -> str:
    return f'{self.name} ({self.op_name})'

  @property
  def result(self) -> 'Instruction | None':
    """The instruction with the result of an asynchronous one: its `-done`."""
    if not self.opcode.endswith(('-start', 'send', 'recv')):
      return self
    done = (user for user in self.users if user.opcode.endswith('-done'))
    return next(done, None)

  @functools.cached_property
  def rounds(self) -> int | None:
    """How often the body of a `while` runs; None if that is unknown."""
    if known := self.search(r'"known_trip_count":\{"n":"(\d+)"\}'):
      return int(known)
    (body,), (condition,) = self.called('body'), self.called('condition')
    state = _value(self.operands[0], {})
    for rounds in range(_MAX_ROUNDS):
      goes_on = _value(condition.root, {0: state})
      if not goes_on:
        return None if goes_on is None else rounds
      state = _value(body.root, {0: state})
    return None

  def search(self, pattern: str) -> str:
    """Returns the group of a pattern in the attributes; '' without a match."""
    found = re.search(pattern, self.attributes)
    return found[1] if found else ''

  def attribute(self, name: str) -> str:
    """Returns the word or {...} of an attribute; '' if there is none."""
    return self.search(rf', {name}=(\{{[^{{}}]*\}}|[^\s,{{}}]+)')

  def numbers(self, name: str) -> list[int]:
    """Returns the numbers of an attribute such as dims={0,1}."""
    return _numbers(self.attribute(name))

  def called(self, name: str) -> list['Computation']:
    """Returns the computations that an attribute names."""
    names = re.findall(r'[\w.\-]+', self.attribute(name))
    return [self.computation.others[name] for name in names]


@dataclasses.dataclass(eq=False)
class Computation:
  """A function of the module.

  Attributes:
    others: all computations of the module, by name.
    instructions: by name.
    root_name: of the instruction that is marked as the result, if any.
    fusion: the instruction that this is inside of; None outside of fusions. No
      other instruction calls it.
  """

  others: dict[str, 'Computation']
  instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
  root_name: str = ''
  fusion: Instruction | None = None

  @property
  def root(self) -> Instruction:
    """The result: the instruction marked as ROOT, else the last one."""
    return self.instructions[self.root_name or list(self.instructions)[-1]]

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    return {
      int(i.arguments): i
      for i in self.instructions.values()
      if i.opcode == 'parameter'
    }


@dataclasses.dataclass(eq=False)
class Module:
  """A program; on TPUs `num_devices` are those of one slice."""

  entry: Computation
  computations: dict[str, Computation]
  num_devices: int


def parse(text: str) -> Module:
  """Reads a module."""
  is_tpu = re.search(r'[\[{][\d,]*:T\(', text) is not None
  computations: dict[str, Computation] = {}
  entry: Any = None
  current: Computation | None = None
  for line in _KERNEL_METADATA.sub('={}', text).splitlines():
    if current is None:
      if header := _HEADER.match(line):
        current = computations[header[2]] = Computation(computations)
        entry = current if header[1] else entry
    elif line.startswith('}'):
      current = None
    elif match := _INSTRUCTION.match(line):
      new = Instruction(
        name=match['name'],
        opcode=match['opcode'],
        arguments=match['arguments'],
        attributes=match['attributes'],
        shapes=tuple(
          _shape(is_tpu, *shape.groups('0'))
          for shape in _SHAPE.finditer(match['shape'])
        ),
        # Operands are in lines above.
        operands=tuple(
          current.instructions[name]
          for name in re.findall(r'%([\w.\-]+)', match['arguments'])
        ),
        computation=current,
      )
      for operand in dict.fromkeys(new.operands):
        operand.users.append(new)
      # Computations are above those that call them.
      if new.opcode in _FUSIONS and (called := new.called('calls')):
        (new.fused,) = called
        new.fused.fusion = new
      current.instructions[new.name] = new
      if match['root']:
        current.root_name = new.name
  head = text.split('\n', 1)[0]
  counts = re.findall(r', (?:num_partitions|replica_count)=(\d+)', head)
  return Module(entry, computations, math.prod(map(int, counts)))


def _shape(is_tpu: bool, dtype: str, dims_text: str, space: str) -> _Shape:
  dims = tuple(_numbers(dims_text))
  bits = _BITS[dtype] if dtype in _BITS else _numbers(dtype)[0]
  size = -(-math.prod(dims) * bits // 8)
  # On GPUs, S(1) is device memory that is registered for collectives.
  in_hbm = int(space) == 0 if is_tpu else int(space) != _HOST_MEMORY
  return _Shape(dtype, dims, size, size * in_hbm)


def _numbers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r'\d+', text)]


# The walk.


def _executed(
  computation: Computation, times: int
) -> Iterator[tuple[Instruction, int]]:
  """Yields the instructions that run, and how often."""
  for i in computation.instructions.values():
    yield i, times
    called: Iterable[tuple[Computation, int]] = ()
    if i.opcode == 'while':
      rounds = i.rounds
      (body,), (condition,) = i.called('body'), i.called('condition')
      called = [
        (body, 1 if rounds is None else rounds),
        (condition, 1 if rounds is None else rounds + 1),
      ]
    elif i.opcode == 'conditional':
      branches = i.called('branch_computations') or [
        *i.called('true_computation'),
        *i.called('false_computation'),
      ]
      called = [(max(branches, key=_work), 1)]
    elif i.fused:
      called = [(i.fused, 1)]
    elif i.opcode in ('async-start', 'call', 'call-start'):
      names = i.called('calls') or i.called('to_apply')
      called = [(name, 1) for name in names]
    for other, rounds in called:
      yield from _executed(other, times * rounds)


def _work(computation: Computation) -> tuple[float, float]:
  """Returns the FLOPs and the bytes of memory of one execution."""
  steps = list(_executed(computation, 1))
  return (
    sum(times * (_flops(i) or 0.0) for i, times in steps),
    sum(times * _hbm_bytes(i) for i, times in steps),
  )


# Loops.

# Opcodes that do not change an integer, and those that compute one.
_PASSING = {'bitcast', 'convert', 'copy', 'copy-done', 'copy-start', 'reshape'}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
  'add': operator.add,
  'multiply': operator.mul,
  'subtract': operator.sub,
}
_MAX_ROUNDS = 1 << 16


def _value(i: Instruction, parameters: Mapping[int, Any]) -> Any:
  """Evaluates scalar integers and comparisons of them.

  Args:
    i: the instruction.
    parameters: values of the parameters of its computation.

  Returns:
    An integer or bool; of a tuple, the list of its values; None if unknown.
  """
  if len(i.shapes) == 1 and i.shapes[0].dims:
    return None
  if i.opcode == 'constant':
    is_integer = re.fullmatch(r'-?\d+', i.arguments.strip())
    return int(i.arguments) if is_integer else None
  if i.opcode == 'parameter':
    return parameters.get(int(i.arguments))
  values = [_value(operand, parameters) for operand in i.operands]
  if i.opcode == 'tuple':
    return values
  if i.opcode == 'fusion':
    return i.fused and _value(i.fused.root, dict(enumerate(values)))
  if None in values:
    return None
  if i.opcode == 'get-tuple-element':
    return values[0][int(i.attribute('index'))]
  if i.opcode in _PASSING:
    return values[0]
  if i.opcode in _ARITHMETIC:
    return _ARITHMETIC[i.opcode](*values)
  if i.opcode == 'compare':
    return getattr(operator, i.attribute('direction').lower())(*values)
  return None


# FLOPs.


def _flops(i: Instruction) -> float | None:
  """Returns the FLOPs of one execution; None for an unknown kernel."""
  if i.opcode in ('dot', 'scaled-dot', 'ragged-dot'):
    return _product_flops(i, i.numbers('lhs_contracting_dims'))
  if i.opcode == 'convolution':
    return _convolution_flops(i, i.operands[0], i.operands[1], i)
  if i.opcode not in ('custom-call', 'custom-call-start'):
    return 0.0
  target = i.target
  if target.startswith(('__cublas$gemm', '__cublas$lt$matmul')):
    return _product_flops(
      i, _numbers(i.search(r'lhs_contracting_dimensions\\?":\[([^\]]*)\]'))
    )
  if target.startswith('__cudnn$conv'):
    arrays = {
      '__cudnn$convBackwardInput': (i, i.operands[1], i.operands[0]),
      '__cudnn$convBackwardFilter': (i.operands[0], i, i.operands[1]),
    }.get(target, (i.operands[0], i.operands[1], i))
    return _convolution_flops(i, *arrays)
  if target.startswith('__cudnn$fmha'):
    scores = i.search(
      r'intermediate_tensor_shape\\?":.*?dimensions\\?": *\[([^\]]*)\]'
    )
    # Forward QK and PV; backward QK again, and a product for each of dV, dP,
    # dQ and dK (Dao et al. 2022).
    products = 5 if 'Backward' in target else 2
    width = i.operands[0].shapes[0].dims[-1]
    return (
      2.0 * products * math.prod(_numbers(scores)) * width if scores else None
    )
  if target.startswith(_KERNELS):
    cost = i.search(r'"cost_estimate":\{"flops":"?(\d+)')
    return float(cost) if cost else _splash_flops(i)
  return 0.0


# Products of a block of queries with a block of keys, in the kernels of
# `jax.experimental.pallas.ops.tpu.splash_attention`. Both of the backward pass
# compute the scores and the gradient of the weights.
_SPLASH_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4}


def _splash_flops(i: Instruction) -> float | None:
  """Returns the FLOPs of splash attention; None for another kernel."""
  phase = re.search(r'splash_m[hq]a_(fwd|dq|dkv)', i.title)
  if not phase:
    return None
  arrays = [operand.shapes[0] for operand in i.operands]
  queries, keys, *_ = (x.dims for x in arrays if 'f' in x.dtype)
  flops = 2.0 * _SPLASH_PRODUCTS[phase[1]] * math.prod(queries) * keys[-2]
  if arrays[0].dtype.startswith('s'):
    flops *= counting.splash_share(*arrays[0].dims[-2:])
  return flops


def _product_flops(i: Instruction, contracted: Sequence[int]) -> float:
  sizes = [i.operands[0].shapes[0].dims[d] for d in contracted]
  result = i.shapes[0].dims
  ragged = i.numbers('lhs_ragged_dims')
  if ragged and set(ragged) <= set(contracted):
    # The result has one matrix per group, and the rows are divided among them.
    result = result[1:]
  return 2.0 * math.prod((*result, *sizes))


def _convolution_flops(
  i: Instruction, lhs: Instruction, rhs: Instruction, out: Instruction
) -> float:
  """FLOPs of `out` = convolution of `lhs` with the kernel `rhs`."""
  labels = re.split('_|->', i.attribute('dim_labels'))
  sizes = [
    dict(zip(label, array.shapes[0].dims, strict=True))
    for label, array in zip(labels, (lhs, rhs, out), strict=True)
  ]
  items = (item.partition('=') for item in i.attribute('window')[1:-1].split())
  window = {key: values.split('x') for key, _, values in items}
  met = 1
  for d in filter(str.isdigit, sizes[0]):
    at = lambda key, default, n=int(d): int(
      window[key][n].split('_')[0] if key in window else default
    )
    met *= counting.count_meetings(
      size=sizes[0][d],
      kernel=sizes[1][d],
      out=sizes[2][d],
      stride=at('stride', 1),
      low=at('pad', 0),
      dilation=at('lhs_dilate', 1),
      kernel_dilation=at('rhs_dilate', 1),
    )
  batch_groups = int(i.attribute('batch_group_count') or 1)
  return (
    2.0 * met * sizes[1]['i'] * sizes[1]['o'] * sizes[0]['b'] / batch_groups
  )


# Bytes.


def _hbm_bytes(i: Instruction) -> int:
  """Returns the bytes of device memory one execution reads and writes."""
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
  roots: tuple[Instruction, ...] = (i,)
  shapes = i.result.shapes if i.result else ()
  if i.opcode == 'fusion' and i.fused:
    root = i.fused.root
    roots = root.operands if root.opcode == 'tuple' else (root,)
    if any(v.target == 'AsyncCollectiveDone' for v in roots):
      return 0  # Counted where it starts.
  each = iter(shapes)
  for value in roots:
    # A fusion may place its results in other memories than its inside says.
    own = each if len(roots) == 1 else [next(each) for _ in value.shapes]
    read += min(_written(value), sum(shape.hbm_bytes for shape in own))
  return read


def _read_by(user: Instruction, value: Instruction) -> int:
  """Returns how many bytes of one of its operands an instruction reads."""
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
    opcode = user.opcode.removesuffix('-start')
    if opcode in _SLICES:
      return user.result.bytes if user.result else 0
    if opcode in _UPDATES:
      return user.operands[2].bytes if opcode == 'scatter' else 0
  return value.bytes


def _read(value: Instruction) -> int:
  """Returns how many bytes of a value inside of a fusion are read."""
  read = sum(_read_by(user, value) for user in value.users)
  fusion = value.computation.fusion
  if fusion and fusion.computation.fusion and value is value.computation.root:
    # What a nested fusion passes on is read by the users of that fusion.
    read += _read(fusion)
  return min(read, value.bytes)


def _written(value: Instruction) -> int:
  """Returns how many bytes of a result are new."""
  while value.opcode == 'bitcast':
    value = value.operands[0]
  if value.opcode == 'parameter' or _continues_chain(value):
    return 0
  if value.target == 'AsyncCollectiveStart':
    # Its operand and semaphores are passed on; the collective's result is new.
    return value.operands[0].bytes
  if value.opcode in _UPDATES:
    return value.operands[_UPDATES[value.opcode]].bytes
  return value.result.bytes if value.result else 0


# Collectives.


def _continues_chain(i: Instruction) -> bool:
  """Whether this is a later piece of a collective that started elsewhere."""
  return (
    i.opcode.removesuffix('-start') in _WIRE
    and 'chain_id=' in i.attributes
    and not any(user.target == 'AsyncCollectiveStart' for user in i.users)
  )


def _collective(
  i: Instruction, places: '_Places'
) -> tuple[tuple[str, tuple[str, ...]], np.ndarray] | None:
  """Returns key and numbers of the `Traffic` of a collective, if it is one."""
  kind = i.opcode.removesuffix('-start')
  if i.opcode == 'send':
    kind, size = _sent(i)
  elif kind in _WIRE and not _continues_chain(i):
    size = max(
      sum(operand.bytes for operand in i.operands),
      i.result.bytes if i.result else 0,
    )
    if kind == 'all-reduce' and i.computation.fusion:
      inside = {other.opcode for other in i.computation.instructions.values()}
      if {'dynamic-slice', 'partition-id'} <= inside:
        kind = 'reduce-scatter'  # The fusion keeps this device's part.
  else:
    return None
  groups = places.groups(i) if kind else []
  n = max(map(len, groups), default=1)
  if n < 2:
    return None
  wire = size * _WIRE.get(kind, lambda n: 1.0)(n)
  dcn = wire * _dcn_part(kind, n, places.num_slices(groups))
  return (kind, places.axes(groups)), np.array([1.0, size, wire, dcn])


def _dcn_part(kind: str, n: int, slices: int) -> float:
  """Returns the fraction of the sent bytes that must go to other slices.

  With n devices in s slices, reductions and gathers work within slices first,
  then between them: (s - 1) / (n - 1). In an all-to-all, it is the part for
  chips of other slices. In a permute, it is everything, since all chips wait
  for one that sends to another slice.
  """
  if slices < 2:
    return 0.0
  if kind == 'all-to-all':
    return (n - n // slices) / (n - 1)
  if kind in ('all-reduce', 'all-gather', 'reduce-scatter'):
    return (slices - 1) / (n - 1)
  return 1.0


def _sent(i: Instruction) -> tuple[str, int]:
  """Returns kind and bytes of the collective of a `send`; '' without one."""
  payload = i.operands[0].bytes
  if '_xla_send_recv_source_target_pairs=' in i.attributes:
    return 'collective-permute', payload  # GPUs: a permute, taken apart.
  # Without a type it goes to the host, for a callback.
  kind = i.search(r'_xla_megascale_transfer_type="(\w+)"')
  meeting = i.search(r'(_xla_host_transfer_rendezvous="[^"]*")')
  for other in i.computation.instructions.values():
    if other.opcode == 'recv' and meeting and meeting in other.attributes:
      payload = max(payload, other.shapes[0].bytes)
  kind = kind.lower().replace('_', '-')
  return {'one-to-one': 'collective-permute'}.get(kind, kind), payload


class _Places:
  """Where the devices of a program are, in the mesh and in the slices."""

  def __init__(
    self, num_devices: int, axis_sizes: Mapping[str, int], slices: Sequence[int]
  ):
    self._axis_sizes = axis_sizes
    self._slices = np.asarray(slices)
    # The devices of the program.
    self._mine = np.arange(len(slices))
    if num_devices != len(slices):
      self._mine = np.flatnonzero(self._slices == self._slices[0])

  def groups(self, i: Instruction) -> list[np.ndarray]:
    """Returns the groups of a collective, as numbers of the mesh's devices."""
    members = self._mine
    pairs = i.search(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}')
    if pairs:
      groups = _braces(pairs)
    elif i.opcode == 'send':
      # Devices are physical here, and their order in a slice is not told. All
      # slices are laid out alike, so the axes that differ are those between the
      # first devices of the slices. Slices are numbered from 1.
      _, first = np.unique(self._slices, return_index=True)
      members = np.array([-1, *first])
      groups = _megascale_groups(i)
    else:
      groups = _replica_groups(i, len(self._mine))
    # A device that sends to itself sends nothing.
    return [members[sorted(set(group))] for group in groups]

  def num_slices(self, groups: Sequence[np.ndarray]) -> int:
    """Returns in how many slices the devices of one group are, at most."""
    return max(len(set(self._slices[group].tolist())) for group in groups)

  def axes(self, groups: Sequence[np.ndarray]) -> tuple[str, ...]:
    """Returns the mesh axes along which the groups reach."""
    first = np.repeat([group[0] for group in groups], [*map(len, groups)])
    sizes = tuple(self._axis_sizes.values())
    at, of_first = (
      np.stack(np.unravel_index(devices, sizes))
      for devices in (np.concatenate(groups), first)
    )
    varies = (at != of_first).any(axis=1)
    return tuple(a for a, v in zip(self._axis_sizes, varies, strict=True) if v)


def _braces(text: str) -> list[list[int]]:
  """Parses '{0,1},{2,3}'."""
  return [_numbers(group) for group in re.findall(r'\{([^{}]*)\}', text)]


def _megascale_groups(i: Instruction) -> list[list[int]]:
  """Returns the groups of slices between which a `send` communicates."""
  target = i.search(r'_xla_megascale_target="?(\{\{.*?\}\}|\{[^}]*\})')
  groups = _braces(target)
  # {1,2}x{0:3}: those slices, each device with those of the same number.
  if target.startswith('{{'):
    # {{100000->200000},...}: the number of a slice, and of a physical device.
    groups = [[n // 100_000 for n in group] for group in groups]
  return groups


def _iota(text: str) -> np.ndarray:
  """Parses '[4,2]' or '[2,4]T(1,0)': numbers from 0, transposed, in a row."""
  dims, _, order = text.partition('T')
  values = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
  return (values.transpose(_numbers(order)) if order else values).ravel()


def _replica_groups(i: Instruction, num_devices: int) -> list[list[int]]:
  """Parses `replica_groups`, in its three ways of writing."""
  text = i.search(r'replica_groups=(.*)') or '{}'
  if listed := re.match(r'\{((?:\{[\d,]*\},?)*)\}', text):
    return _braces(listed[1]) or [list(range(num_devices))]
  if iota := re.match(r'\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', text):
    return _iota(iota[3]).reshape(int(iota[1]), int(iota[2])).tolist()
  # mesh['a'=2,'b'=8], device_ids=([4,4]T(1,0)) {'a','b':(2)4}: of the axis b,
  # the part of size 4 that has 2 positions outside of it.
  mesh = re.match(
    r'mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}', text
  )
  if mesh is None:
    raise ValueError(
      f'Cannot read the replica_groups of {i.name}: {text[:200]}'
    )
  sizes = {n: int(size) for n, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
  ids: Any = np.arange(math.prod(sizes.values()))
  coordinates = np.unravel_index(ids, tuple(sizes.values()))
  at = dict(zip(sizes, coordinates, strict=True))
  # Devices are in one group if they differ only in the named parts of axes.
  rest = dict(at)
  for name, outside, size in re.findall(
    r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh[3]
  ):
    part = int(size or sizes[name])
    stride = sizes[name] // (int(outside or 1) * part)
    rest[name] = rest[name] - at[name] // stride % part * stride
  keys = np.ravel_multi_index(tuple(rest.values()), tuple(sizes.values()))
  if mesh[2]:
    ids = _iota(mesh[2]) if mesh[2].startswith('[') else _numbers(mesh[2])
  return [np.asarray(ids)[keys == key].tolist() for key in np.unique(keys)]
