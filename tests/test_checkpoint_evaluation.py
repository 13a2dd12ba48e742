"""Tests of evaluation beside training, the best, notes, and failed saves."""

import errno
import math
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import errors
from jaxline.checkpoint import contents
from jaxline.checkpoint import inspection
from jaxline.checkpoint import manager
from jaxline.checkpoint import saving
from jaxline.storage import owner
from jaxline.storage import store as store_lib
from tests import checkpoints as lib

BEST = {'best_eval_metric_value': 9.0, 'best_model_eval_metric': ''}


def data(run) -> list[str]:
  return sorted(os.listdir(run / 'checkpoints' / 'data'))


# What is read beside a training that removes it.


@pytest.mark.parametrize('mode', ['eval', 'eval_decode'])
@pytest.mark.parametrize('series', ['latest', 'best'])
@pytest.mark.parametrize('when', ['manifest', 'parts'])
def test_what_goes_while_it_is_read(
  mode, series, when, open_run, tmp_path, monkeypatch, caplog
):
  keep = {'max_checkpoints_to_keep': 1, 'max_best_checkpoints_to_keep': 1}
  writing = open_run(**keep)
  lib.save(writing, lib.weights(0), 0)
  lib.save(writing, lib.weights(1), 1, series=series)
  reading = open_run(mode)
  reading.reads_only = mode == 'eval_decode'  # Then it leaves no mark.
  is_manifest = when == 'manifest'
  place = (manager.Manifests if is_manifest else contents.Checkpoint, 'read')
  original = getattr(*place)

  def late(self, *args):
    monkeypatch.setattr(*place, original)
    lib.save(writing, lib.weights(2), 2, series=series)  # Removes the first.
    return original(self, *args)

  monkeypatch.setattr(*place, late)
  live = lib.weights()
  state = lib.restore(reading, live, series=series)
  assert 'passed over' not in caplog.text  # It is gone, not damaged.
  is_marked = mode == 'eval' and (series, when) == ('latest', 'parts')
  want = 1 if is_marked else 2
  assert (state.global_step, live.held()['n']) == (want, want)
  # Where a step is asked for there is no other one for it.
  with pytest.raises(ValueError, match='no checkpoint of step 1'):
    lib.restore(reading, lib.weights(), 1, series=series)
  if is_marked:  # What was kept for the mark alone goes with it.
    lib.restore(reading, lib.weights(), 2)
    assert data(tmp_path / 'run') == [lib.data_of(tmp_path / 'run', 2).name]


# Following.


def test_each_checkpoint_is_evaluated_once(url, open_run):
  training, evaluation = (open_run(x, url) for x in ('train', 'eval'))
  training.mark_begun(0)
  restore_next, live = evaluation.follow('latest'), lib.weights()
  state, done = lib.fill(evaluation, live), []

  def follow():
    followed = []
    while restore_next(done):
      followed.append((state.global_step, live.held()['n']))
      done.append(state.global_step)
      evaluation.mark_evaluated(state.global_step, None, {})
    return followed

  assert follow() == []
  for n in (2, 4, 6):
    lib.save(training, lib.weights(n), n)
  assert follow() == [(2, 2), (4, 4), (6, 6)]
  assert follow() == []
  lib.save(training, lib.weights(8), 8)
  training.close()
  # One that was damaged, and a step that is made anew, have other data.
  again = open_run('train', url)
  lib.restore(again, lib.weights(), 4)
  again.mark_begun(4)
  lib.save(again, lib.weights(66), 6)
  assert follow() == [(6, 66)]
  again.mark_begun(4)  # At the same step.
  lib.save(again, lib.weights(77), 6)
  assert follow() == [(6, 77)]
  evaluation.close()
  # Another process goes on where this one ended.
  evaluation, done = open_run('eval', url), []
  restore_next, live = evaluation.follow('latest'), lib.weights()
  state = lib.fill(evaluation, live)
  assert follow() == []
  lib.save(again, lib.weights(7), 7)
  assert follow() == [(7, 7)]


# The best.


def test_the_best_names_the_same_data(copied, open_run, tmp_path):
  evaluation = open_run('eval')
  live = lib.Sharded('eval', seed=1)
  lib.restore(evaluation, live, key=None)
  extra = {
    'extra': {'plain': (1, 'a'), 'numpy': np.arange(3, dtype='i2')},
    'on_device': jnp.ones([2], jnp.bfloat16),
    'infinite': math.inf,
  }
  before = data(copied)
  lib.save_best(evaluation, live, 5, 0.5, key=None, **extra)
  assert data(copied) == before
  assert lib.data_of(copied, 5, 'best') == lib.data_of(copied)
  evaluation.close()
  # The next evaluation gets the value, the entries and their kinds.
  again = lib.Sharded('eval', seed=2)
  blank = dict.fromkeys(extra) | BEST
  state = lib.restore(open_run('eval'), again, series='best', key=None, **blank)
  assert (state.best_eval_metric_value, state.global_step) == (0.5, 5)
  for name, value in extra.items():
    lib.assert_same(state[name], value, name)
  # Training goes on from it, with its optimizer and its position.
  trained, want = lib.Sharded(seed=3), lib.Sharded()
  best = f'{copied}/checkpoints/best'
  other = open_run(directory=tmp_path / 'fork', restore_from=best)
  assert lib.restore(other, trained, key=jax.random.key(0)).global_step == 5
  lib.advance(want, 1)
  lib.assert_same(trained.snapshot_state(), want.snapshot_state())


