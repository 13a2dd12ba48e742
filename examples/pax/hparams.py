"""Hyperparameters as nested dataclasses, and the same as Fiddle configs.

A class that derives from `Configurable` has an inner dataclass `HParams` with
its hyperparameters; `hparams.Instantiate()` makes the object. The inner class
need not name that of the parent class: it inherits its fields.

    class Linear(base_layer.BaseLayer):

      class HParams(BaseHParams):
        input_dims: int = 0
        output_dims: int = 0

    layer = Linear.HParams(input_dims=3, output_dims=4).Instantiate()

The same through Fiddle, where one config that is used twice is built once:

    config = Linear.HParams.config(input_dims=3)
    config.output_dims = 4
    layer = fdl.build(config)

Configs that are nested in a config become HParams in the built object. If one
config is used twice, both HParams are marked as the same (`shared`); in a copy
of the whole by `clone` they are marked again.

Names and behaviour are those of Praxis (Google, 2022).
"""

from collections.abc import Iterable
import copy
import dataclasses
import enum
import functools
import re
from typing import Any, ClassVar, Self, TypeVar

import fiddle as fdl
import numpy as np

from jaxline import errors

C = TypeVar('C')

_FROZEN = '_frozen'
_IDENTITY = '_identity'


def nearest_names(regex: str, names: Iterable[str]) -> list[str]:
  """Returns the names that are most similar to a regular expression, 5 at most.

  Its special characters are ignored: they stand for any part of a name.
  """
  literal = re.sub(r'\\.|[^\w/]', '', regex)
  return errors.nearest(literal, names, n=5, cutoff=0.0)


class _SubConfig:
  """Makes the default of a nested field: new hyperparameters for each owner."""

  def __init__(self, cls: type['BaseHParams']):
    self.cls = cls

  def __call__(self) -> 'BaseHParams':
    return self.cls()


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
      f' Linear.HParams; got {cls!r}.'
    )
  return dataclasses.field(default_factory=_SubConfig(cls))


class _Identity:
  """What tells hyperparameters that Fiddle built from equal ones.

  Attributes:
    uses: of how many others they became a part.
  """

  def __init__(self) -> None:
    self.uses = 0

  def __deepcopy__(self, memo: dict[Any, Any]) -> '_Identity':
    if memo.get(_Identity):
      return self
    new = memo[id(self)] = _Identity()
    new.uses = self.uses
    return new


