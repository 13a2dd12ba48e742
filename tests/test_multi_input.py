"""Tests of inputs of inputs: side by side, and row by row."""

import dataclasses
import json
import random

import numpy as np
import pytest

from jaxline.inputs import base
from jaxline.inputs import indexed
from jaxline.inputs import multi
from jaxline.inputs import synthetic


@dataclasses.dataclass(kw_only=True, eq=False)
class Numbers(indexed.IndexedInput):
  """Rows that say which source and which record of it they are."""

  source: int = 0
  size: int = 1000
  closed: bool = False

  def num_records(self):
    return self.size

  def read(self, records, epochs):
    if self.source < 0:
      raise OSError('the disk is gone')
    return {
      'x': np.stack([records, epochs], 1),
      'source': np.full(len(records), self.source),
    }

  def ids_to_strings(self, ids, lengths, key=None):
    return [f'{self.source} {key} {ids.tolist()} {lengths.tolist()}']

  def close(self):
    super().close()
    self.closed = True


class Changed(Numbers):
  """What a batch of `Numbers` becomes is given as `change`."""

  def read(self, records, epochs):
    return dict(self.change(super().read(records, epochs)))


def changed(change, **fields):
  return type('Changed', (Changed,), {'change': staticmethod(change)})(**fields)


def numbers(sizes, **fields):
  """Returns children a, b, ... of so many rows a batch."""
  return {
    'abcdefgh'[i]: Numbers(batch_size=size, source=i, **fields)
    for i, size in enumerate(sizes)
  }


def assert_same(actual, expected):
  assert list(actual) == list(expected)
  for one, other in zip(actual.values(), expected.values(), strict=True):
    if isinstance(other, dict):
      assert_same(one, other)
    else:
      assert one.dtype == other.dtype
      np.testing.assert_array_equal(one, other)


def on_hosts(hosts, make):
  return [
    make(num_infeed_hosts=hosts, infeed_host_index=h) for h in range(hosts)
  ]


# Side by side.


