"""Encoder-decoders on synthetic sequences.

Expected: ReverseEncoderDecoder: after 750 steps 0.0025 nats a token and 99.97%
          of the tokens right, on 512 unseen sequences; 64 of 64 greedy
          decodings are the reversed source. After 250 of 1000 steps, 0.15 nats
          and 96%. A model that does not see the source gets 2.73 nats at best.
Hardware: two cores; a run takes 85 s of CPU, a third of it to compile.
Command:  python -m examples.pax.main --job_log_dir=/tmp/reverse \
            --exp=ReverseEncoderDecoder
"""

from typing import Any, ClassVar, Self

import fiddle as fdl
import jax.numpy as jnp

from examples.pax import base_experiment
from examples.pax import experiment_registry
from examples.pax import learners
from examples.pax import models
from examples.pax import optimizers
from examples.pax import schedules
from examples.pax import tasks
from examples.pax.layers import activations
from examples.pax.layers import attentions
from examples.pax.layers import embedding_softmax
from examples.pax.layers import transformers
from examples.pax.tasks.synthetic import input as synthetic_input
from jaxline.inputs import base as inputs


@experiment_registry.register
class ReverseEncoderDecoder(base_experiment.BaseExperiment):
  """Writes a sequence backwards."""

  REVERSE: ClassVar[bool] = True  # Else a sequence is written as it is.
  NUM_LAYERS: ClassVar[int] = 2  # Of the encoder, and of the decoder.
  MODEL_DIMS: ClassVar[int] = 64  # Width of the residual stream.
  HIDDEN_DIMS: ClassVar[int] = 256  # Width within the feed-forward parts.
  NUM_HEADS: ClassVar[int] = 4
  VOCAB_SIZE: ClassVar[int] = 18  # The symbols, and two that begin and end.
  MIN_LENGTH: ClassVar[int] = 1  # Symbols of the shortest sequence.
  MAX_LENGTH: ClassVar[int] = 12
  BATCH_SIZE: ClassVar[int] = 64  # Over all devices.
  EVAL_EXAMPLES: ClassVar[int] = 512
  FPROP_DTYPE: ClassVar[str] = 'float32'  # Of what is computed.

  LEARNING_RATE: ClassVar[float] = 3e-3  # At its peak.
  # How long it rises, half of the run at most; then it falls to the last step.
  LR_WARMUP_STEPS: ClassVar[int] = 50
  CLIP_GRADIENT_NORM: ClassVar[float] = 1.0  # Of all gradients together.

  MAX_STEPS: ClassVar[int] = 750
  CHECKPOINT_EVERY_N_STEPS: ClassVar[int] = 250
  SUMMARY_INTERVAL_STEPS: ClassVar[int] = 50
  EVAL_INTERVAL_STEPS: ClassVar[int] = 250

  changeable_constants = ('EVAL_EXAMPLES',)

  def datasets(self) -> list[fdl.Config]:
    """Returns sequences to train on, and others to evaluate on."""
    config = fdl.Config(
      synthetic_input.SequenceInput,
      batch_size=inputs.per_host(self.BATCH_SIZE, self.shard),
      shard=self.shard,
      min_length=self.MIN_LENGTH,
      max_length=self.MAX_LENGTH,
      vocab_size=self.VOCAB_SIZE,
      reverse=self.REVERSE,
      shuffle=False,  # They are random as they are.
      input_random_seed=self.RANDOM_SEED,
    )
    return [
      fdl.copy_with(config, is_training=True),
      fdl.copy_with(
        config,
        size=self.EVAL_EXAMPLES,
        reset_for_eval=True,
        eval_loop_num_batches=None,
      ),
    ]

  def task(self) -> Any:
    """Returns the task."""
    stack = transformers.StackedTransformer.HParams(
      num_layers=self.NUM_LAYERS,
      model_dims=self.MODEL_DIMS,
      hidden_dims=self.HIDDEN_DIMS,
      num_heads=self.NUM_HEADS,
      transformer_layer_params_tpl=transformers.Transformer.HParams(
        tr_atten_tpl=attentions.DotProductAttention.HParams(combine_qkv=True),
        tr_fflayer_tpl=transformers.TransformerFeedForward.HParams(
          activation_tpl=activations.GELU.HParams()
        ),
      ),
    )
    network = transformers.TransformerEncoderDecoder.HParams(
      vocab_size=self.VOCAB_SIZE,
      model_dims=self.MODEL_DIMS,
      softmax_tpl=embedding_softmax.SharedEmbeddingSoftmax.HParams(
        scale_sqrt_depth=True
      ),
      encoder_stacked_transformer_tpl=stack,
      decoder_stacked_transformer_tpl=stack.clone(),
    )
    warmup_steps = min(self.LR_WARMUP_STEPS, self.MAX_STEPS // 2)
    optimizer = optimizers.Adam.HParams(
      learning_rate=self.LEARNING_RATE,
      lr_schedule=schedules.LinearRampupCosineDecay.HParams(
        warmup_steps=warmup_steps,
        decay_start=warmup_steps,
        decay_end=self.MAX_STEPS,
      ),
      clip_gradient_norm_to_value=self.CLIP_GRADIENT_NORM,
    )
    greedy = models.GreedyDecoderHParams(
      max_decode_steps=self.MAX_LENGTH + 1, eos_id=synthetic_input.STOP_ID
    )
    task = tasks.SingleTask.HParams(
      name='sequences',
      model=models.SequenceModel.HParams(model_tpl=network, decoder_tpl=greedy),
    )
    task.model.fprop_dtype = jnp.dtype(self.FPROP_DTYPE)
    task.train.learner = learners.Learner.HParams(optimizer=optimizer)
    return task

  @classmethod
  def reduced(cls) -> type[Self]:
    """Returns itself: it is small."""
    return cls


@experiment_registry.register
class CopyEncoderDecoder(ReverseEncoderDecoder):
  """Writes a sequence as it is."""

  REVERSE = False
