"""Optimizers of Optax, with the hyperparameters of Praxis.

This module adds what Pax defines otherwise: the cap of an update's root mean
square, weight decay that follows the learning rate, and stacked weights of
several layers, of which each layer is a tensor of its own.

Weights are a tree of dicts, and a weight's name is its path, as in
'lm/transformer/ff/w'. A regular expression matches a name from its start
(`re.match`).

Optax relies on the promotion of dtypes: if that is strict, call `update` under
`jax.numpy_dtype_promotion('standard')`, as jaxline's step does.

Names, fields and values are those of Praxis (Google, 2022).
"""

import abc
from collections.abc import Callable, Iterable, Sequence
import functools
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from examples.pax import hparams as hparams_lib
from examples.pax import schedules
from jaxline.base import keys

__getattr__ = hparams_lib.refuse_names_of_pax(__name__)

Regexes = str | Sequence[str]
# How many axes of repeated layers the weight of a name has before its own.
NumStacked = Callable[[str], int]
# Whether the weight of a name has neither L2 nor `decoupled_weight_decay`.
SkipsLp = Callable[[str], bool]
# Fields of an optimizer that its learner follows.
CLIPS = 'clip_gradient_norm_to_value', 'clip_gradient_single_norm_to_value'
_NOT_NEGATIVE = keys.optional(keys.number(min=0))
# To be chained.
Transformations = list[optax.GradientTransformation]


def not_stacked(name: str) -> int:
  """Says of every weight that it is one layer's."""
  del name
  return 0


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
  """Returns the names of the weights of a tree."""
  return jax.tree.leaves(map_with_names(lambda name, _: name, tree))


class Pattern:
  """Regular expressions for names of weights."""

  def __init__(self, field: str, regexes: Regexes):
    """Compiles them.

    Args:
      field: where they stand, for messages.
      regexes: one, or several, one of which must fit.
    """
    self.field = field
    regexes = [regexes] if isinstance(regexes, str) else list(regexes)
    self.regexes = []
    for regex in regexes:
      try:
        self.regexes.append(re.compile(regex))
      except re.error as e:
        raise ValueError(
          f'{field} has {regex!r}, which is no regular expression: {e}.'
        ) from e

  def __bool__(self) -> bool:
    return bool(self.regexes)

  def fits(self, name: str) -> bool:
    """Whether one of them fits a name from its start on."""
    return any(regex.match(name) for regex in self.regexes)

  def check(self, names: Iterable[str]) -> None:
    """Refuses an expression that fits none of the names."""
    names = list(names)
    for regex in self.regexes:
      if not any(regex.match(name) for name in names):
        near = hparams_lib.nearest_names(regex.pattern, names)
        raise ValueError(
          f'{self.field} has {regex.pattern!r}, which fits the start of no'
          f" weight's name. The nearest of the {len(names)} names are"
          f' {near}.'
        )


def ema_update(ema: Any, params: Any, step: Any, decay: float) -> Any:
  """Returns the exponential moving average of weights after a step.

  As in Pax and TensorFlow, the decay is at most (1 + step) / (10 + step), so
  that the average soon forgets the initial weights. Integers are not averaged.

  Args:
    ema: the average so far, at step 0 the initial weights; a tree.
    params: the new values, a tree of the same structure.
    step: how many updates `ema` has had, an int32 scalar.
    decay: more than 0 and less than 1.
  """
  step = jnp.asarray(step).astype(jnp.float32)
  new = 1.0 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))

  def one(e: jax.Array, p: jax.Array) -> jax.Array:
    if not jnp.issubdtype(p.dtype, jnp.floating):
      return p
    return e + new.astype(e.dtype) * (p - e)

  return jax.tree.map(one, ema, params)


