"""A decoder-only transformer: pure functions over a plain tree of weights.

It applies RMS normalization before each part. By default it has no biases, and
the embedding is also the output layer. The options of `ModelConfig` make it a
Llama, Mistral, Mixtral, Qwen or Gemma; `hf.py` reads and writes their weights.

`weight` creates every weight and names its logical axes. The layers are one
stack of weights with a leading `layers` axis, whether they are scanned,
unrolled or divided among the stages of a pipeline, so you can switch between
the three and keep checkpoints and seeds. `examples/transformer.py` has the
mathematics. `examples/pax` has layers for transformers that these options do
not cover.

Shapes: B batch, L length, D embed, F mlp, H heads, G heads of keys and values,
K head dim, V vocab, N layers, M keys (cached and new), S parts fused into one
product, E experts.
"""

from collections.abc import Callable
import contextvars
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import haiku as hk
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from examples import fp8
from examples import moe
from examples import transformer
from jaxline.parallel import partitioning
from jaxline.parallel import pipeline

Params = dict[str, dict[str, Any]]
Pair = tuple[jax.Array, jax.Array]  # Keys and values.
Cache = Any  # See `empty_cache`.

_CHOICES = {
  'positions': ('rotary', 'learned'),
  'feed_forward': transformer.ACTIVATIONS,
  'attention': transformer.ATTENTIONS,
  'remat': transformer.REMATS,
  'dtype': ('float32', 'bfloat16'),
  'matmul': ('dtype', 'fp8'),
  'router_gate': moe.GATES,
}
# Options that start with one of these need a mixture of experts.
_OF_EXPERTS = ('experts_per_token', 'shared_dim', 'expert_capacity', 'router_')
_STACK = 'layers'  # The repeated layers' module name and leading axis.
# Standard deviation of the initial embeddings and routers. The embedding is
# also the output layer, so small entries make the first logits almost 0. Small
# routers let all experts learn from the start.
_SMALL_STDDEV = 0.02
# Name of the parameter that `moved_biases` updates in place of the optimizer.
_ROUTER_BIAS = 'router_bias'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """The size of the model, and how it is computed.

  Attributes:
    vocab_size: number of tokens.
    num_layers: number of blocks of attention and feed-forward.
    embed_dim: width of the residual stream.
    num_heads: attention heads.
    num_kv_heads: heads of keys and values, each shared by `num_heads /
      num_kv_heads` heads of queries; None means `num_heads`.
    head_size: width of a head; None means `embed_dim / num_heads`.
    mlp_dim: hidden width of the feed-forward part.
    max_length: the longest sequence, in tokens.
    positions: 'rotary' rotates queries and keys; 'learned' adds a vector to the
      embedding.
    normalize_embedding: whether to normalize the input of the first layer too.
      If not, it is as small as the entries of the embedding.
    bigram_rows: rows of a second embedding, which a hash of a token and the
      token before it selects, and which is added to the first; 0 means none.
    rotary_base: base of the rotary periods; the longest is nearly 2 pi times
      this number.
    rotary_scaling: stretches these periods: see `transformer.rotary_angles`.
    windows: how many positions each layer's queries see, up to and including
      their own; 0 means all. The layers repeat the pattern: (4096, 0) limits
      every other layer, starting with the first.
    local_rotary_base: `rotary_base` of the layers with a window, which then
      ignore `rotary_scaling`. None means that they use the base and the scaling
      of the other layers.
    qkv_bias: whether queries, keys and values have biases.
    qk_norm: whether to normalize queries and keys.
    query_scale: factor of the attention scores; None means K**-0.5.
    attention_cap: limit of the scores: see `transformer.cap`; 0 means none.
    logits_cap: limit of the logits; 0 means none.
    norm_epsilon: number that normalization adds to the mean square.
    norm_offset: whether the weights hold the scales of normalization minus 1.
    post_norms: whether to normalize the output of each part too.
    embedding_scale: whether to multiply embeddings by sqrt(D).
    tie_embeddings: whether the embedding is also the output layer.
    feed_forward: activation between the two products: 'gelu' (in its tanh
      form), or 'swiglu' and 'geglu', in which SiLU or GELU gates the product
      with a third matrix.
    num_experts: number of feed-forward parts in a layer. The router sends each
      token to some of them: see `moe.py`.
    experts_per_token: number of experts that process each token.
    shared_dim: hidden width of an additional part that processes all tokens;
      None means that there is none.
    expert_capacity: limit of an expert's tokens: see `moe.Options.capacity`. An
      expert adds nothing to the tokens that it drops. 0 drops no token, and
      decoding with a cache never drops any.
    router_gate: function of the router's logits: 'softmax' or 'sigmoid'.
    router_normalize: whether to divide a token's gates by their sum.
    router_scale: factor of the gates.
    router_bias_rate: how far a step moves the biases of the experts: see
      `moe.moved_bias`. 0 means that there are no biases.
    router_balance_loss: weight of `moe.Stats.balance` in the training loss.
    router_z_loss: weight of `moe.Stats.z` in the training loss.
    attention: implementation of attention: see `transformer.causal_attention`.
      Decoding with a cache always uses 'einsum'.
    scan_layers: whether to loop over the layers, so that compile time does not
      grow with depth. A few layers run faster unrolled, because XLA then fuses
      across them.
    remat: what the backward pass recomputes instead of storing: 'nothing',
      'dots' (everything except products with weights), 'full' (each whole
      layer) or 'offload' (as 'dots', but the products are kept in host memory).
    pipeline_stages: number of groups of layers that work at the same time, each
      on some of the rows (`pipeline.pipeline`); 1 means no pipeline. Otherwise,
      set it to the size of the mesh along `stage`, or to a multiple of it.
    pipeline_microbatches: number of parts into which the pipeline cuts the
      rows. More parts make the bubble smaller: see docs/sharding.md.
    pipeline_repeats: how often each part passes through all stages.
    dropout: dropout rate of the embedding and of each residual branch.
    dtype: type of the computation. Weights, normalization, softmax and loss
      stay float32.
    matmul: arithmetic of products with weights: 'dtype', or 'fp8'
      (docs/reference/fp8.md). Attention and the logits stay in `dtype`.
    loss_chunks: number of pieces into which the loss cuts the sequence. Only
      the logits of one piece exist at a time, which saves memory with large
      vocabularies.
  """

  vocab_size: int
  num_layers: int
  embed_dim: int
  num_heads: int
  mlp_dim: int
  max_length: int
  num_kv_heads: int | None = None
  head_size: int | None = None
  positions: str = 'rotary'
  rotary_base: float = 1e4
  rotary_scaling: tuple[float, ...] = ()
  windows: tuple[int, ...] = ()
  local_rotary_base: float | None = None
  qkv_bias: bool = False
  qk_norm: bool = False
  query_scale: float | None = None
  attention_cap: float = 0.0
  logits_cap: float = 0.0
  norm_epsilon: float = 1e-6
  norm_offset: bool = False
  post_norms: bool = False
  embedding_scale: bool = False
  tie_embeddings: bool = True
  normalize_embedding: bool = False
  bigram_rows: int = 0
  feed_forward: str = 'gelu'
  num_experts: int = 1
  experts_per_token: int = 1
  shared_dim: int | None = None
  expert_capacity: float = 0.0
  router_gate: str = 'softmax'
  router_normalize: bool = True
  router_scale: float = 1.0
  router_bias_rate: float = 0.0
  router_balance_loss: float = 0.0
  router_z_loss: float = 0.0
  attention: str = 'einsum'
  scan_layers: bool = False
  remat: str = 'nothing'
  pipeline_stages: int = 1
  pipeline_microbatches: int = 1
  pipeline_repeats: int = 1
  dropout: float = 0.0
  dtype: str = 'float32'
  matmul: str = 'dtype'
  loss_chunks: int = 1

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      # Options of compiled programs are hashed, so they must not be lists.
      if isinstance(value, list):
        object.__setattr__(self, field.name, tuple(value))
      may_be_0 = field.default == 0
      least = 0 if may_be_0 else 1
      if field.type is int and (type(value) is not int or value < least):
        raise ValueError(
          f'{field.name} must be {"0 or " * may_be_0}a positive integer; got'
          f' {value!r}.'
        )
      if field.name in _CHOICES and value not in _CHOICES[field.name]:
        raise ValueError(
          f'{field.name} must be one of {_CHOICES[field.name]}; got {value!r}.'
        )
    if self.head_size is None and self.embed_dim % self.num_heads:
      raise ValueError(
        f'num_heads must divide embed_dim; got {self.num_heads} heads for'
        f' {self.embed_dim}. Change either, or set head_size.'
      )
    if self.num_heads % self.kv_heads:
      raise ValueError(
        f'num_kv_heads must divide num_heads; got {self.kv_heads} for'
        f' {self.num_heads}.'
      )
    if len(self.rotary_scaling) not in (0, 1, 4):
      raise ValueError(
        'rotary_scaling must be (), (factor,) or (factor, low, high, length);'
        f' got {self.rotary_scaling}.'
      )
    if self.attention == 'flash' and len(set(self.windows)) > 1:
      raise ValueError(
        f"attention='flash' needs one window for all layers; got"
        f" {self.windows}. Set attention='einsum'."
      )
    if self.positions == 'rotary' and self.head_dim % 2:
      raise ValueError(
        'Rotary positions need an even embed_dim / num_heads or head_size; got'
        f" {self.head_dim}. Change these, or set positions='learned'."
      )
    if self.matmul == 'fp8' and self.pipeline_stages > 1:
      raise ValueError(
        "matmul='fp8' returns the next scales in place of gradients; a pipeline"
        f' of {self.pipeline_stages} stages would add them up over'
        " microbatches. Set pipeline_stages=1, or matmul='dtype'."
      )
    self._check_experts()
    pipeline.check_sizes(
      self.num_layers,
      self.pipeline_stages,
      self.pipeline_microbatches,
      self.pipeline_repeats,
    )
    if self.pipeline_stages == 1 and (
      self.pipeline_microbatches > 1 or self.pipeline_repeats > 1
    ):
      raise ValueError(
        f'pipeline_microbatches={self.pipeline_microbatches} and'
        f' pipeline_repeats={self.pipeline_repeats} have no effect with'
        ' pipeline_stages=1. Set more stages, or these to 1.'
      )
    if not 0 <= self.dropout < 1:
      raise ValueError(f'dropout must lie in [0, 1); got {self.dropout!r}.')

  def _check_experts(self) -> None:
    if self.experts_per_token > self.num_experts:
      raise ValueError(
        f'experts_per_token must be at most num_experts, {self.num_experts};'
        f' got {self.experts_per_token}.'
      )
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not field.name.startswith(_OF_EXPERTS) or value == field.default:
        continue
      if self.num_experts == 1:
        raise ValueError(
          f'{field.name}={value!r} has no effect with num_experts=1. Set more'
          f' experts, or {field.name}={field.default!r}.'
        )
      # Values that equal a default of 0 were skipped above.
      is_number = isinstance(value, int | float) and field.type is not bool
      if is_number and not 0 < value < math.inf:
        raise ValueError(
          f'{field.name} must be a positive number, or its default'
          f' {field.default!r}; got {value!r}.'
        )
    if self.num_experts > 1 and self.pipeline_stages > 1:
      raise ValueError(
        f'A pipeline of {self.pipeline_stages} stages does not support'
        f' num_experts={self.num_experts}. Split the experts over the mesh axis'
        ' `expert`, and set pipeline_stages=1.'
      )
    if self.num_experts > 1 and self.matmul == 'fp8':
      raise ValueError(
        f"matmul='fp8' does not support num_experts={self.num_experts}. Set"
        " matmul='dtype'."
      )

  @property
  def head_dim(self) -> int:
    """K, the width of an attention head."""
    return self.head_size or self.embed_dim // self.num_heads

  @property
  def kv_heads(self) -> int:
    """G, the number of heads of keys and values."""
    return self.num_kv_heads or self.num_heads

  @property
  def num_branches(self) -> int:
    """Number of parts that add to the residual stream."""
    return 2 * self.num_layers

  @property
  def routing(self) -> moe.Options:
    """How tokens are routed to experts."""
    return moe.Options(
      per_token=self.experts_per_token,
      gate=self.router_gate,
      normalize=self.router_normalize,
      scale=self.router_scale,
      capacity=self.expert_capacity,
    )

  @property
  def cache_axis(self) -> int:
    """The axis of the rows in the arrays of `empty_cache`."""
    return 1 if self.scan_layers else 0


