"""Inputs, under the names of Praxis's `base_input`.

    class MyInput(base_input.BaseInput):
      size: int = 8

      def get_next(self): ...

    p = MyInput.HParams(batch_size=4)
    p.size = 16
    batch = p.Instantiate().get_next()

`jaxline.inputs.base` defines the contract of an input. An input is a dataclass.
`HParams` and `Params` both make a config of it.
"""

from typing import Any, NoReturn

from examples.pax import pax_fiddle
from jaxline.inputs import base

NestedMap = base.Batch


class _ConfigOf:
  """A descriptor that makes configs of the class that has it."""

  def __init__(self, owner: Any = None):
    self._owner = owner

  def __get__(self, instance: Any, owner: Any) -> '_ConfigOf':
    return _ConfigOf(owner)

  def __call__(self, **fields: Any) -> pax_fiddle.Config:
    """Returns a config of the class with the given fields."""
    return pax_fiddle.Config(self._owner, **fields)

  def __mro_entries__(self, bases: Any) -> NoReturn:
    raise TypeError(
      f'{self._owner.__name__} is a dataclass: declare the fields of an input'
      ' on the class itself instead of in a class HParams or Params.'
    )


class Configured:
  """A mixin with `HParams` and `Params`, which make an input's config."""

  HParams = _ConfigOf()
  Params = _ConfigOf()


class BaseInput(Configured, base.BaseInput):
  """The base class of your inputs: see `jaxline.inputs.base.BaseInput`."""
