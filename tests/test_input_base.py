"""The contract of inputs: batches, fields, padding, states, ends."""

import dataclasses
import itertools

import grain
import jax
import numpy as np
import pytest

from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import indexed
from jaxline.inputs import iterable
from jaxline.parallel import distributed


@dataclasses.dataclass(kw_only=True, eq=False)
class Counting(base.BaseInput):
  """Batches [B] of one number: 0, 1, ... `end` - 1."""

  end: int = 4

  def __post_init__(self):
    super().__post_init__()
    self.number = 0
    self.num_reads = 0

  def get_next(self):
    self.num_reads += 1
    if self.number >= self.end:
      raise StopIteration
    self.number += 1
    return base.Batch(x=np.full(self.batch_size, self.number - 1, np.int32))

  def reset(self):
    super().reset()
    self.number = 0

  def position(self):
    return self.number

  def set_position(self, position):
    self.number = position


UNSAVED = {'input_checkpointing_enabled': False}


def numbers(batches):
  return [int(batch['x'][0]) for batch in batches]


# The batch.


def test_an_input_of_the_library_gives_entries_as_attributes():
  rows = {'x': np.arange(4), 'deep': {'y': np.arange(4)}}
  for source in (
    indexed.ArrayInput(values=rows, batch_size=2, shuffle=False),
    iterable.as_input([rows], is_training=True, shard=base.Shard(0, 1)),
  ):
    batch = source.get_next()
    batch.new_field = batch.deep.y + 1
    assert batch['new_field'][1] == 2


def test_entries_are_attributes_of_nested_dicts_too():
  batch = base.Batch({'ids': 1}, tgt={'ids': 2, 'deep': {'labels': 3}})
  assert type(jax.tree.map(lambda x: x, batch).tgt) is base.Batch
  assert batch.ids == batch['ids'] == 1
  assert batch.tgt.deep.labels == 3
  batch.new = 4
  assert batch['new'] == 4
  del batch.ids
  assert not hasattr(batch, 'ids')
  with pytest.raises(AttributeError, match=r"'id'; the batch has \['new', 't"):
    _ = batch.id


# The fields.


@pytest.mark.parametrize(
  ('name', 'fields'),
  [
    ('batch_size', {'batch_size': 0}),
    ('num_infeed_hosts', {'num_infeed_hosts': -1}),
    ('infeed_host_index', {'num_infeed_hosts': 2, 'infeed_host_index': 2}),
    ('num_infeed_hosts', {'shard': base.Shard(2, 4), 'num_infeed_hosts': 3}),
    (
      'input_random_seed',
      {
        'is_training': True,
        'input_random_seed': 3,
        'input_checkpointing_enabled': False,
      },
    ),
    # The corners of the table of evaluations.
    ('eval_loop_num_batches', {'eval_loop_num_batches': 0}),
    ('eval_loop_num_batches', {'eval_loop_num_batches': None}),
    ('eval_loop_num_batches', {'eval_loop_num_batches': -1}),
    ('reset_for_eval', {'reset_for_eval': True, 'is_training': True}),
  ],
)
def test_a_wrong_field_is_named(name, fields):
  with pytest.raises(errors.UsageError, match=name):
    Counting(**{'batch_size': 2, **fields})


@pytest.mark.parametrize('number', [1, 3])
def test_an_epoch_ignores_a_number_of_batches(number, caplog):
  fields = {'reset_for_eval': True, 'eval_loop_num_batches': number}
  source = Counting(batch_size=2, **fields)
  assert ('ignores eval_loop_num_batches=3' in caplog.text) == (number == 3)
  whole = Counting(
    batch_size=2, reset_for_eval=True, eval_loop_num_batches=None
  )
  counts = [len(list(x.eval_batches())) for x in (source, whole)]
  assert counts[0] == counts[1] > 3


@pytest.mark.parametrize(
  ('index', 'count', 'expected'),
  [
    (None, None, (2, 4)),
    (None, 4, (2, 4)),
    (1, None, (1, 4)),
    (None, 1, (0, 1)),
    (None, 0, (0, 1)),
    (0, 0, (0, 1)),
    (3, 8, (3, 8)),
  ],
)
def test_hosts_are_filled_in(index, count, expected):
  source = Counting(
    batch_size=3,
    shard=base.Shard(2, 4),
    infeed_host_index=index,
    num_infeed_hosts=count,
  )
  assert (source.infeed_host_index, source.num_infeed_hosts) == expected
  assert source.get_global_batch_size() == 3 * expected[1]


