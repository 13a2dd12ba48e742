"""How a checkpoint describes a tree: arrays by name, the rest as JSON.

`encode` splits a value into its arrays, which are stored as arrays, and a
structure that `json.dumps` writes and `decode` puts together again:

| value                               | in the structure                       |
|-------------------------------------|----------------------------------------|
| None, bool, str, int, finite float  | itself                                 |
| int beyond 64 bits                  | {"int": hex}                           |
| inf, nan                            | {"float": hex of the big-endian bytes} |
| complex                             | {"complex": [real, imaginary]}         |
| str with lone surrogates, bytes     | {"str": base64}, {"bytes": base64}     |
| list                                | [...]                                  |
| tuple, set, frozenset, range, slice | {"tuple": [...]}, ...                  |
| dict, its order kept                | {"dict": [[key, value], ...]}          |
| defaultdict                         | {"defaultdict": [factory, [...]]}      |
| NumPy dtype                         | {"dtype": name}                        |
| jax.Array; np.ndarray; NumPy scalar | {"jax": n}; {"numpy": n}; {"scalar": n}|
| typed PRNG key                      | {"key": [n, implementation]}           |
| NamedTuple, unregistered dataclass  | {"namedtuple": [type, {field: value}]} |
| member of an enum                   | {"enum": [type, name]}                 |
| other node of the JAX registry      | {"node": [type, children, aux data]}   |
| ConfigDict, FrozenConfigDict        | {"config": [frozen, options, pairs]}   |
| with config.checkpoint_allow_pickle | {"pickle": [name, base64]}             |

with n the name of an array and types as "module:qualname". The factory of a
defaultdict is null or {"ref": "builtins:list"}, with one of `_FACTORIES`.

A structure comes from a file, and files can be edited. So `decode` never looks
up a function. It imports nothing, finds types only in modules that the program
has imported, and checks that each is a NamedTuple, a dataclass, an enum or
registered with JAX, as the structure says. It calls no class that the structure
names. The code that runs belongs to those types: the function that a type
registered with JAX to build its nodes, and the hash of a dict's keys. `encode`
and `decode` refuse types with a `__del__`, which would run with the fields that
the file gives; subclasses of functools.partial, such as jax.tree_util.Partial;
and callables in the auxiliary data of a node, which the function that builds
the node could call. Earlier versions stored functions and classes as
{"ref": "module:qualname"}; such a value cannot be restored.

An object that occurs twice is stored, and restored, as two.
"""

import base64
import binascii
import collections
from collections.abc import Callable, Iterable, Mapping
import dataclasses
import enum
import functools
import inspect
import json
import math
import pickle
import struct
import sys
import types
from typing import Any

from absl import logging
import jax
from jax._src import tree_util
from ml_collections import config_dict
import numpy as np

_MISSING = object()

# The only factories of a defaultdict, since it calls them.
_FACTORIES = {
  f'builtins:{t.__name__}': t for t in (list, dict, set, int, float, str, tuple)
}

# What can replace an object that has no place in a checkpoint.
_REMEDY = (
  'keep it out of CHECKPOINT_ATTRS / NON_BROADCAST_CHECKPOINT_ATTRS, give it'
  ' as arrays and plain values, or set config.checkpoint_allow_pickle = True'
)


@dataclasses.dataclass
class Encoded:
  """A value as a checkpoint stores it.

  Attributes:
    structure: what the module's table says; equal to
      `json.loads(json.dumps(structure))`.
    arrays: name -> array, uncopied; PRNG keys as their uint32 data.
    pickled: the names of the values that were pickled.
  """

  structure: Any
  arrays: dict[str, Any]
  pickled: list[str]


def name_of(path: Iterable[Any]) -> str:
  """Returns the name of a JAX key path, such as 'params/linear/w'."""
  return '/'.join(_component(key) for key in path)


