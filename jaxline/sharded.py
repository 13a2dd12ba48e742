"""The sharded style: pure functions in, one compiled step over a mesh out.

A subclass of `ShardedExperiment` says how weights begin (`init_fn`), what the
loss of a batch is (`loss_fn`), which optimizer (`make_optimizer`) and which
data (`train_input`, `eval_input`). From these come one jitted, donated program
`(state, batch, rng) -> (state, metrics)` over all devices of all hosts, an
evaluation that averages exactly, checkpoints, and data prefetched to where
the step wants it. The mesh itself is `partitioning`'s business.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax

from jaxline import async_lib
from jaxline import experiment
from jaxline import metrics as metrics_lib
from jaxline import partitioning
from jaxline import writers

Batch = dict[str, Any]
LossOutput = tuple[jax.Array, metrics_lib.Metrics, Any]
# (params, model_state, batch, rng, is_training) ->
# (loss, metrics, new model_state)
LossFn = Callable[[Any, Any, Batch, jax.Array, bool], LossOutput]

# The entry of a batch that says what counts: [B] float32 for rows, or [B, ...]
# for parts of rows, such as tokens.
WEIGHTS = 'weights'


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['step', 'params', 'model_state', 'opt_state'],
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
  """

  step: Any
  params: Any
  model_state: Any
  opt_state: Any


