"""A language model on the source text of Python's standard library.

Expected: 1.24 bits per byte on the held-out files of Python 3.11, after 1.50 at
          1800 steps and 1.34 at 3600. gzip -9 needs 1.92 and xz 1.63.
Hardware: two cores of an AMD EPYC; no GPU.
Time:     5 minutes, measured.
Command:  python experiment.py --config=configs/lm.py \
            --jaxline_mode=train_and_eval

For your text, add --config.experiment_kwargs.config.files='path/**/*.md'.
"""

from ml_collections import config_dict

from jaxline import base_config


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = base_config.get_base_config()
  config.experiment_class = 'examples.lm.experiment:Experiment'

  config.training_steps = 5400
  config.interval_type = 'steps'  # All runs of a config log the same steps.
  config.log_tensors_interval = 100  # A line every few seconds.
  config.log_train_data_interval = 50
  config.eval_interval = 1800
  config.save_checkpoint_interval = 1800
  config.best_model_eval_metric = 'bits_per_byte'
  config.best_model_eval_metric_higher_is_better = False

  config.sharding = 'ddp'  # Weights this small are best replicated.

  kwargs = config.experiment_kwargs.config = config_dict.ConfigDict()
  # 1.05 million weights of layers and output, all used by each token. In a run
  # this short, more of them learn less. The two input tables are cheap.
  kwargs.model = config_dict.ConfigDict()
  kwargs.model.vocab_size = 2048  # The vocabulary of the tokenizer.
  kwargs.model.num_layers = 4
  kwargs.model.embed_dim = 128
  kwargs.model.num_heads = 2  # More cost time: attention has more scores.
  kwargs.model.mlp_dim = 344  # 8/3 of the width: SwiGLU has a third matrix.
  kwargs.model.feed_forward = 'swiglu'
  # Embeddings start 50 times smaller than the output of a layer, and would be
  # lost in the sum.
  kwargs.model.normalize_embedding = True
  kwargs.model.tie_embeddings = False
  # A row for each hash of two tokens: the first layer knows the token before.
  # Of its 2.1 million weights, a token reads 128.
  kwargs.model.bigram_rows = 16384
  kwargs.model.max_length = 256
  kwargs.model.scan_layers = False  # Four unrolled layers are a quarter faster.
  kwargs.model.attention = 'einsum'
  kwargs.model.dtype = 'float32'  # Nothing is faster on a CPU.
  kwargs.model.matmul = 'dtype'
  kwargs.model.remat = 'nothing'  # All activations fit in memory.
  kwargs.model.loss_chunks = 1
  kwargs.model.pipeline_stages = 1
  kwargs.model.pipeline_microbatches = 1
  kwargs.model.pipeline_repeats = 1

  kwargs.files = 'stdlib'
  kwargs.documents = 'file'
  kwargs.text_key = 'text'  # The entry that documents='jsonl' reads.
  kwargs.eval_fraction = 0.05
  kwargs.tokenizer = 'stdlib'  # 3 bytes a token: a step reads more text.
  # Rows are windows of the stream. 'packed' separates documents, which costs a
  # mask in attention, and most windows lie within one file.
  kwargs.packing = 'stream'
  kwargs.cache_dir = config_dict.placeholder(str)
  # On two cores, time grows with tokens and learning with steps, so many small
  # steps beat few large ones (byte-level, in the same two minutes: 2.4 bits per
  # byte against 3.1 with batch 8). Rounded up to the number of devices.
  kwargs.batch_size = 2
  kwargs.length = 256
  kwargs.eval_batch_size = 16
  kwargs.eval_batches = config_dict.placeholder(int)  # None: all held-out text.
  # With references, an override of the run's value also applies to these.
  kwargs.seed = config.get_ref('random_seed')
  kwargs.training_steps = config.get_ref('training_steps')

  kwargs.learning_rate = 3e-3
  # 135 steps, after which Adam's second moment has settled.
  kwargs.warmup_fraction = 0.025
  kwargs.decay = 'linear'
  kwargs.final_learning_rate = 0.0
  kwargs.b1 = 0.9
  # 0.95 forgets too soon: most rows of the tables get no gradient in a step.
  # 0.999 would remember longer than the warm-up lasts.
  kwargs.b2 = 0.99
  kwargs.weight_decay = 0.1
  kwargs.clip_norm = 1.0
  kwargs.trainable = config_dict.placeholder(str)  # None: all weights.
  kwargs.lora = config_dict.ConfigDict()
  kwargs.lora.rank = 0  # No adapters.
  kwargs.lora.alpha = 16.0
  kwargs.lora.targets = (
    'layers/(attention/(qkv|q|kv|out)|feed_forward/(in|out))'
  )

  kwargs.sample_prompt = 'def'
  kwargs.sample_length = 240  # Prompt and sample must fit into max_length.
  kwargs.sample_temperature = 0.8  # Below 1, text is more likely, less noisy.

  # 'special' and 'chat' are for models whose folder defines the prompt format.
  kwargs.prompt_format = 'text'
  # For --jaxline_mode=decode. Prompt and new tokens must fit into max_length.
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
  kwargs.decode.scores = True  # Decoding is faster without scores.
  return config
