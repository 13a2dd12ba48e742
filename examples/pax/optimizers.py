"""Optimizers of Optax, with the hyperparameters of Praxis.

This module adds what Pax defines otherwise: the cap of an update's root mean
square, factored moments of the last two axes, weight decay that follows the
learning rate, and stacked weights of several layers, of which each layer is a
tensor of its own.

Weights are a tree of dicts, and a weight's name is its path, as in
'lm/transformer/ff/w'. A regular expression matches a name from its start
(`re.match`).

Optax relies on the promotion of dtypes: if that is strict, call `update` under
`jax.numpy_dtype_promotion('standard')`, as jaxline's step does.

Names, fields and values are those of Praxis (Google, 2022).
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import re
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.pax import hparams as hparams_lib
from examples.pax import schedules
from jaxline.base import keys

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
    self._excluded = Pattern(
      f'{type(self).__name__}.weight_decay_exclusion',
      hparams.weight_decay_exclusion,
    )
    # Each must fit a weight.
    self.patterns = [self._excluded]

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
        capped by itself, its moments are factored by themselves, and a stack of
        vectors is vectors.
      skips_lp: says of a weight's name whether it has neither L2 nor
        `decoupled_weight_decay`, but an optimizer's own `weight_decay`: as in
        Praxis those of the collection SKIP_LP_REGULARIZATION.
    """
    p = self.hparams
    weight_decay = sum(getattr(p, field) or 0.0 for field in self._DECAYS)

    def mask(tree: Any, is_lp: bool, skip_vectors: bool = False) -> Any:
      return map_with_names(
        lambda name, x: (
          not (
            self._excluded.fits(name)
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
    steps = [*self._steps(num_stacked), optax.scale(-1.0)]
    if p.l2_regularizer_weight:
      steps.insert(0, regularizer)
    if weight_decay:
      steps.insert(-1, decay)
    return optax.chain(*steps)

  def _steps(self, num_stacked: NumStacked) -> Transformations:
    """From gradients to what is taken off the weights, but for their decay."""
    rate = optax.scale_by_learning_rate(self.get_learning_rate, flip_sign=False)
    return [*self._directions(num_stacked), rate]

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


class _Decayed(BaseOptimizer):
  """One that has Praxis's `weight_decay`.

  Attributes:
    weight_decay: the same as `decoupled_weight_decay`, but for all weights,
      those of the collection SKIP_LP_REGULARIZATION included.
  """

  _DECAYS = ('weight_decay', 'decoupled_weight_decay')
  _EXCLUSIVE = (CLIPS, ('l2_regularizer_weight', *_DECAYS))
  _CHECKS = {**BaseOptimizer._CHECKS, 'weight_decay': _NOT_NEGATIVE}

  weight_decay: float | None = None


class Adam(_Decayed):
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
  """

  beta1: float = 0.9
  beta2: float = 0.999
  epsilon: float = 1e-6
  epsilon_root: float = 0.0
  clip_threshold: float = 1.0

  def _directions(self, num_stacked: NumStacked) -> Transformations:
    p = self.hparams
    return [
      optax.scale_by_adam(p.beta1, p.beta2, p.epsilon, p.epsilon_root),
      *([_cap_rms(p.clip_threshold, num_stacked)] if p.clip_threshold else []),
    ]


class Lion(_Decayed):
  """Lion (Chen et al., 2023), `optax.scale_by_lion`.

  The sign of beta1 m + (1 - beta1) g; then m <- beta2 m + (1 - beta2) g.
  Praxis's HeroLion corrects m for its start at 0 besides.

  Attributes:
    beta1: of the moment, in the mean whose sign is taken.
    beta2: decay of the moment.
    m_dtype: type in which the moment is kept; the gradient's is computed in.
    clip_threshold: the most that an update's root mean square may be, before
      weight decay and learning rate; 0 is no limit. Signs exceed none above 1.
  """

  beta1: float = 0.9
  beta2: float = 0.99
  m_dtype: Any = jnp.bfloat16
  clip_threshold: float = 1.0

  def _directions(self, num_stacked: NumStacked) -> Transformations:
    p = self.hparams
    lion = optax.scale_by_lion(p.beta1, p.beta2, mu_dtype=p.m_dtype)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
      # Optax would multiply in `m_dtype`.
      mu = jax.tree.map(lambda m, g: m.astype(g.dtype), state.mu, updates)
      return lion.update(updates, state._replace(mu=mu), params)

    return [
      optax.GradientTransformation(lion.init, update),
      *([_cap_rms(p.clip_threshold, num_stacked)] if p.clip_threshold else []),
    ]


class Muon(_Decayed):
  """Muon (Jordan et al., 2024), `optax.contrib.muon`; Adam for other weights.

  The momentum of a matrix is made nearly orthogonal. A weight of two axes, or
  a stack of such, is a matrix; `matrices` says what others are, and which are
  none after all, such as embeddings.

  Attributes:
    beta: decay of the momentum.
    nesterov: look ahead.
    ns_steps: of the iteration of Newton and Schulz.
    epsilon: keeps it from dividing by zero; also Adam's.
    consistent_rms: an update's root mean square, of Adam's size with 0.2 (Liu
      et al., 2025); None scales by the root of max(1, outputs / inputs).
    adam_beta1: decay of Adam's first moment.
    adam_beta2: decay of Adam's second moment.
    matrices: regular expression -> (axes of the inputs, axes of the outputs),
      counted from the last axis, -1; such as ((-3,), (-2, -1)) for a
      projection to heads. None leaves the weight to Adam. The first that fits
      counts.
  """

  beta: float = 0.95
  nesterov: bool = True
  ns_steps: int = 5
  epsilon: float = 1e-8
  consistent_rms: float | None = None
  adam_beta1: float = 0.9
  adam_beta2: float = 0.999
  matrices: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    self._matrices = [
      (Pattern('Muon.matrices', regex), axes)
      for regex, axes in hparams.matrices.items()
    ]
    self.patterns += [pattern for pattern, _ in self._matrices]

  def _directions(self, num_stacked: NumStacked) -> Transformations:
    p = self.hparams

    def axes(name: str, x: Any) -> Any:
      for pattern, found in self._matrices:
        if pattern.fits(name):
          return found and optax.contrib.MuonDimensionNumbers(*found)
      if x.ndim - num_stacked(name) == 2:
        return optax.contrib.MuonDimensionNumbers(-2, -1)
      return None

    return [
      optax.contrib.muon(
        1.0,
        ns_steps=p.ns_steps,
        beta=p.beta,
        eps=p.epsilon,
        nesterov=p.nesterov,
        adam_b1=p.adam_beta1,
        adam_b2=p.adam_beta2,
        consistent_rms=p.consistent_rms,
        muon_weight_dimension_numbers=functools.partial(map_with_names, axes),
      ),
      optax.scale(-1.0),  # Optax's is the whole descent.
    ]


class ShardedAdafactor(_Decayed):
  """Adafactor (Shazeer and Stern, 2018) as Pax defines it.

  The second moment of a matrix is kept as the means of its rows and of its
  columns. Unlike `optax.adafactor`, the matrices are those of a weight's last
  two axes, moments may decay as Adam's do, and weight decay follows the
  learning rate.

  Attributes:
    decay_method: of the second moment at the n-th step: 'pow' is
      1 - n ** -decay_pow, 'adam' is decay_adam corrected for the start at 0.
    decay_adam: for 'adam'.
    decay_pow: for 'pow'.
    beta1: decay of the mean of updates, which takes memory; 0 is no mean.
    quantized_dtype: of that mean: 'int8' or 'int16', multiples of a size for
      each place of the axes but the first; 'bfloat16' or 'float32'.
    clip_threshold: the most that an update's root mean square may be,
      before the learning rate; None is no limit.
    factored: keep rows and columns, and not the second moment itself.
    epsilon1_grad_sq_reg: added to a gradient's square.
    sort_factored_second_moment_dims: factor the two largest axes, if both
      are at least `min_dim_size_to_factor`, and not the last two.
    min_dim_size_to_factor: for that.
    multiply_by_parameter_scale: multiply the learning rate by the weight's
      root mean square.
    epsilon2_param_scale_reg: the least that this may be.
  """

  decay_method: str = 'pow'
  decay_adam: float = 0.99
  decay_pow: float = 0.8
  beta1: float = 0.0
  quantized_dtype: str = 'int8'
  clip_threshold: float | None = 1.0
  factored: bool = True
  epsilon1_grad_sq_reg: float = 1e-30
  sort_factored_second_moment_dims: bool = False
  min_dim_size_to_factor: int = 128
  multiply_by_parameter_scale: bool = False
  epsilon2_param_scale_reg: float = 1e-3

  _CHECKS = {
    **_Decayed._CHECKS,
    'decay_method': keys.one_of('pow', 'adam'),
    'quantized_dtype': keys.one_of('int8', 'int16', 'bfloat16', 'float32'),
  }

  @classmethod
  def HParamsAdamB(cls) -> Any:
    """Returns hyperparameters with a mean of updates, and Adam's decay."""
    return cls.HParams(beta1=0.9, decay_method='adam', decay_adam=0.98)

  def _second_moment_decay(self, step: Any, _: Any) -> jax.Array:
    p = self.hparams
    n = jnp.asarray(step).astype(jnp.float32) + 1.0
    if p.decay_method == 'pow':
      return 1.0 - n**-p.decay_pow
    beta = p.decay_adam
    return beta * (1.0 - beta ** (n - 1.0)) / (1.0 - beta**n)

  def _directions(self, num_stacked: NumStacked) -> Transformations:
    p = self.hparams
    sort = p.sort_factored_second_moment_dims

    def leading_axes(name: str, x: Any) -> int:
      """How many axes count the tensors that are factored by themselves."""
      stacked = num_stacked(name)
      return stacked if sort else max(stacked, x.ndim - 2)

    factored = optax.scale_by_factored_rms(
      factored=p.factored,
      min_dim_size_to_factor=p.min_dim_size_to_factor if sort else 0,
      epsilon=p.epsilon1_grad_sq_reg,
      decay_rate_fn=self._second_moment_decay,
    )
    threshold = p.clip_threshold
    return [
      _map_factored(factored, leading_axes),
      *([_cap_rms(threshold, num_stacked)] if threshold else []),
    ]

  def _steps(self, num_stacked: NumStacked) -> Transformations:
    p = self.hparams

    def scale(name: str, update: jax.Array, weight: jax.Array) -> jax.Array:
      rms = _rms(weight, num_stacked(name))
      return update * jnp.maximum(rms, p.epsilon2_param_scale_reg)

    steps = super()._steps(num_stacked)
    if p.multiply_by_parameter_scale:
      steps.append(optax.stateless(functools.partial(map_with_names, scale)))
    if p.beta1:
      dtype = jnp.dtype(p.quantized_dtype)
      steps.append(
        _quantized_mean(p.beta1, dtype, num_stacked)
        if jnp.issubdtype(dtype, jnp.integer)
        else optax.ema(p.beta1, debias=False, accumulator_dtype=dtype)
      )
    return steps


class _QuantizedMean(NamedTuple):
  """The mean of updates is `m` times `m_scale`, which lacks m's first axis."""

  m: Any
  m_scale: Any


def _quantized_mean(
  decay: float, dtype: Any, num_stacked: NumStacked
) -> optax.GradientTransformation:
  """The mean of updates, of which the state keeps integers.

  What is returned is not rounded. A weight without axes is not either.
  """
  most = jnp.iinfo(dtype).max

  def quantize(name: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    if x.ndim == num_stacked(name):
      return x, jnp.ones_like(x)
    axis = num_stacked(name)
    scale = jnp.max(jnp.abs(x), axis, keepdims=True) / most
    m = jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(dtype)
    return m, scale.squeeze(axis)

  def dequantize(name: str, m: jax.Array, scale: jax.Array) -> jax.Array:
    if m.ndim == num_stacked(name):
      return m
    return m.astype(scale.dtype) * jnp.expand_dims(scale, num_stacked(name))

  def pack(tree: Any) -> _QuantizedMean:
    return _QuantizedMean(*_unzip(map_with_names(quantize, tree), tree, 2))

  def init(params: Any) -> _QuantizedMean:
    return pack(jax.tree.map(jnp.zeros_like, params))

  def update(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    old = map_with_names(dequantize, state.m, state.m_scale)
    new = optax.tree.update_moment(updates, old, decay, 1)
    return new, pack(new)

  return optax.GradientTransformation(init, update)


def _unzip(tuples: Any, tree: Any, length: int) -> Any:
  """Makes a tree of tuples, of the structure of `tree`, a tuple of trees."""
  return jax.tree.transpose(
    jax.tree.structure(tree), jax.tree.structure((0,) * length), tuples
  )


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


def _map_factored(
  inner: optax.GradientTransformation,
  leading_axes: Callable[[str, Any], int],
) -> optax.GradientTransformation:
  """Maps `optax.scale_by_factored_rms` over the leading axes of weights.

  The state is as without that: a tree of the weights' structure for each of
  rows, columns and whole moments, the latter of their weights' shapes where
  they are used.
  """

  def mapped(fn: Callable[..., Any], num_axes: int) -> Callable[..., Any]:
    for _ in range(num_axes):
      fn = jax.vmap(fn)
    return fn

  def init(params: Any) -> optax.FactoredState:
    def one(name: str, x: jax.Array) -> Any:
      # As for an update, the first entry is what the count stands for.
      fn = lambda x: (jnp.zeros_like(x), *inner.init(x)[1:])
      return mapped(fn, leading_axes(name, x))(x)

    _, *moments = _unzip(map_with_names(one, params), params, 4)
    return optax.FactoredState(jnp.zeros([], jnp.int32), *moments)

  def update(grads: Any, state: Any, params: Any = None) -> Any:
    def one(name: str, grad: jax.Array, *rest: jax.Array) -> Any:
      def fn(grad: Any, weight: Any, *moments: Any) -> Any:
        old = optax.FactoredState(state.count, *moments)
        update, new = inner.update(grad, old, weight)
        return (update, *new[1:])

      return mapped(fn, leading_axes(name, grad))(grad, *rest)

    parts = map_with_names(one, grads, params, *state[1:])
    updates, *moments = _unzip(parts, grads, 4)
    count = optax.safe_increment(state.count)
    return updates, optax.FactoredState(count, *moments)

  return optax.GradientTransformation(init, update)
