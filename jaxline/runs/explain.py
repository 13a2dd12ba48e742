"""Explains a step of a run by the rows of its batch, the worst first."""

import argparse
from collections.abc import Mapping
import functools
import math
import shlex
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxline import base_config
from jaxline import errors
from jaxline import runs
from jaxline import train_step
from jaxline.base import keys
from jaxline.checkpoint import inspection
from jaxline.inputs import base as inputs
from jaxline.inputs import show
from jaxline.metrics import lines
from jaxline.parallel import placement
from jaxline.runs import replay as replay_lib

_DEVIATIONS = 8
_WINDOW = 20
_MIN_BEFORE = 8
_JUDGED = ('train/loss', 'train/grad_norm')
_NEAR = 1000  # The typical loss is the median within this many steps.
_MAX_TEXT = 70
_FORK = ('checkpoint_dir', 'restore_from', 'restore_rules', 'skip_batches')


class Row(NamedTuple):
  """A row of a batch."""

  number: int  # Its index among the rows of this process.
  loss: float  # The loss of a batch in which only this row has a weight.
  weight: float
  grad_norm: float  # The norm of this loss's gradient; NaN if not computed.
  where: str
  text: str


def spikes(curve: Mapping[int, float]) -> dict[int, float]:
  """Returns the steps of a curve that are spikes, with their height.

  A spike is not finite, or is more than `_DEVIATIONS` median absolute
  deviations above the median of the `_WINDOW` values before it.
  """
  found = {step: math.inf for step, x in curve.items() if not math.isfinite(x)}
  steps = sorted(curve.keys() - found.keys())
  for i, step in [*enumerate(steps)][_MIN_BEFORE:]:
    before = np.array([curve[x] for x in steps[max(0, i - _WINDOW) : i]])
    median = np.median(before)
    deviation = np.median(abs(before - median))
    above = (curve[step] - median) / max(deviation, 1e-3 * abs(median), 1e-30)
    if above > _DEVIATIONS:
      found[step] = float(above)
  return dict(sorted(found.items()))


def explain(
  replay: replay_lib.Replay, step: int, with_grads: bool = False
) -> list[Row]:
  """Returns the rows of a step's batch, the worst first."""
  source, on_host, where = replay.peek(step)
  experiment, num_rows = replay.experiment, inputs.num_rows(on_host)
  compute = jax.jit(
    experiment.in_mesh(functools.partial(_of_rows, experiment, with_grads)),
    out_shardings=experiment.partitioner.replicated,
  )
  # Derive the step's key like `ShardedExperiment._pure_step`.
  rng = jax.random.fold_in(replay.state.train_step_rng, experiment.state.step)
  batch = placement.put_batch(on_host, experiment.partitioner)
  numbers = np.asarray(compute(experiment.state, batch, rng))
  # All processes compute all rows together. Each lists its own rows.
  numbers = numbers[:, experiment.partitioner.host[0] * num_rows :]
  texts = show.texts(source, on_host, num_rows)
  rows = []
  for i, (loss, weight, norm) in enumerate(numbers.T.tolist()[:num_rows]):
    text = ' | '.join(repr(text[i]) for text in texts.values())
    rows.append(Row(i, loss, weight, norm, where[i] if where else '', text))
  # The loss of a row of weight 0 is meaningless and may be NaN.
  badness = lambda r: r.loss if math.isfinite(r.loss) else math.inf
  return sorted(rows, key=lambda r: (r.weight > 0, badness(r)), reverse=True)


def _of_rows(
  experiment: Any, with_grads: bool, state: Any, batch: Any, rng: Any
) -> jax.Array:
  """Returns each row's loss, weight and gradient norm, [3, B]."""
  weights = batch[train_step.WEIGHTS]

  def loss_of(row: jax.Array, params: Any) -> jax.Array:
    alone = jnp.zeros_like(weights).at[row].set(weights[row])
    alone_batch = inputs.Batch(batch | {train_step.WEIGHTS: alone})
    loss_fn = experiment.loss_fn
    return loss_fn(params, state.model_state, alone_batch, rng, True)[0]

  def norm_of(row: jax.Array) -> jax.Array:
    return optax.tree.norm(jax.grad(loss_of, 1)(row, state.params))

  rows = jnp.arange(len(weights))
  norms = jnp.full(rows.shape, jnp.nan)
  if with_grads:
    norms = jax.lax.map(norm_of, rows)
  if experiment.row_losses is None:
    losses = jax.lax.map(lambda row: loss_of(row, state.params), rows)
  else:
    args = state.params, state.model_state, inputs.Batch(batch), rng
    losses = experiment.row_losses(*args)
  weights = weights.reshape(len(rows), -1).sum(axis=1, dtype=jnp.float32)
  return jnp.stack([losses, weights, norms])


def _find(run: runs.RunRecord) -> int:
  """Prints the spikes of a run and returns the step of the worst one."""
  found: dict[int, float] = {}
  curves = {name: run.curves.get(name, {}) for name in _JUDGED}
  logged, total = set().union(*curves.values()), run.step - run.first_step + 1
  _, losses = replay_lib.read_fingerprints(run)
  curves['train/loss'] = losses | curves['train/loss']
  text = f'{len(logged)} of {total} steps are logged'
  lines.print_text(f'{text}, and the loss of {len(losses)} is recorded.')
  for name, curve in curves.items():
    for step, above in spikes(curve).items():
      lines.print_text(f'Step {step}: {name} is {curve[step]:.5g}.')
      found[step] = max(found.get(step, 0.0), above)
  if found:
    return max(found, key=lambda step: found[step])
  raise errors.UsageError(
    f'No logged or recorded step of {run.path} is a spike. Name a step.'
  )


def command(args: argparse.Namespace) -> int:
  """Runs `runs explain`; returns the exit status."""
  run = runs.read(args.run_dir)
  step = _find(run) if args.step is None else args.step
  run.check_step(step)
  with replay_lib.open_replay(args.run_dir, step) as replay:
    rows = explain(replay, step, args.grads)
    number = replay.experiment.train_feed.next_number
  losses = run.curves.get('train/loss', {})
  near = [x for s, x in losses.items() if 0 < abs(s - step) <= _NEAR]
  around = f'; around it the loss is {np.nanmedian(near):.5g}' if near else ''
  lines.print_text(f'Step {step} trains on batch {number}{around}:')
  table = [('row', 'loss', 'weight', 'grad norm', 'from', 'text')]
  for row, loss, weight, norm, where, text in rows:
    numbers = f'{loss:.4f}', f'{weight:g}', f'{norm:.4g}' if args.grads else ''
    table.append((str(row), *numbers, where, text[:_MAX_TEXT]))
  inspection.print_table(table, right=(0, 1, 2, 3))
  if not any(np.isfinite(loss) for _, loss, *_ in rows):
    lines.print_text(
      'No row is finite, so the cause is the model or its weights, not the'
      f' batch: python -m jaxline.runs replay {run.path} {step} --nan'
    )
    return 0
  config, recorded = replay.config, base_config.recorded_config(run.path)
  skipped = sorted([*keys.parse_ranges(config.skip_batches), (number, number)])
  texts = (str(a) if a == b else f'{a}-{b}' for a, b in skipped)
  config.skip_batches = ','.join(texts)
  config.checkpoint_dir = f'{run.path}_without_{number}'
  argv = ['python', 'experiment.py', f'--config={run.path}']
  argv += [
    f'--config.{x}={config[x]}' for x in _FORK if config[x] != recorded[x]
  ]
  lines.print_text(f'To continue without this batch: {shlex.join(argv)}')
  return 0
