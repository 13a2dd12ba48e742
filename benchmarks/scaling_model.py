"""What a pod would give: weak scaling on TPU v4, predicted and as published.

    python -m benchmarks.scaling_model [--plot] [--compile NAME ...]

Prints the tables of docs/reference/scale.md, section "What a pod would give",
from the compiler's reports of language models with 16 to 1024 billion weights.
`--plot` draws docs/images/scaling.svg (the extra `plot`). `--compile` compiles
runs, such as 128B, and keeps their reports (the extra `tpu-aot`). The costs of
a run without a report are derived from its layers.

The model, for one step:

    seconds = compute / e + x * (memory + network)

- compute: the compiled FLOPs, at the peak of a chip;
- memory: the bytes read and written, at the bandwidth of the memory;
- network: the bytes sent along each axis of the mesh, on the links of the axis;
- e: the part of the peak that matrix products reach, the same for all runs;
- x: the part of memory and network that products do not hide, the same for all.

e and x are fitted on the first two runs. The other four are predicted.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import json
import math
import os
import pathlib
from typing import NamedTuple

import numpy as np
from scipy import optimize

from benchmarks import harness
from benchmarks import scale
from jaxline.aot import chips
from jaxline.checkpoint import files

# Where the reports are kept; that of the first run is kept by `scale`.
RESULTS = pathlib.Path(__file__).parent / 'results' / 'scaling'
PLOT = pathlib.Path(__file__).parents[1] / 'docs' / 'images' / 'scaling.svg'
FIRST = 'C4Spmd16BAdam32Replicas'

_VOCABULARY = 32000
_LENGTH = 1024
_HEAD = 128

_RUN = f'--config=configs/c4.py:{FIRST}'
_CONSTANTS = '--config.experiment_kwargs.config.constants'
_MESH = '--config.mesh.ici'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """A run of the weak scaling.

  Attributes:
    name: of the model.
    layers: of the transformer.
    width: of the residual stream. The feed-forward part is 4 times as wide, and
      a head is 128 wide.
    rows: of 1024 tokens, for each chip.
    data: size of the mesh along `data`.
    mdl: the same along `mdl`.
    topology: the slice.
    published: the model FLOPs utilization; NaN if none was.
    run: its name in `scale`, which keeps its report; '' if it is only here.
  """

  name: str
  layers: int
  width: int
  rows: int
  data: int
  mdl: int
  topology: str
  published: float = math.nan
  run: str = ''

  @property
  def chips(self) -> int:
    """How many chips."""
    return self.data * self.mdl

  @property
  def mesh(self) -> dict[str, int]:
    """The axes, with their sizes."""
    return {'data': self.data, 'mdl': self.mdl}

  @property
  def weights(self) -> int:
    """Of the matrices: 12 width^2 a layer, and the table of tokens."""
    return 12 * self.layers * self.width**2 + _VOCABULARY * self.width


# Layers, widths, rows and meshes are those of Pax's registered runs of these
# sizes: C4Spmd16BAdam32Replicas and C4Spmd32BAdam64Replicas in its c4.py, and
# LmCloudSpmd128B to LmCloudSpmd1024B in its lm_cloud.py. They are for as many
# chips as were published; that the published numbers are of these runs is an
# assumption, and so are the shapes of the slices. The utilizations were read
# off a figure of Pax's documents.
# fmt: off
POINTS = (
  Point(name='16B', layers=36, width=6144, rows=16, data=16, mdl=2,
        topology='v4:2x4x4', published=0.42, run=FIRST),
  Point(name='32B', layers=40, width=8192, rows=8, data=16, mdl=4,
        topology='v4:4x4x4', published=0.42),
  Point(name='128B', layers=71, width=12288, rows=4, data=64, mdl=4,
        topology='v4:4x8x8', published=0.485),
  Point(name='256B', layers=80, width=16384, rows=4, data=64, mdl=8,
        topology='v4:8x8x8', published=0.53),
  Point(name='512B', layers=102, width=20480, rows=4, data=64, mdl=16,
        topology='v4:8x8x16', published=0.49),
  Point(name='1024B', layers=142, width=24576, rows=2, data=256, mdl=8,
        topology='v4:8x16x16', published=0.535),
)
# Smaller ones of the same family, of which `scale` keeps reports too: for the
# traffic of the memory.
SMALLER = (
  Point(name='1B', layers=13, width=2560, rows=32, data=4, mdl=1,
        topology='v4:2x2x1', run='C4Spmd1BAdam4Replicas'),
  Point(name='2B', layers=18, width=3072, rows=8, data=4, mdl=1,
        topology='v4:2x2x1', run='LmCloudSpmd2BLimitSteps'),
)
# fmt: on
FITTED = 2


def arguments(point: Point) -> list[str]:
  """Returns the command line of a run: the first one, with other sizes."""
  constants = {
    'NUM_LAYERS': point.layers,
    'MODEL_DIMS': point.width,
    'HIDDEN_DIMS': 4 * point.width,
    'NUM_HEADS': point.width // _HEAD,
    'PERCORE_BATCH_SIZE': point.rows,
  }
  return [
    _RUN,
    *(f'{_CONSTANTS}.{name}={value}' for name, value in constants.items()),
    f'{_MESH}.data={point.data}',
    f'{_MESH}.mdl={point.mdl}',
    f'--config.topology={point.topology}',
  ]


# What a step costs.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Seconds of one step, each for a chip that does only this one thing.

  Attributes:
    ideal: the model's FLOPs, at the peak.
    compute: the compiled FLOPs, at the peak.
    memory: the traffic of the memory, at its bandwidth.
    data: what is sent along `data`, or along both axes, on their links.
    mdl: the same along `mdl` alone.
    all_links: what is sent, on all links at once.
  """

  ideal: float
  compute: float
  memory: float
  data: float
  mdl: float
  all_links: float

  @property
  def network(self) -> float:
    """One axis after the other."""
    return self.data + self.mdl


