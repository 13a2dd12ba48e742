"""Attention: self-, cross- and grouped attention, with and without a cache.

Shapes: B batch, L length (queries), M keys, D width, H heads, G heads of keys
and values (each serves H / G heads of queries), K head dim, S stacked matrices
of one product.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from examples import fp8
from examples import transformer
from examples.pax import base_layer
from examples.pax import hparams
from examples.pax.layers import embedding_softmax
from examples.pax.layers import stochastics
from jaxline import errors

BaseHParams = hparams.BaseHParams
WeightHParams = base_layer.WeightHParams
WeightInit = base_layer.WeightInit
sub_config_field = base_layer.sub_config_field

# 'key' and 'value', each [B, M, G, K], or [B, G, M, K] if `extend_step` extends
# them.
Cache = dict[str, jax.Array]


class Context(NamedTuple):
  """Inputs of attention besides the sequence itself, all optional.

  Attributes:
    segment_ids: Index of each token's document, [B, L]. In self-attention, a
      token sees only its own document. If None, each row is one document.
    position: Positions for rotary embeddings, [B, L], or, except in a pipeline,
      [L] for all rows. If None, they count from 0.
    seen: Keys that non-causal self-attention sees, bool [B, L].
    source: Sequence that cross-attention attends to, [B, T, D].
    source_seen: Positions of `source` that cross-attention sees, bool [B, T].
    rows: Indices of the rows in the batch, [B], on which dropout depends. If
      None, they count from 0. A pipeline sets them before it splits the batch.
  """

  segment_ids: jax.Array | None = None
  position: jax.Array | None = None
  seen: jax.Array | None = None
  source: jax.Array | None = None
  source_seen: jax.Array | None = None
  rows: jax.Array | None = None


class Projection(base_layer.BaseLayer):
  """An einsum of the inputs with a weight `w`, plus a bias `b`.

  With the spec 'BLD,DSHK->BLSHK', the product sums over D, and the bias is
  [S, H, K].

  Attributes:
    spec: Einsum of the inputs and the weight, with one letter per dimension.
    shape: Shape of the weight.
    axes: Axes of the weight; see `base_layer.SplitDims`.
    fan_in_axes: Input dimensions of the weight; see `base_layer.WeightHParams`.
    fan_out_axes: Output dimensions of the weight.
    batch_axes: Batch dimensions of the weight.
    use_bias: Whether to add a bias.
    use_fp8: Whether to multiply in 8-bit floating point; see `fp8`.
  """

  spec: str = ''
  shape: tuple[int, ...] = ()
  axes: base_layer.SplitDims = None
  fan_in_axes: tuple[int, ...] | None = None
  fan_out_axes: tuple[int, ...] | None = None
  batch_axes: tuple[int, ...] = ()
  use_bias: bool = True
  use_fp8: bool = False

  def setup(self) -> None:
    p = self.hparams
    _, of_w, outputs = re.split(',|->', p.spec)
    self.create_variable(
      'w',
      WeightHParams(
        p.shape,
        tensor_split_dims_mapping=p.axes,
        fan_in_axes=p.fan_in_axes,
        fan_out_axes=p.fan_out_axes,
        batch_axes=p.batch_axes,
      ),
    )
    for of in fp8.kept() if p.use_fp8 else ():
      self.create_variable(
        of.name,
        WeightHParams(of.shape, WeightInit.Constant(of.first), jnp.float32),
      )
    if p.use_bias:
      kept = [i for i, letter in enumerate(of_w) if letter in outputs]
      axes = p.axes or (None,) * len(of_w)
      self.create_variable(
        'b',
        WeightHParams(
          tuple(p.shape[i] for i in kept),
          init=WeightInit.Constant(0.0),
          tensor_split_dims_mapping=tuple(axes[i] for i in kept),
        ),
      )

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns the product, in `fprop_dtype`."""
    p = self.hparams
    x, w = inputs.astype(self.fprop_dtype), self.theta.w
    if p.use_fp8:
      state = {of.key: self.get_var(of.name) for of in fp8.kept()}
      out = fp8.product(p.spec, x, w, state)
      out = ad_checkpoint.checkpoint_name(out, transformer.DOT)
    else:
      out = transformer.dot(p.spec, x, w)
    if p.use_bias:
      b = self.theta.b.astype(out.dtype)
      out += jnp.expand_dims(b, range(out.ndim - b.ndim))
    return out


