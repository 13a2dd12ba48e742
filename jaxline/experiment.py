"""The contract between an experiment and the loops: JAXline's, kept."""

import abc
import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import time
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict
import numpy as np

from jaxline import debug
from jaxline import periodic
from jaxline import writers
from jaxline.compat import devices
from jaxline.compat import prng

Scalars = Mapping[str, Any]
# (global_step, state key) -> what `step` gets (global_step, rng), and the state
# key of the next step.
StepInputs = Callable[[int, jax.Array], tuple[Any, Any, jax.Array]]


class AbstractExperiment(abc.ABC):
  """An experiment: its state, one step of training, one evaluation.

  This is the per-device style: what the loops hand to `step` and `evaluate`
  has a leading axis of local devices, ready for `jax.pmap`. See
  `sharded.ShardedExperiment` for the style with one program over a mesh.

  Attributes:
    CHECKPOINT_ATTRS: attribute -> name in the checkpoint, for values with a
      leading axis of local devices that all hold the same: the first device's
      slice is stored, and broadcast to all local devices on restore.
    NON_BROADCAST_CHECKPOINT_ATTRS: the same for anything else, stored whole.
    PER_PROCESS_ENTRIES: names in the checkpoint of what each process has for
      itself; of everything else that is not spread over the hosts, a durable
      checkpoint keeps the first process's.
    CHANGEABLE_ON_RESUME: paths in the config, such as
      'experiment_kwargs.config.eval_batches', of keys that change no training
      step: a run may be resumed with other values of these, and of all that is
      below them. Another value of any other key in `experiment_kwargs` is
      another run.
    CONFIG_CLASS: the dataclass that `experiment_kwargs.config` is read into,
      if there is one: `base_config.read`. A checkpoint that was made before
      one of its fields was added is taken to have had the field's default.
    IS_SHARDED: whether `sharded.ShardedExperiment` is its kind.
    num_evaluated: how many earlier steps were evaluated, in this process or
      before the run was resumed; set before each `evaluate`.
  """

  CHECKPOINT_ATTRS: dict[str, str] = {}
  NON_BROADCAST_CHECKPOINT_ATTRS: dict[str, str] = {}
  PER_PROCESS_ENTRIES: tuple[str, ...] = ()
  CHANGEABLE_ON_RESUME: tuple[str, ...] = ()
  CONFIG_CLASS: type | None = None
  IS_SHARDED: bool = False
  num_evaluated: int = 0

  @abc.abstractmethod
  def __init__(self, mode: str, init_rng: jax.Array | None = None):
    """Constructs the experiment.

    Args:
      mode: 'train', 'decode', or what evaluation was started as (such as
        'eval').
      init_rng: the key to initialise weights from.
    """
    del mode, init_rng

  def initialize_train_step_rng(self, rng: jax.Array) -> jax.Array:
    """Places the key of the training steps on the devices.

    Args:
      rng: one key.

    Returns:
      A copy for each local device, [local devices, ...].
    """
    return devices.bcast_local_devices(rng)

  def step_inputs(self, config: config_dict.ConfigDict) -> StepInputs:
    """Returns what makes the arguments of each step.

    Args:
      config: the run's config; `random_mode_train` relates the keys.

    Returns:
      A function of the step's number and the state key that returns the
      per-device step, the per-device keys and the next state key.
    """
    return prng.DeviceStepKeys(config.random_mode_train)

  def evaluate_inputs(
    self, config: config_dict.ConfigDict, rng: jax.Array
  ) -> Callable[[int], tuple[Any, Any]]:
    """Returns what makes the arguments of each evaluation.

    Args:
      config: the run's config; `random_mode_eval` relates the keys.
      rng: the evaluation key.

    Returns:
      A function of the step's number that returns the per-device step and
      the per-device keys, the same keys each time.
    """
    host_id = prng.host_id_devices_for_rng(config.random_mode_eval)
    keys = jax.pmap(
      lambda key, host: prng.specialize_rng_host_device(
        key, host, axis_name='i', mode=config.random_mode_eval
      ),
      axis_name='i',
    )(devices.bcast_local_devices(rng), host_id)
    return lambda global_step: (
      devices.bcast_local_devices(jax.numpy.asarray(global_step)),
      keys,
    )

  @abc.abstractmethod
  def step(
    self, *, global_step: Any, rng: Any, writer: writers.Writer | None
  ) -> Scalars:
    """Runs one training step.

    An override may take only the keywords it wants:
    `def step(self, global_step, **unused)`.

    Args:
      global_step: the number of steps done before, [local devices] int32.
      rng: a fresh key for each local device, [local devices, ...].
      writer: for logging beyond the returned scalars.

    Returns:
      Scalars to log, or None for none. Leave them on the device: they are
      fetched on another thread when they are due. With `tokens_per_step` or
      `examples_per_step` among them, `tokens_per_sec` or `examples_per_sec` is
      logged too.
    """

  @abc.abstractmethod
  def evaluate(
    self, *, global_step: Any, rng: Any, writer: writers.Writer | None
  ) -> Scalars | None:
    """Runs one whole evaluation.

    Args:
      global_step: the step that is evaluated, [local devices] int32.
      rng: keys as for `step`, but the same at every call.
      writer: for logging beyond the returned scalars.

    Returns:
      Scalars to log.
    """

  def decode(
    self, prompts: Sequence[str], rng: jax.Array
  ) -> list[list[dict[str, Any]]]:
    """Continues prompts; for `--jaxline_mode=decode`, which alone needs it.

    The experiment was constructed with the mode 'decode', and its weights are
    restored. To open training data is a waste then: it may not be there.

    Args:
      prompts: as many each time. The last of a file are filled up with others,
        whose continuations are not looked at.
      rng: one key, of its own each time.

    Returns:
      For each prompt its continuations: dicts of what JSON has, one entry the
      'text', others such as 'score'. With several processes all get the same
      prompts, and must return the same.

    Raises:
      NotImplementedError: the experiment has no such thing.
    """
    raise NotImplementedError(f'{type(self).__name__} has no `decode`.')

  def should_run_step(
    self, global_step: int, config: config_dict.ConfigDict
  ) -> bool:
    """Returns whether to run the step of this number."""
    steps = config.training_steps
    return steps is None or global_step < steps

  def train_loop(
    self,
    config: config_dict.ConfigDict,
    state: Any,
    periodic_actions: Sequence[periodic.Action],
    writer: writers.Writer | None = None,
  ) -> None:
    """Runs steps until `should_run_step` says no.

    Args:
      config: the run's config.
      state: the live state of the series `latest`; its `global_step` and
        `train_step_rng` are kept up to date.
      periodic_actions: each is called after each step as
        `action(time, global_step, scalars)`.
      writer: handed to `step`.
    """
    actions = tuple(periodic_actions)
    step_inputs = self.step_inputs(config)
    max_in_flight = max_steps_in_flight(config)
    in_flight: collections.deque[list[jax.Array]] = collections.deque()
    with debug.log_activity('training loop'):
      while self.should_run_step(state.global_step, config):
        with jax.profiler.StepTraceAnnotation(
          'train', step_num=state.global_step
        ):
          global_step, rng, next_rng = step_inputs(
            state.global_step, state.train_step_rng
          )
          scalars = self.step(global_step=global_step, rng=rng, writer=writer)
        check_scalars(scalars, self, 'step')
        # The state's step and key move together: a checkpoint must not see
        # one without the other.
        state.global_step += 1
        state.train_step_rng = next_rng
        now = time.time()
        for action in actions:
          action(now, state.global_step, scalars)
        # Only now, with this step queued, wait for the one before: the
        # devices never idle and the host never runs further ahead.
        in_flight.append(_arrays(scalars))
        if len(in_flight) >= max_in_flight:
          _wait(in_flight.popleft())

  def snapshot_state(self) -> dict[str, Any]:
    """Returns the experiment's state for a checkpoint.

    The arrays are the live ones; the checkpointer copies them before the next
    step can donate their buffers.

    Returns:
      Name in the checkpoint -> value, as the two attribute dicts say.
    """
    if not self.CHECKPOINT_ATTRS and not self.NON_BROADCAST_CHECKPOINT_ATTRS:
      logging.warning(
        '%s has neither CHECKPOINT_ATTRS nor NON_BROADCAST_CHECKPOINT_ATTRS:'
        ' its checkpoints hold no weights.',
        type(self).__name__,
      )
    snapshot = {
      name: devices.get_first(getattr(self, attribute))
      for attribute, name in self.CHECKPOINT_ATTRS.items()
    }
    for attribute, name in self.NON_BROADCAST_CHECKPOINT_ATTRS.items():
      snapshot[name] = getattr(self, attribute)
    return snapshot

  def snapshot_template(self) -> dict[str, Any]:
    """Returns where to restore those entries that are stored leaf by leaf.

    A durable checkpoint stores such an entry as arrays alone, checks them
    against the template before it restores any, and reads them straight into
    their places. Other entries are stored with their structure.

    Returns:
      Name in the checkpoint -> tree of jax.ShapeDtypeStruct with shardings.
    """
    return {}

  def wants_restored(self, name: str) -> bool:
    """Returns whether a restore shall read an array.

    Args:
      name: of an entry or an array in it, such as 'state/params/w'. In place
        of what is not wanted, the snapshot has its jax.ShapeDtypeStruct, or
        nothing.
    """
    del name
    return True

  def restore_from_snapshot(self, snapshot_state: Mapping[str, Any]) -> None:
    """Restores what `snapshot_state` returned.

    Args:
      snapshot_state: name in the checkpoint -> value.

    Arrays of other shapes or types than those that the experiment has now are
    restored all the same, with a warning.

    Raises:
      ValueError: a name is missing; then nothing was changed.
    """
    names = self.CHECKPOINT_ATTRS | self.NON_BROADCAST_CHECKPOINT_ATTRS
    if missing := sorted(set(names.values()) - set(snapshot_state)):
      raise ValueError(
        f'The checkpoint lacks {missing} for {type(self).__name__}; it holds'
        f' {sorted(snapshot_state)}.'
      )
    self._warn_of_differences(snapshot_state)
    layouts = {
      attribute: _layout(getattr(self, attribute, None))
      for attribute in self.NON_BROADCAST_CHECKPOINT_ATTRS
    }
    # All old values go before any new one comes, so that the device's memory
    # need not hold both.
    for attribute in names:
      # A default in the class body cannot be deleted, and needs not be.
      with contextlib.suppress(AttributeError):
        delattr(self, attribute)
    for attribute, name in self.CHECKPOINT_ATTRS.items():
      value = devices.bcast_local_devices(snapshot_state[name])
      setattr(self, attribute, value)
    for attribute, name in self.NON_BROADCAST_CHECKPOINT_ATTRS.items():
      value = _put(snapshot_state[name], layouts[attribute])
      setattr(self, attribute, value)

  def _warn_of_differences(self, snapshot_state: Mapping[str, Any]) -> None:
    """Names the arrays that a restore gives another shape or type."""
    wrong: list[str] = []
    names = self.CHECKPOINT_ATTRS | self.NON_BROADCAST_CHECKPOINT_ATTRS
    for attribute, name in names.items():
      live = getattr(self, attribute, None)
      if not any(map(_is_array, jax.tree.leaves(live))):
        continue  # It is made later, such as in the first step.
      if attribute in self.CHECKPOINT_ATTRS:  # Without the axis of devices.
        live = jax.tree.map(
          lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), live
        )
      saved = snapshot_state[name]
      wrong += differences(
        saved, live, 'the checkpoint has', 'the experiment has', name
      )
    if wrong:
      logging.warning(
        'The checkpoint holds arrays of other shapes or types than %s has now;'
        ' they are restored as they were saved.\n%s',
        type(self).__name__,
        '\n'.join(wrong),
      )

  def share_state(self, trained: 'AbstractExperiment') -> None:
    """Takes over the live state of an experiment in training, copying nothing.

    `train_and_eval` calls this on its evaluating experiment before each
    evaluation; training waits meanwhile, so no buffer is donated.

    Args:
      trained: the experiment in training, of the same class.
    """
    if type(self).snapshot_state is not AbstractExperiment.snapshot_state:
      # Its state is what its own snapshots say; copied, since what they hold
      # may be donated by the next step.
      snapshot = jax.tree.map(devices.freeze, trained.snapshot_state())
      self.restore_from_snapshot(snapshot)
      return
    attributes = [*self.CHECKPOINT_ATTRS, *self.NON_BROADCAST_CHECKPOINT_ATTRS]
    if not attributes:
      logging.log_first_n(
        logging.WARNING,
        '%s has neither CHECKPOINT_ATTRS nor NON_BROADCAST_CHECKPOINT_ATTRS:'
        ' what is evaluated are the weights that its constructor made.',
        1,
        type(self).__name__,
      )
    for attribute in attributes:
      setattr(self, attribute, getattr(trained, attribute))

  def on_new_best_model(self, best_state: Any) -> None:
    """Called before each save of the series `best`.

    Args:
      best_state: the state about to be saved; entries may be added.
    """
    del best_state


