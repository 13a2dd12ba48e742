"""Tests of the sequences to copy or reverse."""

import numpy as np
import pytest

from examples.pax.tasks.synthetic import input as synthetic_input


def _input(**fields):
  fields = {'batch_size': 200, 'max_length': 4, 'vocab_size': 7} | fields
  return synthetic_input.SequenceInput(**fields)


def _sources(batch):
  """Returns a batch's sources as tuples."""
  return [
    tuple(row[padding == 0].tolist())
    for row, padding in zip(
      batch['src']['ids'], batch['src']['paddings'], strict=True
    )
  ]


@pytest.mark.parametrize('reverse', [True, False])
def test_a_target_is_its_source(reverse):
  data = _input(reverse=reverse, is_training=True, min_length=2)
  batch = next(data)
  sources = _sources(batch)
  for source, ids, labels, weights in zip(
    sources,
    batch['tgt']['ids'],
    batch['tgt']['labels'],
    batch['tgt']['weights'],
    strict=True,
  ):
    target = [*(source[::-1] if reverse else source), 1]
    assert labels.tolist() == target + [0] * (5 - len(target))
    assert ids.tolist() == [0, *labels[:-1]]
    assert weights.tolist() == [i < len(target) for i in range(5)]
  np.testing.assert_array_equal(batch['weights'], batch['tgt']['weights'])
  # All lengths and symbols occur equally often.
  lengths = [len(source) for source in sources]
  counts = np.bincount(lengths, minlength=5)
  assert counts[:2].tolist() == [0, 0]
  assert counts[2:].min() > 45
  symbols = np.bincount(np.concatenate(sources), minlength=7)
  assert symbols[:2].tolist() == [0, 0]
  assert symbols[2:].min() > 80
  assert len(symbols) == 7


def test_records_are_those_of_the_seed_and_the_split():
  def sources(**fields):
    fields = {'max_length': 12, 'min_length': 8, 'shuffle': False} | fields
    return _sources(next(_input(is_training=True, **fields)))

  whole = sources(input_random_seed=3)
  halves = [
    sources(
      input_random_seed=3,
      batch_size=100,
      num_infeed_hosts=2,
      infeed_host_index=i,
    )
    for i in (0, 1)
  ]
  assert halves[0] + halves[1] == whole
  assert not {*whole} & {*sources(input_random_seed=4)}
  held_out = _input(
    max_length=12, min_length=8, shuffle=False, input_random_seed=3
  )
  assert not {*whole} & {*_sources(next(held_out))}


@pytest.mark.parametrize(
  ('fields', 'said'),
  [
    ({'min_length': 0}, 'min_length is 0; expected 1 to max_length, .* 4'),
    ({'min_length': 5}, 'min_length is 5'),
    ({'vocab_size': 2}, 'vocab_size is 2; expected more than the 2'),
  ],
)
def test_what_makes_no_sequences_is_refused(fields, said):
  with pytest.raises(ValueError, match=said):
    _input(**fields)
