"""The base class of registered experiments: constants, data and a task.

    @experiment_registry.register
    class Small(model_params.LmExperiment):
      NUM_LAYERS = 4
      MODEL_DIMS = 256

The constants are the attributes in capital letters. Each becomes a value of the
run's config (`examples.pax.config`), so config.json records it, and you can
override it on the command line: `--NUM_LAYERS=2`.
"""

import abc
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any, ClassVar, Self

import fiddle as fdl

from jaxline import errors
from jaxline.inputs import base as inputs
from jaxline.inputs import tokenization

# Constant -> (key of the run's config, field of `task.train` or ''), which have
# the same value. Not every experiment has the last four.
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
  """The conversion between text and tokens, for decoding.

  Attributes:
    tokenizer: The tokenizer. Its document token ends a continuation.
    start_id: Token before each prompt. If None, there is none.
    max_length: Maximum number of tokens of a prompt and its continuation.
  """

  tokenizer: tokenization.Tokenizer
  start_id: int | None
  max_length: int


class BaseExperiment(abc.ABC):
  """An experiment: constants, data and a task.

  Attributes:
    changeable_constants: Names of constants that do not affect training, so a
      resumed run may change them. Constants that are keys of the library need
      not be listed.
    sweep_axes: Constants and their values in a sweep; see `automl`.
    num_devices: Number of devices of the run's mesh.
  """

  # Sizes of the mesh within a slice: (replica, data, mdl), or (stage, replica,
  # data, mdl). One size may be -1: all remaining devices.
  ICI_MESH_SHAPE: ClassVar[tuple[int, ...]] = (1, -1, 1)
  # Sizes of the mesh across slices.
  DCN_MESH_SHAPE: ClassVar[tuple[int, ...]] = (1, 1, 1)
  # Rules that split arrays over the mesh, one of `partitioning.PRESETS`.
  SHARDING: ClassVar[str] = 'ddp'
  # TPU slice that `--mode=compile` compiles for, such as 'v4:2x2x1'. If None,
  # the local devices.
  TOPOLOGY: ClassVar[str | None] = None
  # Paxml's defaults.
  MAX_STEPS: ClassVar[int] = 10_000_000  # Training steps.
  CHECKPOINT_EVERY_N_STEPS: ClassVar[int] = 5000
  CHECKPOINT_MAX_TO_KEEP: ClassVar[int] = 10
  SUMMARY_INTERVAL_STEPS: ClassVar[int] = 100  # Steps between log lines.
  # If None, there is no data to evaluate on.
  EVAL_INTERVAL_STEPS: ClassVar[int | None] = 100
  # Seed of the initial weights and of all randomness in training.
  RANDOM_SEED: ClassVar[int] = 1234

  changeable_constants: ClassVar[tuple[str, ...]] = ()
  sweep_axes: ClassVar[Mapping[str, Sequence[Any]]] = {}

  def __init__(self, num_devices: int):
    """Makes the experiment for a mesh of `num_devices` over all slices."""
    self.num_devices = num_devices
    # Shard that `datasets` reads. None means this process's shard.
    self.shard: inputs.Shard | None = None

  @abc.abstractmethod
  def datasets(self) -> list[fdl.Config]:
    """Returns Fiddle configs of the inputs, which are built when needed.

    An example is `fdl.Config(text.TextInput, is_training=True,
    shard=self.shard, batch_size=inputs.per_host(self.rows(...), self.shard))`.
    One config has `is_training=True`. The others are for evaluation. If there
    are several, give each a `name`, which prefixes the names of its metrics.
    """

  @abc.abstractmethod
  def task(self) -> Any:
    """Returns the HParams of a `tasks.SingleTask`.

    You can leave out steps, intervals and the seed: the constants set them.
    """

  def input_specs(self) -> Mapping[str, tuple[tuple[int, ...], str]] | None:
    """Returns entry -> (shape of a row, dtype), or None if unknown.

    With specs, `--mode=compile` needs no data. If None, it reads a batch.
    """
    return None

  def prompting(self) -> Prompting:
    """Returns the tokenization of prompts, for `--mode=decode`."""
    raise NotImplementedError(
      f'{type(self).__name__} cannot continue text. Override `prompting`.'
    )

  @classmethod
  def has_prompting(cls) -> bool:
    """Whether the experiment can continue text."""
    return cls.prompting is not BaseExperiment.prompting

  def filled_task(self) -> Any:
    """Returns the task with steps, intervals and seed set by the constants."""
    task = self.task()
    defaults = type(task.train)()
    for constant, (_, field) in KEYS.items():
      if not field:
        continue
      value, given = getattr(self, constant), getattr(task.train, field)
      if given not in (value, getattr(defaults, field)):
        raise errors.UsageError(
          f'{type(self).__name__}.task sets train.{field} to {given}, and'
          f' {constant} is {value}. Set only the constant.'
        )
      setattr(task.train, field, value)
    return task

  def rows(self, per_core: float) -> int:
    """Returns the rows of a global batch with `per_core` rows per device."""
    rows = per_core * self.num_devices
    if rows < 1 or rows != int(rows):
      raise errors.UsageError(
        f'{per_core} rows for each of {self.num_devices} devices make a batch'
        f' of {rows}; expected an integer of at least 1. Change the mesh or the'
        ' constant.'
      )
    return int(rows)

  @classmethod
  def constants(cls) -> dict[str, Any]:
    """Returns name -> value of all constants."""
    names = dict.fromkeys(
      name for part in reversed(cls.__mro__) for name in vars(part)
    )
    return {name: getattr(cls, name) for name in names if name.isupper()}

  @classmethod
  def check_constants(cls, names: Iterable[str]) -> None:
    """Raises a UsageError if a name is not a constant."""
    errors.check_names(names, cls.constants(), 'constant', cls.__name__)

  @classmethod
  def with_constants(cls, values: Mapping[str, Any]) -> type[Self]:
    """Returns a subclass with the same name and different constants."""
    cls.check_constants(values)
    same = ('__module__', '__doc__', '__qualname__')
    body = {name: getattr(cls, name) for name in same}
    return type(cls.__name__, (cls,), {**body, **values})

  @classmethod
  def reduced(cls) -> type[Self]:
    """Returns a small version that trains for a minute on two cores."""
    raise NotImplementedError(
      f'{cls.__name__} has no reduced version. Override `reduced`, for example'
      ' with `return cls.with_constants({...})`.'
    )
