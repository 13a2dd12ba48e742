"""Attention: self-, cross- and grouped attention, with and without a cache.

Shapes: B batch, L length (queries), M keys, D width, H heads, G heads of keys
and values (each serves H / G heads of queries), K head dim, S stacked matrices
of one product, T length of the source.
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
from examples.pax.layers import embedding_softmax
from examples.pax.layers import stochastics
from jaxline.base import keys

LayerTpl = base_layer.LayerTpl
WeightHParams = base_layer.WeightHParams
WeightInit = base_layer.WeightInit
template_field = base_layer.template_field

# 'key' and 'value', each [B, M, G, K], or [B, G, M, K] if `extend_step` extends
# them.
Cache = dict[str, jax.Array]


class Context(NamedTuple):
  """Inputs of attention besides the sequence itself, all optional."""

  # Document of each token, [B, L]: in self-attention, a token sees only its own
  # document. If None, each row is one document.
  segment_ids: jax.Array | None = None
  # Positions for rotary embeddings, [B, L], or, except in a pipeline, [L] for
  # all rows. If None, they count from 0.
  position: jax.Array | None = None
  # Keys that non-causal self-attention sees, bool [B, L].
  seen: jax.Array | None = None
  # Sequence that cross-attention attends to, [B, T, D].
  source: jax.Array | None = None
  # Positions of `source` that cross-attention sees, bool [B, T].
  source_seen: jax.Array | None = None
  # Indices of the rows in the batch, [B], on which dropout depends. If None,
  # they count from 0. A pipeline sets them before it splits the batch.
  rows: jax.Array | None = None


class Projection(base_layer.BaseLayer):
  """An einsum of the inputs with a weight `w`, plus a bias `b`.

  With the spec 'BLD,DSHK->BLSHK', the product sums over D, and the bias is
  [S, H, K].
  """

  spec: str = ''  # One letter per dimension of the inputs and of the weight.
  # See `base_layer.WeightHParams` for these fields of the weight.
  shape: tuple[int, ...] = ()
  axes: base_layer.SplitDims = None
  fan_in_axes: tuple[int, ...] | None = None
  fan_out_axes: tuple[int, ...] | None = None
  batch_axes: tuple[int, ...] = ()
  use_bias: bool = True
  use_fp8: bool = False  # Whether to multiply in 8-bit floats; see `fp8`.

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
      first = WeightInit.Constant(of.first)
      self.create_variable(of.name, WeightHParams(of.shape, first, jnp.float32))
    if p.use_bias:
      kept = [i for i, letter in enumerate(of_w) if letter in outputs]
      axes = p.axes or (None,) * len(of_w)
      bias = WeightHParams(
        tuple(p.shape[i] for i in kept),
        init=WeightInit.Constant(0.0),
        tensor_split_dims_mapping=tuple(axes[i] for i in kept),
      )
      self.create_variable('b', bias)

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
  """

  dim: int = 0  # K.

  def setup(self) -> None:
    zero = WeightInit.Constant(0.0)
    weight = WeightHParams((self.dim,), zero, tensor_split_dims_mapping=('kv',))
    self.create_variable('per_dim_scale', weight)

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
  """

  input_dim: int = 0  # D, the width of the inputs and the outputs.
  num_heads: int = 1  # H, the number of query heads.
  # G, a divisor of H (Ainslie et al., 2023). If None, H.
  num_kv_heads: int | None = None
  dim_per_head: int | None = None  # K. If None, D / H.
  use_bias: bool = True  # Whether the projections have biases.
  # Soft cap c: scores become c tanh(score / c). 0 means no cap. On a GPU, a cap
  # needs the 'einsum' implementation.
  atten_logit_cap: float = 0.0
  # Dropout rate of the attention weights; needs the 'einsum' implementation.
  atten_dropout_prob: float = 0.0
  # Whether to scale queries by `PerDimScale`. If None, they are scaled unless
  # `num_kv_heads` is set, because Praxis's class for it has no such scale.
  internal_enable_per_dim_scale: bool | None = None
  use_rotary_position_emb: bool = False  # Whether to rotate queries and keys.
  # Whether queries, keys and values are one product, which is faster. Only for
  # self-attention with G = H; ignored otherwise.
  combine_qkv: bool = False
  is_causal: bool = True  # Whether a query sees no position after its own.
  # Whether keys and values come from a different sequence. If so, attention is
  # neither causal nor rotary.
  is_cross_attention: bool = False
  # One of `transformer.ATTENTIONS`, for causal attention without a cache: see
  # `transformer.causal_attention`. All other attention uses 'einsum'.
  attention_impl: str = 'einsum'
  proj_tpl: LayerTpl = template_field(Projection)
  rotary_position_emb_tpl: LayerTpl = template_field(
    embedding_softmax.RotaryPositionalEmbedding
  )

  _CHECKS = {
    'attention_impl': keys.one_of(*transformer.ATTENTIONS),
    'num_heads': keys.integer(min=1),
  }
  _RULES = {
    'dim_per_head, or an input_dim that is a multiple of num_heads': (
      lambda p: p.dim_per_head or p.input_dim % p.num_heads == 0
    )
  }

  def setup(self) -> None:
    p = self.hparams
    groups = self._groups = p.num_kv_heads or p.num_heads
    width = self._width = p.dim_per_head or p.input_dim // p.num_heads
    is_own = not p.is_cross_attention
    self._is_rotary = p.use_rotary_position_emb and is_own
    self._is_one_product = p.combine_qkv and is_own and groups == p.num_heads
    self._is_scaled = p.internal_enable_per_dim_scale
    if self._is_scaled is None:
      self._is_scaled = p.num_kv_heads is None

    def project(name: str, heads: int, *parts: int, **fans: Any) -> None:
      s = 'S' * len(parts)
      self.create_child(
        name,
        p.proj_tpl.clone(),
        spec=f'BLD,D{s}HK->BL{s}HK',
        shape=(p.input_dim, *parts, heads, width),
        axes=('embed', *(None for _ in parts), 'heads', 'kv'),
        use_bias=p.use_bias,
        **fans,
      )

    # Initializers use Praxis's fans: H counts as inputs and K as outputs. Both
    # are multiplied by D, and in `combined_qkv` by S too. With a single head of
    # keys and values, Praxis has a matrix [D, K] instead.
    if self._is_one_product:
      project('combined_qkv', groups, 3)
    else:
      project('query', p.num_heads)
      fan_in = (0,) if groups == 1 < p.num_heads else None
      project('key', groups, fan_in_axes=fan_in)
      project('value', groups, fan_in_axes=fan_in)
    self.create_child(
      'post',
      p.proj_tpl.clone(),
      spec='BLHK,HKD->BLD',
      shape=(p.num_heads, width, p.input_dim),
      axes=('heads', 'kv', 'embed'),
      fan_in_axes=(0,),
      fan_out_axes=(1,),
      use_bias=p.use_bias,
    )
    if self._is_scaled:
      self.create_child('per_dim_scale', PerDimScale.HParams(), dim=width)
    dropout = stochastics.dropout(p.atten_dropout_prob)
    self.create_child('atten_dropout', **dropout)
    if self._is_rotary:
      rotary = p.rotary_position_emb_tpl
      self.create_child('rotary_position_emb', rotary, embedding_dims=width)

  def __call__(
    self, inputs: jax.Array, context: Context | None = None
  ) -> jax.Array:
    """Computes attention over a whole sequence, [B, L, D].

    Args:
      inputs: Sequence of the queries, [B, L, D].
      context: Other inputs. If None, all are None.

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
    dropout = self._dropout(context.rows)
    mixed, _ = transformer.causal_attention(
      q, k, v, p.attention_impl, segments, p.atten_logit_cap, dropout
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
    self, inputs: jax.Array, cache: Cache, start: int | jax.Array
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
    return self.post(mixed), dict(zip(('key', 'value'), extended, strict=True))

  def keys_and_values(self, source: jax.Array) -> Cache:
    """Returns keys and values of a sequence [B, M, D], for `attend_to`."""
    return {
      'key': self._split(self.key(source)),
      'value': self._split(self.value(source)),
    }

  def attend_to(
    self, inputs: jax.Array, cache: Cache, context: Context
  ) -> jax.Array:
    """Computes cross-attention, [B, L, D].

    Args:
      inputs: Sequence of the queries, [B, L, D].
      cache: Result of `keys_and_values`.
      context: Other inputs, of which `source_seen` and `rows` are used.
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
      cap=self.atten_logit_cap,
      is_causal=False,
      seen_BM=seen,
      dropout=self._dropout(rows),
    )
    return self.post(mixed)

  def _dropout(self, rows: jax.Array | None) -> transformer.Dropout:
    if self.do_eval or not self.atten_dropout_prob:
      return None
    return functools.partial(self.atten_dropout, rows_B=rows)

  def _qkv(
    self, x_BLD: jax.Array, position: jax.Array | None
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [B, L, H, K], keys and values [B, L, G, K]."""
    if self._is_one_product:
      parts = transformer.parts(self.combined_qkv(x_BLD))
      q, k, v = (self._split(x) for x in parts)
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

  def _split(self, x_BLHK: jax.Array) -> jax.Array:
    return self.shard(x_BLHK, transformer.HEADS, 'heads')

  def _scale(self, q_BLHK: jax.Array) -> jax.Array:
    return self.per_dim_scale(q_BLHK) if self._is_scaled else q_BLHK
