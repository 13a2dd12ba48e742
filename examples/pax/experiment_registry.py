"""Experiments by name.

    @experiment_registry.register
    class Mine(base_experiment.BaseExperiment):
      ...

in examples/pax/tasks/lm/params/my.py is `Mine`, `my.Mine`, `params.my.Mine` and
so on: every suffix of its full name that no other experiment has. One of
another package is named by its module, which is then imported. `Old = Mine` in
a module that registers experiments gives it a second name.
"""

from collections.abc import Sequence
import functools
import importlib
import pkgutil
import sys
from typing import Any

from examples.pax import base_experiment
from examples.pax import tasks
from jaxline import errors

Experiment = type[base_experiment.BaseExperiment]

# Full name -> class.
_registered: dict[str, Experiment] = {}


class UnknownError(errors.UsageError):
  """No experiment has this name, or several have."""


def register(
  experiment: Any = None,
  *,
  allow_overwrite: bool = False,
  tags: Sequence[str] = (),
) -> Any:
  """Makes a class known by its name; a decorator, with arguments or without.

  A notebook cell that is run again, or a module that is reloaded, replaces the
  class that it registered before.

  Args:
    experiment: the class.
    allow_overwrite: whether it replaces another of its name in any case.
    tags: as Pax has them, for tests of its own; without effect.

  Raises:
    ValueError: a module that is imported has two classes of this name.
  """
  if experiment is None:
    return functools.partial(register, allow_overwrite=allow_overwrite)
  name = full_name(experiment)
  may_replace = allow_overwrite or _is_run_again(experiment.__module__)
  if name in _registered and not may_replace:
    raise ValueError(
      f'There is an experiment {name!r} already, {_registered[name]!r}. Choose'
      ' another name.'
    )
  _registered[name] = experiment
  return experiment


def _is_run_again(module: str) -> bool:
  """Whether a module has been imported before, or is no file, as a notebook."""
  if module not in sys.modules:
    return False
  spec = getattr(sys.modules[module], '__spec__', None)
  # Python sets it while it imports a module, but not while it reloads one.
  return not getattr(spec, '_initializing', False)


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
      `C4Spmd1BAdam4Replicas`, or `my_package.my_module.MyExperiment`. With
      `paxml.` in front it means the same.

  Raises:
    UnknownError: there is none, or there are several; it names them.
  """
  name = name.removeprefix('paxml.')
  known = get_all()
  module = name.rpartition('.')[0]
  if not (found := _matches(name, known)) and module:
    try:
      importlib.import_module(module)
    except ModuleNotFoundError as e:
      # It is the module, or a package above it, that does not exist.
      if not f'{module}.'.startswith(f'{e.name}.'):
        raise
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


def full_name(experiment: Experiment) -> str:
  """Returns the name under which `register` has a class."""
  return f'{experiment.__module__}.{experiment.__qualname__}'


def _matches(name: str, known: dict[str, Experiment]) -> list[str]:
  """Returns the full names of the experiments that a name may mean."""
  if name in known:
    return [name]
  # Pax also leaves out `params`.
  paths = {
    path: full
    for full in known
    for path in (full, full.replace('.params.', '.'))
  }
  full_names = {experiment: full for full, experiment in known.items()}
  # Second names: other attributes of the modules.
  modules = {experiment.__module__ for experiment in full_names}
  for module in modules & sys.modules.keys():
    for attribute, value in vars(sys.modules[module]).items():
      if isinstance(value, type) and value in full_names:
        paths[f'{module}.{attribute}'] = full_names[value]
  return sorted(
    {full for path, full in paths.items() if f'.{path}'.endswith(f'.{name}')}
  )


def short_name(full: str) -> str:
  """Returns a full name as Pax's documents write it: `tasks.lm.params...`."""
  return full.removeprefix('examples.pax.')
