"""How a checkpoint describes a tree: arrays by name, the rest as JSON.

`encode` splits a value into its arrays and a structure that `json.dumps`
writes; `decode` puts them together again. None, bool, str, int, float and lists
are themselves in the structure. Each other kind of value is {tag: body}, and a
row of the table `_KINDS` at the end of this file. A class in a body is
"module:qualname".

A structure comes from a file, and files can be edited. So `decode` never looks
up a function. It imports nothing, finds types only in modules that the program
has imported, and checks that each is of the kind that the tag says. It calls no
class that the structure names. The code that runs belongs to those types: the
function that a type registered with JAX to build its nodes, setters, finalizers
and the hash of a dict's keys.

An object that occurs twice is stored, and restored, as two.
"""

import base64
from collections.abc import Callable, Iterable, Mapping
import contextlib
import dataclasses
import functools
import inspect
import pickle
import sys
from typing import Any, NamedTuple

import jax
from jax._src import tree_util
import numpy as np

from jaxline.checkpoint import arrays as arrays_lib
from jaxline.checkpoint import store as store_lib
from jaxline.partitioning import name_of


def named_leaves(tree: Any, name: str = '') -> dict[str, Any]:
  """Returns the leaves of a tree by name, in the order of `jax.tree.leaves`.

  Names are unique: where the components of several paths join to the same
  name, the second gets '#2', the third '#3'. None is no leaf.

  Args:
    tree: the tree.
    name: its own, with which those of its leaves begin.
  """
  named: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    parts = [part for part in (name, name_of(path)) if part]
    named[_unique('/'.join(parts), named)] = leaf
  return named


def is_array(x: Any) -> bool:
  """Returns whether a value is an array, or a jax.ShapeDtypeStruct of one.

  Arrays are JAX arrays, typed PRNG keys, NumPy arrays and NumPy scalars; not
  arrays of texts, dates or Python objects, nor subclasses of np.ndarray, which
  have more to them (a mask, a file).
  """
  if type(x) is np.ndarray or isinstance(x, np.generic):
    return arrays_lib.can_store(x)
  return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def encode(tree: Any, name: str, *, allow_pickle: bool = False) -> 'Encoding':
  """Splits a value into named arrays and a structure for JSON.

  Args:
    tree: the value.
    name: the value's name; those of its arrays begin with it.
    allow_pickle: whether to pickle what cannot be described.

  Raises:
    TypeError: parts of the value cannot be described: names all of them.
  """
  encoding = Encoding(allow_pickle)
  encoding.structure = encoding.walk(tree, name)
  if encoding.refused:
    raise TypeError(
      'A checkpoint cannot hold\n  '
      + '\n  '.join(encoding.refused)
      + '\nFor each: keep it out of CHECKPOINT_ATTRS /'
      ' NON_BROADCAST_CHECKPOINT_ATTRS, give it as arrays and plain values, or'
      ' set config.checkpoint_allow_pickle = True.'
    )
  return encoding


def decode(
  structure: Any,
  arrays: Mapping[str, Any],
  *,
  allow_pickle: bool = False,
  on_host: bool = False,
) -> Any:
  """Puts a value together again.

  Args:
    structure: of `encode`, perhaps by way of JSON.
    arrays: name -> array. A jax.Array comes back as the very object here, a
      NumPy array writeable.
    allow_pickle: whether to unpickle what was pickled, which may run any code.
    on_host: whether an array that was a jax.Array may come back as it is here;
      else it is one again, on the default device.

  Raises:
    store_lib.RefusedError: the structure is malformed, lacks an array, holds a
      pickled value that may not be unpickled, or names a type that is not
      imported or is not of the kind that it says.
  """
  return _Decoder(arrays, allow_pickle, on_host).walk(structure)


# Names and texts.


def _unique(name: str, taken: Mapping[str, Any]) -> str:
  unique, count = name, 1
  while unique in taken:
    count += 1
    unique = f'{name}#{count}'
  return unique


def _ordered(keys: Iterable[Any]) -> list[Any]:
  """Orders keys as JAX does, where they can be ordered."""
  keys = list(keys)
  try:
    return sorted(keys)
  except TypeError:
    return keys


def _find(address: str) -> Any:
  """Finds a class by 'module:qualname', without running or importing any."""
  module_name, _, qualname = address.partition(':')
  found: Any = sys.modules.get(module_name)
  for part in qualname.split('.'):
    # Static, since a module's own __getattr__ may import others.
    found = inspect.getattr_static(found, part, None)
    if not isinstance(found, type):
      raise store_lib.RefusedError(
        f'The checkpoint holds {address!r}, but no module that is imported has'
        f" such a class: import {module_name!r} in the experiment's module, or"
        f' define {qualname!r} there'
      )
  return found


def _base64(data: bytes) -> str:
  return base64.b64encode(data).decode('ascii')


# What recognises a class.


def _is_a(base: type) -> Callable[[type], bool]:
  return lambda cls: issubclass(cls, base)


def _is_namedtuple(cls: type) -> bool:
  return issubclass(cls, tuple) and hasattr(cls, '_fields')


