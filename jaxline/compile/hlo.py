"""Parses the text of a compiled program.

The text is an optimized, scheduled, SPMD-partitioned HLO module of CPU, GPU or
TPU, as `compiled.as_text()` returns it and `--xla_dump_to` writes it.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
import operator
import re
from typing import Any

# The groups are the type, the dimensions, and the layout's memory space.
_SHAPE = re.compile(
  r'([a-z]\w*)\[([^\]]*)\](?:\{(?:[^{}S]*S\((\d+)\))?[^{}]*\})?'
)
# The label of a Pallas kernel is the only attribute with several lines.
_KERNEL_METADATA = re.compile(r'=\{\n(?:".*\n)+\}')
_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')
_INSTRUCTION = re.compile(
  r'\s+(ROOT )?%?(?P<name>[\w.\-]+) = (.*?)'
  r' (?P<opcode>[a-z][\w\-]*)\((?P<arguments>[^)]*)\)(?P<attributes>.*)'
)
# Names of unlisted types, such as s4, bf16 and f8e4m3fn, contain their bits.
_BITS = {'pred': 8, 'token': 0, 'opaque': 0}
_HOST_MEMORY = 5  # This is S(5) in a layout, on every platform.


@dataclasses.dataclass(frozen=True)
class _Shape:
  dtype: str
  dims: tuple[int, ...]
  bytes: int
  hbm_bytes: int  # The bytes that are in HBM.


@dataclasses.dataclass(eq=False)
class Instruction:
  """One line of a computation."""

  name: str  # Unique in its computation.
  opcode: str
  arguments: str  # The text in parentheses.
  attributes: str  # The text after the arguments.
  shapes: tuple[_Shape, ...]  # The shapes of the result; a tuple is flattened.
  operands: tuple['Instruction', ...]  # The instructions in `arguments`.
  computation: 'Computation'
  users: list['Instruction'] = dataclasses.field(default_factory=list)
  fused: 'Computation | None' = None  # The computation of a fusion.

  @property
  def bytes(self) -> int:
    return sum(shape.bytes for shape in self.shapes)

  @property
  def hbm_bytes(self) -> int:
    return sum(shape.hbm_bytes for shape in self.shapes)

  @property
  def kind(self) -> str:
    """The opcode, without the suffix of an asynchronous instruction."""
    return self.opcode.removesuffix('-start')

  @property
  def target(self) -> str:
    return self.search(r'custom_call_target="([^"]*)"')

  @property
  def op_name(self) -> str:
    """The name of its JAX operation; '' if XLA lost the name."""
    name = self.search(r'op_name="((?:[^"\\]|\\.)*)"')
    return re.sub(r'\\(.)', r'\1', name)

  @property
  def title(self) -> str:
    return f'{self.name} ({self.op_name})'

  @property
  def results(self) -> tuple[_Shape, ...]:
    """The shapes of the result; for a `-start`, the result of its `-done`."""
    if not self.opcode.endswith(('-start', 'send', 'recv')):
      return self.shapes
    done = (user for user in self.users if user.opcode.endswith('-done'))
    return next((user.shapes for user in done), ())

  @property
  def result_bytes(self) -> int:
    return sum(shape.bytes for shape in self.results)

  @functools.cached_property
  def rounds(self) -> int | None:
    """How often the body of a `while` runs; None if unknown."""
    if known := self.search(r'"known_trip_count":\{"n":"(\d+)"\}'):
      return int(known)
    # TPU compilers do not record it, so evaluate the loop's counters.
    (body,), (condition,) = self.called('body'), self.called('condition')
    state = _value(self.operands[0], {})
    for rounds in range(_MAX_ROUNDS):
      goes_on = _value(condition.root, {0: state})
      if not goes_on:
        return None if goes_on is None else rounds
      state = _value(body.root, {0: state})
    return None

  def search(self, pattern: str) -> str:
    """Returns a pattern's group in the attributes; '' if it does not match."""
    found = re.search(pattern, self.attributes)
    return found[1] if found else ''

  def attribute(self, name: str) -> str:
    """Returns an attribute, a word or {...}; '' if there is none."""
    return self.search(rf', {name}=(\{{[^{{}}]*\}}|[^\s,{{}}]+)')

  def numbers(self, name: str) -> list[int]:
    """Returns the numbers of an attribute such as dims={0,1}."""
    return numbers(self.attribute(name))

  def called(self, name: str) -> list['Computation']:
    """Returns the computations that an attribute names."""
    names = re.findall(r'[\w.\-]+', self.attribute(name))
    return [self.computation.others[name] for name in names]


@dataclasses.dataclass(eq=False)
class Computation:
  """A function of the module."""

  others: dict[str, 'Computation']  # All computations of the module.
  instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
  parameters: dict[int, Instruction] = dataclasses.field(default_factory=dict)
  root: Any = None  # The instruction whose value is the result.
  # The fusion that contains it and is its only caller, or None.
  fusion: Instruction | None = None


@dataclasses.dataclass(eq=False)
class Module:
  """A program. On TPUs, `num_devices` counts the devices of one slice."""

  entry: Computation
  num_devices: int


def parse(text: str) -> Module:
  """Parses a module."""
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
      texts: dict[str, Any] = match.groupdict()
      new = Instruction(
        **texts,
        shapes=tuple(
          _shape(is_tpu, *shape.groups('0'))
          for shape in _SHAPE.finditer(match[3])
        ),
        # Operands are defined in lines above.
        operands=tuple(
          current.instructions[name]
          for name in re.findall(r'%([\w.\-]+)', match['arguments'])
        ),
        computation=current,
      )
      for operand in dict.fromkeys(new.operands):
        operand.users.append(new)
      # Computations are defined above their callers.
      if new.kind == 'fusion' and (called := new.called('calls')):
        (new.fused,) = called
        new.fused.fusion = new
      current.instructions[new.name] = new
      if new.opcode == 'parameter':
        current.parameters[int(new.arguments)] = new
      if match[1]:
        current.root = new
  head = text.split('\n', 1)[0]
  counts = re.findall(r', (?:num_partitions|replica_count)=(\d+)', head)
  return Module(entry, math.prod(map(int, counts)))


def _shape(is_tpu: bool, dtype: str, dims_text: str, space: str) -> _Shape:
  dims = tuple(numbers(dims_text))
  bits = _BITS[dtype] if dtype in _BITS else numbers(dtype)[0]
  size = -(-math.prod(dims) * bits // 8)
  # On GPUs, S(1) is device memory that is registered for collectives.
  in_hbm = int(space) == 0 if is_tpu else int(space) != _HOST_MEMORY
  return _Shape(dtype, dims, size, size * in_hbm)


def numbers(text: str) -> list[int]:
  """Returns the integers in a text."""
  return [int(n) for n in re.findall(r'\d+', text)]


# These evaluate the counters of loops.

_COPIES = {'bitcast', 'convert', 'copy', 'copy-done', 'copy-start', 'reshape'}
_OPERATORS = {'add': 'add', 'multiply': 'mul', 'subtract': 'sub'}
_MAX_ROUNDS = 1 << 16


def _value(i: Instruction, parameters: Mapping[int, Any]) -> Any:
  """Evaluates an integer or bool, or a list for a tuple; None if unknown."""
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
  if i.opcode in _COPIES:
    return values[0]
  if i.opcode == 'get-tuple-element':
    return values[0][int(i.attribute('index'))]
  # A `compare` has a direction, such as LT.
  name = i.attribute('direction').lower() or _OPERATORS.get(i.opcode)
  return getattr(operator, name)(*values) if name else None
