"""A language model of 1.1 billion weights, for one large GPU, or for TPUs.

Expected: not known: only some steps were run. By the TPU compiler, four v5p
          chips need 8.2 GiB each, 3.0 of it state, and compute bounds the step.
Hardware: one GPU of 80 GB or more (H100, H200); bfloat16, flash attention.
Time:     20,000 steps of at least 0.0688 s are 23 minutes on 4 v5p chips:
          computed, not measured (lm_1b in docs/reference/scale.md). On one
          H200 a step takes 0.256 s, measured: 20,000 are 1 h 25 min.
Command:  python experiment.py --config=configs/lm_1b.py \
            --config.experiment_kwargs.config.files='text/**/*.txt'
          Without the GPU, what it needs of TPUs in its place: \
            --jaxline_mode=compile --config.topology=v5p:2x2x1
"""

from ml_collections import config_dict

from configs import lm


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = lm.get_config()
  config.training_steps = 20_000
  config.log_tensors_interval = 10
  config.log_train_data_interval = 10
  config.save_checkpoint_interval = 1000  # 13 GB each.
  config.max_checkpoints_to_keep = 2
  config.eval_interval = 1000
  config.sharding = 'fsdp'  # The same run on all the GPUs of a node.

  kwargs = config.experiment_kwargs.config
  kwargs.model.vocab_size = 32_000  # For a tokenizer of your own.
  kwargs.model.num_layers = 20
  kwargs.model.embed_dim = 2048
  kwargs.model.num_heads = 16  # Heads of 128: what matrix units like.
  kwargs.model.mlp_dim = 5632
  kwargs.model.normalize_embedding = False  # Not tried at this size.
  kwargs.model.max_length = 2048
  kwargs.model.attention = 'flash'  # No scores of 2048 x 2048 in memory.
  kwargs.model.dtype = 'bfloat16'
  kwargs.model.scan_layers = True
  kwargs.model.remat = 'dots'
  kwargs.model.loss_chunks = 8  # The logits alone would be 2 GB.

  kwargs.batch_size = 8  # 16384 tokens a step.
  kwargs.length = 2048
  kwargs.eval_batch_size = 8
  kwargs.eval_batches = 50
  kwargs.learning_rate = 3e-4  # As others train models of this size.
  kwargs.warmup_fraction = 0.05
  kwargs.decay = 'cosine'
  kwargs.final_learning_rate = 0.1
  return config
