"""Packs the scalars of a compiled step into one array.

Each output of a program costs the loop microseconds per step, and each logged
array costs a separate transfer.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_DTYPES = (np.dtype(np.float32), np.dtype(np.int32))
_STATIC = {'static': True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Packed:
  """The scalars that a compiled step returns: one array, and the others."""

  names: tuple[str, ...] = dataclasses.field(default=(), metadata=_STATIC)
  dtypes: tuple[Any, ...] = dataclasses.field(default=(), metadata=_STATIC)
  array: Any = None  # The bits of the numbers, [len(names)] uint32.
  others: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_NOTHING = Packed()

# An int32 scalar that a step may return; a sharded step does. Its values:
#   0: the loss and the gradients are finite.
#   2: the loss is not finite. 3: the gradients are not. 4: both are not.
#   1: one or both are not finite.
#   -1: nothing in the batch has a weight.
# If `on_nonfinite` is 'skip', positive values count nonfinite steps in a row.
NONFINITE = 'nonfinite'
PARTS = 'nonfinite_parts'  # The 0, 2, 3 or 4 of a step with 'skip'.


class Scalars(MutableMapping[str, Any]):
  """A mapping that keeps its 32-bit scalars in one array on the devices.

  The first access to such a scalar splits the array by a small program on the
  devices; on a CPU it waits for the step. `{**scalars}` and `jax.tree` split it
  too. `scalars | {...}`, `copy` and assignments keep the array packed.
  `jax.tree.map` returns a dict; to map several trees, pass `dict(scalars)`.

  Attributes:
    others: Values by name that are not in the array. A value here replaces a
      number of the same name in the array.
  """

  def __init__(
    self, packed: Packed = _NOTHING, others: Mapping[str, Any] | None = None
  ):
    self._packed = packed
    self.others = dict(packed.others if others is None else others)

  def _split(self) -> dict[str, Any]:
    packed = self._packed
    if packed.names:
      numbers = _splitter(packed.dtypes)(packed.array)
      self.others = dict(zip(packed.names, numbers, strict=True)) | self.others
      self._packed = _NOTHING
    return self.others

  def __getitem__(self, name: str) -> Any:
    if name not in self.others and name in self._packed.names:
      self._split()
    return self.others[name]

  def __setitem__(self, name: str, value: Any) -> None:
    self.others[name] = value

  def __delitem__(self, name: str) -> None:
    if name in self._packed.names:
      self._split()
    del self.others[name]

  def __contains__(self, name: object) -> bool:
    return name in self.others or name in self._packed.names

  def __iter__(self) -> Iterator[str]:
    return iter(dict.fromkeys((*self._packed.names, *self.others)))

  def __len__(self) -> int:
    return len({*self._packed.names, *self.others})

  def __repr__(self) -> str:
    return repr(dict(self))

  def __or__(self, more: Mapping[str, Any]) -> 'Scalars':
    return Scalars(self._packed, self.others | dict(more))

  def __ror__(self, more: Mapping[str, Any]) -> 'Scalars':
    kept = {name: x for name, x in more.items() if name not in self}
    return Scalars(self._packed, kept | self.others)

  def copy(self) -> 'Scalars':
    """Returns a shallow copy that stays packed."""
    return Scalars(self._packed, self.others)

  def numbers(
    self, convert: Callable[[np.ndarray], Any] = np.ndarray.tolist
  ) -> dict[str, Any]:
    """Fetches the array; returns its numbers by name, without replaced ones."""
    names, dtypes = self._packed.names, self._packed.dtypes
    if not names:
      return {}
    bits = np.asarray(self._packed.array)
    columns = {dtype: convert(bits.view(dtype)) for dtype in {*dtypes}}
    values = (columns[dtype][i] for i, dtype in enumerate(dtypes))
    named = zip(names, values, strict=True)
    return {name: x for name, x in named if name not in self.others}


def _flatten(scalars: Scalars) -> Any:
  split = scalars._split()
  names = tuple(sorted(split))
  return [(jax.tree_util.DictKey(name), split[name]) for name in names], names


def _unflatten(names: tuple[str, ...], values: Any) -> Any:
  return dict(zip(names, values, strict=True))


jax.tree_util.register_pytree_with_keys(Scalars, _flatten, _unflatten)


@functools.cache
def _splitter(dtypes: tuple[Any, ...]) -> Any:
  return jax.jit(
    lambda packed: [
      jax.lax.bitcast_convert_type(packed[i], dtype)
      for i, dtype in enumerate(dtypes)
    ]
  )


def pack(scalars: Mapping[str, Any]) -> Packed:
  """Packs the 32-bit scalars of a mapping, within a compiled step."""
  found = {
    name: x
    for name, x in sorted(scalars.items())  # Programs sort outputs by name.
    if getattr(x, 'dtype', None) in _DTYPES and x.shape == ()
  }
  others = {k: x for k, x in scalars.items() if k not in found}
  if not found:
    return Packed(others=others)
  # The barrier keeps XLA from computing the numbers differently.
  numbers = jax.lax.optimization_barrier([*found.values()])
  bits = [jax.lax.bitcast_convert_type(x, jnp.uint32) for x in numbers]
  dtypes = tuple(x.dtype for x in numbers)
  return Packed((*found,), dtypes, jnp.stack(bits), others)


def others_of(scalars: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
  """Returns the values that are not packed; you may change them in place."""
  return scalars.others if isinstance(scalars, Scalars) else scalars


def copied(scalars: Mapping[str, Any] | None) -> MutableMapping[str, Any]:
  """Returns a shallow copy of a step's scalars that stays packed."""
  return scalars.copy() if isinstance(scalars, Scalars) else dict(scalars or {})


def find(scalars: Mapping[str, Any], name: str) -> tuple[Any, Any] | None:
  """Returns the array of a scalar or of its bits, and the index; or None."""
  if isinstance(scalars, Scalars) and name not in scalars.others:
    packed = scalars._packed
    if name not in packed.names:
      return None
    return packed.array, packed.names.index(name)
  return (scalars[name], ()) if name in scalars else None


def leaves(scalars: Any) -> list[Any]:
  """Returns the arrays of a step's scalars without splitting them."""
  if isinstance(scalars, Scalars) and scalars._packed.names:
    others = jax.tree.leaves(scalars.others) if scalars.others else ()
    return [scalars._packed.array, *others]
  return jax.tree.leaves(scalars)
