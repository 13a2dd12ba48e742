"""What the terminal shows before a run and after it."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import os
import pathlib
import shlex
import sys
import textwrap
from typing import Any

import jax

from jaxline.metrics import lines as lines_lib

_WIDTH = 80
_INDENT = 15  # Of the values: the longest label and two spaces.
_MAX_VALUE_LINES = 5


@dataclasses.dataclass(frozen=True)
class Origin:
  """How a run was started.

  Attributes:
    command: the command line, with the interpreter; empty if it was a call.
    config_file: as the command line names it; empty if there was none.
    overrides: the dotted keys that were given other values, and the values.
  """

  command: tuple[str, ...] = ()
  config_file: str = ''
  overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @classmethod
  def of(cls, flag: Any) -> 'Origin':
    """Returns how this process was started; `flag` is that of the config."""
    command = ('python', *sys.orig_argv[1:])
    if not flag.present:  # Its value was set without a file.
      return cls(command)
    changed = {
      key: value
      for key, value in flag.override_values.items()
      # The default of the flag of a key is the value in the file.
      if flag.flag_values[f'{flag.name}.{key}'].default != value
    }
    return cls(command, flag.config_filename, changed)


def start_block(
  config: Any, experiment: Any, origin: Origin, start: str
) -> list[str]:
  """Returns the lines that are shown before the first step or evaluation.

  Args:
    config: the run's.
    experiment: the one that is trained or evaluated.
    origin: how the run was started.
    start: where the run begins.
  """
  kind = type(experiment)
  directory = relative(config.checkpoint_dir or '')
  has_events = directory and 'tensorboard' in config.writers
  overrides = [
    f'{key}={value}'
    for key, value in origin.overrides.items()
    if key != 'checkpoint_dir'
  ]
  data = experiment.data_summary
  values = {
    'Experiment': config.experiment_class
    or f'{kind.__module__}:{kind.__qualname__}',
    'Config': ', '.join(filter(None, [origin.config_file, *overrides])),
    'Devices': _devices(config, experiment),
    'Parameters': _parameters(experiment),
    # Another program may have an attribute of this name.
    'Data': data.strip() if isinstance(data, str) else '',
    'Run directory': directory,
    'TensorBoard': f'tensorboard --logdir {directory}' if has_events else '',
    'Start': start,
  }
  lines: list[str] = []
  for label, value in values.items():
    lines += textwrap.wrap(
      value,
      _WIDTH,
      initial_indent=f'{label}:'.ljust(_INDENT),
      subsequent_indent=' ' * _INDENT,
      break_long_words=False,
      break_on_hyphens=False,
      max_lines=_MAX_VALUE_LINES,
      placeholder=' ... (the rest is in config.json)',
    )
  return lines


def _devices(config: Any, experiment: Any) -> str:
  devices = jax.devices()
  text = f'{len(devices)} x {devices[0].device_kind}'
  if jax.process_count() > 1:
    text += f' in {jax.process_count()} processes'
  if experiment.IS_SHARDED:
    sizes = experiment.partitioner.axis_sizes.items()
    if axes := [f'{axis} {size}' for axis, size in sizes if size > 1]:
      text += f'; mesh {", ".join(axes)}; sharding {config.sharding}'
  return text


def _parameters(experiment: Any) -> str:
  """Returns how many weights there are, and how they are split."""
  split = ''
  if experiment.IS_SHARDED:
    params = experiment.abstract_state().params
    leaves, split = jax.tree.leaves(params), f'; {_split(params)}'
    trained = jax.tree.leaves(experiment.trained(params))
    if len(trained) < len(leaves):
      count = sum(math.prod(x.shape) for x in trained)
      split = f'; {count:,} of them train, in {len(trained)} arrays{split}'
  else:
    names = experiment.CHECKPOINT_ATTRS
    weights = {k: v for k, v in names.items() if 'param' in f'{k} {v}'}
    leaves = [
      # Without the axis of devices.
      jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
      for attribute in weights or names
      for x in jax.tree.leaves(getattr(experiment, attribute, None))
      if hasattr(x, 'dtype') and getattr(x, 'shape', None)
    ]
  if not leaves:
    return ''
  count = sum(math.prod(x.shape) for x in leaves)
  num_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
  size = lines_lib.size(num_bytes)
  return f'{count:,} ({size}) in {len(leaves)} arrays{split}'


def _split(params: Any) -> str:
  """Says how many arrays are split over which axes.

  Args:
    params: the weights' shapes and shardings.
  """
  axes: dict[str, None] = {}
  num_split = 0
  for leaf in jax.tree.leaves(params):
    sizes = leaf.sharding.mesh.shape
    parts = [x if isinstance(x, tuple) else (x,) for x in leaf.sharding.spec]
    own = [axis for part in parts for axis in part if sizes.get(axis, 1) > 1]
    axes |= dict.fromkeys(own)
    num_split += bool(own)
  if not num_split:
    return 'each device has all'
  return f'{num_split} of them split over {" and ".join(axes)}'


def relative(directory: str) -> str:
  """Returns a directory relative to the working directory, if it is in it."""
  return directory.removeprefix(f'{pathlib.Path.cwd()}{os.sep}')


def end_block(
  config: Any,
  experiment: Any,
  origin: Origin,
  spent: Mapping[str, float],
  total: float,
  is_over: bool | None,
  has_checkpoint: bool,
) -> list[str]:
  """Returns the last lines: where the time went, and what one may do next.

  Args:
    config: the run's.
    experiment: the one that was trained or evaluated.
    origin: how the run was started.
    spent: category -> seconds.
    total: all seconds of the run.
    is_over: whether the run has taken all its steps; None if it only evaluated
      or was stopped, so that there is no command to train on.
    has_checkpoint: whether there is one to go on from.
  """
  parts = sorted(spent.items(), key=lambda item: -item[1])
  shares = [(name, 100 * secs / total) for name, secs in parts]
  time = ', '.join(f'{name} {x:.0f}%' for name, x in shares if x >= 0.5)
  block = [f'Time: {time}.'] if time else []
  directory = relative(config.checkpoint_dir or '')
  if not directory:
    return block
  block.append(f'Run directory: {directory}')
  commands: dict[str, str] = {}
  if has_checkpoint and config.checkpointer != 'memory':
    changes = {'checkpoint_dir': directory}
    if is_over and config.training_steps:  # No step is left.
      changes['training_steps'] = 2 * config.training_steps
      # A schedule of the experiment may refer to it.
      changes['on_config_change'] = 'continue'
    commands = _next_commands(config, experiment, origin, changes)
    if is_over is None or (is_over and 'training_steps' not in changes):
      del commands['Go on']
  if 'jsonl' in config.writers:
    command = f'python -m jaxline.runs compare {shlex.quote(directory)}'
    commands['Curves'] = command
  return block + [f'{f"{k}:":10}{text}' for k, text in commands.items()]


def _next_commands(
  config: Any, experiment: Any, origin: Origin, changes: Mapping[str, Any]
) -> dict[str, str]:
  """Returns the commands that go on from a checkpoint, and that look at it.

  Args:
    config: the run's.
    experiment: the one that was trained or evaluated.
    origin: how the run was started.
    changes: what to override to go on, the directory first.
  """
  if not origin.command:
    name = type(experiment).__name__
    argument = '' if config.experiment_class else f', experiment_class={name}'
    return {
      'Go on': f'jaxline.fit(..., overrides={changes})',
      'Evaluate': f'jaxline.evaluate({changes["checkpoint_dir"]!r}{argument})',
    }
  where, *others = (f'--config.{key}={x}' for key, x in changes.items())
  run = [where]
  names = {arg.partition('=')[0].lstrip('-') for arg in origin.command}
  record = pathlib.Path(config.checkpoint_dir) / 'config.json'
  go_on: Sequence[str]
  look: Sequence[str]
  if jax.process_count() > 1:
    # Each process knows its own command, and not that of the launcher.
    go_on = look = ('the', 'same', 'command', 'with')
  # A program may make the config's flag from flags of its own.
  elif names & {'config', 'jaxline_run'} and record.is_file():
    go_on = look = _without(origin.command, 'config', 'jaxline_run')
    run = [f'--jaxline_run={changes["checkpoint_dir"]}']
    if config.checkpoint_allow_pickle:  # It is not taken from the directory.
      run.append('--config.checkpoint_allow_pickle')
  else:
    go_on = _without(origin.command, *(f'config.{key}' for key in changes))
    own = ('checkpoint_dir', 'one_off_evaluate', 'eval_steps')
    look = _without(origin.command, *(f'config.{key}' for key in own))
  # The base class has one, which only says that there is none.
  if experiment.decode.__module__ != 'jaxline.experiment':
    name, flags = 'Decode', ['--jaxline_mode=decode']
  else:
    name = 'Evaluate'
    flags = ['--jaxline_mode=eval', '--config.one_off_evaluate']
  return {
    'Go on': shlex.join([*go_on, *run, *others]),
    name: shlex.join([*_without(look, 'jaxline_mode'), *run, *flags]),
  }


def _without(args: Sequence[str], *flags: str) -> tuple[str, ...]:
  """Returns arguments without `--flag=x`, `--flag x` and `--flag.key=x`."""
  kept, skips = [], False
  for arg in args:
    name, equals, _ = arg.partition('=')
    is_value, skips = skips and not arg.startswith('-'), False
    if is_value:
      continue
    bare = name.lstrip('-')
    if arg.startswith('-') and any(
      f'{x}.'.startswith(f'{flag}.')
      for x in (bare, bare.removeprefix('no'))  # --noflag, of a boolean.
      for flag in flags
    ):
      skips = not equals
    else:
      kept.append(arg)
  return tuple(kept)
