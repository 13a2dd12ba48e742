"""Inputs by the names of Praxis's `base_input`.

    class MyInput(base_input.BaseInput):
      size: int = 8

      def get_next(self): ...

    p = MyInput.HParams(batch_size=4)
    p.size = 16
    batch = p.Instantiate().get_next()

`jaxline.inputs.base` has the contract. An input is a dataclass; `HParams` and
`Params` make a config of it.
"""

from typing import Any, NoReturn

from examples.pax import pax_fiddle
from jaxline.inputs import base

NestedMap = base.Batch


class _ConfigOf:
  """What makes configs of a class; an attribute of the class."""

  def __init__(self, owner: Any = None):
    self._owner = owner

  def __get__(self, instance: Any, owner: Any) -> '_ConfigOf':
    return _ConfigOf(owner)

  def __call__(self, **fields: Any) -> pax_fiddle.Config:
    """Returns a config of the class, with these fields."""
    return pax_fiddle.Config(self._owner, **fields)

  def __mro_entries__(self, bases: Any) -> NoReturn:
    raise TypeError(
      f'{self._owner.__name__} is a dataclass: declare the fields of an input'
      ' on the class itself, and not in a class HParams or Params.'
    )


class Configured:
  """Gives an input `HParams` and `Params`, either of which makes its config."""

  HParams = _ConfigOf()
  Params = _ConfigOf()


class BaseInput(Configured, base.BaseInput):
  """The base of inputs of your own: see `jaxline.inputs.base.BaseInput`."""
