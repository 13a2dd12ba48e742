"""Evaluations beside training: what they read and save; saves that fail."""

import errno
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest

from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.checkpoint import inspection
from jaxline.checkpoint import manifests as manifests_lib
from jaxline.checkpoint import saving
from jaxline.run_directory import owner
from jaxline.run_directory import store as store_lib
from tests import checkpoints as lib

BEST = {'best_eval_metric_value': 9.0, 'best_model_eval_metric': ''}


def data(run) -> list[str]:
  return sorted(os.listdir(run / 'checkpoints' / 'data'))


# What is read beside a training that removes it.


@pytest.mark.parametrize(
  ('mode', 'series', 'want'),
  [('eval', 'latest', 1), ('eval_decode', 'latest', 2), ('eval', 'best', 2)],
)
def test_what_goes_while_it_is_read(
  mode, series, want, open_run, tmp_path, monkeypatch, caplog
):
  keep = {'max_checkpoints_to_keep': 1, 'max_best_checkpoints_to_keep': 1}
  writing = open_run(**keep)
  lib.save(writing, lib.weights(0), 0)
  lib.save(writing, lib.weights(1), 1, series=series)
  reading = open_run(mode)
  # Then it leaves no mark, which would keep the data of `latest`.
  reading.directory.reads_only = mode == 'eval_decode'
  read = contents.Checkpoint.read

  def late(self, *args):
    monkeypatch.setattr(contents.Checkpoint, 'read', read)
    lib.save(writing, lib.weights(2), 2, series=series)  # Removes the first.
    return read(self, *args)

  monkeypatch.setattr(contents.Checkpoint, 'read', late)
  live = lib.weights()
  state = lib.restore(reading, live, series=series)
  assert 'Trying an earlier one' not in caplog.text  # It is gone, not damaged.
  assert (state.global_step, live.held()['n']) == (want, want)
  # Where a step is asked for there is no other one for it.
  with pytest.raises(ValueError, match='no checkpoint of step 1'):
    lib.restore(reading, lib.weights(), 1, series=series)
  if want == 1:  # What was kept for the mark alone goes with it.
    lib.restore(reading, lib.weights(), 2)
    assert data(tmp_path / 'run') == [lib.data_of(tmp_path / 'run', 2).name]


def test_the_best_names_the_same_data(copied, open_run):
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
  again, blank = lib.Sharded('eval', seed=2), dict.fromkeys(extra) | BEST
  state = lib.restore(open_run('eval'), again, series='best', key=None, **blank)
  assert (state.best_eval_metric_value, state.global_step) == (0.5, 5)
  for name, value in extra.items():
    lib.assert_same(state[name], value, name)


def test_the_best_of_the_per_device_style(open_run, tmp_path, monkeypatch):
  training, run = open_run(), tmp_path / 'run'
  lib.save(training, lib.weights(3), 3)
  evaluation, live = open_run('eval'), lib.weights()
  lib.restore(evaluation, live)
  live._b0 = 4  # `evaluate` may change an attribute.
  write = arrays.write

  def late(*args):
    found = write(*args)
    # Nothing names the data yet, but for the evaluation's mark.
    training._manifests.collect_garbage(data(run))
    return found

  monkeypatch.setattr(arrays, 'write', late)
  lib.save_best(evaluation, live, 3, 0.5)
  names = {lib.data_of(run, 3, series).name for series in ('latest', 'best')}
  assert set(data(run)) == names
  assert len(names) == 2
  lib.restore(open_run('eval_2'), live, series='best', **BEST)
  assert live.held()['n'] == 4


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


@pytest.mark.parametrize('place', ['arrays', 'manifest', 'retire'])
def test_a_failed_save_is_raised_and_loses_nothing(
  place, open_run, tmp_path, monkeypatch
):
  first = open_run()
  lib.save(first, lib.weights(1))

  def fails(*args, **kwargs):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(*{
    'arrays': (store_lib.Disk, 'write_part'),
    'manifest': (manifests_lib.Manifests, 'write'),
    'retire': (manifests_lib, 'steps_to_delete'),
  }[place], fails)  # fmt: skip
  lib.fill(first, lib.weights(2), 6)
  first.save('latest')
  for attempt in (
    first.wait_for_checkpointing_to_finish, first.directory.raise_error,
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
  second.begin(int(state.global_step))
  lib.save(second, lib.weights(3), 7)
  # What was left has gone.
  assert len(data(tmp_path / 'run')) == len(second.steps('latest'))


@pytest.mark.parametrize('url', ['gs'], indirect=True)
def test_who_was_taken_over_saves_nothing(url, open_run, monkeypatch):
  older = open_run(directory=url)
  lib.save(older, lib.weights(1), 3)
  monkeypatch.setattr(owner, '_claimed', {})  # As in another process.
  monkeypatch.setattr(owner, '_dead', {older.directory.claims['latest']._nonce})
  newer, live = open_run(directory=url), lib.weights()
  assert lib.restore(newer, live).global_step == 3
  with pytest.raises(owner.LostClaimError, match='taken over'):
    lib.save(older, lib.weights(9), 5)
  assert newer.steps('latest') == [3]
  lib.save(newer, lib.weights(2), 5)
  lib.restore(open_run('eval', url), live)
  assert live.held()['n'] == 2
