"""JAXline's contract between an experiment and the loops; the training loop."""

import abc
import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
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
# (global_step, state key) -> the arguments of `step` (global_step, rng), and
# the state key of the next step.
StepInputs = Callable[[int, jax.Array], tuple[Any, Any, jax.Array]]


class AbstractExperiment(abc.ABC):
  """An experiment: its state, one step of training, one evaluation.

  This is the per-device style: the arguments of `step` and `evaluate` have a
  leading axis of local devices, ready for `jax.pmap`.
  `sharded.ShardedExperiment` is the style with one program over a mesh.

  Attributes:
    CHECKPOINT_ATTRS: attribute -> name in the checkpoint, for values with a
      leading axis of local devices whose rows are all the same. The first
      device's row is stored, and broadcast to all local devices on restore.
    NON_BROADCAST_CHECKPOINT_ATTRS: the same for all other values; they are
      stored whole.
  """

  CHECKPOINT_ATTRS: dict[str, str] = {}
  NON_BROADCAST_CHECKPOINT_ATTRS: dict[str, str] = {}

  @abc.abstractmethod
  def __init__(self, mode: str, init_rng: jax.Array | None = None):
    """Constructs the experiment.

    Args:
      mode: 'train', 'decode', or the mode of evaluation, such as 'eval'.
      init_rng: the key to initialise weights from.
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
      global_step: the number of steps done before, [local devices] int32.
      rng: a fresh key for each local device, [local devices, ...].
      writer: for logging beyond the returned scalars; the loops give one.

    Returns:
      Scalars to log, or None. Leave them on the device: they are fetched on
      another thread when they are due. From `tokens_per_step` and
      `examples_per_step`, `tokens_per_sec` and `examples_per_sec` are computed
      and logged too.

    Raises:
      StopTraining: ends the run before this step.
    """

  @abc.abstractmethod
  def evaluate(
    self, *, global_step: Any, rng: Any, writer: writers.MetricWriter | None
  ) -> Scalars | None:
    """Runs one whole evaluation.

    Args:
      global_step: the step that is evaluated, [local devices] int32.
      rng: keys as for `step`, but the same at every call.
      writer: for logging beyond the returned scalars.

    Returns:
      Scalars to log.

    Raises:
      StopTraining: ends the run; this evaluation is not logged.
    """

  def should_run_step(
    self, global_step: int, config: config_dict.ConfigDict
  ) -> bool:
    """Returns whether to run the step of this number."""
    steps = config['training_steps']  # As an attribute it takes 0.5 us more.
    return steps is None or global_step < steps

  def train_loop(
    self,
    config: config_dict.ConfigDict,
    state: Any,
    periodic_actions: Sequence[periodic.Action],
    writer: writers.MetricWriter | None = None,
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
    step_inputs = (
      self.step_inputs(config)
      if isinstance(self, FullExperiment)
      else _device_step_keys(config)
    )
    max_in_flight = max_steps_in_flight(config)
    in_flight: collections.deque[list[Any]] = collections.deque()
    stop: StopTraining | None = None
    with debug.log_activity('training loop', category='steps'):
      while self.should_run_step(step := state.global_step, config):
        with _trace(step):
          global_step, rng, next_rng = step_inputs(step, state.train_step_rng)
          try:
            scalars = self.step(global_step=global_step, rng=rng, writer=writer)
          except StopTraining as e:
            done = self._scalars_of_done(step + 1)
            if done is None:
              raise
            scalars, stop = done, e  # Raised after the update: it counts.
        check_scalars(scalars, self, 'step')
        # The state's step and key change together: a checkpoint must not hold
        # one without the other.
        state.global_step = step = step + 1
        state.train_step_rng = next_rng
        now = time.time()
        for action in actions:
          action(now, step, scalars)
        # Wait for the step before only now, with this one queued: the devices
        # never idle, and the host never runs further ahead.
        in_flight.append(scalars_lib.leaves(scalars))
        if len(in_flight) >= max_in_flight:
          _wait(in_flight.popleft())
        if stop is not None:
          raise stop

  def _scalars_of_done(self, step: int) -> Scalars | None:
    """Returns the scalars of a step that raised StopTraining once it was done.

    None says that the step has changed nothing, and does not count.
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

  def restore_from_snapshot(self, snapshot_state: Mapping[str, Any]) -> None:
    """Restores what `snapshot_state` returned.

    Raises:
      ValueError: a name is missing; then nothing was changed.
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
    # Delete all old values before making any new one, so that the devices need
    # not hold both.
    for attribute in names:
      # A default in the class body cannot be deleted.
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
      best_state: the state about to be saved; entries may be added.
    """
    del best_state


class FullExperiment(AbstractExperiment, stateful.Stateful):
  """An experiment with all that the library can ask of one.

  `sharded.ShardedExperiment` derives from it, and an experiment of the
  per-device style that sets one of these names must too. A program of JAXline
  may use the same names for anything: of other classes the library reads those
  of `AbstractExperiment` only (see `compat.experiments.full_experiment`).

  Attributes:
    FLAGS_NONFINITE: whether `step` returns the scalar `nonfinite`, int32: 0 if
      the loss and the gradients were finite, else 1, or 2 for the loss, 3 for
      the gradients and 4 for both, or with `config.on_nonfinite = 'skip'` the
      number of such steps in a row.
    on_nonfinite: what the loop does after a step that is not finite if
      `config.on_nonfinite` is None.
    run_config: the config of the run, if the experiment reads its keys of
      sharded steps; else None.
    num_evaluated: the number of earlier steps that were evaluated, in this
      process or before the run was resumed; set before each `evaluate`.
    data_summary: what the data is, in a line for the terminal.
    last_batch: the batch of the last step on the devices; None if unknown.
    traced_batch: the shapes of the batch for which one program of the step was
      compiled last; None if the step is no such program.
  """

  FLAGS_NONFINITE: bool = False
  # JAXline continues after a NaN, and its experiments may log one on purpose.
  on_nonfinite: str = 'warn'
  run_config: Any = None
  num_evaluated: int = 0
  data_summary: str = ''
  last_batch: Any = None
  traced_batch: Any = None

  @classmethod
  def eval_init_rng(cls, config: config_dict.ConfigDict) -> jax.Array:
    """Returns the key that an experiment outside of training initialises from.

    As in JAXline, it is not the one of training, which is split from it.
    """
    return jax.random.PRNGKey(config.random_seed)

  def overrides(self, method: str) -> bool:
    """Returns whether this has its own method instead of the default."""
    found = getattr(getattr(self, method), '__func__', None)
    return found is not getattr(FullExperiment, method)

  def summary(self) -> dict[str, str]:
    """Returns name -> text of lines that the terminal shows at the start."""
    names = self.CHECKPOINT_ATTRS.items()
    found = [k for k, name in names if 'param' in f'{k} {name}']
    own = stateful.live(self)
    leaves = jax.tree.leaves([getattr(own, name, None) for name in found])
    # The first axis counts the devices.
    weights = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves]
    return {'Parameters': lines.weights(weights), 'Data': self.data_summary}

  def step_inputs(self, config: config_dict.ConfigDict) -> StepInputs:
    """Returns the function that makes the arguments of each step.

    `config.random_mode_train` says which hosts and devices get the same keys.
    """
    return _device_step_keys(config)

  def evaluate_inputs(
    self, config: config_dict.ConfigDict, rng: jax.Array
  ) -> Callable[[int], tuple[Any, Any]]:
    """Returns a function that maps a step to the arguments of `evaluate`.

    `config.random_mode_eval` says which hosts and devices get the same keys,
    which are those of `rng` each time.
    """
    mode = keys.value_of(config, prng.KEYS, 'random_mode_eval')
    host_id = prng.host_id_devices_for_rng(mode)
    device_keys = jax.pmap(
      lambda key, host: prng.specialize_rng_host_device(
        key, host, axis_name='i', mode=mode
      ),
      axis_name='i',
    )(devices.bcast_local_devices(rng), host_id)
    return lambda global_step: (
      devices.bcast_local_devices(jax.numpy.asarray(global_step)),
      device_keys,
    )

  def check_prompt(self, prompt: Any) -> None:
    """Raises an `errors.UsageError` for a prompt that `decode` does not take.

    It is called before the weights are restored. A list has the messages of a
    conversation, and a dict `messages` and `tools`; here only text is taken.
    """
    if not isinstance(prompt, str):
      raise errors.UsageError(
        f'{type(self).__name__} has no chats; expected text, as "prompt".'
      )

  def decode(
    self, prompts: Sequence[Any], rng: jax.Array
  ) -> list[list[dict[str, Any]]]:
    """Continues prompts; used by `--jaxline_mode=decode` only.

    The experiment was constructed with the mode 'decode', and its weights are
    restored. It should not open training data, which may be missing.

    Args:
      prompts: what `check_prompt` takes, the same number at each call. The last
        prompts of a file are padded with others, whose continuations are
        ignored.
      rng: one key, a different one at each call.

    Returns:
      For each prompt its continuations: dicts of JSON values with the entry
      'text' and others such as 'score'. All processes get the same prompts and
      must return the same continuations.

    Raises:
      NotImplementedError: the experiment cannot continue prompts.
    """
    raise NotImplementedError(f'{self.__class__.__name__} has no `decode`.')

  def wants_restored(self, name: str) -> bool:
    """Returns whether a restore reads an entry or an array.

    By default all entries of the attributes are read, or all entries if a class
    has its own `snapshot_state`.
    """
    names = self.CHECKPOINT_ATTRS | self.NON_BROADCAST_CHECKPOINT_ATTRS
    return self.overrides('snapshot_state') or any(
      f'{name}/'.startswith(f'{entry}/') for entry in names.values()
    )

  def share_state(self, trained: AbstractExperiment) -> None:
    """Takes over the live state of an experiment in training without copies.

    `train_and_eval` calls this on its evaluating experiment before each
    evaluation. Training waits meanwhile, so that no buffer is donated.
    """
    if self.overrides('snapshot_state'):
      # The override alone knows the state. It is copied, since the next step
      # may donate the arrays of the snapshot.
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
  # Not by its class: a ConfigDict is no Mapping.
  if scalars is not None and not hasattr(scalars, 'items'):
    raise TypeError(
      f'{experiment.__class__.__name__}.{method} returned a'
      f' {type(scalars).__name__}: {scalars!r:.80}; expected a dict of scalars,'
      " such as {'loss': loss}, or None."
    )


def max_steps_in_flight(config: config_dict.ConfigDict) -> int:
  """Returns how many steps may be dispatched and not finished."""
  steps = keys.value_of(config, devices.KEYS, 'max_steps_in_flight')
  if steps is not None:
    return steps
  # Programs of several CPU devices wait for each other in one thread pool; two
  # of them at once can starve it for ever.
  several = jax.local_device_count() > 1
  return 1 if jax.default_backend() == 'cpu' and several else 2


def _trace(step: int) -> contextlib.AbstractContextManager[Any]:
  """Returns the mark of a step for a trace, if one is being made."""
  if not jax.profiler.StepTraceAnnotation.is_enabled():
    return _NO_TRACE
  return jax.profiler.StepTraceAnnotation('train', step_num=step)


def _wait(leaves: list[Any]) -> None:
  has_waited = False
  for x in leaves:
    # A number, or an array whose buffer the experiment has donated.
    if not hasattr(x, 'is_ready') or x.is_deleted():
      continue
    # Block once: it releases Python's lock and raises this step's error. Errors
    # of other programs surface when they are fetched.
    if not has_waited or not x.is_ready():
      x.block_until_ready()
      has_waited = True
