"""A run of a second, for test_platform.py."""

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
  config.best_model_eval_metric = 'loss'
  config.best_model_eval_metric_higher_is_better = False
  config.experiment_kwargs.config = config_dict.ConfigDict(
    {
      'fault': '',  # Where to fail: 'step', 'evaluate' or 'input'.
      'fault_step': 0,  # From which step on.
      # What it does: 'raise' or 'hang'.
      'fault_kind': 'raise',
      'step_secs': 0.0,  # How long a step takes at least, in seconds.
      'show_values': False,  # Print what the loss function sees.
    }
  )
  return config
