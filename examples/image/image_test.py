"""Tests of the image example, on two devices.

The whole run, about half a minute on two free cores, is marked slow:

    pytest -m slow examples/image
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from configs import image as image_config
from jaxline import base_config
from jaxline import errors
from jaxline import utils

from . import experiment as image_experiment
from . import input as image_input
from . import model

_REPOSITORY = pathlib.Path(__file__).parents[2]
_ONE_HOST = image_input.Hosts(devices=2, index=0, count=1)
# A stem, its BatchNorm, one pooling over the image and the logits.
_STEM_ONLY = model.ResNetConfig(
  num_classes=3,
  blocks_per_group=(),
  channels_per_group=(),
  strides=(),
  bottleneck=False,
  stem_channels=2,
  small_images=True,
  batch_norm_decay=0.9,
)
# The images of each class among scikit-learn's 1797, and every fifth of them.
_CLASS_COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
_TEST_CLASS_COUNTS = [36, 37, 36, 37, 37, 37, 37, 36, 35, 36]


def _small_config(**overrides):
  """The run's config with a network that compiles quickly."""
  config = image_config.get_config()
  config.training_steps = 100
  settings = config.experiment_kwargs.config
  settings.eval_batch_size = 100
  settings.model.blocks_per_group = (1,)
  settings.model.channels_per_group = (32,)
  settings.model.strides = (1,)
  settings.update(overrides)
  return config.copy_and_resolve_references().experiment_kwargs.config


def _create_experiment(init_seed=0, **overrides):
  return image_experiment.Experiment(
    'train',
    init_rng=jax.random.PRNGKey(init_seed),
    config=_small_config(**overrides),
  )


def _devices_step(step):
  return utils.bcast_local_devices(np.int32(step))


def _train(experiment, start, stop):
  """Runs some steps, each blocked; returns their losses."""
  losses = []
  for step in range(start, stop):
    scalars = experiment.step(
      global_step=_devices_step(step), rng=None, writer=None
    )
    losses.append(float(scalars['loss']))
  return losses


def _evaluate(experiment, writer=None):
  return experiment.evaluate(
    global_step=_devices_step(7), rng=None, writer=writer
  )


def _log_softmax(logits_NK):
  logits_NK = logits_NK.astype(np.float64)
  return logits_NK - np.log(np.exp(logits_NK).sum(1, keepdims=True))


# The model.


def test_resnet_50_has_its_published_size():
  # 53120 = a mean and a variance for each of the 26560 channels that have a
  # BatchNorm.
  assert model.count_parameters(model.RESNET_50, (224, 224, 3)) == (
    25_557_032,
    53_120,
  )


def test_bottleneck_blocks_start_as_the_identity():
  config = dataclasses.replace(
    _STEM_ONLY,
    blocks_per_group=(1,),
    channels_per_group=(8,),
    strides=(1,),
    bottleneck=True,
  )
  net = model.create(config, cross_replica_axis=None)
  params, _ = jax.jit(functools.partial(net.init, is_training=True))(
    jax.random.key(0), np.ones((2, 8, 8, 1), np.float32)
  )
  last = params['res_net/~/group_0/~/block_0/~/batchnorm_2']
  np.testing.assert_array_equal(last['scale'], np.zeros((1, 1, 1, 8)))


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    ('peak_learning_rate', -1.0),
    ('peak_learning_rate', float('inf')),
    ('momentum', 1.0),
    ('l2', -1.0),
    ('warmup_fraction', 1.0),
    ('train_batch_size', 0),
    ('eval_batch_size', -1),
    ('seed', -1),
    ('model.batch_norm_decay', 1.5),
    ('model.num_classes', 0),
  ],
)
def test_values_that_no_run_can_mean_are_refused_by_name(key, value):
  config = _small_config()
  *section, key = key.split('.')
  (config[section[0]] if section else config)[key] = value
  with pytest.raises(errors.UsageError, match=f'{key} is {value}; expected'):
    image_experiment.Experiment('train', jax.random.PRNGKey(0), config)


def test_groups_must_have_one_length():
  with pytest.raises(ValueError, match='strides'):
    dataclasses.replace(_STEM_ONLY, strides=(1,))


