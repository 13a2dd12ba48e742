"""Names that modules of JAXline have because they import them."""

import importlib
import sys
from typing import Any


def complete(module: str) -> None:
  """Lets one of JAXline's modules have the names that it has in JAXline.

  Programs write `experiment.utils` and `train.FLAGS`, and patch `utils.chex`.
  `utils` imports those modules itself, so it is imported at its first use; so
  is chex, whose import takes as long as that of jax.

  Args:
    module: the module, such as 'jaxline.train'.
  """

  def find(name: str) -> Any:
    if name == 'utils':
      return importlib.import_module('jaxline.utils')
    if (module, name) == ('jaxline.utils', 'chex'):
      return importlib.import_module('chex')
    if (module, name) == ('jaxline.train', 'FLAGS'):
      return getattr(importlib.import_module('absl.flags'), name)
    raise AttributeError(f'module {module!r} has no attribute {name!r}')

  # Not by a definition in the module, after which mypy would take any name.
  vars(sys.modules[module])['__getattr__'] = find
