"""The Python API: train, evaluate and load without a command line.

In a notebook:

    result = jaxline.fit(Experiment, config)
    plt.plot(*result.history['eval/loss'].T)
    jaxline.evaluate(result.directory, series='best')
    params = jaxline.load_weights(result.directory)
"""

from collections.abc import Iterator, Mapping
import contextlib
import copy
import dataclasses
import functools
import os
from typing import Any, Literal

import jax
from ml_collections import config_dict
import numpy as np

from jaxline import base_config
from jaxline import decode
from jaxline import errors
from jaxline import experiment as experiment_lib
from jaxline import platform
from jaxline import runs
from jaxline.base import stateful
from jaxline.checkpoint import durable
from jaxline.checkpoint import inspection
from jaxline.compat import adapters
from jaxline.compat import dictionary
from jaxline.compat import experiments
from jaxline.metrics import console
from jaxline.metrics import lines
from jaxline.metrics import writers
from jaxline.runs import html
from jaxline.runs import sweep as sweep_lib
from jaxline.supervision import preemption


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of `fit`. A notebook displays it."""

  directory: str
  experiment: Any  # Holds the weights of the last step.
  history: runs.History = dataclasses.field(repr=False)
  best: dict[str, float]  # The best `config.best_model_eval_metric`, if any.

  def _repr_html_(self) -> str:
    return html.show(self.directory, self.best, self.history)


def fit(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  overrides: Mapping[str, Any] | None = None,
  *,
  mode: str = 'train_and_eval',
) -> Result:
  """Trains an experiment, as `--jaxline_mode=train_and_eval` does.

  If `config.checkpoint_dir` holds a run, `fit` resumes it. If the key is None,
  each call makes a fresh directory. Ctrl-C saves the run, then raises
  KeyboardInterrupt. `fit` does not apply flags, `config.distributed` and the
  XLA flags of `config.xla`.

  Args:
    experiment_class: a class or a partial of one; None means the class that
      `config.experiment_class` names.
    config: the run's config; `fit` works on a copy.
    overrides: dotted key -> value, such as {'training_steps': 100}.
    mode: 'train_and_eval' or 'train'.

  Raises:
    errors.UsageError: the config, an override or the directory is wrong.
    TypeError: the type of an override differs from the type of the key's value.
  """
  origin = console.Origin(overrides=overrides or {})
  return _fit(experiment_class, config, mode, origin)


def fit_point(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  overrides: Mapping[str, Any],
  mode: str,
) -> Result:
  """Trains one point of a sweep. Rerunning the sweep resumes it."""
  origin = console.Origin(overrides=overrides, is_point=True)
  return _fit(experiment_class, config, mode, origin)


def _fit(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  mode: str,
  origin: console.Origin,
) -> Result:
  if mode not in ('train', 'train_and_eval'):
    raise errors.UsageError(
      f"mode is {mode!r}; expected 'train_and_eval' or 'train'."
    )
  config = _override(config, origin.overrides)
  dictionary.forget_published()  # Each call is a separate run.
  try:
    with preemption.Watch():
      directory, experiment = platform.start(
        experiment_class, config, mode, origin=origin
      )
  except preemption.Preempted as e:
    if e.code != preemption.SIGINT_EXIT_CODE:
      raise
    text = ' '.join([str(e), *getattr(e, '__notes__', [])])
    raise KeyboardInterrupt(text) from None
  run = runs.read(directory)
  return Result(directory, experiment, run.history, run.best)


def sweep(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  axes: sweep_lib.Axes,
  *,
  draws: int | None = None,
  index: int | None = None,
  mode: str = 'train_and_eval',
) -> list[runs.RunRecord]:
  """Trains one run for each combination of values; returns the best run first.

  A second call resumes interrupted runs and trains points that are new.

  Args:
    experiment_class: see `fit`.
    config: see `fit`; each run gets a directory below its `checkpoint_dir`.
    axes: dotted key -> its values. With `draws`, a range can replace the
      values: 'uniform:LOW:HIGH', 'int:LOW:HIGH' or 'log:LOW:HIGH'.
    draws: trains this many random points instead of all combinations.
    index: trains only this point, counted from 0.
    mode: see `fit`.
  """
  return sweep_lib.run(
    sweep_lib.points(axes, draws),
    functools.partial(_override, config),
    functools.partial(fit_point, experiment_class, mode=mode),
    index,
  )[0]


def history(directory: str | os.PathLike[str]) -> runs.History:
  """Returns the curves of a run: a dict with a method `to_pandas`."""
  return runs.read(directory).history


def _override(
  config: config_dict.ConfigDict, overrides: Mapping[str, Any] | None
) -> config_dict.ConfigDict:
  """Returns a copy of a config in which dotted keys have new values."""
  # The copy keeps references between keys, and shares the values.
  config = copy.deepcopy(config, {id(x): x for x in _values(config)})
  given = dict(overrides or {})
  for key, value in given.items():
    where, section = 'config', config
    for part in key.split('.'):
      part = part.partition('[')[0]  # `key[0]` names an entry of a list.
      names = section if isinstance(section, config_dict.ConfigDict) else ()
      errors.check_names([part], list(names), 'key', where)
      where, section = f'{where}.{part}', section[part]
    if isinstance(value, np.generic):
      given[key] = value.item()
  config.update_from_flattened_dict(given)
  return config.copy_and_resolve_references()


def _values(config: config_dict.ConfigDict) -> Iterator[Any]:
  """Yields the values of a config and of its nested configs."""
  for value in config.values():
    if isinstance(value, config_dict.ConfigDict):
      yield from _values(value)
    else:
      yield value


def load(
  directory: str | os.PathLike[str],
  overrides: Mapping[str, Any] | None = None,
  *,
  step: int | None = None,
  series: str = 'latest',
  experiment_class: Any = None,
  mode: str = 'eval',
) -> Any:
  """Returns a run's experiment with the weights of a checkpoint.

  It writes nothing, so you can call it while the run is training.

  Args:
    directory: the run's directory.
    overrides: dotted key -> value; replaces values of the run's config.
    step: the step of the checkpoint; None means the newest.
    series: 'latest' or 'best'.
    experiment_class: None means the class that the run's config names.
    mode: the mode of the experiment: 'eval', or 'decode', which opens no data.
  """
  loaded = _load(directory, overrides, step, series, experiment_class, mode)
  return stateful.live(loaded[0])


def _load(
  directory: str | os.PathLike[str],
  overrides: Mapping[str, Any] | None,
  step: int | None,
  series: str,
  experiment_class: Any,
  mode: str,
) -> tuple[Any, int, config_dict.ConfigDict]:
  """Returns a restored experiment, its step and its run's config."""
  config = _override(base_config.recorded_config(directory), overrides)
  if experiment_class is None:
    is_users = 'experiment_class' in (overrides or {})
    experiment_class = experiment_lib.resolve_experiment_class(
      config, recorded_in='' if is_users else os.fspath(directory)
    )
  may_be_own = not experiments.is_full(experiment_class)
  base_config.validate_config(config, may_be_own=may_be_own)
  config = base_config.complete_config(config)
  full = adapters.full_checkpointer(
    durable.DurableCheckpointer(config, 'eval_load'), experiment_class
  )
  full.directory.reads_only = True
  with contextlib.closing(full):
    restored = decode.restored_experiment(
      experiment_class, mode, config, full, series, step
    )
    return *restored, config


