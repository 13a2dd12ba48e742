"""The largest buffers of a program, from XLA's report on its memory.

With `--xla_dump_to` XLA writes how it assigned buffers to memory, and the
scheduled program that they belong to. It also does so if the program does not
fit, when there is no compiled object.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import pathlib
import re
import tempfile

_ASSIGNMENT = '*buffer-assignment.txt'
_MODULE = '*after_optimizations.txt'

_ALLOCATION = re.compile(
  r'^allocation \d+: size (?P<size>\d+),'
  r'(?: color (?P<color>\d+),)?'
  r'(?: page \d+,)? (?P<rest>.*)$'
)
_VALUE = re.compile(
  r'^ value: <\d+ (?P<name>[\w.\-]+)(?:\{[\d,]*\})? @(?P<color>\d+)>'
  r' \(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)$'
)
_INSTRUCTION = re.compile(
  r'^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = .*?'
  r'metadata=\{[^}]*?op_name="(?P<op_name>(?:[^"\\]|\\.)*)"'
)
_PARAMETER = re.compile(r' parameter\((\d+)\)')
_LAYOUT = re.compile(r'\{[^{}]*\}')


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


class Dump:
  """What XLA wrote while it compiled one program.

  Attributes:
    options: for `compiler_options` of `Lowered.compile`.
  """

  def __init__(self, directory: pathlib.Path):
    self._directory = directory
    self.options: Mapping[str, str | bool] = {
      'xla_dump_to': str(directory),
      'xla_dump_hlo_as_text': True,
    }

  def module(self) -> str:
    """Returns the scheduled program of one chip; '' if there is none."""
    return self._read(_MODULE)

  def buffers(self) -> list[Buffer]:
    """Returns the program's buffers, the largest first; see `buffers`."""
    return buffers(self._read(_ASSIGNMENT), self.module())

  def total_bytes(self) -> int:
    """Returns the bytes that the program needs; 0 if XLA does not say."""
    return total_bytes(self._read(_ASSIGNMENT))

  def _read(self, pattern: str) -> str:
    # XLA compiles small programs besides, such as of constants.
    found = sorted(
      self._directory.glob(pattern), key=lambda path: path.stat().st_size
    )
    return found[-1].read_text(encoding='utf-8') if found else ''


@contextlib.contextmanager
def dump() -> Iterator[Dump]:
  """Yields a place for XLA to write to, which is removed in the end."""
  with tempfile.TemporaryDirectory(prefix='jaxline_xla_') as directory:
    yield Dump(pathlib.Path(directory))


def buffers(assignment: str, module: str) -> list[Buffer]:
  """Returns the buffers of a program in the chip's main memory.

  Of the temporaries, which take turns in one stretch of memory, those that
  cover it in the end when the largest are laid down first: none overlaps
  another, so that they can be added. What fills the memory at the worst moment
  is mostly, but not exactly, these.

  Args:
    assignment: XLA's `buffer-assignment.txt`.
    module: the program they belong to, as text, for their names.

  Returns:
    The largest first.
  """
  names, parameters = _names(module)
  found: list[Buffer] = []
  kind = ''
  values: list[tuple[int, int, str, str]] = []  # Size, offset, shape, name.

  def close() -> None:
    taken: list[tuple[int, int]] = []
    for size, offset, shape, name in sorted(values, key=lambda v: -v[0]):
      if all(offset + size <= a or b <= offset for a, b in taken):
        taken.append((offset, offset + size))
        found.append(Buffer(bytes=size, shape=shape, kind=kind, name=name))
    values.clear()

  for line in assignment.splitlines():
    if match := _ALLOCATION.match(line):
      close()
      kind = _kind(match['rest']) if not int(match['color'] or 0) else ''
      if kind == 'argument':
        shape = match['rest'].partition('|')[2].partition('|')[0]
        found.append(
          Buffer(
            bytes=int(match['size']),
            shape=_LAYOUT.sub('', shape),
            kind=kind,
            name=_parameter_name(match['rest'], parameters),
          )
        )
        kind = ''
    elif kind and (match := _VALUE.match(line)) and match['color'] == '0':
      shape = _LAYOUT.sub('', match['shape'])
      name = names.get(match['name'], '')
      values.append((int(match['size']), int(match['offset']), shape, name))
  close()
  return sorted(found, key=lambda b: (-b.bytes, b.kind, b.name))


def _kind(rest: str) -> str:
  """What an allocation is for; '' if it takes no memory to speak of."""
  if rest.startswith('parameter'):
    return 'argument'
  if 'thread-local' in rest:
    return ''
  if 'constant' in rest:
    return 'constant'
  return 'output' if 'maybe-live-out' in rest else 'temporary'


def _parameter_name(rest: str, parameters: Mapping[str, str]) -> str:
  number = re.match(r'parameter (\d+)', rest)
  name = parameters.get(number[1], '') if number else ''
  index = re.search(r'at ShapeIndex \{([\d,]+)\}', rest)
  return f'{name}{{{index[1]}}}' if index else name


def _names(module: str) -> tuple[dict[str, str], dict[str, str]]:
  """Returns instruction -> op_name, and parameter number -> its name."""
  names, parameters = {}, {}
  in_entry = False
  for line in module.splitlines():
    if line.startswith('ENTRY'):
      in_entry = True
    elif line.startswith('}'):
      in_entry = False
    if match := _INSTRUCTION.match(line):
      op_name = re.sub(r'\\(.)', r'\1', match['op_name'])
      names[match['name']] = op_name
      if in_entry and (number := _PARAMETER.search(line)):
        parameters[number[1]] = op_name
  return names, parameters


def total_bytes(assignment: str) -> int:
  """Returns the bytes of the chip's main memory in an assignment.

  Args:
    assignment: XLA's `buffer-assignment.txt`; '' needs nothing.
  """
  matches = map(_ALLOCATION.match, assignment.splitlines())
  return sum(
    int(match['size'])
    for match in matches
    if match and not int(match['color'] or 0) and _kind(match['rest'])
  )


_OOM = re.compile(
  r'total memory required for [^(]*\((?P<needed>[\d.]+)(?P<unit>[KMGT]?)\)'
  r'|Used (?P<used>[\d.]+)(?P<used_unit>[KMGT]?) of'
)
_UNITS = {'': 0, 'K': 1, 'M': 2, 'G': 3, 'T': 4}


def needed_bytes(error: str) -> int | None:
  """Returns the memory of a chip that a program needs which does not fit.

  Args:
    error: the message of the TPU compiler.

  Returns:
    Bytes, to the 1% that the message has; None where this is another error.
  """
  match = 'RESOURCE_EXHAUSTED' in error and _OOM.search(error)
  if not match:
    return None
  number, unit = match['needed'], match['unit']
  if number is None:
    number, unit = match['used'], match['used_unit']
  return int(float(number) * 1024 ** _UNITS[unit])