class PerDimScale(base_layer.BaseLayer):
  """Scales each dimension of a head's queries with a trained factor.

  The factor is 1 where the variable, `per_dim_scale` [K], is 0. See
  `transformer.query_scale`.

  Attributes:
    dim: K.
  """

  dim: int = 0

  def setup(self) -> None:
    self.create_variable(
      'per_dim_scale',
      WeightHParams(
        (self.hparams.dim,),
        init=WeightInit.Constant(0.0),
        tensor_split_dims_mapping=('kv',),
      ),
    )

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns [..., K], in the dtype of the inputs."""
    scale_K = transformer.query_scale(self.theta.per_dim_scale)
    scale_K = scale_K.astype(inputs.dtype)
    return inputs * jnp.expand_dims(scale_K, range(inputs.ndim - 1))


class DotProductAttention(base_layer.BaseLayer):
  """Multi-head attention (Vaswani et al., 2017).

  For self-attention, use `__call__`, or `extend_step` to decode token by token.
  For cross-attention over `Context.source`, use `__call__`, or
  `keys_and_values` once and `attend_to` for each part of the queries.

  Attributes:
    input_dim: D, the width of the inputs and the outputs.
    hidden_dim: H K. If 0, `input_dim`, unless `dim_per_head` is set.
    num_heads: H, the number of query heads.
    num_kv_heads: G, a divisor of H (Ainslie et al., 2023). If None, H.
    dim_per_head: K. If None, `hidden_dim` / H.
    use_bias: Whether the projections have biases.
    atten_logit_cap: Soft cap c: scores become c tanh(score / c). If 0, they are
      not capped. On a GPU, a cap needs the 'einsum' implementation.
    atten_dropout_prob: Dropout rate of the attention weights. Needs the
      'einsum' implementation.
    internal_enable_per_dim_scale: Whether to scale queries by `PerDimScale`. If
      None, they are scaled unless `num_kv_heads` is set, because Praxis's class
      for grouped attention has no such scale.
    use_rotary_position_emb: Whether to rotate queries and keys by their
      positions.
    combine_qkv: Whether to compute queries, keys and values as one product,
      which is faster. Only for self-attention with G = H; ignored otherwise.
    is_causal: Whether a query sees no position after its own.
    is_cross_attention: Whether keys and values come from a different sequence.
      If so, attention is neither causal nor rotary.
    attention_impl: One of `transformer.ATTENTIONS`, for causal attention
      without a cache: see `transformer.causal_attention`. All other attention
      uses 'einsum'.
    proj_tpl: Template of the projections.
    rotary_position_emb_tpl: Template of the rotary embedding.
  """

  input_dim: int = 0
  hidden_dim: int = 0
  num_heads: int = 1
  num_kv_heads: int | None = None
  dim_per_head: int | None = None
  use_bias: bool = True
  atten_logit_cap: float = 0.0
  atten_dropout_prob: float = 0.0
  internal_enable_per_dim_scale: bool | None = None
  use_rotary_position_emb: bool = False
  combine_qkv: bool = False
  is_causal: bool = True
  is_cross_attention: bool = False
  attention_impl: str = 'einsum'
  proj_tpl: BaseHParams = sub_config_field(Projection.HParams)
  rotary_position_emb_tpl: BaseHParams = sub_config_field(
    embedding_softmax.RotaryPositionalEmbedding.HParams
  )

  def setup(self) -> None:
    p = self.hparams
    self._check()
    groups = self._groups
    # Initializers use Praxis's fans: H counts as inputs and K as outputs. Both
    # are multiplied by D, and in `combined_qkv` by S too. With a single head of
    # keys and values, Praxis has a matrix [D, K] instead.
    if self._is_one_product:
      self._create_projection('combined_qkv', groups, 3)
    else:
      self._create_projection('query', p.num_heads)
      fan_in = (0,) if groups == 1 < p.num_heads else None
      self._create_projection('key', groups, fan_in_axes=fan_in)
      self._create_projection('value', groups, fan_in_axes=fan_in)
    self.create_child(
      'post',
      p.proj_tpl.clone(),
      spec='BLHK,HKD->BLD',
      shape=(p.num_heads, self._width, p.input_dim),
      axes=('heads', 'kv', 'embed'),
      fan_in_axes=(0,),
      fan_out_axes=(1,),
      use_bias=p.use_bias,
    )
    if self._has_per_dim_scale:
      self.create_child('per_dim_scale', PerDimScale.HParams(), dim=self._width)
    self.create_child(
      'atten_dropout', **stochastics.dropout(p.atten_dropout_prob)
    )
    if self._is_rotary:
      self.create_child(
        'rotary_position_emb',
        p.rotary_position_emb_tpl,
        embedding_dims=self._width,
      )

  def _check(self) -> None:
    p, name = self.hparams, self.module_name
    width = p.hidden_dim or (p.input_dim if p.dim_per_head is None else 0)
    if width and width != p.num_heads * self._width:
      raise errors.UsageError(
        f'{name} has num_heads {p.num_heads} and dim_per_head {p.dim_per_head}'
        f' for a width of {width}; expected the width to be their product, or a'
        ' multiple of num_heads if dim_per_head is None.'
      )
    errors.check_names(
      [p.attention_impl], transformer.ATTENTIONS, 'attention_impl', name
    )

  @property
  def _width(self) -> int:
    """K."""
    p = self.hparams
    return p.dim_per_head or (p.hidden_dim or p.input_dim) // p.num_heads

  @property
  def _groups(self) -> int:
    """G."""
    return self.hparams.num_kv_heads or self.hparams.num_heads

  @property
  def _has_per_dim_scale(self) -> bool:
    p = self.hparams
    if p.internal_enable_per_dim_scale is None:
      return p.num_kv_heads is None
    return p.internal_enable_per_dim_scale

  @property
  def _is_rotary(self) -> bool:
    p = self.hparams
    return p.use_rotary_position_emb and not p.is_cross_attention

  @property
  def _is_one_product(self) -> bool:
    """Whether queries, keys and values are computed as one product."""
    p = self.hparams
    return (
      p.combine_qkv and not p.is_cross_attention and self._groups == p.num_heads
    )

  def _create_projection(
    self, name: str, heads: int, num_parts: int | None = None, **fans: Any
  ) -> None:
    p = self.hparams
    parts = () if num_parts is None else (num_parts,)
    side_by_side = 'S' * len(parts)
    self.create_child(
      name,
      p.proj_tpl.clone(),
      spec=f'BLD,D{side_by_side}HK->BL{side_by_side}HK',
      shape=(p.input_dim, *parts, heads, self._width),
      axes=('embed', *(None for _ in parts), 'heads', 'kv'),
      use_bias=p.use_bias,
      **fans,
    )

  def __call__(
    self, inputs: jax.Array, context: Context | None = None
  ) -> jax.Array:
    """Computes attention over a whole sequence.

    Args:
      inputs: Sequence of the queries, [B, L, D].
      context: Other inputs. If None, all are None.

    Returns:
      [B, L, D].

    Raises:
      ValueError: The attention is causal, and `context.seen` is set.
    """
    p = self.hparams
    context = context or Context()
    if p.is_cross_attention:
      cache = self.keys_and_values(context.source)
      return self.attend_to(inputs, cache, context)
    if p.is_causal and context.seen is not None:
      raise ValueError(
        f'{self.module_name} is causal, so it accepts no `seen`. Put padding at'
        ' the end of the rows instead.'
      )
    segments = context.segment_ids
    q, k, v = self._qkv(inputs, context.position)
    if not p.is_causal:
      pair = None if segments is None else (segments, segments)
      return self._attend(q, k, v, context.seen, context.rows, pair)
    mixed, _ = transformer.causal_attention(
      q,
      k,
      v,
      p.attention_impl,
      segments,
      p.atten_logit_cap,
      self._dropout(context.rows),
    )
    return self.post(mixed)

  def empty_cache(self, batch: int, length: int) -> Cache:
    """Returns an empty cache for `extend_step`.

    Args:
      batch: B.
      length: M, the largest number of positions.
    """
    shape = (batch, self._groups, length, self._width)
    room = jnp.zeros(shape, self.fprop_dtype)
    return {'key': room, 'value': room}

  def extend_step(
    self,
    inputs: jax.Array,
    cache: Cache,
    start: int | jax.Array,
  ) -> tuple[jax.Array, Cache]:
    """Computes causal attention of the next tokens, with a cache.

    Args:
      inputs: Next tokens, [B, L, D], at the positions from `start`.
      cache: Cache from `empty_cache` or from the previous call.
      start: First position, for all rows, or [B] for each row.

    Returns:
      The outputs [B, L, D] and the extended cache.

    Raises:
      ValueError: This is not causal self-attention.
    """
    p = self.hparams
    if not p.is_causal or p.is_cross_attention:
      raise ValueError(
        f'{self.module_name} has is_causal={p.is_causal} and'
        f' is_cross_attention={p.is_cross_attention}; only causal'
        ' self-attention can be extended.'
      )
    position = transformer.positions_from(start, inputs.shape[1])
    q, k, v = self._qkv(inputs, position)
    mixed, extended = transformer.causal_attention(
      q,
      k,
      v,
      p.attention_impl,
      cap=p.atten_logit_cap,
      cache=(cache['key'], cache['value']),
      start=start,
    )
    assert extended is not None
    return self.post(mixed), dict(zip(('key', 'value'), extended, strict=True))

  def keys_and_values(self, source: jax.Array) -> Cache:
    """Returns the keys and values of a sequence, for `attend_to`.

    Args:
      source: The sequence, [B, M, D].
    """
    return {
      'key': self._split(self.key(source)),
      'value': self._split(self.value(source)),
    }

  def attend_to(
    self, inputs: jax.Array, cache: Cache, context: Context
  ) -> jax.Array:
    """Computes cross-attention.

    Args:
      inputs: Sequence of the queries, [B, L, D].
      cache: Result of `keys_and_values`.
      context: Other inputs, of which `source_seen` and `rows` are used.

    Returns:
      [B, L, D].
    """
    q = self._scale(self._split(self.query(inputs)))
    return self._attend(q, **cache, seen=context.source_seen, rows=context.rows)

  def _attend(
    self,
    q_BLHK: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: jax.Array | None,
    rows: jax.Array | None,
    segments: transformer.Segments = None,
  ) -> jax.Array:
    """Computes non-causal attention, [B, L, D]."""
    mixed = transformer.attend(
      q_BLHK,
      key,
      value,
      segments=segments,
      cap=self.hparams.atten_logit_cap,
      is_causal=False,
      seen_BM=seen,
      dropout=self._dropout(rows),
    )
    return self.post(mixed)

  def _dropout(self, rows: jax.Array | None) -> transformer.Dropout:
    if self.do_eval or not self.hparams.atten_dropout_prob:
      return None
    return functools.partial(self.atten_dropout, rows_B=rows)

  def _qkv(
    self, x_BLD: jax.Array, position: jax.Array | None
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [B, L, H, K], keys and values [B, L, G, K]."""
    if self._is_one_product:
      q, k, v = self._parts(self.combined_qkv, x_BLD)
    else:
      q = self._split(self.query(x_BLD))
      k, v = self.keys_and_values(x_BLD).values()
    if self._is_rotary:
      if position is None:
        position = jnp.arange(x_BLD.shape[1])
      q = self.rotary_position_emb(q, position)
      k = self.rotary_position_emb(k, position)
    # Praxis scales after the rotation, too. The order matters, because the two
    # dimensions of a rotated pair may have different scales.
    return self._scale(q), k, v

  def _parts(self, projection: Projection, x_BLD: jax.Array) -> list[jax.Array]:
    """Projects the inputs and splits the product into its S parts."""
    return [self._split(x) for x in transformer.parts(projection(x_BLD))]

  def _split(self, x_BLHK: jax.Array) -> jax.Array:
    return self.shard(x_BLHK, transformer.HEADS, 'heads')

  def _scale(self, q_BLHK: jax.Array) -> jax.Array:
    if self._has_per_dim_scale:
      return self.per_dim_scale(q_BLHK)
    return q_BLHK
