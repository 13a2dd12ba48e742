"""Two optimizers that take turns, by the hooks that every experiment has."""

import ast
import json
import os
import pathlib
import subprocess
import sys

from experiments import gan
from experiments import regression
import jax
import numpy as np
import pytest

import jaxline
from jaxline import base_config

ROOT = pathlib.Path(__file__).parent.parent


def make(**config):
  """Returns a GAN of a config that has these values."""
  full = base_config.get_base_config()
  full.update(config)
  return gan.Gan('train', jax.random.PRNGKey(0), run_config=full)


def changed(before, after):
  """Returns which networks have changed, and whether all their weights."""
  return {
    name: {
      key: not np.array_equal(before[name][key], x) for key, x in value.items()
    }
    for name, value in after.items()
  }


@pytest.mark.parametrize('parts', [1, 2])
def test_the_two_alternate(parts):
  experiment = make(gradient_accumulation_steps=parts)
  moved = {}
  for step in range(6):
    before = jax.device_get(experiment.state.params)
    regression.train_steps(experiment, 1)
    found = changed(before, jax.device_get(experiment.state.params))
    moved[step] = {
      name
      for name, weights in found.items()
      if any(weights.values()) and all(weights.values())
    }
    assert {n for n, x in found.items() if any(x.values())} == moved[step]
  assert [*moved.values()] == [{'discriminator'}, {'generator'}] * 3
  counts = {
    name: int(state.inner_state.inner_state[0].count)
    for name, state in experiment.state.opt_state.inner_states.items()
  }
  assert counts == {'discriminator': 3, 'generator': 3}


def test_the_first_steps_are_those_of_adam_by_hand():
  experiment = make()
  before = jax.device_get(experiment.state.params)
  rows = regression.train_steps(experiment, 2)
  after = jax.device_get(experiment.state.params)
  # The first step of Adam is the learning rate in the gradient's direction.
  for name in before:
    for key, old in before[name].items():
      np.testing.assert_allclose(
        np.abs(after[name][key] - old), 0.03, rtol=1e-3
      )
  # The data lie at (2, -1), and the generator's points at the origin.
  assert np.sign(after['generator']['b']).tolist() == [1, -1]
  assert rows[0]['discriminator_loss'] > 0


def test_it_learns_the_moments():
  experiment = make()
  regression.train_steps(experiment, 1200)
  generator = jax.device_get(experiment.state.params['generator'])
  np.testing.assert_allclose(generator['b'], gan.MEAN, atol=0.2)
  covariance = generator['w'].T @ generator['w']
  np.testing.assert_allclose(np.diag(covariance) ** 0.5, gan.STD, atol=0.2)
  assert abs(covariance[0, 1]) < 0.2
  # It can tell them apart as badly as a coin.
  losses = regression.evaluate(experiment)
  assert losses['generator_loss'] == pytest.approx(np.log(2), abs=0.1)
  assert losses['discriminator_loss'] == pytest.approx(2 * np.log(2), abs=0.1)


@pytest.mark.parametrize('step', [3, 4])
def test_a_resumed_run_has_the_same_bits(step, tmp_path):
  def fit(name, steps):
    config = regression.get_config(steps)
    config.checkpoint_dir = str(tmp_path / name)
    return jaxline.fit(gan.Gan, config, mode='train').experiment.state

  straight = fit('straight', 8)
  fit('resumed', step)
  assert regression.digest(fit('resumed', 8)) == regression.digest(straight)


def test_a_skipped_step_keeps_the_turns(monkeypatch):
  class Broken(gan.Input):
    def __next__(self):
      is_broken = self.state['next'] == 2
      batch = super().__next__()
      return {'x': batch['x'] * np.float32('nan' if is_broken else 1)}

  monkeypatch.setattr(gan, 'Input', Broken)
  experiment = make()
  networks = []
  for _ in range(5):
    before = jax.device_get(experiment.state.params)
    regression.train_steps(experiment, 1, on_nonfinite='skip')
    found = changed(before, jax.device_get(experiment.state.params))
    networks.append([n for n, x in found.items() if any(x.values())])
  d, g = ['discriminator'], ['generator']
  # The discriminator's turn is made up for.
  assert networks == [d, g, [], d, g]
  state = experiment.state
  turns = [x.inner_state.step for x in state.opt_state.inner_states.values()]
  assert [state.model_state['turn'], *turns] == [4, 4, 4]


def test_it_is_split_like_any_experiment():
  one, two = gan.curve(), gan.curve(sharding='fsdp')
  assert two['shards'] == [[(2, 16)] * 2] * 2
  np.testing.assert_allclose(two['losses'], one['losses'], rtol=1e-5)


@pytest.mark.slow
def test_eight_devices_compute_the_same():
  kwargs = [{'sharding': 'ddp'}, {'sharding': 'fsdp'}]

  def run(devices):
    result = subprocess.run(
      [sys.executable, gan.__file__, json.dumps(kwargs)],
      env=os.environ
      | {
        'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'tests')]),
        'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
      },
      capture_output=True,
      text=True,
      timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])

  (one, _), eight = run(1), run(8)
  for curve, columns in zip(eight, (32, 4), strict=True):
    assert curve['shards'] == [[[2, columns]] * 8] * 2
    for name in ('losses', 'weights'):
      for x, y in zip(curve[name], one[name], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    for name, value in one['eval'].items():
      np.testing.assert_allclose(curve['eval'][name], value, rtol=1e-4)


def test_it_uses_public_names_only():
  tree = ast.parse(pathlib.Path(gan.__file__).read_text(encoding='utf-8'))
  names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
  names |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
  assert not {n for n in names if n.startswith('_')} - {'__next__', '__file__'}
