"""Pipeline parallelism: microbatches shift through stages of layers.

The rows of a batch are split into microbatches. A buffer with a leading
`stages` axis holds the input of each stage. After each iteration it shifts by
one stage, which the compiler turns into a permutation between neighbors. All
stages are one `vmap` and all iterations one `scan`, so there is one program,
which is compiled once and differentiated like any other.

With repeats, the last stage sends its output to the first. Each microbatch
passes through all stages several times, each time through different and fewer
layers. This shortens the idle time at the ends of the batch and adds transfers.

The design follows GPipe (Huang et al., 2019) in the form of GSPMD (Xu et al.,
2021, section 3.3), and the circular schedule of Praxis.

Shapes: B batch, M microbatches, S stages, R repeats, N layers, K = N / (S R)
layers that a stage runs in one repeat.
"""

from collections.abc import Callable
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxline.base import counting
from jaxline.parallel import partitioning

X = TypeVar('X')

_COPIES = {
  'broadcast_in_dim', 'convert_element_type', 'copy', 'dynamic_slice', 'gather',
  'name', 'reshape', 'sharding_constraint', 'slice', 'squeeze', 'transpose',
}  # fmt: skip


def save_all_but_copies(prim: Any, *unused_args: Any, **unused: Any) -> bool:
  """A checkpoint policy that recomputes operations that move or convert values.

  It saves no weights. Otherwise each iteration would save a copy of its layers'
  weights, in the dtype in which the layers compute.
  """
  return prim.name not in _COPIES


def check_sizes(
  num_layers: int, num_stages: int, num_microbatches: int, num_repeats: int
) -> None:
  """Raises ValueError for invalid sizes of a pipeline."""
  parts = num_stages * num_repeats
  if num_layers % parts:
    raise ValueError(
      f'{num_layers} layers do not divide over {num_stages} stages x'
      f' {num_repeats} repeats; expected a multiple of {parts} layers.'
    )
  if num_repeats > 1 and num_microbatches < num_stages:
    raise ValueError(
      f'{num_microbatches} microbatches for {num_stages} stages and'
      f' {num_repeats} repeats: the first stage would need the first microbatch'
      ' again before the last stage has returned it. Expected at least'
      f' {num_stages} microbatches, or 1 repeat.'
    )


