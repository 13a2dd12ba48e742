"""Learners: optimizers with clipping, skipped steps and frozen weights.

A learner chooses the weights to train, clips their gradients, and skips steps
whose gradients are not finite or too large.

Names, fields and behavior follow Praxis (Google, 2022).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.pax import hparams as hparams_lib
from examples.pax import optimizers
from jaxline.base import keys

_TRAINED, _FROZEN, _MAIN = 'trained', 'frozen', 'main'


class Learner(hparams_lib.Configurable):
  """An optimizer with clipping, skipped steps and frozen weights.

  Attributes:
    name: Name of the learner, for messages.
    loss_name: Metric to minimize. If None, the task decides.
    optimizer: Hyperparameters of the optimizer.
    grad_norm_summary: Whether to report the norms of gradients and updates.
    grad_norm_individual_vars: Whether to report the norm of each gradient too.
    skip_step_gradient_norm_value: Limit of the gradients' norm before clipping.
      A step is skipped if the norm is not below it, or not finite. If 0, only
      steps whose norm is not finite are skipped.
    vectorize_on_repeat_prefix: Whether the optimizer treats each layer of a
      stack as a separate tensor; see `optimizers.BaseOptimizer.make`.
    bprop_variable_inclusion: Regular expressions for the names of the weights
      to train. If empty, all are trained.
    bprop_variable_exclusion: Regular expressions for the weights not to train,
      as an alternative to `bprop_variable_inclusion`.
  """

  name: str = 'learner'
  loss_name: str | None = None
  optimizer: Any = hparams_lib.sub_config_field(None)
  grad_norm_summary: bool = True
  grad_norm_individual_vars: bool = False
  skip_step_gradient_norm_value: float = 0.0
  vectorize_on_repeat_prefix: bool = True
  bprop_variable_inclusion: optimizers.Regexes = ()
  bprop_variable_exclusion: optimizers.Regexes = ()

  _PARTS = {'optimizer': optimizers.BaseOptimizer}
  _EXCLUSIVE = (('bprop_variable_inclusion', 'bprop_variable_exclusion'),)
  _CHECKS = {'skip_step_gradient_norm_value': keys.optional(keys.number(min=0))}

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    p = hparams
    self._included, self._excluded = (
      optimizers.Pattern(f'{p.name}.{field}', getattr(p, field))
      for field in ('bprop_variable_inclusion', 'bprop_variable_exclusion')
    )
    # All optimizers by label, and the patterns of the auxiliary ones' weights.
    self._all = {_MAIN: self.optimizer}
    self._patterns: dict[str, optimizers.Pattern] = {}
    self._clips_apart = False

  def is_trained(self, name: str) -> bool:
    """Whether the weight with this name is trained."""
    if self._included:
      return self._included.fits(name)
    return not self._excluded.fits(name)

  def make(
    self,
    num_stacked: optimizers.NumStacked = optimizers.not_stacked,
    skips_lp: optimizers.SkipsLp = lambda name: False,
  ) -> optax.GradientTransformation:
    """Returns the transformation from gradients to updates.

    Weights that are not trained get no update, have no state
    (`optax.MaskedNode`), and count in no norm. The gradients of the others are
    clipped and passed to the optimizer. If their norm before clipping is not
    finite, or not below `skip_step_gradient_norm_value`, the update is 0 and
    the state, including its count of steps, does not change.

    Args:
      num_stacked: Counts a weight's axes of layers; see
        `optimizers.BaseOptimizer.make`.
      skips_lp: Tells which weights skip L2 and decay; see the same method.

    Returns:
      A transformation. Its `init` raises a ValueError if a regular expression
      matches no weight, or if no weight is trained. Its `update` requires the
      weights.
    """
    if not self.hparams.vectorize_on_repeat_prefix:
      num_stacked = optimizers.not_stacked
    tx = optax.partition(
      {
        _TRAINED: self._skipping(
          optax.chain(
            self._clip(),
            self._partition(lambda o: o.make(num_stacked, skips_lp)),
          )
        ),
        _FROZEN: optax.set_to_zero(),
      },
      lambda tree: optimizers.map_with_names(
        lambda name, _: _TRAINED if self.is_trained(name) else _FROZEN, tree
      ),
    )

    def init(params: Any) -> Any:
      self._check_names(optimizers.weight_names(params))
      return tx.init(params)

    return optax.GradientTransformation(init, tx.update)

  def scalars(
    self, grads: Any, updates: Any, step: Any
  ) -> dict[str, jax.Array]:
    """Returns the scalars to log for a step, in float32.

    Args:
      grads: Gradients passed to `update`.
      updates: Updates that it returned.
      step: Number of earlier updates: `num_updates` of the state before the
        step. This is less than the number of the step if steps were skipped.

    Returns:
      `learning_rate`, and `is_valid_step`, which is 0 if the step was skipped.
      With `grad_norm_summary`, the norms `grad_norm` and `clipped_grad_norm` of
      the gradients before and after clipping, and `applied_grad_norm` of the
      updates. With `grad_norm_individual_vars`, `grad_norm/NAME` for each
      weight. Norms of gradients include only trained weights.
    """
    p = self.hparams
    grads = optimizers.map_with_names(
      lambda name, x: x if self.is_trained(name) else optax.MaskedNode(), grads
    )
    norm = optax.tree.norm(grads)
    scalars = {
      **self._learning_rates(step),
      'is_valid_step': self._is_valid(grads).astype(jnp.float32),
    }
    if p.grad_norm_summary:
      clip = self._clip()
      clipped, _ = clip.update(grads, clip.init(grads))
      scalars |= {
        'grad_norm': norm,
        'clipped_grad_norm': optax.tree.norm(clipped),
        'applied_grad_norm': optax.tree.norm(updates),
      }
    if p.grad_norm_individual_vars:
      names = optimizers.weight_names(grads)
      for name, grad in zip(names, jax.tree.leaves(grads), strict=True):
        scalars[f'grad_norm/{name}'] = optax.tree.norm(grad)
    return scalars

  def _learning_rates(self, step: Any) -> dict[str, jax.Array]:
    return {'learning_rate': self.optimizer.get_learning_rate(step)}

  def _check_names(self, names: Sequence[str]) -> None:
    """Raises a ValueError if an expression or the learner selects no weight."""
    patterns = [self._included, self._excluded, *self._patterns.values()]
    patterns += [optimizer.excluded for optimizer in self._all.values()]
    for pattern in patterns:
      pattern.check(names)
    if not any(map(self.is_trained, names)):
      raise ValueError(
        f'{self._excluded.field} is {self.hparams.bprop_variable_exclusion!r},'
        f' which matches all {len(names)} weights and leaves none to train.'
      )

  def _label(self, name: str) -> str:
    """Returns the label of the optimizer for the weight with this name."""
    fitting = [
      label for label, pattern in self._patterns.items() if pattern.fits(name)
    ]
    if len(fitting) > 1:
      raise ValueError(
        f'The weight {name!r} matches the auxiliary_regex of several optimizers'
        f' of {self.hparams.name}: {fitting}; expected at most one.'
      )
    return fitting[0] if fitting else _MAIN

  def _partition(
    self, make: Callable[[optimizers.BaseOptimizer], Any]
  ) -> optax.GradientTransformation:
    """Returns the transformation that applies each optimizer to its weights."""
    return make(self.optimizer)

  def _clip(self) -> optax.GradientTransformation:
    """Returns the transformation that clips gradients."""
    if self._clips_apart:
      return self._partition(_clipping)
    return _clipping(self.optimizer)

  def _is_valid(self, grads: Any) -> jax.Array:
    """Whether these gradients are valid, so that the step is not skipped."""
    groups = dict[str, list[Any]]((label, []) for label in self._all)
    names = optimizers.weight_names(grads)
    for name, grad in zip(names, jax.tree.leaves(grads), strict=True):
      label = self._label(name) if self._clips_apart else _MAIN
      groups[label].append(grad)
    norms = jnp.stack([*map(optax.tree.norm, groups.values())])
    limit = self.hparams.skip_step_gradient_norm_value
    return jnp.all(jnp.isfinite(norms) & (norms < (limit or jnp.inf)))

  def _skipping(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformation:
    """Wraps a transformation: an invalid step has updates 0 and keeps state."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
      valid = self._is_valid(grads)
      updates, new_state = inner.update(grads, state, params)
      updates = jax.tree.map(
        lambda x: jnp.where(valid, x, jnp.zeros_like(x)), updates
      )
      state = jax.tree.map(
        lambda new, old: jnp.where(valid, new, old), new_state, state
      )
      return updates, state

    return optax.GradientTransformation(inner.init, update)


