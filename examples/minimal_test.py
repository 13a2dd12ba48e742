"""Tests of the minimal example."""

import math
import pathlib

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


def test_the_readme_shows_its_methods():
  source = (ROOT / 'examples' / 'minimal.py').read_text(encoding='utf-8')
  readme = (ROOT / 'README.md').read_text(encoding='utf-8')
  header = 'class Experiment(sharded.ShardedExperiment):'
  assert header in source
  begin = source.index('  def init_fn(')
  end = source.index('\n\n  def read(')
  assert f'```python\n{header}\n{source[begin:end]}\n```' in readme
