"""`--jaxline_mode=compile`: what a run needs and sends, before there are chips.

The experiment is built over the devices of a topology, which hold nothing, from
shapes alone; its two steps are compiled by the compiler of those devices, and
what it made is read.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from ml_collections import config_dict
import numpy as np

from jaxline import mesh as mesh_lib
from jaxline import partitioning
from jaxline import sharded
from jaxline import train
from jaxline.aot import chips
from jaxline.aot import counting
from jaxline.aot import hlo
from jaxline.aot import memory
from jaxline.aot import programs
from jaxline.aot import report as report_lib
from jaxline.checkpoint import files

# How many arrays of the state, and buffers of a program, a report lists.
_NUM_LARGEST = 8
# Above this part of what is needed, the state is what to make smaller first.
_MUCH = 0.5


def compile_experiment(
  experiment_class: Any, config: config_dict.ConfigDict
) -> bool:
  """Compiles a run's steps; prints the report, and writes it as JSON.

  Args:
    experiment_class: as for `train.train`.
    config: the run's. The report goes below its `checkpoint_dir`.

  Returns:
    Whether the run fits, as far as is known.

  Raises:
    chips.TargetError: the config asks for what cannot be compiled.
  """
  directory = pathlib.Path(config.checkpoint_dir) / 'compile'
  directory.mkdir(parents=True, exist_ok=True)
  report = make_report(experiment_class, config, directory)
  if jax.process_index() == 0:
    path = directory / f'{_file_name(report.target)}.json'
    files.write_json(path, report.to_json())
    print(report)
    print(f'\nWritten to {path}', flush=True)
  return report.fits


def make_report(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  directory: pathlib.Path | None = None,
) -> report_lib.Report:
  """Compiles a run's steps and returns what is known then.

  Args:
    experiment_class: as for `train.train`.
    config: the run's: `topology` and `num_slices` say what for; without them
      for the devices of this process.
    directory: where the compiled programs are kept; None keeps none.

  Raises:
    chips.TargetError: the config asks for what cannot be compiled.
  """
  notes: list[str] = []
  devices, target = _target(config, notes)
  can_compile = not isinstance(devices[0], mesh_lib.AbstractDevice)
  with mesh_lib.on_devices(devices):
    experiment = _build(experiment_class, config)
    slices = set(experiment.partitioner.slices)
    target = dataclasses.replace(target, num_slices=len(slices))
    steps = list(_steps(experiment, notes))
    notes.extend(
      f'The sharding uses nothing of the mesh along {axis!r}: the'
      f' {experiment.partitioner.axis_sizes[axis]} devices there all do the'
      ' same.'
      for axis in experiment.partitioner.idle_axes()
    )
    notes.extend(
      f'Whole, or cut less than the sharding asks for: {line}'
      for line in experiment.uncut_weights
    )
    place = None
    if can_compile and directory is not None:
      place = directory / f'{_file_name(target)}_programs'
    keep: Any = programs.kept_nowhere()
    if place is not None:
      keep = programs.saving(place, programs.identity(config, devices))
    with keep:
      compiled = [
        _compile(step, experiment, target)
        if can_compile
        else _size(step, target)
        for step in steps
      ]
    state = experiment.abstract_state()
    batch = steps[0].args[1]
    notes += _beside_evaluation(state, compiled, target)
    report = report_lib.Report(
      experiment=type(experiment).__name__,
      target=target,
      mesh=experiment.partitioner.axis_sizes,
      sharding=_preset(experiment.partitioner.rules),
      batch_rows=len(jax.tree.leaves(batch)[0]),
      parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
      state_bytes=_bytes(state),
      gradient_bytes=_gradient_bytes(experiment, state),
      batch_bytes=_bytes(batch),
      bubble_fraction=experiment.bubble_fraction,
      state_buffers=_state_buffers(state),
      programs=tuple(compiled),
      notes=tuple(notes),
      saved=str(place) if place is not None and place.exists() else '',
      versions=_versions(config.topology),
    )
  if not report.fits:
    hints = _hints(report, config)
    report = dataclasses.replace(report, hints=tuple(hints))
  return report


def _file_name(target: report_lib.Target) -> str:
  name = target.name.replace(':', '-')
  return name if target.num_slices == 1 else f'{target.num_slices}x{name}'


def _target(
  config: config_dict.ConfigDict, notes: list[str]
) -> tuple[Sequence[Any], report_lib.Target]:
  """Returns the devices to compile for, and what they are."""
  devices: Sequence[Any]
  if config.topology:
    topology = chips.parse_topology(config.topology)
    name, chip = str(topology), topology.chip
    kind, ici_bandwidth = chip.device_kinds[0], topology.ici_bandwidth
    try:
      devices = chips.topology_devices(topology, config.num_slices)
    except chips.MissingCompilerError as e:
      notes.append(
        f'{e} Without it this is only what follows from shapes and shardings.'
      )
      devices = mesh_lib.abstract_devices(
        topology.num_chips * config.num_slices, config.num_slices
      )
  else:
    devices = jax.devices()
    name, kind = 'local', devices[0].device_kind
    known = chips.chip_of(devices[0])
    if known is None:
      notes.append(
        f'What a device of kind {kind!r} can do is not known: nothing is said'
        ' of whether it fits, of times and of utilization. Compile for chips,'
        " such as config.topology = 'v4:2x2x1'."
      )
      return devices, report_lib.Target(
        name=name, device_kind=kind, num_slices=1, num_devices=len(devices)
      )
    chip, ici_bandwidth = known, known.ici_bandwidth
    # JAX takes for itself only a part of a GPU, and says which; but not where
    # it is told to ask for each array by itself.
    stats = jax.local_devices()[0].memory_stats() or {}
    if limit := stats.get('bytes_limit'):
      chip = dataclasses.replace(chip, hbm_bytes=float(limit))
  return devices, report_lib.Target(
    name=name,
    device_kind=kind,
    num_slices=1,
    num_devices=len(devices),
    hbm_bytes=chip.hbm_bytes,
    peak_flops=chip.peak_flops,
    hbm_bandwidth=chip.hbm_bandwidth,
    ici_bandwidth=ici_bandwidth,
    dcn_bandwidth=chip.dcn_bandwidth,
  )


def _preset(rules: partitioning.Rules) -> str:
  for name, preset in partitioning.PRESETS.items():
    if preset == rules:
      return name
  return 'by its own rules'


def _build(
  experiment_class: Any, config: config_dict.ConfigDict
) -> sharded.ShardedExperiment:
  made_by = experiment_class
  while isinstance(made_by, functools.partial):
    made_by = made_by.func
  if isinstance(made_by, type):  # Before it makes its arrays.
    _check_sharded(made_by)
  experiment, _ = train.build_for_training(experiment_class, config)
  _check_sharded(type(experiment))
  assert isinstance(experiment, sharded.ShardedExperiment)
  experiment.on_nonfinite = config.on_nonfinite
  return experiment


def _check_sharded(made_by: type) -> None:
  if not issubclass(made_by, sharded.ShardedExperiment):
    raise chips.TargetError(
      f'{made_by.__name__} has no sharded step, and no other is compiled with'
      ' --jaxline_mode=compile. Derive it from sharded.ShardedExperiment.'
    )


# The steps.


@dataclasses.dataclass(frozen=True)
class _Step:
  """A step to compile.

  Attributes:
    name: for the report.
    jitted: the step, compiled where it is called.
    args: state, batch and key as shapes with shardings.
    model_flops: see `report.Program`.
  """

  name: str
  jitted: Any
  args: tuple[Any, Any, Any]
  model_flops: float

  def program(self, **values: Any) -> report_lib.Program:
    return report_lib.Program(
      name=self.name, model_flops=self.model_flops, **values
    )


def _steps(
  experiment: sharded.ShardedExperiment, notes: list[str]
) -> Iterator[_Step]:
  """Yields the train step and, if there is an evaluation, the eval step."""
  state, rng = experiment.abstract_state(), experiment.abstract_rng()
  for is_training in (True, False):
    try:
      batch = experiment.abstract_batch(is_training)
    except NotImplementedError:
      if is_training:
        raise
      notes.append('There is no eval step: eval_input is not implemented.')
      return
    args = (
      state if is_training else dataclasses.replace(state, opt_state=None),
      batch,
      rng,
    )
    flops = model_flops(experiment, batch, is_training)
    if is_training:
      jitted = experiment.compiled_train_step
      yield _Step('train step', jitted, args, flops)
    else:
      yield _Step('eval step', experiment.compiled_eval_step, args, flops)


def model_flops(
  experiment: sharded.ShardedExperiment, batch: Any, is_training: bool
) -> float:
  """Returns the FLOPs that the model needs for a step, all chips together.

  Three times those of the products of its forward pass in training, whatever
  is computed again; once in an evaluation.

  Args:
    experiment: the experiment.
    batch: as `abstract_batch` returns it.
    is_training: for which step.
  """

  def forward(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    return experiment.loss_fn(params, model_state, batch, rng, is_training)

  state = experiment.abstract_state()
  whole = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    (state.params, state.model_state, batch, experiment.abstract_rng()),
  )
  # As the step is traced: the loss may ask which mesh it is on.
  with experiment.partitioner.activate():
    flops = counting.flops(forward, *whole)
  # Bubbles of a pipeline are computed, and are no part of the model. What is
  # outside of the pipeline, such as the logits, is taken to be within, and so
  # comes out too low: by 0.4% of the whole for GPT-3 3B in 8 stages.
  flops *= 1 - experiment.bubble_fraction
  return counting.PRODUCTS_IN_TRAINING * flops if is_training else flops


def _size(step: _Step, target: report_lib.Target) -> report_lib.Program:
  """Returns what is known of a step without a compiler."""
  num_bytes = _bytes(step.args)
  # Whether it fits is not known, unless what it is called with does not.
  fits = False if num_bytes > (target.hbm_bytes or math.inf) else None
  return step.program(argument_bytes=num_bytes, fits=fits)


def _compile(
  step: _Step,
  experiment: sharded.ShardedExperiment,
  target: report_lib.Target,
) -> report_lib.Program:
  """Compiles a step, and reads what came of it."""
  if jax.process_index() == 0:
    print(f'Compiling the {step.name} for {target.name}: minutes.', flush=True)
  lowered = step.jitted.lower(*step.args)
  with memory.dump() as dump:
    start = time.monotonic()
    try:
      compiled = lowered.compile(compiler_options=dict(dump.options))
    except jax.errors.JaxRuntimeError as e:
      needed = memory.needed_bytes(str(e))
      if needed is None:
        raise
      # To the byte, where XLA has written it down.
      values: dict[str, Any] = {
        'fits': False,
        'peak_bytes': dump.total_bytes() or needed,
      }
      text = dump.module()
    else:
      values = _memory(compiled, target)
      try:
        text = compiled.as_text()
      except jax.errors.JaxRuntimeError:
        # The compiler may know instructions that this jaxlib does not.
        text = dump.module()
    values['compile_secs'] = time.monotonic() - start
    values['buffers'] = tuple(dump.buffers()[:_NUM_LARGEST])
  if text:
    values |= _read(text, step.model_flops, experiment, target)
  return step.program(**values)


def _memory(compiled: Any, target: report_lib.Target) -> dict[str, Any]:
  """Returns the memory that a compiled program takes of a chip."""
  stats = compiled.memory_analysis()
  peak = (
    stats.argument_size_in_bytes
    + stats.output_size_in_bytes
    + stats.temp_size_in_bytes
    - stats.alias_size_in_bytes
  )
  return {
    'argument_bytes': stats.argument_size_in_bytes,
    'output_bytes': stats.output_size_in_bytes,
    'alias_bytes': stats.alias_size_in_bytes,
    'temp_bytes': stats.temp_size_in_bytes,
    'peak_bytes': peak,
    'fits': peak <= target.hbm_bytes if target.hbm_bytes else None,
  }


def _read(
  text: str,
  model_flops: float,
  experiment: sharded.ShardedExperiment,
  target: report_lib.Target,
) -> dict[str, Any]:
  """Returns what the text of a compiled program says."""
  flops = hlo.flops(text)
  hbm_bytes = hlo.bytes_accessed(text)
  partitioner = experiment.partitioner
  traffic = tuple(_traffic(text, partitioner.axis_sizes, partitioner.slices))
  return {
    'flops': flops,
    'hbm_bytes': hbm_bytes,
    'traffic': traffic,
    'unknown_loops': tuple(hlo.unknown_loops(text)),
    'unknown_kernels': tuple(hlo.uncounted_kernels(text)),
    'roofline': report_lib.roofline(
      target,
      flops=flops,
      hbm_bytes=hbm_bytes,
      traffic=traffic,
      model_flops=model_flops,
    ),
  }


def _traffic(
  text: str, axis_sizes: Mapping[str, int], slices: Sequence[int]
) -> Iterator[report_lib.Traffic]:
  """Yields the collectives, those of a kind over the same axes together."""
  groups: dict[tuple[str, tuple[str, ...]], list[hlo.Collective]] = {}
  for found in hlo.collectives(text, axis_sizes, slices):
    groups.setdefault((found.kind, found.axes), []).append(found)
  made = [
    report_lib.Traffic(
      kind=kind,
      axes=axes,
      count=sum(c.count for c in group),
      bytes=sum(c.count * c.bytes for c in group),
      wire_bytes=sum(c.count * c.wire_bytes for c in group),
      dcn_bytes=sum(
        c.count * c.wire_bytes * _dcn_part(c, axis_sizes, slices) for c in group
      ),
    )
    for (kind, axes), group in groups.items()
  ]
  yield from sorted(made, key=lambda t: -t.wire_bytes)


def _dcn_part(
  collective: hlo.Collective,
  axis_sizes: Mapping[str, int],
  slices: Sequence[int],
) -> float:
  """Returns which part of what is sent must go to other slices.

  Of n devices in s slices, for reductions and gathers: within slices first,
  then between them: (s - 1) / (n - 1). Of an all-to-all, all that is for chips
  of other slices. Of a permute, everything, since one chip that must send far
  keeps the others waiting.
  """
  if not collective.crosses_slices:
    return 0.0
  n = collective.group_size
  where = np.asarray(slices).reshape(tuple(axis_sizes.values()))
  first = tuple(
    slice(None) if axis in collective.axes else 0 for axis in axis_sizes
  )
  s = min(len(np.unique(where[first])), n)
  if collective.kind == 'all-to-all':
    return (n - n // s) / (n - 1)
  if collective.kind in ('all-reduce', 'all-gather', 'reduce-scatter'):
    return (s - 1) / (n - 1)
  return 1.0


# The state.


def _bytes(tree: Any) -> int:
  """Returns what a chip holds of a tree of shapes with shardings."""
  return counting.state_bytes_per_device(
    tree, jax.tree.map(lambda x: x.sharding, tree)
  )


def _gradient_bytes(
  experiment: sharded.ShardedExperiment, state: sharded.TrainState
) -> int:
  """Returns what a chip holds of the gradients, if they are all there."""

  def gradient(x: Any) -> Any:
    # Sums over parts of a batch are kept in float32, at least.
    is_narrow = jnp.finfo(x.dtype).bits < jnp.finfo(jnp.float32).bits
    dtype = jnp.float32 if is_narrow else x.dtype
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

  if experiment.accumulation_steps == 1:
    return _bytes(state.params)
  return _bytes(jax.tree.map(gradient, state.params))


def _beside_evaluation(
  state: sharded.TrainState,
  compiled: Sequence[report_lib.Program],
  target: report_lib.Target,
) -> Iterator[str]:
  """Yields a note where an evaluation fits only without the optimizer."""
  hbm_bytes = target.hbm_bytes or math.inf
  waiting = _bytes(state.opt_state)
  for program in compiled[1:]:
    peak = program.peak_bytes
    if peak is not None and peak <= hbm_bytes < peak + waiting:
      yield (
        f'The eval step fits by itself, but not with'
        f' --jaxline_mode=train_and_eval: there the'
        f" {report_lib.size_text(waiting)} of the optimizer's state stay on the"
        ' chips meanwhile. Evaluate smaller batches, or in a run of its own.'
      )


def _state_buffers(state: sharded.TrainState) -> tuple[memory.Buffer, ...]:
  """Returns the largest arrays of the state, as a chip holds them."""
  found = []
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    shape = x.sharding.shard_shape(x.shape)
    found.append(
      memory.Buffer(
        bytes=math.prod(shape) * x.dtype.itemsize,
        shape=f'{x.dtype.name}[{",".join(map(str, shape))}]',
        kind='argument',
        name=f'state{jax.tree_util.keystr(path)}',
      )
    )
  found.sort(key=lambda b: (-b.bytes, b.name))
  return tuple(found[:_NUM_LARGEST])


def _versions(topology: str | None) -> dict[str, str]:
  versions = {'jax': jax.__version__, 'jaxlib': jaxlib.__version__}
  if topology:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions['libtpu'] = importlib.metadata.version('libtpu')
  return versions


# What to change.


def _hints(
  report: report_lib.Report, config: config_dict.ConfigDict
) -> Iterator[str]:
  """Yields changes of a run that does not fit, most effective first."""
  hbm_bytes = report.target.hbm_bytes or math.inf
  train_step = report.programs[0]
  if train_step.fits is not False:
    yield (
      'Smaller batches in eval_input: it is only the eval step that does not'
      ' fit.'
    )
    yield from _smaller_forward(config)
    return
  peak = train_step.peak_bytes or 0
  state = report.state_bytes + report.gradient_bytes
  smaller_state = list(_smaller_state(report, config, state))
  if report.state_bytes > hbm_bytes:
    yield from smaller_state
    yield 'Nothing less is enough: the state alone is larger than a chip.'
    return
  if state > _MUCH * peak:
    yield from smaller_state
  yield from _smaller_activations(report, config)
  if state <= _MUCH * peak:
    yield from smaller_state


def _smaller_state(
  report: report_lib.Report, config: config_dict.ConfigDict, state: int
) -> Iterator[str]:
  takes = (
    f'weights, optimizer and gradients take {report_lib.size_text(state)} of'
    ' each chip'
  )
  if report.sharding in ('ddp', 'tp') and report.mesh['data'] > 1:
    better = {'ddp': 'fsdp', 'tp': 'fsdp_tp'}[report.sharding]
    chips_of_data = report.mesh['data']
    left = state / chips_of_data
    yield (
      f"config.sharding = '{better}', which splits the weights over"
      f' {chips_of_data} chips of `data`: {takes}, and would take'
      f' {report_lib.size_text(left)}.'
    )
    hbm_bytes = report.target.hbm_bytes or math.inf
    if left > hbm_bytes:
      more = math.ceil(state / (_MUCH * hbm_bytes))
      yield (
        'More chips besides (config.topology): along `data`, at least'
        f' {more} for the state to take half of each.'
      )
  else:
    also = " and config.sharding = 'fsdp'," if report.sharding == 'ddp' else ''
    yield (
      f'More chips (config.topology),{also} over which config.mesh.ici.data or'
      f' .mdl splits the weights: {takes}.'
    )


def _smaller_activations(
  report: report_lib.Report, config: config_dict.ConfigDict
) -> Iterator[str]:
  for key, value in _settings(config, 'remat'):
    if value not in ('full', 'offload'):
      yield (
        f"{key} = 'full'{_now(value)}: keeps only what goes from layer to"
        ' layer, and computes the rest again.'
      )
  parts = config.gradient_accumulation_steps
  shards = report.mesh['replica'] * report.mesh['data']
  if report.batch_rows % (2 * parts * shards) == 0:
    yield (
      f'config.gradient_accumulation_steps = {2 * parts}{_now(parts)}, or half'
      ' the batch: halves what the forward pass keeps.'
    )
  else:
    yield (
      f'A smaller batch, or more chips: {report.batch_rows} rows in {parts}'
      f' parts over {shards} chips cannot be halved.'
    )
  yield from _smaller_forward(config)
  for key, value in _settings(config, 'remat'):
    if value != 'offload':
      yield (
        f"{key} = 'offload'{_now(value)}: what is kept waits in the host's"
        ' memory.'
      )


def _smaller_forward(config: config_dict.ConfigDict) -> Iterator[str]:
  for key, value in _settings(config, 'loss_chunks'):
    yield (
      f'{key} = {2 * (value or 4)}{_now(value)}: the logits are never there all'
      ' at once.'
    )
  for key, value in _settings(config, 'dtype'):
    if value != 'bfloat16':
      yield f"{key} = 'bfloat16'{_now(value)}: halves activations of float32."


def _now(value: Any) -> str:
  return '' if value is None else f' (it is {value!r})'


def _settings(
  config: config_dict.ConfigDict, name: str
) -> list[tuple[str, Any]]:
  """Returns the experiment's settings of a name: where, and the value.

  Where the config has none, the experiment may have it as a default: then the
  value is None.
  """

  def search(part: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key in part:
      if isinstance(part[key], config_dict.ConfigDict):
        yield from search(part[key], f'{prefix}.{key}')
      elif key == name:
        yield f'{prefix}.{key}', part[key]

  found = list(search(config.experiment_kwargs, 'config.experiment_kwargs'))
  return found or [(f'Where the experiment has it: {name}', None)]
