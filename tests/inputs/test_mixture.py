"""Tests of mixtures: exact proportions, any number of hosts, odd children."""

import dataclasses
import random

import numpy as np
import pytest

from jaxline.inputs import mixture as mixture_lib
from tests import sources as sources_lib


@dataclasses.dataclass(kw_only=True, eq=False)
class Numbers(sources_lib.Records):
  """Rows that say which source and which record of it they are."""

  source: int = 0
  size: int = 1000

  def read(self, records, epochs):
    batch = super().read(records, epochs)
    return batch | {'source': np.full(len(records), self.source)}


def numbers(sizes, **fields):
  """Returns children a, b, ... of so many rows a batch."""
  return {
    'abcdefgh'[i]: Numbers(batch_size=size, source=i, **fields)
    for i, size in enumerate(sizes)
  }


def mixture(sizes, weights, *, batch_size=5, **fields):
  children = numbers(sizes, **fields)
  weights = dict(zip(children, weights, strict=True))
  return mixture_lib.MixtureInput(
    inputs=children, weights=weights, batch_size=batch_size
  )


def test_mixture_keeps_its_proportions_and_the_order_of_its_children():
  rng = random.Random(0)
  for _ in range(12):
    k = rng.randint(2, 8)
    # From alike to thousands of times more, and in decimals.
    weights = [round(10 ** rng.uniform(-3, 1), 3) + 0.001 for _ in range(k)]
    sizes, rows = [rng.randint(1, 9) for _ in weights], rng.randint(1, 64)
    parent = mixture(sizes, weights, batch_size=rows)
    batches = [next(parent) for _ in range(1000 // rows)]
    of, x = (
      np.concatenate([b[key] for b in batches]) for key in ('source', 'x')
    )
    given = np.cumsum(of[:, None] == np.arange(k), 0)
    n = np.arange(1, len(of) + 1)[:, None]
    exact = n * np.array(weights) / sum(weights)
    assert (given - exact).max() <= 1
    assert (exact - given).max() < k
    for i in range(k):
      assert x[of == i].tolist() == [*range(given[-1, i])]


def test_decimals_are_what_they_say():
  # Ten rows are a period, which the nearest binary fractions are not.
  parent = mixture([3, 3, 3], [0.1, 0.2, 0.7], batch_size=10)
  periods = [next(parent)['source'].tolist() for _ in range(50)]
  assert periods == [periods[0]] * 50
  assert np.bincount(periods[0]).tolist() == [1, 2, 7]


def test_proportions_do_not_drift():
  parent = mixture([2, 2], [1.0, 1e-9], size=10)
  period = 10**9 + 1
  parent.set_position(10**6 * period - 1)
  batch = next(parent)
  assert np.bincount(batch['source'], minlength=2).tolist() == [4, 1]
  epochs = dict(zip(batch['source'].tolist(), batch['epoch'], strict=True))
  assert epochs[0] == 10**6 * 10**9 // 10
  assert epochs[1] == (10**6 - 1) // 10


def test_mixture_refuses_other_proportions_and_children():
  state = mixture([4, 4], [1, 3]).get_state()
  with pytest.raises(ValueError, match='weights is'):
    mixture([4, 4], [1, 2]).set_state(state)
  with pytest.raises(ValueError, match=r'a\.num_records is 1000 in'):
    mixture([4, 4], [1, 3], size=9).set_state(state)
  mixture([4, 4], [0.25, 0.75]).set_state(state)


def test_children_that_differ_are_refused():
  class Changed(Numbers):
    def read(self, records, epochs):
      return self.change(super().read(records, epochs))

  for change, error in (
    (lambda batch: {**batch, 'y': batch['source']}, ValueError),
    (lambda batch: {**batch, 'x': batch['x'].astype(np.int32)}, TypeError),
    (lambda batch: {**batch, 'x': batch['x'][:, None]}, ValueError),
  ):
    child = Changed(batch_size=4)
    child.change = change
    parent = mixture_lib.MixtureInput(
      inputs={'a': Numbers(batch_size=4), 'b': child},
      weights={'a': 1, 'b': 1},
      batch_size=4,
    )
    with pytest.raises(error) as caught:
      next(parent)
    said = 'While MixtureInput read b: file f0, row 0.'
    assert caught.value.__notes__[0] == said


def test_mixture_refuses():
  def with_child(kind=Numbers, **fields):
    return {'inputs': numbers([2]) | {'b': kind(batch_size=2, **fields)}}

  given = {'inputs': numbers([2, 2]), 'weights': {'a': 1, 'b': 1}}
  for fields, message in (
    ({'weights': {'a': 1}}, 'weights'),
    ({'weights': {'a': 1, 'b': 0}}, 'weights'),
    ({'input_random_seed': 1}, 'input_random_seed'),
    ({'reset_for_eval': True}, 'repeat'),
    ({'shuffle': True}, 'shuffle'),
    # Children that cannot be mixed.
    (with_child(repeat=False), 'b of .*, a Numbers'),
    (with_child(sources_lib.Counting), 'b of .*, a Counting'),
    (with_child(is_training=True), 'b of .*is_training'),
    (with_child(input_checkpointing_enabled=False), 'b of .*_enabled'),
  ):
    with pytest.raises(ValueError, match=message):
      mixture_lib.MixtureInput(**(given | {'batch_size': 2} | fields))
