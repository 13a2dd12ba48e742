"""Other things that give batches: iterables, generators, Grain, tf.data."""

import grain
import numpy as np
import pytest

from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import iterable
from tests import sources


def counted():
  for i in range(6):
    yield {'x': np.full(2, i)}


def grain_dataset():
  records = [{'x': i // 2} for i in range(12)]
  return grain.MapDataset.source(records).batch(2)


def tf_dataset():
  tensorflow = pytest.importorskip('tensorflow')
  numbers = tensorflow.data.Dataset.range(12)
  return numbers.map(lambda x: {'x': x // 2}).batch(2)


@pytest.mark.parametrize(
  ('make', 'is_saved'),
  [
    (lambda: sources.Counting(batch_size=2, end=6, is_training=True), True),
    (sources.Counted, True),
    (counted, False),
    (lambda: counted, False),
    (lambda: list(counted()), False),
    (grain_dataset, True),
    (lambda: grain_dataset().to_iter_dataset(), True),
    (tf_dataset, True),
  ],
)
def test_anything_that_gives_batches_is_an_input(make, is_saved):
  def as_input():
    return iterable.as_input(make(), is_training=True, shard=base.Shard(0, 1))

  assert sources.numbers(as_input()) == list(range(6))
  source = as_input()
  assert source.saves_position == is_saved
  assert sorted(next(source)) == ['weights', 'x']
  mark = source.copy_position()
  list(source)
  assert (mark is not None) == is_saved
  if is_saved:
    for _ in range(2):  # The first must not change the state.
      other = as_input()
      other.set_state(source.state_of(mark))
      assert sources.numbers(other) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize('hosts', [1, 2])
def test_the_state_of_an_iterator_is_that_of_its_host(hosts):
  def make(index, count):
    shard = base.Shard(index, count)
    return iterable.as_input(sources.Counted(), is_training=True, shard=shard)

  source = make(hosts - 1, 2)
  for state in (make(0, hosts).get_state(), b'{}', None):
    with pytest.raises(ValueError, match='number of hosts'):
      source.set_state(state)


def elastic(index, count):
  records = grain.MapDataset.range(120).map(lambda x: {'x': x})
  shard = grain.sharding.ShardOptions(index, count)
  source = grain.experimental.ElasticIterator(records, 6, shard)
  shard = base.Shard(index, count)
  return iterable.as_input(source, is_training=True, shard=shard)


def test_the_state_of_an_elastic_iterator_is_that_of_any_host():
  def batch(hosts):
    return sorted(x for host in hosts for x in next(host)['x'].tolist())

  two = [elastic(i, 2) for i in range(2)]
  assert [batch(two) for _ in range(2)] == [[*range(6)], [*range(6, 12)]]
  first, second = (source.state_of(source.copy_position()) for source in two)
  assert first == second  # As a checkpoint for other hosts requires.
  three = [elastic(i, 3) for i in range(3)]
  for source in three:
    source.set_state(first)
  assert batch(three) == [*range(12, 18)]
  with pytest.raises(ValueError, match='number of hosts'):
    three[0].set_state({'host': 0, 'hosts': 2, 'state': {'next_index': 12}})


def test_hosts_that_would_read_the_same_are_refused():
  fields = {'is_training': True, 'shard': base.Shard(1, 2)}
  with pytest.raises(errors.UsageError, match='host_index'):
    iterable.as_input(counted, **fields)
  own = iterable.as_input(
    lambda host_index: [{'x': np.array([host_index])}], **fields
  )
  assert sources.numbers(own) == [1]
