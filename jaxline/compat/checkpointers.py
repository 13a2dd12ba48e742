"""Checkpointers that keep JAXline's dictionary of checkpoints."""

from collections.abc import Callable, Collection, Mapping
import functools
import itertools
import threading
import types
from typing import Any, NamedTuple

from absl import logging
import jax
from ml_collections import config_dict

from jaxline import base_config
from jaxline.checkpoint import contents
from jaxline.checkpoint import durable as durable_lib
from jaxline.checkpoint import protocol
from jaxline.checkpoint import restoring
from jaxline.compat import dictionary
from jaxline.compat import experiments
from jaxline.parallel import devices
from jaxline.parallel import distributed
from jaxline.run_directory import directory as directory_lib
from jaxline.run_directory import store as store_lib

_SEED = 'the snapshot that the program put into utils.GLOBAL_CHECKPOINT_DICT'


class _Begun(NamedTuple):
  training: dictionary.RunIdentity
  active: threading.local  # It changes when a program empties the dictionary.


# Maps directories to the trainings of this process.
_begun: dict[str, _Begun] = {}


def choose_directory(
  experiment_class: Any, config: Mapping[str, Any], begins: bool = True
) -> str:
  """Returns a separate directory for each run of this process.

  This is `config.checkpoint_dir`. If this process has saved a different
  training in it, or the program has emptied the dictionary since, it is
  `run_2`, `run_3`, ... below it. All processes must call this together.

  Args:
    experiment_class: constructs the experiment.
    config: the config, as `base_config.recorded` returns it.
    begins: whether the run trains. If it does not, and this process has not
      trained such a run, the directory is `config.checkpoint_dir`.
  """
  training = dictionary.RunIdentity(
    experiments.class_of(experiment_class), config
  )
  active = dictionary.add_series('latest').active
  is_seeded = dictionary.seed('latest') is not None
  first = store_lib.at(config['checkpoint_dir']).url
  # Processes agree only on the name, since their paths to `first` may differ.
  name, why = '', list[str]()
  for number in itertools.count(2):
    place = f'{first}/{name}'.rstrip('/')
    begun, changes = _begun.get(place), []
    if begun is not None:
      changes = training.changes(begun.training)
      if begun.active is not active and not is_seeded:
        changes.append('utils.GLOBAL_CHECKPOINT_DICT was emptied')
    if not (changes and store_lib.at(place).names('checkpoints/latest')):
      break
    name, why = f'run_{number}', why or changes
  if not begins and begun is None:
    name = ''
  place = f'{first}/{distributed.broadcast_from_process_0(name)}'.rstrip('/')
  if begins:
    _begun[place] = _Begun(training, active)
    if why and (begun is None or changes):
      logging.warning(
        '%s has checkpoints of a different run of this process (%s). This run'
        ' starts from scratch in %s.', first, '; '.join(why), place,
      )  # fmt: skip
  return place


