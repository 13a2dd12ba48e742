"""The base classes of experiments (JAXline's API), and the training loop."""

import abc
import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import time
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict

from jaxline import errors
from jaxline.base import debug
from jaxline.base import keys
from jaxline.base import lazy
from jaxline.base import named_class
from jaxline.base import stateful
from jaxline.metrics import lines
from jaxline.metrics import periodic
from jaxline.metrics import scalars as scalars_lib
from jaxline.metrics import writers
from jaxline.parallel import devices
from jaxline.parallel import prng

lazy.complete(__name__)

_NO_TRACE = contextlib.nullcontext()

Scalars = Mapping[str, Any]
StopTraining = errors.StopTraining
# Maps (global_step, state key) to (global_step, rng, next state key). The first
# two results are the arguments of `step`.
StepInputs = Callable[[int, jax.Array], tuple[Any, Any, jax.Array]]


class AbstractExperiment(abc.ABC):
  """An experiment: its state, one training step and one evaluation.

  This is the per-device style: the arguments of `step` and `evaluate` have a
  leading axis of local devices, ready for `jax.pmap`. In the sharded style,
  `sharded.ShardedExperiment`, a step is one program over a mesh.

  Attributes:
    CHECKPOINT_ATTRS: attribute -> name in the checkpoint, for values with a
      leading axis of local devices whose rows are all equal. A checkpoint
      stores the first row; a restore broadcasts it to all local devices.
    NON_BROADCAST_CHECKPOINT_ATTRS: attribute -> name in the checkpoint, for all
      other values. A checkpoint stores them unchanged.
  """

  CHECKPOINT_ATTRS: dict[str, str] = {}
  NON_BROADCAST_CHECKPOINT_ATTRS: dict[str, str] = {}

  @abc.abstractmethod
  def __init__(self, mode: str, init_rng: jax.Array | None = None):
    """Constructs the experiment.

    Args:
      mode: 'train', 'decode', or an evaluation mode such as 'eval'.
      init_rng: the random key for initializing the weights.
    """

  def initialize_train_step_rng(self, rng: jax.Array) -> jax.Array:
    """Returns a copy of the key for each local device, [local devices, ...]."""
    return devices.bcast_local_devices(rng)

  @abc.abstractmethod
  def step(
    self, *, global_step: Any, rng: Any, writer: writers.MetricWriter | None
  ) -> Scalars:
    """Runs one training step.

    An override may name only the keywords that it uses:
    `def step(self, global_step, **unused)`.

    Args:
      global_step: number of steps completed so far, [local devices] int32.
      rng: a fresh key for each local device, [local devices, ...].
      writer: for logging more than the returned scalars; the loops pass one.

    Returns:
      Scalars to log, or None. Leave them on the device: a background thread
      fetches them when they are due. If you return `tokens_per_step` or
      `examples_per_step`, the loop also logs `tokens_per_sec` or
      `examples_per_sec`.

    Raises:
      StopTraining: to end the run before this step.
    """

  @abc.abstractmethod
  def evaluate(
    self, *, global_step: Any, rng: Any, writer: writers.MetricWriter | None
  ) -> Scalars | None:
    """Runs one evaluation over all of its data.

    Args:
      global_step: the training step of the weights, [local devices] int32.
      rng: keys as for `step`, but the same at every call.
      writer: for logging more than the returned scalars.

    Returns:
      Scalars to log.

    Raises:
      StopTraining: to end the run; this evaluation is not logged.
    """

  def should_run_step(
    self, global_step: int, config: config_dict.ConfigDict
  ) -> bool:
    """Returns whether to run a step after `global_step` completed steps."""
    steps = config['training_steps']  # Attribute access takes 0.5 us more.
    return steps is None or global_step < steps

  def train_loop(
    self,
    config: config_dict.ConfigDict,
    state: Any,
    periodic_actions: Sequence[periodic.Action],
    writer: writers.MetricWriter | None = None,
  ) -> None:
    """Runs steps until `should_run_step` returns False.

    Args:
      config: the run's config.
      state: the live state of the series `latest`; the loop updates its
        `global_step` and `train_step_rng` after each step.
      periodic_actions: each is called after each step as
        `action(time, global_step, scalars)`.
      writer: passed to `step`.
    """
    actions = tuple(periodic_actions)
    step_inputs = (
      self.step_inputs(config)
      if isinstance(self, FullExperiment)
      else _device_step_keys(config)
    )
    max_in_flight = max_steps_in_flight(config)
    in_flight: collections.deque[list[Any]] = collections.deque()
    stop: StopTraining | None = None
    # Reading a dict's entry as an attribute takes five times as long.
    is_dict = isinstance(state, dict) and 'global_step' in state
    read = state.__getitem__ if is_dict else functools.partial(getattr, state)
    with debug.log_activity('training loop', category='steps'):
      while self.should_run_step(step := read('global_step'), config):
        with _trace(step):
          global_step, rng, next_rng = step_inputs(step, read('train_step_rng'))
          try:
            scalars = self.step(global_step=global_step, rng=rng, writer=writer)
          except StopTraining as e:
            done = self._scalars_of_done(step + 1)
            if done is None:
              raise
            scalars, stop = done, e  # The update is done, so the step counts.
        check_scalars(scalars, self, 'step')
        # The state's step and key change together: a checkpoint must not hold
        # one without the other.
        state.global_step = step = step + 1
        state.train_step_rng = next_rng
        now = time.time()
        for action in actions:
          action(now, step, scalars)
        # Wait for an earlier step only after this one is queued: the devices
        # never idle, and the host runs ahead by a bounded number of steps.
        in_flight.append(scalars_lib.leaves(scalars))
        if len(in_flight) >= max_in_flight:
          _wait(in_flight.popleft())
        if stop is not None:
          raise stop

  def _scalars_of_done(self, step: int) -> Scalars | None:
    """Returns the scalars of a step that raised StopTraining after its update.

    None means that the step changed nothing and does not count.
    """
    return None

  def snapshot_state(self) -> dict[str, Any]:
    """Returns the experiment's state for a checkpoint.

    The arrays are the live ones; the checkpointer copies them before the next
    step can donate their buffers.

    Returns:
      Name in the checkpoint -> value, for the attributes in CHECKPOINT_ATTRS
      and NON_BROADCAST_CHECKPOINT_ATTRS.
    """
    if not self.CHECKPOINT_ATTRS and not self.NON_BROADCAST_CHECKPOINT_ATTRS:
      logging.warning(
        '%s sets neither CHECKPOINT_ATTRS nor NON_BROADCAST_CHECKPOINT_ATTRS,'
        ' so its checkpoints hold no weights.',
        type(self).__name__,
      )
    snapshot = {
      name: devices.get_first(getattr(self, attribute))
      for attribute, name in self.CHECKPOINT_ATTRS.items()
    }
    for attribute, name in self.NON_BROADCAST_CHECKPOINT_ATTRS.items():
      snapshot[name] = getattr(self, attribute)
    return snapshot

  def restore_from_snapshot(self, snapshot_state: Mapping[str, Any]) -> None:
    """Restores a state that `snapshot_state` returned.

    Raises:
      ValueError: a name is missing; nothing has been changed.
    """
    names = self.CHECKPOINT_ATTRS | self.NON_BROADCAST_CHECKPOINT_ATTRS
    if missing := sorted(set(names.values()) - set(snapshot_state)):
      raise ValueError(
        f'The checkpoint lacks {missing} for {type(self).__name__}; it holds'
        f' {sorted(snapshot_state)}.'
      )
    layouts = {
      attribute: devices.layout(getattr(self, attribute, None))
      for attribute in self.NON_BROADCAST_CHECKPOINT_ATTRS
    }
    # Delete all old values first, so that the devices never hold both.
    for attribute in names:
      # `delattr` fails for a default that only the class has.
      with contextlib.suppress(AttributeError):
        delattr(self, attribute)
    for attribute, name in self.CHECKPOINT_ATTRS.items():
      value = devices.bcast_local_devices(snapshot_state[name])
      setattr(self, attribute, value)
    for attribute, name in self.NON_BROADCAST_CHECKPOINT_ATTRS.items():
      value = devices.put_by_layout(snapshot_state[name], layouts[attribute])
      setattr(self, attribute, value)

  def on_new_best_model(self, best_state: Any) -> None:
    """Called before each save of the series `best`.

    Args:
      best_state: the state about to be saved; you may add entries.
    """
    del best_state


