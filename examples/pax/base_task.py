"""Tasks: a model and its training.

A `SingleTask` defines the pure functions of a `sharded.ShardedExperiment`: the
initial state, the loss of a batch, and the optimizer. Its model state is a dict
with these entries:

    non_trainable      non-trainable variables of the model
    ema                moving average of the weights, if the learner keeps one
    ema_non_trainable  moving average of `non_trainable`, if there is `ema`
    step               number of steps, if the variational noise begins late,
                       because `loss_fn` does not get it
    sharded.OVERWRITE  scales of FP8 products, if there are any

Names, fields and values follow Praxis and Paxml (Google, 2022).
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


# Metrics and the loss.


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
  """Reports weighted means of the model's metrics.

  Attributes:
    metric_keys: Names of the metrics to report. If empty, all of them.
  """

  metric_keys: Sequence[str] = ()

  def aggregate(
    self, metrics: models.WeightedScalars
  ) -> dict[str, metrics_lib.Mean]:
    """Returns name -> a mean that can be merged exactly over batches."""
    where = 'An entry of metrics.metric_keys'
    return {
      name: metrics_lib.Mean.of(*_metric(metrics, name, where))
      for name in self.metric_keys or metrics
    }


class LossAggregator(Configurable):
  """Minimizes one of the model's metrics.

  Attributes:
    loss_key: Name of the metric.
  """

  loss_key: str = 'total_loss'

  def aggregate(
    self, metrics: models.WeightedScalars
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of a batch and its weight, both scalars."""
    return _metric(metrics, self.loss_key, 'loss_aggregator.loss_key')


class MultiLossAggregator(LossAggregator):
  """Minimizes a weighted sum of several metrics, and reports it.

  Attributes:
    loss_key: Name of the sum among the reported metrics.
    loss_keys: Names of the metrics.
    loss_weights: Factor of each metric.
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
    """Returns the loss of a batch and its weight, both scalars.

    In a mean over batches, the loss has the weight of the first metric.
    """
    parts = [
      _metric(metrics, key, 'An entry of loss_aggregator.loss_keys')
      for key in self.loss_keys
    ]
    pairs = zip(parts, self.loss_weights, strict=True)
    terms = [weight * value for (value, _), weight in pairs]
    return functools.reduce(jnp.add, terms), parts[0][1]


# Tasks.


class VariationalNoise(BaseHParams):
  """Gaussian noise on the weights in training (Graves, 2011).

  Attributes:
    vn_scale: Standard deviation of the noise. If 0, there is none.
    vn_regex: Regular expression for the start of the names of the weights with
      noise. '' selects all weights.
    vn_start_step: First step with noise.
  """

  vn_scale: float = 0.0
  vn_regex: str = ''
  vn_start_step: int = 0


class TrainHParams(BaseHParams):
  """Hyperparameters of a task's training.

  The constants of a registered experiment set those for steps, intervals and
  the seed: see `base_experiment.KEYS`.

  Attributes:
    learner: Learner of the weights, or a list of learners: `learners.joined`.
    async_summary_writing: Whether to log on a separate thread.
    variable_norm_summary: Whether to report the norm of each weight.
    summary_verbosity: Highest verbosity of the layers' summaries to report.
    init_from_checkpoint_rules: Directory of a run ->
      `loading.CheckpointLoadingRules`, the weights that a new run takes from
      it. Only for registered experiments, because the rules become part of the
      run's config.
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
  """A task with one model.

  Attributes:
    name: Name of the task, an identifier, for messages.
    model: The model. In a task, a layer that is not bound to a run.
    train: Hyperparameters of the training.
    metrics: Selection of the model's metrics to report.
    loss_aggregator: The loss, computed from the metrics. If None, the metric of
      the learner's `loss_name`, or 'total_loss' if that is None too.
    vn: Variational noise.
    learner: The learner. Several learners are joined into one.
    weights: Name -> declaration of each weight.
    uses_fp8: Whether the model has FP8 products.
  """

  name: str = 'task'
  model: Any = sub_config_field(None)
  train: TrainHParams = sub_config_field(TrainHParams)
  metrics: Any = sub_config_field(MeanMetrics.HParams)
  loss_aggregator: Any = sub_config_field(None)
  vn: VariationalNoise = sub_config_field(VariationalNoise)

  _PARTS = {'model': models.BaseModel, 'metrics': MeanMetrics}
  _CHECKS = {'name': keys.text('a valid identifier', r'[^\W\d]\w*')}

  # Paxml's names.
  Train = TrainHParams
  VariationalNoise = VariationalNoise

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    p = hparams
    params, scales = fp8.split(self.model.abstract_init()[base_layer.PARAMS])
    named = zip(
      optimizers.weight_names(params), jax.tree.leaves(params), strict=True
    )
    self.weights: dict[str, WeightHParams] = dict(named)
    self.uses_fp8 = bool(scales)
    given = p.train.learner
    several = given if isinstance(given, list | tuple) else [given]
    # A built learner is replaced by its hyperparameters.
    self.learner = learners.joined([getattr(x, 'hparams', x) for x in several])
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
        f'The task {p.name!r} has a learner with loss_name {name!r}, but a'
        f' loss_aggregator with loss_key {found.hparams.loss_key!r}. Set one of'
        ' them to None.'
      )
    return found

  def boxed_init(self, rng: jax.Array) -> tuple[Any, dict[str, Any]]:
    """Returns the initial weights and model state.

    Each array of the model is in a `partitioning.Logical`. Raises a ValueError
    if there is variational noise, and `vn_regex` matches no weight.
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

    Evaluation uses the moving average of the weights if there is one.
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
    """Adds variational noise to the selected weights."""
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
    """Returns the transformation from gradients to updates.

    Each layer in a repeated layer's weight is a separate tensor. Weights in the
    collection SKIP_LP_REGULARIZATION have no L2.
    """
    skips = base_layer.WeightHParamsCollection.SKIP_LP_REGULARIZATION
    return self.learner.make(
      # Nested loops of layers give a weight several leading axes.
      num_stacked=lambda name: len(self.weights[name].repeat_prefix),
      skips_lp=lambda name: skips in self.weights[name].collections,
    )

  def step_scalars(
    self, state: sharded.TrainState, grads: Any, updates: Any
  ) -> dict[str, jax.Array]:
    """Returns the scalars of the learner and the norms of the weights.

    `state` is the state before the step.
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
    """Updates the moving averages and the count of steps in the model state.

    As in Praxis, the averages include the weights from before the step and the
    non-trainable variables from after it. They do not change in a step that the
    learner skips. `after` has the model state of `loss_fn`.
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
    """Continues the prompts of a batch; a pure function.

    It uses the moving average of the weights if there is one. See the model's
    `decode` for the other arguments.
    """
    variables = self._variables(params, model_state, use_ema=True)
    return self.model.decode(variables, batch, rng, options)


# Pax's names for the base classes.
BaseMetrics = MeanMetrics
BaseTask = SingleTask