# Logical axes by (module, name) of the weights that `init` is creating.
_declared: contextvars.ContextVar[dict[tuple[str, str], tuple] | None] = (
  contextvars.ContextVar('declared_axes', default=None)
)


def weight(
  name: str,
  shape: tuple[int, ...],
  axes: tuple[str | None, ...],
  init: hk.initializers.Initializer,
) -> jax.Array:
  """Creates or gets a float32 weight of the current Haiku module.

  Args:
    name: name of the weight in the module.
    shape: shape of the weight; in the repeated layers, its shape in one layer.
    axes: a logical axis name (`partitioning.AXIS_NAMES`) or None for each
      dimension.
    init: initializer, such as `jnp.ones`.

  Returns:
    The weight.
  """
  declared = _declared.get()
  if declared is not None:
    declared[hk.experimental.current_name(), name] = axes
  return hk.get_parameter(name, shape, jnp.float32, init)


def _matrix_init(terms: int) -> hk.initializers.Initializer:
  """Returns the initializer of a matrix whose outputs sum `terms` products."""
  return hk.initializers.RandomNormal(terms**-0.5)


def _dot(
  config: ModelConfig, name: str, spec: str, x: jax.Array, w: jax.Array
) -> jax.Array:
  """Multiplies an activation by a weight, in the activation's dtype.

  It computes all such products except the logits.

  Args:
    config: the model.
    name: name of the product, unique in its module.
    spec: as for `jnp.einsum`.
    x: the activation.
    w: the float32 weight.
  """
  if config.matmul == 'fp8':
    return checkpoint_name(fp8.einsum(name, spec, x, w), transformer.DOT)
  return transformer.dot(spec, x, w)


