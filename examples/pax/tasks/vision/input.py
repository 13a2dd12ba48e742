"""Labelled images: synthetic, scikit-learn's digits, or arrays in a folder.

Each gives batches of `image`, uint8 [b, H, W, C], which takes the fewest bytes
to send and is normalised on the device (`resnets.ResNet`, `pixel_mean`);
`label`, int32 [b]; and `weights`, float32 [b], 0 for padding rows of the last
batch of an epoch, else 1.

Shapes: b rows, H image rows, W columns, C channels, N records.
"""

import abc
import dataclasses
import functools
import hashlib
import itertools
import pathlib
from typing import Any
import zlib

import numpy as np

from examples import digits
from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import indexed

# Two splits that share no record.
SPLITS = ('train', 'validation')

# Of the digits, one in five is for validation.
_VALIDATION_EVERY = 5
# A digit's pixels are 0 to 16; this brings them near to 255.
_DIGIT_SCALE = 15
# Rows and columns of a class's pattern in synthetic images.
_PATTERN = 4


def _draw(number: int, what: str, seed: int, *place: int) -> np.ndarray:
  """Returns random numbers, uint64 [number].

  Args:
    number: how many.
    what: the name of the stream.
    seed: its seed.
    *place: two numbers; each pair has draws of its own.
  """
  # Of NumPy's generators that one whose raw numbers never change.
  key = np.array([zlib.crc32(what.encode()), seed % 2**64], np.uint64)
  counter = np.array([0, 0, *place], np.uint64)
  return np.random.Philox(key=key, counter=counter).random_raw(number)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Images(indexed.IndexedInput):
  """What the inputs here share.

  Attributes:
    split: 'train' or 'validation'.
  """

  split: str = 'train'

  def __post_init__(self) -> None:
    super().__post_init__()
    errors.check_names([self.split], SPLITS, 'split', self.name)

  @abc.abstractmethod
  def record(self, number: int, epoch: int) -> tuple[np.ndarray, int]:
    """Returns an image [H, W, C] and its label."""

  def read(self, records: np.ndarray, epochs: np.ndarray) -> base.Batch:
    """Returns the records [b, ...]."""
    pairs = zip(records.tolist(), epochs.tolist(), strict=True)
    images, labels = zip(*itertools.starmap(self.record, pairs), strict=True)
    return base.Batch(
      image=np.stack(images),
      label=np.array(labels, np.int32),
      weights=np.ones(len(images), np.float32),
    )


