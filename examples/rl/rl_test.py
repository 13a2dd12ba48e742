"""Tests of DDPG on the pendulum, with its state on the device or the host."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import rl
from examples.rl import pendulum
import jaxline
from jaxline.checkpoint import inspection
from tests import processes

NAMES = ('experiment', 'host')


def test_the_pendulum_of_numpy_and_of_jax():
  # Upright and hanging it stays at rest; the second costs pi**2 a step.
  rest = pendulum.State(np.array([0, np.pi]), np.zeros(2), np.array([0, 198]))
  (one, reward), zero = pendulum.advance(rest, np.zeros(2), np), np.zeros(2)
  np.testing.assert_allclose(reward, [0, -(np.pi**2)])
  np.testing.assert_allclose(one.speed, 0, atol=1e-14)
  # A whole torque makes it faster by 3 * 2 * 0.05; an episode ends by its time.
  for library in (np, jnp):
    uniform = library.full([2, 2], 0.5)
    two, _ = pendulum.transition(rest, np.ones(2), uniform, library)
    np.testing.assert_allclose(two.speed, 0.3, atol=1e-6)
    two, _ = pendulum.transition(two, zero, uniform, library)
    assert two.time.tolist() == [2, 0]
    np.testing.assert_allclose([two.angle[1], two.speed[1]], [np.pi / 2, 0.5])


def fit(directory, name):
  overrides = {
    'experiment_class': f'examples.rl.{name}:Experiment',
    'checkpoint_dir': str(directory),
    'training_steps': 10,
    'eval_interval': 5,
    'save_checkpoint_interval': 5,
    'max_checkpoints_to_keep': 2,
    'experiment_kwargs.config.hidden': 8,
    'experiment_kwargs.config.capacity': 816,  # It begins again in the run.
  }
  return jaxline.fit(None, rl.get_config(), overrides)


@pytest.mark.parametrize('name', NAMES)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(name, tmp_path):
  fit(tmp_path / 'straight', name)
  shutil.copytree(tmp_path / 'straight', tmp_path / 'resumed')
  (tmp_path / 'resumed/checkpoints/latest/10.json').unlink()
  live = fit(tmp_path / 'resumed', name).experiment
  straight, resumed = (
    inspection.find(f'{tmp_path / x}:10').arrays('.*')
    for x in ('straight', 'resumed')
  )
  buffers = [x for x in straight if x.endswith('buffer/next_x')]
  assert [straight[x].shape for x in buffers] == [(816, 3)]
  assert straight.keys() == resumed.keys()
  for key, array in straight.items():
    np.testing.assert_array_equal(resumed[key], array, key)
  # Each step adds noise of its own to the actions.
  (actions,) = (x for k, x in straight.items() if k.endswith('buffer/action'))
  assert np.abs(np.diff(actions[:64].reshape(8, 8), axis=0)).mean() > 0.1
  if name == 'experiment':  # Draws only what is written.
    state = live.state.model_state | {'written': jnp.int32(8)}
    rows = live.draw(state, {'row': jnp.arange(99)}, jax.random.key(0))
    assert np.isin(rows['action'], state['buffer']['action'][:8]).all()


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize('name', NAMES)
def test_it_learns(name, tmp_path):
  done = processes.run(
    *('experiment.py', '--config=configs/rl.py'),
    '--jaxline_mode=train_and_eval',
    f'--config.checkpoint_dir={tmp_path}',
    f'--config.experiment_class=examples.rl.{name}:Experiment',
    '--config.training_steps=3000',
  )
  assert done.returncode == 0, done.stderr
  # An actor that does nothing gets -1200.
  assert jaxline.evaluate(tmp_path, series='best')['return'] > -300
