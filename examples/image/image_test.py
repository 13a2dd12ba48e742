"""Tests of the image example, on two devices."""

import itertools
import types
from unittest import mock

import jax
import numpy as np
import pytest

from configs import image as image_config
import jaxline
from jaxline import base_config
from jaxline import errors
from jaxline import utils

from . import experiment as image_experiment
from . import input as image_input
from . import model

_ONE_HOST = image_input.Hosts(devices=2, index=0, count=1)


def _small_config():
  """The run's config with a network that compiles quickly."""
  config = image_config.get_config()
  config.training_steps = 100
  settings = config.experiment_kwargs.config
  settings.eval_batch_size = 100
  settings.model.blocks_per_group = (1,)
  settings.model.channels_per_group = (32,)
  settings.model.strides = (1,)
  return config.copy_and_resolve_references().experiment_kwargs.config


def _create_experiment(init_seed=0):
  return image_experiment.Experiment(
    'train', jax.random.PRNGKey(init_seed), _small_config()
  )


def _train(experiment, start, stop):
  """Runs some steps, each blocked; returns their losses."""
  losses = []
  for step in range(start, stop):
    global_step = utils.bcast_local_devices(np.int32(step))
    scalars = experiment.step(global_step=global_step, rng=None, writer=None)
    losses.append(float(scalars['loss']))
  return losses


def _evaluate(experiment, writer=None):
  global_step = utils.bcast_local_devices(np.int32(7))
  return experiment.evaluate(global_step=global_step, rng=None, writer=writer)


def test_resnet_50_has_its_published_size():
  # 53120 = a mean and a variance for each of the 26560 channels that have a
  # BatchNorm.
  size = model.count_parameters(model.RESNET_50, (224, 224, 3))
  assert size == (25_557_032, 53_120)


# The input.


def _split(count):
  """Images that hold their own number."""
  x_NHWC = np.arange(count, dtype=np.float32).reshape(count, 1, 1, 1)
  return image_input.Split(x_NHWC, np.arange(count, dtype=np.int32))


def _numbers(steps, *, start=0, batch_size=4, seed=0, hosts=_ONE_HOST):
  """The numbers, of ten, that some steps see, one row for each step."""
  batches = image_input.train_batches(
    _split(10), seed=seed, start_step=start, batch_size=batch_size, hosts=hosts
  )
  rows = []
  for batch in itertools.islice(batches, steps):
    np.testing.assert_array_equal(batch.x_DBHWC[..., 0, 0, 0], batch.y_DB)
    assert batch.weight_DB.min() == 1
    rows.append(batch.y_DB.reshape(-1))
  return np.array(rows)


