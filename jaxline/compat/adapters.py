"""Wraps JAXline-style parts of a run in this library's interfaces.

At the start of a run, `train`, `decode` and `platform` give every checkpointer,
writer and action all methods. `experiments` does the same for experiments, and
`base_config.complete_config` for the keys of a config.
"""

from collections.abc import Callable
import inspect
import types
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict
import numpy as np

from jaxline import base_config
from jaxline.checkpoint import protocol
from jaxline.compat import checkpointers
from jaxline.compat import experiments
from jaxline.metrics import periodic
from jaxline.metrics import values
from jaxline.metrics import writers
from jaxline.run_directory import directory


class _ForeignCheckpointer(protocol.FullCheckpointer):
  """Wraps a checkpointer that has only the methods of JAXline's protocol."""

  def __init__(self, checkpointer: protocol.Checkpointer):
    self._checkpointer = checkpointer
    self.directory = directory.RunDirectory()
    for method in (
      'get_experiment_state',
      'save',
      'can_be_restored',
      'restore_path',
      'wait_for_checkpointing_to_finish',
    ):
      setattr(self, method, getattr(checkpointer, method))

  def restore(self, ckpt_series: str, *, step: int | None = None) -> None:
    if step is not None:
      self.steps(ckpt_series)  # This raises: the steps are unknown.
    self._checkpointer.restore(ckpt_series)

  def close(self) -> None:
    getattr(self._checkpointer, 'close', lambda: None)()


def full_checkpointer(
  checkpointer: Any, experiment_class: Any
) -> protocol.FullCheckpointer:
  """Returns a checkpointer with the full interface.

  Args:
    checkpointer: any `protocol.Checkpointer`. A subclass of ours whose
      `restore` takes no step counts as foreign.
    experiment_class: the run's class. Unless it is a `FullExperiment`, durable
      checkpoints are mirrored in JAXline's dictionary.
  """
  place = getattr(checkpointer, 'directory', None)
  # A wrapper that forwards the attributes of our checkpointer is full too.
  is_full = isinstance(place, directory.RunDirectory)
  takes_step = lambda restore: 'step' in inspect.signature(restore).parameters
  if not is_full or not takes_step(checkpointer.restore):
    return _ForeignCheckpointer(checkpointer)  # type: ignore[abstract]
  found = experiments.class_of(experiment_class)
  is_ours = found and experiments.is_full(found)
  is_mirrored = isinstance(checkpointer, checkpointers.MirroredCheckpointer)
  is_durable = isinstance(place, directory.DurableDirectory)
  if is_durable and not is_ours and not is_mirrored:
    return checkpointers.MirroredCheckpointer(checkpointer)  # type: ignore[abstract]
  return checkpointer


class _ForeignWriter(writers.MetricWriter):
  """Wraps a writer that has `write_scalars`, and perhaps other methods.

  As in JAXline, it gets the scalars of training on a background thread, and an
  experiment calls its other methods directly. Other kinds of records are
  dropped. The program, and not the thread, flushes and closes it.
  """

  # Values that are not numbers are written too.
  _conversions = values.CONVERSIONS | {'scalars': values.fetch}

  def __init__(self, writer: Any):
    super().__init__(types.SimpleNamespace(write_scalars=writer.write_scalars))
    self._writer = writer
    own = ('write_scalars', 'write_images', 'write_texts', 'flush', 'close')
    for method in own:
      if hasattr(writer, method):
        setattr(self, method, getattr(writer, method))

  def __getattr__(self, name: str) -> Any:
    # `copy` asks for attributes before `_writer` is set.
    return getattr(vars(self).get('_writer'), name)

  def __exit__(self, *unused: object) -> None:
    """Closes nothing: see the class."""


def full_config(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
  """Returns a config with all keys; warns of keys that a program redefines."""
  if own := base_config.own_keys(config):
    logging.warning(
      'The program uses these keys as its own; the library uses its defaults:'
      ' config.%s. %s',
      ', config.'.join(own),
      next(iter(own.values())),
    )
  return base_config.complete_config(config)


def full_writer(writer: Any) -> writers.MetricWriter:
  """Returns a writer with the full interface.

  Args:
    writer: any object with `write_scalars`; None writes nothing.
  """
  if isinstance(writer, writers.MetricWriter):
    return writer
  return writers.MetricWriter() if writer is None else _ForeignWriter(writer)


class _ForeignAction(periodic.Action):
  """Wraps a periodic action that has only JAXline's methods."""

  def __init__(self, action: Any):
    self._action = action
    for method in ('update_time', 'skip_time', 'flush_async', 'wait_to_finish'):
      if hasattr(action, method):
        setattr(self, method, getattr(action, method))

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    self._action(t, step, scalar_outputs)


def full_action(action: Callable[..., Any]) -> periodic.Action:
  """Returns a periodic action with the full interface."""
  if isinstance(action, periodic.Action):
    return action
  return _ForeignAction(action)


def rebindable(module: Any, name: str, *parts: str) -> Callable[[Any], Any]:
  """Returns a function that calls the method `name` of a run.

  If a program has rebound `name` in the module, it calls the program's function
  with JAXline's arguments; the last are the run's attributes `parts`.
  """
  own = getattr(module, name)

  def call(run: Any) -> Any:
    if (function := getattr(module, name)) is own:
      return getattr(run, name)()
    more = [getattr(run, part) for part in parts]
    return function(run.experiment_class, run.config, run.checkpointer, *more)

  return call


def log_outputs(step: int, scalar_values: Any) -> None:
  """Logs the scalars of a step, as `train._log_outputs` does in JAXline."""
  scalars = jax.tree.map(lambda x: np.asarray(x).tolist(), scalar_values)
  logging.info('global_step: %d, %s', step, scalars)
