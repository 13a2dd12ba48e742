"""Hyperparameters: Fiddle configs that are declared as dataclasses.

A class that derives from `Configurable` declares its hyperparameters in an
inner class `HParams`, which inherits the fields of the parent class's:

    class Linear(base_layer.BaseLayer):

      class HParams(BaseHParams):
        input_dims: int = 0
        output_dims: int = 0

    layer = Linear.HParams(input_dims=3, output_dims=4).Instantiate()

or as fields of the class itself, of which `HParams` is then made:

    class Linear(base_layer.BaseLayer):
      input_dims: int = 0
      output_dims: int = 0

    layer = pax_fiddle.Config(Linear, input_dims=3, output_dims=4).Instantiate()

Either way `Linear.HParams(...)` is a Fiddle config: Fiddle's tools print,
compare and change it. `fdl.build` makes the object as `Instantiate` does, and
a config that is used twice in it then stands for one object.

Names and behaviour are those of Praxis (Google, 2022).
"""

import abc
import collections
from collections.abc import Iterable
import copy
import dataclasses
import enum
import functools
import re
from typing import Any, ClassVar, Self, TypeVar

import fiddle as fdl
from fiddle import history
import numpy as np

from jaxline import errors

C = TypeVar('C')


def nearest_names(regex: str, names: Iterable[str]) -> list[str]:
  """Returns the names that are most similar to a regular expression, 5 at most.

  Its special characters are ignored: they stand for any part of a name.
  """
  literal = re.sub(r'\\.|[^\w/]', '', regex)
  return errors.nearest(literal, names, n=5, cutoff=0.0)


def sub_config_field(cls: type['BaseHParams'] | None) -> Any:
  """Declares a field that holds hyperparameters of another class.

  Args:
    cls: their class, such as `Linear.HParams`; None is a field that is None
      unless it is set.

  Returns:
    What a dataclass takes for a field.
  """
  if cls is None:
    return dataclasses.field(default=None)
  if not (isinstance(cls, type) and issubclass(cls, BaseHParams)):
    raise TypeError(
      f'sub_config_field expects a class of hyperparameters, such as'
      f' Linear.HParams; got {cls!r}. template_field takes Linear itself.'
    )
  return dataclasses.field(default_factory=cls)


