"""Programs written against JAXline look at checkpoints in its dictionary."""

import copy
import pickle
import threading

import numpy as np
import pytest

from jaxline import utils
from jaxline.compat import checkpointers
from tests import checkpoints as lib


def newest():
  """Returns what such programs look at."""
  return utils.GLOBAL_CHECKPOINT_DICT['latest'].history[-1]


def test_the_newest_save_is_read_when_it_is_looked_at(open_run):
  checkpointer = open_run(mirrors=True, max_checkpoints_to_keep=1)
  lib.fill(checkpointer, lib.weights(1))
  assert utils.GLOBAL_CHECKPOINT_DICT['latest'].history == []
  live = lib.weights(1)
  lib.save(checkpointer, live, 5, extra={'a': np.ones(2)})
  first = newest()
  assert 'pickle_nest' not in vars(first)
  live._a0, live._b0 = lib.rows({'other': np.zeros(1)}), 9
  nest = first.pickle_nest
  assert nest.global_step == 5
  assert nest.experiment_module.n == 1
  lib.assert_same(nest.to_dict()['experiment_module'], {
    'w': np.full([3], 1, np.float32), 'n': 1})  # fmt: skip
  lib.assert_same(nest['extra'].to_dict(), {'a': np.ones(2)})
  np.testing.assert_array_equal(
    nest['experiment_module']._a0, [np.full([3], 1, np.float32)]
  )
  number, unpacked = first
  assert number == first.id == 5
  assert unpacked is first.pickle_nest is nest
  lib.save(checkpointer, lib.weights(6), 6)
  assert newest().pickle_nest.global_step == 6
  assert first.pickle_nest.global_step == 5  # It keeps what it has read.
  assert len(utils.GLOBAL_CHECKPOINT_DICT['latest'].history) == 1


def test_a_save_is_there_once_it_is_written(open_run):
  checkpointer, gate = open_run(mirrors=True), threading.Event()
  lib.save(checkpointer, lib.weights(1), 1)
  checkpointer.directory.thread.submit(gate.wait, 10)
  lib.fill(checkpointer, lib.weights(2), 2)
  checkpointer.save('latest')
  assert newest().id == 1
  gate.set()
  checkpointer.wait_for_checkpointing_to_finish()
  assert newest().id == 2
  lib.at_flush(checkpointer, lambda: 1 / 0)  # It is never written.
  with pytest.raises(ZeroDivisionError):
    lib.save(checkpointer, lib.weights(3), 3)
  assert newest().id == 2


@pytest.mark.parametrize(
  'clone', [copy.copy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_of_a_save_is_a_plain_snapshot(clone, open_run, tmp_path):
  checkpointer = open_run(mirrors=True)
  lib.save(checkpointer, lib.weights(3), 3)
  checkpointer.close()
  snapshot = clone(newest())
  assert type(snapshot) is utils.SnapshotNT
  assert snapshot.pickle_nest.global_step == 3
  # And starts another run, which the save itself does not.
  other = open_run(directory=tmp_path / 'other', mirrors=True)
  assert not other.can_be_restored('latest')
  utils.GLOBAL_CHECKPOINT_DICT['latest'].history.append(snapshot)
  assert other.can_be_restored('latest')
  live = lib.weights()
  assert lib.restore(other, live).global_step == 3
  assert live.held()['n'] == 3
  assert other.directory.saved_step is None  # It is no checkpoint of its own.
  assert other.steps('latest') == []
  # A run that goes on has its last save there.
  utils.GLOBAL_CHECKPOINT_DICT.clear()
  lib.restore(open_run(mirrors=True), lib.weights())
  assert newest().id == 3


def test_the_best_of_another_training_of_this_process(open_run):
  checkpointer, live = open_run(), lib.weights(1)
  live.EVALUATION_IS_PURE = True
  checkpointers.begin_training(checkpointer, lib.PerDevice)
  lib.save(checkpointer, live, 5)
  checkpointers.begin_training(checkpointer, lib.Sharded)
  lib.save_best(checkpointer, live, 5, 0.5)
  assert (checkpointer.steps('latest'), checkpointer.steps('best')) == ([], [5])
