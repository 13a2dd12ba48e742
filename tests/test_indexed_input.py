"""Records addressed by number: their order, the hosts, positions, workers."""

import dataclasses
import multiprocessing
import os
import pathlib
import pickle
import signal
import threading
import time

import cloudpickle
import numpy as np
import pytest

from jaxline import inputs
from jaxline.inputs import base
from jaxline.inputs import indexed
from tests import processes

PROGRAM = pathlib.Path(__file__).parent / 'programs' / 'worker_input.py'


class OddError(Exception):
  """Cannot be pickled."""

  def __init__(self, message):
    super().__init__(message)
    self.lock = threading.Lock()


@dataclasses.dataclass(kw_only=True, eq=False)
class Numbers(indexed.IndexedInput):
  """Gives the numbers of its records, and the epochs."""

  size: int = 10
  fail: str = ''  # What happens at record 7.
  data: str = 'a'

  def num_records(self):
    return self.size

  def read(self, records, epochs):
    if self.fail == 'stall' and 7 in records:
      time.sleep(1000)
    if self.fail and 7 in records:
      raise {'odd': OddError, 'stop': StopIteration, 'error': ValueError}[
        self.fail
      ]('broken')
    return base.Batch(x=records, epoch=epochs)

  def describe_record(self, record, epoch):
    return f'file f{record // 5}, row {record % 5}'

  def data_identity(self):
    return {'data': self.data}


ONE_EPOCH = {'reset_for_eval': True, 'eval_loop_num_batches': None}


def take(source, number):
  return [next(source)['x'].tolist() for _ in range(number)]


def rows(batches):
  return [record for batch in batches for record in batch]


# The order.


@pytest.mark.parametrize('small', [indexed._SMALL, 0])
def test_the_order_is_a_permutation_in_each_epoch(monkeypatch, small):
  monkeypatch.setattr(indexed, '_SMALL', small)
  orders = {}
  for seed in (0, 1, 2, -1, 2**40):
    source = Numbers(
      batch_size=7, size=101, is_training=True, input_random_seed=seed
    )
    given = rows(take(source, 44))
    for epoch in range(3):
      order = given[epoch * 101 : (epoch + 1) * 101]
      assert sorted(order) == list(range(101))
      orders[seed, epoch] = tuple(order)
    # The same order for batches that cross from an epoch into the next.
    positions = np.arange(303)
    np.testing.assert_array_equal(source.order(positions), given[:303])
  # No epoch of a seed is another one of the next seed.
  assert len(set(orders.values())) == len(orders)
  assert tuple(range(101)) not in orders.values()


def test_the_order_never_changes_between_versions():
  source = Numbers(batch_size=5, is_training=True, input_random_seed=3)
  assert take(source, 4) == [
    [6, 1, 8, 5, 2],
    [7, 9, 4, 3, 0],
    [9, 7, 8, 3, 5],
    [6, 4, 0, 2, 1],
  ]
  large = Numbers(
    batch_size=5, size=2**16, is_training=True, input_random_seed=3
  )
  assert take(large, 2) == [
    [32319, 12057, 37594, 62381, 30565],
    [1747, 62416, 48687, 62788, 46484],
  ]
  assert large.order(np.arange(2**16, 2**16 + 2)).tolist() == [61429, 36773]


# The hosts.


def test_no_records_are_an_error_and_no_endless_loop():
  for fields in ({}, ONE_EPOCH, {'is_training': True}, {'num_threads': 1}):
    with pytest.raises(ValueError, match='Numbers has no records'):
      next(Numbers(batch_size=4, size=0, **fields))


# Positions.


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'size': 11}, 'num_records'),
    ({'shuffle': True}, 'shuffle'),
    ({'input_random_seed': 1}, 'seed'),
    ({'data': 'b'}, 'data'),
    ({'repeat': False}, 'repeat'),
  ],
)
def test_a_state_of_another_order_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    Numbers(batch_size=2, **fields).set_state(Numbers(batch_size=2).get_state())


