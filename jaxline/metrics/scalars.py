"""The scalars of a compiled step, packed into one array.

Each output of a program costs the loop microseconds in each step, and each
array that is logged a transfer of its own.
"""

from collections.abc import Iterator, Mapping, MutableMapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_pytree_node_class
class Scalars(MutableMapping[str, Any]):
  """A mapping of which one array on the devices holds the float32 scalars.

  When one of these is asked for, also by `{**scalars}`, a small program splits
  the array on the devices; on a CPU this waits for the step. `scalars | {...}`,
  `copy` and an assignment leave it packed.

  Attributes:
    others: the values that are not in the array, by name.
  """

  def __init__(
    self, names: tuple[str, ...], packed: Any, others: dict[str, Any]
  ):
    """Makes a mapping.

    Args:
      names: of the numbers in the array.
      packed: the array, [len(names)] float32; None without names.
      others: the other values; they replace one in the array of their name.
    """
    self._names, self._packed, self.others = names, packed, others

  def tree_flatten(self) -> tuple[Any, Any]:
    return (self._packed, self.others), self._names

  @classmethod
  def tree_unflatten(cls, names: Any, children: Any) -> 'Scalars':
    return cls(names, *children)

  def _split(self) -> dict[str, Any]:
    if self._names:
      numbers = dict(zip(self._names, _unstack(self._packed), strict=True))
      self.others = numbers | self.others
      self._names, self._packed = (), None
    return self.others

  def __getitem__(self, name: str) -> Any:
    return self.others[name] if name in self.others else self._split()[name]

  def __setitem__(self, name: str, value: Any) -> None:
    self.others[name] = value

  def __delitem__(self, name: str) -> None:
    del self._split()[name]

  def __contains__(self, name: object) -> bool:
    return name in self.others or name in self._names

  def __iter__(self) -> Iterator[str]:
    return iter(dict.fromkeys((*self._names, *self.others)))

  def __len__(self) -> int:
    return len({*self._names, *self.others})

  def __repr__(self) -> str:
    return repr(dict(self))

  def __or__(self, more: Mapping[str, Any]) -> 'Scalars':
    return Scalars(self._names, self._packed, self.others | dict(more))

  def __ror__(self, more: Mapping[str, Any]) -> 'Scalars':
    kept = {name: x for name, x in more.items() if name not in self}
    return Scalars(self._names, self._packed, kept | self.others)

  def copy(self) -> 'Scalars':
    """Returns a shallow copy."""
    return self | {}

  def on_host(self, as_floats: bool = False) -> dict[str, Any]:
    """Fetches the array; its numbers become NumPy's float32, or floats."""
    if not self._names:
      return dict(self.others)
    array = np.asarray(self._packed)
    numbers = array.tolist() if as_floats else array
    return dict(zip(self._names, numbers, strict=True)) | self.others


@functools.cache
def _splitter(count: int) -> Any:
  return jax.jit(lambda packed: [packed[i] for i in range(count)])


def _unstack(packed: Any) -> list[Any]:
  split = _splitter(packed.shape[0])
  is_shape = isinstance(packed, jax.ShapeDtypeStruct)
  return jax.eval_shape(split, packed) if is_shape else split(packed)


def pack(scalars: Mapping[str, Any]) -> Scalars:
  """Packs the float32 scalars of a mapping; part of a compiled step."""
  found = {
    name: x
    for name, x in sorted(scalars.items())  # As the outputs of a program.
    if getattr(x, 'dtype', None) == jnp.float32 and x.shape == ()
  }
  others = {k: x for k, x in scalars.items() if k not in found}
  if not found:
    return Scalars((), None, others)
  # The barrier keeps the programs of the numbers, and so their bits.
  numbers = jax.lax.optimization_barrier([*found.values()])
  return Scalars((*found,), jnp.stack(numbers), others)


def as_dicts(tree: Any) -> Any:
  """Returns a tree with a dict in place of each `Scalars`."""
  return jax.tree.map(
    lambda x: dict(x) if isinstance(x, Scalars) else x,
    dict(tree),
    is_leaf=lambda x: isinstance(x, Scalars),
  )


def others_of(scalars: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
  """Returns the values that are not packed; may be changed in place."""
  return scalars.others if isinstance(scalars, Scalars) else scalars


def copied(scalars: Mapping[str, Any] | None) -> MutableMapping[str, Any]:
  """Returns a shallow copy of a step's scalars, still packed."""
  return scalars.copy() if isinstance(scalars, Scalars) else dict(scalars or {})
