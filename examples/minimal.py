"""A whole experiment in one file: predicts a byte from the 8 bytes before it.

Command:  python experiment.py --config=examples/minimal.py \
            --jaxline_mode=train_and_eval
Expected: 2.25 bits per byte on held-out files of Python 3.11's library.
Time:     25 seconds, measured on two cores of an AMD EPYC.

Shapes: B batch, L length, C context, V vocabulary, F hidden units.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import config_dict
import optax

from jaxline import base_config
from jaxline import metrics
from jaxline import sharded
from jaxline.inputs import base
from jaxline.inputs import text
from jaxline.parallel.partitioning import Logical


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The keys of `config.experiment_kwargs.config`."""

  files: str = 'stdlib'  # For your text, a glob such as 'notes/**/*.md'.
  batch_size: int = 4  # Sequences per step, over all devices.
  length: int = 256  # Bytes per sequence.
  context: int = 8  # Bytes that each prediction depends on.
  hidden: int = 128
  learning_rate: float = 3e-3


class Experiment(sharded.ShardedExperiment):
  def __init__(
    self,
    mode: str,
    init_rng: jax.Array,
    config: config_dict.ConfigDict,
    *,
    run_config: config_dict.ConfigDict | None = None,
  ) -> None:
    super().__init__(mode, init_rng, run_config=run_config)
    self.config = base_config.read(Config, config)

  def init_fn(self, rng: jax.Array) -> tuple[Any, Any]:
    # Create the weights and name their axes. Sharding uses these names.
    c, vocab = self.config, text.VOCABULARY_SIZE
    in_CVF = jax.random.normal(rng, [c.context, vocab, c.hidden])
    # Start with zeros, so that all bytes are equally likely.
    out_FV = jnp.zeros([c.hidden, vocab])
    params = {
      'in': Logical(in_CVF * c.context**-0.5, (None, 'vocab', 'embed')),
      'out': Logical(out_FV, ('embed', 'vocab')),
    }
    # The second is model_state, for arrays such as BatchNorm's averages.
    return params, {}

  def loss_fn(
    self,
    params: Any,
    model_state: Any,
    batch: sharded.BatchDict,
    rng: jax.Array,
    is_training: bool,
  ) -> sharded.LossOutput:
    c, length = self.config, batch['ids'].shape[1]
    ids_BL = jnp.pad(batch['ids'], ((0, 0), (c.context - 1, 0)))
    x_BLF = sum(
      params['in'][i, ids_BL[:, i : i + length]] for i in range(c.context)
    )
    logits_BLV = jax.nn.relu(x_BLF) @ params['out']
    nats_BL = optax.softmax_cross_entropy_with_integer_labels(
      logits_BLV, batch['labels']
    )
    loss = metrics.Mean.of(nats_BL, batch['weights'])
    bits = metrics.Mean.of(nats_BL / jnp.log(2), batch['weights'])
    return loss.compute(), {'loss': loss, 'bits_per_byte': bits}, model_state

  def make_optimizer(self) -> optax.GradientTransformation:
    return optax.adam(self.config.learning_rate)

  def train_input(self, shard: base.Shard | None = None) -> text.TextInput:
    # You may return any iterator of dicts of arrays.
    return self.read(shard, is_training=True)

  def eval_input(self, shard: base.Shard | None = None) -> text.TextInput:
    # The last batch may have fewer rows: the library fills it up.
    return self.read(shard, reset_for_eval=True)

  def read(self, shard: base.Shard | None, **kwargs: Any) -> text.TextInput:
    c, rows = self.config, base.per_host(self.config.batch_size, shard)
    return text.TextInput(
      files=c.files, batch_size=rows, length=c.length, shard=shard, **kwargs
    )


def get_config() -> config_dict.ConfigDict:
  """Returns the config of the run."""
  config = base_config.get_base_config()
  config.experiment_class = f'{__name__}:Experiment'
  config.training_steps = 3000
  config.interval_type = 'steps'
  config.log_tensors_interval = 100
  config.log_train_data_interval = 10
  config.eval_interval = 1000
  config.save_checkpoint_interval = 1000
  config.best_model_eval_metric = 'bits_per_byte'
  config.best_model_eval_metric_higher_is_better = False
  own = config_dict.ConfigDict(dataclasses.asdict(Config()))
  config.experiment_kwargs.config = own
  return config