def test_multi_reshapes_to_the_common_divisor():
  batch = next(multi.MultiInput(inputs=numbers([4, 6])))
  assert batch['a']['x'].shape == (2, 2, 2)
  assert batch['b']['source'].shape == (2, 3)
  assert batch['a']['x'][..., 0].tolist() == [[0, 1], [2, 3]]
  assert batch['b']['x'][..., 0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_multi_has_the_hosts_and_batch_size_of_its_children():
  children = numbers([8, 12], num_infeed_hosts=4, infeed_host_index=2)
  parent = multi.MultiInput(inputs=children)
  assert (parent.infeed_host_index, parent.num_infeed_hosts) == (2, 4)
  assert parent.batch_size == 4
  assert parent.get_global_batch_size() == 16
  assert next(parent)['a']['x'][0, :, 0].tolist() == [16, 17]
  with pytest.raises(
    ValueError, match=r'The input a .* has infeed_host_index=2; expected 0'
  ):
    multi.MultiInput(inputs=children, num_infeed_hosts=0, infeed_host_index=0)
  children['c'] = Numbers(batch_size=4)
  with pytest.raises(
    ValueError, match=r'The input c .* has infeed_host_index=0; expected 2'
  ):
    multi.MultiInput(inputs=children)


def test_multi_ends_with_its_first_child():
  children = numbers([4, 4], size=16)
  children['b'] = Numbers(batch_size=4, size=8, repeat=False)
  parent = multi.MultiInput(inputs=children, eval_loop_num_batches=3)
  assert len(list(parent)) == 2
  with pytest.raises(StopIteration):
    next(parent)
  with pytest.raises(ValueError, match='ended after 0 of'):
    list(parent.eval_batches())


def test_multi_pads_and_peeks():
  parent = multi.MultiInput(inputs=numbers([4, 2]), batch_padding_size=1)
  state = parent.get_state()
  peeked = parent.peek_padded()
  assert peeked['a']['x'].shape == (3, 2, 2)
  assert peeked['weights'].tolist() == [1, 1, 0]
  assert parent.get_state() == state
  assert_same(next(parent), peeked)
  assert parent.get_state() != state


def test_multi_refuses_other_hosts_where_a_child_does():
  class Fixed(Numbers):
    ANY_NUMBER_OF_HOSTS = False

  fixed = [
    multi.MultiInput(
      inputs={**numbers([4], **host), 'b': Fixed(batch_size=4, **host)}
    )
    for host in ({}, {'num_infeed_hosts': 2, 'infeed_host_index': 0})
  ]
  with pytest.raises(
    ValueError, match='num_infeed_hosts is 1 in the state and 2'
  ):
    fixed[1].set_state(fixed[0].get_state())


def test_multi_refuses_the_state_of_other_children():
  state = multi.MultiInput(inputs=numbers([4])).get_state()
  with pytest.raises(ValueError, match='inputs is'):
    multi.MultiInput(inputs=numbers([4, 4])).set_state(state)
  with pytest.raises(
    ValueError, match='num_records is 1000 in the state and 9'
  ):
    multi.MultiInput(inputs=numbers([4], size=9)).set_state(state)


def test_multi_finds_the_child_that_has_the_tokens():
  parent = multi.MultiInput(inputs=numbers([2, 2]))
  ids, lengths = np.array([[3]]), np.array([1])
  assert parent.ids_to_strings(ids, lengths, 'b') == ['1 None [[3]] [1]']
  assert parent.ids_to_strings(ids, lengths, 'a/ids') == ['0 ids [[3]] [1]']
  for key in None, 'c':
    with pytest.raises(ValueError, match=r"expected one of \['a', 'b'\]"):
      parent.ids_to_strings(ids, lengths, key)
  alone = multi.MultiInput(inputs=numbers([2]))
  assert alone.ids_to_strings(ids, lengths) == ['0 None [[3]] [1]']


def test_errors_name_the_child():
  children = {'a': Numbers(batch_size=2), 'b': Numbers(batch_size=2, source=-1)}
  for parent in (
    multi.MultiInput(inputs=children),
    multi.MixtureInput(inputs=children, weights={'a': 1, 'b': 1}, batch_size=2),
  ):
    with pytest.raises(OSError, match='the disk is gone') as caught:
      next(parent)
    notes = '\n'.join(caught.value.__notes__)
    assert f'It was {parent.name}, reading ' in notes
    assert 'While Numbers read record 0.' in notes


def test_closing_closes_all_children():
  children = numbers([2, 2])
  multi.MultiInput(inputs=children).close()
  assert all(child.closed for child in children.values())


def test_closing_closes_all_children_also_if_one_raises():
  class Broken(Numbers):
    def close(self):
      super().close()
      raise OSError('broken')

  children = {n: Broken(batch_size=2) for n in 'abc'}
  with pytest.raises(OSError, match='broken'):
    multi.MultiInput(inputs=children).close()
  assert all(child.closed for child in children.values())


class Unsaved(base.BaseInput):
  """An input without a position."""

  def get_next(self):
    return {'x': np.zeros((self.batch_size, 2), np.int64)}


def test_position_is_saved_where_all_children_can():
  saved, unsaved = Numbers(batch_size=2), Unsaved(batch_size=2)
  assert multi.MultiInput(inputs={'a': saved}).saves_position
  parent = multi.MultiInput(inputs={'a': saved, 'b': unsaved})
  assert not parent.saves_position
  assert parent.peek_padded() is not None
  with pytest.raises(
    NotImplementedError, match='Unsaved does not override position'
  ):
    parent.get_state()


def test_data_that_would_repeat_is_refused():
  training = {'is_training': True, 'batch_size': 2}
  with pytest.raises(
    ValueError, match=r"or not all .* \['a'\] would give the same"
  ):
    multi.MultiInput(
      inputs={'a': Numbers(**training), 'b': Unsaved(**training)},
      is_training=True,
    )
  with pytest.raises(
    ValueError, match='has input_checkpointing_enabled=False or'
  ):
    multi.MultiInput(
      inputs={'a': Numbers(**training)},
      is_training=True,
      input_checkpointing_enabled=False,
    )
  fresh = Numbers(**training, input_checkpointing_enabled=False)
  multi.MultiInput(
    inputs={'a': fresh, 'b': Unsaved(**training)}, is_training=True
  )


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'inputs': {}}, 'expected inputs by name'),
    ({'inputs': numbers([2, 2]), 'batch_size': 4}, 'divisor, 2, of those'),
    (
      {'inputs': {'weights': Numbers(batch_size=2)}},
      "inputs named .*not 'weights'",
    ),
    (
      {'inputs': numbers([2]), 'input_random_seed': 1},
      'expected None: set the seeds',
    ),
    ({'inputs': numbers([2], is_training=True)}, 'a .* has is_training=True;'),
    (
      {'inputs': numbers([2], batch_padding_size=1)},
      'has batch_padding_size=1',
    ),
    (
      {
        'inputs': numbers([2, 2], reset_for_eval=True),
        'reset_for_eval': True,
      },
      'reset_for_eval is True; expected False with 2 inputs',
    ),
    ({'inputs': dict.fromkeys('ab', Numbers(batch_size=2))}, 'an input twice'),
  ],
)
def test_multi_refuses(fields, message):
  with pytest.raises(ValueError, match=message):
    multi.MultiInput(**fields)