@dataclasses.dataclass(kw_only=True, eq=False)
class SyntheticImages(_Images):
  """Random images in which a network can learn to see the class.

  Each class has a pattern of 4x4 coloured fields; an image is half its class's
  pattern and half noise. What a record is follows from its number and the seed.

  Attributes:
    image_shape: H, W and C.
    num_classes: K; labels are from 0 to K - 1.
    size: N, records of an epoch.
  """

  image_shape: tuple[int, int, int] = (224, 224, 3)
  num_classes: int = 1000
  size: int = 1_281_167

  def num_records(self) -> int:
    """Returns N."""
    return self.size

  def data_identity(self) -> dict[str, Any]:
    """Returns what the records are made of."""
    return {
      'split': self.split,
      'image_shape': list(self.image_shape),
      'num_classes': self.num_classes,
    }

  def record(self, number: int, epoch: int) -> tuple[np.ndarray, int]:
    """Returns an image and its label; the same in every epoch."""
    del epoch
    size = np.prod(self.image_shape).item()
    # The first draw is the label, the others are eight pixels each.
    draws = _draw(2 + size // 8, self.split, self.seed(), number, 0)
    label = int(draws[0] % np.uint64(self.num_classes))
    noise_HWC = draws[1:].view(np.uint8)[:size].reshape(self.image_shape)
    # Half of each: no sum is more than 255.
    return (noise_HWC >> 1) + self._patterns(label), label

  def _patterns(self, label: int) -> np.ndarray:
    """Returns a class's pattern, uint8 [H, W, C]."""
    rows, columns, channels = self.image_shape
    # Not by the seed: an evaluation shows the same classes.
    fields = _draw(_PATTERN * _PATTERN * channels, 'pattern', 0, label, 0)
    fields = (fields >> np.uint64(57)).astype(np.uint8)  # Less than 128.
    fields = fields.reshape(_PATTERN, _PATTERN, channels)
    of_row = np.arange(rows) * _PATTERN // rows
    of_column = np.arange(columns) * _PATTERN // columns
    return fields[of_row[:, None], of_column[None]]


@dataclasses.dataclass(kw_only=True, eq=False)
class DigitsInput(_Images):
  """Scikit-learn's handwritten digits: see `digits.load`.

  Every fifth image is for validation, 360 of 1797.
  """

  def __post_init__(self) -> None:
    super().__post_init__()
    images_NHWC, labels_N = digits.load()
    images_NHWC = (images_NHWC * _DIGIT_SCALE).astype(np.uint8)
    self._identity = {
      'split': self.split,
      'digits': _hash(images_NHWC, labels_N),
    }
    is_validation_N = np.arange(len(labels_N)) % _VALIDATION_EVERY == 0
    chosen_N = is_validation_N == (self.split == 'validation')
    self._images_NHWC = images_NHWC[chosen_N]
    self._labels_N = labels_N[chosen_N]

  def num_records(self) -> int:
    """Returns N."""
    return len(self._labels_N)

  def data_identity(self) -> dict[str, Any]:
    """Returns the split, and a hash of all images."""
    return self._identity

  def record(self, number: int, epoch: int) -> tuple[np.ndarray, int]:
    """Returns an image and its label."""
    del epoch
    return self._images_NHWC[number], self._labels_N[number]


@dataclasses.dataclass(kw_only=True, eq=False)
class ArrayFolderInput(_Images):
  """Images that were prepared as arrays, in the files of a folder.

      <folder>/train/images-00000.npy         uint8 [n, H', W', C]
      <folder>/train/labels-00000.npy         integers [n]
      <folder>/train/images-00001.npy ...
      <folder>/validation/images-00000.npy ...

  Files are read in place (memory-mapped), in the order of their names. Training
  cuts `image_size` pixels out at random, and mirrors half of the images, anew
  in each epoch; else the middle is cut out.

  Attributes:
    folder: where the splits are.
    image_size: H and W.
    num_classes: K; labels are from 0 to K - 1.
  """

  folder: str
  image_size: int = 224
  num_classes: int = 1000

  def __post_init__(self) -> None:
    super().__post_init__()
    self._ends = np.cumsum([len(labels) for _, labels in self._shards])
    self._identity = {
      'split': self.split,
      'image_size': self.image_size,
      'images': [list(images.shape) for images, _ in self._shards],
      'labels': _hash(*(labels for _, labels in self._shards)),
    }

  def __getstate__(self) -> dict[str, Any]:
    # A worker opens the files itself; else it would be sent what is in them.
    state = super().__getstate__()
    state.pop('_shards', None)
    return state

  @functools.cached_property
  def _shards(self) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images and labels of each file, which is read where it lies."""
    folder = pathlib.Path(self.folder, self.split)
    paths = {
      kind: sorted(folder.glob(f'{kind}-*.npy'))
      for kind in ('images', 'labels')
    }
    names = {
      kind: [path.name.removeprefix(kind) for path in of_kind]
      for kind, of_kind in paths.items()
    }
    if not paths['images'] or names['images'] != names['labels']:
      raise errors.MissingFileError(
        f'{self.name} looked for images-*.npy and labels-*.npy in {folder} and'
        f' found {len(paths["images"])} and {len(paths["labels"])} of them;'
        ' expected at least one pair, and for each file of images one of labels'
        ' with the same ending. Write them with numpy.save: images uint8 [n,'
        ' height, width, channels] and labels, integers [n].'
      )
    shards = [
      (np.load(images, mmap_mode='r'), np.load(labels))
      for images, labels in zip(paths['images'], paths['labels'], strict=True)
    ]
    for path, (images, labels) in zip(paths['images'], shards, strict=True):
      self._check(path, images, labels, channels=shards[0][0].shape[3:])
    return shards

  def _check(
    self,
    path: pathlib.Path,
    images: np.ndarray,
    labels: np.ndarray,
    channels: tuple[int, ...],
  ) -> None:
    if (
      images.dtype != np.uint8
      or images.ndim != 4
      or images.shape[3:] != channels
      or min(images.shape[1:3]) < self.image_size
    ):
      raise ValueError(
        f'{path} has {images.dtype} {images.shape}; expected uint8 [n, height,'
        f' width, channels], at least {self.image_size} pixels (image_size)'
        ' high and wide, the same channels in each file.'
      )
    if labels.dtype.kind not in 'iu' or labels.shape != images.shape[:1]:
      raise ValueError(
        f'The labels of {path} are {labels.dtype} {labels.shape}; expected'
        f' integers [{len(images)}], one an image.'
      )
    if labels.size and not (
      labels.min() >= 0 and labels.max() < self.num_classes
    ):
      raise ValueError(
        f'The labels of {path} are from {labels.min()} to {labels.max()};'
        f' expected 0 to {self.num_classes - 1} (num_classes).'
      )

  def num_records(self) -> int:
    """Returns N."""
    return int(self._ends[-1])

  def data_identity(self) -> dict[str, Any]:
    """Returns sizes of files, and a hash of all labels.

    Images are too large to be hashed at each start.
    """
    return self._identity

  def describe_record(self, record: int, epoch: int) -> str:
    """Returns the file and the place in it."""
    del epoch
    shard, place = self._find(record)
    return f'image {place} of {self._shards[shard][0].filename}'

  def _find(self, record: int) -> tuple[int, int]:
    """Returns the file of a record, and the record's place in it."""
    shard = int(np.searchsorted(self._ends, record, side='right'))
    before = int(self._ends[shard - 1]) if shard else 0
    return shard, record - before

  def record(self, number: int, epoch: int) -> tuple[np.ndarray, int]:
    """Returns `image_size` pixels of an image, and its label."""
    shard, place = self._find(number)
    images, labels = self._shards[shard]
    return self._cut(images[place], number, epoch), labels[place]

  def _cut(self, image_HWC: np.ndarray, record: int, epoch: int) -> np.ndarray:
    size = self.image_size
    free = [n - size for n in image_HWC.shape[:2]]
    if not self.is_training:
      top, left = (n // 2 for n in free)
      return image_HWC[top : top + size, left : left + size]
    draws = _draw(3, 'cut', self.seed(), record, epoch).tolist()
    top, left = (draw % (n + 1) for draw, n in zip(draws, free, strict=False))
    image_HWC = image_HWC[top : top + size, left : left + size]
    return image_HWC[:, ::-1] if draws[2] % 2 else image_HWC


def _hash(*arrays: np.ndarray) -> str:
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()[:16]