def test_batch_norm_uses_the_statistics_of_all_devices():
  rng = np.random.default_rng(0)
  x_DBHWC = rng.normal(size=(2, 3, 8, 8, 1)).astype(np.float32)
  x_DBHWC[1] = 5 + 3 * x_DBHWC[1]  # The halves differ.
  factor_C = np.array([1.0, -2.0], np.float32)
  w_CK = rng.normal(size=(2, 3)).astype(np.float32)

  net = model.create(_STEM_ONLY, cross_replica_axis='i')
  init_net = model.create(_STEM_ONLY, cross_replica_axis=None)
  params, state = init_net.init(jax.random.key(0), x_DBHWC[0], is_training=True)
  # A kernel that multiplies each pixel by the channel's factor.
  kernel = np.zeros((3, 3, 1, 2), np.float32)
  kernel[1, 1, 0] = factor_C
  params['res_net/~/stem_conv']['w'] = kernel
  params['res_net/~/logits']['w'] = w_CK
  apply = jax.pmap(
    lambda p, s, x: net.apply(p, s, None, x, is_training=True), axis_name='i'
  )
  logits_DBK, state = apply(
    utils.bcast_local_devices(params), utils.bcast_local_devices(state), x_DBHWC
  )

  x_NHWC = x_DBHWC.reshape(6, 8, 8, 1).astype(np.float64) * factor_C
  mean_C, var_C = x_NHWC.mean((0, 1, 2)), x_NHWC.var((0, 1, 2))
  normalised = (x_NHWC - mean_C) / np.sqrt(var_C + 1e-5)
  expected_NK = np.maximum(normalised, 0).mean((1, 2)) @ w_CK
  np.testing.assert_allclose(
    logits_DBK.reshape(6, 3), expected_NK, rtol=1e-4, atol=1e-5
  )
  for name, expected_C in (('mean_ema', mean_C), ('var_ema', var_C)):
    average = state[f'res_net/~/stem_batchnorm/~/{name}']['average']
    for device in range(2):
      np.testing.assert_allclose(
        average[device].reshape(2), expected_C, rtol=1e-4
      )


# The input.


def test_split_is_stratified_disjoint_and_whole():
  from sklearn import datasets

  train, test = image_input.load()
  np.testing.assert_array_equal(np.bincount(test.y_N), _TEST_CLASS_COUNTS)
  np.testing.assert_array_equal(
    np.bincount(train.y_N) + np.bincount(test.y_N), _CLASS_COUNTS
  )
  assert (len(train.y_N), len(test.y_N)) == (1433, 364)
  # All 1797 digits differ, so the union has each exactly once.
  digits = datasets.load_digits()
  both = np.concatenate([train.x_NHWC, test.x_NHWC]).reshape(1797, 64)
  np.testing.assert_array_equal(
    np.unique(both * 16, axis=0), np.unique(digits.data, axis=0)
  )
  # Each class's first image is for testing.
  for label in range(10):
    first = digits.images[np.argmax(digits.target == label)]
    chosen = test.x_NHWC[np.argmax(test.y_N == label), ..., 0] * 16
    np.testing.assert_array_equal(chosen, first)


def test_normalize_knows_the_training_images_only():
  train, _ = image_input.load()
  x_NHWC = image_input.normalize(train.x_NHWC)
  assert abs(x_NHWC.mean()) < 1e-4
  assert abs(x_NHWC.std() - 1) < 1e-4
  assert x_NHWC.dtype == np.float32


def test_missing_scikit_learn_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'sklearn', None)
  with pytest.raises(ImportError, match='pip install'):
    # Another test may have loaded them.
    image_input.digits.load.__wrapped__()


def _numbered_split(count):
  """Images that hold their own number."""
  x_NHWC = np.arange(count, dtype=np.float32).reshape(count, 1, 1, 1)
  return image_input.Split(x_NHWC, np.arange(count, dtype=np.int32))


def _numbers(count, steps, *, start=0, batch_size=4, seed=0, hosts=_ONE_HOST):
  """The numbers that some steps see, one row for each step."""
  batches = image_input.train_batches(
    _numbered_split(count),
    seed=seed,
    start_step=start,
    batch_size=batch_size,
    hosts=hosts,
  )
  rows = []
  for _ in range(steps):
    batch = next(batches)
    np.testing.assert_array_equal(batch.x_DBHWC[..., 0, 0, 0], batch.y_DB)
    assert batch.weight_DB.min() == 1
    rows.append(batch.y_DB.reshape(-1))
  return np.array(rows)