class FullExperiment(AbstractExperiment, stateful.Stateful):
  """An experiment with every method and attribute that the library uses.

  `sharded.ShardedExperiment` derives from it. Derive from it in the per-device
  style too, if your experiment sets one of these names. A program written for
  JAXline may give these names any meaning, so the library reads them only from
  this class (see `compat.experiments.full_experiment`).

  Attributes:
    FLAGS_NONFINITE: whether `step` returns the scalar `nonfinite`: see
      `metrics.scalars.NONFINITE` for its values.
    on_nonfinite: default of `config.on_nonfinite`, used if the key is None.
    run_config: the run's config, if the experiment reads the keys for sharded
      steps; otherwise None.
    num_evaluated: number of earlier steps that were evaluated, including those
      before the run was resumed; set before each `evaluate`.
    data_summary: one line for the terminal that describes the data.
    last_batch: the batch of the last step, on the devices; None if unknown.
    traced_batch: the batch shapes of the step's last compilation; None if the
      step is not one compiled program.
  """

  FLAGS_NONFINITE: bool = False
  # JAXline continues after a NaN; its experiments may log one deliberately.
  on_nonfinite: str = 'warn'
  run_config: Any = None
  num_evaluated: int = 0
  data_summary: str = ''
  last_batch: Any = None
  traced_batch: Any = None

  @classmethod
  def eval_init_rng(cls, config: config_dict.ConfigDict) -> jax.Array:
    """Returns the initialization key for evaluating and decoding.

    As in JAXline, it differs from the training key, which is split from it.
    """
    return jax.random.PRNGKey(config.random_seed)

  def overrides(self, method: str) -> bool:
    """Returns whether the class replaces this default method."""
    found = getattr(getattr(self, method), '__func__', None)
    return found is not getattr(FullExperiment, method)

  def summary(self) -> dict[str, str]:
    """Returns the lines that the terminal shows at the start: name -> text."""
    names = self.CHECKPOINT_ATTRS.items()
    found = [k for k, name in names if 'param' in f'{k} {name}']
    own = stateful.live(self)
    leaves = jax.tree.leaves([getattr(own, name, None) for name in found])
    # The first axis counts the devices.
    weights = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves]
    return {'Parameters': lines.weights(weights), 'Data': self.data_summary}

  def step_inputs(self, config: config_dict.ConfigDict) -> StepInputs:
    """Returns a function that makes the arguments of each step.

    `config.random_mode_train` decides which hosts and devices share a key.
    """
    return _device_step_keys(config)

  def evaluate_inputs(
    self, config: config_dict.ConfigDict, rng: jax.Array
  ) -> Callable[[int], tuple[Any, Any]]:
    """Returns a function that maps a step to the arguments of `evaluate`.

    Every evaluation gets the same keys, derived from `rng`.
    `config.random_mode_eval` decides which hosts and devices share a key.
    """
    mode = keys.value_of(config, prng.KEYS, 'random_mode_eval')
    args = devices.bcast_local_devices(rng), prng.host_id_devices_for_rng(mode)
    specialize = functools.partial(
      prng.specialize_rng_host_device, axis_name='i', mode=mode
    )
    device_keys = jax.pmap(specialize, 'i')(*args)
    return lambda global_step: (
      devices.bcast_local_devices(jax.numpy.asarray(global_step)),
      device_keys,
    )

  def check_prompt(self, prompt: Any) -> None:
    """Raises `errors.UsageError` for a prompt that `decode` does not support.

    It is called before the weights are restored. A prompt is a text, a list of
    chat messages, or a dict with `messages` and `tools`; by default, only text.
    """
    if not isinstance(prompt, str):
      raise errors.UsageError(
        f'{type(self).__name__} does not support chats. Give text, as "prompt".'
      )

  def decode(
    self, prompts: Sequence[Any], rng: jax.Array
  ) -> list[list[dict[str, Any]]]:
    """Continues prompts; called only by `--jaxline_mode=decode`.

    The experiment was constructed with the mode 'decode', and its weights are
    restored. It should not open training data, which may be missing.

    Args:
      prompts: prompts that `check_prompt` accepted, the same number at each
        call. Copies of the last prompt fill the last call; their continuations
        are ignored.
      rng: one key, different at each call.

    Returns:
      A list of continuations for each prompt: dicts of JSON values with the
      entry 'text' and others such as 'score'. All processes get the same
      prompts and must return the same continuations.

    Raises:
      NotImplementedError: the experiment cannot continue prompts.
    """
    raise NotImplementedError(f'{self.__class__.__name__} has no `decode`.')

  def wants_restored(self, name: str) -> bool:
    """Returns whether a restore should read `name`, an entry or an array in it.

    By default it reads the entries of the checkpoint attributes, or all entries
    if the class overrides `snapshot_state`.
    """
    names = self.CHECKPOINT_ATTRS | self.NON_BROADCAST_CHECKPOINT_ATTRS
    return self.overrides('snapshot_state') or any(
      f'{name}/'.startswith(f'{entry}/') for entry in names.values()
    )

  def share_state(self, trained: AbstractExperiment) -> None:
    """Shares the live state of an experiment in training, without copies.

    `train_and_eval` calls this on its evaluating experiment before each
    evaluation. Training is paused, so no buffer is donated.
    """
    if self.overrides('snapshot_state'):
      # Only the override knows what the state is. Copy it: the next step may
      # donate the arrays of the snapshot.
      snapshot = jax.tree.map(devices.freeze, trained.snapshot_state())
      self.restore_from_snapshot(snapshot)
      return
    for attribute in (
      self.CHECKPOINT_ATTRS | self.NON_BROADCAST_CHECKPOINT_ATTRS
    ):
      value = getattr(stateful.live(trained), attribute)
      setattr(stateful.live(self), attribute, value)


