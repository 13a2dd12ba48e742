"""Memory of a training step, against the sum of its arrays.

    python -m benchmarks.memory

A step's memory is what the compiler reserves for the step of configs/lm.py:
arguments (state and batch), results that do not overwrite them, and temporary
arrays. The hand-tuned program is measured in the same way. "Its arrays" are the
state, the gradients, and what `jax.vjp` of the loss keeps for the backward
pass. "Host" is the peak growth of a process's memory while it trains on the
CPU; the state exists before.
"""

from typing import Any

import jax
import jax.extend as jex
import numpy as np

from benchmarks import hand_tuned
from benchmarks import harness
from benchmarks import lm_step


def _bytes(tree: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _compiled(step: Any, *args: Any) -> dict[str, int]:
  """Returns the bytes of results that overwrite arguments, and of all."""
  found = step.lower(*args).compile().memory_analysis()
  peak = found.argument_size_in_bytes + found.output_size_in_bytes
  peak += found.temp_size_in_bytes - found.alias_size_in_bytes
  return {'aliased': found.alias_size_in_bytes, 'peak': peak}


def _kept_by_autodiff(experiment: Any, state: Any, batch: Any) -> int:
  """Returns the bytes of the arrays that a backward pass reads.

  These are what `jax.vjp` of the loss keeps, without its arguments.
  """

  def kept(params: Any, batch: Any, rng: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
      return experiment.loss_fn(params, state.model_state, batch, rng, True)[0]

    return jax.vjp(loss, params)[1]

  rng = jax.eval_shape(jax.random.key, 0)
  program = jax.make_jaxpr(kept)(state.params, batch, rng).jaxpr
  arrays = {v: v.aval for v in program.outvars if isinstance(v, jex.core.Var)}
  given = {*program.invars, *program.constvars}
  return _bytes([x for v, x in arrays.items() if v not in given])


def _rows_of_size(name: str, quick: bool) -> list[harness.Row]:
  experiment = lm_step.make_experiment(name, quick)
  config = experiment.config
  state = experiment.abstract_state()
  batch = experiment.abstract_batch(is_training=True)
  args = state, batch, experiment.abstract_rng()
  ours = _compiled(experiment.compiled_train_step, *args)
  needed = _bytes(state) + _bytes(state.params)
  needed += _kept_by_autodiff(experiment, state, batch)

  params = hand_tuned.from_experiment(experiment.state.params, config.model)
  step = hand_tuned.step(
    hand_tuned.loss_fn(config.model, config.length), config
  )
  tokens = np.zeros([config.batch_size, config.length + 1], np.int32)
  plain = _compiled(
    step, (params, hand_tuned.optimizer(config).init(params)), tokens
  )

  # Load the compiled program and make the state before the measurement.
  side = lm_step.our_side(experiment, lm_step.random_tokens(experiment))
  peak = harness.Peak()
  side.time(5, 1)
  grown = peak.grown()

  def row(what: str, ours: float, against: str, theirs: float, aim: str) -> Any:
    samples = [[harness.Sample(x / 1e6)] for x in (ours, theirs)]
    return harness.row(
      f'{name}: {what}', samples[0], against, samples[1], unit='MB', aim=aim
    )

  return [
    row('a step', ours['peak'], 'its arrays', needed, '<= 1'),
    row('a step', ours['peak'], 'hand-tuned program', plain['peak'], '<= 1.05'),
    row('written in place', ours['aliased'], 'state', _bytes(state), '>= 0.99'),
    row('host, growth in training', grown, 'a step', ours['peak'], '<= 1'),
  ]


def rows(options: harness.Options) -> list[harness.Row]:
  """Compares the step of each size."""
  sizes = options.pick(list(lm_step.SIZES), ['default'])
  return [row for name in sizes for row in _rows_of_size(name, options.quick)]


if __name__ == '__main__':
  harness.main(rows, __doc__)
