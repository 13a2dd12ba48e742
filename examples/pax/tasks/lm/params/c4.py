"""Language models on C4, from Pax's documents.

Expected: Compiled for their chips, the models fit into memory; see
          docs/reference/scale.md. They were not trained here, but their reduced
          versions were; see examples/pax/README.md.
Hardware: the topology of each experiment below. `--reduced` is for two cores.
Command:  python -m examples.pax.main --job_log_dir=/tmp/c4 \
            --exp=tasks.lm.params.c4.C4Spmd1BAdam4Replicas \
            --config.data_dir=c4/en --config.vocabulary=my.model
"""

from examples.pax import experiment_registry
from examples.pax.tasks.lm import model_params


class C4Spmd(model_params.LmExperiment):
  """Constants that all of these experiments share."""

  DATA = 'c4'
  VOCAB_SIZE = 32000
  MAX_SEQ_LEN = 1024
  LEARNING_RATE = 1e-3
  CHECKPOINT_EVERY_N_STEPS = 1000
  SUMMARY_INTERVAL_STEPS = 10


@experiment_registry.register
class C4Spmd1BAdam4Replicas(C4Spmd):
  """1 billion weights on 4 chips."""

  NUM_LAYERS = 13
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 10240
  NUM_HEADS = 20
  DIMS_PER_HEAD = 128
  PERCORE_BATCH_SIZE = 32
  ICI_MESH_SHAPE = (1, 4, 1)
  TOPOLOGY = 'v4:2x2x1'


@experiment_registry.register
class C4Spmd16BAdam32Replicas(C4Spmd):
  """16 billion weights on 32 chips."""

  NUM_LAYERS = 36
  MODEL_DIMS = 6144
  HIDDEN_DIMS = 24576
  NUM_HEADS = 48
  DIMS_PER_HEAD = 128
  PERCORE_BATCH_SIZE = 16
  ICI_MESH_SHAPE = (1, 16, 2)
  TOPOLOGY = 'v4:2x4x4'


class C4SpmdGpt3(C4Spmd):
  """The architecture and the optimizer of GPT-3 (Brown et al., 2020)."""

  MAX_SEQ_LEN = 2048
  TRAINABLE_POSITION_EMB = True
  TRAINABLE_PE_MAX_SEQ_LEN = 16384
  ATTEN_LOGIT_CAP = 0.0
  SOFTMAX_CAP_LOGITS = 0.0
  SCALE_SQRT_DEPTH = False
  SOFTMAX_BIAS = False
  USE_BIAS = True
  ENABLE_PER_DIM_SCALE = False
  NORM_EPSILON = 1e-5
  INIT_STD = 0.006

  ADAM_BETA2 = 0.95
  ADAM_EPSILON = 1e-8
  ADAM_CLIP_THRESHOLD = 0.0
  WEIGHT_DECAY = 0.1
  CLIP_GRADIENT_NORM = 1.0
  LR_SCHEDULE = 'cosine'
  LR_WARMUP_STEPS = 265
  LR_DECAY_START = 266
  LR_DECAY_END = 108_600
  TARGET_LOG_PPLX = 2.69


@experiment_registry.register
class C4SpmdPipelineGpt3SmallAdam64Replicas(C4SpmdGpt3):
  """2.9 billion weights on 64 chips, in a pipeline of 4 stages.

  The name is from Pax's documents. Pax removed the experiment in 2023. There,
  it was described as 1.3 billion weights, with a vocabulary of 50257, which
  does not divide over 4 chips, and with 64 rows per step because of a
  misspelled constant. This class has the vocabulary of its successor for 8
  replicas, and the intended 512 rows.
  """

  NUM_LAYERS = 24
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 12288
  NUM_HEADS = 24
  DIMS_PER_HEAD = 128
  VOCAB_SIZE = 51200
  PERCORE_BATCH_SIZE = 8

  NUM_STAGES = 4
  MICROBATCH_SIZE = 16
  SHARDING = 'pipeline'
  # The logits of whole rows and their gradient take 19 of 23 GiB per chip. In
  # chunks, the step needs 9 GiB, with the same products.
  LOSS_CHUNKS = 8
  ICI_MESH_SHAPE = (4, 1, 4, 4)
  DCN_MESH_SHAPE = (1, 1, 1, 1)
  TOPOLOGY = 'v4:4x4x4'

  LEARNING_RATE = 2e-4
  MAX_STEPS = 108_600  # The end of the schedule.
  CHECKPOINT_EVERY_N_STEPS = 200
  SUMMARY_INTERVAL_STEPS = 1


@experiment_registry.register
class C4SpmdGpt3AdamDataParallel2x16x16(C4SpmdGpt3):
  """175 billion weights on two slices of 256 chips."""

  NUM_LAYERS = 96
  MODEL_DIMS = 12288
  HIDDEN_DIMS = 49152
  NUM_HEADS = 96
  DIMS_PER_HEAD = 128
  VOCAB_SIZE = 50257
  PERCORE_BATCH_SIZE = 0.5

  ICI_MESH_SHAPE = (1, 16, 16)
  DCN_MESH_SHAPE = (2, 1, 1)
  TOPOLOGY = 'v4:4x8x8'

  LEARNING_RATE = 6e-5
  MAX_STEPS = 100
  CHECKPOINT_EVERY_N_STEPS = 2000