class BaseHParams:
  """Hyperparameters: a dataclass, all of whose fields have names.

  Every subclass is made a dataclass. It may add fields; to give one of a
  parent's another default (or type), it must say so:
  `_attribute_overrides = ('input_dims',)`.
  """

  _attribute_overrides: ClassVar[tuple[str, ...]] = ()
  # The class that `Instantiate` makes; None for hyperparameters of nothing.
  _owner: ClassVar[type | None] = None

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    inherited: set[str] = set()
    for part in reversed(cls.__mro__):
      fields = _annotated(part)
      overrides = set(vars(part).get('_attribute_overrides', ()))
      # Who inherits from both parts may say so as well.
      meant = overrides.union(
        *(
          vars(child).get('_attribute_overrides', ())
          for child in cls.__mro__
          if issubclass(child, part)
        )
      )
      if twice := sorted((fields & inherited) - meant):
        raise AttributeError(
          f'{cls.__qualname__} redefines {twice} of a parent. If that is meant,'
          f' add `_attribute_overrides = {tuple(twice)}`.'
        )
      # Within a class, HParams get the parent's fields only later.
      is_alone = part.__bases__ == (BaseHParams,) and cls is part
      if (wrong := sorted(overrides - inherited)) and not is_alone:
        raise AttributeError(
          f'{cls.__qualname__} overrides {wrong}, which no parent has.'
          + errors.did_you_mean(wrong[0], inherited)
        )
      if untyped := sorted((inherited - fields) & set(vars(part))):
        raise AttributeError(
          f'{cls.__qualname__}.{untyped[0]} = ... has no type and would be no'
          f' field. Write `{untyped[0]}: type = value`, and {untyped[0]!r} into'
          ' _attribute_overrides.'
        )
      inherited |= fields
    if taken := sorted(_annotated(cls) & set(dir(BaseHParams))):
      raise AttributeError(
        f'{cls.__qualname__} cannot have a field {taken[0]!r}: all HParams have'
        ' something else of this name.'
      )
    if untyped := sorted(
      name
      for name, value in vars(cls).items()
      if not name.startswith('_')
      and name not in inherited
      and name not in dir(BaseHParams)
      and not callable(value)
      and not hasattr(value, '__get__')
    ):
      raise AttributeError(
        f'{cls.__qualname__}.{untyped[0]} = ... has no type and would be no'
        f' field. Write `{untyped[0]}: type = value`.'
      )
    dataclasses.dataclass(kw_only=True, repr=False)(cls)

  def __new__(cls, *unused: Any, **kwargs: Any) -> Any:
    # Before the dataclass's own __init__, whose message names no neighbour.
    if unknown := [key for key in kwargs if key not in cls.names()]:
      raise AttributeError(_unknown(cls, unknown[0]))
    return super().__new__(cls)

  @classmethod
  def names(cls) -> list[str]:
    """Returns the names of the fields."""
    if not dataclasses.is_dataclass(cls):
      return []  # This class itself.
    return [field.name for field in dataclasses.fields(cls)]

  def __getattr__(self, name: str) -> Any:
    # What is not there; names with underscores are asked for by Python itself.
    if name.startswith('_'):
      raise AttributeError(name)
    raise AttributeError(_unknown(type(self), name))

  def __setattr__(self, name: str, value: Any) -> None:
    if name not in self.names():
      raise AttributeError(_unknown(type(self), name))
    if self.is_frozen:
      raise AttributeError(
        f'{type(self).__qualname__} is frozen; cannot set {name!r} to'
        f' {value!r}. clone() gives a copy that can be changed.'
      )
    object.__setattr__(self, name, value)

  def __delattr__(self, name: str) -> None:
    raise AttributeError(f'A field cannot be deleted; got {name!r}.')

  @property
  def is_frozen(self) -> bool:
    """Whether nothing can be changed any more."""
    return vars(self).get(_FROZEN, False)

  def freeze(self) -> Self:
    """Makes these, and all nested hyperparameters, refuse changes."""
    object.__setattr__(self, _FROZEN, True)
    for _, value in self.items():
      for nested in _nested(value):
        nested.freeze()
    return self

  def clone(self) -> Self:
    """Returns a deep copy that can be changed, and its nested ones too.

    What is in it twice is in the copy twice. Neither the copy nor anything in
    it is the same, for Fiddle, as before.
    """
    new = copy.deepcopy(self)
    vars(new).pop(_IDENTITY, None)
    return new

  def twin(self) -> Self:
    """Returns a `clone` that is the same for Fiddle."""
    return copy.deepcopy(self, {_Identity: True})

  @property
  def shared(self) -> Any:
    """What all copies have that are one for Fiddle; None if there is one."""
    identity = vars(self).get(_IDENTITY)
    return identity if identity is not None and identity.uses > 1 else None

  def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
    new = object.__new__(type(self))
    memo[id(self)] = new
    for name, value in self.items():
      object.__setattr__(new, name, copy.deepcopy(value, memo))
    if (identity := vars(self).get(_IDENTITY)) is not None:
      object.__setattr__(new, _IDENTITY, copy.deepcopy(identity, memo))
    return new

  def items(self) -> list[tuple[str, Any]]:
    """Returns the fields' names and values."""
    return [(name, getattr(self, name)) for name in self.names()]

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
    missing = set(missing_fields_in_self)
    if wrong := sorted(set(source.names()) - set(self.names()) - missing):
      raise AttributeError(
        f'{type(self).__qualname__} has not the fields {wrong} of'
        f' {type(source).__qualname__}. List them in missing_fields_in_self to'
        ' leave them out.'
      )
    if wrong := sorted(set(self.names()) - set(source.names())):
      raise AttributeError(
        f'{type(source).__qualname__} has not the fields {wrong} of'
        f' {type(self).__qualname__}, which would stay as they are. Copy what'
        ' is meant with set().'
      )
    # As one, so that what is in it twice is one here as well.
    for name, value in source.clone().items():
      if name in self.names():
        setattr(self, name, value)
    return self

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
    return self._owner(self.twin().set(**kwargs).freeze())

  @classmethod
  def config(cls, **kwargs: Any) -> fdl.Config:
    """Returns a Fiddle config, which `fdl.build` makes the object of.

    Nested hyperparameters are nested configs, to be changed in place.

    Args:
      **kwargs: values of fields.

    Raises:
      AttributeError: there is no such field.
    """
    return _filled(_Config(cls, **kwargs))

  @classmethod
  def partial(cls, **kwargs: Any) -> fdl.Partial:
    """Returns a Fiddle partial; built, it is a function of the other fields."""
    return _filled(_Partial(cls, **kwargs))

  def to_text(self) -> str:
    """Returns a line for each value, `a.b.c : value`, in order of names."""
    return '\n'.join(
      f'{path} : {text}' if path else text
      for path, text in sorted(_lines(self))
    )

  def __repr__(self) -> str:
    inner = ', '.join(f'{name}={value!r}' for name, value in self.items())
    return f'{type(self).__qualname__}({inner})'


