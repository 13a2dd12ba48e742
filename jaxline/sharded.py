"""The sharded style: pure functions in, one compiled step over a mesh out.

A subclass of `ShardedExperiment` says how weights begin (`init_fn`), what the
loss of a batch is (`loss_fn`), which optimizer (`make_optimizer`) and which
data (`train_input`, `eval_input`). From these come one jitted, donated program
`(state, batch, rng) -> (state, metrics)` over all devices of all hosts, an
evaluation that averages exactly, checkpoints, and data prefetched to where
the step wants it. The mesh itself is `partitioning`'s business.
"""

import abc
from collections.abc import (
  Callable,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
import contextlib
import dataclasses
import functools
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax

from jaxline import base_config
from jaxline import experiment
from jaxline import metrics as metrics_lib
from jaxline import partitioning
from jaxline import periodic
from jaxline import writers
from jaxline.checkpoint import base
from jaxline.inputs import base as inputs
from jaxline.inputs import infeed
from jaxline.supervision import nonfinite as nonfinite_lib

Batch = dict[str, Any]
LossOutput = tuple[jax.Array, metrics_lib.Metrics, Any]
# (params, model_state, batch, rng, is_training) ->
# (loss, metrics, new model_state)
LossFn = Callable[[Any, Any, Batch, jax.Array, bool], LossOutput]

# The entry of a batch that says what counts: [B] float32 for rows, or [B, ...]
# for parts of rows, such as tokens.
WEIGHTS = inputs.WEIGHTS

# Of an infeed, where the config has no such keys.
_BUFFER_SIZE = 3

# The entry of a model state, if it is a dict, that a step replaces by the
# loss's gradient with respect to it. So an FP8 product keeps its scales
# (Flax's convention), which are neither optimized nor part of the gradients.
OVERWRITE = '_overwrite_with_gradient'

# Scalars that the step itself adds; see `train_step`.
NONFINITE = 'nonfinite'
SKIPPED_STEPS = 'skipped_steps'
# And what the host adds: see `infeed.Infeed.wait_fraction`.
INPUT_WAIT_FRACTION = 'input_wait_fraction'


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['step', 'params', 'model_state', 'opt_state', 'skipped'],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
  """All that a step changes.

  Attributes:
    step: number of steps done, an int32 scalar.
    params: what the optimizer changes.
    model_state: what the loss function itself changes, such as statistics.
    opt_state: the optimizer's state.
    skipped: steps that changed none of these, since their loss or gradients
      were not finite (`on_nonfinite = 'skip'`), [2] int32: in a row up to now,
      and in all.
  """

  step: Any
  params: Any
  model_state: Any
  opt_state: Any
  skipped: Any = dataclasses.field(
    default_factory=lambda: np.zeros([2], np.int32)
  )


def train_step(
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  step_scalars: Callable[..., Mapping[str, jax.Array]],
  state: TrainState,
  batch: Batch,
  rng: jax.Array,
  *,
  after_update: Callable[..., Any] = lambda model_state, params, step: (
    model_state
  ),
  on_nonfinite: str = 'ignore',
  accumulation_steps: int = 1,
  place_grads: Callable[[Any], Any] = lambda grads: grads,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One step of training: the pure function that is compiled.

  Args:
    loss_fn: the loss of a batch.
    optimizer: turns gradients into updates.
    step_scalars: `(state, grads, updates) -> scalars` to log besides.
    state: before the step.
    batch: a global batch.
    rng: the run's step key; this step's key is its `fold_in` of `state.step`.
    after_update: `(model_state, params, step) -> model_state`, with the weights
      and the number of steps after this one.
    on_nonfinite: with 'raise' and 'warn' the scalar `nonfinite` says whether
      the loss or the gradients' global norm is not finite (int32, 0 or 1).
      With 'skip' such a step changes nothing but the counts: `nonfinite` is how
      many there were in a row, `skipped_steps` in all. 'ignore' looks at
      nothing.
    accumulation_steps: into how many parts the batch is cut, the gradients of
      which are averaged by their `weights`: the same as of the whole batch, for
      a loss that is the mean by these weights. Each part gets its own key.
    place_grads: says where gradients lie.

  Returns:
    The state after the step, and scalars.
  """
  rng = jax.random.fold_in(rng, state.step)
  if accumulation_steps == 1:
    loss, metrics, model_state, grads = _loss_and_grads(
      loss_fn, state.params, state.model_state, batch, rng
    )
    grads = place_grads(grads)
  else:
    loss, metrics, model_state, grads = _accumulate(
      loss_fn, state, batch, rng, accumulation_steps, place_grads
    )
  # Optax relies on promotion, although a model may be written to do without.
  with jax.numpy_dtype_promotion('standard'):
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  scalars = metrics_lib.compute(metrics)
  scalars.update(step_scalars(state, grads, updates))
  params = optax.apply_updates(state.params, updates)
  new_state = _strongly_typed(
    TrainState(
      step=state.step + 1,
      params=params,
      model_state=after_update(model_state, params, state.step + 1),
      opt_state=opt_state,
      skipped=state.skipped,
    )
  )
  if wrong := experiment.differences(
    new_state, state, 'the step returns', 'it got'
  ):
    raise ValueError(
      'The state after a step must have the shapes and types of the state'
      ' before it. In the model state these are what loss_fn returns; in the'
      ' others, what the optimizer does.\n' + '\n'.join(wrong)
    )
  if on_nonfinite == 'ignore':
    return new_state, scalars
  if taken := scalars.keys() & {NONFINITE, SKIPPED_STEPS}:
    raise ValueError(
      f'The step itself gives the scalars {NONFINITE!r} and {SKIPPED_STEPS!r};'
      f' call what the experiment returns as {sorted(taken)} otherwise.'
    )
  nonfinite = _nonfinite(loss, grads).astype(jnp.int32)
  scalars[NONFINITE] = nonfinite
  if on_nonfinite == 'skip':
    in_a_row = nonfinite * (state.skipped[0] + 1)
    in_all = state.skipped[1] + nonfinite
    # Selected and not branched: this becomes part of the optimizer's own pass
    # over the arrays, whereas a branch would be a barrier between the two.
    new_state = jax.tree.map(
      functools.partial(jax.lax.select, nonfinite > 0),
      dataclasses.replace(state, step=new_state.step),
      new_state,
    )
    new_state = dataclasses.replace(
      new_state, skipped=jnp.stack([in_a_row, in_all])
    )
    scalars |= {NONFINITE: in_a_row, SKIPPED_STEPS: in_all}
  return new_state, scalars


def _loss_and_grads(
  loss_fn: LossFn, params: Any, model_state: Any, batch: Batch, rng: jax.Array
) -> tuple[jax.Array, metrics_lib.Metrics, Any, Any]:
  """Returns the loss, the metrics, the new model state and the gradients."""
  by_grad: dict[str, Any] = {}
  if isinstance(model_state, Mapping) and OVERWRITE in model_state:
    by_grad = {OVERWRITE: model_state[OVERWRITE]}

  def compute_loss(params: Any, by_grad: Any) -> tuple[jax.Array, Any]:
    old = {**model_state, **by_grad} if by_grad else model_state
    loss, metrics, new = _call(loss_fn, params, old, batch, rng, True)
    return loss, (metrics, new)

  (loss, (metrics, new)), (grads, by_grad) = jax.value_and_grad(
    compute_loss, argnums=(0, 1), has_aux=True
  )(params, by_grad)
  return loss, metrics, ({**new, **by_grad} if by_grad else new), grads


def _accumulate(
  loss_fn: LossFn,
  state: TrainState,
  batch: Batch,
  rng: jax.Array,
  num_parts: int,
  place_grads: Callable[[Any], Any],
) -> tuple[jax.Array, metrics_lib.Metrics, Any, Any]:
  """`_loss_and_grads` of a batch, one part of its rows after the other."""
  rows = _rows(batch)
  if rows % num_parts:
    raise ValueError(
      f'config.gradient_accumulation_steps is {num_parts}, which does not'
      f' divide the global batch of {rows} rows; expected one of'
      f' {[n for n in range(1, rows + 1) if rows % n == 0]}.'
    )
  shards = (partitioner := partitioning.active()) and partitioner.batch_shards
  if rows // num_parts % (shards or 1):
    raise ValueError(
      f'config.gradient_accumulation_steps is {num_parts}: of a global batch'
      f' of {rows} rows a part has {rows // num_parts}, which do not divide'
      f' over the {shards} devices that share a batch. Use fewer parts or more'
      ' rows.'
    )

  def cut(x: jax.Array) -> jax.Array:
    # Part p has the rows p, p + num_parts ...: as many of each device's.
    x = x.reshape(rows // num_parts, num_parts, *x.shape[1:]).swapaxes(0, 1)
    return partitioning.constrain(x, (None, 'batch') + (None,) * (x.ndim - 2))

  def one(params: Any, model_state: Any, part: Batch, i: Any) -> Any:
    loss, metrics, model_state, grads = _loss_and_grads(
      loss_fn, params, model_state, part, jax.random.fold_in(rng, i)
    )
    weight = part[WEIGHTS].sum(dtype=jnp.float32)

    # A part in which nothing counts has no mean. Narrow types could not hold
    # the weight of many tokens.
    def weighted(x: jax.Array) -> jax.Array:
      if jnp.finfo(x.dtype).bits < 32:
        x = x.astype(jnp.float32)
      scaled = x * weight.astype(x.dtype)
      return jnp.where(weight > 0, scaled, jnp.zeros_like(x))

    sums = jax.tree.map(weighted, (loss, grads))
    return weight, sums, metrics, model_state

  def add(carry: Any, part: Any) -> tuple[Any, None]:
    weight, (loss, grads), metrics, model_state = carry
    more, (more_loss, more_grads), more_metrics, model_state = one(
      state.params, model_state, *part
    )
    grads = place_grads(jax.tree.map(jnp.add, grads, more_grads))
    return (
      weight + more,
      (loss + more_loss, grads),
      metrics_lib.add(metrics, more_metrics),
      _strongly_typed(model_state),
    ), None

  parts = jax.tree.map(cut, batch), jnp.arange(num_parts)
  first = jax.tree.map(lambda x: x[0], parts)
  weight, sums, metrics, _ = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype),
    jax.eval_shape(one, state.params, state.model_state, *first),
  )
  sums = (sums[0], place_grads(sums[1]))
  carry = (weight, sums, metrics, _strongly_typed(state.model_state))
  (weight, sums, metrics, model_state), _ = jax.lax.scan(add, carry, parts)
  loss, grads = jax.tree.map(lambda x: x / weight.astype(x.dtype), sums)
  grads = jax.tree.map(lambda x, w: x.astype(w.dtype), grads, state.params)
  return loss, metrics, model_state, grads


def _nonfinite(loss: jax.Array, grads: Any) -> jax.Array:
  """Returns whether the loss or the gradients' norm is not finite."""

  def wide(x: jax.Array) -> jax.Array:
    # The square of a float16 is infinite from 256 on.
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x

  # The norm and not each entry: the step's scalars have it already, and XLA
  # computes it only once. Weights of several types need promotion.
  with jax.numpy_dtype_promotion('standard'):
    norm = optax.tree.norm(jax.tree.map(wide, grads))
  return ~(jnp.isfinite(loss) & jnp.isfinite(norm))


def eval_step(
  loss_fn: LossFn, state: TrainState, batch: Batch, rng: jax.Array
) -> dict[str, metrics_lib.Mean]:
  """Returns the metrics of one batch; the state needs no `opt_state`."""
  _, metrics, _ = _call(
    loss_fn, state.params, state.model_state, batch, rng, False
  )
  return dict(metrics)


def _call(loss_fn: LossFn, *args: Any) -> LossOutput:
  """Returns what `loss_fn` returns.

  Raises:
    TypeError: it is not what a loss function must return.
  """
  result: Any = loss_fn(*args)
  if not (
    isinstance(result, tuple | list)
    and len(result) == 3
    and hasattr(result[1], 'items')
    and (result[2] is None) == (args[1] is None)
  ):
    raise TypeError(
      f'loss_fn returned {experiment.describe(result)}; expected the tuple'
      ' (loss, metrics, model_state): a scalar, a dict of metrics.Mean, and the'
      ' new model state, which is {} if the model has none.'
    )
  return tuple(result)


def _call_init(init_fn: Callable[..., Any], rng: jax.Array) -> tuple[Any, Any]:
  """Returns what `init_fn` returns.

  Raises:
    TypeError: it is not what it must return.
  """
  result: Any = init_fn(rng)
  if not isinstance(result, tuple | list) or len(result) != 2:
    raise TypeError(
      f'init_fn returned {experiment.describe(result)}; expected the tuple'
      ' (params, model_state), of which the model state is {} if the model has'
      ' none.'
    )
  return tuple(result)


def init_state(
  init_fn: Callable[[jax.Array], tuple[Any, Any]],
  optimizer: optax.GradientTransformation,
  rng: jax.Array,
) -> TrainState:
  """Returns the state before the first step."""
  params, model_state = _strongly_typed(
    partitioning.unbox(_call_init(init_fn, rng))
  )
  return _strongly_typed(
    TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      model_state=model_state,
      opt_state=optimizer.init(params),
    )
  )


def _strongly_typed(tree: Any) -> Any:
  """Makes arrays of what has a Python number's weak type.

  A weak type would become a strong one in the first step, and the second step
  compile another program.
  """

  def strong(x: Any) -> Any:
    x = jnp.asarray(x)
    # A key array has no such attribute.
    return x.astype(x.dtype) if getattr(x, 'weak_type', False) else x

  return jax.tree.map(strong, tree)


class ShardedExperiment(experiment.AbstractExperiment):
  """An experiment of pure functions, run as one program over a mesh.

  To write one, override the five abstract methods; `init_fn` and `loss_fn`
  must be pure: they are traced once and never called again.

  `loss_fn` gets every batch with an entry `weights`: the input's own, [B, ...],
  or else [B] ones. The rows that only fill up the last batch of an evaluation
  have weight 0. Metrics are `metrics.Mean`s, which must give what has weight 0
  no weight.

  Here `step` and `evaluate` get scalars and not one value a device: the step's
  number, and the run's key, from which `train_step` derives each step's.

  A model that continues text has one method more, `decode(prompts, rng)`; what
  it compiles goes through `in_mesh`.

  Attributes:
    SKIPS_NONFINITE: that `on_nonfinite = 'skip'` can be had.
    uncut_weights: a line for each weight that is whole on every device, or cut
      less than the sharding asks for, once the state's shardings are known.
  """

  PER_PROCESS_ENTRIES = ('input',)
  # What this class's constructor takes: where arrays lie.
  CHANGEABLE_ON_RESUME = (
    'experiment_kwargs.mesh',
    'experiment_kwargs.sharding',
  )
  # Of the state, what `config.restore_rules` never take from another run.
  NEVER_BY_RULES = ('state/step', 'state/skipped')
  SKIPS_NONFINITE = True
  IS_SHARDED = True
  uncut_weights: Sequence[str] = ()
  _on_nonfinite = 'raise'

  def __init__(
    self,
    mode: str,
    init_rng: jax.Array,
    *,
    sharding: str | None = None,
    mesh: Mapping[str, Any] | None = None,
  ):
    """Makes the mesh; all else is made when it is first used.

    Args:
      mode: 'train', or what evaluation was started as.
      init_rng: the key that `init_fn` gets.
      sharding: one of `partitioning.PRESETS`; None is the run's `sharding`.
      mesh: sizes of mesh axes, as for `partitioning.make_mesh`; None is the
        run's `mesh`.
    """
    self.mode = mode
    config = base_config.of_run()
    self.partitioner = partitioning.Partitioner.make(
      config.mesh if mesh is None else mesh,
      config.sharding if sharding is None else sharding,
      config.sharding_rules,
    )
    logging.info(
      'Mesh: %s. Sharding: %s',
      self.partitioner.shape,
      self.partitioner.rules,
    )
    if idle := self.partitioner.idle_axes():
      logging.warning(
        'The sharding uses nothing of the mesh along %s: the devices there all'
        ' do the same.',
        idle,
      )
    self.accumulation_steps: int = config.gradient_accumulation_steps
    self._rounding: dict[bool, inputs.Rounding] = {}
    self._told_filler = False
    self._init_rng = init_rng
    self._state: TrainState | None = None
    # The training data: opened, read ahead, and where it stood behind the last
    # batch that was taken.
    self._source: Iterator[Batch] | None = None
    self._infeed: infeed.Infeed | None = None
    self._infeed_options: dict[str, Any] = {'buffer_size': _BUFFER_SIZE}
    self._batch_shapes = _BatchShapes()
    self._position: Any = None
    # Of an input that goes on at each evaluation, how many had their batches.
    self._eval_source: inputs.BaseInput | None = None
    self._num_fed = 0

  @abc.abstractmethod
  def init_fn(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns (params, model_state); weights may be `partitioning.Logical`."""

  @abc.abstractmethod
  def loss_fn(
    self,
    params: Any,
    model_state: Any,
    batch: Batch,
    rng: jax.Array,
    is_training: bool,
  ) -> LossOutput:
    """Returns the loss, the metrics and the new model state of a batch.

    Args:
      params: the weights.
      model_state: as `init_fn` or the step before returned it.
      batch: global arrays [B, ...], one of them `weights`.
      rng: this step's key.
      is_training: whether for training or for evaluation.

    Returns:
      A scalar to minimise; name -> `metrics.Mean`; the new model state.
    """

  @abc.abstractmethod
  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns the optimizer."""

  @abc.abstractmethod
  def train_input(self) -> Iterator[Batch]:
    """Returns an endless input: a `BaseInput`, or any iterator of dicts.

    Each process gets its own rows, global batch / processes of them, as numpy
    arrays. What was given must stay as it is: it is read later, on another
    thread. The position of a `BaseInput` is saved with every checkpoint; so is
    that of an iterator with `get_state` and `set_state`, whose state must be a
    pytree of arrays and plain values.
    """

  @abc.abstractmethod
  def eval_input(self) -> Iterable[Batch]:
    """Returns the batches of one evaluation; the last may have fewer rows.

    A `BaseInput` that is not reset for each evaluation is asked for only once.
    """

  def step_scalars(
    self, state: TrainState, grads: Any, updates: Any
  ) -> Mapping[str, jax.Array]:
    """Returns scalars to log besides the loss's metrics; compiled in the step.

    Args:
      state: before the step.
      grads: gradients, in the tree of `state.params`.
      updates: what is added to the weights.
    """
    del state, updates
    return {'grad_norm': optax.tree.norm(grads)}

  def after_update(self, model_state: Any, params: Any, step: Any) -> Any:
    """Returns the model state once the weights have changed.

    For what follows the weights, such as their moving average. Compiled in the
    step; called once in it, however many parts a batch is cut into.

    Args:
      model_state: as `loss_fn` returned it.
      params: the new weights.
      step: the number of steps done, this one included.
    """
    del params, step
    return model_state

  @property
  def on_nonfinite(self) -> str:
    """What `train_step` does where its loss or gradients are not finite.

    `train_loop` sets it to the config's; to set it compiles the step anew.
    None is the default, 'raise'.
    """
    return self._on_nonfinite

  @on_nonfinite.setter
  def on_nonfinite(self, mode: str | None) -> None:
    mode = nonfinite_lib.resolve(mode, is_sharded=True)
    if mode != self._on_nonfinite:
      self._on_nonfinite = mode
      self.__dict__.pop('compiled_train_step', None)

  # Not made by the constructor: a subclass may set what these need behind
  # its call of the constructor.
  @functools.cached_property
  def _optimizer(self) -> optax.GradientTransformation:
    return self.make_optimizer()

  @functools.cached_property
  def compiled_train_step(self) -> Callable[..., Any]:
    """`train_step` as one program `(state, batch, rng) -> (state, scalars)`.

    It takes the buffers of the state that it gets.
    """

    # No partial: JAX would keep its signature, and with it the experiment.
    def step(state: TrainState, batch: Batch, rng: jax.Array) -> Any:
      return train_step(
        self.loss_fn,
        self._optimizer,
        self.step_scalars,
        state,
        batch,
        rng,
        after_update=self.after_update,
        on_nonfinite=self.on_nonfinite,
        accumulation_steps=self.accumulation_steps,
        place_grads=self._place_grads,
      )

    return jax.jit(
      self.in_mesh(step),
      donate_argnums=0,
      out_shardings=(self._state_shardings, self.partitioner.replicated),
    )

  def _place_grads(self, grads: Any) -> Any:
    # As the weights, so that no device ever has them whole.
    return jax.lax.with_sharding_constraint(grads, self._state_shardings.params)

  @functools.cached_property
  def compiled_eval_step(self) -> Callable[..., Any]:
    """`eval_step` as one program `(state, batch, rng) -> metrics`."""

    # Its name is the program's, where programs are listed.
    def evaluation(state: TrainState, batch: Batch, rng: jax.Array) -> Any:
      return eval_step(self.loss_fn, state, batch, rng)

    return jax.jit(
      self.in_mesh(evaluation), out_shardings=self.partitioner.replicated
    )

  @property
  def state(self) -> TrainState:
    """The live state; made from the init key at the first use."""
    if self._state is None:
      make = jax.jit(self._init_state, out_shardings=self._state_shardings)
      replicated = self.partitioner.replicated
      self._state = make(self.partitioner.put(self._init_rng, replicated))
    return self._state

  def _init_state(self, rng: jax.Array) -> TrainState:
    init = self.in_mesh(init_state)
    return init(self.init_fn, self._optimizer, rng)

  def in_mesh(self, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `partitioning.constrain` work while `fn` is traced.

    Args:
      fn: takes positional arguments only; goes to `jax.jit` afterwards.
    """

    @functools.wraps(fn)
    def in_mesh(*args: Any) -> Any:
      with self.partitioner.activate():
        return fn(*args)

    return in_mesh

  @property
  def bubble_fraction(self) -> float:
    """The part of a step in which a stage of a pipeline has nothing to do."""
    return 0.0

  def abstract_state(self) -> TrainState:
    """Returns the shapes of the state, and where its arrays lie."""
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      self._state_shapes,
      self._state_shardings,
    )

  def abstract_rng(self) -> jax.ShapeDtypeStruct:
    """Returns the shape of the key of a step, and where it lies."""
    return jax.ShapeDtypeStruct(
      self._init_rng.shape,
      self._init_rng.dtype,
      sharding=self.partitioner.replicated,
    )

  def abstract_batch(self, is_training: bool) -> inputs.Batch:
    """Returns the shapes of a global batch, and where its arrays lie.

    Args:
      is_training: whether of `train_input` or of `eval_input`, which are
        opened for their first batch. Where the devices are not here, this
        process stands for all hosts and reads all rows.
    """
    if is_training:
      source: Any = self._open_input(None)
      batches: Iterator[Batch] = source
    else:
      source, batches = self._open_eval_input()
    try:
      batch = next(batches, None)
      if batch is None:
        raise ValueError(f'{infeed.name_of(source)} gave no batch.')
    finally:
      infeed.close(source)
      self._eval_source, self._num_fed = None, 0
    num_hosts = self.partitioner.host[1]
    if is_training:
      batch = _with_weights(batch)
      self.partitioner.check_rows(_rows(batch) * num_hosts)
    else:
      batch = _pad(batch, _rows(batch), self.partitioner.host_shards)
    sharding = self.partitioner.batch_sharding
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        (len(x) * num_hosts, *x.shape[1:]),
        jax.dtypes.canonicalize_dtype(x.dtype),
        sharding=sharding,
      ),
      batch,
    )

  @functools.cached_property
  def _state_shapes(self) -> TrainState:
    # Every save asks for it, and training waits meanwhile.
    return jax.eval_shape(self._init_state, self._init_rng)

  @functools.cached_property
  def _state_shardings(self) -> TrainState:
    """Says where each array of the state lies, without making one."""
    # In the mesh, or what is traced here would be kept without constraints.
    init = self.in_mesh(lambda rng: _call_init(self.init_fn, rng))
    params, model_state = jax.eval_shape(init, self._init_rng)
    self.uncut_weights = self.partitioner.whole_weights(params)
    if self.uncut_weights:
      logging.info(
        'These weights are whole on every device, or cut less than the sharding'
        ' asks for, although it splits weights:\n%s',
        '\n'.join(self.uncut_weights),
      )
    opt_state = jax.eval_shape(self._optimizer.init, partitioning.unbox(params))
    return self.partitioner.shardings(
      TrainState(
        step=self.partitioner.specs(jax.ShapeDtypeStruct((), jnp.int32)),
        params=self.partitioner.specs(params),
        model_state=self.partitioner.specs(model_state),
        opt_state=self.partitioner.specs_like(opt_state, params),
        skipped=self.partitioner.specs(jax.ShapeDtypeStruct((2,), jnp.int32)),
      )
    )

  def step_inputs(
    self, config: config_dict.ConfigDict
  ) -> experiment.StepInputs:
    """Hands on the step's number and the run's key, placed once."""
    del config  # One program: there is nothing to tell apart.
    placed: Any = None

    def inputs(global_step: int, rng: Any) -> tuple[int, Any, Any]:
      nonlocal placed
      if rng is not placed:  # At the start, or restored to the host.
        placed = self.partitioner.put(rng, self.partitioner.replicated)
      return global_step, placed, placed

    return inputs

  def initialize_train_step_rng(self, rng: jax.Array) -> jax.Array:
    """Puts the one key of training on all devices."""
    return self.partitioner.put(rng, self.partitioner.replicated)

  def evaluate_inputs(
    self, config: config_dict.ConfigDict, rng: jax.Array
  ) -> Callable[[int], tuple[Any, Any]]:
    """Hands on the step's number and the evaluation key."""
    self._set_infeed(config)
    rng = self.partitioner.put(rng, self.partitioner.replicated)
    return lambda global_step: (global_step, rng)

  def train_loop(
    self,
    config: config_dict.ConfigDict,
    state: Any,
    periodic_actions: Sequence[periodic.Action],
    writer: writers.Writer | None = None,
  ) -> None:
    """Runs steps until `should_run_step` says no."""
    known = base_config.has(config, 'on_nonfinite')
    self.on_nonfinite = config.on_nonfinite if known else 'ignore'
    self._set_infeed(config)
    if self.bubble_fraction:
      logging.info(
        'Pipeline: the bubbles are %.1f%% of a step.',
        100 * self.bubble_fraction,
      )
    try:
      super().train_loop(config, state, periodic_actions, writer)
    finally:
      # The thread would keep the experiment, and its arrays, alive.
      self._close_input()

  def _set_infeed(self, config: config_dict.ConfigDict) -> None:
    if base_config.has(config, 'infeed_buffer_size'):
      self._infeed_options = {
        'buffer_size': config.infeed_buffer_size,
        'stall_secs': config.infeed_stall_secs,
      }

  def step(
    self, *, global_step: Any, rng: Any, writer: writers.Writer | None
  ) -> dict[str, Any]:
    """Trains on the next batch; returns the scalars of `train_step`."""
    del global_step, writer  # The state has its own count, on the devices.
    if self._infeed is None:
      if self._source is None:
        self._source = self._open_input(self._position)
      self._infeed = self._read_ahead(self._source)
    try:
      batch = next(self._infeed)
    except StopIteration:
      # From inside a step, StopIteration could end a loop silently.
      raise ValueError(
        'train_input ended; training needs an endless iterator (repeat it).'
      ) from None
    self._position = self._infeed.position
    self._state, scalars = self.compiled_train_step(self.state, batch, rng)
    scalars[INPUT_WAIT_FRACTION] = self._infeed.wait_fraction
    return scalars

  def reads(self, is_training: bool) -> contextlib.AbstractContextManager[None]:
    """Makes the inputs that are built inside read this process's rows.

    Processes that share rows read the same. `inputs.per_host` rounds a batch of
    training up to the devices; one of evaluation is filled up with rows of
    weight 0, so that it is of the same records on any number of devices.
    """
    if is_training not in self._rounding:
      self._set_rounding(is_training, None)
    return inputs.act_as_host(
      *self.partitioner.host, self._rounding[is_training]
    )

  def _set_rounding(self, is_training: bool, position: Any) -> None:
    parts = self.partitioner.host[1]
    sharers = f'{parts} hosts'
    if is_training:
      parts = self.partitioner.batch_shards * self.accumulation_steps
      sharers = f'{self.partitioner.batch_shards} devices that share a batch'
      if self.accumulation_steps > 1:
        sharers += f' x {self.accumulation_steps} gradient_accumulation_steps'
    self._rounding[is_training] = inputs.Rounding(
      parts, sharers, inputs.rounded_in(position)
    )

  def _open_input(self, position: Any) -> Iterator[Batch]:
    """Returns `train_input`, at a position if there is one."""
    self._set_rounding(True, position)
    with self.reads(is_training=True):
      source = iter(self.train_input())
    if isinstance(source, inputs.BaseInput):
      _check_hosts(source, self.partitioner.host, 'train_input')
      if not source.is_training:
        raise ValueError(
          f'train_input returned {source.name} with is_training=False; set it'
          ' to True.'
        )
      source.settle_seed()  # Here, where all hosts come by alike.
    if position is None:
      if not infeed.saves_position(source):
        logging.warning(
          'The position of %s is not saved: a run that is resumed begins its'
          ' data anew.',
          infeed.name_of(source),
        )
    elif not infeed.saves_position(source):
      raise ValueError(
        'The checkpoint holds the position of the data, but train_input'
        f' returned {infeed.describe(source)}, whose position cannot be set.'
        ' Use the input that the run was trained with (in a BaseInput with'
        ' input_checkpointing_enabled=True), or start a new run.'
      )
    else:
      source.set_state(position)  # type: ignore[attr-defined]
    return source

  def _read_ahead(self, source: Iterator[Batch]) -> infeed.Infeed:
    """Starts to put the batches of a source on the devices."""
    order = getattr(source, 'custom_device_order', None)
    # Not `self`: the thread would keep the experiment, and its arrays, alive.
    partitioner, shapes = self.partitioner, self._batch_shapes

    def place(batch: Batch) -> Batch:
      placed = partitioner.put_batch(_with_weights(batch), order)
      shapes.check(placed)
      return placed

    return infeed.Infeed(source, place, **self._infeed_options)

  def _close_input(self) -> None:
    if self._infeed is not None:
      self._infeed.close()
    elif self._source is not None:
      infeed.close(self._source)
    self._infeed = self._source = None

  def evaluate(
    self, *, global_step: Any, rng: Any, writer: writers.Writer | None
  ) -> dict[str, float]:
    """Averages the loss function's metrics over `eval_input`."""
    del global_step, writer
    # An evaluation may hold it on the host: see `restore_from_snapshot`.
    state = dataclasses.replace(self.state, opt_state=None)
    sums: Any = None
    metrics: Any = None
    for batch in self._eval_batches():
      # Waits for the batch before, with this one on its way: to put more of
      # them on the devices than are computed would fill the memory.
      sums = _add_fetched(sums, metrics)
      metrics = self.compiled_eval_step(state, batch, rng)
    sums = _add_fetched(sums, metrics)
    if sums is None:
      raise ValueError(
        f'{type(self).__name__}.eval_input gave no batch; there is nothing to'
        ' evaluate on.'
      )
    with np.errstate(invalid='ignore'):  # The mean of nothing is NaN.
      means = metrics_lib.compute(sums)
    return {name: float(value) for name, value in means.items()}

  def _eval_batches(self) -> Iterator[Batch]:
    """Yields global batches of one shape; hosts with no more give padding."""
    source, batches = self._open_eval_input()
    # Training waits for an evaluation, which shall not wait for a disk.
    ahead = infeed.read_ahead(source, batches, **self._infeed_options)
    try:
      yield from self._global_batches(
        ahead, getattr(source, 'custom_device_order', None)
      )
    finally:
      ahead.close()
      infeed.close(source)

  def _global_batches(
    self, batches: Iterator[Batch], order: Sequence[int] | None
  ) -> Iterator[Batch]:
    rows = 0
    empty: Batch = {}
    while True:
      batch = next(batches, None)
      sizes = self.partitioner.all_hosts(_rows(batch) if batch else 0)
      if not any(sizes):
        return
      if not rows:
        if batch is None or not all(sizes):
          raise ValueError(
            f'The first batches of eval_input have {sizes} rows in the'
            ' processes; give each process at least one.'
          )
        rows = max(sizes)
        self._tell_filler(rows)
        empty = jax.tree.map(lambda x: np.zeros_like(x[:0]), batch)
      if max(sizes) > rows:
        raise ValueError(
          f'A batch of {max(sizes)} rows follows one of {rows}; only the last'
          ' of an evaluation may differ, and be smaller.'
        )
      yield self.partitioner.put_batch(
        _pad(batch or empty, rows, self.partitioner.host_shards), order
      )

  def _tell_filler(self, rows: int) -> None:
    """Says once that batches of evaluation do not divide over the devices."""
    shards = self.partitioner.host_shards
    if rows % shards and not self._told_filler:
      self._told_filler = True
      logging.info(
        'Batches of evaluation have %d rows in each process, and are filled up'
        ' to %d with rows of weight 0, so that they divide over %d devices.',
        rows,
        -(-rows // shards) * shards,
        shards,
      )

  def _open_eval_input(self) -> tuple[Any, Iterator[Batch]]:
    """Returns the input, and its batches of this evaluation."""
    with self.reads(is_training=False):
      source: Any = self._eval_source or self.eval_input()
    if not isinstance(source, inputs.BaseInput):
      return source, iter(source)
    _check_hosts(source, self.partitioner.host, 'eval_input')
    if source.is_training:
      raise ValueError(
        f'eval_input returned {source.name} with is_training=True; set it to'
        ' False.'
      )
    if not source.reset_for_eval:
      self._eval_source = source
      if self._num_fed != self.num_evaluated:
        # A run that was ended and resumed goes on with the batches that it
        # would have come to without that.
        assert source.eval_loop_num_batches is not None
        source.reset()
        source.skip(self.num_evaluated * source.eval_loop_num_batches)
      self._num_fed = self.num_evaluated + 1
    return source, source.eval_batches()

  def snapshot_state(self) -> dict[str, Any]:
    """Returns the state and the position of the data."""
    snapshot: dict[str, Any] = {'state': self.state}
    if self._position is not None:
      snapshot['input'] = self._position
    return snapshot

  def snapshot_template(self) -> dict[str, Any]:
    """Returns the shapes of the state, and where its arrays belong."""
    return {'state': self.abstract_state()}

  def wants_restored(self, name: str) -> bool:
    """Returns whether a restore shall read an array.

    An evaluation needs neither the optimizer's state nor the position of the
    training data.
    """
    if self.mode == 'train':
      return True
    return name.split('/')[:2] != ['state', 'opt_state'] and name != 'input'

  def make_room(self) -> None:
    """Drops the state; it would be made anew if it were used before."""
    self._state = None

  def restore_from_snapshot(self, snapshot_state: Mapping[str, Any]) -> None:
    """Restores the state onto this mesh, and in training the position.

    A checkpoint without a position starts the data anew.

    Args:
      snapshot_state: as `snapshot_state` returned it, its arrays whole.

    Raises:
      ValueError: the checkpoint's weights are not this model's, or the input
        cannot be set to its position; then nothing was changed.
    """
    saved = snapshot_state['state']
    is_fresh = isinstance(snapshot_state, base.Fresh)
    if wrong := experiment.differences(
      saved, self._state_shapes, 'the checkpoint has', 'the model expects'
    ):
      raise ValueError(
        'The checkpoint does not fit the model; nothing was restored. Use the'
        ' config it was trained with, or start a new run.\n' + '\n'.join(wrong)
      )
    position = snapshot_state.get('input')
    if self.mode == 'train':
      if position is None and saved.step > 0:
        logging.warning(
          'The checkpoint holds no position of the data, which begins anew: if'
          ' its order does not change, the run sees the same again.'
        )
      source = self._open_input(position)
      self._close_input()
      self._source = source
    # An evaluation keeps it for when this becomes the best checkpoint.
    self._position = position
    # The old arrays go first, so that memory need not hold both.
    self._state = None
    if self.mode == 'train':
      self._state = self.partitioner.put(
        saved, self._state_shardings, may_keep=is_fresh
      )
    else:
      # An evaluation does not need the optimizer's state on the devices; it
      # is kept for when this becomes the best checkpoint.
      device = dataclasses.replace(saved, opt_state=None)
      shardings = dataclasses.replace(self._state_shardings, opt_state=None)
      self._state = dataclasses.replace(
        self.partitioner.put(device, shardings, may_keep=is_fresh),
        opt_state=saved.opt_state,
      )

  def share_state(self, trained: experiment.AbstractExperiment) -> None:
    """Takes over the live state of the experiment in training."""
    assert isinstance(trained, ShardedExperiment)
    self._state = trained.state
    self._position = trained._position


class _BatchShapes:
  """Warns of a batch that the step must be compiled anew for."""

  def __init__(self) -> None:
    self._seen: set[Any] = set()  # Each is compiled only once.
    self._last: Any = None

  def check(self, batch: Batch) -> None:
    """Compares a batch with those before; on the thread that reads ahead."""
    leaves, tree = jax.tree.flatten(dict(batch))
    shapes = tree, tuple((x.shape, x.dtype) for x in leaves)
    if shapes == self._last:
      return
    if self._seen and shapes not in self._seen:
      now, before = (
        tree.unflatten(jax.ShapeDtypeStruct(*leaf) for leaf in leaves)
        for tree, leaves in (shapes, self._last)
      )
      logging.warning(
        'train_input gave a batch of another shape or type, for which the step'
        ' is compiled anew; pad its batches to one shape, or to few.\n%s',
        '\n'.join(
          experiment.differences(now, before, 'now', 'before', 'batch')
        ),
      )
    self._seen.add(shapes)
    self._last = shapes


def _check_hosts(
  source: inputs.BaseInput, here: tuple[int, int], method: str
) -> None:
  """Refuses the rows of a host that is not this process."""
  if (source.infeed_host_index, source.num_infeed_hosts) != here:
    raise ValueError(
      f'{method} returned {source.name} for host {source.infeed_host_index} of'
      f' {source.num_infeed_hosts}, but this is host {here[0]} of {here[1]}.'
      ' Leave infeed_host_index and num_infeed_hosts None.'
    )


def _rows(batch: Batch) -> int:
  return len(jax.tree.leaves(batch)[0])


def _pad(batch: Batch, rows: int, shards: int) -> Batch:
  """Fills a batch up to `rows`, rounded up so that it divides over devices.

  Args:
    batch: numpy arrays [b, ...] with b <= rows.
    rows: what this process's batches have, but for the last.
    shards: into how many pieces it is cut.

  Returns:
    The batch with `weights`; rows that only fill up have weight 0.
  """
  return inputs.pad_rows(inputs.Batch(batch), -(-rows // shards) * shards)


def _with_weights(batch: Batch) -> inputs.Batch:
  batch = inputs.Batch(batch)
  if WEIGHTS not in batch:
    batch[WEIGHTS] = np.ones(_rows(batch), np.float32)
  return batch


def _add_fetched(sums: Any, metrics: Any) -> Any:
  """Adds metrics on the devices to sums on the host, in float64."""
  if metrics is None:
    return sums
  metrics = jax.tree.map(np.float64, jax.device_get(metrics))
  return metrics if sums is None else metrics_lib.add(sums, metrics)
