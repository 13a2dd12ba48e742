"""Tests of ResNet-50's numbers; `experiment_test.py` trains the small one."""

import math

import fiddle as fdl
import jax
import numpy as np
import pytest

from examples.pax import base_layer
from examples.pax.tasks.vision.params import imagenet_resnets

ResNet50Pjit = imagenet_resnets.ResNet50Pjit
WeightInit = base_layer.WeightInit


def _task():
  return ResNet50Pjit(num_devices=4).filled_task().Instantiate()


def test_resnet_50_has_its_counts():
  variables = _task().model.abstract_init()
  counts = {
    collection: sum(math.prod(x.shape) for x in jax.tree.leaves(of_it))
    for collection, of_it in variables.items()
  }
  assert counts == {'params': 25_557_032, 'non_trainable': 53_120}


def test_options_and_learning_rate_are_those_of_pax():
  """Paxml 1.4.0 (jax 0.4.26, Python 3.10): the task of ResNet50Pjit."""
  task = _task()
  network = task.model.network_tpl
  assert network.block_params.zero_init_residual
  assert network.conv_params.batch_norm_tpl.decay == 0.9
  he = WeightInit.GaussianSqrtFanOut(1.4141)
  assert network.conv_params.params_init == he
  assert task.model.softmax_tpl.params_init == WeightInit.Gaussian(0.01)
  optimizer = task.learner.optimizer
  assert (optimizer.momentum, optimizer.nesterov) == (0.9, True)
  assert optimizer.l2_regularizer_weight == 1e-4
  assert optimizer.skip_lp_1d_vectors
  assert optimizer.clip_gradient_norm_to_value == optimizer.ema_decay == 0.0
  assert task.train.num_train_steps == 225_180
  want = {
    **{0: 0.0, 1: 7.993605e-05, 6255: 0.5, 12509: 0.9999201, 12510: 1.0},
    **{75059: 1.0, 75060: 0.1, 150119: 0.1, 150120: 0.01},
    **{225179: 0.001, 225180: 0.0},
  }
  got = [optimizer.get_learning_rate(step) / 0.2 for step in want]
  np.testing.assert_allclose(got, list(want.values()), rtol=1e-6)


def test_sizes_are_what_is_declared():
  for made in ResNet50Pjit, ResNet50Pjit.reduced():
    experiment = made(num_devices=4)
    for dataset in experiment.datasets():
      assert dataset.batch_size == (
        made.TRAIN_BATCH_SIZE if dataset.is_training else made.EVAL_BATCH_SIZE
      )
    sizes = [fdl.build(d).num_records() for d in experiment.datasets()]
    assert sizes == [made.TRAIN_EXAMPLES, made.EVAL_EXAMPLES]


def test_each_digit_is_in_one_split():
  datasets = pytest.importorskip('sklearn.datasets')
  found = datasets.load_digits()
  for config in ResNet50Pjit.reduced()(num_devices=1).datasets():
    source = fdl.build(config)
    batch = source.read(np.arange(source.num_records()), None)
    is_validation = np.arange(len(found.target)) % 5 == 0
    chosen = is_validation != config.is_training
    np.testing.assert_array_equal(
      batch['image'][..., 0], found.images[chosen] * 15
    )
    np.testing.assert_array_equal(batch['label'], found.target[chosen])
