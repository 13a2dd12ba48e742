"""The largest buffers of a program, from what XLA dumps about its memory.

It dumps a program that does not fit too, for which there is no compiled object.
"""

import dataclasses
import pathlib
import re

from jaxline.aot import hlo

_ALLOCATION = re.compile(
  r'^allocation \d+: size (?P<size>\d+),'
  r'(?: color (?P<color>\d+),)?'
  r'(?: page \d+,)? (?P<rest>.*)$'
)
_VALUE = re.compile(
  r'^ value: <\d+ (?P<name>[\w.\-]+)(?:\{[\d,]*\})? @0>'
  r' \(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)$'
)
_OUT_OF_MEMORY = re.compile(
  r'RESOURCE_EXHAUSTED.*(total memory required|memory space hbm)', re.DOTALL
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
  """A piece of a chip's memory.

  Attributes:
    bytes: its size, padded as the chip needs it.
    shape: of a chip's part of the array, such as 'f32[2,128]'.
    kind: 'argument', 'output', 'constant' or 'temporary'.
    name: of an argument, its path, such as "state.params['w']"; else the
      operation that makes it, as JAX names it; '' if it has none.
  """

  bytes: int
  shape: str
  kind: str
  name: str


def dump_options(directory: pathlib.Path) -> dict[str, str | bool]:
  """Returns `compiler_options` with which XLA writes what `dumped` reads."""
  return {'xla_dump_to': str(directory), 'xla_dump_hlo_as_text': True}


def dumped(directory: pathlib.Path) -> tuple[str, str]:
  """Returns the scheduled program and its buffer assignment, or ''."""

  def read(pattern: str) -> str:
    # XLA compiles small programs besides, such as of constants.
    found = directory.glob(pattern)
    largest = max(found, key=lambda path: path.stat().st_size, default=None)
    return largest.read_text(encoding='utf-8') if largest else ''

  return read('*after_optimizations.txt'), read('*buffer-assignment.txt')


def is_out_of_memory(error: Exception) -> bool:
  """Says whether a compiler's error is that a program does not fit."""
  return _OUT_OF_MEMORY.search(str(error)) is not None


def total_bytes(assignment: str) -> int:
  """Returns the bytes of the chip's main memory in an assignment."""
  matches = map(_ALLOCATION.match, assignment.splitlines())
  return sum(int(m['size']) for m in matches if m and _kind(m))


def buffers(assignment: str, module: hlo.Module) -> list[Buffer]:
  """Returns the buffers of a program in the chip's main memory, largest first.

  Temporaries share memory at different times: the largest that do not overlap
  are listed, which is mostly what fills the memory at the worst moment. The
  program `module` has their names.
  """
  instructions = {
    name: instruction
    for computation in module.computations.values()
    for name, instruction in computation.instructions.items()
  }
  values: list[tuple[int, int, int, Buffer]] = []
  number, kind = 0, ''
  for line in assignment.splitlines():
    if match := _ALLOCATION.match(line):
      number, kind = number + 1, _kind(match)
      if kind == 'argument':
        argument = _argument(match, module)
        values.append((argument.bytes, number, 0, argument))
    elif kind not in ('', 'argument') and (match := _VALUE.match(line)):
      maker = instructions.get(match['name'])
      buffer = Buffer(
        bytes=int(match['size']),
        shape=_without_layout(match['shape']),
        kind=kind,
        name=maker.op_name if maker else '',
      )
      values.append((buffer.bytes, number, int(match['offset']), buffer))
  found: list[Buffer] = []
  taken: dict[int, list[tuple[int, int]]] = {}
  for size, number, offset, buffer in sorted(values, key=lambda v: -v[0]):
    ranges = taken.setdefault(number, [])
    if all(offset + size <= a or b <= offset for a, b in ranges):
      ranges.append((offset, offset + size))
      found.append(buffer)
  return sorted(found, key=lambda b: (-b.bytes, b.kind, b.name))


def _kind(allocation: re.Match[str]) -> str:
  """Returns what an allocation is for; '' if it is not in main memory."""
  rest = allocation['rest']
  if int(allocation['color'] or 0) or 'thread-local' in rest:
    return ''
  if rest.startswith('parameter'):
    return 'argument'
  if 'constant' in rest:
    return 'constant'
  return 'output' if 'maybe-live-out' in rest else 'temporary'


def _argument(allocation: re.Match[str], module: hlo.Module) -> Buffer:
  rest = allocation['rest']
  parameter = module.entry.parameters.get(int(rest.split()[1].strip(',')))
  name = parameter.op_name if parameter else ''
  index = re.search(r'at ShapeIndex (\{[\d,]+\})', rest)
  return Buffer(
    bytes=int(allocation['size']),
    shape=_without_layout(rest.partition('|')[2].partition('|')[0]),
    kind='argument',
    name=name + (index[1] if index else ''),
  )


def _without_layout(shape: str) -> str:
  return re.sub(r'\{[^{}]*\}', '', shape)
