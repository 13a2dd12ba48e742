"""Averaged weights: their values, their sharding, and who uses them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import jaxline
from jaxline import base_config
from jaxline import errors
from jaxline import sharded
from jaxline.checkpoint import inspection
from tests.experiments import regression

DECAY = 0.8


class Averaged(regression.Regression):
  def init_fn(self, rng):
    params, model_state = super().init_fn(rng)
    return params, {**model_state, sharded.EMA: params}

  def loss_fn(self, params, model_state, batch, rng, is_training):
    *rest, new = super().loss_fn(params, model_state, batch, rng, is_training)
    return *rest, {**model_state, **new}

  def after_update(self, before, after):
    return sharded.average_weights(before, after, DECAY)


class Skipping(Averaged):
  def train_input(self):
    return regression.Scaled(self.batch_size, {2: float('nan')})


@pytest.mark.parametrize(('cls', 'parts'), [(Averaged, 1), (Skipping, 2)])
def test_the_average_is_that_of_optax(cls, parts):
  config = base_config.get_base_config()
  config.update(sharding='fsdp', gradient_accumulation_steps=parts)
  experiment = cls('train', jax.random.PRNGKey(0), run_config=config)
  optax_ema, expected = optax.ema(DECAY), None
  state = optax_ema.init(jax.device_get(experiment.state.params))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  for step in range(5):
    regression.train_steps(experiment, 1, on_nonfinite='skip')
    params = experiment.state.params
    average = experiment.state.model_state[sharded.EMA]
    if cls is Averaged or step != 2:
      with jax.numpy_dtype_promotion('standard'):  # Optax relies on it.
        expected, state = optax_ema.update(jax.device_get(params), state)
    jax.tree.map(close, average, expected)
  # Split over the devices as the weights are.
  assert not params['w'].is_fully_replicated
  assert jax.tree.map(lambda x: x.sharding, average) == jax.tree.map(
    lambda x: x.sharding, params
  )
  # An evaluation is of the average.
  of_average = dataclasses.replace(experiment.state, params=average)
  sizes = experiment.eval_sizes
  assert regression.evaluate(experiment)['loss'] == pytest.approx(
    regression.expected_evaluation(of_average, sizes), rel=1e-5
  )


def test_the_first_and_late_steps_near_one_and_narrow_weights():
  # 1 - decay and 1 - decay**count have few digits in float32.
  decay, weight = 0.9999, jnp.bfloat16(3)

  def state(step, average):
    model_state = {sharded.EMA: average, 'other': 1}
    return sharded.TrainState(jnp.int32(step), weight, model_state, None)

  for step in (1, 100, 10**6):
    got = sharded.average_weights(
      state(step - 1, jnp.float32(0)), state(step, None), decay
    )
    share = (1 - decay) / (1 - decay**step)
    np.testing.assert_allclose(got[sharded.EMA], 3 * share, rtol=1e-5)
    assert got[sharded.EMA].dtype == jnp.float32
    assert got['other'] == 1


def test_evaluation_best_load_and_export_use_the_average(tmp_path, capsys):
  config = regression.get_run_config(6, save=-1, evaluation=2)
  config.checkpoint_dir = run = str(tmp_path / 'run')
  jaxline.fit(Averaged, config, {'training_steps': 3})
  fitted = jaxline.fit(Averaged, config)
  state = jax.device_get(fitted.experiment.state)
  loaded = jaxline.load(run, experiment_class=Averaged)
  of_average = dataclasses.replace(state, params=loaded.eval_params)
  expected = regression.expected_evaluation(of_average, loaded.eval_sizes)
  assert fitted.best == {'eval/loss': pytest.approx(expected, rel=1e-5)}
  averaged, mean = state.model_state[sharded.EMA], state.model_state['mean']
  assert np.abs(averaged['w'] - state.params['w']).max() > 0.01
  for weights, params in ((None, averaged), ('raw', state.params)):
    found = jaxline.load_weights(run, weights=weights)
    # What it leaves out is named once.
    assert ('state/model_state/mean' in capsys.readouterr().err) == (
      not weights
    )
    jax.tree.map(np.testing.assert_array_equal, found, dict(params))
    both = jaxline.load_weights(run, weights=weights, model_state=True)
    expected = {'params': dict(params), 'model_state': {'mean': mean}}
    jax.tree.map(np.testing.assert_array_equal, both, expected)
    out = str(tmp_path / f'{weights}.safetensors')
    which = [f'--weights={weights}'] if weights else []
    argv = ['export', run, out, *which, '--model_state']
    assert inspection.main(argv) == 0
    exported = safetensors.numpy.load_file(out)
    named = {**params, 'model_state/mean': mean}
    jax.tree.map(np.testing.assert_array_equal, exported, named)
  with safetensors.safe_open(out, 'np') as file:
    assert file.metadata()['step'] == '6'


def test_where_there_is_no_average(tmp_path):
  config = regression.get_config(1)
  config.checkpoint_dir = str(tmp_path / 'raw')
  run = jaxline.fit(regression.Regression, config, mode='train').directory
  with pytest.raises(errors.UsageError, match='model_state/ema'):
    jaxline.load_weights(run, weights='averaged')
  # A run that begins from these weights, and not from their average.
  config.checkpoint_dir = str(tmp_path / 'averaged')
  config.restore_from = run
  config.restore_rules = [('(state/params/.*)', r'\1')]
  config.training_steps = 0
  begun = jaxline.fit(Averaged, config, mode='train')
  raw = jaxline.load_weights(run)
  jax.tree.map(np.testing.assert_array_equal, begun.experiment.eval_params, raw)
