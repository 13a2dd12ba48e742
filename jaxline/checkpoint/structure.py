"""Encodes a tree for a checkpoint: arrays by name, everything else as JSON.

docs/reference/checkpoint_files.md lists the forms. An object that occurs twice
is stored, and restored, as two objects.

A file can be edited, so `decode` imports nothing, looks up no function and
calls no class that the file names. It finds classes only in imported modules,
and checks that each is of the kind that its tag states. It runs only code of
these classes: the function that a type registered with JAX to build its nodes,
and the hash function of a dict's keys.
"""

import base64
from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import functools
import inspect
import pickle
import sys
from typing import Any

import jax
from jax._src import tree_util  # The registry of nodes has no public name.
import numpy as np

from jaxline.base import trees
from jaxline.checkpoint import arrays as arrays_lib
from jaxline.run_directory import store as store_lib


def is_array(x: Any) -> bool:
  """Returns whether a value is an array, or a jax.ShapeDtypeStruct of one.

  Arrays of strings, dates or objects do not count; neither do subclasses of
  np.ndarray, which hold more than their elements.
  """
  if type(x) is np.ndarray or isinstance(x, np.generic):
    return arrays_lib.can_store(x)
  return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def encode(
  x: Any,
  name: str,
  arrays: dict[str, Any],
  *,
  allow_pickle: bool = False,
  nodes: dict[str, Any] | None = None,
) -> Any:
  """Returns the description of a value, as JSON.

  Args:
    x: the value.
    name: the name of the value, which prefixes the names of its arrays.
    arrays: receives the arrays, not copied; random keys as their uint32 data.
    allow_pickle: whether to pickle values that have no description.
    nodes: receives, by name, the pytree nodes whose class or auxiliary data
      cannot be described, but whose children can. `decode` takes the rest from
      a live value. None rejects such nodes.

  Raises:
    TypeError: a part of the value has no description; the message names it.
  """
  if x is None or type(x) in (bool, int, float, str):
    return x

  def walk(y: Any, key: str) -> Any:
    inner = f'{name}/{key}'
    return encode(y, inner, arrays, allow_pickle=allow_pickle, nodes=nodes)

  def put(x: Any) -> str:
    unique = trees.unique_name(name, arrays)
    arrays[unique] = x
    return unique

  cls, why = type(x), ''
  if cls in (list, tuple):
    each = [walk(y, str(i)) for i, y in enumerate(x)]
    return each if cls is list else {'tuple': each}
  if cls is dict:
    ordered = list(x)
    with contextlib.suppress(TypeError):
      # Use JAX's order, in which `named_leaves` numbers equal names.
      ordered = sorted(x)
    values = {key: walk(x[key], str(key)) for key in ordered}
    return {'dict': [[walk(key, f'keys/{key!s}'), values[key]] for key in x]}
  if cls is complex:
    return {'complex': [x.real, x.imag]}
  if cls is bytes:
    return {'bytes': base64.b64encode(x).decode('ascii')}
  if isinstance(x, jax.Array):
    if arrays_lib.is_key(x):
      data = put(jax.random.key_data(x))
      return {'key': [data, str(jax.random.key_impl(x))]}
    return {'jax': put(x)}
  if is_array(x) and cls is not jax.ShapeDtypeStruct:
    return {'numpy' if cls is np.ndarray else 'scalar': put(x)}
  if cls is jax.tree_util.PyTreeDef:
    return {'treedef': walk(x.unflatten(range(x.num_leaves)), 'tree')}
  kind, address = _kind(cls), f'{cls.__module__}:{cls.__qualname__}'
  is_found = _find(address) is cls
  if kind == 'node' or (kind == 'namedtuple' and not is_found):
    children, one_level = jax.tree_util.tree_flatten_with_path(
      x, is_leaf=lambda y: y is not x
    )
    keys = [trees.name_of(path) for path, _ in children]
    parts = [walk(y, key) for key, (_, y) in zip(keys, children, strict=True)]
    aux = jax.tree_util.flatten_one_level_with_keys(x)[1]
    if is_found and aux is not x:
      taken = len(arrays)
      try:
        return {'node': [address, parts, walk(aux, 'aux')]}
      except Exception:  # Unflattening a PyTreeDef may raise anything.
        if nodes is None:
          raise
        for key in [*arrays][taken:]:
          del arrays[key]
    if nodes is not None:
      unique = trees.unique_name(name, nodes)
      nodes[unique] = one_level, [address, keys]
      return {'live': [unique, [address, keys], parts]}
    why = ' (it is registered as static)'
  if kind is not None and not is_found:
    why = ' (its class cannot be found by its name)'
  elif kind in ('namedtuple', 'dataclass'):
    fields = _fields(cls)
    if extra := [key for key in _vars_of(x) if key not in fields]:
      why = f' (it has attributes that are not fields: {extra})'
    else:
      return {kind: [address, {f: walk(getattr(x, f), f) for f in fields}]}
  if allow_pickle:
    data = base64.b64encode(pickle.dumps(x)).decode('ascii')
    return {'pickle': [name, data]}
  raise TypeError(
    f'A checkpoint cannot hold {name!r}, a {cls.__module__}.{cls.__qualname__}'
    f'{why}. Keep it out of CHECKPOINT_ATTRS / NON_BROADCAST_CHECKPOINT_ATTRS,'
    ' turn it into arrays and plain values, or set'
    ' config.checkpoint_allow_pickle = True.'
  )


