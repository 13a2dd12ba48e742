"""The contract of inputs: batches, fields, padding, states, ends."""

import jax
import numpy as np
import pytest

from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import iterable
from jaxline.parallel import distributed
from tests import sources
from tests.sources import Counting
from tests.sources import numbers

UNSAVED = {'input_checkpointing_enabled': False}
SEEDED = {'is_training': True, 'input_random_seed': 3}


def test_entries_are_attributes_of_nested_dicts_too():
  batch = base.Batch({'ids': 1}, tgt={'ids': 2, 'deep': {'labels': 3}})
  assert type(jax.tree.map(lambda x: x, batch).tgt) is base.Batch
  assert batch.ids == batch['ids'] == 1
  assert batch.tgt.deep.labels == 3
  batch.new = batch.tgt.deep.new = 4
  assert batch['new'] == batch['tgt']['deep']['new'] == 4
  del batch.ids
  with pytest.raises(AttributeError, match=r"'ids'; the batch has \['new', 't"):
    _ = batch.ids


def test_a_wrong_field_is_named():
  for name, fields in (
    ('batch_size', {'batch_size': 0}),
    ('num_infeed_hosts', {'num_infeed_hosts': -1}),
    ('infeed_host_index', {'num_infeed_hosts': 2, 'infeed_host_index': 2}),
    ('num_infeed_hosts', {'shard': base.Shard(2, 4), 'num_infeed_hosts': 3}),
    ('input_random_seed', {**SEEDED, **UNSAVED}),
    # The corners of the table of evaluations.
    ('eval_loop_num_batches', {'eval_loop_num_batches': 0}),
    ('eval_loop_num_batches', {'eval_loop_num_batches': None}),
    ('eval_loop_num_batches', {'eval_loop_num_batches': -1}),
    ('reset_for_eval', {'reset_for_eval': True, 'is_training': True}),
  ):
    with pytest.raises(errors.UsageError, match=name):
      Counting(**{'batch_size': 2, **fields})


def test_hosts_are_filled_in():
  for index, count, expected in (
    (None, None, (2, 4)),
    (1, None, (1, 4)),
    (None, 1, (0, 1)),
    (None, 0, (0, 1)),
    (3, 8, (3, 8)),
  ):
    fields = {'infeed_host_index': index, 'num_infeed_hosts': count}
    source = Counting(batch_size=3, shard=base.Shard(2, 4), **fields)
    found = source.infeed_host_index, source.num_infeed_hosts
    assert found == expected, (index, count)
    assert source.get_global_batch_size() == 3 * expected[1]


def test_no_seed_is_0_unless_training_data_would_come_again(monkeypatch):
  training = {'batch_size': 2, 'is_training': True}
  assert Counting(batch_size=2).seed() == 0
  assert Counting(**training).seed() == 0
  fresh = [Counting(**training, **UNSAVED) for _ in 'abc']
  seeds = [source.seed() for source in fresh]
  assert len(set(seeds)) == 3
  assert [source.seed() for source in fresh] == seeds
  # Processes that act as one host agree.
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(distributed, 'broadcast_from_process_0', lambda seed: 7)
  training['shard'] = base.Shard(0, 1)
  assert Counting(**training, **UNSAVED).seed() == 7
  # Nothing needs the seed of an iterable, so that no process waits for others.
  assert iterable.IterableInput(function=list, **training).seed() == 0


def test_without_reset_an_evaluation_has_the_next_batches():
  source = Counting(batch_size=2, eval_loop_num_batches=3)
  assert numbers(source.eval_batches()) == [0, 1, 2]
  with pytest.raises(ValueError, match=r'after 1 of eval_loop_num_batches=3'):
    list(source.eval_batches())


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
  assert padded['src']['ids'].dtype == np.int8
  assert jax.tree.map(lambda x: x.tolist(), padded) == {
    'weights': [[0.5, 0.5], [0, 0], [0, 0]],
    'src': {'ids': [[1] * 3, [0] * 3, [0] * 3]},
    'name': ['a', '', ''],
    'ok': [True, False, False],
    'pair': ([[1, 1], [0, 0], [0, 0]], [1, 0, 0]),
    'tgt': {'paddings': [[0, 0], [1, 1], [1, 1]]},  # They mark filler.
    'text': [b'a', b'', b''],
  }


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


def test_the_end_comes_again_and_reads_no_more():
  source = Counting(batch_size=2, end=1)
  next(source)
  for _ in range(3):
    with pytest.raises(StopIteration):
      source.get_next_padded()
  assert source.num_reads == 2
  source.reset()
  assert numbers(source) == [0]


def test_the_state_of_another_input_is_refused():
  """Or what is no state, such as that of an iterator that the run had."""
  state = Counting(batch_size=2).get_state()
  hosts = {'batch_size': 2, 'num_infeed_hosts': 2}
  for source, message in (
    (Counting(batch_size=3), 'batch_size'),
    (Counting(**hosts), 'num_infeed_hosts'),
    (Counting(**hosts, infeed_host_index=1), 'infeed_host_index'),
    (sources.Records(batch_size=2), 'Records'),
  ):
    next(source)
    for wrong in state, b'', b'{}', b'[1]', b'\xff', {'next': 3}:
      expected = message if wrong is state else 'set_state'
      with pytest.raises(ValueError, match=expected):
        source.set_state(wrong)
    assert numbers([next(source)]) != [0]  # It stands where it stood.
