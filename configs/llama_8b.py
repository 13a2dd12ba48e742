"""Llama 3 8B: trains 8 billion weights from random initial values.

Expected: not known; we have not run it. According to the TPU compiler, it needs
          5.95 GiB on each of 64 v5p chips, or 6.05 GiB on each of 64 v6e chips.
          1.40 GiB of that is state. Compute bounds the step.
Hardware: 64 chips of v5p or v6e; bfloat16, flash attention.
Time:     20,000 steps of at least 1.21 s are 7 hours on 64 v5p chips: computed,
          not measured (llama_8b in docs/reference/scale.md).
Command:  python experiment.py --config=configs/llama_8b.py \
            --config.experiment_kwargs.config.files='text/**/*.txt'
          For its memory and time without TPUs: --jaxline_mode=compile \
            --config.topology=v5p:4x4x4  # Or v6e:8x8.
"""

from ml_collections import config_dict

from configs import lm_1b


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = lm_1b.get_config()
  config.save_checkpoint_interval = 2000  # 96 GB each.

  kwargs = config.experiment_kwargs.config
  # Meta's values, except for the tokenizer.
  kwargs.model.vocab_size = 128_256
  kwargs.model.num_layers = 32
  kwargs.model.embed_dim = 4096
  kwargs.model.num_heads = 32
  kwargs.model.num_kv_heads = 8
  kwargs.model.mlp_dim = 14_336
  kwargs.model.max_length = 8192
  kwargs.model.rotary_base = 500_000.0
  kwargs.model.norm_epsilon = 1e-5
  kwargs.model.tie_embeddings = False
  kwargs.model.feed_forward = 'swiglu'
  kwargs.model.remat = 'full'

  kwargs.batch_size = 64  # 524,288 tokens a step.
  kwargs.length = 8192
  kwargs.eval_batch_size = 64
  return config