class BaseHParams(fdl.Config):
  """Hyperparameters: a Fiddle config, all of whose fields have names.

  Every subclass is made a dataclass. It may add fields; to give one of a
  parent's another default (or type), it must say so:
  `_attribute_overrides = ('input_dims',)`.

  Attributes:
    is_frozen: whether nothing can be changed any more.
    is_shared: whether this very config stands for one object, wherever it is
      used; see `fdl.build`.
  """

  is_frozen: ClassVar[bool] = False
  is_shared: ClassVar[bool] = False
  _attribute_overrides: ClassVar[tuple[str, ...]] = ()
  _owner: ClassVar[type | None] = None  # See `cls`.
  _names: ClassVar[tuple[str, ...]] = ()

  def __init_subclass__(cls) -> None:
    super().__init_subclass__()
    _check_fields(cls)
    dataclasses.dataclass(kw_only=True, eq=False, repr=False)(cls)
    cls._names = tuple(field.name for field in dataclasses.fields(cls))
    # Values are Fiddle's arguments, which an attribute of the class would hide.
    for name in _annotated(cls).keys() & vars(cls).keys():
      delattr(cls, name)

  def __new__(cls, *unused: Any, **kwargs: Any) -> Self:
    # Before the dataclass's own __init__, whose message names no neighbour.
    for name in kwargs:
      _check_name(cls, name)
    # What Fiddle's __init__ does, but for reading all annotations for tags.
    self = super().__new__(cls)
    self.__init_callable__(cls)
    self.__dict__['__argument_history__'] = history.History()
    self.__dict__['__argument_tags__'] = collections.defaultdict(set)
    return self

  def __init_callable__(self, unused: Any) -> None:
    # The fields are this class's; Fiddle's selectors and `fdl.get_callable`
    # want to know what is made of them.
    super().__init_callable__(type(self))
    self.__dict__['__fn_or_cls__'] = self._owner or type(self)

  @classmethod
  def names(cls) -> list[str]:
    """Returns the names of the fields."""
    return list(cls._names)

  def items(self) -> list[tuple[str, Any]]:
    """Returns the fields' names and values."""
    return [(name, self.__arguments__[name]) for name in self._names]

  def __getattr__(self, name: str) -> Any:
    # Names with underscores are asked for by Python itself.
    if name.startswith('_'):
      raise AttributeError(name)
    _check_name(type(self), name)
    return self.__arguments__[name]

  def __setattr__(self, name: str, value: Any) -> None:
    _check_name(type(self), name)
    if self.is_frozen:
      raise AttributeError(
        f'{type(self).__qualname__} is frozen; cannot set {name!r} to'
        f' {value!r}. clone() gives a copy that can be changed.'
      )
    super().__setattr__(name, value)

  def __delattr__(self, name: str) -> None:
    raise AttributeError(f'A field cannot be deleted; got {name!r}.')

  def __eq__(self, other: Any) -> bool:
    return type(self) is type(other) and self.items() == other.items()

  def __copy__(self) -> Self:
    new = type(self).__new__(type(self))
    new.__arguments__.update(self.__arguments__)
    return new

  def __deepcopy__(self, memo: dict[int, Any]) -> Self:
    new = memo[id(self)] = type(self).__new__(type(self))
    for name, value in self.items():
      new.__arguments__[name] = copy.deepcopy(value, memo)
    new.__dict__['is_shared'] = self.is_shared
    return new

  def __repr__(self) -> str:
    inner = ', '.join(f'{name}={value!r}' for name, value in self.items())
    return f'{type(self).__qualname__}({inner})'

  @property
  def cls(self) -> Any:
    """What `Instantiate` makes; None for hyperparameters of nothing."""
    return self._owner

  def freeze(self) -> Self:
    """Makes these, and all nested hyperparameters, refuse changes."""
    self.__dict__['is_frozen'] = True
    for nested in _nested(list(self.__arguments__.values())):
      nested.freeze()
    return self

  def clone(self) -> Self:
    """Returns a deep copy that can be changed, and its nested ones too.

    What is in it twice is in the copy twice. If these were one object with
    others, the copy is not.
    """
    new = copy.deepcopy(self)
    new.__dict__['is_shared'] = False
    return new

  def set(self, **kwargs: Any) -> Self:
    """Sets fields, and returns itself."""
    for name, value in kwargs.items():
      setattr(self, name, value)
    return self

  def copy_fields_from(
    self, source: 'BaseHParams', missing_fields_in_self: Any = ()
  ) -> Self:
    """Copies all fields of others into these, deeply.

    Args:
      source: hyperparameters of another class.
      missing_fields_in_self: fields of `source` that these may lack.

    Returns:
      Itself.

    Raises:
      AttributeError: `source` has a field that these lack, or lacks one that
        they have.
    """
    mine, theirs = set(self.names()), set(source.names())
    lacking = sorted(theirs - mine - set(missing_fields_in_self))
    if lacking or mine - theirs:
      raise AttributeError(
        f'{type(self).__qualname__} has not the fields {lacking} of'
        f' {type(source).__qualname__}, and of its own {sorted(mine - theirs)},'
        ' which would stay as they are. List the former in'
        ' missing_fields_in_self to leave them out; set() copies single fields.'
      )
    # As one, so that what is in it twice is one here as well.
    copied = source.clone().items()
    return self.set(**{n: v for n, v in copied if n in mine})

  def Instantiate(self, **kwargs: Any) -> Any:
    """Makes the object that these describe.

    Args:
      **kwargs: fields that shall differ.
    """
    if self._owner is None:
      raise TypeError(
        f'{type(self).__qualname__} belongs to no class that could be made;'
        ' HParams within a class that derives from Configurable do.'
      )
    return self._owner(copy.deepcopy(self).set(**kwargs).freeze())

  @classmethod
  def config(cls, **kwargs: Any) -> Self:
    """Returns the same as the class called: a Fiddle config."""
    return cls(**kwargs)

  @classmethod
  def partial(cls, **kwargs: Any) -> fdl.Partial:
    """Returns a Fiddle partial; built, it is a function of the other fields."""
    return _Partial(cls, **cls(**kwargs).__arguments__)

  def __build__(self, /, **built: Any) -> Any:
    # Fiddle builds from the leaves on; but an object wants the hyperparameters
    # of its parts, which it completes.
    new = copy.deepcopy(self)
    for name, value in built.items():
      if not _nested(getattr(self, name)):
        setattr(new, name, value)
    _mark_shared(new, {})
    return new if self._owner is None else new.Instantiate()

  def to_text(self) -> str:
    """Returns a line for each value, `a.b.c : value`, in order of names."""
    return '\n'.join(
      f'{path} : {text}' if path else text
      for path, text in sorted(_lines(self))
    )


