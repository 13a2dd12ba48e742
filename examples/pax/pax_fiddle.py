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
get_callable = fdl.get_callable


class Config(fdl.Config[T], Generic[T]):
  """A Fiddle config; of a class with hyperparameters its `HParams`."""

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
    """Sets arguments, and returns itself."""
    for name, value in kwargs.items():
      setattr(self, name, value)
    return self

  def Instantiate(self, **kwargs: Any) -> Any:
    """Builds it, with these arguments instead of its own."""
    return fdl.build(fdl.copy_with(self, **kwargs))


Config.register(hparams.BaseHParams)


def instantiate(config: Any, **kwargs: Any) -> Any:
  """Builds a config, with these arguments instead of its own.

  Each template within it stands for a layer of its own; in `fdl.build`, one
  that is used twice is one layer.
  """
  if not isinstance(config, Config):
    raise TypeError(f'Expected a pax_fiddle.Config or HParams; got {config!r}.')
  return config.Instantiate(**kwargs)


build = instantiate
template_field = hparams.sub_config_field
# In Praxis, an object that is made together with its owner. Here the owner
# makes it, by `create_child` or `Instantiate`.
instance_field = template_field
