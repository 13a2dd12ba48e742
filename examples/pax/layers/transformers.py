"""Transformers: one layer, stacks of them, language model, encoder-decoder.

Each part of a layer normalises as `norm_policy` says, adds to its input, and by
default normalises first (Xiong et al., 2020). A stack is run in one of three
ways, which compute the same: `StackedTransformer` (unrolled),
`StackedTransformerRepeated` (one loop) or `PipelinedTransformer`.

Each of them, like the one layer, has `__call__` for whole sequences, and for
decoding `empty_cache` and `extend_step`. Axis 1 of all arrays of a cache is the
batch; axis 0 counts the layers of a loop.

Shapes: B batch, L length, D width, F hidden width, H heads, G heads of keys and
values, K head dim, V vocab, S matrices side by side, M positions of a cache, T
length of the source.
"""

from typing import Any

import jax
import jax.numpy as jnp

from examples import fp8
from examples import transformer
from examples.pax import base_layer
from examples.pax import hparams
from examples.pax.layers import activations
from examples.pax.layers import attentions
from examples.pax.layers import embedding_softmax
from examples.pax.layers import normalizations
from examples.pax.layers import repeats
from examples.pax.layers import stochastics
from jaxline import errors

BaseHParams = hparams.BaseHParams
sub_config_field = base_layer.sub_config_field

Context = attentions.Context
CACHE_AXIS = 1  # The batch, in all arrays of a cache.


def _given(**fields: Any) -> dict[str, Any]:
  """Returns those that say something: not 0, and not None."""
  return {name: value for name, value in fields.items() if value}


NORM_POLICIES = ('pre', 'primer_hybrid', 'post', 'post_skip')


class _Residual(base_layer.BaseLayer):
  """A layer of parts, each of which normalises and adds to its input.

  Attributes:
    input_dims: D.
    ln_tpl: what normalises.
    norm_policy: when: 'pre', the input of a part; 'post', its output;
      'primer_hybrid', both, by norms of their own; 'post_skip', the sum of
      input and output.
    residual_dropout_prob: part of what each part adds that is dropped in
      training.
  """

  input_dims: int = 0
  ln_tpl: BaseHParams = sub_config_field(normalizations.LayerNorm.HParams)
  norm_policy: str = 'pre'
  residual_dropout_prob: float = 0.0

  def setup(self) -> None:
    p = self.hparams
    errors.check_names(
      [p.norm_policy], NORM_POLICIES, 'norm_policy', self.module_name
    )
    self._create_norms('layer_norm', p.ln_tpl)
    self.create_child(
      'residual_dropout', **stochastics.dropout(p.residual_dropout_prob)
    )

  def _create_norms(self, name: str, template: BaseHParams) -> None:
    p = self.hparams
    if p.norm_policy == 'primer_hybrid':
      self.create_child(f'pre_{name}', template.clone(), dim=p.input_dims)
      self.create_child(f'post_{name}', template.clone(), dim=p.input_dims)
    else:
      self.create_child(name, template, dim=p.input_dims)

  def _normalised(
    self, x_BLD: jax.Array, place: str, name: str = 'layer_norm'
  ) -> jax.Array:
    """Returns `x_BLD`, normalised if the policy does so at a place.

    Args:
      x_BLD: the input of a part, its output, or their sum.
      place: 'pre', 'post' or 'post_skip': which of these.
      name: of the norm.
    """
    policy = self.hparams.norm_policy
    if policy == place:
      return getattr(self, name)(x_BLD)
    if policy == 'primer_hybrid' and place != 'post_skip':
      return getattr(self, f'{place}_{name}')(x_BLD)
    return x_BLD

  def _output(
    self, x_BLD: jax.Array, rows: jax.Array | None, name: str = 'layer_norm'
  ) -> jax.Array:
    """Returns what a part adds to its input."""
    return self.residual_dropout(self._normalised(x_BLD, 'post', name), rows)


