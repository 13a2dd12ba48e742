"""Tests of schedules against numbers worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax import schedules

# The learning rates of Pax's C4 experiments and of its GPT-3.
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
      _RESNET,
      {0: 0, 5: 0.5, 10: 1, 29: 1, 30: 0.1, 59: 0.1, 60: 0.01, 90: 0.01},
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
    (
      schedules.LinearRampupPiecewiseConstant.HParams(
        boundaries=(0, 2), values=(1.0, 0.1)
      ),
      'the first positive',
    ),
    (
      schedules.LinearRampupPiecewiseConstant.HParams(
        boundaries=(2, 1), values=(1.0, 0.1)
      ),
      'in order',
    ),
    (schedules.LinearRampupExponentialDecay.HParams(min_ratio=0), 'min_ratio'),
  ],
)
def test_refuses_what_makes_no_schedule(hparams, message):
  with pytest.raises(ValueError, match=message):
    hparams.Instantiate()