@pytest.mark.parametrize('batch_size', [4, 6, 24])
def test_each_epoch_has_each_image_once_in_a_new_order(batch_size):
  # 60 images are six epochs of ten; 4 and 6 do not divide ten, and a batch of
  # 24 holds more than two epochs.
  steps = -(-60 // batch_size)
  rows = _numbers(10, steps, batch_size=batch_size)
  epochs = rows.reshape(-1)[:60].reshape(6, 10)
  for epoch in epochs:
    assert sorted(epoch.tolist()) == list(range(10))
  assert len({tuple(epoch) for epoch in epochs.tolist()}) == 6


def test_order_starts_anywhere_and_depends_on_the_seed():
  straight = _numbers(10, 9)
  np.testing.assert_array_equal(_numbers(10, 4, start=5), straight[5:])
  assert (_numbers(10, 9, seed=1) != straight).any()


def test_processes_share_a_batch():
  whole = _numbers(10, 5)
  halves = [
    _numbers(10, 5, hosts=image_input.Hosts(devices=1, index=i, count=2))
    for i in range(2)
  ]
  np.testing.assert_array_equal(np.concatenate(halves, axis=1), whole)


def test_eval_batches_fill_up_the_last_one_on_every_process():
  seen = []
  for index in range(2):
    hosts = image_input.Hosts(devices=2, index=index, count=2)
    batches = list(
      image_input.eval_batches(_numbered_split(9), batch_size=8, hosts=hosts)
    )
    assert [b.y_DB.shape for b in batches] == [(2, 2), (2, 2)]
    for b in batches:
      seen += b.y_DB[b.weight_DB == 1].tolist()
  assert sorted(seen) == list(range(9))


@pytest.mark.parametrize('batch_size', [0, 63])
def test_batch_must_divide_over_the_devices(batch_size):
  with pytest.raises(ValueError, match='multiple of 2'):
    _numbers(10, 1, batch_size=batch_size)
  with pytest.raises(ValueError, match='multiple of 2'):
    next(
      image_input.eval_batches(
        _numbered_split(9), batch_size=batch_size, hosts=_ONE_HOST
      )
    )


# The experiment.


def test_the_config_is_valid_and_overrides_reach_the_experiment():
  config = image_config.get_config()
  config.training_steps = 9
  config.random_seed = 5
  base_config.validate_config(config)
  settings = base_config.read(
    image_experiment.Config, config.experiment_kwargs.config
  )
  assert (settings.training_steps, settings.seed) == (9, 5)
  assert isinstance(settings.model, model.ResNetConfig)
  with pytest.raises(ValueError, match='peak_learning_rate'):
    _create_experiment(peak_learning_rat=0.1)


def test_learning_rate_rises_and_falls():
  settings = base_config.read(image_experiment.Config, _small_config())
  _, schedule = image_experiment.create_optimizer(settings)
  # 100 steps: 10 of a linear rise, then a cosine whose middle is at 55.
  rates = [float(schedule(step)) for step in (0, 4, 9, 54, 99)]
  np.testing.assert_allclose(rates, [0.01, 0.05, 0.1, 0.05, 0], atol=1e-7)


def test_l2_is_for_kernels_only():
  net = model.create(_STEM_ONLY, cross_replica_axis=None)
  params, _ = net.init(
    jax.random.key(0), np.ones((1, 8, 8, 1), np.float32), is_training=True
  )
  assert image_experiment.decays(params) == {
    'res_net/~/stem_conv': {'w': True},
    'res_net/~/stem_batchnorm': {'scale': False, 'offset': False},
    'res_net/~/logits': {'w': True, 'b': False},
  }


class _Run(NamedTuple):
  """An experiment after its first 60 steps, and how it went."""

  experiment: image_experiment.Experiment
  untrained: Any
  losses: list[float]


@pytest.fixture(scope='module')
def run():
  experiment = _create_experiment()
  untrained = _evaluate(experiment)
  return _Run(experiment, untrained, _train(experiment, 0, 60))


def test_untrained_network_scores_as_guessing(run):
  # Zero logits: the loss is log 10, and all are taken for the first class.
  np.testing.assert_allclose(run.untrained['loss'], np.log(10), rtol=1e-6)
  np.testing.assert_allclose(run.untrained['accuracy'], 36 / 364, rtol=1e-12)


def test_training_lowers_the_loss(run):
  np.testing.assert_allclose(run.losses[0], np.log(10), rtol=1e-5)
  assert np.mean(run.losses[-5:]) < run.losses[0] / 2


def test_evaluation_averages_an_uneven_last_batch(run):
  # 364 images in batches of 100 on two devices, against all of them at once.
  settings = base_config.read(image_experiment.Config, _small_config())
  net = model.create(settings.model, cross_replica_axis=None)
  _, test = image_input.load()
  snapshot = run.experiment.snapshot_state()
  logits_NK, _ = net.apply(
    snapshot['params'],
    snapshot['state'],
    None,
    image_input.normalize(test.x_NHWC),
    is_training=False,
  )
  logits_NK = np.asarray(logits_NK)
  expected_loss = -_log_softmax(logits_NK)[np.arange(364), test.y_N].mean()
  is_right_N = logits_NK.argmax(1) == test.y_N
  assert 0.2 < is_right_N.mean() < 1

  writer = _ImageWriter()
  scalars = _evaluate(run.experiment, writer)
  np.testing.assert_allclose(scalars['loss'], expected_loss, rtol=1e-5)
  np.testing.assert_allclose(scalars['accuracy'], is_right_N.mean(), rtol=1e-12)
  # The pictures: pixel (r, c) became the square that begins at (8 r, 8 c).
  assert writer.step == 7
  for name, expected in (
    ('test_images', test.x_NHWC[:16]),
    ('misclassified', test.x_NHWC[~is_right_N][:16]),
  ):
    assert writer.images[name].shape == (len(expected), 64, 64, 1)
    np.testing.assert_array_equal(writer.images[name][:, ::8, ::8], expected)
    np.testing.assert_array_equal(writer.images[name][:, 7::8, 7::8], expected)


class _ScalarWriter:
  """The least that a writer can be."""

  def write_scalars(self, global_step, scalars):
    raise AssertionError('The loop writes the scalars.')


class _ImageWriter(_ScalarWriter):
  """Keeps the pictures."""

  def write_images(self, global_step, images):
    self.step = global_step
    self.images = images


@pytest.mark.parametrize('writer', [None, _ScalarWriter()])
def test_evaluation_needs_no_writer_of_images(run, writer):
  assert set(_evaluate(run.experiment, writer)) == {'loss', 'accuracy'}


def test_restored_run_goes_on_as_if_nothing_had_happened(run):
  straight = run.experiment
  snapshot = jax.device_get(straight.snapshot_state())
  losses = _train(straight, 60, 63)
  expected = jax.device_get(straight.snapshot_state())

  # Another experiment; and the same, whose input has gone on and must go back.
  for resumed in (_create_experiment(init_seed=1), straight):
    resumed.restore_from_snapshot(snapshot)
    assert _train(resumed, 60, 63) == losses
    jax.tree.map(
      np.testing.assert_array_equal,
      jax.device_get(resumed.snapshot_state()),
      expected,
    )


def test_two_devices_step_as_one(run):
  settings = base_config.read(image_experiment.Config, _small_config())
  optimizer, schedule = image_experiment.create_optimizer(settings)
  one_device_step = jax.pmap(
    functools.partial(
      image_experiment.update,
      net=model.create(settings.model, cross_replica_axis='i'),
      optimizer=optimizer,
      schedule=schedule,
    ),
    axis_name='i',
    devices=jax.devices()[:1],
  )
  train, _ = image_input.load()
  batches = image_input.train_batches(
    train,
    seed=settings.seed,
    start_step=60,
    batch_size=settings.train_batch_size,
    hosts=image_input.Hosts(devices=1, index=0, count=1),
  )
  snapshot = jax.device_get(run.experiment.snapshot_state())
  run.experiment.restore_from_snapshot(snapshot)
  carry = jax.tree.map(
    lambda x: x[None],
    tuple(snapshot[name] for name in ('params', 'state', 'opt_state')),
  )
  for step, loss in enumerate(_train(run.experiment, 60, 63), start=60):
    *carry, metrics = one_device_step(
      *carry, next(batches), np.array([step], np.int32)
    )
    np.testing.assert_allclose(metrics['loss'][0], loss, rtol=1e-4)
  for name, value in zip(('params', 'state', 'opt_state'), carry, strict=True):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x[0], y, rtol=1e-3, atol=1e-4),
      value,
      run.experiment.snapshot_state()[name],
    )


def test_devices_stay_equal(run):
  for attribute in image_experiment.Experiment.CHECKPOINT_ATTRS:
    for x in jax.tree.leaves(getattr(run.experiment, attribute)):
      np.testing.assert_array_equal(x[0], x[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_run_reads_digits(tmp_path):
  environment = dict(os.environ)
  environment.pop('XLA_FLAGS', None)
  subprocess.run(
    [
      sys.executable,
      'experiment.py',
      '--config=configs/image.py',
      '--jaxline_mode=train_and_eval',
      f'--config.checkpoint_dir={tmp_path}',
    ],
    cwd=_REPOSITORY,
    env=environment,
    check=True,
  )
  lines = (tmp_path / 'eval' / 'metrics.jsonl').read_text().splitlines()
  records = [json.loads(line) for line in lines]
  last = [r for r in records if r['kind'] == 'scalars'][-1]
  assert last['step'] == 600
  assert last['accuracy'] > 0.98
