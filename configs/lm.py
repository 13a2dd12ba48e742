"""A language model on the source text of Python's standard library.

Expected: 1.44 bits per byte on the held-out files of Python 3.11, for which
          gzip -9 needs 1.92 and xz 1.63. 1.73 after 1800 steps, 1.58 after
          3600.
Hardware: two cores of an Intel Xeon; no GPU.
Time:     5 minutes, measured.
Command:  python experiment.py --config=configs/lm.py \
            --jaxline_mode=train_and_eval

Text of your own: --config.experiment_kwargs.config.files='path/**/*.md'
"""

from ml_collections import config_dict

from jaxline import base_config


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = base_config.get_base_config()
  config.experiment_class = 'examples.lm.experiment:Experiment'

  config.training_steps = 5400
  config.interval_type = 'steps'  # Two runs of one config log the same steps.
  config.log_tensors_interval = 100  # A line every few seconds.
  config.log_train_data_interval = 50
  config.eval_interval = 1800
  config.save_checkpoint_interval = 1800
  config.best_model_eval_metric = 'bits_per_byte'
  config.best_model_eval_metric_higher_is_better = False

  config.sharding = 'ddp'  # Weights this small are best whole on each device.

  kwargs = config.experiment_kwargs.config = config_dict.ConfigDict()
  # 1.05 million weights: for so short a run, a larger model learns less.
  kwargs.model = config_dict.ConfigDict()
  kwargs.model.vocab_size = 2048  # That of the tokenizer.
  kwargs.model.num_layers = 4
  kwargs.model.embed_dim = 128
  kwargs.model.num_heads = 4
  kwargs.model.mlp_dim = 344  # 8/3 of the width: SwiGLU has a third matrix.
  kwargs.model.feed_forward = 'swiglu'
  # Embeddings start 50 times smaller than the output of a layer. Normalized,
  # they are not lost in the sum.
  kwargs.model.normalize_embedding = True
  kwargs.model.max_length = 256
  kwargs.model.scan_layers = False  # Few layers: unrolled is a quarter faster.
  kwargs.model.attention = 'einsum'
  kwargs.model.dtype = 'float32'  # Two cores have no faster one.
  kwargs.model.matmul = 'dtype'
  kwargs.model.remat = 'nothing'  # It fits in memory.
  kwargs.model.loss_chunks = 1
  kwargs.model.pipeline_stages = 1
  kwargs.model.pipeline_microbatches = 1
  kwargs.model.pipeline_repeats = 1

  kwargs.files = 'stdlib'
  kwargs.documents = 'file'
  kwargs.text_key = 'text'  # Of documents='jsonl'.
  kwargs.eval_fraction = 0.05
  kwargs.tokenizer = 'stdlib'  # 3 bytes a token: as many steps read more text.
  # Windows of the stream. To tell documents apart ('packed') costs attention a
  # mask, and most windows lie within one file.
  kwargs.packing = 'stream'
  kwargs.cache_dir = config_dict.placeholder(str)
  # On two cores time goes with tokens, and learning with steps: many small
  # steps beat few large ones (with bytes for tokens, 2.4 bits per byte against
  # 3.1 with batch 8, from the same two minutes). Rounded up to the devices.
  kwargs.batch_size = 2
  kwargs.length = 256
  kwargs.eval_batch_size = 16
  kwargs.eval_batches = config_dict.placeholder(int)  # All that is held out.
  # References, so that an override of the run's own value reaches these too.
  kwargs.seed = config.get_ref('random_seed')
  kwargs.training_steps = config.get_ref('training_steps')

  kwargs.learning_rate = 3e-3
  # 135 steps: Adam's second moment has settled by then.
  kwargs.warmup_fraction = 0.025
  kwargs.decay = 'linear'
  kwargs.final_learning_rate = 0.0
  kwargs.b1 = 0.9
  kwargs.b2 = 0.95  # 0.999 would remember longer than the warm-up lasts.
  kwargs.weight_decay = 0.1
  kwargs.clip_norm = 1.0
  kwargs.trainable = config_dict.placeholder(str)  # All weights.
  kwargs.lora = config_dict.ConfigDict()
  kwargs.lora.rank = 0  # No adapters.
  kwargs.lora.alpha = 16.0
  kwargs.lora.targets = (
    'layers/(attention/(qkv|q|kv|out)|feed_forward/(in|out))'
  )

  kwargs.sample_prompt = 'def'
  kwargs.sample_length = 240  # With the prompt, no longer than max_length.
  kwargs.sample_temperature = 0.8  # Below 1: likelier, and less noisy, text.

  # 'special' and 'chat' are for models whose folder says how to read a prompt.
  kwargs.prompt_format = 'text'
  # --jaxline_mode=decode. With the prompt, too, no longer than max_length.
  kwargs.decode = config_dict.ConfigDict()
  kwargs.decode.method = 'sample'  # 'greedy' and 'beam' soon repeat themselves.
  kwargs.decode.max_decode_steps = 128
  kwargs.decode.temperature = 0.8
  kwargs.decode.top_k = 40
  kwargs.decode.top_p = 1.0
  kwargs.decode.num_samples = 1
  kwargs.decode.sort_samples = True
  kwargs.decode.beam_size = 4
  kwargs.decode.length_norm_alpha = 0.8
  kwargs.decode.stop_ids = ()
  kwargs.decode.scores = True  # Without them it is faster.
  return config
