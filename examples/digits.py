"""Scikit-learn's handwritten digits, for the examples that train on images.

1797 images of 8x8 pixels, 10 classes, which come inside the scikit-learn
package: the test part of UCI's 'Optical Recognition of Handwritten Digits'.
"""

import functools

import numpy as np


@functools.cache
def load() -> tuple[np.ndarray, np.ndarray]:
  """Returns the images and their classes, in the data's order.

  Returns:
    [1797, 8, 8, 1] float64, whole numbers from 0 (background) to 16 (ink); and
    [1797] int32, from 0 to 9.

  Raises:
    ImportError: scikit-learn is not installed.
  """
  try:
    from sklearn import datasets  # Takes seconds to import.
  except ImportError as e:
    raise ImportError(
      'The digits come with scikit-learn, which is not installed. Install it:'
      " pip install -e '.[image]' (or: pip install scikit-learn)."
    ) from e
  digits = datasets.load_digits()
  return digits.images[..., None], digits.target.astype(np.int32)
