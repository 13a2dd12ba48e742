"""Hyperparameters: Fiddle configs that are declared as dataclasses.

A subclass of `Configurable` declares its hyperparameters in an inner class
`HParams`, which inherits the fields of the parent's `HParams`:

    class Linear(base_layer.BaseLayer):

      class HParams(BaseHParams):
        input_dims: int = 0
        output_dims: int = 0

    layer = Linear.HParams(input_dims=3, output_dims=4).Instantiate()

or as fields of the class itself, from which `HParams` is then generated:

    class Linear(base_layer.BaseLayer):
      input_dims: int = 0
      output_dims: int = 0

    layer = pax_fiddle.Config(Linear, input_dims=3, output_dims=4).Instantiate()

Either way `Linear.HParams(...)` is a Fiddle config, which Fiddle's tools can
print, compare and change. `fdl.build` makes the object as `Instantiate` does,
except that a config used twice within it builds one shared object.

Names and behavior follow Praxis (Google, 2022).
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import copy
import dataclasses
import enum
import re
import sys
from typing import Any, ClassVar, Self, TypeVar

import fiddle as fdl
from fiddle import daglish
from fiddle import printing
import numpy as np

from jaxline import errors
from jaxline.base import keys

C = TypeVar('C')

# The end of messages about a name that Pax may have.
LACKS = 'docs/reference/from_pax.md lists what this port lacks: "Missing".'


def refuse_names_of_pax(module: str) -> Callable[[str], Any]:
  """Returns a `__getattr__` that explains the names the module lacks."""

  def refuse(name: str) -> Any:
    hint = errors.did_you_mean(name, vars(sys.modules[module]))
    raise AttributeError(f'{module} has no {name!r}.{hint} {LACKS}')

  return refuse


def nearest_names(regex: str, names: Iterable[str]) -> list[str]:
  """Returns the names most similar to a regular expression, at most five.

  Special characters of the expression are ignored.
  """
  literal = re.sub(r'\\.|[^\w/]', '', regex)
  return errors.nearest(literal, names, n=5, cutoff=0.0)


def sub_config_field(template: Any) -> Any:
  """Declares a field with hyperparameters, which are created for each owner.

  The template is a `BaseHParams` class, a `Configurable` class, or a function
  that returns hyperparameters. With None, the field's default is None.
  """
  if template is None:
    return dataclasses.field(default=None)
  if isinstance(template, type) and issubclass(template, Configurable):
    template = template.HParams
  return dataclasses.field(default_factory=template)


class BaseHParams(fdl.Config):
  """Hyperparameters: a Fiddle config with a fixed set of named fields.

  Every subclass becomes a dataclass. It may add fields. To change the default
  or the type of an inherited field, a subclass lists it:
  `_attribute_overrides = ('input_dims',)`.
  """

  is_frozen: ClassVar[bool] = False  # Whether the fields are read-only.
  # Whether all uses of this config object stand for one shared object; set by
  # `fdl.build`.
  is_shared: ClassVar[bool] = False
  # Class that `Instantiate` makes, or None for plain hyperparameters.
  cls: ClassVar[Any] = None
  _attribute_overrides: ClassVar[tuple[str, ...]] = ()
  _names: ClassVar[tuple[str, ...]] = ()

  def __init_subclass__(cls) -> None:
    super().__init_subclass__()
    _check_fields(cls)
    dataclasses.dataclass(kw_only=True, eq=False, repr=False)(cls)
    cls._names = tuple(field.name for field in dataclasses.fields(cls))
    # Fiddle stores the values as arguments. A class attribute would hide them.
    for name in _annotated(cls).keys() & vars(cls).keys():
      delattr(cls, name)

  def __new__(cls, *unused: Any, **kwargs: Any) -> Self:
    # The dataclass's __init__ would reject the name too, without a suggestion.
    for name in kwargs:
      _check_name(cls, name)
    self = super().__new__(cls)
    fdl.Config.__init__(self, cls)
    return self

  def __init_callable__(self, unused: Any) -> None:
    # The fields are this class's, but Fiddle's selectors and `fdl.get_callable`
    # need the class that is made from them.
    super().__init_callable__(type(self))
    self.__dict__['__fn_or_cls__'] = self.cls or type(self)

  @classmethod
  def names(cls) -> list[str]:
    """Returns the names of the fields."""
    return list(cls._names)

  def items(self) -> list[tuple[str, Any]]:
    """Returns (name, value) of each field."""
    return [(name, self.__arguments__[name]) for name in self._names]

  def __getattr__(self, name: str) -> Any:
    # Python itself looks up names with underscores.
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

  def __deepcopy__(self, memo: dict[int, Any]) -> Self:
    new = super().__deepcopy__(memo)
    new.__dict__.pop('is_frozen', None)  # The copy is mutable.
    return new

  def __repr__(self) -> str:
    inner = ', '.join(f'{name}={value!r}' for name, value in self.items())
    return f'{type(self).__qualname__}({inner})'

  def freeze(self) -> Self:
    """Makes these and all nested hyperparameters read-only."""
    for nested in _nested(self):
      nested.__dict__['is_frozen'] = True
    return self

  def clone(self) -> Self:
    """Returns a deep, mutable copy.

    What occurs twice in the original occurs twice in the copy. The copy itself
    is not shared (`is_shared`), even if the original is.
    """
    new = copy.deepcopy(self)
    new.__dict__['is_shared'] = False
    return new

  def set(self, **kwargs: Any) -> Self:
    """Sets fields and returns the hyperparameters themselves."""
    for name, value in kwargs.items():
      setattr(self, name, value)
    return self

  def Instantiate(self, **kwargs: Any) -> Any:
    """Makes the object that these hyperparameters, and `kwargs`, describe."""
    if self.cls is None:
      raise TypeError(
        f'{type(self).__qualname__} belongs to no class, so it cannot be'
        ' instantiated. Declare HParams within a subclass of Configurable.'
      )
    return self.cls(copy.deepcopy(self).set(**kwargs).freeze())

  @classmethod
  def config(cls, **kwargs: Any) -> Self:
    """Returns `cls(**kwargs)`, a Fiddle config."""
    return cls(**kwargs)

  @classmethod
  def partial(cls, **kwargs: Any) -> fdl.Partial:
    """Returns a Fiddle partial, which builds a function of the other fields."""
    return _Partial(cls, **cls(**kwargs).__arguments__)

  def __build__(self, /, **built: Any) -> Any:
    # Fiddle builds the leaves first. But an object needs the hyperparameters of
    # its parts, because it completes them.
    new = copy.deepcopy(self)
    for name, value in built.items():
      if not any(_nested(getattr(self, name))):
        setattr(new, name, value)
    seen = set[int]()
    for nested in _nested(new, memoized=False):
      if id(nested) in seen:
        nested.__dict__['is_shared'] = True
      seen.add(id(nested))
    return new if self.cls is None else new.Instantiate()

  def to_text(self) -> str:
    """Returns one line per value, `a.b.c : value`, sorted by name."""
    lines = {
      path: _text(value)
      for path, value in printing.as_dict_flattened(self).items()
      if value != {}
    }
    for value, path in daglish.iterate(self, memoized=False):
      if isinstance(value, BaseHParams):
        made = fdl.get_callable(value)
        name = f'{daglish.path_str(path)}.type'.lstrip('.')
        lines[name] = f'{made.__module__}.{made.__qualname__}'
    return '\n'.join(f'{name} : {lines[name]}' for name in sorted(lines))


class _Partial(fdl.Partial):
  """Builds a function that makes the object."""

  def __build__(self, /, **unused: Any) -> Any:
    hparams = self.__fn_or_cls__(**self.__arguments__)
    return lambda **kwargs: fdl.build(hparams.clone().set(**kwargs))


def _check_name(cls: type[BaseHParams], name: str) -> None:
  if name not in cls._names:
    names = sorted(cls._names)
    raise AttributeError(
      f'{cls.__qualname__} has no field {name!r}.'
      f'{errors.did_you_mean(name, names)} Its fields are {names}. {LACKS}'
    )


def _annotated(cls: type) -> dict[str, Any]:
  """Returns name -> type of the fields declared by the class itself."""
  return {
    name: kind
    for name, kind in vars(cls).get('__annotations__', {}).items()
    if not name.startswith('_') and 'ClassVar' not in str(kind)
  }


def _check_fields(cls: type[BaseHParams]) -> None:
  """Rejects fields without a type and undeclared overrides of fields."""
  own, inherited = _annotated(cls), dict[str, dataclasses.Field]()
  twice = set()
  for parent in cls.__bases__:
    for name, field in vars(parent).get('__dataclass_fields__', {}).items():
      if inherited.setdefault(name, field) is not field or name in own:
        twice.add(name)
  if wrong := sorted(twice.difference(cls._attribute_overrides)):
    raise AttributeError(
      f'{cls.__qualname__} redefines {wrong} of a parent. If this is intended,'
      f' add `_attribute_overrides = {tuple(wrong)}`.'
    )
  if taken := sorted(own.keys() & dir(BaseHParams)):
    raise AttributeError(
      f'{cls.__qualname__} cannot have a field {taken[0]!r}: all HParams'
      ' have an attribute of this name. Rename the field.'
    )
  for name, value in vars(cls).items():
    is_value = not callable(value) and not hasattr(value, '__get__')
    if is_value and not name.startswith('_') and name not in {*own, 'cls'}:
      raise AttributeError(
        f'{cls.__qualname__}.{name} = ... has no type, so it is not a field.'
        f' Write `{name}: type = value`. If a parent has the field, add'
        f' {name!r} to _attribute_overrides.'
      )


def _nested(value: Any, memoized: bool = True) -> Iterator[BaseHParams]:
  """Yields all hyperparameters within a value, including itself."""
  for found, _ in daglish.iterate(value, memoized=memoized):
    if isinstance(found, BaseHParams):
      yield found


def _text(value: Any) -> str:
  # A dtype may be a class, as np.float32, or a callable, as jnp.bfloat16.
  is_type = callable(value) and hasattr(value, 'dtype')
  if is_type or isinstance(value, np.dtype):
    return np.dtype(value).name
  if isinstance(value, enum.Enum):
    return str(value)
  return getattr(value, '__qualname__', repr(value))


class Configurable(abc.ABC):
  """A class whose objects are made from hyperparameters.

  `hparams` holds the frozen hyperparameters of an object. You can read each
  field as an attribute of the object too, unless an attribute hides it.
  """

  # Field -> check of its value.
  _CHECKS: ClassVar[Mapping[str, keys.Check]] = {}
  # Rule for several fields, in words -> whether hyperparameters satisfy it.
  _RULES: ClassVar[Mapping[str, Callable[[Any], bool]]] = {}
  # Groups of fields. At most one field of a group may be set.
  _EXCLUSIVE: ClassVar[Sequence[Sequence[str]]] = ()
  # Field -> class of the object that it describes, `self.<field>`.
  _PARTS: ClassVar[Mapping[str, Any]] = {}

  class HParams(BaseHParams):
    """The base of all hyperparameters, without fields."""

  hparams: Any

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    parents = [b.HParams for b in cls.__bases__ if issubclass(b, Configurable)]
    if body := cls.__dict__.get('HParams'):
      if both := list(_annotated(cls)):
        # The fields on the class would hide the values set in HParams.
        raise TypeError(
          f'{cls.__qualname__} has the fields {both} and a class HParams.'
          ' Declare all fields in one of the two places.'
        )
      own = {'_attribute_overrides': body._attribute_overrides}
      bases = [body, *parents]
    else:
      own, bases = _take_fields(cls, parents), parents
    own |= {
      '__doc__': (body or cls).__doc__ or parents[0].__doc__,
      '__module__': cls.__module__,
      '__qualname__': f'{cls.__qualname__}.HParams',
      'cls': cls,
    }
    cls.HParams = type('HParams', tuple(dict.fromkeys(bases)), own)

  def __init__(self, hparams: Any):
    self.hparams = hparams
    self._check(type(self).__name__)

  def _check(self, where: str) -> None:
    """Checks the hyperparameters and makes the parts."""
    hparams = self.hparams
    for name, check in self._CHECKS.items():
      check.require(f'{where}.{name}', getattr(hparams, name))
    for expected, holds in self._RULES.items():
      if not holds(hparams):
        words = re.findall(r'\w+', expected)
        got = {
          n: x for n in words if (x := getattr(hparams, n, None)) is not None
        }
        raise errors.UsageError(f'{where} expects {expected}; got {got}.')
    for names in self._EXCLUSIVE:
      # '' counts as set: as a regular expression, it matches every name.
      given = {n: x for n in names if (x := getattr(hparams, n)) or x == ''}
      if len(given) > 1:
        raise errors.UsageError(f'{where} has {given}; set one of them.')
    for name, kind in self._PARTS.items():
      part = instantiate(getattr(hparams, name), kind, f'{where}.{name}')
      setattr(self, name, part)

  def __getattr__(self, name: str) -> Any:
    if hasattr(type(self), name):
      # A property raised an AttributeError. Raise it again for its message.
      return object.__getattribute__(self, name)
    hparams = vars(self).get('hparams')
    if hparams is not None and name in hparams.names():
      return getattr(hparams, name)
    raise AttributeError(f'{type(self).__name__!r} has no attribute {name!r}.')


def _take_fields(
  cls: type[Configurable], parents: list[type[BaseHParams]]
) -> dict[str, Any]:
  """Removes the fields from a class, and returns them for its `HParams`.

  Without them, an object's `__getattr__` finds the values in `hparams`.
  """
  own = _annotated(cls)
  inherited = {name for parent in parents for name in parent._names}
  parent = super(cls, cls)
  if taken := [n for n in own.keys() - inherited if hasattr(parent, n)]:
    raise AttributeError(
      f'{cls.__qualname__} cannot have a field {taken[0]!r}, because a parent'
      ' has an attribute of this name. Rename the field.'
    )
  fields: dict[str, Any] = {
    '__annotations__': own,
    # Unlike an inner HParams, a class may redeclare a field.
    '_attribute_overrides': tuple(own.keys() & inherited),
  }
  for name, value in list(vars(cls).items()):
    is_value = name in inherited and not hasattr(value, '__get__')
    if name in own or is_value:
      fields[name] = value
      delattr(cls, name)
  return fields


def instantiate(value: Any, kind: type[C], where: str) -> C:
  """Makes the object that hyperparameters describe, or returns a made object.

  Raises:
    TypeError: The object is not a `kind`; the message names it by `where`.
  """
  made = value.Instantiate() if isinstance(value, BaseHParams) else value
  if not isinstance(made, kind):
    module = kind.__module__.rpartition('.')[2]
    raise TypeError(
      f'{where} is {value!r}; expected the HParams of a'
      f' {module}.{kind.__name__}.'
    )
  return made
