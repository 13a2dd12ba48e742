"""Tests that each digit is in exactly one of two splits."""

import numpy as np
import pytest

from examples.pax.tasks.vision import input as vision_input

ONE_EPOCH = {'reset_for_eval': True, 'eval_loop_num_batches': None}


def test_digits_are_scikit_learns():
  datasets = pytest.importorskip('sklearn.datasets')
  digits = datasets.load_digits()
  counts = {}
  for split in vision_input.SPLITS:
    source = vision_input.digits(split=split, batch_size=360, **ONE_EPOCH)
    counts[split] = 0
    for batch in source.eval_batches():
      real = batch['weights'] > 0
      counts[split] += real.sum()
      for image, label in zip(
        batch['image'][real], batch['label'][real], strict=True
      ):
        places = np.flatnonzero(
          (digits.images == image[..., 0] // 15).all((1, 2))
        )
        assert label in digits.target[places]
        assert np.any((places % 5 == 0) == (split == 'validation'))
  assert counts == {'train': 1437, 'validation': 360}
  with pytest.raises(ValueError, match="'train', 'validation'"):
    vision_input.digits(split='test', batch_size=2)
