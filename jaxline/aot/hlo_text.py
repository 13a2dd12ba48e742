"""Parses the text of a compiled program: which operations run, and how often.

The module `hlo` describes the text, and measures the parsed program.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import math
import re

# Of the others, such as s4, bf16 and f8e4m3fn, the first number tells.
_BITS = {'pred': 8, 'token': 0, 'opaque': 0}
_HOST_MEMORY = 5  # The S(5) of a layout, on every platform.


@dataclasses.dataclass(frozen=True)
class Shape:
  """An array: its type, dimensions, and the memory it lies in."""

  dtype: str
  dims: tuple[int, ...]
  space: int

  @property
  def bytes(self) -> int:
    bits = _BITS.get(self.dtype)
    if bits is None:
      found = re.match(r'[a-z]+(\d+)', self.dtype)
      if found is None:
        raise ValueError(f'Unknown HLO type {self.dtype!r} in the text.')
      bits = int(found[1])
    return -(-math.prod(self.dims) * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation; `shapes` has those of a tuple, flattened."""

  name: str
  opcode: str
  shape_text: str
  arguments: str
  attributes: str

  @functools.cached_property
  def shapes(self) -> tuple[Shape, ...]:
    return tuple(
      Shape(
        dtype=found[1],
        dims=tuple(int(d) for d in re.findall(r'\d+', found[2])),
        space=int(found[3] or 0),
      )
      for found in _SHAPE.finditer(self.shape_text)
    )

  @functools.cached_property
  def operands(self) -> tuple[str, ...]:
    return tuple(re.findall(r'%([\w.\-]+)', self.arguments))

  @property
  def bytes(self) -> int:
    return sum(shape.bytes for shape in self.shapes)

  @functools.cached_property
  def op_name(self) -> str:
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found[1] if found else ''

  @functools.cached_property
  def target(self) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
    return found[1] if found else ''

  def attribute(self, name: str) -> str:
    """Returns the word or {...} of an attribute; '' where there is none."""
    found = re.search(
      rf', {name}=(\{{[^{{}}]*\}}|[^\s,{{}}]+)', self._own_attributes
    )
    return found[1] if found else ''

  @functools.cached_property
  def _own_attributes(self) -> str:
    # What follows may hold anything.
    return re.split(
      ', (?:metadata|backend_config)=', self.attributes, maxsplit=1
    )[0]

  def numbers(self, name: str) -> tuple[int, ...]:
    """Returns the numbers of an attribute such as dims={0,1}."""
    return tuple(int(n) for n in re.findall(r'\d+', self.attribute(name)))

  def called(self, name: str) -> list[str]:
    """Returns the computations that an attribute names."""
    return re.findall(r'[\w.\-]+', self.attribute(name))


@dataclasses.dataclass
class Computation:
  """A function of the module."""

  name: str
  instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
  root_name: str = ''

  @functools.cached_property
  def root(self) -> Instruction:
    """The result: the instruction marked as ROOT, else the last one."""
    return self.instructions[self.root_name or list(self.instructions)[-1]]

  @functools.cached_property
  def opcodes(self) -> set[str]:
    return {i.opcode for i in self.instructions.values()}

  @functools.cached_property
  def targets(self) -> set[str]:
    return {i.target for i in self.instructions.values() if i.target}

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = {}
    for instruction in self.instructions.values():
      for operand in dict.fromkeys(instruction.operands):
        users.setdefault(operand, []).append(instruction)
    return users

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    return {
      int(i.arguments): i
      for i in self.instructions.values()
      if i.opcode == 'parameter'
    }

  def operand(self, instruction: Instruction, i: int) -> Instruction:
    return self.instructions[instruction.operands[i]]


@dataclasses.dataclass
class Module:
  """A parsed text."""

  computations: dict[str, Computation]
  entry: Computation
  num_devices: int  # Those that run this text; of one slice on TPUs.
  is_tpu: bool

  def in_hbm(self, shape: Shape) -> bool:
    # On GPUs, S(1) is device memory that is registered for collectives.
    return shape.space == 0 if self.is_tpu else shape.space != _HOST_MEMORY

  def hbm_bytes(self, instruction: Instruction) -> int:
    return sum(s.bytes for s in instruction.shapes if self.in_hbm(s))


_SHAPE = re.compile(
  r'([a-z]\w*)\[([^\]]*)\](?:\{(?:[^{}S]*S\((\d+)\))?[^{}]*\})?'
)
_NAME = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = ')
_OPCODE = re.compile(r' ?([a-z][\w\-]*)\(')
_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')


