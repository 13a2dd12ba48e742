"""Compiles a run's steps without its chips (`--jaxline_mode=compile`).

The experiment is built from shapes, over devices that hold no arrays.
"""

from collections.abc import Sequence
import dataclasses
import importlib.metadata
import math
import tempfile
import time
from typing import Any

import jax
from ml_collections import config_dict
import numpy as np

from jaxline import errors
from jaxline import sharded
from jaxline.base import chips
from jaxline.base import counting
from jaxline.base import disk
from jaxline.compat import experiments
from jaxline.compile import hlo
from jaxline.compile import measure
from jaxline.compile import memory
from jaxline.compile import report as report_lib
from jaxline.metrics import rates
from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import partitioning
from jaxline.parallel import prng
from jaxline.run_directory import logs
from jaxline.supervision import compilation_cache


def compile_experiment(
  experiment_class: Any, config: config_dict.ConfigDict
) -> bool:
  """Prints the report of a run and writes it below its `checkpoint_dir`.

  Returns whether the run fits into memory, as far as is known.
  """
  directory = logs.local(config.checkpoint_dir, 'compile')
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
) -> report_lib.ProgramReport:
  """Compiles a run's steps and returns the report.

  It compiles for `config.topology`, or, if None, for this process's devices.

  Raises:
    errors.UsageError: It cannot compile for the target of the config.
  """
  notes: list[str] = []
  devices, chip = _target(config, notes)
  with mesh_lib.on_devices(devices):
    _, rng = prng.run_keys(config)
    experiment = experiments.construct(experiment_class, 'train', rng, config)
    if not isinstance(experiment, sharded.ShardedExperiment):
      raise errors.UsageError(
        f'{experiment.__class__.__name__} has no sharded step to compile;'
        ' expected a subclass of sharded.ShardedExperiment.'
      )
    partitioner = experiment.partitioner
    target = report_lib.Target(
      name=config.topology or 'local',
      device_kind=devices[0].device_kind,
      num_slices=len(set(partitioner.slices)),
      num_devices=len(devices),
      chip=chip,
    )
    train_step: Any = experiment.compiled_train_step
    eval_step: Any = experiment.compiled_eval_step
    state, key = experiment.abstract_state(), experiment.abstract_rng()
    batch = experiment.abstract_batch(is_training=True)
    traced = train_step.trace(state, batch, key)
    steps = [('train step', traced, rates.model_flops(experiment, batch))]
    try:
      eval_batch = experiment.abstract_batch(is_training=False)
    except NotImplementedError:
      notes.append('There is no eval step: eval_input is not implemented.')
    else:
      weights = dataclasses.replace(state, opt_state=None)
      place = jax.ShapeDtypeStruct(
        [2], np.uint32, sharding=partitioner.replicated
      )
      traced = eval_step.trace(weights, eval_batch, key, place)
      steps.append(('eval step', traced, counting.flops(traced.jaxpr)))
    notes += [
      f'The sharding does not use the mesh axis {axis!r}: the'
      f' {partitioner.axis_sizes[axis]} devices along it do the same work.'
      for axis in partitioner.idle_axes()
    ]
    named = experiment.layout.named.params
    notes += [
      f'Replicated, or split less than the sharding asks for: {line}'
      for line in partitioner.undersharded_weights(named)
    ]
    # Disable the cache, since XLA writes its dump only if it compiles.
    with compilation_cache.configured({'jax_enable_compilation_cache': False}):
      programs = [_compile(*step, partitioner, target, notes) for step in steps]
  presets = {rules: name for name, rules in partitioning.PRESETS.items()}
  packages = ('jax', 'jaxlib', *(('libtpu',) if config.topology else ()))
  return report_lib.ProgramReport(
    experiment=type(experiment).__name__,
    target=target,
    mesh=partitioner.axis_sizes,
    sharding=presets.get(partitioner.rules, 'by its own rules'),
    batch_rows=len(jax.tree.leaves(batch)[0]),
    parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
    state_bytes=_bytes(state),
    batch_bytes=_bytes(batch),
    programs=programs,
    notes=notes,
    versions={name: importlib.metadata.version(name) for name in packages},
  )


def _target(
  config: config_dict.ConfigDict, notes: list[str]
) -> tuple[Sequence[Any], chips.Chip | None]:
  """Returns the devices to compile for, and the chip's capabilities."""
  if config.topology:
    chip, _ = chips.parse_topology(config.topology)
    return chips.topology_devices(config.topology, config.num_slices), chip
  devices = jax.devices()
  # JAX reserves a part of a GPU's memory and reports its size, unless it is
  # configured not to reserve any.
  stats = jax.local_devices()[0].memory_stats() or {}
  known = chips.chip_of(devices[0])
  if known is None:
    notes.append(
      f'The capabilities of a {devices[0].device_kind!r} device are unknown,'
      ' so the report lacks times, utilization and whether the run fits. To get'
      " them, compile for chips, such as config.topology = 'v4:2x2x1'."
    )
  elif limit := stats.get('bytes_limit'):
    known = dataclasses.replace(known, hbm_bytes=float(limit))
  return devices, known


def _compile(
  name: str,
  traced: Any,
  model_flops: float,
  partitioner: partitioning.Partitioner,
  target: report_lib.Target,
  notes: list[str],
) -> report_lib.Program:
  """Compiles a step and measures the program."""
  if jax.process_index() == 0:
    print(f'Compiling the {name} for {target.name}: minutes.', flush=True)
  lowered = traced.lower()
  start = time.monotonic()
  with tempfile.TemporaryDirectory(prefix='jaxline_xla_') as directory:
    try:
      compiled = lowered.compile(
        {'xla_dump_to': directory, 'xla_dump_hlo_as_text': True}
      )
    except jax.errors.JaxRuntimeError as e:
      if not memory.is_out_of_memory(e):
        raise
      notes.append(f'The {name} does not fit: {str(e).splitlines()[0]}')
      compiled = None
    secs = time.monotonic() - start
    text, assignment = memory.dumped(directory)
  if not text:  # It failed before the dump, or XLA_FLAGS exclude this dump.
    raise errors.UsageError(
      f'XLA dumped no program of the {name}, so nothing can be measured.'
      f' {" ".join(notes)}'
    )
  module = hlo.parse(text)
  mesh = partitioner.axis_sizes, partitioner.slices
  measures = measure.measure(module, *mesh)
  peak, buffers = memory.buffers(assignment, module)
  temp: int | None = None
  fits: bool | None = False
  if compiled:
    stats = compiled.memory_analysis()
    temp = stats.temp_size_in_bytes
    # Outputs of `alias_size_in_bytes` share memory with arguments.
    own = stats.output_size_in_bytes - stats.alias_size_in_bytes
    peak = stats.argument_size_in_bytes + own + temp
    fits = peak <= target.hbm_bytes if target.chip else None
  return report_lib.Program(
    name=name,
    model_flops=model_flops,
    temp_bytes=temp,
    peak_bytes=peak,
    fits=fits,
    measures=measures,
    roofline=report_lib.roofline(target, measures, model_flops),
    compile_secs=secs,
    buffers=buffers[:8],
  )


def _bytes(tree: Any) -> int:
  """Returns the bytes per chip of a tree of shapes with shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )
