"""Tests of `jaxline.fit`, `load`, `load_weights` and `evaluate`."""

import ast
import pathlib
import re
import signal
import threading
import xml.dom.minidom

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import jaxline
from jaxline import errors
from tests import processes
from tests.experiments import regression


def make_config(folder):
  config = regression.get_run_config(6, save=3, evaluation=3)
  config.checkpoint_dir = str(folder / 'run')
  config.log_train_data_interval = 2
  config.experiment_class = 'tests.experiments.regression:Regression'
  return config


@pytest.fixture
def config(tmp_path):
  return make_config(tmp_path)


@pytest.fixture(scope='module')
def fitted(tmp_path_factory):
  """A run that the tests only read."""
  config = make_config(tmp_path_factory.mktemp('fitted'))
  return jaxline.fit(regression.Regression, config)


def test_fit_returns_the_run(fitted):
  assert pathlib.Path(fitted.directory).name == 'run'
  assert int(fitted.experiment.state.step) == 6
  steps, losses = fitted.history['eval/loss'].T
  assert steps.tolist() == [3, 6]
  expected = regression.expected_evaluation(
    fitted.experiment.state, (16, 16, 5)
  )
  np.testing.assert_allclose(losses[-1], expected, rtol=1e-5)
  assert fitted.history['train/loss'][:, 0].tolist() == [2, 4, 6]
  assert fitted.best == {'eval/loss': min(losses)}


def test_the_way_to_go_on_after_the_last_step(
  config, tmp_path, monkeypatch, capsys
):
  class Scheduled(regression.Regression):
    def __init__(self, mode, init_rng, *, run_config, steps, lock):
      super().__init__(mode, init_rng, run_config=run_config)
      self.steps = steps
      assert lock is mine  # It cannot be copied.

  monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
  config.experiment_class = config.checkpoint_dir = None
  mine = threading.Lock()
  steps = config.get_ref('training_steps')
  config.experiment_kwargs = {'steps': steps, 'lock': mine}
  fitted = jaxline.fit(Scheduled, config, {'training_steps': 4})
  assert fitted.experiment.steps == 4  # As `--config.training_steps=4` does.
  printed = capsys.readouterr().out
  (way,) = re.findall(r'Continue: +jaxline.fit\(..., overrides=(.*)\)', printed)
  again = jaxline.fit(Scheduled, config, ast.literal_eval(way))
  assert (again.experiment.steps, int(again.experiment.state.step)) == (8, 8)
  assert again.history['eval/loss'][:, 0].tolist() == [3, 4, 6, 8]
  assert again.directory == fitted.directory
  # The next call makes a new run.
  assert (config.training_steps, config.checkpoint_dir) == (6, None)


def test_load_and_evaluate_give_what_was_logged_and_write_nothing(fitted):
  def found():
    paths = pathlib.Path(fitted.directory).rglob('*')
    return {p: p.stat().st_mtime_ns for p in paths}

  before = found()
  earlier, last = (
    jaxline.load(fitted.directory, step=step).state for step in (3, None)
  )
  assert (int(earlier.step), int(last.step)) == (3, 6)
  for step, state in ((3, earlier), (6, last), (None, last)):
    weights = jaxline.load_weights(fitted.directory, step=step)
    assert set(weights) == {'b', 'w'}
    jax.tree.map(np.testing.assert_array_equal, weights, state.params)
  np.testing.assert_array_equal(
    last.params['w'], fitted.experiment.state.params['w']
  )
  assert np.abs(earlier.params['w'] - last.params['w']).max() > 0.01
  for step, value in fitted.history['eval/loss']:
    scalars = jaxline.evaluate(fitted.directory, step=int(step))
    assert scalars == {'loss': value, 'rows': pytest.approx(14.04, abs=9)}
  best = jaxline.evaluate(fitted.directory, series='best')
  assert best['loss'] == fitted.best['eval/loss']
  assert found() == before


def test_load_and_evaluate_take_overrides(fitted):
  overrides = {'sharding': 'fsdp', 'experiment_kwargs': {'eval_sizes': (16, 3)}}
  loaded = jaxline.load(fitted.directory, overrides)
  assert loaded.state.params['w'].sharding.spec == P(('data', 'expert'), None)
  assert jaxline.load(fitted.directory).state.params['w'].sharding.spec == P(
    None, None
  )
  expected = regression.expected_evaluation(fitted.experiment.state, (16, 3))
  found = jaxline.evaluate(fitted.directory, overrides)
  np.testing.assert_allclose(found['loss'], expected, rtol=1e-5)


