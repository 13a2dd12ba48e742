"""Reports a compiled run as data, as JSON and as text.

docs/reference/compile.md explains each line and the limits of the times.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import textwrap

from jaxline.base import chips
from jaxline.compile import measure
from jaxline.compile import memory
from jaxline.metrics import lines as lines_lib

_WIDTH = 80
_MAX_NAMES = 8
# Hints for a run that does not fit. The report's sizes show which helps most.
_HINTS = (
  'Use a smaller batch or config.gradient_accumulation_steps, so that less of'
  ' the forward pass is kept at once.',
  'Rematerialize more (`remat` of the model), so that less of it is kept.',
  "Shard weights and optimizer over more chips: config.sharding = 'fsdp' or"
  " 'fsdp_tp', and a larger config.mesh.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """The devices for which a program is compiled."""

  name: str  # A topology such as 'v4:4x4x4'; 'local' means jax.devices().
  device_kind: str
  num_slices: int  # The number of topologies, which a slower network joins.
  num_devices: int  # The number of chips in all slices.
  # One of the chips, with its links in this topology.
  chip: chips.Chip | None

  @property
  def hbm_bytes(self) -> float:
    """The memory of a chip; infinite if unknown."""
    return self.chip.hbm_bytes if self.chip else math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
  """A lower bound on the time of a step."""

  # The times of 'compute', 'memory', 'ICI' and 'DCN', each at its peak rate.
  seconds: Mapping[str, float]
  mfu_bound: float  # Model FLOPs utilization if all four overlap completely.
  mfu_sum: float  # Model FLOPs utilization if none of them overlap.


def roofline(
  target: Target, measures: measure.Measures, model_flops: float
) -> Roofline | None:
  """Returns a lower bound on the time of a step; None if the chip is unknown.

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
  """A step. Sizes are per chip."""

  name: str
  model_flops: float  # The sum over all chips, without recomputation.
  # The largest sum of temporaries; unknown for a program that does not fit.
  temp_bytes: int | None
  # Arguments, outputs and temporaries; shared memory counts once.
  peak_bytes: int
  # None means unknown. TPUs' compiler rejects a program that does not fit.
  fits: bool | None
  measures: measure.Measures
  roofline: Roofline | None
  compile_secs: float
  buffers: Sequence[memory.Buffer]  # The eight largest.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
  """The costs of a run, computed before it runs. Sizes are per chip."""

  experiment: str
  target: Target
  mesh: Mapping[str, int]
  sharding: str
  batch_rows: int
  parameters: int
  state_bytes: int
  batch_bytes: int
  programs: Sequence[Program]
  notes: Sequence[str]  # Warnings, and reasons for missing values.
  versions: Mapping[str, str]

  @property
  def fits(self) -> bool:
    """Whether all programs fit, as far as known."""
    return all(program.fits is not False for program in self.programs)

  def __str__(self) -> str:
    return '\n'.join(_lines(self))


# These functions make the text.


_size = functools.partial(lines_lib.size, digits='.2f')


def _scaled(
  value: float, units: Sequence[str] = ('', 'k', 'M', 'G', 'T', 'P', 'E')
) -> str:
  """Formats a number with a unit, such as '1.10 T'."""
  power = 0
  while abs(value) >= 1000 and power < len(units) - 1:
    value, power = value / 1000, power + 1
  return f'{value:.{2 if power else 0}f} {units[power]}'.strip()


def _time(seconds: float) -> str:
  return _scaled(1e6 * seconds, ('us', 'ms', 's'))


def _wrap(first: str, text: str) -> list[str]:
  """Wraps a text after `first`, with a hanging indent; [] for no text."""
  return textwrap.wrap(
    text,
    _WIDTH,
    initial_indent=first,
    subsequent_indent=' ' * len(first),
    break_long_words=False,
    break_on_hyphens=False,
  )


def _row(label: str, text: str) -> list[str]:
  return _wrap(f'  {label:<19}', text)


def _of_memory(num_bytes: int, target: Target) -> str:
  text = _size(num_bytes)
  return f'{text} of {_size(target.hbm_bytes)}' if target.chip else text


