"""Tests of the minimal example."""

import math
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np

from examples import minimal
import jaxline
from jaxline.parallel import partitioning

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_it_trains_evaluates_and_keeps_the_best(tmp_path):
  for i in range(4):
    (tmp_path / f'{i}.txt').write_text('abcdefgh' * 40)
  overrides = {
    'checkpoint_dir': str(tmp_path / 'run'),
    'training_steps': 6,
    'log_train_data_interval': 1,
    'eval_interval': 3,
    'experiment_kwargs.config.files': str(tmp_path / '*.txt'),
    'experiment_kwargs.config.length': 16,
  }
  result = jaxline.fit(None, minimal.get_config(), overrides)
  bits = result.history['train/bits_per_byte'][:, 1]
  np.testing.assert_allclose(bits[0], math.log2(257), rtol=1e-6)
  steps, bits = result.history['eval/bits_per_byte'].T
  assert steps.tolist() == [3, 6]
  assert bits[1] < bits[0] < math.log2(257) - 1
  assert result.best == {'eval/bits_per_byte': bits[1]}
  assert (tmp_path / 'run' / 'checkpoints' / 'best' / '6.json').exists()


def test_a_byte_is_predicted_from_the_eight_before_it():
  rng = jax.random.PRNGKey(0)
  config = {'context': 8, 'hidden': 4}
  experiment = minimal.Experiment('train', rng, config)
  params, _ = partitioning.unbox(experiment.init_fn(rng))
  params['out'] = jax.random.normal(rng, params['out'].shape)
  ids = np.arange(1, 17, dtype=np.int32)[None]
  weights = np.zeros([1, 16], np.float32)
  weights[0, 11] = 1

  def loss(ids):
    batch = {'ids': jnp.array(ids), 'labels': ids * 0, 'weights': weights}
    return float(experiment.loss_fn(params, {}, batch, rng, True)[0])

  changed = []
  for i in range(16):
    other = ids.copy()
    other[0, i] = 200
    if loss(other) != loss(ids):
      changed.append(i)
  assert changed == list(range(4, 12))


def test_the_readme_has_it_in_short(tmp_path):
  """Without types, config keys and names of axes, it has the same losses."""
  readme = (ROOT / 'README.md').read_text(encoding='utf-8')
  pattern = r'```python\n(# examples/first.py\n.+?)```'
  (code,) = re.findall(pattern, readme, re.S)
  (tmp_path / 'yours.py').write_text(code)
  yours = runpy.run_path(str(tmp_path / 'yours.py'), run_name='yours')
  configs = yours['get_config'](), minimal.get_config()
  assert configs[0].experiment_class == 'yours:Experiment'
  assert configs[0].training_steps == configs[1].training_steps
  classes = yours['Experiment'], minimal.Experiment
  overrides = {'training_steps': 3, 'log_train_data_interval': 1}
  short, whole = (
    jaxline.fit(cls, config, overrides | {'checkpoint_dir': str(tmp_path / x)})
    for x, cls, config in zip('ab', classes, configs, strict=True)
  )
  for name in ('train/loss', 'eval/bits_per_byte'):
    np.testing.assert_array_equal(short.history[name], whole.history[name])
