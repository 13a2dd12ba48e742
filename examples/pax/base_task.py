"""Tasks: a model, and how it is trained.

A `SingleTask` has pure functions, which are those of a
`sharded.ShardedExperiment`: the initial state, the loss of a batch, and the
optimizer. Its model state is a dict:

    non_trainable  variables of the model that it changes itself
    ema            the moving average of the weights, if the learner keeps one
    ema_non_trainable  the same of `non_trainable`, with it
    step           steps done, if the variational noise begins late: `loss_fn`
                   gets no count of its own
    sharded.OVERWRITE  scales of products in FP8, if there are any

Names, fields and values are those of Praxis and Paxml (Google, 2022).
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import optax

from examples import decoding
from examples import fp8
from examples.pax import base_layer
from examples.pax import hparams as hparams_lib
from examples.pax import learners
from examples.pax import models
from examples.pax import optimizers
from jaxline import errors
from jaxline import metrics as metrics_lib
from jaxline import sharded
from jaxline.base import keys

BaseHParams = hparams_lib.BaseHParams
Configurable = hparams_lib.Configurable
WeightHParams = base_layer.WeightHParams
sub_config_field = hparams_lib.sub_config_field

EMA = sharded.EMA
_EMA_NON_TRAINABLE = 'ema_non_trainable'
_STEP = 'step'


# Metrics, and which of them is the loss.


def _metric(
  metrics: models.WeightedScalars, name: str, where: str
) -> tuple[jax.Array, jax.Array]:
  if name not in metrics:
    raise ValueError(
      f'{where} is {name!r}, but the model has no metric of that name.'
      f'{errors.did_you_mean(name, metrics)} It has {sorted(metrics)}.'
    )
  return metrics[name]


class MeanMetrics(Configurable):
  """Weighted means of the model's metrics, which are reported.

  Attributes:
    metric_keys: names of those to report; empty for all.
  """

  metric_keys: Sequence[str] = ()

  def aggregate(
    self, metrics: models.WeightedScalars
  ) -> dict[str, metrics_lib.Mean]:
    """Returns name -> what can be averaged over batches without a loss."""
    names = self.metric_keys or metrics
    return {
      name: metrics_lib.Mean.of(
        *_metric(metrics, name, 'An entry of metrics.metric_keys')
      )
      for name in names
    }


class LossAggregator(Configurable):
  """Minimises one of the model's metrics.

  Attributes:
    loss_key: its name.
  """

  loss_key: str = 'total_loss'

  def aggregate(
    self, metrics: models.WeightedScalars
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of a batch, and its weight; scalars."""
    return _metric(metrics, self.loss_key, 'loss_aggregator.loss_key')