class Norm(hk.Module):
  """Divides the last axis by its root mean square and scales it."""

  def __init__(self, config: ModelConfig, name: str | None = None):
    super().__init__(name=name)
    self._config = config

  def __call__(self, x: jax.Array, axis: str = 'embed') -> jax.Array:
    """Normalizes `x` in float32; `axis` is the logical name of its axis."""
    c = self._config
    init = jnp.zeros if c.norm_offset else jnp.ones
    scale = weight('scale', x.shape[-1:], (axis,), init)
    return transformer.normalize(
      x,
      scale=1 + scale if c.norm_offset else scale,
      epsilon=c.norm_epsilon,
      centered=False,
    )


class Attention(hk.Module):
  """Causal multi-head self-attention.

  One product gives q, k and v. With fewer heads of keys and values, one product
  gives q, and a second one gives k and v.
  """

  def __init__(self, config: ModelConfig, name: str = 'attention'):
    super().__init__(name=name)
    self._config = config

  def __call__(
    self,
    x_BLD: jax.Array,
    angles: jax.Array | Pair | None,
    cache: Pair | None = None,
    start: int | jax.Array = 0,
    segment_ids_BL: jax.Array | None = None,
    window: int | jax.Array = 0,
  ) -> tuple[jax.Array, Pair | None]:
    """Returns [B, L, D], and the cache with the new keys and values.

    Args:
      x_BLD: normalized input, at the positions from `start` on.
      angles: rotary angles of these positions, as for `transformer.rotate`;
        None leaves q and k as they are.
      cache: keys and values [B, G, M, K] of the positions before `start`.
      start: position of the first token; [B] if it differs between rows.
      segment_ids_BL: the document of each token; only without a cache.
      window: as for `transformer.attend`.
    """
    c = self._config
    if c.kv_heads == c.num_heads:
      q, k, v = transformer.parts(self._project('qkv', x_BLD, c.num_heads, 3))
    else:
      q = self._project('q', x_BLD, c.num_heads)
      k, v = transformer.parts(self._project('kv', x_BLD, c.kv_heads, 2))
    w_HKD = weight(
      'out',
      (c.num_heads, c.head_dim, c.embed_dim),
      ('heads', 'kv', 'embed'),
      _matrix_init(c.num_heads * c.head_dim * c.num_branches),
    )
    q, k, v = (partitioning.constrain(x, transformer.HEADS) for x in (q, k, v))
    if c.qk_norm:
      q, k = Norm(c, 'q_norm')(q, 'kv'), Norm(c, 'k_norm')(k, 'kv')
    if angles is not None:
      q, k = transformer.rotate(q, angles), transformer.rotate(k, angles)
    mixed, cache = transformer.causal_attention(
      q,
      k,
      v,
      c.attention,
      segment_ids_BL,
      cap=c.attention_cap,
      cache=cache,
      start=start,
      window=window,
      scale=c.query_scale,
    )
    return _dot(c, 'out', 'BLHK,HKD->BLD', mixed, w_HKD), cache

  def _project(
    self, name: str, x_BLD: jax.Array, heads: int, parts: int | None = None
  ) -> jax.Array:
    """Returns [B, L, S, heads, K] with S `parts`, or without the axis S."""
    c = self._config
    fused = () if parts is None else (parts,)
    unnamed = (None,) * len(fused)
    w = weight(
      name,
      (c.embed_dim, *fused, heads, c.head_dim),
      ('embed', *unnamed, 'heads', 'kv'),
      _matrix_init(c.embed_dim),
    )
    s = 'S' if fused else ''
    out = _dot(c, name, f'BLD,D{s}HK->BL{s}HK', x_BLD, w)
    if c.qkv_bias:
      shape, axes = (*fused, heads, c.head_dim), (*unnamed, 'heads', 'kv')
      bias = weight(f'{name}_bias', shape, axes, jnp.zeros)
      out += bias.astype(out.dtype)[None, None]
    return out


