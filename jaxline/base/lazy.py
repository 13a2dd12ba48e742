"""Lazily provides the names that JAXline's modules re-export."""

from collections.abc import Mapping
import importlib
import sys
import types
from typing import Any

# Maps a name to the module, or module:attribute, that it stands for.
_NAMES = {
  'FLAGS': 'absl.flags:FLAGS',
  'F': 'jaxline.base.debug:F',
  'T': 'jaxline.base.async_lib:T',
  '_get_function_name': 'jaxline.base.async_lib:function_name',
  '_initialize_experiment': 'jaxline.compat.experiments:initialize_experiment',
  '_log_outputs': 'jaxline.compat.adapters:log_outputs',
  'config_dict': 'ml_collections.config_dict',
  'flags': 'absl.flags',
  'futures': 'concurrent.futures',
  'jnp': 'jax.numpy',
  'logging': 'absl.logging',
  'np': 'numpy',
  'tf': 'tensorflow',
  'utils': 'jaxline.utils',
}
_SAME = """chex collections contextlib enum functools inspect jax pdb queue sys
  threading wrapt"""
_TYPES = """Any Callable Dict Generator Iterable List Mapping Optional Protocol
  Sequence TypeVar"""
_NAMES |= {name: name for name in _SAME.split()}
_NAMES |= {name: f'typing:{name}' for name in _TYPES.split()}


def _find(address: str) -> Any:
  module, _, attribute = address.partition(':')
  found = importlib.import_module(module)
  return getattr(found, attribute) if attribute else found


class _Module(types.ModuleType):
  """A module that forwards the rebinding of a name to its home module."""

  def __setattr__(self, name: str, value: Any) -> None:
    super().__setattr__(name, value)
    if home := self.__dict__['_homes'].get(name):
      setattr(sys.modules[home], name, value)


def complete(module: str, shared: Mapping[str, str] | None = None) -> None:
  """Gives a module all names that it has in JAXline.

  Programs use `experiment.utils` and `train.FLAGS`, and patch `utils.chex`. A
  name is imported on first use, because importing chex takes as long as jax.

  Args:
    module: the name of the module, such as 'jaxline.train'.
    shared: home module -> names that `module` has too. If a program rebinds one
      in `module`, this rebinds it in the home module, which the library reads.
  """
  homes = {
    x: home for home, names in (shared or {}).items() for x in names.split()
  }

  def find(name: str) -> Any:
    values = _find('absl.flags:FLAGS')
    flag = name.removeprefix('_').lower()
    if name == f'_{flag.upper()}' and flag in values:  # For example `_CONFIG`.
      return _find('absl.flags:FlagHolder')(values, values[flag])
    try:
      return _find(_NAMES[name])
    except (KeyError, ImportError) as e:
      text = f'module {module!r} has no attribute {name!r}'
      raise AttributeError(text) from e

  own = {name: _find(f'{home}:{name}') for name, home in homes.items()}
  # If the module defined `__getattr__` itself, mypy would accept any name.
  vars(sys.modules[module]).update(own, __getattr__=find, _homes=homes)
  sys.modules[module].__class__ = _Module
