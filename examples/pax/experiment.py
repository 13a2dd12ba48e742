"""Adapts a registered experiment to `ShardedExperiment`.

The adapter provides checkpoints, multi-host runs and ahead-of-time compilation.
The task defines the model and its training.

Shapes: B prompts, T prompt length.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import fiddle as fdl
import jax
import numpy as np
import optax

from examples import decoding
from examples import fp8
from examples.pax import base_experiment
from examples.pax import base_task
from examples.pax import config as config_lib
from examples.pax.inputs import synthetic
from jaxline import base_config
from jaxline import errors
from jaxline import sharded
from jaxline.inputs import base as inputs
from jaxline.metrics import writers
from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import placement

Config = config_lib.Config


class TaskExperiment(sharded.ShardedExperiment):
  """The base of experiments that train a task.

  Attributes:
    task: The task. A subclass sets it in its constructor.
  """

  task: base_task.SingleTask

  def init_fn(self, rng: jax.Array) -> tuple[Any, Any]:
    return self.task.boxed_init(rng)

  def loss_fn(
    self,
    params: Any,
    model_state: Any,
    batch: sharded.BatchDict,
    rng: jax.Array,
    is_training: bool,
  ) -> sharded.LossOutput:
    batch = inputs.Batch(batch)  # Tasks may read `batch.ids`, as in Pax.
    return self.task.loss_fn(params, model_state, batch, rng, is_training)

  def make_optimizer(self) -> optax.GradientTransformation:
    return self.task.make_optimizer()

  def step_scalars(
    self, state: sharded.TrainState, grads: Any, updates: Any
  ) -> Mapping[str, jax.Array]:
    return self.task.step_scalars(state, grads, updates)

  def after_update(
    self, before: sharded.TrainState, after: sharded.TrainState
  ) -> Any:
    return self.task.after_update(before, after)


class Experiment(TaskExperiment):
  """Runs a registered experiment, `experiment`, which `config` chooses."""

  CONFIG_CLASS = Config
  # The `changeable_constants` of an experiment may change too.
  CHANGEABLE_ON_RESUME: tuple[str, ...] = ('experiment_kwargs.config.decode',)

  def __init__(
    self, mode: str, init_rng: jax.Array, config: Any, *, run_config: Any = None
  ):
    """Makes the experiment and its task: see `sharded.ShardedExperiment`.

    `config` has the values of a `Config`. Some keys of `run_config` are
    constants of the experiment. If None, these have the values of the class.
    """
    self.config = base_config.read(Config, config)
    # Whether inputs are opened only for the shapes of their batches.
    self._wants_shapes = False
    # Scalars with the numbers of rows and tokens of a step.
    self._counts: dict[str, int] = {}
    try:
      super().__init__(mode, init_rng, run_config=run_config)
    except mesh_lib.MeshError as e:
      if not self.config.reduced:
        e.add_note(
          f'{self.config.exp} is made for specific chips. To run its small'
          ' version on one device, add --reduced, or ":reduced" to the name in'
          ' --config.'
        )
      raise
    experiment = self.config.experiment(run_config)
    self.experiment: base_experiment.BaseExperiment = experiment(
      num_devices=math.prod(self.partitioner.axis_sizes.values())
    )
    self.task = self.experiment.filled_task().Instantiate()
    if self.config.decode is None:
      # An experiment that has no text must look as if it had no `decode`, so
      # that no message proposes to continue prompts.
      self.decode = super().decode  # type: ignore[method-assign]
    if self.task.uses_fp8 and self.partitioner.is_here:
      fp8.check_devices(jax.local_devices())

  def step(
    self, *, global_step: Any, rng: Any, writer: writers.MetricWriter | None
  ) -> dict[str, Any]:
    """Trains on the next batch, and counts its rows and tokens."""
    if int(global_step) == 0 and writer is not None:
      writer.write_texts(0, {'task': self.task.hparams.to_text()})
    scalars = super().step(global_step=global_step, rng=rng, writer=writer)
    return scalars | self._counts

  # Data.

  def train_input(self, shard: inputs.Shard | None = None) -> Any:
    """Returns the input for training."""
    dataset, *others = self._datasets(shard, is_training=True)
    if others:
      raise errors.UsageError(
        f'{type(self.experiment).__name__} has {1 + len(others)} inputs for'
        ' training; expected one. Combine them in a MixtureInput.'
      )
    rows = dataset.batch_size * self.partitioner.host[1]
    self._counts = {'examples_per_step': rows}
    specs = self.experiment.input_specs() or {}
    if 'ids' in specs:
      self._counts['tokens_per_step'] = rows * math.prod(specs['ids'][0])
    return self._build(dataset)

  def eval_input(self, shard: inputs.Shard | None = None) -> Any:
    """Returns the input for evaluation, or name -> input if there are several.

    Raises a UsageError if two of several have the same name, or one has none.
    """
    found = self._datasets(shard, is_training=False)
    if len(found) == 1:
      return self._build(found[0])
    names = [d.__arguments__.get('name', '') for d in found]
    if '' in names or len(set(names)) < len(names):
      raise errors.UsageError(
        f'{type(self.experiment).__name__} has {len(names)} inputs for'
        f' evaluation, with the names {names}. Give each a different name.'
      )
    return {d.name: self._build(d) for d in found}

  def _datasets(
    self, shard: inputs.Shard | None, *, is_training: bool
  ) -> list[fdl.Config]:
    self.experiment.shard = shard
    datasets = self.experiment.datasets()
    found = [d for d in datasets if bool(d.is_training) == is_training]
    if not found:
      raise errors.UsageError(
        f'{type(self.experiment).__name__} has no data to'
        f' {"train" if is_training else "evaluate"} on.'
      )
    return found

  def _build(self, dataset: fdl.Config) -> Any:
    specs = self.experiment.input_specs() if self._wants_shapes else None
    if specs is None:
      try:
        return fdl.build(dataset)
      except errors.UsageError as e:
        # Fiddle adds lines to the error. This attribute holds the original.
        raise getattr(e, 'proxy_base_exception', e) from None
    return synthetic.SyntheticInput(
      spec=specs,
      batch_size=dataset.batch_size,
      is_training=bool(dataset.is_training),
      shard=self.experiment.shard,
    )

  def abstract_batch(self, is_training: bool) -> sharded.BatchDict:
    """Returns the shapes of a global batch, without data if possible."""
    self._wants_shapes = True
    try:
      return super().abstract_batch(is_training)
    finally:
      self._wants_shapes = False

  # Decoding.

  def check_prompt(self, prompt: Any) -> None:
    """Raises an error for a prompt that `decode` does not accept."""
    super().check_prompt(prompt)
    text, options = self.experiment.prompting(), self.config.decode
    assert options is not None
    longest = decoding.longest_prompt(options, text.max_length)
    ids = text.tokenizer.encode(prompt)
    if text.start_id is not None:
      ids = np.append(text.start_id, ids)
    decoding.pad_prompts([ids], rows=1, max_length=longest)

  def decode(
    self, prompts: Sequence[str], rng: jax.Array
  ) -> list[list[dict[str, Any]]]:
    """Continues prompts with the options of `config.decode`.

    See `decoding.continue_texts` for the result.
    """
    text, options = self.experiment.prompting(), self.config.decode
    assert options is not None
    options = dataclasses.replace(
      options, stop_ids=(*options.stop_ids, text.tokenizer.document_id)
    )
    rng = placement.put(rng, self.partitioner.replicated)

    def run(prompts_BT: np.ndarray, lengths_B: np.ndarray) -> decoding.Decoded:
      # Every process passes all rows and gets all results.
      batch = placement.put(
        {'ids': prompts_BT, 'lengths': lengths_B},
        self.partitioner.batch_sharding,
      )
      state = self.state
      return self._decode(state.params, state.model_state, batch, rng, options)

    return decoding.continue_texts(
      run,
      prompts,
      options,
      tokenizer=text.tokenizer,
      start_id=text.start_id,
      max_length=text.max_length,
      rows=self.partitioner.batch_shards,
    )

  @functools.cached_property
  def _decode(self) -> Any:
    """The task's `decode`, compiled for each shape and set of options."""
    return jax.jit(
      self.in_mesh(self.task.decode),
      static_argnums=4,
      out_shardings=self.partitioner.replicated,
    )
