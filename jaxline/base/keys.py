"""Declares config keys: default, valid values, and effect on resuming.

Each subsystem lists its keys in `KEYS`, and `base_config` joins the lists.
`read` builds an experiment's own config.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import math
import numbers
import os
import re
import typing
from typing import Any, Literal, TypeVar

from ml_collections import config_dict

from jaxline import errors

T = TypeVar('T')

MAPPINGS = (Mapping, config_dict.ConfigDict)
ANY = '(?s).*'  # A regular expression.


@dataclasses.dataclass(frozen=True)
class Check:
  """A check of a value."""

  expected: str  # The valid values in words.
  accepts: Callable[[Any], Any]  # Returns False or raises for invalid values.
  # The type of a value that replaces a default of None. With `object`, a value
  # of any type replaces any default.
  kind: type | None = None
  is_path: bool = False  # Whether it is a file name, which may start with `~`.

  def require(self, name: str, value: Any) -> None:
    """Raises UsageError, which gives the name, if a value is invalid."""
    why = ''
    try:
      if self.accepts(value) is not False:
        return
    except errors.UsageError:
      raise  # It names the invalid part of the value.
    except (TypeError, ValueError) as e:
      why = f' ({e})'
    # Formatting a ConfigDict takes milliseconds, so do it only for errors.
    raise errors.UsageError(
      f'{name} is {value!r:.200}{why}; expected {self.expected}.'
    )


def optional(check: Check) -> Check:
  """Accepts None, and all values that `check` accepts."""
  return dataclasses.replace(
    check,
    expected=f'{check.expected}, or None',
    accepts=lambda x: x is None or check.accepts(x),
  )


def one_of(*valid: str) -> Check:
  """Accepts the words in `valid`."""
  return Check(f'one of {valid}', lambda x: x in valid, str)


def text(expected: str, pattern: str = ANY, *, is_path: bool = False) -> Check:
  """Accepts text that fully matches a regular expression, or such a path."""

  def accepts(x: Any) -> bool:
    if is_path and isinstance(x, os.PathLike):
      x = os.fspath(x)
    return isinstance(x, str) and bool(re.fullmatch(pattern, x))

  return Check(expected, accepts, str, is_path)


def number(
  min: float = -math.inf,
  max: float = math.inf,
  *,
  above: float = -math.inf,
  below: float = math.inf,
  kind: type = float,
) -> Check:
  """Accepts a finite number: min <= x <= max and above < x < below."""
  low = f'({above}' if min == -math.inf else f'[{min}'
  high = f'{below})' if max == math.inf else f'{max}]'
  noun = 'an integer' if kind is int else 'a number'
  abstract = numbers.Integral if kind is int else numbers.Real

  def accepts(x: Any) -> bool:
    is_number = isinstance(x, abstract) and not isinstance(x, bool)
    return is_number and bool(min <= x <= max and above < x < below)

  return Check(f'{noun} in {low}, {high}', accepts, kind)


integer = functools.partial(number, kind=int)


def mapping(expected: str) -> Check:
  """Accepts a dict."""
  return Check(expected, lambda x: isinstance(x, MAPPINGS))


def record(
  fits: Callable[[Any], Any] = lambda x: True, /, **checks: Check
) -> Check:
  """Accepts a dict that `fits` and whose fields pass; a missing one is None."""

  def accepts(x: Any) -> Any:
    if not isinstance(x, dict):
      return False
    for name, check in checks.items():
      check.require(name, x.get(name))
    return fits(x)

  return Check(f'a dict of {", ".join(checks)} that fit', accepts)


def each(check: Check, kind: Any = dict, names: str = ANY) -> Check:
  """Accepts a dict or a list of valid values; a dict's keys match `names`."""
  named = text(f'one that matches {names}', names)

  def accepts(x: Any) -> bool:
    if not isinstance(x, kind):
      return False
    for name, value in x.items() if kind is dict else enumerate(x):
      if kind is dict:
        named.require('a name', name)
      check.require(f'{name!r:.200}', value)
    return True

  return Check(f'a {kind.__name__} of {check.expected}', accepts)


BOOLEAN = Check('True or False', lambda x: isinstance(x, bool), bool)
COUNT = integer(1)
POSITIVE = number(above=0)