def test_no_seed_is_0_unless_training_data_would_come_again():
  assert Counting(batch_size=2).seed() == 0
  assert Counting(batch_size=2, is_training=True).seed() == 0
  fresh = [Counting(batch_size=2, is_training=True, **UNSAVED) for _ in 'abc']
  seeds = [source.seed() for source in fresh]
  assert len(set(seeds)) == 3
  assert [source.seed() for source in fresh] == seeds


def test_processes_that_act_as_one_host_agree_on_a_seed(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(distributed, 'broadcast_from_process_0', lambda seed: 7)
  fields = {'batch_size': 2, 'shard': base.Shard(0, 1), 'is_training': True}
  assert Counting(**fields, **UNSAVED).seed() == 7
  # Nothing needs the seed of an iterable, so that no process waits for others.
  assert iterable.IterableInput(function=list, **fields).seed() == 0


# Evaluation.


def test_without_reset_an_evaluation_has_the_next_batches():
  source = Counting(batch_size=2, eval_loop_num_batches=3)
  assert numbers(source.eval_batches()) == [0, 1, 2]
  with pytest.raises(ValueError, match=r'after 1 of eval_loop_num_batches=3'):
    list(source.eval_batches())


# Padding.


def test_padding_keeps_weights_dtypes_and_nesting():
  batch = base.Batch(
    weights=np.full((1, 2), 0.5, np.float32),
    src={'ids': np.ones((1, 3), np.int8)},
    name=np.array(['a']),
    ok=np.array([True]),
    pair=(np.ones((1, 2)), np.ones(1)),
    tgt={'paddings': np.zeros((1, 2), np.float32)},
    text=np.array([b'a'], object),
  )
  padded = base.pad_rows(batch, 3)
  np.testing.assert_array_equal(padded['weights'], [[0.5, 0.5], [0, 0], [0, 0]])
  assert padded['src']['ids'].shape == (3, 3)
  assert padded['src']['ids'].dtype == np.int8
  assert padded.name.tolist() == ['a', '', '']
  assert padded.ok.tolist() == [True, False, False]
  assert padded.pair[1].tolist() == [1, 0, 0]
  # Filler is what paddings mark.
  assert padded['tgt']['paddings'].tolist() == [[0, 0], [1, 1], [1, 1]]
  assert padded.text.tolist() == [b'a', b'', b'']


@pytest.mark.parametrize(
  ('batch', 'error', 'message'),
  [
    ([1, 2], TypeError, 'list; expected a dict'),
    ({}, ValueError, 'first dimension'),
    ({'x': np.ones(2), 'y': np.ones(1)}, ValueError, 'first dimension.*y'),
    ({'x': np.float32(1)}, ValueError, 'first dimension'),
    ({'x': np.ones(3)}, ValueError, '3 rows; expected at most batch_size = 2'),
  ],
)
def test_what_is_no_batch_is_refused(batch, error, message):
  class Wrong(base.BaseInput):
    def get_next(self):
      return batch

  with pytest.raises(error, match=message):
    next(Wrong(batch_size=2))


# The end.


def test_the_end_comes_again_and_reads_no_more():
  source = Counting(batch_size=2, end=1)
  next(source)
  for _ in range(3):
    with pytest.raises(StopIteration):
      source.get_next_padded()
  assert source.num_reads == 2
  source.reset()
  assert numbers(source) == [0]


def test_tensorflows_end_is_an_end():
  kind = type('OutOfRangeError', (RuntimeError,), {})
  kind.__module__ = 'tensorflow.python.framework.errors_impl'

  class Ending(base.BaseInput):
    def get_next(self):
      raise kind('End of sequence')

  assert list(Ending(batch_size=2)) == []


def test_other_errors_say_where_and_do_not_end_the_data():
  class Failing(Counting):
    def get_next(self):
      if self.number == 2:
        self.number = 3
        raise RuntimeError('broken')
      return super().get_next()

  source = Failing(batch_size=2, name='mine')
  assert numbers(itertools.islice(source, 2)) == [0, 1]
  with pytest.raises(RuntimeError, match='broken') as caught:
    next(source)
  assert caught.value.__notes__ == ['It was mine, reading batch 2.']
  assert numbers(source) == [3]


# States.


@pytest.mark.parametrize(
  ('other', 'message'),
  [
    (Counting(batch_size=3), 'batch_size'),
    (Counting(batch_size=2, num_infeed_hosts=2), 'num_infeed_hosts'),
    (
      Counting(batch_size=2, infeed_host_index=1, num_infeed_hosts=2),
      'infeed_host_index',
    ),
    (
      dataclasses.make_dataclass(
        'Other', [], bases=(Counting,), kw_only=True, eq=False
      )(batch_size=2),
      'Other',
    ),
  ],
)
def test_the_state_of_another_input_is_refused(other, message):
  next(other)
  with pytest.raises(ValueError, match=message):
    other.set_state(Counting(batch_size=2).get_state())
  assert int(next(other)['x'][0]) == 1  # It stands where it stood.


@pytest.mark.parametrize('state', [b'', b'{}', b'[1]', b'\xff', {'next': 3}])
def test_what_is_no_state_is_refused(state):
  """Such as the position of another iterator that the run had before."""
  with pytest.raises(ValueError, match='set_state'):
    Counting(batch_size=2).set_state(state)


# Other things that give batches.


class Counted:
  """An iterator whose state is a pytree that it changes in place."""

  def __init__(self, first=0, end=6):
    self.state, self.end = {'next': np.array(first)}, end

  def __iter__(self):
    return self

  def __next__(self):
    number = int(self.state['next'])
    if number == self.end:
      raise StopIteration
    self.state['next'] += 1
    return {'x': np.array([number, number + 100])}

  def get_state(self):
    return self.state

  def set_state(self, state):
    self.state = state


def counted():
  for i in range(6):
    yield {'x': np.full(2, i)}


def grain_dataset():
  records = [{'x': i // 2} for i in range(12)]
  return grain.MapDataset.source(records).batch(2)


def packed_dataset():
  """One whose iterator's state has tuples."""
  x = np.repeat(np.arange(6), 2)
  records = [{'x': part} for part in np.split(x, [5, 5])]
  rows = grain.experimental.ConcatThenSplitIterDataset(
    grain.MapDataset.source(records).to_iter_dataset(), length_struct={'x': 2}
  )
  return rows.map(lambda row: {'x': row['x'][0]}).batch(1)


def tf_dataset():
  tensorflow = pytest.importorskip('tensorflow')
  numbers = tensorflow.data.Dataset.range(12)
  return numbers.map(lambda x: {'x': x // 2}).batch(2)


@pytest.mark.parametrize(
  ('make', 'is_saved'),
  [
    (lambda: Counting(batch_size=2, end=6, is_training=True), True),
    (Counted, True),
    (counted, False),
    (lambda: counted, False),
    (lambda: list(counted()), False),
    (grain_dataset, True),
    (lambda: grain_dataset().to_iter_dataset(), True),
    (packed_dataset, True),
    (tf_dataset, True),
  ],
)
def test_anything_that_gives_batches_is_an_input(make, is_saved):
  def as_input():
    return iterable.as_input(make(), is_training=True, shard=base.Shard(0, 1))

  assert numbers(as_input()) == list(range(6))
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
      assert numbers(other) == [1, 2, 3, 4, 5]


def test_the_state_of_an_iterator_is_that_of_its_host():
  one, other = (
    iterable.as_input(Counted(), is_training=True, shard=base.Shard(0, count))
    for count in (1, 2)
  )
  for state in (one.get_state(), b'{}', None):
    with pytest.raises(ValueError, match='number of hosts'):
      other.set_state(state)


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
  assert numbers(own) == [1]


def test_the_batch_of_each_host():
  assert base.per_host(12) == 12
  assert base.per_host(12, base.Shard(1, 4)) == 3
  with pytest.raises(errors.UsageError, match=r'10 .* 4 .* 12'):
    base.per_host(10, base.Shard(1, 4))
