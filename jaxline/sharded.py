"""The sharded style: compiles pure functions into one step over a mesh.

A subclass of `ShardedExperiment` defines the initial weights (`init_fn`), the
loss of a batch (`loss_fn`), the optimizer (`make_optimizer`) and the data
(`train_input`, `eval_input`). This module makes of them one jitted program
`(state, batch, rng) -> (state, metrics)` with donated buffers over all devices
of all hosts, an evaluation that averages exactly, checkpoints, and batches that
are on the devices before the step needs them.

`train_step` has the functions that are compiled, `mesh` the mesh and
`partitioning` the shardings.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import time
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict
import numpy as np
import optax

from jaxline import accumulate
from jaxline import base_config
from jaxline import errors
from jaxline import evaluation
from jaxline import experiment
from jaxline import keys
from jaxline import metrics as metrics_lib
from jaxline import partitioning
from jaxline import placement
from jaxline import train_step as step_lib
from jaxline.checkpoint import base
from jaxline.compat import prng
from jaxline.inputs import base as inputs
from jaxline.inputs import infeed
from jaxline.inputs import iterable
from jaxline.metrics import lines
from jaxline.metrics import periodic
from jaxline.metrics import writers
from jaxline.supervision import nonfinite
from jaxline.supervision import recompute

# The names of `train_step` that experiments use.
Batch = step_lib.Batch
EMA = step_lib.EMA
LossOutput = step_lib.LossOutput
OVERWRITE = step_lib.OVERWRITE
TrainState = step_lib.TrainState
average_weights = step_lib.average_weights
eval_step = step_lib.eval_step
init_state = step_lib.init_state
trainable = step_lib.trainable


class ShardedExperiment(experiment.AbstractExperiment):
  """An experiment of pure functions, run as one program over a mesh.

  A subclass overrides the five abstract methods. `init_fn` and `loss_fn` must
  be pure: they are traced once.

  `loss_fn` gets every batch with an entry `weights`: the input's own, [B, ...],
  or ones, [B]. Padding rows of an evaluation have weight 0. Metrics are
  `metrics.Mean`s, in which an example must count by its weight.

  `step` and `evaluate` get scalars, without an axis of devices: the number of
  the step, and the key of all steps or of all evaluations, from which the
  compiled programs derive the key of each batch.

  A model that continues text has one more method, `decode(prompts, rng)`, whose
  compiled functions are wrapped in `in_mesh`.

  A constructor of a subclass takes `run_config` and passes it on: the run's
  config holds the mesh, the sharding and other settings of this class.

  Attributes:
    on_nonfinite: what the step does if its loss or gradients are not finite,
      as `config.on_nonfinite`; `train_loop` sets it.
    trainable_rules: the weights that train, as for `trainable`; the others have
      neither gradients nor optimizer state. None is all. A subclass may set it.
    row_losses: None, or a method `(params, model_state, batch, rng)` that
      returns the training loss of each row, [B]. Without it, `runs explain`
      calls `loss_fn` for each row, with the weights of the others at 0.
  """

  PER_PROCESS_ENTRIES = ('input',)
  # The constructor's arguments that only decide where arrays lie.
  CHANGEABLE_ON_RESUME = (
    'experiment_kwargs.mesh',
    'experiment_kwargs.sharding',
  )
  NEVER_BY_RULES = ('state/step', 'state/skipped')
  EVALUATION_IS_PURE = True
  on_nonfinite = 'raise'
  trainable_rules: str | Sequence[str] | None = None
  row_losses: Any = None
  _warns_of_shapes = True  # Until it has.

  def __init__(
    self,
    mode: str,
    init_rng: jax.Array,
    *,
    run_config: Any = None,
    sharding: str | None = None,
    mesh: Mapping[str, Any] | None = None,
  ):
    """Makes the mesh; the state, the programs and the inputs are made later.

    Args:
      mode: 'train', 'decode', or what evaluation was started as.
      init_rng: the key that `init_fn` gets.
      run_config: the config of the run, for `mesh`, `sharding`,
        `sharding_rules`, `gradient_accumulation_steps` and the keys of the
        infeed. None is the base config.
      sharding: one of `partitioning.PRESETS`; None is `run_config.sharding`.
      mesh: sizes of mesh axes, as for `mesh.make_mesh`; None is
        `run_config.mesh`.
    """
    self.mode = mode
    self.run_config = run_config
    config = base_config.get_base_config() if run_config is None else run_config
    self.sharding = config.sharding if sharding is None else sharding
    self.partitioner = partitioning.Partitioner.make(
      config.mesh if mesh is None else mesh,
      self.sharding,
      config.sharding_rules,
    )
    logging.info(
      'Mesh: %s. Sharding %r: %s.',
      self.partitioner.shape,
      self.sharding,
      self.partitioner.rules,
    )
    if idle := self.partitioner.idle_axes():
      logging.warning(
        'The sharding does not use the mesh along %s: all devices along it'
        ' compute the same.',
        idle,
      )
    self.accumulation_steps: int = config.gradient_accumulation_steps
    self.on_nonfinite = config.on_nonfinite or type(self).on_nonfinite
    self._recompute_interval: int | None = config.recompute_interval
    self._infeed_options = {
      'buffer_size': config.infeed_buffer_size,
      'stall_secs': config.infeed_stall_secs,
    }
    skipped = keys.parse_ranges(config.skip_batches)
    self._skipped = {n for a, b in skipped for n in range(a, b + 1)}
    self._init_rng = init_rng
    self._state: TrainState | None = None
    self._is_dropped = False
    # The training data on the devices; what returns its state behind the batch
    # that was taken last; the number of that batch, from 1.
    self._infeed: infeed.Infeed | None = None
    self._input_state: Callable[[], Any] | None = None
    self._num_read = 0
    # What the compiled step returned last, for `train_loop`.
    self._scalars: dict[str, Any] = {}
    self._eval_feed = evaluation.Feed(self.partitioner, **self._infeed_options)

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
      model_state: the value that `init_fn` or the step before returned.
      batch: global arrays [B, ...], one of them `weights`.
      rng: a key of this batch alone. In training it is the run's step key,
        folded with the step's number (and with that of the part of the batch,
        if gradients are accumulated). In evaluation it is the run's key, folded
        with 'evaluation', the name of the evaluation set and the number of the
        batch: the same in each evaluation and on any number of hosts.
      is_training: True in training, False in evaluation.

    Returns:
      A scalar to minimise; name -> `metrics.Mean`; the new model state.
    """

  @abc.abstractmethod
  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns the optimizer."""

  @abc.abstractmethod
  def train_input(self) -> Iterator[Batch]:
    """Returns an endless input: anything that `iterable.as_input` takes.

    Each process reads its own rows of every global batch, as numpy arrays.
    These must not change afterwards: another thread reads them. Checkpoints
    hold the position of a `BaseInput`, and of an iterator with `get_state` and
    `set_state` whose state is a pytree of arrays and plain values.

    It may take `shard`, a `base.Shard`: the rows that this process reads.
    It must take it if processes hold the same rows of a batch.
    """

  @abc.abstractmethod
  def eval_input(self) -> Iterable[Batch] | Mapping[str, Iterable[Batch]]:
    """Returns the batches of one evaluation; the last may have fewer rows.

    It may take `shard`, as `train_input` does.

    Of several evaluation sets: a mapping name -> batches. The names of metrics
    are `<set>/<metric>` then.

    Called once per evaluation. If every set is a `BaseInput` with
    `reset_for_eval=False`, it is called only once, and later evaluations
    continue where the last one stopped.
    """

  def step_scalars(
    self, state: TrainState, grads: Any, updates: Any
  ) -> Mapping[str, jax.Array]:
    """Returns scalars to log besides the loss's metrics; part of the step.

    Args:
      state: the state before the step.
      grads: the gradients, a tree like `state.params`, with None in place of
        weights that do not train.
      updates: the optimizer's changes of the weights, a tree like these.
    """
    del state, updates
    return {'grad_norm': optax.tree.norm(grads)}

  def after_update(self, before: TrainState, after: TrainState) -> Any:
    """Returns the model state after an update of the weights; part of the step.

    For example `average_weights(before, after, decay)`. Called once in a step,
    also if gradients are accumulated over parts of the batch.

    Args:
      before: the state before the step.
      after: the state after it: the new weights, the optimizer's new state,
        the number of steps done, and the model state that `loss_fn` returned.
    """
    del before
    return after.model_state

  # The compiled programs.

  # Cached properties, and not set by the constructor, since a subclass may set
  # what they need after it has called this constructor.
  @functools.cached_property
  def _optimizer(self) -> optax.GradientTransformation:
    return self.make_optimizer()

  @functools.cached_property
  def compiled_train_step(self) -> Callable[..., Any]:
    """`_pure_step` as one program `(state, batch, rng) -> (state, scalars)`.

    It donates the buffers of its state.
    """

    # A partial would keep the experiment alive: JAX caches its signature.
    def step(state: TrainState, batch: Batch, rng: jax.Array) -> Any:
      self._warn_of_another_shape(batch)
      return self._pure_step(state, batch, rng)

    return jax.jit(
      self.in_mesh(step),
      donate_argnums=0,
      out_shardings=(self._state_shardings, self.partitioner.replicated),
    )

  def _pure_step(
    self, state: TrainState, batch: Batch, rng: jax.Array
  ) -> tuple[TrainState, dict[str, Any]]:
    """Computes a training step.

    Args:
      state: the state before the step.
      batch: a global batch.
      rng: the run's step key. The key of the step is its `fold_in` of
        `state.step`.

    Returns:
      The state after the step, and its scalars: the loss's metrics, those of
      `step_scalars`, and those of `train_step.guard_step`.
    """
    loss_fn = lambda params, *args: self.loss_fn(
      step_lib.with_frozen(params, state.params), *args
    )
    # Like the weights, so that no device ever holds the gradients whole.
    place_grads = lambda grads: jax.lax.with_sharding_constraint(
      grads, self.trained(self._state_shardings.params)
    )
    loss, metrics, model_state, grads = accumulate.gradients(
      loss_fn,
      # A gradient that is only dropped later could still take memory.
      self.trained(state.params),
      state.model_state,
      batch,
      jax.random.fold_in(rng, state.step),
      self.accumulation_steps,
      place_grads,
    )
    after, updates = step_lib.update(
      self._optimizer, state, grads, model_state, self.trainable_rules
    )
    scalars = metrics_lib.compute(metrics)
    scalars |= self.step_scalars(state, grads, updates)
    model_state = self.after_update(state, after)
    after = step_lib.checked(
      dataclasses.replace(after, model_state=model_state), state
    )
    if self.on_nonfinite == 'ignore':
      return after, scalars
    after, counts = step_lib.guard_step(
      self.on_nonfinite, state, after, loss, grads
    )
    if taken := scalars.keys() & {nonfinite.NONFINITE, step_lib.SKIPPED_STEPS}:
      raise ValueError(
        f'The experiment returns scalars named {sorted(taken)}, which the step'
        ' adds itself. Choose other names.'
      )
    return after, scalars | counts

  def _warn_of_another_shape(self, batch: Batch) -> None:
    """Warns once that the step, which is being traced, is compiled again."""
    shapes = jax.tree.map(jax.typeof, batch)
    before, self.traced_batch = self.traced_batch, shapes
    if before and self._warns_of_shapes:
      lines = step_lib.differences(shapes, before, 'now', 'before', 'batch')
      if lines:
        self._warns_of_shapes = False
        logging.warning(
          'train_input gave a batch of another shape or type, for which the'
          ' step is compiled again. Pad its batches to one shape, or to few;'
          ' there is no further warning.\n%s',
          '\n'.join(lines),
        )

  @functools.cached_property
  def compiled_eval_step(self) -> Callable[..., Any]:
    """`eval_step` as one program `(state, batch, rng, place) -> metrics`.

    `rng` is the key of evaluation; `place`, [2] uint32, are the numbers of the
    set and of the batch, which are folded into it.
    """

    # Lists of programs show this name.
    def evaluation(
      state: TrainState, batch: Batch, rng: jax.Array, place: jax.Array
    ) -> Any:
      for number in place:
        rng = jax.random.fold_in(rng, number)
      return eval_step(self.loss_fn, state, batch, rng)

    return jax.jit(
      self.in_mesh(evaluation), out_shardings=self.partitioner.replicated
    )

  def in_mesh(self, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `partitioning.constrain` work while `fn` is traced.

    Args:
      fn: a function of positional arguments, to be passed to `jax.jit`.
    """

    @functools.wraps(fn)
    def in_mesh(*args: Any) -> Any:
      with self.partitioner.activate():
        return fn(*args)

    return in_mesh

  # The state and its shapes.

  @property
  def eval_params(self) -> Any:
    """The weights to evaluate and to decode with.

    These are the averaged weights if `model_state` has them (see
    `average_weights`), else `state.params`. A subclass may choose others.
    """
    params, model_state = self.state.params, self.state.model_state
    has_average = isinstance(model_state, Mapping) and EMA in model_state
    # Before its first step, a run may have only the weights of another run.
    if not has_average or int(self.state.step) == 0:
      return params
    return jax.tree.map(
      lambda x, like: x.astype(like.dtype), model_state[EMA], params
    )

  @property
  def state(self) -> TrainState:
    """The live state; made from the init key when it is first used.

    Raises:
      RuntimeError: a restore that failed has dropped it.
    """
    if self._is_dropped:
      raise RuntimeError(
        f'The state of {type(self).__name__} was dropped for a restore that did'
        ' not end. Restore a checkpoint, or construct the experiment again.'
      )
    if self._state is None:
      self._state = self._make_state()
    return self._state

  def _make_state(self) -> TrainState:
    """Returns the initial state, on the devices."""
    if lines := self.undersharded_weights:
      logging.info(
        'These weights are whole on every device, or split less than the'
        ' sharding asks for, although it splits weights:\n%s',
        '\n'.join(lines),
      )
    make = jax.jit(
      self._init_state,
      out_shardings=self._state_shardings,
      compiler_options=self._init_options,
    )
    replicated = self.partitioner.replicated
    return make(placement.put(self._init_rng, replicated))

  @property
  def _init_options(self) -> dict[str, Any] | None:
    """Options of the compiler for a program that runs once.

    On CPU, random numbers take longer to compile than to make: with fewer
    optimizations half as long, for the same bits.
    """
    is_cpu = self.partitioner.mesh.devices.flat[0].platform == 'cpu'
    if not is_cpu or jax.config.read('jax_disable_most_optimizations'):
      return None
    return {'xla_backend_optimization_level': 1}

  def _init_state(self, rng: jax.Array) -> TrainState:
    return partitioning.unbox(self._init_named_state(rng))

  def _init_named_state(self, rng: jax.Array) -> TrainState:
    with self.partitioner.activate():
      return step_lib.init_state(
        self.init_fn, self._optimizer, rng, self.trainable_rules
      )

  def trained(self, params: Any) -> Any:
    """Returns a tree like the weights', None in place of those frozen."""
    return step_lib.trained(params, self.trainable_rules)

  @functools.cached_property
  def _named_shapes(self) -> TrainState:
    """The shapes of the state, those of weights with the names of their axes.

    Cached, since every save needs them while training waits.
    """
    return jax.eval_shape(self._init_named_state, self._init_rng)

  @functools.cached_property
  def _state_shardings(self) -> TrainState:
    """The sharding of each array of the state."""
    boxed = self._named_shapes
    specs = dataclasses.replace(
      self.partitioner.specs(boxed),
      opt_state=self.partitioner.specs_like(boxed.opt_state, boxed.params),
    )
    return self.partitioner.shardings(specs)

  @property
  def undersharded_weights(self) -> Sequence[str]:
    """A line for each weight that is split less than the sharding asks for."""
    return self.partitioner.undersharded_weights(self._named_shapes.params)

  def abstract_state(self) -> TrainState:
    """Returns the shapes and shardings of the state."""
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      partitioning.unbox(self._named_shapes),
      self._state_shardings,
    )

  def abstract_rng(self) -> jax.ShapeDtypeStruct:
    """Returns the shape and sharding of the key of a step."""
    return jax.ShapeDtypeStruct(
      self._init_rng.shape,
      self._init_rng.dtype,
      sharding=self.partitioner.replicated,
    )

  def abstract_batch(self, is_training: bool) -> Batch:
    """Returns the shapes and shardings of a global batch.

    Args:
      is_training: whether of `train_input` or of `eval_input`, whose first
        batch is read. Of several evaluation sets the first is used. If the
        devices are not those of this process, it stands for all hosts and reads
        all rows.
    """
    sources = (
      {'': self._open_input()} if is_training else self._make_eval_inputs()
    )
    source = next(iter(sources.values()))
    try:
      batch = next(source if is_training else source.eval_batches(), None)
      if batch is None:
        raise ValueError(f'{source.name} gave no batch.')
    finally:
      for source in sources.values():
        source.close()
    rows = inputs.num_rows(batch)
    num_hosts = self.partitioner.host[1]
    if is_training:
      placement.check_rows(rows * num_hosts, self.partitioner)
    else:
      rows = placement.padded_rows(rows, self.partitioner)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        (rows * num_hosts, *x.shape[1:]),
        jax.dtypes.canonicalize_dtype(x.dtype),
        sharding=self.partitioner.batch_sharding,
      ),
      inputs.pad_rows(batch, rows),
    )

  def summary(self) -> dict[str, str]:
    """Returns name -> text of lines that the terminal shows at the start."""
    sizes = self.partitioner.axis_sizes.items()
    axes = ', '.join(f'{axis} {size}' for axis, size in sizes if size > 1)
    params = self.abstract_state().params
    weights, trained = map(jax.tree.leaves, (params, self.trained(params)))
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
    """Returns the key that training initialises from."""
    return prng.run_keys(config)[1]

  def step_inputs(
    self, config: config_dict.ConfigDict
  ) -> experiment.StepInputs:
    """Returns what gives each step its number and the run's key."""
    del config  # `random_mode_train` is for several programs; this is one.
    return lambda global_step, rng: (global_step, rng, rng)

  def initialize_train_step_rng(self, rng: jax.Array) -> jax.Array:
    """Puts the key of training on all devices."""
    return placement.put(rng, self.partitioner.replicated)

  def train_loop(
    self,
    config: config_dict.ConfigDict,
    state: Any,
    periodic_actions: Sequence[periodic.Action],
    writer: writers.MetricWriter | None = None,
  ) -> None:
    """Runs steps until `should_run_step` returns False."""
    config = base_config.complete_config(config)
    mode = config.on_nonfinite or type(self).on_nonfinite
    if self.on_nonfinite != mode:
      self.on_nonfinite = mode
      self.__dict__.pop('compiled_train_step', None)
    # A restored key is on the host; each step would put it on the devices.
    state.train_step_rng = placement.put(
      state.train_step_rng, self.partitioner.replicated, may_keep=True
    )
    try:
      super().train_loop(config, state, periodic_actions, writer)
    except errors.StopTraining:
      # An override of `step` may raise it behind the update, which counts.
      step = state.global_step + 1
      if int(self.state.step) == step:
        state.global_step = step
        for action in periodic_actions:
          action(time.time(), step, self._scalars)
      raise
    finally:
      # The thread would keep the experiment and its arrays alive.
      self._close_input()
      self.last_batch = None

  def step(
    self, *, global_step: Any, rng: Any, writer: writers.MetricWriter | None
  ) -> dict[str, Any]:
    """Trains on the next batch; returns the scalars of `train_step`."""
    del writer
    if self._infeed is None:
      self._infeed = self._read_ahead(self._open_input(self._input_state))
    if (batch := next(self._infeed, None)) is None:
      # Not a StopIteration, which could end a loop silently.
      raise ValueError(
        'train_input ended; training needs an endless iterator (repeat it).'
      )
    self.last_batch = batch
    every, step = self._recompute_interval, self.compiled_train_step
    if every and (int(global_step) + 1) % every == 0:
      step = functools.partial(recompute.twice, step)
    self._state, self._scalars = step(self.state, batch, rng)
    # Not before: a step that fails has not had its batch.
    self._num_read, self._input_state = self.next_batch_number, None
    if (mark := self._infeed.mark) is not None:
      state_of = self._infeed.source.state_of
      self._input_state = functools.partial(state_of, mark)
    self._scalars['input_wait_fraction'] = self._infeed.wait_fraction
    return dict(self._scalars)

  @property
  def _shard(self) -> inputs.Shard:
    return inputs.Shard(*self.partitioner.host)

  def _as_input(self, source: Any, is_training: bool) -> inputs.BaseInput:
    """Returns what a method gave, and refuses an input for anything else."""
    source = iterable.as_input(
      source, is_training=is_training, shard=self._shard
    )
    got = source.is_training, source.infeed_host_index, source.num_infeed_hosts
    expected = is_training, *self.partitioner.host
    if got != expected:
      method = 'train_input' if is_training else 'eval_input'
      raise ValueError(
        f'{method} returned {source.name} with (is_training, infeed_host_index,'
        f' num_infeed_hosts) = {got}; expected {expected}. Set is_training, and'
        f' give it the shard that {method}(shard) gets.'
      )
    return source

  def _open_input(
    self, state: Callable[[], Any] | None = None
  ) -> inputs.BaseInput:
    """Returns `train_input`, set to a state if there is one."""
    given = inputs.of_shard(self.train_input, self._shard)
    source = self._as_input(given, is_training=True)
    if source.saves_position:
      if state is not None:
        source.set_state(state())
    elif state is not None:
      raise ValueError(
        'The checkpoint holds the position of the data, but train_input'
        f' returned {source.name}, whose position cannot be set. Use the input'
        ' that the run was trained with (in a BaseInput with'
        ' input_checkpointing_enabled=True), or start a new run.'
      )
    else:
      logging.warning(
        'The position of %s is not saved: a run that is resumed begins its'
        ' data anew.',
        source.name,
      )
    return source

  def _read_ahead(self, source: inputs.BaseInput) -> infeed.Infeed:
    """Returns a source's batches on the devices, read ahead of the step."""
    # Without `self`: the thread would keep the experiment and its arrays alive.
    skipped, numbers = self._skipped, itertools.count(self._num_read + 1)
    return infeed.Infeed(
      source,
      functools.partial(placement.put_batch, partitioner=self.partitioner),
      kept=(number not in skipped for number in numbers),
      **self._infeed_options,
    )

  def peek(self) -> tuple[inputs.BaseInput, Batch, list[str]]:
    """Reads the batch of the next step, which stays the next one.

    Returns:
      The input, closed; this process's rows; where each row comes from.
    """
    if self._input_state is None and self._num_read:
      raise errors.UsageError(
        'The next batch is not known: train_input has no position. Use a'
        ' BaseInput, or an iterator with get_state and set_state.'
      )
    source = self._open_input(self._input_state)
    for _ in range(self._num_read + 1, self.next_batch_number):
      next(source)
    where, batch = source.where_rows(), next(source)
    source.close()
    return source, batch, where

  @property
  def next_batch_number(self) -> int:
    """The number of the batch of the next step, from 1."""
    number = self._num_read + 1
    while number in self._skipped:
      number += 1
    return number

  def _close_input(self) -> None:
    if self._infeed is not None:
      self._infeed.close()
      self._infeed = None
    if self._input_state is not None:
      # Without the input, whose iterator may have workers that end with it.
      state = self._input_state()
      self._input_state = lambda: state

  # Evaluation.

  def evaluate_inputs(
    self, config: config_dict.ConfigDict, rng: jax.Array
  ) -> Callable[[int], tuple[Any, Any]]:
    """Returns a function that maps a step to the arguments of `evaluate`."""
    del config  # `random_mode_eval` is for several programs; this is one.
    rng = prng.stream(rng, 'evaluation')
    rng = placement.put(rng, self.partitioner.replicated)
    return lambda global_step: (global_step, rng)

  def evaluate(
    self, *, global_step: Any, rng: Any, writer: writers.MetricWriter | None
  ) -> dict[str, float]:
    """Averages the loss function's metrics over `eval_input`.

    Returns:
      Name -> mean; with several evaluation sets, `<set>/<name>` -> mean.
    """
    del global_step, writer
    # The optimizer's state may be on the host: see `restore_from_snapshot`.
    state = dataclasses.replace(
      self.state, params=self.eval_params, opt_state=None
    )
    scalars: dict[str, float] = {}
    sources = self._eval_feed.open(self._make_eval_inputs)
    for name, source in sources.items():
      sums: Any = None
      metrics: Any = None
      set_number = prng.stream_number(name)
      batches = self._eval_feed.batches(name, source, self.num_evaluated)
      for i, batch in enumerate(batches):
        # This waits for the batch before, while this batch is transferred.
        # Without it, batches that wait for the devices would fill their memory.
        sums = _add_fetched(sums, metrics)
        place = np.array([set_number, i], np.uint32)
        metrics = self.compiled_eval_step(state, batch, rng, place)
      sums = _add_fetched(sums, metrics)
      with np.errstate(invalid='ignore'):  # A mean of weight 0 is NaN.
        means = metrics_lib.compute(sums)
      prefix = f'{name}/' if name else ''
      scalars |= {f'{prefix}{key}': float(x) for key, x in means.items()}
    return scalars

  def _make_eval_inputs(self) -> dict[str, inputs.BaseInput]:
    """Returns name -> input of the evaluation sets; '' if there is only one."""
    found: Any = inputs.of_shard(self.eval_input, self._shard)
    given = dict(found) if isinstance(found, Mapping) else {'': found}
    if not given:
      raise ValueError(
        f'{type(self).__name__}.eval_input returned an empty mapping; expected'
        ' name -> input of at least one evaluation set.'
      )
    return {name: self._as_input(x, False) for name, x in given.items()}

  # Checkpoints.

  def snapshot_state(self) -> dict[str, Any]:
    """Returns the state and the position of the data."""
    # With `skip_batches`, of this run or of one it began from, the number of
    # batches is not that of the step.
    snapshot = {'state': self.state, 'batches': self._num_read}
    if self._input_state is not None:
      snapshot['input'] = self._input_state()
    return snapshot

  def snapshot_template(self) -> dict[str, Any]:
    """Returns the shapes and shardings of the state."""
    return {'state': self.abstract_state()}

  def wants_restored(self, name: str) -> bool:
    """Returns whether a restore must read an array.

    An evaluation needs neither the optimizer's state nor the position of the
    training data.
    """
    if self.mode == 'train':
      return True
    parts = name.split('/')
    return parts[:2] != ['state', 'opt_state'] and parts[0] != 'input'

  def make_room(self) -> None:
    """Drops the state: until it is restored, using it is an error."""
    self._state, self._is_dropped = None, True

  def restore_from_snapshot(self, snapshot_state: Mapping[str, Any]) -> None:
    """Restores the state onto this mesh and, in training, the position.

    A checkpoint without a position starts the data anew.

    Args:
      snapshot_state: as `snapshot_state` returned it, its arrays whole.

    Raises:
      ValueError: the checkpoint's weights are not this model's, or the input
        cannot be set to its position; then nothing was changed.
    """
    saved = snapshot_state['state']
    is_training = self.mode == 'train'
    if wrong := step_lib.differences(
      saved, self.abstract_state(), 'it has', 'the model expects', 'state'
    ):
      raise errors.UsageError(
        'The checkpoint does not fit the model; nothing was restored. Use the'
        ' config it was trained with, or start a new run.\n' + '\n'.join(wrong)
      )
    num_read = int(snapshot_state.get('batches', saved.step))
    state = None
    if (position := snapshot_state.get('input')) is not None:
      state = lambda: position
    if is_training:
      if state is None and saved.step > 0:
        logging.warning(
          'The checkpoint holds no position of the data, which begins anew: if'
          ' its order does not change, the run sees the same again.'
        )
      source = self._open_input(state)
      self._close_input()
    # An evaluation keeps them for the case that this is the best checkpoint.
    self._input_state, self._num_read = state, num_read
    if is_training:
      self._infeed = self._read_ahead(source)
    # Free the old arrays first: memory need not hold both.
    self.make_room()
    # An evaluation keeps the optimizer's state on the host, likewise for the
    # best checkpoint.
    on_host = {} if is_training else {'opt_state': saved.opt_state}
    without = dict.fromkeys(on_host)
    placed = placement.put(
      dataclasses.replace(saved, **without),
      dataclasses.replace(self._state_shardings, **without),
      may_keep=isinstance(snapshot_state, base.Fresh),
    )
    self._state = dataclasses.replace(placed, **on_host)
    self._is_dropped = False

  def share_state(self, trained: experiment.AbstractExperiment) -> None:
    """Takes over the live state of the experiment in training."""
    assert isinstance(trained, ShardedExperiment)
    self._state = trained.state
    self._input_state = trained._input_state
    self._num_read = trained._num_read


def _add_fetched(sums: Any, metrics: Any) -> Any:
  """Adds metrics on the devices to sums on the host, in float64."""
  if metrics is None:
    return sums
  metrics = jax.tree.map(np.float64, jax.device_get(metrics))
  return metrics if sums is None else metrics_lib.add(sums, metrics)
