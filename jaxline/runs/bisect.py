"""Finds the first step at which two runs part, and the array that parts."""

import argparse
from collections.abc import Mapping
import functools
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from jaxline import errors
from jaxline import runs
from jaxline import sharded
from jaxline.checkpoint import store as store_lib
from jaxline.checkpoint import structure
from jaxline.metrics import fingerprints
from jaxline.runs import replay as replay_lib

_MAX_SHOWN = 5  # Arrays.
# What a step has, in the order in which a difference spreads.
_BEFORE = ('weights', 'model state', 'optimizer state')

Arrays = dict[str, np.ndarray]


def _made_with(records: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
  """Returns the versions, the code and the devices of a run."""
  if not records:
    return {}
  last = records[max(records)]
  return {
    **{f'version of {k}': str(x) for k, x in last['versions'].items()},
    'code': ' '.join(filter(None, last['code'].values())),
    'devices': ' '.join(map(str, last['devices'])),
  }


def _first_checkpoint(
  a: Mapping[int, Any], b: Mapping[int, Any]
) -> tuple[int | None, list[str]]:
  """Returns the first step whose checkpoints differ, and which arrays."""
  for step in sorted(a.keys() & b.keys()):
    one, other = a[step]['arrays'], b[step]['arrays']
    differing = [
      name
      for name in sorted(one.keys() | other.keys())
      # The checksums of the parts; other parts say nothing.
      if (x := one.get(name, {}).get('parts'))
      != (y := other.get(name, {}).get('parts'))
      and (x or {}).keys() == (y or {}).keys()
    ]
    if differing:
      return step, differing
  return None, []


def _first_logged(
  log: str, a: Any, b: Any
) -> tuple[int | None, list[str], int]:
  """Returns the first step whose values differ, which, and the last equal."""
  last = 0
  for step in sorted(a.keys() & b.keys()):
    both = [
      name
      for name in sorted(a[step].keys() & b[step].keys())
      if name.startswith(log) and not replay_lib.is_clocked(name)
    ]
    names = [n for n in both if not replay_lib.is_same(a[step][n], b[step][n])]
    if names:
      return step, names, last
    last = step if both else last
  return None, [], last


def _inside(path: str, step: int) -> tuple[dict[str, Arrays], int]:
  """Returns the arrays of a step by their kind, and the step before it."""
  with replay_lib.opened(path, step) as replay:
    experiment = replay.experiment
    if not isinstance(experiment, sharded.ShardedExperiment):
      raise errors.UsageError(
        f'{type(experiment).__name__} is not a ShardedExperiment: only its'
        ' style has a step that can be looked into.'
      )
    replay.run(step - 1)
    source, batch, _ = experiment.peek()
    source.close()
    state, rng = experiment.state, replay.state.train_step_rng
    found = {
      'weights': state.params,
      'model state': state.model_state,
      'optimizer state': state.opt_state,
      'batch': (batch := experiment.partitioner.put_batch(batch)),
      'random key': jax.random.key_data(rng),
    }
    # Fetched before the step donates them.
    found = {kind: _named(x) for kind, x in found.items()}
    keep = lambda state, grads, updates: {'grads': grads, 'updates': updates}
    step_fn = functools.partial(experiment.pure_step, step_scalars=keep)
    run = jax.jit(experiment.in_mesh(step_fn))
    new, scalars = run(state, batch, rng)
    grads, updates = scalars.pop('grads'), scalars.pop('updates')
    after = {
      'loss': scalars,
      'gradients': grads,
      'updates': updates,
      'new optimizer state': new.opt_state,
      'new weights': new.params,
      'new model state': new.model_state,
    }
    return found | {k: _named(x) for k, x in after.items()}, replay.start


def _named(tree: Any) -> Arrays:
  # Also of arrays that lie on several processes.
  on_host = multihost_utils.process_allgather(tree, tiled=True)
  return {n: np.asarray(x) for n, x in structure.named_leaves(on_host).items()}


def _differing(one: Arrays, other: Arrays) -> dict[str, str]:
  """Returns how each array differs that does, the largest difference first."""
  found = []
  for name in one.keys() | other.keys():
    x, y = one.get(name), other.get(name)
    if x is None or y is None:
      found.append((np.inf, name, 'in only one of the runs'))
    elif x.shape != y.shape or x.dtype != y.dtype:
      kinds = [f'{z.dtype}{list(z.shape)}' for z in (x, y)]
      found.append((np.inf, name, ' and '.join(kinds)))
    elif x.tobytes() != y.tobytes():
      with np.errstate(invalid='ignore'):
        size = np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
      found.append((float(size), name, f'largest difference {size:.3g}'))
  found.sort(key=lambda item: -item[0])
  return {name: what for _, name, what in found}


def _fingerprints(path: str, logged: Any, lower: int, upper: int) -> Any:
  """Returns the fingerprints of steps: those of the run, or of a replay."""
  key = 'train/fingerprint'
  wanted = range(lower + 1, upper + 1)
  if all(key in logged.get(step, {}) for step in wanted):
    return {step: logged[step][key] for step in wanted}
  found = {}
  with replay_lib.opened(path, lower + 1) as replay:

    def keep(step: int, scalars: Mapping[str, Any]) -> None:
      batch = replay.experiment.last_batch
      found[step] = int(fingerprints.of_step(scalars, batch))

    replay.run(upper, keep)
  return found


def bisect(a: str, b: str) -> bool:
  """Prints where two runs part; returns whether they do."""
  one, other = runs.read(a), runs.read(b)
  for key in runs.differences([one, other]):
    print(f'{key}: {one.recorded.get(key)!r} and {other.recorded.get(key)!r}')
  kept = [replay_lib.records(store_lib.at(path)) for path in (a, b)]
  made = [_made_with(records) for records in kept]
  for key in made[0].keys() & made[1].keys():
    if made[0][key] != made[1][key]:
      print(f'{key}: {made[0][key]} and {made[1][key]}')
  logged = [replay_lib.logged(path) for path in (a, b)]
  step, names, last = _first_logged('train/', *logged)
  if step is not None:
    print(f'First logged step that differs: {step}, in {", ".join(names)}.')
  evaluated, names, _ = _first_logged('eval/', *logged)
  if evaluated is not None:
    print(f'First evaluation that differs: {evaluated}, in {", ".join(names)}.')
  saved, arrays = _first_checkpoint(*kept)
  if saved is not None:
    shown = ', '.join(arrays[:_MAX_SHOWN])
    print(f'First kept checkpoint that differs: {saved}, in {shown}.')
  found = [x for x in (step, saved) if x is not None]
  if not found:
    last = max([last, *(kept[0].keys() & kept[1].keys())])
    if not last:
      raise errors.UsageError(
        f'{a} and {b} have no logged step and no checkpoint in common.'
      )
    print(f'No difference in training up to step {last}.')
    return evaluated is not None
  upper = min(found)
  try:
    prints = [
      _fingerprints(path, of, min(last, upper - 1), upper)
      for path, of in zip((a, b), logged, strict=True)
    ]
    common = sorted(prints[0].keys() & prints[1].keys())
    step = next((s for s in common if prints[0][s] != prints[1][s]), upper)
    print(f'The first step whose numbers differ is {step}.')
    _look_into(a, b, step)
  except errors.UsageError as e:
    print(f'The steps up to {upper} cannot be compared further: {e}')
  return True


def _parting(
  a: str, b: str, step: int
) -> tuple[str | None, dict[str, str], int]:
  """Returns the first kind that differs in a step, its arrays, the start."""
  (one, start), (other, start_b) = _inside(a, step), _inside(b, step)
  for kind in one:
    if differing := _differing(one[kind], other[kind]):
      return kind, differing, max(start, start_b)
  return None, {}, max(start, start_b)


def _look_into(a: str, b: str, step: int) -> None:
  """Prints the first thing that differs in a step, or in one before it."""
  kind, differing, start = _parting(a, b, step)
  # The state may differ long before a scalar does, such as an average of the
  # weights; it stays so.
  low, high = start + 1, step
  while kind in _BEFORE and low < high:
    step = (low + high) // 2
    kind, differing, _ = _parting(a, b, step)
    if kind in _BEFORE:
      high = step
    elif kind is None:
      low, kind = step + 1, _BEFORE[0]
  if kind in _BEFORE and step != high:
    kind, differing, _ = _parting(a, b, step := high)
  if kind is None:
    print(
      f'The replays of step {step} are equal, though the runs were not: what'
      ' parted them is neither in the code nor in the data. Replay each run to'
      ' see which one is not as it was logged.'
    )
    return
  print(f'The runs part in step {step}, in the {kind}:')
  for name, what in list(differing.items())[:_MAX_SHOWN]:
    print(f'  {name or kind}: {what}')


def add_command(commands: Any) -> None:
  """Adds `bisect` to the commands of `python -m jaxline.runs`."""
  command = commands.add_parser('bisect', help=__doc__)
  command.add_argument('a', help='a run')
  command.add_argument('b', help='another run')
  command.set_defaults(run=_bisect)


def _bisect(args: argparse.Namespace) -> int:
  replay_lib.start_jax(args.a)
  return int(bisect(args.a, args.b))