def differences(
  a: Any, b: Any, a_says: str, b_says: str, name: str = ''
) -> list[str]:
  """Returns a line for each array whose shape or type is not the same.

  Args:
    a: tree of arrays, or of what has shape and dtype.
    b: another.
    a_says: what to put before what `a` has.
    b_says: the same for `b`.
    name: what to put before each path.
  """
  have, want = dict(_shapes(a)), dict(_shapes(b))
  return [
    f'{name}{path}: {a_says} {have.get(path, "nothing")}, {b_says}'
    f' {want.get(path, "nothing")}'
    for path in sorted(have.keys() | want.keys())
    if have.get(path) != want.get(path)
  ]


def _shapes(tree: Any) -> Iterator[tuple[str, str]]:
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    dtype = getattr(x, 'dtype', type(x).__name__)
    yield jax.tree_util.keystr(path), f'{dtype}{list(np.shape(x))}'


def _is_array(x: Any) -> bool:
  return isinstance(x, jax.Array | np.ndarray)


def _is_on_devices(value: Any) -> bool:
  """Returns whether a value is a tree of jax.Arrays and nothing else.

  Others may change their shape in the course of a run, as a buffer does.
  """
  leaves = jax.tree.leaves(value)
  return bool(leaves) and all(isinstance(x, jax.Array) for x in leaves)


