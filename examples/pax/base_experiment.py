"""The base of registered experiments: constants, data, and a task.

    @experiment_registry.register
    class Small(model_params.LmExperiment):
      NUM_LAYERS = 4
      MODEL_DIMS = 256

The constants are the attributes in capital letters. Each becomes a value of the
run's config (`examples.pax.config`), so it is in the run's config.json, and can
be overridden on the command line: `--NUM_LAYERS=2`.
"""

import abc
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any, ClassVar, Self

import fiddle as fdl

from jaxline import errors
from jaxline.inputs import base as inputs
from jaxline.inputs import tokenization

# Constants that are keys of the run's config, and fields of `task.train` that
# have the same value. Not every experiment has the last four.
KEYS = {
  'SHARDING': ('sharding', ''),
  'TOPOLOGY': ('topology', ''),
  'MAX_STEPS': ('training_steps', 'num_train_steps'),
  'CHECKPOINT_EVERY_N_STEPS': (
    'save_checkpoint_interval',
    'save_interval_steps',
  ),
  'CHECKPOINT_MAX_TO_KEEP': ('max_checkpoints_to_keep', 'save_max_to_keep'),
  'SUMMARY_INTERVAL_STEPS': ('log_tensors_interval', 'summary_interval_steps'),
  'EVAL_INTERVAL_STEPS': ('eval_interval', 'eval_interval_steps'),
  'RANDOM_SEED': ('random_seed', 'random_seed'),
  'DATA': ('data', ''),
  'DATA_DIR': ('data_dir', ''),
  'VOCABULARY': ('vocabulary', ''),
  'TARGET_LOG_PPLX': ('early_stop.target', ''),
}


@dataclasses.dataclass(frozen=True)
class Prompting:
  """How text becomes tokens, and tokens text.

  Attributes:
    tokenizer: its document token ends a continuation.
    start_id: the token before a prompt; None is none.
    max_length: tokens of a prompt and its continuation, at most.
  """

  tokenizer: tokenization.Tokenizer
  start_id: int | None
  max_length: int