def axis_links(shape: Sequence[int], mesh: Mapping[str, int]) -> dict[str, int]:
  """Returns how many links a chip has along each axis of the mesh.

  An axis is laid along whole dimensions of the slice. A dimension has two links
  if it closes into a ring. In TPU v4 it does if all sizes are multiples of 4.
  Otherwise the chips at its ends have one link, for which the others wait.

  Raises:
    ValueError: an axis is not a product of dimensions.
  """
  rings = all(size % 4 == 0 for size in shape)
  links = [0 if size == 1 else 1 + rings for size in shape]
  for owners in itertools.product(mesh, repeat=len(shape)):
    along = {
      axis: [i for i, owner in enumerate(owners) if owner == axis]
      for axis in mesh
    }
    if all(
      math.prod(shape[i] for i in along[axis]) == size
      for axis, size in mesh.items()
    ):
      return {axis: sum(links[i] for i in along[axis]) for axis in mesh}
  raise ValueError(
    f'The mesh is {dict(mesh)} on a slice of {tuple(shape)}; expected axes that'
    ' are products of whole dimensions of the slice. Choose another topology.'
  )


def costs(report: scale.Report) -> Costs:
  """Returns the costs of the train step of a report."""
  step, target = report['programs'][0], report['target']
  chip, seconds = target['chip'], step['roofline']['seconds']
  shape = chips.parse_topology(target['name']).shape
  mesh = {axis: size for axis, size in report['mesh'].items() if size > 1}
  links = axis_links(shape, mesh)
  network = dict.fromkeys(('data', 'mdl'), 0.0)
  for sent in step['measures']['traffic']:
    if axes := sent['axes']:
      bandwidth = chip['ici_link_bandwidth'] * sum(links[axis] for axis in axes)
      along = 'data' if 'data' in axes else 'mdl'
      network[along] += sent['wire_bytes'] / bandwidth
  return Costs(
    ideal=step['model_flops'] / target['num_devices'] / chip['peak_flops'],
    compute=seconds['compute'],
    memory=seconds['memory'],
    all_links=seconds['ICI'],
    **network,
  )


