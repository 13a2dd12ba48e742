"""The registry of experiments, which finds a class by its name.

    @experiment_registry.register
    class Mine(base_experiment.BaseExperiment):
      ...

If this class is in examples/pax/tasks/lm/params/my.py, its names are `Mine`,
`my.Mine`, `params.my.Mine` and so on: every suffix of its full name that is
unique. An experiment in a different package is named by its module, which `get`
imports. `Old = Mine` in a module that registers experiments adds a second name.
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
  """No experiment has this name, or several experiments do."""


def register(
  experiment: Any = None,
  *,
  allow_overwrite: bool = False,
  tags: Sequence[str] = (),
) -> Any:
  """Registers an experiment; a decorator with or without arguments.

  If you rerun a notebook cell or reload a module, the new class replaces the
  one that it registered before. Two classes of a name in one module are an
  error, except with `allow_overwrite`. Pax uses `tags` in its tests.
  """
  if experiment is None:
    return functools.partial(register, allow_overwrite=allow_overwrite)
  name = full_name(experiment)
  may_replace = allow_overwrite or _is_run_again(experiment.__module__)
  if name in _registered and not may_replace:
    raise ValueError(
      f'There is already an experiment {name!r}, {_registered[name]!r}. Choose'
      ' a different name.'
    )
  _registered[name] = experiment
  return experiment


def _is_run_again(module: str) -> bool:
  """Whether a module was imported before, or is not a file but a notebook."""
  if module not in sys.modules:
    return False
  spec = getattr(sys.modules[module], '__spec__', None)
  # Python sets this while it imports a module, but not while it reloads one.
  return not getattr(spec, '_initializing', False)


def get_all() -> dict[str, Experiment]:
  """Imports all of `examples.pax.tasks`, and returns full name -> class.

  The result includes experiments of other packages registered so far.
  """
  for module in pkgutil.walk_packages(tasks.__path__, f'{tasks.__name__}.'):
    if '.params.' in module.name and not module.name.endswith('_test'):
      importlib.import_module(module.name)
  return dict(sorted(_registered.items()))


def get(name: str) -> Experiment:
  """Returns the experiment with a name or with a unique suffix.

  Examples are `C4Spmd1BAdam4Replicas`,
  `tasks.lm.params.c4.C4Spmd1BAdam4Replicas`, and
  `my_package.my_module.MyExperiment`. A prefix `paxml.` is ignored. If no
  experiment or several match, an UnknownError lists the candidates.
  """
  name = name.removeprefix('paxml.')
  known = get_all()
  module = name.rpartition('.')[0]
  if not (found := _matches(name, known)) and module:
    try:
      importlib.import_module(module)
    except ModuleNotFoundError as e:
      # Only ignore the error if the module or a package above it is missing.
      if not f'{module}.'.startswith(f'{e.name}.'):
        raise
    known = get_all()
    found = _matches(name, known)
  if len(found) > 1:
    raise UnknownError(
      f'The experiment {name!r} is ambiguous: {found}. Give a longer name.'
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
  """Returns the name under which `register` stores a class."""
  return f'{experiment.__module__}.{experiment.__qualname__}'


def _matches(name: str, known: dict[str, Experiment]) -> list[str]:
  """Returns the full names of all experiments that match a name."""
  if name in known:
    return [name]
  # Pax allows a name without `params`.
  paths = {
    path: full
    for full in known
    for path in (full, full.replace('.params.', '.'))
  }
  full_names = {experiment: full for full, experiment in known.items()}
  # Second names are other attributes of the modules.
  modules = {experiment.__module__ for experiment in full_names}
  for module in modules & sys.modules.keys():
    for attribute, value in vars(sys.modules[module]).items():
      if isinstance(value, type) and value in full_names:
        paths[f'{module}.{attribute}'] = full_names[value]
  return sorted(
    {full for path, full in paths.items() if f'.{path}'.endswith(f'.{name}')}
  )


def short_name(full: str) -> str:
  """Shortens a full name to `tasks.lm.params...`, as in Pax's documents."""
  return full.removeprefix('examples.pax.')
