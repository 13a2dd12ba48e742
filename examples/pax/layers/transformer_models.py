"""Transformers over tokens: a language model and an encoder-decoder.

Both embed tokens, run stacks of layers, and have an output layer. For decoding,
they have `empty_cache` and `extend_step`: see `transformer_layers`.

Shapes: as in `attentions`; V vocab.
"""

from typing import Any

import jax
import jax.numpy as jnp

from examples import transformer
from examples.pax import base_layer
from examples.pax.layers import attentions
from examples.pax.layers import embedding_softmax
from examples.pax.layers import normalizations
from examples.pax.layers import transformer_stacks

LayerTpl = base_layer.LayerTpl
template_field = base_layer.template_field

Context = attentions.Context
Stack = transformer_stacks.StackedTransformer

_in_blocks = transformer_stacks.in_blocks
CACHE_AXIS = 1  # The batch axis of all arrays of a cache.


class _Embedded(base_layer.BaseLayer):
  """The base of networks with an embedding of tokens and an output layer."""

  vocab_size: int = 0  # V.
  model_dims: int = 0  # D.
  # The output layer. A `SharedEmbeddingSoftmax` embeds the tokens too.
  softmax_tpl: LayerTpl = template_field(
    embedding_softmax.SharedEmbeddingSoftmax
  )
  # The embedding, if not the output layer. Required with a `FullSoftmax`.
  separate_embedding_tpl: LayerTpl | None = template_field(None)
  # The position embedding that is added to the tokens. None, as with rotary
  # positions, means that there is none.
  position_emb_tpl: LayerTpl | None = template_field(
    embedding_softmax.PositionalEmbedding
  )
  # The normalization before the output layer; `IdentityNorm` for none.
  final_ln_tpl: LayerTpl = template_field(normalizations.LayerNorm)

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
    self.create_child('final_ln', p.final_ln_tpl, dim=p.model_dims)

  def _embed(
    self, ids_BL: jax.Array, position: jax.Array | None = None
  ) -> jax.Array:
    """Embeds tokens at positions [B, L], or [L] for all rows: [B, L, D].

    Without positions, they count from 0.
    """
    x_BLD = self._embedding.emb_lookup(ids_BL)
    if self.position_emb_tpl is not None:
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
    """Returns the logits of the next tokens and the extended cache."""
    position = transformer.positions_from(start, ids_BL.shape[1])
    x_BLD, extended = getattr(self, stack).extend_step(
      self._embed(ids_BL, position), cache[stack], start, context
    )
    logits_BLV = self.softmax.get_logits(self.final_ln(x_BLD))
    return logits_BLV, {**cache, stack: extended}

  def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
    """Returns float32 logits [B, L, V]. Takes the arguments of `hidden`."""
    return self.softmax.get_logits(self.hidden(*args, **kwargs))

  def compute_loss(
    self, x: jax.Array, labels: jax.Array, weights: jax.Array
  ) -> dict[str, jax.Array]:
    """Returns the cross entropy; see `SharedEmbeddingSoftmax.compute_loss`.

    Args:
      x: Result of `hidden`, [B, L, D].
      labels: Token to predict at each position, [B, L].
      weights: Weights of the positions, [B, L].
    """
    return self.softmax.compute_loss(x, labels, weights)

  def _check_length(self, length: int) -> None:
    # A gather of trained positions would not notice that there are too few.
    trained = embedding_softmax.TrainablePositionalEmbedding.HParams
    if isinstance(self.position_emb_tpl, trained):
      self.position_emb.check_length(length)