# Runs that are not compiled: from their layers.


def flops(point: Point) -> tuple[float, float]:
  """Returns the FLOPs of a chip in one step: the model's, and the compiled.

  The backward pass computes a layer again, except its last product, which is 4
  of its 12 parts.
  """
  tokens = point.rows * _LENGTH
  # The first half of the queries leaves out the second half of the keys.
  attention = point.layers * 2 * point.width * _LENGTH * 3 // 4
  model = 6 * tokens * (point.weights + attention)
  again = 2 * tokens * (8 * point.layers * point.width**2 + attention)
  return model, model + again


def _numbers(point: Point) -> np.ndarray:
  """Returns what the layers of a chip read and write, in numbers.

  These are activations of the whole width, attention's logits and weights.
  """
  tokens = point.rows * _LENGTH
  return point.layers * np.array(
    [
      tokens * point.mdl * point.width,
      tokens * _LENGTH * point.width / _HEAD,
      12 * point.width**2 / point.mdl,
    ]
  )


def _sent(point: Point) -> tuple[float, float]:
  """Returns what a chip sends along `data` and `mdl`, up to a factor.

  Weights are gathered twice and their gradients are reduced once. If a piece of
  the width is not a multiple of 256, gradients are all-reduced, which sends
  twice as much; below 128, so are the weights. See docs/reference/scale.md.
  """
  piece = point.width / point.data
  times = 6 if piece < 128 else 4 if piece % 256 else 3
  activations, _, weights = _numbers(point)
  return (
    times * weights * (1 - 1 / point.data),
    activations * (1 - 1 / point.mdl),
  )


def derive(point: Point, reports: Mapping[str, scale.Report]) -> Costs:
  """Returns the costs of a run that was not compiled.

  Those of the compiled run with the nearest size of `mdl` are multiplied by the
  ratio of what the layers compute, read, write and send. The times of the
  numbers of `_numbers` are fitted on compiled runs with up to 32 billion
  weights, so that larger ones test them.

  Args:
    point: the run.
    reports: name of a run -> its report, of SMALLER and of the compiled POINTS.
  """
  known = [*SMALLER, *POINTS[:FITTED]]
  times = np.array([costs(reports[p.name]).memory for p in known])
  rows = np.array([_numbers(p) for p in known]) / times[:, None]
  per_number = np.linalg.lstsq(rows, np.ones(len(known)), rcond=None)[0]
  like = min(
    (p for p in POINTS if p.name in reports and p is not point),
    key=lambda p: abs(math.log(p.mdl / point.mdl)),
  )
  cost = costs(reports[like.name])
  memory = [float(_numbers(p) @ per_number) for p in (point, like)]
  sent = np.array(_sent(point)) / np.array(_sent(like))
  links = [
    axis_links(chips.parse_topology(p.topology).shape, p.mesh)
    for p in (point, like)
  ]
  data, mdl = (
    seconds * float(ratio) * links[1][axis] / links[0][axis]
    for axis, seconds, ratio in zip(
      ('data', 'mdl'), (cost.data, cost.mdl), sent, strict=True
    )
  )
  here = links[0]
  model, compiled = flops(point)
  peak = flops(like)[0] / cost.ideal
  return Costs(
    ideal=model / peak,
    compute=compiled / peak,
    memory=cost.memory * memory[0] / memory[1],
    data=data,
    mdl=mdl,
    all_links=(data * here['data'] + mdl * here['mdl']) / sum(here.values()),
  )


def all_costs(reports: Mapping[str, scale.Report]) -> list[Costs]:
  """Returns the costs of POINTS: compiled, or derived if there is no report."""
  return [
    costs(reports[p.name]) if p.name in reports else derive(p, reports)
    for p in POINTS
  ]


# The model.


class Terms(NamedTuple):
  """What a variant of the model takes of a run.

  Attributes:
    products: seconds that the efficiency e divides.
    rest: seconds of which the part x is not hidden.
    published: the utilization.
    fixed: seconds that no constant changes.
  """

  products: float
  rest: float
  published: float
  fixed: float = 0.0


