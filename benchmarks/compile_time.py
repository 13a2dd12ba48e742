"""Compile time of the training step against depth, with scanned layers.

    python -m benchmarks.compile_time

The model is configs/lm.py with more layers and `scan_layers`. A row gives the
seconds to trace, lower and compile the step without a cache. A ratio of 1 means
that the time does not grow with the depth.
"""

import functools

import jax

from benchmarks import harness
from benchmarks import lm_step

_DEPTHS = (12, 24, 96)


def _compile(depth: int) -> harness.Sample:
  experiment = lm_step.make_experiment(
    'default', model={'num_layers': depth, 'scan_layers': True}
  )
  batch = experiment.abstract_batch(is_training=True)
  args = experiment.abstract_state(), batch, experiment.abstract_rng()
  jax.clear_caches()
  return harness.timed(
    lambda: experiment.compiled_train_step.lower(*args).compile()
  )


def rows(options: harness.Options) -> list[harness.Row]:
  """Compiles each depth in turns."""
  depths = options.pick(_DEPTHS, (2, 4))
  samples = harness.turns(
    {str(n): functools.partial(_compile, n) for n in depths},
    options.num_rounds(3),
  )
  first, *others = map(str, depths)
  return [
    harness.row(
      f'{depth} layers',
      samples[depth],
      f'{first} layers',
      samples[first],
      unit='s',
      aim='<= 1.1',
      judged='cpu',
    )
    for depth in others
  ]


if __name__ == '__main__':
  harness.main(rows, __doc__)