def test_the_best_of_the_per_device_style(open_run, tmp_path, monkeypatch):
  training, run = open_run(), tmp_path / 'run'
  lib.save(training, lib.weights(3), 3)
  evaluation, live = open_run('eval'), lib.weights()
  lib.restore(evaluation, live)
  live._b0 = 4  # `evaluate` may change an attribute.
  write = manager.Manifests.write

  def late(self, series, manifest):
    # Its data is not named yet.
    training._manifests.collect(training._store.names('data'))
    write(self, series, manifest)

  monkeypatch.setattr(manager.Manifests, 'write', late)
  lib.save_best(evaluation, live, 3, 0.5)
  names = {lib.data_of(run, 3, series).name for series in ('latest', 'best')}
  assert set(data(run)) == names
  assert len(names) == 2
  lib.restore(open_run('eval_2'), live, series='best', **BEST)
  assert live.held()['n'] == 4
  lib.restore(open_run('eval_3'), live)
  assert live.held()['n'] == 3


def test_the_best_of_a_step_without_a_checkpoint(open_run, tmp_path):
  training, run = open_run(max_best_checkpoints_to_keep=1), tmp_path / 'run'
  for step in (0, 4):  # By train_and_eval.
    lib.save_best(training, lib.weights(step), step, float(step))
    lib.save(training, lib.weights(9), step + 3)
  assert training.steps('latest') == [3, 7]
  assert training.steps('best') == [4]
  lib.save_best(training, lib.weights(4), 4, 8.0)  # Made anew.
  live = lib.weights()
  state = lib.restore(open_run('eval'), live, series='best', **BEST)
  assert (live.held()['n'], state.best_eval_metric_value) == (4, 8.0)
  assert len(data(run)) == 3


def test_the_last_best_counts_of_whichever_step_it_is(
  open_run, tmp_path, monkeypatch
):
  lib.save(open_run(), lib.weights(1), 1, 2, 3, 4)
  evaluation = open_run('eval', max_best_checkpoints_to_keep=2)
  now = saving.time.time()
  for value, step in enumerate((3, 1, 4, 2)):
    # Each by a clock that was put back an hour.
    monkeypatch.setattr(saving.time, 'time', lambda v=value: now - 3600 * v)
    live = lib.weights()
    lib.restore(evaluation, live, step)
    lib.save_best(evaluation, live, step, float(value))
  assert evaluation.steps('best') == [2, 4]
  state = lib.restore(open_run('eval_2'), lib.weights(), series='best', **BEST)
  assert (state.global_step, state.best_eval_metric_value) == (2, 3.0)
  assert inspection.find(tmp_path / 'run/checkpoints/best').step == 2


def test_what_training_has_removed_replaces_no_best(copied, open_run):
  evaluation, live = open_run('eval'), lib.Sharded('eval')
  lib.restore(evaluation, live, 3, key=None)
  lib.save_best(evaluation, live, 3, 0.5)
  lib.restore(evaluation, live, 5, key=None)
  shutil.rmtree(lib.data_of(copied))  # As if no beat came through for 120 s.
  with pytest.raises(store_lib.DamagedError, match='latest/5'):
    lib.save_best(evaluation, live, 5, 0.7)
  assert evaluation.steps('best') == [3]


def test_the_best_of_another_training_of_this_process(open_run):
  checkpointer, live = open_run(), lib.weights(1)
  live.EVALUATION_IS_PURE = True
  checkpointer.begin_training(lib.PerDevice)
  lib.save(checkpointer, live, 5)
  checkpointer.begin_training(lib.Sharded)
  lib.save_best(checkpointer, live, 5, 0.5)
  assert (checkpointer.steps('latest'), checkpointer.steps('best')) == ([], [5])


def test_the_best_of_two_evaluations(open_run):
  lib.save(open_run(), lib.weights(1), 1)
  first, second = open_run('eval'), open_run('eval_more')
  for evaluation in (first, second):
    lib.restore(evaluation, lib.weights())
  lib.save_best(first, lib.weights(), 1, 0.5)
  for _ in range(2):  # It has not got it by asking.
    with pytest.raises(owner.ClaimedError, match='best_model_eval_metric'):
      lib.save_best(second, lib.weights(), 1, 0.7)
  first.close()
  lib.save_best(second, lib.weights(), 1, 0.7)


# Notes.


