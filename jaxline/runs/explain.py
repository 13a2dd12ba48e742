"""Explains a step of a run by the rows of its batch, the worst first."""

import argparse
from collections.abc import Mapping
import functools
import math
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxline import errors
from jaxline import runs
from jaxline import sharded
from jaxline import train_step
from jaxline.checkpoint import inspection
from jaxline.inputs import show
from jaxline.runs import replay as replay_lib
from jaxline.supervision import profiling

# A value is a spike if it is this many median absolute deviations above the
# median of the values before it.
_DEVIATIONS = 8
_WINDOW = 20
_MIN_BEFORE = 8
_JUDGED = ('train/loss', 'train/grad_norm')
_MAX_TEXT = 70


class Row(NamedTuple):
  """A row of a batch.

  `number` is its place in the rows of this process; `loss` is that of this row
  alone, as if it were the batch; `weight` is the sum of its weights;
  `grad_norm` is that of this loss, or None; `where` says where it comes from.
  """

  number: int
  loss: float
  weight: float
  grad_norm: float | None
  where: str
  text: str


def spikes(curve: Mapping[int, float]) -> dict[int, float]:
  """Returns the steps of a curve whose value stands out, and how far it does.

  A step does if its value is not finite, or is more than 8 median absolute
  deviations above the median of the 20 values before it (at least 8).
  """
  found: dict[int, float] = {}
  before: list[float] = []
  for step, value in sorted(curve.items()):
    if not math.isfinite(value):
      found[step] = math.inf
      continue
    if len(before) >= _MIN_BEFORE:
      median = statistics.median(before)
      deviation = statistics.median(abs(x - median) for x in before)
      above = (value - median) / max(deviation, 1e-3 * abs(median), 1e-30)
      if above > _DEVIATIONS:
        found[step] = above
    before = [*before, value][-_WINDOW:]
  return found


def explain(replay: replay_lib.Replay, with_grads: bool = False) -> list[Row]:
  """Returns the rows of the batch of the next step, the worst first.

  Args:
    replay: a replay before the step; its experiment is in the sharded style.
    with_grads: whether to compute the norms of the rows' gradients.
  """
  experiment = replay.experiment
  if not isinstance(experiment, sharded.ShardedExperiment):
    raise errors.UsageError(
      f'{type(experiment).__name__} is not a ShardedExperiment: only its style'
      ' has a loss that can be computed for each row.'
    )
  source, on_host, where = experiment.peek()
  try:
    num_rows = len(jax.tree.leaves(on_host)[0])
    texts = show.texts(source, on_host, num_rows)
  finally:
    source.close()
  batch = experiment.partitioner.put_batch(on_host)
  compute = jax.jit(
    experiment.in_mesh(functools.partial(_row_loss, experiment, with_grads)),
    out_shardings=experiment.partitioner.replicated,
  )
  # As `train_step` derives the key of the step.
  rng = jax.random.fold_in(replay.state.train_step_rng, experiment.state.step)
  host, num_hosts = experiment.partitioner.host
  rows = []
  # All processes compute all rows together; each lists its own.
  for row in range(num_rows * num_hosts):
    loss, weight, norm = compute(experiment.state, batch, rng, row)
    if row // num_rows != host:
      continue
    i = row % num_rows
    rows.append(
      Row(
        number=i,
        loss=float(loss),
        weight=float(weight),
        grad_norm=float(norm) if with_grads else None,
        where=where[i] if where else '',
        text=' | '.join(repr(text[i]) for text in texts.values()),
      )
    )
  return sorted(rows, key=_badness, reverse=True)


def _badness(row: Row) -> float:
  # The mean loss of a row of weight 0 is NaN, which means nothing.
  if not row.weight:
    return -math.inf
  return row.loss if math.isfinite(row.loss) else math.inf


def _row_loss(
  experiment: Any, with_grads: bool, state: Any, batch: Any, rng: Any, row: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns a row's loss, its weight and the norm of the loss's gradient."""
  weights = batch[train_step.WEIGHTS]
  chosen = jnp.arange(len(weights)) == row
  chosen = chosen.reshape(-1, *[1] * (weights.ndim - 1))
  alone = {**batch, train_step.WEIGHTS: jnp.where(chosen, weights, 0)}

  def loss_fn(params: Any) -> jax.Array:
    return experiment.loss_fn(params, state.model_state, alone, rng, True)[0]

  norm = jnp.float32(0)
  loss = loss_fn(state.params)
  if with_grads:
    norm = optax.tree.norm(jax.grad(loss_fn)(state.params))
  return loss, alone[train_step.WEIGHTS].sum(dtype=jnp.float32), norm


def add_command(commands: Any) -> None:
  """Adds `explain` to the commands of `python -m jaxline.runs`."""
  command = commands.add_parser('explain', help=__doc__)
  command.add_argument('dir', help='the run')
  command.add_argument(
    'step',
    type=replay_lib.positive,
    nargs='?',
    help='the step; the default is the worst spike',
  )
  command.add_argument(
    '--grads', action='store_true', help="also the norms of the rows' gradients"
  )
  command.set_defaults(run=_explain)


def _find(run: runs.Run) -> int:
  """Prints the spikes of a run, and returns the step of the worst one."""
  found: dict[int, float] = {}
  for name in _JUDGED:
    curve = run.curves.get(name, {})
    for step, above in spikes(curve).items():
      print(f'Step {step}: {name} is {curve[step]:.5g}.')
      found[step] = max(found.get(step, 0.0), above)
  if not found:
    raise errors.UsageError(
      f'No logged step of {run.path} stands out: none is more than'
      f' {_DEVIATIONS} median absolute deviations above the {_WINDOW} before'
      ' it. Give a step.'
    )
  return max(found, key=lambda step: found[step])


def _explain(args: argparse.Namespace) -> int:
  replay_lib.start_jax(args.dir)
  run = runs.read(args.dir)
  step = _find(run) if args.step is None else args.step
  with replay_lib.opened(args.dir, step) as replay:
    replay.run(step - 1)
    rows = explain(replay, args.grads)
    number = replay.experiment.next_batch_number
  losses = run.curves.get('train/loss', {})
  near = [
    x
    for s, x in losses.items()
    if s != step and abs(s - step) <= 1000 and math.isfinite(x)
  ]
  around = f'; around it the loss is {np.median(near):.5g}' if near else ''
  print(f'Step {step} trains on batch {number}{around}:')
  table = [('row', 'loss', 'weight', 'grad norm', 'from', 'text')]
  for row in rows:
    norm = '' if row.grad_norm is None else f'{row.grad_norm:.4g}'
    table.append(
      (
        str(row.number),
        f'{row.loss:.4f}',
        f'{row.weight:g}',
        norm,
        row.where,
        row.text[:_MAX_TEXT],
      )
    )
  inspection.print_table(table, right=(0, 1, 2, 3))
  skipped = [*profiling.parse(replay.config.skip_batches), (number, number)]
  skip = ','.join(str(a) if a == b else f'{a}-{b}' for a, b in sorted(skipped))
  place = f'{run.path}:{replay.start}'
  if not replay.from_own:
    place = replay.config.restore_from
  begin = f'on without it: --config.restore_from={place}'
  print(
    f'To train {begin if place else "anew without it:"}'
    f' --config.skip_batches={skip}'
  )
  return 0
