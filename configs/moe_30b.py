"""A mixture of experts like Qwen3-30B-A3B: 30 billion weights, 3 active.

Expected: not known; we have not run it. According to the TPU compiler, it needs
          11.9 GiB on each of 64 v5p chips, or 11.8 GiB on each of 64 v6e chips.
          5.3 GiB of that is state. Compute bounds the step on v5p, memory on
          v6e.
Hardware: 64 chips of v5p or v6e; bfloat16, flash attention.
Time:     20,000 steps of at least 0.666 s are 3.7 hours on 64 v5p chips:
          computed, not measured (moe_30b in docs/reference/scale.md).
Command:  python experiment.py --config=configs/moe_30b.py \
            --config.experiment_kwargs.config.files='text/**/*.txt'
          For its memory and time without TPUs: --jaxline_mode=compile \
            --config.topology=v5p:4x4x4  # Or v6e:8x8.
"""

from ml_collections import config_dict

from configs import llama_8b


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = llama_8b.get_config()
  config.save_checkpoint_interval = 2000  # 366 GB each.
  config.sharding = 'fsdp_ep'
  config.mesh.ici.expert = 16  # Each device has 8 experts.

  kwargs = config.experiment_kwargs.config
  # Alibaba's values, except for the tokenizer and the length.
  kwargs.model.vocab_size = 151_936
  kwargs.model.num_layers = 48
  kwargs.model.embed_dim = 2048
  kwargs.model.num_heads = 32
  kwargs.model.num_kv_heads = 4
  kwargs.model.head_size = 128
  kwargs.model.qk_norm = True
  kwargs.model.mlp_dim = 768
  kwargs.model.num_experts = 128
  kwargs.model.experts_per_token = 8
  kwargs.model.router_normalize = True
  # Alibaba's loss is K times ours, with a weight of 0.001.
  kwargs.model.router_balance_loss = 0.008
  kwargs.model.expert_capacity = 1.25  # It bounds the bytes that are sent.
  kwargs.model.max_length = 4096
  kwargs.model.rotary_base = 1e6
  kwargs.model.norm_epsilon = 1e-6

  kwargs.batch_size = 128  # 524,288 tokens a step.
  kwargs.length = 4096
  kwargs.eval_batch_size = 128
  return config
