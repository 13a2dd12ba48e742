"""Scikit-learn's handwritten digits: the split, the epochs, the batches.

1797 images of 8x8 pixels from 0 to 16, 10 classes, that come inside the
scikit-learn package (the test part of UCI's "Optical Recognition of Handwritten
Digits"). A copy of this file with another `load` trains on other images.

Shapes: N images of a split, D local devices, B images per device, H rows, W
columns, C channels.
"""

from collections.abc import Iterator
import functools
import itertools
from typing import NamedTuple
import zlib

import numpy as np

# One image in five of each class is for testing.
_TEST_EVERY = 5
_MAX_PIXEL = 16.0


class Split(NamedTuple):
  """Some labelled images.

  Attributes:
    x_NHWC: the images, float32 from 0 (background) to 1 (ink).
    y_N: their classes, int32 from 0.
  """

  x_NHWC: np.ndarray
  y_N: np.ndarray


class Batch(NamedTuple):
  """What one step or one evaluation step sees, by local device.

  Attributes:
    x_DBHWC: the images, float32, normalised.
    y_DB: their classes, int32.
    weight_DB: float32; 1 for an image, 0 for what only fills the batch.
  """

  x_DBHWC: np.ndarray
  y_DB: np.ndarray
  weight_DB: np.ndarray


@functools.cache
def load() -> tuple[Split, Split]:
  """Reads the digits and splits them, always in the same way.

  Of each class every fifth image, in the data's order and from its first one
  on, is for testing: the classes keep their shares, and neither a seed nor a
  version of scikit-learn can move an image from one split to the other. The
  same writers are in both splits, as in the usual random one.

  Returns:
    The training split of 1433 images and the test split of 364.

  Raises:
    ImportError: scikit-learn is not installed.
  """
  try:
    from sklearn import datasets  # Seconds to import, and needed here only.
  except ImportError as error:
    raise ImportError(
      'The digits come with scikit-learn, which is not installed. '
      "Install it with `pip install -e '.[image]'` or "
      '`pip install scikit-learn`.'
    ) from error
  digits = datasets.load_digits()
  x_NHWC = (digits.images[..., None] / _MAX_PIXEL).astype(np.float32)
  y_N = digits.target.astype(np.int32)
  is_test_N = np.zeros(len(y_N), bool)
  for label in np.unique(y_N):
    is_test_N[np.flatnonzero(y_N == label)[::_TEST_EVERY]] = True
  return (
    Split(x_NHWC[~is_test_N], y_N[~is_test_N]),
    Split(x_NHWC[is_test_N], y_N[is_test_N]),
  )


@functools.cache
def _moments() -> tuple[np.float32, np.float32]:
  """Returns the mean and deviation of a training pixel, never of a test one."""
  train, _ = load()
  return train.x_NHWC.mean(), train.x_NHWC.std()


def normalise(x_NHWC: np.ndarray) -> np.ndarray:
  """Brings pixels from [0, 1] to mean 0 and deviation 1."""
  mean, std = _moments()
  return (x_NHWC - mean) / std


def shift(x_NHWC: np.ndarray, offsets_N2: np.ndarray) -> np.ndarray:
  """Moves each image, and fills up with background.

  Args:
    x_NHWC: images whose background is 0.
    offsets_N2: pixels down and to the right, ints, possibly negative.

  Returns:
    The moved images, of the same shape.
  """
  reach = int(np.abs(offsets_N2).max(initial=0))
  _, height, width, _ = x_NHWC.shape
  x_NHWC = np.pad(x_NHWC, ((0, 0), (reach, reach), (reach, reach), (0, 0)))
  windows = np.lib.stride_tricks.sliding_window_view(
    x_NHWC, (height, width), axis=(1, 2)
  )
  down_N, right_N = reach - offsets_N2.T
  moved_NCHW = windows[np.arange(len(x_NHWC)), down_N, right_N]
  return np.moveaxis(moved_NCHW, 1, -1)


