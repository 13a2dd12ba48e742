"""The contract of inputs: batches, fields, padding, states, ends."""

import copy
import dataclasses
import functools
import gc
import itertools
import pickle

import cloudpickle
import jax
import numpy as np
import pytest

from jaxline import distributed
from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import synthetic
from tests.experiments import regression


@dataclasses.dataclass(kw_only=True, eq=False)
class Counting(base.BaseInput):
  """Batches [B] of one number: 0, 1, ... `end` - 1; the last may be short."""

  end: int = 4
  last_rows: int | None = None

  def __post_init__(self):
    super().__post_init__()
    self.number = 0
    self.num_reads = 0

  def get_next(self):
    self.num_reads += 1
    if self.number >= self.end:
      raise StopIteration
    self.number += 1
    rows = self.batch_size
    if self.number == self.end and self.last_rows is not None:
      rows = self.last_rows
    return base.Batch(x=np.full(rows, self.number - 1, np.int32))

  def reset(self):
    super().reset()
    self.number = 0

  def position(self):
    return self.number

  def set_position(self, position):
    self.number = position


def numbers(batches):
  return [int(batch['x'][0]) for batch in batches]


# The batch.


def test_entries_are_attributes_of_nested_dicts_too():
  batch = base.Batch({'ids': 1}, tgt={'ids': 2, 'deep': {'labels': 3}})
  assert batch.ids == batch['ids'] == 1
  assert batch.tgt.deep.labels == 3
  batch.new = 4
  assert batch['new'] == 4
  del batch.ids
  assert not hasattr(batch, 'ids')
  with pytest.raises(AttributeError, match=r"'id'; the batch has \['new', 't"):
    _ = batch.id


def test_a_batch_goes_through_jax_and_stays_one():
  batch = base.Batch(b=np.arange(3.0), a={'c': np.ones((3, 2))})
  doubled = jax.jit(lambda b: jax.tree.map(lambda x: x * 2, b))(batch)
  assert isinstance(doubled, base.Batch)
  assert isinstance(doubled.a, base.Batch)
  np.testing.assert_array_equal(doubled.b, [0, 2, 4])
  # The order and the paths of the leaves are those of a dict.
  plain = {'b': 1, 'a': {'c': 2}}
  paths = jax.tree.leaves_with_path(plain)
  assert jax.tree.leaves_with_path(base.Batch(plain)) == paths
  with pytest.raises(ValueError, match='different types'):
    jax.tree.map(max, plain, base.Batch(plain))
  # JAX puts things of its own in the place of leaves.
  none = jax.tree.map(lambda x: None, batch)
  assert none.a.c is None


@pytest.mark.parametrize(
  'duplicate',
  [
    copy.copy,
    copy.deepcopy,
    base.Batch,
    lambda b: pickle.loads(pickle.dumps(b)),
    lambda b: cloudpickle.loads(cloudpickle.dumps(b)),
  ],
)
def test_a_copy_of_a_batch_is_a_batch(duplicate):
  batch = base.Batch(a={'b': 1}, items=2)
  other = duplicate(batch)
  assert type(other) is base.Batch
  assert other == batch
  assert other is not batch
  assert type(other.a) is base.Batch


# The fields.


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'batch_size': 0}, 'batch_size'),
    ({'num_infeed_hosts': -1}, 'num_infeed_hosts'),
    ({'num_infeed_hosts': 2, 'infeed_host_index': 2}, 'infeed_host_index'),
    ({'batch_padding_size': -1}, 'batch_padding_size'),
    ({'eval_loop_num_batches': 0}, 'eval_loop_num_batches'),
  ],
)
def test_a_wrong_field_is_named(fields, message):
  with pytest.raises(ValueError, match=message):
    Counting(**{'batch_size': 2, **fields})


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


def test_a_number_of_hosts_that_are_others_needs_an_index():
  assert Counting(batch_size=3, num_infeed_hosts=3).infeed_host_index == 0
  shard = base.Shard(2, 4)
  with pytest.raises(
    ValueError, match=r'=3 and no infeed_host_index, .* are 4'
  ):
    Counting(batch_size=3, shard=shard, num_infeed_hosts=3)