def pipeline(
  layer_fn: Callable[[Any, X], X],
  layers: Any,
  inputs: X,
  *,
  axes: Any,
  num_stages: int,
  num_microbatches: int,
  num_repeats: int = 1,
  unroll: bool = False,
  policy: Callable[..., Any] = save_all_but_copies,
) -> X:
  """Runs rows through all layers, on several stages at the same time.

  The result equals running the layers one after the other. In repeat r, stage s
  has layers r S K + s K to r S K + s K + K - 1. Layers are stored in their
  order. If they are split over the stages and there is one repeat, they are on
  the devices that use them. With more repeats, each step moves them.

  At the start and the end of the batch, a stage without a microbatch computes
  on the input of the first one. The result is unused and has no gradient.

  Args:
    layer_fn: `(weights of one layer, x) -> x`, where `x` is like `inputs` with
      B / M rows. Rows must be independent. Values that it does not change, such
      as segment ids, are returned as they are.
    layers: Weights [N, ...] in the order of the layers, each an array or a
      `partitioning.Logical`. A plain array is not split within a stage.
    inputs: Pytree of arrays [B, ...].
    axes: For each array of `inputs`, a tuple with the logical names of its axes
      (`partitioning.AXIS_NAMES`), the first of which is 'batch'.
    num_stages: S.
    num_microbatches: M. Microbatch m has the rows m, m + M, ..., so every
      device over which the batch is split has a part of it.
    num_repeats: R.
    unroll: Whether to unroll a stage's layers instead of running a loop.
    policy: Selects the values of a layer to save for the backward pass; one of
      `jax.checkpoint_policies`.

  Returns:
    A tree like `inputs`, with the same order of rows.
  """
  num_layers = jax.tree.leaves(layers)[0].shape[0]
  batch = jax.tree.leaves(inputs)[0].shape[0]
  check_sizes(num_layers, num_stages, num_microbatches, num_repeats)
  if batch % num_microbatches:
    raise ValueError(
      f'A batch of {batch} rows does not divide into {num_microbatches}'
      f' microbatches. Expected a multiple of {num_microbatches} rows.'
    )
  devices = 1
  mesh_axes: tuple[str, ...] = ()
  if partitioner := partitioning.active():
    devices, mesh_axes = partitioner.size('stages'), partitioner.rules.stages
  if num_stages % devices:
    raise ValueError(
      f'{num_stages} stages do not divide over the {devices} devices along the'
      f' mesh axes {mesh_axes}. Expected {devices} stages, or one device along'
      ' these axes per stage.'
    )
  per_stage = num_layers // (num_stages * num_repeats)

  def place(tree: X, *leading: str | None) -> X:
    """Constrains arrays whose axes are `leading`, followed by `axes`."""
    return jax.tree.map(
      lambda x, names: partitioning.constrain(x, (*leading, *names)), tree, axes
    )

  def group_by_stage(w: Any) -> jax.Array:
    """Returns the weights of each stage, in its order: [S, R K, ...]."""
    names: tuple[str | None, ...] = ()
    if partitioning.is_logical(w):
      w, names = w.value, w.axes[1:]
    shape = w.shape[1:]
    w = w.reshape(num_repeats, num_stages, per_stage, *shape)
    w = jnp.swapaxes(w, 0, 1).reshape(num_stages, -1, *shape)
    names = ('stages', None, *(names or (None,) * len(shape)))
    return partitioning.constrain(w, names)

  def run_stage(weights: Any, x: X, start: jax.Array) -> X:
    """Runs a stage's K layers from `start`; `weights` are [R K, ...]."""

    # Look weights up inside `jax.checkpoint`, so that the backward pass looks
    # them up again. Otherwise each iteration would save its weights.
    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def layer(x: X, i: jax.Array) -> tuple[X, None]:
      return layer_fn(_get(weights, start + i, axis=0), x), None

    unroll_by = per_stage if unroll else 1
    return jax.lax.scan(layer, x, jnp.arange(per_stage), unroll=unroll_by)[0]

  # Recomputed masks are one number per stage. Masks saved for the backward pass
  # would be one number per entry.
  @_rematerialize
  def enter(moved: X, kept: X, time: jax.Array) -> X:
    """Returns the inputs of the stages in this iteration, [S, B / M, ...]."""
    work_S = time - stage_S
    x = _select_per_stage(
      stage_S == 0, _get(kept, time % num_microbatches), moved
    )
    is_busy = (work_S >= 0) & (work_S < num_microbatches * num_repeats)
    return _select_per_stage(is_busy, x, first)

  @_rematerialize
  def leave(moved: X, kept: X, time: jax.Array) -> X:
    """Stores the last stage's output, for the first stage, in `kept`."""
    slot = (time - (num_stages - 1)) % num_microbatches
    has_come = jnp.broadcast_to(time >= num_stages - 1, stage_S.shape)
    put = functools.partial(
      jax.lax.dynamic_update_index_in_dim, index=slot, axis=1
    )
    return jax.tree.map(
      put, kept, _select_per_stage(has_come, moved, _get(kept, slot))
    )

  def iteration(carry: tuple[X, X], time: jax.Array) -> tuple[Any, None]:
    # `moved` [S, B / M, ...] is the output of the previous stage. Only the
    # first stage uses `kept` [S, M, B / M, ...]: the inputs, which outputs
    # replace later. But every stage has a copy: an operation that all stages do
    # is local, whereas a value for one stage would have to be sent.
    moved, kept = carry
    x = place(enter(moved, kept, time), 'stages')
    start = jnp.zeros((), jnp.int32)
    if num_repeats > 1:
      repeat = (time - stage_S) // num_microbatches
      start = jnp.clip(repeat, 0, num_repeats - 1) * per_stage
    out = stages(layers, x, start)
    moved = place(jax.tree.map(lambda y: jnp.roll(y, 1, axis=0), out), 'stages')
    return (moved, place(leave(moved, kept, time), 'stages', None)), None

  layers = jax.tree.map(group_by_stage, layers, is_leaf=partitioning.is_logical)
  stages = jax.vmap(
    run_stage,
    in_axes=(0, 0, None if num_repeats == 1 else 0),
    # This keeps a `constrain` in a layer from gathering the stages' axis.
    spmd_axis_name=mesh_axes or None,
  )
  # The microbatch's number varies fastest, so rows stay on their devices.
  rows = jax.tree.map(
    lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1),
    inputs,
  )
  rows = place(rows, None)
  first = jax.tree.map(lambda x: jax.lax.stop_gradient(x[:1]), rows)
  stage_S = jnp.arange(num_stages)
  kept = jax.tree.map(
    lambda x: jnp.broadcast_to(x[None], (num_stages, *x.shape)), rows
  )
  moved = jax.tree.map(lambda x: jnp.zeros_like(x[:, 0]), kept)
  # In S - 1 iterations a stage is idle (the bubble), on average half of them at
  # the start of the batch and half at its end.
  iterations = num_microbatches * num_repeats + num_stages - 1
  carry = place(moved, 'stages'), place(kept, 'stages', None)
  with counting.partly_used(num_microbatches * num_repeats, iterations):
    (_, kept), _ = jax.lax.scan(iteration, carry, jnp.arange(iterations))
  rows = place(jax.tree.map(lambda x: x[0], kept), None)
  return place(
    jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(batch, *x.shape[2:]), rows)
  )


# Makes the backward pass recompute all values of a function.
_rematerialize = functools.partial(
  jax.checkpoint,
  policy=jax.checkpoint_policies.nothing_saveable,
  prevent_cse=False,
)


def _select_per_stage(condition_S: jax.Array, a: X, b: X) -> X:
  """Selects `a` or `b` per stage; arrays [S, ...], in `b` maybe [1, ...]."""

  def select_leaf(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(condition_S.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

  return jax.tree.map(select_leaf, a, b)


def _get(tree: X, index: jax.Array, axis: int = 1) -> X:
  """Selects a microbatch: [S, M, ...] becomes [S, ...]."""
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False), tree
  )
