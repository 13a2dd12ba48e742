"""Configs and fields, by the names of Praxis's `pax_fiddle`.

    class FeedForward(base_layer.BaseLayer):
      input_dims: int = 0
      linear_tpl: pax_fiddle.Config[Linear] = pax_fiddle.template_field(Linear)

    p = pax_fiddle.Config(FeedForward, input_dims=3)
    p.linear_tpl.params_init = base_layer.WeightInit.Gaussian(0.1)
    layer = pax_fiddle.build(p)

The config of a class with hyperparameters is its `HParams`, which see; the
config of anything else, such as an input, is Fiddle's with a few methods more.
"""

import copy
import dataclasses
from typing import Any, Generic, Self, TypeVar

import fiddle as fdl

from examples.pax import hparams

T = TypeVar('T')

Partial = fdl.Partial
field = dataclasses.field


class Config(fdl.Config[T], Generic[T]):
  """A Fiddle config; of a class with hyperparameters its `HParams`."""

  def __new__(cls, fn_or_cls: Any = None, /, *args: Any, **kwargs: Any) -> Any:
    if _has_hparams(fn_or_cls):
      fn_or_cls = fn_or_cls.HParams
    if isinstance(fn_or_cls, type) and issubclass(
      fn_or_cls, hparams.BaseHParams
    ):
      return fn_or_cls(*args, **kwargs)
    return super().__new__(cls)

  def clone(self) -> Self:
    """Returns a deep copy."""
    return copy.deepcopy(self)

  def set(self, **kwargs: Any) -> Self:
    """Sets arguments, and returns itself."""
    for name, value in kwargs.items():
      setattr(self, name, value)
    return self

  def Instantiate(self, **kwargs: Any) -> Any:
    """Builds it, with these arguments instead of its own."""
    return instantiate(self, **kwargs)


Config.register(hparams.BaseHParams)


def instantiate(config: Any, **kwargs: Any) -> Any:
  """Builds a config, with these arguments instead of its own.

  Each template within it stands for a layer of its own; in `fdl.build`, one
  that is used twice is one layer.
  """
  if isinstance(config, hparams.BaseHParams):
    return config.Instantiate(**kwargs)
  if not isinstance(config, fdl.Buildable):
    raise TypeError(f'Expected a pax_fiddle.Config or HParams; got {config!r}.')
  return fdl.build(fdl.copy_with(config, **kwargs))


build = instantiate


def get_callable(config: Any) -> Any:
  """Returns what a config is of."""
  if isinstance(config, hparams.BaseHParams):
    return config.cls
  return fdl.get_callable(config)


def template_field(template: Any) -> Any:
  """Declares a field that holds a config; each owner has its own.

  Args:
    template: a class; or a function that returns the config; None is a field
      that is None unless it is set.

  Returns:
    What a dataclass takes for a field.
  """
  if template is None:
    return field(default=None)
  if _has_hparams(template):
    template = template.HParams
  return field(default_factory=template)


# In Praxis, an object that is made together with its owner. Here the owner
# makes it, by `create_child` or `Instantiate`.
instance_field = template_field


def _has_hparams(cls: Any) -> bool:
  return isinstance(cls, type) and issubclass(cls, hparams.Configurable)