class TransformerFeedForward(_Residual):
  """The position-wise part: normalise, D -> F -> D, and add to the input.

  Attributes:
    hidden_dims: F.
    has_bias: whether there is a bias in both products.
    activation_tpl: what is between them.
    use_gated_activation: whether a second product of the inputs multiplies
      what the activation gives (Shazeer, 2020).
    proj_tpl: the products.
    relu_dropout_prob: part of what the activation gives that is dropped in
      training.
    add_skip_connection: whether the input is added.
    residual_weight: a factor of the output, before that.
  """

  hidden_dims: int = 0
  has_bias: bool = True
  activation_tpl: BaseHParams = sub_config_field(activations.ReLU.HParams)
  use_gated_activation: bool = False
  proj_tpl: BaseHParams = sub_config_field(attentions.Projection.HParams)
  relu_dropout_prob: float = 0.0
  add_skip_connection: bool = True
  residual_weight: float = 1.0

  def setup(self) -> None:
    super().setup()
    p = self.hparams
    # A gate's weight stands beside the other; each starts as if it were alone.
    parts = (2,) if p.use_gated_activation else ()
    side_by_side = 'S' * len(parts)
    self.create_child(
      'ffn_layer1',
      p.proj_tpl.clone(),
      spec=f'BLD,D{side_by_side}F->BL{side_by_side}F',
      shape=(p.input_dims, *parts, p.hidden_dims),
      axes=('embed', *(None for _ in parts), 'mlp'),
      fan_in_axes=(0,),
      batch_axes=tuple(1 for _ in parts),
      use_bias=p.has_bias,
    )
    self.create_child('activation', p.activation_tpl)
    self.create_child(
      'ffn_layer2',
      p.proj_tpl.clone(),
      spec='BLF,FD->BLD',
      shape=(p.hidden_dims, p.input_dims),
      axes=('mlp', 'embed'),
      use_bias=p.has_bias,
    )
    self.create_child(
      'relu_dropout', **stochastics.dropout(p.relu_dropout_prob)
    )

  def __call__(
    self, inputs: jax.Array, rows: jax.Array | None = None
  ) -> jax.Array:
    """Returns [B, L, D].

    Args:
      inputs: [B, L, D].
      rows: see `Context`.
    """
    p = self.hparams
    hidden = self.ffn_layer1(self._normalised(inputs, 'pre'))
    if p.use_gated_activation:
      gate_BLF, value_BLF = transformer.parts(hidden)
      hidden_BLF = self.activation(gate_BLF) * value_BLF
    else:
      hidden_BLF = self.activation(hidden)
    hidden_BLF = self.shard(hidden_BLF, transformer.HIDDEN, 'hidden')
    hidden_BLF = self.relu_dropout(hidden_BLF, rows)
    out = self._output(self.ffn_layer2(hidden_BLF), rows)
    if p.add_skip_connection:
      if p.residual_weight != 1:
        out *= p.residual_weight
      out = inputs + out
    return self._normalised(out, 'post_skip')