def _layout(value: Any) -> dict[str, Any] | None:
  """Returns path -> (shape, sharding) of a tree of jax.Arrays; else None."""
  if not _is_on_devices(value):
    return None
  return {
    jax.tree_util.keystr(path): (x.shape, x.sharding)
    for path, x in jax.tree_util.tree_leaves_with_path(value)
  }


def _put(value: Any, layout: dict[str, Any] | None) -> Any:
  """Puts arrays where those of the same path and shape were."""
  if layout is None:
    return value

  def put(path: Any, x: Any) -> Any:
    shape, sharding = layout.get(jax.tree_util.keystr(path), (None, None))
    if shape == np.shape(x):
      return jax.device_put(x, sharding)
    return jax.device_put(x) if isinstance(x, np.ndarray) else x

  return jax.tree_util.tree_map_with_path(put, value)


def check_scalars(scalars: Any, experiment: Any, method: str) -> None:
  """Checks what a `step` or an `evaluate` has returned.

  Args:
    scalars: what it returned.
    experiment: whose method it is.
    method: its name.

  Raises:
    TypeError: it is neither a mapping nor None.
  """
  # Not by its class: a ConfigDict is no Mapping, nor is a mock.
  if scalars is not None and not hasattr(scalars, 'items'):
    raise TypeError(
      f'{type(experiment).__name__}.{method} returned {describe(scalars)};'
      " expected a dict of scalars, such as {'loss': loss}, or None."
    )


