"""One training step and one evaluation step as pure functions.

`sharded.ShardedExperiment` compiles them over a mesh. They can also be called
as they are, for instance in a notebook or a test.
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
from jaxline import experiment
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


def train_step(
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  step_scalars: Callable[..., Mapping[str, jax.Array]],
  state: TrainState,
  batch: Batch,
  rng: jax.Array,
  *,
  after_update: Callable[..., Any] = lambda before, after: after.model_state,
  on_nonfinite: str = 'ignore',
  accumulation_steps: int = 1,
  place_grads: Callable[[Any], Any] = lambda grads: grads,
  trainable_rules: str | Sequence[str] | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Runs one step of training.

  Args:
    loss_fn: the loss of a batch.
    optimizer: turns gradients into updates.
    step_scalars: `(state, grads, updates) -> scalars` to log besides the loss's
      metrics.
    state: the state before the step.
    batch: a global batch.
    rng: the run's step key. This step's key is its `fold_in` of `state.step`.
    after_update: `(before, after) -> model_state`, called with the states
      before and after the update; the latter's `model_state` is what `loss_fn`
      returned.
    on_nonfinite: 'raise' and 'warn' add the scalar `nonfinite`, int32: 1 if the
      loss or the gradients' global norm is not finite, else 0. With 'skip' such
      a step changes only the counts: `nonfinite` is the number of such steps in
      a row, `skipped_steps` their number in all. 'ignore' checks nothing.
    accumulation_steps: number of parts that the batch is cut into. The parts'
      gradients are averaged by their `weights`, which gives the gradient of the
      whole batch if the loss is the mean by these weights. Each part has its
      own key.
    place_grads: constrains the sharding of gradients.
    trainable_rules: the weights that train, as for `trained`. The optimizer and
      `step_scalars` get trees with None in place of the others.

  Returns:
    The state after the step, and scalars.
  """
  rng = jax.random.fold_in(rng, state.step)
  # Differentiated by these alone: a gradient that is only dropped later could
  # still take memory, as in the sums of an accumulation.
  params = trained(state.params, trainable_rules)

  def with_frozen(params: Any) -> Any:
    is_none = lambda x: x is None
    choose = lambda x, frozen: frozen if is_none(x) else x
    return jax.tree.map(choose, params, state.params, is_leaf=is_none)

  def loss_of_trained(params: Any, *args: Any) -> LossOutput:
    return loss_fn(with_frozen(params), *args)

  if accumulation_steps == 1:
    loss, metrics, model_state, grads = _loss_and_grads(
      loss_of_trained, params, state.model_state, batch, rng
    )
    grads = place_grads(grads)
  else:
    part = dataclasses.replace(state, params=params)
    loss, metrics, model_state, grads = _accumulate(
      loss_of_trained, part, batch, rng, accumulation_steps, place_grads
    )
  # Optax relies on promotion, although a model may be written to do without.
  with jax.numpy_dtype_promotion('standard'):
    updates, opt_state = optimizer.update(grads, state.opt_state, params)
  params = optax.apply_updates(params, updates)
  scalars = metrics_lib.compute(metrics)
  scalars.update(step_scalars(state, grads, updates))
  after = TrainState(
    step=state.step + 1,
    params=with_frozen(params),
    model_state=model_state,
    opt_state=opt_state,
    skipped=state.skipped,
  )
  model_state = after_update(state, after)
  new_state = _strongly_typed(
    dataclasses.replace(after, model_state=model_state)
  )
  if wrong := experiment.differences(
    new_state, state, 'the step returns', 'it got'
  ):
    raise ValueError(
      'The state after a step must have the shapes and types of the state'
      ' before it. loss_fn returns the model state; the optimizer makes the'
      ' rest.\n' + '\n'.join(wrong)
    )
  if on_nonfinite == 'ignore':
    return new_state, scalars
  if taken := scalars.keys() & {guard.NONFINITE, SKIPPED_STEPS}:
    raise ValueError(
      f'The experiment returns scalars named {sorted(taken)}; the step adds'
      f' {guard.NONFINITE!r} and {SKIPPED_STEPS!r} itself. Choose other names.'
    )
  nonfinite = _nonfinite(loss, grads).astype(jnp.int32)
  scalars[guard.NONFINITE] = nonfinite
  if on_nonfinite == 'skip':
    in_a_row = nonfinite * (state.skipped[0] + 1)
    in_all = state.skipped[1] + nonfinite
    # A select is fused into the optimizer's own pass over the arrays; a branch
    # would be a barrier between the two.
    new_state = jax.tree.map(
      functools.partial(jax.lax.select, nonfinite > 0),
      dataclasses.replace(state, step=new_state.step),
      new_state,
    )
    new_state = dataclasses.replace(
      new_state, skipped=jnp.stack([in_a_row, in_all])
    )
    scalars |= {guard.NONFINITE: in_a_row, SKIPPED_STEPS: in_all}
  return new_state, scalars


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

  def one(average: jax.Array, weight: jax.Array) -> jax.Array:
    change = weight.astype(average.dtype) - average
    return average + share.astype(average.dtype) * change

  average = jax.tree.map(one, before.model_state[EMA], after.params)
  return {**after.model_state, EMA: average}


