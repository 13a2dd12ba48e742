"""Trains and evaluates an image classifier in the per-device style of JAXline.

In this style, `CHECKPOINT_ATTRS` names the attributes that hold the training
state. Their arrays have a leading axis of local devices. `step` calls one
function that `jax.pmap` runs on all devices at once. The pure functions
`update` and `evaluate_batch` below run under pmap.

Shapes: D local devices, B images per device, H rows, W columns, C channels, K
classes. Inside a pmap, there is no D.
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

# The pmapped axis, over which gradients, BatchNorm's statistics and the sums of
# an evaluation are combined.
_AXIS = 'i'
_cross_entropy = optax.softmax_cross_entropy_with_integer_labels
# Enlarges pictures for TensorBoard, because eight pixels are hard to see.
_ZOOM = 8
_NUM_PICTURES = 16


@dataclasses.dataclass(frozen=True)
class Config:
  """Settings of the experiment; configs/image.py has their values.

  Attributes:
    seed: seed of the order of the training images.
    training_steps: step at which the learning rate reaches zero.
    warmup_fraction: fraction of the training over which the learning rate
      rises.
    peak_learning_rate: learning rate after the warm-up, from which it falls
      along a cosine.
    momentum: Nesterov momentum.
    l2: factor of L2 regularization, which adds l2 * w to the gradient of each
      weight w. It does not apply to biases and to BatchNorm's scales and
      offsets.
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
  """Selects the parameters for L2 regularization: those that are not 1-d.

  Args:
    params: the network's parameters.

  Returns:
    A tree of bools like `params`.
  """
  # Do not count axes of size 1: Haiku's BatchNorm stores a scale per channel as
  # [1, 1, 1, C], which would pass for the kernel of a convolution.
  return jax.tree.map(lambda x: sum(d > 1 for d in x.shape) > 1, params)


def create_optimizer(
  config: Config,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Returns SGD with momentum and L2, and its learning rate schedule."""
  warmup = max(1, int(config.warmup_fraction * config.training_steps))
  warmup_cosine = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=config.peak_learning_rate,
    warmup_steps=warmup,
    decay_steps=max(warmup + 1, config.training_steps),
  )

  def schedule(step: Any) -> jax.Array:
    # Optax's cosine compares the step with a float. Under strict promotion, an
    # int would be an error.
    # The schedule is shifted by one step, so that the first step has a rate
    # above 0 and the last one has the final rate.
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
  """Trains one step on one device, together with the others on the axis.

  Args:
    params: the network's parameters.
    state: BatchNorm's statistics.
    opt_state: the optimizer's state.
    batch: this device's images.
    global_step: the number of steps before this one.
    net: the network, from `model.create`.
    optimizer: the optimizer, from `create_optimizer`.
    schedule: the learning rate, from `create_optimizer`.

  Returns:
    The next `params`, `state` and `opt_state`, and scalar metrics of the whole
    batch. They are the same on all devices.
  """

  def loss_fn(params: hk.Params) -> tuple[jax.Array, Any]:
    x_BHWC = image_input.normalize(batch.x_DBHWC)
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
  """Computes the sums over a batch of the metrics that `evaluate` averages.

  Args:
    params: the network's parameters.
    state: BatchNorm's statistics.
    batch: this device's images.
    net: the network, from `model.create`.

  Returns:
    Sums over the images of all devices, without images of weight 0; and this
    device's predicted classes [B].
  """
  x_BHWC = image_input.normalize(batch.x_DBHWC)
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
  """Classifies digits."""

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
    """Loads the data and initializes the network.

    Args:
      mode: 'train', or a mode of evaluation.
      init_rng: the key of the initial weights.
      config: the values of a `Config`.
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
    # Donated arguments: the new state overwrites the old one in memory.
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

    # This network has the same weights, but no BatchNorm axis, which exists
    # only inside a pmap.
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
    del unused  # Only the order of the images is random.
    if self._train_input is None:
      # The constructor does not yet know the step of a resumed run.
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
    """Restores the state; the input restarts at the next step's batch."""
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
  """Returns some of the images, and some of the misclassified ones."""
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
