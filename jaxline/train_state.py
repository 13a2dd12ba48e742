"""The state of sharded steps: initialization, sharding, averaged weights."""

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

# If an experiment averages its weights over the steps (see `average_weights`),
# this entry of its model state holds the average.
EMA = 'ema'


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that a step changes.

  Attributes:
    step: number of completed steps, an int32 scalar.
    params: the weights, which the optimizer changes.
    model_state: state that the loss function returns, such as statistics.
    opt_state: the optimizer's state.
    skipped: number of steps that `on_nonfinite = 'skip'` discarded, [2] int32:
      consecutive ones up to this step, and the total.
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
  """Returns the initial state; keeps the axis names of `Logical` weights."""
  params, model_state = strongly_typed(init_fn(rng))
  trains = trainable_only(partitioning.unbox(params), trainable_rules)
  step = jnp.zeros((), jnp.int32)
  return strongly_typed(
    TrainState(step, params, model_state, optimizer.init(trains))
  )


def strongly_typed(tree: Any) -> Any:
  """Replaces weak types of Python numbers, to avoid a second compilation."""
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


@dataclasses.dataclass(eq=False)
class Layout:
  """The shapes and shardings of the state, without running `init(rng)`."""

  init: Callable[[jax.Array], TrainState]
  rng: jax.Array
  partitioner: partitioning.Partitioner

  # Cached, since training waits for it at every save.
  @functools.cached_property
  def named(self) -> TrainState:
    """The shapes of the state, with the axis names of the weights."""
    return jax.eval_shape(self.init, self.abstract_rng())

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

  def abstract_rng(self) -> jax.ShapeDtypeStruct:
    key, sharding = self.rng, self.partitioner.replicated
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding)

  def make(self) -> TrainState:
    """Returns the initial state; each device makes only its own shards."""
    if lines := self.partitioner.undersharded_weights(self.named.params):
      text = 'These weights are split less than the sharding asks for:\n%s'
      logging.info(text, '\n'.join(lines))
    options = None
    if jax.default_backend() == 'cpu' and not jax.config.read(
      'jax_disable_most_optimizations'
    ):
      # Compiling the random numbers takes longer than making them. Fewer
      # optimizations halve that time and give the same bits.
      options = {'xla_backend_optimization_level': 1}
    make = jax.jit(
      lambda rng: partitioning.unbox(self.init(rng)),
      out_shardings=self.shardings,
      compiler_options=options,
    )
    return make(placement.put(self.rng, self.partitioner.replicated))


def trainable(params: Any, rules: str | Sequence[str]) -> Any:
  """Returns a tree of bools: whether each weight trains.

  A weight trains if one of the regular expressions `rules` matches its full
  name, such as 'embedding/norm/scale'. A rule that matches no name is an error.
  """
  trains = dict.fromkeys(trees.named_leaves(params), False)
  for rule in [rules] if isinstance(rules, str) else rules:
    found = [name for name in trains if re.fullmatch(rule, name)]
    if not found:
      raise errors.UsageError(
        f'{rule!r} in trainable must match the full name of a weight, and does'
        f' not. Similar: {errors.nearest(rule, trains, n=8, cutoff=0)}.'
      )
    trains |= dict.fromkeys(found, True)
  return jax.tree.unflatten(jax.tree.structure(params), trains.values())


def trainable_only(params: Any, rules: str | Sequence[str] | None) -> Any:
  """Returns the weights, with None in place of those that do not train."""
  if rules is None:
    return params
  mask = trainable(params, rules)
  return jax.tree.map(lambda x, trains: x if trains else None, params, mask)


def merge_frozen(params: Any, whole: Any) -> Any:
  """Returns `params`, with each None replaced by the weight of `whole`."""
  return jax.tree.map(
    lambda x, frozen: frozen if x is None else x,
    params,
    whole,
    is_leaf=lambda x: x is None,
  )


def average_weights(
  before: TrainState, after: TrainState, decay: float
) -> dict[str, Any]:
  """Returns the model state with an updated moving average of the weights.

  Return it from `after_update`. Let `init_fn` put its initial weights into the
  entry `EMA` of the model state too, so that the average is sharded like them.

  The average spans about 1 / (1 - decay) steps. As in `optax.ema(debias=True)`,
  the initial weights do not count; neither do skipped steps. The average keeps
  the dtypes of its entry: use float32 for the average of bfloat16 weights.
  """
  count = (after.step - after.skipped[1]).astype(jnp.float32)
  # Unlike `optax.ema`, keep the debiased average instead of the raw moment, so
  # that each checkpoint has usable weights. `expm1` keeps digits that float32
  # loses in 1 - decay**count.
  share = (1 - decay) / -jnp.expm1(count * math.log(decay))

  def new_average(average: jax.Array, weight: jax.Array) -> jax.Array:
    change = weight.astype(average.dtype) - average
    return average + share.astype(average.dtype) * change

  average = jax.tree.map(new_average, before.model_state[EMA], after.params)
  return {**after.model_state, EMA: average}


def averaged_weights(state: TrainState) -> Any:
  """Returns the averaged weights, or the weights if there is no average."""
  params, model_state = state.params, state.model_state
  has_average = isinstance(model_state, Mapping) and EMA in model_state
  # At step 0, weights may come from another run, but the average does not.
  if not has_average or int(state.step) == 0:
    return params
  return jax.tree.map(
    lambda x, like: x.astype(like.dtype), model_state[EMA], params
  )


def differences(
  a: Any, b: Any, a_says: str, b_says: str, name: str = ''
) -> list[str]:
  """Lists leaves that differ: '{path}: {a_says} {shape}, {b_says} {shape}'."""
  have, want = (trees.named_leaves(tree, name) for tree in (a, b))

  def shape(x: Any) -> str:
    dtype = getattr(x, 'dtype', type(x).__name__)
    return 'nothing' if x is None else f'{dtype}{list(np.shape(x))}'

  return [
    f'{k}: {a_says} {shape(have.get(k))}, {b_says} {shape(want.get(k))}'
    for k in sorted(have | want)
    if shape(have.get(k)) != shape(want.get(k))
  ]
