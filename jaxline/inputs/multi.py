"""Inputs made of inputs: several side by side, and a mixture row by row.

Shapes: B rows of a batch, b rows of a child's batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import fractions
import functools
import json
import math
import numbers
from typing import Any

import jax
import numpy as np

from jaxline.inputs import base


@dataclasses.dataclass(kw_only=True, eq=False)
class _Parent(base.BaseInput):
  """What inputs of inputs share.

  Their hosts are those of the children, and so is what is random.

  Attributes:
    inputs: the children by name, any inputs, all of one host.
  """

  inputs: Mapping[str, base.BaseInput]

  def __post_init__(self) -> None:
    self._reading: str | None = None
    super().__post_init__()

  def _resolve_hosts(self) -> None:
    children = self.inputs
    label = self.name or type(self).__name__
    if not isinstance(children, Mapping) or not children:
      raise ValueError(
        f'{label}.inputs is {children!r}; expected a dict of inputs by name.'
      )
    for name, child in children.items():
      if not isinstance(name, str) or not isinstance(child, base.BaseInput):
        raise TypeError(
          f'{label}.inputs has {name!r}: {type(child).__name__}; expected the'
          ' name of an input and the input.'
        )
    # A mixture's schedule shall not depend on how the dict was written.
    self.inputs = dict(sorted(children.items()))
    if len({id(child) for child in children.values()}) != len(children):
      raise ValueError(
        f'{label}.inputs has an input twice: each of its batches would be read'
        ' by one of them only. Make two inputs.'
      )
    hosts = {
      name: (child.infeed_host_index, child.num_infeed_hosts)
      for name, child in children.items()
    }
    index, count = next(iter(hosts.values()))
    self.infeed_host_index = (
      index if self.infeed_host_index is None else self.infeed_host_index
    )
    self.num_infeed_hosts = (
      count if self.num_infeed_hosts is None else self.num_infeed_hosts or 1
    )
    super()._resolve_hosts()
    here = self.infeed_host_index, self.num_infeed_hosts
    if set(hosts.values()) != {here}:
      raise ValueError(
        f'{label} is host {here[0]} of {here[1]}, and its inputs are '
        + ', '.join(f'{name}: {i} of {n}' for name, (i, n) in hosts.items())
        + '; expected the same infeed_host_index and num_infeed_hosts.'
      )

  def _check_fields(self) -> None:
    super()._check_fields()
    if self.input_random_seed is not None:
      raise ValueError(
        f'{self.name}.input_random_seed is {self.input_random_seed}, but it'
        ' draws nothing itself; set it of the inputs.'
      )
    for name, child in self.inputs.items():
      for key in ('is_training', 'reset_for_eval'):
        if getattr(child, key) != getattr(self, key):
          raise ValueError(
            f'{self.name}.{key} is {getattr(self, key)}, and that of its input'
            f' {name} is {getattr(child, key)}; expected the same.'
          )
      for key in ('batch_padding_size', 'custom_device_order'):
        if getattr(child, key):
          raise ValueError(
            f'The input {name} of {self.name} has {key}={getattr(child, key)};'
            f' set it of {self.name}, whose batches go to the devices.'
          )
    saved = [n for n, child in self.inputs.items() if child.saves_position]
    if self.is_training and saved and not self.saves_position:
      raise ValueError(
        f'The position of {self.name} is not saved, '
        + (
          'as not all of its inputs can be'
          if self.input_checkpointing_enabled
          else 'as it has input_checkpointing_enabled=False'
        )
        + f': after a preemption {saved} would give the same data again. Set'
        ' input_checkpointing_enabled=False of them too, which is another order'
        ' at each start, or save all positions.'
      )

  @property
  def saves_position(self) -> bool:
    """Whether the positions of all inputs can be saved."""
    return super().saves_position and all(
      child.saves_position for child in self.inputs.values()
    )

  def _next_of(self, name: str) -> dict[str, Any]:
    """Returns a child's next batch; messages name it meanwhile."""
    self._reading = name
    batch = self.inputs[name].get_next_padded()
    self._reading = None
    return batch

  def reset(self) -> None:
    """Resets the children."""
    super().reset()
    self._reading = None
    for child in self.inputs.values():
      child.reset()

  def settle_seed(self) -> None:
    """Settles those of the children; it draws nothing itself."""
    for child in self.inputs.values():
      child.settle_seed()

  def where(self) -> str:
    """Returns the child that is read, and its position."""
    name = self._reading
    if name is None:
      return super().where()
    return f'its input {name}: {self.inputs[name].where()}'

  def close(self) -> None:
    """Closes the children."""
    with contextlib.ExitStack() as stack:
      for child in self.inputs.values():
        stack.callback(child.close)