def _lines(report: ProgramReport) -> Iterator[str]:
  target = report.target
  slices = f'{target.num_slices} x ' if target.num_slices > 1 else ''
  yield f'{report.experiment} on {slices}{target.name} ({target.device_kind})'
  mesh = ', '.join(f'{axis} {size}' for axis, size in report.mesh.items())
  count = f'{target.num_devices} device{"s" if target.num_devices > 1 else ""}'
  yield from _row('mesh', f'{count}: {mesh}')
  yield from _row('sharding', report.sharding)
  yield from _row('parameters', f'{report.parameters:,}')
  text = f'{report.batch_rows} rows; {_size(report.batch_bytes)} per chip'
  yield from _row('global batch', text)
  text = _of_memory(report.state_bytes, target)
  part = f' ({report.state_bytes / target.hbm_bytes:.0%})'
  yield from _row('state per chip', text + (part if target.chip else ''))
  for program in report.programs:
    yield from ('', program.name)
    yield from _program_lines(program, target)
  hints = () if report.fits else _HINTS
  for title, texts in (('Suggested changes', hints), ('Notes', report.notes)):
    if texts:
      yield from ('', title)
    for text in texts:
      yield from _wrap('  - ', text)
  versions = ', '.join(f'{k} {v}' for k, v in report.versions.items())
  yield from ('', *_row('versions', versions))


def _program_lines(program: Program, target: Target) -> Iterator[str]:
  text = _of_memory(program.peak_bytes, target)
  rest = target.hbm_bytes - program.peak_bytes
  if program.fits:
    text += f': fits, {_size(rest)} to spare'
  elif program.fits is False:
    text += ': DOES NOT FIT'
    # The compiler may have less memory available than is published.
    text += f', {_size(-rest)} too much' if rest < 0 else ''
  yield from _row('peak per chip', text)
  if program.temp_bytes is not None:
    yield from _row('temporaries', _size(program.temp_bytes))
  for buffer in program.buffers:
    line = f'    {_size(buffer.bytes):>10}  {buffer.shape}  '
    name, room = buffer.name or buffer.kind, _WIDTH - len(line)
    # Cut the beginning of a long path, since its end is more informative.
    yield line + (name if len(name) <= room else f'..{name[2 - room :]}')
  text = _scaled(program.model_flops)
  if target.chip:
    peak = target.num_devices * target.chip.peak_flops
    text += f'; {_time(program.model_flops / peak)} at the peak of all chips'
  yield from _row('model FLOPs', text)
  measures = program.measures
  total = measures.flops * target.num_devices
  text = _scaled(total)
  if program.model_flops:
    text += f' ({total / program.model_flops:.2f} x)'
  text += f'; {_scaled(measures.flops)} per chip'
  yield from _row('compiled FLOPs', text)
  yield from _row('memory traffic', f'{_size(measures.hbm_bytes)} per chip')
  for t in measures.traffic:
    text = f'{t.count} over {" x ".join(t.axes) or "no axis"}: {_size(t.bytes)}'
    if t.dcn_bytes:
      text += f', of which sent to other slices {_size(t.dcn_bytes)}'
    yield from _row(t.kind, text)
  for label, names in (
    ('loops counted once', measures.unknown_loops),
    ('kernels not counted', measures.unknown_kernels),
  ):
    yield from _row(label, ', '.join(names[:_MAX_NAMES]))
  if r := program.roofline:
    times = {key: _time(seconds) for key, seconds in r.seconds.items()}
    text = ', '.join(f'{key} {times[key]}' for key in times if r.seconds[key])
    yield from _row('at least', text)
    longest = max(r.seconds, key=lambda key: r.seconds[key])
    text = f'{r.mfu_bound:.1%} (bound by {longest}, {times[longest]});'
    text += f' {r.mfu_sum:.1%} where nothing overlaps'
    text += f' ({_time(sum(r.seconds.values()))})'
    yield from _row('MFU at most', text)
  yield from _row('compiled in', f'{program.compile_secs:.1f} s')