class Transformer(_Residual):
  """One layer: self-attention, perhaps cross-attention, and feed-forward.

  Attributes:
    hidden_dims: F; 0 is what `tr_fflayer_tpl` says.
    num_heads: H; 0 is what `tr_atten_tpl` says.
    dim_per_head: K; None is what `tr_atten_tpl` says.
    is_causal: whether no position sees later ones.
    use_cross_attention: whether it attends to `Context.source`.
    tr_atten_tpl: self-attention.
    cross_atten_tpl: cross-attention; None is as `tr_atten_tpl`.
    tr_fflayer_tpl: the feed-forward part.
    relu_dropout_prob: part of the feed-forward part's hidden values that is
      dropped in training.
    atten_dropout_prob: the same of attention's weights.
  """

  hidden_dims: int = 0
  num_heads: int = 0
  dim_per_head: int | None = None
  is_causal: bool = True
  use_cross_attention: bool = False
  tr_atten_tpl: BaseHParams = sub_config_field(
    attentions.DotProductAttention.HParams
  )
  cross_atten_tpl: BaseHParams | None = sub_config_field(None)
  tr_fflayer_tpl: BaseHParams = sub_config_field(TransformerFeedForward.HParams)
  relu_dropout_prob: float = 0.0
  atten_dropout_prob: float = 0.0

  def setup(self) -> None:
    super().setup()
    p = self.hparams
    heads = {
      'input_dim': p.input_dims,
      **_given(
        num_heads=p.num_heads,
        dim_per_head=p.dim_per_head,
        atten_dropout_prob=p.atten_dropout_prob,
      ),
    }
    self.create_child(
      'self_attention', p.tr_atten_tpl, is_causal=p.is_causal, **heads
    )
    if p.use_cross_attention:
      self._create_norms('cross_layer_norm', p.ln_tpl.clone())
      self.create_child(
        'cross_attention',
        p.cross_atten_tpl or p.tr_atten_tpl.clone(),
        is_cross_attention=True,
        **heads,
      )
    policy = {} if p.norm_policy == 'pre' else {'norm_policy': p.norm_policy}
    self.create_child(
      'ff_layer',
      p.tr_fflayer_tpl,
      input_dims=p.input_dims,
      **policy,
      **_given(
        hidden_dims=p.hidden_dims,
        residual_dropout_prob=p.residual_dropout_prob,
        relu_dropout_prob=p.relu_dropout_prob,
      ),
    )

  def __call__(
    self, inputs: jax.Array, context: Context | None = None
  ) -> jax.Array:
    """Returns [B, L, D].

    Args:
      inputs: [B, L, D].
      context: what else it sees.

    Raises:
      ValueError: there is no `source` for cross-attention, or one without it.
    """
    context = context or Context()
    mixed = self.self_attention(self._normalised(inputs, 'pre'), context)
    return self._after(inputs, mixed, self._source(context.source), context)

  def empty_cache(
    self, batch: int, length: int, source: jax.Array | None = None
  ) -> dict[str, attentions.Cache]:
    """Returns room for `extend_step`, [1, B, ...] each.

    Args:
      batch: B.
      length: M, as many positions as there shall be.
      source: [B, T, D], what cross-attention attends to.

    Raises:
      ValueError: as for `__call__`.
    """
    cache = {'self': self.self_attention.empty_cache(batch, length)}
    if (of_source := self._source(source)) is not None:
      cache['cross'] = of_source
    return jax.tree.map(lambda x: x[None], cache)

  def extend_step(
    self,
    inputs: jax.Array,
    cache: dict[str, attentions.Cache],
    start: int | jax.Array,
    context: Context | None = None,
  ) -> tuple[jax.Array, dict[str, attentions.Cache]]:
    """Runs the layer on the next positions.

    Args:
      inputs: [B, L, D], at the positions from `start`.
      cache: of `empty_cache`, or the call before.
      start: of all rows, or [B] of each.
      context: only `prefix` and `source_seen` count.

    Returns:
      [B, L, D], and the cache.
    """
    context = context or Context()
    own = jax.tree.map(lambda x: x[0], cache)
    mixed, of_self = self.self_attention.extend_step(
      self._normalised(inputs, 'pre'), own['self'], start, context
    )
    out = self._after(inputs, mixed, own.get('cross'), context)
    return out, {**cache, 'self': jax.tree.map(lambda x: x[None], of_self)}

  def _source(self, source: jax.Array | None) -> attentions.Cache | None:
    """Returns what cross-attention attends to; None without it."""
    has = self.hparams.use_cross_attention
    if (source is not None) != has:
      got = 'no' if source is None else 'a'
      raise ValueError(
        f'{self.module_name} has use_cross_attention={has}, and {got} source.'
        ' Expected one with use_cross_attention=True, and only then.'
      )
    return self.cross_attention.keys_and_values(source) if has else None

  def _after(
    self,
    x_BLD: jax.Array,
    mixed_BLD: jax.Array,
    source: attentions.Cache | None,
    context: Context,
  ) -> jax.Array:
    """Returns the output, given what self-attention gives."""
    x_BLD += self._output(mixed_BLD, context.rows)
    x_BLD = self._normalised(x_BLD, 'post_skip')
    if source is not None:
      norm = 'cross_layer_norm'
      mixed_BLD = self.cross_attention.attend_to(
        self._normalised(x_BLD, 'pre', norm), source, context
      )
      x_BLD += self._output(mixed_BLD, context.rows, norm)
      x_BLD = self._normalised(x_BLD, 'post_skip', norm)
    x_BLD = self.ff_layer(x_BLD, context.rows)
    return self.shard(x_BLD, transformer.BETWEEN_BLOCKS)