def _device_step_keys(config: config_dict.ConfigDict) -> StepInputs:
  mode = keys.value_of(config, prng.KEYS, 'random_mode_train')
  return prng.DeviceStepKeys(mode)


def resolve_experiment_class(
  config: config_dict.ConfigDict, *, recorded_in: str = ''
) -> Any:
  """Returns the class of `config.experiment_class`: see `named_class.find`."""
  name = getattr(config, 'experiment_class', None)
  return named_class.find(f'{name}', AbstractExperiment, recorded_in)


def check_scalars(scalars: Any, experiment: Any, method: str) -> None:
  """Raises TypeError if a method returned neither a mapping nor None."""
  # Test for `items` instead of Mapping, which ConfigDict does not derive from.
  if scalars is not None and not hasattr(scalars, 'items'):
    raise TypeError(
      f'{experiment.__class__.__name__}.{method} returned a'
      f' {type(scalars).__name__}: {scalars!r:.80}. Return a dict of scalars,'
      " such as {'loss': loss}, or None."
    )


def max_steps_in_flight(config: config_dict.ConfigDict) -> int:
  """Returns the maximum number of dispatched steps that have not finished."""
  steps = keys.value_of(config, devices.KEYS, 'max_steps_in_flight')
  if steps is not None:
    return steps
  # A program on several CPU devices blocks threads of one pool while its
  # devices wait for each other; two such programs at once can deadlock.
  several = jax.local_device_count() > 1
  return 1 if jax.default_backend() == 'cpu' and several else 2


def _trace(step: int) -> contextlib.AbstractContextManager[Any]:
  """Returns a context that marks a step in the profiler's trace, if any."""
  if not jax.profiler.StepTraceAnnotation.is_enabled():
    return _NO_TRACE
  return jax.profiler.StepTraceAnnotation('train', step_num=step)


def _wait(leaves: list[Any]) -> None:
  has_waited = False
  for x in leaves:
    # Skip numbers, and arrays whose buffer the experiment has donated.
    if not hasattr(x, 'is_ready') or x.is_deleted():
      continue
    # Block at least once: this releases the GIL and raises the step's error.
    # Errors of other programs surface when their results are fetched.
    if not has_waited or not x.is_ready():
      x.block_until_ready()
      has_waited = True