def train_step(
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  step_scalars: Callable[..., Mapping[str, jax.Array]],
  state: TrainState,
  batch: Batch,
  rng: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One step of training: the pure function that is compiled.

  Args:
    loss_fn: the loss of a batch.
    optimizer: turns gradients into updates.
    step_scalars: `(state, grads, updates) -> scalars` to log besides.
    state: before the step.
    batch: a global batch.
    rng: the run's step key; this step's key is its `fold_in` of `state.step`.

  Returns:
    The state after the step, and scalars.
  """
  rng = jax.random.fold_in(rng, state.step)

  def compute_loss(params: Any) -> tuple[jax.Array, Any]:
    loss, metrics, model_state = loss_fn(
      params, state.model_state, batch, rng, True
    )
    return loss, (metrics, model_state)

  (_, (metrics, model_state)), grads = jax.value_and_grad(
    compute_loss, has_aux=True
  )(state.params)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  scalars = metrics_lib.compute(metrics)
  scalars.update(step_scalars(state, grads, updates))
  state = TrainState(
    step=state.step + 1,
    params=optax.apply_updates(state.params, updates),
    model_state=model_state,
    opt_state=opt_state,
  )
  return state, scalars


def eval_step(
  loss_fn: LossFn,
  state: TrainState,
  sums: metrics_lib.Metrics,
  batch: Batch,
  rng: jax.Array,
) -> dict[str, metrics_lib.Mean]:
  """Adds the metrics of one batch to those of the batches before."""
  _, metrics, _ = loss_fn(state.params, state.model_state, batch, rng, False)
  return metrics_lib.add(sums, metrics)


def init_state(
  init_fn: Callable[[jax.Array], tuple[Any, Any]],
  optimizer: optax.GradientTransformation,
  rng: jax.Array,
) -> TrainState:
  """Returns the state before the first step."""
  params, model_state = partitioning.unbox(init_fn(rng))
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    model_state=model_state,
    opt_state=optimizer.init(params),
  )


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
  """

  def __init__(
    self,
    mode: str,
    init_rng: jax.Array,
    *,
    sharding: str = 'ddp',
    mesh: Mapping[str, int] | None = None,
  ):
    """Lays out the state; in training, also makes it and opens the data.

    Args:
      mode: 'train', or what evaluation was started as.
      init_rng: the key that `init_fn` gets.
      sharding: one of `partitioning.PRESETS`.
      mesh: sizes of mesh axes, as for `partitioning.make_mesh`; None puts all
        devices on `data`.
    """
    self.mode = mode
    self.partitioner = partitioning.Partitioner(
      partitioning.make_mesh(mesh), partitioning.get_rules(sharding)
    )
    self._init_rng = init_rng
    self._optimizer = self.make_optimizer()
    self._state_shardings = self._lay_out_state()
    self._state: TrainState | None = None
    self._infeed: _Infeed | None = None
    self.compiled_train_step = jax.jit(
      self._in_mesh(
        functools.partial(
          train_step, self.loss_fn, self._optimizer, self.step_scalars
        )
      ),
      donate_argnums=0,
      out_shardings=(self._state_shardings, self.partitioner.replicated),
    )
    self.compiled_eval_step = jax.jit(
      self._in_mesh(functools.partial(eval_step, self.loss_fn)),
      donate_argnums=1,
      out_shardings=self.partitioner.replicated,
    )

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
    """Returns an endless iterator of batches, dicts of numpy arrays.

    Each process gets its own rows, global batch / processes of them. Where
    the iterator has `get_state` and `set_state`, its position is saved with
    every checkpoint; the state must be a pytree of arrays and plain values.
    """

  @abc.abstractmethod
  def eval_input(self) -> Iterable[Batch]:
    """Returns the batches of one evaluation; the last may have fewer rows."""

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
    return {'grad_norm': optax.global_norm(grads)}

  @property
  def state(self) -> TrainState:
    """The live state; made from the init key at the first use."""
    if self._state is None:
      make = jax.jit(
        self._in_mesh(
          functools.partial(init_state, self.init_fn, self._optimizer)
        ),
        out_shardings=self._state_shardings,
      )
      replicated = self.partitioner.replicated
      self._state = make(self.partitioner.put(self._init_rng, replicated))
    return self._state

  def _in_mesh(self, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `partitioning.constrain` work while `fn` is traced."""

    @functools.wraps(fn)
    def in_mesh(*args: Any) -> Any:
      with self.partitioner.activate():
        return fn(*args)

    return in_mesh

  def _lay_out_state(self) -> TrainState:
    """Says where each array of the state lies, without making one."""
    params, model_state = jax.eval_shape(self.init_fn, self._init_rng)
    if whole := self.partitioner.whole_weights(params):
      logging.info(
        'These weights are whole on every device although the sharding splits'
        ' others:\n%s',
        '\n'.join(whole),
      )
    param_specs = self.partitioner.specs(params)
    replicated = jax.sharding.PartitionSpec()
    opt_state = jax.eval_shape(self._optimizer.init, partitioning.unbox(params))

    def like_param(leaf: Any, param: Any, spec: Any) -> Any:
      # An optimizer may keep less than the parameter's shape, as Adafactor.
      return spec if leaf.shape == param.shape else replicated

    opt_specs = optax.tree_map_params(
      self._optimizer,
      like_param,
      opt_state,
      partitioning.unbox(params),
      param_specs,
      transform_non_params=lambda _: replicated,
    )
    return self.partitioner.shardings(
      TrainState(
        step=replicated,
        params=param_specs,
        model_state=self.partitioner.specs(model_state),
        opt_state=opt_specs,
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
    del config
    rng = self.partitioner.put(rng, self.partitioner.replicated)
    return lambda global_step: (global_step, rng)

  def step(
    self, *, global_step: Any, rng: Any, writer: writers.Writer | None
  ) -> dict[str, jax.Array]:
    """Trains on the next batch."""
    del global_step, writer  # The state has its own count, on the devices.
    if self._infeed is None:
      self._infeed = _Infeed(self.train_input(), self.partitioner)
    batch = next(self._infeed)
    self._state, scalars = self.compiled_train_step(self.state, batch, rng)
    return scalars

  def evaluate(
    self, *, global_step: Any, rng: Any, writer: writers.Writer | None
  ) -> dict[str, float]:
    """Averages the loss function's metrics over `eval_input`."""
    del global_step, writer
    sums: Any = None
    for batch in self._eval_batches():
      if sums is None:
        sums = self._zero_metrics(batch, rng)
      sums = self.compiled_eval_step(self.state, sums, batch, rng)
    if sums is None:
      raise ValueError(
        f'{type(self).__name__}.eval_input gave no batch; there is nothing to'
        ' evaluate on.'
      )
    return {
      name: float(value)
      for name, value in jax.device_get(metrics_lib.compute(sums)).items()
    }

  def _zero_metrics(self, batch: Batch, rng: jax.Array) -> Any:
    _, shapes, _ = jax.eval_shape(
      lambda state, *args: self.loss_fn(
        state.params, state.model_state, *args, False
      ),
      self.state,
      batch,
      rng,
    )
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), dict(shapes))
    return self.partitioner.put(zeros, self.partitioner.replicated)

  def _eval_batches(self) -> Iterator[Batch]:
    """Yields global batches of one shape; hosts with no more give padding."""
    first: Batch | None = None
    batches = iter(self.eval_input())
    while True:
      batch = next(batches, None)
      if not self.partitioner.any_host(batch is not None):
        return
      if first is None:
        if batch is None:
          raise ValueError(
            f'eval_input of process {jax.process_index()} gave no batch while'
            ' other processes have some; give each process at least one.'
          )
        first = batch
      if batch is None:
        batch = jax.tree.map(lambda x: x[:0], first)
      yield self.partitioner.put_batch(
        _pad(batch, _rows(first), self.partitioner.batch_shards)
      )

  def snapshot_state(self) -> dict[str, Any]:
    """Returns the state and the position of the data."""
    snapshot: dict[str, Any] = {'state': self.state}
    if self._infeed is not None and self._infeed.position is not None:
      snapshot['input'] = self._infeed.position
    return snapshot

  def restore_from_snapshot(self, snapshot_state: Mapping[str, Any]) -> None:
    """Restores the state onto this mesh, and in training the position.

    Args:
      snapshot_state: as `snapshot_state` returned it, its arrays whole.

    Raises:
      ValueError: the checkpoint's weights are not this model's.
    """
    saved = snapshot_state['state']
    self._check_fits(saved)
    # The old arrays go first, so that memory need not hold both.
    self._state = None
    if self.mode == 'train':
      self._state = self.partitioner.put(saved, self._state_shardings)
    else:
      # An evaluation does not need the optimizer's state on the devices; it
      # is kept for when this becomes the best checkpoint.
      device = dataclasses.replace(saved, opt_state=None)
      shardings = dataclasses.replace(self._state_shardings, opt_state=None)
      self._state = dataclasses.replace(
        self.partitioner.put(device, shardings), opt_state=saved.opt_state
      )
    if self.mode == 'train' and 'input' in snapshot_state:
      if self._infeed is not None:
        self._infeed.close()
      iterator = self.train_input()
      if not hasattr(iterator, 'set_state'):
        raise ValueError(
          'The checkpoint holds the position of the data, but train_input'
          f' returned a {type(iterator).__name__} without set_state.'
        )
      iterator.set_state(snapshot_state['input'])
      self._infeed = _Infeed(iterator, self.partitioner)

  def _check_fits(self, saved: TrainState) -> None:
    """Raises where the saved arrays are not those of this experiment."""
    wanted = jax.eval_shape(
      functools.partial(init_state, self.init_fn, self._optimizer),
      self._init_rng,
    )
    have = dict(_shapes(saved))
    want = dict(_shapes(wanted))
    wrong = [
      f'{path}: checkpoint has {have.get(path, "nothing")}, the model expects'
      f' {want.get(path, "nothing")}'
      for path in sorted(have.keys() | want.keys())
      if have.get(path) != want.get(path)
    ]
    if wrong:
      raise ValueError(
        'The checkpoint does not fit the model; nothing was restored. Use the'
        ' config it was trained with, or start a new run.\n' + '\n'.join(wrong)
      )

  def share_state(self, trained: experiment.AbstractExperiment) -> None:
    """Takes over the live state of the experiment in training."""
    assert isinstance(trained, ShardedExperiment)
    self._state = trained.state