@functools.lru_cache(maxsize=4)
def parse(text: str) -> Module:
  """Reads a module.

  Raises:
    ValueError: the text is not that of an HLO module.
  """
  computations: dict[str, Computation] = {}
  entry = current = None
  for line in text.splitlines():
    if current is None:
      if header := _HEADER.match(line):
        current = Computation(header[2])
        computations[current.name] = current
        entry = current if header[1] else entry
    elif line.startswith('}'):
      current = None
    elif found := _NAME.match(line):
      instruction = _parse_instruction(found[2], line[found.end() :])
      current.instructions[instruction.name] = instruction
      if found[1]:
        current.root_name = instruction.name
  if entry is None:
    raise ValueError(
      'This is not the text of an HLO module: it has no ENTRY. Expected what'
      f' `compiled.as_text()` returns; got {text[:60]!r}.'
    )
  head = text.split('\n', 1)[0]
  counts = re.findall(r', (?:num_partitions|replica_count)=(\d+)', head)
  return Module(
    computations=computations,
    entry=entry,
    num_devices=math.prod(int(n) for n in counts),
    is_tpu=re.search(r'[\[{][\d,]*:T\(', text) is not None,
  )


def _parse_instruction(name: str, rest: str) -> Instruction:
  """Parses the right side of an instruction."""
  end = _closing(rest, 0) if rest.startswith('(') else rest.index(' ')
  opcode = _OPCODE.match(rest, end)
  if opcode is None:
    raise ValueError(f'Cannot read the HLO instruction {name} = {rest[:200]}')
  close = _closing(rest, opcode.end() - 1)
  return Instruction(
    name=name,
    opcode=opcode[1],
    shape_text=rest[:end],
    arguments=rest[opcode.end() : close - 1],
    attributes=rest[close:],
  )


def _closing(text: str, start: int) -> int:
  """Returns the index behind the parenthesis that closes that at `start`."""
  depth = 0
  for found in re.compile(r'[()]').finditer(text, start):
    depth += 1 if found[0] == '(' else -1
    if not depth:
      return found.end()
  raise ValueError(f'Unbalanced parentheses in HLO: {text[:200]}')


# The walk.


@dataclasses.dataclass(frozen=True)
class Site:
  """An instruction, and how often it runs."""

  instruction: Instruction
  computation: Computation
  count: int
  is_fused: bool
  op_name: str  # Its own, or that of its caller.


def walk(
  module: Module,
  weigh: Callable[[Site], float],
  *,
  into_fusions: bool = True,
) -> Iterator[Site]:
  """Yields each instruction that runs, with the number of its executions.

  Args:
    module: the program.
    weigh: gives the weight of a branch of a conditional; the heaviest counts.
    into_fusions: whether to yield the instructions inside of fusions as well.
  """

  def visit(
    name: str, count: int, is_fused: bool, op_name: str
  ) -> Iterator[Site]:
    computation = module.computations[name]
    for i in computation.instructions.values():
      site = Site(i, computation, count, is_fused, i.op_name or op_name)
      yield site
      down = functools.partial(visit, op_name=site.op_name)
      if i.opcode == 'while':
        times = rounds(module, computation, i)
        for part, repeats in (
          ('body', 1 if times is None else times),
          ('condition', 1 if times is None else times + 1),
        ):
          for called in i.called(part):
            yield from down(called, count * repeats, is_fused)
      elif i.opcode == 'conditional':
        branches = i.called('branch_computations') or [
          *i.called('true_computation'),
          *i.called('false_computation'),
        ]
        yield from max(
          (list(down(branch, count, is_fused)) for branch in branches),
          key=lambda sites: sum(s.count * weigh(s) for s in sites),
        )
      elif i.opcode in ('fusion', 'fusion-start'):
        if into_fusions:
          yield from down(i.called('calls')[0], count, True)
      elif i.opcode == 'call':
        yield from down(i.called('to_apply')[0], count, is_fused)
      elif i.opcode in ('async-start', 'call-start'):
        for called in i.called('calls') or i.called('to_apply'):
          yield from down(called, count, is_fused)

  return visit(module.entry.name, 1, False, '')


# Loops.

# An integer of a loop: an element of its state (None for none), plus a number.
_Affine = tuple[int | None, int]
_PASSING = {'bitcast', 'convert', 'copy', 'copy-done', 'copy-start', 'reshape'}


