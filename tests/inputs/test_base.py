"""The contract of inputs: batches, fields, padding, states, ends."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import indexed
from jaxline.inputs import iterable
from jaxline.parallel import distributed
from tests import sources
from tests.sources import Counting
from tests.sources import numbers

UNSAVED = {'input_checkpointing_enabled': False}


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


def test_an_input_of_the_library_gives_entries_as_attributes():
  rows = {'x': np.arange(4), 'deep': {'y': np.arange(4)}}
  for source in (
    indexed.ArrayInput(values=rows, batch_size=2, shuffle=False),
    iterable.as_input([rows], is_training=True, shard=base.Shard(0, 1)),
  ):
    batch = source.get_next()
    batch.new_field = batch.deep.y + 1
    assert batch['new_field'][1] == 2


# The fields.


def test_a_wrong_field_is_named():
  for name, fields in (
    ('batch_size', {'batch_size': 0}),
    ('num_infeed_hosts', {'num_infeed_hosts': -1}),
    ('infeed_host_index', {'num_infeed_hosts': 2, 'infeed_host_index': 2}),
    ('num_infeed_hosts', {'shard': base.Shard(2, 4), 'num_infeed_hosts': 3}),
    (
      'input_random_seed',
      {'is_training': True, 'input_random_seed': 3, **UNSAVED},
    ),
    # The corners of the table of evaluations.
    ('eval_loop_num_batches', {'eval_loop_num_batches': 0}),
    ('eval_loop_num_batches', {'eval_loop_num_batches': None}),
    ('eval_loop_num_batches', {'eval_loop_num_batches': -1}),
    ('reset_for_eval', {'reset_for_eval': True, 'is_training': True}),
  ):
    with pytest.raises(errors.UsageError, match=name):
      Counting(**{'batch_size': 2, **fields})


def test_an_epoch_ignores_a_number_of_batches(caplog):
  whole = Counting(
    batch_size=2, reset_for_eval=True, eval_loop_num_batches=None
  )
  count = len(list(whole.eval_batches()))
  for number in (1, 3):
    source = Counting(
      batch_size=2, reset_for_eval=True, eval_loop_num_batches=number
    )
    said = 'ignores eval_loop_num_batches=3' in caplog.text
    assert said == (number == 3)
    assert len(list(source.eval_batches())) == count > 3


def test_hosts_are_filled_in():
  for index, count, expected in (
    (None, None, (2, 4)),
    (None, 4, (2, 4)),
    (1, None, (1, 4)),
    (None, 1, (0, 1)),
    (None, 0, (0, 1)),
    (0, 0, (0, 1)),
    (3, 8, (3, 8)),
  ):
    source = Counting(
      batch_size=3,
      shard=base.Shard(2, 4),
      infeed_host_index=index,
      num_infeed_hosts=count,
    )
    found = source.infeed_host_index, source.num_infeed_hosts
    assert found == expected, (index, count)
    assert source.get_global_batch_size() == 3 * expected[1]


def test_the_batch_of_each_host():
  assert base.per_host(12) == 12
  assert base.per_host(12, base.Shard(1, 4)) == 3
  with pytest.raises(errors.UsageError, match=r'10 .* 4 .* 12'):
    base.per_host(10, base.Shard(1, 4))


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


def test_what_is_no_batch_is_refused():
  source = Counting(batch_size=2)
  for batch, error, message in (
    ([1, 2], TypeError, 'list; expected a dict'),
    ({}, ValueError, 'first dimension'),
    ({'x': np.ones(2), 'y': np.ones(1)}, ValueError, 'first dimension.*y'),
    ({'x': np.float32(1)}, ValueError, 'first dimension'),
    ({'x': np.ones(3)}, ValueError, '3 rows; expected at most batch_size = 2'),
  ):
    source.get_next = lambda batch=batch: batch
    with pytest.raises(error, match=message):
      next(source)


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
  assert caught.value.__notes__ == ['It was mine, reading number 3.']
  assert numbers(source) == [3]


# States.


def test_the_state_of_another_input_is_refused():
  other = dataclasses.make_dataclass(
    'Other', [], bases=(Counting,), kw_only=True, eq=False
  )
  state = Counting(batch_size=2).get_state()
  for source, message in (
    (Counting(batch_size=3), 'batch_size'),
    (Counting(batch_size=2, num_infeed_hosts=2), 'num_infeed_hosts'),
    (
      Counting(batch_size=2, infeed_host_index=1, num_infeed_hosts=2),
      'infeed_host_index',
    ),
    (other(batch_size=2), 'Other'),
    (sources.Records(batch_size=2), 'Records'),
  ):
    next(source)
    with pytest.raises(ValueError, match=message):
      source.set_state(state)
    assert numbers([next(source)]) != [0]  # It stands where it stood.


def test_what_is_no_state_is_refused():
  """Such as the position of another iterator that the run had before."""
  for state in b'', b'{}', b'[1]', b'\xff', {'next': 3}:
    with pytest.raises(ValueError, match='set_state'):
      Counting(batch_size=2).set_state(state)
