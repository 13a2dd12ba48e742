"""Learners: optimizers with clipping, skipped steps and frozen weights.

A learner chooses the weights to train, clips their gradients, and skips steps
whose gradients are not finite or too large.

Names, fields and behavior follow Praxis (Google, 2022).
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.pax import hparams as hparams_lib
from examples.pax import optimizers
from jaxline.base import keys

__getattr__ = hparams_lib.refuse_names_of_pax(__name__)

_TRAINED, _FROZEN, _MAIN = 'trained', 'frozen', 'main'


class Learner(hparams_lib.Configurable):
  """An optimizer with clipping, skipped steps and frozen weights.

  Attributes:
    name: Name of the learner, for messages.
    loss_name: Metric to minimize. If None, the task decides.
    optimizer: Hyperparameters of the optimizer.
    skip_step_gradient_norm_value: Limit of the gradients' norm before clipping.
      A step is skipped if the norm is not below it, or not finite. If 0, only
      steps whose norm is not finite are skipped.
    bprop_variable_inclusion: Regular expressions for the names of the weights
      to train. If empty, all are trained.
    bprop_variable_exclusion: Regular expressions for the weights not to train,
      as an alternative to `bprop_variable_inclusion`.
  """

  name: str = 'learner'
  loss_name: str | None = None
  optimizer: Any = hparams_lib.sub_config_field(None)
  skip_step_gradient_norm_value: float = 0.0
  bprop_variable_inclusion: optimizers.Regexes = ()
  bprop_variable_exclusion: optimizers.Regexes = ()

  _PARTS = {'optimizer': optimizers.BaseOptimizer}
  _EXCLUSIVE = (('bprop_variable_inclusion', 'bprop_variable_exclusion'),)
  _CHECKS = {'skip_step_gradient_norm_value': keys.optional(keys.number(min=0))}

  def __init__(self, hparams: Any, others: Sequence['Learner'] = ()):
    """Makes the learner. `others` train some of the weights: see `joined`."""
    super().__init__(hparams)
    self._included, self._excluded = (
      optimizers.Pattern(f'{hparams.name}.{field}', getattr(hparams, field))
      for field in ('bprop_variable_inclusion', 'bprop_variable_exclusion')
    )
    self._others = {other.name: other._included for other in others}
    self._optimizers: dict[str, optimizers.BaseOptimizer] = {
      _MAIN: self.optimizer,
      **{other.name: other.optimizer for other in others},
    }

  def is_trained(self, name: str) -> bool:
    """Whether the weight with this name is trained."""
    if self._label(name) != _MAIN:
      return True
    if self._included:
      return self._included.fits(name)
    return not self._excluded.fits(name)

  def make(
    self,
    num_stacked: optimizers.NumStacked = lambda name: 0,
    skips_lp: optimizers.SkipsLp = lambda name: False,
  ) -> optax.GradientTransformation:
    """Returns the transformation from gradients to updates.

    Weights that are not trained get no update, have no state
    (`optax.MaskedNode`), and count in no norm. The gradients of the others are
    clipped and passed to the optimizer. If their norm before clipping is not
    finite, or not below `skip_step_gradient_norm_value`, the update is 0 and
    the state, including its count of steps, does not change.

    `init` raises a ValueError if a regular expression matches no weight, or if
    no weight is trained. `update` requires the weights. For the arguments, see
    `optimizers.BaseOptimizer.make`.
    """
    make = lambda o: optax.chain(_clipping(o), o.make(num_stacked, skips_lp))
    tx = optax.partition(
      {
        _TRAINED: self._skipping(self._partition(make)),
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
      step: `num_updates` of the state before the step.

    Returns:
      `learning_rate` (with several learners, `NAME/learning_rate` for each);
      `is_valid_step`, which is 0 if the step was skipped; the norms `grad_norm`
      and `clipped_grad_norm` of the trained weights' gradients before and after
      clipping; and `applied_grad_norm`, the norm of the updates.
    """
    grads = optimizers.map_with_names(
      lambda name, x: x if self.is_trained(name) else optax.MaskedNode(), grads
    )
    clip = self._partition(_clipping)
    clipped, _ = clip.update(grads, clip.init(grads))
    prefix = '{}/' if self._others else ''
    return {
      **{
        f'{prefix.format(label)}learning_rate': o.get_learning_rate(step)
        for label, o in self._optimizers.items()
      },
      'is_valid_step': self._is_valid(grads).astype(jnp.float32),
      'grad_norm': optax.tree.norm(grads),
      'clipped_grad_norm': optax.tree.norm(clipped),
      'applied_grad_norm': optax.tree.norm(updates),
    }

  def _check_names(self, names: Sequence[str]) -> None:
    """Raises a ValueError if an expression or the learner selects no weight."""
    for pattern in self._included, self._excluded, *self._others.values():
      pattern.check(names)
    if not any(map(self.is_trained, names)):
      raise ValueError(
        f'{self._excluded.field} is {self.hparams.bprop_variable_exclusion!r},'
        f' which matches all {len(names)} weights and leaves none to train.'
      )

  def _label(self, name: str) -> str:
    """Returns the label of the optimizer for the weight with this name."""
    fitting = [
      label for label, pattern in self._others.items() if pattern.fits(name)
    ]
    if len(fitting) > 1:
      raise ValueError(
        f'The weight {name!r} matches the bprop_variable_inclusion of several'
        f' learners: {fitting}; expected at most one.'
      )
    return fitting[0] if fitting else _MAIN

  def _partition(
    self, make: Callable[[optimizers.BaseOptimizer], Any]
  ) -> optax.GradientTransformation:
    """Returns the transformation that applies each optimizer to its weights."""
    if not self._others:
      return make(self.optimizer)
    return optax.partition(
      {label: make(optimizer) for label, optimizer in self._optimizers.items()},
      lambda tree: optimizers.map_with_names(
        lambda name, _: self._label(name), tree
      ),
    )

  def _is_valid(self, grads: Any) -> jax.Array:
    """Whether the norm of each optimizer's gradients is valid."""
    groups = dict[str, list[Any]]((label, []) for label in self._optimizers)
    names = optimizers.weight_names(grads)
    for name, grad in zip(names, jax.tree.leaves(grads), strict=True):
      groups[self._label(name)].append(grad)
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
      choose = functools.partial(jnp.where, valid)
      zeros = jax.tree.map(jnp.zeros_like, updates)
      return jax.tree.map(choose, (updates, new_state), (zeros, state))

    return optax.GradientTransformation(inner.init, update)


