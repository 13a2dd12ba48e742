"""Each evaluation is in the curve once, whenever its run is killed."""

import json
import shutil

import pytest

from tests import remains
from tests import toys

Process = toys.Process


@pytest.mark.parametrize('kind', ['steps', 'secs'])
def test_what_was_not_noted_is_evaluated_again(kind, tmp_path):
  process = Process(tmp_path, eval_interval_type=kind)
  noted = tmp_path / 'checkpoints' / 'evaluated' / 'eval.json'
  process.run(1)
  before = noted.read_bytes()
  process.run(2)
  noted.write_bytes(before)  # As if it was killed before the note.
  assert [process.run(2), process.run(2)] == [[2], []]


def test_a_damaged_best_one_does_not_keep_a_run_from_going_on(tmp_path):
  process = Process(
    tmp_path, best_model_eval_metric='before', max_best_checkpoints_to_keep=1
  )
  process.run(2)
  (tmp_path / 'checkpoints' / 'best' / '2.json').write_text('{')
  for steps in (3, 4):
    process.run(steps)
    assert remains.steps(tmp_path, 'best') == [steps]


@pytest.mark.parametrize(('forks', 'is_noted'), [(False, False), (True, True)])
def test_killed_between_the_first_evaluation_and_the_first_save(
  forks, is_noted, tmp_path
):
  values = {'eval_initial_weights': True}
  if forks:
    Process(tmp_path / 'other', 'train').run(4)
    values = {'restore_from': str(tmp_path / 'other')}
  process = Process(tmp_path / 'run', **values)
  first = 4 if forks else 0
  for _ in range(2):  # Nor if it happens again.
    process.run(6, dies_at=first)
    noted = tmp_path / 'run' / 'checkpoints' / 'evaluated' / 'eval.json'
    assert json.loads(noted.read_text())['evaluated'][0][0] == first
    assert remains.steps(tmp_path / 'run') == []
    assert process.curve() == [(first, 0)]
    if not is_noted:
      noted.unlink()
  process.run(6)
  expected = [(step, i) for i, step in enumerate(range(first, 7))]
  assert process.curve() == process.shown() == expected
  assert process.texts() == process.texts('train') == [(0, True)]


def test_killed_behind_the_save_before_the_first_step(tmp_path):
  process = Process(
    tmp_path,
    save_initial_train_checkpoint=True,
    eval_initial_weights=True,
    save_checkpoint_interval=3,
  )
  for dies_at in (0, 2):
    process.run(3, dies_at=dies_at)
    assert remains.steps(tmp_path) == [0]
    assert process.texts() == process.texts('train') == [(0, True)]
  process.run(3)
  assert [step for step, _ in process.curve()] == [0, 1, 2, 3]
  assert process.texts() == process.texts('train') == [(0, True)]


@pytest.mark.parametrize(('mode', 'rules', 'first'), [
  ('train_and_eval', (), 4), ('train_and_eval', [('w', 'w')], 0),
  ('eval', [('w', 'w')], 0),
])  # fmt: skip
def test_restored_weights_are_evaluated_before_the_first_step(
  mode, rules, first, tmp_path
):
  Process(tmp_path / 'other', 'train').run(4)
  values = {
    'restore_from': str(tmp_path / 'other'),
    'restore_rules': rules,
    'eval_initial_weights': True,
    'eval_interval': 5,
    'save_checkpoint_interval': 5,
  }
  found = Process(tmp_path / 'run', mode, **values).run(6)
  assert found == [first, 5, 6]


def test_a_run_that_begins_anew_has_none_of_the_old_log(tmp_path):
  for mode in ('train_and_eval', 'eval'):
    process = Process(tmp_path / mode, mode)
    process.run(3)
    shutil.rmtree(tmp_path / mode / 'checkpoints')
    assert process.run(2) == [1, 2]
    assert process.curve() == [(1, 0), (2, 1)]
    assert process.texts() == [(0, True)]
