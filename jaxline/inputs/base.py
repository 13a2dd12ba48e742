"""The interface of an input: Pax's `BaseInput`, with an exact position.

An input gives one process its batches: dicts of NumPy arrays with the batch
dimension first. To write an input, override `get_next`. If you override
`position` and `set_position` too, a resumed run neither repeats nor skips
records. The interface comes from Pax (https://github.com/google/paxml, 'Data
inputs'). docs/inputs.md has examples and a table of the kinds of evaluation.
"""

import abc
from collections.abc import Callable, Iterator, Mapping
import copy
import dataclasses
import inspect
import json
import operator
import secrets
from typing import Any, ClassVar, NoReturn, Self

from absl import logging
import jax
import numpy as np

from jaxline import errors
from jaxline.inputs import batches
from jaxline.parallel import distributed

WEIGHTS = batches.WEIGHTS
Batch = batches.Batch
BatchDict = batches.BatchDict
num_rows = batches.num_rows
keep_rows = batches.keep_rows
pad_rows = batches.pad_rows


@dataclasses.dataclass(frozen=True)
class Shard:
  """The part of every global batch that host `index` of `count` reads.

  Processes that hold the same rows of a batch share a shard.
  """

  index: int
  count: int


def process_shard() -> Shard:
  """Returns this process's shard, if each process reads different rows."""
  return Shard(jax.process_index(), jax.process_count())


