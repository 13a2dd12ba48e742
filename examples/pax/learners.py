"""Learners: which weights are trained, by which optimizer, on which gradients.

A learner clips gradients, skips steps whose gradients are not finite or too
large, and does not change weights that are not to be trained.

Names, fields and behaviour are those of Praxis (Google, 2022).
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
  """One optimizer, and what belongs before and behind it.

  Attributes:
    name: what messages call it.
    loss_name: the metric that is minimised.
    optimizer: hyperparameters of the optimizer.
    grad_norm_summary: report norms of gradients and of updates.
    grad_norm_individual_vars: report each gradient's norm besides.
    skip_step_gradient_norm_value: a step is skipped unless the norm of the
      gradients is smaller than this, or if it is not finite; 0 is no limit.
      The norm is that before clipping.
    vectorize_on_repeat_prefix: each layer of a stack is a tensor of its own
      to the optimizer; see `optimizers.BaseOptimizer.make`.
    bprop_variable_inclusion: regular expressions for the names of the weights
      that are trained; empty for all.
    bprop_variable_exclusion: or for those that are not.
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
    # All optimizers by label, and those that have weights of their own.
    self._all = {_MAIN: self.optimizer}
    self._patterns: dict[str, optimizers.Pattern] = {}
    self._clips_apart = False

  def is_trained(self, name: str) -> bool:
    """Whether the weight of a name is trained."""
    if self._included:
      return self._included.fits(name)
    return not self._excluded.fits(name)

  def make(
    self,
    num_stacked: optimizers.NumStacked = optimizers.not_stacked,
    skips_lp: optimizers.SkipsLp = lambda name: False,
  ) -> optax.GradientTransformation:
    """Returns what turns gradients into updates.

    Weights that are not trained get no update, have no state
    (`optax.MaskedNode`), and count in no norm. Gradients of the others are
    clipped and go to the optimizer. Where their norm, before that, is not
    finite, or not below `skip_step_gradient_norm_value`, the update is 0 and
    the state stays as it was, its count of steps included.

    Args:
      num_stacked: as for `optimizers.BaseOptimizer.make`.
      skips_lp: likewise.

    Returns:
      A transformation, whose `init` raises ValueError where a regular
      expression fits no weight, or no weight is trained; its `update` must be
      given the weights.
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
    """Returns what a step has to report, float32 scalars.

    Args:
      grads: the gradients that `update` was given.
      updates: what it returned.
      step: how many updates there were before: `num_updates` of the state
        before the step. It is less than the number of the step where some were
        skipped.

    Returns:
      `learning_rate`; `is_valid_step`, 0 where the step was skipped; with
      `grad_norm_summary` the norms `grad_norm` of gradients,
      `clipped_grad_norm` of these after clipping, and `applied_grad_norm` of
      the updates; with `grad_norm_individual_vars` a `grad_norm/` for each
      weight. All but those of `updates` are of weights that are trained.
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
    """Refuses a regular expression that fits no weight."""
    patterns = [self._included, self._excluded, *self._patterns.values()]
    patterns += [optimizer.excluded for optimizer in self._all.values()]
    for pattern in patterns:
      pattern.check(names)
    if not any(map(self.is_trained, names)):
      raise ValueError(
        f'{self._excluded.field} is {self.hparams.bprop_variable_exclusion!r},'
        f' which fits all of the {len(names)} weights and leaves none to train.'
      )

  def _label(self, name: str) -> str:
    """Returns which optimizer has the weight of a name."""
    fitting = [
      label for label, pattern in self._patterns.items() if pattern.fits(name)
    ]
    if len(fitting) > 1:
      raise ValueError(
        f'The weight {name!r} is fitted by the auxiliary_regex of several'
        f' optimizers of {self.hparams.name}: {fitting}; expected one.'
      )
    return fitting[0] if fitting else _MAIN

  def _partition(
    self, make: Callable[[optimizers.BaseOptimizer], Any]
  ) -> optax.GradientTransformation:
    """Returns each optimizer's transformation, for its weights."""
    return make(self.optimizer)

  def _clip(self) -> optax.GradientTransformation:
    """Returns what clips gradients."""
    if self._clips_apart:
      return self._partition(_clipping)
    return _clipping(self.optimizer)

  def _is_valid(self, grads: Any) -> jax.Array:
    """Whether a step with these gradients is taken."""
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
    """Makes updates 0, and keeps the state, where a step is not valid."""

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
  """Returns what clips gradients as an optimizer's hyperparameters say."""
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
  """Returns how many updates a learner's state has had, an int32 scalar.

  Steps that were skipped do not count, and the learning rate follows this.
  """

  def is_schedule(x: Any) -> bool:
    return isinstance(x, optax.ScaleByScheduleState)

  states = jax.tree.leaves(opt_state, is_leaf=is_schedule)
  return next(state.count for state in states if is_schedule(state))


def joined(several: Sequence[Learner.HParams]) -> Learner.HParams:
  """Returns several learners as the hyperparameters of one.

  Args:
    several: the first has all weights that no other one has; each other one
      those of its `bprop_variable_inclusion`. Each clips its own gradients.

  Raises:
    ValueError: there is none; or one says something that is not of its weights.
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
        f'The learner {other.name!r} differs from {main.name!r}; expected, of'
        ' learners beside the first, a name, an optimizer and'
        ' bprop_variable_inclusion, and all else as in the first, a'
        ' learners.Learner.'
      )
  return MultiOptimizerLearner.HParams(
    **{name: getattr(main, name) for name in main.names()},
    auxiliary_optimizers=[other.optimizer for other in others],
    auxiliary_regex=[other.bprop_variable_inclusion for other in others],
    auxiliary_names=[other.name for other in others],
    apply_separate_scaling=True,
  )


class MultiOptimizerLearner(Learner):
  """Some weights to one optimizer, some to others, all others to the main one.

  The moving average of weights is that of the main optimizer, for all weights;
  so is clipping, unless there is `apply_separate_scaling`.

  Attributes:
    auxiliary_optimizers: hyperparameters of the others.
    auxiliary_regex: for each, a regular expression for the names of its
      weights.
    auxiliary_names: for each, a name for scalars, `<name>/learning_rate`;
      the main optimizer's is `main`.
    apply_separate_scaling: whether each optimizer's gradients are clipped by
      themselves, as it says. A step is then taken where the norm of each of
      them is valid.
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
        f'{p.name}.auxiliary_names is {p.auxiliary_names}; expected each name'
        f' once, and not {_MAIN!r}, which is the main optimizer.'
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
            ' which would have no effect; set it in the main optimizer, for all'
            ' weights.'
          )

  def _partition(
    self, make: Callable[[optimizers.BaseOptimizer], Any]
  ) -> optax.GradientTransformation:
    # Even without auxiliary optimizers: old checkpoints have these names.
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
