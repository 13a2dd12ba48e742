"""A run of a second, for test_command_line.py."""

from ml_collections import config_dict

from tests.experiments import regression


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = regression.get_run_config(steps=6, save=2, evaluation=2)
  config.experiment_kwargs.config = config_dict.ConfigDict(
    {
      'fault': '',  # Where to fail: 'step', 'evaluate' or 'input'.
      'fault_step': 0,  # From which step on.
      'step_secs': 0.0,  # How long a step takes at least, in seconds.
    }
  )
  return config
