"""Optax optimizers with the hyperparameters of Praxis.

This module adds the features in which Pax differs from Optax: it caps an
update's root mean square, and treats each layer of a stacked weight as a
separate tensor.

Weights are a tree of dicts. A weight's name is its path, such as
'lm/transformer/ff/w'. Regular expressions match from the start of a name
(`re.match`).

Optax relies on dtype promotion. If promotion is strict, call `update` under
`jax.numpy_dtype_promotion('standard')`, as jaxline's step does.

Names, fields and values follow Praxis (Google, 2022).
"""

import abc
from collections.abc import Callable, Iterable, Sequence
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.pax import hparams as hparams_lib
from examples.pax import schedules
from jaxline.base import keys

__getattr__ = hparams_lib.refuse_names_of_pax(__name__)

Regexes = str | Sequence[str]
NumStacked = Callable[[str], int]
SkipsLp = Callable[[str], bool]
_NOT_NEGATIVE = keys.optional(keys.number(min=0))
# Steps of an `optax.chain`.
Transformations = list[optax.GradientTransformation]


def map_with_names(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
  """Maps `fn(name, leaf, ...)` over trees of weights."""
  return jax.tree_util.tree_map_with_path(
    lambda path, *xs: fn(
      jax.tree_util.keystr(path, simple=True, separator='/'), *xs
    ),
    tree,
    *rest,
  )


def weight_names(tree: Any) -> list[str]:
  """Returns the names of all weights in a tree."""
  return jax.tree.leaves(map_with_names(lambda name, _: name, tree))


class Pattern:
  """A set of regular expressions that selects weights by name."""

  def __init__(self, field: str, regexes: Regexes):
    """Compiles one or several expressions. Messages name their `field`."""
    self.field = field
    regexes = [regexes] if isinstance(regexes, str) else list(regexes)
    self.regexes = []
    for regex in regexes:
      try:
        self.regexes.append(re.compile(regex))
      except re.error as e:
        raise ValueError(
          f'{field} has {regex!r}, which is not a valid regular expression:'
          f' {e}.'
        ) from e

  def __bool__(self) -> bool:
    return bool(self.regexes)

  def fits(self, name: str) -> bool:
    """Whether one of the expressions matches the start of a name."""
    return any(regex.match(name) for regex in self.regexes)

  def check(self, names: Iterable[str]) -> None:
    """Raises a ValueError if an expression matches none of the names."""
    names = list(names)
    for regex in self.regexes:
      if not any(regex.match(name) for name in names):
        near = hparams_lib.nearest_names(regex.pattern, names)
        raise ValueError(
          f'{self.field} has {regex.pattern!r}, which matches the start of no'
          f" weight's name. The nearest of the {len(names)} names are"
          f' {near}.'
        )


def ema_update(ema: Any, params: Any, step: Any, decay: float) -> Any:
  """Returns the exponential moving average of weights after a step.

  As in Pax and TensorFlow, the decay is at most (1 + step) / (10 + step), where
  `step` counts the earlier updates of `ema`, so the average soon forgets the
  initial weights. Integers are not averaged.
  """
  step = jnp.asarray(step).astype(jnp.float32)
  new = 1.0 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))

  def one(e: jax.Array, p: jax.Array) -> jax.Array:
    if not jnp.issubdtype(p.dtype, jnp.floating):
      return p
    return e + new.astype(e.dtype) * (p - e)

  return jax.tree.map(one, ema, params)


class BaseOptimizer(hparams_lib.Configurable, abc.ABC):
  """Converts gradients to updates, which are added to the weights.

  A field that is 0 or None switches its feature off.

  Attributes:
    learning_rate: Base learning rate, which the schedule multiplies. Required.
    lr_schedule: Multiplier of the learning rate by step.
    l2_regularizer_weight: L2 coefficient. The product of it and the weight is
      added to the clipped gradient.
    skip_lp_1d_vectors: Whether L2 skips weights with at most one axis, such as
      biases.
    clip_gradient_norm_to_value: Maximum norm of all gradients together. The
      learner clips.
    ema_decay: Decay of the moving average of weights; see `ema_update`.
  """

  _PARTS = {'lr_schedule': schedules.BaseSchedule}
  _CHECKS = {
    'learning_rate': keys.number(min=0),
    'l2_regularizer_weight': _NOT_NEGATIVE,
    'clip_gradient_norm_to_value': _NOT_NEGATIVE,
    'ema_decay': keys.number(min=0, below=1),
  }

  learning_rate: float | None = None
  lr_schedule: Any = hparams_lib.sub_config_field(schedules.Constant.HParams)
  l2_regularizer_weight: float | None = None
  skip_lp_1d_vectors: bool = False
  clip_gradient_norm_to_value: float = 0.0
  ema_decay: float = 0.0

  def get_learning_rate(self, step: Any) -> jax.Array:
    """Returns the learning rate at a step, a float32 scalar."""
    return self.hparams.learning_rate * self.lr_schedule.value_at(step)

  def make(
    self,
    num_stacked: NumStacked = lambda name: 0,
    skips_lp: SkipsLp = lambda name: False,
  ) -> optax.GradientTransformation:
    """Returns the transformation, without the learner's clipping and skipping.

    Args:
      num_stacked: Maps a weight's name to its number of leading axes of layers.
        As in Praxis, each layer is a separate tensor: the root mean square of
        its update is capped by itself, and a stack of vectors has vectors.
      skips_lp: Tells from its name if a weight has no L2. In Praxis, these are
        the weights of the collection SKIP_LP_REGULARIZATION.
    """
    p, weight_decay = self.hparams, self._weight_decay()

    def has_l2(name: str, x: Any) -> bool:
      is_vector = x.ndim - num_stacked(name) <= 1
      return not (skips_lp(name) or (p.skip_lp_1d_vectors and is_vector))

    rate = optax.scale_by_learning_rate(self.get_learning_rate, flip_sign=False)
    steps = [*self._directions(num_stacked), rate, optax.scale(-1.0)]
    if p.l2_regularizer_weight:
      l2 = optax.add_decayed_weights(
        p.l2_regularizer_weight, functools.partial(map_with_names, has_l2)
      )
      steps.insert(0, l2)
    if weight_decay:
      decay = optax.add_decayed_weights(
        lambda step: weight_decay * self.get_learning_rate(step),
        # The mask only keeps the names that checkpoints have for the state.
        functools.partial(map_with_names, lambda *unused: True),
      )
      steps.insert(-1, decay)
    return optax.chain(*steps)

  def _weight_decay(self) -> float:
    """Returns the weight decay, a multiple of the learning rate."""
    return 0.0

  @abc.abstractmethod
  def _directions(self, num_stacked: NumStacked) -> Transformations:
    """Returns the steps before the multiplication by the learning rate."""


