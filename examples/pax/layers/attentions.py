"""Attention: self-, cross- and grouped attention, with and without a cache.

Shapes: B batch, L length (queries), M keys, D width, H heads, G heads of keys
and values (each for H / G heads of queries), K head dim, S matrices side by
side in one product.
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

# Keys and values, by these names: [B, M, G, K], or [B, G, M, K] where
# `extend_step` adds to them.
Cache = dict[str, jax.Array]


class Context(NamedTuple):
  """What attention sees beside its input; None is without.

  Attributes:
    segment_ids: the document that each token is of, [B, L]: in self-attention
      none sees another. None is one a row.
    position: of each token, [B, L], or, but in a pipeline, [L] of all rows:
      what rotary positions turn by; None counts from 0.
    seen: bool [B, L]; False takes a key out of self-attention that is not
      causal.
    source: [B, T, D], what cross-attention attends to.
    source_seen: bool [B, T]; False takes a position of it out.
    rows: [B], the rows' numbers in the batch, which dropout depends on; None
      counts from 0, as a pipeline does before it cuts the batch.
  """

  segment_ids: jax.Array | None = None
  position: jax.Array | None = None
  seen: jax.Array | None = None
  source: jax.Array | None = None
  source_seen: jax.Array | None = None
  rows: jax.Array | None = None


class Projection(base_layer.BaseLayer):
  """A product with a weight `w`, and a bias `b`.

  Its `spec` says what is what: in 'BLD,DSHK->BLSHK', D is summed over, and the
  bias is [S, H, K].

  Attributes:
    spec: of the inputs, the weight and the outputs; as for `jnp.einsum`, with
      one letter for each dimension.
    shape: of the weight.
    axes: of the weight; see `base_layer.SplitDims`.
    fan_in_axes: for the initial value; see `base_layer.WeightHParams`.
    fan_out_axes: likewise.
    batch_axes: likewise.
    use_bias: whether there is a bias.
    use_fp8: whether the product is one of 8-bit numbers; see `fp8`.
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
  """Scales each dimension of a head's queries, by 1 where the weight is 0.

  Its variable is `per_dim_scale` [K]; see `transformer.query_scale`.

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

  Of a sequence over itself, by `__call__`, or token by token by `extend_step`;
  or of one over another (`Context.source`), by `__call__`, or by
  `keys_and_values` once and `attend_to` for each part of the queries.

  Attributes:
    input_dim: D, of the queries, the keys and the outputs.
    hidden_dim: H K, where `dim_per_head` does not say K; 0 is `input_dim`.
    num_heads: H.
    num_kv_heads: G, which divides H (Ainslie et al., 2023); None is H.
    dim_per_head: K; None is `hidden_dim` / H.
    use_bias: whether there is a bias in the products with weights.
    atten_logit_cap: c tanh(score / c) takes the place of the scores; 0 leaves
      them. Needs 'einsum' on GPU.
    atten_dropout_prob: part of the softmax's weights that is dropped in
      training. Needs 'einsum'.
    internal_enable_per_dim_scale: whether queries have a `PerDimScale`; None is
      yes unless `num_kv_heads` is set. Praxis's class for that has none.
    use_rotary_position_emb: whether queries and keys are turned by their
      positions.
    combine_qkv: whether queries, keys and values are one product, which is
      faster; where queries have as many heads as these, and are of the same
      sequence.
    is_causal: whether a query sees no later position than its own.
    is_cross_attention: whether keys and values are of another sequence. Then
      nothing is causal, and nothing is turned.
    attention_impl: one of `transformer.ATTENTIONS`, for causal attention
      without a cache: see `transformer.causal_attention`. Other attention is
      'einsum' always.
    proj_tpl: the products with weights.
    rotary_position_emb_tpl: what turns.
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
    # The fans of the initial values are those of Praxis: H counts as inputs, K
    # as outputs, and both are multiplied by D, in `combined_qkv` also by S.
    # Keys and values of one head for all queries are a matrix [D, K] there.
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
    if self._scales_dims:
      self.create_child('per_dim_scale', PerDimScale.HParams(), dim=self._width)
    self.create_child(
      'atten_dropout', **stochastics.dropout(p.atten_dropout_prob)
    )
    if self._turns:
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
        f' for a width of {width}; expected their product, or a multiple of'
        ' num_heads and no dim_per_head.'
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
  def _scales_dims(self) -> bool:
    p = self.hparams
    if p.internal_enable_per_dim_scale is None:
      return p.num_kv_heads is None
    return p.internal_enable_per_dim_scale

  @property
  def _turns(self) -> bool:
    p = self.hparams
    return p.use_rotary_position_emb and not p.is_cross_attention

  @property
  def _is_one_product(self) -> bool:
    """Whether queries, keys and values are one."""
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
    """Attends.

    Args:
      inputs: [B, L, D], what the queries are of.
      context: what else it sees.

    Returns:
      [B, L, D].

    Raises:
      ValueError: this attention is causal, and there is `seen`.
    """
    p = self.hparams
    context = context or Context()
    if p.is_cross_attention:
      cache = self.keys_and_values(context.source)
      return self.attend_to(inputs, cache, context)
    if p.is_causal and context.seen is not None:
      raise ValueError(
        f'{self.module_name} is causal, and takes no `seen`: put padding last.'
      )
    segments = context.segment_ids
    q, k, v = self._qkv(inputs, context.position)
    if not p.is_causal:
      pair = None if segments is None else (segments, segments)
      return self._mixed(q, k, v, context.seen, context.rows, pair)
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
    """Returns room for keys and values, for `extend_step`.

    Args:
      batch: B.
      length: M, as many positions as there shall be.
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
    """Attends causally with the next tokens to themselves and those before.

    Args:
      inputs: [B, L, D], at the positions from `start`.
      cache: of `empty_cache`, or the call before.
      start: of all rows, or [B] of each.

    Returns:
      [B, L, D], and the cache.

    Raises:
      ValueError: this attention is not causal, or not of a sequence over
        itself.
    """
    p = self.hparams
    if not p.is_causal or p.is_cross_attention:
      raise ValueError(
        f'{self.module_name} has is_causal={p.is_causal} and'
        f' is_cross_attention={p.is_cross_attention}; only causal attention of'
        ' a sequence over itself can be extended.'
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
    """Returns what queries attend to, for `attend_to`.

    Args:
      source: [B, M, D].
    """
    return {
      'key': self._split(self.key(source)),
      'value': self._split(self.value(source)),
    }

  def attend_to(
    self, inputs: jax.Array, cache: Cache, context: Context
  ) -> jax.Array:
    """Attends to all of another sequence.

    Args:
      inputs: [B, L, D], what the queries are of.
      cache: of `keys_and_values`.
      context: only `source_seen` and `rows` count.

    Returns:
      [B, L, D].
    """
    q = self._scaled(self._split(self.query(inputs)))
    return self._mixed(q, **cache, seen=context.source_seen, rows=context.rows)

  def _mixed(
    self,
    q_BLHK: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: jax.Array | None,
    rows: jax.Array | None,
    segments: transformer.Segments = None,
  ) -> jax.Array:
    """Returns attention that is not causal, [B, L, D]."""
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
    if self._turns:
      if position is None:
        position = jnp.arange(x_BLD.shape[1])
      q = self.rotary_position_emb(q, position)
      k = self.rotary_position_emb(k, position)
    # After the rotation, as in Praxis: the two dimensions of a pair may have
    # different scales.
    return self._scaled(q), k, v

  def _parts(self, projection: Projection, x_BLD: jax.Array) -> list[jax.Array]:
    """Returns what is side by side in a product."""
    return [self._split(x) for x in transformer.parts(projection(x_BLD))]

  def _split(self, x_BLHK: jax.Array) -> jax.Array:
    return self.shard(x_BLHK, transformer.HEADS, 'heads')

  def _scaled(self, q_BLHK: jax.Array) -> jax.Array:
    if self._scales_dims:
      return self.per_dim_scale(q_BLHK)
    return q_BLHK