def _unknown(cls: type[BaseHParams], name: str) -> str:
  names = sorted(cls.names())
  return (
    f'{cls.__qualname__} has no field {name!r}.'
    f'{errors.did_you_mean(name, names)} Its fields are {names}.'
  )


def _annotated(cls: type) -> set[str]:
  """Returns the names of the fields that a class itself declares."""
  return {
    name
    for name, kind in vars(cls).get('__annotations__', {}).items()
    if 'ClassVar' not in str(kind)
  }


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
  inside: Any = None
  # An object that was built by Fiddle stands for its hyperparameters.
  if isinstance(value, Configurable):
    value = value.hparams
  if isinstance(value, BaseHParams):
    name = _qualified(value._owner or type(value))
    inside = [('type', _Verbatim(name)), *value.items()]
  elif isinstance(value, dict):
    inside = value.items()
  elif isinstance(value, list | tuple) and _nested(value):
    inside = [(f'[{i}]', item) for i, item in enumerate(value)]
  if inside is None:
    return [('', _text(value))]
  return [
    (f'{name}.{path}' if path and path[0] != '[' else f'{name}{path}', text)
    for name, item in inside
    for path, text in _lines(item)
  ]


class _Verbatim(str):
  """Text that is not to be quoted."""


def _text(value: Any) -> str:
  if isinstance(value, _Verbatim):
    return str(value)
  if isinstance(value, enum.Enum):
    return str(value)
  if isinstance(value, np.dtype) or (
    isinstance(value, type) and hasattr(value, 'dtype')
  ):
    return np.dtype(value).name
  dtype = getattr(value, 'dtype', None)
  if callable(value) and isinstance(dtype, np.dtype):
    return dtype.name  # jnp.bfloat16 is no class.
  if isinstance(value, functools.partial):
    args = [_text(value.func), *(_text(arg) for arg in value.args)]
    args += [f'{name}={_text(arg)}' for name, arg in value.keywords.items()]
    return f'partial({", ".join(args)})'
  if hasattr(value, '__qualname__'):  # A class or a function.
    return _qualified(value)
  return repr(value)


def _qualified(value: Any) -> str:
  return f'{value.__module__}.{value.__qualname__}'


