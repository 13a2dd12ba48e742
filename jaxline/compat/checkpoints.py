"""JAXline's dictionary of checkpoints, and the checkpointers that use it.

Programs written against JAXline save and restore through that dictionary. A
snapshot that the program puts there starts the run. The snapshots that a run
puts there are `Published`, and start no other run but a training of the same
experiment (`Training`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
import dataclasses
import functools
import itertools
import threading
import types
from typing import Any, NamedTuple

from absl import logging
import jax
from ml_collections import config_dict
import numpy as np

from jaxline import base_config
from jaxline import devices
from jaxline import distributed
from jaxline.checkpoint import contents
from jaxline.checkpoint import durable as durable_lib
from jaxline.checkpoint import protocol
from jaxline.checkpoint import restoring
from jaxline.compat import experiments
from jaxline.storage import directory as directory_lib
from jaxline.storage import store as store_lib

_SEED = 'the snapshot that the program put into utils.GLOBAL_CHECKPOINT_DICT'


@dataclasses.dataclass(frozen=True)
class Training:
  """What a run of this process trains; it identifies the run.

  Attributes:
    experiment: the experiment's class; None if a function constructs it. Two
      classes of one name are equal: a notebook runs its cells again.
    config: the run's, as `base_config.recorded` returns it; None is any.
  """

  experiment: type | None
  config: Mapping[str, Any] | None = None

  def changes(self, earlier: 'Training') -> list[str]:
    """Returns a line for each difference; none if it is the same run."""
    names = [
      x and f'{x.__module__}:{x.__qualname__}'
      for x in (earlier.experiment, self.experiment)
    ]
    if None not in names and names[0] != names[1]:
      return [f'experiment: {names[0]} then, {names[1]} now']
    if self.config is None or earlier.config is None:
      return []
    if self.config['on_config_change'] == 'continue':
      return []
    declared = experiments.declared(self.experiment)
    changes = base_config.changes(earlier.config, self.config, declared)
    return [f'config.{change}' for change in changes]


class SnapshotNT(NamedTuple):
  """One checkpoint: its number and content.

  `pickle_nest` has `to_dict()`, and its entries are attributes as well, as
  with a ConfigDict; unlike there, names of weights may hold dots.
  """

  id: int
  pickle_nest: Any


class Published:
  """A snapshot that a run saved, read when `pickle_nest` is first used.

  A copy or pickle of it is a `SnapshotNT`, which starts a run if a program puts
  it into the dictionary.
  """

  def __init__(
    self, id: int, read: Callable[[], Any], of: Training | None = None
  ):
    """Makes a snapshot.

    Args:
      id: its number.
      read: returns the `pickle_nest`.
      of: the training that saved it; None if only its own checkpointer restores
        it.
    """
    self.id, self._read, self.of = id, read, of

  @functools.cached_property
  def pickle_nest(self) -> Any:
    """What was saved; read once (twice if two threads begin at once)."""
    return self._read()

  def __iter__(self) -> Iterator[Any]:
    yield self.id
    yield self.pickle_nest

  def _replace(self, /, **kwargs: Any) -> SnapshotNT:
    return SnapshotNT(*self)._replace(**kwargs)

  def __reduce__(self) -> Any:
    return SnapshotNT, tuple(self)


class CheckpointNT(NamedTuple):
  """One series: a thread-local holding its live `state`, and its snapshots."""

  active: threading.local
  history: list[SnapshotNT | Published]


# All checkpoints of the process by series, so that a training and an
# evaluation thread share them. Experiments written against JAXline read, write
# and rebind this name on `jaxline.utils`, which then rebinds it here.
GLOBAL_CHECKPOINT_DICT: dict[str, CheckpointNT] = {}


class _ModuleState(protocol.ExperimentState):
  """The snapshot of an experiment, which also has the experiment's attributes.

  JAXline once kept the experiment itself in `pickle_nest`, and programs that
  save it on their own read `get_first(module._params)`.
  """

  def __init__(
    self, snapshot: Mapping[str, Any], attributes: Mapping[str, str]
  ):
    super().__init__(_nest(dict(snapshot)))
    self.__dict__['attributes'] = dict(attributes)  # Beside the entries.

  def __getattr__(self, name: str) -> Any:
    attributes = self.__dict__.get('attributes', {})  # None while unpickled.
    if attributes.get(name) in self:
      value = self.to_dict()[attributes[name]]
      return jax.tree.map(lambda x: x[None], value)
    return super().__getattr__(name)


def _nest(tree: Any) -> Any:
  """Gives dicts inside dicts attribute access."""
  if type(tree) is not dict:
    return tree
  return protocol.ExperimentState({key: _nest(x) for key, x in tree.items()})


def nest_of(
  entries: Mapping[str, Any], attributes: Mapping[str, str]
) -> protocol.ExperimentState:
  """Returns the `pickle_nest` of entries that nothing else changes.

  Args:
    entries: of the experiment state, with a snapshot of the experiment.
    attributes: the experiment's CHECKPOINT_ATTRS.
  """
  nest = _nest(dict(entries))
  if 'experiment_module' in nest:
    module = _ModuleState(entries['experiment_module'], attributes)
    nest['experiment_module'] = module
  return nest


def publish(ckpt_series: str, snapshot: Published, keep: int = 1) -> None:
  """Makes a snapshot the newest of a series; keeps that many."""
  series = add_series(ckpt_series)
  history = [*series.history, snapshot][-keep:]
  GLOBAL_CHECKPOINT_DICT[ckpt_series] = series._replace(history=history)


def add_series(ckpt_series: str) -> CheckpointNT:
  """Returns a series of the dictionary; adds it where it is not there."""
  # In one step: training and evaluation threads may both be the first.
  new = CheckpointNT(threading.local(), [])
  return GLOBAL_CHECKPOINT_DICT.setdefault(ckpt_series, new)


def seed(ckpt_series: str) -> SnapshotNT | None:
  """Returns the snapshot that the program put in to start from, or None."""
  newest = _newest(ckpt_series)
  return None if isinstance(newest, Published) else newest


def forget_published() -> None:
  """Removes the newest published snapshot of each series and those before it.

  Snapshots that the program has put in since then stay.
  """
  checkpoints = GLOBAL_CHECKPOINT_DICT
  for name, series in list(checkpoints.items()):
    newest_first = reversed(series.history)
    newer = itertools.takewhile(
      lambda snapshot: not isinstance(snapshot, Published), newest_first
    )
    checkpoints[name] = series._replace(history=[*newer][::-1])


class _Begun(NamedTuple):
  training: Training
  active: threading.local  # Another one in a dictionary that was emptied.


# The trainings of this process by their directories.
_begun: dict[str, _Begun] = {}


def run_directory(
  experiment_class: Any, config: Mapping[str, Any], begins: bool = True
) -> str:
  """Returns a directory of its own for each run of this process.

  This is `config.checkpoint_dir`, or `run_2`, `run_3`, ... below it if this
  process has saved another training there, or if the program has emptied the
  dictionary since. All processes of the run call it together.

  Args:
    experiment_class: constructs the experiment.
    config: as `base_config.recorded` returns it.
    begins: whether the run trains. If it does not, and this process has trained
      no such run, its directory is `config.checkpoint_dir`.
  """
  training = Training(experiments.class_of(experiment_class), config)
  active, seeded = add_series('latest').active, seed('latest') is not None
  first = store_lib.at(config['checkpoint_dir']).url
  # Processes agree on the name alone: their paths to `first` may differ.
  name, why = '', list[str]()
  for number in itertools.count(2):
    place = f'{first}/{name}'.rstrip('/')
    begun, changes = _begun.get(place), []
    if begun is not None:
      changes = training.changes(begun.training)
      if begun.active is not active and not seeded:
        changes.append('utils.GLOBAL_CHECKPOINT_DICT was emptied')
    if not (changes and store_lib.at(place).names('checkpoints/latest')):
      break
    name, why = f'run_{number}', why or changes
  if not begins and begun is None:
    name = ''
  place = f'{first}/{distributed.of_chief(name)}'.rstrip('/')
  if begins:
    _begun[place] = _Begun(training, active)
    if why and (begun is None or changes):
      logging.warning(
        '%s has the checkpoints of another run of this process (%s). This one'
        ' begins anew in %s.', first, '; '.join(why), place,
      )  # fmt: skip
  return place


def step_of(snapshot: SnapshotNT | Published) -> int:
  """Returns the step of a snapshot; -1 if it does not say."""
  step = snapshot.pickle_nest.get('global_step', -1)
  return int(np.ravel(step)[0])  # JAXline's first versions have one per device.


def entries_of(
  snapshot: SnapshotNT | Published, ckpt_series: str, keys: Iterable[str]
) -> dict[str, Any]:
  """Returns a copy of a snapshot's entries, as plain dicts.

  Args:
    snapshot: its `pickle_nest` is our own, a ConfigDict, or a dict whose
      `experiment_module` may be an experiment.
    ckpt_series: the series.
    keys: the entries that it must have, but for `train_step_rng`.

  Raises:
    ValueError: it lacks one.
  """
  nest = snapshot.pickle_nest
  entries = dict(nest.to_dict() if hasattr(nest, 'to_dict') else nest)
  if 'global_step' in entries:
    entries['global_step'] = step_of(snapshot)
  module: Any = entries.get('experiment_module')
  if hasattr(module, 'snapshot_state'):
    entries['experiment_module'] = module.snapshot_state()
  missing = sorted(set(keys) - set(entries) - {protocol.OPTIONAL})
  if missing == ['train_step_rng']:
    # JAXline's programs make such snapshots.
    logging.warning(
      'Checkpoint %s of series %s has no train_step_rng: the keys of the'
      ' steps begin anew.', snapshot.id, ckpt_series,
    )  # fmt: skip
  elif missing:
    raise ValueError(
      f'Checkpoint {snapshot.id} of series {ckpt_series!r} lacks'
      f' {missing}; it holds {sorted(entries)}.'
    )
  # A copy, so that nothing done to the live state reaches the snapshot.
  return jax.tree.map(devices.freeze, entries)


class InMemoryCheckpointer(protocol.FullCheckpointer):
  """Keeps the newest checkpoints of each series in this process.

  Programs written against JAXline derive from it, and may set
  `_max_checkpoints_to_keep` in place of our constructor.
  """

  _config: Any = None
  _records_config = False
  _training: Training | None = None

  def __init__(
    self,
    config: config_dict.ConfigDict,
    mode: str,
    *,
    records_config: bool = False,
  ):
    """Makes a checkpointer; all of them share the series.

    Args:
      config: the run's.
      mode: not used, as in JAXline.
      records_config: whether a training writes its config into the run's
        directory, which the caller has claimed.
    """
    self._records_config = records_config
    self._config = base_config.complete_config(config)
    if records_config:
      recorded = base_config.recorded(self._config)
      self.directory = directory_lib.ConfigOnly(recorded)
    del mode
    self._max_checkpoints_to_keep = config.max_checkpoints_to_keep

  # Not of the class: a program's constructor need not call ours.
  @functools.cached_property
  def directory(self) -> directory_lib.RunDirectory:  # type: ignore[override]
    """What the run keeps beside its checkpoints: nothing, or the config."""
    return directory_lib.RunDirectory()

  def get_experiment_state(self, ckpt_series: str) -> Any:
    """Returns the calling thread's live state of the series."""
    active = vars(add_series(ckpt_series).active)
    return active.setdefault('state', protocol.ExperimentState())

  def begin_training(self, experiment_class: Any) -> None:
    """Forgets the checkpoints of another training.

    Another class makes another training; if the run's config is recorded,
    another config does too. A program that makes its own checkpointer may train
    with another config from the checkpoints so far, as with JAXline.
    """
    is_other = self._records_config
    config = base_config.recorded(self._config) if is_other else None
    self._training = Training(experiments.class_of(experiment_class), config)
    newest = _newest('latest')
    if isinstance(newest, Published) and newest.of is not None:
      is_other = bool(self._training.changes(newest.of))
    if is_other:
      forget_published()

  def save(self, ckpt_series: str) -> None:
    """Copies the live state to host memory, as the newest checkpoint."""
    entries = dict(self.get_experiment_state(ckpt_series))
    live = entries.pop('experiment_module', None)
    module = experiments.full_experiment(live)
    entries = jax.tree.map(devices.freeze, entries)
    if live is not None:
      snapshot = dict(module.snapshot_state())
      entries['experiment_module'] = jax.tree.map(devices.freeze, snapshot)
    nest = nest_of(entries, module.CHECKPOINT_ATTRS)
    keep = self._max_checkpoints_to_keep
    if ckpt_series == 'best' and self._config is not None:
      keep = protocol.num_to_keep(self._config, ckpt_series, module)
    of = self._training or Training(type(live))
    newest = _newest(ckpt_series)
    id_ = newest.id + 1 if newest else 0
    publish(ckpt_series, Published(id_, lambda: nest, of), keep)
    logging.info('Saved checkpoint %d of series %s.', id_, ckpt_series)

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether the series has a checkpoint."""
    return bool(_history(ckpt_series))

  def steps(self, ckpt_series: str) -> list[int]:
    """Returns the steps of a series' checkpoints, ascending."""
    return sorted(step_of(s) for s in _history(ckpt_series))

  def restore(self, ckpt_series: str, step: int | None = None) -> None:
    """Restores a checkpoint into the calling thread's live state.

    Raises:
      ValueError: the series has no such checkpoint, or the checkpoint lacks an
        entry of the live state.
    """
    state = self.get_experiment_state(ckpt_series)
    history = [
      s for s in _history(ckpt_series) if step is None or step_of(s) == step
    ]
    if not history:
      saved = sorted(name for name in GLOBAL_CHECKPOINT_DICT if _history(name))
      raise ValueError(
        f'The series {ckpt_series!r} has no checkpoint'
        + (' to restore' if step is None else f' of step {step}')
        + f'; there are checkpoints of {saved}.'
      )
    entries = entries_of(history[-1], ckpt_series, state)
    source = f'checkpoint {history[-1].id} of series {ckpt_series!r}'
    restoring.fill(state, entries, source)
    logging.info(
      'Restored checkpoint %s of series %s.', history[-1].id, ckpt_series
    )

  def restore_path(self, ckpt_series: str) -> int | None:
    """Returns the number of the newest checkpoint, or None."""
    newest = _newest(ckpt_series)
    return newest.id if newest else None

  def wait_for_checkpointing_to_finish(self) -> None:
    """Returns at once: `save` has finished when it returns."""


