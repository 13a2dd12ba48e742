"""The language model of `configs/lm.py` with a mixture of experts.

As many weights take part in each token's way, of more in all.

Expected: not measured yet.
Hardware: two cores of an Intel Xeon; no GPU.
Time:     5 minutes.
Command:  python experiment.py --config=configs/moe.py \
            --jaxline_mode=train_and_eval
"""

from ml_collections import config_dict

from configs import lm


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = lm.get_config()
  # As long as configs/lm.py: a step takes 1.27 times as long on two cores.
  config.training_steps = 4200
  config.eval_interval = config.save_checkpoint_interval = 1400
  config.sharding = 'ep'  # With `mesh.ici.expert` devices share the experts.

  kwargs = config.experiment_kwargs.config
  kwargs.model.num_experts = 4  # 8 learn no more in the time.
  kwargs.model.experts_per_token = 2
  kwargs.model.mlp_dim //= 2  # Two experts are as wide as the one.
  kwargs.model.shared_dim = None
  kwargs.model.expert_capacity = 0.0  # No token is dropped.
  kwargs.model.router_gate = 'softmax'
  kwargs.model.router_normalize = True
  kwargs.model.router_scale = 1.0
  # Either of the two spreads the tokens over the experts.
  kwargs.model.router_bias_rate = 0.0
  kwargs.model.router_balance_loss = 0.01
  kwargs.model.router_z_loss = 0.0
  return config