class StackedTransformer(base_layer.BaseLayer):
  """Layers one after the other, unrolled: XLA fuses across them.

  Attributes:
    num_layers: how many.
    model_dims: D.
    hidden_dims: F.
    num_heads: H.
    dim_per_head: K.
    mask_self_attention: whether no position sees later ones.
    use_cross_attention: whether the layers attend to `Context.source`.
    residual_dropout_prob: part of what each part of a layer adds that is
      dropped in training.
    relu_dropout_prob: the same within the feed-forward parts.
    atten_dropout_prob: the same of attention's weights.
    dropout_prob: takes the place of those of these three that are 0.
    transformer_layer_params_tpl: the layers; it says what is 0 or None above.
    checkpoint_policy: what of each layer the backward pass computes again;
      see `transformer.remat_policy`.
  """

  num_layers: int = 0
  model_dims: int = 0
  hidden_dims: int = 0
  num_heads: int = 0
  dim_per_head: int | None = None
  mask_self_attention: bool = False
  use_cross_attention: bool = False
  residual_dropout_prob: float = 0.0
  relu_dropout_prob: float = 0.0
  atten_dropout_prob: float = 0.0
  dropout_prob: float = 0.0
  transformer_layer_params_tpl: BaseHParams = sub_config_field(
    Transformer.HParams
  )
  checkpoint_policy: str = 'nothing'

  def setup(self) -> None:
    p = self.hparams
    if p.num_layers < 1:
      raise ValueError(
        f'{self.module_name}.num_layers is {p.num_layers}; expected at least 1.'
      )
    self.create_children(
      'x_layers',
      [p.transformer_layer_params_tpl.clone() for _ in range(p.num_layers)],
      is_causal=p.mask_self_attention,
      use_cross_attention=p.use_cross_attention,
      **_given(
        input_dims=p.model_dims,
        hidden_dims=p.hidden_dims,
        num_heads=p.num_heads,
        dim_per_head=p.dim_per_head,
        residual_dropout_prob=p.residual_dropout_prob or p.dropout_prob,
        relu_dropout_prob=p.relu_dropout_prob or p.dropout_prob,
        atten_dropout_prob=p.atten_dropout_prob or p.dropout_prob,
      ),
    )

  def __call__(
    self, inputs: jax.Array, context: Context | None = None
  ) -> jax.Array:
    """Returns [B, L, D]; see `Transformer`."""
    x_BLD = inputs
    policy = transformer.remat_policy(self.hparams.checkpoint_policy)
    for layer in self.x_layers:
      run = layer if policy is None else base_layer.remat(layer, policy=policy)
      x_BLD = run(x_BLD, context)
    return x_BLD

  def empty_cache(
    self, batch: int, length: int, source: jax.Array | None = None
  ) -> list[Any]:
    """Returns the caches of the layers, [1, B, ...] each."""
    return [layer.empty_cache(batch, length, source) for layer in self.x_layers]

  def extend_step(
    self,
    inputs: jax.Array,
    cache: list[Any],
    start: int | jax.Array,
    context: Context | None = None,
  ) -> tuple[jax.Array, list[Any]]:
    """Returns [B, L, D], and the cache; see `Transformer`."""
    x_BLD, new = inputs, []
    for layer, own in zip(self.x_layers, cache, strict=True):
      x_BLD, own = layer.extend_step(x_BLD, own, start, context)
      new.append(own)
    return x_BLD, new


class _OfRepeat(base_layer.BaseLayer):
  """A stack that is a repeated one, its child `repeat`."""

  def __call__(
    self, inputs: jax.Array, context: Context | None = None
  ) -> jax.Array:
    """Returns [B, L, D]; see `Transformer`."""
    return self.repeat(inputs, context)

  def empty_cache(
    self, batch: int, length: int, source: jax.Array | None = None
  ) -> Any:
    """Returns the caches of the layers, [x_times, B, ...] each."""
    return self.repeat.empty_cache(batch, length, source)

  def extend_step(
    self,
    inputs: jax.Array,
    cache: Any,
    start: int | jax.Array,
    context: Context | None = None,
  ) -> tuple[jax.Array, Any]:
    """Returns [B, L, D], and the cache; see `Transformer`."""
    return self.repeat.extend_step(inputs, cache, start, context)


class StackedTransformerRepeated(_OfRepeat):
  """Layers one after the other, as one loop over stacked weights.

  Attributes:
    block: what is repeated: often one layer.
    x_times: how often.
    checkpoint_policy: what of each block the backward pass computes again;
      see `transformer.remat_policy`.
  """

  block: BaseHParams = sub_config_field(StackedTransformer.HParams)
  x_times: int = 0
  checkpoint_policy: str = 'full'

  def setup(self) -> None:
    p = self.hparams
    self.create_child(
      'repeat',
      repeats.Repeat.HParams(
        sub_tpl=p.block,
        x_times=p.x_times,
        checkpoint_policy=p.checkpoint_policy,
      ),
    )


