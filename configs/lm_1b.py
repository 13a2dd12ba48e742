"""A language model of 1.1 billion weights, for one large GPU or for TPUs.

Expected: not known; we ran only 10 steps, on an H200. According to the TPU
          compiler, it needs 8.2 GiB on each of four v5p chips. 3.0 GiB of that
          is state. Compute bounds the step.
Hardware: one GPU of 80 GB or more (H100, H200); bfloat16, flash attention.
Time:     0.256 s a step on one H200, measured on 2026-11-27: 20,000 steps are
          1 h 25 min. At least 0.0688 s a step on 4 v5p chips, computed and not
          measured (lm_1b in docs/reference/scale.md): 23 minutes.
Command:  python experiment.py --config=configs/lm_1b.py \
            --config.experiment_kwargs.config.files='text/**/*.txt'
          For its memory and time on TPUs, without TPUs: \
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
  config.sharding = 'fsdp'  # The run also fits a node with several GPUs.

  kwargs = config.experiment_kwargs.config
  kwargs.model.vocab_size = 32_000  # You bring the tokenizer.
  kwargs.model.num_layers = 20
  kwargs.model.embed_dim = 2048
  kwargs.model.num_heads = 16  # Heads of 128 suit matrix units.
  kwargs.model.mlp_dim = 5632
  kwargs.model.normalize_embedding = False  # Not tried at this size.
  kwargs.model.bigram_rows = 0  # Not tried at this size.
  kwargs.model.tie_embeddings = True
  kwargs.model.max_length = 2048
  kwargs.model.attention = 'flash'  # It keeps no 2048 x 2048 scores in memory.
  kwargs.model.dtype = 'bfloat16'
  kwargs.model.scan_layers = True
  kwargs.model.remat = 'dots'
  kwargs.model.loss_chunks = 8  # All logits at once would take 2 GB.

  kwargs.batch_size = 8  # 16384 tokens a step.
  kwargs.length = 2048
  kwargs.eval_batch_size = 8
  kwargs.eval_batches = 50
  kwargs.learning_rate = 3e-4  # The usual rate for models of this size.
  kwargs.warmup_fraction = 0.05
  kwargs.b2 = 0.95
  kwargs.decay = 'cosine'
  kwargs.final_learning_rate = 0.1
  return config