# Evaluation.


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'reset_for_eval': True, 'eval_loop_num_batches': 2}, 'not supported'),
    ({'eval_loop_num_batches': None}, 'would not know where to end'),
    ({'eval_loop_num_batches': -1}, 'would not know where to end'),
    ({'reset_for_eval': True, 'is_training': True}, 'never reset'),
  ],
)
def test_corners_of_the_eval_table_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    Counting(batch_size=2, **fields)


@pytest.mark.parametrize('count', [None, -1, 1])
def test_reset_for_eval_sees_one_epoch_each_time(count):
  source = Counting(
    batch_size=2, reset_for_eval=True, eval_loop_num_batches=count
  )
  next(source)  # Wherever it stands.
  for _ in range(2):
    assert numbers(source.eval_batches()) == [0, 1, 2, 3]


def test_without_reset_an_evaluation_has_the_next_batches():
  source = Counting(batch_size=2, eval_loop_num_batches=2)
  assert numbers(source.eval_batches()) == [0, 1]
  assert numbers(source.eval_batches()) == [2, 3]
  with pytest.raises(ValueError, match='after 0 of eval_loop_num_batches=2'):
    list(source.eval_batches())
  source = Counting(batch_size=2, eval_loop_num_batches=3)
  list(source.eval_batches())
  with pytest.raises(ValueError, match=r'after 1 of.*repeat=True'):
    list(source.eval_batches())


def test_an_evaluation_without_data_is_an_error():
  source = Counting(batch_size=2, reset_for_eval=True, end=0)
  with pytest.raises(ValueError, match='no data'):
    list(source.eval_batches())


def test_repeat_follows_reset_for_eval():
  make = functools.partial(synthetic.SyntheticInput, batch_size=2, length=2)
  assert make().repeat
  assert not make(repeat=False).repeat
  assert not make(reset_for_eval=True).repeat
  with pytest.raises(ValueError, match='would never end'):
    make(reset_for_eval=True, repeat=True)


# Padding.


def test_short_batches_and_padding_are_filled_with_weight_0():
  source = Counting(batch_size=3, batch_padding_size=2, end=2, last_rows=1)
  first, last = source
  np.testing.assert_array_equal(first['x'], [0, 0, 0, 0, 0])
  np.testing.assert_array_equal(first['weights'], [1, 1, 1, 0, 0])
  np.testing.assert_array_equal(last['x'], [1, 0, 0, 0, 0])
  np.testing.assert_array_equal(last['weights'], [1, 0, 0, 0, 0])
  assert first['weights'].dtype == np.float32
  assert last['x'].dtype == np.int32


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
  ended = source.get_state()
  source.reset()
  assert numbers(source) == [0]
  # An ended input stays ended when it is restored.
  other = Counting(batch_size=2, end=1)
  other.set_state(ended)
  assert list(other) == []
  assert other.num_reads == 0


def out_of_range_error():
  kind = type('OutOfRangeError', (RuntimeError,), {})
  kind.__module__ = 'tensorflow.python.framework.errors_impl'
  return kind('End of sequence')


def test_tensorflows_end_is_an_end():
  class Ending(base.BaseInput):
    def get_next(self):
      raise out_of_range_error()

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


def test_resumed_is_uninterrupted_at_every_position():
  for position in range(5):
    source = Counting(batch_size=2)
    list(itertools.islice(source, position))
    other = Counting(batch_size=2)
    other.set_state(source.get_state())
    assert numbers(other) == list(range(position, 4))


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
  with pytest.raises(ValueError, match='no state of such an input'):
    Counting(batch_size=2).set_state(state)


def test_an_input_that_was_opened_to_be_resumed_is_closed():
  """Also where the start of the run fails, and no training loop closes it."""
  closed = []

  class Examples(Counting):
    def get_next(self):
      return regression.examples(0, self.batch_size)

    def close(self):
      closed.append(self)

  class Experiment(regression.Regression):
    def train_input(self):
      return Examples(batch_size=self.batch_size, is_training=True)

  rng = np.array([0, 7], np.uint32)
  first = Experiment('train', rng)
  first.step(global_step=0, rng=rng, writer=None)
  saved = jax.device_get(first.snapshot_state())
  first._close_input()
  closed.clear()
  second = Experiment('train', rng)
  second.restore_from_snapshot(saved)
  for step in range(2):
    second.step(global_step=step, rng=rng, writer=None)
  assert not closed
  del second
  gc.collect()
  assert closed


