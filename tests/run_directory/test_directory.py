"""Notes of evaluations and of the end; more in checkpoint/test_model.py."""

import pytest

from jaxline import errors
from jaxline.run_directory import store as store_lib
from tests import checkpoints as lib


def test_what_was_evaluated_is_noted_per_mode(open_run, tmp_path):
  training, evaluation = open_run(), open_run('eval')
  lib.save(training, lib.weights(1), 3, 5)
  log = str(tmp_path / 'run' / 'eval' / 'metrics.jsonl')
  for step, value in ((3, 0.5), (5, None)):
    lib.restore(evaluation, lib.weights(), step)
    lib.note(evaluation, step, value, {log: step})
  lib.note(training, 9, None, {})  # By train_and_eval: its mode is 'eval'.
  assert open_run('eval').directory.evaluated() == [
    (3, '', 0.5, lib.data_of(tmp_path / 'run', 3).name, {log: 3}),
    (5, '', None, lib.data_of(tmp_path / 'run', 5).name, {log: 5}),
    (9, '', None, '', {}),
  ]
  assert open_run('eval_other').directory.evaluated() == []
  note = tmp_path / 'run' / 'checkpoints' / 'evaluated' / 'eval.json'
  whole = note.read_text()
  for damage in ('[]', '{', '{"evaluated": 5}', whole.replace('9', '8')):
    note.write_text(damage)
    evaluated = open_run('eval').directory.evaluated
    for use in (evaluated, lambda: training.begin(9)):
      with pytest.raises(errors.UsageError, match=r'eval\.json'):
        use()
    assert note.read_text() == damage
  note.write_text(whole)
  training.begin(5)  # Evaluations of later steps will be repeated.
  assert [x.step for x in open_run('eval').directory.evaluated()] == [3, 5]
  note.unlink()
  assert open_run('eval').directory.evaluated() == []


def test_the_end_is_noted_and_taken_back(open_run, tmp_path):
  training, evaluation = open_run(), open_run('eval')
  assert evaluation.directory.ended() is None
  training.begin(0)
  training.directory.end(7)  # Also where nothing was saved.
  assert evaluation.directory.ended() == 7
  training.begin(7)
  assert evaluation.directory.ended() is None
  # The reason that an evaluation beside it has noted stays.
  evaluation.directory.end(8, 'enough')
  training.directory.end(9)
  with pytest.raises(errors.StopTraining, match='enough'):
    training.directory.stop_if_noted(9)
  (tmp_path / 'run' / 'checkpoints' / 'ended.json').write_text('{"st')
  with pytest.raises(store_lib.RefusedError, match=r'ended\.json'):
    evaluation.directory.ended()