class PipelinedTransformer(_OfRepeat):
  """Layers dealt out to the stages of a pipeline, which work at the same time.

  A stage that is a `StackedTransformerRepeated` is a loop over its blocks, and
  a `StackedTransformer` is unrolled. Either way the weights, and the results,
  are those of a `StackedTransformerRepeated` of all the layers, in the same
  place; it decodes as that does. See `jaxline.parallel.pipeline`. Summaries of
  the layers are not collected.

  Attributes:
    pipeline_stage: the layers that a stage has in one repeat. All of them
      are these, times the stages, times the repeats.
    num_pipeline_stages: groups of layers that work at the same time.
    num_pipeline_microbatches: parts into which the batch is cut; or
    pipeline_microbatch_size: rows of each.
    circular_repeat: how often each part goes round the stages.
  """

  pipeline_stage: BaseHParams = sub_config_field(StackedTransformer.HParams)
  num_pipeline_stages: int = 1
  num_pipeline_microbatches: int | None = None
  pipeline_microbatch_size: int | None = None
  circular_repeat: int = 1

  def setup(self) -> None:
    p = self.hparams
    stage = p.pipeline_stage
    if isinstance(stage, StackedTransformerRepeated.HParams):
      layer, times = stage.block, stage.x_times
    else:
      layer = stage.clone().set(num_layers=1, checkpoint_policy='nothing')
      times = stage.num_layers
    sizes = (p.num_pipeline_microbatches, p.pipeline_microbatch_size)
    given = [size for size in sizes if size is not None]
    if len(given) != 1 or given[0] < 1:
      raise ValueError(
        f'{self.module_name} has num_pipeline_microbatches {sizes[0]} and'
        f' pipeline_microbatch_size {sizes[1]}; expected one of them, a'
        ' positive number.'
      )
    self.create_child(
      'repeat',
      repeats.Repeat.HParams(
        sub_tpl=layer,
        x_times=times * p.num_pipeline_stages * p.circular_repeat,
        checkpoint_policy=stage.checkpoint_policy,
      ),
    )
    found = self.repeat.layer.abstract_init()
    if fp8.split(found[base_layer.PARAMS])[1]:
      raise errors.UsageError(
        f'{self.module_name} has products in FP8, which keep the next values of'
        ' their scales in place of gradients; a pipeline would add them up over'
        ' microbatches. Use StackedTransformerRepeated, or use_fp8=False.'
      )
    if variables := found[base_layer.NON_TRAINABLE]:
      raise ValueError(
        f'{self.module_name} would lose what its microbatches write into the'
        f' variables of {sorted(variables)}, which are not trained. Use'
        ' StackedTransformerRepeated.'
      )

  def __call__(
    self, inputs: jax.Array, context: Context | None = None
  ) -> jax.Array:
    """Returns [B, L, D]; see `Transformer`.

    Raises:
      ValueError: the sizes do not fit the batch or the mesh; or a layer has an
        aux loss.
    """
    p = self.hparams
    context = context or Context()
    if context.rows is None:  # What is dropped depends on no microbatch.
      context = context._replace(rows=jnp.arange(inputs.shape[0]))
    run = self.repeat.runner('__call__')

    def run_layer(
      params: Any, number: jax.Array, x: jax.Array, context: Any
    ) -> jax.Array:
      x, collected = run({base_layer.PARAMS: params}, number, x, context)
      if collected.aux_losses:
        raise ValueError(
          f'{self.module_name} is a pipeline, in which no layer may have an aux'
          f' loss; got {sorted(collected.aux_losses)}. Use'
          ' StackedTransformerRepeated.'
        )
      return x

    return transformer.pipelined(
      run_layer,
      self.repeat.variables(boxed=True)[base_layer.PARAMS],
      inputs,
      context,
      num_stages=p.num_pipeline_stages,
      num_microbatches=self._num_microbatches(inputs.shape[0]),
      num_repeats=p.circular_repeat,
      unroll=not isinstance(
        p.pipeline_stage, StackedTransformerRepeated.HParams
      ),
      remat=p.pipeline_stage.checkpoint_policy,
    )

  def _num_microbatches(self, batch: int) -> int:
    p = self.hparams
    if p.pipeline_microbatch_size is None:
      return p.num_pipeline_microbatches
    if batch % p.pipeline_microbatch_size:
      raise errors.UsageError(
        f'{self.module_name}.pipeline_microbatch_size is'
        f' {p.pipeline_microbatch_size}; expected a divisor of the batch'
        f' {batch}.'
      )
    return batch // p.pipeline_microbatch_size


