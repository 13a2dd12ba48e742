"""Checkpoints on a disk or in a bucket: whole or not there, resumable.

A save goes one way. `save` copies the state to host memory (`contents`) and
returns. A background thread waits until the logs are safe, writes the arrays
into fresh data (`arrays`) and, as its last file, the manifest. Then it retires
the checkpoints that need not be kept, and collects data that no manifest names
(`manager`).

`restore` takes the newest manifest, compares the configs, checks that the
checkpoint fits the experiment and reads each part once, verifying it. If a part
is damaged, all processes take the checkpoint before.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent import futures
import contextlib
import functools
import os
import pathlib
import threading
import time
from typing import Any, TypeVar

from absl import logging
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np

from jaxline import async_lib
from jaxline import base_config
from jaxline import disk
from jaxline import distributed
from jaxline import errors
from jaxline.checkpoint import arrays
from jaxline.checkpoint import base
from jaxline.checkpoint import contents
from jaxline.checkpoint import inspection
from jaxline.checkpoint import manager
from jaxline.checkpoint import memory
from jaxline.checkpoint import notes
from jaxline.checkpoint import owner
from jaxline.checkpoint import spool
from jaxline.checkpoint import store as store_lib

_SEED = 'the snapshot that the program put into utils.GLOBAL_CHECKPOINT_DICT'
# How often an evaluation lists the checkpoints in a bucket.
_BUCKET_POLL_SECS = 5.0
_T = TypeVar('_T')


class ConfigChangedError(errors.UsageError):
  """A checkpoint in the run's directory was made with another config."""


