"""Gives modules the names that JAXline's had, and imports them when used."""

from collections.abc import Mapping
import importlib
import sys
import types
from typing import Any

# A name -> the module, or module:attribute, for which it stands.
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
  """A module that rebinds a name in its home as well."""

  def __setattr__(self, name: str, value: Any) -> None:
    super().__setattr__(name, value)
    if home := self.__dict__['_homes'].get(name):
      setattr(sys.modules[home], name, value)


def complete(module: str, shared: Mapping[str, str] | None = None) -> None:
  """Lets one of JAXline's modules have the names that it has in JAXline.

  Programs write `experiment.utils` and `train.FLAGS`, and patch `utils.chex`. A
  name is imported at its first use: chex takes as long to import as jax.

  Args:
    module: the module, such as 'jaxline.train'.
    shared: module -> names of it that this one has, too. A program that rebinds
      one here rebinds it there, for the library.
  """
  homes = {
    x: home for home, names in (shared or {}).items() for x in names.split()
  }

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

  own = {name: _find(f'{home}:{name}') for name, home in homes.items()}
  # Not by a definition in the module, after which mypy would take any name.
  vars(sys.modules[module]).update(own, __getattr__=find, _homes=homes)
  sys.modules[module].__class__ = _Module
