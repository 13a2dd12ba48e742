"""What the terminal shows before a run and after it."""

from collections.abc import Iterator, Mapping, Sequence
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
_LARGE_BYTES = 1 << 20  # Of an array that each device should not have whole.


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
    """Returns how the command line of this process has started the run.

    Args:
      flag: of the config.
    """
    command = ('python', *sys.orig_argv[1:])
    if not flag.present:  # Its value was set without a file.
      return cls(command)

    def differs(key: str, value: Any) -> bool:
      # The default of the flag of a key is the value in the file.
      return flag.flag_values[f'{flag.name}.{key}'].default != value

    given = flag.override_values
    changed = {k: x for k, x in given.items() if differs(k, x)}
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
  overrides = [
    f'{key}={value}'
    for key, value in origin.overrides.items()
    if key != 'checkpoint_dir'
  ]
  values = {
    'Experiment': config.experiment_class
    or f'{kind.__module__}:{kind.__qualname__}',
    'Config': ', '.join(filter(None, [origin.config_file, *overrides])),
    'Devices': _devices(config, experiment),
    'Parameters': _parameters(experiment),
    'Data': _data(experiment),
    'Run directory': directory,
    'TensorBoard': f'tensorboard --logdir {directory}'
    if directory and 'tensorboard' in config.writers
    else '',
    'Start': start,
  }
  lines: list[str] = []
  for label, value in values.items():
    if not value:
      continue
    wrapped = textwrap.wrap(
      value,
      _WIDTH - _INDENT,
      break_long_words=False,
      break_on_hyphens=False,
      max_lines=_MAX_VALUE_LINES,
      placeholder=' ... (the rest is in config.json)',
    )
    lines.append(f'{label}:'.ljust(_INDENT) + wrapped[0])
    lines += [' ' * _INDENT + line for line in wrapped[1:]]
  return lines


def _data(experiment: Any) -> str:
  """Returns what an experiment says of its data; not another's attribute."""
  text = getattr(experiment, 'data_summary', '')
  return text.strip() if isinstance(text, str) else ''


def _devices(config: Any, experiment: Any) -> str:
  devices = jax.devices()
  text = f'{len(devices)} x {devices[0].device_kind}'
  if jax.process_count() > 1:
    text += f' in {jax.process_count()} processes'
  if partitioner := getattr(experiment, 'partitioner', None):
    sizes = partitioner.axis_sizes.items()
    axes = [f'{axis} {size}' for axis, size in sizes if size > 1]
    if axes:
      text += f'; mesh {", ".join(axes)}; sharding {config.sharding}'
  return text


def _parameters(experiment: Any) -> str:
  """Returns how many weights there are, and how they are split."""
  if getattr(experiment, 'IS_SHARDED', False) is True:
    params = experiment.abstract_state().params
    leaves = jax.tree.leaves(params)
    return f'{_count(leaves)}; {_split(params)}' if leaves else ''
  names: dict[str, str] = {**getattr(experiment, 'CHECKPOINT_ATTRS', {})}
  weights = {k: v for k, v in names.items() if 'param' in f'{k} {v}'}
  leaves = [
    # Without the axis of devices.
    jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    for attribute in weights or names
    for x in jax.tree.leaves(getattr(experiment, attribute, None))
    if hasattr(x, 'dtype') and getattr(x, 'shape', None)
  ]
  return _count(leaves) if leaves else ''


def _bytes(leaf: Any) -> int:
  return math.prod(leaf.shape) * getattr(leaf.dtype, 'itemsize', 0)


def _count(leaves: Sequence[Any]) -> str:
  count = sum(math.prod(x.shape) for x in leaves)
  size = lines_lib.size(sum(map(_bytes, leaves)))
  return f'{count:,} ({size}) in {len(leaves)} arrays'


def _split(params: Any) -> str:
  """Says how many arrays are split over which axes, and what large one is not.

  Args:
    params: the weights' shapes and shardings.
  """
  axes: dict[str, None] = {}
  num_split = 0
  whole: dict[str, int] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    own = dict.fromkeys(_split_axes(leaf.sharding))
    num_split += bool(own)
    axes |= own
    if not own:
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      whole[name] = _bytes(leaf)
  if not num_split:
    return 'each device has all'
  text = f'{num_split} of them split over {" and ".join(axes)}'
  largest = max(whole, key=whole.__getitem__, default='')
  if largest and whole[largest] >= _LARGE_BYTES:
    text += f'; {largest} ({lines_lib.size(whole[largest])}) is not'
  return text


def _split_axes(sharding: Any) -> Iterator[str]:
  for part in sharding.spec:
    for axis in (part,) if isinstance(part, str) else part or ():
      if sharding.mesh.shape[axis] > 1:
        yield axis


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
    is_over: whether the run has taken all its steps; None if it only evaluated.
    has_checkpoint: whether there is one to go on from.
  """
  parts = sorted(spent.items(), key=lambda item: -item[1])
  shares = [(name, 100 * secs / total) for name, secs in parts]
  time = ', '.join(f'{name} {x:.0f}%' for name, x in shares if x >= 0.5)
  block = [f'Time: {time}.'] if time else []
  if config.checkpoint_dir:
    block.append(f'Run directory: {relative(config.checkpoint_dir)}')
  return block + _next_commands(
    config, experiment, origin, is_over, has_checkpoint
  )


def _next_commands(
  config: Any,
  experiment: Any,
  origin: Origin,
  is_over: bool | None,
  has_checkpoint: bool,
) -> list[str]:
  """Returns the commands that a user may want next; as for `end_block`."""
  directory = relative(config.checkpoint_dir or '')
  commands: dict[str, str] = {}
  if not (directory and has_checkpoint) or config.checkpointer == 'memory':
    pass
  elif origin.command and jax.process_count() > 1:
    # Each process knows its own command, and not that of the launcher.
    commands['Go on'] = (
      f'the same command with --config.checkpoint_dir={directory}'
    )
  elif not origin.command:
    commands['Go on'] = (
      f"jaxline.fit(..., overrides={{'checkpoint_dir': {directory!r}}})"
    )
    name = type(experiment).__name__
    argument = '' if config.experiment_class else f', experiment_class={name}'
    commands['Evaluate'] = f'jaxline.evaluate({directory!r}{argument})'
  else:
    own = list(_without(origin.command, 'config.checkpoint_dir'))
    own.append(f'--config.checkpoint_dir={directory}')
    commands['Go on'] = shlex.join(own)
    own = list(_without(own, 'jaxline_mode'))
    method = getattr(getattr(experiment, 'decode', None), '__qualname__', '')
    # The base class has one, which only says that there is none.
    if method and not method.startswith('AbstractExperiment.'):
      commands['Decode'] = shlex.join([*own, '--jaxline_mode=decode'])
    else:
      own += ['--jaxline_mode=eval', '--config.one_off_evaluate']
      commands['Evaluate'] = shlex.join(own)
  if is_over is not False:
    commands.pop('Go on', None)  # No step is left.
  if directory and 'jsonl' in config.writers:
    command = f'python -m jaxline.runs compare {shlex.quote(directory)}'
    commands['Curves'] = command
  return [f'{f"{k}:".ljust(10)}{text}' for k, text in commands.items()]


def _without(args: Sequence[str], flag: str) -> Iterator[str]:
  """Yields a command's arguments without a flag, `--flag=x` or `--flag x`."""
  skips = False
  for arg in args:
    name, equals, _ = arg.partition('=')
    if skips:
      skips = False
    elif name in (f'--{flag}', f'-{flag}'):
      skips = not equals
    else:
      yield arg
