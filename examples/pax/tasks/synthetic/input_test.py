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
  batch = next(_input(reverse=reverse, is_training=True, min_length=2))
  sources, tgt = _sources(batch), batch['tgt']
  for source, ids, labels, weights in zip(
    sources, tgt['ids'], tgt['labels'], tgt['weights'], strict=True
  ):
    target = [*(source[::-1] if reverse else source), 1]
    assert labels.tolist() == target + [0] * (5 - len(target))
    assert ids.tolist() == [0, *labels[:-1]]
    assert weights.tolist() == [i < len(target) for i in range(5)]
  np.testing.assert_array_equal(batch['weights'], tgt['weights'])
  # All lengths and symbols occur equally often.
  lengths = np.bincount([len(source) for source in sources], minlength=5)
  symbols = np.bincount(np.concatenate(sources), minlength=7)
  assert len(symbols) == 7
  for counts, least in (lengths, 45), (symbols, 80):
    assert counts[:2].tolist() == [0, 0]
    assert counts[2:].min() > least


def test_records_are_those_of_the_seed_and_the_split():
  def sources(**fields):
    fields = {'is_training': True, 'input_random_seed': 3} | fields
    return _sources(
      next(_input(max_length=12, min_length=8, shuffle=False, **fields))
    )

  whole = sources()
  hosts = {'batch_size': 100, 'num_infeed_hosts': 2}
  halves = [sources(**hosts, infeed_host_index=i) for i in (0, 1)]
  assert halves[0] + halves[1] == whole
  for other in {'input_random_seed': 4}, {'is_training': False}:
    assert not {*whole} & {*sources(**other)}


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