def test_what_was_evaluated_is_noted_per_mode(open_run, tmp_path):
  training, evaluation = open_run(), open_run('eval')
  assert evaluation.evaluated() == []
  lib.save(training, lib.weights(1), 3, 5, 9)
  log = str(tmp_path / 'run' / 'eval' / 'metrics.jsonl')
  for step, value in ((3, 0.5), (5, None)):
    lib.restore(evaluation, lib.weights(), step)
    evaluation.mark_evaluated(step, value, {log: step})
  noted = open_run('eval').evaluated()
  assert [x[:3] for x in noted] == [(3, '', 0.5), (5, '', None)]
  assert [x.lengths for x in noted] == [{log: 3}, {log: 5}]
  assert noted[0].data == lib.data_of(tmp_path / 'run', 3).name
  assert open_run('eval_other').evaluated() == []
  training.mark_begun(3)  # It was set back, or killed before a save.
  assert [x.step for x in evaluation.evaluated()] == [3]
  evaluation.mark_evaluated(5, None, {})
  training.mark_evaluated(9, None, {})  # By train_and_eval: its mode is 'eval'.
  assert [x.step for x in evaluation.evaluated()] == [3, 5, 9]
  note = tmp_path / 'run' / 'checkpoints' / 'evaluated' / 'eval.json'
  whole = note.read_text()
  for damage in ('[]', '{', '{"evaluated": 5}', whole.replace('9', '8')):
    note.write_text(damage)
    for use in (open_run('eval').evaluated, lambda: training.mark_begun(9)):
      with pytest.raises(errors.UsageError, match=r'eval\.json'):
        use()
    assert note.read_text() == damage
  note.unlink()
  assert open_run('eval').evaluated() == []


def test_the_end_is_noted_and_taken_back(open_run, tmp_path):
  training, evaluation = open_run(), open_run('eval')
  assert evaluation.ended() is None
  training.mark_begun(0)
  training.mark_ended(7)  # Also where nothing was saved.
  assert evaluation.ended() == 7
  training.mark_begun(7)
  assert evaluation.ended() is None
  (tmp_path / 'run' / 'checkpoints' / 'ended.json').write_text('{"st')
  with pytest.raises(store_lib.RefusedError, match=r'ended\.json'):
    evaluation.ended()


# Saves that fail.


@pytest.mark.parametrize('place', ['logs', 'arrays', 'manifest', 'retire'])
def test_a_failed_save_is_raised_and_loses_nothing(
  place, open_run, tmp_path, monkeypatch
):
  first = open_run()
  lib.save(first, lib.weights(1))

  def fails(*args, **kwargs):
    raise OSError(errno.ENOSPC, 'No space left on device')

  if place == 'logs':
    lib.at_flush(first, fails)
  else:
    monkeypatch.setattr(*{
      'arrays': (store_lib.Disk, 'write_part'),
      'manifest': (manager.Manifests, 'write'),
      'retire': (manager, 'removable'),
    }[place], fails)  # fmt: skip
  lib.fill(first, lib.weights(2), 6)
  first.save('latest')
  for attempt in (
    first.wait_for_checkpointing_to_finish, first.raise_error,
    lambda: first.save('latest'), first.wait_for_checkpointing_to_finish,
  ):  # fmt: skip
    with pytest.raises(OSError, match='No space left') as e:
      attempt()
    assert e.value.errno == errno.ENOSPC
  first.close()
  monkeypatch.undo()
  assert open_run('eval').steps('latest') == [5, 6][: 1 + (place == 'retire')]
  second, live = open_run(), lib.weights()
  state = lib.restore(second, live)
  assert state.global_step == 4 + live.held()['n']
  second.mark_begun(int(state.global_step))
  lib.save(second, lib.weights(3), 7)
  # What was left has gone.
  assert len(data(tmp_path / 'run')) == len(second.steps('latest'))


def test_an_error_that_nobody_saw_is_logged_at_the_end(open_run):
  checkpointer = open_run()
  lib.at_flush(checkpointer, lambda: 1 / 0)
  lib.fill(checkpointer, lib.weights(1))
  checkpointer.save('latest')
  checkpointer.close()
  assert len(checkpointer._writer._unraised) == 1
  checkpointer._writer._unraised.clear()


@pytest.mark.parametrize('url', ['gs', 's3'], indirect=True)
def test_who_was_taken_over_saves_nothing(url, open_run, monkeypatch):
  older = open_run(directory=url)
  lib.save(older, lib.weights(1), 3)
  monkeypatch.setattr(owner, '_claimed', {})  # As in another process.
  monkeypatch.setattr(owner, '_dead', {owner._NONCE})
  newer, live = open_run(directory=url), lib.weights()
  assert lib.restore(newer, live).global_step == 3
  with pytest.raises(owner.ClaimedError, match='taken over'):
    lib.save(older, lib.weights(9), 5)
  assert newer.steps('latest') == [3]
  lib.save(newer, lib.weights(2), 5)
  lib.restore(open_run('eval', url), live)
  assert live.held()['n'] == 2