class FeedForward(hk.Module):
  """The position-wise feed-forward part: D -> F -> D.

  Attributes:
    dim: F.
  """

  def __init__(self, config: ModelConfig, dim: int, name: str = 'feed_forward'):
    super().__init__(name=name)
    self._config = config
    self.dim = dim

  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    """Returns [B, L, D] for a normalized [B, L, D]."""
    c = self._config
    parts = transformer.num_parts(c.feed_forward)
    w_DSF = weight(
      'in',
      (c.embed_dim, parts, self.dim),
      ('embed', None, 'mlp'),
      _matrix_init(c.embed_dim),
    )
    w_FD = weight(
      'out',
      (self.dim, c.embed_dim),
      ('mlp', 'embed'),
      _matrix_init(self.dim * c.num_branches),
    )
    hidden = _dot(c, 'in', 'BLD,DSF->BLSF', x_BLD, w_DSF)
    hidden_BLF = transformer.activate(c.feed_forward, hidden)
    hidden_BLF = partitioning.constrain(hidden_BLF, transformer.HIDDEN)
    return _dot(c, 'out', 'BLF,FD->BLD', hidden_BLF, w_FD)


class Experts(hk.Module):
  """A mixture of experts, and the part for all tokens, if there is one."""

  def __init__(self, config: ModelConfig, name: str = 'experts'):
    super().__init__(name=name)
    self._config = config

  def __call__(
    self,
    x_BLD: jax.Array,
    drops: bool = True,
    mask_BL: jax.Array | None = None,
  ) -> tuple[jax.Array, moe.Stats]:
    """Returns [B, L, D] for a normalized [B, L, D], and statistics.

    Args:
      x_BLD: the input.
      drops: whether `expert_capacity` limits the tokens of an expert.
      mask_BL: as for `moe.route`.
    """
    c = self._config
    options = c.routing
    if not drops:
      options = dataclasses.replace(options, capacity=0.0)
    num, dim = c.num_experts, c.embed_dim
    router_DE = weight(
      'router',
      (dim, num),
      ('embed', None),
      hk.initializers.RandomNormal(_SMALL_STDDEV),
    )
    bias_E = None
    if c.router_bias_rate:
      bias_E = weight(_ROUTER_BIAS, (num,), (None,), jnp.zeros)
    parts = transformer.num_parts(c.feed_forward)
    in_EDSF = weight(
      'in', (num, dim, parts, c.mlp_dim), moe.IN_AXES, _matrix_init(dim)
    )
    terms = c.mlp_dim * c.num_branches
    out_EFD = weight(
      'out', (num, c.mlp_dim, dim), moe.OUT_AXES, _matrix_init(terms)
    )
    routed = moe.route(x_BLD, router_DE, options, bias_E, mask_BL)
    ids, gates, stats = routed
    y_BLD = moe.mix(
      x_BLD, ids, gates, in_EDSF, out_EFD, c.feed_forward, options
    )
    if c.shared_dim:
      y_BLD += FeedForward(c, c.shared_dim, 'shared')(x_BLD)
    return y_BLD, stats


