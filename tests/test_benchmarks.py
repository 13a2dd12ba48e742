"""What the benchmarks share, and the page that is made of their results."""

import json
import subprocess
import sys

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import harness
from benchmarks import lm_recipe

ROOT = harness.ROOT
Sample = harness.Sample


def samples(*walls):
  return [Sample(wall, 2 * wall) for wall in walls]


@pytest.mark.parametrize(
  ('ours', 'theirs', 'options', 'value', 'met'),
  [
    # Each round is twice as slow as the one before, for both sides.
    ((1, 2, 4), (2, 4, 8), {'aim': '>= 0.6'}, [0.5] * 3, False),
    ((3,), (1,), {'measure': 'difference', 'aim': '<= 2'}, [2.0] * 3, True),
    ((1,), (2,), {'aim': '>= 0.5', 'judged': 'cpu'}, [0.5] * 3, True),
  ],
)
def test_a_row(ours, theirs, options, value, met):
  row = harness.row(
    'ours', samples(*ours), 'theirs', samples(*theirs), unit='s', **options
  )
  assert row['value']['wall'] == value
  assert row['met'] is met


def test_functions_run_in_processes_of_their_own():
  assert harness.call('operator', 'add', 1, 2) == 3
  with pytest.raises(RuntimeError, match='ZeroDivisionError'):
    harness.call('operator', 'truediv', 1, 0)


def newest_run():
  files = sorted((ROOT / 'benchmarks' / 'results').glob('*.json'))
  return json.loads(files[-1].read_text(encoding='utf-8'))


def test_the_page_is_that_of_the_newest_run():
  text = benchmarks.PAGE.read_text(encoding='utf-8')
  by_hand = benchmarks._BY_HAND + text.partition(benchmarks._BY_HAND)[2]
  assert text == benchmarks.page(newest_run(), by_hand), (
    'Run python -m benchmarks --page FILE with the newest file of'
    ' benchmarks/results.'
  )


def test_each_program_is_run_or_said_not_to_be():
  rest = {'__init__', '__main__', 'harness', 'hand_tuned'}
  # These have another input or output than a table of rows.
  rest |= {'lm_recipe', 'mfu', 'scale', 'text'}
  found = {path.stem for path in (ROOT / 'benchmarks').glob('*.py')}
  assert found - rest == set(benchmarks.PROGRAMS)


def test_the_page_of_the_recipe_has_the_kept_results():
  rows = json.loads(lm_recipe.RESULTS.read_text(encoding='utf-8'))['rows']
  assert [len(runs) for runs in rows.values()] == [3] * len(lm_recipe.ROWS)
  page = ROOT / 'docs' / 'reference' / 'lm_recipe.md'
  assert lm_recipe.table(rows) in page.read_text(encoding='utf-8')


# Their trials take a minute of both cores.
_LONG = 'checkpoint', 'lm_step', 'loop', 'program', 'start'


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  'name',
  [
    pytest.param(
      name, marks=pytest.mark.slow if name in _LONG else pytest.mark.process
    )
    for name in benchmarks.PROGRAMS
  ],
)
def test_a_trial(name, tmp_path, monkeypatch):
  monkeypatch.delenv('XLA_FLAGS')  # The devices of a user, not of the tests.
  command = [sys.executable, '-m', 'benchmarks', '--quick', '--only', name]
  subprocess.run([*command, '--out', tmp_path], cwd=ROOT, check=True)
  (file,) = tmp_path.glob('*.json')
  assert json.loads(file.read_text())['programs'][name]['rows']


@pytest.mark.slow
def test_a_trial_of_the_plan_for_a_card(tmp_path, monkeypatch):
  monkeypatch.delenv('XLA_FLAGS')  # One device.
  values = {
    'model.num_layers': 1,
    'model.embed_dim': 16,
    'model.num_heads': 2,
    'model.mlp_dim': 16,
    'model.max_length': 32,
    'length': 32,
    'eval_batch_size': 2,
    'sample_length': 0,
    'decode.max_decode_steps': 8,
  }
  overrides = [
    f'--config.experiment_kwargs.config.{key}={value}'
    for key, value in values.items()
  ]
  out, options = tmp_path / 'rows.jsonl', ['--steps=1', '--matmul=128']
  command = [sys.executable, '-m', 'benchmarks.mfu', '--plan', f'--out={out}']
  command += [*options, '--config=configs/lm.py', *overrides]
  variants = ['as_is', 'unrolled_hides_latency', 'unrolled_no_commands']
  command.append(f'--variants={",".join(variants)}')
  subprocess.run(command, cwd=ROOT, check=True)
  rows = {x['name']: x for x in map(json.loads, out.read_text().splitlines())}
  decoded = [f'decode_{batch}' for batch in (1, 16, 128)]
  assert [*rows] == ['machine', 'as_is', *decoded, 'save', *variants[1:]]
  assert not any('failed' in row for row in rows.values()), rows
  assert rows['as_is']['tokens_per_sec'] > 0