def test_a_pickled_input_is_small_and_goes_on_where_it_stood():
  source = Numbers(batch_size=5, size=50_000, is_training=True, num_threads=1)
  expected = take(source, 4)[3]
  source.set_position(0)
  take(source, 3)
  data = cloudpickle.dumps(source)
  assert len(data) < 5_000  # No order.
  assert next(source)['x'].tolist() == expected
  other = pickle.loads(data)
  assert next(other)['x'].tolist() == expected
  assert take(other, 5) == take(source, 5)
  assert other.get_state() == source.get_state()
  source.close()
  other.close()


# Errors.


@pytest.mark.parametrize('threads', [0, 2])
def test_an_error_names_the_record_and_loses_nothing(threads):
  source = Numbers(batch_size=4, fail='error', num_threads=threads, name='mine')
  take(source, 1)
  for _ in range(2):  # Who tries again gets the same error, not the next batch.
    with pytest.raises(ValueError, match='broken') as caught:
      next(source)
    assert 'While mine read file f1, row 2.' in caught.value.__notes__
    assert source.position() == 4
  source.fail = ''
  assert take(source, 2) == [[4, 5, 6, 7], [8, 9, 0, 1]]
  source.close()


@pytest.mark.parametrize('threads', [0, 2])
def test_an_end_inside_a_record_is_no_end_of_the_data(threads):
  source = Numbers(batch_size=4, fail='stop', num_threads=threads)
  with pytest.raises(RuntimeError, match=r'StopIteration.*file f1, row 2'):
    list(source)
  source.close()


@pytest.mark.parametrize('fields', [{}, ONE_EPOCH, {'num_threads': 1}])
@pytest.mark.parametrize('wrong', [0, 2])
def test_a_reader_that_loses_or_doubles_rows_is_an_error(fields, wrong):
  class Wrong(Numbers):
    def read(self, records, epochs):
      number = np.where(records == 6, wrong, 1)
      return base.Batch(x=np.repeat(records, number))

  source = Wrong(batch_size=4, **fields)
  take(source, 1)
  with pytest.raises(
    ValueError, match=f'Wrong made {3 + wrong} rows of 4 records'
  ) as caught:
    next(source)
  assert caught.value.__notes__[0] == 'While Wrong read file f1, row 1.'
  source.close()


# Workers: each takes seconds to start.


@pytest.mark.process
def test_workers_give_the_same_batches_and_end_with_the_input():
  fields = {'batch_size': 4, 'size': 22, 'shuffle': True, **ONE_EPOCH}
  expected = [batch['x'].tolist() for batch in Numbers(**fields)]
  source = Numbers(**fields, num_workers=2, num_threads=1)
  # From two positions on, one of them with more workers than batches.
  for position in (1, 5):
    source.reset()
    source.set_position(4 * position)
    batches = list(source)
    assert [batch['x'].tolist() for batch in batches] == expected[position:]
    # Not in the memory that is shared with the worker.
    assert {type(array) for array in batches[0].values()} == {np.ndarray}
  source.reset()
  next(source)
  assert len(multiprocessing.active_children()) == 2
  state = source.get_state()
  source.close()
  source.close()
  assert not multiprocessing.active_children()
  other = Numbers(**fields)
  other.set_state(state)
  assert [batch['x'].tolist() for batch in other] == expected[1:]


