"""`--jaxline_mode=compile`: compiles a run's steps, without its chips.

The experiment is built from shapes, over devices of a topology that hold no
arrays.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import pathlib
import tempfile
import time
from typing import Any, NamedTuple

import jax
import jaxlib
from ml_collections import config_dict
import numpy as np

from jaxline import chips
from jaxline import compilation_cache
from jaxline import counting
from jaxline import disk
from jaxline import mesh as mesh_lib
from jaxline import partitioning
from jaxline import prng
from jaxline import sharded
from jaxline.aot import hlo
from jaxline.aot import measure
from jaxline.aot import memory
from jaxline.aot import report as report_lib
from jaxline.compat import experiments
from jaxline.metrics import rates
from jaxline.storage import spool

# How many buffers of a program a report lists.
_NUM_LARGEST = 8


def compile_experiment(
  experiment_class: Any, config: config_dict.ConfigDict
) -> bool:
  """Prints the report of a run, and writes it below its `checkpoint_dir`.

  Returns:
    Whether the run fits, as far as is known.
  """
  directory = spool.local(config.checkpoint_dir, 'compile')
  directory.mkdir(parents=True, exist_ok=True)
  report = make_report(experiment_class, config)
  if jax.process_index() == 0:
    name = report.target.name.replace(':', '-')
    if report.target.num_slices > 1:
      name = f'{report.target.num_slices}x{name}'
    path = directory / f'{name}.json'
    with disk.replacing(path) as file:
      file.write(disk.to_json(dataclasses.asdict(report)))
    print(report)
    print(f'\nWritten to {path}', flush=True)
  return report.fits


def make_report(
  experiment_class: Any, config: config_dict.ConfigDict
) -> report_lib.Report:
  """Compiles a run's steps and returns the report.

  Args:
    experiment_class: as for `train.train`.
    config: the run's, with the target: `topology` and `num_slices`; without
      them it is the devices of this process.

  Raises:
    chips.TargetError: the config's target cannot be compiled for.
  """
  notes: list[str] = []
  devices, target = _target(config, notes)
  with mesh_lib.on_devices(devices):
    experiment = _build(experiment_class, config)
    partitioner = experiment.partitioner
    target = dataclasses.replace(
      target, num_slices=len(set(partitioner.slices))
    )
    steps = list(_steps(experiment, notes))
    notes += [
      f'The sharding uses nothing of the mesh along {axis!r}: the'
      f' {partitioner.axis_sizes[axis]} devices there all do the same.'
      for axis in partitioner.idle_axes()
    ]
    notes += [
      f'Whole, or cut less than the sharding asks for: {line}'
      for line in partitioner.undersharded_weights(
        experiment.layout.named.params
      )
    ]
    # XLA writes its dump only if it compiles.
    with compilation_cache.configured({'jax_enable_compilation_cache': False}):
      compiled = [_compile(step, experiment, target, notes) for step in steps]
    state, batch, *_ = steps[0].args
    presets = {rules: name for name, rules in partitioning.PRESETS.items()}
    return report_lib.Report(
      experiment=type(experiment).__name__,
      target=target,
      mesh=partitioner.axis_sizes,
      sharding=presets.get(partitioner.rules, 'by its own rules'),
      batch_rows=len(jax.tree.leaves(batch)[0]),
      parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
      state_bytes=_bytes(state),
      batch_bytes=_bytes(batch),
      bubble_fraction=counting.bubble_fraction(steps[0].traced.jaxpr),
      programs=tuple(compiled),
      notes=tuple(notes),
      versions=_versions(config.topology),
    )


def _target(
  config: config_dict.ConfigDict, notes: list[str]
) -> tuple[Sequence[Any], report_lib.Target]:
  """Returns the devices to compile for, and their description."""
  devices: Sequence[Any]
  chip: chips.Chip | None
  if config.topology:
    topology = chips.parse_topology(config.topology)
    name, chip = str(topology), topology.chip
    kind = chip.device_kinds[0]
    if importlib.util.find_spec('libtpu') is None:
      raise chips.TargetError(
        f'config.topology is {topology}, and the TPU compiler is not installed;'
        " install it with pip install -e '.[tpu-aot]'."
      )
    devices = chips.topology_devices(topology, config.num_slices)
  else:
    devices = jax.devices()
    name, kind = 'local', devices[0].device_kind
    chip = chips.chip_of(devices[0])
    # JAX reserves a part of a GPU's memory and gives its size, unless it is
    # configured not to reserve any.
    stats = jax.local_devices()[0].memory_stats() or {}
    if chip is None:
      notes.append(
        f'What a device of kind {kind!r} can do is not known, so neither are'
        ' times, utilization and whether it fits. For those, compile for chips,'
        " such as config.topology = 'v4:2x2x1'."
      )
    elif limit := stats.get('bytes_limit'):
      chip = dataclasses.replace(chip, hbm_bytes=float(limit))
  return devices, report_lib.Target(
    name=name,
    device_kind=kind,
    num_slices=1,
    num_devices=len(devices),
    chip=chip,
  )


def _build(
  experiment_class: Any, config: config_dict.ConfigDict
) -> sharded.ShardedExperiment:
  rng = prng.run_keys(config)[1]
  experiment = experiments.construct(experiment_class, 'train', rng, config)
  if not isinstance(experiment, sharded.ShardedExperiment):
    raise chips.TargetError(
      f'{type(experiment).__name__} has no sharded step to compile; expected a'
      ' sharded.ShardedExperiment.'
    )
  return experiment


# The steps.


class _Step(NamedTuple):
  """A traced step: its name, arguments (shapes) and the model's FLOPs."""

  name: str
  traced: Any
  args: tuple[Any, ...]
  model_flops: float


