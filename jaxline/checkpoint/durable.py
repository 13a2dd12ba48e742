"""The durable checkpointer: keeps checkpoints on a disk or in a bucket.

`restore` takes the newest manifest, compares the configs, checks that the
checkpoint fits the experiment, and reads and verifies each part once. If a part
is damaged, all processes use the previous checkpoint. `saving` writes them.
"""

from collections.abc import Callable, Collection
from concurrent import futures
import contextlib
import functools
import threading
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict

from jaxline.base import config_record
from jaxline.base import stateful
from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.checkpoint import protocol
from jaxline.checkpoint import restoring
from jaxline.checkpoint import saving
from jaxline.parallel import distributed
from jaxline.run_directory import directory as directory_lib
from jaxline.run_directory import store as store_lib


class DurableCheckpointer(protocol.FullCheckpointer):
  """Keeps checkpoints below `config.checkpoint_dir`.

  All hosts must see this directory, and call `save` and `restore` at the same
  steps. If a checkpoint is removed during a read, `restore` tries the next one.
  """

  directory: directory_lib.DurableDirectory
  _declared = stateful.Stateful  # The default until the class is known.
  # Returns an experiment that is `Stateful`.
  complete: Callable[[Any], Any] = staticmethod(lambda module: module)

  def __init__(self, config: config_dict.ConfigDict, mode: str):
    """Reads the config; touches no file.

    Args:
      config: the run's resolved config.
      mode: the run's mode; 'train' or 'eval' for each half of a threaded run.
    """
    self._allow_pickle = bool(config.checkpoint_allow_pickle)
    self._live = threading.local()
    self._saving: futures.Future[None] | None = None
    # Record it now, because constructing the experiment may change the config.
    recorded = config_record.recorded(config)
    self.directory = directory_lib.DurableDirectory(config, recorded, mode)
    self._open()

  def _open(self) -> None:
    self._saver = saving.Saver(self.directory)
    self._manifests = self._saver.manifests
    # The last step of `latest` that was restored or saved.
    self._held_step: int | None = None

  @property
  def restored(self) -> dict[str, Any]:
    """The manifest of `latest` that was restored; {} if there is none."""
    return self._saver.restored

  # The protocol.

  def get_experiment_state(self, ckpt_series: str) -> Any:
    state = protocol.ExperimentState()
    return vars(self._live).setdefault(ckpt_series, state)

  def save(self, ckpt_series: str) -> None:
    """Copies the live state to host memory, and queues the write.

    Raises:
      TypeError: a value of the state cannot be stored.
      Exception: the error of an earlier save.
    """
    thread = self.directory.thread
    self.directory.claim(ckpt_series)
    if self._saving is not None:  # Host memory holds one copy of the state.
      futures.wait([self._saving])
    thread.raise_error()
    state = self.get_experiment_state(ckpt_series)
    module = self.complete(state['experiment_module'])
    config, step = self.directory.config, int(state['global_step'])
    is_best = ckpt_series == 'best'
    added = contents.best_extras(state, self._allow_pickle) if is_best else {}
    content = None
    # If `latest` has this step and evaluation does not change the state, `best`
    # can share the data of `latest`. Otherwise copy the state.
    names_latest = module.EVALUATION_IS_PURE and step == self._held_step
    if not (is_best and names_latest):
      kind = 'best' if is_best else 'train'
      content = contents.content(
        state,
        module,
        self.directory.recorded,
        all_hosts=config[f'{kind}_checkpoint_all_hosts'],
        allow_pickle=self._allow_pickle,
      )
    # Queue the flush now, so that it covers this step and not later ones.
    flush = dict if is_best else self.directory.flush_logs()
    if not is_best:
      self._held_step = step
    self._saving = thread.submit(
      self._saver.write, ckpt_series, step, flush, content, added
    )
    keep = protocol.num_to_keep(config, ckpt_series, module)
    # Queue removals separately, so that the next save does not wait for them.
    thread.put(
      functools.partial(self._saver.apply_retention, ckpt_series, keep)
    )

  def wait_for_checkpointing_to_finish(self) -> None:
    self.directory.thread.wait()

  def steps(self, ckpt_series: str) -> list[int]:
    return self._manifests.steps(ckpt_series)

  def move(self, directory: str) -> None:
    """Continues in a different directory; the logs stay in the old one."""
    self.close()
    self.directory.move(directory)
    self._open()

  def begin(self, step: int) -> None:
    self._saver.keep_data()  # Drop the marks of an earlier evaluation, if any.
    state = self.get_experiment_state('latest')
    module = state.get('experiment_module')
    if module is not None and not self._allow_pickle:
      contents.check_storable(state, self.complete(module))
    if jax.process_index() == 0:
      # Later checkpoints are damaged: an intact one would have been restored.
      # Delete them before `begin`, after which evaluations expect new ones.
      later = [found for found in self.steps('latest') if found > step]
      self._manifests.delete_manifests('latest', later)
      self.directory.thread.put(self._saver.clean)
    self.directory.begin(step)

  def close(self) -> None:
    self.directory.drain()
    with contextlib.suppress(OSError):  # The next start can remove the mark.
      self._saver.keep_data()
    self.directory.close()

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether the series, or `restore_from`, has a checkpoint.

    Raises:
      ClaimedError: another process writes to the series.
    """
    if not self.directory.follows:
      self.directory.claim(ckpt_series)
    return self.has_any(ckpt_series) or self._forks(ckpt_series)

  def restore_path(self, ckpt_series: str) -> str | None:
    found = self._manifests.by_time(ckpt_series)
    store = self._manifests.store
    return f'{store}/{ckpt_series}/{found[0]}' if found else None

  def restore(self, ckpt_series: str, step: int | None = None) -> None:
    """Restores a checkpoint into the calling thread's live state.

    Only the entries of the live state are restored. A run without checkpoints
    starts from `config.restore_from`.

    Args:
      ckpt_series: the series.
      step: the step of the checkpoint; None means the newest intact one.
        Damaged ones are reported and skipped.

    Raises:
      ValueError: there is no such checkpoint, or its config differs.
      MismatchError: the checkpoint does not fit the experiment.
      DamagedError: the checkpoint, and all earlier ones, are damaged.
    """
    state, directory = self.get_experiment_state(ckpt_series), self.directory
    module = state.get('experiment_module')
    if module is not None:
      module = self.complete(module)
    if isinstance(module, stateful.Stateful):
      self._declared = module.__class__
    if not directory.follows:
      directory.claim(ckpt_series)
    own: dict[str, Any] = {}  # The manifest, if the checkpoint is this run's.
    begins = step is None and self._forks(ckpt_series)
    if begins and not self.has_any(ckpt_series):
      source, entries = self._read_foreign(state, module)
      # Record the step too: the source may continue, and replay needs the step.
      directory.recorded['restore_from'] = ':'.join(source.rsplit('/', 1))
    else:
      found, entries = self._read_own(ckpt_series, step, state, module)
      own, source = found.record, found.name
    with restoring.refusing(source):
      restoring.fill(state, entries)
    what = 'Restored' if own else f'Started the series {ckpt_series!r} from'
    logging.info('%s %s.', what, source)
    if ckpt_series != 'latest':
      return
    self._saver.restored, self._held_step = own, own.get('step')
    if own:
      directory.recorded['restore_from'] = own['config'].get('restore_from')
      directory.saved_step, directory.saved_data = own['step'], own['data']
      directory.lengths = directory.local(own['logs'])

  def follow(self, ckpt_series: str) -> Callable[[Collection[int]], bool]:
    """Returns a function that restores the next checkpoint to evaluate.

    It restores each checkpoint once, in the order of the steps. If a restarted
    training saves a step again, its new data counts as a new checkpoint.
    """
    # Maps each evaluated step to its data; '' if it had no checkpoint.
    evaluated: dict[int, str] = {}
    # Steps that were restored or found damaged since the last start of
    # training. Only a restarted training saves a step again.
    looked_at: set[int] = set()
    begun: Any = ''
    store = self._manifests.store

    def next_step(done: Collection[int]) -> int | None:
      nonlocal begun, evaluated
      if (note := store.read(directory_lib.BEGUN)) != begun:
        begun = note
        evaluated = {x.step: x.data for x in self.directory.noted()} | evaluated
        looked_at.clear()
      for step in self.steps(ckpt_series):
        data = evaluated.get(step)
        if step in looked_at or (step in done and not data):
          continue
        with contextlib.suppress(store_lib.DamagedError):  # See `restore`.
          if self._manifests.read(ckpt_series, step)['data'] == data:
            looked_at.add(step)
            continue
        return step
      return None

    def restore_next(done: Collection[int]) -> bool:
      is_chief = jax.process_index() == 0
      while True:
        step = distributed.broadcast_from_process_0(
          next_step(done) if is_chief else None
        )
        if step is None:
          break
        looked_at.add(step)
        # `restore` reports damage; skip checkpoints that training has removed.
        with contextlib.suppress(store_lib.DamagedError):
          self.restore(ckpt_series, step=step)
          evaluated[step] = self._saver.restored['data']
          return True
      return False

    return restore_next

  def check_config(
    self, declared: type[stateful.Stateful] | None = None
  ) -> None:
    """Compares the config of the newest checkpoint with this run's.

    Args:
      declared: the class that declares which keys may change; None means that
        none may. (`restore` asks the experiment itself.)

    Raises:
      ConfigChangedError: a key with the effect `run` differs.
      UsageError: `restore_from` names no checkpoint.
    """
    if self._forks('latest') and not self.has_any('latest'):
      restoring.find_foreign(self.directory.config.restore_from)
    self._declared = declared or self._declared
    for step in self.steps('latest')[-1:]:
      # `restore` reports damage.
      with contextlib.suppress(store_lib.DamagedError):
        found = self.checkpoint('latest', step)
        restoring.check_config(found, self.directory, self._declared)

  # Restoring.

  def _forks(self, series: str) -> bool:
    """Returns whether the series, if empty, starts from `restore_from`."""
    return (
      series == 'latest'
      and bool(self.directory.config.restore_from)
      and not self.directory.follows
    )

  def has_any(self, ckpt_series: str) -> bool:
    """Returns whether process 0 sees a checkpoint of the series."""
    return distributed.broadcast_from_process_0(bool(self.steps(ckpt_series)))

  def checkpoint(self, series: str, step: int) -> contents.Checkpoint:
    """Returns a checkpoint, which is looked up only when it is read."""
    return contents.Checkpoint(
      self._manifests, series, step, self._allow_pickle
    )

  def _read_own(
    self, series: str, step: int | None, state: Any, module: Any
  ) -> tuple[contents.Checkpoint, dict[str, Any]]:
    """Reads a checkpoint of this run: the given step or the newest intact."""
    reports: dict[int, str] = {}  # Step -> the error.
    while True:
      steps = [
        s
        for s in self._manifests.by_time(series)
        if step in (None, s) and s not in reports
      ]
      at = distributed.broadcast_from_process_0(steps[0] if steps else None)
      if at is None:
        gone = ValueError if step is None else store_lib.GoneError
        raise (store_lib.DamagedError if reports else gone)(
          f'The series {series!r} in {self._manifests.store} has no checkpoint'
          + (f' of step {step}' if step is not None else '')
          + (' that is intact' if reports else '')
          + f'; its steps are {self.steps(series)}.'
          + ''.join(f' {report}' for report in reports.values())
        )

      def read(at: int = at) -> tuple[contents.Checkpoint, dict[str, Any]]:
        found = self.checkpoint(series, at)
        if series == 'latest':
          self._saver.keep_data([found.record['data']])
          # Read the manifest again: if it still exists, the mark is in time.
          found = self.checkpoint(series, at)
        restoring.check_config(found, self.directory, self._declared)
        with found.reading():
          # Only the best value is restored, but without its weights it is void.
          if state.get('experiment_module') is None:
            arrays.verify(found.data, found.described, reads=False)
          return found, self._read(found, state, module)

      try:
        return restoring.call_in_all_processes(read)
      except store_lib.DamagedError as e:
        if not distributed.broadcast_from_process_0(at in self.steps(series)):
          continue  # It was removed during the read. Look for the next one.
        logging.error('%s Trying an earlier one.', e)
        reports[at] = str(e)

  def _read_foreign(
    self, state: Any, module: Any
  ) -> tuple[str, dict[str, Any]]:
    """Reads the checkpoint of `restore_from`; fails if it is removed."""
    config = self.directory.config
    found = restoring.find_foreign(config.restore_from)
    found.allow_pickle = self._allow_pickle

    def read() -> dict[str, Any]:
      with found.reading():
        if config.restore_rules:
          rules = [(rule[0], rule[1]) for rule in config.restore_rules]
          return {'experiment_module': found.read_by_rules(module, rules)}
        return self._read(found, state, module)

    return found.name, restoring.call_in_all_processes(read)

  def _read(
    self, found: contents.Checkpoint, state: Any, module: Any
  ) -> dict[str, Any]:
    entries = found.entries([k for k in state if k != 'experiment_module'])
    entries = restoring.place(entries, state, found.name)
    if state.get('experiment_module') is not None:
      entries['experiment_module'] = found.snapshot(module)
    return entries