# Row by row.


def mixture(sizes, weights, *, batch_size=5, host=None, **fields):
  children = numbers(sizes, **(host or {}), **fields)
  return multi.MixtureInput(
    inputs=children,
    weights=dict(zip(children, weights, strict=True)),
    batch_size=batch_size,
    is_training=fields.get('is_training', False),
  )


def sources(parent, num_batches):
  return np.concatenate([next(parent)['source'] for _ in range(num_batches)])


def test_mixture_of_one_and_three():
  assert sources(mixture([4, 4], [1, 3]), 4).tolist() == [0, 1, 1, 1] * 5


@pytest.mark.parametrize('seed', range(12))
def test_mixture_keeps_its_proportions(seed):
  rng = random.Random(seed)
  k = rng.randint(2, 8)
  # From alike to thousands of times more, and in decimals.
  weights = [round(10 ** rng.uniform(-3, 1), 3) + 0.001 for _ in range(k)]
  parent = mixture(
    [rng.randint(1, 9) for _ in weights], weights, batch_size=rng.randint(1, 64)
  )
  of = sources(parent, 3000 // parent.batch_size)
  given = np.cumsum(of[:, None] == np.arange(k), 0)
  n = np.arange(1, len(of) + 1)[:, None]
  exact = n * np.array(weights) / sum(weights)
  assert (given - exact).max() <= 1
  assert (exact - given).max() < k


def test_decimals_are_what_they_say():
  # Ten rows are a period, which the nearest binary fractions are not.
  of = sources(mixture([3, 3, 3], [0.1, 0.2, 0.7], batch_size=10), 50)
  for period in of.reshape(50, 10):
    assert period.tolist() == of[:10].tolist()
    assert np.bincount(period).tolist() == [1, 2, 7]
  # So a position in one is a position in the other.
  mixture([3, 3, 3], [1, 2, 7], batch_size=10).set_state(
    mixture([3, 3, 3], [0.1, 0.2, 0.7], batch_size=10).get_state()
  )


def test_proportions_do_not_drift():
  parent = mixture([2, 2], [1.0, 1e-9], size=10)
  period = 10**9 + 1
  parent.set_position({'records': 10**6 * period - 1})
  batch = next(parent)
  assert np.bincount(batch['source'], minlength=2).tolist() == [4, 1]
  epochs = dict(zip(batch['source'].tolist(), batch['x'][:, 1], strict=True))
  assert epochs[0] == 10**6 * 10**9 // 10
  assert epochs[1] == (10**6 - 1) // 10


def test_mixture_takes_the_rows_of_its_children_in_order():
  parent = mixture([3, 7], [2, 1], batch_size=6)
  rows = [next(parent) for _ in range(10)]
  of, x = (np.concatenate([r[k] for r in rows]) for k in ('source', 'x'))
  assert x[of == 0][:, 0].tolist() == list(range(40))
  assert x[of == 1][:, 0].tolist() == list(range(20))


def test_one_child_is_a_mixture():
  assert next(mixture([3], [0.3]))['x'][:, 0].tolist() == list(range(5))


def test_order_in_which_children_are_written_does_not_matter():
  children = numbers([3, 3, 3])
  weights = {'a': 1, 'b': 1, 'c': 1}
  one = multi.MixtureInput(inputs=children, weights=weights, batch_size=6)
  other = multi.MixtureInput(
    inputs=dict(reversed(numbers([3, 3, 3]).items())),
    weights=weights,
    batch_size=6,
  )
  assert_same(next(one), next(other))


def test_mixture_refuses_other_proportions_and_children():
  state = mixture([4, 4], [1, 3]).get_state()
  with pytest.raises(ValueError, match='weights is'):
    mixture([4, 4], [1, 2]).set_state(state)
  with pytest.raises(ValueError, match=r'a\.num_records is 1000 in'):
    mixture([4, 4], [1, 3], size=9).set_state(state)
  mixture([4, 4], [0.25, 0.75]).set_state(state)


@pytest.mark.parametrize('kind', ['ones', 'random'])
def test_a_mixture_is_void_where_the_order_of_a_child_changed(kind):
  def make():
    child = synthetic.SyntheticInput(batch_size=4, length=6, kind=kind)
    return multi.MixtureInput(
      inputs={'a': child}, weights={'a': 1}, batch_size=4
    )

  # Of a version in which synthetic records had no version of their order.
  state = json.loads(make().get_state())
  has_changed = state['identity'].pop('a.order_version', None) is not None
  assert has_changed == (kind == 'random')
  old = json.dumps(state).encode()
  if not has_changed:
    make().set_state(old)
    return
  with pytest.raises(base.OldPositionError, match='1, 2 in the state and 2, 2'):
    make().set_state(old)


def test_a_mixture_can_be_part_of_a_mixture():
  inner = mixture([4, 4], [1, 1])
  parent = multi.MixtureInput(
    inputs={'inner': inner, 'other': Numbers(batch_size=4, source=2)},
    weights={'inner': 1, 'other': 1},
    batch_size=8,
  )
  assert np.bincount(next(parent)['source']).tolist() == [2, 2, 4]


@pytest.mark.process
def test_workers_read_a_mixture():
  expected = mixture([4, 4], [1, 2], is_training=True)
  parent = mixture([4, 4], [1, 2], is_training=True)
  parent.num_workers = 1
  for _ in range(3):
    assert_same(next(parent), next(expected))
  parent.close()


def test_mixture_starts_anew_after_reset():
  parent = mixture([4, 3], [1, 1])
  expected = [next(parent) for _ in range(2)]
  parent.reset()
  for batch in expected:
    assert_same(next(parent), batch)


def test_mixture_pads():
  children = numbers([4, 4])
  parent = multi.MixtureInput(
    inputs=children,
    weights={'a': 1, 'b': 1},
    batch_size=3,
    batch_padding_size=2,
  )
  assert next(parent)['weights'].tolist() == [1, 1, 1, 0, 0]


class Late(Numbers):
  """Does more than to read records."""

  def get_next(self):
    return super().get_next()


@pytest.mark.parametrize(
  ('child', 'message'),
  [
    (Numbers(batch_size=4, repeat=False), 'b of .*, a Numbers, .*repeat=True'),
    (Numbers(batch_size=4, num_workers=1), 'b of .*without num_thr.*num_work'),
    (
      Unsaved(batch_size=4),
      'b of MixtureInput, a Unsaved, cannot give any rec',
    ),
    (Late(batch_size=4), 'a Late, .* a get_next of its own. Mix streams insid'),
  ],
)
def test_children_without_numbers_are_refused(child, message):
  with pytest.raises(ValueError, match=message):
    multi.MixtureInput(
      inputs={'a': Numbers(batch_size=4), 'b': child},
      weights={'a': 1, 'b': 1},
      batch_size=4,
    )


def test_weights_are_added_where_only_some_have_them():
  def weighted(batch):
    return {
      **batch,
      'weights': np.full((len(batch['source']), 3), 0.5, np.float32),
    }

  parent = multi.MixtureInput(
    inputs={
      'a': Numbers(batch_size=4),
      'b': changed(weighted, batch_size=4, source=1),
    },
    weights={'a': 1, 'b': 1},
    batch_size=4,
  )
  batch = next(parent)
  assert batch['weights'].shape == (4, 3)
  np.testing.assert_array_equal(
    batch['weights'],
    np.where(batch['source'], 0.5, 1)[:, None] * np.ones((1, 3)),
  )
  assert batch['weights'].dtype == np.float32


@pytest.mark.parametrize(
  ('change', 'error', 'message'),
  [
    (lambda batch: {'x': batch['x']}, ValueError, r'key sets is\s+\W*source'),
    (
      lambda batch: {**batch, 'y': batch['source']},
      ValueError,
      r'key sets is\s+\W*y',
    ),
    (
      lambda batch: {**batch, 'x': batch['x'].astype(np.int32)},
      TypeError,
      r"Cannot cast .* from dtype\('int32'\) to dtype\('int64'\)",
    ),
    (
      lambda batch: {**batch, 'x': batch['x'][:, :1]},
      ValueError,
      'index 0 has size 2 and the array at index 2 has size 1',
    ),
    (
      lambda batch: {**batch, 'x': {'y': batch['x']}},
      ValueError,
      'must have same number of dimensions',
    ),
  ],
)
def test_children_that_differ_are_refused(change, error, message):
  parent = multi.MixtureInput(
    inputs={'a': Numbers(batch_size=4), 'b': changed(change, batch_size=4)},
    weights={'a': 1, 'b': 1},
    batch_size=4,
  )
  with pytest.raises(error, match=message) as caught:
    next(parent)
  assert caught.value.__notes__[0] == 'While MixtureInput read b: record 0.'


def test_a_child_that_changes_is_refused():
  def change(batch):
    late = batch['x'][0, 0] >= 4
    return {**batch, 'x': batch['x'].astype(np.int32 if late else np.int64)}

  parent = multi.MixtureInput(
    inputs={'a': changed(change, batch_size=4)},
    weights={'a': 1},
    batch_size=4,
  )
  next(parent)
  with pytest.raises(TypeError, match=r"from dtype\('int32'\)"):
    next(parent)


def test_nested_batches_are_mixed():
  def nest(batch):
    return {'src': batch, 'source': batch['source']}

  parent = multi.MixtureInput(
    inputs={
      n: changed(nest, batch_size=3, source=i) for i, n in enumerate('ab')
    },
    weights={'a': 1, 'b': 1},
    batch_size=4,
  )
  batch = next(parent)
  np.testing.assert_array_equal(batch['src']['source'], batch['source'])
  assert sorted(batch['source']) == [0, 0, 1, 1]


def test_mixture_speaks_its_first_child():
  parent = mixture([2, 2], [1, 1])
  assert parent.ids_to_strings(np.array([[1]]), np.array([1]), 'ids') == [
    '0 ids [[1]] [1]'
  ]


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'weights': {'a': 1}}, r"expected a number for each of \['a', 'b'\]"),
    ({'weights': {'a': 1, 'b': 1, 'c': 1}}, 'expected a number for each'),
    ({'weights': {'a': 1, 'b': 0}}, "'b': 0}; expected positive numbers"),
    ({'weights': {'a': 1, 'b': float('nan')}}, "Invalid .*: 'nan'"),
    ({'weights': {'a': 1, 'b': float('inf')}}, "Invalid .*: 'inf'"),
    ({'batch_size': 0}, 'batch_size is 0; expected'),
    (
      {'reset_for_eval': True, 'inputs': numbers([2, 2], reset_for_eval=True)},
      'a mixture has no epoch',
    ),
  ],
)
def test_mixture_refuses(fields, message):
  defaults = {
    'inputs': numbers([2, 2]),
    'weights': {'a': 1, 'b': 1},
    'batch_size': 2,
  }
  with pytest.raises(ValueError, match=message):
    multi.MixtureInput(**(defaults | fields))