class DurableCheckpointer(notes.NotingCheckpointer):
  """Keeps checkpoints below `config.checkpoint_dir`.

  On several hosts all must see that directory, and all call `save` and
  `restore` at the same steps. With `reads_only` a checkpoint may vanish while
  it is read, and then the next is tried.
  """

  collective = True
  is_resumable = True

  def __init__(self, config: config_dict.ConfigDict, mode: str):
    """Reads the config; touches no file.

    Args:
      config: the run's, resolved.
      mode: the run's mode, or its half's: 'train', 'eval'. One that begins
        with 'eval' only reads the series `latest`.
    """
    super().__init__(config, mode)
    self._declared = base.Module()  # Of its config, by the experiment's class.
    self._allow_pickle = bool(config.checkpoint_allow_pickle)
    self._live = threading.local()
    # One thread for all series: on several hosts the processes meet while
    # they write, and must do so in one order.
    self._writer = async_lib.SerialExecutor('checkpoint')
    self._saving: futures.Future[None] | None = None
    # Of the series that are saved; only the first process has a claim on them.
    self._claims: dict[str, owner.Claim | None] = {}
    # Of `latest`: the manifest that was restored, and the step that is there,
    # or is being saved.
    self._restored: dict[str, Any] = {}
    self._held_step: int | None = None
    self._mark = manager.Mark(self._store, mode)
    # Damaged manifests -> their versions. A step may be made anew.
    self._damaged: dict[tuple[str, int], Any] = {}

  # The protocol.

  def get_experiment_state(self, ckpt_series: str) -> Any:
    """Returns the calling thread's live state of the series."""
    # Programs written against JAXline look at the series there.
    memory.add_series(ckpt_series)
    state = base.ExperimentState()
    return vars(self._live).setdefault(ckpt_series, state)

  def save(self, ckpt_series: str) -> None:
    """Copies the live state to host memory, and has it written.

    Raises:
      TypeError: something in it can only be pickled.
      Exception: what an earlier save failed with.
    """
    self.claim(ckpt_series)
    if self._saving is not None:  # Host memory holds one copy of the state.
      futures.wait([self._saving])
    self.raise_error()
    state = self.get_experiment_state(ckpt_series)
    module = base.Module.of(state.get('experiment_module'))
    config, step = self._config, int(state['global_step'])
    content, added = None, {}
    if ckpt_series == 'best':
      added = contents.added(state, self._allow_pickle)
    # The library's own evaluation changes nothing that a checkpoint holds.
    if not (added and module.IS_SHARDED and step == self._held_step):
      kind = 'best' if ckpt_series == 'best' else 'train'
      content = contents.content(
        ckpt_series,
        state,
        module,
        self._recorded,
        all_hosts=config[f'{kind}_checkpoint_all_hosts'],
        allow_pickle=self._allow_pickle,
      )
    # Now: the flushes do not wait for what later steps log.
    logs = self.logs if ckpt_series == 'latest' else ()
    flushes = [log.flush_async() for log in logs]
    published = self._published(ckpt_series, step, module)
    if ckpt_series == 'latest':
      self._held_step = step
    self._saving = self._writer.submit(
      self._write, ckpt_series, step, flushes, content, added, published
    )
    keep = base.num_to_keep(config, ckpt_series, module)
    # A call of its own: the next save waits for the copy, not for removals.
    self._writer.put(functools.partial(self._retire, ckpt_series, keep))

  def begin_training(self, experiment_class: Any) -> None:
    """Moves to another directory if another training of this process is here.

    `platform` does it before it opens the logs; a program that makes its own
    checkpointer and calls `train.train` with several classes has it done here.
    """
    config = self._recorded | {'checkpoint_dir': self._run.url}
    directory = memory.run_directory(experiment_class, config)
    if directory != config['checkpoint_dir']:
      self.close()
      self._move(directory)
      self._recorded['checkpoint_dir'] = directory
      self.saved_step = None
      self.has_moved = True

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether there is something to restore.

    Raises:
      ClaimedError: another process writes to the series.
    """
    if not self._follows:
      self.claim(ckpt_series)
    return (
      self._has_any(ckpt_series) or self._beginning(ckpt_series) is not None
    )

  def restore_path(self, ckpt_series: str) -> str | None:
    """Returns the place of the newest checkpoint, or None."""
    found = self._candidates(ckpt_series)
    return f'{self._store}/{ckpt_series}/{found[0]}' if found else None

  def restore(self, ckpt_series: str, step: int | None = None) -> None:
    """Restores a checkpoint into the calling thread's live state.

    Only the entries of the live state are restored. Where this run has no
    checkpoint yet, it begins from the snapshot that the program has put into
    `utils.GLOBAL_CHECKPOINT_DICT`, or else from `config.restore_from`.

    Args:
      ckpt_series: the series.
      step: which checkpoint; None is the newest that is whole. One that is
        damaged is reported and passed over.

    Raises:
      ValueError: there is none, or the run has another config.
      MismatchError: it does not fit the experiment.
      DamagedError: it is damaged, and there is none before it.
    """
    state = self.get_experiment_state(ckpt_series)
    module = base.Module.of(state.get('experiment_module'))
    if module.live is not None:
      self._declared = base.Module.of(type(module.live))
    if not self._follows:
      self.claim(ckpt_series)
    begin = None
    if step is None and not self._has_any(ckpt_series):
      begin = self._beginning(ckpt_series)
    what = f'Began the series {ckpt_series!r} from'
    source, unused = _SEED, ''
    if begin is None:
      found, entries = self._read_own(ckpt_series, step, state, module)
      what, source = 'Restored', found.name
      if step is None and memory.seed(ckpt_series) is not None:
        unused = _SEED
    elif isinstance(begin, inspection.Found):
      source = begin.name
      other = contents.Checkpoint(*begin, self._allow_pickle)
      with manager.naming(other.name):
        entries = _together(lambda: self._read(other, state, module, True))
    else:
      entries = memory.entries_of(begin, ckpt_series, state)
      entries = {key: _placed(key, entries, state) for key in entries}
      if self._forks:
        unused = f'config.restore_from = {self._config.restore_from!r}'
    memory.fill(state, entries)
    logging.info('%s %s.', what, source)
    if unused:
      logging.warning('%s is not used: there is %s.', unused, source)
    if ckpt_series == 'latest':
      self._restored = {} if begin is not None else found.record
      self._held_step = self._restored.get('step')
    if begin is not None:
      return
    if ckpt_series == 'latest':
      self.saved_step = self._held_step
      self.lengths = self._local(found.record['logs'])
    if module.live is not None and not self._follows:
      published = self._published(ckpt_series, found.record['step'], module)
      memory.publish(ckpt_series, published)

  def follow(self, ckpt_series: str) -> Callable[[Collection[int]], bool]:
    """Returns a function that restores the next checkpoint to evaluate.

    Checkpoints are restored in the order of their steps, each once: one whose
    step is made anew has other data.
    """
    seen: dict[int, str] = {}  # Of steps that need not be looked at again.
    evaluated: set[str] = set()
    # Steps that are evaluated with a checkpoint. Another step that is evaluated
    # had none; it cannot be made anew.
    had_data: set[int] = set()
    begun, looked = None, -_BUCKET_POLL_SECS

    def next_step(done: Collection[int]) -> int | None:
      nonlocal begun, looked, evaluated
      if isinstance(self._run, store_lib.Bucket):
        if time.monotonic() - looked < _BUCKET_POLL_SECS:
          return None
        looked = time.monotonic()
      # Only a training that begins again makes a step anew.
      if (version := self._run.version(base_config.RECORD)) != begun:
        noted = [x for x in self._own_notes() if x.data]
        begun, evaluated = version, {x.data for x in noted}
        had_data.update(x.step for x in noted)
        seen.clear()
      for step in reversed(self._candidates(ckpt_series)):
        if step not in seen and (step not in done or step in had_data):
          with contextlib.suppress(store_lib.DamagedError):  # See `restore`.
            data = self._manifests.read(ckpt_series, step)['data']
            if data in evaluated:
              seen[step] = data
              continue
          return step
      return None

    def restore_next(done: Collection[int]) -> bool:
      nonlocal looked
      is_chief = jax.process_index() == 0
      while True:
        step = distributed.of_chief(next_step(done) if is_chief else None)
        if step is None:
          break
        looked = -_BUCKET_POLL_SECS
        try:
          self.restore(ckpt_series, step)
        except store_lib.DamagedError:
          continue  # It was reported, or has been removed meanwhile.
        seen[step] = self._restored['data']
        evaluated.add(seen[step])
        had_data.add(step)
        return True
      # Before the run's first checkpoint there may be what it starts from.
      seed = None if self._has_any(ckpt_series) else self._seed(ckpt_series)
      if seed is None or memory.step_of(seed) in done:
        return False
      self.restore(ckpt_series)
      state = self.get_experiment_state(ckpt_series)
      return int(state.global_step) not in done

    return restore_next

  def is_new(self) -> bool:
    """Returns whether the run has no checkpoint of its own yet."""
    return not self._has_any('latest')

  def wait_for_checkpointing_to_finish(self) -> None:
    """Returns when everything saved is safe.

    Raises:
      Exception: what a save failed with.
    """
    self._writer.wait()

  # What the loops ask for besides.

  def when_saved(self, fn: Callable[[], None]) -> None:
    """Calls a function, on the writing thread, once all so far is saved."""
    self._writer.submit(fn)

  def raise_error(self) -> None:
    """Raises what a save in the background failed with; costs nothing."""
    self._writer.raise_error()

  def close(self) -> None:
    """Waits for the saves, and gives back what was claimed."""
    with contextlib.suppress(Exception):  # Raised where training sees it.
      self._writer.wait()
    self._keep_data(())
    for claim in filter(None, self._claims.values()):
      claim.release()
    self._claims.clear()

  def check_config(self, experiment_class: Any = None) -> None:
    """Compares the newest checkpoint's config with this run's.

    Args:
      experiment_class: what constructs the experiment. What it declares of its
        config counts (`CHANGEABLE_ON_RESUME`, `CONFIG_CLASS`); where it is
        neither a class nor a partial of one, only a restore compares.

    Raises:
      ConfigChangedError: a key that makes another run differs.
      UsageError: `restore_from` names no checkpoint.
    """
    if self._forks and not self._has_any('latest'):
      _foreign(self._config.restore_from)
    while isinstance(experiment_class, functools.partial):
      experiment_class = experiment_class.func
    if isinstance(experiment_class, type):
      self._declared = base.Module.of(experiment_class)
    elif experiment_class is not None:
      return
    for step in self._candidates('latest')[:1]:
      # One that is damaged is found to be so by `restore`.
      with contextlib.suppress(store_lib.DamagedError):
        self._check_config(self._checkpoint('latest', step))

  def check_shared(self) -> None:
    """Refuses a directory that not all processes share.

    Raises:
      UsageError: naming the processes that do not see the first one's files.
    """
    if jax.process_count() == 1:
      return
    # A name that nobody has asked for yet: a network file system may go on
    # saying for a while that an old one is not there.
    key = distributed.of_chief(f'.shared-{os.urandom(4).hex()}')
    is_writing = jax.process_index() == 0 and not self.reads_only
    if self.reads_only:
      key = base_config.RECORD
    elif is_writing:
      self._run.write(key, b'')
    distributed.of_chief(None)  # The others look once it is there.
    is_there = self._run.version(key) is not store_lib.NEW
    seen = multihost_utils.process_allgather(np.bool_(is_there))
    if is_writing:
      self._run.delete(key)
    if seen[0] and not seen.all():
      raise errors.UsageError(
        f'config.checkpoint_dir is {self._config.checkpoint_dir!r} in process'
        f' {jax.process_index()}, but processes'
        f' {np.flatnonzero(~seen).tolist()} do not see there what process 0'
        ' writes. All processes save together: give all the same directory,'
        ' on a disk that all of them share.'
      )

  def claim(self, ckpt_series: str) -> None:
    """Takes the right to save a series.

    The first use of a series that is saved calls it. A loop calls it earlier
    where a series that is in use has to be an error before the first save.

    Raises:
      ClaimedError: another process has it.
    """
    if ckpt_series in self._claims:
      return
    is_chief = jax.process_index() == 0
    claim = owner.Claim(self._run.url, ckpt_series) if is_chief else None
    distributed.of_chief(None)  # The others look at what is there now.
    self._claims[ckpt_series] = claim

  def mark_begun(self, step: int) -> None:
    """Notes that training goes on from a step, with this config.

    Raises:
      TypeError: a save could not store something in the live state.
    """
    state = self.get_experiment_state('latest')
    module = base.Module.of(state.get('experiment_module'))
    if not self._allow_pickle and module.live is not None:
      contents.check_storable(state, module)
    super().mark_begun(step)
    if jax.process_index() == 0:
      # Their steps are made anew.
      self._manifests.retire('latest', self._damaged_steps('latest'))
      self._writer.put(self._clean)

  def _clean(self) -> None:
    """Removes what kills have left, on the writing thread."""
    contents.code()  # As it is now: it may be edited before the first save.
    self._manifests.doom_all()
    self._manifests.collect()

  # The rest of a save, on the writing thread.

  def _write(
    self,
    series: str,
    step: int,
    flushes: Sequence[Callable[[], Any]],
    content: contents.Content | None,
    added: dict[str, Any],
    published: memory.Published,
  ) -> None:
    """Writes a checkpoint.

    Args:
      series: the series.
      step: the step.
      flushes: wait until what was logged before it is safe, and return lengths.
      content: a copy of the live state; None if that is `latest` of this step.
      added: what the best one has besides.
      published: what programs written against JAXline will look at.
    """
    lengths = self._relative(notes.merged(flush() or {} for flush in flushes))
    spool.upload(self._run.url, lengths)
    manifest = self._latest(step) if series == 'best' else {}
    if content is not None:
      data = distributed.decide(None, lambda _: manager.new_data(step))
      if series == 'best':
        self._keep_data({data, manifest.get('data', data)})
      has_evaluated = series == 'best' and step == self._held_step
      if not (has_evaluated and self._are_same(content, manifest)):
        manifest = self._write_data(content, data, lengths)

    def publish(unused: Any) -> None:
      claim = self._claims[series]
      assert claim is not None
      claim.check()
      more = {}
      if series == 'best':
        more = added | {'entries': manifest['entries'] | added['entries']}
        # Later than any other best one, also if the clock is not.
        steps = self._candidates('best')[:1]
        times = [self._manifests.read('best', s)['time'] + 1 for s in steps]
        more['time'] = max([time.time(), *times])
      self._manifests.write(series, manifest | more)
      logging.info('Saved %s/%s/%s.', self._store, series, step)

    distributed.decide(None, publish)
    if series == 'latest':
      self.saved_step = step
      self._read_notes()
    memory.publish(series, published)

  def _are_same(
    self, content: contents.Content, manifest: dict[str, Any]
  ) -> bool:
    """Returns whether a manifest's checkpoint holds all of a content."""
    process = jax.process_index()
    is_same = bool(manifest) and (
      manifest['module'] == content.manifest['module']
      and manifest['entries'].items() <= content.manifest['entries'].items()
      and manifest['processes'][process] == content.process
      and arrays.are_same(content.arrays, manifest['arrays'])
    )
    return distributed.decide(is_same, all)

  def _write_data(
    self,
    content: contents.Content,
    data: str,
    lengths: dict[str, int],
  ) -> dict[str, Any]:
    """Writes the arrays of a content; returns its manifest, in process 0.

    Args:
      content: what is written.
      data: the name of the data.
      lengths: of this process's logs.
    """
    error = None
    try:
      place = self._store.below(f'data/{data}')
      described = arrays.write(place, content.arrays)
    except Exception as e:
      error, described = e, {}
    mine = described, content.process, lengths
    all_of: list[Any] = []  # In process 0.
    try:
      distributed.decide(mine, all_of.extend, error)
    except Exception as e:
      # On a full disk, the half of it is in the way.
      with contextlib.suppress(OSError):
        self._store.delete_folder(f'data/{data}')
      if not isinstance(e, OSError):
        raise
      error = disk.failed_write(e, pathlib.Path(self._store.url))
      error.strerror = (
        f'{error.strerror}; what was written of the checkpoint was removed, and'
        ' those before it are untouched'
      )
      raise error from None
    for others, _, _ in all_of[1:]:
      for name, about in others.items():
        described[name]['parts'].update(about['parts'])
    return content.manifest | {
      'data': data,
      'arrays': described,
      'processes': [process for _, process, _ in all_of],
      'logs': notes.merged(lengths for _, _, lengths in all_of),
      'code': contents.code(),
    }

  def _retire(self, series: str, num_to_keep: int) -> None:
    """Removes the checkpoints of a series that need not be kept."""
    if jax.process_index() != 0 or self._writer.error is not None:
      return
    manifests = self._manifests
    gone = self._damaged_steps(series)
    whole = [s for s in manifests.by_time(series) if s not in gone]
    if series == 'best':
      # The best is the one that was saved last, of whichever step.
      gone += whole[num_to_keep:]
    else:
      hours = self._config.keep_checkpoint_every_hours
      gone += manager.removable(
        [
          (s, manifests.brief(series, s)['time'] if hours else 0) for s in whole
        ],
        num_to_keep,
        self._config.keep_checkpoint_every_steps,
        hours,
      )
    manifests.retire(series, gone)
    manifests.collect()

  def _keep_data(self, data: Collection[str]) -> None:
    """Marks data, so that the training beside this evaluation keeps it."""
    if jax.process_index() != 0 or self.reads_only or not self._follows:
      return
    # What was marked before may have been kept for the mark alone.
    self._manifests.doom(self._mark.data - {*data})
    if data:
      self._mark.keep(data)
    else:
      self._mark.drop()
    self._manifests.collect()

  def _latest(self, step: int) -> dict[str, Any]:
    """Returns the manifest of `latest` of a step; {} if there is none."""
    if self._follows:
      return self._restored
    with contextlib.suppress(store_lib.DamagedError):
      return self._manifests.read('latest', step)
    return {}

  def _data_of(self, step: int) -> str:
    return self._latest(step).get('data', '')

  def _published(
    self, series: str, step: int, module: base.Module
  ) -> memory.Published:
    """Returns a checkpoint as programs written against JAXline look at it.

    Args:
      series: the series.
      step: of the checkpoint, which may not be there yet.
      module: what is saved; not kept, since it holds the live arrays.
    """
    template = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
      dict(module.snapshot_template()),
    )
    attributes = dict(module.CHECKPOINT_ATTRS)
    manifests, allow_pickle = self._manifests, self._allow_pickle

    def read() -> Any:
      # A client's signal handler may call it: it waits for no other process.
      entries = contents.read_whole(
        manifests, series, step, template, allow_pickle
      )
      return memory.nest_of(entries, attributes)

    return memory.Published(step, read)

  # Restoring.

  @property
  def _forks(self) -> bool:
    return bool(self._config.restore_from) and not self._follows

  def _has_any(self, ckpt_series: str) -> bool:
    """Returns whether the first host sees a checkpoint."""
    return distributed.of_chief(bool(self.steps(ckpt_series)))

  def _beginning(
    self, ckpt_series: str
  ) -> memory.SnapshotNT | inspection.Found | None:
    """Returns what a series without checkpoints of its own begins from.

    Returns:
      The program's snapshot, or the checkpoint of another run, or None.
    """
    seed = self._seed(ckpt_series)
    if seed is None and self._forks and ckpt_series == 'latest':
      return _foreign(self._config.restore_from)
    return seed

  def _seed(self, ckpt_series: str) -> memory.SnapshotNT | None:
    """Returns the snapshot that the program has put in.

    Each process has its own.

    Raises:
      ValueError: not all processes have one, or not of the same step.
    """
    seed = memory.seed(ckpt_series)
    if jax.process_count() > 1:
      step = -1 if seed is None else memory.step_of(seed)
      steps = multihost_utils.process_allgather(np.int32(step)).tolist()
      if len(set(steps)) > 1:
        raise ValueError(
          'The snapshots in utils.GLOBAL_CHECKPOINT_DICT are of the steps'
          f' {steps} in the processes (-1 is none); put one of the same step'
          ' into each process, or none.'
        )
    return seed

  def _checkpoint(self, series: str, step: int) -> contents.Checkpoint:
    return contents.Checkpoint(
      self._manifests, series, step, self._allow_pickle
    )

  def _damaged_steps(self, series: str) -> list[int]:
    """Returns the steps whose checkpoints were found to be damaged."""
    return [
      step
      for (of, step), version in self._damaged.items()
      if of == series and self._store.version(f'{of}/{step}.json') == version
    ]

  def _candidates(self, series: str) -> list[int]:
    """Returns the steps to try, newest first."""
    damaged = self._damaged_steps(series)
    return [s for s in self._manifests.by_time(series) if s not in damaged]

  def _read_own(
    self, series: str, step: int | None, state: Any, module: base.Module
  ) -> tuple[contents.Checkpoint, dict[str, Any]]:
    """Reads a checkpoint of the run: the newest that is whole, or a step's.

    Returns:
      The checkpoint, and what it has for the entries of the live state.
    """
    reports: list[str] = []
    while True:
      steps = [s for s in self._candidates(series) if step in (None, s)]
      at = distributed.of_chief(steps[0] if steps else None)
      if at is None:
        gone = ValueError if step is None else store_lib.GoneError
        raise (store_lib.DamagedError if reports else gone)(
          f'The series {series!r} in {self._store} has no checkpoint'
          + (f' of step {step}' if step is not None else '')
          + (' that is whole' if reports else '')
          + f'; its steps are {self.steps(series)}.'
          + ''.join(f' {report}' for report in reports)
        )
      key = f'{series}/{at}.json'
      version = self._store.version(key)

      def read(at: int = at) -> tuple[contents.Checkpoint, dict[str, Any]]:
        found = self._checkpoint(series, at)
        if series == 'latest':
          self._keep_data([found.record['data']])
          found = self._checkpoint(
            series, at
          )  # The mark counts if it is there.
        with manager.naming(found.name):
          return found, self._read(found, state, module)

      try:
        return _together(read)
      except store_lib.DamagedError as e:
        is_there = self._store.version(key) is not store_lib.NEW
        if not distributed.of_chief(is_there):
          continue  # It was removed while it was read: there may be another.
        self._damaged[series, at] = version
        logging.error('%s It is passed over.', e)
        reports.append(str(e))

  def _read(
    self,
    found: contents.Checkpoint,
    state: Any,
    module: base.Module,
    is_foreign: bool = False,
  ) -> dict[str, Any]:
    """Returns what a checkpoint has for the entries of the live state."""
    if not is_foreign:
      self._check_config(found)
    if is_foreign and self._config.restore_rules:
      rules = [(rule[0], rule[1]) for rule in self._config.restore_rules]
      return {'experiment_module': found.by_rules(module, rules)}
    entries = found.entries([k for k in state if k != 'experiment_module'])
    entries = {key: _placed(key, entries, state) for key in entries}
    if module.live is not None:
      entries['experiment_module'] = found.snapshot(module)
    return entries

  def _check_config(self, found: contents.Checkpoint) -> None:
    """Refuses a checkpoint of another run, in the same directory."""
    changes = base_config.changes(
      found.record['config'], self._recorded, self._declared
    )
    if not changes:
      return
    text = '\n'.join(f'  config.{line}' for line in changes)
    if self._follows or self._config.on_config_change == 'continue':
      logging.log_first_n(
        logging.WARNING,
        '%s was made with another config:\n%s', 1, found.name, text,
      )  # fmt: skip
      return
    raise ConfigChangedError(
      f'{found.name} was made with another config, and going on would mix two'
      f' runs:\n{text}\nGive this run another config.checkpoint_dir (with'
      ' config.restore_from to begin from here), or set'
      " config.on_config_change = 'continue' to go on with the new values."
    )


