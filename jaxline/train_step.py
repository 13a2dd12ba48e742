"""The parts of a training step and of an evaluation step, as pure functions.

`sharded.ShardedExperiment._pure_step` puts them together: gradients, update,
select if finite.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxline import errors
from jaxline import metrics as metrics_lib
from jaxline import partitioning
from jaxline.checkpoint import structure
from jaxline.inputs import base as inputs
from jaxline.supervision import nonfinite as guard

Batch = dict[str, Any]
LossOutput = tuple[jax.Array, metrics_lib.Metrics, Any]
# (params, model_state, batch, rng, is_training) ->
# (loss, metrics, new model_state)
LossFn = Callable[[Any, Any, Batch, jax.Array, bool], LossOutput]
# loss, metrics, new model_state, gradients
Gradients = tuple[jax.Array, metrics_lib.Metrics, Any, Any]

# The entry of a batch with the weight of each row, [B] float32, or of each part
# of a row such as a token, [B, ...].
WEIGHTS = inputs.WEIGHTS

# The entry of a model state, if it is a dict, that a step replaces by the
# gradient of the loss with respect to it. FP8 products keep their scales there
# (Flax's convention): the optimizer does not change them, and the norm of the
# gradients does not include them.
OVERWRITE = '_overwrite_with_gradient'

# The entry of a model state with the average of the weights over the steps, if
# the experiment keeps one: see `average_weights`.
EMA = 'ema'

# A scalar that `train_step` adds to those of the loss, like `guard.NONFINITE`.
SKIPPED_STEPS = 'skipped_steps'


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that a step changes.

  Attributes:
    step: number of steps done, an int32 scalar.
    params: the weights that the optimizer changes.
    model_state: what the loss function itself changes, such as statistics.
    opt_state: the optimizer's state.
    skipped: number of steps that `on_nonfinite = 'skip'` left out because their
      loss or gradients were not finite, [2] int32: in a row up to now, and in
      all.
  """

  step: Any
  params: Any
  model_state: Any
  opt_state: Any
  skipped: Any = dataclasses.field(
    default_factory=lambda: np.zeros([2], np.int32)
  )


def gradients(
  loss_fn: LossFn, params: Any, model_state: Any, batch: Batch, rng: jax.Array
) -> Gradients:
  """Returns the loss, the metrics, the new model state and the gradients.

  Args:
    loss_fn: the loss of a batch.
    params: the weights to differentiate by; None stands for a frozen weight.
    model_state: the model state before the step.
    batch: a batch, [B, ...].
    rng: the key of the batch.
  """
  overwritten: dict[str, Any] = {}
  if isinstance(model_state, Mapping) and OVERWRITE in model_state:
    overwritten = {OVERWRITE: model_state[OVERWRITE]}

  def compute_loss(params: Any, overwritten: Any) -> tuple[jax.Array, Any]:
    old = {**model_state, **overwritten} if overwritten else model_state
    loss, metrics, new = loss_fn(params, old, batch, rng, True)
    return loss, (metrics, new)

  (loss, (metrics, new)), (grads, overwritten) = jax.value_and_grad(
    compute_loss, argnums=(0, 1), has_aux=True
  )(params, overwritten)
  if overwritten:
    new = {**new, **overwritten}
  return loss, metrics, new, grads


def update(
  optimizer: optax.GradientTransformation,
  state: TrainState,
  grads: Any,
  model_state: Any,
  trainable_rules: str | Sequence[str] | None = None,
) -> tuple[TrainState, Any]:
  """Returns the state after an update of the weights, and the updates.

  Args:
    optimizer: turns gradients into updates.
    state: the state before the step.
    grads: the gradients, a tree like `trained(state.params)`.
    model_state: the new model state.
    trainable_rules: the weights that train, as for `trained`.
  """
  params = trained(state.params, trainable_rules)
  # Optax relies on promotion, although a model may be written to do without.
  with jax.numpy_dtype_promotion('standard'):
    updates, opt_state = optimizer.update(grads, state.opt_state, params)
  params = with_frozen(optax.apply_updates(params, updates), state.params)
  after = TrainState(
    state.step + 1, params, model_state, opt_state, state.skipped
  )
  return after, updates


def checked(after: TrainState, before: TrainState) -> TrainState:
  """Returns the state after a step, with the types of the state before it.

  Raises:
    ValueError: an array has another shape or type.
  """
  after = strongly_typed(after)
  if wrong := differences(after, before, 'the step returns', 'it got'):
    raise ValueError(
      'The state after a step must have the shapes and types of the state'
      ' before it. loss_fn returns the model state; the optimizer makes the'
      ' rest.\n' + '\n'.join(wrong)
    )
  return after


def differences(
  a: Any, b: Any, a_says: str, b_says: str, name: str = ''
) -> list[str]:
  """Returns a line for each array whose shape or type differs.

  Args:
    a: tree of arrays, or of any leaves with shape and dtype.
    b: another.
    a_says: the text before the shape in `a`.
    b_says: the text before the shape in `b`.
    name: of the trees, with which the names of their leaves begin.
  """
  have, want = (structure.named_leaves(tree, name) for tree in (a, b))

  def shape(x: Any) -> str:
    dtype = getattr(x, 'dtype', type(x).__name__)
    return 'nothing' if x is None else f'{dtype}{list(np.shape(x))}'

  return [
    f'{k}: {a_says} {shape(have.get(k))}, {b_says} {shape(want.get(k))}'
    for k in sorted(have | want)
    if shape(have.get(k)) != shape(want.get(k))
  ]


