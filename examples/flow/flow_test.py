"""Tests of flow matching on digits."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from configs import flow
import jaxline


def fit(directory):
  overrides = {
    'checkpoint_dir': str(directory),
    'training_steps': 40,
    'max_checkpoints_to_keep': 2,
    'log_train_data_interval': 1,
    'eval_interval': 20,
    'save_checkpoint_interval': 20,
    'experiment_kwargs.config.hidden': 32,
    'experiment_kwargs.config.ema_decay': 0.9,
  }
  return jaxline.fit(None, flow.get_config(), overrides)


def test_it_learns_draws_and_resumes_exactly(tmp_path):
  pytest.importorskip('sklearn')
  straight = fit(tmp_path / 'straight')
  shutil.copytree(tmp_path / 'straight', tmp_path / 'resumed')
  (tmp_path / 'resumed/checkpoints/latest/40.json').unlink()
  resumed = fit(tmp_path / 'resumed').experiment.state
  state = straight.experiment.state
  jax.tree.map(np.testing.assert_array_equal, resumed, state)

  inputs = straight.experiment.train_input(), straight.experiment.eval_input()
  assert [x.num_records() for x in inputs] == [1797 - 256, 256]
  steps, losses = straight.history['eval/loss'].T
  assert steps.tolist() == [20, 40]
  assert losses[1] < losses[0] < straight.history['train/loss'][0, 1]
  # The keys of an evaluation are fixed, and its weights the averaged ones.
  assert jaxline.evaluate(straight.directory)['loss'] == losses[1]
  log = pathlib.Path(straight.directory, 'eval', 'metrics.jsonl').read_text()
  records = [json.loads(line) for line in log.splitlines()]
  pictures = [x['samples'] for x in records if 'samples' in x]
  assert pictures == [[1, 320, 320, 1]] * 2
