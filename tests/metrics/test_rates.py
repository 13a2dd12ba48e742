"""Scalars of a step's rates: FLOPs, their part of a peak, memory in use."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import train
from jaxline.base import chips
from jaxline.base import counting
from jaxline.metrics import rates
from jaxline.parallel import pipeline
from tests.experiments import regression

ROWS, WIDTH = 16, regression.FEATURES
FORWARD = 2 * ROWS * WIDTH * regression.OUTPUTS


class Model(regression.Regression):
  """Counts how often its training step is traced."""

  traced = 0

  def loss_fn(self, params, model_state, batch, rng, is_training):
    type(self).traced += is_training
    return super().loss_fn(params, model_state, batch, rng, is_training)

  def step_scalars(self, state, grads, updates):
    # Outside of the gradient: no part of the model.
    return {'norm': jnp.linalg.norm(grads['w'].T @ grads['w'])}


def trained(**changes):
  """Returns what a training of four steps has written."""
  config = regression.get_config(4)
  config.update(checkpointer='memory', log_train_data_interval=2, **changes)
  records = []
  write = lambda step, scalars: records.append((step, dict(scalars)))
  writer = types.SimpleNamespace(write_scalars=write)
  train.Run(Model, config, writer=writer).train()
  return records


@pytest.mark.parametrize('parts', [1, 2])
def test_the_scalars_that_are_due_get_the_rates(parts, monkeypatch):
  Model.traced = 0
  records = trained(log_all_train_data=True, gradient_accumulation_steps=parts)
  assert [step for step, _ in records] == [1, 2, 3, 4]
  assert ['tflops_per_sec' in scalars for _, scalars in records] == [0, 1, 0, 1]
  for _, scalars in records[1::2]:
    expected = 3 * FORWARD * scalars['steps_per_sec'] / jax.device_count()
    assert scalars['tflops_per_sec'] == pytest.approx(expected / 1e12)
    # CPUs have no published peak, and do not tell their memory.
    assert not {'mfu', 'device_memory_gib'} & set(scalars)
  assert Model.traced == 1 + (parts > 1)  # Accumulation traces it twice.
  chip = chips.chip_of(types.SimpleNamespace(device_kind='NVIDIA H100 PCIe'))
  monkeypatch.setattr(chips, 'chip_of', lambda device: chip)
  monkeypatch.setattr(rates, 'bytes_in_use', lambda devices: 5 << 29)
  for _, scalars in trained():
    assert scalars['device_memory_gib'] == 2.5
    assert scalars['mfu'] == pytest.approx(
      scalars['tflops_per_sec'] / (chip.peak_flops / 1e12)
    )


def test_flops_that_cannot_be_counted_are_no_error(caplog, monkeypatch):
  monkeypatch.setattr(counting, 'forward_flops', lambda jaxpr: 1 / 0)
  records = trained()
  assert len(records) == 2
  assert not any('tflops_per_sec' in scalars for _, scalars in records)
  (said,) = [r for r in caplog.records if 'tflops_per_sec' in r.message]
  assert said.exc_info[0] is ZeroDivisionError


def test_the_forward_pass_of_other_programs():
  x, w = np.ones([2, 3], np.float32), np.ones([3, 3], np.float32)
  step = lambda w, x: jnp.tanh(x @ w)
  loss = lambda w: jnp.sum(step(w, x))
  penalised = lambda w: loss(w) + jnp.sum(jax.grad(loss)(w))

  def in_a_loop(w):
    body = jax.checkpoint(lambda y, _: (step(w, y), None))
    return jnp.sum(jax.lax.scan(body, x, length=5)[0])

  def in_a_pipeline(w):
    layers = jnp.broadcast_to(w, [8, 3, 3])
    sizes = {'num_stages': 2, 'num_microbatches': 2, 'num_repeats': 2}
    y = pipeline.pipeline(step, layers, x, axes=('batch', None), **sizes)
    return jnp.sum(y @ w)

  for program, products in (
    (jax.grad(loss), 1),
    (jax.jit(jax.grad(jax.jit(loss))), 1),
    (lambda w: (w @ w, jax.grad(loss)(w)), 1),
    (jax.grad(in_a_loop), 5),
    # The bubble is no part of the model, and what is outside counts whole.
    (jax.grad(in_a_pipeline), 8 + 1),
    (loss, 0),  # No gradient, no forward pass.
    # Twice, without what the gradient in the loss takes.
    (jax.grad(penalised), 2),
  ):
    found = counting.forward_flops(jax.make_jaxpr(program)(w))
    assert found == products * 2 * 2 * 3 * 3