class Sgd(BaseOptimizer):
  """Stochastic gradient descent, optionally with momentum.

  Momentum is a decaying sum rather than a mean: m <- momentum m + g. Nesterov's
  variant uses g + momentum m (Sutskever et al., 2013). See `optax.trace`.

  Attributes:
    momentum: Decay of the sum of gradients. If None, there is no momentum.
    nesterov: Whether to use Nesterov momentum.
  """

  momentum: float | None = None
  nesterov: bool = False

  _RULES = {
    'a momentum, such as 0.9, if nesterov is True': (
      lambda p: p.momentum is not None or not p.nesterov
    )
  }

  def _directions(self, num_stacked: NumStacked) -> Transformations:
    p = self.hparams
    return [] if p.momentum is None else [optax.trace(p.momentum, p.nesterov)]


class Adam(BaseOptimizer):
  """Adam (Kingma and Ba, 2015) as Pax defines it.

  The direction is u = m / (sqrt(v + epsilon_root) + epsilon), with
  bias-corrected moments. It is divided by max(1, rms(u) / clip_threshold),
  where rms is over the weight, or over each layer of a stack. Then weight decay
  is added, and the sum is multiplied by the learning rate.

  Attributes:
    beta1: Decay of the first moment.
    beta2: Decay of the second moment.
    epsilon: Small constant, added to the root.
    epsilon_root: Small constant, added under the root.
    clip_threshold: Maximum root mean square of an update, before weight decay
      and learning rate. If 0, there is no limit.
    weight_decay: Weight decay of all weights. Each step subtracts the learning
      rate times this times the weight (Loshchilov and Hutter, 2019).
  """

  _EXCLUSIVE = (('l2_regularizer_weight', 'weight_decay'),)
  _CHECKS = {**BaseOptimizer._CHECKS, 'weight_decay': _NOT_NEGATIVE}

  beta1: float = 0.9
  beta2: float = 0.999
  epsilon: float = 1e-6
  epsilon_root: float = 0.0
  clip_threshold: float = 1.0
  weight_decay: float | None = None

  def _directions(self, num_stacked: NumStacked) -> Transformations:
    p = self.hparams
    return [
      optax.scale_by_adam(p.beta1, p.beta2, p.epsilon, p.epsilon_root),
      *([_cap_rms(p.clip_threshold, num_stacked)] if p.clip_threshold else []),
    ]

  def _weight_decay(self) -> float:
    return self.hparams.weight_decay or 0.0


class OptaxOptimizer(BaseOptimizer):
  """Any Optax optimizer, such as `optax.lion(1e-4)`.

  The optimizer sees a stack of layers as one tensor.

  Attributes:
    learning_rate: Multiplier of the updates of `grad_tx`.
    grad_tx: Transformation from gradients to updates, which may include a
      learning rate.
  """

  learning_rate: float = 1.0
  grad_tx: optax.GradientTransformation | None = None

  _RULES = {
    'a grad_tx, such as optax.lion(1e-4)': lambda p: p.grad_tx is not None
  }

  def _directions(self, num_stacked: NumStacked) -> Transformations:
    return [self.hparams.grad_tx, optax.scale(-1.0)]


def _cap_rms(
  threshold: float, num_stacked: NumStacked
) -> optax.GradientTransformation:
  """Scales each tensor down to a root mean square of at most `threshold`."""

  def cap(name: str, x: jax.Array) -> jax.Array:
    axes = tuple(range(num_stacked(name), x.ndim))
    rms = jnp.sqrt(jnp.mean(jnp.square(x), axes, keepdims=True))
    return x / jnp.maximum(rms / threshold, 1.0)

  return optax.stateless(lambda updates, _: map_with_names(cap, updates))