def rounds(
  module: Module, computation: Computation, loop: Instruction
) -> int | None:
  """Returns how often the body of a `while` runs; None if that is unknown."""
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
  if known:
    return int(known[1])
  test = _test(module, module.computations[loop.called('condition')[0]])
  if test is None:
    return None
  body = module.computations[loop.called('body')[0]]

  def start(index: int) -> int | None:
    value = _element(module, computation, loop.operands[0], index, None)
    return value[1] if value and value[0] is None else None

  def step(index: int | None) -> int | None:
    if index is None:
      return 0
    value = _element(module, body, body.root.name, index, None)
    return value[1] if value and value[0] == index else None

  (index, offset), direction, (bound_index, bound) = test
  if step(index) == 0:
    (index, offset), (bound_index, bound) = (bound_index, bound), test[0]
    direction = direction.translate(str.maketrans('LG', 'GL'))
  if index is None or step(bound_index) != 0:
    return None
  first, by = start(index), step(index)
  last = 0 if bound_index is None else start(bound_index)
  if first is None or last is None or not by:
    return None
  distance = last + bound - first - offset
  if direction == 'NE':
    return distance // by if distance % by == 0 and distance * by >= 0 else None
  if direction not in (('LT', 'LE') if by > 0 else ('GT', 'GE')):
    return None
  if direction.endswith('E'):
    distance += 1 if by > 0 else -1
  return max(-(-distance // by), 0)


def _test(
  module: Module, condition: Computation
) -> tuple[_Affine, str, _Affine] | None:
  """Returns the two sides of a loop's condition, if it only compares."""
  bindings = None
  while condition.root.opcode == 'fusion':
    operands = condition.root.operands
    bindings, condition = (
      [_affine(module, condition, name, bindings) for name in operands],
      module.computations[condition.root.called('calls')[0]],
    )
  if condition.root.opcode != 'compare':
    return None
  left, right = (
    _affine(module, condition, name, bindings)
    for name in condition.root.operands
  )
  if left is None or right is None:
    return None
  return left, condition.root.attribute('direction'), right


def _affine(
  module: Module,
  computation: Computation,
  name: str,
  bindings: Sequence[_Affine | None] | None,
) -> _Affine | None:
  """Evaluates a scalar integer as far as it is known.

  Args:
    module: of it all.
    computation: where `name` is; its one parameter is the state of a loop,
    name: the instruction that makes the integer.
    bindings: or its parameters are these.
  """
  i = computation.instructions[name]
  recur = lambda operand: _affine(module, computation, operand, bindings)
  if i.opcode == 'constant':
    is_integer = re.fullmatch(r'-?\d+', i.arguments.strip())
    return (None, int(i.arguments)) if is_integer else None
  if i.opcode == 'parameter':
    return None if bindings is None else bindings[int(i.arguments)]
  if i.opcode in _PASSING:
    return recur(i.operands[0])
  if i.opcode == 'get-tuple-element':
    index = int(i.attribute('index'))
    return _element(module, computation, i.operands[0], index, bindings)
  if i.opcode in ('add', 'subtract'):
    a, b = recur(i.operands[0]), recur(i.operands[1])
    if a is None or b is None:
      return None
    if i.opcode == 'subtract':
      return (a[0], a[1] - b[1]) if b[0] is None else None
    if a[0] is not None and b[0] is not None:
      return None
    return (b[0] if a[0] is None else a[0], a[1] + b[1])
  if i.opcode == 'fusion':
    inner = module.computations[i.called('calls')[0]]
    inside = [recur(operand) for operand in i.operands]
    return _affine(module, inner, inner.root.name, inside)
  return None


def _element(
  module: Module,
  computation: Computation,
  name: str,
  index: int,
  bindings: Sequence[_Affine | None] | None,
) -> _Affine | None:
  """Evaluates an element of the tuple that an instruction makes."""
  i = computation.instructions[name]
  if i.opcode == 'parameter' and bindings is None:
    return index, 0
  if i.opcode == 'tuple':
    return _affine(module, computation, i.operands[index], bindings)
  if i.opcode == 'fusion':
    inner = module.computations[i.called('calls')[0]]
    inside = [
      _affine(module, computation, operand, bindings) for operand in i.operands
    ]
    return _element(module, inner, inner.root.name, index, inside)
  return None