def named_leaves(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a tree by name, in the order of `jax.tree.leaves`.

  Names are unique: where the components of several paths join to the same
  name, the second gets '#2', the third '#3'. None is no leaf; the name of a
  tree that is one leaf is ''.
  """
  leaves: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    leaves[_unique(name_of(path), leaves)] = leaf
  return leaves


def is_array(x: Any) -> bool:
  """Returns whether a checkpoint stores the value as an array.

  So it does with JAX arrays, typed PRNG keys and ShapeDtypeStructs, NumPy
  arrays and NumPy scalars; not with arrays of Python objects, nor with
  subclasses of np.ndarray, which have more to them (a mask, a file).
  """
  if type(x) is np.ndarray:
    return not x.dtype.hasobject
  return isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.generic)


def encode(tree: Any, name: str, *, allow_pickle: bool = False) -> Encoded:
  """Splits a value into named arrays and a structure for JSON.

  Args:
    tree: the value.
    name: the value's name; those of its arrays begin with it.
    allow_pickle: whether to pickle what cannot be described.

  Raises:
    TypeError: parts of the value cannot be described: names all of them.
    ValueError: the value contains itself.
  """
  encoder = _Encoder(allow_pickle)
  encoded = encoder.walk(tree, name)
  if encoder.refused:
    raise TypeError(
      'A checkpoint cannot hold\n  '
      + '\n  '.join(encoder.refused)
      + f'\nFor each: {_REMEDY}.'
    )
  return Encoded(encoded, encoder.arrays, encoder.pickled)


def decode(
  structure: Any, arrays: Mapping[str, Any], *, allow_pickle: bool = False
) -> Any:
  """Puts a value together again.

  Args:
    structure: of `encode`, perhaps by way of JSON.
    arrays: name -> array. What was a jax.Array comes back as the very object
      here; what was a NumPy array as a writeable one, NumPy scalars as such,
      PRNG keys as typed keys. ShapeDtypeStructs are left abstract.
    allow_pickle: whether to unpickle what was pickled, which may run any code.

  Raises:
    ValueError: the structure is damaged, lacks an array, holds a pickled value
      that may not be unpickled, or names a type that is not imported or is not
      of the kind that it says.
  """
  try:
    return _Decoder(arrays, allow_pickle).walk(structure)
  except RecursionError:
    raise ValueError(
      'The structure in the checkpoint is nested too deeply to be restored.'
    ) from None


def _component(key: Any) -> str:
  for attribute in ('key', 'name', 'idx'):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)


def _unique(name: str, taken: Mapping[str, Any]) -> str:
  unique, count = name, 1
  while unique in taken:
    count += 1
    unique = f'{name}#{count}'
  return unique


def _find(address: str) -> Any:
  """Looks up a class, 'module:qualname', without running or importing any."""
  module_name, _, qualname = address.partition(':')
  module = sys.modules.get(module_name)
  if not isinstance(module, types.ModuleType):
    raise ValueError(
      f'The checkpoint holds {address!r}, but {module_name!r} is not imported:'
      " import it in the experiment's module."
    )
  found: Any = module
  for part in qualname.split('.'):
    if found is not module and not isinstance(found, type):
      found = _MISSING
      break
    # Static, since a module's own __getattr__ may import others.
    found = inspect.getattr_static(found, part, _MISSING)
  if found is _MISSING:
    raise ValueError(
      f'The checkpoint holds {address!r}, but the module {module_name!r} has'
      f' no {qualname!r}: define it there, or import it there in the'
      " experiment's module."
    )
  return found


def _address(cls: type) -> str | None:
  """Returns 'module:qualname' where that finds the very same class."""
  address = f'{cls.__module__}:{cls.__qualname__}'
  try:
    return address if _find(address) is cls else None
  except ValueError:
    return None


def _has_finalizer(cls: type) -> bool:
  return any('__del__' in vars(c) for c in cls.__mro__)


def _kind(cls: type) -> str | None:
  """Returns how instances of a class are described; None: not at all."""
  if issubclass(cls, enum.Enum):  # Its members are found, not made.
    return 'enum'
  if _has_finalizer(cls) or issubclass(cls, functools.partial):
    return None
  if issubclass(cls, tuple) and isinstance(
    inspect.getattr_static(cls, '_fields', None), tuple
  ):
    return 'namedtuple'
  if cls in (dict, list, tuple, type(None), collections.defaultdict):
    return None
  if cls in tree_util._registry:
    return 'node'
  if dataclasses.is_dataclass(cls):
    # A base written in C (dict, Exception) holds more than the fields, and a
    # property in place of a field would run code: 1 << 9 is HEAPTYPE.
    in_python = all(c is object or c.__flags__ & 1 << 9 for c in cls.__mro__)
    attributes = (
      inspect.getattr_static(cls, field.name, None)
      for field in dataclasses.fields(cls)
    )
    if in_python and all(
      isinstance(x, types.MemberDescriptorType)
      or not hasattr(type(x), '__set__')
      for x in attributes
    ):
      return 'dataclass'
  return None


def _field_names(cls: Any, kind: str) -> list[str]:
  if kind == 'namedtuple':
    return list(cls._fields)
  return [field.name for field in dataclasses.fields(cls)]


def _ordered(keys: Iterable[Any]) -> list[Any]:
  """Orders keys as JAX does, where they can be ordered."""
  keys = list(keys)
  try:
    return sorted(keys)
  except TypeError:
    return keys


def _text(data: bytes) -> str:
  return base64.b64encode(data).decode('ascii')


def _dtype_name(dtype: np.dtype) -> str | None:
  # dtype.str keeps the byte order, but is '<V2' for bfloat16.
  for name in (dtype.str, dtype.name):
    try:
      if np.dtype(name) == dtype:
        return name
    except TypeError:
      continue
  return None


def _encode_plain(x: Any) -> Any:
  """Encodes what has no parts; returns _MISSING for everything else."""
  kind = type(x)
  if x is None or kind is bool:
    return x
  if kind is int:
    return x if -(2**63) <= x < 2**63 else {'int': hex(x)}
  if kind is float:
    # Bytes, since a NaN has a sign and a payload.
    return x if math.isfinite(x) else {'float': struct.pack('>d', x).hex()}
  if kind is complex:
    return {'complex': [_encode_plain(x.real), _encode_plain(x.imag)]}
  if kind is str:
    try:
      x.encode()
    except UnicodeEncodeError:  # JSON would join surrogates to a character.
      return {'str': _text(x.encode('utf-8', 'surrogatepass'))}
    return x
  if kind is bytes:
    return {'bytes': _text(x)}
  if isinstance(x, np.dtype) and (name := _dtype_name(x)) is not None:
    return {'dtype': name}
  return _MISSING


def _key_parts(x: Any) -> tuple[Any, jax.ShapeDtypeStruct]:
  """Returns the implementation and the abstract data of PRNG keys."""
  impls = []

  def data_of(keys: jax.Array) -> jax.Array:
    # Within a trace, since key_impl takes no ShapeDtypeStruct.
    impls.append(jax.random.key_impl(keys))
    return jax.random.key_data(keys)

  data = jax.eval_shape(data_of, jax.ShapeDtypeStruct(x.shape, x.dtype))
  return impls[0], jax.ShapeDtypeStruct(
    data.shape, data.dtype, sharding=x.sharding
  )


class _Encoder:
  """Walks one value; collects its arrays and what it must refuse."""

  def __init__(self, allow_pickle: bool):
    self.arrays: dict[str, Any] = {}
    self.pickled: list[str] = []
    self.refused: list[str] = []
    self._allow_pickle = allow_pickle
    self._open: dict[int, str] = {}  # The containers around, by id.
    self._aux = 0  # How many of them are auxiliary data.

  def walk(self, x: Any, name: str) -> Any:
    """Returns the structure of `x`."""
    if is_array(x):
      return self._array(x, name)
    plain = _encode_plain(x)
    if plain is not _MISSING:
      return plain
    if id(x) in self._open:
      raise ValueError(
        f'A checkpoint cannot hold {name!r}: it is the same object as'
        f' {self._open[id(x)]!r}, which contains it. Break the cycle.'
      )
    self._open[id(x)] = name
    try:
      return self._container(x, name)
    finally:
      del self._open[id(x)]

  def _array(self, x: Any, name: str) -> Any:
    name = _unique(name, self.arrays)
    if isinstance(x, np.ndarray | np.generic):
      self.arrays[name] = x
      return {'numpy' if isinstance(x, np.ndarray) else 'scalar': name}
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      self.arrays[name] = x
      return {'jax': name}
    impl, data = _key_parts(x)
    if not isinstance(impl, str):
      return self._refuse(x, name, 'keys of an unregistered implementation')
    abstract = isinstance(x, jax.ShapeDtypeStruct)
    self.arrays[name] = data if abstract else jax.random.key_data(x)
    return {'key': [name, impl]}

  def _all(self, xs: Iterable[Any], name: str) -> list[Any]:
    return [self.walk(x, f'{name}/{i}') for i, x in enumerate(xs)]

  def _pairs(self, x: Mapping[Any, Any], name: str) -> list[list[Any]]:
    # Walked in JAX's order, so that equal names are counted as in
    # `named_leaves`, whatever was inserted first.
    values = {key: self.walk(x[key], f'{name}/{key!s}') for key in _ordered(x)}
    return [[self.walk(key, f'{name}/keys/{key!s}'), values[key]] for key in x]

  def _container(self, x: Any, name: str) -> Any:
    kind = type(x)
    if kind is list:
      return self._all(x, name)
    if kind is tuple:
      return {'tuple': self._all(x, name)}
    if kind is set or kind is frozenset:
      # The order of a set of strings differs from process to process.
      parts = self._all(_ordered(x), name)
      return {kind.__name__: sorted(parts, key=json.dumps)}
    if kind is dict:
      return {'dict': self._pairs(x, name)}
    if kind is collections.defaultdict:
      factory = self._factory(x.default_factory, f'{name}/default_factory')
      return {'defaultdict': [factory, self._pairs(x, name)]}
    if kind is range or kind is slice:
      return {kind.__name__: self._all((x.start, x.stop, x.step), name)}
    if kind is config_dict.ConfigDict or kind is config_dict.FrozenConfigDict:
      return self._config(x, name)
    return self._instance(x, name)

  def _factory(self, factory: Any, name: str) -> Any:
    if factory is None:
      return None
    for address, found in _FACTORIES.items():
      if found is factory:
        return {'ref': address}
    return self._refuse(factory, name, f'not one of {list(_FACTORIES)}')

  def _config(self, x: config_dict.ConfigDict, name: str) -> Any:
    frozen = isinstance(x, config_dict.FrozenConfigDict)
    if frozen:
      x = x.as_configdict()
    options = [x.is_locked, x.is_type_safe, x.convert_dict, x.allow_dotted_keys]
    return {'config': [frozen, options, self._pairs(dict(x.items()), name)]}

  def _instance(self, x: Any, name: str) -> Any:
    cls: Any = type(x)
    kind = _kind(cls)
    if kind is None:
      why = 'its class has a __del__' if _has_finalizer(cls) else ''
      return self._refuse(x, name, why)
    if self._aux and callable(x):
      return self._refuse(x, name, 'a callable in the data of a node')
    address = _address(cls)
    if address is None:
      return self._refuse(x, name, 'its class cannot be found by its name')
    if kind == 'enum':
      if cls.__members__.get(x.name) is not x:
        return self._refuse(x, name, 'no single member of its enum')
      return {'enum': [address, x.name]}
    if kind == 'node':
      children, aux = jax.tree_util.flatten_one_level_with_keys(x)
      if aux is x:  # By jax.tree_util.register_static.
        return self._refuse(x, name, 'registered as static')
      parts = [self.walk(c, f'{name}/{_component(k)}') for k, c in children]
      self._aux += 1
      try:
        return {'node': [address, parts, self.walk(aux, f'{name}/aux')]}
      finally:
        self._aux -= 1
    fields = _field_names(cls, kind)
    unset = [field for field in fields if not hasattr(x, field)]
    # What a cached property holds is computed again.
    extra = [
      key for key in getattr(x, '__dict__', {}) if key not in fields
      and not isinstance(
        inspect.getattr_static(cls, key, None), functools.cached_property
      )
    ]  # fmt: skip
    if unset or extra:
      why = f'fields without a value: {unset}; attributes beside: {extra}'
      return self._refuse(x, name, why)
    values = {f: self.walk(getattr(x, f), f'{name}/{f}') for f in fields}
    return {kind: [address, values]}

  def _refuse(self, x: Any, name: str, why: str = '') -> Any:
    """Pickles the value where that is allowed; else it is an error."""
    if self._allow_pickle:
      try:
        data = pickle.dumps(x)
      except Exception as e:  # An object's own code may raise anything.
        why = f'it cannot be pickled: {type(e).__name__}: {e}'
      else:
        self.pickled.append(name)
        return {'pickle': [name, _text(data)]}
    cls = type(x)
    what = f'{name!r}, a {cls.__module__}.{cls.__qualname__}'
    if callable(x) and hasattr(x, '__qualname__'):
      what += f' {x.__qualname__!r}'
    self.refused.append(f'{what} ({why})' if why else what)
    return None


class _Decoder:
  """Puts one value together; one method for each tag."""

  def __init__(self, arrays: Mapping[str, Any], allow_pickle: bool):
    self._arrays = arrays
    self._allow_pickle = allow_pickle
    self._aux = 0  # How many auxiliary data are around.
    self._tags: dict[str, Callable[[Any], Any]] = {
      'int': lambda x: int(x, 16),
      'float': lambda x: struct.unpack('>d', bytes.fromhex(x))[0],
      'complex': lambda x: complex(*self._all(x, 2)),
      'str': lambda x: _bytes(x).decode('utf-8', 'surrogatepass'),
      'bytes': _bytes,
      'tuple': lambda x: tuple(self._all(x)),
      'set': lambda x: set(self._all(x)),
      'frozenset': lambda x: frozenset(self._all(x)),
      'range': lambda x: range(*self._all(x, 3)),
      'slice': lambda x: slice(*self._all(x, 3)),
      'dict': self._pairs,
      'defaultdict': self._defaultdict,
      'dtype': lambda x: np.dtype(str(x)),
      'jax': self._array,
      'numpy': self._numpy,
      'scalar': lambda x: self._numpy(x)[()],
      'key': self._key,
      'namedtuple': self._namedtuple,
      'dataclass': self._dataclass,
      'enum': self._enum,
      'node': self._node,
      'config': self._config,
      'ref': self._ref,
      'pickle': self._pickle,
    }

  def walk(self, structure: Any) -> Any:
    """Returns the value of a structure."""
    if structure is None or isinstance(structure, bool | int | float | str):
      return structure
    if isinstance(structure, list):
      return self._all(structure)
    if not isinstance(structure, dict) or len(structure) != 1:
      raise ValueError(
        'The structure in the checkpoint is damaged: expected an object with'
        f' one tag, got {str(structure)[:80]!r}.'
      )
    ((tag, body),) = structure.items()
    if tag not in self._tags:
      raise ValueError(
        f'The structure in the checkpoint has the tag {str(tag)!r}; this'
        f' version knows {sorted(self._tags)}.'
      )
    try:
      return self._tags[tag](body)
    except (ValueError, MemoryError, RecursionError):
      raise
    except Exception as e:  # A node's own code may raise anything.
      raise ValueError(
        f'The checkpoint holds a {tag!r} that cannot be restored from'
        f' {str(body)[:80]!r}: {type(e).__name__}: {str(e)!r}'
      ) from e

  def _all(self, xs: list[Any], count: int | None = None) -> list[Any]:
    if not isinstance(xs, list) or count not in (None, len(xs)):
      raise TypeError(f'expected a list of {count or "any"} values')
    return [self.walk(x) for x in xs]

  def _pairs(self, pairs: list[Any]) -> dict[Any, Any]:
    return {self.walk(key): self.walk(value) for key, value in pairs}

  def _defaultdict(self, body: list[Any]) -> Any:
    factory, pairs = body
    found = None
    if isinstance(factory, dict) and list(factory) == ['pickle']:
      found = self._pickle(factory['pickle'])
    elif factory is not None:
      address = factory.get('ref') if isinstance(factory, dict) else None
      if address not in _FACTORIES:
        raise ValueError(
          'The checkpoint holds a defaultdict with the factory'
          f' {str(factory)[:80]!r}; expected one of {list(_FACTORIES)}.'
        )
      found = _FACTORIES[address]
    return collections.defaultdict(found, self._pairs(pairs))

  def _array(self, name: str) -> Any:
    if name not in self._arrays:
      raise ValueError(
        f'The checkpoint lacks the array {name!r}; it holds'
        f' {sorted(self._arrays)}.'
      )
    return self._arrays[name]

  def _numpy(self, name: str) -> Any:
    array = self._array(name)
    if isinstance(array, jax.ShapeDtypeStruct):
      return array
    # A copy where NumPy only looks into memory of JAX: experiments count in
    # their NumPy arrays in place.
    return np.require(np.asarray(array), requirements='W')

  def _key(self, body: list[str]) -> Any:
    name, impl = body
    data = self._array(name)
    wrap = functools.partial(jax.random.wrap_key_data, impl=str(impl))
    if not isinstance(data, jax.ShapeDtypeStruct):
      return wrap(data)
    key = jax.eval_shape(wrap, data)
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=data.sharding)

  def _class(self, address: str, kind: str) -> Any:
    found = _find(address)
    if not isinstance(found, type) or _kind(found) != kind:
      raise ValueError(
        f'The checkpoint holds a {kind!r} of type {address!r}, but that is'
        f' none: the class has changed, or the file has.'
      )
    if self._aux and any('__call__' in vars(c) for c in found.__mro__):
      raise ValueError(
        f'The checkpoint holds a {address!r} in the data of a node; callables'
        ' are not restored there.'
      )
    return found

  def _fields(self, body: list[Any], kind: str) -> tuple[Any, dict[str, Any]]:
    address, values = body
    cls = self._class(address, kind)
    expected = _field_names(cls, kind)
    if sorted(values) != sorted(expected):
      raise ValueError(
        f'The checkpoint holds a {address!r} with the fields'
        f' {sorted(values)}; the class has {sorted(expected)}.'
      )
    return cls, {name: self.walk(values[name]) for name in expected}

  def _namedtuple(self, body: list[Any]) -> Any:
    cls, values = self._fields(body, 'namedtuple')
    return tuple.__new__(cls, values.values())

  def _dataclass(self, body: list[Any]) -> Any:
    cls, values = self._fields(body, 'dataclass')
    # Neither __init__ nor a frozen class's __setattr__ runs.
    instance = object.__new__(cls)
    for name, value in values.items():
      object.__setattr__(instance, name, value)
    return instance

  def _enum(self, body: list[str]) -> Any:
    address, name = body
    members = self._class(address, 'enum').__members__
    if name not in members:
      raise ValueError(
        f'The checkpoint holds the member {name!r} of {address!r}, which has'
        f' {list(members)}.'
      )
    return members[name]

  def _node(self, body: list[Any]) -> Any:
    address, children, aux = body
    cls = self._class(address, 'node')
    children = self._all(children)
    self._aux += 1
    data = self.walk(aux)
    self._aux -= 1
    # Not with a PyTreeDef: its C++ code takes the data of a registered
    # dataclass for a tuple of the right length, and crashes where it is not.
    return tree_util._registry[cls].from_iter(data, tuple(children))

  def _config(self, body: list[Any]) -> Any:
    frozen, (locked, type_safe, convert, dotted), pairs = body
    config = config_dict.ConfigDict(
      self._pairs(pairs),
      type_safe=type_safe,
      convert_dict=convert,
      allow_dotted_keys=dotted,
    )
    if locked:
      config.lock()
    if frozen:
      return config_dict.FrozenConfigDict(config, type_safe=type_safe)
    return config

  def _ref(self, address: str) -> Any:
    raise ValueError(
      f'The checkpoint refers to the function or class {str(address)[:80]!r},'
      ' as earlier versions stored it; none is looked up by a name found in a'
      ' file. Keep it out of the saved attributes, and begin anew from the'
      ' arrays with config.restore_from and config.restore_rules.'
    )

  def _pickle(self, body: list[str]) -> Any:
    name, data = body
    if not self._allow_pickle:
      raise ValueError(
        f'The checkpoint holds {name!r} pickled, and unpickling can run any'
        ' code. If you trust who wrote it, set'
        ' config.checkpoint_allow_pickle = True.'
      )
    logging.warning(
      'Unpickling %r, as config.checkpoint_allow_pickle permits.', name
    )
    return pickle.loads(_bytes(data))


def _bytes(text: str) -> bytes:
  try:
    return base64.b64decode(text, validate=True)
  except binascii.Error as e:
    raise ValueError(f'The checkpoint holds damaged base64: {e}.') from e