# Which do not divide ten, and hold more than two epochs.
@pytest.mark.parametrize('batch_size', [4, 24])
def test_each_epoch_has_each_image_once_in_a_new_order(batch_size):
  rows = _numbers(-(-60 // batch_size), batch_size=batch_size)
  epochs = rows.reshape(-1)[:60].reshape(6, 10)
  assert (np.sort(epochs) == np.arange(10)).all()
  assert len({tuple(epoch) for epoch in epochs.tolist()}) == 6


def test_order_starts_anywhere_depends_on_the_seed_and_is_shared():
  straight = _numbers(9)
  np.testing.assert_array_equal(_numbers(4, start=5), straight[5:])
  assert (_numbers(9, seed=1) != straight).any()
  halves = [
    _numbers(9, hosts=image_input.Hosts(devices=1, index=i, count=2))
    for i in range(2)
  ]
  np.testing.assert_array_equal(np.concatenate(halves, axis=1), straight)
  with pytest.raises(ValueError, match='multiple of 2'):
    _numbers(1, batch_size=63)


def test_eval_batches_fill_up_the_last_one_on_every_process():
  seen = []
  for index in range(2):
    hosts = image_input.Hosts(devices=2, index=index, count=2)
    for b in image_input.eval_batches(_split(9), batch_size=8, hosts=hosts):
      assert b.y_DB.shape == (2, 2)
      seen += b.y_DB[b.weight_DB == 1].tolist()
  assert sorted(seen) == list(range(9))


# The experiment.


def test_a_value_that_no_run_can_mean_is_refused_by_name():
  config = image_config.get_config().experiment_kwargs.config
  config.model.num_classes = 0
  with pytest.raises(errors.UsageError, match='num_classes is 0; expected'):
    image_experiment.Experiment('train', jax.random.PRNGKey(0), config)


@pytest.fixture(scope='module')
def run():
  """An experiment after its first 60 steps, and how it went."""
  experiment = _create_experiment()
  return types.SimpleNamespace(
    experiment=experiment,
    settings=base_config.read(image_experiment.Config, _small_config()),
    untrained=_evaluate(experiment),
    losses=_train(experiment, 0, 60),
  )


def test_it_learns_and_devices_stay_equal(run):
  # Zero logits: the loss is log 10, and all are taken for the first class.
  expected = {'loss': np.log(10), 'accuracy': 36 / 364}
  assert run.untrained == pytest.approx(expected, rel=1e-6)
  np.testing.assert_allclose(run.losses[0], np.log(10), rtol=1e-5)
  assert np.mean(run.losses[-5:]) < run.losses[0] / 2
  # 100 steps: 10 of a linear rise, then a cosine whose middle is at 55.
  _, schedule = image_experiment.create_optimizer(run.settings)
  rates = [float(schedule(step)) for step in (0, 4, 9, 54, 99)]
  np.testing.assert_allclose(rates, [0.01, 0.05, 0.1, 0.05, 0], atol=1e-7)
  for attribute in image_experiment.Experiment.CHECKPOINT_ATTRS:
    for x in jax.tree.leaves(getattr(run.experiment, attribute)):
      np.testing.assert_array_equal(x[0], x[1])


def test_evaluation_averages_an_uneven_last_batch(run):
  # 364 images in batches of 100 on two devices, against all of them at once.
  net = model.create(run.settings.model, cross_replica_axis=None)
  _, test = image_input.load()
  snapshot, x_NHWC = run.experiment.snapshot_state(), test.x_NHWC
  logits_NK, _ = net.apply(
    snapshot['params'],
    snapshot['state'],
    None,
    image_input.normalize(x_NHWC),
    is_training=False,
  )
  nats_NK = np.log(np.exp(np.float64(logits_NK)).sum(1, keepdims=True))
  nats_NK = nats_NK - np.float64(logits_NK)
  is_right_N = nats_NK.argmin(1) == test.y_N
  assert 0.2 < is_right_N.mean() < 1
  writer = mock.Mock(['write_scalars', 'write_images'])
  scalars = _evaluate(run.experiment, writer)
  assert scalars == {
    'loss': pytest.approx(nats_NK[np.arange(364), test.y_N].mean(), rel=1e-5),
    'accuracy': pytest.approx(is_right_N.mean(), rel=1e-12),
  }
  # The pictures: pixel (r, c) became the square that begins at (8 r, 8 c).
  ((step, images),) = (call.args for call in writer.write_images.mock_calls)
  assert step == 7
  for name, expected in (
    ('test_images', x_NHWC[:16]),
    ('misclassified', x_NHWC[~is_right_N][:16]),
  ):
    assert images[name].shape == (len(expected), 64, 64, 1)
    np.testing.assert_array_equal(images[name][:, ::8, ::8], expected)
    np.testing.assert_array_equal(images[name][:, 7::8, 7::8], expected)
  # A writer need not know pictures.
  assert _evaluate(run.experiment, mock.Mock(['write_scalars'])) == scalars


def test_restored_run_goes_on_as_if_nothing_had_happened(run):
  straight = run.experiment
  snapshot = jax.device_get(straight.snapshot_state())
  losses = _train(straight, 60, 63)
  expected = jax.device_get(straight.snapshot_state())

  # Another experiment; and the same, whose input has gone on and must go back.
  for resumed in (_create_experiment(init_seed=1), straight):
    resumed.restore_from_snapshot(snapshot)
    assert _train(resumed, 60, 63) == losses
    found = jax.device_get(resumed.snapshot_state())
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_run_reads_digits(tmp_path):
  place = {'checkpoint_dir': str(tmp_path / 'run')}
  result = jaxline.fit(None, image_config.get_config(), place)
  step, accuracy = result.history['eval/accuracy'][-1]
  assert step == 600
  assert accuracy > 0.98