def test_save_and_restore(tmp_path):
  source = Counting(batch_size=2)
  path = tmp_path / 'state'
  source.save(path)
  list(itertools.islice(source, 2))
  source.save(str(path))
  other = Counting(batch_size=2)
  other.restore(path)
  assert numbers(other) == [2, 3]
  assert [p.name for p in tmp_path.iterdir()] == ['state']


def test_a_position_that_is_not_saved_says_so():
  source = Counting(batch_size=2, input_checkpointing_enabled=False)
  assert not source.saves_position
  with pytest.raises(ValueError, match='input_checkpointing_enabled=False'):
    source.get_state()

  class Bare(base.BaseInput):
    pass

  bare = Bare(batch_size=2)
  assert not bare.saves_position
  for call in (
    bare.get_state,
    lambda: bare.set_position(0),
    bare.get_next,
    lambda: bare.ids_to_strings(np.ones((1, 1), int), np.ones(1, int)),
  ):
    with pytest.raises(NotImplementedError, match='Bare'):
      call()


# Seeds.


def test_seeds_that_would_repeat_data_are_refused():
  fields = {'batch_size': 2, 'is_training': True, 'input_random_seed': 3}
  assert Counting(**fields).seed() == 3
  with pytest.raises(
    ValueError, match=r'Save it .input_checkpointing_enabled=True'
  ):
    Counting(**fields, input_checkpointing_enabled=False)
  with pytest.raises(ValueError, match=r'methods position\(\)'):
    base.from_generator(lambda: iter(()), **fields)
  # In evaluation the same data again is what is wanted.
  fields['is_training'] = False
  assert base.from_generator(lambda: iter(()), **fields).seed() == 3


def test_no_seed_is_0_unless_training_data_would_come_again():
  assert Counting(batch_size=2).seed() == 0
  assert Counting(batch_size=2, is_training=True).seed() == 0
  fresh = [
    Counting(batch_size=2, is_training=True, input_checkpointing_enabled=False)
    for _ in range(3)
  ]
  seeds = [source.seed() for source in fresh]
  assert len(set(seeds)) == 3
  assert [source.seed() for source in fresh] == seeds


def test_processes_that_act_as_one_host_agree_on_a_seed(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(distributed, 'of_chief', lambda seed: 7)
  source = Counting(
    batch_size=2,
    shard=base.Shard(0, 1),
    is_training=True,
    input_checkpointing_enabled=False,
  )
  assert source.seed() == 7


def test_a_generator_waits_for_no_other_process(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(distributed, 'of_chief', None)
  source = base.from_generator(
    lambda host_index: iter([]), batch_size=2, is_training=True
  )
  assert source.seed() == 0


# Generators.


def test_a_generator_function_is_an_input():
  source = base.from_generator(
    lambda: ({'x': np.full(2, i)} for i in range(3)), batch_size=2, name='gen'
  )
  assert numbers(source) == [0, 1, 2]
  assert list(source) == []
  source.reset()
  assert numbers(source) == [0, 1, 2]
  assert not source.saves_position
  with pytest.raises(
    NotImplementedError, match=r'gen: GeneratorInput does not override pos'
  ):
    source.get_state()


def test_a_generator_of_several_hosts_takes_which_it_is():
  def batches(host_index, num_hosts):
    for i in range(host_index, 6, num_hosts):
      yield {'x': np.full(2, i)}

  def read(host):
    return numbers(
      base.from_generator(
        batches, batch_size=2, infeed_host_index=host, num_infeed_hosts=3
      )
    )

  assert [read(host) for host in range(3)] == [[0, 3], [1, 4], [2, 5]]
  with pytest.raises(ValueError, match='all hosts would read the same'):
    base.from_generator(lambda: iter(()), batch_size=2, num_infeed_hosts=3)


def test_the_batch_of_each_host():
  assert base.per_host(12) == 12
  assert base.per_host(12, base.Shard(1, 4)) == 3
  with pytest.raises(errors.UsageError, match=r'10 .* 4 .* 12'):
    base.per_host(10, base.Shard(1, 4))


def test_a_failed_set_state_changes_nothing():
  class Refusing(Counting):
    def set_position(self, position):
      raise ValueError('no such place')

  source = Refusing(batch_size=1)
  state = source.get_state()
  next(source)
  with pytest.raises(ValueError, match='no such place'):
    source.set_state(state)
  assert numbers(source) == [1, 2, 3]
