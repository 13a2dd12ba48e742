"""Networks of tokens: a language model, and an encoder with a decoder.

Both embed tokens, run stacks of layers, and have an output layer. For decoding
they have `empty_cache` and `extend_step`: see `transformer_layers`.

Shapes: B batch, L length, D width, F hidden width, H heads, G heads of keys and
values, K head dim, V vocab, S matrices side by side, M positions of a cache, T
length of the source.
"""

from typing import Any

import jax
import jax.numpy as jnp

from examples import transformer
from examples.pax import base_layer
from examples.pax import hparams
from examples.pax.layers import attentions
from examples.pax.layers import embedding_softmax
from examples.pax.layers import normalizations
from examples.pax.layers import transformer_stacks

BaseHParams = hparams.BaseHParams
sub_config_field = base_layer.sub_config_field

Context = attentions.Context

_in_blocks = transformer_stacks.in_blocks
CACHE_AXIS = 1  # The batch, in all arrays of a cache.


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


class TransformerLm(_Embedded):
  """A language model of one stack of layers.

  Attributes:
    stacked_transformer_tpl: the layers.
    packed_input: whether rows hold several documents, of which none sees
      another. Then `segment_ids` is needed.
  """

  stacked_transformer_tpl: BaseHParams = sub_config_field(
    transformer_stacks.StackedTransformer.HParams
  )
  packed_input: bool = False

  def setup(self) -> None:
    super().setup()
    stack = self.hparams.stacked_transformer_tpl
    self.create_child(
      'transformer',
      _in_blocks(stack, mask_self_attention=True),
    )

  def hidden(
    self,
    ids: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    paddings: jax.Array | None = None,
  ) -> jax.Array:
    """Returns what goes into the output layer, [B, L, D].

    Args:
      ids: integers below V, [B, L].
      segment_ids: the document that each token is of, [B, L].
      segment_pos: the position of each token in its document, [B, L]; None
        counts from the start of the row.
      paddings: [B, L], 1 where there is no token, which then no token sees;
        without effect with `packed_input`. None is nowhere.

    Raises:
      ValueError: `segment_ids` is missing, or given without `packed_input`.
    """
    if (segment_ids is not None) != self.hparams.packed_input:
      got = 'no' if segment_ids is None else 'a value of'
      raise ValueError(
        f'{self.module_name}.packed_input is {self.hparams.packed_input}, and'
        f' there is {got} segment_ids, which are for packed_input=True.'
      )
    if paddings is not None and segment_ids is None:
      # As in Praxis, padding is a document of its own; in packed rows it is of
      # the document that `segment_ids` says.
      segment_ids = _seen(paddings).astype(jnp.int32)
    context = Context(segment_ids=segment_ids, position=segment_pos)
    x_BLD = self._embed(ids, segment_pos)
    return self.final_ln(self.transformer(x_BLD, context))

  def empty_cache(self, batch: int, length: int) -> Any:
    """Returns room for `extend_step`.

    Args:
      batch: B.
      length: M, as many positions as there shall be.

    Raises:
      ValueError: there are not so many positions.
    """
    self._check_length(length)
    return {'transformer': self.transformer.empty_cache(batch, length)}

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
    return self._extend('transformer', ids, cache, start, Context())


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
    transformer_stacks.StackedTransformer.HParams
  )
  decoder_stacked_transformer_tpl: BaseHParams = sub_config_field(
    transformer_stacks.StackedTransformer.HParams
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
