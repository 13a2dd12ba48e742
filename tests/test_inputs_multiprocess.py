"""Tests of inputs on several real processes: who reads what, and resumes."""

import importlib
import json
import shutil

import pytest

from jaxline.runs import explain
from jaxline.runs import replay
from tests import test_durable_multiprocess as multi

pytestmark = pytest.mark.process

SEEN = ('order', 'squares', 'number', 'rows')


def run(directory, processes, steps, **kwargs):
  return multi.run(
    directory,
    'fed',
    '--config.save_checkpoint_interval=3',
    processes=processes,
    steps=steps,
    **kwargs,
  )


def seen(directory, mode='train'):
  """Returns step -> what the records of that step's batch add up to."""
  rows = {}
  for line in (directory / mode / 'metrics.jsonl').read_text().splitlines():
    row = json.loads(line)
    if 'order' in row:
      rows[row['step']] = {name: row[name] for name in SEEN}
  return rows


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
  """A run of one process and twelve steps: three epochs and a half."""
  directory = tmp_path_factory.mktemp('fed') / 'straight'
  (result,) = run(directory, 1, 12)
  assert result.the('trained')['position'] == 144
  return directory


def test_each_epoch_has_each_record_once(straight):
  rows = seen(straight)
  assert list(rows) == list(range(1, 13))
  assert all(row['rows'] == 12 for row in rows.values())
  # 41 records: the first three batches, and five of the fourth.
  first = sum(rows[step]['squares'] for step in (1, 2, 3))
  assert 0 < sum(n * n for n in range(41)) - first < 5 * 40 * 40


@pytest.mark.timeout(300)
def test_any_number_of_processes_goes_on_with_the_same_rows(
  straight, tmp_path, monkeypatch
):
  directory = tmp_path / 'run'
  run(directory, 2, 3)
  for result in run(directory, 4, 6):
    assert result.the('restored')['position'] == 36
  monkeypatch.setenv('MULTI_WORKERS', '1')
  run(directory, 2, 9)
  monkeypatch.setenv('MULTI_WORKERS', '0')
  run(directory, 1, 12)
  assert seen(directory) == seen(straight)
  # A step of four processes is explained by one, which has all rows.
  monkeypatch.syspath_prepend(multi.PROGRAM.parent)
  experiment_class = importlib.import_module('multi').Fed
  with replay.opened(directory, 6, experiment_class) as found:
    rows = explain.explain(found, 6)
  numbers = [int(row.where.removeprefix('record ')) for row in rows]
  assert sum(n * n for n in numbers) == seen(straight)[6]['squares']


@pytest.mark.parametrize('processes', [1, 2, 4])
def test_an_evaluation_is_the_same_on_any_number(straight, processes, tmp_path):
  directory = shutil.copytree(straight, tmp_path / 'run')
  results = multi.run(
    directory,
    'fed',
    '--jaxline_mode=eval',
    '--config.one_off_evaluate=True',
    processes=processes,
    steps=12,
  )
  for result in results:
    evaluated = result.the('evaluated')
    assert evaluated['number'] == 20  # The mean of 0 to 40, each once.
    assert evaluated['rows'] == 41 / 4  # Four batches.
    assert evaluated['squares'] == sum(n * n for n in range(41)) / 4