@dataclasses.dataclass(frozen=True)
class Constants:
  """What is fitted.

  Attributes:
    efficiency: the part of the peak that matrix products reach, e.
    exposed: the part of the rest that is not hidden, x; None if there is no
      rest to fit it on.
  """

  efficiency: float
  exposed: float | None

  def seconds(self, terms: Terms) -> float:
    """Returns the time of a step."""
    rest = (self.exposed or 0.0) * terms.rest
    return terms.fixed + terms.products / self.efficiency + rest


def fit(terms: Sequence[Terms], seconds: Sequence[float]) -> Constants:
  """Returns the constants with the smallest squared relative errors.

  Both are at most 1, and neither is negative.
  """
  times = np.asarray(seconds, float)
  # Rows are runs; the unknowns are 1 / e and x.
  a = np.array([[t.products, t.rest] for t in terms]) / times[:, None]
  b = 1 - np.array([t.fixed for t in terms]) / times

  # BVLS ends exactly on the bounds.
  solved = optimize.lsq_linear(a, b, ([1, 0], [np.inf, 1]), method='bvls')
  inverse, exposed = map(float, solved.x)
  return Constants(1 / inverse, exposed if a[:, 1].any() else None)


Variant = Callable[[Point, Costs], Terms]


def base(point: Point, cost: Costs) -> Terms:
  """Returns the terms of the model as stated."""
  return Terms(cost.compute, cost.memory + cost.network, point.published)


@dataclasses.dataclass(frozen=True)
class Prediction:
  """What a variant of the model says of all runs.

  Attributes:
    constants: what was fitted.
    mfu: of each run.
    error: of the runs after the first two, the mean absolute difference to
      what was published.
  """

  constants: Constants
  mfu: tuple[float, ...]
  error: float


def predict(
  of: Sequence[Costs], variant: Variant = base, *, fitted: int = FITTED
) -> Prediction:
  """Fits the first runs and predicts all.

  Args:
    of: the costs of POINTS.
    variant: of the model.
    fitted: how many are fitted. The error is that of runs from FITTED on.
  """
  terms = [variant(p, c) for p, c in zip(POINTS, of, strict=True)]
  times = [c.ideal / t.published for c, t in zip(of, terms, strict=True)]
  constants = fit(terms[:fitted], times[:fitted])
  mfu = tuple(
    c.ideal / constants.seconds(t) for c, t in zip(of, terms, strict=True)
  )
  errors = [abs(m - p.published) for m, p in zip(mfu, POINTS, strict=True)]
  error = sum(errors[FITTED:]) / len(errors[FITTED:])
  return Prediction(constants, mfu, error)


# What the model assumes, and what it says with another assumption.


def _nothing_hidden(point: Point, cost: Costs) -> Terms:
  fixed = cost.memory + cost.network
  return Terms(cost.compute, 0.0, point.published, fixed)


def _all_links(point: Point, cost: Costs) -> Terms:
  return Terms(cost.compute, cost.memory + cost.all_links, point.published)


def _wide_products(*, network: bool) -> Variant:
  """Returns a model in which 1 / e is a constant plus one over the width."""

  def variant(point: Point, cost: Costs) -> Terms:
    slower = cost.compute * POINTS[0].width / point.width
    fixed = cost.memory + network * cost.network
    return Terms(cost.compute, slower, point.published, fixed)

  return variant


def _keeps_attention(point: Point, cost: Costs) -> Terms:
  # Of a layer's 12 parts (4 of attention, 8 of the feed-forward part) the
  # backward pass computes 8 again: all but the last product. With the outputs
  # of attention kept, the output projection is not computed again either.
  part = (3 + 7 / 12) / (3 + 8 / 12) if point.name == '32B' else 1.0
  return base(point, dataclasses.replace(cost, compute=part * cost.compute))