def _shapes(tree: Any) -> Iterator[tuple[str, str]]:
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    yield jax.tree_util.keystr(path), f'{x.dtype}{list(x.shape)}'


def _rows(batch: Batch) -> int:
  return len(jax.tree.leaves(batch)[0])


def _pad(batch: Batch, rows: int, shards: int) -> Batch:
  """Fills a batch up to `rows`, rounded up so that it divides over devices.

  Args:
    batch: numpy arrays [b, ...] with b <= rows.
    rows: what this process's batches have, but for the last.
    shards: into how many pieces a global batch is cut.

  Returns:
    The batch with `weights`; rows that only fill up have weight 0, and are
    zeros.
  """
  have = _rows(batch)
  if have > rows:
    raise ValueError(
      f'A batch of {have} rows follows one of {rows}; only the last of an'
      ' evaluation may differ, and be smaller.'
    )
  local_shards = max(1, shards // jax.process_count())
  fill = -(-rows // local_shards) * local_shards - have
  weights = batch.get(WEIGHTS, np.ones(have, np.float32))
  batch = {**batch, WEIGHTS: weights}
  return jax.tree.map(
    lambda x: np.concatenate([x, np.zeros((fill, *x.shape[1:]), x.dtype)])
    if fill
    else np.asarray(x),
    batch,
  )


class _Infeed:
  """Batches placed on the devices ahead of the step, on another thread.

  Attributes:
    position: the iterator's state behind the batch returned last, or None
      where it has none.
  """

  def __init__(
    self, iterator: Iterator[Batch], partitioner: partitioning.Partitioner
  ):
    self._can_save = hasattr(iterator, 'get_state')
    self.position = iterator.get_state() if self._can_save else None  # type: ignore[attr-defined]

    def placed() -> Iterator[tuple[Batch, Any]]:
      for batch in iterator:
        if WEIGHTS not in batch:
          batch = {**batch, WEIGHTS: np.ones(_rows(batch), np.float32)}
        position = iterator.get_state() if self._can_save else None  # type: ignore[attr-defined]
        yield partitioner.put_batch(batch), position

    self._batches = async_lib.py_prefetch(
      placed, buffer_size=3, thread_name='infeed'
    )

  def __next__(self) -> Batch:
    try:
      batch, self.position = next(self._batches)
    except StopIteration:
      # From inside a step, StopIteration could end a loop silently.
      raise ValueError(
        'train_input ended; training needs an endless iterator (repeat it).'
      ) from None
    return batch

  def close(self) -> None:
    """Stops the thread."""
    self._batches.close()