def per_host(global_batch_size: int, shard: Shard | None = None) -> int:
  """Returns the `batch_size` of each host for a global batch size.

  `shard` is the argument of `train_input`; None means `process_shard()`.
  """
  count = (shard or process_shard()).count
  if global_batch_size % count:
    following = -(-global_batch_size // count) * count
    raise errors.UsageError(
      f'A global batch of {global_batch_size} rows does not divide over'
      f' {count} hosts; make it a multiple of {count}, such as {following}.'
    )
  return global_batch_size // count


@dataclasses.dataclass(kw_only=True, eq=False)
class BaseInput:
  """The batches of one process, with a position.

  A subclass that adds fields must be a dataclass too. Check its fields in
  `__post_init__`, after you call `super().__post_init__()`.

  Attributes:
    name: Name in messages; '' means the name of the class.
    batch_size: Rows that each host reads per batch.
    shard: Part of each global batch to read; None means `process_shard()`.
    num_infeed_hosts: Number of hosts that share the data. The constructor
      replaces None by the shard's count, and 0 by 1.
    infeed_host_index: Index of this host; None means the shard's index.
    input_random_seed: Seed of the order of the data and of all its random
      numbers. None means 0 in evaluation or if the position is saved.
      Otherwise each start draws a random seed, which all hosts share.
    is_training: Whether the input feeds training.
    reset_for_eval: Whether each evaluation reads one epoch from its beginning.
      If not, it reads the next `eval_loop_num_batches` batches.
    eval_loop_num_batches: Batches per evaluation, without `reset_for_eval`.
    input_checkpointing_enabled: Whether checkpoints hold the position.
    num_given: Rows in the last batch before padding. None if an override of
      `get_next_padded` does not call the method of this class.
  """

  name: str = ''
  batch_size: int
  shard: Shard | None = None
  num_infeed_hosts: int | None = None
  infeed_host_index: int | None = None
  input_random_seed: int | None = None
  is_training: bool = False
  reset_for_eval: bool = False
  eval_loop_num_batches: int | None = 1
  input_checkpointing_enabled: bool = True

  # Whether positions are equal on all hosts and valid for any number of hosts.
  ANY_NUMBER_OF_HOSTS: ClassVar[bool] = False

  def __post_init__(self) -> None:
    self.name = self.name or type(self).__name__
    self._resolve_hosts()
    self._check_fields()
    self._ended = False
    self._num_read = 0
    self.num_given: int | None = None
    draws = self.is_training and self.input_random_seed is None
    self._default_seed = self._draw_seed() if draws else 0

  def _resolve_hosts(self) -> None:
    shard = self.shard or process_shard()
    count, index = self.num_infeed_hosts, self.infeed_host_index
    count = shard.count if count is None else count or 1
    if index is None and (shard.count == 1 or count in (1, shard.count)):
      index = shard.index % count
    if index is None or not 0 <= index < count:
      raise errors.UsageError(
        f'{self.name} has infeed_host_index={index} and num_infeed_hosts='
        f'{count} on {shard.count} hosts; expected an index of at least 0 and'
        ' less than num_infeed_hosts. Set both fields, or neither.'
      )
    self.infeed_host_index, self.num_infeed_hosts = index, count

  def _check_fields(self) -> None:
    # If the class's default is None, each batch determines its size.
    takes_none = getattr(type(self), 'batch_size', 0) is None
    if self.batch_size is not None or not takes_none:
      self.check_integer('batch_size')
    n, seed = self.eval_loop_num_batches, self.input_random_seed
    if not (is_epoch := n in (None, -1)):
      self.check_integer('eval_loop_num_batches')
    if self.is_training and self.reset_for_eval:
      self.refuse('reset_for_eval', 'False in training, which is never reset')
    if self.reset_for_eval and not is_epoch and n != 1:
      logging.warning(
        '%s ignores eval_loop_num_batches=%s: with reset_for_eval=True each'
        ' evaluation reads one epoch. Give it less data, or read the next'
        ' batches in each evaluation: reset_for_eval=False and repeat=True.',
        *(self.name, n),
      )
    if is_epoch and not self.is_training and not self.reset_for_eval:
      self.refuse(
        'eval_loop_num_batches',
        'a number with reset_for_eval=False, since an evaluation would never'
        ' end. Or set reset_for_eval=True to evaluate on one epoch',
      )
    if self.is_training and seed is not None and not self.saves_position:
      self.refuse(
        'input_random_seed',
        'None, since the position is not saved: after a preemption the run'
        ' would read the same data again. Or save the position'
        ' (input_checkpointing_enabled=True, position() and set_position())',
      )

  def refuse(self, key: str, expected: str) -> NoReturn:
    """Raises an error about the value of a field."""
    raise errors.UsageError(
      f'{self.name}.{key} is {getattr(self, key)!r}; expected {expected}.'
    )

  def check_integer(
    self, key: str, least: int = 1, or_none: bool = False
  ) -> None:
    """Raises UsageError if a field is not an integer of at least `least`."""
    value = getattr(self, key)
    is_integer = isinstance(value, (int, np.integer)) and value >= least
    if not (or_none if value is None else is_integer):
      none = ', or None' if or_none else ''
      self.refuse(key, f'an integer of at least {least}{none}')

  # Subclasses override these methods.

  def get_next(self) -> dict[str, Any]:
    """Returns the next batch: arrays [b, ...], b at most `batch_size`.

    Raises:
      StopIteration: The data has ended (or `tf.errors.OutOfRangeError`).
    """
    raise NotImplementedError

  def reset(self) -> None:
    """Returns to the beginning; an override calls `super().reset()`."""
    self._ended = False
    self._num_read = 0

  def position(self) -> Any:
    """Returns the position of the next batch, as a value for JSON.

    Keep it small: it is read and copied with every batch.
    """
    raise NotImplementedError

  def set_position(self, position: Any) -> None:
    """Sets a position that `position` returned, maybe in another process."""
    raise NotImplementedError

  def identity(self) -> dict[str, Any]:
    """Returns the values on which a position depends: they must not change.

    A subclass adds plain values that identify its data and their order. A
    position in the global order (`ANY_NUMBER_OF_HOSTS`) is valid on any hosts.
    """
    if self.ANY_NUMBER_OF_HOSTS:
      return {}
    return {
      'batch_size': self.batch_size,
      'num_infeed_hosts': self.num_infeed_hosts,
      'infeed_host_index': self.infeed_host_index,
    }

  def where(self) -> str:
    """Returns the file and record that `get_next` reads, for messages."""
    return f'batch {self._num_read}'

  def where_rows(self) -> list[str]:
    """Returns the source of each row of the next batch; [] if unknown."""
    return []

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    """Returns the text of token ids.

    Args:
      ids: Integers [B, L].
      lengths: Number of ids to take from each row, [B].
      key: Entry of the batch that holds the ids, for batches whose entries
        have different vocabularies.
    """
    raise NotImplementedError

  def close(self) -> None:
    """Ends workers and threads, if there are any. May be called twice."""

  # Users call these methods.

  @property
  def saves_position(self) -> bool:
    """Whether checkpoints hold the position."""
    overridden = type(self).position is not BaseInput.position
    return self.input_checkpointing_enabled and overridden

  def get_global_batch_size(self) -> int:
    """Returns the number of rows of a batch over all hosts."""
    assert self.num_infeed_hosts is not None
    return self.batch_size * self.num_infeed_hosts

  def seed(self) -> int:
    """Returns the seed to use: `input_random_seed`, or its default."""
    seed = self.input_random_seed
    return self._default_seed if seed is None else int(seed)

  def _draw_seed(self) -> int:
    """Returns the default seed of training, which all hosts share."""
    if self.saves_position:
      return 0
    if self.num_infeed_hosts not in (1, jax.process_count()):
      return 0  # Agreeing on a seed needs one process per shard.
    return distributed.broadcast_from_process_0(secrets.randbits(31))

  def describe(self) -> str:
    """Returns the name of the input and the place that it reads."""
    try:
      return f'{self.name}, reading {self.where()}'
    except Exception as e:  # A description must not hide another error.
      return f'{self.name}, whose where() raised {e!r}'

  def get_next_padded(self) -> dict[str, Any]:
    """Returns the next batch: arrays [batch_size, ...], one of them `weights`.

    `pad_rows` pads a short batch. Once the data has ended, every call raises
    StopIteration until `reset` or `set_state`.
    """
    if self._ended:
      raise StopIteration
    try:
      batch = batches.as_batch(self.get_next())
      have = num_rows(batch)
      want = self.batch_size or have
      if have > want:
        raise ValueError(
          f'get_next() returned {have} rows; expected at most batch_size ='
          f' {self.batch_size}.'
        )
      if have < want or WEIGHTS not in batch:
        batch = pad_rows(batch, want)
    except Exception as e:
      if is_end(e):
        self._ended = True
        raise StopIteration from e
      e.add_note(f'It was {self.describe()}.')
      raise
    self._num_read += 1
    self.num_given = have
    return batch

  def __iter__(self) -> Self:
    """Returns itself; `next` is `get_next_padded`."""
    return self

  def __next__(self) -> dict[str, Any]:
    return self.get_next_padded()

  def eval_batches(self) -> Iterator[dict[str, Any]]:
    """Yields the batches of one evaluation."""
    if self.reset_for_eval:
      self.reset()
      yield from self
      return
    assert self.eval_loop_num_batches is not None
    for number in range(self.eval_loop_num_batches):
      batch = next(self, None)
      if batch is None:
        raise ValueError(
          f'{self.name} ended after {number} of eval_loop_num_batches='
          f'{self.eval_loop_num_batches} batches. Set repeat=True to start the'
          ' data over, or reset_for_eval=True to evaluate on one epoch.'
        )
      yield batch

  # Checkpoints store a state: a mark (a copied position) and the identity.

  def copy_position(self) -> Any:
    """Returns a copy of the position, or None if it is not saved."""
    return copy.deepcopy(self.position()) if self.saves_position else None

  def state_of(self, mark: Any) -> Any:
    """Returns the state for a checkpoint: a mark and the identity."""
    state = {
      'input': type(self).__name__,
      'identity': self.identity(),
      'position': mark,
    }
    to_plain = operator.methodcaller('item')  # NumPy's numbers.
    return json.dumps(state, sort_keys=True, default=to_plain).encode()

  def get_state(self) -> Any:
    """Returns the position after the last batch, as bytes for `set_state`."""
    return self.state_of(copy.deepcopy(self.position()))

  def set_state(self, state: Any) -> None:
    """Continues where `get_state` was called, maybe in another process.

    Raises:
      ValueError: The state is from a different input, data, order or host.
    """
    here = json.loads(BaseInput.state_of(self, None))
    try:
      values = json.loads(state)
      there = {'input': values['input']} | values['identity']
    except (LookupError, TypeError, ValueError) as e:
      raise ValueError(
        f'{self.name}.set_state got {state!r:.80}; expected a value that'
        ' get_state() of such an input returned.'
      ) from e
    here = {'input': here['input']} | here['identity']
    differences = [
      f'{key} is {there.get(key)!r} in the state and {here.get(key)!r} here'
      for key in {**there, **here}
      if there.get(key) != here.get(key)
    ]
    if differences:
      raise ValueError(
        f'{self.name} cannot continue from this state:'
        f' {"; ".join(differences)}. Use the data and settings of the run that'
        ' saved the state, or start a new run.'
      )
    self.set_position(values['position'])
    self._ended = False


@dataclasses.dataclass(kw_only=True, eq=False)
class ResumableInput(BaseInput, abc.ABC):
  """An input that can start reading at any position.

  Attributes:
    repeat: Whether to read epoch after epoch; None means `not reset_for_eval`.
  """

  repeat: bool | None = None

  # The position of the first batch.
  FIRST: ClassVar[Any] = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.repeat and self.reset_for_eval:
      self.refuse('repeat', 'False with reset_for_eval=True (one epoch)')
    if self.repeat is None:
      self.repeat = not self.reset_for_eval
    self._at: Any = self.FIRST
    self._iterator: Iterator[tuple[dict[str, Any], Any]] | None = None

  @abc.abstractmethod
  def read_from(self, position: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields (batch, position after it), starting at a position."""

  def get_next(self) -> dict[str, Any]:
    try:
      if self._iterator is None:
        self._iterator = self.read_from(copy.deepcopy(self._at))
      batch, position = next(self._iterator)
      self._at = copy.deepcopy(position)  # The generator may change its own.
      return batches.as_batch(batch)
    except BaseException:
      # A retry needs a new generator: the failed one cannot continue.
      self.close()
      raise

  def reset(self) -> None:
    super().reset()
    self.set_position(self.FIRST)

  def position(self) -> Any:
    return self._at

  def set_position(self, position: Any) -> None:
    self.close()
    self._at = position

  def close(self) -> None:
    # `generator.close()` would raise while another thread reads.
    self._iterator = None


def choose_arguments(
  function: Callable[..., Any], values: Mapping[str, Any]
) -> dict[str, Any]:
  """Selects the arguments, by name, that a function takes."""
  names = inspect.signature(function).parameters
  return {name: value for name, value in values.items() if name in names}


def of_shard(function: Callable[..., Any], shard: Shard) -> Any:
  """Calls `function`, with `shard` if it has such a parameter."""
  return function(**choose_arguments(function, {'shard': shard}))


def is_end(e: Exception) -> bool:
  """Returns whether `e` is `StopIteration` or TensorFlow's end of the data."""
  return isinstance(e, StopIteration) or any(
    cls.__name__ == 'OutOfRangeError'
    and cls.__module__.startswith('tensorflow.')
    for cls in type(e).__mro__
  )
