"""One layer of a transformer: attention, and a position-wise part.

Each part normalises its input first (Xiong et al., 2020), and adds to it. Like
a stack, a layer has `__call__` for whole sequences, and for decoding
`empty_cache` and `extend_step`. Axis 1 of all arrays of a cache is the batch;
axis 0 counts the layers of a loop.

Shapes: B batch, L length, D width, F hidden width, H heads, G heads of keys and
values, K head dim, V vocab, S matrices side by side, M positions of a cache, T
length of the source.
"""

from typing import Any

import jax

from examples import transformer
from examples.pax import base_layer
from examples.pax import hparams
from examples.pax.layers import activations
from examples.pax.layers import attentions
from examples.pax.layers import normalizations
from examples.pax.layers import stochastics

BaseHParams = hparams.BaseHParams
sub_config_field = base_layer.sub_config_field

Context = attentions.Context


def given(**fields: Any) -> dict[str, Any]:
  """Returns those that say something: not 0, and not None."""
  return {name: value for name, value in fields.items() if value}


class _Residual(base_layer.BaseLayer):
  """A layer of parts, each of which normalises and adds to its input.

  Attributes:
    input_dims: D.
    ln_tpl: what normalises the input of a part.
    residual_dropout_prob: part of what each part adds that is dropped in
      training.
  """

  input_dims: int = 0
  ln_tpl: BaseHParams = sub_config_field(normalizations.LayerNorm.HParams)
  residual_dropout_prob: float = 0.0

  def setup(self) -> None:
    p = self.hparams
    self.create_child('layer_norm', p.ln_tpl, dim=p.input_dims)
    self.create_child(
      'residual_dropout', **stochastics.dropout(p.residual_dropout_prob)
    )


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
    hidden = self.ffn_layer1(self.layer_norm(inputs))
    if p.use_gated_activation:
      gate_BLF, value_BLF = transformer.parts(hidden)
      hidden_BLF = self.activation(gate_BLF) * value_BLF
    else:
      hidden_BLF = self.activation(hidden)
    hidden_BLF = self.shard(hidden_BLF, transformer.HIDDEN, 'hidden')
    hidden_BLF = self.relu_dropout(hidden_BLF, rows)
    out = self.residual_dropout(self.ffn_layer2(hidden_BLF), rows)
    if p.add_skip_connection:
      if p.residual_weight != 1:
        out *= p.residual_weight
      out = inputs + out
    return out


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
      **given(
        num_heads=p.num_heads,
        dim_per_head=p.dim_per_head,
        atten_dropout_prob=p.atten_dropout_prob,
      ),
    }
    self.create_child(
      'self_attention', p.tr_atten_tpl, is_causal=p.is_causal, **heads
    )
    if p.use_cross_attention:
      norm = p.ln_tpl.clone()
      self.create_child('cross_layer_norm', norm, dim=p.input_dims)
      self.create_child(
        'cross_attention',
        p.cross_atten_tpl or p.tr_atten_tpl.clone(),
        is_cross_attention=True,
        **heads,
      )
    self.create_child(
      'ff_layer',
      p.tr_fflayer_tpl,
      input_dims=p.input_dims,
      **given(
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
    mixed = self.self_attention(self.layer_norm(inputs), context)
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
      context: only `source_seen` counts.

    Returns:
      [B, L, D], and the cache.
    """
    context = context or Context()
    own = jax.tree.map(lambda x: x[0], cache)
    mixed, of_self = self.self_attention.extend_step(
      self.layer_norm(inputs), own['self'], start
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
    x_BLD += self.residual_dropout(mixed_BLD, context.rows)
    if source is not None:
      mixed_BLD = self.cross_attention.attend_to(
        self.cross_layer_norm(x_BLD), source, context
      )
      x_BLD += self.residual_dropout(mixed_BLD, context.rows)
    x_BLD = self.ff_layer(x_BLD, context.rows)
    return self.shard(x_BLD, transformer.BETWEEN_BLOCKS)
