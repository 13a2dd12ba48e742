"""Stacks of transformer layers.

There are three ways to run a stack, with the same result: `StackedTransformer`
(unrolled), `StackedTransformerRepeated` (one loop) and `PipelinedTransformer`.
Each has the methods of a single layer: see `transformer_layers`.

Shapes: as in `attentions`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from examples import fp8
from examples import transformer
from examples.pax import base_layer
from examples.pax.layers import attentions
from examples.pax.layers import repeats
from examples.pax.layers import transformer_layers
from jaxline import errors
from jaxline.base import keys

LayerTpl = base_layer.LayerTpl
template_field = base_layer.template_field

Context = attentions.Context


class StackedTransformer(base_layer.BaseLayer):
  """A sequence of layers, unrolled so that XLA can fuse across them.

  Sizes that are 0 or None, and a dropout rate of 0, take the value of
  `transformer_layer_params_tpl`.
  """

  num_layers: int = 0
  model_dims: int = 0  # D.
  hidden_dims: int = 0  # F.
  num_heads: int = 0  # H.
  dim_per_head: int | None = None  # K.
  mask_self_attention: bool = False  # Whether a position sees no later ones.
  use_cross_attention: bool = False  # Whether to attend to `Context.source`.
  dropout_prob: float = 0.0  # All dropout rates of the layers.
  transformer_layer_params_tpl: LayerTpl = template_field(
    transformer_layers.Transformer
  )
  checkpoint_policy: str = 'nothing'  # Policy of each layer: see `Repeat`.

  _CHECKS = {'num_layers': keys.integer(min=1)}

  def setup(self) -> None:
    p = self.hparams
    fields = transformer_layers.non_default(
      input_dims=p.model_dims,
      hidden_dims=p.hidden_dims,
      num_heads=p.num_heads,
      dim_per_head=p.dim_per_head,
      residual_dropout_prob=p.dropout_prob,
      relu_dropout_prob=p.dropout_prob,
      atten_dropout_prob=p.dropout_prob,
    )
    self.create_children(
      'x_layers',
      [p.transformer_layer_params_tpl.clone() for _ in range(p.num_layers)],
      is_causal=p.mask_self_attention,
      use_cross_attention=p.use_cross_attention,
      **fields,
    )

  def __call__(
    self, inputs: jax.Array, context: Context | None = None
  ) -> jax.Array:
    """Returns [B, L, D]; see `Transformer`."""
    x_BLD = inputs
    policy = transformer.remat_policy(self.checkpoint_policy)
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
  """A stack that delegates to a `Repeat`, its child `repeat`.

  It has the methods of a `Transformer`. The arrays of its cache are [N, B,
  ...], where N is the number of layers.
  """

  def _create(self, block: Any, times: int, policy: str) -> None:
    repeat = repeats.Repeat.HParams(
      sub_tpl=block, x_times=times, checkpoint_policy=policy
    )
    self.create_child('repeat', repeat)

  def __call__(
    self, inputs: jax.Array, context: Context | None = None
  ) -> jax.Array:
    """Returns [B, L, D]."""
    return self.repeat(inputs, context)

  def empty_cache(
    self, batch: int, length: int, source: jax.Array | None = None
  ) -> Any:
    return self.repeat.empty_cache(batch, length, source)

  def extend_step(
    self,
    inputs: jax.Array,
    cache: Any,
    start: int | jax.Array,
    context: Context | None = None,
  ) -> tuple[jax.Array, Any]:
    return self.repeat.extend_step(inputs, cache, start, context)


class StackedTransformerRepeated(_RepeatedStack):
  """A sequence of layers, run as one loop over stacked weights."""

  # The repeated block, which is often one layer.
  block: LayerTpl = template_field(StackedTransformer)
  x_times: int = 0  # Number of repetitions.
  checkpoint_policy: str = 'full'  # Policy of each block: see `Repeat`.

  def setup(self) -> None:
    self._create(self.block, self.x_times, self.checkpoint_policy)


class PipelinedTransformer(_RepeatedStack):
  """A sequence of layers, distributed over the stages of a pipeline.

  A stage given as `StackedTransformerRepeated` runs as a loop over its blocks.
  A `StackedTransformer` is unrolled. Either way, the paths of the weights and
  the results are the same as for a `StackedTransformerRepeated` of all layers,
  and decoding runs that loop. Summaries of the layers are not collected. See
  `jaxline.parallel.pipeline`.
  """

  # A stage's layers in one repeat. The number of layers is their number times
  # the stages times the repeats.
  pipeline_stage: LayerTpl = template_field(StackedTransformer)
  num_pipeline_stages: int = 1  # They work at the same time.
  # Number of microbatches, or the rows of each; set one of the two.
  num_pipeline_microbatches: int | None = None
  pipeline_microbatch_size: int | None = None
  circular_repeat: int = 1  # How often a microbatch passes all stages.

  _CHECKS = {
    'num_pipeline_microbatches': keys.optional(keys.integer(min=1)),
    'pipeline_microbatch_size': keys.optional(keys.integer(min=1)),
  }
  _RULES = {
    'exactly one of num_pipeline_microbatches and pipeline_microbatch_size': (
      lambda p: (
        (p.num_pipeline_microbatches is None)
        != (p.pipeline_microbatch_size is None)
      )
    )
  }

  def setup(self) -> None:
    p = self.hparams
    stage = p.pipeline_stage
    if isinstance(stage, StackedTransformerRepeated.HParams):
      layer, times = stage.block, stage.x_times
    else:
      layer = stage.clone().set(num_layers=1, checkpoint_policy='nothing')
      times = stage.num_layers
    times *= p.num_pipeline_stages * p.circular_repeat
    self._create(layer, times, stage.checkpoint_policy)
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
    """Returns [B, L, D].

    Raises:
      ValueError: The batch or the mesh does not divide as required, or a layer
        has an auxiliary loss.
    """
    p = self.hparams
    batch = inputs.shape[0]
    context = context or Context()
    if context.rows is None:  # Dropout must not depend on the microbatch.
      context = context._replace(rows=jnp.arange(batch))
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

    if batch % (p.pipeline_microbatch_size or 1):
      raise errors.UsageError(
        f'{self.module_name}.pipeline_microbatch_size is'
        f' {p.pipeline_microbatch_size}; expected a divisor of the batch'
        f' {batch}.'
      )
    return transformer.pipelined(
      run_layer,
      self.repeat.variables(boxed=True)[base_layer.PARAMS],
      inputs,
      context,
      num_stages=p.num_pipeline_stages,
      num_microbatches=p.num_pipeline_microbatches
      or batch // p.pipeline_microbatch_size,
      num_repeats=p.circular_repeat,
      unroll=not isinstance(
        p.pipeline_stage, StackedTransformerRepeated.HParams
      ),
      remat=p.pipeline_stage.checkpoint_policy,
    )


def in_blocks(stack: Any, **fields: Any) -> Any:
  """Returns a stack's HParams with fields set in its `StackedTransformer`."""
  stack = stack.clone()
  for field in ('pipeline_stage', 'block'):
    if field in stack.names():
      return stack.set(**{field: in_blocks(getattr(stack, field), **fields)})
  if 'mask_self_attention' not in stack.names():
    return stack  # The layer that uses the template rejects it.
  return stack.set(**fields)