def guard_step(
  on_nonfinite: str,
  before: TrainState,
  after: TrainState,
  loss: jax.Array,
  grads: Any,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Selects the state after a step by whether its numbers are finite.

  Args:
    on_nonfinite: 'skip' returns the state before a step whose loss or gradients
      are not finite, with new counts. The other modes return `after`.
    before: the state before the step.
    after: the state after it.
    loss: the loss of the step.
    grads: its gradients.

  Returns:
    The state, and scalars. `nonfinite`, int32, is 1 if the loss or the global
    norm of the gradients is not finite, else 0. With 'skip' it is the number of
    such steps in a row, and `skipped_steps` their number in all.
  """
  nonfinite = _nonfinite(loss, grads).astype(jnp.int32)
  if on_nonfinite != 'skip':
    return after, {guard.NONFINITE: nonfinite}
  in_a_row = nonfinite * (before.skipped[0] + 1)
  in_all = before.skipped[1] + nonfinite
  # A select is fused into the optimizer's own pass over the arrays; a branch
  # would be a barrier between the two.
  state = jax.tree.map(
    functools.partial(jax.lax.select, nonfinite > 0),
    dataclasses.replace(before, step=after.step),
    after,
  )
  state = dataclasses.replace(state, skipped=jnp.stack([in_a_row, in_all]))
  return state, {guard.NONFINITE: in_a_row, SKIPPED_STEPS: in_all}


def trainable(params: Any, rules: str | Sequence[str]) -> Any:
  """Returns a tree of bools: which weights train.

  Args:
    params: the weights, or any tree with their names.
    rules: regular expressions. A weight trains if one of them matches its whole
      name, such as 'embedding/norm/scale'; one that matches none is an error.
  """
  trains = dict.fromkeys(structure.named_leaves(params), False)
  for rule in [rules] if isinstance(rules, str) else rules:
    found = [name for name in trains if re.fullmatch(rule, name)]
    if not found:
      raise errors.UsageError(
        f'{rule!r} in trainable matches the whole name of no weight; nearest'
        f' are {errors.nearest(rule, trains, n=8, cutoff=0)}.'
      )
    trains |= dict.fromkeys(found, True)
  return jax.tree.unflatten(jax.tree.structure(params), trains.values())


def trained(params: Any, rules: str | Sequence[str] | None) -> Any:
  """Returns the weights with None for those that do not train, if any."""
  if rules is None:
    return params
  mask = trainable(params, rules)
  return jax.tree.map(lambda x, trains: x if trains else None, params, mask)


def with_frozen(params: Any, whole: Any) -> Any:
  """Returns weights with those of `whole` in place of each None."""
  return jax.tree.map(
    lambda x, frozen: frozen if x is None else x,
    params,
    whole,
    is_leaf=lambda x: x is None,
  )


def average_weights(
  before: TrainState, after: TrainState, decay: float
) -> dict[str, Any]:
  """Returns the model state with a new moving average of the weights.

  For `after_update`. `init_fn` puts the initial weights into the entry `EMA` of
  the model state as it returns them, so that the average is sharded like them.

  This is an exponential moving average with the bias correction of
  `optax.ema(debias=True)`: the initial weights do not count, and neither do
  skipped steps. It keeps the dtypes of its entry: average bfloat16 in float32.

  Args:
    before: the state before the step.
    after: the state after it.
    decay: the share of the average that a step keeps, above 0 and below 1; near
      1 an average over about 1 / (1 - decay) steps.
  """
  count = (after.step - after.skipped[1]).astype(jnp.float32)
  # The corrected average is kept, and not the moment of `optax.ema`, so that
  # each checkpoint has weights to use. `expm1`, since float32 would round
  # 1 - decay**count to few digits.
  share = (1 - decay) / -jnp.expm1(count * math.log(decay))

  def new_average(average: jax.Array, weight: jax.Array) -> jax.Array:
    change = weight.astype(average.dtype) - average
    return average + share.astype(average.dtype) * change

  average = jax.tree.map(new_average, before.model_state[EMA], after.params)
  return {**after.model_state, EMA: average}


def _nonfinite(loss: jax.Array, grads: Any) -> jax.Array:
  """Returns whether the loss or the gradients' norm is not finite."""

  def wide(x: jax.Array) -> jax.Array:
    # The square of a float16 is infinite from 256 on.
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x

  # The step's scalars usually contain the norm, and XLA computes it only once.
  # Gradients of several types need promotion.
  with jax.numpy_dtype_promotion('standard'):
    norm = optax.tree.norm(jax.tree.map(wide, grads))
  return ~(jnp.isfinite(loss) & jnp.isfinite(norm))


def eval_step(
  loss_fn: LossFn, state: TrainState, batch: Batch, rng: jax.Array
) -> dict[str, metrics_lib.Mean]:
  """Returns the metrics of one batch; the state needs no `opt_state`."""
  _, metrics, _ = loss_fn(state.params, state.model_state, batch, rng, False)
  return dict(metrics)


def init_state(
  init_fn: Callable[[jax.Array], tuple[Any, Any]],
  optimizer: optax.GradientTransformation,
  rng: jax.Array,
  trainable_rules: str | Sequence[str] | None = None,
) -> TrainState:
  """Returns the state before the first step.

  Args:
    init_fn: `rng -> (params, model_state)`; weights may be
      `partitioning.Logical`. They stay so: `partitioning.unbox` gives arrays.
    optimizer: makes its own part of the state.
    rng: the key that `init_fn` gets.
    trainable_rules: as for `train_step`.
  """
  params, model_state = strongly_typed(init_fn(rng))
  return strongly_typed(
    TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      model_state=model_state,
      opt_state=optimizer.init(
        trained(partitioning.unbox(params), trainable_rules)
      ),
    )
  )


def strongly_typed(tree: Any) -> Any:
  """Replaces the weak types of Python numbers by strong ones.

  The first step would turn a weak type into a strong one, and the second step
  would then be compiled again.
  """
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)
