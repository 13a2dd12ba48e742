"""Tests of the minimal example."""

import math
import pathlib
import re
import runpy

import numpy as np
import pytest

from examples import minimal
import jaxline

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def files(tmp_path):
  """Returns a glob of four files."""
  for i in range(4):
    (tmp_path / f'{i}.txt').write_text('abcdefgh' * 40)
  return str(tmp_path / '*.txt')


def fit(cls, config, directory, **more):
  overrides = {
    'checkpoint_dir': str(directory),
    'training_steps': 6,
    'log_train_data_interval': 1,
    'eval_interval': 3,
    **more,
  }
  return jaxline.fit(cls, config, overrides)


def test_it_trains_evaluates_and_keeps_the_best(files, tmp_path):
  kwargs = {'files': files, 'length': 16}
  kwargs = {f'experiment_kwargs.config.{k}': x for k, x in kwargs.items()}
  result = fit(None, minimal.get_config(), tmp_path / 'run', **kwargs)
  bits = result.history['train/bits_per_byte'][:, 1]
  np.testing.assert_allclose(bits[0], math.log2(257), rtol=1e-6)
  steps, bits = result.history['eval/bits_per_byte'].T
  assert steps.tolist() == [3, 6]
  assert bits[1] < bits[0] < math.log2(257) - 1
  assert result.best == {'eval/bits_per_byte': bits[1]}
  assert (tmp_path / 'run' / 'checkpoints' / 'best' / '6.json').exists()


def test_the_readme_has_it_in_short(files, tmp_path):
  """Without types, config keys and names of axes, it has the same losses."""
  readme = (ROOT / 'README.md').read_text(encoding='utf-8')
  pattern = r'```python\n(# examples/first.py\n.+?)```'
  (code,) = re.findall(pattern, readme, re.S)
  default = f'files={minimal.Config().files!r}'
  assert default in code
  code = code.replace(default, f'files={files!r}')
  (tmp_path / 'yours.py').write_text(code)
  yours = runpy.run_path(str(tmp_path / 'yours.py'), run_name='yours')
  config, short = minimal.get_config(), yours['get_config']()
  assert short.experiment_class == 'yours:Experiment'
  assert short.training_steps == config.training_steps
  config.experiment_kwargs.config.files = files
  short = fit(yours['Experiment'], short, tmp_path / 'a')
  whole = fit(minimal.Experiment, config, tmp_path / 'b')
  for name in ('train/loss', 'eval/bits_per_byte'):
    np.testing.assert_array_equal(short.history[name], whole.history[name])
