"""Replays steps of a run exactly, without writing to it.

A replay restores the newest kept checkpoint before a step, or starts as the run
did. From there it runs the recorded config in the run's own training loop. With
the same devices and package versions, it reproduces the run bit for bit.
"""

import argparse
import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import tempfile
import traceback
from typing import Any
from unittest import mock

import jax
import numpy as np

import jaxline
from jaxline import base_config
from jaxline import errors
from jaxline import experiment as experiment_lib
from jaxline import runs
from jaxline import sharded
from jaxline import train
from jaxline.base import debug
from jaxline.base import keys
from jaxline.checkpoint import durable
from jaxline.compat import adapters
from jaxline.metrics import fingerprints
from jaxline.metrics import lines
from jaxline.metrics import writers
from jaxline.run_directory import store as store_lib

# A line in one of these folders does not identify an operation of the model.
_LIBRARIES = tuple(
  os.path.join(os.path.dirname(path), '')
  for path in (jaxline.__file__, os.__file__, os.path.dirname(jax.__file__))
)

# Different devices round the sums of a step differently.
_RTOL = 0.01

_FINGERPRINT = 'train/fingerprint'


@dataclasses.dataclass
class Replay:
  """A run's training at one of its steps, in memory."""

  record: runs.RunRecord
  config: Any  # The recorded config, with the replay's `restore_from`.
  experiment: Any
  state: Any  # The live state, with `global_step` and `train_step_rng`.

  def run(
    self, until: int, on_step: Callable[..., Any] = lambda *unused: None
  ) -> None:
    """Runs up to step `until`; calls `on_step(number, scalars)` after each."""
    path, step = self.record.path, self.state.global_step
    if step >= until:
      return
    rate = max(self.record.curves.get('train/steps_per_sec', {0: 0.0}).values())
    about = f', about {lines.duration((until - step) / rate)}' if rate else ''
    where = f'step {step}' if step else 'the seed'
    lines.print_text(f'Replaying {path} from {where} to step {until}{about}.')

    def act(unused_time: Any, step: int, scalars: Mapping[str, Any]) -> None:
      on_step(step, scalars)
      if step >= until:
        raise errors.StopTraining

    log, action = writers.MetricWriter(), adapters.full_action(act)
    with contextlib.suppress(errors.StopTraining):
      self.experiment.train_loop(self.config, self.state, [action], log)
    if self.state.global_step < until:
      raise errors.UsageError(
        f'{path} ends at step {self.state.global_step}, before step {until}.'
      )

  def values(self, first: int, until: int) -> dict[int, dict[str, Any]]:
    """Runs steps; returns their `logged_values` and the hash of the state."""
    found: dict[int, dict[str, Any]] = {}

    def keep(step: int, scalars: Mapping[str, Any]) -> None:
      if step >= first:
        values = writers.to_scalars(
          fingerprints.without_timing_scalars(scalars)
        ).items()
        bits = fingerprints.of_step(scalars, self.experiment.last_batch)
        state = fingerprints.of_step({}, self.experiment.snapshot_state())
        found[step] = {f'train/{name}': x for name, x in values}
        found[step] |= {_FINGERPRINT: int(bits), 'state': int(state)}

    self.run(until, keep)
    return found

  def peek(self, step: int) -> tuple[Any, Any, list[str]]:
    """Runs up to the step before `step`, and calls `TrainFeed.peek`."""
    if not isinstance(self.experiment, sharded.ShardedExperiment):
      raise errors.UsageError(
        'explain and bisect need a ShardedExperiment.'
        f' {self.experiment.__class__.__name__} is not, so only replay works.'
      )
    self.run(step - 1)
    return self.experiment.train_feed.peek()


@contextlib.contextmanager
def open_replay(
  directory: str | os.PathLike[str],
  before: int,
  experiment_class: Any = None,
  saved: str | None = None,
) -> Iterator[Replay]:
  """Yields a replay of a run, at its newest kept checkpoint before a step.

  If `saved` is given, the last step is saved in that directory. If
  `experiment_class` is None, the recorded config names the class.
  """
  run = runs.read(directory)
  config = base_config.recorded_config(directory)
  if experiment_class is None:
    experiment_class = experiment_lib.resolve_experiment_class(
      config, recorded_in=os.fspath(directory)
    )
  # Fork the run at a checkpoint. If none can be read, start as the run did.
  forks = ((f'{run.path}:{step}', ()) for step, _ in run.manifests(before))
  recorded = config.restore_from, config.restore_rules
  with contextlib.ExitStack() as stack:
    config.checkpoint_dir = saved or stack.enter_context(
      tempfile.TemporaryDirectory(prefix='jaxline_replay_')
    )
    for start in itertools.chain(forks, [recorded]):
      config.restore_from, config.restore_rules = start
      ours = base_config.complete_config(config)
      full = durable.DurableCheckpointer(ours, 'train')
      stack.callback(full.close)
      try:
        training = train.Training(train.Run(experiment_class, config, full))
        break
      except store_lib.DamagedError as e:
        if start is recorded:
          raise
        lines.warn_once(f'Skipped: {e}')
        full.close()
    at = training.state.global_step = int(training.state.global_step)
    if at >= before:
      raise errors.UsageError(
        f'{run.path} began at step {at}, so step {before} cannot be replayed.'
        f' The first step that can be replayed is {at + 1}.'
      )
    yield Replay(run, config, training.experiment, training.state)
    if saved:
      full.save('latest')
      full.wait_for_checkpointing_to_finish()