def parse_ranges(text: str) -> list[tuple[int, int]]:
  """Returns the first and last numbers of ranges such as '10-15,1000'.

  Raises:
    ValueError: the text is malformed, or its numbers do not increase.
  """
  ranges: list[tuple[int, int]] = []
  end = 0
  for part in text.split(',') if text else ():
    first, dash, last = part.partition('-')
    ranges.append((int(first), int(last if dash else first)))
    if not end < ranges[-1][0] <= ranges[-1][1]:
      raise ValueError(f'{part.strip()!r} does not follow {end}')
    end = ranges[-1][1]
  return ranges


RANGES = Check(
  "ranges such as '10-15,1000', or ''",
  lambda x: isinstance(x, str) and parse_ranges(x) is not None,
  str,
)


@dataclasses.dataclass(frozen=True)
class Key:
  """A config key."""

  name: str  # The prefix of a section ends with a dot: 'decode.step'.
  default: Any  # {} means a section, or a dict with keys that the user chooses.
  check: Check
  reason: str  # The purpose of the key, and why you would change it.
  # The effect of a change on a run that is resumed: see `base_config`.
  effect: Literal['run', 'program', 'none'] = 'none'
  # Whether the per-device style accepts only the default.
  sharded: bool = False


def value_of(config: Any, rows: Iterable[Key], name: str) -> Any:
  """Returns the value of a key, or the default if the config lacks the key.

  It returns the default too for an invalid value, which only the program uses.
  """
  row = next(row for row in rows if row.name == name)
  try:
    row.check.require(name, config[name])
  except (KeyError, errors.UsageError):
    return row.default
  return config[name]


def check_attributes(config: Any, /, **checks: Check) -> None:
  """Checks attributes of an experiment's config; call it in `__post_init__`."""
  for name, check in checks.items():
    check.require(name, getattr(config, name))


# An experiment's own config.


def _nested(cls: Any) -> dict[str, Any]:
  """Maps each field to its dataclass `C` if its type is `C` or `C | None`."""
  found = {}
  for name, kind in typing.get_type_hints(cls).items():
    parts = typing.get_args(kind)
    kinds = parts if type(None) in parts else (kind,)
    found[name] = next(filter(dataclasses.is_dataclass, kinds), None)
  return found


def read(cls: type[T], config: Mapping[str, Any]) -> T:
  """Builds an experiment's own config.

  Args:
    cls: a dataclass. Each field is a key, and a nested dataclass a section.
    config: the values, for example `config.experiment_kwargs.config`.

  Raises:
    errors.UsageError: a key is unknown or missing, or `cls` rejects a value.
  """
  values, nested = dict(config), _nested(cls)
  kinds = typing.get_type_hints(cls)
  errors.check_names(values, nested, 'key', cls.__name__)
  for key, value in values.items():
    kind = kinds[key]
    is_none = isinstance(value, str | tuple) and value in ('None', (None,))
    if is_none and type(None) in typing.get_args(kind):
      values[key] = None  # A flag of a text or a tuple cannot be None itself.
    elif (
      value is None
      and kind in (int, float, bool, str, tuple)
      and getattr(cls, key, kind) is not None  # This is the default.
    ):
      raise errors.UsageError(
        f'{cls.__name__}: {key} is None; expected {kind.__name__}.'
      )
    elif nested[key] and isinstance(value, MAPPINGS):
      values[key] = read(nested[key], value)
    elif isinstance(value, config_dict.ConfigDict):
      values[key] = value.to_dict()
  try:
    return cls(**values)
  except (TypeError, ValueError) as e:
    raise errors.UsageError(f'{cls.__name__}: {e}') from e


def with_defaults(cls: Any, config: Any) -> Any:
  """Adds the defaults of missing fields to an experiment's own config.

  When you add a field, its default must reproduce the old behavior. `cls` can
  define `with_defaults(record)` to drop keys that do not affect training.
  """
  if cls is None or not isinstance(config, Mapping):
    return config
  filled = dict(getattr(cls, 'with_defaults', dict)(config))
  nested = _nested(cls)
  for f in dataclasses.fields(cls):
    if f.name in filled:
      filled[f.name] = with_defaults(nested[f.name], filled[f.name])
    elif f.default is not dataclasses.MISSING:
      filled[f.name] = f.default
    elif f.default_factory is not dataclasses.MISSING:
      filled[f.name] = f.default_factory()
  return filled
