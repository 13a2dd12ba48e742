"""The scalars of a compiled step, packed into one array.

Each output of a program costs the loop microseconds in each step, and each
array that is logged a transfer of its own.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_DTYPES = (np.dtype(np.float32), np.dtype(np.int32))


@jax.tree_util.register_pytree_node_class
class Scalars(MutableMapping[str, Any]):
  """A mapping that keeps its 32-bit scalars in one array on the devices.

  When one of these is asked for, also by `{**scalars}`, a small program splits
  the array on the devices; on a CPU this waits for the step. `scalars | {...}`,
  `copy` and an assignment leave it packed.

  Attributes:
    others: the values that are not in the array, by name.
  """

  def __init__(
    self,
    names: tuple[str, ...] = (),
    dtypes: tuple[Any, ...] = (),
    packed: Any = None,
    others: Mapping[str, Any] = types.MappingProxyType({}),
  ):
    """Makes a mapping.

    Args:
      names: of the numbers in the array.
      dtypes: of these numbers, float32 or int32.
      packed: the array of their bits, [len(names)] uint32; None without names.
      others: the other values; they replace one in the array of their name.
    """
    self._names, self._dtypes, self._packed = names, dtypes, packed
    self.others = dict(others)

  def tree_flatten(self) -> tuple[Any, Any]:
    return (self._packed, self.others), (self._names, self._dtypes)

  @classmethod
  def tree_unflatten(cls, aux: Any, children: Any) -> 'Scalars':
    return cls(*aux, *children)

  def _split(self) -> dict[str, Any]:
    if self._names:
      split = _splitter(self._dtypes)
      is_shape = isinstance(self._packed, jax.ShapeDtypeStruct)
      call = functools.partial(jax.eval_shape, split) if is_shape else split
      numbers = zip(self._names, call(self._packed), strict=True)
      self.others = dict(numbers) | self.others
      self._names, self._dtypes, self._packed = (), (), None
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
    others = self.others | dict(more)
    return Scalars(self._names, self._dtypes, self._packed, others)

  def __ror__(self, more: Mapping[str, Any]) -> 'Scalars':
    kept = {name: x for name, x in more.items() if name not in self}
    return Scalars(self._names, self._dtypes, self._packed, kept | self.others)

  def copy(self) -> 'Scalars':
    """Returns a shallow copy."""
    return self | {}

  def on_host(self) -> dict[str, Any]:
    """Returns all values, with NumPy's numbers from the array."""
    return self.numbers(np.asarray) | self.others

  def numbers(
    self, convert: Callable[[np.ndarray], Any] = np.ndarray.tolist
  ) -> dict[str, Any]:
    """Fetches the array, and returns its numbers as int and float."""
    if not self._names:
      return {}
    bits = np.asarray(self._packed)
    columns = {dtype: convert(bits.view(dtype)) for dtype in {*self._dtypes}}
    places = enumerate(zip(self._names, self._dtypes, strict=True))
    return {name: columns[dtype][i] for i, (name, dtype) in places}


@functools.cache
def _splitter(dtypes: tuple[Any, ...]) -> Any:
  return jax.jit(
    lambda packed: [
      jax.lax.bitcast_convert_type(packed[i], dtype)
      for i, dtype in enumerate(dtypes)
    ]
  )


def pack(scalars: Mapping[str, Any]) -> Scalars:
  """Packs the 32-bit scalars of a mapping; part of a compiled step."""
  found = {
    name: x
    for name, x in sorted(scalars.items())  # As the outputs of a program.
    if getattr(x, 'dtype', None) in _DTYPES and x.shape == ()
  }
  others = {k: x for k, x in scalars.items() if k not in found}
  if not found:
    return Scalars(others=others)
  # The barrier keeps the programs of the numbers, and so their bits.
  numbers = jax.lax.optimization_barrier([*found.values()])
  bits = [jax.lax.bitcast_convert_type(x, jnp.uint32) for x in numbers]
  dtypes = tuple(x.dtype for x in numbers)
  return Scalars((*found,), dtypes, jnp.stack(bits), others)


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


def find(scalars: Mapping[str, Any], name: str) -> tuple[Any, Any] | None:
  """Returns an array and the index of a scalar in it; None if it is absent.

  The scalar is `numpy.asarray(array)[index]`; if it is packed, its bits are.
  """
  if isinstance(scalars, Scalars) and name not in scalars.others:
    names = scalars._names
    return (scalars._packed, names.index(name)) if name in names else None
  return (scalars[name], ()) if name in scalars else None


def leaves(scalars: Any) -> list[Any]:
  """Returns `jax.tree.leaves(scalars)`, in fewer calls."""
  if isinstance(scalars, Scalars) and scalars._names:
    others = jax.tree.leaves(scalars.others) if scalars.others else ()
    return [scalars._packed, *others]
  return jax.tree.leaves(scalars)
