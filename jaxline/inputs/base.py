"""The contract of an input: Pax's `BaseInput`, with an exact position.

An input gives one process its batches: dicts of numpy arrays with the batch
dimension first. To write one, override `get_next`:

  class Counting(base.BaseInput):
    def get_next(self):
      return {'x': np.arange(self.batch_size)}

or give a generator function to `from_generator`. If `position` and
`set_position` are overridden too, every checkpoint holds the position in the
data, and a resumed run neither repeats nor skips a record.

Each process has its own input, and reads `batch_size` rows of a global batch of
`batch_size * num_infeed_hosts`. In training no two processes give the same
record; a finite pass ends on all of them after the same number of batches,
padded with rows of weight 0.

How evaluation reads (`eval_batches`):

                        N = eval_loop_num_batches    N = None or -1
  reset_for_eval=True   refused (1 is ignored)       one epoch; repeat=False
  reset_for_eval=False  the next N batches, without  refused
                        end; repeat=True

The contract is that of Pax's documents, section 'Data inputs'
(https://github.com/google/paxml).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import inspect
import json
import numbers
import os
import pathlib
import secrets
from typing import Any, ClassVar, NoReturn, Self

import jax
import numpy as np

from jaxline import disk
from jaxline import distributed
from jaxline import errors

# The entry of a batch with its weights: float32, 0 for padding.
WEIGHTS = 'weights'
# The entry of a batch that marks padding: 1 for padding, else 0.
PADDINGS = 'paddings'


class Batch(dict[str, Any]):
  """A dict whose entries are attributes too: `batch.ids` is `batch['ids']`.

  Inputs give plain dicts; `Batch(batch)` is for code written for Pax's
  `NestedMap`. Dicts inside become `Batch` as well. As a pytree it has a dict's
  leaves and paths, but is another kind of node: `jax.tree.map` over both at
  once refuses.
  """

  def __init__(self, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    for key, value in self.items():
      if isinstance(value, Mapping):
        self[key] = Batch(value)

  def __getattr__(self, name: str) -> Any:
    if name in self:
      return self[name]
    raise AttributeError(f'No entry {name!r}; the batch has {sorted(self)}.')

  __setattr__ = dict.__setitem__
  __delattr__ = dict.__delitem__


def _unflatten_batch(keys: tuple[str, ...], values: Iterable[Any]) -> Batch:
  batch = Batch()
  batch.update(zip(keys, values, strict=True))
  return batch


jax.tree_util.register_pytree_with_keys(
  Batch,
  lambda batch: (
    [(jax.tree_util.DictKey(key), batch[key]) for key in sorted(batch)],
    tuple(sorted(batch)),
  ),
  _unflatten_batch,
)


@dataclasses.dataclass(frozen=True)
class Shard:
  """The part of every global batch that one host reads.

  Processes that hold the same rows of a batch have the same shard.

  Attributes:
    index: the number of the host, from 0.
    count: the number of hosts.
  """

  index: int
  count: int


def process_shard() -> Shard:
  """Returns the shard of this process if every process reads other rows."""
  return Shard(jax.process_index(), jax.process_count())


def per_host(global_batch_size: int, shard: Shard | None = None) -> int:
  """Returns the `batch_size` of each host for a global one.

  Args:
    global_batch_size: rows of a batch over all hosts.
    shard: the argument of `train_input`; None is that of this process.

  Raises:
    UsageError: the global one does not divide over the hosts.
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

  A subclass with fields of its own is a dataclass too, and checks them in
  `__post_init__` after calling that of this class.

  Attributes:
    name: its name in messages; '' is the name of the class.
    batch_size: rows that each host reads a batch.
    shard: which rows of a global batch to read; None is `process_shard()`.
    num_infeed_hosts: how many hosts share the data. None is the shard's count,
      0 means 1; afterwards it is the number.
    infeed_host_index: which of them this is; None is the shard's index.
    input_random_seed: of the order of the data and of other random numbers in
      it. None is 0 if the position is saved or in evaluation; else another
      number at each start, which is drawn when the input is made: all hosts
      make it together.
    is_training: whether it feeds training.
    reset_for_eval: whether each evaluation is one epoch from its beginning.
    eval_loop_num_batches: batches an evaluation; see the top of this module.
    batch_padding_size: rows of weight 0 that `get_next_padded` adds to each
      batch, for a `batch_size` that does not divide over the devices.
    input_checkpointing_enabled: whether checkpoints hold the position.
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
  batch_padding_size: int = 0
  input_checkpointing_enabled: bool = True

  # Whether positions are the same on every host and fit any number of them.
  ANY_NUMBER_OF_HOSTS: ClassVar[bool] = False

  def __post_init__(self) -> None:
    self.name = self.name or type(self).__name__
    self._resolve_hosts()
    self._check_fields()
    self._ended = False
    self._num_read = 0
    self._default_seed = 0
    if (
      self.is_training
      and self.input_random_seed is None
      and not self.saves_position
    ):
      self._default_seed = self._agree_on_seed()

  def _resolve_hosts(self) -> None:
    shard = self.shard or process_shard()
    count, index = self.num_infeed_hosts, self.infeed_host_index
    count = shard.count if count is None else count or 1
    if index is None:
      if shard.count != 1 and count not in (1, shard.count):
        raise errors.UsageError(
          f'{self.name} has num_infeed_hosts={count} and no infeed_host_index,'
          f' but there are {shard.count} hosts. Give both, or neither.'
        )
      index = 0 if count == 1 else shard.index
    if not (is_integer(index) and is_integer(count) and 0 <= index < count):
      raise errors.UsageError(
        f'infeed_host_index is {index!r} and num_infeed_hosts {count!r};'
        ' expected integers, the first at least 0 and less than the second.'
      )
    self.infeed_host_index, self.num_infeed_hosts = index, count

  def _check_fields(self) -> None:
    self._check_batch_size()
    self.check_integer('batch_padding_size', 0)
    n = self.eval_loop_num_batches
    if n is not None and (not is_integer(n) or (n < 1 and n != -1)):
      self.refuse(
        'eval_loop_num_batches',
        'an integer of at least 1, or None or -1 for one epoch',
      )
    if self.is_training and self.reset_for_eval:
      self.refuse('reset_for_eval', 'False in training, which is never reset')
    if self.reset_for_eval and n not in (None, -1, 1):
      self.refuse(
        'eval_loop_num_batches',
        'None with reset_for_eval=True: to evaluate on the same first batches'
        ' each time is not supported. Give the input less data, or set'
        ' reset_for_eval=False and repeat=True for the next batches each time',
      )
    if not self.is_training and not self.reset_for_eval and n in (None, -1):
      self.refuse(
        'eval_loop_num_batches',
        'a number with reset_for_eval=False: an evaluation would not know where'
        ' to end. Or set reset_for_eval=True to evaluate on one epoch',
      )
    seed = self.input_random_seed
    if self.is_training and seed is not None and not self.saves_position:
      raise errors.UsageError(
        f'{self.name} feeds training with input_random_seed={seed} but its'
        ' position is not saved: after a preemption the run would see the same'
        ' data again. Save it (input_checkpointing_enabled=True and methods'
        ' position() and set_position()), or leave input_random_seed None,'
        ' which is another order at each start.'
      )

  def _check_batch_size(self) -> None:
    self.check_integer('batch_size')

  def refuse(self, key: str, expected: str) -> NoReturn:
    """Raises an error about the value of a field."""
    raise errors.UsageError(
      f'{self.name}.{key} is {getattr(self, key)!r}; expected {expected}.'
    )

  def check_integer(
    self, key: str, least: int = 1, or_none: bool = False
  ) -> None:
    """Refuses a field below `least` or no integer; None only with `or_none`."""
    value = getattr(self, key)
    is_fine = or_none if value is None else is_integer(value) and value >= least
    if not is_fine:
      none = ', or None' if or_none else ''
      self.refuse(key, f'an integer of at least {least}{none}')

  # What a subclass overrides.

  def get_next(self) -> dict[str, Any]:
    """Returns the next batch: arrays [batch_size, ...].

    Raises:
      StopIteration: (or `tf.errors.OutOfRangeError`) at the end of the data.
    """
    raise self._not_overridden('get_next()')

  def reset(self) -> None:
    """Goes back to the beginning; a subclass calls this one too."""
    self._ended = False
    self._num_read = 0

  def position(self) -> Any:
    """Returns where the next `get_next` reads: plain values, as JSON has them.

    Small, and quick to make: it is asked for with every batch.
    """
    raise self._not_overridden('position() and set_position()')

  def set_position(self, position: Any) -> None:
    """Goes to where `position` was called, maybe in another process."""
    raise self._not_overridden('set_position()')

  def _not_overridden(self, method: str) -> Exception:
    return NotImplementedError(
      f'{self.name}: {type(self).__name__} does not override {method}.'
    )

  def identity(self) -> dict[str, Any]:
    """Returns the plain values on which the meaning of a position depends.

    A subclass adds its data and its order. If a position is one in the global
    order (`ANY_NUMBER_OF_HOSTS`), the hosts are not part of it.
    """
    if self.ANY_NUMBER_OF_HOSTS:
      return {}
    return {
      'batch_size': self.batch_size,
      'num_infeed_hosts': self.num_infeed_hosts,
      'infeed_host_index': self.infeed_host_index,
    }

  def where(self) -> str:
    """Returns the file and record being read, if known, for messages."""
    return f'batch {self._num_read}'

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    """Returns the text of token ids.

    Args:
      ids: integers [B, L].
      lengths: integers [B], how many of each row to take.
      key: which entry of the batch they are, where entries differ in tokens.
    """
    raise self._not_overridden('ids_to_strings(), as it has no tokens')

  def close(self) -> None:
    """Ends workers and threads, if there are any. May be called twice."""

  # What users call.

  @property
  def saves_position(self) -> bool:
    """Whether `get_state` can be called, and checkpoints hold the position."""
    overridden = type(self).position is not BaseInput.position
    return self.input_checkpointing_enabled and overridden

  def get_global_batch_size(self) -> int:
    """Returns the rows of a batch over all hosts."""
    assert self.num_infeed_hosts is not None
    return self.batch_size * self.num_infeed_hosts

  def seed(self) -> int:
    """Returns the seed to use: `input_random_seed`, or its default."""
    seed = self.input_random_seed
    return self._default_seed if seed is None else int(seed)

  def _agree_on_seed(self) -> int:
    """Draws a seed, the same on all hosts: they share one order."""
    if self.num_infeed_hosts not in (1, jax.process_count()):
      return 0  # Shards of one process: there is no other to agree with.
    return distributed.of_chief(secrets.randbits(31))

  def describe(self) -> str:
    """Returns the name and, if known, what is being read."""
    try:
      return f'{self.name}, reading {self.where()}'
    except Exception as e:  # What it was asked for is more important.
      return f'{self.name}, which cannot say where it stands ({e!r})'

  def get_next_padded(self) -> dict[str, Any]:
    """Returns the next batch, filled up.

    Returns:
      Arrays [batch_size + batch_padding_size, ...]. Padding rows are zeros;
      where there are such rows, `weights` marks them, as [rows] of 1 and 0 if
      the batch has none of its own.

    Raises:
      StopIteration: at the end of the data, again and again until `reset` or
        `set_state`.
    """
    if self._ended:
      raise StopIteration
    try:
      batch = _as_dict(self.get_next())
      have = num_rows(batch)
      want = self.batch_size + self.batch_padding_size
      if have > self.batch_size:
        raise ValueError(
          f'get_next() returned {have} rows; expected at most batch_size ='
          f' {self.batch_size}.'
        )
      if have < want:
        batch = pad_rows(batch, want)
    except Exception as e:
      if is_end(e):
        self._ended = True
        raise StopIteration from e
      e.add_note(f'It was {self.describe()}.')
      raise
    self._num_read += 1
    return batch

  def __iter__(self) -> Self:
    """Returns itself; `next` is `get_next_padded`."""
    return self

  def __next__(self) -> dict[str, Any]:
    return self.get_next_padded()

  def eval_batches(self) -> Iterator[dict[str, Any]]:
    """Yields the batches of one evaluation: see the top of this module.

    Raises:
      ValueError: the data has not as many batches as were asked for, or none.
    """
    if self.reset_for_eval:
      self.reset()
      first = next(self, None)
      if first is None:
        raise ValueError(f'{self.name} has no data to evaluate on.')
      yield first
      yield from self
      return
    assert self.eval_loop_num_batches is not None
    for number in range(self.eval_loop_num_batches):
      batch = next(self, None)
      if batch is None:
        raise ValueError(
          f'{self.name} ended after {number} of eval_loop_num_batches='
          f'{self.eval_loop_num_batches} batches of an evaluation. Set'
          ' repeat=True, so that its data begins again, or reset_for_eval=True'
          ' for one epoch an evaluation.'
        )
      yield batch

  def get_state(self) -> bytes:
    """Returns the position, for `set_state`.

    It counts the batches that were taken from this object: one that reads
    ahead of the training step keeps a state with each batch.

    Raises:
      ValueError: the position is not saved (`input_checkpointing_enabled`).
      NotImplementedError: it cannot be saved.
    """
    if not self.input_checkpointing_enabled:
      raise ValueError(
        f'{self.name} has input_checkpointing_enabled=False; set it to True to'
        ' save its position.'
      )
    state = {
      'input': type(self).__name__,
      'ended': self._ended,
      'num_read': self._num_read,
      'identity': self.identity(),
      'position': self.position(),
    }
    return json.dumps(state, sort_keys=True, default=_plain).encode()

  def set_state(self, state: bytes) -> None:
    """Continues where `get_state` was called, in this or another process.

    Args:
      state: the value that it returned.

    Raises:
      ValueError: it is the state of another input, other data, another order
        or, where the input depends on them, of other hosts.
    """
    here = {'input': type(self).__name__}
    try:
      values = json.loads(state)
      there = {'input': values['input']} | values['identity']
    except (LookupError, TypeError, ValueError) as e:
      raise ValueError(
        f'{self.name}.set_state got {state!r:.80}, which is no state of such an'
        ' input. Give what get_state() returned.'
      ) from e
    here = json.loads(json.dumps(here | self.identity(), default=_plain))
    differences = [
      f'{key} is {there.get(key)!r} in the state and {here.get(key)!r} here'
      for key in {**there, **here}
      if there.get(key) != here.get(key)
    ]
    if differences:
      raise ValueError(
        f'{self.name} cannot go on from this state: {"; ".join(differences)}.'
        ' Use the data and the settings of the run that saved it, or start'
        ' anew.'
      )
    self.set_position(values['position'])  # First: it may refuse.
    self._ended = values['ended']
    self._num_read = values['num_read']

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the state to a file; an existing one is replaced whole."""
    with disk.replacing(pathlib.Path(path)) as file:
      file.write(self.get_state())

  def restore(self, path: str | os.PathLike[str]) -> None:
    """Reads the state from a file that `save` wrote."""
    self.set_state(pathlib.Path(path).read_bytes())


@dataclasses.dataclass(kw_only=True, eq=False)
class ResumableInput(BaseInput, abc.ABC):
  """An input that can start to read at any position.

  Attributes:
    repeat: whether epoch follows epoch; None is yes unless `reset_for_eval`.
      If not, the end is padded with rows of weight 0, so that all hosts give
      the same number of batches, and every batch has `weights`.
  """

  repeat: bool | None = None

  # Where the first batch is read.
  _first: ClassVar[Mapping[str, Any]]

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.repeat and self.reset_for_eval:
      raise errors.UsageError(
        f'{self.name} has reset_for_eval=True and repeat=True: one epoch would'
        ' never end. Set repeat=False.'
      )
    if self.repeat is None:
      self.repeat = not self.reset_for_eval
    self._at: Any = dict(self._first)
    self._iterator: Any = None

  @abc.abstractmethod
  def _start(self) -> Any:
    """Returns an iterator that begins at the position `_at`."""

  def _take(self) -> tuple[dict[str, Any], Any]:
    """Returns the next batch of the iterator, and the position behind it."""
    return next(self._iterator)

  def get_next(self) -> dict[str, Any]:
    """Returns the next batch, arrays [batch_size, ...]."""
    try:
      if self._iterator is None:
        self._iterator = self._start()
      batch, self._at = self._take()
      return batch
    except StopIteration:
      raise
    except BaseException:
      # More was read than the batches that were given: another try must begin
      # at the same batch.
      self.close()
      raise

  def reset(self) -> None:
    """Goes back to the first record."""
    super().reset()
    self.set_position(dict(self._first))

  def position(self) -> Any:
    """Returns where the next batch begins."""
    return self._at

  def set_position(self, position: Any) -> None:
    """Reads on from where `position` was called."""
    self.close()
    self._at = position

  def close(self) -> None:
    """Ends the iterator."""
    self._iterator = None


def num_rows(batch: Mapping[str, Any]) -> int:
  """Returns how many rows a batch has.

  Raises:
    ValueError: its arrays differ in their first dimension, or one has none.
    TypeError: it is no dict.
  """
  rows = {np.shape(x)[:1] for x in jax.tree.leaves(_as_dict(batch))}
  if len(rows) != 1 or () in rows:
    shapes = jax.tree.map(np.shape, batch)
    raise ValueError(
      f'The arrays of a batch must share their first dimension; got {shapes}.'
    )
  return rows.pop()[0]


def _as_dict(batch: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a batch as a pytree: a `Batch` as it is, others as plain dicts."""
  if not isinstance(batch, Mapping):
    raise TypeError(
      f'A batch is a {type(batch).__name__}; expected a dict of arrays, with'
      " the names of what a row has: {'x': x}."
    )
  return batch if isinstance(batch, Batch) else dict(batch)


