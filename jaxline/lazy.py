"""Names that modules of JAXline have because they import or define them."""

from collections.abc import Sequence
import importlib
import sys
import types
from typing import Any

_MODULES = 'abc chex collections enum functools inspect pdb queue sys threading'
_TYPES = 'Any Callable Dict Generator Iterable List Mapping Optional Protocol'
# A name -> the module, or module:attribute, for which it stands.
_NAMES = {
  **{name: name for name in [*_MODULES.split(), 'wrapt']},
  **{x: f'typing:{x}' for x in [*_TYPES.split(), 'Sequence', 'TypeVar']},
  'FLAGS': 'absl.flags:FLAGS',
  'F': 'jaxline.debug:F',
  'T': 'jaxline.async_lib:T',
  '_get_function_name': 'jaxline.async_lib:function_name',
  '_log_outputs': 'jaxline.compat.adapters:log_outputs',
  'config_dict': 'ml_collections.config_dict',
  'flags': 'absl.flags',
  'futures': 'concurrent.futures',
  'jnp': 'jax.numpy',
  'np': 'numpy',
  'tf': 'tensorflow',
  'utils': 'jaxline.utils',
}


def _find(address: str) -> Any:
  module, _, attribute = address.partition(':')
  found = importlib.import_module(module)
  return getattr(found, attribute) if attribute else found


class _Shared(types.ModuleType):
  """A module that passes the rebinding of a name on to the module it is from.

  The library calls the function there, where JAXline calls it here.
  """

  def __setattr__(self, name: str, value: Any) -> None:
    super().__setattr__(name, value)
    if home := self.__dict__['_homes'].get(name):
      setattr(home, name, value)


def complete(module: str, shared: Sequence[str] = ()) -> None:
  """Lets one of JAXline's modules have the names that it has in JAXline.

  Programs write `experiment.utils` and `train.FLAGS`, patch `utils.chex`, and
  rebind functions. A name is imported at its first use: `utils` imports those
  modules itself, and chex takes as long as jax.

  Args:
    module: the module, such as 'jaxline.train'.
    shared: names of functions that the library calls in other modules.
  """

  def find(name: str) -> Any:
    values = _find('absl.flags:FLAGS')
    flag = name.removeprefix('_').lower()
    if name == f'_{flag.upper()}' and flag in values:  # `_CONFIG`, for one.
      return _find('absl.flags:FlagHolder')(values, values[flag])
    try:
      return _find(_NAMES[name])
    except (KeyError, ImportError) as e:
      text = f'module {module!r} has no attribute {name!r}'
      raise AttributeError(text) from e

  completed = sys.modules[module]
  homes = {x: sys.modules[getattr(completed, x).__module__] for x in shared}
  # Not by a definition in the module, after which mypy would take any name.
  vars(completed).update(__getattr__=find, _homes=homes)
  completed.__class__ = _Shared