def _state_of(child: base.BaseInput) -> Any:
  return json.loads(child.get_state())


def _set_state_of(child: base.BaseInput, state: Any) -> None:
  child.set_state(json.dumps(state).encode())


@dataclasses.dataclass(kw_only=True, eq=False)
class MultiInput(_Parent):
  """Several inputs side by side: Pax's.

  A batch has an entry of each child's name. With B the greatest common divisor
  of the children's batch sizes, a child's arrays [b, ...] become
  [B, b / B, ...]: B rows, each with its share of every child. It ends when one
  of the children does.

  Attributes:
    batch_size: B; leave it None.
    reset_for_eval: refused with several children, whose epochs differ in their
      numbers of batches.
  """

  batch_size: int | None = None  # type: ignore[assignment]

  def __post_init__(self) -> None:
    super().__post_init__()
    # The position consists of the children's: it is as valid as theirs.
    self.ANY_NUMBER_OF_HOSTS = all(  # type: ignore[misc]
      child.ANY_NUMBER_OF_HOSTS for child in self.inputs.values()
    )

  def _check_batch_size(self) -> None:
    sizes = {name: child.batch_size for name, child in self.inputs.items()}
    common = math.gcd(*sizes.values())
    if self.batch_size not in (None, common):
      raise ValueError(
        f'{self.name}.batch_size is {self.batch_size!r}; leave it None: it is'
        f' the greatest common divisor, {common}, of those of its inputs,'
        f' {sizes}.'
      )
    self.batch_size = common

  def _check_fields(self) -> None:
    super()._check_fields()
    if self.reset_for_eval and len(self.inputs) > 1:
      raise ValueError(
        f'{self.name} has reset_for_eval=True and {len(self.inputs)} inputs,'
        f' {sorted(self.inputs)}, whose epochs differ in their numbers of'
        ' batches. Evaluate on each of them as an input of its own.'
      )
    for name in self.inputs:
      if name == base.WEIGHTS or '/' in name:
        raise ValueError(
          f'{self.name} has an input named {name!r}: the entry'
          f" {base.WEIGHTS!r} says which rows count, and '/' stands between"
          ' names. Give the input another name.'
        )

  def get_next(self) -> dict[str, Any]:
    """Returns, of each child, its next batch: arrays [B, b / B, ...]."""

    def split(x: Any) -> np.ndarray:
      x = np.asarray(x)
      return x.reshape(self.batch_size, -1, *x.shape[1:])

    batch = {
      name: jax.tree.map(split, self._next_of(name)) for name in self.inputs
    }
    if self.reset_for_eval:  # Of its one child, the last rows may only fill.
      (child,) = batch.values()
      if base.WEIGHTS in child:
        weights = child[base.WEIGHTS].reshape(self.batch_size, -1)
        batch[base.WEIGHTS] = (weights != 0).any(axis=1).astype(np.float32)
    return batch

  def position(self) -> dict[str, Any]:
    """Returns the states of the children."""
    return {name: _state_of(child) for name, child in self.inputs.items()}

  def set_position(self, position: dict[str, Any]) -> None:
    """Sets the states of the children."""
    for name, child in self.inputs.items():
      _set_state_of(child, position[name])

  def identity(self) -> dict[str, Any]:
    """Returns the children's names; their states identify their data."""
    return {**super().identity(), 'inputs': sorted(self.inputs)}

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    """Returns the text of token ids of one child.

    Args:
      ids: integers [B, L].
      lengths: integers [B].
      key: 'child', or 'child/key' with the key for the child; None is the only
        child.

    Raises:
      ValueError: no child is named.
    """
    name, _, rest = (key or '').partition('/')
    if key is None and len(self.inputs) == 1:
      (name,) = self.inputs
    if name not in self.inputs:
      raise ValueError(
        f'{self.name}.ids_to_strings got key={key!r}; expected one of'
        f' {sorted(self.inputs)}: whose tokens they are.'
      )
    return self.inputs[name].ids_to_strings(ids, lengths, rest or None)


@dataclasses.dataclass
class _InUse:
  """A child's batch that rows are taken from.

  Attributes:
    batch: arrays [b, ...].
    used: how many of its rows were taken.
    state: the child's state in front of it, if the position is saved.
  """

  batch: dict[str, Any]
  used: int
  state: bytes | None