def _clipping(
  optimizer: optimizers.BaseOptimizer,
) -> optax.GradientTransformation:
  """Returns the clipping that an optimizer's hyperparameters specify."""
  limit = optimizer.hparams.clip_gradient_norm_to_value
  return optax.clip_by_global_norm(limit) if limit else optax.identity()


def num_updates(opt_state: Any) -> jax.Array:
  """Returns the number of updates of a learner's state, an int32 scalar.

  Skipped steps do not count. The learning rate follows this number.
  """
  is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)
  states = jax.tree.leaves(opt_state, is_leaf=is_schedule)
  return next(state.count for state in states if is_schedule(state))


def joined(several: Sequence[Any]) -> Learner:
  """Makes one learner from the hyperparameters of several.

  Each but the first trains the weights of its `bprop_variable_inclusion`, and
  the first all others that it trains. Each clips its own gradients. If the
  gradients of one are not valid, all skip the step. The moving average is the
  first one's.
  """
  if not several:
    raise ValueError('A task has no learner; expected at least one.')
  main, *others = several
  known = {_MAIN}
  for other in others:
    own = {
      name: getattr(main, name)
      for name in ('name', 'optimizer', *Learner._EXCLUSIVE[0])
    }
    if (
      other.clone().set(**own) != main
      or not other.bprop_variable_inclusion
      or other.optimizer.ema_decay
      or other.name in known
    ):
      raise ValueError(
        f'The learner {other.name!r} differs from {main.name!r}. Learners after'
        ' the first must set a name that no other has, an optimizer without'
        ' ema_decay, and bprop_variable_inclusion, and equal the first in all'
        ' other fields.'
      )
    known.add(other.name)
  return main.cls(main.clone().freeze(), [o.Instantiate() for o in others])