def _clipping(
  optimizer: optimizers.BaseOptimizer,
) -> optax.GradientTransformation:
  """Returns the clipping that an optimizer's hyperparameters specify."""
  p = optimizer.hparams
  if limit := p.clip_gradient_norm_to_value:
    return optax.clip_by_global_norm(limit)
  if limit := p.clip_gradient_single_norm_to_value:
    clip = optax.clip_by_global_norm(limit)
    return optax.stateless_with_tree_map(
      lambda grad, _: clip.update(grad, optax.EmptyState())[0]
    )
  return optax.identity()


def num_updates(opt_state: Any) -> jax.Array:
  """Returns the number of updates of a learner's state, an int32 scalar.

  Skipped steps do not count. The learning rate follows this number.
  """

  def is_schedule(x: Any) -> bool:
    return isinstance(x, optax.ScaleByScheduleState)

  states = jax.tree.leaves(opt_state, is_leaf=is_schedule)
  return next(state.count for state in states if is_schedule(state))


def joined(several: Sequence[Learner.HParams]) -> Learner.HParams:
  """Joins the hyperparameters of several learners into those of one.

  Args:
    several: Learners. Each but the first trains the weights of its
      `bprop_variable_inclusion`, and the first trains all others. Each clips
      its own gradients.

  Raises:
    ValueError: There is no learner, or one differs from the first in a field
      that concerns all weights.
  """
  if not several:
    raise ValueError('A task has no learner; expected at least one.')
  main, *others = (learner.clone() for learner in several)
  if not others:
    return main
  for other in others:
    own = ('name', 'optimizer', 'bprop_variable_inclusion')
    same = other.clone().set(**{name: getattr(main, name) for name in own})
    if same != main or not other.bprop_variable_inclusion:
      raise ValueError(
        f'The learner {other.name!r} differs from {main.name!r}. Learners after'
        ' the first must set a name, an optimizer and bprop_variable_inclusion,'
        ' and equal the first, a learners.Learner, in all other fields.'
      )
  return MultiOptimizerLearner.HParams(
    **{name: getattr(main, name) for name in main.names()},
    auxiliary_optimizers=[other.optimizer for other in others],
    auxiliary_regex=[other.bprop_variable_inclusion for other in others],
    auxiliary_names=[other.name for other in others],
    apply_separate_scaling=True,
  )


