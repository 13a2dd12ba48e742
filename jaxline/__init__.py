"""A forkable single-experiment training template for JAX."""

import importlib
import typing

__all__ = [
  'Result',
  'evaluate',
  'fit',
  'history',
  'load',
  'load_weights',
  'sweep',
]
__version__ = '0.2.0'

if typing.TYPE_CHECKING:
  from jaxline import utils as utils
  from jaxline.api import Result
  from jaxline.api import evaluate
  from jaxline.api import fit
  from jaxline.api import history
  from jaxline.api import load
  from jaxline.api import load_weights
  from jaxline.api import sweep
else:

  def __getattr__(name):
    """Imports `jaxline.api` or `jaxline.utils` on first use."""
    if name in __all__:
      return getattr(importlib.import_module('jaxline.api'), name)
    if name == 'utils':  # All imports of JAXline's make this name available.
      return importlib.import_module('jaxline.utils')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted([*globals(), *__all__])
