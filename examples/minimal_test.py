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


@pytest.mark.process
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
