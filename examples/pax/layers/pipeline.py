"""A repeated layer whose repetitions are the stages of a pipeline.

Shapes: B batch, N layers, S stages, R repeats, M microbatches.
"""

from typing import Any

import jax

from examples import fp8
from examples import transformer
from examples.pax import base_layer
from examples.pax.layers import repeats
from jaxline import errors


class Pipelined(repeats.Repeat):
  """Runs N equal layers on S stages, which work at the same time.

  The same weights in the same place, and the same result, as `repeats.Repeat`,
  which it is where it decodes; see `jaxline.pipeline`. The arrays of `args` are
  [B, ...]. Summaries of the layers are not collected.

  Attributes:
    num_pipeline_stages: S.
    num_pipeline_microbatches: M, parts into which the batch is cut; or
    pipeline_microbatch_size: B / M.
    circular_repeat: R, how often each part goes round the stages.
    unroll: whether a stage's layers are unrolled, or one loop.
  """

  num_pipeline_stages: int = 1
  num_pipeline_microbatches: int | None = None
  pipeline_microbatch_size: int | None = None
  circular_repeat: int = 1
  unroll: bool = False

  def setup(self) -> None:
    super().setup()
    p = self.hparams
    sizes = (p.num_pipeline_microbatches, p.pipeline_microbatch_size)
    given = [size for size in sizes if size is not None]
    if len(given) != 1 or given[0] < 1:
      raise ValueError(
        f'{self.module_name} has num_pipeline_microbatches {sizes[0]} and'
        f' pipeline_microbatch_size {sizes[1]}; expected one of them, a'
        ' positive number.'
      )
    found = self._sub.layer.abstract_init()
    if fp8.split(found[base_layer.PARAMS])[1]:
      raise errors.UsageError(
        f'{self.module_name} has products in FP8, which keep the next values of'
        ' their scales in place of gradients; a pipeline would add them up over'
        ' microbatches. Use Repeat, or use_fp8=False.'
      )
    variables = found[base_layer.NON_TRAINABLE]
    if variables:
      raise ValueError(
        f'{self.module_name} would lose what its microbatches write into the'
        f' variables of {sorted(variables)}, which are not trained. Use Repeat.'
      )

  def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
    """Returns what the last layer gives, [B, L, D].

    Args:
      x: [B, L, D].
      *args: for all layers, each a pytree of arrays [B, ...].

    Raises:
      ValueError: the sizes do not fit the batch or the mesh; or a layer has an
        aux loss.
    """
    p = self.hparams
    run = self._runner('__call__')

    def run_layer(
      params: Any, number: jax.Array, x: jax.Array, args: Any
    ) -> jax.Array:
      x, collected = run({base_layer.PARAMS: params}, number, x, *args)
      if collected.aux_losses:
        raise ValueError(
          f'{self.module_name} is a pipeline, in which no layer may have an aux'
          f' loss; got {sorted(collected.aux_losses)}. Use Repeat.'
        )
      return x

    return transformer.pipelined(
      run_layer,
      self._sub.variables(boxed=True)[base_layer.PARAMS],
      x,
      args,
      num_stages=p.num_pipeline_stages,
      num_microbatches=self._num_microbatches(x.shape[0]),
      num_repeats=p.circular_repeat,
      unroll=p.unroll,
      remat=p.checkpoint_policy,
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
