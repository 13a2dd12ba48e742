"""The base class of the registered language models, defined by constants.

Most of Pax's language models share these values. A subclass sets the sizes and
all values that differ.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import fiddle as fdl
import jax.numpy as jnp

from examples import transformer
from examples.pax import base_experiment
from examples.pax import base_layer
from examples.pax import learners
from examples.pax import models
from examples.pax import optimizers
from examples.pax import schedules
from examples.pax import tasks
from examples.pax.inputs import c4
from examples.pax.inputs import synthetic
from examples.pax.layers import activations
from examples.pax.layers import attentions
from examples.pax.layers import embedding_softmax
from examples.pax.layers import normalizations
from examples.pax.layers import transformers
from jaxline import errors
from jaxline.inputs import base as inputs
from jaxline.inputs import text
from jaxline.inputs import tokenization

_DTYPES = ('bfloat16', 'float16', 'float32', 'float64')
_ACTIVATIONS = {
  'gelu': activations.GELU,
  'relu': activations.ReLU,
  'silu': activations.SiLU,
}
_SCHEDULES = {
  'exponential': schedules.LinearRampupExponentialDecay,
  'cosine': schedules.LinearRampupCosineDecay,
}


class LmExperiment(base_experiment.BaseExperiment):
  """A decoder-only transformer, trained with Adam."""

  NUM_LAYERS: ClassVar[int]
  MODEL_DIMS: ClassVar[int]  # Width of the residual stream, D.
  HIDDEN_DIMS: ClassVar[int]  # Hidden width of the feed-forward blocks, F.
  NUM_HEADS: ClassVar[int]
  DIMS_PER_HEAD: ClassVar[int]
  VOCAB_SIZE: ClassVar[int]
  MAX_SEQ_LEN: ClassVar[int]  # Tokens of a row in training.
  # Rows per device of the mesh, possibly a fraction.
  PERCORE_BATCH_SIZE: ClassVar[float]

  ACTIVATION: ClassVar[str] = 'gelu'  # 'gelu' (tanh form), 'relu' or 'silu'.
  # Whether a second projection multiplies the activation.
  USE_GATED_ACTIVATION: ClassVar[bool] = False
  # Whether attention has biases. The feed-forward blocks always do.
  USE_BIAS: ClassVar[bool] = False
  # Whether queries, keys and values are computed as one product.
  COMBINE_QKV: ClassVar[bool] = True
  # Whether queries have a learned scale for each dimension.
  ENABLE_PER_DIM_SCALE: ClassVar[bool] = True
  ATTEN_LOGIT_CAP: ClassVar[float] = 50.0  # 0 disables the cap.
  # Cap of the output logits. 0 disables it.
  SOFTMAX_CAP_LOGITS: ClassVar[float] = 30.0
  SOFTMAX_BIAS: ClassVar[bool] = True
  # Whether embedded tokens are multiplied by sqrt(D).
  SCALE_SQRT_DEPTH: ClassVar[bool] = True
  # Whether position embeddings are trained. If not, they are sinusoids.
  TRAINABLE_POSITION_EMB: ClassVar[bool] = False
  TRAINABLE_PE_MAX_SEQ_LEN: ClassVar[int] = 16384
  NORM_EPSILON: ClassVar[float] = 1e-6
  # Standard deviation of all initial weights. None means Xavier, and
  # 1 / sqrt(D) for the embedding.
  INIT_STD: ClassVar[float | None] = None

  # Dtype of the computation. Weights are float32.
  FPROP_DTYPE: ClassVar[str] = 'bfloat16'
  # Whether the layers' products with weights use 8-bit floats.
  USE_FP8: ClassVar[bool] = False
  ATTENTION_IMPL: ClassVar[str] = 'einsum'  # One of `transformer.ATTENTIONS`.
  # Number of pieces of a row in the loss, which holds one piece's logits.
  LOSS_CHUNKS: ClassVar[int] = 1
  # Whether the layers (in a pipeline, a stage's layers) are one loop over
  # stacked weights. If not, they are unrolled.
  USE_REPEATED_LAYER: ClassVar[bool] = True
  # Rematerialization policy, one of `transformer.REMATS`.
  CHECKPOINT_POLICY: ClassVar[str] = 'full'
  NUM_STAGES: ClassVar[int] = 1  # Pipeline stages. 1 means no pipeline.
  # Rows of a pipeline's microbatch.
  MICROBATCH_SIZE: ClassVar[int | None] = None
  SHARDING: ClassVar[str] = 'fsdp_tp'

  LEARNING_RATE: ClassVar[float]  # Peak value, after a linear warm-up.
  LR_SCHEDULE: ClassVar[str] = 'exponential'  # 'exponential' or 'cosine'.
  LR_WARMUP_STEPS: ClassVar[int] = 4000
  LR_DECAY_START: ClassVar[int] = 4001  # First step of the decay.
  LR_DECAY_END: ClassVar[int] = 300_000
  LR_MIN_RATIO: ClassVar[float] = 0.1  # Final rate, as a fraction of the peak.
  ADAM_BETA1: ClassVar[float] = 0.9
  ADAM_BETA2: ClassVar[float] = 0.99
  ADAM_EPSILON: ClassVar[float] = 1e-6  # Added to the second moment's root.
  # Maximum root mean square of an update. 0 means no limit.
  ADAM_CLIP_THRESHOLD: ClassVar[float] = 1.0
  WEIGHT_DECAY: ClassVar[float] = 1e-3  # Applies to all weights.
  CLIP_GRADIENT_NORM: ClassVar[float] = 5.0  # Norm of all gradients together.
  # Training stops when an evaluation reaches this many nats per token.
  TARGET_LOG_PPLX: ClassVar[float | None] = None

  # 'c4', 'stdlib' (the bundled corpus), 'synthetic' (ones), or a folder or glob
  # of text files.
  DATA: ClassVar[str]
  DATA_DIR: ClassVar[str | None] = None  # Folder of C4's files.
  # Whether C4's documents end with an end token. If not, the rows are Pax's,
  # and there is no token before a prompt: see `c4.c4_input`.
  APPEND_EOS: ClassVar[bool] = True
  # SentencePiece model. None means bytes; C4 requires a model.
  VOCABULARY: ClassVar[str | None] = None
  # Batches of an evaluation. None means all.
  EVAL_LOOP_NUM_BATCHES: ClassVar[int | None] = 1

  # Constants that affect only how a step is computed, or evaluation.
  changeable_constants = (
    'ATTENTION_IMPL',
    'CHECKPOINT_POLICY',
    'EVAL_LOOP_NUM_BATCHES',
    'LOSS_CHUNKS',
    'MICROBATCH_SIZE',
    'NUM_STAGES',
  )

  def _one_of(self, name: str, valid: Any) -> str:
    """Returns a constant after checking it against its valid values."""
    value = getattr(self, name)
    errors.check_names([value], valid, 'value', name)
    return value

  # Data.

  def datasets(self) -> list[fdl.Config]:
    """Returns an input for training and one for evaluation."""
    config: fdl.Config
    if self.DATA == 'synthetic':
      config = fdl.Config(
        synthetic.SyntheticInput,
        eval_loop_num_batches=self.EVAL_LOOP_NUM_BATCHES or 1,
      )
    elif self.DATA == 'c4':
      config = fdl.Config(
        c4.c4_input,
        data_dir=self.DATA_DIR,
        vocabulary=self.VOCABULARY,
        append_eos=self.APPEND_EOS,
        eval_batches=self.EVAL_LOOP_NUM_BATCHES,
      )
    else:
      config = fdl.Config(
        _text_input,
        files=self.DATA,
        tokenizer=self._tokenizer,
        eval_batches=self.EVAL_LOOP_NUM_BATCHES,
      )
    rows = self.rows(self.PERCORE_BATCH_SIZE)
    config.batch_size = inputs.per_host(rows, self.shard)
    config.shard = self.shard
    config.length = self.MAX_SEQ_LEN
    config.vocab_size = self.VOCAB_SIZE
    return [
      fdl.copy_with(config, is_training=is_training)
      for is_training in (True, False)
    ]

  @property
  def _tokenizer(self) -> str:
    return 'bytes' if self.VOCABULARY is None else self.VOCABULARY

  def input_specs(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """Returns the shapes and dtypes of a packed row of tokens."""
    integers, floats = (
      ['ids', 'labels', 'segment_ids', 'segment_pos'],
      ['weights'],
    )
    if self.DATA in ('c4', 'synthetic'):
      floats.append('paddings')
    row = (self.MAX_SEQ_LEN,)
    return {
      **dict.fromkeys(integers, (row, 'int32')),
      **dict.fromkeys(floats, (row, 'float32')),
    }

  def prompting(self) -> base_experiment.Prompting:
    """Returns the tokenizer of the data, and the token before a document."""
    if self.DATA == 'c4':
      if self.VOCABULARY is None:
        raise errors.UsageError(
          'To decode, a model of C4 needs the SentencePiece model that it was'
          ' trained with. Set --config.vocabulary=FILE.model.'
        )
      # Documents begin and end as in `c4.c4_input`.
      tokenizer = tokenization.load_tokenizer(f'{self.VOCABULARY}#</s>')
      start_id = c4.BOS_ID if self.APPEND_EOS else None
    else:
      tokenizer = tokenization.load_tokenizer(self._tokenizer)
      start_id = tokenizer.document_id
    return base_experiment.Prompting(tokenizer, start_id, self.MAX_SEQ_LEN)

  # Task.

  def task(self) -> Any:
    """Returns the HParams of the task."""
    optimizer = optimizers.Adam.HParams(
      learning_rate=self.LEARNING_RATE,
      lr_schedule=_SCHEDULES[self._one_of('LR_SCHEDULE', _SCHEDULES)].HParams(
        warmup_steps=self.LR_WARMUP_STEPS,
        decay_start=self.LR_DECAY_START,
        decay_end=self.LR_DECAY_END,
        min_ratio=self.LR_MIN_RATIO,
      ),
      beta1=self.ADAM_BETA1,
      beta2=self.ADAM_BETA2,
      epsilon=self.ADAM_EPSILON,
      clip_threshold=self.ADAM_CLIP_THRESHOLD,
      weight_decay=self.WEIGHT_DECAY,
      clip_gradient_norm_to_value=self.CLIP_GRADIENT_NORM,
    )
    task = tasks.SingleTask.HParams(
      name='lm',
      model=models.LanguageModel.HParams(
        lm_tpl=self.lm(),
        fprop_dtype=jnp.dtype(self._one_of('FPROP_DTYPE', _DTYPES)),
      ),
    )
    task.train.learner = learners.Learner.HParams(optimizer=optimizer)
    return task

  def lm(self) -> Any:
    """Returns the HParams of the network."""
    norm = normalizations.LayerNorm.HParams(epsilon=self.NORM_EPSILON)
    position: Any = embedding_softmax.PositionalEmbedding.HParams()
    if self.TRAINABLE_POSITION_EMB:
      position = embedding_softmax.TrainablePositionalEmbedding.HParams(
        max_seq_length=self.TRAINABLE_PE_MAX_SEQ_LEN
      )
    weight_init = base_layer.WeightInit
    softmax_init = weight_init.Gaussian(self.INIT_STD or self.MODEL_DIMS**-0.5)
    return transformers.TransformerLm.HParams(
      vocab_size=self.VOCAB_SIZE,
      model_dims=self.MODEL_DIMS,
      packed_input=True,
      params_init=weight_init.Gaussian(self.INIT_STD)
      if self.INIT_STD
      else None,
      position_emb_tpl=position,
      softmax_tpl=embedding_softmax.SharedEmbeddingSoftmax.HParams(
        params_init=softmax_init,
        scale_sqrt_depth=self.SCALE_SQRT_DEPTH,
        soft_cap_logits=self.SOFTMAX_CAP_LOGITS,
        has_bias=self.SOFTMAX_BIAS,
        chunks=self.LOSS_CHUNKS,
      ),
      final_ln_tpl=norm,
      stacked_transformer_tpl=self._stack(norm),
    )

  def _stack(self, norm: Any) -> Any:
    """Returns the HParams of the layers: unrolled, a loop, or a pipeline."""
    product = attentions.Projection.HParams(use_fp8=self.USE_FP8)
    layer = transformers.Transformer.HParams(
      ln_tpl=norm,
      tr_atten_tpl=attentions.DotProductAttention.HParams(
        use_bias=self.USE_BIAS,
        combine_qkv=self.COMBINE_QKV,
        atten_logit_cap=self.ATTEN_LOGIT_CAP,
        internal_enable_per_dim_scale=self.ENABLE_PER_DIM_SCALE,
        attention_impl=self._one_of('ATTENTION_IMPL', transformer.ATTENTIONS),
        proj_tpl=product,
      ),
      tr_fflayer_tpl=transformers.TransformerFeedForward.HParams(
        ln_tpl=norm,
        activation_tpl=_ACTIVATIONS[
          self._one_of('ACTIVATION', _ACTIVATIONS)
        ].HParams(),
        use_gated_activation=self.USE_GATED_ACTIVATION,
        proj_tpl=product.clone(),
      ),
    )
    self._check_stages()
    num_layers = self.NUM_LAYERS // self.NUM_STAGES
    stage: Any = transformers.StackedTransformer.HParams(
      num_layers=num_layers,
      model_dims=self.MODEL_DIMS,
      hidden_dims=self.HIDDEN_DIMS,
      num_heads=self.NUM_HEADS,
      dim_per_head=self.DIMS_PER_HEAD,
      transformer_layer_params_tpl=layer,
    )
    if self.USE_REPEATED_LAYER:
      stage = transformers.StackedTransformerRepeated.HParams(
        block=stage.set(num_layers=1), x_times=num_layers
      )
    stage.checkpoint_policy = self._one_of(
      'CHECKPOINT_POLICY', transformer.REMATS
    )
    if self.NUM_STAGES == 1:
      return stage
    return transformers.PipelinedTransformer.HParams(
      pipeline_stage=stage,
      num_pipeline_stages=self.NUM_STAGES,
      pipeline_microbatch_size=self.MICROBATCH_SIZE,
    )

  def _check_stages(self) -> None:
    """Raises a UsageError if the layers cannot form the pipeline's stages."""
    if self.NUM_LAYERS % self.NUM_STAGES:
      raise errors.UsageError(
        f'NUM_LAYERS is {self.NUM_LAYERS}; expected a multiple of NUM_STAGES,'
        f' {self.NUM_STAGES}.'
      )
    if self.NUM_STAGES == 1 and self.MICROBATCH_SIZE is not None:
      raise errors.UsageError(
        f'MICROBATCH_SIZE is {self.MICROBATCH_SIZE}, but there is no pipeline,'
        ' because NUM_STAGES is 1. Set more stages, or MICROBATCH_SIZE=None.'
      )

  @classmethod
  def reduced(cls) -> type[Self]:
    """Returns a version with the same options, 4 narrow layers, and bytes."""
    changes: dict[str, Any] = {
      'NUM_LAYERS': 4,
      'MODEL_DIMS': 128,
      'HIDDEN_DIMS': 512,
      'NUM_HEADS': 4,
      'DIMS_PER_HEAD': 32,
      'VOCAB_SIZE': tokenization.VOCABULARY_SIZE,
      'MAX_SEQ_LEN': 128,
      'TRAINABLE_PE_MAX_SEQ_LEN': 256,
      'PERCORE_BATCH_SIZE': 4,
      # No dtype is faster on a CPU.
      'FPROP_DTYPE': 'float32',
      'ICI_MESH_SHAPE': (1, -1, 1),
      'DCN_MESH_SHAPE': (1, 1, 1),
      'TOPOLOGY': None,
      'LEARNING_RATE': 4e-3,
      'LR_WARMUP_STEPS': 50,
      'LR_DECAY_START': 50,
      'LR_DECAY_END': 500,
      'MAX_STEPS': 400,
      'CHECKPOINT_EVERY_N_STEPS': 200,
      'SUMMARY_INTERVAL_STEPS': 20,
      'EVAL_INTERVAL_STEPS': 200,
      'EVAL_LOOP_NUM_BATCHES': 16,
      'TARGET_LOG_PPLX': None,  # The target is for larger tokens than bytes.
    }
    if cls.DATA == 'c4':
      changes['DATA'] = 'stdlib'
    if cls.INIT_STD is not None:
      changes['INIT_STD'] = (
        0.05  # The class's value is for a model 100 times as wide.
      )
    if cls.NUM_STAGES > 1:
      changes |= {'NUM_STAGES': 2, 'MICROBATCH_SIZE': 2}
    return cls.with_constants(changes)


def _text_input(
  *,
  tokenizer: str,
  vocab_size: int,
  is_training: bool,
  eval_batches: int | None,
  **fields: Any,
) -> text.TextInput:
  """Makes an input of packed rows of text files.

  Each evaluation reads the same `eval_batches` of the held-out documents, or
  all if it is None.
  """
  c4.check_vocabulary(tokenization.load_tokenizer(tokenizer), vocab_size)
  return text.TextInput(
    tokenizer=tokenizer,
    packing='packed',
    is_training=is_training,
    input_random_seed=c4.SEED if is_training else None,
    reset_for_eval=not is_training,
    max_batches=None if is_training else eval_batches,
    **fields,
  )
