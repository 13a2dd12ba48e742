"""The report of a compiled run, as data, as JSON and as text.

All times are lower bounds, for chips that do only one thing at their peak;
docs/reference/compile.md says what they leave out.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import math
import re
import textwrap
from typing import Any

from jaxline.aot import memory

SCHEMA = 1
_WIDTH = 80
_MAX_STATE = 4  # Of the state; a program's arguments list them again.
_MAX_NAMES = 8
_NUMBER = re.compile(r'(\d) (?=[A-Za-z]{1,3}\b)')
_TERA = 1e12
# XLA rounds allocations up to this; smaller differences mean nothing.
_SMALL = 1 << 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """What a program is compiled for.

  Attributes:
    name: of the topology, such as 'v4:4x4x4'; 'local' for the devices here.
    device_kind: as JAX names it.
    num_slices: how many such topologies; of local devices, groups that a
      slower network joins.
    num_devices: chips, in all.
    hbm_bytes: of a chip; None, as the following, where the chip is not known.
    peak_flops: of a chip, bfloat16, FLOP/s.
    hbm_bandwidth: of a chip, bytes/s.
    ici_bandwidth: of a chip, bytes/s, one way, by the links it has.
    dcn_bandwidth: of a chip, bytes/s, one way.
  """

  name: str
  device_kind: str
  num_slices: int
  num_devices: int
  hbm_bytes: float | None = None
  peak_flops: float | None = None
  hbm_bandwidth: float | None = None
  ici_bandwidth: float | None = None
  dcn_bandwidth: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
  """All collectives of one kind over the same mesh axes, in one step.

  Attributes:
    kind: as XLA names it, such as 'all-gather'.
    axes: of the mesh.
    count: how many.
    bytes: of the arrays, per chip, in all.
    wire_bytes: that a chip must send.
    dcn_bytes: those of them that must leave its slice.
  """

  kind: str
  axes: tuple[str, ...]
  count: int
  bytes: float
  wire_bytes: float
  dcn_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
  """How long a step takes at least, in seconds.

  Attributes:
    compute: FLOPs at the chip's peak.
    memory: bytes of HBM at its bandwidth.
    ici: bytes that are sent within a slice.
    dcn: bytes that are sent to other slices.
    mfu_bound: model FLOPs utilization of the longest of them, which they are
      together where they overlap wholly.
    mfu_sum: the same of their sum, where nothing overlaps.
  """

  compute: float
  memory: float
  ici: float
  dcn: float
  mfu_bound: float
  mfu_sum: float

  @property
  def times(self) -> dict[str, float]:
    """What is busy -> seconds."""
    return {
      'compute': self.compute,
      'memory': self.memory,
      'ICI': self.ici,
      'DCN': self.dcn,
    }

  @property
  def bound(self) -> float:
    """The longest time."""
    return max(self.times.values())

  @property
  def sum(self) -> float:
    """All times, one after the other."""
    return sum(self.times.values())


def roofline(
  target: Target,
  *,
  flops: float,
  hbm_bytes: float,
  traffic: Iterable[Traffic],
  model_flops: float,
) -> Roofline | None:
  """Returns how long a step takes at least.

  Args:
    target: the chips.
    flops: of the compiled program, of one chip.
    hbm_bytes: that it reads and writes, of one chip.
    traffic: its collectives.
    model_flops: of the model, in all.

  Returns:
    None where the chip is not known.
  """
  if not target.peak_flops or not target.hbm_bandwidth:
    return None
  traffic = list(traffic)
  dcn_bytes = sum(t.dcn_bytes for t in traffic)
  ici_bytes = sum(t.wire_bytes for t in traffic) - dcn_bytes

  def seconds(amount: float, rate: float | None) -> float:
    return amount / rate if amount and rate else 0.0

  times = {
    'compute': seconds(flops, target.peak_flops),
    'memory': seconds(hbm_bytes, target.hbm_bandwidth),
    'ici': seconds(ici_bytes, target.ici_bandwidth),
    'dcn': seconds(dcn_bytes, target.dcn_bandwidth),
  }
  ideal = model_flops / (target.num_devices * target.peak_flops)
  return Roofline(
    **times,
    mfu_bound=seconds(ideal, max(times.values())),
    mfu_sum=seconds(ideal, sum(times.values())),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """One compiled program, or its sizes that are known without a compiler.

  Attributes:
    name: 'train step' or 'eval step'.
    model_flops: of the model in one step, all chips together: matrix products
      and convolutions of the forward pass, and in training twice as many for
      the backward pass, without recomputation.
    flops: of the compiled program, per chip. This and the following are None
      without a compiler.
    hbm_bytes: that it reads and writes, per chip.
    argument_bytes: per chip: state, batch and key.
    output_bytes: per chip.
    alias_bytes: outputs that share the memory of arguments.
    temp_bytes: per chip, their largest sum.
    peak_bytes: arguments, outputs and temporaries; shared memory counts once.
    fits: whether the peak is within the chip's memory. For TPUs the compiler
      itself refuses a program that does not fit.
    traffic: collectives.
    roofline: None also if the chip is not known.
    compile_secs: the time of the compiler.
    unknown_loops: loops whose bodies are counted once, since the compiler does
      not say how often they run: with them the program takes longer.
    unknown_kernels: kernels whose FLOPs are not counted, since nothing says how
      many they are.
    buffers: the largest.
  """

  name: str
  model_flops: float
  flops: float | None = None
  hbm_bytes: float | None = None
  argument_bytes: int | None = None
  output_bytes: int | None = None
  alias_bytes: int | None = None
  temp_bytes: int | None = None
  peak_bytes: int | None = None
  fits: bool | None = None
  traffic: tuple[Traffic, ...] = ()
  roofline: Roofline | None = None
  compile_secs: float | None = None
  unknown_loops: tuple[str, ...] = ()
  unknown_kernels: tuple[str, ...] = ()
  buffers: tuple[memory.Buffer, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What is known of a run before it runs.

  Attributes:
    experiment: name of its class.
    target: the chips that it is compiled for.
    mesh: axis -> size, over all slices.
    sharding: name of the preset.
    batch_rows: rows of a global batch.
    parameters: number of weights.
    state_bytes: of the whole state, per chip: weights, optimizer, model state.
    gradient_bytes: per chip, if all gradients exist at once; with sums over
      parts of a batch, those of one such sum.
    batch_bytes: of one batch, per chip.
    bubble_fraction: part of a step in which a pipeline's stage idles.
    state_buffers: the largest arrays of the state.
    programs: the train step and the eval step.
    hints: suggested changes where it does not fit, most effective first.
    notes: what is missing in this report, and why.
    saved: where the compiled programs are; '' if they are not saved.
    versions: name -> version.
    schema: of the JSON.
  """

  experiment: str
  target: Target
  mesh: Mapping[str, int]
  sharding: str
  batch_rows: int
  parameters: int
  state_bytes: int
  gradient_bytes: int
  batch_bytes: int
  bubble_fraction: float
  state_buffers: tuple[memory.Buffer, ...]
  programs: tuple[Program, ...]
  hints: tuple[str, ...] = ()
  notes: tuple[str, ...] = ()
  saved: str = ''
  versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  schema: int = SCHEMA

  @property
  def fits(self) -> bool:
    """Whether nothing is known not to fit."""
    return all(program.fits is not False for program in self.programs)

  def to_json(self) -> dict[str, Any]:
    """Returns plain values, for `json.dump`."""
    return json.loads(json.dumps(dataclasses.asdict(self)))

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> 'Report':
    """Returns the report that `to_json` was called of.

    Raises:
      ValueError: another version of this program wrote it.
    """
    if (schema := values.get('schema')) != SCHEMA:
      raise ValueError(
        f'The report has schema {schema}, expected {SCHEMA}; make it anew with'
        ' --jaxline_mode=compile.'
      )
    return cls(
      **{
        **values,
        'target': Target(**values['target']),
        'state_buffers': _buffers(values['state_buffers']),
        'programs': tuple(_program(p) for p in values['programs']),
        'hints': tuple(values['hints']),
        'notes': tuple(values['notes']),
      }
    )

  def __str__(self) -> str:
    return '\n'.join(_lines(self))