@pytest.mark.process
def test_an_error_in_a_worker_comes_up_and_loses_nothing():
  source = Numbers(batch_size=4, num_workers=1)
  for fail, kind, message in (
    ('error', ValueError, 'broken'),
    # It cannot be sent to the parent, which would wait for ever.
    ('odd', RuntimeError, 'OddError: broken'),
  ):
    source.fail = fail
    take(source, 1 - source.position() // 4)
    with pytest.raises(kind, match=message) as caught:
      next(source)
    notes = caught.value.__notes__
    assert 'While Numbers read file f1, row 2.' in notes
    assert 'from record 4 of epoch 0 on (file f0, row 4)' in notes[-1]
    assert not multiprocessing.active_children()
  source.fail = ''
  assert take(source, 1) == [[4, 5, 6, 7]]
  source.close()


@pytest.mark.process
def test_closing_does_not_wait_for_ever_for_a_worker(monkeypatch):
  monkeypatch.setattr(indexed, '_MAX_CLOSE_SECS', 1)
  source = Numbers(batch_size=4, fail='stall', num_workers=1)
  take(source, 1)
  (worker,) = multiprocessing.active_children()
  source.close()
  assert worker.is_alive()
  worker.kill()
  worker.join()


@pytest.mark.process
def test_a_killed_worker_is_an_error_and_no_hang():
  source = Numbers(batch_size=4, num_workers=2)
  take(source, 1)
  for process in multiprocessing.active_children():
    os.kill(process.pid, signal.SIGKILL)
  with pytest.raises(RuntimeError, match='exit code -9'):
    take(source, 20)
  source.close()
  assert not multiprocessing.active_children()


def workers_of(process):
  word, *pids = process.stdout.readline().split()
  assert word == 'workers'
  assert len(pids) == 2
  return [int(pid) for pid in pids]


def is_running(pid):
  try:
    return ') Z' not in pathlib.Path(f'/proc/{pid}/stat').read_text()
  except FileNotFoundError:
    return False


def wait_until_gone(pids):
  deadline = time.monotonic() + 60
  while any(map(is_running, pids)):
    assert time.monotonic() < deadline, 'workers outlive their parent'
    time.sleep(0.05)


@pytest.mark.process
def test_workers_do_not_outlive_a_killed_parent():
  with processes.started(PROGRAM, 'run') as process:
    assert process.stdout.readline() == 'starting\n'
    pids = workers_of(process)
    assert all(map(is_running, pids))
    process.kill()
    wait_until_gone(pids)


@pytest.mark.process
def test_workers_serve_a_parent_that_finishes_after_signals_to_all():
  with processes.started(PROGRAM, 'finish') as process:
    assert process.stdout.readline() == 'starting\n'
    deadline = time.monotonic() + 60
    while len(children_of(process.pid)) < 2:
      assert time.monotonic() < deadline
      time.sleep(0.01)
    os.killpg(process.pid, signal.SIGHUP)  # They import, and know nothing yet.
    pids = workers_of(process)
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGTERM)
    done = processes.end(process)
    assert (done.returncode, done.stdout) == (0, 'finished\n'), done.stderr
    wait_until_gone(pids)


def children_of(pid):
  """Returns the workers that were started, though they still import."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      parent = path.read_text().rpartition(')')[2].split()[1]
      command = (path.parent / 'cmdline').read_text()
    except OSError:
      continue
    if int(parent) == pid and 'spawn_main' in command:
      found.append(int(path.parent.name))
  return found


# Arrays in memory.


def test_arrays_are_read_once_in_order_or_shuffled_for_ever():
  x, y = np.arange(20).reshape(10, 2), np.arange(10)
  values = {'x': x, 'y': {'z': y.tolist()}}
  batches = [*inputs.arrays(values, batch_size=4).eval_batches()]
  assert [b['y']['z'].tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7],
                                                     [8, 9, 0, 0]]  # fmt: skip
  assert batches[-1]['weights'].tolist() == [1, 1, 0, 0]
  source = inputs.arrays(values, batch_size=5, is_training=True)
  epochs = [[next(source), next(source)] for _ in range(2)]
  orders = [rows(b['y']['z'].tolist() for b in epoch) for epoch in epochs]
  assert orders[0] != orders[1] != [*range(10)] != orders[0]
  assert [sorted(order) for order in orders] == [[*range(10)]] * 2
  for batch in epochs[0]:
    np.testing.assert_array_equal(batch['x'], x[batch['y']['z']])
  state = source.get_state()
  inputs.arrays(values, batch_size=1, is_training=True).set_state(state)
  for changed in ({'x': x + 1, 'y': {'z': y}}, {'x': x, 'y': {'w': y}}):
    with pytest.raises(ValueError, match='arrays is '):
      other = inputs.arrays(changed, batch_size=5, is_training=True)
      other.set_state(state)
  # The bytes of an array of objects are addresses: no two runs have the same.
  for wrong in ({'x': x, 'y': y[1:]}, x, {}, {'x': x.astype(object)}):
    with pytest.raises((TypeError, ValueError), match=r'expected|share'):
      inputs.arrays(wrong, batch_size=4)