def _is_dataclass(cls: type) -> bool:
  # A base written in C (dict, Exception) holds more than the fields: 1 << 9 is
  # HEAPTYPE.
  bases = cls.__mro__[:-1]
  return dataclasses.is_dataclass(cls) and all(
    base.__flags__ & 1 << 9 for base in bases
  )


def _field_names(cls: Any) -> list[str]:
  if issubclass(cls, tuple):
    return list(cls._fields)
  return [field.name for field in dataclasses.fields(cls)]


# Both directions.


class _RefusedError(Exception):
  """A value cannot be described; says why."""


class Encoding:
  """A value as a checkpoint stores it.

  Attributes:
    structure: see the module; JSON gives it back as it is.
    arrays: name -> array, uncopied; PRNG keys as their uint32 data.
    refused: the values that cannot be stored, and why.
  """

  def __init__(self, allow_pickle: bool):
    self.structure: Any = None
    self.arrays: dict[str, Any] = {}
    self.refused: list[str] = []
    self._allow_pickle = allow_pickle

  def walk(self, x: Any, name: str) -> Any:
    """Returns the structure of a value."""
    if x is None or type(x) in (bool, int, float, str):
      return x
    if type(x) is list:
      return self.items(x, name)
    tag = _tag_of(type(x))
    if tag == 'jax' and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      tag = 'key'
    if tag is None:
      return self._refuse(x, name)
    try:
      return {tag: _KINDS[tag].encode(self, x, name)}
    except _RefusedError as e:
      return self._refuse(x, name, str(e))

  def _refuse(self, x: Any, name: str, why: str = '') -> Any:
    """Pickles a value where that is allowed; else it is an error."""
    if self._allow_pickle:
      try:
        return {'pickle': [name, _base64(pickle.dumps(x))]}
      except Exception as e:  # An object's own code may raise anything.
        why = f'it cannot be pickled: {type(e).__name__}: {e}'
    cls = type(x)
    what = f'{name!r}, a {cls.__module__}.{cls.__qualname__}'
    self.refused.append(f'{what} ({why})' if why else what)
    return None

  def _address(self, x: Any) -> str:
    address = f'{type(x).__module__}:{type(x).__qualname__}'
    with contextlib.suppress(store_lib.RefusedError):
      if _find(address) is type(x):
        return address
    raise _RefusedError('its class cannot be found by its name')

  # Each of these returns the body of a value.

  def items(self, xs: Iterable[Any], name: str) -> list[Any]:
    return [self.walk(x, f'{name}/{i}') for i, x in enumerate(xs)]

  def pairs(self, x: Mapping[Any, Any], name: str) -> list[list[Any]]:
    # Walked in JAX's order, so that equal names are counted as in
    # `named_leaves`, whatever was inserted first.
    values = {key: self.walk(x[key], f'{name}/{key!s}') for key in _ordered(x)}
    return [[self.walk(key, f'{name}/keys/{key!s}'), values[key]] for key in x]

  def array(self, x: Any, name: str) -> str:
    if not is_array(x):
      raise _RefusedError
    name = _unique(name, self.arrays)
    self.arrays[name] = x
    return name

  def key(self, x: jax.Array, name: str) -> list[Any]:
    data = self.array(jax.random.key_data(x), name)
    return [data, jax.random.key_impl(x)]

  def fields(self, x: Any, name: str) -> list[Any]:
    address, fields = self._address(x), _field_names(type(x))
    # What a cached property holds is computed again.
    extra = [
      key for key in getattr(x, '__dict__', {}) if key not in fields
      and not isinstance(
        inspect.getattr_static(type(x), key, None), functools.cached_property
      )
    ]  # fmt: skip
    if extra:
      raise _RefusedError(f'attributes beside its fields: {extra}')
    values = {f: self.walk(getattr(x, f), f'{name}/{f}') for f in fields}
    return [address, values]

  def node(self, x: Any, name: str) -> list[Any]:
    address = self._address(x)
    children, aux = jax.tree_util.flatten_one_level_with_keys(x)
    if aux is x:  # By jax.tree_util.register_static.
      raise _RefusedError('registered as static')
    parts = [self.walk(c, f'{name}/{name_of((k,))}') for k, c in children]
    return [address, parts, self.walk(aux, f'{name}/aux')]


