"""Replays steps of a run exactly, and writes nothing to it.

A replay restores the newest kept checkpoint before a step (or starts from the
seed) and runs the recorded config from there, in the run's own training loop.
On the devices and versions of the run it gives the run's numbers bit for bit.
"""

import argparse
import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import copy
import dataclasses
import os
import re
import tempfile
import traceback
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxline import base_config
from jaxline import debug
from jaxline import errors
from jaxline import platform
from jaxline import runs
from jaxline import train
from jaxline.checkpoint import base
from jaxline.checkpoint import contents
from jaxline.checkpoint import manager
from jaxline.checkpoint import store as store_lib
from jaxline.compat import adapters
from jaxline.metrics import fingerprints
from jaxline.metrics import lines
from jaxline.metrics import writers

# Files whose lines do not say which operation of the model it was.
_LIBRARIES = re.compile(r'(site|dist)-packages|/jaxline/|lib/python3')

# Scalars that depend on the clock or the machine.
_CLOCKED = re.compile(
  r'.*/(input_wait_fraction|\w+_per_sec|mfu|device_memory_gib)'
)

OnStep = Callable[[int, Mapping[str, Any]], None]


class _Enough(errors.StopTraining):
  """Ends the training loop after the last step to replay."""


@dataclasses.dataclass
class Replay:
  """A run's training at one of its steps, in memory.

  Attributes:
    directory: the run's.
    config: the recorded config.
    experiment: the experiment, in mode 'train'.
    state: the live state of `latest`: `global_step` and `train_step_rng`.
    start: the step that the replay began from.
    record: the record of the checkpoint there; None if it began from the seed.
  """

  directory: str
  config: Any
  experiment: Any
  state: Any
  start: int
  record: Mapping[str, Any] | None

  def run(
    self, until: int, on_step: OnStep = lambda step, scalars: None
  ) -> None:
    """Runs steps.

    Args:
      until: the number of the last one; steps are counted from 1.
      on_step: called after each step with its number and its scalars, which
        may still be on the devices.

    Raises:
      errors.UsageError: the replay is behind that step.
    """
    if self.state.global_step == until:
      return
    if self.state.global_step > until:
      raise errors.UsageError(
        f'{self.directory} has no step {until + 1} to replay: it began at step'
        f' {self.state.global_step + 1}.'
      )

    def act(t: float, step: int, scalars: Mapping[str, Any]) -> None:
      del t
      on_step(step, scalars)
      if step >= until:
        raise _Enough

    log = writers.MultiWriter([])
    action = adapters.full_action(act)
    with contextlib.suppress(_Enough):
      self.experiment.train_loop(self.config, self.state, [action], log)


@contextlib.contextmanager
def opened(
  directory: str | os.PathLike[str],
  before: int,
  overrides: Mapping[str, Any] | None = None,
  experiment_class: Any = None,
) -> Iterator[Replay]:
  """Yields a replay of a run, at its newest kept checkpoint before a step.

  Args:
    directory: the run's, or its address.
    before: the checkpoint's step is less than this.
    overrides: dotted key -> value, over the recorded config.
    experiment_class: None is the class that the config names.

  Raises:
    errors.UsageError: the directory is not that of a run.
  """
  config = base_config.recorded_config(directory)
  config.update_from_flattened_dict(dict(overrides or {}))
  config.checkpointer = 'durable'
  if experiment_class is None:
    experiment_class = adapters.resolve_experiment_class(
      config, is_recorded='experiment_class' not in (overrides or {})
    )
  store = store_lib.at(directory)
  manifests = manager.Manifests(store.below('checkpoints'))
  start = max(
    (s for s in manifests.steps('latest') if s < before), default=None
  )
  record = None
  with contextlib.ExitStack() as stack:
    config.checkpoint_dir = store.url
    if start is None:  # Of the run's own checkpoints, none may be restored.
      folder = tempfile.TemporaryDirectory(prefix='jaxline_replay_')
      config.checkpoint_dir = stack.enter_context(folder)
    else:
      record = contents.Checkpoint(manifests, 'latest', start, False).record
    # By the name 'eval' it only reads `latest`; 'train' follows `restore_from`.
    mode = 'train' if start is None else 'eval_replay'
    full = adapters.full_checkpointer(
      platform.create_checkpointer(config, mode)
    )
    full.reads_only = True
    stack.callback(full.close)
    experiment, rng = train.build_for_training(experiment_class, config)
    rng = experiment.initialize_train_step_rng(rng)
    state = base.new_state(full, experiment, rng)
    if full.can_be_restored('latest'):
      full.restore('latest', step=start)
    state.global_step = int(state.global_step)
    yield Replay(
      store.url, config, experiment, state, state.global_step, record
    )


