"""Trains and evaluates an image classifier, in JAXline's classic style.

In this style the training state is a few attributes with a leading axis of
local devices, `CHECKPOINT_ATTRS` names them, and `step` calls one function that
`jax.pmap` runs on all devices at once. The two pure functions below, `update`
and `evaluate_batch`, are those that pmap runs.

Shapes: D local devices, B images per device, H rows, W columns, C channels, K
classes. Inside of a pmap there is no D.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax

from jaxline import base_config
from jaxline import experiment
from jaxline import utils
from jaxline.base import keys

from . import input as image_input
from . import model

# The pmapped axis: gradients, BatchNorm and evaluation sums meet on it.
_AXIS = 'i'
_cross_entropy = optax.softmax_cross_entropy_with_integer_labels
# For TensorBoard: eight pixels are hard to see.
_ZOOM = 8
_NUM_PICTURES = 16


@dataclasses.dataclass(frozen=True)
class Config:
  """What an experiment is made of; configs/image.py gives the numbers.

  Attributes:
    seed: of the order of the training images.
    training_steps: when the learning rate has come down to zero.
    warmup_fraction: the part of the training during which it rises.
    peak_learning_rate: reached after the warm-up; then it falls as a cosine.
    momentum: Nesterov's.
    l2: for each weight w, l2 * w is added to its gradient. BatchNorm's scales
      and offsets and the biases have none.
    train_batch_size: images per step over all devices.
    eval_batch_size: images per evaluation step over all devices.
    model: the network.
  """

  seed: int
  training_steps: int
  warmup_fraction: float
  peak_learning_rate: float
  momentum: float
  l2: float
  train_batch_size: int
  eval_batch_size: int
  model: model.ResNetConfig

  def __post_init__(self) -> None:
    keys.check_attributes(
      self,
      seed=keys.integer(min=0),
      training_steps=keys.integer(min=0),
      warmup_fraction=keys.number(min=0, below=1),
      peak_learning_rate=keys.number(min=0),
      momentum=keys.number(min=0, below=1),
      l2=keys.number(min=0),
      train_batch_size=keys.integer(min=1),
      eval_batch_size=keys.integer(min=1),
    )


def decays(params: hk.Params) -> Any:
  """Says which parameters L2 regularisation is for: those not 1-d.

  Args:
    params: the network's parameters.

  Returns:
    The same tree, of bools.
  """
  # Haiku's BatchNorm keeps a scale per channel as [1, 1, 1, C]: counting the
  # axes would take it for a convolution's kernel.
  return jax.tree.map(lambda x: sum(d > 1 for d in x.shape) > 1, params)


def create_optimizer(
  config: Config,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Returns SGD with momentum and L2, and its schedule step -> rate."""
  warmup = max(1, int(config.warmup_fraction * config.training_steps))
  warmup_cosine = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=config.peak_learning_rate,
    warmup_steps=warmup,
    decay_steps=max(warmup + 1, config.training_steps),
  )

  def schedule(step: Any) -> jax.Array:
    # A float, because Optax's cosine compares it with one, and an int with a
    # float is an error where strict promotion is on.
    # The first step has a rate above 0, and the last one the final rate.
    return warmup_cosine(jnp.asarray(step, jnp.float32) + 1)

  optimizer = optax.chain(
    optax.add_decayed_weights(config.l2, mask=decays),
    optax.sgd(schedule, momentum=config.momentum, nesterov=True),
  )
  return optimizer, schedule


def update(
  params: hk.Params,
  state: hk.State,
  opt_state: optax.OptState,
  batch: image_input.Batch,
  global_step: jax.Array,
  *,
  net: hk.TransformedWithState,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
) -> tuple[hk.Params, hk.State, optax.OptState, dict[str, jax.Array]]:
  """One step of one device, in step with the others on the axis.

  Args:
    params: the network's parameters.
    state: BatchNorm's statistics.
    opt_state: the optimizer's state.
    batch: this device's images.
    global_step: steps done before this one.
    net: from `model.create`.
    optimizer: from `create_optimizer`.
    schedule: from `create_optimizer`.

  Returns:
    The next `params`, `state` and `opt_state`, and scalar metrics of the whole
    batch; all the same on each device.
  """

  def loss_fn(params: hk.Params) -> tuple[jax.Array, Any]:
    x_BHWC = image_input.normalise(batch.x_DBHWC)
    logits_BK, new_state = net.apply(
      params, state, None, x_BHWC, is_training=True
    )
    loss_B = _cross_entropy(logits_BK, batch.y_DB)
    correct_B = logits_BK.argmax(-1) == batch.y_DB
    return loss_B.mean(), (new_state, correct_B.mean())

  (loss, (state, accuracy)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
    params
  )
  grads, loss, accuracy = jax.lax.pmean((grads, loss, accuracy), _AXIS)
  updates, opt_state = optimizer.update(grads, opt_state, params)
  params = optax.apply_updates(params, updates)
  metrics = {
    'loss': loss,
    'accuracy': accuracy,
    'gradient_norm': optax.tree.norm(grads),
    'learning_rate': schedule(global_step),
  }
  return params, state, opt_state, metrics


def evaluate_batch(
  params: hk.Params,
  state: hk.State,
  batch: image_input.Batch,
  *,
  net: hk.TransformedWithState,
) -> tuple[dict[str, jax.Array], jax.Array]:
  """Sums over a batch what `evaluate` averages over the split.

  Args:
    params: the network's parameters.
    state: BatchNorm's statistics.
    batch: this device's images.
    net: from `model.create`.

  Returns:
    Sums over the images of all devices, and this device's predicted classes
    [B]. What has weight 0 is not in the sums.
  """
  x_BHWC = image_input.normalise(batch.x_DBHWC)
  logits_BK, _ = net.apply(params, state, None, x_BHWC, is_training=False)
  prediction_B = logits_BK.argmax(-1)
  correct_B = (prediction_B == batch.y_DB).astype(jnp.float32)
  sums = {
    'loss': jnp.sum(batch.weight_DB * _cross_entropy(logits_BK, batch.y_DB)),
    'correct': jnp.sum(batch.weight_DB * correct_B),
    'weight': jnp.sum(batch.weight_DB),
  }
  return jax.lax.psum(sums, _AXIS), prediction_B