class MultiLossAggregator(LossAggregator):
  """Minimises a weighted sum of several metrics, which it reports as `loss`.

  Attributes:
    loss_key: how the sum is called where it is reported.
    loss_keys: names of the metrics.
    loss_weights: the factor of each.
  """

  loss_key: str = 'loss'
  loss_keys: Sequence[str] = ()
  loss_weights: Sequence[float] = ()

  _RULES = {
    'at least one of loss_keys, and as many loss_weights': (
      lambda p: 0 < len(p.loss_keys) == len(p.loss_weights)
    )
  }

  def aggregate(
    self, metrics: models.WeightedScalars
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of a batch, and its weight; scalars.

    The weight is the first metric's, in a mean over batches.
    """
    parts = [
      _metric(metrics, key, 'An entry of loss_aggregator.loss_keys')
      for key in self.loss_keys
    ]
    terms = [
      weight * value
      for (value, _), weight in zip(parts, self.loss_weights, strict=True)
    ]
    return functools.reduce(jnp.add, terms), parts[0][1]


# Tasks.


class VariationalNoise(BaseHParams):
  """Gaussian noise on the weights in training (Graves, 2011).

  Attributes:
    vn_scale: its standard deviation; 0 is none.
    vn_regex: regular expression that fits the start of the names of weights
      that get it; '' for all.
    vn_start_step: the first step with it.
  """

  vn_scale: float = 0.0
  vn_regex: str = ''
  vn_start_step: int = 0


class TrainHParams(BaseHParams):
  """Hyperparameters of how a task is trained.

  Attributes:
    learner: that of all weights.
    num_train_steps: steps of training.
    save_interval_steps: from checkpoint to checkpoint.
    save_max_to_keep: how many of the newest checkpoints are kept.
    summary_interval_steps: from log line to log line.
    eval_interval_steps: from evaluation to evaluation.
    async_summary_writing: log on another thread.
    variable_norm_summary: report each weight's norm.
    random_seed: of the weights and of what else is random in training.
    summary_verbosity: summaries of layers with a verbosity up to this are
      reported.
    init_from_checkpoint_rules: directory of a run ->
      `loading.CheckpointLoadingRules`: which of its weights a new run begins
      with. In a registered experiment, of whose config it becomes a part.
  """

  learner: Any = sub_config_field(learners.Learner.HParams)
  num_train_steps: int = 10_000_000
  save_interval_steps: int = 5000
  save_max_to_keep: int = 10
  summary_interval_steps: int = 100
  eval_interval_steps: int = 100
  async_summary_writing: bool = True
  variable_norm_summary: bool = True
  random_seed: int = 1234
  summary_verbosity: int = 3
  init_from_checkpoint_rules: dict[str, Any] = dataclasses.field(
    default_factory=dict
  )


class SingleTask(Configurable):
  """A task with one model and one learner.

  Attributes:
    name: an identifier, by which messages name the task.
    model: the model, with all its layers; of a task, unbound.
    train: how it is trained.
    metrics: which of the model's metrics are reported.
    loss_aggregator: what of them is minimised; None is the learner's
      `loss_name`, or else 'total_loss'.
    vn: variational noise.
    learner: its learner.
    weights: name -> what the weight is.
    uses_fp8: whether the model has products in FP8.
  """

  name: str = 'task'
  model: Any = sub_config_field(None)
  train: TrainHParams = sub_config_field(TrainHParams)
  metrics: Any = sub_config_field(MeanMetrics.HParams)
  loss_aggregator: Any = sub_config_field(None)
  vn: VariationalNoise = sub_config_field(VariationalNoise)

  _PARTS = {'model': models.BaseModel, 'metrics': MeanMetrics}
  _CHECKS = {'name': keys.text('a valid identifier', r'[^\W\d]\w*')}

  # As Paxml names them.
  Train = TrainHParams
  VariationalNoise = VariationalNoise

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    p = hparams
    params, scales = fp8.split(self.model.abstract_init()[base_layer.PARAMS])
    names = optimizers.weight_names(params)
    self.weights: dict[str, WeightHParams] = dict(
      zip(names, jax.tree.leaves(params), strict=True)
    )
    self.uses_fp8 = bool(scales)
    given = p.train.learner
    several = given if isinstance(given, list | tuple) else [given]
    # A built one stands for its hyperparameters.
    self.learner: learners.Learner = learners.joined(
      [getattr(x, 'hparams', x) for x in several]
    ).Instantiate()
    self._loss = self._make_loss_aggregator()
    self._noise = optimizers.Pattern('vn.vn_regex', p.vn.vn_regex)

  def _make_loss_aggregator(self) -> LossAggregator:
    p, name = self.hparams, self.learner.hparams.loss_name
    if p.loss_aggregator is None:
      key = name or LossAggregator.HParams().loss_key
      return LossAggregator.HParams(loss_key=key).Instantiate()
    found = hparams_lib.instantiate(
      p.loss_aggregator, LossAggregator, f'{p.name}.loss_aggregator'
    )
    if name not in (None, found.hparams.loss_key):
      raise ValueError(
        f'The task {p.name!r} has a learner with loss_name {name!r}, and a'
        f' loss_aggregator of {found.hparams.loss_key!r}. Leave one of them'
        ' None.'
      )
    return found

  def boxed_init(self, rng: jax.Array) -> tuple[Any, dict[str, Any]]:
    """Returns initial weights and model state, each a `partitioning.Logical`.

    Args:
      rng: a key.

    Raises:
      ValueError: there is to be noise, and `vn_regex` fits no weight.
    """
    variables = self.model.boxed_init(rng)
    params, scales = fp8.split(variables[base_layer.PARAMS])
    model_state = {
      base_layer.NON_TRAINABLE: variables[base_layer.NON_TRAINABLE]
    }
    if scales:
      model_state[sharded.OVERWRITE] = scales
    if self.learner.optimizer.ema_decay:
      model_state[EMA] = params
      model_state[_EMA_NON_TRAINABLE] = model_state[base_layer.NON_TRAINABLE]
    vn = self.hparams.vn
    if vn.vn_scale:
      self._noise.check(self.weights)
      if vn.vn_start_step:
        model_state[_STEP] = jnp.zeros((), jnp.int32)
    return params, model_state

  def loss_fn(
    self,
    params: Any,
    model_state: dict[str, Any],
    batch: Mapping[str, Any],
    rng: jax.Array,
    is_training: bool,
  ) -> tuple[jax.Array, dict[str, metrics_lib.Mean], dict[str, Any]]:
    """Returns the loss, the metrics and the new model state of a batch.

    Args:
      params: the weights.
      model_state: as `boxed_init` returned it, without its boxes.
      batch: what the model takes.
      rng: this step's key.
      is_training: whether for training or for evaluation, which is of the
        moving average of the weights, where there is one.
    """
    if is_training:
      params = self._with_noise(params, model_state, rng)
    (metrics, _), collected = self.model.apply(
      self._variables(params, model_state, use_ema=not is_training),
      batch,
      rng=rng,
      do_eval=not is_training,
      mutable=True,
      verbosity=self.hparams.train.summary_verbosity,
    )
    loss, weight = self._loss.aggregate(metrics)
    means = self.metrics.aggregate(metrics)
    if isinstance(self._loss, MultiLossAggregator):
      means[self._loss.hparams.loss_key] = metrics_lib.Mean.of(loss, weight)
    for name, value in collected.summaries.items():
      means[name] = metrics_lib.Mean.of(value)
    if is_training:
      model_state = {
        **model_state,
        base_layer.NON_TRAINABLE: collected.non_trainable,
      }
    return loss, means, model_state

  def _variables(
    self, params: Any, model_state: Mapping[str, Any], use_ema: bool
  ) -> base_layer.Variables:
    non_trainable = model_state[base_layer.NON_TRAINABLE]
    if use_ema:
      params = model_state.get(EMA, params)
      non_trainable = model_state.get(_EMA_NON_TRAINABLE, non_trainable)
    scales = model_state.get(sharded.OVERWRITE, {})
    return {
      base_layer.PARAMS: fp8.merge(params, scales) if scales else params,
      base_layer.NON_TRAINABLE: non_trainable,
    }

  def _with_noise(
    self, params: Any, model_state: Mapping[str, Any], rng: jax.Array
  ) -> Any:
    """Returns the weights, with variational noise where it belongs."""
    vn = self.hparams.vn
    if not vn.vn_scale:
      return params
    scale = jnp.float32(vn.vn_scale)
    if vn.vn_start_step:
      scale *= (model_state[_STEP] >= vn.vn_start_step).astype(jnp.float32)

    def noisy(name: str, x: jax.Array) -> jax.Array:
      if not self._noise.fits(name):
        return x
      key = jax.random.fold_in(rng, zlib.crc32(f'vn/{name}'.encode()))
      return x + scale.astype(x.dtype) * jax.random.normal(
        key, x.shape, x.dtype
      )

    return optimizers.map_with_names(noisy, params)

  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns what turns gradients into updates.

    The layers in a repeated layer's weight are tensors of their own, and what
    is in the collection SKIP_LP_REGULARIZATION has neither L2 nor
    `decoupled_weight_decay`.
    """
    skips = base_layer.WeightHParamsCollection.SKIP_LP_REGULARIZATION
    return self.learner.make(
      # A pipeline's weights have two axes of layers before their own.
      num_stacked=lambda name: len(self.weights[name].repeat_prefix),
      skips_lp=lambda name: skips in self.weights[name].collections,
    )

  def step_scalars(
    self, state: sharded.TrainState, grads: Any, updates: Any
  ) -> dict[str, jax.Array]:
    """Returns scalars to log: the learner's, and the norms of the weights.

    Args:
      state: before the step.
      grads: the gradients.
      updates: what is added to the weights.
    """
    scalars = self.learner.scalars(
      grads, updates, learners.num_updates(state.opt_state)
    )
    if self.hparams.train.variable_norm_summary:
      for name, x in zip(
        self.weights, jax.tree.leaves(state.params), strict=True
      ):
        scalars[f'var_norm/{name}'] = optax.tree.norm(x)
    return scalars

  def after_update(
    self, before: sharded.TrainState, after: sharded.TrainState
  ) -> dict[str, Any]:
    """Returns the model state after an update: averages, and count of steps.

    As in Praxis, the averages take in the weights from before the step and the
    statistics from after it, and stay as they are in a step that the learner
    skips.

    Args:
      before: the state before the step.
      after: the state after it, with the model state of `loss_fn`.
    """
    new = dict(after.model_state)
    if EMA in new:
      decay = self.learner.optimizer.ema_decay
      count = learners.num_updates(before.opt_state)
      is_taken = learners.num_updates(after.opt_state) > count
      for name, values in (
        (EMA, before.params),
        (_EMA_NON_TRAINABLE, new[base_layer.NON_TRAINABLE]),
      ):
        old = before.model_state[name]
        ema = optimizers.ema_update(old, values, count, decay)
        new[name] = jax.tree.map(
          functools.partial(jnp.where, is_taken), ema, old
        )
    if _STEP in new:
      new[_STEP] = after.step.astype(jnp.int32)
    return new

  def decode(
    self,
    params: Any,
    model_state: Mapping[str, Any],
    batch: Mapping[str, Any],
    rng: jax.Array | None = None,
    options: models.DecoderHParams | decoding.Options | None = None,
  ) -> decoding.Decoded:
    """Continues the prompts of a batch; pure.

    Args:
      params: the weights.
      model_state: as after `boxed_init`; of a moving average it is that which
        decodes.
      batch: see the model's `start_decoding`.
      rng: a key, where tokens are drawn.
      options: how; None is the model's own.
    """
    variables = self._variables(params, model_state, use_ema=True)
    return self.model.decode(variables, batch, rng, options)


# Pax's names of the base classes.
BaseMetrics = MeanMetrics
BaseTask = SingleTask
