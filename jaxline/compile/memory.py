"""Reads the largest buffers of a program from XLA's dump of its memory.

XLA dumps a program even if it does not fit and so is not compiled.
"""

import dataclasses
import pathlib
import re

from jaxline.compile import hlo

_ALLOCATION = re.compile(
  r'^allocation \d+: size (?P<size>\d+),'
  r'(?: color (?P<color>\d+),)?'
  r'(?: page \d+,)? (?P<rest>.*)$'
)
_VALUE = re.compile(
  r'^ value: <\d+ (?P<name>[\w.\-]+)(?P<index>\{[\d,]*\})? @0>'
  r' \(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)$'
)
_OUT_OF_MEMORY = re.compile(
  r'RESOURCE_EXHAUSTED.*(total memory required|memory space hbm)', re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Buffer:
  """A part of a chip's memory."""

  bytes: int  # The size with the chip's padding.
  shape: str  # A chip's part of the array, such as 'f32[2,128]'.
  kind: str  # 'argument', 'output', 'constant' or 'temporary'.
  # The path of an argument, such as "state.params['w']"; for other buffers,
  # JAX's name of the operation that makes it, or ''.
  name: str


def dumped(directory: str) -> tuple[str, str]:
  """Returns the scheduled program and its buffers; '' if there is no dump."""

  def read(pattern: str) -> str:
    # XLA compiles small programs too, such as programs of constants.
    found = pathlib.Path(directory).glob(pattern)
    largest = max(found, key=lambda path: path.stat().st_size, default=None)
    return largest.read_text(encoding='utf-8') if largest else ''

  return read('*after_optimizations.txt'), read('*buffer-assignment.txt')


def is_out_of_memory(error: Exception) -> bool:
  """Returns whether a compiler's error means that a program does not fit."""
  return _OUT_OF_MEMORY.search(str(error)) is not None


def buffers(assignment: str, module: hlo.Module) -> tuple[int, list[Buffer]]:
  """Returns the main memory in use, and its buffers, the largest first.

  Temporaries share memory at different times. The list has the largest ones
  that do not overlap, which mostly fill the memory at its peak. `module` is the
  program, whose instructions have the buffers' names.
  """
  instructions = {
    name: instruction
    for computation in module.entry.others.values()
    for name, instruction in computation.instructions.items()
  }
  values: list[tuple[int, int, Buffer]] = []
  total = number = 0
  kind = ''
  for line in assignment.splitlines():
    if match := _ALLOCATION.match(line):
      number, kind = number + 1, _kind(match)
      total += int(match['size']) if kind else 0
    elif kind and (match := _VALUE.match(line)):
      maker, name = instructions.get(match['name']), ''
      if maker:
        index = match['index'] if maker.opcode == 'parameter' else ''
        name = maker.op_name + (index or '')
      shape = re.sub(r'\{[^{}]*\}', '', match['shape'])
      buffer = Buffer(int(match['size']), shape, kind, name)
      values.append((number, int(match['offset']), buffer))
  found: list[Buffer] = []
  taken: dict[int, list[tuple[int, int]]] = {}
  # A donated argument comes before the value that replaces it.
  for number, offset, buffer in sorted(values, key=lambda v: -v[2].bytes):
    end, ranges = offset + buffer.bytes, taken.setdefault(number, [])
    if all(end <= a or b <= offset for a, b in ranges):
      ranges.append((offset, end))
      found.append(buffer)
  return total, sorted(found, key=lambda b: (-b.bytes, b.kind, b.name))


def _kind(allocation: re.Match[str]) -> str:
  """Returns the kind of an allocation; '' if it is not in main memory."""
  rest = allocation['rest']
  if int(allocation['color'] or 0) or 'thread-local' in rest:
    return ''
  if rest.startswith('parameter'):
    return 'argument'
  if 'constant' in rest:
    return 'constant'
  return 'output' if 'maybe-live-out' in rest else 'temporary'
