"""Speed tests on synthetic data, from Pax's documents.

Expected: the model learns nothing, because all tokens are the same.
Hardware: one TPU v4-8. `--reduced` is for two cores.
Command:  python -m examples.pax.main --job_log_dir=/tmp/lm_cloud \
            --exp=tasks.lm.params.lm_cloud.LmCloudSpmd2BLimitSteps
"""

from examples.pax import experiment_registry
from examples.pax.tasks.lm import model_params


class LmCloud(model_params.LmExperiment):
  """Language models on synthetic data."""

  DATA = 'synthetic'
  TOPOLOGY = 'v4:2x2x1'
  VOCAB_SIZE = 32000
  MAX_SEQ_LEN = 1024


@experiment_registry.register
class LmCloudTransformerAdamLimitSteps(LmCloud):
  """159 million weights, replicated on all devices as with Pax's `pmap`."""

  NUM_LAYERS = 10
  MODEL_DIMS = 1024
  HIDDEN_DIMS = 4096
  NUM_HEADS = 16
  DIMS_PER_HEAD = 64
  PERCORE_BATCH_SIZE = 16

  ACTIVATION = 'relu'
  FPROP_DTYPE = 'float32'
  SOFTMAX_CAP_LOGITS = 0.0
  COMBINE_QKV = False
  USE_REPEATED_LAYER = False
  CHECKPOINT_POLICY = 'nothing'

  SHARDING = 'ddp'
  LEARNING_RATE = 1e-3
  MAX_STEPS = 2000


@experiment_registry.register
class LmCloudSpmd2BLimitSteps(LmCloud):
  """2 billion weights, split over 4 chips, with 32 rows per step."""

  NUM_LAYERS = 18
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 12288
  NUM_HEADS = 24
  DIMS_PER_HEAD = 128
  PERCORE_BATCH_SIZE = 8

  ICI_MESH_SHAPE = (1, 4, 1)
  LEARNING_RATE = 2.5e-4
  MAX_STEPS = 300
