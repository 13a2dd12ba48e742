"""Pure functions of the sharded training step, and the sums of an evaluation.

`sharded.ShardedExperiment._pure_step` combines them: gradients, update, and a
guard against values that are not finite.
"""

from collections.abc import Callable, Mapping
import copy
import dataclasses
import functools
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxline import metrics as metrics_lib
from jaxline import train_state
from jaxline.inputs import base as inputs
from jaxline.inputs import feed
from jaxline.metrics import scalars as scalars_lib
from jaxline.parallel import partitioning
from jaxline.parallel import placement

TrainState = train_state.TrainState
BatchDict = inputs.BatchDict
LossOutput = tuple[jax.Array, Mapping[str, Any], Any]
# (params, model_state, batch, rng, is_training) -> (loss, metrics, new state).
LossFn = Callable[[Any, Any, BatchDict, jax.Array, bool], LossOutput]
# (loss, metrics, new model_state, gradients).
Gradients = tuple[jax.Array, metrics_lib.Metrics, Any, Any]

# The entry of a batch with the weight of each row, [B] float32, or of each part
# of a row such as a token, [B, ...].
WEIGHTS = inputs.WEIGHTS

# A step replaces this entry of the model state by the gradient of the loss with
# respect to it. FP8 products keep their scales in it (Flax's convention): the
# optimizer does not change them, and the gradient norm does not include them.
OVERWRITE = '_overwrite_with_gradient'

SKIPPED_STEPS = 'skipped_steps'


def is_empty(batch: BatchDict) -> jax.Array:
  """Returns whether all weights of a batch are 0."""
  return ~batch[WEIGHTS].astype(bool).any()


def gradients(
  loss_fn: LossFn,
  params: Any,
  model_state: Any,
  batch: BatchDict,
  rng: jax.Array,
  empty: jax.Array,
) -> Gradients:
  """Returns the loss, the metrics, the new model state and the gradients.

  In `params`, None stands for a frozen weight. If the batch is `empty`, the
  loss and the gradients are 0, and the metrics are meaningless.
  """
  overwritten: dict[str, Any] = {}
  if isinstance(model_state, Mapping) and OVERWRITE in model_state:
    overwritten = {OVERWRITE: model_state[OVERWRITE]}

  # In an empty batch, a loss that divides by the sum of weights would be 0/0.
  weights, batch = batch[WEIGHTS], copy.copy(batch)
  # `lax.select` traces to a quarter of the equations of `jnp.where`.
  batch[WEIGHTS] = jax.lax.select(empty, jnp.ones_like(weights), weights)

  def compute_loss(params: Any, overwritten: Any) -> tuple[jax.Array, Any]:
    old = {**model_state, **overwritten} if overwritten else model_state
    loss, metrics, new = loss_fn(params, old, batch, rng, True)
    metrics = metrics_lib.complete(metrics, weights)
    loss = jax.lax.select(empty, jnp.zeros_like(loss), loss)
    return loss, (metrics, new)

  (loss, (metrics, new)), (grads, overwritten) = jax.value_and_grad(
    compute_loss, argnums=(0, 1), has_aux=True
  )(params, overwritten)
  if overwritten:
    new = {**new, **overwritten}
  return loss, metrics, new, grads


def checked(after: TrainState, before: TrainState) -> TrainState:
  """Checks that a step keeps the shapes and types; returns its state."""
  after = train_state.strongly_typed(after)
  wrong = train_state.differences(after, before, 'the step returns', 'it got')
  if wrong:
    raise ValueError(
      'A step must not change the shapes and types of its state. loss_fn'
      ' returns the model state, and the optimizer makes the rest.\n'
      + '\n'.join(wrong)
    )
  return after


