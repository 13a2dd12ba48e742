"""Scikit-learn's handwritten digits as labeled images."""

from typing import Any

import numpy as np

from examples import digits as digits_lib
from jaxline import errors
from jaxline.inputs import indexed

# Disjoint splits.
SPLITS = ('train', 'validation')

# One in five digits is for validation.
_VALIDATION_EVERY = 5
# A digit's pixels are 0 to 16. This factor scales them to 0 to 240.
_DIGIT_SCALE = 15


def digits(*, split: str, **fields: Any) -> indexed.ArrayInput:
  """Makes an input of scikit-learn's handwritten digits: see `digits.load`.

  A batch has `image`, uint8 [b, 8, 8, 1]; `label`, int32 [b]; and `weights`,
  float32 [b], 0 for padding rows of the last batch of an epoch, 1 otherwise.
  uint8 takes the fewest bytes to send to the device, which normalizes the
  images (`resnets.ResNet`, `pixel_mean`).

  Args:
    split: 'train', or 'validation', which has every fifth image, 360 of 1797.
    **fields: Other fields of `indexed.ArrayInput`.
  """
  errors.check_names([split], SPLITS, 'split', 'the digits')
  images_NHWC, labels_N = digits_lib.load()
  is_validation_N = np.arange(len(labels_N)) % _VALIDATION_EVERY == 0
  chosen_N = is_validation_N == (split == 'validation')
  values = {
    'image': (images_NHWC[chosen_N] * _DIGIT_SCALE).astype(np.uint8),
    'label': labels_N[chosen_N],
    'weights': np.ones(chosen_N.sum(), np.float32),
  }
  return indexed.ArrayInput(values=values, **fields)