def _steps(
  experiment: sharded.ShardedExperiment, notes: list[str]
) -> Iterator[_Step]:
  """Yields the train step and, if there is an evaluation, the eval step."""
  state, rng = experiment.abstract_state(), experiment.abstract_rng()
  train_step: Any = experiment.compiled_train_step
  eval_step: Any = experiment.compiled_eval_step
  batch = experiment.abstract_batch(is_training=True)
  args = state, batch, rng
  flops = rates.model_flops(experiment, batch)
  yield _Step('train step', train_step.trace(*args), args, flops)
  try:
    batch = experiment.abstract_batch(is_training=False)
  except NotImplementedError:
    notes.append('There is no eval step: eval_input is not implemented.')
    return
  place = jax.ShapeDtypeStruct(
    [2], np.uint32, sharding=experiment.partitioner.replicated
  )
  eval_args = dataclasses.replace(state, opt_state=None), batch, rng, place
  traced = eval_step.trace(*eval_args)
  yield _Step('eval step', traced, eval_args, counting.flops(traced.jaxpr))


def _compile(
  step: _Step,
  experiment: sharded.ShardedExperiment,
  target: report_lib.Target,
  notes: list[str],
) -> report_lib.Program:
  """Compiles a step, and measures the program."""
  if jax.process_index() == 0:
    print(f'Compiling the {step.name} for {target.name}: minutes.', flush=True)
  lowered = step.traced.lower()
  start = time.monotonic()
  with tempfile.TemporaryDirectory(prefix='jaxline_xla_') as name:
    directory = pathlib.Path(name)
    try:
      compiled = lowered.compile(memory.dump_options(directory))
      sizes = _memory(compiled.memory_analysis(), target)
    except jax.errors.JaxRuntimeError as e:
      if not memory.is_out_of_memory(e):
        raise
      notes.append(f'The {step.name} does not fit: {str(e).splitlines()[0]}')
      sizes = {'fits': False}
    secs = time.monotonic() - start
    text, assignment = memory.dumped(directory)
  sizes.setdefault('peak_bytes', memory.total_bytes(assignment) or None)
  program = report_lib.Program(
    name=step.name, model_flops=step.model_flops, compile_secs=secs, **sizes
  )
  if not text:
    return program
  module = hlo.parse(text)
  partitioner = experiment.partitioner
  slices = partitioner.slices
  measures = measure.measure(module, partitioner.axis_sizes, slices)
  return dataclasses.replace(
    program,
    measures=measures,
    roofline=report_lib.roofline(target, measures, step.model_flops),
    buffers=tuple(memory.buffers(assignment, module)[:_NUM_LARGEST]),
  )


def _memory(stats: Any, target: report_lib.Target) -> dict[str, Any]:
  """Returns the memory that a compiled program takes of a chip."""
  temp = stats.temp_size_in_bytes
  # Outputs of the size `alias` share the memory of arguments.
  own = stats.output_size_in_bytes - stats.alias_size_in_bytes
  peak = stats.argument_size_in_bytes + own + temp
  fits = peak <= target.hbm_bytes if target.chip else None
  return {'temp_bytes': temp, 'peak_bytes': peak, 'fits': fits}


# The state.


def _bytes(tree: Any) -> int:
  """Returns the bytes per chip of a tree of shapes with shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def _versions(topology: str | None) -> dict[str, str]:
  versions = {'jax': jax.__version__, 'jaxlib': jaxlib.__version__}
  if topology:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions['libtpu'] = importlib.metadata.version('libtpu')
  return versions