class InMemoryCheckpointer(protocol.FullCheckpointer):
  """Keeps the newest checkpoints of each series in this process.

  JAXline programs derive from it. Instead of calling our constructor, they may
  set `_max_checkpoints_to_keep`.
  """

  _config: Any = None
  _records_config = False
  _training: dictionary.RunIdentity | None = None

  def __init__(
    self,
    config: config_dict.ConfigDict,
    mode: str,
    *,
    records_config: bool = False,
  ):
    """Makes a checkpointer; all checkpointers of the process share the series.

    Args:
      config: the run's config.
      mode: unused, as in JAXline.
      records_config: whether training writes its config to the run's directory,
        which the caller must have claimed.
    """
    self._records_config = records_config
    self._config = base_config.complete_config(config)
    if records_config:
      recorded = base_config.recorded(self._config)
      self.directory = directory_lib.ConfigOnly(recorded)
    del mode
    self._max_checkpoints_to_keep = config.max_checkpoints_to_keep

  # Make it lazily, because a program's constructor need not call ours.
  @functools.cached_property
  def directory(self) -> directory_lib.RunDirectory:  # type: ignore[override]
    """The run's directory, which keeps nothing or only the config."""
    return directory_lib.RunDirectory()

  def get_experiment_state(self, ckpt_series: str) -> Any:
    active = vars(dictionary.add_series(ckpt_series).active)
    return active.setdefault('state', protocol.ExperimentState())

  def begin_training(self, experiment_class: Any) -> None:
    """Forgets the checkpoints of a different training.

    The training is different if its class differs or, if the run's config is
    recorded, its config. A program that makes its own checkpointer may continue
    from the checkpoints with a different config, as in JAXline.
    """
    is_other = self._records_config
    config = base_config.recorded(self._config) if is_other else None
    self._training = dictionary.RunIdentity(
      experiments.class_of(experiment_class), config
    )
    newest = dictionary.newest('latest')
    if isinstance(newest, dictionary.Published):
      is_other = bool(self._training.changes(newest.of))
    if is_other:
      dictionary.forget_published()

  def save(self, ckpt_series: str) -> None:
    """Copies the live state to host memory, as the newest checkpoint."""
    entries = dict(self.get_experiment_state(ckpt_series))
    live = entries.pop('experiment_module', None)
    module = experiments.full_experiment(live)
    entries = jax.tree.map(devices.freeze, entries)
    if live is not None:
      snapshot = dict(module.snapshot_state())
      entries['experiment_module'] = jax.tree.map(devices.freeze, snapshot)
    nest = dictionary.nest_of(entries, module.CHECKPOINT_ATTRS)
    keep = self._max_checkpoints_to_keep
    if ckpt_series == 'best' and self._config is not None:
      keep = protocol.num_to_keep(self._config, ckpt_series, module)
    of = self._training or dictionary.RunIdentity(type(live))
    newest = dictionary.newest(ckpt_series)
    id_ = newest.id + 1 if newest else 0
    dictionary.publish(
      ckpt_series, dictionary.Published(id_, lambda: nest, of), keep
    )
    logging.info('Saved checkpoint %d of series %s.', id_, ckpt_series)

  def can_be_restored(self, ckpt_series: str) -> bool:
    return bool(dictionary.history_of(ckpt_series))

  def steps(self, ckpt_series: str) -> list[int]:
    return sorted(
      dictionary.step_of(s) for s in dictionary.history_of(ckpt_series)
    )

  def restore(self, ckpt_series: str, *, step: int | None = None) -> None:
    """Restores a checkpoint into the calling thread's live state.

    Raises:
      ValueError: the series has no such checkpoint, or the checkpoint lacks an
        entry of the live state.
    """
    state = self.get_experiment_state(ckpt_series)
    history = [
      s
      for s in dictionary.history_of(ckpt_series)
      if step is None or dictionary.step_of(s) == step
    ]
    if not history:
      which = 'to restore' if step is None else f'of step {step}'
      raise ValueError(
        f'The series {ckpt_series!r} has no checkpoint {which}; its steps are'
        f' {self.steps(ckpt_series)}.'
      )
    entries = dictionary.entries_of(history[-1], ckpt_series, state)
    restoring.fill(state, entries)
    logging.info(
      'Restored checkpoint %s of series %s.', history[-1].id, ckpt_series
    )

  def restore_path(self, ckpt_series: str) -> int | None:
    newest = dictionary.newest(ckpt_series)
    return newest.id if newest else None

  def wait_for_checkpointing_to_finish(self) -> None:
    """Returns immediately, because `save` runs synchronously."""