class Configurable:
  """A class whose objects are made of hyperparameters.

  Attributes:
    HParams: their dataclass.
    hparams: those of the object, frozen.
  """

  class HParams(BaseHParams):
    """Hyperparameters of nothing yet."""

  hparams: Any

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    # Parents whose HParams are already part of another parent's add nothing.
    parents = [
      base.HParams for base in cls.__bases__ if hasattr(base, 'HParams')
    ]
    bodies = [cls.__dict__['HParams']] if 'HParams' in cls.__dict__ else []
    bases = list(dict.fromkeys([*bodies, *parents]))
    bases = [
      base
      for base in bases
      if not any(base is not o and issubclass(o, base) for o in bases)
    ]
    if bodies and bases == bodies:
      made = bodies[0]
    else:
      names: dict[str, Any] = {
        '__doc__': (bodies or bases)[0].__doc__,
        '__module__': cls.__module__,
        '__qualname__': f'{cls.__qualname__}.HParams',
      }
      if bodies:
        names['_attribute_overrides'] = bodies[0]._attribute_overrides
      made = type('HParams', tuple(bases), names)
    made._owner = cls
    cls.HParams = made

  def __init__(self, hparams: Any):
    self.hparams = hparams


Configurable.HParams._owner = Configurable


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


class _Named:
  """Names the nearest field where a Fiddle config is asked for one it lacks."""

  def __init__(self, fn_or_cls: Any, /, **kwargs: Any):
    for name in kwargs:
      _check_name(fn_or_cls, name)
    super().__init__(fn_or_cls, **kwargs)

  def __getattr__(self, name: str) -> Any:
    if not name.startswith('_'):
      _check_name(self.__fn_or_cls__, name)
    return super().__getattr__(name)  # type: ignore[misc]

  def __setattr__(self, name: str, value: Any) -> None:
    _check_name(self.__fn_or_cls__, name)
    super().__setattr__(name, value)


def _check_name(cls: type[BaseHParams], name: str) -> None:
  if name not in cls.names():
    raise AttributeError(_unknown(cls, name))


class _Config(_Named, fdl.Config):
  """Builds the object, not its hyperparameters."""

  def __build__(self, /, **kwargs: Any) -> Any:
    return _make(self.__fn_or_cls__, **kwargs)


class _Partial(_Named, fdl.Partial):
  """Builds a function that makes the object."""

  def __build__(self, /, **kwargs: Any) -> Any:
    return functools.partial(_make, self.__fn_or_cls__, **kwargs)


def _filled(config: Any) -> Any:
  """Makes those fields that a Fiddle config cannot take the defaults of."""
  for field in dataclasses.fields(config.__fn_or_cls__):
    factory = field.default_factory
    if field.name in config.__arguments__:
      continue
    if isinstance(factory, _SubConfig):
      setattr(config, field.name, factory.cls.config())
    elif factory is not dataclasses.MISSING:
      setattr(config, field.name, factory())
  return config


def _make(cls: type[BaseHParams], **kwargs: Any) -> Any:
  """Makes what a Fiddle config describes."""
  hparams = cls(**{name: _unbuilt(value) for name, value in kwargs.items()})
  object.__setattr__(hparams, _IDENTITY, _Identity())
  return hparams if cls._owner is None else hparams.Instantiate()


def _unbuilt(value: Any) -> Any:
  """Returns the hyperparameters of what Fiddle built within a value.

  It builds from the leaves on; but who has a template wants to complete it.
  """
  if isinstance(value, Configurable):
    value = value.hparams
  if isinstance(value, BaseHParams):
    value = value.twin()
    if (identity := vars(value).get(_IDENTITY)) is not None:
      identity.uses += 1
    return value
  if isinstance(value, dict):
    return {key: _unbuilt(item) for key, item in value.items()}
  if isinstance(value, list | tuple) and not hasattr(value, '_fields'):
    return type(value)(_unbuilt(item) for item in value)
  return value