class Embedding(hk.Module):
  """The tables of tokens and pairs, and the output layer's if it is untied."""

  def __init__(self, config: ModelConfig, name: str = 'embedding'):
    super().__init__(name=name)
    self._config = config

  def __call__(
    self,
    tokens_BL: jax.Array,
    start: int | jax.Array,
    positions_BL: jax.Array | None = None,
    before_BL: jax.Array | None = None,
  ) -> tuple[jax.Array, transformer.Head]:
    """Returns the embedded tokens [B, L, D], and the output layer.

    Args:
      tokens_BL: integers below `vocab_size`.
      start: position of the first token; [B] if it differs between rows.
      positions_BL: position of each token; None counts from `start`.
      before_BL: the token before each; only read with `bigram_rows`.
    """
    c = self._config
    init = hk.initializers.RandomNormal(_SMALL_STDDEV)
    table_VD = weight(
      'tokens', (c.vocab_size, c.embed_dim), ('vocab', 'embed'), init
    )
    x_BLD = transformer.rows_of(table_VD, tokens_BL)
    if c.bigram_rows:
      # A pair that was not seen in training adds nothing.
      table_RD = weight(
        'bigrams', (c.bigram_rows, c.embed_dim), ('vocab', 'embed'), jnp.zeros
      )
      pairs_BL = transformer.hash_pairs(before_BL, tokens_BL, c.bigram_rows)
      x_BLD += transformer.rows_of(table_RD, pairs_BL)
    if c.embedding_scale:  # Round the factor, as Gemma does.
      x_BLD *= jnp.asarray(c.embed_dim**0.5, c.dtype).astype(jnp.float32)
    if c.positions == 'learned':
      length = tokens_BL.shape[1]
      table_MD = weight(
        'positions', (c.max_length, c.embed_dim), (None, 'embed'), init
      )
      if positions_BL is None and jnp.ndim(start):
        positions_BL = transformer.positions_from(start, length)
      if positions_BL is None:
        x_BLD += jax.lax.dynamic_slice_in_dim(table_MD, start, length)[None]
      else:
        x_BLD += table_MD[positions_BL]
    if c.normalize_embedding:
      x_BLD = Norm(c)(x_BLD)
    if not c.tie_embeddings:
      table_VD = weight('output', table_VD.shape, ('vocab', 'embed'), init)
    return x_BLD.astype(c.dtype), (table_VD, None)


def _forward(
  config: ModelConfig,
  tokens_BL: jax.Array,
  *,
  is_training: bool,
  cache: Cache | None = None,
  start: int | jax.Array = 0,
  segment_ids_BL: jax.Array | None = None,
  positions_BL: jax.Array | None = None,
  mask_BL: jax.Array | None = None,
) -> tuple[jax.Array, transformer.Head, Any]:
  """Runs everything except the output layer; a Haiku function.

  Args:
    config: the model.
    tokens_BL: integers below `vocab_size`, at the positions from `start` on.
    is_training: whether to apply dropout.
    cache: result of `empty_cache`; needs weights from `split_layers`.
    start: position of the first token; [B] if it differs between rows.
    segment_ids_BL: the document of each token; None means one document per row.
    positions_BL: position of each token in its document, for learned positions;
      None counts from `start`. (Rotary positions depend only on differences,
      which are the same.)
    mask_BL: False for padding, which the experts' statistics leave out. None
      means that there is no padding.

  Returns:
    The normalized output [B, L, D]; the output layer; and the new cache or,
    without a cache, the statistics of the layers' routers, [N, ...].
  """
  batch, length = tokens_BL.shape
  if length > config.max_length:
    raise ValueError(
      f'Got sequences of {length} tokens; max_length is {config.max_length}.'
      ' Cut them, or raise max_length.'
    )
  drops = is_training and config.dropout > 0
  key = hk.next_rng_key() if drops else None
  rows_B = jnp.arange(batch)

  def drop(
    x: jax.Array, place: int | jax.Array, rows_B: jax.Array
  ) -> jax.Array:
    return transformer.drop(x, key, config.dropout, rows_B, place)

  def layer(
    x: jax.Array,
    number: int | jax.Array,
    segment_ids_BL: jax.Array | None,
    rows_B: jax.Array,
    *cache: Any,
  ) -> tuple[jax.Array, Pair | moe.Stats | None]:
    window, angles = position_of(number)
    mixed, new_cache = Attention(config)(
      Norm(config, 'attention_norm')(x),
      angles,
      cache or None,
      start,
      segment_ids_BL,
      window,
    )
    if config.post_norms:
      mixed = Norm(config, 'attention_post_norm')(mixed)
    x += drop(mixed, 2 * number + 1, rows_B)
    normalized, stats = Norm(config, 'feed_forward_norm')(x), None
    if config.num_experts > 1:
      out, stats = Experts(config)(normalized, not cache, mask_BL)
    else:
      out = FeedForward(config, config.mlp_dim)(normalized)
    if config.post_norms:
      out = Norm(config, 'feed_forward_post_norm')(out)
    x += drop(out, 2 * number + 2, rows_B)
    x = partitioning.constrain(x, transformer.BETWEEN_BLOCKS)
    return x, new_cache if cache else stats

  room = None if cache is None else jax.tree.leaves(cache)[0].shape[-2]
  position_of = _positions_of_layers(config, start, length, room)
  seen = before_BL = None
  if config.bigram_rows:
    if cache is not None:
      seen, cache = cache
      seen = _extend_seen(seen, tokens_BL, start)
    before_BL = _before(config, tokens_BL, start, segment_ids_BL, seen)
  x_BLD, head = Embedding(config)(tokens_BL, start, positions_BL, before_BL)
  x_BLD = partitioning.constrain(
    drop(x_BLD, 0, rows_B), transformer.BETWEEN_BLOCKS
  )
  # Training and evaluation are pipelined; decoding is not.
  more: Any = None
  if cache is not None:
    x_BLD, more = _decode_layers(config, layer, x_BLD, cache, rows_B)
    more = more if seen is None else (seen, more)
  elif config.pipeline_stages > 1 and not hk.running_init():
    x_BLD = _pipelined(config, layer, x_BLD, segment_ids_BL, rows_B)
  else:
    one = lambda x, number: layer(x, number, segment_ids_BL, rows_B)
    if config.remat != 'nothing':
      one = hk.remat(one, policy=transformer.remat_policy(config.remat))
    x_BLD, more = hk.layer_stack(
      config.num_layers,
      with_per_layer_inputs=True,
      unroll=1 if config.scan_layers else config.num_layers,
      name=_STACK,
    )(one)(x_BLD, jnp.arange(config.num_layers))
  return Norm(config, 'final_norm')(x_BLD), head, more