def _together(read: Callable[[], _T]) -> _T:
  """Calls a function in all processes; what one finds damaged, all raise.

  Raises:
    DamagedError: a process found it damaged.
  """
  error: store_lib.DamagedError | None = None
  try:
    result = read()
  except store_lib.DamagedError as e:
    error = e
  if jax.process_count() > 1:
    said = multihost_utils.process_allgather(np.bool_(error is not None))
    if said.any() and error is None:
      error = store_lib.DamagedError(
        f'Processes {np.flatnonzero(said)} say so.'
      )
  if error is not None:
    raise error
  return result


def _placed(name: str, entries: dict[str, Any], state: Any) -> Any:
  """Returns a restored entry, put where the live one is.

  The keys of the per-device style are one for each local device, all the
  same; on another number of devices there are more or fewer.

  Raises:
    contents.MismatchError: it is of another type, or shape.
  """
  value, live = entries[name], state.get(name)
  if not isinstance(live, jax.Array):
    return value
  if isinstance(value, np.ndarray):
    value = jnp.asarray(value)
  got = getattr(value, 'dtype', type(value).__name__), np.shape(value)
  # A raw key is a row of numbers itself.
  rows = live.ndim - (not arrays.is_key(live))
  if got[0] == live.dtype and rows == 1 and got[1][1:] == live.shape[1:]:
    value = jnp.broadcast_to(value[:1], live.shape)
  elif got != (live.dtype, live.shape):
    raise contents.MismatchError(
      f'{name}: the checkpoint has {got[0]}{list(got[1])}, expected'
      f' {live.dtype}{list(live.shape)}; nothing was restored.'
    )
  return jax.device_put(value, live.sharding)


def _foreign(where: str) -> inspection.Found:
  """Returns the checkpoint that `restore_from` means.

  Raises:
    UsageError: there is none; says which there are.
  """
  try:
    found = inspection.newest(where)
  except ValueError as e:
    raise errors.UsageError(f'config.restore_from is {where!r}: {e}') from e
  return found._replace(step=distributed.of_chief(found.step))
