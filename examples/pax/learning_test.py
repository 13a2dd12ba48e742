"""Tests that registered experiments learn, by their expected losses.

The slow tests are complete runs of a minute or two on two cores.
"""

import math

import jax
import numpy as np
import pytest

from examples.pax import config as config_lib
from examples.pax import experiment
from examples.pax.tasks.synthetic import input as synthetic_input
from examples.pax.tasks.synthetic.params import sequences
from jaxline import sharded
from jaxline import train
from jaxline import utils
from jaxline.parallel import mesh as mesh_lib


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
  """Uses one device and an empty store of checkpoints."""
  monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})
  with mesh_lib.on_devices(jax.devices()[:1]):
    yield


class Last:
  """A writer that keeps the last scalars."""

  def __init__(self):
    self.scalars = {}

  def write_scalars(self, global_step, scalars):
    self.scalars = jax.device_get(dict(scalars))


def _train_and_eval(name, steps=None, constants=None, **keys):
  """Returns the trained experiment and its last evaluation."""
  config = config_lib.get_config(name)
  config.checkpointer = 'memory'
  config.training_steps = steps or config.training_steps
  config.update(keys)
  config.experiment_kwargs.config.constants.update(constants or {})
  config = config.copy_and_resolve_references()
  made, last = {}, Last()

  def make(mode, init_rng, config, run_config):
    made[mode] = experiment.Experiment(
      mode, init_rng, config, run_config=run_config
    )
    return made[mode]

  checkpointer = utils.InMemoryCheckpointer(config, 'train')
  train.Run(make, config, checkpointer, Last(), last).train_and_eval()
  return made['train'], last.scalars


@pytest.mark.process
def test_an_encoder_decoder_uses_its_source():
  constants = {
    'NUM_LAYERS': 1,
    'MODEL_DIMS': 32,
    'HIDDEN_DIMS': 64,
    'NUM_HEADS': 2,
    'MAX_LENGTH': 3,
    'VOCAB_SIZE': 6,
    'LEARNING_RATE': 1e-2,
    'LR_WARMUP_STEPS': 10,
    'EVAL_EXAMPLES': 64,
  }
  _, scalars = _train_and_eval('ReverseEncoderDecoder', 150, constants)
  # The best loss without the source: one of 4 symbols, and one of 3 lengths.
  blind = (2 * math.log(4) + math.log(3)) / 3
  assert scalars['log_pplx'] < 0.3 * blind


@pytest.mark.process
def test_a_model_with_products_in_fp8_learns_and_keeps_its_scales():
  pytest.importorskip('flax')
  constants = {
    'NUM_LAYERS': 2,
    'MODEL_DIMS': 16,
    'HIDDEN_DIMS': 32,
    'NUM_HEADS': 2,
    'DIMS_PER_HEAD': 8,
    'MAX_SEQ_LEN': 8,
    'USE_FP8': True,
    'LR_WARMUP_STEPS': 1,
  }
  trained, scalars = _train_and_eval(
    'LmCloudSpmd2BLimitSteps:reduced', 6, constants
  )
  assert scalars['log_pplx'] < 0.9 * math.log(256)  # All tokens are the same.
  scales = trained.state.model_state[sharded.OVERWRITE]
  # The scales cover the products of two layers.
  assert len(scales) == 4
  for kept in scales.values():
    assert kept['weight_scale_fp8'].shape == (2,)
    assert (kept['weight_scale_fp8'] < 1).all()
  assert not any('fp8' in name for name in trained.task.weights)


@pytest.mark.parametrize('steps', [1, 750])
def test_a_run_may_be_shorter_than_its_warm_up(steps):
  constants = {'MAX_STEPS': steps}
  made = sequences.ReverseEncoderDecoder.with_constants(constants)(1)
  rate = made.filled_task().Instantiate().learner.optimizer.get_learning_rate
  np.testing.assert_allclose(rate(steps), 0.01 * made.LEARNING_RATE, rtol=1e-5)
  np.testing.assert_allclose(
    rate(min(steps // 2, made.LR_WARMUP_STEPS)), made.LEARNING_RATE, rtol=1e-5
  )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
  'name', ['ReverseEncoderDecoder', 'CopyEncoderDecoder']
)
def test_sequences_come_out_as_they_should(name):
  trained, scalars = _train_and_eval(name)
  assert scalars['log_pplx'] < 0.01
  assert scalars['fraction_of_correct_next_step_preds'] > 0.995

  # Decode greedily from unseen sources.
  batch = next(trained.eval_input())
  rows = len(batch.src.ids)
  begun = {
    'src': batch.src,
    'tgt': {
      'ids': np.full([rows, 1], synthetic_input.START_ID, np.int32),
      'lengths': np.ones(rows, np.int32),
    },
  }
  state = trained.state
  decoded = jax.jit(trained.in_mesh(trained.task.decode))(
    state.params, state.model_state, begun
  )
  labels_BL = batch.tgt.labels
  ids_BL = np.asarray(decoded.ids)[:, 0, : labels_BL.shape[1]]  # Padded with 0.
  assert np.mean((ids_BL == labels_BL).all(axis=1)) > 0.95


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
  ('name', 'most'),
  [
    ('C4Spmd1BAdam4Replicas', 2.3),  # 2.23 was seen.
    ('LmCloudTransformerAdamLimitSteps', 2.3),  # 2.23.
    ('C4SpmdPipelineGpt3SmallAdam64Replicas', 2.5),  # 2.41.
  ],
)
def test_language_models_learn_the_bundled_corpus(name, most):
  """Checks nats per byte of held-out files, after 400 steps of 512 bytes.

  A model that only counts bytes has 3.25, and gzip -9 needs 1.33.
  """
  _, scalars = _train_and_eval(f'{name}:reduced', data='stdlib')
  assert scalars['log_pplx'] < most


@pytest.mark.slow
def test_resnet_learns_digits():
  pytest.importorskip('sklearn')
  _, scalars = _train_and_eval('ResNet50Pjit:reduced')
  assert scalars['accuracy'] > 0.97
