"""Language models on several slices, from Pax's documents.

Expected: as in c4.py. The sizes are MaxText's, from the table in the documents.
Hardware: 1, 2 or 4 slices with the topology of each experiment. `--reduced` is
          for two cores.
Command:  python -m examples.pax.main --job_log_dir=/tmp/c4 \
            --exp=tasks.lm.params.c4_multislice.C4Spmd22BAdam2xv4_128 \
            --config.data_dir=c4/en --config.vocabulary=my.model
"""

from examples.pax import experiment_registry
from examples.pax.tasks.lm.params import c4

# Pax defines this experiment in this module.
C4SpmdGpt3AdamDataParallel2x16x16 = c4.C4SpmdGpt3AdamDataParallel2x16x16


@experiment_registry.register
class C4Spmd22BAdam1xv4_128(c4.C4Spmd):
  """22 billion weights on slices of 64 chips."""

  NUM_LAYERS = 48
  MODEL_DIMS = 6144
  HIDDEN_DIMS = 24576
  NUM_HEADS = 24
  DIMS_PER_HEAD = 256
  VOCAB_SIZE = 32768
  PERCORE_BATCH_SIZE = 16
  ICI_MESH_SHAPE = (1, 64, 1)
  TOPOLOGY = 'v4:4x4x4'


@experiment_registry.register
class C4Spmd22BAdam2xv4_128(C4Spmd22BAdam1xv4_128):
  """22 billion weights on two slices."""

  DCN_MESH_SHAPE = (2, 1, 1)


@experiment_registry.register
class C4Spmd22BAdam4xv4_128(C4Spmd22BAdam1xv4_128):
  """22 billion weights on four slices."""

  DCN_MESH_SHAPE = (4, 1, 1)


@experiment_registry.register
class C4Spmd22BAdam1xv4_384(C4Spmd22BAdam1xv4_128):
  """25 billion weights on slices of 192 chips."""

  NUM_LAYERS = 24
  MODEL_DIMS = 9216
  HIDDEN_DIMS = 36864
  DIMS_PER_HEAD = 384
  PERCORE_BATCH_SIZE = 10
  ICI_MESH_SHAPE = (1, 192, 1)
  TOPOLOGY = 'v4:4x4x12'


@experiment_registry.register
class C4Spmd22BAdam2xv4_384(C4Spmd22BAdam1xv4_384):
  """25 billion weights on two slices."""

  DCN_MESH_SHAPE = (2, 1, 1)


@experiment_registry.register
class C4Spmd22BAdam1xv4_8(C4Spmd22BAdam1xv4_128):
  """A small version, 0.9 billion weights on slices of 4 chips."""

  NUM_LAYERS = 16
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  NUM_HEADS = 8
  ICI_MESH_SHAPE = (1, 4, 1)
  TOPOLOGY = 'v4:2x2x1'


@experiment_registry.register
class C4Spmd22BAdam2xv4_8(C4Spmd22BAdam1xv4_8):
  """0.9 billion weights on two slices."""

  DCN_MESH_SHAPE = (2, 1, 1)


@experiment_registry.register
class C4Spmd22BAdam4xv4_8(C4Spmd22BAdam1xv4_8):
  """0.9 billion weights on four slices."""

  DCN_MESH_SHAPE = (4, 1, 1)
