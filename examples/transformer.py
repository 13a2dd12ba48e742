"""Pure functions that transformers are built from.

They compute products, normalization, positions, attention and the loss, and run
layers as a pipeline. They create no weights: `examples/lm` and `examples/pax`
each create their own weights and call these functions.

Shapes: B batch, L length (queries), M keys, D embed, F mlp, H heads, G heads of
keys and values (each for H / G heads of queries), K head dim, V vocab, S parts
fused into one product, N layers.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from jaxline import errors
from jaxline.parallel import partitioning
from jaxline.parallel import pipeline

# Documents of the queries [B, L] and of the keys [B, M]; see `attend`.
Segments = tuple[jax.Array, jax.Array] | None
# Drops entries of an array [B, ...] and scales up the rest; None drops nothing.
Dropout = Callable[[jax.Array], jax.Array] | None
# The output layer: the table [V, D] and a bias [V].
Head = tuple[jax.Array, jax.Array | None]

# Logical axes of activations: between layers, [B, L, D]; of queries, keys and
# values, [B, L, H, K]; between the two products of a feed-forward part,
# [B, L, F].
BETWEEN_BLOCKS = ('batch', 'length', 'activation_embed')
HEADS = ('batch', None, 'heads', 'kv')
HIDDEN = ('batch', None, 'mlp')

ATTENTIONS = ('einsum', 'flash')
# Block sizes of flash attention, in tokens. No block is longer than the first,
# which is MaxText's block size on TPUs. Sequences are padded to a multiple of
# the second, the width of a TPU's vectors.
_MAX_BLOCK = 512
_MIN_BLOCK = 128

# The function and the number of input parts S of each activation. With two
# parts, the function is applied to the first, which then gates the second.
_ACTIVATIONS: dict[str, tuple[Callable[[jax.Array], jax.Array], int]] = {
  'gelu': (jax.nn.gelu, 1),
  'swiglu': (jax.nn.silu, 2),
  'geglu': (jax.nn.gelu, 2),
}
ACTIVATIONS = tuple(_ACTIVATIONS)

# The checkpoint name of products with weights. The policies select them by
# name, because a pipeline's `vmap` hides which products have a weight.
DOT = 'dot'
_REMAT_POLICIES = {
  'nothing': None,
  'dots': jax.checkpoint_policies.save_only_these_names(DOT),
  'full': jax.checkpoint_policies.nothing_saveable,
  'offload': jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[DOT],
    offload_src='device',
    offload_dst='pinned_host',
  ),
}
REMATS = tuple(_REMAT_POLICIES)

# Initial values of at most this many numbers are drawn as flat arrays.
_MAX_FLAT = 2**22


# ---- Products.


def einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Computes `jnp.einsum`, accumulating and returning float32."""
  if a.dtype == jnp.float32:
    return jnp.einsum(spec, a, b)
  return _low_precision_einsum(spec, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _low_precision_einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _low_precision_forward(spec: str, a: jax.Array, b: jax.Array) -> Any:
  return _low_precision_einsum(spec, a, b), (a, b)


def _low_precision_backward(spec: str, operands: Any, grad: jax.Array) -> Any:
  # JAX's own rule would multiply the float32 gradient by a low-precision
  # operand. Hardware can do that only by widening both.
  _, vjp = jax.vjp(functools.partial(jnp.einsum, spec), *operands)
  return vjp(grad.astype(operands[0].dtype))


_low_precision_einsum.defvjp(_low_precision_forward, _low_precision_backward)


def dot(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies an activation by a float32 weight, in the type of `x`.

  The product is named, so that `remat_policy` can keep it.
  """
  if spec == 'BLD,DF->BLF':
    # Treat the weight as a fused one with a single part. The TPU compiler then
    # gathers less over `mdl` and reads less memory.
    return dot('BLD,DSF->BLSF', x, w[:, None])[:, :, 0]
  product = _narrow_first_einsum if _is_tuned_for_cpu() else jnp.einsum
  return checkpoint_name(product(spec, x, w.astype(x.dtype)), DOT)


def _is_tuned_for_cpu() -> bool:
  """Whether to use the gradients below; `jax.jvp` does not work with them.

  In a `shard_map` they would have to sum over the axes of the mesh over which
  only the other operand varies. JAX's own gradients do.
  """
  is_manual = jax.sharding.get_abstract_mesh().manual_axes
  return platform() == 'cpu' and not is_manual


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow_first_einsum(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
  return jnp.einsum(spec, x, w)


def _narrow_first_forward(spec: str, x: jax.Array, w: jax.Array) -> Any:
  return _narrow_first_einsum(spec, x, w), (x, w)


def _narrow_first_backward(spec: str, operands: Any, grad: jax.Array) -> Any:
  x, w = operands
  (grad_x,) = jax.linear_transpose(lambda x: jnp.einsum(spec, x, w), x)(grad)
  # A CPU transposes the first operand of a product whose sum is over rows. JAX
  # takes the gradient. If that is wide, XLA computes it twice: as it is, and
  # again in transposed order, from entries that are far apart in memory.
  if x.size < grad.size:
    # A sum over `...` needs names for its axes.
    named = spec.replace('...', 'abcdefgh'[: x.ndim - 1]).replace('->', ',')
    of_x, of_w, of_out = named.split(',')
    return grad_x, jnp.einsum(f'{of_x},{of_out}->{of_w}', x, grad)
  # `einsum` would take the wider one first, to get the order of the axes.
  (grad_w,) = jax.linear_transpose(lambda w: jnp.einsum(spec, x, w), w)(grad)
  return grad_x, grad_w


_narrow_first_einsum.defvjp(_narrow_first_forward, _narrow_first_backward)


def rows_of(table: jax.Array, ids: jax.Array) -> jax.Array:
  """Returns the rows of a table [V, D] that have the indices `ids`."""
  return _late_rows_of(table, ids) if _is_tuned_for_cpu() else table[ids]


@jax.custom_vjp
def _late_rows_of(table: jax.Array, ids: jax.Array) -> jax.Array:
  return table[ids]


def _late_rows_forward(table: jax.Array, ids: jax.Array) -> Any:
  return table[ids], (table, ids)


def _late_rows_backward(kept: Any, grad: jax.Array) -> Any:
  # The gradient starts as a table of zeros. XLA's scheduler for CPUs would make
  # this table at the beginning of the step. So let `zero` depend on `grad`: no
  # number exceeds infinity, but XLA does not know this.
  table, ids = kept
  zero = (grad[(slice(1),) * grad.ndim].sum() > jnp.inf).astype(table.dtype)
  return jnp.full(table.shape, zero).at[ids].add(grad), None


_late_rows_of.defvjp(_late_rows_forward, _late_rows_backward)


def parts(out_BLS: jax.Array) -> list[jax.Array]:
  """Splits a fused product [B, L, S, ...] into its S parts."""
  # Do not index: JAX would pad each part's gradient with zeros and add them up.
  return list(jnp.unstack(out_BLS, axis=2))


def draw(
  make: Callable[..., jax.Array],
  key: jax.Array,
  shape: tuple[int, ...],
  dtype: Any,
) -> jax.Array:
  """Returns the initial value `make(key, shape, dtype)`, but compiles faster.

  Args:
    make: an initializer of `jax.nn.initializers` or a sampler of `jax.random`.
      An entry must depend only on its place in the flattened array, not on the
      shape.
    key: the random key.
    shape: the shape of the value.
    dtype: the type of the value.
  """
  # Each new shape costs XLA's CPU compiler seconds. Large values keep their
  # shape, because they may be sharded.
  drawn = (size,) if (size := math.prod(shape)) <= _MAX_FLAT else shape
  return make(key, drawn, dtype).reshape(shape)


def remat_policy(name: str) -> Any:
  """Returns the policy that selects what a layer keeps for its backward pass.

  Args:
    name: what the backward pass recomputes, one of `REMATS`: 'nothing', 'dots'
      (everything except products with weights), 'full' (each whole layer), or
      'offload' (as 'dots', but the products are kept in host memory).

  Returns:
    One of `jax.checkpoint_policies`, or None for 'nothing'. With None, do not
    call `jax.checkpoint`: it would treat None as 'full'.

  Raises:
    ValueError: the name is unknown, or the devices cannot offload to the host.
  """
  if name not in _REMAT_POLICIES:
    raise ValueError(f'remat must be one of {REMATS}; got {name!r}.')
  partitioner = partitioning.active()
  if name == 'offload' and (partitioner is None or partitioner.is_here):
    device = jax.devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if 'pinned_host' not in kinds:
      works = [choice for choice in REMATS if choice != name]
      raise ValueError(
        "remat='offload' needs memory of kind 'pinned_host'; this"
        f' {device.platform} device ({device.device_kind}) has {kinds}. Choose'
        f' one of {works}.'
      )
  return _REMAT_POLICIES[name]


# ---- Element by element.


def cap(x: jax.Array, limit: float) -> jax.Array:
  """Limits `x` smoothly to +-limit (Gemma Team, 2024); 0 means no limit."""
  return limit * jnp.tanh(x / limit) if limit else x


_cap = cap  # For functions with a parameter `cap`.


def query_scale(raw_K: jax.Array) -> jax.Array:
  """Returns a factor for each dimension of a head's queries, as in Praxis.

  The factor is a softplus, so it is positive. It is 1 where `raw_K` is 0.
  """
  return jax.nn.softplus(raw_K) / math.log(2)


def normalize(
  x: jax.Array,
  *,
  scale: jax.Array,
  bias: jax.Array | None = None,
  epsilon: float,
  centered: bool,
) -> jax.Array:
  """Normalizes the last axis.

  This is RMS normalization (Zhang and Sennrich, 2019) or, with `centered`,
  layer normalization (Ba et al., 2016).

  Args:
    x: [..., D].
    scale: factors [D]. A caller that stores them less 1 adds the 1 itself.
    bias: [D], added to the result; None adds nothing.
    epsilon: added to the mean square.
    centered: whether to subtract the mean first.

  Returns:
    An array like `x`. The computation is in float32.
  """
  leading = range(x.ndim - 1)
  y = x.astype(jnp.float32)
  if centered:
    y -= jnp.mean(y, axis=-1, keepdims=True)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
  y *= jnp.expand_dims(scale.astype(jnp.float32), leading)
  if bias is not None:
    y += jnp.expand_dims(bias.astype(jnp.float32), leading)
  return y.astype(x.dtype)


def num_parts(name: str) -> int:
  """Returns S, the number of parts that an activation takes.

  Args:
    name: one of `ACTIVATIONS`.
  """
  return _ACTIVATIONS[name][1]


def activate(name: str, hidden_BLSF: jax.Array) -> jax.Array:
  """Applies the activation between a feed-forward part's two products.

  Args:
    name: one of `ACTIVATIONS`: 'gelu' (in its tanh form; Hendrycks and Gimpel,
      2016), or 'swiglu' and 'geglu' (SiLU or GELU of the first part gates the
      second; Shazeer, 2020).
    hidden_BLSF: the first product; S is `num_parts(name)`.

  Returns:
    [B, L, F].
  """
  function, num = _ACTIVATIONS[name]
  hidden = parts(hidden_BLSF)
  out_BLF = function(hidden[0])
  return out_BLF if num == 1 else out_BLF * hidden[1]


def drop(
  x: jax.Array,
  key: jax.Array | None,
  rate: float,
  rows_B: jax.Array,
  place: int | jax.Array,
) -> jax.Array:
  """Drops out entries and scales up the remaining ones.

  Args:
    x: [B, ...].
    key: the random key of this step; None drops nothing.
    rate: the fraction of entries to drop, below 1.
    rows_B: each row's number in the batch. It selects the entries to drop, so
      a row loses the same entries in whichever microbatch it is.
    place: the number of this dropout in the model, different for each.
  """
  if key is None:
    return x
  keep = jax.vmap(
    lambda row: jax.random.bernoulli(
      jax.random.fold_in(jax.random.fold_in(key, place), row),
      1 - rate,
      x.shape[1:],
    )
  )(rows_B)
  return jnp.where(keep, x / (1 - rate), 0)


# ---- Pairs of tokens.


def hash_pairs(before: jax.Array, tokens: jax.Array, rows: int) -> jax.Array:
  """Returns a row of a table for each pair of tokens.

  Different pairs may share a row.

  Args:
    before: the token before each, integers from 0 on.
    tokens: integers from 0 on, of the same shape.
    rows: the number of rows of the table.

  Returns:
    int32 below `rows`, of the same shape.
  """
  # Odd factors, as in xxHash. The products keep only their lowest 32 bits.
  a, b = jnp.uint32(2654435761), jnp.uint32(2246822519)
  mixed = (tokens.astype(jnp.uint32) * a) ^ (before.astype(jnp.uint32) * b)
  mixed = (mixed ^ (mixed >> 15)) * b
  return ((mixed ^ (mixed >> 13)) % jnp.uint32(rows)).astype(jnp.int32)


# ---- Positions.


def positions_from(start: int | jax.Array, length: int) -> jax.Array:
  """Returns `length` consecutive positions: [L], or [B, L] for `start` [B]."""
  if jnp.ndim(start):
    return start[:, None] + jnp.arange(length)[None]
  return start + jnp.arange(length)


def sinusoidal_positions(
  positions_BL: jax.Array, dim: int, max_timescale: float = 10_000
) -> jax.Array:
  """Returns all sines and then all cosines, [B, L, D] (Vaswani et al., 2017).

  Tensor2Tensor and Praxis use the same order.

  Args:
    positions_BL: the positions.
    dim: D, even.
    max_timescale: the longest period, divided by 2 pi; the shortest is 1.
  """
  steps = jnp.arange(dim // 2, dtype=jnp.float32) / max(dim // 2 - 1, 1)
  frequencies = (1 / max_timescale) ** steps
  angles = positions_BL[..., None].astype(jnp.float32) * frequencies[None, None]
  return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def rotary_angles(
  positions: jax.Array,
  head_dim: int,
  base: float = 1e4,
  scaling: tuple[float, ...] = (),
) -> jax.Array:
  """Returns the angles of rotary positions (Su et al., 2021).

  Args:
    positions: integers, [L] or [B, L].
    head_dim: K, even.
    base: nearly the longest period, divided by 2 pi.
    scaling: () changes no period. (factor,) multiplies all periods by the
      factor. (factor, low, high, length), as in Llama 3.1, does so for periods
      that fit into `length` fewer than `low` times, and in part for those that
      fit up to `high` times.

  Returns:
    [L, K/2] or [B, L, K/2].
  """
  frequency_K = base ** (-jnp.arange(0, head_dim, 2, jnp.float32) / head_dim)
  if scaling:
    factor, *bounds = scaling
    kept_K = 0.0  # The share of a frequency that is not divided.
    if bounds:
      low, high, length = bounds
      periods_K = length * frequency_K / (2 * math.pi)
      kept_K = jnp.clip((periods_K - low) / (high - low), 0, 1)
    frequency_K *= (1 - kept_K) / factor + kept_K
  return positions.astype(jnp.float32)[..., None] * jnp.expand_dims(
    frequency_K, range(positions.ndim)
  )


def rotate(
  x_BLHK: jax.Array, angles: jax.Array | tuple[jax.Array, jax.Array]
) -> jax.Array:
  """Rotates each pair (x[k], x[k + K/2]) of a head by its position's angles.

  Args:
    x_BLHK: queries or keys.
    angles: the result of `rotary_angles`, for all rows or for each; or a pair
      of its cosines and its sines.

  Returns:
    An array like `x_BLHK`. The computation is in float32.
  """
  if not isinstance(angles, tuple):
    angles = jnp.cos(angles), jnp.sin(angles)
  cos, sin = (jnp.expand_dims(x, (0, 2) if x.ndim == 2 else 2) for x in angles)
  a, b = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x_BLHK.dtype)


# ---- Attention.


def attend(
  q_BLHK: jax.Array,
  k_BMGK: jax.Array,
  v_BMGK: jax.Array,
  offset: int | jax.Array = 0,
  segments: Segments = None,
  cap: float = 0.0,
  *,
  is_causal: bool = True,
  window: int | jax.Array = 0,
  seen_BM: jax.Array | None = None,
  scale: float | None = None,
  dropout: Dropout = None,
  by_head: bool = False,
) -> jax.Array:
  """Attends from L queries to M keys (Vaswani et al., 2017).

  Head h of the queries attends to head h G // H of the keys and values
  (Ainslie et al., 2023).

  Args:
    q_BLHK: queries; query l is at position `offset + l`.
    k_BMGK: keys, at positions 0 to M - 1; G divides H.
    v_BMGK: values.
    offset: position of the first query, for all rows or [B] for each.
    segments: the document of each query [B, L] and of each key [B, M]. A query
      sees only keys of the same document. None means one document per row.
    cap: replaces scores by cap * tanh(score / cap); 0 leaves them unchanged.
    is_causal: whether a query sees only its position and earlier ones. If not,
      `offset` and `window` are ignored.
    window: how many positions a query sees, up to and including its position;
      0, which must be a Python integer, means no limit.
    seen_BM: bool; False hides a key, such as padding. None hides none.
    scale: factor of the scores; None means K**-0.5.
    dropout: applied to the attention weights; see `Dropout`.
    by_head: whether keys and values are [B, G, M, K], as in a cache.

  Returns:
    [B, L, H, K], in the dtype of `v_BMGK`; 0 where a query sees no key.

  Raises:
    ValueError: G does not divide H.
  """
  batch, length, heads, width = q_BLHK.shape
  kv = 'BGMK' if by_head else 'BMGK'
  keys, groups = (k_BMGK.shape[kv.index(axis)] for axis in 'MG')
  if heads % groups:
    raise ValueError(
      f'The number of key heads must divide the number of query heads; got'
      f' {groups} for {heads}.'
    )
  # The query heads have the axis G, and an axis R for the heads of a group.
  h = 'G' if heads == groups else 'GR'
  q = q_BLHK * (width**-0.5 if scale is None else scale)
  if heads != groups:
    q = q.reshape(batch, length, groups, -1, width)
  # Leave out the axis of a single query. If the batch is one row, XLA would
  # otherwise transpose the keys for a product of matrices.
  is_single = by_head and length == 1
  if is_single:
    scores = einsum(f'B{h}K,{kv}->B{h}M', q[:, 0], k_BMGK)[..., None, :]
  else:
    scores = einsum(f'BL{h}K,{kv}->B{h}LM', q, k_BMGK)
  scores = _cap(scores, cap)
  masks = []  # [B or 1, L or 1, M]
  if is_causal:
    positions = positions_from(offset, length)
    if positions.ndim == 1:
      positions = positions[None]
    is_past = positions[..., None] >= jnp.arange(keys)[None, None]
    if not isinstance(window, int) or window:
      is_past &= positions[..., None] - window < jnp.arange(keys)[None, None]
    masks.append(is_past)
  if segments is not None:
    masks.append(segments[0][..., None] == segments[1][:, None])
  if seen_BM is not None:
    masks.append(seen_BM[:, None])
  if masks:
    seen = functools.reduce(jnp.logical_and, masks)
    seen = jnp.expand_dims(seen, range(1, scores.ndim - 2))
    scores = jnp.where(seen, scores, -jnp.inf)
  # Divide by the total after the product with the values: that touches L x K
  # numbers instead of L x M. The maximum only keeps the exponentials in range,
  # so it needs no gradient.
  top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
  # A causal query sees at least itself.
  may_be_blind = seen_BM is not None or (segments is not None and not is_causal)
  if may_be_blind:
    top = jnp.where(jnp.isneginf(top), 0, top)
  exp = jnp.exp(scores - top)
  total = jnp.moveaxis(exp.sum(axis=-1), -1, 1)  # [B, L, heads]
  if may_be_blind:
    total = jnp.where(total > 0, total, 1)
  weights = exp.astype(v_BMGK.dtype)
  if dropout is not None:
    weights = dropout(weights)
  if is_single:
    mixed = einsum(f'B{h}M,{kv}->B{h}K', weights[..., 0, :], v_BMGK)[:, None]
  else:
    mixed = einsum(f'B{h}LM,{kv}->BL{h}K', weights, v_BMGK)
  mixed = (mixed / total[..., None]).astype(v_BMGK.dtype)
  return mixed if heads == groups else mixed.reshape(q_BLHK.shape)


def causal_attention(
  q_BLHK: jax.Array,
  k_BLGK: jax.Array,
  v_BLGK: jax.Array,
  implementation: str,
  segment_ids_BL: jax.Array | None = None,
  cap: float = 0.0,
  dropout: Dropout = None,
  *,
  cache: tuple[jax.Array, jax.Array] | None = None,
  start: int | jax.Array = 0,
  window: int | jax.Array = 0,
  scale: float | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
  """Causal self-attention of a sequence, in training and in decoding.

  Both use this function, so a change applies to both.

  Args:
    q_BLHK: queries.
    k_BLGK: keys; G divides H, as for `attend`.
    v_BLGK: values.
    implementation: one of `ATTENTIONS`. 'einsum' is `attend`. 'flash' does not
      store the L x L scores (Dao et al., 2022): it is `splash_attention` on TPU
      and `cudnn_attention` on GPU. On CPU, and for sequences shorter than a
      block, it is `attend`.
    segment_ids_BL: the document of each token; None means one document per row.
    cap: as for `attend`; not supported by 'flash' on GPU.
    dropout: as for `attend`; supported only by 'einsum'.
    cache: keys and values [B, G, M, K] of the positions before `start`, to
      which the queries attend as well. With a cache, the implementation is
      'einsum', and each row is one document.
    start: position of the first query; see `update_cache`.
    window: as for `attend`; an integer for 'flash'.
    scale: as for `attend`.

  Returns:
    [B, L, H, K], and the cache with the new keys and values, if there is one.

  Raises:
    ValueError: the implementation does not support dropout, or G does not
      divide H.
    errors.UsageError: cuDNN has no kernel for a cap, or for this type.
  """
  run = functools.partial(
    attend,
    cap=cap,
    dropout=dropout,
    window=window,
    scale=scale,
  )
  if cache is not None:
    k_BGMK = update_cache(cache[0], k_BLGK, start)
    v_BGMK = update_cache(cache[1], v_BLGK, start)
    mixed = run(q_BLHK, k_BGMK, v_BGMK, start, by_head=True)
    return mixed, (k_BGMK, v_BGMK)
  ids = segment_ids_BL
  if implementation == 'flash':
    if dropout is not None:
      raise ValueError(
        "Dropout needs implementation='einsum'; got 'flash'. Change the"
        ' implementation, or set the dropout rate to 0.'
      )
    kernel = FLASH.get(platform())
    if kernel is not None and q_BLHK.shape[1] >= _MIN_BLOCK:
      mixed = kernel(q_BLHK, k_BLGK, v_BLGK, ids, cap, window, scale)
      return mixed, None
  # The first half of the queries never sees the second half of the keys.
  half = q_BLHK.shape[1] // 2
  if half < 64:
    both = None if ids is None else (ids, ids)
    return run(q_BLHK, k_BLGK, v_BLGK, segments=both), None
  early = late = None
  if ids is not None:
    early, late = (ids[:, :half], ids[:, :half]), (ids[:, half:], ids)
  # Use `split`: gradients of slices would be padded with zeros and added.
  q_early, q_late = jnp.split(q_BLHK, [half], axis=1)
  first = run(q_early, k_BLGK[:, :half], v_BLGK[:, :half], 0, early)
  second = run(q_late, k_BLGK, v_BLGK, half, late)
  return jnp.concatenate([first, second], axis=1), None


def splash_attention(
  q_BLHK: jax.Array,
  k_BLGK: jax.Array,
  v_BLGK: jax.Array,
  segment_ids_BL: jax.Array | None = None,
  cap: float = 0.0,
  window: int = 0,
  scale: float | None = None,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Causal attention with JAX's Pallas kernel for TPUs.

  XLA cannot shard a kernel, so each device calls it on its rows and heads.

  Args:
    q_BLHK: queries.
    k_BLGK: keys; G divides H.
    v_BLGK: values.
    segment_ids_BL: as for `causal_attention`.
    cap: as for `attend`.
    window: as for `attend`.
    scale: as for `attend`.
    interpret: whether to interpret the kernel, which works on CPU.

  Returns:
    [B, L, H, K].
  """
  if scale is None:
    scale = q_BLHK.shape[-1] ** -0.5
  run = functools.partial(
    _splash_of_device,
    cap=cap,
    window=window,
    scale=scale,
    interpret=interpret,
  )
  partitioner = partitioning.active()
  if partitioner is None:
    return run(q_BLHK, k_BLGK, v_BLGK, segment_ids_BL)
  spec = partitioner.spec(('batch', None, 'heads', None), q_BLHK.shape)
  parts = partitioner.size(spec[2])
  # If more devices share the query heads than there are key heads, several
  # devices get a copy of the same key head.
  groups = k_BLGK.shape[2]
  copies = math.lcm(groups, parts) // groups
  k_BLGK, v_BLGK = (jnp.repeat(x, copies, axis=2) for x in (k_BLGK, v_BLGK))
  return jax.shard_map(
    run,
    in_specs=(spec, spec, spec, jax.P(spec[0])),
    out_specs=spec,
    check_vma=False,  # Kernels do not declare over which axes results vary.
  )(q_BLHK, k_BLGK, v_BLGK, segment_ids_BL)


def _splash_of_device(
  q_BLHK: jax.Array,
  k_BLGK: jax.Array,
  v_BLGK: jax.Array,
  segment_ids_BL: jax.Array | None,
  *,
  cap: float,
  window: int,
  scale: float,
  interpret: bool,
) -> jax.Array:
  # Import Pallas late: the import is slow, and only TPUs need it.
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  _, length, heads, _ = q_BLHK.shape
  # The padding comes last, so the mask hides it from all tokens.
  padding = -length % _MIN_BLOCK
  q_BHLK, k_BGLK, v_BGLK = (
    jnp.swapaxes(jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))), 1, 2)
    for x in (q_BLHK * scale, k_BLGK, v_BLGK)
  )
  segments = None
  if segment_ids_BL is not None:
    ids_BL = jnp.pad(segment_ids_BL, ((0, 0), (0, padding)))
    segments = splash.SegmentIds(ids_BL, ids_BL)
  padded = length + padding
  block = math.gcd(padded, _MAX_BLOCK)
  mask = splash.CausalMask((padded, padded))
  if window:
    mask = splash.LocalMask((padded, padded), (window - 1, 0), offset=0)
  kernel = splash.make_splash_mha_single_device(
    splash.MultiHeadMask([mask] * heads),
    block_sizes=splash.BlockSizes(
      block_q=block,
      block_kv=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    attn_logits_soft_cap=cap or None,
    interpret=interpret,
  )
  mixed_BHLK = jax.vmap(kernel)(q_BHLK, k_BGLK, v_BGLK, segments)
  return jnp.swapaxes(mixed_BHLK, 1, 2)[:, :length]


def cudnn_attention(
  q_BLHK: jax.Array,
  k_BLGK: jax.Array,
  v_BLGK: jax.Array,
  segment_ids_BL: jax.Array | None = None,
  cap: float = 0.0,
  window: int = 0,
  scale: float | None = None,
) -> jax.Array:
  """Causal attention with cuDNN, for NVIDIA GPUs.

  Documents that share a row need a mask of L x L for all heads. cuDNN could
  take the offsets of the documents instead, but JAX's public function cannot.

  Args:
    q_BLHK: queries, in 16 bits.
    k_BLGK: keys; G divides H.
    v_BLGK: values.
    segment_ids_BL: as for `causal_attention`.
    cap: must be 0.
    window: as for `attend`.
    scale: as for `attend`.

  Returns:
    [B, L, H, K].

  Raises:
    errors.UsageError: there is a cap, or the arrays are float32.
  """
  if cap:
    raise errors.UsageError(
      f"A cap of {cap} needs implementation='einsum' on GPU; got 'flash', and"
      ' cuDNN has no cap. Change the implementation, or set the cap to 0.'
    )
  if q_BLHK.dtype == jnp.float32:
    raise errors.UsageError(
      'Flash attention on GPU uses cuDNN, which needs bfloat16; got float32.'
      " Set the model's dtype to bfloat16, or its attention to 'einsum'."
    )
  mask = None
  if (ids := segment_ids_BL) is not None:
    mask = ids[:, None, :, None] == ids[:, None, None, :]
  return jax.nn.dot_product_attention(
    q_BLHK,
    k_BLGK,
    v_BLGK,
    mask=mask,
    scale=scale,
    is_causal=True,
    local_window_size=(window - 1, 0) if window else None,
    implementation='cudnn',
  )


def platform() -> str:
  """Returns the platform that the step being traced is compiled for.

  It may be 'tpu' in a process that has only a CPU: see `mesh.on_devices`.
  """
  partitioner = partitioning.active()
  if partitioner is None or partitioner.is_here:
    return jax.default_backend()
  return 'tpu'  # `config.topology` names TPUs only.


# Flash attention by the platform of `platform`; others use 'einsum'.
FLASH: dict[str, Callable[..., jax.Array]] = {
  'tpu': splash_attention,
  'gpu': cudnn_attention,
}


def update_cache(
  cache_BGMK: jax.Array, new_BLGK: jax.Array, start: int | jax.Array
) -> jax.Array:
  """Writes new keys or values into a cache.

  The cache stores the positions of a head contiguously. With this layout, a CPU
  attends from one query to M keys six times as fast as if the heads of a
  position were contiguous.

  Args:
    cache_BGMK: keys or values.
    new_BLGK: keys or values of the L positions from `start` on.
    start: the first position for all rows, with `start + L <= M`; or [B], the
      first position of each row. In the latter case, entries past the end are
      dropped, so that a finished row may keep decoding.

  Returns:
    [B, G, M, K].
  """
  new_BGLK = jnp.swapaxes(new_BLGK, 1, 2)
  if not jnp.ndim(start):
    return jax.lax.dynamic_update_slice_in_dim(
      cache_BGMK, new_BGLK, start, axis=2
    )
  positions_BL = positions_from(start, new_BLGK.shape[1])
  # Use an index for each head, although all are equal. XLA would turn a single
  # index into a slice and fuse it into each reader, with a copy of the cache.
  positions_BGL = jnp.broadcast_to(positions_BL[:, None], new_BGLK.shape[:3])
  write = lambda cache, new, at: cache.at[at].set(new, mode='drop')
  return jax.vmap(jax.vmap(write))(cache_BGMK, new_BGLK, positions_BGL)


# ---- The output layer, and the loss.


def logits(x_BLD: jax.Array, head: Head, cap: float = 0.0) -> jax.Array:
  """Returns float32 logits [B, L, V].

  Args:
    x_BLD: normalized output of the layers.
    head: the table and the bias, in float32.
    cap: replaces logits by cap * tanh(logit / cap); 0 leaves them unchanged.
  """
  table_VD, bias_V = head
  # Keep XLA from splitting the sum over D between the stages of a pipeline,
  # whose devices would then exchange logits.
  x_BLD = partitioning.constrain(x_BLD, ('batch', None, 'activation_embed'))
  logits_BLV = einsum('BLD,VD->BLV', x_BLD, table_VD.astype(x_BLD.dtype))
  if bias_V is not None:
    logits_BLV += bias_V.astype(jnp.float32)[None, None]
  return partitioning.constrain(_cap(logits_BLV, cap), ('batch', None, 'vocab'))


def cross_entropy(logits_BLV: jax.Array, targets: jax.Array) -> jax.Array:
  """Returns the cross entropy of each target in nats, float32 [B, L].

  Args:
    logits_BLV: the logits of each token.
    targets: integers [B, L], or the probability of each token, [B, L, V].
  """
  logits_BLV = logits_BLV.astype(jnp.float32)
  total_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
  if targets.ndim == logits_BLV.ndim:
    return -jnp.sum((logits_BLV - total_BL[..., None]) * targets, axis=-1)
  target_BL1 = jnp.take_along_axis(logits_BLV, targets[..., None], axis=-1)
  return total_BL - target_BL1[..., 0]


class CrossEntropy(NamedTuple):
  """The result of `chunked_cross_entropy`, in float32.

  Attributes:
    total: the weighted sum of the cross entropy, in nats.
    correct: the weighted number of targets that are the likeliest token. It has
      no gradient.
    nats_BL: the unweighted cross entropy of each target. It has no gradient.
  """

  total: jax.Array
  correct: jax.Array
  nats_BL: jax.Array


def chunked_cross_entropy(
  x_BLD: jax.Array,
  head: Head,
  targets_BL: jax.Array,
  weights_BL: jax.Array,
  *,
  chunks: int,
  cap: float = 0.0,
) -> CrossEntropy:
  """Computes the loss, holding the logits of one piece at a time.

  In a compiled program, entries of the result that you do not use cost nothing.

  Args:
    x_BLD: normalized output of the layers.
    head: see `logits`.
    targets_BL: the token to predict at each position.
    weights_BL: float32; 0 excludes a position. It gets no gradient.
    chunks: the number of pieces into which the sequence is cut. With more than
      one, the forward pass computes the gradients too, while it has the logits.
    cap: see `logits`.

  Raises:
    UsageError: `chunks` does not divide the length of the sequence.
  """
  if x_BLD.shape[1] % chunks:
    raise errors.UsageError(
      f"The loss's chunks must divide the length of the sequence; got {chunks}"
      f' for {x_BLD.shape[1]} tokens.'
    )
  args = (x_BLD, head, targets_BL, jax.lax.stop_gradient(weights_BL))
  piece = functools.partial(_piece_cross_entropy, cap)
  if chunks == 1:
    total, rest = piece(*args)
  else:
    total, rest = _chunked_cross_entropy(piece, chunks, *args)
  return CrossEntropy(total, *rest)


# The summed nats, and a pair: the number of correct predictions, and the nats
# of each target.
_Sums = tuple[jax.Array, tuple[jax.Array, jax.Array]]


def _piece_cross_entropy(
  cap: float,
  x_BLD: jax.Array,
  head: Head,
  targets_BL: jax.Array,
  weights_BL: jax.Array,
) -> _Sums:
  logits_BLV = logits(x_BLD, head, cap)
  nats_BL = cross_entropy(logits_BLV, targets_BL)
  likeliest_BL = logits_BLV.argmax(axis=-1).astype(targets_BL.dtype)
  correct = jnp.sum(jnp.where(likeliest_BL == targets_BL, weights_BL, 0))
  return jnp.sum(nats_BL * weights_BL), (
    correct,
    jax.lax.stop_gradient(nats_BL),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_cross_entropy(
  piece: Callable[..., _Sums],
  chunks: int,
  x_BLD: jax.Array,
  head: Head,
  targets_BL: jax.Array,
  weights_BL: jax.Array,
) -> _Sums:
  def add(carry: Any, of_piece: Any) -> tuple[Any, jax.Array]:
    x, targets, weights = of_piece
    total, (correct, nats) = piece(x, head, targets, weights)
    return jax.tree.map(jnp.add, carry, (total, correct)), nats

  zero = jnp.zeros([], jnp.float32)
  pieces = _pieces((x_BLD, targets_BL, weights_BL), chunks)
  (total, correct), nats = jax.lax.scan(add, (zero, zero), pieces)
  return total, (correct, _whole(nats))


def _pieces(tree: Any, chunks: int) -> Any:
  """Cuts [B, L, ...] into [chunks, B, L / chunks, ...]."""
  # Do not cut the batch, which is split over devices.
  return jax.tree.map(
    lambda x: jnp.swapaxes(
      x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 0, 1
    ),
    tree,
  )


def _whole(pieces: jax.Array) -> jax.Array:
  """Undoes `_pieces`."""
  _, batch, _, *rest = pieces.shape
  return jnp.swapaxes(pieces, 0, 1).reshape(batch, -1, *rest)


def _chunked_forward(
  piece: Callable[..., _Sums],
  chunks: int,
  x_BLD: jax.Array,
  head: Head,
  targets_BL: jax.Array,
  weights_BL: jax.Array,
) -> tuple[_Sums, Any]:
  """Returns the loss, and its gradients for the backward pass.

  Recomputing the logits in the backward pass would cost a fourth product with
  the table.
  """
  with_grads = jax.value_and_grad(piece, argnums=(0, 1), has_aux=True)

  def add(carry: Any, of_piece: Any) -> tuple[Any, Any]:
    x, targets, weights = of_piece
    (total, (correct, nats)), (grad_x, grad_head) = with_grads(
      x, head, targets, weights
    )
    carry = jax.tree.map(jnp.add, carry, (total, correct, grad_head))
    return carry, (nats, grad_x)

  zero = jnp.zeros([], jnp.float32)
  zeros = (zero, zero, jax.tree.map(jnp.zeros_like, head))
  pieces = _pieces((x_BLD, targets_BL, weights_BL), chunks)
  (total, correct, grad_head), (nats, grad_x) = jax.lax.scan(add, zeros, pieces)
  return (total, (correct, _whole(nats))), (_whole(grad_x), grad_head)


def _chunked_backward(
  piece: Any, chunks: int, grads: Any, cotangents: _Sums
) -> Any:
  del piece, chunks
  grad_x, grad_head = grads
  cotangent, _ = cotangents
  return (
    grad_x * cotangent.astype(grad_x.dtype),
    jax.tree.map(lambda grad: grad * cotangent, grad_head),
    None,
    None,
  )


_chunked_cross_entropy.defvjp(_chunked_forward, _chunked_backward)


# ---- A pipeline of layers.


def pipelined(
  run_layer: Callable[[Any, jax.Array, jax.Array, Any], jax.Array],
  weights: Any,
  x_BLD: jax.Array,
  beside: Any,
  *,
  num_stages: int,
  num_microbatches: int,
  num_repeats: int,
  unroll: bool,
  remat: str,
) -> jax.Array:
  """Runs layers as a pipeline; see `pipeline.pipeline`.

  Args:
    run_layer: `(weights of one layer, its number, x, beside) -> x`, on some of
      the rows.
    weights: [N, ...], each an array or a `partitioning.Logical`.
    x_BLD: input of the first layer.
    beside: a pytree of arrays [B, ...] that layers read, such as segment ids.
    num_stages: as for `pipeline.pipeline`.
    num_microbatches: the number of parts into which the batch is cut.
    num_repeats: how often each part passes through all stages.
    unroll: whether to unroll a stage's layers instead of looping over them.
    remat: one of `REMATS`.

  Returns:
    The output of the last layer, [B, L, D].
  """

  def run(layer: Any, inputs: Any) -> Any:
    x_BLD, beside = inputs
    return run_layer(*layer, x_BLD, beside), beside

  numbers = jnp.arange(jax.tree.leaves(weights)[0].shape[0])
  x_BLD, _ = pipeline.pipeline(
    run,
    (weights, numbers),
    (x_BLD, beside),
    axes=(
      BETWEEN_BLOCKS,
      jax.tree.map(lambda x: ('batch', *(None,) * (x.ndim - 1)), beside),
    ),
    num_stages=num_stages,
    num_microbatches=num_microbatches,
    num_repeats=num_repeats,
    unroll=unroll,
    policy=remat_policy(remat) or pipeline.save_all_but_copies,
  )
  return x_BLD