def test_what_is_wrong_is_refused(fitted, config):
  run = pathlib.Path(fitted.directory)
  wrong = {'training_step': 3}
  for call, said in (
    (lambda: jaxline.load(run / 'nowhere'), 'is not the directory of a run'),
    (lambda: jaxline.load_weights('s3://'), 's3://BUCKET/PATH'),
    (lambda: jaxline.load(run, step=5), r'has the steps \[3, 6\]'),
    (lambda: jaxline.load(run, series='bets'), "no checkpoint of 'bets'"),
    (lambda: jaxline.load_weights(run, step=5), 'has no step 5'),
    (lambda: jaxline.load_weights(run / 'no'), 'is not the directory'),
    (lambda: jaxline.fit(None, config, wrong), 'training_step'),
    (lambda: jaxline.load(run, wrong), 'training_step'),
    (lambda: jaxline.evaluate(run, wrong), 'training_step'),
    (lambda: jaxline.fit(None, config, mode='eval'), "mode is 'eval'"),
  ):
    with pytest.raises(errors.UsageError, match=said):
      call()


def test_the_package_is_light():
  code = (
    'import sys, jaxline; assert "fit" in dir(jaxline);'
    ' assert not hasattr(jaxline, "fits");'
    ' heavy = {"jax", "matplotlib", "numpy", "pandas", "rich", "tensorflow"};'
    ' assert not (heavy | {"torch"}) & sys.modules.keys()'
  )
  assert processes.run('-c', code).returncode == 0


def signalled(signum, step):
  """Returns a class that gets a signal behind so many steps."""

  class Signalled(regression.Regression):
    def step(self, **kwargs):
      if int(self.state.step) == step:
        signal.raise_signal(signum)
      return super().step(**kwargs)

  return Signalled


def test_an_interrupt_saves(config, capsys):
  with pytest.raises(KeyboardInterrupt):
    jaxline.fit(signalled(signal.SIGINT, 1), config)
  how = f"fit(..., overrides={{'checkpoint_dir': '{config.checkpoint_dir}"
  assert how in capsys.readouterr().out
  assert int(jaxline.load(config.checkpoint_dir).state.step) == 2


@pytest.mark.parametrize(
  ('signum', 'mode', 'code'),
  [
    (signal.SIGTERM, 'train', 0),
    (signal.SIGTERM, 'train_and_eval', 75),  # Its last evaluation is left.
    (signal.SIGINT, 'train', None),
  ],
)
def test_a_signal_in_the_last_step(signum, mode, code, config, capsys):
  with pytest.raises(KeyboardInterrupt if code is None else SystemExit) as e:
    jaxline.fit(signalled(signum, 5), config, mode=mode)
  assert getattr(e.value, 'code', None) == code
  text = ' '.join([str(e.value), *getattr(e.value, '__notes__', [])])
  is_over = mode == 'train'
  assert ('has ended' in text) == is_over
  out = capsys.readouterr().out
  assert 'Trained to step 6 of 6' in out
  assert ("'training_steps': 12" in out) == is_over
  run = pathlib.Path(config.checkpoint_dir)
  assert (run / 'checkpoints' / 'ended.json').exists() == is_over
  again = jaxline.fit(regression.Regression, config, mode=mode)
  assert ('eval/loss' in again.history) == (not is_over)
  assert jaxline.load_weights(run, step=6)


def test_a_notebook_shows_the_numbers_and_a_curve():
  losses = np.array([[1, 4.0], [2, np.nan], [3, 2.0], [5, 3.0]])
  history = {'train/loss': losses, 'eval/<b>&': np.array([[5, 0.25]])}
  result = jaxline.Result('/tmp/<script>', None, history, {'eval/<b>&': 0.25})
  page = xml.dom.minidom.parseString(f'<p>{result._repr_html_()}</p>')
  (text,) = page.getElementsByTagName('pre')
  assert 'Best eval/<b>&: 0.25\n' in text.firstChild.data
  (line,) = page.getElementsByTagName('polyline')
  assert line.getAttribute('points') == '0,0 240,120 480,60'
  assert '<svg' not in jaxline.Result('', None, {}, {})._repr_html_()