def _extend_seen(
  seen: jax.Array, tokens_BL: jax.Array, start: int | jax.Array
) -> jax.Array:
  """Writes new tokens into the cache of tokens; see `empty_cache`."""
  shape = seen.shape
  seen_B1M1 = seen.reshape(shape[-4:])
  new_BL11 = tokens_BL[..., None, None].astype(seen.dtype)
  return transformer.update_cache(seen_B1M1, new_BL11, start).reshape(shape)


def _before(
  config: ModelConfig,
  tokens_BL: jax.Array,
  start: int | jax.Array,
  segment_ids_BL: jax.Array | None,
  seen: jax.Array | None,
) -> jax.Array:
  """Returns the token before each, or V for the first one of a document.

  Args:
    config: the model.
    tokens_BL: integers below V, at the positions from `start` on.
    start: position of the first token; [B] if it differs between rows.
    segment_ids_BL: the document of each token; None means one document per row.
    seen: the tokens of all positions; None if there are none before `start`.
  """
  batch, length = tokens_BL.shape
  none = tokens_BL.dtype.type(config.vocab_size)
  first_B1 = jnp.full((batch, 1), none)
  if seen is not None:
    start_B1 = jnp.broadcast_to(jnp.reshape(start, (-1, 1)), (batch, 1))
    tokens_BM = seen.reshape(batch, -1).astype(tokens_BL.dtype)
    last_B1 = jnp.take_along_axis(tokens_BM, start_B1 - 1, 1, mode='clip')
    first_B1 = jnp.where(start_B1 > 0, last_B1, first_B1)
  # A prompt of one token leaves none for the first call.
  before_BL = jnp.concatenate([first_B1, tokens_BL], axis=1)[:, :length]
  if segment_ids_BL is not None:
    is_same = segment_ids_BL[:, 1:] == segment_ids_BL[:, :-1]
    is_same_BL = jnp.pad(is_same, ((0, 0), (1, 0)))
    before_BL = jnp.where(is_same_BL, before_BL, none)
  return before_BL


def _positions_of_layers(
  config: ModelConfig,
  start: int | jax.Array,
  length: int,
  room: int | None,
) -> Callable[[Any], tuple[int | jax.Array, Any]]:
  """Returns a function that maps a layer's number to its window and angles.

  Args:
    config: the model.
    start: position of the first token; [B] if it differs between rows.
    length: L.
    room: M, the number of positions of the cache; None without a cache.
  """
  windows = config.windows or (0,)
  positions = transformer.positions_from(start, length)

  def rotary_angles_for(*args: Any) -> Any:
    if room is None:
      return transformer.rotary_angles(positions, config.head_dim, *args)
    # XLA recomputes cosines for each head of each row, unless they are
    # constants. Training does not use this path: its bits would change.
    with jax.ensure_compile_time_eval():
      angles = transformer.rotary_angles(
        jnp.arange(room), config.head_dim, *args
      )
      at = transformer.positions_from(start, length)
      return tuple(
        jnp.take(x, at, axis=0, mode='clip')
        for x in (jnp.cos(angles), jnp.sin(angles))
      )

  angles = local = None
  if config.positions == 'rotary':
    angles = local = rotary_angles_for(
      config.rotary_base, config.rotary_scaling
    )
    if config.local_rotary_base:
      local = rotary_angles_for(config.local_rotary_base)

  def position_of(number: Any) -> tuple[int | jax.Array, Any]:
    i = number % len(windows)
    if isinstance(i, int) or len(set(windows)) == 1:
      window = windows[i if isinstance(i, int) else 0]
      return window, local if window else angles
    # Scanned layers share one program, which takes the window as an array.
    window = jnp.array([x or config.max_length for x in windows])[i]
    if local is angles:
      return window, angles
    has_window = jnp.array([x > 0 for x in windows])[i]
    either = functools.partial(jnp.where, has_window)
    return window, jax.tree.map(either, local, angles)

  return position_of


def _decode_layers(
  config: ModelConfig,
  layer: Callable[..., tuple[jax.Array, Any]],
  x_BLD: jax.Array,
  cache: Cache,
  rows_B: jax.Array,
) -> tuple[jax.Array, Cache]:
  """Runs the layers on new tokens; call it inside a Haiku function."""
  run = hk.transform(layer).apply
  weights = _of_layers(hk.get_params())

  def extend(x_BLD: jax.Array, of_layer: Any) -> tuple[jax.Array, Any]:
    weights, pair, number = of_layer
    return run(weights, None, x_BLD, number, None, rows_B, *pair)

  if config.scan_layers:
    numbers = jnp.arange(config.num_layers)
    return jax.lax.scan(extend, x_BLD, (weights, cache, numbers))
  extended = []
  for i, pair in enumerate(cache):
    of_layer = {
      name: {key: value[i] for key, value in leaves.items()}
      for name, leaves in weights.items()
    }
    x_BLD, pair = extend(x_BLD, (of_layer, pair, i))
    extended.append(pair)
  return x_BLD, tuple(extended)


def _of_layers(params: Any) -> dict[str, Any]:
  """Returns the weights of the layers, by their names in a single layer."""
  return {
    name.removeprefix(f'{_STACK}/'): leaves
    for name, leaves in params.items()
    if name.startswith(f'{_STACK}/')
  }