def _read_off(first: float, second: float) -> Variant:
  read = dict(zip((p.name for p in POINTS), (first, second), strict=False))
  return lambda point, cost: base(point, cost)._replace(
    published=read.get(point.name, point.published)
  )


# What is assumed -> the model with it, and how many runs are fitted.
VARIANTS: dict[str, tuple[Variant, int]] = {
  'as stated': (base, FITTED),
  'nothing is hidden: x = 1, only e is fitted': (_nothing_hidden, FITTED),
  'all links carry at once': (_all_links, FITTED),
  '32B keeps the outputs of attention': (_keeps_attention, FITTED),
  'the figure says 42.5 and 41.5%': (_read_off(0.425, 0.415), FITTED),
  # Added when the predictions above were known.
  'in hindsight: fitted on all six': (base, len(POINTS)),
  'in hindsight: nothing is hidden, e rises with the width': (
    _wide_products(network=True),
    FITTED,
  ),
  'in hindsight: only the network is hidden, e rises with the width': (
    _wide_products(network=False),
    FITTED,
  ),
}


# What is printed.


def costs_table(reports: Mapping[str, scale.Report]) -> str:
  """Returns the sizes of the runs, and what a step of each costs."""
  rows = []
  for point, cost in zip(POINTS, all_costs(reports), strict=True):
    report = reports.get(point.name)
    peak = 'not compiled'
    if report:
      step = report['programs'][0]
      peak = f'{step["peak_bytes"] / 2**30:.1f}'
      peak += '' if step['fits'] else ', **does not fit**'
    rows.append(
      {
        'run': point.name,
        'topology': point.topology,
        'data x mdl': f'{point.data} x {point.mdl}',
        'layers x width': f'{point.layers} x {point.width}',
        'weights': f'{point.weights / 1e9:.1f} B',
        'rows a chip': f'{point.rows}',
        'peak, GiB a chip': peak,
        'model FLOPs at the peak, s': f'{cost.ideal:.2f}',
        'compute': f'{cost.compute / cost.ideal:.2f}',
        'memory': f'{cost.memory / cost.ideal:.2f}',
        'network, data': f'{cost.data / cost.ideal:.2f}',
        'network, mdl': f'{cost.mdl / cost.ideal:.2f}',
      }
    )
  return harness.table_of(rows)


def predictions_table(of: Sequence[Costs]) -> str:
  """Returns what is predicted and what was published, for each run."""
  prediction = predict(of)
  rows = []
  for i, (point, mfu) in enumerate(zip(POINTS, prediction.mfu, strict=True)):
    error = f'{100 * (mfu - point.published):+.1f}'
    rows.append(
      {
        'run': point.name,
        'chips': f'{point.chips}',
        'predicted': f'{100 * mfu:.1f}%',
        'published': f'{100 * point.published:.1f}%',
        'error': 'fitted' if i < FITTED else error,
      }
    )
  return harness.table_of(rows)


def variants_table(of: Sequence[Costs]) -> str:
  """Returns what the model predicts with other assumptions."""
  rows = []
  for name, (variant, fitted) in VARIANTS.items():
    prediction = predict(of, variant, fitted=fitted)
    constants = prediction.constants
    rows.append(
      (
        name,
        f'{constants.efficiency:.2f}',
        '' if constants.exposed is None else f'{constants.exposed:.2f}',
        *(f'{100 * mfu:.1f}' for mfu in prediction.mfu),
        f'{100 * prediction.error:.1f}',
      )
    )
  names = (point.name for point in POINTS)
  titles = ('assumption', 'e', 'x', *names, 'mean absolute error, last four')
  published = (f'{100 * point.published:.1f}' for point in POINTS)
  return harness.markdown(
    titles, [*rows, ('published', '', '', *published, '')]
  )