def decode(
  structure: Any,
  arrays: Mapping[str, Any],
  *,
  allow_pickle: bool = False,
  on_host: bool = False,
  nodes: Callable[[], Mapping[str, Any]] = dict,
) -> Any:
  """Rebuilds a value from its description.

  Args:
    structure: the description.
    arrays: name -> array. A returned NumPy array is writeable.
    allow_pickle: whether to unpickle, which may run any code.
    on_host: whether an array that was saved as a jax.Array may stay as given;
      otherwise it becomes a jax.Array on the default device.
    nodes: returns the nodes of the live value (see `encode`). It is called only
      if the value has such nodes.

  Raises:
    store_lib.RefusedError: a part cannot, or must not, be restored.
  """
  if structure is None or isinstance(structure, bool | int | float | str):
    return structure
  walk: Any = functools.partial(
    decode,
    arrays=arrays,
    allow_pickle=allow_pickle,
    on_host=on_host,
    nodes=nodes,
  )
  if isinstance(structure, list):
    return [walk(x) for x in structure]
  try:
    ((tag, body),) = structure.items()
    match tag:
      case 'tuple':
        return tuple(walk(body))
      case 'dict':
        return {walk(key): walk(value) for key, value in body}
      case 'complex':
        return complex(*body)
      case 'bytes':
        return base64.b64decode(body)
      case 'jax':
        return arrays[body] if on_host else jax.numpy.asarray(arrays[body])
      case 'numpy':
        # This copies a read-only view of JAX's memory: experiments may write.
        return np.require(arrays[body], requirements='W')
      case 'scalar':
        return np.asarray(arrays[body])[()]
      case 'key':
        return jax.random.wrap_key_data(arrays[body[0]], impl=str(body[1]))
      case 'pickle' if allow_pickle:
        return pickle.loads(base64.b64decode(body[1]))
      case 'pickle':
        raise store_lib.RefusedError(
          f'The checkpoint holds {body[0]!r} as a pickle, and unpickling can'
          ' run any code. If you trust its author, set'
          ' config.checkpoint_allow_pickle = True'
        )
      case 'namedtuple' | 'dataclass' | 'node':
        return _instance(tag, body, walk)
      case 'treedef':
        return jax.tree.structure(walk(body))
      case 'live':
        name, kind, parts = body
        one_level, live = nodes().get(name, (None, 'no such node'))
        if live != kind:
          raise store_lib.RefusedError(
            f'The checkpoint holds {name!r}, a node {kind} whose static data'
            f' is not in the file; the experiment has {live} in its place.'
            " Build the same structure in the experiment's constructor"
          )
        return one_level.unflatten(walk(parts))
    raise ValueError('no such tag')
  except (store_lib.RefusedError, MemoryError, RecursionError):
    raise
  except Exception as e:  # A node's code may raise anything.
    raise store_lib.RefusedError(
      f'The checkpoint holds {str(structure)[:80]!r}, which cannot be restored:'
      f' {type(e).__name__}: {e}'
    ) from e


def _instance(tag: str, body: list[Any], walk: Any) -> Any:
  """Returns an instance of the class that a body names."""
  address = body[0]
  if (cls := _find(address)) is None:
    module, _, qualname = address.partition(':')
    raise store_lib.RefusedError(
      f'The checkpoint holds {address!r}, but no imported module has such a'
      f" class. Import {module!r} in the experiment's module, or define"
      f' {qualname!r} in it'
    )
  if _kind(cls) != tag:
    raise TypeError(f'{address} is not (or no longer) a {tag}')
  if tag == 'node':
    _, children, aux = body
    # Do not use a PyTreeDef: its C++ code assumes that the data of a registered
    # dataclass is a tuple of the right length, and crashes if it is not.
    return tree_util._registry[cls].from_iter(walk(aux), tuple(walk(children)))
  if sorted(body[1]) != sorted(fields := _fields(cls)):
    raise TypeError(f'{address} has the fields {sorted(fields)}')
  values = {name: walk(body[1][name]) for name in fields}
  if tag == 'namedtuple':
    return tuple.__new__(cls, values.values())
  # This runs neither __init__ nor the __setattr__ of a frozen class.
  instance = object.__new__(cls)
  for name, value in values.items():
    object.__setattr__(instance, name, value)
  return instance


def _find(address: str) -> Any:
  """Returns the class 'module:qualname' of an imported module, or None."""
  module, _, qualname = address.partition(':')
  found: Any = sys.modules.get(module)
  for part in qualname.split('.'):
    # Look up statically: a module's __getattr__ may import modules.
    found = inspect.getattr_static(found, part, None)
    if not isinstance(found, type):
      return None
  return found


def _kind(cls: type) -> str | None:
  """Returns the tag of a class's instances; None means no description."""
  if issubclass(cls, tuple) and hasattr(cls, '_fields'):
    return 'namedtuple'
  if cls in tree_util._registry:
    return 'node'
  # A base class written in C (dict, Exception) holds more than the fields.
  is_plain = dataclasses.is_dataclass(cls) and cls.__new__ is object.__new__
  return 'dataclass' if is_plain else None


def _vars_of(x: Any) -> list[str]:
  """Returns the names of an instance's attributes, except cached properties."""
  return [
    key
    for key in getattr(x, '__dict__', {})
    if not isinstance(
      inspect.getattr_static(type(x), key, None), functools.cached_property
    )
  ]


def _fields(cls: Any) -> list[str]:
  if issubclass(cls, tuple):
    return list(cls._fields)
  return [field.name for field in dataclasses.fields(cls)]