def describe(value: Any) -> str:
  """Returns, for a message, what kind of value it is: without its content."""
  if isinstance(value, tuple | list):
    kinds = ', '.join(describe(x) for x in value[:5])
    more = ', ...' if len(value) > 5 else ''
    return f'a {type(value).__name__} of {len(value)} ({kinds}{more})'
  if hasattr(value, 'shape') and hasattr(value, 'dtype'):
    return f'an array {value.dtype}{list(value.shape)}'
  if isinstance(value, Mapping):
    return f'a {type(value).__name__} with the keys {list(value)[:5]}'
  if isinstance(value, str | int | float | bool | None):
    return f'{type(value).__name__} {value!r}'[:80]
  return f'an object of the class {type(value).__name__}'


def max_steps_in_flight(config: config_dict.ConfigDict) -> int:
  """Returns how many steps the loop lets the devices have at once."""
  # An old experiment's config may be made without our base config.
  if 'max_steps_in_flight' in config and config.max_steps_in_flight is not None:
    return config.max_steps_in_flight
  # Programs of several CPU devices wait for each other in one thread pool:
  # two at once can starve it for ever.
  several = jax.local_device_count() > 1
  return 1 if jax.default_backend() == 'cpu' and several else 2


def _arrays(scalars: Any) -> list[jax.Array]:
  """Returns a step's results that may still be in the making."""
  return [
    x
    for x in jax.tree.leaves(scalars)
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
  ]


def _wait(arrays: list[jax.Array]) -> None:
  for array in arrays:
    # Deleted: the experiment returned a buffer that it has donated since.
    if not array.is_deleted():
      array.block_until_ready()
