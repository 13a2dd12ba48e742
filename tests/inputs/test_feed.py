"""Tests of jaxline.inputs.feed, without a model, on two fake devices."""

import copy
import functools
import gc
import itertools
import re
import threading
import weakref

import jax
from jax.experimental import multihost_utils
import numpy as np
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import feed
from jaxline.parallel import partitioning
from tests import sources

numbers = functools.partial(sources.Counting, batch_size=2, end=99)
training = functools.partial(numbers, is_training=True)


def make(method, cls=feed.TrainFeed, **values):
  config = base_config.get_base_config()
  config.update(values)
  return cls(method, partitioning.Partitioner.make(None, 'ddp'), config)


def take(source):
  """Takes a batch as a step does; returns its number."""
  number = int(source.take()['x'][0])
  source.commit()
  return number


@pytest.mark.parametrize('method', [training, lambda: sources.Counted(end=99)])
def test_a_restored_feed_goes_on_behind_the_last_step(method):
  skips = {'skip_batches': '3-4,7'}
  expected = [0, 1, 4, 5, 7, 8, 9]
  for after in 0, 2, 4:
    source, other = make(method, **skips), make(method, **skips)
    assert [take(source) for _ in range(after)] == expected[:after]
    before = source.num_read
    source.take()  # Of a step that failed.
    if after:  # A checkpoint before the first step has no position.
      other.restore(*copy.deepcopy((source.num_read, source.position)))
    assert source.num_read == before
    assert other.next_number == expected[after] + 1
    _, batch, _ = other.peek()
    assert batch['x'][0] == expected[after]
    rest = expected[after:]
    assert [take(other) for _ in rest] == rest
    source.close()
    # A closed feed keeps its place, and goes on.
    other.close()
    assert take(other) == 10
    source.note(other.num_read, other.position)
    assert take(source) == 11
    source.close()
    other.close()


def test_a_position_that_cannot_be_set_changes_nothing(caplog):
  source = make(lambda: ({'x': np.full(2, i)} for i in itertools.count(1)))
  assert [take(source), take(source)] == [1, 2]
  assert source.position is None
  with pytest.raises(ValueError, match='cannot be set'):
    source.restore(1, {'next': 1})
  assert take(source) == 3
  with pytest.raises(errors.UsageError, match='no position'):
    source.peek()
  source.restore(3, None)
  assert 'is not saved' in caplog.text
  assert (take(source), source.num_read) == (1, 4)
  source.close()


def test_a_feed_that_is_dropped_ends_its_thread():
  class Owner:
    def __init__(self):
      self.feed, self.opened = make(self.train_input), []

    def train_input(self):
      source = training()
      self.opened.append(weakref.ref(source))
      return source

  owner = Owner()
  take(owner.feed)
  owner.feed.close()
  assert owner.opened[0]() is None  # It may have workers.
  before = {*threading.enumerate()}
  take(owner.feed)
  (thread,) = {*threading.enumerate()} - before
  del owner
  gc.collect()
  thread.join(30)
  assert not thread.is_alive()


def evaluate(source, num_evaluated=0):
  """Returns name -> the arrays of each batch of an evaluation."""
  return {
    name: [jax.device_get(batch) for batch, *_ in batches]
    for name, batches in source.sets(num_evaluated)
  }


def test_an_evaluation_that_cannot_be_fed_is_refused():
  for given, said in (
    ({}, 'eval_input'),
    ([], 'gave no batch'),
    ({'some': [{'x': np.ones(4)}], 'none': []}, "no batch for 'none'"),
    ([{'x': np.ones(4)}, {'x': np.ones(8)}], '8 rows follows .* 4 rows'),
  ):
    with pytest.raises(ValueError, match=said):
      evaluate(make(lambda given=given: given, feed.EvalFeed))
  given = sources.Counting(batch_size=2, reset_for_eval=True)
  assert len(evaluate(make(lambda: given, feed.EvalFeed))['']) == 4
  assert given.is_closed


def test_a_process_without_a_batch_left_feeds_padding(monkeypatch):
  """As one of two, the other of which has a batch more."""
  both = iter([[2, 2], [1, 2], [0, 2], [0, 0]])
  gather = lambda rows: np.array(next(both))
  monkeypatch.setattr(multihost_utils, 'process_allgather', gather)
  batches = [{'x': np.float32([1, 2])}, {'x': np.float32([3])}]
  found = evaluate(make(lambda: batches, feed.EvalFeed))['']
  assert [x['x'].tolist() for x in found] == [[1, 2], [3, 0], [0, 0]]
  assert [x['weights'].tolist() for x in found] == [[1, 1], [1, 0], [0, 0]]


def test_each_of_several_sets_keeps_its_place():
  opened = []

  def sets(*names):
    opened.append(names)
    made = {
      'two': numbers(eval_loop_num_batches=2),
      'all': [{'x': np.float32([n, 0])} for n in range(3)],
    }
    return {name: made[name] for name in names}

  def feed_of(*names):
    return make(functools.partial(sets, *names), feed.EvalFeed)

  def places(source, num_evaluated):
    found = evaluate(source, num_evaluated).items()
    return {name: sources.numbers(batches) for name, batches in found}

  source, again = (feed_of('two', 'all') for _ in range(2))
  expected = [{'two': [2 * i, 2 * i + 1], 'all': [0, 1, 2]} for i in range(3)]
  assert [places(source, i) for i in range(3)] == expected
  # A process that starts there has the same batches.
  assert places(again, 2) == expected[2]
  # Where all inputs go on, they are made once.
  opened.clear()
  rolling = feed_of('two')
  # The steps of `eval_steps` may come in any order.
  found = [places(rolling, i)['two'] for i in (0, 1, 0, 2)]
  assert found == [[0, 1], [2, 3], [0, 1], [4, 5]]
  assert len(opened) == 1


@pytest.mark.parametrize('cls', [feed.TrainFeed, feed.EvalFeed])
def test_shapes_of_a_batch_take_one_and_close_the_input(cls):
  # An evaluation's rows are filled up to divide over the two devices.
  rows = 4 if cls.is_training else 3
  # Of a type that JAX narrows.
  given = [{'x': np.zeros([rows, 2]), 'n': np.arange(rows)}] * 2
  events = []

  def read():
    events.append('opened')
    try:
      yield from given
    finally:
      events.append('closed')

  source = make(lambda: read(), cls)
  found = source.abstract_batch().items()
  assert {k: (x.shape, str(x.dtype)) for k, x in found} == {
    'x': ((4, 2), 'float32'),
    'n': ((4,), 'int32'),
    'weights': ((4,), 'float32'),
  }
  assert events == ['opened', 'closed']
  given.clear()
  with pytest.raises(ValueError, match='gave no batch'):
    source.abstract_batch()


@pytest.mark.parametrize('cls', [feed.TrainFeed, feed.EvalFeed])
def test_inputs_are_those_of_the_partitioners_host(cls):
  fields = {'is_training': cls.is_training}
  source = make(lambda shard: numbers(**{'shard': shard} | fields), cls)
  source.partitioner.host = (1, 2)  # As on four processes, two by two.
  assert source.abstract_batch()['x'].shape == (4,)
  for wrong, got in (
    ({'shard': base.Shard(3, 4)}, (cls.is_training, 3, 4)),
    ({'is_training': not cls.is_training}, (not cls.is_training, 1, 2)),
  ):
    fields = {'is_training': cls.is_training} | wrong
    with pytest.raises(ValueError, match=re.escape(str(got))):
      source.abstract_batch()