def read_fingerprints(
  run: runs.RunRecord,
) -> tuple[dict[int, int], dict[int, float]]:
  """Returns the fingerprints and the losses of a run, each by step."""
  raw = store_lib.at(run.path).read(f'train/{fingerprints.FILE}')
  return fingerprints.read(raw)


def logged_values(
  run: runs.RunRecord, folder: str = 'train'
) -> dict[int, dict[str, Any]]:
  """Returns each step's fingerprint and its scalars, except timing scalars."""
  curves = run.curves | {_FINGERPRINT: read_fingerprints(run)[0]}
  found: dict[int, dict[str, Any]] = collections.defaultdict(dict)
  for name, curve in curves.items():
    where, _, scalar = name.partition('/')
    if where == folder and fingerprints.without_timing_scalars({scalar: curve}):
      for step, value in curve.items():
        found[step][name] = value
  return found


def differing(
  one: Mapping[str, Any], other: Mapping[str, Any], rtol: float = 0.0
) -> list[str]:
  """Returns the names of values that are in both mappings and differ."""
  is_same = functools.partial(np.isclose, rtol=rtol, atol=0.0, equal_nan=True)
  names = sorted(one.keys() & other.keys())
  return [name for name in names if not is_same(one[name], other[name])]


def _compare(replay: Replay, first: int, until: int, rtol: float) -> bool:
  """Compares replayed steps with the log; returns whether they are equal."""
  before = logged_values(replay.record)
  total = num_differing = 0
  for step, found in replay.values(first, until).items():
    was = before[step]
    if rtol:
      del found[_FINGERPRINT]
    names = differing(was, found, rtol)
    for name in names:
      lines.print_text(
        f'step {step}: {name} was {was[name]!r} and is {found[name]!r}'
      )
    num_compared = len(was.keys() & found.keys())
    total += num_compared
    num_differing += len(names)
    if (num_equal := num_compared - len(names)) > 1:  # Skip lone fingerprints.
      lines.print_text(f'step {step}: {num_equal} values are equal')
  if not total:
    lines.print_text(f'The run logged nothing in steps {first} to {until}.')
  elif num_differing:
    lines.print_text(f'{num_differing} of {total} logged values differ.')
  else:
    how = f'within {rtol:.0%}' if rtol else 'to the bit'
    lines.print_text(f'All {total} logged values are equal {how}.')
  return not num_differing


def find_nonfinite(directory: str, step: int) -> str | None:
  """Returns the operation and line that made a step's first NaN or infinity."""
  op_by_op = mock.patch.object(debug.settings, 'disable_pmap_jit', new=True)
  scalars: dict[str, Any] = {}
  found = None
  # Look for NaNs first, since -inf is often a legitimate mask. If a NaN has no
  # line, as in the backward pass, look for an infinity that came before it.
  for switch in (jax.debug_nans, jax.debug_infs):
    try:
      with open_replay(directory, step) as replay:
        replay.run(step - 1)
        with op_by_op, switch(True):
          run = debug.disable_pmap_jit(replay.run)
          run(step, lambda _, x: scalars.update(writers.to_scalars(x)))
    except FloatingPointError as e:
      frames = list(traceback.extract_tb(e.__traceback__))
      # Skip frames above train_step.py, such as the experiment's `step`.
      is_above = lambda f: not f.filename.endswith('/train_step.py')
      frames = [*itertools.dropwhile(is_above, frames)] or frames
      own = [f for f in frames if not f.filename.startswith(_LIBRARIES)]
      if own:
        return f'{e}\n  {own[-1].filename}:{own[-1].lineno}: {own[-1].line}'
      found = found or f'{e}, on no line of the model'
    else:
      if all(map(math.isfinite, scalars.values())):
        return found
  return found


def command(args: argparse.Namespace) -> int:
  """Runs `runs replay`; returns the exit status."""
  run, (first, last) = runs.read(args.run_dir), args.step
  keys.integer(0).require('--steps', args.steps)
  run.check_step(first)
  keys.integer(first).require('The last step', last)
  until = last + args.steps
  if args.save:
    run.check_step(until)
    if store_lib.at(args.save).names():
      raise errors.UsageError(
        f'--save: {args.save} is not empty. Name a new directory.'
      )
  if args.nan:
    result = find_nonfinite(args.run_dir, first)
    lines.print_text(result or f'All results of step {first} are finite.')
    return 0
  steps = logged_values(run).keys()
  if not args.save:
    found = [x for x in steps if first <= x <= until]
    if not found:
      raise errors.UsageError(
        f'{run.path} has logged no step from {first} to {until}; its last'
        f' logged step is {max(steps, default=0)}.'
      )
    until = max(found)
  with open_replay(args.run_dir, first, saved=args.save) as replay:
    rtol = 0.0
    now = [jax.device_count(), jax.devices()[0].device_kind]
    if (was := replay.record.manifest.get('devices', now)) != now:
      rtol = _RTOL
      lines.print_text(
        f'The run used the devices {was}, and this replay uses {now}. Values'
        f' that differ by less than {rtol:.0%} count as equal.'
      )
    return int(not _compare(replay, first, until, rtol))