class MultiOptimizerLearner(Learner):
  """A learner with auxiliary optimizers for some of the weights.

  The main optimizer, `optimizer`, trains all remaining weights. Its `ema_decay`
  applies to all weights, and so does its clipping, unless
  `apply_separate_scaling` is set.

  Attributes:
    auxiliary_optimizers: Hyperparameters of the auxiliary optimizers.
    auxiliary_regex: Regular expression for the names of each auxiliary
      optimizer's weights.
    auxiliary_names: Name of each auxiliary optimizer, for the scalar
      `<name>/learning_rate`. The main optimizer's name is `main`.
    apply_separate_scaling: Whether each optimizer clips its own gradients. If
      so, a step is skipped unless the norm of each optimizer's gradients is
      valid.
  """

  auxiliary_optimizers: Sequence[Any] = ()
  auxiliary_regex: Sequence[str] = ()
  auxiliary_names: Sequence[str] = ()
  apply_separate_scaling: bool = False

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    p = hparams
    if len({_MAIN, *p.auxiliary_names}) <= len(p.auxiliary_names):
      raise ValueError(
        f'{p.name}.auxiliary_names is {p.auxiliary_names}; expected distinct'
        f' names, none of them {_MAIN!r}, the name of the main optimizer.'
      )
    self._clips_apart = p.apply_separate_scaling
    without_effect = ['ema_decay']
    if not p.apply_separate_scaling:
      without_effect += optimizers.CLIPS
    for name, optimizer, regex in zip(
      p.auxiliary_names,
      p.auxiliary_optimizers,
      p.auxiliary_regex,
      strict=True,
    ):
      made = self._all[name] = hparams_lib.instantiate(
        optimizer,
        optimizers.BaseOptimizer,
        f'An entry of {p.name}.auxiliary_optimizers',
      )
      self._patterns[name] = optimizers.Pattern(
        f'{p.name}.auxiliary_regex', regex
      )
      for field in without_effect:
        if value := getattr(made, field):
          raise ValueError(
            f'The auxiliary optimizer {name!r} of {p.name} has {field} {value},'
            ' which would have no effect. Set it in the main optimizer, for all'
            ' weights.'
          )

  def _partition(
    self, make: Callable[[optimizers.BaseOptimizer], Any]
  ) -> optax.GradientTransformation:
    # Partition even if there are no auxiliary optimizers, because checkpoints
    # contain the names that this creates.
    return optax.partition(
      {label: make(optimizer) for label, optimizer in self._all.items()},
      lambda tree: optimizers.map_with_names(
        lambda name, _: self._label(name), tree
      ),
    )

  def _learning_rates(self, step: Any) -> dict[str, jax.Array]:
    return {
      f'{label}/learning_rate': optimizer.get_learning_rate(step)
      for label, optimizer in self._all.items()
    }