class BaseOptimizer(hparams_lib.Configurable, abc.ABC):
  """Turns gradients into what is added to the weights.

  0 or None leaves a thing out.

  Attributes:
    learning_rate: what the schedule multiplies; must be set.
    lr_schedule: multiplier of the learning rate, by step.
    l2_regularizer_weight: this times the weight is added to its gradient,
      once that is clipped.
    skip_lp_1d_vectors: not for weights of one axis (or none), such as biases.
    decoupled_weight_decay: learning rate times this times the weight is taken
      off the weight (Loshchilov and Hutter, 2019).
    weight_decay_exclusion: weights that have neither L2 nor decay.
    clip_gradient_norm_to_value: the most that the norm of all gradients may
      be; the learner scales them down.
    clip_gradient_single_norm_to_value: the same for each gradient by itself.
      Layers in one stack have one gradient, and so one norm.
    ema_decay: of the moving average of weights; see `ema_update`.
    excluded: `weight_decay_exclusion`, of which each must fit a weight.
  """

  # Decays that follow the learning rate.
  _DECAYS: ClassVar[tuple[str, ...]] = ('decoupled_weight_decay',)
  _EXCLUSIVE = (CLIPS, ('l2_regularizer_weight', *_DECAYS))
  _PARTS = {'lr_schedule': schedules.BaseSchedule}
  _CHECKS = {
    'learning_rate': keys.number(min=0),
    'l2_regularizer_weight': _NOT_NEGATIVE,
    'decoupled_weight_decay': _NOT_NEGATIVE,
    'clip_gradient_norm_to_value': _NOT_NEGATIVE,
    'clip_gradient_single_norm_to_value': _NOT_NEGATIVE,
    'ema_decay': keys.number(min=0, below=1),
  }

  learning_rate: float | None = None
  lr_schedule: Any = hparams_lib.sub_config_field(schedules.Constant.HParams)
  l2_regularizer_weight: float | None = None
  skip_lp_1d_vectors: bool = False
  decoupled_weight_decay: float | None = None
  weight_decay_exclusion: Regexes = ()
  clip_gradient_norm_to_value: float = 0.0
  clip_gradient_single_norm_to_value: float = 0.0
  ema_decay: float = 0.0

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    self.excluded = Pattern(
      f'{type(self).__name__}.weight_decay_exclusion',
      hparams.weight_decay_exclusion,
    )

  def get_learning_rate(self, step: Any) -> jax.Array:
    """Returns the learning rate of a step, a float32 scalar."""
    return self.hparams.learning_rate * self.lr_schedule.value_at(step)

  def make(
    self,
    num_stacked: NumStacked = not_stacked,
    skips_lp: SkipsLp = lambda name: False,
  ) -> optax.GradientTransformation:
    """Returns the optimizer, without what its learner does: clip and skip.

    Args:
      num_stacked: says of a weight's name how many axes of layers it has before
        its own. Each layer is a tensor of its own, as in Praxis, where the
        optimizer is mapped over these axes: its update's root mean square is
        capped by itself, and a stack of vectors is vectors.
      skips_lp: says of a weight's name whether it has neither L2 nor
        `decoupled_weight_decay`, but `Adam.weight_decay`: as in Praxis those of
        the collection SKIP_LP_REGULARIZATION.
    """
    p = self.hparams
    weight_decay = sum(getattr(p, field) or 0.0 for field in self._DECAYS)

    def mask(tree: Any, is_lp: bool, skip_vectors: bool = False) -> Any:
      return map_with_names(
        lambda name, x: (
          not (
            self.excluded.fits(name)
            or (is_lp and skips_lp(name))
            or (skip_vectors and x.ndim - num_stacked(name) <= 1)
          )
        ),
        tree,
      )

    regularizer = optax.add_decayed_weights(
      p.l2_regularizer_weight or 0.0,
      functools.partial(mask, is_lp=True, skip_vectors=p.skip_lp_1d_vectors),
    )
    decay = optax.add_decayed_weights(
      lambda step: weight_decay * self.get_learning_rate(step),
      functools.partial(mask, is_lp=bool(p.decoupled_weight_decay)),
    )
    rate = optax.scale_by_learning_rate(self.get_learning_rate, flip_sign=False)
    steps = [*self._directions(num_stacked), rate, optax.scale(-1.0)]
    if p.l2_regularizer_weight:
      steps.insert(0, regularizer)
    if weight_decay:
      steps.insert(-1, decay)
    return optax.chain(*steps)

  @abc.abstractmethod
  def _directions(self, num_stacked: NumStacked) -> Transformations:
    """From gradients to what the learning rate multiplies."""


class Sgd(BaseOptimizer):
  """Stochastic gradient descent, with momentum where it is set.

  Momentum is a sum and no mean: m <- momentum m + g; Nesterov's takes
  g + momentum m (Sutskever et al., 2013). `optax.trace`.

  Attributes:
    momentum: decay of the sum of gradients; None is no sum.
    nesterov: look ahead.
  """

  momentum: float | None = None
  nesterov: bool = False

  _RULES = {
    'a momentum, such as 0.9, where nesterov is True': (
      lambda p: p.momentum is not None or not p.nesterov
    )
  }

  def _directions(self, num_stacked: NumStacked) -> Transformations:
    p = self.hparams
    return [] if p.momentum is None else [optax.trace(p.momentum, p.nesterov)]


class Adam(BaseOptimizer):
  """Adam (Kingma and Ba, 2015) as Pax defines it.

  u = m / (sqrt(v + epsilon_root) + epsilon), with moments corrected for their
  start at 0; then u is divided by max(1, rms(u) / clip_threshold), where rms is
  over the weight, or over each layer of a stack; then the weight decay; then
  the learning rate.

  Attributes:
    beta1: decay of the first moment.
    beta2: decay of the second moment.
    epsilon: added to the root.
    epsilon_root: added under the root.
    clip_threshold: the most that an update's root mean square may be, before
      weight decay and learning rate; 0 is no limit.
    weight_decay: the same as `decoupled_weight_decay`, but for all weights,
      those of the collection SKIP_LP_REGULARIZATION included.
  """

  _DECAYS = ('weight_decay', 'decoupled_weight_decay')
  _EXCLUSIVE = (CLIPS, ('l2_regularizer_weight', *_DECAYS))
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


class OptaxOptimizer(BaseOptimizer):
  """Any optimizer of Optax, such as `optax.lion(1e-4)`.

  It gets whole weights: a stack of layers is one tensor to it.

  Attributes:
    learning_rate: multiplies the updates of `grad_tx`.
    grad_tx: turns gradients into what is added to the weights. It may have a
      learning rate of its own.
  """

  learning_rate: float = 1.0
  grad_tx: optax.GradientTransformation | None = None

  _RULES = {
    'a grad_tx, such as optax.lion(1e-4)': lambda p: p.grad_tx is not None
  }

  def _directions(self, num_stacked: NumStacked) -> Transformations:
    return [self.hparams.grad_tx, optax.scale(-1.0)]


def _rms(x: jax.Array, num_stacked: int) -> jax.Array:
  """Root mean square of a tensor, or of each of a stack; keeps the axes."""
  axes = tuple(range(num_stacked, x.ndim))
  return jnp.sqrt(jnp.mean(jnp.square(x), axes, keepdims=True))


def _cap_rms(
  threshold: float, num_stacked: NumStacked
) -> optax.GradientTransformation:
  """Scales a tensor down to a root mean square of at most `threshold`."""

  def cap(name: str, x: jax.Array) -> jax.Array:
    return x / jnp.maximum(_rms(x, num_stacked(name)) / threshold, 1.0)

  return optax.stateless(lambda updates, _: map_with_names(cap, updates))
