"""A run that ends before its last step ends at the same step after any kill.

By early stopping, by StopTraining, and by the seconds of training; in one
process and in several.
"""

import contextlib
import json
import math
import types

import pytest

import jaxline
from jaxline import base_config
from jaxline import experiment
from jaxline.checkpoint import protocol
from jaxline.run_directory import notes
from jaxline.supervision import budget
from tests import remains
from tests import several
from tests import toys
from tests.experiments import regression

TARGET = {'target': 2.69}
PATIENCE = {'patience': 2}


# Values of the steps 1, 2, ...; what the reason names, or None.
@pytest.mark.parametrize(
  ('early_stop', 'higher', 'values', 'named'),
  [
    (PATIENCE, False, [5, 4, 4], None),
    (PATIENCE, False, [5, 4, 4, 4], 'patience'),
    (PATIENCE | {'min_delta': 1.0}, False, [5, 4.5, 3.5, 3], None),
    (PATIENCE | {'min_delta': 1.0}, False, [5, 4.5, 4], 'patience'),
    (PATIENCE, True, [1, math.nan, math.nan], 'patience'),
    (PATIENCE, True, [math.nan, 1], None),
    (TARGET, False, [5, 2.7], None),
    (TARGET, False, [5, 2.69, 7], 'target'),  # As a resumed run sees it.
    (TARGET, True, [2.6], None),
    (TARGET, True, [2.7], 'target'),
    (TARGET, False, [math.nan], None),
  ],
)
def test_when_a_run_stops_early(early_stop, higher, values, named):
  config = base_config.get_base_config()
  config.best_model_eval_metric_higher_is_better = higher
  config.early_stop = early_stop
  own = [notes.EvaluationNote(i + 1, '', x) for i, x in enumerate(values)]
  other = notes.EvaluationNote(0, 'of another', 9.0 if higher else -9.0)
  raised = pytest.raises(experiment.StopTraining, match=f'early_stop.{named}')
  with raised if named else contextlib.nullcontext():
    notes.check_early_stopping(config, [other, *own])


def noted(run_dir):
  return json.loads((run_dir / 'checkpoints' / 'ended.json').read_text())


@pytest.mark.parametrize(
  ('dies_at', 'every'), [(None, 1), (1, 1), (2, 3), (3, 1), (6, 9)]
)
def test_a_killed_run_stops_at_the_same_step(dies_at, every, tmp_path):
  """The metric grows by 1 with each evaluation, where lower is better."""
  process = toys.Process(
    tmp_path,
    save_checkpoint_interval=every,
    best_model_eval_metric_higher_is_better=False,
    early_stop={'patience': 3, 'metric': 'before'},
  )
  if dies_at is not None:
    process.run(9, dies_at, early_stop={'patience': 9, 'metric': 'before'})
  process.run(9)
  assert noted(tmp_path) == {'step': 4, 'why': ''}
  assert remains.newest(tmp_path) == 4
  assert process.curve() == [(1, 0), (2, 1), (3, 2), (4, 3)]
  assert process.run(9) == []  # It stays ended,
  early_stop = {'patience': 5, 'metric': 'before'}
  assert process.run(9, early_stop=early_stop) == [5, 6]  # until this changes.


@pytest.fixture
def clock(monkeypatch):
  """Counts how often it is asked: a second each time."""
  fake = types.SimpleNamespace(secs=0.0, compiled=0.0)

  def now():
    fake.secs += 1
    return fake.secs

  monkeypatch.setattr(budget, '_clock', now)
  monkeypatch.setattr(
    'jaxline.base.goodput.compiled_secs', lambda: fake.compiled
  )
  return fake


@pytest.mark.parametrize(('dies_at', 'every'), [(None, 1), (0, 1), (3, 3)])
def test_a_killed_run_ends_after_the_same_seconds(
  dies_at, every, tmp_path, clock
):
  """Each step takes a second."""
  process = toys.Process(
    tmp_path, 'train', save_checkpoint_interval=every, max_seconds=4
  )
  if dies_at is not None:
    process.run(9, dies_at=dies_at)
  for seconds, end in ((4, 4), (4, 4), (6, 6), (None, 9), (1, 9)):
    process.run(9, max_seconds=seconds)
    assert noted(tmp_path) == {'step': end, 'why': ''}
    assert remains.newest(tmp_path) == end


