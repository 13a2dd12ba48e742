"""Configs and fields, under the names of Praxis's `pax_fiddle`.

    class FeedForward(base_layer.BaseLayer):
      input_dims: int = 0
      linear_tpl: pax_fiddle.Config[Linear] = pax_fiddle.template_field(Linear)

    p = pax_fiddle.Config(FeedForward, input_dims=3)
    p.linear_tpl.params_init = base_layer.WeightInit.Gaussian(0.1)
    layer = pax_fiddle.build(p)

The config of a class with hyperparameters is its `HParams` (see `hparams`). The
config of any other class, such as an input, is a `fdl.Config` with a few extra
methods.
"""

import copy
import dataclasses
from typing import Any, Generic, Self, TypeVar

import fiddle as fdl

from examples.pax import hparams

T = TypeVar('T')

Partial = fdl.Partial
field = dataclasses.field
get_callable = fdl.get_callable


class Config(fdl.Config[T], Generic[T]):
  """A Fiddle config, or the `HParams` of a class that has them."""

  def __new__(cls, fn_or_cls: Any = None, /, *args: Any, **kwargs: Any) -> Any:
    if isinstance(fn_or_cls, type):
      if issubclass(fn_or_cls, hparams.Configurable):
        fn_or_cls = fn_or_cls.HParams
      if issubclass(fn_or_cls, hparams.BaseHParams):
        return fn_or_cls(*args, **kwargs)
    return super().__new__(cls)

  def clone(self) -> Self:
    """Returns a deep copy."""
    return copy.deepcopy(self)

  def set(self, **kwargs: Any) -> Self:
    """Sets arguments and returns the config itself."""
    for name, value in kwargs.items():
      setattr(self, name, value)
    return self

  def Instantiate(self, **kwargs: Any) -> Any:
    """Builds the object, with some arguments overridden."""
    return fdl.build(fdl.copy_with(self, **kwargs))


Config.register(hparams.BaseHParams)


def instantiate(config: Any, **kwargs: Any) -> Any:
  """Builds a config, with some arguments overridden.

  A template that is used twice within the config makes two layers. Built with
  `fdl.build`, it makes one shared layer.
  """
  if not isinstance(config, Config):
    raise TypeError(f'Expected a pax_fiddle.Config or HParams; got {config!r}.')
  return config.Instantiate(**kwargs)


build = instantiate
template_field = hparams.sub_config_field
# Praxis builds the object of such a field together with its owner. Here the
# owner makes it, with `create_child` or `Instantiate`.
instance_field = template_field
