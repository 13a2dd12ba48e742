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
import math
import os
import re
import tempfile
import traceback
from typing import Any
from unittest import mock

import jax

from jaxline import base_config
from jaxline import debug
from jaxline import distributed
from jaxline import errors
from jaxline import platform
from jaxline import runs
from jaxline import train
from jaxline import xla
from jaxline.checkpoint import base
from jaxline.checkpoint import manager
from jaxline.checkpoint import store as store_lib
from jaxline.compat import adapters
from jaxline.compat import devices
from jaxline.metrics import fingerprints
from jaxline.metrics import lines
from jaxline.metrics import writers

# Files whose lines do not say which operation of the model it was.
_LIBRARIES = re.compile(r'(site|dist)-packages|/jaxline/|lib/python3')

# Scalars that depend on the clock or the machine.
_CLOCKED = re.compile(
  r'.*/(input_wait_fraction|\w+_per_sec|mfu|device_memory_gib)'
)

# Between other devices, the sums of a step are rounded otherwise.
_RTOL = 0.01

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
    from_own: whether it began from a checkpoint of the run.
    devices: number and kind of the run's devices; None without a checkpoint.
  """

  directory: str
  config: Any
  experiment: Any
  state: Any
  start: int
  from_own: bool
  devices: list[Any] | None

  def run(
    self, until: int, on_step: OnStep = lambda step, scalars: None
  ) -> None:
    """Runs steps.

    Args:
      until: the number of the last one; steps are counted from 1.
      on_step: called after each step with its number and its scalars, which
        may still be on the devices.

    Raises:
      errors.UsageError: the run ends before that step.
    """
    if self.state.global_step >= until:
      return

    def act(t: float, step: int, scalars: Mapping[str, Any]) -> None:
      del t
      on_step(step, scalars)
      if step >= until:
        raise _Enough

    log = writers.MultiWriter([])
    action = adapters.full_action(act)
    with contextlib.suppress(_Enough):
      self.experiment.train_loop(self.config, self.state, [action], log)
    if self.state.global_step < until:
      raise errors.UsageError(
        f'{self.directory} ends at step {self.state.global_step}, so step'
        f' {until} cannot be replayed.'
      )


@contextlib.contextmanager
def opened(
  directory: str | os.PathLike[str],
  before: int,
  experiment_class: Any = None,
) -> Iterator[Replay]:
  """Yields a replay of a run, at its newest kept checkpoint before a step.

  Args:
    directory: the run's, or its address.
    before: the checkpoint's step is less than this.
    experiment_class: None is the class that the config names.

  Raises:
    errors.UsageError: the directory is not that of a run, or that began later.
  """
  config = base_config.recorded_config(directory)
  config.checkpointer = 'durable'
  if experiment_class is None:
    experiment_class = adapters.resolve_experiment_class(
      config, is_recorded=True
    )
  store = store_lib.at(directory)
  kept = records(store)
  start = max((step for step in kept if step < before), default=None)
  with contextlib.ExitStack() as stack:
    config.checkpoint_dir = store.url
    # By its name it only reads `latest`.
    mode = 'eval_replay'
    if start is None:
      # None of the run's own checkpoints: it begins as the run did.
      folder = tempfile.TemporaryDirectory(prefix='jaxline_replay_')
      config.checkpoint_dir = stack.enter_context(folder)
      if where := config.restore_from:
        mode = 'train'
        first = min(_fingerprints(store), default=1)
        if first > 1 and not re.search(r':\d+$', where):
          # That run may have gone on since.
          config.restore_from = f'{where}:{first - 1}'
    full = adapters.full_checkpointer(
      platform.create_checkpointer(config, mode)
    )
    full.reads_only = start is not None
    stack.callback(full.close)
    experiment, rng = train.build_for_training(experiment_class, config)
    rng = experiment.initialize_train_step_rng(rng)
    state = base.new_state(full, experiment, rng)
    if full.can_be_restored('latest'):
      full.restore('latest', step=start)
    state.global_step = at = int(state.global_step)
    if at >= before:
      raise errors.UsageError(
        f'{store.url} began at step {at}, so step {before} cannot be replayed;'
        f' the first one is {at + 1}.'
      )
    newest = kept[max(kept)] if kept else {}
    yield Replay(
      store.url,
      config,
      experiment,
      state,
      at,
      start is not None,
      newest.get('devices'),
    )


def records(store: store_lib.Store) -> dict[int, dict[str, Any]]:
  """Returns the record of each kept checkpoint that is whole, by its step."""
  manifests = manager.Manifests(store.below('checkpoints'))
  found = {}
  for step in manifests.steps('latest'):
    with contextlib.suppress(store_lib.DamagedError):
      found[step] = manifests.read('latest', step)
  return found


def _fingerprints(store: store_lib.Store) -> dict[int, int]:
  return fingerprints.read(store.read(f'train/{fingerprints.FILE}'))


def logged(directory: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
  """Returns step -> scalars that a run has logged, with its fingerprints."""
  found: dict[int, dict[str, Any]] = collections.defaultdict(dict)
  for name, curve in runs.read(directory).curves.items():
    for step, value in curve.items():
      found[step][name] = value
  for step, value in _fingerprints(store_lib.at(directory)).items():
    found[step]['train/fingerprint'] = value
  return found


def is_clocked(name: str) -> bool:
  """Returns whether a logged value depends on the clock or the machine."""
  return bool(_CLOCKED.fullmatch(name))


def is_same(one: Any, other: Any, rtol: float = 0.0) -> bool:
  """Returns whether two logged values are equal, or both NaN."""
  is_nan = one != one and other != other
  return one == other or is_nan or math.isclose(one, other, rel_tol=rtol)


def compare(
  replay: Replay,
  first: int,
  until: int,
  say: Callable[[str], None] = print,
  rtol: float = 0.0,
) -> bool:
  """Replays steps and compares what the run has logged of them.

  Args:
    replay: the replay, before `first`.
    first: the first step to compare.
    until: the last one.
    say: prints a line.
    rtol: a relative difference that does not count. With 0, fingerprints are
      compared too.

  Returns:
    Whether every compared value is equal.
  """
  before = logged(replay.directory)
  counts = {True: 0, False: 0}

  def check(step: int, scalars: Mapping[str, Any]) -> None:
    if step < first:
      return
    found = writers.to_scalars(scalars)
    batch = replay.experiment.last_batch
    if not rtol:
      found['fingerprint'] = int(fingerprints.of_step(scalars, batch))
    num_equal = 0
    for name, value in found.items():
      name = f'train/{name}'
      if name not in before[step] or is_clocked(name):
        continue
      is_equal = is_same(was := before[step][name], value, rtol)
      counts[is_equal] += 1
      num_equal += is_equal
      if not is_equal:
        say(f'step {step}: {name} was {was!r} and is {value!r}')
    if num_equal > 1:  # More than the fingerprint.
      say(f'step {step}: {num_equal} values are equal')

  replay.run(until, check)
  total = sum(counts.values())
  if not total:
    say(f'Nothing is logged of the steps {first} to {until}.')
  elif counts[False]:
    say(f'{counts[False]} of {total} logged values differ.')
  else:
    how = f'within {rtol:.0%}' if rtol else 'to the bit'
    say(f'All {total} logged values are equal {how}.')
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
  experiment, state = replay.experiment, replay.state
  step, rng = state.global_step, state.train_step_rng
  before = jax.tree.map(devices.freeze, experiment.snapshot_state())
  scalars: dict[str, Any] = {}
  found = None
  # A mask of minus infinity is meant, and no NaN: those count first. But the
  # line of a gradient is not known, and its cause may be an infinity before.
  for switch in (jax.debug_nans, jax.debug_infs):
    try:
      with op_by_op, switch(True):
        run(step + 1, lambda step, x: scalars.update(writers.to_scalars(x)))
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
      if all(map(math.isfinite, scalars.values())):
        return found
    experiment.restore_from_snapshot(before)
    state.global_step, state.train_step_rng = step, rng
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


def start_jax(directory: str) -> None:
  """Sets XLA's flags as a run had them, and meets the other processes."""
  for line in xla.apply(base_config.recorded_config(directory).xla):
    print(line)
  distributed.initialize('auto')


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
  start_jax(args.dir)
  with opened(args.dir, args.step) as replay:
    before, rates = replay.start, runs.read(args.dir).curves
    num_steps = last - before
    rate = max(rates.get('train/steps_per_sec', {0: 0.0}).values())
    about = f', about {lines.duration(num_steps / rate)}' if rate else ''
    print(
      f'Replaying {num_steps} steps from'
      f' {f"the checkpoint of step {before}" if before else "the seed"}{about}.'
    )
    rtol = 0.0
    if (was := replay.devices) not in (
      None,
      now := [jax.device_count(), jax.devices()[0].device_kind],
    ):
      rtol = _RTOL
      print(
        f'The run had the devices {was}, and here are {now}: values that differ'
        f' by less than {rtol:.0%} count as equal.'
      )
    if args.nan:
      replay.run(args.step - 1)
      found = find_nonfinite(replay)
      print(found or f'All results of step {args.step} are finite.')
      return 0
    is_equal = compare(replay, args.step, last, rtol=rtol)
    if args.save:
      save(replay, args.save)
  return 0 if is_equal else 1
