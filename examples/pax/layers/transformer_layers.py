"""One layer of a transformer: attention and a feed-forward block.

Each sublayer normalizes its input first (Xiong et al., 2020), and adds its
output to it. Like a stack, a layer has `__call__` for whole sequences, and
`empty_cache` and `extend_step` for decoding. In all arrays of a cache, axis 1
is the batch, and axis 0 counts the layers of a loop.

Shapes: as in `attentions`; F hidden width.
"""

from typing import Any

import jax

from examples import transformer
from examples.pax import base_layer
from examples.pax.layers import activations
from examples.pax.layers import attentions
from examples.pax.layers import normalizations
from examples.pax.layers import stochastics

LayerTpl = base_layer.LayerTpl
template_field = base_layer.template_field

Context = attentions.Context


def non_default(**fields: Any) -> dict[str, Any]:
  """Returns the fields that are set: neither 0 nor None."""
  return {name: value for name, value in fields.items() if value}


class _Residual(base_layer.BaseLayer):
  """A layer of sublayers with a normalization and a residual connection."""

  input_dims: int = 0  # D.
  hidden_dims: int = 0  # F; 0 in a `Transformer` takes `tr_fflayer_tpl`'s.
  ln_tpl: LayerTpl = template_field(normalizations.LayerNorm)
  # Dropout rates of the sublayers' outputs and of the hidden values.
  residual_dropout_prob: float = 0.0
  relu_dropout_prob: float = 0.0

  def setup(self) -> None:
    self.create_child('layer_norm', self.ln_tpl, dim=self.input_dims)
    dropout = stochastics.dropout(self.residual_dropout_prob)
    self.create_child('residual_dropout', **dropout)


