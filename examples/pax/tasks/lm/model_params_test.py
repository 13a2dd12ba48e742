"""Tests of the registered language models' options."""

import operator

import pytest

from examples.pax.tasks.lm.params import c4
from examples.pax.tasks.lm.params import c4_multislice
from examples.pax.tasks.lm.params import lm_cloud

# Paths of the fields in a task.
_FIELDS = {
  'atten_logit_cap': 'attention.atten_logit_cap',
  'soft_cap_logits': 'lm.softmax_tpl.soft_cap_logits',
  'combine_qkv': 'attention.combine_qkv',
  'use_bias': 'attention.use_bias',
  'per_dim_scale': 'attention.internal_enable_per_dim_scale',
  'softmax_bias': 'lm.softmax_tpl.has_bias',
  'scale_sqrt_depth': 'lm.softmax_tpl.scale_sqrt_depth',
  'epsilon': 'layer.ln_tpl.epsilon',
  'beta2': 'optimizer.beta2',
  'adam_epsilon': 'optimizer.epsilon',
  'clip_threshold': 'optimizer.clip_threshold',
  'weight_decay': 'optimizer.weight_decay',
  'clip': 'optimizer.clip_gradient_norm_to_value',
  'rate': 'optimizer.learning_rate',
  'warmup': 'optimizer.lr_schedule.warmup_steps',
  'decay_start': 'optimizer.lr_schedule.decay_start',
  'decay_end': 'optimizer.lr_schedule.decay_end',
  'min_ratio': 'optimizer.lr_schedule.min_ratio',
  'beta1': 'optimizer.beta1',
}
# 0 means no cap, for which Paxml has None or -1.
_CLOUD = (50, 0, False, False, True, True, True, 1e-6, 0.99, 1e-6, 1, 1e-3, 5)
_C4 = (50, 30, True, False, True, True, True, 1e-6, 0.99, 1e-6, 1, 1e-3, 5)
_GPT3 = (0, 0, True, True, False, False, False, 1e-5, 0.95, 1e-8, 0, 0.1, 1)
_C4_STEPS = (4000, 4001, 300_000, 0.1, 0.9)
_GPT3_STEPS = (265, 266, 108_600, 0.1, 0.9)


class _Parts:
  """The parts of an experiment's task, under short names."""

  def __init__(self, task):
    self.lm = task.model.lm_tpl
    stack = self.lm.stacked_transformer_tpl
    stack = getattr(stack, 'pipeline_stage', stack)
    stack = getattr(stack, 'block', stack)
    self.layer = stack.transformer_layer_params_tpl
    self.attention = self.layer.tr_atten_tpl
    self.optimizer = task.train.learner.optimizer


@pytest.mark.parametrize(
  ('experiment', 'expected'),
  [
    (
      lm_cloud.LmCloudTransformerAdamLimitSteps,
      (*_CLOUD, 1e-3, *_C4_STEPS),
    ),
    (lm_cloud.LmCloudSpmd2BLimitSteps, (*_C4, 2.5e-4, *_C4_STEPS)),
    (c4.C4Spmd1BAdam4Replicas, (*_C4, 1e-3, *_C4_STEPS)),
    (c4_multislice.C4Spmd22BAdam1xv4_128, (*_C4, 1e-3, *_C4_STEPS)),
    (
      c4.C4SpmdPipelineGpt3SmallAdam64Replicas,
      (*_GPT3, 2e-4, *_GPT3_STEPS),
    ),
    (c4.C4SpmdGpt3AdamDataParallel2x16x16, (*_GPT3, 6e-5, *_GPT3_STEPS)),
  ],
)
def test_options_are_those_of_pax(experiment, expected):
  """The tasks of Paxml 1.4.0 (jax 0.4.26, Python 3.10) have these values.

  The pipeline's are from Paxml's C4SpmdPipelineGpt3SmallAdam8Replicas.
  """
  parts = _Parts(experiment(num_devices=512).filled_task())
  actual = {n: operator.attrgetter(path)(parts) for n, path in _FIELDS.items()}
  assert actual == dict(zip(_FIELDS, expected, strict=True))
  activation = 'ReLU' if expected[: len(_CLOUD)] == _CLOUD else 'GELU'
  assert activation in str(parts.layer.tr_fflayer_tpl.activation_tpl)


@pytest.mark.parametrize('is_loop', [True, False])
def test_a_stage_of_a_pipeline_is_a_loop_or_unrolled(is_loop):
  pipelined = c4.C4SpmdPipelineGpt3SmallAdam64Replicas
  constants = {'USE_REPEATED_LAYER': is_loop, 'CHECKPOINT_POLICY': 'dots'}
  made = pipelined.with_constants(constants)(num_devices=64)
  stage = made.lm().stacked_transformer_tpl.pipeline_stage
  assert (stage.x_times if is_loop else stage.num_layers) == 24 / 4
  assert stage.checkpoint_policy == 'dots'
  assert made.lm().softmax_tpl.chunks == 8
  assert made.lm().Instantiate().num_params() == 2_926_491_648