class Experiment(experiment.FullExperiment):
  """The digits' experiment."""

  CHECKPOINT_ATTRS = {
    '_params': 'params',
    '_state': 'state',
    '_opt_state': 'opt_state',
  }
  CONFIG_CLASS = Config
  CHANGEABLE_ON_RESUME = ('experiment_kwargs.config.eval_batch_size',)

  def __init__(
    self, mode: str, init_rng: jax.Array, config: config_dict.ConfigDict
  ):
    """Loads the data and initialises the network.

    Args:
      mode: 'train', or what evaluation was started as.
      init_rng: the key to initialise the weights from.
      config: the fields of `Config`.
    """
    super().__init__(mode=mode, init_rng=init_rng)
    self._config = base_config.read(Config, config)
    self._hosts = image_input.Hosts(
      devices=jax.local_device_count(),
      index=jax.process_index(),
      count=jax.process_count(),
    )
    self._train_split, self._test_split = image_input.load()
    held_out = len(self._test_split.y_N)
    self.data_summary = (
      f'{len(self._train_split.y_N):,} images; {held_out:,} held out'
    )
    self._train_input: Iterator[image_input.Batch] | None = None

    net = model.create(self._config.model, cross_replica_axis=_AXIS)
    optimizer, schedule = create_optimizer(self._config)
    # Donation: the new state is written where the old one was.
    self._update = jax.pmap(
      functools.partial(
        update, net=net, optimizer=optimizer, schedule=schedule
      ),
      axis_name=_AXIS,
      donate_argnums=(0, 1, 2),
    )
    self._evaluate_batch = jax.pmap(
      functools.partial(evaluate_batch, net=net), axis_name=_AXIS
    )

    # The same weights, without BatchNorm's axis, which is only in a pmap.
    init_net = model.create(self._config.model, cross_replica_axis=None)
    init = jax.jit(functools.partial(init_net.init, is_training=True))
    params, state = init(init_rng, self._train_split.x_NHWC[:1])
    self._params = utils.bcast_local_devices(params)
    self._state = utils.bcast_local_devices(state)
    self._opt_state = utils.bcast_local_devices(optimizer.init(params))

  def step(
    self, *, global_step: jax.Array, **unused: Any
  ) -> Mapping[str, jax.Array]:
    """Trains on the batch of this step; see the base class."""
    del unused  # The order of the images is the only randomness.
    if self._train_input is None:
      # Not in the constructor: only now is it known where a resumed run is.
      self._train_input = self._create_train_input(
        start_step=int(utils.get_first(global_step))
      )
    self._params, self._state, self._opt_state, metrics = self._update(
      self._params,
      self._state,
      self._opt_state,
      next(self._train_input),
      global_step,
    )
    return utils.get_first(metrics)

  def _create_train_input(self, start_step: int) -> Iterator[image_input.Batch]:
    create = functools.partial(
      image_input.train_batches,
      self._train_split,
      seed=self._config.seed,
      start_step=start_step,
      batch_size=self._config.train_batch_size,
      hosts=self._hosts,
    )
    return iter(utils.double_buffer_on_gpu(utils.py_prefetch(create)))

  def restore_from_snapshot(self, snapshot_state: Mapping[str, Any]) -> None:
    """Restores the state; the input starts anew at the next step's batch."""
    super().restore_from_snapshot(snapshot_state)
    self._train_input = None

  def evaluate(
    self, *, global_step: jax.Array, writer: Any, **unused: Any
  ) -> Mapping[str, np.floating]:
    """Evaluates the whole test split; see the base class."""
    del unused
    batches, sums, predictions = [], [], []
    for batch in image_input.eval_batches(
      self._test_split,
      batch_size=self._config.eval_batch_size,
      hosts=self._hosts,
    ):
      batch_sums, prediction_DB = self._evaluate_batch(
        self._params, self._state, batch
      )
      batches.append(batch)
      sums.append(jax.device_get(utils.get_first(batch_sums)))
      predictions.append(jax.device_get(prediction_DB))
    totals = jax.tree.map(lambda *x: np.sum(x, dtype=np.float64), *sums)
    if hasattr(writer, 'write_images'):
      images = _pictures(batches, predictions)
      writer.write_images(int(utils.get_first(global_step)), images)
    return {
      'loss': totals['loss'] / totals['weight'],
      'accuracy': totals['correct'] / totals['weight'],
    }


def _pictures(
  batches: list[image_input.Batch], predictions: list[np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns some of the images, and of those that were misclassified."""
  is_real = np.concatenate([b.weight_DB for b in batches], axis=None) > 0
  x_NHWC = np.concatenate(
    [b.x_DBHWC.reshape(-1, *b.x_DBHWC.shape[2:]) for b in batches]
  )
  y_N = np.concatenate([b.y_DB for b in batches], axis=None)
  is_wrong = is_real & (y_N != np.concatenate(predictions, axis=None))
  pictures = {
    'test_images': x_NHWC[is_real][:_NUM_PICTURES],
    'misclassified': x_NHWC[is_wrong][:_NUM_PICTURES],
  }
  return {
    name: x.repeat(_ZOOM, axis=1).repeat(_ZOOM, axis=2)
    for name, x in pictures.items()
    if len(x)
  }