def check_table(reports: Mapping[str, scale.Report]) -> str:
  """Returns costs that are derived, against those that are compiled.

  Each run is derived from the other runs that are compiled.
  """
  columns = {
    'model FLOPs': 'ideal',
    'compute': 'compute',
    'memory': 'memory',
    'network, data': 'data',
    'network, mdl': 'mdl',
  }
  rows = []
  for point in POINTS[1:]:
    if point.name in reports:
      made, found = derive(point, reports), costs(reports[point.name])
      ratios = {
        title: f'{getattr(made, name) / getattr(found, name):.2f}'
        for title, name in columns.items()
      }
      rows.append({'derived / compiled': point.name, **ratios})
  return harness.table_of(rows)


# The picture.


def curves(of: Sequence[Costs]) -> dict[str, list[float]]:
  """Returns the curves of the picture: name -> percent, of each run."""
  curves = {
    'published': [p.published for p in POINTS],
    'predicted: fitted on the first two': predict(of).mfu,
    'predicted if nothing is hidden': predict(of, _nothing_hidden).mfu,
  }
  return {k: [round(100 * y, 1) for y in mfu] for k, mfu in curves.items()}


def plot(of: Sequence[Costs]) -> None:
  """Draws the curves over the number of chips. The file has them as JSON."""
  import matplotlib

  matplotlib.use('svg')
  # The same file each time, and letters as letters.
  matplotlib.rcParams.update(
    {'svg.hashsalt': 'scaling', 'svg.fonttype': 'none'}
  )
  from matplotlib import pyplot

  drawn = curves(of)
  _, axes = pyplot.subplots(figsize=(8, 4.4))
  chip_counts = [p.chips for p in POINTS]
  styles = ('o-', '#1f2328'), ('o--', '#0969da'), ('o:', '#bc4c00')
  for name, (style, color) in zip(drawn, styles, strict=True):
    axes.plot(chip_counts, drawn[name], style, color=color, label=name)
  axes.set_xscale('log', base=2)
  axes.set_xticks(chip_counts, [f'{p.chips}\n{p.name}' for p in POINTS])
  axes.set_ylim(30, 60)
  axes.yaxis.set_major_formatter('{x:.0f}%')
  axes.set_xlabel('TPU v4 chips, and weights of the model')
  axes.set_title('Model FLOPs utilization of weak scaling on TPU v4')
  axes.grid(axis='y', alpha=0.3)
  axes.legend(loc='upper left')
  metadata = {'Date': None, 'Description': json.dumps(drawn)}
  pyplot.savefig(PLOT, bbox_inches='tight', metadata=metadata)


# The reports.


def _path(point: Point) -> pathlib.Path:
  """Returns where the report of a run is kept."""
  if point.run:
    return scale.RESULTS / f'{point.run}.json'
  return RESULTS / f'{point.name}.json'


def load() -> dict[str, scale.Report]:
  """Returns name -> the kept report, of the runs that were compiled."""
  return {
    point.name: json.loads(_path(point).read_text())
    for point in (*SMALLER, *POINTS)
    if _path(point).exists()
  }


def _compile(point: Point) -> None:
  """Compiles a run and keeps the report."""
  report = scale.compile_run(arguments(point))
  if report.programs[0].measures is None:
    raise SystemExit(f'{point.name}: nothing was compiled. {report.notes[0]}')
  RESULTS.mkdir(parents=True, exist_ok=True)
  files.write_json(_path(point), report.to_json())
  print(f'{point.name}: {report}\n', flush=True)


def main() -> None:
  """Compiles what is asked for, prints the tables and draws the plot."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  names = {point.name: point for point in POINTS if not point.run}
  parser.add_argument(
    '--compile', nargs='+', choices=names, default=(), metavar='NAME'
  )
  parser.add_argument('--plot', action='store_true')
  args = parser.parse_args()
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  for name in args.compile:
    _compile(names[name])
  reports = load()
  of = all_costs(reports)
  constants = predict(of).constants
  print(costs_table(reports))
  print('(The last four: seconds for each second of the column before them.)')
  print(f'\ne = {constants.efficiency:.3f}, x = {constants.exposed or 0:.3f}\n')
  print(predictions_table(of), end='\n\n')
  print(variants_table(of), end='\n\n')
  print(check_table(reports))
  if args.plot:
    plot(of)


if __name__ == '__main__':
  main()