class _Embedded(base_layer.BaseLayer):
  """What has embedded tokens, an output layer, and layers in between.

  Attributes:
    vocab_size: V.
    model_dims: D.
    softmax_tpl: the output layer; `SharedEmbeddingSoftmax` embeds as well.
    separate_embedding_tpl: what embeds instead; needed for a `FullSoftmax`.
    position_emb_tpl: what is added to embedded tokens; None is nothing, as
      for rotary positions.
    final_ln_tpl: what normalises before the output layer; None is nothing.
  """

  vocab_size: int = 0
  model_dims: int = 0
  softmax_tpl: BaseHParams = sub_config_field(
    embedding_softmax.SharedEmbeddingSoftmax.HParams
  )
  separate_embedding_tpl: BaseHParams | None = sub_config_field(None)
  position_emb_tpl: BaseHParams | None = sub_config_field(
    embedding_softmax.PositionalEmbedding.HParams
  )
  final_ln_tpl: BaseHParams | None = sub_config_field(
    normalizations.LayerNorm.HParams
  )

  def setup(self) -> None:
    p = self.hparams
    sizes = {'num_classes': p.vocab_size, 'input_dims': p.model_dims}
    self.create_child('softmax', p.softmax_tpl, **sizes)
    self._embedding = self.softmax
    if p.separate_embedding_tpl is not None:
      self.create_child('embedding', p.separate_embedding_tpl, **sizes)
      self._embedding = self.embedding
    if p.position_emb_tpl is not None:
      self.create_child(
        'position_emb', p.position_emb_tpl, embedding_dims=p.model_dims
      )
    self.create_child('final_ln', self._final_norm(), dim=p.model_dims)

  def _final_norm(self) -> BaseHParams:
    return self.hparams.final_ln_tpl or normalizations.IdentityNorm.HParams()

  def _embed(
    self,
    ids_BL: jax.Array,
    position: jax.Array | None = None,
    embedding: base_layer.BaseLayer | None = None,
  ) -> jax.Array:
    """Returns [B, L, D]; positions are [B, L], [L] of all rows, or from 0."""
    x_BLD = (embedding or self._embedding).emb_lookup(ids_BL)
    if self.hparams.position_emb_tpl is not None:
      if position is None:
        position = jnp.arange(ids_BL.shape[1])
      if position.ndim == 1:
        position = position[None]
      x_BLD += self.position_emb(position)
    x_BLD = x_BLD.astype(self.fprop_dtype)
    return self.shard(x_BLD, transformer.BETWEEN_BLOCKS)

  def _extend(
    self,
    stack: str,
    ids_BL: jax.Array,
    cache: dict[str, Any],
    start: int | jax.Array,
    context: Context,
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Returns logits of the next tokens, and the cache; see `extend_step`."""
    position = transformer.positions_from(start, ids_BL.shape[1])
    x_BLD, extended = getattr(self, stack).extend_step(
      self._embed(ids_BL, position), cache[stack], start, context
    )
    logits_BLV = self.softmax.get_logits(self.final_ln(x_BLD))
    return logits_BLV, {**cache, stack: extended}

  def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
    """Returns float32 logits [B, L, V]; takes what `hidden` takes."""
    return self.softmax.get_logits(self.hidden(*args, **kwargs))

  def compute_loss(
    self, x: jax.Array, labels: jax.Array, weights: jax.Array
  ) -> dict[str, jax.Array]:
    """Returns the cross entropy, and what else is to be reported.

    Args:
      x: [B, L, D], of `hidden`.
      labels: [B, L], the token to predict at each position.
      weights: [B, L]; 0 takes a position out.

    Returns:
      As `SharedEmbeddingSoftmax.compute_loss`.
    """
    return self.softmax.compute_loss(x, labels, weights)

  def _check_length(self, length: int) -> None:
    # Of trained positions, which a gather would not find missing.
    most = getattr(self.hparams.position_emb_tpl, 'max_seq_length', length)
    if length > most:
      raise ValueError(
        f'Got {length} positions; {self.module_name} has max_seq_length {most}.'
        ' Decode less, or raise it.'
      )


class LanguageModelType:
  """Which tokens one sees: those before it, those and the prefix, or all."""

  CAUSAL = 'causal'
  PREFIX = 'prefix'
  BIDIRECTIONAL = 'bidirectional'


_TYPES = ('causal', 'prefix', 'bidirectional')


class TransformerLm(_Embedded):
  """A language model of one stack of layers.

  Attributes:
    stacked_transformer_tpl: the layers.
    packed_input: whether rows hold several documents, of which none sees
      another. Then `segment_ids` is needed.
    model_type: one of `LanguageModelType`.
  """

  stacked_transformer_tpl: BaseHParams = sub_config_field(
    StackedTransformer.HParams
  )
  packed_input: bool = False
  model_type: str = LanguageModelType.CAUSAL

  def setup(self) -> None:
    super().setup()
    p = self.hparams
    errors.check_names([p.model_type], _TYPES, 'model_type', self.module_name)
    is_causal = p.model_type != LanguageModelType.BIDIRECTIONAL
    stack = _in_blocks(p.stacked_transformer_tpl, mask_self_attention=is_causal)
    self.create_child('transformer', stack)

  @property
  def _has_prefix(self) -> bool:
    return self.hparams.model_type == LanguageModelType.PREFIX

  def hidden(
    self,
    ids: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    inputs_indicator: jax.Array | None = None,
    paddings: jax.Array | None = None,
  ) -> jax.Array:
    """Returns what goes into the output layer, [B, L, D].

    Args:
      ids: integers below V, [B, L].
      segment_ids: the document that each token is of, [B, L].
      segment_pos: the position of each token in its document, [B, L]; None
        counts from the start of the row.
      inputs_indicator: [B, L], 1 in the prefix of a 'prefix' model.
      paddings: [B, L], 1 where there is no token, which then no token sees;
        without effect with `packed_input`. None is nowhere.

    Raises:
      ValueError: `segment_ids` is missing, or given without `packed_input`; or
        `inputs_indicator` is missing, or given to a model of another type.
    """
    p = self.hparams
    for name, value, field, is_wanted in (
      ('segment_ids', segment_ids, 'packed_input', p.packed_input),
      ('inputs_indicator', inputs_indicator, 'model_type', self._has_prefix),
    ):
      if (value is not None) != is_wanted:
        raise ValueError(
          f'{self.module_name}.{field} is {getattr(p, field)!r}, and there is'
          f' {"no" if value is None else "a value of"} {name}. segment_ids are'
          ' for packed_input=True, inputs_indicator for the model_type'
          f' {LanguageModelType.PREFIX!r}, each of which needs it.'
        )
    if paddings is not None and segment_ids is None:
      # As in Praxis, padding is a document of its own; in packed rows it is of
      # the document that `segment_ids` says.
      segment_ids = _seen(paddings).astype(jnp.int32)
    context = Context(
      segment_ids=segment_ids,
      position=segment_pos,
      prefix=inputs_indicator > 0 if self._has_prefix else None,
    )
    x_BLD = self._embed(ids, segment_pos)
    return self.final_ln(self.transformer(x_BLD, context))

  def empty_cache(
    self, batch: int, length: int, prefix_lengths: jax.Array | None = None
  ) -> Any:
    """Returns room for `extend_step`.

    Args:
      batch: B.
      length: M, as many positions as there shall be.
      prefix_lengths: [B], how many tokens are the prefix of a 'prefix' model.

    Raises:
      ValueError: there are not so many positions; or the model predicts no next
        token.
    """
    self._check_length(length)
    if self.hparams.model_type == LanguageModelType.BIDIRECTIONAL:
      raise ValueError(
        f'{self.module_name}.model_type is {self.hparams.model_type!r}; only a'
        ' causal or a prefix language model can continue a text.'
      )
    cache = {'transformer': self.transformer.empty_cache(batch, length)}
    if prefix_lengths is not None:
      positions = jnp.arange(length)[None]
      cache['prefix'] = (positions < prefix_lengths[:, None])[None]
    return cache

  def extend_step(
    self, ids: jax.Array, cache: Any, start: int | jax.Array
  ) -> tuple[jax.Array, Any]:
    """Runs the model on the next tokens.

    They see what the cache holds of the positions before them, and none after:
    what padding has left there does no harm.

    Args:
      ids: [B, L], at the positions from `start`.
      cache: of `empty_cache`, or the call before.
      start: of all rows, or [B] of each.

    Returns:
      Float32 logits [B, L, V], and the cache.
    """
    prefix = cache['prefix'][0] if 'prefix' in cache else None
    context = Context(prefix=prefix)
    return self._extend('transformer', ids, cache, start, context)


class TransformerEncoderDecoder(_Embedded):
  """An encoder of a source, and a decoder that attends to it.

  Vaswani et al. (2017), but normalised before each part.

  Those of embedding and output are the decoder's.

  Attributes:
    encoder_stacked_transformer_tpl: the encoder's layers.
    decoder_stacked_transformer_tpl: the decoder's.
    encoder_embedding_tpl: what embeds the source, and has its own
      `num_classes`; None is what embeds the target.
  """

  encoder_stacked_transformer_tpl: BaseHParams = sub_config_field(
    StackedTransformer.HParams
  )
  decoder_stacked_transformer_tpl: BaseHParams = sub_config_field(
    StackedTransformer.HParams
  )
  encoder_embedding_tpl: BaseHParams | None = sub_config_field(None)

  def setup(self) -> None:
    super().setup()
    p = self.hparams
    self._encoder_embedding = self._embedding
    if p.encoder_embedding_tpl is not None:
      self.create_child(
        'encoder_embedding',
        p.encoder_embedding_tpl,
        input_dims=p.model_dims,
      )
      self._encoder_embedding = self.encoder_embedding
    self.create_child(
      'encoder',
      _in_blocks(p.encoder_stacked_transformer_tpl, mask_self_attention=False),
    )
    final_norm = self._final_norm().clone()
    self.create_child('encoder_ln', final_norm, dim=p.model_dims)
    self.create_child(
      'decoder',
      _in_blocks(
        p.decoder_stacked_transformer_tpl,
        mask_self_attention=True,
        use_cross_attention=True,
      ),
    )

  def encode(
    self, source_ids: jax.Array, source_paddings: jax.Array
  ) -> jax.Array:
    """Returns what the decoder attends to, [B, T, D].

    Args:
      source_ids: integers below the source's vocabulary, [B, T].
      source_paddings: [B, T], 1 where there is no token, else 0.
    """
    x_BTD = self._embed(source_ids, embedding=self._encoder_embedding)
    context = Context(seen=_seen(source_paddings))
    return self.encoder_ln(self.encoder(x_BTD, context))

  def hidden(
    self,
    source_ids: jax.Array,
    source_paddings: jax.Array,
    target_ids: jax.Array,
  ) -> jax.Array:
    """Returns what goes into the output layer, [B, L, D].

    Args:
      source_ids: as for `encode`.
      source_paddings: as for `encode`.
      target_ids: integers below V, [B, L]: what precedes each prediction.
    """
    context = Context(
      source=self.encode(source_ids, source_paddings),
      source_seen=_seen(source_paddings),
    )
    return self.final_ln(self.decoder(self._embed(target_ids), context))

  def empty_cache(
    self, encoded: jax.Array, source_paddings: jax.Array, length: int
  ) -> Any:
    """Returns room for `extend_step`, and what it attends to of the source.

    Args:
      encoded: [B, T, D], of `encode`.
      source_paddings: [B, T], as for `encode`.
      length: M, as many positions as there shall be.

    Raises:
      ValueError: there are not so many positions.
    """
    self._check_length(length)
    batch = encoded.shape[0]
    return {
      'decoder': self.decoder.empty_cache(batch, length, encoded),
      'source_seen': _seen(source_paddings)[None],
    }

  def extend_step(
    self, ids: jax.Array, cache: Any, start: int | jax.Array
  ) -> tuple[jax.Array, Any]:
    """Runs the decoder on the next tokens; see `TransformerLm.extend_step`."""
    context = Context(source_seen=cache['source_seen'][0])
    return self._extend('decoder', ids, cache, start, context)


def _seen(paddings: jax.Array) -> jax.Array:
  return paddings < 0.5


def _in_blocks(stack: Any, **fields: Any) -> Any:
  """Returns a stack's HParams with fields set in its `StackedTransformer`."""
  stack = stack.clone()
  for field in ('pipeline_stage', 'block'):
    if field in stack.names():
      return stack.set(**{field: _in_blocks(getattr(stack, field), **fields)})
  if 'mask_self_attention' not in stack.names():
    return stack  # The layer that takes it refuses it.
  return stack.set(**fields)
