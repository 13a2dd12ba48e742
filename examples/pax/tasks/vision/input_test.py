"""Labelled images: who reads what, and that it is what lies there."""

import pickle

import numpy as np
import pytest

from examples.pax.tasks.vision import input as vision_input

ONE_EPOCH = {'reset_for_eval': True, 'eval_loop_num_batches': None}


def _synthetic(**fields):
  fields = {'image_shape': (8, 6, 3), 'num_classes': 4, 'size': 100} | fields
  fields = {'shuffle': False, 'batch_size': 32} | fields
  return vision_input.SyntheticImages(**fields)


def test_synthetic_images_are_fixed_by_number_seed_and_split():
  first = _synthetic(is_training=True).get_next()
  assert first['image'].shape == (32, 8, 6, 3)
  assert first['image'].dtype == np.uint8
  assert first['label'].dtype == np.int32
  np.testing.assert_array_equal(first['weights'], np.ones(32, np.float32))
  again = _synthetic(
    is_training=True, batch_size=16, num_infeed_hosts=2, infeed_host_index=1
  )
  np.testing.assert_array_equal(again.get_next()['image'], first['image'][16:])
  for other in {'input_random_seed': 1}, {'split': 'validation'}:
    batch = _synthetic(is_training=True, **other).get_next()
    assert (batch['image'] != first['image']).mean() > 0.9


def test_the_class_of_a_synthetic_image_can_be_seen():
  train = _synthetic(batch_size=100).get_next()
  test = _synthetic(
    batch_size=100, split='validation', input_random_seed=5
  ).get_next()
  assert set(train.label) == {0, 1, 2, 3}
  # Noise has the mean 63.5: a class's mean image is its pattern and that.
  patterns = np.stack(
    [np.float32(train.image[train.label == k]).mean(0) for k in range(4)]
  )
  distances = (np.float32(test.image)[:, None] - patterns) ** 2
  nearest = distances.reshape(100, 4, -1).mean(-1).argmin(1)
  np.testing.assert_array_equal(nearest, test.label)


def test_digits_are_scikit_learns():
  datasets = pytest.importorskip('sklearn.datasets')
  digits = datasets.load_digits()
  counts = {}
  for split in vision_input.SPLITS:
    source = vision_input.DigitsInput(split=split, batch_size=360, **ONE_EPOCH)
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


@pytest.fixture
def folder(tmp_path):
  """Two files of training images whose pixels say where they are."""
  for split, sizes in ('train', (3, 2)), ('validation', (4,)):
    (tmp_path / split).mkdir()
    first = 0
    for i, size in enumerate(sizes):
      images = np.zeros((size, 6, 5, 3), np.uint8)
      images[..., 0] = 10 * np.arange(6)[:, None]
      images[..., 1] = np.arange(5)
      images[..., 2] = first + np.arange(size)[:, None, None]
      np.save(tmp_path / split / f'images-{i:05d}.npy', images)
      labels = np.arange(first, first + size, dtype=np.int64)
      np.save(tmp_path / split / f'labels-{i:05d}.npy', labels)
      first += size
  return tmp_path


def _arrays(folder, **fields):
  fields = {'image_size': 4, 'num_classes': 5, 'batch_size': 5} | fields
  return vision_input.ArrayFolderInput(folder=str(folder), **fields)


def test_an_evaluation_sees_the_middle_of_each_image(folder):
  source = _arrays(folder, split='validation', **ONE_EPOCH)
  (batch,) = source.eval_batches()
  np.testing.assert_array_equal(batch['weights'], [1, 1, 1, 1, 0])
  np.testing.assert_array_equal(batch['label'][:4], [0, 1, 2, 3])
  # One row of six is left off above, and nothing of one free column.
  np.testing.assert_array_equal(
    batch['image'][2, :, :, 0], 10 * np.tile(np.arange(1, 5)[:, None], 4)
  )
  np.testing.assert_array_equal(
    batch['image'][2, :, :, 1], np.tile(np.arange(4), (4, 1))
  )
  np.testing.assert_array_equal(batch['image'][:4, 0, 0, 2], [0, 1, 2, 3])


def test_training_crops_and_mirrors_anew_in_each_epoch(folder):
  source = _arrays(folder, is_training=True)
  cuts = []
  for _ in range(60):
    batch = source.get_next()
    np.testing.assert_array_equal(batch['image'][:, 0, 0, 2], batch['label'])
    assert sorted(batch['label']) == [0, 1, 2, 3, 4]
    for image in batch['image']:
      top, left = image[0, 0, 0] // 10, image[0, :, 1].min()
      is_mirrored = image[0, 0, 1] > image[0, 1, 1]
      cuts.append((int(top), int(left), bool(is_mirrored)))
      columns = left + np.arange(4)
      np.testing.assert_array_equal(
        image[0, :, 1], columns[::-1] if is_mirrored else columns
      )
  # 3 rows, 2 columns and 2 directions; 300 draws: 25 each, +- 5.
  counts = [cuts.count(cut) for cut in set(cuts)]
  assert len(counts) == 12
  assert min(counts) > 5
  assert max(counts) < 50


def test_a_resumed_input_goes_on_with_the_same_crops(folder):
  whole = _arrays(folder, is_training=True, batch_size=3)
  batches = [whole.get_next_padded() for _ in range(4)]
  first = _arrays(folder, is_training=True, batch_size=3)
  first.get_next_padded()
  rest = pickle.loads(
    pickle.dumps(_arrays(folder, is_training=True, batch_size=3))
  )
  assert '_shards' not in vars(rest)  # What is sent to a worker are no images.
  rest.set_state(first.get_state())
  for batch in batches[1:]:
    np.testing.assert_array_equal(
      rest.get_next_padded()['image'], batch['image']
    )


def test_what_does_not_fit_is_refused(folder):
  with pytest.raises(FileNotFoundError, match=r'images-\*.npy.*found 0 and 0'):
    _arrays(folder / 'nowhere')
  with pytest.raises(ValueError, match=r'from 0 to 2; expected 0 to 1'):
    _arrays(folder, num_classes=2)
  with pytest.raises(ValueError, match=r'uint8 \(3, 6, 5, 3\); expected .* 7'):
    _arrays(folder, image_size=7)
  with pytest.raises(ValueError, match="'train', 'validation'"):
    _arrays(folder, split='test')
  np.save(folder / 'train' / 'labels-00001.npy', np.zeros(7, np.int32))
  with pytest.raises(
    ValueError, match=r'int32 \(7,\); expected integers \[2\]'
  ):
    _arrays(folder)
  (folder / 'train' / 'labels-00001.npy').unlink()
  with pytest.raises(FileNotFoundError, match='found 2 and 1'):
    _arrays(folder)