@dataclasses.dataclass(kw_only=True, eq=False)
class MixtureInput(_Parent):
  """A mixture of inputs, row by row, in exact proportions.

  Each row comes from one child. Nothing is drawn: which child it is follows
  from the weights, so that after any number n of rows each child has given
  n * weight of them, less than one more or less. So it is on every host, as all
  of them follow the same schedule through rows of their own.

  Children must repeat: what an epoch of a mixture is, nobody could say. Their
  batch sizes are free. Their batches must have the same entries, of the same
  dtypes, with rows of the same shapes; where only some have `weights`, the rows
  of the others get ones. Their tokens are taken to be the same.

  A position fits the same hosts only: in the middle of the children's batches,
  the rows that the hosts have not used yet could not be divided evenly among
  another number of hosts.

  Attributes:
    weights: of each child, a positive number; 1 and 3 are a quarter and three
      quarters. Decimals are taken as they are written: 0.1 is a tenth.
  """

  weights: Mapping[str, float]

  def __post_init__(self) -> None:
    super().__post_init__()
    # Integers, so that nothing is rounded after 1e15 rows.
    exact = {n: fractions.Fraction(str(self.weights[n])) for n in self.inputs}
    scale = math.lcm(*(x.denominator for x in exact.values()))
    whole = {name: int(x * scale) for name, x in exact.items()}
    common = math.gcd(*whole.values())
    self._shares = {name: x // common for name, x in whole.items()}
    self._start()

  def _start(self) -> None:
    self._given = dict.fromkeys(self.inputs, 0)
    self._in_use: dict[str, _InUse] = {}
    self._spec: dict[str, Any] | None = None

  def _check_fields(self) -> None:
    super()._check_fields()
    if self.reset_for_eval:
      raise ValueError(
        f'{self.name} has reset_for_eval=True; a mixture has no epoch that'
        ' could end. Evaluate on each of its inputs, or on'
        ' eval_loop_num_batches batches.'
      )
    if not isinstance(self.weights, Mapping) or (
      set(self.weights) != set(self.inputs)
    ):
      raise ValueError(
        f'{self.name}.weights is {self.weights!r}; expected a number for each'
        f' of {sorted(self.inputs)}.'
      )
    for name, weight in self.weights.items():
      is_number = isinstance(weight, numbers.Real)
      if isinstance(weight, bool) or not is_number or not 0 < weight < math.inf:
        raise ValueError(
          f'{self.name}.weights[{name!r}] is {weight!r}; expected a positive'
          ' number.'
        )

  def get_next(self) -> dict[str, Any]:
    """Returns the next rows, arrays [B, ...].

    Raises:
      ValueError: a child ended, or the children's batches differ in structure.
    """
    names = list(self.inputs)
    if self._spec is None:
      self._spec = self._common_spec()
    given = dict(self._given)
    chosen = self._schedule(given)
    batch: dict[str, Any] | None = None
    for i, name in enumerate(names):
      rows = np.flatnonzero(chosen == i)
      for part in self._take(name, rows.size):
        some, rows = np.split(rows, [base.num_rows(part)])
        if batch is None:
          batch = jax.tree.map(self._empty, part)
        jax.tree.map(functools.partial(_put, some), batch, part)
    self._given = given
    assert batch is not None
    return batch

  def _empty(self, x: np.ndarray) -> np.ndarray:
    return np.empty((self.batch_size, *x.shape[1:]), x.dtype)

  def _schedule(self, given: dict[str, int]) -> np.ndarray:
    """Returns whose each row of the next batch is, int [B]; counts in `given`.

    The chairman assignment problem, as Tijdeman solved it (Discrete Mathematics
    32, 1980): of the children that are behind by 1 / (2k - 2) of a row or more,
    that one whose row is due first. No child is ever ahead or behind by more
    than 1 - 1 / (2k - 2).
    """
    shares = list(self._shares.values())
    total, k = sum(shares), len(shares)
    chosen = np.zeros(self.batch_size, np.int64)
    if k > 1:
      # In units of 1 / ((2k - 2) * total) of a row.
      unit = 2 * k - 2
      row = unit * total
      number = sum(given.values())
      behind = [
        unit * (number * share - total * count)
        for share, count in zip(shares, given.values(), strict=True)
      ]
      steps = [unit * share for share in shares]
      children = range(k)
      for n in range(self.batch_size):
        best = -1
        for i in children:
          behind[i] += steps[i]
          if behind[i] >= total and (
            best < 0
            or (row - total - behind[i]) * shares[best]
            < (row - total - behind[best]) * shares[i]
          ):
            best = i
        behind[best] -= row
        chosen[n] = best
    for name, count in zip(
      given, np.bincount(chosen, minlength=k), strict=True
    ):
      given[name] += int(count)
    return chosen

  def _take(self, name: str, rows: int) -> Iterator[dict[str, Any]]:
    """Yields so many rows of a child, in parts [.., ...] of its batches."""
    while rows:
      current = self._in_use.get(name)
      if current is None or current.used == self.inputs[name].batch_size:
        current = self._in_use[name] = self._read(name)
      first, last = (
        current.used,
        min(current.used + rows, self.inputs[name].batch_size),
      )
      current.used = last
      rows -= last - first
      yield jax.tree.map(lambda x, a=first, b=last: x[a:b], current.batch)

  def _read(self, name: str) -> _InUse:
    child = self.inputs[name]
    state = child.get_state() if self.saves_position else None
    try:
      batch = jax.tree.map(np.asarray, self._next_of(name))
    except StopIteration:
      raise ValueError(self._ended_message(name)) from None
    assert self._spec is not None
    weights = self._spec.get(_WEIGHTS_PATH)
    if base.WEIGHTS not in batch and weights is not None:
      shape, dtype = weights
      batch = dict(batch)
      batch[base.WEIGHTS] = np.ones((child.batch_size, *shape), dtype)
    self._check_spec(name, _spec_of(batch), 'the first batches', self._spec)
    return _InUse(batch, 0, state)

  def _ended_message(self, name: str) -> str:
    return (
      f'The input {name} of {self.name} ended after {self._given[name]} rows:'
      ' the proportions cannot be kept without it. Set its repeat=True.'
    )

  def _common_spec(self) -> dict[str, Any]:
    """Returns shape and type of each entry of the rows; children must agree."""
    first, expected = '', {}
    for name, child in self.inputs.items():
      self._reading = name
      batch = child.peek_padded()
      self._reading = None
      if batch is None:
        raise ValueError(self._ended_message(name))
      spec = _spec_of(jax.tree.map(np.asarray, batch))
      if not first:
        first, expected = name, spec
      for one, other in ((spec, expected), (expected, spec)):
        if _WEIGHTS_PATH in one and _WEIGHTS_PATH not in other:
          other[_WEIGHTS_PATH] = one[_WEIGHTS_PATH]
      self._check_spec(name, spec, f'the input {first}', expected)
    return expected

  def _check_spec(
    self, name: str, got: dict[str, Any], other: str, expected: dict[str, Any]
  ) -> None:
    differences = [
      f'{key} is {_describe(got.get(key))} of {name} and'
      f' {_describe(expected.get(key))} of {other}'
      for key in sorted({*got, *expected})
      if got.get(key) != expected.get(key)
    ]
    if differences:
      raise ValueError(
        f'The inputs of {self.name} cannot be mixed row by row: '
        + '; '.join(differences)
        + '. Make their batches alike.'
      )

  def reset(self) -> None:
    """Resets the children and the schedule."""
    super().reset()
    self._start()

  def position(self) -> dict[str, Any]:
    """Returns of each child: state, rows used of its batch, rows given."""
    position = {}
    for name, child in self.inputs.items():
      current = self._in_use.get(name)
      if current is None or current.used == child.batch_size:
        state, used = _state_of(child), 0
      else:
        assert current.state is not None
        state, used = json.loads(current.state), current.used
      position[name] = {
        'state': state,
        'used': used,
        'given': self._given[name],
      }
    return position

  def set_position(self, position: dict[str, Any]) -> None:
    """Reads the current batches of the children again."""
    self._start()
    for name, child in self.inputs.items():
      _set_state_of(child, position[name]['state'])
      self._given[name] = position[name]['given']
    for name in self.inputs:
      if position[name]['used']:
        if self._spec is None:
          self._spec = self._common_spec()
        self._in_use[name] = self._read(name)
        self._in_use[name].used = position[name]['used']

  def identity(self) -> dict[str, Any]:
    """Returns the hosts and the proportions."""
    return {**super().identity(), 'weights': self._shares}

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    """Returns the text of token ids, as the child has it that sorts first."""
    child = next(iter(self.inputs.values()))
    return child.ids_to_strings(ids, lengths, key)


def _put(rows: np.ndarray, to: np.ndarray, values: np.ndarray) -> None:
  to[rows] = values


def _spec_of(batch: dict[str, Any]) -> dict[str, Any]:
  """Returns (shape of a row, dtype) of every array, by its path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(batch)
  return {
    jax.tree_util.keystr(path): (x.shape[1:], x.dtype) for path, x in leaves
  }


_WEIGHTS_PATH = jax.tree_util.keystr((jax.tree_util.DictKey(base.WEIGHTS),))


def _describe(spec: tuple[tuple[int, ...], np.dtype] | None) -> str:
  if spec is None:
    return 'missing'
  shape, dtype = spec
  return f'{dtype.name}[{", ".join(["b", *map(str, shape)])}]'
