"""Finds the first step at which two runs part, and the array that parts."""

from collections.abc import Callable, Mapping, Sequence
import difflib
import math
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from jaxline import errors
from jaxline import runs
from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.checkpoint import structure
from jaxline.runs import replay as replay_lib

_MAX_SHOWN = 5  # Arrays.
_MAX_LINES = 60  # Of code.
_BEFORE = 'state before'


def _first(
  what: str,
  of_runs: Sequence[Mapping[int, Any]],
  differing: Callable[..., list[str]] = replay_lib.differing,
) -> float:
  """Prints the first step at which something differs; infinity without one."""
  a, b = of_runs
  for step in sorted(a.keys() & b.keys()):
    if names := differing(a[step], b[step]):
      shown = ', '.join(names[:_MAX_SHOWN])
      print(f'First {what} that differs: {step}, in {shown}.')
      return step
  return math.inf


def _differing_arrays(one: Any, other: Any) -> list[str]:
  """Returns the names of arrays of two checkpoints whose checksums differ."""
  x, y = ({k: v['parts'] for k, v in z['arrays'].items()} for z in (one, other))
  both = sorted(x.keys() & y.keys())
  # The checksums of other parts than those of the other array say nothing.
  return [k for k in both if x[k].keys() == y[k].keys() and x[k] != y[k]]


def _inside(path: str, step: int) -> tuple[dict[str, Any], int]:
  """Returns the arrays of a step by their kind, and the step before it."""
  with replay_lib.opened(path, step) as replay:
    _, batch, _ = replay.peek(step)
    experiment, rng = replay.experiment, replay.state.train_step_rng
    state, batch = experiment.state, experiment.partitioner.put_batch(batch)
    experiment.step_scalars = lambda state, *trees: {'_': trees}
    # A new function: JAX would take what it has traced, and donate the state.
    step_fn = lambda *args: experiment.compiled_train_step.__wrapped__(*args)
    new, scalars = jax.jit(step_fn)(state, batch, rng)
    grads, updates = scalars.pop('_')
    # In the order in which they are computed.
    kinds = {_BEFORE: state, 'batch': batch, 'random key': rng, 'loss': scalars}
    kinds |= {'gradients': grads, 'updates': updates, 'state after': new}
    return {kind: _named(x) for kind, x in kinds.items()}, replay.start


def _named(tree: Any) -> dict[str, Any]:
  named = structure.named_leaves(tree)
  data = {
    k: jax.random.key_data(x) if arrays.is_key(x) else x
    for k, x in named.items()
  }
  # Also of arrays that lie on several processes.
  on_host = multihost_utils.process_allgather(data, tiled=True)
  return {name: np.asarray(x) for name, x in on_host.items()}


def _differences(one: Any, other: Any) -> list[tuple[str, str]]:
  """Returns how each array differs that does, the largest difference first."""
  found = []
  for name in one.keys() | other.keys():
    x, y = one.get(name), other.get(name)
    if x is None or y is None or (x.shape, x.dtype) != (y.shape, y.dtype):
      found.append((np.inf, name, 'another shape or type'))
    elif x.tobytes() != y.tobytes():
      with np.errstate(invalid='ignore'):
        size = np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
      found.append((float(size), name, f'largest difference {size:.3g}'))
  found.sort(key=lambda item: -item[0])
  return [(name, what) for _, name, what in found]


def _replayed(path: str, first: int, last: int) -> dict[int, dict[str, Any]]:
  with replay_lib.opened(path, first) as replay:
    return replay.values(first, last)


def bisect(a: str, b: str) -> bool:
  """Prints where two runs part; returns whether they do."""
  paths = a, b
  both = [runs.read(path) for path in paths]
  for key, (x, y) in runs.differences(both).items():
    print(f'{key}: {x!r} and {y!r}')
  _print_code(both)
  logged = [replay_lib.logged(run) for run in both]
  kept = [dict(run.manifests()) for run in both]
  upper = min(
    _first('logged step', logged),
    _first('kept checkpoint', kept, _differing_arrays),
  )
  evaluated = [replay_lib.logged(run, 'eval') for run in both]
  has_other_evaluation = _first('evaluation', evaluated) < math.inf
  # Steps that can be compared; those before `upper` are equal.
  common = {0}.union(*(x.keys() & y.keys() for x, y in (logged, kept)))
  if upper == math.inf:
    print(f'No difference in training up to step {max(common)}.')
    return has_other_evaluation
  upper, lower = int(upper), max(step for step in common if step < upper)
  try:
    if not all(x in log for log in logged for x in range(lower + 1, upper + 1)):
      replayed = [_replayed(path, lower + 1, upper) for path in paths]
      upper = int(min(_first('replayed step', replayed), upper))
    _look_into(paths, upper)
  except errors.UsageError as e:
    print(f'The steps up to {upper} cannot be compared further: {e}')
  return True


def _print_code(both: Sequence[runs.Run]) -> None:
  """Prints what differs between the revisions and the changes of two runs."""
  codes = [run.manifest.get('code', {}) for run in both]
  commits = [code.get('revision', '') for code in codes]
  if all(commits) and commits[0] != commits[1]:
    print(contents.git('diff', '--stat', *commits), end='')
  x, y = (code.get('diff', '').splitlines() for code in codes)
  differing = list(difflib.unified_diff(x, y, n=0, lineterm=''))[2:]
  print(*differing[:_MAX_LINES], sep='\n', end='\n' * bool(differing))


def _look_into(paths: tuple[str, str], step: int) -> None:
  """Prints the first thing that differs in a step, or in one before it."""
  found = None
  # The state may differ long before a scalar does, such as an average of the
  # weights; it stays so. So the first step that differs is searched by halves.
  low, high = 1, step
  while low <= high:
    (one, start), (other, other_start) = (_inside(x, step) for x in paths)
    low = max(low, start + 1, other_start + 1)
    kind = next((k for k in one if _differences(one[k], other[k])), None)
    if kind is None:
      low = step + 1
    else:
      found = step, kind, _differences(one[kind], other[kind])
      high = step - 1 if kind == _BEFORE else 0
    step = (low + high) // 2
  if found is None:
    print(
      f'The replays of step {low - 1} are equal, though the runs were not. To'
      ' see which one was not as its code and data say, replay each.'
    )
    return
  step, kind, differing = found
  print(f'The runs part in step {step}, in the {kind}:')
  for name, what in differing[:_MAX_SHOWN]:
    print(f'  {name or kind}: {what}')
