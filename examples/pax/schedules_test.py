"""Tests of schedules against numbers worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax import schedules

# The learning rate of Pax's C4 experiments, and of its GPT-3.
_C4 = schedules.LinearRampupExponentialDecay.HParams(
  warmup_steps=4000, decay_start=4001, decay_end=300_000, min_ratio=0.1, max=1.0
)
_GPT3 = schedules.LinearRampupCosineDecay.HParams(
  warmup_steps=265, decay_start=265, decay_end=108_600, min_ratio=0.1, max=1.0
)
_RESNET = schedules.LinearRampupPiecewiseConstant.HParams(
  boundaries=(10, 30, 60), values=(1.0, 0.1, 0.01)
)


@pytest.mark.parametrize(
  ('hparams', 'expected'),
  [
    (schedules.Constant.HParams(value=0.3), {0: 0.3, 10**7: 0.3}),
    (
      schedules.Linear.HParams(start=(10, 1.0), limit=(20, 3.0)),
      {0: 1, 10: 1, 11: 1.2, 15: 2, 20: 3, 99: 3},
    ),
    (
      schedules.Polynomial.HParams(start=(0, 1.0), limit=(4, 9.0), power=2),
      {0: 1, 1: 1.5, 2: 3, 3: 5.5, 4: 9, 5: 9},
    ),
    (
      schedules.Polynomial.HParams(
        start=(0, 1.0), limit=(4, 9.0), power=2, origin='limit'
      ),
      {0: 1, 1: 4.5, 2: 7, 3: 8.5, 4: 9, 5: 9},
    ),
    (
      schedules.Exponential.HParams(start=(2, 8.0), limit=(5, 1.0)),
      {0: 8, 2: 8, 3: 4, 4: 2, 5: 1, 6: 1},
    ),
    (
      schedules.Cosine.HParams(
        initial_value=3.0, final_value=1.0, total_steps=12
      ),
      {0: 3, 4: 2.5, 6: 2, 8: 1.5, 12: 1, 20: 1},
    ),
    (
      schedules.PiecewiseConstant.HParams(
        boundaries=(3, 5), values=(1.0, 0.0, 0.25)
      ),
      {0: 1, 2: 1, 3: 0, 4: 0, 5: 0.25, 99: 0.25},
    ),
    (schedules.PiecewiseConstant.HParams(values=(2.0,)), {0: 2, 5: 2}),
    (
      _C4,
      {
        0: 0,
        1000: 0.25,
        3999: 0.99975,
        4000: 1,
        4001: 1,
        10_000: 0.954406,
        100_000: 0.473890,
        300_000: 0.1,
        10**7: 0.1,
      },
    ),
    (
      _GPT3,
      # Half of the decay is done at (265 + 108600) / 2 = 54432.5.
      {0: 0, 53: 0.2, 265: 1, 54_432: 0.55, 108_600: 0.1, 200_000: 0.1},
    ),
    (
      schedules.LinearRampupCosineDecay.HParams(
        decay_start=5, decay_end=8, min_ratio=0.5, max=2.0
      ),
      {0: 2, 5: 2, 6: 1.75, 7: 1.25, 8: 1},
    ),
    (
      schedules.LinearRampupPolynomialDecay.HParams(
        warmup_steps=2, decay_start=4, decay_end=8, min_ratio=0, max=8, power=2
      ),
      {0: 0, 1: 4, 2: 8, 4: 8, 5: 7.5, 6: 6, 7: 3.5, 8: 0, 9: 0},
    ),
    (
      schedules.DelayedCosine.HParams(start=(10, 3.0), limit=(22, 1.0)),
      {0: 3, 10: 3, 14: 2.5, 16: 2, 18: 1.5, 22: 1, 30: 1},
    ),
    (
      schedules.LinearRampupSqrtDecay.HParams(peak=2.0, warmup_steps=4),
      {0: 0.5, 1: 0.5, 2: 1, 4: 2, 16: 1, 64: 0.5},
    ),
    (
      schedules.ContinuousSchedule.HParams(
        initial_value=8.0, start_step=10, half_life_steps=5, min=0.2
      ),
      {0: 8, 10: 8, 15: 4, 20: 2, 21: 8 * 0.5**2.2, 25: 1.6, 99: 1.6},
    ),
    (
      schedules.PiecewiseSchedule.HParams(
        boundaries=(2, 5),
        schedules=(
          schedules.Linear.HParams(start=(0, 1.0), limit=(4, 5.0)),
          schedules.Linear.HParams(start=(0, 9.0), limit=(3, 6.0)),
          schedules.Constant.HParams(value=0.5),
        ),
      ),
      # The second counts its own steps.
      {0: 1, 1: 2, 2: 9, 3: 8, 4: 7, 5: 0.5, 99: 0.5},
    ),
    (
      schedules.CycleSchedule.HParams(
        schedules=(
          schedules.Linear.HParams(start=(0, 0.0), limit=(10, 10.0)),
          schedules.Constant.HParams(value=-1.0),
          schedules.Constant.HParams(value=-2.0),
        ),
        steps=(2, 1, 1),
      ),
      # The first counts the run's.
      {0: 0, 1: 1, 2: -1, 3: -2, 4: 4, 5: 5, 6: -1, 7: -2, 8: 8, 12: 10},
    ),
    (
      _RESNET,
      {0: 0, 5: 0.5, 10: 1, 29: 1, 30: 0.1, 59: 0.1, 60: 0.01, 90: 0.01},
    ),
    (
      schedules.SqrtDecay.HParams(decay_start=16, multiplier=2.0, offset=4.0),
      {0: 0.5, 20: 0.5, 29: 0.4, 104: 0.2},
    ),
    (
      schedules.Transformer.HParams(warmup_steps=4, model_dim=64, decay_end=99),
      {0: 1 / 64, 1: 1 / 32, 3: 1 / 16, 15: 1 / 32, 99: 1 / 80, 500: 1 / 80},
    ),
    (
      schedules.Transformer.HParams(
        warmup_steps=2, model_dim=64, worker_replicas=2
      ),
      {0: 1 / 64, 3: 1 / 16, 15: 1 / 32},
    ),
  ],
  ids=lambda x: '' if isinstance(x, dict) else type(x).__qualname__,
)
def test_values_at_steps(hparams, expected):
  value_at = hparams.Instantiate().value_at
  found = [value_at(jnp.int32(step)) for step in expected]
  np.testing.assert_allclose(
    found, list(expected.values()), rtol=2e-5, atol=1e-7
  )
  for step in (jnp.int32(3), np.int32(3), 3):
    value = value_at(step)
    assert (value.dtype, value.shape) == (jnp.float32, ())


@pytest.mark.parametrize(
  ('hparams', 'message'),
  [
    (
      schedules.Linear.HParams(start=(3, 1.0)),
      'the step of limit the later.*=.3, 1',
    ),
    (schedules.Polynomial.HParams(origin='end'), "origin is 'end'"),
    (schedules.Exponential.HParams(limit=(1, 0.0)), 'positive values'),
    (schedules.Cosine.HParams(), 'total_steps is 0'),
    (schedules.PiecewiseConstant.HParams(boundaries=(1,)), 'one value more'),
    (
      schedules.PiecewiseConstant.HParams(
        boundaries=(2, 1), values=(1.0, 2.0, 3.0)
      ),
      'in order',
    ),
    (
      schedules.LinearRampupExponentialDecay.HParams(
        warmup_steps=5, decay_start=4, decay_end=9
      ),
      'warmup_steps <= decay_start',
    ),
    (
      schedules.LinearRampupPiecewiseConstant.HParams(
        boundaries=(1, 2), values=(1.0,)
      ),
      'as many values',
    ),
    (schedules.SqrtDecay.HParams(decay_start=0), 'decay_start is 0'),
    (schedules.PiecewiseSchedule.HParams(), 'one schedule more'),
    (
      schedules.CycleSchedule.HParams(
        schedules=(schedules.Constant.HParams(),), steps=(0,)
      ),
      'positive',
    ),
    (schedules.Transformer.HParams(warmup_steps=0), 'warmup_steps is 0'),
  ],
)
def test_refuses_what_makes_no_schedule(hparams, message):
  with pytest.raises(ValueError, match=message):
    hparams.Instantiate()


def test_an_exponential_falls_to_a_half_by_default():
  # The default of Praxis 1.4.0.
  schedule = schedules.Exponential.HParams().Instantiate()
  assert [float(schedule.value_at(step)) for step in (0, 1, 2)] == [1, 0.5, 0.5]
