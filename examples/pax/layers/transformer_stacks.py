"""Stacks of layers of a transformer.

A stack is run in one of three ways, which compute the same:
`StackedTransformer` (unrolled), `StackedTransformerRepeated` (one loop) or
`PipelinedTransformer`. Each has the methods of one layer: see
`transformer_layers`.

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
from examples.pax.layers import attentions
from examples.pax.layers import repeats
from examples.pax.layers import transformer_layers
from jaxline import errors

BaseHParams = hparams.BaseHParams
sub_config_field = base_layer.sub_config_field

Context = attentions.Context


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
    transformer_layers.Transformer.HParams
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
      **transformer_layers.given(
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
      run = layer if policy is None else repeats.remat(layer, policy=policy)
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


def in_blocks(stack: Any, **fields: Any) -> Any:
  """Returns a stack's HParams with fields set in its `StackedTransformer`."""
  stack = stack.clone()
  for field in ('pipeline_stage', 'block'):
    if field in stack.names():
      return stack.set(**{field: in_blocks(getattr(stack, field), **fields)})
  if 'mask_self_attention' not in stack.names():
    return stack  # The layer that takes it refuses it.
  return stack.set(**fields)
