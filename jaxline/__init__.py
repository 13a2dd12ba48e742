"""A forkable single-experiment training template for JAX."""

import importlib
from typing import Any

__version__ = '0.2.0'

_API = ('Result', 'evaluate', 'fit', 'load', 'load_weights')


def __getattr__(name: str) -> Any:
  """Imports `jaxline.api` or `jaxline.utils` where it is used first."""
  if name in _API:
    return getattr(importlib.import_module('jaxline.api'), name)
  if name == 'utils':  # In JAXline every import imports it.
    return importlib.import_module('jaxline.utils')
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted([*globals(), *_API])