class TransformerFeedForward(_Residual):
  """The feed-forward block: normalize, project D -> F -> D, add the input."""

  has_bias: bool = True  # Whether both projections have biases.
  activation_tpl: LayerTpl = template_field(activations.ReLU)
  # Whether to multiply the activation's output by a second projection of the
  # inputs (Shazeer, 2020).
  use_gated_activation: bool = False
  proj_tpl: LayerTpl = template_field(attentions.Projection)

  def setup(self) -> None:
    super().setup()
    p = self.hparams
    # The gate's weight and the other one are stacked. Each is initialized as a
    # separate matrix.
    parts = (2,) if p.use_gated_activation else ()
    s = 'S' * len(parts)
    self.create_child(
      'ffn_layer1',
      p.proj_tpl.clone(),
      spec=f'BLD,D{s}F->BL{s}F',
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
    dropout = stochastics.dropout(p.relu_dropout_prob)
    self.create_child('relu_dropout', **dropout)

  def __call__(
    self, inputs: jax.Array, rows: jax.Array | None = None
  ) -> jax.Array:
    """Returns [B, L, D].

    Args:
      inputs: [B, L, D].
      rows: Indices of the rows in the batch; see `Context`.
    """
    hidden = self.ffn_layer1(self.layer_norm(inputs))
    if self.use_gated_activation:
      gate_BLF, value_BLF = transformer.parts(hidden)
      hidden_BLF = self.activation(gate_BLF) * value_BLF
    else:
      hidden_BLF = self.activation(hidden)
    hidden_BLF = self.shard(hidden_BLF, transformer.HIDDEN, 'hidden')
    hidden_BLF = self.relu_dropout(hidden_BLF, rows)
    return inputs + self.residual_dropout(self.ffn_layer2(hidden_BLF), rows)


class Transformer(_Residual):
  """A layer of self-attention, optional cross-attention, and feed-forward.

  A size that is None or 0, or a dropout rate of 0, is left to the template of
  the sublayer.
  """

  num_heads: int = 0  # H.
  dim_per_head: int | None = None  # K.
  is_causal: bool = True  # Whether a position sees no later ones.
  # Whether to attend to `Context.source`.
  use_cross_attention: bool = False
  # Both kinds of attention.
  tr_atten_tpl: LayerTpl = template_field(attentions.DotProductAttention)
  tr_fflayer_tpl: LayerTpl = template_field(TransformerFeedForward)
  atten_dropout_prob: float = 0.0  # Rate of the attention weights.

  def setup(self) -> None:
    super().setup()
    p = self.hparams
    heads = {'input_dim': p.input_dims} | non_default(
      num_heads=p.num_heads,
      dim_per_head=p.dim_per_head,
      atten_dropout_prob=p.atten_dropout_prob,
    )
    self.create_child(
      'self_attention', p.tr_atten_tpl, is_causal=p.is_causal, **heads
    )
    if p.use_cross_attention:
      norm, attention = p.ln_tpl.clone(), p.tr_atten_tpl.clone()
      self.create_child('cross_layer_norm', norm, dim=p.input_dims)
      self.create_child(
        'cross_attention', attention, is_cross_attention=True, **heads
      )
    fields = non_default(
      hidden_dims=p.hidden_dims,
      residual_dropout_prob=p.residual_dropout_prob,
      relu_dropout_prob=p.relu_dropout_prob,
    )
    self.create_child(
      'ff_layer', p.tr_fflayer_tpl, input_dims=p.input_dims, **fields
    )

  def __call__(
    self, inputs: jax.Array, context: Context | None = None
  ) -> jax.Array:
    """Returns [B, L, D].

    Args:
      inputs: [B, L, D].
      context: Other inputs. If None, all are None.

    Raises:
      ValueError: `context.source` is missing for cross-attention, or given
        without it.
    """
    context = context or Context()
    mixed = self.self_attention(self.layer_norm(inputs), context)
    source = self._source(context.source)
    return self._add_and_feed_forward(inputs, mixed, source, context)

  def empty_cache(
    self, batch: int, length: int, source: jax.Array | None = None
  ) -> dict[str, attentions.Cache]:
    """Returns a cache for `extend_step`, arrays [1, B, ...].

    Args:
      batch: B.
      length: M, the largest number of positions.
      source: Sequence that cross-attention attends to, [B, T, D].
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
      cache: Cache from `empty_cache` or from the previous call.
      start: First position, for all rows, or [B] for each row.
      context: Other inputs, of which `source_seen` is used.

    Returns:
      The outputs [B, L, D] and the extended cache.
    """
    context = context or Context()
    own = jax.tree.map(lambda x: x[0], cache)
    mixed, of_self = self.self_attention.extend_step(
      self.layer_norm(inputs), own['self'], start
    )
    out = self._add_and_feed_forward(inputs, mixed, own.get('cross'), context)
    return out, {**cache, 'self': jax.tree.map(lambda x: x[None], of_self)}

  def _source(self, source: jax.Array | None) -> attentions.Cache | None:
    """Returns the keys and values of cross-attention, or None without it."""
    has = self.use_cross_attention
    if (source is not None) != has:
      got = 'no' if source is None else 'a'
      raise ValueError(
        f'{self.module_name} has use_cross_attention={has} and {got} source.'
        ' Give a source exactly if use_cross_attention is True.'
      )
    return self.cross_attention.keys_and_values(source) if has else None

  def _add_and_feed_forward(
    self,
    x_BLD: jax.Array,
    mixed_BLD: jax.Array,
    source: attentions.Cache | None,
    context: Context,
  ) -> jax.Array:
    """Returns the layer's output, given the output of self-attention."""
    x_BLD += self.residual_dropout(mixed_BLD, context.rows)
    if source is not None:
      mixed_BLD = self.cross_attention.attend_to(
        self.cross_layer_norm(x_BLD), source, context
      )
      x_BLD += self.residual_dropout(mixed_BLD, context.rows)
    x_BLD = self.ff_layer(x_BLD, context.rows)
    return self.shard(x_BLD, transformer.BETWEEN_BLOCKS)
