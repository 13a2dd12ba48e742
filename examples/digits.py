"""Loads scikit-learn's handwritten digits, for examples that train on images.

The scikit-learn package contains 1797 images of 8x8 pixels in 10 classes: the
test part of UCI's 'Optical Recognition of Handwritten Digits'.
"""

import functools

import numpy as np


@functools.cache
def load() -> tuple[np.ndarray, np.ndarray]:
  """Returns the images and their classes, in the order of the data set.

  Returns:
    Images, float64 [1797, 8, 8, 1], with integer values from 0 (background) to
    16 (ink); and classes, int32 [1797], from 0 to 9.

  Raises:
    ImportError: scikit-learn is not installed.
  """
  try:
    from sklearn import datasets  # Takes seconds to import.
  except ImportError as e:
    raise ImportError(
      'The digits come with scikit-learn, which is not installed. Run'
      " pip install -e '.[image]' (or pip install scikit-learn)."
    ) from e
  digits = datasets.load_digits()
  return digits.images[..., None], digits.target.astype(np.int32)
