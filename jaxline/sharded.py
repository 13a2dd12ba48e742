"""The sharded style: compiles pure functions into one step over a mesh.

A subclass defines the weights, the loss, the optimizer and the data. This
module turns them into one jitted program `(state, batch, rng) -> (state,
metrics)` with donated buffers over all devices of all hosts, an evaluation with
exact averages, and checkpoints. `train_step` has the compiled functions,
`train_state` the state, `feed` the batches and `partitioning` the shardings.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
from ml_collections import config_dict
import numpy as np
import optax

from jaxline import base_config
from jaxline import errors
from jaxline import experiment
from jaxline import metrics as metrics_lib
from jaxline import train_state
from jaxline import train_step as step_lib
from jaxline.base import stateful
from jaxline.inputs import batches as batches_lib
from jaxline.inputs import feed
from jaxline.metrics import lines
from jaxline.metrics import periodic
from jaxline.metrics import scalars as scalars_lib
from jaxline.metrics import writers
from jaxline.parallel import partitioning
from jaxline.parallel import placement
from jaxline.parallel import prng
from jaxline.supervision import recompute

# Names that experiments use.
BatchDict = step_lib.BatchDict
LossOutput = step_lib.LossOutput
OVERWRITE = step_lib.OVERWRITE
EMA = train_state.EMA
TrainState = train_state.TrainState
average_weights = train_state.average_weights
trainable = train_state.trainable


class ShardedExperiment(experiment.FullExperiment):
  """An experiment made of pure functions that runs as one program over a mesh.

  A subclass overrides the five abstract methods. `init_fn` and `loss_fn` must
  be pure, since they are traced only once. The constructor of a subclass takes
  `run_config` and passes it to this one. A model that continues text overrides
  `decode(prompts, rng)` too, and wraps its compiled functions in `in_mesh`.

  Attributes:
    trainable_rules: set it to select the weights that train (see `trainable`);
      the others have no gradients and no optimizer state. None means all.
    row_losses: None, or a method `(params, model_state, batch, rng)` that
      returns the training loss of each row, [B]. Without it, `runs explain`
      calls `loss_fn` once per row, with the weights of all other rows at 0.
    train_feed: the batches of training, and their position.
  """

  PER_PROCESS_ENTRIES = ('input',)
  # These arguments of the constructor only decide where arrays are stored.
  CHANGEABLE_ON_RESUME = (
    'experiment_kwargs.mesh',
    'experiment_kwargs.sharding',
  )
  NEVER_BY_RULES = ('state/step', 'state/skipped')
  EVALUATION_IS_PURE = True
  FLAGS_NONFINITE = True
  on_nonfinite = 'raise'
  trainable_rules: str | Sequence[str] | None = None
  row_losses: Any = None

  def __init__(
    self,
    mode: str,
    init_rng: jax.Array,
    *,
    run_config: Any = None,
    sharding: str | None = None,
    mesh: Mapping[str, Any] | None = None,
  ):
    """Makes the mesh. The state, the programs and the inputs are made lazily.

    `sharding` and `mesh` override the keys of `run_config`, the run's config.
    If `run_config` is None, the base config is used.
    """
    self.mode, self.run_config = mode, run_config
    config = base_config.get_base_config() if run_config is None else run_config
    self.sharding = config.sharding if sharding is None else sharding
    self.partitioner = partitioning.Partitioner.make(
      config.mesh if mesh is None else mesh,
      self.sharding,
      config.sharding_rules,
    )
    self.accumulation_steps: int = config.gradient_accumulation_steps
    self.on_nonfinite = config.on_nonfinite or type(self).on_nonfinite
    self._recompute_interval: int | None = config.recompute_interval
    self._init_rng = init_rng
    self._state: TrainState | None = None
    # The scalars of the last compiled step, for `train_loop`.
    self._scalars = scalars_lib.Scalars()
    self.train_feed = feed.TrainFeed(self.train_input, self.partitioner, config)
    self._eval_feed = feed.EvalFeed(self.eval_input, self.partitioner, config)

  @abc.abstractmethod
  def init_fn(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns (params, model_state); weights may be `partitioning.Logical`."""

  @abc.abstractmethod
  def loss_fn(
    self,
    params: Any,
    model_state: Any,
    batch: BatchDict,
    rng: jax.Array,
    is_training: bool,
  ) -> LossOutput:
    """Returns the loss, the metrics and the new model state of a batch.

    Args:
      params: the weights.
      model_state: the value that `init_fn` or the previous step returned.
      batch: a `Batch` of global arrays, [B, ...]. If the input has no entry
        `weights`, [B, ...], the library adds ones, [B]. Rows that pad the last
        batch of an evaluation have weight 0.
      rng: a key for this batch, or microbatch, only.
      is_training: False in an evaluation.

    Returns:
      (loss, metrics, model_state). The loss is a scalar. The metrics are a dict
      name -> `metrics.Mean`, or a scalar that is a mean weighted by `weights`.
    """

  @abc.abstractmethod
  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns the optimizer."""

  @abc.abstractmethod
  def train_input(self) -> Iterator[BatchDict]:
    """Returns an endless input: anything that `iterable.as_input` accepts.

    Each process reads its own rows of every global batch, as NumPy arrays that
    are never modified afterwards. If the method has a parameter `shard`, it
    gets the `base.Shard` that selects these rows. The parameter is required if
    several processes hold the same rows.
    """

  @abc.abstractmethod
  def eval_input(
    self,
  ) -> Iterable[BatchDict] | Mapping[str, Iterable[BatchDict]]:
    """Returns the batches of one evaluation; the last may have fewer rows.

    It may have a parameter `shard`. It is called once per evaluation. For
    several sets, return a mapping name -> batches; their metrics are named
    `<set>/<metric>`. If every set is a `BaseInput` with `reset_for_eval=False`,
    it is called only once, and each evaluation continues in the data.
    """

  def eval_outputs(
    self, params: Any, model_state: Any, batch: BatchDict, rng: jax.Array
  ) -> Any:
    """Returns arrays [B, ...] for `reduce_outputs`, one row per row of a batch.

    It is compiled into the evaluation step, and gets the same arguments as
    `loss_fn`. Return None if all metrics are means.
    """
    return None

  def reduce_outputs(self, outputs: Any) -> Mapping[str, Any]:
    """Returns metrics, or images, that need all rows of an evaluation set.

    Each process gets the rows of all batches and processes as NumPy arrays
    [N, ...], without padding and in the order of a single process.
    """
    raise NotImplementedError(f'{type(self).__name__} has no reduce_outputs.')

  def step_scalars(
    self, state: TrainState, grads: Any, updates: Any
  ) -> Mapping[str, jax.Array]:
    """Returns scalars to log in addition to the metrics; part of the step.

    `state` is the state before the step. The gradients and the `updates` of the
    weights have the structure of `trainable_only(state.params)`.
    """
    return {'grad_norm': optax.tree.norm(grads)}

  def after_update(self, before: TrainState, after: TrainState) -> Any:
    """Returns the model state after an update of the weights; part of the step.

    For example, return `average_weights(before, after, decay)`. It is called
    once per step; `after` has the model state that `loss_fn` returned.
    """
    return after.model_state

  # Programs are compiled on first use, because a subclass may set attributes
  # that they need after it has called this constructor.

  @functools.cached_property
  def _optimizer(self) -> optax.GradientTransformation:
    return self.make_optimizer()

  @functools.cached_property
  def compiled_train_step(self) -> Callable[..., Any]:
    """`_pure_step` as one program that donates its state."""

    # A partial would keep the experiment alive, since JAX caches its signature.
    def step(state: TrainState, batch: BatchDict, rng: jax.Array) -> Any:
      shapes = jax.tree.map(jax.typeof, batch)
      step_lib.warn_of_another_shape(self.traced_batch, shapes)
      self.traced_batch = shapes
      after, scalars = self._pure_step(state, batches_lib.as_batch(batch), rng)
      return after, scalars_lib.pack(scalars)

    return jax.jit(
      self.in_mesh(step),
      donate_argnums=0,
      out_shardings=(self.layout.shardings, self.partitioner.replicated),
    )

  def _pure_step(
    self, state: TrainState, batch: BatchDict, rng: jax.Array
  ) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state and the scalars of a step; `rng` is the run's key."""
    loss_fn = lambda params, *args: self.loss_fn(
      train_state.merge_frozen(params, state.params), *args
    )
    # Shard the gradients like the weights: no device needs to hold all of them.
    place_grads = lambda grads: jax.lax.with_sharding_constraint(
      grads, self.trainable_only(self.layout.shardings.params)
    )
    # Frozen weights get no gradient: even an unused one would take memory.
    params = self.trainable_only(state.params)
    loss, metrics, model_state, grads = step_lib.accumulate_gradients(
      loss_fn,
      params,
      state.model_state,
      batch,
      jax.random.fold_in(rng, state.step),
      self.accumulation_steps,
      place_grads,
    )
    # Optax relies on type promotion, even if the model forbids it.
    with jax.numpy_dtype_promotion('standard'):
      updates, opt_state = self._optimizer.update(
        grads, state.opt_state, params
      )
    after = dataclasses.replace(
      state,
      step=state.step + 1,
      params=train_state.merge_frozen(
        optax.apply_updates(params, updates), state.params
      ),
      model_state=model_state,
      opt_state=opt_state,
    )
    scalars = metrics_lib.compute(metrics)
    scalars |= self.step_scalars(state, grads, updates)
    model_state = self.after_update(state, after)
    after = step_lib.checked(
      dataclasses.replace(after, model_state=model_state), state
    )
    if self.on_nonfinite == 'ignore':
      return after, scalars
    empty = step_lib.is_empty(batch)
    after, counts = step_lib.guard_step(
      self.on_nonfinite, state, after, loss, grads, empty
    )
    if taken := sorted(scalars.keys() & {*counts, step_lib.SKIPPED_STEPS}):
      raise ValueError(f'Metrics {taken} have reserved names. Rename them.')
    return after, scalars | counts

  @functools.cached_property
  def compiled_eval_step(self) -> Callable[..., Any]:
    """Evaluates: (state, batch, rng, place) -> metrics and `eval_outputs`.

    `place`, [2] uint32, holds the numbers of the set and of the batch; they are
    folded into the key. The state may lack `opt_state`.
    """

    def evaluation(state: Any, batch: BatchDict, rng: Any, place: Any) -> Any:
      for number in place:
        rng = jax.random.fold_in(rng, number)
      args = state.params, state.model_state, batches_lib.as_batch(batch), rng
      weights = batch[step_lib.WEIGHTS]
      outputs = step_lib.check_rows(self.eval_outputs(*args), len(weights))
      _, metrics, _ = self.loss_fn(*args, False)
      return metrics_lib.complete(metrics, weights), outputs

    whole, split = self.partitioner.replicated, self.partitioner.batch_sharding
    return jax.jit(self.in_mesh(evaluation), out_shardings=(whole, split))

  def in_mesh(self, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `partitioning.constrain` work while `fn` is traced by `jax.jit`."""
    return self.partitioner.activate()(fn)

  # The state and its shapes.

  @property
  def eval_params(self) -> Any:
    """The weights for evaluation and decoding: the averaged ones, if any."""
    return train_state.averaged_weights(self.state)

  @property
  def state(self) -> TrainState:
    """The live state; initialized on first use."""
    if self._state is None:
      self._state = self.layout.make()
    return self._state

  @functools.cached_property
  def layout(self) -> train_state.Layout:
    """The shapes and shardings of the state."""
    rules, init_state = self.trainable_rules, train_state.init_state
    init = self.in_mesh(
      lambda rng: init_state(self.init_fn, self._optimizer, rng, rules)
    )
    init = jax.jit(init, inline=True)  # It is traced once, for all uses.
    return train_state.Layout(init, self._init_rng, self.partitioner)

  def trainable_only(self, params: Any) -> Any:
    """Returns a tree like `params` with None in place of frozen weights."""
    return train_state.trainable_only(params, self.trainable_rules)

  # The shapes and shardings of a step's arguments.

  def abstract_state(self) -> TrainState:
    return self.layout.abstract()

  def abstract_rng(self) -> jax.ShapeDtypeStruct:
    return self.layout.abstract_rng()

  def abstract_batch(self, is_training: bool) -> BatchDict:
    """Returns the shapes and shardings of a batch; reads the first one."""
    source = self.train_feed if is_training else self._eval_feed
    return source.abstract_batch()

  def summary(self) -> dict[str, str]:
    sizes = self.partitioner.mesh.shape.items()
    axes = ', '.join(f'{axis} {size}' for axis, size in sizes if size > 1)
    params = self.abstract_state().params
    weights, trained = map(
      jax.tree.leaves, (params, self.trainable_only(params))
    )
    text = lines.weights(weights)
    if len(trained) < len(weights):
      text += f'; {sum(x.size for x in trained):,} of them train'
    if split := [x for x in weights if not x.sharding.is_fully_replicated]:
      text += f'; {len(split)} split over devices'
    return {
      'Mesh': axes and f'{axes}; sharding {self.sharding}',
      'Parameters': text,
      'Data': self.data_summary,
    }

  # Training.

  @classmethod
  def eval_init_rng(cls, config: config_dict.ConfigDict) -> jax.Array:
    """Returns the key that training initializes the weights from."""
    return prng.run_keys(config)[1]

  def step_inputs(
    self, config: config_dict.ConfigDict
  ) -> experiment.StepInputs:
    # The state key never changes, because the program folds the step into it.
    # So `random_mode_train` and `random_mode_eval` have no effect.
    return lambda global_step, rng: (global_step, rng, rng)

  def initialize_train_step_rng(self, rng: jax.Array) -> jax.Array:
    return placement.put(rng, self.partitioner.replicated)

  def train_loop(
    self,
    config: config_dict.ConfigDict,
    state: Any,
    periodic_actions: Sequence[periodic.Action],
    writer: writers.MetricWriter | None = None,
  ) -> None:
    config = base_config.complete_config(config)
    # A restored key is on the host, from where each step would transfer it.
    state.train_step_rng = placement.put(
      state.train_step_rng, self.partitioner.replicated, may_keep=True
    )
    try:
      super().train_loop(config, state, periodic_actions, writer)
    finally:
      # The feed's thread would keep the experiment and its arrays alive.
      self.train_feed.close()
      self.last_batch = None

  def _scalars_of_done(self, step: int) -> scalars_lib.Scalars | None:
    return self._scalars if int(self.state.step) == step else None

  def step(
    self, *, global_step: Any, rng: Any, writer: writers.MetricWriter | None
  ) -> scalars_lib.Scalars:
    self.last_batch = batch = self.train_feed.take()
    every, step = self._recompute_interval, self.compiled_train_step
    if every and (int(global_step) + 1) % every == 0:
      step = functools.partial(recompute.run_and_verify, step)
    self._state, packed = step(self.state, batch, rng)
    self._scalars = scalars_lib.Scalars(packed)
    # Commit only now: a checkpoint after a failed step must not skip its batch.
    self.train_feed.commit()
    self._scalars.others['input_wait_fraction'] = self.train_feed.wait_fraction
    return self._scalars

  # Evaluation.

  def evaluate_inputs(
    self, config: config_dict.ConfigDict, rng: jax.Array
  ) -> Callable[[int], tuple[Any, Any]]:
    rng = prng.stream(rng, 'evaluation')
    rng = placement.put(rng, self.partitioner.replicated)
    return lambda global_step: (global_step, rng)

  def evaluate(
    self, *, global_step: Any, rng: Any, writer: writers.MetricWriter | None
  ) -> dict[str, float]:
    """Returns [<set>/]<name> -> number for all sets, and writes the images."""
    # The optimizer's state may be on the host (see `restore_from_snapshot`).
    params = self.eval_params
    state = dataclasses.replace(self.state, params=params, opt_state=None)
    found: dict[str, Any] = {}
    # Check in two evaluations: equal losses of initial weights hide an error.
    checks = self.num_evaluated < 2
    ends = self._eval_feed.rows_of, self.reduce_outputs, checks
    for name, batches in self._eval_feed.sets(self.num_evaluated):
      args = state, batches, rng, prng.stream_number(name), *ends
      metrics = step_lib.set_metrics(self.compiled_eval_step, *args)
      prefix = f'{name}/' if name else ''
      found |= {f'{prefix}{key}': x for key, x in metrics.items()}
    images = {k: found.pop(k) for k in [*found] if np.ndim(found[k]) > 1}
    if images and writer is not None:
      writer.write_images(global_step, images)
    return found

  # Checkpoints.

  def snapshot_state(self) -> dict[str, Any]:
    snapshot = {'state': self.state, 'batches': self.train_feed.num_read}
    if (position := self.train_feed.position) is not None:
      snapshot['input'] = position
    return snapshot

  def snapshot_template(self) -> dict[str, Any]:
    return {'state': self.abstract_state()}

  def wants_restored(self, name: str) -> bool:
    # Evaluation needs neither the optimizer's state nor the input's position.
    unused = ('state/opt_state/', 'input/')
    return self.mode == 'train' or not f'{name}/'.startswith(unused)

  def make_room(self) -> None:
    # If it were None, `state` would make new weights after a failed restore.
    self.__dict__.pop('_state', None)

  def restore_from_snapshot(self, snapshot_state: Mapping[str, Any]) -> None:
    """Restores the state onto this mesh; in training, the position too."""
    saved, is_training = snapshot_state['state'], self.mode == 'train'
    if wrong := train_state.differences(
      saved, self.abstract_state(), 'it has', 'the model expects', 'state'
    ):
      raise errors.UsageError(
        'The checkpoint does not fit the model; nothing was restored. Use the'
        ' config of its run, or start a new run.\n' + '\n'.join(wrong)
      )
    num_read = int(snapshot_state.get('batches', saved.step))
    place = num_read, snapshot_state.get('input')
    # An evaluation may save this state as the best checkpoint. So it keeps the
    # position and the optimizer's state, on the host.
    on_host: dict[str, Any] = {}
    if is_training:
      self.train_feed.restore(*place)
    else:
      self.train_feed.note(*place)
      on_host = {'opt_state': saved.opt_state}
    # Free the old arrays first, so that memory need not hold both.
    self.make_room()
    without = dict.fromkeys(on_host)
    placed = placement.put(
      dataclasses.replace(saved, **without),
      dataclasses.replace(self.layout.shardings, **without),
      may_keep=isinstance(snapshot_state, stateful.OwnedSnapshot),
    )
    self._state = dataclasses.replace(placed, **on_host)

  def share_state(self, trained: experiment.AbstractExperiment) -> None:
    assert isinstance(trained, ShardedExperiment)
    self._state, source = trained.state, trained.train_feed
    self.train_feed.note(source.num_read, source.position)