class _Partial(fdl.Partial):
  """Builds a function that makes the object."""

  def __build__(self, /, **unused: Any) -> Any:
    hparams = self.__fn_or_cls__(**self.__arguments__)
    return lambda **kwargs: fdl.build(hparams.clone().set(**kwargs))


def _mark_shared(parent: BaseHParams, seen: dict[int, BaseHParams]) -> None:
  """Marks what is in hyperparameters more than once as one object."""
  for nested in _nested(list(parent.__arguments__.values())):
    if id(nested) in seen:
      nested.__dict__['is_shared'] = True
    else:
      seen[id(nested)] = nested
      _mark_shared(nested, seen)


def _check_name(cls: type[BaseHParams], name: str) -> None:
  if name not in cls._names:
    names = sorted(cls._names)
    raise AttributeError(
      f'{cls.__qualname__} has no field {name!r}.'
      f'{errors.did_you_mean(name, names)} Its fields are {names}.'
    )


def _annotated(cls: type) -> dict[str, Any]:
  """Returns name -> type of the fields that a class itself declares."""
  return {
    name: kind
    for name, kind in vars(cls).get('__annotations__', {}).items()
    if not name.startswith('_') and 'ClassVar' not in str(kind)
  }


def _check_fields(cls: type[BaseHParams]) -> None:
  """Refuses a class that declares what is no field, or a parent's field."""
  own, inherited = _annotated(cls), dict[str, dataclasses.Field]()
  twice = set()
  for parent in cls.__bases__:
    for name, field in vars(parent).get('__dataclass_fields__', {}).items():
      if inherited.setdefault(name, field) is not field or name in own:
        twice.add(name)
  meant = vars(cls).get('_attribute_overrides', ())
  if wrong := sorted(twice.difference(meant)):
    raise AttributeError(
      f'{cls.__qualname__} redefines {wrong} of a parent. If that is meant,'
      f' add `_attribute_overrides = {tuple(wrong)}`.'
    )
  # Within a class, HParams get the parent's fields only later.
  wrong = sorted(set(meant) - inherited.keys())
  if wrong and cls.__bases__ != (BaseHParams,):
    raise AttributeError(
      f'{cls.__qualname__} overrides {wrong}, which no parent has.'
      + errors.did_you_mean(wrong[0], inherited)
    )
  if taken := sorted(own.keys() & dir(BaseHParams)):
    raise AttributeError(
      f'{cls.__qualname__} cannot have a field {taken[0]!r}: all HParams have'
      ' something else of this name.'
    )
  for name, value in vars(cls).items():
    is_value = not callable(value) and not hasattr(value, '__get__')
    if is_value and not name.startswith('_') and name not in own:
      raise AttributeError(
        f'{cls.__qualname__}.{name} = ... has no type and would be no field.'
        f' Write `{name}: type = value`; where a parent has it, put {name!r}'
        ' into _attribute_overrides as well.'
      )


def _nested(value: Any) -> list[BaseHParams]:
  if isinstance(value, BaseHParams):
    return [value]
  if isinstance(value, dict):
    value = list(value.values())
  if isinstance(value, list | tuple):
    return [nested for item in value for nested in _nested(item)]
  return []


def _lines(value: Any) -> list[tuple[str, str]]:
  """Returns (path, text) of all values within one."""
  # An object that was built by Fiddle stands for its hyperparameters.
  if isinstance(value, Configurable):
    value = value.hparams
  lines, inside = [], None
  if isinstance(value, BaseHParams):
    lines = [('type', _qualified(value.cls or type(value)))]
    inside = value.items()
  elif isinstance(value, dict):
    inside = list(value.items())
  elif isinstance(value, list | tuple) and _nested(value):
    inside = [(f'[{i}]', item) for i, item in enumerate(value)]
  if inside is None:
    return [('', _text(value))]
  return lines + [
    (f'{name}.{path}' if path and path[0] != '[' else f'{name}{path}', text)
    for name, item in inside
    for path, text in _lines(item)
  ]