def pad_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
  """Fills a batch up to a number of rows.

  Args:
    batch: arrays [b, ...] with b <= rows.
    rows: how many it shall have.

  Returns:
    Arrays [rows, ...], the new ones zeros, or ones in `paddings`, which mark
    padding; with `weights`, 1 for the rows that were there, if it had none.
  """
  batch = _as_dict(batch)
  have = len(jax.tree.leaves(batch)[0])
  if WEIGHTS not in batch:
    batch = type(batch)(batch, **{WEIGHTS: np.ones(have, np.float32)})
  if have == rows:
    return batch

  def fill(path: Any, x: Any) -> np.ndarray:
    x = np.asarray(x)
    shape = (rows - have, *x.shape[1:])
    if x.dtype == object:  # Strings, as TensorFlow gives them.
      padding = np.full(shape, type(x.flat[0])() if x.size else b'', object)
    else:
      is_mark = getattr(path[-1], 'key', None) == PADDINGS
      padding = (np.ones if is_mark else np.zeros)(shape, x.dtype)
    return np.concatenate([x, padding])

  return jax.tree_util.tree_map_with_path(fill, batch)


@dataclasses.dataclass(kw_only=True, eq=False)
class GeneratorInput(BaseInput):
  """The batches of a generator function.

  Its position cannot be saved: a run that is resumed reads from the beginning
  again, and logs so. This does not matter for random data without a fixed
  seed. A run that resumes exactly needs a subclass of `BaseInput` with
  `position` and `set_position`.

  Attributes:
    function: returns an iterator of batches, each a dict of arrays
      [batch_size, ...]; the last may have fewer rows. It may take `host_index`
      and `num_hosts`, by these names, and must take the first where there are
      several hosts.
  """

  function: Callable[..., Iterable[Mapping[str, Any]]]

  def __post_init__(self) -> None:
    super().__post_init__()
    hosts = {
      'host_index': self.infeed_host_index,
      'num_hosts': self.num_infeed_hosts,
    }
    self._arguments = choose_arguments(self.function, hosts)
    if self.num_infeed_hosts != 1 and 'host_index' not in self._arguments:
      raise ValueError(
        f'{self.name} has {self.num_infeed_hosts} hosts, and its function does'
        ' not take host_index: all hosts would read the same. Let it take'
        ' (host_index, num_hosts) and give host_index its own part.'
      )
    self._iterator: Any = None

  def _agree_on_seed(self) -> int:
    """Returns 0: nothing needs a seed, so no process waits for the others."""
    return 0

  def get_next(self) -> dict[str, Any]:
    """Returns the generator's next batch."""
    if self._iterator is None:
      self._iterator = iter(self.function(**self._arguments))
    return next(self._iterator)

  def reset(self) -> None:
    """Calls the function again."""
    super().reset()
    self._iterator = None


