"""Transformers over tokens: a language model and an encoder-decoder.

Both embed tokens, run stacks of layers, and have an output layer. For decoding,
they have `empty_cache` and `extend_step`: see `transformer_layers`.

Shapes: B batch, L length, D width, F hidden width, H heads, G heads of keys and
values, K head dim, V vocab, S stacked matrices, M positions of a cache, T
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
CACHE_AXIS = 1  # The batch axis of all arrays of a cache.


class _Embedded(base_layer.BaseLayer):
  """The base of networks with an embedding of tokens and an output layer.

  Attributes:
    vocab_size: V.
    model_dims: D.
    softmax_tpl: Template of the output layer. A `SharedEmbeddingSoftmax` embeds
      the tokens too.
    separate_embedding_tpl: Template of the embedding. If None, the output layer
      embeds the tokens. Required with a `FullSoftmax`.
    position_emb_tpl: Template of the position embedding that is added to the
      tokens. If None, there is none, as with rotary positions.
    final_ln_tpl: Template of the normalization before the output layer. If
      None, there is none.
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
    """Embeds tokens, [B, L, D].

    Args:
      ids_BL: The tokens.
      position: Their positions, [B, L], or [L] for all rows. If None, they
        count from 0.
      embedding: The embedding. If None, the target's.
    """
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
    most = getattr(self.hparams.position_emb_tpl, 'max_seq_length', length)
    if length > most:
      raise ValueError(
        f'Got {length} positions; {self.module_name} has max_seq_length {most}.'
        ' Decode fewer tokens, or increase it.'
      )


class TransformerLm(_Embedded):
  """A language model with one stack of layers.

  Attributes:
    stacked_transformer_tpl: Template of the stack.
    packed_input: Whether rows hold several documents, which must not see each
      other. If so, `segment_ids` is required.
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
    if (segment_ids is not None) != self.hparams.packed_input:
      got = 'no' if segment_ids is None else 'a value of'
      raise ValueError(
        f'{self.module_name}.packed_input is {self.hparams.packed_input}, and'
        f' there is {got} segment_ids. Give segment_ids exactly if packed_input'
        ' is True.'
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
      ValueError: `length` exceeds the number of trained positions.
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

  As in Vaswani et al. (2017), but with each sublayer's input normalized. The
  inherited fields of the embedding and the output layer are the decoder's.

  Attributes:
    encoder_stacked_transformer_tpl: Template of the encoder's stack.
    decoder_stacked_transformer_tpl: Template of the decoder's stack.
    encoder_embedding_tpl: Template of the source's embedding, with its own
      `num_classes`. If None, the target's embedding is used.
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
    """Returns the encoded source, which the decoder attends to, [B, T, D].

    Args:
      source_ids: Integers below the source's vocabulary size, [B, T].
      source_paddings: [B, T], 1 for padding, 0 for tokens.
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
      ValueError: `length` exceeds the number of trained positions.
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