def guard_step(
  on_nonfinite: str,
  before: TrainState,
  after: TrainState,
  loss: jax.Array,
  grads: Any,
  empty: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Checks whether the loss and the gradients of a step are finite.

  Returns the new state and scalars, one of which is NONFINITE. The state is
  `after`. Only with `on_nonfinite = 'skip'`, a step that is not finite returns
  the state before it with new counts; SKIPPED_STEPS is the total.
  """
  # The square of a float16 overflows from 256 on.
  wide = lambda x: x.astype(jnp.float32) if x.dtype == jnp.float16 else x
  # Gradients of several types need promotion.
  with jax.numpy_dtype_promotion('standard'):
    norm = optax.tree.norm(jax.tree.map(wide, grads))
  # Separate codes take no more equations than an `and` of both conditions.
  select = lambda x, *of: jax.lax.select(x, *(jnp.int32(y) for y in of))
  of_norm = functools.partial(select, jnp.isfinite(norm))
  parts = select(jnp.isfinite(loss), of_norm(0, 3), of_norm(2, 4))
  if on_nonfinite != 'skip':
    return after, {scalars_lib.NONFINITE: select(empty, -1, parts)}
  nonfinite = (parts > 0).astype(jnp.int32)
  in_a_row = nonfinite * (before.skipped[0] + 1)
  in_all = before.skipped[1] + nonfinite
  # XLA fuses a select into the optimizer's pass over the arrays; a branch would
  # be a barrier between the two.
  state = jax.tree.map(
    functools.partial(jax.lax.select, nonfinite > 0),
    dataclasses.replace(before, step=after.step),
    after,
  )
  state = dataclasses.replace(state, skipped=jnp.stack([in_a_row, in_all]))
  flags = {scalars_lib.NONFINITE: in_a_row - empty.astype(jnp.int32)}
  return state, flags | {scalars_lib.PARTS: parts, SKIPPED_STEPS: in_all}


def warn_of_another_shape(before: BatchDict | None, batch: BatchDict) -> None:
  """Warns if the shapes of a batch differ from those of the previous trace."""
  differ = functools.partial(train_state.differences, batch, before)
  if before and (lines := differ('now', 'before', 'batch')):
    text = 'train_input gave a batch of a new shape or type, so the step is'
    text += ' compiled again. Pad the batches to one shape, or to a few.'
    logging.warning('%s\n%s', text, '\n'.join(lines))


def check_rows(outputs: Any, num_rows: int) -> Any:
  """Checks that each array of `eval_outputs` has the batch's number of rows."""
  shapes = {np.shape(x) for x in jax.tree.leaves(outputs)}
  if any(shape[:1] != (num_rows,) for shape in shapes):
    raise ValueError(
      f'eval_outputs returned arrays of shapes {sorted(shapes)}; expected'
      f' {num_rows} rows in each, like the batch.'
    )
  return outputs


def set_metrics(
  compiled_eval_step: Callable[..., Any],
  state: Any,
  batches: feed.GlobalBatches,
  rng: jax.Array,
  set_number: Any,
  rows_of: Callable[[Any, int], Any],
  reduce_outputs: Callable[[Any], Mapping[str, Any]],
  checks: bool,
) -> dict[str, Any]:
  """Returns the metrics of an evaluation set after one pass over its batches.

  They are the means, summed in float64 on the host, and the metrics that
  `reduce_outputs` computes from the outputs of `eval_outputs`, if any. An
  `EvalFeed` provides `batches` and `rows_of`. With `checks`, the scalars of the
  first batch are checked to be means weighted by its `weights`.
  """
  sums: Any = None
  last: Any = None  # The results of the batch in flight, and its row count.
  rows: list[Any] = []

  def fetch() -> Any:
    (metrics, outputs), num_given = last
    fetched = jax.tree.map(np.float64, jax.device_get(metrics))
    if jax.tree.leaves(outputs):
      rows.append(rows_of(outputs, num_given))
    return fetched if sums is None else metrics_lib.add(sums, fetched)

  for i, (batch, num_given, halves) in enumerate(batches):
    # Wait for the previous batch while this one is transferred. Otherwise
    # queued batches would fill the devices' memory.
    sums, last = fetch() if i else None, None
    place = np.array([set_number, i], np.uint32)
    last = compiled_eval_step(state, batch, rng, place), num_given
    if checks and not i:
      steps = (compiled_eval_step(state, x, rng, place)[0] for x in halves())
      metrics_lib.check_scalars(last[0][0], steps)
  sums = fetch()
  # A metric without any weight is NaN, since a 0 would be the best loss.
  means = metrics_lib.compute(sums).items()
  found: dict[str, Any] = {
    k: float(x) if sums[k].weight else np.nan for k, x in means
  }
  if rows:
    outputs = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    reduced = reduce_outputs(outputs)
    if not isinstance(reduced, Mapping):
      raise TypeError(
        f'reduce_outputs returned a {type(reduced).__name__}; expected a dict'
        ' of numbers and images.'
      )
    if taken := sorted(found.keys() & reduced.keys()):
      raise ValueError(f'reduce_outputs and loss_fn both return {taken}.')
    for name, x in reduced.items():
      if np.ndim(x) == 1 or not jax.tree_util.all_leaves([x]):
        raise TypeError(
          f'reduce_outputs returned {name!r} = {x!r}; expected a number, or an'
          ' image of 2 dimensions or more. Give each number a name.'
        )
    found |= reduced
  return found


# Gradient accumulation.


def accumulate_gradients(
  loss_fn: LossFn,
  params: Any,
  model_state: Any,
  batch: BatchDict,
  rng: jax.Array,
  num_microbatches: int,
  place_grads: Callable[[Any], Any],
) -> Gradients:
  """Computes `gradients` in microbatches.

  It averages the gradients of microbatches by the sums of their `weights`. This
  gives the gradient of the full batch if the loss is a mean weighted by
  `weights`. If all weights are 0, the loss, gradients and metrics are 0.

  `loss_fn` gets `rng` itself if there is one microbatch, else `fold_in(rng, i)`
  for microbatch i. `place_grads` constrains the sharding of the gradients.
  """
  if num_microbatches == 1:
    empty = is_empty(batch)
    loss, metrics, model_state, grads = gradients(
      loss_fn, params, model_state, batch, rng, empty
    )
    metrics = jax.tree.map(
      lambda x: jax.lax.select(empty, jnp.zeros_like(x), x), metrics
    )
    return loss, metrics, model_state, place_grads(grads)
  rows = len(batch[WEIGHTS])
  if partitioner := partitioning.active():
    placement.check_rows(rows, partitioner, num_microbatches)

  def split(x: jax.Array) -> jax.Array:
    # Microbatch i has the rows i, i + num_microbatches, ..., so each device
    # contributes the same number of rows.
    size = rows // num_microbatches
    x = x.reshape(size, num_microbatches, *x.shape[1:]).swapaxes(0, 1)
    return partitioning.constrain(x, (None, 'batch') + (None,) * (x.ndim - 2))

  def compute(
    model_state: Any, microbatch: BatchDict, i: Any
  ) -> tuple[Any, Any]:
    """Returns sums over a microbatch, and the next model state."""
    key = jax.random.fold_in(rng, i)
    weight = microbatch[WEIGHTS].sum(dtype=jnp.float32)
    empty = is_empty(microbatch)
    loss, metrics, model_state, grads = gradients(
      loss_fn, params, model_state, microbatch, key, empty
    )

    def weighted(x: jax.Array) -> jax.Array:
      # Narrow types cannot hold the weight of many tokens.
      if jnp.finfo(x.dtype).bits < 32:
        x = x.astype(jnp.float32)
      scaled = x * weight.astype(x.dtype)
      # The `where` keeps the bits; without it XLA fuses product and sum.
      return jnp.where(weight != 0, scaled, jnp.zeros_like(x))

    loss, grads = jax.tree.map(weighted, (loss, grads))
    model_state = train_state.strongly_typed(model_state)
    return (weight, loss, grads, dict(metrics)), model_state

  def accumulate(carry: Any, microbatch: Any) -> tuple[Any, None]:
    sums, model_state = carry
    more, model_state = compute(model_state, *microbatch)
    weight, loss, grads, metrics = jax.tree.map(jnp.add, sums, more)
    # A select before the sum would change its bits.
    keep = functools.partial(jnp.where, more[0] == 0)
    metrics = jax.tree.map(keep, sums[-1], metrics)
    return ((weight, loss, place_grads(grads), metrics), model_state), None

  microbatches = jax.tree.map(split, batch), jnp.arange(num_microbatches)
  first = jax.tree.map(lambda x: x[0], microbatches)
  shapes, _ = jax.eval_shape(compute, model_state, *first)
  weight, loss, grads, metrics = jax.tree.map(jnp.zeros_like, shapes)
  sums = weight, loss, place_grads(grads), metrics
  carry = sums, train_state.strongly_typed(model_state)
  (sums, model_state), _ = jax.lax.scan(accumulate, carry, microbatches)
  weight, loss, grads, metrics = sums
  weight = jnp.where(weight == 0, jnp.inf, weight)
  loss, grads = jax.tree.map(
    lambda x: x / weight.astype(x.dtype), (loss, grads)
  )
  grads = jax.tree.map(lambda x, w: x.astype(w.dtype), grads, params)
  return loss, metrics, model_state, grads
