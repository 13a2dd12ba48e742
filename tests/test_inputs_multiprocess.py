"""Tests of inputs on several real processes: who reads what, and resumes."""

import importlib

import pytest

from jaxline.runs import explain
from jaxline.runs import replay
from tests import remains
from tests import several

pytestmark = pytest.mark.process

SEEN = ('order', 'squares')


def run(directory, processes, steps):
  return several.run(
    directory,
    'fed',
    '--config.save_checkpoint_interval=3',
    processes=processes,
    steps=steps,
  )


def seen(directory):
  """Returns step -> what the records of that step's batch add up to."""
  return {
    row['step']: {name: row[name] for name in SEEN}
    for row in remains.curve(directory, 'train')
    if 'order' in row
  }


@pytest.mark.timeout(300)
def test_any_number_of_processes_goes_on_with_the_same_rows(
  tmp_path, monkeypatch
):
  directory, straight = tmp_path / 'run', tmp_path / 'straight'
  run(straight, 1, 12)  # Three epochs and a half.
  run(directory, 2, 3)
  for result in run(directory, 4, 6):
    assert result.the('restored')['position'] == 36
  monkeypatch.setenv('MULTI_WORKERS', '1')
  run(directory, 2, 9)
  monkeypatch.setenv('MULTI_WORKERS', '0')
  run(directory, 1, 12)
  assert seen(directory) == seen(straight)
  # A step of four processes is explained by one, which has all rows.
  monkeypatch.syspath_prepend(several.PROGRAM.parent)
  experiment_class = importlib.import_module('multi').Fed
  with replay.open_replay(directory, 6, experiment_class) as found:
    rows = explain.explain(found, 6)
  numbers = [int(row.where.removeprefix('record ')) for row in rows]
  assert sum(n * n for n in numbers) == seen(straight)[6]['squares']