def train_batches(
  split: Split,
  *,
  seed: int,
  start_step: int,
  batch_size: int,
  max_shift: int,
  num_devices: int,
  process_index: int,
  process_count: int,
) -> Iterator[Batch]:
  """Yields the batches of the steps from `start_step` on, for ever.

  The images are one endless row, epoch after epoch, each a new order of the
  whole split; step n takes the n-th `batch_size` of it. So what a step sees is
  a function of the seed and the step: a resumed run repeats nothing and leaves
  nothing out, and the number of devices or processes changes nothing.

  Args:
    split: the training images.
    seed: any int; different seeds give different orders and shifts.
    start_step: the first step to make a batch for.
    batch_size: images per step over all processes.
    max_shift: images are moved by up to so many pixels in each direction.
    num_devices: D, the local devices.
    process_index: which process this is.
    process_count: among how many; each makes only its own part of a batch.

  Yields:
    This process's part of each batch, all weights 1.

  Raises:
    ValueError: the batch does not divide over the devices of all processes.
  """
  _check_divides(batch_size, num_devices * process_count)

  # An epoch's end and the next one's beginning may share a batch.
  @functools.lru_cache(maxsize=2)
  def epoch_plan(epoch: int) -> tuple[np.ndarray, np.ndarray]:
    entropy = [seed % 2**64, zlib.crc32(b'image'), epoch]
    rng = np.random.default_rng(entropy)
    count = len(split.y_N)
    return rng.permutation(count), rng.integers(
      -max_shift, max_shift, size=(count, 2), endpoint=True
    )

  local = batch_size // process_count
  for step in itertools.count(start_step):
    first = step * batch_size + process_index * local
    epochs, places = np.divmod(np.arange(first, first + local), len(split.y_N))
    parts = []
    for epoch in np.unique(epochs):
      order_N, offsets_N2 = epoch_plan(int(epoch))
      places_here = places[epochs == epoch]
      parts.append((order_N[places_here], offsets_N2[places_here]))
    indices, offsets = (np.concatenate(x) for x in zip(*parts, strict=True))
    yield _by_device(
      normalise(shift(split.x_NHWC[indices], offsets)),
      split.y_N[indices],
      np.ones(local, np.float32),
      num_devices,
    )


def eval_batches(
  split: Split,
  *,
  batch_size: int,
  num_devices: int,
  process_index: int,
  process_count: int,
) -> Iterator[Batch]:
  """Yields every image of a split once, in order.

  The last batch is filled up with images of weight 0, so that all batches of
  all processes have one shape: one compilation, and no process left waiting in
  a collective for one that has run out of images.

  Args:
    split: the images.
    batch_size: images per batch over all processes.
    num_devices: D, the local devices.
    process_index: which process this is.
    process_count: among how many.

  Yields:
    This process's part of each batch.

  Raises:
    ValueError: the batch does not divide over the devices of all processes.
  """
  _check_divides(batch_size, num_devices * process_count)
  local = batch_size // process_count
  count = len(split.y_N)
  for start in range(0, count, batch_size):
    first = start + process_index * local
    indices = np.arange(first, first + local)
    weights = (indices < count).astype(np.float32)
    indices = np.minimum(indices, count - 1)
    yield _by_device(
      normalise(split.x_NHWC[indices]), split.y_N[indices], weights, num_devices
    )


def _check_divides(batch_size: int, devices: int) -> None:
  if batch_size <= 0 or batch_size % devices:
    raise ValueError(
      f'Batch size {batch_size} does not divide over {devices} devices. '
      f'Use a multiple of {devices}.'
    )


def _by_device(
  x_NHWC: np.ndarray, y_N: np.ndarray, weight_N: np.ndarray, num_devices: int
) -> Batch:
  """Gives the arrays a leading local-device axis."""
  return Batch(
    *(x.reshape(num_devices, -1, *x.shape[1:]) for x in (x_NHWC, y_N, weight_N))
  )