def _loss_and_grads(
  loss_fn: LossFn, params: Any, model_state: Any, batch: Batch, rng: jax.Array
) -> tuple[jax.Array, metrics_lib.Metrics, Any, Any]:
  """Returns the loss, the metrics, the new model state and the gradients."""
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


def _accumulate(
  loss_fn: LossFn,
  state: TrainState,
  batch: Batch,
  rng: jax.Array,
  num_parts: int,
  place_grads: Callable[[Any], Any],
) -> tuple[jax.Array, metrics_lib.Metrics, Any, Any]:
  """Returns what `_loss_and_grads` does, computed in parts of the batch."""
  rows = len(batch[WEIGHTS])
  shards = (partitioner := partitioning.active()) and partitioner.batch_shards
  if rows % (num_parts * (shards or 1)):
    raise ValueError(
      f'config.gradient_accumulation_steps is {num_parts}: a global batch of'
      f' {rows} rows does not divide into {num_parts} parts over {shards or 1}'
      ' devices that share a batch. Use other parts or a multiple of'
      f' {num_parts * (shards or 1)} rows.'
    )

  def cut(x: jax.Array) -> jax.Array:
    # Part p has the rows p, p + num_parts, ...: equally many of each device.
    x = x.reshape(rows // num_parts, num_parts, *x.shape[1:]).swapaxes(0, 1)
    return partitioning.constrain(x, (None, 'batch') + (None,) * (x.ndim - 2))

  def one(model_state: Any, part: Batch, i: Any) -> tuple[Any, Any]:
    loss, metrics, model_state, grads = _loss_and_grads(
      loss_fn, state.params, model_state, part, jax.random.fold_in(rng, i)
    )
    weight = part[WEIGHTS].sum(dtype=jnp.float32)

    # The mean of a part of weight 0 is NaN. Narrow types cannot hold the weight
    # of many tokens.
    def weighted(x: jax.Array) -> jax.Array:
      if jnp.finfo(x.dtype).bits < 32:
        x = x.astype(jnp.float32)
      scaled = x * weight.astype(x.dtype)
      return jnp.where(weight > 0, scaled, jnp.zeros_like(x))

    loss, grads = jax.tree.map(weighted, (loss, grads))
    return (weight, loss, grads, dict(metrics)), _strongly_typed(model_state)

  def add(carry: Any, part: Any) -> tuple[Any, None]:
    sums, model_state = carry
    more, model_state = one(model_state, *part)
    weight, loss, grads, metrics = jax.tree.map(jnp.add, sums, more)
    return ((weight, loss, place_grads(grads), metrics), model_state), None

  parts = jax.tree.map(cut, batch), jnp.arange(num_parts)
  first = jax.tree.map(lambda x: x[0], parts)
  shapes, _ = jax.eval_shape(one, state.model_state, *first)
  weight, loss, grads, metrics = jax.tree.map(jnp.zeros_like, shapes)
  carry = (
    (weight, loss, place_grads(grads), metrics),
    _strongly_typed(state.model_state),
  )
  carry, _ = jax.lax.scan(add, carry, parts)
  (weight, loss, grads, metrics), model_state = carry
  loss, grads = jax.tree.map(
    lambda x: x / weight.astype(x.dtype), (loss, grads)
  )
  grads = jax.tree.map(lambda x, w: x.astype(w.dtype), grads, state.params)
  return loss, metrics, model_state, grads


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
  params, model_state = _strongly_typed(init_fn(rng))
  return _strongly_typed(
    TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      model_state=model_state,
      opt_state=optimizer.init(
        trained(partitioning.unbox(params), trainable_rules)
      ),
    )
  )


def _strongly_typed(tree: Any) -> Any:
  """Replaces the weak types of Python numbers by strong ones.

  The first step would turn a weak type into a strong one, and the second step
  would then be compiled again.
  """
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)
