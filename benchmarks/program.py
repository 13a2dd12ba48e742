"""The complete program, against its compiled functions alone.

    python -m benchmarks.program

Training is `jaxline.fit` with the unchanged configs/lm.py: its input, log
lines, TensorBoard and JSON lines, and checkpoints on disk. The baseline is the
same compiled step on one batch that is already on the device. The clock runs
from the end of a warm-up to the end of the last step, with one checkpoint in
between, which is more often than in the config. We also report the mean
`input_wait_fraction` of these runs: the share of the time that a step waits for
its batch. Evaluation is `evaluate`, against the compiled evaluation on batches
that are already on the device. We check that the run made all steps and its
checkpoint, and that both evaluations return the same loss.
"""

import functools
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np

from benchmarks import harness
from benchmarks import lm_step
from configs import lm as lm_config
from examples.lm import experiment as lm_experiment
import jaxline
from jaxline import metrics
from jaxline.parallel import placement

_WARM_UP = 20


class _Clocked(lm_experiment.Experiment):
  """Records the time at the end of the warm-up and of the last step."""

  times: list[harness.Sample] = []

  def should_run_step(self, global_step: int, config: Any) -> bool:
    """Records the time; the loop calls this between any two steps."""
    continues = super().should_run_step(global_step, config)
    if global_step == _WARM_UP or not continues:
      jax.block_until_ready(self.state)
      self.times.append(harness.now())
    return continues


def _train(steps: int, quick: bool) -> dict[str, Any]:
  """Runs the program; returns tokens per second and the share of waiting."""
  _Clocked.times = []
  last = _WARM_UP + steps
  with tempfile.TemporaryDirectory() as folder:
    config = lm_config.get_config()
    config.training_steps = last
    config.save_checkpoint_interval = _WARM_UP + steps // 2
    config.checkpoint_dir = folder
    if quick:
      config.experiment_kwargs.config.model.num_layers = 1
    result = jaxline.fit(_Clocked, config, mode='train')
    assert result.history['train/loss'][-1, 0] == last
    assert any(pathlib.Path(folder).rglob('*latest*')), folder
  c = result.experiment.config
  began, ended = _Clocked.times[:2]
  return {
    'rate': harness.since(began, ended, steps * c.batch_size * c.length),
    'wait': result.history['train/input_wait_fraction'][:, 1].mean(),
  }


def _training(options: harness.Options) -> list[harness.Row]:
  steps = options.pick(300, 12)
  bare = lm_step.make_experiment('default', options.quick)
  side = lm_step.our_side(bare, lm_step.random_tokens(bare, 1))
  size = bare.config.batch_size * bare.config.length
  samples = harness.turns(
    {
      'whole': functools.partial(_train, steps, options.quick),
      'step': lambda: side.time(steps, size),
    },
    options.num_rounds(5),
  )
  return [
    harness.row(
      'whole program, training',
      harness.fields(samples['whole'], 'rate'),
      'compiled step',
      samples['step'],
      unit='tokens/s',
      aim='>= 0.98',
    ),
    harness.row(
      'wait for the input',
      harness.fields(samples['whole'], 'wait'),
      unit='of the time',
      aim='<= 0.01',
    ),
  ]


def _evaluation(options: harness.Options) -> harness.Row:
  count = options.pick(40, 3)
  experiment = lm_step.make_experiment(
    'default', options.quick, eval_batches=count, sample_length=0
  )
  c = experiment.config
  _, rng = experiment.evaluate_inputs(
    lm_config.get_config(), jax.random.PRNGKey(0)
  )(0)
  placed = [
    placement.put_batch(batch, experiment.partitioner)
    for batch in experiment.eval_input().eval_batches()
  ]
  assert len(placed) == count, len(placed)

  def whole() -> float:
    scalars = experiment.evaluate(global_step=0, rng=rng, writer=None)
    return scalars['loss']

  def bare() -> float:
    sums: Any = None
    for i, batch in enumerate(placed):
      place = np.array([0, i], np.uint32)
      new, _ = experiment.compiled_eval_step(
        experiment.state, batch, rng, place
      )
      sums = new if sums is None else metrics.add(sums, new)
    return float(metrics.compute(sums)['loss'])

  np.testing.assert_allclose(whole(), bare(), rtol=1e-5)
  tokens = count * c.eval_batch_size * c.length
  samples = harness.turns(
    {
      'whole': lambda: harness.timed(whole, amount=tokens),
      'bare': lambda: harness.timed(bare, amount=tokens),
    },
    options.num_rounds(9),
  )
  return harness.row(
    'evaluation pass',
    samples['whole'],
    'compiled evaluation',
    samples['bare'],
    unit='tokens/s',
    aim='>= 0.97',
  )


def rows(options: harness.Options) -> list[harness.Row]:
  """Compares training and evaluation."""
  return [*_training(options), _evaluation(options)]


if __name__ == '__main__':
  harness.main(rows, __doc__)
