"""The report of a compiled run, as data, as JSON and as text.

docs/reference/compile.md explains each line, and what the times leave out.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import math
import textwrap

from jaxline import chips
from jaxline.aot import measure
from jaxline.aot import memory
from jaxline.metrics import lines as lines_lib

SCHEMA = 3
_WIDTH = 80
_MAX_NAMES = 8
# XLA rounds allocations up to this; smaller differences mean nothing.
_SMALL = 1 << 12
# For a run that does not fit; the report's sizes say which one helps most.
_HINTS = (
  'A smaller batch, or config.gradient_accumulation_steps: less of the forward'
  ' pass is kept at once.',
  'More rematerialisation (`remat` of the model): less of it is kept at all.',
  "Weights and optimizer split over more chips: config.sharding = 'fsdp' or"
  " 'fsdp_tp', and more of config.mesh.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """What a program is compiled for.

  Attributes:
    name: of the topology, such as 'v4:4x4x4'; 'local' for the devices here.
    device_kind: as JAX names it.
    num_slices: how many such topologies a slower network joins.
    num_devices: chips, in all.
    chip: one of them, with the links that it has in this topology; None if it
      is not known.
  """

  name: str
  device_kind: str
  num_slices: int
  num_devices: int
  chip: chips.Chip | None = None

  @property
  def hbm_bytes(self) -> float:
    """Memory of a chip; infinite if it is not known."""
    return self.chip.hbm_bytes if self.chip else math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
  """How long a step takes at least.

  Attributes:
    seconds: of 'compute', 'memory', 'ICI' and 'DCN' alone, each at its peak.
    mfu_bound: model FLOPs utilization if all four overlap completely.
    mfu_sum: the same if nothing overlaps.
  """

  seconds: Mapping[str, float]
  mfu_bound: float
  mfu_sum: float


def roofline(
  target: Target, measures: measure.Measures, model_flops: float
) -> Roofline | None:
  """Returns how long a step takes at least; None if the chip is not known.

  `model_flops` counts all chips together.
  """
  chip = target.chip
  if chip is None:
    return None
  dcn_bytes = sum(t.dcn_bytes for t in measures.traffic)
  ici_bytes = sum(t.wire_bytes for t in measures.traffic) - dcn_bytes
  divide = lambda amount, rate: amount / rate if amount and rate else 0.0
  seconds = {
    'compute': divide(measures.flops, chip.peak_flops),
    'memory': divide(measures.hbm_bytes, chip.hbm_bandwidth),
    'ICI': divide(ici_bytes, chip.ici_bandwidth),
    'DCN': divide(dcn_bytes, chip.dcn_bandwidth),
  }
  ideal = model_flops / (target.num_devices * chip.peak_flops)
  return Roofline(
    seconds=seconds,
    mfu_bound=divide(ideal, max(seconds.values())),
    mfu_sum=divide(ideal, sum(seconds.values())),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A step. Sizes are per chip, None if the compiler does not tell them.

  Attributes:
    name: 'train step' or 'eval step'.
    model_flops: of the model in one step, all chips together, without
      recomputation.
    temp_bytes: the largest sum of temporaries.
    peak_bytes: arguments, outputs and temporaries; shared memory counts once.
    fits: whether the peak is within the chip's memory. For TPUs the compiler
      itself refuses a program that does not fit.
    measures: of the compiled program, per chip.
    roofline: its bounds.
    compile_secs: the time of the compiler.
    buffers: the largest.
  """

  name: str
  model_flops: float
  temp_bytes: int | None = None
  peak_bytes: int | None = None
  fits: bool | None = None
  measures: measure.Measures | None = None
  roofline: Roofline | None = None
  compile_secs: float | None = None
  buffers: tuple[memory.Buffer, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What is known of a run before it runs. Sizes are per chip.

  Attributes:
    experiment: name of its class.
    target: the chips that it is compiled for.
    mesh: axis -> size, over all slices.
    sharding: name of the preset.
    batch_rows: rows of a global batch.
    parameters: number of weights.
    state_bytes: weights, optimizer and model state.
    batch_bytes: one batch.
    bubble_fraction: part of a step in which a pipeline's stage idles.
    programs: the train step and the eval step.
    notes: what is missing in this report, and why.
    versions: of jax, jaxlib and libtpu.
    schema: of the JSON.
  """

  experiment: str
  target: Target
  mesh: Mapping[str, int]
  sharding: str
  batch_rows: int
  parameters: int
  state_bytes: int
  batch_bytes: int
  bubble_fraction: float
  programs: tuple[Program, ...]
  notes: tuple[str, ...] = ()
  versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  schema: int = SCHEMA

  @property
  def fits(self) -> bool:
    """Whether nothing is known not to fit."""
    return all(program.fits is not False for program in self.programs)

  def __str__(self) -> str:
    return '\n'.join(_lines(self))


# Text.


_size = functools.partial(lines_lib.size, digits='.2f')


def _scaled(
  value: float, units: Sequence[str] = ('', 'k', 'M', 'G', 'T', 'P', 'E')
) -> str:
  """Returns a number with a unit, such as '1.10 T'."""
  power = 0
  while abs(value) >= 1000 and power < len(units) - 1:
    value, power = value / 1000, power + 1
  return f'{value:.{2 if power else 0}f} {units[power]}'.strip()


def _time(seconds: float) -> str:
  return _scaled(1e6 * seconds, ('us', 'ms', 's'))


def _wrap(first: str, text: str) -> Iterable[str]:
  """Returns lines, indented as far as the text of the first."""
  return textwrap.wrap(
    text,
    _WIDTH,
    initial_indent=first,
    subsequent_indent=' ' * len(first),
    break_long_words=False,
    break_on_hyphens=False,
  )


def _lines(report: Report) -> Iterable[str]:
  target = report.target
  slices = f'{target.num_slices} x ' if target.num_slices > 1 else ''
  yield f'{report.experiment} on {slices}{target.name} ({target.device_kind})'
  yield from _table(_run_rows(report))
  for program in report.programs:
    yield ''
    yield program.name
    yield from _table(_program_rows(program, target))
  for title, texts in (
    ('Suggested changes', () if report.fits else _HINTS),
    ('Notes', report.notes),
  ):
    if texts:
      yield ''
      yield title
      for text in texts:
        yield from _wrap('  - ', text)
  yield ''
  versions = ', '.join(f'{k} {v}' for k, v in report.versions.items())
  yield from _table([('versions', versions)])


def _table(rows: Iterable[tuple[str, str]]) -> Iterable[str]:
  """Yields the lines of rows with a text; buffers are rows without a label."""
  for label, text in rows:
    if label == '' and text:
      yield text
    elif text:
      yield from _wrap(f'  {label:<19}', text)


def _run_rows(report: Report) -> Iterable[tuple[str, str]]:
  count, hbm_bytes = report.target.num_devices, report.target.hbm_bytes
  mesh = ', '.join(f'{axis} {size}' for axis, size in report.mesh.items())
  yield 'mesh', f'{count} device{"s" if count > 1 else ""}: {mesh}'
  yield 'sharding', report.sharding
  yield 'parameters', f'{report.parameters:,}'
  batch = _size(report.batch_bytes)
  yield 'global batch', f'{report.batch_rows} rows; {batch} per chip'
  if report.bubble_fraction:
    yield 'pipeline bubble', f'{report.bubble_fraction:.1%} of each stage'
  text = _size(report.state_bytes)
  if report.target.chip:
    text += f' of {_size(hbm_bytes)} ({report.state_bytes / hbm_bytes:.0%})'
  yield 'state per chip', text


def _program_rows(
  program: Program, target: Target
) -> Iterable[tuple[str, str]]:
  yield 'peak per chip', _peak_text(program, target)
  if program.temp_bytes is not None:
    yield 'temporaries', _size(program.temp_bytes)
  for buffer in program.buffers:
    if buffer.bytes >= _SMALL:
      yield '', _buffer_text(buffer)
  text = _scaled(program.model_flops)
  if target.chip:
    peak = target.num_devices * target.chip.peak_flops
    text += f'; {_time(program.model_flops / peak)} at the peak of all chips'
  yield 'model FLOPs', text
  if measures := program.measures:
    total = measures.flops * target.num_devices
    text = _scaled(total)
    if program.model_flops:
      text += f' ({total / program.model_flops:.2f} x)'
    yield 'compiled FLOPs', f'{text}; {_scaled(measures.flops)} per chip'
    yield 'memory traffic', f'{_size(measures.hbm_bytes)} per chip'
    for t in measures.traffic:
      axes = ' x '.join(t.axes) or 'no axis'
      text = f'{t.count} over {axes}: {_size(t.bytes)}'
      if t.dcn_bytes:
        text += f', of which sent to other slices {_size(t.dcn_bytes)}'
      yield t.kind, text
    loops, kernels = measures.unknown_loops, measures.unknown_kernels
    yield 'loops counted once', ', '.join(loops[:_MAX_NAMES])
    yield 'kernels not counted', ', '.join(kernels[:_MAX_NAMES])
  if r := program.roofline:
    times = (f'{k} {_time(v)}' for k, v in r.seconds.items() if v)
    yield 'at least', ', '.join(times)
    longest = max(r.seconds, key=lambda key: r.seconds[key])
    yield (
      'MFU at most',
      f'{r.mfu_bound:.1%} (bound by {longest}, {_time(r.seconds[longest])});'
      f' {r.mfu_sum:.1%} where nothing overlaps'
      f' ({_time(sum(r.seconds.values()))})',
    )
  if program.compile_secs is not None:
    yield 'compiled in', f'{program.compile_secs:.1f} s'


def _peak_text(program: Program, target: Target) -> str:
  peak, fits = program.peak_bytes, program.fits
  if peak is None:
    return '' if fits is None else 'DOES NOT FIT'
  text = _size(peak)
  if target.chip:
    text += f' of {_size(target.hbm_bytes)}'
  if fits is None:
    return text
  rest = target.hbm_bytes - peak
  if fits:
    return f'{text}: fits, {_size(rest)} to spare'
  # The compiler may have less memory to give than what is published.
  much = f', {_size(-rest)} too much' if rest < 0 else ''
  return f'{text}: DOES NOT FIT{much}'


def _buffer_text(buffer: memory.Buffer) -> str:
  """Returns a line; of a long path the end says more than the beginning."""
  line = f'    {_size(buffer.bytes):>10}  {buffer.shape}  '
  name, room = buffer.name or buffer.kind, _WIDTH - len(line)
  return line + (name if len(name) <= room else f'..{name[2 - room :]}')
