"""The language model of `configs/lm.py` with a mixture of experts.

A token uses the same number of weights as in the dense model, and the mixture
has 1.5 times as many in all.

Expected: 1.50 bits per byte on the held-out files of Python 3.11, with
          --config.random_seed=1. In the same time the dense model, whose steps
          are shorter, reached 1.44, before configs/lm.py had pairs of tokens.
          Experts do not pay on two cores.
Hardware: two cores of an Intel Xeon; no GPU.
Time:     as long as configs/lm.py, with 0.79 times its steps per second,
          measured.
Command:  python experiment.py --config=configs/moe.py \
            --jaxline_mode=train_and_eval
"""

from ml_collections import config_dict

from configs import lm


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = lm.get_config()
  # These steps take as long as the 5400 steps of configs/lm.py.
  config.training_steps = 4200
  config.eval_interval = config.save_checkpoint_interval = 1400
  config.sharding = 'ep'  # The devices of `mesh.ici.expert` share the experts.

  kwargs = config.experiment_kwargs.config
  # Measured before configs/lm.py had these.
  kwargs.b2 = 0.95
  kwargs.model.num_heads = 4
  kwargs.model.tie_embeddings = True
  kwargs.model.bigram_rows = 0
  kwargs.model.num_experts = 4  # 8 experts learn no more in the same time.
  kwargs.model.experts_per_token = 2
  kwargs.model.mlp_dim //= 2  # Two experts are as wide as the dense layer.
  kwargs.model.shared_dim = None
  kwargs.model.expert_capacity = 0.0  # No token is dropped.
  kwargs.model.router_gate = 'softmax'
  kwargs.model.router_normalize = True
  kwargs.model.router_scale = 1.0
  # Each of the next two spreads the tokens over the experts.
  kwargs.model.router_bias_rate = 0.0
  kwargs.model.router_balance_loss = 0.01
  kwargs.model.router_z_loss = 0.0
  return config
