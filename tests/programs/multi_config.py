"""A run of seconds on several processes, see tests/several.py."""

from ml_collections import config_dict

from tests.experiments import regression


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = regression.get_run_config(steps=6, save=2, evaluation=2)
  config.max_checkpoints_to_keep = 10
  return config