class MirroredCheckpointer(protocol.FullCheckpointer):
  """A durable checkpointer whose checkpoints are in the dictionary as well.

  A run without checkpoints begins from the snapshot that the program has put
  there, or else as the durable one does.
  """

  directory: directory_lib.DurableDirectory

  def __init__(self, durable: durable_lib.DurableCheckpointer):
    """Takes the checkpointer that writes and reads the files."""
    self._durable = durable
    self.collective, self.directory = durable.collective, durable.directory
    for method in (
      'restore_path',
      'steps',
      'begin',
      'close',
      'wait_for_checkpointing_to_finish',
    ):
      setattr(self, method, getattr(durable, method))

  def get_experiment_state(self, ckpt_series: str) -> Any:
    """Returns the calling thread's live state of the series."""
    add_series(ckpt_series)
    return self._durable.get_experiment_state(ckpt_series)

  def begin_training(self, experiment_class: Any) -> None:
    """Moves to another directory if this process has trained another run here.

    `platform` has done so before it opened the logs; this is for a program that
    makes its own checkpointer and trains several classes.
    """
    forget_published()
    run = self.directory.run.url
    recorded = self.directory.recorded | {'checkpoint_dir': run}
    place = run_directory(experiment_class, recorded)
    if place != run:
      self._durable.move(place)

  def save(self, ckpt_series: str) -> None:
    """Saves the live state, and publishes it once it is written."""
    self._durable.save(ckpt_series)
    state = self.get_experiment_state(ckpt_series)
    published = self._published(ckpt_series, state)
    self.directory.thread.submit(publish, ckpt_series, published)

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether there is something to restore."""
    found = self._durable.can_be_restored(ckpt_series)
    return found or seed(ckpt_series) is not None

  def restore(self, ckpt_series: str, step: int | None = None) -> None:
    """Restores a checkpoint, or the program's snapshot if there is none."""
    state = self.get_experiment_state(ckpt_series)
    snapshot = None if step is not None else seed(ckpt_series)
    if snapshot is None or self._durable.has_any(ckpt_series):
      self._durable.restore(ckpt_series, step=step)
      is_own = ckpt_series == 'latest' and self._durable.restored
      if is_own and not self.directory.follows:
        publish(ckpt_series, self._published(ckpt_series, state))
      if snapshot is not None:
        logging.warning('%s is not used: there are checkpoints.', _SEED)
      return
    entries = entries_of(snapshot, ckpt_series, state)
    restoring.fill(state, restoring.place(entries, state, _SEED), _SEED)
    logging.info('Began the series %r from %s.', ckpt_series, _SEED)

  def follow(self, ckpt_series: str) -> Callable[[Collection[int]], bool]:
    """Returns a function that restores the next checkpoint to evaluate."""
    restore_next = self._durable.follow(ckpt_series)

    def restore_next_or_seed(done: Collection[int]) -> bool:
      if restore_next(done):
        return True
      snapshot = seed(ckpt_series)
      if snapshot is None or self._durable.has_any(ckpt_series):
        return False
      if step_of(snapshot) in done:
        return False
      self.restore(ckpt_series)
      return True

    return restore_next_or_seed

  def _published(self, series: str, state: Any) -> Published:
    """Returns the checkpoint of a live state's step, maybe not written yet.

    The experiment is not kept, because it holds the live arrays.
    """
    step, module = int(state['global_step']), state['experiment_module']
    template = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
      dict(module.snapshot_template()),
    )
    attributes = dict(module.CHECKPOINT_ATTRS)
    saved = self._durable.checkpoint(series, step)
    saved.nodes = contents.live_nodes(module, saved.allow_pickle)

    # It waits for no other process: a signal handler may call it.
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
      return nest_of(nest, attributes)

    return Published(step, read)


def begin_training(checkpointer: Any, experiment_class: Any) -> None:
  """Leaves the checkpoints of another training of this process alone.

  Called before a training looks for checkpoints; all hosts call it together.
  """
  checkpointer.directory.follows = False
  begin = getattr(checkpointer, 'begin_training', lambda _: None)
  begin(experiment_class)


def _newest(ckpt_series: str) -> SnapshotNT | Published | None:
  history = _history(ckpt_series)
  return history[-1] if history else None


def _history(ckpt_series: str) -> list[SnapshotNT | Published]:
  """Returns the snapshots of a series, oldest first."""
  series = GLOBAL_CHECKPOINT_DICT.get(ckpt_series)
  return list(series.history) if series else []
