"""A repeated layer: one loop over stacked weights.

Shapes: N repetitions. In the arrays of a cache, axis 0 concatenates the layers,
and axis 1 is the batch.
"""

from collections.abc import Callable
import operator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from examples import transformer
from examples.pax import base_layer
from jaxline.parallel import partitioning


class AutodiffCheckpointType:
  """Pax's names for a `checkpoint_policy`; see `transformer.remat_policy`."""

  SAVE_NOTHING = 'full'
  SAVE_EVERYTHING = 'nothing'
  SAVE_DOT_WITH_NO_BATCH_DIM = 'dots'


class Repeat(base_layer.BaseLayer):
  """Runs N equal layers with separate weights as one loop.

  The compile time does not grow with N. A layer's `__call__(x, *args)` returns
  the next layer's `x`; `args` are the same for all layers. If the layer has
  `empty_cache` and `extend_step`, so does the loop.

  `layer` is one layer, not bound to a run. Call it with `layer.apply(slice of
  variables, ...)`.
  """

  sub_tpl: base_layer.LayerTpl | None = base_layer.template_field(None)
  x_times: int = 0  # N.
  # Rematerialization of each layer; see `transformer.remat_policy`.
  checkpoint_policy: str = 'full'

  def setup(self) -> None:
    run = self.in_run()
    self.layer = self._unbound_child(self.sub_tpl, {'name': 'sub'})
    # `apply` runs the layers. This run only holds their variables.
    outside = run.stacks
    run.stacks = (*outside, (self.module_name, self.x_times))
    self._child('sub', self.sub_tpl, {})
    run.stacks = outside

  def variables(self, *, boxed: bool = False) -> base_layer.Variables:
    """Returns variables like `layer.init`, with a leading axis of the layers.

    Args:
      boxed: Whether to wrap each in a `partitioning.Logical`.
    """
    run = self.in_run()

    def value(path: str, name: str, weight: base_layer.WeightHParams) -> Any:
      x = run.value(path, name)
      return partitioning.Logical(x, weight.axes) if boxed else x

    return run.tree(value, f'{self.module_name}/')

  def __call__(self, x: Any, *args: Any) -> Any:
    """Returns the output of the last layer."""
    return self._scan('__call__', x, None, args)[0]

  def empty_cache(self, batch: int, length: int, *args: Any) -> Any:
    """Concatenates the caches of the layers: [n, B, ...] to [N n, B, ...]."""

    def one(variables: base_layer.Variables) -> Any:
      return self.layer.apply(
        variables, batch, length, *args, method='empty_cache', do_eval=True
      )

    return _joined(jax.lax.map(one, self.variables()))

  def extend_step(self, x: Any, cache: Any, *args: Any) -> tuple[Any, Any]:
    """Returns the output of the last layer, and the extended cache."""
    return self._scan('extend_step', x, cache, args)

  def _scan(
    self, method: str, x: Any, cache: Any, args: tuple[Any, ...]
  ) -> tuple[Any, Any]:
    run = self.runner(method)

    def one(x: Any, of_layer: Any) -> tuple[Any, Any]:
      variables, number, cache = of_layer
      if cache is None:
        x, collected = run(variables, number, x, *args)
        return x, (None, collected)
      (x, cache), collected = run(variables, number, x, cache, *args)
      return x, (cache, collected)

    policy = transformer.remat_policy(self.checkpoint_policy)
    if policy is not None and cache is None:
      # XLA does not merge a loop with its recomputation, so CSE does no harm.
      one = jax.checkpoint(one, policy=policy, prevent_cse=False)
    times = self.x_times
    cache = jax.tree.map(lambda c: c.reshape(times, -1, *c.shape[1:]), cache)
    layers = (self.variables(), jnp.arange(times), cache)
    x, (cache, collected) = jax.lax.scan(one, x, layers)
    run_of_all = self.in_run()
    for path, values in collected.non_trainable.items():
      for name, value in values.items():
        run_of_all.update(f'{self.module_name}/{path}', name, value)

    def by_layer(tree: dict[str, Any]) -> dict[str, Any]:
      return {
        f'{i}/{name}': jax.tree.map(operator.itemgetter(i), value)
        for name, value in tree.items()
        for i in range(times)
      }

    collected.summaries = by_layer(collected.summaries)
    collected.aux_losses = by_layer(collected.aux_losses)
    run_of_all.collected.add(collected, f'{self.module_name}/')
    return x, _joined(cache)

  def runner(self, method: str) -> Callable[..., Any]:
    """Returns a pure function `(variables, index of the layer, *args)`.

    It returns the method's result and the side outputs. A layer's random
    numbers depend only on its index, not on the loop or pipeline that runs it.
    """
    key = hk.maybe_next_rng_key()
    layer, run_of_all = self.layer, self.in_run()

    def run(variables: Any, number: jax.Array, *args: Any) -> Any:
      return layer.apply(
        variables,
        *args,
        rng=None if key is None else jax.random.fold_in(key, number),
        method=method,
        do_eval=run_of_all.do_eval,
        verbosity=run_of_all.verbosity,
        mutable=True,
      )

    return run


def _joined(cache: Any) -> Any:
  """Reshapes [N, n, ...] to [N n, ...]."""
  return jax.tree.map(lambda c: c.reshape(-1, *c.shape[2:]), cache)


def remat(layer: base_layer.BaseLayer, **kwargs: Any) -> Callable[..., Any]:
  """Applies `hk.remat` to a layer's call, and keeps its summaries and losses.

  Args:
    layer: The layer, bound to a run.
    **kwargs: Arguments of `jax.checkpoint`.
  """
  run = layer.in_run()

  def inside(*args: Any) -> tuple[Any, base_layer.Collected]:
    outside, run.collected = run.collected, base_layer.Collected()
    try:
      return layer(*args), run.collected
    finally:
      run.collected = outside

  def call(*args: Any) -> Any:
    out, collected = hk.remat(inside, **kwargs)(*args)
    run.collected.add(collected)
    return out

  return call
