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
import itertools
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
from jaxline import errors
from jaxline import platform
from jaxline import runs
from jaxline import train
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

# Between other devices, the sums of a step are rounded otherwise.
_RTOL = 0.01

_FINGERPRINT = 'train/fingerprint'


@dataclasses.dataclass
class Replay:
  """A run's training at one of its steps, in memory.

  Attributes:
    directory: the run's.
    config: the recorded config, whose `restore_from` is where it began.
    experiment: the experiment, in mode 'train'.
    state: the live state of `latest`: `global_step` and `train_step_rng`.
    start: the step that the replay began from.
  """

  directory: str
  config: Any
  experiment: Any
  state: Any
  start: int

  def run(
    self, until: int, on_step: Callable[..., Any] = lambda *unused: None
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

    def act(unused_time: Any, step: int, scalars: Mapping[str, Any]) -> None:
      on_step(step, scalars)
      if step >= until:
        raise errors.StopTraining

    log, action = writers.MetricWriter(), adapters.full_action(act)
    with contextlib.suppress(errors.StopTraining):
      self.experiment.train_loop(self.config, self.state, [action], log)
    if self.state.global_step < until:
      raise errors.UsageError(
        f'{self.directory} ends at step {self.state.global_step}, so step'
        f' {until} cannot be replayed.'
      )

  def values(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scalars of the last step as `logged` does."""
    batch = self.experiment.last_batch
    return {
      **{f'train/{k}': x for k, x in writers.to_scalars(scalars).items()},
      _FINGERPRINT: int(fingerprints.of_step(scalars, batch)),
    }

  def peek(self, step: int) -> tuple[Any, Any, list[str]]:
    """Runs to the step before, and returns what `experiment.peek` does."""
    if not self.experiment.IS_SHARDED:
      raise errors.UsageError(
        f'{type(self.experiment).__name__} is not a ShardedExperiment: only its'
        ' style has a step that can be looked into.'
      )
    self.run(step - 1)
    return self.experiment.peek()


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
  experiment_class = experiment_class or adapters.resolve_experiment_class(
    config, is_recorded=True
  )
  store = store_lib.at(directory)
  start, _ = next(records(store, before), (None, None))
  if start is not None:
    config.restore_from, config.restore_rules = f'{store.url}:{start}', ()
  elif where := config.restore_from:
    first = min(_fingerprints(store), default=1)
    if first > 1 and not re.search(r':\d+$', where):
      # That run may have gone on since.
      config.restore_from = f'{where}:{first - 1}'
  with contextlib.ExitStack() as stack:
    # A fork of the run, or one that begins as the run did.
    folder = tempfile.TemporaryDirectory(prefix='jaxline_replay_')
    config.checkpoint_dir = stack.enter_context(folder)
    full = adapters.full_checkpointer(
      platform.create_checkpointer(config, 'train')
    )
    stack.callback(full.close)
    experiment, rng = train.build_for_training(experiment_class, config)
    rng = experiment.initialize_train_step_rng(rng)
    state = base.new_state(full, experiment, rng)
    if full.can_be_restored('latest'):
      full.restore('latest')
    state.global_step = at = int(state.global_step)
    if at >= before:
      raise errors.UsageError(
        f'{store.url} began at step {at}, so step {before} cannot be replayed;'
        f' the first one is {at + 1}.'
      )
    yield Replay(store.url, config, experiment, state, at)


def records(
  store: store_lib.Store, before: float = math.inf
) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields step and record of the checkpoints that are whole, newest first."""
  manifests = manager.Manifests(store.below('checkpoints'))
  for step in sorted(manifests.steps('latest'), reverse=True):
    if step < before:
      with contextlib.suppress(store_lib.DamagedError):
        yield step, manifests.read('latest', step)


def _fingerprints(store: store_lib.Store) -> dict[int, int]:
  return fingerprints.read(store.read(f'train/{fingerprints.FILE}'))


def logged(run: runs.Run, folder: str = 'train') -> dict[int, dict[str, Any]]:
  """Returns step -> the scalars that a run has logged, and its fingerprint.

  Without those that depend on the clock or the machine.
  """
  found: dict[int, dict[str, Any]] = collections.defaultdict(dict)
  for name, curve in run.curves.items():
    where, _, scalar = name.partition('/')
    if where == folder and fingerprints.unclocked({scalar: curve}):
      for step, value in curve.items():
        found[step][name] = value
  if folder == 'train':
    for step, value in _fingerprints(store_lib.at(run.path)).items():
      found[step][_FINGERPRINT] = value
  return found


def differing(
  one: Mapping[str, Any], other: Mapping[str, Any], rtol: float = 0.0
) -> list[str]:
  """Returns the names of values that both have and that differ."""

  def is_same(x: Any, y: Any) -> bool:
    is_nan = x != x and y != y
    return x == y or is_nan or bool(rtol and math.isclose(x, y, rel_tol=rtol))

  names = sorted(one.keys() & other.keys())
  return [name for name in names if not is_same(one[name], other[name])]


def _compare(
  replay: Replay, run: runs.Run, first: int, until: int, rtol: float
) -> bool:
  """Prints how steps compare to what is logged; returns if they are equal."""
  before = logged(run)
  total = num_differing = 0

  def check(step: int, scalars: Mapping[str, Any]) -> None:
    nonlocal total, num_differing
    if step < first:
      return
    was, found = before[step], replay.values(scalars)
    if rtol:
      del found[_FINGERPRINT]
    names = differing(was, found, rtol)
    for name in names:
      print(f'step {step}: {name} was {was[name]!r} and is {found[name]!r}')
    num_compared = len(was.keys() & found.keys())
    total += num_compared
    num_differing += len(names)
    if (num_equal := num_compared - len(names)) > 1:  # Not only fingerprints.
      print(f'step {step}: {num_equal} values are equal')

  replay.run(until, check)
  if not total:
    print(f'Nothing is logged of the steps {first} to {until}.')
  elif num_differing:
    print(f'{num_differing} of {total} logged values differ.')
  else:
    how = f'within {rtol:.0%}' if rtol else 'to the bit'
    print(f'All {total} logged values are equal {how}.')
  return not num_differing


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
      is_above = lambda f: not f.filename.endswith('/train_step.py')
      frames = [*itertools.dropwhile(is_above, frames)] or frames
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


def _save(replay: Replay, directory: str) -> None:
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


def command(args: argparse.Namespace) -> int:
  """Runs `runs replay`; returns the exit status."""
  last = args.step + args.steps
  if args.save and store_lib.at(args.save).names():
    raise errors.UsageError(
      f'--save: {args.save} is not empty; give a new directory.'
    )
  run = runs.read(args.run_dir)
  with opened(args.run_dir, args.step) as replay:
    before, num_steps = replay.start, last - replay.start
    rate = max(run.curves.get('train/steps_per_sec', {0: 0.0}).values())
    about = f', about {lines.duration(num_steps / rate)}' if rate else ''
    where = f'the checkpoint of step {before}' if before else 'the seed'
    print(f'Replaying {num_steps} steps from {where}{about}.')
    rtol = 0.0
    now = f'{jax.device_count()} {jax.devices()[0].device_kind}'
    if (was := run.made_with.get('devices', now)) != now:
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
    is_equal = _compare(replay, run, args.step, last, rtol)
    if args.save:
      _save(replay, args.save)
  return 0 if is_equal else 1
