"""The losses of whole runs are those that were recorded: see golden/runs.py."""

import importlib.util
import json

import numpy as np
import pytest

from tests.golden import runs


@pytest.mark.process
@pytest.mark.timeout(400)
@pytest.mark.parametrize('name', runs.RUNS)
def test_a_golden_run(name, tmp_path):
  if importlib.util.find_spec(runs.RUNS[name].optional) is None:
    pytest.skip(f'{runs.RUNS[name].optional} is not installed')
  directory = tmp_path / name
  assert runs.start(name, str(directory), 'kill').returncode
  ended = runs.start(name, str(directory))
  assert ended.returncode == 0, ended.stdout + ended.stderr
  assert 'Restoring' in ended.stdout
  losses = runs.numbers(directory)
  expected = json.loads((runs.FOLDER / name / 'expected.json').read_text())
  assert losses.keys() == expected.keys() == {'train', 'eval'}
  for kind, want in expected.items():
    steps = {'train': [1, 2, 3, 4, 5, 6], 'eval': [3, 6]}[kind]
    assert [step for step, _ in losses[kind]] == steps
    np.testing.assert_allclose(losses[kind], want, rtol=0, atol=1e-5)