class _Decoder:
  """Puts one value together."""

  def __init__(
    self, arrays: Mapping[str, Any], allow_pickle: bool, on_host: bool
  ):
    self.arrays = arrays
    self._allow_pickle = allow_pickle
    self._on_host = on_host

  def walk(self, structure: Any) -> Any:
    """Returns the value of a structure."""
    if structure is None or isinstance(structure, bool | int | float | str):
      return structure
    if isinstance(structure, list):
      return self.items(structure)
    tags = list(structure) if isinstance(structure, dict) else []
    if len(tags) != 1 or tags[0] not in _KINDS:
      raise store_lib.RefusedError(
        f'The structure in the checkpoint has {str(structure)[:80]!r}; expected'
        f' an object with one tag of {[*_KINDS]}. It is damaged, or of a later'
        ' version'
      )
    ((tag, body),) = structure.items()
    try:
      return _KINDS[tag].decode(self, body)
    except Exception as e:  # A node's own code may raise anything.
      if isinstance(e, store_lib.RefusedError | MemoryError | RecursionError):
        raise
      raise store_lib.RefusedError(
        f'The checkpoint holds a {tag!r} that cannot be restored from'
        f' {str(body)[:80]!r}: {type(e).__name__}: {str(e)!r}'
      ) from e

  def _class(self, address: str, tag: str) -> Any:
    cls = _find(address)
    if _tag_of(cls) != tag:
      raise store_lib.RefusedError(
        f'The checkpoint holds a {tag!r} of type {address!r}, but that is'
        f' none: the class has changed, or the file has'
      )
    return cls

  # Each of these returns the value of a body.

  def items(self, xs: list[Any]) -> list[Any]:
    return [self.walk(x) for x in xs]

  def pairs(self, pairs: list[Any]) -> dict[Any, Any]:
    return {self.walk(key): self.walk(value) for key, value in pairs}

  def jax_array(self, name: str) -> Any:
    x = self.arrays[name]
    return x if self._on_host else jax.numpy.asarray(x)

  def key(self, body: list[str]) -> jax.Array:
    name, impl = body
    return jax.random.wrap_key_data(self.arrays[name], impl=str(impl))

  def fields(self, body: list[Any], tag: str) -> Any:
    address, values = body
    cls = self._class(address, tag)
    expected = _field_names(cls)
    if sorted(values) != sorted(expected):
      raise store_lib.RefusedError(
        f'The checkpoint holds a {address!r} with the fields'
        f' {sorted(values)}; the class has {sorted(expected)}'
      )
    made = {name: self.walk(values[name]) for name in expected}
    if tag == 'namedtuple':
      return tuple.__new__(cls, made.values())
    # Neither __init__ nor a frozen class's __setattr__ runs.
    instance = object.__new__(cls)
    for name, value in made.items():
      object.__setattr__(instance, name, value)
    return instance

  def node(self, body: list[Any]) -> Any:
    address, children, aux = body
    cls = self._class(address, 'node')
    data, children = self.walk(aux), self.items(children)
    # Not with a PyTreeDef: its C++ code takes the data of a registered
    # dataclass for a tuple of the right length, and crashes where it is not.
    return tree_util._registry[cls].from_iter(data, tuple(children))

  def pickle(self, body: list[str]) -> Any:
    name, data = body
    if not self._allow_pickle:
      raise store_lib.RefusedError(
        f'The checkpoint holds {name!r} pickled, and unpickling can run any'
        ' code. If you trust who wrote it, set'
        ' config.checkpoint_allow_pickle = True'
      )
    return pickle.loads(base64.b64decode(data))


# The table.


class _Kind(NamedTuple):
  """A row of the table: how one kind of value is stored."""

  of: Any  # A class, not its subclasses; or a function that recognises one.
  encode: Any  # (e: the encoding, x: a value, n: its name) -> body.
  decode: Any  # (d: the decoder, b: a body) -> value.


def _tag_of(cls: type) -> str | None:
  """Returns the tag of the instances of a class; None: not described."""
  for tag, kind in _KINDS.items():
    if cls is kind.of if isinstance(kind.of, type) else kind.of(cls):
      return tag
  return None


_no_class = lambda cls: False

# The JSON is {tag: body}. The first row that recognises a class counts.
# fmt: off
_KINDS: dict[str, _Kind] = {
  'complex': _Kind(complex, lambda e, x, n: e.items((x.real, x.imag), n),
                   lambda d, b: complex(*d.items(b))),
  'bytes': _Kind(bytes, lambda e, x, n: _base64(x),
                 lambda d, b: base64.b64decode(b)),
  'tuple': _Kind(tuple, Encoding.items, lambda d, b: tuple(d.items(b))),
  'dict': _Kind(dict, Encoding.pairs, _Decoder.pairs),  # [[key, value]]
  # A copy where NumPy only looks into memory of JAX: experiments count in
  # their NumPy arrays in place.
  'numpy': _Kind(np.ndarray, Encoding.array,
                 lambda d, b: np.require(d.arrays[b], requirements='W')),
  'scalar': _Kind(_is_a(np.generic), Encoding.array,
                  lambda d, b: np.asarray(d.arrays[b])[()]),
  'jax': _Kind(_is_a(jax.Array), Encoding.array, _Decoder.jax_array),
  'key': _Kind(_no_class, Encoding.key, _Decoder.key),
  'namedtuple': _Kind(_is_namedtuple, Encoding.fields,
                      lambda d, b: d.fields(b, 'namedtuple')),
  'node': _Kind(lambda cls: cls in tree_util._registry, Encoding.node,
                _Decoder.node),
  'dataclass': _Kind(_is_dataclass, Encoding.fields,
                     lambda d, b: d.fields(b, 'dataclass')),
  'pickle': _Kind(_no_class, None, _Decoder.pickle),
}
# fmt: on