def from_generator(
  function: Callable[..., Iterable[Mapping[str, Any]]],
  *,
  batch_size: int,
  **fields: Any,
) -> GeneratorInput:
  """Returns a `GeneratorInput` of a function; `fields` are of `BaseInput`."""
  return GeneratorInput(function=function, batch_size=batch_size, **fields)


def choose_arguments(
  function: Callable[..., Any], values: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns those of some arguments that a function takes, by their names."""
  names = inspect.signature(function).parameters
  return {name: value for name, value in values.items() if name in names}


def of_shard(function: Callable[..., Any], shard: Shard) -> Any:
  """Returns what `function` makes; it gets the shard if it takes `shard`."""
  return function(**choose_arguments(function, {'shard': shard}))


def is_end(e: Exception) -> bool:
  """Returns whether an error means the end of the data.

  It does if it is `StopIteration` or TensorFlow's `OutOfRangeError`.
  """
  return isinstance(e, StopIteration) or any(
    cls.__name__ == 'OutOfRangeError'
    and cls.__module__.startswith('tensorflow.')
    for cls in type(e).__mro__
  )


def is_integer(x: Any) -> bool:
  """Returns whether it is an integer, of Python's or NumPy's, but no bool."""
  return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _plain(x: Any) -> Any:
  """Returns what JSON has for a number of NumPy's."""
  return (
    x.item() if isinstance(x, np.generic) else json.JSONEncoder().default(x)
  )
