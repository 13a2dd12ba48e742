"""Memory of a training step, against the sum of its arrays.

    python -m benchmarks.memory

A step's memory is what the compiler reserves for the step of configs/lm.py:
arguments (state and batch), results that do not overwrite them, and temporary
arrays. The hand-tuned program is measured in the same way. "By hand" adds up
the state, the gradients, and the activations that the backward pass needs
(listed in `_activations`). "Host" is the peak growth of a process's memory
while it trains on the CPU; the state exists before.
"""

from typing import Any

import jax
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


def _activations(config: Any) -> int:
  """Returns the bytes of the activations that a backward pass reads.

  For each layer: the inputs and outputs of both norms, queries, keys and
  values, the attention's weights (none of the first half of the queries for the
  second half of the keys) and the mixed values, and the feed-forward part
  before and after its activation. For the loss: the input and output of the
  last norm, a chunk of logits, and their gradient.
  """
  m = config.model
  parts = 3 if m.feed_forward == 'swiglu' else 2
  layer = 4 * m.embed_dim + 3 * m.embed_dim + m.embed_dim + parts * m.mlp_dim
  layer += m.num_heads * config.length * 3 / 4
  loss = 2 * m.embed_dim + 2 * m.vocab_size / m.loss_chunks
  tokens = config.batch_size * config.length
  return round(4 * tokens * (m.num_layers * layer + loss))


def _rows_of_size(name: str, quick: bool) -> list[harness.Row]:
  experiment = lm_step.make_experiment(name, quick)
  config = experiment.config
  state = experiment.abstract_state()
  batch = experiment.abstract_batch(is_training=True)
  args = state, batch, experiment.abstract_rng()
  ours = _compiled(experiment.compiled_train_step, *args)
  by_hand = _bytes(state) + _bytes(state.params) + _activations(config)

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
    row('a step', ours['peak'], 'by hand', by_hand, '<= 1'),
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