def _text(value: Any) -> str:
  if isinstance(value, enum.Enum):
    return str(value)
  # A numpy or JAX type; jnp.bfloat16 is no class.
  if isinstance(value, np.dtype) or (
    callable(value) and hasattr(value, 'dtype')
  ):
    return np.dtype(value).name
  if isinstance(value, functools.partial):
    args = [_text(value.func), *(_text(arg) for arg in value.args)]
    args += [f'{name}={_text(arg)}' for name, arg in value.keywords.items()]
    return f'partial({", ".join(args)})'
  if hasattr(value, '__qualname__'):  # A class or a function.
    return _qualified(value)
  return repr(value)


def _qualified(value: Any) -> str:
  return f'{value.__module__}.{value.__qualname__}'


class Configurable(abc.ABC):
  """A class whose objects are made of hyperparameters.

  Attributes:
    HParams: the class of its hyperparameters.
    hparams: those of the object, frozen; each is an attribute of the object as
      well, unless that has another attribute of the name.
  """

  class HParams(BaseHParams):
    """Hyperparameters of nothing yet."""

  hparams: Any

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    parents = [b.HParams for b in cls.__bases__ if issubclass(b, Configurable)]
    body = cls.__dict__.get('HParams')
    if body is None:
      body = _fields_as_hparams(cls, parents)
    elif both := list(_annotated(cls)):
      raise TypeError(
        f'{cls.__qualname__} has the fields {both} and a class HParams;'
        ' expected all of them in one of the two places.'
      )
    # One whose fields another one inherits adds nothing.
    bases = [
      base
      for base in dict.fromkeys([body, *parents])
      if not any(
        base is not o and issubclass(o, base) for o in (body, *parents)
      )
    ]
    cls.HParams = type(
      'HParams',
      tuple(bases),
      {
        '__doc__': body.__doc__ or parents[0].__doc__,
        '__module__': cls.__module__,
        '__qualname__': f'{cls.__qualname__}.HParams',
        '_attribute_overrides': body._attribute_overrides,
        '_owner': cls,
      },
    )

  def __init__(self, hparams: Any):
    self.hparams = hparams

  def __getattr__(self, name: str) -> Any:
    if hasattr(type(self), name):
      # A property has raised an AttributeError: it says what is missing.
      return object.__getattribute__(self, name)
    hparams = vars(self).get('hparams')
    if hparams is not None and name in hparams.names():
      return getattr(hparams, name)
    raise AttributeError(f'{type(self).__name__!r} has no attribute {name!r}.')


Configurable.HParams._owner = Configurable


def _fields_as_hparams(
  cls: type[Configurable], parents: list[type[BaseHParams]]
) -> type[BaseHParams]:
  """Returns `HParams` with the fields that stand on a class itself.

  They are taken off the class: there `__getattr__` finds an object's values.
  """
  own = _annotated(cls)
  inherited = {name for parent in parents for name in parent._names}
  namespace: dict[str, Any] = {
    '__doc__': cls.__doc__,
    '__qualname__': cls.__qualname__,
    '__annotations__': own,
  }
  for name, value in list(vars(cls).items()):
    is_value = name in inherited and not hasattr(value, '__get__')
    if name in own or is_value:
      namespace[name] = value
      delattr(cls, name)
  if taken := [n for n in own if n not in inherited and hasattr(cls, n)]:
    raise AttributeError(
      f'{cls.__qualname__} cannot have a field {taken[0]!r}: a parent has'
      ' something else of this name.'
    )
  # On the class, unlike in an inner class, a field may be declared again.
  namespace['_attribute_overrides'] = tuple(own.keys() & inherited)
  return type('HParams', (BaseHParams,), namespace)


def instantiate(value: Any, kind: type[C], where: str) -> C:
  """Makes the object of hyperparameters; an object stays what it is.

  Args:
    value: hyperparameters, or what was made of such.
    kind: what it must be.
    where: how messages call it.

  Raises:
    TypeError: it is something else.
  """
  made = value.Instantiate() if isinstance(value, BaseHParams) else value
  if not isinstance(made, kind):
    module = kind.__module__.rpartition('.')[2]
    raise TypeError(
      f'{where} is {value!r}; expected the HParams of a'
      f' {module}.{kind.__name__}.'
    )
  return made
