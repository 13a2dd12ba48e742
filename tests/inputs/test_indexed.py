"""Records addressed by number: their order, the hosts, positions, workers."""

import multiprocessing
import os
import pathlib
import signal

import numpy as np
import pytest

from jaxline import inputs
from jaxline.inputs import base
from tests import processes
from tests import sources

PROGRAM = processes.ROOT / 'tests' / 'programs' / 'worker_input.py'


def test_the_order_never_changes_between_versions():
  source = sources.Records(batch_size=5, is_training=True, input_random_seed=3)
  assert sources.take(source, 4) == [
    [6, 1, 8, 5, 2],
    [7, 9, 4, 3, 0],
    [9, 7, 8, 3, 5],
    [6, 4, 0, 2, 1],
  ]
  large = sources.Records(
    batch_size=5, size=2**16, is_training=True, input_random_seed=3
  )
  assert sources.take(large, 2) == [
    [32319, 12057, 37594, 62381, 30565],
    [1747, 62416, 48687, 62788, 46484],
  ]
  assert large.order(np.arange(2**16, 2**16 + 2)).tolist() == [61429, 36773]


def test_no_records_are_an_error_and_no_endless_loop():
  for fields in {'repeat': False}, {'is_training': True}, {'num_threads': 1}:
    with pytest.raises(ValueError, match='Records has no records'):
      next(sources.Records(batch_size=4, size=0, **fields))


def test_a_state_of_another_order_is_refused():
  state = sources.Records(batch_size=2).get_state()
  for fields, message in (
    ({'size': 11}, 'num_records'),
    ({'shuffle': True}, 'shuffle'),
    ({'input_random_seed': 1}, 'seed'),
    ({'data': 'b'}, 'data'),
    ({'repeat': False}, 'repeat'),
  ):
    with pytest.raises(ValueError, match=message):
      sources.Records(batch_size=2, **fields).set_state(state)


@pytest.mark.parametrize('threads', [0, 2])
def test_an_error_names_the_record_and_loses_nothing(threads):
  source = sources.Records(batch_size=4, num_threads=threads, name='mine')
  source.fail = 'error'
  sources.take(source, 1)
  for _ in range(2):  # Who tries again gets the same error, not the next batch.
    with pytest.raises(ValueError, match='broken') as caught:
      next(source)
    notes = caught.value.__notes__
    assert 'While mine read file f1, row 2.' in notes
    assert 'It was mine, reading a batch that starts at record 4' in notes[-1]
    assert source.position() == 4
  # An end inside a record is no end of the data.
  source.fail = 'stop'
  with pytest.raises(RuntimeError, match=r'StopIteration.*file f1, row 2'):
    list(source)
  source.fail = ''
  assert sources.take(source, 2) == [[4, 5, 6, 7], [8, 9, 0, 1]]
  source.close()


def test_a_reader_that_loses_or_doubles_rows_is_an_error():
  class Wrong(sources.Records):
    def read(self, records, epochs):
      number = np.where(records == 6, self.number, 1)
      return base.Batch(x=np.repeat(records, number))

  source = Wrong(batch_size=4)
  source.set_position(4)
  for source.number in 0, 2:
    with pytest.raises(ValueError) as caught:
      next(source)
    said = f'Wrong made {3 + source.number} rows of 4 records'
    assert said in str(caught.value)
    assert caught.value.__notes__[0] == 'While Wrong read file f1, row 1.'
  source.close()


@pytest.mark.process
def test_workers_give_the_same_batches_and_end_with_the_input():
  fields = {'batch_size': 4, 'size': 22, 'shuffle': True, **sources.ONE_EPOCH}
  expected = [batch['x'].tolist() for batch in sources.Records(**fields)]
  source = sources.Records(**fields, num_workers=2, num_threads=1)
  source.set_position(4)
  batch = next(source)
  assert len(multiprocessing.active_children()) == 2
  # Not in the memory that is shared with the worker.
  assert {type(array) for array in batch.values()} == {np.ndarray}
  state = source.get_state()
  batches = [batch, *source]
  assert [batch['x'].tolist() for batch in batches] == expected[1:]
  for _ in range(2):
    source.close()
  assert not multiprocessing.active_children()
  other = sources.Records(**fields)
  other.set_state(state)
  assert [batch['x'].tolist() for batch in other] == expected[2:]


