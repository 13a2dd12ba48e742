"""DDPG on the pendulum: an actor learns to swing it up and hold it.

Expected: a mean return of -140 to -160, depending on the seed, from step 4000
          on. An actor that does nothing gets -1200.
Hardware: two CPU cores, shared with other work; no GPU.
Time:     15 seconds, measured.
Command:  python experiment.py --config=configs/rl.py \
            --jaxline_mode=train_and_eval

With --config.experiment_class=examples.rl.host:Experiment, the environments and
the replay buffer are in the host's memory.
"""

import dataclasses

from ml_collections import config_dict

from examples.rl import experiment
from jaxline import base_config


def get_config() -> config_dict.ConfigDict:
  """Returns the run's config."""
  config = base_config.get_base_config()
  config.experiment_class = 'examples.rl.experiment:Experiment'
  config.training_steps = 6_000
  config.interval_type = 'steps'
  config.log_tensors_interval = 500
  config.log_train_data_interval = 50
  config.eval_interval = 1_000
  config.save_checkpoint_interval = 1_000
  config.best_model_eval_metric = 'return'
  own = config_dict.ConfigDict(
    dataclasses.asdict(experiment.Config(seed=config.random_seed))
  )
  # With a reference, an override of the run's value also applies to this.
  own.seed = config.get_oneway_ref('random_seed')
  config.experiment_kwargs.config = own
  return config