def load_weights(
  directory: str | os.PathLike[str],
  *,
  step: int | None = None,
  series: str = 'latest',
  weights: Literal['raw', 'averaged'] | None = None,
  model_state: bool = False,
) -> dict[str, Any]:
  """Returns the weights of a checkpoint as nested dicts of NumPy arrays.

  This needs neither the experiment nor its code.

  Args:
    directory: the run's directory.
    step: the step of the checkpoint; None means the newest.
    series: 'latest' or 'best'.
    weights: 'averaged' (see `sharded.average_weights`) or 'raw'. None means the
      weights that evaluation uses: averaged if the run averages them, else raw.
    model_state: whether to return {'params': weights, 'model_state': ...}. The
      model state is non-trained state such as BatchNorm statistics.
  """
  where = f'{os.fspath(directory)}/checkpoints/{series}'
  try:
    found = inspection.find(where if step is None else f'{where}:{step}')
    prefix = found.weights(weights)
    arrays = found.arrays(f'{prefix}.*')
    others = found.model_state()
    if others and not model_state:
      lines.warn_once(
        f'{found.name}: left out {len(others)} arrays of model_state, such as'
        f' {others[0]}. To get them, call load_weights(..., model_state=True).'
      )
    with found.reading():
      more = dict(found.read(dict.fromkeys(others if model_state else ())))
  except ValueError as e:
    raise errors.UsageError(str(e)) from e
  params = _nested({k.removeprefix(prefix): x for k, x in arrays.items()})
  if not model_state:
    return params
  state = _nested({k.removeprefix('state/'): x for k, x in more.items()})
  return {'model_state': {}, **state, 'params': params}


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Turns {'a/b': array} into {'a': {'b': array}}."""
  nested: dict[str, Any] = {}
  for name, array in arrays.items():
    *folders, last = name.split('/')
    inner = nested
    for folder in folders:
      inner = inner.setdefault(folder, {})
    inner[last] = array
  return nested


def evaluate(
  directory: str | os.PathLike[str],
  overrides: Mapping[str, Any] | None = None,
  *,
  step: int | None = None,
  series: str = 'latest',
  experiment_class: Any = None,
) -> dict[str, float]:
  """Evaluates a checkpoint of a run, and writes nothing.

  For the arguments see `load`. Returns the experiment's scalars by name.
  """
  experiment, global_step, config = _load(
    directory, overrides, step, series, experiment_class, 'eval'
  )
  rng = jax.random.PRNGKey(config.random_seed)
  inputs = experiment.evaluate_inputs(config, rng)(global_step)
  scalars = experiment.evaluate(
    global_step=inputs[0], rng=inputs[1], writer=writers.MetricWriter()
  )
  return writers.to_scalars(scalars or {})
