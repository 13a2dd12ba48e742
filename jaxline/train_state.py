"""What a training step changes: the state, its shapes and its sharding."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxline import errors
from jaxline.base import trees
from jaxline.parallel import partitioning
from jaxline.parallel import placement

# The entry of a model state with the average of the weights over the steps, if
# the experiment keeps one: see `average_weights`.
EMA = 'ema'


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that a step changes.

  Attributes:
    step: number of steps done, an int32 scalar.
    params: the weights that the optimizer changes.
    model_state: what the loss function itself changes, such as statistics.
    opt_state: the optimizer's state.
    skipped: number of steps that `on_nonfinite = 'skip'` left out, [2] int32:
      in a row up to now, and in all.
  """

  step: Any
  params: Any
  model_state: Any
  opt_state: Any
  skipped: Any = dataclasses.field(
    default_factory=lambda: np.zeros([2], np.int32)
  )


def init_state(
  init_fn: Callable[[jax.Array], tuple[Any, Any]],
  optimizer: optax.GradientTransformation,
  rng: jax.Array,
  trainable_rules: str | Sequence[str] | None = None,
) -> TrainState:
  """Returns the state before the first step; `Logical` weights stay so."""
  params, model_state = strongly_typed(init_fn(rng))
  trains = trainable_only(partitioning.unbox(params), trainable_rules)
  step = jnp.zeros((), jnp.int32)
  return strongly_typed(
    TrainState(step, params, model_state, optimizer.init(trains))
  )


def strongly_typed(tree: Any) -> Any:
  """Replaces the weak types of Python numbers by strong ones.

  The first step would do so, and the second step would be compiled again.
  """
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


@dataclasses.dataclass(eq=False)
class Layout:
  """The shapes and the sharding of what `init(rng)` returns, before it does."""

  init: Callable[[jax.Array], TrainState]
  rng: jax.Array
  partitioner: partitioning.Partitioner

  # Cached, since every save needs it while training waits.
  @functools.cached_property
  def named(self) -> TrainState:
    """The shapes of the state, with the names of the weights' axes."""
    return jax.eval_shape(self.init, self.rng)

  @functools.cached_property
  def shardings(self) -> TrainState:
    """The sharding of each array of the state."""
    named, partitioner = self.named, self.partitioner
    opt_specs = partitioner.specs_like(named.opt_state, named.params)
    return partitioner.shardings(
      dataclasses.replace(partitioner.specs(named), opt_state=opt_specs)
    )

  def abstract(self) -> TrainState:
    """Returns the shapes and shardings of the state."""
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      partitioning.unbox(self.named),
      self.shardings,
    )

  def make(self) -> TrainState:
    """Returns the initial state. No array is ever whole on a device."""
    if lines := self.partitioner.undersharded_weights(self.named.params):
      text = 'These weights are split less than the sharding asks for:\n%s'
      logging.info(text, '\n'.join(lines))
    options = None
    if jax.default_backend() == 'cpu' and not jax.config.read(
      'jax_disable_most_optimizations'
    ):
      # Random numbers take longer to compile than to make: with fewer
      # optimizations half as long, for the same bits.
      options = {'xla_backend_optimization_level': 1}
    make = jax.jit(
      lambda rng: partitioning.unbox(self.init(rng)),
      out_shardings=self.shardings,
      compiler_options=options,
    )
    return make(placement.put(self.rng, self.partitioner.replicated))


def trainable(params: Any, rules: str | Sequence[str]) -> Any:
  """Returns a tree of bools: which weights train.

  A weight trains if one of the regular expressions `rules` matches its whole
  name, such as 'embedding/norm/scale'; one that matches none is an error.
  """
  trains = dict.fromkeys(trees.named_leaves(params), False)
  for rule in [rules] if isinstance(rules, str) else rules:
    found = [name for name in trains if re.fullmatch(rule, name)]
    if not found:
      raise errors.UsageError(
        f'{rule!r} in trainable matches the whole name of no weight; nearest'
        f' are {errors.nearest(rule, trains, n=8, cutoff=0)}.'
      )
    trains |= dict.fromkeys(found, True)
  return jax.tree.unflatten(jax.tree.structure(params), trains.values())


def trainable_only(params: Any, rules: str | Sequence[str] | None) -> Any:
  """Returns the weights with None for those that do not train, if any."""
  if rules is None:
    return params
  mask = trainable(params, rules)
  return jax.tree.map(lambda x, trains: x if trains else None, params, mask)


def merge_frozen(params: Any, whole: Any) -> Any:
  """Returns weights with those of `whole` in place of each None."""
  return jax.tree.map(
    lambda x, frozen: frozen if x is None else x,
    params,
    whole,
    is_leaf=lambda x: x is None,
  )


def average_weights(
  before: TrainState, after: TrainState, decay: float
) -> dict[str, Any]:
  """Returns the model state with a new moving average of the weights.

  For `after_update`. `init_fn` puts the initial weights into the entry `EMA` of
  the model state as it returns them, so that the average is sharded like them.

  It averages over about 1 / (1 - decay) steps. As in `optax.ema(debias=True)`,
  the initial weights do not count, and neither do skipped steps. The average
  keeps its dtypes: that of bfloat16 should be float32.
  """
  count = (after.step - after.skipped[1]).astype(jnp.float32)
  # The corrected average is kept, and not the moment of `optax.ema`, so that
  # each checkpoint has weights to use. `expm1`, since float32 would round
  # 1 - decay**count to few digits.
  share = (1 - decay) / -jnp.expm1(count * math.log(decay))

  def new_average(average: jax.Array, weight: jax.Array) -> jax.Array:
    change = weight.astype(average.dtype) - average
    return average + share.astype(average.dtype) * change

  average = jax.tree.map(new_average, before.model_state[EMA], after.params)
  return {**after.model_state, EMA: average}


def averaged_weights(state: TrainState) -> Any:
  """Returns the average of the weights; the weights if the state has none."""
  params, model_state = state.params, state.model_state
  has_average = isinstance(model_state, Mapping) and EMA in model_state
  # Before its first step, a run may have only the weights of another run.
  if not has_average or int(state.step) == 0:
    return params
  return jax.tree.map(
    lambda x, like: x.astype(like.dtype), model_state[EMA], params
  )


def differences(
  a: Any, b: Any, a_says: str, b_says: str, name: str = ''
) -> list[str]:
  """Returns '{name}/{path}: {a_says} {shape}, {b_says} {shape}' for each."""
  have, want = (trees.named_leaves(tree, name) for tree in (a, b))

  def shape(x: Any) -> str:
    dtype = getattr(x, 'dtype', type(x).__name__)
    return 'nothing' if x is None else f'{dtype}{list(np.shape(x))}'

  return [
    f'{k}: {a_says} {shape(have.get(k))}, {b_says} {shape(want.get(k))}'
    for k in sorted(have | want)
    if shape(have.get(k)) != shape(want.get(k))
  ]
