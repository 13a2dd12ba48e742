"""Splits and batches scikit-learn's handwritten digits.

`examples/digits.py` reads them. For your images, change `load` and keep the
rest.

Shapes: N images, D local devices, B images per device, H rows, W columns, C
channels.
"""

from collections.abc import Iterator
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple
import zlib

import numpy as np

from examples import digits

# One image in five of each class goes to the test split.
_TEST_EVERY = 5
_MAX_PIXEL = 16.0


class Split(NamedTuple):
  """Labeled images.

  Attributes:
    x_NHWC: the images, float32 from 0 (background) to 1 (ink).
    y_N: their classes, int32 from 0.
  """

  x_NHWC: np.ndarray
  y_N: np.ndarray


class Batch(NamedTuple):
  """The batch of a step of training or of evaluation.

  Attributes:
    x_DBHWC: the images, float32 from 0 to 1.
    y_DB: their classes, int32.
    weight_DB: float32; 1 for an image, 0 for padding.
  """

  x_DBHWC: np.ndarray
  y_DB: np.ndarray
  weight_DB: np.ndarray


@dataclasses.dataclass(frozen=True)
class Hosts:
  """The processes that share a batch.

  Attributes:
    devices: D, the number of local devices of each process.
    index: the index of this process.
    count: the number of processes.
  """

  devices: int
  index: int
  count: int

  def local_size(self, batch_size: int) -> int:
    """Returns the number of images in this process's part of each batch.

    Args:
      batch_size: images per batch over all processes.

    Raises:
      ValueError: the batch does not divide over the devices.
    """
    devices = self.devices * self.count
    if batch_size < 1 or batch_size % devices:
      raise ValueError(
        f'A batch of {batch_size} images does not divide over {devices}'
        f' devices. Use a multiple of {devices}.'
      )
    return batch_size // self.count


@functools.cache
def load() -> tuple[Split, Split]:
  """Reads the digits and splits them, always in the same way.

  Every fifth image of each class, starting with the first one, goes to the test
  split. So both splits have the same proportions of classes, and neither a seed
  nor a new version of scikit-learn moves an image from one split to the other.
  Both splits have digits of the same writers, as in a random split.

  Returns:
    The training split, 1433 images, and the test split, 364.

  Raises:
    ImportError: scikit-learn is not installed.
  """
  x_NHWC, y_N = digits.load()
  x_NHWC = (x_NHWC / _MAX_PIXEL).astype(np.float32)
  is_test_N = np.zeros(len(y_N), bool)
  for label in np.unique(y_N):
    is_test_N[np.flatnonzero(y_N == label)[::_TEST_EVERY]] = True
  return (
    Split(x_NHWC[~is_test_N], y_N[~is_test_N]),
    Split(x_NHWC[is_test_N], y_N[is_test_N]),
  )


def normalize(x_BHWC: Any) -> Any:
  """Scales images to mean 0 and deviation 1 over the training split.

  Call it on the device, so that batches hold images that can be displayed.
  """
  train, _ = load()
  return (x_BHWC - train.x_NHWC.mean()) / train.x_NHWC.std()


def train_batches(
  split: Split, *, seed: int, start_step: int, batch_size: int, hosts: Hosts
) -> Iterator[Batch]:
  """Yields the batches of all steps from `start_step` on, without an end.

  The images form an endless sequence of epochs. Each epoch is the whole split
  in a new order, and step n takes the n-th `batch_size` images of the sequence.
  The images of a step therefore depend only on the seed and the step: a resumed
  run repeats no image and skips none, even if it has a different number of
  devices or processes.

  Args:
    split: the training images.
    seed: an int of at least 0, which determines the orders.
    start_step: the step of the first batch.
    batch_size: images per step over all processes.
    hosts: the processes that share each batch.

  Yields:
    This process's part of each batch; all weights are 1.

  Raises:
    ValueError: the batch does not divide over the devices.
  """
  local_size = hosts.local_size(batch_size)
  for step in itertools.count(start_step):
    first = step * batch_size + hosts.index * local_size
    epochs, places = np.divmod(
      np.arange(first, first + local_size), len(split.y_N)
    )
    # There are several epochs if one ends inside the batch.
    indices = np.concatenate(
      [
        _epoch_order(seed, int(epoch), len(split.y_N))[places[epochs == epoch]]
        for epoch in np.unique(epochs)
      ]
    )
    yield _batch(split, indices, np.ones(local_size, np.float32), hosts)


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
  # The stream has a name, so that no other stream draws the same numbers.
  stream = [seed, zlib.crc32(b'image'), epoch]
  return np.random.default_rng(stream).permutation(count)


def eval_batches(
  split: Split, *, batch_size: int, hosts: Hosts
) -> Iterator[Batch]:
  """Yields every image of a split once, in order.

  The last batch is padded with images of weight 0. So all batches have one
  shape, which needs one compilation, and all processes have the same number of
  batches. Otherwise a process could hang in a sum over the devices because
  another one has no batch left.

  Args:
    split: the images.
    batch_size: images per batch over all processes.
    hosts: the processes that share each batch.

  Yields:
    This process's part of each batch.

  Raises:
    ValueError: the batch does not divide over the devices.
  """
  local_size = hosts.local_size(batch_size)
  count = len(split.y_N)
  for start in range(0, count, batch_size):
    first = start + hosts.index * local_size
    indices = np.arange(first, first + local_size)
    weights = (indices < count).astype(np.float32)
    yield _batch(split, np.minimum(indices, count - 1), weights, hosts)


def _batch(
  split: Split, indices: np.ndarray, weights: np.ndarray, hosts: Hosts
) -> Batch:
  """Selects images, and gives each array a leading axis of local devices."""
  arrays = split.x_NHWC[indices], split.y_N[indices], weights
  return Batch(*(x.reshape(hosts.devices, -1, *x.shape[1:]) for x in arrays))