def _pipelined(
  config: ModelConfig,
  layer: Callable[..., tuple[jax.Array, Any]],
  x_BLD: jax.Array,
  segment_ids_BL: jax.Array | None,
  rows_B: jax.Array,
) -> jax.Array:
  """Runs the layers as a pipeline; call it inside a Haiku function."""
  run = hk.transform(layer).apply
  axes = _of_layers(_axes(config))
  weights = {
    name: {
      key: partitioning.Logical(value, axes[name][key])
      for key, value in leaves.items()
    }
    for name, leaves in _of_layers(hk.get_params()).items()
  }

  def run_layer(
    weights: Any, number: jax.Array, x_BLD: jax.Array, beside: Any
  ) -> jax.Array:
    return run(weights, None, x_BLD, number, *beside)[0]

  return transformer.pipelined(
    run_layer,
    weights,
    x_BLD,
    (segment_ids_BL, rows_B),
    num_stages=config.pipeline_stages,
    num_microbatches=config.pipeline_microbatches,
    num_repeats=config.pipeline_repeats,
    unroll=not config.scan_layers,
    remat=config.remat,
  )


@functools.cache
def _axes(config: ModelConfig) -> dict[str, dict[str, tuple]]:
  """Returns the logical axes of each weight."""
  boxed = jax.eval_shape(lambda: init(jax.random.key(0), config))
  return jax.tree.map(lambda x: x.axes, boxed, is_leaf=partitioning.is_logical)


@functools.cache
def _transformed(config: ModelConfig) -> hk.Transformed:
  return hk.transform(functools.partial(_forward, config))


def init(rng: jax.Array, config: ModelConfig) -> Params:
  """Creates the weights.

  Args:
    rng: a key, raw or typed.
    config: the model.

  Returns:
    Haiku's two-level dict, in which each leaf is a `partitioning.Logical` with
    a float32 array. Call `partitioning.unbox` on it for the other functions.
  """
  declared: dict[tuple[str, str], tuple] = {}
  token = _declared.set(declared)
  try:
    params = _transformed(config).init(
      rng, jnp.zeros((1, 1), jnp.int32), is_training=False
    )
  finally:
    _declared.reset(token)

  def box(module: str, name: str, value: jax.Array) -> partitioning.Logical:
    # Haiku creates the layers in a separate context, which does not know that
    # they are stacked.
    inner = module.removeprefix(f'{_STACK}/')
    stacked = () if inner == module else (_STACK,)
    if fp8.is_state(name):  # It is small, so only `layers` may be split.
      unnamed = (None,) * (value.ndim - len(stacked))
      return partitioning.Logical(value, (*stacked, *unnamed))
    if (inner, name) not in declared:
      raise ValueError(
        f'The weight {module}/{name} has no logical axes. Create it with'
        ' `weight`, not with `hk.get_parameter`.'
      )
    return partitioning.Logical(value, (*stacked, *declared[inner, name]))

  return {
    module: {name: box(module, name, value) for name, value in leaves.items()}
    for module, leaves in hk.data_structures.to_mutable_dict(params).items()
  }


def apply(
  params: Params,
  tokens_BL: jax.Array,
  config: ModelConfig,
  *,
  rng: jax.Array | None = None,
  is_training: bool = False,
) -> jax.Array:
  """Returns float32 logits [B, L, V] for each position's next token.

  Args:
    params: unboxed weights.
    tokens_BL: integers below `vocab_size`.
    config: the model.
    rng: a key for dropout; needed if the model has dropout and is trained.
    is_training: whether to apply dropout.

  Raises:
    ValueError: the sequence is longer than `max_length`.
  """
  x_BLD, head, _ = _transformed(config).apply(
    params, rng, tokens_BL, is_training=is_training
  )
  return transformer.logits(x_BLD, head, config.logits_cap)


class Loss(NamedTuple):
  """The result of `loss`, in float32.

  Attributes:
    total: summed cross entropy in nats; [B] with `by_row`.
    weight: summed weights; [B] with `by_row`.
    routing: statistics of each layer's router, [N, ...]; None without experts.
  """

  total: jax.Array
  weight: jax.Array
  routing: moe.Stats | None


def loss(
  params: Params,
  tokens_BL: jax.Array,
  targets_BL: jax.Array,
  weights_BL: jax.Array,
  config: ModelConfig,
  *,
  rng: jax.Array | None = None,
  is_training: bool = False,
  segment_ids_BL: jax.Array | None = None,
  positions_BL: jax.Array | None = None,
  mask_BL: jax.Array | None = None,
  by_row: bool = False,
) -> Loss:
  """Returns the summed cross entropy, in nats, and the summed weights.

  Their quotient is the mean per token. For the exact mean over several batches
  or devices, sum both first.

  Args:
    params: unboxed weights.
    tokens_BL: the input.
    targets_BL: the token to predict at each position.
    weights_BL: float32; 0 excludes a position. They get no gradient.
    config: the model.
    rng: a key for dropout; needed if the model has dropout and is trained.
    is_training: whether to apply dropout.
    segment_ids_BL: the document of each token, if rows hold several documents;
      they do not see each other. None means one document per row.
    positions_BL: position of each token in its document.
    mask_BL: as for `moe.route`.
    by_row: whether to sum over each row separately. Such sums have no gradient.

  Raises:
    ValueError: `loss_chunks` does not divide the length, or the sequence is
      longer than `max_length`.
  """
  x_BLD, head, routing = _transformed(config).apply(
    params,
    rng,
    tokens_BL,
    is_training=is_training,
    segment_ids_BL=segment_ids_BL,
    positions_BL=positions_BL,
    mask_BL=mask_BL,
  )
  nats = transformer.chunked_cross_entropy(
    x_BLD,
    head,
    targets_BL,
    weights_BL,
    chunks=config.loss_chunks,
    cap=config.logits_cap,
  )
  weights_BL = jax.lax.stop_gradient(weights_BL)
  if by_row:
    total_B = (nats.nats_BL * weights_BL).sum(axis=1)
    return Loss(total_B, weights_BL.sum(axis=1), routing)
  return Loss(nats.total, weights_BL.sum(), routing)