def _buffers(values: Iterable[Mapping[str, Any]]) -> tuple[memory.Buffer, ...]:
  return tuple(memory.Buffer(**value) for value in values)


def _program(values: Mapping[str, Any]) -> Program:
  return Program(
    **{
      **values,
      'traffic': tuple(
        Traffic(**{**t, 'axes': tuple(t['axes'])}) for t in values['traffic']
      ),
      'roofline': values['roofline'] and Roofline(**values['roofline']),
      'unknown_loops': tuple(values['unknown_loops']),
      'unknown_kernels': tuple(values['unknown_kernels']),
      'buffers': _buffers(values['buffers']),
    }
  )


# Text.


def size_text(num_bytes: float) -> str:
  """Returns a size as people read it, such as '3.52 GiB'."""
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if abs(num_bytes) < 1024 or unit == 'GiB':
      break
    num_bytes /= 1024
  return f'{num_bytes:.0f} B' if unit == 'B' else f'{num_bytes:.2f} {unit}'


def _count(number: float) -> str:
  """Returns a number with three digits and a unit, such as '1.10 T'."""
  power = min(max(int(math.log10(number)) // 3, 0), 6) if number else 0
  unit = ('', ' k', ' M', ' G', ' T', ' P', ' E')[power]
  return f'{number:.0f}' if not power else f'{number / 1000**power:.2f}{unit}'


def _time(seconds: float) -> str:
  for unit, size in (('s', 1.0), ('ms', 1e-3)):
    if seconds >= size:
      return f'{seconds / size:.2f} {unit}'
  return f'{seconds * 1e6:.2f} us'


def _wrap(first: str, text: str) -> Iterable[str]:
  """Yields lines, of which all but the first are indented as far as its text.

  A number stays with its unit.
  """
  for line in textwrap.wrap(
    _NUMBER.sub('\\1\N{NO-BREAK SPACE}', text),
    _WIDTH,
    initial_indent=first,
    subsequent_indent=' ' * len(first),
    break_long_words=False,
    break_on_hyphens=False,
  ):
    yield line.replace('\N{NO-BREAK SPACE}', ' ')


def _row(label: str, text: str) -> Iterable[str]:
  return _wrap(f'  {label:<19}', text)


def _lines(report: Report) -> Iterable[str]:
  target = report.target
  slices = f'{target.num_slices} x ' if target.num_slices > 1 else ''
  yield f'{report.experiment} on {slices}{target.name} ({target.device_kind})'
  mesh = ', '.join(f'{axis} {size}' for axis, size in report.mesh.items())
  devices = 'device' if target.num_devices == 1 else 'devices'
  yield from _row('mesh', f'{target.num_devices} {devices}: {mesh}')
  yield from _row('sharding', report.sharding)
  yield from _row('parameters', f'{report.parameters:,}')
  yield from _row(
    'global batch',
    f'{report.batch_rows} rows; {size_text(report.batch_bytes)} per chip',
  )
  if report.bubble_fraction:
    yield from _row(
      'pipeline bubble', f'{report.bubble_fraction:.1%} of each stage'
    )
  yield from _row(
    'state per chip',
    size_text(report.state_bytes)
    + _share(report.state_bytes, target.hbm_bytes)
    + f'; gradients {size_text(report.gradient_bytes)}',
  )
  yield from _buffer_lines(report.state_buffers[:_MAX_STATE])
  for program in report.programs:
    yield ''
    yield program.name
    yield from _program_lines(program, target)
  for title, texts in (
    ('Suggested changes, most effective first', report.hints),
    ('Notes', report.notes),
  ):
    if texts:
      yield ''
      yield title
      for text in texts:
        yield from _wrap('  - ', text)
  yield ''
  if report.saved:
    yield from _row('saved programs', report.saved)
  versions = ', '.join(f'{k} {v}' for k, v in report.versions.items())
  yield from _row('versions', versions)


def _share(num_bytes: float, hbm_bytes: float | None) -> str:
  if not hbm_bytes:
    return ''
  return f' of {size_text(hbm_bytes)} ({num_bytes / hbm_bytes:.0%})'


def _buffer_lines(buffers: Sequence[memory.Buffer]) -> Iterable[str]:
  for buffer in buffers:
    size = size_text(buffer.bytes)
    line = f'    {size:>10}  {buffer.shape}  {buffer.name or buffer.kind}'
    # The end of a path says more than its beginning.
    if len(line) > _WIDTH:
      head = f'    {size:>10}  {_shorten(buffer.shape, 28)}  ..'
      line = head + line[len(line) - (_WIDTH - len(head)) :]
    yield line


def _shorten(text: str, width: int) -> str:
  return text if len(text) <= width else f'{text[: width - 2]}..'


def _program_lines(program: Program, target: Target) -> Iterable[str]:
  if program.peak_bytes is not None:
    yield from _row('peak per chip', _peak_text(program, target))
  if program.argument_bytes is not None:
    parts = (
      ('arguments', program.argument_bytes),
      ('outputs', program.output_bytes),
      ('shared by both', program.alias_bytes),
      ('temporaries', program.temp_bytes),
    )
    yield from _row(
      '' if program.peak_bytes is not None else 'per chip',
      ', '.join(f'{k} {size_text(v)}' for k, v in parts if v is not None),
    )
  yield from _buffer_lines([b for b in program.buffers if b.bytes >= _SMALL])
  if program.peak_bytes is None and program.fits is False:
    yield from _row('', 'DOES NOT FIT: these alone are more than a chip has')
  text = _count(program.model_flops)
  if target.peak_flops:
    peak = target.num_devices * target.peak_flops
    text += f'; {_time(program.model_flops / peak)} at the peak of all chips'
  yield from _row('model FLOPs', text)
  if program.flops is None:
    return
  total = program.flops * target.num_devices
  ratio = (
    f' ({total / program.model_flops:.2f} x)' if program.model_flops else ''
  )
  yield from _row(
    'compiled FLOPs',
    f'{_count(total)}{ratio}; {_count(program.flops)} per chip',
  )
  if program.hbm_bytes is not None:
    yield from _row(
      'memory traffic', f'{size_text(program.hbm_bytes)} per chip'
    )
  for t in program.traffic:
    axes = ' x '.join(t.axes) or 'no axis'
    text = f'{t.count} over {axes}: {size_text(t.bytes)}'
    if t.dcn_bytes:
      text += f', of which sent to other slices {size_text(t.dcn_bytes)}'
    yield from _row(t.kind, text)
  if program.roofline:
    r = program.roofline
    yield from _row(
      'at least',
      ', '.join(f'{k} {_time(v)}' for k, v in r.times.items() if v),
    )
    longest = max(r.times, key=lambda key: r.times[key])
    yield from _row(
      'MFU at most',
      f'{r.mfu_bound:.1%} (bound by {longest}, {_time(r.bound)});'
      f' {r.mfu_sum:.1%} where nothing overlaps ({_time(r.sum)})',
    )
  for what, names in (
    ('loops counted once', program.unknown_loops),
    ('kernels not counted', program.unknown_kernels),
  ):
    if names:
      yield from _row(what, ', '.join(names[:_MAX_NAMES]))
  if program.compile_secs is not None:
    yield from _row('compiled in', f'{program.compile_secs:.1f} s')


def _peak_text(program: Program, target: Target) -> str:
  assert program.peak_bytes is not None
  text = size_text(program.peak_bytes)
  if not target.hbm_bytes:
    return text if program.fits is None else f'{text}: DOES NOT FIT'
  text += f' of {size_text(target.hbm_bytes)}'
  rest = target.hbm_bytes - program.peak_bytes
  if program.fits is False:
    # The compiler may have less to give than what is published.
    return f'{text}: DOES NOT FIT' + (
      f', {size_text(-rest)} too much' if rest < 0 else ''
    )
  return f'{text}: fits, {size_text(rest)} to spare'
