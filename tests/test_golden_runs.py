"""Runs that an earlier version began are resumed: see golden/runs.py."""

import importlib.util
import json
import shutil

from golden import runs
import numpy as np
import pytest


@pytest.mark.process
@pytest.mark.parametrize('name', runs.RUNS)
def test_a_golden_run_goes_on(name, tmp_path):
  if importlib.util.find_spec(runs.RUNS[name].optional) is None:
    pytest.skip(f'{runs.RUNS[name].optional} is not installed')
  directory = tmp_path / name
  shutil.copytree(runs.FOLDER / name, directory)
  expected = json.loads((directory / 'expected.json').read_text())
  ended = runs.start(name, str(directory))
  assert ended.returncode == 0, ended.stdout + ended.stderr
  # Every array, key and position, as it was when the checkpoint was written.
  assert runs.states(directory, 'begun') == expected['states']
  losses = runs.numbers(directory)
  assert losses.keys() == expected['numbers'].keys() == {'train', 'eval'}
  for kind, want in expected['numbers'].items():
    steps = {'train': [1, 2, 3, 4, 5, 6], 'eval': [3, 6]}[kind]
    assert [step for step, _ in losses[kind]] == steps
    np.testing.assert_allclose(losses[kind], want, rtol=0, atol=1e-5)