def test_the_seconds_of_training(clock):
  state = protocol.ExperimentState()
  seconds = budget.Budget(100.0, state)
  seconds.update_time(0.0, 0)
  clock.secs, clock.compiled = clock.secs + 9, 7.0
  seconds(0.0, 1, {})
  assert state.trained_secs == 3  # 7 of 10 seconds compiled.
  clock.secs, clock.compiled = clock.secs + 9, 12.0
  seconds.skip_time(10.0)  # An evaluation, which has compiled as well.
  seconds(0.0, 2, {})
  assert state.trained_secs == 4


class Stops(regression.Regression):
  """Raises at a step, before it or behind its update, or in an evaluation."""

  place, at = 'before', 4

  def step(self, *, global_step, **kwargs):
    self._reach('before', global_step)
    scalars = super().step(global_step=global_step, **kwargs)
    self._reach('behind', global_step + 1)
    return scalars

  def evaluate(self, *, global_step, **kwargs):
    self._reach('evaluate', global_step)
    return super().evaluate(global_step=global_step, **kwargs)

  def _reach(self, place, step):
    if (place, step) == (self.place, self.at):
      raise experiment.StopTraining('enough')


@pytest.mark.parametrize('place', ['before', 'behind', 'evaluate'])
def test_stop_training_ends_a_fit(place, tmp_path, capfd):
  config = regression.get_config(9)
  config.checkpoint_dir = str(tmp_path)
  config.eval_interval = 2
  config.console = 'plain'
  cls = type('Stops', (Stops,), {'place': place})
  result = jaxline.fit(cls, config)
  assert noted(tmp_path) == {'step': 4, 'why': 'enough'}
  assert int(result.experiment.state.step) == 4
  assert remains.newest(tmp_path) == 4
  evaluated = result.history['eval/loss'][:, 0].tolist()
  assert evaluated == ([2] if place == 'evaluate' else [2, 4])
  assert 'Reason: enough' in capfd.readouterr().out
  # It stays ended until its note is removed.
  cls.place = ''
  for _ in range(2):
    result = jaxline.fit(cls, config)
    assert int(result.experiment.state.step) == 4
  assert 'ended.json' in capfd.readouterr().out
  (tmp_path / 'checkpoints' / 'ended.json').unlink()
  result = jaxline.fit(cls, config)
  assert int(result.experiment.state.step) == 9


@pytest.mark.process
def test_two_processes_stop_together(tmp_path):
  directory = tmp_path / 'run'
  args = directory, 'sharded', '--jaxline_mode=train_and_eval'
  several.run(*args, fault='0:step:5:end,1:step:5:end')
  assert noted(directory) == {'step': 5, 'why': 'enough'}
  assert remains.steps(directory)[-1] == 5
  assert sorted(several.logged(directory, 'eval')) == [2, 4, 5]
  several.run(*args)
  assert remains.steps(directory)[-1] == 5


@pytest.mark.process
def test_two_processes_heed_the_evaluation_beside_them(tmp_path):
  """Only process 0 reads its note; both end at a save."""
  directory, keep = tmp_path / 'run', '--config.max_checkpoints_to_keep=1000'
  trainers = several.Run(
    directory, 'sharded', keep, step_secs=0.1, steps=100000
  )
  try:
    results = several.run(
      *(directory, 'sharded', keep, '--jaxline_mode=eval'),
      fault='0:evaluate:6:end,1:evaluate:6:end',
      steps=100000,
    )
    results += trainers.wait()
  finally:
    trainers.kill()
  assert [r.code for r in results] == [0] * 4
  last = remains.steps(directory)[-1]
  assert noted(directory) == {'step': last, 'why': 'enough'}
  assert last % 2 == 0
  assert [*several.logged(directory, 'eval')] == [2, 4]