class TransformerLm(_Embedded):
  """A language model with one stack of layers."""

  stacked_transformer_tpl: LayerTpl = template_field(Stack)
  # Whether rows hold several documents, which must not see each other. If so,
  # `segment_ids` is required.
  packed_input: bool = False

  def setup(self) -> None:
    super().setup()
    stack = _in_blocks(self.stacked_transformer_tpl, mask_self_attention=True)
    self.create_child('transformer', stack)

  def hidden(
    self,
    ids: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    paddings: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the input of the output layer, [B, L, D].

    Args:
      ids: Integers below V, [B, L].
      segment_ids: Index of each token's document, [B, L].
      segment_pos: Position of each token in its document, [B, L]. If None, they
        count from the start of the row.
      paddings: [B, L], 1 for padding, which no token then sees. If None, there
        is no padding. Ignored with `packed_input`.

    Raises:
      ValueError: `segment_ids` is missing, or given without `packed_input`.
    """
    if (segment_ids is not None) != self.packed_input:
      got = 'no' if segment_ids is None else 'a value of'
      raise ValueError(
        f'{self.module_name}.packed_input is {self.packed_input}, and there is'
        f' {got} segment_ids. Give segment_ids exactly if packed_input is True.'
      )
    if paddings is not None and segment_ids is None:
      # Praxis makes padding a separate document, too. In packed rows,
      # `segment_ids` decides which document it belongs to.
      segment_ids = _seen(paddings).astype(jnp.int32)
    context = Context(segment_ids=segment_ids, position=segment_pos)
    x_BLD = self._embed(ids, segment_pos)
    return self.final_ln(self.transformer(x_BLD, context))

  def empty_cache(self, batch: int, length: int) -> Any:
    """Returns an empty cache for `extend_step`.

    Args:
      batch: B.
      length: M, the largest number of positions.

    Raises:
      UsageError: `length` exceeds the number of trained positions.
    """
    self._check_length(length)
    return {'transformer': self.transformer.empty_cache(batch, length)}

  def extend_step(
    self, ids: jax.Array, cache: Any, start: int | jax.Array
  ) -> tuple[jax.Array, Any]:
    """Runs the model on the next tokens.

    Each token sees the earlier positions in the cache. Leftovers of padding at
    later positions do no harm, because no token sees them.

    Args:
      ids: Next tokens, [B, L], at the positions from `start`.
      cache: Cache from `empty_cache` or from the previous call.
      start: First position, for all rows, or [B] for each row.

    Returns:
      Float32 logits [B, L, V] and the extended cache.
    """
    return self._extend('transformer', ids, cache, start, Context())


class TransformerEncoderDecoder(_Embedded):
  """An encoder of a source, and a decoder that attends to it.

  As in Vaswani et al. (2017), but with each sublayer's input normalized. Source
  and target have the same embedding.
  """

  encoder_stacked_transformer_tpl: LayerTpl = template_field(Stack)
  decoder_stacked_transformer_tpl: LayerTpl = template_field(Stack)

  def setup(self) -> None:
    super().setup()
    p = self.hparams
    encoder, decoder = (
      _in_blocks(stack, mask_self_attention=masks, use_cross_attention=masks)
      for masks, stack in (
        (False, p.encoder_stacked_transformer_tpl),
        (True, p.decoder_stacked_transformer_tpl),
      )
    )
    self.create_child('encoder', encoder)
    final_norm = p.final_ln_tpl.clone()
    self.create_child('encoder_ln', final_norm, dim=p.model_dims)
    self.create_child('decoder', decoder)

  def encode(
    self, source_ids: jax.Array, source_paddings: jax.Array
  ) -> jax.Array:
    """Returns the encoded source, which the decoder attends to, [B, T, D].

    Args:
      source_ids: Integers below V, [B, T].
      source_paddings: [B, T], 1 for padding, 0 for tokens.
    """
    context = Context(seen=_seen(source_paddings))
    return self.encoder_ln(self.encoder(self._embed(source_ids), context))

  def hidden(
    self,
    source_ids: jax.Array,
    source_paddings: jax.Array,
    target_ids: jax.Array,
  ) -> jax.Array:
    """Returns the input of the output layer, [B, L, D].

    Args:
      source_ids: Source, as for `encode`.
      source_paddings: Padding of the source, as for `encode`.
      target_ids: Token before each prediction, integers below V, [B, L].
    """
    context = Context(
      source=self.encode(source_ids, source_paddings),
      source_seen=_seen(source_paddings),
    )
    return self.final_ln(self.decoder(self._embed(target_ids), context))

  def empty_cache(
    self, encoded: jax.Array, source_paddings: jax.Array, length: int
  ) -> Any:
    """Returns a cache for `extend_step`, with the source's keys and values.

    Args:
      encoded: Result of `encode`, [B, T, D].
      source_paddings: Padding of the source, as for `encode`.
      length: M, the largest number of target positions.

    Raises:
      UsageError: `length` exceeds the number of trained positions.
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
