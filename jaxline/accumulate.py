"""Gradient accumulation: computes the gradients of a batch in microbatches."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxline import partitioning
from jaxline import placement
from jaxline import train_state
from jaxline import train_step


def gradients(
  loss_fn: train_step.LossFn,
  params: Any,
  model_state: Any,
  batch: train_step.Batch,
  rng: jax.Array,
  num_microbatches: int,
  place_grads: Callable[[Any], Any],
) -> train_step.Gradients:
  """Returns what `train_step.gradients` does, computed in microbatches.

  The microbatches' gradients are averaged by their `weights`, which gives the
  gradient of the whole batch if the loss is the mean by these weights. What has
  weight 0 in all has the loss, the gradients and the metrics 0.

  `loss_fn` gets `rng` itself for a whole batch, and `fold_in(rng, i)` for
  microbatch i. `place_grads` constrains the sharding of the gradients.
  """
  if num_microbatches == 1:
    empty = train_step.is_empty(batch)
    loss, metrics, model_state, grads = train_step.gradients(
      loss_fn, params, model_state, batch, rng, empty
    )
    metrics = jax.tree.map(
      lambda x: jax.lax.select(empty, jnp.zeros_like(x), x), metrics
    )
    return loss, metrics, model_state, place_grads(grads)
  rows = len(batch[train_step.WEIGHTS])
  if partitioner := partitioning.active():
    placement.check_rows(rows, partitioner, num_microbatches)

  def split(x: jax.Array) -> jax.Array:
    # Microbatch i has the rows i, i + num_microbatches, ...: equally many of
    # each device.
    size = rows // num_microbatches
    x = x.reshape(size, num_microbatches, *x.shape[1:]).swapaxes(0, 1)
    return partitioning.constrain(x, (None, 'batch') + (None,) * (x.ndim - 2))

  def compute(
    model_state: Any, microbatch: train_step.Batch, i: Any
  ) -> tuple[Any, Any]:
    """Returns sums over a microbatch, and the next model state."""
    key = jax.random.fold_in(rng, i)
    weight = microbatch[train_step.WEIGHTS].sum(dtype=jnp.float32)
    empty = train_step.is_empty(microbatch)
    loss, metrics, model_state, grads = train_step.gradients(
      loss_fn, params, model_state, microbatch, key, empty
    )

    def weighted(x: jax.Array) -> jax.Array:
      # Narrow types cannot hold the weight of many tokens.
      if jnp.finfo(x.dtype).bits < 32:
        x = x.astype(jnp.float32)
      scaled = x * weight.astype(x.dtype)
      # It keeps the bits: else the product is fused with the sum.
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
