"""The page of the benchmarks is that of their results, and each one runs."""

import json
import subprocess
import sys

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import harness
from benchmarks import lm_recipe

ROOT = harness.ROOT


def test_the_page_is_that_of_the_newest_run():
  newest = max((ROOT / 'benchmarks' / 'results').glob('*.json'))
  found = json.loads(newest.read_text(encoding='utf-8'))
  text = benchmarks.PAGE.read_text(encoding='utf-8')
  by_hand = benchmarks._BY_HAND + text.partition(benchmarks._BY_HAND)[2]
  assert text == benchmarks.page(found, by_hand), (
    'Run python -m benchmarks --page FILE with the newest file of'
    ' benchmarks/results.'
  )


def test_the_page_of_the_recipe_has_the_kept_results():
  rows = json.loads(lm_recipe.RESULTS.read_text(encoding='utf-8'))['rows']
  page = ROOT / 'docs' / 'reference' / 'lm_recipe.md'
  assert lm_recipe.table(rows) in page.read_text(encoding='utf-8')


def test_each_program_is_run_or_said_not_to_be():
  rest = {'__init__', '__main__', 'harness', 'hand_tuned'}
  # These have another input or output than a table of rows.
  rest |= {'lm_recipe', 'mfu', 'scale', 'text'}
  found = {path.stem for path in (ROOT / 'benchmarks').glob('*.py')}
  assert found - rest == set(benchmarks.PROGRAMS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize('name', benchmarks.PROGRAMS)
def test_a_trial(name, tmp_path, monkeypatch):
  monkeypatch.delenv('XLA_FLAGS')  # The devices of a user, not of the tests.
  command = [sys.executable, '-m', 'benchmarks', '--quick', '--only', name]
  subprocess.run([*command, '--out', tmp_path], cwd=ROOT, check=True)
  (file,) = tmp_path.glob('*.json')
  assert json.loads(file.read_text())['programs'][name]['rows']
