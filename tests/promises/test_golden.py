"""The losses of whole runs are those that were recorded: see golden/runs.py."""

import importlib.util
import json
import sys

import numpy as np
import pytest

from jaxline import platform
from tests import processes
from tests import remains
from tests import toys
from tests.golden import runs


def train(name, directory, dies_at=None):
  """Trains a run in this process; returns the steps that it took."""
  config = platform.load_config(runs.flags(name, directory))
  cls, taken = platform.resolve_experiment_class(config), []

  class Golden(cls):
    def step(self, *, global_step, **kwargs):
      taken.append(int(np.ravel(global_step)[0]))
      if taken[-1] == dies_at:
        raise toys.Killed
      return super().step(global_step=global_step, **kwargs)

  platform.start(Golden, config, 'train_and_eval')
  return taken


@pytest.mark.process
@pytest.mark.parametrize('name', runs.RUNS)
def test_a_golden_run(name, tmp_path, monkeypatch):
  if importlib.util.find_spec(runs.RUNS[name].optional) is None:
    pytest.skip(f'{runs.RUNS[name].optional} is not installed')
  monkeypatch.chdir(processes.ROOT)
  directory = tmp_path / name
  if (count := runs.RUNS[name].processes) > 1:
    ended = processes.run(
      *('-m', 'jaxline.launch', '--processes', count),
      *('--devices-per-process', 2 // count, '--', sys.executable),
      *('experiment.py', '--jaxline_mode=train_and_eval'),
      *runs.flags(name, directory),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
  else:
    with pytest.raises(toys.Killed):
      train(name, directory, dies_at=5)
    assert remains.steps(directory) == [runs.SAVED]
    assert train(name, directory) == [3, 4, 5]
  losses = runs.numbers(directory)
  expected = json.loads((runs.FOLDER / name / 'expected.json').read_text())
  assert losses.keys() == expected.keys() == {'train', 'eval'}
  for kind, want in expected.items():
    steps = {'train': [1, 2, 3, 4, 5, 6], 'eval': [3, 6]}[kind]
    assert [step for step, _ in losses[kind]] == steps
    np.testing.assert_allclose(losses[kind], want, rtol=0, atol=1e-5)
