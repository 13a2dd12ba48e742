"""A byte-level language model on the source text of Python's standard library.

    python experiment.py --config=configs/lm.py --jaxline_mode=train_and_eval

Text of your own: --config.experiment_kwargs.config.files='path/**/*.md'
"""

from ml_collections import config_dict

from jaxline import base_config


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = base_config.get_base_config()
  config.experiment_class = 'examples.lm.experiment:Experiment'
  config.training_steps = 600
  config.interval_type = 'steps'
  config.log_tensors_interval = 20
  config.log_train_data_interval = 20
  config.save_checkpoint_interval = 200
  config.eval_interval = 200
  config.best_model_eval_metric = 'bits_per_byte'
  config.best_model_eval_metric_higher_is_better = False

  kwargs = config.experiment_kwargs.config = config_dict.ConfigDict()
  kwargs.model = config_dict.ConfigDict({
    'vocab_size': 257,  # 256 bytes and the document token.
    'num_layers': 4,
    'embed_dim': 256,
    'num_heads': 4,
    'mlp_dim': 1024,
    'max_length': 512,
  })
  kwargs.files = 'stdlib'
  kwargs.eval_fraction = 0.05
  kwargs.batch_size = 16
  kwargs.length = 256
  kwargs.eval_batch_size = 16
  kwargs.eval_batches = config_dict.placeholder(int)
  kwargs.seed = config.get_ref('random_seed')
  kwargs.training_steps = config.get_ref('training_steps')
  kwargs.learning_rate = 2e-3
  kwargs.warmup_steps = 50
  kwargs.final_learning_rate = 0.1
  kwargs.b1 = 0.9
  kwargs.b2 = 0.95
  kwargs.weight_decay = 0.1
  kwargs.clip_norm = 1.0
  kwargs.sharding = 'ddp'
  kwargs.mesh = config_dict.placeholder(dict)
  kwargs.sample_prompt = 'def '
  kwargs.sample_length = 200
  kwargs.sample_temperature = 0.8
  return config