def logged(directory: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
  """Returns step -> scalars that a run has logged, with its fingerprints."""
  found: dict[int, dict[str, Any]] = collections.defaultdict(dict)
  for name, curve in runs.read(directory).curves.items():
    for step, value in curve.items():
      found[step][name] = value
  raw = store_lib.at(directory).read(f'train/{fingerprints.FILE}')
  for step, value in fingerprints.read(raw).items():
    found[step]['train/fingerprint'] = value
  return found


def is_same(name: str, one: Any, other: Any) -> bool:
  """Returns whether two logged values are equal, or depend on the clock."""
  clocked = _CLOCKED.fullmatch(name)
  return bool(clocked) or one == other or (one != one and other != other)


def compare(
  replay: Replay, first: int, until: int, say: Callable[[str], None] = print
) -> bool:
  """Replays steps and compares what the run has logged of them.

  Args:
    replay: the replay, before `first`.
    first: the first step to compare.
    until: the last one.
    say: prints a line.

  Returns:
    Whether every compared value is equal to the bit.
  """
  before = logged(replay.directory)
  counts = {True: 0, False: 0}

  def check(step: int, scalars: Mapping[str, Any]) -> None:
    if step < first:
      return
    found = writers.to_scalars(scalars)
    batch = replay.experiment.last_batch
    found['fingerprint'] = int(fingerprints.of_step(scalars, batch))
    for name, value in found.items():
      name = f'train/{name}'
      if name not in before[step] or _CLOCKED.fullmatch(name):
        continue
      is_equal = is_same(name, was := before[step][name], value)
      counts[is_equal] += 1
      if not is_equal:
        say(f'step {step}: {name} was {was!r} and is {value!r}')

  replay.run(until, check)
  total = sum(counts.values())
  if not total:
    say(f'Nothing is logged of the steps {first} to {until}.')
  elif counts[False]:
    say(f'{counts[False]} of {total} logged values differ.')
  else:
    say(f'All {total} logged values are equal to the bit.')
  return not counts[False]


def find_nonfinite(replay: Replay) -> str | None:
  """Runs the next step op by op, and finds its first NaN or infinity.

  Returns:
    The operation and the line of the model that called it; None if all results
    are finite.
  """
  run = debug.disable_pmap_jit(replay.run)
  op_by_op = mock.patch.multiple(
    debug.settings, disable_pmap_jit=True, log_tracebacks=False
  )
  step, found = replay.state.global_step + 1, None
  before = replay.experiment.snapshot_state()
  scalars: dict[str, Any] = {}
  # A mask of minus infinity is meant, and no NaN: those count first. But the
  # line of a gradient is not known, and its cause may be an infinity before.
  for switch in (jax.debug_nans, jax.debug_infs):
    try:
      with op_by_op, switch(True):
        run(step, lambda _, found: scalars.update(writers.to_scalars(found)))
    except FloatingPointError as e:
      frames = list(traceback.extract_tb(e.__traceback__))
      # An experiment's own `step` is above the model.
      outside = [f.filename.endswith('/train_step.py') for f in frames]
      frames = frames[outside.index(True) if any(outside) else 0 :]
      own = [f for f in frames if not _LIBRARIES.search(f.filename)]
      if own:
        return f'{e}\n  {own[-1].filename}:{own[-1].lineno}: {own[-1].line}'
      found = found or f'{e}, in a gradient'
    else:
      if all(np.all(np.isfinite(x)) for x in scalars.values()):
        break
      replay.experiment.restore_from_snapshot(before)
      replay.state.global_step = step - 1
  return found


def save(replay: Replay, directory: str) -> None:
  """Saves the replayed state as the checkpoint of a run of its own."""
  config = copy.deepcopy(replay.config)
  config.checkpoint_dir = store_lib.at(directory).url
  checkpointer = adapters.full_checkpointer(
    platform.create_checkpointer(config, 'train')
  )
  with contextlib.closing(checkpointer):
    checkpointer.begin_training(type(replay.experiment))
    checkpointer.get_experiment_state('latest').update(replay.state)
    checkpointer.save('latest')
    checkpointer.wait_for_checkpointing_to_finish()


def positive(text: str) -> int:
  """Returns the number of a step on the command line, from 1."""
  if not text.isdecimal() or not int(text):
    raise argparse.ArgumentTypeError(f'{text} is not a number from 1')
  return int(text)


def add_command(commands: Any) -> None:
  """Adds `replay` to the commands of `python -m jaxline.runs`."""
  command = commands.add_parser('replay', help=__doc__.splitlines()[0])
  command.add_argument('dir', help='the run')
  command.add_argument('step', type=positive, help='the first step to compare')
  for flag, kind, what in (
    ('--steps', int, 'how many steps to run after it'),
    ('--save', str, 'a new directory for the checkpoint of the last step'),
  ):
    command.add_argument(flag, type=kind, help=what)
  command.add_argument(
    '--nan',
    action='store_true',
    help='find the first operation of STEP whose result is not finite',
  )
  command.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> int:
  last = args.step + max(args.steps or 0, 0)
  if args.save and store_lib.at(args.save).names():
    raise errors.UsageError(
      f'--save: {args.save} is not empty; give a new directory.'
    )
  with opened(args.dir, args.step) as replay:
    before, rates = replay.start, runs.read(args.dir).curves
    num_steps = max(last - before, 0)
    rate = max(rates.get('train/steps_per_sec', {0: 0.0}).values())
    about = f', about {lines.duration(num_steps / rate)}' if rate else ''
    print(
      f'Replaying {num_steps} steps from'
      f' {f"the checkpoint of step {before}" if before else "the seed"}{about}.'
    )
    if replay.record and (was := replay.record['devices']) != (
      now := [jax.device_count(), jax.devices()[0].device_kind]
    ):
      print(
        f'The run had the devices {was}, and here are {now}: bits may differ.'
      )
    if args.nan:
      replay.run(args.step - 1)
      found = find_nonfinite(replay)
      print(found or f'All results of step {args.step} are finite.')
      return 0
    is_equal = compare(replay, args.step, last)
    if args.save:
      save(replay, args.save)
  return 0 if is_equal else 1