def router_loss(routing: moe.Stats, config: ModelConfig) -> jax.Array:
  """Returns the weighted losses of the routers, averaged over the layers."""
  return (
    config.router_balance_loss * routing.balance.mean()
    + config.router_z_loss * routing.z.mean()
  )


def split_biases(params: Params) -> tuple[Params, Params]:
  """Splits off the biases of the routers, which the optimizer must not see."""
  biases, weights = hk.data_structures.partition(
    lambda module, name, value: name == _ROUTER_BIAS, params
  )
  return dict(weights), dict(biases)


def moved_biases(biases: Params, counts: Params, config: ModelConfig) -> Params:
  """Returns the biases of the routers after a step: see `moe.moved_bias`."""
  move = functools.partial(moe.moved_bias, rate=config.router_bias_rate)
  return jax.tree.map(move, biases, counts)


def active_weights(params: Params, config: ModelConfig) -> int:
  """Counts the weights that process a token.

  Args:
    params: unboxed weights, or their shapes.
    config: the model.
  """
  total = 0
  for module, leaves in params.items():
    for name, x in leaves.items():
      if name == 'bigrams':
        total += x.shape[1]  # A token reads one row.
        continue
      is_experts = module.endswith('experts') and name in ('in', 'out')
      part = config.num_experts if is_experts else 1
      total += x.size // part * (config.experts_per_token if is_experts else 1)
  return total


def log_probs(
  params: Params,
  tokens_BL: jax.Array,
  targets_BL: jax.Array,
  config: ModelConfig,
  **options: Any,
) -> jax.Array:
  """Returns the log-probability of each target, float32 [B, L].

  Its gradient holds the logits of one of `loss_chunks` pieces at a time.
  `options` are arguments of `loss`, such as `rng` and `is_training`.
  """
  options = {'rng': None, 'is_training': False, **options}
  x_BLD, head, _ = _transformed(config).apply(
    params, options.pop('rng'), tokens_BL, **options
  )

  @jax.checkpoint
  def piece(x_BLD: jax.Array, targets_BL: jax.Array) -> jax.Array:
    logits_BLV = transformer.logits(x_BLD, head, config.logits_cap)
    return -transformer.cross_entropy(logits_BLV, targets_BL)

  n = config.loss_chunks
  pieces = zip(jnp.split(x_BLD, n, 1), jnp.split(targets_BL, n, 1), strict=True)
  return jnp.concatenate([piece(*x) for x in pieces], axis=1)


def split_layers(params: Params, config: ModelConfig) -> Params:
  """Splits the stacked weights into one array per layer, for `decode_step`.

  A loop over tokens then does not copy them out of the stack for each token.

  Args:
    params: unboxed weights, or the result of this function.
    config: the model.

  Returns:
    The weights, with a tuple in place of each stacked array. If the layers are
    scanned, `params` unchanged.
  """
  if config.scan_layers:
    return params
  return {
    name: {
      key: tuple(value) if name.startswith(f'{_STACK}/') else value
      for key, value in leaves.items()
    }
    for name, leaves in params.items()
  }


def empty_cache(config: ModelConfig, batch: int, length: int) -> Cache:
  """Creates the cache of `decode_step`: keys and values of all layers.

  Args:
    config: the model.
    batch: B.
    length: M, the number of positions of the prompt and of the decoded tokens.

  Returns:
    Two arrays [B, G, M, K] of `dtype` for each layer. If the layers are
    scanned, two arrays [N, B, G, M, K] for all layers. `config.cache_axis` is
    the axis of B. With `bigram_rows`, a pair: an array of the tokens with the
    axes of keys, of which only B and M are not 1; and these arrays.

  Raises:
    ValueError: the length exceeds `max_length`.
  """
  if length > config.max_length:
    raise ValueError(
      f'Got a cache of {length} positions; max_length is {config.max_length}.'
      ' Decode fewer tokens, or raise max_length.'
    )

  def pair(*layers: int) -> Pair:
    shape = (*layers, batch, config.kv_heads, length, config.head_dim)
    return jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)

  layers: Any = tuple(pair() for _ in range(config.num_layers))
  if config.scan_layers:
    layers = pair(config.num_layers)
  if not config.bigram_rows:
    return layers
  stack = (1,) * config.cache_axis
  return jnp.zeros((*stack, batch, 1, length, 1), jnp.int32), layers


def decode_step(
  params: Params,
  tokens_BL: jax.Array,
  cache: Cache,
  start: int | jax.Array,
  config: ModelConfig,
) -> tuple[jax.Array, Cache]:
  """Runs the model on the next tokens, with a cache of the earlier ones.

  The tokens of row b go to the cache positions `start[b]`, `start[b] + 1` and
  so on. A token does not see later positions. You may therefore pad prompts, if
  the next call starts at the end of each prompt and overwrites the padding.

  Args:
    params: unboxed weights. Call `split_layers` on them once before a loop.
    tokens_BL: integers below `vocab_size`.
    cache: result of `empty_cache`, or the cache of the previous call.
    start: position of the first token, for all rows or [B] for each.
    config: the model.

  Returns:
    Float32 logits [B, L, V] for each position's next token, and the cache.

  Raises:
    ValueError: there are more tokens than `max_length`.
  """
  x_BLD, head, cache = _transformed(config).apply(
    split_layers(params, config),
    None,
    tokens_BL,
    is_training=False,
    cache=cache,
    start=start,
  )
  return transformer.logits(x_BLD, head, config.logits_cap), cache
