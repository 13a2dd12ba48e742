"""Tests that synthetic data has known values on any number of hosts."""

import numpy as np
import pytest

from examples.pax.inputs import synthetic


def make(**fields):
  return synthetic.SyntheticInput(**{'batch_size': 4, 'length': 6} | fields)


def test_lm_cloud_data():
  batch = next(make(batch_size=2, length=3))
  ones = dict.fromkeys(
    ('ids', 'labels', 'weights', 'segment_ids'), [[1] * 3] * 2
  )
  assert {key: x.tolist() for key, x in batch.items()} == ones | {
    'paddings': [[0, 0, 0]] * 2,
    'segment_pos': [[0, 1, 2]] * 2,
  }
  floats = {key for key, x in batch.items() if x.dtype == np.float32}
  assert floats == {'weights', 'paddings'}
  assert all(batch[k].dtype == np.int32 for k in batch.keys() - floats)


def test_random_ids_are_uniform_and_labels_the_next():
  batch = next(make(batch_size=256, length=64, kind='random', vocab_size=5))
  np.testing.assert_array_equal(batch['ids'][:, 1:], batch['labels'][:, :-1])
  assert batch['ids'].dtype == batch['labels'].dtype == np.int32
  counts = np.bincount(batch['ids'].ravel(), minlength=5)
  assert counts.size == 5
  # Each value has a fifth of 16384 draws, within five standard deviations.
  np.testing.assert_allclose(counts / batch['ids'].size, 0.2, atol=0.016)


def test_seed_epoch_and_record_change_the_values():
  rows = set()
  for seed in (1, 2):
    source = make(batch_size=8, kind='random', size=8, input_random_seed=seed)
    rows |= {row.tobytes() for _ in range(2) for row in next(source)['ids']}
  assert len(rows) == 32


def test_values_stay_as_they_are():
  # NumPy's Philox gives these, with key (seed, 2**63) and counter (0, 0, 0, 0).
  fields = {'batch_size': 1, 'kind': 'random', 'input_random_seed': 0}
  batch = next(make(vocab_size=1000, **fields))
  assert batch['ids'].tolist() == [[884, 584, 651, 502, 15, 91]]
  assert batch['labels'][0, -1] == 577
  batch = next(make(length=None, spec={'x': ((2,), 'float32')}, **fields))
  np.testing.assert_allclose(batch['x'], [[-2.2390118, 0.9421790]], rtol=1e-6)


def test_spec_of_ones():
  spec = {'images': ((2, 3), 'bfloat16'), 'labels': ((), np.int8)}
  batch = next(make(length=None, spec=spec, batch_size=5, vocab_size=10))
  for key, (shape, dtype) in spec.items():
    assert batch[key].shape == (5, *shape)
    assert batch[key].dtype.name == np.dtype(dtype).name
    assert (batch[key] == 1).all()


def test_state_of_other_values_is_refused():
  state = make(kind='random', vocab_size=10).get_state()
  with pytest.raises(ValueError, match='vocab_size is 10 in the state and 11'):
    make(kind='random', vocab_size=11).set_state(state)