class MirroredCheckpointer(protocol.FullCheckpointer):
  """A durable checkpointer that mirrors its checkpoints in the dictionary.

  A run without checkpoints starts from the snapshot that the program has put
  into the dictionary. If there is none either, it starts from scratch.
  """

  directory: directory_lib.DurableDirectory

  def __init__(self, durable: durable_lib.DurableCheckpointer):
    """Takes the checkpointer that writes and reads the files."""
    self._durable = durable
    self.directory = durable.directory
    # Reach through a wrapper that the program may have put around it.
    inner = getattr(durable.save, '__self__', durable)
    inner.complete = experiments.full_experiment
    for method in (
      'restore_path',
      'steps',
      'begin',
      'move',
      'close',
      'wait_for_checkpointing_to_finish',
    ):
      setattr(self, method, getattr(durable, method))

  def get_experiment_state(self, ckpt_series: str) -> Any:
    dictionary.add_series(ckpt_series)
    return self._durable.get_experiment_state(ckpt_series)

  def save(self, ckpt_series: str) -> None:
    """Saves the live state, and publishes it when it is written."""
    self._durable.save(ckpt_series)
    state = self.get_experiment_state(ckpt_series)
    published = self._published(ckpt_series, state)
    self.directory.thread.submit(dictionary.publish, ckpt_series, published)

  def can_be_restored(self, ckpt_series: str) -> bool:
    found = self._durable.can_be_restored(ckpt_series)
    return found or dictionary.seed(ckpt_series) is not None

  def restore(self, ckpt_series: str, *, step: int | None = None) -> None:
    """Restores a checkpoint, or the program's snapshot if there is none."""
    state = self.get_experiment_state(ckpt_series)
    # All processes must ask, even if only some have a snapshot.
    is_saved = step is not None or self._durable.has_any(ckpt_series)
    snapshot = dictionary.seed(ckpt_series)
    if snapshot is None or is_saved:
      self._durable.restore(ckpt_series, step=step)
      is_own = ckpt_series == 'latest' and self._durable.restored
      if is_own and not self.directory.follows:
        dictionary.publish(ckpt_series, self._published(ckpt_series, state))
      if snapshot is not None and step is None:
        logging.warning('Ignoring %s: there are checkpoints.', _SEED)
      return
    entries = dictionary.entries_of(snapshot, ckpt_series, state)
    with restoring.refusing(_SEED):
      restoring.fill(state, restoring.place(entries, state, _SEED))
    logging.info('Started the series %r from %s.', ckpt_series, _SEED)
    if self.directory.config.restore_from:
      logging.warning('Ignoring config.restore_from: there is %s.', _SEED)

  def follow(self, ckpt_series: str) -> Callable[[Collection[int]], bool]:
    restore_next = self._durable.follow(ckpt_series)

    def restore_next_or_seed(done: Collection[int]) -> bool:
      if restore_next(done):
        return True
      is_saved = self._durable.has_any(ckpt_series)
      snapshot = dictionary.seed(ckpt_series)
      if is_saved or snapshot is None or dictionary.step_of(snapshot) in done:
        return False
      self.restore(ckpt_series)
      return True

    return restore_next_or_seed

  def _published(self, series: str, state: Any) -> dictionary.Published:
    """Returns the checkpoint of a live state, even before it is written.

    The result does not refer to the experiment, which has the live arrays.
    """
    step = int(state['global_step'])
    module = experiments.full_experiment(state['experiment_module'])
    template = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
      dict(module.snapshot_template()),
    )
    attributes = dict(module.CHECKPOINT_ATTRS)
    saved = self._durable.checkpoint(series, step)
    saved.nodes = contents.live_nodes(module, saved.allow_pickle)

    # It must not wait for other processes: a signal handler may call it.
    def read() -> Any:
      entries = {entry: entry for entry in saved.record['module']}
      everything = experiments.full_experiment(
        types.SimpleNamespace(CHECKPOINT_ATTRS=entries),
        snapshot_template=lambda: template,
        wants_restored=lambda name: True,
      )
      with saved.reading():
        entries = saved.entries(saved.record['entries'])
        snapshot = saved.snapshot(everything)
      nest = entries | {'experiment_module': snapshot}
      return dictionary.nest_of(nest, attributes)

    cls = type(state['experiment_module'])
    of = dictionary.RunIdentity(cls, self.directory.recorded)
    return dictionary.Published(step, read, of)


def begin_training(checkpointer: Any, experiment_class: Any) -> None:
  """Prepares a checkpointer for a training separate from earlier ones.

  All hosts call this together, before training looks for checkpoints.
  """
  directory = checkpointer.directory
  directory.follows = False
  if isinstance(directory, directory_lib.DurableDirectory):
    dictionary.forget_published()  # Saves may be of a different class.
    recorded = directory.recorded | {'checkpoint_dir': directory.run.url}
    place = choose_directory(experiment_class, recorded)
    if place != directory.run.url:
      checkpointer.move(place)
  else:
    begin = getattr(checkpointer, 'begin_training', lambda _: None)
    begin(experiment_class)
