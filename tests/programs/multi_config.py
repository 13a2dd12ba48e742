"""A run of seconds on several processes, for test_durable_multiprocess.py."""

from ml_collections import config_dict

from jaxline import base_config


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = base_config.get_base_config()
  config.training_steps = 6
  config.interval_type = 'steps'
  config.log_tensors_interval = 1
  config.log_train_data_interval = 1
  config.save_checkpoint_interval = 2
  config.eval_interval = 2
  config.max_checkpoints_to_keep = 10
  config.best_model_eval_metric = 'loss'
  config.best_model_eval_metric_higher_is_better = False
  config.experiment_kwargs.config = config_dict.ConfigDict(
    {
      'own_position': True,  # Each process's data position has its own value.
    }
  )
  return config