class BaseExperiment(abc.ABC):
  """Constants, data and a task.

  Attributes:
    ICI_MESH_SHAPE: sizes of the mesh within a slice: (replica, data, mdl), or
      (stage, replica, data, mdl). One may be -1, all that are left.
    DCN_MESH_SHAPE: the same across slices.
    SHARDING: what is split over it, one of `partitioning.PRESETS`.
    TOPOLOGY: the TPU slice that `--mode=compile` is for, such as 'v4:2x2x1';
      None is the devices that are here.
    MAX_STEPS: steps of training.
    CHECKPOINT_EVERY_N_STEPS: steps from checkpoint to checkpoint.
    CHECKPOINT_MAX_TO_KEEP: how many of the newest are kept.
    SUMMARY_INTERVAL_STEPS: steps from log line to log line.
    EVAL_INTERVAL_STEPS: steps from evaluation to evaluation; None where there
      is no data for them.
    RANDOM_SEED: of the weights and of what else is random in training.
    changeable_constants: names of constants that change no step of training: a
      run may be resumed with other values of them. Constants that are keys of
      the library need not be named.
    sweep_axes: constants and their values in a sweep: see `automl`.
    num_devices: how many devices the run's mesh has.
  """

  ICI_MESH_SHAPE: ClassVar[tuple[int, ...]] = (1, -1, 1)
  DCN_MESH_SHAPE: ClassVar[tuple[int, ...]] = (1, 1, 1)
  SHARDING: ClassVar[str] = 'ddp'
  TOPOLOGY: ClassVar[str | None] = None
  # Paxml's own.
  MAX_STEPS: ClassVar[int] = 10_000_000
  CHECKPOINT_EVERY_N_STEPS: ClassVar[int] = 5000
  CHECKPOINT_MAX_TO_KEEP: ClassVar[int] = 10
  SUMMARY_INTERVAL_STEPS: ClassVar[int] = 100
  EVAL_INTERVAL_STEPS: ClassVar[int | None] = 100
  RANDOM_SEED: ClassVar[int] = 1234

  changeable_constants: ClassVar[tuple[str, ...]] = ()
  sweep_axes: ClassVar[Mapping[str, Sequence[Any]]] = {}

  def __init__(self, num_devices: int):
    """Makes it for a mesh of `num_devices`, over all slices."""
    self.num_devices = num_devices
    # The shard that `datasets` reads; None is the shard of this process.
    self.shard: inputs.Shard | None = None

  @abc.abstractmethod
  def datasets(self) -> list[fdl.Config]:
    """Returns Fiddle configs of inputs, which are built when they are read.

    Such as `fdl.Config(text.TextInput, is_training=True, shard=self.shard,
    batch_size=inputs.per_host(self.rows(...), self.shard))`: one with
    `is_training`, and for evaluation any number without. Of several of these,
    each has a `name`, with which the names of its metrics begin.
    """

  @abc.abstractmethod
  def task(self) -> Any:
    """Returns the HParams of a `tasks.SingleTask`.

    Steps, intervals and the seed may be left out: they are the constants'.
    """

  def input_specs(self) -> Mapping[str, tuple[tuple[int, ...], str]] | None:
    """Returns entry -> shape of a row and dtype, where these are known.

    So `--mode=compile` needs no data. None opens the data for a batch.
    """
    return None

  def prompting(self) -> Prompting:
    """Returns what makes tokens of prompts; for `--mode=decode`."""
    raise NotImplementedError(
      f'{type(self).__name__} cannot continue text. Override `prompting`.'
    )

  @classmethod
  def has_prompting(cls) -> bool:
    """Whether the experiment continues text."""
    return cls.prompting is not BaseExperiment.prompting

  def filled_task(self) -> Any:
    """Returns the task with the constants' steps, intervals and seed.

    Raises:
      UsageError: `task` has set one of them to something else.
    """
    task = self.task()
    defaults = type(task.train)()
    for constant, (_, field) in KEYS.items():
      if not field:
        continue
      value, given = getattr(self, constant), getattr(task.train, field)
      if given not in (value, getattr(defaults, field)):
        raise errors.UsageError(
          f'{type(self).__name__}.task sets train.{field} to {given}, and'
          f' {constant} is {value}. Set the constant.'
        )
      setattr(task.train, field, value)
    return task

  def rows(self, per_core: float) -> int:
    """Returns the rows of a global batch with `per_core` for each device.

    Raises:
      UsageError: that is no whole number.
    """
    rows = per_core * self.num_devices
    if rows < 1 or rows != int(rows):
      raise errors.UsageError(
        f'{per_core} rows for each of {self.num_devices} devices are {rows};'
        ' expected an integer of at least 1. Change the mesh or the constant.'
      )
    return int(rows)

  @classmethod
  def constants(cls) -> dict[str, Any]:
    """Returns name -> value of the constants."""
    names = dict.fromkeys(
      name for part in reversed(cls.__mro__) for name in vars(part)
    )
    return {name: getattr(cls, name) for name in names if name.isupper()}

  @classmethod
  def check_constants(cls, names: Iterable[str]) -> None:
    """Refuses names that are no constants, with a UsageError."""
    known = cls.constants()
    errors.check_names(names, known, 'constant', cls.__name__)

  @classmethod
  def with_constants(cls, values: Mapping[str, Any]) -> type[Self]:
    """Returns a subclass of the same name with other constants.

    Raises:
      UsageError: there is no such constant.
    """
    cls.check_constants(values)
    body = {
      '__module__': cls.__module__,
      '__doc__': cls.__doc__,
      '__qualname__': cls.__qualname__,
    }
    return type(cls.__name__, (cls,), {**body, **values})

  @classmethod
  def reduced(cls) -> type[Self]:
    """Returns a small one of the same family, for two cores and a minute."""
    raise NotImplementedError(
      f'{cls.__name__} does not say what it is reduced to. Override `reduced`,'
      ' for instance with `return cls.with_constants({...})`.'
    )
