"""Finds the first step in which two runs diverge, and the first arrays."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from jaxline import errors
from jaxline import runs
from jaxline.base import trees
from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.metrics import lines
from jaxline.metrics import scalars as scalars_lib
from jaxline.parallel import placement
from jaxline.run_directory import sources
from jaxline.run_directory import store as store_lib
from jaxline.runs import replay as replay_lib

_MAX_SHOWN = 5  # Limit of arrays to print.
_MAX_LINES = 60  # Limit of lines of code to print.
_AROUND = 'state after `step`'
_HOSTS = "The compiled steps are equal. {}: look at `step` and the host's code."


def _first(
  what: str,
  of_runs: Sequence[Mapping[int, Any]],
  differing: Callable[..., list[str]] = replay_lib.differing,
) -> float:
  """Prints and returns the first differing step; infinity if there is none."""
  a, b = of_runs
  for step in sorted(a.keys() & b.keys()):
    if names := differing(a[step], b[step]):
      shown = ', '.join(names[:_MAX_SHOWN])
      lines.print_text(f'First {what} that differs: {step}, in {shown}.')
      return step
  return math.inf


def _differing_arrays(one: Any, other: Any) -> list[str]:
  """Returns the names of arrays of two checkpoints whose checksums differ."""
  x, y = ({k: v['parts'] for k, v in z['arrays'].items()} for z in (one, other))
  both = sorted(x.keys() & y.keys())
  # Checksums are comparable only if both arrays have the same parts.
  return [k for k in both if x[k].keys() == y[k].keys() and x[k] != y[k]]


def _inside(path: str, step: int) -> dict[str, Any]:
  """Returns the arrays of a step by kind, such as 'gradients', and name."""
  with replay_lib.open_replay(path, step) as replay:
    _, batch, _ = replay.peek(step)
    experiment, rng = replay.experiment, replay.state.train_step_rng
    state = experiment.state
    batch = placement.put_batch(batch, experiment.partitioner)
    experiment.step_scalars = lambda state, *trees: {'_': trees}
    # For a new function, JAX traces again, and does not donate the state.
    step_fn = lambda *args: experiment.compiled_train_step.__wrapped__(*args)
    new, packed = jax.jit(step_fn)(state, batch, rng)
    scalars = scalars_lib.Scalars(packed)
    grads, updates = scalars.pop('_')
    # The kinds are in the order in which the step computes them.
    kinds = {'state before': state, 'batch': batch, 'random key': rng}
    kinds |= {'loss': dict(scalars), 'gradients': grads, 'updates': updates}
    kinds['state after'] = new
    named = {kind: _named(x) for kind, x in kinds.items()}
    del experiment.step_scalars
    replay.run(step)
    named[_AROUND] = _named(experiment.snapshot_state())
    return named


def _named(tree: Any) -> dict[str, Any]:
  named = trees.named_leaves(tree)
  data = {
    k: jax.random.key_data(x) if arrays.is_key(x) else x
    for k, x in named.items()
    if isinstance(x, jax.Array)  # A checkpoint has plain values too.
  }
  # Gather arrays that span several processes.
  on_host = multihost_utils.process_allgather(data, tiled=True)
  return {name: np.asarray(x) for name, x in on_host.items()}


def _differences(one: Any, other: Any) -> list[tuple[str, str]]:
  """Describes the arrays that differ, the largest difference first."""
  found = []
  for name in one.keys() | other.keys():
    x, y = one.get(name), other.get(name)
    if x is None or y is None or (x.shape, x.dtype) != (y.shape, y.dtype):
      found.append((math.inf, name, 'different shape or dtype'))
    elif x.tobytes() != y.tobytes():
      with np.errstate(invalid='ignore'):
        size = np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
      found.append((float(size), name, f'largest difference {size:.3g}'))
  return [(name, what) for _, name, what in sorted(found, reverse=True)]


def bisect(*paths: str) -> bool:
  """Prints where two runs diverge; returns whether they do."""
  both = [runs.read(path) for path in paths]
  for key, (x, y) in runs.differences(both).items():
    lines.print_text(f'{key}: {x!r} and {y!r}')
  _print_code(both)
  logged = [replay_lib.logged_values(run) for run in both]
  kept = [dict(run.manifests()) for run in both]
  upper = min(
    _first('logged step', logged),
    _first('kept checkpoint', kept, _differing_arrays),
  )
  evaluated = [replay_lib.logged_values(run, 'eval') for run in both]
  has_other_evaluation = _first('evaluation', evaluated) < math.inf
  compared, checkpoints = (x.keys() & y.keys() for x, y in (logged, kept))
  compared = {s for s in compared if logged[0][s].keys() & logged[1][s].keys()}
  last = min(max({0, *x, *y}) for x, y in zip(logged, kept, strict=True))
  begun = max(run.first_step for run in both)
  missing = sorted({*range(begun, last + 1)} - compared)
  has_parted, replayed = upper < math.inf, []
  lines.print_text(
    f'Compared up to step {last}: {len(compared)} logged steps and'
    f' {len(checkpoints)} kept checkpoints.'
  )
  if has_parted:  # Start where both began, or were last equal.
    equal = (step + 1 for step in checkpoints if step < upper)
    first, until = max([min(compared, default=1), *equal]), int(upper)
  else:
    first, until = (missing[0], missing[-1]) if missing else (0, 0)
    lines.print_text(f'{len(missing)} steps are compared by replays.')
  try:
    for path in paths * (until > 0):
      with replay_lib.open_replay(path, min(first, until)) as replay:
        replayed.append(replay.values(1, until))
    if replayed and (step := _first('replayed step', replayed)) < math.inf:
      has_parted = True
      _look_into(paths, int(step))
    elif replayed:
      lines.print_text(f'In the replays, both are equal up to step {until}.')
    for run, *values in zip(both, logged, replayed, strict=False):
      what = f'step of {run.path} that its replay does not reproduce'
      has_parted |= _first(what, values) < math.inf
  except errors.UsageError as e:
    lines.print_text(f'The steps up to {until} cannot be compared further: {e}')
  else:
    if not has_parted:
      lines.print_text(f'No difference in training up to step {last}.')
  return has_parted or has_other_evaluation


def _print_code(both: Sequence[runs.RunRecord]) -> None:
  """Prints the difference between the recorded code of two runs."""
  codes = [run.manifest.get('code', {}) for run in both]
  commits = [code.get('revision', '') for code in codes]
  # --end-of-options keeps git from reading a revision as an option.
  stat = contents.git('diff', '--stat', '--end-of-options', *commits, '--')
  if stat:
    lines.print_text(stat.rstrip())
  stores = [store_lib.at(run.path).below('checkpoints') for run in both]
  files = [*map(sources.read, stores, (x.get('files') for x in codes))]
  for run, own, other in zip(both, files, files[::-1], strict=True):
    for name in sorted(own.keys() & other.keys()):
      known = {*other[name].splitlines()}
      shown = [x for x in own[name].splitlines() if x not in known]
      for line in shown[:_MAX_LINES]:
        lines.print_text(f'{run.path}: {name}: {line.decode(errors="replace")}')


def _look_into(paths: Sequence[str], step: int) -> None:
  """Prints the first kind of arrays that differs in a step."""
  one, other = (_inside(path, step) for path in paths)
  for kind in one:
    if differing := _differences(one[kind], other[kind]):
      if kind == _AROUND:
        lines.print_text(
          _HOSTS.format('The state differs before or after them')
        )
      lines.print_text(f'The runs diverge in step {step}, in the {kind}:')
      for name, what in differing[:_MAX_SHOWN]:
        lines.print_text(f'  {name or kind}: {what}')
      return
  lines.print_text(_HOSTS.format('So are the states'))
