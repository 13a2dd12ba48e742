"""Stacks of transformer layers.

There are three ways to run a stack, with the same result: `StackedTransformer`
(unrolled), `StackedTransformerRepeated` (one loop) and `PipelinedTransformer`.
Each has the methods of a single layer: see `transformer_layers`.

Shapes: B batch, L length, D width, F hidden width, H heads, G heads of keys and
values, K head dim, V vocab, S stacked matrices, M positions of a cache, T
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
  """A sequence of layers, unrolled so that XLA can fuse across them.

  Sizes that are 0 or None take the value of `transformer_layer_params_tpl`.

  Attributes:
    num_layers: Number of layers.
    model_dims: D.
    hidden_dims: F.
    num_heads: H.
    dim_per_head: K.
    mask_self_attention: Whether a position sees no later ones.
    use_cross_attention: Whether the layers attend to `Context.source`.
    residual_dropout_prob: Dropout rate of the sublayers' outputs.
    relu_dropout_prob: Dropout rate of the feed-forward blocks' hidden values.
    atten_dropout_prob: Dropout rate of the attention weights.
    dropout_prob: Default of the three dropout rates, used where they are 0.
    transformer_layer_params_tpl: Template of the layers.
    checkpoint_policy: Rematerialization policy of each layer; see
      `transformer.remat_policy`.
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
      **transformer_layers.non_default(
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
    """Returns the caches of the layers, arrays [1, B, ...]."""
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


class _RepeatedStack(base_layer.BaseLayer):
  """A stack that delegates to a `Repeat`, its child `repeat`."""

  def __call__(
    self, inputs: jax.Array, context: Context | None = None
  ) -> jax.Array:
    """Returns [B, L, D]; see `Transformer`."""
    return self.repeat(inputs, context)

  def empty_cache(
    self, batch: int, length: int, source: jax.Array | None = None
  ) -> Any:
    """Returns the caches of all layers, arrays [x_times, B, ...]."""
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


class StackedTransformerRepeated(_RepeatedStack):
  """A sequence of layers, run as one loop over stacked weights.

  Attributes:
    block: Template of the repeated block, which is often one layer.
    x_times: Number of repetitions.
    checkpoint_policy: Rematerialization policy of each block; see
      `transformer.remat_policy`.
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


class PipelinedTransformer(_RepeatedStack):
  """A sequence of layers, distributed over the stages of a pipeline.

  A stage given as `StackedTransformerRepeated` runs as a loop over its blocks.
  A `StackedTransformer` is unrolled. Either way, the paths of the weights and
  the results are the same as for a `StackedTransformerRepeated` of all layers,
  and decoding runs that loop. Summaries of the layers are not collected. See
  `jaxline.parallel.pipeline`.

  Attributes:
    pipeline_stage: Template of a stage's layers in one repeat. The number of
      layers is their number times the stages times the repeats.
    num_pipeline_stages: Number of stages, which work at the same time.
    num_pipeline_microbatches: Number of microbatches. Set either this field or
      `pipeline_microbatch_size`.
    pipeline_microbatch_size: Rows of a microbatch.
    circular_repeat: Number of times that a microbatch passes all stages.
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
        f' pipeline_microbatch_size {sizes[1]}. Set exactly one of them, to a'
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
        f'{self.module_name} has products in FP8, which return new scales in'
        ' place of gradients. A pipeline would sum them over microbatches. Use'
        ' StackedTransformerRepeated, or use_fp8=False.'
      )
    if variables := found[base_layer.NON_TRAINABLE]:
      raise ValueError(
        f'{self.module_name} is a pipeline, which would lose the updates of the'
        f' non-trainable variables of {sorted(variables)}. Use'
        ' StackedTransformerRepeated.'
      )

  def __call__(
    self, inputs: jax.Array, context: Context | None = None
  ) -> jax.Array:
    """Returns [B, L, D]; see `Transformer`.

    Raises:
      ValueError: The batch or the mesh does not divide as required, or a layer
        has an auxiliary loss.
    """
    p = self.hparams
    context = context or Context()
    if context.rows is None:  # Dropout must not depend on the microbatch.
      context = context._replace(rows=jnp.arange(inputs.shape[0]))
    run = self.repeat.runner('__call__')

    def run_layer(
      params: Any, number: jax.Array, x: jax.Array, context: Any
    ) -> jax.Array:
      x, collected = run({base_layer.PARAMS: params}, number, x, context)
      if collected.aux_losses:
        raise ValueError(
          f'{self.module_name} is a pipeline, whose layers must not have an aux'
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
    return stack  # The layer that uses the template rejects it.
  return stack.set(**fields)
