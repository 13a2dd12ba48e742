"""Experiments by name.

    @experiment_registry.register
    class Mine(base_experiment.BaseExperiment):
      ...

in examples/pax/tasks/lm/params/my.py is `Mine`, `my.Mine`, `params.my.Mine` and
so on: every suffix of its full name that no other experiment has. One of
another package is named by its module, which is then imported.
"""

import importlib
import importlib.util
import pkgutil
from typing import TypeVar

from examples.pax import base_experiment
from examples.pax import tasks
from jaxline import errors

Experiment = type[base_experiment.BaseExperiment]
T = TypeVar('T', bound=Experiment)

# Full name -> class.
_registered: dict[str, Experiment] = {}


class UnknownError(errors.UsageError):
  """No experiment has this name, or several have."""


def register(experiment: T) -> T:
  """Makes a class known by its name; a decorator.

  Raises:
    TypeError: it is no experiment.
    ValueError: there is one of this name already.
  """
  if not (
    isinstance(experiment, type)
    and issubclass(experiment, base_experiment.BaseExperiment)
  ):
    raise TypeError(
      'register takes a class that derives from'
      f' base_experiment.BaseExperiment; got {experiment!r}.'
    )
  name = f'{experiment.__module__}.{experiment.__qualname__}'
  if name in _registered:
    raise ValueError(
      f'There is an experiment {name!r} already, {_registered[name]!r}. Choose'
      ' another name.'
    )
  _registered[name] = experiment
  return experiment


def get_all() -> dict[str, Experiment]:
  """Returns full name -> class of all below `examples.pax.tasks`.

  Whatever else has been registered is there too.
  """
  for module in pkgutil.walk_packages(tasks.__path__, f'{tasks.__name__}.'):
    if '.params.' in module.name and not module.name.endswith('_test'):
      importlib.import_module(module.name)
  return dict(sorted(_registered.items()))


def get(name: str) -> Experiment:
  """Returns the class that has a name, or that alone has it as a suffix.

  Args:
    name: such as `tasks.lm.params.c4.C4Spmd1BAdam4Replicas`, or
      `C4Spmd1BAdam4Replicas`, or `my_package.my_module.MyExperiment`.

  Raises:
    UnknownError: there is none, or there are several; it names them.
  """
  known = get_all()
  module = name.rpartition('.')[0]
  if not _matches(name, known) and module and _exists(module):
    importlib.import_module(module)
    known = get_all()
  found = _matches(name, known)
  if len(found) > 1:
    raise UnknownError(
      f'The experiment {name!r} may be any of {found}; give more of the name.'
    )
  if found:
    return known[found[0]]
  by_class = {full.rpartition('.')[2]: full for full in known}
  near = errors.nearest(name.rpartition('.')[2], by_class, n=3, cutoff=0.0)
  raise UnknownError(
    f'There is no experiment {name!r}. The nearest are'
    f' {[short_name(by_class[n]) for n in near]}; all are:\n'
    + '\n'.join(f'  {short_name(full)}' for full in known)
  )


def _matches(name: str, known: dict[str, Experiment]) -> list[str]:
  if name in known:
    return [name]
  return [full for full in known if full.endswith(f'.{name}')]


def _exists(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # A package above it.
    return False


def short_name(full: str) -> str:
  """Returns a full name as Pax's documents write it: `tasks.lm.params...`."""
  return full.removeprefix('examples.pax.')