@pytest.mark.process
def test_an_error_in_a_worker_comes_up_and_loses_nothing():
  source = sources.Records(batch_size=4, num_workers=1)
  for fail, kind, message in (
    ('error', ValueError, 'broken'),
    # It cannot be sent to the parent, which would wait for ever.
    ('odd', RuntimeError, 'OddError: broken'),
  ):
    source.fail = fail
    sources.take(source, 1 - source.position() // 4)
    with pytest.raises(kind, match=message) as caught:
      next(source)
    notes = caught.value.__notes__
    assert 'While Records read file f1, row 2.' in notes
    assert 'record 4 of epoch 0 (file f0, row 4)' in notes[-1]
    assert not multiprocessing.active_children()
  source.fail = ''
  assert sources.take(source, 1) == [[4, 5, 6, 7]]
  (worker,) = multiprocessing.active_children()
  worker.kill()
  with pytest.raises(RuntimeError, match='exit code -9'):
    sources.take(source, 20)
  source.close()
  assert not multiprocessing.active_children()


def children_of(process):
  """Returns the workers that were started, though they still import."""
  threads = pathlib.Path(f'/proc/{process.pid}/task').iterdir()
  pids = [x for t in threads for x in (t / 'children').read_text().split()]
  command = lambda pid: pathlib.Path(f'/proc/{pid}/cmdline').read_text()
  return [int(pid) for pid in pids if 'spawn_main' in command(pid)]


@pytest.mark.process
@pytest.mark.parametrize('is_killed', [True, False])
def test_workers_serve_their_parent_and_do_not_outlive_it(is_killed):
  with processes.started(PROGRAM, 'run' if is_killed else 'finish') as process:
    assert process.stdout.readline() == 'starting\n'
    processes.wait_until(lambda: children_of(process))
    if not is_killed:
      os.killpg(process.pid, signal.SIGHUP)  # They import, and know nothing.
    (pid,) = map(int, process.stdout.readline().split()[1:])
    assert not processes.is_gone(pid)
    if is_killed:
      process.kill()
    else:
      os.killpg(process.pid, signal.SIGINT)
      os.killpg(process.pid, signal.SIGTERM)
      done = processes.end(process)
      assert (done.returncode, done.stdout) == (0, 'finished\n'), done.stderr
    processes.wait_until_gone([pid])


def test_arrays_are_read_once_in_order_or_shuffled_for_ever():
  x, y = np.arange(20).reshape(10, 2), np.arange(10)
  values = {'x': x, 'y': {'z': y.tolist()}}
  batches = [*inputs.arrays(values, batch_size=4).eval_batches()]
  assert sources.rows(b.y.z.tolist() for b in batches) == [*range(10), 0, 0]
  assert batches[-1]['weights'].tolist() == [1, 1, 0, 0]
  training = {'batch_size': 5, 'is_training': True, 'input_random_seed': -1}
  source = inputs.arrays(values, **training)
  epochs = [[next(source), next(source)] for _ in range(2)]
  orders = [sources.rows(b.y.z.tolist() for b in epoch) for epoch in epochs]
  assert orders[0] != orders[1] != [*range(10)] != orders[0]
  assert [sorted(order) for order in orders] == [[*range(10)]] * 2
  for batch in epochs[0]:
    np.testing.assert_array_equal(batch.x, x[batch.y.z])
  state = source.get_state()
  inputs.arrays(values, **training | {'batch_size': 1}).set_state(state)
  for changed in ({'x': x + 1, 'y': {'z': y}}, {'x': x, 'y': {'w': y}}):
    with pytest.raises(ValueError, match='arrays is '):
      inputs.arrays(changed, **training).set_state(state)
  # The bytes of an array of objects are addresses: no two runs have the same.
  for wrong in ({'x': x, 'y': y[1:]}, x, {}, {'x': x.astype(object)}):
    with pytest.raises((TypeError, ValueError), match=r'expected|share'):
      inputs.arrays(wrong, batch_size=4)
