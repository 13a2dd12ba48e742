"""Pipeline parallelism: microbatches shift through stages of layers.

The rows of a batch are split into microbatches. A buffer with a leading
`stages` axis holds the input of each stage; after each iteration it shifts by
one stage, which the compiler turns into a permutation between neighbours. All
stages are one `vmap`, and all iterations one `scan`: one program, compiled once
for any number of either, and differentiated like any other.

With repeats, the last stage sends its output to the first, and each microbatch
passes through all stages several times, each time through other, fewer layers.
The stages are idle for less time at the ends of the batch, and there are more
transfers.

After GPipe (Huang et al., 2019), as GSPMD runs it (Xu et al., 2021, section
3.3), and the circular schedule of Praxis.

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
  """A policy that recomputes only operations that move or convert values.

  So it keeps no weights. Otherwise each iteration would keep a copy of those of
  its layers, in the type that the layer computes in.
  """
  return prim.name not in _COPIES


def check_sizes(
  num_layers: int, num_stages: int, num_microbatches: int, num_repeats: int
) -> None:
  """Raises ValueError for sizes that make no pipeline."""
  parts = num_stages * num_repeats
  if num_layers % parts:
    raise ValueError(
      f'{num_layers} layers do not divide over {num_stages} stages x'
      f' {num_repeats} repeats; expected a multiple of {parts} layers.'
    )
  if num_repeats > 1 and num_microbatches < num_stages:
    raise ValueError(
      f'{num_microbatches} microbatches for {num_stages} stages and'
      f' {num_repeats} repeats: the first comes back from the last stage before'
      ' the first stage has seen them all. Expected at least'
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

  The result is that of running the layers one after the other. In repeat r,
  stage s has the layers r S K + s K to r S K + s K + K - 1. With one repeat,
  layers that are stored split over the stages are on the devices that use them.
  With more, each step moves them: they are stored in the order of the layers.

  A stage without a microbatch, at the start and the end of the batch, computes
  on the input of the first one. The result is unused and has no gradient.

  Args:
    layer_fn: `(weights of one layer, x) -> x`, where `x` is as `inputs` with
      B / M rows; rows must not depend on each other. It returns values that it
      does not change, such as segment ids, as it got them.
    layers: weights [N, ...] in the order of the layers; each an array, or a
      `partitioning.Logical`; without it the array is not split within a stage.
    inputs: a pytree of arrays [B, ...].
    axes: for each array of `inputs` a tuple with the logical names of its axes
      (`partitioning.AXIS_NAMES`), the first of them 'batch'.
    num_stages: S.
    num_microbatches: M. Microbatch m is the rows m, m + M, ..., so that every
      device over which the batch is split has a part of it.
    num_repeats: R.
    unroll: whether a stage's layers are unrolled, or one loop.
    policy: which values of a layer are kept for the backward pass, one of
      `jax.checkpoint_policies`.

  Returns:
    As `inputs`, in the same order of rows.
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
      f" mesh's {mesh_axes}. Expected {devices} stages,"
      ' or a mesh with as many of them as there are stages.'
    )
  per_stage = num_layers // (num_stages * num_repeats)

  def place(tree: X, *leading: str | None) -> X:
    """Constrains arrays whose first axes are `leading`, then `axes`."""
    return jax.tree.map(
      lambda x, names: partitioning.constrain(x, (*leading, *names)), tree, axes
    )

  def group_by_stage(w: Any) -> jax.Array:
    """Returns [S, R K, ...]: the weights of each stage, in its order."""
    names: tuple[str | None, ...] = ()
    if partitioning.is_logical(w):
      w, names = w.value, w.axes[1:]
    shape = w.shape[1:]
    w = w.reshape(num_repeats, num_stages, per_stage, *shape)
    w = jnp.swapaxes(w, 0, 1).reshape(num_stages, -1, *shape)
    names = ('stages', None, *(names or (None,) * len(shape)))
    return partitioning.constrain(w, names)

  def run_stage(weights: Any, x: X, start: jax.Array) -> X:
    """Runs a stage's layers from `start` on; `weights` are [R K, ...]."""

    # Weights are looked up where the backward pass does it again: else it would
    # keep those of each iteration.
    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def layer(x: X, i: jax.Array) -> tuple[X, None]:
      return layer_fn(_get(weights, start + i, axis=0), x), None

    unroll_by = per_stage if unroll else 1
    return jax.lax.scan(layer, x, jnp.arange(per_stage), unroll=unroll_by)[0]

  # Computed again, the masks are a number for each stage; kept for the backward
  # pass, they would be one for each entry.
  @_again
  def enter(moved: X, kept: X, time: jax.Array) -> X:
    """Returns [S, B / M, ...]: the inputs of the stages in this iteration."""
    work_S = time - stage_S
    x = _select_per_stage(
      stage_S == 0, _get(kept, time % num_microbatches), moved
    )
    is_busy = (work_S >= 0) & (work_S < num_microbatches * num_repeats)
    return _select_per_stage(is_busy, x, first)

  @_again
  def leave(moved: X, kept: X, time: jax.Array) -> X:
    """Returns `kept` with the output of the last stage for the first."""
    slot = (time - (num_stages - 1)) % num_microbatches
    has_come = jnp.broadcast_to(time >= num_stages - 1, stage_S.shape)
    put = functools.partial(
      jax.lax.dynamic_update_index_in_dim, index=slot, axis=1
    )
    return jax.tree.map(
      put, kept, _select_per_stage(has_come, moved, _get(kept, slot))
    )

  def iteration(carry: tuple[X, X], time: jax.Array) -> tuple[Any, None]:
    # `moved` [S, B / M, ...] is the output of the previous stage. `kept`
    # [S, M, B / M, ...] is used by the first stage only: the inputs, replaced
    # by the outputs later. Every stage has one, since an operation of all
    # stages is local, and to send a value to one stage involves all of them.
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
    # Without it, a `constrain` in a layer would make the stages' axis whole.
    spmd_axis_name=mesh_axes or None,
  )
  # Rows stay where they are: their number in a microbatch varies slower than
  # the microbatch's own.
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
  # In S - 1 of the iterations a stage is idle (the bubble): on average half of
  # them at the start of the batch, half at its end.
  iterations = num_microbatches * num_repeats + num_stages - 1
  carry = place(moved, 'stages'), place(kept, 'stages', None)
  with counting.partly_used(num_microbatches * num_repeats, iterations):
    (_, kept), _ = jax.lax.scan(iteration, carry, jnp.arange(iterations))
  rows = place(jax.tree.map(lambda x: x[0], kept), None)
  return place(
    jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(batch, *x.shape[2:]), rows)
  )


# Makes the backward pass compute all of a function again.
_again = functools.partial(
  jax.checkpoint,
  policy=jax.checkpoint_policies.nothing_saveable,
  prevent_cse=False,
)


def _select_per_stage(condition_S: jax.Array, a: X, b: X) -> X:
  """Chooses for each stage; arrays [S, ...], of `b` or [1, ...]."""

  def select_leaf(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(condition_S.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

  return jax.tree.map(select_leaf, a, b)


def _get(tree: X, index: jax.Array, axis: int = 1) -> X:
  """Returns the entry of a microbatch: [S, ...] of [S, M, ...]."""
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False), tree
  )
