"""Tests of schedules against numbers worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax import schedules

Constant = schedules.Constant.HParams
Cosine = schedules.LinearRampupCosineDecay.HParams
Exponential = schedules.LinearRampupExponentialDecay.HParams
Piecewise = schedules.LinearRampupPiecewiseConstant.HParams
# The learning rates of Pax's C4 experiments and of its GPT-3.
C4 = Exponential(
  warmup_steps=4000, decay_start=4001, decay_end=300_000, min_ratio=0.1, max=1.0
)
GPT3 = Cosine(
  warmup_steps=265, decay_start=265, decay_end=108_600, min_ratio=0.1, max=1.0
)


@pytest.mark.parametrize(
  ('hparams', 'steps', 'expected'),
  [
    (Constant(value=0.3), (0, 10**7), (0.3, 0.3)),
    (C4, (0, 1000, 3999, 4000, 4001), (0, 0.25, 0.99975, 1, 1)),
    (C4, (10_000, 100_000, 300_000, 10**7), (0.954406, 0.473890, 0.1, 0.1)),
    # Half of the decay is done at (265 + 108600) / 2 = 54432.5.
    (GPT3, (0, 53, 265, 54_432, 108_600, 200_000), (0, 0.2, 1, 0.55, 0.1, 0.1)),
    (
      Cosine(decay_start=5, decay_end=8, min_ratio=0.5, max=2.0),
      (0, 5, 6, 7, 8),
      (2, 2, 1.75, 1.25, 1),
    ),
    (
      Piecewise(boundaries=(10, 30, 60), values=(1.0, 0.1, 0.01)),
      (0, 5, 10, 29, 30, 59, 60, 90),
      (0, 0.5, 1, 1, 0.1, 0.1, 0.01, 0.01),
    ),
  ],
)
def test_values_at_steps(hparams, steps, expected):
  value_at = hparams.Instantiate().value_at
  found = [value_at(jnp.int32(step)) for step in steps]
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-7)
  for step in (jnp.int32(3), np.int32(3), 3):
    value = value_at(step)
    assert (value.dtype, value.shape) == (jnp.float32, ())


@pytest.mark.parametrize(
  ('hparams', 'message'),
  [
    (Exponential(warmup_steps=5, decay_start=4, decay_end=9), 'warmup_steps <'),
    (Exponential(min_ratio=0), 'min_ratio'),
    (Piecewise(boundaries=(1, 2), values=(1.0,)), 'as many values'),
    (Piecewise(boundaries=(0, 2), values=(1.0, 0.1)), 'the first positive'),
    (Piecewise(boundaries=(2, 1), values=(1.0, 0.1)), 'in order'),
  ],
)
def test_refuses_what_makes_no_schedule(hparams, message):
  with pytest.raises(ValueError, match=message):
    hparams.Instantiate()
